"""`autoplan(prove=True)`: the compiler decides which plans fit.

First the plan that is returned without it is compiled, then the fastest of all, whatever the model of memory says of
it: what is returned is never worse than without. What the compiler needs says by what factor the model is off for this
function, and the next search knows that factor. Until a plan fits, each leaves more room than the last; once one does,
cheaper ones are tried. A factor is that of one plan: those that it rules out follow, as long as there are few enough
and there is time. The answer is the cheapest plan that the compiler says fits.
"""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.errors import ConfigError, DoesNotFitError, ShardRulesError
from shardrules.core.finding import Finding
from shardrules.programs.autoplan.answer.plan import AutoPlan, CompiledPlan
from shardrules.programs.autoplan.solve.deadline import Deadline
from shardrules.programs.autoplan.solve.limits import search_within
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.solver import CLOSE
from shardrules.programs.compiling.compile import compiled_memory
from shardrules.programs.machine.hardware import Hardware, sheets
from shardrules.programs.machine.targets import Target

_MOST_COMPILED = 6
"""How many plans are compiled at most. What the second says hardly changes the factor of a function; with twice as
many, functions that take minutes to compile use up every time limit."""

_ROOM, _LAST_ROOM = 0.1, 0.2
"""The part of the limit that plans leave free, by the corrected model, to be compiled where nothing fits so far: for
each that did not fit, and at least for the last that there is time for. Plans of one function differ by about a tenth
in what the model is off by. Halved, several are compiled in vain; doubled, they are slower than need be."""

_GAIN = 0.01
"""By what part a plan has to cost less than one that fits to be compiled although it is expected not to fit. With a
tenth of it, compilers work for minutes for less than the model of costs can tell."""

LONGER = 1.25
"""How many times as long as the slowest so far another plan may take to compile. With 1, every other that is started
last ends after its time; with 2, the last is often not compiled that there is time for."""

_SAME_FACTOR = 0.01
"""Factors that differ by less are the same: another search would find the same plans."""

_LEAST_FACTOR, _MOST_FACTOR = 0.2, 5.0
"""Between what the factor of a function has to be: beyond, it is not intermediate results that the model is off by, and
the search would look for plans that do not exist."""


def device_mesh(mesh: AnyMesh, hardware: Hardware) -> Mesh:
    """Returns a mesh to compile for: the mesh itself, or one like it of devices that need not be present."""
    if isinstance(mesh, Mesh):
        return mesh
    name = next((name for name, sheet in sheets().items() if sheet.name == hardware.name), "")
    platform, _, chip = name.partition(":")
    if platform == "cuda":
        return Target("cuda", chip, (mesh.size,)).mesh(mesh)
    if platform == "cpu":
        return Target("cpu", shape=(mesh.size,)).mesh(mesh)
    cause = f"{chip} slices have several shapes" if platform == "tpu" else f"{hardware.name!r} is not a ready sheet"
    raise ConfigError(
        f"autoplan(prove=True) compiles, and the mesh {mesh_text(mesh)} has no devices to compile for: {cause}. Pass "
        'a mesh of a target, such as mesh=sr.Target.parse("tpu:v5e:4x4").mesh(mesh)'
    )


def prove_plan(plan: AutoPlan, fn: Callable[..., Any], mesh: Mesh, deadline: Deadline) -> AutoPlan:
    """Returns the cheapest plan that fits once it is compiled for a mesh; where none does, the one that needs least.

    `plan` is what fits by the model: it is returned if nothing that was compiled fits, unless the compiler refutes it.
    `plan.compiled` has all that were compiled. Arguments that come back as results are donated.
    """
    return _Compilations(plan, fn, mesh, deadline).best()


def _scaled(task: Task, factor: float) -> Task:
    """Returns the task in which intermediate results take so many times the memory."""
    occupancy = task.occupancy
    return attrs.evolve(task, occupancy=attrs.evolve(occupancy, temporaries=occupancy.temporaries * factor))


