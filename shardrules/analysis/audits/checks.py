"""What a compiled program does that no rule, spec or constraint asks for: each finding has the arrays and the line."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding

from shardrules.analysis.audits.facts import AuditFacts, spec_text
from shardrules.analysis.compiling.constraints import weakened_constraints
from shardrules.analysis.compiling.roles import BATCH
from shardrules.analysis.compiling.source import equation_line, short_line, user_line
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import uncounted_kernels
from shardrules.analysis.program.text import ArrayType
from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding, common_path, merged, template
from shardrules.core.spec import same, shard_shape, spec_repr
from shardrules.core.tree import array_kind

_EXPLICIT_MOVES = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ppermute", "pbroadcast", "reduce_scatter", "psum_scatter", "ragged_all_to_all", "reshard"),
)
"""JAX operations that move data because a person wrote them."""

MEMORY_REMEDIES = {
    "parameters": "Split the parameters over more axes, or over a larger mesh",
    "optimizer state": "Split the optimizer's state as the parameters are, or over more axes",
    "batch": "Make the batch smaller, or split it over more axes",
    "padding": "Pick sizes that fill the tiles of the hardware",
    "outputs": "Donate the arguments that results replace (donate_argnums)",
    "temporaries": "Make the batch smaller, split activations, or recompute them (jax.checkpoint)",
}
"""What to do where a category of memory is too large."""

_MAX_NAMES = 6
"""How many arrays a finding names. More fill the line of a terminal; with 3, equal layers beside embeddings and a head
would be cut off."""

_SMALL_SHARE = 0.01
"""Collectives with a smaller share of all wire bytes are notes: removing them would hardly change the step time.

With 0.02 twice as much communication goes without a warning; with 0.005 more warnings are not worth acting on."""

_LARGE_CONSTANT_BYTES = 2**20
"""Arrays that a function closes over are reported from a MiB on: weights are larger, masks and position tables smaller.

With 2 MiB a matrix of 512 x 512 in float32 would pass, with half a MiB a table of positions might be reported."""

_MIN_MATRIX_SIZE = 2**12
"""Arrays with fewer elements are statistics and biases: a reduction of one is never the sum of an activation.

Half as many would report vectors of 2,048 to 4,096 features; twice as many would miss a matrix of 64 x 64."""

_MAX_FLOPS_RATIO = 1.05
"""More than this many times the function's own FLOPs mean that devices repeat each other's work.

Repeated work is repeated over a whole mesh axis, at least twice, so that this tolerates 5 % of a program. With 1.1, a
small layer that every device computes would be missed; with 1.02, padding of uneven shards would be reported."""


def run_checks(facts: AuditFacts) -> tuple[Finding, ...]:
    """Returns all findings, errors first; equal layers are one finding with their count."""
    return merged(finding for check in _CHECKS for finding in check(facts))


def _check_specs(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that are compiled with another spec than requested, and constraints that JAX weakens."""
    for array, sharding in zip(facts.arguments, facts.compiled.argument_shardings, strict=True):
        if array.spec is not None and isinstance(sharding, NamedSharding) and not same(sharding.spec, array.spec):
            yield _weakened(array.path, array.shape, spec_repr(array.spec), spec_repr(sharding.spec), "argument")
    for array in facts.compiled.results:
        if (
            array.requested is not None
            and isinstance(array.sharding, NamedSharding)
            and not same(array.sharding.spec, array.requested.spec)
        ):
            yield _weakened(
                f"result/{array.path}".rstrip("/"),
                tuple(array.struct.shape),
                spec_repr(array.requested.spec),
                spec_repr(array.sharding.spec),
                "result",
            )
    yield from weakened_constraints(facts.constraints, facts.sizes)


def _weakened(path: str, shape: tuple[int, ...], requested: str, compiled: str, name: str) -> Finding:
    message = f"the {name} was requested as {requested} and is compiled as {compiled}"
    return Finding("warning", "weakened", message, path, "Request a spec that the compiler can honour", shape)


