"""Sharding constraints in model code: by mesh axes, or by logical ones.

Model code is written once and runs on meshes of many shapes, so a constraint may name an axis that today's mesh lacks.
What becomes of it then is the caller's choice, and whatever is not done as written is told.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, Axis, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.check import check_spec
from shardrules.core.context import current_mesh
from shardrules.core.errors import (
    IndivisibleError,
    NoMeshError,
    ShardingWarning,
    SpecError,
    TreeError,
    UnknownAxisError,
    suggest,
)
from shardrules.core.fields import one_of
from shardrules.core.finding import Finding, shape_text
from shardrules.core.jax_state import under_trace
from shardrules.core.spec import UNCONSTRAINED, axis_names, divisible_prefix, entries, make_spec, spec_repr
from shardrules.core.tree import leaf_paths
from shardrules.placement.traced import axis_types, constrain_traced, host_memory
from shardrules.placement.transfer import put
from shardrules.rules.logical.axes import MODE_TRAIN, DynamicShardingAxes, LogicalAxis
from shardrules.rules.logical.partition_axis import PartitionAxis
from shardrules.rules.logical.rule import LogicalPairs, as_pairs

Missing: TypeAlias = Literal["skip", "drop", "error"]
"""What becomes of a constraint on an axis that is not to be had here: nothing of it, the rest of it, or an error."""

Indivisible: TypeAlias = Literal["error", "drop"]
"""What becomes of an axis that does not divide its dimension."""


def with_sharding_constraint(
    x: Any, sharding: Any, missing: Missing = "skip", indivisible: Indivisible = "error"
) -> Any:
    """Constrains how arrays are sharded: inside `jit` a constraint, outside of it a placement.

    It differs from JAX's own in what it does not do in silence. A dimension that does not divide is an error, where JAX
    would weaken the constraint without a word. It works on axes of any type, for which JAX has three operations, and it
    sees the mesh of `jax.set_mesh` as well as that of a legacy `with mesh:`.

    **Arguments:**

    - `x`: an array, or a pytree of them. numpy arrays are placed; what is no array is returned as it is.
    - `sharding`: a PartitionSpec on the mesh in force, or a sharding; or a tree or prefix of them. `P()` means that
        every device is to hold the whole; a dimension that is `P.UNCONSTRAINED` is left to the compiler, or as it is.
    - `missing`: what to do about axes that the mesh lacks, or that are Manual here (inside `shard_map`): `"skip"`
        leaves the array as it is, `"drop"` leaves such axes out, each with a `ShardingWarning`; `"error"` raises.
    - `indivisible`: what to do about a dimension that an axis does not divide: `"error"`, or `"drop"`, which keeps the
        leading axes that divide, cuts a spec that is too long, and warns.

    **Returns:**

    `x`, constrained.

    **Raises:**

    `IndivisibleError`, `UnknownAxisError`, or `SpecError` for an axis that is used twice and a spec that is too long;
    each lists all arrays. `NoMeshError` without a mesh.

    ```python
    mesh = sr.create_mesh("data:4,model:2")

    @jax.jit
    def double(x):
        return sr.with_sharding_constraint(2 * x, P("data", "model"))

    with jax.set_mesh(mesh):
        assert double(jnp.ones((8, 8))).sharding.spec == P("data", "model")
    ```
    """
    return _constrain(x, sharding, _missing(missing), _indivisible(indivisible), "with_sharding_constraint")


_missing = one_of("missing", "skip", "drop", "error")
_indivisible = one_of("indivisible", "error", "drop")


def _stands(node: Any) -> bool:
    return isinstance(node, PartitionSpec | Sharding)


def _constrain(x: Any, sharding: Any, missing: Missing, indivisible: Indivisible, who: str) -> Any:
    values, treedef = jax.tree.flatten(x)
    stated, structure = jtu.tree_flatten(sharding, is_leaf=_stands)
    for one in stated:
        if not _stands(one):
            raise SpecError(f"{who} takes a PartitionSpec or a sharding, got {one!r:.80}")
    try:
        parts = structure.flatten_up_to(x)
    except (ValueError, TypeError) as error:
        raise TreeError(
            f"{who}: the specs do not have the structure of the tree, nor of a prefix of it: {error}"
        ) from error
    said = [one for one, part in zip(stated, parts, strict=True) for _ in jax.tree.leaves(part)]
    numbers = [n for n, value in enumerate(values) if isinstance(value, jax.Array | np.ndarray | np.generic)]
    problems: list[tuple[int, Finding]] = []
    told: list[tuple[int, str]] = []
    wanted: dict[int, tuple[AnyMesh, PartitionSpec, str | None] | Sharding] = {}
    for number in numbers:
        one, shape = said[number], np.shape(values[number])
        if isinstance(one, Sharding) and not isinstance(one, NamedSharding):
            wanted[number] = one
            continue
        mesh = _mesh(one, who)
        spec = one.spec if isinstance(one, NamedSharding) else one
        memory = host_memory(one) if isinstance(one, NamedSharding) else None
        fit = _Fit(shape, spec, mesh, missing, indivisible)
        problems += [(number, finding) for finding in fit.errors]
        told += [(number, text) for text in fit.told]
        if fit.spec is not None:
            wanted[number] = (mesh, fit.spec, memory)
    if problems:
        raise _error(problems, leaf_paths(x), said, who)
    if told:
        paths = leaf_paths(x)
        lines = dict.fromkeys(
            f"{paths[number] or 'x'} {shape_text(np.shape(values[number]))}: {text}" for number, text in told
        )
        warnings.warn(f"{who}: " + "; ".join(lines), ShardingWarning, stacklevel=3)
    results = list(values)
    traced = under_trace()
    eager: dict[int, Sharding] = {}
    for number, one in wanted.items():
        value = values[number]
        if isinstance(one, Sharding):
            if traced:
                results[number] = jax.device_put(value, one)
            else:
                eager[number] = one
            continue
        mesh, spec, memory = one
        if traced:
            results[number] = constrain_traced(jax.numpy.asarray(value), mesh, spec, memory)
        else:
            eager[number] = _placement(value, mesh, spec, memory, who)
    placed = put([values[number] for number in eager], list(eager.values()))
    for number, array in zip(eager, placed, strict=True):
        results[number] = array
    return treedef.unflatten(results)


def _mesh(one: PartitionSpec | NamedSharding, who: str) -> AnyMesh:
    mesh = one.mesh if isinstance(one, NamedSharding) else current_mesh()
    if mesh is None:
        raise NoMeshError(
            f"{who}: no mesh is in force, and {one} names none. Run inside `with jax.set_mesh(mesh):`, or pass a "
            "NamedSharding"
        )
    return mesh


def _placement(value: Any, mesh: AnyMesh, spec: PartitionSpec, memory: str | None, who: str) -> NamedSharding:
    """Where an array is to be that is not being traced: a dimension that is left open stays as it is."""
    if not isinstance(mesh, Mesh):
        raise NoMeshError(
            f"{who}: outside of jit arrays are placed, and {mesh_text(mesh)} is the shape of a mesh, without devices"
        )
    own = value.sharding if isinstance(value, jax.Array) else None
    has = (
        entries(own.spec, value.ndim)
        if isinstance(own, NamedSharding) and own.mesh.axis_names == mesh.axis_names
        else ((),) * np.ndim(value)
    )
    asked = entries(spec, np.ndim(value))
    taken = axis_names(spec)
    closed = make_spec(
        tuple(
            tuple(name for name in old if name not in taken) if entry is UNCONSTRAINED else entry
            for entry, old in zip(asked, has, strict=True)
        )
    )
    kind = memory if memory is not None or own is None else host_memory(own)
    return NamedSharding(mesh, closed if UNCONSTRAINED in asked else spec, memory_kind=kind)


@final
@attrs.frozen(init=False, eq=False)
class _Fit:
    """What is left of a spec on a mesh, for an array of some shape: `None` where the constraint is skipped."""

    spec: PartitionSpec | None
    errors: tuple[Finding, ...]
    told: tuple[str, ...]

    def __init__(
        self, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh, missing: Missing, indivisible: Indivisible
    ) -> None:
        types = axis_types(mesh)
        sizes = mesh_sizes(mesh)
        away = {
            name: f"axis {name!r} is Manual here, inside shard_map" if name in types else _lacks(name, mesh)
            for name in axis_names(spec)
            if types.get(name, AxisType.Manual) == AxisType.Manual
        }
        told: list[str] = []
        found = entries(spec)
        if away and missing == "error":
            hint = "Correct the name, or pass missing='skip' or missing='drop'"
            wrong = tuple(
                Finding("error", "unknown-axis", why, "", hint, shape, axis=name) for name, why in away.items()
            )
            self.__attrs_init__(None, wrong, ())  # pyright: ignore[reportAttributeAccessIssue]
            return
        if away and missing == "skip":
            why = f"{spec_repr(spec)} was skipped as a whole, since {' and '.join(away.values())}"
            self.__attrs_init__(None, (), (why,))  # pyright: ignore[reportAttributeAccessIssue]
            return
        if away:
            found = tuple(
                entry if entry is UNCONSTRAINED else tuple(name for name in entry if name not in away)
                for entry in found
            )
            told.append(f"of {spec_repr(spec)} was dropped what cannot be had: {' and '.join(away.values())}")
        if indivisible == "drop":
            fitting = tuple(
                entry if entry is UNCONSTRAINED else divisible_prefix(entry, size, sizes)
                for entry, size in zip(found, shape, strict=False)
            )
            if fitting != found:
                before, after = spec_repr(make_spec(found)), spec_repr(make_spec(fitting))
                told.append(f"{before} became {after}, which fits (mesh {mesh_text(mesh)})")
            found = fitting
        rest = spec if found == entries(spec) else make_spec(found)
        wrong = tuple(
            _in_the_words_of_jax(one, rest, sizes)
            for one in check_spec("", shape, rest, sizes)
            if one.severity == "error"
        )
        self.__attrs_init__(rest, wrong, tuple(told))  # pyright: ignore[reportAttributeAccessIssue]


def _in_the_words_of_jax(finding: Finding, spec: PartitionSpec, sizes: Mapping[str, int]) -> Finding:
    """Those who know JAX's own error find its words here."""
    if finding.code != "indivisible" or finding.dim is None or finding.shape is None:
        return finding
    split = math.prod(sizes[name] for name in entries(spec)[finding.dim])
    size = finding.shape[finding.dim]
    words = f"array axis {finding.dim} is partitioned {split} times, but the dimension size is {size}"
    return attrs.evolve(finding, message=f"{words} (mesh axis {' x '.join(entries(spec)[finding.dim])})")


