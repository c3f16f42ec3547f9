"""Each finding of an audit where it should be, with array, axis, line and numbers; and none in a clean twin."""

import functools
import re
from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.audits.report import AuditReport
from tests.programs.audits import audited
from tests.programs.audits.audited import (
    BATCH,
    DEPTH,
    LENGTH,
    PLANS,
    ROLES,
    Program,
    audit,
    closed,
    codes,
    con,
    f32,
    findings_of,
    i32,
    language,
    language_flops,
    line_of,
)
from tests.programs.examples import CLOSED_FORMS, CPU, CUDA, TPU

targets = pytest.mark.parametrize("target", [CPU, TPU])
"""GPUs write most programs as CPUs do, and are slower to compile for."""
W, X = f32(64, 1536), f32(48, 64)
"""No part of the weight is as large as a part of a product of both."""
OWN = sr.create_mesh(audited.AXES)


def only(report: AuditReport, code: str) -> sr.Finding:
    """The one finding of a code."""
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


# ---- clean programs ----


@pytest.mark.parametrize(
    ("plan", "target"),
    [*((plan, CPU) for plan in PLANS), *(("both", target) for target in (CUDA, TPU)), ("fully sharded", TPU)],
)
def test_programs_with_constraints_have_no_problems(plan: str, target: str) -> None:
    report = language(target, plan)
    assert (report.flops, report.model_flops) == (language_flops(), 8 * language_flops())
    assert [array.role for array in report.arrays[:7]] == ["parameters"] * 6 + ["batch"]
    assert report.problems == ()
    assert codes(report, "note") == (["fsdp"] if PLANS[plan][0] else [])


@targets
@pytest.mark.parametrize(
    ("name", "with_roles"), [*((case.name, False) for case in CLOSED_FORMS), *((name, True) for name in ROLES)]
)
def test_closed_forms_have_no_problems(name: str, with_roles: bool, target: str) -> None:
    # The compiler for CPUs leaves sums over devices in the loop over microbatches.
    expected = ["reduced-in-loop"] if (name, target) == ("accumulated", CPU) else []
    assert codes(closed(name, target, with_roles)) == expected


# ---- unexpected moves of activations ----


def step_line(marker: str) -> str:
    return line_of(audited.language_step, marker)


def parts(report: AuditReport, code: str) -> dict[str, sr.Finding]:
    return {finding.source: finding for finding in report.findings if finding.code == code}


FIGHTING = {"split_embedding": True, "constrain": False}


