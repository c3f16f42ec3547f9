"""Cutting a mesh along an axis and joining it again: values, devices, memory, and what is refused."""

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.moves.split import concatenate_by_mesh_axis, split_by_mesh_axis
from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import SHAPES, printed_lines
from tests.moves.cases import pointers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(
    sizes: Sequence[int], names: Sequence[str], types: Sequence[AxisType] | None = None, start: int = 0
) -> Mesh:
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[start : start + count]).reshape(sizes)
    return Mesh(devices, tuple(names), axis_types=tuple(types or (AUTO,) * len(names)))


FSDP = mesh_of((8,), ("fsdp",))
REP = mesh_of((2, 4), ("rep", "fsdp"))


def counted(mesh: Mesh, spec: P, shape: tuple[int, ...] = (8, 8), dtype: Any = np.float32) -> jax.Array:
    """An array of distinct elements, with its own memory on every device."""
    sharding = NamedSharding(mesh, spec)
    # Shards that come from numpy may share one memory on CPU devices.
    return jax.jit(lambda: jnp.arange(np.prod(shape), dtype=dtype).reshape(shape), out_shardings=sharding)()


def ids(array: jax.Array) -> list[int]:
    return [device.id for device in mesh_on(array).devices.flat]


def mesh_on(array: jax.Array) -> Mesh:
    assert isinstance(array.sharding, NamedSharding)
    assert isinstance(array.sharding.mesh, Mesh)
    return array.sharding.mesh


def spec_on(array: jax.Array) -> P:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.spec


def merged(arrays: Sequence[jax.Array]) -> dict[int, int]:
    items = [item for array in arrays for item in pointers(array).items()]
    assert len(dict(items)) == len(items)
    return dict(items)


def by_hand(array: jax.Array, mesh_axis: str, start: int, stop: int) -> np.ndarray:
    """The shards of some indices of an axis, put together with numpy alone, each at the place of its device."""
    mesh, spec = mesh_on(array), spec_on(array)
    part = mesh.devices.take(range(start, stop), axis=mesh.axis_names.index(mesh_axis))
    sizes = dict(zip(mesh.axis_names, part.shape, strict=True))
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    entries += [()] * (array.ndim - len(entries))
    ways = [int(np.prod([sizes[name] for name in entry])) for entry in entries]
    shards = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    shard_shape = next(iter(shards.values())).shape
    result = np.zeros([way * size for way, size in zip(ways, shard_shape, strict=True)], array.dtype)
    filled = np.zeros(result.shape, bool)
    for coordinates in np.ndindex(part.shape):
        index_of = dict(zip(mesh.axis_names, coordinates, strict=True))
        where = []
        for entry, size in zip(entries, shard_shape, strict=True):
            index = 0
            for name in entry:
                index = index * sizes[name] + index_of[name]
            where.append(slice(index * size, (index + 1) * size))
        result[tuple(where)] = shards[part[coordinates]]
        filled[tuple(where)] = True
    assert filled.all()
    return result


@pytest.mark.parametrize(
    ("sections", "lengths"),
    [
        (None, [1] * 8),
        (1, [8]),
        (np.int64(4), [2] * 4),
        (8, [1] * 8),
        ((1, 2, 7), [1, 1, 5, 1]),
        ([], [8]),
        (np.array([3]), [3, 5]),
        (range(2, 8, 2), [2] * 4),
    ],
)
def test_sections_of_every_kind(sections: Any, lengths: list[int]) -> None:
    x = counted(FSDP, P(None, "fsdp"))
    parts = split_by_mesh_axis(x, "fsdp", sections)
    assert [part.shape for part in parts] == [(8, length) for length in lengths]
    ends = list(itertools.accumulate(lengths))
    for part, end in zip(parts, ends, strict=True):
        np.testing.assert_array_equal(part, np.asarray(x)[:, end - part.shape[1] : end])
    assert concatenate_by_mesh_axis(parts, "fsdp").sharding == x.sharding


def test_minor_axes_give_shards_in_device_order() -> None:
    mesh = mesh_of((2, 4), ("a", "b"))
    x = counted(mesh, P(("a", "b")), (16,))
    major = split_by_mesh_axis(x, "a")
    assert [part.tolist() for part in major] == [list(range(8)), list(range(8, 16))]
    minor = split_by_mesh_axis(x, "b", [1])
    assert minor[0].tolist() == [0, 1, 8, 9]
    assert minor[1].tolist() == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    for axis, parts in (("a", major), ("b", minor)):
        joined = concatenate_by_mesh_axis(parts, axis)
        assert joined.sharding == x.sharding
        assert joined.tolist() == x.tolist()


SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a")), P(("c", "a"), "b")]
TYPES = [(AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, AUTO), (EXPLICIT, AUTO, EXPLICIT)]


@pytest.mark.sample(32)
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(kind.name for kind in types))
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis", ["a", "b", "c"])
def test_joining_undoes_cutting(axis: str, spec: P, types: tuple[AxisType, ...]) -> None:
    mesh = mesh_of((2, 2, 2), ("a", "b", "c"), types)
    x = counted(mesh, spec)
    parts = split_by_mesh_axis(x, axis)
    for index, part in enumerate(parts):
        assert mesh_on(part).axis_types == types
        assert spec_on(part) == spec_on(x)
        np.testing.assert_array_equal(part, by_hand(x, axis, index, index + 1))
    joined = concatenate_by_mesh_axis(parts, axis)
    assert joined.sharding == x.sharding
    assert joined.shape == x.shape
    np.testing.assert_array_equal(joined, x)
    assert pointers(x) == merged(parts) == pointers(joined)
    assert len(dict.fromkeys(pointers(x).values())) == 8  # eight memories indeed


@pytest.mark.parametrize("seed", range(40))
def test_random_meshes_specs_and_sections(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = "abc"[: random.integers(2, 4)]
    sizes = (9,)
    while np.prod(sizes) > 8:
        sizes = tuple(random.integers(1, 5, len(names)).tolist())
    order = random.permutation(8)[: np.prod(sizes)]
    mesh = Mesh(
        np.array(jax.devices())[order].reshape(sizes),
        tuple(names),
        axis_types=tuple([AUTO, EXPLICIT][index] for index in random.integers(0, 2, len(names))),
    )
    dims: list[list[str]] = [[] for _ in range(random.integers(1, 4))]
    for name in random.permutation(list(names)).tolist():
        if random.random() < 0.8:
            dims[random.integers(len(dims))].append(name)
    spec = P(*[tuple(entry) or None for entry in dims])
    shape = tuple(int(np.prod([mesh.shape[name] for name in entry])) * int(random.integers(1, 3)) for entry in dims)
    x = counted(mesh, spec, shape)
    axis = names[random.integers(len(names))]
    size = mesh.shape[axis]
    inner = [cut for cut in range(1, size) if random.random() < 0.5]
    parts = split_by_mesh_axis(x, axis, inner)
    for part, (start, stop) in zip(parts, itertools.pairwise([0, *inner, size]), strict=True):
        np.testing.assert_array_equal(part, by_hand(x, axis, start, stop))
        along = mesh.axis_names.index(axis)
        np.testing.assert_array_equal(mesh_on(part).devices, mesh.devices.take(range(start, stop), axis=along))
    joined = concatenate_by_mesh_axis(parts, axis)
    assert joined.sharding == x.sharding
    np.testing.assert_array_equal(joined, x)
    assert pointers(x) == merged(parts) == pointers(joined)


@pytest.mark.parametrize(
    "dtype", [jnp.int4, jnp.bool_, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64, jnp.uint8], ids=str
)
def test_every_dtype_keeps_its_bits(dtype: Any) -> None:
    raw = (np.arange(64).reshape(8, 8) % 3).astype(dtype)
    x = jax.device_put(raw, NamedSharding(FSDP, P("fsdp")))
    parts = split_by_mesh_axis(x, "fsdp", [3])
    assert b"".join(np.asarray(part).tobytes() for part in parts) == raw.tobytes()
    joined = concatenate_by_mesh_axis(parts, "fsdp")
    assert joined.dtype == parts[0].dtype == raw.dtype
    assert np.asarray(joined).tobytes() == raw.tobytes()


def test_random_keys_stay_keys() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(3, impl="rbg"), (8, 2)), NamedSharding(REP, P("fsdp")))
    parts = split_by_mesh_axis(keys, "fsdp", [1])
    assert [part.shape for part in parts] == [(2, 2), (6, 2)]
    assert all(part.dtype == keys.dtype for part in parts)
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.key_data(parts[0]), data[:2])
    np.testing.assert_array_equal(jax.random.key_data(parts[1]), data[2:])
    assert merged(parts) == pointers(keys)
    joined = concatenate_by_mesh_axis(parts, "fsdp")
    assert joined.sharding == keys.sharding
    assert joined.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(joined), data)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_memory_kinds_are_kept(kind: str) -> None:
    x = jax.device_put(np.arange(8.0), NamedSharding(FSDP, P("fsdp")).with_memory_kind(kind))
    parts = split_by_mesh_axis(x, "fsdp", [2])
    assert [part.sharding.memory_kind for part in parts] == [kind, kind]
    assert merged(parts) == pointers(x)
    joined = concatenate_by_mesh_axis(parts, "fsdp")
    assert joined.sharding == x.sharding
    assert joined.tolist() == list(range(8))


