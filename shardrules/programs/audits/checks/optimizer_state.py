"""States of an optimizer that something asks to be split, and of which every device has more than asked for.

With ZeRO-1 parameters are whole, and moments are split over the axis of the batch. A constraint inside the step is not
enough, nor is a spec for the state that the step takes: arguments without a spec come whole, and results without a spec
are what the compiler makes of them.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.finding import Finding, common_path
from shardrules.core.source import user_line
from shardrules.core.spec import axis_names, shard_bytes, spec_repr
from shardrules.core.text import bytes_text
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.movement import names_text
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiling.arguments import Argument
from shardrules.programs.compiling.compile import ResultArray
from shardrules.programs.compiling.constraints import Constraint, follow_arguments
from shardrules.programs.compiling.roles import STATE


@final
@attrs.frozen
class _Whole:
    """An array of the state that is compiled over fewer axes than something asks for."""

    array: Argument
    requested: PartitionSpec
    compiled: PartitionSpec
    reason: str
    remedy: str
    source: str = ""
    outcome: str = "it is compiled as"


def check_optimizer_state(arguments: AuditedArguments, timing: Timing) -> Iterator[Finding]:
    """Arrays of the state that are compiled over fewer axes than a spec or a constraint asks for."""
    groups: dict[tuple[str, ...], list[_Whole]] = {}
    for whole in _whole_arrays(arguments):
        specs = spec_repr(whole.requested), spec_repr(whole.compiled)
        groups.setdefault((whole.reason, *specs, whole.outcome, whole.remedy, whole.source), []).append(whole)
    for (reason, requested, compiled, outcome, remedy, source), group in groups.items():
        sizes = [
            tuple(
                shard_bytes(whole.array.shape, whole.array.dtype, spec, arguments.sizes)
                for spec in (whole.requested, whole.compiled)
            )
            for whole in group
        ]
        requested_bytes, actual_bytes = map(sum, zip(*sizes, strict=True))
        # The optimizer reads and writes all that a device has of it.
        seconds = 2 * (actual_bytes - requested_bytes) / timing.hardware.memory_bytes_per_second
        is_large = any(after - before >= _WARNING_BYTES for before, after in sizes)
        missing = [name for name in axis_names(group[0].requested) if name not in axis_names(group[0].compiled)]
        paths, shapes = [whole.array.path for whole in group], {whole.array.shape: None for whole in group}
        arrays = f". {len(group)} arrays: {names_text(paths)}" * (len(group) > 1)
        yield Finding(
            "warning" if is_large else timing.severity(seconds),
            "state-left-whole",
            f"{reason} {requested}, and {outcome} {compiled}: every device has {bytes_text(actual_bytes)} of it in "
            f"place of {bytes_text(requested_bytes)}, {timing.cost_text(seconds)}{arrays}",
            functools.reduce(common_path, paths),
            remedy,
            next(iter(shapes)) if len(shapes) == 1 else None,
            axis=missing[0] if len(missing) == 1 else None,
            count=len(group),
            source=source,
        )


_WARNING_BYTES = 2**20
"""An array that takes a MiB more than asked for is worth a warning whatever its time, as states are split for memory.
Chosen by hand."""


_IN_PLACE = (
    "Request the same spec for the state that the step takes (in_shardings), and make the state with it: "
    "jax.jit(optimizer.init, out_shardings=...)"
)

_IN_RESULT = "Request the same spec for the result: out_shardings=(..., plan.mirror(state), ...)"
_RETURNED = "the step returns it as"


def _whole_arrays(arguments: AuditedArguments) -> Iterator[_Whole]:
    constraints, depends = follow_arguments(arguments.compiled.jaxpr)
    results = dict(_results_of_state(arguments, depends))
    for index, (array, role, sharding) in enumerate(arguments):
        if role == STATE and array.shape and isinstance(sharding, NamedSharding):
            # A result's spec says most, then a constraint, then a sibling: one finding for each array is enough.
            candidates = (
                *_by_result(array, sharding.spec, results.get(index)),
                *_by_constraint(array, sharding.spec, results.get(index), constraints.get(index, ())),
                *_by_sibling(arguments, array, sharding.spec),
            )
            whole = [candidate for candidate in candidates if _is_whole(candidate, arguments.sizes)]
            yield from whole[:1]


def _by_result(array: Argument, compiled: PartitionSpec, result: ResultArray | None) -> Iterator[_Whole]:
    """The spec of an array as a request for the result that replaces it, and the other way around."""
    if result is not None and array.spec is not None and isinstance(result.sharding, NamedSharding):
        # The next step starts from what this one returns.
        yield _Whole(
            array, array.spec, result.sharding.spec, "the state is requested as", _IN_RESULT, outcome=_RETURNED
        )
    if result is not None and result.requested is not None:
        reason = "the state that the step returns is requested as"
        yield _Whole(array, result.requested.spec, compiled, reason, _IN_PLACE)


def _by_constraint(
    array: Argument, compiled: PartitionSpec, result: ResultArray | None, constraints: Iterable[Constraint]
) -> Iterator[_Whole]:
    """The constraints of the function on the new value of an array."""
    for shape, spec, stack in constraints:
        if tuple(shape) == array.shape:
            reason = "the function constrains what it makes of it to"
            yield _Whole(array, spec, compiled, reason, _IN_PLACE, user_line(stack))
            if result is not None and isinstance(result.sharding, NamedSharding):
                yield _Whole(array, spec, result.sharding.spec, reason, _IN_RESULT, user_line(stack), _RETURNED)


def _by_sibling(arguments: AuditedArguments, array: Argument, compiled: PartitionSpec) -> Iterator[_Whole]:
    """The request for another array of the state for the same parameter, where there is none for this one."""
    spec = None if array.spec is not None else _spec_of_sibling(arguments, array)
    if spec is not None:
        reason = "other arrays of the state for the same parameter are requested as"
        yield _Whole(array, spec, compiled, reason, "Request the same spec for all of them: plan.mirror(state)")


def _is_whole(whole: _Whole, axes: Mapping[str, int]) -> bool:
    array, specs = whole.array, (whole.compiled, whole.requested)
    actual, requested = (shard_bytes(array.shape, array.dtype, spec, axes) for spec in specs)
    return actual > requested


def _results_of_state(arguments: AuditedArguments, depends: Sequence[int]) -> Iterator[tuple[int, ResultArray]]:
    """Yields the index of each array of the state with the result that replaces it: the same path and shape."""
    by_ending: dict[_Key, list[int]] = {}
    for result_index, result in enumerate(arguments.compiled.results):
        parts = tuple(result.path.split("/"))
        # An argument that is an array is returned as an item of the result, or as the result itself.
        endings = [parts[start:] for start in range(len(parts))] + ([()] if len(parts) == 1 else [])
        for ending in endings:
            by_ending.setdefault((ending, tuple(result.struct.shape)), []).append(result_index)
    by_path: dict[_Key, list[int]] = {}
    for index, array in enumerate(arguments.arrays):
        # Without the name of the argument, which results do not have.
        by_path.setdefault((tuple(array.path.split("/"))[1:], array.shape), []).append(index)
    for key, indices in by_path.items():
        same = by_ending.get(key, [])
        for index in indices if same else ():
            if arguments.roles[index] == STATE:
                in_order = same[indices.index(index)] if len(same) == len(indices) else None
                replacement = same[0] if len(same) == 1 else _nearest(depends, index, same, in_order)
                if replacement is not None:
                    yield index, arguments.compiled.results[replacement]


_Key: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
"""The end of a path, and the shape of the array."""


def _nearest(depends: Sequence[int], index: int, results: Iterable[int], in_order: int | None) -> int | None:
    """The result that depends on an argument and on the fewest others; `in_order` where several do.

    New moments follow from the old ones and the gradients, new parameters from all of the moments.
    """
    counts = {result: depends[result].bit_count() for result in results if depends[result] >> index & 1}
    nearest = [result for result, count in counts.items() if count == min(counts.values())]
    return nearest[0] if len(nearest) == 1 else in_order if in_order in nearest else None


def _spec_of_sibling(arguments: AuditedArguments, array: Argument) -> PartitionSpec | None:
    parts = array.path.split("/")
    for other, role, _ in arguments:
        others = other.path.split("/")
        if role == STATE and other.spec is not None and other.shape == array.shape and len(others) == len(parts):
            # "state/0/nu/layers/0/up" and "state/0/mu/layers/0/up" differ in one part, before that of the parameter.
            pairs = list(zip(parts, others, strict=True))
            if sum(a != b for a, b in pairs) == 1 and parts[-1] == others[-1]:
                return other.spec
    return None
