"""Everything that is known of a function and of what a compiler made of it: what findings of an audit look at."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final, get_args

import attrs
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from shardrules.analysis.audits.likeness import Shapes, split_shapes
from shardrules.analysis.compiling.arguments import Argument
from shardrules.analysis.compiling.compile import Compiled
from shardrules.analysis.compiling.constraints import Constraint, constraints
from shardrules.analysis.compiling.model_flops import AskedMatmul, matmul_flops, without_dead_code
from shardrules.analysis.compiling.roles import BATCH, PARAMETERS, STATE, Role
from shardrules.analysis.compiling.source import equation_line, users_line
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import Matmul
from shardrules.analysis.program.flow import Value
from shardrules.analysis.program.program import CompiledProgram
from shardrules.analysis.program.text import ArrayType, Instruction
from shardrules.core.spec import axis_names, entries, shard_shape, spec_repr

_NUMBER = re.compile(r"args\[(\d+)\]")
_NEAR = 24
"""How many values to look at for the arguments behind one."""

_GATHERS = ("all-gather", "all-gather-start", "all-gather-done", "async-start", "async-done")


@final
@attrs.frozen
class MemoryUse:
    """What one device needs for a program, by what it is for.

    **Arguments:**

    - `parameters_bytes`, `state_bytes`, `batch_bytes`: the arguments.
    - `padding_bytes`: what the layouts of arguments add to that: TPUs pad arrays to tiles.
    - `outputs_bytes`: the results that are not written over arguments.
    - `temporaries_bytes`: everything in between: activations, gathered parameters, buffers of collectives.

    ```python
    assert MemoryUse(8, 16, 4, 0, 2, 10).peak_bytes == 40
    ```
    """

    parameters_bytes: int
    state_bytes: int
    batch_bytes: int
    padding_bytes: int
    outputs_bytes: int
    temporaries_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it together."""
        return sum(self.shares().values())

    def shares(self) -> dict[str, int]:
        """Returns the bytes of each category, by its name as it is printed."""
        return dict(zip((*get_args(Role), "padding", "outputs", "temporaries"), attrs.astuple(self), strict=True))


