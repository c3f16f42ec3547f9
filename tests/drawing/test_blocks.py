"""Which device holds which block, against JAX's own shardings; and the drawing of it."""

import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import entries
from shardrules.core.views.blocks import Blocks, ranges
from shardrules.drawing.picture import Box, Words, label_width

CASES = [
    ("data:4,model:2", (8, 6), P("data", "model")),
    ("data:4,model:2", (8, 6), P("model", None)),
    ("data:4,model:2", (8, 6), P(None, "model")),
    ("data:4,model:2", (16, 6), P(("data", "model"))),
    ("data:4,model:2", (16, 6), P(("model", "data"), None)),
    ("data:4,model:2", (16,), P("data")),
    ("data:4,model:2", (), P()),
    ("a:2,b:2,c:2", (4, 4, 4), P("c", "a", "b")),
    ("a:2,b:2,c:2", (4, 2, 4, 6), P(("c", "a"), None, None, "b")),
    ("a:2,b:2,c:2", (3, 4, 5, 4, 2), P(None, "b", None, "a", "c")),
]


@pytest.mark.parametrize(("axes", "shape", "spec"), CASES, ids=str)
def test_blocks_are_where_jax_puts_them(axes: str, shape: tuple[int, ...], spec: P) -> None:
    mesh = sr.create_mesh(axes)
    plan = sr.SpecTreeShardingRule({"w": spec}).plan({"w": jax.ShapeDtypeStruct(shape, np.float32)}, mesh)
    blocks = plan.blocks("w")
    where = NamedSharding(mesh, spec).devices_indices_map(shape)
    number = {device: at for at, device in enumerate(mesh.devices.flat)}
    seen: dict[int, int] = {}
    for index in np.ndindex(*blocks.counts):
        block = blocks.block(index)
        for device, cut in where.items():
            bounds = tuple(dim_slice.indices(size)[:2] for dim_slice, size in zip(cut, shape, strict=True))
            assert (bounds == block.bounds) == (number[device] in block.devices)
        seen |= dict.fromkeys(block.devices, 1)
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize(("axes", "shape", "spec"), CASES, ids=str)
def test_every_block_of_a_small_mesh_is_drawn(axes: str, shape: tuple[int, ...], spec: P) -> None:
    plan = sr.SpecTreeShardingRule({"w": spec}).plan(
        {"w": jax.ShapeDtypeStruct(shape, np.float32)}, sr.mesh_shape(axes)
    )
    blocks = plan.blocks("w")
    svg = sr.picture(blocks).to_svg()
    titles = re.findall(r"<title>(.*?)</title>", svg)
    assert len(titles) == int(np.prod(blocks.counts))
    for index in np.ndindex(*blocks.counts):
        block = blocks.block(index)
        assert (
            sum(
                title.endswith(f"{'devices' * (len(block.devices) > 1) or 'device'} {ranges(block.devices)}")
                for title in titles
            )
            == 1
        )
    for dim, sentence in enumerate(blocks.sentences()):
        assert sentence.startswith(f"dim {dim}: {shape[dim]}" if dim < len(shape) else "each block is on")


def test_of_many_blocks_the_first_and_the_last_are_drawn() -> None:
    blocks = Blocks(((16384, ("data",)), (53248, ("model",))), {"data": 64, "model": 16})
    svg = sr.picture(blocks).to_svg()
    assert svg.count("<rect") == 7 * 7
    assert svg.count("…") == 2 * 8 - 1
    assert ">1023<" in svg
    assert "[0–255], [0–3,327]: on device 0<" in svg
    many = sr.picture(Blocks(((256, ("expert",)), (64, ()), (64, ())), {"expert": 32})).to_svg()
    assert many.count("<rect") == 7
    assert next(blocks.sentences()) == "dim 0: 16,384 in 64 blocks of 256 over data"


