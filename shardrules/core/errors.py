"""The errors of shardrules: one class per cause, each also the builtin that one would guess.

An error says who refused (the rule), where (path and shape), why (the numbers) and what to do about it.
Every error survives pickling between processes: all its arguments are in `args`.
"""

import difflib
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, final

import attrs

MOST_LISTED = 20
"""The faults that a text lists, of trees that may have a million leaves. Chosen by hand."""

_MOST_CHARACTERS = 20_000
"""The characters of an error that are printed, which may quote names and values of any length. Chosen by hand."""


class ShardRulesError(Exception):
    """The base of every error that shardrules raises on purpose."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument: one line of escaped newlines.
        return _cut(str(self.args[0]) if self.args else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def _cut(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    return printable_text(text[:_MOST_CHARACTERS] + (f" ... and {more:,} more characters" if more > 0 else ""))


def shortened(lines: Sequence[Any], most: int = MOST_LISTED) -> list[Any]:
    """Returns the first lines, and how many more there are.

    ```python
    from shardrules.core.errors import shortened

    assert shortened(["a", "b", "c"], 1) == ["a", "and 2 more"]
    ```
    """
    more = len(lines) - most
    return [*lines[:most], *([f"and {more:,} more"] if more > 0 else [])]


@final
class ConfigError(ShardRulesError, ValueError):
    """An argument with a value that is not accepted."""


@final
class SplitError(ShardRulesError, ValueError):
    """A region that cannot run on shards of these shapes. Its function raises it, and plans take another split."""


@final
class ConfigTypeError(ShardRulesError, TypeError):
    """An argument, or the result of a function that you passed, of a type that is not accepted."""


@final
class SpecError(ShardRulesError, ValueError):
    """A PartitionSpec, or an entry of one, that is invalid or that no mesh could support."""


@final
@attrs.frozen(str=False, repr=False)
class RuleError(ShardRulesError, ValueError):
    """A rule cannot decide a leaf: an earlier decision conflicts, or a dimension does not exist.

    `Leaf.error` makes one from the `rule` as text, the `path` and `shape` of the leaf, `why`, a `hint` at what to do,
    and the mesh `axis` in question; `code` is that of the finding. The engine raises one `PlanError` for all leaves.
    """

    rule: str
    path: str
    shape: tuple[int, ...]
    why: str
    hint: str = ""
    axis: str | None = None
    code: str = "conflict"

    def __str__(self) -> str:
        rule = f" [{printable(self.rule)}]" if self.rule else ""
        hint = f"\n    -> {printable(self.hint)}" if self.hint else ""
        return _cut(f"{printable(self.path) or 'the tree'} {self.shape}: {printable(self.why)}{rule}{hint}")


@final
@attrs.frozen(str=False, repr=False)
class PlanError(ShardRulesError, ValueError):
    """A plan with errors. The `message` lists its `findings`."""

    message: str
    findings: tuple[object, ...] = ()


@final
class RuleTypeError(ShardRulesError, TypeError):
    """Something else where a ShardingRule is expected."""


@final
class TreeError(ShardRulesError, ValueError):
    """Two trees that should have the same structure, but differ."""


@final
class PatternError(ShardRulesError, ValueError):
    """A path pattern that does not compile, can never match a path, or leaves a path without a match."""


@final
class RulesFileError(ShardRulesError, ValueError):
    """A file of rules that cannot be read: it lists all that is wrong, each with its line and key."""


@final
class UnknownOpError(ShardRulesError, KeyError):
    """A rule text with an unknown op."""


@final
class UnknownAxisError(ShardRulesError, ValueError, KeyError):
    """A name that is neither an axis of the mesh nor a known logical axis."""


@final
class NoMeshError(ShardRulesError, ValueError, AssertionError):
    """A mesh is needed, and neither the rule, nor the call, nor the context has one; eformer asserts that there is."""


@final
class MeshError(ShardRulesError, ValueError):
    """A mesh that cannot be built from the available devices."""


@final
class AxisTypeError(ShardRulesError, TypeError):
    """Something else where an axis name, an axis type or a mesh is expected."""


@final
class UnboundAxisError(ShardRulesError, NameError):
    """A question about a device's index along a mesh axis, outside of a function that is mapped over that axis."""


@final
class BarrierError(ShardRulesError, RuntimeError):
    """Processes that wait at different barriers, or a process that has ended."""


@final
class BarrierTimeoutError(ShardRulesError, RuntimeError, TimeoutError):
    """A barrier that not all processes reached in time."""


@final
class DisagreementError(ShardRulesError, RuntimeError):
    """Processes that hold different plans, trees or batches."""


@final
class IndivisibleError(ShardRulesError, ValueError):
    """A constraint that splits a dimension into unequal parts. JAX would weaken it silently."""


@final
class CheckpointError(ShardRulesError, ValueError):
    """A checkpoint that does not match a tree, listing all that differs; or a tree that cannot be saved."""


class NoIntermediateShardingError(ShardRulesError, ValueError):
    """Two shardings without an intermediate sharding between them. Catch it, and `reshard` directly instead."""


