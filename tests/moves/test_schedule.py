"""Laws of schedules and of the rounds in which pieces travel. Needs no device."""

import itertools
import math
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrules.moves.schedule import (
    Box,
    Piece,
    Schedule,
    box_shape,
    make_schedule,
    networks,
    piece_bytes,
    rounds,
    slices,
)
from tests.moves.cases import FakeDevice

FLOAT = np.dtype(np.float32)


def boxes(shape: Sequence[int], ways: Sequence[int]) -> list[Box]:
    """The boxes of an array, each dim cut into `ways[dim]` equal parts, in order."""
    cuts = [
        [(part * size // way, (part + 1) * size // way) for part in range(way)]
        for size, way in zip(shape, ways, strict=True)
    ]
    return list(itertools.product(*cuts))


def spread_boxes(devices: Sequence[FakeDevice], shape: Sequence[int], ways: Sequence[int]) -> dict[FakeDevice, Box]:
    """Each box on equally many of the devices."""
    parts = boxes(shape, ways)
    assert len(devices) % len(parts) == 0
    return {device: parts[index % len(parts)] for index, device in enumerate(devices)}


@final
@attrs.frozen
class Setting:
    """The arguments of a schedule."""

    shape: tuple[int, ...]
    source: dict[FakeDevice, Box]
    target: dict[FakeDevice, Box]

    def schedule(self, alive: Sequence[FakeDevice] | None = None) -> Schedule:
        return make_schedule(self.shape, FLOAT, self.source, self.target, alive)

    def networks(self) -> dict[FakeDevice, tuple[str, int]]:
        return networks((*self.source, *self.target))


@st.composite
def grids(draw: st.DrawFn, ndim: int, count: int) -> tuple[int, ...]:
    """Into how many parts each dim is cut, so that `count` is a multiple of the parts."""
    left = count
    ways = []
    for _ in range(ndim):
        way = draw(st.sampled_from([way for way in range(1, left + 1) if left % way == 0]))
        ways.append(way)
        left //= way
    return tuple(draw(st.permutations(ways)))


NETWORKS = ("one", "processes", "slices")


@st.composite
def settings_of(draw: st.DrawFn, largest: int = 4) -> Setting:
    """Any two shardings on up to twelve devices of one network, of several processes, or of several slices."""
    kind = draw(st.sampled_from(NETWORKS))
    size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    devices = [
        FakeDevice(
            index,
            process_index=0 if kind == "one" else index // size if kind == "processes" else index,
            slice_index=index // size if kind == "slices" else None,
        )
        for index in draw(st.permutations(range(12)))
    ]
    ndim = draw(st.integers(0, 3))
    counts = [draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in "ab"]
    start = draw(st.integers(0, 12 - counts[1]))
    ways = [draw(grids(ndim, count)) for count in counts]
    shape = tuple(math.lcm(*both) * draw(st.integers(1, largest)) for both in zip(*ways, strict=True))
    source = spread_boxes(devices[: counts[0]], shape, ways[0])
    return Setting(shape, source, spread_boxes(devices[start : start + counts[1]], shape, ways[1]))


def elements(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)[slices(box, tuple((0, size) for size in shape))].ravel()


def inside(inner: Box, outer: Box) -> bool:
    return all(start >= first and stop <= last for (start, stop), (first, last) in zip(inner, outer, strict=True))


def sent(schedule: Schedule) -> list[Piece]:
    return [piece for piece in schedule.pieces if not piece.stays]


# ---- laws of every schedule ----


@settings(max_examples=300)
@given(settings_of())
def test_every_schedule_fills_the_new_boxes_once_by_those_who_can_send(setting: Setting) -> None:
    schedule, network_of = setting.schedule(), setting.networks()
    assert schedule.lost == ()
    assert schedule.pieces == setting.schedule().pieces == setting.schedule(list(setting.source)).pieces
    # The pieces of every receiver tile its box.
    assert {piece.receiver for piece in schedule.pieces} <= set(setting.target)
    for device, box in setting.target.items():
        mine = [elements(piece.box, setting.shape) for piece in schedule.pieces if piece.receiver is device]
        assert sorted(np.concatenate(mine).tolist()) == sorted(elements(box, setting.shape).tolist())
        total = schedule.sums.received.get(device, 0) + schedule.sums.kept.get(device, 0)
        assert total == schedule.box_bytes(box)
    assert sum(schedule.sums.sent.values()) == sum(schedule.sums.received.values())
    assert sum(schedule.sums.sent.values()) == 4 * sum(math.prod(box_shape(piece.box)) for piece in sent(schedule))
    # Senders have what they send, or relay it: then another network has sent it to them, directly.
    for piece in schedule.pieces:
        old_box = setting.source.get(piece.receiver)
        assert piece.stays == (old_box is not None and inside(piece.box, old_box))
        if not piece.relayed:
            assert inside(piece.box, setting.source[piece.sender])
            continue
        assert piece.sender not in setting.source or not inside(piece.box, setting.source[piece.sender])
        assert network_of[piece.sender] == network_of[piece.receiver]
        (earlier,) = [
            earlier for earlier in sent(schedule) if earlier.receiver is piece.sender and earlier.box == piece.box
        ]
        assert not earlier.relayed
        assert network_of[earlier.sender] != network_of[earlier.receiver]
    # Nothing crosses to a network twice, or to one that has it.
    crossing = [piece for piece in sent(schedule) if network_of[piece.sender] != network_of[piece.receiver]]
    destinations = [(piece.box, network_of[piece.receiver]) for piece in crossing]
    assert len(dict.fromkeys(destinations)) == len(destinations)
    for box, network in destinations:
        assert not any(
            network_of[device] == network and inside(box, old_box) for device, old_box in setting.source.items()
        )


@settings(max_examples=100)
@given(settings_of(), st.data())
def test_lost_parts_are_on_no_living_device(setting: Setting, data: st.DataObject) -> None:
    alive = data.draw(st.lists(st.sampled_from(list(setting.source)), unique=True))
    schedule = setting.schedule(alive)
    whole = set(range(math.prod(setting.shape)))
    living = {element for device in alive for element in elements(setting.source[device], setting.shape).tolist()}
    needed = {element for box in setting.target.values() for element in elements(box, setting.shape).tolist()}
    lost = [element for box in schedule.lost for element in elements(box, setting.shape).tolist()]
    assert set(lost) == (whole - living) & needed
    assert len(lost) >= len(set(lost))
    for piece in schedule.pieces:
        assert piece.relayed or piece.sender in alive
    for device, box in setting.target.items():  # what is not lost arrives
        arrived = [
            element
            for piece in schedule.pieces
            if piece.receiver is device
            for element in elements(piece.box, setting.shape)
        ]
        assert sorted(arrived) == sorted(set(elements(box, setting.shape).tolist()) - set(lost))


# ---- balance ----


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.data())
def test_senders_of_one_part_share_the_load(
    holders: int, receivers: int, old_parts: int, new_parts: int, data: st.DataObject
) -> None:
    """If all pieces have one size, the loads of devices with the same part differ by at most one piece."""
    devices = [FakeDevice(index) for index in range(holders * old_parts + receivers * new_parts * old_parts)]
    if data.draw(st.booleans()):
        devices = data.draw(st.permutations(devices))
    shape = (2 * old_parts * new_parts, 4)
    source = spread_boxes(devices[: holders * old_parts], shape, (old_parts, 1))
    target = spread_boxes(devices[holders * old_parts :], shape, (old_parts * new_parts, 1))
    schedule = make_schedule(shape, FLOAT, source, target)
    assert len({piece.box[0][1] - piece.box[0][0] for piece in schedule.pieces}) == 1
    piece = schedule.box_bytes(schedule.pieces[0].box)
    for box in boxes(shape, (old_parts, 1)):
        loads = [schedule.sums.sent.get(device, 0) for device, has in source.items() if has == box]
        assert max(loads) - min(loads) <= piece
        assert sum(loads) == receivers * new_parts * piece


def test_a_device_that_keeps_its_part_sends_too() -> None:
    devices = [FakeDevice(index) for index in range(8)]
    whole = ((0, 8), (0, 4))
    schedule = make_schedule((8, 4), FLOAT, dict.fromkeys(devices[:4], whole), dict.fromkeys(devices, whole))
    assert schedule.sums.sent == dict.fromkeys(devices[:4], 128)
    assert schedule.sums.kept == dict.fromkeys(devices[:4], 128)


def test_far_senders_share_the_load() -> None:
    near = [FakeDevice(index) for index in range(4)]
    far = [FakeDevice(index, process_index=1) for index in range(4, 8)]
    whole = ((0, 8), (0, 4))
    schedule = make_schedule((8, 4), FLOAT, dict.fromkeys(near, whole), spread_boxes(far, (8, 4), (4, 1)))
    assert schedule.sums.sent == dict.fromkeys(near, 32)
    assert [piece.relayed for piece in schedule.pieces] == [False] * 4


# ---- networks ----


@pytest.mark.parametrize(
    ("platform", "slices_of", "name"),
    [
        ("tpu", (0, 0, 1, 1), "slice"),
        ("tpu", (0, 0, 0, 0), "process"),  # of one slice
        ("cpu", (0, 0, 0, 0), "process"),  # XLA gives all CPUs slice 0
        ("cpu", (None, None, None, None), "process"),
        ("gpu", (0, 0, 1, 1), "slice"),
        ("tpu", (0, None, 1, 1), "process"),
    ],
)
def test_networks_are_slices_if_several_else_processes(
    platform: str, slices_of: tuple[int | None, ...], name: str
) -> None:
    devices = [FakeDevice(n, n % 2, index, platform) for n, index in enumerate(slices_of)]
    expected = slices_of if name == "slice" else (0, 1, 0, 1)
    assert list(networks(devices).items()) == [(device, (name, n)) for device, n in zip(devices, expected, strict=True)]


def test_near_replicas_send_before_far_ones() -> None:
    near, far = FakeDevice(0, process_index=1), FakeDevice(1, process_index=0)
    receiver = FakeDevice(2, process_index=1)
    box = ((0, 8),)
    schedule = make_schedule((8,), FLOAT, {far: box, near: box}, {receiver: box})
    assert [piece.sender for piece in schedule.pieces] == [near]
    assert schedule.sums.route == "direct"


# ---- rounds ----


@settings(max_examples=100)
@given(settings_of(), st.sampled_from([1, 100, 300]))
def test_devices_send_and_receive_once_a_round(setting: Setting, scale: int) -> None:
    bigger = tuple(size * scale for size in setting.shape)

    def scaled(boxes: dict[FakeDevice, Box]) -> dict[FakeDevice, Box]:
        return {device: tuple((start * scale, stop * scale) for start, stop in box) for device, box in boxes.items()}

    schedule = make_schedule(bigger, FLOAT, scaled(setting.source), scaled(setting.target))
    all_rounds = rounds(schedule, schedule.pieces)
    parts: dict[tuple[FakeDevice, FakeDevice, bool], list[Box]] = {}
    for each_round in all_rounds:
        assert len({id(piece.sender) for piece in each_round.pieces}) == len(each_round.pieces)
        assert len({id(piece.receiver) for piece in each_round.pieces}) == len(each_round.pieces)
        assert {box_shape(piece.box) for piece in each_round.pieces} == {each_round.shape}
        assert each_round.bytes == 4 * math.prod(each_round.shape)
        assert each_round.bytes <= piece_bytes(schedule) or math.prod(each_round.shape) == 1
        for piece in each_round.pieces:
            parts.setdefault((piece.sender, piece.receiver, piece.relayed), []).append(piece.box)
    assert sum(len(each_round.pieces) for each_round in all_rounds) == sum(map(len, parts.values()))
    for piece in schedule.pieces:
        mine = [box for box in parts[piece.sender, piece.receiver, piece.relayed] if inside(box, piece.box)]
        assert sum(math.prod(box_shape(box)) for box in mine) == math.prod(box_shape(piece.box))
        for each_round, other in itertools.combinations(mine, 2):
            assert any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(each_round, other, strict=True))
    total = sum(schedule.box_bytes(piece.box) for piece in schedule.pieces)
    assert sum(each_round.bytes * len(each_round.pieces) for each_round in all_rounds) == total


