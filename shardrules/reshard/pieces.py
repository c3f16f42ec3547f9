"""Moves between any devices of any processes: pieces are cut where they are, sent, and joined where they belong.

Cutting and joining are programs that run on all devices of a sharding at once and send nothing, one for each shape of
piece. What is sent goes from device to device where one process holds both, else in a program that both processes
run. Beside the old and the new array there are never more than a few small pieces on any device.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardrules.reshard.rounds import Round, piece_bytes, rounds
from shardrules.reshard.schedule import Device, Piece, Schedule

_TOGETHER = 32
_TOGETHER_BYTES = 2 * 2**20
"""How many arrays go through one launch of a program, and how much of them on a device."""

_UNDER_WAY_BYTES = 4 * 2**20
"""What may be under way on a device before the host waits; for large shards a sixteenth of one."""

_PER_ROUND = 6
"""Pieces that a round may keep on a device: cut, on its way, received, what is there, and two while it is joined."""

_PART = PartitionSpec("part")

Shards: TypeAlias = Mapping[Device, jax.Array]
"""What the devices of this process hold of an array."""


def staging_bytes(move: Schedule) -> int:
    """Returns how much of an array may be under way on a device, beside its old and its new shard.

    **Arguments:**

    - `move`: the schedule of the array.

    **Returns:**

    Bytes: an upper bound.
    """
    if _as_they_are(move):
        # Between processes a sender gets something in return, and a receiver gives something.
        return 0 if _near(move) else 2 * move.new_bytes * _together(move)
    copied = _changes(move.dtype, _line(tuple(move.target)))  # then parts cannot be joined in place
    pieces = _PER_ROUND * min(piece_bytes(move), move.new_bytes) * _together(move)
    return _under_way_bytes(move) + pieces + copied * move.new_bytes * _together(move)


def _under_way_bytes(move: Schedule) -> int:
    return max(_UNDER_WAY_BYTES, move.new_bytes // 16)


def _together(move: Schedule) -> int:
    """A power of two, so that few sizes of launch are compiled."""
    return 1 << (min(_TOGETHER, max(1, _TOGETHER_BYTES // max(1, move.new_bytes))).bit_length() - 1)


def _as_they_are(move: Schedule) -> bool:
    """Whether shards are sent whole. Between processes only small ones are, since a receiver must give what it gets."""
    pieces = [(move.source.get(one.sender, ()), one.box, move.target[one.receiver]) for one in move.pieces]
    whole = all(one.relayed or old == box for one, (old, box, _) in zip(move.pieces, pieces, strict=True)) and all(
        box == new for _, box, new in pieces
    )
    return whole and (_near(move) or move.new_bytes <= piece_bytes(move))


def _near(move: Schedule) -> bool:
    return all(piece.sender.process_index == piece.receiver.process_index for piece in move.pieces)


@final
@attrs.frozen(eq=False)
class Mover:
    """What moves arrays of one schedule.

    **Arguments:**

    - `move`: the schedule.
    """

    move: Schedule
    _steps: tuple["_Step", ...] = attrs.field(
        init=False, repr=False, default=attrs.Factory(lambda self: _steps(self.move), takes_self=True)
    )

    def __call__(self, arrays: Sequence[Shards], dtype: Any, sharding: Sharding) -> list[jax.Array]:
        """Returns arrays in their new sharding.

        **Arguments:**

        - `arrays`: what the devices of this process hold of arrays of this schedule.
        - `dtype`: their dtype.
        - `sharding`: their new sharding.

        **Returns:**

        New arrays.
        """
        shards: list[Shards] = []
        rest = list(arrays)
        while rest:
            many = min(_together(self.move), 1 << (len(rest).bit_length() - 1))
            part, rest = rest[:many], rest[many:]
            shards += (self._in_steps if self._steps else self._as_they_are)(part, dtype)
        return [
            jax.make_array_from_single_device_arrays(
                self.move.shape, sharding, [one[device] for device in _here(self.move.target)], dtype=dtype
            )
            for one in shards
        ]

    def _as_they_are(self, old: Sequence[Shards], dtype: Any) -> list[Shards]:
        new: list[dict[Device, jax.Array]] = [{} for _ in old]
        if not self.move.pieces:  # of empty arrays
            none = np.zeros(self.move.new_shape, dtype)
            places = [SingleDeviceSharding(device) for device in _here(self.move.target)]
            made = jax.device_put([none] * len(places), places)
            return [dict(zip(_here(self.move.target), made, strict=True)) for _ in old]
        for late, holding in ((False, old), (True, new)):
            pieces = [piece for piece in self.move.pieces if piece.relayed == late]
            for mine, received in zip(new, _sent(holding, pieces, self.move.new_shape, dtype), strict=True):
                mine.update(received)
        return list(new)

    def _in_steps(self, old: Sequence[Shards], dtype: Any) -> list[Shards]:
        source, target = tuple(self.move.source), tuple(self.move.target)
        before = [_stacked(one, source, dtype, self.move.old_shape) for one in old] if _here(source) else []
        after = _blank(target, self.move.new_shape, dtype, len(old)) if _here(target) else []
        under_way = 0
        for step in self._steps:
            line, holding = (target, after) if step.relayed else (source, before)
            shape = (len(old), *step.round.shape)  # the pieces of all arrays go together
            cut: Shards = {}
            if holding:
                with jax.set_mesh(_line(line)):
                    cut = _shards(_cut(holding, step.sends, line=_line(line), shape=step.round.shape))
            received = _sent([cut], step.round.pieces, shape, dtype)[0]
            if after:
                with jax.set_mesh(_line(target)):
                    if not step.full:  # who receives nothing puts there what is there
                        there = _cut(after, step.receives, line=_line(target), shape=step.round.shape)
                        received = {**_shards(there), **received}
                        del there
                    pieces = _stacked(received, target, dtype, shape)
                    after = _join(after, pieces, step.receives, line=_line(target))
                del pieces
            del cut, received
            under_way += _PER_ROUND * step.round.bytes * len(old)
            if under_way > _under_way_bytes(self.move):
                jax.block_until_ready(after or before)
                under_way = 0
        return [_shards(one) for one in after] if after else [{} for _ in old]


def _steps(move: Schedule) -> tuple["_Step", ...]:
    if _as_they_are(move):
        return ()
    phases = ([piece for piece in move.pieces if piece.relayed == late] for late in (False, True))
    return tuple(_Step.of(move, one) for phase in phases for one in rounds(move, phase))


@final
@attrs.frozen(eq=False)
class _Step:
    """A round, with what its programs are told: where each device cuts and joins, and whether all of them join."""

    round: Round
    relayed: bool
    sends: Any
    receives: Any
    full: bool

    @classmethod
    def of(cls, move: Schedule, one: Round) -> "_Step":
        source, target = tuple(move.source), tuple(move.target)
        relayed = one.pieces[0].relayed
        senders = target if relayed else source
        sender_at = {device: number for number, device in enumerate(senders)}
        receiver_at = {device: number for number, device in enumerate(target)}
        held = move.target if relayed else move.source
        sends = np.zeros((len(senders), len(one.shape)), np.int32)
        receives = np.zeros((len(target), len(one.shape)), np.int32)
        for piece in one.pieces:
            sends[sender_at[piece.sender]] = _start(piece, held[piece.sender])
            receives[receiver_at[piece.receiver]] = _start(piece, move.target[piece.receiver])
        return cls(one, relayed, _told(sends, senders), _told(receives, target), len(one.pieces) == len(target))


def _start(piece: Piece, box: Any) -> list[int]:
    return [start - first for (start, _), (first, _) in zip(piece.box, box, strict=True)]


def _told(rows: np.ndarray, devices: tuple[Device, ...]) -> Any:
    """A row for each device, on it."""
    if not _here(devices):
        return None
    me = jax.process_index()
    mine = {one: rows[number : number + 1] for number, one in enumerate(devices) if one.process_index == me}
    placed = jax.device_put(list(mine.values()), [SingleDeviceSharding(device) for device in mine])
    return _stacked(dict(zip(mine, placed, strict=True)), devices, rows.dtype, (1, *rows.shape[1:]))


# ---- arrays as stacks: one slice for each device ----


@functools.lru_cache(maxsize=64)
def _line(devices: tuple[Device, ...]) -> Mesh:
    return Mesh(np.array(devices), ("part",))


def _here(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Those of this process, in their order."""
    return tuple(device for device in devices if device.process_index == jax.process_index())


