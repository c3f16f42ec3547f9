"""Policies of `jax.checkpoint` that save by name, where the function has no such name."""

from collections.abc import Iterator

import attrs

from shardrules.analysis.audits.checks.costs import cost_text, severity
from shardrules.analysis.audits.checks.regathered import RECOMPUTED
from shardrules.analysis.audits.facts import AuditFacts
from shardrules.analysis.compiling.saved_names import saved_name_findings
from shardrules.core.finding import Finding


def check_saved_names(facts: AuditFacts) -> Iterator[Finding]:
    """Names of policies that match nothing, with what it costs to compute everything again."""
    recomputed = [kernel for kernel in facts.kernels if RECOMPUTED in kernel.op_name]
    seconds = facts.seconds_of(recomputed)
    flops = sum(kernel.total_flops for kernel in recomputed)
    for finding in saved_name_findings(facts.compiled.jaxpr):
        text = f"{finding.message}. The step computes {flops:.3g} FLOPs again: {cost_text(facts, seconds)}"
        level = severity(facts, seconds) if finding.severity == "warning" else finding.severity
        yield attrs.evolve(finding, message=text, severity=level)
