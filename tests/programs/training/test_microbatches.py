"""Gradients by microbatches: equal to those of the whole batch, or refused with what is in the way."""

import re
from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MicrobatchError
from shardrules.programs.jaxprs.walk import equations, without_dead_code
from shardrules.programs.machine.targets import Target
from shardrules.programs.training.loss import trace_loss
from shardrules.programs.training.microbatches import accumulated, forward_program
from tests.programs.training.checks import operands

STRUCT = jax.ShapeDtypeStruct
BATCH, LENGTH, WIDTH, CLASSES = 8, 6, 4, 3


def real(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def integers(*shape: int, below: int = CLASSES) -> jax.Array:
    return jnp.asarray(np.random.default_rng([1, *shape]).integers(0, below, shape), jnp.int32)


@final
@attrs.frozen
class Loss:
    """A loss with a model and a batch."""

    name: str
    fn: Callable[[Any, Any], Any]
    model: Any
    batch: Any


def mlp() -> dict[str, jax.Array]:
    return {"up": real(WIDTH, 8), "down": real(8, CLASSES)}


def forward(model: Any, x: Any) -> Any:
    return jnp.tanh(x @ model["up"]) @ model["down"]


def squares(model: Any, batch: Any) -> Any:
    return jnp.sum((forward(model, batch["x"]) - batch["y"]) ** 2, -1)


def masked_mean(model: Any, batch: Any) -> Any:
    return jnp.sum(squares(model, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def masked_weights(model: Any, batch: Any) -> Any:
    return jnp.sum(squares(model, batch) * (batch["mask"] / jnp.sum(batch["mask"])))


def regularized(model: Any, batch: Any) -> Any:
    norm = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model))
    return jnp.mean(squares(model, batch)) + 0.3 * jnp.sum(squares(model, batch)) + 0.1 * norm


def trained_weight(model: Any, batch: Any) -> Any:
    return jnp.exp(-model["scale"]) * jnp.mean(squares(model, batch)) + model["scale"]


def dropout_of_one_key(model: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["up"])
    hidden = jnp.where(jax.random.bernoulli(batch["key"], 0.5, hidden.shape), hidden / 0.5, 0)
    return jnp.mean((hidden @ model["down"] - batch["y"]) ** 2)


def dropout_of_a_key_each(model: Any, batch: Any) -> Any:
    keys = jax.random.split(batch["key"], len(batch["x"]))
    dropout = eqx.nn.Dropout(0.5)
    predicted = jax.vmap(lambda x, key: dropout(forward(model, x), key=key))(batch["x"], keys)
    return jnp.mean((predicted - batch["y"]) ** 2)


def dropout_in_layers(model: Any, batch: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        x, key = carry
        key, layer_key = jax.random.split(key)
        x = jnp.tanh(x @ w)
        return (jnp.where(jax.random.bernoulli(layer_key, 0.7, x.shape), x, 0), key), None

    (x, key), _ = jax.lax.scan(jax.checkpoint(layer), (batch["x"], batch["key"]), model["layers"])
    return jnp.mean((x + jax.random.normal(key, x.shape)) ** 2)


def labels_by_index(model: Any, batch: Any) -> Any:
    logs = jax.nn.log_softmax(forward(model, batch["x"]))
    return -jnp.mean(logs[jnp.arange(len(logs)), batch["labels"]])


def labels_of_all_tokens(model: Any, batch: Any) -> Any:
    logs = jax.nn.log_softmax(model["words"][batch["tokens"]].reshape(-1, WIDTH))
    return -jnp.mean(logs[jnp.arange(len(logs)), batch["tokens"].reshape(-1) % WIDTH])


def labels_of_optax(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(forward(model, batch["x"]), batch["labels"]).mean()


def recurrent(model: Any, batch: Any) -> Any:
    cell = model["cell"]

    def step(hidden: Any, x: Any) -> Any:
        hidden = jax.vmap(cell)(x, hidden)
        return hidden, hidden[:, 0]

    _, outputs = jax.lax.scan(step, jnp.zeros((len(batch["rows"]), 5)), batch["rows"].swapaxes(0, 1))
    return jnp.mean(outputs**2)


def tokens_with_positions(model: Any, batch: Any) -> Any:
    x = model["words"][batch["tokens"]] + model["positions"][None]
    start = jnp.broadcast_to(model["start"], (len(x), 1, WIDTH))
    x = jnp.concatenate([start, x], 1)
    x = jax.vmap(lambda row: jax.nn.softmax(row @ row.T) @ row)(x)
    return jnp.mean(jax.nn.logsumexp(x @ model["words"].T, -1))


def convolutional(model: Any, batch: Any) -> Any:
    def logits(image: Any) -> Any:
        x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(model["conv"](image)))
        return model["head"](jnp.mean(x, (1, 2)))

    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(logits)(batch["images"]), batch["labels"]).mean()


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


attention = jax.custom_vjp(plain_attention)
attention.defvjp(
    lambda q, k, v: (attention(q, k, v), (q, k, v)),
    lambda saved, cotangent: jax.vjp(plain_attention, *saved)[1](cotangent),
)


def attention_with_its_derivative(model: Any, batch: Any) -> Any:
    x = batch["rows"] @ model["w"]
    # The broadcast is missing in a program for one example.
    return jnp.mean(attention(x, 2 * x, x + 1) ** 2) + jnp.mean((model["w"][:1] - batch["rows"][:, 0]) ** 2)


def each_example_in_a_loop(model: Any, batch: Any) -> Any:
    def add(total: Any, example: Any) -> Any:
        x, y = example
        return total + jnp.sum((forward(model, x) - y) ** 2), forward(model, x)

    total, outputs = jax.lax.scan(add, jnp.float32(0), (batch["x"], batch["y"]))
    return (total + jnp.sum(jax.lax.map(lambda x: x**2, outputs))) / len(outputs)


def sorted_labels(model: Any, batch: Any) -> Any:
    ranks = jnp.argsort(batch["labels"]).astype(jnp.float32)
    centered = batch["x"] - jnp.mean(batch["x"], 0)
    return jnp.mean(forward(model, centered) * ranks[:, None])


def mixed_data(model: Any, batch: Any) -> Any:
    order = jax.random.permutation(batch["key"], len(batch["x"]))
    x = 0.7 * batch["x"] + 0.3 * jnp.roll(batch["x"], 1, 0) + batch["x"][order]
    return jnp.mean((forward(model, x) - batch["y"]) ** 2)


def rows() -> dict[str, Any]:
    return {
        "x": real(BATCH, WIDTH),
        "y": real(BATCH, CLASSES),
        "mask": jnp.asarray([1.0, 0, 1, 1, 0, 0, 0, 1]),
        "labels": integers(BATCH),
        "key": jax.random.key(0),
    }


LOSSES = (
    *(
        Loss(fn.__name__, fn, mlp(), rows())
        for fn in (
            *(masked_mean, masked_weights, regularized, dropout_of_one_key, dropout_of_a_key_each, labels_by_index),
            *(labels_of_optax, each_example_in_a_loop, sorted_labels, mixed_data),
        )
    ),
    Loss("sum", lambda model, batch: jnp.sum(squares(model, batch)), mlp(), rows()),
    Loss("trained_weight", trained_weight, {**mlp(), "scale": jnp.float32(0.3)}, rows()),
    Loss("dropout_in_layers", dropout_in_layers, {"layers": real(2, WIDTH, WIDTH)}, rows()),
    Loss(
        "recurrent",
        recurrent,
        {"cell": eqx.nn.GRUCell(WIDTH, 5, key=jax.random.key(0))},
        {"rows": real(BATCH, 3, WIDTH)},
    ),
    Loss(
        "tokens_with_positions",
        tokens_with_positions,
        {"words": real(9, WIDTH), "positions": real(LENGTH, WIDTH), "start": real(WIDTH)},
        {"tokens": integers(BATCH, LENGTH, below=9)},
    ),
    Loss(
        "labels_of_all_tokens",
        labels_of_all_tokens,
        {"words": real(9, WIDTH)},
        {"tokens": integers(BATCH, LENGTH, below=9)},
    ),
    Loss(
        "convolutional",
        convolutional,
        {
            "conv": eqx.nn.Conv2d(2, WIDTH, 3, groups=2, key=jax.random.key(0)),
            "head": eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.key(1)),
        },
        {"images": real(BATCH, 2, 6, 6), "labels": integers(BATCH)},
    ),
    Loss("attention", attention_with_its_derivative, {"w": real(WIDTH, WIDTH)}, {"rows": real(BATCH, LENGTH, WIDTH)}),
)


