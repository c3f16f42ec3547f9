"""`save_safetensors`: a tree of sharded arrays into safetensors files, with an index, from all processes at once."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np

from shardrules.checkpoints.checksums import KEY, blank_text, block_bytes, block_count, is_text, sealed
from shardrules.checkpoints.commit import FileLayout, Saving, remove, sync_folder, write_synced
from shardrules.checkpoints.headers import DTYPES, INDEX
from shardrules.checkpoints.names import Names
from shardrules.checkpoints.saved import SavedLeaf, is_unicode, refuse_to_save, saved_leaves
from shardrules.checkpoints.tensor_file import local_path, title_of
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError, shown, suggest
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Finding
from shardrules.core.jax_state import process_id
from shardrules.core.storage.files import open_regular
from shardrules.core.storage.records import read_json
from shardrules.core.tree import leaf_paths

_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

_ALIGNMENT = 8
"""The data begin at a multiple of this, as the safetensors library writes them: readers may map them as numbers."""


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
    plan = saving.plan(lambda: _plan(path, tree, names, max_file_bytes, metadata, saving.title))
    # The first process looks for names: another may not see yet what it removed a moment ago.
    free_generation = plan.free_generation() if process_id() == 0 else None
    writers, token, generation = saving.agree_on(plan.leaves, plan.text, free_generation)
    files = plan.layouts(generation)
    finish, undo = lambda: plan.finish(files), lambda: plan.undo(files)
    saving.write(files, plan.leaves, writers, token, plan.file_names, finish, undo)


@final
@attrs.frozen(eq=False)
class _Plan:
    """What goes into which file."""

    folder: Path
    stem: str
    """How the names of the files begin."""
    index: Path | None
    """`None` where there is one file."""
    leaves: list[SavedLeaf]
    names: list[str]
    groups: list[list[int]]
    """The indices of the leaves in each file."""
    metadata: Mapping[str, str] | None

    @property
    def text(self) -> str:
        """All that the files depend on beside the leaves."""
        return json.dumps([str(self.index), self.names, self.groups, self.metadata and dict(self.metadata)])

    def paths(self, generation: int) -> list[Path]:
        """Returns the names of the files; each generation has its own, so that none replaces an old file."""
        if self.index is None:
            return [self.folder / f"{self.stem}.safetensors"]
        start = f"{self.stem}.{generation}" if generation else self.stem
        count = len(self.groups)
        return [self.folder / f"{start}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]

    def free_generation(self) -> int:
        """Returns the first generation of which no file exists."""
        generation = 0
        while self.index is not None and any(path.exists() for path in self.paths(generation)):
            generation += 1
        return generation

    def layouts(self, generation: int) -> list[FileLayout]:
        """Returns what goes where in each file."""
        pairs = zip(self.paths(generation), self.groups, strict=True)
        return [self._layout(path, group) for path, group in pairs]

    def _layout(self, path: Path, group: list[int]) -> FileLayout:
        # Large items first, so that every tensor begins at a multiple of its item size.
        order = sorted(group, key=lambda leaf_index: -self.leaves[leaf_index].dtype.itemsize)
        sizes = [self.leaves[leaf_index].nbytes for leaf_index in order]
        block = block_bytes(sizes)
        sums = blank_text(sum(block_count(size, block) for size in sizes), block)
        header: dict[str, Any] = {"__metadata__": {KEY: sums} | {**(self.metadata or {}), KEY: sums}}
        starts: list[tuple[int, int]] = []
        end = 0
        for leaf_index in order:
            leaf = self.leaves[leaf_index]
            starts.append((leaf_index, end))
            end += leaf.nbytes
            entry = {
                "dtype": _DTYPE_NAMES[leaf.dtype],
                "shape": list(leaf.shape),
                "data_offsets": [end - leaf.nbytes, end],
            }
            header[self.names[leaf_index]] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        begin = 8 + len(text)
        tensors = tuple((leaf_index, begin + start) for leaf_index, start in starts)
        return FileLayout(path, begin + end, ((0, len(text).to_bytes(8, "little") + text),), tensors, block)

    @property
    def file_names(self) -> str:
        """A regular expression for the names of this checkpoint's files, of any generation."""
        stem = re.escape(self.stem)
        return rf"{stem}\.safetensors" if self.index is None else rf"{stem}(\.\d+)?-\d+-of-\d+\.safetensors"

    def finish(self, files: Sequence[FileLayout]) -> None:
        """Writes the index, which makes the new files the checkpoint, and removes the files that no index names."""
        sync_folder(self.folder)
        if self.index is None:
            return
        pairs = zip(files, self.groups, strict=True)
        weight_map = {self.names[leaf_index]: file.path.name for file, group in pairs for leaf_index in group}
        total = sum(leaf.nbytes for leaf in self.leaves)
        old = _indexed_files(self.index)
        table = {"metadata": {KEY: blank_text(0, 4096), "total_size": total}, "weight_map": weight_map}
        text = json.dumps(table, indent=2).encode()
        start, crc = sealed([text])
        write_synced(self.index, b"%s%s%s" % (text[:start], crc, text[start + len(crc) :]))
        # Files that no index names are of saves that were killed before they wrote it, or before they came to this.
        indices = [path for path in self.folder.iterdir() if path.name.endswith(INDEX)]
        named = {path for index in indices for path in _indexed_files(index)}
        shards = [path for path in self.folder.iterdir() if re.fullmatch(self.file_names, path.name)]
        remove(path for path in dict.fromkeys([*old, *shards]) if path not in named)

    def undo(self, files: Sequence[FileLayout]) -> None:
        """Removes the new files if the index does not name them, which could not be written then."""
        if self.index is not None:
            named = _indexed_files(self.index)
            remove(file.path for file in files if file.path not in named)


