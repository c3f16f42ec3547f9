"""Pictures as SVG, as figures, and in notebooks."""

import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.drawing.picture import INK, PALETTE, PLAIN, Box, Line, Picture, Words
from tests.drawing.colours import VISION, contrast, least_distance
from tests.house.source import REPOSITORY

STYLE = REPOSITORY / "shardrules" / "page" / "assets" / "page.css"

PICTURE = Picture(
    120,
    80,
    (
        Box(0, 0, 60, 40, 3, "w & <b>", 'a title\'s "<end>"'),
        Box(60, 0, 10, 40, None, "too long"),
        Words(4, 60, "dim 0", "end"),
        Line(((0, 0), (10.25, 20)), 2, ("first", "second")),
    ),
    'a "picture" & more',
)
NAMES = {"svg": "http://www.w3.org/2000/svg"}


def test_svg_is_xml_in_which_every_text_is_escaped() -> None:
    root = ET.fromstring(PICTURE.to_svg())
    assert root.attrib["aria-label"] == 'a "picture" & more'
    assert [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")] == [
        'a title\'s "<end>"',
        "first",
        "second",
    ]
    assert [element.text for element in root.findall(".//svg:text", NAMES)] == [
        "w & <b>",
        "dim 0",
    ]  # the other has no room
    boxes = root.findall(".//svg:rect", NAMES)
    assert [element.attrib["fill"] for element in boxes] == [PALETTE[3], PLAIN]
    assert [element.attrib["class"] for element in boxes] == ["block b3", "block plain"]
    assert [element.attrib["points"] for element in root.findall(".//svg:polyline", NAMES)] == ["0,0 10.2,20"]
    assert PICTURE._repr_html_() == PICTURE.to_svg()


def test_labels_can_be_read_on_every_fill() -> None:
    assert min(contrast(fill, INK) for fill in (*PALETTE, PLAIN)) > 4.5


@pytest.mark.parametrize("vision", VISION)
def test_colours_stay_apart_for_every_kind_of_vision(vision: str) -> None:
    """Two colours are seen as different from about 0.02 on."""
    themes = re.findall(r"--c0: .*?--c7: #\w+", STYLE.read_text(), re.DOTALL)
    palettes = [PALETTE, *(tuple(re.findall(r"#\w+", theme)) for theme in themes)]
    assert [len(palette) for palette in palettes] == [8, 8, 8]
    assert palettes[0] == palettes[1]
    assert min(least_distance(palette, vision) for palette in palettes) > 0.06


def test_figures_hold_the_same() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    figure = PICTURE.to_figure()
    (ax,) = figure.axes
    assert [artist.get_width() for artist in ax.patches] == [60, 10]
    assert {artist.get_text() for artist in ax.texts} == {"w & <b>", "dim 0", ""}
    assert len(ax.lines) == 1
    again = PICTURE.to_figure(figure.add_subplot())
    assert again is figure
    figure.canvas.draw()


def plan() -> sr.ShardingPlan:
    tree = {"layers": [{"up": jax.ShapeDtypeStruct((64, 32), jnp.float32)} for _ in range(3)], "bias": np.ones(32)}
    rule = sr.DimShardingRule("model", 1, ignore_ndim_error=True) | sr.DimShardingRule("data", 0)
    return rule.plan(tree, sr.mesh_shape("data:4,model:2"))


def test_the_picture_of_a_plan_has_a_box_for_each_leaf() -> None:
    svg = sr.picture(plan()).to_svg()
    assert len(ET.fromstring(svg).findall(".//svg:rect", NAMES)) == 4
    assert "layers/1/up: P('data', 'model'), 1.0 KiB per device" in [
        element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")
    ]


def test_a_plan_in_a_notebook_is_a_table() -> None:
    assert plan()._repr_html_().startswith("<table>")


def test_leaves_of_one_spec_have_one_colour_and_whole_ones_none() -> None:
    tree = {"a": np.ones((8, 8)), "b": np.ones((8, 4)), "c": np.ones(4), "d": np.ones(3)}
    rule = sr.SpecTreeShardingRule({"a": jax.P("data"), "b": jax.P("data"), "c": jax.P("model"), "d": jax.P()})
    boxes = {
        mark.title[0]: mark.colour
        for mark in sr.picture(rule.plan(tree, sr.mesh_shape("data:4,model:2"))).marks
        if isinstance(mark, Box)
    }
    assert boxes["a"] == boxes["b"] == 0
    assert boxes["c"] == 1
    assert boxes["d"] is None


def test_a_frontier_is_a_picture_too() -> None:
    pytest.importorskip("matplotlib")
    frontier = sr.reports.Frontier(
        "step",
        "data:8",
        (sr.reports.FrontierPoint(2**30, 0.2, 2**30, 0.0), sr.reports.FrontierPoint(2**31, 0.1, 2**31, 0.0)),
    )
    root = ET.fromstring(frontier.to_svg())
    assert len(root.findall(".//svg:circle", NAMES)) == 2
    assert frontier.picture().to_figure().axes
