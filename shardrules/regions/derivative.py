"""Derivatives of regions: the backward pass of a region is a region, too.

It reads what JAX, or the function's own `custom_vjp`, keeps of the forward pass. How these residuals are split shows in
their shapes: where half as many examples halve a dim, it is the dim of examples. If a residual lacks the letter of
something that it is computed from, shards of it mean nothing elsewhere, and the backward pass computes again from the
operands.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardrules.regions.declaration import Declaration, Term
from shardrules.regions.primitive import ShardFunction, call_region

_Kind: TypeAlias = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and whether the dtype is weak."""


def differentiable(function: ShardFunction, operands: Sequence[Any]) -> list[Any]:
    """Runs a region whose backward pass is a region."""

    @jax.custom_vjp
    def call(*operands: Any) -> list[Any]:
        return call_region(function, operands)

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        function.trace(operands)  # what does not fit is raised before anything is differentiated
        kinds = tuple(
            (tuple(x.shape), x.dtype, bool(getattr(x, "weak_type", False))) for x in map(jax.typeof, operands)
        )
        backward_pass = _backward_pass(function, kinds)
        results, residuals = backward_pass.forward(operands)
        return results, (_Static(backward_pass), residuals)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        backward_pass, residuals = saved
        return backward_pass.value.backward(residuals, cotangents)

    call.defvjp(forward, backward)
    return call(*operands)


@jtu.register_static
@final
@attrs.frozen
class _Static:
    """A value that passes through JAX beside arrays."""

    value: "_BackwardPass"


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
@attrs.frozen(eq=False)
class _BackwardPass:
    """How a region is differentiated, for operands of these kinds."""

    function: ShardFunction
    trained: tuple[int, ...]
    """The operands that have gradients."""
    residuals: tuple[_Residual, ...] | None
    """`None` where the backward pass computes again from the operands."""
    program: ClosedJaxpr
    """From operands to results and residuals."""

    def forward(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns results and residuals."""
        if self.residuals is None:
            return call_region(self.function, operands), list(operands)
        declaration = self.function.declaration
        count = len(declaration.results)
        inside = [index for index, each in enumerate(self.residuals) if each.operand is None and not each.is_shared]

        def run(*shards: Any) -> list[Any]:
            results, residuals = _with_residuals(self.function, self.trained, shards)
            return [*results, *(jtu.tree_leaves(residuals)[index] for index in inside)]

        terms = (*declaration.results, *(self.residuals[index].term for index in inside))
        function = attrs.evolve(self.function, run=run, declaration=attrs.evolve(declaration, results=terms))
        arrays = iter(call_region(function, operands))
        results = [next(arrays) for _ in range(count)]
        shared = iter(self._shared(operands))
        residuals = [
            operands[each.operand] if each.operand is not None else next(shared if each.is_shared else arrays)
            for each in self.residuals
        ]
        return results, residuals

    def _shared(self, operands: Sequence[Any]) -> list[Any]:
        """Residuals that need no shard of their own."""
        count = len(self.function.declaration.results)
        used = [False] * count + [each.is_shared for each in self.residuals or ()]
        jaxpr, used_operands = partial_eval.dce_jaxpr(self.program.jaxpr, used)
        needed = [operand for operand, flag in zip(operands, used_operands, strict=True) if flag]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self.program.consts))(*needed) if any(used) else []

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradient of each operand, `None` for whole numbers."""
        declaration = self.function.declaration
        inexact = [index for index, cotangent in enumerate(cotangents) if cotangent.dtype != jax.dtypes.float0]
        terms = declaration.operands if self.residuals is None else tuple(each.term for each in self.residuals)
        backward = Declaration(
            (*terms, *(declaration.results[index] for index in inexact)),
            tuple(declaration.operands[index] for index in self.trained),
            declaration.split,
        )
        whole_sizes = declaration.sizes([tuple(var.aval.shape) for var in self.program.jaxpr.invars])

        def run(*arrays: Any) -> list[Any]:
            shards, gradients = arrays[: len(terms)], iter(arrays[len(terms) :])
            sizes = whole_sizes | backward.sizes([tuple(jnp.shape(array)) for array in arrays])
            structs = [
                jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in term), var.aval.dtype)
                for term, var in zip(declaration.operands, self.program.jaxpr.invars, strict=True)
            ]
            outcome = jax.eval_shape(functools.partial(_with_residuals, self.function, self.trained), structs)
            filled = [
                next(gradients) if index in inexact else np.zeros(result.shape, jax.dtypes.float0)
                for index, result in enumerate(outcome[0])
            ]
            if self.residuals is None:
                return list(_with_residuals(self.function, self.trained, shards)[1](filled))
            return list(jtu.tree_unflatten(jtu.tree_structure(outcome[1]), shards)(filled))

        function = ShardFunction(f"{self.function.name}_backward", run, backward, None)
        gradients = iter(call_region(function, [*residuals, *(cotangents[index] for index in inexact)]))
        return tuple(next(gradients) if index in self.trained else None for index in range(len(declaration.operands)))


def _with_residuals(function: ShardFunction, trained: Sequence[int], operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Runs a function, and returns its results and the function that returns gradients."""

    def run(*changed: Any) -> list[Any]:
        arrays = list(operands)
        for index, array in zip(trained, changed, strict=True):
            arrays[index] = array
        return list(function.run(*arrays))

    return jax.vjp(run, *(operands[index] for index in trained))


@functools.lru_cache(maxsize=256)
def _backward_pass(function: ShardFunction, kinds: tuple[_Kind, ...]) -> _BackwardPass:
    """How a region is differentiated."""
    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in kinds]
    trained = tuple(index for index, struct in enumerate(structs) if jnp.issubdtype(struct.dtype, jnp.inexact))

    def run(*operands: Any) -> Any:
        results, residuals = _with_residuals(function, trained, operands)
        return results, jtu.tree_leaves(residuals)

    program = jax.make_jaxpr(run)(*structs)
    return _BackwardPass(function, trained, _residuals(function.declaration, run, program, structs), program)


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
        used = [position == count + index for position in range(len(program.out_avals))]
        sources = partial_eval.dce_jaxpr(program.jaxpr, used)[1]
        needed = {
            letter
            for term_of_operand, flag in zip(declaration.operands, sources, strict=True)
            for letter in (term_of_operand if flag else ())
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
