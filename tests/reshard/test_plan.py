"""What a plan says of a move: its bytes against sets of elements, its peak against what a process really takes."""

import itertools
import json
import math
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.reshard.schedule import schedule
from tests.reshard.cases import WAYS, Case, FakeDevice, cases, moving, run_alone

WHOLE_BYTES = ("float32", "bfloat16", "int8", "bool", "complex64", "threefry2x32", "rbg")
"""Dtypes of which every piece is a whole number of bytes."""

LINE = Mesh(np.array(jax.devices()), ("d",))
GRID = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
HALF = Mesh(np.array(jax.devices()[4:]), ("half",))
FIRST = Mesh(np.array(jax.devices()[:4]), ("half",))
ROWS = NamedSharding(LINE, P("d"))
"""Every device has some rows."""


def outline(shape: tuple[int, ...], sharding: Sharding, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def outline_of(case: Case) -> jax.ShapeDtypeStruct:
    return outline(case.shape, case.source.sharding, case.values().dtype)


def elements(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Which elements each device holds, by their numbers."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return {device.id: numbers[index].ravel() for device, index in sharding.devices_indices_map(shape).items()}


def non_zero(amounts: dict[int, int]) -> dict[int, int]:
    return {device: amount for device, amount in sorted(amounts.items()) if amount}


# ---- bytes ----


@settings(max_examples=200)
@given(cases(WHOLE_BYTES))
def test_bytes_are_those_of_the_elements_that_a_device_did_not_hold(case: Case) -> None:
    plan = sr.plan_reshard(outline_of(case), case.target.sharding)
    size = case.values().dtype.itemsize
    old, new = elements(case.source.sharding, case.shape), elements(case.target.sharding, case.shape)
    nothing = np.zeros(0, int)
    missing = {device: np.setdiff1d(wanted, old.get(device, nothing)) for device, wanted in new.items()}
    assert plan.received_bytes == non_zero({device: size * len(some) for device, some in missing.items()})
    assert plan.moved_bytes == size * sum(map(len, missing.values()))
    assert plan.kept_bytes == size * sum(len(wanted) - len(missing[device]) for device, wanted in new.items())
    assert sum(plan.sent_bytes.values()) == plan.moved_bytes
    if sum(map(len, old.values())) == math.prod(case.shape):  # each element has one holder, so that none can choose
        wanted = np.concatenate([*missing.values(), nothing])
        sent = {device: size * int(np.isin(wanted, held).sum()) for device, held in old.items()}
        assert plan.sent_bytes == non_zero(sent)
    stays = all(np.array_equal(old.get(device, nothing), wanted) for device, wanted in new.items())
    same_memory = case.source.memory == case.target.memory
    if math.prod(case.shape):
        route = "direct" if plan.moved_bytes else "alias" if stays and same_memory else "local"
        assert plan.moves[0].route == route


@settings(max_examples=100)
@given(cases(WHOLE_BYTES))
def test_nothing_is_sent_by_a_device_that_does_not_hold_it(case: Case) -> None:
    """Nor is anything left out, or sent twice."""
    found = sr.plan_reshard(outline_of(case), case.target.sharding).moves[0].schedule
    assert found is not None
    numbers = np.arange(math.prod(found.shape)).reshape(found.shape)  # of keys: of the numbers they are made of
    made_of = math.prod(found.shape) // max(1, math.prod(case.shape))
    holds = elements(case.source.sharding, case.shape)
    filled: dict[int, list[np.ndarray]] = {device: [] for device in case.target.devices}
    for piece in found.pieces:
        part = numbers[tuple(slice(*cut) for cut in piece.box)].ravel()
        assert np.isin(part // made_of, holds[piece.sender.id]).all()
        filled[piece.receiver.id].append(part)
    for device, wanted in elements(case.target.sharding, case.shape).items():
        got = np.sort(np.concatenate([*filled[device], np.zeros(0, int)]))
        expected = (np.sort(wanted)[:, None] * made_of + np.arange(made_of)).ravel()
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=50)
@given(st.lists(cases(), max_size=4), st.booleans(), st.sampled_from([None, False]))
def test_a_plan_of_shapes_is_that_of_arrays(chosen: list[Case], donate: bool, may_alias: bool | None) -> None:
    arrays = [jax.device_put(case.values(), case.source.sharding) for case in chosen]
    targets = [case.target.sharding for case in chosen]
    plans = [
        sr.plan_reshard(tree, targets, donate=donate, may_alias=may_alias)
        for tree in (arrays, [outline(array.shape, array.sharding, array.dtype) for array in arrays])
    ]
    assert plans[0].to_json() == plans[1].to_json()
    assert str(plans[0]) == str(plans[1])
    assert plans[0].batches == plans[1].batches
    assert not any(array.is_deleted() for array in arrays)


def test_a_tree_adds_up() -> None:
    tree = {
        "w": [outline((16, 8), ROWS), outline((16, 8), ROWS)],
        "same": outline((8, 8), NamedSharding(HALF, P("half"))),
        "numpy": np.zeros((8, 4), np.float32),
        "act": jnp.tanh,
    }
    plan = sr.plan_reshard(tree, NamedSharding(HALF, P("half")))
    assert [(one.path, one.route) for one in plan.moves] == [
        ("numpy", "host"),
        ("same", "alias"),
        ("w/0", "direct"),
        ("w/1", "direct"),
    ]
    # Of each w four devices get 4 rows of 32 bytes, and only device 7 has some of its rows already: the last two.
    assert [one.moved_bytes for one in plan.moves] == [8 * 4 * 4, 0, 448, 448]
    assert [one.kept_bytes for one in plan.moves] == [0, 256, 64, 64]
    assert (plan.moved_bytes, plan.kept_bytes) == (128 + 2 * 448, 256 + 2 * 64)
    assert plan.received_bytes == {**dict.fromkeys(range(4, 7), 32 + 2 * 128), 7: 32 + 2 * 64}
    assert plan.sent_bytes == dict.fromkeys(range(7), 2 * 64)
    assert sum(plan.sent_bytes.values()) + 128 == sum(plan.received_bytes.values())
    # Before: 2 rows of each w, and on the last four 2 rows of 32 bytes of `same`.
    assert plan.peak_bytes == {
        **dict.fromkeys(range(4), 2 * 64),
        **dict.fromkeys(range(4, 8), 2 * 64 + 64 + 2 * 128 + 32),
    }


def test_an_empty_tree_moves_nothing() -> None:
    plan = sr.plan_reshard({"act": jnp.tanh, "nothing": None}, ROWS)
    assert (plan.moves, plan.batches, plan.moved_bytes, plan.peak_bytes) == ((), (), 0, {})
    assert json.loads(plan.to_json()) == {"arrays": [], "devices": {}, "donate": False}
    assert str(plan).splitlines()[-1] == "0 arrays: 0 B move, 0 B stay"


# ---- routes ----


@pytest.mark.parametrize(
    ("source", "target", "options", "route", "reason"),
    [
        (ROWS, ROWS, {}, "alias", "lies there already"),
        (ROWS, NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x", None)), {}, "alias", "lies there already"),
        (ROWS, ROWS, {"may_alias": False}, "local", "lies there already; copied, as may_alias=False asks"),
        (NamedSharding(LINE, P()), NamedSharding(HALF, P()), {}, "alias", "lies there already"),
        (
            NamedSharding(LINE, P()),
            NamedSharding(HALF, P()),
            {"donate": True},
            "local",
            "each device has its part already; copied, so that the rest can be given up",
        ),
        (NamedSharding(LINE, P()), ROWS, {}, "local", "each device has its part already"),
        (ROWS, ROWS.with_memory_kind("pinned_host"), {}, "local", "from device memory to pinned_host memory"),
        (
            NamedSharding(FIRST, P()),
            NamedSharding(HALF, P()),
            {},
            "direct",
            "4 pieces, each straight from a device that has it",
        ),
        (
            SingleDeviceSharding(jax.devices()[0]),
            SingleDeviceSharding(jax.devices()[1]),
            {},
            "direct",
            "1 piece, each straight from a device that has it",
        ),
        (None, ROWS, {}, "host", "from the host, each device its part"),
    ],
)
def test_every_array_takes_the_route_that_is_documented(
    source: Sharding | None, target: Sharding, options: dict[str, Any], route: str, reason: str
) -> None:
    leaf = np.zeros((8, 8), np.float32) if source is None else outline((8, 8), source)
    move = sr.plan_reshard(leaf, target, **options).moves[0]
    assert (move.route, move.reason) == (route, reason)


def test_what_goes_to_another_network_crosses_once_and_is_passed_on_there() -> None:
    here = [FakeDevice(number) for number in range(4)]
    there = [FakeDevice(number, process_index=1) for number in range(4, 8)]
    rows = {device: ((2 * number, 2 * number + 2), (0, 16)) for number, device in enumerate(here)}
    move = schedule((8, 16), np.dtype(np.float32), rows, dict.fromkeys(there, ((0, 8), (0, 16))))
    planned = sr.reports.LeafMove("w", (8, 16), np.dtype(np.float32), ROWS, ROWS, move)
    assert planned.route == "intermediate"
    assert planned.reason == "16 pieces; 512 B come from afar, 1.5 KiB are passed on nearby"
    crossing = [piece for piece in move.pieces if piece.sender.process_index != piece.receiver.process_index]
    assert sorted(piece.box for piece in crossing) == [((n, n + 2), (0, 16)) for n in range(0, 8, 2)]
    assert sum(move.box_bytes(piece.box) for piece in crossing) == 8 * 16 * 4
    assert planned.moved_bytes == 4 * 8 * 16 * 4
    assert move.sums.received == dict.fromkeys(there, 8 * 16 * 4)


# ---- batches ----


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([8, 16, 64, 4000]), st.sampled_from(["rows", "half", "one", "host"])), max_size=25
    ),
    st.integers(0, 40_000),
)
def test_batches_keep_to_the_limit_and_to_one_set_of_devices(leaves: list[tuple[int, str]], limit: int) -> None:
    sources = {"rows": ROWS, "half": NamedSharding(FIRST, P()), "one": SingleDeviceSharding(jax.devices()[3])}
    tree = [np.zeros(size, np.float32) if at == "host" else outline((size,), sources[at]) for size, at in leaves]
    plan = sr.plan_reshard(tree, NamedSharding(HALF, P()), max_bytes_in_flight=limit)
    assert sorted(itertools.chain(*plan.batches)) == list(range(len(tree)))
    for batch in plan.batches:
        amount = sum(4 * 4 * leaves[number][0] for number in batch)  # whole copies of 4 bytes on 4 devices
        assert amount <= limit or len(batch) == 1
        assert len({leaves[number][1] for number in batch}) == 1
        assert list(batch) == sorted(batch)
    for one, two in itertools.pairwise(plan.batches):  # none begins before the one before it is full
        if leaves[one[0]][1] == leaves[two[0]][1]:
            assert sum(16 * leaves[number][0] for number in (*one, two[0])) > limit


