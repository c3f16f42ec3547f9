"""Sharding constraints in model code, by mesh axes or by logical ones.

Model code is written once and runs on meshes of many shapes, so a constraint may name an axis that today's mesh lacks.
The caller chooses what happens then, and a warning names whatever is not done as written.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, Axis, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.check import check_spec
from shardrules.core.context import current_mesh
from shardrules.core.errors import (
    ConfigTypeError,
    IndivisibleError,
    NoMeshError,
    ShardingWarning,
    SpecError,
    UnknownAxisError,
    printable,
    shortened,
    suggest,
)
from shardrules.core.fields import one_of
from shardrules.core.finding import Finding, shape_text
from shardrules.core.jax_state import device_put, under_trace
from shardrules.core.spec import UNCONSTRAINED, axis_names, divisible_prefix, entries, make_spec, spec_repr
from shardrules.core.tree import leaf_paths, spread
from shardrules.placement.traced import axis_types, constrain_traced, fill_unconstrained, host_memory
from shardrules.placement.transfer import put_some
from shardrules.rules.logical import MODE_TRAIN, AxisMeanings, DimNames, LogicalAxis, LogicalPairs, as_pairs

Missing: TypeAlias = Literal["skip", "drop", "error"]
"""The fate of a constraint on an axis that is missing here: it is skipped, loses that axis, or is an error."""

Indivisible: TypeAlias = Literal["error", "drop"]
"""The fate of an axis that does not divide its dimension."""


def with_sharding_constraint(
    arr: Any, sharding: Any, missing: Missing = "skip", indivisible: Indivisible = "error"
) -> Any:
    """Constrains how arrays are sharded: inside `jit` a constraint, outside of it a placement.

    Unlike JAX's own it does nothing silently. A dimension that does not divide is an error, where JAX would weaken the
    constraint. It works on axes of any type, for which JAX has three operations, and it sees the mesh of `jax.set_mesh`
    as well as the mesh of a legacy `with mesh:`.

    **Arguments:**

    - `arr`: an array, or a pytree of them. numpy arrays are placed; leaves that are not arrays are returned as they
        are.
    - `sharding`: a PartitionSpec on the mesh in force, or a sharding; or a tree or prefix of them. `P()` means that
        every device holds the whole; a dimension that is `P.UNCONSTRAINED` is left to the compiler, or as it is.
    - `missing`: what to do about axes that the mesh lacks, or that are Manual here (inside `shard_map`): `"skip"`
        leaves the array as it is, `"drop"` leaves such axes out, each with a `ShardingWarning`; `"error"` raises.
    - `indivisible`: what to do about a dimension that an axis does not divide: `"error"`, or `"drop"`, which keeps the
        leading axes that divide, cuts a spec that is too long, and warns.

    **Returns:**

    `arr`, constrained.

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
    return _constrain(arr, sharding, _as_missing(missing), _as_indivisible(indivisible), "with_sharding_constraint")


_as_missing = one_of("missing", "skip", "drop", "error")
_as_indivisible = one_of("indivisible", "error", "drop")


def _is_sharding(node: Any) -> bool:
    return isinstance(node, PartitionSpec | Sharding)


def _constrain(x: Any, sharding: Any, missing: Missing, indivisible: Indivisible, caller: str) -> Any:
    values, treedef = jax.tree.flatten(x)
    requested = spread(sharding, x, _is_sharding, caller, "specs")
    for item in requested:
        if not _is_sharding(item):
            raise ConfigTypeError(f"{caller} takes a PartitionSpec or a sharding, got {item!r:.80}")
    problems: list[tuple[int, Finding]] = []
    notes: list[tuple[int, str]] = []
    constraints: dict[int, tuple[AnyMesh, PartitionSpec, str | None]] = {}
    placements: dict[int, Sharding] = {}  # without axes there is nothing to fit
    for leaf_index, (value, item) in enumerate(zip(values, requested, strict=True)):
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            continue
        if isinstance(item, Sharding) and not isinstance(item, NamedSharding):
            placements[leaf_index] = item
            continue
        mesh = _mesh_of(item, caller)
        spec, memory = (item.spec, host_memory(item)) if isinstance(item, NamedSharding) else (item, None)
        fitted, errors, leaf_notes = _fit(np.shape(value), spec, mesh, missing, indivisible)
        problems += [(leaf_index, finding) for finding in errors]
        notes += [(leaf_index, note) for note in leaf_notes]
        if fitted is not None:
            constraints[leaf_index] = mesh, fitted, memory
    # Raised before anything is placed, and all arrays at once.
    if problems:
        raise _error(problems, leaf_paths(x), requested, caller)
    if notes:
        _warn(notes, values, leaf_paths(x), caller)
    # Outside of jit all arrays go in one transfer; inside, each constraint is an operation of its own.
    if not under_trace():
        placements |= {n: _placement(values[n], *constraint, caller) for n, constraint in constraints.items()}
        return treedef.unflatten(put_some(values, placements))
    for leaf_index, sharding in placements.items():
        values[leaf_index] = device_put(values[leaf_index], sharding)
    for leaf_index, constraint in constraints.items():
        values[leaf_index] = constrain_traced(jax.numpy.asarray(values[leaf_index]), *constraint)
    return treedef.unflatten(values)


