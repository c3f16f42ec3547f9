"""Each finding of an audit where it should be, with array, axis, line and numbers; and none in a clean twin."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
    audit,
    closed,
    codes,
    con,
    f32,
    findings_of,
    i32,
    language,
    line_of,
)
from tests.programs.examples import CLOSED_FORMS, CPU, CUDA, TPU, mesh_on

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
    [*((plan, CPU) for plan in PLANS), ("fully sharded", TPU), ("both", CUDA)],
)
def test_programs_with_constraints_have_no_problems(plan: str, target: str) -> None:
    report = language(target, plan)
    assert report.problems == ()
    assert codes(report, "note") == (["fsdp"] if PLANS[plan][0] else [])


WEIGHTS = ("parameters", "parameters")


@targets
@pytest.mark.parametrize("name", [case.name for case in CLOSED_FORMS])
def test_closed_forms_have_no_problems(name: str, target: str) -> None:
    # The compiler for CPUs leaves sums over devices in the loop over microbatches.
    expected = ["reduced-in-loop"] if (name, target) == ("accumulated", CPU) else []
    assert codes(closed(name, target)) == expected


@targets
@pytest.mark.parametrize("name", ROLES)
def test_closed_forms_with_roles_have_no_problems(name: str, target: str) -> None:
    assert closed(name, target, True).problems == ()


@targets
def test_one_device_has_no_problems(target: str) -> None:
    alone = {CPU: "cpu:1", CUDA: "cuda:h100:1", TPU: "tpu:v5e:1x1"}[target]
    assert audit(lambda w, x: x @ w, W, X, axes="data:1", target=alone).findings == ()


# ---- unexpected moves of activations ----


def step_line(marker: str) -> str:
    return line_of(audited.language_step, marker)


def parts(report: AuditReport, code: str) -> dict[str, sr.Finding]:
    return {finding.source: finding for finding in report.findings if finding.code == code}


FIGHTING = {"split_embedding": True, "constrain": False}


@targets
def test_partial_sums_are_warnings(target: str) -> None:
    """The batch is whole on every device, which sums a part of it for all: partial sums of that go over the wire."""
    report = language(target, "both", **FIGHTING)
    by_line = parts(report, "partial-sums")
    up = by_line[step_line("up")]
    assert (up.severity, up.axis) == ("warning", "data")
    assert "params/layers/*/up" in up.message
    assert f"{DEPTH} x " in up.message
    assert "with_sharding_constraint" in up.remedy
    assert codes(report)[:2] == ["gathered-batch", "partial-sums"]


@targets
def test_partial_sums_have_the_bytes_of_their_collectives(target: str) -> None:
    """At the projection up: f32[16, 24, 128] for each layer, an all-reduce or a reduce-scatter over four devices."""
    report = language(target, "both", **FIGHTING)
    up = parts(report, "partial-sums")[step_line("up")]
    whole = 4 * BATCH * LENGTH * audited.HIDDEN // 2
    rounds = 2 if "all-reduce" in up.message else 1
    sent = rounds * whole * 3 // 4 * DEPTH
    assert f": {sent / 1024:,.1f} KiB on the wire per device and step" in up.message
    kind = "all-reduce" if rounds == 2 else "reduce-scatter"
    assert f"{DEPTH} x {kind} over data, largest array f32[{BATCH if rounds == 2 else BATCH // 4},24,128]" in up.message


@targets
def test_gathered_batches_are_warnings(target: str) -> None:
    report = language(target, "both", **FIGHTING)
    (finding, *_) = [finding for finding in report.findings if finding.code == "gathered-batch"]
    assert (finding.severity, finding.axis) == ("warning", "data")
    assert "all-gather over data" in finding.message
    assert re.search(r"largest array (f32|bf16)\[16,24,\d+\]", finding.message)
    assert finding.source.startswith(f"{audited.__file__}:")


def test_findings_cover_all_excess_bytes() -> None:
    """What the report names is as much as what constraints save, and more: it sends less weights."""
    fights, clean = language(CPU, "both", **FIGHTING), language(CPU, "both", split_embedding=True)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    named = 0.0
    for finding in fights.findings:
        if finding.code in ("partial-sums", "gathered-batch", "gathered-activation", "resharding", "gathered"):
            match = re.search(r": ([\d.,]+) (B|KiB|MiB) on the wire", finding.message)
            assert match is not None
            named += float(match[1].replace(",", "")) * units[match[2]]
    extra = fights.wire_bytes - clean.wire_bytes
    assert extra > 1.5 * clean.wire_bytes
    assert 0.95 * extra < named <= fights.wire_bytes


@pytest.mark.parametrize("target", [CPU, TPU])
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
class Program:
    """A function with its arguments and their specs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def audit(self, target: str) -> AuditReport:
        return audit(self.fn, *self.args, in_shardings=self.specs, target=target, **self.options)


