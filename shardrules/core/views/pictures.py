"""What is drawn of plans, from leaves and decisions."""

import collections
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from shardrules.core.check import bytes_text, check_spec
from shardrules.core.errors import NoMeshError
from shardrules.core.finding import plan_error
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import UNCONSTRAINED, entries, spec_repr
from shardrules.drawing.blocks import Blocks, Split
from shardrules.drawing.picture import Picture
from shardrules.drawing.treemap import treemap


def split_dims(leaf: Leaf, decision: Decision) -> tuple[Split, ...]:
    """Returns the dimensions of a leaf, each with the axes that split it. What is left to compilers counts as whole."""
    found = entries(decision.spec or PartitionSpec(), leaf.ndim)[: leaf.ndim]  # one that is too long is a finding
    ways = [() if axes is UNCONSTRAINED else axes for axes in found]
    return tuple((size, tuple(axes)) for size, axes in zip(leaf.shape, ways, strict=True))


def blocks_of(path: str, leaf: Leaf, decision: Decision, sizes: Mapping[str, int]) -> Blocks:
    """Returns which device holds which block of a leaf."""
    if not sizes:
        raise NoMeshError("blocks lie on the devices of a mesh: plan with one")
    spec = decision.spec or PartitionSpec()
    unsound = [one for one in check_spec(path, leaf.shape, spec, sizes) if one.severity == "error"]
    if unsound:
        raise plan_error(f"{path} cannot be cut so", unsound)
    return Blocks(split_dims(leaf, decision), sizes)


def spec_colours(specs: Sequence[str], amounts: Sequence[float]) -> dict[str, int | None]:
    """Returns the colour of each spec, the first to that of which there is most; `None` for what is whole.

    ```python
    assert spec_colours(["P('a')", "P()", "P('b')"], [1, 9, 2]) == {"P('b')": 0, "P('a')": 1, "P()": None}
    ```
    """
    most: dict[str, float] = collections.defaultdict(float)
    for text, amount in zip(specs, amounts, strict=True):
        most[text] += amount
    whole = [text for text in most if text in ("P()", spec_repr(None)) or not any(char in text for char in "'\"")]
    split = [text for text in sorted(most, key=lambda text: -most[text]) if text not in whole]
    return {**{text: number for number, text in enumerate(split)}, **dict.fromkeys(whole)}


def plan_picture(
    paths: Sequence[str],
    kinds: Sequence[int],
    leaves: Sequence[Leaf],
    decisions: Sequence[Decision],
    sizes: Mapping[str, int],
) -> Picture:
    """Draws what each leaf takes on one device."""
    held = [one.device_bytes(leaf, sizes) for leaf, one in zip(leaves, decisions, strict=True)]
    specs = [spec_repr(one.spec) for one in decisions]
    said = [f"{spec}, {bytes_text(amount)} per device" for spec, amount in zip(specs, held, strict=True)]
    colours = spec_colours([specs[kind] for kind in kinds], [held[kind] for kind in kinds])
    return treemap(paths, [held[kind] for kind in kinds]).picture(
        [f"{path}: {said[kind]}" for path, kind in zip(paths, kinds, strict=True)],
        [colours[specs[kind]] for kind in kinds],
    )
