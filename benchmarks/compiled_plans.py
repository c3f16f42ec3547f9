"""What do compilers make of a plan, and how near is the model of what they do?

**Method.** Train and serve steps (`plan_models/`: seven models, sixteen kinds, and more kinds on which no figure of the
planner was chosen) are planned for `data:4,model:2`: with the arguments pinned as experts split them (the batch alone,
FSDP, tensors), and freely, also within a part of the memory that this takes. Each plan is compiled for 8 H100s, for 8
TPU v5e and for 8 CPU devices, none of which need be present. `compiled_plans.json` keeps what was compiled: the layout
of every node of the problem, the compiler's peak of memory, the time of a step by our own model of the compiled
program, and the bytes on the wire. Nothing in it is a prediction, so it stays as it is when the model changes.

About half of the programs are set aside (`SET_ASIDE`). `compiler_rules.py` compares the model with the table, for each
half.

Run it as `python benchmarks/compiled_plans.py`: what is in the table already is not compiled again. It needs the extras
`cuda`, `tpu` and `cudnn`, and some hours.
"""

import argparse
import json
import sys
import time
import warnings
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Mesh
from plan_models import KINDS, MODELS, MORE, Expert, Model
from plan_models.compiled import Cache, Question, is_shape

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import DoesNotFitError
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.query import QueryOptions, read_query
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.costs.schedule import play_schedule

TABLE = Path(__file__).with_suffix(".json")
MESH = "data:4,model:2"
TARGETS = ("cuda:h100:8", "tpu:v5e:2x4", "cpu:8")
PROGRAMS: Mapping[str, Model] = {**KINDS, **MORE, **MODELS}
SEEN = (
    *KINDS,
    *("tied_autoencoder", "physics_informed", "graph_net", "vq_vae", "nerf"),
    *("linear_recurrence", "alibi_decoder", "distillation", "evaluation", "pooled_net"),
)
SET_ASIDE = tuple(name for name in PROGRAMS if name not in SEEN)
"""About half of the programs: nothing is chosen by what they show."""

TIGHT = 0.85
"""The part of the modelled peak of the free plan that the tight plan may take."""

SECONDS = 60.0
"""The time limit of a search."""


@final
@attrs.frozen
class CompiledPlan:
    """A plan, and what a compiler made of it."""

    program: str
    target: str
    plan: str
    """The expert whose splits of the arguments are kept, `"free"` or `"tight"`."""
    limit_bytes: int | None
    """The limit of memory that the compiler was told; `None` where it was not."""
    layouts: str
    """The layout of every node of the problem, as text."""
    peak_bytes: int
    argument_bytes: int
    seconds: float
    """The time of a step by our own model of the compiled program."""
    wire_bytes: Mapping[str, int]
    """By kind of collective."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The question that the row answers."""
        return self.program, self.target, self.plan


def read_table(path: Path = TABLE) -> dict[tuple[str, str, str], CompiledPlan]:
    """Reads the table, by program, target and plan."""
    if not path.exists():
        return {}
    rows = [CompiledPlan(**fields) for fields in json.loads(path.read_text())]
    return {row.key: row for row in rows}


