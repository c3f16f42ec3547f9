"""The bytes that an instruction of a compiled program reads from memory, and writes to it.

Values inside a fusion never reach memory. A kernel that takes a slice or some rows of an array reads only those,
and a kernel that updates an array in place reads and writes only what it updates. For this reason a loop over stacked
layers reads each layer once:

    %fused (stack: f32[12,64,64], i: s32[]) -> f32[64,64] {      reads 64 x 64 elements of the stack, not 12 x 64 x 64
      %layer = f32[1,64,64] dynamic-slice(%stack, %i, ...)
      ...
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import final

import attrs

from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import HOST_MEMORY, ArrayType, Computation, Instruction
from shardrules.programs.compiled.uses import ELEMENTWISE
from shardrules.programs.machine.measured import KINDS, ROW_BYTES

_WITH_SCRATCH = re.compile(r"__cublas|__cudnn|cusolver")
"""Targets of custom calls whose last result is their scratch memory."""

_RADIX_SORT, _DIGIT_BITS = "__cub$DeviceRadixSort", 8
"""CUB sorts by 8 bits of the keys in each pass: https://nvidia.github.io/cccl/unstable/cub/api/device.html"""

_TAKE_A_PART = ("slice", "dynamic-slice", "gather")
_UPDATE_IN_PLACE = ("dynamic-update-slice", "scatter")
_SAME_BYTES = ("bitcast", "reshape")
_SAME_ELEMENTS = (*_SAME_BYTES, "bitcast-convert", "convert", "copy", "transpose")
_COMPUTED_WHERE_USED = (*ELEMENTWISE, "exponential", "log", "logistic", "tanh", "compare", "pad")
"""Operations that a fusion computes only for the elements that are taken later: of padding it reads none."""
_MAY_STAY_IN_PLACE = (*_SAME_BYTES, *_UPDATE_IN_PLACE, "convert")
"""Operations whose result may be in the memory of their operand."""


def is_collective(instruction: Instruction) -> bool:
    """It is a collective, or the start of one: it moves data over the wire, not through memory."""
    return instruction.op.removesuffix("-start") in KINDS


def read_bytes(
    program: CompiledProgram, computation: Computation, instruction: Instruction, *, of_host: bool = False
) -> int:
    """Returns the bytes that an instruction reads: its operands, each array once, or the parts of them that it takes.

    With `of_host`, only those that it reads from memory of the host.
    """
    fusion = fusion_of(program, instruction)
    parameters = fusion.top.parameters if fusion else ()
    bytes_by_array: dict[str, int] = {}
    for index, name in enumerate(instruction.operands):
        types = computation.by_name[name].types
        if of_host and all(array.memory_space != HOST_MEMORY for array in types):
            continue
        whole = _bytes(types)
        if fusion:
            part = fusion.read_bytes(parameters[index])
        else:
            elements = _elements_read(computation, instruction, name)
            part = whole if elements is None else _packed_bytes(computation.by_name[name].types[0], elements)
        # A kernel may get one array several times, under other shapes: together it reads no more than all of it.
        array = _behind_bitcasts(computation, name)
        bytes_by_array[array] = min(whole, bytes_by_array.get(array, 0) + part)
    return sum(bytes_by_array.values())


