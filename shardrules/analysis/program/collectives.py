"""The collectives of a compiled program: what they move, along which mesh axes, how often, and what that costs.

A compiler may print one collective several times: where it starts, where it ends, and in each fusion that it runs
beside. Each is found once here, under the name of what it does: an all-reduce of which every device then keeps only its
own part, fused into one operation, is a reduce-scatter.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import final

import attrs

from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.flow import Times, Value
from shardrules.analysis.program.program import CompiledProgram, Source
from shardrules.analysis.program.reach import GroupReader
from shardrules.analysis.program.replica_groups import sent_pairs
from shardrules.analysis.program.slices import kind_between_slices
from shardrules.analysis.program.text import ArrayType, Computation, Instruction
from shardrules.core.axes import AnyMesh

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
"""What a collective can do, as XLA writes it."""


@final
@attrs.frozen
class Collective:
    """One collective of a compiled program, as one device takes part in it.

    **Arguments:**

    - `kind`: one of `KINDS`.
    - `axes`: the mesh axes that each of its groups is the whole of, in mesh order; none where every group is one
        device. `None` where the groups are no union of whole axes, or no mesh is known.
    - `crossed`: the mesh axes along which the devices of a group differ, in whole or in part.
    - `group_size`: how many devices a group has; the largest, where they differ.
    - `arrays`: the types of the arrays that come out. A compiler may move several in one collective; if it laid them
        end to end for that, these are they. What comes out of an `all-to-all` may be one array in pieces.
    - `payload_bytes`: what it is about, on one device, each time: what an all-gather brings together, what any other
        takes in. Of `ragged-all-to-all` the room that there is, which need not be full.
    - `wire_bytes`: what one device sends, each time, if it is done in a ring: of `n` devices, `(n - 1) / n` of the
        payload, twice that for an all-reduce, and all of it for a `collective-permute` if the device sends at all.
    - `times`: how often it runs.
    - `computation`, `name`: where it is in the program.
    - `op_name`: the path of the JAX operation behind it.
    - `stack`: the lines of Python behind it, the innermost first.
    - `arguments`: for each array, the path of the program's argument that it is, or is a part of; else empty.
    - `between_slices`: whether it goes over the network between TPU slices. One along an axis on which several slices
        stand is then several collectives: those inside a slice, and those between them.
    - `host_count`: how many hosts of GPUs, or slices of TPUs, one of its groups spans, at the most; 1 where no target
        is known. A `collective-permute` spans 2 if any device sends to another host.
    - `torus_dims`: along how many dimensions of the torus of a TPU slice the devices of one of its groups differ, at
        the most; 0 where there is no torus, or no target is known.
    """

    kind: str
    axes: tuple[str, ...] | None
    crossed: tuple[str, ...]
    group_size: int
    arrays: tuple[ArrayType, ...]
    payload_bytes: int
    wire_bytes: int
    times: Times
    computation: str
    name: str
    op_name: str = ""
    stack: tuple[Source, ...] = ()
    arguments: tuple[str, ...] = ()
    between_slices: bool = False
    host_count: int = 1
    torus_dims: int = 0

    @property
    def source(self) -> Source | None:
        """The innermost line of Python behind it, where one is known."""
        return self.stack[0] if self.stack else None

    @property
    def total_wire_bytes(self) -> int:
        """What one device sends in one call of the program."""
        return self.wire_bytes * self.times.count

    @property
    def total_payload_bytes(self) -> int:
        """What it is about on one device in one call of the program."""
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
    """What several collectives add up to, on one device in one call of the program.

    **Arguments:**

    - `op_count`: how many of them the program has.
    - `run_count`: how often they run together.
    - `payload_bytes`, `wire_bytes`: theirs, each as often as it runs.
    """

    op_count: int
    run_count: int
    payload_bytes: int
    wire_bytes: int


def find_collectives(
    program: CompiledProgram, mesh: AnyMesh | None = None, target: Target | None = None
) -> tuple[Collective, ...]:
    """Finds the collectives of a program.

    **Arguments:**

    - `program`: the program.
    - `mesh`: the mesh that it was compiled for: partition `i` is `mesh.devices.flat[i]`. Without it no axes are known.
    - `target`: the machine that it was compiled for. Without it, or without a mesh, nothing is known of hosts and of
        the torus. On a mesh that is not on the target's devices they stand as `target.mesh` lays them out.

    **Returns:**

    In the order of the text. Those of one device each are among them; they move nothing.

    **Raises:**

    `MeshError` when the mesh has not as many devices as the program runs on, or that in each of several slices;
    whatever `target.mesh` raises.

    ```python
    from shardrules.analysis.program.program import read_program

    mesh = sr.create_mesh("data:8")
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P("data")))
    program = read_program(jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text())
    (one,) = find_collectives(program, mesh)
    assert (one.kind, one.axes, one.payload_bytes, one.wire_bytes) == ("all-reduce", ("data",), 16, 28)
    ```
    """
    where = GroupReader.of(program, mesh, target)
    return tuple(
        _read(program, computation, one, where)
        for computation, one in _once(program)
        if program.times(computation.name).count
    )


def totals_by_kind(collectives: Iterable[Collective]) -> dict[str, Total]:
    """Adds collectives up by what they do.

    **Arguments:**

    - `collectives`: the collectives.

    **Returns:**

    A `Total` for each kind, the dearest on the wire first.

    ```python
    one = Collective("all-gather", ("data",), ("data",), 8, (), 1024, 896, Times(12), "body", "all-gather.1")
    assert totals_by_kind([one]) == {"all-gather": Total(1, 12, 12 * 1024, 12 * 896)}
    ```
    """
    return _totals(collectives, lambda one: one.kind)


def totals_by_axes(collectives: Iterable[Collective]) -> dict[str, Total]:
    """Adds collectives up by the mesh axes that they go along.

    **Arguments:**

    - `collectives`: the collectives.

    **Returns:**

    A `Total` for each `axes_text`, the dearest on the wire first. One along two axes is under both together.

    ```python
    axes = ("data", "model")
    one = Collective("all-reduce", axes, axes, 8, (), 1024, 1792, Times(1), "main", "all-reduce.1")
    assert list(totals_by_axes([one])) == ["data+model"]
    ```
    """
    return _totals(collectives, lambda one: one.axes_text)


def _totals(collectives: Iterable[Collective], key: Callable[[Collective], str]) -> dict[str, Total]:
    groups: dict[str, list[Collective]] = {}
    for one in collectives:
        groups.setdefault(key(one), []).append(one)
    totals = {
        name: Total(
            len(same),
            sum(one.times.count for one in same),
            sum(one.total_payload_bytes for one in same),
            sum(one.total_wire_bytes for one in same),
        )
        for name, same in groups.items()
    }
    return dict(sorted(totals.items(), key=lambda item: (-item[1].wire_bytes, item[0])))


def _kind(one: Instruction) -> str:
    """What a collective does; empty for what is none. Some are written as a send and a receive."""
    if one.op == "send":
        return kind_between_slices(one) or ("" if sent_pairs(one) is None else "collective-permute")
    kind = one.op.removesuffix("-start")
    return kind if kind in KINDS else ""


def _once(program: CompiledProgram) -> Iterator[tuple[Computation, Instruction]]:
    """Yields every collective once, where it starts.

    TPUs print one that runs beside fusions where it starts, in each fusion that it runs beside, and where it ends.
    """
    found = [(computation, one) for computation, one in program.walk() if _kind(one)]
    beside = [pair for pair in found if "async_collective_fusion_config" in pair[1].text]
    seen = dict.fromkeys(_chain(one) for computation, one in beside if _starts(computation, one))
    for computation, one in found:
        if "async_collective_fusion_config" in one.text and not _starts(computation, one):
            if _chain(one) in seen:
                continue
            seen[_chain(one)] = None  # no start is printed: the first of them stands for it
        yield computation, one


def _chain(one: Instruction) -> tuple[str | None, ...]:
    return (_kind(one), *(one.attributes.get(name) for name in ("channel_id", "frontend_attributes")))


def _starts(computation: Computation, one: Instruction) -> bool:
    return any(
        user.attributes.get("custom_call_target") == '"AsyncCollectiveStart"'
        for user in computation.users.get(one.name, ())
    )


def _read(program: CompiledProgram, computation: Computation, one: Instruction, where: GroupReader) -> Collective:
    kind, data = _kind(one), one.operands[: _data_count(one)]
    taken, results = computation.operand_types(one)[: len(data)], _results(computation, one)
    parts = [_parts(program, Value(computation.name, name)) for name in data]
    if one.op != "send" and kind == "all-reduce":
        results = tuple(each for types, _ in parts for each in types)
        kept = _kept_parts(program, computation, one)
        kind, results = ("reduce-scatter", kept) if kept else (kind, results)
    group = where.group(kind, one)
    payload = sum(each.nbytes for each in (results if kind == "all-gather" else taken))
    cause = program.cause(computation, one)
    return Collective(
        kind,
        group.along.axes,
        group.along.crossed,
        group.size,
        results,
        payload,
        _wire_bytes(kind, payload, group.size),
        program.times(computation.name),
        computation.name,
        one.name,
        cause.op_name,
        program.stack(cause),
        tuple(program.argument_path(place) for _, places in parts for place in places),
        bool(kind_between_slices(one)),
        group.host_count,
        group.torus_dims,
    )


def _wire_bytes(kind: str, payload: int, size: int) -> int:
    if kind == "collective-permute":
        return payload if size > 1 else 0
    return -(-payload * (size - 1) * (2 if kind == "all-reduce" else 1) // size)


def _data_count(one: Instruction) -> int:
    """How many of the operands are moved; the others say where to."""
    return 1 if one.op.startswith(("ragged", "send")) else len(one.operands)


def _results(computation: Computation, one: Instruction) -> tuple[ArrayType, ...]:
    """The types of what comes out. The start of most also holds what went in, and, last, signals of the hardware."""
    if one.op == "send":
        same = [each for each in computation.instructions if each.op == "recv" and _meeting(each) == _meeting(one)]
        return (same[0] if same and _meeting(one) else one).types[:1]
    if not one.op.endswith("-start") or one.op == "all-reduce-start":
        return one.types
    taken = len(computation.operand_types(one))
    return one.types[taken : taken + _data_count(one)]


def _meeting(one: Instruction) -> str:
    """The name by which a send and a receive between slices find each other."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', one.text)
    return "" if found is None else found[1]


