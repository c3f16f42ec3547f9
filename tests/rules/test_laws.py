"""Laws that hold for every rule, on every mesh, for every tree of the zoo."""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.core.patterns import backtracks
from tests import zoo
from tests.zoo import MESHES, ON_DEVICES, RULES, TREES

REPOSITORY = Path(__file__).parents[2]

Outcome: TypeAlias = sr.ShardingPlan | str
"""A plan, or the text of the error that planning raised."""

REFUSALS = (sr.errors.PlanError, sr.errors.NoMeshError)
"""The errors that a rule may raise. A PlanError lists all leaves that it cannot decide."""


def outcome(rule: sr.ShardingRule, tree: Any, mesh: AnyMesh | None) -> Outcome:
    """Returns the plan, or its error as text."""
    try:
        return rule.plan(tree, mesh)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"


def plan_contents(plan: Outcome) -> Any:
    """Returns everything in a plan, in a form that can be compared."""
    if isinstance(plan, str):
        return plan
    return plan, [str(finding) for finding in plan.findings], plan.fingerprint, plan.memory(), plan.counts and str(plan)


@contextlib.contextmanager
def in_force(mesh: AnyMesh) -> Iterator[None]:
    """A context with this mesh in force, with devices or without."""
    with jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh):
        yield


def sizes(mesh: AnyMesh | None) -> tuple[tuple[str, int], ...]:
    """Returns the shape of a mesh."""
    return () if mesh is None else tuple(mesh.shape.items())


# ---- a rule on its own ----


@pytest.mark.parametrize("name", RULES)
def test_rules_are_frozen_values(name: str) -> None:
    rule = RULES[name]()
    assert rule == rule
    assert len({rule, RULES[name]()}) == 1
    for name in (*(field.name for field in attrs.fields(type(rule))), "reads_index", "something_new"):
        with pytest.raises(attrs.exceptions.FrozenInstanceError, match="can't set attribute"):
            setattr(rule, name, None)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ON_DEVICES])
def test_the_repr_of_a_rule_builds_it_again_and_so_does_pickle(name: str) -> None:
    rule = RULES[name]()
    for again in (eval(repr(rule), {**vars(sr), **vars(zoo), "P": P}), pickle.loads(pickle.dumps(rule))):
        assert again == rule
        assert hash(again) == hash(rule)
        assert repr(again) == repr(rule)
        assert again.reads_index == rule.reads_index
        assert again.parts == rule.parts


def test_no_two_rules_of_the_zoo_are_equal() -> None:
    for (name, make), (other_name, make_other) in itertools.combinations(RULES.items(), 2):
        assert make() != make_other(), (name, other_name)


def test_every_rule_splits_something_somewhere() -> None:
    idle = []
    for name in RULES:
        plans = (outcome(RULES[name](), TREES[tree](), MESHES["cube"]()) for tree in TREES)
        used = (axis for plan in plans if not isinstance(plan, str) for _, _, spec in plan.planned() for axis in spec)
        if not any(axis is not None for axis in used):
            idle.append(name)
    assert sorted(idle) == ["chain_clash", "composite_empty", "memory_tree_wide", "regex_error", "replicate"]


# ---- a rule, a mesh and a tree ----

# Each rule meets a quarter of the trees, and each tree a quarter of the rules.
PAIRS = pytest.mark.parametrize(
    ("rule", "tree"),
    [
        (rule, tree)
        for (row, rule), (column, tree) in itertools.product(enumerate(RULES), enumerate(TREES))
        if (row + column) % 4 == 0
    ],
)


@pytest.mark.sample(150)
@PAIRS
def test_plans_obey_the_laws(rule: str, tree: str) -> None:
    """Rank, axes, divisibility, structure, static leaves, JSON, shapes for arrays, and grouping."""
    how, what = RULES[rule](), TREES[tree]()
    shapes = zoo.as_shapes(what)
    before = [id(leaf) for leaf in zoo.arrays(what)]
    alike: dict[Any, list[tuple[str, Any]]] = {}
    for name in MESHES:
        mesh = MESHES[name]()
        plan = outcome(how, what, mesh)
        text = plan if isinstance(plan, str) else plan.fingerprint
        same = alike.setdefault(sizes(mesh), [])
        same.append((name, text))
        if len(same) > 1:  # of meshes of equal shape only the first needs all checks
            continue
        assert plan_contents(outcome(zoo.EachLeaf(how), what, mesh)) == plan_contents(plan), (
            f"grouping changes the plan on {name}"
        )
        assert plan_contents(outcome(how, shapes, mesh)) == plan_contents(plan), (
            f"shapes give a different plan than arrays on {name}"
        )
        if isinstance(plan, str):
            assert_names_a_leaf(plan, what)
        else:
            assert_sound_or_reported(plan, what)
            assert_kept_as_json(plan, what)
    for same in alike.values():
        assert len({text for _, text in same}) == 1, f"meshes of equal shape give different plans: {same}"
    assert [id(leaf) for leaf in zoo.arrays(what)] == before


