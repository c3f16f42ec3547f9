"""Targets and their meshes; and each of them compiles, where its compiler is installed."""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MissingCompilerError, TargetError, UnavailableTargetError
from shardrules.programs.machine import targets
from shardrules.programs.machine.hardware import sheets
from shardrules.programs.machine.targets import Target
from tests.house.source import REPOSITORY

SHEETS = sheets()

TEXTS = [  # the text, its normal form, devices, devices that fast links connect, sheet
    ("cpu", "cpu", None, None, "cpu"),
    ("cpu:256", "cpu:256", 256, 256, "cpu"),
    ("tpu:v5e:4x4", "tpu:v5e:4x4", 16, 16, "tpu:v5e"),
    ("tpu:v5e:1x1", "tpu:v5e:1x1", 1, 1, "tpu:v5e"),
    ("tpu:v5e:4x4:2", "tpu:v5e:4x4:2", 32, 16, "tpu:v5e"),
    ("tpu:v5e:4x4:1", "tpu:v5e:4x4", 16, 16, "tpu:v5e"),
    ("TPU:V5P: 2x2x2", "tpu:v5p:2x2x2", 8, 8, "tpu:v5p"),
    ("tpu:v4:2x2x4", "tpu:v4:2x2x4", 16, 16, "tpu:v4"),
    ("tpu:v6e:16x16", "tpu:v6e:16x16", 256, 256, "tpu:v6e"),
    ("tpu:v2:2x2", "tpu:v2:2x2", 8, 8, "tpu:v2"),
    ("tpu:v3:4x4", "tpu:v3:4x4", 32, 32, "tpu:v3"),
    ("tpu:v7x:2x2x1", "tpu:v7x:2x2x1", 8, 8, "tpu:v7x"),
    ("cuda:a100:1", "cuda:a100:1", 1, 1, "cuda:a100"),
    ("cuda:h100:8", "cuda:h100:8", 8, 8, "cuda:h100"),
    (" cuda : h200 : 64 ", "cuda:h200:64", 64, 8, "cuda:h200"),
    ("cuda:b200:4", "cuda:b200:4", 4, 4, "cuda:b200"),
]

INVALID_TEXTS = [
    ("gpu:h100:8", r"unknown platform 'gpu' \(did you mean 'cuda'\?\)\. Write cpu or .*; tpu:.*; cuda:"),
    ("tqu:v5e:4x4", r"unknown platform 'tqu' \(did you mean 'tpu'\?\)"),
    ("", "unknown platform ''"),
    ("tpu", "the TPU generation is missing; the topology is missing"),
    ("tpu:v5e", r"the topology is missing\. Write tpu:<v2\|v3\|v4\|v5e\|v5p\|v6e\|v7x>:<topology>"),
    ("tpu:v5litepod:4x4", "unknown TPU generation 'v5litepod'"),
    ("tpu:v5x:4y4", r"unknown TPU generation 'v5x' \(did you mean '.*'\?\); '4y4' is not a number or sizes"),
    ("tpu:v5e:4x4x1", "the torus of a v5e has 2 dimensions, got 3; use 4x4, for example"),
    ("tpu:v5p:8", "the torus of a v5p has 3 dimensions, got 1; use 4x4x4, for example"),
    ("tpu:v5p:4x8", "the torus of a v5p has 3 dimensions, got 2; use 4x8x1, for example"),
    ("tpu:v5e:3x4", "the first two sizes must be even unless there is a single chip; got 3x4"),
    ("tpu:v5e:4x0", r"sizes must be positive integers, got \(4, 0\)"),
    ("tpu:v5e:4x4:0", "slices must be a positive integer, and only TPUs may have more than 1; got 0"),
    ("tpu:v5e:4x4:2x2", "unexpected '2x2'"),
    ("tpu:v5e:4x4:2:1", "unexpected '1'"),
    ("cuda", "the GPU is missing; the number of GPUs is missing"),
    ("cuda:h100", r"the number of GPUs is missing\. Write cuda:<a100\|h100\|h200\|b200>:<number>"),
    ("cuda:h10:8", r"unknown GPU 'h10' \(did you mean 'h100'\?\)"),
    ("cuda:h100:12", "12 GPUs do not fill hosts of 8; use 8 or 16"),
    ("cuda:h100:-8", "'-8' is not a number"),
    ("cuda:h100:2x8", r"expected one number of devices, got \(2, 8\)"),
    ("cuda:h10:8:2", r"unknown GPU 'h10' .*; unexpected '2'"),
    ("cpu:0", r"sizes must be positive integers, got \(0,\)"),
    ("cpu:eight", "'eight' is not a number. Write cpu or cpu:<number>"),
    ("cpu:h100:8", "'h100' is not a number; unexpected '8'"),
]

