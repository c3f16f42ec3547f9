"""The model of a command, as shapes: from code, from a checkpoint, or from a plan."""

import collections
import json
from pathlib import Path
from typing import Any, final

import attrs
import jax

from shardrules.cli.checkpoints import load_orbax_shapes, load_safetensors_shapes
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import named_path, read_text
from shardrules.cli.objects import NamedObject, has_arrays, load_object
from shardrules.core.errors import PlanError, ReportError
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.records import Format, is_cut_off
from shardrules.core.storage.records import read_json as parse_json
from shardrules.programs.autoplan.answer.version import AUTOPLAN, TRAINING_PLAN
from shardrules.rules.text import is_object_name

FORMS = "module:function, file.py:function, a .safetensors file or index, an orbax checkpoint, or a plan's JSON"
"""The forms of a model, for messages."""

_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


@final
@attrs.frozen
class Model:
    """A tree of shapes, and the plan that it came from, if any."""

    name: str
    """The name in headings."""
    tree: Any
    plan: ShardingPlan | None = None
    head_dim: int | None = None
    """The size of an attention head, for rules that the tree does not show it."""


def load_model(text: str) -> Model:
    """Loads a model from its name on the command line. Only shapes are read or computed."""
    if not text:
        raise UsageError(f"the name of the model is empty: a model is {FORMS}")
    path = named_path(text)
    # A file with a colon in its name is still a file.
    if not path.exists() and is_object_name(text):
        return _from_code(load_object(text))
    # A folder is looked for before suffixes are read: it may have any name.
    if path.is_dir():
        return _from_folder(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return _from_safetensors(path)
    if path.suffix == ".json":
        plan = read_plan(path)
        return Model(path.name, tree_of(plan), plan)
    if path.suffix == ".py":
        raise UsageError(f"{text} is a Python file: name a function in it that returns the model, {text}:make")
    if not path.exists():
        # A call with an open parenthesis is no name of an object, and reads like a missing file.
        open_part = text.count("(") != text.count(")")
        cause = "has parentheses that do not match" if open_part else "does not exist"
        raise UsageError(f"{text} {cause}: a model is {FORMS}")
    raise UsageError(f"cannot read {text} as a model: a model is {FORMS}")


PLANS = Format("shardrules_plans", 1)

_KINDS = {
    "shardrules": "a plan",
    "shardrules_plans": "a plan with an optimizer's state",
    "shardrules_autoplan": "an autoplan",
    "shardrules_train_plan": "a training plan",
    "weight_map": "the table of a checkpoint: an index of safetensors ends in .safetensors.index.json",
    "shardrules_audit": "an audit, which shardrules diff compares and report --audit shows",
    "shardrules_check": "the answer of shardrules check",
    "shardrules_diff": "the answer of shardrules diff",
    "shardrules_moves": "a plan of moves between meshes",
    "model_type": "the configuration of a model: name its checkpoint",
}
"""The kind of JSON with a certain key."""


def read_plan(path: Path) -> ShardingPlan:
    """Reads the JSON of a plan, also inside of what `shardrules autoplan` or `plan --optimizer` wrote."""
    text = read_text(path)
    data = read_json(path, text)
    # Autoplan and train-plan have the plan beside their figures, and with an optimizer there are two plans.
    for each, part in ((AUTOPLAN, "plan"), (TRAINING_PLAN, "plan"), (PLANS, "model")):
        key = each.key
        if isinstance(data, dict) and key in data and part in data:
            if data[key] != each.version:
                raise UsageError(f"{path} has format {data[key]!r} of {key}, and this version reads {each.version}")
            text = json.dumps(data[part])
    try:
        return ShardingPlan.from_json(text)
    except PlanError as error:
        # A plan of this version with a mistake in it gets the reader's message; anything else gets its kind.
        if isinstance(data, dict) and "shardrules" in data:
            raise UsageError(f"{path}: {one_line(error)}") from error
        kind = kind_of(data) or "JSON, but not what shardrules plan -o writes"
        raise UsageError(f"{path} is not a plan: it is {kind}") from error


def is_of_arguments(text: str) -> bool:
    """Returns whether the JSON of a plan is of all arguments of a step, as those of autoplan and train-plan are."""
    return any(f'"{key}"' in text[:100] for key in (AUTOPLAN.key, TRAINING_PLAN.key))


def kind_of(data: Any) -> str:
    """Returns what kind of document JSON is, by its keys; nothing for others."""
    kinds = (meaning for key, meaning in _KINDS.items() if isinstance(data, dict) and key in data)
    return next(kinds, "")


def read_json(path: Path, text: str) -> Any:
    """Returns what a text of JSON says. A `UsageError` says where it is invalid, or that it is cut off."""
    if not text.strip():
        raise UsageError(f"{path} is empty; shardrules plan -o {path.name} writes a plan")
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if is_cut_off(error):
            raise UsageError(f"{path} is cut off after {len(text):,} characters: write or download it again") from error
        raise UsageError(f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def read_report(file: Path, kind: Any, command: str) -> Any:
    """Reads the report that a command wrote as JSON, of the class `kind`."""
    text = read_text(file)
    data = read_json(file, text)
    if not isinstance(data, dict) or f"shardrules_{command.replace('-', '_')}" not in data:
        document = kind_of(data)
        cause = f"{file} is {document}, not" if document else f"{file} is not"
        raise UsageError(f"--{command}: {cause} what shardrules {command} -o writes")
    try:
        return kind.from_json(text)
    except ReportError as error:
        hint = f"write one with shardrules {command} -o {file.name}"
        raise UsageError(f"--{command} {file}: {one_line(error)}; {hint}") from error


def tree_of(plan: ShardingPlan) -> Any:
    """Returns the arrays of a plan as a dictionary of shapes by path."""
    return collections.OrderedDict((leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) for leaf in plan.leaves)


def _from_code(named: NamedObject) -> Model:
    tree = named.shapes() if named.is_function else named.value
    kind = "None" if tree is None else f"a value of type {type(tree).__name__}"
    if not has_arrays(tree):
        actual = f"{named.text} {'returns' if named.is_function else 'is'} {kind}"
        raise UsageError(f"{actual}, with no array in it: name a function that returns a model, or the model itself")
    return Model(named.text.rpartition(":")[2].partition("(")[0], tree)


def _from_folder(path: Path) -> Model:
    names = [file.name for file in path.iterdir()]
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return _from_safetensors(path)
    if any(name in _ORBAX for name in names) or any((path / name / "_METADATA").exists() for name in names):
        return Model(path.name, load_orbax_shapes(path))
    content = f"has {', '.join(sorted(names)[:3])}{' ...' * (len(names) > 3)}" if names else "is empty"
    raise UsageError(f"the folder {path} {content}: neither .safetensors nor an orbax checkpoint; a model is {FORMS}")


def _from_safetensors(path: Path) -> Model:
    tree, head_dim = load_safetensors_shapes(path)
    return Model(path.name, tree, head_dim=head_dim)
