"""The program of one part of the batch, from the facts of the whole.

Most equations run as the trace of a part has them. Constants are the whole program's, so that a mean divides by all
examples. Arrays that the batch shares are computed as in the whole program, and sliced where examples use them: the
dropout masks of a part are the same that the whole batch would have there.
"""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.extend.core import Literal as Constant
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.errors import MicrobatchError
from shardrules.core.jax_state import lines_of
from shardrules.programs.jaxprs.bodies import Loop, bodies_of
from shardrules.programs.jaxprs.calls import InlinedCall, is_checkpoint, is_cond
from shardrules.programs.jaxprs.segments import evaluated
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.training.examples.facts import Fact, name_of_step
from shardrules.programs.training.examples.pairs import Counts, part_params
from shardrules.programs.training.examples.proof import BodyFacts, can_be_whole
from shardrules.programs.training.examples.rules import own_columns

Variant: TypeAlias = Literal["whole", "part"]
"""An array of the whole batch, or of a part: its examples, or its part of a sum."""

Demand: TypeAlias = tuple[Var, Variant]


@final
@attrs.frozen
class Position:
    """The part of the batch: a microbatch of one group of examples, or of all groups if `group` is `None`.

    The batch is groups, of microbatches, of examples.
    """

    group: Any
    microbatch: Any
    group_count: int
    microbatch_count: int

    def slice(self, value: Any, dim: int, is_trained: bool) -> Any:
        """Returns the part of an array that has the examples of the whole batch along a dim."""
        if is_trained:
            return self._runs(value, dim, self.group, self.microbatch)
        by_group = self.group is not None
        # One equation whatever the groups are, so that those after it have the same positions.
        run = custom_vmap(
            lambda array, group, microbatch: self._runs(array, dim, group if by_group else None, microbatch)
        )

        @run.def_vmap
        def _(axis_size: int, in_batched: Sequence[bool], array: Any, group: Any, microbatch: Any) -> tuple[Any, bool]:
            del axis_size
            if by_group and list(in_batched) == [False, True, False]:
                # All groups at once: these are the array itself, and nothing is moved.
                return jnp.moveaxis(self._groups(array, dim, microbatch), dim, 0), True
            axes = [0 if batched else None for batched in in_batched]
            sliced = jax.vmap(lambda *each: self._runs(each[0], dim, each[1] if by_group else None, each[2]), axes)
            return sliced(array, group, microbatch), True

        return run(lax.stop_gradient(value), self.group if by_group else jnp.int32(0), self.microbatch)

    def _groups(self, value: Any, dim: int, microbatch: Any) -> Any:
        """Returns a microbatch of all groups, with a dim for the groups."""
        size = value.shape[dim] // (self.group_count * self.microbatch_count)
        shape = (*value.shape[:dim], self.group_count, self.microbatch_count, size, *value.shape[dim + 1 :])
        return lax.dynamic_index_in_dim(lax.reshape(value, shape), microbatch, dim + 1, keepdims=False)

    def _runs(self, value: Any, dim: int, group: Any, microbatch: Any) -> Any:
        groups = self._groups(value, dim, microbatch)
        if group is not None:
            return lax.dynamic_index_in_dim(groups, group, dim, keepdims=False)
        return groups.reshape(*value.shape[:dim], -1, *value.shape[dim + 1 :])

    def inside(self, indices: Any, size: int) -> Any:
        """Returns indices of examples in the part, from those in the batch; each run of examples has this size."""
        run, first = (jnp.asarray(length, indices.dtype) for length in (size * self.microbatch_count, size))
        # A group has one run of examples; a microbatch of all groups has one of each.
        step = jnp.asarray(size if self.group is None else 0, indices.dtype)
        return lax.div(indices, run) * step + lax.rem(indices, first)