def test_without_a_limit_a_batch_is_256_mib() -> None:
    tree = [outline((2**20,), ROWS) for _ in range(130)]  # 4 MiB each
    assert [len(batch) for batch in sr.plan_reshard(tree, NamedSharding(HALF, P("half"))).batches] == [64, 64, 2]


def test_what_is_donated_batch_by_batch_lowers_the_peak() -> None:
    tree = [outline((2**18,), ROWS) for _ in range(8)]  # 1 MiB each
    target = NamedSharding(GRID, P("model"))  # 512 KiB on each device
    mib = 2**20
    assert _peak(sr.plan_reshard(tree, target)) == mib + 4 * mib
    assert _peak(sr.plan_reshard(tree, target, donate=True)) == mib + 4 * mib
    assert _peak(sr.plan_reshard(tree, target, max_bytes_in_flight=8 * mib)) == mib + 4 * mib
    # The last two come when six eighths of the old ones are gone; then the last one when seven are. In memory, a batch
    # of what is donated is a quarter of the limit.
    two, one = (sr.plan_reshard(tree, target, donate=True, max_bytes_in_flight=limit) for limit in (32 * mib, 0))
    assert _peak(two) == 2 * mib // 8 + 4 * mib
    assert _peak(one) == mib // 8 + 4 * mib


