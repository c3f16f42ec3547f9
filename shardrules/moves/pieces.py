"""Moves between any devices of any processes: pieces are cut on the senders, sent, and joined on the receivers.

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

from shardrules.core.jax_state import device_put, jit, shard_map
from shardrules.moves.schedule import Box, Device, Piece, Round, Schedule, piece_bytes, rounds

_LAUNCH_ARRAYS = 32
"""The most arrays in one launch of a program: two thousand small ones take 60 launches a round. Chosen by hand."""

_LAUNCH_BYTES = 2 * 2**20
"""The bytes of those arrays that a device may hold: larger arrays are slow enough to be launched one by one. Chosen by
hand."""

_IN_FLIGHT_BYTES = 4 * 2**20
"""The bytes in flight on a device before the host waits; for large shards a sixteenth of one. Chosen by hand."""

_PER_ROUND = 6
"""Pieces that a round may keep on a device: cut, sent, received, the part that they replace, and two while one is
joined. It is a count, not a choice: less would understate the peak."""

_PART = PartitionSpec("part")

Shards: TypeAlias = Mapping[Device, jax.Array]
"""The shards of an array on devices of this process."""


def staging_bytes(schedule: Schedule) -> int:
    """Returns an upper bound of what is in flight on a device, beside its old and its new shard."""
    if _sends_whole_shards(schedule):
        # Between processes all that take part swap buffers: a sender receives one, and a receiver sends one.
        return 0 if _is_within_processes(schedule) else 2 * schedule.new_bytes * _launch_arrays(schedule)
    # Then parts cannot be joined in place.
    copied = _needs_bits(schedule.dtype, _line(tuple(schedule.target)))
    pieces = _PER_ROUND * min(piece_bytes(schedule), schedule.new_bytes) * _launch_arrays(schedule)
    return _in_flight_limit(schedule) + pieces + copied * schedule.new_bytes * _launch_arrays(schedule)


def _in_flight_limit(schedule: Schedule) -> int:
    return max(_IN_FLIGHT_BYTES, schedule.new_bytes // 16)


def _launch_arrays(schedule: Schedule) -> int:
    """Returns the number of arrays in one launch: a power of two, so that few sizes of launch are compiled."""
    return 1 << (min(_LAUNCH_ARRAYS, max(1, _LAUNCH_BYTES // max(1, schedule.new_bytes))).bit_length() - 1)


def _sends_whole_shards(schedule: Schedule) -> bool:
    """Returns whether shards are sent uncut. Between processes only small ones are: receivers send what they get."""
    old_boxes = [schedule.source.get(piece.sender, ()) for piece in schedule.pieces]
    whole = all(
        # A relay has received exactly what it sends, so only other pieces are compared with old boxes.
        (piece.relayed or old_box == piece.box) and piece.box == schedule.target[piece.receiver]
        for piece, old_box in zip(schedule.pieces, old_boxes, strict=True)
    )
    return whole and (_is_within_processes(schedule) or schedule.new_bytes <= piece_bytes(schedule))


def _is_within_processes(schedule: Schedule) -> bool:
    return all(piece.sender.process_index == piece.receiver.process_index for piece in schedule.pieces)


@final
@attrs.frozen(eq=False)
class Mover:
    """Moves arrays of one schedule."""

    schedule: Schedule
    _steps: tuple["_Step", ...] = attrs.field(
        init=False, repr=False, default=attrs.Factory(lambda self: _steps(self.schedule), takes_self=True)
    )

    def __call__(self, arrays: Sequence[Shards], dtype: Any, sharding: Sharding) -> list[jax.Array]:
        """Returns arrays in their new sharding, from their shards on the devices of this process."""
        new_shards: list[Shards] = []
        rest = list(arrays)
        while rest:
            # Batches are powers of two, so that programs are compiled for few numbers of arrays.
            count = min(_launch_arrays(self.schedule), 1 << (len(rest).bit_length() - 1))
            batch, rest = rest[:count], rest[count:]
            new_shards += (self._move_in_steps if self._steps else self._move_whole)(batch, dtype)
        return [
            jax.make_array_from_single_device_arrays(
                self.schedule.shape, sharding, [shards[device] for device in _local(self.schedule.target)], dtype=dtype
            )
            for shards in new_shards
        ]

    def _move_whole(self, old: Sequence[Shards], dtype: Any) -> list[Shards]:
        new: list[dict[Device, jax.Array]] = [{} for _ in old]
        # The arrays are empty.
        if not self.schedule.pieces:
            devices = _local(self.schedule.target)
            empty = [np.zeros(self.schedule.new_shape, dtype)] * len(devices)
            placed = device_put(empty, [SingleDeviceSharding(device) for device in devices])
            return [dict(zip(devices, placed, strict=True)) for _ in old]
        # What is relayed has to arrive before it can be passed on.
        for relayed, holders in ((False, old), (True, new)):
            pieces = [piece for piece in self.schedule.pieces if piece.relayed == relayed]
            for shards, received in zip(new, _send(holders, pieces, self.schedule.new_shape, dtype), strict=True):
                shards.update(received)
        return list(new)

    def _move_in_steps(self, old: Sequence[Shards], dtype: Any) -> list[Shards]:
        source, target = tuple(self.schedule.source), tuple(self.schedule.target)
        before = [_stack(shards, source, dtype, self.schedule.old_shape) for shards in old] if _local(source) else []
        after = _blank_stacks(target, self.schedule.new_shape, dtype, len(old)) if _local(target) else []
        in_flight_bytes = 0
        for step in self._steps:
            line, stacks = (target, after) if step.relayed else (source, before)
            # The pieces of all arrays travel together.
            shape = (len(old), *step.round.shape)
            cut: Shards = {}
            if stacks:
                with jax.set_mesh(_line(line)):
                    cut = _unstack(_cut(stacks, step.sends, line=_line(line), shape=step.round.shape))
            received = _send([cut], step.round.pieces, shape, dtype)[0]
            if after:
                with jax.set_mesh(_line(target)):
                    # The program runs on all devices: those that receive nothing write back what they have.
                    if not step.all_receive:
                        present = _cut(after, step.receives, line=_line(target), shape=step.round.shape)
                        received = {**_unstack(present), **received}
                        del present
                    pieces = _stack(received, target, dtype, shape)
                    after = _join(after, pieces, step.receives, line=_line(target))
                del pieces
            # Without these names the buffers are free as soon as the programs that read them are done.
            del cut, received
            in_flight_bytes += _PER_ROUND * step.round.bytes * len(old)
            if in_flight_bytes > _in_flight_limit(self.schedule):
                jax.block_until_ready(after or before)
                in_flight_bytes = 0
        return [_unstack(stack) for stack in after] if after else [{} for _ in old]


def _steps(schedule: Schedule) -> tuple["_Step", ...]:
    if _sends_whole_shards(schedule):
        return ()
    # Relays send what they have received, so their phase comes second.
    phases = ([piece for piece in schedule.pieces if piece.relayed == relayed] for relayed in (False, True))
    return tuple(_Step.of(schedule, each_round) for phase in phases for each_round in rounds(schedule, phase))


@final
@attrs.frozen(eq=False)
class _Step:
    """A round with the arguments of its programs: where each device cuts and joins, and whether all of them join."""

    round: Round
    relayed: bool
    sends: Any
    receives: Any
    all_receive: bool

    @classmethod
    def of(cls, schedule: Schedule, step_round: Round) -> "_Step":
        source, target = tuple(schedule.source), tuple(schedule.target)
        relayed = step_round.pieces[0].relayed
        # A relay sends from its new box, every other sender from its old one.
        senders = target if relayed else source
        sender_index = {device: index for index, device in enumerate(senders)}
        receiver_index = {device: index for index, device in enumerate(target)}
        sent_from = schedule.target if relayed else schedule.source
        sends = np.zeros((len(senders), len(step_round.shape)), np.int32)
        receives = np.zeros((len(target), len(step_round.shape)), np.int32)
        for piece in step_round.pieces:
            sends[sender_index[piece.sender]] = _offset(piece, sent_from[piece.sender])
            receives[receiver_index[piece.receiver]] = _offset(piece, schedule.target[piece.receiver])
        all_receive = len(step_round.pieces) == len(target)
        return cls(step_round, relayed, _place_rows(sends, senders), _place_rows(receives, target), all_receive)


def _offset(piece: Piece, box: Box) -> list[int]:
    return [start - first for (start, _), (first, _) in zip(piece.box, box, strict=True)]


def _place_rows(rows: np.ndarray, devices: tuple[Device, ...]) -> Any:
    """An array whose rows are on one device each; `None` where none of them is local."""
    if not _local(devices):
        return None
    process = jax.process_index()
    local = {device: rows[row : row + 1] for row, device in enumerate(devices) if device.process_index == process}
    placed = device_put(list(local.values()), [SingleDeviceSharding(device) for device in local])
    return _stack(dict(zip(local, placed, strict=True)), devices, rows.dtype, (1, *rows.shape[1:]))


# ---- stacks: arrays with one slice on each device ----


@functools.lru_cache(maxsize=64)
def _line(devices: tuple[Device, ...]) -> Mesh:
    return Mesh(np.array(devices), ("part",))


def _local(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices of this process, in their order."""
    return tuple(device for device in devices if device.process_index == jax.process_index())


