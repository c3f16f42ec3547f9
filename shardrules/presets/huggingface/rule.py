"""`HuggingFaceShardingRule`: tensor parallelism and FSDP for the parameters of Hugging Face checkpoints, by name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple, mesh_text
from shardrules.core.check import LARGE_BYTES
from shardrules.core.errors import ConfigError, ConfigTypeError, RuleError, suggest
from shardrules.core.fields import integer
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf, undecided
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import ChainShardingRule, LeavesShardingRule, ShardingRule, from_fields
from shardrules.presets.huggingface.roles import FUSED, ROLE_NAMES, Parameter, Role, read_path
from shardrules.rules.composite import CompositeShardingRule

_AUTO = "auto"
_TENSOR_AXES = ("model", "tensor", "tp", "mp")
_FSDP_AXES = ("fsdp", "data", "dp")
_EXPERT_AXES = ("expert", "ep")

_USUAL_HEAD_DIM = 128
"""The size in most large models. Where the size is unknown, shards that are no multiple of it are reported."""

_SMALL_BYTES = 2**20
"""Below this, what tensor parallelism keeps whole, such as a router, is not worth gathering in each step. Chosen
by hand."""

_WORDS: Mapping[str, str] = {
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "columns": "outputs",
    "rows": "inputs",
    "vocab": "vocabulary",
}


def _as_optional_axis(axis: Any) -> Axis | None:
    return None if axis is None else as_axis(axis)


def _as_roles(roles: Mapping[str, Role] | Iterable[tuple[str, Role]]) -> tuple[tuple[str, Role], ...]:
    try:
        pairs: tuple[Any, ...] = tuple([(name.replace("/", "."), role) for name, role in dict(roles).items()])
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigTypeError(
            f"roles must map names of modules to roles, {{'up': 'columns'}}; got {roles!r}"
        ) from error
    for name, role in pairs:
        if role not in ROLE_NAMES:
            hint = suggest(str(role), ROLE_NAMES)
            raise ConfigError(f"roles: {name!r} has unknown role {role!r}{hint}; the roles are {', '.join(ROLE_NAMES)}")
    return pairs


@final
@attrs.frozen
class HuggingFaceShardingRule(LeavesShardingRule):
    """Splits the parameters of Hugging Face checkpoints by their names: tensor parallelism, and FSDP on what is left.

    What makes heads, widens the activations or holds the vocabulary is split by outputs over `tensor`, what narrows
    them by inputs, and experts in one array by experts. `fsdp` then splits the largest dimension that is whole. Norms
    and other vectors are replicated. A name that the rule does not know is left to other rules, and where that leaves a
    large array replicated, the plan says so. Names may have dots (`model.layers.0.self_attn.q_proj.weight`) or slashes.

    `tensor` and `fsdp` are mesh axes; `None` does without. By default they are the axes of the mesh called `model`,
    `tensor`, `tp` or `mp`, and `fsdp`, `data` or `dp`; an axis `expert` or `ep` takes experts in one array. `head_dim`
    is the size of an attention head, where no parameter shows it (`q_norm` does): heads that do not divide over
    `tensor` are reported, and keys and values are then whole on it. `roles` are further names of modules, each with
    `"heads"`, `"kv_heads"`, `"columns"` (split by outputs), `"rows"` (by inputs), `"vocab"`, `"whole"` (FSDP only) or
    `"vector"` (replicated).

    ```python
    from shardrules.presets import huggingface

    shapes = {
        "model.layers.0.mlp.down_proj.weight": jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16),
        "model.layers.0.mlp.up_proj.weight": jax.ShapeDtypeStruct((14336, 4096), jnp.bfloat16),
        "model.norm.weight": jax.ShapeDtypeStruct((4096,), jnp.bfloat16),
    }
    plan = huggingface.HuggingFaceShardingRule().plan(shapes, sr.mesh_shape("data:16,model:8"))
    assert list(plan.specs.values()) == [P("data", "model"), P("model", "data"), P()]
    ```
    """

    tensor: Axis | None = attrs.field(default=_AUTO, converter=_as_optional_axis)
    fsdp: Axis | None = attrs.field(default=_AUTO, converter=_as_optional_axis)
    head_dim: int | None = attrs.field(default=None, converter=attrs.converters.optional(integer("head_dim", 1)))
    roles: tuple[tuple[str, Role], ...] = attrs.field(default=(), converter=_as_roles)
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: tuple(axis for axis in (rule.tensor, rule.fsdp) if axis != "auto"))

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns one decision for each of `leaves`; the sizes of heads are read off the whole tree."""
        roles = dict(self.roles)
        everything = [(read_path(leaf.path, roles), leaf) for leaf in leaves.survey.kinds]
        query_sizes = _query_sizes(everything)
        head_dims = _head_dims(everything, query_sizes, self.head_dim)
        tensor, fsdp, expert = self._axes(leaves.items[0])
        layout = _Layout(tensor, fsdp, expert, head_dims, query_sizes, *_orders(everything))
        decisions: list[Decision] = []
        for leaf in leaves.items:
            try:
                decisions.append(layout.decide(leaf, read_path(leaf.path, roles)))
            except RuleError as error:
                decisions.append(undecided(error))
        return Verdict(tuple(decisions))

    def _axes(self, leaf: Leaf) -> list[Axis | None]:
        """The axes for tensors, FSDP and experts on the mesh of `leaf`: an axis of size 1 splits nothing."""
        sizes = leaf.sizes
        tensor = next((name for name in _TENSOR_AXES if name in sizes), None) if self.tensor == _AUTO else self.tensor
        fsdp = next((name for name in _FSDP_AXES if name in sizes), None) if self.fsdp == _AUTO else self.fsdp
        if tensor is None and fsdp is None:
            why = (
                f"none of the mesh's axes, {mesh_text(leaf.mesh)}, is known to be for tensors "
                f"({', '.join(_TENSOR_AXES)}) or for FSDP ({', '.join(_FSDP_AXES)})"
            )
            hint = "Name them: HuggingFaceShardingRule(tensor=..., fsdp=...), or hf(tensor='...', fsdp='...') as text"
            raise leaf.error(self, why, hint)
        # An axis that one of the two uses cannot split experts too.
        used = [name for axis in (tensor, fsdp) if axis is not None for name in axis_tuple(axis)]
        expert = next((name for name in _EXPERT_AXES if name in sizes and name not in used), None)
        return [None if axis is None or leaf.axis_size(axis) == 1 else axis for axis in (tensor, fsdp, expert)]


