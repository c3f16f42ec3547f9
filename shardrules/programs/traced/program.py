"""A traced function as a flat list of operations on arrays, including what is inside loops and branches.

Loops are read once, with the number of rounds that they run. Where arrays enter a loop, go round in it and leave it,
there is an operation that computes nothing, so that every array can change its layout there. What is inside `jit`,
`checkpoint` and functions with custom derivatives is read as if it stood outside.

The replay of a plan visits equations in the same order as this reader and counts them the same way: that is how it
finds the layouts of each (`Operation.equation_index`).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, final

import attrs
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.extend.core import Literal as Constant
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardrules.programs.jaxprs.bodies import Loop, branches_of
from shardrules.programs.jaxprs.calls import COND, InlinedCall, is_checkpoint, is_cond
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.regions.function import own_flops
from shardrules.programs.traced.factors.table import Factors, op_factors

Role: TypeAlias = Literal["compute", "enter", "join", "exit", "leave", "fixed", "opaque", "return"]
"""The role of an operation: an equation (`compute`), a constraint of the user (`fixed`), a `shard_map` (`opaque`) or a
result of the function (`return`). Around loops: arrays that enter; arrays that go round, and the results of branches
(`join`); arrays that come out at the end (`exit`); arrays that are stacked, one piece per round (`leave`)."""

Users: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""For each array the operations that read it, and as which operand: `(op_index, operand_index)`."""


@final
class Region(NamedTuple):
    """A part of a program that runs by itself: the whole, a loop, a branch or a recomputed part."""

    parent: int  # -1 for the whole program
    run_count: int  # in one call
    unroll: int = 1  # how many rounds of a loop are written out as one


@final
@attrs.frozen
class TracedArray:
    """An array of a program."""

    shape: tuple[int, ...]
    nbytes: int
    dtype: Any
    on_host: bool = False

    @property
    def device_bytes(self) -> int:
        return 0 if self.on_host else self.nbytes


@final
@attrs.frozen(eq=False)
class Operation:
    """One operation of a program. Operands and results are array indices; an operand is `None` for a literal."""

    role: Role
    name: str  # of its primitive, or the role
    equation_index: int  # of its equation, or of the loop that it belongs to; -1 for a result of the function
    slot: int  # which of the arrays that enter, go round or leave
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    factors: Factors
    run_count: int
    region: int
    read_counts: tuple[int, ...]
    """The number of times that each operand is brought to where the operation needs it: for arrays that enter a loop,
    once."""
    flops: int = 0  # of its matmuls and convolutions, on whole arrays
    dtype: Any = None  # of what these multiply
    spec: Any = None
    """For a constraint its spec; for what is opaque, the specs of the operands and of the results."""
    equation: Any = None
    lacks_rule: bool = False
    """It is whole because no rule covers its primitive, or this form of it."""

    @property
    def joins_branches(self) -> bool:
        return self.role == "join" and self.name == COND

    @property
    def joins_rounds(self) -> bool:
        return self.role == "join" and self.name != COND

    @property
    def is_nest(self) -> bool:
        """Splits of its loops are chosen, and each result gets a layout of its own after it."""
        return len(self.results) != 1 or bool(self.factors.reduced) or self.name == "region"


@final
@attrs.frozen(eq=False)
class TracedProgram:
    """A traced function, flat. Arguments, constants and results are array indices."""

    arrays: tuple[TracedArray, ...]
    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    constants: tuple[int, ...]  # arrays of the closure
    results: tuple[int | None, ...]  # None for scalars and literals, which have no layout
    regions: tuple[Region, ...]
    kept: tuple[int, ...] = ()
    """Arrays that are in memory before a part that is computed again: compilers must not look behind them."""
    scalars: tuple[int, ...] = ()
    """Scalars among the results."""

    @functools.cached_property
    def producers(self) -> Mapping[int, int]:
        return {result: op_index for op_index, operation in enumerate(self.operations) for result in operation.results}

    @functools.cached_property
    def users(self) -> Users:
        users: dict[int, list[tuple[int, int]]] = {}
        for op_index, operation in enumerate(self.operations):
            for operand_index, operand in enumerate(operation.operands):
                if operand is not None:
                    users.setdefault(operand, []).append((op_index, operand_index))
        return users

    def branch_of(self, op_index: int, operand: int | None) -> int | None:
        """The region of the branch that returns an operand to the join of branches; `None` for literals."""
        producer, branch = None if operand is None else self.producers.get(operand), None
        region = -1 if producer is None else self.operations[producer].region
        while region > self.operations[op_index].region:
            branch, region = region, self.regions[region].parent
        return branch


def read_jaxpr(jaxpr: ClosedJaxpr) -> TracedProgram:
    """Reads a traced function."""
    return _JaxprReader().read(jaxpr)


