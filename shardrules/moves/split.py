"""A mesh cut into parts along one axis, and parts joined to one mesh, together with the arrays on them.

Every device keeps its shard, and no byte is copied; only the array that the shard belongs to changes. So a part of an
array that is split over the axis is what its devices hold of it, and a part of one that is not is the whole array.
Arrays that share shards live and die together: deleting one, or donating it to a `jit`, takes its shards from the
others. Do not donate two that share to one call, which may crash JAX.
"""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from shardrules.core.axes import mesh_text
from shardrules.core.errors import (
    ConfigTypeError,
    MeshError,
    ShardRulesError,
    TreeError,
    UnknownAxisError,
    shown,
    suggest,
)
from shardrules.core.finding import Finding, listing, merged, shape_text
from shardrules.core.spec import entries, same, spec_repr
from shardrules.core.tree import array_kind, leaf_paths

_LeafProblem: TypeAlias = tuple[int, Finding]
"""A leaf index, and what is wrong with that leaf; paths are filled in when an error needs them."""

_ERRORS: dict[str, type[ShardRulesError]] = {
    "unknown-axis": UnknownAxisError,
    "sections": MeshError,
    "other-mesh": MeshError,
}
"""The errors of findings that are about the mesh; the rest are about the tree."""

_EMPTY = Finding("error", "no-array", "the tree has no array, and so no mesh")

_NAMED_IDS = 8
"""The most devices that a message names: the devices of one host, usually."""


def split_by_mesh_axis(
    arrays: Any,
    mesh_axis: str,
    mesh_axis_indices_or_sections: int | Sequence[int] | None = None,
    donate: bool = False,
) -> list[Any]:
    """Cuts the mesh of `arrays` into parts along `mesh_axis`, and returns a tree for each part, with its shards.

    `mesh_axis_indices_or_sections` is `None` for a part for each index of the axis, a number of equal parts, or a list
    of indices to cut before. A dimension that is split over the axis becomes shorter; other arrays keep their shapes.
    Where several axes split it, and `mesh_axis` is not the most major of them, a part is not a slice of the array: it
    is the shards of the part's devices, one after the other. The axes, their types, specs and kinds of memory stay, and
    weak types become strong. Nothing is sent, and each process touches only its own shards. Parts share shards with
    `arrays`: deleting one, or donating it to a `jit`, takes them from both. So `donate` deletes nothing: there is
    nothing to free.

    Raises `UnknownAxisError` for an unknown axis, `MeshError` for parts that cannot be made and arrays on different
    meshes, `TreeError` for leaves that are not arrays on a mesh, deleted or traced: the first of these that applies,
    with everything that is wrong.

    ```python
    from shardrules.presets.pathways import split_by_mesh_axis

    x = sr.filter_shard(np.arange(8), P("fsdp"), sr.create_mesh("rep:2,fsdp:4"))
    head, tail = split_by_mesh_axis(x, "fsdp", [1])
    assert head.tolist() == [0, 1] and tail.tolist() == [2, 3, 4, 5, 6, 7]
    assert dict(tail.sharding.mesh.shape) == {"rep": 2, "fsdp": 3}
    ```
    """
    values, treedef = jax.tree.flatten(arrays)
    mesh, problems = _common_mesh(values)
    findings = _axis_findings(mesh, mesh_axis) if values else [_EMPTY]
    # A size that is unknown leaves the bounds half checked, and the error is raised all the same.
    size = None if mesh is None or findings else mesh.shape[mesh_axis]
    bounds, why = _bounds(mesh_axis_indices_or_sections, size)
    if why:
        remedy = (
            "None makes a part of each index, a number that many equal parts, a list cuts before each of its indices"
        )
        findings.append(Finding("error", "sections", why, "", remedy, axis=str(mesh_axis)))
    problems += _unreduced(mesh, values, mesh_axis)
    if mesh is None or findings or problems:
        raise _error("split_by_mesh_axis", findings, problems, arrays)
    before = (slice(None),) * mesh.axis_names.index(mesh_axis)
    meshes = [
        Mesh(mesh.devices[(*before, slice(*ends))], mesh.axis_names, axis_types=mesh.axis_types)
        for ends in itertools.pairwise(bounds)
    ]
    parts = [_split(value, mesh_axis, meshes) for value in values]
    return [treedef.unflatten([array_parts[index] for array_parts in parts]) for index in range(len(meshes))]