@final
@attrs.frozen
class Case:
    """A program with a finding, at one of the marked lines; and twins without problems."""

    program: Program
    code: str
    markers: tuple[str, ...]
    texts: tuple[str, ...]
    """Patterns in the message."""
    twins: tuple[Program, ...] = ()
    axis: str | None = None
    path: str = ""
    severity: str = "warning"


PARAMS = {"up": W, "down": f32(1536, 64)}
ROWS, COLUMNS, BOTH = P("data"), P(None, "model"), P(("data", "model"))
EIGHT = {"axes": "data:8"}
SQUARE = f32(64, 64)
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
        (Program(wide, (W, X), (COLUMNS, ROWS)),),
        axis="model",
    ),
    # Rows are split, and sorted along their columns.
    Case(
        Program(ordered, (W, X), (P(), ROWS), EIGHT),
        "resharding",
        ("sorted",),
        ("all-to-all over data",),
        (Program(ordered, (W, X), (P(None, "data"), P()), {**EIGHT, "roles": WEIGHTS}),),
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
)
MLP = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 8, 128, 2, key=jax.random.key(0)))
TWINS = (
    *(twin for case in CASES for twin in case.twins),
    # Moves that are requested: a weight that a constraint gathers, and constraints at both ends of a move.
    Program(by_constraint, (W, X), (P(None, "data"), ROWS), EIGHT),
    Program(turned, (SQUARE,), (ROWS,)),
    Program(data_parallel, (MLP, X), (P(), ROWS), EIGHT),
    Program(lambda x: (x.sum(), x), (X,), (ROWS,), {"out_shardings": (None, P())}),
    Program(
        with_small_arguments,
        (W, X, f32(48, 1536), jax.random.key(0), f32(), f32(3)),
        (P(), BOTH, BOTH, None, None, None),
        {"roles": ("parameters", *["batch"] * 5)},
    ),
)


@targets
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code} of {case.program.fn.__name__}")
def test_a_finding_has_its_line_axis_and_numbers(case: Case, target: str) -> None:
    finding = only(case.program.audit(target), case.code)
    assert (finding.severity, finding.axis, finding.path) == (case.severity, case.axis, case.path)
    assert finding.source in [line_of(con if marker == "con" else case.program.fn, marker) for marker in case.markers]
    assert all(re.search(text, finding.message) for text in case.texts), finding.message
    assert finding.remedy or finding.severity == "note"


@targets
@pytest.mark.parametrize("program", TWINS, ids=lambda program: program.fn.__name__)
def test_a_twin_has_no_problems(program: Program, target: str) -> None:
    assert program.audit(target).problems == ()


# ---- moves by hand ----


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


@targets
def test_explicit_collectives_are_no_finding(target: str) -> None:
    spec = P("data", "model")
    mapped = jax.shard_map(by_hand, mesh=OWN, in_specs=spec, out_specs=(spec,) * 8 + (P(None, *spec),), check_vma=False)
    mesh_on(target, audited.AXES)
    report = sr.audit(mapped, f32(64, 2048), mesh=OWN, in_shardings=spec, target=target)
    assert report.problems == ()
    assert len(report.collectives) >= 6


