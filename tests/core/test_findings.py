"""Every finding there is: its code, its severity, where it points, and what it says to do."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import attrs
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.check import check_spec
from shardrules.core.finding import listing, merged, template
from shardrules.core.text import bytes_text

MESH = sr.mesh_shape("data:4,model:2")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pin(spec: P, *shape: int) -> sr.ShardingPlan:
    """A plan that gives the arrays of five layers one spec."""
    return sr.SpecTreeShardingRule({"layers": spec}).plan(layers(*shape), MESH)


def layers(*shape: int, count: int = 5) -> Any:
    return {"layers": [{"w": f32(*shape)} for _ in range(count)]}


def boxed() -> Any:
    return {"layers": [{"w": nn.Partitioned(np.ones((8, 4)), ("embed", "mpl"))} for _ in range(5)]}  # pyright: ignore[reportArgumentType]


REGEX = sr.RegexShardingRule
ONE_GB = f32(16384, 16384)


@final
@attrs.frozen
class Case:
    """A plan with a finding, and what the finding must say. `message` and `remedy` are patterns."""

    plan: Callable[[], sr.ShardingPlan]
    severity: str
    code: str
    path: str
    message: str
    remedy: str
    shape: tuple[int, ...] | None = None
    dim: int | None = None
    axis: str | None = None
    count: int = 1


CASES: dict[str, Case] = {
    "a dead pattern": Case(
        lambda: REGEX([("w", P("data")), ("bais", P())]).plan(layers(8, 4), MESH),
        "warning",
        "dead-pattern",
        "",
        "pattern 'bais' matches none of the leaves",
        "Correct it, or remove it",
    ),
    "a dead shape": Case(
        lambda: sr.ShapeBasedShardingRule({(None, 4): P("data"), (3, 3): P()}).plan(layers(8, 4), MESH),
        "warning",
        "dead-pattern",
        "",
        r"no array .* has shape \(3, 3\)",
        "Correct the pattern, or remove it",
    ),
    "a shadowed pattern": Case(
        lambda: REGEX([("layers", P("data")), ("layers/.*/w", P("model"))]).plan({"b": f32(8), **layers(8, 4)}, MESH),
        "warning",
        "shadowed-pattern",
        "",
        "every leaf that pattern 'layers/.*/w' matches is matched by an earlier pattern",
        "Move it before the patterns that match its leaves, or remove it",
    ),
    "a rule that is never asked": Case(
        lambda: sr.CompositeShardingRule(sr.ReplicateShardingRule(), REGEX([("w", P("data"))])).plan(layers(8), MESH),
        "note",
        "shadowed-rule",
        "",
        "every leaf is decided before RegexShardingRule applies",
        "Remove it, unless it is for other trees",
    ),
    "a shadowed shape": Case(
        lambda: sr.ShapeBasedShardingRule({(None, 4): P("data"), (8, 4): P()}).plan(layers(8, 4), MESH),
        "warning",
        "shadowed-pattern",
        "",
        r"shape \(8, 4\) is matched by an earlier pattern",
        "Put the narrower pattern first, or remove this one",
    ),
    "a mesh axis that nothing uses": Case(
        lambda: sr.DimShardingRule("data", 0).plan(layers(8, 4), MESH),
        "warning",
        "unused-axis",
        "",
        "no leaf is split over axis 'model' of size 2, so its devices hold 2 copies of everything",
        r"Add a rule such as FSDPShardingRule\('model'\), or remove the axis from the mesh \(data:4,model:2\)",
        axis="model",
    ),
    "an axis twice": Case(
        lambda: pin(P("data", "data"), 8, 8),
        "error",
        "duplicate-axis",
        "layers/*/w",
        r"P\('data', 'data'\) uses axis 'data' twice .*: dimensions 0 and 1",
        "keep the other one whole",
        (8, 8),
        1,
        "data",
        count=5,
    ),
    "an axis twice in one dimension": Case(
        lambda: pin(P(("data", "model", "data")), 64, 8),
        "error",
        "duplicate-axis",
        "layers/*/w",
        "uses axis 'data' twice",
        "An axis can split only one dimension",
        (64, 8),
        0,
        "data",
        count=5,
    ),
    "a spec that is too long": Case(
        lambda: pin(P("data", None, "model"), 8, 8),
        "error",
        "rank-overflow",
        "layers/*/w",
        r"P\('data', None, 'model'\) has 3 entries, the array has 2 dimensions",
        "Write 2 entries, or apply the rule to fewer leaves",
        (8, 8),
        count=5,
    ),
    "a spec that is too long and splits nothing": Case(
        lambda: pin(P(None, None), 8),
        "error",
        "rank-overflow",
        "layers/*/w",
        r"P\(None, None\) has 2 entries, the array has 1 dimensions",
        "Write 1 entries",
        (8,),
        count=5,
    ),
    "an unknown axis": Case(
        lambda: pin(P(None, "modle"), 8, 8),
        "error",
        "unknown-axis",
        "layers/*/w",
        r"unknown axis 'modle' \(did you mean 'model'\?\); the mesh has data, model",
        "Correct the name, or wrap the rule in FittedShardingRule",
        (8, 8),
        1,
        "modle",
        count=5,
    ),
    "an unknown axis like no other": Case(
        lambda: pin(P("zz"), 8, 8),
        "error",
        "unknown-axis",
        "layers/*/w",
        "unknown axis 'zz'; the mesh has data, model",
        "Correct the name",
        (8, 8),
        0,
        "zz",
        count=5,
    ),
    "a dimension that does not divide": Case(
        lambda: pin(P(None, "data"), 8, 15),
        "error",
        "indivisible",
        "layers/*/w",
        r"Array shape \(8, 15\) not divisible by mesh axis data size 4: dimension 1 is 15, remainder 3",
        "Make it a multiple of 4, split another dimension, or wrap the rule in FittedShardingRule",
        (8, 15),
        1,
        "data",
        count=5,
    ),
    "a dimension that two axes do not divide": Case(
        lambda: pin(P(("data", "model")), 12, 8),
        "error",
        "indivisible",
        "layers/*/w",
        r"Array shape \(12, 8\) not divisible by mesh axis data x model size 8: dimension 0 is 12, remainder 4",
        "Make it a multiple of 8",
        (12, 8),
        0,
        count=5,
    ),
    "what JAX would weaken": Case(
        lambda: pin(P(("data", "model")), 12, 8),
        "warning",
        "weakened",
        "layers/*/w",
        r"a constraint inside jit would silently become P\('data'\): \('data', 'model'\) does not divide dimension 0",
        r"Write P\('data'\) if that is what you want",
        (12, 8),
        0,
        count=5,
    ),
    "an undecided gigabyte": Case(
        lambda: REGEX([]).plan(layers(16384, 16384), MESH),
        "warning",
        "large-replicated",
        "layers/*/w",
        "1.0 GiB on every device, and no rule asks for it",
        "Split it .*, or add ReplicateShardingRule",
        (16384, 16384),
        count=5,
    ),
    "an undecided leaf": Case(
        lambda: REGEX([("b", P("data"))]).plan({"b": f32(8), **layers(3)}, MESH),
        "note",
        "unmatched",
        "layers/*/w",
        "no rule has an opinion, so it is replicated: no pattern matches",
        r"Add a rule for it, or ReplicateShardingRule\(\)",
        (3,),
        count=5,
    ),
    "an array that cannot fit": Case(
        lambda: sr.MemoryConstrainedShardingRule(8).plan(layers(7, 8), MESH),
        "error",
        "over-budget",
        "layers/*/w",
        "with one axis for each dimension a device holds at least 56 bytes, more than the limit of 8",
        "Raise max_memory_per_device to 56 or more, or use a larger mesh",
        (7, 8),
        count=5,
    ),
    "a pin where nothing is": Case(
        lambda: sr.SpecTreeShardingRule({"layers": [{"ww": P("data")}]}).plan(layers(8, 4, count=1), MESH),
        "warning",
        "dead-pin",
        "layers/0/ww",
        r"P\('data'\) is pinned at 'layers/0/ww', where the tree has no leaf \(did you mean 'layers/0/w'\?\)",
        "Correct the path, or remove the pin",
    ),
    "two meshes": Case(
        lambda: sr.AutoShardingRule(sr.mesh_shape("data:2")).plan(layers(8, 4), MESH),
        "warning",
        "mesh-ignored",
        "",
        r"the rule's own mesh \(data:2\) is used, not the one passed to plan \(data:4,model:2\)",
        "Pass the mesh in one place",
    ),
    "an axis dropped because the mesh lacks it": Case(
        lambda: sr.FittedShardingRule(REGEX([("w", P("modle", "data"))])).plan({"w": f32(8, 8)}, MESH),
        "warning",
        "fitted",
        "w",
        r"unknown axis 'modle' \(did you mean 'model'\?\): dropped from dimension 0",
        "Correct the inner rule",
        (8, 8),
        0,
        "modle",
    ),
    "an axis dropped because it does not divide": Case(
        lambda: sr.FittedShardingRule(REGEX([("w", P(None, ("model", "data")))])).plan(layers(8, 6), MESH),
        "warning",
        "fitted",
        "layers/*/w",
        "axis 'data' of size 4 does not divide what remains of 6: dropped from dimension 1",
        "Correct the inner rule",
        (8, 6),
        1,
        "data",
        count=5,
    ),
    "entries cut": Case(
        lambda: sr.FittedShardingRule(REGEX([("w", P("data", None))])).plan({"w": f32(8)}, MESH),
        "warning",
        "fitted",
        "w",
        r"P\('data', None\) has 2 entries for 1 dimensions: the last were cut",
        "Correct the spec",
        (8,),
    ),
    "a dimension that is not there": Case(
        lambda: sr.DimShardingRule("data", 1, ignore_ndim_error=True).plan(layers(8), MESH),
        "warning",
        "no-such-dim",
        "layers/*/w",
        r"Cannot shard_dim\(data, 1\): .*it has 1 dimensions",
        "Apply the rule to fewer leaves",
        (8,),
        1,
        count=5,
    ),
    "a logical axis that the mapping lacks": Case(
        lambda: sr.LogicalShardingRule({"embed": "data", "mlp": "model"}).plan(boxed(), MESH),
        "warning",
        "unknown-logical-axis",
        "layers/*/w",
        r"logical axis 'mpl' \(did you mean 'mlp'\?\) is not in the mapping, so dimension 1 stays whole",
        "Add it to the mapping; 'mpl': None keeps it whole",
        (8, 4),
        1,
        count=5,
    ),
    "a logical axis whose mesh axis another has": Case(
        lambda: sr.LogicalShardingRule({"embed": "data", "mpl": "data"}).plan({"w": boxed()["layers"][0]["w"]}, MESH),
        "warning",
        "lost-logical-axis",
        "w",
        "'embed' and 'mpl' both map to mesh axis 'data', and 'embed' comes first, so dimension 1 stays whole",
        r"Map one of them to another axis; \('mpl', None\) at the end keeps it whole",
        (8, 4),
        1,
        "data",
    ),
    "an axis that no leaf showed to be missing": Case(
        lambda: sr.FittedShardingRule(sr.AutoShardingRule(axis_names=["modle"])).plan({"w": f32(8)}, MESH),
        "warning",
        "fitted",
        "",
        r"unknown axis 'modle' \(did you mean 'model'\?\): the inner rule ignores it",
        "Correct the inner rule",
        axis="modle",
    ),
    "a limit that other rules broke": Case(
        lambda: sr.CompositeShardingRule(
            REGEX([("a", sr.MemoryConstrainedShardingRule(64, scope="tree"))]), sr.ReplicateShardingRule()
        ).plan({"a": f32(16), "b": f32(16)}, MESH),
        "error",
        "over-budget",
        "",
        "all arrays together take 128 bytes per device, the limit for the tree is 64",
        "Let the rule with the limit come last in a CompositeShardingRule",
    ),
    "a dimension left to a compiler that is not asked": Case(
        lambda: REGEX([("w", P(None, P.UNCONSTRAINED))]).plan(layers(8, 4, count=1), jax.make_mesh((8,), ("data",))),
        "error",
        "unconstrained",
        "layers/0/w",
        r"P\(None, P.UNCONSTRAINED\) leaves a dimension to the compiler, but all axes of the mesh are Explicit",
        "Write None or an axis for UNCONSTRAINED, or use a mesh with Auto axes",
        (8, 4),
    ),
    "a state that mirrors nothing": Case(
        lambda: pin(P("data"), 8, 8).mirror({"layers": [{"v": f32(7)}] * 5}),
        "note",
        "unmirrored",
        "layers/*/v",
        "mirrors no planned leaf, so it is replicated",
        "put another rule before the mirror",
        (7,),
        count=5,
    ),
    "two leaves with one path": Case(
        lambda: sr.DimShardingRule("data", 0).plan({"a/b": f32(8), "a": {"b": f32(8)}}, MESH),
        "error",
        "ambiguous-path",
        "a/b",
        "2 leaves have this path, since a key has a slash or is empty",
        "Rename one of the keys",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_finding_has_code_path_and_remedy(name: str) -> None:
    case = CASES[name]
    plan = case.plan()
    matches = [
        finding for finding in plan.findings if finding.code == case.code and re.search(case.message, finding.message)
    ]
    assert len(matches) == 1, plan.findings
    (finding,) = matches
    assert finding.severity == case.severity
    assert finding.path == case.path
    assert re.search(case.remedy, finding.remedy)
    assert (finding.shape, finding.dim, finding.axis) == (case.shape, case.dim, case.axis)
    assert finding.count == case.count
    text = str(finding)
    assert text.startswith(f"{case.severity} {case.code}: ")
    assert text.endswith(f"\n    -> {finding.remedy}")
    assert case.path in text
    if case.severity != "note":
        assert text.splitlines()[0] in str(plan)
    if case.code != "unconstrained":  # a mesh in JSON has no types of axes
        assert text in map(str, sr.ShardingPlan.from_json(plan.to_json()).findings)
    if case.severity == "error":
        with pytest.raises(sr.errors.PlanError, match=re.escape(text.splitlines()[0])):
            plan.check()


def test_every_code_of_the_library_is_shown_here() -> None:
    written = re.compile(r'Finding\(\s*"(?:error|warning|note)",\s*"([a-z-]+)"')
    package = Path(sr.__file__).parent
    # What makes plans; `how.py` resolves what placement functions take.
    files = [
        file for part in ("core", "rules") for file in sorted((package / part).rglob("*.py")) if file.stem != "how"
    ]
    texts = [re.sub(r"```python.*?```", "", file.read_text(), flags=re.DOTALL) for file in files]
    codes = dict.fromkeys(code for text in texts for code in written.findall(text))
    shown = [case.code for case in CASES.values()]
    assert len(codes) > 12
    # A conflict is raised by `plan` itself.
    assert [finding for finding in codes if finding not in shown and finding != "conflict"] == []


def test_check_raises_once_and_lists_all() -> None:
    pairs = [
        ("a", (8, 8), P("data", "data"), "duplicate-axis"),
        ("b", (8, 8), P("data", None, "model"), "rank-overflow"),
        ("c", (8, 8), P(None, "modle"), "unknown-axis"),
        ("d", (8, 15), P(None, "data"), "indivisible"),
    ]
    tree = {name: f32(*shape) for name, shape, *_ in pairs} | {"fine": f32(8)} | layers(7)
    specs = {name: spec for name, _, spec, _ in pairs} | {"fine": P("data"), "layers": P("data")}
    plan = sr.CompositeShardingRule(sr.SpecTreeShardingRule(specs), REGEX([("dead", P())])).plan(tree, MESH)
    with pytest.raises(sr.errors.PlanError, match=r"^the plan has 5 errors \(mesh data:4,model:2\):\n") as caught:
        plan.check()
    findings = [finding for finding in caught.value.findings if isinstance(finding, sr.Finding)]
    expected = [*((code, name, 1) for name, _, _, code in pairs), ("indivisible", "layers/*/w", 5)]
    assert [(finding.code, finding.path, finding.count) for finding in findings] == expected
    assert {finding.severity for finding in findings} == {"error"}
    text = str(caught.value)
    assert text.splitlines()[1:] == listing(findings).splitlines()
    assert "dead-pattern" not in text
    assert "fine" not in text


def test_a_sound_plan_has_no_findings() -> None:
    tree = {"w": f32(8, 8), "b": f32(8), "count": 3, "scale": f32(), "act": jax.nn.relu}
    rule = sr.CompositeShardingRule(REGEX([("w", P("data", "model"))]), sr.ReplicateShardingRule())
    plan = rule.plan(tree, MESH)
    assert plan.findings == ()
    assert plan.check() is plan
    assert rule.plan(tree).findings == ()


def test_errors_come_before_warnings_and_warnings_before_notes() -> None:
    tree = {"a": f32(3), "b": f32(4096, 4096), "c": f32(7), "d": f32(7)}
    plan = REGEX([("c|d", P("data")), ("dead", P())]).plan(tree, MESH)
    order = ["error", "warning", "note"]
    severities = [finding.severity for finding in plan.findings]
    assert severities == sorted(severities, key=order.index)
    assert dict.fromkeys(severities) == dict.fromkeys(order)
    assert [finding.path for finding in plan.findings if finding.severity == "error"] == ["c", "d"]


def test_replicated_on_purpose_is_no_finding() -> None:
    for rule in (sr.ReplicateShardingRule(), REGEX([(".*", P())]), sr.SpecTreeShardingRule({"embed": P()})):
        codes = [finding.code for finding in rule.plan({"embed": ONE_GB}, MESH).findings]
        assert codes == ["unused-axis", "unused-axis"]


@pytest.mark.parametrize(("size", "warned"), [(16 * 2**20 - 4, False), (16 * 2**20, True)])
def test_large_begins_at_16_mib(size: int, warned: bool) -> None:
    codes = [finding.code for finding in REGEX([]).plan({"w": f32(size // 4)}, MESH).findings]
    assert ("large-replicated" in codes) == warned
    assert "unmatched" in codes


def test_what_takes_no_space_is_not_missed() -> None:
    # Scalars, and single elements, may be replicated without a word.
    plan = REGEX([]).plan({"scale": f32(), "one": f32(1, 1), "none": f32(0, 8), "n": 3}, MESH)
    assert plan.findings == ()


def test_axes_of_size_one_need_no_use() -> None:
    plan = sr.DimShardingRule("data", 0).plan({"w": f32(8)}, sr.mesh_shape("data:4,one:1"))
    assert plan.findings == ()


def test_a_safety_net_that_catches_nothing_is_no_finding() -> None:
    plan = REGEX([("w", P("data")), ("b", P("model")), (".*", P())]).plan({"w": f32(8), "b": f32(8)}, MESH)
    assert plan.findings == ()
    last = REGEX([("w", P("data")), ("(b|)", P("model")), ("", P())]).plan({"w": f32(8), "b": f32(8)}, MESH)
    assert last.findings == ()
    middle = REGEX([("w|b", P("data")), (".*", P()), ("", P())]).plan({"w": f32(8), "b": f32(8)}, MESH)
    assert "shadowed-pattern" in [finding.code for finding in middle.findings]
    early = REGEX([(".*", P("data")), ("w", P("model"))]).plan({"w": f32(8), "b": f32(8)}, MESH)
    assert "shadowed-pattern" in [finding.code for finding in early.findings]


def test_rules_whose_equality_is_an_array_may_stand_in_two_places() -> None:
    class Weights(sr.LeafShardingRule):
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __eq__(self, other: object) -> Any:
            return np.ones(2, bool)

        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            return leaf.skip("no opinion")

        def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
            verdict = super().decide_all(leaves)
            return attrs.evolve(verdict, idle=((0, sr.Finding("note", "idle", "matches nothing")),))

    rule = Weights()
    plan = sr.CompositeShardingRule(rule, sr.CompositeShardingRule(rule)).plan({"w": f32(8)}, MESH)
    assert [finding.code for finding in plan.findings].count("idle") == 1


def test_a_pattern_whose_leaves_an_earlier_rule_took_is_found() -> None:
    rule = sr.CompositeShardingRule(REGEX([("w", P("data"))]), REGEX([("layers/./w", P()), ("b", P("model"))]))
    findings = [
        finding for finding in rule.plan({"b": f32(8), **layers(8)}, MESH).findings if "layers/./w" in finding.message
    ]
    assert [finding.severity for finding in findings] == ["warning"]
    assert findings[0].code in ("dead-pattern", "shadowed-pattern")


def test_a_pattern_that_wins_somewhere_is_not_dead() -> None:
    inner = REGEX([("q", P("data")), ("k", P("model"))])
    rule = REGEX([("first", inner), ("second", inner)])
    tree = {"first": {"q": f32(8)}, "second": {"k": f32(8)}}
    assert [finding.code for finding in rule.plan(tree, MESH).findings] == []


def test_pins_that_an_earlier_rule_took_are_not_dead() -> None:
    pins = sr.SpecTreeShardingRule({"a": P("data"), "b": P("model")})
    plan = sr.CompositeShardingRule(REGEX([("a", P("data"))]), pins).plan({"a": f32(8), "b": f32(8)}, MESH)
    assert plan.findings == ()


def test_findings_do_not_depend_on_grouping() -> None:
    # The same leaves, decided together by one rule and one by one by the other.
    tree = layers(7, 4) | {"b": f32(4096, 4096)}
    together = REGEX([("layers", P("data")), ("dead", P())]).plan(tree, MESH)
    single = sr.CompositeShardingRule(REGEX([("layers", P("data")), ("dead", P())]), REGEX([("never/0/x", None)])).plan(
        tree, MESH
    )
    assert len(together.kinds) < len(single.kinds)
    assert [finding for finding in single.findings if "never" not in finding.message] == list(together.findings)


def test_two_meshes_of_equal_shape_are_one() -> None:
    real = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    plan = sr.AutoShardingRule(MESH).plan(layers(8, 4), real)
    assert not any(finding.code == "mesh-ignored" for finding in plan.findings)


def test_a_mesh_inside_a_composite_that_is_not_the_one_given_is_found() -> None:
    rule = sr.CompositeShardingRule(sr.AutoShardingRule(sr.mesh_shape("data:2")))
    assert "mesh-ignored" in [finding.code for finding in rule.plan(layers(8, 4), MESH).findings]


# ---- against JAX ----


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((10,), P(("model", "data"))),
        ((12,), P(("data", "model"))),
        ((6,), P("data")),
        ((4, 3), P("data", "model")),
        ((7, 8), P("data", "model")),
        ((4, 4), P(("data", "model"), None)),
        ((8, 6), P(None, ("model", "data"))),
        ((7, 7), P("data", "model")),
        ((10, 3), P(("model", "data"), None)),
    ],
    ids=str,
)
def test_what_is_said_to_be_weakened_is_what_jit_makes_of_it(shape: tuple[int, ...], spec: P) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    findings = [
        finding for finding in check_spec("w", shape, spec, {"data": 4, "model": 2}) if finding.code == "weakened"
    ]
    assert findings
    constrain = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
    if "by part of an axis" in findings[0].message and jax.__version_info__ >= (0, 11):
        with contextlib.suppress(ValueError):  # JAX has no way to say what XLA made of it, or no good one
            sharding = constrain.lower(f32(*shape)).compile().output_shardings
            assert not isinstance(sharding, NamedSharding)
        return
    sharding = constrain.lower(f32(*shape)).compile().output_shardings
    assert isinstance(sharding, NamedSharding)
    for finding in findings:
        match = re.search(r"would silently become (P\(.*?\))[:,] ", finding.message)
        assert match is not None
        weaker = eval(match[1], {"P": P})
        assert NamedSharding(mesh, weaker).is_equivalent_to(sharding, len(shape))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 8), P("data", "data")),
        ((8,), P("data", None)),
        ((8,), P("zz")),
        ((7,), P("data")),
        ((12,), P(("data", "model"))),
    ],
    ids=str,
)
def test_what_is_an_error_here_is_one_for_jax(shape: tuple[int, ...], spec: P) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    assert next(check_spec("w", shape, spec, {"data": 4, "model": 2})).severity == "error"
    with pytest.raises(Exception, match=r"data|zz|divi"):  # JAX's own, of several types
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, 8), P("data", "model")), ((8,), P(("model", "data"))), ((0, 8), P("data")), ((4, 2), P()), ((8,), P(None))],
    ids=str,
)
def test_what_is_sound_here_is_sound_for_jax(shape: tuple[int, ...], spec: P) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    assert list(check_spec("w", shape, spec, {"data": 4, "model": 2})) == []
    assert jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec)).shape == shape


# ---- the values themselves ----


def test_a_finding_is_a_value_with_a_text() -> None:
    finding = sr.Finding("error", "code", "message", "w", "do it", (8, 4), 1, "data", 3, "Rule()")
    assert str(finding) == "error code: w (8, 4) x3: message [Rule()]\n    -> do it"
    assert str(sr.Finding("note", "code", "message")) == "note code: message"
    assert str(sr.Finding("note", "code", "message", shape=())) == "note code: the tree (): message"
    assert hash(finding) == hash(attrs.evolve(finding))
    assert attrs.evolve(finding, dim=0) != finding
    assert listing([finding]) == "  error code: w (8, 4) x3: message [Rule()]\n      -> do it"


def test_findings_of_equal_layers_are_merged() -> None:
    def at(path: str, count: int = 1, dim: int = 0) -> sr.Finding:
        return sr.Finding("note", "code", "message", path, dim=dim, count=count)

    assert [
        (finding.path, finding.count, finding.dim)
        for finding in merged([at("l/0/w"), at("b"), at("l/1/w"), at("l/2/w", dim=1)])
    ] == [
        ("l/*/w", 2, 0),
        ("b", 1, 0),
        ("l/2/w", 1, 1),
    ]
    assert [(finding.path, finding.count) for finding in merged([at("l/0/w", 3), at("l/3/w", 2)])] == [("l/*/w", 5)]


def test_templates_hide_indices_only() -> None:
    paths = ("layers/11/mlp/up", "0", "a/0", "0/a", "conv1/w", "1a/2", "a/01/b", "layers/1/2")
    assert [template(path) for path in paths] == [
        "layers/*/mlp/up",
        "*",
        "a/*",
        "*/a",
        "conv1/w",
        "1a/*",
        "a/*/b",
        "layers/*/*",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (-(2**20), "-1.0 MiB"),
        (2**30, "1.0 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5,000.0 TiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 52, "1,023.9 KiB"),
        (1023.7, "1.0 KiB"),
        (2304, "2.2 KiB"),
    ],
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_a_state_of_optax_has_no_findings_of_its_own() -> None:
    params = {"w": f32(8, 8), "b": f32(8)}
    plan = sr.SpecTreeShardingRule({"w": P("data", "model"), "b": P("data")}).plan(params, MESH)
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    assert plan.mirror(state).findings == ()


# ---- rules around rules ----


@final
@attrs.frozen
class Silent(sr.LeavesShardingRule):
    """A user's rule that asks another rule without naming it in `parts`."""

    inside: sr.ShardingRule

    def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
        return sr.decide(self.inside, leaves)


