"""Layouts of all kinds, good and bad ones, written into programs: they compute the same."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

import shardrules as sr
from shardrules.core.spec import spec_key
from shardrules.core.tree import array_kind
from shardrules.planning.graph.layouts import spec_of
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Problem
from shardrules.planning.run.call import Call, read_call
from shardrules.planning.run.rewrite import chosen_layouts, with_layouts
from shardrules.planning.solve.search import Task
from shardrules.planning.traced.program import read_jaxpr
from tests.planning.models import FAST, SMALL, TRAINED, WRITTEN, Case, compare

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESHES = ("data:8", "data:4,model:2", "a:2,b:2,c:2")
CASES = [case for case in (*SMALL, *TRAINED, *WRITTEN) if case.name not in ("no arrays", "no arguments")]
LARGE = ("lstm", "experts", "dropout", "recomputed block", "scanned blocks", "unrolled blocks", "tied embedding")


def posed(case: Case, axes: str) -> tuple[Call, Problem]:
    mesh = sr.create_mesh(case.axes or axes)
    call = read_call(case.fn, case.args, mesh, "fn")
    program = read_jaxpr(call.jaxpr)
    return call, Task.of(program, Machine.of(mesh, FAST), call.paths, call.feedback, {}).problem


def drawn(problem: Problem, seed: int, part: float = 1.0) -> tuple[int, ...]:
    """Any labels, for a part of the nodes; the others split nothing."""
    numbers = np.random.default_rng(seed)
    return tuple(int(numbers.integers(len(node.layouts))) if numbers.random() < part else 0 for node in problem.nodes)


def inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield one.jaxpr if isinstance(one, ClosedJaxpr) else one


def check_scopes(jaxpr: Any) -> None:
    """Everything that is taken was made before, in the same program."""
    made = {*jaxpr.invars, *jaxpr.constvars}
    for equation in jaxpr.eqns:
        taken = [var for var in equation.invars if not isinstance(var, Literal)]
        assert [var for var in taken if var not in made] == [], f"{equation.primitive} takes what is not there"
        made.update(equation.outvars)
        for one in inner(equation):
            check_scopes(one)
    assert [var for var in jaxpr.outvars if not isinstance(var, Literal) and var not in made] == []


def skeleton(jaxpr: Any) -> list[Any]:
    """The operations of a program, without constraints."""
    found: list[Any] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name != "sharding_constraint":
            found += [(name, tuple(one.aval for one in equation.outvars)), *(skeleton(one) for one in inner(equation))]
    return found


def constraints(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            yield equation.params["sharding"]
        for one in inner(equation):
            yield from constraints(one)


def written(call: Call, problem: Problem, choice: Sequence[int], axes: str) -> ClosedJaxpr:
    return with_layouts(call.jaxpr, chosen_layouts(problem, choice), sr.create_mesh(axes))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_equations_stay_and_know_what_they_take(case: Case) -> None:
    axes = case.axes or "data:4,model:2"
    call, problem = posed(case, axes)
    for seed in range(3):
        program = written(call, problem, drawn(problem, seed), axes)
        check_scopes(program.jaxpr)
        assert program.in_avals == call.jaxpr.in_avals
        assert program.out_avals == call.jaxpr.out_avals
        if not case.axes:
            assert skeleton(program.jaxpr) == skeleton(call.jaxpr.jaxpr)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_is_chosen_the_numbers_are_the_same(case: Case) -> None:
    axes = case.axes or MESHES[sum(map(ord, case.name)) % len(MESHES)]
    call, problem = posed(case, axes)
    arrays = [one for one in jax.tree.leaves(case.args) if array_kind(one) is not None]
    with jax.set_mesh(sr.create_mesh(axes)):
        run = jaxpr_as_fun(call.jaxpr)
        expected = jax.jit(run).lower(*arrays).compile(QUICK)(*arrays)
        choice = drawn(problem, 7, 0.15 if case.name in LARGE else 0.5)
        program = jaxpr_as_fun(written(call, problem, choice, axes))
        got = jax.jit(program).lower(*arrays).compile(QUICK)(*arrays)
    compare(got, expected)


def test_nothing_is_held_in_what_is_decided_nowhere() -> None:
    """Scalars have no layouts."""
    case = next(case for case in SMALL if case.name == "scalars")
    call, problem = posed(case, "data:8")
    assert list(constraints(written(call, problem, (), "data:8").jaxpr)) == []


def test_what_is_asked_for_is_written() -> None:
    """Operands of a product are brought to where its label wants them, step by step, and what it gives as well."""
    case = Case("product", lambda x, w: x @ w, lambda: (np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)))
    axes = "data:4,model:2"
    call, problem = posed(case, axes)
    (dot,) = [at for at, one in enumerate(problem.program.operations) if one.name == "dot_general"]
    for seed in range(100):
        choice = drawn(problem, seed)
        jaxpr = written(call, problem, choice, axes).jaxpr
        made = {one.outvars[0]: one.params["sharding"].spec for one in jaxpr.eqns if is_constraint(one)}
        (product,) = [one for one in jaxpr.eqns if one.primitive.name == "dot_general"]
        for place, operand in enumerate(problem.program.operations[dot].operands):
            assert operand is not None
            last = problem.layout(problem.operand_homes[dot, place], choice)
            if last != problem.layout(problem.homes[operand], choice):
                assert spec_key(made[product.invars[place]]) == spec_key(spec_of(last, 2, problem.machine))
            else:
                assert product.invars[place] in jaxpr.invars or product.invars[place] in made


def is_constraint(equation: Any) -> bool:
    return equation.primitive.name == "sharding_constraint"
