"""Casts that round to 8 bits, and their names in compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.compiling.roundings import find_roundings


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (jnp.bfloat16, jnp.float8_e4m3fn, ["f8e4m3fn[4,8]"]),
        (jnp.float32, jnp.int8, ["s8[4,8]"]),
        (jnp.float32, jnp.uint8, ["u8[4,8]"]),
        (jnp.float32, jnp.bfloat16, []),
        (jnp.int32, jnp.int8, []),  # tokens and labels are not quantised
        (jnp.int8, jnp.bfloat16, []),
        (jnp.float32, jnp.bool_, []),  # a mask
    ],
)
def test_casts_of_numbers_to_8_bits_are_roundings(before: Any, after: Any, expected: list[str]) -> None:
    def layer(x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: row.astype(after), x)

    roundings = list(find_roundings(jax.make_jaxpr(layer)(jnp.ones((4, 8), before))))
    assert [str(rounding.array).replace("[8]", "[4,8]") for rounding in roundings] == expected
    assert all("test_roundings.py" in rounding.line for rounding in roundings)
