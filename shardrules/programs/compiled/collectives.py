"""The collectives of a compiled program: what they move, along which mesh axes, how often, and what that costs.

A compiler may print one collective several times: where it starts, where it ends, and in each fusion that it runs
beside. Each is listed once here, by what it does: an all-reduce after which every device keeps only its own part, fused
into one operation, is a reduce-scatter.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, final

import attrs

from shardrules.core.axes import AnyMesh
from shardrules.core.source import Source
from shardrules.programs.compiled.flow import Times, Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.reach import GroupReader
from shardrules.programs.compiled.replica_groups import sent_pairs
from shardrules.programs.compiled.slices import kind_between_slices
from shardrules.programs.compiled.text import ArrayType, Computation, Instruction
from shardrules.programs.machine.measured import KINDS
from shardrules.programs.machine.targets import Target

_Key = TypeVar("_Key", str, tuple[str, ...])

_RESHAPES = ("get-tuple-element", "bitcast", "reshape", "copy")
"""Operations that pass an array on unchanged, except for its shape and its place in a tuple."""


@final
@attrs.frozen
class Collective:
    """One collective of a compiled program, as one device takes part in it. Bytes are for each time that it runs."""

    kind: str
    """The kind, as XLA writes it: `"all-gather"`, `"reduce-scatter"`."""

    axes: tuple[str, ...] | None
    """The mesh axes that each group spans completely, in mesh order; empty where every group is a single device. `None`
    where groups are not a union of whole axes, or without a mesh."""

    crossed: tuple[str, ...]
    """The mesh axes along which devices of a group differ, at least in part."""

    group_size: int
    """The number of devices in the largest group."""

    arrays: tuple[ArrayType, ...]
    """The types of the results. A compiler may combine several collectives into one, and may concatenate their arrays
    for it; these are the separate arrays. The result of an `all-to-all` may be one array in pieces."""

    payload_bytes: int
    """The bytes that an all-gather brings together on a device, or that any other collective takes in. For
    `ragged-all-to-all` the size of the smaller of two buffers, the one sent and the one received, which need not be
    full."""

    wire_bytes: int
    """The bytes that a device sends in a ring of `n` devices: `(n - 1) / n` of the payload, twice that for an
    all-reduce, and all of the payload for a `collective-permute` that sends at all."""

    times: Times
    """The number of runs in one call of the program."""

    computation: str
    """The computation that it is in."""

    name: str
    """The name of its instruction."""

    op_name: str = ""
    """The path of the JAX operation behind it."""

    stack: tuple[Source, ...] = ()
    """The lines of Python behind it, the innermost first."""

    arguments: tuple[str, ...] = ()
    """For each array the path of the program's argument that it is, or is a part of; empty for computed arrays."""

    between_slices: bool = False
    """It goes over the network between TPU slices. An axis that spans several slices has collectives inside the slices,
    and others between them."""

    host_count: int = 1
    """The most hosts of GPUs, or slices of TPUs, that a group spans; 1 without a target. A `collective-permute` spans 2
    if any device sends to another host."""

    torus_dims: int = 0
    """The most dimensions of the torus of a TPU slice along which the devices of a group differ; 0 without a torus or a
    target."""

    open_dims: int = 0
    """The number of these dimensions that do not close to a ring."""

    chip_devices: int = 1
    """The most devices of a group that share a chip."""

    torus_along: tuple[int, ...] = ()
    """The dimensions of that torus along which the devices of any group differ."""

    torus_ways: tuple[int, ...] = ()
    """The direction in which a permute sends along each of them: 1 up, -1 down, 0 both. Empty for other kinds, which
    send both."""

    @property
    def source(self) -> Source | None:
        """The innermost line of Python behind it, if known."""
        return self.stack[0] if self.stack else None

    @property
    def total_wire_bytes(self) -> int:
        """The bytes that a device sends in one call of the program."""
        return self.wire_bytes * self.times.count

    @property
    def total_payload_bytes(self) -> int:
        """The payload on a device in one call of the program."""
        return self.payload_bytes * self.times.count

    @property
    def axes_text(self) -> str:
        """Its axes as they are printed: `"data+model"`, `"part of data"`, or `"none"`."""
        if self.axes is not None:
            return "+".join(self.axes) or "none"
        return f"part of {'+'.join(self.crossed)}" if self.crossed else f"groups of {self.group_size}"


@final
@attrs.frozen
class Total:
    """The sum of several collectives, on one device in one call of the program."""

    op_count: int  # how many instructions the program has
    run_count: int  # how often they run together
    payload_bytes: int
    wire_bytes: int


