"""The mesh axes that split each kind of dimension: one value that configures a whole family of models.

A `PartitionAxis` starts from five names, one for each kind of parallelism, and derives from them which mesh axis splits
the batch, the sequence, the heads and so on. Each of these can also be set explicitly. Model code then speaks of
logical axes, and `resolve_spec` returns the PartitionSpec; `as_mapping` gives the same mapping to a rule.

It is a plain value. Registering another logical axis gives a *new* value with another hash, so that nothing compiled
for the old value is reused for the new one.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Final, Never, TypeAlias, cast, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, axis_tuple
from shardrules.core.errors import ConfigError, SpecError, UnknownAxisError, suggest
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
    GENERATION_MODES,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    MODE_DECODE,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
    as_dims,
    as_logical,
    check_mode,
)
from shardrules.rules.logical import MODE_TRAIN, AxisMeanings, LogicalAxis

FieldAxis: TypeAlias = str | Sequence[Any] | EllipsisType | None
"""The values that a field accepts: a mesh axis, a sequence of them, `None` for none, `...` for the derived one."""

GenerationAxis: TypeAlias = "LogicalAxis | EllipsisType"
"""The meaning of a registered axis in generation: a logical axis, or `...` for the same as in training."""

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

_UNSET: Final[Any] = attrs.NOTHING
"""The value of an argument that was not passed: for generation, `...` and `None` both say something."""

_NEVER: Final = ()
"""The source of a field that is `None` unless it is set."""

_SOURCES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]]] = {
    "batch_axis": (("fully_sharded_data_parallel_axis", "data_parallel_axis"), ("batch_axis",)),
    "sequence_axis": (("sequence_parallel_axis",), None),
    "query_sequence_axis": (("sequence_parallel_axis",), _NEVER),
    "head_axis": (("tensor_parallel_axis",), ("tensor_parallel_axis",)),
    "kv_head_axis": (("tensor_parallel_axis",), ("tensor_parallel_axis",)),
    "key_sequence_axis": (("sequence_parallel_axis",), ("sequence_parallel_axis",)),
    "hidden_state_axis": (("tensor_parallel_axis",), None),
    "mlp_intermediate_axis": (("tensor_parallel_axis",), None),
    "vocab_axis": (("tensor_parallel_axis",), None),
    "expert_axis": (("expert_parallel_axis",), None),
    "expert_gate_axis": (_NEVER, None),
    "attention_dim_axis": (_NEVER, _NEVER),
    "attention_kv_dim_axis": (_NEVER, _NEVER),
    "bias_head_sequence_axis": (_NEVER, None),
    "bias_key_sequence_axis": (_NEVER, None),
}
"""For each field: the fields it is derived from, and the sources of its partner `generation_<field>`, if it has one."""

_GENERATION_FIELDS: Final = tuple(field for field, (_, generation) in _SOURCES.items() if generation is not None)


_NAMES: Final = (
    *_FIELDS,
    *_FIELDS.values(),
    *(f"{prefix}_{field}" for prefix in ("generation", "decode") for field in _GENERATION_FIELDS),
)
"""Names that have a meaning without being registered: logical axes, and fields by their own names."""


def _signature(init: Callable[..., None]) -> inspect.Signature:
    """The arguments for `help` and editors: those that were not passed show the default that they get."""
    _, *fields, registered, _ = inspect.signature(init).parameters.values()
    defaults = {
        f"{prefix}_{field}": ... if _SOURCES[field][1] else None
        for prefix in ("generation", "decode")
        for field in _GENERATION_FIELDS
    }
    parameters = [
        field.replace(default=defaults.get(field.name, field.default), annotation="FieldAxis") for field in fields
    ]
    return inspect.Signature([*parameters, registered])


def _is_logical_name(name: str) -> bool:
    """Returns whether `name` has the form of a logical axis, `__NAME__` or `_`, so that it cannot mean a mesh axis."""
    return name == EMPTY or (len(name) > 4 and name.startswith("__") and name.endswith("__"))


def _flat_mesh_axes(field: str, value: object) -> tuple[str, ...]:
    """The mesh axes in `value`, flat and each once."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(name for part in value for name in _flat_mesh_axes(field, part)))
    if not isinstance(value, str) or not value:
        raise ConfigError(f"PartitionAxis: {field} takes a mesh axis, a tuple of them, None or ..., got {value!r}")
    if _is_logical_name(value):
        raise ConfigError(f"PartitionAxis: {field} takes mesh axes; {value!r} is the name of a logical axis")
    return (value,)


