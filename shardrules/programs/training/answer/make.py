"""From a search to the plan: its figures, why other candidates lost, and what would help."""

import itertools
import math
from collections.abc import Iterable, Iterator

import attrs

from shardrules.core.axes import mesh_text
from shardrules.core.callables import name_of
from shardrules.core.finding import Finding, merged
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.answer.findings import Remarks, machine_findings, near_the_limit, program_findings
from shardrules.programs.autoplan.answer.frontier import FrontierPoint
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.compiling.model_flops import model_matmuls
from shardrules.programs.training.answer.plan import TrainingPlan
from shardrules.programs.training.answer.prove import TrainingProof, plans_to_prove
from shardrules.programs.training.answer.report import Advice, TrainingCandidate, TrainingPlanReport
from shardrules.programs.training.answer.tokens import token_count
from shardrules.programs.training.search.problem import Outcome, TrainingProblem, argument_bytes, plan_once
from shardrules.programs.training.search.search import TrainingSearch
from shardrules.programs.training.search.staged import search_again
from shardrules.programs.training.stages.run import is_stage_exchange
from shardrules.programs.training.step import states_of


def proved_plan(search: TrainingSearch, count: int) -> TrainingPlan:
    """Returns the best plan of a search by the compiler: never a worse one than by the model alone."""
    plain = search.best or search.smallest
    assert plain is not None, "something was planned"
    proof = TrainingProof.of(search.problem, search.deadline, search.progress)
    proof.compilations.run(_groups(search, proof, plain, count))
    return training_plan(search, proof.best(plain), proof)


def _groups(search: TrainingSearch, proof: TrainingProof, plain: Outcome, count: int) -> Iterator[Iterable[Outcome]]:
    """Yields the plan that is returned without proof, the fastest of all, others of the best few, and more of these if
    none of them fits."""
    yield [plain]
    yield search.fastest_of_all(plain)
    for _ in range(3):  # chosen by hand
        outcomes = plans_to_prove(search.fitting, count)
        yield from ([outcome] for outcome in outcomes or [search.smallest or plain])
        factor = proof.factor
        if proof.compilations.has_fitting or search.is_over or not factor or not search_again(search, factor):
            return


def training_plan(
    search: TrainingSearch, chosen: Outcome | None = None, proof: TrainingProof | None = None
) -> TrainingPlan:
    """Returns the best plan of a search, or the one that was `chosen` by what compilers say."""
    problem = search.problem
    # A search may find nothing that fits: then the plan is what takes least, with a finding.
    outcome = chosen or search.best or search.smallest
    assert outcome is not None, "something was planned"
    planned = outcome.plan(problem)
    recipe = outcome.recipe
    step = problem.step_of(recipe)
    remarks = Remarks()
    flops, peak = remarks.of("the FLOPs of the model", lambda: _model_flops(problem), (0, 0.0))
    regions = remarks.of("how regions run", lambda: planned.regions, ())
    advice = _advice(search, outcome, remarks)
    findings = remarks.each("what else is worth knowing", _findings(search, outcome, planned, proof))
    dtypes = problem.step.recipe.accumulated_dtypes(problem.loss) if recipe.microbatches > 1 else ()
    split_arrays, whole_arrays = problem.loss.split.example_arrays
    report = TrainingPlanReport(
        name=name_of(problem.step.loss),
        cluster=problem.cluster.name,
        device_count=problem.cluster.count,
        mesh=mesh_text(planned.mesh),
        microbatches=recipe.microbatches,
        groups=recipe.groups,
        gradient_dtype=", ".join(dtypes),
        keep=str(recipe.keep),
        time=planned.step_time,
        examples=problem.loss.batch_size,
        split_arrays=split_arrays,
        whole_arrays=whole_arrays,
        tokens=remarks.of("the number of tokens", lambda: token_count(problem.loss), 0),
        model_flops=flops,
        peak_flops=peak,
        peak_bytes=outcome.peak_bytes,
        memory_limit=planned.memory_limit,
        memory=_memory(planned, outcome),
        host_memory=_host_memory(planned, outcome),
        host_exchanged_bytes=planned.host_traffic.exchanged_bytes,
        sent_bytes=tuple(planned.sent_bytes.items()),
        split_dims=remarks.of("along which dims the plan splits", lambda: planned.split_dims, ()),
        regions=tuple(use for use in regions if recipe.stages == 1 or not is_stage_exchange(use.name)),
        candidates=tuple(_candidates(search, outcome, is_proved=proof is not None and proof.compilations.has_fitting)),
        frontier=remarks.of("what memory is worth", lambda: _frontier(search.planned), ()),
        advice=advice,
        findings=(*findings, *remarks.findings),
        plan=planned.plan,
        stages=recipe.stages,
        why_no_stages="" if recipe.stages > 1 else search.why_no_stages,
        chunks=recipe.chunks,
    )
    outcomes = (outcome, *(other for other in search.fitting if other is not outcome))
    ranked, peaks = ((), {}) if proof is None else (proof.ranked, proof.compilations.peaks)
    return TrainingPlan(step, planned, report, problem, outcomes, ranked, peaks.get(outcome))


