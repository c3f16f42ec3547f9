"""The facts about a function and its compiled program that the checks of an audit look at."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import attrs
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from shardrules.core.source import equation_line, user_line
from shardrules.core.spec import axis_names, entries, shard_shape, spec_repr
from shardrules.programs.audits.memory import MemoryUse, argument_bytes, argument_indices, memory_use
from shardrules.programs.audits.shape_matching import ShapeSet, split_shapes
from shardrules.programs.compiled.collectives import Collective, channel
from shardrules.programs.compiled.custom_calls import is_black_box, is_callback
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.flow import LOOP_ROLES, Value
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.kernels import Kernel, find_kernels
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import ArrayType, Instruction
from shardrules.programs.compiled.uses import Use, is_elementwise, is_move, uses
from shardrules.programs.compiling.arguments import Argument
from shardrules.programs.compiling.compile import Compiled
from shardrules.programs.compiling.constraints import Constraint, find_constraints
from shardrules.programs.compiling.model_flops import ModelMatmul, model_matmuls
from shardrules.programs.compiling.roles import BATCH, PARAMETERS, Role
from shardrules.programs.compiling.roundings import Rounding, find_roundings
from shardrules.programs.costs.collective import collective_seconds
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.costs.schedule import PlayedSchedule, play_schedule
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.jaxprs.walk import without_dead_code
from shardrules.programs.machine.hardware import Hardware

_MAX_HOPS = 24
"""How many gathers to follow back from the operand of a matmul to an argument.

