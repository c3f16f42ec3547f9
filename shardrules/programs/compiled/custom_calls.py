"""The work of custom calls: libraries by their configuration, kernels by estimate or by formula.

The user's `kernel_cost` comes first, then the estimate of a kernel's author, then the formulas for kernels that JAX
itself has: they carry no estimate, and their names and operands are stable.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs

from shardrules.programs.compiled.kernel_costs import KernelCall, KernelFacts
from shardrules.programs.compiled.products import Convolution, Product, dot_product
from shardrules.programs.compiled.text import ArrayType, Computation, Instruction

Origin: TypeAlias = Literal["library", "estimate", "formula", "user"]
"""Who says what a custom call costs: its own configuration, its author, a formula for its name, or the user."""

_KERNEL = re.compile(r"tpu_custom_call|triton|mosaic|pallas|__(cublas|cudnn|onednn|gpu)\$", re.IGNORECASE)
"""Targets of custom calls that may be matmuls."""

NO_WORK = re.compile(
    r"AllocateBuffer|ConcatBitcast|AsyncCollective(Start|Done)|PrepareAsyncCall(Start|Done)|Sharding|SPMD|Assume|MoveTo"
    r"|PinTo|annotate_"
)
"""Targets of custom calls that pass information to the compiler and move nothing."""

_OF_COMPILERS = (
    *("__cublas", "__cudnn", "__onednn", "__cub$", "cublas", "__gpu$TopK", "TopK", "ApproxTopK", "PartialReduce"),
    *("SliceToDynamic", "PadToStatic", "GatherScatterIndicesBitpacked", "X64"),
)
"""Beginnings of the targets that compilers put in for operations of their own, after these were split."""

_SUFFIX = re.compile(r"(\.(\d+|clone|remat\d*))+$")
"""The suffix by which XLA makes a name unique."""

_CONFIG_NAME = re.compile(r'\bname ?= ?"([^"]+)"')
"""The name of a kernel in the configuration of a Triton call, which is not JSON."""

_FLOAT = r"f|bf"
"""The beginnings of the names of float dtypes."""

_CUDNN_TILE = 128
"""The rows and columns of a block of scores in cuDNN's attention."""


@final
@attrs.frozen
class CallCost:
    """The work of one run of a custom call."""

    flops: int
    products: tuple[Product, ...] = ()
    """The matmuls that the FLOPs are; empty where only their number is known."""
    nbytes: int | None = None
    """The bytes read and written, if not all operands and results."""
    origin: Origin = "library"
    is_masked: bool = False
    """It is attention that leaves scores out."""


def may_be_matmul(instruction: Instruction) -> bool:
    """It is from a library for matmuls, or a kernel that a user wrote."""
    return _KERNEL.match(instruction.custom_call_target) is not None


def is_black_box(instruction: Instruction) -> bool:
    """It is a kernel that XLA does not know and cannot split: one of Pallas, or of another library."""
    target = instruction.custom_call_target
    return bool(target) and not NO_WORK.match(target) and not target.startswith(_OF_COMPILERS)


def is_callback(instruction: Instruction) -> bool:
    """It calls back to Python: `jax.pure_callback` and the like."""
    return "callback" in instruction.custom_call_target


def kernel_names(instruction: Instruction) -> tuple[str, ...]:
    """Returns the names of a kernel: its own, its JAX operation's, and the target of its custom call."""
    match = _CONFIG_NAME.search(instruction.attributes.get("backend_config", ""))
    name = match[1] if match else _SUFFIX.sub("", instruction.name)
    path = instruction.op_name.split("/")
    scopes = [scope for scope in path[-2:-1] if path[-1] == "pallas_call" and "(" not in scope]
    return tuple(dict.fromkeys([name, *scopes, instruction.custom_call_target]))


def names_of(computation: Computation, instruction: Instruction, facts: KernelFacts) -> tuple[str, ...]:
    """The names of a kernel, with the function's name first if JAX knows it and the program does not."""
    call = _call_of(computation, instruction, facts)
    return tuple(dict.fromkeys([*([] if call is None else [call.name]), *kernel_names(instruction)]))


