"""The contents of memory, worked out by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.graph.machine import Assumptions, Machine
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.compiling.compile import compiled_memory
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.autoplan.compiled_peaks import (
    APART,
    STEPS,
    decode,
    decode_often,
    decode_scattered,
    real,
    unrolled,
)
from tests.programs.autoplan.solve.test_solver import random_task

FOUR = 4  # bytes of a float32, and the devices of the meshes here


def planned(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    pins: Mapping[int, P],
    feedback: Mapping[int, int] | None = None,
    mesh: str = "x:4",
) -> tuple[Task, tuple[int, ...], np.ndarray]:
    """The task of a function on a mesh, the choice, and the timeline, with nothing added for temporaries."""
    jaxpr = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    machine = Machine.of(sr.mesh_shape(mesh), None, Assumptions(temporaries=1.0))
    names = [f"argument{index}" for index in range(len(shapes))]
    task = Task.of(read_jaxpr(jaxpr), machine, names, feedback or {}, pins)
    result = task.within(np.inf)
    return task, result.choice, task.occupancy.timeline(result.choice)


def names(task: Task) -> list[str]:
    return [operation.name for operation in task.problem.program.operations]


def test_what_devices_send_is_in_memory_inside_of_kernels() -> None:
    """The maximum is fused with the tanh where both are split alike, or where each device needs less than it has."""
    task, _, _ = planned(lambda x: jnp.tanh(x).max(1), (1024, 256), pins={0: P("x")})
    assert names(task) == ["tanh", "reduce_max", "return"]
    split, whole = FOUR * 1024 * 256 // 4, FOUR * 1024 * 256

    def extra(tanh: int, reduced: int) -> float:
        """The bytes at the maximum beside the argument and the result, for layouts that nodes list: whole first."""
        result = FOUR * 1024 // (4 if reduced == 1 else 1)
        return task.occupancy.timeline((0, tanh, reduced, 0, 0))[1] - split - result

    assert [extra(1, 1), extra(1, 0), extra(1, 2), extra(0, 1)] == [0, whole, split, 0]


def test_a_chain() -> None:
    """Arguments stay; results go when the last operation that uses them is done."""
    x, up, down = (1024, 256), (256, 512), (512, 128)
    task, _, timeline = planned(lambda x, w, v: jnp.tanh(x @ w) @ v, x, up, down, pins={0: P("x"), 1: P(), 2: P()})
    assert names(task) == ["dot_general", "tanh", "dot_general", "return"]
    arguments = FOUR * (1024 * 256 // 4 + 256 * 512 + 512 * 128)
    wide, narrow = FOUR * 1024 * 512 // 4, FOUR * 1024 * 128 // 4
    assert timeline[0] == arguments + wide  # the product
    assert timeline[1] == arguments + wide  # its tanh is written over it
    assert timeline[2] == arguments + wide + narrow
    assert timeline[-1] == arguments + narrow
    assert timeline.argmax() == 2


@pytest.mark.parametrize(
    ("fn", "is_over"),
    [
        (lambda x, w: jnp.tanh(x @ w) @ w, True),
        (lambda x, w: (lambda y: jnp.tanh(y) @ w + y)(x @ w), False),  # needed later
        (lambda x, w: jnp.tanh(x) @ w, False),  # an argument
    ],
)
def test_chains_are_written_over_what_nothing_else_needs(fn: Callable[..., Any], is_over: bool) -> None:
    task, _, timeline = planned(fn, (1024, 256), (256, 256), pins={0: P("x"), 1: P()})
    tanh = names(task).index("tanh")
    assert (timeline[tanh] <= timeline[tanh - 1] if tanh else False) == is_over


def test_a_gathered_parameter_is_whole_while_in_use() -> None:
    task, _, timeline = planned(lambda x, w: jnp.tanh(x @ w), (8192, 256), (256, 512), pins={0: P("x"), 1: P("x")})
    assert names(task) == ["dot_general", "tanh", "return"]
    arguments = FOUR * (8192 * 256 + 256 * 512) // 4
    product, gathered = FOUR * 8192 * 512 // 4, FOUR * 256 * 512
    assert timeline[0] == arguments + product + gathered
    assert timeline[-1] == arguments + product


def test_a_split_product_is_split_in_memory() -> None:
    """With the contracted dim split, the sum is whole on every device and no parameter is gathered."""
    task, _, timeline = planned(lambda x, w: x @ w, (64, 8192), (8192, 512), pins={0: P(None, "x"), 1: P("x")})
    arguments = FOUR * (64 * 8192 + 8192 * 512) // 4
    assert timeline[0] == arguments + FOUR * 64 * 512
    assert names(task)[0] == "dot_general"


def test_fed_back_results_are_written_over_arguments() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    shapes, pins = ((256, 512), (4096, 256)), {0: P("x"), 1: P("x")}
    _, _, back = planned(step, *shapes, pins=pins, feedback={0: 0})
    _, _, apart = planned(step, *shapes, pins=pins)
    arguments = FOUR * (256 * 512 + 4096 * 256) // 4
    assert back[-1] == arguments
    assert apart[-1] >= arguments + FOUR * 256 * 512 // 4


@pytest.mark.parametrize("fn", [decode, decode_scattered, decode_often])
def test_updates_in_place_are_written_over_the_argument(fn: Callable[..., Any]) -> None:
    shapes, pins = ((64, 512, 256), (64, 256)), {0: P("x"), 1: P("x")}
    _, _, back = planned(fn, *shapes, pins=pins, feedback={0: 0})
    _, _, apart = planned(fn, *shapes, pins=pins)
    cache = FOUR * 64 * 512 * 256 // 4
    assert back.max() < 1.1 * cache
    assert apart.max() >= 2 * cache


def test_an_update_in_another_layout_takes_memory_until_it_is_taken() -> None:
    """The copy that is updated lasts as long as what is computed from it waits."""
    task, choice, _ = planned(decode, (64, 512, 256), (64, 256), pins={0: P("x"), 1: P("x")}, feedback={0: 0})
    problem, cache = task.problem, FOUR * 64 * 512 * 256 // 4
    update = names(task).index("dynamic_update_slice")
    node = problem.operand_homes[update, 0].node
    rows = [row.tolist() for row in problem.nodes[node].layouts]
    elsewhere = tuple(rows.index([2]) if index == node else row for index, row in enumerate(choice))
    timeline = task.occupancy.timeline(elsewhere)
    assert (timeline[update : names(task).index("return") + 1] >= 2 * cache).all()


def test_a_pointwise_chain_takes_no_memory() -> None:
    x = (4096, 256)
    once = planned(lambda x, w: jnp.tanh(x) @ w, x, (256, 256), pins={0: P("x")})[2].max()
    often = planned(lambda x, w: jnp.tanh(jnp.exp(jnp.sin(x) + 1) * 2) @ w, x, (256, 256), pins={0: P("x")})[2].max()
    assert once == often


def test_constants_lie_in_memory() -> None:
    table = np.zeros((64, 1024), np.float32)
    _, _, timeline = planned(lambda x: x + table, (64, 1024), pins={0: P("x")})
    assert timeline.min() >= table.nbytes + table.nbytes // 4


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_memory_constraints_are_above_and_below_what_lies_there(seed: int) -> None:
    """Otherwise a solution of the linear program might not fit, or one that fits might be ruled out."""
    task, rng = random_task(seed), np.random.default_rng(seed)
    problem = task.problem
    for _ in range(10):
        choice = [int(rng.integers(len(node.layouts))) for node in problem.nodes]
        for moment, nbytes in enumerate(task.occupancy.timeline(choice)):
            least, most = (task.occupancy.constraint(moment, np.inf, certain=certain) for certain in (True, False))
            assert least.used_bytes(problem, choice) <= nbytes * (1 + 1e-9)
            assert most.used_bytes(problem, choice) >= nbytes * (1 - 1e-9)


def test_what_nothing_waits_for_is_put_off_on_gpus() -> None:
    """Gradients of weights run last there, so that what they read stays."""

    def peak(hardware: str) -> float:
        pins = sr.RegexShardingRule([("^x$", P("data"))])
        args = APART, real(2048, 256)
        plan = sr.autoplan(jax.grad(unrolled), *args, mesh=sr.mesh_shape("data:4"), hardware=hardware, pins=pins)
        return plan.task.occupancy.peak(plan.choice)

    assert peak("cuda:h100") > 1.15 * peak("tpu:v5e")


def pooled(x: Any) -> Any:
    """The sum of squares of the largest of each two by two elements."""
    return jnp.sum(jax.lax.reduce_window(jnp.sin(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


@pytest.mark.parametrize(("sheet", "is_written"), [("cuda:h100", True), ("cpu", True), ("tpu:v5e", False)])
def test_places_of_the_largest_elements_are_in_memory(sheet: str, is_written: bool) -> None:
    jaxpr = jax.make_jaxpr(jax.grad(pooled))(jax.ShapeDtypeStruct((8, 16, 16, 4), jnp.float32))
    machine = Machine.of(sr.mesh_shape("x:1"), sr.Hardware.named(sheet), Assumptions(temporaries=1.0))
    task = Task.of(read_jaxpr(jaxpr), machine, ["x"], {}, {})
    add = names(task).index("select_and_scatter_add")
    places = (1 + 4) * FOUR * 8 * 8 * 8 * 4  # the element, and an index for each dim
    early, late = (
        sum(stay.nbytes for stay in task_of.stays if stay.nbytes == places and stay.first <= at <= stay.last)
        for task_of, at in ((task.occupancy, add - 1), (task.other_occupancies[0], add - 1))
    )
    assert early == places * is_written
    assert late == 0  # where it waits for the gradient


def test_zeros_of_different_loops_are_not_filled_at_once() -> None:
    """Two loops that run as often, one after the other: the stack of the second is not there during the first."""

    def one(x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), jnp.tanh(c + row)), jnp.zeros(4096), x)[1]

    def both(x: Any) -> Any:
        once = jax.lax.map(lambda part: one(part).sum(0), x)
        return once.sum() + jax.lax.map(lambda part: one(part + once.sum()).sum(0), x).sum()

    _, _, timeline = planned(both, (4, 16, 4096), pins={0: P()}, mesh="x:1")
    _, _, alone = planned(lambda x: jax.lax.map(lambda part: one(part).sum(0), x).sum(), (4, 16, 4096), pins={0: P()})
    stack = FOUR * 16 * 4096
    assert timeline.max() < alone.max() + stack


def test_cpus_compute_bfloat16_in_float32() -> None:
    """Intermediate results take twice the memory there, and a matmul takes a wider copy of an argument."""

    def temporary_bytes(hardware: str, dtype: Any) -> float:
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2048, 1024), (1024, 1024), (1024, 16))]
        plan = sr.autoplan(
            lambda x, v, w: (x @ v) @ w,
            *args,
            mesh=sr.mesh_shape("data:4"),
            hardware=hardware,
            pins=sr.RegexShardingRule([("^x$", P("data"))]),
            assumptions=sr.Assumptions(temporaries=1.0),
        )
        occupancy = plan.task.occupancy
        return occupancy.peak(plan.choice) - occupancy.argument_bytes(plan.choice)

    wide, narrow, copied = 512 * 1024 * 4, 512 * 1024 * 2, (512 * 1024 + 1024 * 1024) * 4
    assert temporary_bytes("cpu", jnp.float32) == pytest.approx(wide, rel=0.1)
    assert temporary_bytes("cuda:h100", jnp.bfloat16) == pytest.approx(narrow, rel=0.1)
    assert temporary_bytes("cpu", jnp.bfloat16) == pytest.approx(wide + copied, rel=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_near_the_compilers_on_cpus(name: str) -> None:
    fn, state, x = STEPS[name]
    mesh = sr.create_mesh("data:4,model:2")
    plan = sr.autoplan(fn, state, x, mesh=mesh)
    peak_bytes = compiled_memory(plan.jit(fn, donate_argnums=0).lower(state, x), mesh).peak_bytes
    assert peak_bytes / 2 <= plan.peak_bytes <= peak_bytes * 2
