"""`place_batch`: each process hands in its part of a batch, and gets the whole as arrays on the mesh."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    DisagreementError,
    PlanError,
    ShardRulesError,
    TreeError,
)
from shardrules.core.finding import Finding, shape_text
from shardrules.core.jax_state import under_trace
from shardrules.core.keys import is_key
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.mesh.parts import global_shape
from shardrules.mesh.processes import exchange
from shardrules.placement.batches.values import STACK_NOTE, as_array, has_equal_parts, is_rows
from shardrules.placement.destination import not_placeable, resolve_destination, usable_mesh
from shardrules.placement.transfer import put
from shardrules.rules.how import How, by_leaf, refuse_leaves, resolve

CALLER = "place_batch"

_ROUNDS = 4
"""The rounds in which a rule is asked about the shape that follows from its own answer. Two rounds settle what rules
say that look at sizes. Chosen by hand."""

_SHOWN = 16
"""The most arrays that differ and are shown, chosen by hand."""


def place_batch(local: Any, how: How, mesh: AnyMesh | None = None, *, timeout: float = 200) -> Any:
    """Places a batch of which each process has a part, and returns the whole as arrays over all processes.

    Anything with `__array__` or `__dlpack__` is an array, tensors of other libraries too, and so is a list of numbers
    or of rows of numbers. Tuples, dicts, modules and lists of arrays are containers.

    With one process the arrays go where `filter_shard` puts them. With several, the parts of all processes, in the
    order of the mesh, make up each dimension that `how` splits over them; `sr.meshes.batch_part` says which part is
    this process's. A dimension that is not split over processes is handed in whole, and must be the same on all.

    **Arguments:**

    - `local`: a pytree with this process's part of the batch: arrays in its memory, or on its own devices. `None`,
        functions, and numbers outside of lists stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`. Rules see the shapes of the whole batch.
    - `timeout`: the seconds to wait for the other processes, whose shapes are compared.

    **Returns:**

    A tree like `local` with a `jax.Array` of the whole batch at every array.

    **Raises:**

    `DisagreementError`, on every process, when parts differ in paths, shapes or dtypes, with the shapes of all;
    `PlanError`, listing everything else that is wrong, with the path of each leaf that is not an array, such as a
    string, and of each with numbers that its dtype on devices does not hold; `TreeError`, `NoMeshError`, and
    `BarrierTimeoutError` and `BarrierError` as in `barrier_sync`.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    batch = sr.place_batch({"x": np.ones((8, 3)), "label": np.arange(8), "weight": 0.5}, P("data"), mesh)
    assert batch["x"].sharding.spec == P("data") and batch["weight"] == 0.5
    ```
    """
    batch, error = None, None
    try:
        check_mesh(mesh)
        batch = LocalBatch.of(local)
    except ShardRulesError as raised:
        error = raised
    agree(batch, timeout, error)
    assert batch is not None
    return Placer(how, mesh).place(batch)


@final
@attrs.frozen(eq=False)
class LocalBatch:
    """A flattened part of a batch."""

    tree: Any
    values: Sequence[Any]
    treedef: Any
    kinds: Sequence[tuple[tuple[int, ...], Any] | None]
    """Shape and dtype of each array, `None` for other leaves."""

    @staticmethod
    def of(tree: Any) -> "LocalBatch":
        """Returns the tree flattened, every array read; refuses what is not one, or has no values on this process."""
        if under_trace():
            raise ConfigTypeError(f"{CALLER}: call it outside of jit, which gets its result as an argument")
        try:
            leaves, treedef = jax.tree.flatten(tree, is_leaf=is_rows)
        except RecursionError as error:
            raise TreeError(f"{CALLER}: the batch nests too deeply, or a list holds itself") from error
        values = [as_array(leaf) for leaf in leaves]
        problems = [(index, value) for index, value in enumerate(values) if isinstance(value, Finding)]
        if problems:
            refuse_leaves(CALLER, treedef.unflatten(range(len(values))), problems)
        tree, kinds = treedef.unflatten(values), [array_kind(value) for value in values]
        return LocalBatch(tree, values, treedef, kinds)

    @property
    def text(self) -> str:
        """The facts that must agree on all processes: paths, since the structure as text has addresses of objects."""
        kinds = [(shape_text(kind[0]), str(kind[1])) if kind else None for kind in self.kinds]
        return json.dumps([leaf_paths(self.tree), kinds])

    @property
    def shapes(self) -> dict[str, str]:
        """Shape and dtype of each array by its path."""
        pairs = zip(leaf_paths(self.tree), self.kinds, strict=True)
        return {path: f"{shape_text(kind[0])} {kind[1]}" for path, kind in pairs if kind is not None}


@final
@attrs.define(eq=False)
class Placer:
    """Places batches; batches of one shape are planned once."""

    how: How
    mesh: AnyMesh | None
    _planned: tuple[Any, Any, list[tuple[int, ...]], list[Sharding]] | None = None

    def place(self, batch: LocalBatch) -> Any:
        """Returns the whole batch; what other processes have is theirs to place."""
        # Nearly all batches have the same shapes: what they have in common is planned once.
        key = batch.treedef, batch.kinds
        if self._planned is None or self._planned[:2] != key:
            shapes = self._global_shapes(batch)
            whole = _shapes_tree(batch, shapes)
            try:
                destination = resolve_destination(whole, self.how, self.mesh, caller=CALLER)
                problems = not_placeable(destination, values=False) + _spanning(destination.shardings)
                refuse_leaves(CALLER, batch.tree, problems)
            except PlanError as error:
                if has_equal_parts(batch.tree):
                    error.add_note(STACK_NOTE)
                raise
            arrays = [shape for shape, kind in zip(shapes, batch.kinds, strict=True) if kind is not None]
            self._planned = *key, arrays, destination.arrays()[1]
        _, _, shapes, shardings = self._planned
        # JAX reads the memory of other arrays late or for ever, and their owner may fill it with the next batch.
        arrays = [
            np.array(value) if hasattr(value, "__array__") and not isinstance(value, jax.Array) else value
            for value, kind in zip(batch.values, batch.kinds, strict=True)
            if kind is not None
        ]
        if jax.process_count() == 1:
            placed = iter(put(arrays, shardings))
        else:
            placed = map(_from_part, arrays, shardings, shapes)
        pairs = zip(batch.values, batch.kinds, strict=True)
        return batch.treedef.unflatten([value if kind is None else next(placed) for value, kind in pairs])

    def _global_shapes(self, batch: LocalBatch) -> list[tuple[int, ...]]:
        """Returns the shapes of the whole batch, which follow from the shardings.

        The shardings may follow from the shapes in turn, where a rule looks at sizes: then it is asked again about the
        shapes that follow from its answer.
        """
        local = [() if kind is None else kind[0] for kind in batch.kinds]
        # The usual batch is split over all processes.
        count = jax.process_count()
        shapes = [(shape[0] * count, *shape[1:]) if shape else () for shape in local]
        if isinstance(self.how, ShardingPlan) and len(self.how.leaves) == sum(kind is not None for kind in batch.kinds):
            leaves = iter(self.how.leaves)  # of a plan the shapes are known
            shapes = [() if kind is None else next(leaves).shape for kind in batch.kinds]
        for _ in range(_ROUNDS):
            shardings = self._shardings(batch, shapes)
            actual = [global_shape(shape, sharding) for shape, sharding in zip(local, shardings, strict=True)]
            if actual == shapes:
                return shapes
            shapes = actual
        raise ConfigError(
            f"{CALLER}: {self.how!r:.200} splits a batch differently each time it sees the shapes that follow from its "
            "own answer; write a spec such as P('data')"
        )

    def _shardings(self, batch: LocalBatch, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Returns the sharding of each leaf, unchecked, if it has these shapes."""
        resolved = resolve(self.how, _shapes_tree(batch, shapes), self.mesh, CALLER)
        entries = resolved.entries
        if resolved.plan is not None:
            entries = by_leaf(resolved.plan, resolved.plan.kind_specs, len(batch.values), CALLER)
        if not any(isinstance(entry, PartitionSpec) for entry in entries):
            return list(entries)
        mesh = usable_mesh((*resolved.meshes, current_mesh()), CALLER)
        return [_sharding(entry, mesh) if isinstance(entry, PartitionSpec) else entry for entry in entries]


