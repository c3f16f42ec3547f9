"""A first guess of how each array of a model is split: features as in Megatron, and over other axes as FSDP does.

A layer that widens is split by its outputs, and one that narrows by its inputs, so that a block has one all-reduce. The
names of layers say which is which; where they do not, the width of the model does: its most frequent size.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import attrs

from shardrules.core.leaf import Leaf
from shardrules.core.spec import Entries

EMBEDDING = "Embeddings"
POSITION = "Positions"
WIDENS = "Layers that widen or project"
NARROWS = "Layers that narrow"
CONVOLUTION = "Convolutions"
OTHER = "Other matrices"
HEAD = "The head"
SMALL = "Small arrays: splitting them would save nothing"
INDIVISIBLE = "Arrays of which the mesh divides no dimension"

SMALL_BYTES = 2**20
"""An array of fewer bytes is small, beside far larger ones: a MiB is gathered in less time than a collective takes to
start."""

_PARAMETERS = ("weight", "kernel", "w", "embedding", "bias", "b", "scale")
"""Names of arrays inside of a layer, which say nothing about the layer."""

_WRAPPERS = ("value", "raw_value")
"""The last name of an array's path in some boxes."""

_ROLES = {
    "tensor": ("model", "mdl", "tensor", "tp", "mp"),
    "expert": ("expert", "experts", "ep"),
    "stage": ("stage", "stages", "pipe", "pipeline", "pp"),
    "data": (
        *("data", "dp", "ddp", "dcn", "batch", "replica", "fsdp", "hsdp", "zero", "shard"),
        *("cp", "sp", "seq", "sequence"),
    ),
}
"""The names of axes by what they split: the features of a layer, its experts, stacked layers, or whatever is left."""

_EMBEDDING = ("embed", "embedding", "embeddings", "embedder", "emb", "wte", "vocab", "lookup")
_POSITION = ("pos", "position", "positions", "positional", "wpe")
_HEAD = ("head", "unembed", "unembedding", "logits", "classifier")
_MLP_NARROWS = ("down", "wo", "w2", "fc2", "linear2", "dense2", "dense_4h_to_h")
_NARROWS = (*_MLP_NARROWS, "o", "out", "output", "proj", "c_proj")
_WIDENS = ("up", "gate", "wi", "w1", "w3", "fc1", "c_fc", "linear1", "dense1", "intermediate", "dense_h_to_4h")
_PROJECTS = ("q", "k", "v", "query", "key", "value", "qkv", "kv", "in", "c_attn")


def axis_roles(sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Returns the axes of a mesh for each role. Where no name says so, the last of several axes splits features."""
    words = {name: name.lower().removesuffix("_parallel").removesuffix("_axis") for name in sizes}
    roles = {name: next((role for role, names in _ROLES.items() if word in names), "") for name, word in words.items()}
    unknown = [name for name, role in roles.items() if not role]
    # Links are fastest along the last axis of a mesh, and splitting features sends most.
    if unknown and len(sizes) > 1 and "tensor" not in roles.values():
        roles[unknown[-1]] = "tensor"
    return {role: tuple(name for name in sizes if (roles[name] or "data") == role) for role in _ROLES}


@final
@attrs.frozen
class Guess:
    """The split of one kind of array, and the kind of layer that it was taken for."""

    entries: Entries
    label: str
    """The heading of its rules."""

    @property
    def is_whole(self) -> bool:
        """No axis splits it."""
        return not any(self.entries)


@final
@attrs.frozen
class _Layer:
    """The words of an array's path: the name of its layer, its own, and the names around them."""

    name: str
    words: tuple[str, ...]
    parameter: str
    """The name of the array in its layer, `weight`; empty where it is a layer itself, as in `mlp/up`."""
    modules: tuple[str, ...]
    is_repeated: bool

    @staticmethod
    def of(path: str) -> "_Layer":
        parts = path.split("/")
        names = [part for part in parts if not part.isdecimal()]
        # A wrapper is no parameter: `kernel/value` is a kernel.
        if len(names) > 1 and names[-1] in _WRAPPERS and names[-2].lower() in _PARAMETERS:
            names.pop()
        parameter = names.pop().lower() if len(names) > 1 and names[-1].lower() in _PARAMETERS else ""
        name = names[-1] if names else ""
        words = tuple(word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])|\d+", name))
        return _Layer(name.lower(), words, parameter, tuple(map(str.lower, names)), any(map(str.isdecimal, parts)))

    def is_one_of(self, names: Sequence[str]) -> bool:
        return self.name in names or any(word in names for word in self.words)

    def is_in(self, *words: str) -> bool:
        return any(word in module for module in self.modules for word in words)

    @property
    def narrows(self) -> bool:
        return self.is_one_of(_NARROWS) and not self.is_one_of((*_PROJECTS, *_WIDENS))

    @property
    def is_named(self) -> bool:
        """Its name says which of its dimensions are inputs."""
        return self.is_one_of((*_PROJECTS, *_NARROWS, *_WIDENS))

    @property
    def is_mlp(self) -> bool:
        return self.is_one_of((*_WIDENS, *_MLP_NARROWS)) and not self.is_in("attention", "attn")