def find_collectives(
    program: CompiledProgram, mesh: AnyMesh | None = None, target: Target | None = None
) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in the order of the text, including those that move nothing.

    Without the `mesh` that it was compiled for, axes are unknown; without the `target`, hosts and the torus are.

    ```python
    from shardrules.programs.compiled.collectives import find_collectives
    from shardrules.programs.compiled.program import read_program

    mesh = sr.create_mesh("data:8")
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P("data")))
    program = read_program(jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text())
    (total,) = find_collectives(program, mesh)
    assert (total.kind, total.axes, total.payload_bytes, total.wire_bytes) == ("all-reduce", ("data",), 16, 28)
    ```
    """
    # A loop of no rounds may hold collectives that never run.
    groups = GroupReader.of(program, mesh, target)
    return tuple(
        _read_collective(program, computation, instruction, groups)
        for computation, instruction in _starts(program)
        if program.times(computation.name).count
    )


def totals_by_kind(collectives: Iterable[Collective]) -> dict[str, Total]:
    """Adds collectives up by kind, the most expensive on the wire first."""
    return totals(collectives, lambda collective: collective.kind)


def totals_by_axes(collectives: Iterable[Collective]) -> dict[str, Total]:
    """Adds collectives up by `axes_text`, the most expensive on the wire first."""
    return totals(collectives, lambda collective: collective.axes_text)


def totals(collectives: Iterable[Collective], key: Callable[[Collective], _Key]) -> dict[_Key, Total]:
    """Adds collectives up by a key, the most expensive on the wire first."""
    groups: dict[_Key, list[Collective]] = {}
    for collective in collectives:
        groups.setdefault(key(collective), []).append(collective)
    sums = {
        name: Total(
            len(group),
            sum(collective.times.count for collective in group),
            sum(collective.total_payload_bytes for collective in group),
            sum(collective.total_wire_bytes for collective in group),
        )
        for name, group in groups.items()
    }
    # Keys break ties, so that equal costs have the same order everywhere.
    return dict(sorted(sums.items(), key=lambda item: (-item[1].wire_bytes, item[0])))


def _kind(instruction: Instruction) -> str:
    """The kind of a collective; empty for other instructions. Some are written as a send and a receive."""
    # A send to the host is neither: it has no pairs and no transfer type.
    if instruction.op == "send":
        is_permute = sent_pairs(instruction) is not None
        return kind_between_slices(instruction) or ("collective-permute" if is_permute else "")
    kind = instruction.op.removesuffix("-start")
    return kind if kind in KINDS else ""


def _starts(program: CompiledProgram) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the first instruction of every collective.

    TPUs print a collective that runs beside fusions where it starts, in each fusion beside it, and where it ends. The
    copies have the same channel:

        %all-gather.7 = ... all-gather(%w), channel_id=3, ..., async_collective_fusion_config=...
        %start = ... custom-call(%all-gather.7), custom_call_target="AsyncCollectiveStart"
    """
    pairs = [(computation, instruction) for computation, instruction in program.walk() if _kind(instruction)]
    copies = [pair for pair in pairs if "async_collective_fusion_config" in pair[1].text]
    seen = {channel(instruction) for computation, instruction in copies if _is_start(computation, instruction)}
    for computation, instruction in pairs:
        if "async_collective_fusion_config" in instruction.text and not _is_start(computation, instruction):
            if channel(instruction) in seen:
                continue
            seen.add(channel(instruction))  # its start is not printed: the first copy represents it
        yield computation, instruction


def channel(instruction: Instruction) -> tuple[str | None, ...]:
    """The identity of a collective: its copies, as TPUs print them, have the same channel."""
    names = ("channel_id", "frontend_attributes")
    return (_kind(instruction), *(instruction.attributes.get(name) for name in names))


def _is_start(computation: Computation, instruction: Instruction) -> bool:
    users = computation.users.get(instruction.name, ())
    return any(user.custom_call_target == "AsyncCollectiveStart" for user in users)


def _read_collective(
    program: CompiledProgram, computation: Computation, instruction: Instruction, groups: GroupReader
) -> Collective:
    kind, operands = _kind(instruction), instruction.operands[: _data_count(instruction)]
    taken_in, results = computation.operand_types(instruction)[: len(operands)], _results(computation, instruction)
    # Compilers concatenate small arrays to reduce them at once: list what they were before.
    parts = [_parts(program, Value(computation.name, name)) for name in operands]
    if instruction.op != "send" and kind == "all-reduce":
        results = tuple(part for types, _ in parts for part in types)
        kept = _kept_parts(program, computation, instruction)
        kind, results = ("reduce-scatter", kept) if kept else (kind, results)
    reach = groups.read(kind, instruction)
    payload_bytes = _payload_bytes(kind, taken_in, results)
    # A collective that the partitioner inserted may have no line of its own.
    cause = program.cause(computation, instruction)
    return Collective(
        kind,
        reach.span.axes,
        reach.span.crossed,
        reach.size,
        results,
        payload_bytes,
        _wire_bytes(kind, payload_bytes, reach.size),
        program.times(computation.name),
        computation.name,
        instruction.name,
        cause.op_name,
        program.stack(cause),
        tuple(program.argument_path(value) for _, values in parts for value in values),
        bool(kind_between_slices(instruction)),
        reach.host_count,
        reach.torus_dims,
        reach.open_dims,
        reach.chip_devices,
        reach.torus_along,
        reach.torus_ways,
    )