def _warn(notes: Sequence[tuple[int, str]], values: Sequence[Any], paths: Sequence[str], caller: str) -> None:
    lines = dict.fromkeys(
        f"{printable(paths[n]) or 'x'} {shape_text(np.shape(values[n]))}: {note}" for n, note in notes
    )
    warnings.warn(f"{caller}: " + "; ".join(shortened([*lines])), ShardingWarning, stacklevel=4)


def _mesh_of(sharding: PartitionSpec | NamedSharding, caller: str) -> AnyMesh:
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else current_mesh()
    if mesh is None:
        raise NoMeshError(
            f"{caller}: no mesh is in force, and {sharding} names none. Run inside `with jax.set_mesh(mesh):`, or pass "
            "a NamedSharding"
        )
    return mesh


def _placement(value: Any, mesh: AnyMesh, spec: PartitionSpec, memory: str | None, caller: str) -> Sharding:
    """Returns where an array outside of jit goes: UNCONSTRAINED dimensions and its kind of memory stay as they are."""
    if not isinstance(mesh, Mesh):
        raise NoMeshError(
            f"{caller}: outside of jit arrays are placed, and {mesh_text(mesh)} is the shape of a mesh, without devices"
        )
    current = value.sharding if isinstance(value, jax.Array) else None
    # Outside of jit nothing chooses for an UNCONSTRAINED dim: it stays as it is split now.
    if UNCONSTRAINED in entries(spec):
        present = PartitionSpec()
        if isinstance(current, NamedSharding) and current.mesh.axis_names == mesh.axis_names:
            present = current.spec
        spec = fill_unconstrained(spec, present, np.ndim(value))
    if memory is None and current is not None:
        memory = host_memory(current)
    return NamedSharding(mesh, spec, memory_kind=memory)


def _fit(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh, missing: Missing, indivisible: Indivisible
) -> tuple[PartitionSpec | None, list[Finding], list[str]]:
    """Returns the rest of a spec on a mesh, or `None` to skip it; its errors, and what to warn of."""
    sizes = mesh_sizes(mesh)
    unavailable = _unavailable_axes(spec, mesh)
    if unavailable and missing == "error":
        remedy = "Correct the name, or pass missing='skip' or missing='drop'"
        pairs = unavailable.items()
        return None, [Finding("error", "unknown-axis", why, "", remedy, shape, axis=name) for name, why in pairs], []
    if unavailable and missing == "skip":
        return None, [], [f"{spec_repr(spec)} was skipped: {' and '.join(unavailable.values())}"]
    notes: list[str] = []
    kept = entries(spec)
    if unavailable:
        kept = tuple(
            entry if entry is UNCONSTRAINED else tuple(name for name in entry if name not in unavailable)
            for entry in kept
        )
        notes.append(f"{spec_repr(spec)} became {spec_repr(make_spec(kept))}: {' and '.join(unavailable.values())}")
    if indivisible == "drop":
        before = kept
        # Shorter than the spec where the array has fewer dimensions: zip cuts the rest.
        kept = tuple(
            entry if entry is UNCONSTRAINED else divisible_prefix(entry, size, sizes)
            for entry, size in zip(kept, shape, strict=False)
        )
        if kept != before:
            texts = [spec_repr(make_spec(part)) for part in (before, kept)]
            notes.append(f"{texts[0]} became {texts[1]}, which fits (mesh {mesh_text(mesh)})")
    # Unchanged, the spec is kept as it was written: `P("data", None)` is not rewritten to `P("data")`.
    fitted = spec if kept == entries(spec) else make_spec(kept)
    findings = [finding for finding in check_spec("", shape, fitted, sizes) if finding.severity == "error"]
    return fitted, [_as_jax_says_it(finding, fitted, sizes) for finding in findings], notes


def _unavailable_axes(spec: PartitionSpec, mesh: AnyMesh) -> dict[str, str]:
    """Returns the axes of a spec that cannot be used here, each with the reason."""
    types = axis_types(mesh)
    return {
        name: f"axis {name!r} is Manual here, inside shard_map" if name in types else _unknown_axis(name, mesh)
        for name in axis_names(spec)
        if types.get(name, AxisType.Manual) == AxisType.Manual
    }


def _unknown_axis(name: str, mesh: AnyMesh) -> str:
    return f"unknown axis {name!r}{suggest(name, mesh.axis_names)}; the mesh is {mesh_text(mesh)}"


def _as_jax_says_it(finding: Finding, spec: PartitionSpec, sizes: Mapping[str, int]) -> Finding:
    """Puts an `indivisible` finding in the words of JAX's own error, which people search for."""
    if finding.code != "indivisible" or finding.dim is None or finding.shape is None:
        return finding
    split = math.prod(sizes[name] for name in entries(spec)[finding.dim])
    size = finding.shape[finding.dim]
    words = f"array axis {finding.dim} is partitioned {split} times, but the dimension size is {size}"
    return attrs.evolve(finding, message=f"{words} (mesh axis {' x '.join(entries(spec)[finding.dim])})")