@targets
def test_partial_sums_and_gathered_batches_are_warnings(target: str) -> None:
    """The batch is whole on every device, which sums a part of it for all: partial sums of that go over the wire.

    At the projection up: f32[16, 24, 128] for each layer, an all-reduce or a reduce-scatter over four devices.
    """
    report = language(target, "both", **FIGHTING)
    assert codes(report)[:2] == ["gathered-batch", "partial-sums"]
    up = parts(report, "partial-sums")[step_line("up")]
    assert (up.severity, up.axis) == ("warning", "data")
    assert "params/layers/*/up" in up.message
    assert "with_sharding_constraint" in up.remedy
    kind, rounds, rows = ("all-reduce", 2, BATCH) if "all-reduce" in up.message else ("reduce-scatter", 1, BATCH // 4)
    sent = rounds * 4 * BATCH * LENGTH * audited.HIDDEN // 2 * 3 // 4 * DEPTH
    assert f"{DEPTH} x {kind} over data, largest array f32[{rows},24,128]" in up.message
    assert f": {sent / 1024:,.1f} KiB on the wire per device and step" in up.message
    gathered = next(finding for finding in report.findings if finding.code == "gathered-batch")
    assert (gathered.severity, gathered.axis) == ("warning", "data")
    assert "all-gather over data" in gathered.message
    assert re.search(r"largest array (f32|bf16)\[16,24,\d+\]", gathered.message)
    assert gathered.source.startswith(f"{audited.__file__}:")


@targets
def test_findings_are_ordered_and_have_lines_and_shares(target: str) -> None:
    """Moves that send less than a hundredth of all bytes are not warnings."""
    report = language(target, "both", **FIGHTING)
    ranks = [("error", "warning", "note").index(finding.severity) for finding in report.findings]
    assert ranks == sorted(ranks)
    for finding in report.problems:
        assert finding.source.startswith(f"{audited.__file__}:") or finding.code == "rematerialised"
        assert finding.message
        assert finding.remedy
        assert finding.code in str(report)
    sent = {finding: wire_bytes_of(finding) for finding in report.findings if finding.code != "fsdp"}
    shares = [(finding.severity, nbytes / report.wire_bytes) for finding, nbytes in sent.items() if nbytes is not None]
    assert all((severity == "warning") is (share >= 0.0099) for severity, share in shares)
    assert {severity for severity, _ in shares} == {"warning", "note"}


def wire_bytes_of(finding: sr.Finding) -> float | None:
    match = re.search(r": ([\d.,]+) (B|KiB|MiB) on the wire", finding.message)
    return match and float(match[1].replace(",", "")) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[match[2]]


def test_findings_cover_all_excess_bytes() -> None:
    """The report names as many bytes as constraints save, and more: it sends less weights."""
    fights, clean = language(CPU, "both", **FIGHTING), language(CPU, "both", split_embedding=True)
    moves = ("partial-sums", "gathered-batch", "gathered-activation", "resharding", "gathered")
    named = sum(wire_bytes_of(finding) or 0 for finding in fights.findings if finding.code in moves)
    extra = fights.wire_bytes - clean.wire_bytes
    assert extra > 1.5 * clean.wire_bytes
    assert 0.95 * extra < named <= fights.wire_bytes


@targets
def test_constraints_remove_partial_sums(target: str) -> None:
    """Only what the lookup in a split table costs is left."""
    report, fights = language(target, "both", split_embedding=True), language(target, "both", **FIGHTING)
    assert "partial-sums" not in codes(report)
    assert {finding.source for finding in report.problems} <= {step_line("lookup"), line_of(con, "con"), ""}
    assert 3 * report.wire_bytes < fights.wire_bytes


@pytest.mark.parametrize("vocabulary", [1024, 1536])
def test_equal_sizes_hide_nothing(vocabulary: int) -> None:
    """The table of 1536 words has as many elements as a hidden layer of all the batch, the other as a part of it."""
    assert 1536 * audited.WIDTH == BATCH * LENGTH * audited.HIDDEN
    usual = language(CPU, "both", **FIGHTING)
    report = language(CPU, "both", vocabulary=vocabulary, **FIGHTING)
    assert set(codes(usual)) <= set(codes(report))
    assert step_line("up") in parts(report, "partial-sums")


@targets
def test_weights_of_fully_sharded_plans_are_a_note(target: str) -> None:
    report = language(target, "fully sharded")
    finding = only(report, "fsdp")
    assert (finding.severity, finding.axis, finding.remedy) == ("note", "data", "")
    for name in ("params/layers/*/up", "params/layers/*/down", "params/head"):
        assert name in finding.message
    gathers = [
        collective
        for collective in report.collectives
        if any(path.startswith("params") for path in collective.arguments)
    ]
    assert f"{sum(collective.times.count for collective in gathers)} x all-gather over data" in finding.message
    sent = sum(collective.total_wire_bytes for collective in gathers)
    assert f"{sent / 1024:,.1f} KiB on the wire" in finding.message


# ---- one finding, and twins without it ----


def column(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)  # <column>
    return con(h, "data", None)  # <rows>


def wide(w: Any, x: Any) -> Any:
    return con(jnp.tanh(x @ w), "data", "model")  # <wide>


def rows(w: Any, x: Any) -> Any:
    return con(x @ w, "data", None)


def two_columns(params: Any, x: Any) -> Any:
    h = jnp.tanh(x @ params["up"])  # <first>
    return con(h @ params["down"], "data", "model")  # <second>


def column_then_row(params: Any, x: Any) -> Any:
    return con(jnp.tanh(x @ params["up"]) @ params["down"], "data")


def ordered(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return h * 2 - jnp.sort(h, axis=0)  # <sorted>


def step_of_two(w: Any, v: Any, x: Any) -> Any:
    return w + 1, v.astype(jnp.bfloat16), x.sum()


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)  # <dense>


def turned_twice(x: Any) -> Any:
    h = lax.with_sharding_constraint(jnp.sin(x), P("b", "a", "c"))  # <from>
    return lax.with_sharding_constraint(jnp.cos(h), P(("c", "b")))  # <to>


def turned_once(x: Any) -> Any:
    h = lax.with_sharding_constraint(jnp.sin(x), P("b", "a", "c"))
    return lax.with_sharding_constraint(jnp.cos(h), P("b", "a"))


def ten_rows(w: Any, x: Any) -> Any:
    h = lax.with_sharding_constraint(x @ w, P(("data", "model")))  # <ten>
    return h.sum()


def used(w: Any, x: Any, y: Any) -> Any:
    return jnp.sum((x @ w - y) ** 2)  # <used>


def constrained(w: Any, x: Any) -> Any:
    return con(con(x, "data") @ w, "data")  # <constrained>


def until(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda x: jnp.max(x) > 3, lambda x: jnp.sin(x @ w), x)  # <until>


def counted(w: Any, x: Any) -> Any:
    return lax.fori_loop(0, 10, lambda _, x: jnp.sin(x @ w), x)


def recomputed(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x)))(w)


