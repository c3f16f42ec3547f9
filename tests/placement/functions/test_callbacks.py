"""Errors of `equinox.error_if` and other callbacks in compiled functions, on one device and on eight."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.create_mesh("data:8")
SHARDED: dict[str, Any] = {"mesh": MESH, "in_shardings": P("data"), "out_shardings": P("data")}
SMALL = np.arange(8, dtype=np.float32)


def check(x: Any) -> Any:
    return 2 * eqx.error_if(x, jnp.any(x < 0), "x must be >= 0\nand it is not")


def in_a_loop(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        return check(carry) / 2, None

    return jax.lax.scan(step, x, None, length=3)[0]


def in_a_gradient(x: Any) -> Any:
    return jax.grad(lambda x: check(x).sum())(x) + check(x)


def in_shards(x: Any) -> Any:
    return jax.shard_map(check, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("place", [jnp.asarray, lambda x: sr.filter_shard(x, P("data"), MESH)], ids=["new", "placed"])
def test_error_if_raises_the_message_of_the_user(place: Any, options: Any) -> None:
    run = sr.filter_jit(check, **options)
    for _ in range(2):  # what is compiled is used again
        np.testing.assert_array_equal(run(place(SMALL)), 2 * SMALL)
        with pytest.raises(eqx.EquinoxRuntimeError, match="x must be >= 0\nand it is not") as caught:
            run(place(-SMALL))
        assert "XlaRuntimeError" not in str(caught.value)
        assert "test_callbacks.py" in str(caught.value)  # the line of the user's code
        assert "EQX_ON_ERROR" in str(caught.value)  # how to debug it, as Equinox says it


@pytest.mark.parametrize("fn", [in_a_loop, in_a_gradient, in_shards])
def test_error_if_raises_inside_of_transformations(fn: Any) -> None:
    run = sr.filter_jit(fn, **SHARDED)
    assert run(SMALL).shape == (8,)
    with pytest.raises(eqx.EquinoxRuntimeError, match="x must be >= 0"):
        run(-SMALL)


def test_error_if_raises_in_models_and_in_what_is_compiled_ahead() -> None:
    class Model(eqx.Module):
        w: jax.Array

        @sr.filter_jit(mesh=MESH, in_shardings=(None, P("data")))
        def __call__(self, x: Any) -> Any:
            return check(self.w * x)

    with pytest.raises(eqx.EquinoxRuntimeError, match="x must be >= 0"):
        Model(-jnp.ones(()))(SMALL)
    compiled = sr.filter_jit(check, **SHARDED).lower(SMALL).compile()
    with pytest.raises(eqx.EquinoxRuntimeError, match="x must be >= 0"):
        compiled(-SMALL)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["plain", "sharded"])
def test_error_if_raises_whatever_places_the_arguments(options: Any) -> None:
    def shard(x: Any) -> Any:
        return sr.filter_shard(x, P("data"), MESH)

    mapped = sr.filter_shard_map(check, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    for run in (sr.filter_jit(lambda x: check(shard(x)), **options), sr.filter_jit(mapped, **options)):
        np.testing.assert_array_equal(run(jnp.asarray(SMALL)), 2 * SMALL)
        with pytest.raises(eqx.EquinoxRuntimeError, match="x must be >= 0"):
            run(jnp.asarray(-SMALL))


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["plain", "sharded"])
def test_other_callbacks_raise_as_jax_does(options: Any) -> None:
    def host(x: np.ndarray) -> np.ndarray:
        if x.min() < 0:
            raise KeyError("negative")
        return np.asarray(x)

    run = sr.filter_jit(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((8,), np.int32), x), **options)
    ints = sr.filter_shard(np.arange(8, dtype=np.int32), P("data"), MESH)
    np.testing.assert_array_equal(run(ints), np.arange(8))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)KeyError.*negative"):
        run(sr.filter_shard(-np.arange(8, dtype=np.int32), P("data"), MESH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("raise", "EquinoxRuntimeError"),
        ("nan", "[nan nan]"),
        ("off", "[-2. -2.]"),
        ("breakpoint", "Opening a breakpoint"),
    ],
)
@pytest.mark.parametrize("options", ["", "mesh=MESH, in_shardings=P('data'), out_shardings=P('data')"])
def test_the_settings_of_equinox_mean_the_same(setting: str, expected: str, options: str) -> None:
    program = f"""
