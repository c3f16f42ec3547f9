"""The proof that a loss is a sum over examples, read off its program.

Every array gets a fact (see `facts`), equation by equation. Loops are read until what goes round in them is certain.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
from jax.extend.core import ClosedJaxpr, Literal, Var

from shardrules.core.errors import MicrobatchError
from shardrules.programs.jaxprs.bodies import Loop, branches_of
from shardrules.programs.jaxprs.calls import InlinedCall, has_custom_vjp, is_checkpoint, is_cond
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.training.examples.derivatives import cotangent_facts, pulled_back, wrong_cotangent
from shardrules.programs.training.examples.facts import (
    EACH_ROUND,
    Fact,
    RefusalError,
    inside,
    joined,
    literal_fact,
    name_of_step,
    refuse_misfits,
    refused,
    shared_fact,
)
from shardrules.programs.training.examples.pairs import Counts, Pair, equal_literals
from shardrules.programs.training.examples.rules import examples_rule, own_columns, uses_sums

_MOST_ROUNDS = 20
"""The most readings of a loop. Each adds to the certain facts of an array, and most loops take two."""


@final
@attrs.frozen(eq=False)
class BodyFacts:
    """The facts of a body: the program, or what is inside a loop, a branch or a checkpoint."""

    pair: Pair
    inputs: tuple[Fact, ...]
    outputs: tuple[Fact, ...]
    facts: Mapping[Var, Fact]
    nested: Mapping[int, tuple["BodyFacts", ...]]
    """For the index of each equation with bodies, what is known in them; a loop has its condition last."""
    is_changed: bool
    """A part of the batch runs other equations than the trace has."""

    def fact(self, var: Any) -> Fact:
        return _fact_of(var, self.facts)


def _fact_of(var: Any, facts: Mapping[Var, Fact]) -> Fact:
    return literal_fact(var) if isinstance(var, Literal) else facts[var]


def can_be_whole(operands: Sequence[Fact]) -> bool:
    """The program of the whole batch can compute an equation beside the part's."""
    # What is trained from examples would be the forward pass of the whole batch.
    mixes = any(fact.is_trained for fact in operands) and any(fact.from_batch for fact in operands)
    return not mixes and all(fact.is_whole for fact in operands)


def read_examples(pair: Pair, inputs: Sequence[Fact], counts: Counts) -> BodyFacts:
    """Finds the facts of a program.

    ```python
    from shardrules.programs.training.examples.facts import Fact
    from shardrules.programs.training.examples.pairs import Counts, Pair
    from shardrules.programs.training.examples.proof import read_examples

    whole, part = (jax.make_jaxpr(lambda w, x: jnp.sum(x @ w))(jnp.ones(4), jnp.ones((n, 4))) for n in (8, 2))
    counts = Counts(8, 2, 2)
    weight, rows = Fact("shared", is_trained=True, is_whole=True), Fact("examples", 0, from_batch=True, is_whole=True)
    assert read_examples(Pair.of(whole, part, counts), (weight, rows), counts).outputs[0].form == "sum"
    ```
    """
    return _Reader(counts).body(pair, inputs, True)


_Reading: TypeAlias = tuple[list[Fact], tuple[BodyFacts, ...]]
"""The facts of the results of an equation, and of its bodies."""