def concatenate_by_mesh_axis(array_trees: Sequence[Any], mesh_axis: str, donate: bool = False) -> Any:
    """Joins meshes along one axis, and the arrays on them: the inverse of `split_by_mesh_axis`.

    `array_trees` is a list of pytrees of one structure; their meshes differ only in the size of `mesh_axis`, and share
    no devices. An array that is split over the axis is joined shard after shard, in the order of `array_trees`; it may
    be longer in one tree than in another if the shards have one shape. Of an array that is not, each tree has a copy:
    that these are equal is the caller's promise, since no values are read. The result shares its shards with
    `array_trees`, so `donate` deletes nothing.

    Raises `UnknownAxisError`, `MeshError` for meshes that cannot be joined, `TreeError` for trees and arrays that
    cannot: the first of these that applies, with everything that is wrong. Paths begin with the index of the tree.

    ```python
    from shardrules.presets.pathways import concatenate_by_mesh_axis, split_by_mesh_axis

    x = sr.filter_shard(np.arange(8), P("fsdp"), sr.create_mesh("fsdp:8"))
    joined = concatenate_by_mesh_axis(split_by_mesh_axis(x, "fsdp", 2), "fsdp")
    assert joined.sharding == x.sharding and joined.tolist() == x.tolist()
    ```
    """
    if not isinstance(array_trees, Sequence) or not array_trees:
        raise ConfigTypeError(
            f"concatenate_by_mesh_axis: trees must be a list or tuple of pytrees, got {array_trees!r:.80}"
        )
    parts = list(array_trees)
    flat = [jax.tree.flatten(tree) for tree in parts]
    starts = list(itertools.accumulate((len(values) for values, _ in flat), initial=0))
    meshes: list[Mesh] = []
    used_devices: dict[Any, None] = {}
    findings: list[Finding] = [] if starts[-1] else [_EMPTY]
    problems: list[_LeafProblem] = []
    for tree_index, (values, _) in enumerate(flat):
        mesh, mesh_problems = _common_mesh(values)
        mesh_problems += _unreduced(mesh, values, mesh_axis)
        problems += [(starts[tree_index] + leaf_index, finding) for leaf_index, finding in mesh_problems]
        findings += [attrs.evolve(finding, path=str(tree_index)) for finding in _axis_findings(mesh, mesh_axis)]
        if mesh is not None:
            meshes.append(mesh)
            findings += _mesh_findings(mesh, meshes[0], used_devices, tree_index, mesh_axis)
            used_devices.update(dict.fromkeys(mesh.devices.flat))
    findings += _structure_findings(parts, [treedef for _, treedef in flat])
    faulty = dict(problems)
    for start, (values, treedef) in zip(starts, flat, strict=False):
        if treedef != flat[0][1]:
            continue
        for leaf_index, (value, first) in enumerate(zip(values, flat[0][0], strict=True)):
            # Only sound leaves are compared, so that each problem is listed once.
            sound = leaf_index not in faulty and start + leaf_index not in faulty
            if sound and (why := _misfit(value, first, mesh_axis)):
                problems.append((start + leaf_index, Finding("error", "misfit", why, shape=value.shape)))
    if not meshes or findings or problems:
        raise _error("concatenate_by_mesh_axis", findings, problems, parts)
    first_mesh = meshes[0]
    devices = np.concatenate([mesh.devices for mesh in meshes], axis=first_mesh.axis_names.index(mesh_axis))
    joined = Mesh(devices, first_mesh.axis_names, axis_types=first_mesh.axis_types)
    groups = zip(*[values for values, _ in flat], strict=True)
    return flat[0][1].unflatten([_join(group, mesh_axis, joined) for group in groups])


