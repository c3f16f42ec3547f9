"""How an expert shards a model by hand: parameters, moments, the batch, and constraints on activations.

A model names the dimensions of its activations (`constrain(x, "batch", "length", None)`) and the dimension of each
parameter that Megatron would split (`Expert.splits`). An `Expert` maps these names to mesh axes. Outside of
`expert_constraints` models have no constraints.
"""

import math
import re
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]
Splits = tuple[tuple[str, int, str | None], ...]
"""Patterns of paths, with the dimension of such a parameter that is split, and its name as in `constrain`.

They apply to inputs too: those that no pattern matches are split by examples on their first dimension."""


@final
class IndivisibleExpertError(ValueError):
    """A plan with a dimension that its axes do not divide: JAX would weaken it silently."""


@final
@attrs.frozen
class Expert:
    """One plan that is written by hand.

    Axes are in the order in which they split a dimension. Axes that split an array in only some of its uses come last,
    so that gathering over them leaves contiguous pieces: otherwise compilers insert permutes.
    """

    name: str
    batch: Axes  # split the examples
    parameters: Axes = ()  # split parameters for storage, in addition to `tensor` and `experts`: FSDP
    moments: Axes = ()  # the same for the moments of Adam; more axes than `parameters` is ZeRO-1
    tensor: Axes = ()  # split heads, hidden units and channels: Megatron
    vocab: Axes | None = None
    """The axes that split the vocabulary, `None` for `tensor`. Where it is split, they do not split examples."""

    columns: Axes = ()  # split the columns of the embedding; without them `vocab` splits its rows
    sequence: bool = False
    """Whether `tensor` also splits positions where it splits nothing else."""

    experts: Axes = ()  # split the experts of a mixture
    splits: Splits = ()
    stacked: str = "^$"
    """A pattern of the paths of parameters that are stacked for a loop."""

    unsplit: str = "^$"
    """A pattern of the paths of parameters that only `tensor` splits."""

    gathers: bool = False
    """Whether stored parameters are gathered before they are used, once for the forward and backward pass."""

    frozen: str = "^$"
    """A pattern of the paths in the batch that are parameters, such as weights that do not learn."""

    def suits(self, mesh: Mesh) -> bool:
        """Whether it uses exactly the axes of a mesh."""
        return {*self.batch, *self.tensor, *self.experts} == {*mesh.axis_names}

    def fits(self, args: tuple[Any, Any], mesh: Mesh) -> bool:
        """Whether it suits a mesh, and the mesh divides every dimension that it splits."""
        if not self.suits(mesh):
            return False
        try:
            self.shardings(args, mesh)
        except IndivisibleExpertError:
            return False
        return True

    def axes_of(self, name: str | None) -> Axes:
        """The axes that split a dimension of this name."""
        if name is None:
            return ()
        vocab = self.tensor if self.vocab is None else self.vocab
        table = self.columns or vocab
        axes = {
            "batch": self.batch,
            "length": self.tensor if self.sequence else (),
            "tensor": self.tensor,
            "vocab": vocab,
            "batch beside vocab": tuple(axis for axis in self.batch if axis not in vocab),
            "rows": () if self.columns else vocab,
            "columns": self.columns,
            "batch beside table": tuple(axis for axis in self.batch if axis not in table),
            "experts": self.experts,
            "experts beside batch": tuple(axis for axis in self.experts if axis not in self.batch),
            "batch of experts": tuple(axis for axis in self.batch if axis not in self.experts),
            "tensor of experts": tuple(axis for axis in self.tensor if axis not in self.experts),
        }
        return axes[name]

    def spec(self, path: str, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> P:
        """The spec of a parameter or moment, where `axes` split it for storage."""
        entries: list[Axes] = [()] * len(shape)
        for pattern, dim, name in self.splits:
            if re.search(pattern, path):
                entries[dim] = self.axes_of(name)
        used = [axis for entry in entries for axis in entry]
        rest = tuple(axis for axis in axes if axis not in used)
        lead = 1 if re.search(self.stacked, path) else 0
        if rest and len(shape) - lead > 1 and not re.search(self.unsplit, path):
            free = [
                dim
                for dim in range(lead, len(shape))
                if not entries[dim] and shape[dim] % math.prod(mesh.shape[axis] for axis in rest) == 0
            ]
            if free:
                entries[max(free, key=lambda dim: shape[dim])] = rest
        return _checked_spec(entries, shape, mesh, path)

    def shardings(self, args: tuple[Any, Any], mesh: Mesh) -> tuple[Any, Any]:
        """The sharding of each array of `(state, batch)`; other leaves become `None`."""
        state, batch = args

        def of_state(path: Any, leaf: Any) -> NamedSharding | None:
            if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                return None
            text = jtu.keystr(path, simple=True, separator="/")
            axes = self.moments if re.search(r"(^|/)(mu|nu|momentum)(/|$)", text) else self.parameters
            return NamedSharding(mesh, self.spec(text, leaf.shape, mesh, axes))

        def of_batch(path: Any, leaf: Any) -> NamedSharding:
            text = jtu.keystr(path, simple=True, separator="/")
            if re.search(self.frozen, text):
                return NamedSharding(mesh, self.spec(text, leaf.shape, mesh, self.parameters))
            if any(re.search(pattern, text) for pattern, _, _ in self.splits):
                return NamedSharding(mesh, self.spec(text, leaf.shape, mesh, ()))
            return NamedSharding(mesh, _checked_spec([self.batch][: leaf.ndim], leaf.shape, mesh, "batch"))

        return jtu.tree_map_with_path(of_state, state), jtu.tree_map_with_path(of_batch, batch)


def _checked_spec(entries: list[Axes], shape: tuple[int, ...], mesh: Mesh, array: str) -> P:
    """The spec, if the axes divide the dimensions."""
    for entry, size in zip(entries, shape, strict=False):
        if size % math.prod(mesh.shape[axis] for axis in entry):
            raise IndivisibleExpertError(f"{array} {shape}: {entry} of {dict(mesh.shape)} does not divide {size}")
    return P(*(entry if len(entry) > 1 else next(iter(entry), None) for entry in entries))


@final
@attrs.frozen
class _Setting:
    mesh: Mesh
    expert: Expert


_SETTING = jax.make_user_context(None)
"""What `constrain` and `constrain_as_moments` read. It is in the keys of JAX's caches."""


def expert_constraints(mesh: Mesh, expert: Expert) -> AbstractContextManager[None]:
    """Constrains models as an expert does, inside a `with` block."""
    return _SETTING(_Setting(mesh, expert))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation by the names of its dimensions; returns it unchanged without an expert."""
    setting = _SETTING.value
    if setting is None:
        return x
    entries = [setting.expert.axes_of(name) for name in names]
    spec = _checked_spec(entries, x.shape, setting.mesh, f"activation {names}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(setting.mesh, spec))


def gathered(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains a parameter by the names of its dimensions, if the expert gathers parameters before they are used."""
    setting = _SETTING.value
    return constrain(x, *names) if setting is not None and setting.expert.gathers else x


def constrain_as_moments(tree: Any) -> Any:
    """Constrains gradients, or parameters before they are gathered, to the shardings of their moments."""
    setting = _SETTING.value
    if setting is None:
        return tree

    def constrain_leaf(path: Any, leaf: Any) -> Any:
        text = jtu.keystr(path, simple=True, separator="/")
        spec = setting.expert.spec(text, leaf.shape, setting.mesh, setting.expert.moments)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(setting.mesh, spec))

    return jtu.tree_map_with_path(constrain_leaf, tree)


