"""All checks of an audit, in the order in which their findings are listed."""

from collections.abc import Callable, Iterator

from shardrules.core.finding import Finding, merged
from shardrules.programs.audits.checks.accumulation import check_accumulation
from shardrules.programs.audits.checks.contractions import check_contractions
from shardrules.programs.audits.checks.dtypes import check_wire_dtypes
from shardrules.programs.audits.checks.kernels import check_kernels
from shardrules.programs.audits.checks.moves import check_moves, check_rematerialised
from shardrules.programs.audits.checks.optimizer_state import check_optimizer_state
from shardrules.programs.audits.checks.recomputed import check_regathered, check_saved_names
from shardrules.programs.audits.checks.reductions import check_whole_reductions
from shardrules.programs.audits.checks.resources import (
    check_constants,
    check_donation,
    check_memory,
    check_uncounted,
)
from shardrules.programs.audits.checks.small import check_small_collectives
from shardrules.programs.audits.checks.specs import check_batch, check_specs
from shardrules.programs.audits.checks.tables import check_tables
from shardrules.programs.audits.checks.work import check_repeated_update, check_repeated_work
from shardrules.programs.audits.facts import AuditFacts


def run_checks(facts: AuditFacts) -> tuple[Finding, ...]:
    """Returns all findings, errors first; equal layers are one finding with their count."""
    return merged(finding for check in _CHECKS for finding in check(facts))


_CHECKS: tuple[Callable[[AuditFacts], Iterator[Finding]], ...] = (
    check_specs,
    check_batch,
    check_optimizer_state,
    check_moves,
    check_contractions,
    check_rematerialised,
    check_kernels,
    check_regathered,
    check_whole_reductions,
    check_accumulation,
    check_wire_dtypes,
    check_small_collectives,
    check_repeated_work,
    check_repeated_update,
    check_saved_names,
    check_tables,
    check_memory,
    check_constants,
    check_uncounted,
    check_donation,
)