def _lacks(name: str, mesh: AnyMesh) -> str:
    return f"the mesh ({mesh_text(mesh)}) has no axis {name!r}{suggest(name, mesh.axis_names)}"


def _error(problems: Sequence[tuple[int, Finding]], paths: Sequence[str], said: Sequence[Any], who: str) -> Exception:
    lines: list[str] = []
    for number, finding in problems:
        one = said[number]
        spec = spec_repr(one.spec if isinstance(one, NamedSharding) else one)
        where = f"{paths[number] or 'x'} {shape_text(finding.shape or ())}"
        lines.append(f"{who}: {spec} on {where}: {finding.message}")
        if finding.code == "unknown-axis":
            lines.append(f"    -> {finding.remedy}")
    codes = [finding.code for _, finding in problems]
    if "indivisible" in codes:
        lines.append(
            "    -> JAX would weaken this without a word. indivisible='drop' does it with one: it keeps what divides"
        )
    text = "\n".join(lines)
    if all(code == "indivisible" for code in codes):
        return IndivisibleError(text)
    return UnknownAxisError(text) if all(code == "unknown-axis" for code in codes) else SpecError(text)


@final
@attrs.frozen
class _Meaning:
    """What logical axes mean: hashable, since JAX keeps it in the key of what it has compiled."""

    axes: LogicalPairs | PartitionAxis
    mode: str | int


