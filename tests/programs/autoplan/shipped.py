"""The fused kernels that JAX ships: a call of each, to trace, with how the dims of its kernels go together.

A kernel's text has a letter for each dim that may be split, and a dot for one that is whole: `"a.b.,a.b. -> a.b."`.
What is summed over pieces follows a slash. `"whole"` is a kernel that no device can run on pieces.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.jaxprs.walk import programs_in
from shardrules.programs.traced.factors.table import Factors

KERNELS = ("pallas_call", "mpmd_map", "core_map", "scaled_dot")
OPS = "jax.experimental.pallas.ops."
IS_NEW = jax.__version_info__ >= (0, 12)


@final
@attrs.frozen
class Shipped:
    """A function of JAX, its arrays, and the texts of the kernels that it traces to."""

    module: str
    make: Callable[[Any], Callable[..., Any]]
    """Returns the function, from its module."""
    args: tuple[Any, ...]
    kernels: tuple[str, ...]
    has_gradient: bool = False

    @property
    def fn(self) -> Callable[..., Any]:
        fn = self.make(loaded(self.module))
        if not self.has_gradient:
            return fn
        floats = tuple(index for index, array in enumerate(self.args) if jnp.issubdtype(array.dtype, jnp.floating))
        return jax.grad(lambda *arrays: fn(*arrays).astype(jnp.float32).sum(), floats)


def loaded(name: str) -> Any:
    """A module of JAX: from 0.12 on, most of the kernels for GPUs say that they are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.int32)


def segments(module: Any) -> Callable[..., Any]:
    return lambda q, k, v, bias, ids: module.flash_attention(q, k, v, bias, module.SegmentIds(ids, ids), causal=True)


def splash(module: Any) -> Callable[..., Any]:
    mask = module.MultiHeadMask([module.CausalMask((512, 512))] * 4)
    return jax.vmap(module.make_splash_mha(mask, head_shards=1, q_seq_shards=1))


HEADS_FIRST = struct(2, 4, 512, 128)
ROWS_FIRST = struct(2, 512, 4, 64)
GROUPED = struct(2, 2, 512, 128)
PAGES = struct(2, 64, 16, 128)
VECTOR, STACK = struct(128), struct(2, 64, 128)
_FLASH = "ab..,ab..,ab..,ab..,ab..,ab..,ab.. -> "
_SCRATCH = "" if IS_NEW else "a..,a..,a..,"  # results that nothing reads, where kernels keep what they add up
_SCALARS = ",.,.,.,.,"