def _plan(
    path: Any, tree: Any, names: Names, max_file_bytes: float | str, metadata: Mapping[str, str] | None, title: str
) -> _Plan:
    caller = title.partition(":")[0]
    target = local_path(path, caller)
    pairs = metadata.items() if isinstance(metadata, Mapping) else [(metadata,)]
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
    leaves, findings = saved_leaves(tree, caller, _unsupported)
    named = _named(leaves, names, caller)
    findings += [*_unknown(names, tree), *_repeated(named)]
    refuse_to_save(title, findings)
    if not named:
        raise CheckpointError(f"{title} cannot be saved: the tree has neither an array nor a Python number")
    kept = [leaf for leaf, _ in named]
    groups = [list(range(len(kept)))] if index is None else _groups(kept, most_bytes)
    return _Plan(folder, stem, index, kept, [name for _, name in named], groups, metadata)


def _unsupported(dtype: np.dtype) -> str:
    return "" if dtype in _DTYPE_NAMES else f"it is {dtype}, which safetensors cannot hold"


def _named(leaves: Sequence[SavedLeaf], names: Names, caller: str) -> list[tuple[SavedLeaf, str]]:
    """Returns the leaves to save, each with the name of its tensor."""
    table = names if isinstance(names, Mapping) else {}
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ConfigTypeError(f"{caller}: names must be a table or a function from paths to names; got {names!r:.80}")
    result: list[tuple[SavedLeaf, str]] = []
    for leaf in leaves:
        default = leaf.path.replace("/", ".")
        name: Any = names(leaf.path) if callable(names) else table.get(leaf.path, default)
        if not isinstance(name, str | None):
            raise ConfigTypeError(f"{caller}: names must give a string or None for {leaf.path!r}, got {name!r:.60}")
        if name is not None:
            result.append((leaf, name))
    return result


def _unknown(names: Names, tree: Any) -> Iterator[Finding]:
    """Yields a finding for each key of a table of names that is not a path."""
    paths = dict.fromkeys(leaf_paths(tree)) if isinstance(names, Mapping) else {}
    for path in names if isinstance(names, Mapping) else ():
        if path not in paths:
            why = f"`names` has this path, and the tree has no such leaf{suggest(str(path), paths)}"
            yield Finding("error", "no-leaf", why, str(path), "Write paths as sr.leaf_paths(tree) does")


def _repeated(named: Sequence[tuple[SavedLeaf, str]]) -> Iterator[Finding]:
    paths: dict[str, list[str]] = {}
    for leaf, name in named:
        paths.setdefault(name, []).append(leaf.path)
    for name, same in paths.items():
        why = f"{name!r} is also the name of {', '.join(same[:-1])}" if len(same) > 1 else _reserved(name)
        if why:
            yield Finding("error", "name", why, same[-1], "Give it another name: names={path: name}")


def _reserved(name: str) -> str:
    """Returns why a tensor cannot have a name, or nothing."""
    if name == "__metadata__":
        return f"{name!r} is reserved"
    return "" if is_unicode(name) else f"{name!r} is not valid Unicode"


def _groups(leaves: Sequence[SavedLeaf], most_bytes: int) -> list[list[int]]:
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
    """Returns the files beside an index that it names; none where there is no index."""
    try:
        with open_regular(index) as file:
            names = read_json(file.read())["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []
    return [index.parent / name for name in dict.fromkeys(names) if isinstance(name, str) and name == Path(name).name]
