"""One list each of all rules, meshes and trees. The laws go through all of them, so a new one is tested everywhere.

Each entry is a function that builds its value once, when it is first asked for: only some meshes and trees need
devices, and the processes that prove that planning needs none import this module too.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import attrs
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.core.rule import decide
from shardrules.presets.huggingface import HuggingFaceShardingRule

T = TypeVar("T")
Entries: TypeAlias = Mapping[str, Callable[[], T]]


def once(**entries: Callable[[], T]) -> Entries[T]:
    """Returns the entries, each of which builds its value at the first call only."""
    return {name: functools.cache(make) for name, make in entries.items()}


# ---- rules of a user ----


@final
@attrs.frozen
class RowsRule(sr.LeafShardingRule):
    """A user's leaf rule: rows over an axis where they divide."""

    axis: str
    reads_index = "no"

    def decide(self, leaf: sr.Leaf) -> sr.Decision:
        if self.axis not in leaf.sizes:
            return leaf.skip("no such axis here")
        return leaf.shard(0, self.axis) if leaf.fits(0, self.axis) else leaf.skip("rows do not divide")


@final
@attrs.frozen
class LastDigitRule(sr.LeafShardingRule):
    """A user's leaf rule that says nothing about indices, and reads them."""

    axis: str

    def decide(self, leaf: sr.Leaf) -> sr.Decision:
        if leaf.ndim and any(part in ("1", "3", "10") for part in leaf.path.split("/")):
            return leaf.shard(-1, self.axis)
        return leaf.skip("not one of those layers")