@final
@attrs.frozen
class Guesser:
    """Common facts for the guesses of all arrays of a tree."""

    sizes: Mapping[str, int]
    roles: Mapping[str, tuple[str, ...]]
    """The axes for features (`tensor`), experts, stages and the rest (`data`)."""
    width: int
    """The size that most dimensions have; 0 without a matrix."""
    vocabularies: tuple[int, ...]
    """The numbers of rows of embeddings."""
    small_bytes: float
    inputs_first: bool
    """A bare matrix has its inputs in the first dimension."""
    stacked: tuple[str, ...]
    """Modules whose arrays have a leading dimension of layers."""

    @staticmethod
    def of(leaves: Sequence[Leaf], counts: Sequence[int], sizes: Mapping[str, int]) -> "Guesser":
        """Reads the common facts of `leaves`, with `counts` of each."""
        stacked = stacked_modules(leaves)
        pairs = [(_Layer.of(leaf.path), leaf) for leaf in leaves]
        dims: collections.Counter[int] = collections.Counter()
        for leaf, count in zip(leaves, counts, strict=True):
            for size in leaf.shape[_is_stacked(leaf.path, stacked) :] if leaf.ndim > 1 else ():
                dims[size] += count
        # Of sizes that are as frequent the smallest is the width: widened dims are larger.
        width = max(dims, key=lambda size: (dims[size], -size), default=0)
        matrix_bytes = [leaf.nbytes for leaf in leaves if leaf.ndim > 1]
        largest = max(matrix_bytes or [leaf.nbytes for leaf in leaves], default=0)
        return Guesser(
            sizes,
            axis_roles(sizes),
            width,
            tuple(leaf.shape[0] for layer, leaf in pairs if leaf.ndim == 2 and _is_embedding(layer)),
            min(SMALL_BYTES, largest / 16),  # chosen by hand: in small models far smaller arrays are small, too
            _inputs_first(pairs, width),
            stacked,
        )

    def guess(self, leaf: Leaf) -> Guess:
        """Returns how one array is split."""
        first = int(_is_stacked(leaf.path, self.stacked))
        dims = range(first, leaf.ndim)
        # The size of a stack is that of its layers, not of all of them together.
        layer_bytes = leaf.nbytes / leaf.shape[0] if first else leaf.nbytes
        is_vector = len(dims) == 1 and self.width > 0
        if not dims or layer_bytes < (SMALL_BYTES if is_vector else self.small_bytes):
            return Guess((), SMALL)
        layer = _Layer.of(leaf.path)
        has_experts = len(dims) == 3 and (layer.is_in("expert") or (not layer.parameter and layer.is_mlp))
        label, features, others = self._dims(layer, leaf.shape, dims[1:] if has_experts else dims)
        split, tensor = _Split(leaf.shape, self.sizes), self.roles["tensor"]
        if first:
            split.put(self.roles["stage"], [0])
        if has_experts:
            label = f"Experts, {label[0].lower()}{label[1:]}"
            split.put(self.roles["expert"], [dims[0]])
        # Sorting is stable, so of equal dims the first comes first.
        rest = [dim for dim in sorted(dims, key=lambda dim: -leaf.shape[dim]) if dim not in (*features, *others)]
        if label == CONVOLUTION:
            rest = []  # of a window of 3 x 3 no device needs a part
        split.put(tensor, [*features, *others, *rest])
        # Where nothing is for experts or stages, their axes split like data axes.
        split.put(tuple(name for name in self.sizes if name not in tensor), [*others, *rest, *features])
        return Guess(split.trimmed(), label) if any(split.entries) else Guess((), INDIVISIBLE)

    def _dims(self, layer: _Layer, shape: tuple[int, ...], dims: Sequence[int]) -> tuple[str, list[int], list[int]]:
        """A layer's kind, its dimensions for the axes of features, and those for other axes; the best first."""
        *outer, before, last = dims if len(dims) > 1 else (*dims, *dims)
        # Equinox and PyTorch call a matrix (outputs, inputs) `weight`; flax calls one (inputs, outputs) `kernel`.
        outputs_last = layer.parameter != "weight" if layer.parameter else self.inputs_first
        outputs, inputs = (last, before) if outputs_last else (before, last)
        if outer and layer.is_named and len(dims) == 3 and layer.parameter != "weight":
            # Heads have a dimension of their own, before their features'.
            return (NARROWS, [*outer, before], [last]) if layer.narrows else (WIDENS, [before, last], outer)
        if outer:
            return (
                (CONVOLUTION, [outer[0]], [dims[1]]) if layer.parameter == "weight" else (CONVOLUTION, [last], [before])
            )
        if layer.is_one_of(_POSITION):
            return POSITION, [last], [before]
        if _is_embedding(layer):
            return EMBEDDING, [before], [last]
        rows = [dim for dim in dims if shape[dim] in self.vocabularies]
        if layer.is_one_of(_HEAD) or (rows and not layer.is_repeated):
            if len(rows) == 1:
                # As many outputs as an embedding has rows.
                outputs, inputs = (before, last) if rows[0] == before else (last, before)
            return HEAD, [outputs], [inputs]
        if layer.is_named:
            return (NARROWS, [inputs], [outputs]) if layer.narrows else (WIDENS, [outputs], [inputs])
        if (shape[before] == self.width) != (shape[last] == self.width):
            outputs, inputs = (last, before) if shape[before] == self.width else (before, last)
        return OTHER, [outputs], [inputs]


