"""`load_safetensors` and `save_safetensors`: safetensors files, one or many, from and into shardings.

Everything that the headers say is checked against `like` before any tensor is read. All processes write together, each
what its own devices hold.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import attrs
import numpy as np

from shardrules.checkpoints.checksums import KEY, blank_text, is_text
from shardrules.checkpoints.commit import FileLayout, SavePlan, Saving, remove
from shardrules.checkpoints.headers import DTYPES, INDEX, read_headers, read_index
from shardrules.checkpoints.leaves import (
    RequestedLeaf,
    SavedLeaf,
    local_path,
    name_findings,
    refuse,
    saved_leaves,
    title_of,
)
from shardrules.checkpoints.load import load, read_tensors
from shardrules.checkpoints.names import (
    Contents,
    Names,
    mismatch_findings,
    name_function,
    requested_names,
    unknown_paths,
)
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError, shown
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Finding
from shardrules.core.tree import leaf_paths
from shardrules.rules.how import How

_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

_ALIGNMENT = 8
"""The data begin at a multiple of this, as the safetensors library writes them: readers may map them as numbers."""


def load_safetensors(
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    names: Names = None,
    surplus: Literal["error", "skip"] = "error",
    cast: bool = False,
    verify: bool = True,
) -> Any:
    """Loads safetensors into a tree of sharded arrays. Each process reads only what its devices hold.

    No device gets more than its shards, and the host holds little more than an array at a time, mostly one shard. All
    headers are checked before anything is read, and what is read is compared with its checksums.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json`, or a folder with an index or with such files.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s with the expected shapes and dtypes, for example a module from
        `eqx.filter_eval_shape`. A Python number takes the one that the file has under its name, if there is one. Other
        leaves stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`.
    - `names`: from a leaf's path (`layers/0/mlp/up/weight`) to the name of its tensor: a function, or a table for the
        paths whose name is not the default. The default name is the path with dots, `layers.0.mlp.up.weight`. `None`
        for a path: the file lacks it, and the array in `like` is placed. A list of names is an array of stacked layers,
        each a tensor; lists may nest, as for experts in layers.
    - `surplus`: `"error"` refuses tensors that no leaf takes, `"skip"` ignores them.
    - `cast`: whether a tensor of another dtype than the leaf's is converted, part by part on the host, or is an error.
        Integers may become floats, but not the other way round.
    - `verify`: whether what is read is compared with the checksums that `save_safetensors` wrote. Files of others have
        none.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, surplus, of another shape or dtype, truncated or unreadable,
    or naming the first tensor that differs from its checksums; `PlanError`, `TreeError` and `NoMeshError` as
    `filter_shard`.

    ```python
    import safetensors.numpy

    safetensors.numpy.save_file({"model.up.weight": np.ones((16, 8), np.float32)}, "model.safetensors")
    like = {"up": {"weight": jax.ShapeDtypeStruct((16, 8), jnp.float32)}}
    params = sr.load_safetensors(
        "model.safetensors",
        like,
        sr.DimShardingRule("model", 0),
        sr.create_mesh("data:4,model:2"),
        names=lambda path: "model." + path.replace("/", "."),
    )
    assert params["up"]["weight"].sharding.spec == P("model", None)
    ```
    """

    def contents(leaves: Sequence[RequestedLeaf]) -> Contents:
        headers = read_headers(local_path(path, "load_safetensors"), verify=verify)
        name_of = name_function(names, _default_name, "load_safetensors")
        tensor_names = requested_names(leaves, headers.stored, name_of)
        return Contents(headers.stored, tensor_names, read_tensors(headers.tensor), headers.problems, has_stacks=True)

    return load("load_safetensors", path, like, how, mesh, contents, names, surplus=surplus, cast=cast, verify=verify)


def _default_name(path: str) -> str:
    return path.replace("/", ".")


def save_safetensors(
    path: Any,
    tree: Any,
    *,
    names: Names = None,
    max_file_bytes: float | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> None:
    """Saves the arrays and Python numbers of a tree as safetensors. Every process calls it, with the same tree.

    Each process writes what its own devices hold, shard by shard, straight into the files: no process holds more of the
    tree on its host than a tensor, mostly one shard. So all processes must write to one file system. The files do not
    depend on the mesh or on how many processes write them.

    What was saved at `path` before is replaced at once, when everything is on the disk: a process that is killed, or a
    disk that is full, leaves the old checkpoint whole. New files have the mode of old ones.

    **Arguments:**

    - `path`: a folder, which gets the files and `model.safetensors.index.json`; or one file, `model.safetensors`, for
        all tensors; or an index, `model.safetensors.index.json`. Folders are made.
    - `tree`: any pytree: a module, a train state. Of typed PRNG keys the key data are saved. Leaves that are neither
        arrays nor Python numbers (functions, strings) are not saved: `load_safetensors` takes them from `like`.
    - `names`: one name for each tensor: a function from paths, or a table for the paths whose name is not the path with
        dots. `None` for a path: it is not saved. What names one tensor each, `load_safetensors` takes too.
    - `max_file_bytes`: how much goes into one file of a folder, as bytes or `"5GB"`. A larger tensor has its own.
    - `metadata`: strings to put into each file, such as `{"format": "pt"}`, which other libraries expect.
    - `timeout`: the seconds that a process waits for the others at each step.

    **Raises:**

    `CheckpointError`, listing everything that cannot be saved (deleted arrays, shapes without values, dtypes that the
    format lacks, names that occur twice, keys of `names` that are not paths); where the other form of a checkpoint, one
    file or a folder of files, is there under this name; for addresses of cloud stores; or when a file cannot be
    written: on all processes, whichever failed. `ConfigError` and `ConfigTypeError` for bad arguments.
    `DisagreementError` where processes have different trees; `BarrierTimeoutError` and `BarrierError` as in
    `barrier_sync`.

    ```python
    state = {"w": jnp.ones((16, 8), jnp.bfloat16), "step": 7, "key": jax.random.key(0)}
    rule = sr.RegexShardingRule([("w", P("model", "data")), ("key", P())])
    state = sr.filter_shard(state, rule, sr.create_mesh("data:4,model:2"))
    sr.save_safetensors("checkpoint", state)
    restored = sr.load_safetensors("checkpoint", {**state, "step": 0}, P(), sr.create_mesh("data:8"))
    assert restored["step"] == 7 and restored["key"] == jax.random.key(0)
    ```
    """
    saving = Saving(title_of("save_safetensors", path), timeout)
    saving.save(lambda: _plan(path, tree, names, max_file_bytes, metadata, saving.title))


@final
@attrs.frozen(eq=False)
class _Files:
    """The files of a checkpoint: one, or several with an index."""

    folder: Path
    stem: str
    """The beginning of the names of the files."""
    index: Path | None
    """`None` where there is one file."""
    leaves: Sequence[SavedLeaf]
    names: Sequence[str]
    groups: Sequence[list[int]]
    """The indices of the leaves in each file."""
    metadata: Mapping[str, str] | None
    old: Sequence[Path]
    """The files of the old index."""

    @property
    def file_names(self) -> str:
        """A regular expression for the names of this checkpoint's files, of any generation."""
        stem = re.escape(self.stem)
        return rf"{stem}\.safetensors" if self.index is None else rf"{stem}(\.\d+)?-\d+-of-\d+\.safetensors"

    def paths(self, generation: int) -> list[Path]:
        """Returns the paths of the files; each generation has its own, so that none replaces an old file."""
        if self.index is None:
            return [self.folder / f"{self.stem}.safetensors"]
        start = f"{self.stem}.{generation}" if generation else self.stem
        count = len(self.groups)
        return [self.folder / f"{start}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]

    def free_generation(self) -> int:
        """Returns the first generation that has no file yet."""
        generation = 0
        while self.index is not None and any(path.exists() for path in self.paths(generation)):
            generation += 1
        return generation

    def layouts(self, generation: int) -> list[FileLayout]:
        """Returns the layout of each file, and of the index, which makes them the checkpoint."""
        pairs = list(zip(self.paths(generation), self.groups, strict=True))
        files = [self._layout(path, group) for path, group in pairs]
        if self.index is None:
            return files
        weight_map = {self.names[leaf_index]: path.name for path, group in pairs for leaf_index in group}
        metadata = {KEY: blank_text([])[1], "total_size": sum(leaf.nbytes for leaf in self.leaves)}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode()
        return [*files, FileLayout(self.index, len(text), ((0, text),))]

    def _layout(self, path: Path, group: list[int]) -> FileLayout:
        # Large items first, so that every tensor begins at a multiple of its item size.
        order = sorted(group, key=lambda leaf_index: -self.leaves[leaf_index].dtype.itemsize)
        block, sums = blank_text([self.leaves[leaf_index].nbytes for leaf_index in order])
        header: dict[str, Any] = {"__metadata__": {KEY: sums} | {**(self.metadata or {}), KEY: sums}}
        starts: list[tuple[int, int]] = []
        end = 0
        for leaf_index in order:
            leaf, start = self.leaves[leaf_index], end
            end += leaf.nbytes
            starts.append((leaf_index, start))
            entry = {"dtype": _DTYPE_NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
            header[self.names[leaf_index]] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        begin = 8 + len(text)
        tensors = tuple((leaf_index, begin + start) for leaf_index, start in starts)
        return FileLayout(path, begin + end, ((0, len(text).to_bytes(8, "little") + text),), tensors, block)

    def clear(self) -> None:
        """Removes what no index names: the old files, and those of saves that were killed before they came here."""
        if self.index is not None:
            entries = list(self.folder.iterdir())
            named = {path for entry in entries if entry.name.endswith(INDEX) for path in _indexed_files(entry)}
            shards = [path for path in entries if re.fullmatch(self.file_names, path.name)]
            remove(path for path in dict.fromkeys([*self.old, *shards]) if path not in named)


def _plan(
    path: Any, tree: Any, names: Names, max_file_bytes: float | str, metadata: Mapping[str, str] | None, title: str
) -> SavePlan:
    caller = "save_safetensors"
    target = local_path(path, caller)
    pairs = metadata.items() if isinstance(metadata, Mapping) else [(None, None)]
    if metadata is not None and not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ConfigTypeError(f"{caller}: metadata must be a table from strings to strings, got {shown(metadata)}")
    if alike := [key for key, text in (metadata or {}).items() if key != KEY and is_text(text)]:
        raise ConfigError(
            f"{caller}: metadata[{shown(alike[0])}] reads like the checksums of a file, and loading would take it for "
            "damaged ones. Leave it out"
        )
    most_bytes = read_bytes("max_file_bytes", max_file_bytes)
    if most_bytes < 1:
        raise ConfigError(f"{caller}: max_file_bytes must be 1 or more, got {max_file_bytes!r}")
    is_file = target.suffix == ".safetensors"
    index = None if is_file else target if target.name.endswith(INDEX) else target / f"model{INDEX}"
    folder = target.parent if index is None else index.parent
    stem = target.stem if index is None else index.name.removesuffix(INDEX)
    if target.exists() and target.is_dir() != (folder == target):
        what = "a folder" if target.is_dir() else "a file"
        raise CheckpointError(
            f"{title} cannot be saved: it is {what}. Pass a folder, or a file that ends in .safetensors"
        )
    other = folder / f"{stem}{INDEX if index is None else '.safetensors'}"
    if os.path.exists(other):  # also where its name would be too long
        raise CheckpointError(
            f"{title} cannot be saved: {other} is a checkpoint already, and one of the two would be loaded for the "
            "other. Remove it, or save under another name"
        )
    leaves, tensor_names = _named_leaves(tree, names, title)
    groups = [list(range(len(leaves)))] if index is None else _groups(leaves, most_bytes)
    files = _Files(
        folder, stem, index, leaves, tensor_names, groups, metadata, [] if index is None else _indexed_files(index)
    )
    # All that the files depend on beside the leaves.
    text = json.dumps([str(index), tensor_names, groups, metadata and dict(metadata)])
    return SavePlan(leaves, text, files.layouts, files.file_names, files.free_generation, files.clear)


def _named_leaves(tree: Any, names: Names, title: str) -> tuple[list[SavedLeaf], list[str]]:
    """Returns the leaves to save, and the name of the tensor of each."""
    caller = "save_safetensors"
    leaves, findings = saved_leaves(tree, caller, _unsupported)
    name_of = name_function(names, _default_name, caller)
    named: list[tuple[SavedLeaf, str]] = []
    for leaf in leaves:
        name = name_of(leaf.path)
        if not isinstance(name, str | None):
            raise ConfigTypeError(f"{caller}: names must give a string or None for {leaf.path!r}, got {name!r:.60}")
        if name is not None:
            named.append((leaf, name))
        if name == "__metadata__":
            remedy = "Give it another name: names={path: name}"
            findings.append(Finding("error", "name", f"{name!r} is reserved", leaf.path, remedy))
    paths = leaf_paths(tree)
    findings += mismatch_findings(unknown_paths(names, paths, "the tree"), (), paths)
    findings += name_findings([(leaf.path, name) for leaf, name in named], "Give it another name: names={path: name}")
    refuse(title, findings, "saved, and nothing was written")
    if not named:
        raise CheckpointError(f"{title} cannot be saved: the tree has neither an array nor a Python number")
    return [leaf for leaf, _ in named], [name for _, name in named]


def _unsupported(dtype: np.dtype) -> str:
    return "" if dtype in _DTYPE_NAMES else f"it is {dtype}, which safetensors cannot hold"


def _groups(leaves: list[SavedLeaf], most_bytes: int) -> list[list[int]]:
    """Returns the indices of the leaves in each file, in the order of the tree."""
    groups: list[list[int]] = []
    group_bytes = 0
    for leaf_index, leaf in enumerate(leaves):
        if not groups or group_bytes + leaf.nbytes > most_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(leaf_index)
        group_bytes += leaf.nbytes
    return groups


def _indexed_files(index: Path) -> list[Path]:
    """Returns the files beside an index that it names; none where there is no index, or a broken one."""
    return [path for path in read_index(index, verify=False).files.values() if path.parent == index.parent]