@final
@attrs.frozen(eq=False)
class _Reader:
    counts: Counts
    reads_derivatives: bool = True
    """Functions with derivatives of their own are read with these: not in derivatives, which run once."""

    def body(self, pair: Pair, inputs: Sequence[Fact], is_top: bool = False) -> BodyFacts:
        facts: dict[Any, Fact] = dict(zip(pair.whole.invars, inputs, strict=True))
        nested: dict[int, tuple[BodyFacts, ...]] = {}
        constants: Any = zip(pair.whole.constvars, pair.trace.constvars, strict=True)
        for var, other in constants:
            facts[var] = shared_fact(var.aval.shape, other.aval.shape, self.counts, False, False)
        is_changed = any(facts[var].form == "examples" for var in pair.whole.constvars)
        for index, (equation, other) in enumerate(zip(pair.whole.eqns, pair.trace.eqns, strict=True)):
            operands = [_fact_of(var, facts) for var in equation.invars]
            results, bodies = self.equation(equation, other, operands)
            why = pair.differences.get(index)
            if why:
                # Without the trace of a part, only the whole is certain.
                wholes = [attrs.evolve(fact, is_own=False, index_columns=()) for fact in results]
                results, bodies = [fact if fact.is_whole else refused(why) for fact in wholes], ()
            if bodies:
                nested[index] = bodies
            outputs: Any = zip(equation.outvars, other.outvars, results, strict=True)
            for var, result_var, fact in outputs:
                # What trains nothing can be computed for the whole batch before its parts.
                if is_top and not fact.is_trained and not fact.is_whole:
                    seen = shared_fact(var.aval.shape, result_var.aval.shape, self.counts, False, True)
                    fact = attrs.evolve(fact, is_whole=True) if fact.form == "examples" else seen
                facts[var] = self.checked(equation, var, result_var, fact)
            # A body with slices or other literals is not the same for a part as for the whole.
            is_slice = any(fact.form == "examples" and not fact.is_own for fact in results)
            is_changed |= is_slice or not equal_literals(equation.invars, other.invars)
            is_changed |= any(body.is_changed for body in bodies) or bool(own_columns(equation, operands, self.counts))
        leaving = tuple(_fact_of(var, facts) for var in pair.whole.outvars)
        return BodyFacts(pair, tuple(inputs), leaving, facts, nested, is_changed)

    def checked(self, equation: Any, var: Any, other: Any, fact: Fact) -> Fact:
        """The fact, if the shapes of the whole and of the trace agree with it."""
        if fact.form != "examples" or fact.dim is EACH_ROUND:
            return fact
        seen = shared_fact(var.aval.shape, other.aval.shape, self.counts, False, False)
        if seen.form == "examples" and seen.dim == fact.dim:
            return fact
        return refused(f"{name_of_step(equation)} has other shapes in a part of the batch", equation)

    def equation(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        for fact in operands:
            if fact.form == "refused":
                return [fact] * len(equation.outvars), ()
        # The order matters: what the whole batch can compute is never refused, whatever the equation does.
        if can_be_whole(operands):
            return self.computed_whole(equation, other, operands)
        bodies = self.bodies_of(equation)
        if bodies is None or not any(fact.form == "examples" for fact in operands):
            if any(fact.form in ("sum", "result") for fact in operands):
                return [uses_sums(equation, operands)] * len(equation.outvars), ()
            return examples_rule(equation, operands, self.counts), ()
        try:
            refuse_misfits(equation, operands, self.counts)
            if any(fact.form == "result" for fact in operands):
                raise RefusalError(f"{name_of_step(equation)} uses a result of the whole batch for single examples")
            return bodies(equation, other, operands)
        except RefusalError as error:
            return [refused(error.reason, equation, error.pieces)] * len(equation.outvars), ()
        except MicrobatchError as error:
            return [refused(str(error), equation)] * len(equation.outvars), ()

    def computed_whole(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        """The facts of results that can be computed for the whole batch, and for some by parts as well."""
        is_trained = any(fact.is_trained for fact in operands)
        from_batch = any(fact.from_batch for fact in operands)
        wholes = [
            shared_fact(var.aval.shape, result.aval.shape, self.counts, is_trained, from_batch)
            for var, result in zip(equation.outvars, other.outvars, strict=True)
        ]
        if not any(fact.form == "examples" for fact in operands):
            if is_trained and self.reads_derivatives and has_custom_vjp(equation):
                return [refused(_shared_derivative(equation), equation)] * len(equation.outvars), ()
            return [self.started(equation, fact, operands) for fact in wholes], ()
        if self.bodies_of(equation) is not None:
            # The bodies of what is not trained are read only where an example reaches it: else it is cheap to repeat.
            results, bodies = (
                self.equation(equation, other, [inside(fact) for fact in operands]) if from_batch else ((), ())
            )
        else:
            results, bodies = examples_rule(equation, operands, self.counts), ()
        merged = [
            attrs.evolve(result, is_whole=True, is_trained=is_trained)
            if result.form == "examples" and result.dim == whole.dim and whole.form == "examples"
            else whole
            for result, whole in zip(results or wholes, wholes, strict=True)
        ]
        # An equation runs once: either all of its results are computed by parts, or all are slices of the whole.
        all_own = all(fact.is_own for fact in merged if fact.form == "examples")
        return [attrs.evolve(fact, is_own=fact.is_own and all_own) for fact in merged], bodies if all_own else ()

    def started(self, equation: Any, fact: Fact, operands: Sequence[Fact]) -> Fact:
        """The fact of a result for which no operand has examples: it may have some by its shape."""
        name, shape = equation.primitive.name, equation.outvars[0].aval.shape
        if fact.form == "examples" and name == "iota":
            is_position = equation.params["dimension"] == fact.dim
            return attrs.evolve(fact, index_columns=(-1,) if is_position else (), index_size=shape[fact.dim or 0])
        if name == "broadcast_in_dim":
            # The same for each example: a part repeats it less often.
            return attrs.evolve(fact, is_own=not fact.is_misfit, is_zero=operands[0].is_zero)
        if name in ("convert_element_type", "reshape", "squeeze", "neg"):
            return attrs.evolve(fact, is_zero=operands[0].is_zero)
        return fact

    def bodies_of(self, equation: Any) -> Callable[..., _Reading] | None:
        """The method that reads what is inside an equation; `None` where nothing is."""
        if Loop.of(equation) is not None:
            return self.loop
        if is_cond(equation):
            return self.branches
        if is_checkpoint(equation):
            return self.checkpoint
        return None if InlinedCall.of(equation) is None else self.call

    def checkpoint(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        pair = Pair.of(equation.params["jaxpr"], other.params["jaxpr"], self.counts)
        body = self.body(pair, [inside(fact) for fact in operands])
        return self.left(equation, body.outputs), (body,)

    def call(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        """A function with derivatives of its own: it runs as it is."""
        calls = [call for call in map(InlinedCall.of, (equation, other)) if call is not None]
        first, second = (
            flattened(call.jaxpr if isinstance(call.jaxpr, ClosedJaxpr) else ClosedJaxpr(call.jaxpr, ()))
            for call in calls
        )
        entering = [inside(operands[index]) for index in calls[0].operands]
        body = self.body(Pair.of(first, second, self.counts), entering)
        if body.is_changed:
            raise RefusalError(
                f"{name_of_step(equation)} has derivatives of its own, and uses what depends on the number of examples"
            )
        results = self.left(equation, body.outputs)
        is_rule = self.reads_derivatives and has_custom_vjp(equation)
        # A custom derivative is run for parts and its cotangents are added up, which is right if it is linear in them:
        # nothing says so where no example is in it.
        if is_rule and any(fact.is_trained and fact.form == "shared" for fact in results):
            raise RefusalError(_shared_derivative(equation))
        has_gradient = any(fact.is_trained and fact.form in ("examples", "sum") for fact in results)
        if has_gradient and self.reads_derivatives:
            why = self.derivative(equation, other, [inside(fact) for fact in operands], results)
            if why:
                raise RefusalError(f"the derivative of {name_of_step(equation)}: {why}")
        return results, ()

    def derivative(self, equation: Any, other: Any, operands: Sequence[Fact], results: Sequence[Fact]) -> str:
        """The reason why the derivative of a function uses several examples at once; empty if it does not."""
        pair = Pair.of(pulled_back(equation), pulled_back(other), self.counts)
        reader = attrs.evolve(self, reads_derivatives=False)
        body = reader.body(pair, cotangent_facts(equation, operands, results))
        if body.is_changed:
            return "it uses what depends on the number of examples"
        return wrong_cotangent(equation, operands, body.outputs)

    def left(self, equation: Any, outputs: Sequence[Fact]) -> list[Fact]:
        """The facts of results as they leave a body."""
        return [
            refused(f"{name_of_step(equation)} computes with a sum over the examples", equation)
            if fact.form == "result"
            else refused(f"{name_of_step(equation)} makes an array whose size is that of the whole batch", equation)
            if fact.is_misfit
            # Inside of a body the whole is not at hand, outside neither.
            else attrs.evolve(fact, is_whole=fact.form == "shared", is_own=True, index_columns=(), is_false=False)
            for fact in outputs
        ]

    def branches(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        predicate, *rest = operands
        if predicate.form != "shared" and not (predicate.form == "examples" and predicate.dim is EACH_ROUND):
            raise RefusalError("cond: which branch runs depends on the examples")
        branches = [
            self.body(Pair.of(branch, partner, self.counts), [inside(fact) for fact in rest])
            for branch, partner in zip(branches_of(equation), branches_of(other), strict=True)
        ]
        results = self.left(equation, branches[0].outputs)
        for branch in branches[1:]:
            facts = self.left(equation, branch.outputs)
            results = [joined(a, b, "a branch", equation) for a, b in zip(results, facts, strict=True)]
        # In a loop over examples another branch may run in each round, so that shared results differ by round.
        if predicate.form == "examples":
            results = [
                attrs.evolve(fact, form="examples", dim=EACH_ROUND, is_whole=False, is_own=True)
                if fact.form == "shared"
                else fact
                for fact in results
            ]
        results = [attrs.evolve(fact, is_trained=fact.is_trained or predicate.is_trained) for fact in results]
        return results, tuple(branches)

    def loop(self, equation: Any, other: Any, operands: Sequence[Fact]) -> _Reading:
        loop, partner = Loop.of(equation), Loop.of(other)
        assert loop is not None, "it is one"
        assert partner is not None, "paired equations are of one primitive"
        entering = [inside(fact) for fact in operands]
        slices = [self.round_piece(fact) for fact in entering[loop.pieces]]
        over_examples = any(fact.form == "examples" and fact.dim == 0 for fact in entering[loop.pieces])
        if loop.length != partner.length and not over_examples:
            raise RefusalError("scan runs once for each example, and reads none")
        if over_examples and any(fact.form in ("examples", "sum") for fact in entering[: loop.pieces.start]):
            raise RefusalError("scan reads all examples for each")
        pair = Pair.of(loop.body, partner.body, self.counts)
        carry = entering[loop.carry]
        if over_examples:
            # Each round adds its example's to a sum that starts from zero, or the loop is refused.
            carry = [attrs.evolve(fact, form="sum", is_whole=False) if fact.is_zero else fact for fact in carry]
        body, carry = self.rounds(equation, pair, entering[loop.consts], carry, slices)
        if body is None and over_examples:
            raise RefusalError("scan carries values from example to example")
        if body is None:
            return carry[:1] * len(equation.outvars), ()
        if loop.test is not None:
            test = self.body(Pair.of(loop.test, partner.test, self.counts), [*entering[loop.test_consts], *carry])
            is_each = test.outputs[0].form == "examples" and test.outputs[0].dim is EACH_ROUND
            if test.outputs[0].form != "shared" and not is_each:
                raise RefusalError("while: the number of rounds depends on several examples")
            return list(carry), (body, test)
        results = list(carry)
        for fact in self.left(equation, body.outputs[loop.carry_count :]):
            if over_examples:
                results.append(self.stacked(equation, fact))
            else:
                dim = fact.dim + 1 if isinstance(fact.dim, int) else fact.dim
                results.append(attrs.evolve(fact, dim=dim))
        if over_examples:
            results[: len(carry)] = [
                self.carried(equation, fact, body, loop.const_count + index, index) for index, fact in enumerate(carry)
            ]
            # What one carry brings from example to example may be in all results.
            wrong = [fact for fact in results[: len(carry)] if fact.form == "refused"]
            if wrong:
                return wrong[:1] * len(results), ()
        return results, (body,)

    def round_piece(self, fact: Fact) -> Fact:
        """The fact of what a round reads of an array."""
        if fact.form != "examples" or fact.dim is EACH_ROUND:
            return fact
        return attrs.evolve(fact, dim=fact.dim - 1 if fact.dim else EACH_ROUND, index_columns=())

    def stacked(self, equation: Any, fact: Fact) -> Fact:
        """The fact of what a loop over examples stacks, one piece for each."""
        if fact.form == "examples" and fact.dim is EACH_ROUND:
            return attrs.evolve(fact, dim=0)
        if fact.form == "refused":
            return fact
        return refused("scan stacks, for each example, what is computed from others", equation)

    def carried(self, equation: Any, fact: Fact, body: BodyFacts, input_index: int, index: int) -> Fact:
        """The fact of what a loop over examples carries: sums, or what no round changes."""
        start, end = body.pair.whole.invars[input_index], body.pair.whole.outvars[index]
        is_sum = fact.form == "sum" and _is_added_to(body, start, end)
        if is_sum or fact.form == "refused" or (fact.form == "shared" and end is start):
            return fact
        return refused("scan carries values from example to example", equation)

    def rounds(
        self, equation: Any, pair: Pair, consts: Sequence[Fact], carry: Sequence[Fact], slices: Sequence[Fact]
    ) -> tuple[BodyFacts | None, list[Fact]]:
        """Reads the body of a loop until what goes round is certain. Without a body, what goes round is refused."""
        facts = list(carry)
        for _ in range(_MOST_ROUNDS):
            body = self.body(pair, [*consts, *facts, *slices])
            ends = self.left(equation, body.outputs[: len(facts)])
            merged = [joined(first, end, "the carry", equation) for first, end in zip(facts, ends, strict=True)]
            for fact in merged:
                if fact.form == "refused":
                    return None, [fact] * max(1, len(facts))
            merged = [inside(fact) for fact in merged]
            if merged == facts:
                return body, facts
            facts = merged
        raise AssertionError("each reading of a loop adds to what is certain of it")


def _is_added_to(body: BodyFacts, start: Any, end: Any) -> bool:
    """A round only adds to the carried value: any other use would weigh examples by their order."""
    producers = {var: equation for equation in body.pair.whole.eqns for var in equation.outvars}
    while end is not start:
        equation = producers.get(end)
        name = None if equation is None else equation.primitive.name
        if equation is None or name not in ("add", "add_any", "sub", "convert_element_type", "copy"):
            return False
        sums = [var for var in equation.invars if body.fact(var).form == "sum"]
        # A carried value that is subtracted would change its sign in each round.
        if len(sums) != 1 or (name == "sub" and equation.invars[0] is not sums[0]):
            return False
        end = sums[0]
    return True


def _shared_derivative(equation: Any) -> str:
    """The reason why a function of trained arrays alone is refused: its derivative need not be linear, as with fp8
    scales."""
    return (
        f"{name_of_step(equation)} has derivatives of its own for trained arrays: they would be computed for parts of "
        "the batch, and added up"
    )
