"""Training plans by the compiler: the plans to compile, and the answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, final

import attrs
from jax.sharding import Mesh

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.errors import CompileError
from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text
from shardrules.programs.audits.audit import audit
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.autoplan.answer.compilations import Compilations
from shardrules.programs.machine.flags import read_flags
from shardrules.programs.training.search.problem import Outcome, TrainingProblem


@final
@attrs.frozen
class ProvedPlan:
    """A plan that was compiled for the cluster."""

    mesh: str
    recipe: str
    """The recipe of the gradients, in words."""
    modelled_seconds: float
    modelled_bytes: int
    audit: AuditReport
    """The audit of the compiled program."""
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
        """Returns whether the compiled program fits."""
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
    # Chosen by hand: steps of decoders compiled for TPUs had such plans the other way round by 3 and 4 %.
    nearly = [outcome for outcome in outcomes if outcome.seconds <= outcomes[0].seconds * 1.03]
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


@final
@attrs.frozen(eq=False)
class TrainingProof:
    """The plans that were compiled, and what each shows."""

    problem: TrainingProblem
    compilations: Compilations[Outcome]
    proved: Mapping[Outcome, ProvedPlan]
    """The plans that the compiler neither failed at nor refused for their size."""

    @classmethod
    def of(
        cls,
        problem: TrainingProblem,
        deadline: Deadline = NO_DEADLINE,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Returns a proof in which nothing is compiled yet."""
        proved: dict[Outcome, ProvedPlan] = {}

        def compiled(outcome: Outcome) -> tuple[int, str]:
            progress(f"compiling {outcome.mesh}, {outcome.recipe}")
            proved[outcome] = proof = prove_outcome(problem, outcome)
            return proof.peak_bytes, proof.flag

        return cls(problem, Compilations(lambda outcome: outcome, compiled, problem.limit_bytes, deadline), proved)

    @property
    def ranked(self) -> tuple[ProvedPlan, ...]:
        """The compiled plans, the best first: plans that fit by their time, then the others by what they need."""
        return tuple(
            sorted(
                self.proved.values(),
                key=lambda proof: (not proof.fits, proof.seconds if proof.fits else float(proof.peak_bytes)),
            )
        )

    @property
    def factor(self) -> float:
        """The modelled bytes of plans over the bytes that they need, at most: the model is off by about as much for
        others of the same step. 0 if nothing is known."""
        peaks = self.compilations.peaks
        fitting = [outcome for outcome in peaks if outcome.fits]
        return max((outcome.peak_bytes / peaks[outcome] for outcome in fitting or peaks), default=0.0)

    def best(self, plain: Outcome) -> Outcome:
        """Returns the fastest of the plans that fit once compiled; if there is none, `plain`, which the model says
        fits, unless the compiler refutes it; else what needs least."""
        compilations = self.compilations
        is_open = plain.fits and plain not in compilations.peaks
        if not self.proved or (not compilations.has_fitting and is_open):
            return plain
        first = self.ranked[0]
        return next(outcome for outcome, proof in self.proved.items() if proof is first)

    def findings(self, chosen: Outcome) -> Iterator[Finding]:
        """Yields what is proved of the plan that is returned, and what is not."""
        compilations = self.compilations
        if chosen not in compilations.peaks:
            yield compilations.not_compiled(chosen, chosen.peak_bytes)
        elif compilations.has_fitting:
            yield Finding("note", "compiled", str(self.proved[chosen]))
        else:
            limit, needed = bytes_text(self.problem.limit_bytes), bytes_text(compilations.peaks[chosen])
            message = f"no plan that was compiled fits in {limit}; this one needs {needed}"
            yield Finding("warning", "does-not-fit", message, remedy="Use more devices, or a smaller batch")
        yield from compilations.cut_short()
        yield from compilations.failed()
