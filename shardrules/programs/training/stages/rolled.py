"""Layers that a loop of Python calls, as one loop over stacked parameters: what stages share.

The traced program has such layers one after another, as a run of equal segments. What differs between them are the
arrays that they read: the weights of each, and what the one before has computed.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from shardrules.programs.compiling.model_flops import flops_of
from shardrules.programs.jaxprs.equality import equal_params, literal_value
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.repeats import EqualSegments, find_runs
from shardrules.programs.jaxprs.rewrite import reading, replaced
from shardrules.programs.jaxprs.segments import nbytes_of, segment_program, struct
from shardrules.programs.jaxprs.walk import reads
from shardrules.programs.training.examples.derivatives import pulled_back


def rolled(program: ClosedJaxpr) -> ClosedJaxpr | None:
    """Returns a program with a run of equal segments as a loop, the run that has most of its FLOPs; `None` if no run
    can be one.

    ```python
    from shardrules.programs.training.stages.rolled import rolled

    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    program = rolled(jax.make_jaxpr(layers)([jnp.ones((4, 4))] * 6, jnp.ones((8, 4))))
    assert program.jaxpr.eqns[-1].params["length"] == 6
    ```
    """
    body = program.jaxpr

    flops = [flops_of(equation) for equation in body.eqns]
    runs = find_runs(body, flops, as_loops=True)
    for run in sorted(runs, key=lambda run: run.repeats * sum(flops[run.start :][: run.length]), reverse=True):
        layers = _Layers.of(body, run)
        if layers is not None:
            return layers.rolled(program)
    return None


_Column = tuple[Any, ...]
"""The entries of all segments in one place: an operand of an equation, or a result."""


@final
@attrs.frozen(eq=False)
class _Layers:
    """A run of equal segments of a program."""

    body: Jaxpr
    run: EqualSegments
    first: Sequence[int]
    """The equations of a segment, by index, that are computed for all segments before the loop."""

    @classmethod
    def of(cls, body: Jaxpr, run: EqualSegments) -> "_Layers | None":
        """The layers of a run, if all equations that differ between segments can be computed before."""
        layers = cls(body, run, ())
        different = [index for index in range(run.length) if not _is_same(layers.equations(index))]
        free = layers.free()
        if any(index not in free for index in different):
            return None
        # Of stacked weights each stage gets its layers' weights, where they are taken apart before the loop.
        literals = (index for index in free if layers.has_other_literals(index) and not layers.grows(index))
        first = dict.fromkeys((*different, *literals))
        for index in reversed(range(run.length)):
            if index in first:
                first.update(dict.fromkeys(layers.producers(index)))
        layers = cls(body, run, sorted(first))
        has_effects = any(equation.effects for equation in body.eqns[run.start : layers.run.stop])
        # Without arrays of their own, such as weights, there is nothing to put in stages.
        return None if has_effects or layers.inputs is None or not layers.inputs.pieces else layers

    @property
    def rest(self) -> list[int]:
        return [index for index in range(self.run.length) if index not in self.first]

    def equations(self, index: int) -> list[Any]:
        return list(self.body.eqns[self.run.start + index : self.run.stop : self.run.length])

    def columns(self, index: int) -> Iterator[_Column]:
        return zip(*(equation.invars for equation in self.equations(index)), strict=True)

    def has_other_literals(self, index: int) -> bool:
        """Segments have other constants in an equation."""
        return any(isinstance(column[0], Literal) and not _is_one_value(column) for column in self.columns(index))

    def grows(self, index: int) -> bool:
        """An equation computes more than the largest array that it reads."""
        equation = self.equations(index)[0]
        results, operands = ([nbytes_of(var.aval) for var in side] for side in (equation.outvars, equation.invars))
        return sum(results) > max(operands, default=0)

    @functools.cached_property
    def sources(self) -> dict[Any, tuple[int, int, int]]:
        """For what segments compute: the segment, the index of its equation there and of the result."""
        return {
            var: (segment, index, position)
            for index in range(self.run.length)
            for segment, equation in enumerate(self.equations(index))
            for position, var in enumerate(equation.outvars)
        }

    def source(self, var: Any) -> tuple[int, int, int] | None:
        """The place at which an operand is computed in the loop; `None` if it is computed before."""
        source = None if isinstance(var, Literal) else self.sources.get(var)
        return None if source is None or source[1] in self.first else source

    def producers(self, index: int) -> Iterator[int]:
        """The equations of a segment that compute operands of another."""
        for column in self.columns(index):
            source = self.source(column[0])
            if source is not None and source[0] == 0:
                yield source[1]

    def free(self) -> dict[int, None]:
        """The equations that need nothing of other segments."""
        free = dict[int, None]()
        for index in range(self.run.length):
            sources = [(each, self.source(var)) for column in self.columns(index) for each, var in enumerate(column)]
            if all(source is None or (source[0] == each and source[1] in free) for each, source in sources):
                free[index] = None
        return free

    @functools.cached_property
    def inputs(self) -> "_Inputs | None":
        """The inputs of the loop; `None` if segments read others than the one before, or not in the same way."""
        inputs = _Inputs()
        for index in self.rest:
            for column in self.columns(index):
                sources = [self.source(var) for var in column]
                if sources[0] is not None and sources[0][0] == 0:
                    continue  # computed in the same segment, in all of them alike
                if sources == [None] * len(column):
                    kind = inputs.consts if _is_one_value(column) else inputs.pieces
                    kind.setdefault(_key(column), column)
                    continue
                following = {source and source[1:] for source in sources[1:]}
                before = [source and source[0] for source in sources[1:]]
                result = sources[1]
                if sources[0] is not None or result is None or len(following) > 1:
                    return None
                # The first segment has to read arrays of the same shape and dtype as the others.
                types = {(var.aval.shape, var.aval.dtype) for var in column}
                if before != [*range(len(before))] or len(types) > 1:
                    return None
                inputs.carry.setdefault(_key(column), (column[0], result[1:]))
        return inputs

    def rolled(self, program: ClosedJaxpr) -> ClosedJaxpr:
        """The program, whose body this is, with the loop."""
        body, inputs = self.body, self.inputs
        assert inputs is not None, "layers of a loop have inputs"
        starts = range(self.run.start, self.run.stop, self.run.length)
        before = [body.eqns[start + index] for start in starts for index in self.first]
        after = body.eqns[self.run.stop :]
        read = {*reads(after)}
        read |= {var for var in body.outvars if not isinstance(var, Literal)}
        rows = dict.fromkeys(
            (index, position) for var, (_, index, position) in self.sources.items() if var in read and self.source(var)
        )
        # A result may go round in several places: reversed, the first of them is kept.
        last = {result: place for place, (_, result) in reversed([*enumerate(inputs.carry.values())])}
        results = {result: self._results(result) for result in rows}
        # What only the last segment hands on is what the loop ends with.
        ends = [result for result, column in results.items() if result in last and not read & {*column[:-1]}]
        stacked = [result for result in results if result not in ends]
        columns = *inputs.consts.values(), *((first,) for first, _ in inputs.carry.values()), *inputs.pieces.values()
        operands = (var for column in columns for var in column)
        variables = list(dict.fromkeys(var for var in operands if not isinstance(var, Literal)))

        def run(*values: Any) -> list[Any]:
            carry, ys = self._loop(inputs, dict(zip(variables, values, strict=True)), stacked)
            pieces = [array[index] for array in ys for index in range(self.run.repeats)]
            return [*(carry[last[result]] for result in ends), *pieces]

        traced = flattened(jax.make_jaxpr(run)(*map(struct, variables)))
        outvars = [results[result][-1] for result in ends] + [var for result in stacked for var in results[result]]
        inside = dict(zip(traced.jaxpr.invars, variables, strict=True))
        computed = {var: replaced(result, inside) for var, result in zip(outvars, traced.jaxpr.outvars, strict=True)}
        equations = [*body.eqns[: self.run.start], *before, *reading(traced.jaxpr.eqns, inside)]
        equations += reading(after, computed)
        rolled = body.replace(
            constvars=[*body.constvars, *traced.jaxpr.constvars],
            eqns=equations,
            outvars=[replaced(var, computed) for var in body.outvars],
        )
        return ClosedJaxpr(rolled, [*program.consts, *traced.consts])

    def _results(self, result: tuple[int, int]) -> _Column:
        index, position = result
        return tuple(equation.outvars[position] for equation in self.equations(index))

    def _loop(
        self, inputs: "_Inputs", values: dict[Any, Any], stacked: Sequence[tuple[int, int]]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the layers: what goes from one to the next at the end, and the stacked results of all."""

        def read(var: Any) -> Any:
            return jnp.asarray(var.val, struct(var).dtype) if isinstance(var, Literal) else values[var]

        layer = jaxpr_as_fun(ClosedJaxpr(self._layer(inputs, stacked), ()))
        consts = [read(column[0]) for column in inputs.consts.values() if not isinstance(column[0], Literal)]
        pieces = [jnp.stack([*map(read, column)]) for column in inputs.pieces.values()]
        carry = [read(first) for first, _ in inputs.carry.values()]

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = layer(*consts, *carry, *row)
            return results[: len(carry)], results[len(carry) :]

        return lax.scan(step, carry, pieces, self.run.repeats)

    def _layer(self, inputs: "_Inputs", stacked: Sequence[tuple[int, int]]) -> Jaxpr:
        """The program of one segment: from constants, what goes round, and pieces, to what goes round and results."""
        columns = [(key, column[0]) for key, column in inputs.consts.items() if not isinstance(column[0], Literal)]
        columns += [(key, first) for key, (first, _) in inputs.carry.items()]
        columns += [(key, column[0]) for key, column in inputs.pieces.items()]
        variables = {key: Var(var.aval) for key, var in columns}
        equations = []
        for index in self.rest:
            equation = self.equations(index)[0]
            operands = [
                variables.get(_key(column), column[0]) if self.source(column[0]) is None else column[0]
                for column in self.columns(index)
            ]
            equations.append(equation.replace(invars=operands))
        results = [result for _, result in inputs.carry.values()]
        outputs = [self._results(result)[0] for result in (*results, *stacked)]
        return segment_program(equations, outputs).replace(invars=[*variables.values()])