_STEP = "the parts of a batch"
"""The name of the exchange, for the errors of processes that wait at another barrier."""


def agree(batch: LocalBatch | None, timeout: float, error: BaseException | None = None) -> bool:
    """Returns whether there is a batch, which is on all processes or on none; else raises on all of them.

    `error` is what kept this process from placing its part: it is raised once the others know.
    """
    if jax.process_count() > 1:
        state = "" if error is None else f"{type(error).__name__}: {error}"
        digest = None if batch is None else hashlib.sha256(batch.text.encode()).hexdigest()
        answers = [json.loads(str(text)) for text in exchange(json.dumps([digest, state]), _STEP, CALLER, timeout)]
        digests = [digest for digest, _ in answers]
        # Before errors: parts that differ may be why one of them cannot be placed.
        if batch is not None and None not in digests and len(dict.fromkeys(digests)) > 1:
            details = exchange(json.dumps(batch.shapes), f"{_STEP}: how they differ", CALLER, timeout)
            raise DisagreementError(_difference([json.loads(str(text)) for text in details])) from error
        # A process that failed raises its own error below; the others get one that lists all failures.
        if error is None:
            _check_states(answers)
    if error is not None:
        raise error
    return batch is not None


def _check_states(answers: list[list[str | None]]) -> None:
    """Refuses a batch that some processes do not have."""
    failed = [f"\n  process {process}: {state}" for process, (_, state) in enumerate(answers) if state]
    if failed:
        raise DisagreementError(f"{CALLER}: other processes failed to make their part of the batch:{''.join(failed)}")
    ended = [str(process) for process, (digest, _) in enumerate(answers) if digest is None]
    # Batches may end on all processes at once. If they end on some, the others would wait for those for ever.
    if 0 < len(ended) < len(answers):
        raise DisagreementError(
            f"{CALLER}: process {', '.join(ended)} of {len(answers)} has no more batches, and the others have; give "
            "all processes the same number of batches"
        )


