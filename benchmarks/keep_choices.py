"""Does `keep_choices` find what experts keep for the backward pass, and better?

**Method.** The gradients of five losses (`keep_models/`) are compiled for one H100, which need not be present: as
experts write them, with `jax.checkpoint` around each layer (without a policy, with the policies of JAX for dots, and
with policies that save the names which the layers give), and as `keep_choices` changes the loss without any
checkpoint. Figures come from the compiled programs: the time of a step by our model of the compiled program's kernels,
and the compiler's peak of memory. There are three budgets: the peak without any checkpoint, the least peak of any
expert, and the mean of the two. For each, the fastest choice that fits is divided by the fastest expert that fits. No
choice is changed by what the compiler says: each model's are made once.

**Last answer.** 2026-11-23, 2 cores of an AMD EPYC, JAX 0.10.2, 10 experts and up to 12 choices for each model. The
best choice takes 0.953 to 1.000 times as long as the best expert in all 15 cases: 0.958 to 0.981 for a GPT with
scanned layers, 0.972 to 1.000 for a Llama and 0.986 to 1.000 for a residual net that are written out, 0.953 to 0.974
for a mixture of experts, 0.967 to 0.996 for an encoder and a decoder. What loops keep is copied: without any
checkpoint the GPT takes 63.9 ms and 16.3 GiB, with the fastest choice 49.7 ms and 7.2 GiB.

Run it as `python benchmarks/keep_choices.py`; `--cache DIR` keeps compiled programs. It needs the extra `cuda`.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.tree_util as jtu
from jax.extend.core import jaxpr_as_fun
from keep_models import MODELS, NAMES, Layer
from plan_models.compiled import Cache

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.schedule import play_schedule
from shardrules.programs.training.keep.apply import with_kept
from shardrules.programs.training.keep.choices import keep_choices

WORST_LIMIT = 1.00
"""The most that the best choice within a budget may take, over the best expert's, apart from the order of sums."""

COUNT, TOY_COUNT = 12, 3
"""How many choices are compiled, and how many choices and experts in a smoke run."""


def experts() -> dict[str, Callable[[Layer], Layer]]:
    """Returns what experts do with the function of a layer."""
    policies = jax.checkpoint_policies
    by_name = [names for count in (1, 2, 3, 4) for names in _name_lists(count)]
    named = {
        "no checkpoint": None,
        "checkpoint per layer": policies.nothing_saveable,
        "everything_saveable": policies.everything_saveable,
        "dots_saveable": policies.dots_saveable,
        "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
        **{f"names {' '.join(names)}": policies.save_only_these_names(*names) for names in by_name},
    }

    def wrap(policy: Any) -> Callable[[Layer], Layer]:
        return lambda layer: layer if policy is None else jax.checkpoint(layer, policy=policy)

    return {name: wrap(policy) for name, policy in named.items()}


def _name_lists(count: int) -> list[tuple[str, ...]]:
    """The lists of names that experts save, of some length: what is dearest for its bytes first."""
    lists = {1: [("context",)], 2: [("qkv", "context"), ("context", "hidden")], 3: [("qkv", "context", "hidden")]}
    return lists.get(count, [NAMES])


@attrs.frozen
class Row:
    """The figures of one compiled gradient."""

    name: str
    ms: float
    peak_bytes: int
    flops: float
    text: str = ""


