"""Loads a checkpoint with the names of Hugging Face into a Llama in Equinox, split over 8 virtual CPU devices.

The checkpoint is made on the spot, at toy size: the published names, several files and an index. Each device reads its
part of each tensor, and weights need no transposing: in both they are (out, in). Then the same checkpoint is loaded
into layers that are stacked for `jax.lax.scan`, and both give the logits of the model on one device.
"""

import json
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array

import shardrules as sr
from shardrules.presets import huggingface

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, LAYERS, LENGTH = 256, 64, 160, 8, 2, 4, 16
HEAD = WIDTH // HEADS


class Attention(eqx.Module):
    """Causal attention of grouped queries, with rotary positions."""

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        q, k, v, o = jax.random.split(key, 4)
        self.q_proj = eqx.nn.Linear(WIDTH, HEADS * HEAD, use_bias=False, key=q)
        self.k_proj = eqx.nn.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, key=k)
        self.v_proj = eqx.nn.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, key=v)
        self.o_proj = eqx.nn.Linear(HEADS * HEAD, WIDTH, use_bias=False, key=o)

    def __call__(self, x: Array) -> Array:
        q = rotate(jax.vmap(self.q_proj)(x).reshape(-1, HEADS, HEAD))
        k = rotate(jax.vmap(self.k_proj)(x).reshape(-1, KV_HEADS, HEAD))
        v = jax.vmap(self.v_proj)(x).reshape(-1, KV_HEADS, HEAD)
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.vmap(self.o_proj)(heads.reshape(-1, HEADS * HEAD))


def rotate(x: Array) -> Array:
    """Turns each pair of a head's two halves by an angle that grows with the position."""
    angles = jnp.outer(jnp.arange(len(x)), 500_000.0 ** -jnp.linspace(0, 1, HEAD // 2, endpoint=False))[:, None]
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class SwiGLU(eqx.Module):
    """The gated MLP of Llama."""

    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = eqx.nn.Linear(WIDTH, INNER, use_bias=False, key=gate)
        self.up_proj = eqx.nn.Linear(WIDTH, INNER, use_bias=False, key=up)
        self.down_proj = eqx.nn.Linear(INNER, WIDTH, use_bias=False, key=down)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(eqx.Module):
    """Attention and an MLP, each after a norm and beside a residual. `attention` is this model's own word."""

    input_layernorm: eqx.nn.RMSNorm
    attention: Attention
    post_attention_layernorm: eqx.nn.RMSNorm
    mlp: SwiGLU

    def __init__(self, key: Array) -> None:
        attention, mlp = jax.random.split(key)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.attention, self.mlp = Attention(attention), SwiGLU(mlp)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(jax.vmap(self.input_layernorm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.post_attention_layernorm)(x))


def norm() -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(WIDTH, use_bias=False)


class Llama(eqx.Module):
    """A Llama, with a list of layers or with stacked ones."""

    embed_tokens: eqx.nn.Embedding
    layers: list[Layer] | Layer
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, stacked: bool, key: Array) -> None:
        embedding, layers, head = jax.random.split(key, 3)
        keys = jax.random.split(layers, LAYERS)
        self.embed_tokens = eqx.nn.Embedding(VOCAB, WIDTH, key=embedding)
        self.layers = eqx.filter_vmap(Layer)(keys) if stacked else [Layer(key) for key in keys]
        self.norm, self.lm_head = norm(), eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=head)

    def __call__(self, tokens: Array) -> Array:
        x = jax.vmap(self.embed_tokens)(tokens)
        if isinstance(self.layers, list):
            for layer in self.layers:
                x = layer(x)
        else:
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, rest)(x), None), x, arrays)
        return jax.vmap(self.lm_head)(jax.vmap(self.norm)(x))


def save_checkpoint(folder: Path) -> None:
    """Writes random weights as published checkpoints are: names, shapes (out, in), three files, and an index."""
    sizes = {"q_proj": (HEADS * HEAD, WIDTH), "k_proj": (KV_HEADS * HEAD, WIDTH), "v_proj": (KV_HEADS * HEAD, WIDTH)}
    layer = {f"self_attn.{name}": shape for name, shape in sizes.items()} | {
        "self_attn.o_proj": (WIDTH, HEADS * HEAD),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    shapes = {f"model.layers.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()}
    shapes |= {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    rng = np.random.default_rng(0)
    files = [f"model-{index:05}-of-00003.safetensors" for index in (1, 2, 3)]
    weight_map = {name: files[index * len(files) // len(shapes)] for index, name in enumerate(shapes)}
    for file in files:
        names = [name for name in shapes if weight_map[name] == file]
        tensors = {name: 0.2 * rng.standard_normal(shapes[name]).astype(np.float32) for name in names}
        safetensors.numpy.save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sr.create_mesh("data:4,model:2")
    rules = huggingface.HuggingFaceShardingRule(head_dim=HEAD)
    key, tokens = jax.random.key(0), jnp.arange(LENGTH) * 31 % VOCAB

    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        names = huggingface.tensor_names(folder, {"attention": "self_attn"})
        like = eqx.filter_eval_shape(Llama, stacked=False, key=key)
        print(rules.plan(like, mesh).check())
        whole = sr.load_safetensors(folder, like, jax.devices()[0], names=names)
        split = sr.load_safetensors(folder, like, rules, mesh, names=names)
        stacked_like = eqx.filter_eval_shape(Llama, stacked=True, key=key)
        stacked = sr.load_safetensors(folder, stacked_like, rules, mesh, names=names)

    logits = eqx.filter_jit(whole)(tokens)
    print(f"\nlogits {logits.shape}, standard deviation {logits.std():.2f}")
    for name, model in (("split", split), ("split and stacked", stacked)):
        difference = jnp.abs(sr.filter_gather(eqx.filter_jit(model)(tokens)) - np.asarray(logits)).max()
        weight = model.layers.mlp.up_proj.weight if name != "split" else model.layers[0].mlp.up_proj.weight
        print(f"{name}: up_proj {weight.shape} as {weight.sharding.spec}, logits differ by at most {difference:.0e}")
        assert difference < 1e-4 * logits.std()


if __name__ == "__main__":
    main()