Chosen by hand, only to bound the walk: chains of gathers are far shorter, so that neither half nor twice as many
change what is found in a usual program."""

_GATHERS = ("all-gather", "all-gather-start", "all-gather-done", "async-start", "async-done")


_EXPLICIT_MOVES = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ppermute", "pbroadcast", "reduce_scatter", "psum_scatter", "ragged_all_to_all", "reshard"),
)
"""JAX operations that move data because a person wrote them."""


def is_explicit(collective: Collective) -> bool:
    """Whether a person wrote it. The compiler may name a combined collective after any part of its `shard_map`."""
    return collective.op_name.rsplit("/", 1)[-1] in _EXPLICIT_MOVES or "shard_map" in collective.op_name


@final
@attrs.frozen
class Factor:
    """A factor of a matmul, as one device has it, and the paths of the parameters that it is."""

    array: ArrayType
    paths: tuple[str, ...]


@final
@attrs.frozen(eq=False)
class AuditFacts:
    """A compiled function: the compiler's answer, the program read from it, and the roles of its arguments."""

    compiled: Compiled
    program: CompiledProgram
    arguments: tuple[Argument, ...]
    roles: tuple[Role, ...]
    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...]
    sizes: Mapping[str, int]
    """The axes of the mesh."""
    hardware: Hardware
    kernel_facts: KernelFacts = KernelFacts()
    """What is known of kernels beside the program's text."""
    _parameter_shapes: dict[tuple[str, ...], ShapeSet] = attrs.field(factory=dict, init=False)

    @functools.cached_property
    def schedule(self) -> PlayedSchedule:
        """The program's schedule, played."""
        return play_schedule(self.program, self.collectives, self.kernels, self.hardware)

    @property
    def time(self) -> StepTime:
        """The modelled time of the program."""
        return self.schedule.time

    @functools.cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The arrays whose sharding the function constrains."""
        return tuple(find_constraints(self.compiled.jaxpr))

    @functools.cached_property
    def roundings(self) -> tuple[Rounding, ...]:
        """The arrays that the function rounds to 8 bits or fewer."""
        return tuple(find_roundings(self.compiled.jaxpr))

    @functools.cached_property
    def model_matmuls(self) -> tuple[ModelMatmul, ...]:
        """The matmuls of the function itself."""
        return tuple(model_matmuls(without_dead_code(self.compiled.jaxpr)))

    @property
    def model_flops(self) -> int | None:
        """The function's own FLOPs; `None` where a loop of unknown length would make the sum a guess."""
        if not all(matmul.is_certain for matmul in self.model_matmuls):
            return None
        return sum(matmul.flops for matmul in self.model_matmuls)

    @functools.cached_property
    def flops_by_line(self) -> Mapping[str, tuple[int, int]]:
        """For each line of code its FLOPs in the function, and what all devices together compute for it.

        Lines are left out if it is unknown how often they run, or if compilers rewrite them to other FLOPs.
        """
        model_flops: dict[str, int] = {}
        uncertain: dict[str, None] = {}
        for matmul in self.model_matmuls:
            line = equation_line(matmul.equation)
            model_flops[line] = model_flops.get(line, 0) + matmul.flops
            uncertain |= {} if matmul.is_certain else {line: None}
        compiled_flops = {line: 0 for line in model_flops if line not in uncertain}
        for matmul in self.matmuls:
            line = user_line(matmul.stack)
            # Compilers implement FFTs by matmuls, which the function's own count does not have.
            if line in compiled_flops and not matmul.op_name.endswith("/fft"):
                compiled_flops[line] += self.program.device_count * matmul.total_flops
        return {line: (model_flops[line], flops) for line, flops in compiled_flops.items()}

    @property
    def flops_ratio(self) -> float:
        """How many times the function's own FLOPs the devices compute; 1 where it has none."""
        model_flops = sum(flops for flops, _ in self.flops_by_line.values())
        return sum(flops for _, flops in self.flops_by_line.values()) / model_flops if model_flops else 1.0

    @functools.cached_property
    def argument_indices(self) -> Mapping[str, int]:
        """The index of the argument behind each parameter of the program, by the parameter's name."""
        return argument_indices(self.program)

    @functools.cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """The bytes of each argument on one device, without the padding of its layout."""
        return argument_bytes(self.compiled, self.program, self.arguments)

    @functools.cached_property
    def memory(self) -> MemoryUse:
        """What one device needs, by what it is for."""
        return memory_use(self.compiled, self.program, self.arguments, self.roles)

    @functools.cached_property
    def aliased(self) -> frozenset[int]:
        """The indices of the arguments that the compiler writes results over."""
        return frozenset(alias.parameter - self.program.token_count for alias in self.program.aliases)

    def paths_of(self, parameters: Sequence[str]) -> tuple[str, ...]:
        """Returns the paths of arguments from the program's names for them; an unknown name gives an empty path."""
        indices = self.argument_indices
        return tuple(self.arguments[indices[name]].path if name in indices else "" for name in parameters)

    @functools.cached_property
    def idle_axes(self) -> tuple[str, ...]:
        """The axes that split no parameter."""
        specs = [array.spec for array, role in zip(self.arguments, self.roles, strict=True) if role == PARAMETERS]
        used = dict.fromkeys(name for spec in specs if spec is not None for name in axis_names(spec))
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in used)

    @functools.cached_property
    def has_gradients(self) -> bool:
        """Whether it has a backward pass, whose operations JAX names `transpose(...)`."""
        return any("transpose(" in matmul.op_name for matmul in self.matmuls)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch, as it was compiled, along its examples or positions."""

        def dim_count(array: Argument) -> int:
            # The last dimension of floats is their features. Integers are token ids, with positions to the end.
            return len(array.shape) - (jnp.issubdtype(array.dtype, jnp.floating) and len(array.shape) > 1)

        return self._axes_of_batch(dim_count)

    @functools.cached_property
    def example_axes(self) -> tuple[str, ...]:
        """The axes that split the examples of the batch: its first dimension."""
        return self._axes_of_batch(lambda array: 1)

    def _axes_of_batch(self, dim_count: Callable[[Argument], int]) -> tuple[str, ...]:
        names: list[str] = []
        for array, role, sharding in zip(self.arguments, self.roles, self.compiled.argument_shardings, strict=True):
            if role == BATCH and isinstance(sharding, NamedSharding):
                batch_entries = entries(sharding.spec, len(array.shape))[: dim_count(array)]
                names += [name for entry in batch_entries for name in entry]
        return tuple(name for name in self.sizes if name in names)

    def may_be_parameter(self, collective: Collective, array: ArrayType) -> bool:
        """Whether an array that comes out of a collective may be a parameter or its gradient, by its shape."""
        # What an all-gather or an all-reduce returns is whole along the axes that it goes over.
        shapes = self._shapes_of_parameters(() if collective.kind == "reduce-scatter" else collective.crossed)
        if shapes.matches(array.shape):
            return True
        # An optimizer's update may be cut into pieces of any shape. In front of a matmul such a shape does not make it
        # a parameter.
        computation = self.program.find(collective.computation)
        uses = self.program.downstream(computation, computation.by_name[collective.name])
        return shapes.matches(array.shape, split_dims=True) and not any(
            user.name in self._matmuls_by_name for user in uses
        )

    def _shapes_of_parameters(self, whole: tuple[str, ...]) -> ShapeSet:
        """All shapes that a device may have of a parameter which the axes in `whole` do not split."""
        if whole not in self._parameter_shapes:
            sizes = {name: size for name, size in self.sizes.items() if name not in whole}
            shapes = [array.shape for array, role in zip(self.arguments, self.roles, strict=True) if role == PARAMETERS]
            # Layers may be stacked for a scan, which takes one slice in each round.
            distinct = dict.fromkeys(shape for shape in (*shapes, *(shape[1:] for shape in shapes)) if shape)
            self._parameter_shapes[whole] = ShapeSet.of(
                local for shape in distinct for local in split_shapes(shape, sizes)
            )
        return self._parameter_shapes[whole]

    @functools.cached_property
    def requested_shapes(self) -> ShapeSet:
        """What a device has of each array whose sharding the function or its caller requests."""
        results = [
            (tuple(array.struct.shape), array.requested.spec)
            for array in self.compiled.results
            if array.requested is not None
        ]
        constrained = [(shape, spec) for shape, spec, _ in self.constraints]
        return ShapeSet.of(shard_shape(shape, spec, self.sizes) for shape, spec in (*results, *constrained))

    @functools.cached_property
    def argument_shapes(self) -> ShapeSet:
        """What a device has of each argument."""
        return ShapeSet.of(parameter.types[0].shape for parameter in self.program.arguments)

    def parameters_like(self, collective: Collective, array: ArrayType) -> tuple[str, ...]:
        """Returns the paths of the parameters of which an array in a collective may be the whole or the gradient."""
        return self.parameters_of(array, () if collective.kind == "reduce-scatter" else collective.crossed)

    def parameters_of(self, array: ArrayType, whole: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the paths of the parameters that have this shape where the axes in `whole` do not split them."""
        sizes = {name: size for name, size in self.sizes.items() if name not in whole}
        paths = []
        for parameter, role in zip(self.arguments, self.roles, strict=True):
            if role == PARAMETERS and parameter.shape:
                # Layers may be stacked for a scan, which takes one slice in each round.
                shapes = [
                    local for shape in (parameter.shape, parameter.shape[1:]) for local in split_shapes(shape, sizes)
                ]
                paths += [parameter.path] * ShapeSet.of(shapes).matches(array.shape)
        return tuple(paths)

    def results_of(self, collective: Collective) -> tuple[tuple[Value, ...], ...]:
        """Returns for each array of a collective the values that it comes out as: several where it is printed often."""
        computation = self.program.find(collective.computation)
        instruction = computation.by_name[collective.name]
        copies = self._copies.get(channel(instruction), ()) or ((computation.name, instruction.name),)
        # Arrays that a compiler concatenated come out as one.
        is_tuple = len(instruction.operands) == len(collective.arrays) > 1
        return tuple(
            tuple(Value(*copy, index if is_tuple else None) for copy in copies)
            for index in range(len(collective.arrays))
        )

    @functools.cached_property
    def _copies(self) -> Mapping[tuple[str | None, ...], tuple[tuple[str, str], ...]]:
        """The computations and names of collectives that TPUs print several times, by channel."""
        copies: dict[tuple[str | None, ...], tuple[tuple[str, str], ...]] = {}
        for computation, instruction in self.program.walk():
            if "async_collective_fusion_config" in instruction.text:
                key = channel(instruction)
                copies[key] = (*copies.get(key, ()), (computation.name, instruction.name))
        return copies

    def arguments_near(self, collective: Collective) -> tuple[str, ...]:
        """Returns the paths of the matrices that the matmul nearest to a collective multiplies; none if unknown."""
        computation = self.program.find(collective.computation)
        instruction, line = computation.by_name[collective.name], user_line(collective.stack)
        nearby = self.program.nearby(computation, instruction)
        if collective.kind == "all-gather":  # the reason for a gather is what uses its result
            nearby = itertools.chain(self.program.downstream(computation, instruction), nearby)
        for neighbor in nearby:
            matmul = self._matmuls_by_name.get(neighbor.name)
            # A matmul of another line would give a wrong name, which is worse than none.
            if matmul is not None and user_line(matmul.stack) == line:
                operands = self.program.find(matmul.computation).by_name[matmul.name].operands[:2]
                indices = [
                    index for name in operands for index in self._source_arguments(Value(matmul.computation, name))
                ]
                if indices:
                    return tuple(dict.fromkeys(self.arguments[index].path for index in indices))
        return ()

    def factors_behind(self, collective: Collective) -> tuple[Factor, ...]:
        """Returns the two factors of the matmul whose result a collective moves; none if it moves anything else."""
        computation = self.program.find(collective.computation)
        operands = computation.by_name[collective.name].operands[:1]
        for name in operands:
            origin = self.program.flow.origin(Value(computation.name, name))
            matmul = self._matmuls_by_name.get(origin.instruction)
            if matmul is not None:
                inside = self.program.find(matmul.computation)
                return tuple(
                    Factor(inside.by_name[factor].types[0], self._paths_behind(Value(inside.name, factor)))
                    for factor in inside.by_name[matmul.name].operands[:2]
                )
        return ()

    def _paths_behind(self, value: Value) -> tuple[str, ...]:
        indices = [index for index in self._source_arguments(value) if self.roles[index] == PARAMETERS]
        return tuple(dict.fromkeys(self.arguments[index].path for index in indices))

    def uses_of(self, values: Iterable[Value], passes_on: Callable[[Instruction], bool] = is_move) -> tuple[Use, ...]:
        """Returns what uses the values that a collective returns, or what instructions that pass them on return."""
        return tuple(uses(self.program, values, passes_on))

    def kernels_behind(self, collective: Collective) -> tuple[tuple[ArrayType, Instruction], ...]:
        """Returns the arrays of a gather that a kernel takes which XLA cannot split, each with that kernel."""
        if collective.kind != "all-gather" or not collective.crossed or is_explicit(collective):
            return ()
        pairs = []
        for array, values in zip(collective.arrays, self.results_of(collective), strict=True):
            users = self.uses_of(values, lambda user: is_move(user) or is_elementwise(user))
            # One device calls back, in a branch of its own. JAX gives all calls of one kind the same name.
            line = user_line(collective.stack)
            callbacks = self.callbacks.get(collective.op_name, ())
            kernels = [each for each in callbacks if user_line(self.program.stack(each)) == line]
            kernels += [use.instruction for use in users if is_black_box(use.instruction)]
            kernels += callbacks  # some have no line
            pairs += [(array, kernel) for kernel in kernels[:1]]
        return tuple(pairs)

    def is_sent_back(self, collective: Collective) -> bool:
        """Whether it sends what one device got from a call back to Python to the others."""
        return collective.kind != "all-gather" and collective.op_name in self.callbacks

    @functools.cached_property
    def callbacks(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The calls back to Python, by what JAX calls them."""
        callbacks: dict[str, tuple[Instruction, ...]] = {}
        for _, instruction in self.program.walk():
            if is_callback(instruction) and instruction.op_name:
                callbacks[instruction.op_name] = (*callbacks.get(instruction.op_name, ()), instruction)
        return callbacks

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the program."""
        return find_kernels(self.program, self.matmuls)

    @property
    def is_on_cpu(self) -> bool:
        """Whether it is compiled for CPUs, whose compiler makes no reduce-scatter, and whose memory no sheet knows."""
        mesh = next((each.mesh for each in self.compiled.argument_shardings if isinstance(each, NamedSharding)), None)
        return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"

    def exposed_seconds(self, computation: str) -> float:
        """Returns how much longer the collectives of a computation take than what it computes meanwhile."""
        kernels = [kernel for kernel in self.kernels if kernel.computation == computation]
        seconds = sum(
            collective_seconds(collective, self.hardware)
            for collective in self.collectives
            if self.round_of(collective) == computation
        )
        # With a perfect schedule; and no more than the program's own schedule exposes.
        return min(max(0.0, seconds - self.seconds_of(kernels)), self.time.exposed_seconds)

    def seconds_of(self, kernels: Iterable[Kernel]) -> float:
        """Returns how long all runs of kernels take in one call of the program."""
        return sum(kernel_seconds(kernel, self.hardware) * kernel.times.count for kernel in kernels)

    def round_of(self, collective: Collective) -> str:
        """Returns the computation of the loop that a collective is in, or of the program: without fusions and calls."""
        name = collective.computation
        calls = self.program.callers(name)
        while len(calls) == 1 and calls[0].role not in LOOP_ROLES:
            name = calls[0].caller
            calls = self.program.callers(name)
        return name

    @functools.cached_property
    def _matmuls_by_name(self) -> Mapping[str, Matmul]:
        """The matmuls by the names of their instructions, and of the fusions that contain them."""
        by_name: dict[str, Matmul] = {}
        for matmul in self.matmuls:
            by_name[matmul.name] = matmul
            for call in self.program.callers(matmul.computation):
                if call.instruction.op == "fusion":
                    by_name.setdefault(call.instruction.name, matmul)
        return by_name

    def _source_arguments(self, value: Value) -> Iterator[int]:
        """The indices of the arguments that a value is, gathered or not."""
        for _ in range(_MAX_HOPS):
            value = self.program.flow.origin(value)
            instruction = self.program.instruction(value)
            index = self._argument_index(value, instruction)
            if index is not None and len(self.arguments[index].shape) > 1:
                yield index
            if instruction.op not in _GATHERS or not instruction.operands:
                return
            # A gather may move several arrays: element i of its result is operand i.
            operand = value.index if value.index is not None and value.index < len(instruction.operands) else 0
            value = Value(value.computation, instruction.operands[operand])

    def _argument_index(self, value: Value, instruction: Instruction) -> int | None:
        if instruction.op != "parameter" or value.computation != self.program.entry:
            return None
        return self.argument_indices.get(instruction.op_name)


def spec_text(sharding: Sharding) -> str:
    """Returns the spec of a sharding as text; without a spec, the sharding."""
    return spec_repr(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)
