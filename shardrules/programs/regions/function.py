"""The function of a region, as devices run it on shards: traced, mapped, differentiated."""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Self, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from shardrules.core.errors import ConfigError, SplitError
from shardrules.core.jax_state import trace_key
from shardrules.core.spec import shard_shape
from shardrules.programs.compiling.model_flops import equation_flops
from shardrules.programs.jaxprs.walk import inner_runs, open_jaxpr, programs_in, runs
from shardrules.programs.regions.declaration import Axes, Declaration, ShardAxes


@final
@attrs.define(eq=False)
class ShardFunction:
    """A function of arrays that devices can run on shards, and returns a list of arrays."""

    name: str
    run: Callable[..., list[Any]]
    """Takes the axes over which shards are exchanged, then the operands."""
    declaration: Declaration
    cost: Callable[..., Any] | None = None
    """Returns FLOPs, from shapes of shards: `None` where they are counted."""
    alternatives: tuple["ShardFunction", ...] = ()
    """Functions that compute the same; one of them runs. `run` is the first one's."""
    over: Axes | None = None
    """The mesh axes that plans have to exchange its shards over; `None` leaves them to the plan."""
    _cache: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)
    """Programs and functions that are derived from it, so that JAX compiles none of them twice."""

    def text_of(self, program: ClosedJaxpr) -> str:
        """The declaration, with the FLOPs of a program, alike in every process: plans tell equations apart by it."""

        def text(function: "ShardFunction") -> str:
            cost = "" if function.cost is None else f"; {function.flops(program)} FLOPs"
            return f"{function.name} {function.declaration.text}{cost}"

        return " or ".join(map(text, self.alternatives or (self,)))

    def refuse(self, problems: Sequence[str]) -> None:
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
        if self.alternatives:
            return self._trace_alternatives(structs)
        shapes = [struct.shape for struct in structs]
        self.refuse(self.declaration.misfits(shapes, None))
        run = _in_same_settings(self.run)
        # The function is that of one device, so no mesh that is in force may get into its trace.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            program = jax.make_jaxpr(functools.partial(run, ()))(*structs)
        problems = self.declaration.misfits(shapes, [tuple(aval.shape) for aval in program.out_avals])
        if any(isinstance(const, Tracer) for const in program.consts):
            problems.append("it uses arrays that are traced outside of it; pass them as arguments")
        if program.effects:
            effects = ", ".join(map(str, program.effects))
            problems.append(f"it has effects ({effects}), which would happen on each shard")
        self.refuse(problems)
        sources = tuple(_sources(program, index) for index in range(len(program.out_avals)))
        declaration = attrs.evolve(self.declaration, sources=sources)
        summed = [declaration.all_summed(index) for index in range(len(program.out_avals))]
        self.refuse(
            [
                f"result {index} is a sum over {' and '.join(map(repr, letters))}, and {aval.dtype} cannot be added up"
                for index, (letters, aval) in enumerate(zip(summed, program.out_avals, strict=True))
                if letters and not jnp.issubdtype(aval.dtype, jnp.number)
            ]
        )
        return attrs.evolve(self, run=run, declaration=declaration), program

    def _trace_alternatives(self, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Self, ClosedJaxpr]:
        """Traces the alternatives that run on whole arrays: at least one must."""
        avals = [ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type) for struct in structs]
        traced: list[tuple[ShardFunction, ClosedJaxpr]] = []
        refusals: list[SplitError] = []
        for alternative in self.alternatives:
            try:
                traced.append(alternative.traced(avals))
            except SplitError as error:
                refusals.append(error)
        if not traced:
            raise refusals[0]
        function, program = traced[0]
        types = dict.fromkeys(_types(other) for _, other in traced)
        if len(types) > 1:
            self.refuse([f"alternatives must return the same types, got {'; '.join(types)}"])
        declaration = attrs.evolve(self.declaration, sources=function.declaration.sources)
        alternatives = tuple(function for function, _ in traced)
        return attrs.evolve(self, run=function.run, declaration=declaration, alternatives=alternatives), program

    def shard_program(self, axes: ShardAxes, mesh_sizes: Mapping[str, int], operands: Sequence[Any]) -> ClosedJaxpr:
        """The program of one device, for whole operands or their types.

        Results of other shapes or dtypes than the declaration has for a shard raise.
        """
        specs, result_specs = self.declaration.specs(axes)
        structs = _shard_structs(operands, specs, mesh_sizes)
        # Shards of one shape may be of arrays whose results differ, in letters that no operand has or in dtypes.
        results = _shard_structs(self.traced(operands)[1].out_avals, result_specs, mesh_sizes)
        sizes = tuple((name, mesh_sizes[name]) for name in axes.exchange)
        key = "shards", sizes, structs, results, trace_key()
        return self._cached(key, lambda: self._trace_shards(sizes, structs, results))

    def _trace_shards(
        self,
        sizes: Sequence[tuple[str, int]],
        structs: Sequence[jax.ShapeDtypeStruct],
        results: Sequence[jax.ShapeDtypeStruct],
    ) -> ClosedJaxpr:
        exchange, shapes = tuple(dict(sizes)), ", ".join(str(struct.shape) for struct in structs)
        try:
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                program = jax.make_jaxpr(functools.partial(self.run, exchange), axis_env=sizes)(*structs)
        except (SplitError, ConfigError):
            raise
        except Exception as error:  # the function is the user's
            reason = next(iter(str(error).splitlines()), "")
            raise ConfigError(
                f"region {self.name} ({self.declaration}) cannot run on shards of shapes {shapes}: "
                f"{type(error).__name__}: {reason}. "
                "Raise shardrules.errors.SplitError there, and plans split it otherwise"
            ) from error
        self.refuse(
            [
                f"on shards of shapes {shapes} result {index} is {_type(aval)}, and {_type(expected)} is declared"
                for index, (aval, expected) in enumerate(zip(program.out_avals, results, strict=True))
                if (aval.shape, aval.dtype) != (expected.shape, expected.dtype)
            ]
        )
        return program

    def candidates(self, axes: ShardAxes, mesh_sizes: Mapping[str, int], operands: Sequence[Any]) -> list[int]:
        """The alternatives that can be split so. A function without any is the only one, 0."""
        possible = []
        for index, alternative in enumerate(self.alternatives or (self,)):
            if alternative.declaration.allows(axes):
                with contextlib.suppress(SplitError):
                    alternative.shard_program(axes, mesh_sizes, operands)
                    possible.append(index)
        return possible

    def alternative(self, index: int) -> "ShardFunction":
        return self.alternatives[index] if self.alternatives else self

    def fitting(
        self,
        specs: Sequence[PartitionSpec],
        results: Sequence[PartitionSpec],
        mesh_sizes: Mapping[str, int],
        avals: Any,
    ) -> tuple["ShardFunction", ShardAxes]:
        """The function that runs where operands and results are split in these specs, and how it is split.

        Of alternatives it is the one that is split over the most devices, and the first of equal ones.
        """
        best: tuple[ShardFunction, ShardAxes] | None = None
        for index in range(max(1, len(self.alternatives))):
            function = self.alternative(index)
            sizes = function.declaration.sizes([aval.shape for aval in avals])
            axes = function.declaration.axes_of(specs, results, mesh_sizes, sizes)
            if self.alternatives and index not in self.candidates(axes, mesh_sizes, avals):
                continue
            if best is None or axes.device_count(mesh_sizes) > best[1].device_count(mesh_sizes):
                best = function, axes
        if best is None:
            self.refuse([f"none of its alternatives can be split as {', '.join(map(str, specs))}"])
        assert best is not None
        function, axes = best
        function.shard_program(axes, mesh_sizes, avals)  # what shards return is as declared
        return best

    def flops(self, program: ClosedJaxpr) -> int:
        """The FLOPs of a program of this function: its author's, or those of its matmuls and kernels."""
        if self.cost is None:
            return _flops(program)
        flops = self.cost(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals))
        if not isinstance(flops, int | float) or not 0 <= flops < math.inf:
            self.refuse([f"its cost must return a number of at least 0, got {flops!r:.60}"])
        return int(flops)

    def run_on_shard(self, axes: ShardAxes, operands: Sequence[Any]) -> list[Any]:
        """Runs on the shards of one device, and completes sums over letters that are split over `axes`."""
        results = []
        for index, result in enumerate(self.run(axes.exchange, *operands)):
            names = self.declaration.sum_axes(index, axes)
            results.append(lax.psum(result, names) if names else result)
        return results

    def compiled(self, bind: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function, for calls outside of `jax.jit`."""
        return self._cached(("compiled", trace_key()), lambda: jax.jit(bind))

    def mapped(self, is_batched: tuple[bool, ...]) -> Self:
        """The function under `jax.vmap`, over a new first dim of some operands, which may be split."""
        return self._cached(("mapped", is_batched), lambda: self._map(is_batched))

    def _map(self, is_batched: tuple[bool, ...]) -> Self:
        in_axes = [0 if flag else None for flag in is_batched]

        def run(exchange: Axes, *operands: Any) -> list[Any]:
            each = functools.partial(self.run, exchange)
            try:
                return jax.vmap(each, in_axes)(*operands)
            except NotImplementedError:  # as of `jax.lax.ragged_dot`, and of kernels without a rule for it
                return _one_by_one(each, is_batched, operands)

        return attrs.evolve(
            self,
            run=run,
            declaration=attrs.evolve(self.declaration.with_dim(is_batched), sources=()),
            cost=None if self.cost is None else functools.partial(_cost_of_all, self.cost, is_batched),
            alternatives=tuple(alternative.mapped(is_batched) for alternative in self.alternatives),
        )

    def with_results(self, kept: tuple[int, ...]) -> Self:
        return self._cached(("results", kept), lambda: self._select(kept))

    def _select(self, kept: tuple[int, ...]) -> Self:
        def run(exchange: Axes, *operands: Any) -> list[Any]:
            results = self.run(exchange, *operands)
            return [results[index] for index in kept]

        declaration = attrs.evolve(
            self.declaration,
            results=tuple(self.declaration.results[index] for index in kept),
            sources=tuple(self.declaration.sources[index] for index in kept),
        )
        alternatives = tuple(alternative.with_results(kept) for alternative in self.alternatives)
        return attrs.evolve(self, run=run, declaration=declaration, alternatives=alternatives)

    def backward(self, operands: Sequence[Any]) -> "BackwardPass":
        """The backward pass for these operands. What cannot be differentiated raises."""
        function, program = self.traced(operands)
        return function._cached(("backward", program), lambda: function._differentiate(program))

    def _differentiate(self, program: ClosedJaxpr) -> "BackwardPass":
        trained = tuple(index for index, aval in enumerate(program.in_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
        smooth = tuple(index for index, aval in enumerate(program.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
        count, forward = len(program.in_avals), self.declaration

        def run(exchange: Axes, *arrays: Any) -> list[Any]:
            operands, cotangents = arrays[:count], arrays[count:]

            def results_of(*changed: Any) -> list[Any]:
                all_operands = list(operands)
                for index, array in zip(trained, changed, strict=True):
                    all_operands[index] = array
                results = self.run(exchange, *all_operands)
                return [results[index] for index in smooth]

            _, gradients_of = jax.vjp(results_of, *(operands[index] for index in trained))
            return list(gradients_of(list(cotangents)))

        declaration = Declaration(
            (*forward.operands, *(forward.results[index] for index in smooth)),
            tuple(forward.operands[index] for index in trained),
            forward.split,
            forward.exchange,
        )
        # The forward pass is computed again, and each product has two gradients.
        cost = self.cost and (lambda *shapes: 3 * self.cost(*shapes[:count]))  # pyright: ignore[reportOptionalCall]
        function = attrs.evolve(
            self,
            name=f"{self.name}_backward",
            run=run,
            declaration=declaration,
            cost=cost,
            alternatives=tuple(alternative._differentiate(program).function for alternative in self.alternatives),
        )
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
    """The derivative of a region."""

    function: ShardFunction
    """From operands and cotangents to gradients."""
    trained: tuple[int, ...]
    """The operands that have gradients."""
    smooth: tuple[int, ...]
    """The results that have cotangents."""


def _types(program: ClosedJaxpr) -> str:
    return ", ".join(map(_type, program.out_avals))


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _shard_structs(
    arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh_sizes: Mapping[str, int]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of the shards of arrays, or of their types."""
    return tuple(
        jax.ShapeDtypeStruct(shard_shape(array.shape, spec, mesh_sizes), array.dtype)
        for array, spec in zip(arrays, specs, strict=True)
    )


def _sources(program: ClosedJaxpr, result_index: int) -> tuple[int, ...]:
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


def _one_by_one(run: Callable[..., list[Any]], is_batched: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """As `jax.vmap` over the first dim of some operands, in a loop."""
    mapped = [operand for operand, flag in zip(operands, is_batched, strict=True) if flag]

    def call(arrays: list[Any]) -> list[Any]:
        slices = iter(arrays)
        return run(*(next(slices) if flag else operand for operand, flag in zip(operands, is_batched, strict=True)))

    return lax.map(call, mapped)


def _cost_of_all(cost: Callable[..., Any], is_batched: Sequence[bool], *operands: jax.ShapeDtypeStruct) -> Any:
    """The cost of a mapped function: the cost of one call, times the calls."""
    calls = next(operand.shape[0] for operand, flag in zip(operands, is_batched, strict=True) if flag)
    each = (
        jax.ShapeDtypeStruct(operand.shape[flag:], operand.dtype)
        for operand, flag in zip(operands, is_batched, strict=True)
    )
    return calls * cost(*each)


def kernel_flops(program: ClosedJaxpr | Jaxpr) -> int:
    """The FLOPs of kernels: by their authors' estimates, or by what they multiply."""
    kernels = runs(open_jaxpr(program).eqns, _is_kernel)
    return sum(run.times * own_flops(run.equation) for run in kernels if _is_kernel(run.equation))


def own_flops(equation: Any) -> int:
    """The FLOPs of a kernel or a region, by its author's estimate or by what it multiplies, or of a matmul."""
    params = equation.params
    if equation.primitive.name == "region":
        return params["function"].flops(params["program"])
    if not _is_kernel(equation):
        return equation_flops(equation)
    if params["cost_estimate"] is not None:
        return int(params["cost_estimate"].flops)
    return inner_runs(equation) * sum(map(_flops, programs_in(equation)))


def _flops(program: ClosedJaxpr | Jaxpr) -> int:
    inside = runs(open_jaxpr(program).eqns, _has_own_flops)
    return sum(run.times * own_flops(run.equation) for run in inside)


def _has_own_flops(equation: Any) -> bool:
    return equation.primitive.name == "region" or _is_kernel(equation)


def _is_kernel(equation: Any) -> bool:
    return equation.primitive.name == "pallas_call"
