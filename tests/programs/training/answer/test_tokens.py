"""Arrays of a batch that are tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.training.answer.tokens import token_count
from shardrules.programs.training.loss import trace_loss

TABLE = jax.ShapeDtypeStruct((256, 4), jnp.float32)


def array(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def by_time(table: Any, tokens: Any) -> Any:
    def step(hidden: Any, now: Any) -> Any:
        return jnp.tanh(hidden + table[now]), None

    return jax.lax.scan(jax.checkpoint(step), jnp.zeros((8, 4)), tokens.T)[0].mean()


def with_keys(table: Any, batch: Any) -> Any:
    return jnp.mean(batch["x"] @ table) + jax.vmap(jax.random.uniform)(batch["keys"]).mean()


def masked(table: Any, batch: Any) -> Any:
    words = table[batch["tokens"]]
    scores = jnp.where(batch["mask"] == 1, jnp.einsum("btd,bsd->bts", words, words), -1e9)
    return jnp.mean(jax.nn.softmax(scores) @ words)


def weighted(table: Any, batch: Any) -> Any:
    """One-hot kinds of pairs beside words that are looked up."""
    return jnp.mean(table[batch["tokens"]]) + jnp.mean(jax.nn.one_hot(batch["mask"], 3))


@pytest.mark.parametrize(
    ("loss", "batch", "count"),
    [
        (lambda table, tokens: table[tokens[:, :-1]].mean(), array(8, 6, dtype=jnp.uint8), 48),
        (lambda table, tokens: (jax.nn.one_hot(tokens, 256) @ table).mean(), array(8, 6), 48),
        (by_time, array(8, 6), 48),
        (lambda table, images: (images.reshape(8, 256) / 255 @ table).mean(), array(8, 16, 16, dtype=jnp.uint8), 0),
        (with_keys, {"x": array(8, 256, dtype=jnp.float32), "keys": array(8, 2, dtype=jnp.uint32)}, 0),
        (lambda table, labels: table[labels].mean(), array(8), 0),
        (masked, {"tokens": array(8, 6), "mask": array(8, 6, 6)}, 48),
        (weighted, {"tokens": array(8, 6), "mask": array(8, 6, 6)}, 48),
    ],
    ids=["words", "one-hot", "in-loops", "images", "keys", "labels", "masks", "one-hot-masks"],
)
def test_tokens_look_something_up(loss: Any, batch: Any, count: int) -> None:
    assert token_count(trace_loss(loss, TABLE, batch)) == count
