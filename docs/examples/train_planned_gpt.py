"""Trains the character-level GPT of `train_gpt.py` with one call for its set-up: no mesh, no rules, no constraints.

`plan_training` decides the mesh, where everything is, and how the gradient is computed, for the devices that are here.
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from train_gpt import BATCH, CONTEXT, GPT, documentation, loss_of, show

import shardrules as sr


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a character-level GPT as planned, on 8 virtual CPU devices.")
    parser.add_argument("--steps", type=int, default=300, help="how many")
    parser.add_argument("--smoke", action="store_true", help="30 steps, to see that it runs")
    steps = 30 if (args := parser.parse_args()).smoke else args.steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    text, rng = documentation(), np.random.default_rng(0)

    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps, 4e-4))
    shapes = eqx.filter_eval_shape(GPT, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), np.uint8)
    plan = sr.plan_training(loss_of, shapes, optimizer, batch, cluster=jax.devices())
    print(plan)

    model, state = plan.init(GPT)(jax.random.key(0))
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - CONTEXT, (BATCH, 1))
        model, state, loss, _ = plan.step(model, state, text[starts + np.arange(CONTEXT + 1)])
        show(step, 0, steps, f"loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
