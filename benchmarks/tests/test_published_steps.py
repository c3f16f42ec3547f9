"""The benchmark of published steps rebuilds toys, reads rows of others, and holds its limits."""

import importlib
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from benchmarks.tests.smoke import BENCHMARKS, run
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.step_time import StepTime

ROW = """
[[rows]]
name = "mine"
target = "{target}"
model = "{model}"
mesh = "{mesh}"
batch = 1
length = 2048
remat = "{remat}"
"""
PROGRAM = """
HloModule gather, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8]) -> (f32[32], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %start = (f32[8], f32[32]) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true
  %y = f32[8]{0} negate(%x)
  %done = f32[32]{0} all-gather-done(%start)
  ROOT %result = (f32[32]{0}, f32[8]{0}) tuple(%done, %y)
}
"""
EVIDENCE = """seconds = 1.0
source = "me"
commit = "abc1234"
tokens = 524288
known = "printed"
"""
H200 = sr.Hardware.named("cuda:h200")
NAMES = [
    *("toy", "toy, eager", "toy, experts", "toy, shared experts", "toy, beside experts"),
    *("toy, compiled", "toy, adapters"),
    *("toy, parallel", "toy, windows", "toy, context"),
]
FIGURE = {"order": "", "chip": "tpu:v5e", "seconds": 60.0, "compiled": True, "kind": "dense"}


