"""What the compiler makes of training plans."""

from collections.abc import Sequence
from typing import final

import attrs
from jax.sharding import Mesh

from shardrules.analysis.analyzer import ShardingAnalyzer
from shardrules.analysis.audits.report import AuditReport
from shardrules.analysis.machine.flags import read_flags
from shardrules.core.check import bytes_text
from shardrules.training.search.problem import Outcome, TrainingProblem

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
    report = ShardingAnalyzer(mesh).audit(
        step, *planned.args, target=attrs.evolve(target, flags=flags), donate_argnums=(0, 1)
    )
    return ProvedPlan(
        outcome.mesh,
        str(outcome.recipe),
        outcome.seconds,
        outcome.peak_bytes,
        report,
        problem.limit_bytes,
    )


def ranked(proofs: list[ProvedPlan]) -> tuple[ProvedPlan, ...]:
    """Returns compiled plans, the best first: those that fit by their time, then the others by what they need."""
    return tuple(
        sorted(proofs, key=lambda proof: (not proof.fits, proof.seconds if proof.fits else float(proof.peak_bytes)))
    )