def _split(array: jax.Array, mesh_axis: str, meshes: Sequence[Mesh]) -> list[jax.Array]:
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    dim = _dim(array, mesh_axis)
    sizes = [mesh.shape[mesh_axis] for mesh in meshes]
    # An array that is not split over the axis keeps its shape in every part.
    lengths = [0 if dim is None else array.shape[dim] // sum(sizes) * size for size in sizes]
    return [_from_shards(array, dim, length, mesh, shards) for length, mesh in zip(lengths, meshes, strict=True)]


def _join(arrays: Sequence[jax.Array], mesh_axis: str, mesh: Mesh) -> jax.Array:
    shards = {shard.device: shard.data for array in arrays for shard in array.addressable_shards}
    dim = _dim(arrays[0], mesh_axis)
    length = 0 if dim is None else sum(array.shape[dim] for array in arrays)
    return _from_shards(arrays[0], dim, length, mesh, shards)


def _from_shards(
    like: jax.Array, dim: int | None, length: int, mesh: Mesh, shards: Mapping[Any, jax.Array]
) -> jax.Array:
    """An array of the shards on a mesh's devices: like another array, but with another length in `dim`."""
    old = _named_sharding(like)
    shape = tuple(length if index == dim else size for index, size in enumerate(like.shape))
    sharding = NamedSharding(mesh, old.spec, memory_kind=old.memory_kind)
    # JAX does not sort the shards of random keys.
    ordered = [shards[device] for device in mesh.local_devices]
    # The dtype is passed since a process may hold no shard of this array.
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered, dtype=like.dtype)


def _named_sharding(array: jax.Array) -> NamedSharding:
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return sharding


def _dim(array: jax.Array, mesh_axis: str) -> int | None:
    """The dimension that is split over an axis; an axis splits at most one."""
    spec_entries = entries(_named_sharding(array).spec, array.ndim)
    return next((dim for dim, entry in enumerate(spec_entries) if mesh_axis in entry), None)


