"""The page of the difference between two plans, which needs no script."""

import html
from collections.abc import Iterator, Sequence

from shardrules.core.errors import NoMeshError, PlanError, printable
from shardrules.core.finding import shape_text
from shardrules.core.rule import ShardingPlan
from shardrules.core.text import bytes_text
from shardrules.core.views.diff import ChangeGroup, PlanDiff
from shardrules.drawing.blocks import blocks_picture
from shardrules.page.frame import framed
from shardrules.programs.autoplan.answer.move import PlanMove

_DRAWN_GROUPS = 60
"""At most this many changes get drawings, the most bytes first. Chosen by hand."""


def diff_page(old: ShardingPlan, new: ShardingPlan, *, title: str, command: str = "") -> str:
    """Returns a page that shows what differs between two plans, with drawings of the blocks before and after."""
    diff = old.diff(new)
    # Sorting is stable: equal changes stay in the order of the tree.
    groups = sorted(diff.groups(), key=lambda group: -abs(group.new_bytes - group.old_bytes))
    main = [_summary(old, new, diff), _changes(groups)]
    links = ['<a href="#changes">Changes</a>']
    if groups:
        main.append(_drawings(old, new, groups))
        links.append('<a href="#drawings">Blocks</a>')
    if command:
        main.append(_section("origin", "Command", f'<pre class="command"><code>{html.escape(command)}</code></pre>'))
        links.append('<a href="#origin">Command</a>')
    return framed(title, "\n".join(main), skip="changes", scripts=("theme.js", "difference.js"), links=" ".join(links))


def _summary(old: ShardingPlan, new: ShardingPlan, diff: PlanDiff) -> str:
    """Both plans in numbers."""
    before, after = (plan.memory() for plan in (old, new))
    growth = after.device_bytes - before.device_bytes
    share = f", {growth / before.device_bytes:+.1%}" if before.device_bytes and growth else ""
    move = PlanMove.between(old, new) if diff else None
    device_bytes = _pair(bytes_text(before.device_bytes), bytes_text(after.device_bytes))
    figures = [
        ("Mesh", _pair(diff.old_mesh or "none", diff.new_mesh or "none")),
        ("Arrays", _pair(f"{before.leaf_count:,}", f"{after.leaf_count:,}")),
        ("Differ", f"{len(diff.changes):,}"),
        ("Total", _pair(bytes_text(before.total_bytes), bytes_text(after.total_bytes))),
        ("Per device", f"{device_bytes} <small>{_growth(growth)}{share}</small>"),
    ]
    stats = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    moving = "" if move is None else f"<p>{_escaped(_sentence(str(move)))}</p>"
    return f'<dl class="stats">{stats}</dl>\n{moving}'


def _changes(groups: Sequence[ChangeGroup]) -> str:
    if not groups:
        return _section("changes", "Changes", "<p>No array differs.</p>")
    names = ("Path", "Arrays", "Shape", "Before", "After", "Per device before", "after", "Change")
    head = "".join(
        f'<th scope="col"{" class=num" if index in (1, 5, 6, 7) else ""}>{name}</th>'
        for index, name in enumerate(names)
    )
    rows = "\n".join(f"<tr>{''.join(_cells(group, index))}</tr>" for index, group in enumerate(groups))
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the changes">'
        f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    )
    return _section("changes", "Changes", table, "The largest change of bytes first. Equal layers are one row.")


def _cells(group: ChangeGroup, index: int) -> Iterator[str]:
    first = group.changes[0]
    path = f"<code>{_escaped(group.path or '(the tree)')}</code>"
    link = f'<a class="link" href="#change-{index}">{path}</a>' if index < _DRAWN_GROUPS else path
    yield f'<td class="break">{link}</td>'
    yield f'<td class="num">{len(group.changes):,}</td>'
    yield f"<td><code>{shape_text(first.shape)}</code></td>"
    yield f"<td><del>{_escaped(first.old or 'absent')}</del></td>"
    yield f"<td><ins>{_escaped(first.new or 'absent')}</ins></td>"
    yield f'<td class="num">{bytes_text(group.old_bytes)}</td>'
    yield f'<td class="num">{bytes_text(group.new_bytes)}</td>'
    yield f'<td class="num">{_growth(group.new_bytes - group.old_bytes)}</td>'


def _drawings(old: ShardingPlan, new: ShardingPlan, groups: Sequence[ChangeGroup]) -> str:
    """The blocks of each device, before and after."""
    drawn = groups[:_DRAWN_GROUPS]
    cards = "\n".join(
        f'<article class="card" id="change-{index}" aria-labelledby="name-{index}">'
        f'<h3 id="name-{index}">{_escaped(group.path or "(the tree)")}</h3><div class="sides">'
        f"{_figure(old, group.changes[0].path, 'Before', group.changes[0].old)}"
        f"{_figure(new, group.changes[0].path, 'After', group.changes[0].new)}</div></article>"
        for index, group in enumerate(drawn)
    )
    more = f" The largest {len(drawn)} of {len(groups)} changes." if len(groups) > len(drawn) else ""
    about = f"Which device holds which block. Up to 8 devices have a colour each; of more, neighbours differ.{more}"
    return _section("drawings", "Blocks", f'<div class="cards">{cards}</div>', about)


def _figure(plan: ShardingPlan, path: str, name: str, spec: str) -> str:
    if not spec:
        return f"<figure><figcaption>{name}: absent</figcaption></figure>"
    try:
        svg = blocks_picture(plan.blocks(path)).to_svg()
    except (NoMeshError, PlanError):
        # An unsound spec has no blocks.
        svg = "<p>It cannot be split this way.</p>"
    return f"<figure><figcaption>{name}: <code>{_escaped(spec)}</code></figcaption>{svg}</figure>"


def _section(name: str, title: str, content: str, about: str = "") -> str:
    head = f'<div class="head"><h2 id="{name}-title">{title}</h2>{f"<p>{about}</p>" if about else ""}</div>'
    return f'<section id="{name}" aria-labelledby="{name}-title" tabindex="-1">{head}\n{content}</section>'


def _pair(before: str, after: str) -> str:
    """Both values with an arrow between them, or one value if they are the same."""
    before, after = _escaped(before), _escaped(after)
    return before if before == after else f'{before} <span class="arrow">→</span> {after}'


def _growth(count: int) -> str:
    if not count:
        return "±0 B"
    return (
        f'<span class="{"more" if count > 0 else "fewer"}-bytes">{"+" if count > 0 else ""}{bytes_text(count)}</span>'
    )


def _escaped(name: str) -> str:
    return html.escape(printable(name))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