def with_head_dim(rule: ShardingRule, head_dim: int) -> ShardingRule:
    """Returns a rule whose Hugging Face rules that have no `head_dim`, also those in chains and composites, have one.

    ```python
    from shardrules.presets.huggingface.rule import with_head_dim

    assert str(with_head_dim(sr.parse_rule("hf(fsdp=None)|fsdp('data')"), 64)).count("head_dim=64") == 1
    ```
    """
    if isinstance(rule, HuggingFaceShardingRule) and rule.head_dim is None:
        return attrs.evolve(rule, head_dim=head_dim)
    if isinstance(rule, ChainShardingRule):
        return ChainShardingRule(*(with_head_dim(part, head_dim) for part in rule.rules))
    if isinstance(rule, CompositeShardingRule):
        rules = [with_head_dim(part, head_dim) for part in rule.rules]
        return CompositeShardingRule(*rules, empty_is_opinion=rule.empty_is_opinion)
    return rule


def _head_dims(
    parameters: Sequence[tuple[Parameter, Leaf]], queries: Mapping[str, int], default: int | None
) -> dict[str, int]:
    """The size of a head in each attention module, by its path without indices; `""` is for all others."""
    sizes: dict[str, int] = {} if default is None else {"": default}
    for parameter, leaf in parameters:
        outputs, size = queries.get(parameter.parent, 0), leaf.shape[-1] if leaf.ndim else 0
        # A norm may be for all heads together, and then it is longer than a head.
        if parameter.module == "q_norm" and 0 < size < outputs:
            sizes.setdefault(parameter.parent, size)
        elif parameter.module == "sinks" and size and outputs % size == 0 < outputs:
            sizes.setdefault(parameter.parent, outputs // size)
    return sizes


def _query_sizes(parameters: Sequence[tuple[Parameter, Leaf]]) -> dict[str, int]:
    """The outputs of all query heads together, by the path of the attention module without indices."""
    return {
        parameter.parent: leaf.shape[-2]
        for parameter, leaf in parameters
        if parameter.role == "heads" and parameter.name == "weight" and leaf.ndim > 1
    }


def _orders(parameters: Sequence[tuple[Parameter, Leaf]]) -> tuple[bool, bool]:
    """Returns whether the matrices of GPT-2, and the packed ones of GPTQ and AWQ, are (in, out)."""
    # The module `c_fc` widens, so its smaller size is that of the inputs: GPT-2 has them first.
    wide = [leaf.shape[-2:] for parameter, leaf in parameters if parameter.module == "c_fc" and leaf.ndim > 1]
    return bool(wide) and wide[0][0] < wide[0][1], any(parameter.name == "qweight" for parameter, _ in parameters)


@final
@attrs.frozen
class _Layout:
    """The split of a whole checkpoint: the axes, and what all of its parameters together say about one of them."""

    tensor: Axis | None
    fsdp: Axis | None
    expert: Axis | None
    head_dims: Mapping[str, int]
    query_sizes: Mapping[str, int]
    is_gpt2: bool
    is_packed: bool

    def decide(self, leaf: Leaf, parameter: Parameter) -> Decision:
        role = parameter.role
        # A large array of an unknown name is left open, and shows in the plan; a small vector may be replicated.
        if role is None and (leaf.ndim > 1 or leaf.nbytes >= LARGE_BYTES):
            return leaf.skip("not a name of a Hugging Face checkpoint")
        is_vector = leaf.ndim <= 1 or parameter.is_vector
        if role in (None, "vector") or leaf.size <= 1:
            return _replicated(leaf, "a vector")
        dims = self._dims(leaf, parameter)
        # Experts first, then the tensor axis, whose dimension says which one is left for FSDP.
        decision = leaf.skip("")
        words: list[str] = []
        findings: list[Finding] = []
        if dims.expert is not None and self.expert is not None and leaf.fits(dims.expert, self.expert):
            decision = leaf.shard(dims.expert, self.expert)
            words.append(f"experts over {self.expert!r}")
        base = _decided(leaf, decision)
        tensor_dim, finding = self._tensor_dim(base, parameter, dims)
        findings += [] if finding is None else [finding]
        if tensor_dim is not None:
            assert self.tensor is not None
            decision = base.shard(tensor_dim, self.tensor)
            words.append(f"{self._noun(leaf, parameter, dims, tensor_dim)} over {self.tensor!r}")
        if not is_vector and not (role == "whole" and leaf.nbytes < _SMALL_BYTES):
            decision, word = self._with_fsdp(leaf, base, decision, dims, tensor_dim)
            words += [word] if word else []
        if words:
            return Decision(decision.spec, ", ".join(words), findings=tuple(findings))
        return _replicated(leaf, "a vector") if is_vector else self._undivided(leaf, parameter, tuple(findings))

    def _dims(self, leaf: Leaf, parameter: Parameter) -> "_Dims":
        """The dimensions of a parameter by their meaning, counted from the end."""
        rank = min(parameter.rank, leaf.ndim)
        expert = -rank - 1 if parameter.is_stacked and leaf.ndim > rank else None
        if rank == 1:
            return _Dims(-1, None, expert)
        outputs, inputs = -rank, 1 - rank
        is_packed = self.is_packed and parameter.name in ("qweight", "qzeros", "scales")
        is_gpt2 = self.is_gpt2 and parameter.module in ("c_attn", "c_fc", "c_proj") and parameter.name == "weight"
        is_gpt2 = is_gpt2 or parameter.module == "mm_input_projection"
        # Experts in one array are (in, out), unless they are the weight of a module.
        is_bare = expert is not None and parameter.is_bare
        return _Dims(inputs, outputs, expert) if is_packed or is_gpt2 or is_bare else _Dims(outputs, inputs, expert)

    def _tensor_dim(self, leaf: Leaf, parameter: Parameter, dims: "_Dims") -> tuple[int | None, Finding | None]:
        """The dimension that the tensor axis splits, and what is worth knowing about that."""
        tensor, role = self.tensor, parameter.role
        if tensor is None or role == "whole":
            return None, None
        # Experts divide first: then a shard has whole experts, and nothing inside of them is split.
        if dims.expert is not None and leaf.fits(dims.expert, tensor):
            return dims.expert, None
        preferred, other = (dims.inputs, dims.outputs) if role == "rows" else (dims.outputs, dims.inputs)
        if preferred is None:
            return None, None  # a bias of inputs
        if role in ("heads", "kv_heads") and leaf.ndim > 1 and parameter.name == "weight":
            finding = self._heads_finding(leaf, parameter, preferred)
            if finding is not None and finding.code == "whole-heads":
                return None, finding
        elif role == "kv_heads" and self._heads_finding(leaf, parameter, preferred, is_vector=True) is not None:
            return None, None  # the bias of keys that are whole
        else:
            finding = None
        # The other dim is second choice: it saves the same bytes.
        fitting = [dim for dim in (preferred, other) if dim is not None and leaf.fits(dim, tensor)]
        dim = fitting[0] if fitting else None
        # A small array, or a dim that an earlier rule split, is not worth a warning.
        if dim != preferred and leaf.nbytes >= LARGE_BYTES and leaf.entries[preferred] == ():
            finding = self._misfit(leaf, parameter, preferred, dim)
        return dim, finding

    def _heads_finding(self, leaf: Leaf, parameter: Parameter, dim: int, is_vector: bool = False) -> Finding | None:
        """Says when a shard would have part of a head."""
        assert self.tensor is not None
        outputs, parts, tensor = leaf.shape[dim], leaf.axis_size(self.tensor), self.tensor
        is_vision = "vis" in parameter.parent
        head_dim = self.head_dims.get(parameter.parent, None if is_vision else self.head_dims.get(""))
        is_kv = parameter.role == "kv_heads"
        is_grouped = is_kv and outputs < self.query_sizes.get(parameter.parent, 0)
        what = _WORDS[str(parameter.role)]
        if is_kv and outputs % parts and (head_dim is None or outputs % head_dim):
            why = f"{what}, {outputs} outputs, do not divide over {tensor!r} of size {parts}, so they are whole on it"
            return _warning(leaf, "whole-heads", why, f"Use a size of {tensor!r} that divides them", dim, tensor)
        # Without the size of a head only grouped keys and values are suspect: they have few heads.
        if head_dim is None or outputs % head_dim:
            if not is_grouped or outputs % (parts * _USUAL_HEAD_DIM) == 0:
                return None
            why = f"shards of {outputs // parts} outputs may cut {what}, whose size is unknown"
            return None if is_vector else _warning(leaf, "cut-heads", why, "Pass head_dim=...", dim, tensor)
        count = outputs // head_dim
        # Projections of latent attention hold heads of several sizes, which their names do not tell.
        if count % parts == 0 or parameter.module in ("q_b_proj", "kv_b_proj", "wq_b"):
            return None
        remedy = f"Use a size of {tensor!r} that divides {count}"
        if is_kv:
            why = f"{count} {what} of {head_dim} do not divide over {tensor!r} of size {parts}, so they are whole on it"
            return _warning(leaf, "whole-heads", why, remedy, dim, tensor)
        why = f"{count} {what} of {head_dim} do not divide over {tensor!r} of size {parts}: shards cut heads"
        return _warning(leaf, "cut-heads", why, remedy, dim, tensor)

    def _misfit(self, leaf: Leaf, parameter: Parameter, preferred: int, dim: int | None) -> Finding:
        tensor = self.tensor
        assert tensor is not None
        size, parts = leaf.shape[preferred], leaf.axis_size(tensor)
        noun = _WORDS[str(parameter.role)]
        instead = "does not split the array" if dim is None else f"splits dimension {dim % leaf.ndim} instead"
        why = f"{tensor!r} of size {parts} does not divide dimension {preferred % leaf.ndim}, {noun}, and {instead}"
        return _warning(leaf, "other-dim", why, f"Pad it to {math.ceil(size / parts) * parts}", preferred, tensor)

    def _with_fsdp(
        self, leaf: Leaf, base: Leaf, decision: Decision, dims: "_Dims", tensor_dim: int | None
    ) -> tuple[Decision, str]:
        """The decision with one more dimension split for FSDP, and what to say about it."""
        fsdp, tensor = self.fsdp, self.tensor
        if fsdp is None:
            return decision, ""
        rest = _decided(leaf, decision)
        matrix = [dim for dim in (dims.outputs, dims.inputs) if dim is not None]
        others = [dim for dim in range(-leaf.ndim, 0) if dim not in matrix]
        # The matrix comes first, the larger dim before the smaller; a stack of layers is split only if neither fits.
        order = [*sorted(matrix, key=lambda dim: -leaf.shape[dim]), *sorted(others, key=lambda dim: -leaf.shape[dim])]
        for dim in order:
            if rest.fits(dim, fsdp):
                return rest.shard(dim, fsdp), f"FSDP over {fsdp!r}"
        # No other dim is left, so the one of the tensor axis is split further.
        if tensor_dim is not None and tensor is not None:
            both = (*axis_tuple(tensor), *axis_tuple(fsdp))
            if base.fits(tensor_dim, both):
                return base.shard(tensor_dim, both), f"FSDP over {fsdp!r} on the same dimension"
        return decision, ""

    def _noun(self, leaf: Leaf, parameter: Parameter, dims: "_Dims", dim: int) -> str:
        """The part that the tensor axis splits."""
        if dim == dims.expert:
            return "experts"
        if parameter.module in FUSED and dim == dims.outputs:
            return "outputs, queries, keys and values together,"
        preferred = dims.inputs if parameter.role == "rows" else dims.outputs
        if dim == preferred:
            return _WORDS[str(parameter.role)]
        return "outputs" if dim == dims.outputs else "hidden" if parameter.role == "vocab" else "inputs"

    def _undivided(self, leaf: Leaf, parameter: Parameter, findings: tuple[Finding, ...]) -> Decision:
        axes = " and ".join(repr(axis) for axis in (self.tensor, self.fsdp) if axis is not None)
        if parameter.role == "whole" and (self.fsdp is None or leaf.nbytes < _SMALL_BYTES):
            return _replicated(leaf, "whole on each device", findings)
        if leaf.nbytes >= LARGE_BYTES and axes:
            return attrs.evolve(leaf.skip(f"{axes} divide none of its dimensions"), findings=findings)
        return _replicated(leaf, f"small, and {axes} divide none of its dimensions" if axes else "one device", findings)


@final
@attrs.frozen
class _Dims:
    """The dimensions of a parameter, counted from the end; `None` where it has none."""

    outputs: int
    inputs: int | None
    expert: int | None


def _decided(leaf: Leaf, decision: Decision) -> Leaf:
    return leaf if decision.spec is None else attrs.evolve(leaf, spec=decision.spec)


def _replicated(leaf: Leaf, reason: str, findings: tuple[Finding, ...] = ()) -> Decision:
    """Replicates what no earlier rule of a chain has split."""
    if any(entry != () for entry in leaf.entries):
        return leaf.skip(reason)
    return attrs.evolve(leaf.replicate(reason), findings=findings)


def _warning(leaf: Leaf, code: str, why: str, remedy: str, dim: int, axis: Axis) -> Finding:
    name = axis if isinstance(axis, str) else None
    return Finding(
        "warning", code, why, leaf.path, remedy, leaf.shape, dim % leaf.ndim, name, rule="HuggingFaceShardingRule"
    )
