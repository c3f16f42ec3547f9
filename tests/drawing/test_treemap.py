"""Treemaps: areas are to each other as amounts are, nothing overlaps, and what is of one module lies in it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.drawing.picture import Box
from shardrules.drawing.treemap import Rectangle, rows, treemap

AMOUNTS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40).map(lambda one: sorted(one, reverse=True))


def area(place: Rectangle) -> float:
    return place[2] * place[3]


def inside(one: Rectangle, other: Rectangle) -> bool:
    slack = 1e-6 * (other[2] + other[3])
    return (
        one[0] >= other[0] - slack
        and one[1] >= other[1] - slack
        and one[0] + one[2] <= other[0] + other[2] + slack
        and one[1] + one[3] <= other[1] + other[3] + slack
    )


def overlap(one: Rectangle, other: Rectangle) -> float:
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


@given(AMOUNTS, st.floats(1, 2000), st.floats(1, 2000))
def test_areas_are_exact_and_nothing_overlaps(amounts: list[float], width: float, height: float) -> None:
    found = rows(amounts, (3.0, 5.0, width, height))
    assert len(found) == len(amounts)
    for place, amount in zip(found, amounts, strict=True):
        assert area(place) == pytest.approx(width * height * amount / sum(amounts), rel=1e-6, abs=1e-6)
        assert inside(place, (3.0, 5.0, width, height))
    assert sum(overlap(a, b) for a, b in itertools.combinations(found, 2)) <= 1e-5 * width * height


def test_boxes_are_rather_square() -> None:
    found = rows([6, 6, 4, 3, 2, 2, 1], (0, 0, 6, 4))
    longest = [max(w / h, h / w) for _, _, w, h in found]
    assert max(longest) < 3.2


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 1000)),
        min_size=1,
        max_size=60,
    )
)
def test_leaves_lie_in_their_modules(items: list[tuple[list[str], int]]) -> None:
    known = {"/".join(path) + f"/leaf{number}": amount for number, (path, amount) in enumerate(items)}
    found = treemap(list(known), list(known.values()), 800, 400)
    places = {one.path: one for one in found.modules}
    for path, place, amount in zip(known, found.leaves, known.values(), strict=True):
        assert area(place) == pytest.approx(800 * 400 * amount / max(1, sum(known.values())), rel=1e-6, abs=1e-6)
        module = path.rpartition("/")[0]
        while module and amount:
            assert inside(place, places[module].rectangle)
            module = module.rpartition("/")[0]
    for one in found.modules:
        own = [amount for path, amount in known.items() if path.startswith(f"{one.path}/")]
        assert (one.amount, one.count) == (sum(own), len(own))


def test_modules_come_before_what_is_in_them() -> None:
    found = treemap(["a/b/c", "a/d", "e"], [1, 2, 3])
    assert [(one.path, one.depth) for one in found.modules] == [("a", 1), ("a/b", 2)]


def test_what_takes_nothing_has_no_area_and_an_empty_plan_no_box() -> None:
    assert treemap(["a", "b"], [0, 5]).leaves[0] == (0, 0, 0, 0)
    assert treemap([], []).leaves == ()
    assert treemap(["a"], [0]).picture(["nothing"], [None]).marks == ()


def test_a_leaf_may_have_the_name_of_a_module() -> None:
    found = treemap(["a", "a/b"], [1, 1], 10, 10)
    assert [area(place) for place in found.leaves] == [50, 50]


def test_what_is_too_small_to_be_seen_is_one_box() -> None:
    paths = [f"layers/{layer}/w{number}" for layer in range(10) for number in range(1000)]
    picture = treemap(paths, [1] * len(paths), 100, 100).picture(paths, [0] * len(paths))
    titles = [mark.title for mark in picture.marks if isinstance(mark, Box)]
    assert titles == [f"layers/{layer}: 1,000 arrays" for layer in range(10)]
