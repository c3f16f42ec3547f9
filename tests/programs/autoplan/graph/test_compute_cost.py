"""The costs of operations beside their matmuls: kinds of access to memory, and copies that compilers add."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.home import Home
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.traced.program import read_jaxpr

H100, V5E = sr.Hardware.named("cuda:h100"), sr.Hardware.named("tpu:v5e")
COPY, READ, GATHER = (
    H100.memory_bytes_per_second * dict(H100.memory_fractions)[access] for access in ("copy", "read", "gather")
)
BIG = 2**26


def costs(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    hardware: sr.Hardware = H100,
    feedback: Mapping[int, int] | None = None,
) -> dict[str, float]:
    """The seconds of operations on one device, by name or role, without launches."""
    program = read_jaxpr(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]))
    fusion = FusedProgram.of(program)
    arguments = {program.results[result]: program.arguments[argument] for result, argument in (feedback or {}).items()}
    machine = Machine.of(sr.mesh_shape("x:1"), hardware)
    model = ComputeCosts(fusion, machine, {result: key for result, key in arguments.items() if result is not None})
    seconds: dict[str, float] = {}
    whole = np.zeros((1, 0), np.int8)
    homes = _Anywhere()
    for op_index, operation in enumerate(program.operations):
        launches = (op_index in fusion.kernels) * hardware.launch_seconds * operation.run_count
        value = float(model.seconds(op_index, 0, whole, homes)[0][0]) - launches
        seconds[operation.name] = seconds.get(operation.name, 0.0) + value
    return seconds


class _Anywhere(dict[tuple[int, int], Any]):
    """Homes of operands on one device."""

    def get(self, key: tuple[int, int], default: Any = None) -> Any:
        return Home(0, ())


def test_kernels_that_only_read_are_faster_than_copies() -> None:
    read = costs(lambda x: jnp.max(x, 0), (BIG // 64, 64))["reduce_max"]
    assert read == pytest.approx(2 * BIG / READ, rel=0.01)
    assert costs(jnp.exp, (BIG,))["exp"] == pytest.approx(4 * BIG / COPY, rel=0.01)


def test_short_rows_are_gathered_slowly() -> None:
    rows = jnp.zeros(BIG // 64, jnp.int32)
    short = costs(lambda x: x.at[rows].get(mode="clip"), (BIG // 16, 64))["gather"]
    long = costs(lambda x: x.at[rows[: BIG // 1024]].get(mode="clip"), (BIG // 256, 1024))["gather"]
    assert short == pytest.approx(long * COPY / GATHER, rel=0.01)
    assert short > 1.05 * long > 0
    scatter = costs(lambda x, y: x.at[rows].add(y, mode="clip"), (BIG // 16, 64), (BIG // 64, 64))["scatter-add"]
    assert scatter > 4 * BIG / GATHER * 0.99


def test_stacks_are_filled_first_and_copied_to_what_the_loop_reads() -> None:
    """A cache that goes in and out of a loop over layers: the loop still reads it while it writes the next."""

    def step(x: jax.Array, cache: jax.Array) -> Any:
        return jax.lax.scan(lambda x, layer: (x + 1, layer * x), x, cache)

    shapes = (128,), (8, 2**20, 128)
    alone, fed_back = costs(step, *shapes)["leave"], costs(step, *shapes, feedback={1: 1})["leave"]
    stack_bytes = 2 * 8 * 2**20 * 128
    assert alone == pytest.approx(2 * stack_bytes / COPY, rel=0.01)
    assert fed_back - alone == pytest.approx(2 * stack_bytes / COPY, rel=0.01)


def test_dots_on_gpus_pay_for_copies_of_their_operands() -> None:
    shapes = (4, 16, 4, 64), (4, 8192, 16, 64)

    def score(q: Any, k: Any) -> Any:
        return jnp.einsum("bgrd,btgd->bgrt", q, k)

    def ready(q: Any, k: Any) -> Any:
        return jnp.einsum("bgrd,bgtd->bgrt", q, k.reshape(4, 16, 8192, 64))

    copy_seconds = 2 * 2 * 4 * 8192 * 16 * 64 / COPY + H100.launch_seconds
    assert costs(score, *shapes)["dot_general"] - costs(ready, *shapes)["dot_general"] == pytest.approx(copy_seconds)
    on_tpu = [costs(fn, *shapes, hardware=V5E)["dot_general"] for fn in (score, ready)]
    assert on_tpu[0] == on_tpu[1]


def test_reductions_of_dims_apart_are_two_kernels_on_gpus() -> None:
    shape = (64, 16, 16, 32, 8)
    together, apart = (
        costs(lambda x, axes=axes: jnp.sum(x, axes, jnp.bfloat16), shape)["reduce_sum"] for axes in ((1, 2), (1, 2, 4))
    )
    written = 2 * 64 * 32 * 7 / COPY  # seven of eight sums of the first are not written by the second
    assert apart - together == pytest.approx(H100.launch_seconds - written, rel=0.01)
    on_tpu = [
        costs(lambda x, axes=axes: jnp.max(x, axes), shape, hardware=V5E)["reduce_max"] for axes in ((1, 2), (1, 2, 4))
    ]
    assert on_tpu[1] < on_tpu[0]


def test_convolutions_on_gpus_pay_for_copies_of_filters_into_cudnns_order() -> None:
    def seconds(order: str, shape: tuple[int, ...], *, hardware: sr.Hardware = H100, gradient: bool = False) -> float:
        def convolve(x: Any, kernel: Any) -> Any:
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", order, "NHWC"))

        def of_kernel(x: Any, kernel: Any) -> Any:
            return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](x)

        fn = of_kernel if gradient else convolve
        return costs(fn, (8, 16, 16, 1024), shape, hardware=hardware)["conv_general_dilated"]

    mine, cudnns = ("HWIO", (3, 3, 1024, 1024)), ("OHWI", (1024, 3, 3, 1024))
    copy_seconds = 2 * 2 * 9 * 1024**2 / COPY + H100.launch_seconds
    for gradient in (False, True):
        difference = seconds(*mine, gradient=gradient) - seconds(*cudnns, gradient=gradient)
        assert difference == pytest.approx((1 + gradient) * copy_seconds)
        assert seconds(*mine, gradient=gradient, hardware=V5E) == seconds(*cudnns, gradient=gradient, hardware=V5E)


def test_rows_are_copied_for_each_group_before_they_are_multiplied() -> None:
    """XLA for GPUs has no kernel for ragged matmuls; in the gradient of weights, both operands are copied."""
    rows, width, groups, sizes = 2**14, 2**11, 8, jnp.full(8, 2**11, jnp.int32)

    def matmul(x: Any, w: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    def both_passes(x: Any, w: Any, g: Any) -> Any:
        return jax.vjp(lambda w: matmul(x, w), w)[1](g)

    x, w = (rows, width), (groups, width, width)
    multiplying = costs(lambda a, b: a @ b, (rows, groups * width), (groups * width, width))["dot_general"]
    copies = 2 * groups * rows * width
    forward = costs(matmul, x, w)["ragged_dot_general"]
    assert forward - multiplying == pytest.approx(copies / COPY, rel=0.3)
    both = costs(both_passes, x, w, x)["ragged_dot_general"]
    assert both - forward - multiplying == pytest.approx(4 * copies / COPY, rel=0.3)
