"""The arguments of a function that is to be compiled: their arrays, and where each is asked to be."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.check import check_spec
from shardrules.core.errors import TreeError
from shardrules.core.finding import Finding, plan_error
from shardrules.core.rule import MirrorShardingRule, ShardingPlan, ShardingRule
from shardrules.core.spec import device_dtype, same, spec_repr
from shardrules.core.tree import array_kind, leaf_paths, spread

_HOST = "pinned_host"


@final
@attrs.frozen
class Argument:
    """One array among the arguments of a function.

    **Arguments:**

    - `path`: the name of the argument, and the path in it: `"params/layers/0/w"`.
    - `shape`, `dtype`: its shape and dtype.
    - `spec`: where it is asked to be; `None` where nobody says, so that the compiler may choose.
    - `memory`: the memory that it is to be in, where that is not the device's own.
    - `mirrors`: whether it is where it is because it mirrors a planned leaf.
    - `planned`: whether a plan or a rule says where it is to be.
    - `weak`: whether its dtype gives way to others, as that of a Python number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None = None
    memory: str | None = None
    mirrors: bool = False
    planned: bool = False
    weak: bool = False

    def struct(self, mesh: Any) -> jax.ShapeDtypeStruct:
        """Returns what stands for it while the function is traced.

        **Arguments:**

        - `mesh`: the mesh, on devices of the target.

        **Returns:**

        A `jax.ShapeDtypeStruct`, with a sharding if one is asked for.
        """
        dtype = device_dtype(self.dtype)
        if self.spec is None:
            return jax.ShapeDtypeStruct(self.shape, dtype, weak_type=self.weak)
        sharding = NamedSharding(mesh, self.spec, memory_kind=self.memory)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding, weak_type=self.weak)


