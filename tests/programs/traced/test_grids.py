"""Loops of Pallas kernels: those that JAX ships, and kernels whose dims must stay whole."""

import inspect
import pathlib
import pkgutil
import runpy
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.ops
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardrules.programs.traced.factors.table import op_factors
from tests.programs.autoplan.shipped import OPS, SHIPPED, kernels_in, loaded, struct, text_of

NOT_TRACED = {
    **dict.fromkeys(("gpu.all_gather_mgpu", "gpu.reduce_scatter_mgpu", "gpu.collective_matmul_mgpu"), "between GPUs"),
    "tpu.all_gather": "between TPUs: it is for the inside of a shard_map",
    **dict.fromkeys(
        (
            *("gpu.attention_mgpu", "gpu.hopper_matmul_mgpu", "gpu.hopper_mixed_type_matmul_mgpu"),
            *("gpu.blackwell_matmul_mgpu", "gpu.blackwell_ragged_dot_mgpu"),
            *("gpu.ragged_dot_mgpu", "gpu.transposed_ragged_dot_mgpu"),
        ),
        "kernels in Mosaic address arrays themselves, without blocks: whole",
    ),
    **dict.fromkeys(("tpu.random.philox", "tpu.random.threefry"), "from one key, which every device has"),
}
"""Modules with kernels that are in no call, and why."""


@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_of_jax_are_split_along_the_dims_that_they_can_be(name: str) -> None:
    shipped = SHIPPED[name]
    kernels = kernels_in(jax.make_jaxpr(shipped.fn)(*shipped.args))
    assert tuple(text_of(op_factors(equation, unused)) for equation, unused in kernels) == shipped.kernels


def test_no_module_of_kernels_is_missing() -> None:
    """A kernel that a new version of JAX ships belongs into `SHIPPED`."""
    modules = [module.name for module in pkgutil.walk_packages(jax.experimental.pallas.ops.__path__, OPS)]
    called = {shipped.module for shipped in SHIPPED.values()}
    with_kernels = [
        name.removeprefix(OPS)
        for name in modules
        if "_call(" in (source := inspect.getsource(loaded(name))) or "plgpu.kernel(" in source
    ]
    packages = [name.removeprefix(OPS) for name in called]
    missing = [name for name in with_kernels if name not in NOT_TRACED and not name.startswith(tuple(packages))]
    assert (missing, len(with_kernels) > 20) == ([], True)


def loops_of(
    kernel: Callable[..., None], out_specs: Any, *, grid: Any = (4,), in_specs: Any = None, out: Any = None
) -> str:
    """The text of a kernel of one operand."""
    spec = in_specs or pl.BlockSpec((2, 8), lambda i: (i, 0))
    call = pl.pallas_call(kernel, out or struct(8, 8), grid=grid, in_specs=[spec], out_specs=out_specs)
    ((equation, unused),) = kernels_in(jax.make_jaxpr(call)(struct(8, 8)))
    return text_of(op_factors(equation, unused))


def spread(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.broadcast_to(x_ref[0, 0], out_ref.shape)


ROWS = pl.BlockSpec((2, 8), lambda i: (i, 0))


@jax.jit
def floor_divide(position: Any, last: Any = 1) -> Any:
    """A function with the name of a division."""
    return last - position


def test_blocks_of_rows_may_be_split() -> None:
    assert loops_of(spread, ROWS) == "a. -> a."


def test_a_kernel_that_asks_for_its_position_is_whole() -> None:
    def count(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.bfloat16)

    def count_in_a_branch(x_ref: Any, out_ref: Any) -> None:
        @pl.when(x_ref[0, 0] > 0)
        def _() -> None:
            out_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.bfloat16)

    assert [loops_of(count, ROWS), loops_of(count_in_a_branch, ROWS)] == ["whole", "whole"]


