"""The names in the finding about repeated updates, where nothing is gathered for them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.audits.checks.work import check_repeated_update
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.text import ArrayType
from tests.programs.audits.audited import Program, f32
from tests.programs.audits.checks.accidents import MODEL

GRAM = """HloModule m, num_partitions=8

ENTRY %e (w: f32[64,32]) -> f32[64,64] {
  %w = f32[64,32] parameter(0)
  ROOT %gram = f32[64,64] dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="gram" source_file="/user.py" source_line=7}
}
"""  # noqa: E501


def test_whole_matrices_are_named_without_gathers() -> None:
    program = read_program(GRAM)
    flops = 2 * 64 * 32 * 64
    matmuls = find_matmuls(program)

    def parameters_shaped(array: ArrayType, whole: tuple[str, ...]) -> list[str]:
        return ["layers/up"] if (array.shape, whole) == ((64, 32), ("data",)) else []

    movement: Any = SimpleNamespace(
        program=program,
        collectives=(),
        arguments=SimpleNamespace(parameters_shaped=parameters_shaped),
        function=SimpleNamespace(
            compiled_matmuls=matmuls,
            device_count=8,
            has_gradients=True,
            flops_by_line={"/user.py:7": (flops, 8 * flops)},
            sizes={"data": 8},
        ),
        timing=Timing(program, (), matmuls, sr.Hardware.named("cuda:h100")),
    )
    (finding,) = check_repeated_update(movement)
    assert "8.00 times as many; largest array f32[64,32]: modelled" in finding.message
    assert finding.message.endswith("By shape layers/up")
    assert "wire" not in finding.message


def test_sums_for_an_update_are_counted_once() -> None:
    """Newton-Schulz on matrices that are split by columns adds up a Gram matrix over devices."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        gram = gradient @ gradient.T
        return w - gram @ gradient

    program = Program(
        step, (f32(128, 512), f32(2048, 128)), (P(None, "data"), P("data")), "data:8", P(None, "data"), MODEL
    )
    report = program.audit("cpu:8")
    (gram,) = [collective for collective in report.collectives if "f32[128,128]" in map(str, collective.arrays)]
    findings = [finding for finding in report.findings if "f32[128,128]" in finding.message]
    assert [finding.code for finding in findings] == ["replicated-update"]
    assert gram.kind == "all-reduce"