PARTS = ((2, 2), (2, 4), (4, 1), (8, 1))
"""Microbatches and groups."""


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
@pytest.mark.sample(8)
def test_gradients_are_those_of_the_whole_batch(case: Loss, parts: tuple[int, int]) -> None:
    assert_same(case.fn, case.model, case.batch, parts)


def assert_same(loss: Any, model: Any, batch: Any, parts: tuple[int, int]) -> None:
    trace = trace_loss(loss, model, batch)
    expected, actual = (jax.jit(accumulated(trace, *each))(*operands(trace, model, batch)) for each in ((1, 1), parts))
    for first, second in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        scale = float(jnp.max(jnp.abs(first)))
        np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6 * scale)


def preferences(model: Any, batch: Any) -> Any:
    """Of each two examples that follow each other, the first is the better."""
    better, worse = jnp.moveaxis(squares(model, batch).reshape(-1, 2), 1, 0)
    return -jnp.mean(jax.nn.log_sigmoid(worse - better))


@pytest.mark.parametrize("parts", [(2, 1), (4, 1), (2, 2)], ids=str)
def test_examples_that_belong_together_stay_together(parts: tuple[int, int]) -> None:
    assert_same(preferences, mlp(), rows(), parts)


def tokens_by_example(model: Any, batch: Any) -> Any:
    """Looks up, for each row of all tokens, the position of an example."""
    logs = squares(model, batch)[:, None] * jnp.ones((1, 2))
    indices = jnp.repeat(jnp.arange(len(logs)), 2)
    return jnp.mean(logs.reshape(-1)[indices] * batch["mask"][indices])