def call_cost(computation: Computation, instruction: Instruction, facts: KernelFacts) -> CallCost | None:
    """Returns what a custom call computes; `None` where nothing says it."""
    names, operands = names_of(computation, instruction, facts), computation.operand_types(instruction)
    cost = facts.cost(names)
    if cost is not None:
        flops, nbytes = cost.amounts(operands)
        return CallCost(flops, (), nbytes, "user")
    library = _library_cost(computation, instruction)
    if library is not None:
        return library
    # Compilers for GPUs do not print the estimate of a kernel's author, and JAX still knows it.
    call = _call_of(computation, instruction, facts)
    products = _formula_products(names, operands, instruction, call)
    is_masked = any(name.startswith("splash_") for name in names)
    estimate = find_config(instruction.backend_config, "cost_estimate")
    if estimate and "flops" in estimate:
        nbytes = int(estimate.get("bytes_accessed", 0))
        return CallCost(int(estimate["flops"]), products or (), nbytes or None, "estimate", is_masked)
    if call is not None and call.flops is not None:
        return CallCost(call.flops, products or (), call.nbytes or None, "estimate", is_masked)
    if products is None:
        return None
    return CallCost(sum(each.flops for each in products), products, None, "formula", is_masked)


def _formula_products(
    names: Sequence[str], operands: Sequence[ArrayType], instruction: Instruction, call: KernelCall | None
) -> tuple[Product, ...] | None:
    """The matmuls of a kernel that JAX has; `None` for any other."""
    for pattern, formula in _FORMULAS.items():
        match = next(filter(None, (re.fullmatch(pattern, name) for name in names)), None)
        if match is not None:
            return formula(_NamedCall(match, operands, instruction, call))
    return None


def _call_of(computation: Computation, instruction: Instruction, facts: KernelFacts) -> KernelCall | None:
    if not facts.calls or not may_be_matmul(instruction):
        return None
    shapes = tuple(operand.shape for operand in computation.operand_types(instruction))
    results = tuple(result.shape for result in instruction.types)
    # A program may lack the name of a kernel: its shapes are enough if no other kernel has them.
    same = [call for call in facts.calls if call.results == results and call.operands == shapes]
    named = [call for call in same if call.name in kernel_names(instruction)]
    candidates = named or (same if len(same) == 1 else [])
    # Of several calls with other masks the one that computes most: no cost is then too small.
    return max(candidates, key=lambda call: call.block_count or 0, default=None)


def _library_cost(computation: Computation, instruction: Instruction) -> CallCost | None:
    """The work of a library call: each library describes its matmuls in a configuration of its own."""
    target, config = instruction.custom_call_target, instruction.backend_config
    makers = [computation.by_name[name] for name in instruction.operands]
    operands = [maker.types[0] for maker in makers if maker.types]
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes:
        return _cudnn_convolution(target, instruction, operands)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(target, config, operands[0])
    if target == "__onednn$matmul":
        # The left matrix may be stored transposed: then it is contracted along its first dim behind the batch.
        transposed = config.get("onednn_matmul_config", {}).get("transpose_a", False)
        batch = range(len(operands[0].shape) - 2)
        return _of(dot_product(operands[0], operands[1], [len(batch) + (not transposed)], [len(batch)], batch))
    dims = find_config(config, "dot_dimension_numbers")
    if target.startswith("__cublas$") and dims:
        contracted, right, batch = (
            [int(dim) for dim in dims.get(f"{name}_dimensions", ())]
            for name in ("lhs_contracting", "rhs_contracting", "lhs_batch")
        )
        return _of(dot_product(operands[0], operands[1], contracted, right, batch))
    return None


def _of(*products: Product) -> CallCost:
    return CallCost(sum(product.flops for product in products), products)


def _cudnn_convolution(target: str, instruction: Instruction, operands: Sequence[ArrayType]) -> CallCost:
    """A convolution or one of its gradients: all have the labels and the window of the forward pass."""
    image, kernel, result = operands[0], operands[1], instruction.types[0]
    if target.startswith("__cudnn$convBackwardInput"):
        image, result = result, image
    elif target.startswith("__cudnn$convBackwardFilter"):
        kernel, result = result, kernel
    convolution = Convolution(instruction.attributes, image, kernel, result)
    return CallCost(convolution.flops(), (convolution.product(),))


def _cudnn_attention(target: str, config: Mapping[str, Any], query: ArrayType) -> CallCost | None:
    scores = find_config(config, "intermediate_tensor_shape")
    if not scores:
        return None
    batch, heads, rows, columns = [int(size) for size in scores["dimensions"]]
    # The layout of the query varies, but its size is batch x heads x queries x head size.
    head_size = query.size // max(1, batch * heads * rows)
    attention = next(part for part in _parts(config) if "intermediate_tensor_shape" in part)
    window = int(attention.get("sliding_window_length", 0) or 0)
    phase = "backward" if "Backward" in target else "fwd"
    mask, sizes = str(attention.get("mask_type", "")), (head_size, head_size)
    products, is_masked = masked_attention(batch * heads, (rows, columns), sizes, mask, window, phase)
    return attrs.evolve(_of(*products), is_masked=is_masked)


