"""Pictures of plans, from leaves and decisions."""

import collections
from collections.abc import Mapping, Sequence

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.check import bytes_text, check_spec
from shardrules.core.errors import NoMeshError, printable
from shardrules.core.finding import plan_error
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import UNCONSTRAINED, entries, spec_repr
from shardrules.drawing.blocks import Blocks, Split
from shardrules.drawing.picture import Picture
from shardrules.drawing.treemap import treemap

_MOST_DRAWN = 1_000
"""How many arrays a picture shows. Chosen by hand: of more, most are too small to be seen; doubled, a notebook keeps
400 kB for each plan that it shows."""


def split_dims(leaf: Leaf, decision: Decision) -> tuple[Split, ...]:
    """Returns the dimensions of a leaf, each with the axes that split it; one left to the compiler counts as whole."""
    # A spec that is too long is a finding of the plan, and no reason not to draw it.
    spec_entries = entries(decision.spec or PartitionSpec(), leaf.ndim)[: leaf.ndim]
    split_axes = [() if axes is UNCONSTRAINED else axes for axes in spec_entries]
    return tuple((size, tuple(axes)) for size, axes in zip(leaf.shape, split_axes, strict=True))


def blocks_of(path: str, leaf: Leaf, decision: Decision, sizes: Mapping[str, int]) -> Blocks:
    """Returns which device holds which block of the leaf at `path`, on a mesh with these `sizes`."""
    if not sizes:
        raise NoMeshError("blocks need a mesh: plan with one")
    spec = decision.spec or PartitionSpec()
    errors = [finding for finding in check_spec(path, leaf.shape, spec, sizes) if finding.severity == "error"]
    if errors:
        raise plan_error(f"{printable(path)} cannot be split this way", errors)
    return Blocks(split_dims(leaf, decision), sizes)


def spec_colours(specs: Sequence[str], amounts: Sequence[float]) -> dict[str, int | None]:
    """Returns the colour of each spec, by how much each spec has in total; `None` for specs that split nothing.

    ```python
    from shardrules.core.views.pictures import spec_colours

    assert spec_colours(["P('a')", "P()", "P('b')"], [1, 9, 2]) == {"P('b')": 0, "P('a')": 1, "P()": None}
    ```
    """
    totals: dict[str, float] = collections.defaultdict(float)
    for text, amount in zip(specs, amounts, strict=True):
        totals[text] += amount
    # Only a spec that names an axis has a quote in its text.
    whole = [text for text in totals if not any(char in text for char in "'\"")]
    split = [text for text in sorted(totals, key=lambda text: -totals[text]) if text not in whole]
    return {**{text: colour for colour, text in enumerate(split)}, **dict.fromkeys(whole)}


def plan_picture(
    paths: Sequence[str],
    kind_indices: Sequence[int],
    kinds: Sequence[Leaf],
    decisions: Sequence[Decision],
    sizes: Mapping[str, int],
) -> Picture:
    """Draws what each leaf takes on one device; `kind_indices` says the kind of each of `paths`."""
    device_bytes = [decision.device_bytes(leaf, sizes) for leaf, decision in zip(kinds, decisions, strict=True)]
    specs = [spec_repr(decision.spec) for decision in decisions]
    titles = [f"{spec}, {bytes_text(amount)} per device" for spec, amount in zip(specs, device_bytes, strict=True)]
    # Bytes and texts are computed once for each kind, and shown for each leaf.
    amounts = [device_bytes[kind] for kind in kind_indices]
    colours = spec_colours([specs[kind] for kind in kind_indices], amounts)
    largest = sorted(range(len(paths)), key=lambda index: -amounts[index])
    drawn, rest = sorted(largest[:_MOST_DRAWN]), largest[_MOST_DRAWN:]
    drawn_paths, drawn_amounts = [printable(paths[index]) for index in drawn], [amounts[index] for index in drawn]
    drawn_titles = [f"{path}: {titles[kind_indices[index]]}" for path, index in zip(drawn_paths, drawn, strict=True)]
    drawn_colours = [colours[specs[kind_indices[index]]] for index in drawn]
    if rest:
        drawn_paths.append(f"{len(rest):,} more")
        drawn_amounts.append(sum(amounts[index] for index in rest))
        drawn_titles.append(f"{len(rest):,} smaller arrays: {bytes_text(drawn_amounts[-1])} per device")
        drawn_colours.append(None)
    picture = treemap(drawn_paths, drawn_amounts).picture(drawn_titles, drawn_colours)
    return attrs.evolve(picture, label=f"what {len(paths):,} arrays take, as areas")
