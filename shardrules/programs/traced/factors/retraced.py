"""Kernels of JAX whose programs depend on how many examples, heads or rows there are.

For pieces of their operands a smaller grid is not enough: JAX's own function makes the kernel again, from the shapes of
the pieces. From the shapes of the whole it has to make the very kernel that was traced; otherwise nothing is split.
"""

import functools
import importlib
import itertools
import pathlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, final

import attrs
import jax
from jax.extend.core import Literal

from shardrules.core.jax_state import trace_key
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.traced.factors.loops import Loops, OpSignature, Shape, loop_sizes

_KERNELS_OF_JAX = pathlib.Path(jax.__file__).parent / "experimental" / "pallas" / "ops"


def is_from(params: Mapping[str, Any], *modules: str) -> bool:
    """A kernel is written in one of these modules of the installed JAX, and not in a copy of it."""
    return any(f" at {(_KERNELS_OF_JAX / module).as_posix()}:" in _source(params) for module in modules)


def _source(params: Mapping[str, Any]) -> str:
    return str(getattr(params["jaxpr"].debug_info, "func_src_info", "")).replace("\\", "/")


@final
@attrs.frozen
class _Maker:
    """A function of JAX that makes a kernel."""

    module: str
    call: Callable[..., Any]
    """Calls it. It takes the module, and the kernel's map of blocks, operands and options."""
    dims: str
    """For each operand and result the loops of its first dims; a dot is a dim that is whole."""
    options: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    """The possible values of each option. `float` and `int` are numbers, which are then among the numbers of the
    kernel's program."""
    kernel: str = ""
    """The name of the kernel, where it makes several."""


@final
@attrs.frozen
class _Kernel:
    """A kernel by all that tells it from others: equal ones are found once."""

    text: str
    operands: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    settings: Hashable
    maker: _Maker = attrs.field(eq=False)
    op: OpSignature = attrs.field(eq=False)


def retraced_loops(op: OpSignature) -> Loops | None:
    """The loops of a kernel that JAX's function makes again; `None` for others."""
    kernel = _kernel(op)
    return None if kernel is None else _loops(kernel)


@functools.lru_cache(maxsize=256)
def _loops(kernel: _Kernel) -> Loops | None:
    options, maker, op = _options(kernel), kernel.maker, kernel.op
    if options is None:
        return None
    operands, results = (
        [_names(term, shape) for term, shape in zip(terms.split(","), shapes, strict=False)]
        for terms, shapes in zip(maker.dims.split(" -> "), (op.operands, op.results), strict=True)
    )
    in_results, in_operands = (
        dict.fromkeys(name for names in side for name in names if name) for side in (results, operands)
    )
    loops = Loops(operands, results, [name for name in in_operands if name not in in_results], is_local=True)

    def is_made(name: str, pieces: int) -> bool:
        shapes = [
            tuple(size // pieces if other == name else size for size, other in zip(*dims, strict=True))
            for dims in zip(op.operands, operands, strict=True)
        ]
        return _params(maker, op, shapes, options) is not None

    sizes: dict[Hashable, int] = {}
    for name in in_results:
        size = loop_sizes(loops, op)[name]
        counts = [count for count in range(1, size + 1) if size % count == 0]
        refused = [count for count in counts if not is_made(name, count)]
        sizes[name] = max((count for count in counts if not any(count % other == 0 for other in refused)), default=0)
    return attrs.evolve(loops, sizes=sizes)


def retraced_params(op: OpSignature, shapes: Sequence[Shape]) -> dict[str, Any] | None:
    """The parameters of such a kernel for operands of these shapes, which are pieces; `None` for others."""
    kernel = _kernel(op)
    options = None if kernel is None else _options(kernel)
    if kernel is None or options is None:
        return None
    params = _params(kernel.maker, op, shapes, options)
    return params and {**op.params, **{name: params[name] for name in SIZED}}


def is_made_again(op: OpSignature, shapes: Sequence[Shape], params: Mapping[str, Any]) -> bool:
    """JAX's function makes a kernel with these parameters for operands of these shapes."""
    again = retraced_params(op, shapes)
    return again is not None and _text(again) == _text(params)


SIZED = ("jaxpr", "grid_mapping", "out_avals")
"""Parameters that depend on the shapes of operands."""


def _names(term: str, shape: Shape) -> list[str | None]:
    return [None if letter == "." else letter for letter in term.ljust(len(shape), ".")]


def _kernel(op: OpSignature) -> _Kernel | None:
    """A kernel that a function of JAX may have made."""
    makers = (maker for maker in _MAKERS if is_from(op.params, maker.module))
    maker = next((maker for maker in makers if _source(op.params).startswith(maker.kernel)), None)
    if maker is None:
        return None
    return _Kernel(str(_text(op.params)), tuple(op.operands), tuple(op.dtypes), trace_key(), maker, op)


@functools.lru_cache(maxsize=256)
def _options(kernel: _Kernel) -> Mapping[str, Any] | None:
    """The options for which JAX's function makes a kernel; `None` where it makes no equal one."""
    maker, op = kernel.maker, kernel.op
    text, literals = _text(op.params), _literals(op.params)
    for kinds in itertools.product(*maker.options.values()):
        probe = {
            # A number that is exact in 32 bits, and in no kernel.
            name: kind(1_000_003 + index) if kind in (int, float) else kind
            for index, (name, kind) in enumerate(zip(maker.options, kinds, strict=True))
        }
        params = _params(maker, op, op.operands, probe)
        if params is None or len(_literals(params)) != len(literals):
            continue
        numbers = dict(zip(_literals(params), literals, strict=True))
        options = {
            name: kind(numbers.get(value, value)) if kind in (int, float) else value
            for (name, value), kind in zip(probe.items(), kinds, strict=True)
        }
        params = _params(maker, op, op.operands, options)
        if params is not None and _text(params) == text:
            return options
    return None


def _params(
    maker: _Maker, op: OpSignature, shapes: Sequence[Shape], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The parameters of the kernel that JAX's function makes for these shapes; `None` where it makes none."""
    name = f"jax.experimental.pallas.ops.{maker.module.removesuffix('.py').replace('/', '.')}"
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, op.dtypes, strict=True)]
    try:
        call = partial(maker.call, importlib.import_module(name), op.params["grid_mapping"], **options)
        # Equations remember the mesh of their trace. Under another, programs have other equations.
        with op.params["jaxpr"].eqns[0].ctx.manager:
            program = jax.make_jaxpr(lambda *operands: call(operands))(*arrays)
    except Exception:  # noqa: BLE001  whatever a version of JAX raises, it does not make this kernel
        return None
    kernels = (equation.params for equation in equations(program) if equation.primitive.name == "pallas_call")
    return next((params for params in kernels if _source(params) == _source(op.params)), None)


