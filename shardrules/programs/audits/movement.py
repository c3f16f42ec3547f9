"""The collectives of an audited program, with the arrays and kernels before and after them."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import attrs

from shardrules.core.finding import Finding, Severity, common_path, template
from shardrules.core.source import user_line
from shardrules.core.text import bytes_text
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import Collective, channel
from shardrules.programs.compiled.custom_calls import is_black_box, is_callback
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import ArrayType, Instruction
from shardrules.programs.compiled.uses import is_elementwise, is_move, uses
from shardrules.programs.compiling.roles import PARAMETERS

_MAX_HOPS = 24
"""The gathers to follow back from the operand of a matmul to an argument, chosen by hand: chains are far shorter."""

MAX_NAMES = 6
"""The arrays that a finding names, chosen by hand: more fill the line of a terminal."""

_GATHERS = ("all-gather", "all-gather-start", "all-gather-done", "async-start", "async-done")

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> Mapping[_Key, list[_Item]]:
    """Returns items by their keys, in the order of first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def is_explicit(collective: Collective) -> bool:
    """Returns whether a person wrote it: moves inside of `jax.shard_map`, and `jax.sharding.reshard`."""
    return "shard_map" in collective.op_name or collective.op_name.endswith("/reshard")


def names_text(paths: Iterable[str]) -> str:
    """Returns paths for a sentence; the paths of equal layers are one, and empty paths none."""
    groups: dict[str, str] = {}
    for path in filter(None, paths):
        groups[template(path)] = common_path(groups.get(template(path), path), path)
    shown = list(groups.values())[:MAX_NAMES]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@final
@attrs.frozen
class Factor:
    """A factor of a matmul, as one device has it, and the paths of the parameters that it is."""

    array: ArrayType
    paths: tuple[str, ...]


