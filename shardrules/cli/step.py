"""Functions to compile or to plan, with their arguments: what `audit` and `autoplan` are about.

They are named as models are: by a function that returns the step and its arguments, `(step, params, state, batch)`.
Only shapes are made of them.
"""

import argparse
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.cli.errors import UsageError
from shardrules.cli.objects import has_arrays, load_named, raised
from shardrules.cli.rules_file import RulesFile
from shardrules.cli.subject import planned
from shardrules.core.errors import DoesNotFitError, PlanError, ShardRulesError, suggest
from shardrules.core.rule import ShardingPlan
from shardrules.core.tree import array_kind


@final
@attrs.frozen
class Step:
    """A function with its arguments.

    **Arguments:**

    - `text`: how it was named.
    - `fn`: the function.
    - `args`: its arguments, shapes for arrays.
    """

    text: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the arguments are called."""
        try:
            bound = inspect.signature(self.fn).bind(*self.args).arguments
        except (TypeError, ValueError):
            return tuple(map(str, range(len(self.args))))
        found: list[str] = []
        for name, value in bound.items():
            variable = inspect.signature(self.fn).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            found += [f"{name}/{number}" for number in range(len(value))] if variable else [name]
        return tuple(found[: len(self.args)])

    def number(self, name: str, option: str) -> int:
        """Returns which argument has a name.

        **Arguments:**

        - `name`: the name.
        - `option`: where it was written, for the message.

        **Returns:**

        Its number, counted from 0.

        **Raises:**

        `UsageError` where none has it.
        """
        if name not in self.names:
            near = suggest(name, self.names)
            raise UsageError(f"{option}: there is no argument {name!r}{near}; there are {', '.join(self.names)}")
        return self.names.index(name)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Turns what the function raises while it is traced into one line that says where.

        **Raises:**

        `UsageError` for what the function raises, `PlanError` where it does not fit the machine.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except DoesNotFitError as error:
            raise PlanError(str(error)) from error
        except ShardRulesError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's own code, which may do anything
            raise UsageError(f"{self.text}: the step raised {raised(error)}") from error

    def parameters(self, where: str | None) -> Any:
        """Returns the part of the arguments that rules are for.

        **Arguments:**

        - `where`: an argument, or something in one: `"state/model"`. By default the first one with arrays in it.

        **Returns:**

        A tree.

        **Raises:**

        `UsageError` where there is none.
        """
        if where is None:
            found = next((one for one in self.args if has_arrays(one)), None)
            if found is None:
                raise UsageError(f"{self.text}: no argument of the function has an array in it")
            return found
        name, *rest = where.split("/")
        value = self.args[self.number(name, f"--params {where}")]
        for part in rest:
            value = _inside(value, part, where)
        if not has_arrays(value):
            raise UsageError(f"--params {where}: there is no array in it")
        return value

    def shardings(
        self, rules: RulesFile, mesh: AbstractMesh, where: str | None, batch: str | None
    ) -> tuple[ShardingPlan, Any, tuple[str, ...]]:
        """Plans all arguments: parameters by the rules, what mirrors them as they are, the rest as a batch.

        **Arguments:**

        - `rules`: the rules. What autoplan found is for all arguments, and says where each of them is.
        - `mesh`: the mesh.
        - `where`: which part the parameters are, as in `parameters`.
        - `batch`: the axes over which the first dimension of a batch is split, `"data"` or `"data,fsdp"`.

        **Returns:**

        The plan, what is asked for each argument, and the arguments that nobody placed.
        """
        rules.check_axes(mesh)
        if rules.is_for_step:
            plan = planned(rules.rule, self.args, mesh).check()
            return plan, plan.specs, ()
        plan = planned(rules.rule, self.parameters(where), mesh).check()
        axes = tuple(name.strip() for name in batch.split(",")) if batch else ()
        for name in axes:
            if name not in mesh.axis_names:
                near = suggest(name, mesh.axis_names)
                raise UsageError(f"--batch {batch}: the mesh has no axis {name!r}{near}; it has {mesh.axis_names}")
        asked: list[Any] = []
        whole: list[str] = []
        for name, arg in zip(self.names, self.args, strict=True):
            mirrored = plan.mirror(arg)
            own = [one for one in mirrored.findings if one.code == "unmirrored"]
            if has_arrays(arg) and sum(one.count for one in own) == len(mirrored.paths):
                asked.append(_as_batch(arg, axes))
                whole += [name] if not axes else []
            else:
                asked.append(mirrored)
        return plan, tuple(asked), tuple(whole)


def _inside(value: Any, part: str, where: str) -> Any:
    """What lies in a tree under a name: a field, a key, or a place."""
    known: dict[str, Any] = {}
    children, _ = jtu.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    for (key,), child in ((path, child) for path, child in children if path):
        known[str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))] = child
    if part not in known:
        near = suggest(part, known)
        raise UsageError(f"--params {where}: there is no {part!r} in it{near}; there are {', '.join(known) or 'none'}")
    return known[part]


def _as_batch(tree: Any, axes: tuple[str, ...]) -> Any:
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    return jtu.tree_map(lambda leaf: spec if array_kind(leaf) is not None and leaf.shape else PartitionSpec(), tree)


def load_step(text: str) -> Step:
    """Loads a function with its arguments.

    **Arguments:**

    - `text`: `module:function` or `file.py:function`; what it names returns `(step, *arguments)`.

    **Returns:**

    A `Step`.

    **Raises:**

    `UsageError` where it names something else.
    """
    named = load_named(text)
    if not named.is_function:
        raise UsageError(f"{text} is a {type(named.value).__name__}: name a function that returns (step, *arguments)")
    found = named.shapes()
    if not isinstance(found, tuple | list) or len(found) < 2 or not callable(found[0]):
        raise UsageError(
            f"{text} returns a {type(found).__name__}, where a step and its arguments are wanted: "
            "return step, params, state, batch"
        )
    return Step(text, found[0], tuple(found[1:]))


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a step.

    **Arguments:**

    - `parser`: the command's.
    """
    parser.add_argument(
        "step", metavar="STEP", help="module:function or file.py:function that returns (step, *arguments)"
    )