def _payload_bytes(kind: str, taken_in: Sequence[ArrayType], results: Sequence[ArrayType]) -> int:
    sent, arrived = (sum(array.nbytes for array in arrays) for arrays in (taken_in, results))
    if kind == "ragged-all-to-all":
        return min(sent, arrived)  # on average over the devices: what one sends another receives
    return arrived if kind == "all-gather" else sent


def _wire_bytes(kind: str, payload_bytes: int, size: int) -> int:
    if kind == "collective-permute":
        return payload_bytes if size > 1 else 0
    # In a ring an all-reduce is a reduce-scatter and an all-gather.
    return -(-payload_bytes * (size - 1) * (2 if kind == "all-reduce" else 1) // size)


def _data_count(instruction: Instruction) -> int:
    """The number of operands that are moved. Others of a ragged all-to-all say where to; a send also takes a token."""
    return 1 if instruction.op.startswith(("ragged", "send")) else len(instruction.operands)


def _results(computation: Computation, instruction: Instruction) -> tuple[ArrayType, ...]:
    """The types of the results. The start of most collectives also returns its operands, and signals at the end:

    %s = (f32[8], f32[64], u32[], u32[]) all-gather-start(f32[8] %x)
    """
    if instruction.op == "send":  # what comes in is the result of the matching recv
        name = _rendezvous(instruction)
        receives = [other for other in computation.instructions if other.op == "recv" and _rendezvous(other) == name]
        return (receives[0] if receives and name else instruction).types[:1]
    if not instruction.op.endswith("-start") or instruction.op == "all-reduce-start":
        return instruction.types
    operand_count = len(computation.operand_types(instruction))
    return instruction.types[operand_count : operand_count + _data_count(instruction)]


def _rendezvous(instruction: Instruction) -> str:
    """The name by which a send and a receive between slices find each other."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.text)
    return "" if match is None else match[1]


def _kept_parts(program: CompiledProgram, computation: Computation, start: Instruction) -> tuple[ArrayType, ...]:
    """The slices of a fused all-reduce that a device keeps, if nothing else uses its result.

    The compiler for TPUs writes a reduce-scatter so:

        %all-reduce.1 = f32[64] all-reduce(%g), ...
        ROOT %slice = f32[8] dynamic-slice(%all-reduce.1, %offset), dynamic_slice_sizes={8}
    """
    if not any(call.instruction.op == "fusion" for call in program.callers(computation.name)):
        return ()
    # Follow the result through reshapes to what uses it: only slices, or something else, too?
    users = list(computation.users.get(start.name, ()))
    for user in users:  # grows while iterated
        if user.op in _RESHAPES:
            users += computation.users.get(user.name, ())
    slices = [user for user in users if user.op == "dynamic-slice"]
    reshapes = [user for user in users if user.op in _RESHAPES]
    return tuple(user.types[0] for user in slices) if len(slices) + len(reshapes) == len(users) else ()


def _parts(program: CompiledProgram, value: Value) -> tuple[list[ArrayType], list[Value]]:
    """The arrays in a value: itself, or the arrays that a compiler flattened and concatenated to move them together."""
    whole = program.instruction(value).types[0]
    origin = program.flow.origin(value)
    maker = program.instruction(origin)
    if maker.op != "concatenate" or maker.types[0] != whole or len(whole.shape) != 1:
        return [whole], [value]
    values = [Value(origin.computation, name) for name in maker.operands]
    flat = [program.instruction(part).types[0] for part in values]
    shaped = [program.instruction(program.flow.origin(part)).types[0] for part in values]
    # The origin has the shape before flattening, unless the part is a slice of it.
    types = [before if before.nbytes == after.nbytes else after for before, after in zip(shaped, flat, strict=True)]
    return types, values


def array_text(collective: Collective) -> str:
    """Returns what a collective moves: its arguments if known, `"params/up and 3 more"`, else its largest array."""
    # A compiler may combine several arrays into one collective, some of them arguments.
    paths = [path for path in dict.fromkeys(collective.arguments) if path]
    largest = max(collective.arrays, key=lambda array: array.nbytes, default="")
    count = len(paths or collective.arrays)
    return f"{paths[0] if paths else largest}{f' and {count - 1} more' if count > 1 else ''}"
