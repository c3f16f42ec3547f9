"""Gradients of a loss by microbatches, reduced once.

The batch is `(groups, microbatches, examples)`, in this order: data that is split over the groups stays where it is.
The gradient of each group is its own, by `vmap`, and is added up over the microbatches, by `scan`; one sum over the
groups ends it. With groups split over devices that sum is all that they exchange.

Without groups, gradients are reduced for each microbatch, and none of a group is in memory. A microbatch then takes
one example of every run of `microbatches`, so that each device has examples of all microbatches.

With stages, microbatches are computed at the same time, each by another group of layers (see `stages.run`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from shardrules.core.errors import MicrobatchError, shortened
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.segments import struct
from shardrules.programs.jaxprs.walk import without_dead_code
from shardrules.programs.training.accumulation import accumulation_dtype
from shardrules.programs.training.examples.facts import Fact
from shardrules.programs.training.examples.pairs import Counts, Pair
from shardrules.programs.training.examples.proof import BodyFacts, read_examples
from shardrules.programs.training.examples.replay import Demand, Position, Replay, Variant, demands_of, matched_calls
from shardrules.programs.training.examples.tail import Tail, cut
from shardrules.programs.training.loss import TracedLoss
from shardrules.programs.training.stages.layers import with_layer_loop
from shardrules.programs.training.stages.run import StagedProgram

Transform: TypeAlias = Callable[[ClosedJaxpr], ClosedJaxpr]

GradientFunction: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, list[Any], list[Any]]]
"""From trainable, fixed and batched arrays to the loss, the arrays of aux and the gradients of the trainable arrays."""


def accumulated(
    trace: TracedLoss,
    microbatches: int = 1,
    groups: int = 1,
    dtype: Any = None,
    transform: Transform | None = None,
    stages: int = 1,
    chunks: int = 1,
) -> GradientFunction:
    """Returns a function that computes a loss and its gradients by microbatches.

    Gradients add up in `dtype`, by default in float32 if they have fewer bits. With as many `groups` as devices that
    the batch is split over they are reduced once, without for each microbatch. `transform` rewrites the forward program
    of one microbatch. With `stages`, which divide the microbatches, groups of layers compute side by side, `chunks` of
    them in each stage. What is no sum over the examples is a `MicrobatchError`.

    ```python
    from shardrules.programs.training.loss import trace_loss
    from shardrules.programs.training.microbatches import accumulated

    w, x = jnp.arange(4.0), jnp.ones((8, 4))
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    value, _, (gradient,) = accumulated(trace_loss(loss, w, x), microbatches=4)([w], [], [x])
    assert jnp.allclose(gradient, jax.grad(loss)(w, x))
    ```
    """
    if microbatches == 1:
        return _plain(trace, transform)
    return SplitLoss.of(trace, microbatches, groups).gradient_function(dtype, transform, stages, chunks)


def forward_program(
    trace: TracedLoss, microbatches: int = 1, groups: int = 1, *, has_stages: bool = False
) -> ClosedJaxpr:
    """Returns the program that `accumulated` gives to its `transform`."""
    if microbatches == 1:
        return flattened(trace.jaxpr)
    split = SplitLoss.of(trace, microbatches, groups)
    return split.staged_forward if has_stages else split.forward


def _plain(trace: TracedLoss, transform: Transform | None) -> GradientFunction:
    program = flattened(trace.jaxpr)
    run = jaxpr_as_fun(program if transform is None else transform(program))

    def compute(trainable: Sequence[Any], fixed: Sequence[Any], batched: Sequence[Any]) -> Any:
        def loss(arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
            value, *aux = run(*arrays, *fixed, *batched)
            return value, aux

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(list(trainable))
        return value, aux, gradients

    return compute


@final
@attrs.frozen(eq=False)
class SplitLoss:
    """A loss as sums over examples: a program for each part of the batch, and what comes before and after them."""

    trace: TracedLoss
    microbatches: int
    runs: int
    """The runs of examples that a microbatch has: one for each group, or single examples."""
    by_group: bool
    """Each group has a part of its own in each microbatch."""
    group_axes: tuple[str, ...] | None
    """The axes that the user's constraints split the examples over, if these split the groups."""
    before: ClosedJaxpr
    """From the arguments to what trains nothing and is needed of the whole batch by each part."""
    forward: ClosedJaxpr
    """From trainable and fixed arrays, what comes before, the batched arrays of a part, and the indices of its group
    and microbatch, to its sums, and to the arrays of aux that have examples."""
    tail: Tail
    aux_dims: tuple[int | None, ...]
    """The dim of the examples in each array of aux; `None` where it is a result of the tail."""

    @classmethod
    def of(cls, trace: TracedLoss, microbatches: int, groups: int = 1) -> "SplitLoss":
        """Proves that a loss is a sum over its examples, cuts it at its sums, and replays it for a part of them."""
        if trace.batch_size % (microbatches * groups):
            text = f"{microbatches} microbatches" + (f" with {groups} groups each" if groups > 1 else "")
            raise MicrobatchError(f"{trace.name}: a batch of {trace.batch_size} examples does not divide into {text}")
        program, by_group = flattened(trace.jaxpr), groups > 1
        size = trace.batch_size // (microbatches * groups)
        runs, (counts, pair, calls), body = _proved(trace, program, size, microbatches, groups)
        outputs, aux = pair.whole.outvars[:1], pair.whole.outvars[1:]
        dims = tuple(_stacked_dim(body, var) for var in aux)
        sums = _sums(body)
        stacked = [var for var, dim in zip(aux, dims, strict=True) if dim is not None]
        outputs += [var for var, dim in zip(aux, dims, strict=True) if dim is None]
        tail = Tail.of(cut(program, sums, outputs), len(pair.whole.invars), trace.trainable_count)
        _check_linear(trace, tail)
        # What trains nothing and comes from the batch is computed before, where a part needs it of the whole batch.
        candidates: set[Demand] = {
            (var, "whole")
            for var, fact in body.facts.items()
            if fact.is_whole and fact.from_batch and not fact.is_trained
        }
        parts: list[tuple[Any, Variant]] = [(var, "part") for var in (*sums, *stacked)]
        needed = [var for var, variant in demands_of(body, parts, candidates).inputs if (var, variant) in candidates]
        group_axes: dict[tuple[str, ...], bool] = {}

        def run(group: Any, microbatch: Any, values: dict[Demand, Any]) -> list[Any]:
            position = Position(group if by_group else None, microbatch, runs, microbatches)
            return Replay(counts, position, calls, group_axes=group_axes).run(body, values, parts)

        shared_count = trace.trainable_count + trace.fixed_count
        shared, batched = pair.whole.invars[:shared_count], pair.whole.invars[shared_count:]
        forward = _forward_program(run, [*shared, *needed], batched, size)
        # Constraints that split examples over different axes leave the groups to the compiler.
        axes = next(iter(group_axes)) if list(group_axes.values()) == [True] else None
        return cls(trace, microbatches, runs, by_group, axes, cut(program, (), needed), forward, tail, dims)

    @property
    def sum_count(self) -> int:
        return len(self.tail.is_trained)

    @functools.cached_property
    def staged_forward(self) -> ClosedJaxpr:
        """The same as `forward`, with a loop for its layers."""
        return with_layer_loop(self.forward)

    @property
    def is_batched(self) -> tuple[bool, ...]:
        """The inputs of `forward` that are a microbatch's."""
        batched = self.trace.batched_count
        shared = len(self.forward.in_avals) - batched - 2
        return (*[False] * shared, *[True] * batched, False, True)

    def gradient_function(
        self, dtype: Any, transform: Transform | None, stages: int = 1, chunks: int = 1
    ) -> GradientFunction:
        """Returns the function that `accumulated` returns."""
        program = self.forward if stages == 1 else self.staged_forward
        program = program if transform is None else transform(program)
        forward: Callable[..., list[Any]] = jaxpr_as_fun(program)
        if stages > 1:
            staged = StagedProgram(program, self.is_batched, stages, self.microbatches, chunks, dtype)
            forward = staged.summed(self.sum_count)

        def compute(trainable: Sequence[Any], fixed: Sequence[Any], batched: Sequence[Any]) -> Any:
            arguments = [*trainable, *fixed, *batched]
            before = jaxpr_as_fun(self.before)(*arguments)
            # The loss is linear in its sums, so their weights are the same for all parts, and are taken at zeros.
            sums = self.forward.out_avals[: self.sum_count]
            weights = self.tail.coefficients(arguments, [jnp.zeros(aval.shape, aval.dtype) for aval in sums])

            def part(trainable: Sequence[Any], group: Any, microbatch: Any, examples: Sequence[Any]) -> Any:
                values = forward(*trainable, *fixed, *before, *examples, group, microbatch)
                sums, aux = values[: self.sum_count], values[self.sum_count :]
                # Sums that train nothing have no weight.
                trained = [value for value, flag in zip(sums, self.tail.is_trained, strict=True) if flag]
                terms = (jnp.sum(weight * value) for weight, value in zip(weights, trained, strict=True))
                return sum(terms, start=jnp.zeros(())), (sums, aux)

            if stages == 1:
                gradients, sums, aux = self.accumulate(part, trainable, batched, dtype)
            else:
                gradients, sums, aux = self.at_once(part, trainable, batched)
            value, *results = self.tail(arguments, sums)
            # Terms that no example reaches are the same in every part, so their gradients are added once.
            extra = self.tail.regularizer_gradients(arguments, sums)
            gradients = [
                (total if extra is None else total + extra[index].astype(total.dtype)).astype(array.dtype)
                for index, (total, array) in enumerate(zip(gradients, trainable, strict=True))
            ]
            stacked, single = iter(aux), iter(results)
            return value, [next(single) if dim is None else next(stacked) for dim in self.aux_dims], gradients

        return compute

    def accumulate(
        self, part: Callable[..., Any], trainable: Sequence[Any], batched: Sequence[Any], dtype: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the gradients and the sums over all parts, and the arrays of aux that have examples."""
        group, indices, pieces = self.parts(batched)
        first = list(trainable), group, indices[0], [piece[0] for piece in pieces]
        gradient, group_dims = self.by_groups(jax.grad(part, has_aux=True), first, 0)

        def add(total: Any, indexed: Any) -> tuple[Any, Any]:
            microbatch, examples = indexed
            gradients, (sums, aux) = gradient(list(trainable), group, microbatch, examples)
            return jax.tree.map(lambda old, new: old + new.astype(old.dtype), total, (gradients, sums)), aux

        gradient_shapes, (sum_shapes, _) = jax.eval_shape(gradient, *first)
        start = (
            [jnp.zeros(shape.shape, accumulation_dtype(shape.dtype, dtype)) for shape in gradient_shapes],
            [jnp.zeros(shape.shape, accumulation_dtype(shape.dtype)) for shape in sum_shapes],
        )
        (gradients, sums), aux = lax.scan(add, start, (indices, pieces))
        if self.by_group and dtype is None:  # devices send as many bytes as in the plain step
            gradients = [total.astype(shape.dtype) for total, shape in zip(gradients, gradient_shapes, strict=True)]
        gradients, sums = self.over_groups(gradients, group_dims, sums)
        sums = [total.astype(shape.dtype) for total, shape in zip(sums, sum_shapes, strict=True)]
        return gradients, sums, self.wholes(aux)

    def at_once(
        self, parts: Callable[..., Any], trainable: Sequence[Any], batched: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the same from a function of all microbatches, in which gradients add up."""
        arguments = list(trainable), *self.parts(batched)
        gradient, group_dims = self.by_groups(jax.grad(parts, has_aux=True), arguments, 1)
        gradients, (sums, aux) = gradient(*arguments)
        return *self.over_groups(gradients, group_dims, sums), self.wholes(aux)

    def parts(self, batched: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        group = jnp.arange(self.runs, dtype=jnp.int32) if self.by_group else jnp.int32(0)
        return group, jnp.arange(self.microbatches, dtype=jnp.int32), [self.pieces(array) for array in batched]

    def over_groups(
        self, gradients: Sequence[Any], dims: Sequence[int], sums: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the sums over the groups, if there are any."""
        if not self.by_group:
            return [*gradients], [*sums]
        # Not by `jnp.sum`, which would send few bits as float32.
        totals = [
            lax.reduce(total, np.zeros((), total.dtype), lax.add, (dim,))
            for total, dim in zip(gradients, dims, strict=True)
        ]
        return totals, [jnp.sum(total, 0, dtype=total.dtype) for total in sums]

    def wholes(self, aux: Sequence[Any]) -> list[Any]:
        dims = [dim for dim in self.aux_dims if dim is not None]
        return [self.whole(array, dim) for array, dim in zip(aux, dims, strict=True)]

    def by_groups(
        self, gradient: Callable[..., Any], arguments: Sequence[Any], group_dim: int
    ) -> tuple[Callable[..., Any], list[int]]:
        """Returns a gradient of each group, and the dims of the groups in the gradients of the trainable arrays.

        Batched arrays and those of aux have the groups as dim `group_dim`.
        """
        dims = [0] * self.trace.trainable_count
        if not self.by_group:
            return gradient, dims

        def mapped(dims: Sequence[int]) -> Callable[..., Any]:
            in_dims, out_dims = (None, 0, None, group_dim), (list(dims), (0, group_dim))
            return jax.vmap(gradient, in_dims, out_dims, spmd_axis_name=self.group_axes)

        # Loops over layers stack theirs before the groups, and accumulating elsewhere would transpose every gradient.
        program = jax.make_jaxpr(mapped(dims))(*arguments).jaxpr
        transposes = {
            equation.outvars[0]: equation.params["permutation"]
            for equation in program.eqns
            if equation.primitive.name == "transpose"
        }
        for index, var in enumerate(program.outvars[: len(dims)]):
            first, *rest = transposes.get(var, (0,))
            dims[index] = first if rest == sorted(rest) else 0
        return mapped(dims), dims

    def pieces(self, array: Any) -> Any:
        """Returns a batched array by microbatch, and by group if each has a part of its own."""
        rest, size = array.shape[1:], self.trace.batch_size // (self.runs * self.microbatches)
        runs = array.reshape(self.runs, self.microbatches, size, *rest).swapaxes(0, 1)
        return runs if self.by_group else runs.reshape(self.microbatches, self.runs * size, *rest)

    def whole(self, array: Any, dim: int) -> Any:
        """Returns an array of the whole batch from its parts, stacked as they were computed."""
        if self.by_group:
            runs = jnp.moveaxis(array, (1, 0), (dim, dim + 1))
        else:
            shape = array.shape
            runs = array.reshape(*shape[: dim + 1], self.runs, shape[dim + 1] // self.runs, *shape[dim + 2 :])
            runs = jnp.moveaxis(runs, 0, dim + 1)
        return runs.reshape(*runs.shape[:dim], -1, *runs.shape[dim + 3 :])


_Paired: TypeAlias = tuple[Counts, Pair, dict[int, Any]]
"""The programs of the whole batch and of a part, and the part's calls as `Replay` takes them."""


def _proved(
    trace: TracedLoss, program: ClosedJaxpr, size: int, microbatches: int, groups: int
) -> tuple[int, _Paired, BodyFacts]:
    """The number of runs of examples of a microbatch, the programs of the whole and of a part, and their facts."""
    runs = groups if groups > 1 else size
    while True:
        paired = _paired(trace, program, size, 1 if groups > 1 else runs)
        body = read_examples(paired[1], _input_facts(trace), paired[0])
        pieces = [fact.pieces for fact in body.outputs if fact.form == "refused"]
        # Losses of pairs of examples, say, need runs of two and more.
        longer = math.gcd(runs, *(count // microbatches for count in pieces))
        if groups > 1 or not pieces or not all(pieces) or longer == runs:
            _check(trace, body)
            return runs, paired, body
        runs = longer


def _check_linear(trace: TracedLoss, tail: Tail) -> None:
    step = tail.nonlinear_step() if any(tail.is_trained) else ""
    if step:
        raise MicrobatchError(
            f"{trace.name}: the loss is not linear in a sum over the examples: {step}. The mean of the losses of parts "
            "would be another value. Keep the batch whole (one microbatch), or sum the losses of the examples last; "
            "losses that balance the load of experts can do so within examples"
        )


def _forward_program(
    run: Callable[..., list[Any]], shared: Sequence[Any], batched: Sequence[Any], size: int
) -> ClosedJaxpr:
    """Traces a run of a part with this many examples: of the values of variables, group and microbatch."""

    def forward(*arguments: Any) -> list[Any]:
        *values, group, microbatch = arguments
        at_hand = {(var, "whole"): value for var, value in zip(shared, values, strict=False)}
        at_hand |= {(var, "part"): value for var, value in zip(batched, values[len(shared) :], strict=True)}
        return run(group, microbatch, at_hand)

    index, shapes = jax.ShapeDtypeStruct((), jnp.int32), [struct(var) for var in (*shared, *batched)]
    for position, shape in enumerate(shapes[len(shared) :], len(shared)):
        shapes[position] = jax.ShapeDtypeStruct((size, *shape.shape[1:]), shape.dtype, weak_type=shape.weak_type)
    traced = jax.make_jaxpr(forward)(*shapes, index, index)
    return without_dead_code(traced)


def _paired(trace: TracedLoss, program: ClosedJaxpr, size: int, runs: int) -> _Paired:
    """Traces the loss for a part, and pairs it with that of the whole batch."""
    part = _traced(trace, size)
    if size == 1:
        # Programs for one example lack what repeats an array for each, or sums over them: a second trace has two, and
        # its sizes are scaled.
        counts = Counts(trace.batch_size, size, 2 if trace.batch_size > 2 else 3, runs)
        try:
            pair = Pair.of(program, _traced(trace, counts.trace), counts)
            return counts, pair, matched_calls(program, part, counts)
        except MicrobatchError:  # the program for one example may do
            pass
    counts = Counts(trace.batch_size, size, size, runs)
    try:
        return counts, Pair.of(program, part, counts), {}
    except MicrobatchError as error:
        raise MicrobatchError(
            f"{trace.name}: {error}\nKeep the batch whole (one microbatch), or write the loss so that its program is "
            "the same for any number of examples"
        ) from None


def _traced(trace: TracedLoss, size: int) -> ClosedJaxpr:
    try:
        return flattened(trace.with_batch_size(size).jaxpr)
    except Exception as error:
        split, whole = trace.split.example_arrays
        others = f"; {', '.join(whole)} stay whole" if whole else ""
        raise MicrobatchError(
            f"{trace.name}: tracing the loss with {size} of {trace.batch_size} examples failed: {error}\n"
            f"Examples are along {', '.join(split)}{others}. If others have them, pass example_dims"
        ) from error


def _input_facts(trace: TracedLoss) -> list[Fact]:
    trainable = Fact("shared", is_trained=True, is_whole=True)
    batched = Fact("examples", 0, from_batch=True, is_whole=True, is_own=True)
    return (
        [trainable] * trace.trainable_count
        + [Fact("shared", is_whole=True)] * trace.fixed_count
        + [batched] * trace.batched_count
    )


def _check(trace: TracedLoss, body: BodyFacts) -> None:
    """Raises an error that says what of the loss and of aux is computed from several examples in another way."""
    reasons: list[str] = []
    for name, fact in zip(("the loss", *trace.aux_names), body.outputs, strict=True):
        if fact.form == "refused":
            reasons.append(f"{name}: {fact.reason}")
        elif name == "the loss" and fact.form == "shared" and fact.from_batch is False:
            reasons.append(f"{name}: it does not depend on the examples")
    if reasons:
        raise MicrobatchError(
            f"{trace.name} is not a sum over the examples of its batch:\n  "
            + "\n  ".join(shortened(reasons))
            + "\nKeep the batch whole (one microbatch), or compute this for each example"
        )


def _sums(body: BodyFacts) -> list[Var]:
    """The sums that the results are computed from: the last ones, which no other sum is computed from."""
    jaxpr = body.pair.whole
    pending = {var: None for var in jaxpr.outvars if not isinstance(var, Literal)}
    sums: dict[Var, None] = {var: None for var in pending if body.facts[var].form == "sum"}
    for equation in reversed(jaxpr.eqns):
        results = [var for var in equation.outvars if var in pending]
        # Only what is computed from sums is computed in the tail.
        if not any(body.facts[var].form == "result" for var in results):
            continue
        for var in equation.invars:
            if not isinstance(var, Literal):
                pending[var] = None
                if body.facts[var].form == "sum":
                    sums[var] = None
    return list(sums)


def _stacked_dim(body: BodyFacts, var: Any) -> int | None:
    """The dim of the examples of an array of aux that only parts of the batch compute."""
    fact = body.fact(var)
    return fact.dim if fact.form == "examples" and not fact.is_whole else None
