"""The costs of operations beside their matmuls: kinds of access to memory, and copies that compilers add."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.home import Home
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.compilers.compiler import GpuCompiler
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.traced.program import read_jaxpr

H100, V5E = sr.Hardware.named("cuda:h100"), sr.Hardware.named("tpu:v5e")
COPY, READ = (H100.memory_bytes_per_second * dict(H100.memory_fractions)[access] for access in ("copy", "read"))
BIG = 2**26


def costs(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    hardware: sr.Hardware = H100,
) -> dict[str, float]:
    """The seconds of operations on one device, by name or role, without launches."""
    program = read_jaxpr(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]))
    fusion = FusedProgram.of(program, GpuCompiler())
    machine = Machine.of(sr.mesh_shape("x:1"), hardware)
    model = ComputeCosts(fusion, machine)
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


def test_rows_are_multiplied_once_for_each_group() -> None:
    """XLA for GPUs has no kernel for ragged matmuls."""
    rows, width, groups, sizes = 2**14, 2**11, 8, jnp.full(8, 2**11, jnp.int32)
    x, w = (rows, width), (groups, width, width)
    dense = costs(lambda a, b: a @ b, (rows, groups * width), (groups * width, width))["dot_general"]
    ragged, on_tpu = (
        costs(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w, hardware=hardware)["ragged_dot_general"]
        for hardware in (H100, V5E)
    )
    assert ragged == pytest.approx(dense, rel=0.3)
    assert on_tpu < 2 * rows * width * width / (0.5 * dict(V5E.peak_flops)["bf16"])
