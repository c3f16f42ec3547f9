"""Shapes from a configuration: those of published checkpoints to the byte, and what is refused."""

from typing import Any

import pytest

import shardrules as sr
from shardrules.presets.huggingface.shapes import checkpoint_shapes
from tests.presets.huggingface.checkpoints import CHECKPOINTS, Checkpoint, config

LLAMA = config("llama", 4096, 14336, 32, 8, 128256)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_totals_are_met_to_the_byte(name: str) -> None:
    checkpoint: Checkpoint = CHECKPOINTS[name]
    shapes = checkpoint_shapes(checkpoint.config, checkpoint.names, checkpoint.total_bytes)
    assert tuple(shapes) == checkpoint.names


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({"model_type": "lama"}, UP, r"shapes of a 'lama' do not follow from it \(did you mean 'llama'\?\)"),
        ({"model_type": None}, UP, "shapes of a None do not follow"),
        ({"intermediate_size": None}, UP, "it has no 'intermediate_size'"),
        ({"hidden_size": "4096"}, UP, "'hidden_size' must be a size, got '4096'"),
        ({"torch_dtype": "int8"}, UP, "its dtype, 'int8', is not one of bfloat16, float16, float32"),
        ({}, "model.layers.0.mystery.weight", r"does not say which shape model\.layers\.0\.mystery\.weight has"),
        ({}, f"{UP}_scale_inv", "quantization_config has no weight_block_size"),
        ({"quantization_config": {"quant_method": "gptq"}}, UP, "tensors quantized by 'gptq' do not follow"),
    ],
)
def test_what_does_not_follow_is_refused(values: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(sr.errors.CheckpointError, match=message):
        checkpoint_shapes(LLAMA | values, [name])


def test_a_configuration_must_be_a_table() -> None:
    with pytest.raises(sr.errors.CheckpointError, match=r"it holds \[\], not a configuration"):
        checkpoint_shapes([], [UP])


@pytest.mark.parametrize("surplus", [-512, -1, 1, 59, 513])
def test_another_total_is_refused(surplus: int) -> None:
    with pytest.raises(sr.errors.CheckpointError, match=r"would take 117,440,512 bytes, and .* 117,44[01],\d+"):
        checkpoint_shapes(LLAMA, [UP], 117440512 + surplus)


def test_a_total_may_be_of_whole_files() -> None:
    assert list(checkpoint_shapes(LLAMA, [UP], 117440512 + 120)) == [UP]