def replicas(all_axes: Axes, **shared: Any) -> tuple[Expert, ...]:
    """The plans that split only the batch, and parameters for storage."""
    return (
        Expert("data parallel", all_axes, **shared),
        Expert("ZeRO-1", all_axes, moments=all_axes, **shared),
        Expert("FSDP", all_axes, all_axes, all_axes, **shared),
    )


def hybrids(**shared: Any) -> tuple[Expert, ...]:
    """The plans that split parameters for storage over some of the axes of the batch."""
    two, three, fm = ("data", "model"), ("data", "fsdp", "model"), ("fsdp", "model")
    return (
        Expert("FSDP over data, copies over model", two, ("data",), two, **shared),
        Expert("FSDP over model, copies over data", two, ("model",), ("model", "data"), **shared),
        Expert("FSDP over fsdp+model, copies over data", three, fm, (*fm, "data"), **shared),
    )


def plain(splits: Splits = (), **shared: Any) -> tuple[Expert, ...]:
    """The plans for every mesh that do not split tensors."""
    shared = {"splits": splits, **shared}
    meshes = (("data",), ("data", "model"), ("data", "fsdp", "model"))
    return (*(expert for axes in meshes for expert in replicas(axes, **shared)), *hybrids(**shared))


def vocabularies(splits: Splits, *, tied: bool = False, **shared: Any) -> tuple[Expert, ...]:
    """The plans that split only the vocabulary, the batch and storage."""
    shared = {"splits": splits, **shared}
    m, plans = ("model",), []
    for axes in (("data",), ("data", "model"), ("data", "fsdp", "model")):
        has_model = "model" in axes
        for base in (Expert("ZeRO-1", axes, (), axes, **shared), Expert("FSDP", axes, axes, axes, **shared)):
            by_columns = attrs.evolve(base, name=f"{base.name}, embedding by columns", columns=axes)
            variants = [] if tied else [by_columns]
            if has_model:
                variants += [
                    attrs.evolve(expert, name=f"{expert.name}, head over model", vocab=m)
                    for expert in (base, *variants)
                ]
            plans += variants
    return tuple(plans)


