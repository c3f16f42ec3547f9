"""The common frame of all pages: one file with its style and its scripts, which loads nothing."""

import functools
import html
import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files

from shardrules.core.errors import printable, printable_text


@functools.cache
def asset(name: str) -> str:
    """Returns the text of a file in `assets`."""
    return (files("shardrules.page") / "assets" / name).read_text("utf-8")


def framed(title: str, main: str, *, skip: str, scripts: Sequence[str], links: str = "", data: str = "") -> str:
    """Returns a page with a `main` part of HTML. `skip` is the id that keyboards skip to, `data` JSON for scripts."""
    # Inside of a script element only "</" and "<!--" have a meaning in HTML.
    safe = data.replace("<", "\\u003c")
    element = f'<script type="application/json" id="data">{safe}</script>\n' if data else ""
    parts = {
        "<!--TITLE-->": html.escape(printable(title)),
        "/*CSS*/": asset("page.css"),
        "<!--SKIP-->": skip,
        "<!--LINKS-->": links,
        "<!--MAIN-->": printable_text(main),
        "<!--FOOTER-->": f"shardrules {version('shardrules')}",
        "<!--DATA-->": element,
        "/*JS*/": "\n".join(map(asset, scripts)),
    }
    # One pass for all marks: data may contain what looks like one of them.
    return re.sub("|".join(map(re.escape, parts)), lambda mark: parts[mark[0]], asset("frame.html"))