_MEANING = jax.make_user_context(None)
"""What `constrain` reads. JAX's own kind of context: a function compiled under other meanings is traced anew."""


def logical_axes(
    axes: Mapping[str, Axis | None] | PartitionAxis, *, mode: str | int = MODE_TRAIN
) -> AbstractContextManager[None]:
    """Says, for a block, which mesh axes the logical axes are that `constrain` names.

    A function that was compiled under one meaning is compiled anew under another.

    **Arguments:**

    - `axes`: from logical name to mesh axis, several of them, or `None` for a dimension that stays whole; or a
        `PartitionAxis`.
    - `mode`: the runtime mode of a `PartitionAxis`.

    **Returns:**

    A context manager.

    ```python
    with jax.set_mesh(sr.create_mesh("data:4,model:2")), sr.logical_axes({"batch": "data", "embed": "model"}):
        assert sr.constrain(jnp.ones((8, 4)), "batch", "embed").sharding.spec == P("data", "model")
    ```
    """
    return _MEANING(_Meaning(axes if isinstance(axes, PartitionAxis) else as_pairs(axes), mode))


def constrain(
    x: Any,
    *axes: "LogicalAxis | DynamicShardingAxes",
    missing: Missing = "skip",
    indivisible: Indivisible = "error",
) -> Any:
    """Constrains an array by the logical names of its dimensions, as the `logical_axes` in force translate them.

    Model code says what a dimension is, the caller says where it goes. Outside of any `logical_axes` nobody has said
    so, and the array is returned as it is: models run on a laptop without a mesh.

    **Arguments:**

    - `x`: an array.
    - `axes`: a name for each dimension, or `None` for one that stays whole; or one `DynamicShardingAxes`.
    - `missing`, `indivisible`: as for `with_sharding_constraint`.

    **Returns:**

    `x`, constrained.

    **Raises:**

    `UnknownAxisError` for a name that was given no meaning; `SpecError` for another number of names than dimensions,
    and where two dimensions would take one mesh axis; otherwise as `with_sharding_constraint`.

    ```python
    assert sr.constrain(jnp.ones((8, 4)), "batch", "embed").shape == (8, 4)  # nobody said what they mean: as it was
    ```
    """
    meaning = _MEANING.value
    if meaning is None:
        return x
    shape = np.shape(x)
    given, mode = tuple(one for one in axes if not isinstance(one, DynamicShardingAxes)), meaning.mode
    if len(axes) == 1 and isinstance(axes[0], DynamicShardingAxes):
        given, mode = axes[0].axes, axes[0].mode
    if len(given) != len(shape):
        raise SpecError(
            f"constrain: {len(given)} logical axes {tuple(given)!r} for an array of shape {shape_text(shape)}"
        )
    if isinstance(meaning.axes, PartitionAxis):
        spec = meaning.axes.resolve_spec(given, mode, shape)
    else:
        spec = _translate(given, dict(meaning.axes), shape)
    return _constrain(x, spec, _missing(missing), _indivisible(indivisible), "constrain")


def _translate(axes: Sequence[Any], meaning: Mapping[str, Axis | None], shape: tuple[int, ...]) -> PartitionSpec:
    found: list[tuple[str, ...]] = []
    owners: dict[str, str] = {}
    problems: list[str] = []
    for dim, name in enumerate(axes):
        if name is not None and name not in meaning:
            known = ", ".join(meaning)
            raise UnknownAxisError(
                f"constrain: dimension {dim} of {shape_text(shape)} is called {name!r}{suggest(str(name), meaning)}, "
                f"and logical_axes knows {known}. Say what it means, {name!r}: None if it stays whole"
            )
        axis = None if name is None else meaning[name]
        names = () if axis is None else axis_tuple(axis)
        problems += [f"{one!r} would split both {owners[one]!r} and {name!r}" for one in names if one in owners]
        owners.update(dict.fromkeys(names, str(name)))
        found.append(names)
    if problems:
        raise SpecError(f"constrain{tuple(axes)!r} on {shape_text(shape)}: " + "; ".join(problems))
    return make_spec(tuple(found))
