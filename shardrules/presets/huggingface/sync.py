"""`sync_names`: the table of names between a model and a checkpoint, for `plan_sync`, in both directions."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.checkpoints.headers import read_headers
from shardrules.checkpoints.leaves import refuse
from shardrules.checkpoints.names import Name, flat_names
from shardrules.core.storage.files import as_path
from shardrules.moves.sync.arrays import Devices, read_arrays
from shardrules.moves.sync.table import NameLine, NameTable
from shardrules.presets.huggingface.names import name_finder

_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
"""Matrices that have the outputs of several, one after the other."""

_CAPTURES = ("layer", "expert", "index", "number")
"""What the indices in a name are called, in order."""

_OWN_WORDS = ("kernel", "scale", "embedding")
"""What flax calls a `weight`. A kernel is (in, out)."""

_HEAD = "lm_head"

_SWAP = ("transpose(1, 0)", "transpose(1, 0)")

Shaped = tuple[tuple[int, ...], Any]
"""A shape and a dtype."""


def sync_names(
    model: Any, checkpoint: Any, rename: Mapping[str, str] | None = None, *, reverse: bool = False
) -> NameTable:
    """Returns the lines that make arrays with the names of a Hugging Face checkpoint out of a model's arrays.

    With `reverse` they make the model's out of the checkpoint's. `model` is a tree or a plan; `checkpoint` is one with
    names such as `model.layers.0.mlp.up_proj.weight`, or a file or folder, whose headers are read. Paths become names
    as in `tensor_names`, with `rename`: stacked layers and experts, words in front, heads that are tied. Besides, `q`,
    `k` and `v`, or `gate` and `up`, may be in one matrix on either side (`qkv_proj`, `gate_up_proj`, `w13`), kernels of
    flax are transposed, heads may be dims, vocabularies padded, and dtypes differ. An array without a counterpart has
    no line: `plan_sync` says so.

    ```python
    from shardrules.presets import huggingface

    model = {"layers": {"mlp": {"up_proj": {"kernel": jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)}}}}
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(2)]
    checkpoint = dict.fromkeys(names, jax.ShapeDtypeStruct((32, 8), jnp.bfloat16))
    line = huggingface.sync_names(model, checkpoint).lines[0]
    assert line.target == ("model.layers.{layer}.mlp.up_proj.weight",)
    assert line.operations == "unstack('layer') | transpose(1, 0) | cast('bfloat16')"
    ```
    """
    arrays, stored = _arrays(model), _arrays(checkpoint)
    pairs = _pairs(arrays, stored, rename)
    lines: dict[tuple[tuple[str, ...], tuple[str, ...], str], None] = {}
    unused: list[str] = []
    used: dict[str, None] = {}
    for pair in pairs:
        names = [name for each in pair.names for name in flat_names(each)]
        is_tied = all(name in used for name in names)
        used.update(dict.fromkeys(names))
        if is_tied and not reverse:  # another array of the model makes it
            unused += pair.paths
            continue
        lines[_line(pair, arrays, stored, is_tied, reverse)] = None
    for name in stored:
        # The model has no head of its own: the embedding makes the checkpoint's, and is not made of it.
        if name in used or _HEAD not in name:
            continue
        if reverse:
            unused.append(name)
            continue
        embedding = next((pair for pair in pairs if any("embed" in str(each) for each in pair.names)), None)
        if embedding is not None:
            lines[_line(attrs.evolve(embedding, names=(name,)), arrays, stored, True, False)] = None
    # Lines for single names come first: those with captures could take theirs.
    ordered = sorted(lines, key=lambda line: "{" in line[0][0])
    return NameTable([NameLine(*line) for line in ordered], unused)


def _arrays(tree: Any) -> dict[str, Shaped]:
    if isinstance(tree, str | os.PathLike):
        headers = read_headers(as_path(tree, "sync_names"))
        refuse(f"sync_names: {tree}", headers.problems)
        return {name: (array.shape, array.dtype) for name, array in headers.stored.items()}
    arrays = read_arrays(tree, 0, Devices())
    return dict(zip(arrays.paths, zip(arrays.shapes, arrays.dtypes, strict=True), strict=True))


@final
@attrs.frozen
class _Pair:
    """Paths of a model and names of a checkpoint that hold the same numbers; on one side there may be several."""

    paths: tuple[str, ...]
    names: tuple[Any, ...]


def _pairs(arrays: Mapping[str, Shaped], stored: Mapping[str, Shaped], rename: Mapping[str, str] | None) -> list[_Pair]:
    finder = name_finder(stored, rename)
    pairs: list[_Pair] = []
    fused: dict[Any, dict[int, str]] = {}
    for path in arrays:
        name = _name(path, finder, stored)
        if name is not None:
            pairs.append(_Pair((path,), (name,)))
            continue
        for word, parts in _FUSED.items():
            names = tuple(_name(_replaced(path, word, part), finder, stored) for part in parts)
            if _replaced(path, word, "") != path and None not in names:
                pairs.append(_Pair((path,), names))
            for number, part in enumerate(parts):
                whole = _name(_replaced(path, part, word), finder, stored)
                if _replaced(path, part, "") != path and whole is not None:
                    fused.setdefault(whole, {})[number] = path
    for name, paths in fused.items():
        pairs.append(_Pair(tuple(path for _, path in sorted(paths.items())), (name,)))
    # Heads behind embeddings, which they may be tied to.
    return sorted(pairs, key=lambda pair: _HEAD in pair.paths[0])


def _replaced(path: str, word: str, other: str) -> str:
    return re.sub(rf"(?<![^/.]){re.escape(word)}(?![^/.])", other, path)


def _name(path: str, finder: Callable[[str], Name], stored: Mapping[str, Shaped]) -> Name:
    """The name or the names of a path; `None` where the checkpoint has none."""
    front, _, last = path.rpartition("/")
    for candidate in (path, f"{front}/weight" if last in _OWN_WORDS else path):
        name = finder(candidate)
        if all(each in stored for each in flat_names(name)):
            return name
    return None


def _line(
    pair: _Pair, arrays: Mapping[str, Shaped], stored: Mapping[str, Shaped], is_tied: bool, reverse: bool
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """The source, the target and the operations of a line, in one direction."""
    names, stacks = _name_patterns(pair.names)
    paths, names = _shared(pair.paths, names)
    (shape, dtype), is_kernel = arrays[pair.paths[0]], pair.paths[0].endswith("/kernel")
    shapes = [stored[next(flat_names(name))][0] for name in pair.names]
    new_dtype = stored[next(flat_names(pair.names[0]))][1]
    core = shape[len(stacks) :]
    if len(pair.paths) > 1:  # the checkpoint's is split
        rows = [arrays[path][0][len(stacks) :] for path in pair.paths]
        outputs = [each[-1] if is_kernel else each[0] for each in rows]
        core = (*core[:-1], sum(outputs)) if is_kernel else (sum(outputs), *core[1:])
    else:
        outputs = [each[0] for each in shapes] if len(shapes) > 1 else []
    goal = (sum(each[0] for each in shapes), *shapes[0][1:])
    # Each step with its inverse, from the model to the checkpoint.
    steps = [(f"unstack({name!r})", f"stack({name!r})") for name in stacks]
    divides, joins = f"split(0, {outputs})", "concat(0)"
    if len(pair.paths) > 1:
        steps += [_SWAP] * (is_kernel and len(core) == 2)
        steps.append((joins, divides))
    else:
        steps += _changes(core, goal, is_kernel)
        steps += [(divides, joins)] if outputs else []
    if dtype != new_dtype:
        steps.append((f"cast({str(new_dtype)!r})", f"cast({str(dtype)!r})"))
    texts = [after for _, after in reversed(steps)] if reverse else [before for before, _ in steps]
    sides = (names, paths) if reverse else (paths, names)
    return *sides, " | ".join([*texts, *(["tied()"] if is_tied else [])])


def _changes(core: tuple[int, ...], goal: tuple[int, ...], is_kernel: bool) -> Iterator[tuple[str, str]]:
    """The steps from an array of a model's layer to one of the checkpoint, each with its inverse."""
    swapped = goal[::-1] if len(goal) == 2 else goal
    is_swapped = len(goal) == 2 and (is_kernel or core == swapped != goal)
    first = swapped if is_swapped else goal
    if core != first and math.prod(core) == math.prod(first):  # heads are dims of the model
        yield f"reshape{first}", f"reshape{core}"
        core = first
    if is_swapped:
        yield _SWAP
        core = core[::-1]
    if core[1:] == goal[1:] and core != goal:  # a padded vocabulary
        more, less = max(core[0], goal[0]), min(core[0], goal[0])
        pad, crop = f"pad(0, 0, {more - less})", f"crop(0, 0, {less})"
        yield (crop, pad) if core[0] > goal[0] else (pad, crop)


