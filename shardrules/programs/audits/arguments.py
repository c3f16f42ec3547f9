"""The arguments of an audited function: their roles, their places in the compiled program, their shapes on a device."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final, get_args

import attrs
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from shardrules.core.spec import axis_names, entries, spec_repr
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.audits.shape_matching import ShapeSet, split_shapes
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import HOST_MEMORY, ArrayType
from shardrules.programs.compiling.arguments import Argument
from shardrules.programs.compiling.compile import Compiled
from shardrules.programs.compiling.roles import BATCH, PARAMETERS, STATE, Role

_ARGUMENT = re.compile(r"args\[(\d+)\]")
"""The name that JAX gives to parameters of a function that takes `*args`, as the compiled functions here do."""


@final
@attrs.define(eq=False)
class AuditedArguments:
    """The arrays that a function takes, as it was compiled."""

    compiled: Compiled
    program: CompiledProgram
    arrays: tuple[Argument, ...]
    roles: tuple[Role, ...]
    sizes: Mapping[str, int]
    """The axes of the mesh."""
    _shapes: dict[tuple[str, ...], Mapping[tuple[int, ...], ShapeSet]] = attrs.field(factory=dict, init=False)

    def __iter__(self) -> Iterator[tuple[Argument, Role, Sharding]]:
        """Yields each array with its role and its compiled sharding."""
        return zip(self.arrays, self.roles, self.compiled.argument_shardings, strict=True)

    @functools.cached_property
    def indices(self) -> Mapping[str, int]:
        """The index of the array behind each parameter of the program, by the parameter's name."""
        # Parameters that XLA renamed have no index in their names; their position in the program is the index, since no
        # argument is dropped (`keep_unused`).
        indices = {}
        for parameter in self.program.arguments:
            match = _ARGUMENT.search(parameter.op_name)
            index = int(match[1]) if match else int(parameter.literal) - self.program.token_count
            indices[parameter.op_name] = index
        return indices

    @functools.cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """The bytes of each array on one device, without the padding of its layout."""
        sizes = [0] * len(self.arrays)
        # Some compilers count memory of the host separately. With the others it is part of the sum that ours must
        # match.
        is_separate = self.compiled.memory.host_argument_bytes > 0
        for parameter in self.program.arguments:
            index = self.indices[parameter.op_name]
            is_on_host = self.arrays[index].memory or any(each.memory_space == HOST_MEMORY for each in parameter.types)
            sizes[index] = 0 if is_separate and is_on_host else parameter.nbytes
        return tuple(sizes)

    @functools.cached_property
    def memory(self) -> MemoryUse:
        """The memory that one device needs, by purpose."""
        by_role = dict.fromkeys(get_args(Role), 0)
        for size, role in zip(self.device_bytes, self.roles, strict=True):
            by_role[role] += size
        # The arguments are counted from the program's types, and the compiler's total has their layouts too: the
        # difference is padding. Results that alias arguments are in both totals.
        reported = self.compiled.memory
        return MemoryUse(
            by_role[PARAMETERS],
            by_role[STATE],
            by_role[BATCH],
            reported.argument_bytes - sum(by_role.values()),
            reported.output_bytes - reported.alias_bytes,
            reported.temporary_bytes,
        )

    @functools.cached_property
    def aliased(self) -> frozenset[int]:
        """The indices of the arrays that the compiler writes results over."""
        return frozenset(alias.parameter - self.program.token_count for alias in self.program.aliases)

    @property
    def is_on_cpu(self) -> bool:
        """Returns whether the target is a CPU: no reduce-scatter, nominal figures, and memory that no sheet knows."""
        shardings = self.compiled.argument_shardings
        mesh = next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)
        return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"

    def index_of(self, value: Value) -> int | None:
        """Returns the index of the array that a value of the program is, if it is one."""
        instruction = self.program.instruction(value)
        is_argument = instruction.op == "parameter" and value.computation == self.program.entry
        return self.indices.get(instruction.op_name) if is_argument else None

    def paths_of(self, parameters: Sequence[str]) -> tuple[str, ...]:
        """Returns the paths of arrays from the program's names for them; an unknown name gives an empty path."""
        return tuple(self.arrays[self.indices[name]].path if name in self.indices else "" for name in parameters)

    @functools.cached_property
    def idle_axes(self) -> tuple[str, ...]:
        """The axes that split no parameter."""
        specs = [array.spec for array, role, _ in self if role == PARAMETERS and array.spec is not None]
        used = dict.fromkeys(name for spec in specs for name in axis_names(spec))
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in used)

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
        for array, role, sharding in self:
            if role == BATCH and isinstance(sharding, NamedSharding):
                batch_entries = entries(sharding.spec, len(array.shape))[: dim_count(array)]
                names += [name for entry in batch_entries for name in entry]
        return tuple(name for name in self.sizes if name in names)

    @functools.cached_property
    def shapes(self) -> ShapeSet:
        """The shape that a device has of each array."""
        return ShapeSet.of(parameter.types[0].shape for parameter in self.program.arguments)

    def parameters_shaped(self, array: ArrayType, whole: tuple[str, ...], *, split_dims: bool = False) -> list[str]:
        """Returns the paths of the parameters that have this shape where the axes in `whole` do not split them."""
        parameters = [parameter for parameter, role, _ in self if role == PARAMETERS]
        if whole not in self._shapes:
            sizes = {name: size for name, size in self.sizes.items() if name not in whole}
            # Layers may be stacked for a scan, which takes one slice in each round.
            self._shapes[whole] = {
                shape: ShapeSet.of(local for each in (shape, shape[1:]) if each for local in split_shapes(each, sizes))
                for shape in dict.fromkeys(parameter.shape for parameter in parameters)
            }
        alike = [
            shape for shape, local in self._shapes[whole].items() if local.matches(array.shape, split_dims=split_dims)
        ]
        return [parameter.path for parameter in parameters if parameter.shape in alike]


def spec_text(sharding: Sharding) -> str:
    """Returns the spec of a sharding as text; without a spec, the sharding."""
    return spec_repr(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)
