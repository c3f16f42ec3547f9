"""The planner's knowledge of each primitive of JAX: the table in the documentation is made from this."""

import inspect
from collections.abc import Mapping
from typing import Literal, TypeAlias, final

import attrs

from shardrules.programs.jaxprs.calls import CALLS, COND, FROM_JAX_0_12, SCAN, UNTIL_JAX_0_11, WHILE
from shardrules.programs.traced.factors.table import RULES, is_whole

Handling: TypeAlias = Literal["rule", "whole", "call", "loop", "as written", "unknown"]
"""The planning of a primitive: by the rule of its dims; with whole operands and results; by what it calls; round by
round; as the user wrote it; or not at all, which the plan says (`unknown-operation`)."""

_CALL = "What it calls is read as if it stood there."

_OTHERS: Mapping[str, tuple[Handling, str]] = {
    SCAN: ("loop", "Planned once for all rounds. What is read or stacked round by round is whole along that dim."),
    WHILE: ("loop", "Planned once for all rounds, and counted as one round."),
    COND: ("loop", "Every branch is planned, and counts as if it were taken."),
    "sharding_constraint": ("as written", "Obeyed."),
    "shard_map": ("as written", "Operands and results have the specs that the user wrote."),
    **dict.fromkeys(("debug_callback", "debug_print"), ("whole", "The host gets whole operands.")),
    **dict.fromkeys(
        ("all_gather", "all_to_all", "axis_index", "pbroadcast", "ppermute", "ragged_all_to_all", "reduce_scatter"),
        ("unknown", "They are for axes of a mesh, inside `shard_map`. Under `vmap` JAX traces to other primitives."),
    ),
    **dict.fromkeys(
        ("pure_callback", "io_callback", "buffer_callback"), ("unknown", "The host computes, out of sight of any rule.")
    ),
    **dict.fromkeys(
        ("ffi_call", "core_map", "mpmd_map", "compute_on"),
        ("unknown", "Nothing says how the dims of a kernel go together."),
    ),
    "custom_lin": ("unknown", "It stands only in derivatives that are not complete."),
    **dict.fromkeys(
        ("get", "swap", "addupdate", "new_ref", "freeze"), ("unknown", "Mutable arrays have no layouts to choose from.")
    ),
    **dict.fromkeys(
        ("after_all", "create_token", "dce_sink"), ("unknown", "They order effects, and hold no elements.")
    ),
}
"""Primitives that neither a rule nor a call covers."""

ONLY_IN: Mapping[str, str] = {
    **dict.fromkeys((*UNTIL_JAX_0_11, "dce_sink"), "until JAX 0.11"),
    **dict.fromkeys((*FROM_JAX_0_12, "log2", "one_minus_square", "polynomial"), "from JAX 0.12"),
}
"""Primitives that not all versions of JAX, from 0.10 to 0.12, make public."""


@final
@attrs.frozen
class PrimitiveEntry:
    """One row of the table: primitives that are planned alike, and how."""

    names: tuple[str, ...]
    handling: Handling
    text: str


def primitive_table() -> tuple[PrimitiveEntry, ...]:
    """Everything that is known, by handling."""
    names: dict[tuple[Handling, str], list[str]] = {}
    for name, rule in RULES.items():
        text = (inspect.getdoc(rule.find_loops) or "").partition("\n\n")[0].replace("\n", " ")
        names.setdefault(("whole" if is_whole(rule) else "rule", text), []).append(name)
    names["call", _CALL] = list(CALLS)
    for name, (handling, text) in _OTHERS.items():
        names.setdefault((handling, text), []).append(name)
    order = [*dict.fromkeys(handling for handling, _ in names)]
    rows = sorted(names.items(), key=lambda row: order.index(row[0][0]))
    return tuple(PrimitiveEntry(tuple(sorted(row)), handling, text) for (handling, text), row in rows)