@final
@attrs.frozen(eq=False)
class Evidence:
    """What is known of a compiled function.

    **Arguments:**

    - `compiled`: what the compiler gave.
    - `program`: the same, read.
    - `arguments`, `roles`: the arrays that it takes, and what they are for.
    - `collectives`, `matmuls`: what it sends and multiplies.
    - `sizes`: the axes of the mesh.
    - `hardware`: what it is to run on.
    """

    compiled: Compiled
    program: CompiledProgram
    arguments: tuple[Argument, ...]
    roles: tuple[Role, ...]
    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...]
    sizes: Mapping[str, int]
    hardware: Hardware
    _shapes: dict[tuple[str, ...], Shapes] = attrs.field(factory=dict, init=False)

    @functools.cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The arrays whose sharding the function constrains."""
        return tuple(constraints(self.compiled.jaxpr))

    @functools.cached_property
    def asked_matmuls(self) -> tuple[AskedMatmul, ...]:
        """The matmuls that the function itself asks for."""
        return tuple(matmul_flops(without_dead_code(self.compiled.jaxpr)))

    @functools.cached_property
    def flops_by_line(self) -> Mapping[str, tuple[int, int]]:
        """For each line of code the FLOPs that it asks for, and those that all devices do for it together.

        Only of lines that say how often they run, and of which compilers make nothing else.
        """
        asked: dict[str, int] = {}
        unclear: dict[str, None] = {}
        for matmul in self.asked_matmuls:
            line = equation_line(matmul.equation)
            asked[line] = asked.get(line, 0) + matmul.flops
            unclear |= {} if matmul.is_certain else {line: None}
        done = {line: 0 for line in asked if line not in unclear}
        for one in self.matmuls:
            line = users_line(one.stack)
            if line in done and not one.op_name.endswith("/fft"):  # compilers make matmuls of other things, too
                done[line] += self.program.device_count * one.total_flops
        return {line: (asked[line], flops) for line, flops in done.items()}

    @property
    def flops_ratio(self) -> float:
        """How many times as many FLOPs the devices do as the function asks for; 1 where it asks for none."""
        asked = sum(own for own, _ in self.flops_by_line.values())
        return sum(done for _, done in self.flops_by_line.values()) / asked if asked else 1.0

    @functools.cached_property
    def numbers(self) -> Mapping[str, int]:
        """For the name of each parameter of the program the number of the argument that it is."""
        found = {}
        for one in self.program.entry_computation.parameters:
            number = _NUMBER.search(one.op_name)
            found[one.op_name] = int(number[1]) if number else int(one.literal)
        return found

    @functools.cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """What each argument takes on one device, without the padding of a layout."""
        found = [0] * len(self.arguments)
        for one in self.program.entry_computation.parameters:
            found[self.numbers[one.op_name]] = one.nbytes
        if self.compiled.memory.host_argument_bytes:  # else the compiler counts what lies there as the device's
            return tuple(0 if one.memory else size for one, size in zip(self.arguments, found, strict=True))
        return tuple(found)

    @functools.cached_property
    def memory(self) -> MemoryUse:
        """What one device needs, by what it is for. It adds up to what the compiler says."""
        by_role = dict.fromkeys(get_args(Role), 0)
        for size, role in zip(self.device_bytes, self.roles, strict=True):
            by_role[role] += size
        told = self.compiled.memory
        return MemoryUse(
            by_role[PARAMETERS],
            by_role[STATE],
            by_role[BATCH],
            told.argument_bytes - sum(by_role.values()),
            told.output_bytes - told.alias_bytes,
            told.temporary_bytes,
        )

    def named(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Returns the paths of arguments, of which the program knows its own names.

        **Arguments:**

        - `arguments`: names of parameters of the program, or empty texts.

        **Returns:**

        As many paths.
        """
        return tuple(self.arguments[self.numbers[name]].path if name in self.numbers else "" for name in arguments)

    @functools.cached_property
    def idle_axes(self) -> tuple[str, ...]:
        """The axes that split no parameter."""
        specs = [one.spec for one, role in zip(self.arguments, self.roles, strict=True) if role == PARAMETERS]
        used = dict.fromkeys(name for spec in specs if spec is not None for name in axis_names(spec))
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in used)

    @functools.cached_property
    def has_gradients(self) -> bool:
        """Whether JAX has made gradients in it: operations of the backward pass then say so in their names."""
        return any("transpose(" in one.op_name for one in self.matmuls)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the examples of the batch are split, or their positions, as it was compiled.

        The last dimension of floats is that of features, and the axes which split it are not among these.
        """

        def dims(one: Argument) -> int:
            return len(one.shape) - (jnp.issubdtype(one.dtype, jnp.floating) and len(one.shape) > 1)

        return self._axes_of_batch(dims)

    @functools.cached_property
    def example_axes(self) -> tuple[str, ...]:
        """The axes over which the examples of the batch are split: its first dimension."""
        return self._axes_of_batch(lambda one: 1)

    def _axes_of_batch(self, dims: Callable[[Argument], int]) -> tuple[str, ...]:
        names: list[str] = []
        for one, role, at in zip(self.arguments, self.roles, self.compiled.arguments, strict=True):
            if role == BATCH and isinstance(at, NamedSharding):
                names += [name for entry in entries(at.spec, len(one.shape))[: dims(one)] for name in entry]
        return tuple(name for name in self.sizes if name in names)

    def may_be_parameter(self, one: Collective, array: ArrayType) -> bool:
        """Tells whether what comes out of a collective may be a parameter, or the gradient of one.

        **Arguments:**

        - `one`: the collective.
        - `array`: an array of it.

        **Returns:**

        Whether its shape may be that of one. Where no matmul follows, it may be cut otherwise than any parameter is.
        """
        known = self._parameter_shapes(() if one.kind == "reduce-scatter" else one.crossed)
        if known.has(array.shape):
            return True
        computation = self.program.find(one.computation)
        uses = self.program.downstream(computation, computation.by_name[one.name])
        return known.has(array.shape, in_parts=True) and not any(each.name in self._matmuls_by_name for each in uses)

    def _parameter_shapes(self, whole: tuple[str, ...]) -> Shapes:
        """What a device may have of a parameter that the axes in `whole` do not split. Of those stacked for a loop, one
        layer counts too."""
        if whole not in self._shapes:
            sizes = {name: size for name, size in self.sizes.items() if name not in whole}
            found = [one.shape for one, role in zip(self.arguments, self.roles, strict=True) if role == PARAMETERS]
            shapes = dict.fromkeys(shape for shape in (*found, *(shape[1:] for shape in found)) if shape)
            self._shapes[whole] = Shapes.of(local for shape in shapes for local in split_shapes(shape, sizes))
        return self._shapes[whole]

    @functools.cached_property
    def asked_shapes(self) -> Shapes:
        """What a device has of each array of which the function or its caller says how it is split."""
        results = [(tuple(one.struct.shape), one.asked.spec) for one in self.compiled.results if one.asked is not None]
        said = [(shape, spec) for shape, spec, _ in self.constraints]
        return Shapes.of(shard_shape(shape, spec, self.sizes) for shape, spec in (*results, *said))

    @functools.cached_property
    def argument_shapes(self) -> Shapes:
        """What a device has of each argument."""
        return Shapes.of(one.types[0].shape for one in self.program.entry_computation.parameters)

    def behind(self, one: Collective) -> tuple[str, ...]:
        """Finds the arguments with two or more dimensions that the matmul nearest to a collective multiplies.

        **Arguments:**

        - `one`: a collective of the program.

        **Returns:**

        Their paths; none where that cannot be told.
        """
        computation = self.program.find(one.computation)
        moving, line = computation.by_name[one.name], users_line(one.stack)
        if one.kind == "all-gather":  # it is for something that it is gathered
            near = itertools.chain(
                self.program.downstream(computation, moving), self.program.nearby(computation, moving)
            )
        else:
            near = self.program.nearby(computation, moving)
        for each in near:
            matmul = self._matmuls_by_name.get(each.name)
            if matmul is not None and users_line(matmul.stack) == line:  # a wrong name is worse than none
                operands = self.program.find(matmul.computation).by_name[matmul.name].operands[:2]
                numbers = [number for name in operands for number in self._sources(Value(matmul.computation, name))]
                if numbers:
                    return tuple(dict.fromkeys(self.arguments[number].path for number in numbers))
        return ()

    @functools.cached_property
    def _matmuls_by_name(self) -> Mapping[str, Matmul]:
        """The matmuls by the names of their instructions, and of the fusions that they are in."""
        found: dict[str, Matmul] = {}
        for one in self.matmuls:
            found[one.name] = one
            for call in self.program.callers(one.computation):
                if call.instruction.op == "fusion":
                    found.setdefault(call.instruction.name, one)
        return found

    def _sources(self, place: Value) -> Iterator[int]:
        """The arguments that a value is, gathered or not."""
        for _ in range(_NEAR):
            place = self.program.flow.origin(place)
            made = self.program.instruction(place)
            number = self.argument_number(place, made)
            if number is not None and len(self.arguments[number].shape) > 1:
                yield number
            if made.op not in _GATHERS or not made.operands:
                return
            at = place.index if place.index is not None and place.index < len(made.operands) else 0
            place = Value(place.computation, made.operands[at])

    def argument_number(self, place: Value, made: Instruction) -> int | None:
        """Returns the number of the argument that a value is.

        **Arguments:**

        - `place`, `made`: the value.

        **Returns:**

        The number; `None` where it is none.
        """
        if made.op != "parameter" or place.computation != self.program.entry:
            return None
        return self.numbers.get(made.op_name)


def spec_text(at: Sharding) -> str:
    """Returns where an array is, as text.

    **Arguments:**

    - `at`: its sharding.

    **Returns:**

    Its spec, if it has one.
    """
    return spec_repr(at.spec) if isinstance(at, NamedSharding) else str(at)
