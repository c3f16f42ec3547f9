"""The arguments of a function to compile: their arrays, and how each is requested to be sharded."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import share_variables, shared_leaves
from shardrules.core.errors import ConfigError, ConfigTypeError, TreeError
from shardrules.core.finding import Finding, plan_error
from shardrules.core.leaf import Decision
from shardrules.core.rule import MirrorShardingRule, ShardingPlan, ShardingRule
from shardrules.core.spec import device_dtype, same, spec_repr
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.rules.how import How, HowEach, by_leaf, checked_plan, not_an_entry, refusal, resolve, spec_errors

_HOST = "pinned_host"
"""The only kind of memory, beside the device's own, that requests keep."""

_ACCEPTED = "a PartitionSpec, a NamedSharding or None"


@final
@attrs.frozen
class Argument:
    """One array among the arguments of a function."""

    path: str
    """The name of the argument, and the path in it: `"params/layers/0/w"`."""
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None = None
    """`None` leaves the choice to the compiler."""
    memory: str | None = None
    """The kind of memory, where that is not the device's own."""
    mirrors: bool = False
    """The spec mirrors a planned leaf's."""
    planned: bool = False
    """The spec comes from a plan or a rule."""
    weak: bool = False
    """The dtype gives way to others, as a Python number's does."""

    def struct(self, mesh: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape to trace the function with; `mesh` is on devices of the target."""
        dtype = device_dtype(self.dtype)
        if self.spec is None:
            return jax.ShapeDtypeStruct(self.shape, dtype, weak_type=self.weak)
        sharding = NamedSharding(mesh, self.spec, memory_kind=self.memory)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding, weak_type=self.weak)


@final
@attrs.frozen(eq=False)
class Arguments:
    """The flattened arguments of a function."""

    arrays: tuple[Argument, ...]
    leaves: tuple[Any, ...]
    """The leaves of all arguments, arrays or not."""
    treedef: Any
    owners: tuple[int, ...]
    """For each array the index of its argument."""
    shared: Mapping[int, int] = attrs.field(factory=dict)
    """The leaves of variables that occur twice, as `shared_leaves` returns them."""

    def with_shardings(self, shardings: Mapping[int, NamedSharding], mesh: AnyMesh) -> "Arguments":
        """Returns the arguments with the shardings that a jitted function has of its own, by array index."""
        problems = [
            attrs.evolve(finding, remedy="Audit it on the mesh that it is jitted for")
            for index, sharding in shardings.items()
            for finding in spec_errors(self.arrays[index].shape, sharding.spec, mesh, self.arrays[index].path)
        ]
        problems += [
            Finding(
                "error",
                "two-specs",
                f"the call requests {spec_repr(requested)}, and the jitted function has {spec_repr(sharding.spec)}",
                self.arrays[index].path,
                "Pass the spec in one of both places",
                self.arrays[index].shape,
            )
            for index, sharding in shardings.items()
            for requested in [self.arrays[index].spec]
            if requested is not None and not same(requested, sharding.spec)
        ]
        if problems:
            raise plan_error("the jitted function has other shardings than the call requests", problems)
        arrays = list(self.arrays)
        for index, sharding in shardings.items():
            # The kind of memory stays as the call has it, unless the jitted function names another.
            memory = requested_memory(sharding) or arrays[index].memory
            arrays[index] = attrs.evolve(arrays[index], spec=sharding.spec, memory=memory)
        return attrs.evolve(self, arrays=tuple(arrays))

    def rebuild(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the arguments to call the function with, one of `arrays` for each of `self.arrays`."""
        remaining = iter(arrays)
        leaves = [leaf if array_kind(leaf) is None else next(remaining) for leaf in self.leaves]
        return share_variables(self.treedef.unflatten(leaves), self.shared)


@final
@attrs.frozen(eq=False)
class _Request:
    """The requested sharding of one array, and `True` if a plan requests it."""

    spec: PartitionSpec
    memory: str | None = None
    mirrors: bool = False
    planned: bool = False


def read_arguments(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    plan: ShardingPlan | ShardingRule | None = None,
    in_shardings: HowEach = None,
) -> Arguments:
    """Flattens arguments and finds how each of their arrays is requested to be sharded.

    `in_shardings` comes first, then `plan`, then the sharding that an array has already. `plan` is for the tuple of all
    arguments, or for the only one; or for the first, and arrays of the others that mirror it get its specs.
    """
    items: tuple[Any, ...] = cast(Any, in_shardings) if type(in_shardings) is tuple else (in_shardings,) * len(args)
    if len(items) != len(args):
        raise TreeError(f"in_shardings has {len(items)} items, but there are {len(args)} arguments")
    names = argument_names(fn, len(args))
    plan_requests = _requests_by_argument(args, plan, mesh)
    problems: list[Finding] = []
    arrays: list[Argument] = []
    owners: list[int] = []
    for owner, (name, arg, how) in enumerate(zip(names, args, items, strict=True)):
        requests, refusals = _how_requests(arg, how, mesh, name, f"in_shardings, {name}")
        problems += refusals
        leaves = zip(jtu.tree_leaves(arg), _paths(arg, name), requests, plan_requests[owner], strict=True)
        for leaf, path, how_request, plan_request in leaves:
            kind = array_kind(leaf)
            if kind is None:
                continue
            # The caller's request, else the plan's, else the sharding that the array has.
            current = _as_request(getattr(leaf, "sharding", None))  # numpy arrays have none
            array = _argument(path, leaf, kind, how_request or plan_request or current)
            owners.append(owner)
            arrays.append(array)
            if array.spec is not None:
                problems += spec_errors(array.shape, array.spec, mesh, array.path)
    if problems:
        raise refusal("the arguments", problems)
    leaves, treedef = jtu.tree_flatten(args)
    return Arguments(tuple(arrays), tuple(leaves), treedef, tuple(owners), shared_leaves(args))


def _argument(path: str, leaf: Any, kind: tuple[tuple[int, ...], Any], request: _Request | None) -> Argument:
    shape, dtype = kind
    weak = bool(getattr(leaf, "weak_type", False))  # numpy arrays and other libraries' shapes have none
    if request is None:
        return Argument(path, shape, dtype, weak=weak)
    return Argument(path, shape, dtype, request.spec, request.memory, request.mirrors, request.planned, weak)


def _paths(tree: Any, name: str) -> list[str]:
    return [f"{name}/{path}".rstrip("/") for path in leaf_paths(tree)]


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Returns a name for each of `count` positional arguments, as far as the function has names for them."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some callables of C have none
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional][:count]
    variadic = (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL)
    variadic_name = next(variadic, "args")
    return names + [f"{variadic_name}/{index}" for index in range(count - len(names))]