def _model_flops(problem: TrainingProblem) -> tuple[int, float]:
    """Returns the FLOPs of matmuls in the step as it is written, and how many of them all devices reach in a second."""
    # What jax.checkpoint computes again is not the model's.
    matmuls = list(model_matmuls(problem.loss.gradient))
    flops = sum(matmul.flops for matmul in matmuls)
    hardware = problem.cluster.hardware
    # Of several types, each at its own rate: what all of them take at their peaks.
    seconds = sum(matmul.flops / hardware.flops_per_second(matmul.equation.invars[0].aval.dtype) for matmul in matmuls)
    return flops, problem.cluster.count * flops / seconds if seconds else 0.0


def _memory(planned: AutoPlan, outcome: Outcome) -> tuple[tuple[str, int], ...]:
    by_argument = argument_bytes(planned)
    rest = max(0, outcome.peak_bytes - sum(by_argument))
    names = ("model", "optimizer state", "batch")
    return (*zip(names, by_argument, strict=True), ("activations, gradients and temporaries", rest))


def _host_memory(planned: AutoPlan, outcome: Outcome) -> tuple[tuple[str, int], ...]:
    state = planned.host_traffic.argument_bytes
    parts = ("optimizer state", state), ("activations", outcome.host_bytes - state)
    return tuple((name, nbytes) for name, nbytes in parts if nbytes)


def _candidates(search: TrainingSearch, chosen: Outcome, *, is_proved: bool) -> Iterator[TrainingCandidate]:
    """Yields what was planned: the plan, what fits, what does not, and what was refused."""
    planned = dict(search.outcomes)
    for outcome in (*search.free.values(), *search.columns.values()):
        planned.setdefault((outcome.shape, outcome.recipe), outcome)
    # The plan may be one that takes too much by the model, but not by the compiler.
    chosen = attrs.evolve(chosen, fits=chosen.fits or is_proved)
    planned[chosen.shape, chosen.recipe] = chosen
    rows: list[tuple[tuple[int, float], TrainingCandidate]] = []
    for key, outcome in planned.items():
        reason = search.beaten.get(key) if key not in search.outcomes and outcome is not chosen else None
        rows.append((_rank(outcome, chosen), _candidate(outcome, reason or _reason(search, outcome, chosen))))
    rows.sort(key=lambda row: row[0])
    yield from (candidate for _, candidate in rows)


def _candidate(outcome: Outcome, reason: str) -> TrainingCandidate:
    seconds = None if outcome.result is None else outcome.seconds
    return TrainingCandidate(
        outcome.mesh,
        outcome.recipe.microbatches,
        outcome.recipe.groups,
        outcome.recipe.keep.short_text + _host_state_text(outcome),
        seconds,
        outcome.peak_bytes,
        outcome.fits,
        reason,
        outcome.host_bytes,
        outcome.recipe.stages,
        outcome.recipe.chunks,
    )


def _host_state_text(outcome: Outcome) -> str:
    if not outcome.recipe.host_state:
        return ""
    nbytes = outcome.host_bytes - outcome.recipe.keep.host_bytes
    return f", {bytes_text(nbytes)} of state on the host" if nbytes > 0 else ", state on the host"


