"""Keys of compiled functions, and the cache that drops what was not used for longest."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.placement import init
from shardrules.placement.cache import Cache, array_key
from shardrules.placement.functions.jit import FilterJit

MESH = sr.create_mesh("data:8")


def test_a_full_cache_drops_what_was_not_used_for_longest() -> None:
    values: Cache[list[int]] = Cache(3)
    for index in range(3):
        values.add(index, [index])
    assert values.get(0) == [0]
    values.add(3, [3])
    assert [values.get(index) for index in range(4)] == [[0], None, [2], [3]]
    assert values.get("unknown") is None


def test_dropping_a_value_hashes_no_other_keys() -> None:
    hashed: list[int] = []

    @attrs.frozen(eq=False)
    class Key:
        index: int

        def __hash__(self) -> int:
            hashed.append(self.index)
            return self.index

    values: Cache[int] = Cache(3)
    for index in range(8):
        values.add(Key(index), index)
    assert len(hashed) <= 2 * 8


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
        return len(values._entries)

    try:
        with ThreadPoolExecutor(8) as pool:
            sizes = list(pool.map(use, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert max(sizes) <= 4


@pytest.mark.parametrize("kind", ["jit", "init"])
def test_functions_used_last_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []

    def double(x: Any) -> Any:
        traces.append(x.shape)
        return 2 * x

    monkeypatch.setattr(init, "_CACHE_SIZE", 2)
    run = sr.filter_jit(double, mesh=MESH) if kind == "jit" else sr.filter_init(double, P("data"), MESH)
    if isinstance(run, FilterJit):
        monkeypatch.setattr(run._kept[1], "size", 3)  # a call has two keys, one of which is used again
    for size in (8, 16, 8, 24, 8, 16):
        run(np.ones(size))
    assert traces == [(8,), (16,), (24,), (16,)]


def test_array_keys_have_shardings_on_explicit_axes_only() -> None:
    for axis_type, count in ((AxisType.Auto, 1), (AxisType.Explicit, 2)):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        arrays = [jax.device_put(jnp.ones(8), NamedSharding(mesh, spec)) for spec in (P("data"), P())]
        assert len(dict.fromkeys(map(array_key, arrays))) == count
