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

from plan_models.convs import GAN_SPLITS, NEXT_SPLITS, POOLED_SPLITS, depthwise_net, gradient_penalty, pooled_net
from plan_models.experts import Expert, Splits, expert_constraints, megatron, plain, published, vocabularies
from plan_models.fields import OPERATOR_SPLITS, RAYS_SPLITS, fourier_operator, nerf
from plan_models.flows import FLOW_LAYERS, flow
from plan_models.images import CODES_SPLITS, TIED_SPLITS, tied_autoencoder, vq_vae
from plan_models.kinds import (
    CACHE_SPLITS,
    LORA_SPLITS,
    MAMBA_SPLITS,
    SORTED_SPLITS,
    T5_SPLITS,
    UNET_SPLITS,
    accumulation,
    decode,
    evaluation,
    grouped_queries,
    low_rank,
    prefill,
    relative_positions,
    sorted_experts,
    state_space,
    switch_experts,
    unet,
)
from plan_models.learning import (
    ADAFACTOR_SPLITS,
    ALIBI_SPLITS,
    POLICY_SPLITS,
    SAMPLER_SPLITS,
    adafactor_decoder,
    alibi_decoder,
    distillation,
    proximal_policy,
    sampler,
)
from plan_models.libraries import (
    CONFORMER_SPLITS,
    MIXER_SPLITS,
    NNX_SPLITS,
    mixer,
    nnx_decoder,
    speech_encoder,
)
from plan_models.mixture import SPLITS as MIXTURE_SPLITS
from plan_models.mixture import experts as mixture_experts
from plan_models.mixture import mixture
from plan_models.modules import BATCH_NORM_SPLITS, GRU_SPLITS, ODE_SPLITS, batch_norm, gru, neural_ode
from plan_models.pairs import CLIP_SPLITS, TABLE_SPLITS, image_text_pairs, preferences, recommendations
from plan_models.patches import DIT_SPLITS, MAE_SPLITS, diffusion_transformer, masked_autoencoder
from plan_models.physics import BURGERS_SPLITS, GRAPH_SPLITS, graph_net, physics_informed
from plan_models.recurrent import lstm, lstm_experts
from plan_models.sequences import (
    GLA_SPLITS,
    HYBRID_SPLITS,
    HYENA_SPLITS,
    LRU_SPLITS,
    linear_attention,
    linear_recurrence,
    long_convolution,
    mamba_experts,
)
from plan_models.text import (
    ENCODER_DECODER_SPLITS,
    GPT_SPLITS,
    LLAMA_SPLITS,
    encoder_decoder,
    gpt2,
    llama,
)
from plan_models.vision import VIT_SPLITS, conv_experts, conv_net, vit
from plan_models.windows import SWIN_SPLITS, window_attention

__all__ = ["KINDS", "MODELS", "MORE", "Expert", "Model", "expert_constraints"]


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
    """The argument that the step may write over: the first result replaces the state, all of them another one."""

    def result_shardings(self, shardings: tuple[Any, Any]) -> Any:
        """The shardings of the results: an argument that they replace has its own; `None` leaves them to compilers."""
        if not self.donated:
            return None
        (index,) = self.donated
        return (shardings[0], None) if index == 0 else shardings[index]

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


SERVING: Splits = (*LLAMA_SPLITS, *CACHE_SPLITS)