def _peak(plan: sr.reports.ReshardPlan) -> int:
    """The peak, which is that of every device."""
    (peak,) = dict.fromkeys(plan.peak_bytes.values())
    assert len(plan.peak_bytes) == 8
    return peak


# ---- peaks that are measured ----

MEASURE = """
import gc, pathlib
from jax.sharding import NamedSharding

MIB = 2**20

def status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])

def counted(count, shape, sharding, dtype=jnp.float32):
    size = int(np.prod(shape))
    make = jax.jit(lambda start: (jnp.arange(size, dtype=dtype) + start).reshape(shape), out_shardings=sharding)
    return jax.block_until_ready([make(jnp.asarray(start, dtype)) for start in range(count)])

def on_host(sharding):
    return sharding.with_memory_kind("pinned_host")

def asked(tree, target, **options):
    return tree, target, options

def added(make):
    '''What a move takes at its highest, and what its plan says of that. Before it, another one compiles programs.'''
    tree, target, options = make()
    jax.block_until_ready(sr.reshard(tree, target, **options))
    tree, target, options = make()
    plan = sr.plan_reshard(tree, target, **options)
    gc.collect()
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the highest
    moved = jax.block_until_ready(sr.reshard(tree, target, **options))
    most = status("VmHWM") - before
    held = {}
    for move in plan.moves:
        for device, amount in move.old_bytes().items():
            held[device] = held.get(device, 0) + amount
    assert all(array.sharding == target for array in jax.tree.leaves(moved))
    print(most, sum(peak - held.get(device, 0) for device, peak in plan.peak_bytes.items()))

line, grid = sr.create_mesh("d:8"), sr.create_mesh("a:4,b:2")
half = sr.create_mesh("m:4", devices=jax.devices()[:4])
rows, columns = NamedSharding(line, P("d")), NamedSharding(line, P(None, "d"))
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
"""