def with_aux(model: Any, batch: Any) -> Any:
    predicted = forward(model, batch["x"])
    losses = squares(model, batch)
    aux = {
        "losses": losses,
        "transposed": predicted.T,
        "root": jnp.sqrt(jnp.mean(losses)),
        "hits": jnp.sum(jnp.argmax(predicted, -1) == batch["labels"]),
        "labels": batch["labels"],
        "count": jnp.sum(batch["mask"]),
        "norm": jnp.sum(model["up"] ** 2),
        "name": "aux",
    }
    return jnp.mean(losses), aux


@pytest.mark.parametrize("parts", [(2, 2), (2, 1)], ids=str)
def test_aux_is_that_of_the_whole_batch(parts: tuple[int, int]) -> None:
    model, batch = mlp(), rows()
    trace = trace_loss(with_aux, model, batch, has_aux=True)
    value, aux, _ = jax.jit(accumulated(trace, *parts))(*operands(trace, model, batch))
    expected = with_aux(model, batch)
    actual = value, trace.rebuild_aux(aux)[0]
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for first, second in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        if not isinstance(first, str):
            np.testing.assert_allclose(second, first, rtol=1e-5)
            assert second.dtype == first.dtype


def normalized(model: Any, batch: Any) -> Any:
    hidden = batch["x"] @ model["up"]
    hidden = (hidden - hidden.mean(0)) / hidden.std(0)
    return jnp.mean(hidden**2)