@final
@attrs.frozen(eq=False)
class Arguments:
    """The arguments of a function, taken apart.

    **Arguments:**

    - `arrays`: their arrays, in order.
    - `leaves`: the leaves of all arguments; those that are no arrays stay in their places.
    - `treedef`: their structure.
    - `owners`: for each array the number of the argument that it is in.
    """

    arrays: tuple[Argument, ...]
    leaves: tuple[Any, ...]
    treedef: Any
    owners: tuple[int, ...]

    def with_specs(self, specs: Mapping[int, PartitionSpec], mesh: AnyMesh) -> "Arguments":
        """Returns the arguments with specs that a jitted function itself has for some of them.

        **Arguments:**

        - `specs`: for numbers of arrays their specs.
        - `mesh`: the mesh.

        **Returns:**

        The `Arguments`.

        **Raises:**

        `PlanError` where somebody else has said otherwise, or the mesh has no such axis.
        """
        wrong = [
            attrs.evolve(finding, remedy="Audit it on the mesh that it is jitted for")
            for number, spec in specs.items()
            for finding in _errors(self.arrays[number].path, self.arrays[number].shape, spec, mesh)
        ]
        wrong += [
            Finding(
                "error",
                "two-specs",
                f"it is asked to be {spec_repr(own)}, and the function, which is jitted, says {spec_repr(spec)}",
                self.arrays[number].path,
                "Say it in one of both places",
                self.arrays[number].shape,
            )
            for number, spec in specs.items()
            for own in [self.arrays[number].spec]
            if own is not None and not same(own, spec)
        ]
        if wrong:
            raise plan_error("the function says otherwise where arguments are to be", wrong)
        arrays = [attrs.evolve(one, spec=specs.get(number, one.spec)) for number, one in enumerate(self.arrays)]
        return attrs.evolve(self, arrays=tuple(arrays))

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the arguments with other arrays in them.

        **Arguments:**

        - `arrays`: one for each of `self.arrays`.

        **Returns:**

        A tuple to call the function with.
        """
        rest = iter(arrays)
        return self.treedef.unflatten([leaf if array_kind(leaf) is None else next(rest) for leaf in self.leaves])


def read_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], mesh: AnyMesh, plan: Any = None, in_shardings: Any = None
) -> Arguments:
    """Takes arguments apart and finds where each of their arrays is to be.

    What `in_shardings` says comes first, then what `plan` says, then where an array lies already.

    **Arguments:**

    - `fn`: the function, which gives its arguments their names.
    - `args`: the arguments; shapes will do.
    - `mesh`: the mesh.
    - `plan`: a plan or a rule for the tuple of all arguments, or for the only one; or a plan of the first argument,
        of which the others take what mirrors it.
    - `in_shardings`: a tuple with one item for each argument, or one item that is for each of them: a rule, a plan, a
        function from the argument to one, or a tree or prefix of specs and shardings. `None` is no opinion.

    **Returns:**

    The `Arguments`.

    **Raises:**

    `PlanError`, which lists everything that is wrong with any array; `TreeError` where structures do not fit.

    ```python
    args, mesh = (np.ones((8, 4)), np.ones(4)), sr.mesh_shape("data:8")
    found = read_arguments(lambda w, x: w @ x, args, mesh, in_shardings=(P("data"), None))
    assert [(one.path, one.spec) for one in found.arrays] == [("w", P("data")), ("x", None)]
    ```
    """
    items = in_shardings if type(in_shardings) is tuple else (in_shardings,) * len(args)
    if len(items) != len(args):
        raise TreeError(f"in_shardings has {len(items)} items, and there are {len(args)} arguments")
    names = argument_names(fn, len(args))
    planned = _planned(args, plan, mesh)
    wrong: list[Finding] = []
    found: list[Argument] = []
    owners: list[int] = []
    for number, (name, arg, how) in enumerate(zip(names, args, items, strict=True)):
        said = [None] * len(jtu.tree_leaves(arg)) if how is None else _said(arg, how, mesh, f"in_shardings, {name}")
        for leaf, path, first, second in zip(jtu.tree_leaves(arg), leaf_paths(arg), said, planned[number], strict=True):
            kind = array_kind(leaf)
            if kind is None:
                continue
            one = _argument(f"{name}/{path}".rstrip("/"), leaf, kind, first or second or _as_it_lies(leaf))
            owners.append(number)
            found.append(one)
            if one.spec is not None:
                wrong += _errors(one.path, one.shape, one.spec, mesh)
    if wrong:
        raise plan_error("not all arguments can be where they are asked to be", wrong)
    leaves, treedef = jtu.tree_flatten(args)
    return Arguments(tuple(found), tuple(leaves), treedef, tuple(owners))


def _errors(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> list[Finding]:
    return [one for one in check_spec(path, shape, spec, mesh_sizes(mesh)) if one.severity == "error"]


@final
@attrs.frozen(eq=False)
class _Said:
    """Where one array is to be, and who says so."""

    spec: PartitionSpec
    memory: str | None = None
    mirrors: bool = False
    planned: bool = False


def _argument(path: str, leaf: Any, kind: tuple[tuple[int, ...], Any], said: _Said | None) -> Argument:
    shape, dtype = kind
    weak = bool(getattr(leaf, "weak_type", False))  # numpy arrays and others' stand-ins have none
    if said is None:
        return Argument(path, shape, dtype, weak=weak)
    return Argument(path, shape, dtype, said.spec, said.memory, said.mirrors, said.planned, weak)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of positional arguments, as far as the function tells them.

    **Arguments:**

    - `fn`: the function.
    - `count`: how many arguments it is called with.

    **Returns:**

    A name for each.

    ```python
    assert argument_names(lambda w, *rest: w, 3) == ["w", "rest/0", "rest/1"]
    ```
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some callables of C have none
        parameters = []
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "args")
    return names + [f"{rest}/{number}" for number in range(count - len(names))]


def donated_arguments(donate_argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Reads which arguments are given away.

    **Arguments:**

    - `donate_argnums`: their numbers, as in `jax.jit`; below 0 they count from the end.
    - `count`: how many arguments there are.

    **Returns:**

    Their numbers, counted from 0.

    **Raises:**

    `TreeError` where there is no such argument.

    ```python
    assert donated_arguments((0, -1), 3) == (0, 2)
    ```
    """
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
        raise TreeError(f"donate_argnums names argument {wrong[0]}, and there are {count}, counted from 0")
    return tuple(number % count for number in numbers)


