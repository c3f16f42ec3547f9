"""Leaf and Decision: what a rule is asked, and what it answers."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_axis, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.errors import NoMeshError, RuleError, suggest
from shardrules.core.finding import Finding, shape_text
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
"""What a box calls a dimension: a name, several (which some boxes hold for mesh axes), or nothing."""


def conflict(error: RuleError) -> Finding:
    """Returns the finding that says what a `RuleError` says; the engine adds the rule and the count."""
    return Finding(
        "error", "conflict", error.why, error.path, error.hint, error.shape, axis=error.axis, rule=error.rule
    )


@final
@attrs.frozen
class Decision:
    """What a rule says about one leaf.

    **Arguments:**

    - `spec`: a PartitionSpec. `None` is *no opinion*; `P()` is *replicate, on purpose*. They are never confused.
    - `reason`: why, in a few words and without the leaf's path, so that equal layers have equal reasons.
    - `rule`: the rule that decided; the engine fills it in.
    - `findings`: what is worth knowing about this decision.
    - `blank`: how `apply` writes no opinion: `P()`, or with a `None` for each dimension, which JAX takes for the same.

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
        """Returns the bytes that `leaf` takes on one device; no opinion counts as replicated.

        **Arguments:**

        - `leaf`: the leaf that this decides.
        - `sizes`: the size of each mesh axis.

        **Returns:**

        Bytes, as XLA would allocate them.
        """
        if self.spec is None:
            return leaf.nbytes
        return shard_bytes(leaf.shape, leaf.dtype, self.spec, sizes)