@targets
def test_gradients_of_explicit_collectives_are_no_finding(target: str) -> None:
    mapped = jax.shard_map(
        lambda w, x: lax.psum(jnp.tanh(x @ w), "model"),
        mesh=OWN,
        in_specs=(P("model"), P("data", "model")),
        out_specs=P("data"),
    )
    mesh_on(target, audited.AXES)
    grad = jax.grad(lambda w, x: jnp.sum(mapped(w, x) ** 2))
    shardings = (P("model"), P("data", "model"))
    report = sr.audit(grad, f32(64, 128), f32(64, 64), mesh=OWN, in_shardings=shardings, target=target)
    assert report.problems == ()


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


def test_every_part_of_a_batch_is_looked_at() -> None:
    report = audit(
        lambda w, batch: jnp.sum((batch["x"] @ w) ** 2) + batch["y"].sum(),
        W,
        {"x": X, "y": i32(48)},
        in_shardings=(P(), None),
        target=CPU,
    )
    assert [finding.path for finding in report.findings if finding.code == "unsharded-batch"] == ["batch/x", "batch/y"]


def test_arguments_other_than_the_batch_may_be_whole() -> None:
    report = audit(lambda w, x: con(x @ w, "data"), W, X, in_shardings=(P(), P()), roles=WEIGHTS, target=CPU)
    assert "unsharded-batch" not in codes(report)


# ---- work that is done twice ----


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)  # <dense>


@targets
@pytest.mark.parametrize(("spec", "times"), [(P("data"), 2), (P("model"), 4), (P(), 8), (P(("data", "model")), 1)])
def test_repeated_work_is_a_warning(spec: P, times: int, target: str) -> None:
    report = audit(dense, W, X, in_shardings=(P(), spec), target=target)
    assert report.model_flops == 2 * 48 * 64 * 1536
    assert report.flops * 8 == times * report.model_flops
    if times == 1:
        assert "replicated-compute" not in codes(report)
        return
    finding = only(report, "replicated-compute")
    assert (finding.severity, finding.source) == ("warning", line_of(dense, "dense"))
    assert f"{times}.00 times as many" in finding.message


@targets
def test_branches_and_loops_are_not_repeated_work(target: str) -> None:
    def step(flag: Any, w: Any, x: Any) -> Any:
        x = con(lax.cond(flag, lambda: x @ w, lambda: jnp.tanh(x @ w @ w)), ("data", "model"))
        x = lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
        x = lax.while_loop(lambda x: jnp.max(x) > 3, lambda x: jnp.sin(x @ w), x)
        return lax.scan(lambda c, _: (jax.checkpoint(lambda c: jnp.cos(c @ w))(c), None), x, None, length=5)[0]

    args = jax.ShapeDtypeStruct((), bool), f32(64, 64), X
    shardings, roles = (None, P(), P(("data", "model"))), ("batch", "parameters", "batch")
    report = audit(step, *args, in_shardings=shardings, roles=roles, target=target)
    assert "replicated-compute" not in codes(report)


# ---- memory ----


def growing(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) @ w.T)


def small(memory_bytes: int) -> Any:
    return attrs.evolve(sr.Hardware.named("cuda:h100"), name="a small chip", memory_bytes=memory_bytes)


@targets
def test_what_does_not_fit(target: str) -> None:
    """A chip with a byte less than it takes, and one with that byte."""
    options: dict[str, Any] = {"in_shardings": (P(), P(("data", "model"))), "target": target}
    peak = audit(growing, W, X, **options).peak_bytes
    report = audit(growing, W, X, hardware=small(peak - 1), **options)
    finding = only(report, "does-not-fit")
    assert finding.severity == "error"
    assert not report.fits
    assert "a small chip has" in finding.message
    assert "1 B too much" in finding.message
    assert "w 384.0 KiB" in finding.message
    assert finding.remedy
    twin = audit(growing, W, X, hardware=small(peak), **options)
    assert twin.fits
    assert twin.problems == ()


