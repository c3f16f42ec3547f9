"""Which device holds which block, against JAX's own shardings; and the drawing of it."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.drawing.blocks import Blocks, ranges

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
    svg = blocks.picture().to_svg()
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
    svg = blocks.picture().to_svg()
    assert svg.count("<rect") == 7 * 7
    assert svg.count("…") == 2 * 8 - 1
    assert ">1023<" in svg
    assert "[0–255], [0–3,327]: on device 0<" in svg
    many = Blocks(((256, ("expert",)), (64, ()), (64, ())), {"expert": 32}).picture().to_svg()
    assert many.count("<rect") == 7
    assert next(blocks.sentences()) == "dim 0: 16,384 in 64 blocks of 256 over data"


def test_what_has_no_blocks_is_refused() -> None:
    tree = {"w": np.ones((6, 4))}
    with pytest.raises(sr.errors.NoMeshError, match="plan with one"):
        sr.ReplicateShardingRule().plan(tree).blocks("w")
    with pytest.raises(sr.errors.PlanError, match="w cannot be split this way"):
        sr.DimShardingRule("data", 0).plan(tree, sr.mesh_shape("data:4")).blocks("w")
    with pytest.raises(sr.errors.TreeError, match="did you mean 'w'"):
        sr.ReplicateShardingRule().plan(tree, sr.mesh_shape("data:4")).blocks("w2")
