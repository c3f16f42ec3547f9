"""A traced function with the layouts of a plan written into it, as constraints that compilers obey.

Every array is held where an operation makes it, and again where another one needs it in another layout. The equations
stay as they are, so that what they say of the user's code stays true.
"""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.spec import spec_key
from shardrules.planning.graph.layouts import relayout_steps, spec_of
from shardrules.planning.graph.problem import Problem
from shardrules.planning.traced.program import INLINED, inlined_jaxpr, open_jaxpr, scan_counts


@final
@attrs.frozen
class Held:
    """The layouts at one operation.

    **Arguments:**

    - `operands`: for each operand the layouts that it is brought through; none where it stays as it is.
    - `results`: for each result the layouts that it is held in, one after the other.
    """

    operands: tuple[tuple[PartitionSpec, ...], ...]
    results: tuple[tuple[PartitionSpec, ...], ...]


def held(problem: Problem, choice: Sequence[int]) -> dict[tuple[int, str, int], Held]:
    """Returns what a choice says for each operation.

    **Arguments:**

    - `problem`: what was to be chosen.
    - `choice`: for each node the number of its label.

    **Returns:**

    For the number, role and slot of operations the layouts there.
    """
    program, machine = problem.program, problem.machine
    found: dict[tuple[int, str, int], Held] = {}

    def spec(layout: Sequence[int], array: int) -> PartitionSpec:
        return spec_of(layout, len(program.arrays[array].shape), machine)

    for at, operation in enumerate(program.operations):
        operands: list[tuple[PartitionSpec, ...]] = []
        for place, operand in enumerate(operation.operands):
            taken = problem.operand_homes.get((at, place))
            if taken is None or operand is None or operand not in problem.homes:
                operands.append(())
                continue
            there, here = problem.layout(taken, choice), problem.layout(problem.homes[operand], choice)
            operands.append(tuple(spec(row, operand) for row in relayout_steps(here, there)))
        results: list[tuple[PartitionSpec, ...]] = []
        for place, result in enumerate(operation.results):
            if result not in problem.homes:
                results.append(())
                continue
            last = problem.layout(problem.homes[result], choice)
            made = problem.layout(problem.produced_homes.get((at, place), problem.homes[result]), choice)
            if operation.role == "exit":  # or else compilers carry it as it is to be after the loop
                made = problem.layout(problem.homes[operation.operands[0] or 0], choice)
            results.append((spec(made, result), *(spec(row, result) for row in relayout_steps(made, last))))
        if operation.equation_index >= 0:
            role = operation.role if operation.role in ("enter", "join", "leave", "exit") else "compute"
            found[operation.equation_index, role, operation.slot] = Held(tuple(operands), tuple(results))
    return found


def rewritten(program: ClosedJaxpr, layouts: dict[tuple[int, str, int], Held], mesh: AnyMesh) -> ClosedJaxpr:
    """Writes layouts into a traced function.

    **Arguments:**

    - `program`: the function.
    - `layouts`: what `held` returns for it.
    - `mesh`: the mesh.

    **Returns:**

    A function that computes the same.
    """
    rewriter = _Rewriter(layouts, mesh)
    return ClosedJaxpr(rewriter.body(program.jaxpr, (), ()), program.consts)