def _error(
    problems: Sequence[tuple[int, Finding]], paths: Sequence[str], requested: Sequence[Any], caller: str
) -> Exception:
    texts: list[str] = []
    for leaf_index, finding in problems:
        item = requested[leaf_index]
        spec = spec_repr(item.spec if isinstance(item, NamedSharding) else item)
        leaf = f"{paths[leaf_index] or 'x'} {shape_text(finding.shape or ())}"
        remedy = f"\n    -> {finding.remedy}" if finding.code == "unknown-axis" else ""
        texts.append(f"{caller}: {spec} on {leaf}: {finding.message}{remedy}")
    lines = shortened(texts)
    codes = [finding.code for _, finding in problems]
    if "indivisible" in codes:
        lines.append("    -> JAX would weaken this silently. indivisible='drop' keeps what divides, and warns")
    text = "\n".join(lines)
    # The class is the narrowest that is true of all problems.
    if all(code == "indivisible" for code in codes):
        return IndivisibleError(text)
    return UnknownAxisError(text) if all(code == "unknown-axis" for code in codes) else SpecError(text)


@final
@attrs.frozen
class _LogicalAxes:
    """The meaning of logical axes: hashable, since JAX keeps it in the key of what it has compiled."""

    axes: LogicalPairs | AxisMeanings
    mode: str | int


_LOGICAL_AXES = jax.make_user_context(None)
"""The meaning of logical axes in JAX's own kind of context: a function compiled under another is traced again."""


def logical_axes(
    axes: Mapping[str, Axis | None] | AxisMeanings, *, mode: str | int = MODE_TRAIN
) -> AbstractContextManager[None]:
    """Sets, for a block, the mesh axes of the logical axes that `constrain` names.

    A function that was compiled under one meaning is compiled again under another.

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
    return _LOGICAL_AXES(_LogicalAxes(axes if isinstance(axes, AxisMeanings) else as_pairs(axes), mode))


def constrain(
    x: Any,
    *axes: "LogicalAxis | DimNames",
    missing: Missing = "skip",
    indivisible: Indivisible = "error",
) -> Any:
    """Constrains an array by the logical names of its dimensions, as the `logical_axes` in force translate them.

    Model code names the dimensions, the caller says where they go. Outside of any `logical_axes` the array is returned
    as it is, so that models run on a laptop without a mesh.

    **Arguments:**

    - `x`: an array.
    - `axes`: a name for each dimension, or `None` for one that stays whole; or one `DynamicShardingAxes`.
    - `missing`, `indivisible`: as for `with_sharding_constraint`.

    **Returns:**

    `x`, constrained.

    **Raises:**

    `UnknownAxisError` for a name that `logical_axes` does not have; `SpecError` where there are more or fewer names
    than dimensions, and where two dimensions would take one mesh axis; otherwise as `with_sharding_constraint`.

    ```python
    assert sr.constrain(jnp.ones((8, 4)), "batch", "embed").shape == (8, 4)  # without logical_axes: as it was
    ```
    """
    logical = _LOGICAL_AXES.value
    if logical is None:
        return x
    shape = np.shape(x)
    names, mode = tuple(name for name in axes if not isinstance(name, DimNames)), logical.mode
    # A `DimNames` names all dimensions, and brings its own mode.
    if len(axes) == 1 and isinstance(axes[0], DimNames):
        names, mode = axes[0].axes, axes[0].mode
    if len(names) != len(shape):
        raise SpecError(
            f"constrain: {len(names)} logical axes {tuple(names)!r} for an array of shape {shape_text(shape)}"
        )
    if isinstance(logical.axes, AxisMeanings):
        spec = logical.axes.resolve_spec(names, mode, shape)
    else:
        spec = _translate(names, dict(logical.axes), shape)
    return _constrain(x, spec, _as_missing(missing), _as_indivisible(indivisible), "constrain")


def _translate(names: Sequence[Any], axes: Mapping[str, Axis | None], shape: tuple[int, ...]) -> PartitionSpec:
    spec: list[tuple[str, ...]] = []
    owners: dict[str, str] = {}
    problems: list[str] = []
    for dim, name in enumerate(names):
        if name is not None and name not in axes:
            raise UnknownAxisError(
                f"constrain: unknown logical axis {name!r}{suggest(str(name), axes)} for dimension {dim} of "
                f"{shape_text(shape)}; logical_axes has {', '.join(axes)}. Add {name!r}: None if it stays whole"
            )
        axis = None if name is None else axes[name]
        entry = () if axis is None else axis_tuple(axis)
        problems += [f"{part!r} would split both {owners[part]!r} and {name!r}" for part in entry if part in owners]
        owners.update(dict.fromkeys(entry, str(name)))
        spec.append(entry)
    if problems:
        raise SpecError(f"constrain{tuple(names)!r} on {shape_text(shape)}: " + "; ".join(problems))
    return make_spec(tuple(spec))
