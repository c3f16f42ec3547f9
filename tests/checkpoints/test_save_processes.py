"""By behaviour: several processes save together, one is killed, and others restore and go on."""

import json
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoints.states import State, facts, like_state, make_state, place
from tests.forks import start_fork
from tests.house.source import REPOSITORY
from tests.mesh.cluster import PRELUDE, free_port, run_processes
from tests.mesh.test_processes import printed_lines
from tests.quick import QUICK_FLAGS

EACH_FORMAT = pytest.mark.parametrize(("name", "processes"), [("safetensors", 4), ("orbax", 2), ("equinox", 4)])
TREES = """
from tests.checkpoints.states import facts, like_state, make_state, place
def state_on(mesh, seed=0, epoch=3):
    return place(make_state(seed, epoch), mesh)
def same(left, right):
    return facts(left) == facts(right)
"""


def run(code: str, processes: int, **options: Any) -> list[list[str]]:
    """Runs code with the functions of `TREES`, and returns what each process printed."""
    devices = 8 // processes
    return printed_lines(run_processes(TREES + textwrap.dedent(code), processes=processes, devices=devices, **options))


def load(name: str, path: Path, mesh: jax.sharding.Mesh) -> State:
    return getattr(sr, f"load_{name}")(path, like_state(), P(), mesh)