_MESH_OF_CALL = re.compile(r"ctx_mesh=Mesh\((?:[^()]|\([^()]*\))*\)")
"""The devices that were in force when a function in a program was traced, which change nothing of what it computes."""


def _text(params: Mapping[str, Any]) -> Any:
    """All that makes two kernels one: programs, blocks and numbers."""
    mapping = vars(params["grid_mapping"])
    values = [params["jaxpr"], params["out_avals"], mapping, *map(vars, mapping["block_mappings"])]
    words = [_MESH_OF_CALL.sub("", str(value)).replace("[", "[ ").replace("]", " ]").split() for value in values]
    return words, _literals(params)


def _literals(params: Mapping[str, Any]) -> list[float]:
    every = (var for equation in equations(params["jaxpr"]) for var in equation.invars)
    return [float(var.val) for var in every if isinstance(var, Literal)]


def _paged(module: Any, mapping: Any, operands: Sequence[Any], **options: Any) -> Any:
    lengths, table, _, _, q, *pages = operands
    if len(pages) > 2:
        pages = [module.quantization_utils.QuantizedTensor(*pages[first : first + 2]) for first in (0, 2)]
    options["pages_per_compute_block"] = mapping.scratch_avals[0].shape[1]
    return module.paged_attention(
        q.reshape(*q.shape[:2], -1), *pages, lengths, table.reshape(lengths.size, -1), **options
    )


def _ragged(module: Any, mapping: Any, operands: Sequence[Any], **options: Any) -> Any:
    *tables, _, count, q, pages = operands
    options["num_kv_pages_per_block"] = mapping.scratch_avals[0].shape[1]
    options["num_queries_per_block"] = mapping.block_mappings[0].block_shape[0].block_size
    return module.ragged_paged_attention(q, pages, *tables, count, **options)


def _norm(backward: str, module: Any, mapping: Any, operands: Sequence[Any]) -> Any:
    x, weight, bias, gradient, *moments = operands
    return getattr(module, backward)(None, None, 0.0, "triton", False, (x, weight, bias, *moments), gradient)


_MAKERS = (
    _Maker(
        "tpu/paged_attention/paged_attention_kernel.py",
        _paged,
        "a,a,,,ab,b,b,b,b -> ab,ab,ab",
        {
            "mask_value": (float,),
            "attn_logits_soft_cap": (None, float),
            "inline_seq_dim": (True, False),
            "megacore_mode": (None, "kv_head", "batch"),
        },
    ),
    _Maker(
        "tpu/ragged_paged_attention/kernel.py",
        _ragged,
        ",,,,,.b,..b -> .b",
        {
            **dict.fromkeys(("sm_scale", "mask_value"), (float,)),
            "sliding_window": (None, int),
            **dict.fromkeys(("soft_cap", "k_scale", "v_scale"), (None, float)),
        },
    ),
    _Maker("gpu/layer_norm.py", partial(_norm, "layer_norm_backward"), "a,,,a,a,a -> ,", kernel="ln_backward_dw_db"),
    _Maker("gpu/rms_norm.py", partial(_norm, "rms_norm_backward"), "a,,,a,a -> ,", kernel="ln_backward_dw_db"),
)
"""Examples and heads of keys, with their queries, are computed by themselves, and gradients of weights are sums over
rows: read in the sources of JAX 0.10 and 0.12."""
