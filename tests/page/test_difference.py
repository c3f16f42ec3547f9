"""The page of a difference: what is on it, and how it looks in a real browser."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.page.difference import diff_page
from tests.page.browser import axe_faults, launched, opened, overlaps

MESH = sr.mesh_shape("data:4,model:2")


def plan_of(specs: dict[str, P], *, size: int = 64, mesh: AnyMesh | None = MESH) -> sr.ShardingPlan:
    tree = {path: jax.ShapeDtypeStruct((size, size), jnp.float32) for path in specs}
    return sr.SpecTreeShardingRule(specs).plan(tree, mesh)


OLD = plan_of({"a": P(), "b": P("data"), "c": P("model"), **{f"layers/{index}/w": P("data") for index in range(4)}})
NEW = plan_of({"a": P("data"), "b": P("data"), "d": P(), **{f"layers/{index}/w": P("model") for index in range(4)}})


def rows(page: str) -> list[list[str]]:
    """The cells of the table, without markup."""
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    return [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<td.*?</td>", row)]
        for row in body.split("</tr>")
        if "<td" in row
    ]


def test_every_change_is_a_row_the_largest_first() -> None:
    assert rows(diff_page(OLD, NEW, title="old → new")) == [
        ["layers/*/w", "4", "(64, 64)", "P('data')", "P('model')", "16.0 KiB", "32.0 KiB", "+16.0 KiB"],
        ["d", "1", "(64, 64)", "absent", "P()", "0 B", "16.0 KiB", "+16.0 KiB"],
        ["a", "1", "(64, 64)", "P()", "P('data')", "16.0 KiB", "4.0 KiB", "-12.0 KiB"],
        ["c", "1", "(64, 64)", "P('model')", "absent", "8.0 KiB", "0 B", "-8.0 KiB"],
    ]


def test_the_summary_has_both_plans() -> None:
    text = re.sub("<.*?>", "", diff_page(OLD, plan_of({"a": P()}, mesh=sr.mesh_shape("x:2")), title="t"))
    for part in ("data:4,model:2 → x:2", "7 → 1", "To move from the old plan to the new,"):
        assert part in text
    same = re.sub("<.*?>", "", diff_page(OLD, OLD, title="t", command="shardrules diff a b --html"))
    assert "No array differs." in same
    assert "shardrules diff a b --html" in same
    assert "To move" not in same


@pytest.mark.parametrize("mesh", [None, MESH, sr.mesh_shape("one:1")])
def test_plans_that_cannot_be_drawn_have_a_page(mesh: AnyMesh | None) -> None:
    old, new = plan_of({"w": P()}, mesh=mesh), plan_of({"w": P("nowhere", "data")}, size=63, mesh=mesh)
    assert "It cannot be split this way." in diff_page(old, new, title="t")
    assert "(63, 63)" in diff_page(old, new, title="t")


def test_texts_of_plans_are_not_markup() -> None:
    evil = '</script><img src=x onerror="1"><!--MAIN-->/*JS*/'
    page = diff_page(plan_of({evil: P()}), plan_of({evil: P("data")}), title=evil, command=evil)
    assert "<img" not in page
    assert page.count("startTheme(() => {});") == 1


def test_newlines_in_names_are_shown() -> None:
    odd = "one\ntwo\tthree"
    page = diff_page(plan_of({odd: P()}), plan_of({odd: P("data")}), title=odd, command="a\nb")
    assert "one\ntwo" not in page
    assert page.count("one\\ntwo\\tthree") >= 3  # title, table and drawing
    assert "<code>a\nb</code>" in page


def test_of_many_changes_the_largest_are_drawn() -> None:
    letters = [f"{first}{second}" for first in "abcdefgh" for second in "abcdefghij"]
    old, new = (dict.fromkeys(letters, spec) for spec in (P(), P("data")))
    page = diff_page(plan_of(old), plan_of(new), title="t")
    assert len(rows(page)) == 80
    assert page.count('<article class="card"') == 60
    assert "The largest 60 of 80 changes." in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_axe_finds_no_fault(width: int, scheme: str, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "diff.html"
    file.write_text(diff_page(OLD, NEW, title="old.json → new.json", command="shardrules diff " + "long/" * 40))
    with opened(browser, file, scheme=scheme, width=width, ready="#theme:visible") as page:
        assert axe_faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert overlaps(page, ".card svg text, .card h3, .card figcaption")[1] == []
        page.click("#changes tbody a >> nth=1")
        assert page.evaluate("document.querySelector(':target').id") == "change-1"
        page.click("#theme label:nth-of-type(3)")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_without_scripts_nothing_is_missing(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "diff.html"
    file.write_text(diff_page(OLD, NEW, title="t"))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert "layers/*/w" in page.inner_text("#changes")
    assert page.locator("#drawings svg").first.is_visible()
    assert page.locator("#theme").is_hidden()
    context.close()
