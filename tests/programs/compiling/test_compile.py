"""Compiled functions: their memory, shardings and donation, and what compilers refuse."""

import functools
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CompileError, DoesNotFitError
from shardrules.programs.compiling.arguments import read_arguments
from shardrules.programs.compiling.compile import (
    Compiled,
    CompilerMemory,
    compile_for,
    compiled_memory,
    trace,
)
from tests.programs.audits.audited import AXES, f32
from tests.programs.examples import CPU, CUDA, TARGETS, TPU, mesh_on

W, X = f32(64, 64), f32(32, 64)
IN = (P(None, "model"), P("data"))


def built(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    shardings: Any = IN,
    trace_mesh: Mesh | None = None,
    **options: Any,
) -> Compiled:
    mesh = mesh or mesh_on(CPU, AXES)
    arguments = read_arguments(fn, args, mesh, in_shardings=shardings)
    traced = trace(fn, arguments, trace_mesh or mesh)
    return compile_for(traced, arguments.with_shardings(traced.input_shardings, mesh), mesh, **options)


def plainly(fn: Callable[..., Any], mesh: Mesh, *args: Any, shardings: Any = IN, **options: Any) -> Any:
    """The same by JAX alone."""
    structs = [
        jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=NamedSharding(mesh, spec))
        for arg, spec in zip(args, shardings, strict=True)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(fn, **options).lower(*structs).compile()


def specs_of(compiled: Compiled) -> list[P]:
    return [sharding.spec for sharding in compiled.argument_shardings if isinstance(sharding, NamedSharding)]