def by_constraint(w: Any, x: Any) -> Any:
    return con(x @ con(w, None, None), "data")


def data_parallel(model: Any, x: Any) -> Any:
    return eqx.filter_value_and_grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 2))(model)


def turned(x: Any) -> Any:
    return con(jnp.sin(con(jnp.cos(x), "data")), None, "data")


def with_small_arguments(w: Any, x: Any, y: Any, key: Any, rate: Any, mask: Any) -> Any:
    noise = jax.random.normal(key, (1536,))
    return jnp.sum((x @ w + noise - y) ** 2) * rate + mask.sum()


@final
@attrs.frozen
class Case:
    """A program with a finding, at one of the marked lines; and twins without problems."""

    program: Program
    code: str
    markers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """Patterns in the message."""
    twins: tuple[Program, ...] = ()
    axis: str | None = None
    path: str = ""
    severity: str = "warning"
    targets: tuple[str, ...] = (CPU, TPU)


def by_hand(x: Any) -> Any:
    return (
        lax.psum(x, "data"),
        lax.all_gather(x, "model", tiled=True),
        lax.psum_scatter(x, "data", tiled=True),
        lax.ppermute(x, "model", [(0, 1), (1, 0)]),
        lax.all_to_all(x, "data", 0, 0, tiled=True),
        lax.pmean(x, ("data", "model")),
        lax.pmax(x, "data"),
        lax.psum(jnp.sin(x), "data"),
        lax.all_gather(jnp.cos(x), "data"),
    )


def gradient_by_hand(w: Any, x: Any) -> Any:
    specs = (P("model"), P("data", "model"))
    mapped = jax.shard_map(lambda w, x: lax.psum(jnp.tanh(x @ w), "model"), in_specs=specs, out_specs=P("data"))
    return jax.grad(lambda w: jnp.sum(mapped(w, x) ** 2))(w)


def branches_and_loops(flag: Any, w: Any, x: Any) -> Any:
    x = con(lax.cond(flag, lambda: x @ w, lambda: jnp.tanh(x @ w @ w)), ("data", "model"))
    x = lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
    x = lax.while_loop(lambda x: jnp.max(x) > 3, lambda x: jnp.sin(x @ w), x)
    return lax.scan(lambda c, _: (jax.checkpoint(lambda c: jnp.cos(c @ w))(c), None), x, None, length=5)[0]


PARAMS = {"up": W, "down": f32(1536, 64)}
ROWS, COLUMNS, BOTH, GRID = P("data"), P(None, "model"), P(("data", "model")), P("data", "model")
MAPPED = jax.shard_map(by_hand, in_specs=GRID, out_specs=(GRID,) * 8 + (P(None, *GRID),), check_vma=False)
SQUARE = f32(64, 64)
WEIGHTS = ("parameters", "parameters")
VECTORS = (f32(64, 96), f32(64, 160), X)
LINEAR = eqx.filter_eval_shape(lambda: eqx.nn.Linear(64, 1536, key=jax.random.key(0)))
MUCH, LITTLE = jnp.ones((64, 8192)), jnp.ones((64, 8))
CUBE, CUBE_SPEC = f32(16, 16, 16), P("b", "a", "c")


def donating(*argnums: int) -> Program:
    return Program(step_of_two, VECTORS, (ROWS, ROWS, BOTH), out=(ROWS, ROWS, None), donate=argnums)


