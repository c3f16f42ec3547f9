"""The training step: the gradient of a loss, computed as a recipe says, and the optimizer's update."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from shardrules.core.boxes import is_variable, parameter_type, variable_types, write_variables
from shardrules.core.errors import ConfigError, ConfigTypeError, PlanError, TreeError, printable, shortened
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.programs.training.accumulation import accumulation_dtype
from shardrules.programs.training.host_state import is_any_on_host, update_by_parts
from shardrules.programs.training.keep.apply import with_kept
from shardrules.programs.training.keep.keep import Keep
from shardrules.programs.training.loss import TracedLoss, trace_loss
from shardrules.programs.training.microbatches import GradientFunction, accumulated
from shardrules.programs.training.stages.run import tick_count


@final
@attrs.frozen
class Recipe:
    """The way to compute the gradient of a step: what is decided besides the mesh and the layouts."""

    microbatches: int = 1
    """The number of parts of the batch that follow each other."""
    groups: int = 1
    """The number of parts of the batch, side by side, whose gradients add up apart until the end of the step: with as
    many as there are devices that split the batch, gradients are reduced once."""
    keep: Keep = Keep()
    """The arrays that the backward pass keeps of each microbatch."""
    accumulate_dtype: Any = None
    """The dtype that gradients of microbatches add up in; by default at least float32."""
    host_state: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    """The arrays of the optimizer's state that are in the memory of the host between steps, by index."""
    stages: int = 1
    """The number of groups of layers that compute side by side, each with another microbatch."""
    chunks: int = 1
    """The number of chunks of layers of a stage; microbatches go through all stages as often."""

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        parts = [f"{self.stages} stages{chunks}"] if self.stages > 1 else []
        parts.append(f"{self.microbatches} microbatches" if self.microbatches > 1 else "whole batch")
        if self.microbatches > 1 and self.stages == 1:
            parts.append("gradients reduced once" if self.groups > 1 else "gradients reduced in each")
        parts.append(self.keep.short_text)
        return ", ".join([*parts, "optimizer state on the host"] if self.host_state else parts)

    def accumulated_dtypes(self, trace: TracedLoss) -> tuple[str, ...]:
        """The dtypes that gradients of microbatches add up in, each once."""
        dtypes = [aval.dtype for aval in trace.jaxpr.in_avals[: trace.trainable_count]]
        return tuple(dict.fromkeys(str(accumulation_dtype(dtype, self.accumulate_dtype)) for dtype in dtypes))

    def gradients(self, trace: TracedLoss) -> GradientFunction:
        transform = functools.partial(with_kept, keep=self.keep)
        return accumulated(
            trace, self.microbatches, self.groups, self.accumulate_dtype, transform, self.stages, self.chunks
        )

    @property
    def rounds(self) -> int:
        """The rounds in which all microbatches go through the stages; 1 without stages."""
        return tick_count(self.stages, self.microbatches, self.chunks) if self.stages > 1 else 1


