"""How an expert shards a model by hand: where parameters, moments and the batch are, and what activations are held to.

A model names the dimensions of its activations (`held(x, "batch", "length", None)`) and says which dimension of a
parameter Megatron would split (`Expert.splits`). An `Expert` says which mesh axes do what. Outside of `constrained`
nobody has said so, and models carry no constraint at all.
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
Splits = tuple[tuple[str, int, str], ...]
"""Patterns of paths, with the dimension of such a parameter that is split, and by what: a name as in `held`."""


@final
class IndivisibleExpertError(ValueError):
    """A plan that splits a dimension which its axes do not divide: JAX would weaken it without a word."""


@final
@attrs.frozen
class Expert:
    """One plan that is written by hand.

    Axes are in the order in which they split a dimension. What is split over more axes in one place than in another
    has these last, so that gathering over them leaves whole pieces: else compilers permute.

    **Arguments:**

    - `name`: what it is called.
    - `batch`: the axes that split the examples.
    - `parameters`: the axes that split parameters, beside those of `tensor` and `experts`: FSDP.
    - `moments`: the same for the moments of Adam. More of them than of `parameters` is ZeRO-1.
    - `tensor`: the axes that split heads, hidden units and channels: Megatron.
    - `vocab`: the axes that split the vocabulary; `None` for those of `tensor`. Those that split examples elsewhere do
        not where the vocabulary is.
    - `columns`: the axes that split the columns of the embedding; without them `vocab` splits its rows.
    - `sequence`: whether `tensor` splits positions, too, where nothing else is split over it.
    - `experts`: the axes that split the experts of a mixture.
    - `splits`: what a model says of its parameters.
    - `stacked`: a pattern of the paths of parameters that are stacked for a loop.
    - `kept`: a pattern of the paths of parameters that only `tensor` splits.
    - `gathers`: whether parameters that are split for storage are gathered before they are used, and then once for
        both passes.
    """

    name: str
    batch: Axes
    parameters: Axes = ()
    moments: Axes = ()
    tensor: Axes = ()
    vocab: Axes | None = None
    columns: Axes = ()
    sequence: bool = False
    experts: Axes = ()
    splits: Splits = ()
    stacked: str = "^$"
    kept: str = "^$"
    gathers: bool = False

    def suits(self, mesh: Mesh) -> bool:
        """Returns whether it is meant for a mesh: one whose axes are all used, and that has all which are used."""
        return {*self.batch, *self.tensor, *self.experts} == {*mesh.axis_names}

    def fits(self, args: tuple[Any, Any], mesh: Mesh) -> bool:
        """Returns whether it is meant for such a mesh, and the mesh divides what it splits."""
        if not self.suits(mesh):
            return False
        try:
            self.shardings(args, mesh)
        except IndivisibleExpertError:
            return False
        return True

    def meaning(self, name: str | None) -> Axes:
        """Returns the axes that split a dimension of that name."""
        if name is None:
            return ()
        inner = tuple(one for one in self.tensor if one not in self.experts)
        vocab = self.tensor if self.vocab is None else self.vocab
        outer = tuple(one for one in self.batch if one not in self.experts)
        known = {
            "batch": self.batch,
            "length": self.tensor if self.sequence else (),
            "tensor": self.tensor,
            "vocab": vocab,
            "batch beside vocab": tuple(one for one in self.batch if one not in vocab),
            "rows": () if self.columns else vocab,
            "columns": self.columns,
            "batch beside table": tuple(one for one in self.batch if one not in (self.columns or vocab)),
            "experts": self.experts,
            "experts beside batch": tuple(one for one in self.experts if one not in self.batch),
            "batch of experts": outer,
            "tensor of experts": inner,
        }
        return known[name]

    def spec(self, path: str, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> P:
        """Returns how a parameter or moment is split, `axes` being those for FSDP."""
        taken: list[Axes] = [()] * len(shape)
        for pattern, dim, name in self.splits:
            if re.search(pattern, path):
                taken[dim] = self.meaning(name)
        used = [one for entry in taken for one in entry]
        rest = tuple(one for one in axes if one not in used)
        lead = 1 if re.search(self.stacked, path) else 0
        if rest and len(shape) - lead > 1 and not re.search(self.kept, path):
            free = [
                dim
                for dim in range(lead, len(shape))
                if not taken[dim] and shape[dim] % math.prod(mesh.shape[one] for one in rest) == 0
            ]
            if free:
                taken[max(free, key=lambda dim: shape[dim])] = rest
        return _checked(taken, shape, mesh, path)

    def shardings(self, args: tuple[Any, Any], mesh: Mesh) -> tuple[Any, Any]:
        """Returns a sharding for each array of `(state, batch)`; other leaves become `None`."""
        state, batch = args

        def of_state(path: Any, leaf: Any) -> NamedSharding | None:
            if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                return None
            text = jtu.keystr(path, simple=True, separator="/")
            axes = self.moments if re.search(r"(^|/)(mu|nu)(/|$)", text) else self.parameters
            return NamedSharding(mesh, self.spec(text, leaf.shape, mesh, axes))

        def of_batch(leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, _checked([self.batch], leaf.shape, mesh, "batch"))

        return jtu.tree_map_with_path(of_state, state), jax.tree.map(of_batch, batch)


def _checked(taken: list[Axes], shape: tuple[int, ...], mesh: Mesh, what: str) -> P:
    """The spec, if the axes divide the dimensions."""
    for entry, size in zip(taken, shape, strict=False):
        if size % math.prod(mesh.shape[one] for one in entry):
            raise IndivisibleExpertError(f"{what} {shape}: {entry} of {dict(mesh.shape)} does not divide {size}")
    return P(*(entry if len(entry) > 1 else next(iter(entry), None) for entry in taken))


@final
@attrs.frozen
class _Stage:
    mesh: Mesh
    expert: Expert


_STAGE = jax.make_user_context(None)
"""What `held` and `settled` read. A function that was traced under one expert is traced anew under another."""


def constrained(mesh: Mesh, expert: Expert) -> AbstractContextManager[None]:
    """Says, for a block, that models are held to what an expert writes."""
    return _STAGE(_Stage(mesh, expert))


def held(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns an activation held to what its dimensions mean; as it is where nobody has said so."""
    stage = _STAGE.value
    if stage is None:
        return x
    taken = [stage.expert.meaning(name) for name in names]
    spec = _checked(taken, x.shape, stage.mesh, f"activation {names}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(stage.mesh, spec))


def gathered(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns a parameter held to what its dimensions mean, if the expert gathers parameters before they are used."""
    stage = _STAGE.value
    return held(x, *names) if stage is not None and stage.expert.gathers else x


def settled(tree: Any) -> Any:
    """Returns gradients, or parameters before they are gathered, held to where their moments are."""
    stage = _STAGE.value
    if stage is None:
        return tree

    def one(path: Any, leaf: Any) -> Any:
        text = jtu.keystr(path, simple=True, separator="/")
        spec = stage.expert.spec(text, leaf.shape, stage.mesh, stage.expert.moments)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(stage.mesh, spec))

    return jtu.tree_map_with_path(one, tree)


def replicas(all_axes: Axes, **shared: Any) -> tuple[Expert, ...]:
    """Returns the plans that split nothing but the batch, and parameters for storage only."""
    return (
        Expert("data parallel", all_axes, **shared),
        Expert("ZeRO-1", all_axes, moments=all_axes, **shared),
        Expert("FSDP", all_axes, all_axes, all_axes, **shared),
    )


def hybrids(**shared: Any) -> tuple[Expert, ...]:
    """Returns the plans that split parameters for storage over some of the axes that split the batch."""
    two, three, fm = ("data", "model"), ("data", "fsdp", "model"), ("fsdp", "model")
    return (
        Expert("FSDP over data, copies over model", two, ("data",), two, **shared),
        Expert("FSDP over model, copies over data", two, ("model",), ("model", "data"), **shared),
        Expert("FSDP over fsdp+model, copies over data", three, fm, (*fm, "data"), **shared),
    )


def plain(splits: Splits = (), **shared: Any) -> tuple[Expert, ...]:
    """Returns the plans of every mesh that leave tensors whole."""
    shared = {"splits": splits, **shared}
    meshes = (("data",), ("data", "model"), ("data", "fsdp", "model"))
    return (*(one for axes in meshes for one in replicas(axes, **shared)), *hybrids(**shared))


def vocabularies(splits: Splits, *, tied: bool = False, **shared: Any) -> tuple[Expert, ...]:
    """Returns the plans that split the vocabulary, and nothing else but the batch and storage."""
    shared = {"splits": splits, **shared}
    m, found = ("model",), []
    for axes in (("data",), ("data", "model"), ("data", "fsdp", "model")):
        has_model = "model" in axes
        for one in (Expert("ZeRO-1", axes, (), axes, **shared), Expert("FSDP", axes, axes, axes, **shared)):
            by_columns = attrs.evolve(one, name=f"{one.name}, embedding by columns", columns=axes)
            known = [] if tied else [by_columns]
            if has_model:
                known += [attrs.evolve(each, name=f"{each.name}, head over model", vocab=m) for each in (one, *known)]
            found += known
    return tuple(found)


def megatron(splits: Splits, *, sequence: bool, **shared: Any) -> tuple[Expert, ...]:
    """Returns the plans of every mesh that split tensors, with positions split over the same axis or not."""
    shared = {"splits": splits, **shared}
    d, f, m, df = ("data",), ("fsdp",), ("model",), ("data", "fsdp")
    found = [
        Expert("Megatron over model, copies over data", d, (), (), m, **shared),
        Expert("Megatron over model, ZeRO-1 over data", d, (), d, m, **shared),
        Expert("Megatron over model, FSDP over data", d, d, d, m, **shared),
        Expert("Megatron over model, ZeRO-1 over data+fsdp", df, (), df, m, **shared),
        Expert("Megatron over model, FSDP over data+fsdp", df, df, df, m, **shared),
        Expert("Megatron over model, FSDP over fsdp, copies over data", df, f, (*f, *d), m, **shared),
        Expert("Megatron over fsdp+model, FSDP over data", d, d, d, ("fsdp", "model"), **shared),
    ]
    if sequence:
        found += [
            attrs.evolve(one, name=f"{one.name}, sequence parallel", sequence=True)
            for one in found
            if "FSDP over data" in one.name or "ZeRO-1" in one.name
        ]
    return tuple(found)
