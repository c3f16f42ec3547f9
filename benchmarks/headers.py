"""Safetensors checkpoints that consist of nothing but headers."""

import json
import math
import struct
from pathlib import Path
from typing import Any

SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
EXPERT = {"gate_proj": [2048, 7168], "up_proj": [2048, 7168], "down_proj": [7168, 2048]}

MIXTURE_RULES = """\
[[rules]]
path = "experts"
spec = [["data", "model"], "-"]

[[rules]]
rule = "shard_dim('model', 0)|fsdp('data')"
"""


def experts(layer: int, count: int) -> dict[str, tuple[str, list[int]]]:
    """The experts of a layer in FP8: dtypes and shapes by name."""
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": ("F8_E4M3", shape)
        for expert in range(count)
        for name, shape in EXPERT.items()
    }


def write_headers(folder: Path, tensors: dict[str, tuple[str, list[int]]], files: int) -> Path:
    """Writes the headers of `tensors` to `files` files without any data, and their index, whose path is returned."""
    names = list(tensors)
    per_file = -(-len(names) // files)
    index: dict[str, str] = {}
    for file_index in range(files):
        file = f"model-{file_index:05}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for name in names[file_index * per_file : (file_index + 1) * per_file]:
            dtype, shape = tensors[name]
            end = offset + SIZES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            index[name] = file
            offset = end
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index_file
