"""The cost of a policy with names that nothing has, by what compilers make of it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.programs.audits.audited import Program, f32

UP, DOWN, X = f32(2, 64, 128), f32(2, 128, 64), f32(512, 64)


def audit(*names: str, scanned: bool) -> tuple[sr.reports.AuditReport, list[sr.Finding]]:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        # In a loop of its own, which JAX repeats as a whole.
        hidden = jax.lax.scan(lambda _, up: (None, checkpoint_name(x @ up, "hidden")), None, w[0][None])[1][0]
        return x + jnp.tanh(hidden) @ w[1], None

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))

    def loss(w: Any, x: Any) -> Any:
        if scanned:
            return jnp.mean(jax.lax.scan(kept, x, w)[0] ** 2)
        for index in range(2):
            x, _ = kept(x, (w[0][index], w[1][index]))
        return jnp.mean(x**2)

    report = Program(jax.grad(loss), ((UP, DOWN), X), (P(), P("data")), "data:4", P()).audit("cpu:4")
    return report, [finding for finding in report.findings if finding.code == "unmatched-names"]


@pytest.mark.parametrize("scanned", [False, True])
def test_the_cost_is_what_the_right_name_saves(scanned: bool) -> None:
    (wrong, (finding,)), (right, no_findings) = audit("hiden", scanned=scanned), audit("hidden", scanned=scanned)
    saved = wrong.flops - right.flops
    # Some versions of the compiler merge what is repeated outside of loops.
    assert saved in (2 * 2 * 512 // 4 * 64 * 128, *([] if scanned else [0]))
    expected = f"computes {saved:.3g} FLOPs again" if saved else "It costs no matmuls here: this compiler merges"
    assert expected in finding.message
    assert finding.severity == ("warning" if saved else "note")
    assert no_findings == []


def test_lists_with_a_matching_name_have_no_cost() -> None:
    _, (finding,) = audit("hidden", "hiden", scanned=True)
    assert "again" not in finding.message
