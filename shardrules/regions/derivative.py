"""Derivatives of regions: the backward pass of a region is a region, too.

It reads what JAX, or the function's own `custom_vjp`, keeps of the forward pass. How these residuals are split shows in
their shapes: where half as many examples halve a dim, it is the dim of examples. If a residual lacks the letter of
something that it is computed from, shards of it mean nothing elsewhere, and the backward pass computes again from the
operands.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding

from shardrules.core.jax_state import trace_key
from shardrules.regions.declaration import Declaration, Term
from shardrules.regions.primitive import Kind, ShardFunction, call_region, kinds_of, sources_of, traced


def differentiable(function: ShardFunction, operands: Sequence[Any]) -> list[Any]:
    """Runs a region whose backward pass is a region."""

    @jax.custom_vjp
    def call(*operands: Any) -> list[Any]:
        return call_region(function, operands)

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        backward_pass = _backward_pass(function, kinds_of(operands), trace_key())
        results, residuals = backward_pass.forward(operands)
        shardings = tuple(jax.typeof(operand).sharding for operand in operands)
        return results, (_Static((backward_pass, shardings)), residuals)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        (backward_pass, shardings), residuals = saved[0].value, saved[1]
        gradients = backward_pass.backward(residuals, cotangents)
        return tuple(map(_as_split, gradients, shardings))

    call.defvjp(forward, backward)
    return call(*operands)


def _as_split(gradient: Any, sharding: NamedSharding) -> Any:
    """On an Explicit mesh, splits a gradient as its operand: it is whole where all devices compute the same."""
    is_same = gradient is None or sharding.mesh.empty or jax.typeof(gradient).sharding.spec == sharding.spec
    return gradient if is_same else jax.reshard(gradient, sharding)


@jtu.register_static
@final
@attrs.frozen
class _Static:
    """A value that passes through JAX beside arrays."""

    value: Any


@final
@attrs.frozen(eq=False)
class _Residual:
    """An array that the backward pass reads."""

    term: Term
    operand: int | None = None
    """The operand that it is."""
    is_shared: bool = False
    """Whether all shards have the same: it is computed once, outside of the region."""


@final
@attrs.frozen(eq=False, slots=False)
class _BackwardPass:
    """How a region is differentiated, for operands of these kinds."""

    function: ShardFunction
    kinds: tuple[Kind, ...]
    trained: tuple[int, ...]
    """The operands that have gradients."""
    residuals: tuple[_Residual, ...] | None
    """`None` where the backward pass computes again from the operands."""
    program: ClosedJaxpr
    """From operands to results and residuals."""

    def forward(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns results and residuals."""
        arrays = iter(call_region(self._forward_function, operands))
        results = [next(arrays) for _ in self.function.declaration.results]
        if self.residuals is None:
            return results, list(operands)
        shared = iter(self._shared(operands))
        residuals = [
            operands[each.operand] if each.operand is not None else next(shared if each.is_shared else arrays)
            for each in self.residuals
        ]
        return results, residuals

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradient of each operand, `None` for whole numbers."""
        inexact = (cotangent for cotangent in cotangents if cotangent.dtype != jax.dtypes.float0)
        gradients = iter(call_region(self._backward_function, [*residuals, *inexact]))
        count = len(self.function.declaration.operands)
        return tuple(next(gradients) if index in self.trained else None for index in range(count))

    @functools.cached_property
    def _forward_function(self) -> ShardFunction:
        """Computes the results, and the residuals that differ from shard to shard."""
        if self.residuals is None:
            return self.function
        inside = [index for index, each in enumerate(self.residuals) if each.operand is None and not each.is_shared]

        def run(*shards: Any) -> list[Any]:
            results, residuals = _with_residuals(self.function, self.trained, shards)
            leaves = jtu.tree_leaves(residuals)
            return [*results, *(leaves[index] for index in inside)]

        declaration = self.function.declaration
        terms = (*declaration.results, *(self.residuals[index].term for index in inside))
        return attrs.evolve(self.function, run=run, declaration=attrs.evolve(declaration, results=terms))

    def _shared(self, operands: Sequence[Any]) -> list[Any]:
        """Residuals that are the same for all shards."""
        used = [False] * len(self.function.declaration.results)
        used += [each.is_shared and each.operand is None for each in self.residuals or ()]
        if not any(used):
            return []
        jaxpr, used_operands = partial_eval.dce_jaxpr(self.program.jaxpr, used)
        needed = [operand for operand, flag in zip(operands, used_operands, strict=True) if flag]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self.program.consts))(*needed)

    @functools.cached_property
    def _backward_function(self) -> ShardFunction:
        """Computes the gradients from residuals and cotangents."""
        forward = traced(self.function, self.kinds)[0].declaration
        terms = forward.operands if self.residuals is None else tuple(each.term for each in self.residuals)
        avals = self.program.out_avals[: len(forward.results)]
        inexact = [index for index, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        read = (*terms, *(forward.results[index] for index in inexact))
        # A gradient may have a letter that nothing has which it is computed from: each device computes all of it.
        split = tuple(letter for letter in forward.split if any(letter in term for term in read))
        declaration = Declaration(read, tuple(forward.operands[index] for index in self.trained), split)
        function = ShardFunction(f"{self.function.name}_backward", self._gradients(declaration, inexact), declaration)
        self._refuse_shared_results(function, inexact, len(terms))
        return function

    def _refuse_shared_results(self, function: ShardFunction, inexact: Sequence[int], first: int) -> None:
        """Raises where a gradient is a sum over shards, and comes also from what all shards compute alike.

        Each shard would add it. `first` is the position of the first cotangent among the operands of the `function`.
        """
        forward, avals = traced(self.function, self.kinds)[0].declaration, self.program.out_avals
        saved = self.kinds if self.residuals is None else tuple(map(_kind, avals[len(forward.results) :]))
        sums = traced(function, (*saved, *(_kind(avals[index]) for index in inexact)))[0].declaration
        self.function.refuse(
            [
                f"the gradient of operand {self.trained[gradient]} is a sum over {letter!r} and comes from result "
                f"{index}, too, which has no {letter!r}: compute that outside of the region"
                for gradient, sources in enumerate(sums.sources)
                for letter in sums.summed(gradient)
                for position, index in enumerate(inexact, first)
                if position in sources and letter not in (*forward.results[index], *forward.summed(index))
            ]
        )

    def _gradients(self, declaration: Declaration, inexact: Sequence[int]) -> Callable[..., list[Any]]:
        """The function that each device runs on shards of residuals and cotangents."""
        operands = self.function.declaration.operands
        whole_sizes = self.function.declaration.sizes([shape for shape, _, _ in self.kinds])
        saved_count = len(declaration.operands) - len(inexact)

        def run(*arrays: Any) -> list[Any]:
            saved, cotangents = arrays[:saved_count], iter(arrays[saved_count:])
            sizes = whole_sizes | declaration.sizes([tuple(jnp.shape(array)) for array in arrays])
            structs = [
                jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in term), dtype, weak_type=is_weak)
                for term, (_, dtype, is_weak) in zip(operands, self.kinds, strict=True)
            ]
            results, gradients_of = jax.eval_shape(
                functools.partial(_with_residuals, self.function, self.trained), structs
            )
            filled = [
                next(cotangents) if index in inexact else np.zeros(result.shape, jax.dtypes.float0)
                for index, result in enumerate(results)
            ]
            if self.residuals is None:
                return list(_with_residuals(self.function, self.trained, saved)[1](filled))
            return list(jtu.tree_unflatten(jtu.tree_structure(gradients_of), saved)(filled))

        return run


def _with_residuals(function: ShardFunction, trained: Sequence[int], operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Runs a function, and returns its results and the function that returns gradients."""

    def run(*changed: Any) -> list[Any]:
        arrays = list(operands)
        for index, array in zip(trained, changed, strict=True):
            arrays[index] = array
        return list(function.run(*arrays))

    return jax.vjp(run, *(operands[index] for index in trained))