def test_smoke_run_rebuilds_toys_and_keeps_their_programs(tmp_path: Path) -> None:
    done = run("published_steps.py", "--smoke", "--json", "--texts", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [row["name"] for row in figures["rows"]] == NAMES
    assert all(row["predicted"] > 0 for row in figures["rows"])
    assert all(row["communication"] > 0 for row in figures["rows"] if row["devices"] > 1)
    assert all(row["memory"] > 0 and row["ratio"] is None for row in figures["rows"])
    assert (figures["summary"]["as modelled today"], figures["missed"]) == ({"rows": 0}, [])
    assert all(file.read_text().startswith("HloModule") for file in tmp_path.glob("*.txt"))
    again = run("published_steps.py", "--smoke", "--json", "--texts", str(tmp_path))
    times = [
        [(row["name"], row["predicted"], row["memory"]) for row in json.loads(text)["rows"]]
        for text in (again.stdout, done.stdout)
    ]
    assert times[0] == times[1]
    # PyTorch's FSDP gathers weights again for the backward pass, and here reduces gradients in float32.
    text = (tmp_path / "toy__eager.txt").read_text()
    gathers = re.findall(r'= .* all-gather(?:-start)?\(.*op_name="([^"]*)"', text)
    assert {"checkpoint" in name for name in gathers} == {False, True}
    reduced = re.findall(r"= (.*?) reduce-scatter(?:-start)?\(", text)
    assert [dtype[:3] for dtype in reduced] == ["f32", "f32"]  # of the layer, and of the weights outside of it
    # `fully_shard` reduces gradients once for three batches: vectors of two layers and of the weights outside of them.
    # In each batch a layer scatters sequences behind two matmuls, one of them again when it is recomputed, and the
    # gradients of five; the head has one.
    text = (tmp_path / "toy__compiled.txt").read_text()
    reduced = re.findall(r"= (.*?) reduce-scatter(?:-start)?\(", text)
    assert len(reduced) == 3 + 3 * (2 * 8 + 1)


def test_rows_that_cannot_be_rebuilt_are_all_listed(tmp_path: Path) -> None:
    good = {"target": "tpu:v5e:16x16", "model": "Llama2-70B", "mesh": "fsdp:256", "remat": "full"}
    wrong = [
        {"model": "17B"},
        {"mesh": "fsdp:128"},
        {"mesh": "expert:256"},
        {"remat": "some"},
        {"target": "tpu:v9:16x16"},
        {"target": "cuda:h100:96", "mesh": "fsdp:1,tensor:96"},
        {"target": "cuda:h100:8", "mesh": "fsdp:4,tensor:2"},
        {"target": "cuda:h100:8", "mesh": "fsdp:8"},
    ]
    rows = [ROW.format(**{**good, **change}).replace("mine", f"mine {index}") for index, change in enumerate(wrong)]
    rows[-2] += 'recipe = "torch"\n'
    rows[-1] += 'recipe = "once"\n'
    recipe = '[recipes.torch]\nfsdp = "FULL_SHARD"\nattention = "slow"\n'
    recipe += '[recipes.once]\nfsdp = "FULL_SHARD"\ngather_once = true\n'
    (tmp_path / "rows.toml").write_text("".join(rows) + recipe)
    done = run("published_steps.py", "--rows", str(tmp_path / "rows.toml"))
    assert done.returncode == 2
    for text in (
        "mine 0: unknown model '17B'; known are Llama2-7B, Llama2-13B",
        "mine 1: mesh {'data': 1, 'fsdp': 128, 'context': 1, 'tensor': 1} has 128 devices, target tpu:v5e:16x16 256",
        "mine 2: mesh 'expert:256' has 'expert:256', which is not the size of one of data, fsdp, context, tensor",
        "mine 3: unknown remat 'some'; known are none, full, minimal",
        "mine 4: no recipe 'tpu:v9' or 'tpu'",
        "mine 5: heads 64 is not divisible by 96",
        "mine 6: unknown attention 'slow'; known are flash2, flash1-triton",
        "mine 6: PyTorch's FSDP splits nothing over tensor without sequence_parallel",
        "mine 7: PyTorch's FSDP gathers no activations",
    ):
        assert text in done.stderr


def test_seconds_need_their_evidence(tmp_path: Path) -> None:
    row = ROW.format(target="tpu:v5e:16x16", model="Llama2-70B", mesh="fsdp:128,tensor:2", remat="full") + EVIDENCE
    cases = {
        row.replace('commit = "abc1234"\n', "").replace("tokens = 524288\n", ""): "seconds need commit, tokens",
        row.replace("524288", "524289"): "tokens are 524,289, but 256 sequences of 2,048 and 1 accum",
        row + 'batch_per = "data rank"\n': "but 128 sequences of 2,048 and 1 accumulations make 262,144",
        row + 'batch_per = "host"\n': "batch_per must be 'device' or 'data rank', got 'host'",
        row.replace("printed", "told"): "known must be 'printed' or 'derived' or 'guessed', got 'told'",
        row.replace("printed", "guessed"): "a batch that is guessed is for rows of an order alone",
        row.replace("printed", "derived"): "seconds that are derived have a formula with its commit",
        row + 'formula = "6ND"\n': "seconds that are derived have a formula with its commit",
        row + "first = 0.0\n": "first must be positive, got 0.0",
    }
    files = [tmp_path / f"{index}.toml" for index in range(len(cases))]
    for index, (file, text) in enumerate(zip(files, cases, strict=True)):
        file.write_text(text.replace("mine", f"mine {index}"))
    done = run("published_steps.py", "--rows", *map(str, files))
    assert done.returncode == 2
    for index, problem in enumerate(cases.values()):
        assert re.search(rf"^mine {index}: .*{re.escape(problem)}", done.stderr, re.MULTILINE), problem


def test_steps_with_other_tokens_are_compared_by_tokens_per_second() -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    times = {"a": (2.0, 2.0, 4), "b": (1.5, 1.2, 2), "c": (1.0, 1.0, 1)}
    figures = [
        {**FIGURE, "order": "R", "name": name, "measured": measured, "predicted": modelled, "tokens": tokens}
        for name, (measured, modelled, tokens) in times.items()
    ]
    assert names["missed"](figures) == []
    assert names["limits_of"](figures)[-1] == ("R: predicted a < b < c, measured a < b < c", True)
    figures[1]["predicted"] = 2.2
    assert names["missed"](figures) == ["R: predicted a < c < b, measured a < b < c"]


def test_peaks_and_first_predictions_are_held_apart() -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    figures = [
        {**FIGURE, "name": str(index), "ratio": ratio, "first ratio": first, "memory ratio": memory}
        for index, (ratio, first, memory) in enumerate([(1.0, 0.9, 1.2), (1.02, None, None), (0.97, 1.2, 0.95)])
    ]
    assert names["missed"](figures) == ["0: 1.20 of the printed peak, at most 10% off"]
    first = names["summary"](figures, "first ratio")
    assert (first["rows"], round(first["median"], 3), round(first["mean signed"], 3)) == (2, 0.15, 0.05)


def test_the_input_of_attention_is_gathered_once_if_a_recipe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, decoders = (importlib.import_module(f"published.{name}") for name in ("rows", "decoder"))
    (toy,) = (row for row in rows.read_rows([BENCHMARKS / "published" / "smoke.toml"]) if row.name == "toy")
    weights = decoders.weight_shapes(toy.dims, toy.recipe, 8)
    tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32)

    def constraints(gather_once: bool) -> int:
        recipe = attrs.evolve(toy.recipe, gather_once=gather_once)
        decoder = decoders.Decoder(toy.dims, recipe, "cpu", "full")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2, 1, 2), rows.AXES)):
            return str(jax.make_jaxpr(decoder.loss)(weights, tokens, tokens)).count("sharding_constraint")

    assert constraints(gather_once=True) == constraints(gather_once=False) + 1


