"""Specs that are pinned to paths: how they are read from a tree, and the leaves that they decide."""

from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardrules.core.errors import SpecError, printable, shortened, suggest
from shardrules.core.finding import Finding, template
from shardrules.core.leaf import Decision
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.spec import checked_spec, spec_repr
from shardrules.core.tree import array_kind, leaf_paths

Pins = tuple[tuple[str, PartitionSpec | None], ...]
"""Paths with their specs; `None` is no opinion."""

_SUGGESTIONS = 8
"""The dead pins that get a suggestion: each is compared with every leaf. Chosen by hand."""


def as_pinned(specs: Any) -> Pins:
    """Returns a tree of specs, a prefix of one, or pairs, as pairs of path and spec."""
    if isinstance(specs, tuple | list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in specs
    ):
        pairs = list(specs)
    else:
        values, treedef = jtu.tree_flatten(specs, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec))
        # Numbers stand in for the values, since `None` has no path.
        paths = leaf_paths(jtu.tree_unflatten(treedef, [0] * len(values)))
        # `plan.specs` also holds the static leaves of a model: activation functions and the like are skipped.
        pairs = [(path, value) for path, value in zip(paths, values, strict=True) if _is_for_an_array(value)]
    pinned: list[tuple[str, PartitionSpec | None]] = []
    problems: list[str] = []
    for path, value in pairs:
        spec = value.spec if isinstance(value, NamedSharding) else value
        try:
            pinned.append((path, None if spec is None else checked_spec(spec)))
        except SpecError as error:
            problems.append(f"  {printable(path) or 'the tree'}: {error}")
    if problems:
        raise SpecError(
            "SpecTreeShardingRule takes a tree of PartitionSpecs, of NamedShardings, or (path, spec) pairs:\n"
            + "\n".join(shortened(problems))
        )
    return tuple(pinned)


def _is_for_an_array(value: Any) -> bool:
    """A leaf of a tree of specs that says how to place an array. What it says may be invalid."""
    return isinstance(value, PartitionSpec | Sharding | str | int | float) or array_kind(value) is not None


def pinned_verdict(pins: Pins, leaves: Leaves) -> Verdict:
    """Returns the spec that is pinned at each leaf or above it; pins without a leaf are findings."""
    pinned = dict(pins)
    used: dict[str, None] = {}
    decisions: list[Decision] = []
    paths = leaves.attr_paths()
    for leaf, leaf_path in zip(leaves.items, paths, strict=True):
        path = leaf_path
        # The leaf's own pin counts, else the nearest above it: a spec in a prefix is for everything below.
        while path not in pinned and path:
            path = path.rpartition("/")[0]
        spec = pinned.get(path)
        used[path] = None
        decisions.append(leaf.skip("not pinned") if spec is None else leaf.try_refine(spec, "pinned"))
    # A tree of specs usually pins leaves that other rules of a composite have decided already.
    settled = dict.fromkeys(template(leaf.path) for leaf, _ in leaves.settled)
    unused = [path for path in pinned if path not in used and template(path) not in settled]
    findings: list[Finding] = []
    for position, path in enumerate(unused):
        suggestion = suggest(path, paths) if position < _SUGGESTIONS else ""
        message = f"{spec_repr(pinned[path])} is pinned at {path!r}, where the tree has no leaf{suggestion}"
        remedy = "Correct the path, or remove the pin"
        findings.append(Finding("warning", "dead-pin", message, path, remedy, rule="SpecTreeShardingRule"))
    return Verdict(tuple(decisions), tuple(findings))
