"""Which mesh axis splits which kind of dimension: one value that configures a whole family of models.

A `PartitionAxis` starts from five names, one for each kind of parallelism, and derives from them which mesh axis splits
the batch, the sequence, the heads and so on. Any of it can be said outright. Model code then speaks of logical axes,
and `resolve_spec` answers with a PartitionSpec; `as_mapping` gives the same knowledge to the rule engine.

It is a plain value. Registering a logical axis of one's own gives a *new* value with another hash, so that nothing that
was compiled for the old one is mistaken for the new.
"""

import enum
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Final, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, axis_tuple
from shardrules.core.errors import SpecError, UnknownAxisError, suggest
from shardrules.rules.logical.axes import (
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
    GENERATION_MODES,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    MODE_DECODE,
    MODE_TRAIN,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
    LogicalAxis,
    as_dims,
    as_logical,
    check_mode,
)


@final
class _Unset(enum.Enum):
    """Tells an argument that was left out from an explicit `None` and from an explicit `...`."""

    UNSET = enum.auto()

    def __repr__(self) -> str:
        return self.name


_UNSET: Final = _Unset.UNSET

GivenAxis: TypeAlias = str | Sequence[Any] | EllipsisType | None
"""What a field takes: a mesh axis, a sequence of them, `None` for none, `...` for the derived one."""

_Maybe: TypeAlias = GivenAxis | _Unset

GenerationAxis: TypeAlias = "LogicalAxis | EllipsisType"
"""What a registered axis stands for in generation: a logical axis, or `...` for the same as in training."""

_MESH_FIELDS: Final = {
    DP: "data_parallel_axis",
    FSDP: "fully_sharded_data_parallel_axis",
    TP: "tensor_parallel_axis",
    SP: "sequence_parallel_axis",
    EP: "expert_parallel_axis",
}

_FIELDS: Final = {
    BATCH: "batch_axis",
    LENGTH: "sequence_axis",
    QUERY_LENGTH: "query_sequence_axis",
    KV_LENGTH: "key_sequence_axis",
    EMBED: "hidden_state_axis",
    HEAD: "head_axis",
    KV_HEAD: "kv_head_axis",
    MLP_INTERMEDIATE: "mlp_intermediate_axis",
    VOCAB: "vocab_axis",
    EXPERT: "expert_axis",
    EXPERT_GATE: "expert_gate_axis",
    HEAD_DIM: "attention_dim_axis",
    KV_HEAD_DIM: "attention_kv_dim_axis",
    BIAS_HEAD_SEQ: "bias_head_sequence_axis",
    BIAS_KV_SEQ: "bias_key_sequence_axis",
    **_MESH_FIELDS,
}

# The fields that have a partner for generation: `batch_axis` has `generation_batch_axis`, alias `decode_batch_axis`.
_GENERATION_FIELDS: Final = (
    "batch_axis",
    "query_sequence_axis",
    "head_axis",
    "kv_head_axis",
    "key_sequence_axis",
    "attention_dim_axis",
    "attention_kv_dim_axis",
)


def _is_word(name: str) -> bool:
    """Whether `name` has the form of a logical axis, `__NAME__` or `_`, so that it cannot mean a mesh axis."""
    return name == EMPTY or (len(name) > 4 and name.startswith("__") and name.endswith("__"))


