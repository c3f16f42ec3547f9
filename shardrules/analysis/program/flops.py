"""The FLOPs of a compiled program's matmuls and convolutions on one device, every loop as often as it runs.

Two FLOPs for each product that is summed, however the backend writes it: a dot, a dilated convolution (as which TPUs
write matmuls), a library call. Products with the zeros of padding and dilation are not counted, because no work is done
for them. Elementwise operations and reductions are not counted either: their cost is memory traffic.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.program import CompiledProgram, Source
from shardrules.analysis.program.text import ArrayType, Computation, Instruction

_KERNEL = re.compile(r"tpu_custom_call|triton|mosaic|pallas|__(cublas|cudnn|onednn|gpu)\$", re.IGNORECASE)
"""Targets of custom calls that may be matmuls."""

_ATTENTION_FORWARD_MATMULS = 2
"""Fused attention multiplies queries with keys, and the scores with the values."""

_ATTENTION_BACKWARD_MATMULS = 5
"""Its backward pass computes the scores again, and the gradients of scores, queries, keys and values."""


@final
@attrs.frozen
class Matmul:
    """One matmul or convolution of a compiled program, as one device runs it."""

    op: str
    """How the program writes it: `"dot"`, `"convolution"`, or the target of a custom call."""

    flops: int
    """Each time it runs."""

    dtype: str
    """What is multiplied: the wider of two dtypes, unless the program names the dtype to multiply in."""

    precision: str
    """What the program requests: `"highest"`, `"dot_bf16_bf16_f32_x3"`. `"default"` leaves it to the hardware: TPUs
    then multiply float32 in bfloat16."""

    times: Times
    computation: str
    name: str  # of the instruction in that computation
    op_name: str = ""  # the path of the JAX operation
    stack: tuple[Source, ...] = ()  # lines of Python, the innermost first

    @property
    def total_flops(self) -> int:
        """The FLOPs in one call of the program."""
        return self.flops * self.times.count


def find_matmuls(program: CompiledProgram) -> tuple[Matmul, ...]:
    """Finds the matmuls and convolutions of a program in the order of the text, those in fusions and loops too.

    ```python
    from shardrules.analysis.program.flops import find_matmuls
    from shardrules.analysis.program.program import read_program

    a, b = jnp.ones((4, 8)), jnp.ones((8, 16))
    program = read_program(jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(a, b).compile().as_text())
    (matmul,) = find_matmuls(program)
    assert (matmul.total_flops, matmul.dtype) == (2 * 4 * 8 * 16, "f32")
    ```
    """
    matmuls = []
    for computation, instruction, flops in _candidates(program):
        if flops:
            cause = program.cause(computation, instruction)
            matmul = Matmul(
                instruction.custom_call_target or instruction.op,
                flops,
                _dtype(computation, instruction),
                _precision(instruction),
                program.times(computation.name),
                computation.name,
                instruction.name,
                cause.op_name,
                program.stack(cause),
            )
            matmuls.append(matmul)
    return tuple(matmuls)


def uncounted_kernels(program: CompiledProgram) -> tuple[Instruction, ...]:
    """Finds the custom calls that may be matmuls but do not say how many FLOPs they have, such as Pallas kernels."""
    return tuple(
        instruction
        for computation, instruction, flops in _candidates(program)
        if flops is None
        and _KERNEL.match(instruction.custom_call_target)
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


def _candidates(program: CompiledProgram) -> Iterator[tuple[Computation, Instruction, int | None]]:
    """Yields every instruction that may be a matmul with its FLOPs, `None` where they are unknown."""
    for computation, instruction in program.walk():
        count = _custom_call if instruction.op == "custom-call" else _COUNTS.get(instruction.op)
        if count is not None and program.times(computation.name).count:
            yield computation, instruction, count(computation, instruction)


def _dtype(computation: Computation, instruction: Instruction) -> str:
    algorithm = re.match(r"dot_([a-z0-9]+)_", instruction.attributes.get("algorithm", ""))
    if algorithm:
        return algorithm[1]
    # Indices and masks may be operands, too: they are not multiplied.
    types = computation.operand_types(instruction)
    floats = [operand for operand in types if not re.match(r"[su]\d+$|pred", operand.dtype)]
    # Biases and scales follow the two factors.
    return max((floats or types)[:2], key=lambda operand: operand.bits).dtype


def _precision(instruction: Instruction) -> str:
    printed = instruction.attributes.get("operand_precision", "")
    if instruction.op == "custom-call":
        config = _find_config(instruction.backend_config, "precision_config") or {}
        printed = str(config.get("operand_precision", "")).lower()
    requested = [word for word in re.findall(r"\w+", printed) if word != "default"]
    return instruction.attributes.get("algorithm") or (requested[0] if requested else "default")


def _dot(computation: Computation, instruction: Instruction) -> int:
    left = computation.by_name[instruction.operands[0]].types[0]
    return _dot_flops(instruction.types[0], left, instruction.dims("lhs_contracting_dims"))


def _dot_flops(result: ArrayType, left: ArrayType, contracted: Iterable[int]) -> int:
    return 2 * result.size * math.prod(left.shape[dim] for dim in contracted)


def _ragged_dot(computation: Computation, instruction: Instruction) -> int:
    """Groups of rows, each multiplied by a matrix of its own: every row is multiplied once, however they are grouped.

    Where rows are contracted, each group gives a result of its own, and the leading dimension stacks these.
    """
    left = computation.by_name[instruction.operands[0]].types[0]
    contracted = instruction.dims("lhs_contracting_dims")
    contracts_rows = any(dim in contracted for dim in instruction.dims("lhs_ragged_dims"))
    result = instruction.types[0]
    return _dot_flops(result, left, contracted) // (result.shape[0] if contracts_rows else 1)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    left, right = (computation.by_name[name].types[0] for name in instruction.operands[:2])
    return _convolution_flops(instruction.attributes, left, right, instruction.types[0])


def _convolution_flops(attributes: Mapping[str, str], image: ArrayType, kernel: ArrayType, result: ArrayType) -> int:
    """The FLOPs of a convolution by its labels and its window:

    window={size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=1x1 rhs_dilate=1x1}, dim_labels=b01f_01io->b01f
    """
    labels = re.split(r"_|->", attributes["dim_labels"])
    image_sizes, kernel_sizes, result_sizes = (
        dict(zip(label, array.shape, strict=True)) for label, array in zip(labels, (image, kernel, result), strict=True)
    )
    window = dict(re.findall(r"(\w+)=(\S+)", attributes.get("window", "").strip("{}")))
    # Grouped convolutions need no case of their own: `i` of the kernel is the size of one group.
    flops = 2 * result_sizes["b"] * result_sizes["f"] * kernel_sizes["i"]
    for label in sorted(label for label in labels[2] if label.isdigit()):
        spatial_dim = int(label)
        flops *= _products(
            image_sizes[label],
            kernel_sizes[label],
            result_sizes[label],
            _window_field(window, "stride", spatial_dim),
            _window_field(window, "lhs_dilate", spatial_dim),
            _window_field(window, "rhs_dilate", spatial_dim),
            int(window["pad"].split("x")[spatial_dim].split("_")[0]) if "pad" in window else 0,
        )
    return flops


def _window_field(window: Mapping[str, str], name: str, spatial_dim: int) -> int:
    return int(window[name].split("x")[spatial_dim]) if name in window else 1


def _products(
    image: int, kernel: int, result: int, stride: int, image_dilation: int, kernel_dilation: int, pad: int
) -> int:
    """How many pairs of a result and a kernel element meet an image element, along one dimension.

    Result `r` and kernel element `k` meet at `r * stride + k * kernel_dilation - pad`. An image element is there if
    that is a multiple of `image_dilation`, and within the image.
    """
    # For a fixed `k`, r * stride + offset is a multiple of image_dilation for one r in every `period`, or for no r.
    common = math.gcd(stride, image_dilation) if image_dilation > 1 else 1
    period = image_dilation // common if image_dilation > 1 else 1
    last = (image - 1) * image_dilation
    total = 0
    for element in range(kernel):
        offset = element * kernel_dilation - pad
        if offset % common:
            continue
        # Count the results from `low` to `high` that are `first` modulo `period`.
        first = (-offset // common) * pow(stride // common, -1, period) % period if period > 1 else 0
        low, high = max(0, -(offset // stride)), min(result - 1, (last - offset) // stride)
        low += (first - low) % period
        total += max(0, (high - low) // period + 1)
    return total


def _custom_call(computation: Computation, instruction: Instruction) -> int | None:
    """The FLOPs of a library call; `None` where they are unknown."""
    target, config = instruction.custom_call_target, instruction.backend_config
    makers = [computation.by_name[name] for name in instruction.operands]
    operands = [maker.types[0] for maker in makers if maker.types]
    # Each library describes its matmuls in a configuration of its own.
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes:
        return _cudnn_convolution(target, instruction, operands)
    if target.startswith("__cudnn$fmha"):
        return _attention(target, config, operands[0])
    if target == "__onednn$matmul":
        transposed = config.get("onednn_matmul_config", {}).get("transpose_a", False)
        return _dot_flops(instruction.types[0], operands[0], [-2 if transposed else -1])
    dims = _find_config(config, "dot_dimension_numbers")
    if target.startswith("__cublas$") and dims:
        return _dot_flops(instruction.types[0], operands[0], map(int, dims["lhs_contracting_dimensions"]))
    estimate = _find_config(config, "cost_estimate")  # by the author of a Pallas kernel
    return int(estimate["flops"]) if estimate and "flops" in estimate else None


def _cudnn_convolution(target: str, instruction: Instruction, operands: Sequence[ArrayType]) -> int | None:
    """The FLOPs of a convolution or one of its gradients: all have the labels and the window of the forward pass."""
    image, kernel, result = operands[0], operands[1], instruction.types[0]
    if target.startswith("__cudnn$convBackwardInput"):
        image, result = result, image
    elif target.startswith("__cudnn$convBackwardFilter"):
        kernel, result = result, kernel
    return _convolution_flops(instruction.attributes, image, kernel, result)


def _attention(target: str, config: Mapping[str, Any], query: ArrayType) -> int | None:
    scores_shape = _find_config(config, "intermediate_tensor_shape")
    if not scores_shape:
        return None
    sizes = [int(size) for size in scores_shape["dimensions"]]  # batch, heads, queries, keys
    # The layout of the query varies, but its size is batch x heads x queries x head size.
    head_size = query.size * sizes[-1] // math.prod(sizes)
    matmuls = _ATTENTION_BACKWARD_MATMULS if "Backward" in target else _ATTENTION_FORWARD_MATMULS
    return matmuls * 2 * math.prod(sizes) * head_size


def _find_config(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Finds a part of a backend's configuration: versions of XLA nest it under different names."""
    parts: list[Any] = [config]
    for part in parts:  # grows while iterated
        if isinstance(part, dict):
            if isinstance(part.get(key), dict):
                return part[key]
            parts += part.values()
    return None


def _reduced_products(computation: Computation, instruction: Instruction) -> int:
    """A product with a vector, which compilers write as an elementwise product and a sum.

    %m = f32[8,4] multiply(%w, %broadcast)
    %r = f32[8] reduce(%m, %zero), dimensions={1}, to_apply=%add, metadata={op_name="jit(f)/dot_general"}
    """
    if not instruction.op_name.endswith("/dot_general"):
        return 0
    maker = computation.by_name[instruction.operands[0]]
    while maker.op in ("convert", "bitcast", "copy", "reshape", "transpose"):
        maker = computation.by_name[maker.operands[0]]
    return 2 * maker.types[0].size if maker.op == "multiply" else 0


_COUNTS: dict[str, Callable[[Computation, Instruction], int]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduced_products,
}