def contrastive(model: Any, batch: Any) -> Any:
    first, second = batch["x"] @ model["up"], batch["y"] @ model["down"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(first @ second.T)))


def each_after_another(model: Any, batch: Any) -> Any:
    hidden, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ model["up"]), None), jnp.zeros(8), batch["x"])
    return jnp.sum(hidden)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


# Cotangents are divided by their norm over the batch.
clipped.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent / jnp.sqrt(jnp.sum(cotangent**2)),))


@jax.custom_vjp
def scaled(weights: Any) -> Any:
    return weights


# As the scales of fp8 types do, which are overwritten by what comes as their gradient.
scaled.defvjp(lambda weights: (weights, None), lambda _, cotangent: (jnp.sign(cotangent),))


@jax.custom_vjp
def paired(x: Any, weights: Any) -> Any:
    return x, weights


paired.defvjp(lambda x, weights: ((x, weights), None), lambda _, cotangents: (cotangents[0], jnp.tanh(cotangents[1])))


def paired_product(model: Any, batch: Any) -> Any:
    x, weights = paired(batch["x"], model["up"])
    return jnp.mean((x @ weights) ** 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: jnp.mean((b["x"] @ scaled(m["up"])) ** 2), "derivatives of its own for trained arrays"),
        (paired_product, "derivatives of its own for trained arrays"),
        (normalized, r"sub uses a sum over the examples for single examples.*test_microbatches.py:\d+"),
        (lambda m, b: jnp.mean(clipped(squares(m, b))), "the derivative of custom_vjp_call.*div uses a sum over the"),
        (contrastive, "dot_general computes with several examples at once"),
        (tokens_by_example, "gather computes with several examples at once"),
        (each_after_another, "scan carries values from example to example"),
        (lambda m, b: jnp.log(jnp.mean(squares(m, b))), r"not linear in a sum over the examples: log \("),
        (lambda m, b: jnp.mean(squares(m, b)) ** 2, "not linear in a sum over the examples: integer_pow"),
        (
            lambda m, b: jnp.mean(squares(m, b)) * jnp.sum(jnp.argmax(forward(m, b["x"]), 1) == b["labels"]),
            "not linear in a sum over the examples: mul",
        ),
        (lambda m, b: jnp.max(squares(m, b)), "reduce_max reduces over the examples, and is not a sum"),
        (lambda m, b: jnp.mean(jnp.sort(squares(m, b)) ** 2), "sort computes with several examples at once"),
        (lambda m, b: jnp.sum(m["up"]), "does not depend on the examples"),
        (lambda m, b: jnp.mean(squares(m, b) * jnp.arange(8)), "tracing the loss with 2 of 8 examples failed"),
        (
            lambda m, b: jnp.mean(squares(m, b)) if len(b["x"]) > 4 else jnp.sum(squares(m, b)),
            "<lambda>: the programs for 8 and for 2 examples differ: .*has div.*Keep the batch whole",
        ),
        (
            lambda m, b: jnp.sum(
                jax.lax.reduce(b["x"] @ m["up"], 0.0, lambda total, value: total + value / len(b["x"]), (1,))
            ),
            "the programs for 8 and for . examples differ: jaxpr of reduce",
        ),
        (
            lambda m, b: jnp.mean(
                jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((len(b["x"]),), jnp.float32), squares(m, b))
            ),
            "pure_callback has no rule",
        ),
    ],
)
def test_what_uses_several_examples_at_once_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(MicrobatchError, match=f"(?s){message}"):
        accumulated(trace_loss(loss, mlp(), rows()), 4)


def test_one_error_names_the_loss_and_each_leaf_of_aux() -> None:
    def loss(model: Any, batch: Any) -> Any:
        values = squares(model, batch)
        return jnp.max(values), {"fine": jnp.mean(values), "median": jnp.median(values)}

    with pytest.raises(MicrobatchError, match=r"(?s)the loss: reduce_max.*aux 'median': ") as caught:
        accumulated(trace_loss(loss, mlp(), rows(), has_aux=True), 2)
    assert "fine" not in str(caught.value)


