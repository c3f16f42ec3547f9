"""Arrays of an optimizer's state, the results that replace them, and the requests for both."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.programs.audits.audited import Program, f32

W, X = f32(64, 512), f32(128, 64)
SPLIT = P("data")


def adam(p: Any, m: Any, v: Any, x: Any) -> tuple[Any, Any, Any]:
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(p)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, gradients)
    return jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), p, m, v), m, v


def moments_first(p: Any, m: Any, v: Any, x: Any) -> tuple[Any, Any, Any]:
    p, m, v = adam(p, m, v, x)
    return m, v, p


def constrained(p: Any, state: Any, x: Any) -> tuple[Any, Any]:
    p, m, v = adam(p, state["m"], state["v"], x)
    return p, {"m": {"w": jax.lax.with_sharding_constraint(m["w"], SPLIT)}, "v": v}


def left_whole(step: Any, *args: Any, in_shardings: Any, out_shardings: Any) -> dict[str, str]:
    """The request for each array that is left whole."""
    roles = ("parameters", *["optimizer state"] * (len(args) - 2), "batch")
    report = Program(step, args, in_shardings, "data:4", out_shardings, roles).audit("cpu:4")
    findings = [finding for finding in report.findings if finding.code == "state-left-whole"]
    return {finding.path: finding.message.partition(":")[0] for finding in findings}


RETURNED = "the state is requested as P('data'), and the step returns it as P()"
TAKEN = "the state that the step returns is requested as P('data'), and it is compiled as P()"


@pytest.mark.parametrize(
    ("step", "moments", "results", "expected"),
    [
        (adam, P(), (P(), SPLIT, SPLIT), {"*/w": TAKEN}),
        (adam, SPLIT, (P(), SPLIT, P()), {"v/w": RETURNED}),
        (adam, SPLIT, (P(), SPLIT, SPLIT), {}),
        (moments_first, SPLIT, (SPLIT, P(), P()), {"v/w": RETURNED}),
        (moments_first, SPLIT, (SPLIT, SPLIT, P()), {}),
    ],
)
def test_moments_are_arguments_of_their_own(step: Any, moments: P, results: Any, expected: Any) -> None:
    tree, shardings = {"w": W}, (P(), moments, moments, SPLIT)
    assert left_whole(step, tree, tree, tree, X, in_shardings=shardings, out_shardings=results) == expected


def test_moments_may_be_single_arrays() -> None:
    def step(p: Any, m: Any, v: Any, x: Any) -> list[Any]:
        return [tree["w"] for tree in adam({"w": p}, {"w": m}, {"w": v}, x)]

    shardings = (P(), P(), SPLIT, SPLIT)
    assert left_whole(step, W, W, W, X, in_shardings=shardings, out_shardings=[P(), SPLIT, P()]) == {
        "m": TAKEN,
        "v": RETURNED,
    }


def test_moments_in_a_loop_are_matched_in_order() -> None:
    def step(p: Any, m: Any, v: Any, x: Any) -> Any:
        def update(_: Any, state: Any) -> Any:
            return adam(state[0], state[1], state[2], x)

        return jax.lax.fori_loop(0, 2, update, (p, m, v))

    tree, shardings = {"w": W}, (P(), SPLIT, SPLIT, SPLIT)
    results = (P(), SPLIT, P())
    assert left_whole(step, tree, tree, tree, X, in_shardings=shardings, out_shardings=results) == {"v/w": RETURNED}


def test_a_constrained_state_that_is_returned_whole() -> None:
    # The compiler splits the moment that comes in without a spec as the constraint says.
    state = {"m": {"w": W}, "v": {"w": W}}
    shardings = (P(), {"m": None, "v": P()}, SPLIT)
    message = "the function constrains what it makes of it to P('data'), and the step returns it as P()"
    assert left_whole(constrained, {"w": W}, state, X, in_shardings=shardings, out_shardings=(P(), P())) == {
        "state/m/w": message
    }
    assert left_whole(constrained, {"w": W}, state, X, in_shardings=shardings, out_shardings=(P(), None)) == {}


def test_arrays_with_one_cause_are_one_finding() -> None:
    def step(p: Any, state: Any, x: Any) -> tuple[Any, Any]:
        (q, m, v) = adam(p, state["m"], state["v"], x)
        return q, {"m": m, "v": v}

    state = {"m": {"w": W}, "v": {"w": W}}
    args, roles = ({"w": W}, state, X), ("parameters", "optimizer state", "batch")
    report = Program(step, args, (P(), P(), SPLIT), "data:4", (P(), SPLIT), roles).audit("cpu:4")
    (finding,) = [finding for finding in report.findings if finding.code == "state-left-whole"]
    assert (finding.path, finding.count, finding.shape) == ("state/*/w", 2, (64, 512))
    assert "every device has 256.0 KiB of it in place of 64.0 KiB" in finding.message
    assert finding.message.endswith(". 2 arrays: state/m/w, state/v/w")