def test_trees_keep_their_structure() -> None:
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    step = counted(REP, P(), (), np.int32)
    tree = {
        "params": sr.filter_shard(params, sr.AutoShardingRule(axis_names=("fsdp",), min_shard_size=0), REP),
        "step": step,
    }
    parts = split_by_mesh_axis(tree, "fsdp", (1, 3))
    assert len(parts) == 3
    assert all(jax.tree.structure(part) == jax.tree.structure(tree) for part in parts)
    assert all(int(part["step"]) == 0 for part in parts)
    joined = concatenate_by_mesh_axis(tuple(parts), "fsdp")
    for head, other in zip(jax.tree.leaves(joined), jax.tree.leaves(tree), strict=True):
        assert head.sharding == other.sharding
        np.testing.assert_array_equal(head, other)
    whole = eqx.combine(joined["params"], static)
    np.testing.assert_allclose(whole(jnp.ones(8)), model(jnp.ones(8)), atol=1e-5)


def test_empty_arrays_and_axes_of_one() -> None:
    mesh = mesh_of((1, 4), ("one", "fsdp"))
    x = counted(mesh, P("fsdp", "one"), (0, 4))
    assert [part.shape for part in split_by_mesh_axis(x, "fsdp", [1])] == [(0, 4), (0, 4)]
    (same,) = split_by_mesh_axis(x, "one")
    assert same.sharding == x.sharding
    assert concatenate_by_mesh_axis([same], "one").sharding == x.sharding


def test_unrelated_parts_can_be_joined() -> None:
    small, large = mesh_of((2, 1), ("tp", "dp")), mesh_of((2, 3), ("tp", "dp"), start=2)
    a, b = counted(small, P("dp", "tp"), (2, 4)), counted(large, P(("dp",), "tp"), (6, 4))
    joined = concatenate_by_mesh_axis([a, b], "dp")
    assert dict(mesh_on(joined).shape) == {"tp": 2, "dp": 4}
    np.testing.assert_array_equal(joined, np.concatenate([a, b]))
    assert ids(joined) == [0, 2, 3, 4, 1, 5, 6, 7]


# What is shared, and what `donate` therefore means.


@pytest.mark.parametrize("donate", [False, True])
def test_donate_leaves_the_results_alive(donate: bool) -> None:
    x = counted(FSDP, P("fsdp"))
    values = np.asarray(x)
    parts = split_by_mesh_axis({"x": x}, "fsdp", 2, donate=donate)
    assert not x.is_deleted()
    before = pointers(x)
    del x
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts]), values)
    joined = concatenate_by_mesh_axis(parts, "fsdp", donate=donate)
    assert not any(part["x"].is_deleted() for part in parts)
    del parts
    np.testing.assert_array_equal(joined["x"], values)
    assert pointers(joined["x"]) == before


def test_jax_deletes_shared_shards_of_all_arrays() -> None:
    """The reason why `donate` deletes nothing. If this fails, JAX has changed, and `donate` could."""
    x = counted(FSDP, P("fsdp"))
    parts = split_by_mesh_axis(x, "fsdp", 2)
    x.delete()
    assert all(part.is_deleted() for part in parts)


def test_arrays_that_lost_shards_are_refused() -> None:
    x = counted(FSDP, P("fsdp"))
    head, two = split_by_mesh_axis({"x": x}, "fsdp", 2)
    two["x"].delete()
    with pytest.raises(sr.errors.TreeError, match=r"deleted: x \(8, 8\): it has been deleted or donated, or an array"):
        split_by_mesh_axis({"x": x}, "fsdp", 2)
    with pytest.raises(sr.errors.TreeError, match=r"deleted: 1/x \(4, 8\): it has been deleted"):
        concatenate_by_mesh_axis([head, two], "fsdp")


