"""The errors of shardrules: one class per cause, each also the builtin that one would guess.

An error says who refused (the rule), where (path and shape), why (the numbers) and what to do about it.
All arguments are handed to `super().__init__`, so that every error survives pickling between processes.
"""

import difflib
from collections.abc import Iterable
from typing import final


class ShardRulesError(Exception):
    """The base of every error that shardrules raises on purpose."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument: one line of escaped newlines.
        return str(self.args[0]) if self.args else ""


@final
class SpecError(ShardRulesError, ValueError):
    """A PartitionSpec, or an entry of one, that no mesh could honour or that cannot be read."""


@final
class RuleError(ShardRulesError, ValueError):
    """A rule that cannot decide a leaf: a conflict with what is decided already, or a dimension that is not there.

    `Leaf.error` makes one. The engine collects those of all leaves and raises one `PlanError` that lists them.

    **Arguments:**

    - `rule`: the rule, as text.
    - `path`, `shape`: the leaf.
    - `why`: what is wrong, with the numbers.
    - `hint`: what to do about it.
    - `axis`: the mesh axis that it is about, where there is one.
    """

    def __init__(
        self, rule: str, path: str, shape: tuple[int, ...], why: str, hint: str = "", axis: str | None = None
    ) -> None:
        super().__init__(rule, path, shape, why, hint, axis)

    @property
    def rule(self) -> str:
        """The rule, as text."""
        return self.args[0]

    @property
    def path(self) -> str:
        """The path of the leaf."""
        return self.args[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self.args[2]

    @property
    def why(self) -> str:
        """What is wrong."""
        return self.args[3]

    @property
    def hint(self) -> str:
        """What to do about it; may be empty."""
        return self.args[4]

    @property
    def axis(self) -> str | None:
        """The mesh axis that it is about."""
        return self.args[5]

    def __str__(self) -> str:
        by = f" [{self.rule}]" if self.rule else ""
        then = f"\n    -> {self.hint}" if self.hint else ""
        return f"{self.path or 'the tree'} {self.shape}: {self.why}{by}{then}"


@final
class PlanError(ShardRulesError, ValueError):
    """A plan with findings that are errors. `findings` holds every one of them.

    **Arguments:**

    - `message`: the text, one block per finding.
    - `findings`: the findings themselves.
    """

    def __init__(self, message: str, findings: tuple[object, ...] = ()) -> None:
        super().__init__(message, findings)

    @property
    def findings(self) -> tuple[object, ...]:
        """Every finding that made the plan unsound."""
        return self.args[1]


@final
class RuleTypeError(ShardRulesError, TypeError):
    """Something that is not a rule where a rule is wanted."""


@final
class TreeError(ShardRulesError, ValueError):
    """Two trees that should have the same structure and have not."""


@final
class PatternError(ShardRulesError, ValueError, AssertionError):
    """A path pattern that does not compile or can never match a path."""


@final
class UnknownOpError(ShardRulesError, KeyError):
    """A rule text that names an op nobody registered."""


@final
class UnknownAxisError(ShardRulesError, ValueError, KeyError):
    """A name that is neither an axis of the mesh nor a logical axis that is known."""


@final
class NoMeshError(ShardRulesError, AssertionError, ValueError):
    """A mesh is needed and neither the rule, nor the call, nor the context has one."""


@final
class MeshError(ShardRulesError, ValueError):
    """A mesh that cannot be built as asked for, from the devices there are."""


@final
class AxisTypeError(ShardRulesError, TypeError):
    """Something that is no axis name where one is wanted, or no axis type."""


@final
class UnboundAxisError(ShardRulesError, NameError):
    """A question about the place of a device, asked where no axis of a mesh is mapped."""


@final
class BarrierError(ShardRulesError, RuntimeError):
    """Processes that do not meet: they wait at different barriers, or one of them is gone."""


@final
class BarrierTimeoutError(ShardRulesError, RuntimeError, TimeoutError):
    """A barrier to which not all processes came in time."""


@final
class DisagreementError(ShardRulesError, RuntimeError):
    """Processes that hold different plans."""


@final
class IndivisibleError(ShardRulesError, ValueError):
    """A constraint that splits a dimension into parts which are not equal. JAX would weaken it without a word."""


@final
class CheckpointError(ShardRulesError, ValueError):
    """A checkpoint that does not hold what a tree asks for: it lists all that is missing, surplus or different."""


class NoIntermediateShardingError(ShardRulesError, ValueError):
    """There is no intermediate sharding between two shardings. Catch it, and `reshard` directly instead."""


@final
class NoIntermediateShardingNeededError(NoIntermediateShardingError):
    """There is no need of an intermediate sharding: each part of the source goes to some of the destination only.

    Whoever catches `NoIntermediateShardingError` catches this too, and does the same: `reshard` directly.
    """


@final
class TargetError(ShardRulesError, ValueError):
    """A target that cannot be read or does not exist, or a mesh of another size than the target."""


@final
class MissingCompilerError(ShardRulesError, ImportError):
    """A target whose compiler is not installed."""


@final
class UnavailableTargetError(ShardRulesError, RuntimeError):
    """A target that this process cannot compile for as it was started, although what it takes is installed."""


@final
class DoesNotFitError(ShardRulesError, MemoryError):
    """A program that takes more memory than a device has: one that the compiler refuses, as that of TPUs does, or of
    which not even the smallest batch fits.

    **Arguments:**

    - `message`: what is the case, and what to do.
    - `needed_bytes`: what the program needs as far as the compiler says; else 0.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message, needed_bytes)

    @property
    def needed_bytes(self) -> int:
        """What the program needs as far as the compiler says; else 0."""
        return self.args[1]

    def __str__(self) -> str:
        return self.args[0]


@final
class ProgramTextError(ShardRulesError, ValueError):
    """Text that is no program as XLA prints them."""


@final
class ExpectationError(ShardRulesError, AssertionError):
    """A plan or an audit that is not what a test expects of it: it lists all that differs, and how to accept it."""


@final
class ReportError(ShardRulesError, ValueError):
    """Text that is not a saved report of an audit or of autoplan."""


@final
class HardwareError(ShardRulesError, ValueError):
    """A sheet of hardware that cannot be meant, or a question that it has no answer to."""


@final
class NoSpecError(ShardRulesError, AttributeError):
    """An array whose sharding has no PartitionSpec, such as one that lies on a single device."""


@final
class ConfigError(ShardRulesError, ValueError):
    """An argument with a value that is not accepted."""


@final
class ConfigTypeError(ShardRulesError, TypeError):
    """An argument of a type that is not accepted."""


@final
class MeshWarning(UserWarning):
    """A mesh that works, and will be slow."""


@final
class ShardingWarning(UserWarning):
    """Something about sharding that one should know, where work goes on nevertheless."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns `" (did you mean 'data'?)"` for the known name nearest to `name`, or nothing.

    **Arguments:**

    - `name`: what was written.
    - `known`: what could have been meant.

    **Returns:**

    A text to append to a message; empty when nothing is near.

    ```python
    assert suggest("modle", ["data", "model"]) == " (did you mean 'model'?)"
    ```
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