@pytest.mark.slow
@EACH_FORMAT
def test_what_processes_save_comes_back_in_another_number_of_them(name: str, processes: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run(
        f"""
        for seed in (5, 0):  # the second save replaces the first
            state = state_on(sr.create_mesh("data:4,model:2"), seed)
            sr.save_{name}({str(path)!r}, state, timeout=60)
            restored = sr.load_{name}({str(path)!r}, like_state(), P(), sr.create_mesh("data:8"))
            assert same(restored, state) and restored.epoch == 3
        """,
        processes,
    )
    state = make_state()
    assert facts(load(name, path, sr.create_mesh("data:8"))) == facts(state)
    lines = run(
        f"""
        restored = sr.load_{name}({str(path)!r}, like_state(), P(), sr.create_mesh("data:8"))
        print(same(restored, make_state()))
        """,
        6 - processes,
    )
    assert lines == [["True"]] * (6 - processes)
    # One process writes the same files, byte by byte, where the format leaves no choice.
    getattr(sr, f"save_{name}")(tmp_path / "alone", place(state, sr.create_mesh("data:4,model:2")))
    if name == "equinox":
        assert (tmp_path / "alone.eqx").read_bytes() == (tmp_path / "saved.eqx").read_bytes()
    if name == "safetensors":
        tensors = [
            b"".join(file.read_bytes() for file in sorted((tmp_path / folder).glob("*.safetensors")))
            for folder in ("alone", "saved")
        ]
        assert tensors[0] == tensors[1]


@pytest.mark.slow
def test_arrays_of_one_process_and_of_all_are_saved_once(tmp_path: Path) -> None:
    run(
        f"""
        last = jax.sharding.Mesh(np.array(jax.local_devices() if process == processes - 1 else
                                 [d for d in jax.devices() if d.process_index == processes - 1]), ("data",))
        whole = np.arange(64.0, dtype=np.float32).reshape(16, 4)
        tree = {{
            "last": sr.filter_shard(whole, P("data"), last),
            "all": sr.filter_shard(whole, P("data"), sr.create_mesh("data:8")),
            "columns": sr.filter_shard(whole.T.copy(), P(None, "data"), sr.create_mesh("data:8")),
            "local": jnp.asarray(whole),
            "numpy": whole,
        }}
        sr.save_safetensors({str(tmp_path)!r}, tree, max_file_bytes=300, timeout=60)
        """,
        4,
    )
    whole = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    like = {"last": whole, "all": whole, "columns": whole.T, "local": whole, "numpy": whole}
    shapes = {name: jax.ShapeDtypeStruct(value.shape, np.float32) for name, value in like.items()}
    restored = sr.load_safetensors(tmp_path, shapes, P(), sr.create_mesh("data:8"))
    for name, value in like.items():
        np.testing.assert_array_equal(restored[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["safetensors", "equinox"])
def test_each_process_checks_what_it_reads(name: str, tmp_path: Path) -> None:
    # Rows of 6000 bytes: blocks end within rows, and four processes have a part of each row.
    whole = np.random.default_rng(0).standard_normal((40, 1500)).astype(np.float32)
    path = tmp_path / "saved"
    getattr(sr, f"save_{name}")(path, {"w": whole})
    code = f"""
        whole = np.random.default_rng(0).standard_normal((40, 1500)).astype(np.float32)
        placed = sr.filter_shard({{"w": whole}}, P(None, ("data", "model")), sr.create_mesh("data:4,model:3"))
        sr.save_{name}({str(tmp_path / "together")!r}, placed, timeout=60)
        like = {{"w": jax.ShapeDtypeStruct(whole.shape, np.float32)}}
        try:
            loaded = sr.load_{name}({str(path)!r}, like, P(None, ("data", "model")), sr.create_mesh("data:4,model:3"))
            for shard in loaded["w"].addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])
        except sr.errors.CheckpointError as error:
            assert "is damaged" in str(error), error
            print("damaged")
    """

    def files(folder: Path) -> list[Path]:
        return [folder.with_suffix(".eqx")] if name == "equinox" else sorted(folder.glob("*.safetensors"))

    def outputs() -> list[list[str]]:
        return printed_lines(run_processes(textwrap.dedent(code), processes=4, devices=3))

    assert outputs() == [[]] * 4
    assert [file.read_bytes() for file in files(path)] == [file.read_bytes() for file in files(tmp_path / "together")]
    (file,) = files(path)
    data = bytearray(file.read_bytes())
    data[data.index(whole.tobytes()) + 20 * 6000 + 4500 + 700] ^= 1  # in columns of the last process
    file.write_bytes(data)
    lines = outputs()
    assert lines[3] == ["damaged"]


@pytest.mark.slow
@EACH_FORMAT
def test_a_failure_on_one_process_is_an_error_on_all(name: str, processes: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    getattr(sr, f"save_{name}")(path, make_state())
    lines = run(
        f"""
        import os
        from shardrules.checkpoints import commit
        def attempt(state):
            try:
                sr.save_{name}({str(path)!r}, state, timeout=60)
            except sr.errors.ShardRulesError as error:
                print(type(error).__name__, str(error).splitlines()[0][:60], "No space" in str(error))
        mesh = sr.create_mesh("data:8")
        attempt({{"w": np.ones(3 + process)}})
        attempt({{"step": process}})
        attempt({{"w": jax.ShapeDtypeStruct((3,), np.float32)}} if process else {{"w": np.ones(3)}})
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        if process == 1:
            if {name!r} == "orbax":
                agree = commit.Saving.agree
                commit.Saving.agree = lambda self, step, work, **options: agree(
                    self, step, full if step == "the files" else work)
            else:
                os.fsync = full
        attempt(state_on(mesh))
        """,
        processes,
    )
    for process, printed in enumerate(lines):
        assert [line.split()[0] for line in printed[:2]] == ["DisagreementError"] * 2
        assert printed[2].startswith(f"CheckpointError save_{name}: ")
        assert printed[3].startswith(f"CheckpointError save_{name}: ")
        assert printed[3].endswith("True"), process
    assert facts(load(name, path, sr.create_mesh("data:8"))) == facts(make_state())


SAVE_FOR_EVER = """
import itertools
mesh = sr.create_mesh("data:4,model:2")
states = [state_on(mesh, seed, seed) for seed in range(3)]
for turn in itertools.count():
    sr.save_{name}({path!r}, states[turn % 3], timeout=60)
    if process == 0:
        print(turn)
"""


@pytest.mark.slow
@EACH_FORMAT
def test_a_killed_process_leaves_a_whole_checkpoint(name: str, processes: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for delay in (0.013, 0.05):
        kill_while_saving(SAVE_FOR_EVER.format(name=name, path=str(path)), processes, delay)
        restored = load(name, path, sr.create_mesh("data:2,model:4"))
        assert restored.epoch in (0, 1, 2)
        assert facts(restored) == facts(make_state(restored.epoch, restored.epoch))
    # What the killed processes left does not keep the next ones from saving.
    run(f"sr.save_{name}({str(path)!r}, state_on(sr.create_mesh('data:8'), 7, 7), timeout=60)", 6 - processes)
    assert load(name, path, sr.create_mesh("data:8")).epoch == 7
    assert not [file for file in tmp_path.rglob(".*") if ".saving" in file.name]


def kill_while_saving(code: str, processes: int, delay: float) -> None:
    """Runs code in processes, and kills all of them some time after the first prints its fifth line."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes} {QUICK_FLAGS}",
        "PYTHONPATH": str(REPOSITORY),
    }
    port = str(free_port())
    reader, writer = os.pipe()
    with os.fdopen(reader) as output, open(os.devnull, "w") as nowhere:
        children = [
            start_fork(
                PRELUDE + TREES + code,
                *(str(process), str(processes), port),
                out=writer if process == 0 else nowhere.fileno(),
                err=nowhere.fileno(),
                env=environment,
            )
            for process in range(processes)
        ]
        os.close(writer)
        try:
            for _ in range(5):
                assert output.readline()
            time.sleep(delay)
        finally:
            for child in reversed(children):
                child.kill()
            for child in children:
                child.wait()


TRAIN = """
import json
import equinox as eqx, optax
mesh = sr.create_mesh({mesh!r})
optim = optax.adamw(1e-2)
columns = sr.DimShardingRule("model", 0, ignore_ndim_error=True)
rules = sr.FittedShardingRule(columns | sr.FSDPShardingRule("data", min_size_mb=0))
def make():
    model = eqx.nn.MLP(8, 8, 32, 2, key=jax.random.key(0))
    optimizer = optim.init(eqx.filter(model, eqx.is_array))
    return {{"model": model, "optimizer": optimizer, "key": jax.random.key(1), "step": 0}}
def batches(start):
    index, count = sr.meshes.batch_part("data", mesh)
    for step in range(start, 6):
        rows = np.random.default_rng(step).standard_normal((16, 8), np.float32)
        yield np.split(rows, count)[index]
@sr.filter_jit(mesh=mesh, in_shardings=(rules, rules, None, P("data")), out_shardings=(rules, rules, None, P()))
def update(model, optimizer, key, x):
    key, noise_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, x.shape)
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(x + 0.1 * noise) - x) ** 2)
    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, optimizer = optim.update(grads, optimizer, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), optimizer, key, loss
if {restores}:
    state = sr.load_{name}({path!r}, eqx.filter_eval_shape(make) | {{"step": 0}}, rules, mesh)
else:
    state = sr.filter_init(make, rules, mesh)() | {{"step": 0}}
losses = []
with sr.place_batches(batches(state["step"]), P("data"), mesh, timeout=60) as placed:
    for x in placed:
        model, optimizer, key, loss = update(state["model"], state["optimizer"], state["key"], x)
        state = {{"model": model, "optimizer": optimizer, "key": key, "step": state["step"] + 1}}
        losses.append(float(loss))
        if state["step"] == 3 and not {restores}:
            sr.save_{name}({path!r}, state, timeout=60)
            if {dies}:
                os.kill(os.getpid(), 9)
print(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), [("safetensors", 2, 4), ("orbax", 4, 2), ("equinox", 4, 2)])
def test_training_continues_with_equal_losses(name: str, before: int, after: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")

    def code(mesh: str, *, restores: bool = False, dies: bool = False, path: str = path) -> str:
        return TRAIN.format(mesh=mesh, name=name, path=path, restores=restores, dies=dies)

    ((expected,), *_) = run(code("data:4,model:2", path=f"{path}2"), before)
    ended = run_processes(code("data:4,model:2", dies=True), processes=before, devices=8 // before)
    # JAX ends those that notice the death of the first before they kill themselves.
    assert ended[0].code == -signal.SIGKILL
    assert all(child.code != 0 for child in ended)
    lines = run(code("data:8,model:1", restores=True), after)
    assert len(dict.fromkeys(printed[0] for printed in lines)) == 1
    losses = json.loads(lines[0][0])
    np.testing.assert_allclose(losses, json.loads(expected)[3:], rtol=1e-5)
