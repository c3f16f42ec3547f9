"""By behaviour: `time_limit` is kept, however slow a search is. The clock here only moves while it works."""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from scipy.optimize import OptimizeResult

import shardrules as sr
from shardrules.core import deadline
from shardrules.programs.autoplan import query
from shardrules.programs.autoplan.solve import messages, search, solver
from tests.programs.autoplan.test_autoplan import GRID, codes, loss, mlp, train

LIMIT = 10.0
GRACE = 1.0
"""The seconds by which a search may exceed its time limit: a tenth."""

SLOW_LINKS = attrs.evolve(sr.Hardware.named("cuda:h100"), name="slow links", link_bytes_per_second=1e9)
PINS = sr.RegexShardingRule([(r"^1$", P(None, "data")), (r"^0/", P())])
"""Pins that make `loss` more than twice as slow on slow links."""


@final
@attrs.define
class Clock:
    """A clock that stands still unless it is moved."""

    seconds: float = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    return clock


def slow_down(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Makes each sweep take some seconds, and each linear program, which fails if it has fewer."""
    sweep = messages.Messages.sweep

    def slow_sweep(self: messages.Messages) -> None:
        clock.seconds += seconds
        sweep(self)

    def slow(solve: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, options: dict[str, Any], **kwargs: Any) -> Any:
            limit = options["time_limit"]
            clock.seconds += min(limit, seconds)
            if limit < seconds:
                return OptimizeResult(x=None, status=1, success=False)
            return solve(*args, options=options, **kwargs)

        return run

    monkeypatch.setattr(solver, "linprog", slow(solver.linprog))
    monkeypatch.setattr(messages.Messages, "sweep", slow_sweep)


ARGS = mlp(256, 1024, 2**16)
SMALL_LIMIT = "100MiB"
"""Less than unsplit arrays take: without a solver, nothing that fits is found."""


def plan(mesh: Any, *, pins: bool = False, tight: bool = False) -> sr.reports.AutoPlan:
    options: dict[str, Any] = {"memory_limit": SMALL_LIMIT if tight else None, "time_limit": LIMIT}
    if pins:
        return sr.autoplan(loss, *ARGS[::2], mesh=mesh, pins=PINS, hardware=SLOW_LINKS, **options)
    return sr.autoplan(train, *ARGS, mesh=mesh, **options)


@pytest.mark.parametrize("seconds", [0.02, 0.9])
@pytest.mark.parametrize("mesh", [GRID, 8, sr.mesh_shape("data:2,fsdp:2,model:2")], ids=["grid", "count", "three"])
@pytest.mark.parametrize("pins", [False, True], ids=["free", "pinned"])
@pytest.mark.parametrize("tight", [False, True], ids=["wide", "tight"])
def test_a_time_limit_is_kept(
    mesh: Any, pins: bool, tight: bool, seconds: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, clock, seconds)
    start = clock.seconds
    plan(mesh, pins=pins, tight=tight)
    assert clock.seconds - start <= LIMIT + GRACE


@pytest.mark.parametrize("mesh", [GRID, 8], ids=["grid", "count"])
def test_a_search_that_ends_in_time_is_not_changed_by_the_limit(
    mesh: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sr.autoplan(train, *ARGS, mesh=mesh, time_limit=float("inf"))
    slow_down(monkeypatch, clock, 0.01)
    limited = plan(mesh)
    assert limited.choice == free.choice
    assert limited.candidates == free.candidates


@pytest.mark.parametrize("seconds", [0.02, 0.9])
def test_frontiers_keep_the_limit(seconds: float, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(GRID)
    slow_down(monkeypatch, clock, seconds)
    start = clock.seconds
    assert len(planned.frontier(6).points) == 6
    assert clock.seconds - start <= LIMIT + GRACE


def test_frontiers_that_end_in_time_are_not_changed_by_the_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(GRID)
    free = attrs.evolve(planned, time_limit=float("inf")).frontier(3)
    slow_down(monkeypatch, clock, 0.003)
    within, limits = search.Task.within, list[float]()

    def interrupted(self: search.Task, limit: float, *args: Any) -> search.SearchResult:
        limits.append(limit)
        if len(limits) == 1:  # takes more than an equal share of the time
            clock.seconds += 0.8 * LIMIT
        return within(self, limit, *args)

    monkeypatch.setattr(search.Task, "within", interrupted)
    assert planned.frontier(3) == free
    assert len(limits) == 4  # the last point is the first that was searched


def test_frontiers_are_of_what_was_met_once_the_time_is_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = sr.autoplan(train, *mlp(1024, 4096, 2**12), mesh=sr.mesh_shape("data:8"), time_limit=LIMIT)
    within, limits = search.Task.within, list[float]()

    def slow_search(self: search.Task, limit: float, *args: Any) -> search.SearchResult:
        result = within(self, limit, *args)
        limits.append(limit)
        clock.seconds += LIMIT / 2
        return result

    monkeypatch.setattr(search.Task, "within", slow_search)
    points = planned.frontier(4).points
    assert limits == [float("inf"), 0.0]
    assert points[0].seconds > points[-1].seconds == pytest.approx(planned.cost)
    assert points[0].price
    assert points[0].price > 0
    assert all(point.peak_bytes <= point.limit_bytes for point in points)


def test_what_pins_cost_is_searched_within_the_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, clock, 0.05)
    assert "costly-pin" in codes(plan(sr.mesh_shape("data:8"), pins=True))


def test_pins_are_not_compared_once_the_time_is_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, clock, LIMIT)
    planned = plan(sr.mesh_shape("data:8"), pins=True)
    assert "pins-not-compared" in codes(planned)
    assert "costly-pin" not in codes(planned)


def test_meshes_without_time_are_named(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    read = search.Task.of

    def slow_read(*args: Any, **kwargs: Any) -> search.Task:
        clock.seconds += LIMIT * 0.6  # two meshes of three
        return read(*args, **kwargs)

    monkeypatch.setattr(search.Task, "of", slow_read)
    planned = plan(8)
    (finding,) = [finding for finding in planned.findings if finding.code == "untried-meshes"]
    assert "data:2,model:4" in finding.message
    assert sorted(candidate.mesh for candidate in planned.candidates) == ["data:4,model:2", "data:8"]


@pytest.mark.parametrize("mesh", [GRID, 8], ids=["grid", "count"])
def test_without_time_there_is_a_plan_all_the_same(mesh: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, clock, LIMIT)
    planned = plan(mesh, tight=True)
    assert "time-is-up" in codes(planned)
    assert "may-not-fit" not in codes(planned)  # one of the patterns fits


def test_without_time_pins_are_not_blamed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    task = search.Task.within

    def slow_search(self: search.Task, *args: Any) -> search.SearchResult:
        clock.seconds += 2 * LIMIT
        return task(self, args[0])

    monkeypatch.setattr(search.Task, "within", slow_search)
    planned = sr.autoplan(loss, *ARGS[::2], mesh=GRID, pins=PINS, memory_limit="30MiB", time_limit=LIMIT)
    (finding,) = [finding for finding in planned.findings if finding.code == "may-not-fit"]
    assert "the time limit was reached before a search without the pins" in finding.message


@jax.checkpoint
def block(weights: Any, x: Any) -> Any:
    y = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    query, key, value = (y @ weights[name] for name in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key))
    x = x + jnp.einsum("bts,bsd->btd", scores, value) @ weights["out"]
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def deep_step(weights: Any, x: Any) -> Any:
    def mean(weights: Any) -> Any:
        y = x
        for layer in weights:
            y = block(layer, y)
        return jnp.mean(y**2)

    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(mean)(weights))


@pytest.mark.slow
@pytest.mark.parametrize("memory_limit", [None, "1GiB"])
def test_searches_of_large_programs_end_in_time(memory_limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the processor, which counts all that planning does."""
    processor = SimpleNamespace(monotonic=time.process_time)
    for module in (deadline, query, search):
        monkeypatch.setattr(module, "time", processor)
    shapes = {"query": (512, 512), "key": (512, 512), "value": (512, 512), "out": (512, 512)}
    shapes |= {"up": (512, 2048), "down": (2048, 512)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = [layer] * 16, jax.ShapeDtypeStruct((64, 512, 512), jnp.float32)
    mesh = sr.mesh_shape("a:2,b:2,c:2")
    sr.autoplan(deep_step, *args, mesh=mesh, time_limit=0.1)  # so that nothing is done for the first time
    gc.collect()
    gc.freeze()  # collecting what other tests left would count
    start = time.process_time()
    sr.autoplan(deep_step, *args, mesh=mesh, time_limit=0.1)
    limit = 2 * (time.process_time() - start)
    start = time.process_time()
    planned = sr.autoplan(deep_step, *args, mesh=mesh, memory_limit=memory_limit, time_limit=limit)
    assert time.process_time() - start < 1.15 * limit
    assert planned.result.is_late or planned.status == "optimal"


SILENT = """
from tests.programs.autoplan.solve.test_search import TIGHT, budget
from tests.programs.autoplan.solve.test_solver import random_task
for seed in TIGHT:
    task = random_task(seed)
    for part in (0.02, 0.3, 0.7):
        task.within(budget(task, part))
"""


@pytest.mark.slow
def test_searches_print_nothing() -> None:
    """Solvers that print by themselves write to the file descriptor, past `sys.stdout`."""
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_time_limits_are_above_zero(seconds: float) -> None:
    with pytest.raises(sr.errors.ConfigError, match="time_limit must be a number of seconds above 0"):
        sr.autoplan(abs, 1.0, mesh=sr.mesh_shape("data:8"), time_limit=seconds)
