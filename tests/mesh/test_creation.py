"""Meshes of real devices, and of devices that are only descriptions."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import shardrules as sr

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual


def ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((), {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}),
        (((2, 2, 2, 1, -1),), {"dp": 2, "fsdp": 2, "ep": 2, "tp": 1, "sp": 1}),
        (("data:2,model:-1",), {"data": 2, "model": 4}),
        ((" data : 8 ",), {"data": 8}),
        (("data:8", ["data"]), {"data": 8}),
        (([8, 1], ["a", "b"]), {"a": 8, "b": 1}),
        (((8,), "data"), {"data": 8}),
    ],
    ids=str,
)
def test_sizes_and_names_in_every_form(arguments: Any, sizes: dict[str, int]) -> None:
    mesh = sr.create_mesh(*arguments)
    assert dict(mesh.shape) == sizes
    assert ids(mesh) == list(range(8))
    assert mesh is sr.create_mesh(list(sizes.values()), list(sizes))


DEVICES = jax.devices()
BACKWARDS = {"devices": DEVICES[::-1]}


@pytest.mark.parametrize(
    ("axis_dims", "names", "options", "match"),
    [
        ((2, 4), None, {}, r"axis_dims \(2, 4\) needs axis_names"),
        ("a:8", ("b",), {}, "'a:8' already names its axes"),
        ("a:2", None, {}, "multiply to 2"),
        ("a:3,b:-1", None, {}, "multiply to 3"),
        ("data", None, {}, "'data' is not name:size"),
        (8, "a", {}, "axis_dims must be a tuple of integers, got 8"),
        ((2.0, 4.0), ("a", "b"), {}, "axis_dims must be a tuple of integers"),
        ({8}, ("a",), {}, "axis_dims must be a tuple of integers"),
        ((8,), {"a"}, {}, "axis_names must be a tuple of names"),
        ((2, 4), 3, {}, "axis_names must be a tuple of names, got 3"),
        ((2, 4), ("", "a"), {}, "an axis name must be a non-empty string, got ''"),
        ("a:2,b:4", None, {"dcn_mesh_dims": 1}, "dcn_mesh_dims must be a tuple of integers, got 1"),
        ("a:2,b:4", None, {"axis_types": "explicti"}, "must be one of 'auto', .* AxisType.*did you mean 'explicit'"),
        ("a:2,b:4", None, {"axis_types": ("auto",) * 3}, "Got 3 types for 2 axis names"),
        ("a:2,b:4", None, {"axis_types": ()}, "Got 0 types for 2 axis names"),
        ("a:2,b:4", None, {"devices": np.array(DEVICES).reshape(4, 2)}, r"devices has shape \(4, 2\) and the mesh \(2"),
        ("a:2,b:4", None, {"devices": [[device] for device in DEVICES]}, r"devices has shape \(8, 1\)"),
        ("a:2,b:4", None, {"devices": [DEVICES[:3], DEVICES[3:]]}, "a mesh needs devices, got \\["),
        ("a:2,b:4", None, {"devices": DEVICES[0]}, "devices must be a list of devices"),
        ("a:2,b:4", None, {"devices": np.array(DEVICES[0])}, "devices must be a list of devices"),
        ("a:2,b:4", None, {"devices": range(8)}, "a mesh needs devices, got 0"),
        ("a:2,b:4", None, {"devices": []}, "there are no devices"),
        ("a:8", None, {"devices": DEVICES[:4] * 2}, "8 devices, only 4 different"),
        ("a:8", None, {"devices": DEVICES, "backend": "cpu"}, "devices or a backend, not both"),
        ("a:2,b:4", None, {**BACKWARDS, "dcn_mesh_dims": (1, 1)}, "dcn_mesh_dims cannot be combined with devices"),
        ("a:2,b:4", None, {**BACKWARDS, "use_jax": True}, "use_jax cannot be combined with devices"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(axis_dims: Any, names: Any, options: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        sr.create_mesh(axis_dims, names, **options)


@pytest.mark.parametrize(("axis_types", "match"), [(3, "got 3 of type int"), (("auto", None), "got None of type None")])
def test_types_of_another_type_raise(axis_types: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        sr.create_mesh("a:2,b:4", axis_types=axis_types)


@pytest.mark.parametrize("use_jax", [False, True])
@pytest.mark.parametrize(
    ("axis_types", "types"),
    [
        (None, (AUTO, AUTO)),
        ("explicit", (EXPLICIT, EXPLICIT)),
        (" Auto ", (AUTO, AUTO)),
        (MANUAL, (MANUAL, MANUAL)),
        (["explicit"], (EXPLICIT, EXPLICIT)),
        (("auto", EXPLICIT), (AUTO, EXPLICIT)),
    ],
    ids=str,
)
def test_axis_types_do_not_depend_on_how_devices_are_chosen(
    axis_types: Any, types: tuple[AxisType, ...], use_jax: bool
) -> None:
    mesh = sr.create_mesh("a:2,b:4", axis_types=axis_types, use_jax=use_jax)
    assert mesh.axis_types == types
    assert ids(mesh) == list(range(8))
    assert sr.create_mesh("a:2,b:2", axis_types=axis_types, devices=jax.devices()[:4]).axis_types == types


def test_a_list_in_a_custom_order_is_kept() -> None:
    devices = jax.devices()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    custom = [devices[index] for index in order]
    forms: list[Any] = [custom, tuple(custom), np.array(custom), [custom[:4], custom[4:]]]
    for form in [*forms, np.array(custom).reshape(2, 4)]:
        assert ids(sr.create_mesh("a:2,b:4", devices=form)) == order
    assert ids(sr.create_mesh("a:4", devices=devices[:4][::-1])) == [3, 2, 1, 0]
    assert ids(sr.create_mesh("a:2,b:-1", devices=devices[4:])) == [4, 5, 6, 7]
    assert ids(sr.create_mesh("a:8", devices=[*devices])) == list(range(8))
    hosts = [sr.meshes.DeviceInfo(index, process_index=index // 4) for index in order]
    assert ids(sr.create_mesh("a:2,b:4", devices=hosts)) == order


def test_a_list_in_the_order_of_the_backend_is_laid_out() -> None:
    # TPUs are listed by hosts of two by two chips, and their ids go row by row through all of them.
    torus = [
        sr.meshes.DeviceInfo(x + 4 * y, process_index=x // 2 + 2 * (y // 2), coords=(x, y, 0), platform="tpu")
        for y in range(4)
        for x in range(4)
    ]
    by_host = sorted(torus, key=lambda chip: (chip.process_index, chip.id))
    for devices in (torus, by_host):
        mesh = sr.create_mesh("a:4,b:4", devices=devices)
        assert ids(mesh) == sr.meshes.lay_out((4, 4), "ab", torus).ids.ravel().tolist()
    assert ids(sr.create_mesh("a:4,b:4", devices=torus[::-1])) == list(range(15, -1, -1))


def test_the_devices_that_an_error_suggests_work() -> None:
    pairs = [sr.meshes.DeviceInfo(index, process_index=index // 4) for index in range(8)]
    slices = [sr.meshes.DeviceInfo(index, slice_index=index // 4) for index in range(8)]
    chips = [sr.meshes.DeviceInfo(index, coords=(index % 2, index // 2, 0), platform="tpu") for index in range(8)]
    for devices in (pairs, slices, chips, np.array(pairs).reshape(2, 4), jax.devices(), None):
        with pytest.raises(sr.errors.MeshError, match="uses 6 of them") as caught:
            sr.create_mesh("a:2,b:3", devices=devices)
        suggested = eval(str(caught.value).rpartition("devices=")[2].removesuffix(" uses 6 of them"))
        assert ids(sr.create_mesh("a:2,b:3", devices=suggested)) == list(range(6))
    with pytest.raises(sr.errors.MeshError, match=r"jax\.devices\('cpu'\)\[:6\] uses 6"):
        sr.create_mesh("a:6", backend="cpu")
    with pytest.raises(sr.errors.MeshError, match=r"devices=np.array\(devices\).reshape\(2, 3\)"):
        sr.create_mesh("a:2,b:3", devices=slices[:6])
    with pytest.warns(sr.errors.MeshWarning, match="'tp' of size 6 spans 2 processes"):
        sr.create_mesh("tp:6", devices=pairs[:6])


def pod(slices: int, platform: str = "gpu") -> list[sr.meshes.DeviceInfo]:
    size = 16 // slices
    return [
        sr.meshes.DeviceInfo(
            index,
            process_index=index // 4,
            slice_index=index // size,
            coords=(index % size, 0, 0) if platform == "tpu" else None,
            platform=platform,
        )
        for index in range(16)
    ]


@pytest.mark.parametrize(
    ("platform", "fast", "slow"),
    [("tpu", "ICI", "DCN"), ("gpu", "NVLink", "Ethernet or InfiniBand"), ("cpu", "shared memory", "the network")],
)
def test_a_fast_axis_on_the_slow_network_warns(platform: str, fast: str, slow: str) -> None:
    with pytest.warns(sr.errors.MeshWarning, match=f"'tp' of size 16 spans 2 slices: .*{slow}.*slow.*{fast}.*fast"):
        sr.create_mesh("dp:1,tp:16", devices=pod(2, platform))


def test_fast_axes_names_the_axes_that_warn() -> None:
    with pytest.warns(sr.errors.MeshWarning, match="'experts'"):
        sr.create_mesh("experts:16", devices=pod(2), fast_axes=("experts",))
    sr.create_mesh("tp:16", devices=pod(2), fast_axes=())
    with pytest.warns(sr.errors.MeshWarning, match="'experts'"):
        sr.create_mesh("experts:16", devices=pod(2), fast_axes="experts")
    sr.create_mesh("exp:16", devices=pod(2), fast_axes="experts")
    axes: Any = iter(["experts"])
    with pytest.warns(sr.errors.MeshWarning, match="'experts'"):
        sr.create_mesh("other:4,experts:4", devices=pod(4), dcn_mesh_dims=(2, 2), fast_axes=axes)
    with pytest.raises(TypeError, match="not iterable"):
        sr.create_mesh("data:8", fast_axes=None)  # pyright: ignore[reportArgumentType]


def test_a_fast_axis_of_placed_devices_warns() -> None:
    devices = np.array(pod(2))
    sr.create_mesh("dp:4,tp:4", devices=pod(1))
    with pytest.warns(sr.errors.MeshWarning, match="'tp' of size 2 spans 2 slices"):
        sr.create_mesh("dp:8,tp:2", devices=devices.reshape(2, 8).T)
    with pytest.warns(sr.errors.MeshWarning, match="'tp' of size 8 spans 2 slices"):  # its first row only
        sr.create_mesh("dp:2,tp:8", devices=devices[[0, 8, *range(1, 8), *range(9, 16)]])
    sr.create_mesh("dp:2,tp:8", devices=devices.reshape(2, 8))


def test_processes_are_joined_by_the_slow_network_unless_each_has_one_device() -> None:
    single = [sr.meshes.DeviceInfo(index, process_index=index) for index in range(8)]
    assert sr.create_mesh("tp:8", devices=single).size == 8
    # Coordinates of GPUs do not join hosts.
    gpus = [
        sr.meshes.DeviceInfo(index, process_index=index // 4, slice_index=0, coords=(index % 4,), platform="gpu")
        for index in range(8)
    ]
    with pytest.warns(sr.errors.MeshWarning, match="'model' of size 8 spans 2 processes: .*Ethernet or InfiniBand"):
        sr.create_mesh("model:8", devices=gpus)


def test_a_warning_points_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda backend=None: pod(2))

    def within() -> None:
        with sr.meshes.cpu_context("tp:16"):
            pass

    calls: list[Callable[[], object]] = [
        lambda: sr.create_mesh("tp:16"),
        lambda: sr.meshes.create_device_mesh([("tp", 16)]),
        lambda: sr.meshes.parse_mesh_from_string("tp:16", ["tp"]),
        lambda: sr.meshes.create_cpu_mesh("tp:16"),
        within,
    ]
    for call in calls:
        with pytest.warns(sr.errors.MeshWarning, match="'tp'") as caught, contextlib.suppress(AttributeError):
            call()  # contexts do not accept descriptions as devices
        assert [warning.filename for warning in caught] == [__file__]


def test_missing_slices_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sr.create_mesh("a:8")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    with pytest.raises(sr.errors.MeshError, match="MEGASCALE_NUM_SLICES is 2, but the 8 devices are of 1 slice"):
        sr.create_mesh("a:8")
    assert sr.create_mesh("a:8", devices=jax.devices()) is before
    assert sr.meshes.create_cpu_mesh("a:8") is before
    with sr.meshes.cpu_context("a:8") as mesh:
        assert mesh is before
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    assert sr.create_mesh("a:8") is before


def test_use_jax_takes_the_processes_of_one_torus() -> None:
    calls: list[Any] = []
    torus = pod(1, "tpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_mesh", lambda *args, devices, **_: calls.append((args, devices)))
        sr.create_mesh("a:16", devices=torus, use_jax=True)
        with pytest.raises(sr.errors.MeshError, match="or the processes of one torus"):
            sr.create_mesh("a:16", devices=pod(1), use_jax=True)
        with pytest.raises(sr.errors.MeshError, match="use_jax=True needs devices of one slice and one process"):
            sr.create_mesh("dp:16", devices=pod(2), use_jax=True)
    assert calls == [(((16,), ("a",)), torus)]


@pytest.mark.parametrize(
    ("text", "names", "sizes"),
    [
        ("dp:2,tp:4", ["dp", "tp"], {"dp": 2, "tp": 4}),
        ("tp:4,dp:2", ("dp", "tp"), {"tp": 4, "dp": 2}),
        ("2,4", ["dp", "tp"], {"dp": 2, "tp": 4}),
        ("2, -1", ["dp", "tp"], {"dp": 2, "tp": 4}),
        ("dp:-1,tp:4", ["dp", "tp"], {"dp": 2, "tp": 4}),
        (" dp : 4 ,tp: 2 ", ["dp", " tp"], {"dp": 4, "tp": 2}),
        ("\tdp:4,\n tp:-1", ["dp", " tp"], {"dp": 4, "tp": 2}),
    ],
)
def test_parse_mesh_from_string_reads_both_forms(text: str, names: Any, sizes: dict[str, int]) -> None:
    assert list(sr.meshes.parse_mesh_from_string(text, names).shape.items()) == list(sizes.items())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp:2,ttp:4", r"Axis name 'ttp' not found in provided names \['dp', 'tp'\] \(did you mean 'tp'\?\)"),
        ("dp:2, ttp:4", "Axis name 'ttp' not found"),
        ("dp:8", "Not all axis names were used in 'dp:8': 'tp'"),
        ("dp:2,dp:4", "Not all axis names were used"),
        ("dp:2,tp:2,tp:2", "Number of dimensions and names must match"),
        ("2,4,1", "Number of dimensions and names must match"),
        ("8", "Number of dimensions and names must match"),
        ("dp:2,tp:x", "a size must be an integer"),
        ("2,", "a size must be an integer"),
        ("dp:2,4", "Axis name '' not found"),
        ("", "a size must be an integer"),
    ],
)
def test_a_text_that_does_not_match_the_names_raises(text: str, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        sr.meshes.parse_mesh_from_string(text, ["dp", "tp"])


@pytest.mark.parametrize("pairs", [[("a", 4, 1)], [("a",)], [4], 4, {"a": 8}], ids=str)
def test_create_device_mesh_takes_pairs(pairs: Any) -> None:
    with pytest.raises(sr.errors.MeshError, match="config_mesh must be a list of pairs"):
        sr.meshes.create_device_mesh(pairs)
    with pytest.raises(sr.errors.MeshError, match="axis_dims must be a string such as"):
        sr.meshes.parse_mesh_from_string(pairs, ["a"])
    mesh = sr.meshes.create_device_mesh([("data", -1), ("model", 4)], axis_types="explicit")
    assert (dict(mesh.shape), mesh.axis_types) == ({"data": 2, "model": 4}, (EXPLICIT, EXPLICIT))


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("text", ["data:4,model:4", "data:16,model:-1"])
def test_too_few_cpu_devices_say_how_to_have_more(text: str, backend: str | None) -> None:
    with pytest.raises(sr.errors.MeshError, match=r"jax.config.update\('jax_num_cpu_devices', 16\) before anything"):
        sr.create_mesh(text, backend=backend)
    # Devices that were passed are a choice, and fewer than there are need no more.
    choices: tuple[dict[str, Any], ...] = ({"devices": jax.devices()[:4]}, {})
    for options in choices:
        with pytest.raises(sr.errors.MeshError, match="multiply to") as caught:
            sr.create_mesh("data:3,model:2", **options)
        assert "jax_num_cpu_devices" not in str(caught.value)


def test_cpu_meshes_and_contexts() -> None:
    assert sr.meshes.create_cpu_mesh() is sr.create_mesh(backend="cpu")
    with sr.meshes.force_cpu() as cpu:
        assert jnp.ones(3).devices() == {cpu} == {jax.devices("cpu")[0]}
    with sr.meshes.cpu_context("data:2,model:4") as mesh:
        assert sr.meshes.current_mesh() is mesh
        assert jax.jit(lambda x: x)(jnp.ones(3)).sum() == 3
    assert sr.meshes.current_mesh() is None


@pytest.mark.parametrize("types", ["explicit", ("auto", "explicit"), ("explicit", "auto")], ids=str)
def test_plans_do_not_depend_on_axis_types(types: Any) -> None:
    tree = {"w": jnp.ones((8, 8)), "v": jnp.ones((16, 4))}
    mesh = sr.create_mesh("data:4,model:2", axis_types=types)
    for rule in (sr.AutoShardingRule(min_shard_size=0), sr.MemoryConstrainedShardingRule(64, scope="tree")):
        plan = rule.plan(tree, mesh).check()
        assert plan.fingerprint == rule.plan(tree, sr.mesh_shape("data:4,model:2")).fingerprint
        placed = jax.device_put(tree, plan.shardings(mesh))
        assert all(sr.specs.same(placed[name].sharding.spec, spec) for name, spec in plan.specs.items())
