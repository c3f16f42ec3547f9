"""The search over stages: layers side by side on groups of devices, with microbatches that go from one to the next.

Stages wait at the beginning and at the end of a step, for `stages - 1` of `microbatches + stages - 1` rounds, and each
round computes a microbatch at most; some traffic between hosts no layout avoids. So what a set-up takes at least is
known before it is planned, with stages and without. Where that is less with stages, as over slow networks, they come
after the first meshes without, and other meshes are planned only as far as they may be better. Elsewhere stages come
last: those that may be better than the best plan without, and of these the most promising.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import final

import attrs

from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import MicrobatchError
from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.training.cluster import Shape
from shardrules.programs.training.keep.keep import Keep
from shardrules.programs.training.search.problem import Outcome, TrainingProblem
from shardrules.programs.training.search.search import TrainingSearch, first_fitting
from shardrules.programs.training.stages.run import STAGE_AXIS, tick_count

_NEAR = 1.1
"""The part by which the fastest of the first set-ups with stages may be slower than the fastest plan without, for more
with as many stages to be planned early; chosen by hand."""

_LEAST_COMPUTING = 0.9
"""The part of what computing takes on the first meshes that it takes on others at least; chosen by hand."""

_MOST_PADDING = 0.125
"""The places without a layer that stages may have, as a part of the layers; chosen by hand."""


def search_plans(search: TrainingSearch) -> None:
    """Searches for plans without stages and with them, as the user asks for."""
    StageSearch(search).search_all()
    search.shrink()


def search_again(search: TrainingSearch, factor: float) -> bool:
    """Searches for plans that take less memory by a factor, and returns whether there are more that fit."""
    before = search.fitting
    search.leave_room(factor)
    StageSearch(search).run()
    return any(outcome not in before for outcome in search.fitting)


@final
@attrs.frozen
class Staging:
    """A mesh with stages, and how many microbatches go through them."""

    shape: Shape
    """The stages first."""
    microbatches: int
    places: int
    """The layers that stages have room for."""
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.shape[0]

    @property
    def rounds(self) -> int:
        return tick_count(self.stages, self.microbatches, self.chunks)

    def waiting(self, layers: int) -> float:
        """The time that stages wait, as a part of what layers take where no device waits."""
        return self.rounds / (self.chunks * self.microbatches) * self.places / layers - 1

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.stages} stages{chunks} and {self.microbatches} microbatches"


@final
@attrs.define(eq=False)
class StageSearch:
    """Looks for plans with stages, beside those that a search has found."""

    search: TrainingSearch
    plans: dict[Staging, Outcome] = attrs.field(factory=dict)
    """The fastest plan of each set-up, without a limit of memory."""
    why_none: str = ""
    """The reason that the first set-up was refused for which there is no plan."""

    def search_all(self) -> None:
        """Plans without stages and with them, as the user asks for."""
        search = self.search
        if search.stages in (None, 1):
            search.begin()
            if search.stages is None:
                self.run_early()
            search.run()
        self.run()

    def run_early(self) -> None:
        """Plans set-ups that take less at the least than any without stages: the first of each number of stages, and
        all of the best number where that is nearly as fast as plans without stages."""
        self.why_none = self.guarded(self.planned_early) or self.why_none

    def run(self) -> None:
        """Plans, and notes why the best plan has no stages."""
        self.search.why_no_stages = "stages=1" if self.search.stages == 1 else self.guarded(self.planned)

    def guarded(self, plan: Callable[[], str]) -> str:
        try:
            return plan()
        except Exception as error:
            # Where stages are not asked for, an error does not lose the plans without them.
            if self.search.stages is not None:
                raise
            return f"planning them failed: {type(error).__name__}: {' '.join(str(error).split())}"

    def planned_early(self) -> str:
        search = self.search
        if self.refusal() or not self.outcomes:
            return ""
        traffic, hidden = self.problem.traffic, self.hidden
        search.least_seconds = traffic.least_seconds(_LEAST_COMPUTING * self.compute_seconds, hidden)
        least = traffic.least_seconds(self.compute_seconds, hidden)
        promising = [staging for staging in self.ordered() if self.least_seconds(staging) < least]
        if self.plan_firsts(promising, _NEAR * min(outcome.seconds for outcome in self.outcomes)):
            self.plan_promising(
                [staging for staging, seconds in self.chunked() if search.best is None or seconds < search.best.seconds]
            )
        return ""

    def plan_firsts(self, stagings: Sequence[Staging], most_seconds: float) -> bool:
        """Plans the first set-up of each number of stages, and all of the best number if that takes less than
        `most_seconds`; returns whether it does."""
        firsts = {staging.stages: staging for staging in reversed(stagings)}
        self.plan_promising(sorted(firsts.values(), key=self.least_seconds))
        fastest = min(self.plans, key=lambda staging: self.plans[staging].seconds, default=None)
        if fastest is None or self.plans[fastest].seconds >= most_seconds:
            return False
        self.plan_promising([staging for staging in stagings if staging.stages == fastest.stages])
        return True

    def plan_promising(self, stagings: Sequence[Staging]) -> None:
        """Plans set-ups that may be better than the best plan, as long as there is time."""
        for staging in stagings:
            best = self.search.best
            may_be_better = best is None or self.least_seconds(staging) < best.seconds
            # Without time, a search is late only where something is left to plan.
            if staging not in self.plans and may_be_better and not self.search.is_out_of_time:
                self.plan(staging)

    def planned(self) -> str:
        """Plans, and says why the best plan has no stages; empty where it has some."""
        search = self.search
        refusal = self.refusal()
        if refusal:
            return refusal
        stagings = self.ordered()
        if not stagings:
            return self.obstacle()
        # Chosen by hand: plans with an axis more take up to five times as long. Asked for, four meshes of six plans.
        least, before, most_count = self.least_seconds(stagings[0]), search.best, max(1, search.count // 10)
        self.plan_firsts(stagings, 0.0 if before is None or before.recipe.stages > 1 else before.seconds)
        more = 24 if search.stages else max(0, most_count - len(self.plans))
        most_count = search.count + more
        for staging in stagings:
            if search.count < most_count:
                self.plan_promising([staging])
        for staging, seconds in self.chunked():
            if search.count < most_count + more and (search.best is None or seconds < search.best.seconds):
                self.plan_promising([staging])
        if search.best is not None and search.best.recipe.stages > 1:
            return ""
        return self.why_not(stagings[0], least)

    def ordered(self) -> list[Staging]:
        """The set-ups, those first that take the least, by turns with many microbatches for each stage and with few.

        With many, stages wait less, but gather weights and send more often: what is faster is known when it is planned.
        """
        by_count: dict[int, list[Staging]] = {}
        stagings = dict.fromkeys(self.stagings())
        for each in sorted(stagings, key=lambda each: (self.least_seconds(each), each.stages, len(each.shape))):
            by_count.setdefault(each.microbatches // each.stages, []).append(each)
        turns = itertools.zip_longest(*by_count.values())
        return [staging for turn in turns for staging in turn if staging is not None]

    def refusal(self) -> str:
        """The reason that layers cannot be in stages; empty where they can."""
        problem = self.problem
        if problem.cluster.mesh is not None and STAGE_AXIS not in problem.cluster.mesh.shape:
            return f"the mesh has no axis {STAGE_AXIS!r}"
        if problem.split_refusal:
            return "the loss cannot be computed by microbatches"
        try:
            return "" if problem.layer_count > 1 else "the model has one layer"
        except MicrobatchError as error:
            return str(error)

    def chunked(self) -> list[tuple[Staging, float]]:
        """The set-ups planned on the fastest mesh, with chunks, and what they take if only bounds differ."""
        if not self.plans:
            return []
        layers = self.problem.layer_count
        fastest = min(self.plans, key=lambda staging: self.plans[staging].seconds)
        stagings = [staging for staging in self.plans if staging.shape == fastest.shape]
        chunked = []
        for chunks, staging in itertools.product((2, 4), stagings):
            # Each chunk has as many places, of which the last ones may be without a layer.
            places = -(-layers // (chunks * fastest.stages)) * chunks * fastest.stages
            if places <= layers * (1 + _MOST_PADDING):
                with_chunks = attrs.evolve(staging, places=places, chunks=chunks)
                planned = self.plans[staging]
                computing = planned.compute_seconds - staging.waiting(layers) * self.problem.layer_seconds
                more = self.least_seconds(with_chunks, computing) - self.least_seconds(staging, computing)
                chunked.append((with_chunks, planned.seconds + more))
        return chunked

    @property
    def problem(self) -> TrainingProblem:
        return self.search.problem

    def stagings(self) -> Iterator[Staging]:
        """Yields the meshes with stages that suit devices, layers and batch, with many microbatches and with few."""
        cluster, layers = self.problem.cluster, self.problem.layer_count
        request = self.search.stages
        for stages in range(2, min(cluster.count, layers) + 1) if request is None else [request]:
            places = -(-layers // stages) * stages
            is_padded = request is None and places > layers * (1 + _MOST_PADDING)
            if cluster.count % stages or stages > layers or is_padded:
                continue
            rest = cluster.count // stages
            for inner in (1, 2, 4, 8):  # larger ones would send over slow networks
                shape = tuple(size for size in (stages, rest // inner, inner) if size > 1)
                if rest % inner or not self.allows(shape):
                    continue
                # With 32 for each stage, stages wait for 3 % of the time, with 8 for 11 %.
                counts = [self.microbatches(stages, rest // inner, most * stages) for most in (32, 8)]
                for count in dict.fromkeys(filter(None, counts)):
                    yield Staging(shape, count, places)

    def allows(self, shape: Shape) -> bool:
        mesh = self.problem.cluster.mesh
        if mesh is None:
            return self.problem.cluster.allows(shape)
        sizes = mesh_sizes(mesh)
        return next(iter(sizes)) == STAGE_AXIS and tuple(size for size in sizes.values() if size > 1) == shape

    def obstacle(self) -> str:
        """The reason that no mesh and no number of microbatches suits stages."""
        problem, request = self.problem, self.search.stages
        layers, count, mesh = problem.layer_count, problem.cluster.count, problem.cluster.mesh
        if mesh is not None and (next(iter(mesh.shape)) != STAGE_AXIS or request != mesh.shape[STAGE_AXIS]):
            return f"the mesh is {mesh_text(mesh)}; its first axis has to be {STAGE_AXIS!r}, with as many devices"
        if request is not None and request > layers:
            return f"there are {layers} layers"
        if request is not None and count % request:
            return f"{count} devices do not divide into {request} stages"
        if request is not None and (self.search.microbatches or 0) % request:
            return f"microbatches have to be a multiple of the stages, got {self.search.microbatches}"
        examples = problem.loss.batch_size
        return f"{layers} layers, {count} devices and {examples} examples do not divide into stages and microbatches"

    def microbatches(self, stages: int, splits: int, most: int) -> int:
        """The most microbatches up to a number for which all devices inside of a stage have examples, as many for each
        stage; 0 if there are none."""
        request, examples = self.search.microbatches, self.problem.loss.batch_size
        most = min(most, examples // splits)
        counts = range(stages, most + 1, stages) if request is None else (request,)
        return max((count for count in counts if examples % (count * splits) == 0 and count % stages == 0), default=0)

    def least_seconds(self, staging: Staging, computing: float | None = None) -> float:
        """The least time of a set-up: what computing takes, and waiting, and traffic between hosts."""
        rounds = staging.rounds / staging.microbatches
        computing = self.compute_seconds if computing is None else computing
        layer_seconds = min(computing, self.problem.layer_seconds)
        # What comes before and after the layers, and the optimizer, waits for nobody.
        compute = computing + staging.waiting(self.problem.layer_count) * layer_seconds
        return self.problem.traffic.least_seconds(compute, self.hidden, staging.stages, rounds)

    @property
    def hidden(self) -> float:
        """The part of how gradients are added up that computing hides."""
        return (self.problem.options.assumptions or Assumptions()).hidden

    @property
    def compute_seconds(self) -> float:
        """The time that computing takes without stages, on the mesh where it takes least if no two hosts compute the
        same."""
        hosts = self.problem.traffic.hosts
        times = (each.compute_seconds / (hosts if self.repeats(each) else 1) for each in self.outcomes)
        return min(times, default=0.0)

    @property
    def outcomes(self) -> list[Outcome]:
        """The plans without stages, and without a limit of memory."""
        return [outcome for outcome in self.search.free.values() if outcome.result is not None]

    def repeats(self, outcome: Outcome) -> bool:
        """Hosts compute the same, as a plan takes less than adding up gradients over all of them."""
        return outcome.seconds < self.problem.traffic.reducing_seconds(self.problem.traffic.hosts)

    def plan(self, staging: Staging) -> None:
        keeps = self.keeps(staging)
        free = self.plan_one(staging, keeps[0], is_free=True)
        if free.result is None:
            self.why_none = self.why_none or free.refusal
            return
        self.plans[staging] = free
        best = self.search.best
        # A limit makes plans hardly faster: only a set-up that is fast without one is made to fit.
        if not free.fits and (best is None or free.seconds < best.seconds):
            first_fitting(range(len(keeps)), lambda index: self.plan_one(staging, keeps[index]).fits)

    def keeps(self, staging: Staging) -> list[Keep]:
        """The choices of what the backward pass keeps, from the fastest on: all microbatches keep it at once."""
        keeps = self.problem.keeps(staging.microbatches, has_stages=True)
        rounds, most = staging.rounds / staging.chunks, self.problem.host_limit_bytes * self.problem.cluster.count
        first = min(range(len(keeps)), key=lambda index: (keeps[index].seconds, index))
        return [keeps[first], *(keep for keep in keeps[first + 1 :] if rounds * keep.host_bytes <= most)]

    def plan_one(self, staging: Staging, keep: Keep, *, is_free: bool = False) -> Outcome:
        search = self.search
        recipe = attrs.evolve(
            search.recipe(staging.microbatches, 1), keep=keep, stages=staging.stages, chunks=staging.chunks
        )
        outcome = search.plan(staging.shape, recipe, is_free)
        outcomes = search.outcomes if outcome.fits or not is_free else search.columns
        outcomes[staging.shape, recipe] = outcome
        return outcome

    def why_not(self, first: Staging, least: float) -> str:
        waits = f"with {first}, stages wait in {first.stages - 1} of {first.rounds} rounds"
        fitting = [outcome for outcome in self.search.outcomes.values() if outcome.fits and outcome.recipe.stages > 1]
        if not self.plans:
            if self.why_none:
                return f"{first}: {self.why_none}"
            best = self.search.best
            is_slower = best is not None and least >= best.seconds
            if is_slower:
                return f"{waits}: a step would take {seconds_text(least)} at least"
            return "time_limit left no time for them" if self.search.is_late else "enough was planned without them"
        staging, fastest = min(self.plans.items(), key=lambda item: item[1].seconds)
        limit = " without a limit of memory" if fastest not in fitting else ""
        chunks = f" and {staging.chunks} chunks" if staging.chunks > 1 else ""
        return (
            f"the fastest set-up with stages that was planned, {fastest.mesh} with {staging.microbatches} "
            f"microbatches{chunks}, takes {seconds_text(fastest.seconds)}{limit}: stages wait in "
            f"{staging.stages - 1} of {staging.rounds} rounds"
        )
