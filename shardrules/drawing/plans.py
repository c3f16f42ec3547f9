"""Pictures of plans: what each leaf takes, as areas."""

import collections
from collections.abc import Sequence

import attrs

from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import printable
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text
from shardrules.core.views.blocks import Blocks
from shardrules.drawing.blocks import blocks_picture
from shardrules.drawing.picture import Picture
from shardrules.drawing.treemap import treemap

_MOST_DRAWN = 1_000
"""The arrays that a picture shows. Chosen by hand: of more, most are too small to be seen."""


def picture(value: ShardingPlan | Blocks) -> Picture:
    """Returns a picture of a plan, or of the blocks of an array.

    A plan is drawn as what each leaf takes on one device, as areas by module, coloured by spec. `plan.blocks(path)` is
    drawn as which device holds which block.

    **Arguments:**

    - `value`: a plan, or what `plan.blocks(path)` returns.

    **Returns:**

    A `shardrules.reports.Picture`, which notebooks show.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
    assert sr.picture(plan).to_svg().startswith("<svg")
    assert "device 3" in sr.picture(plan.blocks("w")).to_svg()
    ```
    """
    return blocks_picture(value) if isinstance(value, Blocks) else _plan_picture(value)


def spec_colours(specs: Sequence[str], amounts: Sequence[float]) -> dict[str, int | None]:
    """Returns the colour of each spec, by how much each spec has in total; `None` for specs that split nothing.

    ```python
    from shardrules.drawing.plans import spec_colours

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


def _plan_picture(plan: ShardingPlan) -> Picture:
    """Draws what each leaf takes on one device."""
    paths, kind_indices, kinds, decisions = plan.paths, plan.kind_indices, plan.kinds, plan.decisions
    sizes = mesh_sizes(plan.mesh)
    device_bytes = [decision.device_bytes(leaf, sizes) for leaf, decision in zip(kinds, decisions, strict=True)]
    specs = [spec_repr(decision.spec) for decision in decisions]
    titles = [f"{spec}, {bytes_text(amount)} per device" for spec, amount in zip(specs, device_bytes, strict=True)]
    # Bytes and texts are computed once for each kind, and shown for each leaf.
    amounts = [device_bytes[kind] for kind in kind_indices]
    colours = spec_colours([specs[kind] for kind in kind_indices], amounts)
    largest = sorted(range(len(paths)), key=lambda index: -amounts[index])
    # The largest are drawn, in the order of the tree again; the others are one box.
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
