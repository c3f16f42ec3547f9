"""What the compiler makes of training plans."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

import attrs
from jax.sharding import Mesh

from shardrules.core.check import bytes_text
from shardrules.core.errors import CompileError, DoesNotFitError
from shardrules.core.finding import Finding
from shardrules.programs.audits.audit import audit
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.autoplan.answer.prove import LONGER, cut_short, failure_findings, failure_text, not_compiled
from shardrules.programs.autoplan.solve.deadline import NO_DEADLINE, Deadline
from shardrules.programs.machine.flags import read_flags
from shardrules.programs.training.search.problem import Outcome, TrainingProblem
from shardrules.programs.training.search.search import TrainingSearch

_ALIKE = 0.03
"""By what part plans take longer than the best that compilers may make faster: steps of decoders compiled for TPUs had
such plans the other way round by 3 and 4 %. With half of it, some that are faster are not compiled early; with twice as
much, the second plan that is compiled is often slower."""


@final
@attrs.frozen
class ProvedPlan:
    """A plan that was compiled for the cluster."""

    mesh: str
    recipe: str
    """How gradients are computed, in words."""
    modelled_seconds: float
    modelled_bytes: int
    audit: AuditReport
    """What the compiled program does."""
    memory_limit: int
    flag: str = ""
    """The flag without which the compiler fails at it, as in `CompileError`; empty for most."""

    @property
    def seconds(self) -> float:
        """The modelled time of the compiled program."""
        return self.audit.time.seconds

    @property
    def peak_bytes(self) -> int:
        """The most memory that a device uses, as the compiler says."""
        return self.audit.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the compiled program fits."""
        return self.peak_bytes <= self.memory_limit

    def __str__(self) -> str:
        fits = "fits" if self.fits else f"does not fit in {bytes_text(self.memory_limit)}"
        return (
            f"{self.mesh}, {self.recipe}: {self.seconds:.4g} s as compiled, {self.modelled_seconds:.4g} s as planned; "
            f"{bytes_text(self.peak_bytes)}, {bytes_text(self.modelled_bytes)} as planned: {fits}"
        )


