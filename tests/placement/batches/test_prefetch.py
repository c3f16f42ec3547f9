"""`place_batches`: what arrives, in which order, how far ahead, and when the thread ends."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import AxisTypeError, ConfigError, PlanError


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return sr.create_mesh("data:8")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardrules.place_batches"]


def until(condition: Callable[[], bool]) -> bool:
    """Returns whether a condition becomes true while another thread goes on; the limit ends a test that fails."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def rows(step: int) -> dict[str, Any]:
    return {"x": np.full((8, 2), step, np.float32), "step": step}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_batches_arrive_in_order(prefetch: int, mesh: jax.sharding.Mesh) -> None:
    batches = list(sr.place_batches((rows(step) for step in range(7)), P("data"), mesh, prefetch=prefetch))
    assert [batch["step"] for batch in batches] == list(range(7))
    for batch in batches:
        assert batch["x"].sharding == jax.NamedSharding(mesh, P("data"))
        assert (batch["x"] == batch["step"]).all()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_batches_are_ahead(prefetch: int, mesh: jax.sharding.Mesh) -> None:
    started: list[int] = []

    def source() -> Iterator[Any]:
        for step in range(20):
            started.append(step)
            yield rows(step)

    with sr.place_batches(source(), P("data"), mesh, prefetch=prefetch) as batches:
        for step in range(3):
            next(batches)
            assert until(lambda step=step: len(started) == step + 1 + prefetch)
        time.sleep(0.05)
        assert len(started) == 3 + prefetch


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_arrives_after_the_batches_before_it(prefetch: int, mesh: jax.sharding.Mesh) -> None:
    def source() -> Iterator[Any]:
        yield rows(0)
        yield rows(1)
        raise ValueError("the file is broken")

    batches = sr.place_batches(source(), P("data"), mesh, prefetch=prefetch)
    assert [next(batches)["step"], next(batches)["step"]] == [0, 1]
    with pytest.raises(ValueError, match="the file is broken") as raised:
        next(batches)
    assert any(entry.name == "source" for entry in raised.traceback)
    assert list(batches) == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_cannot_be_placed_raises_where_it_is_asked_for(prefetch: int, mesh: jax.sharding.Mesh) -> None:
    batches = sr.place_batches(iter([rows(0), {"x": np.ones((6, 2))}]), P("data"), mesh, prefetch=prefetch)
    next(batches)
    with pytest.raises(PlanError, match=r"place_batch: .*(?s:.*)indivisible: x \(6, 2\)"):
        next(batches)
    assert list(batches) == []


def endless(closed: list[str]) -> Iterator[Any]:
    try:
        step = 0
        while True:
            yield rows(step)
            step += 1
    finally:
        closed.append(threading.current_thread().name)


def test_closing_stops_the_thread_and_closes_the_generator(mesh: jax.sharding.Mesh) -> None:
    closed: list[str] = []
    with sr.place_batches(endless(closed), P("data"), mesh) as batches:
        next(batches)
        assert threads()
    assert not threads()
    assert closed == ["shardrules.place_batches"]
    assert list(batches) == []
    batches.close()


def test_dropping_it_stops_the_thread(mesh: jax.sharding.Mesh) -> None:
    closed: list[str] = []
    for _ in sr.place_batches(endless(closed), P("data"), mesh):
        break
    gc.collect()
    assert until(lambda: bool(closed))


def test_contexts_of_the_caller_hold_in_the_thread(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh), jax.enable_x64(True):
        batches = sr.place_batches(iter([{"x": np.ones(8, np.float64)}]), P("data"))
    (batch,) = batches
    assert batch["x"].dtype == np.float64
    assert batch["x"].sharding.mesh == mesh


def test_arguments_are_checked_at_once(mesh: jax.sharding.Mesh) -> None:
    batches = [rows(0), rows(1)]  # a list is not closed
    assert [batch["step"] for batch in sr.place_batches(batches, P("data"), mesh)] == [0, 1]
    with pytest.raises(ConfigError, match="prefetch must be 0 or more, got -1"):
        sr.place_batches([], P("data"), mesh, prefetch=-1)
    with pytest.raises(AxisTypeError, match="a mesh must be a Mesh"):
        sr.place_batches([], P("data"), "data:8")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [2, 10**6])
def test_a_program_ends_with_batches_left(prefetch: int) -> None:
    """With a million the thread is still placing batches when Python ends."""
    code = f"""
import numpy as np, jax, itertools, shardrules as sr
from jax.sharding import PartitionSpec as P
rows = ({{"x": np.ones((8, 4))}} for _ in itertools.count())
batches = sr.place_batches(rows, P("data"), sr.create_mesh("data:-1"), prefetch={prefetch})
print(next(batches)["x"].shape)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "(8, 4)\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reader_may_fill_one_buffer_again_and_again(prefetch: int, mesh: jax.sharding.Mesh) -> None:
    buffer = np.empty((8, 2**17), np.float32)

    def rows_in_one_buffer() -> Iterator[dict[str, Any]]:
        for step in range(4):
            buffer[:] = step
            yield {"split": buffer, "whole": buffer[:1]}

    how = {"split": P("data"), "whole": P()}
    batches = list(sr.place_batches(rows_in_one_buffer(), how, mesh, prefetch=prefetch))
    for step, batch in enumerate(batches):
        assert (batch["split"] == step).all()
        assert (batch["whole"] == step).all()