def write_table(rows: Iterable[CompiledPlan], path: Path = TABLE) -> None:
    """Writes the table, a row on each line."""
    order = {name: index for index, name in enumerate((*PROGRAMS, *TARGETS))}
    lines = [
        json.dumps(attrs.asdict(row))
        for row in sorted(rows, key=lambda row: (order[row.program], order[row.target], row.plan))
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    partial.replace(path)


def layouts_text(problem: Problem, choice: Sequence[int]) -> str:
    """Returns the layouts that a choice takes, as text: a number for each node and axis of the mesh."""
    rows = [node.layouts[index] for node, index in zip(problem.nodes, choice, strict=True)]
    return b85encode(zlib.compress(np.array(rows, np.int8).tobytes(), 9)).decode()


def read_layouts(problem: Problem, text: str) -> tuple[int, ...] | None:
    """Returns the choice of these layouts; `None` if the problem has others."""
    values = np.frombuffer(zlib.decompress(b85decode(text)), np.int8)
    rows = values.reshape(-1, len(problem.machine.axes))
    if len(rows) != len(problem.nodes):
        return None
    choice = []
    for node, row in zip(problem.nodes, rows, strict=True):
        matches = np.flatnonzero((node.layouts == row).all(axis=1))
        if not len(matches):
            return None
        choice.append(int(matches[0]))
    return tuple(choice)


def free_task(question: Question) -> Task:
    """Returns the task of a step without pins."""
    options = QueryOptions(None, None, question.target.hardware, None, SECONDS, False)
    mesh = planning_mesh(question.target, question.device_mesh)
    return read_query(question.step, question.args, mesh, options, check=False).task


def chosen_experts(question: Question) -> list[Expert]:
    """Returns up to four experts: data parallelism, FSDP, and the first and the last that split anything else."""
    experts = question.experts
    plain = [expert for expert in experts if expert.name in ("data parallel", "FSDP")]
    others = [expert for expert in experts if expert.tensor or expert.experts or expert.vocab or expert.columns]
    chosen = [*plain, *others[:1], *others[-1:]]
    return list({expert.name: expert for expert in chosen}.values())


def plans(question: Question) -> Iterator[tuple[str, sr.reports.AutoPlan]]:
    """Yields the plans of a step: those of experts, the free one and the tight one."""
    for expert in chosen_experts(question)[: 3 if question.target.platform == "tpu" else 4]:  # TPUs take minutes
        shardings = jax.tree.leaves(expert.shardings(question.args, question.device_mesh))
        leaves, treedef = jax.tree.flatten(question.args)
        rest = iter(shardings)
        specs = treedef.unflatten([next(rest).spec if is_shape(leaf) else None for leaf in leaves])
        yield expert.name, _planned(question, None, sr.SpecTreeShardingRule(specs))
    free = _planned(question, None, None)
    yield "free", free
    if question.target.platform == "tpu":
        return
    try:
        yield "tight", _planned(question, int(TIGHT * free.peak_bytes), None)
    except DoesNotFitError:
        return


def planning_mesh(target: sr.Target, device_mesh: Mesh) -> AnyMesh:
    """Returns the mesh to plan for: of TPUs with the devices, whose places decide what links join them."""
    return device_mesh if target.platform == "tpu" else device_mesh.abstract_mesh


def _planned(question: Question, limit: int | None, pins: Any) -> sr.reports.AutoPlan:
    return sr.autoplan(
        question.step,
        *question.args,
        mesh=planning_mesh(question.target, question.device_mesh),
        hardware=question.target.hardware,
        memory_limit=2**50 if limit is None else limit,
        pins=pins,
        time_limit=SECONDS,
    )


def compiled(question: Question, name: str, plan: sr.reports.AutoPlan, free: Problem) -> CompiledPlan | None:
    """Compiles a plan; returns `None` if its layouts are none of the problem without pins."""
    layouts = layouts_text(plan.task.problem, plan.choice)
    if read_layouts(free, layouts) is None:
        return None
    with jax.set_mesh(question.device_mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        planned = plan.jit(question.step, donate_argnums=question.model.donated)
        lowered, options = planned.lower(*question.args), planned.compiler_options(question.device_mesh)
    compilation = question.cache.compilation(
        lowered, f"{question.target} {options}" if options else str(question.target)
    )
    program, collectives, kernels = question.read(compilation.text)
    wire: dict[str, int] = {}
    for collective in collectives:
        wire[collective.kind] = wire.get(collective.kind, 0) + collective.total_wire_bytes
    schedule = play_schedule(program, collectives, kernels, question.target.hardware)
    memory = compilation.memory
    return CompiledPlan(
        question.model.name,
        str(question.target),
        name,
        plan.memory_limit if name == "tight" else None,
        layouts,
        memory.peak_bytes,
        memory.argument_bytes,
        schedule.time.seconds,
        dict(sorted(wire.items())),
    )


def fill(names: Sequence[str], targets: Sequence[str], cache: Cache) -> None:
    """Compiles what the table lacks, and writes it after each plan."""
    table = read_table()
    for target in targets:
        for name in names:
            if (name, target, "free" if target.startswith("tpu") else "tight") in table:
                continue
            start = time.monotonic()
            question = Question.of(PROGRAMS[name], MESH, False, cache, target)
            problem = free_task(question).problem
            for plan_name, plan in plans(question):
                if (name, target, plan_name) in table:
                    continue
                try:
                    row = compiled(question, plan_name, plan, problem)
                except Exception as error:  # noqa: BLE001  what fails is said, and the others go on
                    print(f"{name}, {target}, {plan_name}: {type(error).__name__}: {error!s:.300}", flush=True)
                    continue
                if row is None:
                    print(f"{name}, {target}, {plan_name}: its pins split arguments that are equal without", flush=True)
                    continue
                table = {**read_table(), row.key: row}  # another run may have written meanwhile
                write_table(table.values())
                ratio = plan.peak_bytes / row.peak_bytes
                print(
                    f"{name}, {target}, {plan_name}: {row.peak_bytes / 1e9:.2f} GB, modelled {ratio:.2f}, "
                    f"{1e3 * row.seconds:.1f} ms, after {time.monotonic() - start:.0f} s",
                    flush=True,
                )
            jax.clear_caches()


def main(arguments: list[str] | None = None) -> int:
    """Fills the table."""
    parser = argparse.ArgumentParser(description="What compilers make of plans.")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled programs in this folder")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    fill(options.programs, options.targets, Cache(options.cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