KINDS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("grouped_queries", grouped_queries, published(LLAMA_SPLITS, tensor=True, sequence=True, vocab=True)),
        Model("sorted_experts", sorted_experts, published(SORTED_SPLITS, tensor=True, vocab=True)),
        Model("switch_experts", switch_experts, published(MIXTURE_SPLITS, vocab=True, experts=True)),
        Model("relative_positions", relative_positions, published(T5_SPLITS, tensor=True, vocab=True)),
        Model("unet", unet, published(UNET_SPLITS, tensor=True)),
        Model("state_space", state_space, published(MAMBA_SPLITS, tensor=True, vocab=True)),
        Model(
            "low_rank",
            low_rank,
            published(LORA_SPLITS, tensor=True, sequence=True, vocab=True, stacked=LAYERS, frozen="^frozen/"),
        ),
        Model("prefill", prefill, published(SERVING, tensor=True, serving=True, stacked=LAYERS), ()),
        Model("decode", decode, published(SERVING, tensor=True, serving=True, stacked=LAYERS), (1,)),
        Model("recommendations", recommendations, published(TABLE_SPLITS, tensor=True, vocab=True, columns=True)),
        Model("accumulation", accumulation, published(LLAMA_SPLITS, tensor=True, vocab=True, stacked=LAYERS)),
        Model("gru", gru, published(GRU_SPLITS, vocab=True, columns=True)),
        Model("neural_ode", neural_ode, published(ODE_SPLITS, tensor=True)),
        Model("batch_norm", batch_norm, published(BATCH_NORM_SPLITS, tensor=True)),
        Model(
            "preferences",
            preferences,
            published(LLAMA_SPLITS, tensor=True, vocab=True, stacked=LAYERS, frozen="^reference/"),
        ),
        Model("image_text_pairs", image_text_pairs, published(CLIP_SPLITS, tensor=True)),
    )
}
"""Sixteen more kinds of steps, with a few plans of experts each."""

MORE: dict[str, Model] = {
    model.name: model
    for model in (
        Model("tied_autoencoder", tied_autoencoder, published(TIED_SPLITS, tensor=True)),
        Model("physics_informed", physics_informed, published(BURGERS_SPLITS, tensor=True)),
        Model("graph_net", graph_net, published(GRAPH_SPLITS, tensor=True)),
        Model("vq_vae", vq_vae, published(CODES_SPLITS, tensor=True)),
        Model("nerf", nerf, published(RAYS_SPLITS, tensor=True)),
        Model("diffusion_transformer", diffusion_transformer, published(DIT_SPLITS, tensor=True)),
        Model("masked_autoencoder", masked_autoencoder, published(MAE_SPLITS, tensor=True, stacked=LAYERS)),
        Model("linear_recurrence", linear_recurrence, published(LRU_SPLITS, tensor=True)),
        Model("mamba_experts", mamba_experts, published(HYBRID_SPLITS, tensor=True, vocab=True, experts=True)),
        Model("long_convolution", long_convolution, published(HYENA_SPLITS, tensor=True)),
        Model(
            "linear_attention",
            linear_attention,
            published(GLA_SPLITS, tensor=True, sequence=True, vocab=True, stacked=LAYERS),
        ),
        Model("alibi_decoder", alibi_decoder, published(ALIBI_SPLITS, tensor=True, vocab=True, stacked=LAYERS)),
        Model(
            "distillation",
            distillation,
            published(LLAMA_SPLITS, tensor=True, vocab=True, stacked=LAYERS, frozen="^frozen/"),
        ),
        Model("proximal_policy", proximal_policy, published(POLICY_SPLITS, tensor=True)),
        Model("sampler", sampler, published(SAMPLER_SPLITS, tensor=True, serving=True), (1,)),
        Model("speech_encoder", speech_encoder, published(CONFORMER_SPLITS, tensor=True)),
        Model("nnx_decoder", nnx_decoder, published(NNX_SPLITS, tensor=True, vocab=True, unsplit="positions/")),
        Model("mixer", mixer, published(MIXER_SPLITS, tensor=True)),
        Model("adafactor_decoder", adafactor_decoder, published(ADAFACTOR_SPLITS, tensor=True, unsplit=POSITIONS)),
        Model("fourier_operator", fourier_operator, published(OPERATOR_SPLITS, tensor=True)),
        Model("gradient_penalty", gradient_penalty, published(GAN_SPLITS, tensor=True)),
        Model("pooled_net", pooled_net, published(POOLED_SPLITS, tensor=True)),
        Model("window_attention", window_attention, published(SWIN_SPLITS, tensor=True)),
        Model("depthwise_net", depthwise_net, published(NEXT_SPLITS, tensor=True)),
        Model("evaluation", evaluation, published(SERVING, tensor=True, serving=True, stacked=LAYERS), ()),
        Model("flow", flow, published(stacked=FLOW_LAYERS)),
    )
}
"""More kinds, on which no figure of the planner was chosen."""