def test_the_largest_share_has_its_remedy() -> None:
    options: dict[str, Any] = {"target": CPU, "hardware": small(1024)}
    weights = audit(lambda w, x: x @ w, f32(64, 4096), X, in_shardings=(P(), P(("data", "model"))), **options)
    finding = only(weights, "does-not-fit")
    assert "Largest share: parameters, 1.0 MiB" in finding.message
    assert "plit the parameters" in finding.remedy
    results = audit(
        lambda w, x: con(x[:, :1] * w[:1], "data"), f32(64, 65536), X, in_shardings=(P(None, "model"), P()), **options
    )
    finding = only(results, "does-not-fit")
    assert (
        "Largest share: outputs, 3.0 MiB" in finding.message or "Largest share: parameters, 8.0 MiB" in finding.message
    )


def test_cpus_have_no_memory_limit() -> None:
    """Its devices share the memory of the machine, which the sheet does not know."""
    report = audit(lambda w, x: x * 2, f32(8), f32(8, 2**20, 2**12), in_shardings=(P(), P("data")), target=CPU)
    assert not report.fits
    assert "does-not-fit" not in codes(report)


@pytest.mark.parametrize("target", [CUDA, TPU])
def test_too_much_for_the_real_chip(target: str) -> None:
    big = f32(8, 2**20, 2**12)  # 16 GiB for each of 8 devices, and as much again for the result

    def double(x: Any) -> Any:
        return x * 2

    options: dict[str, Any] = {"axes": "data:8", "in_shardings": P("data"), "target": target}
    fits, count = {CUDA: (True, 24), TPU: (False, 8)}[target]
    assert audit(double, big, **options).fits is fits
    finding = only(audit(double, f32(count, 2**20, 2**12), **options), "does-not-fit")
    assert f"x {count * 2:,}.0 GiB" in finding.message


@targets
def test_large_closed_over_arrays_are_warnings(target: str) -> None:
    """They are in the program, and in no category of memory."""
    weights = jnp.ones((64, 8192))
    options: dict[str, Any] = {"in_shardings": P(("data", "model")), "target": target}
    finding = only(audit(lambda x: jnp.tanh(x @ weights), X, **options), "closed-over")
    assert finding.severity == "warning"
    assert "2.0 MiB" in finding.message
    assert "float32[64, 8192]" in finding.message
    assert "arguments" in finding.remedy
    little = jnp.ones((64, 8))
    assert audit(lambda x: jnp.tanh(x @ little), X, **options).findings == ()


# ---- donation ----


@targets
def test_unused_donation_is_a_warning(target: str) -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        return w + 1, v.astype(jnp.bfloat16), x.sum()

    args = f32(64, 96), f32(64, 160), X
    shardings = (P("data"), P("data"), P(("data", "model")))
    options: dict[str, Any] = {"in_shardings": shardings, "out_shardings": (P("data"), P("data"), None)}
    report = audit(step, *args, donate_argnums=(0, 1), target=target, **options)
    finding = only(report, "donated-in-vain")
    assert finding.severity == "warning"
    assert "1 donated arrays, 10.0 KiB per device" in finding.message
    assert "dtype and sharding of v" in finding.message
    assert "out_shardings" in finding.remedy
    assert {array.path: array.donated for array in report.arrays if array.role != "result"} == {
        "w": True,
        "v": False,
        "x": False,
    }
    assert "donated-in-vain" not in codes(audit(step, *args, donate_argnums=0, target=target, **options))


# ---- loops ----


@targets
def test_repeated_work_of_equinox_layers_is_a_warning(target: str) -> None:
    model = eqx.filter_eval_shape(lambda: eqx.nn.Linear(64, 1536, key=jax.random.key(0)))
    report = audit(lambda m, x: jax.vmap(m)(x), model, X, in_shardings=(P(), P("data")), target=target)
    assert "2.00 times as many" in only(report, "replicated-compute").message


# ---- warnings of XLA ----


def turned_twice(x: Any) -> Any:
    h = lax.with_sharding_constraint(jnp.sin(x), P("b", "a", "c"))  # <from>
    return lax.with_sharding_constraint(jnp.cos(h), P(("c", "b")))  # <to>


