"""A plan for another tree of the same paths and shapes: new values, or the tree of a plan that was read from JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shardrules.core.errors import TreeError, printable, shortened
from shardrules.core.finding import shape_text
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.tree import Survey, survey


def bind_decisions(
    tree: Any,
    tree_survey: Survey,
    kind_by_path: Mapping[str, int],
    kinds: Sequence[Leaf],
    decisions: Sequence[Decision],
    *,
    dtypes: bool,
) -> tuple[Survey, tuple[Decision, ...]]:
    """Returns the survey of `tree`, in the plan's path style, and the planned decision of each of its kinds.

    The plan has `kinds` and their `decisions`, and knows the kind of each path. With `dtypes` these must agree, too.
    Differences raise one `TreeError` that lists all of them.
    """
    # A plan from JSON may have either style of paths, and only the paths themselves tell which.
    if any(leaf.path not in kind_by_path for leaf in tree_survey.kinds):
        by_index = survey(tree, tree_survey.mesh, path_style="index")
        if all(leaf.path in kind_by_path for leaf in by_index.kinds):
            tree_survey = by_index
    problems: list[str] = []
    moved: list[Decision] = []
    for leaf in tree_survey.kinds:
        kind = kind_by_path.get(leaf.path)
        if kind is None:
            problems.append(f"  {printable(leaf.path)} {shape_text(leaf.shape)}: the plan has no such leaf")
            continue
        planned = kinds[kind]
        if planned.shape != leaf.shape or (dtypes and planned.dtype != leaf.dtype):
            problems.append(
                f"  {printable(leaf.path)}: {shape_text(leaf.shape)} {leaf.dtype} in the tree, "
                f"{shape_text(planned.shape)} {planned.dtype} in the plan"
            )
        moved.append(_moved(decisions[kind], leaf.path))
    # Kinds of this survey are single leaves, so their paths are all paths of the tree.
    tree_paths = {leaf.path: None for leaf in tree_survey.kinds}
    problems += [
        f"  {printable(path)}: in the plan, not in the tree" for path in kind_by_path if path not in tree_paths
    ]
    if problems:
        raise TreeError("the tree differs from the planned one:\n" + "\n".join(shortened(problems)))
    return tree_survey, tuple(moved)


def same_arrays(first: Survey, second: Survey) -> bool:
    """Returns whether two trees have the same structure, with arrays of the same shapes."""
    return (
        second.treedef is not None
        and first.treedef == second.treedef
        and all(
            # A negative kind is a leaf that is no array: it has no shape, and only has to be in the same place.
            (a < 0) == (b < 0) and (a < 0 or first.kinds[a].shape == second.kinds[b].shape)
            for a, b in zip(first.kind_of, second.kind_of, strict=True)
        )
    )


def _moved(decision: Decision, path: str) -> Decision:
    """A decision about one leaf of a kind as one about another leaf of it."""
    if not decision.findings:
        return decision
    return attrs.evolve(decision, findings=tuple([attrs.evolve(finding, path=path) for finding in decision.findings]))