def test_eager_kernels_have_the_gradients_of_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    eager, fsdp = (importlib.import_module(f"published.{name}") for name in ("eager", "fsdp"))
    x, weight, bias = (jnp.sin(jnp.arange(1.0, size + 1)) for size in (24, 8, 8))

    def plain(x: Any, weight: Any, bias: Any) -> Any:
        y = x - x.mean(-1, keepdims=True)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * weight + bias) ** 2

    def through(norm: Any, x: Any, *weights: Any) -> Any:
        return jnp.sum(norm(x.reshape(3, 8), *weights))

    arguments = jax.grad(through, (1, 2, 3))(plain, x, weight, bias)
    of_kernel = jax.grad(through, (1, 2, 3))(lambda *xs: eager.layer_norm(*xs) ** 2, x, weight, bias)
    for ours, theirs in zip(of_kernel, arguments, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    product = jax.grad(lambda x: jnp.sum(eager.kernel(jnp.multiply, x, x)))(x)
    np.testing.assert_allclose(product, 2 * x)

    def loss(shards: Any, batch: Any) -> Any:
        whole = fsdp.gathered(shards, "float32", lambda x: x)
        return jnp.sum(whole["a"].astype(jnp.float32) * batch) + jnp.sum(whole["b"].astype(jnp.float32))

    shards, batch = {"a": x.reshape(4, 6), "b": weight.reshape(4, 2)}, jnp.arange(96.0).reshape(4, 24)
    step = jax.vmap(jax.vmap(jax.grad(loss), axis_name="fsdp"), axis_name="data")
    of_shards = step(*jax.tree.map(lambda x: x[None], (shards, batch)))
    np.testing.assert_allclose(of_shards["a"][0], batch.mean(0).reshape(4, 6), rtol=1e-2)
    np.testing.assert_allclose(of_shards["b"][0], jnp.ones((4, 2)))


def test_sequence_parallel_steps_have_the_gradients_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, decoders = (importlib.import_module(f"published.{name}") for name in ("rows", "decoder"))
    (toy,) = (row for row in rows.read_rows([BENCHMARKS / "published" / "smoke.toml"]) if row.name == "toy, compiled")
    split = attrs.evolve(toy.recipe, weight_dtype="float32")
    plain = {"fsdp": "", "sequence_parallel": False, "eager": False, "compiled": False, "constraints": False}
    whole_recipe = attrs.evolve(split, **plain, loss_dtype="", accumulations=1)
    shapes = decoders.weight_shapes(toy.dims, whole_recipe, 32)
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    whole, where = jax.tree.unflatten(structure, weights), decoders.weight_specs(toy.dims, split, 32)

    def shards(weight: Any, spec: Any, split_spec: Any) -> Any:
        """The vectors of two times two devices, by `fsdp` and `tensor`."""
        parts = jnp.split(weight, 2, tuple(spec).index("tensor")) if "tensor" in (split_spec[0] or ()) else [weight] * 2
        return jnp.stack([part.reshape(2, -1) for part in parts], 1)

    def of_devices(tree: Any) -> Any:
        return jax.tree.map(shards, tree, decoders.weight_specs(toy.dims, whole_recipe, 32), where)

    batches = jax.random.randint(jax.random.key(1), (2, 3, 4, 32), 0, 256)
    run = jax.vmap(decoders.Decoder(toy.dims, split, "cpu", "full")._reduced_once, (0, None, None), axis_name="tensor")
    run = jax.vmap(jax.vmap(run, (0, 1, 1), axis_name="fsdp"), (None, 1, 1), axis_name="data")
    ours = jax.jit(run)(of_devices(whole), *batches.reshape(2, 3, 2, 2, 1, 32))
    model = jax.jit(jax.value_and_grad(decoders.Decoder(toy.dims, whole_recipe, "cpu", "full").loss))
    theirs = [model(whole, *batch) for batch in zip(*batches, strict=True)]
    loss, gradients = jax.tree.map(lambda *parts: sum(parts), *theirs)
    np.testing.assert_allclose(ours[0].mean(), loss, rtol=1e-3)
    for one, other in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(of_devices(gradients)), strict=True):
        np.testing.assert_allclose(one[1], other, atol=0.05 * float(jnp.abs(other).max()))