def test_deleted_keys_are_refused() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(FSDP, P("fsdp")))
    keys.delete()
    with pytest.raises(sr.errors.TreeError, match=r"deleted: the tree \(8,\): it has been deleted"):
        split_by_mesh_axis(keys, "fsdp")


# What is refused.


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (3, "an axis of size 8 cannot be cut into 3 equal parts"),
        (0, "into 0 equal parts"),
        (-2, "into -2 equal parts"),
        (16, "into 16 equal parts"),
        ([8], r"the indices \[8\] must be increasing numbers above 0 and below 8, the size of the axis"),
        ([0], r"the indices \[0\] must be"),
        ([4, 2], r"the indices \[4, 2\] must be"),
        ((2, 2), r"the indices \[2, 2\] must be"),
        ([-1], r"the indices \[-1\] must be"),
        ("4", "a number or a list of numbers; got '4'"),
        (b"\x04", "a number or a list of numbers; got b"),
        (2.0, "a number or a list of numbers; got 2.0"),
        (True, "a number or a list of numbers; got True"),
        ([1, "x"], r"a number or a list of numbers; got \[1, 'x'\]"),
        ([[1], 2], "a number or a list of numbers"),
        ({1: 2}, "a number or a list of numbers"),
        (np.ones((1, 1), int), "a number or a list of numbers"),
    ],
)
def test_sections_must_be_possible(sections: Any, message: str) -> None:
    x = counted(FSDP, P("fsdp"))
    with pytest.raises(sr.errors.MeshError, match=message) as caught:
        split_by_mesh_axis(x, "fsdp", sections)
    assert isinstance(caught.value, ValueError)


def test_axes_of_size_one_have_no_inner_index() -> None:
    x = counted(mesh_of((1, 8), ("one", "fsdp")), P("fsdp"))
    with pytest.raises(sr.errors.MeshError, match=r"the indices \[1\] must be increasing numbers above 0 and below 1"):
        split_by_mesh_axis(x, "one", [1])


@pytest.mark.parametrize("axis", ["fspd", "", None, ("fsdp",), ["fsdp"], 0])
def test_the_axis_must_exist(axis: Any) -> None:
    x = counted(FSDP, P("fsdp"))
    with pytest.raises(sr.errors.UnknownAxisError, match=r"unknown axis .*; the mesh is fsdp:8") as caught:
        split_by_mesh_axis(x, axis)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(sr.errors.UnknownAxisError, match=r"unknown-axis: 0: unknown axis .*; the mesh is fsdp:8"):
        concatenate_by_mesh_axis([x], axis)


def test_the_nearest_axis_is_suggested() -> None:
    with pytest.raises(sr.errors.UnknownAxisError, match=r"'fspd'; the mesh is fsdp:8 \(did you mean 'fsdp'\?\)"):
        split_by_mesh_axis(counted(FSDP, P("fsdp")), "fspd")


def test_one_error_lists_every_problem_of_cutting() -> None:
    gone = counted(FSDP, P("fsdp"))
    gone.delete()
    tree = {
        "fine": counted(FSDP, P("fsdp")),
        "gone": gone,
        "host": np.ones((3, 2)),
        "layers": [{"w": 1.0}, {"w": 2.0}],
        "other": counted(REP, P("fsdp")),
        "single": jnp.ones(5),
        "types": counted(mesh_of((8,), ("fsdp",), (EXPLICIT,)), P("fsdp")),
    }
    with pytest.raises(sr.errors.MeshError, match="split_by_mesh_axis:") as caught:
        split_by_mesh_axis(tree, "fsdp", 3)
    lines = str(caught.value).splitlines()
    all_devices = "devices 0, 1, 2, 3, 4, 5, 6, 7"
    others = f", and earlier arrays are on fsdp:8 (Auto) of {all_devices}"
    assert [line for line in lines if not line.startswith("      ->")] == [
        "split_by_mesh_axis:",
        "  error sections: an axis of size 8 cannot be cut into 3 equal parts",
        "  error deleted: gone (8, 8): it has been deleted or donated, or an array that shares its shards has",
        "  error no-array: host (3, 2): it is a ndarray, not a JAX array",
        "  error no-array: layers/*/w x2: it is a float, not a JAX array",
        f"  error other-mesh: other (8, 8): it is on the mesh rep:2,fsdp:4 (Auto, Auto) of {all_devices}{others}",
        "  error no-mesh: single (5,): it is not on a mesh: its sharding is a SingleDeviceSharding",
        f"  error other-mesh: types (8, 8): it is on the mesh fsdp:8 (Explicit) of {all_devices}{others}",
    ]
    assert sum(line.startswith("      ->") for line in lines) == 7
    with pytest.raises(
        sr.errors.UnknownAxisError, match=r"unknown axis 'dp'(.|\n)*increasing numbers above 0\n(.|\n)*gone"
    ):
        split_by_mesh_axis(tree, "dp", [2, 1])
    with pytest.raises(sr.errors.TreeError, match="deleted: gone"):
        split_by_mesh_axis({"gone": gone}, "fsdp")


