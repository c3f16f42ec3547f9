"""Plans of moves: bytes compared with sets of elements, peaks compared with the memory that a process really takes."""

import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.moves.schedule import make_schedule
from tests.moves.cases import WAYS, Case, FakeDevice, cases, run_alone

WHOLE_BYTES = ("float32", "bfloat16", "int8", "bool", "complex64", "threefry2x32", "rbg")
"""Dtypes whose pieces are whole numbers of bytes."""

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
    """Returns the numbers of the elements that each device holds."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return {device.id: numbers[index].ravel() for device, index in sharding.devices_indices_map(shape).items()}


def non_zero(amounts: dict[int, int]) -> dict[int, int]:
    return {device: amount for device, amount in sorted(amounts.items()) if amount}


# ---- bytes ----


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn])
@pytest.mark.parametrize("start", [ROWS, None])
def test_small_dtypes_count_as_the_devices_hold_them(start: Sharding | None, dtype: Any) -> None:
    values = np.zeros((8, 8), dtype)
    plan = sr.plan_reshard(values if start is None else jax.device_put(values, start), NamedSharding(LINE, P()))
    (move,) = plan.moves
    placed = jax.device_put(values, NamedSharding(LINE, P()))
    sizes = {shard.device.id: shard.data.on_device_size_in_bytes() for shard in placed.addressable_shards}
    assert move.new_bytes() == sizes
    kept = 0 if start is None else jax.device_put(values, start).addressable_shards[0].data.on_device_size_in_bytes()
    assert {device.id: amount + kept for device, amount in move.received_bytes().items()} == sizes


@settings(max_examples=200)
@given(cases(WHOLE_BYTES))
def test_moved_bytes_are_the_elements_that_a_device_lacked(case: Case) -> None:
    plan = sr.plan_reshard(outline_of(case), case.target.sharding)
    size = case.values().dtype.itemsize
    old, new = elements(case.source.sharding, case.shape), elements(case.target.sharding, case.shape)
    nothing = np.zeros(0, int)
    missing = {device: np.setdiff1d(expected, old.get(device, nothing)) for device, expected in new.items()}
    assert plan.received_bytes == non_zero({device: size * len(indices) for device, indices in missing.items()})
    assert plan.moved_bytes == size * sum(map(len, missing.values()))
    assert plan.kept_bytes == size * sum(len(expected) - len(missing[device]) for device, expected in new.items())
    assert sum(plan.sent_bytes.values()) == plan.moved_bytes
    if sum(map(len, old.values())) == math.prod(case.shape):  # each element has one holder, so that none can choose
        expected = np.concatenate([*missing.values(), nothing])
        sent = {device: size * int(np.isin(expected, old_elements).sum()) for device, old_elements in old.items()}
        assert plan.sent_bytes == non_zero(sent)
    stays = all(np.array_equal(old.get(device, nothing), expected) for device, expected in new.items())
    same_memory = case.source.memory == case.target.memory
    if math.prod(case.shape):
        route = "direct" if plan.moved_bytes else "alias" if stays and same_memory else "local"
        assert plan.moves[0].route == route


@settings(max_examples=50)
@given(st.lists(cases(), max_size=4), st.booleans(), st.sampled_from([None, False]))
def test_shapes_and_arrays_have_the_same_plan(chosen: list[Case], donate: bool, may_alias: bool | None) -> None:
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


def test_figures_of_a_tree_add_up() -> None:
    tree = {
        "w": [outline((16, 8), ROWS), outline((16, 8), ROWS)],
        "same": outline((8, 8), NamedSharding(HALF, P("half"))),
        "numpy": np.zeros((8, 4), np.float32),
        "act": jnp.tanh,
    }
    plan = sr.plan_reshard(tree, NamedSharding(HALF, P("half")))
    assert [(move.path, move.route) for move in plan.moves] == [
        ("numpy", "host"),
        ("same", "alias"),
        ("w/0", "direct"),
        ("w/1", "direct"),
    ]
    # Four devices get 4 rows of 32 bytes of each w, and only device 7 has some of its rows already: the last two.
    assert [move.moved_bytes for move in plan.moves] == [8 * 4 * 4, 0, 448, 448]
    assert [move.kept_bytes for move in plan.moves] == [0, 256, 64, 64]
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
    assert json.loads(plan.to_json()) == {"shardrules_moves": 1, "arrays": [], "devices": {}, "donate": False}
    assert str(plan).splitlines()[-1] == "0 arrays: 0 B move, 0 B stay"


# ---- routes ----


@pytest.mark.parametrize(
    ("source", "target", "options", "route", "reason"),
    [
        (ROWS, ROWS, {}, "alias", "already in place"),
        (ROWS, NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x", None)), {}, "alias", "already in place"),
        (ROWS, ROWS, {"may_alias": False}, "local", "already in place; copied because may_alias is False"),
        (NamedSharding(LINE, P()), NamedSharding(HALF, P()), {}, "alias", "already in place"),
        (
            NamedSharding(LINE, P()),
            NamedSharding(HALF, P()),
            {"donate": True},
            "local",
            "each device has its part already; copied, so that the rest can be freed",
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
        (None, ROWS, {}, "host", "each device gets its part from the host"),
    ],
)
def test_arrays_take_the_documented_routes(
    source: Sharding | None, target: Sharding, options: dict[str, Any], route: str, reason: str
) -> None:
    leaf = np.zeros((8, 8), np.float32) if source is None else outline((8, 8), source)
    move = sr.plan_reshard(leaf, target, **options).moves[0]
    assert (move.route, move.reason) == (route, reason)


def test_pieces_cross_to_another_network_once() -> None:
    near = [FakeDevice(index) for index in range(4)]
    far = [FakeDevice(index, process_index=1) for index in range(4, 8)]
    rows = {device: ((2 * index, 2 * index + 2), (0, 16)) for index, device in enumerate(near)}
    schedule = make_schedule((8, 16), np.dtype(np.float32), rows, dict.fromkeys(far, ((0, 8), (0, 16))))
    leaf_move = sr.reports.LeafMove("w", (8, 16), np.dtype(np.float32), ROWS, ROWS, schedule)
    assert leaf_move.route == "intermediate"
    assert leaf_move.reason == "16 pieces; 512 B from other networks, 1.5 KiB passed on within one"
    crossing = [piece for piece in schedule.pieces if piece.sender.process_index != piece.receiver.process_index]
    assert sorted(piece.box for piece in crossing) == [((n, n + 2), (0, 16)) for n in range(0, 8, 2)]
    assert sum(schedule.box_bytes(piece.box) for piece in crossing) == 8 * 16 * 4
    assert leaf_move.moved_bytes == 4 * 8 * 16 * 4
    assert schedule.sums.received == dict.fromkeys(far, 8 * 16 * 4)


# ---- batches ----


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([8, 16, 64, 4000]), st.sampled_from(["rows", "half", "one", "host"])), max_size=25
    ),
    st.integers(0, 40_000),
)
def test_batches_keep_the_limit_and_one_set_of_devices(leaves: list[tuple[int, str]], limit: int) -> None:
    sources = {"rows": ROWS, "half": NamedSharding(FIRST, P()), "one": SingleDeviceSharding(jax.devices()[3])}
    tree = [
        np.zeros(size, np.float32) if source == "host" else outline((size,), sources[source]) for size, source in leaves
    ]
    plan = sr.plan_reshard(tree, NamedSharding(HALF, P()), max_bytes_in_flight=limit)
    assert sorted(itertools.chain(*plan.batches)) == list(range(len(tree)))
    for batch in plan.batches:
        amount = sum(4 * 4 * leaves[index][0] for index in batch)  # whole copies of 4 bytes on 4 devices
        assert amount <= limit or len(batch) == 1
        assert len({leaves[index][1] for index in batch}) == 1
        assert list(batch) == sorted(batch)
    for batch, following in itertools.pairwise(plan.batches):  # none begins before the previous one is full
        if leaves[batch[0]][1] == leaves[following[0]][1]:
            assert sum(16 * leaves[index][0] for index in (*batch, following[0])) > limit


def test_batches_are_256_mib_by_default() -> None:
    tree = [outline((2**20,), ROWS) for _ in range(130)]  # 4 MiB each
    assert [len(batch) for batch in sr.plan_reshard(tree, NamedSharding(HALF, P("half"))).batches] == [64, 64, 2]


def test_donating_batch_by_batch_lowers_the_peak() -> None:
    tree = [outline((2**18,), ROWS) for _ in range(8)]  # 1 MiB each
    target = NamedSharding(GRID, P("model"))  # 512 KiB on each device
    mib = 2**20
    assert _peak(sr.plan_reshard(tree, target)) == mib + 4 * mib
    assert _peak(sr.plan_reshard(tree, target, donate=True)) == mib + 4 * mib
    assert _peak(sr.plan_reshard(tree, target, max_bytes_in_flight=8 * mib)) == mib + 4 * mib
    # The last two arrive when six eighths of the old ones are freed; the last one when seven are. In memory, a batch of
    # donated arrays is a quarter of the limit.
    by_pair, by_array = (
        sr.plan_reshard(tree, target, donate=True, max_bytes_in_flight=limit) for limit in (32 * mib, 0)
    )
    assert _peak(by_pair) == 2 * mib // 8 + 4 * mib
    assert _peak(by_array) == mib // 8 + 4 * mib


def _peak(plan: sr.reports.ReshardPlan) -> int:
    """The peak, which is the same on every device."""
    (peak,) = dict.fromkeys(plan.peak_bytes.values())
    assert len(plan.peak_bytes) == 8
    return peak


# ---- measured peaks ----

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

def move_of(tree, target, **options):
    return tree, target, options

def added(make):
    '''The peak of a move, and the peak in its plan. Another move before it compiles the programs.'''
    tree, target, options = make()
    jax.block_until_ready(sr.reshard(tree, target, **options))
    tree, target, options = make()
    plan = sr.plan_reshard(tree, target, **options)
    gc.collect()
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    moved = jax.block_until_ready(sr.reshard(tree, target, **options))
    most = status("VmHWM") - before
    old_bytes = {}
    for move in plan.moves:
        for device, amount in move.old_bytes().items():
            old_bytes[device] = old_bytes.get(device, 0) + amount
    assert all(array.sharding == target for array in jax.tree.leaves(moved))
    print(most, sum(peak - old_bytes.get(device, 0) for device, peak in plan.peak_bytes.items()))

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
    """For each move the bytes that it added to the process, and the bytes that its plan allows."""
    code = "\n".join(f"added(lambda: move_of({move}))" for move in moves)
    lines = run_alone(MEASURE + code, way, timeout=300).splitlines()
    return [(int(most), int(bound)) for most, bound in map(str.split, lines)]


@pytest.mark.slow
@WAYS
def test_planned_peaks_bound_measured_ones(way: str) -> None:
    peaks = dict(zip(MOVES, measured(way, *MOVES.values()), strict=True))
    wrong = {
        name: f"{most / 2**20:.1f} MiB measured, {bound / 2**20:.1f} MiB planned"
        for name, (most, bound) in peaks.items()
        if not 0.3 * bound < most <= 1.1 * bound
    }
    assert wrong == {}


@pytest.mark.slow
@WAYS
def test_a_limit_keeps_the_peak_low(way: str) -> None:
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


def test_the_printed_table() -> None:
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
        "-------  -----  ------  -----------------------------------------------------------------------",
        "  512 B    0 B  direct  4 pieces, each straight from a device that has it",
        "    0 B  384 B  local   each device has its part already; copied, so that the rest can be freed",
        "5.2 KiB  768 B  direct  28 pieces, each straight from a device that has it",
        "   16 B    0 B  host    each device gets its part from the host",
    ]
    *rows, total, most = str(plan).splitlines()
    assert rows == [row + rest for row, rest in zip(left, right, strict=True)]
    assert total == "8 arrays: 5.8 KiB move, 1.1 KiB stay"
    assert most == (
        "a device sends at most 1.2 KiB, receives at most 1.4 KiB, and holds at most 2.0 KiB at any moment (device 4)"
    )


def test_json_has_the_figures_of_the_plan() -> None:
    plan = sr.plan_reshard(small_tree(), NamedSharding(HALF, P()), donate=True)
    data = json.loads(plan.to_json())
    assert sum(entry["moved_bytes"] for entry in data["arrays"]) == plan.moved_bytes
    assert sum(entry["kept_bytes"] for entry in data["arrays"]) == plan.kept_bytes
    devices = data["devices"]
    assert sum(entry["received_bytes"] for entry in devices.values()) == plan.moved_bytes
    from_host = sum(entry["moved_bytes"] for entry in data["arrays"] if entry["route"] == "host")
    assert sum(entry["sent_bytes"] for entry in devices.values()) + from_host == plan.moved_bytes
    assert {int(device): entry["peak_bytes"] for device, entry in devices.items()} == plan.peak_bytes
    assert [entry["path"] for entry in data["arrays"]] == [move.path for move in plan.moves]
    assert data["donate"] is True
    assert data["arrays"][0] == {
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
