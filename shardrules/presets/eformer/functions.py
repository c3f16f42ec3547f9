"""The functions of eformer's `escale`, on the engine of shardrules."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_axis, axis_tuple, check_mesh, mesh_sizes, mesh_text
from shardrules.core.context import current_mesh
from shardrules.core.errors import (
    ConfigTypeError,
    NoMeshError,
    PatternError,
    SpecError,
    UnknownAxisError,
    printable,
    shown,
    suggest,
)
from shardrules.core.patterns import compile_pattern
from shardrules.core.spec import checked_spec, make_spec, trim
from shardrules.core.tree import array_kind, survey, widest
from shardrules.rules.auto import auto_entries
from shardrules.rules.pattern import reads_index


def match_partition_rules(
    rules: Sequence[tuple[str, PartitionSpec]], tree: Any, min_size: int = 16384, strict: bool = True
) -> Any:
    """Returns for every array the spec of the first pattern that matches its path.

    A spec with more entries than the array has dimensions is cut from the right. With `strict`, scalars need no rule,
    and arrays of fewer than `min_size` elements are replicated, though a pattern must match them. A `PatternError`
    lists all arrays that no pattern matches. No mesh is involved: `RegexShardingRule` with `plan` also reports what
    does not divide.

    ```python
    from shardrules.presets import eformer

    specs = eformer.match_partition_rules([("kernel", P("dp", "tp")), (".*", P())], {"kernel": np.ones((256, 256))})
    assert specs == {"kernel": P("dp", "tp")}
    ```
    """
    # eformer's non-strict mode matches numbers too; here they are static leaves unless they are arrays.
    if not strict:
        tree = jtu.tree_map(lambda leaf: np.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf, tree)
    compiled = [
        (compile_pattern(pattern, "match_partition_rules"), _checked_spec(pattern, spec)) for pattern, spec in rules
    ]
    tree_survey = survey(tree, None, reads_index=widest(reads_index(pattern) for pattern, _ in compiled))
    specs: list[PartitionSpec] = []
    unmatched: dict[int, None] = {}
    for kind_index, leaf in enumerate(tree_survey.kinds):
        if strict and leaf.ndim == 0:
            specs.append(PartitionSpec())
            continue
        spec = next((spec for pattern, spec in compiled if pattern.search(leaf.path)), None)
        if spec is None:
            unmatched[kind_index] = None
            spec = PartitionSpec()
        # Small arrays come after the search: one that no pattern matches is reported all the same.
        if strict:
            spec = PartitionSpec() if leaf.size < min_size else trim(spec, leaf.ndim)
        specs.append(spec)
    if unmatched:
        # A negative kind is a static leaf, which has no path.
        kind_indices = (kind_index for kind_index in tree_survey.kind_of if kind_index >= 0)
        arrays = zip(tree_survey.paths(), kind_indices, strict=True)
        raise PatternError(
            "\n".join(
                f"Partition rule not found for param: {printable(path)}" for path, kind in arrays if kind in unmatched
            )
            + "\nAdd a pattern for each; ('.*', P()) at the end replicates the rest."
        )
    return tree_survey.unflatten(specs, PartitionSpec())


def _checked_spec(pattern: str, spec: Any) -> PartitionSpec:
    try:
        return checked_spec(spec)
    except SpecError as error:
        raise PatternError(f"match_partition_rules: {pattern!r}: {error}; P() replicates") from error


def create_pattern_based_partition_spec(
    pattern: str, mesh: AnyMesh | None = None, default_spec: PartitionSpec | None = None
) -> Callable[[str, Any], PartitionSpec]:
    """Returns the function from name and array to spec that a line of text describes.

    `"attention|mlp->data,hidden->model.None"`: `,` separates rules, `|` patterns, `.` dimensions; `None` leaves a
    dimension whole, and `data+model` splits one over two axes. Patterns are searched, and the first match wins.
    Neither `mesh` nor the array is read; they are there for callers that pass them. Names that no pattern matches get
    `default_spec`, or `P()`.

    ```python
    from shardrules.presets import eformer

    spec_for = eformer.create_pattern_based_partition_spec("attention|mlp->data,hidden->model.None")
    assert spec_for("mlp/up", None) == P("data")
    assert spec_for("hidden", None) == P("model", None)
    assert spec_for("bias", None) == P()
    ```
    """
    del mesh
    caller = "create_pattern_based_partition_spec"
    if not isinstance(pattern, str):
        raise ConfigTypeError(f"{caller}: the pattern must be text, got {shown(pattern)}")
    compiled: list[tuple[re.Pattern[str], PartitionSpec]] = []
    for rule in pattern.split(","):
        patterns, arrow, dims = rule.strip().partition("->")
        entries = tuple(
            () if dim.strip() == "None" else tuple(name.strip() for name in dim.split("+")) for dim in dims.split(".")
        )
        # An empty pattern would match every name, and an empty axis would split nothing, without a word.
        parts = [*(part.strip() for part in patterns.split("|")), *(name for entry in entries for name in entry)]
        if not arrow or not all(parts):
            raise PatternError(
                f"{rule.strip()!r} in {pattern!r} is not pattern->axis with no part empty; write for instance "
                "'attention|mlp->data,w->model'"
            )
        spec = make_spec(entries)
        compiled += [(compile_pattern(part.strip(), caller), spec) for part in patterns.split("|")]
    default = PartitionSpec() if default_spec is None else default_spec

    def spec_for(name: str, array: Any) -> PartitionSpec:
        del array
        return next((spec for regex, spec in compiled if regex.search(name)), default)

    return spec_for


def auto_partition_spec(
    x: Any,
    mesh: AnyMesh | None = None,
    names: Sequence[Axis] | None = None,
    min_sharding_size: int | None = None,
    reverse: bool = False,
) -> PartitionSpec:
    """Returns a spec for one array: dimensions largest first, each takes the first free axis that divides it.

    `names` are the axes, or tuples of them, in order of preference; by default all axes of the mesh, largest first.
    Arrays of fewer than `min_sharding_size` elements, by default the number of devices, get `P()`. `reverse` starts
    with the smallest dimension. `AutoShardingRule` does the same as a rule, except that its default is the order of the
    mesh, and that it does not use axes of size 1.

    ```python
    from shardrules.presets import eformer

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert eformer.auto_partition_spec(x, sr.mesh_shape("dp:2,tp:4")) == P("dp", "tp")
    ```
    """
    kind = array_kind(x)
    if kind is None:
        raise ConfigTypeError(f"auto_partition_spec needs an array or a ShapeDtypeStruct, got {type(x).__name__}")
    check_mesh(mesh)
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is None:
        raise NoMeshError("auto_partition_spec needs a mesh: pass one, or call inside jax.set_mesh(mesh)")
    sizes = mesh_sizes(mesh)
    shape = kind[0]
    least = math.prod(sizes.values()) if min_sharding_size is None else min_sharding_size
    if math.prod(shape) < least:
        return PartitionSpec()
    axes = sorted(sizes, key=lambda name: -sizes[name]) if names is None else [as_axis(name) for name in names]
    for name in (name for axis in axes for name in axis_tuple(axis)):
        if name not in sizes:
            raise UnknownAxisError(f"unknown axis {name!r}{suggest(name, sizes)}; the mesh is {mesh_text(mesh)}")
    return make_spec(auto_entries(shape, axes, sizes, reverse=reverse))