def _difference(shapes: list[dict[str, str]]) -> str:
    paths = list(dict.fromkeys(path for part in shapes for path in part))
    different = [path for path in paths if len(dict.fromkeys(part.get(path) for part in shapes)) > 1]
    lines = [
        f"{path or 'the batch'}: "
        + ", ".join(f"process {process} has {part.get(path, 'none')}" for process, part in enumerate(shapes))
        for path in different[:_SHOWN]
    ]
    lines += [f"and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
    # Trees may also differ in leaves that are not arrays.
    lines = lines or ["leaves that are not arrays"]
    head = f"{CALLER}: the parts of the processes differ; drop or pad what is left over at the end:"
    return "\n  ".join([head, *lines])


def _spanning(shardings: Sequence[Sharding | None]) -> list[tuple[int, Finding]]:
    """Findings about shardings over several processes that are not on a mesh."""
    why = "expected a PartitionSpec or a NamedSharding over several processes"
    return [
        (leaf_index, Finding("error", "no-sharding", f"{why}, got {sharding!r:.60}"))
        for leaf_index, sharding in enumerate(shardings)
        if sharding is not None and not isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable
    ]


def _shapes_tree(batch: LocalBatch, shapes: Sequence[tuple[int, ...]]) -> Any:
    triples = zip(batch.values, batch.kinds, shapes, strict=True)
    return batch.treedef.unflatten(
        [value if kind is None else jax.ShapeDtypeStruct(shape, kind[1]) for value, kind, shape in triples]
    )


def _sharding(spec: PartitionSpec, mesh: AnyMesh) -> NamedSharding | None:
    """Returns the sharding of a spec; of one that JAX refuses nothing, since it is reported later, with all others."""
    try:
        return NamedSharding(mesh, spec)
    except Exception:  # noqa: BLE001  JAX has an error class of its own for axes that occur twice
        return None


def _from_part(value: Any, sharding: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array over all processes from the part of this one."""
    if is_key(value.dtype):
        data = jax.random.key_data(value)
        whole = _from_part(data, sharding, (*shape, *data.shape[len(shape) :]))
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    host = host.astype(device_dtype(host.dtype), copy=False)
    return jax.make_array_from_process_local_data(sharding, host, shape)
