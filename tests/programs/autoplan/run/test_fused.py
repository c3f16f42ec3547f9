"""cuDNN's attention on pieces, beside that on whole arrays. Attention as it is written out stands in for cuDNN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.local import LocalSplit, local_jaxpr
from tests.programs.autoplan.shipped import kernels_in, let_jax_find_cudnn

NUMBERS = np.random.default_rng(0)


def half(*shape: int) -> jax.Array:
    return jnp.asarray(NUMBERS.normal(size=shape), jnp.float16)


def attend(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> tuple[Any, Any]:
    """Attention, and the logarithms of what each row of it adds up."""
    groups = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(array, groups, 2).astype(jnp.float32) for array in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), keys) + (bias if bias.ndim == 4 else 0)
    if lengths.size:
        scores = jnp.where(jnp.arange(k.shape[1]) < lengths[:, None, None, None], scores, -1e9)
    result = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), values)
    return result.astype(q.dtype), jax.nn.logsumexp(scores, -1)


def forward(q: Any, k: Any, v: Any, bias: Any, q_lengths: Any, lengths: Any, *others: Any, **params: Any) -> list[Any]:
    result, sums = attend(q, k, v, bias, lengths)
    return [result, sums] if params["is_training"] else [result]


def backward(q: Any, k: Any, v: Any, bias: Any, q_lengths: Any, lengths: Any, *others: Any, **params: Any) -> list[Any]:
    gradients = jax.vjp(lambda *arrays: attend(arrays[0], arrays[1], arrays[2], arrays[3], lengths)[0], q, k, v, bias)[
        1
    ](others[6])
    return list(gradients[: 4 if params["variadic_args"][1] else 3])


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = let_jax_find_cudnn(monkeypatch)
    for name, rule in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(module, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    return module


Q, K, SINGLE = half(4, 8, 4, 16), half(4, 8, 2, 16), half(4, 8, 1, 16)
HALVES = P("data", None, "model")


@pytest.mark.parametrize(
    ("keys", "bias", "key_spec", "bias_spec", "bias_sums"),
    [
        (K, (1, 4, 8, 8), HALVES, P(None, "model"), ("data",)),
        (SINGLE, (4, 1, 8, 8), P("data"), P("data"), ("model",)),
        (Q, (1, 1, 8, 8), HALVES, P(), ("data", "model")),
    ],
)
def test_pieces_of_attention_and_of_its_gradients(
    keys: Any, bias: Any, key_spec: P, bias_spec: P, bias_sums: Any, cudnn: Any
) -> None:
    """Groups of queries, a single head of keys, and biases that are shared by examples or by heads."""
    lengths = jnp.array([8, 5, 3, 1], jnp.int32)

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        result = cudnn.dot_product_attention(
            q, k, v, bias, q_seqlen=lengths, kv_seqlen=lengths, mask_type=cudnn.MaskType.PADDING
        )
        return jnp.sum(result.astype(jnp.float32) ** 2)

    args = (Q, keys, keys, half(*bias))
    first, second = (equation for equation, _ in kernels_in(jax.make_jaxpr(jax.grad(fn, (0, 1, 2, 3)))(*args)))
    rest = [jnp.zeros(0, jnp.float16)] * 4
    operands = [*args, lengths, lengths, *rest]
    specs = [HALVES, key_spec, key_spec, bias_spec, P("data"), P("data"), *[P()] * 4]
    sums = P("data", "model")
    results = check(first, operands, LocalSplit(tuple(specs), (HALVES, sums), ((), ())))
    key_sums = ("model",) if key_spec == P("data") else ()
    split = LocalSplit(
        (*specs, sums, HALVES, HALVES), (HALVES, key_spec, key_spec, bias_spec), ((), key_sums, key_sums, bias_sums)
    )
    check(second, [*operands, results[1], results[0], results[0]], split)


def check(equation: Any, operands: list[Any], split: LocalSplit) -> list[Any]:
    whole = jax.jit(lambda *arrays: equation.primitive.bind(*arrays, **equation.params))(*operands)
    pieces = jax.jit(jaxpr_as_fun(local_jaxpr(equation, split, sr.create_mesh("data:4,model:2"))))(*operands)
    for result, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-2, atol=1e-2)
    return whole
