"""Moves over real processes: each has some devices, knows the values, and checks every shard of its own."""

import pytest

from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import printed_lines

SHAPES = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (2, 2)])

PRELUDE = """
from jax.sharding import Mesh, SingleDeviceSharding

devices = jax.devices()
count = len(devices)
mine = [device for device in devices if device.process_index == process]

def mesh_of(text, chosen):
    axes = [axis.split(":") for axis in text.split(",")]
    sizes = [int(size) for _, size in axes]
    return Mesh(np.array(chosen).reshape(sizes), tuple(name for name, _ in axes))

everywhere = mesh_of(f"d:{count}", devices)
grid = mesh_of(f"a:{count // 2},b:2", devices)
turned = mesh_of(f"d:{count}", devices[::-1])
first = mesh_of(f"h:{count // 2}", devices[: count // 2])
last = mesh_of(f"h:{count // 2}", devices[count // 2 :])
mixed = mesh_of(f"m:{count // 2}", devices[::2])

whole = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

def placed(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], dtype=values.dtype)

def check(array, sharding, values):
    '''Every shard that this process holds, against the array that all know; nothing else is here.'''
    here = sharding.addressable_devices_indices_map(values.shape)
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    assert [shard.device for shard in array.addressable_shards] == list(here)
    if jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        values = np.asarray(jax.random.key_data(values))
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(jax.random.key_data(shard.data), values[here[shard.device]])
        return
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[here[shard.device]])
"""


def run(code: str, processes: int = 2, devices: int = 4, timeout: float = 120) -> list[list[str]]:
    prelude = PRELUDE.strip("\n").replace("\n", "\n            ")
    return printed_lines(
        run_processes(f"            {prelude}\n{code}", processes=processes, devices=devices, timeout=timeout)
    )


@pytest.mark.slow
@SHAPES
def test_moves_between_all_some_and_one_process(processes: int, devices: int) -> None:
    printed = run(
        """
            stations = [
                NamedSharding(everywhere, P("d")),
                NamedSharding(grid, P("b", "a")),
                NamedSharding(last, P(None, "h")),
                NamedSharding(first, P("h")),
                NamedSharding(mixed, P("m")),
                NamedSharding(turned, P("d")),
                NamedSharding(last, P()),
                NamedSharding(grid, P()),
                NamedSharding(first, P(None, "h")),
                SingleDeviceSharding(devices[-1]),
                SingleDeviceSharding(devices[0]),
                NamedSharding(everywhere, P(None, "d")),
                NamedSharding(mixed, P()),
                NamedSharding(everywhere, P("d")),
            ]
            array = placed(whole, stations[0])
            for number, station in enumerate(stations[1:]):
                moved = sr.reshard(array, station)
                check(moved, station, whole)
                check(array, stations[number], whole)
                array = moved
            print(len(stations))
        """,
        processes,
        devices,
    )
    assert printed == [["14"]] * processes


@pytest.mark.slow
@SHAPES
def test_mixed_trees_move_and_are_freed(processes: int, devices: int) -> None:
    printed = run(
        """
            import ml_dtypes
            tree = {
                "w": whole,
                "w2": whole + 1,
                "bfloat16": whole.astype(ml_dtypes.bfloat16),
                "int4": (whole % 8).astype(ml_dtypes.int4),
                "bool": whole % 3 == 0,
                "complex": whole * 1j + np.complex64(1),
                "scalar": np.float32(2.5),
                "row": whole[0],
                "key": jax.random.key(3),
                "keys": jax.random.split(jax.random.key(4), 16),
            }
            rank = {name: values.ndim for name, values in tree.items()}

            def shardings(mesh, axis):
                return {name: NamedSharding(mesh, P(*[axis, None][:number])) for name, number in rank.items()}

            start = shardings(everywhere, "d")
            arrays = {}
            for name, values in tree.items():
                if name.startswith("key"):
                    arrays[name] = sr.filter_shard(values, start[name])
                else:
                    arrays[name] = placed(np.asarray(values), start[name])
            static = {"act": jax.nn.gelu, "name": "x", "nothing": None}
            for mesh, axis in ((last, "h"), (first, "h"), (mixed, "m"), (turned, "d"), (grid, "b"), (last, "h")):
                goal = shardings(mesh, axis)
                plan = sr.plan_reshard(arrays, goal, donate=True)
                stay = [move.path for move in plan.moves if move.route == "alias"]
                moved = sr.reshard({**arrays, **static}, {**goal, **dict.fromkeys(static)}, donate=True)
                assert {name: moved.pop(name) for name in static} == static
                for name, values in tree.items():
                    known = values if name.startswith("key") else np.asarray(values)
                    check(moved[name], goal[name], known)
                    assert arrays[name].is_deleted() == (name not in stay), name
                arrays = moved
            print(len(arrays))
        """,
        processes,
        devices,
    )
    assert printed == [["10"]] * processes