@attrs.frozen(eq=False)
class Question:
    """A model to compile for one device."""

    model: str
    smoke: bool
    cache: Cache

    @property
    def target(self) -> sr.Target:
        """What is compiled for."""
        return sr.Target.parse("cpu:1" if self.smoke else "cuda:h100:1")

    def row(self, name: str, loss: Callable[..., Any], args: Sequence[Any], text: str = "") -> Row:
        """Compiles the gradient of a loss of arrays with respect to the first of `args`."""
        mesh = self.target.mesh(sr.mesh_shape("data:1"))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tuple(args))
        lowered = jax.jit(jax.value_and_grad(loss)).lower(*placed)
        compilation = self.cache.compilation(lowered, str(self.target))
        program = read_program(compilation.text)
        kernels = find_kernels(program, find_matmuls(program))
        collectives = tuple(find_collectives(program, mesh, self.target))
        seconds = play_schedule(program, collectives, kernels, self.target.hardware).time.seconds
        flops = sum(kernel.total_flops for kernel in kernels)
        row = Row(name, 1e3 * seconds, compilation.memory.peak_bytes, flops, text)
        print(f"{self.model:16} {row.ms:9.3f} ms {row.peak_bytes / 2**30:7.2f} GiB  {name}", file=sys.stderr)
        return row

    def expert_rows(self) -> list[Row]:
        """Compiles what experts write. Two that compile to the same are listed as two."""
        rows = []
        for name, wrap in list(experts().items())[: TOY_COUNT if self.smoke else None]:
            loss, params, batch = MODELS[self.model](wrap, self.smoke)
            rows.append(self.row(name, loss, (params, batch)))
        return rows

    def choice_rows(self) -> list[Row]:
        """Compiles the choices for the loss without any checkpoint."""
        loss, params, batch = MODELS[self.model](lambda layer: layer, self.smoke)
        program = jax.make_jaxpr(loss)(params, batch)
        leaves, structure = jtu.tree_flatten(params)
        choices = keep_choices(
            program,
            sr.Hardware.named("cuda:h100"),
            trainable_count=len(leaves),
            offload=False,
            count=TOY_COUNT if self.smoke else COUNT,
        )
        rows = []
        for index, keep in enumerate(choices):
            run = jaxpr_as_fun(with_kept(program, keep))

            def kept_loss(params: Any, batch: Any, run: Any = run) -> Any:
                return run(*structure.flatten_up_to(params), *jtu.tree_leaves(batch))[0]

            rows.append(self.row(f"choice {index}", kept_loss, (params, batch), str(keep)))
        return rows


def answer(model: str, by_hand: Sequence[Row], chosen: Sequence[Row]) -> dict[str, Any]:
    """Compares the best expert and the best choice within each budget."""
    most = by_hand[0].peak_bytes  # without any checkpoint
    least = min(row.peak_bytes for row in by_hand)
    budgets = []
    for limit in (most, (most + least) // 2, least):
        expert, choice = (
            min((row for row in rows if row.peak_bytes <= limit), key=lambda row: row.ms, default=None)
            for rows in (by_hand, chosen)
        )
        assert expert is not None, "each budget is at least the least peak"
        budgets.append(
            {
                "limit_bytes": limit,
                "expert": expert.name,
                "expert_ms": expert.ms,
                "choice": None if choice is None else choice.name,
                "ms": math.inf if choice is None else choice.ms,
                "ratio": math.inf if choice is None else choice.ms / expert.ms,
                "text": "" if choice is None else str(choice),
            }
        )
    rows = {"experts": [attrs.asdict(row) for row in by_hand], "choices": [attrs.asdict(row) for row in chosen]}
    return {"model": model, "budgets": budgets, **rows}


def table(answers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the answers for people."""
    lines = [f"{'model':16} {'budget':>10} {'expert':>10} {'choice':>10} {'ratio':>6}  best expert, choice"]
    for each in answers:
        for budget in each["budgets"]:
            limit = f"{budget['limit_bytes'] / 2**30:.2f} GiB"
            times = f"{budget['expert_ms']:7.2f} ms {budget['ms']:7.2f} ms {budget['ratio']:6.3f}"
            lines.append(
                f"{each['model']:16} {limit:>10} {times}  {budget['expert']}; {budget['choice']}: {budget['text']}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--smoke", action="store_true", help="toy models, compiled for a CPU")
    parser.add_argument("--cache", type=Path, help="a folder for compiled programs")
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    options = parser.parse_args(arguments)
    answers = []
    for model in options.models:
        question = Question(model, options.smoke, Cache(options.cache))
        answers.append(answer(model, question.expert_rows(), question.choice_rows()))
    print(json.dumps(answers) if options.json else table(answers))
    worst = max(budget["ratio"] for each in answers for budget in each["budgets"])
    return int(not options.smoke and round(worst, 9) > WORST_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
