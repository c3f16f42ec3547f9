"""Compiler flags as users have them: in `XLA_FLAGS`, in `LIBTPU_INIT_ARGS`, in a mapping, or by the name of a set."""

import functools
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import TypeAlias

from shardrules.core.errors import ConfigTypeError, TargetError, suggest

Flags: TypeAlias = tuple[tuple[str, str], ...]
"""Names without dashes and values as text, each name once, in the order of their last mention."""

FlagsLike: TypeAlias = "str | Mapping[str, object] | Iterable[tuple[str, object]] | None"
"""Flags as users write them: a string, or names with values; `None` for no flags."""

_SET_MARK = ":"
"""Names of sets have a colon, as `maxtext:v5p` does, and those of flags never do."""


def read_flags(flags: FlagsLike) -> Flags:
    """Reads flags; a later one replaces an earlier one of the same name, as compilers read them."""
    if flags is None or isinstance(flags, str):
        try:
            words = shlex.split(flags or "")
        except ValueError as error:  # a quote that is not closed
            raise TargetError(f"flags {flags!r:.120}: {error}") from error
        pairs = [pair for word in words for pair in _read_word(word)]
    elif isinstance(flags, Mapping):
        pairs = list(flags.items())
    else:
        try:
            pairs = [(name, value) for name, value in flags]
        except (TypeError, ValueError) as error:
            raise ConfigTypeError(f"flags must be a string or a mapping, got {flags!r:.80}") from error
    values: dict[str, str] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise ConfigTypeError(f"flags must have names and plain values, got {name!r:.40}: {value!r:.40}")
        key = name.strip().lstrip("-")
        # The last mention counts, and takes its place.
        values.pop(key, None)
        values[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return tuple(values.items())


def flags_text(flags: Flags) -> str:
    """Returns flags as a string that `read_flags` reads: the name of a set, if they are one."""
    named = next((name for name, each in flag_sets().items() if dict(each) == dict(flags)), "")
    return named or shlex.join(f"--{name}={value}" for name, value in flags)


@functools.cache
def flag_sets() -> Mapping[str, Flags]:
    """All published sets by name, in the order of `flags.toml`, which has their sources."""
    text = files("shardrules.programs.machine").joinpath("flags.toml").read_text("utf-8")
    return MappingProxyType({name: read_flags(table["flags"]) for name, table in tomllib.loads(text).items()})


def _read_word(word: str) -> list[tuple[str, str]]:
    """The flag that a word is, or the flags of the set that it names. A flag without a value is switched on."""
    name, equals, value = word.lstrip("-").partition("=")
    if not equals and _SET_MARK in name:
        if name not in flag_sets():
            raise TargetError(
                f"unknown set of flags {name!r}{suggest(name, flag_sets())}; the sets are {', '.join(flag_sets())}"
            )
        return list(flag_sets()[name])
    if not name:
        raise TargetError(f"expected a flag such as --xla_enable_async_all_gather=true, got {word!r:.80}")
    return [(name, value if equals else "true")]