def megatron(splits: Splits, *, sequence: bool, **shared: Any) -> tuple[Expert, ...]:
    """The plans for every mesh that split tensors, with positions split over the same axis or not."""
    shared = {"splits": splits, **shared}
    d, f, m, df = ("data",), ("fsdp",), ("model",), ("data", "fsdp")
    plans = [
        Expert("Megatron over model, copies over data", d, (), (), m, **shared),
        Expert("Megatron over model, ZeRO-1 over data", d, (), d, m, **shared),
        Expert("Megatron over model, FSDP over data", d, d, d, m, **shared),
        Expert("Megatron over model, ZeRO-1 over data+fsdp", df, (), df, m, **shared),
        Expert("Megatron over model, FSDP over data+fsdp", df, df, df, m, **shared),
        Expert("Megatron over model, FSDP over fsdp, copies over data", df, f, (*f, *d), m, **shared),
        Expert("Megatron over fsdp+model, FSDP over data", d, d, d, ("fsdp", "model"), **shared),
    ]
    if sequence:
        plans += [
            attrs.evolve(expert, name=f"{expert.name}, sequence parallel", sequence=True)
            for expert in plans
            if "FSDP over data" in expert.name or "ZeRO-1" in expert.name
        ]
    return tuple(plans)


def published(
    splits: Splits = (),
    *,
    tensor: bool = False,
    sequence: bool = False,
    vocab: bool = False,
    columns: bool = False,
    experts: bool = False,
    serving: bool = False,
    **shared: Any,
) -> tuple[Expert, ...]:
    """Three to nine plans for every mesh, as papers have them, without variants: ZeRO, Megatron, GShard.

    The last axis is the one of tensors and experts. The flags say which dimensions a model has besides its examples:
    tensors, positions beside them, a vocabulary, columns of tables, experts. `serving` adds the plan that splits
    tensors over all axes and no examples.
    """
    shared = {"splits": splits, **shared}
    plans: list[Expert] = []
    for axes in (("data",), ("data", "model"), ("data", "fsdp", "model")):
        plans += replicas(axes, **shared)
        rest, last = axes[:-1], axes[-1:]
        if serving:
            plans.append(Expert("tensors over all axes", (), tensor=axes, **shared))
        if vocab and rest:
            plans.append(Expert(f"FSDP, vocabulary over {last[0]}", axes, axes, axes, vocab=last, **shared))
        if vocab and not rest:
            plans.append(Expert("FSDP, vocabulary over data", axes, axes, axes, vocab=axes, **shared))
        if columns:
            plans.append(Expert("FSDP, tables by columns", axes, axes, axes, columns=axes, **shared))
        if experts:
            plans.append(Expert("experts over all axes, ZeRO-1", axes, (), axes, experts=axes, **shared))
        if tensor and rest:
            base = Expert(f"Megatron over {last[0]}, FSDP over {'+'.join(rest)}", rest, rest, rest, last, **shared)
            plans.append(base)
            plans.append(attrs.evolve(base, name=base.name.replace("FSDP", "ZeRO-1"), parameters=()))
            if sequence:
                plans.append(attrs.evolve(base, name=f"{base.name}, sequence parallel", sequence=True))
        if experts and rest:
            over = f"experts over {last[0]}, FSDP over {'+'.join(rest)}"
            plans.append(Expert(over, axes, rest, rest, experts=last, **shared))
    return tuple(plans)