def donated_arguments(donate_argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the indices of donated arguments from 0, from `donate_argnums` of `jax.jit` for `count` arguments."""
    argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    unknown = [argnum for argnum in argnums if not -count <= argnum < count]
    if unknown:
        raise ConfigError(f"donate_argnums names argument {unknown[0]}, but there are {count}, counted from 0")
    return tuple(argnum % count for argnum in argnums)


def _requests_by_argument(args: tuple[Any, ...], plan: Any, mesh: AnyMesh) -> list[list[_Request | None]]:
    """Returns what `plan` requests for each leaf of each argument."""
    leaf_counts = [len(jtu.tree_leaves(arg)) for arg in args]
    if plan is None:
        return [[None] * leaf_count for leaf_count in leaf_counts]
    all_args = args[0] if len(args) == 1 else args
    if isinstance(plan, ShardingRule):
        plan = plan.plan(all_args, mesh)
    if not isinstance(plan, ShardingPlan):
        raise ConfigTypeError(f"plan must be a ShardingPlan or a rule, got {plan!r:.80}. Pass specs as in_shardings")
    mismatch = "there are no arguments"
    # A plan may be for all arguments or for the first: the one that it fits.
    for tree in (all_args, args[0]) if args else ():
        try:
            requests = _plan_requests(plan.bind(tree), tree, mesh, "plan")
        except TreeError as error:
            mismatch = str(error)
            continue
        if tree is args:
            remaining = iter(requests)
            return [list(itertools.islice(remaining, leaf_count)) for leaf_count in leaf_counts]
        mirrored = [_plan_requests(plan.mirror(arg), arg, mesh, "plan") for arg in args[1:]]
        # The mirrored plan replicates what mirrors nothing. The user did not plan that: it is left to the compiler.
        return [
            requests,
            *([request if request and request.mirrors else None for request in part] for part in mirrored),
        ]
    problem = "does not fit the argument" if len(args) == 1 else "fits neither all arguments nor the first"
    raise TreeError(f"plan {problem}:\n{mismatch}")


def _plan_requests(plan: ShardingPlan, tree: Any, mesh: AnyMesh, caller: str) -> list[_Request | None]:
    plan = checked_plan(plan, mesh, caller)
    requests = [
        _Request(spec, None, _is_mirrored(decision), True)
        for spec, decision in zip(plan.kind_specs, plan.decisions, strict=True)
    ]
    return by_leaf(plan, requests, len(jtu.tree_leaves(tree)), caller)


def _is_mirrored(decision: Decision) -> bool:
    return isinstance(decision.rule, MirrorShardingRule) and not any(
        finding.code == "unmirrored" for finding in decision.findings
    )


def _how_requests(
    tree: Any, how: How, mesh: AnyMesh, name: str, caller: str
) -> tuple[list[_Request | None], list[Finding]]:
    """Returns what one item of `in_shardings` or `out_shardings` requests for each leaf, and what is wrong with it."""
    leaves = jtu.tree_leaves(tree)
    if how is None:
        return [None] * len(leaves), []
    resolved = resolve(how, tree, mesh, caller)
    if resolved.plan is not None:
        return _plan_requests(resolved.plan, tree, mesh, caller), []
    requests = [_as_request(entry) for entry in resolved.entries]
    # Devices and shardings without axes place arrays, but a program to compile for other devices needs specs.
    refused_indices = [
        index
        for index, (entry, request) in enumerate(zip(resolved.entries, requests, strict=True))
        if entry is not None and request is None
    ]
    paths = _paths(tree, name) if refused_indices else []
    return requests, [
        not_an_entry(resolved.entries[index], getattr(leaves[index], "shape", ()), _ACCEPTED, paths[index])
        for index in refused_indices
    ]


def _as_request(entry: Any) -> _Request | None:
    if isinstance(entry, PartitionSpec):
        return _Request(entry)
    if isinstance(entry, NamedSharding):
        return _Request(entry.spec, requested_memory(entry))
    return None


def requested_memory(sharding: NamedSharding) -> str | None:
    """Returns the kind of memory that a sharding asks for, where that is the host's."""
    return sharding.memory_kind if sharding.memory_kind == _HOST else None


def result_shardings(shapes: Any, out_shardings: HowEach, mesh: AnyMesh) -> list[NamedSharding | None]:
    """Returns the requested sharding of each leaf of a result, or `None` where nothing is requested.

    `out_shardings` is as `in_shardings` of `read_arguments`; a tuple has one item per item of a result that is a tuple.
    """
    parts: Mapping[str, tuple[Any, Any]] = {"the result": (shapes, cast(Any, out_shardings))}
    # Named tuples are trees of specs: only a plain tuple has one item per result.
    if type(out_shardings) is tuple and type(shapes) is tuple:
        items = cast(tuple[Any, ...], out_shardings)
        if len(items) != len(shapes):
            raise TreeError(f"out_shardings has {len(items)} items, but the function returns {len(shapes)}")
        parts = {f"result {index}": pair for index, pair in enumerate(zip(shapes, items, strict=True))}
    problems: list[Finding] = []
    shardings: list[NamedSharding | None] = []
    for name, (part, how) in parts.items():
        requests, refusals = _how_requests(part, how, mesh, name, f"out_shardings, {name}")
        problems += refusals
        for leaf, path, request in zip(jtu.tree_leaves(part), _paths(part, name), requests, strict=True):
            if request is None or array_kind(leaf) is None:
                shardings.append(None)
                continue
            errors = spec_errors(leaf.shape, request.spec, mesh, path)
            problems += errors
            shardings.append(None if errors else NamedSharding(mesh, request.spec, memory_kind=request.memory))
    if problems:
        raise refusal("the results", problems)
    return shardings