@final
@attrs.frozen
class ColumnsByApply(sr.ShardingRule):
    """A user's rule in the manner of other libraries: it has `apply`, and an empty spec where it has nothing to say."""

    axis: str

    def apply(self, pytree: Any) -> Any:
        def spec(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                return P()
            return P(*[None] * (leaf.ndim - 1), self.axis) if leaf.ndim > 1 else P()

        return jax.tree.map(spec, pytree, is_leaf=lambda node: isinstance(node, nn.meta.AxisMetadata))


@final
@attrs.frozen
class BiggestRule(sr.LeavesShardingRule):
    """A user's rule that looks at the whole tree: only the biggest leaves are split."""

    axis: str
    reads_index = "no"

    def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
        biggest = max(leaf.size for leaf in leaves.items)
        return sr.Verdict(
            tuple(
                leaf.shard(0, self.axis, "the biggest") if leaf.size == biggest and leaf.ndim else leaf.skip("smaller")
                for leaf in leaves.items
            )
        )


@final
@attrs.frozen
class EachLeaf(sr.LeavesShardingRule):
    """Says what `rule` says, and makes the engine look at every leaf by itself."""

    rule: sr.ShardingRule
    mesh: AnyMesh | None = attrs.field(init=False, default=attrs.Factory(lambda self: self.rule.mesh, takes_self=True))
    reads_index = "value"

    def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
        return decide(self.rule, leaves)


# ---- rules ----

KINDS = sr.RegexShardingRule(
    [
        (r"(^|/)(bias|scale|b)$", P()),
        (r"(^|/)(mlp|layers)/\d+/.*w", P("model", None)),
        (r"weight|kernel|w", "fsdp('data', min_size_mb=0)"),
        (r"mu|nu", None),
    ]
)

RULES: Entries[sr.ShardingRule] = once(
    auto=lambda: sr.AutoShardingRule(),
    auto_all=lambda: sr.AutoShardingRule(axis_names=["model", "data"], min_shard_size=0),
    auto_tuple=lambda: sr.AutoShardingRule(axis_names=[("data", "model")], min_shard_size=1),
    auto_reverse=lambda: sr.AutoShardingRule(reverse=True, min_shard_size=2),
    auto_own_mesh=lambda: sr.AutoShardingRule(sr.mesh_shape("data:2,model:2")),
    auto_on_devices=lambda: sr.AutoShardingRule(MESHES["devices_auto"]()),
    shape=lambda: sr.ShapeBasedShardingRule({(None, 8): P("model", None), (8, None): P("data"), (16,): P("data")}),
    shape_replicate=lambda: sr.ShapeBasedShardingRule({(None,): P(), (None, None): P(("data", "model"))}),
    memory=lambda: sr.MemoryConstrainedShardingRule(128),
    memory_named=lambda: sr.MemoryConstrainedShardingRule(64, axis_names=["data"]),
    memory_tree=lambda: sr.MemoryConstrainedShardingRule(2048, scope="tree"),
    memory_tree_wide=lambda: sr.MemoryConstrainedShardingRule(2**30, scope="tree"),
    regex=lambda: KINDS,
    regex_width=lambda: sr.RegexShardingRule([(r"layers.\d.", P("data")), (r"s/\d\d/", P(None, "data"))]),
    regex_value=lambda: sr.RegexShardingRule([(r"(^|/)0(/|$)", P("data")), (r"[1-5]", P("model")), (r".*", P())]),
    regex_full=lambda: sr.RegexShardingRule([(r".*weight", P(("data", "model"))), (r".*/\d+", P())], match="fullmatch"),
    regex_match=lambda: sr.RegexShardingRule([(r"layers|0", P(None, P.UNCONSTRAINED))], match="match"),
    regex_replicate=lambda: sr.RegexShardingRule([("w", P("data"))], unmatched="replicate", min_size=64),
    regex_error=lambda: sr.RegexShardingRule([("w|b|0", P())], unmatched="error"),
    regex_unsound=lambda: sr.RegexShardingRule([("b", P("dta")), (".*", P("data", "data", "model"))]),
    replicate=lambda: sr.ReplicateShardingRule(),
    fsdp=lambda: sr.FSDPShardingRule("data"),
    fsdp_all=lambda: sr.FSDPShardingRule("data", min_size_mb=0),
    fsdp_tuple=lambda: sr.FSDPShardingRule(("model", "data"), min_size_mb=0.0001),
    dim=lambda: sr.DimShardingRule("data", 0),
    dim_lenient=lambda: sr.DimShardingRule("model", -2, ignore_ndim_error=True),
    dim_tuple=lambda: sr.DimShardingRule(("data", "model"), -1, ignore_ndim_error=True),
    logical=lambda: sr.LogicalShardingRule({"embed": "data", "mlp": ("model",), "vocab": None}),
    logical_strict=lambda: sr.LogicalShardingRule({"embed": (), "mlp": ("model",)}, unknown="error", lost="error"),
    logical_pairs=lambda: sr.LogicalShardingRule([("embed", "data"), ("mlp", "data"), ("mlp", None)]),
    hugging_face=lambda: HuggingFaceShardingRule(roles={"weight": "columns", "w": "rows", "mlp": "vocab"}),
    hugging_face_axes=lambda: HuggingFaceShardingRule("model", ("data", "pipe"), head_dim=2, roles={"w": "kv_heads"}),
    fitted=lambda: sr.FittedShardingRule(sr.RegexShardingRule([(".*", P(("data", "expert", "model"), "pipe"))])),
    fitted_dim=lambda: sr.FittedShardingRule(sr.DimShardingRule(("data", "model"), 0, ignore_ndim_error=True)),
    fitted_fsdp=lambda: sr.FittedShardingRule(sr.parse_rule("fsdp(('expert', 'data'), 0)|fsdp('stage', 0)")),
    fitted_auto=lambda: sr.FittedShardingRule(sr.AutoShardingRule(axis_names=["expert", "model"], min_shard_size=0)),
    stacked=lambda: sr.StackedShardingRule(sr.AutoShardingRule(min_shard_size=0)),
    stacked_axis=lambda: sr.StackedShardingRule(KINDS, axis="pipe"),
    stacked_two=lambda: sr.StackedShardingRule(sr.DimShardingRule("data", 0, ignore_ndim_error=True), dims=2),
    chain=lambda: sr.DimShardingRule("model", -1, ignore_ndim_error=True) | sr.FSDPShardingRule("data", min_size_mb=0),
    chain_clash=lambda: sr.FSDPShardingRule("data", min_size_mb=0) | sr.ReplicateShardingRule(),
    chain_regex=lambda: KINDS | sr.ShapeBasedShardingRule({(8, 8): P(None, "data")}),
    composite=lambda: sr.CompositeShardingRule(KINDS, sr.AutoShardingRule()),
    composite_literal=lambda: sr.CompositeShardingRule(KINDS, sr.AutoShardingRule(), empty_is_opinion=False),
    composite_empty=lambda: sr.CompositeShardingRule(),
    composite_budget=lambda: sr.CompositeShardingRule(
        sr.RegexShardingRule([(r"\d", P())]), sr.MemoryConstrainedShardingRule(4096, scope="tree")
    ),
    pinned=lambda: sr.SpecTreeShardingRule({"layers": P("data"), "w": P(None, "model"), "blocks": {"up": None}}),
    mirror=lambda: sr.MirrorShardingRule((("w", (16, 8), P("data", "model")), ("b", (8,), P("model")))),
    nested=lambda: sr.FittedShardingRule(
        sr.CompositeShardingRule(
            sr.RegexShardingRule([("up|down", sr.StackedShardingRule(KINDS | RowsRule("data"), axis="pipe"))]),
            sr.CompositeShardingRule(ColumnsByApply("model"), sr.SpecTreeShardingRule({"w": P("data")})),
            sr.AutoShardingRule() | sr.FSDPShardingRule("model", min_size_mb=0),
        )
    ),
    user_leaf=lambda: RowsRule("data"),
    user_index=lambda: LastDigitRule("data"),
    user_apply=lambda: ColumnsByApply("data"),
    user_leaves=lambda: BiggestRule("data"),
    user_mixed=lambda: sr.CompositeShardingRule(LastDigitRule("model"), ColumnsByApply("data")) | RowsRule("model"),
)

ON_DEVICES = ("auto_on_devices",)
"""The rules that hold a mesh of devices: a Mesh has no repr that builds it again, and its devices do not pickle."""


# ---- meshes ----


def devices(*shape: int) -> np.ndarray:
    """Returns the first CPU devices, in this shape."""
    count = int(np.prod(shape))
    return np.array(jax.devices()[:count]).reshape(shape)


MESHES: Entries[AnyMesh] = once(
    line=lambda: sr.mesh_shape("data:4"),
    grid=lambda: sr.mesh_shape("data:4,model:2"),
    cube=lambda: sr.mesh_shape("pipe:2,data:2,model:2"),
    ones=lambda: sr.mesh_shape("data:4,model:1"),
    alone=lambda: sr.mesh_shape("data:1,model:1"),
    pod=lambda: sr.mesh_shape("model:64,data:64"),
    mixed_shape=lambda: AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit)),
    devices_auto=lambda: Mesh(devices(4, 2), ("data", "model")),
    devices_explicit=lambda: jax.make_mesh((4, 2), ("data", "model")),
    devices_mixed=lambda: Mesh(devices(4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)),
)


