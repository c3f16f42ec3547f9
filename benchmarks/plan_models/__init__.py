"""The models of the planning benchmark: whole train steps as shapes, and the plans of experts for each.

`MODELS[name].build(devices, smoke)` gives `(step, (state, batch))`; `step(state, batch)` returns `(state, loss)`. The
model has constraints only inside `expert_constraints(mesh, expert)`.
"""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from plan_models.experts import Expert, Splits, expert_constraints, megatron, plain, vocabularies
from plan_models.kinds import KINDS as BUILDS
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

__all__ = ["KINDS", "MODELS", "Expert", "Model", "expert_constraints"]


@final
@attrs.frozen
class Model:
    """A train step and its experts."""

    name: str
    build: Callable[[int, bool], tuple[Callable[..., Any], tuple[Any, ...]]]
    """From a number of devices, and whether to build a toy, to `(step, (state, batch))` of shapes."""

    experts: tuple[Expert, ...]
    """The plans written by hand, for all meshes; `Expert.suits` selects those for one mesh."""

    donated: tuple[int, ...] = (0,)
    """The arguments that the step may write over."""

    def arrays(self, seed: int, devices: int = 8) -> tuple[Any, Any]:
        """Small random arguments for the step of the toy; moments are zero."""
        _, args = self.build(devices, True)
        random = np.random.default_rng(seed)

        def random_leaf(path: Any, leaf: Any) -> Any:
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

        return jtu.tree_map_with_path(random_leaf, args)


POSITIONS = "positions$"
"""Small, and added to activations that are split differently."""

LAYERS = "layers/"
"""Parameters that are stacked for a scan."""


def transformer(splits: Splits, *, tied: bool = False, **shared: Any) -> tuple[Expert, ...]:
    """The plans for a transformer that reads or writes text."""
    return (
        *plain(splits, **shared),
        *vocabularies(splits, tied=tied, **shared),
        *megatron(splits, sequence=True, **shared),
    )


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("gpt2", gpt2, transformer(GPT_SPLITS, tied=True, unsplit=POSITIONS)),
        Model("llama", llama, transformer(LLAMA_SPLITS, stacked=LAYERS)),
        Model("mixture", mixture, mixture_experts()),
        Model(
            "vit",
            vit,
            (*plain(VIT_SPLITS, unsplit=POSITIONS), *megatron(VIT_SPLITS, sequence=False, unsplit=POSITIONS)),
        ),
        Model("encoder_decoder", encoder_decoder, transformer(ENCODER_DECODER_SPLITS, unsplit=POSITIONS)),
        Model("conv_net", conv_net, conv_experts()),
        Model("lstm", lstm, lstm_experts()),
    )
}


def _without_experts(name: str) -> Model:
    """A kind of step as a model for which no expert has written plans."""

    def build(devices: int, smoke: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step = BUILDS[name](devices, smoke)
        return step.run, step.args

    return Model(name, build, (), BUILDS[name](8, True).donated)


KINDS: dict[str, Model] = {name: _without_experts(name) for name in BUILDS}
"""More kinds of steps, to hold predictions against compiled programs."""
