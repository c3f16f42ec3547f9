"""Patterns that experts would write, by what they do to the arguments of train steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.solve import search
from shardrules.programs.autoplan.solve.patterns import Families, patterns
from shardrules.programs.autoplan.solve.price import Budget
from tests.programs.autoplan.test_autoplan import DATA, GRID, mlp, real, train


def experts_loss(w: Any, x: Any) -> Any:
    """A layer, then experts that take all rows, mixed by a router."""
    y = jnp.tanh(x @ w["in"])
    inner = jax.nn.relu(jnp.einsum("bsd,edf->besf", y, w["up"]))
    mixed = jnp.einsum("besf,efd,bse->bsd", inner, w["down"], jax.nn.softmax(y @ w["router"]))
    return jnp.mean(mixed**2)


def experts_step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, w, jax.grad(experts_loss)(w, x))


def kernels_loss(w: Any, x: Any) -> Any:
    """Convolutions, one after another: gradients go through the same kernels, turned."""
    for kernel in w:
        x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
    return jnp.mean(x**2)


def kernels_step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, w, jax.grad(kernels_loss)(w, x))


def cast_step(w: Any, moments: Any, x: Any) -> Any:
    return train(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w), moments, x)


EXPERTS = {
    "in": real(256, 256),
    "up": real(8, 256, 512),
    "down": real(8, 512, 256),
    "router": real(256, 8),
}


def weighed(mesh: Any, fn: Any, *args: Any) -> dict[str, Any]:
    """The layouts that each pattern leaves the arguments."""
    planned = sr.autoplan(fn, *args, mesh=mesh)
    problem = planned.task.problem
    homes = [problem.homes[array] for array in problem.program.arguments if array in problem.homes]
    return {
        pattern.name: [
            {tuple(problem.nodes[home.node].layouts[index]) for index in pattern.keep[home.node]} for home in homes
        ]
        for pattern in patterns(problem)
    }


def test_data_parallelism_splits_the_batch_and_nothing_else() -> None:
    up, *_, x = weighed(DATA, train, *mlp(256, 1024, 4096))["data parallel"]
    assert up == {(-1,)}
    assert x == {(-1,), (0,)}


def test_the_batch_is_no_dim_of_weights_that_all_matmuls_have() -> None:
    """Layers that add to what they read have one width, which all matmuls have, as they all have the batch."""

    def residual_loss(w: Any, x: Any) -> Any:
        for weights in w:
            x = x + jnp.tanh(jax.vmap(lambda row, weights=weights: weights @ row)(x))
        return jnp.mean(x**2)

    def residual_step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda old, slope: old - 0.1 * slope, w, jax.grad(residual_loss)(w, x))

    planned = sr.autoplan(residual_step, [real(256, 256)] * 2, real(512, 256), mesh=DATA)
    problem = planned.task.problem
    families = Families.of(problem)
    batch = problem.homes[problem.program.arguments[2]]
    assert batch.dims[0] is not None
    assert families.batch == families.roots[batch.node, batch.dims[0]]
    assert families.batch not in families.weights


def test_zero_3_splits_all_weights_and_zero_1_only_moments() -> None:
    specs = weighed(DATA, train, *mlp(256, 1024, 4096))
    down, up, mu_down, mu_up, nu_down, nu_up, x = specs["data parallel, ZeRO-3"]
    assert all((-1,) not in layouts for layouts in (down, up, mu_down, mu_up, nu_down, nu_up))
    assert x == {(-1,), (0,)}
    down, up, mu_down, *_ = specs["data parallel, ZeRO-1"]
    assert down == up == {(-1,)}
    assert mu_down == {(-1,), (0,), (1,)}


def test_tensor_parallelism_splits_no_rows() -> None:
    up, *_, x = weighed(DATA, train, *mlp(256, 1024, 4096))["tensor parallel"]
    assert up == {(-1,), (0,), (1,)}
    assert x == {(-1,), (1,)}


def test_products_have_a_role_for_each_axis() -> None:
    specs = weighed(GRID, train, *mlp(256, 1024, 4096))
    up, *_, x = specs["data parallel x tensor parallel"]
    assert {layout[0] for layout in up} == {-1}
    assert {layout[1] for layout in up} == {-1, 0, 1}
    assert {layout[0] for layout in x} == {-1, 0}
    assert {layout[1] for layout in x} == {-1, 1}


def test_products_split_moments_over_the_axes_of_rows_too() -> None:
    down, _, mu_down, *_ = weighed(GRID, train, *mlp(256, 1024, 4096))["data parallel x tensor parallel, ZeRO-1"]
    assert {layout[0] for layout in down} == {-1}
    assert {layout for layout in mu_down if -1 not in layout} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_experts_are_a_batch_dim_of_weights() -> None:
    planned = sr.autoplan(experts_step, EXPERTS, real(64, 32, 256), mesh=GRID)
    families = Families.of(planned.task.problem)
    assert len(families.experts) == 1
    specs = weighed(GRID, experts_step, EXPERTS, real(64, 32, 256))
    assert "data parallel x expert parallel" in specs
    down, *_ = specs["expert parallel"]
    assert down == {(-1, -1), (-1, 0), (0, -1), (0, 0)}


@sr.region("rows in, rows out, experts in out -> rows out", split="rows", exchange="rows experts")
def exchanged_experts(x: Any, gates: Any, w: Any, *, axis_name: Any) -> Any:
    """Rows that are multiplied with all experts, which come by."""
    whole = jax.lax.all_gather(w, axis_name, tiled=True) if axis_name else w
    return jnp.einsum("ri,eio->ro", x, whole) * gates


def test_experts_are_what_regions_exchange() -> None:
    def loss(w: Any, router: Any, x: Any) -> Any:
        return exchanged_experts(x, x @ router, w).mean()

    specs = weighed(GRID, loss, real(8, 64, 64), real(64, 64), real(256, 64))
    experts, *_ = specs["expert parallel"]
    assert experts == {(-1, -1), (-1, 0), (0, -1), (0, 0)}


def test_kernels_are_gathered_again_for_gradients() -> None:
    planned = sr.autoplan(kernels_step, [real(9, 256, 256)] * 6, real(8, 64, 256), mesh=DATA)
    trials = {trial.origin: trial for trial in planned.result.patterns}
    kept, again = trials["data parallel, ZeRO-3"], trials["data parallel, ZeRO-3, gathered again"]
    assert again.peak_bytes < 0.6 * kept.peak_bytes
    assert kept.cost < again.cost < 1.5 * kept.cost


@pytest.mark.parametrize("step", [train, cast_step])
def test_nothing_is_gathered_again_that_matmuls_take_as_it_was(step: Any) -> None:
    assert not [name for name in weighed(DATA, step, *mlp(256, 1024, 4096)) if "again" in name]


def test_programs_without_matmuls_have_no_patterns() -> None:
    planned = sr.autoplan(lambda x: 2 * x, real(64, 64), mesh=GRID)
    assert not [*patterns(planned.task.problem)]


@pytest.mark.parametrize("mesh", [DATA, GRID], ids=["data", "grid"])
def test_patterns_answer_a_search_that_finds_nothing_else(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = sr.autoplan(train, *mlp(2048, 8192, 2**12), mesh=mesh).task
    monkeypatch.setattr(search, "within_budget", lambda *_: Budget(0.0))
    monkeypatch.setattr(search.Search, "close", lambda _: None)
    monkeypatch.setattr(search.Search, "merge", lambda _: None)
    monkeypatch.setattr(search.Search, "improve", lambda _: None)
    free = task.within(np.inf)
    origins = [trial.origin for trial in free.candidates]
    assert all("parallel" in origin for origin in origins)
    for trial in free.candidates:
        tight = task.within(trial.peak_bytes)
        assert tight.fits
        assert tight.choice == trial.choice


def test_pinned_arguments_stay_as_they_are() -> None:
    pins = sr.RegexShardingRule([(r"^0/up", P("data"))])
    planned = sr.autoplan(train, *mlp(256, 1024, 4096), mesh=DATA, pins=pins)
    problem = planned.task.problem
    up = problem.homes[problem.program.arguments[1]].node
    assert all(len(pattern.keep[up]) == 1 for pattern in patterns(problem))