GENERATIONS = [  # each with a mesh to compile a product on
    ("tpu", "tpu:v2:2x2", "data:4,model:2"),
    ("tpu", "tpu:v3:2x2", "data:4,model:2"),
    ("tpu", "tpu:v4:2x2x2", "data:4,model:2"),
    ("tpu", "tpu:v5e:4x4", "data:4,model:4"),
    ("tpu", "tpu:v5e:1x1", "data:1,model:1"),
    ("tpu", "tpu:v5e:4x4:2", "data:8,model:4"),
    ("tpu", "tpu:v5p:2x2x2", "data:4,model:2"),
    ("tpu", "tpu:v6e:4x4", "data:8,model:2"),
    ("tpu", "tpu:v7x:2x2x1", "data:4,model:2"),
    ("cuda", "cuda:a100:8", "data:4,model:2"),
    ("cuda", "cuda:h100:8", "data:4,model:2"),
    ("cuda", "cuda:h200:4", "data:2,model:2"),
    ("cuda", "cuda:b200:8", "data:4,model:2"),
    ("cuda", "cuda:h100:64", "data:16,model:4"),
]


def installed(extra: str) -> bool:
    if extra == "tpu":
        return find_spec("libtpu") is not None
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def needs(*extras: str) -> None:
    """Skips a test without these extras; in CI, where nothing may be missing, it fails."""
    missing = [extra for extra in extras if not installed(extra)]
    if missing:
        text = f'not installed: pip install "shardrules[{",".join(missing)}]"'
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)


def compiled(target: Target, mesh: str, rows: int = 1024) -> Any:
    """A product of two matrices that are split over both axes, compiled for the target."""
    real = target.mesh(sr.mesh_shape(mesh))
    split, whole = NamedSharding(real, P("data", "model")), NamedSharding(real, P("model", None))
    fn = jax.jit(lambda x, w: x @ w, in_shardings=(split, whole), out_shardings=NamedSharding(real, P("data")))
    shapes = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    return fn.lower(*shapes).compile()


# Texts.


@pytest.mark.parametrize(("text", "normal", "count", "granule", "sheet"), TEXTS)
def test_texts_give_targets(text: str, normal: str, count: int | None, granule: int | None, sheet: str) -> None:
    target = Target.parse(text)
    assert (str(target), target.count, target.granule) == (normal, count, granule)
    assert target.hardware is SHEETS[sheet]
    assert target.platform == sheet.split(":")[0]


@pytest.mark.parametrize("text", [text for text, *_ in TEXTS])
def test_targets_are_values(text: str) -> None:
    target = Target.parse(text)
    assert Target.parse(target) is target
    for copy in (Target.parse(str(target)), eval(repr(target)), pickle.loads(pickle.dumps(target))):
        assert copy == target
        assert hash(copy) == hash(target)
    with pytest.raises(attrs.exceptions.FrozenInstanceError, match=r"^$|can't set"):
        target.chip = "other"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("text", "match"), INVALID_TEXTS)
