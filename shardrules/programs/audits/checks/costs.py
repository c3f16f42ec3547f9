"""What a finding costs, in modelled seconds and as a share of the step, and whether that is worth a warning."""

from collections.abc import Iterable

import attrs

from shardrules.core.finding import Severity, common_path, template
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.costs.collective import collective_seconds
from shardrules.programs.costs.step_time import seconds_text

MAX_NAMES = 6
"""How many arrays a finding names. More fill the line of a terminal; with 3, equal layers beside embeddings and a head
would be cut off."""

MAX_FLOPS_RATIO = 1.05
"""More than this many times the function's own FLOPs mean that devices repeat each other's work.

Repeated work is repeated over a whole mesh axis, at least twice, so that this tolerates 5 % of a program. With 1.1, a
small layer that every device computes would be missed; with 1.02, padding of uneven shards would be reported."""

_WARNING_SHARE = 0.01
"""What costs a smaller share of the modelled step is a note.

The cheapest accident with a published cost, a table that every layer computes again, took 1.4 % of its step. With 0.02
it would be a note; with 0.005 findings would be warnings that no measurement tells from the noise of a step."""

_WARNING_SECONDS = 1e-5
"""What costs less than 10 microseconds is a note, whatever its share: a few launches of a kernel take as long.

With 20 the toy programs of tutorials would have fewer warnings, with 5 more; no step of a real model has other ones."""


def severity(facts: AuditFacts, seconds: float) -> Severity:
    """Returns `"warning"` for what is worth a person's time, and `"note"` for everything else."""
    is_worth = seconds >= _WARNING_SECONDS and seconds >= _WARNING_SHARE * facts.time.seconds
    return "warning" if is_worth else "note"


def cost_text(facts: AuditFacts, seconds: float) -> str:
    """Returns a cost for a sentence: `"modelled 3.2 ms, 4.1 % of the step"`."""
    share = seconds / facts.time.seconds if facts.time.seconds else 0.0
    return f"modelled {seconds_text(seconds)}, {100 * share:.2g} % of the step"


def latency_seconds(facts: AuditFacts, collective: Collective) -> float:
    """Returns how long all runs of a collective would take if it sent nothing."""
    return collective_seconds(attrs.evolve(collective, wire_bytes=0), facts.hardware)


def share_of(collective: Collective, array: ArrayType) -> float:
    """Returns the share of one array in the bytes that a collective moves."""
    return array.nbytes / max(1, sum(each.nbytes for each in collective.arrays))


def names_text(paths: Iterable[str]) -> str:
    """Returns paths for a sentence; the paths of equal layers are one."""
    groups: dict[str, str] = {}
    for path in paths:
        groups[template(path)] = common_path(groups.get(template(path), path), path)
    shown = list(groups.values())[:MAX_NAMES]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
