"""`tensor_names`: which tensor of a checkpoint a path of a model means."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardrules as sr
from shardrules.presets import huggingface


def names_of(folder: Path, *tensors: str, **rename: Any) -> Any:
    file = folder / "x.safetensors"
    safetensors.numpy.save_file({name: np.zeros(1, np.float32) for name in tensors}, file)
    return huggingface.tensor_names(file, **rename)


LAYERS = tuple(f"model.layers.{index}.self_attn.q_proj.weight" for index in range(11))


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "transformer."])
def test_what_is_in_front_of_names_may_be_left_out(tmp_path: Path, prefix: str) -> None:
    vision = "vision_tower.vision_model.layers.0.w"
    names = names_of(tmp_path, f"{prefix}layers.0.w", f"{prefix}norm.weight", vision)
    assert names("layers/0/w") == f"{prefix}layers.0.w"
    assert names("norm/weight") == f"{prefix}norm.weight"
    assert names(vision.replace(".", "/")) == vision


def test_a_path_without_indices_is_a_stack(tmp_path: Path) -> None:
    names = names_of(tmp_path, *LAYERS)
    assert names("layers/10/self_attn/q_proj/weight") == LAYERS[10]
    assert names("layers/self_attn/q_proj/weight") == LAYERS


def test_experts_are_stacks_within_stacks(tmp_path: Path) -> None:
    names = names_of(
        tmp_path, *(f"model.layers.{i}.mlp.experts.{j}.up_proj.weight" for i in range(3) for j in range(2))
    )
    expected = tuple(tuple(f"model.layers.{i}.mlp.experts.{j}.up_proj.weight" for j in range(2)) for i in range(3))
    assert names("layers/mlp/experts/up_proj/weight") == expected
    assert names("layers/1/mlp/experts/up_proj/weight") == expected[1]


def test_a_layer_that_lacks_the_tensor_gives_no_stack(tmp_path: Path) -> None:
    names = names_of(tmp_path, "layers.0.mlp.w", "layers.1.experts.w", "layers.1.norm", "layers.0.norm")
    assert names("layers/mlp/w") == "layers.mlp.w"
    assert names("layers/norm") == ("layers.0.norm", "layers.1.norm")


def test_a_missing_head_is_tied(tmp_path: Path) -> None:
    assert names_of(tmp_path, "model.embed_tokens.weight")("lm_head/weight") == "model.embed_tokens.weight"
    assert names_of(tmp_path, "model.embed_tokens.weight", "lm_head.weight")("lm_head/weight") == "lm_head.weight"


@pytest.mark.parametrize(
    ("rename", "path"),
    [
        ({"attention": "self_attn", "wq": "q_proj"}, "layers/3/attention/wq/weight"),
        ({"attention/wq": "self_attn.q_proj"}, "layers/3/attention/wq/weight"),
        ({"blocks": "layers", "q": "self_attn/q_proj"}, "blocks/3/q/weight"),
        ({"kernel": "weight"}, "layers/3/self_attn/q_proj/kernel"),
    ],
)
def test_words_of_the_model_are_renamed(tmp_path: Path, rename: dict[str, str], path: str) -> None:
    assert names_of(tmp_path, *LAYERS, rename=rename)(path) == LAYERS[3]


def test_words_are_renamed_as_a_whole(tmp_path: Path) -> None:
    names = names_of(tmp_path, "layers.0.wq", "layers.0.wqx", rename={"wq": "gone"})
    assert names("layers/0/wqx") == "layers.0.wqx"
    assert names("layers/0/wq") == "layers.0.gone"


def test_what_the_checkpoint_lacks_keeps_its_path(tmp_path: Path) -> None:
    assert names_of(tmp_path, *LAYERS, "a..b")("layers/0/mystery/weight") == "layers.0.mystery.weight"


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sr.errors.CheckpointError, match=r"tensor_names: .*gone cannot be loaded.*\n.*No such file"):
        huggingface.tensor_names(tmp_path / "gone")