def _as_entry(names: Iterable[str]) -> Axis | None:
    axes = tuple(dict.fromkeys(names))
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _resolve_fields(axes: dict[str, Any]) -> dict[str, Axis | EllipsisType | None]:
    """The value of every field, those that are an ellipsis derived from the others."""
    fields: dict[str, Axis | EllipsisType | None] = {}

    def resolve(field: str, value: Any, sources: tuple[str, ...]) -> None:
        if value is not ...:
            fields[field] = _as_entry(_flat_mesh_axes(field, value))
        elif sources:
            names = [fields[source] for source in sources]
            fields[field] = _as_entry(name for axis in names if axis for name in axis_tuple(cast("Axis", axis)))
        else:
            raise ConfigError(
                f"PartitionAxis: {field} is the ellipsis, which asks to derive it, but it is not derived from any "
                "field. Pass a mesh axis, a tuple of mesh axes, or None"
            )

    # The mesh fields first, then in the order of the table: sources come before what is derived from them.
    for field in _MESH_FIELDS.values():
        resolve(field, axes[field], ())
    for field, (sources, generation) in _SOURCES.items():
        resolve(field, axes[field], sources)
        if generation is not None:
            default = ... if generation else None
            resolve(f"generation_{field}", _merged(field, axes, default), generation)
    # An ellipsis has to stay known: a batch axis that is changed later must change it too.
    if _merged("batch_axis", axes, ...) is ...:
        fields["generation_batch_axis"] = ...
    return fields


def _merged(field: str, axes: dict[str, Any], default: EllipsisType | None) -> Any:
    """The value of the partner of `field` for generation, after checking that its two names agree."""
    name, alias = f"generation_{field}", f"decode_{field}"
    passed = {key: axes[key] for key in (name, alias) if axes[key] is not _UNSET}
    # An ellipsis agrees only with an ellipsis; two spellings of one tuple agree.
    normal = [value if value is ... else _flat_mesh_axes(key, value) for key, value in passed.items()]
    if len(normal) == 2 and normal[0] != normal[1]:
        raise ConfigError(
            f"PartitionAxis: {name}={passed[name]!r} and {alias}={passed[alias]!r} are two names of one field and "
            "differ. Pass one of them"
        )
    return next(iter(passed.values()), default)


def _as_generation(axis: object) -> GenerationAxis:
    return axis if axis is ... else as_logical(axis)


def _as_name(name: object) -> str:
    if not isinstance(name, str) or not name or name == EMPTY:
        raise ConfigError(f"a logical axis is registered under a non-empty name other than {EMPTY!r}, got {name!r}")
    return name


@final
@attrs.frozen
class RegisteredAxis:
    """A logical axis that a user added to a `PartitionAxis`.

    `axis` is what `name` means: a mesh axis, another logical axis, the name of a field (`"head_axis"`), `None`, or a
    sequence of these. A field of generation (`"decode_head_axis"`) is meant in every mode, another one in those of
    training. `generation_axis` is the same for the modes of generation: `...` means as `axis`, `None` not split.
    """

    name: str = attrs.field(converter=_as_name)
    axis: LogicalAxis = attrs.field(converter=as_logical)
    generation_axis: GenerationAxis = attrs.field(default=..., converter=_as_generation)


def _as_registered(entries: Sequence[RegisteredAxis]) -> tuple[RegisteredAxis, ...]:
    # Sorted, so that the order in which axes were registered makes no difference to equality.
    registered = tuple(sorted(entries, key=lambda entry: entry.name))
    names = [entry.name for entry in registered]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"PartitionAxis: registered holds {repeated[0]!r} twice")
    return registered