@final
@attrs.frozen
class Leaf:
    """One array of a tree, as a rule sees it.

    **Arguments:**

    - `path`: its place in the tree, `layers/0/mlp/up`.
    - `shape`, `dtype`: those of the whole array.
    - `mesh`: the mesh that is planned for, or `None`.
    - `spec`: what earlier rules of a chain have decided; `None` when nothing has been.
    - `axes`: its logical axis names, where the tree has them (flax boxes).
    - `aside`: the mesh axes in use on dimensions that `StackedShardingRule` has set aside.

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
    aside: tuple[str, ...] = ()

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
        """The bytes of the whole array, as XLA would allocate them."""
        return array_bytes(self.shape, self.dtype)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh, in mesh order.

        **Raises:**

        `NoMeshError` when there is no mesh.
        """
        if self.mesh is None:
            raise NoMeshError(
                f"{self.path or 'the tree'} {shape_text(self.shape)}: this rule needs a mesh and there is none. Pass "
                "one, rule.plan(tree, mesh), or call inside jax.set_mesh(mesh); sr.mesh_shape('data:4,model:2') makes "
                "one without devices."
            )
        return mesh_sizes(self.mesh)

    @property
    def entries(self) -> Entries:
        """What has been decided so far, one tuple of axis names for each dimension."""
        return ((),) * self.ndim if self.spec is None else entries(self.spec, self.ndim)

    @property
    def taken(self) -> tuple[str, ...]:
        """The mesh axes that are in use on the array already, those on dimensions set aside included."""
        return self.aside if self.spec is None else (*self.aside, *axis_names(self.spec))

    def free_dims(self) -> tuple[int, ...]:
        """Returns the dimensions that are not split yet, lowest first.

        **Returns:**

        A tuple of dimensions.

        ```python
        assert sr.Leaf("w", (4, 8), jnp.float32, spec=P("data")).free_dims() == (1,)
        ```
        """
        return tuple(dim for dim, entry in enumerate(self.entries[: self.ndim]) if entry == ())

    def axis_size(self, axis: Axis) -> int:
        """Returns into how many parts `axis` splits a dimension.

        **Arguments:**

        - `axis`: a mesh axis, or a tuple of them.

        **Returns:**

        The product of their sizes.

        **Raises:**

        `NoMeshError` without a mesh, `RuleError` when the mesh has no such axis.

        ```python
        assert sr.Leaf("w", (8,), jnp.float32, sr.mesh_shape("data:4,model:2")).axis_size(("data", "model")) == 8
        ```
        """
        sizes = self.sizes
        for name in axis_tuple(axis):
            if name not in sizes:
                why = f"the mesh ({mesh_text(self.mesh)}) has no axis {name!r}{suggest(name, sizes)}"
                raise self.error(None, why, axis=name)
        return math.prod(sizes[name] for name in axis_tuple(axis))

    def fits(self, dim: int, axis: Axis) -> bool:
        """Whether `axis` can split dimension `dim`: it divides it, the dimension is whole and the axis still free.

        **Arguments:**

        - `dim`: a dimension, which may be negative.
        - `axis`: a mesh axis, or a tuple of them.

        **Returns:**

        Whether `shard(dim, axis)` gives a spec that the mesh can honour.

        **Raises:**

        `NoMeshError` without a mesh, `RuleError` when the mesh has no such axis.

        ```python
        leaf = sr.Leaf("w", (8, 6), jnp.float32, sr.mesh_shape("data:4"))
        assert leaf.fits(0, "data") and not leaf.fits(1, "data")
        ```
        """
        split = self.axis_size(axis)
        if not -self.ndim <= dim < self.ndim:
            return False
        taken = self.taken
        return (
            self.shape[dim] % split == 0
            and self.entries[dim % self.ndim] == ()
            and not any(name in taken for name in axis_tuple(axis))
        )

    def shard(self, dim: int, axis: Axis, reason: str = "") -> Decision:
        """Returns the decision to split dimension `dim` over `axis`, on top of what is decided already.

        Whether the dimension divides is not asked here: a plan reports that, with all the numbers.

        **Arguments:**

        - `dim`: a dimension, which may be negative.
        - `axis`: a mesh axis, or a tuple of them, the first most major.
        - `reason`: why; by default what was done.

        **Returns:**

        A `Decision`.

        **Raises:**

        `RuleError` when there is no such dimension, it is split already, or the axis is in use on another one.

        ```python
        leaf = sr.Leaf("w", (8, 6), jnp.float32, spec=P("data"))
        assert leaf.shard(-1, "model").spec == P("data", "model")
        ```
        """
        if not -self.ndim <= dim < self.ndim:
            raise self.error(None, f"there is no dimension {dim} in shape {shape_text(self.shape)}")
        dim %= self.ndim
        names, found = axis_tuple(as_axis(axis)), self.entries
        if found[dim] != ():
            raise self.error(None, f"dimension {dim} is split already: {spec_repr(self.spec)}")
        taken = self.taken
        twice = [name for name in names if name in taken]
        if twice:
            raise self.error(
                None, f"dimension {dim} cannot take axis {twice[0]!r}: it splits another one, {self._so_far()}"
            )
        text = reason or f"dim {dim} over {axis!r}"
        return Decision(make_spec((*found[:dim], names, *found[dim + 1 :])), text)

    def replicate(self, reason: str = "replicated on purpose") -> Decision:
        """Returns the decision to hold the whole array on every device.

        **Arguments:**

        - `reason`: why.

        **Returns:**

        A `Decision` whose spec is `P()`.

        **Raises:**

        `RuleError` when a dimension is split already.

        ```python
        assert sr.Leaf("b", (8,), jnp.float32).replicate("small").spec == P()
        ```
        """
        if any(entry != () for entry in self.entries):
            raise self.error(
                None,
                f"Inconsistent sharding instructions: {spec_repr(self.spec)} is decided already, and now the leaf is "
                "to be replicated",
                "Replicate first and split after, or aim the two rules at different leaves with RegexShardingRule",
            )
        return Decision(PartitionSpec(), reason)

    def skip(self, reason: str) -> Decision:
        """Returns *no opinion*: another rule may decide.

        **Arguments:**

        - `reason`: why this rule has none.

        **Returns:**

        A `Decision` whose spec is `None`.

        ```python
        assert sr.Leaf("b", (8,), jnp.float32).skip("not mine").spec is None
        ```
        """
        return Decision(None, reason)

    def refine(self, spec: PartitionSpec, reason: str) -> Decision:
        """Returns the decision for the whole of `spec`, on top of what is decided already.

        **Arguments:**

        - `spec`: a PartitionSpec. Where it leaves a dimension whole, what is decided stays.
        - `reason`: why.

        **Returns:**

        A `Decision`.

        **Raises:**

        `RuleError` when the two disagree on a dimension.

        ```python
        assert sr.Leaf("w", (8, 6), jnp.float32, spec=P("data")).refine(P(None, "model"), "").spec == P("data", "model")
        ```
        """
        if self.spec is None and not self.aside:
            return Decision(spec, reason)
        wanted = entries(spec, len(self.entries))
        if all(entry == () for entry in wanted):
            return self.replicate(reason)
        current = self.entries + ((),) * (len(wanted) - len(self.entries))
        taken = self.taken
        for dim, (old, new) in enumerate(zip(current, wanted, strict=True)):
            clash = old != () and new not in ((), old)
            moved = old != new and new is not UNCONSTRAINED and any(name in taken for name in new)
            if clash or moved:
                raise self.error(
                    None, f"{spec_repr(spec)} and {self._so_far()}, decided before, disagree on dimension {dim}"
                )
        return Decision(make_spec(tuple(new or old for old, new in zip(current, wanted, strict=True))), reason)

    def try_refine(self, spec: PartitionSpec, reason: str) -> Decision:
        """As `refine`, but a conflict becomes a finding of the decision, so that a plan reports all of them at once.

        **Arguments:**

        - `spec`, `reason`: as for `refine`.

        **Returns:**

        A `Decision`; no opinion after a conflict.

        ```python
        decision = sr.Leaf("w", (8, 6), jnp.float32, spec=P("data")).try_refine(P("model"), "")
        assert decision.spec is None and decision.findings[0].code == "conflict"
        ```
        """
        try:
            return self.refine(spec, reason)
        except RuleError as error:
            return Decision(None, error.why, findings=(conflict(error),))

    def _so_far(self) -> str:
        here = [] if self.spec is None else [spec_repr(self.spec)]
        return " and ".join([*here, *(f"{name!r} on a dimension set aside" for name in self.aside)])

    def error(self, rule: object, why: str, hint: str = "", *, axis: str | None = None) -> RuleError:
        """Returns the error to raise when a rule cannot decide this leaf.

        **Arguments:**

        - `rule`: the rule, or `None` when the engine is to fill it in.
        - `why`: what is wrong, with the numbers.
        - `hint`: what to do about it.
        - `axis`: the mesh axis that it is about, where there is one.

        **Returns:**

        A `RuleError`, to be raised.

        ```python
        assert "w (8,): too small" in str(sr.Leaf("w", (8,), jnp.float32).error(None, "too small"))
        ```
        """
        return RuleError("" if rule is None else repr(rule), self.path, self.shape, why, hint, axis)