def _rank(outcome: Outcome, chosen: Outcome) -> tuple[int, float]:
    if outcome is chosen:
        return 0, 0.0
    if outcome.fits:
        return 1, outcome.seconds
    return (2, float(outcome.peak_bytes)) if outcome.result is not None else (3, 0.0)


def _reason(search: TrainingSearch, outcome: Outcome, chosen: Outcome) -> str:
    """Says why a candidate lost; nothing of the plan itself."""
    if outcome is chosen:
        return ""
    limit, host_limit = search.problem.limit_bytes, search.problem.host_limit_bytes
    if outcome.refusal:
        if not outcome.peak_bytes:
            return outcome.refusal
        return f"does not fit: needs at least {bytes_text(outcome.peak_bytes)} of {bytes_text(limit)}"
    if outcome.host_bytes > host_limit:
        return f"does not fit on the host: {bytes_text(outcome.host_bytes)} of {bytes_text(host_limit)} for each device"
    if not outcome.fits:
        return f"does not fit: {bytes_text(outcome.peak_bytes)} of {bytes_text(limit)}"
    ratio = outcome.seconds / chosen.seconds if chosen.seconds else 1.0
    # Less is shown as 0.0 %.
    return f"slower by {100 * (ratio - 1):.1f} %" if ratio >= 1.0005 else "as fast, with more axes, steps or memory"


def _frontier(outcomes: Iterable[Outcome]) -> tuple[FrontierPoint, ...]:
    """Returns the plans that no other beats in both time and memory, the smallest first.

    More memory is worth what the next of them saves. Beyond the last, nothing was planned.
    """
    points = {
        (peak_bytes + outcome.paired_bytes, seconds) for outcome in outcomes for peak_bytes, seconds in outcome.choices
    }
    front: list[tuple[int, float]] = []
    for peak_bytes, seconds in sorted(points):
        # In the order of bytes, a plan is worth its bytes only if it is faster than all before it.
        if not front or seconds < front[-1][1]:
            front.append((peak_bytes, seconds))
    slopes = [(slow - fast) / (large - small) for (small, slow), (large, fast) in itertools.pairwise(front)]
    return tuple(
        FrontierPoint(peak_bytes, seconds, peak_bytes, price)
        for (peak_bytes, seconds), price in zip(front, [*slopes, None], strict=False)
    )


def _advice(search: TrainingSearch, chosen: Outcome, remarks: Remarks) -> tuple[Advice, ...]:
    """Returns what more memory, a larger batch and more devices would give, the best first: each is planned."""
    problem = search.problem
    free = search.free.get(chosen.shape)
    examples = problem.loss.batch_size
    before = examples / chosen.seconds if chosen.seconds else math.inf
    others: list[tuple[str, Outcome, int]] = []
    if free is not None and not free.fits and free.result is not None and free.seconds < chosen.seconds:
        others.append(("memory for everything", free, examples))
    cluster = remarks.of("what more devices would give", problem.cluster.doubled, None)
    changes = [(f"a batch of {2 * examples} examples", lambda: _of_larger_batch(problem))]
    if cluster is not None:
        changes.append((f"{cluster.count} devices", lambda: attrs.evolve(problem, cluster=cluster)))
    for change, other in changes:
        if not search.has_time:
            break
        # A loss may be written for one number of examples.
        outcome = remarks.of(f"what {change} would give", lambda other=other: _plan_as(search, other(), chosen), None)
        if outcome is not None and outcome.fits:
            others.append((change, outcome, examples * (1 + (change == changes[0][0]))))
    rates = [(change, outcome, count / outcome.seconds) for change, outcome, count in others if outcome.seconds]
    rows = [
        Advice(change, outcome.seconds, rate, outcome.peak_bytes, rate / before)
        for change, outcome, rate in rates
        if rate > 1.01 * before  # less is within what models are off by
    ]
    return tuple(sorted(rows, key=lambda row: -row.gain))


def _of_larger_batch(problem: TrainingProblem) -> TrainingProblem:
    leaves = problem.loss.split
    step = attrs.evolve(problem.step, example_dims=leaves.named_example_dims)
    return attrs.evolve(problem, step=step, batch=leaves.resized(2 * leaves.batch_size))