def test_a_rule_around_another_keeps_its_findings_though_it_does_not_name_it() -> None:
    inner = REGEX([("w", P("data")), ("bais", P())])
    for rule in (Silent(inner), sr.CompositeShardingRule(Silent(inner), sr.ReplicateShardingRule())):
        codes = [finding.code for finding in rule.plan({"w": f32(8), "b": f32(8)}, sr.mesh_shape("data:4")).findings]
        assert codes.count("dead-pattern") == 1


def test_a_limit_for_the_tree_sees_what_other_patterns_decide() -> None:
    tree = {name: f32(64, 64) for name in "abc"}
    limit = sr.MemoryConstrainedShardingRule(2 * 16384, scope="tree")
    for rest in (sr.ReplicateShardingRule(), sr.DimShardingRule("data", 0) | sr.FSDPShardingRule("model", 0)):
        plan = REGEX([("a|b", limit), ("c", rest)]).plan(tree, MESH).check()
        assert plan.memory().device_bytes <= 2 * 16384
        assert plan == REGEX([("a|b", limit), ("c", rest)]).plan(tree, MESH)
    wrapped = sr.FittedShardingRule(sr.CompositeShardingRule(REGEX([("a", limit)])) | sr.ReplicateShardingRule())
    assert "over-budget" in [finding.code for finding in wrapped.plan(tree, MESH).findings]
    one_layer = sr.StackedShardingRule(sr.MemoryConstrainedShardingRule(256, scope="tree"))  # it counts one layer
    assert "over-budget" not in [finding.code for finding in one_layer.plan({"a": f32(64, 64)}, MESH).findings]