@pytest.mark.parametrize("tree", [{}, [], None, {"a": None}])
def test_trees_need_an_array(tree: Any) -> None:
    with pytest.raises(sr.errors.TreeError, match="the tree has no array, and so no mesh"):
        split_by_mesh_axis(tree, "fsdp", 2)
    with pytest.raises(sr.errors.TreeError, match="the tree has no array, and so no mesh"):
        concatenate_by_mesh_axis([tree, tree], "fsdp")


def test_traced_arrays_are_refused() -> None:
    x = counted(FSDP, P("fsdp"))
    with pytest.raises(
        sr.errors.TreeError, match=r"traced: the tree \(8, 8\): it is being traced\n *-> Call it outside of jit"
    ):
        jax.jit(lambda x: split_by_mesh_axis(x, "fsdp", 2))(x)
    with pytest.raises(sr.errors.TreeError, match=r"traced: 0 \(8, 8\): it is being traced"):
        jax.jit(lambda x: concatenate_by_mesh_axis([x], "fsdp"))(x)


def unreduced(mesh: Mesh) -> jax.Array:
    a, b = counted(mesh, P(None, "fsdp")), counted(mesh, P("fsdp", None))
    with jax.set_mesh(mesh):
        return jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced=frozenset(["fsdp"]))))(a, b)


def test_unreduced_arrays_are_refused() -> None:
    x = unreduced(mesh_of((2, 4), ("rep", "fsdp"), (EXPLICIT, EXPLICIT)))
    assert spec_on(x).unreduced == {"fsdp"}
    with pytest.raises(sr.errors.TreeError, match=r"unreduced: x \(8, 8\): it is an unreduced sum over 'fsdp'"):
        split_by_mesh_axis({"x": x}, "fsdp")
    parts = split_by_mesh_axis({"x": x}, "rep")
    assert spec_on(parts[0]["x"]).unreduced == {"fsdp"}
    assert concatenate_by_mesh_axis(parts, "rep")["x"].sharding == x.sharding
    other = counted(mesh_on(parts[1]["x"]), P(None, None))
    with pytest.raises(sr.errors.TreeError, match=r"misfit: 1/x \(8, 8\): its spec is .*, and in tree 0 .*unreduced"):
        concatenate_by_mesh_axis([parts[0], {"x": other}], "rep")
    with pytest.raises(sr.errors.TreeError, match=r"unreduced: \*/x \(8, 8\) x2: it is an unreduced sum over 'fsdp'"):
        concatenate_by_mesh_axis(parts, "fsdp")


LEFT, RIGHT = mesh_of((4,), ("fsdp",)), mesh_of((4,), ("fsdp",), start=4)