@pytest.mark.sample(1)
@SHAPES
def test_copies_in_another_process_cross_once(processes: int, devices: int) -> None:
    printed = run(
        """
            for source in (NamedSharding(first, P("h")), NamedSharding(first, P()), SingleDeviceSharding(devices[0])):
                array = placed(whole, source)
                target = NamedSharding(last, P())
                plan = sr.plan_reshard(array, target)
                pieces = plan.moves[0].schedule.pieces
                far = [piece for piece in pieces if piece.sender.process_index != piece.receiver.process_index]
                crossing = sum(plan.moves[0].schedule.box_bytes(piece.box) for piece in far)
                check(sr.reshard(array, target), target, whole)
                print(plan.moves[0].route, crossing == whole.nbytes)
            spread = NamedSharding(everywhere, P())
            one = placed(whole, SingleDeviceSharding(devices[0]))
            check(sr.reshard(one, spread), spread, whole)
            print(sr.plan_reshard(one, spread).moves[0].route)
        """,
        processes,
        devices,
    )
    assert printed == [["intermediate True"] * 3 + ["intermediate"]] * processes


@pytest.mark.slow
def test_large_arrays_move_in_pieces_and_batches() -> None:
    printed = run(
        """
            large = np.arange(1024 * 1536, dtype=np.float32).reshape(1024, 1536)
            many = [placed(large + number, NamedSharding(everywhere, P("d"))) for number in range(6)]
            for mesh, spec in ((last, P(None, "h")), (last, P()), (grid, P("b", "a")), (first, P("h"))):
                goal = NamedSharding(mesh, spec)
                many = sr.reshard(many, goal, donate=True, max_bytes_in_flight=13 * 2**20)
                for number, array in enumerate(many):
                    check(array, goal, large + number)
            print(len(many))
        """
    )
    assert printed == [["6"]] * 2


@pytest.mark.slow
def test_many_arrays_move_without_a_deadlock() -> None:
    printed = run(
        """
            source, target = NamedSharding(everywhere, P("d")), NamedSharding(mixed, P(None, "m"))
            arrays = [placed(whole + number, source) for number in range(300)]
            begin = time.monotonic()
            moved = sr.reshard(arrays, target)
            for number, array in enumerate(moved):
                check(array, target, whole + number)
            print(len(moved))
        """
    )
    assert printed == [["300"]] * 2


@pytest.mark.slow
def test_processes_without_shards_take_part() -> None:
    printed = run(
        """
            for source, target in ((first, last), (last, first), (first, first), (last, last)):
                for values, spec in ((whole, P(None, "h")), (whole[0], P("h")), (whole[0, 0], P())):
                    array = placed(np.asarray(values), NamedSharding(source, P("h") if values.ndim else P()))
                    goal = NamedSharding(target, spec)
                    moved = sr.reshard(array, goal)
                    check(moved, goal, np.asarray(values))
                    again = sr.reshard(moved, goal)
                    assert again is moved
                    given_up = sr.reshard(moved, goal, donate=True, may_alias=False)
                    check(given_up, goal, np.asarray(values))
                    assert moved.is_deleted()
            print("done")
        """
    )
    assert printed == [["done"]] * 2


@pytest.mark.slow
def test_all_processes_refuse_and_continue() -> None:
    printed = run(
        """
            a, b = placed(whole, NamedSharding(everywhere, P("d"))), placed(whole[:6], NamedSharding(last, P()))
            tree = {"a": a, "b": b}
            try:
                sr.reshard(tree, NamedSharding(last, P("h")), donate=True)
            except sr.errors.PlanError as error:
                print([finding.path for finding in error.findings])
            for name, rows in (("a", 16), ("b", 6)):
                check(tree[name], tree[name].sharding, whole[:rows])
            goal = NamedSharding(last, P(None, "h"))
            check(sr.reshard(tree, goal)["b"], goal, whole[:6])
        """
    )
    assert printed == [["['b']"]] * 2


@pytest.mark.slow
def test_host_arrays_and_uncommitted_ones_go_to_each_process() -> None:
    """Each process has an uncommitted array on its own first device, as it would on its host."""
    printed = run(
        """
            for mesh in (everywhere, first, last, mixed):
                goal = NamedSharding(mesh, P())
                for value in (whole, np.float32(3), 3, jnp.arange(8), jax.random.key(5)):
                    expected = np.int32(3) if isinstance(value, int) else value
                    check(sr.reshard({"x": value}, goal)["x"], goal, expected)
            print("done")
        """
    )
    assert printed == [["done"]] * 2


@pytest.mark.slow
def test_training_continues_after_each_move() -> None:
    printed = run(
        """
            step = jax.jit(lambda w: 2 * w + 1, donate_argnums=0)
            expected = whole
            array = placed(expected, NamedSharding(everywhere, P("d")))
            for goal in (NamedSharding(grid, P("b", "a")), NamedSharding(turned, P(None, "d"))):
                array = step(sr.reshard(array, goal, donate=True))
                expected = 2 * expected + 1
                check(array, array.sharding, expected)
            print("done")
        """
    )
    assert printed == [["done"]] * 2