@pytest.mark.parametrize(("axes", "shape", "spec"), CASES, ids=str)
def test_eight_devices_have_eight_colours(axes: str, shape: tuple[int, ...], spec: P) -> None:
    """A device has the same colour in every drawing, and of devices that share a block the first one's is taken."""
    blocks = Blocks(tuple(zip(shape, entries(spec, len(shape)), strict=True)), mesh_sizes(sr.mesh_shape(axes)))
    boxes = [mark for mark in sr.picture(blocks).marks if isinstance(mark, Box)]
    first = [int(re.findall(r"on devices? (\d+)", box.title)[0]) for box in boxes]
    assert [box.colour for box in boxes] == ([None] if len(boxes) == 1 else first)


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        (((64, ("data",)), (64, ("model",))), {"data": 4, "model": 4}),
        (((64, ("data",)), (64, ("model",))), {"data": 64, "model": 16}),
        (((64, ("data",)), (64, ("model",))), {"data": 2, "model": 16}),
        (((64, ("pipe",)), (64, ("data",)), (64, ("model",))), {"pipe": 4, "data": 8, "model": 8}),
        (((64, ()), (64, ("model",))), {"data": 16, "model": 8}),
        (((64, ("data",)), (64, ())), {"data": 8, "model": 16}),
    ],
)
def test_of_more_devices_neighbours_differ(dims: Any, sizes: dict[str, int]) -> None:
    blocks = Blocks(dims, sizes)
    boxes = [mark for mark in sr.picture(blocks).marks if isinstance(mark, Box)]
    colours = [box.colour % 8 for box in boxes if box.colour is not None]
    assert len(colours) == len(boxes)
    if np.prod(blocks.counts) <= 8:
        assert sorted(colours) == [*range(len(boxes))]
    corners = {(box.x, box.y): colour for box, colour in zip(boxes, colours, strict=True)}
    beside = [[(box.x + box.width, box.y), (box.x, box.y + box.height)] for box in boxes]
    pairs = [
        (colour, corners[corner])
        for colour, near in zip(colours, beside, strict=True)
        for corner in near
        if corner in corners
    ]
    assert pairs
    assert all(first != second for first, second in pairs)


def extent(mark: Words) -> tuple[float, float, float, float]:
    width = label_width(mark.text) - 8
    left = {"start": mark.x, "middle": mark.x - width / 2, "end": mark.x - width}[mark.anchor]
    return left, mark.y - 9, left + width, mark.y + 3


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        (((128256, ("data",)), (16384, ("model",))), {"data": 8, "model": 8}),
        (((64, ("a", "long_axis_name", "another_one")), (6, ())), {"a": 2, "long_axis_name": 2, "another_one": 2}),
        (((6, ()), (1024, ("a", "long_axis_name", "another_one"))), {"a": 2, "long_axis_name": 2, "another_one": 2}),
        (((4096, ("a",)), (4096, ("b",)), (64, ()), (2, ("c",))), {"a": 4, "b": 4, "c": 2}),
        (((1000000, ("a",)), (1000000, ("b",)), (1, ()), (1, ())), {"a": 4, "b": 2}),
        (((10**9, ("a",)), (4, ("b",))), {"a": 16, "b": 2}),
    ],
)
def test_words_do_not_cover_each_other_or_boxes(dims: Any, sizes: dict[str, int]) -> None:
    picture = sr.picture(Blocks(dims, sizes))
    words = [extent(mark) for mark in picture.marks if isinstance(mark, Words)]
    boxes = [(box.x, box.y, box.x + box.width, box.y + box.height) for box in picture.marks if isinstance(box, Box)]
    for first, second in itertools.chain(itertools.combinations(words, 2), itertools.product(words, boxes)):
        assert not (first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3])
    assert min(left for left, *_ in words) >= 0
    assert max(right for *_, right, _ in words) <= picture.width
    assert max(bottom for *_, bottom in (*words, *boxes)) <= picture.height


def test_what_has_no_blocks_is_refused() -> None:
    tree = {"w": np.ones((6, 4))}
    with pytest.raises(sr.errors.NoMeshError, match="plan with one"):
        sr.ReplicateShardingRule().plan(tree).blocks("w")
    with pytest.raises(sr.errors.PlanError, match="w cannot be split this way"):
        sr.DimShardingRule("data", 0).plan(tree, sr.mesh_shape("data:4")).blocks("w")
    with pytest.raises(sr.errors.TreeError, match="did you mean 'w'"):
        sr.ReplicateShardingRule().plan(tree, sr.mesh_shape("data:4")).blocks("w2")


def test_blocks_of_huge_meshes_are_found_without_an_array_of_all_devices() -> None:
    plan = sr.DimShardingRule("model", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:2,model:4"))
    block = plan.blocks("w").block((1, 0))
    assert (block.bounds, block.devices) == (((2, 4), (0, 4)), (1, 5))
    plan = sr.DimShardingRule("data", 0).plan(
        {"w": jax.ShapeDtypeStruct((2**40, 2), np.float32)}, sr.mesh_shape(f"data:{2**40},model:2")
    )
    assert plan.blocks("w").block((3, 0)).devices == (6, 7)