def test_a_mapped_kernel_has_a_dim_that_it_cannot_ask_for() -> None:
    def count(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.bfloat16)

    call = jax.vmap(pl.pallas_call(count, struct(8, 8), grid=(4,), in_specs=[ROWS], out_specs=ROWS))
    ((equation, unused),) = kernels_in(jax.make_jaxpr(call)(struct(3, 8, 8)))
    assert text_of(op_factors(equation, unused)) == "a.. -> a.."


@pytest.mark.parametrize(
    ("why", "in_spec", "out_spec"),
    [
        ("all positions write one block", ROWS, pl.BlockSpec((2, 8), lambda i: (0, 0))),
        ("two positions write one block", ROWS, pl.BlockSpec((4, 8), lambda i: (i // 2, 0))),
        ("blocks are read backwards", pl.BlockSpec((2, 8), lambda i: (3 - i, 0)), ROWS),
        ("blocks are read backwards by another name", pl.BlockSpec((2, 8), lambda i: (floor_divide(i, 1), 0)), ROWS),
        ("a call has one operand", pl.BlockSpec((2, 8), lambda i: (floor_divide(i), 0)), ROWS),
        ("blocks are read along the diagonal", pl.BlockSpec((2, 2), lambda i: (i, i)), ROWS),
        ("blocks overlap", pl.BlockSpec((pl.Element(2), pl.Element(8)), lambda i: (i, 0)), ROWS),
        ("blocks do not fill the array", pl.BlockSpec((1, 8), lambda i: (i, 0)), ROWS),
    ],
)
def test_blocks_that_do_not_go_together_are_whole(why: str, in_spec: Any, out_spec: Any) -> None:
    assert loops_of(spread, out_spec, in_specs=in_spec) == "whole", why


def test_what_is_written_over_an_operand_is_split_with_it() -> None:
    def text(in_spec: Any) -> str:
        call = pl.pallas_call(
            spread, struct(8, 8), grid=(4,), in_specs=[in_spec], out_specs=ROWS, input_output_aliases={0: 0}
        )
        ((equation, unused),) = kernels_in(jax.make_jaxpr(call)(struct(8, 8)))
        return text_of(op_factors(equation, unused))

    assert [text(ROWS), text(pl.BlockSpec((8, 8), lambda i: (0, 0)))] == ["a. -> a.", "whole"]


def test_several_positions_may_read_one_block() -> None:
    """As heads of queries read those of keys: splits keep what reads a block together."""
    spec = pl.BlockSpec((2, 8), lambda i: (i // 2, 0))
    call = pl.pallas_call(spread, struct(16, 8), grid=(8,), in_specs=[spec], out_specs=ROWS)
    ((equation, unused),) = kernels_in(jax.make_jaxpr(call)(struct(8, 8)))
    factors = op_factors(equation, unused)
    assert (text_of(factors), factors and factors.sizes) == ("a. -> a.", (4,))


def text_with(kernel: Callable[..., None], in_specs: Any = (ROWS,), out_specs: Any = ROWS, **options: Any) -> str:
    """The text of a kernel of rows, whose first result alone is used."""
    specs = out_specs if isinstance(out_specs, list) else [out_specs]
    shapes = [struct(8, 8), struct(2, 8)][: len(specs)]
    grid = options.pop("grid", (4,))
    call = pl.pallas_call(kernel, shapes, grid=grid, in_specs=list(in_specs), out_specs=specs, **options)
    operands = [struct(8, 8), struct(2, 8)][: len(in_specs)]
    ((equation, unused),) = kernels_in(jax.make_jaxpr(lambda *arrays: call(*arrays)[0])(*operands))
    return text_of(op_factors(equation, unused))


def carry_on(x_ref: Any, out_ref: Any, state_ref: Any) -> None:
    state_ref[...] = jnp.where(x_ref[0, 0] > 0, 0, state_ref[...]) + x_ref[...]
    out_ref[...] = state_ref[...]


STATE = pl.BlockSpec((2, 8), lambda i: (0, 0))
SCRATCH: dict[str, Any] = {"scratch_shapes": [pltpu.VMEM((2, 8), jnp.bfloat16)]}


def declared(*semantics: Any) -> dict[str, Any]:
    return {**SCRATCH, "compiler_params": pltpu.CompilerParams(dimension_semantics=semantics)}


def test_a_kernel_that_carries_a_state_is_whole_unless_it_declares_positions_parallel() -> None:
    def write_operand(x_ref: Any, state_ref: Any, out_ref: Any) -> None:
        carry_on(x_ref, out_ref, state_ref)

    def write_over(x_ref: Any, state_ref: Any, out_ref: Any, new_ref: Any) -> None:
        carry_on(x_ref, out_ref, new_ref)

    with_state: dict[str, Any] = {"in_specs": (ROWS, STATE)}
    texts = {
        "scratch": text_with(carry_on, **SCRATCH),
        "declared arbitrary": text_with(carry_on, **declared("arbitrary")),
        "an unused result": text_with(carry_on, out_specs=[ROWS, STATE]),
        "over an operand": text_with(write_over, **with_state, out_specs=[ROWS, STATE], input_output_aliases={1: 1}),
        "an operand": text_with(write_operand, **with_state),
    }
    assert {name for name, text in texts.items() if text != "whole"} == set()
    assert text_with(carry_on, **declared("parallel")) == "a. -> a."


def test_a_state_that_starts_anew_along_another_dim_is_carried_along_this() -> None:
    def carry_along_columns(x_ref: Any, out_ref: Any, state_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            state_ref[...] = jnp.zeros_like(state_ref)

        carry_on(x_ref, out_ref, state_ref)

    blocks = pl.BlockSpec((2, 2), lambda i, j: (i, j))
    scratch: Any = [pltpu.VMEM((2, 2), jnp.bfloat16)]
    assert text_with(carry_along_columns, (blocks,), blocks, grid=(4, 4), scratch_shapes=scratch) == "whole"


def test_positions_are_asked_for_by_negative_dims_and_by_names() -> None:
    def count(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + pl.program_id(-1).astype(jnp.bfloat16)

    def count_by_name(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + jax.lax.axis_index("rows").astype(jnp.bfloat16)

    assert [text_with(count), text_with(count_by_name, grid=(("rows", 4),))] == ["whole", "whole"]


def test_blocks_for_several_positions_fill_the_grid() -> None:
    spec = pl.BlockSpec((3, 8), lambda i: (i // 3, 0))
    assert text_with(spread, (spec,), pl.BlockSpec((1, 8), lambda i: (i, 0)), grid=(8,)) == "whole"


def test_dims_that_no_operand_has_are_whole() -> None:
    assert loops_of(spread, ROWS, in_specs=STATE) == "whole"


def test_a_copy_of_a_grouped_matmul_is_a_kernel_like_others(tmp_path: pathlib.Path) -> None:
    """It may read its tables in another way, or have operands of its own."""
    arrays = struct(64, 8, dtype=jnp.float32), struct(4, 8, 16, dtype=jnp.float32), struct(4, dtype=jnp.int32)
    module = sys.modules[inspect.unwrap(loaded(f"{OPS}tpu.megablox.gmm").gmm).__module__]
    copy = tmp_path / "megablox" / "gmm.py"
    copy.parent.mkdir()
    copy.write_text(inspect.getsource(module), encoding="utf-8")
    copied = runpy.run_path(str(copy), {"__package__": module.__package__}, module.__name__)

    def text(gmm: Any) -> str:
        ((equation, unused),) = kernels_in(jax.make_jaxpr(lambda *args: gmm(*args, tiling=(8, 8, 8)))(*arrays))
        return text_of(op_factors(equation, unused))

    assert text(module.gmm).startswith(",.,.,.,.,a.")
    assert text(copied["gmm"]) == ",.,.,.,.,..,..a -> .a"
