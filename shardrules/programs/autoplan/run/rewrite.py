"""A traced function with the layouts of a plan written into it, as constraints that compilers obey.

Every array is constrained where an operation computes it, and again where another needs it in another layout. The
equations stay as they are, so that what they say about the user's code stays true; but transposes of parts of sums are
matmuls of swapped operands.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.spec import spec_key
from shardrules.programs.autoplan.graph.home import Home
from shardrules.programs.autoplan.graph.layouts import PARTIAL, dim_axes, dim_shard_count, relayout_steps, spec_of
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.graph.region_cost import shard_axes
from shardrules.programs.autoplan.run.local import LocalSplit, RegionRun, local_jaxpr, row_major_jaxpr
from shardrules.programs.jaxprs.bodies import Loop, branches_of, with_bodies
from shardrules.programs.jaxprs.calls import InlinedCall, is_cond
from shardrules.programs.jaxprs.rewrite import Writer
from shardrules.programs.jaxprs.segments import struct
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.regions.function import ShardFunction
from shardrules.programs.traced.program import is_on_host

_OpKey: TypeAlias = tuple[int, str, int]
"""The index of an equation, and which of its operations it is: the role and the slot. Most have one, loops several."""


@final
@attrs.frozen
class OperationLayouts:
    """The layouts at one operation."""

    operands: tuple[tuple[PartitionSpec, ...], ...]
    """For each operand the layouts that it is brought through; none where it stays as it is."""
    results: tuple[tuple[PartitionSpec, ...], ...]
    """For each result the layouts that it goes through; it keeps the last."""
    local: LocalSplit | None = None
    """The split of the operation if each device is given its own."""
    row_major_spec: PartitionSpec | None = None
    """The layout of its operand, if that has to keep the order of its dims in memory."""
    transposes_parts: bool = False
    """It is a transpose of parts of a sum, which are added to others before devices exchange the total."""


def chosen_layouts(problem: Problem, choice: Sequence[int]) -> dict[_OpKey, OperationLayouts]:
    """Returns what a choice says about each operation."""
    program, machine = problem.program, problem.machine
    layouts: dict[_OpKey, OperationLayouts] = {}

    def spec(layout: Sequence[int], array: int) -> PartitionSpec:
        return spec_of(layout, len(program.arrays[array].shape), machine)

    for op_index, operation in enumerate(program.operations):
        operands: list[tuple[PartitionSpec, ...]] = []
        for position, operand in enumerate(operation.operands):
            take = problem.operand_homes.get((op_index, position))
            if take is None or operand is None or operand not in problem.homes:
                operands.append(())
                continue
            if operation.lacks_rule:  # a compiler may know how to split it
                operands.append(())
                continue
            before, after = problem.layout(problem.homes[operand], choice), problem.layout(take, choice)
            # Step by step, as the cost model prices the move: compilers given both ends alone may gather everything.
            operands.append(tuple(spec(layout, operand) for layout in relayout_steps(before, after)))
        results: list[tuple[PartitionSpec, ...]] = []
        for position, result in enumerate(operation.results):
            if result not in problem.homes:
                results.append(())
                continue
            after = problem.layout(problem.homes[result], choice)
            before = problem.layout(problem.produced_homes.get((op_index, position), problem.homes[result]), choice)
            if operation.role == "exit":
                # Without a constraint to what the loop carries, compilers carry it in the layout that follows it.
                carried = operation.operands[0]
                assert carried is not None, "what leaves a loop was carried by it"
                before = problem.layout(problem.homes[carried], choice)
            if operation.lacks_rule:
                results.append((spec(after, result),))
                continue
            results.append((spec(before, result), *(spec(layout, result) for layout in relayout_steps(before, after))))
        if operation.equation_index >= 0:
            role = operation.role if operation.role in ("enter", "join", "leave", "exit") else "compute"
            layouts[operation.equation_index, role, operation.slot] = OperationLayouts(
                tuple(operands),
                tuple(results),
                _local_split(problem, choice, op_index),
                _row_major_spec(problem, choice, op_index),
                _transposes_parts(problem, choice, op_index),
            )
    return layouts


def _transposes_parts(problem: Problem, choice: Sequence[int], op_index: int) -> bool:
    operation = problem.program.operations[op_index]
    home = problem.homes.get(operation.results[0]) if operation.name == "transpose" else None
    return home is not None and PARTIAL in problem.layout(home, choice)


def _row_major_spec(problem: Problem, choice: Sequence[int], op_index: int) -> PartitionSpec | None:
    """Returns the layout of what is summed over its first dims only, such as gradients of positions over examples.

    XLA for GPUs puts such dims last in memory where it can. It may then give that order to all activations around, and
    transposes them at each norm and each attention.
    """
    program, machine = problem.program, problem.machine
    operation = program.operations[op_index]
    home = problem.operand_homes.get((op_index, 0))
    if operation.name != "reduce_sum" or home is None or operation.operands[0] is None:
        return None
    shape, axes = program.arrays[operation.operands[0]].shape, operation.equation.params["axes"]
    layout = problem.layout(home, choice)
    is_even = all(size % dim_shard_count(layout, dim, machine) == 0 for dim, size in enumerate(shape))
    is_leading = tuple(axes) == tuple(range(len(axes))) and math.prod(shape[: len(axes)]) > 1
    is_leading &= sum(size > 1 for size in shape[len(axes) :]) > 1
    is_reordered = is_leading and is_even and machine.compiler.moves_summed_dims
    return spec_of(layout, len(shape), machine) if is_reordered else None


def _local_split(problem: Problem, choice: Sequence[int], op_index: int) -> LocalSplit | None:
    """Returns how an operation is split that XLA would not split by itself; `None` for others."""
    program, machine = problem.program, problem.machine
    operation = program.operations[op_index]
    if operation.name == "region":
        return _region_split(problem, choice, op_index)
    if not operation.factors.is_local:
        return None
    factors = operation.factors
    is_even, is_split = True, False
    factor_axes: dict[int, tuple[str, ...]] = {}

    def split(
        array: int | None, home: Home | None, names: Sequence[int | None]
    ) -> tuple[PartitionSpec, tuple[str, ...]]:
        nonlocal is_even, is_split
        if array is None or home is None:
            return PartitionSpec(), ()
        # What a caller passes again may be split along other dims, too: it is sliced afterwards.
        dims = [dim if name is not None else None for dim, name in zip(home.dims, names, strict=True)]
        layout = problem.layout(attrs.evolve(home, dims=tuple(dims)), choice)
        summed = dim_axes(layout, PARTIAL, machine)
        for dim, name in enumerate(names):
            count = dim_shard_count(layout, dim, machine)
            if name is not None:
                factor_axes[name] = dim_axes(layout, dim, machine)
            is_split |= count > 1
            is_even &= count == 1 or (name is not None and factors.sizes[name] % count == 0)
        return spec_of(layout, len(names), machine), summed

    operands = tuple(
        split(operand, problem.operand_homes.get((op_index, index)), names)
        for index, (operand, names) in enumerate(zip(operation.operands, factors.operands, strict=True))
    )
    scalar_sums = [
        tuple(axis for factor in factors.summed(index) for axis in factor_axes.get(factor, ()))
        for index in range(len(operation.results))
    ]
    results = tuple(
        split(result, problem.produced_homes.get((op_index, index), problem.homes.get(result)), names)
        if names
        else (PartitionSpec(), scalar_sums[index])  # a scalar has no layout of its own
        for index, (result, names) in enumerate(zip(operation.results, factors.results, strict=True))
    )
    if not (is_even and is_split):
        return None
    return LocalSplit(
        tuple(spec for spec, _ in operands), tuple(spec for spec, _ in results), tuple(summed for _, summed in results)
    )


def _region_split(problem: Problem, choice: Sequence[int], op_index: int) -> LocalSplit:
    """Returns how a region is split."""
    machine, operation = problem.machine, problem.program.operations[op_index]
    layout = problem.region_layout(op_index, choice)
    axes = shard_axes(operation, layout, machine)
    function: ShardFunction = operation.equation.params["function"]
    index = problem.region_price(op_index, choice).alternative if op_index in problem.region_nodes else 0
    declaration = function.alternative(index).declaration
    operands, results = declaration.specs(axes)
    summed = tuple(declaration.sum_axes(result_index, axes) for result_index in range(len(results)))
    return LocalSplit(operands, results, summed, RegionRun(index, axes.exchange))


def with_layouts(program: ClosedJaxpr, layouts: dict[_OpKey, OperationLayouts], mesh: AnyMesh) -> ClosedJaxpr:
    """Returns a traced function with layouts, as `chosen_layouts` returns them, written into it."""
    rewriter = _Rewriter(layouts, mesh)
    return ClosedJaxpr(rewriter.body(program.jaxpr, (), ()), program.consts)


@final
@attrs.define(eq=False)
class _Rewriter:
    """The state of a walk through a program, in the order in which it was read.

    In the place of a variable of the old program stands the result of its last constraint.
    """

    layouts: dict[_OpKey, OperationLayouts]
    mesh: AnyMesh
    equation_count: int = 0
    constraints: dict[Any, Any] = attrs.field(factory=dict)
    products: dict[Any, Any] = attrs.field(factory=dict)
    """The equations of matmuls, by their results in the old program."""

    def body(
        self, program: Jaxpr, first: Sequence[PartitionSpec | None], last: Sequence[PartitionSpec | None]
    ) -> Jaxpr:
        """Returns a program rewritten, with its inputs and outputs constrained, too."""
        writer = Writer()
        # Nested bodies without layouts pass empty sequences.
        for var, spec in zip(program.invars, first, strict=False):
            if spec is not None:
                writer.current[var] = self.constrain(var, spec, writer, None)
        for equation in program.eqns:
            self.rewrite(equation, writer)
        results = writer.read(program.outvars)
        for position, (var, spec) in enumerate(zip(results, last, strict=False)):
            if spec is not None and not isinstance(var, Literal):
                results[position] = self.constrain(var, spec, writer, None)
        return writer.program(program, outvars=results)

    def constrain(self, var: Any, spec: PartitionSpec, writer: Writer, like: Any) -> Var:
        """Adds a constraint, with the source line of the equation `like`, and returns its result.

        What is on the host stays there as compilers send it: a constraint would bring it to the device. Mutable arrays
        have no layout.
        """
        if is_on_host(var.aval) or not isinstance(var.aval, ShapedArray):
            return var
        source = {} if like is None else {"source_info": like.source_info}
        constraint = self.constraint(var, spec)
        (result,) = writer.add(constraint.replace(invars=[var], outvars=[Var(var.aval)], **source))
        return result

    def constraint(self, var: Any, spec: PartitionSpec) -> Any:
        """Returns the equation of a constraint, traced once for each shape and spec."""
        aval = var.aval
        key = (aval.shape, aval.dtype, aval.weak_type, spec_key(spec))
        if key not in self.constraints:
            sharding = NamedSharding(self.mesh, spec)
            traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(struct(var))
            self.constraints[key] = traced.eqns[0]
        return self.constraints[key]

    def rewrite(self, equation: Any, writer: Writer) -> None:
        """Adds an equation and the constraints around it."""
        # Equations are counted in the order in which `read_jaxpr` did, so that the keys of layouts agree.
        index, self.equation_count = self.equation_count, self.equation_count + 1
        call, loop, inputs = InlinedCall.of(equation), Loop.of(equation), writer.read(equation.invars)
        if call is not None:
            called = self.body(open_jaxpr(call.jaxpr), (), ())
            writer.add(with_bodies(equation, [called]).replace(invars=inputs))
            return
        if loop is not None:
            self.loop(loop, equation, index, inputs, writer)
            return
        if is_cond(equation):
            self.cond(equation, index, inputs, writer)
            return
        layouts = self.layouts.get((index, "compute", 0))
        if layouts is None:
            writer.add(equation.replace(invars=inputs))
            return
        operands = []
        for var, specs in zip(inputs, layouts.operands, strict=True):
            last = var
            for spec in () if isinstance(var, Literal) else specs:
                # Operations that need an array in the same layout share a copy, as the plan counts it.
                add = functools.partial(self.constrain, last, spec, writer, equation)
                last = writer.once((last, spec_key(spec)), add)
            operands.append(last)
        if layouts.row_major_spec is not None:
            (operand,) = operands
            operands = [Var(operand.aval)]
            program = row_major_jaxpr(struct(operand), layouts.row_major_spec, self.mesh)
            writer.splice(program, [operand], equation, operands)
        if layouts.local is None:
            written = equation.replace(invars=operands)
            if layouts.transposes_parts:
                written = transposed_product(self.products.get(equation.invars[0]), written) or written
            if written.primitive.name == "dot_general":
                self.products[equation.outvars[0]] = written
            writer.add(written)
        else:
            writer.splice(local_jaxpr(equation, layouts.local, self.mesh), operands, equation, equation.outvars)
        self.constrain_results(equation, layouts.results, writer)

    def constrain_results(self, equation: Any, specs: Sequence[Sequence[PartitionSpec]], writer: Writer) -> None:
        """Brings the results of an equation through their layouts."""
        for var, result_specs in zip(equation.outvars, specs, strict=True):
            if type(var) is not Var:  # a DropVar: nothing needs it
                continue
            for spec in result_specs:
                writer.current[var] = self.constrain(writer.current.get(var, var), spec, writer, equation)

    def result_specs(self, index: int, role: str, slots: range) -> list[tuple[PartitionSpec, ...]]:
        """Returns the layouts that arrays go through as they enter a loop, go round in it or leave it."""
        layouts = [self.layouts.get((index, role, slot)) for slot in slots]
        return [() if each is None else each.results[0] for each in layouts]

    def specs_inside(self, index: int, role: str, slots: range) -> list[PartitionSpec | None]:
        """Returns the specs of arrays inside of a loop or a branch."""
        return [specs[-1] if specs else None for specs in self.result_specs(index, role, slots)]

    def enter(
        self, index: int, role: str, inputs: list[Any], part: slice, first_slot: int, writer: Writer
    ) -> list[PartitionSpec | None]:
        """Brings inputs of a loop to where it needs them, in place, and returns their specs inside."""
        for slot, position in enumerate(range(part.start, part.stop), first_slot):
            layouts = self.layouts.get((index, role, slot))
            if layouts is None or isinstance(inputs[position], Literal):
                continue
            # Constrain what is carried even where it does not move: compilers choose its layout for the whole loop.
            specs = layouts.operands[0] or (layouts.results[0] if role == "join" else ())
            for spec in specs:
                inputs[position] = self.constrain(inputs[position], spec, writer, None)
        return self.specs_inside(index, role, range(first_slot, first_slot + part.stop - part.start))

    def loop(self, loop: Loop, equation: Any, index: int, inputs: list[Any], writer: Writer) -> None:
        """Adds a loop: its operands are constrained, what its body takes and returns, and its results."""
        tested = self.enter(index, "enter", inputs, loop.test_consts, 0, writer)
        consts = self.enter(index, "enter", inputs, loop.consts, len(tested), writer)
        carry = self.enter(index, "join", inputs, loop.carry, 0, writer)
        pieces = self.enter(index, "enter", inputs, loop.pieces, len(consts), writer)
        stacked = self.result_specs(index, "leave", range(len(equation.outvars) - len(carry)))
        # What a round adds lacks the first dim of what is stacked.
        rows = [PartitionSpec(*tuple(specs[-1])[1:]) if specs else None for specs in stacked]
        bodies = [self.body(open_jaxpr(loop.body), [*consts, *carry, *pieces], [*carry, *rows])]
        if loop.test is not None:
            bodies.append(self.body(open_jaxpr(loop.test), [*tested, *carry], ()))
        writer.add(with_bodies(equation, bodies).replace(invars=inputs))
        self.constrain_results(equation, [*self.result_specs(index, "exit", range(len(carry))), *stacked], writer)

    def cond(self, equation: Any, index: int, inputs: list[Any], writer: Writer) -> None:
        """Adds a conditional: its operands are constrained in each branch, and so are its results."""
        results = self.specs_inside(index, "join", range(len(equation.outvars)))
        branches = []
        for branch_index, branch in enumerate(map(open_jaxpr, branches_of(equation))):
            count = len(branch.invars)
            slots = range(branch_index * count, (branch_index + 1) * count)
            branches.append(self.body(branch, self.specs_inside(index, "enter", slots), results))
        writer.add(with_bodies(equation, branches).replace(invars=inputs))
        self.constrain_results(equation, [() if spec is None else (spec,) for spec in results], writer)


def transposed_product(product: Any, transpose: Any) -> Any:
    """Returns the matmul that computes a transpose of a matmul, with its operands swapped; `None` if that is none.

    Compilers let devices exchange the result of a matmul before they transpose it, and so each addend by itself.
    """
    if product is None or isinstance(product.params["precision"], jax.lax.DotAlgorithm):  # one has a type for each side
        return None
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    (left, right), precision = product.invars, product.params["precision"]
    first, second, end = len(left_batch), left.aval.ndim - len(left_sums), product.outvars[0].aval.ndim
    if transpose.params["permutation"] != (*range(first), *range(second, end), *range(first, second)):
        return None
    numbers = (right_sums, left_sums), (right_batch, left_batch)
    precision = precision[::-1] if isinstance(precision, tuple) else precision
    params = {**product.params, "dimension_numbers": numbers, "precision": precision}
    return product.replace(invars=[right, left], outvars=transpose.outvars, params=params)