def _plan_as(search: TrainingSearch, other: TrainingProblem, chosen: Outcome) -> Outcome:
    """Plans another set-up on a mesh and with a recipe as the plan's."""
    factor = other.cluster.count // search.problem.cluster.count
    recipe, (first, *inner) = chosen.recipe, chosen.shape
    if recipe.stages > 1:
        # As many stages, each of more devices.
        shape = first, *([factor * math.prod(inner[:1]), *inner[1:]] if inner or factor > 1 else [])
    else:
        shape = first * factor, *inner
        groups = recipe.groups * (factor if recipe.groups > 1 else 1)
        recipe = attrs.evolve(recipe, groups=groups)
    return plan_once(other, shape, recipe, search.limit_bytes, deadline=search.deadline)


def _findings(
    search: TrainingSearch, outcome: Outcome, planned: AutoPlan, proof: TrainingProof | None
) -> Iterator[Finding]:
    limit, peak = search.problem.limit_bytes, planned.peak.plus(outcome.paired_bytes)
    if proof is not None:
        yield from proof.findings(outcome)
    elif search.best is None:
        yield Finding(
            "warning",
            "may-not-fit",
            f"no plan was found that is expected to fit in {bytes_text(limit)}; this one is modelled to take {peak}",
            remedy="Pass prove=3 to ask the compiler; use more devices, or a smaller batch",
        )
    elif peak.fit(limit) != "certain":
        yield attrs.evolve(near_the_limit(limit, peak), remedy="Pass prove=3 to ask the compiler")
    if search.is_late or search.is_cut:
        yield Finding(
            "warning",
            "time-is-up",
            f"the search was not done after time_limit={planned.time_limit:.3g} s: another run may find another plan",
            remedy="Raise time_limit",
        )
    may_be_split = search.microbatches is None and search.problem.loss.batch_size > 1
    if outcome.recipe.microbatches == 1 and may_be_split and search.problem.split_refusal:
        free = search.free.get(outcome.shape)
        needs_less = free is not None and not free.fits
        what = "microbatches would take less memory, and are none" if needs_less else "the batch stays whole"
        yield Finding("note", "whole-batch", f"{what}: " + " ".join(search.problem.split_refusal.split()))
    aux_tree = search.problem.loss.aux_tree
    if states_of(search.problem.model) and not states_of(aux_tree.unflatten([None] * aux_tree.num_leaves)):
        yield Finding(
            "warning",
            "state-not-returned",
            "the model has an eqx.nn.State and the loss returns none: it stays as it is, so that what layers write to "
            "it, such as running means, is lost",
            remedy="Unless it is frozen, return the loss and the new state, and pass has_aux=True",
        )
    yield from merged(
        Finding(
            "warning",
            "no-gradient",
            "is trained, and the loss does not depend on it, or not by a derivative",
            path,
            "Compute the loss from it, or leave it out by trainable=",
        )
        for path in search.problem.loss.without_gradient
    )
    yield from _host_findings(search, outcome)
    cluster = search.problem.cluster
    yield from machine_findings(planned.mesh, None if cluster.is_assumed else cluster.hardware)
    # Stages have constraints that the loss does not have.
    subject = planned.call, planned.task, planned.choice
    left_out = "constrained" if outcome.recipe.stages > 1 else ""
    yield from (finding for finding in program_findings(*subject) if finding.code != left_out)


_PINNED_BYTES = 64 * 2**30
"""The memory of the host that JAX allows a process on GPUs by default, over all of its devices."""


def _host_findings(search: TrainingSearch, outcome: Outcome) -> Iterator[Finding]:
    cluster = search.problem.cluster
    devices = min(cluster.count, cluster.hardware.devices_per_host or cluster.count)
    nbytes = outcome.host_bytes * devices
    if cluster.hardware.is_gpu and nbytes > _PINNED_BYTES:
        yield Finding(
            "note",
            "host-memory",
            f"the plan needs {bytes_text(nbytes)} of each host, and JAX allows a process {bytes_text(_PINNED_BYTES)}",
            remedy=f"Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(1.1 * nbytes / 1e9)} before JAX starts",
        )
    if search.best is None and not search.problem.host_limit_bytes:
        why = "CPU devices share it" if cluster.hardware.is_cpu else "host_memory is 0"
        yield Finding("note", "no-host-memory", f"nothing was planned in the memory of hosts: {why}")