def _bounds(sections: Any, size: int | None) -> tuple[tuple[int, ...], str]:
    """The bounds of the parts of an axis, or what is wrong; `size` is `None` where it is unknown."""
    if sections is None:
        return tuple(range((size or 0) + 1)), ""
    count = _integer(sections)
    if count is not None:
        if count < 1 or (size is not None and size % count):
            axis = "an axis" if size is None else f"an axis of size {size}"
            return (), f"{axis} cannot be cut into {count} equal parts"
        # The step of a range may not be 0: without a size it is 1.
        return tuple(range(0, (size or 0) + 1, (size or count) // count)), ""
    is_list = isinstance(sections, Sequence) or (isinstance(sections, np.ndarray) and sections.ndim == 1)
    inner = [_integer(index) for index in sections] if is_list and not isinstance(sections, str | bytes) else [None]
    cuts = tuple(index for index in inner if index is not None)
    if len(cuts) < len(inner):
        return (), f"mesh_axis_indices_or_sections must be None, a number or a list of numbers; got {shown(sections)}"
    bounds = (0, *cuts) if size is None else (0, *cuts, size)
    if any(start >= stop for start, stop in itertools.pairwise(bounds)):
        end = "" if size is None else f" and below {size}, the size of the axis"
        return (), f"the indices {list(cuts)} must be increasing numbers above 0{end}"
    return bounds, ""


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _common_mesh(values: Sequence[Any]) -> tuple[Mesh | None, list[_LeafProblem]]:
    """The mesh that arrays are on, with what is wrong with each array that is not on it."""
    first: Mesh | None = None
    problems: list[_LeafProblem] = []
    for leaf_index, value in enumerate(values):
        mesh, findings = _leaf_mesh(value)
        problems += [(leaf_index, finding) for finding in findings]
        # The first mesh that is found is the one that all later arrays are compared with.
        first = mesh if first is None else first
        if mesh is not None and mesh != first:
            why = f"it is on the mesh {_full_mesh_text(mesh)}, and earlier arrays are on {_full_mesh_text(first)}"
            remedy = "Cut or join the arrays of each mesh separately"
            problems.append((leaf_index, Finding("error", "other-mesh", why, "", remedy, value.shape)))
    return first, problems


def _leaf_mesh(value: Any) -> tuple[Mesh | None, list[Finding]]:
    kind = array_kind(value)
    shape = None if kind is None else kind[0]
    if isinstance(value, Tracer):
        why, remedy = "it is being traced", "Call it outside of jit: inside, arrays have no shards yet"
        return None, [Finding("error", "traced", why, "", remedy, shape)]
    if not isinstance(value, jax.Array):
        why = f"it is a {type(value).__name__}, not a JAX array"
        remedy = "Place arrays with filter_shard, and set other leaves aside: eqx.partition(tree, eqx.is_array)"
        return None, [Finding("error", "no-array", why, "", remedy, shape)]
    sharding = value.sharding
    findings: list[Finding] = []
    # Any single shard may be gone, since another array may have shared it.
    if value.is_deleted() or any(shard.data.is_deleted() for shard in value.addressable_shards):
        why = "it has been deleted or donated, or an array that shares its shards has"
        findings.append(Finding("error", "deleted", why, "", "Use the array that replaced it", shape))
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh, findings
    why = f"it is not on a mesh: its sharding is a {type(sharding).__name__}"
    return None, [*findings, Finding("error", "no-mesh", why, "", "Place it: filter_shard(tree, how, mesh)", shape)]


def _unreduced(mesh: Mesh | None, values: Sequence[Any], mesh_axis: str) -> list[_LeafProblem]:
    """Arrays that are unreduced over the axis: a part of their summands means nothing."""
    if mesh is None or mesh_axis not in mesh.axis_names:
        return []
    why = f"it is an unreduced sum over {mesh_axis!r}: its shards are summands"
    finding = Finding("error", "unreduced", why, "", "Reduce it: jax.sharding.reshard to a spec without unreduced")
    return [
        (leaf_index, attrs.evolve(finding, shape=value.shape))
        for leaf_index, value in enumerate(values)
        if isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and isinstance(value.sharding, NamedSharding)
        and mesh_axis in value.sharding.spec.unreduced
    ]


def _axis_findings(mesh: Mesh | None, mesh_axis: Any) -> list[Finding]:
    if mesh is None or mesh_axis in mesh.axis_names:
        return []
    near = suggest(str(mesh_axis), mesh.axis_names)
    why = f"unknown axis {mesh_axis!r}; the mesh is {mesh_text(mesh)}{near}"
    return [Finding("error", "unknown-axis", why, axis=str(mesh_axis))]


def _mesh_findings(
    mesh: Mesh, first: Mesh, used_devices: Mapping[Any, None], tree_index: int, mesh_axis: str
) -> list[Finding]:
    """Returns why a mesh cannot be joined to the first one, and to others that have the used devices."""
    shared = [device for device in mesh.devices.flat if device in used_devices]
    reasons: list[str] = []
    if mesh.axis_names != first.axis_names or any(
        mesh.shape[name] != first.shape[name] for name in mesh.axis_names if name != mesh_axis
    ):
        reasons.append(f"differs from {mesh_text(first)} in more than the size of {mesh_axis!r}")
    elif mesh.axis_types != first.axis_types:
        reasons.append(f"has other axis types than {_full_mesh_text(first)}")
    if shared:
        reasons.append(f"shares {_ids(shared)} with an earlier one")
    why = f"the mesh {_full_mesh_text(mesh)} {', and '.join(reasons)}"
    return [Finding("error", "other-mesh", why, str(tree_index))] if reasons else []


def _structure_findings(trees: Sequence[Any], structures: Sequence[Any]) -> list[Finding]:
    findings: list[Finding] = []
    for tree_index, structure in enumerate(structures):
        if structure == structures[0]:
            continue
        actual, expected = dict.fromkeys(leaf_paths(trees[tree_index])), dict.fromkeys(leaf_paths(trees[0]))
        missing = [path for path in expected if path not in actual]
        extra = [path for path in actual if path not in expected]
        reasons = [f"it lacks {', '.join(map(repr, missing))}"] if missing else []
        reasons += [f"it also has {', '.join(map(repr, extra))}"] if extra else []
        same_paths = f"it has the same paths, but its containers or static fields differ: {structure}"
        why = f"its structure differs from tree 0's: {', and '.join(reasons or [same_paths])}"
        findings.append(Finding("error", "structure", why, str(tree_index)))
    return findings


def _misfit(array: jax.Array, first: jax.Array, mesh_axis: str) -> str:
    """Returns why an array cannot be joined to the array of the first tree; empty where it can."""
    actual, expected = _named_sharding(array), _named_sharding(first)
    pairs: list[tuple[str, Any, Any]] = [
        ("dtype", array.dtype, first.dtype),
        ("kind of memory", actual.memory_kind, expected.memory_kind),
    ]
    reasons = [f"its {name} is {value}, and in tree 0 {other}" for name, value, other in pairs if value != other]
    # `same` does not look at reductions, which few specs have.
    plain = not (actual.spec.unreduced or actual.spec.reduced or expected.spec.unreduced or expected.spec.reduced)
    if actual.spec != expected.spec and not (plain and same(actual.spec, expected.spec)):
        reasons.append(f"its spec is {spec_repr(actual.spec)}, and in tree 0 {spec_repr(expected.spec)}")
    elif _dim(array, mesh_axis) is None and array.shape != first.shape:
        reasons.append(
            f"its shape is not {shape_text(first.shape)}, as in tree 0, and it is not split over {mesh_axis!r}"
        )
    elif actual.shard_shape(array.shape) != expected.shard_shape(first.shape):
        shards, others = actual.shard_shape(array.shape), expected.shard_shape(first.shape)
        reasons.append(f"its shards are {shape_text(shards)}, and in tree 0 {shape_text(others)}")
    return ", and ".join(reasons)


def _full_mesh_text(mesh: Mesh | None) -> str:
    """A mesh with everything in which two meshes may differ; of many devices only the first are named."""
    if mesh is None:
        return "none"
    types = ", ".join(axis_type.name for axis_type in mesh.axis_types)
    return f"{mesh_text(mesh)} ({types}) of {_ids(mesh.devices.flat)}"


def _ids(devices: Iterable[Any]) -> str:
    ids = [str(device.id) for device in devices]
    return f"devices {', '.join(ids[:_NAMED_IDS])}{f' and {len(ids) - _NAMED_IDS} more' * (len(ids) > _NAMED_IDS)}"


def _error(caller: str, findings: Sequence[Finding], problems: Sequence[_LeafProblem], tree: Any) -> ShardRulesError:
    """One error with all findings, of the first class that applies: axis, then mesh, then tree."""
    paths = leaf_paths(tree) if problems else ()
    listed = [*findings, *(attrs.evolve(finding, path=paths[leaf_index]) for leaf_index, finding in problems)]
    classes = [_ERRORS.get(finding.code, TreeError) for finding in listed]
    # The order of the classes decides, and not the order of what was found.
    error_class = next(each for each in (UnknownAxisError, MeshError, TreeError) if each in classes)
    return error_class(f"{caller}:\n{listing(merged(listed))}")