CASES = (
    # The columns of the weight and of its product are split, and a constraint requests whole rows.
    Case(
        Program(column, (W, X), (COLUMNS, ROWS)),
        "gathered-activation",
        ("column", "rows"),
        (r"1 x all-gather over model, largest array f32\[12,1536\]: 36\.0 KiB on the wire", r"nearby: .*\bw\b"),
        (Program(wide, (W, X), (COLUMNS, ROWS)), Program(rows, (W, X), (P("model"), P("data", "model")))),
        axis="model",
    ),
    # Column and column again: the hidden layer is split, and the second matrix wants all of it.
    Case(
        Program(two_columns, (PARAMS, X), ({"up": COLUMNS, "down": COLUMNS}, ROWS)),
        "gathered-activation",
        ("first", "second"),
        (r"largest array (f32|bf16)\[12,1536\]",),
        (Program(column_then_row, (PARAMS, X), ({"up": COLUMNS, "down": P("model")}, ROWS)),),
        axis="model",
    ),
    # The batch is split in its features, too, over the axis that splits the columns of the weight.
    Case(
        Program(wide, (W, X), (COLUMNS, P("data", "model"))),
        "gathered",
        ("wide",),
        ("The plan splits x over model", r"bf16.*768 B|f32.*1\.5 KiB"),
        axis="model",
    ),
    # Rows are split, and sorted along their columns.
    Case(
        Program(ordered, (W, X), (P(), ROWS), "data:8"),
        "resharding",
        ("sorted",),
        ("all-to-all over data",),
        (Program(ordered, (W, X), (P(None, "data"), P()), "data:8", roles=WEIGHTS),),
        axis="data",
    ),
    Case(
        Program(ten_rows, (W, f32(10, 64)), (P(), P())),
        "weakened",
        ("ten",),
        (r"\('data', 'model'\)", r"\(10, 1536\)", "dimension 0"),
        (Program(ten_rows, (W, f32(16, 64)), (P(), BOTH)),),
    ),
    Case(
        Program(used, (W, X, f32(48, 1536)), (P(), P(), ROWS)),
        "unsharded-batch",
        ("used",),
        ("each of the 8 devices gets all of it",),
        path="x",
    ),
    Case(
        Program(constrained, (W, X), (P(), None)),
        "unsharded-batch",
        ("constrained", "con"),
        ("no spec says how to split it|gets all of it",),
        path="x",
    ),
    Case(
        Program(until, (SQUARE, X), (P(), BOTH)),
        "unknown-loop",
        ("until",),
        ("the length of a loop is unknown",),
        (Program(counted, (SQUARE, X), (P(), BOTH)), Program(recomputed, (SQUARE, X), (P(), BOTH))),
        severity="note",
    ),
    *(
        Case(Program(dense, (W, X), (P(), spec)), "replicated-compute", ("dense",), (f"{times}.00 times as many",))
        for spec, times in ((ROWS, 2), (P("model"), 4), (P(), 8))
    ),
    Case(
        Program(lambda m, x: jax.vmap(m)(x), (LINEAR, X), (P(), ROWS)),
        "replicated-compute",
        texts=("2.00 times as many",),
    ),
    # They are in the program, and in no category of memory.
    Case(
        Program(lambda x: jnp.tanh(x @ MUCH), (X,), BOTH),
        "closed-over",
        texts=("2.0 MiB", r"float32\[64, 8192\]"),
        twins=(Program(lambda x: jnp.tanh(x @ LITTLE), (X,), BOTH),),
    ),
    Case(
        donating(0, 1),
        "donated-in-vain",
        texts=("1 donated arrays, 10.0 KiB per device", "dtype and sharding of v"),
        twins=(donating(0),),
    ),
    # The compiler for TPUs finds ways where those for CPUs and GPUs find none, or keeps quiet about it.
    Case(
        Program(turned_twice, (CUBE,), CUBE_SPEC, "a:2,b:2,c:2"),
        "rematerialised",
        ("from", "to"),
        (r"^f32\[8,8,8\] goes from {", "gather the whole array"),
        targets=(CPU, CUDA),
    ),
)
MLP = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 8, 128, 2, key=jax.random.key(0)))
TWINS = (
    *(twin for case in CASES for twin in case.twins),
    Program(dense, (W, X), (P(), BOTH)),
    Program(turned_once, (CUBE,), CUBE_SPEC, "a:2,b:2,c:2"),
    # Moves that are requested: a weight that a constraint gathers, and constraints at both ends of a move.
    Program(by_constraint, (W, X), (P(None, "data"), ROWS), "data:8"),
    Program(turned, (SQUARE,), (ROWS,)),
    Program(data_parallel, (MLP, X), (P(), ROWS), "data:8"),
    Program(lambda x: (x.sum(), x), (X,), (ROWS,), out=(None, P())),
    Program(
        with_small_arguments,
        (W, X, f32(48, 1536), jax.random.key(0), f32(), f32(3)),
        (P(), BOTH, BOTH, None, None, None),
        roles=("parameters", *["batch"] * 5),
    ),
    Program(MAPPED, (f32(64, 2048),), GRID),
    Program(gradient_by_hand, (f32(64, 128), SQUARE), (P("model"), GRID)),
    Program(
        branches_and_loops,
        (jax.ShapeDtypeStruct((), bool), SQUARE, X),
        (None, P(), BOTH),
        roles=("batch", *ROLES["attention"][1:]),
    ),
)