def _check_batch(facts: AuditFacts) -> Iterator[Finding]:
    """Batches that every device has the whole of, or that no spec says how to split."""
    device_count = facts.program.device_count
    jaxpr = facts.compiled.jaxpr.jaxpr
    # A whole batch is right where every axis splits parameters and no work is repeated: pure tensor parallelism.
    is_shared = not facts.idle_axes and facts.flops_ratio <= _MAX_FLOPS_RATIO
    for array_index, (array, role, sharding) in enumerate(
        zip(facts.arguments, facts.roles, facts.compiled.argument_shardings, strict=True)
    ):
        # Keys, scalars and masks of a few elements cost nothing when they are whole.
        if role != BATCH or device_count == 1 or max(array.shape, default=0) < device_count:
            continue
        if sharding.is_fully_replicated and not is_shared:
            message = f"each of the {device_count} devices gets all of it"
        elif array.spec is None and not sharding.is_fully_replicated:
            message = f"no spec says how to split it, and the compiler chose {spec_text(sharding)}"
        else:
            continue
        sizes = facts.sizes
        fitting = [name for name in sizes if sizes[name] > 1 and not array.shape[0] % sizes[name]]
        yield Finding(
            "warning",
            "unsharded-batch",
            message,
            array.path,
            f"Split it: in_shardings with P({(fitting or list(sizes))[0]!r}) for this argument. If it is not data, "
            "say so with roles",
            array.shape,
            source=_first_use(jaxpr, jaxpr.invars[array_index]),
        )


def _first_use(program: Jaxpr, variable: Any) -> str:
    """The line where a value is first used, also inside functions that are jitted on their own."""
    for equation in program.eqns:
        if any(operand is variable for operand in equation.invars):
            if equation.primitive.name in ("jit", "pjit"):
                operand_index = next(i for i, operand in enumerate(equation.invars) if operand is variable)
                inner = equation.params["jaxpr"].jaxpr
                return _first_use(inner, inner.invars[operand_index])
            return equation_line(equation)
    return ""


@final
@attrs.frozen
class _MovedArray:
    """An array in a collective, the program's name of the argument that it is, if any, and its share of the bytes."""

    collective: Collective
    array: ArrayType
    argument: str
    wire_bytes: int