@pytest.mark.sample(12)
@pytest.mark.parametrize("rule", RULES)
def test_apply_gives_the_specs_of_the_plan(rule: str) -> None:
    how = RULES[rule]()
    meshes = itertools.cycle(("cube", "devices_auto", "devices_explicit", "devices_mixed"))
    for name, tree in zip(itertools.islice(meshes, list(RULES).index(rule) % 4, None), TREES, strict=False):
        what = TREES[tree]()
        with in_force(MESHES[name]()):
            plan = outcome(how, what, None)
            if isinstance(plan, str):
                if isinstance(how, sr.LeavesShardingRule):
                    with pytest.raises(REFUSALS, match=re.escape(plan.partition(": ")[2])):
                        how.apply(what)
            elif isinstance(how, sr.LeavesShardingRule):
                assert same_tree(how.apply(what), plan.specs), (tree, name)
            if how.mesh is None:  # else the plan notes that its mesh came first
                assert outcome(how, what, MESHES[name]()) == plan, (tree, name)


@pytest.mark.sample(12)
@pytest.mark.parametrize("rule", RULES)
def test_without_a_mesh_a_rule_plans_or_raises(rule: str) -> None:
    how = RULES[rule]()
    for name in TREES:
        what = TREES[name]()
        plan = outcome(how, what, None)
        assert plan_contents(outcome(zoo.EachLeaf(how), what, None)) == plan_contents(plan), name
        if isinstance(plan, str):
            assert plan.startswith(("PlanError: ", "NoMeshError: ")), name
            assert_names_a_leaf(plan, what)
        else:
            assert_sound_or_reported(plan, what)
            assert_kept_as_json(plan, what)


def shortest(specs: Any) -> Any:
    """Specs as `canonical` writes them; static leaves as they are."""
    return jax.tree.map(
        lambda spec: sr.specs.canonical(spec) if isinstance(spec, P) else spec,
        specs,
        is_leaf=lambda node: isinstance(node, P),
    )


def same_tree(tree: Any, other: Any) -> bool:
    """Returns whether trees of specs have the same structure, equal specs, and otherwise identical leaves."""
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(a == b if isinstance(a, P) else a is b for a, b in pairs)


def assert_sound_or_reported(plan: sr.ShardingPlan, tree: Any) -> None:
    """Each leaf has a spec that is valid for its array and the mesh, or a finding says what is wrong with it."""
    codes = [finding.code for finding in plan.findings]
    shape = dict(sizes(plan.mesh))
    leaves = zoo.arrays(tree)
    specs = jax.tree.structure(tree, is_leaf=lambda node: any(node is leaf for leaf in leaves)).flatten_up_to(
        plan.specs
    )
    kept = iter(plan.paths)
    for leaf, spec in zip(leaves, specs, strict=True):
        array = leaf.unbox() if hasattr(leaf, "unbox") else leaf
        if not (hasattr(array, "shape") and hasattr(array, "dtype")) or isinstance(array, type):
            assert spec == P() if isinstance(array, int | float | complex) else spec is leaf
            continue
        assert isinstance(spec, P)
        decision = plan.decision(next(kept))
        assert spec == (decision.blank if decision.spec is None else decision.spec)
        assert sr.specs.same(decision.blank, P())
        assert len(spec.partitions) <= array.ndim or "rank-overflow" in codes
        names = [part for part in spec.partitions[: array.ndim] if part is not None and part is not P.UNCONSTRAINED]
        split = [(part,) if isinstance(part, str) else part for part in names]
        flat = [axis for part in split for axis in part]
        assert len(set(flat)) == len(flat) or "duplicate-axis" in codes
        for dim, part in zip(array.shape, spec.partitions, strict=False):
            if part is None or part is P.UNCONSTRAINED or plan.mesh is None:
                continue
            axes = (part,) if isinstance(part, str) else part
            if all(axis in shape for axis in axes):
                assert dim % int(np.prod([shape[axis] for axis in axes])) == 0 or "indivisible" in codes
            else:
                assert "unknown-axis" in codes
    assert next(kept, None) is None
    assert (not any(finding.severity == "error" for finding in plan.findings)) == is_sound(plan)