def _runtime_mode(mode: str | int, shape: Sequence[int] | None) -> tuple[str, int | None]:
    """The mode by name, and the dimension of length 1 that decided on decoding, if one did."""
    if not isinstance(mode, int):
        return check_mode(mode), None
    if shape is None:
        raise ConfigError(
            f"mode {mode} reads the mode off the length of dimension {mode}, so the shape should be provided: pass "
            "shape=x.shape, or name the mode"
        )
    if not -len(shape) <= mode < len(shape):
        raise ConfigError(f"mode {mode} reads the length of dimension {mode}, which shape {tuple(shape)} does not have")
    return (MODE_DECODE, mode % len(shape)) if shape[mode] == 1 else (MODE_TRAIN, None)


def _alias(field: str) -> Any:
    return property(operator.attrgetter(field), doc=f"Another name of `{field}`.")


@final
@attrs.frozen
class PartitionAxis(AxisMeanings):
    """Says which mesh axis splits which logical axis, in training and in generation.

    Five fields name the mesh axes of the kinds of parallelism (`None` where the mesh lacks one). The other fields are
    derived from them unless they are set: to a mesh axis, a tuple of mesh axes, `None` (never split) or `...` (derive
    it, the default). `decode_*` is another name of `generation_*`. `registered` holds the user's logical axes;
    `register` adds one. `attrs.evolve` keeps what was derived before; `replace` derives it again.

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
    # Kept as passed: left out it reads as None, yet resolves to `batch_axis`, and an explicit None must not.
    _generation_batch_axis: Axis | EllipsisType | None
    generation_query_sequence_axis: Axis | None
    generation_head_axis: Axis | None
    generation_kv_head_axis: Axis | None
    generation_key_sequence_axis: Axis | None
    generation_attention_dim_axis: Axis | None
    generation_attention_kv_dim_axis: Axis | None
    registered: tuple[RegisteredAxis, ...]

    def __init__(
        self,
        *,
        data_parallel_axis: FieldAxis = "dp",
        fully_sharded_data_parallel_axis: FieldAxis = "fsdp",
        tensor_parallel_axis: FieldAxis = "tp",
        sequence_parallel_axis: FieldAxis = "sp",
        expert_parallel_axis: FieldAxis = "ep",
        batch_axis: FieldAxis = ...,
        sequence_axis: FieldAxis = ...,
        query_sequence_axis: FieldAxis = ...,
        head_axis: FieldAxis = ...,
        kv_head_axis: FieldAxis = ...,
        key_sequence_axis: FieldAxis = ...,
        hidden_state_axis: FieldAxis = ...,
        mlp_intermediate_axis: FieldAxis = ...,
        vocab_axis: FieldAxis = ...,
        expert_axis: FieldAxis = ...,
        expert_gate_axis: FieldAxis = None,
        attention_dim_axis: FieldAxis = None,
        attention_kv_dim_axis: FieldAxis = None,
        bias_head_sequence_axis: FieldAxis = None,
        bias_key_sequence_axis: FieldAxis = None,
        generation_batch_axis: FieldAxis = _UNSET,
        generation_query_sequence_axis: FieldAxis = _UNSET,
        generation_head_axis: FieldAxis = _UNSET,
        generation_kv_head_axis: FieldAxis = _UNSET,
        generation_key_sequence_axis: FieldAxis = _UNSET,
        generation_attention_dim_axis: FieldAxis = _UNSET,
        generation_attention_kv_dim_axis: FieldAxis = _UNSET,
        decode_batch_axis: FieldAxis = _UNSET,
        decode_query_sequence_axis: FieldAxis = _UNSET,
        decode_head_axis: FieldAxis = _UNSET,
        decode_kv_head_axis: FieldAxis = _UNSET,
        decode_key_sequence_axis: FieldAxis = _UNSET,
        decode_attention_dim_axis: FieldAxis = _UNSET,
        decode_attention_kv_dim_axis: FieldAxis = _UNSET,
        registered: Sequence[RegisteredAxis] = (),
        **unknown: Never,
    ) -> None:
        axes = {name: value for name, value in locals().items() if name not in ("self", "registered", "unknown")}
        for name in unknown:
            raise TypeError(f"PartitionAxis() got an unexpected keyword argument {name!r}{suggest(name, axes)}")
        # attrs writes this method when a class has an `__init__` of its own.
        self.__attrs_init__(**_resolve_fields(axes), registered=_as_registered(registered))  # pyright: ignore[reportAttributeAccessIssue]

    __signature__: ClassVar[inspect.Signature] = _signature(__init__)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._shortest_arguments().items())
        return f"{type(self).__name__}({arguments})"

    def _shortest_arguments(self) -> dict[str, Any]:
        """The arguments that build this value, without those that would be derived anyway."""
        mesh_fields: Any = {field: getattr(self, field) for field in _MESH_FIELDS.values()}
        # A field needs mention only if it differs from what the five mesh fields alone would give.
        plain, derived = PartitionAxis(), PartitionAxis(**mesh_fields)
        return {
            field.alias: getattr(self, field.name)
            for field in attrs.fields(PartitionAxis)
            if getattr(self, field.name) != getattr(plain if field.name in mesh_fields else derived, field.name)
        }

    @property
    def generation_batch_axis(self) -> Axis | None:
        """The axis of batches in generation as it was passed; `None` also where it was left out."""
        return None if self._generation_batch_axis is ... else self._generation_batch_axis

    @property
    def decode_batch_axis(self) -> Axis | None:
        """The axis that splits batches in generation: `batch_axis` where `generation_batch_axis` was left out."""
        return self.batch_axis if self._generation_batch_axis is ... else self._generation_batch_axis

    decode_query_sequence_axis = _alias("generation_query_sequence_axis")
    decode_head_axis = _alias("generation_head_axis")
    decode_kv_head_axis = _alias("generation_kv_head_axis")
    decode_key_sequence_axis = _alias("generation_key_sequence_axis")
    decode_attention_dim_axis = _alias("generation_attention_dim_axis")
    decode_attention_kv_dim_axis = _alias("generation_attention_kv_dim_axis")

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that this configuration uses, in the order of the fields."""
        defined = (*_NAMES, *(entry.name for entry in self.registered))
        names = [name for entry in self.registered for name in (*_flat(entry.axis), *_flat(entry.generation_axis))]
        # A registered axis may name a mesh axis that no field uses; what is not defined otherwise is a mesh axis.
        extra = (name for name in names if name not in defined and not _is_logical_name(name))
        return tuple(dict.fromkeys((*self._field_axes(), *extra)))

    def _field_axes(self) -> tuple[str, ...]:
        values = (getattr(self, field.name) for field in attrs.fields(PartitionAxis) if field.name != "registered")
        return tuple(dict.fromkeys(name for value in values if value not in (None, ...) for name in axis_tuple(value)))

    def replace(self, **changes: Any) -> "PartitionAxis":
        """Returns a copy with some fields changed, and what depends on them derived again.

        A field whose value is the derived one counts as derived.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis(head_axis=None).replace(tensor_parallel_axis="model")
        assert paxis.vocab_axis == "model" and paxis.head_axis is None
        ```
        """
        # Derived values are not among the shortest arguments, so the constructor derives them again.
        arguments = self._shortest_arguments()
        for field in _GENERATION_FIELDS:
            if f"decode_{field}" in changes:
                arguments.pop(f"generation_{field}", None)
        return PartitionAxis(**{**arguments, **changes})

    def register(
        self,
        semantic_axis: str,
        axis_rule: LogicalAxis,
        generation_axis_rule: GenerationAxis = ...,
        *,
        override: bool = False,
    ) -> "PartitionAxis":
        """Returns a copy that knows one more logical axis. This value does not change.

        `axis_rule` and `generation_axis_rule` are as `axis` and `generation_axis` in `RegisteredAxis`: an unknown name
        in them is a mesh axis, and a name that is registered later may be used already. `override` allows a
        `semantic_axis` that already has a meaning.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis().register("patches", eformer.QUERY_LENGTH)
        paxis = paxis.register("stage", "pipe", generation_axis_rule=None)
        assert paxis.resolve_spec(["stage", "patches"]) == P("pipe", "sp")
        assert paxis.resolve_spec(["stage", "patches"], eformer.MODE_DECODE) == P(None, None)
        ```
        """
        entry = RegisteredAxis(semantic_axis, axis_rule, generation_axis_rule)
        others = tuple(other for other in self.registered if other.name != semantic_axis)
        # The fields hold mesh axes: a logical axis of that name would hide one.
        exists = len(others) < len(self.registered) or semantic_axis in (*_NAMES, *self._field_axes())
        if exists and not override:
            meaning = _as_entry(self._expand(semantic_axis, MODE_TRAIN))
            raise ConfigError(
                f"{semantic_axis!r} already exists and means {meaning!r}. override=True gives it a new meaning"
            )
        return attrs.evolve(self, registered=(*others, entry))

    def unregister(self, semantic_axis: str, *, missing_ok: bool = False) -> "PartitionAxis":
        """Returns a copy without the logical axis that was registered as `semantic_axis`."""
        names = [entry.name for entry in self.registered]
        if semantic_axis not in names and not missing_ok:
            hint = f"Registered are: {', '.join(names)}" if names else "Nothing is registered"
            raise UnknownAxisError(
                f"no logical axis is registered as {semantic_axis!r}{suggest(semantic_axis, names)}. {hint}"
            )
        return attrs.evolve(self, registered=tuple(entry for entry in self.registered if entry.name != semantic_axis))

    def resolve_axis(self, axes: Sequence[LogicalAxis], mode: str = MODE_TRAIN) -> list[Axis | None]:
        """Returns what each logical axis means: a mesh axis, a tuple of them, or `None`.

        Unlike in a spec, a mesh axis may appear more than once in the list.
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

        Each of `axes` is a logical axis, a registered one, a mesh axis, a field name, `None` or `EMPTY`; or a sequence
        of these, which is flattened, each mesh axis once. `mode` is the runtime mode; or a dimension, as an int:
        decoding where it has length 1 in `shape`, else training. A mesh axis that would split two dimensions is an
        error, except that the dimension of length 1 that an int `mode` looks at may share one: it cannot be split, and
        fitting the spec to the shape drops it.

        ```python
        from shardrules.presets import eformer

        paxis = eformer.PartitionAxis()
        hidden = [eformer.BATCH, eformer.QUERY_LENGTH, eformer.EMBED]
        assert paxis.resolve_spec(hidden) == P(("fsdp", "dp"), "sp", "tp")
        assert paxis.resolve_spec(hidden, eformer.MODE_DECODE) == P(("fsdp", "dp"), None, "tp")
        ```
        """
        logical = as_dims(axes)
        mode_name, single_dim = _runtime_mode(mode, shape)
        if shape is not None and len(logical) > len(shape):
            raise ConfigError(f"{len(logical)} logical axes {logical!r} for an array of shape {tuple(shape)}")
        entries = [self._expand(axis, mode_name) for axis in logical]
        dims_of: dict[str, list[int]] = {}
        for dim, entry in enumerate(entries):
            for axis in entry:
                if dim != single_dim:
                    dims_of.setdefault(axis, []).append(dim)
        clashes = [self._clash(axis, dims, logical, mode_name) for axis, dims in dims_of.items() if len(dims) > 1]
        if clashes:
            raise SpecError("\n".join(clashes))
        return PartitionSpec(*map(_as_entry, entries))

    def as_mapping(self, mode: str = MODE_TRAIN) -> tuple[tuple[str, Axis | None], ...]:
        """Returns what every logical axis means, built-in ones first, in the form that `LogicalShardingRule` takes.

        ```python
        from shardrules.presets import eformer

        mapping = dict(eformer.PartitionAxis().register("mlp", eformer.MLP_INTERMEDIATE).as_mapping())
        assert mapping[eformer.BATCH] == ("fsdp", "dp") and mapping["mlp"] == "tp" and mapping[eformer.HEAD_DIM] is None
        ```
        """
        names = dict.fromkeys((*_FIELDS, EMPTY, *(entry.name for entry in self.registered)))
        return tuple(zip(names, self.resolve_axis(tuple(names), mode), strict=True))

    def _expand(self, axis: LogicalAxis, mode: str, trail: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The mesh axes that `axis` means, each once; `trail` holds the registered names that led here."""
        if axis is None or axis == EMPTY:
            return ()
        if not isinstance(axis, str):
            return tuple(dict.fromkeys(name for part in axis for name in self._expand(part, mode, trail)))
        # A name may be registered before what it refers to, so cycles show only here.
        if axis in trail:
            circle = " -> ".join(map(repr, (*trail[trail.index(axis) :], axis)))
            raise ConfigError(f"Cyclic semantic axis registration: {circle}. Register one of them as a mesh axis")
        # Registered names come first: with `override` they replace the built-in ones.
        for entry in self.registered:
            if entry.name == axis:
                meaning = entry.generation_axis if mode in GENERATION_MODES else ...
                return self._expand(entry.axis if meaning is ... else meaning, mode, (*trail, axis))
        # Fields may be named by their logical axis or by their own name.
        field = _FIELDS.get(axis, axis)
        if field in _NAMES:
            # A generation field says by itself what it means in every mode, and its other name knows its default.
            is_decode = field.startswith("generation_") or _uses_generation_field(field, mode)
            value = getattr(self, f"decode_{field.removeprefix('generation_')}" if is_decode else field)
            return () if value is None else axis_tuple(value)
        if axis not in self.mesh_axes:
            raise self._unknown(axis, trail)
        return (axis,)

    def _unknown(self, name: str, trail: tuple[str, ...]) -> UnknownAxisError:
        token = f"__{name.upper()}__"
        names = (*_FIELDS, *(entry.name for entry in self.registered), *self.mesh_axes)
        hint = f" (did you mean {token!r}?)" if token in _FIELDS else suggest(name, names)
        origin = f", which {trail[-1]!r} is registered as" if trail else ""
        return UnknownAxisError(
            f"Unknown semantic axis name: {name!r}{hint}{origin}. It is neither a logical axis nor registered, and the "
            f"mesh axes of this PartitionAxis are {', '.join(map(repr, self.mesh_axes))}. "
            f"paxis.register({name!r}, axis) gives it a meaning"
        )

    def _clash(self, axis: str, dims: Sequence[int], logical: Sequence[LogicalAxis], mode: str) -> str:
        """The message about a mesh axis that would split several dimensions."""
        names = {dim: next(name for name in _flat(logical[dim]) if axis in self._expand(name, mode)) for dim in dims}
        dims_text = " and ".join(f"{dim} ({name!r})" for dim, name in names.items())
        registered = [entry.name for entry in self.registered]
        # Only a built-in name has a field to change; the five mesh fields are what the others follow, so not those.
        remedies = dict.fromkeys(
            f"generation_{_FIELDS[name]}" if _uses_generation_field(_FIELDS[name], mode) else _FIELDS[name]
            for name in names.values()
            if name in _FIELDS and name not in registered and name not in _MESH_FIELDS
        )
        change = f"Set {' or '.join(remedies)} to another mesh axis or None, or write" if remedies else "Write"
        return (
            f"Mesh axis {axis!r} would split dimensions {dims_text} of one array in mode {mode!r}, but can split only "
            f"one. {change} EMPTY for one of these dimensions"
        )


def _uses_generation_field(field: str, mode: str) -> bool:
    return mode in GENERATION_MODES and field in _GENERATION_FIELDS


def _flat(axis: GenerationAxis) -> tuple[str, ...]:
    """The names in `axis`, in order."""
    if axis is None or axis is ...:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(name for part in axis for name in _flat(part))