import warnings
warnings.simplefilter("ignore")
import jax
jax.config.update("jax_num_cpu_devices", 2)
import equinox as eqx, jax.numpy as jnp, shardrules as sr
from jax.sharding import PartitionSpec as P
MESH = sr.create_mesh("data:2")
run = sr.filter_jit(lambda x: 2 * eqx.error_if(x, jnp.any(x < 0), "negative"), {options})
try:
    print(run(-jnp.ones(2)))
except Exception as error:
    print(type(error).__name__)
"""
    root = str(Path(sr.__file__).parents[1])
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root, "EQX_ON_ERROR": setting}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        input="c\n",
        timeout=120,
        check=False,
        env={**os.environ, **settings},
    )
    assert expected in done.stdout, done.stdout + done.stderr


def test_a_check_raises_traced_and_at_top_level_in_either_order() -> None:
    mesh = sr.create_mesh("data:1", devices=jax.devices()[:1])
    for is_traced_first in (False, True):
        run = sr.filter_jit(lambda x: check(x), mesh=mesh, in_shardings=P("data"))
        runs = [run, lambda x, run=run: jax.jit(lambda scale: run(x) * scale)(1.0)]
        for call in reversed(runs) if is_traced_first else runs:
            assert call(jnp.asarray(SMALL)).shape == (8,)
            expected = eqx.EquinoxRuntimeError if call is run else (ValueError, RuntimeError)
            with pytest.raises(expected, match="x must be >= 0"):
                jax.block_until_ready(call(jnp.asarray(-SMALL)))
            assert run(jnp.asarray(SMALL)).shape == (8,)


def test_threads_get_the_errors_of_their_own_calls() -> None:
    has_failed, may_end = threading.Event(), threading.Event()

    def host(x: np.ndarray) -> np.ndarray:
        if x.min() < 0:
            has_failed.set()
            raise KeyError("negative")
        return 2 * np.asarray(x)

    def wait(x: np.ndarray) -> np.ndarray:
        may_end.wait(10)
        return np.asarray(x)

    struct = jax.ShapeDtypeStruct((8,), np.float32)
    # On devices of their own: two programs on one device run in turn.
    meshes = [sr.create_mesh("data:4", devices=devices) for devices in (jax.devices()[:4], jax.devices()[4:])]
    x, other_x = (sr.filter_shard(SMALL, P("data"), mesh) for mesh in meshes)
    bad = sr.filter_jit(lambda x: io_callback(wait, struct, jax.pure_callback(host, struct, x)))
    good = sr.filter_jit(lambda x: jax.pure_callback(host, struct, x))
    may_end.set()
    jax.block_until_ready((bad(x), good(other_x)))  # compiles them
    may_end.clear()
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(bad, -x)
        assert has_failed.wait(10)
        passing = pool.submit(good, other_x)
        threading.Timer(0.2, may_end.set).start()
        np.testing.assert_array_equal(passing.result(20), 2 * SMALL)
        with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError"):
            failing.result(20)


def test_a_callback_calls_its_own_function() -> None:
    struct, results = jax.ShapeDtypeStruct((), np.float32), []

    def count(x: Any, depth: int) -> Any:
        return jax.pure_callback(lambda x: np.asarray(run(x, depth - 1)) + 1, struct, x) if depth else x

    run = sr.filter_jit(count)
    thread = threading.Thread(target=lambda: results.append(float(run(np.float32(0), 3))), daemon=True)
    thread.start()
    thread.join(30)
    assert results == [3.0]