def is_sound(plan: sr.ShardingPlan) -> bool:
    """Returns whether `check` lets the plan pass."""
    try:
        return plan.check() is plan
    except sr.errors.PlanError:
        return False


def assert_kept_as_json(plan: sr.ShardingPlan, tree: Any) -> None:
    """JSON and back gives an equal plan, and with the tree the same specs."""
    text = plan.to_json()
    again = sr.ShardingPlan.from_json(text)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.fingerprint == plan.fingerprint == json.loads(text)["fingerprint"]
    assert [*map(str, again.findings)] == [*map(str, plan.findings)]
    assert str(again.memory()) == str(plan.memory())
    if tree is None:  # from_json takes this as "no tree"
        return
    bound = sr.ShardingPlan.from_json(text, tree)
    assert bound == plan
    assert same_tree(shortest(bound.specs), shortest(plan.specs))  # JSON does not keep how "no opinion" is written
    assert again.paths == bound.paths or sorted(again.paths) == sorted(bound.paths)


def assert_names_a_leaf(text: str, tree: Any) -> None:
    """An error names at least one leaf of the tree, unless it is about the tree as a whole."""
    if "no assignment fits" in text:
        return
    paths = [re.sub(r"(?<![^/])\d+(?![^/])", "*", path) for path in sr.leaf_paths(tree)]
    assert any(path in re.sub(r"(?<![^/\s])\d+(?![^/\s:])", "*", text) for path in paths), text


# ---- rules that promise more ----

SOUND = ("auto", "auto_all", "auto_reverse", "fsdp_all", "memory", "memory_tree", "replicate", "user_leaf")
"""Rules that only split what divides: their plans have no errors, whatever the tree."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", [*SOUND, "fitted", "fitted_dim", "fitted_fsdp", "fitted_auto", "nested"])
def test_rules_that_look_at_sizes_give_sound_plans(rule: str) -> None:
    how = RULES[rule]()
    for (tree, make), mesh in itertools.product(
        TREES.items(), ("grid", "cube", "ones", "alone", "pod", "devices_explicit")
    ):
        plan = outcome(how, make(), MESHES[mesh]())
        if isinstance(plan, str):
            lacks = "unknown axis" in plan and not isinstance(how, sr.FittedShardingRule)  # it drops missing axes
            assert "no assignment fits" in plan or lacks, (tree, mesh)
        else:
            errors = [finding for finding in plan.findings if finding.severity == "error"]
            assert [finding.code for finding in errors if finding.code != "over-budget"] == [], (tree, mesh)


def test_wrapping_a_single_rule_changes_nothing() -> None:
    """A composite, a chain or a fit of a single sound rule gives the plan of that rule."""
    for rule, tree in itertools.product(SOUND, ("model", "params", "structs", "dtypes", "logically_partitioned")):
        how, what, mesh = RULES[rule](), TREES[tree](), MESHES["grid"]()
        plan = outcome(how, what, mesh)
        for around in (sr.CompositeShardingRule, sr.ChainShardingRule, sr.FittedShardingRule, zoo.EachLeaf):
            other = outcome(around(how), what, mesh)
            assert plan_contents(other) == plan_contents(plan), (rule, tree, around)


# ---- processes ----


def report() -> str:
    """Returns, for every rule, the fingerprint, a hash and the repr of its plan; called in a process of its own."""
    lines = {}
    tree, mesh = TREES["structs"](), sr.mesh_shape("data:64,model:64")
    for name in RULES:
        if name in ON_DEVICES:
            continue
        plan = outcome(RULES[name](), tree, mesh)
        summary = plan if isinstance(plan, str) else plan.fingerprint
        full = plan if isinstance(plan, str) else f"{plan.to_json()}{plan}{plan.memory()}{plan.explain('w')}"
        lines[name] = [summary, hashlib.sha256(full.encode()).hexdigest(), repr(RULES[name]())]
    return json.dumps(lines)


def run(code: str, **environment: str) -> str:
    """Runs Python in a process of its own, and returns its output."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_plans_are_the_same_under_every_hash_seed_and_need_no_backend() -> None:
    code = """
from jax._src import xla_bridge
from tests.rules.test_laws import report

print(report())
assert not xla_bridge.backends_are_initialized()
"""
    seeds = [str(seed) for seed in range(5)]  # the order of a set of two differs in some of them, but for 1 in 16
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda seed: run(code, PYTHONHASHSEED=seed), seeds))
    plans = json.loads(texts[0])
    assert len(plans) == len(RULES) - len(ON_DEVICES)
    for seed, text in zip(seeds, texts, strict=True):
        differ = [name for name, lines in json.loads(text).items() if lines != plans[name]]
        assert differ == [], f"PYTHONHASHSEED={seed}"
    assert json.loads(report()) == plans  # and in this process, whose backend is up


