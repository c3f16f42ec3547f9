"""Checkpoints in safetensors of which nothing is there but the headers."""

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
    """Returns the experts of a layer in FP8: dtypes and shapes by name."""
    return {
        f"model.layers.{layer}.mlp.experts.{one}.{name}.weight": ("F8_E4M3", shape)
        for one in range(count)
        for name, shape in EXPERT.items()
    }


def write_headers(folder: Path, tensors: dict[str, tuple[str, list[int]]], files: int) -> Path:
    """Writes so many files and their index, which is returned; nothing of what the headers speak of."""
    names = list(tensors)
    per = -(-len(names) // files)
    index: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number:05}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for name in names[number * per : (number + 1) * per]:
            dtype, shape = tensors[name]
            after = at + SIZES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, after]}
            index[name] = file
            at = after
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    listed = folder / "model.safetensors.index.json"
    listed.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return listed