def test_adapters_alone_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, decoders, adapters = (
        importlib.import_module(f"published.{name}") for name in ("rows", "decoder", "adapters")
    )
    (toy,) = (row for row in rows.read_rows([BENCHMARKS / "published" / "smoke.toml"]) if row.name == "toy, adapters")
    shapes = decoders.weight_shapes(toy.dims, toy.recipe, 32)
    weights = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), shapes)
    trained, frozen = adapters.parted(weights)
    assert jax.tree.structure(adapters.merged(trained, frozen)) == jax.tree.structure(weights)
    assert {leaf.shape for leaf in jax.tree.leaves(trained)} >= {(64, 4), (4, 8, 16), (4, 16, 4), (4, 2, 128)}
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), decoders.state_shapes(trained, toy.recipe))
    tokens = jnp.zeros((2, 1, 32), jnp.int32)
    step = jax.jit(decoders.Decoder(toy.dims, toy.recipe, "cpu", "none").step)
    new, _, _ = step(weights, state, tokens, tokens)
    assert all(map(np.array_equal, jax.tree.leaves(adapters.parted(new)[1]), jax.tree.leaves(frozen)))
    x, weight = jnp.sin(jnp.arange(24.0)).reshape(1, 3, 8), {"up": jnp.ones((8, 4))}
    weight |= {"up_lora_a": jnp.full((8, 2), 0.5), "up_lora_b": jnp.full((2, 4), 0.25)}
    result = adapters.adapted("bse,em->bsm", x, weight, "up", drops=False)
    np.testing.assert_allclose(result, x @ (weight["up"] + weight["up_lora_a"] @ weight["up_lora_b"]), rtol=1e-6)


def test_machines_differ_from_their_sheets_with_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = importlib.import_module("published.rows")
    row = ROW.format(target="cuda:h100:16", model="Llama2-7B", mesh="data:2,fsdp:8", remat="full")
    recipes = """recipe = "slower"
[recipes.slow]
network_bytes_per_second = 1e9
machine = "me"
[recipes.slower]
like = "slow"
devices_per_host = 4
"""
    (tmp_path / "rows.toml").write_text(row + recipes)
    (slow,) = rows.read_rows([tmp_path / "rows.toml"])
    assert slow.hardware.network_bytes_per_second == 1e9
    assert attrs.evolve(slow, recipe=rows.Recipe()).hardware.network_bytes_per_second == 50e9
    for text, problem in [
        (
            (row + recipes).replace('machine = "me"', 'machine = ""'),
            "a network, hosts and links of pairs need `machine`",
        ),
        ((row + recipes).replace('like = "slow"', 'like = "fast"'), "recipe 'slower' is like 'fast'; known are"),
    ]:
        (tmp_path / "rows.toml").write_text(text)
        with pytest.raises(rows.RowError, match=problem):
            rows.read_rows([tmp_path / "rows.toml"])