MOVES = {
    "one large array, donated": "counted(1, (7168, 7168), rows), columns, donate=True",
    "one large array of a small dtype": "counted(1, (7168, 14336), rows, jnp.bfloat16), columns",
    "to fewer devices": "counted(6, (2896, 2896), rows), NamedSharding(half, P(None, 'm'))",
    "another grid": "counted(4, (4096, 3200), NamedSharding(grid, P('a', 'b'))), columns",
    "many arrays": "counted(200, (512, 512), rows), columns",
    "many shapes": "[counted(1, (2048 + 64 * n, 2048), rows)[0] for n in range(12)], columns",
    "in batches": "counted(50, (1024, 1024), rows), columns, max_bytes_in_flight=32 * MIB",
    "from the host's memory": "jax.device_put(counted(25, (2048, 1024), rows), on_host(rows)), columns",
    "into the host's memory": "counted(25, (2048, 1024), rows), on_host(columns)",
    "into the host's memory at one device": "counted(25, (2048, 1024), rows), on_host(one)",
}


def measured(way: str, *moves: str) -> list[tuple[int, int]]:
    """Of each move the bytes that it added to the process, and those that its plan allows."""
    code = "\n".join(f"added(lambda: asked({move}))" for move in moves)
    lines = run_alone(MEASURE + code, way, timeout=300).splitlines()
    return [(int(most), int(bound)) for most, bound in map(str.split, lines)]


@WAYS
def test_the_peak_that_is_planned_bounds_the_one_that_is_measured(way: str) -> None:
    found = dict(zip(MOVES, measured(way, *MOVES.values()), strict=True))
    wrong = {
        name: f"{most / 2**20:.1f} MiB measured, {bound / 2**20:.1f} MiB planned"
        for name, (most, bound) in found.items()
        if not 0.3 * bound < most <= 1.1 * bound
    }
    assert wrong == {}


@WAYS
def test_a_limit_keeps_what_is_added_low(way: str) -> None:
    moves = [
        f"counted(250, (512, 512), rows), {target}, donate=True, max_bytes_in_flight=64 * MIB"
        for target in ("columns", "NamedSharding(grid, P('b', 'a'))")
    ]
    for most, _ in measured(way, *moves):
        assert most <= 1.1 * (64 + 1) * 2**20, f"{most / 2**20:.1f} MiB were added"


# ---- printing ----


