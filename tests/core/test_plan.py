"""Plans: how they print, what they answer, how they travel."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import NoMeshError, PatternError

MESH = sr.mesh_shape("data:16,model:4")
SMALL = sr.mesh_shape("data:4,model:2")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def llama(layers: int = 126) -> Any:
    return {
        "embed": jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16),
        "layers": [
            {"attn": {"q": f32(1024, 1024)}, "mlp": {"up": f32(1024, 4096), "down": f32(4096, 1024)}, "norm": f32(1024)}
            for _ in range(layers)
        ],
        "step": np.int32(0),
    }


RULE = sr.CompositeShardingRule(
    sr.RegexShardingRule([("norm", P()), ("attn/q", P("model", "data")), ("mlp/up", P("data", "model"))]),
    sr.FSDPShardingRule("data", min_size_mb=1),
)

TABLE = """\
path                     shape          dtype     spec                bytes/device  rule               reason
-----------------------  -------------  --------  ------------------  ------------  -----------------  ---------------------------------
embed                    (32768, 1024)  bfloat16  P('data', None)          4.0 MiB  FSDPShardingRule   largest free dim over 'data'
layers/*/attn/q  x126    (1024, 1024)   float32   P('model', 'data')       7.9 MiB  RegexShardingRule  matches 'attn/q'
layers/*/mlp/down  x126  (4096, 1024)   float32   P('data', None)        126.0 MiB  FSDPShardingRule   largest free dim over 'data'
layers/*/mlp/up  x126    (1024, 4096)   float32   P('data', 'model')      31.5 MiB  RegexShardingRule  matches 'mlp/up'
layers/*/norm  x126      (1024,)        float32   P()                    504.0 KiB  RegexShardingRule  matches 'norm'
step                     ()             int32     no opinion                   4 B  -                  no pattern matches; at most 1 MiB
506 arrays, 4.5 GiB in all, 169.9 MiB per device (3.7% of the whole), mesh data:16,model:4"""  # noqa: E501

WITH_FINDINGS = """\
path            shape         dtype    spec        bytes/device  rule               reason
--------------  ------------  -------  ----------  ------------  -----------------  ------------------
b               (8,)          float32  no opinion          32 B  -                  no pattern matches
big             (4096, 4096)  float32  no opinion      64.0 MiB  -                  no pattern matches
layers/*/w  x3  (7, 4)        float32  P('data')           96 B  RegexShardingRule  matches 'layers'
5 arrays, 64.0 MiB in all, 64.0 MiB per device (100.0% of the whole), mesh data:4,model:2

findings: 1 error, 4 warnings, 2 notes
  error indivisible: layers/*/w (7, 4) x3: Array shape (7, 4) not divisible by mesh axis data size 4: dimension 0 is 7, remainder 3
      -> Make it a multiple of 4, split another dimension, or wrap the rule in FittedShardingRule
