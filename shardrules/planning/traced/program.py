"""A traced function as a flat list of operations on arrays: what is inside of loops and branches, too.

Loops are read once, with the number of times that they go round. Where arrays enter a loop, go round in it and come
out of it stands an operation that computes nothing, so that every array can be laid out anew there. What is inside of
`jit`, `checkpoint` and functions with derivatives of their own is read as if it stood outside.

Operations that a replay meets in the same order have the same number here and there: that is how it knows them.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardrules.analysis.compiling.model_flops import equation_flops
from shardrules.planning.traced.factors.table import Factors, op_factors

Role: TypeAlias = Literal["compute", "enter", "join", "exit", "leave", "fixed", "opaque", "return"]
"""What an operation is: one of the function; the entry to a loop, a value that goes round in it, what that is in the
end, what is stacked on leaving; a constraint of the user's, something that stays as it is, a result of the function."""

Users: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""For arrays the operations that take them, and as which operand."""

INLINED: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "checkpoint": ("jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "custom_lin": (),
}
"""Primitives that only have a program inside of them, and the names of the parameter that it is in."""

RECOMPUTED = ("checkpoint", "remat", "remat2")
"""Those of them whose inside shares nothing with what is outside."""


@final
@attrs.frozen
class Array:
    """An array of a program.

    **Arguments:**

    - `shape`: its shape.
    - `nbytes`: the bytes of all of it.
    - `dtype`: its dtype.
    """

    shape: tuple[int, ...]
    nbytes: int
    dtype: Any


@final
@attrs.frozen(eq=False)
class Operation:
    """One operation of a program.

    **Arguments:**

    - `role`: what it is.
    - `name`: of its primitive.
    - `equation_index`: of the equation that it stands for, or that it is the entry or exit of; -1 for a result.
    - `slot`: which of the arrays that enter, go round or leave.
    - `operands`: the numbers of the arrays that it takes, `None` for constants in the program itself.
    - `results`: the numbers of the arrays that it gives.
    - `factors`: how their dims go together.
    - `run_count`: how often it runs.
    - `region`: the loop, branch or recomputed part that it is in.
    - `read_counts`: for each operand how often it is brought to where the operation needs it.
    - `flops`: those of its products, on whole arrays.
    - `dtype`: what these are of.
    - `spec`: of a constraint, the layout that it asks for; of what is opaque, that of each operand and result.
    - `equation`: the equation, where it stands for one.
    """

    role: Role
    name: str
    equation_index: int
    slot: int
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    factors: Factors
    run_count: int
    region: int
    read_counts: tuple[int, ...]
    flops: int = 0
    dtype: Any = None
    spec: Any = None
    equation: Any = None


@final
@attrs.frozen(eq=False)
class TracedProgram:
    """A traced function, flat.

    **Arguments:**

    - `arrays`: all of its arrays.
    - `operations`: all of its operations, in order.
    - `arguments`: the numbers of the arrays that it takes.
    - `constants`: those of arrays that are written in it.
    - `results`: for each result its array, or `None` for a constant.
    - `regions`: for each region the one around it, and how often it runs.
    - `unknown_primitives`: primitives that no rule is known for, with the number of times they were met.
    """

    arrays: tuple[Array, ...]
    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    constants: tuple[int, ...]
    results: tuple[int | None, ...]
    regions: tuple[tuple[int, int], ...]
    unknown_primitives: tuple[tuple[str, int], ...]

    @functools.cached_property
    def producers(self) -> Mapping[int, int]:
        """For each array that any operation gives, which does."""
        return {result: at for at, operation in enumerate(self.operations) for result in operation.results}

    @functools.cached_property
    def users(self) -> Users:
        """For each array that any operation takes, who does."""
        found: dict[int, list[tuple[int, int]]] = {}
        for at, operation in enumerate(self.operations):
            for place, operand in enumerate(operation.operands):
                if operand is not None:
                    found.setdefault(operand, []).append((at, place))
        return found


def read_jaxpr(jaxpr: ClosedJaxpr) -> TracedProgram:
    """Reads a traced function.

    **Arguments:**

    - `jaxpr`: the function.

    **Returns:**

    The `TracedProgram`.

    ```python
    from shardrules.planning.traced.program import read_jaxpr

    jaxpr = jax.make_jaxpr(lambda w, x: jax.nn.relu(x @ w))(jnp.ones((16, 4)), jnp.ones((8, 16)))
    program = read_jaxpr(jaxpr)
    assert [operation.name for operation in program.operations] == ["dot_general", "max", "return"]
    ```
    """
    reader = _Reader()
    return reader.program(jaxpr)


def inlined_jaxpr(equation: Any) -> Any:
    """Returns the program inside of an equation that has nothing else.

    **Arguments:**

    - `equation`: an equation.

    **Returns:**

    The program; `None` where the equation is none of these.
    """
    for name in INLINED.get(equation.primitive.name, ()):
        if name in equation.params:
            return equation.params[name]
    return None


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many arrays a scan takes as they are, and how many go round in it.

    **Arguments:**

    - `params`: those of the equation.

    **Returns:**

    Both numbers.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    fixed, carry, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(list(fixed)), len(list(carry))


def open_jaxpr(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Returns a program without its constants.

    **Arguments:**

    - `program`: a program, closed or not.

    **Returns:**

    A `Jaxpr`.
    """
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


