"""What a command is about: a model of which only shapes are known, from code, from a checkpoint, or from a plan."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import attrs
import jax

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text
from shardrules.cli.objects import Named, has_arrays, load_named, looks_named
from shardrules.core.errors import CheckpointError, PlanError
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.placement.checkpoints.names import StoredArray
from shardrules.placement.checkpoints.orbax import read_orbax_metadata
from shardrules.placement.checkpoints.safetensors import read_headers

FORMS = (
    "a model is module:function, file.py:function, a .safetensors file or index, an orbax checkpoint, or a plan's JSON"
)
"""What a model may be given as, for messages."""

_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


@final
@attrs.frozen
class Model:
    """A tree of shapes, or a plan that was made before.

    **Arguments:**

    - `name`: how it is called in headings.
    - `tree`: the tree; `None` for a plan.
    - `plan`: the plan, if it is one.
    """

    name: str
    tree: Any = None
    plan: ShardingPlan | None = None


def load_model(text: str) -> Model:
    """Loads what a command is about. Of arrays nothing but shapes is read or computed.

    **Arguments:**

    - `text`: what was written on the command line.

    **Returns:**

    A `Model`.

    **Raises:**

    `UsageError` that says what is wrong with it.
    """
    if not text:
        raise UsageError(f"the name of the model is empty: {FORMS}")
    path = Path(text).expanduser()
    if not path.exists() and looks_named(text):
        return _of_code(load_named(text))
    if path.is_dir():
        return _of_folder(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return _of_safetensors(path)
    if path.suffix == ".json":
        return Model(path.name, plan=read_plan(path))
    if path.suffix == ".py":
        raise UsageError(f"{text} is a file of Python: name a function in it that makes the model, {text}:make")
    if not path.exists():
        raise UsageError(f"there is no {text}: {FORMS}")
    raise UsageError(f"{text} is none of what can be read: {FORMS}")


def read_plan(path: Path) -> ShardingPlan:
    """Reads a plan: its own JSON, or what `shardrules autoplan` wrote.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    The plan.

    **Raises:**

    `UsageError` where it is no plan.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
        inner = data.get("plan") if isinstance(data, dict) and "shardrules_autoplan" in data else None
        return ShardingPlan.from_json(text if inner is None else json.dumps(inner))
    except (PlanError, ValueError, RecursionError) as error:
        hint = "; an index of safetensors ends in .safetensors.index.json" if "weight_map" in text[:10_000] else ""
        raise UsageError(f"{path}: {one_line(error)}{hint}") from error


def _of_code(named: Named) -> Model:
    tree = named.shapes() if named.is_function else named.value
    kind = "None" if tree is None else f"a value of type {type(tree).__name__}"
    if not has_arrays(tree):
        what = f"{named.text} {'returns' if named.is_function else 'is'} {kind}"
        raise UsageError(f"{what}, with no array in it: name a function that returns a model, or the model itself")
    return Model(named.text.rpartition(":")[2].partition("(")[0], tree)


def _of_folder(path: Path) -> Model:
    inside = [one.name for one in path.iterdir()]
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in inside):
        return _of_safetensors(path)
    if any(name in _ORBAX for name in inside) or any((path / name / "_METADATA").exists() for name in inside):
        return _of_orbax(path)
    what = f"with {', '.join(sorted(inside)[:3])}{' ...' * (len(inside) > 3)}" if inside else "that is empty"
    raise UsageError(f"{path} is a folder {what}: it holds no .safetensors and no checkpoint of orbax; {FORMS}")


def _of_orbax(path: Path) -> Model:
    try:
        held = read_orbax_metadata(path)
    except CheckpointError as error:
        raise UsageError(one_line(error)) from error
    arrays = {name: one for name, one in held.items() if one.dtype is not None}  # texts and the like take no place
    return Model(path.name, _tree(arrays, path))


def _of_safetensors(path: Path) -> Model:
    """The tensors of which headers speak. What follows the headers need not be there: it is not looked at."""
    found = read_headers(path, whole=False)
    if found.problems:
        raise UsageError(f"{_listed(found.problems)}")
    strange = {one.dtype_name: name for name, one in found.stored.items() if one.dtype is None}
    if strange:
        known = ", ".join(f"{said} ({name})" for said, name in strange.items())
        raise UsageError(f"{path} holds tensors of dtypes that cannot be loaded as arrays of JAX: {known}")
    paths = {name: name.replace(".", "/") for name in found.stored}
    clash = len(dict.fromkeys(paths.values())) < len(paths)  # one name has a dot where another has a slash
    return Model(path.name, _tree({name if clash else paths[name]: one for name, one in found.stored.items()}, path))


def _listed(wrong: Iterable[Finding]) -> str:
    first, *rest = wrong
    more = f" (and {len(rest)} more such)" if rest else ""
    return one_line(ValueError(f"{first.path}: {first.message}{f'; {first.remedy}' if first.remedy else ''}{more}"))


def _tree(held: Mapping[str, StoredArray], path: Path) -> Any:
    """The arrays as a tree of dictionaries and, where names are 0, 1, 2 and so on, lists: layers are decided once."""
    if not held:
        raise UsageError(f"{path} holds no arrays")
    flat = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in held.items()}
    root: dict[str, Any] = {}
    for name, struct in flat.items():
        *modules, last = name.split("/")
        node = root
        for module in modules:
            node = node.setdefault(module, {})
            if not isinstance(node, dict):  # an array and a module have one name: no tree has that
                return flat
        if last in node:
            return flat
        node[last] = struct
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if all(str(number) in node for number in range(len(node))):
        return [_with_lists(node[str(number)]) for number in range(len(node))]
    return {name: _with_lists(one) for name, one in node.items()}
