"""The worth of memory."""

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.autoplan.answer.frontier import Frontier, FrontierPoint


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ layer["up"]) @ layer["down"], None

    return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)


def step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))


ARGS = {"up": real(8, 1024, 4096), "down": real(8, 4096, 1024)}, real(2048, 1024)


@pytest.fixture(scope="module")
def planned() -> sr.reports.AutoPlan:
    return sr.autoplan(step, *ARGS, mesh=sr.mesh_shape("data:4,model:2"), time_limit=600)


@pytest.fixture(scope="module")
def frontier(planned: sr.reports.AutoPlan) -> Frontier:
    return planned.frontier(8)


@pytest.mark.slow
def test_more_memory_is_never_slower(frontier: Frontier) -> None:
    assert len(frontier.points) >= 6
    for less, more in itertools.pairwise(frontier.points):
        assert less.limit_bytes < more.limit_bytes
        assert more.seconds <= less.seconds * 1.001
    for point in frontier.points:
        assert point.peak_bytes <= point.limit_bytes * (1 + 1e-6)


@pytest.mark.slow
def test_no_point_is_worse_than_a_smaller_budget(frontier: Frontier) -> None:
    """A plan that takes less memory and less time fits a larger budget, too."""
    for point, other in itertools.permutations(frontier.points, 2):
        assert other.seconds >= point.seconds * (1 - 1e-3) or other.peak_bytes > point.limit_bytes


@pytest.mark.slow
def test_the_last_point_is_the_plan_without_a_budget(planned: sr.reports.AutoPlan, frontier: Frontier) -> None:
    assert frontier.points[-1].seconds == pytest.approx(planned.cost, rel=1e-3)
    assert frontier.points[0].seconds > planned.cost * 1.005  # otherwise the above says little


@pytest.mark.slow
def test_prices_are_about_what_memory_saves(frontier: Frontier) -> None:
    """The price is the slope of the linear program: over all of the frontier the savings are about its integral."""
    prices = [point.price for point in frontier.points if point.price is not None and point.price >= 0]
    assert len(prices) == len(frontier.points)
    assert prices[0] > 0
    saved = frontier.points[0].seconds - frontier.points[-1].seconds
    limits = [point.limit_bytes for point in frontier.points]
    steps = zip(itertools.pairwise(prices), itertools.pairwise(limits), strict=True)
    promised = sum(sum(pair) / 2 * (more - less) for pair, (less, more) in steps)
    assert saved / 10 <= promised <= saved * 10


def test_without_a_budget_memory_is_worth_nothing(planned: sr.reports.AutoPlan) -> None:
    assert planned.price_of_memory == 0
    assert "more memory" not in str(planned)


@pytest.mark.slow
def test_within_a_budget_the_price_is_shown(frontier: Frontier) -> None:
    limit = frontier.points[0].limit_bytes
    tight = sr.autoplan(step, *ARGS, mesh=sr.mesh_shape("data:4,model:2"), memory_limit=limit)
    assert tight.price_of_memory > 0
    assert re.search(r"^1 % more memory \(.*\) would save about [\d.e-]+ ms a call$", str(tight), re.MULTILINE)


@pytest.mark.slow
def test_a_frontier_is_a_table_and_a_picture(frontier: Frontier) -> None:
    assert len(str(frontier).splitlines()) == len(frontier.points) + 4
    picture = ET.fromstring(frontier.to_svg())
    assert picture.tag.endswith("svg")
    space = {"svg": "http://www.w3.org/2000/svg"}
    dots = picture.findall("svg:circle", space)
    assert len(dots) == len(frontier.points)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= 560
        assert 0 <= float(dot.attrib["cy"]) <= 320
    assert frontier._repr_html_() == frontier.to_svg()


@pytest.mark.parametrize("name", ["step", "<lambda>", 'a & "b"'])
def test_names_do_not_break_the_picture(name: str) -> None:
    points = (FrontierPoint(2**30, 0.012, 2**30, 1e-12), FrontierPoint(2**31, 0.01, 2**31, 0))
    ET.fromstring(Frontier(name, "data:8", points).to_svg())


@pytest.mark.parametrize("count", [0, 1])
def test_pictures_of_no_or_a_single_point(count: int) -> None:
    points = (FrontierPoint(2**30, 0.012, 2**30, 0),) * count
    picture = ET.fromstring(Frontier("step", "data:8", points).to_svg(300, 200))
    assert picture.attrib["width"] == "300"
