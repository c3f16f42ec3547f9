"""The FLOPs of a compiled program's matmuls and convolutions on one device, every loop as often as it runs.

Two FLOPs for each product that is summed, however the backend writes it: a dot, a dilated convolution (as which TPUs
write matmuls), a library call. Products with the zeros of padding and dilation are not counted, because no work is done
for them. Elementwise operations and reductions are not counted either: their cost is memory traffic.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import final

import attrs

from shardrules.core.source import Source
from shardrules.programs.compiled.custom_calls import (
    CallCost,
    Origin,
    call_cost,
    find_config,
    is_black_box,
    may_be_matmul,
)
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.products import Convolution, Product, dot_product
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import Computation, Instruction

_NO_FACTS = KernelFacts()


@final
@attrs.frozen
class Matmul:
    """One matmul or convolution of a compiled program, as one device runs it."""

    op: str
    """The operation, as the program writes it: `"dot"`, `"convolution"`, or the target of a custom call."""

    flops: int
    """Each time it runs."""

    dtype: str
    """The dtype that is multiplied: the wider of two dtypes, unless the program names the dtype to multiply in."""

    precision: str
    """The precision that the program requests: `"highest"`, `"dot_bf16_bf16_f32_x3"`. `"default"` leaves it to the
    hardware: TPUs then multiply float32 in bfloat16."""

    times: Times
    computation: str
    name: str  # of the instruction in that computation
    op_name: str = ""  # the path of the JAX operation
    stack: tuple[Source, ...] = ()  # lines of Python, the innermost first
    products: tuple[Product, ...] = ()
    """Its shapes; empty where only the number of FLOPs is known."""
    nbytes: int | None = None
    """The bytes that a kernel reads and writes, if not all operands and results."""
    origin: Origin = "library"
    """Who says what it computes: the program, the author of a kernel, a formula for its name, or the user."""
    is_masked: bool = False
    """It is attention that leaves scores out. Where a mask is read, as on TPUs, each product is a block of scores."""

    @property
    def total_flops(self) -> int:
        """The FLOPs in one call of the program."""
        return self.flops * self.times.count


def find_matmuls(program: CompiledProgram, facts: KernelFacts = _NO_FACTS) -> tuple[Matmul, ...]:
    """Finds the matmuls and convolutions of a program in the order of the text, those in fusions and loops too.

    `facts` are about its kernels, which the text may say nothing of.

    ```python
    from shardrules.programs.compiled.flops import find_matmuls
    from shardrules.programs.compiled.program import read_program

    a, b = jnp.ones((4, 8)), jnp.ones((8, 16))
    program = read_program(jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(a, b).compile().as_text())
    (matmul,) = find_matmuls(program)
    assert (matmul.total_flops, matmul.dtype) == (2 * 4 * 8 * 16, "f32")
    ```
    """
    matmuls = []
    for computation, instruction, cost in _candidates(program, facts):
        # A kernel that the user says has no FLOPs still has the bytes that the user says.
        if cost is not None and (cost.flops or cost.nbytes is not None):
            cause = program.cause(computation, instruction)
            matmul = Matmul(
                instruction.custom_call_target or instruction.op,
                cost.flops,
                _dtype(computation, instruction),
                _precision(instruction),
                program.times(computation.name),
                computation.name,
                instruction.name,
                cause.op_name,
                program.stack(cause),
                cost.products,
                cost.nbytes,
                cost.origin,
                cost.is_masked,
            )
            matmuls.append(matmul)
    return tuple(matmuls)


def uncounted_kernels(program: CompiledProgram, facts: KernelFacts = _NO_FACTS) -> tuple[Instruction, ...]:
    """Finds the custom calls without known FLOPs: Pallas kernels, and calls of libraries such as cuSOLVER.

    A callback is not among them: the device does not run its FLOPs.
    """
    return tuple(
        instruction
        for computation, instruction, cost in _candidates(program, facts)
        if cost is None
        and (may_be_matmul(instruction) or is_black_box(instruction))
        and "callback" not in instruction.custom_call_target
        # A call without a single matrix multiplies none.
        and any(len(operand.shape) > 1 for operand in computation.operand_types(instruction))
    )


def total_flops(matmuls: Iterable[Matmul]) -> int:
    """Adds up the FLOPs of one device in one call of the program."""
    return sum(matmul.total_flops for matmul in matmuls)


def flops_by_dtype(matmuls: Iterable[Matmul]) -> dict[str, int]:
    """Adds up the FLOPs of one device in one call of the program, for each dtype."""
    totals: dict[str, int] = {}
    for matmul in matmuls:
        totals[matmul.dtype] = totals.get(matmul.dtype, 0) + matmul.total_flops
    return totals


def _candidates(
    program: CompiledProgram, facts: KernelFacts
) -> Iterator[tuple[Computation, Instruction, CallCost | None]]:
    """Yields every instruction that may be a matmul with what it computes, `None` where that is unknown."""
    for computation, instruction in program.walk():
        if not program.times(computation.name).count:
            continue
        if instruction.op == "custom-call":
            yield computation, instruction, call_cost(computation, instruction, facts)
        elif instruction.op in _COUNTS:
            yield computation, instruction, _COUNTS[instruction.op](computation, instruction)


def _dtype(computation: Computation, instruction: Instruction) -> str:
    algorithm = re.match(r"dot_([a-z0-9]+)_", instruction.attributes.get("algorithm", ""))
    if algorithm:
        return algorithm[1]
    # Tokens have no bits. A kernel may have no other operands, and only write.
    operands, results = (
        [each for each in types if each.bits] for types in (computation.operand_types(instruction), instruction.types)
    )
    types = operands or results
    # Indices and masks may be operands, too: they are not multiplied.
    floats = [operand for operand in types if not re.match(r"[su]\d+$|pred", operand.dtype)]
    # Biases and scales follow the two factors.
    return max((floats or types)[:2], key=lambda operand: operand.bits).dtype if types else "f32"


def _precision(instruction: Instruction) -> str:
    printed = instruction.attributes.get("operand_precision", "")
    if instruction.op == "custom-call":
        config = find_config(instruction.backend_config, "precision_config") or {}
        printed = str(config.get("operand_precision", "")).lower()
    # An algorithm overrides the precisions. Of those the first that is not the default counts for both operands.
    requested = [word for word in re.findall(r"\w+", printed) if word != "default"]
    return instruction.attributes.get("algorithm") or (requested[0] if requested else "default")


def _dot(computation: Computation, instruction: Instruction) -> CallCost:
    left, right = (computation.by_name[name].types[0] for name in instruction.operands[:2])
    product = dot_product(
        left,
        right,
        instruction.dims("lhs_contracting_dims"),
        instruction.dims("rhs_contracting_dims"),
        instruction.dims("lhs_batch_dims"),
    )
    return CallCost(product.flops, (product,))


def _ragged_dot(computation: Computation, instruction: Instruction) -> CallCost:
    """Groups of rows, each multiplied by a matrix of its own: every row is multiplied once, however they are grouped.

    Where rows are contracted, each group gives a result of its own, and the leading dimension stacks these.
    """
    left = computation.by_name[instruction.operands[0]].types[0]
    contracted = instruction.dims("lhs_contracting_dims")
    contracts_rows = any(dim in contracted for dim in instruction.dims("lhs_ragged_dims"))
    result = instruction.types[0]
    flops = 2 * result.size * math.prod(left.shape[dim] for dim in contracted)
    return CallCost(flops // (result.shape[0] if contracts_rows else 1))


def _convolution(computation: Computation, instruction: Instruction) -> CallCost:
    left, right = (computation.by_name[name].types[0] for name in instruction.operands[:2])
    convolution = Convolution(instruction.attributes, left, right, instruction.types[0])
    return CallCost(convolution.flops(), (convolution.product(),))


def _reduced_products(computation: Computation, instruction: Instruction) -> CallCost:
    """A product with a vector, which compilers write as an elementwise product and a sum.

    %m = f32[8,4] multiply(%w, %broadcast)
    %r = f32[8] reduce(%m, %zero), dimensions={1}, to_apply=%add, metadata={op_name="jit(f)/dot_general"}
    """
    if not instruction.op_name.endswith("/dot_general"):
        return CallCost(0)
    maker = computation.by_name[instruction.operands[0]]
    while maker.op in ("convert", "bitcast", "copy", "reshape", "transpose"):
        maker = computation.by_name[maker.operands[0]]
    return CallCost(2 * maker.types[0].size if maker.op == "multiply" else 0)


_COUNTS: dict[str, Callable[[Computation, Instruction], CallCost]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduced_products,
}