@functools.lru_cache(maxsize=256)
def _backward_pass(function: ShardFunction, kinds: tuple[Kind, ...], key: Hashable) -> _BackwardPass:
    """How a region is differentiated. What does not fit its declaration raises before that."""
    traced(function, kinds)
    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in kinds]
    trained = tuple(index for index, struct in enumerate(structs) if jnp.issubdtype(struct.dtype, jnp.inexact))

    def run(*operands: Any) -> Any:
        results, residuals = _with_residuals(function, trained, operands)
        return results, jtu.tree_leaves(residuals)

    program = jax.make_jaxpr(run)(*structs)
    return _BackwardPass(function, kinds, trained, _residuals(function.declaration, run, program, structs), program)


def _kind(aval: Any) -> Kind:
    return tuple(aval.shape), aval.dtype, bool(aval.weak_type)


def _residuals(
    declaration: Declaration, run: Callable[..., Any], program: ClosedJaxpr, structs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[_Residual, ...] | None:
    """The residuals of a function with their letters; `None` where they cannot be split as the operands are."""
    count = len(declaration.results)
    shapes = [tuple(aval.shape) for aval in program.out_avals[count:]]
    letters: list[dict[int, str]] = [{} for _ in shapes]  # of each residual, by dim
    sizes = declaration.sizes([struct.shape for struct in structs])
    for letter in declaration.split:
        if sizes.get(letter, 1) > 1:
            parts = _shapes_of_parts(declaration, run, structs, letter, _least_factor(sizes[letter]))
            if parts is None or len(parts) != len(shapes):
                return None
            for dims, shape, part in zip(letters, shapes, parts, strict=True):
                for dim, (size, part_size) in enumerate(zip(shape, part, strict=True)):
                    if size == part_size:
                        continue
                    # Where a dim is longer than its letter, or of two letters, shards do not lie one behind another.
                    if dim in dims or part_size * _least_factor(sizes[letter]) != size or sizes[letter] % size:
                        return None
                    dims[dim] = letter
    residuals: list[_Residual] = []
    for index, (dims, shape) in enumerate(zip(letters, shapes, strict=True)):
        # A dim that is whole has a letter of its own. Shards of a shorter dim have as many parts.
        term = tuple(
            dims[dim] if dim in dims and sizes[dims[dim]] == size else f"residual{index}_{dim}"
            for dim, size in enumerate(shape)
        )
        if len({*term}) < len(term) or any(
            name.startswith("residual") and dim in dims for dim, name in enumerate(term)
        ):
            return None
        needed = {
            letter
            for operand in sources_of(program, count + index)
            for letter in declaration.operands[operand]
            if letter in declaration.split and sizes[letter] > 1
        }
        var = program.jaxpr.outvars[count + index]
        is_operand = not isinstance(var, Literal) and var in program.jaxpr.invars
        if is_operand:
            operand = program.jaxpr.invars.index(var)
            residuals.append(_Residual(declaration.operands[operand], operand))
        elif needed <= {*term}:
            residuals.append(_Residual(term, is_shared=not needed))
        else:
            return None
    return tuple(residuals)


def _shapes_of_parts(
    declaration: Declaration, run: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct], letter: str, pieces: int
) -> list[tuple[int, ...]] | None:
    """The shapes of residuals where a letter is split; `None` where the function does not take shards of that size."""
    parts = [
        jax.ShapeDtypeStruct(
            tuple(size // pieces if name == letter else size for name, size in zip(term, struct.shape, strict=True)),
            struct.dtype,
            weak_type=struct.weak_type,
        )
        for term, struct in zip(declaration.operands, structs, strict=True)
    ]
    try:
        return [tuple(residual.shape) for residual in jax.eval_shape(run, *parts)[1]]
    except Exception:  # noqa: BLE001  kernels refuse sizes with errors of any class
        return None


def _least_factor(size: int) -> int:
    return next((factor for factor in range(2, math.isqrt(size) + 1) if size % factor == 0), size)