def test_invalid_texts_raise(text: str, match: str) -> None:
    with pytest.raises(TargetError, match=match) as caught:
        Target.parse(text)
    assert str(caught.value).startswith(f"target {text!r}: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_parse_takes_a_string_or_a_target() -> None:
    with pytest.raises(TargetError, match=r"a target must be a string or a Target, got 8\. Write cpu or .*cuda:h100:8"):
        Target.parse(8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("rocm", "mi300", (8,)), "unknown platform 'rocm'"),
        (("cpu", "h100", (8,)), "a CPU target has no chip, got 'h100'"),
        (("cpu", "", (2, 4)), r"expected one number of devices, got \(2, 4\)"),
        (("cpu", "", (2.5,)), r"sizes must be positive integers, got \(2\.5,\)"),
        (("cuda", "h100", ()), "the number of GPUs is missing"),
        (("cuda", "h100", (16,), 2), "only TPUs may have more than 1; got 2"),
        (("tpu", "v5e", (3, 3), 0), "sizes must be even .*; slices must be a positive integer"),
        (("tpu", 5, (4, 4)), "unknown TPU generation 5"),
        (("tpu", "v5e", 16), "the torus of a v5e has 2 dimensions, got 1"),
        (("cuda", "h100", 12), "12 GPUs do not fill hosts of 8"),
        (("cuda", "h100", None), r"sizes must be positive integers, got \(None,\)"),
    ],
)
def test_the_constructor_checks_its_fields(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises(TargetError, match=match):
        Target(*fields)


def test_a_count_of_devices_may_be_a_plain_number() -> None:
    assert Target("cuda", "h100", 8) == Target("cuda", "h100", (8,))


PARTS = ("cpu", "tpu", "cuda", "v5e", "v5p", "v2", "h100", "8", "16", "4x4", "2x2x2", "1x1", "0", "x", "", " ", "V5E")


@given(st.lists(st.sampled_from(PARTS) | st.text("0123456789x", max_size=5), max_size=5).map(":".join))
def test_any_text_is_read_or_raises_a_target_error(text: str) -> None:
    try:
        target = Target.parse(text)
    except TargetError:
        return
    assert Target.parse(str(target)) == target


@given(st.sampled_from(["v2", "v5e", "v6e"]), st.integers(1, 64), st.integers(1, 64), st.integers(1, 9))
def test_a_slice_is_a_granule(chip: str, rows: int, columns: int, slices: int) -> None:
    target = Target("tpu", chip, (2 * rows, 2 * columns), slices)
    granule = 4 * rows * columns * (2 if chip == "v2" else 1)
    assert (target.count, target.granule) == (granule * slices, granule)
    assert Target.parse(str(target)) == target


# Devices and meshes.


@pytest.mark.parametrize(
    ("chip", "sizes", "closed"),
    [
        ("v5e", (16, 16), (True, True)),
        ("v5e", (8, 16), (False, True)),
        ("v6e", (4, 4), (False, False)),
        ("v3", (16, 32), (False, True)),
        ("v5p", (4, 4, 4), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v4", (8, 8, 12), (True, True, True)),
        ("v7x", (2, 2, 1), (False, False, False)),
    ],
)
def test_slices_that_close_to_rings(chip: str, sizes: tuple[int, ...], closed: tuple[bool, ...]) -> None:
    assert targets.closed_dims(chip, sizes) == closed


def test_cpu_targets_use_the_devices_of_the_process() -> None:
    assert Target.parse("cpu").devices() == jax.devices("cpu")
    assert Target.parse("cpu:3").devices() == jax.devices("cpu")[:3]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_keeps_names_sizes_and_types(axis_type: AxisType) -> None:
    shape = AbstractMesh((2, 4), ("data", "model"), axis_types=(axis_type, AxisType.Auto))
    mesh = Target.parse("cpu:8").mesh(shape)
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.axis_types == shape.axis_types
    assert mesh.devices.ravel().tolist() == jax.devices("cpu")
    assert mesh == Target.parse("cpu").mesh(shape)


def test_a_cpu_target_without_a_count_has_the_size_of_the_mesh() -> None:
    mesh = Target.parse("cpu").mesh(sr.mesh_shape("data:3,model:2"))
    assert mesh.devices.ravel().tolist() == jax.devices("cpu")[:6]


def test_a_mesh_on_the_targets_devices_is_returned_unchanged() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[::-1]).reshape(4, 2), ("data", "model"))
    assert Target.parse("cpu").mesh(mesh) is mesh
    assert Target.parse("cpu:8").mesh(mesh) is mesh
    other = Mesh(np.array(jax.devices("cpu")[4:]), "x")
    assert Target.parse("cpu").mesh(other) is other
    assert Target.parse("cpu:4").mesh(other).devices.tolist() == jax.devices("cpu")[:4]


@pytest.mark.parametrize(
    ("target", "mesh", "match"),
    [
        (
            "cpu:4",
            "data:4,model:2",
            r"'data:4,model:2' has 8 devices, but target cpu:4 has 4\. .* target of 8: cpu:8$",
        ),
        ("cuda:h100:8", "data:16", r"has 16 devices, but target cuda:h100:8 has 8\. .* of 16: cuda:h100:16$"),
        ("cuda:h100:8", "data:12", r"has 12 devices, but target cuda:h100:8 has 8\. .*, or a target of 12$"),
        ("tpu:v5e:4x4", "data:8", r"has 8 devices, but target tpu:v5e:4x4 has 16\. .*, or a target of 8$"),
    ],
)
def test_a_mesh_of_another_size_raises(target: str, mesh: str, match: str) -> None:
    with pytest.raises(TargetError, match=match):
        Target.parse(target).mesh(sr.mesh_shape(mesh))


