"""The function of a region, as devices run it on shards: traced, mapped, differentiated."""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from shardrules.analysis.compiling.jaxprs import programs_in
from shardrules.analysis.compiling.model_flops import equation_flops, inner_runs
from shardrules.core.errors import ConfigError
from shardrules.core.jax_state import trace_key
from shardrules.regions.declaration import Axes, Declaration


@final
@attrs.frozen(eq=False)
class ShardFunction:
    """A function of arrays that devices can run on shards, and returns a list of arrays."""

    name: str
    run: Callable[..., list[Any]]
    declaration: Declaration
    cost: Callable[..., Any] | None = None
    """Returns FLOPs, from shapes of shards: `None` where they are counted."""
    _cache: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)
    """Programs and functions that are derived from it, so that JAX compiles none of them twice."""

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises an error that lists what is wrong, if anything is."""
        if problems:
            raise ConfigError(f"region {self.name} ({self.declaration}): {'; '.join(problems)}")

    def traced(self, operands: Sequence[Any]) -> tuple[Self, ClosedJaxpr]:
        """The function with what its results are computed from, and its program on whole operands, or on their types.

        What does not fit the declaration raises.
        """
        avals = [operand if isinstance(operand, ShapedArray) else jax.typeof(operand) for operand in operands]
        structs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals)
        key = "traced", tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals), trace_key()
        return self._cached(key, lambda: self._trace(structs))

    def _trace(self, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Self, ClosedJaxpr]:
        shapes = [struct.shape for struct in structs]
        self.refuse(self.declaration.misfits(shapes, None))
        run = _in_same_settings(self.run)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            program = jax.make_jaxpr(run)(*structs)
        problems = self.declaration.misfits(shapes, [tuple(aval.shape) for aval in program.out_avals])
        if any(isinstance(const, Tracer) for const in program.consts):
            problems.append("it uses arrays that are traced outside of it; pass them as arguments")
        if program.effects:
            effects = ", ".join(map(str, program.effects))
            problems.append(f"it has effects ({effects}), which would happen on each shard")
        self.refuse(problems)
        sources = tuple(_sources(program, index) for index in range(len(program.out_avals)))
        declaration = attrs.evolve(self.declaration, sources=sources)
        self.refuse(
            [
                f"result {index} is a sum over {' and '.join(map(repr, declaration.summed(index)))}, and {aval.dtype} "
                "cannot be added up"
                for index, aval in enumerate(program.out_avals)
                if declaration.summed(index) and not jnp.issubdtype(aval.dtype, jnp.number)
            ]
        )
        return attrs.evolve(self, run=run, declaration=declaration), program

    def flops(self, program: ClosedJaxpr) -> int:
        """The FLOPs of a program of this function: what its author says, or those of its matmuls and kernels."""
        if self.cost is None:
            return _flops(program)
        flops = self.cost(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals))
        if not isinstance(flops, int | float) or not 0 <= flops < math.inf:
            self.refuse([f"its cost must return a number of at least 0, got {flops!r:.60}"])
        return int(flops)

    def run_on_shard(self, axes: dict[str, Axes], operands: Sequence[Any]) -> list[Any]:
        """Runs on the shards of one device, and completes sums over letters that are split over `axes`."""
        results = []
        for index, result in enumerate(self.run(*operands)):
            names = tuple(name for letter in self.declaration.summed(index) for name in axes.get(letter, ()))
            results.append(lax.psum(result, names) if names else result)
        return results

    def compiled(self, bind: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function, for calls outside of `jax.jit`."""
        return self._cached(("compiled", trace_key()), lambda: jax.jit(bind))

    def mapped(self, is_batched: tuple[bool, ...]) -> Self:
        """The function under `jax.vmap`, over a new first dim of some operands, which may be split."""
        return self._cached(("mapped", is_batched), lambda: self._map(is_batched))

    def _map(self, is_batched: tuple[bool, ...]) -> Self:
        return attrs.evolve(
            self,
            run=jax.vmap(self.run, in_axes=[0 if flag else None for flag in is_batched]),
            declaration=attrs.evolve(self.declaration.with_dim(is_batched), sources=()),
            cost=None if self.cost is None else functools.partial(_cost_of_all, self.cost, is_batched),
        )

    def with_results(self, kept: tuple[int, ...]) -> Self:
        """The function that returns some of its results."""
        return self._cached(("results", kept), lambda: self._select(kept))

    def _select(self, kept: tuple[int, ...]) -> Self:
        def run(*operands: Any) -> list[Any]:
            results = self.run(*operands)
            return [results[index] for index in kept]

        declaration = attrs.evolve(
            self.declaration,
            results=tuple(self.declaration.results[index] for index in kept),
            sources=tuple(self.declaration.sources[index] for index in kept),
        )
        return attrs.evolve(self, run=run, declaration=declaration)

    def backward(self, operands: Sequence[Any]) -> "BackwardPass":
        """The backward pass for these operands. What cannot be differentiated raises."""
        function, program = self.traced(operands)
        return function._cached(("backward", program), lambda: function._differentiate(program))

    def _differentiate(self, program: ClosedJaxpr) -> "BackwardPass":
        trained = tuple(index for index, aval in enumerate(program.in_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
        smooth = tuple(index for index, aval in enumerate(program.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
        count, forward = len(program.in_avals), self.declaration

        def run(*arrays: Any) -> list[Any]:
            operands, cotangents = arrays[:count], arrays[count:]

            def results_of(*changed: Any) -> list[Any]:
                all_operands = list(operands)
                for index, array in zip(trained, changed, strict=True):
                    all_operands[index] = array
                results = self.run(*all_operands)
                return [results[index] for index in smooth]

            _, gradients_of = jax.vjp(results_of, *(operands[index] for index in trained))
            return list(gradients_of(list(cotangents)))

        declaration = Declaration(
            (*forward.operands, *(forward.results[index] for index in smooth)),
            tuple(forward.operands[index] for index in trained),
            forward.split,
        )
        # What the forward pass computes is computed again, and each product has two gradients.
        cost = self.cost and (lambda *shapes: 3 * self.cost(*shapes[:count]))  # pyright: ignore[reportOptionalCall]
        function = attrs.evolve(self, name=f"{self.name}_backward", run=run, declaration=declaration, cost=cost)
        avals = [*program.in_avals, *(program.out_avals[index] for index in smooth)]
        self._refuse_shared_results(function.traced(avals)[0].declaration, trained, smooth)
        return BackwardPass(function, trained, smooth)

    def _refuse_shared_results(self, backward: Declaration, trained: Sequence[int], smooth: Sequence[int]) -> None:
        """Raises where a gradient is a sum over shards, and comes also from what all shards compute alike.

        Each shard would add it.
        """
        forward = self.declaration
        self.refuse(
            [
                f"the gradient of operand {trained[gradient]} is a sum over {letter!r} and comes from result {index}, "
                f"too, which has no {letter!r}: compute that outside of the region"
                for gradient, sources in enumerate(backward.sources)
                for letter in backward.summed(gradient)
                for position, index in enumerate(smooth, len(forward.operands))
                if position in sources and letter not in (*forward.results[index], *forward.summed(index))
            ]
        )

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


@final
@attrs.frozen(eq=False)
class BackwardPass:
    """How a region is differentiated."""

    function: ShardFunction
    """From operands and cotangents to gradients."""
    trained: tuple[int, ...]
    """The operands that have gradients."""
    smooth: tuple[int, ...]
    """The results that have cotangents."""


def _sources(program: ClosedJaxpr, result_index: int) -> tuple[int, ...]:
    """The operands that a result of a program is computed from."""
    used = [index == result_index for index in range(len(program.out_avals))]
    return tuple(index for index, flag in enumerate(partial_eval.dce_jaxpr(program.jaxpr, used)[1]) if flag)


def _in_same_settings(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Runs a function in the settings of JAX that are in force now: shards are traced later, outside of contexts."""
    config: Any = jax.config
    precision, is_wide = config.jax_default_matmul_precision, config.jax_enable_x64
    keys, promotion = config.jax_default_prng_impl, config.jax_numpy_dtype_promotion

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        numbers, dtypes = jax.default_matmul_precision(precision), jax.numpy_dtype_promotion(promotion)
        with numbers, dtypes, jax.enable_x64(is_wide), jax.default_prng_impl(keys):
            yield

    def run_in_them(*operands: Any) -> list[Any]:
        with settings():
            return run(*operands)

    return run_in_them


def _cost_of_all(cost: Callable[..., Any], is_batched: Sequence[bool], *operands: jax.ShapeDtypeStruct) -> Any:
    """The cost of a mapped function: that of one call, times the calls."""
    calls = next(operand.shape[0] for operand, flag in zip(operands, is_batched, strict=True) if flag)
    each = (
        jax.ShapeDtypeStruct(operand.shape[flag:], operand.dtype)
        for operand, flag in zip(operands, is_batched, strict=True)
    )
    return calls * cost(*each)


def _flops(program: ClosedJaxpr | Jaxpr) -> int:
    """The FLOPs of matmuls, and of kernels by their authors' estimates or by what they multiply."""
    total = 0
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "region":
            total += params["function"].flops(params["program"])
        elif name == "pallas_call" and params["cost_estimate"] is not None:
            total += int(params["cost_estimate"].flops)
        else:
            total += equation_flops(equation) + inner_runs(equation) * sum(map(_flops, programs_in(equation)))
    return total