@final
class _Reader:
    """What is known while a function is read."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.operations: list[Operation] = []
        self.constants: list[int] = []
        self.regions: list[tuple[int, int]] = [(-1, 1)]
        self.unknown: dict[str, int] = {}
        self.counted = 0

    def program(self, jaxpr: ClosedJaxpr) -> TracedProgram:
        arguments = [self.array(var.aval) for var in jaxpr.jaxpr.invars]
        results = self.body(jaxpr, arguments, 0)
        for number in results:
            if number is not None and self.arrays[number].shape:
                self.identity("return", (-1, 0), number, self.like(number), 0, 1)
        kept = iter(one for one in self.operations if one.role == "return")
        returned = [
            next(kept).results[0] if number is not None and self.arrays[number].shape else None for number in results
        ]
        return TracedProgram(
            tuple(self.arrays),
            tuple(self.operations),
            tuple(arguments),
            tuple(self.constants),
            tuple(returned),
            tuple(self.regions),
            tuple(sorted(self.unknown.items())),
        )

    def array(self, aval: Any) -> int:
        shape = tuple(size if isinstance(size, int) else 1 for size in getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        size = getattr(dtype, "itemsize", 4)
        self.arrays.append(Array(shape, math.prod(shape) * size, dtype))
        return len(self.arrays) - 1

    def like(self, number: int) -> int:
        self.arrays.append(self.arrays[number])
        return len(self.arrays) - 1

    def constant(self, aval: Any) -> int:
        self.constants.append(self.array(aval))
        return self.constants[-1]

    def identity(
        self,
        role: Role,
        place: tuple[int, int],
        operand: int,
        result: int,
        region: int,
        times: int,
        lead: int = 0,
        spec: PartitionSpec | None = None,
    ) -> None:
        """An operation that hands an array on; of its operand `lead` dims come before those of the result."""
        shape = self.arrays[result].shape if lead >= 0 else self.arrays[operand].shape
        dims = tuple(range(len(shape)))
        first: tuple[None, ...] = (None,) * abs(lead)
        factors = Factors(
            ((*first, *dims) if lead > 0 else dims,), ((*first, *dims) if lead < 0 else dims,), tuple(shape)
        )
        inside = self.regions[region][1]
        self.operations.append(
            Operation(role, role, *place, (operand,), (result,), factors, inside, region, (times,), spec=spec)
        )

    def body(self, program: Any, given: Sequence[int | None], region: int) -> list[int | None]:
        jaxpr = open_jaxpr(program)
        known: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))
        known.update((var, self.constant(var.aval)) for var in jaxpr.constvars)

        def look(var: Any) -> int | None:
            return None if isinstance(var, Constant) else known[var]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [look(var) for var in equation.invars], region)
            known.update(zip(equation.outvars, results, strict=True))
        return [look(var) for var in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[int | None], region: int) -> list[int | None]:
        name = equation.primitive.name
        number, self.counted = self.counted, self.counted + 1
        inner = inlined_jaxpr(equation)
        if inner is not None:
            inside = self.region(region, 1) if name in RECOMPUTED else region
            asked, given = (equation.params.get(key, ()) for key in ("in_shardings", "out_shardings"))
            return self.asked(given, self.body(inner, self.asked(asked, operands, region), inside), region)
        special = {"scan": self.scan, "while": self.loop, "cond": self.branches}.get(name)
        if special is not None:
            return special(equation, number, operands, region)
        return self.compute(equation, number, operands, region)

    def asked(self, shardings: Sequence[Any], arrays: list[int | None], region: int) -> list[int | None]:
        """Arrays that go into a jitted function or come out of it, for which it may have shardings of its own."""
        found = list(arrays)
        for place, (array, one) in enumerate(zip(arrays, shardings, strict=False)):
            if array is not None and self.arrays[array].shape and isinstance(one, Sharding):
                found[place] = self.like(array)
                times = self.regions[region][1]
                self.identity("fixed", (-1, place), array, found[place] or 0, region, times, spec=_spec(one))
        return found

    def region(self, around: int, times: int) -> int:
        self.regions.append((around, self.regions[around][1] * times))
        return len(self.regions) - 1

    def compute(self, equation: Any, number: int, operands: list[int | None], region: int) -> list[int | None]:
        name, times = equation.primitive.name, self.regions[region][1]
        results = [self.array(var.aval) for var in equation.outvars]
        role: Role = "compute"
        spec: Any = None
        if name == "sharding_constraint":
            role, spec = "fixed", _spec(equation.params["sharding"])
            shape = self.arrays[results[0]].shape
            factors = Factors((tuple(range(len(shape))),), (tuple(range(len(shape))),), shape)
        elif name == "shard_map":
            role, spec = "opaque", (equation.params["in_specs"], equation.params["out_specs"])
            factors = _opaque(equation)
        else:
            found = op_factors(equation)
            if found is None and not name.startswith("debug_"):  # these print what they get, which has to be whole
                self.unknown[name] = self.unknown.get(name, 0) + 1
            factors = _opaque(equation) if found is None else found
        flops, dtype = _flops(equation)
        self.operations.append(
            Operation(
                role,
                name,
                number,
                0,
                tuple(operands),
                tuple(results),
                factors,
                times,
                region,
                (times,) * len(operands),
                flops,
                dtype,
                spec,
                equation,
            )
        )
        return list(results)

    def enter(
        self, place: tuple[int, int], operands: Iterable[int | None], variables: Iterable[Any], region: int, times: int
    ) -> list[int | None]:
        """Arrays come into a loop; those that it takes one by one have a dim more outside. `place`: the first slot."""
        entered: list[int | None] = []
        number, first = place
        for slot, (operand, var) in enumerate(zip(operands, variables, strict=True), first):
            result = self.array(var.aval)
            entered.append(result)
            if operand is not None and self.arrays[result].shape:
                lead = len(self.arrays[operand].shape) - len(self.arrays[result].shape)
                self.identity("enter", (number, slot), operand, result, region, times, lead)
        return entered

    def carried(
        self,
        number: int,
        program: Any,
        given: list[int | None],
        start: list[int | None],
        rest: list[int | None],
        region: int,
        times: int,
    ) -> tuple[list[int | None], list[int | None], list[int | None]]:
        """Reads the body of a loop, of which some arrays go round."""
        inside = self.regions[region][1]
        jaxpr = open_jaxpr(program)
        variables = jaxpr.invars[len(given) : len(given) + len(start)]
        rounds = [self.array(var.aval) for var in variables]
        places = []
        for _ in rounds:  # each has to stand before what is done with it, and its end is known only after
            places.append(len(self.operations))
            self.operations.append(_LATER)
        ends = self.body(program, [*given, *rounds, *rest], region)
        for slot, (place, array, first, last) in enumerate(zip(places, rounds, start, ends, strict=False)):
            dims = tuple(range(len(self.arrays[array].shape)))
            factors = Factors((dims, dims), (dims,), self.arrays[array].shape)
            self.operations[place] = Operation(
                "join", "join", number, slot, (first, last), (array,), factors, inside, region, (times, inside)
            )
        around = self.regions[region][0]
        exits: list[int | None] = []
        for slot, array in enumerate(rounds):
            exits.append(self.like(array))
            if self.arrays[array].shape:
                self.identity("exit", (number, slot), array, exits[-1] or 0, around, times)
        return [*rounds], exits, ends[len(start) :]

    def scan(self, equation: Any, number: int, operands: list[int | None], region: int) -> list[int | None]:
        params = equation.params
        fixed, carry = scan_counts(params)
        outside = self.regions[region][1]
        inside = self.region(region, params["length"])
        jaxpr = open_jaxpr(params["jaxpr"])
        given = self.enter((number, 0), operands[:fixed], jaxpr.invars[:fixed], inside, outside)
        rest = self.enter((number, fixed), operands[fixed + carry :], jaxpr.invars[fixed + carry :], inside, outside)
        _, exits, stacked = self.carried(
            number, params["jaxpr"], given, operands[fixed : fixed + carry], rest, inside, outside
        )
        left: list[int | None] = []
        for slot, (one, var) in enumerate(zip(stacked, equation.outvars[carry:], strict=True)):
            result = self.array(var.aval)
            left.append(result)
            if one is not None:
                self.identity("leave", (number, slot), one, result, inside, self.regions[inside][1], -1)
        return [*exits, *left]

    def loop(self, equation: Any, number: int, operands: list[int | None], region: int) -> list[int | None]:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        outside = self.regions[region][1]
        inside = self.region(region, 1)
        condition = open_jaxpr(params["cond_jaxpr"])
        body = open_jaxpr(params["body_jaxpr"])
        asked = self.enter((number, 0), operands[:first], condition.invars[:first], inside, outside)
        given = self.enter((number, first), operands[first : first + second], body.invars[:second], inside, outside)
        rounds, exits, _ = self.carried(
            number, params["body_jaxpr"], given, operands[first + second :], [], inside, outside
        )
        self.body(params["cond_jaxpr"], [*asked, *rounds], inside)
        return exits

    def branches(self, equation: Any, number: int, operands: list[int | None], region: int) -> list[int | None]:
        outside = self.regions[region][1]
        ends = []
        for index, branch in enumerate(equation.params["branches"]):
            inside = self.region(region, 1)
            jaxpr = open_jaxpr(branch)
            entered = self.enter((number, index * len(jaxpr.invars)), operands[1:], jaxpr.invars, inside, outside)
            ends.append(self.body(branch, entered, inside))
        results: list[int | None] = []
        for slot, var in enumerate(equation.outvars):
            result = self.array(var.aval)
            results.append(result)
            dims = tuple(range(len(self.arrays[result].shape)))
            taken = tuple(end[slot] for end in ends)
            factors = Factors((dims,) * len(taken), (dims,), self.arrays[result].shape)
            self.operations.append(
                Operation(
                    "join", "cond", number, slot, taken, (result,), factors, outside, region, (outside,) * len(taken)
                )
            )
        return results


_LATER = Operation("join", "join", -1, 0, (), (), Factors((), (), ()), 1, 0, ())


def _spec(sharding: Sharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _opaque(equation: Any) -> Factors:
    """Everything is whole."""
    operands, results = (
        tuple((None,) * len(getattr(var.aval, "shape", ())) for var in side)
        for side in (equation.invars, equation.outvars)
    )
    return Factors(operands, results, ())


def _flops(equation: Any) -> tuple[int, Any]:
    flops = equation_flops(equation)
    return flops, equation.invars[0].aval.dtype if flops else None