SHIPPED: dict[str, Shipped] = {
    "flash": Shipped(
        f"{OPS}tpu.flash_attention",
        lambda module: lambda q, k, v: module.flash_attention(q, k, v, causal=True),
        (HEADS_FIRST,) * 3,
        ("ab..,ab..,ab.. -> ab..,ab..,ab..", f"{_FLASH}ab..,ab..", f"{_FLASH}ab.."),
        has_gradient=True,
    ),
    "flash, with segments": Shipped(
        f"{OPS}tpu.flash_attention",
        segments,
        (*(HEADS_FIRST,) * 3, struct(2, 4, 512, 512), integers(2, 512)),
        ("ab..,ab..,ab..,ab..,a..,a.. -> ab..",),
    ),
    "splash": Shipped(
        f"{OPS}tpu.splash_attention",
        splash,
        (HEADS_FIRST,) * 3,
        (
            f"...,...,ab..,ab..,ab..,.. -> {_SCRATCH}ab..,ab..",
            f"...,...,ab..,ab..,ab..,ab..,ab..,ab..,.. -> {_SCRATCH and 'a..,a..,'}ab..,ab..",
            f"...,...,ab..,ab..,ab..,ab..,ab..,ab..,.. -> {_SCRATCH and 'a..,'}ab..",
        ),
        has_gradient=True,
    ),
    # Gradients of keys are added up over the queries' heads, one after another.
    "splash, in groups": Shipped(
        f"{OPS}tpu.splash_attention",
        splash,
        (HEADS_FIRST, GROUPED, GROUPED),
        (
            f"...,...,ab..,ab..,ab..,.. -> {_SCRATCH}ab..,ab..",
            f"...,...,a...,a...,a...,a...,a...,a...,.. -> {_SCRATCH and 'a..,a..,'}a...,a...",
            f"...,...,ab..,ab..,ab..,ab..,ab..,ab..,.. -> {_SCRATCH and 'a..,'}ab..",
        ),
        has_gradient=True,
    ),
    "paged": Shipped(
        f"{OPS}tpu.paged_attention",
        lambda module: lambda *args: module.paged_attention(*args, pages_per_compute_block=4),
        (struct(4, 8, 128), PAGES, PAGES, integers(4), integers(4, 16)),
        ("a,a,.,.,ab..,b...,b... -> ab..,ab..,ab..",),
    ),
    "ragged paged": Shipped(
        f"{OPS}tpu.ragged_paged_attention",
        lambda module: (
            lambda *args: module.ragged_paged_attention(*args, num_kv_pages_per_block=4, num_queries_per_block=8)
        ),
        (struct(64, 8, 128), struct(64, 16, 4, 128), integers(4), integers(4, 16), integers(5), integers(1)),
        (".,..,.,.,.,.a.,..a. -> .a.",),
    ),
    "grouped matmul": Shipped(
        f"{OPS}tpu.megablox",
        lambda module: module.gmm,
        (struct(1024, 256), struct(8, 256, 512), integers(8)),
        (f"{_SCALARS}a.,..b -> ab", f"{_SCALARS}a.,.b. -> ab", f"{_SCALARS}ab,ac -> .bc / a"),
        has_gradient=True,
    ),
    "matmul": Shipped(
        f"{OPS}tpu.matmul",
        lambda module: lambda x, y: module.matmul(x, y, block_shape=(256, 256)),
        (struct(1024, 1024),) * 2,
        ("a.,.b -> ab",),
    ),
    "a kernel of one block": Shipped(
        f"{OPS}tpu.example_kernel", lambda module: module.double, (struct(8, 128, dtype=jnp.float32),), ("whole",)
    ),
    "triton attention": Shipped(
        f"{OPS}gpu.attention",
        lambda module: lambda q, k, v: module.mha(q, k, v, None, causal=True),
        (ROWS_FIRST,) * 3,
        (
            "a.b.,a.b.,a.b. -> a.b.,ab.",
            "abc.,abc. -> acb",
            "a.b.,a.b.,a.b.,a.b.,a.b.,ab.,ab. -> a.b.,a.b.,a.b.",
        ),
        has_gradient=True,
    ),
    "decoding, one head of keys": Shipped(
        f"{OPS}gpu.decode_attention",
        lambda module: module.mqa,
        (struct(2, 8, 64), *(struct(2, 1024, 64),) * 2),
        ("a..,a...,a... -> a...,a..,a..",),
    ),
    "decoding, in groups": Shipped(
        f"{OPS}gpu.decode_attention",
        lambda module: module.gqa,
        (struct(2, 8, 64), *(struct(2, 1024, 2, 64),) * 2),
        ("ab..,ab...,ab... -> ab...,ab..,ab..",),
    ),
    "triton paged": Shipped(
        f"{OPS}gpu.paged_attention",
        lambda module: module.paged_attention,
        (struct(4, 8, 128), PAGES, PAGES, integers(4, 16), integers(4)),
        ("ab..,b...,b...,a..,a. -> a.b..,a.b.,a.b.",),
    ),
    # Gradients of weights are added up over rows inside of the kernel.
    "layer norm": Shipped(
        f"{OPS}gpu.layer_norm",
        lambda module: module.layer_norm,
        (STACK, VECTOR, VECTOR),
        ("ab.,.,. -> ab.,ab,ab", "a.,.,.,a.,a,a -> a.", "a.,.,.,a.,a,a -> .,. / a"),
        has_gradient=True,
    ),
    "rms norm": Shipped(
        f"{OPS}gpu.rms_norm",
        lambda module: module.rms_norm,
        (STACK, VECTOR, VECTOR),
        ("ab.,.,. -> ab.,ab", "a.,.,.,a.,a -> a.", "a.,.,.,a.,a -> .,. / a"),
        has_gradient=True,
    ),
    "softmax": Shipped(f"{OPS}gpu.softmax", lambda module: module.softmax, (struct(64, 128),), ("a. -> a.",)),
}
"""All but the kernels of cuDNN, which are primitives, and in their own test."""


def text_of(factors: Factors | None) -> str:
    if factors is None:
        return "whole"

    def letters(arrays: Any) -> str:
        return ",".join("".join("." if dim is None else "abcdefgh"[dim] for dim in dims) for dims in arrays)

    reduced = "".join("abcdefgh"[factor] for factor in factors.reduced)
    return f"{letters(factors.operands)} -> {letters(factors.results)}" + (f" / {reduced}" if reduced else "")


def kernels_in(program: Any) -> Iterator[tuple[Any, list[bool]]]:
    """Yields the equations of kernels, and which of their results nothing reads."""
    jaxpr = getattr(program, "jaxpr", program)
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name in KERNELS or equation.primitive.name.endswith("_wrapper"):
            yield equation, [id(var) not in used for var in equation.outvars]
        else:
            for inner in programs_in(equation):
                yield from kernels_in(inner)


def cudnn_module(function: str = "cudnn_dot_product_attention") -> Any:
    """The module of JAX that has a function of cuDNN, most of which is not public."""
    return sys.modules[jax.nn.dot_product_attention.__globals__[function].__module__]


def let_jax_find_cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the module of cuDNN's attention; when it is traced, JAX asks for the library, and for a GPU."""
    module = cudnn_module()
    monkeypatch.setattr(module, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(module, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91300))
    return module
