"""Functions to compile or to plan, with their arguments, for `audit` and `autoplan`.

They are named as models are: by a function that returns the step and its arguments, `(step, params, state, batch)`.
Only shapes are made.
"""

import argparse
import inspect
from collections.abc import Callable
from typing import Any, final

import attrs
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import named_path
from shardrules.cli.objects import has_arrays, load_object
from shardrules.cli.rules import LoadedRules
from shardrules.cli.subject import make_plan
from shardrules.core.errors import ConfigError, HardwareError, suggest
from shardrules.core.rule import ShardingPlan
from shardrules.core.tree import array_kind
from shardrules.programs.compiling.arguments import argument_names
from shardrules.programs.machine.hardware import Hardware, sheets


@final
@attrs.frozen
class Step:
    """A function with its arguments, as shapes."""

    text: str
    """Its name on the command line."""
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments; their indices where the function has no signature for them."""
        try:
            inspect.signature(self.fn).bind(*self.args)
        except (TypeError, ValueError):
            return tuple(map(str, range(len(self.args))))
        return tuple(argument_names(self.fn, len(self.args)))

    def index_of(self, name: str, option: str) -> int:
        """Returns the index of an argument. `option` is where its name was written, for the message."""
        if name not in self.names:
            near = suggest(name, self.names)
            raise UsageError(f"{option}: unknown argument {name!r}{near}; the arguments are {', '.join(self.names)}")
        return self.names.index(name)

    def parameters(self, path: str | None) -> tuple[int | None, Any]:
        """Returns the argument, or the part of one (`"state/model"`), that rules are for, after the argument's index.

        Without a path it is the first argument with arrays. The index of a part is `None`.
        """
        if path is None:
            index = next((index for index, arg in enumerate(self.args) if has_arrays(arg)), None)
            if index is None:
                raise UsageError(f"{self.text}: no argument of the function has an array in it")
            return index, self.args[index]
        # Arguments of `*args` have names with a slash.
        names = [name for name in self.names if f"{path}/".startswith(f"{name}/")]
        name = max(names, key=len, default=path.partition("/")[0])
        index = self.index_of(name, f"--params {path}")
        value, rest = self.args[index], path[len(name) :].split("/")[1:]
        for part in rest:
            value = _child(value, part, path)
        if not has_arrays(value):
            raise UsageError(f"--params {path}: it has no array in it")
        return None if rest else index, value

    def shardings(
        self, rules: LoadedRules, mesh: AbstractMesh, params_path: str | None, batch: str | None
    ) -> tuple[ShardingPlan, Any, tuple[str, ...]]:
        """Plans all arguments: parameters by the rules, what mirrors them like them, and the rest as a batch, whose
        first dimension is split over the axes in `batch`.

        Returns the plan, the shardings of each argument, and the arguments that stay whole. Rules from autoplan are for
        all arguments.
        """
        rules.check_axes(mesh)
        # Paths of such a plan begin with the index of an argument.
        if rules.is_for_step:
            plan = make_plan(rules.file.rules, self.args, mesh).check()
            return plan, plan.specs, ()
        params_index, params = self.parameters(params_path)
        plan = make_plan(rules.file.rules, params, mesh).check()
        axes = tuple(name.strip() for name in batch.split(",")) if batch else ()
        if len(dict.fromkeys(axes)) < len(axes):
            raise UsageError(f"--batch {batch}: an axis can be named only once")
        for name in axes:
            if name not in mesh.axis_names:
                near = suggest(name, mesh.axis_names)
                raise UsageError(f"--batch {batch}: unknown axis {name!r}{near}; the mesh has {mesh.axis_names}")
        shardings: list[Any] = []
        whole: list[str] = []
        for index, (name, arg) in enumerate(zip(self.names, self.args, strict=True)):
            if index == params_index:
                # A mirrored plan of the parameters would make them an optimizer's state.
                shardings.append(plan)
                continue
            mirrored = plan.mirror(arg)
            unmirrored = sum(finding.count for finding in mirrored.findings if finding.code == "unmirrored")
            # An argument none of whose arrays has a parameter's path is not a state but a batch.
            if has_arrays(arg) and unmirrored == len(mirrored.paths):
                shardings.append(_batch_specs(arg, axes))
                whole += [name] if not axes else []
            else:
                shardings.append(mirrored)
        return plan, tuple(shardings), tuple(whole)


def _child(value: Any, name: str, path: str) -> Any:
    """The child of a tree node under a name: a field, a key, or an index."""
    # One level only: everything below the node counts as a leaf.
    flat, _ = jtu.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    children = {jtu.keystr(keys, simple=True): child for keys, child in flat if keys}
    if name not in children:
        near = suggest(name, children)
        raise UsageError(f"--params {path}: unknown part {name!r}{near}; the parts are {', '.join(children) or 'none'}")
    return children[name]


def _batch_specs(tree: Any, axes: tuple[str, ...]) -> Any:
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    return jtu.tree_map(lambda leaf: spec if array_kind(leaf) is not None and leaf.shape else PartitionSpec(), tree)


def load_step(text: str) -> Step:
    """Loads a step: `module:function` or `file.py:function`, which returns `(step, *arguments)`."""
    named = load_object(text)
    if not named.is_function:
        raise UsageError(f"{text} is a {type(named.value).__name__}: name a function that returns (step, *arguments)")
    result = named.shapes()
    if not isinstance(result, tuple | list) or len(result) < 2 or not callable(result[0]):
        raise UsageError(
            f"{text} must return a step and its arguments, but returns a {type(result).__name__}: "
            "return step, params, state, batch"
        )
    return Step(text, result[0], tuple(result[1:]))


def read_hardware(text: str) -> Hardware:
    """Returns the sheet that `--hardware` names: a ready one, or a file as `Hardware.save` writes it."""
    if text in sheets():
        return sheets()[text]
    file = named_path(text)
    if not file.exists():
        near = suggest(text, sheets())
        listing = f"the sheets are {', '.join(sheets())}, and no file has this name"
        raise UsageError(f"--hardware: unknown hardware {text!r}{near}; {listing}")
    try:
        return Hardware.load(file)
    except (HardwareError, ConfigError) as error:
        raise UsageError(f"--hardware: {one_line(error)}") from error


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a step."""
    parser.add_argument("step", metavar="STEP", help="module:function or file.py:function: (step, *arguments)")