@pytest.mark.parametrize(
    ("case", "target"),
    [(case, target) for case in CASES for target in case.targets],
    ids=lambda value: value if isinstance(value, str) else f"{value.code} of {value.program.fn.__name__}",
)
def test_a_finding_has_its_line_axis_and_numbers(case: Case, target: str) -> None:
    finding = only(case.program.audit(target), case.code)
    assert (finding.severity, finding.axis, finding.path) == (case.severity, case.axis, case.path)
    lines = [line_of(con if marker == "con" else case.program.fn, marker) for marker in case.markers]
    assert finding.source in lines if lines else True
    assert all(re.search(text, finding.message) for text in case.texts), finding.message
    assert finding.remedy or finding.severity == "note"


@targets
@pytest.mark.parametrize("program", TWINS, ids=lambda program: program.fn.__name__)
def test_a_twin_has_no_problems(program: Program, target: str) -> None:
    assert program.audit(target).problems == ()


def test_one_device_has_no_problems() -> None:
    assert audit(lambda w, x: x @ w, W, X, axes="data:1", target="cpu:1").findings == ()


# ---- constraints and specs that cannot be ----


def typo(w: Any, x: Any) -> Any:
    return lax.with_sharding_constraint(x @ w, P("data", "modle")).sum()  # <typo>


def twice(w: Any, x: Any) -> Any:
    return lax.with_sharding_constraint(x @ w, P("data", "data")).sum()  # <twice>


@targets
@pytest.mark.parametrize(("fn", "code", "axis"), [(typo, "unknown-axis", "modle"), (twice, "duplicate-axis", "data")])
def test_a_constraint_that_cannot_be(fn: Callable[..., Any], code: str, axis: str, target: str) -> None:
    with pytest.raises(sr.errors.PlanError, match="the function cannot be traced") as caught:
        audit(fn, W, X, in_shardings=(P(), P("data")), target=target)
    (finding,) = findings_of(caught.value)
    assert (finding.severity, finding.code, finding.axis) == ("error", code, axis)
    assert finding.source == line_of(fn, fn.__name__)
    assert finding.source in str(caught.value)


@targets
def test_a_plan_with_a_typo(target: str) -> None:
    rule = sr.RegexShardingRule([("w", P("dta", "model")), ("x", P("data", None, "model"))])
    with pytest.raises(sr.errors.PlanError, match="the plan has 2 errors") as caught:
        audit(lambda args: args["x"] @ args["w"], {"w": W, "x": X}, plan=rule, target=target)
    assert {(finding.path, finding.code, finding.axis) for finding in findings_of(caught.value)} >= {
        ("w", "unknown-axis", "dta")
    }
    assert "did you mean 'data'" in str(caught.value)


# ---- the batch ----


def test_every_part_of_a_batch_is_looked_at_and_nothing_else() -> None:
    def loss(w: Any, batch: Any) -> Any:
        return jnp.sum((batch["x"] @ w) ** 2) + batch["y"].sum()

    report = Program(loss, (W, {"x": X, "y": i32(48)}), (P(), None)).audit(CPU)
    assert [finding.path for finding in report.findings if finding.code == "unsharded-batch"] == ["batch/x", "batch/y"]
    assert "unsharded-batch" not in codes(Program(rows, (W, X), (P(), P()), roles=WEIGHTS).audit(CPU))