def small_tree() -> dict[str, Any]:
    return {
        "layers": [{"w": outline((16, 8), ROWS), "b": outline((8,), NamedSharding(LINE, P()))} for _ in range(3)],
        "head": outline((8, 8), SingleDeviceSharding(jax.devices()[2]), jnp.bfloat16),
        "step": np.int32(7),
    }


def test_the_table_is_as_it_is() -> None:
    plan = sr.plan_reshard(small_tree(), NamedSharding(HALF, P()), donate=True)
    left = [
        "path            shape    dtype     from                         to                           ",
        "--------------  -------  --------  ---------------------------  ---------------------------  ",
        "head            (8, 8)   bfloat16  device 2                     P() on half:4 (devices 4-7)  ",
        "layers/*/b  x3  (8,)     float32   P() on d:8 (devices 0-7)     P() on half:4 (devices 4-7)  ",
        "layers/*/w  x3  (16, 8)  float32   P('d') on d:8 (devices 0-7)  P() on half:4 (devices 4-7)  ",
        "step            ()       int32     the host                     P() on half:4 (devices 4-7)  ",
    ]
    right = [
        "  moves  stays  route   why",
        "-------  -----  ------  --------------------------------------------------------------------------",
        "  512 B    0 B  direct  4 pieces, each straight from a device that has it",
        "    0 B  384 B  local   each device has its part already; copied, so that the rest can be given up",
        "5.2 KiB  768 B  direct  28 pieces, each straight from a device that has it",
        "   16 B    0 B  host    from the host, each device its part",
    ]
    *rows, total, most = str(plan).splitlines()
    assert rows == [one + two for one, two in zip(left, right, strict=True)]
    assert total == "8 arrays: 5.8 KiB move, 1.1 KiB stay"
    assert most == (
        "a device sends at most 1.2 KiB, receives at most 1.4 KiB, and holds at most 2.0 KiB at any moment (device 4)"
    )


def test_json_says_the_same_and_adds_up() -> None:
    plan = sr.plan_reshard(small_tree(), NamedSharding(HALF, P()), donate=True)
    found = json.loads(plan.to_json())
    assert sum(one["moved_bytes"] for one in found["arrays"]) == plan.moved_bytes
    assert sum(one["kept_bytes"] for one in found["arrays"]) == plan.kept_bytes
    devices = found["devices"]
    assert sum(one["received_bytes"] for one in devices.values()) == plan.moved_bytes
    from_host = sum(one["moved_bytes"] for one in found["arrays"] if one["route"] == "host")
    assert sum(one["sent_bytes"] for one in devices.values()) + from_host == plan.moved_bytes
    assert {int(device): one["peak_bytes"] for device, one in devices.items()} == plan.peak_bytes
    assert [one["path"] for one in found["arrays"]] == [move.path for move in plan.moves]
    assert found["donate"] is True
    assert found["arrays"][0] == {
        "path": "head",
        "shape": [8, 8],
        "dtype": "bfloat16",
        "source": "device 2",
        "target": "P() on half:4 (devices 4-7)",
        "route": "direct",
        "reason": "4 pieces, each straight from a device that has it",
        "moved_bytes": 512,
        "kept_bytes": 0,
    }
    assert plan.to_json() == sr.plan_reshard(small_tree(), NamedSharding(HALF, P()), donate=True).to_json()


@WAYS
def test_a_move_does_what_its_plan_says(way: str) -> None:
    """Nothing is planned for what then stays, and what is planned to stay is not touched."""
    tree = {"a": jax.device_put(np.ones((8, 8)), ROWS), "b": jax.device_put(np.ones(8), NamedSharding(HALF, P("half")))}
    target = NamedSharding(HALF, P("half"))
    with moving(way):
        plan = sr.plan_reshard(tree, target, donate=True)
        moved = sr.reshard(tree, target, donate=True)
    assert [one.route for one in plan.moves] == ["direct", "alias"]
    assert (tree["a"].is_deleted(), moved["b"] is tree["b"]) == (True, True)


def test_a_plan_is_a_value() -> None:
    plan = sr.plan_reshard(small_tree(), NamedSharding(HALF, P()))
    with pytest.raises(attrs.exceptions.FrozenInstanceError, match="can't set"):
        plan.donate = True  # pyright: ignore[reportAttributeAccessIssue]
