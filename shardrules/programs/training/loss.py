"""The loss of a model on a batch, traced: what is trained, what is fixed and what has examples apart."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardrules.core.boxes import ArgumentVariables, shared_leaves
from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigError, ConfigTypeError, TreeError, printable
from shardrules.core.finding import template
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.programs.autoplan.run.call import struct
from shardrules.programs.autoplan.run.expand import expanded
from shardrules.programs.autoplan.run.fingerprint import first_difference
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.training.batch import ExampleDims, example_count, guessed_dims, named_dims
from shardrules.programs.training.zeros import zero_results

_Leaves = tuple[Any, ...]


@final
@attrs.frozen(eq=False)
class LossArrays:
    """The arrays of a model and of a batch, in the order in which the jaxpr of a `TracedLoss` takes them."""

    trainable: tuple[Any, ...]
    fixed: tuple[Any, ...]
    """Frozen arrays of the model, then arrays of the batch without the dim of the examples, such as keys."""
    batched: tuple[Any, ...]


@final
@attrs.frozen(eq=False)
class TracedLoss:
    """The program of a loss.

    It takes the `trainable` arrays, the `fixed` and the `batched` ones, and returns the loss, then the arrays of aux.
    """

    name: str
    jaxpr: ClosedJaxpr
    trainable_count: int
    fixed_count: int
    batch_size: int
    aux_tree: Any = attrs.field(repr=False)
    """The structure of aux, and of what is written to variables of flax nnx."""
    aux_leaves: _Leaves = attrs.field(repr=False)
    """Their leaves, with `None` for arrays."""
    aux_names: tuple[str, ...] = attrs.field(repr=False)
    """The names of their arrays in messages."""
    split: "LossLeaves" = attrs.field(repr=False)

    @property
    def batched_count(self) -> int:
        return len(self.jaxpr.in_avals) - self.trainable_count - self.fixed_count

    def with_batch_size(self, batch_size: int) -> "TracedLoss":
        """Returns the same loss, traced with another number of examples."""
        return self if batch_size == self.batch_size else self.split.trace(batch_size)

    @functools.cached_property
    def gradient(self) -> ClosedJaxpr:
        program = jaxpr_as_fun(flattened(self.jaxpr, replace_checkpoints=True))
        gradient = jax.grad(lambda *arrays: program(*arrays)[0], tuple(range(self.trainable_count)))
        return jax.make_jaxpr(gradient)(*self.jaxpr.in_avals)

    @functools.cached_property
    def without_gradient(self) -> tuple[str, ...]:
        """The paths of the trainable arrays whose gradients are zeros, whatever arrays are."""
        paths = [path for path, trains in zip(self.split.model_paths, self.split.is_trainable, strict=True) if trains]
        return tuple(path for path, flag in zip(paths, zero_results(self.gradient), strict=True) if flag)

    def check(self) -> None:
        """Raises an error for a loss that cannot train the model, and for one that is no function of its arguments."""
        if len(self.without_gradient) == self.trainable_count:
            paths = ", ".join(dict.fromkeys(map(template, self.without_gradient)))
            raise ConfigError(
                f"{self.name}: the loss does not depend on what is trained, {printable(paths):.300}, or not "
                "by a derivative, as with jax.lax.stop_gradient, rounding and comparisons. Compute it from the model "
                "that it gets as its first argument"
            )
        difference = first_difference(self.jaxpr, self.split.trace(self.batch_size).jaxpr, with_values=True)
        if difference:
            raise ConfigError(
                f"{self.name}: the loss is another program each time that it is traced: in the first trace "
                f"{printable(difference)} in the second. A step is planned once and runs so each time: pass what "
                "changes, such as counts of steps, rates and random keys, in the batch or in the model"
            )

    def rebuild_aux(self, arrays: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
        """Returns aux from its arrays, and what the loss writes to variables of flax nnx in the model."""
        # Programs return constants as Python scalars, which would be no arrays in the next step.
        results = (
            value if eqx.is_array(value) else jnp.asarray(value, aval.dtype)
            for value, aval in zip(arrays, self.jaxpr.out_avals[1:], strict=False)
        )
        return self.aux_tree.unflatten([next(results) if leaf is None else leaf for leaf in self.aux_leaves])


@final
@attrs.frozen(eq=False)
class LossLeaves:
    """A loss with the leaves of its model and of its batch, and which of them are trained or have examples."""

    loss: Callable[[Any, Any], Any]
    has_aux: bool
    batch_size: int
    model_leaves: _Leaves
    model_tree: Any
    is_trainable: tuple[bool, ...]
    """For each leaf of the model."""
    batch_leaves: _Leaves
    batch_tree: Any
    example_dims: ExampleDims
    """For each leaf of the batch."""

    @property
    def is_batched(self) -> tuple[bool, ...]:
        return tuple(dim is not None for dim in self.example_dims)

    @property
    def model_paths(self) -> tuple[str, ...]:
        paths = leaf_paths(self.model_tree.unflatten(self.model_leaves))
        return tuple(f"model/{path}".rstrip("/") for path in paths)

    @property
    def named_example_dims(self) -> Any:
        return self.batch_tree.unflatten(self.example_dims)

    @property
    def example_arrays(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The arrays of the batch that have examples, with their dims, and those that are the same for all."""
        batch = self.batch_tree.unflatten(self.batch_leaves)
        paths = [f"batch/{path}" if path else "batch" for path in leaf_paths(batch)]
        leaves = list(zip(paths, self.example_dims, self.batch_leaves, strict=True))
        return (
            tuple(f"{path}[{dim}]" for path, dim, _ in leaves if dim is not None),
            tuple(path for path, dim, leaf in leaves if dim is None and array_kind(leaf) is not None),
        )

    def arrays(self, model: Any, batch: Any) -> LossArrays:
        """Returns the arrays of a model and a batch that have the structures of those that were traced.

        Those with examples have them along their first dim.
        """
        model_leaves, batch_leaves = self.model_tree.flatten_up_to(model), self.batch_tree.flatten_up_to(batch)
        batch_leaves = [_moved(leaf, dim, 0) for leaf, dim in zip(batch_leaves, self.example_dims, strict=True)]
        trainable = _chosen(model_leaves, self.is_trainable, True)
        fixed = _chosen(model_leaves, self.is_trainable, False) + _chosen(batch_leaves, self.is_batched, False)
        return LossArrays(trainable, fixed, _chosen(batch_leaves, self.is_batched, True))

    def trainable_tree(self, arrays: Sequence[Any]) -> Any:
        remaining = iter(arrays)
        return self.model_tree.unflatten([next(remaining) if trains else None for trains in self.is_trainable])

    def call(self, arrays: LossArrays, name: str) -> tuple[Any, Any, dict[int, Any]]:
        """Calls the loss, and returns its value, aux, and what it writes to variables of flax nnx in the model."""
        trainable, fixed, batched = iter(arrays.trainable), iter(arrays.fixed), iter(arrays.batched)

        def replaced(leaves: _Leaves, is_first: tuple[bool, ...], first: Any) -> list[Any]:
            return [
                next(first) if flag else leaf if array_kind(leaf) is None else next(fixed)
                for leaf, flag in zip(leaves, is_first, strict=True)
            ]

        # The model first: its frozen arrays come before those of the batch.
        model = self.model_tree.unflatten(replaced(self.model_leaves, self.is_trainable, trainable))
        batch_leaves = replaced(self.batch_leaves, self.is_batched, batched)
        batch_leaves = [_moved(leaf, 0, dim) for leaf, dim in zip(batch_leaves, self.example_dims, strict=True)]
        batch = self.batch_tree.unflatten(batch_leaves)
        of_model, of_batch = ArgumentVariables.of(model), ArgumentVariables.of(batch)
        value, aux = _value_and_aux(self.loss(model, batch), self.has_aux, name)
        writes = of_model.writes(name)
        trained = set(map(id, arrays.trainable))
        if any(id(before) in trained for before, _ in of_model.pairs(writes)):
            raise TreeError(
                f"{name}: the loss writes to a variable of flax nnx that is trained; the optimizer does that"
            )
        if of_batch.writes(name):
            raise TreeError(
                f"{name}: the loss writes to variables of flax nnx in the batch, which would be lost. "
                "Put them into the model: what it writes there, the model of the next step has"
            )
        return value, aux, writes

    def resized(self, batch_size: int) -> Any:

        def leaf_of(leaf: Any, dim: int | None) -> Any:
            if dim is None:
                return leaf
            shape = (*leaf.shape[:dim], batch_size, *leaf.shape[dim + 1 :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=struct(leaf).weak_type)

        return self.batch_tree.unflatten(map(leaf_of, self.batch_leaves, self.example_dims))

    def trace(self, batch_size: int) -> TracedLoss:
        name, outputs = name_of(self.loss), []
        arrays = self.arrays(self.model_tree.unflatten(self.model_leaves), self.resized(batch_size))
        trainable, fixed, batched = (tuple(map(struct, part)) for part in attrs.astuple(arrays, recurse=False))
        counts = (len(trainable), len(trainable) + len(fixed))

        def run(*values: Any) -> list[Any]:
            parts = LossArrays(values[: counts[0]], values[counts[0] : counts[1]], values[counts[1] :])
            value, aux, writes = self.call(parts, name)
            # The trace returns arrays only, so the rest of aux leaves it by this list.
            outputs.append((aux, writes))
            return [value, *(leaf for leaf in jtu.tree_leaves(outputs[-1]) if array_kind(leaf) is not None)]

        traced = jax.make_jaxpr(run)(*trainable, *fixed, *batched)
        aux_leaves, aux_tree = jtu.tree_flatten(outputs[-1])
        aux, writes = outputs[-1]
        names = [f"aux {path!r}" for path in leaf_paths(aux)]
        names += ["what it writes to variables of flax nnx"] * len(jtu.tree_leaves(writes))
        is_array = [array_kind(leaf) is not None for leaf in aux_leaves]
        return TracedLoss(
            name,
            ClosedJaxpr(expanded(traced.jaxpr), traced.consts),
            len(trainable),
            len(fixed),
            batch_size,
            aux_tree,
            tuple(None if array else leaf for leaf, array in zip(aux_leaves, is_array, strict=True)),
            tuple(text for text, array in zip(names, is_array, strict=True) if array),
            self,
        )


def trace_loss(
    loss: Callable[[Any, Any], Any],
    model: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    trainable: Any = eqx.is_inexact_array,
    example_dims: Any = None,
) -> TracedLoss:
    """Traces `loss(model, batch)`; nothing is run.

    `example_dims` says which dim of the arrays of `batch` has the examples, as `in_axes` of `jax.vmap`; by default that
    is guessed.

    ```python
    from shardrules.programs.training.loss import trace_loss

    trace = trace_loss(lambda w, x: jnp.mean(x @ w), jnp.ones(4), jnp.ones((8, 4)))
    assert (trace.batch_size, trace.with_batch_size(2).jaxpr.in_avals[1].shape) == (8, (2, 4))
    ```
    """
    _refuse_shared(model)
    model_leaves, model_tree = jtu.tree_flatten(model)
    batch_leaves, batch_tree = jtu.tree_flatten(batch)
    is_trainable = _trainable_leaves(model_leaves, model_tree, trainable)

    def split_by(dims: ExampleDims) -> LossLeaves:
        count = example_count(batch_leaves, dims)
        model_parts, batch_parts = (tuple(model_leaves), model_tree, is_trainable), (tuple(batch_leaves), batch_tree)
        return LossLeaves(loss, has_aux, count, *model_parts, *batch_parts, dims)

    if example_dims is None:
        dims = guessed_dims(batch, lambda dims, size: split_by(dims).trace(size))
    else:
        dims = named_dims(batch, example_dims)
    leaves = split_by(dims)
    if leaves.batch_size == 0:
        arrays = ", ".join(leaves.example_arrays[0])
        raise ConfigError(f"{name_of(loss)}: the batch has no examples: the size of {arrays} is 0. Pass one or more")
    return leaves.trace(leaves.batch_size)


def _refuse_shared(model: Any) -> None:
    """Raises where a variable of flax nnx is in the model twice, which JAX's trees would train as two."""
    paths = leaf_paths(model)
    shared = [f"{paths[index]} is {paths[first]}" for index, first in shared_leaves(model).items()]
    if shared:
        raise TreeError(
            f"variables of flax nnx are in the model twice: {', '.join(shared)}. Pass its state, which has each once, "
            "graph, state = nnx.split(model), and let the loss call nnx.merge(graph, state). "
            "What the loss writes there to other variables is lost: running means and the counts of random streams "
            "stay as they are"
        )


def _chosen(leaves: Sequence[Any], flags: Sequence[bool], flag: bool) -> tuple[Any, ...]:
    return tuple(leaf for leaf, value in zip(leaves, flags, strict=True) if value is flag and array_kind(leaf))


def _moved(leaf: Any, dim: int | None, destination: int | None) -> Any:
    """Returns an array or a shape with one of its dims elsewhere."""
    if dim == destination or dim is None or destination is None:
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.moveaxis(leaf, dim, destination)
    sizes = [size for index, size in enumerate(leaf.shape) if index != dim]
    sizes.insert(destination, leaf.shape[dim])
    return jax.ShapeDtypeStruct(sizes, leaf.dtype, weak_type=leaf.weak_type)


def _trainable_leaves(leaves: Sequence[Any], treedef: Any, trainable: Any) -> tuple[bool, ...]:
    """The leaves that a filter of Equinox chooses: a function of a leaf, or a tree of booleans or of such functions."""
    flags: list[bool] = []
    arrays = [leaf for leaf in leaves if array_kind(leaf) is not None]

    # Filters such as `eqx.is_inexact_array` accept arrays, and no shapes: while tracing, shapes are arrays.
    def filtered(*values: Any) -> None:
        tracers = iter(values)
        model = treedef.unflatten([leaf if array_kind(leaf) is None else next(tracers) for leaf in leaves])
        chosen = treedef.flatten_up_to(eqx.filter(model, trainable))
        flags.extend(leaf is not None for leaf in chosen)

    jax.eval_shape(filtered, *map(struct, arrays))
    for leaf, flag in zip(leaves, flags, strict=True):
        kind = array_kind(leaf)
        if flag and (kind is None or not jnp.issubdtype(kind[1], jnp.inexact)):
            what = printable(repr(leaf)) if kind is None else f"an array of {kind[1]}"
            raise ConfigTypeError(f"`trainable` chooses {what}; only floating-point arrays can be trained")
    if not any(flags):
        raise ConfigError("`trainable` chooses no array of the model")
    return tuple(flags)


def _value_and_aux(result: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ConfigTypeError(f"{name}: with has_aux=True the loss must return a pair (loss, aux)")
    value, aux = result if has_aux else (result, None)
    kind = array_kind(value)
    # A float of Python depends on nothing, which is refused later with its own message.
    if kind is None and isinstance(value, float):
        value = jnp.asarray(value)
    elif kind is None or kind[0] != () or not jnp.issubdtype(kind[1], jnp.floating):
        what = printable(repr(value)) if kind is None else f"{kind[1]}{list(kind[0])}"
        hint = "; pass has_aux=True if it returns a pair" if isinstance(value, tuple) and not has_aux else ""
        raise ConfigTypeError(f"{name}: the loss must be a scalar of a floating-point type, not {what}{hint}")
    return value, aux