@final
@attrs.define(eq=False)
class _Rewriter:
    """The state of a walk through a program, in the order in which it was read."""

    layouts: dict[tuple[int, str, int], Held]
    mesh: AnyMesh
    counted: int = 0
    patterns: dict[Any, Any] = attrs.field(factory=dict)

    def body(
        self,
        program: Jaxpr,
        first: Sequence[PartitionSpec | None],
        last: Sequence[PartitionSpec | None],
    ) -> Jaxpr:
        """A program in which what comes in and goes out is held, too."""
        equations: list[Any] = []
        copies: dict[tuple[Any, Any], Any] = {}  # which its operations share; bodies inside know none of its variables
        now: dict[Var, Var] = {}
        for var, spec in zip(program.invars, first, strict=False):
            if spec is not None:
                now[var] = self.hold(var, spec, equations, None)
        for equation in program.eqns:
            self.equation(equation, equations, now, copies)
        results = []
        for place, var in enumerate(program.outvars):
            spec = last[place] if place < len(last) else None
            own = var if isinstance(var, Literal) else now.get(var, var)
            if spec is not None and not isinstance(var, Literal):
                own = self.hold(own, spec, equations, None)
            results.append(own)
        return program.replace(eqns=equations, outvars=results)

    def hold(self, var: Any, spec: PartitionSpec, equations: list[Any], like: Any) -> Var:
        """Adds a constraint, and returns what it makes of an array."""
        pattern = self.pattern(var.aval, spec)
        fresh = Var(var.aval)
        source = {} if like is None else {"source_info": like.source_info}
        equations.append(pattern.replace(invars=[var], outvars=[fresh], **source))
        return fresh

    def pattern(self, aval: Any, spec: PartitionSpec) -> Any:
        key = (aval.shape, aval.dtype, aval.weak_type, spec_key(spec))
        if key not in self.patterns:
            there = NamedSharding(self.mesh, spec)
            traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, there))(
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            )
            self.patterns[key] = traced.eqns[0]
        return self.patterns[key]

    def equation(self, equation: Any, equations: list[Any], now: dict[Var, Var], copies: dict[Any, Any]) -> None:
        number, self.counted = self.counted, self.counted + 1
        name = equation.primitive.name
        inner = inlined_jaxpr(equation)
        own = [one if isinstance(one, Literal) else now.get(one, one) for one in equation.invars]
        if inner is not None:
            key = next(key for key in INLINED[name] if key in equation.params)
            body = self.body(open_jaxpr(inner), (), ())
            equations.append(equation.replace(invars=own, params={**equation.params, key: _closed(inner, body)}))
            return
        nested = {"scan": self.scan, "while": self.loop, "cond": self.branches}.get(name)
        if nested is not None:
            nested(equation, number, own, equations, now)
            return
        here = self.layouts.get((number, "compute", 0))
        if here is None:
            equations.append(equation.replace(invars=own))
            return
        taken = []
        for var, chain in zip(own, here.operands, strict=True):
            last = var
            for spec in () if isinstance(var, Literal) else chain:
                key = (last, spec_key(spec))
                if key not in copies:
                    copies[key] = self.hold(last, spec, equations, equation)
                last = copies[key]
            taken.append(last)
        equations.append(equation.replace(invars=taken))
        self.results(equation, here.results, equations, now)

    def results(
        self, equation: Any, specs: Sequence[Sequence[PartitionSpec]], equations: list[Any], now: dict[Var, Var]
    ) -> None:
        for var, chain in zip(equation.outvars, specs, strict=True):
            if type(var) is not Var:  # nobody needs it
                continue
            last = var
            for spec in chain:
                last = self.hold(last, spec, equations, equation)
            if chain:
                now[var] = last

    def inside(self, number: int, role: str, slot: int) -> PartitionSpec | None:
        """Where an array is that enters a loop, goes round in it or leaves it."""
        here = self.layouts.get((number, role, slot))
        return None if here is None or not here.results[0] else here.results[0][-1]

    def entered(
        self, number: int, role: str, own: list[Any], places: Sequence[int], first: int, equations: list[Any]
    ) -> list[PartitionSpec | None]:
        """Brings what enters to where it is wanted; returns where it is inside."""
        for slot, place in enumerate(places, first):
            here = self.layouts.get((number, role, slot))
            if here is None or isinstance(own[place], Literal):
                continue
            chain = here.operands[0] or (here.results[0] if role == "join" else ())
            for spec in chain:
                own[place] = self.hold(own[place], spec, equations, None)
        return [self.inside(number, role, slot) for slot in range(first, first + len(places))]

    def scan(self, equation: Any, number: int, own: list[Any], equations: list[Any], now: dict[Var, Var]) -> None:
        params = equation.params
        fixed, carry = scan_counts(params)
        given = self.entered(number, "enter", own, range(fixed), 0, equations)
        rounds = self.entered(number, "join", own, range(fixed, fixed + carry), 0, equations)
        rest = self.entered(number, "enter", own, range(fixed + carry, len(own)), fixed, equations)
        ends = [self.inside(number, "join", slot) for slot in range(carry)]
        stacked = len(equation.outvars) - carry
        left = [self.leaving(number, slot) for slot in range(stacked)]
        body = self.body(open_jaxpr(params["jaxpr"]), [*given, *rounds, *rest], [*ends, *left])
        equations.append(equation.replace(invars=own, params={**params, "jaxpr": _closed(params["jaxpr"], body)}))
        outside = self.exits(number, carry)
        outside += [
            self.layouts[number, "leave", slot].results[0] if (number, "leave", slot) in self.layouts else ()
            for slot in range(stacked)
        ]
        self.results(equation, outside, equations, now)

    def exits(self, number: int, count: int) -> list[tuple[PartitionSpec, ...]]:
        """Where what went round in a loop is after it."""
        found = [self.layouts.get((number, "exit", slot)) for slot in range(count)]
        return [() if here is None else here.results[0] for here in found]

    def leaving(self, number: int, slot: int) -> PartitionSpec | None:
        """Where a part of a stacked array is when it leaves a loop."""
        here = self.layouts.get((number, "leave", slot))
        if here is None or not here.results[0]:
            return None
        return PartitionSpec(*tuple(here.results[0][-1])[1:])

    def loop(self, equation: Any, number: int, own: list[Any], equations: list[Any], now: dict[Var, Var]) -> None:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        asked = self.entered(number, "enter", own, range(first), 0, equations)
        given = self.entered(number, "enter", own, range(first, first + second), first, equations)
        rounds = self.entered(number, "join", own, range(first + second, len(own)), 0, equations)
        body = self.body(open_jaxpr(params["body_jaxpr"]), [*given, *rounds], rounds)
        condition = self.body(open_jaxpr(params["cond_jaxpr"]), [*asked, *rounds], ())
        changed = {
            "body_jaxpr": _closed(params["body_jaxpr"], body),
            "cond_jaxpr": _closed(params["cond_jaxpr"], condition),
        }
        equations.append(equation.replace(invars=own, params={**params, **changed}))
        self.results(equation, self.exits(number, len(rounds)), equations, now)

    def branches(self, equation: Any, number: int, own: list[Any], equations: list[Any], now: dict[Var, Var]) -> None:
        changed = []
        ends = [self.inside(number, "join", slot) for slot in range(len(equation.outvars))]
        for index, branch in enumerate(equation.params["branches"]):
            program = open_jaxpr(branch)
            count = len(program.invars)
            first = [self.inside(number, "enter", index * count + slot) for slot in range(count)]
            changed.append(_closed(branch, self.body(program, first, ends)))
        equations.append(equation.replace(invars=own, params={**equation.params, "branches": tuple(changed)}))
        self.results(equation, [() if spec is None else (spec,) for spec in ends], equations, now)


def _closed(like: Any, body: Jaxpr) -> Any:
    return ClosedJaxpr(body, like.consts) if isinstance(like, ClosedJaxpr) else body