@final
@attrs.frozen(eq=False)
class TrainingStep:
    """A training step to trace, plan and run: from model, state and batch to new model, new state, loss and aux.

    The values are those of the plain step: gradient, `optimizer.update`, `eqx.apply_updates`; what is trained keeps its
    dtype, as `optax.apply_updates` has it. Arrays of the state that are in the memory of the host are fetched for the
    update, and sent back.

    ```python
    import optax
    from shardrules.programs.training.step import Recipe, TrainingStep

    step = TrainingStep(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
    w, _, loss, _ = step(jnp.ones(4), optax.sgd(0.1).init(jnp.ones(4)), jnp.ones((8, 4)))
    assert loss == 16 and np.allclose(w, 0.2)
    ```
    """

    loss: Callable[[Any, Any], Any]
    optimizer: Any
    """An optax optimizer, or what has its `init` and `update`."""
    has_aux: bool = False
    trainable: Any = eqx.is_inexact_array
    recipe: Recipe = Recipe()
    example_dims: Any = None
    """The dim of the batch's arrays that has the examples, as `in_axes` of `jax.vmap`; guessed by default."""
    planned_batch: Any = attrs.field(default=None, repr=False)
    """The batch that was planned, as shapes; `None` before a plan."""
    __name__: str = "step"

    def __call__(self, model: Any, state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        self._check_batch(batch)
        trace = self.trace(model, batch)
        arrays = trace.split.arrays(model, batch)
        loss, aux, gradients = self.recipe.gradients(trace)(arrays.trainable, arrays.fixed, arrays.batched)
        params, gradients = trace.split.trainable_tree(arrays.trainable), trace.split.trainable_tree(gradients)
        aux, writes = trace.rebuild_aux(aux)
        update = functools.partial(self.optimizer.update, **self._extra(loss))
        by_parts = functools.partial(update_by_parts, update) if is_any_on_host(state) else update
        try:
            updates, state = by_parts(gradients, state, params)
        except Exception as error:
            self._check_state(model, state, error)
            raise
        new_model = _with_new_state(_with_dtypes(eqx.apply_updates(model, updates), model), aux)
        write_variables(new_model, writes)
        return new_model, state, loss, aux

    def trace(self, model: Any, batch: Any) -> TracedLoss:
        """Traces the loss, with a model and a batch of arrays or shapes."""
        trainable = trainable_filter(model, self.trainable)
        return trace_loss(
            self.loss, model, batch, has_aux=self.has_aux, trainable=trainable, example_dims=self.example_dims
        )

    def init_state(self, model: Any) -> Any:
        return self.optimizer.init(eqx.filter(model, trainable_filter(model, self.trainable)))

    def check_optimizer(self, model: Any, state: Any) -> None:
        """Raises an error if the optimizer needs more than gradients, parameters and the loss. Takes shapes."""

        def update(model: Any, state: Any) -> Any:
            params = eqx.filter(model, trainable_filter(model, self.trainable))
            return self.optimizer.update(params, state, params, **self._extra(jnp.zeros(())))

        try:
            eqx.filter_eval_shape(update, model, state)
        except Exception as error:
            raise PlanError(
                "the optimizer cannot update the model from gradients, parameters and the loss: "
                f"{printable(str(error).rstrip('.'))}. Line searches, such as that of optax.lbfgs, evaluate the loss "
                "again, and a training step does not"
            ) from error

    def _check_batch(self, batch: Any) -> None:
        """Raises an error if a batch has another structure than the one that was planned."""
        if self.planned_batch is None:
            return
        (leaves, actual), (others, planned) = map(jtu.tree_flatten, (batch, self.planned_batch))
        if actual != planned:
            raise TreeError(
                "the structure of the batch differs from that of the batch that was planned: "
                f"{printable(str(actual)):.200} instead of {printable(str(planned)):.200}. Plan again for this one"
            )
        for path, leaf, other in zip(leaf_paths(batch), leaves, others, strict=True):
            if array_kind(leaf) is None and array_kind(other) is not None:
                raise TreeError(
                    f"batch/{path}: {printable(repr(leaf)):.80} is not an array, and what was planned is "
                    f"{_array_text(other)}. Pass jnp.asarray of it"
                )

    def _check_state(self, model: Any, state: Any, error: Exception) -> None:
        """Raises an error if a state with which the optimizer failed is not that of a model."""
        actual, expected = map(jtu.tree_structure, (state, eqx.filter_eval_shape(self.init_state, model)))
        if actual != expected:
            raise ConfigTypeError(
                "the structure of the optimizer's state differs from what its init returns for the trainable part of "
                f"the model: {printable(str(actual)):.200} instead of {printable(str(expected)):.200}. Make model and "
                "state by plan.init(make_model)(...), or restore a checkpoint into what that returns"
            ) from error

    def _extra(self, loss: jax.Array) -> dict[str, Any]:
        """The loss, for optimizers that need it besides gradients, such as `optax.contrib.reduce_on_plateau`."""
        accepted = inspect.signature(self.optimizer.update).parameters.values()
        takes_loss = any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "value" for parameter in accepted)
        return {"value": loss} if takes_loss else {}


def _with_dtypes(tree: Any, like: Any) -> Any:
    """Returns a tree in the dtypes of another, whose place it takes in the next step.

    Otherwise moments in float32, say, would turn parameters in bfloat16 into float32.
    """

    def cast(new: Any, array: Any) -> Any:
        return new.astype(array.dtype) if eqx.is_array(new) and new.dtype != array.dtype else new

    return jtu.tree_map(cast, tree, like)


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)