@final
class _JaxprReader:
    """The program so far. Methods take and return array indices."""

    def __init__(self) -> None:
        self.arrays: list[TracedArray] = []
        self.operations: list[Operation] = []
        self.constants: list[int] = []
        self.regions: list[Region] = [Region(-1, 1)]
        self.equation_count = 0
        self.kept: dict[int, None] = {}

    def read(self, jaxpr: ClosedJaxpr) -> TracedProgram:
        arguments = [self.add_array(var.aval) for var in jaxpr.jaxpr.invars]
        results: list[int | None] = []
        returned_arrays = self.read_body(jaxpr, arguments, 0)
        for array in returned_arrays:
            # Each result has an operation of its own, so that an array which is returned twice can have two layouts.
            if array is None or not self.arrays[array].shape:
                results.append(None)
                continue
            returned = self.copy_array(array)
            self.add_identity("return", (-1, 0), array, returned, 0, 1)
            results.append(returned)
        return TracedProgram(
            tuple(self.arrays),
            tuple(self.operations),
            tuple(arguments),
            tuple(self.constants),
            tuple(results),
            tuple(self.regions),
            tuple(self.kept),
            tuple(array for array in returned_arrays if array is not None and not self.arrays[array].shape),
        )

    def add_array(self, aval: Any) -> int:
        # Tokens and other abstract values have neither shape nor dtype; a dim of unknown size is never split.
        shape = tuple(size if isinstance(size, int) else 1 for size in getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        itemsize = getattr(dtype, "itemsize", 4)
        self.arrays.append(TracedArray(shape, math.prod(shape) * itemsize, dtype, is_on_host(aval)))
        return len(self.arrays) - 1

    def copy_array(self, array: int) -> int:
        self.arrays.append(self.arrays[array])
        return len(self.arrays) - 1

    def add_constant(self, aval: Any) -> int:
        self.constants.append(self.add_array(aval))
        return self.constants[-1]

    def add_region(self, parent: int, rounds: int, unroll: int = 1) -> int:
        self.regions.append(Region(parent, self.regions[parent].run_count * rounds, unroll))
        return len(self.regions) - 1

    def add_identity(
        self,
        role: Role,
        position: tuple[int, int],
        operand: int,
        result: int,
        region: int,
        read_count: int,
        extra_dims: int = 0,
        spec: PartitionSpec | None = None,
    ) -> None:
        """Adds an operation that passes an array on. `position` is its equation index and slot.

        The operand has `extra_dims` more dims in front than the result, or the result than the operand if negative.
        """
        shape = self.arrays[result if extra_dims >= 0 else operand].shape
        dims = tuple(range(len(shape)))
        longer_dims = ((None,) * abs(extra_dims)) + dims
        factors = Factors(
            (longer_dims if extra_dims > 0 else dims,), (longer_dims if extra_dims < 0 else dims,), tuple(shape)
        )
        run_count = self.regions[region].run_count
        self.operations.append(
            Operation(
                role, role, *position, (operand,), (result,), factors, run_count, region, (read_count,), spec=spec
            )
        )

    def read_body(self, closed: Any, operands: Sequence[int | None], region: int) -> list[int | None]:
        jaxpr = open_jaxpr(closed)
        arrays: dict[Any, int | None] = dict(zip(jaxpr.invars, operands, strict=True))
        arrays.update((var, self.add_constant(var.aval)) for var in jaxpr.constvars)

        def array_of(var: Any) -> int | None:
            return None if isinstance(var, Constant) else arrays[var]

        used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
        for equation in jaxpr.eqns:
            unused = [id(var) not in used for var in equation.outvars]
            results = self.read_equation(equation, [array_of(var) for var in equation.invars], unused, region)
            arrays.update(zip(equation.outvars, results, strict=True))
        return [array_of(var) for var in jaxpr.outvars]

    def read_equation(
        self, equation: Any, operands: list[int | None], unused: Sequence[bool], region: int
    ) -> list[int | None]:
        # Calls are counted, too, and before what is inside of them: the replay does the same.
        equation_index, self.equation_count = self.equation_count, self.equation_count + 1
        call = InlinedCall.of(equation)
        if call is not None:
            operands = [operands[index] for index in call.operands]
            # Compilers compute what is checkpointed again, and share nothing of it.
            inside = self.add_region(region, 1) if is_checkpoint(equation) else region
            if equation.params.get("prevent_cse") and equation.params.get("differentiated"):
                self.kept.update(dict.fromkeys(operand for operand in operands if operand is not None))
            # Shardings of an inner jit are orders to the partitioner, as constraints are.
            in_shardings, out_shardings = (equation.params.get(key, ()) for key in ("in_shardings", "out_shardings"))
            results = self.read_body(call.jaxpr, self.constrain(in_shardings, operands, region), inside)
            return self.constrain(out_shardings, results, region)
        loop = Loop.of(equation)
        if loop is not None:
            return self.read_loop(loop, equation, equation_index, operands, region)
        if is_cond(equation):
            return self.read_cond(equation, equation_index, operands, region)
        return self.read_operation(equation, equation_index, operands, unused, region)

    def constrain(self, shardings: Sequence[Any], arrays: list[int | None], region: int) -> list[int | None]:
        """Adds the constraints that an inner `jit` has on its arguments or results."""
        constrained = list(arrays)
        for slot, (array, sharding) in enumerate(zip(arrays, shardings, strict=False)):
            if array is not None and self.arrays[array].shape and isinstance(sharding, Sharding):
                result = self.copy_array(array)
                read_count = self.regions[region].run_count
                self.add_identity(
                    "fixed", (-1, slot), array, result, region, read_count, spec=_spec_of_sharding(sharding)
                )
                constrained[slot] = result
        return constrained

    def read_operation(
        self, equation: Any, equation_index: int, operands: list[int | None], unused: Sequence[bool], region: int
    ) -> list[int | None]:
        name, run_count = operation_name(equation), self.regions[region].run_count
        results = [self.add_array(var.aval) for var in equation.outvars]
        role: Role = "compute"
        spec: Any = None
        lacks_rule = False
        if name == "sharding_constraint":
            role, spec = "fixed", _spec_of_sharding(equation.params["sharding"])
            shape = self.arrays[results[0]].shape
            dims = tuple(range(len(shape)))
            factors = Factors((dims,), (dims,), shape)
        elif name == "shard_map":
            role, spec = "opaque", (equation.params["in_specs"], equation.params["out_specs"])
            factors = _whole_factors(equation)
        else:
            rule_factors = op_factors(equation, unused)
            # Debug callbacks print their operands, which have to be whole: that is not a missing rule.
            lacks_rule = rule_factors is None and not name.startswith("debug_")
            factors = _whole_factors(equation) if rule_factors is None else rule_factors
        flops, dtype = _flops(equation)
        self.operations.append(
            Operation(
                role,
                name,
                equation_index,
                0,
                tuple(operands),
                tuple(results),
                factors,
                run_count,
                region,
                (run_count,) * len(operands),
                flops,
                dtype,
                spec,
                equation,
                lacks_rule,
            )
        )
        return list(results)

    def enter(
        self,
        position: tuple[int, int],
        operands: Iterable[int | None],
        variables: Iterable[Any],
        region: int,
        read_count: int,
    ) -> list[int | None]:
        """Adds arrays that enter a region, as its `variables`. `position` is the equation index and the first slot."""
        entered: list[int | None] = []
        equation_index, first_slot = position
        for slot, (operand, var) in enumerate(zip(operands, variables, strict=True), first_slot):
            result = self.add_array(var.aval)
            entered.append(result)
            if operand is not None and self.arrays[result].shape:
                # What a scan reads one piece per round has one dim more outside.
                extra_dims = len(self.arrays[operand].shape) - len(self.arrays[result].shape)
                self.add_identity("enter", (equation_index, slot), operand, result, region, read_count, extra_dims)
        return entered

    def join(
        self,
        name: str,
        position: tuple[int, int],
        operands: tuple[int | None, ...],
        result: int,
        region: int,
        read_counts: tuple[int, ...],
    ) -> Operation:
        """An operation whose result is one of its operands. `position` is the equation index and the slot."""
        shape = self.arrays[result].shape
        dims = tuple(range(len(shape)))
        factors = Factors((dims,) * len(operands), (dims,), shape)
        run_count = self.regions[region].run_count
        return Operation("join", name, *position, operands, (result,), factors, run_count, region, read_counts)

    def read_rounds(
        self,
        equation_index: int,
        body: Any,
        entered: list[int | None],
        starts: list[int | None],
        pieces: list[int | None],
        region: int,
    ) -> tuple[list[int | None], list[int | None], list[int | None]]:
        """Reads the body of a loop, whose operands are `entered`, what goes round, and the `pieces` of a round.

        Returns what goes round, what comes out of that in the end, and the body's other results.
        """
        parent, inside_count, _ = self.regions[region]
        outside_count = self.regions[parent].run_count
        variables = open_jaxpr(body).invars[len(entered) : len(entered) + len(starts)]
        rounds = [self.add_array(var.aval) for var in variables]
        # Each join stands before its users, but one of its operands is known only after the body.
        first_join = len(self.operations)
        self.operations += [_UNFINISHED] * len(rounds)
        ends = self.read_body(body, [*entered, *rounds, *pieces], region)
        for slot, (array, start, end) in enumerate(zip(rounds, starts, ends, strict=False)):
            self.operations[first_join + slot] = self.join(
                "join", (equation_index, slot), (start, end), array, region, (outside_count, inside_count)
            )
        # The value at the end is what went round last, but other operations may read it in another layout.
        exits: list[int | None] = []
        for slot, array in enumerate(rounds):
            result = self.copy_array(array)
            exits.append(result)
            if self.arrays[array].shape:
                self.add_identity("exit", (equation_index, slot), array, result, parent, outside_count)
        return [*rounds], exits, ends[len(starts) :]

    def read_loop(
        self, loop: Loop, equation: Any, equation_index: int, operands: list[int | None], region: int
    ) -> list[int | None]:
        outside_count = self.regions[region].run_count
        # Where data decides how many rounds there are, one is counted.
        inside = self.add_region(region, 1 if loop.length is None else loop.length, loop.unroll)

        def enter(part: slice, variables: Sequence[Any], first_slot: int) -> list[int | None]:
            return self.enter((equation_index, first_slot), operands[part], variables, inside, outside_count)

        variables = open_jaxpr(loop.body).invars
        test_variables = () if loop.test is None else open_jaxpr(loop.test).invars[loop.test_consts]
        tested = enter(loop.test_consts, test_variables, 0)
        consts = enter(loop.consts, variables[: loop.const_count], len(tested))
        pieces = enter(loop.pieces, variables[loop.carry_inside.stop :], len(consts))
        rounds, exits, round_results = self.read_rounds(
            equation_index, loop.body, consts, operands[loop.carry], pieces, inside
        )
        if loop.test is not None:
            # After the body, as the replay does: equations are counted in this order.
            self.read_body(loop.test, [*tested, *rounds], inside)
        stacked: list[int | None] = []
        # What each round adds is stacked in a new first dim, which the loop iterates over and nothing splits.
        for slot, (array, var) in enumerate(zip(round_results, equation.outvars[loop.carry_count :], strict=True)):
            result = self.add_array(var.aval)
            stacked.append(result)
            if array is not None:
                read_count = self.regions[inside].run_count
                self.add_identity("leave", (equation_index, slot), array, result, inside, read_count, -1)
        return [*exits, *stacked]

    def read_cond(
        self, equation: Any, equation_index: int, operands: list[int | None], region: int
    ) -> list[int | None]:
        count = self.regions[region].run_count
        branch_results = []
        for branch_index, branch in enumerate(branches_of(equation)):
            inside = self.add_region(region, 1)  # every branch counts as if it were taken
            variables = open_jaxpr(branch).invars
            # Slots go on from branch to branch. The first operand is the index of the branch, which has no layout.
            position = (equation_index, branch_index * len(variables))
            entered = self.enter(position, operands[1:], variables, inside, count)
            branch_results.append(self.read_body(branch, entered, inside))
        results: list[int | None] = []
        for slot, var in enumerate(equation.outvars):
            result = self.add_array(var.aval)
            results.append(result)
            joined = tuple(arrays[slot] for arrays in branch_results)
            counts = (count,) * len(joined)
            self.operations.append(self.join(COND, (equation_index, slot), joined, result, region, counts))
        return results


_UNFINISHED = Operation("join", "join", -1, 0, (), (), Factors((), (), ()), 1, 0, ())
"""Takes the index of an operation whose operands are not read yet."""


def is_on_host(aval: Any) -> bool:
    """An array is in the memory of a host, where `jax.device_put` moved it."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def changes_memory(operation: Operation) -> bool:
    """An operation sends an array to the host or fetches it from there."""
    if operation.name != "device_put":
        return False
    sides = (operation.equation.invars, operation.equation.outvars)
    before, after = (tuple(is_on_host(var.aval) for var in side) for side in sides)
    return before != after


def _spec_of_sharding(sharding: Sharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


_MAPPED_REDUCTIONS = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


def operation_name(equation: Any) -> str:
    """The name of a primitive that does the same: reductions over axes of `vmap` are reductions, of none copies."""
    name, axes = equation.primitive.name, equation.params.get("axes")
    if name in _MAPPED_REDUCTIONS and all(isinstance(axis, int) for axis in axes):
        name = _MAPPED_REDUCTIONS[name]
    is_reduction = name in _MAPPED_REDUCTIONS.values()
    return "copy" if is_reduction and not axes else name


def _whole_factors(equation: Any) -> Factors:
    operands, results = (
        tuple((None,) * len(getattr(var.aval, "shape", ())) for var in side)
        for side in (equation.invars, equation.outvars)
    )
    return Factors(operands, results, ())


def _flops(equation: Any) -> tuple[int, Any]:
    flops = own_flops(equation)
    if equation.primitive.name in ("region", "pallas_call"):
        dtypes = (var.aval.dtype for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.inexact))
        return flops, next(dtypes, None)
    return flops, equation.invars[0].aval.dtype if flops else None
