"""A transformer of a user's size, compiled for GPUs that need not be there."""

from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.patches.text import annotated
from tests.programs.patches.projects import copied

WIDTH, HIDDEN, WORDS = 1024, 4096, 32768


@pytest.mark.parametrize("target", ["cuda:h100:8"])
def test_a_transformer_of_plain_products_is_fast(target: str, tmp_path: Path) -> None:
    step = copied("plain", tmp_path).step

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    square = {name: array(WIDTH, WIDTH) for name in "qkvo"}
    layer = {**square, "up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)}
    params = {"embed": array(WORDS, WIDTH), "layers": [layer, layer]}
    tokens = jax.ShapeDtypeStruct((32, 512), jnp.int32)
    plan = sr.autoplan(step, params, tokens, mesh=sr.mesh_shape("data:2,model:4"))
    patch = plan.to_patch(step, root=tmp_path, target=target, time_limit=900)
    verification = patch.verify()
    assert verification, str(verification)
    before = attrs.evolve(patch, changes=tuple(annotated(each.file, (), ()) for each in patch.changes)).verify()
    assert verification.patched.seconds < 0.6 * before.patched.seconds
    print(f"{before.patched.seconds} -> {verification.patched.seconds}, planned {verification.planned.seconds}")
