"""By behaviour: `filter_init` returns the bits that `jax.jit` does, and devices hold little more than their shards."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.placement.models import FSDP, TASKS, Gpt

pytestmark = pytest.mark.usefixtures("optimized")

MESHES: tuple[Callable[[], Mesh], ...] = (
    functools.cache(lambda: sr.create_mesh("data:4,model:2")),
    functools.cache(lambda: jax.make_mesh((4, 2), ("data", "model"))),
)
"""One with Auto axes, and one with Explicit axes."""

RULE = sr.RegexShardingRule([(r"(^|/)model_", P("model"))]) | FSDP

GPT = next(task for task in TASKS if task.name == "gpt")

SHAPE = (64, 32)
ROWS = jnp.linspace(0.1, 3.0, 64)
TABLE = np.linspace(-2, 2, 64 * 32, dtype=np.float32).reshape(SHAPE)


def drawn(how: Callable[..., jax.Array], *args: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda key: how(key, *args)


def initializer(name: str, *args: Any) -> Callable[[jax.Array], jax.Array]:
    return drawn(getattr(jax.nn.initializers, name)(*args), SHAPE, jnp.float32)


def layers(key: jax.Array) -> Any:
    """Equal layers, one constant among the drawn ones."""
    return [
        {
            "w": jax.random.normal(k, SHAPE) / jnp.sqrt(SHAPE[1]),
            "b": jnp.zeros(SHAPE[0]),
            "scale": jnp.ones(SHAPE[0]),
        }
        for k in jax.random.split(key, 3)
    ]


def shared(key: jax.Array) -> Any:
    """One large array taken apart, for leaves that are split differently."""
    query, model_key, value = jnp.split(jax.random.normal(key, (192, 64)) * 0.02, 3)
    return {"query": query, "model_key": model_key, "value": value}


def tied(key: jax.Array) -> Any:
    w = jax.random.normal(key, SHAPE)
    return {"embedding": w, "model_head": w, "bias": jnp.zeros(64)}


def scanned(key: jax.Array) -> Any:
    def layer(key: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, used = jax.random.split(key)
        return key, scale * jax.random.normal(used, SHAPE)

    return jax.lax.scan(layer, key, jnp.arange(1.0, 5.0))[1]


def branched(key: jax.Array) -> Any:
    return jax.lax.cond(
        jax.random.bernoulli(key),
        lambda: jax.random.normal(key, SHAPE),
        lambda: jax.random.uniform(key, SHAPE),
    )


class Normed(eqx.Module):
    """A layer and the norm after it, which has a state."""

    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: jax.Array) -> None:
        self.layer = eqx.nn.Linear(32, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")


def stacked(key: jax.Array) -> Any:
    return eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 16, key=key))(jax.random.split(key, 4))


def rotary(key: jax.Array) -> Any:
    angles = jnp.outer(jnp.arange(64), 1 / 10000 ** (jnp.arange(0, 32, 2) / 32))
    return {"w": jax.random.normal(key, SHAPE), "cos": jnp.cos(angles), "sin": jnp.sin(angles)}


def log_of_integers(key: jax.Array) -> Any:
    """XLA takes such logarithms while it compiles, where the last bit comes out another way."""
    return jnp.log(jnp.arange(1, 33)) + jax.random.normal(key, SHAPE)


MAKES: dict[str, Callable[[jax.Array], Any]] = {
    "uniform": lambda key: jax.random.uniform(key, SHAPE, minval=-0.3, maxval=0.7),
    "truncated_normal": lambda key: 0.02 * jax.random.truncated_normal(key, -2, 2, SHAPE),
    "glorot": initializer("glorot_uniform"),
    "lecun": initializer("lecun_normal"),
    "cast": lambda key: (jax.random.normal(key, SHAPE) / 3).astype(jnp.bfloat16),
    "bernoulli": drawn(jax.random.bernoulli, 0.3, SHAPE),
    "orthogonal": initializer("orthogonal"),
    "variance_scaling": initializer("variance_scaling", 1 / 3, "fan_avg", "truncated_normal"),
    "delta_orthogonal": drawn(jax.nn.initializers.delta_orthogonal(), (3, 8, 16), jnp.float32),
    "bfloat16": lambda key: jax.random.normal(key, SHAPE, jnp.bfloat16) * 0.02,
    "float16": lambda key: jax.random.uniform(key, SHAPE, jnp.float16) / 3,
    "int": lambda key: {"int": jax.random.randint(key, SHAPE, -9, 9), "bits": jax.random.bits(key, SHAPE, jnp.uint8)},
    "permutation": lambda key: {
        "order": jax.random.permutation(key, 64),
        "rows": jax.random.normal(key, SHAPE)[jax.random.permutation(key, 64)],
    },
    "computed_float": layers,
    "computed_from_ints": lambda key: jax.random.normal(key, SHAPE) * jnp.exp(-jnp.arange(32)),
    "log_of_integers": log_of_integers,
    "rotary": rotary,
    "shared": shared,
    "tied": tied,
    "zeros_and_ones": lambda key: {"zeros": jnp.zeros(SHAPE), "ones": jnp.ones(SHAPE), "eye": jnp.eye(64), "key": key},
    "numpy": lambda key: {"table": TABLE, "sum": jax.random.normal(key, SHAPE) + TABLE, "n": np.int32(3)},
    "closed_over": lambda key: {"sum": jax.random.normal(key, SHAPE) * jnp.exp(ROWS)[:, None], "rows": ROWS},
    "key_of_its_own": lambda key: [
        jax.random.normal(subkey, SHAPE) for subkey in jax.random.split(jax.random.key(5), 2)
    ],
    "folded": lambda key: [jax.random.normal(jax.random.fold_in(key, n), SHAPE) / (n + 3) for n in range(3)],
    "stacked": stacked,
    "scanned": scanned,
    "branched": branched,
    "with_state": eqx.nn.make_with_state(Normed),
}
"""Programs that give the same on one device, too."""

PARTITIONED: dict[str, Callable[[jax.Array], Any]] = {
    "cumsum": lambda key: jnp.cumsum(jax.random.normal(key, SHAPE), axis=0),
    "centred": lambda key: (jax.random.normal(key, SHAPE) - jax.random.normal(key, SHAPE).mean(0)) ** 2,
    "normed": lambda key: jax.random.normal(key, SHAPE) / jnp.linalg.norm(jax.random.normal(key, SHAPE)),
    "divided_by_a_table": lambda key: jax.random.normal(key, SHAPE) / TABLE,
}
"""Programs with another last bit where JAX splits the work: then it is the split that counts."""

KEYS: dict[str, Callable[[], Any]] = {
    "typed": lambda: jax.random.key(3),
    "legacy": lambda: jax.random.PRNGKey(3),
    "numpy": lambda: np.array([0, 3], np.uint32),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
}


def values(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(tree)
        if _is_array(leaf)
    ]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def assert_same_bits(actual: Any, expected: Any) -> None:
    pairs = list(zip(values(actual), values(expected), strict=True))
    assert pairs
    for left, right in pairs:
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes(), f"{np.sum(left != right)} of {left.size} differ"


def by_jit(make: Callable[..., Any], *args: Any, split: bool) -> Any:
    """Returns the arrays that `jax.jit` makes, split over the mesh or on one device."""

    def arrays(*args: Any) -> Any:
        return eqx.filter(make(*args), _is_array)

    mesh = MESHES[0]()
    shardings = RULE.plan(jax.eval_shape(arrays, *args), mesh).shardings(mesh) if split else None
    return jax.jit(arrays, out_shardings=shardings)(*args)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*MAKES, *PARTITIONED])
def test_values_are_those_of_jit(name: str) -> None:
    make, key = (MAKES | PARTITIONED)[name], jax.random.key(3)
    expected = by_jit(make, key, split=True)
    if name in MAKES:
        assert_same_bits(by_jit(make, key, split=False), expected)
    for mesh in MESHES:
        tree = sr.filter_init(make, RULE, mesh())(key)
        assert_same_bits(tree, expected)
        arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
        assert all(leaf.sharding.mesh == mesh() for leaf in arrays)
        assert not all(leaf.sharding.is_fully_replicated for leaf in arrays)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KEYS)
def test_values_match_jit_for_every_kind_of_key(kind: str) -> None:
    key = KEYS[kind]()
    expected = by_jit(layers, key, split=True)
    for mesh in MESHES:
        assert_same_bits(sr.filter_init(layers, RULE, mesh())(key), expected)


@pytest.mark.slow
def test_a_whole_model_is_that_of_jit() -> None:
    expected = eqx.filter_jit(Gpt)(jax.random.key(0))
    for mesh in MESHES:
        tree = sr.filter_init(Gpt, GPT.tensor_parallel | FSDP, mesh())(jax.random.key(0))
        assert_same_bits(tree, expected)


@pytest.mark.slow
def test_arguments_are_passed_through() -> None:
    def make(key: jax.Array, table: Any, scale: float, count: Any, *, name: str) -> Any:
        return {"table": table, "w": jax.random.normal(key, SHAPE) * scale / count, "scale": scale, "name": name}

    closed_over = jax.random.normal(jax.random.key(1), SHAPE)
    expected = jax.jit(lambda key, n: jax.random.normal(key, SHAPE) * 0.5 / n)(jax.random.key(0), np.int32(7))
    for mesh in MESHES:
        init = sr.filter_init(make, RULE, mesh())
        for table in (TABLE, closed_over, sr.filter_shard(closed_over, P("model"), mesh())):
            tree = init(jax.random.key(0), table, 0.5, np.int32(7), name="mlp")
            assert tree["name"] == "mlp"
            assert isinstance(tree["scale"], float)
            assert tree["scale"] == 0.5
            assert tree["table"].sharding.spec == P("data", None)
            assert_same_bits(tree["table"], table)
            assert_same_bits(tree["w"], expected)


def test_python_numbers_stay_what_they_are() -> None:
    tree = sr.filter_init(lambda key: (jax.random.normal(key, (8,)), 0.1, 3, True, None, "text"), RULE, MESHES[0]())(
        jax.random.key(0)
    )
    assert tree[1:] == (0.1, 3, True, None, "text")
    assert [type(subkey) for subkey in tree[1:4]] == [float, int, bool]


def test_closed_over_arrays_must_not_be_on_explicit_axes() -> None:
    def adding(table: Any) -> Callable[[jax.Array], Any]:
        return lambda key: jax.random.normal(key, SHAPE) + jnp.exp(table)

    auto, explicit = (mesh() for mesh in MESHES)
    expected = by_jit(adding(TABLE), jax.random.key(0), split=True)
    for table in (jax.device_put(TABLE, jax.devices()[2]), sr.filter_shard(TABLE, P("model"), auto)):
        assert_same_bits(sr.filter_init(adding(table), RULE, auto)(jax.random.key(0)), expected)
    with pytest.raises(ValueError, match="should match the aval mesh") as caught:  # JAX's own, which gives no way out
        sr.filter_init(adding(sr.filter_shard(TABLE, P("model"), explicit)), RULE, explicit)(jax.random.key(0))
    assert any("as an argument" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_effects_happen_once_at_every_call(capfd: pytest.CaptureFixture[str]) -> None:
    def make(key: jax.Array) -> Any:
        w = jax.random.normal(key, SHAPE)
        jax.debug.print("made {x}", x=w[0, 0])
        return {"w": w, "b": jnp.zeros(64)}

    for mesh in MESHES:
        init = sr.filter_init(make, RULE, mesh())
        capfd.readouterr()
        for seed in range(2):
            tree = init(jax.random.key(seed))
            jax.effects_barrier()
            word, printed = capfd.readouterr().out.split()
            assert (word, np.float32(printed)) == ("made", np.asarray(tree["w"])[0, 0])
            assert_same_bits(tree["w"], jax.jit(lambda key: jax.random.normal(key, SHAPE))(jax.random.key(seed)))


# ---- memory ----


@pytest.mark.slow
def test_no_device_holds_much_more_than_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(Gpt, vocabulary=1024, width=256, depth=4)
    rule = GPT.tensor_parallel | FSDP
    jit, programs = jax.jit, []

    def measured(fun: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        compiled = jit(fun, **settings)

        def call(*args: Any) -> Any:
            programs.append(compiled.lower(*args).compile().memory_analysis())
            return compiled(*args)

        return call

    monkeypatch.setattr("shardrules.placement.init.jit", measured)
    for mesh in MESHES:
        programs.clear()
        model = sr.filter_init(make, rule, mesh())(jax.random.key(0))
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        shards = [leaf.addressable_shards[0].data.nbytes for leaf in arrays]
        assert sum(shards) > 2**20
        output_bytes, peaks = 0, []
        for program in programs:
            peaks.append(output_bytes + program.temp_size_in_bytes + program.output_size_in_bytes)
            output_bytes += program.output_size_in_bytes
        assert output_bytes >= sum(shards)  # all of it was seen
        assert max(peaks) <= 1.1 * sum(shards) + max(shards)
        assert max(peaks) < sum(leaf.nbytes for leaf in arrays) / 4
        # And none of them is ever whole on a device while it is drawn.
        assert max(program.temp_size_in_bytes for program in programs) < max(leaf.nbytes for leaf in arrays) / 2
