"""Fits and the search for a batch: against closed forms, against the audit, and with nonlinear memory."""

import functools
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    DoesNotFitError,
    HardwareError,
    NoMeshError,
    PlanError,
    TargetError,
)
from shardrules.programs.audits.fits import Fit, fits, largest_batch
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.compiling.request import CompileOptions
from shardrules.programs.machine.targets import Target
from tests.programs.examples import CPU, CUDA, TARGETS, TPU, mesh_on

MESH = sr.mesh_shape("data:8")
WIDTH = 256
ROW = 2 * WIDTH * 4
"""The bytes of a row of `grown`: as an argument and as a result."""


def grown(x: Any) -> Any:
    return x * 2 + 1


def rows(batch: int) -> tuple[Any, ...]:
    return (shape(batch, WIDTH),)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step(params: Any, moments: Any, x: Any) -> Any:
    gradients = jax.grad(loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - m, params, moments), moments


PARAMS = {"up": shape(64, WIDTH), "down": shape(WIDTH, 64)}
RULES = sr.RegexShardingRule([("up", P(None, "model")), ("down", P("model"))])


def tracing(fn: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], list[int]]:
    """A function, and the size of the first dim of what it was traced with each time."""
    traced: list[int] = []

    def run(x: Any) -> Any:
        traced.append(x.shape[0])
        return fn(x)

    return run, traced


def first(x: Any) -> Any:
    return x[0].astype(jnp.float32)


def counted(make: Callable[[int], tuple[Any, ...]]) -> tuple[Callable[[int], tuple[Any, ...]], Counter[int]]:
    calls: Counter[int] = Counter()

    def counting(batch: int) -> tuple[Any, ...]:
        calls[batch] += 1
        return make(batch)

    return counting, calls


# One size.