def product(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def both(w: Any, x: Any) -> Any:
    return w - x.T @ x, x.sum()


COLUMNS = P(None, "model")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_donated", [False, True])
def test_memory_is_what_jax_says(is_donated: bool, target: str) -> None:
    """Donated memory is counted once."""
    mesh = mesh_on(target, AXES)
    theirs = {"donate_argnums": 0, "out_shardings": (NamedSharding(mesh, COLUMNS), None)} if is_donated else {}
    ours: dict[str, Any] = {"donated": (0,), "out_shardings": (COLUMNS, None)} if is_donated else {}
    usage = plainly(both, mesh, W, X, **theirs).memory_analysis()
    compiled = built(both, W, X, mesh=mesh, **ours)
    memory = compiled.memory
    assert (memory.argument_bytes, memory.output_bytes, memory.alias_bytes, memory.temporary_bytes) == (
        usage.argument_size_in_bytes,
        usage.output_size_in_bytes,
        usage.alias_size_in_bytes,
        usage.temp_size_in_bytes,
    )
    assert compiled.donated == ((0,) if is_donated else ())
    assert (memory.alias_bytes > 0) is is_donated


def test_peak_of_a_memory_by_hand() -> None:
    assert CompilerMemory(100, 50, 30, 7).peak_bytes == 127


def test_arguments_and_results_have_compiled_shardings() -> None:
    compiled = built(both, W, X, out_shardings=(P("data", "model"), None))
    assert specs_of(compiled) == list(IN)
    first, second = compiled.results
    assert (first.path, first.struct.shape, second.path, second.struct.shape) == ("0", (64, 64), "1", ())
    assert first.requested is not None
    assert first.requested.spec == P("data", "model")
    assert isinstance(first.sharding, NamedSharding)
    assert first.sharding.spec == P("data", "model")
    assert second.requested is None


def test_the_compiler_chooses_unspecified_shardings() -> None:
    """Only one factor of the product has a spec. The compiler may split the other in any way."""
    compiled = built(lambda w, x: lax.with_sharding_constraint(x, P("data")) @ w, W, X, shardings=None)
    assert len(compiled.argument_shardings) == 2


def test_the_program_keeps_the_name_of_the_function() -> None:
    assert built(product, W, X).text.startswith("HloModule jit_product")


def test_arguments_that_are_not_used_are_counted() -> None:
    compiled = built(lambda w, x: x.sum(), W, X)
    assert compiled.memory.argument_bytes == 64 * 32 * 4 + 8 * 64 * 4
    assert len(compiled.argument_shardings) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_the_targets_mesh_replaces_the_users(target: str) -> None:
    user_mesh = sr.create_mesh(AXES)
    target_mesh = mesh_on(target, AXES)

    def constrained(w: Any, x: Any) -> Any:
        return lax.with_sharding_constraint(x @ w, NamedSharding(user_mesh, P("data", "model")))

    compiled = built(constrained, W, X, mesh=target_mesh, trace_mesh=user_mesh)
    (result,) = compiled.results
    assert isinstance(result.sharding, NamedSharding)
    assert (result.sharding.mesh, result.sharding.spec) == (target_mesh, P("data", "model"))


# ---- functions that are jitted already ----

OWN = sr.create_mesh(AXES)
JITTED = jax.jit(
    both,
    in_shardings=(NamedSharding(OWN, P(None, "model")), NamedSharding(OWN, P("data"))),
    out_shardings=(NamedSharding(OWN, P(None, "model")), None),
    donate_argnums=0,
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_jitted_function_keeps_shardings_and_donation(target: str) -> None:
    target_mesh = mesh_on(target, AXES)
    compiled = built(JITTED, W, X, mesh=target_mesh, trace_mesh=OWN, shardings=None)
    assert specs_of(compiled) == list(IN)
    assert [result.requested and result.requested.spec for result in compiled.results] == [COLUMNS, None]
    assert compiled.donated == (0,)
    assert compiled.memory.alias_bytes > 0
    assert "jit_both" in compiled.text[:40]


def test_the_callers_shardings_come_first() -> None:
    compiled = built(jax.jit(both, donate_argnums=1), W, X, donated=(0,), out_shardings=(P("data"), None))
    assert compiled.donated == (0, 1)
    assert compiled.results[0].requested is not None
    assert compiled.results[0].requested.spec == P("data")


def test_a_jitted_closure_keeps_its_shardings() -> None:
    offset = jnp.arange(64.0)
    columns = NamedSharding(OWN, P(None, "model"))
    jitted = jax.jit(lambda w, x: (w + offset, x.sum()), in_shardings=(columns, None), donate_argnums=0)
    compiled = built(jitted, W, X, shardings=(None, P("data")), out_shardings=(P(None, "model"), None))
    assert specs_of(compiled) == list(IN)
    assert compiled.donated == (0,)


def test_donation_of_an_inner_jit_is_ignored() -> None:
    assert built(lambda w, x: JITTED(w * 2, x)[1], W, X).donated == ()


def test_equinox_donation_is_kept() -> None:
    step = eqx.filter_jit(both, donate="all-except-first")
    assert built(step, W, X).donated == (1,)
    assert built(eqx.filter_jit(both, donate="all"), W, X).donated == (0, 1)
    assert built(eqx.filter_jit(both), W, X).donated == ()


# ---- names ----


class Model(eqx.Module):
    def __call__(self, x: Any) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return x


def test_functions_without_a_python_name_compile() -> None:
    for fn in (lambda x: x * 2, Model(), functools.partial(lambda a, x: x * a, 3)):
        assert built(fn, X, shardings=P("data")).text


# ---- refusals ----


@pytest.mark.slow
def test_tpus_refuse_far_too_large_programs() -> None:
    mesh = mesh_on(TPU, "data:8")
    big = f32(64, 2**20, 2**10)  # 256 GiB, an eighth of it for each
    with pytest.raises(
        DoesNotFitError, match="the compiler for tpu refuses a program that takes more memory"
    ) as caught:
        built(lambda x: x * 2, big, mesh=mesh, shardings=P("data"))
    assert "jax.checkpoint" in str(caught.value)
    assert caught.value.needed_bytes >= 2 * 2**35
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, sr.errors.ShardRulesError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.needed_bytes) == (str(caught.value), caught.value.needed_bytes)


@pytest.mark.slow
def test_other_compilers_refuse_nothing() -> None:
    big = f32(64, 2**20, 2**12)
    for target in (CPU, CUDA):
        mesh = mesh_on(target, "data:8")
        compiled = built(lambda x: jnp.tanh(x) * 2, big, mesh=mesh, shardings=P("data"))
        assert compiled.memory.argument_bytes == 2**40 // 8


def attention(w: Any, x: Any) -> Any:
    """Attention in float32 over 196 positions, as of a vision transformer for images of 224 pixels."""

    def example(x: Any) -> Any:
        q, k, v = ((x @ each).reshape(196, 3, 64) for each in w[:3])
        read = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 8), v)
        return read.reshape(196, 192) @ w[3]

    return (jax.vmap(example)(x) ** 2).mean()


ATTENTION = (f32(192, 192),) * 4, f32(64, 196, 192)