def _names(field: str, value: object) -> tuple[str, ...]:
    """The mesh axes in `value`, flat and each once."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(name for part in value for name in _names(field, part)))
    if not isinstance(value, str) or not value:
        raise SpecError(f"PartitionAxis: {field} takes a mesh axis, a tuple of them, None or ..., got {value!r}")
    if _is_word(value):
        raise SpecError(f"PartitionAxis: {field} takes axes of the mesh; {value!r} is the name of a logical axis")
    return (value,)


def _as_entry(names: Sequence[str]) -> Axis | None:
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def _axis(field: str, value: _Maybe, derived: Axis | EllipsisType | None = ...) -> Axis | None:
    """The normal form of what was given for `field`; `derived` is what `...` stands for, if for anything."""
    if value is _UNSET:
        return None if derived is ... else derived
    if value is not ...:
        return _as_entry(_names(field, value))
    if derived is ...:
        raise SpecError(
            f"PartitionAxis: {field} is the ellipsis, which asks to derive it, and there is nothing to derive it "
            "from. Give a mesh axis, a tuple of mesh axes, or None"
        )
    return derived


def _either(field: str, generation: _Maybe, decode: _Maybe) -> _Maybe:
    """What was given for a field that has two names."""
    if decode is _UNSET or generation is _UNSET:
        return generation if decode is _UNSET else decode
    if ... in (generation, decode):
        agree = generation is decode
    else:
        agree = _names(f"generation_{field}", generation) == _names(f"decode_{field}", decode)
    if not agree:
        raise SpecError(
            f"PartitionAxis: generation_{field}={generation!r} and decode_{field}={decode!r} are two names of one "
            "field and differ. Give one of them"
        )
    return generation


def _as_generation(axis: object) -> GenerationAxis:
    return axis if axis is ... else as_logical(axis)


def _as_name(name: object) -> str:
    if not isinstance(name, str) or not name or name == EMPTY:
        raise SpecError(f"a logical axis is registered under a non-empty name other than {EMPTY!r}, got {name!r}")
    return name


@final
@attrs.frozen
class RegisteredAxis:
    """A logical axis of one's own, as a `PartitionAxis` keeps it.

    **Arguments:**

    - `name`: what model code calls it.
    - `axis`: what it stands for: a mesh axis, another logical axis, the name of a field (`"batch_axis"`), `None`, or a
      sequence of such.
    - `generation_axis`: the same for the modes of generation. `...` means as `axis`; `None` means not split.

    ```python
    from shardrules.presets import eformer

    assert eformer.RegisteredAxis("stage", "pipe").generation_axis is ...
    ```
    """

    name: str = attrs.field(converter=_as_name)
    axis: LogicalAxis = attrs.field(converter=as_logical)
    generation_axis: GenerationAxis = attrs.field(default=..., converter=_as_generation)


def _as_registered(entries: Sequence[RegisteredAxis]) -> tuple[RegisteredAxis, ...]:
    # Sorted, so that the order in which axes were registered makes no difference to equality.
    found = tuple(sorted(entries, key=lambda entry: entry.name))
    names = [entry.name for entry in found]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise SpecError(f"PartitionAxis: registered holds {twice[0]!r} twice")
    return found


def _runtime_mode(mode: str | int, shape: Sequence[int] | None) -> tuple[str, int | None]:
    """The mode by name, and the dimension of length 1 that decided on decoding, if one did."""
    if not isinstance(mode, int):
        return check_mode(mode), None
    if shape is None:
        raise SpecError(
            f"mode {mode} reads the mode off the length of dimension {mode}, so the shape should be provided: pass "
            "shape=x.shape, or name the mode"
        )
    if not -len(shape) <= mode < len(shape):
        raise SpecError(f"mode {mode} reads the length of dimension {mode}, which shape {tuple(shape)} does not have")
    return (MODE_DECODE, mode % len(shape)) if shape[mode] == 1 else (MODE_TRAIN, None)


@final
@attrs.frozen
class PartitionAxis:
    """Says which mesh axis splits which logical axis, in training and in generation.

    Five names come first, one for each kind of parallelism. The other fields follow from them unless they are given.
    A field takes a mesh axis, a tuple of mesh axes, `None` (never split) or `...` (derive it, the default).

    **Arguments:**

    - `data_parallel_axis`, `fully_sharded_data_parallel_axis`, `tensor_parallel_axis`, `sequence_parallel_axis`,
      `expert_parallel_axis`: the mesh axes `"dp"`, `"fsdp"`, `"tp"`, `"sp"`, `"ep"`. `None` where the mesh has none.
    - `batch_axis`: derived as the fully sharded axis, then the data parallel one.
    - `sequence_axis`, `query_sequence_axis`, `key_sequence_axis`: derived as the sequence parallel axis.
    - `head_axis`, `kv_head_axis`, `hidden_state_axis`, `mlp_intermediate_axis`, `vocab_axis`: derived as the tensor
      parallel axis.
    - `expert_axis`: derived as the expert parallel axis.
    - `expert_gate_axis`, `attention_dim_axis`, `attention_kv_dim_axis`, `bias_head_sequence_axis`,
      `bias_key_sequence_axis`: `None`.
    - `generation_head_axis`, `generation_kv_head_axis`: in generation; derived as the tensor parallel axis, whatever
      `head_axis` says.
    - `generation_key_sequence_axis`: in generation; derived as the sequence parallel axis.
    - `generation_query_sequence_axis`, `generation_attention_dim_axis`, `generation_attention_kv_dim_axis`: in
      generation; `None`, which is not split.
    - `generation_batch_axis`: in generation. Left out, it reads as `None` and batches are split as `batch_axis` says;
      an explicit `None` means that they are not split.
    - `decode_*`: other names of the seven `generation_*` fields.
    - `registered`: logical axes of one's own; `register` adds one.

    **Raises:**

    `SpecError` when `...` is given for a field that nothing derives, when a field is given under both its names and
    they differ, and for values that are no axes.

    `attrs.evolve` keeps what was derived before; `replace` derives it anew.

    ```python
    from shardrules.presets import eformer

    paxis = eformer.PartitionAxis(tensor_parallel_axis="model", head_axis=None)
    assert paxis.batch_axis == ("fsdp", "dp")
    assert paxis.vocab_axis == "model" and paxis.head_axis is None
    assert paxis.resolve_spec([eformer.BATCH, eformer.QUERY_LENGTH, eformer.EMBED]) == P(("fsdp", "dp"), "sp", "model")
    ```
    """

    data_parallel_axis: Axis | None
    fully_sharded_data_parallel_axis: Axis | None
    tensor_parallel_axis: Axis | None
    sequence_parallel_axis: Axis | None
    expert_parallel_axis: Axis | None
    batch_axis: Axis | None
    sequence_axis: Axis | None
    query_sequence_axis: Axis | None
    head_axis: Axis | None
    kv_head_axis: Axis | None
    key_sequence_axis: Axis | None
    hidden_state_axis: Axis | None
    mlp_intermediate_axis: Axis | None
    vocab_axis: Axis | None
    expert_axis: Axis | None
    expert_gate_axis: Axis | None
    attention_dim_axis: Axis | None
    attention_kv_dim_axis: Axis | None
    bias_head_sequence_axis: Axis | None
    bias_key_sequence_axis: Axis | None
    # Kept as given: left out it reads as None, yet resolves to `batch_axis`, and an explicit None must not.
    _generation_batch_axis: Axis | EllipsisType | None
    generation_query_sequence_axis: Axis | None
    generation_head_axis: Axis | None
    generation_kv_head_axis: Axis | None
    generation_key_sequence_axis: Axis | None
    generation_attention_dim_axis: Axis | None
    generation_attention_kv_dim_axis: Axis | None
    registered: tuple[RegisteredAxis, ...]

    # attrs writes this one when a class has an `__init__` of its own.
    __attrs_init__: ClassVar[Callable[..., None]]

    def __init__(
        self,
        *,
        data_parallel_axis: GivenAxis = "dp",
        fully_sharded_data_parallel_axis: GivenAxis = "fsdp",
        tensor_parallel_axis: GivenAxis = "tp",
        sequence_parallel_axis: GivenAxis = "sp",
        expert_parallel_axis: GivenAxis = "ep",
        batch_axis: GivenAxis = ...,
        sequence_axis: GivenAxis = ...,
        query_sequence_axis: GivenAxis = ...,
        head_axis: GivenAxis = ...,
        kv_head_axis: GivenAxis = ...,
        key_sequence_axis: GivenAxis = ...,
        hidden_state_axis: GivenAxis = ...,
        mlp_intermediate_axis: GivenAxis = ...,
        vocab_axis: GivenAxis = ...,
        expert_axis: GivenAxis = ...,
        expert_gate_axis: GivenAxis = None,
        attention_dim_axis: GivenAxis = None,
        attention_kv_dim_axis: GivenAxis = None,
        bias_head_sequence_axis: GivenAxis = None,
        bias_key_sequence_axis: GivenAxis = None,
        generation_batch_axis: _Maybe = _UNSET,
        generation_query_sequence_axis: _Maybe = _UNSET,
        generation_head_axis: _Maybe = _UNSET,
        generation_kv_head_axis: _Maybe = _UNSET,
        generation_key_sequence_axis: _Maybe = _UNSET,
        generation_attention_dim_axis: _Maybe = _UNSET,
        generation_attention_kv_dim_axis: _Maybe = _UNSET,
        decode_batch_axis: _Maybe = _UNSET,
        decode_query_sequence_axis: _Maybe = _UNSET,
        decode_head_axis: _Maybe = _UNSET,
        decode_kv_head_axis: _Maybe = _UNSET,
        decode_key_sequence_axis: _Maybe = _UNSET,
        decode_attention_dim_axis: _Maybe = _UNSET,
        decode_attention_kv_dim_axis: _Maybe = _UNSET,
        registered: Sequence[RegisteredAxis] = (),
    ) -> None:
        dp = _axis("data_parallel_axis", data_parallel_axis)
        fsdp = _axis("fully_sharded_data_parallel_axis", fully_sharded_data_parallel_axis)
        tp = _axis("tensor_parallel_axis", tensor_parallel_axis)
        sp = _axis("sequence_parallel_axis", sequence_parallel_axis)
        ep = _axis("expert_parallel_axis", expert_parallel_axis)
        batch = _either("batch_axis", generation_batch_axis, decode_batch_axis)
        query = _either("query_sequence_axis", generation_query_sequence_axis, decode_query_sequence_axis)
        head = _either("head_axis", generation_head_axis, decode_head_axis)
        kv_head = _either("kv_head_axis", generation_kv_head_axis, decode_kv_head_axis)
        key = _either("key_sequence_axis", generation_key_sequence_axis, decode_key_sequence_axis)
        dim = _either("attention_dim_axis", generation_attention_dim_axis, decode_attention_dim_axis)
        kv_dim = _either("attention_kv_dim_axis", generation_attention_kv_dim_axis, decode_attention_kv_dim_axis)
        self.__attrs_init__(
            data_parallel_axis=dp,
            fully_sharded_data_parallel_axis=fsdp,
            tensor_parallel_axis=tp,
            sequence_parallel_axis=sp,
            expert_parallel_axis=ep,
            batch_axis=_axis("batch_axis", batch_axis, _as_entry(_names("batch_axis", (fsdp, dp)))),
            sequence_axis=_axis("sequence_axis", sequence_axis, sp),
            query_sequence_axis=_axis("query_sequence_axis", query_sequence_axis, sp),
            head_axis=_axis("head_axis", head_axis, tp),
            kv_head_axis=_axis("kv_head_axis", kv_head_axis, tp),
            key_sequence_axis=_axis("key_sequence_axis", key_sequence_axis, sp),
            hidden_state_axis=_axis("hidden_state_axis", hidden_state_axis, tp),
            mlp_intermediate_axis=_axis("mlp_intermediate_axis", mlp_intermediate_axis, tp),
            vocab_axis=_axis("vocab_axis", vocab_axis, tp),
            expert_axis=_axis("expert_axis", expert_axis, ep),
            expert_gate_axis=_axis("expert_gate_axis", expert_gate_axis),
            attention_dim_axis=_axis("attention_dim_axis", attention_dim_axis),
            attention_kv_dim_axis=_axis("attention_kv_dim_axis", attention_kv_dim_axis),
            bias_head_sequence_axis=_axis("bias_head_sequence_axis", bias_head_sequence_axis),
            bias_key_sequence_axis=_axis("bias_key_sequence_axis", bias_key_sequence_axis),
            generation_batch_axis=... if batch in (_UNSET, ...) else _axis("generation_batch_axis", batch),
            generation_query_sequence_axis=_axis("generation_query_sequence_axis", query),
            generation_head_axis=_axis("generation_head_axis", head, tp),
            generation_kv_head_axis=_axis("generation_kv_head_axis", kv_head, tp),
            generation_key_sequence_axis=_axis("generation_key_sequence_axis", key, sp),
            generation_attention_dim_axis=_axis("generation_attention_dim_axis", dim),
            generation_attention_kv_dim_axis=_axis("generation_attention_kv_dim_axis", kv_dim),
            registered=_as_registered(registered),
        )

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given().items())
        return f"{type(self).__name__}({given})"

    def _given(self) -> dict[str, Any]:
        """The arguments that build this value, without those that would be derived anyway."""
        dims = {field: getattr(self, field) for field in _MESH_FIELDS.values()}
        plain, derived = PartitionAxis(), PartitionAxis(**dims)
        return {
            field.alias: getattr(self, field.name)
            for field in attrs.fields(PartitionAxis)
            if getattr(self, field.name) != getattr(plain if field.name in dims else derived, field.name)
        }

    @property
    def generation_batch_axis(self) -> Axis | None:
        """The axis of batches in generation as it was given; `None` also where it was left out.

        `decode_batch_axis` is what batches are split over.
        """
        return None if self._generation_batch_axis is ... else self._generation_batch_axis

    @property
    def decode_batch_axis(self) -> Axis | None:
        """The axis that splits batches in generation: `batch_axis` where `generation_batch_axis` was left out."""
        return self.batch_axis if self._generation_batch_axis is ... else self._generation_batch_axis

    @property
    def decode_query_sequence_axis(self) -> Axis | None:
        """Another name of `generation_query_sequence_axis`."""
        return self.generation_query_sequence_axis

    @property
    def decode_head_axis(self) -> Axis | None:
        """Another name of `generation_head_axis`."""
        return self.generation_head_axis

    @property
    def decode_kv_head_axis(self) -> Axis | None:
        """Another name of `generation_kv_head_axis`."""
        return self.generation_kv_head_axis

    @property
    def decode_key_sequence_axis(self) -> Axis | None:
        """Another name of `generation_key_sequence_axis`."""
        return self.generation_key_sequence_axis

    @property
    def decode_attention_dim_axis(self) -> Axis | None:
        """Another name of `generation_attention_dim_axis`."""
        return self.generation_attention_dim_axis

    @property
    def decode_attention_kv_dim_axis(self) -> Axis | None:
        """Another name of `generation_attention_kv_dim_axis`."""
        return self.generation_attention_kv_dim_axis

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that this configuration speaks of, in the order of the fields.

        ```python
        from shardrules.presets import eformer

        assert eformer.PartitionAxis(vocab_axis="pipe").mesh_axes == ("dp", "fsdp", "tp", "sp", "ep", "pipe")
        ```
        """
        taken = (*_FIELDS, *_FIELDS.values(), *(entry.name for entry in self.registered))
        literals = [name for entry in self.registered for name in (*_flat(entry.axis), *_flat(entry.generation_axis))]
        own = (name for name in literals if name not in taken and not _is_word(name))
        return tuple(dict.fromkeys((*self._field_axes(), *own)))

    def _field_axes(self) -> tuple[str, ...]:
        values = (getattr(self, field.name) for field in attrs.fields(PartitionAxis) if field.name != "registered")
        return tuple(dict.fromkeys(name for value in values if value not in (None, ...) for name in axis_tuple(value)))

    def replace(self, **changes: Any) -> "PartitionAxis":
        """Returns a copy with some fields changed, and what follows from them derived anew.

        A field whose value is the derived one counts as derived.

        **Arguments:**

        - `changes`: fields and their new values, as the constructor takes them.

        **Returns:**

        A new `PartitionAxis`.

        **Raises:**

        As the constructor does.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis(head_axis=None).replace(tensor_parallel_axis="model")
        assert paxis.vocab_axis == "model" and paxis.head_axis is None
        ```
        """
        given = self._given()
        for field in _GENERATION_FIELDS:
            if f"decode_{field}" in changes:
                given.pop(f"generation_{field}", None)
        return PartitionAxis(**{**given, **changes})

    def register(
        self,
        name: str,
        axis: LogicalAxis,
        generation_axis: GenerationAxis = ...,
        *,
        override: bool = False,
    ) -> "PartitionAxis":
        """Returns a copy that knows one more logical axis. This value stays as it is.

        **Arguments:**

        - `name`: what model code will call it.
        - `axis`: what it stands for: a mesh axis, a logical axis, the name of a field, `None`, or a sequence of such.
          What is none of the others is a mesh axis. A name that is registered later may be used already.
        - `generation_axis`: the same for `MODE_DECODE` and `MODE_INSERT`. By default as `axis`, so that an alias of
          `HEAD` follows `generation_head_axis` there; `None` means not split.
        - `override`: allows a name that means something already.

        **Returns:**

        A new `PartitionAxis`.

        **Raises:**

        `SpecError` for a name that is taken, unless `override` is set.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis().register("patches", eformer.QUERY_LENGTH)
        paxis = paxis.register("stage", "pipe", generation_axis=None)
        assert paxis.resolve_spec(["stage", "patches"]) == P("pipe", "sp")
        assert paxis.resolve_spec(["stage", "patches"], eformer.MODE_DECODE) == P(None, None)
        ```
        """
        entry = RegisteredAxis(name, axis, generation_axis)
        others = tuple(other for other in self.registered if other.name != name)
        taken = len(others) < len(self.registered) or name in (*_FIELDS, *_FIELDS.values(), *self._field_axes())
        if taken and not override:
            meaning = _as_entry(self._expand(name, MODE_TRAIN))
            raise SpecError(f"{name!r} already exists and stands for {meaning!r}. override=True gives it a new meaning")
        return attrs.evolve(self, registered=(*others, entry))

    def unregister(self, name: str, *, missing_ok: bool = False) -> "PartitionAxis":
        """Returns a copy without the logical axis that was registered as `name`.

        **Arguments:**

        - `name`: the name it was registered under.
        - `missing_ok`: whether to let a name pass that nothing was registered under.

        **Returns:**

        A new `PartitionAxis`.

        **Raises:**

        `UnknownAxisError` when nothing was registered under `name`, unless `missing_ok` is set.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis()
        assert paxis.register("stage", "pipe").unregister("stage") == paxis
        ```
        """
        names = [entry.name for entry in self.registered]
        if name not in names and not missing_ok:
            known = f"Registered are: {', '.join(names)}" if names else "Nothing is registered"
            raise UnknownAxisError(f"no logical axis is registered as {name!r}{suggest(name, names)}. {known}")
        return attrs.evolve(self, registered=tuple(entry for entry in self.registered if entry.name != name))

    def resolve_axis(self, axes: Sequence[LogicalAxis], mode: str = MODE_TRAIN) -> list[Axis | None]:
        """Returns the mesh axes of each logical axis, one by one: an axis may appear more than once in the list.

        **Arguments:**

        - `axes`: logical axes, registered ones, mesh axes, field names, `None` or `EMPTY`, or sequences of such.
        - `mode`: the runtime mode.

        **Returns:**

        For each: a mesh axis, a tuple of them, or `None`.

        **Raises:**

        `UnknownAxisError` for a name that means nothing here; `SpecError` for registrations that go in a circle.

        ```python
        from shardrules.presets import eformer

        axes = eformer.PartitionAxis().resolve_axis([eformer.BATCH, eformer.HEAD, eformer.VOCAB])
        assert axes == [("fsdp", "dp"), "tp", "tp"]
        ```
        """
        check_mode(mode)
        return [_as_entry(self._expand(axis, mode)) for axis in as_dims(axes)]

    def resolve_spec(
        self,
        axes: Sequence[LogicalAxis],
        mode: str | int = MODE_TRAIN,
        shape: Sequence[int] | None = None,
    ) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions are these logical axes.

        **Arguments:**

        - `axes`: one for each dimension: a logical axis, a registered one, a mesh axis, a field name, `None` or
          `EMPTY`; or a sequence of such, which is flattened, each mesh axis once.
        - `mode`: the runtime mode; or a dimension, as an int: decoding where it has length 1, else training.
        - `shape`: the shape of the array. An int `mode` needs it.

        **Returns:**

        A PartitionSpec with an entry for each of `axes`.

        **Raises:**

        `UnknownAxisError` for a name that means nothing here. `SpecError` when one mesh axis would split two
        dimensions, when there are more axes than dimensions, and for registrations that go in a circle. The dimension
        of length 1 that an int `mode` has looked at may share an axis with another one: nothing can be split there,
        and fitting the spec to the shape drops it.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis()
        hidden = [eformer.BATCH, eformer.QUERY_LENGTH, eformer.EMBED]
        assert paxis.resolve_spec(hidden) == P(("fsdp", "dp"), "sp", "tp")
        assert paxis.resolve_spec(hidden, eformer.MODE_DECODE) == P(("fsdp", "dp"), None, "tp")
        ```
        """
        wanted = as_dims(axes)
        name, single = _runtime_mode(mode, shape)
        if shape is not None and len(wanted) > len(shape):
            raise SpecError(f"{len(wanted)} logical axes {wanted!r} for an array of shape {tuple(shape)}")
        entries = [self._expand(axis, name) for axis in wanted]
        dims_of: dict[str, list[int]] = {}
        for dim, entry in enumerate(entries):
            for axis in entry:
                if dim != single:
                    dims_of.setdefault(axis, []).append(dim)
        clashes = [self._clash(axis, dims, wanted, name) for axis, dims in dims_of.items() if len(dims) > 1]
        if clashes:
            raise SpecError("\n".join(clashes))
        return PartitionSpec(*map(_as_entry, entries))

    def as_mapping(self, mode: str = MODE_TRAIN) -> tuple[tuple[str, Axis | None], ...]:
        """Returns what every logical axis stands for, in the form that `LogicalShardingRule` takes.

        **Arguments:**

        - `mode`: the runtime mode.

        **Returns:**

        Pairs of a logical axis and its mesh axis, tuple of mesh axes or `None`: the built-in ones first, then the
        registered ones.

        **Raises:**

        As `resolve_axis` does.

        ```python
        from shardrules.presets import eformer

        mapping = dict(eformer.PartitionAxis().register("mlp", eformer.MLP_INTERMEDIATE).as_mapping())
        assert mapping[eformer.BATCH] == ("fsdp", "dp") and mapping["mlp"] == "tp" and mapping[eformer.HEAD_DIM] is None
        ```
        """
        names = dict.fromkeys((*_FIELDS, EMPTY, *(entry.name for entry in self.registered)))
        return tuple(zip(names, self.resolve_axis(tuple(names), mode), strict=True))

    def _expand(self, axis: LogicalAxis, mode: str, trail: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The mesh axes that `axis` stands for, each once; `trail` holds the registered names that led here."""
        if axis is None or axis == EMPTY:
            return ()
        if not isinstance(axis, str):
            return tuple(dict.fromkeys(name for part in axis for name in self._expand(part, mode, trail)))
        if axis in trail:
            circle = " -> ".join(map(repr, (*trail[trail.index(axis) :], axis)))
            raise SpecError(f"Cyclic semantic axis registration: {circle}. Register one of them as a mesh axis")
        for entry in self.registered:
            if entry.name == axis:
                given = entry.generation_axis if mode in GENERATION_MODES else ...
                return self._expand(entry.axis if given is ... else given, mode, (*trail, axis))
        field = _FIELDS.get(axis, axis)
        if field in _FIELDS.values():
            found = getattr(self, f"decode_{field}" if _generates(field, mode) else field)
            return () if found is None else axis_tuple(found)
        if axis not in self.mesh_axes:
            raise self._unknown(axis, trail)
        return (axis,)

    def _unknown(self, name: str, trail: tuple[str, ...]) -> UnknownAxisError:
        word = f"__{name.upper()}__"
        known = (*_FIELDS, *(entry.name for entry in self.registered), *self.mesh_axes)
        hint = f" (did you mean {word!r}?)" if word in _FIELDS else suggest(name, known)
        where = f", which {trail[-1]!r} is registered as" if trail else ""
        return UnknownAxisError(
            f"Unknown semantic axis name: {name!r}{hint}{where}. It is no logical axis, nothing is registered under "
            f"it, and the mesh axes that this PartitionAxis speaks of are {', '.join(map(repr, self.mesh_axes))}. "
            f"paxis.register({name!r}, axis) gives it a meaning"
        )

    def _clash(self, axis: str, dims: Sequence[int], wanted: Sequence[LogicalAxis], mode: str) -> str:
        """One mesh axis that would split several dimensions, in words."""
        words = {dim: next(word for word in _flat(wanted[dim]) if axis in self._expand(word, mode)) for dim in dims}
        places = " and ".join(f"{dim} ({word!r})" for dim, word in words.items())
        own = [entry.name for entry in self.registered]
        remedies = dict.fromkeys(
            f"generation_{_FIELDS[word]}" if _generates(_FIELDS[word], mode) else _FIELDS[word]
            for word in words.values()
            if word in _FIELDS and word not in own and _FIELDS[word] not in _MESH_FIELDS.values()
        )
        change = f"Give {' or '.join(remedies)} another mesh axis or None, or write" if remedies else "Write"
        return (
            f"Mesh axis {axis!r} would split dimensions {places} of one array in mode {mode!r}, and it can split one. "
            f"{change} EMPTY for one of these dimensions"
        )


def _generates(field: str, mode: str) -> bool:
    """Whether the partner of `field` for generation applies."""
    return mode in GENERATION_MODES and field in _GENERATION_FIELDS


def _flat(axis: GenerationAxis) -> tuple[str, ...]:
    """The names in `axis`, in order."""
    if axis is None or axis is ...:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(name for part in axis for name in _flat(part))