# ---- memory ----


def growing(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) @ w.T)


def small(memory_bytes: int) -> Any:
    return attrs.evolve(sr.Hardware.named("cuda:h100"), name="a small chip", memory_bytes=memory_bytes)


@targets
def test_what_does_not_fit(target: str) -> None:
    """A chip with a byte less than it takes, and one with that byte."""
    program = Program(growing, (W, X), (P(), BOTH))
    peak = program.audit(target).peak_bytes
    report, twin = (program.audit(target, small(nbytes)) for nbytes in (peak - 1, peak))
    finding = only(report, "does-not-fit")
    assert (finding.severity, report.fits) == ("error", False)
    assert all(text in finding.message for text in ("a small chip has", "1 B too much", "w 384.0 KiB"))
    assert finding.remedy
    assert (twin.fits, twin.problems) == (True, ())


@pytest.mark.parametrize(
    ("program", "share", "remedy"),
    [
        (Program(lambda w, x: x @ w, (f32(64, 4096), X), (P(), BOTH)), "parameters, 1.0 MiB", "plit the parameters"),
        (
            Program(lambda w, x: con(x[:, :1] * w[:1], "data"), (f32(64, 65536), X), (COLUMNS, P())),
            r"(outputs, 3\.0|parameters, 8\.0) MiB",
            "",
        ),
    ],
    ids=["parameters", "outputs"],
)
def test_the_largest_share_has_its_remedy(program: Program, share: str, remedy: str) -> None:
    finding = only(program.audit(CPU, small(1024)), "does-not-fit")
    assert re.search(f"Largest share: {share}", finding.message)
    assert remedy in finding.remedy


@pytest.mark.parametrize("target", [CPU, CUDA, TPU])
def test_too_much_for_the_real_chip(target: str) -> None:
    def double(x: Any) -> Any:
        return x * 2

    def of_rows(count: int) -> AuditReport:
        return Program(double, (f32(count, 2**20, 2**12),), ROWS, "data:8").audit(target)

    # 16 GiB for each of 8 devices, and as much again for the result.
    fits, count = {CPU: (False, 8), CUDA: (True, 24), TPU: (False, 8)}[target]
    assert of_rows(8).fits is fits
    if target == CPU:  # its devices share the memory of the machine, which the sheet does not know
        assert "does-not-fit" not in codes(of_rows(8))
    else:
        assert f"x {count * 2:,}.0 GiB" in only(of_rows(count), "does-not-fit").message


def test_a_mesh_and_its_shape_give_equal_findings() -> None:
    def fn(w: Any, x: Any) -> Any:
        return lax.with_sharding_constraint(x @ w, NamedSharding(OWN, P("data", None)))

    report = sr.audit(fn, W, X, mesh=OWN, in_shardings=(COLUMNS, ROWS), target=CPU)
    assert report.findings == Program(fn, (W, X), (COLUMNS, ROWS)).audit(CPU).findings
    assert report.problems


def calls_back(w: Any, x: Any, *, twice: bool = False) -> Any:
    y = jnp.tanh(x @ w)
    struct = jax.ShapeDtypeStruct(y.shape, y.dtype)
    y = jax.pure_callback(lambda y: y, struct, y)  # <first>
    return jax.pure_callback(lambda y: 2 * y, struct, jnp.tanh(y @ w)) if twice else y


@pytest.mark.slow  # JAX 0.12 gives the gather the name of the operation before the call
@pytest.mark.parametrize("twice", [False, True])
def test_a_call_back_to_python_is_named(twice: bool) -> None:
    fn = functools.partial(calls_back, twice=twice)
    report = Program(fn, (SQUARE, f32(512, 64)), (P(), ROWS), "data:8", out=ROWS).audit(CPU)
    finding = only(report, "gathered-for-kernel")
    assert "for the Python function of 'pure_callback', which one of 8 devices calls while" in finding.message
    assert finding.remedy == "Call it inside jax.shard_map over data"
    assert finding.source == line_of(calls_back, "first")
    # The array that comes back from that device is no sum, and no two steps lead there.
    assert twice or not {finding.code for finding in report.findings} & {"partial-sums", "rematerialised"}