def test_programs_wait_where_pytorch_does_and_run_on_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rebuild = importlib.import_module("published.rebuild")
    program = read_program(PROGRAM)
    (gather,) = find_collectives(program, sr.mesh_shape("data:2,tensor:4"))
    waiting = rebuild._waiting(program, [gather])
    orders = [[each.name for each in one.entry_computation.instructions] for one in (program, waiting)]
    assert orders == [["x", "start", "y", "done", "result"], ["x", "start", "done", "y", "result"]]
    devices = np.array([SimpleNamespace(id=index) for index in range(8)]).reshape(2, 4)
    mesh = SimpleNamespace(axis_names=("data", "tensor"), devices=devices)
    counts = [rebuild._on_hosts(gather, per_host, mesh).host_count for per_host in (4, 2)]
    assert (gather.axes, counts) == (("tensor",), [1, 2])
    # Two GPUs with a third of the links take three times as long where a table does not say that a switch is slower.
    sheet, large = attrs.evolve(H200, collective_times=()), attrs.evolve(gather, group_size=2, wire_bytes=2**30)
    assert 2.9 < rebuild._over_pairs(large, 150e9, sheet).wire_bytes / 2**30 < 3
    assert 1 < rebuild._over_pairs(large, 150e9, H200).wire_bytes / 2**30 < 2.9
    assert rebuild._over_pairs(attrs.evolve(large, group_size=4), 150e9, sheet).wire_bytes == 2**30


def test_time_grows_by_as_much_for_each_layer_that_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, rebuild = (importlib.import_module(f"published.{name}") for name in ("rows", "rebuild"))
    row = ROW.format(target="cuda:h100:8", model="MPT-7B", mesh="fsdp:8", remat="none")
    row += 'recipe = "llm-foundry"\nlayers_compiled = [4, 8]\n'
    (tmp_path / "rows.toml").write_text(row)
    (mine,) = rows.read_rows([tmp_path / "rows.toml"])
    asked = []

    def shallow(row: Any, texts: None) -> Any:
        asked.append(row.name)
        return rebuild.Result(row, StepTime(0.1 + row.dims.layers, 2.0 * row.dims.layers, 0, 0.5), 3.0, True, 7)

    monkeypatch.setattr(rebuild, "_rebuild", shallow)
    result = rebuild.rebuild(mine)
    assert asked == ["mine, 4 layers", "mine, 8 layers"]
    np.testing.assert_allclose(attrs.astuple(result.time), (32.1, 64.0, 0, 0.5, 0))
    assert (result.compile_seconds, result.is_compiled, result.peak_bytes) == (6.0, True, 0)
    (tmp_path / "rows.toml").write_text(row.replace("[4, 8]", "[8, 32]"))
    with pytest.raises(rows.RowError, match="layers_compiled must be two growing numbers below 32, got"):
        rows.read_rows([tmp_path / "rows.toml"])


def test_kernels_of_pytorch_compute_what_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    eager, decoders = (importlib.import_module(f"published.{name}") for name in ("eager", "decoder"))
    x = jnp.sin(jnp.arange(96.0)).reshape(2, 3, 2, 8)
    np.testing.assert_allclose(eager.rotary(x), decoders._rotary(x), atol=1e-5)
    logits, targets = x.reshape(4, 24), jnp.array([0, 5, 23, 7])
    losses = jax.value_and_grad(lambda logits: jnp.sum(eager.cross_entropy(logits, targets)))(logits)
    direct = jax.value_and_grad(lambda logits: -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(4), targets]))(logits)
    for one, other in zip(losses, direct, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    kept = eager.dropout(jnp.ones((8, 1024)))
    assert set(np.unique(kept)) == {0.0, 1.125}
    assert 0.11 < float((kept == 0).mean()) < 0.14


def test_published_rows_are_read() -> None:
    done = run("published_steps.py", "--row", "99")
    assert done.returncode == 2
    assert "no row 99; the rows are 1; 4; 6; 13; 15, 1 slice; 15, 2 slices" in done.stderr
    named = runpy.run_path(str(BENCHMARKS / "published_steps.py"))["is_named"]
    assert [name for name in ("4", "44", "4, again") if named(name, "4")] == ["4", "4, again"]


def test_tensors_are_kept_where_custom_remat_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    recipe = importlib.import_module("published.recipe")
    with pytest.raises(ValueError, match=r"unknown place 'disk'; known are remat, device, offload"):
        recipe.policy_of("custom out_proj=disk")
    with pytest.raises(ValueError, match=r"unknown remat 'some'; known are none, full"):
        recipe.policy_of("some")

    def loss(x: Any) -> Any:
        for name in "abc":
            x = jax.ad_checkpoint.checkpoint_name(jnp.sin(x), name)
        return jnp.sum(jnp.sin(x))

    def gradient(remat: str) -> str:
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=recipe.policy_of(remat))))(jnp.ones(8)))

    assert "f32<host>[8]" in gradient("custom a=device b=offload c=remat")
    assert "<host>" not in gradient("custom a=device b=remat")