def _unstack(array: jax.Array) -> dict[Device, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _stack(shards: Shards, devices: tuple[Device, ...], dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """One array whose parts along the first dimension are the shards of the devices. Nothing is copied."""
    whole_shape = (shape[0] * len(devices), *shape[1:])
    local = [shards[device] for device in _local(devices)]
    sharding = NamedSharding(_line(devices), _PART)
    return jax.make_array_from_single_device_arrays(whole_shape, sharding, local, dtype=dtype)


def _blank_stacks(devices: tuple[Device, ...], shape: tuple[int, ...], dtype: Any, count: int) -> list[jax.Array]:
    sharding = NamedSharding(_line(devices), _PART)
    with jax.set_mesh(_line(devices)):
        return _zeros((shape[0] * len(devices), *shape[1:]), dtype, count, sharding)


# ---- programs ----


@functools.partial(jit, static_argnums=(0, 1, 2, 3))
def _zeros(shape: tuple[int, ...], dtype: Any, count: int, sharding: NamedSharding) -> list[jax.Array]:
    return [lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding) for _ in range(count)]


@functools.partial(jit, static_argnames=("line", "shape"))
def _cut(stacks: list[jax.Array], starts: jax.Array, *, line: Mesh, shape: tuple[int, ...]) -> jax.Array:
    def on_each(parts: list[jax.Array], starts: jax.Array) -> jax.Array:
        pieces = [lax.dynamic_slice(_to_bits(part, line), starts[0], shape) for part in parts]
        return _from_bits(jnp.stack(pieces), parts[0].dtype)

    return shard_map(on_each, mesh=line, in_specs=_PART, out_specs=_PART, check_vma=False)(stacks, starts)


def _to_bits(x: jax.Array, line: Mesh) -> jax.Array:
    """Small floats on CPUs as unsigned integers: XLA goes through larger floats there, and changes the bits of NaNs."""
    return lax.bitcast_convert_type(x, f"uint{jax.dtypes.itemsize_bits(x.dtype)}") if _needs_bits(x.dtype, line) else x


def _needs_bits(dtype: Any, line: Mesh) -> bool:
    small = jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) <= 16
    return small and line.devices.flat[0].platform == "cpu"


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


