"""`filter_shard_map`: `jax.shard_map` for functions of any pytrees, mapped by rules, plans or specs."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final, overload

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, check_mesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of, update_wrapper
from shardrules.core.context import current_mesh
from shardrules.core.errors import ConfigTypeError, TreeError, UnknownAxisError, suggest
from shardrules.core.finding import Finding, shape_text
from shardrules.core.jax_state import shard_map, under_trace
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import UNCONSTRAINED, axis_names, device_dtype, entries, spec_repr
from shardrules.core.tree import spread
from shardrules.placement.destination import common_mesh, usable_mesh
from shardrules.placement.functions.calls import (
    FlatCall,
    PartialCall,
    argument_parts,
    as_tree,
    flatten_call,
    is_array,
    result_parts,
    signature_of,
)
from shardrules.placement.traced import axis_types, constrain_traced
from shardrules.placement.transfer import put
from shardrules.rules.how import (
    How,
    HowEach,
    by_leaf,
    checked_plan,
    is_entry,
    not_an_entry,
    refuse_leaves,
    resolve,
    spec_errors,
)

_CALLER = "filter_shard_map"


@overload
def filter_shard_map(
    fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    in_specs: HowEach = None,
    out_specs: HowEach = None,
    *,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
) -> "FilterShardMap": ...


@overload
def filter_shard_map(
    fn: None = None,
    mesh: AnyMesh | None = None,
    in_specs: HowEach = None,
    out_specs: HowEach = None,
    *,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
) -> "Callable[[Callable[..., Any]], FilterShardMap]": ...


def filter_shard_map(
    fn: Callable[..., Any] | None = None,
    mesh: AnyMesh | None = None,
    in_specs: HowEach = None,
    out_specs: HowEach = None,
    *,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
) -> "FilterShardMap | Callable[[Callable[..., Any]], FilterShardMap]":
    """Maps a function of any pytrees over the devices of a mesh: each device calls it with its own shards.

    It is `jax.shard_map` for modules. Arrays are split, whatever tree they are in; all other leaves are passed through,
    into the function and out of it. Inside, the function talks to other devices by `jax.lax.psum` and the like, under
    the names of the mesh axes. It can be used under `jit`, `grad`, `vmap` and `scan`.

    Call it under `filter_jit`: by itself it is traced and compiled at every call, as `jax.shard_map` is, and a check by
    `equinox.error_if` that fails on one of several devices leaves the others waiting.

    **Arguments:**

    - `fn`: the function. A module that is called, and keyword-only arguments, are whole on every device.
    - `mesh`: the mesh; by default that of a rule or a plan, else the one that the arrays are on, else the one in force.
    - `in_specs`: a tuple with one item per positional argument, or one item for all of them. An item is a rule, a plan,
        a PartitionSpec, or a tree or prefix of specs. `None` and `P()` give every device the whole.
    - `out_specs`: the same for the result, of which the specs say how the shards are put together; a tuple has one item
        per item of a result that is a tuple. `None` and `P()` promise that all devices return the same.
    - `axis_names`: the axes that are mapped; by default all of them. The others are left to the compiler.
    - `check_vma`: whether JAX checks what `out_specs` promises.

    **Returns:**

    A function like `fn`, of whole arrays.

    **Raises:**

    `PlanError`, listing every array that does not fit its spec; `TreeError` where specs or a plan are for another tree;
    `NoMeshError`.

    A rule in `out_specs` decides on the shapes of the whole results. For those `fn` is traced once more, on a mesh with
    one device per axis, so it has to take the sizes of axes from `jax.lax.axis_size`.

    ```python
    mesh = sr.create_mesh("data:8")
    model = eqx.nn.MLP(4, 2, 8, depth=1, key=jax.random.key(0))

    def loss(model, x):
        return jax.lax.pmean(jnp.mean(jax.vmap(model)(x) ** 2), "data")

    mapped = sr.filter_shard_map(loss, mesh, in_specs=(P(), P("data")), out_specs=P())
    gradients = eqx.filter_jit(eqx.filter_grad(mapped))(model, jnp.ones((16, 4)))
    assert gradients.layers[0].weight.shape == (8, 4)
    ```
    """
    check_mesh(mesh)
    if fn is None:
        return functools.partial(
            filter_shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
    if not callable(fn):
        raise ConfigTypeError(
            f"filter_shard_map maps a function, got {fn!r:.80}. Pass rules and specs as in_specs and out_specs"
        )
    names = frozenset() if axis_names is None else frozenset(axis_names)
    return FilterShardMap(as_tree(fn), _Options(mesh, in_specs, out_specs, names, check_vma))


@final
@attrs.frozen(eq=False)
class _Options:
    """Options of mapping a function; the fields are the arguments of `filter_shard_map`."""

    mesh: AnyMesh | None
    in_specs: HowEach
    out_specs: HowEach
    axis_names: frozenset[str]
    check_vma: bool


@final
@jtu.register_pytree_node_class
@attrs.define(eq=False, slots=False)  # with a dictionary of its own, for update_wrapper
class FilterShardMap:
    """A mapped function; `filter_shard_map` makes one. As a pytree it holds the arrays of the function."""

    fn: Callable[..., Any]
    options: _Options

    def __attrs_post_init__(self) -> None:
        update_wrapper(self, self.fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        signature = signature_of(self.fn)
        if signature is not None:
            bound = signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        call = flatten_call(self.fn, args, kwargs, _CALLER)
        mapping = _Mapping(_mesh_of(call, self.options), self.options)
        in_specs = mapping.in_specs(call)
        results = mapping.results(call, in_specs)
        static: list[Any] = []

        def run(*shards: Any) -> Any:
            result = call.run(shards, _CALLER)
            mapping.check(result, results)
            arrays, rest = eqx.partition(result, is_array)
            static.append(rest)
            return arrays

        # Errors of JAX name the user's function.
        run.__name__ = run.__qualname__ = name_of(self.fn)
        mapped = shard_map(
            run,
            mesh=_mesh_to_map(mapping.mesh),
            in_specs=in_specs,
            out_specs=results.specs,
            axis_names=self.options.axis_names,
            check_vma=self.options.check_vma,
        )
        return eqx.combine(mapped(*mapping.place(call.arrays, in_specs)), static[-1])

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else PartialCall(self, (instance,), {})

    def tree_flatten(self) -> tuple[tuple[Any], _Options]:
        """Returns the function, which may be a module, and what is static."""
        return (self.fn,), self.options

    @classmethod
    def tree_unflatten(cls, options: _Options, children: Iterable[Any]) -> "FilterShardMap":
        """Makes one from what `tree_flatten` returns."""
        (fn,) = children
        return cls(fn, options)


@final
@attrs.frozen(eq=False)
class _Results:
    """The specs of a result, as a tree or a prefix of it."""

    specs: Any
    whole: Any = None
    """The result with the shapes of whole arrays, if a rule had to know them: then each leaf has a spec."""


@final
@attrs.frozen(eq=False)
class _Mapping:
    """A mesh, and the specs of arguments and results on it."""

    mesh: AnyMesh
    options: _Options

    def __attrs_post_init__(self) -> None:
        for name in sorted(self.options.axis_names):
            if name not in self.mesh.axis_names:
                hint = suggest(name, self.mesh.axis_names)
                raise UnknownAxisError(f"{_CALLER}: unknown axis {name!r}{hint}; the mesh is {mesh_text(self.mesh)}")

    def in_specs(self, call: FlatCall) -> tuple[PartitionSpec, ...]:
        """Returns the spec of each array of a call."""
        parts = argument_parts(call, self.options.in_specs, _CALLER, "in_specs")
        specs = [spec for name, tree, how in parts for spec in self._leaf_specs(tree, how, name)]
        return tuple(spec for spec in specs if spec is not None)

    def results(self, call: FlatCall, in_specs: tuple[PartitionSpec, ...]) -> _Results:
        """Returns the specs of the result. Rules decide on whole arrays; specs and plans are for any result."""
        how = self.options.out_specs
        items = how if isinstance(how, tuple) else (how,)
        if any(isinstance(item, ShardingRule) or _is_function(item) for item in items):
            whole = self._whole_result(call, in_specs)
            parts = result_parts(whole, how, _CALLER, "out_specs")
            leaf_specs = [spec for name, part, item in parts for spec in self._leaf_specs(part, item, name)]
            return _Results(jax.tree.unflatten(jax.tree.structure(whole), leaf_specs), whole)
        specs = jax.tree.map(
            _as_spec, tuple(map(_written, items)) if isinstance(how, tuple) else _written(how), is_leaf=is_entry
        )
        # JAX reads them before there is a result: what is wrong whatever is returned, is refused here.
        sizes, problems = mesh_sizes(self.mesh), []
        for index, spec in enumerate(jax.tree.leaves(specs, is_leaf=is_entry)):
            # A shard of size 1 along each dim stands for any: only what is wrong at every size is an error.
            shard = (1,) * len(spec.partitions) if isinstance(spec, PartitionSpec) else ()
            problems += [(index, finding) for finding in self._errors(_joined(shard, spec, sizes), spec)]
        refuse_leaves(f"{_CALLER}, out_specs", specs, problems)
        return _Results(specs)

    def check(self, result: Any, results: _Results) -> None:
        """Raises an error that lists the shards of a result that their specs cannot put together."""
        leaves, treedef = jax.tree.flatten(result)
        sizes = mesh_sizes(self.mesh)
        if results.whole is not None and jax.tree.structure(results.whole) != treedef:
            raise TreeError(f"{_CALLER}: the structure of the result depends on the sizes of the mesh axes")
        specs = spread(results.specs, result, is_entry, f"{_CALLER}, the result", "specs")
        whole = leaves if results.whole is None else jax.tree.leaves(results.whole)
        problems: list[tuple[int, Finding]] = []
        for leaf_index, (leaf, spec, expected) in enumerate(zip(leaves, specs, whole, strict=True)):
            if not is_array(leaf):
                continue
            shape = _joined(leaf.shape, spec, sizes)
            findings = self._errors(shape, spec)
            if not findings and results.whole is not None and shape != expected.shape:
                what = (
                    f"{spec_repr(spec)} puts shards of {shape_text(leaf.shape)} together to {shape_text(shape)}, and "
                    f"was decided for {shape_text(expected.shape)}"
                )
                remedy = "Return shards that are split so, or write the spec out"
                findings = [Finding("error", "misfit", what, "", remedy, expected.shape)]
            problems += [(leaf_index, finding) for finding in findings]
        refuse_leaves(f"{_CALLER}, the result", result, problems)

    def place(self, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        """Returns the arrays split by their specs, where JAX does not do it: outside of jit, and on Explicit axes."""
        if isinstance(self.mesh, Mesh) and not under_trace():
            return put(arrays, [NamedSharding(self.mesh, spec) for spec in specs])
        if AxisType.Explicit not in axis_types(self.mesh).values():
            return list(arrays)
        return [
            constrain_traced(jnp.asarray(array), self.mesh, spec) for array, spec in zip(arrays, specs, strict=True)
        ]

    def _leaf_specs(self, tree: Any, how: How, name: str) -> list[PartitionSpec | None]:
        """Returns the spec of each leaf of a tree; `None` for leaves that are not arrays."""
        caller = f"{_CALLER}, {name}"
        leaves = jax.tree.leaves(tree)
        resolved = resolve(how, tree, self.mesh, caller)
        if resolved.plan is not None:
            plan = checked_plan(resolved.plan, self.mesh, caller)
            specs = by_leaf(plan, plan.kind_specs, len(leaves), caller)
        else:
            specs = list(map(_as_spec, resolved.entries))
        specs = [spec if is_array(leaf) else None for leaf, spec in zip(leaves, specs, strict=True)]
        pairs = enumerate(zip(leaves, specs, strict=True))
        problems = [(n, bad) for n, (leaf, spec) in pairs if spec is not None for bad in self._errors(leaf.shape, spec)]
        refuse_leaves(caller, tree, problems)
        return specs

    def _errors(self, shape: tuple[int, ...], spec: Any) -> list[Finding]:
        if not isinstance(spec, PartitionSpec):
            return [not_an_entry(spec, shape, "a PartitionSpec, a NamedSharding or None")]
        if UNCONSTRAINED in spec.partitions:
            what = f"{spec_repr(spec)} has an UNCONSTRAINED dimension, and the shape of a shard must be known"
            return [Finding("error", "not-placeable", what, "", "Name the axes that split it, or None", shape)]
        mapped = self.options.axis_names or self.mesh.axis_names
        remedy = "Add it to axis_names, or leave it out of the spec: the compiler splits over axes that are not mapped"
        return spec_errors(shape, spec, self.mesh) + [
            Finding("error", "axis-not-mapped", f"axis {name!r} is not mapped", "", remedy, shape, axis=name)
            for name in axis_names(spec)
            if name in self.mesh.axis_names and name not in mapped
        ]

    def _whole_result(self, call: FlatCall, in_specs: tuple[PartitionSpec, ...]) -> Any:
        """Returns the result with the shapes of whole arrays: as if each mesh axis had one device."""
        names = self.mesh.axis_names
        mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
        static: list[Any] = []

        def run(*arrays: Any) -> Any:
            shapes, rest = eqx.partition(call.run(arrays, _CALLER), is_array)
            static.append(rest)
            return shapes

        structs = [jax.ShapeDtypeStruct(array.shape, device_dtype(array.dtype)) for array in call.arrays]
        options: dict[str, Any] = {"axis_names": self.options.axis_names, "check_vma": False}
        try:
            with jax.sharding.use_abstract_mesh(mesh):
                mapped = shard_map(run, in_specs=in_specs, out_specs=PartitionSpec(), **options)
                return eqx.combine(jax.eval_shape(mapped, *structs), static[-1])
        except Exception as error:
            error.add_note(
                f"{_CALLER}: a rule in out_specs decides on the shapes of the whole results. For those the function is "
                "traced on a mesh with one device per axis. Read sizes with jax.lax.axis_size, or pass a plan"
            )
            raise


def _mesh_of(call: FlatCall, options: _Options) -> AnyMesh:
    items = options.in_specs if isinstance(options.in_specs, tuple) else (options.in_specs,)
    named = [options.mesh, *(item.mesh for item in items if isinstance(item, ShardingPlan))]
    candidates = [mesh for mesh in (*named, common_mesh(call.arrays), current_mesh()) if mesh is not None]
    # A mesh without devices stands for any mesh of the same axes.
    same = [mesh for mesh in candidates if mesh_sizes(mesh) == mesh_sizes(candidates[0])]
    return usable_mesh(same, _CALLER)


def _mesh_to_map(mesh: AnyMesh) -> AnyMesh | None:
    """Returns the mesh, or `None` for the one in force: there its axes may have other types, which JAX refuses."""
    here = jax.sharding.get_abstract_mesh()
    return None if under_trace() and not here.empty and dict(here.shape) == dict(mesh.shape) else mesh


def _is_function(how: Any) -> bool:
    return callable(how) and not is_entry(how) and jtu.all_leaves([how])


def _written(how: Any) -> Any:
    """Returns the specs of a plan, and `None` for its leaves that are not arrays; else what is written."""
    if not isinstance(how, ShardingPlan):
        return how
    return jax.tree.map(lambda entry: entry if is_entry(entry) else None, how.specs, is_leaf=is_entry)


def _as_spec(entry: Any) -> Any:
    if entry is None:
        return PartitionSpec()
    return entry.spec if isinstance(entry, NamedSharding) else entry


def _joined(shape: tuple[int, ...], spec: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of a whole array from the shape of a shard; axes that the mesh lacks do not split it."""
    if not isinstance(spec, PartitionSpec) or UNCONSTRAINED in spec.partitions:
        return shape
    # A spec may be shorter or longer than the shape: missing counts are 1, and what is too long is cut.
    parts = (math.prod(sizes.get(name, 1) for name in entry) for entry in entries(spec))
    return tuple(size * count for size, count in itertools.zip_longest(shape, parts, fillvalue=1))[: len(shape)]
