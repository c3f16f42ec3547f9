"""All checks of an audit, in the order in which their findings are listed."""

import itertools

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
from shardrules.programs.audits.movement import Movement
from shardrules.programs.compiled.kernel_costs import KernelFacts


def run_checks(movement: Movement, kernel_facts: KernelFacts) -> tuple[Finding, ...]:
    """Returns all findings, errors first; equal layers are one finding with their count."""
    arguments, function, timing = movement.arguments, movement.function, movement.timing
    findings = (
        check_specs(arguments, function),
        check_batch(arguments, function),
        check_optimizer_state(arguments, timing),
        check_moves(movement),
        check_contractions(movement),
        check_rematerialised(movement),
        check_kernels(movement),
        check_regathered(movement),
        check_whole_reductions(movement),
        check_accumulation(movement),
        check_wire_dtypes(movement),
        check_small_collectives(movement),
        check_repeated_work(function),
        check_repeated_update(movement),
        check_saved_names(function, timing),
        check_tables(arguments, function, timing),
        check_memory(arguments, timing.hardware),
        check_constants(function),
        check_uncounted(movement.program, kernel_facts),
        check_donation(arguments),
    )
    return merged(itertools.chain(*findings))
