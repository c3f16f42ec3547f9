"""PartitionAxis: what is derived, what a logical axis resolves to, what is refused, and that it is a value.

The logical axes and ready lists of `axes.py` are tested here too.
"""

import copy
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardrules.core.errors import ConfigError, SpecError, UnknownAxisError
from shardrules.presets.eformer import axes as logical_axes
from shardrules.presets.eformer.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DP,
    EMBED,
    EMPTY,
    EP,
    EXPERT,
    EXPERT_GATE,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    MODES,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
    DynamicShardingAxes,
    as_dims,
    as_logical,
)
from shardrules.presets.eformer.partition_axis import PartitionAxis, RegisteredAxis

DIMS = {
    "data_parallel_axis": "dp",
    "fully_sharded_data_parallel_axis": "fsdp",
    "tensor_parallel_axis": "tp",
    "sequence_parallel_axis": "sp",
    "expert_parallel_axis": "ep",
}
DERIVED: dict[str, Any] = {
    "batch_axis": ("fsdp", "dp"),
    **dict.fromkeys(
        ("sequence_axis", "query_sequence_axis", "key_sequence_axis", "generation_key_sequence_axis"), "sp"
    ),
    **dict.fromkeys(("head_axis", "kv_head_axis", "generation_head_axis", "generation_kv_head_axis"), "tp"),
    **dict.fromkeys(("hidden_state_axis", "mlp_intermediate_axis", "vocab_axis"), "tp"),
    "expert_axis": "ep",
}
ATTENTION_DIMS = ("attention_dim_axis", "attention_kv_dim_axis")
BIASES = ("bias_head_sequence_axis", "bias_key_sequence_axis")
NONE = ("expert_gate_axis", *ATTENTION_DIMS, *BIASES, "generation_batch_axis", "generation_query_sequence_axis")
NONE += tuple(f"generation_{name}" for name in ATTENTION_DIMS)
GENERATION = ("batch_axis", "query_sequence_axis", "head_axis", "kv_head_axis", "key_sequence_axis", *ATTENTION_DIMS)
TOKENS: tuple[str, ...] = (
    BATCH,
    LENGTH,
    QUERY_LENGTH,
    KV_LENGTH,
    EMBED,
    HEAD,
    KV_HEAD,
    MLP_INTERMEDIATE,
    VOCAB,
    EXPERT,
    EXPERT_GATE,
)
TOKENS += (HEAD_DIM, KV_HEAD_DIM, BIAS_HEAD_SEQ, BIAS_KV_SEQ)
FIELDS = ("batch_axis", "sequence_axis", "query_sequence_axis", "key_sequence_axis", "hidden_state_axis", "head_axis")
FIELDS += ("kv_head_axis", "mlp_intermediate_axis", "vocab_axis", "expert_axis", "expert_gate_axis", *ATTENTION_DIMS)
FIELDS += BIASES
TOKEN_FIELDS: dict[str, str] = dict(zip((*TOKENS, DP, FSDP, TP, SP, EP), (*FIELDS, *DIMS), strict=True))


def make(**fields: Any) -> PartitionAxis:
    """A PartitionAxis from fields that a test has computed."""
    return PartitionAxis(**fields)


# ---- Fields ----


def test_defaults_follow_the_five_names() -> None:
    paxis = PartitionAxis()
    fields = {name: getattr(paxis, name) for name in (*DIMS, *DERIVED, *NONE)}
    assert fields == {**DIMS, **DERIVED, **dict.fromkeys(NONE)}
    assert paxis.registered == ()
    assert {field.alias for field in attrs.fields(PartitionAxis)} == {*fields, "registered"}
    values = [make(**{name: "mine"}) for name in fields]
    assert len({paxis, *values}) == len(values) + 1  # each makes a difference to equality