def masked_attention(
    count: int, lengths: tuple[int, int], head_sizes: tuple[int, int], mask_type: str, window: int, phase: str
) -> tuple[tuple[Product, ...], bool]:
    """Returns the matmuls of cuDNN's attention, with `True` if a mask leaves scores out.

    `lengths` are of queries and keys, `head_sizes` of keys and values.
    """
    rows, columns = lengths
    blocks = _cudnn_blocks(mask_type, rows, columns, window)
    # As wide as the blocks of a row are on average.
    area = min(rows, _CUDNN_TILE) * min(columns, _CUDNN_TILE)
    width = columns if blocks is None else min(columns, round(blocks * area / rows))
    return _attention(count, rows, width, *head_sizes, phase), blocks is not None


def _cudnn_blocks(mask_type: str, rows: int, columns: int, window: int) -> int | None:
    """The number of blocks that a causal kernel computes: all with a score at or below the diagonal, and in the window.
    `None` without such a mask. The lengths behind a padding mask are data: it counts as full."""
    if "CAUSAL" not in mask_type and not window:
        return None
    count = 0
    for top in range(0, rows, _CUDNN_TILE):
        last = min(top + _CUDNN_TILE, rows, columns) - 1
        first = max(0, top - window + 1) if window else 0
        count += max(0, last // _CUDNN_TILE - first // _CUDNN_TILE + 1)
    return count


def _attention(count: int, rows: int, columns: int, size: int, value_size: int, phase: str) -> tuple[Product, ...]:
    """The matmuls of `count` blocks of scores: queries with keys first, and for gradients that again.

    The gradient of the queries takes the gradient of the scores; keys and values take one more product each.
    """
    scores = Product(count, rows, columns, size)
    values = Product(count, rows, value_size, columns)
    score_gradients = Product(count, rows, columns, value_size)
    query_gradients = Product(count, rows, size, columns)
    key_gradients, value_gradients = Product(count, columns, size, rows), Product(count, columns, value_size, rows)
    return {
        "fwd": (scores, values),
        "dq": (scores, score_gradients, query_gradients),
        "dkv": (scores, value_gradients, score_gradients, key_gradients),
        "backward": (scores, value_gradients, score_gradients, key_gradients, query_gradients),
    }[phase]


@final
@attrs.frozen
class _NamedCall:
    """A kernel whose name is in `_FORMULAS`."""

    name: re.Match[str]
    operands: Sequence[ArrayType]
    instruction: Instruction
    call: KernelCall | None

    def arrays(self, rank: int, dtype: str = "") -> list[ArrayType]:
        """Returns the operands with so many dims whose dtype begins with a pattern."""
        return [each for each in self.operands if len(each.shape) == rank and re.match(dtype, each.dtype)]


def _splash(call: _NamedCall) -> tuple[Product, ...] | None:
    """Splash attention: blocks of scores, some of them left out by a mask.

    Its operands are the mask's arrays, one entry for each block, then queries, keys and values as they are: by default
    [batch, heads, length, head size], without heads for the keys and values of "mqa".
    """
    floats = [each for each in call.operands if re.match(_FLOAT, each.dtype) and len(each.shape) > 1]
    masks = call.arrays(3, r"[su](8|16|32)$")
    if len(floats) < 3 or not masks:
        return None
    settings = _splash_settings(call.instruction)
    query, key, value = (
        _lengths(array, settings.get(f"{name}_layout", 1)) for array, name in zip(floats, "qkv", strict=False)
    )
    phase = call.name["phase"]
    suffix = "" if phase == "fwd" else f"_{phase}"
    mask_heads, rows, columns = masks[0].shape
    height = int(settings.get(f"block_q{suffix}") or query[0] // max(1, rows))
    width = int(settings.get(f"block_kv{suffix}") or key[0] // max(1, columns))
    visited = None if call.call is None else call.call.block_count
    total = mask_heads * rows * columns if visited is None else visited
    # A block is computed in parts, one after the other.
    part = min(width, int(settings.get(f"block_kv{suffix}_compute") or width))
    total, width = total * (width // max(1, part)), part
    # A mask for one head is for all of them. A batch is an additional leading dim.
    heads = math.prod(floats[0].shape[:-2])
    count = total * heads // max(1, mask_heads)
    if phase == "dkv" and any(len(result.shape) > len(floats[0].shape) for result in call.instruction.types):
        phase = "backward"  # the fused kernel also gives a part of the queries' gradient for each block
    return _attention(count, height, width, query[1], value[1], phase)


def _splash_settings(instruction: Instruction) -> Mapping[str, Any]:
    """The sizes of blocks, which the kernel has in its metadata."""
    pairs = re.findall(r'\\*"(\w+)\\*": ?(\d+)', instruction.attributes.get("frontend_attributes", ""))
    return {name: int(value) for name, value in pairs}


def _lengths(array: ArrayType, layout: int) -> tuple[int, int]:
    """The length and the head size of an operand; in layout 2 they are swapped."""
    length, size = array.shape[-2:]
    return (length, size) if layout == 1 else (size, length)


def _flash(call: _NamedCall) -> tuple[Product, ...] | None:
    """Flash attention on [batch, heads, length, head size], without a mask: whether it is causal is not in the text.

    That of `jax.experimental.pallas.ops.gpu` is on [batch, length, heads, head size].
    """
    arrays = call.arrays(4)
    if len(arrays) < 3:
        return None
    heads, length = (2, 1) if call.name[0].startswith("mha_") else (1, 2)
    query, key, value = (array.shape for array in arrays[:3])
    phase = {"kernel": "fwd", "forward": "fwd"}.get(call.name["phase"], call.name["phase"])
    return _attention(query[0] * query[heads], query[length], key[length], query[3], value[3], phase)


def _paged(call: _NamedCall) -> tuple[Product, ...] | None:
    """Attention to pages of keys and values. Lengths are data: all pages that a sequence may have count as full."""
    pages, tables, queries = call.arrays(4), call.arrays(2, "s32"), call.arrays(3, _FLOAT)
    if not pages or not tables or not queries:
        return None
    tokens, heads, size = queries[0].shape
    # Pages are [heads, pages, page size, head size]; ragged ones [pages, page size, keys and values, head size].
    page_size = pages[0].shape[1 if call.name[0].startswith("ragged") else 2]
    return _attention(tokens * heads, 1, tables[0].shape[1] * page_size, size, size, "fwd")


def _grouped(call: _NamedCall) -> tuple[Product, ...] | None:
    """Groups of rows, each with a matrix of its own: every row is multiplied once. For the gradient of the matrices,
    which are stacked in the result, rows are contracted."""
    rows, shape = call.arrays(2, _FLOAT), call.instruction.types[0].shape
    if not rows or len(shape) not in (2, 3):
        return None
    m, n = shape[-2:]
    product = Product(1, m, n, rows[0].size // max(1, m))
    blocks = () if call.call is None else call.call.block_shapes
    stacks = [each for each in (*call.operands, *call.instruction.types) if len(each.shape) == 3]
    if len(blocks) < 3 or not stacks:
        return (product,)
    # A block of rows is multiplied once for each group that it has rows of: with the end of a group in each block.
    more = stacks[0].shape[0] - 1
    height, width = blocks[-1][-2:]
    if len(shape) == 2:
        tiles = ((m, height, more), (n, width, 0), (product.k, blocks[0][1], 0))
    else:
        tiles = ((m, height, 0), (n, width, 0), (product.k, blocks[0][0], more))
    m, n, k = ((-(-size // block) + ends) * block for size, block, ends in tiles)
    return (attrs.evolve(product, whole_blocks=(m, n, k)),)


_FORMULAS: Mapping[str, Callable[[_NamedCall], "tuple[Product, ...] | None"]] = {
    r"splash_m[hq]a_(?P<phase>fwd|dq|dkv)\w*": _splash,
    r"(_flash_attention|flash_mha_bwd|mha)_(?P<phase>dq|dkv|kernel|forward|backward)\w*": _flash,
    r"(ragged_)?paged_(flash_)?attention\w*": _paged,
    r"t?gmm\w*|(transposed_)?ragged_dot\w*": _grouped,
    # Without any matmul: the cost is memory traffic. GPUs make random numbers with threefry.
    r"mha_preprocess_backward|(ln|rms)_(forward|backward)\w*": lambda _: (),
    r"ragged-dot-metadata|(cu|hip)_threefry2x32\w*": lambda _: (),
}
"""Formulas for the kernels of `jax.experimental.pallas.ops`, by patterns of their names.

An author's estimate of the FLOPs comes first, and the formula still says which matmuls they are."""


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A backend's configuration and all the parts inside it: versions of XLA nest them differently."""
    parts: list[Any] = [config]
    for part in parts:  # grows while iterated
        parts += [value for value in part.values() if isinstance(value, dict)]
    return parts


def find_config(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Finds a part of a backend's configuration, whichever name it is nested under."""
    return next((part[key] for part in _parts(config) if isinstance(part.get(key), dict)), None)