# The compiler for TPUs finds ways where those for CPUs and GPUs find none, or keeps quiet about it.
@pytest.mark.parametrize("target", [CPU, CUDA])
def test_rematerialised_arrays_are_warnings(target: str) -> None:
    report = audit(turned_twice, f32(16, 16, 16), axes="a:2,b:2,c:2", in_shardings=P("b", "a", "c"), target=target)
    finding = only(report, "rematerialised")
    assert finding.severity == "warning"
    assert finding.source in (line_of(turned_twice, "from"), line_of(turned_twice, "to"))
    assert finding.message.startswith("f32[8,8,8] goes from {")
    assert "gather the whole array" in finding.message
    assert "two steps" in finding.remedy

    def stays(x: Any) -> Any:
        h = lax.with_sharding_constraint(jnp.sin(x), P("b", "a", "c"))
        return lax.with_sharding_constraint(jnp.cos(h), P("b", "a"))

    twin = audit(stays, f32(16, 16, 16), axes="a:2,b:2,c:2", in_shardings=P("b", "a", "c"), target=target)
    assert "rematerialised" not in codes(twin)


# ---- findings together ----


@targets
def test_errors_come_first_and_lines_are_the_users(target: str) -> None:
    report = language(target, "both", **FIGHTING)
    order = ["error", "warning", "note"]
    ranks = [order.index(finding.severity) for finding in report.findings]
    assert ranks == sorted(ranks)
    assert all(
        finding.source.startswith(f"{audited.__file__}:")
        for finding in report.problems
        if finding.code != "rematerialised"
    )
    assert all(finding.message and finding.remedy for finding in report.problems)
    text = str(report)
    assert all(finding.code in text for finding in report.problems)


@targets
def test_small_moves_are_notes(target: str) -> None:
    """Moves that send less than a hundredth of all bytes are not warnings."""
    report = language(target, "both", **FIGHTING)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    wire_bytes = re.compile(r": ([\d.,]+) (B|KiB|MiB) on the wire")
    moves = [(finding, wire_bytes.search(finding.message)) for finding in report.findings if finding.code != "fsdp"]
    shares = [
        (finding.severity, float(match[1].replace(",", "")) * units[match[2]] / report.wire_bytes)
        for finding, match in moves
        if match is not None
    ]
    assert all((severity == "warning") is (share >= 0.0099) for severity, share in shares)
    assert {severity for severity, _ in shares} == {"warning", "note"}


def test_a_mesh_and_its_shape_give_equal_findings() -> None:
    def fn(w: Any, x: Any) -> Any:
        return lax.with_sharding_constraint(x @ w, NamedSharding(OWN, P("data", None)))

    report = sr.audit(fn, W, X, mesh=OWN, in_shardings=(P(None, "model"), P("data")), target=CPU)
    other = audit(fn, W, X, in_shardings=(P(None, "model"), P("data")), target=CPU)
    assert report.findings == other.findings
    assert report.problems


@pytest.mark.slow  # JAX 0.12 gives the gather the name of the operation before the call
def test_a_call_back_to_python_is_named() -> None:
    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)  # <callback>

    report = sr.audit(
        step,
        f32(64, 64),
        f32(512, 64),
        mesh=sr.create_mesh("data:8"),
        in_shardings=(P(), P("data")),
        out_shardings=P("data"),
    )
    finding = only(report, "gathered-for-kernel")
    assert "for the Python function of 'pure_callback', which one of 8 devices calls while" in finding.message
    assert finding.remedy == "Call it inside jax.shard_map over data"
    # What comes back from that device is no sum, and no two steps lead there.
    assert not {finding.code for finding in report.findings} & {"partial-sums", "rematerialised"}


@pytest.mark.slow  # JAX 0.12 gives the gather the name of the operation before the call
def test_each_call_back_to_python_has_its_line() -> None:
    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        y = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)  # <first>
        y = jnp.tanh(y @ w)
        return jax.pure_callback(lambda y: 2 * y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    report = sr.audit(
        step,
        f32(64, 64),
        f32(512, 64),
        mesh=sr.create_mesh("data:8"),
        in_shardings=(P(), P("data")),
        out_shardings=P("data"),
    )
    assert only(report, "gathered-for-kernel").source == line_of(step, "first")
