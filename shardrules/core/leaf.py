"""Leaf and Decision: an array as a rule sees it, and what the rule decides for it."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_axis, axis_tuple, mesh_sizes, shown_mesh
from shardrules.core.errors import NoMeshError, RuleError, printable, suggest
from shardrules.core.finding import UNKNOWN_AXIS_REMEDY, Finding, shape_text
from shardrules.core.spec import (
    UNCONSTRAINED,
    Entries,
    array_bytes,
    axis_names,
    canonical,
    entries,
    make_spec,
    shard_bytes,
    spec_code,
    spec_key,
    spec_repr,
)

LogicalName: TypeAlias = str | tuple[str, ...] | None
"""The name of a dimension in a box: one name, several (mesh axes, in some boxes), or none."""


def conflict(error: RuleError) -> Finding:
    """Returns the finding that says what a `RuleError` says; the engine adds the rule and the count."""
    return Finding(
        "error", error.code, error.why, error.path, error.hint, error.shape, axis=error.axis, rule=error.rule
    )


def rule_text(rule: object) -> str:
    """The text of a rule in messages: its own, or the name of its class where that one raises and would hide them."""
    try:
        return repr(rule)
    except Exception:  # noqa: BLE001  (whatever a rule of a user's own raises)
        return type(rule).__name__


@final
@attrs.frozen
class Decision:
    """The decision of a rule for one leaf.

    **Arguments:**

    - `spec`: a PartitionSpec. `None` is *no opinion*; `P()` is *replicate, on purpose*. The two are never confused.
    - `reason`: why, in a few words and without the leaf's path, so that equal layers have equal reasons.
    - `rule`: the rule that decided; the engine fills it in.
    - `findings`: what is worth knowing about this decision.
    - `blank`: what `apply` returns for no opinion: `P()`, or an equal spec with a `None` for each dimension.

    ```python
    assert sr.Decision(P("data"), "rows over 'data'").spec == P("data")
    ```
    """

    spec: PartitionSpec | None = attrs.field(eq=spec_key, repr=spec_code)
    reason: str
    rule: object = None
    findings: tuple[Finding, ...] = ()
    blank: PartitionSpec = attrs.field(default=PartitionSpec(), eq=False, repr=False)

    @property
    def rule_name(self) -> str:
        """The short name of the rule, `FSDPShardingRule`; `-` without one."""
        if self.rule is None:
            return "-"
        return self.rule if isinstance(self.rule, str) else type(self.rule).__name__

    @property
    def applied_spec(self) -> PartitionSpec:
        """The spec that `apply` returns: `blank` for no opinion."""
        return self.blank if self.spec is None else self.spec

    @property
    def placement(self) -> str:
        """The canonical form of the placement as text, `"P('data')"`: the same on every host; no opinion is `"P()"`."""
        return "P()" if self.spec is None else spec_repr(canonical(self.spec))

    def device_bytes(self, leaf: "Leaf", sizes: Mapping[str, int]) -> int:
        """Returns the bytes that `leaf` takes on one device, as XLA would allocate them; no opinion is replicated.

        `sizes` are those of the mesh axes.
        """
        return leaf.nbytes if self.spec is None else leaf.shard_bytes(self.spec, sizes)


def undecided(error: RuleError) -> Decision:
    """Returns the decision of a rule that raised: no opinion, with the finding that says why."""
    return Decision(None, error.why, findings=(conflict(error),))


@final
@attrs.frozen
class Leaf:
    """One array of a tree, as a rule sees it.

    **Arguments:**

    - `path`: where it is in the tree, `layers/0/mlp/up`.
    - `shape`, `dtype`: of the whole array.
    - `mesh`: the mesh that is planned for, or `None`.
    - `spec`: what earlier rules of a chain have decided; `None` without a decision.
    - `axes`: its logical axis names, if the tree has them (flax boxes and nnx variables).
    - `outer_axes`: the mesh axes in use on dimensions that the rule does not see: the stacked ones, inside
        `StackedShardingRule`.

    ```python
    leaf = sr.Leaf("mlp/up", (16, 64), jnp.float32, sr.mesh_shape("data:4,model:2"))
    assert leaf.shard(1, "model").spec == P(None, "model")
    assert leaf.nbytes == 4096
    ```
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    mesh: AnyMesh | None = None
    spec: PartitionSpec | None = attrs.field(default=None, eq=spec_key, repr=spec_code)
    axes: tuple[LogicalName, ...] | None = None
    outer_axes: tuple[str, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array, as XLA would allocate them; on all devices the same, so that plans are, too."""
        return array_bytes(self.shape, self.dtype, packed=True)

    def shard_bytes(self, spec: PartitionSpec, sizes: Mapping[str, int] | None = None) -> int:
        """Returns the bytes of the largest shard by `spec` on one device, as XLA would allocate them.

        `sizes` are those of the mesh axes, by default of the leaf's mesh.
        """
        return shard_bytes(self.shape, self.dtype, spec, self.sizes if sizes is None else sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh, in mesh order; without a mesh a `NoMeshError`."""
        if self.mesh is None:
            raise NoMeshError(
                f"{printable(self.path) or 'the tree'} {shape_text(self.shape)}: this rule needs a mesh. Pass one, "
                "rule.plan(tree, mesh), or call inside jax.set_mesh(mesh); sr.mesh_shape('data:4,model:2') makes one "
                "without devices."
            )
        return mesh_sizes(self.mesh)

    @property
    def entries(self) -> Entries:
        """The decided entries so far: a tuple of axis names for each dimension."""
        return ((),) * self.ndim if self.spec is None else entries(self.spec, self.ndim)

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The mesh axes that are in use on the array already, `outer_axes` included."""
        return self.outer_axes if self.spec is None else (*self.outer_axes, *axis_names(self.spec))

    def free_dims(self) -> tuple[int, ...]:
        """Returns the dimensions that are not split yet, lowest first.

        ```python
        assert sr.Leaf("w", (4, 8), jnp.float32, spec=P("data")).free_dims() == (1,)
        ```
        """
        return tuple(dim for dim, entry in enumerate(self.entries[: self.ndim]) if entry == ())

    def axis_size(self, axis: Axis) -> int:
        """Returns the number of parts into which `axis`, a mesh axis or a tuple of them, splits a dimension.

        **Raises:**

        `NoMeshError` without a mesh, `RuleError` for an unknown axis.

        ```python
        assert sr.Leaf("w", (8,), jnp.float32, sr.mesh_shape("data:4,model:2")).axis_size(("data", "model")) == 8
        ```
        """
        sizes = self.sizes
        for name in axis_tuple(axis):
            if name not in sizes:
                why = f"unknown axis {name!r}{suggest(name, sizes)}; the mesh has {shown_mesh(self.mesh)}"
                raise attrs.evolve(self.error(None, why, UNKNOWN_AXIS_REMEDY, axis=name), code="unknown-axis")
        return math.prod(sizes[name] for name in axis_tuple(axis))

    def fits(self, dim: int, axis: Axis) -> bool:
        """Returns whether `axis` can split `dim`: it divides it, the dimension is whole, and the axis is not in use.

        **Raises:**

        `NoMeshError` without a mesh, `RuleError` for an unknown axis.

        ```python
        leaf = sr.Leaf("w", (8, 6), jnp.float32, sr.mesh_shape("data:4"))
        assert leaf.fits(0, "data") and not leaf.fits(1, "data")
        ```
        """
        # First, so that an unknown axis is an error even where the dimension does not exist.
        split = self.axis_size(axis)
        if not -self.ndim <= dim < self.ndim:
            return False
        used_axes = self.used_axes
        return (
            self.shape[dim] % split == 0
            and self.entries[dim % self.ndim] == ()
            and not any(name in used_axes for name in axis_tuple(axis))
        )

    def shard(self, dim: int, axis: Axis, reason: str = "") -> Decision:
        """Returns the decision to split dimension `dim` over `axis`, on top of what is decided already.

        This does not check that the axis divides the dimension: the plan reports that, with all the numbers.

        **Arguments:**

        - `dim`: a dimension, which may be negative.
        - `axis`: a mesh axis, or a tuple of them, the first most major.
        - `reason`: why; by default `dim 0 over 'data'`.

        **Raises:**

        `RuleError` when the dimension does not exist or is split already, or the axis is in use on another one.

        ```python
        leaf = sr.Leaf("w", (8, 6), jnp.float32, spec=P("data"))
        assert leaf.shard(-1, "model").spec == P("data", "model")
        ```
        """
        if not -self.ndim <= dim < self.ndim:
            raise self.error(None, f"shape {shape_text(self.shape)} has no dimension {dim}")
        dim %= self.ndim
        names, spec_entries = axis_tuple(as_axis(axis)), self.entries
        if spec_entries[dim] != ():
            raise self.error(None, f"dimension {dim} is split already: {spec_repr(self.spec)}")
        used_axes = self.used_axes
        # JAX refuses an axis on two dimensions only later, when the sharding is made.
        reused = [name for name in names if name in used_axes]
        if reused:
            raise self.error(
                None, f"dimension {dim} cannot use axis {reused[0]!r}: it splits another one, {self._so_far()}"
            )
        text = reason or f"dim {dim} over {axis!r}"
        return Decision(make_spec((*spec_entries[:dim], names, *spec_entries[dim + 1 :])), text)

    def replicate(self, reason: str = "replicated on purpose") -> Decision:
        """Returns the decision to hold the whole array on every device, for this `reason`.

        **Raises:**

        `RuleError` when a dimension is split already.

        ```python
        assert sr.Leaf("b", (8,), jnp.float32).replicate("small").spec == P()
        ```
        """
        if any(entry != () for entry in self.entries):
            raise self.error(
                None,
                f"Inconsistent sharding instructions: {spec_repr(self.spec)} is decided already, and this rule "
                "replicates the leaf",
                "Replicate first and split after, or apply the two rules to different leaves with RegexShardingRule",
            )
        return Decision(PartitionSpec(), reason)

    def skip(self, reason: str) -> Decision:
        """Returns *no opinion*, for this `reason`: another rule may decide.

        ```python
        assert sr.Leaf("b", (8,), jnp.float32).skip("not mine").spec is None
        ```
        """
        return Decision(None, reason)

    def refine(self, spec: PartitionSpec, reason: str) -> Decision:
        """Returns the decision for the whole of `spec`, for this `reason`.

        A dimension that it leaves whole stays as it is decided already.

        **Raises:**

        `RuleError` when the two disagree on a dimension.

        ```python
        assert sr.Leaf("w", (8, 6), jnp.float32, spec=P("data")).refine(P(None, "model"), "").spec == P("data", "model")
        ```
        """
        # The usual case, and the only one that keeps how the spec is written.
        if self.spec is None and not self.outer_axes:
            return Decision(spec, reason)
        requested = entries(spec, len(self.entries))
        if all(entry == () for entry in requested):
            return self.replicate(reason)
        # A spec may be too long for the array. The plan reports that, so it must not fail here.
        current = self.entries + ((),) * (len(requested) - len(self.entries))
        used_axes = self.used_axes
        for dim, (old, new) in enumerate(zip(current, requested, strict=True)):
            # An entry may be repeated or left whole, but not replaced; and an axis must not move to another dimension.
            differs = old != () and new not in ((), old)
            reuses = old != new and new is not UNCONSTRAINED and any(name in used_axes for name in new)
            if differs or reuses:
                raise self.error(
                    None, f"{spec_repr(spec)} and {self._so_far()}, decided before, disagree on dimension {dim}"
                )
        return Decision(make_spec(tuple(new or old for old, new in zip(current, requested, strict=True))), reason)

    def try_refine(self, spec: PartitionSpec, reason: str) -> Decision:
        """As `refine` with `spec` and `reason`, but a conflict is no opinion with a finding: plans report all at once.

        ```python
        decision = sr.Leaf("w", (8, 6), jnp.float32, spec=P("data")).try_refine(P("model"), "")
        assert decision.spec is None and decision.findings[0].code == "conflict"
        ```
        """
        try:
            return self.refine(spec, reason)
        except RuleError as error:
            return undecided(error)

    def _so_far(self) -> str:
        parts = [] if self.spec is None else [spec_repr(self.spec)]
        return " and ".join([*parts, *(f"{name!r} on a stacked dimension" for name in self.outer_axes)])

    def error(self, rule: object, why: str, hint: str = "", *, axis: str | None = None) -> RuleError:
        """Returns the error to raise when a rule cannot decide this leaf.

        It says `why`, with the numbers, and in `hint` what to do about it; `axis` is the mesh axis in question, if any.
        For `None` as the `rule`, the engine adds the one that raised.

        ```python
        assert "w (8,): too small" in str(sr.Leaf("w", (8,), jnp.float32).error(None, "too small"))
        ```
        """
        return RuleError("" if rule is None else rule_text(rule), self.path, self.shape, why, hint, axis)
