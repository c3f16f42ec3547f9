import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P

import shardrules as sr


def block(key: jax.Array) -> dict:
    attention, mlp = eqx.nn.MultiheadAttention(32, 4096, key=key), eqx.nn.MLP(4096, 4096, 14336, 1, key=key)
    return {"attention": attention, "mlp": mlp, "norm": eqx.nn.RMSNorm(4096)}


def make(key: jax.Array) -> dict:
    return {"embed": eqx.nn.Embedding(128256, 4096, key=key), "blocks": [block(key) for _ in range(32)]}


rules = sr.CompositeShardingRule(
    sr.RegexShardingRule([(r"output_proj/weight", P("data", "model")), (r"norm|bias", P())]),
    sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data"),
)
model = eqx.filter_eval_shape(make, jax.random.key(0))  # shapes: no array is made
print(rules.plan(model, sr.mesh_shape("data:16,model:4")))  # and no device is needed
