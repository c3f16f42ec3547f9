"""`region`: a function that runs on shards, with a declaration of how its dims go together."""

from collections.abc import Callable, Hashable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.regions.declaration import Declaration
from shardrules.regions.derivative import differentiable
from shardrules.regions.function import ShardFunction


def region(
    rule: str,
    *,
    split: str | None = None,
    whole: str | None = None,
    cost: Callable[..., float] | None = None,
) -> "Callable[[Callable[..., Any]], RegionFunction]":
    """Declares how the dims of a function's arrays go together, so that devices can run it on their shards.

    It is for what compilers cannot split by themselves: a Pallas or FFI kernel, for which they gather the batch. Under
    a plan, or on an Explicit mesh, each device runs the function on its shards, in `jax.shard_map`; elsewhere the
    compiler's partitioner gets the declaration, and gathers nothing that may stay split. It works under `jax.jit`,
    `jax.vmap`, `jax.lax.scan`, `jax.checkpoint` and `jax.grad`. The backward pass is a region too: it computes the
    forward pass again, and runs the function's own `custom_vjp` where it has one.

    What the declaration says is believed; `shardrules.check_region` compares shards with the whole.

    **Arguments:**

    - `rule`: the dims of operands and results, in the letters of an einsum: `"b s d, d -> b s d"`. Arrays are separated
        by commas, letters by spaces; letters may be words.
    - `split`: the letters that may be split. A result that lacks one of them is a sum over it, as in an einsum: shards
        of `"m k, k n -> m n"` with `split="m n k"` return parts of a sum, which is completed by an all-reduce.
    - `whole`: the letters that may not be split. One of `split` and `whole` is enough.
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
    declaration = Declaration.parse(rule, split, whole)
    if cost is not None and not callable(cost):
        raise ConfigTypeError(f"region: cost must be a function of the operands' shapes, got {cost!r:.60}")

    def decorate(fn: Callable[..., Any]) -> RegionFunction:
        if not callable(fn):
            raise ConfigTypeError(f"region decorates a function, got {fn!r:.60}")
        return RegionFunction(fn, declaration, cost)

    return decorate


@final
@attrs.frozen(eq=False, slots=False)
class RegionFunction:
    """A function that devices run on their shards; `shardrules.region` makes one."""

    fn: Callable[..., Any]
    declaration: Declaration
    cost: Callable[..., float] | None = None
    _functions: dict[Hashable, ShardFunction] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, *operands: Any, **options: Any) -> Any:
        arrays = [jnp.asarray(operand) for operand in operands]
        types = jax.sharding.get_abstract_mesh().axis_types
        function = self.on_shards(options)
        if AxisType.Manual in types and set(types) != {AxisType.Manual}:
            function.refuse(["it is inside a jax.shard_map over some axes of the mesh; map all of them"])
        # Inside of a shard_map operands are shards.
        results = function.run(*arrays) if AxisType.Manual in types else differentiable(function, arrays)
        return results[0] if len(self.declaration.results) == 1 else tuple(results)

    def on_shards(self, options: dict[str, Any]) -> ShardFunction:
        """Returns the function with its static arguments, the same for the same options."""
        try:
            # 2 == 2.0 == True, and 0.0 == -0.0: what is printed tells them apart.
            key = tuple((name, type(value), value, repr(value)) for name, value in sorted(options.items()))
            hash(key)
        except TypeError as error:
            raise ConfigTypeError(
                f"region {self._name}: keyword arguments are static and must be hashable; pass arrays by position"
            ) from error
        if key not in self._functions:
            self._functions[key] = ShardFunction(self._name, self._run_with(options), self.declaration, self.cost)
        return self._functions[key]

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def _run_with(self, options: dict[str, Any]) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            results = self.fn(*operands, **options)
            listed = [results] if len(self.declaration.results) == 1 else results
            if not isinstance(listed, list | tuple) or not all(hasattr(result, "shape") for result in listed):
                count = len(self.declaration.results)
                expected = "one array" if count == 1 else f"a tuple of {count} arrays"
                raise ConfigError(
                    f"region {self._name} ({self.declaration}) must return {expected}, got {type(results).__name__}"
                )
            return list(listed)

        return run
