"""The models of the planning benchmark: whole train steps as shapes, and what experts would do with each.

`MODELS[name].build(devices, smoke)` gives `(step, (state, batch))`; `step(state, batch)` returns `(state, loss)`. The
model carries no constraint but inside `constrained(mesh, expert)`.
"""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from plan_models.experts import Expert, Splits, constrained, megatron, plain, vocabularies
from plan_models.mixture import experts as mixture_experts
from plan_models.mixture import mixture
from plan_models.recurrent import lstm, lstm_experts
from plan_models.text import (
    ENCODER_DECODER_SPLITS,
    GPT_SPLITS,
    LLAMA_SPLITS,
    encoder_decoder,
    gpt2,
    llama,
)
from plan_models.vision import VIT_SPLITS, conv_experts, conv_net, vit

__all__ = ["MODELS", "Expert", "Model", "constrained"]


@final
@attrs.frozen
class Model:
    """A train step and its experts.

    **Arguments:**

    - `name`: what it is called.
    - `build`: from a number of devices, and whether a toy is wanted, to `(step, (state, batch))` of shapes.
    - `experts`: the plans that are written by hand, for all meshes; `Expert.suits` tells which are for one.
    """

    name: str
    build: Callable[[int, bool], tuple[Callable[[Any, Any], Any], tuple[Any, Any]]]
    experts: tuple[Expert, ...]

    def arrays(self, seed: int, devices: int = 8) -> tuple[Any, Any]:
        """Returns small random arrays that the step of the toy takes; moments are zero."""
        _, args = self.build(devices, True)
        random = np.random.default_rng(seed)

        def made(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            text = jtu.keystr(path, simple=True, separator="/")
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                values = random.integers(0, 8 if leaf.ndim else 1, leaf.shape)
            elif "/mu" in text or "/nu" in text:
                values = np.zeros(leaf.shape)
            else:
                values = random.normal(size=leaf.shape) / 4
            return jnp.asarray(np.asarray(values, leaf.dtype))

        return jtu.tree_map_with_path(made, args)


POSITIONS = "positions$"
"""Small, and added to what is split otherwise."""

LAYERS = "layers/"
"""What is stacked for a scan."""


def transformer(splits: Splits, *, tied: bool = False, **shared: Any) -> tuple[Expert, ...]:
    """Returns the plans for a transformer that reads or writes text."""
    return (
        *plain(splits, **shared),
        *vocabularies(splits, tied=tied, **shared),
        *megatron(splits, sequence=True, **shared),
    )


MODELS: dict[str, Model] = {
    one.name: one
    for one in (
        Model("gpt2", gpt2, transformer(GPT_SPLITS, tied=True, kept=POSITIONS)),
        Model("llama", llama, transformer(LLAMA_SPLITS, stacked=LAYERS)),
        Model("mixture", mixture, mixture_experts()),
        Model("vit", vit, (*plain(VIT_SPLITS, kept=POSITIONS), *megatron(VIT_SPLITS, sequence=False, kept=POSITIONS))),
        Model("encoder_decoder", encoder_decoder, transformer(ENCODER_DECODER_SPLITS, kept=POSITIONS)),
        Model("conv_net", conv_net, conv_experts()),
        Model("lstm", lstm, lstm_experts()),
    )
}
