"""Programs with any layouts, good or bad, written into them compute the same."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

import shardrules as sr
from shardrules.core.spec import spec_key
from shardrules.core.tree import array_kind
from shardrules.programs.autoplan.graph.layouts import PARTIAL, spec_of
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.run.call import Call, read_call
from shardrules.programs.autoplan.run.rewrite import chosen_layouts, with_layouts
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.compilers.compiler import compiler_of
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.autoplan.models import FAST, SMALL, TRAINED, WRITTEN, Case, compare

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESHES = ("data:8", "data:4,model:2", "a:2,b:2,c:2")
CASES = [case for case in (*SMALL, *TRAINED, *WRITTEN) if case.name not in ("no arrays", "no arguments")]
LARGE = ("lstm", "experts", "dropout", "recomputed block", "scanned blocks", "unrolled blocks", "tied embedding")


def read_case(case: Case, axes: str) -> tuple[Call, Problem]:
    mesh = sr.create_mesh(case.axes or axes)
    call = read_call(case.fn, case.args, mesh, "fn")
    program = read_jaxpr(call.jaxpr)
    return call, Task.of(program, Machine.of(mesh, FAST), call.paths, call.feedback, {}).problem


def random_choice(problem: Problem, seed: int, part: float = 1.0) -> tuple[int, ...]:
    """Any layouts, for a part of the nodes; the others split nothing."""
    numbers = np.random.default_rng(seed)
    return tuple(int(numbers.integers(len(node.layouts))) if numbers.random() < part else 0 for node in problem.nodes)


def inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def check_scopes(jaxpr: Any) -> None:
    """Checks that operations use variables that are defined before, in the same program."""
    defined = {*jaxpr.invars, *jaxpr.constvars}
    for equation in jaxpr.eqns:
        used = [var for var in equation.invars if not isinstance(var, Literal)]
        assert [var for var in used if var not in defined] == [], f"{equation.primitive} uses undefined variables"
        defined.update(equation.outvars)
        for body in inner(equation):
            check_scopes(body)
    assert [var for var in jaxpr.outvars if not isinstance(var, Literal) and var not in defined] == []


def operation_list(jaxpr: Any) -> list[Any]:
    """The operations of a program, without constraints."""
    operations: list[Any] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        bodies = list(inner(equation))
        if list(map(operation_names, bodies)) == [["layout_constraint"]]:
            continue
        if name == "shard_map" and len(bodies[0].eqns) == 1:  # each device is given the operation on its pieces
            operations.append((bodies[0].eqns[0].primitive.name, tuple(var.aval for var in equation.outvars)))
        elif name != "sharding_constraint":
            operations += [(name, tuple(var.aval for var in equation.outvars)), *map(operation_list, inner(equation))]
    return operations


def are_alike(rewritten: Any, traced: Any) -> bool:
    """Operations are the same, but for transposes that have become matmuls with the same results."""
    if isinstance(traced, list):
        same_length = isinstance(rewritten, list) and len(rewritten) == len(traced)
        return same_length and all(map(are_alike, rewritten, traced))
    return rewritten in (traced, ("dot_general", *traced[1:]) if traced[0] == "transpose" else traced)


def operation_names(jaxpr: Any) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns]


def constraints(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            yield equation.params["sharding"]
        for body in inner(equation):
            yield from constraints(body)


def rewrite(call: Call, problem: Problem, choice: Sequence[int], axes: str) -> ClosedJaxpr:
    return with_layouts(call.jaxpr, chosen_layouts(problem, choice), sr.create_mesh(axes))


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_equations_stay_and_use_defined_variables(case: Case) -> None:
    axes = case.axes or "data:4,model:2"
    call, problem = read_case(case, axes)
    for seed in range(3):
        program = rewrite(call, problem, random_choice(problem, seed), axes)
        check_scopes(program.jaxpr)
        assert program.in_avals == call.jaxpr.in_avals
        assert program.out_avals == call.jaxpr.out_avals
        # Where devices have parts of a sum of groups, another operation adds them up.
        if not case.axes and case.name != "groups of channels":
            rewritten, traced = operation_list(program.jaxpr), operation_list(call.jaxpr.jaxpr)
            has_both_ways = case.name in ("tied embedding", "lstm")  # a weight, so that transposes of parts are matmuls
            assert are_alike(rewritten, traced) if has_both_ways else rewritten == traced


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_choice_computes_the_same(case: Case) -> None:
    axes = case.axes or MESHES[sum(map(ord, case.name)) % len(MESHES)]
    call, problem = read_case(case, axes)
    arrays = [leaf for leaf in jax.tree.leaves(case.args) if array_kind(leaf) is not None]
    with jax.set_mesh(sr.create_mesh(axes)):
        run = jaxpr_as_fun(call.jaxpr)
        expected = jax.jit(run).lower(*arrays).compile(QUICK)(*arrays)
        choice = random_choice(problem, 7, 0.15 if case.name in LARGE else 0.5)
        program = jaxpr_as_fun(rewrite(call, problem, choice, axes))
        got = jax.jit(program).lower(*arrays).compile(QUICK)(*arrays)
    compare(got, expected)


def test_arrays_without_layouts_are_not_constrained() -> None:
    """Scalars have no layouts."""
    case = next(case for case in SMALL if case.name == "scalars")
    call, problem = read_case(case, "data:8")
    assert list(constraints(rewrite(call, problem, (), "data:8").jaxpr)) == []


def test_chosen_layouts_are_written() -> None:
    """Operands of a product are brought to the chosen layouts step by step, and so is its result."""
    case = Case("product", lambda x, w: x @ w, lambda: (np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)))
    axes = "data:4,model:2"
    call, problem = read_case(case, axes)
    (dot,) = [
        op_index for op_index, operation in enumerate(problem.program.operations) if operation.name == "dot_general"
    ]
    for seed in range(100):
        choice = random_choice(problem, seed)
        jaxpr = rewrite(call, problem, choice, axes).jaxpr
        specs = {
            equation.outvars[0]: equation.params["sharding"].spec for equation in jaxpr.eqns if is_constraint(equation)
        }
        (product,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
        for position, operand in enumerate(problem.program.operations[dot].operands):
            assert operand is not None
            last = problem.layout(problem.operand_homes[dot, position], choice)
            if last != problem.layout(problem.homes[operand], choice):
                assert spec_key(specs[product.invars[position]]) == spec_key(spec_of(last, 2, problem.machine))
            else:
                assert product.invars[position] in jaxpr.invars or product.invars[position] in specs


def sum_of(*axes: int) -> Case:
    return Case(f"sum over {axes}", lambda x: x.sum(axes), lambda: (np.ones((8, 16, 4), np.float32),))


@pytest.mark.parametrize(("case", "is_kept"), [(sum_of(0), True), (sum_of(1), False), (sum_of(0, 1), False)])
def test_sums_over_the_first_dims_keep_the_order_in_memory(case: Case, is_kept: bool) -> None:
    """Of their pieces, on each device: what the compiler is told of whole arrays it would gather."""
    axes = "data:4,model:2"
    call, problem = read_case(case, axes)
    layouts = problem.nodes[problem.operand_homes[0, 0].node].layouts
    split = next(index for index, layout in enumerate(layouts.tolist()) if layout[0] == 0)
    choice = tuple(split if len(node.layouts) == len(layouts) else 0 for node in problem.nodes)
    names = [
        name
        for each in rewrite(call, problem, choice, axes).jaxpr.eqns
        for body in inner(each)
        for name in operation_names(body)
    ]
    assert names == ["layout_constraint"] * is_kept
    hardware = sr.Hardware.named("cpu")
    cpu = attrs.evolve(problem.machine, hardware=hardware, compiler=compiler_of(hardware))
    assert all(
        each.row_major_spec is None for each in chosen_layouts(attrs.evolve(problem, machine=cpu), choice).values()
    )


def is_constraint(equation: Any) -> bool:
    return equation.primitive.name == "sharding_constraint"


@pytest.mark.parametrize("precision", [None, ("highest", "default")])
def test_transposes_of_parts_are_matmuls(precision: Any) -> None:
    """A weight that is used both ways: XLA would reduce the matmul before it is transposed, apart from the other."""

    def both(x: Any, y: Any, z: Any, w: Any) -> Any:
        return jax.lax.dot(x.T, y, precision=precision).T + z.T @ w

    arrays = [np.arange(8 * size, dtype=np.float32).reshape(8, size) / size for size in (4, 6, 6, 4)]
    case = Case("both ways", both, lambda: tuple(arrays))
    call, problem = read_case(case, "data:8")
    for is_part in (True, False):
        choice = [0] * len(problem.nodes)
        for operation in problem.program.operations:
            if operation.name in ("dot_general", "transpose", "add"):
                rows = problem.nodes[problem.homes[operation.results[0]].node].layouts.tolist()
                if is_part and [PARTIAL] in rows:
                    choice[problem.homes[operation.results[0]].node] = rows.index([PARTIAL])
        program = rewrite(call, problem, choice, "data:8")
        # The first matmul is left for compilers to drop.
        assert operation_names(program.jaxpr).count("dot_general") == (3 if is_part else 2)
        with jax.set_mesh(sr.create_mesh("data:8")):
            np.testing.assert_allclose(jax.jit(jaxpr_as_fun(program))(*arrays)[0], both(*arrays), rtol=1e-5)