def _moved_arrays(collective: Collective) -> Iterator[_MovedArray]:
    total = max(1, sum(array.nbytes for array in collective.arrays))
    # Compilers may print what an all-to-all moves as one array per device. Together they are a single array.
    if collective.kind == "all-to-all" and len(collective.arrays) > 1:
        first = collective.arrays[0]
        joined = attrs.evolve(first, shape=(len(collective.arrays), *first.shape))
        argument = collective.arguments[0] if collective.arguments else ""
        yield _MovedArray(collective, joined, argument, collective.total_wire_bytes)
        return
    arguments = collective.arguments[: len(collective.arrays)]
    for array, argument in itertools.zip_longest(collective.arrays, arguments, fillvalue=""):
        assert isinstance(array, ArrayType), "there are no more arguments than arrays"
        yield _MovedArray(collective, array, argument, collective.total_wire_bytes * array.nbytes // total)


def _check_moves(facts: AuditFacts) -> Iterator[Finding]:
    """Collectives that no spec, constraint or line of code asks for: one finding for each code, kind, axes and line."""
    total = max(1, sum(collective.total_wire_bytes for collective in facts.collectives))
    groups: dict[tuple[str, str, str, str], list[_MovedArray]] = {}
    for collective in facts.collectives:
        if collective.total_wire_bytes and not _is_explicit(collective):
            for moved in _moved_arrays(collective):
                code = _move_code(facts, moved)
                line = "" if code == "fsdp" else user_line(collective.stack)
                if code:
                    groups.setdefault((code, collective.kind, collective.axes_text, line), []).append(moved)
    for (code, kind, axes, line), group in groups.items():
        wire_bytes = sum(moved.wire_bytes for moved in group)
        collectives = list({id(moved.collective): moved.collective for moved in group}.values())
        runs = sum(collective.times.count for collective in collectives)
        largest = max((moved.array for moved in group), key=lambda array: array.nbytes)
        names = _names(filter(None, facts.paths_of([moved.argument for moved in group])))
        names = names or _names(path for collective in collectives for path in facts.arguments_near(collective))
        description, nearby, remedy = _MOVES[code]
        text = (description + nearby * bool(names)).format(names=names or "An array", axes=axes)
        yield Finding(
            "note" if code == "fsdp" or wire_bytes < _SMALL_SHARE * total else "warning",
            code,
            f"{runs} x {kind} over {axes}, largest array {largest}: {bytes_text(wire_bytes)} on the wire per device "
            f"and step. {text}",
            remedy=remedy,
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _is_explicit(collective: Collective) -> bool:
    """Whether a person wrote it. The compiler may name a combined collective after any part of its `shard_map`."""
    return collective.op_name.rsplit("/", 1)[-1] in _EXPLICIT_MOVES or "shard_map" in collective.op_name


def _names(paths: Iterable[str]) -> str:
    """Paths for a sentence; the paths of equal layers are one."""
    groups: dict[str, str] = {}
    for path in paths:
        groups[template(path)] = common_path(groups.get(template(path), path), path)
    shown = list(groups.values())[:_MAX_NAMES]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _move_code(facts: AuditFacts, moved: _MovedArray) -> str:
    """The code of the finding for a moved array; empty if the move is as it should be."""
    kind, crossed = moved.collective.kind, moved.collective.crossed
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return "" if _is_requested_exchange(facts, moved) else "resharding"
    if kind == "all-gather":
        over_batch = bool(crossed) and all(name in facts.batch_axes for name in crossed)
        if moved.argument in facts.argument_indices:
            role = facts.roles[facts.argument_indices[moved.argument]]
            # Parameters that are gathered over the axis of the batch are FSDP at work; over any other axis the plan
            # split them to be computed with in parts.
            if over_batch and role != BATCH:
                return "fsdp"
            return "" if _is_requested(facts, moved) else "gathered"
        # A gathered parameter that is not an argument is an update: where only the optimizer's state is split, each
        # device computes its part of the new parameters.
        if _is_parameter(facts, moved) or _is_requested(facts, moved):
            return ""
        return "gathered-batch" if over_batch else "gathered-activation"
    # Sums over the axis of the batch are gradients. Any other array summed over it is an activation: a weight is split
    # along the contracted dimension and was not gathered, so that every device had to compute with the whole batch.
    if kind in ("all-reduce", "reduce-scatter") and crossed and not _is_parameter(facts, moved):
        return "partial-sums" if all(name in facts.example_axes for name in crossed) else ""
    return ""


def _is_parameter(facts: AuditFacts, moved: _MovedArray) -> bool:
    """Whether an array may be a parameter or its gradient, or is smaller than any matrix."""
    if moved.array.size < _MIN_MATRIX_SIZE:
        return True
    collective = moved.collective
    # In a program with gradients a single sum of the forward pass is an activation, whatever its shape. Combined sums
    # have the name of one of them, which says nothing about the others.
    is_sum = collective.kind in ("all-reduce", "reduce-scatter") and len(collective.arrays) == 1
    is_forward = facts.has_gradients and "jvp(" in collective.op_name and "transpose(" not in collective.op_name
    return not (is_sum and is_forward) and facts.may_be_parameter(collective, moved.array)


def _is_requested(facts: AuditFacts, moved: _MovedArray) -> bool:
    """Whether specs request the sharding of an array both before it is gathered and after.

    A constraint on the gathered array alone is not enough: it may be in conflict with the spec of an argument.
    """
    group_size = moved.collective.group_size
    # It is not known which dimension is gathered: any that divides may be.
    before = [
        (*moved.array.shape[:dim], size // group_size, *moved.array.shape[dim + 1 :])
        for dim, size in enumerate(moved.array.shape)
        if size % group_size == 0
    ]
    split_dims = bool(moved.argument)  # compilers may print an argument in pieces of any shape
    return facts.requested_shapes.matches(moved.array.shape, split_dims=split_dims) and any(
        shapes.matches(shape, split_dims=split_dims)
        for shape in before
        for shapes in (facts.requested_shapes, facts.argument_shapes)
    )


def _is_requested_exchange(facts: AuditFacts, moved: _MovedArray) -> bool:
    """Whether a constraint requests the result of an all-to-all, which compilers print in all kinds of pieces."""
    has_tiles = facts.hardware.torus_dims > 0  # TPUs exchange tiles, which are cut across dimensions
    if has_tiles or moved.collective.op_name.endswith("/sharding_constraint"):
        return facts.requested_shapes.matches_size(moved.array.shape)
    return facts.requested_shapes.matches(moved.array.shape, split_dims=True)


_SPLIT_THE_BATCH = "Constrain them at this line: with_sharding_constraint(x, P(<axis of the batch>, ...))"
_NEARBY = "; nearby: {names}"
_MOVES = {
    "fsdp": ("{names}: split over the axis of the batch, and gathered where they are used", "", ""),
    "gathered": (
        "The plan splits {names} over {axes}, and the step gathers them again",
        "",
        "Constrain the activations that they meet to be split over this axis as well, or do not split them over it",
    ),
    "gathered-batch": (
        "Activations that are split over the batch are gathered on every device",
        _NEARBY,
        _SPLIT_THE_BATCH,
    ),
    "gathered-activation": (
        "An activation is gathered on every device, and no constraint asks for it",
        _NEARBY,
        "Split the matrix that it meets along the contracted dimension, or constrain the activation at this line",
    ),
    "partial-sums": (
        "{names}: split along the contracted dimension, and not gathered: every device sums a part for the whole batch",
        "",
        f"{_SPLIT_THE_BATCH}; then the array is gathered",
    ),
    "resharding": (
        "An array is split in one way where it is made and in another where it is used",
        _NEARBY,
        "Constrain both places alike, or give the argument the spec that it is used with",
    ),
}
"""For each code a description, the arrays nearby if they are not in it, and the remedy."""

_REMATERIALISED = re.compile(
    r"cannot go from sharding (?P<old>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<new>\{.*?\}) efficiently for HLO "
    r"operation %?(?P<name>[\w.\-]+) = (?P<type>[a-z0-9]+\[[\d,]*\])"
)


def _check_rematerialised(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that XLA gathers whole only to split them in another way; it warns about each on standard error."""
    matches = [_REMATERIALISED.search(message) for message in facts.compiled.messages]
    for array, old, new in dict.fromkeys(match.group("type", "old", "new") for match in matches if match):
        # The warning names no line. The array has the shape of a shard, so constraints with such shards are candidates.
        sizes = tuple(map(int, re.findall(r"\d+", array.partition("[")[2])))
        lines = {
            user_line(stack): None
            for shape, spec, stack in facts.constraints
            if shard_shape(shape, spec, facts.sizes) == sizes
        }
        yield Finding(
            "warning",
            "rematerialised",
            f"{array} goes from {old} to {new}: XLA finds no other way than to gather the whole array on every device "
            "and split it again",
            remedy="Go there in two steps, each of which moves one mesh axis, or keep one of the two shardings",
            source=next(iter(lines)) if len(lines) == 1 else "",
        )


def _check_repeated_work(facts: AuditFacts) -> Iterator[Finding]:
    """Matmuls that several devices repeat, line by line."""
    if facts.flops_ratio <= _MAX_FLOPS_RATIO:
        return
    by_line = facts.flops_by_line
    model_flops, compiled_flops = (sum(flops) for flops in zip(*by_line.values(), strict=True))
    worst = sorted(
        (line for line, (model, compiled) in by_line.items() if line and compiled > _MAX_FLOPS_RATIO * model),
        key=lambda line: by_line[line][0] - by_line[line][1],
    )
    lines = [
        f"{short_line(line)} {compiled / model:.2f} times"
        for line in worst[:_MAX_NAMES]
        for model, compiled in [by_line[line]]
        if model
    ]
    yield Finding(
        "warning",
        "replicated-compute",
        f"the matmuls of all {facts.program.device_count} devices are {compiled_flops:.3g} FLOPs, the function's own "
        f"{model_flops:.3g}: {facts.flops_ratio:.2f} times as many, because devices repeat each other's work. "
        + "; ".join(lines),
        remedy="Split the batch, or the activations at these lines, over every axis of the mesh",
        source=worst[0] if worst else "",
    )


def _check_memory(facts: AuditFacts) -> Iterator[Finding]:
    """A program that does not fit the memory of a device."""
    peak, capacity = facts.memory.peak_bytes, facts.hardware.memory_bytes
    refusal = facts.compiled.refusal
    # The devices of a CPU share the memory of the machine, whose size the sheet does not know.
    if (peak <= capacity and not refusal) or facts.hardware == Hardware.named("cpu"):
        return
    excess = f"{bytes_text(peak - capacity)} too much" if peak > capacity else f"and the compiler says: {refusal}"
    shares = facts.memory.shares()
    largest = max(shares, key=lambda name: shares[name])
    heaviest = sorted(zip(facts.device_bytes, facts.arguments, strict=True), key=lambda pair: -pair[0])[:3]
    arrays = ", ".join(f"{array.path} {bytes_text(size)}" for size, array in heaviest)
    yield Finding(
        "error",
        "does-not-fit",
        f"a device needs {bytes_text(peak)}, and {facts.hardware.name} has {bytes_text(capacity)}: {excess}. Largest "
        f"share: {largest}, {bytes_text(shares[largest])}; largest arguments: {arrays}",
        remedy=MEMORY_REMEDIES[largest],
    )


def _check_constants(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that are part of the program: every device has all of them, and compilers do not count them."""
    arrays = [constant for constant in facts.compiled.jaxpr.consts if array_kind(constant) is not None]
    size = sum(array.nbytes for array in arrays)
    if size >= _LARGE_CONSTANT_BYTES:
        largest = sorted(arrays, key=lambda array: -array.nbytes)[:3]
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in largest)
        yield Finding(
            "warning",
            "closed-over",
            f"the function closes over {bytes_text(size)} of arrays ({shapes}). They are constants of the program, "
            "whole on every device, and not counted as memory here",
            remedy="Pass them as arguments",
        )


def _check_uncounted(facts: AuditFacts) -> Iterator[Finding]:
    """Kernels of unknown FLOPs and loops of unknown length."""
    for kernel in uncounted_kernels(facts.program):
        target = kernel.attributes.get("custom_call_target", "").strip('"')
        yield Finding(
            "note",
            "uncounted-kernel",
            f"the FLOPs of kernel {target!r} are unknown and count as 0",
            remedy="Give pallas_call a cost_estimate",
            source=user_line(facts.program.stack(kernel)),
        )
    for loop in facts.program.unknown_loops:
        yield Finding(
            "note",
            "unknown-loop",
            "the length of a loop is unknown; its body counts once",
            source=user_line(facts.program.stack(loop)),
        )


def _check_donation(facts: AuditFacts) -> Iterator[Finding]:
    """Donated arrays whose memory no result reuses."""
    reused = {alias.parameter for alias in facts.program.aliases}
    unused = [array_index for array_index in facts.compiled.donated if array_index not in reused]
    if unused:
        size = sum(facts.device_bytes[array_index] for array_index in unused)
        paths = _names(facts.arguments[array_index].path for array_index in unused)
        yield Finding(
            "warning",
            "donated-in-vain",
            f"{len(unused)} donated arrays, {bytes_text(size)} per device, are not reused: no remaining result has the "
            f"shape, dtype and sharding of {paths}",
            remedy="Give the results the shardings of the arguments (out_shardings), or do not donate these",
        )


_CHECKS: tuple[Callable[[AuditFacts], Iterator[Finding]], ...] = (
    _check_specs,
    _check_batch,
    _check_moves,
    _check_rematerialised,
    _check_repeated_work,
    _check_memory,
    _check_constants,
    _check_uncounted,
    _check_donation,
)