def test_independent_pieces_share_a_round() -> None:
    devices = [FakeDevice(index) for index in range(8)]
    shape = (64, 64)
    rotated = dict(zip(devices[1:] + devices[:1], boxes(shape, (8, 1)), strict=True))
    schedule = make_schedule(shape, FLOAT, spread_boxes(devices, shape, (8, 1)), rotated)
    (only,) = rounds(schedule, schedule.pieces)
    assert len(only.pieces) == 8
    # All to all takes as many rounds as there are devices, and not one for each of the 64 pieces.
    schedule = make_schedule(shape, FLOAT, spread_boxes(devices, shape, (8, 1)), spread_boxes(devices, shape, (1, 8)))
    assert [len(each_round.pieces) for each_round in rounds(schedule, schedule.pieces)] == [8] * 8


def test_large_pieces_are_a_64th_of_a_shard() -> None:
    sender, receiver = FakeDevice(0), FakeDevice(1)
    box = ((0, 2**13), (0, 2**13))
    schedule = make_schedule((2**13, 2**13), FLOAT, {sender: box}, {receiver: box})
    assert (schedule.new_bytes, piece_bytes(schedule)) == (2**28, 2**22)
    steps = rounds(schedule, schedule.pieces)
    assert [(step.shape, step.bytes, len(step.pieces)) for step in steps] == [((2**10, 2**10), 2**22, 1)] * 64