def _kept_parts(program: CompiledProgram, computation: Computation, one: Instruction) -> tuple[ArrayType, ...]:
    """The parts of a fused all-reduce that a device keeps, where that is all that is done with its result."""
    if not any(call.instruction.op == "fusion" for call in program.callers(computation.name)):
        return ()
    users = list(computation.users.get(one.name, ()))
    for user in users:  # grows as it is walked
        if user.op in ("get-tuple-element", "bitcast", "reshape", "copy"):
            users += computation.users.get(user.name, ())
    kept = [user for user in users if user.op == "dynamic-slice"]
    passed = [user for user in users if user.op in ("get-tuple-element", "bitcast", "reshape", "copy")]
    return tuple(user.types[0] for user in kept) if len(kept) + len(passed) == len(users) else ()


def _parts(program: CompiledProgram, place: Value) -> tuple[list[ArrayType], list[Value]]:
    """The arrays in a value: itself, or those that it is when it was made by laying them end to end."""
    whole = program.instruction(place).types[0]
    made_at = program.flow.origin(place)
    made = program.instruction(made_at)
    if made.op != "concatenate" or made.types[0] != whole or len(whole.shape) != 1:
        return [whole], [place]
    places = [Value(made_at.computation, name) for name in made.operands]
    origins = [program.instruction(program.flow.origin(part)).types[0] for part in places]
    flat = [program.instruction(part).types[0] for part in places]
    return [
        shaped if shaped.nbytes == part.nbytes else part for shaped, part in zip(origins, flat, strict=True)
    ], places