def _planned(args: tuple[Any, ...], plan: Any, mesh: AnyMesh) -> list[list[_Said | None]]:
    """What the plan says of each leaf of each argument."""
    nothing: list[list[_Said | None]] = [[None] * len(jtu.tree_leaves(arg)) for arg in args]
    if plan is None:
        return nothing
    if isinstance(plan, ShardingRule):
        plan = plan.plan(args[0] if len(args) == 1 else args, mesh)
    if not isinstance(plan, ShardingPlan):
        raise TreeError(f"plan is a ShardingPlan or a rule, got {plan!r:.80}. Specs go to in_shardings")
    errors: list[str] = []
    whole = args[0] if len(args) == 1 else args
    for tree in (whole, args[0]) if args else ():
        try:
            said = _of_plan(plan.bind(tree), mesh, "plan")
        except TreeError as error:
            errors.append(str(error))
            continue
        if tree is args:
            rest = iter(said)
            return [[next(rest) for _ in part] for part in nothing]
        mirrored = [_of_plan(plan.mirror(arg), mesh, "plan") for arg in args[1:]]
        return [said, *([one if one is not None and one.mirrors else None for one in part] for part in mirrored)]
    about = "the argument" if len(args) == 1 else "neither all arguments nor the first of them"
    raise TreeError(f"plan is a plan of {about}:\n{errors[-1] if errors else 'there are no arguments'}")


def _of_plan(plan: ShardingPlan, mesh: AnyMesh, who: str) -> list[_Said | None]:
    if mesh_sizes(plan.mesh) != mesh_sizes(mesh):
        plan = attrs.evolve(plan, mesh=mesh)
    errors = [finding for finding in plan.findings if finding.severity == "error"]
    if errors:
        raise plan_error(f"{who}: the plan is unsound", errors)
    said = [
        _Said(spec, None, _is_mirrored(decision), True)
        for spec, decision in zip(plan.kind_specs, plan.decisions, strict=True)
    ]
    return [None if kind < 0 else said[kind] for kind in plan.survey.kind_of]


def _is_mirrored(decision: Any) -> bool:
    return isinstance(decision.rule, MirrorShardingRule) and not any(
        finding.code == "unmirrored" for finding in decision.findings
    )


def _said(arg: Any, how: Any, mesh: AnyMesh, who: str) -> list[_Said | None]:
    """What one item of `in_shardings` says of each leaf of its argument."""
    if callable(how) and jtu.all_leaves([how]):
        how = how(arg)
    if isinstance(how, ShardingRule):
        how = how.plan(arg, mesh)
    if isinstance(how, ShardingPlan):
        return _of_plan(how.bind(arg), mesh, who)
    stated = spread(how, arg, _is_said, who)
    other = [one for one in stated if not _is_said(one)]
    if other:
        raise TreeError(f"{who}: {other[0]!r:.60} stands where a PartitionSpec, a NamedSharding or None is wanted")
    return [None if one is None else _of_sharding(one) for one in stated]


def _is_said(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)


def _of_sharding(one: PartitionSpec | NamedSharding) -> _Said:
    if isinstance(one, PartitionSpec):
        return _Said(one)
    return _Said(one.spec, one.memory_kind if one.memory_kind == _HOST else None)


def _as_it_lies(leaf: Any) -> _Said | None:
    own = getattr(leaf, "sharding", None)  # numpy arrays have none
    return _of_sharding(own) if isinstance(own, NamedSharding) else None


def result_shardings(shaped: Any, out_shardings: Any, mesh: AnyMesh) -> list[NamedSharding | None]:
    """Finds where each array of a result is to be.

    **Arguments:**

    - `shaped`: the result's shapes.
    - `out_shardings`: as `in_shardings` of `read_arguments`; a tuple stands for the items of a tuple.
    - `mesh`: the mesh, on devices of the target.

    **Returns:**

    One item for each leaf of the result; `None` where nobody says.

    **Raises:**

    What `read_arguments` raises.
    """
    parts: Mapping[str, tuple[Any, Any]] = {"the result": (shaped, out_shardings)}
    if type(out_shardings) is tuple and type(shaped) is tuple:
        if len(out_shardings) != len(shaped):
            raise TreeError(f"out_shardings has {len(out_shardings)} items, the function returns {len(shaped)}")
        parts = {f"result {n}": pair for n, pair in enumerate(zip(shaped, out_shardings, strict=True))}
    wrong: list[Finding] = []
    found: list[NamedSharding | None] = []
    for name, (part, how) in parts.items():
        leaves = jtu.tree_leaves(part)
        said = [None] * len(leaves) if how is None else _said(part, how, mesh, f"out_shardings, {name}")
        for leaf, path, one in zip(leaves, leaf_paths(part), said, strict=True):
            if one is None or array_kind(leaf) is None:
                found.append(None)
                continue
            problems = _errors(f"{name}/{path}".rstrip("/"), leaf.shape, one.spec, mesh)
            wrong += problems
            found.append(None if problems else NamedSharding(mesh, one.spec, memory_kind=one.memory))
    if wrong:
        raise plan_error("not all results can be where they are asked to be", wrong)
    return found