def trainable_filter(model: Any, trainable: Any) -> Any:
    """Returns a filter of Equinox for the arrays of a model that are trained.

    What `eqx.nn.State`s hold is not, such as the running means of BatchNorm, nor are variables of flax nnx but its
    parameters. A type of variables as the filter chooses those.
    """
    variable_type: Any = parameter_type()
    if chooses_variables := isinstance(trainable, type) and issubclass(trainable, variable_types()):
        variable_type, trainable = trainable, eqx.is_inexact_array
    _check_filter(model, trainable)
    if not callable(trainable):
        return trainable

    def node_filter(node: Any) -> Any:
        is_chosen = issubclass(node.type, variable_type) if is_variable(node) else not chooses_variables
        return trainable if is_chosen and not _is_state(node) else False

    def is_special(node: Any) -> bool:
        return _is_state(node) or is_variable(node)

    has_special = any(map(is_special, jtu.tree_leaves(model, is_leaf=is_special)))
    return jtu.tree_map(node_filter, model, is_leaf=is_special) if has_special else trainable


def _check_filter(model: Any, trainable: Any) -> None:
    """Raises an error for what is no filter of Equinox, such as the filters of flax nnx, which take paths."""
    remedy = (
        "Pass a type of variables of flax nnx, or a filter as eqx.partition takes it: a function of an array, or a "
        "tree of booleans, a prefix of the model"
    )
    problems = [leaf for leaf in jtu.tree_leaves(trainable) if not (isinstance(leaf, bool) or _takes_array(leaf))]
    if problems:
        texts = ", ".join(f"{printable(repr(leaf)):.80}" for leaf in problems)
        raise ConfigTypeError(f"`trainable` cannot choose arrays by {texts}. {remedy}")
    try:
        jtu.tree_map(lambda choice, part: None, trainable, model)
    except ValueError as error:
        raise ConfigError(f"`trainable` is no prefix of the model: {printable(str(error)):.200}. {remedy}") from error


def _takes_array(choice: Any) -> bool:
    if not callable(choice) or isinstance(choice, type):
        return False
    try:
        inspect.signature(choice).bind(None)
    except TypeError:
        return False
    except ValueError:  # functions in C may have no signature
        return True
    return True


def states_of(tree: Any) -> list[Any]:
    return [node for node in jtu.tree_leaves(tree, is_leaf=_is_state) if _is_state(node)]


def _with_new_state(model: Any, aux: Any) -> Any:
    """Returns a model with the `eqx.nn.State` that aux has, if it has one, in the place of its own."""
    nodes, treedef = jtu.tree_flatten(model, is_leaf=_is_state)
    states = states_of(aux)
    old = [index for index, node in enumerate(nodes) if _is_state(node)]
    if not states or not old:
        return model
    if len(states) != len(old):
        raise ConfigTypeError(
            f"the model has {len(old)} eqx.nn.States and aux has {len(states)}: aux must return the new state of each"
        )
    # States have no names, so those of aux are matched with the model's in their order.
    for index, state in zip(old, states, strict=True):
        if jtu.tree_structure(state) != jtu.tree_structure(nodes[index]):
            raise ConfigTypeError("aux has an eqx.nn.State with other entries than the model's")
        problems = [
            f"{_array_text(new)} in aux, {_array_text(array)} in the model"
            for new, array in zip(jtu.tree_leaves(state), jtu.tree_leaves(nodes[index]), strict=True)
            if not _can_replace(new, array)
        ]
        if problems:
            raise ConfigTypeError(
                "aux has an eqx.nn.State with other arrays than the model's:\n  "
                + "\n  ".join(shortened(problems))
                + "\nReturn states out of jax.vmap with out_axes=None"
            )
        nodes[index] = _with_dtypes(state, nodes[index])
    return treedef.unflatten(nodes)


def _can_replace(new: Any, array: Any) -> bool:
    kind, other_kind = array_kind(new), array_kind(array)
    if kind is None or other_kind is None:
        return kind is other_kind
    (shape, dtype), (other_shape, other_dtype) = kind, other_kind
    # A state may come back in another precision, and is cast to its own.
    are_floats = jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(other_dtype, jnp.inexact)
    return shape == other_shape and (dtype == other_dtype or are_floats)


def _array_text(leaf: Any) -> str:
    kind = array_kind(leaf)
    return printable(repr(leaf)) if kind is None else f"{kind[1]}{list(kind[0])}"