@functools.partial(jit, static_argnames=("line",), donate_argnums=0)
def _join(stacks: list[jax.Array], pieces: jax.Array, starts: jax.Array, *, line: Mesh) -> list[jax.Array]:
    def on_each(parts: list[jax.Array], pieces: jax.Array, starts: jax.Array) -> list[jax.Array]:
        # Bits first: since JAX 0.12 even indexing an array of small floats goes through larger ones.
        bits = _to_bits(pieces, line)
        return [
            _from_bits(lax.dynamic_update_slice(_to_bits(part, line), bits[index], starts[0]), part.dtype)
            for index, part in enumerate(parts)
        ]

    run = shard_map(on_each, mesh=line, in_specs=_PART, out_specs=_PART, check_vma=False)
    return run(stacks, pieces, starts)


@functools.partial(jit, static_argnames=("line", "pairs"))
def _permute(stacks: list[jax.Array], *, line: Mesh, pairs: tuple[tuple[int, int], ...]) -> list[jax.Array]:
    def on_each(parts: list[jax.Array]) -> list[jax.Array]:
        return [_from_bits(lax.ppermute(_to_bits(part, line), "part", pairs), part.dtype) for part in parts]

    return shard_map(on_each, mesh=line, in_specs=(_PART,), out_specs=_PART, check_vma=False)(stacks)