def _shards(array: jax.Array) -> dict[Device, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _stacked(shards: Shards, devices: tuple[Device, ...], dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """One array whose parts along the first dimension are what each device holds. Nothing is copied."""
    whole_shape = (shape[0] * len(devices), *shape[1:])
    mine = [shards[device] for device in _here(devices)]
    sharding = NamedSharding(_line(devices), _PART)
    return jax.make_array_from_single_device_arrays(whole_shape, sharding, mine, dtype=dtype)


def _blank(devices: tuple[Device, ...], shape: tuple[int, ...], dtype: Any, count: int) -> list[jax.Array]:
    sharding = NamedSharding(_line(devices), _PART)
    with jax.set_mesh(_line(devices)):
        return _zeros((shape[0] * len(devices), *shape[1:]), dtype, count, sharding)


# ---- programs ----


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _zeros(shape: tuple[int, ...], dtype: Any, count: int, sharding: NamedSharding) -> list[jax.Array]:
    return [lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding) for _ in range(count)]


@functools.partial(jax.jit, static_argnames=("line", "shape"))
def _cut(stacks: list[jax.Array], starts: jax.Array, *, line: Mesh, shape: tuple[int, ...]) -> jax.Array:
    def on_each(parts: list[jax.Array], starts: jax.Array) -> jax.Array:
        pieces = [lax.dynamic_slice(_as_bits(part, line), starts[0], shape) for part in parts]
        return _as_floats(jnp.stack(pieces), parts[0].dtype)

    return jax.shard_map(on_each, mesh=line, in_specs=_PART, out_specs=_PART, check_vma=False)(stacks, starts)


def _as_bits(x: jax.Array, line: Mesh) -> jax.Array:
    """A small float on a CPU as a whole number: XLA goes through larger floats there, and changes the bits of NaNs."""
    return lax.bitcast_convert_type(x, f"uint{jax.dtypes.itemsize_bits(x.dtype)}") if _changes(x.dtype, line) else x


def _changes(dtype: Any, line: Mesh) -> bool:
    small = jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) <= 16
    return small and line.devices.flat[0].platform == "cpu"


