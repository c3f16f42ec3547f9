"""Layers written out in Python are planned once where they are equal."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shardrules as sr
from shardrules.programs.traced.alike import OpClasses, op_classes
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

MESH = sr.mesh_shape("data:4,model:2")


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(layers: Sequence[Any], x: Any) -> Any:
    for layer in layers:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def step(layers: Sequence[Any], x: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, layers, jax.grad(loss)(layers, x))


def layers(count: int, width: int = 1024) -> list[dict[str, Any]]:
    return [{"up": real(width, 4 * width), "down": real(4 * width, width)} for _ in range(count)]


def read(fn: Callable[..., Any], *args: Any) -> tuple[TracedProgram, list[str]]:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    return read_jaxpr(jax.make_jaxpr(fn)(*args)), ["/".join(path[1:-1].split("][")) for path in paths]


def matmul_classes(program: TracedProgram, classes: OpClasses) -> list[int]:
    return [
        op_class
        for operation, op_class in zip(program.operations, classes.operations, strict=True)
        if operation.name == "dot_general"
    ]


def test_layers_in_the_middle_are_equal() -> None:
    """An operation next to the first or the last layer has other operations around it."""
    program, paths = read(loss, layers(12), real(512, 1024))
    matmuls = matmul_classes(program, op_classes(program, paths))
    up, down = matmuls[0::2], matmuls[1::2]
    assert len(set(up[3:-3])) == len(set(down[3:-3])) == 1
    assert not set(up) & set(down)


def test_arguments_of_layers_are_equal() -> None:
    program, paths = read(loss, layers(12), real(512, 1024))
    arguments = op_classes(program, paths).arguments
    downs, ups = arguments[0:-1:2], arguments[1:-1:2]
    assert len(set(ups[3:-3])) == len(set(downs[3:-3])) == 1
    assert len({ups[6], downs[6], arguments[-1]}) == 3


def test_layers_of_other_sizes_differ() -> None:
    mixed = [{"up": real(1024, size), "down": real(size, 1024)} for size in (4096, 2048) * 6]
    program, paths = read(loss, mixed, real(512, 1024))
    up = matmul_classes(program, op_classes(program, paths))[0::2]
    assert up[4] != up[5]
    assert up[4] == up[6]


def test_arguments_with_other_names_differ() -> None:
    """Only numbers in names may differ: an encoder is not a decoder."""

    def both(encoder: Sequence[Any], decoder: Sequence[Any], x: Any) -> Any:
        return loss([*encoder, *decoder], x)

    program = read_jaxpr(jax.make_jaxpr(both)(layers(6), layers(6), real(512, 1024)))
    paths = [f"{side}/{n}/{name}" for side in ("encoder", "decoder") for n in range(6) for name in ("down", "up")]
    arguments = op_classes(program, [*paths, "x"]).arguments
    assert arguments[6] == arguments[4]
    assert arguments[6] != arguments[18]


def test_operations_on_other_lines_differ() -> None:
    def twice(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jnp.tanh(x @ w[1])
        return jnp.tanh(x @ w[2])

    program, paths = read(twice, [real(64, 64)] * 3, real(8, 64))
    assert len(set(matmul_classes(program, op_classes(program, paths)))) == 3


def test_without_tie_every_operation_differs() -> None:
    program, paths = read(loss, layers(4), real(512, 1024))
    classes = op_classes(program, paths, tie=False)
    assert classes.operations == tuple(range(len(program.operations)))
    assert classes.arguments == tuple(range(len(program.arguments)))


def test_another_trace_has_the_same_classes() -> None:
    first, second = (read(step, layers(6), real(512, 1024)) for _ in range(2))
    assert op_classes(*first) == op_classes(*second)


def test_equal_layers_get_the_same_specs() -> None:
    planned = sr.autoplan(step, layers(12), real(512, 1024), mesh=MESH)
    middle = planned.plan.specs[0][3:-3]
    assert all(specs == middle[0] for specs in middle)


def test_most_nodes_are_there_from_four_layers_on() -> None:
    """The first and the last few layers have nodes of their own, and all others share theirs."""
    four, many = (
        len(sr.autoplan(step, layers(count), real(512, 1024), mesh=MESH).task.problem.nodes) for count in (4, 24)
    )
    assert many <= 2 * four


def scanned(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ layer["up"]) @ layer["down"], None

    return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)


def planned_scan(count: int) -> sr.reports.AutoPlan:
    w = {"up": real(count, 1024, 4096), "down": real(count, 4096, 1024)}
    return sr.autoplan(jax.grad(scanned), w, real(512, 1024), mesh=MESH)


def test_a_longer_scan_adds_no_nodes_and_costs_in_proportion() -> None:
    short, long = planned_scan(8), planned_scan(64)
    assert len(short.task.problem.nodes) == len(long.task.problem.nodes)
    assert short.cost * 4 < long.cost < short.cost * 12


def test_the_problem_does_not_grow_with_layers() -> None:
    few, many = (sr.autoplan(step, layers(count), real(512, 1024), mesh=MESH).task.problem for count in (8, 32))
    assert len(many.program.operations) > 3 * len(few.program.operations)
    assert [len(node.layouts) for node in many.nodes] == [len(node.layouts) for node in few.nodes]
    assert len(many.edges) == len(few.edges)