@pytest.fixture
def lacking_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes XLA fail as that of JAX 0.10 does at `attention`; newer ones find tiles."""
    compiled = jax.stages.Lowered.compile

    def compile_with(lowered: Any, compiler_options: Any = None) -> Any:
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: dot")
        return compiled(lowered, compiler_options)

    if jax.__version_info__ >= (0, 11):
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_with)


@pytest.mark.slow
@pytest.mark.usefixtures("lacking_tiles")
def test_where_xla_lacks_tiles_the_error_names_the_flag() -> None:
    mesh = mesh_on(CUDA, "data:8")
    with pytest.raises(CompileError, match="the compiler for gpu fails: INTERNAL: Couldn't find output tile") as caught:
        built(attention, *ATTENTION, mesh=mesh, shardings=(P(), P("data")))
    error = caught.value
    assert error.flag == "xla_gpu_enable_triton_gemm=false"
    assert f'target="cuda:h100:8 --{error.flag}"' in str(error)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    assert pickle.loads(pickle.dumps(error)).flag == error.flag
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
    compiled = built(attention, *ATTENTION, mesh=mesh, shardings=(P(), P("data")), options=options)
    with jax.set_mesh(mesh):
        structs = jax.tree.map(
            lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec)),
            ATTENTION,
            ((P(),) * 4, P("data")),
        )
        memory = compiled_memory(jax.jit(attention, keep_unused=True).lower(*structs), mesh)
    assert (memory.peak_bytes, memory.flag) == (compiled.memory.peak_bytes, error.flag)


@pytest.mark.parametrize(
    "words",
    [
        "INTERNAL: during context [pre-optimization]: bad",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded",
    ],
)
def test_what_compilers_fail_at_is_an_error_with_their_words(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(f"{words}\nmore of it")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(CompileError, match=f"^{re.escape(f'the compiler for cpu fails: {words}')}$") as caught:
        built(product, W, X)
    assert not caught.value.flag


def test_a_mesh_unknown_to_the_analyzer_gets_a_note() -> None:
    spec = P("model")
    mapped = jax.shard_map(lambda x: x * 2, mesh=sr.mesh_shape("model:8"), in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="should match the mesh passed to shard_map") as caught:
        built(mapped, X, shardings=P("data"))
    assert any("Pass that mesh" in note for note in caught.value.__notes__)


def summed_over_model(mesh: Any, *, manual: bool = False) -> Callable[[Any], Any]:
    """Sums over `model` by hand, on `mesh` or on the one in force; `manual` maps no other axis."""
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    options |= {"axis_names": {"model"}} if manual else {}
    rows = None if manual else "data"
    return jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "model"), in_specs=P(rows, "model"), out_specs=P(rows), **options
    )


def in_loop(mapped: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda carry, _: (carry + mapped(carry).sum(), None), x, None, length=3)[0]


def in_gradient(mapped: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: (jax.checkpoint(mapped)(x) ** 2).sum())


SHARD_MAPS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "alone": summed_over_model,
    "scan": lambda mesh: in_loop(summed_over_model(mesh)),
    "gradient of a checkpoint": lambda mesh: in_gradient(summed_over_model(mesh)),
    "vmap": lambda mesh: lambda x: jax.vmap(summed_over_model(mesh))(jnp.stack([x, x])),
    "jit in jit": lambda mesh: jax.jit(lambda x: jax.jit(summed_over_model(mesh))(x) * 2),
    "some axes": lambda mesh: summed_over_model(mesh, manual=True),
    "gradient of a vmap of some axes": lambda mesh: in_gradient(
        lambda x: jax.vmap(summed_over_model(mesh, manual=True))(jnp.stack([x, x]))
    ),
    "beside a constraint": lambda mesh: (
        lambda x: lax.with_sharding_constraint(
            summed_over_model(mesh)(x), P("data") if mesh is None else NamedSharding(mesh, P("data"))
        )
    ),
}
NAMED_MESHES = {
    "shape": sr.mesh_shape(AXES),
    "devices": OWN,
    "shape of devices": OWN.abstract_mesh,
    "in force": None,
}


@functools.cache
def shard_map_report(case: str, named: str, analyzed: str, target: str) -> sr.reports.AuditReport:
    mesh_on(target, AXES)
    function = SHARD_MAPS[case](NAMED_MESHES[named])
    in_shardings = (P("data", "model"),)
    return sr.audit(function, X, mesh=NAMED_MESHES[analyzed], in_shardings=in_shardings, target=target)


@pytest.mark.parametrize(
    ("target", "analyzed"),
    [
        (CPU, "shape"),
        (CPU, "devices"),
        pytest.param(CUDA, "shape", marks=pytest.mark.slow),
        pytest.param(TPU, "devices", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "named", ["shape", *(pytest.param(name, marks=pytest.mark.slow) for name in list(NAMED_MESHES)[1:])]
)
@pytest.mark.parametrize("case", SHARD_MAPS)
def test_a_shard_map_may_name_any_mesh_of_the_same_axes(case: str, named: str, analyzed: str, target: str) -> None:
    report = shard_map_report(case, named, analyzed, target)
    expected = shard_map_report(case, "in force", analyzed, target)
    assert report.flops == expected.flops
    assert [(each.kind, each.axes, each.times) for each in report.collectives] == [
        (each.kind, each.axes, each.times) for each in expected.collectives
    ]
    if "gradient" not in case:
        assert any(each.kind == "all-reduce" and each.axes == ("model",) for each in report.collectives)


@pytest.mark.parametrize("target", TARGETS)
def test_inner_jitted_functions_are_retargeted(target: str) -> None:
    jitted = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(OWN, P("data")))
    target_mesh = mesh_on(target, AXES)
    compiled = built(lambda x: jitted(x) + 1, X, mesh=target_mesh, trace_mesh=OWN, shardings=P("data"))
    assert [result.sharding.mesh for result in compiled.results if isinstance(result.sharding, NamedSharding)] == [
        target_mesh
    ]


# ---- warnings of compilers ----


def test_other_noise_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(w: Any, x: Any) -> Any:
        os.write(2, b"while tracing\n")
        return x @ w

    compiled = built(noisy, W, X)
    sys.stderr.write("after it\n")
    assert compiled.messages == ()
    stderr = capfd.readouterr().err
    assert "while tracing\n" in stderr
    assert stderr.endswith("after it\n")
