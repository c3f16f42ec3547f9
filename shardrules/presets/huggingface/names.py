"""`tensor_names`: from the paths of a model to the names in a checkpoint."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardrules.checkpoints.headers import read_headers
from shardrules.checkpoints.leaves import refuse
from shardrules.checkpoints.names import Name
from shardrules.core.storage.files import as_path

_PREFIXES = (
    *("", "model", "language_model.model", "model.language_model", "language_model", "model.text_model"),
    *("transformer", "gpt_neox", "backbone", "model.decoder"),
)
"""Prefixes of a text model's names in checkpoints."""

_HEAD, _EMBEDDING = "lm_head", "embed_tokens"


def tensor_names(path: Any, rename: Mapping[str, str] | None = None) -> Callable[[str], Name]:
    """Returns the function from a model's paths to the names in a checkpoint, for `load_safetensors(names=...)`.

    `path` is a file, an index or a folder; its headers are read. A model may lack what checkpoints have in front of all
    names (`model.`, `language_model.model.`). A path without the index of a layer or an expert,
    `layers/mlp/up_proj/weight`, is the stack of all of them. A head that the file lacks is tied: it is the embedding.
    `rename` has the model's words for names of the checkpoint, `{"attention": "self_attn", "wq": "q_proj"}`; a word may
    also be several names, `"mlp/up"`. What the checkpoint lacks keeps its path, with dots.

    ```python
    import safetensors.numpy
    from shardrules.presets import huggingface

    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": np.ones((4, 4), np.float32) for i in range(2)}
    safetensors.numpy.save_file(tensors, "llama.safetensors")
    names = huggingface.tensor_names("llama.safetensors", {"attention": "self_attn", "wq": "q_proj"})
    assert names("layers/1/attention/wq/weight") == "model.layers.1.self_attn.q_proj.weight"
    assert names("layers/attention/wq/weight") == tuple(tensors)
    ```
    """
    headers = read_headers(as_path(path, "tensor_names"))
    refuse(f"tensor_names: {path}", headers.problems)
    return name_finder(headers.stored, rename)


def name_finder(stored: Iterable[str], rename: Mapping[str, str] | None = None) -> Callable[[str], Name]:
    """Returns what `tensor_names` does for a checkpoint with these names."""
    tree: dict[str, Any] = {}
    for name in stored:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
        node["."] = name  # which is no part of a name
    words = [(re.compile(rf"(?<![^/.]){re.escape(old)}(?![^/.])"), new) for old, new in (rename or {}).items()]

    def name_of(leaf_path: str) -> Name:
        renamed = leaf_path
        # Each word sees the result of those before it. A backslash in a name would otherwise refer to a group.
        for word, name in words:
            renamed = word.sub(name.replace("\\", r"\\"), renamed)
        parts = re.split(r"[./]", renamed)
        tied = [_EMBEDDING if part == _HEAD else part for part in parts]
        # A head of its own comes first: only a file without one has it tied to the embedding.
        for candidate in (parts, tied):
            for prefix in _PREFIXES:
                name = _lookup(tree, [*(prefix.split(".") if prefix else []), *candidate])
                if name is not None:
                    return name
        return ".".join(parts)

    return name_of


def _lookup(node: Mapping[str, Any], parts: Sequence[str]) -> Name:
    """Returns the name at `parts` below a node, or the names where a node of layers is on the way that they lack."""
    if not parts:
        return node.get(".")
    if parts[0] in node:
        return _lookup(node[parts[0]], parts[1:])
    # A node of layers has their indices and nothing else; any other node that lacks the name is a dead end.
    layers = [node[str(index)] for index in range(len(node)) if str(index) in node]
    if not layers or len(layers) < len(node):
        return None
    names = [_lookup(layer, parts) for layer in layers]
    return None if any(name is None for name in names) else tuple(names)
