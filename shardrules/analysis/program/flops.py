"""The FLOPs of a compiled program's matmuls and convolutions on one device, every loop as often as it runs.

Two FLOPs for each product that is summed, whatever the backend makes of it: a dot, a convolution with holes (as which
TPUs write matmuls), a call of a library. Products with the zeros of padding and holes are no work and are not counted.
Elementwise operations and reductions are not counted either: what they cost is memory traffic.
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
"""Custom calls that may be matmuls."""

_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5
"""How many matmuls fused attention does: the scores and their product with the values; backward the scores again and
the gradients of four."""


@final
@attrs.frozen
class Matmul:
    """One matmul or convolution of a compiled program, as one device does it.

    **Arguments:**

    - `op`: how the program writes it: `"dot"`, `"convolution"`, or the target of a custom call.
    - `flops`: each time it runs.
    - `dtype`: what is multiplied: of two types the wider, unless the program names the type to multiply in.
    - `precision`: what the program asks for: `"highest"`, `"dot_bf16_bf16_f32_x3"`; else `"default"`, which leaves it
        to the hardware: TPUs then multiply float32 in bfloat16.
    - `times`: how often it runs.
    - `computation`, `name`: where it is in the program.
    - `op_name`: the path of the JAX operation behind it.
    - `stack`: the lines of Python behind it, the innermost first.
    """

    op: str
    flops: int
    dtype: str
    precision: str
    times: Times
    computation: str
    name: str
    op_name: str = ""
    stack: tuple[Source, ...] = ()

    @property
    def total_flops(self) -> int:
        """In one call of the program."""
        return self.flops * self.times.count


def find_matmuls(program: CompiledProgram) -> tuple[Matmul, ...]:
    """Finds the matmuls and convolutions of a program, those in its fusions and loops too.

    **Arguments:**

    - `program`: the program.

    **Returns:**

    In the order of the text.

    ```python
    from shardrules.analysis.program.program import read_program

    a, b = jnp.ones((4, 8)), jnp.ones((8, 16))
    program = read_program(jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(a, b).compile().as_text())
    (one,) = find_matmuls(program)
    assert (one.total_flops, one.dtype) == (2 * 4 * 8 * 16, "f32")
    ```
    """
    found = []
    for computation, one, flops in _counted(program):
        if flops:
            op, dtype, precision = _target(one) or one.op, _dtype(computation, one), _precision(one)
            times, cause = program.times(computation.name), program.cause(computation, one)
            stack = program.stack(cause)
            found.append(Matmul(op, flops, dtype, precision, times, computation.name, one.name, cause.op_name, stack))
    return tuple(found)


def uncounted_kernels(program: CompiledProgram) -> tuple[Instruction, ...]:
    """Finds the kernels of others, Pallas' among them, that do not tell how many FLOPs they are.

    **Arguments:**

    - `program`: the program.

    **Returns:**

    Custom calls that may be matmuls and of which `find_matmuls` knows nothing.
    """
    return tuple(
        one
        for computation, one, flops in _counted(program)
        if flops is None
        and _KERNEL.match(_target(one))
        and any(len(each.shape) > 1 for each in computation.operand_types(one))
    )


def total_flops(matmuls: Iterable[Matmul]) -> int:
    """Adds matmuls up.

    **Arguments:**

    - `matmuls`: the matmuls.

    **Returns:**

    The FLOPs of one device in one call of the program.

    ```python
    assert total_flops([Matmul("dot", 1024, "bf16", "default", Times(12), "body", "dot.1")]) == 12 * 1024
    ```
    """
    return sum(one.total_flops for one in matmuls)


def flops_by_dtype(matmuls: Iterable[Matmul]) -> dict[str, int]:
    """Adds matmuls up by what they multiply.

    **Arguments:**

    - `matmuls`: the matmuls.

    **Returns:**

    The FLOPs of one device in one call of the program, for each `dtype`.

    ```python
    assert flops_by_dtype([Matmul("dot", 1024, "bf16", "default", Times(12), "body", "dot.1")]) == {"bf16": 12 * 1024}
    ```
    """
    totals: dict[str, int] = {}
    for one in matmuls:
        totals[one.dtype] = totals.get(one.dtype, 0) + one.total_flops
    return totals


def _counted(program: CompiledProgram) -> Iterator[tuple[Computation, Instruction, int | None]]:
    """Yields every instruction that may be a matmul with its FLOPs, `None` where they are not known."""
    for computation, one in program.walk():
        count = _custom_call if one.op == "custom-call" else _COUNTS.get(one.op)
        if count is not None and program.times(computation.name).count:
            yield computation, one, count(computation, one)


def _target(one: Instruction) -> str:
    return one.attributes.get("custom_call_target", "").strip('"')


def _dtype(computation: Computation, one: Instruction) -> str:
    algorithm = re.match(r"dot_([a-z0-9]+)_", one.attributes.get("algorithm", ""))
    if algorithm:
        return algorithm[1]
    types = computation.operand_types(one)
    floats = [each for each in types if not re.match(r"[su]\d+$|pred", each.dtype)]
    return max((floats or types)[:2], key=lambda each: each.bits).dtype  # what follows is biases and scales


def _precision(one: Instruction) -> str:
    printed = one.attributes.get("operand_precision", "")
    if one.op == "custom-call":
        printed = str((_find(one.backend_config, "precision_config") or {}).get("operand_precision", "")).lower()
    asked = [word for word in re.findall(r"\w+", printed) if word != "default"]
    return one.attributes.get("algorithm") or (asked[0] if asked else "default")


def _dot(computation: Computation, one: Instruction) -> int:
    left = computation.by_name[one.operands[0]].types[0]
    return _dot_flops(one.types[0], left, one.dims("lhs_contracting_dims"))


def _dot_flops(result: ArrayType, left: ArrayType, contracted: Iterable[int]) -> int:
    return 2 * result.size * math.prod(left.shape[dim] for dim in contracted)


def _ragged_dot(computation: Computation, one: Instruction) -> int:
    """Groups of rows, each with a matrix of its own. Where the rows are summed over, each group gives a result."""
    left = computation.by_name[one.operands[0]].types[0]
    contracted = one.dims("lhs_contracting_dims")
    over_rows = any(dim in contracted for dim in one.dims("lhs_ragged_dims"))
    return _dot_flops(one.types[0], left, contracted) // (one.types[0].shape[0] if over_rows else 1)


def _convolution(computation: Computation, one: Instruction) -> int:
    left, right = (computation.by_name[name].types[0] for name in one.operands[:2])
    return _convolution_flops(one.attributes, left, right, one.types[0])


def _convolution_flops(attributes: Mapping[str, str], image: ArrayType, kernel: ArrayType, result: ArrayType) -> int:
    labels = re.split(r"_|->", attributes["dim_labels"])
    sizes = [
        dict(zip(label, each.shape, strict=True)) for label, each in zip(labels, (image, kernel, result), strict=True)
    ]
    window = dict(re.findall(r"(\w+)=(\S+)", attributes.get("window", "").strip("{}")))
    flops = 2 * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"]
    for dim in sorted(label for label in labels[2] if label.isdigit()):
        number = int(dim)
        flops *= _products(
            sizes[0][dim],
            sizes[1][dim],
            sizes[2][dim],
            _field(window, "stride", number, 1),
            _field(window, "lhs_dilate", number, 1),
            _field(window, "rhs_dilate", number, 1),
            int(window["pad"].split("x")[number].split("_")[0]) if "pad" in window else 0,
        )
    return flops


def _field(window: Mapping[str, str], name: str, number: int, default: int) -> int:
    return int(window[name].split("x")[number]) if name in window else default


def _products(image: int, kernel: int, result: int, stride: int, image_hole: int, kernel_hole: int, pad: int) -> int:
    """How many pairs of a result and an element of the kernel meet an element of the image, along one dimension.

    Result `r` and element `k` of the kernel meet at `r * stride + k * kernel_hole - pad`: an element of the image where
    that is a multiple of `image_hole` from 0 to the last one.
    """
    if image_hole > 1:
        common = math.gcd(stride, image_hole)
        period = image_hole // common
    else:
        common = period = 1
    last = (image - 1) * image_hole
    total = 0
    for element in range(kernel):
        offset = element * kernel_hole - pad
        if offset % common:
            continue
        # The results that meet an element are those from `low` to `high` that are `first` modulo `period`.
        first = (-offset // common) * pow(stride // common, -1, period) % period if period > 1 else 0
        low, high = max(0, -(offset // stride)), min(result - 1, (last - offset) // stride)
        low += (first - low) % period
        total += max(0, (high - low) // period + 1)
    return total


def _custom_call(computation: Computation, one: Instruction) -> int | None:
    """The FLOPs of a call of a library; `None` where they are not known."""
    target, config = _target(one), one.backend_config
    operands = [computation.by_name[name].types[0] for name in one.operands if computation.by_name[name].types]
    if target.startswith("__cudnn$conv") and "dim_labels" in one.attributes:
        return _cudnn_convolution(target, one, operands)
    if target.startswith("__cudnn$fmha"):
        return _attention(target, config, operands[0])
    if target == "__onednn$matmul":
        transposed = config.get("onednn_matmul_config", {}).get("transpose_a", False)
        return _dot_flops(one.types[0], operands[0], [-2 if transposed else -1])
    numbers = _find(config, "dot_dimension_numbers")
    if target.startswith("__cublas$") and numbers:
        return _dot_flops(one.types[0], operands[0], map(int, numbers["lhs_contracting_dimensions"]))
    estimate = _find(config, "cost_estimate")  # what the author of a Pallas kernel says of it
    return int(estimate["flops"]) if estimate and "flops" in estimate else None


def _cudnn_convolution(target: str, one: Instruction, operands: Sequence[ArrayType]) -> int | None:
    """All three are told by the labels and the window of the forward one, whichever of its arrays they compute."""
    image, kernel, result = operands[0], operands[1], one.types[0]
    if target.startswith("__cudnn$convBackwardInput"):
        image, result = result, image
    elif target.startswith("__cudnn$convBackwardFilter"):
        kernel, result = result, kernel
    return _convolution_flops(one.attributes, image, kernel, result)


def _attention(target: str, config: Mapping[str, Any], query: ArrayType) -> int | None:
    shape = _find(config, "intermediate_tensor_shape")
    if not shape:
        return None
    scores = [int(size) for size in shape["dimensions"]]
    width = query.size * scores[-1] // math.prod(scores)
    matmuls = _ATTENTION_BACKWARD if "Backward" in target else _ATTENTION_FORWARD
    return matmuls * 2 * math.prod(scores) * width


def _find(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Finds a part of a backend's configuration, which versions put under other names."""
    parts: list[Any] = [config]
    for part in parts:  # grows as it is walked
        if isinstance(part, dict):
            if isinstance(part.get(key), dict):
                return part[key]
            parts += part.values()
    return None


def _reduced_products(computation: Computation, one: Instruction) -> int:
    """A product with a vector, which compilers multiply element by element and then sum."""
    if not one.op_name.endswith("/dot_general"):
        return 0
    made = computation.by_name[one.operands[0]]
    while made.op in ("convert", "bitcast", "copy", "reshape", "transpose"):
        made = computation.by_name[made.operands[0]]
    return 2 * made.types[0].size if made.op == "multiply" else 0


_COUNTS: dict[str, Callable[[Computation, Instruction], int]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduced_products,
}
