"""What a compiled program does that nobody asked for, each with the arrays and the line of code behind it."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding

from shardrules.analysis.audits.evidence import Evidence, spec_text
from shardrules.analysis.compiling.constraints import weakened
from shardrules.analysis.compiling.roles import BATCH
from shardrules.analysis.compiling.source import equation_line, short_line, users_line
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import uncounted_kernels
from shardrules.analysis.program.text import ArrayType
from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding, common_path, merged, template
from shardrules.core.spec import same, shard_shape, spec_repr
from shardrules.core.tree import array_kind

_ASKED = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ppermute", "pbroadcast", "reduce_scatter", "psum_scatter", "ragged_all_to_all", "reshard"),
)
"""JAX's operations that move data because a person wrote them."""

_SHOWN = 6
"""So many arrays a finding names."""

SMALLER = {
    "parameters": "Split the parameters over more axes, or over a larger mesh",
    "optimizer state": "Split the optimizer's state as the parameters are, or over more axes",
    "batch": "Make the batch smaller, or split it over more axes",
    "padding": "Pick sizes that fill the tiles of the hardware",
    "outputs": "Donate the arguments that results replace (donate_argnums)",
    "temporaries": "Make the batch smaller, split activations, or recompute them (jax.checkpoint)",
}
"""What to do about each category of memory, where it is too large."""

_SMALL_SHARE = 0.01
"""What puts less than this part of all bytes on the wire is a note."""

_LARGE = 2**20
"""From so many bytes on an array that is closed over matters."""

_TINY = 2**12
"""Fewer elements than this are statistics and biases."""

_MOST_FLOPS = 1.05
"""More than so many times the FLOPs of the function itself is the same work done twice."""


def surprises(found: Evidence) -> tuple[Finding, ...]:
    """Finds what nobody asked for.

    **Arguments:**

    - `found`: what is known of the compiled function.

    **Returns:**

    Findings, errors first; of equal layers one with their count.
    """
    return merged(finding for look in _LOOKS for finding in look(found))


def _weakened(found: Evidence) -> Iterator[Finding]:
    """What is compiled otherwise than it was asked for."""
    for one, at in zip(found.arguments, found.compiled.arguments, strict=True):
        if one.spec is not None and isinstance(at, NamedSharding) and not same(at.spec, one.spec):
            yield _otherwise(one.path, one.shape, spec_repr(one.spec), spec_repr(at.spec), "argument")
    for one in found.compiled.results:
        if one.asked is not None and isinstance(one.at, NamedSharding) and not same(one.at.spec, one.asked.spec):
            yield _otherwise(
                f"result/{one.path}".rstrip("/"),
                tuple(one.struct.shape),
                spec_repr(one.asked.spec),
                spec_repr(one.at.spec),
                "result",
            )
    yield from weakened(found.constraints, found.sizes)


def _otherwise(path: str, shape: tuple[int, ...], asked: str, at: str, what: str) -> Finding:
    message = f"the {what} was asked to be {asked} and is compiled as {at}"
    return Finding("warning", "weakened", message, path, "Ask for what the compiler can do", shape)


def _whole_batch(found: Evidence) -> Iterator[Finding]:
    """A batch that every device has the whole of, or of which nobody says how it is to be split."""
    devices = found.program.device_count
    inner = found.compiled.jaxpr.jaxpr
    # Where every axis splits parameters, and no work is done twice, it is they that share the work out.
    shared = not found.idle_axes and found.flops_ratio <= _MOST_FLOPS
    for number, (one, role, at) in enumerate(zip(found.arguments, found.roles, found.compiled.arguments, strict=True)):
        # Keys, masks of a few elements and the like are nobody's burden.
        if role != BATCH or devices == 1 or max(one.shape, default=0) < devices:
            continue
        if at.is_fully_replicated and not shared:
            message = f"each of the {devices} devices gets all of it"
        elif one.spec is None and not at.is_fully_replicated:
            message = f"nobody says how it is to be split, and the compiler chose {spec_text(at)}"
        else:
            continue
        line = _first_use(inner, inner.invars[number])
        free = [name for name in found.sizes if found.sizes[name] > 1 and not one.shape[0] % found.sizes[name]]
        yield Finding(
            "warning",
            "unsharded-batch",
            message,
            one.path,
            f"Split it: in_shardings with P({(free or list(found.sizes))[0]!r}) for this argument. If it is no data, "
            "say so with roles",
            one.shape,
            source=line,
        )