def _is_embedding(layer: _Layer) -> bool:
    return (layer.is_one_of(_EMBEDDING) or layer.parameter == "embedding") and not layer.is_one_of((*_POSITION, *_HEAD))


def _inputs_first(pairs: Sequence[tuple[_Layer, Leaf]], width: int) -> bool:
    """Most bare matrices have their inputs first, as in `x @ w`. The inputs of a layer that widens are the width."""
    votes = 0
    for layer, leaf in pairs:
        if (
            leaf.ndim > 1
            and layer.is_named
            and not layer.parameter
            and (leaf.shape[-2] == width) != (leaf.shape[-1] == width)
        ):
            # A layer that widens has the width on the side of its inputs, and one that narrows on the other side.
            votes += 1 if (leaf.shape[-2] == width) != layer.narrows else -1
    return votes >= 0


@final
@attrs.define
class _Split:
    """The axes of each dimension of one array, as they are added."""

    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    entries: list[tuple[str, ...]] = attrs.field(
        default=attrs.Factory(lambda self: [()] * len(self.shape), takes_self=True), init=False
    )

    def put(self, axes: tuple[str, ...], dims: Iterable[int]) -> None:
        """Adds axes to the first of `dims` that they divide, together or else one by one."""
        order = list(dict.fromkeys(dims))
        axes = tuple(axis for axis in axes if not any(axis in entry for entry in self.entries))
        # All axes on one dim leave the others whole; one by one they may still fit.
        if axes and not self._put_together(axes, order) and len(axes) > 1:
            for axis in axes:
                self._put_together((axis,), order)

    def _put_together(self, axes: tuple[str, ...], dims: Sequence[int]) -> bool:
        # A dimension of its own first: then no collective has to cross two axes.
        for dim in sorted(dims, key=lambda dim: bool(self.entries[dim])):
            parts = math.prod(self.sizes[axis] for axis in (*self.entries[dim], *axes))
            if self.shape[dim] and self.shape[dim] % parts == 0:
                self.entries[dim] += axes
                return True
        return False

    def trimmed(self) -> Entries:
        """Returns the entries without trailing empty ones."""
        length = max((dim + 1 for dim, entry in enumerate(self.entries) if entry), default=0)
        return tuple(self.entries[:length])


def stacked_modules(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Returns the modules whose arrays are stacked, as `filter_vmap` and `scan` stack layers: the outermost ones.

    All their arrays have the same first dimension, and there are vectors as well as matrices behind it.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for leaf in leaves:
        parts = leaf.path.split("/")
        for length in range(1, len(parts)):
            shapes.setdefault("/".join(parts[:length]), []).append(leaf.shape)
    stacked: list[str] = []
    for module, inner in shapes.items():
        alike = all(len(shape) > 1 and shape[0] == inner[0][0] for shape in inner)
        ranks = {len(shape) for shape in inner}
        # A convolution with its bias has (8, 4, 3, 3) and (8, 1, 1).
        has_ones = any(max(shape[1:], default=1) == 1 for shape in inner)
        # Experts are stacked, too, but not in layers.
        is_inside = "expert" in module.lower() or any(module.startswith(f"{outer}/") for outer in stacked)
        if alike and len(ranks) > 1 and not has_ones and not is_inside:
            stacked.append(module)
    return tuple(stacked)


def _is_stacked(path: str, stacked: Sequence[str]) -> bool:
    return any(path.startswith(f"{module}/") for module in stacked)
