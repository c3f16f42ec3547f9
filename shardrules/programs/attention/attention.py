"""`sharded_attention`: attention over a sequence that may be split."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardrules.core.axes import Axis, axis_argument, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.context import current_mesh
from shardrules.core.errors import ConfigError, NoMeshError
from shardrules.placement.constrain import with_sharding_constraint
from shardrules.programs.attention.kernels import KERNELS, kernel_name, no_log_sum_exp
from shardrules.programs.attention.paired import as_kernel
from shardrules.programs.attention.shards import WAYS, head_repeats, uneven_heads
from shardrules.programs.regions.region import RegionFunction, alternatives, region

How: TypeAlias = Literal["ring", "gather", "all_to_all"]
"""A way to attend to keys that other devices have."""


def sharded_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    axis: Axis | None = None,
    how: How | None = None,
    kernel: Any = None,
    segment_ids: Any = None,
) -> Any:
    """Computes attention over a sequence that may be split, in the layout of `jax.nn.dot_product_attention`.

    The batch and the heads may be split, too. `shardrules.autoplan` and `shardrules.plan_training` choose whether to
    split the sequence, over which axis and how, where you do not. Without a plan, `axis` splits it, or the sequence is
    split as the operands are. On one device it is attention.

    **Arguments:**

    - `q`: queries [batch, length, heads, width].
    - `k`, `v`: keys and values [batch, kv length, kv heads, width]. There may be fewer heads of keys than of queries:
        each is for a group of those.
    - `causal`: whether each query attends only to keys up to its own position.
    - `axis`: the mesh axis that the sequence is split over, or a tuple of them. A length that it does not divide is
        padded.
    - `how`: `"ring"` sends keys and values round the devices, each of which attends to what passes. `"gather"` gathers
        them. `"all_to_all"` splits the heads instead of the sequence while attention is computed.
    - `kernel`: what computes attention on a device: `None` for matrix products and a softmax in float32; `"xla"` or
        `"cudnn"` for these implementations of `jax.nn.dot_product_attention`; or a function
        `kernel(q, k, v, *, is_causal, q_segment_ids, kv_segment_ids)`. It returns the output, or the output and the
        log-sum-exp of the scores, `float32[batch, length, heads]`, by which results for some of the keys are merged:
        `"ring"` needs it, and `"gather"` where attention is causal. If a kernel with a log-sum-exp has no derivative,
        pass a pair of functions, the first of which returns the output alone.
    - `segment_ids`: for packed sequences, integers [batch, length] of at least 0: queries attend to keys of the same
        segment. Or a pair, of queries and of keys. With the default kernel, the output is 0 where a query has no keys.

    **Returns:**

    The output, of the shape and dtype of `q`.

    **Raises:**

    `ConfigError`, which lists everything that is wrong; `NoMeshError` for an `axis` without a mesh; `SplitError` where
    `how` cannot be done with these heads or this kernel.

    ```python
    q, k, v = (jax.random.normal(key, (2, 64, 4, 8)) for key in jax.random.split(jax.random.key(0), 3))
    mesh = sr.create_mesh("data:2,sequence:4")
    attend = jax.jit(lambda q, k, v: sr.sharded_attention(q, k, v, causal=True, axis="sequence", how="ring"))
    with jax.set_mesh(mesh):
        out = attend(q, k, v)
    assert jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    assert out.sharding.spec[1] == "sequence"
    ```
    """
    q, k, v = (jnp.asarray(array) for array in (q, k, v))
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids,) * 2
    segments = () if segment_ids is None else tuple(jnp.asarray(ids) if hasattr(ids, "dtype") else ids for ids in pair)
    call = _Call(q, k, v, segments, causal, axis, how, as_kernel(kernel))
    call.check()
    return call.run()


@final
@attrs.frozen(eq=False)
class _Call:
    q: Any
    k: Any
    v: Any
    segments: tuple[Any, ...]
    causal: bool
    axis: Axis | None
    how: How | None
    kernel: Any

    def check(self) -> None:
        if self.axis is not None and not self._mesh_sizes:
            raise NoMeshError(
                f"sharded_attention: axis={self.axis!r} needs a mesh. Set one, `with jax.set_mesh(mesh):`, or leave "
                "axis to a plan"
            )
        # Segments are compared with shapes, so those have to be sound first.
        problems = self._shape_problems() or self._segment_problems()
        if not isinstance(self.causal, bool):
            problems.append(f"causal must be True or False, got {self.causal!r:.60}")
        if self.how is not None and self.how not in WAYS:
            problems.append(f"how must be one of {', '.join(map(repr, WAYS))} or None, got {self.how!r:.60}")
        names = self._axis_names
        unknown = [name for name in names if name not in self._mesh_sizes]
        problems += [f"unknown axis {name!r}; the mesh has {mesh_text(current_mesh())}" for name in unknown]
        if len(dict.fromkeys(names)) < len(names):
            problems.append(f"axis {self.axis!r} has a mesh axis twice")
        if self.how == "all_to_all" and not problems and names and self._repeats is None:
            problems.append(uneven_heads(self.q.shape[2], self._devices, names))
        # A kernel without log-sum-exps has to get all keys of a query in one call: by heads, or gathered unmasked.
        is_split = not problems and bool(names) and self._devices > 1
        if is_split and self.kernel in KERNELS.values():
            if self.how == "ring" or (self.how == "gather" and self.causal):
                problems.append(no_log_sum_exp(self.kernel, self.how))
            if self.how is None and self.causal and self._repeats is None:
                problems.append(
                    f"the kernel {kernel_name(self.kernel)} returns no log-sum-exp, so that only heads can be split, "
                    f"and {self.q.shape[2]} cannot over the {self._devices} devices of {', '.join(names)}; pass "
                    "kernel=None or one that returns a log-sum-exp, or a smaller axis"
                )
        if problems:
            raise ConfigError(f"sharded_attention: {'; '.join(problems)}")

    def _shape_problems(self) -> list[str]:
        q, k, v = self.q, self.k, self.v
        shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
        # All that follows indexes four dims.
        if not q.ndim == k.ndim == v.ndim == 4:
            return [f"q, k and v must be [batch, length, heads, width], got {shapes}"]
        problems = []
        if k.shape != v.shape:
            problems.append(f"k and v must have one shape, got {shapes}")
        if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
            problems.append(f"q and k must have the same batch and width, got {shapes}")
        if not k.shape[2] or q.shape[2] % k.shape[2]:
            problems.append(f"{q.shape[2]} heads of q must be a multiple of the {k.shape[2]} of k")
        # The type of `causal` is checked later, so it may be anything here.
        if self.causal is True and q.shape[1] != k.shape[1]:
            problems.append(
                f"causal attention needs as many keys as queries, got {shapes}; for a cache of keys pass causal=False, "
                "with segment_ids for those that are written"
            )
        if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
            problems.append(f"q, k and v must be floats of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        return problems

    def _segment_problems(self) -> list[str]:
        if not self.segments:
            return []
        if len(self.segments) != 2:
            return [f"segment_ids must be an array or a pair of them, got {len(self.segments)}"]
        if not all(hasattr(ids, "dtype") for ids in self.segments):
            kinds = ", ".join(type(ids).__name__ for ids in self.segments)
            return [f"segment_ids must be an array or a pair of them, got ({kinds}); jnp.asarray makes arrays of lists"]
        return [
            f"segment_ids of {name} must be integers {array.shape[:2]}, got {ids.dtype}{list(ids.shape)}"
            for name, ids, array in zip(("queries", "keys"), self.segments, (self.q, self.k), strict=True)
            if ids.shape != array.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)
        ]

    @functools.cached_property
    def _mesh_sizes(self) -> dict[str, int]:
        return mesh_sizes(current_mesh())

    @functools.cached_property
    def _axis_names(self) -> tuple[str, ...]:
        return axis_argument("sharded_attention", self.axis)

    @functools.cached_property
    def _is_explicit(self) -> bool:
        return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types

    @property
    def _split_names(self) -> tuple[str, ...]:
        """The axes as types of arrays name them: on an Explicit mesh in its order."""
        if not self._is_explicit:
            return self._axis_names
        return tuple(name for name in self._mesh_sizes if name in self._axis_names)

    @property
    def _devices(self) -> int:
        return math.prod(self._mesh_sizes[name] for name in self._axis_names)

    @property
    def _repeats(self) -> int | None:
        return head_repeats(self.k.shape[2], self.q.shape[2] // self.k.shape[2], self._devices)

    def run(self) -> Any:
        # Empty arrays have no softmax: no kernel is asked about them.
        if not self.q.size or not self.k.size:
            return jnp.zeros_like(self.q)
        # Inside of a `shard_map` arrays are shards already.
        if self._axis_names and AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            return self._run_on_shards()
        q_segments, kv_segments = self.segments or (None, None)
        length = self.q.shape[1]
        q, k, v = self.q, self.k, self.v
        if self._axis_names:
            q, k, v, q_segments, kv_segments = self._split(q_segments, kv_segments)
        segments = () if q_segments is None else (q_segments, kv_segments)
        attend = _attention(self.how, bool(segments))
        attend = attend.over(self._split_names) if self._axis_names else attend
        out = attend(self._grouped(q), k, v, *segments, causal=self.causal, kernel=self.kernel)
        out = out.reshape(q.shape)
        if out.shape[1] == length:
            return out
        if self._is_explicit:  # an uneven length cannot be split there
            out = self._constrain(out, None)
        return out[:, :length]

    def _run_on_shards(self) -> Any:
        """Inside of `jax.shard_map` operands are shards already."""
        attend = WAYS[self.how or ("all_to_all" if self._repeats is not None else "ring")]
        operands = self._grouped(self.q), self.k, self.v, *self.segments
        out = attend(*operands, axis_name=self._axis_names, causal=self.causal, kernel=self.kernel)
        return out.reshape(self.q.shape)

    def _grouped(self, q: Any) -> Any:
        batch, length, heads, width = q.shape
        kv_heads = self.k.shape[2]
        if self._is_explicit:
            # A reshape on an Explicit mesh cannot cut a split dim: axes are given up until the rest divides the heads
            # of keys.
            entry = tuple(jax.typeof(q).sharding.spec)[2]
            names = axis_tuple(entry or ())
            kept = names
            while kv_heads % math.prod(self._mesh_sizes[name] for name in kept):
                kept = kept[:-1]
            if kept != names:
                free = PartitionSpec.UNCONSTRAINED
                q = with_sharding_constraint(q, PartitionSpec(free, free, kept or None, free), missing="error")
        return q.reshape(batch, length, kv_heads, heads // kv_heads, width)

    def _split(self, q_segments: Any, kv_segments: Any) -> Sequence[Any]:
        """All arrays, padded to lengths that can be split, and split."""
        # Zig-zag order splits what a device has once more.
        pieces = self._devices * (2 if self.causal and self.how != "all_to_all" else 1)
        if self._is_explicit and not self.q.shape[1] % self._devices:  # there, what is padded is gathered
            pieces = self._devices
        q_padding, kv_padding = (-array.shape[1] % pieces for array in (self.q, self.k))
        if kv_padding and not self.causal and q_segments is None:
            q_segments, kv_segments = (jnp.zeros(array.shape[:2], jnp.int32) for array in (self.q, self.k))
        arrays = [(self.q, q_padding), (self.k, kv_padding), (self.v, kv_padding)]
        ids = [(q_segments, q_padding), (kv_segments, kv_padding)]
        padded = [_pad(array, padding, 0) for array, padding in arrays]
        padded += [None if each is None else _pad(_signed(each), padding, -1) for each, padding in ids]
        return [None if array is None else self._constrain(array, self._split_names) for array in padded]

    def _constrain(self, array: Any, entry: tuple[str, ...] | None) -> Any:
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(free, entry, *[free] * (array.ndim - 2))
        return with_sharding_constraint(array, spec, missing="error")


def _signed(ids: Any) -> Any:
    """Segment ids of a dtype that has -1, too."""
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.promote_types(ids.dtype, jnp.int32))


def _pad(array: Any, padding: int, fill: int) -> Any:
    widths = [(0, padding if dim == 1 else 0) for dim in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=fill) if padding else array


@functools.cache
def _attention(how: How | None, has_segments: bool) -> RegionFunction:
    """The region of one way, or of all of them, for a plan to take the fastest."""
    segments = ", b s, b t" if has_segments else ""
    rule = f"b s k g d, b t k d, b t k d{segments} -> b s k g d"
    ways = [region(rule, split="b k g", exchange="s t")(WAYS[name]) for name in ([how] if how else WAYS)]
    return ways[0] if how else alternatives(*ways)
