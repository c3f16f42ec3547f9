"""Explanations of plans."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.mesh_shape("data:4,model:2")


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))


ARGS = {"up": real(1024, 4096), "down": real(4096, 1024)}, real(8192, 1024)
PINS = sr.RegexShardingRule([(r"up$", P("data")), (r"^1$", P("data"))])


@pytest.fixture(scope="module")
def planned() -> sr.reports.AutoPlan:
    return sr.autoplan(step, *ARGS, mesh=MESH)


@pytest.fixture(scope="module")
def pinned() -> sr.reports.AutoPlan:
    """Parameters stored over the axis of the batch: they are gathered."""
    return sr.autoplan(step, *ARGS, mesh=MESH, pins=PINS)


def test_a_plan_prints_what_matters(planned: sr.reports.AutoPlan) -> None:
    text = str(planned)
    assert re.match(r"step on data:4,model:2: [\d.e-]+ ms a call \(compute [\d.e-]+, communication [\d.e-]+\), ", text)
    assert "optimal, found in" in text
    assert re.search(r"^memory [\d.]+ \w+ to [\d.]+ \w+ of 71.2 GiB; on the wire ", text, re.MULTILINE)
    for path in ("w/down", "w/up", "x"):
        assert re.search(rf"^{path} +float32\[", text, re.MULTILINE)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_time_has_two_parts(planned: sr.reports.AutoPlan) -> None:
    time = planned.step_time
    assert time.compute_seconds + time.communication_seconds == pytest.approx(planned.cost)
    assert time.compute_seconds < time.seconds < planned.cost
    assert min(time.compute_seconds, time.communication_seconds) >= 0
    assert 0 < time.memory_seconds < time.compute_seconds  # adding and multiplying
    assert sum(planned.sent_bytes.values()) == planned.wire_bytes


def test_what_only_moves_bytes_is_memory_bound() -> None:
    time = sr.autoplan(jnp.tanh, ARGS[-1], mesh=MESH).step_time
    assert time.memory_seconds == time.compute_seconds > 0
    assert time.bound == "memory"


def test_dims_that_go_together(planned: sr.reports.AutoPlan) -> None:
    sizes = {dim.size for dim in planned.split_dims}
    assert sizes <= {1024, 4096, 8192}
    assert {axis for dim in planned.split_dims for axis in dim.axes} == {"data", "model"}
    hidden = [dim for dim in planned.split_dims if "w/down[0]" in dim.name]
    assert all("w/up[1]" in dim.name and dim.size == 4096 for dim in hidden)
    batch = [dim for dim in planned.split_dims if "x[0]" in dim.name]
    assert [dim.size for dim in batch] == [8192]
    assert all(str(dim) in str(planned) for dim in planned.split_dims)


def test_stored_dims_are_distinguished(pinned: sr.reports.AutoPlan) -> None:
    (rows,) = [dim for dim in pinned.split_dims if "w/up[0]" in dim.name]
    assert "data" in rows.stored
    assert "stored over" in str(rows)


def test_uses_show_what_is_moved(pinned: sr.reports.AutoPlan) -> None:
    uses = pinned.uses("w/up")
    (product,) = [use for use in uses if use.operation == "dot_general"]
    assert "data" not in [axis for entry in product.spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
    assert "all-gather" in product.kinds
    assert product.wire_bytes >= 4 * 1024 * 4096 * 3 / 4 / 2  # three of four parts come from others
    assert product.seconds > 0
    assert "test_explain.py" in product.line
    assert "by all-gather" in str(product)


def test_an_argument_used_as_stored_moves_nothing(pinned: sr.reports.AutoPlan) -> None:
    products = [use for use in pinned.uses("x") if use.operation == "dot_general"]
    assert products
    assert all(not use.kinds and use.wire_bytes == 0 and use.seconds == 0 for use in products if use.spec == P("data"))


def test_uses_inside_of_a_loop_are_found() -> None:
    def scanned(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0]

    planned = sr.autoplan(scanned, real(6, 512, 512), real(4096, 512), mesh=MESH)
    assert "dot_general" in [use.operation for use in planned.uses("w")]


@pytest.mark.parametrize("path", ["w/down", "w/up", "x"])
def test_an_alternative_has_another_layout_and_is_not_faster(planned: sr.reports.AutoPlan, path: str) -> None:
    other = planned.alternative(path)
    assert other is not None
    assert other.spec != planned.specs[planned.call.paths.index(path)]
    assert other.seconds >= -1e-3 * planned.cost
    pinned = sr.autoplan(
        step,
        *ARGS,
        mesh=MESH,
        pins=sr.RegexShardingRule([(rf"{path.replace('w/', '^0/').replace('x', '^1')}$", other.spec)]),
    )
    assert pinned.cost <= (planned.cost + other.seconds) * (1 + 1e-3)


def test_a_pinned_argument_has_no_alternative(pinned: sr.reports.AutoPlan) -> None:
    assert pinned.alternative("w/up") is None
    assert "no other layout fits" in pinned.explain("w/up")


def test_explaining_an_argument(planned: sr.reports.AutoPlan) -> None:
    head, *lines = planned.explain("w/up").splitlines()
    assert head.startswith("w/up float32[1024, 4096]: P(")
    assert any("dot_general at" in line and "takes it as P(" in line for line in lines)
    assert lines[-1].startswith("  next best: P(")


def test_other_alternatives_of_a_region_have_a_price() -> None:
    @sr.region("r d -> r d", split="r")
    def plain(x: Any) -> Any:
        return jnp.cumsum(x, 1) + x.mean(1, keepdims=True)

    @sr.region("r d -> r d", exchange="d", whole="r")
    def gathered(x: Any, *, axis_name: Any) -> Any:
        whole = jax.lax.all_gather(x, axis_name, axis=1, tiled=True) if axis_name else x
        start = jax.lax.axis_index(axis_name) * x.shape[1] if axis_name else 0
        return jax.lax.dynamic_slice_in_dim(plain(whole), start, x.shape[1], 1)

    region = sr.alternatives(plain, gathered)
    plan = sr.autoplan(region, real(4096, 1024), mesh=MESH, hardware=sr.Hardware.named("cuda:h100"))
    (use,) = plan.regions
    assert use.name == "plain"
    (line,) = (line for line in plan.explain(plan.call.paths[0]).splitlines() if "instead of" in line)
    more = re.fullmatch(r"  region gathered instead of plain: \+(\S+) ms", line)
    assert more is not None
    assert float(more[1]) > 0


def test_unknown_arguments_are_refused(planned: sr.reports.AutoPlan) -> None:
    for method in (planned.explain, planned.uses, planned.alternative):
        with pytest.raises(sr.errors.TreeError, match=r"no array 'w/upp' among the arguments of step.*w/up"):
            method("w/upp")


def test_differences(planned: sr.reports.AutoPlan) -> None:
    pinned = sr.autoplan(step, *ARGS, mesh=MESH, pins=sr.RegexShardingRule([(r"^1$", P(None, "model"))]))
    diff = planned.diff(pinned)
    assert diff.seconds == (planned.cost, pinned.cost)
    assert diff.wire_bytes == (planned.wire_bytes, pinned.wire_bytes)
    assert diff.peak_bytes == (planned.peak_bytes, pinned.peak_bytes)
    assert "(8192, 1024)" in str(diff)
    assert "x" in [change.path for change in diff.arguments.changes]
    assert str(diff).startswith("time ")
    assert "no difference" in str(planned.diff(planned))
    assert pinned.cost >= planned.cost * (1 - 1e-6)