"""  # noqa: E501


def unsound() -> sr.ShardingPlan:
    tree = {"layers": [{"w": f32(7, 4)} for _ in range(3)], "big": f32(4096, 4096), "b": f32(8)}
    return sr.RegexShardingRule([("layers", P("data")), ("bais", P())]).plan(tree, SMALL)


# ---- the table ----


def test_the_table_groups_equal_layers_and_aligns() -> None:
    assert str(RULE.plan(llama(), MESH)) == TABLE


def test_findings_stand_below_the_totals() -> None:
    text = str(unsound())
    assert text.startswith(WITH_FINDINGS)
    loud = [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ") and "->" not in line]
    assert loud == [
        "error indivisible",
        "warning large-replicated",
        "warning weakened",
        "warning unused-axis",
        "warning dead-pattern",
    ]


def test_layers_that_differ_are_rows_of_their_own() -> None:
    shapes = ((8, 4), (8, 4), (16, 4), (8, 4), (8, 2))
    plan = sr.DimShardingRule("data", 0).plan({"layers": [f32(*shape) for shape in shapes]}, SMALL)
    table = str(plan).split("\n\n")[0].splitlines()
    assert [" ".join(line.split()[:2]) for line in table[2:-1]] == ["layers/* x3", "layers/2 (16,", "layers/4 (8,"]
    dtypes = [jax.ShapeDtypeStruct((8,), dtype) for dtype in (jnp.int8, jnp.int8, jnp.uint8)]
    table = str(sr.DimShardingRule("data", 0).plan(dtypes, SMALL)).splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["*", "2"]


def test_large_tables_are_cut_and_say_how_to_see_all_rows() -> None:
    tree = {f"{'abcdefghij'[index % 10]}{'klmnopqrst'[index // 10 % 10]}x": f32(8, index + 1) for index in range(500)}
    plan = sr.DimShardingRule("data", 0).plan([tree, {f"w{n}": f32(8, 2000 + n) for n in range(1000)}], SMALL)
    count = len(plan.rows)
    assert count > 1000
    lines = str(plan).splitlines()
    assert lines[402] == f"and {count - 400:,} more rows: plan.table() has all"
    assert lines[403] == str(plan.memory())
    assert len(plan.table().splitlines()) == len(lines) + count - 401
    assert f"and {count - 1:,} more rows" in plan.table(1)
    assert f"and {count - 400:,} more rows" in plan._repr_html_()
    other = sr.ReplicateShardingRule().plan([tree, {f"w{n}": f32(8, 2000 + n) for n in range(1000)}], SMALL)
    changes = str(plan.diff(other)).splitlines()
    assert changes[400] == f"and {count - 400:,} more: diff.groups() has all"
    assert len(changes) == 402


def test_rows_do_not_depend_on_what_the_rule_reads_of_indices() -> None:
    reads = sr.RegexShardingRule([("layers/7/", P("data")), ("layers", P("data"))])
    plan = reads.plan(llama(), MESH)
    assert "layers/*/norm  x125" in str(plan)
    assert "layers/7/norm " in str(plan)


@pytest.mark.parametrize(
    ("tree", "mesh", "totals"),
    [
        ({}, SMALL, "0 arrays, 0 B in all, 0 B per device, mesh data:4,model:2"),
        (f32(3), None, "1 array, 12 B in all, 12 B per device (100.0% of the whole), without a mesh"),
        ([f32(1024)] * 1234, SMALL, "1,234 arrays, 4.8 MiB in all, 4.8 MiB per device (100.0% of the whole), mesh"),
        ([f32(0, 3)], SMALL, "1 array, 0 B in all, 0 B per device, mesh data:4,model:2"),
    ],
)
def test_totals_read_well(tree: Any, mesh: AbstractMesh | None, totals: str) -> None:
    plan = sr.ReplicateShardingRule().plan(tree, mesh)
    assert f"\n{totals}" in str(plan)
    assert str(plan.memory()) in str(plan)


def test_a_bare_array_is_called_the_tree() -> None:
    assert "\n(the tree)  (3,)" in str(sr.ReplicateShardingRule().plan(f32(3)))


def test_the_repr_is_one_line() -> None:
    plan = RULE.plan(llama(), MESH)
    assert repr(plan) == (
        "<ShardingPlan 506 arrays, 4.5 GiB in all, 169.9 MiB per device (3.7% of the whole), mesh data:16,model:4, "
        f"{len(plan.findings)} findings, {plan.fingerprint[:12]}>"
    )


def test_html_says_what_the_table_says_and_escapes_it() -> None:
    evil = "<script>alert(\"1\" & '2')</script>"

    @attrs.frozen
    class Evil(sr.LeafShardingRule):
        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            finding = sr.Finding("note", "evil", evil, leaf.path, evil)
            return sr.Decision(P("data"), f"because {evil}", findings=(finding,))

    plan = Evil().plan({evil: f32(8, 4), "w": f32(7, 4)}, SMALL)
    text = plan._repr_html_()
    root = ElementTree.fromstring(f"<div>{text}</div>")
    tags, texts = [element.tag for element in root.iter()], list(root.itertext())
    assert set(tags) == {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li", "pre"}
    assert tags.count("tr") == 1 + 2
    assert tags.count("li") == len(plan.findings)
    for expected in (evil, f"because {evil}", "(8, 4)", "float32", "P('data')", "Evil", "32 B", str(plan.memory())):
        assert expected in texts
    assert [str(finding) for finding in plan.findings] == texts[-len(plan.findings) :]


def test_html_without_findings_has_no_list() -> None:
    text = sr.ReplicateShardingRule().plan({})._repr_html_()
    assert "<ul>" not in text
    assert "<svg" not in text


# ---- specs and shardings ----


def test_specs_have_the_structure_of_the_tree() -> None:
    tree = {"a": [f32(8), (f32(), None)], "n": 3, "f": jax.nn.relu, "s": "name", "z": 1j}
    specs = sr.DimShardingRule("data", 0, ignore_ndim_error=True).plan(tree, SMALL).specs
    assert specs == {"a": [P("data"), (P(), None)], "n": P(), "f": jax.nn.relu, "s": "name", "z": P()}


def test_specs_of_a_module_are_a_module() -> None:
    model = eqx.filter_eval_shape(eqx.nn.MLP, 4, 8, 16, 2, key=jax.random.key(0))
    specs = sr.DimShardingRule("data", 0).plan(model, SMALL).specs
    assert isinstance(specs, eqx.nn.MLP)
    assert specs.layers[0].weight == P("data", None)
    assert specs.activation is model.activation
    assert jax.tree.structure(specs) == jax.tree.structure(model)


def test_shardings_are_for_the_mesh_of_the_plan_or_another() -> None:
    tree = {"w": f32(8, 4), "n": 3}
    plan = sr.DimShardingRule("data", 0).plan(tree, SMALL)
    assert plan.shardings() == {"w": NamedSharding(SMALL, P("data", None)), "n": NamedSharding(SMALL, P())}
    real = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
    placed = jax.device_put({"w": np.ones((8, 4)), "n": 3}, plan.shardings(real))
    assert placed["w"].sharding == NamedSharding(real, P("data", None))
    assert {shard.data.shape for shard in placed["w"].addressable_shards} == {(2, 4)}


def test_shardings_that_cannot_be_are_refused() -> None:
    plan = sr.DimShardingRule("data", 0).plan({"w": f32(8, 4), "v": f32(12)}, SMALL)
    for mesh in ("data:4", 8, ["data"]):
        with pytest.raises(
            sr.errors.AxisTypeError, match=r"a mesh must be a Mesh or an AbstractMesh, got .*mesh_shape"
        ):
            plan.shardings(mesh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(sr.errors.PlanError, match=r"(?s)2 errors.*mesh data:5.*v \(12,\).*w \(8, 4\)"):
        plan.shardings(sr.mesh_shape("data:5"))
    with pytest.raises(sr.errors.PlanError, match=r"(?s)2 errors.*unknown axis 'data'.*unknown axis 'data'"):
        plan.shardings(sr.mesh_shape("rows:4"))
    assert plan.mesh == SMALL
    with pytest.raises(NoMeshError, match=r"shardings need a mesh: pass one, plan.shardings\(mesh\)"):
        sr.DimShardingRule("data", 0).plan({"w": f32(8)}).shardings()


# ---- explain, decision, tally ----


def test_explain_tells_who_decided_and_what_the_others_said() -> None:
    assert RULE.plan(llama(), MESH).explain("layers/7/mlp/up").splitlines() == [
        "layers/7/mlp/up  (1024, 4096) float32  (126 of this kind)",
        "  P('data', 'model'), 256.0 KiB of 16.0 MiB per device",
        "  decided by RegexShardingRule: matches 'mlp/up'",
        "  rule by rule:",
        "    CompositeShardingRule: P('data', 'model'), matches 'mlp/up'",
        "      RegexShardingRule: P('data', 'model'), matches 'mlp/up'",
        "      FSDPShardingRule: not asked; alone it would decide P(None, 'data'), largest free dim over 'data'",
    ]


def test_explain_takes_a_regex_and_gives_one_block_for_each_kind() -> None:
    blocks = RULE.plan(llama(), MESH).explain(r"mlp|^step$").split("\n\n")
    assert [block.split("  ")[0] for block in blocks] == ["layers/0/mlp/down", "layers/0/mlp/up", "step"]
    assert "  decided by -: no pattern matches; at most 1 MiB" in blocks[2].splitlines()
    assert "  no opinion, 4 B of 4 B per device" in blocks[2].splitlines()


def test_explain_takes_a_path_literally_where_there_is_one() -> None:
    plan = sr.ReplicateShardingRule().plan({"w.x": f32(8), "wax": f32(8), "a(": f32(8)})
    assert plan.explain("w.x").count("of this kind") == 1
    assert plan.explain("a(").startswith("a(  (8,)")


def test_explain_shows_what_a_later_rule_of_a_chain_was_shown() -> None:
    rule = sr.DimShardingRule("model", -1) | sr.FSDPShardingRule("data", min_size_mb=0)
    text = rule.plan({"w": f32(8, 8)}, SMALL).explain("w")
    assert "    ChainShardingRule: P('data', 'model')" in text
    assert "      DimShardingRule: P(None, 'model')" in text
    assert "      FSDPShardingRule: P('data', 'model')" in text


def test_explain_of_what_is_not_there_is_an_error_that_helps() -> None:
    plan = RULE.plan(llama(2), MESH)
    with pytest.raises(sr.errors.TreeError, match=r"'layers/0/mlp/upp' \(did you mean 'layers/0/mlp/up'\?\)"):
        plan.explain("layers/0/mlp/upp")
    with pytest.raises(sr.errors.TreeError, match=r"no leaf at 'embod' \(did you mean 'embed'\?\)"):
        plan.decision("embod")
    with pytest.raises(PatternError, match="layers/\\[0"):
        plan.explain("layers/[0")


def test_explain_of_a_plan_from_json_tells_what_was_written() -> None:
    text = sr.ShardingPlan.from_json(RULE.plan(llama(2), MESH).to_json()).explain("layers/1/norm")
    assert text.splitlines() == [
        "layers/1/norm  (1024,) float32  (2 of this kind)",
        "  P(), 4.0 KiB of 4.0 KiB per device",
        "  decided by RegexShardingRule: matches 'norm'",
    ]


def test_a_decision_can_be_asked_for() -> None:
    decision = RULE.plan(llama(), MESH).decision("layers/125/norm")
    assert (decision.spec, decision.reason, decision.rule) == (P(), "matches 'norm'", RULE.rules[0])


def test_a_tally_counts_leaves_by_reason() -> None:
    assert RULE.plan(llama(), MESH).tally() == {
        "FSDPShardingRule: largest free dim over 'data'": 127,
        "RegexShardingRule: matches 'attn/q'": 126,
        "RegexShardingRule: matches 'mlp/up'": 126,
        "RegexShardingRule: matches 'norm'": 126,
        "-: no pattern matches; at most 1 MiB": 1,
    }


# ---- memory ----


def test_memory_counts_every_leaf() -> None:
    memory = RULE.plan(llama(), MESH).memory()
    whole = 2 * 32768 * 1024 + 126 * 4 * (1024 * 1024 + 2 * 4096 * 1024 + 1024) + 4
    device = 2 * 32768 * 1024 // 16 + 126 * 4 * (1024 * 1024 // 64 + 4096 * 1024 * (4 + 1) // 64 + 1024) + 4
    assert (memory.leaf_count, memory.total_bytes, memory.device_bytes) == (506, whole, device)
    assert memory.mesh == MESH


# ---- diff ----


def test_a_diff_with_itself_is_nothing() -> None:
    plan = RULE.plan(llama(3), MESH)
    assert not plan.diff(plan)
    assert not plan.diff(sr.ShardingPlan.from_json(plan.to_json()))
    assert str(plan.diff(plan)) == "no difference"
    assert plan.diff(plan).changes == ()


def test_a_diff_lists_every_leaf_and_prints_groups() -> None:
    old = RULE.plan(llama(3), MESH)
    tree = {**llama(3), "extra": f32(64)}
    del tree["step"]
    rules = [("norm", P()), ("attn/q", P("model", "data")), ("mlp/up", P(None, "model"))]
    new = sr.CompositeShardingRule(sr.RegexShardingRule(rules), RULE.rules[1]).plan(tree, MESH)
    diff = old.diff(new)
    assert diff
    up = [(f"layers/{layer}/mlp/up", (1024, 4096), "P('data', 'model')", "P(None, 'model')") for layer in range(3)]
    assert sorted((change.path, change.shape, change.old, change.new) for change in diff.changes) == [
        ("extra", (64,), "", "P()"),
        *up,
        ("step", (), "P()", ""),
    ]
    assert [(change.old_bytes, change.new_bytes) for change in diff.changes if change.path == "layers/0/mlp/up"] == [
        (1024 * 4096 * 4 // 64, 1024 * 4096 * 4 // 4)
    ]
    assert sorted(str(diff).splitlines()) == [
        "5 leaves differ, +11.3 MiB per device",
        "extra  (64,)  absent -> P()  0 B -> 256 B per device",
        "layers/*/mlp/up  x3  (1024, 4096)  P('data', 'model') -> P(None, 'model')  768.0 KiB -> 12.0 MiB per device",
        "step  ()  P() -> absent  4 B -> 0 B per device",
    ]
    assert repr(diff) == str(diff)


def test_a_diff_tells_that_only_the_mesh_is_another() -> None:
    old, new = (sr.ReplicateShardingRule().plan({"w": f32(8)}, sr.mesh_shape(f"data:{size}")) for size in (2, 4))
    diff = old.diff(new)
    assert diff
    assert diff.changes == ()
    assert str(diff).splitlines()[0] == "mesh data:2 -> data:4"


# ---- fingerprints and equality ----


def one_leaf(
    path: str = "w", shape: tuple[int, ...] = (8, 8), dtype: Any = jnp.float32, **other: Any
) -> sr.ShardingPlan:
    rule = sr.SpecTreeShardingRule({path: other.get("spec", P("data"))})
    return rule.plan({path: jax.ShapeDtypeStruct(shape, dtype)}, sr.mesh_shape(other.get("mesh", "data:4,model:2")))


VARIANTS: dict[str, Callable[[], sr.ShardingPlan]] = {
    "path": lambda: one_leaf(path="v"),
    "shape": lambda: one_leaf(shape=(8, 4)),
    "rank": lambda: one_leaf(shape=(8, 8, 1)),
    "dtype": lambda: one_leaf(dtype=jnp.bfloat16),
    "dtype of equal size": lambda: one_leaf(dtype=jnp.int32),
    "axis": lambda: one_leaf(spec=P("model")),
    "dim": lambda: one_leaf(spec=P(None, "data")),
    "two axes": lambda: one_leaf(spec=P(("data", "model"))),
    "the order of two axes": lambda: one_leaf(spec=P(("model", "data"))),
    "replicated": lambda: one_leaf(spec=P()),
    "unconstrained": lambda: one_leaf(spec=P("data", P.UNCONSTRAINED)),
    "size of an axis": lambda: one_leaf(mesh="data:2,model:2"),
    "size of an axis not used": lambda: one_leaf(mesh="data:4,model:4"),
    "name of an axis": lambda: one_leaf(mesh="data:4,tensor:2"),
    "order of the mesh": lambda: one_leaf(mesh="model:2,data:4"),
    "one more leaf": lambda: sr.SpecTreeShardingRule({"w": P("data")}).plan({"w": f32(8, 8), "b": f32(8)}, SMALL),
    "no leaf": lambda: sr.SpecTreeShardingRule({"w": P("data")}).plan({}, SMALL),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fingerprint_sees_every_change(name: str) -> None:
    plan, other = one_leaf(), VARIANTS[name]()
    assert plan.fingerprint != other.fingerprint
    assert plan != other
    assert plan.diff(other)
    assert other.diff(plan)


def test_all_fingerprints_are_different() -> None:
    fingerprints = [one_leaf().fingerprint, *(variant().fingerprint for variant in VARIANTS.values())]
    assert len(dict.fromkeys(fingerprints)) == len(fingerprints)


def test_a_fingerprint_is_the_same_everywhere() -> None:
    # A change of this value means to every user that all plans have changed.
    assert one_leaf().fingerprint == "7bed8a365bd44c7dc318356da0249715c071eceab3f4b08aca2a48ddc8439d34"


@pytest.mark.parametrize(
    "spec", [P("data"), P("data", None), P(("data",)), P(("data",), None), P(["data"], ())], ids=str
)
def test_a_fingerprint_does_not_see_how_a_spec_is_written(spec: P) -> None:
    assert one_leaf(spec=spec).fingerprint == one_leaf().fingerprint
    assert not one_leaf(spec=spec).diff(one_leaf())


def test_a_fingerprint_does_not_see_who_decided_or_on_what_kind_of_mesh() -> None:
    plan = sr.DimShardingRule("data", 0).plan({"w": np.zeros((8, 8), np.float32)}, SMALL)
    assert plan.fingerprint == one_leaf().fingerprint
    assert plan != one_leaf()  # the reasons differ
    real = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    other = sr.DimShardingRule("data", 0).plan({"w": np.zeros((8, 8), np.float32)}, real)
    assert other.fingerprint == plan.fingerprint
    assert other == plan
    assert hash(other) == hash(plan)


def test_a_fingerprint_does_not_see_the_order_of_a_dictionary_nor_how_leaves_are_grouped() -> None:
    tree = llama(3)
    plan = RULE.plan(tree, MESH)
    assert RULE.plan(dict(reversed(tree.items())), MESH) == plan
    alone = sr.CompositeShardingRule(*RULE.rules, sr.RegexShardingRule([("layers/0/never", P())])).plan(tree, MESH)
    assert alone.fingerprint == plan.fingerprint


def test_fingerprint_and_text_are_the_same_under_every_hash_seed() -> None:
    script = (
        "import jax, jax.numpy as jnp, shardrules as sr\n"
        "from jax.sharding import PartitionSpec as P\n"
        "tree = {'layers': [{n: jax.ShapeDtypeStruct((8, 8), jnp.float32) for n in 'qkvo'} for _ in range(3)]}\n"
        "rule = sr.RegexShardingRule([('q|k', P('data')), ('v', P(None, ('model', 'data'))), ('dead', P())])\n"
        "plan = rule.plan(tree, sr.mesh_shape('data:4,model:2'))\n"
        "print(plan.fingerprint, plan.to_json(), plan, plan.explain('layers'), plan.findings)\n"
    )
    run = [sys.executable, "-c", script]
    started = [
        subprocess.Popen(run, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE) for seed in ("1", "2")
    ]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs[0] == outputs[1]


def test_plans_are_equal_when_they_say_the_same() -> None:
    plan = RULE.plan(llama(2), MESH)
    assert plan == RULE.plan(llama(2), MESH)
    assert hash(plan) == hash(RULE.plan(llama(2), MESH))
    assert plan != RULE.plan(llama(3), MESH)
    assert plan != "a plan"
    no_opinion, on_purpose = (
        rule.plan({"w": f32(8)}, SMALL) for rule in (sr.RegexShardingRule([]), sr.ReplicateShardingRule())
    )
    assert no_opinion != on_purpose
    assert no_opinion.fingerprint == on_purpose.fingerprint  # they place alike


def test_a_plan_is_a_value_without_arrays() -> None:
    plan = RULE.plan({"w": np.ones((8, 8)), "act": jax.nn.relu}, MESH)
    with pytest.raises(attrs.exceptions.FrozenInstanceError, match="can't set attribute"):
        plan.mesh = None  # pyright: ignore[reportAttributeAccessIssue]
    assert [type(leaf) for leaf in plan.leaves] == [sr.Leaf]
    assert plan.kinds == plan.leaves
    assert plan.paths == ("w",)
    assert plan.counts == (1,)


# ---- JSON ----

TREES: dict[str, Callable[[], Any]] = {
    "model": lambda: llama(3),
    "empty": dict,
    "bare": lambda: f32(8),
    "mixed": lambda: {"a": [1, f32(8), jax.nn.relu, None], "b": (np.ones(8), jax.ShapeDtypeStruct((8,), jnp.int4))},
    "module": lambda: eqx.filter_eval_shape(eqx.nn.MLP, 4, 8, 16, 2, key=jax.random.key(0)),
    "state": lambda: jax.eval_shape(optax.adam(1e-3).init, {"w": f32(8), "b": f32(8)}),
}


@pytest.mark.parametrize("name", TREES)
def test_a_plan_comes_back_from_json(name: str) -> None:
    tree = TREES[name]()
    rule = sr.CompositeShardingRule(
        RULE.rules[0], sr.FittedShardingRule(sr.RegexShardingRule([(".*", P(("data", "x")))]))
    )
    plan = rule.plan(tree, SMALL)
    text = plan.to_json()
    assert text == rule.plan(tree, SMALL).to_json()
    for read in (sr.ShardingPlan.from_json(text), sr.ShardingPlan.from_json(text, tree)):
        assert read == plan
        assert hash(read) == hash(plan)
        assert read.fingerprint == plan.fingerprint
        assert read.mesh == plan.mesh
        assert sorted(read.paths) == sorted(plan.paths)
        assert read.memory() == plan.memory()
        assert sorted(read.planned(), key=str) == sorted(plan.planned(), key=str)
        assert not plan.diff(read)
        assert [*map(str, read.findings)] == [*map(str, plan.findings)]
        assert str(read) == str(plan)
        assert sorted(read.as_rule().specs, key=str) == sorted(plan.as_rule().specs, key=str)
        assert read.to_json() == text
    bound = sr.ShardingPlan.from_json(text, tree)
    assert bound.specs == plan.specs
    assert bound.shardings() == plan.shardings()
    assert bound.paths == plan.paths


def test_a_plan_without_a_mesh_comes_back_from_json() -> None:
    plan = sr.RegexShardingRule([("w", P("data"))]).plan({"w": f32(8)})
    assert sr.ShardingPlan.from_json(plan.to_json()) == plan
    assert sr.ShardingPlan.from_json(plan.to_json()).mesh is None


@pytest.mark.parametrize("style", ["attr", "index"])
def test_paths_of_both_styles_come_back_from_json(style: Any) -> None:
    state = TREES["state"]()
    plan = sr.ReplicateShardingRule().plan(state, SMALL, path_style=style)
    assert plan.paths[1] == {"attr": "0/mu/b", "index": "0/1/b"}[style]
    assert sr.ShardingPlan.from_json(plan.to_json()) == plan
    assert sr.ShardingPlan.from_json(plan.to_json(), state).specs == plan.specs
    without = sr.ShardingPlan.from_json(plan.to_json())
    if style == "attr":
        assert sorted(without.planned(), key=str) == sorted(plan.planned(), key=str)
        return
    for use in (without.planned, without.as_rule, lambda: without.mirror(state)):
        with pytest.raises(
            sr.errors.TreeError, match=r"by position, and their names need the tree.*from_json\(text, tree\)"
        ):
            use()


def test_a_plan_read_without_its_tree_says_how_to_get_one() -> None:
    plan = sr.ShardingPlan.from_json(one_leaf().to_json())
    with pytest.raises(sr.errors.PlanError, match=r"from_json\(text, tree\).*plan.as_rule\(\).plan\(tree, mesh\)"):
        _ = plan.specs
    with pytest.raises(sr.errors.PlanError, match=r"from_json\(text, tree\)"):
        plan.shardings()
    assert plan.as_rule().plan({"w": f32(8, 8)}, SMALL).specs == {"w": P("data")}
    assert plan.mirror({"mu": {"w": f32(8, 8)}}).specs == {"mu": {"w": P("data")}}


def test_another_tree_is_refused_and_every_difference_listed() -> None:
    text = RULE.plan(llama(3), MESH).to_json()
    tree = {**llama(2), "embed": jax.ShapeDtypeStruct((32768, 1024), jnp.float32), "more": f32(5), "step": f32(2)}
    with pytest.raises(sr.errors.TreeError, match="the tree differs from the planned one") as caught:
        sr.ShardingPlan.from_json(text, tree)
    assert str(caught.value).splitlines()[1:] == [
        "  embed: (32768, 1024) float32 in the tree, (32768, 1024) bfloat16 in the plan",
        "  more (5,): the plan has no such leaf",
        "  step: (2,) float32 in the tree, () int32 in the plan",
        "  layers/2/attn/q: in the plan, not in the tree",
        "  layers/2/mlp/down: in the plan, not in the tree",
        "  layers/2/mlp/up: in the plan, not in the tree",
        "  layers/2/norm: in the plan, not in the tree",
    ]


# ---- plans as rules ----


def test_a_plan_as_a_rule_decides_as_it_did() -> None:
    tree = llama(3)
    plan = RULE.plan(tree, MESH)
    again = plan.as_rule().plan(tree, MESH)
    assert again.fingerprint == plan.fingerprint
    assert not plan.diff(again)
    assert not any(finding.code == "dead-pin" for finding in again.findings)
    assert again.decision("step").spec is None  # what no rule decided stays undecided
    assert again.decision("layers/0/norm").spec == P()
    rule = plan.as_rule()
    names = {"SpecTreeShardingRule": sr.SpecTreeShardingRule, "P": P}
    assert eval(repr(rule), names) == rule


def test_a_plan_as_a_rule_composes() -> None:
    pins = sr.RegexShardingRule([("embed", P("model"))]).plan(llama(3), MESH).as_rule()
    plan = sr.CompositeShardingRule(pins, RULE).plan(llama(3), MESH)
    assert plan.decision("embed").spec == P("model")
    changed = [change.path for change in RULE.plan(llama(3), MESH).diff(plan).changes]
    assert changed == ["embed"]


# ---- errors ----


def test_errors_that_were_raised_survive_pickling() -> None:
    with pytest.raises(sr.errors.PlanError, match="indivisible") as caught:
        unsound().check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.findings == caught.value.findings
    assert str(again) == str(caught.value)
    leaf = sr.Leaf("w", (8, 4), jnp.float32, SMALL)
    with pytest.raises(sr.errors.RuleError, match="has no dimension 5") as refused:
        leaf.shard(5, "data")
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.path, again.shape, again.why) == ("w", (8, 4), refused.value.why)


def test_findings_and_decisions_survive_pickling() -> None:
    plan = unsound()
    assert pickle.loads(pickle.dumps(plan.findings)) == plan.findings
    assert pickle.loads(pickle.dumps(plan.decisions)) == plan.decisions
    assert pickle.loads(pickle.dumps(plan.as_rule())) == plan.as_rule()


def test_rules_that_cannot_decide_are_listed_at_once() -> None:
    tree = {"layers": [{"w": f32(8, 8), "b": f32(8)} for _ in range(3)], "s": f32()}
    with pytest.raises(sr.errors.PlanError, match="4 leaves cannot be decided") as caught:
        sr.DimShardingRule("data", 1).plan(tree, SMALL)
    assert "layers/*/b (8,) x3: Cannot shard_dim(data, 1)" in str(caught.value)
    assert "s (): Cannot shard_dim(data, 1)" in str(caught.value)
    assert "-> Apply the rule to fewer leaves with RegexShardingRule" in str(caught.value)


def test_what_a_large_plan_shows_is_bounded() -> None:
    names = [f"{index:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for index in range(3_000)]
    tree = {f"{name}z": f32(4, index + 1) for index, name in enumerate(names)}
    plan = sr.DimShardingRule("data", 0).plan(tree, SMALL)
    assert plan.explain(".").endswith("\n\nand 2,600 more kinds: pass the path of one, or a narrower pattern")
    assert len(plan.explain(".")) < 100_000
    assert len(plan._repr_html_()) < 300_000
    picture = sr.picture(plan).to_svg()
    assert "2,000 smaller arrays: 7.6 MiB per device" in picture
    assert "what 3,000 arrays take" in picture
    assert len(picture) < 500_000
    many = sr.mesh_shape(",".join(f"a{index}:2" for index in range(2_000)))
    assert len(str(sr.DimShardingRule("nope", 0).plan(tree, many))) < 70_000
    assert "unknown axis 'nope'; the mesh has a0, " in str(sr.DimShardingRule("nope", 0).plan(tree, many).findings[0])