@final
@attrs.frozen(eq=False)
class Movement:
    """The collectives of a program, with what is before and after them."""

    program: CompiledProgram
    arguments: AuditedArguments
    function: TracedFunction
    timing: Timing

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.timing.collectives

    @property
    def free_bytes(self) -> int:
        """The memory of a device that the program leaves."""
        return self.timing.hardware.memory_bytes - self.arguments.memory.peak_bytes

    def has_room_for(self, nbytes: int) -> bool:
        """Returns whether a device has so much memory left; on CPUs that is unknown, and taken to be so."""
        return nbytes <= self.free_bytes or self.arguments.is_on_cpu

    def parameters_like(self, collective: Collective, array: ArrayType, *, split_dims: bool = False) -> list[str]:
        """Returns the paths of the parameters that an array in a collective, or the gradient in it, may belong to."""
        # The result of an all-gather or an all-reduce is whole along the axes that it goes over.
        whole = () if collective.kind == "reduce-scatter" else collective.crossed
        return self.arguments.parameters_shaped(array, whole, split_dims=split_dims)

    def is_shaped_like_parameter(self, collective: Collective, array: ArrayType) -> bool:
        """Returns whether an array that comes out of a collective has the shape of a parameter or its gradient."""
        if self.parameters_like(collective, array):
            return True
        # An optimizer's update may be cut into pieces of any shape. In front of a matmul such a shape does not make it
        # a parameter.
        computation = self.program.find(collective.computation)
        users = self.program.downstream(computation, computation.by_name[collective.name])
        return bool(self.parameters_like(collective, array, split_dims=True)) and not any(
            user.name in self._matmuls_by_name for user in users
        )

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
                    return tuple(dict.fromkeys(self.arguments.arrays[index].path for index in indices))
        return ()

    def factors_behind(self, collective: Collective) -> tuple[Factor, ...]:
        """Returns the two factors of the matmul whose result a collective moves; none if it moves another array."""
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
        indices = [index for index in self._source_arguments(value) if self.arguments.roles[index] == PARAMETERS]
        return tuple(dict.fromkeys(self.arguments.arrays[index].path for index in indices))

    def kernels_behind(self, collective: Collective) -> tuple[tuple[ArrayType, Instruction], ...]:
        """Returns the arrays of a gather that a kernel takes which XLA cannot split, each with that kernel."""
        if collective.kind != "all-gather" or not collective.crossed or is_explicit(collective):
            return ()
        pairs = []
        for array, values in zip(collective.arrays, self.results_of(collective), strict=True):
            users = uses(self.program, values, lambda user: is_move(user) or is_elementwise(user))
            # One device calls back, in a branch of its own. JAX gives all calls of one kind the same name.
            line = user_line(collective.stack)
            callbacks = self.callbacks.get(collective.op_name, ())
            kernels = [each for each in callbacks if user_line(self.program.stack(each)) == line]
            kernels += [use.instruction for use in users if is_black_box(use.instruction)]
            kernels += callbacks  # some have no line
            pairs += [(array, kernel) for kernel in kernels[:1]]
        return tuple(pairs)

    def is_sent_back(self, collective: Collective) -> bool:
        """Returns whether it sends what one device got from a call back to Python to the others."""
        return collective.kind != "all-gather" and collective.op_name in self.callbacks

    @functools.cached_property
    def callbacks(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The calls back to Python, by their names in JAX."""
        callbacks: dict[str, tuple[Instruction, ...]] = {}
        for _, instruction in self.program.walk():
            if is_callback(instruction) and instruction.op_name:
                callbacks[instruction.op_name] = (*callbacks.get(instruction.op_name, ()), instruction)
        return callbacks

    @functools.cached_property
    def _matmuls_by_name(self) -> Mapping[str, Matmul]:
        """The matmuls by the names of their instructions, and of the fusions that contain them."""
        by_name: dict[str, Matmul] = {}
        for matmul in self.timing.matmuls:
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
            index = self.arguments.index_of(value)
            if index is not None and len(self.arguments.arrays[index].shape) > 1:
                yield index
            if instruction.op not in _GATHERS or not instruction.operands:
                return
            # A gather may move several arrays: element i of its result is operand i.
            operand = value.index if value.index is not None and value.index < len(instruction.operands) else 0
            value = Value(value.computation, instruction.operands[operand])


@final
@attrs.frozen(eq=False)
class MovedArrays:
    """Arrays in collectives of one kind over the same axes, which are one finding together."""

    movement: Movement
    arrays: Sequence[tuple[Collective, ArrayType]]

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that move them, each once."""
        return tuple({id(collective): collective for collective, _ in self.arrays}.values())

    @property
    def kind(self) -> str:
        return self.collectives[0].kind

    @property
    def axes(self) -> str:
        return ", ".join(dict.fromkeys(collective.axes_text for collective in self.collectives))

    @property
    def largest(self) -> ArrayType:
        return max((array for _, array in self.arrays), key=lambda array: array.nbytes)

    @property
    def runs(self) -> int:
        """The runs of all collectives in one step."""
        return sum(collective.times.count for collective in self.collectives)

    @property
    def wire_bytes(self) -> int:
        """The bytes of these arrays on the wire per device and step."""
        return sum(
            round(collective.total_wire_bytes * share_of(collective, array)) for collective, array in self.arrays
        )

    @property
    def seconds(self) -> float:
        """The time of the collectives in one step."""
        return sum(map(self.movement.timing.seconds, self.collectives))

    @property
    def names(self) -> str:
        """The arguments that the collectives move, for a sentence."""
        names = [name for collective in self.collectives for name in collective.arguments]
        return names_text(self.movement.arguments.paths_of(names))

    @property
    def parameters(self) -> str:
        """The parameters that the arrays may be, or the gradients of, for a sentence."""
        return names_text(path for pair in self.arrays for path in self.movement.parameters_like(*pair))

    def __str__(self) -> str:
        """The beginning of a finding."""
        return f"{self.runs} x {self.kind} over {self.axes}, largest array {self.largest}"

    @property
    def on_wire(self) -> str:
        return f"{bytes_text(self.wire_bytes)} on the wire per device and step"

    def finding(self, severity: Severity, code: str, message: str, remedy: str, source: str | None = None) -> Finding:
        """Returns a finding about these arrays, by default at the first line that has one of the collectives."""
        sizes = self.movement.arguments.sizes
        if source is None:
            source = next(filter(None, (user_line(collective.stack) for collective in self.collectives)), "")
        return Finding(
            severity, code, message, remedy=remedy, axis=self.axes if self.axes in sizes else None, source=source
        )


def place_of(collective: Collective) -> tuple[str, str, str]:
    """Returns the kind, the axes and the line of code of a collective."""
    return collective.kind, collective.axes_text, user_line(collective.stack)


def share_of(collective: Collective, array: ArrayType) -> float:
    """Returns the share of one array in the bytes that a collective moves."""
    return array.nbytes / max(1, sum(each.nbytes for each in collective.arrays))