@final
@attrs.define(eq=False)
class Replay:
    """Runs bodies for one part of the batch."""

    counts: Counts
    position: Position
    closed_calls: Mapping[int, Any] = attrs.field(factory=dict)
    """For the ids of equations that call functions with derivatives of their own, the same traced for the part."""
    group_axes: dict[tuple[str, ...], bool] = attrs.field(factory=dict)
    """The axes over which the user splits examples, by constraints, and whether the groups divide by their sizes."""

    def body(self, body: BodyFacts, inputs: Sequence[Any], requested: Sequence[Fact]) -> list[Any]:
        """Runs a body: inputs are parts or shared, and results come in the forms that are `requested`."""
        values: dict[Demand, Any] = {}
        for var, fact, value in zip(body.pair.whole.invars, body.inputs, inputs, strict=True):
            values[var, _variant(fact)] = value
        outputs: list[tuple[Any, Variant]] = [
            (var, _variant(fact, body.fact(var))) for var, fact in zip(body.pair.whole.outvars, requested, strict=True)
        ]
        return self.run(body, values, outputs)

    def run(self, body: BodyFacts, values: dict[Demand, Any], outputs: Sequence[tuple[Any, Variant]]) -> list[Any]:
        """Runs all that the outputs need. `values` has the inputs, and arrays that were computed before."""
        for var, value in zip(body.pair.whole.constvars, body.pair.whole_consts, strict=True):
            values.setdefault((var, "whole"), value)
        demands = demands_of(body, outputs, values)
        for index, equation in enumerate(body.pair.whole.eqns):
            variants = demands.equations[index]
            if "whole" in variants:
                operands = [self.value(body, var, "whole", values) for var in equation.invars]
                for var, value in zip(equation.outvars, evaluated(equation, operands), strict=True):
                    values[var, "whole"] = value
            if "part" in variants:
                results = self.part(body, index, values)
                for var, value in zip(equation.outvars, results, strict=True):
                    values[var, _variant(body.facts[var])] = value
        return [self.value(body, var, variant, values) for var, variant in outputs]

    def value(self, body: BodyFacts, var: Any, variant: Variant, values: dict[Demand, Any]) -> Any:
        """Returns an array, sliced first if only the whole was computed."""
        if isinstance(var, Constant):
            aval: Any = var.aval
            return jnp.asarray(var.val, aval.dtype)
        if (var, variant) not in values and variant == "part":
            fact, whole = body.facts[var], values[var, "whole"]
            assert isinstance(fact.dim, int), "what is sliced has its examples along a dim"
            values[var, variant] = self.position.slice(whole, fact.dim, fact.is_trained)
        return values[var, variant]

    def part(self, body: BodyFacts, index: int, values: dict[Demand, Any]) -> Sequence[Any]:
        equation, other = body.pair.whole.eqns[index], body.pair.trace.eqns[index]
        facts = [body.fact(var) for var in equation.invars]
        operands = [
            self.value(body, var, _variant(fact), values) for var, fact in zip(equation.invars, facts, strict=True)
        ]
        nested = body.nested.get(index)
        name, is_scaled = equation.primitive.name, self.counts.trace != self.counts.part
        if nested is not None:
            with lines_of(equation):
                return self.nested(equation, other, nested, operands)
        if is_scaled and InlinedCall.of(equation) is not None:
            return evaluated(self.closed_calls[id(equation)], operands)
        columns = own_columns(equation, facts, self.counts)
        if columns:
            # Indices count the examples of the whole batch: here the part's.
            indices, is_index = operands[1], jnp.isin(jnp.arange(operands[1].shape[-1]), jnp.array(columns))
            size = facts[1].index_size // (self.position.group_count * self.position.microbatch_count)
            operands[1] = jnp.where(is_index, self.position.inside(indices, size), indices)
        # Constants of the whole program, in the equation of the part.
        constants = [
            var if isinstance(var, Constant) else partner
            for var, partner in zip(equation.invars, other.invars, strict=True)
        ]
        params = part_params(equation, other, self.counts)
        if name == "sharding_constraint" and self.position.group is not None and isinstance(facts[0].dim, int):
            params = {**params, "sharding": self.constraint(params["sharding"], facts[0].dim)}
        return evaluated(other.replace(invars=constants, params=params), operands)

    def constraint(self, sharding: Any, dim: int) -> Any:
        """Returns a constraint on the examples of one group: the axes of their dim split the groups."""
        entries = [*sharding.spec, *(None,) * (dim + 1 - len(sharding.spec))]
        axes, entries[dim] = entries[dim], None
        axes = (axes,) if isinstance(axes, str) else axes
        if axes and axes is not PartitionSpec.UNCONSTRAINED:
            size = math.prod(sharding.mesh.shape[axis] for axis in axes)
            self.group_axes[tuple(axes)] = self.position.group_count % size == 0
        return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)

    def nested(
        self, equation: Any, other: Any, nested: tuple[BodyFacts, ...], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Runs the bodies of a loop, of branches or of a checkpoint for the part."""
        params, loop = equation.params, Loop.of(equation)

        def run_body(body: BodyFacts, *inputs: Any) -> list[Any]:
            return self.body(body, inputs, body.outputs)

        runs = [functools.partial(run_body, body) for body in nested]
        if is_cond(equation):
            return lax.switch(operands[0], runs, *operands[1:])
        if loop is None:
            return jax.checkpoint(runs[0], prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)
        body, *tests = nested
        requested = [*body.inputs[loop.carry_inside], *body.outputs[loop.carry_count :]]

        def run(carry: Sequence[Any], pieces: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.body(body, [*operands[loop.consts], *carry, *pieces], requested)
            return _like(carry, results[: loop.carry_count]), results[loop.carry_count :]

        start = list(operands[loop.carry])
        if tests:
            return lax.while_loop(
                lambda carry: runs[1](*operands[loop.test_consts], *carry)[0], lambda carry: run(carry, ())[0], start
            )
        length = part_params(equation, other, self.counts)["length"]
        carry, stacked = lax.scan(run, start, list(operands[loop.pieces]), length, params["reverse"], params["unroll"])
        return [*carry, *stacked]


@final
@attrs.frozen(eq=False)
class Demands:
    """The arrays that a run has to compute."""

    equations: tuple[frozenset[Variant], ...]
    """The variants in which each equation runs."""
    inputs: tuple[Demand, ...]
    """The arrays that no equation computes: inputs of the body, and arrays that are computed before the parts."""


def demands_of(body: BodyFacts, outputs: Sequence[tuple[Any, Variant]], before: Collection[Demand]) -> Demands:
    """Finds what has to run for some outputs. What is in `before` is at hand."""
    demands: dict[Demand, None] = {}

    def demand(var: Any, variant: Variant) -> None:
        if not isinstance(var, Constant):
            demands[var, variant] = None
            # What the part does not compute by itself is sliced.
            is_slice = variant == "part" and body.facts[var].form == "examples" and not body.facts[var].is_own
            if is_slice and (var, variant) not in before:
                demands[var, "whole"] = None

    for var, variant in outputs:
        demand(var, variant)
    runs: list[frozenset[Variant]] = []
    # Equations are read backwards: all that need a result come before what computes it.
    for equation in reversed(body.pair.whole.eqns):
        facts = [body.fact(var) for var in equation.invars]
        variants: dict[Variant, None] = {}
        for var in equation.outvars:
            fact = body.facts[var]
            if (var, "whole") in demands and (var, "whole") not in before:
                variants["whole" if can_be_whole(facts) else "part"] = None
            is_own = fact.is_own or fact.form == "sum"
            if (var, "part") in demands and (var, "part") not in before and is_own:
                variants["part"] = None
        for variant in variants:
            for var, fact in zip(equation.invars, facts, strict=True):
                demand(var, "whole" if variant == "whole" else _variant(fact))
        runs.append(frozenset(variants))
    computed = {var for equation in body.pair.whole.eqns for var in equation.outvars}
    inputs = tuple(key for key in demands if key in before or key[0] not in computed)
    return Demands(tuple(reversed(runs)), inputs)


def matched_calls(whole: ClosedJaxpr, part: ClosedJaxpr, counts: Counts) -> dict[int, Any]:
    """Finds, for the ids of the whole's equations that have derivatives of their own, the part's equations."""
    calls, others = list(_closed_calls(whole)), list(_closed_calls(part))
    matches = {}
    # The programs may differ: that is seen below, by what has no match.
    for equation, other in zip(calls, others, strict=False):
        pairs = zip(equation.invars, other.invars, strict=False)
        sizes = (each for pair in pairs for each in zip(*(var.aval.shape for var in pair), strict=False))
        is_alike = equation.primitive is other.primitive and len(equation.invars) == len(other.invars)
        if is_alike and all(counts.part_size(*each) == each[1] for each in sizes):
            matches[id(equation)] = other
    if not len(matches) == len(calls) == len(others):
        first = next(call for call in (*calls, *others) if id(call) not in matches)
        raise MicrobatchError(
            f"the program for {counts.part} examples has other functions with derivatives of their own than that for "
            f"{counts.whole}, such as {name_of_step(first)}"
        )
    return matches


def _closed_calls(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    for equation in open_jaxpr(program).eqns:
        if InlinedCall.of(equation) is not None and not is_checkpoint(equation):
            yield equation
        else:
            for body in bodies_of(equation):
                yield from _closed_calls(body.program)


def _variant(fact: Fact, actual: Fact | None = None) -> Variant:
    """The variant in which an array goes on: a shared array, or a zero that sums start from, is the whole's."""
    if fact.form == "sum" and actual is not None and actual.form == "shared":
        return "whole"
    return "part" if fact.form in ("examples", "sum") else "whole"


def _like(carry: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns results with the dtypes of what went in: constants in programs have no weak types."""
    return [
        result if value.dtype == result.dtype else lax.convert_element_type(result, value.dtype)
        for value, result in zip(carry, results, strict=True)
    ]
