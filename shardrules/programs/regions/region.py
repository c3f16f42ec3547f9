"""`region`: a function that runs on shards, with a declaration of how its dims go together. And `alternatives`."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.programs.regions.declaration import Axes, Declaration
from shardrules.programs.regions.derivative import differentiable
from shardrules.programs.regions.function import ShardFunction


def region(
    rule: str,
    *,
    split: str | None = None,
    whole: str | None = None,
    exchange: str | None = None,
    cost: Callable[..., float] | None = None,
) -> "Callable[[Callable[..., Any]], RegionFunction]":
    """Declares how the dims of a function's arrays go together, so that devices can run it on their shards.

    It is for what compilers cannot split by themselves: a Pallas or FFI kernel, for which they gather the batch. Under
    a plan, or on an Explicit mesh, each device runs the function on its shards, in `jax.shard_map`; elsewhere the
    compiler's partitioner gets the declaration, and gathers nothing that may stay split. It works under `jax.jit`,
    `jax.vmap`, `jax.lax.scan`, `jax.checkpoint` and `jax.grad`. The backward pass is a region too: it computes the
    forward pass again, and runs the function's own `custom_vjp` where it has one.

    A function that cannot run on shards of some shapes raises `shardrules.errors.SplitError`, and plans split it in
    another way. What the declaration says is believed; `shardrules.check_region` compares shards with the whole.

    **Arguments:**

    - `rule`: the dims of operands and results, in the letters of an einsum: `"b s d, d -> b s d"`. Arrays are separated
        by commas, letters by spaces; letters may be words.
    - `split`: the letters that may be split. A result that lacks one of them is a sum over it, as in an einsum: shards
        of `"m k, k n -> m n"` with `split="m n k"` return parts of a sum, which is completed by an all-reduce.
    - `whole`: the letters that may not be split. One of `split` and `whole` is enough.
    - `exchange`: letters that may be split too, all of them over the same mesh axes, where the function itself
        communicates. It is called with the keyword argument `axis_name`: a tuple of mesh axes, as collectives of
        `jax.lax` take them, or `None` where these letters are whole. Of a result that has none of these letters each
        shard returns a part of a sum.
    - `cost`: a function that returns the FLOPs of one call, from a `jax.ShapeDtypeStruct` for each operand. By default
        the matmuls that the function writes are counted, and what its kernels estimate.

    **Returns:**

    A decorator. The decorated function takes arrays by position; keyword arguments are static, and must be hashable.

    **Raises:**

    `ConfigError` for a rule that is not one, and where the arrays of a call do not fit it.

    ```python
    @sr.region("rows dim, dim -> rows dim", split="rows")
    def normalise(x, weight):  # a kernel of your own
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True)) * weight

    mesh = sr.create_mesh("data:8")
    x = jax.device_put(jnp.ones((16, 4)), jax.NamedSharding(mesh, P("data")))
    assert jax.jit(normalise)(x, jnp.ones(4)).sharding.spec == P("data")
    ```
    """
    declaration = Declaration.parse(rule, split, whole, exchange)
    if cost is not None and not callable(cost):
        raise ConfigTypeError(f"region: cost must be a function of the operands' shapes, got {cost!r:.60}")

    def decorate(fn: Callable[..., Any]) -> RegionFunction:
        if not callable(fn):
            raise ConfigTypeError(f"region decorates a function, got {fn!r:.60}")
        if inspect.isfunction(fn) and fn.__code__.co_varnames[:1] == ("self",):  # a bound method is fine
            raise ConfigTypeError(
                f"region decorates a function of arrays, and {fn.__qualname__} is a method: call a region from it"
            )
        return RegionFunction(fn, declaration, cost)

    return decorate


def alternatives(*regions: "RegionFunction") -> "RegionFunction":
    """Returns a region that is computed by one of several, which compute the same.

    They have the same rule, and may be split along different letters, or communicate differently. `shardrules.autoplan`
    and `shardrules.plan_training` take for each call the one that is fastest in the layout that they choose, for the
    forward and the backward pass. Without a plan the one runs that is split over the most devices, and of equal ones
    the first.

    **Arguments:**

    - `regions`: what `shardrules.region` returns, at least two. One that raises `shardrules.errors.SplitError` for
        shards of some shapes is not taken for them.

    **Returns:**

    A region; keyword arguments are passed to whichever runs.

    **Raises:**

    `ConfigError` where the rules differ.

    ```python
    @sr.region("rows dim -> rows dim", split="rows")
    def softmax(x):
        return jax.nn.softmax(x)

    @sr.region("rows dim -> rows dim", split="rows", exchange="dim")
    def softmax_by_exchange(x, *, axis_name):
        largest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
        if axis_name:
            largest = jax.lax.pmax(largest, axis_name)
        terms = jnp.exp(x - largest)
        total = terms.sum(-1, keepdims=True)
        return terms / (jax.lax.psum(total, axis_name) if axis_name else total)

    either = sr.alternatives(softmax, softmax_by_exchange)
    x = jax.device_put(jnp.ones((3, 16)), jax.NamedSharding(sr.create_mesh("model:8"), P(None, "model")))
    assert jax.jit(either)(x).sharding.spec == P(None, "model")
    ```
    """
    if len(regions) < 2 or not all(isinstance(region, RegionFunction) for region in regions):
        raise ConfigTypeError(
            f"alternatives needs at least two functions that shardrules.region returns, got {list(regions)!r:.80}"
        )
    flat = tuple(inner for region in regions for inner in (region.regions or (region,)))
    declarations = [region.declaration for region in flat]
    first = declarations[0]
    problems = [
        f"{region.name} is {declaration}, and {flat[0].name} {first}"
        for region, declaration in zip(flat, declarations, strict=True)
        if str(declaration) != str(first)
    ]
    exchanges = dict.fromkeys(tuple(sorted(each.exchange)) for each in declarations if each.exchange)
    if len(exchanges) > 1:
        problems.append(f"they exchange along different letters: {', '.join(map(' '.join, exchanges))}")
    if problems:
        raise ConfigError(f"alternatives must have one rule: {'; '.join(problems)}")
    # A letter that one of them can split or exchange may be split: which of them runs is chosen by the axes.
    union = attrs.evolve(
        first,
        split=tuple(dict.fromkeys(letter for each in declarations for letter in each.split)),
        exchange=next((each.exchange for each in declarations if each.exchange), ()),
    )
    return RegionFunction(flat[0].fn, union, regions=flat)


@final
@attrs.define(eq=False, slots=False)
class RegionFunction:
    """A function that devices run on their shards; `shardrules.region` and `shardrules.alternatives` make one."""

    fn: Callable[..., Any]
    declaration: Declaration
    cost: Callable[..., float] | None = None
    regions: "tuple[RegionFunction, ...]" = ()
    """The alternatives that it is computed by."""
    axes: Axes | None = None
    """The mesh axes that plans have to exchange its shards over."""
    _functions: dict[Hashable, ShardFunction] = attrs.field(factory=dict, init=False, repr=False)
    _pinned: "dict[Axes, RegionFunction]" = attrs.field(factory=dict, init=False, repr=False)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, *operands: Any, **options: Any) -> Any:
        arrays = [self._array(index, operand) for index, operand in enumerate(operands)]
        types = jax.sharding.get_abstract_mesh().axis_types
        function = self.on_shards(options)
        if AxisType.Manual in types and set(types) != {AxisType.Manual}:
            function.refuse(["it is inside a jax.shard_map over some axes of the mesh; map all of them"])
        # Inside of a shard_map operands are shards.
        results = function.run((), *arrays) if AxisType.Manual in types else differentiable(function, arrays)
        return results[0] if len(self.declaration.results) == 1 else tuple(results)

    def _array(self, index: int, operand: Any) -> Any:
        try:
            return jnp.asarray(operand)
        except (TypeError, ValueError) as error:
            raise ConfigTypeError(
                f"region {self.name} ({self.declaration}): operand {index} must be an array, got {operand!r:.60}; pass "
                "the leaves of a tree one by one"
            ) from error

    def over(self, axes: Axes) -> "RegionFunction":
        """Returns the region whose shards plans exchange over these mesh axes, the same for the same axes."""
        if axes not in self._pinned:
            self._pinned[axes] = attrs.evolve(self, axes=axes)
        return self._pinned[axes]

    def on_shards(self, options: Mapping[str, Any]) -> ShardFunction:
        """Returns the function with its static arguments, the same for the same options."""
        try:
            # 2 == 2.0 == True, and 0.0 == -0.0: what is printed tells them apart.
            key = tuple((name, type(value), value, repr(value)) for name, value in sorted(options.items()))
            hash(key)
        except TypeError as error:
            raise ConfigTypeError(
                f"region {self.name}: keyword arguments are static and must be hashable; pass arrays by position"
            ) from error
        if key not in self._functions:
            functions = tuple(region.on_shards(options) for region in self.regions)
            run = functions[0].run if functions else self._run_with(options)
            self._functions[key] = ShardFunction(self.name, run, self.declaration, self.cost, functions, self.axes)
        return self._functions[key]

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """For people: the name of the function, or of all alternatives."""
        if self.regions:
            return " or ".join(region.name for region in self.regions)
        return name_of(self.fn)

    def _run_with(self, options: Mapping[str, Any]) -> Callable[..., list[Any]]:
        def run(exchange: Axes, *operands: Any) -> list[Any]:
            # Only functions that exchange take `axis_name`, which is `None` where nothing is split.
            axes = {"axis_name": exchange or None} if self.declaration.exchange else {}
            results = self.fn(*operands, **options, **axes)
            listed = [results] if len(self.declaration.results) == 1 else results
            if not isinstance(listed, list | tuple) or not all(hasattr(result, "shape") for result in listed):
                count = len(self.declaration.results)
                expected = "one array" if count == 1 else f"a tuple of {count} arrays"
                raise ConfigError(
                    f"region {self.name} ({self.declaration}) must return {expected}, got {type(results).__name__}"
                )
            return list(listed)

        return run