@pytest.mark.parametrize("target", TARGETS)
def test_a_fit_to_the_byte(target: str) -> None:
    mesh, needs = mesh_on(target, "data:8"), 64 * ROW
    ask = functools.partial(
        fits, grown, *rows(8 * 64), mesh=mesh, target=target, in_shardings=P("data"), roles="parameters"
    )
    exact, less = ask(budget=needs), ask(budget=needs - 1)
    assert exact
    assert not less
    assert (exact.peak_bytes, exact.budget_bytes, exact.headroom_bytes) == (needs, needs, 0)
    assert less.headroom_bytes == -1
    assert exact.memory == less.memory == MemoryUse(needs // 2, 0, 0, 0, needs // 2, 0)
    assert ask(budget=needs + 2**20, reserve="1 MiB")
    assert not ask(budget=needs + 2**20, reserve=2**20 + 1)
    assert ask(budget=f"{needs} B") == exact


@pytest.mark.parametrize("target", TARGETS)
def test_a_fit_has_the_memory_of_an_audit(target: str) -> None:
    text = "data:4,model:2"
    mesh = mesh_on(target, text)
    plan = RULES.plan(PARAMS, sr.mesh_shape(text))
    options: dict[str, Any] = {
        "plan": plan,
        "in_shardings": (None, None, P("data")),
        "out_shardings": (plan, plan.mirror),
        "donate_argnums": (0, -2),
        "target": target,
    }
    args = PARAMS, PARAMS, shape(64, 64)
    fit = fits(step, *args, mesh=mesh, budget="1 GiB", **options)
    assert fit.memory == sr.audit(step, *args, mesh=mesh, **options).memory
    assert fit.memory is not None
    assert fit.memory.outputs_bytes < 1024  # else nothing was donated


def test_a_fit_compiles_as_an_audit_does() -> None:
    """Roles, types of axes, and a function that is jitted already and names a mesh of its own."""
    mesh = sr.create_mesh("data:4,model:2")

    def constrained(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", "model")))

    jitted = jax.jit(constrained, in_shardings=(NamedSharding(mesh, P("data")), None), donate_argnums=0)
    split: dict[str, Any] = {"in_shardings": P("data")}
    cases: list[tuple[Callable[..., Any], int, dict[str, Any]]] = [
        (jitted, 2, {}),
        (constrained, 2, {"roles": ("batch", "parameters"), "in_shardings": (P("data"), P(None, "model"))}),
        *((grown, 1, {**split, "axis_types": kind}) for kind in ("explicit", None)),
        (grown, 1, {**split, "out_shardings": P()}),
    ]
    for fn, count, options in cases:
        args = (shape(64, 64),) * count
        fit = fits(fn, *args, mesh=mesh, budget="1 GiB", **options)
        assert fit.memory == sr.audit(fn, *args, mesh=mesh, **options).memory
    seen = []
    fits(lambda x: seen.append(jax.typeof(x).sharding.spec) or x, shape(64, 64), mesh=mesh, budget=0,
         axis_types="explicit", **split)  # fmt: skip
    assert seen == [P("data", None)]


@pytest.mark.slow
def test_the_sheet_is_the_budget_except_on_cpus() -> None:
    mesh, memory_bytes = mesh_on(CUDA, "data:8"), sr.Hardware.named("cuda:h100").memory_bytes
    fit = fits(grown, *rows(64), mesh=mesh, target=CUDA, in_shardings=P("data"))
    assert fit
    assert fit.budget_bytes == memory_bytes
    assert fits(grown, *rows(64), mesh=mesh, target=CUDA, reserve="8 GiB").budget_bytes == memory_bytes - 8 * 2**30


def test_a_cpu_has_no_sheet() -> None:
    with pytest.raises(HardwareError, match=r"cpu:8 has no memory of its own.* budget='40 GiB'.*'cuda:h100:8'"):
        fits(grown, *rows(8), mesh=MESH, target=CPU)
    with pytest.raises(HardwareError, match=r"Pass a budget"):
        largest_batch(grown, rows, mesh=MESH)


@pytest.mark.parametrize(
    ("budget", "reserve", "complaint"),
    [
        ("80 gigs", 0, "budget must be a number of bytes, or a string like '80GB'"),
        (-1, 0, "budget must be a number of bytes, 0 or more; got -1"),
        ("1 GB", "much", "reserve must be a number of bytes, or a string"),
        ("1 KiB", 2000, "reserve is 2.0 KiB, more than the available 1.0 KiB"),
    ],
)
def test_bad_budgets_are_refused(budget: Any, reserve: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        fits(grown, *rows(8), mesh=MESH, budget=budget, reserve=reserve)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        largest_batch(grown, rows, mesh=MESH, budget=budget, reserve=reserve)


def test_where_the_mesh_is_from() -> None:
    budget, mesh = "1 MiB", sr.create_mesh("data:4,model:2")
    placed = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    assert fits(grown, placed, budget=budget).mesh == "data:4,model:2"
    assert fits(grown, placed, budget=budget, mesh=sr.mesh_shape("data:2")).mesh == "data:2"
    plan = sr.DimShardingRule("data", 0).plan(shape(64, 64), MESH)
    assert fits(grown, shape(64, 64), budget=budget, plan=plan).mesh == "data:8"
    with jax.set_mesh(mesh):
        assert fits(grown, shape(64, 64), budget=budget).mesh == "data:4,model:2"
    with pytest.raises(NoMeshError, match=r"mesh=sr.mesh_shape\('data:8'\)"):
        fits(grown, shape(64, 64), budget=budget)
    with pytest.raises(NoMeshError, match="no mesh to compile for"):
        largest_batch(grown, rows, budget=budget)
    with pytest.raises(TargetError, match="has 8 devices, but target cpu:4 has 4"):
        fits(grown, shape(64, 64), budget=budget, mesh=MESH, target="cpu:4")


def test_bad_arguments_are_refused_before_compiling() -> None:
    with pytest.raises(PlanError, match=r"x \(63, 256\): .* not divisible by mesh axis data size 8"):
        fits(grown, *rows(63), mesh=MESH, budget="1 MiB", in_shardings=P("data"))
    with pytest.raises(sr.errors.ConfigError, match="donate_argnums names argument 1, but there are 1"):
        fits(grown, *rows(64), mesh=MESH, budget="1 MiB", donate_argnums=1)


@pytest.mark.slow
def test_the_compiler_for_tpus_refuses() -> None:
    mesh = mesh_on(TPU, "data:8")
    needs = 4_000_000 * ROW * 4
    ask = functools.partial(fits, grown, shape(8 * 4_000_000, 4 * WIDTH), mesh=mesh, target=TPU, in_shardings=P("data"))
    fit = ask()
    assert not fit
    assert (fit.memory, fit.headroom_bytes) == (None, None)
    assert fit.peak_bytes == pytest.approx(needs, rel=0.01)
    assert "Ran out of memory" in fit.refusal
    text = str(fit)
    assert text.startswith("grown on tpu:v5e:4x2, mesh data:8, does not fit: the compiler for tpu refuses")
    assert not ask(budget="1 TiB")  # no budget makes a device larger


@pytest.mark.slow
def test_a_refusal_beats_a_sum_that_fits() -> None:
    """So near the limit the arrays have room, and what libtpu needs beside them has not."""
    ask = functools.partial(fits, mesh=mesh_on(TPU, "data:8"), target=TPU, in_shardings=P("data"))
    assert ask(grown, shape(258_000 * 64, 1024))
    fit = ask(grown, shape(258_015 * 64, 1024))
    assert not fit
    assert fit.budget_bytes > 2 * 258_015 * 8 * 1024 * 4
    assert fit.refusal


def test_what_a_fit_prints() -> None:
    memory = MemoryUse(2**30, 2**31, 0, 0, 2**20, 5 * 2**30)
    fit = Fit("step", Target.parse(CUDA), "data:8", 9 * 2**30, memory.peak_bytes, memory)
    assert str(fit) == (
        "step on cuda:h100:8, mesh data:8, fits: a device needs 8.0 GiB of 9.0 GiB, 1,023.0 MiB to spare\n"
        "  temporaries 5.0 GiB (62%), optimizer state 2.0 GiB (25%), parameters 1.0 GiB (12%), outputs 1.0 MiB (0%)"
    )
    assert str(attrs.evolve(fit, budget_bytes=2**32)).splitlines()[::2] == [
        "step on cuda:h100:8, mesh data:8, does not fit: a device needs 8.0 GiB of 4.0 GiB, 4.0 GiB too much",
        "  -> Make the batch smaller, split activations, or recompute them (jax.checkpoint)",
    ]


# The search.


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_batch_to_the_byte(target: str) -> None:
    """TPUs pad 1 to 8 rows, so there memory is a staircase. All of them end on the same one."""
    mesh = mesh_on(target, "data:8")
    (run, traced), (make, calls) = tracing(grown), counted(rows)
    search = largest_batch(run, make, budget=512 * ROW, mesh=mesh, target=target, in_shardings=P("data"))
    assert (search.batch, search.multiple_of) == (8 * 512, 8)
    assert search.fit
    assert search.fit.headroom_bytes == 0
    assert not dict(search.trials)[8 * 512 + 8]
    assert traced == [batch for batch, _ in search.trials]
    assert list(calls.values()) == [1] * len(calls)  # batches that show the multiple are tried too
    assert len(traced) == len(Counter(traced)) <= 7


@pytest.mark.slow
def test_libtpu_ends_the_search() -> None:
    mesh = mesh_on(TPU, "data:8")
    search = largest_batch(
        grown, lambda batch: (shape(batch, 1024),), mesh=mesh, target=TPU, in_shardings=P("data"), multiple_of=8 * 1024
    )
    tried = dict(search.trials)
    refused = tried[search.batch + 8 * 1024]
    assert search.batch == 2015 * 8 * 1024
    assert (refused.memory, bool(refused.refusal)) == (None, True)
    assert len(tried) <= 8
    assert re.search(r"^16,515,072 .* no .* the compiler refuses$", str(search), re.MULTILINE)


def curve(memory: Callable[[int], int]) -> Callable[[int], tuple[Any, ...]]:
    """Arguments that take, with a float as result, `memory(batch)` bytes on a device."""
    return lambda batch: (shape(memory(batch) - 4, dtype=jnp.int8),)


LINE, NOISE = 10**6, np.random.default_rng(0).integers(0, 3000, 4096)
CURVES: dict[str, tuple[Callable[[int], int], int, int]] = {
    # The need, the largest that fits in a MiB, and how many compiles are enough to find it.
    "line": (lambda batch: 1000 + 700 * batch, 1496, 6),
    "steep line": (lambda batch: 500_000 + 100_000 * batch, 5, 5),
    "one fits": (lambda batch: 600_000 * batch, 1, 2),
    "square": (lambda batch: 1000 + 3 * batch * batch, 590, 9),
    "root": (lambda batch: 1000 + 20_000 * math.isqrt(batch), 2808, 9),
    "staircase": (lambda batch: 1000 + 50_000 * -(-batch // 64), 1280, 8),
    "fourth power": (lambda batch: 1000 + batch**4 // 1000, 179, 14),
    "falls": (lambda batch: 1000 + (700 if batch < 1000 else 200) * batch, 5237, 8),
    "late": (lambda batch: 1000 + 10 * batch + 5000 * max(0, batch - 300), 508, 8),
    "early": (lambda batch: 1000 + 5000 * min(batch, 100) + 50 * max(0, batch - 100), 11051, 9),
    "cliff": (lambda batch: 10**4 + batch if batch < 777 else 2 * 10**6, 776, 12),
}


@pytest.mark.parametrize("name", CURVES)
def test_nonlinear_memory(name: str) -> None:
    memory, largest, enough = CURVES[name]
    (run, traced), (make, calls) = tracing(first), counted(curve(memory))
    search = largest_batch(run, make, budget=2**20, mesh=sr.mesh_shape("data:1"), multiple_of=1)
    assert all(fit.peak_bytes == memory(batch) for batch, fit in search.trials)  # else this test tests nothing
    assert search.batch == largest
    assert not dict(search.trials)[largest + 1]
    assert calls == Counter([batch for batch, _ in search.trials])
    assert traced == list(dict.fromkeys(memory(batch) - 4 for batch in calls))  # each program once
    assert len(traced) <= enough
    assert name != "falls" or max(calls) < 6000  # the line through the two largest would lead far beyond


@pytest.mark.parametrize("multiple_of", [1, 3, 8])
@pytest.mark.parametrize("at_least", [1, 50])
def test_noisy_memory(multiple_of: int, at_least: int) -> None:
    def memory(batch: int) -> int:
        return 1000 + 900 * batch + int(NOISE[batch])

    search = largest_batch(
        first,
        curve(memory),
        budget=2**20,
        mesh=MESH,
        multiple_of=multiple_of,
        at_least=at_least,
    )
    assert search.batch % multiple_of == 0
    assert memory(search.batch) <= 2**20 < memory(search.batch + multiple_of)
    assert min(batch for batch, _ in search.trials) == -(-at_least // multiple_of) * multiple_of


@pytest.mark.parametrize(
    ("axes", "make", "in_shardings", "unit"),
    [
        ("data:8", rows, P("data"), 8),
        ("data:4,model:2", rows, P("data"), 4),
        ("data:4,model:2", rows, P("data", "model"), 4),
        ("data:4,model:2", rows, P(("data", "model")), 8),
        ("data:4,model:2", rows, P(None, "model"), 1),
        ("data:4,model:2", rows, P(), 1),
        ("data:4,model:2", rows, sr.DimShardingRule("model", 0), 2),
        ("data:4,model:2", rows, None, 8),  # no sharding says how it is split
        ("data:4,model:2", rows, P(P.UNCONSTRAINED), 8),
        ("data:8", lambda batch: (shape(batch * 128),), P("data"), 1),  # a batch of sequences as one dimension
        ("data:8", lambda batch: (shape(batch * 2),), P("data"), 4),
        ("data:8", lambda batch: (shape(batch * 3),), P("data"), 8),
        ("data:8", lambda batch: (shape(batch * batch),), P("data"), 8),
        ("data:8", lambda batch: (shape(batch + 8),), P("data"), 8),
        ("data:4,model:2", lambda batch: (shape(batch, 4), shape(8, batch)), (P("data"), P(None, "model")), 4),
        ("data:2,model:3", lambda batch: (shape(batch, 4), shape(8, batch)), (P("data"), P(None, "model")), 6),
        ("data:4,model:2", lambda batch: ([shape(1024, 8)] * batch,), P("data"), 8),  # more arrays, not larger ones
        ("data:8", lambda batch: (shape(*[2] * (batch.bit_length() + 2), dtype=jnp.int8),), P(), 8),
    ],
)
def test_the_multiple(axes: str, make: Callable[[int], tuple[Any, ...]], in_shardings: Any, unit: int) -> None:
    mesh = sr.mesh_shape(axes)
    search = largest_batch(
        lambda *args: args, make, budget="1 GiB", mesh=mesh, in_shardings=in_shardings, at_most=2 * unit
    )
    assert search.multiple_of == unit
    assert search.batch == 2 * unit


def test_a_multiple_that_cannot_be_split() -> None:
    with pytest.raises(PlanError, match=r"\(6, 256\) not divisible by mesh axis data size 8") as caught:
        largest_batch(grown, rows, budget="1 GiB", mesh=MESH, in_shardings=P("data"), multiple_of=6)
    assert caught.value.__notes__ == [
        "while trying a batch of 6; multiple_of, at_least and at_most set which batches are tried"
    ]


SEARCH: Any = functools.partial(largest_batch, grown, rows, mesh=MESH, in_shardings=P("data"))


def test_from_one_to_another() -> None:
    ask = functools.partial(SEARCH, budget=512 * ROW)
    search = ask(at_most=2000)
    assert search.batch == 2000
    assert max(batch for batch, _ in search.trials) == 2000
    assert ", nothing larger\n" in str(search)
    assert ask(at_most=2007).batch == 2000
    assert ask(at_most=5000) == ask()
    late = ask(at_least=4001)
    assert late.batch == 4096
    assert late.trials[0][0] == 4008
    assert [batch for batch, _ in ask(at_least=4096).trials] == [4096, 8192, 4104]
    assert [batch for batch, _ in ask(at_least=16, at_most=16).trials] == [16]
    with pytest.raises(ConfigError, match="no multiple of 8 is between at_least=9 and at_most=15"):
        ask(at_least=9, at_most=15)
    for name in ("multiple_of", "at_least", "at_most"):
        with pytest.raises(ConfigError, match=f"{name} must be 1 or more, got 0"):
            ask(**{name: 0})
        with pytest.raises(ConfigError, match=f"{name} must be an integer, got 'x'"):
            ask(**{name: "x"})


def test_donation_makes_room() -> None:
    ask = functools.partial(SEARCH, budget=512 * ROW)
    assert ask(donate_argnums=0, out_shardings=P("data")).batch == 2 * ask().batch


def test_an_unknown_option_names_the_function() -> None:
    options: Any = {"in_sharding": P()}
    message = r"largest_batch\(\) got an unexpected keyword argument 'in_sharding' \(did you mean 'in_shardings'\?\)"
    with pytest.raises(ConfigTypeError, match=message):
        largest_batch(grown, rows, budget="1 MiB", mesh=MESH, **options)
    options_themselves: Any = {"option": 1}  # `options` is not the name of an argument
    with pytest.raises(ConfigTypeError, match=r"argument 'option'$"):
        largest_batch(grown, rows, budget="1 MiB", mesh=MESH, **options_themselves)
    with pytest.raises(TypeError, match=r"^fits\(\) got an unexpected keyword argument 'in_sharding'"):
        fits(grown, *rows(8), budget="1 MiB", mesh=MESH, **options)
    assert all(f"`{name}`" in str(largest_batch.__doc__) for name in CompileOptions.__annotations__)


def test_nothing_fits() -> None:
    ask = functools.partial(SEARCH, budget=ROW - 1)
    with pytest.raises(
        DoesNotFitError, match=r"^not even a batch of 8 fits\. grown on cpu, mesh data:8, does"
    ) as caught:
        ask()
    assert re.search(r"a device needs 2.0 KiB of 2.0 KiB, 1 B too much\n  .*\n  -> ", str(caught.value))
    assert caught.value.needed_bytes == ROW
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(DoesNotFitError, match=r"^not even a batch of 104 fits"):
        ask(at_least=100)


@pytest.mark.slow
def test_nothing_fits_a_tpu() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"^not even a batch of 8,000 fits.*the compiler for tpu refuses"
    ) as caught:
        largest_batch(
            grown,
            lambda batch: (shape(batch * 4000, 1024),),
            mesh=mesh_on(TPU, "data:8"),
            target=TPU,
            in_shardings=P("data"),
            multiple_of=8000,
        )
    assert caught.value.needed_bytes == pytest.approx(4_000_000 * ROW * 4, rel=0.01)


def test_a_search_that_would_not_end() -> None:
    ask = functools.partial(largest_batch, grown, mesh=MESH, budget="1 GiB")
    with pytest.raises(
        ConfigError, match=r"the same shapes for batch 1 and for batch 1,099,.*: it has to use its argument"
    ):
        ask(lambda batch: rows(64))
    with pytest.raises(ConfigError, match="the same shapes for batch 1 and for batch 64:"):
        ask(lambda batch: rows(64), at_most=64)
    with pytest.raises(ConfigError, match="even a batch of 1,099,511,627,776 fits: set at_most"):
        ask(lambda batch: rows(batch.bit_length()))


def test_make_args_that_rounds_up() -> None:
    run, traced = tracing(grown)

    def padded(batch: int) -> tuple[Any, ...]:
        return rows(max(128, 2 ** (batch - 1).bit_length()))

    ask = functools.partial(largest_batch, run, padded, budget=5000 * ROW // 8, mesh=MESH, in_shardings=P("data"))
    assert ask(multiple_of=8).batch == 4096
    assert len(traced) == len(dict.fromkeys(traced))
    with pytest.raises(ConfigError, match=r"batch 8 and for batch 96:.*If it rounds batches up, set multiple_of"):
        ask(multiple_of=8, at_most=100)
    assert ask(multiple_of=128, at_most=1000).batch == 896


def test_the_batch_may_be_a_static_argument() -> None:
    """Anything but an array is static, and part of the program: here a number of layers."""

    def run(x: Any, layers: int) -> Any:
        return jnp.concatenate([x] * layers)

    search = largest_batch(
        run, lambda layers: (shape(1024), layers), budget=100 * 2**10, mesh=sr.mesh_shape("data:1"), multiple_of=1
    )
    assert search.batch == 24


def test_errors_of_make_args_name_the_batch() -> None:
    def make(batch: int) -> tuple[Any, ...]:
        if batch > 100:
            raise ValueError("the table of positions has 100 rows")
        return rows(batch)

    ask = functools.partial(largest_batch, grown, budget="1 GiB", mesh=MESH, in_shardings=P("data"))
    with pytest.raises(ValueError, match="the table of positions has 100 rows") as caught:
        ask(make)
    assert caught.value.__notes__ == [
        "while trying a batch of 256; multiple_of, at_least and at_most set which batches are tried"
    ]
    assert ask(make, at_most=100).batch == 96
    with pytest.raises(ConfigTypeError, match="make_args must return a tuple of arguments, got ShapeDtypeStruct"):
        ask(lambda batch: rows(batch)[0])  # pyright: ignore[reportArgumentType]  what else would raise


def test_errors_of_the_function_name_the_batch() -> None:
    def picky(x: Any) -> Any:
        if x.shape[0] == 16:
            raise ZeroDivisionError("not 16")
        return x

    with pytest.raises(ZeroDivisionError, match="not 16") as caught:
        largest_batch(picky, rows, budget="1 GiB", mesh=MESH, in_shardings=P("data"))
    assert caught.value.__notes__[-1].startswith("while trying a batch of 16;")


def test_what_a_search_prints() -> None:
    search = SEARCH(budget=512 * ROW, at_least=2048, roles="parameters")
    assert str(search).splitlines() == [
        "largest batch 4,096, in multiples of 8; 3 tried",
        "",
        "batch  per device   to spare  fits  most of it",
        "-----  ----------  ---------  ----  --------------",
        "2,048   512.0 KiB  512.0 KiB  yes   parameters 50%",
        "4,096     1.0 MiB        0 B  yes   parameters 50%",
        "4,104     1.0 MiB   -2.0 KiB  no    parameters 50%",
        "",
        "grown on cpu, mesh data:8, fits: a device needs 1.0 MiB of 1.0 MiB, 0 B to spare",
        "  parameters 512.0 KiB (50%), outputs 512.0 KiB (50%)",
    ]
