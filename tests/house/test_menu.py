"""The menu of the documentation has four parts, pages lead on to each other, and maps name modules that exist."""

import itertools
import re
from pathlib import Path

from tests.house.source import REPOSITORY

DOCS = REPOSITORY / "docs"
PROGRAMS = REPOSITORY / "shardrules" / "programs"

MAPS = {
    "map-of-programs.md": PROGRAMS,
    "how-autoplan-works.md": PROGRAMS,
    "what-a-training-plan-decides.md": PROGRAMS / "training",
}
"""Each page with a map, and the folder that it is of."""


def menu(text: str) -> dict[str, list[str]]:
    """Returns the pages of each part of the menu, in order."""
    nav = text.partition("nav:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^  - (\w+):\n", nav, flags=re.MULTILINE)
    return {
        part: re.findall(r"^ {6,}- .+: (\S+\.md)$", pages, re.MULTILINE)
        for part, pages in zip(parts[1::2], parts[2::2], strict=True)
    }


def dead_ends(folder: Path, pages: list[str]) -> list[str]:
    """Pages, but for the last, whose line **Next:** does not begin with a link to the next page."""
    return [page for page, following in itertools.pairwise(pages) if next_pages(folder / page) != [folder / following]]


def next_pages(page: Path) -> list[Path]:
    links = re.findall(r"^\*\*Next:\*\* \[[^]]+\]\(([^)]+)\)", page.read_text(), re.MULTILINE)
    return [(page.parent / link).resolve() for link in links]


def missing_modules(text: str, folder: Path) -> list[str]:
    """Modules in the tables of a map that are not in `folder`, or in the folder that begins their row or one above."""
    missing: list[str] = []
    under = folder
    for row in re.findall(r"^\| *.+$", text, re.MULTILINE):
        named = re.match(r"\| `([\w/]+/)` ", row)
        under = folder / named[1] if named else folder if row.startswith("|---") else under
        names = re.findall(r"`([\w/]+(?:\.py|/))`", row)
        # A name with a folder in it may also be told from the folder of the whole map.
        missing += [name for name in names if not any(place.exists() for place in (under / name, folder / name))]
    return missing


def test_the_menu_has_four_parts() -> None:
    assert [*menu((REPOSITORY / "mkdocs.yml").read_text())] == ["Learn", "Do", "Explain", "Reference"]


def test_every_page_says_what_comes_next() -> None:
    parts = menu((REPOSITORY / "mkdocs.yml").read_text())
    assert dead_ends(DOCS, [*parts["Learn"], *parts["Do"], *parts["Explain"], parts["Reference"][0]]) == []


def test_maps_name_modules_that_exist() -> None:
    maps = {page: (DOCS / page).read_text() for page in MAPS}
    assert [missing for page, text in maps.items() for missing in missing_modules(text, MAPS[page])] == []
    rooms = {path.name for path in PROGRAMS.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(re.findall(r"^\| `(\w+)/` ", maps["map-of-programs.md"], re.MULTILINE))


# Planted violations.


def test_a_dead_end_is_seen(tmp_path: Path) -> None:
    for page, text in {"a.md": "**Next:** [B](do/b.md).", "do/b.md": "[C](c.md)", "do/c.md": "# C"}.items():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text)
    assert dead_ends(tmp_path, ["a.md", "do/b.md", "do/c.md"]) == ["do/b.md"]
    assert menu("nav:\n  - Learn:\n      - A: a.md\n      - More:\n          - B: do/b.md\n") == {
        "Learn": ["a.md", "do/b.md"]
    }


def test_a_missing_module_is_seen(tmp_path: Path) -> None:
    (tmp_path / "solve").mkdir()
    (tmp_path / "solve" / "memory.py").touch()
    table = "|---|---|\n| `solve/` | `memory.py`, `gone.py` | what |\n| | `memory.py` | what |\n| `lost/` | x |\n"
    assert missing_modules(table + "|---|---|\n| | `memory.py` |\n", tmp_path) == ["gone.py", "lost/", "memory.py"]