@final
@attrs.define(eq=False)
class _Inputs:
    """The inputs of the loop, by key of the columns."""

    consts: dict[Any, _Column] = attrs.field(factory=dict)
    """The arrays that all segments share."""
    carry: dict[Any, tuple[Any, tuple[int, int]]] = attrs.field(factory=dict)
    """The arrays that the first segment reads, and the result of a segment that the next reads instead."""
    pieces: dict[Any, _Column] = attrs.field(factory=dict)
    """The arrays that each segment has of its own."""


def _key(column: _Column) -> Any:
    return tuple(literal_value(var) if isinstance(var, Literal) else var for var in column)


def _is_one_value(column: _Column) -> bool:
    return len({*_key(column)}) == 1


def _is_same(equations: Sequence[Any]) -> bool:
    """Equations compute the same from their operands, and have the same derivative."""
    first, *others = equations
    return all(equal_params(first, each, _derivative) for each in others)


def _derivative(equation: Any) -> ClosedJaxpr | None:
    """An equation and its gradient as a program; `None` where it cannot be traced by itself, and is like no other.

    Rules may close over what is traced around them.
    """
    try:
        program = pulled_back(equation, with_results=True)
    except Exception:  # noqa: BLE001  a rule of the user's may raise anything
        return None
    return None if any(isinstance(const, Tracer) for const in program.consts) else program