@final
class NoIntermediateShardingNeededError(NoIntermediateShardingError):
    """Two shardings that need no intermediate sharding: each part of the source goes to few devices already.

    An `except NoIntermediateShardingError` catches this too, and does the same: `reshard` directly.
    """


@final
class TargetError(ShardRulesError, ValueError):
    """A target that cannot be read or does not exist, or a mesh of another size than the target."""


@final
class MissingCompilerError(ShardRulesError, ImportError):
    """A target whose compiler is not installed."""


@final
class UnavailableTargetError(ShardRulesError, RuntimeError):
    """A target that this process cannot compile for as it was started, although its compiler is installed."""


@final
@attrs.frozen(str=False, repr=False)
class DoesNotFitError(ShardRulesError, MemoryError):
    """A program that needs more memory than a device has: `needed_bytes` where the compiler says how much, else 0.

    The `message` says what to do. Compilers may refuse such a program, as the TPU compiler does; `largest_batch` raises
    it when not even the smallest batch fits.
    """

    message: str
    needed_bytes: int = 0


@final
@attrs.frozen(str=False, repr=False)
class CompileError(ShardRulesError, RuntimeError):
    """A program at which a compiler fails, for other reasons than its size: the `message` has the compiler's words.

    `flag` is the compiler's flag that avoids it, as `"xla_gpu_enable_triton_gemm=false"`; empty where none is known.
    """

    message: str
    flag: str = ""


@final
class ProgramTextError(ShardRulesError, ValueError):
    """Text that is not a program as XLA prints them."""


@final
class MicrobatchError(ShardRulesError, ValueError):
    """A loss that is not a sum over the examples of a batch: it lists what depends on several at once."""


@final
class TraceError(ShardRulesError, ValueError):
    """A profiler trace that cannot be read, or that is of another program."""


@final
class ExpectationError(ShardRulesError, AssertionError):
    """A plan or an audit that differs from what a test expects: it lists all differences, and how to accept them."""


@final
class PatchError(ShardRulesError, ValueError):
    """Source code that a patch cannot change: no file, not the user's, or not what was imported."""


@final
class ReportError(ShardRulesError, ValueError):
    """Text that is not a saved report of an audit or of autoplan."""


@final
class HardwareError(ShardRulesError, ValueError):
    """An invalid hardware sheet, or a question that it cannot answer."""


@final
class NoSpecError(ShardRulesError, AttributeError):
    """An array whose sharding has no PartitionSpec, such as one on a single device."""


@final
class MeshWarning(UserWarning):
    """A mesh that works, but slowly."""


@final
class ShardingWarning(UserWarning):
    """Something worth knowing about sharding that does not stop the work."""


_MOST_COMPARED = 20_000
"""The candidates that a name is compared with, of the million that a header may have. Chosen by hand."""

_JOINERS = "\u200c\u200d"
"""Invisible, and yet a part of how words and emoji are written."""

_COMMANDS = re.compile(r"^\s*:(?=:)|#(?=#\w*\[)")
"""The beginnings of commands that CI services read out of logs: `::error::` begins a line, `##vso[` is anywhere."""


def printable(text: str) -> str:
    r"""Returns a name or a phrase, which may come from a stranger's file, for a line of a terminal or a log.

    Characters that would not show but act are escaped: ESC, newlines and other control characters, marks that reverse
    the direction of writing, and the first character of a command to a CI service.

    ```python
    from shardrules.core.errors import printable

    assert printable("größe/\x1b[31m\n") == r"größe/\x1b[31m\n"
    ```
    """
    if ":" in text or "#" in text:
        text = _COMMANDS.sub(lambda match: match[0][:-1] + f"\\x{ord(match[0][-1]):02x}", text)
    return text if text.isprintable() else _escaped(text, _JOINERS)


def shown(value: Any, most: int = 80) -> str:
    """Returns how a value of any kind looks, for a message: the first characters, or its type if it shows nothing.

    ```python
    from shardrules.core.errors import shown

    assert (shown("ab"), shown(10**5000)) == ("'ab'", "a value of type int")
    ```
    """
    try:
        return printable(f"{value!r:.{most}}")
    except Exception:  # noqa: BLE001  of other people's classes, and of integers beyond 4,300 digits
        return f"a value of type {type(value).__name__}"


def printable_text(text: str) -> str:
    """Returns text whose names have been made `printable`, with what may have been missed escaped, except newlines."""
    return text if text.isprintable() else _escaped(text, f"{_JOINERS}\n\t")


def _escaped(text: str, kept: str) -> str:
    # Control, format and lone surrogate characters, and the separators of lines and paragraphs. Other characters that
    # Python counts as not printable, such as spaces of other widths, only show.
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in kept and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Returns `" (did you mean 'data'?)"` for the one of `candidates` that is nearest to `name`, or nothing.

    ```python
    from shardrules.core.errors import suggest

    assert suggest("modle", ["data", "model"]) == " (did you mean 'model'?)"
    ```
    """
    return _suggested(name, tuple(itertools.islice(candidates, _MOST_COMPARED)))


@functools.lru_cache(16)
def _suggested(name: str, candidates: tuple[str, ...]) -> str:
    # Kept, since all leaves of a tree may have the same wrong name.
    near = difflib.get_close_matches(name, candidates, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