@final
@attrs.define(eq=False)
class _Compilations:
    plan: AutoPlan
    fn: Callable[..., Any]
    mesh: Mesh
    deadline: Deadline
    compiled: dict[tuple[int, ...], tuple[AutoPlan, CompiledPlan]] = attrs.field(factory=dict)
    """By choice, in the order in which they were compiled."""
    failures: dict[tuple[int, ...], str] = attrs.field(factory=dict)
    """By choice, what the compiler failed at, and its words."""
    flags: dict[tuple[int, ...], str] = attrs.field(factory=dict)
    """By choice, the flag without which the compiler fails at it."""
    fastest: SearchResult = attrs.field(default=attrs.Factory(lambda self: self.plan.result, takes_self=True))
    """The plan without a limit of memory; as long as none is known that is faster, the one that fits by the model."""
    choices: dict[tuple[int, ...], None] = attrs.field(factory=dict)
    """Everything that searches came across."""
    longest_seconds: float = 0.0
    """The longest that compiling took."""

    def best(self) -> AutoPlan:
        """Compiles as many plans as there is time for, and returns the best."""
        is_done = not self.is_late
        if is_done:
            self.compile_as_is(self.plan.result)
            is_done = self.compile_fastest() and self.compile_others()
        trials = [trial for _, trial in self.compiled.values()]
        if not any(map(self.fits, trials)) and self.plan.choice not in self.compiled and (self.plan.fits or not trials):
            peaks = [trial.peak_bytes for trial in trials]
            has_failed = self.plan.choice in self.failures
            finding = not_compiled(has_failed, self.plan.peak_bytes, self.plan.memory_limit, peaks)
            return attrs.evolve(self.plan, compiled=tuple(trials), findings=(finding, *self.failed))
        best, chosen = min(self.compiled.values(), key=self.rank)
        trials = [attrs.evolve(trial, is_chosen=trial is chosen) for trial in trials]
        findings = () if is_done else (cut_short(len(trials)),)
        if not self.fits(chosen):
            findings = (_does_not_fit(self.plan, trials, not is_done),)
        return attrs.evolve(best, compiled=tuple(trials), findings=(*findings, *self.failed))

    @property
    def failed(self) -> Iterator[Finding]:
        """Findings on what the compiler failed at."""
        count = len(self.compiled) + len(self.failures)
        return failure_findings([*self.failures.values()], [*self.flags.values()], count)

    def compile_fastest(self) -> bool:
        """Compiles the fastest plan of all, if that is another; returns whether there was time for it."""
        task, result, cost = self.plan.task, self.plan.result, self.plan.task.problem.cost
        if self.plan.cost <= (1 + CLOSE) * result.free_bound:
            return True
        if self.is_late:
            return False
        fastest = search_within(task, sys.maxsize, self.search_deadline)
        self.choices.update(dict.fromkeys(trial.choice for trial in fastest.met))
        choice = fastest.choice
        if cost(choice) >= self.plan.cost:
            return True
        self.fastest = fastest
        # Only intermediate results are modelled: where arguments do not fit, no compiler has to be asked.
        if task.occupancy.argument_bytes(choice) > self.plan.memory_limit:
            return True
        if self.is_late:
            return False
        self.compile_as_is(fastest)
        return True

    def compile_others(self) -> bool:
        """Compiles plans between the two, or that need less; returns whether there was time for all."""
        if not self.compiled:
            return True  # the compiler fails at this function
        last = next(iter(self.compiled))
        task, result = self.plan.task, self.plan.result
        while len(self.compiled) + len(self.failures) < _MOST_COMPILED and not self.is_fastest_fitting:
            if self.is_late:
                return False
            corrected = self.corrected(task, last)
            if corrected is not task or not self.has_fitting:
                task, result = corrected, self.search(corrected)
            self.choices.update(dict.fromkeys((result.choice, *(trial.choice for trial in result.met))))
            choice = self.next_choice(task)
            if choice is None:
                break
            if self.is_late:
                return False
            self.compile(self.limited(task, choice, result))
            last = choice if choice in self.compiled else last
        return True

    def search(self, task: Task) -> SearchResult:
        """Searches within the limit, less room."""
        aimed = self.aimed_bytes
        result = search_within(task, aimed, self.search_deadline, self.plan.result.met)
        if aimed == self.plan.memory_limit:
            return result
        # With all of the limit, plans may cost less than this search says: only the bound for any memory is left.
        return attrs.evolve(result, bound=min(result.bound, self.fastest.free_bound))

    @property
    def search_deadline(self) -> Deadline:
        """When another search has to end: in half of the time that is left beside compiling once more."""
        return self.deadline.earlier(LONGER * self.longest_seconds).share(2)

    @property
    def is_late(self) -> bool:
        """Whether there is no time to compile another plan, which cannot be interrupted.

        Of the first it is unknown how long it takes.
        """
        return self.deadline.seconds_left <= LONGER * self.longest_seconds

    @property
    def has_fitting(self) -> bool:
        """Whether anything that was compiled fits."""
        return any(self.fits(trial) for _, trial in self.compiled.values())

    def fits(self, trial: CompiledPlan) -> bool:
        """Whether the compiler says that a plan is within the limit."""
        return trial.peak_bytes <= self.plan.memory_limit

    @property
    def aimed_bytes(self) -> float:
        """What the next choice to compile may take, by the corrected model."""
        limit = self.plan.memory_limit
        if not self.compiled or self.has_fitting:
            return limit
        # The fastest of all is compiled even where the model says that it is far too large.
        is_beyond = self.fastest.choice != self.plan.choice and self.fastest.choice in self.compiled
        room = _ROOM * max(1, len(self.compiled) - is_beyond)
        if self.deadline.seconds_left < 2 * LONGER * self.longest_seconds:
            room = max(room, _LAST_ROOM)
        return limit * (1 - room)

    @property
    def is_fastest_fitting(self) -> bool:
        """Whether the fastest plan of all fits."""
        choice = self.fastest.choice
        return choice in self.compiled and self.fits(self.compiled[choice][1])

    def rank(self, compiled: tuple[AutoPlan, CompiledPlan]) -> tuple[bool, float]:
        """Orders plans: those that fit by their cost, then the others by what they need."""
        plan, trial = compiled
        fits = self.fits(trial)
        return not fits, plan.cost if fits else float(trial.peak_bytes)

    def next_choice(self, task: Task) -> tuple[int, ...] | None:
        """Returns what to compile next; `None` if nothing else can be better than what fits.

        It is the cheapest that fits with the factor of the last. After these come those that only this factor rules
        out, which another plan has shown, unless they are like one that did not fit: first what is expected to need
        least.
        """
        cost, aimed = task.problem.cost, self.aimed_bytes
        most = min((plan.cost for plan, trial in self.compiled.values() if self.fits(trial)), default=np.inf)
        peaks = {
            choice: task.compiled_peak(choice)
            for choice in self.choices
            if choice not in self.compiled and choice not in self.failures and cost(choice) < most
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
        if self.has_fitting:
            expected = {choice: nbytes for choice, nbytes in expected.items() if nbytes <= limit}
        return min(expected, key=expected.__getitem__, default=None)

    def expected_bytes(self, choice: tuple[int, ...]) -> float:
        """Returns what a choice is expected to need: its factor is that of the compiled one that it is most like.

        The less it has in common with that one, the nearer the factor is to 1.
        """
        parts = {other: float(np.mean(np.equal(choice, other))) for other in self.compiled}
        nearest = max(parts, key=parts.__getitem__)
        factor = max(self.factor(self.plan.task, nearest), _LEAST_FACTOR) ** parts[nearest]
        return _scaled(self.plan.task, factor).compiled_peak(choice)

    def is_like_a_failure(self, choice: tuple[int, ...]) -> bool:
        """Whether a choice has the cost and the peak of one that did not fit once it was compiled."""
        cost, peak = self.plan.task.problem.cost(choice), self.plan.task.compiled_peak(choice)
        return any(
            abs(cost - plan.cost) <= _GAIN * plan.cost and abs(peak - trial.predicted_bytes) <= _GAIN * peak
            for plan, trial in self.compiled.values()
            if not self.fits(trial)
        )

    def compile_as_is(self, result: SearchResult) -> None:
        """Compiles a plan just as it is returned without `prove`; if it does not fit, with the limit passed on, too.

        Compilers mostly save memory then, but with a little less than they need, they may take more.
        """
        plan = attrs.evolve(self.plan, result=result)
        self.compile(plan)
        if plan.choice not in self.compiled or self.fits(self.compiled[plan.choice][1]) or self.is_late:
            return
        limited = self.limited(plan.task, plan.choice, result)
        if limited.jit(self.fn).compiler_options(self.mesh) != plan.jit(self.fn).compiler_options(self.mesh):
            self.compile(limited)

    def limited(self, task: Task, choice: tuple[int, ...], result: SearchResult) -> AutoPlan:
        """Returns the plan of a choice that passes the limit on to the compiler, as if it fitted by the model.

        `result` is of the last search, which may have found another choice.
        """
        task = self.fitted(task, choice)
        result = attrs.evolve(task.with_choice(result, choice), fits=True, is_tight=False)
        return attrs.evolve(self.plan, task=task, result=result)

    def compile(self, plan: AutoPlan) -> None:
        """Compiles a plan; of one choice, the one that needs less is kept."""
        choice, owners = plan.choice, plan.call.argument_indices
        donated = sorted(dict.fromkeys(owners[index] for index in plan.call.feedback.values()))
        start = time.monotonic()
        try:
            with jax.set_mesh(self.mesh), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                memory = compiled_memory(plan.jit(self.fn, donate_argnums=donated).lower(*plan.args), self.mesh)
            peak_bytes = memory.peak_bytes
            if memory.flag:
                self.flags[choice] = memory.flag
        except DoesNotFitError as error:  # the compiler for TPUs gives up on what is far too large
            peak_bytes = max(error.needed_bytes, self.plan.memory_limit + 1)
        except Exception as error:  # noqa: BLE001  whatever a compiler does, no search is lost
            if choice not in self.compiled:
                self.failures[choice] = failure_text(error)
            return
        finally:
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)
        modelled = self.plan.task.compiled_peak(choice)
        if choice not in self.compiled or peak_bytes < self.compiled[choice][1].peak_bytes:
            self.compiled[choice] = plan, CompiledPlan(plan.step_time.seconds, int(modelled), peak_bytes)

    def fitted(self, task: Task, choice: tuple[int, ...]) -> Task:
        """Returns the task with such a factor that a choice fits, if arguments leave room for anything."""
        limit, peak = self.plan.memory_limit, task.compiled_peak(choice)
        arguments = task.occupancy.argument_bytes(choice)
        if peak <= limit or arguments >= limit:
            return task
        factor = (limit - arguments) / (peak - arguments)
        return _scaled(task, factor)

    def factor(self, task: Task, choice: tuple[int, ...]) -> float:
        """Returns how many times what a task says the intermediate results of a compiled choice take."""
        _, trial = self.compiled[choice]
        arguments = task.occupancy.argument_bytes(choice)
        modelled = task.compiled_peak(choice) - arguments
        return (trial.peak_bytes - arguments) / modelled if modelled > 0 else 1.0

    def corrected(self, task: Task, choice: tuple[int, ...]) -> Task:
        """Returns the task with the factor that a compiled choice shows; the same one if that says nothing new."""
        _, trial = self.compiled[choice]
        factor = self.factor(task, choice)
        # Where there is room, compilers fill it: only what does not fit shows that the model says too little.
        if self.fits(trial):
            factor = min(factor, 1.0)
        if abs(factor - 1) < _SAME_FACTOR:
            return task
        factor = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
        return _scaled(task, factor)


