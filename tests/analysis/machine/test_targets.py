"""Targets, their meshes and their sheets; and each of them compiles, where its compiler is installed.

`python -m tests.analysis.machine.test_targets` writes the tables of the page on targets anew.
"""

import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
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
from shardrules.analysis.machine import targets
from shardrules.analysis.machine.hardware import FIGURES, RATES, SHEETS, Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.core.errors import HardwareError, MissingCompilerError, TargetError, UnavailableTargetError
from tests.house.source import REPOSITORY

PAGE = REPOSITORY / "docs" / "api" / "targets.md"
DESCRIPTIONS = REPOSITORY / "shardrules" / "analysis" / "gpus"

READ = [  # the text, its normal form, devices, devices that fast links join, sheet
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

UNREAD = [
    ("gpu:h100:8", r"there is no platform 'gpu' \(did you mean 'cuda'\?\)\. Write cpu or .*; tpu:.*; cuda:"),
    ("tqu:v5e:4x4", r"there is no platform 'tqu' \(did you mean 'tpu'\?\)"),
    ("", "there is no platform ''"),
    ("tpu", "it names no generation of TPU; it has no topology"),
    ("tpu:v5e", r"it has no topology\. Write tpu:<v2\|v3\|v4\|v5e\|v5p\|v6e\|v7x>:<topology>"),
    ("tpu:v5litepod:4x4", "no generation of TPU 'v5litepod'"),
    ("tpu:v5x:4y4", r"no generation of TPU 'v5x' \(did you mean '.*'\?\); '4y4' is no number and no sizes"),
    ("tpu:v5e:4x4x1", "the torus of a v5e has 2 dimensions, got 3: 4x4 has as many"),
    ("tpu:v5p:4x8", "the torus of a v5p has 3 dimensions, got 2: 4x8x1 has as many"),
    ("tpu:v5e:3x4", "the first two sizes are even unless there is one chip only; got 3x4"),
    ("tpu:v5e:4x0", r"sizes are integers of 1 or more, got \(4, 0\)"),
    ("tpu:v5e:4x4:0", "only TPUs have slices, and 1 of them or more; got 0"),
    ("tpu:v5e:4x4:2x2", "'2x2' is too much"),
    ("tpu:v5e:4x4:2:1", "'1' is too much"),
    ("cuda", "it names no GPU; it has no number of GPUs"),
    ("cuda:h100", r"it has no number of GPUs\. Write cuda:<a100\|h100\|h200\|b200>:<number>"),
    ("cuda:h10:8", r"there is no GPU 'h10' \(did you mean 'h100'\?\)"),
    ("cuda:h100:12", "12 GPUs are no whole number of hosts of 8: 8 or 16 are"),
    ("cuda:h100:-8", "'-8' is no number"),
    ("cuda:h100:2x8", r"it has one number of devices, got \(2, 8\)"),
    ("cuda:h10:8:2", r"no GPU 'h10' .*; '2' is too much"),
    ("cpu:0", r"sizes are integers of 1 or more, got \(0,\)"),
    ("cpu:eight", "'eight' is no number. Write cpu or cpu:<number>"),
    ("cpu:h100:8", "'h100' is no number; '8' is too much"),
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
    """Skips a test without these extras. In CI nothing may be missing: there it fails."""
    missing = [extra for extra in extras if not installed(extra)]
    if missing:
        text = f'not installed: pip install "shardrules[{",".join(missing)}]"'
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)


def compiled(target: Target, mesh: str, rows: int = 1024) -> Any:
    """A product of two matrices that are split over both axes, compiled for the target."""
    on = target.mesh(sr.mesh_shape(mesh))
    split, whole = NamedSharding(on, P("data", "model")), NamedSharding(on, P("model", None))
    fn = jax.jit(lambda x, w: x @ w, in_shardings=(split, whole), out_shardings=NamedSharding(on, P("data")))
    shapes = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    return fn.lower(*shapes).compile()


# Texts.


@pytest.mark.parametrize(("text", "normal", "count", "granule", "sheet"), READ)
def test_what_a_text_means(text: str, normal: str, count: int | None, granule: int | None, sheet: str) -> None:
    target = Target.parse(text)
    assert (str(target), target.count, target.granule) == (normal, count, granule)
    assert target.hardware is SHEETS[sheet]
    assert target.platform == sheet.split(":")[0]


@pytest.mark.parametrize("text", [text for text, *_ in READ])
def test_a_target_is_a_value(text: str) -> None:
    target = Target.parse(text)
    assert Target.parse(target) is target
    for same in (Target.parse(str(target)), eval(repr(target)), pickle.loads(pickle.dumps(target))):
        assert same == target
        assert hash(same) == hash(target)
    with pytest.raises(attrs.exceptions.FrozenInstanceError, match=r"^$|can't set"):
        target.chip = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_targets_differ_as_their_texts_do() -> None:
    texts = list(dict.fromkeys(normal for _, normal, *_ in READ))
    assert len(dict.fromkeys(map(Target.parse, texts))) == len(texts)


@pytest.mark.parametrize(("text", "match"), UNREAD)
def test_what_no_text_means(text: str, match: str) -> None:
    with pytest.raises(TargetError, match=match) as caught:
        Target.parse(text)
    assert str(caught.value).startswith(f"target {text!r}: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_target_is_made_of_a_text() -> None:
    with pytest.raises(TargetError, match=r"a target is a text or a Target, got 8\. Targets are cpu or .*cuda:h100:8"):
        Target.parse(8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("rocm", "mi300", (8,)), "there is no platform 'rocm'"),
        (("cpu", "h100", (8,)), "a CPU has no chip, got 'h100'"),
        (("cpu", "", (2, 4)), r"it has one number of devices, got \(2, 4\)"),
        (("cpu", "", (2.5,)), r"sizes are integers of 1 or more, got \(2\.5,\)"),
        (("cuda", "h100", ()), "it has no number of GPUs"),
        (("cuda", "h100", (16,), 2), "only TPUs have slices, and 1 of them or more; got 2"),
        (("tpu", "v5e", (3, 3), 0), "sizes are even .*; only TPUs have slices"),
        (("tpu", 5, (4, 4)), "there is no generation of TPU 5"),
    ],
)
def test_the_constructor_refuses_what_the_text_form_cannot_say(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises(TargetError, match=match):
        Target(*fields)


PARTS = ("cpu", "tpu", "cuda", "v5e", "v5p", "v2", "h100", "8", "16", "4x4", "2x2x2", "1x1", "0", "x", "", " ", "V5E")


@given(st.lists(st.sampled_from(PARTS) | st.text("0123456789x", max_size=5), max_size=5).map(":".join))
def test_a_text_is_read_or_refused(text: str) -> None:
    try:
        target = Target.parse(text)
    except TargetError:
        return
    assert Target.parse(str(target)) == target


@given(st.sampled_from(["v2", "v5e", "v6e"]), st.integers(1, 64), st.integers(1, 64), st.integers(1, 9))
def test_slices_of_a_torus(chip: str, rows: int, columns: int, slices: int) -> None:
    target = Target("tpu", chip, (2 * rows, 2 * columns), slices)
    granule = 4 * rows * columns * (2 if chip == "v2" else 1)
    assert (target.count, target.granule) == (granule * slices, granule)
    assert Target.parse(str(target)) == target


# Devices and meshes.


def test_cpu_devices_are_those_of_the_process() -> None:
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


def test_a_cpu_target_without_a_number_takes_what_the_mesh_needs() -> None:
    mesh = Target.parse("cpu").mesh(sr.mesh_shape("data:3,model:2"))
    assert mesh.devices.ravel().tolist() == jax.devices("cpu")[:6]


def test_a_mesh_of_the_targets_own_devices_stays_as_it_is() -> None:
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
            r"'data:4,model:2' has 8 devices, and the target cpu:4 has 4\. .* target of 8: cpu:8$",
        ),
        ("cuda:h100:8", "data:16", r"has 16 devices, and the target cuda:h100:8 has 8\. .* of 16: cuda:h100:16$"),
        ("cuda:h100:8", "data:12", r"has 12 devices, and the target cuda:h100:8 has 8\. .*, or a target of 12$"),
        ("tpu:v5e:4x4", "data:8", r"has 8 devices, and the target tpu:v5e:4x4 has 16\. .*, or a target of 8$"),
    ],
)
def test_a_mesh_of_another_size_is_refused(target: str, mesh: str, match: str) -> None:
    with pytest.raises(TargetError, match=match):
        Target.parse(target).mesh(sr.mesh_shape(mesh))


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh is a Mesh or an AbstractMesh, got 'data:8'"):
        Target.parse("cpu:8").mesh("data:8")  # pyright: ignore[reportArgumentType]