def test_only_meshes_are_accepted() -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh must be a Mesh or an AbstractMesh, got 'data:8'"):
        Target.parse("cpu:8").mesh("data:8")  # pyright: ignore[reportArgumentType]


def test_too_few_cpu_devices_raise_and_change_nothing() -> None:
    before = dict(jax.config.values), dict(os.environ)
    for use in (Target.parse("cpu:9").devices, lambda: Target.parse("cpu").mesh(sr.mesh_shape("data:9"))):
        with pytest.raises(
            UnavailableTargetError, match=r"cpu:9 needs 9 CPU devices, but this process has 8, .*count=9"
        ):
            use()
    assert (dict(jax.config.values), dict(os.environ)) == before


# The remedies in messages work; and targets leave the environment and the output of a process alone.


def python(code: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process whose environment is this one, changed by the variables; `None` removes one."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": "", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


COUNT_DEVICES = """
import json, sys
from shardrules.programs.machine.targets import Target
{before}
print(len(Target.parse("cpu:64").devices()))
"""


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ("import jax; jax.config.update('jax_num_cpu_devices', 64)", ""),
        ("", "--xla_force_host_platform_device_count=64"),
    ],
)
def test_both_remedies_give_the_devices(before: str, flags: str) -> None:
    run = python(COUNT_DEVICES.format(before=before), XLA_FLAGS=flags)
    assert run.stdout == "64\n", run.stderr


READ_TARGETS = """
import os, sys
import jax
before = dict(os.environ), dict(jax.config.values)
from shardrules.programs.machine.targets import Target
for text in ("cpu:8", "tpu:v5e:4x4", "cuda:h100:8"):
    target = Target.parse(text)
    print(target, target.count, target.granule, target.hardware.name)
assert (dict(os.environ), dict(jax.config.values)) == before
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up
"""


def test_reading_targets_starts_no_backend() -> None:
    run = python(READ_TARGETS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1] == "tpu:v5e:4x4 16 16 TPU v5e"


COMPILE_FOR_ALL = """
import json, os, sys
import jax
from shardrules.programs.machine.targets import Target
from tests.programs.machine.test_targets import compiled
jax.devices()  # JAX may log when it starts; what comes after is checked
print("started", file=sys.stderr, flush=True)
before = dict(os.environ)
for target, mesh in json.loads({texts!r}):
    print(target, compiled(Target.parse(target), mesh).memory_analysis().argument_size_in_bytes, flush=True)
assert dict(os.environ) == before
"""


@pytest.mark.slow
def test_one_process_compiles_for_all_targets_in_turn_silently() -> None:
    needs("tpu", "cuda")
    Target.parse("tpu:v5e:2x2").devices()  # this process uses libtpu too: by default it allows only one
    pairs = [(target, mesh) for _, target, mesh in GENERATIONS[::4]]  # three TPUs and a GPU
    run = python(COMPILE_FOR_ALL.format(texts=json.dumps([*pairs, ("cpu", "data:1,model:1"), *pairs[::-1]])))
    assert run.returncode == 0, run.stderr
    assert run.stderr.rpartition("started\n")[2] == ""
    assert len(run.stdout.splitlines()) == 2 * len(pairs) + 1


@pytest.mark.slow
def test_a_cuda_plugin_that_did_not_load_raises_with_a_remedy() -> None:
    needs("cuda")
    run = python(
        "from shardrules.programs.machine.targets import *\nTarget.parse('cuda:h100:8').devices()", JAX_PLATFORMS=""
    )
    if run.returncode == 0:
        pytest.skip("CUDA's libraries are installed here, so the plugin loads")
    assert "UnavailableTargetError: cuda:h100:8: JAX's CUDA plugin is installed but did not load" in run.stderr
    assert "Start the process with JAX_PLATFORMS=cpu" in run.stderr