def plans_to_prove(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Returns so many plans to compile of some that are sorted by their time: the first, then plans that are nearly as
    fast on other meshes, with other microbatches or with arrays on hosts, then the others.

    The model is off by the same for plans that differ in less.
    """
    nearly = [outcome for outcome in outcomes if outcome.seconds <= outcomes[0].seconds * (1 + _ALIKE)]
    different: dict[tuple[object, ...], Outcome] = {}
    for outcome in nearly:
        recipe = outcome.recipe
        different.setdefault((outcome.shape, recipe.microbatches, outcome.host_bytes > 0), outcome)
    chosen = [*different.values()]
    return [*chosen, *(outcome for outcome in outcomes if outcome not in chosen)][:count]


def prove_outcome(problem: TrainingProblem, outcome: Outcome) -> ProvedPlan:
    """Compiles what was planned on one mesh with one recipe, for the devices of the cluster."""
    planned = outcome.plan(problem)
    target = problem.cluster.compile_target()
    mesh = target.mesh(planned.mesh)
    assert isinstance(mesh, Mesh), "targets have devices"
    step = attrs.evolve(planned, mesh=mesh).jit(problem.step_of(outcome.recipe), donate_argnums=(0, 1))
    # XLA fills the memory of GPUs unless it gets a limit.
    flags = (*target.flags, *read_flags(step.compiler_options(mesh)))

    def audit_with(flags: Sequence[tuple[str, str]]) -> AuditReport:
        used = attrs.evolve(target, flags=flags)
        return audit(step, *planned.args, mesh=mesh, target=used, donate_argnums=(0, 1))

    flag = ""
    try:
        report = audit_with(flags)
    except CompileError as error:
        flag = error.flag
        if not flag:
            raise
        report = audit_with((*flags, *read_flags(f"--{flag}")))
    return ProvedPlan(
        outcome.mesh,
        str(outcome.recipe),
        outcome.seconds,
        outcome.peak_bytes,
        report,
        problem.limit_bytes,
        flag,
    )


def fastest_of_all(search: TrainingSearch, plain: Outcome) -> list[Outcome]:
    """Returns the plan that is fastest without a limit of memory: as it is, and with the limit for the compiler.

    There is none if it is `plain`, or if its arguments alone are too large: only what else it needs is modelled.
    """
    planned = [outcome for outcome in (*search.free.values(), *search.columns.values()) if outcome.result is not None]
    fastest = min(planned, key=lambda outcome: outcome.seconds, default=None)
    if fastest is None or (plain.fits and fastest.seconds >= plain.seconds):
        return []
    limit, plan = search.problem.limit_bytes, fastest.plan(search.problem)
    if plan.task.occupancy.argument_bytes(plan.choice) > limit:
        return []
    # Only compilers for GPUs get a limit, if the model says that it is kept.
    limited = attrs.evolve(plan.result, peak_bytes=min(plan.result.peak_bytes, limit))
    is_gpu = search.problem.cluster.compile_target().platform == "cuda"
    return [fastest, *([attrs.evolve(fastest, result=limited)] if is_gpu else [])]


@final
@attrs.define(eq=False)
class Proofs:
    """What the compiler made of plans so far."""

    problem: TrainingProblem
    deadline: Deadline = NO_DEADLINE
    progress: Callable[[str], None] = lambda text: None
    proved: dict[Outcome, ProvedPlan] = attrs.field(factory=dict)
    errors: dict[Outcome, Exception] = attrs.field(factory=dict)
    """Plans that it refused for their size, or failed at."""
    longest_seconds: float = 0.0
    is_cut: bool = False
    """Whether there was no time for a plan."""

    def add(self, outcome: Outcome) -> bool:
        """Compiles a plan, unless that was done before, and returns whether it fits.

        Without time for it, only the first is compiled.
        """
        if outcome in self.proved or outcome in self.errors:
            return outcome in self.proved and self.proved[outcome].fits
        if self.count and self.deadline.seconds_left <= LONGER * self.longest_seconds:
            self.is_cut = True
            return False
        self.progress(f"compiling {outcome.mesh}, {outcome.recipe}")
        start = time.monotonic()
        try:
            self.proved[outcome] = prove_outcome(self.problem, outcome)
        except Exception as error:  # noqa: BLE001  whatever a compiler does, no search is lost
            self.errors[outcome] = error
            return False
        finally:
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)
        return self.proved[outcome].fits

    @property
    def count(self) -> int:
        """How many plans the compiler was asked about."""
        return len(self.proved) + len(self.errors)

    @property
    def ranked(self) -> tuple[ProvedPlan, ...]:
        """What was compiled, the best first: those that fit by their time, then the others by what they need."""
        return tuple(
            sorted(
                self.proved.values(),
                key=lambda proof: (not proof.fits, proof.seconds if proof.fits else float(proof.peak_bytes)),
            )
        )

    @property
    def fits(self) -> bool:
        """Whether anything that was compiled fits."""
        return any(proof.fits for proof in self.proved.values())

    @property
    def needed_bytes(self) -> dict[Outcome, int]:
        """What plans need by the compiler, also those that it refused, if it says so."""
        errors = {outcome: error for outcome, error in self.errors.items() if isinstance(error, DoesNotFitError)}
        return {outcome: proof.peak_bytes for outcome, proof in self.proved.items()} | {
            outcome: error.needed_bytes for outcome, error in errors.items()
        }

    @property
    def factor(self) -> float:
        """What the model says that plans take over what they need, for the one of which it says most: it is off by
        about as much for others of the same step. 0 if nothing is known."""
        pairs = [(outcome, needed) for outcome, needed in self.needed_bytes.items() if needed]
        fitting = [(outcome, needed) for outcome, needed in pairs if outcome.fits]
        return max((outcome.peak_bytes / needed for outcome, needed in fitting or pairs), default=0.0)

    def best(self, plain: Outcome) -> Outcome:
        """Returns the fastest of those that fit once compiled; if there is none, `plain`, which the model says fits,
        unless the compiler refutes it; else what needs least."""
        if not self.proved or (not self.fits and plain.fits and plain not in self.needed_bytes):
            return plain
        first = self.ranked[0]
        return next(outcome for outcome, proof in self.proved.items() if proof is first)

    def findings(self, chosen: Outcome) -> Iterator[Finding]:
        """Yields what is proved of the plan that is returned, and what is not."""
        limit, needed = self.problem.limit_bytes, self.needed_bytes
        if chosen not in needed:
            yield not_compiled(chosen in self.errors, chosen.peak_bytes, limit, [*needed.values()])
        elif not self.fits:
            yield Finding(
                "warning",
                "does-not-fit",
                f"no plan that was compiled fits in {bytes_text(limit)}; this one needs {bytes_text(needed[chosen])}",
                remedy="Use more devices, or a smaller batch",
            )
        else:
            yield Finding("note", "compiled", str(self.proved[chosen]))
        if self.is_cut:
            yield cut_short(self.count)
        failures = [failure_text(error) for outcome, error in self.errors.items() if outcome not in needed]
        flags = [proof.flag for proof in self.proved.values() if proof.flag]
        yield from failure_findings(failures, flags, self.count)