def written_bytes(program: CompiledProgram, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction writes: its results, or what it updates of them in place.

    The scratch memory of a library is not counted.
    """
    fusion = fusion_of(program, instruction)
    if fusion:
        return fusion.written_bytes()
    if instruction.op in _UPDATE_IN_PLACE:
        elements = _elements_updated(computation, instruction)
        return sum(_packed_bytes(result, elements) for result in instruction.types)
    types = instruction.types
    if instruction.op.endswith("-start"):
        types = result_types(computation, instruction)
    if _WITH_SCRATCH.match(instruction.custom_call_target) and len(types) > 1:
        # Scratch memory is bytes in one dim, behind the results; a single result is never scratch.
        is_bytes = types[-1].dtype in ("s8", "u8") and len(types[-1].shape) == 1
        types = types[:-1] if is_bytes else types
    return _bytes(types)


def result_types(computation: Computation, instruction: Instruction) -> tuple[ArrayType, ...]:
    """Returns the types of the results. Those of a start, which also has its operands and signals, are at its end."""
    users = computation.users.get(instruction.name, ()) if instruction.op.endswith("-start") else ()
    ends = [user for user in users if user.op.endswith("-done")]
    return ends[0].types if ends else instruction.types


def gathered_bytes(program: CompiledProgram, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction reads and writes in short rows at any positions, as many of each."""
    fusion = fusion_of(program, instruction)
    if fusion is None:
        return 2 * _short_rows_bytes(computation, instruction)
    return 2 * sum(_short_rows_bytes(part, inner) for part in fusion.computations for inner in part.instructions)


def _short_rows_bytes(computation: Computation, instruction: Instruction) -> int:
    if instruction.op not in ("gather", "scatter"):
        return 0
    array = computation.by_name[instruction.operands[0]].types[0]
    if instruction.op == "gather":
        sizes, moved = instruction.dims("slice_sizes"), instruction.types[0].size
    else:
        update = computation.by_name[instruction.operands[-1]].types[0]
        window, moved = iter(instruction.dims("update_window_dims")), update.size
        single = (*instruction.dims("inserted_window_dims"), *instruction.dims("input_batching_dims"))
        sizes = [1 if dim in single else update.shape[next(window)] for dim in range(len(array.shape))]
    if array.piece_bytes(sizes) > ROW_BYTES:
        return 0
    return sum(_packed_bytes(result, moved) for result in instruction.types)


def pass_count(program: CompiledProgram, computation: Computation, instruction: Instruction) -> int:
    """Returns the number of passes of an instruction over its arrays: sorting takes several, everything else takes one.

    XLA's own sort is bitonic: each stage sorts runs of twice the length, in one pass more than the stage before.
    """
    fusion = fusion_of(program, instruction)
    if fusion is not None:
        inner = ((part, each) for part in fusion.computations for each in part.instructions if each.op == "sort")
        return max((pass_count(program, part, each) for part, each in inner), default=1)
    if instruction.custom_call_target == _RADIX_SORT:
        return -(-computation.operand_types(instruction)[0].bits // _DIGIT_BITS)
    if instruction.op != "sort":
        return 1
    array, dims = computation.operand_types(instruction)[0], instruction.dims("dimensions")
    # Steps between elements closer than 2,048, which shared memory holds, are one pass: `IrEmitterUnnested::EmitSort`,
    # https://github.com/openxla/xla/tree/main/xla/service/gpu.
    doublings = max(0, math.ceil(math.log2(max(1, array.shape[dims[0]] if dims else 1) / 2_048)))
    return 1 + doublings * (doublings + 3) // 2


def fusion_of(program: CompiledProgram, instruction: Instruction) -> "Fusion | None":
    """Returns the inside of a fusion; `None` for any other instruction."""
    if instruction.op not in ("fusion", "fusion-start"):
        return None
    return Fusion(program, program.find(instruction.references("calls")[0]))


@final
@attrs.frozen
class Fusion:
    """The inside of a fusion, from its computation `top` on, with the fusions inside: together they are one kernel."""

    program: CompiledProgram
    top: Computation

    @property
    def computations(self) -> Iterator[Computation]:
        """Its computation and the computations of fusions inside."""
        inside = [self.top]
        for computation in inside:  # grows while iterated
            inside += [self._called(inner) for inner in computation.instructions if inner.op == "fusion"]
            yield computation

    def read_bytes(self, parameter: Instruction) -> int:
        """Returns the bytes read of a parameter of `top`: the parts taken from it, or all of it where it is used whole.

        An array that is returned as it came in is not read.
        """
        whole = _bytes(parameter.types)
        if len(parameter.types) != 1:
            return whole
        array, elements_read = parameter.types[0], dict[str, int]()
        # Follow the array through the fusion, with whether it may still be in the memory of the parameter.
        pending = [(Value(self.top.name, parameter.name), True)]
        seen: set[tuple[Value, bool]] = set()
        for value, in_place in pending:  # grows while iterated
            if (value, in_place) in seen:
                continue
            seen.add((value, in_place))
            computation, instruction = self.program.find(value.computation), self.program.instruction(value)
            in_place = in_place and (instruction.op != "convert" or _contains(array, instruction.types[0]))
            is_returned_unread = in_place and instruction.types[0].dtype == array.dtype
            # The root of an inner fusion goes on outside of it. The root of this one is what the kernel returns.
            if instruction.name == computation.root:
                if computation is not self.top:
                    pending.append((self._call_of(computation), in_place))
                elif not is_returned_unread:
                    return whole
            # Some users read a part of the array, some pass it on, and all others read the whole array.
            for user in computation.users.get(instruction.name, ()):
                elements = _elements_read(computation, user, instruction.name)
                if elements is not None:
                    elements_read[user.name] = elements
                if user.op in (*_SAME_ELEMENTS, *_COMPUTED_WHERE_USED) or (
                    elements is not None and user.op in _UPDATE_IN_PLACE
                ):
                    stays = user.op in _MAY_STAY_IN_PLACE or self._copies_in_place(computation, user)
                    pending.append((Value(computation.name, user.name), in_place and stays))
                elif user.op == "fusion":
                    called = self._called(user)
                    pairs = zip(user.operands, called.parameters, strict=True)
                    pending += [
                        (Value(called.name, inner.name), in_place) for name, inner in pairs if name == instruction.name
                    ]
                elif user.op == "tuple" and user.name == self.top.root:
                    if not is_returned_unread:
                        return whole
                elif elements is None and not _is_on_the_wire(user):
                    return whole
        # Overlapping parts may add up to more than the array.
        return min(whole, _packed_bytes(array, sum(elements_read.values())))

    def written_bytes(self) -> int:
        """Returns the bytes of the results; for an array that is updated in place, the bytes of the update."""
        total = 0
        for value in self._results(Value(self.top.name, self.top.root)):
            types = self.program.instruction(value).types
            elements = self._elements_updated(value, types[0])
            total += _bytes(types) if elements is None else sum(_packed_bytes(result, elements) for result in types)
        return total

    def _called(self, fusion: Instruction) -> Computation:
        return self.program.find(fusion.references("calls")[0])

    def _call_of(self, computation: Computation) -> Value:
        """The result of the fusion in this one that calls a computation."""
        call = self.program.callers(computation.name)[0]
        return Value(call.caller, call.instruction.name)

    def _copies_in_place(self, computation: Computation, instruction: Instruction) -> bool:
        """A copy that is an inner fusion by itself, whose result is in the memory of its operand.

        The compiler for TPUs writes so what it reads in other tiles:

            %fusion.1 = bf16[80,64]{1,0:T(8,128)} fusion(%stack), output_to_operand_aliasing={{}: (0, {})}, calls=%copy
        """
        if instruction.op != "copy" or computation is self.top or instruction.name != computation.root:
            return False
        call = self._call_of(computation)
        aliases = self.program.instruction(call).attributes.get("output_to_operand_aliasing", "")
        parameter = computation.by_name[_behind_bitcasts(computation, instruction.operands[0])]
        return parameter.op == "parameter" and aliases == f"{{{{}}: ({parameter.literal}, {{}})}}"

    def _results(self, value: Value) -> Iterator[Value]:
        """Yields the arrays in a value, through tuples of tuples."""
        maker = self._maker(value)
        instruction = self.program.instruction(maker)
        if instruction.op != "tuple":
            yield value
        else:
            for name in instruction.operands:
                yield from self._results(Value(maker.computation, name))

    def _elements_updated(self, value: Value, array: ArrayType) -> int | None:
        """The elements of a parameter that are updated to give this value; `None` for an array that is made here."""
        maker = self._maker(value, array)
        computation, instruction = self.program.find(maker.computation), self.program.instruction(maker)
        # A parameter that is returned in its own dtype stays where it is, and nothing is written.
        if instruction.op == "parameter":
            return 0 if instruction.types[0].dtype == array.dtype else None
        if instruction.op not in _UPDATE_IN_PLACE:
            return 0 if _is_on_the_wire(instruction) else None
        # Several updates of one array in a row all count.
        before = self._elements_updated(Value(computation.name, instruction.operands[0]), array)
        return None if before is None else before + _elements_updated(computation, instruction)

    def _maker(self, value: Value, array: ArrayType | None = None) -> Value:
        """The maker of a value, behind bitcasts, tuples and the borders of inner fusions.

        With `array` also behind conversions of that array to a wider dtype and back, which lose nothing.
        """
        while True:
            computation, instruction = self.program.find(value.computation), self.program.instruction(value)
            operand = instruction.operands[0] if instruction.operands else ""
            is_same = (
                instruction.op in _SAME_BYTES
                or (instruction.op == "convert" and _contains(array, computation.by_name[operand].types[0]))
                or self._copies_in_place(computation, instruction)
            )
            source = Value(computation.name, operand) if is_same else self.program.flow.source(value)
            # A parameter of the fusion itself is in memory, and its maker outside of the kernel.
            if source is None or (instruction.op == "parameter" and computation is self.top):
                return value
            value = source


def _contains(array: ArrayType | None, other: ArrayType) -> bool:
    """The other dtype holds every element of the array exactly.

    CPUs cannot compute in bfloat16: they update such an array between a conversion to float32 and one back.
    """
    return array is not None and (other.dtype == array.dtype or other.bits > array.bits)


def _elements_read(computation: Computation, instruction: Instruction, operand: str) -> int | None:
    """The elements that an instruction reads of an operand, if it takes or updates a part of it; else `None`."""
    if instruction.operands.count(operand) == 1:
        if instruction.op in _TAKE_A_PART and instruction.operands[0] == operand:
            return instruction.types[0].size
        if instruction.op == "dynamic-update-slice" and instruction.operands[0] == operand:
            return 0
        # The operands of a scatter of n arrays: n arrays, their indices, n updates. It combines old with new elements.
        if (
            instruction.op == "scatter"
            and operand in instruction.operands[: max(1, (len(instruction.operands) - 1) // 2)]
        ):
            return _elements_updated(computation, instruction)
    return None


def _elements_updated(computation: Computation, instruction: Instruction) -> int:
    """The elements that an update in place changes in each of its arrays: a scatter may have several."""
    update = instruction.operands[-1] if instruction.op == "scatter" else instruction.operands[1]
    return computation.by_name[update].types[0].size


def _is_on_the_wire(instruction: Instruction) -> bool:
    return is_collective(instruction) or "AsyncCollective" in instruction.custom_call_target


def _behind_bitcasts(computation: Computation, name: str) -> str:
    """The array itself, whichever shapes it is used in."""
    while computation.by_name[name].op == "bitcast":
        name = computation.by_name[name].operands[0]
    return name


def _bytes(types: Iterable[ArrayType]) -> int:
    return sum(array.stored_bytes for array in types)


def _packed_bytes(array: ArrayType, elements: int) -> int:
    """The bytes of so many elements of an array, with their share of its padding."""
    return -(-elements * array.stored_bytes // max(1, array.size))
