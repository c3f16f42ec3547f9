"""A target's flags as its compiler takes them, and what is wrong with them before anything large is compiled."""

import functools
import re
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules.core.errors import TargetError
from shardrules.programs.machine.targets import Target

Options: TypeAlias = dict[str, str | bool]
"""The `compiler_options` of `jax.stages.Lowered.compile`."""

_UNKNOWN = "No such compile option"
"""In the compilers' error for a flag that they do not have."""

_LAST = "the_last_flag"
"""A flag that no compiler has. Behind others, it keeps a compiler from starting once it has read them all."""

_TRUTH = MappingProxyType({"true": True, "1": True, "on": True, "false": False, "0": False, "off": False})
"""Flags are text, and compile options of XLA's own that are switches are not."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_OTHER_NAMES = MappingProxyType(
    {f"xla_gpu_pipeline_{kind}": f"xla_gpu_enable_pipelined_{kind}" for kind in _KINDS}
    | {f"xla_gpu_enable_pipelined_{kind}": f"xla_gpu_pipeline_{kind}" for kind in _KINDS}
)
"""Flags that XLA renamed: recipes have names that an older or a newer XLA does not know."""


def compiler_options(target: Target) -> Options:
    """Returns the flags of a target as options for its compiler.

    All flags that the compiler refuses are in one `TargetError`, after milliseconds.
    """
    return dict(_options(target)) if target.flags else {}


@functools.lru_cache(maxsize=64)  # a search for the largest batch compiles for the same target again and again
def _options(target: Target) -> tuple[tuple[str, str | bool], ...]:
    options: Options = dict(target.flags)
    user_names = {name: name for name in options}
    problems: dict[str, str] = {}
    spellings = set(options.items())
    while True:
        # With the last flag a compiler reads all flags and stops. Some are only read when it starts to compile.
        refusal = _refusal(target, {**options, _LAST: "1"})
        refusal = _refusal(target, options) if _LAST in refusal else refusal
        name = next((name for name in options if re.search(rf"\b{re.escape(name)}\b", refusal)), None)
        if name is None:
            break
        other = _other_spelling(name, options.pop(name), refusal)
        user_name = user_names.pop(name)
        if other is not None and other not in spellings and other[0] not in options:
            spellings.add(other)
            options |= dict([other])
            user_names[other[0]] = user_name
        elif _UNKNOWN in refusal:
            problems[user_name] = f"unknown flag {user_name!r}"
        else:
            problems[user_name] = refusal.partition("\n")[0].removeprefix("INVALID_ARGUMENT: ").rstrip(".: ")
    if problems:
        listed = "; ".join(problems[name] for name, _ in target.flags if name in problems)
        raise TargetError(
            f"flags of target {target.machine}: {listed}. A flag that the compiler reads only when it is loaded goes "
            "into XLA_FLAGS or LIBTPU_INIT_ARGS, before Python starts"
        )
    # In the user's order, whatever the order in which compilers complain.
    names = {user_name: name for name, user_name in user_names.items()}
    return tuple((names[user_name], options[names[user_name]]) for user_name, _ in target.flags)


def _other_spelling(name: str, value: str | bool, refusal: str) -> tuple[str, str | bool] | None:
    if _UNKNOWN in refusal:
        return (_OTHER_NAMES[name], value) if name in _OTHER_NAMES else None
    switch = _TRUTH.get(str(value).lower())
    return None if switch is None or "bool" not in refusal else (name, switch)


def _refusal(target: Target, options: Options) -> str:
    """The compiler's error for a program of one addition; empty if it compiles that."""
    mesh = Mesh(np.asarray(target.devices()[:1]), ("device",))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    # Flags that write files would write them for this program, too.
    quiet = {name: value for name, value in options.items() if not name.startswith("xla_dump")}
    try:
        jax.jit(jnp.negative).lower(x).compile(compiler_options=quiet)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""