def test_too_few_cpu_devices_are_told_and_nothing_is_changed() -> None:
    before = dict(jax.config.values), dict(os.environ)
    for ask in (Target.parse("cpu:9").devices, lambda: Target.parse("cpu").mesh(sr.mesh_shape("data:9"))):
        with pytest.raises(
            UnavailableTargetError, match=r"cpu:9 needs 9 CPU devices, and this process has 8: .*count=9"
        ):
            ask()
    assert (dict(jax.config.values), dict(os.environ)) == before


# What the messages tell to do, done; and what a process sees and hears.


def python(code: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process whose environment is this one, changed by the variables; `None` takes one away."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": "", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


COUNTS = """
import json, sys
from shardrules.analysis.machine.targets import Target
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
    run = python(COUNTS.format(before=before), XLA_FLAGS=flags)
    assert run.stdout == "64\n", run.stderr


QUESTIONS = """
import os, sys
import jax
before = dict(os.environ), dict(jax.config.values)
from shardrules.analysis.machine.targets import Target
for text in ("cpu:8", "tpu:v5e:4x4", "cuda:h100:8"):
    target = Target.parse(text)
    print(target, target.count, target.granule, target.hardware.name)
assert (dict(os.environ), dict(jax.config.values)) == before
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up
"""


def test_questions_start_nothing() -> None:
    run = python(QUESTIONS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1] == "tpu:v5e:4x4 16 16 TPU v5e"


ALL = """
import json, os, sys
import jax
from shardrules.analysis.machine.targets import Target
from tests.analysis.machine.test_targets import compiled
jax.devices()  # whatever JAX itself has to say when it starts, it has said now
print("started", file=sys.stderr, flush=True)
before = dict(os.environ)
for target, mesh in json.loads({texts!r}):
    print(target, compiled(Target.parse(target), mesh).memory_analysis().argument_size_in_bytes, flush=True)
assert dict(os.environ) == before
"""


def test_one_process_compiles_for_all_of_them_in_turn_and_hears_nothing() -> None:
    needs("tpu", "cuda")
    Target.parse("tpu:v5e:2x2").devices()  # libtpu is in use here too: it would let one process at a time have it
    turn = [(target, mesh) for _, target, mesh in GENERATIONS]
    run = python(ALL.format(texts=json.dumps([*turn, ("cpu", "data:1,model:1"), *turn[::-1]])))
    assert run.returncode == 0, run.stderr
    assert run.stderr.rpartition("started\n")[2] == ""
    assert len(run.stdout.splitlines()) == 2 * len(turn) + 1


def test_the_cuda_plugin_that_did_not_load_is_told() -> None:
    needs("cuda")
    run = python(
        "from shardrules.analysis.machine.targets import *\nTarget.parse('cuda:h100:8').devices()", JAX_PLATFORMS=""
    )
    if run.returncode == 0:
        pytest.skip("CUDA's libraries are installed here, so the plugin loads")
    assert "UnavailableTargetError: cuda:h100:8: JAX's CUDA plugin is installed and did not load" in run.stderr
    assert "Start the process with JAX_PLATFORMS=cpu" in run.stderr


@pytest.mark.parametrize(("text", "extra"), [("tpu:v5e:2x2:3", "tpu"), ("cuda:h100:2", "cuda")])
def test_a_missing_extra_is_told_with_the_command(text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(targets, "entry_points", lambda group: ())
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # importing libtpu sets it, and JAX does import it
    with pytest.raises(MissingCompilerError, match=rf'{text} needs .*: pip install "shardrules\[{extra}\]"') as caught:
        Target.parse(text).mesh(sr.mesh_shape(f"x:{Target.parse(text).count}"))
    assert isinstance(caught.value, ImportError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_a_compiler_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such topology")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(targets, "find_spec", lambda name: name)
    before = dict(os.environ)
    with pytest.raises(UnavailableTargetError, match="tpu:v5e:2x2:4: its compiler refuses: no such topology"):
        Target.parse("tpu:v5e:2x2:4").devices()
    assert dict(os.environ) == before


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("extra", "text", "mesh"), GENERATIONS, ids=[text for _, text, _ in GENERATIONS])
def test_every_generation_compiles(extra: str, text: str, mesh: str) -> None:
    needs(extra)
    target = Target.parse(text)
    found = target.devices()
    assert len(found) == target.count
    assert target.devices() == found  # the same ones, or two meshes would differ
    assert target.mesh(sr.mesh_shape(mesh)) == target.mesh(sr.mesh_shape(mesh))
    start = time.perf_counter()
    program = compiled(target, mesh)
    assert time.perf_counter() - start < 60
    axes = dict(sr.mesh_shape(mesh).shape)
    argument_bytes = 2 * (1024 * 512 // (axes["data"] * axes["model"]) + 512 * 256 // axes["model"])
    assert program.memory_analysis().argument_size_in_bytes == argument_bytes
    reduces = "all-reduce" in program.as_text() or "reduce-scatter" in program.as_text()
    assert reduces == (axes["model"] > 1)


def test_tpus_stand_along_their_torus() -> None:
    needs("tpu")
    mesh = Target.parse("tpu:v5e:4x4").mesh(sr.mesh_shape("data:4,model:4"))
    coords = np.array([[device.coords[:2] for device in row] for row in mesh.devices])
    for line in (*coords, *coords.swapaxes(0, 1)):
        assert sorted(len(dict.fromkeys(column)) for column in line.T.tolist()) == [1, 4]
    ring = Target.parse("tpu:v5e:4x4").mesh(sr.mesh_shape("data:16")).devices
    steps = [np.abs(np.subtract(here.coords, there.coords)).sum() for here, there in itertools.pairwise(ring)]
    assert steps == [1] * 15


def test_slices_and_hosts_go_to_the_first_axes() -> None:
    needs("tpu", "cuda")
    slices = Target.parse("tpu:v5e:4x4:2").mesh(sr.mesh_shape("data:8,model:4"))
    assert [[device.slice_index for device in row] for row in slices.devices] == [[0] * 4] * 4 + [[1] * 4] * 4
    hosts = Target.parse("cuda:h100:32").mesh(sr.mesh_shape("data:4,model:8"))
    assert [[device.process_index for device in row] for row in hosts.devices] == [[host] * 8 for host in range(4)]


@pytest.mark.parametrize("name", [name for name in SHEETS if name.startswith("tpu")])
def test_the_memory_of_a_tpu_is_what_libtpu_says(name: str) -> None:
    needs("tpu")
    chip = name.partition(":")[2]
    target = Target("tpu", chip, (2, 2, 1)[: SHEETS[name].torus_dims])
    too_much = int(3 * SHEETS[name].memory_bytes / 1024) // 8 * 8
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds available HBM") as caught:
        compiled(target, f"data:1,model:{target.count}", rows=8 * too_much)
    found = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(caught.value))
    assert found
    # Versions of libtpu differ by a hundredth of a GiB: the sheet has the least.
    assert 0 <= float(found[1]) - SHEETS[name].memory_bytes / 2**30 < 0.03


# The sheets.


def described(chip: str) -> Iterator[tuple[str, str]]:
    for line in (DESCRIPTIONS / f"{chip}.txtpb").read_text().splitlines():
        name, colon, value = line.strip().partition(": ")
        if colon and not name.startswith("#"):
            yield name, value


GPUS = [name.partition(":")[2] for name in SHEETS if name.startswith("cuda")]


@pytest.mark.parametrize("chip", GPUS)
def test_sheets_agree_with_the_descriptions(chip: str) -> None:
    sheet, says = SHEETS[f"cuda:{chip}"], dict(described(chip))
    assert int(says["device_memory_size"]) == sheet.memory_bytes
    assert float(says["memory_bandwidth"]) == sheet.memory_bytes_per_second
    assert chip.upper() in says["device_description_str"]
    # A multiprocessor has units for two operations each, a multiplication and an addition, at every tick.
    vectors = 2 * int(says["core_count"]) * int(says["fpus_per_core"]) * float(says["clock_rate_ghz"]) * 1e9
    assert dict(sheet.peak_flops)["f32_highest"] == pytest.approx(vectors, rel=0.01)


@pytest.mark.parametrize("chip", GPUS)
def test_devices_are_those_described(chip: str) -> None:
    needs("cuda")
    assert Target("cuda", chip, (8,)).devices()[0].device_kind == dict(described(chip))["device_description_str"][1:-1]


def test_every_chip_has_a_sheet_and_every_gpu_a_description() -> None:
    with pytest.raises(TargetError, match="no platform") as caught:
        Target.parse("")
    tpus, gpus = [names.split("|") for names in re.findall(r"<(\w+\|[\w|]+)>", str(caught.value))]
    chips = [*(f"tpu:{chip}" for chip in tpus), *(f"cuda:{chip}" for chip in gpus)]
    assert sorted(chips) == sorted(name for name in SHEETS if name != "cpu")
    assert sorted(path.stem for path in DESCRIPTIONS.iterdir()) == sorted(GPUS)


@pytest.mark.parametrize("name", SHEETS)
def test_every_figure_has_a_source(name: str) -> None:
    sheet = SHEETS[name]
    assert [figure for figure in FIGURES if not sheet.source(figure)] == []
    assert eval(repr(sheet)) == attrs.evolve(sheet, sources=())
    assert hash(sheet) == hash(attrs.evolve(sheet))
    assert pickle.loads(pickle.dumps(sheet)) == sheet


@pytest.mark.parametrize("name", SHEETS)
def test_figures_are_in_proportion(name: str) -> None:
    sheet = SHEETS[name]
    rates = dict(sheet.peak_flops)
    assert rates["f32_highest"] <= rates["f32"] <= rates["bf16"] <= rates.get("f8", math.inf)
    assert sheet.network_bytes_per_second < sheet.link_bytes_per_second < sheet.memory_bytes_per_second
    assert sheet.link_latency_seconds < sheet.network_latency_seconds


@pytest.mark.parametrize(
    ("name", "dtype", "highest", "rate"),
    [
        ("cuda:h100", jnp.bfloat16, False, 989.4e12),
        ("cuda:h100", "bf16", False, 989.4e12),
        ("cuda:h100", np.float32, False, 494.7e12),
        ("cuda:h100", np.dtype("float32"), True, 66.9e12),
        ("cuda:h100", "f8e4m3fn", False, 1978.9e12),
        ("cuda:h100", jnp.float8_e5m2, False, 1978.9e12),
        ("cuda:h100", jnp.int4, False, 1978.9e12),
        ("cuda:h100", "pred", False, 1978.9e12),
        ("cuda:h100", "s32", False, 66.9e12),
        ("cuda:h100", np.complex64, False, 66.9e12),
        ("cuda:h100", "c128", False, 66.9e12),
        ("cuda:a100", "float8_e4m3fn", False, 312e12),
        ("cuda:a100", np.float64, False, 19.5e12),
        ("tpu:v5e", "f32", False, 197e12),
        ("tpu:v5e", "f32", True, 197e12 / 6),
        ("tpu:v5e", "f16", False, 197e12),
        ("tpu:v5e", "f8e5m2", False, 197e12),
        ("tpu:v5e", "u8", False, 393e12),
        ("tpu:v5e", "f64", False, 197e12 / 6),
        ("tpu:v3", "s8", False, 61.5e12),
        ("cpu", "f64", False, 5e10),
    ],
)
def test_how_fast_a_dtype_is(name: str, dtype: Any, highest: bool, rate: float) -> None:
    assert SHEETS[name].flops_per_second(dtype, highest=highest) == rate


@pytest.mark.parametrize("dtype", ["token", "bf17", None, "f", 8, str])
def test_what_is_no_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(HardwareError, match="a dtype is wanted"):
        SHEETS["cpu"].flops_per_second(dtype)


def test_a_sheet_of_ones_own() -> None:
    mine = attrs.evolve(SHEETS["cuda:h100"], name="ours", link_bytes_per_second=3.6e11, peak_flops={"bf16": 6e14})
    assert mine.flops_per_second("f32") == 6e14
    assert mine != SHEETS["cuda:h100"]
    assert hash(mine)


def test_a_sheet_lists_all_that_is_wrong() -> None:
    with pytest.raises(HardwareError, match="hardware 'odd': ") as caught:
        Hardware("odd", {"bf16": -1, "fp8": 1}, 0, 1, math.inf, 1, 1, float("nan"), 0, -1, {"link": "me"})
    for part in (
        r"no kind 'fp8' \(did you mean 'f8'\?\): the kinds are bf16,",
        r"peak_flops\['bf16'\] is a number above 0, got -1\.0",
        "memory_bytes is a number above 0, got 0",
        "link_bytes_per_second is a number above 0, got inf",
        "network_latency_seconds is a number above 0, got nan",
        "devices_per_host is 1 or more, or None for all; got 0",
        "torus_dims is 0 or more, got -1",
        "sources has no figure 'link'",
    ):
        assert re.search(part, str(caught.value))
    with pytest.raises(HardwareError, match="peak_flops is empty"):
        attrs.evolve(SHEETS["cpu"], peak_flops={})
    with pytest.raises(HardwareError, match="names a kind twice"):
        attrs.evolve(SHEETS["cpu"], peak_flops=[("bf16", 1), ("bf16", 2)])
    with pytest.raises(HardwareError, match=r"no figure 'memory_byte' \(did you mean 'memory_bytes'\?\)"):
        SHEETS["cpu"].source("memory_byte")


# The page.


def figure_text(sheet: Hardware, figure: str) -> str:
    value = getattr(sheet, figure)
    if figure == "peak_flops":
        return ", ".join(f"{name} {rate / 1e12:.6g}" for name, rate in value) + " TFLOP/s"
    if figure == "memory_bytes":
        return f"{value / 2**30:.2f} GiB"
    if figure == "devices_per_host":
        return "all" if value is None else str(value)
    if figure == "torus_dims":
        return str(value)
    return (
        f"{value * 1e6:.6g} µs" if figure.endswith("seconds") and "bytes" not in figure else f"{value / 1e9:.6g} GB/s"
    )


def tables() -> str:
    """The sheets as markdown: an overview, then every figure with its source."""
    columns = [figure for figure in FIGURES if figure not in ("peak_flops", "torus_dims")]
    lines = [
        f"| sheet | {' | '.join(f'`{name}`' for name in RATES)} |",
        f"|---|{'--:|' * len(RATES)}",
    ]
    for name, sheet in SHEETS.items():
        rates = dict(sheet.peak_flops)
        cells = [f"{rates[kind] / 1e12:.5g}" if kind in rates else "" for kind in RATES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        "",
        f"| sheet | {' | '.join(column.replace('_', ' ') for column in columns)} |",
        f"|---|{'--:|' * len(columns)}",
    ]
    lines += [
        f"| `{name}` | {' | '.join(figure_text(sheet, column) for column in columns)} |"
        for name, sheet in SHEETS.items()
    ]
    for name, sheet in SHEETS.items():
        lines += ["", f"### {sheet.name}: `{name}`", "", "| figure | value | source |", "|---|---|---|"]
        for figure in FIGURES:
            source = re.sub(r"https://[^\s,;]*[^\s,;:]", r"<\g<0>>", sheet.source(figure))
            lines.append(f"| `{figure}` | {figure_text(sheet, figure)} | {source} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with its tables written anew."""
    before, start, rest = page.partition("<!-- the sheets -->\n")
    _, end, after = rest.partition("\n<!-- the end of the sheets -->")
    assert start
    assert end
    return f"{before}{start}\n{tables()}\n{end}{after}"


def test_the_page_has_every_figure_with_its_source() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "python -m tests.analysis.machine.test_targets writes the tables anew"


def test_an_old_table_is_seen() -> None:
    page = PAGE.read_text()
    assert with_tables(page.replace("450 GB/s", "451 GB/s")) == page != page.replace("450 GB/s", "451 GB/s")


if __name__ == "__main__":
    Path(PAGE).write_text(with_tables(PAGE.read_text()))