def _first_use(program: Jaxpr, variable: Any) -> str:
    """The line where a value is first used, also in functions that are jitted on their own."""
    for equation in program.eqns:
        if any(one is variable for one in equation.invars):
            if equation.primitive.name in ("jit", "pjit"):
                place = next(place for place, one in enumerate(equation.invars) if one is variable)
                inner = equation.params["jaxpr"].jaxpr
                return _first_use(inner, inner.invars[place])
            return equation_line(equation)
    return ""


@final
@attrs.frozen
class _Part:
    """One array in a collective, the argument that it is, if it is one, and its part of the bytes."""

    collective: Collective
    array: ArrayType
    argument: str
    wire_bytes: int


def _parts(one: Collective) -> Iterator[_Part]:
    """The arrays of a collective. What an all-to-all moves may be printed in pieces, and is one array."""
    whole = max(1, sum(each.nbytes for each in one.arrays))
    if one.kind == "all-to-all" and len(one.arrays) > 1:
        joined = attrs.evolve(one.arrays[0], shape=(len(one.arrays), *one.arrays[0].shape))
        yield _Part(one, joined, one.arguments[0] if one.arguments else "", one.total_wire_bytes)
        return
    for each, argument in itertools.zip_longest(one.arrays, one.arguments[: len(one.arrays)], fillvalue=""):
        assert isinstance(each, ArrayType), "there are no more arguments than arrays"
        yield _Part(one, each, argument, one.total_wire_bytes * each.nbytes // whole)


def _moves(found: Evidence) -> Iterator[Finding]:
    """Collectives that neither a rule nor a line of code asks for: one finding for those of one line."""
    total = max(1, sum(one.total_wire_bytes for one in found.collectives))
    groups: dict[tuple[str, str, str, str], list[_Part]] = {}
    for one in found.collectives:
        if one.total_wire_bytes and not _is_by_hand(one):
            for part in _parts(one):
                code = _code(found, part)
                line = "" if code == "fsdp" else users_line(one.stack)
                if code:
                    groups.setdefault((code, one.kind, one.axes_text, line), []).append(part)
    for (code, kind, axes, line), parts in groups.items():
        wire = sum(part.wire_bytes for part in parts)
        collectives = list({id(part.collective): part.collective for part in parts}.values())
        runs = sum(one.times.count for one in collectives)
        largest = max((part.array for part in parts), key=lambda each: each.nbytes)
        moved = found.named([part.argument for part in parts])
        names = _names(filter(None, moved)) or _names(path for one in collectives for path in found.behind(one))
        what, near, remedy = _MOVES[code]
        text = (what + near * bool(names)).format(names=names or "An array", axes=axes)
        yield Finding(
            "note" if code == "fsdp" or wire < _SMALL_SHARE * total else "warning",
            code,
            f"{runs} x {kind} over {axes}, the largest of {largest}: {bytes_text(wire)} on the wire per device and "
            f"step. {text}",
            remedy=remedy,
            axis=axes if axes in found.sizes else None,
            source=line,
        )


def _is_by_hand(one: Collective) -> bool:
    """Whether a person wrote it. Several that were written may have become one, under the name of what is near."""
    return one.op_name.rsplit("/", 1)[-1] in _ASKED or "shard_map" in one.op_name


def _names(paths: Iterable[str]) -> str:
    """Paths as a sentence has them, those of equal layers as one."""
    groups: dict[str, str] = {}
    for path in paths:
        groups[template(path)] = common_path(groups.get(template(path), path), path)
    shown = list(groups.values())[:_SHOWN]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _code(found: Evidence, part: _Part) -> str:
    """Which surprise it is that an array is moved; empty for none."""
    kind, crossed = part.collective.kind, part.collective.crossed
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return "" if _is_dealt_out_as_asked(found, part) else "resharding"
    if kind == "all-gather":
        over_batch = bool(crossed) and all(name in found.batch_axes for name in crossed)
        if part.argument in found.numbers:
            role = found.roles[found.numbers[part.argument]]
            return "fsdp" if over_batch and role != BATCH else "" if _is_asked(found, part) else "gathered"
        if _is_parameter(found, part) or _is_asked(found, part):
            return ""  # an update that every device computed a part of, as where only the optimizer's state is split
        return "gathered-batch" if over_batch else "gathered-activation"
    if kind in ("all-reduce", "reduce-scatter") and crossed and not _is_parameter(found, part):
        return "partial-sums" if all(name in found.example_axes for name in crossed) else ""
    return ""


def _is_parameter(found: Evidence, part: _Part) -> bool:
    """Whether an array may be a parameter or its gradient, or is smaller than any matrix."""
    if part.array.size < _TINY:
        return True
    one = part.collective
    is_sum = one.kind in ("all-reduce", "reduce-scatter") and len(one.arrays) == 1
    is_forward = found.has_gradients and "jvp(" in one.op_name and "transpose(" not in one.op_name
    return not (is_sum and is_forward) and found.may_be_parameter(one, part.array)


def _is_asked(found: Evidence, part: _Part) -> bool:
    """Whether somebody says how an array is split both before it is gathered and after.

    A constraint behind it alone may be what an array with a spec of its own fights with.
    """
    count = part.collective.group_size
    before = [
        (*part.array.shape[:dim], size // count, *part.array.shape[dim + 1 :])
        for dim, size in enumerate(part.array.shape)
        if size % count == 0
    ]
    pieces = bool(part.argument)  # compilers may print what is an argument in any
    return found.asked_shapes.has(part.array.shape, in_parts=pieces) and any(
        known.has(shape, in_parts=pieces) for shape in before for known in (found.asked_shapes, found.argument_shapes)
    )


def _is_dealt_out_as_asked(found: Evidence, part: _Part) -> bool:
    """Whether a constraint asks for what comes out of an all-to-all, of which compilers print all kinds of pieces."""
    in_tiles = found.hardware.torus_dims > 0  # TPUs cut what they deal out into tiles, across dimensions
    if in_tiles or part.collective.op_name.endswith("/sharding_constraint"):
        return found.asked_shapes.has_size(part.array.shape)
    return found.asked_shapes.has(part.array.shape, in_parts=True)


_SPLIT_THE_BATCH = "Constrain them at this line: with_sharding_constraint(x, P(<axis of the batch>, ...))"
_NEAR_BY = "; near by: {names}"
_MOVES = {
    "fsdp": ("{names}: split over the axis of the batch, and gathered where they are used", "", ""),
    "gathered": (
        "The plan splits {names} over {axes}, and the step puts them together again",
        "",
        "Constrain the activations that they meet to be split over this axis as well, or do not split them over it",
    ),
    "gathered-batch": (
        "Activations that are split over the batch are put together on every device",
        _NEAR_BY,
        _SPLIT_THE_BATCH,
    ),
    "gathered-activation": (
        "An activation is put together on every device, and no constraint asks for it",
        _NEAR_BY,
        "Split what it is multiplied with along the dimension that is summed, or constrain the activation at this line",
    ),
    "partial-sums": (
        "{names}: split in the dimension that is summed, and not gathered: every device sums a part for all the batch",
        "",
        f"{_SPLIT_THE_BATCH}; then the array is gathered",
    ),
    "resharding": (
        "An array is split in one way where it is made and in another where it is used",
        _NEAR_BY,
        "Constrain both places alike, or give the argument the spec that it is used with",
    ),
}
"""For each surprise what it is, what is near it, and what to do."""

_FULLY = re.compile(
    r"cannot go from sharding (?P<old>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<new>\{.*?\}) efficiently for HLO "
    r"operation %?(?P<name>[\w.\-]+) = (?P<type>[a-z0-9]+\[[\d,]*\])"
)


def _rematerialised(found: Evidence) -> Iterator[Finding]:
    """Arrays that are gathered whole only to be cut in another way, which XLA says aloud."""
    told = [_FULLY.search(message) for message in found.compiled.messages]
    for kind, old, new in dict.fromkeys(one.group("type", "old", "new") for one in told if one):
        sizes = tuple(map(int, re.findall(r"\d+", kind.partition("[")[2])))
        lines = {
            users_line(stack): None
            for shape, spec, stack in found.constraints
            if shard_shape(shape, spec, found.sizes) == sizes
        }
        yield Finding(
            "warning",
            "rematerialised",
            f"{kind} goes from {old} to {new}: XLA finds no other way than to gather the whole array on every device "
            "and cut it again",
            remedy="Go there in two steps, each of which moves one mesh axis, or keep one of both shardings",
            source=next(iter(lines)) if len(lines) == 1 else "",
        )


def _replicated_compute(found: Evidence) -> Iterator[Finding]:
    """Work that several devices do alike, line by line."""
    if found.flops_ratio <= _MOST_FLOPS:
        return
    by_line = found.flops_by_line
    own, done = (sum(flops) for flops in zip(*by_line.values(), strict=True))
    worst = sorted(
        (line for line, (asked, flops) in by_line.items() if line and flops > _MOST_FLOPS * asked),
        key=lambda line: by_line[line][0] - by_line[line][1],
    )
    lines = [
        f"{short_line(line)} {flops / asked:.2f} times"
        for line in worst[:_SHOWN]
        for asked, flops in [by_line[line]]
        if asked
    ]
    yield Finding(
        "warning",
        "replicated-compute",
        f"the matmuls of all {found.program.device_count} devices are {done:.3g} FLOPs, those of the function "
        f"{own:.3g}: {found.flops_ratio:.2f} times as many, since devices do the same work. " + "; ".join(lines),
        remedy="Split the batch, or the activations at these lines, over every axis of the mesh",
        source=worst[0] if worst else "",
    )


def _too_large(found: Evidence) -> Iterator[Finding]:
    """A program that does not fit the memory of a device."""
    peak, most = found.memory.peak_bytes, found.hardware.memory_bytes
    refusal = found.compiled.refusal
    if (peak <= most and not refusal) or found.hardware == Hardware.named("cpu"):
        return  # the devices of a CPU share a memory of which the sheet knows nothing
    much = f"{bytes_text(peak - most)} too much" if peak > most else f"and the compiler says: {refusal}"
    shares = found.memory.shares()
    largest = max(shares, key=lambda name: shares[name])
    heavy = sorted(zip(found.device_bytes, found.arguments, strict=True), key=lambda pair: -pair[0])[:3]
    arrays = ", ".join(f"{one.path} {bytes_text(size)}" for size, one in heavy)
    yield Finding(
        "error",
        "does-not-fit",
        f"a device needs {bytes_text(peak)}, and {found.hardware.name} has {bytes_text(most)}: "
        f"{much}. Most of it are {largest}, {bytes_text(shares[largest])}; the largest "
        f"arguments are {arrays}",
        remedy=SMALLER[largest],
    )


def _closed_over(found: Evidence) -> Iterator[Finding]:
    """Arrays that are part of the program: every device has all of them, and no compiler counts them."""
    arrays = [one for one in found.compiled.jaxpr.consts if array_kind(one) is not None]
    size = sum(one.nbytes for one in arrays)
    if size >= _LARGE:
        shapes = ", ".join(f"{one.dtype}{list(one.shape)}" for one in sorted(arrays, key=lambda one: -one.nbytes)[:3])
        yield Finding(
            "warning",
            "closed-over",
            f"the function closes over {bytes_text(size)} of arrays ({shapes}). They are built into the program, whole "
            "on every device, and are not in its memory here",
            remedy="Pass them as arguments",
        )


def _unknown(found: Evidence) -> Iterator[Finding]:
    """What cannot be counted."""
    for one in uncounted_kernels(found.program):
        target = one.attributes.get("custom_call_target", "").strip('"')
        yield Finding(
            "note",
            "uncounted-kernel",
            f"kernel {target!r} does not tell how many FLOPs it is; it counts as none",
            remedy="Give pallas_call a cost_estimate",
            source=users_line(found.program.stack(one)),
        )
    for one in found.program.unknown_loops:
        yield Finding(
            "note",
            "unknown-loop",
            "a loop runs until something happens; what is in it is counted once",
            source=users_line(found.program.stack(one)),
        )


def _kept(found: Evidence) -> Iterator[Finding]:
    """Arrays that were given away and are not written over."""
    used = {one.parameter: None for one in found.program.aliases}
    lost = [number for number in found.compiled.donated if number not in used]
    if lost:
        size = sum(found.device_bytes[number] for number in lost)
        yield Finding(
            "warning",
            "donated-in-vain",
            f"{len(lost)} donated arrays, {bytes_text(size)} per device, are not written over: no result is left with "
            f"the shape, dtype and sharding of {_names(found.arguments[number].path for number in lost)}",
            remedy="Give the results the shardings of the arguments (out_shardings), or do not donate these",
        )


_LOOKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _weakened,
    _whole_batch,
    _moves,
    _rematerialised,
    _replicated_compute,
    _too_large,
    _closed_over,
    _unknown,
    _kept,
)