# ---- trees ----


class Block(eqx.Module):
    """A layer of a model."""

    up: jax.Array
    down: jax.Array
    norm: eqx.nn.LayerNorm
    act: Callable[[jax.Array], jax.Array] = jax.nn.gelu

    def __init__(self, key: jax.Array) -> None:
        self.up = jnp.ones((32, 8)) * jax.random.uniform(key)
        self.down = jnp.zeros((8, 32))
        self.norm = eqx.nn.LayerNorm(8)


class Model(eqx.Module):
    """A model of equal layers and one that differs."""

    layers: list[Any]
    head: eqx.nn.Linear
    depth: int = eqx.field(static=True)
    notes: dict[str, int] = eqx.field(static=True)  # a static field without a hash

    def __init__(self, depth: int) -> None:
        keys = jax.random.split(jax.random.key(0), depth + 1)
        self.layers = [*map(Block, keys[:-1]), eqx.nn.Linear(8, 8, key=keys[-1])]
        self.head = eqx.nn.Linear(8, 6, key=keys[-1])
        self.depth = depth
        self.notes = {"depth": depth}


class Tied(eqx.Module):
    """Embedding and head share one array."""

    shared: eqx.nn.Shared

    def __init__(self) -> None:
        embedding = eqx.nn.Embedding(16, 8, key=jax.random.key(0))
        head = eqx.nn.Linear(8, 16, use_bias=False, key=jax.random.key(1))
        self.shared = eqx.nn.Shared((embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)


class Moments(NamedTuple):
    """What an optimizer keeps."""

    mu: Any
    nu: Any
    count: Any = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    """A dataclass that JAX knows."""

    w: Any
    b: Any
    name: str = dataclasses.field(default="weights", metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Settings:
    """A dataclass that JAX does not know: a leaf, carried through."""

    rate: float = 0.1


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node without names for its children."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        """Returns the children."""
        return (self.first, self.second), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> "Pair":
        """Returns the node with these children."""
        return cls(*children)


def quick(make: Callable[[], T]) -> T:
    """Returns what `make` returns, with arrays of zeros: nothing is compiled or run to build it."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(zeros, eqx.filter_eval_shape(make))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns an array of this shape, without values."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def params() -> dict[str, Any]:
    """Returns the parameters that the optimizers are for."""
    layer = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
    return {"layers": [layer, layer, layer], "w": jnp.ones((256, 128)), "scale": jnp.ones(7)}


def experts() -> list[Any]:
    """Returns lists of lists of layers; one has another shape, and one another dtype."""
    rows: list[Any] = [[{"w": np.ones((8, 4), np.float32)} for _ in range(12)] for _ in range(3)]
    rows[1][11] = {"w": np.ones((8, 6), np.float32)}
    rows[2][3] = {"w": np.ones((8, 4), np.int32)}
    return rows


def label(path: tuple[Any, ...], _: Any) -> str:
    """Returns which optimizer a parameter is for."""
    return "adam" if "layers" in jax.tree_util.keystr(path) else "sgd"


class LinenModel(nn.Module):
    """A flax model whose parameters are boxes."""

    logical: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        kernel, bias = nn.initializers.ones_init(), nn.initializers.zeros_init()
        for _ in range(2):
            x = nn.Dense(8, kernel_init=box(kernel, ("embed", "mlp")), bias_init=box(bias, ("mlp",)))(x)
        return nn.Dense(6, kernel_init=box(kernel, (None, "vocab")))(x)


def linen(logical: bool) -> Any:
    """Returns the boxed parameters of a flax model."""
    return quick(lambda: LinenModel(logical).init(jax.random.key(0), jnp.ones((2, 8))))


class NnxBlock(nnx.Module):
    """A block of nnx with named dimensions and random streams of its own."""

    def __init__(self, rngs: nnx.Rngs, in_size: int = 8, size: int = 16) -> None:
        # The names are no axes of a mesh, so flax must not split by them.
        named = functools.partial(nnx.with_partitioning, nnx.initializers.lecun_normal(), eager_sharding=False)
        self.up = nnx.Linear(in_size, size, kernel_init=named(("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(size, in_size, kernel_init=named(("mlp", "embed")), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


class NnxModel(nnx.Module):
    """A model of nnx with a list of blocks."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 3) -> None:
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(depth)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def nnx_model(depth: int = 3) -> NnxModel:
    """Returns a model of nnx."""
    return NnxModel(nnx.Rngs(0), depth)


def stacked() -> Any:
    """Returns six layers in one."""
    return quick(lambda: eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 6)))


def every_dtype() -> dict[str, Any]:
    """Returns arrays of unusual dtypes."""
    return {
        "bf16": jnp.ones((16, 8), jnp.bfloat16),
        "int4": jnp.ones((16, 7), jnp.int4),
        "bool": jnp.ones((8, 8), bool),
        "key": jax.random.split(jax.random.key(0), 8),
        "rbg": jax.random.key(0, impl="rbg"),
        "complex": jnp.ones((4, 4), jnp.complex64),
        "f8": jnp.ones((8, 4), jnp.float8_e4m3fn),
    }


def structs() -> dict[str, Any]:
    """Returns shapes alone: what planning needs, and no device."""
    struct = jax.ShapeDtypeStruct
    layer = {"w": struct((16, 8), jnp.bfloat16), "bias": struct((8,), jnp.float32), "mlp": [struct((8, 32), jnp.int8)]}
    return {
        "embed": {"weight": struct((4096, 512), jnp.float32)},
        "layers": [layer] * 11 + [{"w": struct((16, 9), jnp.bfloat16)}],
        "blocks": {"up": struct((6, 32, 8), jnp.float32), "down": struct((6, 8, 32), jnp.float32)},
        "count": 3,
    }


TREES: Entries[Any] = once(
    mlp=lambda: quick(lambda: eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))),
    attention=lambda: quick(lambda: eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0))),
    conv=lambda: quick(lambda: eqx.nn.Conv2d(4, 8, 3, key=jax.random.key(0))),
    gru=lambda: quick(lambda: eqx.nn.GRUCell(8, 16, key=jax.random.key(0))),
    layer_norm=lambda: eqx.nn.LayerNorm(16),
    batch_norm=lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, axis_name="batch", mode="batch"),
    shared=lambda: quick(Tied),
    embedding=lambda: quick(lambda: eqx.nn.Embedding(16, 8, key=jax.random.key(0))),
    stacked=stacked,
    model=lambda: quick(lambda: Model(3)),
    experts=experts,
    adam=lambda: optax.adam(1e-3).init(params()),
    adafactor=lambda: optax.adafactor(1e-3).init(params()),
    masked=lambda: optax.masked(optax.adam(1e-3), jax.tree.map(lambda x: x.ndim > 1, params())).init(params()),
    multi_transform=lambda: optax.multi_transform(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3, 0.9)}, jax.tree_util.tree_map_with_path(label, params())
    ).init(params()),
    multi_steps=lambda: optax.MultiSteps(optax.chain(optax.clip(1.0), optax.lion(1e-3)), 4).init(params()),
    partitioned=lambda: linen(logical=False),
    logically_partitioned=lambda: linen(logical=True),
    mixed_boxes=lambda: {"box": nn.Partitioned(np.ones((8, 8)), ("embed", "mlp")), "w": np.ones((8, 4)), "n": 1},
    nnx_state=lambda: quick(lambda: nnx.state(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))),
    nnx_module=lambda: quick(nnx_model),
    nothing=lambda: None,
    empty_dict=dict,
    empty_inside=lambda: {"a": {}, "b": [(), None], "c": np.ones(8)},
    array=lambda: np.ones((8, 8), np.float32),
    scalar=lambda: jnp.float32(1),
    scalars=lambda: {"a": jnp.zeros(()), "b": np.float32(1), "c": np.ones((1,)), "d": np.ones((1, 1))},
    number=lambda: 3,
    numbers=lambda: {"int": 1, "float": 2.5, "bool": True, "complex": 1j, "w": np.ones(8)},
    statics=lambda: {"f": jax.nn.relu, "text": "w", "type": np.float32, "settings": Settings(), "w": np.ones((8, 4))},
    zero_sized=lambda: {"rows": np.ones((0, 8)), "columns": np.ones((8, 0)), "both": np.ones((0,))},
    dtypes=every_dtype,
    numpy=lambda: {
        "w": np.ones((16, 8)),
        "b": np.ones(8, np.int8),
        "view": np.ones((8, 16)).T,
        "w3": np.ones((4, 8, 16)),
    },
    structs=structs,
    eval_shape=lambda: eqx.filter_eval_shape(Model, 11),
    named_tuple=lambda: Moments({"w": np.ones((16, 8))}, [np.ones(8), np.ones(8)]),
    dataclass=lambda: {"layers": [Weights(np.ones((8, 8)), np.ones(8)) for _ in range(4)]},
    ordered_dict=lambda: collections.OrderedDict(z=np.ones(8), a=np.ones((8, 4)), m=collections.defaultdict(list)),
    int_keys=lambda: {0: np.ones((8, 4)), 1: np.ones((8, 4)), 10: np.ones((8, 4)), -1: np.ones((8, 4))},
    odd_keys=lambda: {
        "#": np.ones(8),
        "##": np.ones(8),
        "7": np.ones(8),
        "07": np.ones(8),
        "٣": np.ones(8),
        "": np.ones(4),
    },
    tuple_keys=lambda: {("a", 1): np.ones(8), ("a", 2): [np.ones(8)]},
    node=lambda: [Pair(np.ones((8, 8)), [np.ones(4)]), Pair(np.ones((8, 8)), [np.ones(4)])],
    params=params,
)


def arrays(tree: Any) -> list[Any]:
    """Returns the leaves of `tree`, a flax box being one leaf."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nn.meta.AxisMetadata))


def as_shapes(tree: Any) -> Any:
    """Returns `tree` with shapes in place of arrays; the rest is as it was."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    return jax.tree.map(shape, tree)