def test_batches_have_to_divide() -> None:
    with pytest.raises(MicrobatchError, match=r"8 examples does not divide into 3 microbatches$"):
        accumulated(trace_loss(masked_mean, mlp(), rows()), 3)
    with pytest.raises(MicrobatchError, match="into 2 microbatches with 3 groups each"):
        accumulated(trace_loss(masked_mean, mlp(), rows()), 2, 3)


def test_gradients_add_up_in_the_requested_dtype() -> None:
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp())
    trace = trace_loss(masked_mean, model, rows())

    def sizes(dtype: Any) -> set[str]:
        program = jax.make_jaxpr(accumulated(trace, 4, 2, dtype))(*operands(trace, model, rows()))
        assert [aval.dtype for aval in program.out_avals[1:]] == [jnp.bfloat16] * 2
        (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
        return {str(var.aval.dtype) for var in loop.outvars if var.aval.shape[:1] == (2,) and var.aval.ndim > 1}

    assert sizes(None) == {"float32"}
    assert sizes(jnp.bfloat16) == {"bfloat16"}


def test_complex_gradients_keep_their_imaginary_part() -> None:
    w, x = jnp.arange(1, 5) * (1 - 2j), rows()["x"][:, :4]

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(x @ w) ** 2)

    _, _, (gradient,) = accumulated(trace_loss(loss, w, x), 4, 1, jnp.float32)([w], [], [x])
    np.testing.assert_allclose(gradient, jax.grad(loss)(w, x), rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_in_few_bits_add_up_without_loss(groups: int) -> None:
    w, ones = jnp.ones(2, jnp.bfloat16), jnp.ones((1024, 2), jnp.bfloat16)
    trace = trace_loss(lambda w, x: jnp.sum(x @ w), w, ones)
    # In bfloat16, 256 + 1 is 256.
    _, _, (gradient,) = accumulated(trace, 512, groups)([w], [], [ones])
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [1024, 1024]


def test_transform_gets_the_forward_program_of_one_microbatch() -> None:
    trace, programs = trace_loss(dropout_of_one_key, mlp(), rows()), []

    def transform(program: Any) -> Any:
        programs.append(program)
        return program

    for parts in ((1, 1), (2, 2)):
        accumulated(trace, *parts, transform=transform)
        matching = forward_program(trace, *parts)
        assert str(matching) == str(programs[-1])
    rows_of_matmuls = [
        equation.outvars[0].aval.shape[0] for equation in programs[-1].eqns if equation.primitive.name == "dot_general"
    ]
    assert rows_of_matmuls == [2, 2]


def test_masks_of_groups_are_slices_that_move_nothing() -> None:
    trace = trace_loss(dropout_of_one_key, mlp(), rows())
    program = jax.make_jaxpr(accumulated(trace, 2, 4))(*operands(trace, mlp(), rows()))
    assert "gather" not in str(program)
    assert "custom_vmap" not in str(program)


def constrained(mesh: Any) -> Callable[[Any, Any], Any]:
    """Layers whose examples the user splits by constraints, inside of a loop and a checkpoint."""

    def split(x: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x: Any, w: Any) -> Any:
        return split(x + jnp.tanh(x @ split(w["up"])) @ split(w["down"]), "data"), None

    return lambda model, batch: jnp.mean(jax.lax.scan(jax.checkpoint(layer), split(batch, "data"), model)[0] ** 2)


def sent_in_loops(text: str) -> tuple[list[str], list[str]]:
    """The collectives that reduce, of a compiled program: outside of loops, and inside."""
    computation, outside, inside = "", [], []
    for line in text.splitlines():
        if re.match(r"%|ENTRY", line):
            computation = line
        match = re.search(r"= (.*) (all-reduce|reduce-scatter|all-to-all)(-start)?\(", line)
        if match:
            (outside if computation.startswith("ENTRY") else inside).append(f"{match[2]} {match[1]}")
    return outside, inside


def compiled_text(spec: P, groups: int) -> str:
    """A step of eight microbatches, compiled for eight devices, with parameters split by a spec."""
    mesh = sr.create_mesh("data:8", axis_types="auto")
    model, batch = {"up": real(3, 16, 32), "down": real(3, 32, 16)}, real(64, 16)
    gradients = accumulated(trace_loss(constrained(mesh), model, batch), 8, groups)
    placed = NamedSharding(mesh, spec)

    def step(trainable: Any, examples: Any) -> Any:
        loss, _, changes = gradients(trainable, [], [examples])
        return loss, [
            array - 0.1 * jax.lax.with_sharding_constraint(change, placed)
            for array, change in zip(trainable, changes, strict=True)
        ]

    run = jax.jit(step, in_shardings=([placed] * 2, NamedSharding(mesh, P("data"))), out_shardings=(None, [placed] * 2))
    return run.lower(list(jax.tree.leaves(model)), batch).compile().as_text() or ""


@pytest.mark.parametrize("spec", [P(), P(None, "data")], ids=["data-parallel", "fully-sharded"])
def test_eight_microbatches_reduce_gradients_once(spec: P) -> None:
    outside, inside = sent_in_loops(compiled_text(spec, 8))
    assert inside == []
    (reduction,) = outside
    assert sorted(re.findall(r"f32\[([\d,]*)\]", reduction)) == ["", "3,16,32", "3,32,16"]


@pytest.mark.slow
def test_without_groups_each_microbatch_reduces_and_data_stays() -> None:
    text = compiled_text(P(), 1)
    outside, inside = sent_in_loops(text)
    assert outside == []
    assert sorted(re.findall(r"f32\[([\d,]*)\]", " ".join(inside))) == ["", "16,32", "32,16"]
    assert "all-gather" not in text


def test_backward_passes_are_those_of_the_loss_alone() -> None:
    def loss(model: Any, batch: Any) -> Any:
        values = squares(model, batch)
        return jnp.mean(values), jnp.mean(values @ jnp.sin(forward(model, batch["x"] + 1)))

    trace = trace_loss(loss, mlp(), rows(), has_aux=True)

    def matmuls(microbatches: int) -> int:
        program = jax.make_jaxpr(accumulated(trace, microbatches))(*operands(trace, mlp(), rows()))
        return sum(equation.primitive.name == "dot_general" for equation in equations(without_dead_code(program)))

    assert matmuls(2) == matmuls(1)


@pytest.mark.parametrize("target", ["cuda:h100:8"])
def test_planned_microbatches_send_what_one_batch_does(target: str) -> None:
    width = 512
    model = {"up": STRUCT((2, width, 4 * width), jnp.float32), "down": STRUCT((2, 4 * width, width), jnp.float32)}
    batch = STRUCT((16384, width), jnp.float32)

    def loss(model: Any, batch: Any) -> Any:
        layers = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), batch, model)
        return jnp.mean(layers[0] ** 2)

    trace = trace_loss(loss, model, batch)
    mesh = Target.parse(target).mesh(sr.mesh_shape("data:8"))

    def sent_bytes(microbatches: int, groups: int) -> int:
        gradients = accumulated(trace, microbatches, groups)

        def step(model: Any, batch: Any) -> Any:
            value, _, changes = gradients(jax.tree.leaves(model), [], [batch])
            return jax.tree.map(
                lambda w, g: w - 0.1 * g, model, jax.tree.unflatten(jax.tree.structure(model), changes)
            ), value

        planned = sr.autoplan(step, model, batch, mesh=mesh).jit(step, donate_argnums=0)
        return sr.audit(planned, model, batch, mesh=mesh, target=target).wire_bytes

    once = sent_bytes(1, 1)
    assert sent_bytes(8, 8) == once
    assert sent_bytes(8, 1) > 4 * once
