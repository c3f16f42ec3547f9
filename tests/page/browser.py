"""A real browser without a window: Chromium, driven through playwright."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def launched() -> Iterator[Any]:
    """Yields a browser. Without one the test is skipped; in CI it fails."""
    missing = pytest.fail if "CI" in os.environ else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing('the page is driven with playwright, which is not installed: pip install -e ".[browser]"')
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        missing(f"the page needs Chromium: install one of {', '.join(_NAMES)}, or name it in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Any,
    file: Path,
    *,
    fragment: str = "",
    width: int = 1440,
    height: int = 900,
    scheme: str = "light",
    ready: str = "#match-count:not(:empty)",
) -> Iterator[Any]:
    """Yields a page in its own window; the console must stay silent, and nothing may be loaded from the network.

    The page is complete when an element matches `ready`.
    """
    view = {"width": width, "height": height}
    context = browser.new_context(viewport=view, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
    )
    page.goto(file.as_uri() + fragment)
    # Wait by selector: waiting for an expression has to evaluate it, which the page's policy forbids.
    page.wait_for_selector(ready)
    yield page
    context.close()
    assert complaints == []


_OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(SELECTOR)].map((node) => [node.textContent, node.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0 && box.height > 0);
  const bad = [];
  boxes.forEach(([text, a], at) => boxes.slice(at + 1).forEach(([other, b]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 0.5 && high > 0.5) bad.push([text, other]);
  }));
  return [boxes.length, bad];
}"""


def overlaps(page: Any, css: str) -> tuple[int, list[Any]]:
    """How many elements are visible, and the texts of pairs that cover each other."""
    return page.evaluate(_OVERLAPS.replace("SELECTOR", repr(css)))


def axe_faults(page: Any) -> list[tuple[str, str]]:
    """The violations that axe-core finds in the page, as rule and element."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in violations]