def test_a_field_that_is_set_changes_no_other_field() -> None:
    paxis = make(**{name: f"mine_{name}" for name in DERIVED if name != "batch_axis"})
    assert paxis.batch_axis == ("fsdp", "dp")
    for name in DERIVED:
        assert make(**{name: ...}) == PartitionAxis()
        alone = make(**{name: "mine"})
        others = {other: getattr(alone, other) for other in DERIVED if other != name}
        assert others == {other: value for other, value in DERIVED.items() if other != name}


@pytest.mark.parametrize("name", [*DIMS, *(name for name in NONE if name != "generation_batch_axis")])
def test_an_ellipsis_is_refused_where_nothing_is_derived(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is the ellipsis"):
        make(**{name: ...})


@pytest.mark.parametrize(
    ("value", "normal"),
    [
        (["x", "y"], ("x", "y")),
        (("x",), "x"),
        (("x", ("y", "x")), ("x", "y")),
        (("x", None), "x"),
        ((), None),
        (None, None),
    ],
)
def test_axes_are_stored_in_normal_form(value: Any, normal: Any) -> None:
    assert PartitionAxis(head_axis=value).head_axis == normal


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "head_axis takes a mesh axis, a tuple of them, None or ..., got 3"),
        ("", "got ''"),
        (("x", 1), "got 1"),
        (TP, "'__TENSOR_PARALLEL__' is the name of a logical axis"),
        (EMPTY, "'_' is the name of a logical axis"),
    ],
)
def test_fields_take_only_mesh_axes(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        PartitionAxis(head_axis=value)


# ---- The two names of the fields for generation ----


@pytest.mark.parametrize("field", GENERATION)
@pytest.mark.parametrize("value", ["x", ("x", "y"), None])
def test_decode_is_another_name_of_generation(field: str, value: Any) -> None:
    by_alias = make(**{f"decode_{field}": value})
    assert by_alias == make(**{f"generation_{field}": value})
    assert by_alias == make(**{f"generation_{field}": value, f"decode_{field}": value})
    assert getattr(by_alias, f"decode_{field}") == getattr(by_alias, f"generation_{field}") == value


@pytest.mark.parametrize("field", GENERATION)
@pytest.mark.parametrize(("generation", "decode"), [("x", "y"), (None, "y"), ("x", None)])
def test_the_two_names_must_agree(field: str, generation: Any, decode: Any) -> None:
    with pytest.raises(ConfigError, match=f"generation_{field}={generation!r} and decode_{field}={decode!r}"):
        make(**{f"generation_{field}": generation, f"decode_{field}": decode})


def test_spellings_of_a_tuple_agree_and_an_ellipsis_only_with_another() -> None:
    paxis = PartitionAxis(generation_head_axis=["x", "y"], decode_head_axis=("x", "y"))
    assert paxis.generation_head_axis == ("x", "y")
    assert PartitionAxis(generation_head_axis=..., decode_head_axis=...) == PartitionAxis()
    with pytest.raises(ConfigError, match="differ"):
        PartitionAxis(generation_head_axis=..., decode_head_axis="tp")


def test_generation_batch_axis_left_out_differs_from_none() -> None:
    assert PartitionAxis().generation_batch_axis is None
    assert PartitionAxis().decode_batch_axis == ("fsdp", "dp")
    assert PartitionAxis(batch_axis="x").decode_batch_axis == "x"
    assert PartitionAxis().resolve_spec([BATCH], MODE_DECODE) == P(("fsdp", "dp"))
    whole = PartitionAxis(generation_batch_axis=None)
    assert whole.decode_batch_axis is None
    assert whole.resolve_spec([BATCH], MODE_DECODE) == P(None)
    assert whole.resolve_spec([BATCH], MODE_TRAIN) == P(("fsdp", "dp"))
    assert whole != PartitionAxis()
    for name in ("generation_batch_axis", "decode_batch_axis"):
        paxis = make(**{name: ..., "batch_axis": "x"})
        assert (paxis.decode_batch_axis, paxis.generation_batch_axis) == ("x", None)


# ---- Resolution ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", TOKEN_FIELDS)
def test_every_token_reads_its_field(token: str, mode: str) -> None:
    ordinary = {name: f"train_{name}" for name in {**DERIVED, **dict.fromkeys(NONE)} if not name.startswith("gener")}
    paxis = make(**ordinary, **{f"generation_{name}": f"generation_{name}" for name in GENERATION})
    field = TOKEN_FIELDS[token]
    if field in DIMS:
        expected = DIMS[field]
    elif mode in (MODE_DECODE, MODE_INSERT) and field in GENERATION:
        expected = f"generation_{field}"
    else:
        expected = f"train_{field}"
    assert paxis.resolve_axis([token], mode) == [expected]
    assert paxis.resolve_axis([field], mode) == [expected]
    assert paxis.resolve_spec([None, token], mode) == P(None, expected)


@pytest.mark.parametrize(
    ("axes", "mode", "spec"),
    [
        ([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], MODE_TRAIN, P(("fsdp", "dp"), "sp", "tp", None)),
        ([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], MODE_PREFILL, P(("fsdp", "dp"), "sp", "tp", None)),
        ([BATCH, QUERY_LENGTH, EMBED], MODE_DECODE, P(("fsdp", "dp"), None, "tp")),
        ([BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM], MODE_INSERT, P(("fsdp", "dp"), "sp", "tp", None)),
        ([], MODE_TRAIN, P()),
        ([None, EMPTY, HEAD], MODE_TRAIN, P(None, None, "tp")),
        ([[BATCH, SP]], MODE_TRAIN, P(("fsdp", "dp", "sp"))),
        ([[DP, EMPTY]], MODE_TRAIN, P("dp")),
        ([(FSDP, None), ()], MODE_TRAIN, P("fsdp", None)),
        ([(EMPTY, None)], MODE_TRAIN, P(None)),
        ([(FSDP, (BATCH, [DP, "fsdp"]))], MODE_TRAIN, P(("fsdp", "dp"))),
        (["dp", ("tp", FSDP)], MODE_TRAIN, P("dp", ("tp", "fsdp"))),
        (["vocab_axis"], MODE_TRAIN, P("tp")),
    ],
)
def test_resolve_spec(axes: Any, mode: str, spec: P) -> None:
    assert PartitionAxis().resolve_spec(axes, mode) == spec


@pytest.mark.parametrize(
    ("paxis", "axes", "mode", "spec"),
    [
        (PartitionAxis(decode_head_axis=None), [HEAD, KV_LENGTH], MODE_DECODE, P(None, "sp")),
        (PartitionAxis(decode_head_axis=None), [HEAD, KV_LENGTH], MODE_TRAIN, P("tp", "sp")),
        (PartitionAxis(vocab_axis=("pipe", "tp")), ["pipe"], MODE_TRAIN, P("pipe")),  # a mesh axis of any field
        (PartitionAxis(data_parallel_axis=None), [BATCH, (DP, SP)], MODE_TRAIN, P("fsdp", "sp")),
        (PartitionAxis(data_parallel_axis=["replica", "data"]), [BATCH], MODE_TRAIN, P(("fsdp", "replica", "data"))),
        (PartitionAxis(tensor_parallel_axis="m", head_axis=None), [HEAD, VOCAB], MODE_TRAIN, P(None, "m")),
        (PartitionAxis(tensor_parallel_axis="m", head_axis=None), [HEAD], MODE_DECODE, P("m")),
    ],
    ids=str,
)
def test_resolve_spec_of_fields_that_are_set(paxis: PartitionAxis, axes: Any, mode: str, spec: P) -> None:
    assert paxis.resolve_spec(axes, mode) == spec


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("__HEADS__", "(did you mean '__HEAD__'?)"),
        ("HEAD", "(did you mean '__HEAD__'?)"),
        ("batch", "(did you mean '__BATCH__'?)"),
        ("fspd", "(did you mean 'fsdp'?)"),
        ("headz", "(did you mean 'heads'?)"),
        ("zzz", "the mesh axes of this PartitionAxis are 'dp', 'fsdp', 'tp', 'sp', 'ep'"),
    ],
)
def test_an_unknown_name_raises_with_a_suggestion(name: str, hint: str) -> None:
    paxis = PartitionAxis().register("heads", HEAD)
    for axes in ([name], [BATCH, (None, [name])]):
        with pytest.raises(UnknownAxisError, match=re.escape(f"{name!r}") + ".*" + re.escape(hint)):
            paxis.resolve_spec(axes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.resolve_spec(BATCH), "logical axes are a list"),
        (lambda p: p.resolve_spec([3]), "a logical axis is a name, None or a sequence of these, got 3"),
        (lambda p: p.resolve_spec([""]), "got ''"),
        (lambda p: p.resolve_spec([BATCH], "train"), r"unknown runtime mode 'train' \(did you mean '__train__'\?\)"),
        (lambda p: p.resolve_axis([BATCH], None), "unknown runtime mode None"),
        (lambda p: p.as_mapping("decode"), "unknown runtime mode 'decode'"),
        (lambda p: p.resolve_spec([BATCH], 1), "the shape should be provided"),
        (lambda p: p.resolve_spec([BATCH], 1, (3,)), r"dimension 1, which shape \(3,\) does not have"),
        (lambda p: p.resolve_spec([BATCH], -2, (3,)), r"dimension -2, which shape \(3,\) does not have"),
        (lambda p: p.resolve_spec([BATCH, HEAD], MODE_TRAIN, (3,)), r"2 logical axes .* shape \(3,\)"),
        (lambda p: p.register("", "x"), "non-empty name"),
        (lambda p: p.register(EMPTY, "x"), "non-empty name"),
        (lambda p: p.register(3, "x"), "non-empty name"),
        (lambda p: p.register("a", ("x", 3)), "a logical axis is a name, None or a sequence of these"),
        (lambda p: p.register("a", ...), "a logical axis is a name, None or a sequence of these"),
        (lambda p: p.register("a", "__HAED__").resolve_spec("a"), "logical axes are a list"),
        (lambda p: DynamicShardingAxes(BATCH), "logical axes are a list"),
        (lambda p: DynamicShardingAxes((BATCH,), "eval"), "unknown runtime mode"),
        (lambda p: make(registered=[RegisteredAxis("a", "x")] * 2), "registered holds 'a' twice"),
    ],
)
def test_invalid_arguments_raise(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(PartitionAxis())


@pytest.mark.parametrize(
    ("axes", "mode", "pieces"),
    [
        ([HEAD, EMBED], MODE_TRAIN, ["'tp'", "0 ('__HEAD__')", "1 ('__EMBED__')", "head_axis or hidden_state_axis"]),
        ([BATCH, None, (SP, FSDP)], MODE_TRAIN, ["'fsdp'", "0 ('__BATCH__')", "2 ('__FULLY_SHARDED_DATA_PARALLEL__')"]),
        ([HEAD, KV_HEAD], MODE_DECODE, ["'tp'", "generation_head_axis or generation_kv_head_axis", "'__autoreg"]),
        (["tp", "mine"], MODE_TRAIN, ["'tp'", "0 ('tp')", "1 ('mine')", "Write EMPTY"]),
        ([HEAD, HEAD], MODE_TRAIN, ["0 ('__HEAD__') and 1 ('__HEAD__')", "Set head_axis to another"]),
        ([HEAD, EMBED, VOCAB], MODE_TRAIN, ["0 ('__HEAD__') and 1 ('__EMBED__') and 2 ('__VOCAB__')"]),
        ([HEAD, EMBED, BATCH, DP], MODE_TRAIN, ["Mesh axis 'tp'", "Mesh axis 'dp'"]),
    ],
)
def test_an_axis_may_not_split_two_dimensions(axes: Any, mode: str, pieces: list[str]) -> None:
    paxis = PartitionAxis().register("mine", VOCAB)
    with pytest.raises(SpecError, match="".join(f"(?=(?s:.*){re.escape(piece)})" for piece in pieces)):
        paxis.resolve_spec(axes, mode)
    assert len(paxis.resolve_axis(axes, mode)) == len(axes)


@pytest.mark.parametrize(
    ("mode", "shape", "spec"),
    [
        (1, (2, 1, 32), P(("fsdp", "dp"), None, "tp")),
        (1, (2, 8, 32), P(("fsdp", "dp"), "sp", "tp")),
        (-2, (2, 1, 32), P(("fsdp", "dp"), None, "tp")),
        (0, (1, 8, 32), P(("fsdp", "dp"), None, "tp")),
        (MODE_TRAIN, (2, 1, 32), P(("fsdp", "dp"), "sp", "tp")),
        (MODE_DECODE, (2, 8, 32, 5), P(("fsdp", "dp"), None, "tp")),
    ],
)
def test_the_mode_is_read_off_the_shape(mode: str | int, shape: tuple[int, ...], spec: P) -> None:
    assert PartitionAxis().resolve_spec([BATCH, QUERY_LENGTH, EMBED], mode, shape) == spec


def test_the_dimension_that_decides_the_mode_may_share_an_axis() -> None:
    paxis = PartitionAxis(decode_query_sequence_axis="dp")
    assert paxis.resolve_spec([BATCH, QUERY_LENGTH], 1, (2, 1)) == P(("fsdp", "dp"), "dp")
    # A mode by name says nothing about a length, and the other dimensions may share no axis in any mode.
    for axes, mode, shape in [
        ([BATCH, QUERY_LENGTH], MODE_DECODE, (2, 1)),
        ([BATCH, QUERY_LENGTH], MODE_DECODE, None),
        ([BATCH, LENGTH, QUERY_LENGTH], 1, (2, 1, 1)),
    ]:
        with pytest.raises(SpecError, match="Mesh axis 'dp' would split dimensions 0"):
            paxis.resolve_spec(axes, mode, shape)


# ---- Registered axes ----


def test_registering_gives_a_new_value_with_another_hash() -> None:
    before = PartitionAxis()
    after = before.register("stage", "pipe")
    assert before.registered == ()
    assert after.registered == (RegisteredAxis("stage", "pipe"),)
    assert before != after
    assert hash(before) != hash(after)
    assert after.resolve_spec(["stage"]) == P("pipe")
    with pytest.raises(UnknownAxisError, match="'stage'"):
        before.resolve_spec(["stage"])
    # The order of registering makes no difference.
    assert hash(after.register("a", "x")) == hash(before.register("a", "x").register("stage", "pipe"))
    assert after.register("a", "x") == before.register("a", "x").register("stage", "pipe")
    misspelt = after.register("a", "__HAED__")
    with pytest.raises(UnknownAxisError, match=r"'__HAED__' \(did you mean '__HEAD__'\?\), which 'a' is registered as"):
        misspelt.resolve_spec(["a"])


@pytest.mark.parametrize(
    ("axis", "train", "decode"),
    [
        ("pipe", "pipe", "pipe"),
        (HEAD, "tp", "g"),
        ("head_axis", "tp", "g"),
        (QUERY_LENGTH, "sp", None),
        (None, None, None),
        (EMPTY, None, None),
        (["pipe", (HEAD, "pipe")], ("pipe", "tp"), ("pipe", "g")),
        ("alias", "tp", "g"),
    ],
)
def test_a_registered_axis_resolves_in_each_mode(axis: Any, train: Any, decode: Any) -> None:
    paxis = PartitionAxis(generation_head_axis="g").register("mine", axis).register("alias", HEAD)
    assert [paxis.resolve_axis(["mine"], mode) for mode in MODES] == [[train], [train], [decode], [decode]]


@pytest.mark.parametrize("prefix", ["generation", "decode"])
@pytest.mark.parametrize(("field", "axis"), [("head_axis", "g"), ("query_sequence_axis", None), ("batch_axis", "b")])
def test_a_field_of_generation_is_meant_in_every_mode(prefix: str, field: str, axis: Any) -> None:
    paxis = PartitionAxis(generation_head_axis="g", batch_axis="b").register("mine", f"{prefix}_{field}")
    assert [paxis.resolve_axis(["mine"], mode) for mode in MODES] == [[axis]] * 4
    assert f"{prefix}_{field}" not in paxis.mesh_axes
    paxis = PartitionAxis(generation_head_axis="g", batch_axis="b").register("mine", "tp", f"{prefix}_{field}")
    assert [paxis.resolve_axis(["mine"], mode) for mode in (MODE_TRAIN, MODE_DECODE)] == [["tp"], [axis]]
    assert paxis.resolve_spec([f"{prefix}_{field}"]) == P(axis)


@pytest.mark.parametrize("name", ["mine", BATCH, "batch_axis", "decode_batch_axis", "generation_head_axis", "dp"])
def test_override_is_needed_for_a_name_that_exists(name: str) -> None:
    paxis = PartitionAxis().register("mine", HEAD)
    with pytest.raises(ConfigError, match=f"{name!r} already exists and means .*override=True"):
        paxis.register(name, "x")
    assert paxis.register(name, "x", override=True).resolve_spec([name]) == P("x")


@pytest.mark.parametrize(
    ("pairs", "circle"),
    [
        ([("__A__", "__B__"), ("__B__", "__A__")], "'__A__' -> '__B__' -> '__A__'"),
        ([("__A__", "__A__")], "'__A__' -> '__A__'"),
        ([("__A__", ("dp", "b")), ("b", [HEAD, "c"]), ("c", "b")], "'b' -> 'c' -> 'b'"),
    ],
)
def test_cyclic_registrations_raise_when_resolved(pairs: list[tuple[str, Any]], circle: str) -> None:
    paxis = PartitionAxis()
    for name, axis in pairs:
        paxis = paxis.register(name, axis)
    for resolve in (paxis.resolve_spec, paxis.resolve_axis):
        with pytest.raises(ConfigError, match=f"Cyclic semantic axis registration: {circle}"):
            resolve(["__A__"], MODE_TRAIN)
    with pytest.raises(ConfigError, match="Cyclic semantic axis registration"):
        paxis.as_mapping()
    assert paxis.resolve_spec([HEAD]) == P("tp")


def test_what_looks_like_a_cycle_may_be_none() -> None:
    paxis = PartitionAxis().register("a", HEAD).register("b", ("a", "pipe", "a"))
    assert paxis.resolve_spec([("a", "b")]) == P(("tp", "pipe"))
    paxis = PartitionAxis().register("a", "b", "x").register("b", "y", "a")
    assert paxis.resolve_axis(["a", "b"], MODE_TRAIN) == ["y", "y"]
    assert paxis.resolve_axis(["a", "b"], MODE_DECODE) == ["x", "x"]
    assert paxis.mesh_axes == ("dp", "fsdp", "tp", "sp", "ep", "x", "y")


def test_unregister_undoes_register() -> None:
    paxis = PartitionAxis().register("stage", "pipe").register(BATCH, "x", override=True)
    assert paxis.unregister("stage").unregister(BATCH) == PartitionAxis()
    assert paxis.unregister("stag", missing_ok=True) == paxis
    with pytest.raises(UnknownAxisError, match=r"registered as 'stag' \(did you mean 'stage'\?\)"):
        paxis.unregister("stag")
    with pytest.raises(UnknownAxisError, match="Nothing is registered"):
        PartitionAxis().unregister("stage")


# ---- As a mapping ----


@pytest.mark.parametrize("mode", MODES)
def test_the_mapping_agrees_with_resolve_axis(mode: str) -> None:
    paxis = PartitionAxis(head_axis=None, decode_batch_axis="x").register("mlp", MLP_INTERMEDIATE)
    paxis = paxis.register(BATCH, "x", override=True)
    mapping = paxis.as_mapping(mode)
    names = [name for name, _ in mapping]
    assert names == [*TOKEN_FIELDS, EMPTY, "mlp"]  # an overridden one occurs once
    assert [axis for _, axis in mapping] == paxis.resolve_axis(names, mode)
    hash(mapping)


# ---- A value ----

AXES = st.sampled_from(["x", "y", "z", "dp", "tp"])
VALUES = st.one_of(st.none(), AXES, st.lists(AXES, max_size=3).map(tuple))
WORDS = st.sampled_from([*TOKEN_FIELDS, EMPTY, None, "dp", "tp"])
ENTRIES = st.recursive(WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@st.composite
def partition_axes(draw: st.DrawFn) -> PartitionAxis:
    fields = draw(st.dictionaries(st.sampled_from([*DIMS, *DERIVED, *NONE]), VALUES, max_size=8))
    paxis = make(**fields)
    for name, axis in draw(st.dictionaries(st.sampled_from(["a", "b", HEAD]), ENTRIES, max_size=3)).items():
        generation = draw(st.one_of(st.just(...), ENTRIES))
        paxis = paxis.register(name, axis if name != HEAD else "x", generation if name != HEAD else ..., override=True)
    return paxis


@given(partition_axes())
def test_it_is_a_value(paxis: PartitionAxis) -> None:
    for twin in (
        eval(repr(paxis)),
        pickle.loads(pickle.dumps(paxis)),
        copy.deepcopy(paxis),
        attrs.evolve(paxis),
        paxis.replace(),
    ):
        assert twin == paxis
        assert hash(twin) == hash(paxis)
        assert repr(twin) == repr(paxis)
        assert twin.as_mapping(MODE_DECODE) == paxis.as_mapping(MODE_DECODE)


@given(partition_axes(), st.lists(ENTRIES, max_size=4), st.sampled_from(MODES))
def test_a_spec_never_names_an_axis_twice(paxis: PartitionAxis, axes: Any, mode: str) -> None:
    try:
        resolved = paxis.resolve_axis(axes, mode)
    except UnknownAxisError as error:
        message = str(error)
        resolved = None
    else:
        message = ""
    if resolved is None:  # an unknown name is the only reason to refuse
        assert any(f"name: {word!r}" in message for word in ("dp", "tp") if word not in paxis.mesh_axes)
        return
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in resolved]
    names = [name for entry in entries for name in entry]
    if len(dict.fromkeys(names)) == len(names):
        spec = paxis.resolve_spec(axes, mode)
        assert len(spec) == len(axes)
        assert set(names) <= set(paxis.mesh_axes)
    else:
        with pytest.raises(SpecError, match="would split dimensions"):
            paxis.resolve_spec(axes, mode)


def test_the_repr_is_the_shortest_call() -> None:
    assert repr(PartitionAxis()) == "PartitionAxis()"
    assert repr(PartitionAxis(vocab_axis="tp", head_axis=...)) == "PartitionAxis()"
    assert repr(PartitionAxis(decode_head_axis=None)) == "PartitionAxis(generation_head_axis=None)"
    paxis = PartitionAxis(tensor_parallel_axis="m").register("stage", "pipe")
    entry = "RegisteredAxis(name='stage', axis='pipe', generation_axis=Ellipsis)"
    assert repr(paxis) == f"PartitionAxis(tensor_parallel_axis='m', registered=({entry},))"


def test_it_cannot_be_changed() -> None:
    paxis = PartitionAxis()
    for name in ("head_axis", "generation_batch_axis", "decode_head_axis", "something"):
        with pytest.raises(AttributeError):  # noqa: PT011 — attrs, property and slots word it differently
            setattr(paxis, name, "x")


def test_replace_derives_again_and_evolve_does_not() -> None:
    paxis = PartitionAxis(head_axis=None, batch_axis="b").register("heads", HEAD)
    replaced = paxis.replace(tensor_parallel_axis="m", decode_query_sequence_axis="q")
    assert replaced == PartitionAxis(
        tensor_parallel_axis="m", head_axis=None, batch_axis="b", generation_query_sequence_axis="q"
    ).register("heads", HEAD)
    assert replaced.replace(decode_query_sequence_axis="r").generation_query_sequence_axis == "r"
    assert replaced.replace(generation_query_sequence_axis="r").decode_query_sequence_axis == "r"
    assert attrs.evolve(paxis, tensor_parallel_axis="m").vocab_axis == "tp"


# ---- Logical axes ----


READY = {
    "HiddenStateSharding": ((BATCH, QUERY_LENGTH, EMBED), 1),
    "AttnQSharding": ((BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), 1),
    "AttnKVSharding": ((BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM), 1),
    "Replicated": ((EMPTY,), MODE_TRAIN),
    "ColumnWise": (((FSDP, SP), TP), MODE_TRAIN),
    "RowWise": ((TP, (FSDP, SP)), MODE_TRAIN),
    "SColumnWise": (((FSDP, SP),), MODE_TRAIN),
    "SRowWise": ((TP,), MODE_TRAIN),
    "ExpertColumnWise": ((EP, FSDP, TP), MODE_TRAIN),
    "ExpertRowWise": ((EP, TP, FSDP), MODE_TRAIN),
    "ExpertColumnWiseAlt": ((EP, (FSDP, SP), TP), MODE_TRAIN),
    "ExpertRowWiseAlt": ((EP, TP, (FSDP, SP)), MODE_TRAIN),
    "UnifiedExpertColumnWise": (((FSDP, SP, EP), EMPTY, TP), MODE_TRAIN),
    "UnifiedExpertRowWise": (((FSDP, SP, EP), TP, EMPTY), MODE_TRAIN),
    "ExpertTensorParallel": ((TP, EMPTY, EMPTY), MODE_TRAIN),
    "ExpertActivations": ((DP, SP, EP, TP), MODE_TRAIN),
    "ExpertActivationsAlt": ((DP, SP, (TP, FSDP)), MODE_TRAIN),
}


def test_the_axes_of_the_ready_lists() -> None:
    ready = {name: value for name, value in vars(logical_axes).items() if isinstance(value, DynamicShardingAxes)}
    assert {name: (value.axes, value.mode) for name, value in ready.items()} == READY


def test_lists_of_axes_are_normalised() -> None:
    axes = DynamicShardingAxes([BATCH, [FSDP, SP]], mode=-1)  # pyright: ignore[reportArgumentType]
    assert axes.axes == (BATCH, (FSDP, SP))
    assert eval(repr(axes)) == axes
    assert hash(axes) == hash(pickle.loads(pickle.dumps(axes)))
    assert as_logical([["a"], None]) == (("a",), None)
    assert as_dims(["a", None]) == ("a", None)


def test_an_unknown_argument_suggests_a_known_one() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'batch_axes' \(did you mean 'batch_axis'\?\)"):
        PartitionAxis(batch_axes="x")  # pyright: ignore[reportArgumentType]


def test_the_signature_lists_all_arguments_with_their_defaults() -> None:
    parameters = inspect.signature(PartitionAxis).parameters
    assert set(parameters) == {*DIMS, *DERIVED, *NONE, *(f"decode_{name}" for name in GENERATION), "registered"}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["tensor_parallel_axis"].default == "tp"
    assert parameters["head_axis"].default is ...
    assert parameters["generation_head_axis"].default is parameters["decode_batch_axis"].default is ...
    assert (
        parameters["decode_query_sequence_axis"].default is parameters["generation_attention_dim_axis"].default is None
    )
    assert str(parameters["decode_head_axis"]) == "decode_head_axis: 'FieldAxis' = Ellipsis"
    assert PartitionAxis(**{name: parameter.default for name, parameter in parameters.items()}) == PartitionAxis()
    assert "generation_kv_head_axis" in pydoc.render_doc(PartitionAxis).partition("Says which")[0]