@pytest.mark.parametrize("trees", [[], (), "", None, 3, {"a": 1}, np.ones(3), iter([1])])
def test_trees_must_be_a_list(trees: Any) -> None:
    with pytest.raises(
        sr.errors.ConfigTypeError, match="concatenate_by_mesh_axis: trees must be a list or tuple of pytrees, got"
    ):
        concatenate_by_mesh_axis(trees, "fsdp")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (mesh_of((4,), ("dp",), start=4), r"differs from fsdp:4 in more than the size of 'fsdp'"),
        (mesh_of((2, 2), ("rep", "fsdp"), start=4), r"differs from fsdp:4 in more"),
        (mesh_of((4, 1), ("fsdp", "tp"), start=4), r"differs from fsdp:4 in more"),
        (
            mesh_of((4,), ("fsdp",), (EXPLICIT,), start=4),
            r"has other axis types than fsdp:4 \(Auto\) of devices 0, 1, 2, 3",
        ),
        (mesh_of((4,), ("fsdp",), start=2), r"of devices 2, 3, 4, 5 shares devices 2, 3 with an earlier one"),
        (LEFT, r"shares devices 0, 1, 2, 3 with an earlier one"),
        (FSDP, r"shares devices 0, 1, 2, 3 with an earlier one"),
    ],
)
def test_meshes_that_cannot_be_joined(mesh: Mesh, message: str) -> None:
    x, y = counted(LEFT, P(), (4,)), counted(mesh, P(), (4,))
    with pytest.raises(sr.errors.ShardRulesError, match=rf"other-mesh: 1: the mesh .* {message}"):
        concatenate_by_mesh_axis([x, y], "fsdp")


def test_no_two_meshes_may_overlap() -> None:
    meshes = [mesh_of((2,), ("fsdp",), start=start) for start in (0, 2, 3)]
    trees = [counted(mesh, P("fsdp"), (4,)) for mesh in meshes]
    with pytest.raises(
        sr.errors.MeshError, match=r"other-mesh: 2: the mesh fsdp:2 .* shares devices 3 with an earlier one"
    ):
        concatenate_by_mesh_axis(trees, "fsdp")


def put(x: Any, spec: P, mesh: Mesh = RIGHT, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=kind))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (put(np.ones((8, 4), np.int32), P("fsdp")), "its dtype is int32, and in tree 0 float32"),
        (
            put(np.ones((8, 4), np.float32), P(None, "fsdp")),
            r"its spec is P\(None, 'fsdp'\), and in tree 0 P\('fsdp'\)",
        ),
        (put(np.ones((8, 4), np.float32), P()), r"its spec is P\(\), and in tree 0 P\('fsdp'\)"),
        (put(np.ones((4, 4), np.float32), P("fsdp")), r"its shards are \(1, 4\), and in tree 0 \(2, 4\)"),
        (put(np.ones((8, 2), np.float32), P("fsdp")), r"its shards are \(2, 2\), and in tree 0 \(2, 4\)"),
        (put(np.ones((8,), np.float32), P("fsdp")), r"its shards are \(2,\), and in tree 0 \(2, 4\)"),
        (
            put(np.ones((8, 4), np.float32), P("fsdp"), kind="pinned_host"),
            "its kind of memory is pinned_host, and in tree 0",
        ),
    ],
)
def test_arrays_that_cannot_be_joined(other: jax.Array, message: str) -> None:
    first = {"w": put(np.ones((8, 4), np.float32), P("fsdp"), LEFT)}
    with pytest.raises(sr.errors.TreeError, match=rf"misfit: 1/w \({other.shape[0]},.*: {message}"):
        concatenate_by_mesh_axis([first, {"w": other}], "fsdp")


def test_copies_need_equal_shapes_and_key_types() -> None:
    with pytest.raises(
        sr.errors.TreeError, match=r"1 \(8,\): its shape is not \(4,\), as in tree 0, and it is not split over 'fsdp'"
    ):
        concatenate_by_mesh_axis([put(np.ones(4), P(), LEFT), put(np.ones(8), P())], "fsdp")
    head, other = (jax.random.split(jax.random.key(0, impl=impl), 4) for impl in ("threefry2x32", "rbg"))
    with pytest.raises(sr.errors.TreeError, match=r"its dtype is key<rbg>, and in tree 0 key<fry>"):
        concatenate_by_mesh_axis([put(head, P("fsdp"), LEFT), put(other, P("fsdp"))], "fsdp")


def test_equivalent_specs_can_be_joined() -> None:
    head, other = put(np.ones((4, 4)), P("fsdp"), LEFT), put(np.ones((4, 4)), P(("fsdp",), None))
    assert spec_on(concatenate_by_mesh_axis([head, other], "fsdp")) == P("fsdp")


