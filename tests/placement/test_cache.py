"""Keys of compiled functions, and the cache that drops what was not used for longest."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.placement import cache, init
from shardrules.placement.cache import Cache, array_key, static_key

MESH = sr.create_mesh("data:8")


def test_a_full_cache_drops_what_was_not_used_for_longest() -> None:
    values: Cache[list[int]] = Cache(3)
    for index in range(3):
        values.add(index, [index])
    assert values.get(0) == [0]
    values.add(3, [3])
    assert [values.get(index) for index in range(4)] == [[0], None, [2], [3]]
    assert values.get("unknown") is None


def test_a_dropped_value_goes_with_all_its_keys() -> None:
    values: Cache[list[int]] = Cache(2)
    shared = [0]
    values.add("first", shared)
    values.add("second", shared)
    values.add("third", [1])
    assert [values.get(key) for key in ("first", "second", "third")] == [None, None, [1]]


def test_comparing_keys_may_use_the_cache() -> None:
    values: Cache[list[int]] = Cache()

    class Key:
        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            values.add("inner", [1])
            return self is other

    values.add(Key(), [0])
    assert values.get(Key()) is None
    assert values.get("inner") == [1]


def test_threads_share_a_cache() -> None:
    values: Cache[list[int]] = Cache(4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change inside a method, not only between calls

    def use(thread: int) -> int:
        for step in range(2000):
            key = (step + thread) % 9
            if values.get(key) is None:
                values.add(key, [key])
        return len(values._values)

    try:
        with ThreadPoolExecutor(8) as pool:
            sizes = list(pool.map(use, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert max(sizes) <= 4
    kept = {id(value) for value in values._values.values()}
    assert kept == set(values._last_uses)


def test_filter_jit_keeps_the_functions_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    run = sr.filter_jit(lambda x: traces.append(x.shape) or 2 * x, mesh=MESH)
    monkeypatch.setattr(run._kept[1], "size", 4)  # each call has two keys
    for size in (8, 16, 8, 24, 8, 16):
        run(np.ones(size))
    assert traces == [(8,), (16,), (24,), (16,)]


def test_filter_init_keeps_the_functions_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_CACHE_SIZE", 2)
    traces: list[Any] = []
    make = sr.filter_init(lambda x: traces.append(x.shape) or 2 * x, P("data"), MESH)
    for size in (8, 16, 8, 24, 8, 16):
        make(np.ones(size))
    assert traces == [(8,), (16,), (24,), (16,)]


def test_static_keys_tell_equal_values_of_other_types_apart() -> None:
    keys = [static_key(value) for value in (1, 1.0, True, 0.0, -0.0, 1j)]
    assert len(dict.fromkeys(keys)) == len(keys)


def test_array_keys_have_shardings_on_explicit_axes_only() -> None:
    for axis_type, count in ((AxisType.Auto, 1), (AxisType.Explicit, 2)):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        arrays = [jax.device_put(jnp.ones(8), NamedSharding(mesh, spec)) for spec in (P("data"), P())]
        assert len(dict.fromkeys(map(array_key, arrays))) == count


def test_the_bound_is_that_of_jax() -> None:
    assert cache.CACHE_SIZE == 4096