@pytest.mark.parametrize(("text", "extra"), [("tpu:v5e:2x2:3", "tpu"), ("cuda:h100:2", "cuda")])
def test_a_missing_extra_raises_with_the_command(text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(targets, "entry_points", lambda group: ())
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # importing libtpu sets it, and JAX does import it
    with pytest.raises(MissingCompilerError, match=rf'{text} needs .*: pip install "shardrules\[{extra}\]"') as caught:
        Target.parse(text).mesh(sr.mesh_shape(f"x:{Target.parse(text).count}"))
    assert isinstance(caught.value, ImportError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_errors_of_the_compiler_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such topology")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(targets, "find_spec", lambda name: name)
    before = dict(os.environ)
    with pytest.raises(UnavailableTargetError, match="tpu:v5e:2x2:4: its compiler refuses: no such topology"):
        Target.parse("tpu:v5e:2x2:4").devices()
    assert dict(os.environ) == before


def test_environment_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def look(*args: Any, **kwargs: Any) -> None:
        seen.update(os.environ)
        raise RuntimeError("enough")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", look)
    monkeypatch.setattr(targets, "find_spec", lambda name: name)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    with pytest.raises(UnavailableTargetError, match="enough"):
        Target.parse("tpu:v5e:2x2:5").devices()
    assert (seen["TPU_WORKER_HOSTNAMES"], os.environ["TPU_WORKER_HOSTNAMES"]) == ("mine", "mine")
    assert seen["TPU_ACCELERATOR_TYPE"]
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


# The compilers.


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "text", "mesh"), GENERATIONS, ids=[text for _, text, _ in GENERATIONS])
def test_every_generation_compiles(extra: str, text: str, mesh: str) -> None:
    needs(extra)
    target = Target.parse(text)
    devices = target.devices()
    assert len(devices) == target.count
    assert target.devices() == devices  # the same objects, or two meshes would differ
    assert target.mesh(sr.mesh_shape(mesh)) == target.mesh(sr.mesh_shape(mesh))
    program = compiled(target, mesh)
    axes = dict(sr.mesh_shape(mesh).shape)
    argument_bytes = 2 * (1024 * 512 // (axes["data"] * axes["model"]) + 512 * 256 // axes["model"])
    assert program.memory_analysis().argument_size_in_bytes == argument_bytes
    reduces = "all-reduce" in program.as_text() or "reduce-scatter" in program.as_text()
    assert reduces == (axes["model"] > 1)


@pytest.mark.slow
def test_tpus_are_laid_out_along_their_torus() -> None:
    needs("tpu")
    mesh = Target.parse("tpu:v5e:4x4").mesh(sr.mesh_shape("data:4,model:4"))
    coords = np.array([[device.coords[:2] for device in row] for row in mesh.devices])
    for line in (*coords, *coords.swapaxes(0, 1)):
        assert sorted(len(dict.fromkeys(column)) for column in line.T.tolist()) == [1, 4]
    ring = Target.parse("tpu:v5e:4x4").mesh(sr.mesh_shape("data:16")).devices
    steps = [np.abs(np.subtract(first.coords, second.coords)).sum() for first, second in itertools.pairwise(ring)]
    assert steps == [1] * 15


@pytest.mark.slow
def test_slices_and_hosts_go_to_the_first_axes() -> None:
    needs("tpu", "cuda")
    slices = Target.parse("tpu:v5e:4x4:2").mesh(sr.mesh_shape("data:8,model:4"))
    assert [[device.slice_index for device in row] for row in slices.devices] == [[0] * 4] * 4 + [[1] * 4] * 4
    hosts = Target.parse("cuda:h100:32").mesh(sr.mesh_shape("data:4,model:8"))
    assert [[device.process_index for device in row] for row in hosts.devices] == [[host] * 8 for host in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHEETS if name.startswith("tpu")])
def test_the_memory_of_a_tpu_is_what_libtpu_reports(name: str) -> None:
    needs("tpu")
    chip = name.partition(":")[2]
    target = Target("tpu", chip, (2, 2, 1)[: SHEETS[name].torus_dims])
    too_much = int(3 * SHEETS[name].memory_bytes / 1024) // 8 * 8
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds available HBM") as caught:
        compiled(target, f"data:1,model:{target.count}", rows=8 * too_much)
    match = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(caught.value))
    assert match
    # Versions of libtpu differ by a hundredth of a GiB: the sheet has the smallest.
    assert 0 <= float(match[1]) - SHEETS[name].memory_bytes / 2**30 < 0.03
