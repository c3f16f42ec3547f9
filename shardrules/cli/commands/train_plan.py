"""`shardrules train-plan`: plans training on a cluster, from a loss."""

import argparse
from pathlib import Path
from typing import Any

from shardrules.cli.command import SUCCESS, Command
from shardrules.cli.errors import UsageError, byte_option
from shardrules.cli.files import check_writable, write
from shardrules.cli.objects import load_object, load_shapes, user_code
from shardrules.cli.optimizers import load_optimizer
from shardrules.cli.rules import load_rules
from shardrules.cli.rules_out import add_rules_out, alternatives, check_rules_out, write_rules
from shardrules.cli.step import read_hardware
from shardrules.cli.terminal import show, working
from shardrules.core.errors import ShardRulesError
from shardrules.core.storage.records import read_json
from shardrules.programs.training.cluster import AXES
from shardrules.programs.training.plan_training import plan_training


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("loss", metavar="LOSS", help="module:function or file.py:function: loss(model, batch)")
    parser.add_argument("--model", metavar="M", required=True, help="module:function that returns the model")
    parser.add_argument("--optimizer", metavar="NAME", default="adamw", help="adamw (default), lion, module:name, ...")
    parser.add_argument(
        "--batch", metavar="B", required=True, help="of a whole step: module:function, or int32[512,4097]"
    )
    parser.add_argument("--example-dims", metavar="D", help="dim of the examples in the batch: 1, or JSON with null")
    parser.add_argument("--cluster", metavar="C", required=True, help="cuda:h100:64, tpu:v5p:4x4x8, ...")
    parser.add_argument("--has-aux", action="store_true", help="the loss returns a pair (loss, aux)")
    parser.add_argument("--memory-limit", metavar="B", help="memory that a device may use: 40GiB")
    parser.add_argument("--host-memory", metavar="B", help="memory of its host that a device may use")
    parser.add_argument("--hardware", metavar="NAME", help="another sheet, or a file from Hardware.save")
    parser.add_argument("--pins", metavar="RULES", help="rules for (model, state, batch)")
    parser.add_argument("--microbatches", metavar="N", type=int, help="how many (default: the best)")
    parser.add_argument("--stages", metavar="N", type=int, help="of layers, side by side (default: the best; 1: none)")
    parser.add_argument("--accumulate-dtype", metavar="D", help="dtype that gradients are added up in: bfloat16")
    parser.add_argument("--time-limit", metavar="S", type=float, default=600.0, help="seconds to search (default: 600)")
    parser.add_argument("--prove", metavar="N", type=int, default=0, help="compile the best N, and take the best")
    parser.add_argument("-o", "--output", metavar="F", type=Path, help="write it as JSON, which report reads")
    add_rules_out(parser)
    parser.add_argument("--format", choices=("text", "json"), metavar="FORMAT", default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    # NaN is above nothing, so only the negation refuses it.
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit must be a number of seconds above 0, got {args.time_limit}")
    if args.prove < 0 or any(count is not None and count < 1 for count in (args.microbatches, args.stages)):
        raise UsageError("--prove, --microbatches and --stages must be positive")
    if args.output is not None:
        check_writable(args.output)  # before a search of minutes, whose plan would be lost
    check_rules_out(args)
    hardware = None if args.hardware is None else read_hardware(args.hardware)
    memory_limit = byte_option("--memory-limit", args.memory_limit)
    host_memory = byte_option("--host-memory", args.host_memory)
    pins = None if args.pins is None else load_rules(args.pins)
    if pins is not None:  # before anything is traced
        pins.check_axis_names(AXES, f"the meshes of a cluster have {', '.join(AXES)}")
    loss = load_object(args.loss)
    if not callable(loss.value) or loss.args is not None:
        raise UsageError(f"{args.loss} must be a function loss(model, batch), not a call")
    model, batch = load_shapes(args.model), load_shapes(args.batch)
    example_dims = None if args.example_dims is None else _read_dims(args.example_dims, batch)
    optimizer = load_optimizer(args.optimizer)
    if not callable(getattr(optimizer, "update", None)):
        raise UsageError(f"--optimizer {args.optimizer} has no update: name an optax.GradientTransformation")
    with user_code(f"{args.loss}: the loss", ShardRulesError), working(f"planning {args.loss}") as progress:
        plan = plan_training(
            loss.value,
            model,
            optimizer,
            batch,
            cluster=args.cluster,
            has_aux=args.has_aux,
            example_dims=example_dims,
            memory_limit=memory_limit,
            host_memory=host_memory,
            pins=None if pins is None else pins.file.rules,
            microbatches=args.microbatches,
            stages=args.stages,
            accumulate_dtype=args.accumulate_dtype,
            hardware=hardware,
            time_limit=args.time_limit,
            prove=args.prove,
            progress=progress,
        )
    if args.output is not None:
        write(args.output, f"{plan.to_json()}\n")
    if args.rules_out is not None:
        with working("writing rules"):
            rule: Any = plan.to_rules()
            next_best = alternatives(plan.planned, len(rule.rules))
            title = f"Rules for training by {args.loss}, as `shardrules train-plan` planned it: yours to edit."
            scope = "They are for the pair of model and optimizer state, and for the model alone."
            write_rules(
                args.rules_out,
                (title, scope),
                plan.as_rule().plan(plan.planned.args[:2], plan.mesh),
                rule,
                next_best,
                args.optimizer,
            )
    show(plan.to_json() if args.format == "json" else str(plan))
    return SUCCESS


def _read_dims(text: str, batch: Any) -> Any:
    try:
        dims = read_json(text)
    except ValueError as error:
        raise UsageError(f"--example-dims must be an integer, or JSON like the batch, got {text!r}") from error
    return tuple(dims) if isinstance(dims, list) and isinstance(batch, tuple) else dims  # JSON has no tuples


COMMAND = Command(
    "train-plan",
    "Plans training on a cluster: mesh, layouts, microbatches, what is recomputed.",
    "LOSS --model M --batch B --cluster C [options]",
    (
        (
            "train-plan docs/examples/train_gpt.py:loss_of --cluster cpu:8 \\\n"
            "      --model docs/examples/train_gpt.py:GPT --batch 'uint8[64,65]'"
        ),
    ),
    _declare,
    _run,
    "nothing fits",
)