def test_devices_of_a_sequence_see_as_much_as_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    attention = importlib.import_module("published.attention")
    length, devices = 64, 4
    mask = attention._BalancedMask(length, devices)
    causal = np.tril(np.ones((length, length), bool))
    np.testing.assert_array_equal(mask[:, :], attention.balanced(causal, devices))
    np.testing.assert_array_equal(mask[:8, 32:40], np.zeros((8, 8), bool))
    assert {part.sum() for part in np.split(mask[:, :], devices)} == {length * (length + 1) // 2 // devices}
    assert (attention.causal_share(2, 2048), attention.causal_share(3, 2048)) == (10 / 16, 6 / 8)
    rows = jnp.arange(length)
    np.testing.assert_array_equal(attention._contiguous(attention.balanced(rows, devices), devices, 0), rows)


def test_tiles_and_periods_compute_what_whole_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, decoders = (importlib.import_module(f"published.{name}") for name in ("rows", "decoder"))
    smoke = rows.read_rows([BENCHMARKS / "published" / "smoke.toml"])
    (row,) = (row for row in smoke if row.name == "toy, windows")
    tokens = jnp.arange(64).reshape(2, 32)

    def loss(**changes: Any) -> Any:
        recipe = attrs.evolve(row.recipe, constraints=False, **changes)
        shapes = decoders.weight_shapes(row.dims, attrs.evolve(recipe, scan=True), 32)
        keys = iter(jax.random.split(jax.random.key(0), 99))
        weights = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 8, shapes)
        if not recipe.scan:
            stacks = weights["layers"]
            weights["layers"] = [
                jax.tree.map(lambda leaf, index=index: leaf[index], stack) for index in range(2) for stack in stacks
            ]
        return decoders.Decoder(row.dims, recipe, "cpu", "full").loss(weights, tokens, tokens)

    whole = loss(vocab_tiles=1)
    np.testing.assert_allclose([loss(), loss(scan=False)], [whole, whole], rtol=1e-2)


@pytest.mark.parametrize(
    ("ratios", "limits"),
    [
        ([1.04, 0.97, 1.02], []),
        ([1.07, 0.93, 1.02], ["median"]),
        ([1.01, 1.01, 1.21], ["90th", "worst"]),
        ([1.1, 0.9, 1.1], ["median", "median"]),
    ],
)
def test_limits_hold_for_the_median_the_tail_and_each_chip(ratios: list[float], limits: list[str]) -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    figures = [{**FIGURE, "name": str(index), "ratio": ratio} for index, ratio in enumerate(ratios)]
    assert [line.split()[0] for line in names["missed"](figures)] == limits


def test_orders_are_compared_within_their_set() -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    times = {"a": (1.0, 1.5), "b": (2.0, 1.4), "c": (3.0, 2.0)}
    figures = [
        {**FIGURE, "order": "R", "name": name, "ratio": 0.5, "measured": measured, "predicted": predicted}
        for name, (measured, predicted) in times.items()
    ]
    assert names["missed"](figures) == ["R: predicted b < a < c, measured a < b < c"]
    ratios = [{**figure, "order": "R4"} for figure in (figures[0], figures[2])]
    (ratio,) = names["missed"](ratios)
    assert ratio == "c takes 1.33 x a, machines 3.00 x, at most 5% apart"
    assert names["missed"]([ratios[0], {**ratios[1], "predicted": 4.4}]) == []
    late = {**FIGURE, "name": "late", "ratio": 1.0, "seconds": 301.0}
    assert names["missed"]([late]) == ["late: rebuilt in 301 s, at most 300 s"]
    assert names["missed"]([{**late, "compiled": False}]) == []
