"""A report written by hand, with every part that a report can have."""

import attrs
import jax

import shardrules as sr
from shardrules.core.source import Source
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.audits.modules import ModuleCost
from shardrules.programs.audits.report import AuditedArray, AuditReport
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.costs.schedule import LineTime
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.machine.targets import Target

BLOCK = (Source(jax.__file__, 3), Source("/home/me/project/model.py", 12, "Block.__call__"))
LOSS = (Source("/home/me/project/train.py", 30, "loss"),)

GATHER = Collective(
    "all-gather",
    ("data",),
    ("data",),
    4,
    (ArrayType("bf16", (64, 256), 16),),
    32768,
    24576,
    Times(12),
    "body",
    "all-gather.1",
    "jit(step)/while/body/dot_general",
    BLOCK,
    ("params/layers/up",),
)
REDUCE = Collective(
    "all-reduce",
    ("data", "model"),
    ("data", "model"),
    8,
    (ArrayType("f32", (), 32), ArrayType("f32", (256,), 32)),
    1028,
    1799,
    Times(1),
    "main",
    "all-reduce.2",
    "jit(step)/reduce_sum",
    LOSS,
    ("", ""),
)
ALONE = attrs.evolve(REDUCE, axes=(), crossed=(), group_size=1, wire_bytes=0, name="all-reduce.3")
"""A collective of one device each: it is in the program and moves nothing."""

LAYERS = tuple(
    AuditedArray(f"params/layers/{layer}/up", (64, 256), "bfloat16", "parameters", "P('data')", "P('data')", 8192, True)
    for layer in range(2)
)
WARNING = sr.Finding(
    "warning",
    "gathered",
    "it is gathered",
    remedy="Do not split it",
    axis="data",
    source="/home/me/project/model.py:12",
)
NOTE = sr.Finding("note", "fsdp", "as it should be")

REPORT = AuditReport(
    "step",
    Target.parse("cuda:h100:8"),
    attrs.evolve(sr.Hardware.named("cpu"), name="a chip", memory_bytes=2**20),
    "data:4,model:2",
    8,
    (
        *LAYERS,
        AuditedArray("x", (32, 64), "int32", "batch", "P('data')", "P('data')", 2048),
        AuditedArray("result", (), "float32", "result", "", "P()", 4),
    ),
    (GATHER, REDUCE, ALONE),
    (ModuleCost("Block", 3 * 10**9, 12 * 24576, 12), ModuleCost("loss", 10**9, 1799, 1)),
    MemoryUse(16384, 32768, 2048, 0, 4, 65536),
    (("bf16", 3 * 10**9), ("f32", 10**9)),
    16 * 10**9,
    StepTime(0.012, 0.0051, 0.004, 0.001, 0.0001),
    (
        LineTime("/home/me/project/model.py:12", 0.009, 0.005, 0.001, 0.0, 0.0125, "/home/me/project/train.py:30"),
        LineTime("/home/me/project/train.py:30", 0.003, 0.0001, critical_seconds=0.0005),
        LineTime("", 0.0, copy_seconds=0.0001, critical_seconds=0.0001),
    ),
    (WARNING, NOTE),
    1.5,
    "HloModule jit_step",
)