# ---- from device to device ----


def _send(arrays: Sequence[Shards], pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any) -> list[Shards]:
    """Returns what this process's devices receive, for every array, when senders send what they hold, of this shape."""
    result: list[dict[Device, jax.Array]] = [{} for _ in arrays]
    near = [piece for piece in pieces if piece.sender.process_index == piece.receiver.process_index]
    local = [piece for piece in near if piece.sender.process_index == jax.process_index()]
    if local:
        data = [shards[piece.sender] for shards in arrays for piece in local]
        shardings = [SingleDeviceSharding(piece.receiver) for piece in local] * len(arrays)
        # A piece may stay on its device, where the new array must not share memory with the old one.
        copies = iter(device_put(data, shardings, may_alias=False))
        for received in result:
            received.update({piece.receiver: next(copies) for piece in local})
    far = [piece for piece in pieces if piece.sender.process_index != piece.receiver.process_index]
    while far:
        # A permutation has one destination per device, so a device that sends twice takes several turns.
        turn: dict[Device, Piece] = {}
        for piece in far:
            turn.setdefault(piece.sender, piece)
        far = [piece for piece in far if turn[piece.sender] is not piece]
        for received, arrived in zip(result, exchange_pieces(arrays, tuple(turn.values()), shape, dtype), strict=True):
            received.update(arrived)
    return list(result)


def exchange_pieces(
    arrays: Sequence[Shards], pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any
) -> list[dict[Device, jax.Array]]:
    """Transfers between processes: all that take part run one program, on the devices that send or receive."""
    involved = dict.fromkeys(device for piece in pieces for device in (piece.sender, piece.receiver))
    devices = tuple(sorted(involved, key=lambda device: device.id))
    # Every process walks through all rounds, and runs only the programs that its devices take part in.
    if not _local(devices):
        return [{} for _ in arrays]
    senders = [piece.sender for piece in pieces]
    stacks: list[jax.Array] = []
    for shards in arrays:
        # Devices that only receive put zeros in: the program takes one operand from each.
        operands = {
            device: shards[device]
            if device in senders
            else device_put(np.zeros(shape, dtype), SingleDeviceSharding(device))
            for device in _local(devices)
        }
        if not shape:
            operands = {device: _reshape_scalar(value, (1,)) for device, value in operands.items()}
        stacks.append(_stack(operands, devices, dtype, shape or (1,)))
    pairs = tuple((devices.index(piece.sender), devices.index(piece.receiver)) for piece in pieces)
    with jax.set_mesh(_line(devices)):
        # Programs that send must not queue up: XLA's CPU devices would wait for each other forever.
        permuted = jax.block_until_ready(_permute(stacks, line=_line(devices), pairs=pairs))
    receivers = [piece.receiver for piece in pieces]
    return [
        {
            device: value if shape else _reshape_scalar(value, ())
            for device, value in _unstack(stack).items()
            if device in receivers
        }
        for stack in permuted
    ]


def _reshape_scalar(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A single element in another shape, without a program, which would read the mesh in force: that is another."""
    return device_put(np.asarray(value).reshape(shape), value.sharding)
