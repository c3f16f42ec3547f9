"""`autoplan(prove=True)`: the plans to compile, and the answer.

After the plan of the search and the fastest of all, the compiler's figures say by what factor the model is off for this
function, and the next search knows that factor. Until a plan fits, each leaves more room than the last; once one does,
cheaper plans are tried. Plans that only the factor of another rules out follow, as long as there are few enough and
there is time. The answer is the cheapest plan that the compiler says fits.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, final

import attrs
import jax
import numpy as np
from jax.sharding import Mesh

from shardrules.core.deadline import Deadline
from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.answer.compilations import LONGER, Compilations
from shardrules.programs.autoplan.answer.plan import AutoPlan, CompiledPlan
from shardrules.programs.autoplan.solve.limits import search_within
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.solver import CLOSE
from shardrules.programs.compiling.compile import compiled_memory

_ROOM, _LAST_ROOM = 0.1, 0.2
"""The part of the limit that plans leave free, by the corrected model, to be compiled where nothing fits so far: for
each that did not fit, and at least for the last that there is time for. Chosen by hand: the model is off by factors
that differ by about a tenth between plans of one function."""

_GAIN = 0.01
"""The least part by which a plan has to cost less than one that fits, to be compiled although it is expected not to
fit; chosen by hand."""

_LEAST_FACTOR, _MOST_FACTOR = 0.2, 5.0
"""The range of factors of a function, chosen by hand: beyond, it is not intermediate results that the model is off by,
and the search would look for plans that do not exist."""


def prove_plan(plan: AutoPlan, fn: Callable[..., Any], mesh: Mesh, deadline: Deadline) -> AutoPlan:
    """Returns the cheapest plan that fits once it is compiled for a mesh; where none does, the one that needs least.

    `plan` is what fits by the model: it is returned if nothing that was compiled fits, unless the compiler refutes it.
    `plan.compiled` has all that were compiled. Arguments that come back as results are donated.
    """
    proof = _Proof.of(plan, fn, mesh, deadline)
    if not deadline.is_over:
        proof.compilations.run(proof.groups())
    return proof.best()


def _scaled(task: Task, factor: float) -> Task:
    """Returns the task in which intermediate results take so many times the memory."""
    occupancy = task.occupancy
    return attrs.evolve(task, occupancy=attrs.evolve(occupancy, temporaries=occupancy.temporaries * factor))


@final
@attrs.define(eq=False)
class _Proof:
    """The plans to compile, each when those before it are known. Plans are told apart by their choices."""

    plan: AutoPlan
    fn: Callable[..., Any]
    mesh: Mesh
    compilations: Compilations[AutoPlan]
    fastest: SearchResult
    """The plan without a limit of memory; as long as none is known that is faster, the one that fits by the model."""
    choices: dict[tuple[int, ...], None] = attrs.field(factory=dict)
    """Everything that searches came across."""

    @classmethod
    def of(cls, plan: AutoPlan, fn: Callable[..., Any], mesh: Mesh, deadline: Deadline) -> Self:
        def compiled(plan: AutoPlan) -> tuple[int, str]:
            donated = sorted(dict.fromkeys(plan.call.argument_indices[index] for index in plan.call.feedback.values()))
            with jax.set_mesh(mesh), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                memory = compiled_memory(plan.jit(fn, donate_argnums=donated).lower(*plan.args), mesh)
            return memory.peak_bytes, memory.flag

        compilations = Compilations(lambda plan: plan.choice, compiled, plan.memory_limit, deadline)
        return cls(plan, fn, mesh, compilations, plan.result)

    def best(self) -> AutoPlan:
        plan, compilations = self.plan, self.compilations
        plans, peaks, fits = compilations.plans, compilations.peaks, compilations.has_fitting
        if not fits and plan.choice not in peaks and (plan.is_expected_to_fit or not peaks):
            finding = compilations.not_compiled(plan.choice, plan.peak_bytes)
            return attrs.evolve(plan, compiled=self.trials(), findings=(finding, *compilations.failed()))
        if fits:
            best = min((plans[choice] for choice in peaks if compilations.fits(choice)), key=lambda plan: plan.cost)
            findings = tuple(compilations.cut_short())
        else:
            best, findings = plans[min(peaks, key=peaks.__getitem__)], (self.nothing_fits(),)
        return attrs.evolve(best, compiled=self.trials(best.choice), findings=(*findings, *compilations.failed()))

    def trials(self, chosen: tuple[int, ...] | None = None) -> tuple[CompiledPlan, ...]:
        return tuple(
            CompiledPlan(
                plan.step_time.seconds, self.modelled_bytes(choice), self.compilations.peaks[choice], choice == chosen
            )
            for choice, plan in self.compilations.plans.items()
        )

    def modelled_bytes(self, choice: tuple[int, ...]) -> int:
        return int(self.plan.task.occupancy.peak(choice))

    def nothing_fits(self) -> Finding:
        count, peaks = len(self.compilations.peaks), self.compilations.peaks_text
        more = ". Raise time_limit: it was reached before more plans could be compiled" * self.compilations.is_cut
        least = f"this one needs {peaks}" if count == 1 else f"the {count} need {peaks}; this one needs least"
        return Finding(
            "warning",
            "does-not-fit",
            f"no plan that was compiled fits in {bytes_text(self.plan.memory_limit)}: {least}",
            remedy=f"Use more devices, a smaller batch, or recompute activations (jax.checkpoint){more}",
        )

    def groups(self) -> Iterator[Iterable[AutoPlan]]:
        """Yields the plan, the fastest of all, and plans between the two, or that need less."""
        yield self.versions(self.plan.result)
        yield self.versions_of_fastest()
        for plan in self.others():
            yield [plan]

    def versions(self, result: SearchResult) -> Iterator[AutoPlan]:
        """Yields a plan just as it is returned without `prove`, and with the limit passed on to the compiler.

        Compilers mostly save memory then, but with a little less than they need, they may take more.
        """
        plan = attrs.evolve(self.plan, result=result)
        yield plan
        if plan.choice in self.compilations.peaks:
            limited = self.limited(plan.task, plan.choice, result)
            if limited.jit(self.fn).compiler_options(self.mesh) != plan.jit(self.fn).compiler_options(self.mesh):
                yield limited

    def versions_of_fastest(self) -> Iterator[AutoPlan]:
        """Yields the fastest plan of all, if that is another."""
        task, cost = self.plan.task, self.plan.task.problem.cost
        if self.plan.cost <= (1 + CLOSE) * self.plan.result.free_bound or self.is_late():
            return
        fastest = search_within(task, sys.maxsize, self.search_deadline)
        self.choices.update(dict.fromkeys(trial.choice for trial in fastest.met))
        if cost(fastest.choice) >= self.plan.cost:
            return
        self.fastest = fastest
        # Only intermediate results are modelled: where arguments do not fit, no compiler has to be asked.
        if task.occupancy.argument_bytes(fastest.choice) <= self.plan.memory_limit:
            yield from self.versions(fastest)

    def others(self) -> Iterator[AutoPlan]:
        """Yields what may be better than what was compiled, until the fastest of all fits."""
        peaks = self.compilations.peaks
        if not peaks:
            return  # the compiler fails at this function
        last = next(iter(peaks))
        task, result = self.plan.task, self.plan.result
        # Six at most, chosen by hand: functions may take minutes to compile.
        while self.compilations.count < 6 and not self.compilations.fits(self.fastest.choice):
            if self.is_late():
                return
            corrected = self.corrected(task, last)
            if corrected is not task or not self.compilations.has_fitting:
                task, result = corrected, self.search(corrected)
            self.choices.update(dict.fromkeys((result.choice, *(trial.choice for trial in result.met))))
            choice = self.next_choice(task)
            if choice is None:
                return
            yield self.limited(task, choice, result)
            last = choice if choice in peaks else last

    def is_late(self) -> bool:
        """Returns whether there is no time to search for another plan, and to compile it."""
        self.compilations.is_cut |= self.compilations.is_late
        return self.compilations.is_late

    def search(self, task: Task) -> SearchResult:
        aimed = self.aimed_bytes
        result = search_within(task, aimed, self.search_deadline, self.plan.result.met)
        if aimed == self.plan.memory_limit:
            return result
        # With all of the limit, plans may cost less than this search says: only the bound for any memory is left.
        return attrs.evolve(result, bound=min(result.bound, self.fastest.free_bound))

    @property
    def search_deadline(self) -> Deadline:
        """The end of another search: half of the time that is left beside compiling once more."""
        return self.compilations.deadline.earlier(LONGER * self.compilations.longest_seconds).share(2)

    @property
    def aimed_bytes(self) -> float:
        """The bytes that the next choice to compile may take, by the corrected model."""
        limit, peaks = self.plan.memory_limit, self.compilations.peaks
        if not peaks or self.compilations.has_fitting:
            return limit
        # The fastest of all is compiled even where the model says that it is far too large.
        is_beyond = self.fastest.choice != self.plan.choice and self.fastest.choice in peaks
        room = _ROOM * max(1, len(peaks) - is_beyond)
        if self.compilations.deadline.seconds_left < 2 * LONGER * self.compilations.longest_seconds:
            room = max(room, _LAST_ROOM)
        return limit * (1 - room)

    def next_choice(self, task: Task) -> tuple[int, ...] | None:
        """Returns what to compile next; `None` if nothing else can be better than what fits.

        It is the cheapest that fits with the factor of the last. After these come those that only this factor rules
        out, which another plan has shown, unless they are like one that did not fit: first what is expected to need
        least.
        """
        cost, aimed, compilations = task.problem.cost, self.aimed_bytes, self.compilations
        most = min(
            (plan.cost for choice, plan in compilations.plans.items() if compilations.fits(choice)), default=np.inf
        )
        peaks = {
            choice: task.occupancy.peak(choice)
            for choice in self.choices
            if choice not in compilations.peaks and choice not in compilations.errors and cost(choice) < most
        }
        fitting = [choice for choice, peak in peaks.items() if peak <= aimed]
        if fitting:
            return min(fitting, key=cost)
        limit, argument_bytes = self.plan.memory_limit, task.occupancy.argument_bytes
        expected = {
            choice: self.expected_bytes(choice)
            for choice in peaks
            if cost(choice) < (1 - _GAIN) * most
            and argument_bytes(choice) <= limit
            and not self.is_like_a_failure(choice)
        }
        if compilations.has_fitting:
            expected = {choice: nbytes for choice, nbytes in expected.items() if nbytes <= limit}
        return min(expected, key=expected.__getitem__, default=None)

    def expected_bytes(self, choice: tuple[int, ...]) -> float:
        """Returns what a choice is expected to need: its factor is that of the compiled one that it is most like.

        The less it has in common with that one, the nearer the factor is to 1.
        """
        parts = {other: float(np.mean(np.equal(choice, other))) for other in self.compilations.peaks}
        nearest = max(parts, key=parts.__getitem__)
        factor = max(self.factor(self.plan.task, nearest), _LEAST_FACTOR) ** parts[nearest]
        return _scaled(self.plan.task, factor).occupancy.peak(choice)

    def is_like_a_failure(self, choice: tuple[int, ...]) -> bool:
        """Returns whether a choice has the cost and the peak of one that did not fit once it was compiled."""
        cost, peak = self.plan.task.problem.cost(choice), self.plan.task.occupancy.peak(choice)
        return any(
            abs(cost - plan.cost) <= _GAIN * plan.cost and abs(peak - self.modelled_bytes(other)) <= _GAIN * peak
            for other, plan in self.compilations.plans.items()
            if not self.compilations.fits(other)
        )

    def limited(self, task: Task, choice: tuple[int, ...], result: SearchResult) -> AutoPlan:
        """Returns the plan of a choice that passes the limit on to the compiler, as if it fitted by the model.

        `result` is of the last search, which may have found another choice.
        """
        limit, peak, arguments = (
            self.plan.memory_limit,
            task.occupancy.peak(choice),
            task.occupancy.argument_bytes(choice),
        )
        if arguments < limit < peak:
            task = _scaled(task, (limit - arguments) / (peak - arguments))
        result = attrs.evolve(task.with_choice(result, choice), fits=True, is_tight=False)
        return attrs.evolve(self.plan, task=task, result=result)

    def factor(self, task: Task, choice: tuple[int, ...]) -> float:
        """Returns how many times what a task says the intermediate results of a compiled choice take."""
        arguments = task.occupancy.argument_bytes(choice)
        modelled = task.occupancy.peak(choice) - arguments
        return (self.compilations.peaks[choice] - arguments) / modelled if modelled > 0 else 1.0

    def corrected(self, task: Task, choice: tuple[int, ...]) -> Task:
        """Returns the task with the factor that a compiled choice shows; the same one if that says nothing new."""
        factor = self.factor(task, choice)
        # Where there is room, compilers fill it: only what does not fit shows that the model says too little.
        if self.compilations.fits(choice):
            factor = min(factor, 1.0)
        if abs(factor - 1) < 0.01:  # another search would find the same plans
            return task
        return _scaled(task, min(max(factor, _LEAST_FACTOR), _MOST_FACTOR))