def _as_floats(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


@functools.partial(jax.jit, static_argnames=("line",), donate_argnums=0)
def _join(stacks: list[jax.Array], pieces: jax.Array, starts: jax.Array, *, line: Mesh) -> list[jax.Array]:
    def on_each(parts: list[jax.Array], pieces: jax.Array, starts: jax.Array) -> list[jax.Array]:
        def joined(part: jax.Array, piece: jax.Array) -> jax.Array:
            done = lax.dynamic_update_slice(_as_bits(part, line), piece, starts[0])
            return _as_floats(done, part.dtype)

        # The bits first: with JAX 0.12 even indexing goes through larger floats.
        bits = _as_bits(pieces, line)
        return [joined(part, bits[number]) for number, part in enumerate(parts)]

    run = jax.shard_map(on_each, mesh=line, in_specs=_PART, out_specs=_PART, check_vma=False)
    return run(stacks, pieces, starts)


@functools.partial(jax.jit, static_argnames=("line", "pairs"))
def _permuted(stacks: list[jax.Array], *, line: Mesh, pairs: tuple[tuple[int, int], ...]) -> list[jax.Array]:
    def on_each(parts: list[jax.Array]) -> list[jax.Array]:
        return [_as_floats(lax.ppermute(_as_bits(part, line), "part", pairs), part.dtype) for part in parts]

    return jax.shard_map(on_each, mesh=line, in_specs=(_PART,), out_specs=_PART, check_vma=False)(stacks)


# ---- from device to device ----


def _sent(shards: Sequence[Shards], pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any) -> list[Shards]:
    """What the devices of this process receive, for every array, when senders send what they hold, of this shape."""
    result: list[dict[Device, jax.Array]] = [{} for _ in shards]
    near = [piece for piece in pieces if piece.sender.process_index == piece.receiver.process_index]
    mine = [piece for piece in near if piece.sender.process_index == jax.process_index()]
    if mine:
        data = [one[piece.sender] for one in shards for piece in mine]
        places = [SingleDeviceSharding(piece.receiver) for piece in mine] * len(shards)
        copies = iter(jax.device_put(data, places, may_alias=False))
        for received in result:
            received.update({piece.receiver: next(copies) for piece in mine})
    far = [piece for piece in pieces if piece.sender.process_index != piece.receiver.process_index]
    while far:
        turn: dict[Device, Piece] = {}  # in which no device sends twice
        for piece in far:
            turn.setdefault(piece.sender, piece)
        far = [piece for piece in far if turn[piece.sender] is not piece]
        for received, more in zip(result, _exchanged(shards, tuple(turn.values()), shape, dtype), strict=True):
            received.update(more)
    return list(result)


def _exchanged(
    shards: Sequence[Shards], pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any
) -> list[dict[Device, jax.Array]]:
    """What goes from process to process: those that take part run one program, on the devices that do."""
    taking_part = dict.fromkeys(one for piece in pieces for one in (piece.sender, piece.receiver))
    devices = tuple(sorted(taking_part, key=lambda device: device.id))
    if not _here(devices):
        return [{} for _ in shards]
    senders = [piece.sender for piece in pieces]
    stacks: list[jax.Array] = []
    for one in shards:
        given = {
            device: one[device]
            if device in senders
            else jax.device_put(np.zeros(shape, dtype), SingleDeviceSharding(device))
            for device in _here(devices)
        }
        if not shape:
            given = {device: _reshaped(value, (1,)) for device, value in given.items()}
        stacks.append(_stacked(given, devices, dtype, shape or (1,)))
    pairs = tuple((devices.index(piece.sender), devices.index(piece.receiver)) for piece in pieces)
    with jax.set_mesh(_line(devices)):
        # Programs that send are not left to pile up: XLA's CPU devices would wait for each other for ever.
        permuted = jax.block_until_ready(_permuted(stacks, line=_line(devices), pairs=pairs))
    receivers = [piece.receiver for piece in pieces]
    return [
        {
            device: value if shape else _reshaped(value, ())
            for device, value in _shards(stack).items()
            if device in receivers
        }
        for stack in permuted
    ]


def _reshaped(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A single number in another shape, without a program: one would heed the mesh in force, which is another."""
    return jax.device_put(np.asarray(value).reshape(shape), value.sharding)