def _name_patterns(names: Sequence[Name]) -> tuple[tuple[str, ...], list[str]]:
    """Patterns for names or stacks of names, and the captures of the stacks from the outermost on."""
    patterns: list[str] = []
    stacks: list[str] = []
    for name in names:
        flat = list(flat_names(name))
        columns = [text.split(".") for text in flat[:1] + flat[-1:]]
        numbers = [index for index, part in enumerate(columns[0]) if part.isdecimal()]
        # With a single layer or expert nothing differs: then the innermost indices are those of the stacks.
        varied = [index for index in numbers if columns[0][index] != columns[-1][index]]
        depth = _depth(name)
        chosen = sorted([*varied, *[index for index in reversed(numbers) if index not in varied]][:depth])
        captures = [_CAPTURES[numbers.index(index)] for index in chosen]
        for index, capture in zip(chosen, captures, strict=True):
            columns[0][index] = f"{{{capture}}}"
        patterns.append(".".join(columns[0]))
        stacks = captures
    return tuple(patterns), stacks


def _depth(name: Name) -> int:
    return 0 if isinstance(name, str) or name is None else 1 + _depth(name[0])


def _shared(paths: Sequence[str], names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Both with captures for the indices that they have in common."""
    indices = [re.findall(r"(?<![^/.])\d+(?![^/.])", text) for text in (*paths, *names)]
    if any(each != indices[0] for each in indices):
        return tuple(paths), tuple(names)
    captured = [capture for capture in _CAPTURES if f"{{{capture}}}" not in names[0]]

    def general(text: str) -> str:
        rest = iter(captured)
        return re.sub(r"(?<![^/.])\d+(?![^/.])", lambda _: f"{{{next(rest)}}}", text)

    return tuple(map(general, paths)), tuple(map(general, names))
