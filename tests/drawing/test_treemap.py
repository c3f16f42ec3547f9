"""Treemaps: areas are proportional to amounts, nothing overlaps, and the parts of a module are inside it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.drawing.picture import Box
from shardrules.drawing.treemap import Rectangle, rows, treemap

AMOUNTS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40).map(lambda amounts: sorted(amounts, reverse=True))


def area(place: Rectangle) -> float:
    return place[2] * place[3]


def inside(rectangle: Rectangle, other: Rectangle) -> bool:
    slack = 1e-6 * (other[2] + other[3])
    return (
        rectangle[0] >= other[0] - slack
        and rectangle[1] >= other[1] - slack
        and rectangle[0] + rectangle[2] <= other[0] + other[2] + slack
        and rectangle[1] + rectangle[3] <= other[1] + other[3] + slack
    )


def overlap(rectangle: Rectangle, other: Rectangle) -> float:
    width = min(rectangle[0] + rectangle[2], other[0] + other[2]) - max(rectangle[0], other[0])
    height = min(rectangle[1] + rectangle[3], other[1] + other[3]) - max(rectangle[1], other[1])
    return max(0.0, width) * max(0.0, height)


@given(AMOUNTS, st.floats(1, 2000), st.floats(1, 2000))
def test_areas_are_exact_and_nothing_overlaps(amounts: list[float], width: float, height: float) -> None:
    rectangles = rows(amounts, (3.0, 5.0, width, height))
    assert len(rectangles) == len(amounts)
    for rectangle, amount in zip(rectangles, amounts, strict=True):
        assert area(rectangle) == pytest.approx(width * height * amount / sum(amounts), rel=1e-6, abs=1e-6)
        assert inside(rectangle, (3.0, 5.0, width, height))
    assert sum(overlap(a, b) for a, b in itertools.combinations(rectangles, 2)) <= 1e-5 * width * height


def test_boxes_are_rather_square() -> None:
    rectangles = rows([6, 6, 4, 3, 2, 2, 1], (0, 0, 6, 4))
    longest = [max(w / h, h / w) for _, _, w, h in rectangles]
    assert max(longest) < 3.2


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 1000)),
        min_size=1,
        max_size=60,
    )
)
def test_leaves_lie_in_their_modules(items: list[tuple[list[str], int]]) -> None:
    amounts = {"/".join(path) + f"/leaf{index}": amount for index, (path, amount) in enumerate(items)}
    tree = treemap(list(amounts), list(amounts.values()), 800, 400)
    modules = {module.path: module for module in tree.modules}
    for path, rectangle, amount in zip(amounts, tree.leaves, amounts.values(), strict=True):
        assert area(rectangle) == pytest.approx(800 * 400 * amount / max(1, sum(amounts.values())), rel=1e-6, abs=1e-6)
        module = path.rpartition("/")[0]
        while module and amount:
            assert inside(rectangle, modules[module].rectangle)
            module = module.rpartition("/")[0]
    for module in tree.modules:
        inner_amounts = [amount for path, amount in amounts.items() if path.startswith(f"{module.path}/")]
        assert (module.amount, module.count) == (sum(inner_amounts), len(inner_amounts))


def test_modules_come_before_what_is_in_them() -> None:
    tree = treemap(["a/b/c", "a/d", "e"], [1, 2, 3])
    assert [(module.path, module.depth) for module in tree.modules] == [("a", 1), ("a/b", 2)]


def test_what_takes_nothing_has_no_area_and_an_empty_plan_no_box() -> None:
    assert treemap(["a", "b"], [0, 5]).leaves[0] == (0, 0, 0, 0)
    assert treemap([], []).leaves == ()
    assert treemap(["a"], [0]).picture(["nothing"], [None]).marks == ()


def test_a_leaf_may_have_the_name_of_a_module() -> None:
    tree = treemap(["a", "a/b"], [1, 1], 10, 10)
    assert [area(rectangle) for rectangle in tree.leaves] == [50, 50]


def test_what_is_too_small_to_be_seen_is_one_box() -> None:
    paths = [f"layers/{layer}/w{number}" for layer in range(10) for number in range(1000)]
    picture = treemap(paths, [1] * len(paths), 100, 100).picture(paths, [0] * len(paths))
    titles = [mark.title for mark in picture.marks if isinstance(mark, Box)]
    assert titles == [f"layers/{layer}: 1,000 arrays" for layer in range(10)]
