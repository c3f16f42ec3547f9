"""Proof by compiling, for `autoplan` and `plan_training`: the compiler decides which plans fit.

First comes the plan that is returned without proof, then the fastest of all, whatever the model of memory says of it,
then others: what is returned is never worse than without. Callers know which plans these are.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

import attrs

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.errors import DoesNotFitError, ShardRulesError
from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text

LONGER = 1.25
"""The longest that another plan may take to compile, as a part of the slowest so far; chosen by hand."""

_Plan = TypeVar("_Plan")


@final
@attrs.define(eq=False)
class Compilations(Generic[_Plan]):
    """The plans that were compiled so far, by key, in the order in which they were."""

    key: Callable[[_Plan], Any]
    """Plans with equal keys are versions of one: the version that needs least counts."""
    compiler: Callable[[_Plan], tuple[int, str]]
    """Returns the bytes that a plan needs, and the flag without which the compiler fails at it."""
    limit_bytes: int
    deadline: Deadline = NO_DEADLINE
    plans: dict[Any, _Plan] = attrs.field(factory=dict)
    peaks: dict[Any, int] = attrs.field(factory=dict)
    """The bytes that plans need, also plans that the compiler refused for their size."""
    errors: dict[Any, Exception] = attrs.field(factory=dict)
    flags: dict[Any, str] = attrs.field(factory=dict)
    longest_seconds: float = 0.0
    is_cut: bool = False
    """True once there was no time for a plan."""

    def run(self, groups: Iterable[Iterable[_Plan]]) -> None:
        """Compiles plans: of each group one after the other, until one fits."""
        for plans in groups:
            any(map(self.add, plans))

    def add(self, plan: _Plan) -> bool:
        """Compiles a plan unless that was done before, and returns whether it fits.

        Without time for it, only the first is compiled.
        """
        key = self.key(plan)
        if self.plans.get(key) is plan or key in self.failures:
            return self.fits(key)
        if self.count and self.is_late:
            self.is_cut = True
            return False
        start = time.monotonic()
        try:
            peak_bytes, flag = self.compiler(plan)
            if flag:
                self.flags[key] = flag
        except DoesNotFitError as error:  # the compiler for TPUs gives up on what is far too large
            self.errors[key] = error
            peak_bytes = max(error.needed_bytes, self.limit_bytes + 1)
        except Exception as error:  # noqa: BLE001  whatever a compiler does, no search is lost
            self.errors[key] = error
            return False
        finally:
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)
        if key not in self.peaks or peak_bytes < self.peaks[key]:
            self.plans[key], self.peaks[key] = plan, peak_bytes
        return peak_bytes <= self.limit_bytes

    def fits(self, key: Any) -> bool:
        return key in self.peaks and self.peaks[key] <= self.limit_bytes

    @property
    def has_fitting(self) -> bool:
        return any(map(self.fits, self.peaks))

    @property
    def is_late(self) -> bool:
        """Returns whether there is no time to compile another plan, which cannot be interrupted."""
        return self.deadline.seconds_left <= LONGER * self.longest_seconds

    @property
    def failures(self) -> dict[Any, Exception]:
        return {key: error for key, error in self.errors.items() if key not in self.peaks}

    @property
    def count(self) -> int:
        return len(self.peaks) + len(self.failures)

    def not_compiled(self, key: Any, modelled_bytes: int) -> Finding:
        """Returns the finding that a plan is what the model says fits, with what was proved of others."""
        has_failed, others = key in self.failures, len(self.peaks)
        reason = (
            "the compiler failed at this plan"
            if has_failed
            else "the time limit was reached before any plan could be compiled"
        )
        refuted = f"; {others} other{'s' * (others > 1)} were compiled, and need {self.peaks_text}" if others else ""
        return Finding(
            "warning",
            "not-compiled",
            f"{reason}, which is modelled to take {bytes_text(modelled_bytes)} of {bytes_text(self.limit_bytes)}"
            f"{refuted}",
            remedy="" if has_failed else "Raise time_limit",
        )

    @property
    def peaks_text(self) -> str:
        return ", ".join(map(bytes_text, sorted(self.peaks.values())))

    def cut_short(self) -> Iterator[Finding]:
        """Yields the finding that there was no time to compile more plans, if there was none."""
        if self.is_cut:
            counted = "1 plan was" if len(self.peaks) == 1 else f"{len(self.peaks)} plans were"
            yield Finding(
                "note",
                "not-all-compiled",
                f"the time limit was reached when {counted} compiled; another may be faster",
                remedy="Raise time_limit",
            )

    def failed(self) -> Iterator[Finding]:
        """Yields what the compiler failed at, and the flags that it was given not to."""
        if self.failures:
            first = _first_line(next(iter(self.failures.values())))
            counts = f"{len(self.failures)} of {self.count} plans"
            message = f"the compiler failed at {counts}, of which nothing is proved: {first}"
            yield Finding("warning", "compiler-failed", message)
        for flag, flag_count in Counter(self.flags.values()).items():
            yield Finding(
                "note",
                "compiled-with-flag",
                f"the compiler fails at {flag_count} of {self.count} plans without --{flag}, and compiled them with it",
                remedy=f"Pass --{flag} to audit them, too",
            )


def _first_line(error: Exception) -> str:
    """Returns the first line of a compiler's error, or of what a function raises when it is lowered for a platform."""
    line = str(error).partition("\n")[0]
    return line if isinstance(error, ShardRulesError) else f"{type(error).__name__}: {line}"
