"""How long are the rules that plans become, and how long does it take to find them?

**Method.** `plan.to_rules()` of the plans that `autoplan` finds for the seven models and the sixteen kinds of
`plan_models/` on 8 H100s, which need not be present; of the ViT-L/16 of big_vision, fully sharded and split by heads;
and of a Llama 405B and a DeepSeek-V3 under the rules in `trees.py` and fully sharded. Of the last three only the specs
are given. Each rule is applied to the same tree, and the specs are compared leaf by leaf, as placements. The time is
that of `to_rules` alone, in seconds of a core.

**Last answer.** 2026-11-28, 2 busy cores of an AMD EPYC, JAX 0.10.2. All rules are equal to their plans. The seven
models take 3 to 6 rules, the sixteen kinds 2 to 7, in 0.01 to 0.1 s; the ViT-L 1 and 5, the Llama 405B 1 and 3,
DeepSeek-V3 1 and 4, its 45,395 leaves in 0.24 to 0.32 s.

Run it as `python benchmarks/rules_of_plans.py`; see `--help` for less. It needs the extras `cuda` and `bench`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from plan_models import KINDS, MODELS
from trees import TOY_TREES, TREES

import shardrules as sr

MESH = "data:4,model:2"
RULE_LIMITS = {"deepseek_v3": 20}
RULE_LIMIT = 12
SECONDS_LIMIT = 1.0
"""The most rules of a plan, and the most seconds that finding them may take."""

TOYS = ("llama", "decode")
"""The models and kinds of a smoke run."""


@final
@attrs.frozen
class Row:
    """The rules of one plan."""

    name: str
    leaves: int
    rules: int
    seconds: float
    is_equal: bool
    text: tuple[str, ...]

    @property
    def is_met(self) -> bool:
        """Whether the rules are as few and as fast as they have to be, and equal to the plan."""
        limit = RULE_LIMITS.get(self.name.split(",")[0], RULE_LIMIT)
        return self.is_equal and self.rules <= limit and self.seconds <= SECONDS_LIMIT


def row_of(name: str, plan: sr.ShardingPlan, tree: Any) -> Row:
    """Finds the rules of a plan, and compares."""
    start = time.process_time()
    rule: Any = plan.to_rules()
    seconds = time.process_time() - start
    again = rule.plan(tree, plan.mesh)
    pairs = zip(jax.tree.leaves(plan.specs), jax.tree.leaves(again.specs), strict=True)
    is_equal = all(sr.specs.same(first, second) for first, second in pairs)
    text = tuple(f"{pattern}: {value}" for pattern, value in rule.rules)
    return Row(name, len(plan.paths), len(rule.rules), seconds, is_equal, text)


def vit() -> dict[str, Any]:
    """The ViT-L/16 of big_vision, with its names."""
    width, heads, hidden = 1024, 16, 4096

    def dense(*shape: int, bias: tuple[int, ...]) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32), "bias": jax.ShapeDtypeStruct(bias, jnp.float32)}

    def norm() -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct((width,), jnp.float32) for name in ("scale", "bias")}

    def attention() -> dict[str, Any]:
        size = width // heads
        inner = {name: dense(width, heads, size, bias=(heads, size)) for name in ("query", "key", "value")}
        return inner | {"out": dense(heads, size, width, bias=(width,))}

    def block() -> dict[str, Any]:
        mlp = {"Dense_0": dense(width, hidden, bias=(hidden,)), "Dense_1": dense(hidden, width, bias=(width,))}
        return {
            "LayerNorm_0": norm(),
            "MultiHeadDotProductAttention_0": attention(),
            "LayerNorm_1": norm(),
            "MlpBlock_0": mlp,
        }

    head = {"probe": jax.ShapeDtypeStruct((1, 1, width), jnp.float32), **block()}
    del head["LayerNorm_1"]
    return {
        "embedding": dense(16, 16, 3, width, bias=(width,)),
        "pos_embedding": jax.ShapeDtypeStruct((1, 196, width), jnp.float32),
        "Transformer": {f"encoderblock_{index}": block() for index in range(24)} | {"encoder_norm": norm()},
        "MAPHead_0": head,
        "head": dense(width, 1000, bias=(1000,)),
    }


VIT_STRATEGIES = {
    "fsdp": (sr.FSDPShardingRule("data"),),
    "tensor": (
        sr.RegexShardingRule(
            [
                ("(query|key|value)/kernel", sr.parse_rule("shard_dim('model', 1)|fsdp('data')")),
                ("out/kernel", sr.parse_rule("shard_dim('model', 0)|fsdp('data')")),
                ("Dense_0/kernel", sr.parse_rule("shard_dim('model', -1)|fsdp('data')")),
                ("Dense_1/kernel", sr.parse_rule("shard_dim('model', 0)|fsdp('data')")),
            ]
        ),
        sr.FSDPShardingRule("data"),
    ),
}


def large(smoke: bool) -> Iterator[Row]:
    """The ViT, and trees under published rules, whose specs alone are left."""
    mesh = sr.mesh_shape("data:16,model:8")
    for name, rules in VIT_STRATEGIES.items():
        yield forgotten(f"vit_l16, {name}", sr.CompositeShardingRule(*rules), vit(), mesh)
    for tree in TOY_TREES if smoke else TREES:
        if tree.name in ("llama_405b", "deepseek_v3"):
            model = tree.build()
            yield forgotten(f"{tree.name}, published", sr.RegexShardingRule(tree.rules), model, mesh)
            yield forgotten(f"{tree.name}, fsdp", sr.FSDPShardingRule(("data", "model")), model, mesh)
            both = sr.RegexShardingRule(tree.rules) | sr.FSDPShardingRule("data")
            yield forgotten(f"{tree.name}, both", both, model, mesh)


def forgotten(name: str, rule: sr.ShardingRule, tree: Any, mesh: Any) -> Row:
    """The rules of the specs that a rule gives."""
    return row_of(name, sr.SpecTreeShardingRule(rule.plan(tree, mesh).check().specs).plan(tree, mesh), tree)


def planned(name: str, smoke: bool, time_limit: float) -> Row:
    """The rules of a plan of `autoplan`."""
    build: Callable[[int, bool], Any] = (MODELS | KINDS)[name].build
    step, args = build(8, smoke)
    plan = sr.autoplan(step, *args, mesh=sr.mesh_shape(MESH), time_limit=time_limit)
    return row_of(name, plan.plan, args)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="How long the rules of plans are.")
    parser.add_argument("--smoke", action="store_true", help="toy models")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    parser.add_argument("--models", nargs="*", help="only these models and kinds; none with nothing behind it")
    parser.add_argument("--no-large", action="store_true", help="without the trees that are not planned here")
    parser.add_argument("--rules", action="store_true", help="print the rules, too")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each search (default: 60)")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    names = options.models if options.models is not None else TOYS if options.smoke else (*MODELS, *KINDS)
    if unknown := [name for name in names if name not in MODELS | KINDS]:
        parser.error(f"unknown model {', '.join(unknown)}; the models are {', '.join(MODELS | KINDS)}")
    out = sys.stderr if options.json else sys.stdout
    print(f"{'plan':<28}{'leaves':>8}{'rules':>7}{'ms':>9}  equal", file=out)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        equal = "yes" if row.is_equal else "NO"
        print(
            f"{row.name:<28}{row.leaves:>8,}{row.rules:>7}{1e3 * row.seconds:>9.1f}  {equal}"
            f"{'' if row.is_met or options.smoke else '  missed'}",
            file=out,
            flush=True,
        )
        for line in row.text if options.rules else ():
            print(f"    {line}", file=out)

    for row in () if options.no_large else large(options.smoke):
        add(row)
    for name in names:
        add(planned(name, options.smoke, options.time_limit))
        jax.clear_caches()
    if options.json:
        print(json.dumps({"jax": jax.__version__, "rows": [attrs.asdict(row) for row in rows]}))
    return int(options.check and not all(row.is_met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