# ---- random trees, random patterns ----

WIDTHS = st.sampled_from([(8, 4), (8, 6), (16,), ()])
LEAVES = st.builds(
    lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype), WIDTHS, st.sampled_from([np.float32, np.int8])
)


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers: dicts, and lists of equal layers with perhaps one that differs."""
    names = st.sampled_from(["w", "b", "w1", "a10", "0", "1", "07", "10", "#", "x_2", "layers"])
    equal = st.builds(lambda child, count: [child] * count, children, st.integers(0, 12))
    unequal = st.builds(
        lambda child, other, count, position: [other if i == position else child for i in range(count)],
        children,
        children,
        st.integers(1, 12),
        st.integers(0, 11),
    )
    return st.dictionaries(names, children, max_size=4) | equal | unequal | st.lists(children, max_size=3).map(tuple)


RANDOM_TREES = st.recursive(LEAVES, nodes, max_leaves=5)

SNIPPETS = r"""
w b a layers _ / / 0 1 10 w1 a1 # ^ $ . .* .+ \d \d+ \d* \w+ \D \b \. w\d
[0-9] [0-9]+ [^/]+ [1-5] [^0-9] [\w.-]+ [!-~] (^|/)
"""
ATOMS = st.sampled_from(SNIPPETS.split())
QUANTIFIERS = st.sampled_from(["", "", "", "", "+", "*", "?", "{2}", "{1,2}", "+?"])
PIECES = st.builds(lambda atom, repeat: f"(?:{atom}){repeat}" if repeat else atom, ATOMS, QUANTIFIERS)
SEQUENCES = st.lists(PIECES, min_size=1, max_size=4).map("".join)
RANDOM_PATTERNS = (
    st.lists(SEQUENCES, min_size=1, max_size=2).map("|".join).filter(lambda text: not backtracks(re.compile(text)))
)
RANDOM_VALUES = st.sampled_from([P(), P("data"), P(None, "data"), P("model"), None, sr.FSDPShardingRule("data", 0)])


@given(
    tree=RANDOM_TREES,
    rules=st.lists(st.tuples(RANDOM_PATTERNS, RANDOM_VALUES), max_size=3),
    match=st.sampled_from(["search", "match", "fullmatch"]),
    unmatched=st.sampled_from(["skip", "replicate", "error"]),
    size=st.sampled_from([0, 20]),
)
def test_grouping_never_changes_a_result(tree: Any, rules: Any, match: Any, unmatched: Any, size: int) -> None:
    if any(pattern.startswith("/") for pattern, _ in rules):
        match = "search"  # no other function accepts a pattern that begins with a slash
    rule = sr.RegexShardingRule(rules, match, unmatched, size)
    for how in (rule, sr.FittedShardingRule(rule), rule | zoo.RowsRule("data"), sr.CompositeShardingRule(rule, rule)):
        plan = outcome(how, tree, MESHES["grid"]())
        assert plan_contents(outcome(zoo.EachLeaf(how), tree, MESHES["grid"]())) == plan_contents(plan)


@given(tree=RANDOM_TREES, name=st.sampled_from([name for name in RULES if name not in ON_DEVICES]))
def test_plans_of_random_trees_obey_the_laws(tree: Any, name: str) -> None:
    how = RULES[name]()
    for mesh in (MESHES["grid"](), MESHES["cube"]()):
        plan = outcome(how, tree, mesh)
        assert plan_contents(outcome(zoo.EachLeaf(how), tree, mesh)) == plan_contents(plan)
        if not isinstance(plan, str):
            assert_sound_or_reported(plan, tree)
            assert_kept_as_json(plan, tree)