def failure_text(error: Exception) -> str:
    """Returns the first line of a compiler's error, or of what a function raises when it is lowered for a platform."""
    line = str(error).partition("\n")[0]
    return line if isinstance(error, ShardRulesError) else f"{type(error).__name__}: {line}"


def failure_findings(failures: Sequence[str], flags: Sequence[str], count: int) -> Iterator[Finding]:
    """Yields what compilers failed at, of so many plans, and the flags that they were given not to."""
    if failures:
        yield Finding(
            "warning",
            "compiler-failed",
            f"the compiler failed at {len(failures)} of {count} plans, of which nothing is proved: {failures[0]}",
        )
    for flag, flag_count in Counter(flags).items():
        yield Finding(
            "note",
            "compiled-with-flag",
            f"the compiler fails at {flag_count} of {count} plans without --{flag}, and compiled them with it",
            remedy=f"Pass --{flag} to audit them, too",
        )


def _does_not_fit(plan: AutoPlan, trials: Sequence[CompiledPlan], is_cut: bool) -> Finding:
    more = ". Raise time_limit: it was reached before more plans could be compiled" * is_cut
    peaks = ", ".join(bytes_text(nbytes) for nbytes in sorted(trial.peak_bytes for trial in trials))
    least = f"this one needs {peaks}" if len(trials) == 1 else f"the {len(trials)} need {peaks}; this one needs least"
    return Finding(
        "warning",
        "does-not-fit",
        f"no plan that was compiled fits in {bytes_text(plan.memory_limit)}: {least}",
        remedy=f"Use more devices, a smaller batch, or recompute activations (jax.checkpoint){more}",
    )


def cut_short(count: int) -> Finding:
    """Returns the finding that there was no time to compile more plans than so many."""
    counted = "1 plan was" if count == 1 else f"{count} plans were"
    return Finding(
        "note",
        "not-all-compiled",
        f"the time limit was reached when {counted} compiled; another may be faster",
        remedy="Raise time_limit",
    )


def not_compiled(has_failed: bool, peak_bytes: int, limit_bytes: int, others: Sequence[int]) -> Finding:
    """Returns the finding that a plan is what the model says fits, with what was proved of `others`: their peaks."""
    reason = (
        "the compiler failed at this plan"
        if has_failed
        else "the time limit was reached before any plan could be compiled"
    )
    peaks = ", ".join(bytes_text(nbytes) for nbytes in sorted(others))
    refuted = f"; {len(others)} other{'s' * (len(others) > 1)} were compiled, and need {peaks}" if others else ""
    return Finding(
        "warning",
        "not-compiled",
        f"{reason}, which is modelled to take {bytes_text(peak_bytes)} of {bytes_text(limit_bytes)}{refuted}",
        remedy="" if has_failed else "Raise time_limit",
    )