def test_structures_must_agree() -> None:
    x, y = counted(LEFT, P("fsdp")), counted(RIGHT, P("fsdp"))
    with pytest.raises(
        sr.errors.TreeError,
        match=r"structure: 1: its structure differs from tree 0's: it lacks 'b', and it also has 'c/d'",
    ):
        concatenate_by_mesh_axis([{"a": x, "b": x}, {"a": y, "c": {"d": y}}], "fsdp")
    with pytest.raises(
        sr.errors.TreeError, match=r"it has the same paths, but its containers or static fields differ: PyTreeDef"
    ):
        concatenate_by_mesh_axis([[x, x], (y, y)], "fsdp")


def test_one_error_lists_every_problem_of_joining() -> None:
    x, y = counted(LEFT, P("fsdp")), counted(RIGHT, P("fsdp"))
    gone = counted(RIGHT, P("fsdp"))
    gone.delete()
    half = jax.device_put(x, SingleDeviceSharding(jax.devices()[0]))
    trees = [
        {"a": x, "b": half, "c": x, "d": x},
        {"a": counted(RIGHT, P("fsdp"), dtype=np.int32), "b": y, "c": gone, "d": 3},
        {"a": x},
    ]
    with pytest.raises(sr.errors.MeshError, match="concatenate_by_mesh_axis:") as caught:
        concatenate_by_mesh_axis(trees, "fsdp")
    four = "devices 0, 1, 2, 3"
    lines = [line for line in str(caught.value).splitlines() if not line.startswith("      ->")]
    assert lines == [
        "concatenate_by_mesh_axis:",
        f"  error other-mesh: 2: the mesh fsdp:4 (Auto) of {four} shares {four} with an earlier one",
        "  error structure: 2: its structure differs from tree 0's: it lacks 'b', 'c', 'd'",
        "  error no-mesh: 0/b (8, 8): it is not on a mesh: its sharding is a SingleDeviceSharding",
        "  error deleted: 1/c (8, 8): it has been deleted or donated, or an array that shares its shards has",
        "  error no-array: 1/d: it is a int, not a JAX array",
        "  error misfit: 1/a (8, 8): its dtype is int32, and in tree 0 float32",
    ]


def test_nothing_is_sent() -> None:
    x = counted(FSDP, P("fsdp"))
    y = put(np.arange(8), P("fsdp"), FSDP)
    with jax.transfer_guard("disallow_explicit"):
        parts = split_by_mesh_axis([x, y], "fsdp", 4)
        joined = concatenate_by_mesh_axis(parts, "fsdp")
    assert pointers(joined[0]) == pointers(x)


@pytest.mark.slow
@SHAPES
def test_each_process_cuts_its_own_shards(processes: int, devices: int) -> None:
    printed = printed_lines(
        run_processes(
            """
            from shardrules.moves.split import concatenate_by_mesh_axis, split_by_mesh_axis
            mesh = sr.create_mesh("data:4,model:2")
            whole = np.arange(64, dtype=np.float32).reshape(8, 8)
            keys = jax.random.split(jax.random.key(3), 8)
            tree = {"w": whole, "k": keys, "b": np.ones(3, np.float32)}
            tree = sr.filter_shard(tree, {"w": P("data", "model"), "k": P("data"), "b": P()}, mesh)
            for axis in ("data", "model"):
                parts = split_by_mesh_axis(tree, axis)
                print(axis, [len(part["w"].addressable_shards) for part in parts])
                for number, part in enumerate(parts):
                    expected = np.split(whole, len(parts), 0 if axis == "data" else 1)[number]
                    assert part["w"].shape == expected.shape
                    assert part["k"].shape == (2 if axis == "data" else 8,) and part["k"].dtype == keys.dtype
                    for shard in part["w"].addressable_shards:
                        np.testing.assert_array_equal(shard.data, expected[shard.index])
                joined = concatenate_by_mesh_axis(parts, axis)
                assert all(joined[name].sharding == tree[name].sharding for name in tree)
                back = sr.filter_gather(joined)
                np.testing.assert_array_equal(back["w"], whole)
                assert jax.random.key_data(back["k"]).tolist() == jax.random.key_data(keys).tolist()
            """,
            processes=processes,
            devices=devices,
        )
    )
    rows = 4 // processes
    for process, lines in enumerate(printed):
        rows_here = range(process * rows, (process + 1) * rows)
        assert lines == [f"data {[2 if row in rows_here else 0 for row in range(4)]}", f"model {[rows, rows]}"]
