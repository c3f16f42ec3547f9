"""Python objects named in words: `package.module:name`, `folder/file.py:name`, each with arguments if it takes any."""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.tree_util as jtu

from shardrules.cli.errors import UsageError, one_line
from shardrules.core.errors import ConfigError, ShardRulesError, suggest
from shardrules.core.tree import array_kind
from shardrules.rules.text import parse_op

_FORM = re.compile(r"(?P<where>.+?):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*(?P<call>\(.*\))?", re.DOTALL)
_KEYS = ("key", "rng", "prng_key", "rng_key")
"""Arguments of these names are random keys, which nobody has to give where only shapes are asked for."""


@final
@attrs.frozen
class Named:
    """An object that was named, before it is asked for anything.

    **Arguments:**

    - `text`: how it was named.
    - `value`: the object.
    - `args`, `named`: the arguments that were written behind its name; `None` where there were no parentheses.
    """

    text: str
    value: Any
    args: tuple[Any, ...] | None = None
    named: dict[str, Any] = attrs.Factory(dict)

    @property
    def is_function(self) -> bool:
        """Whether it is there to be called: many models can be called too, and are models already."""
        return self.args is not None or (callable(self.value) and not has_arrays(self.value))

    def shapes(self) -> Any:
        """Calls it for shapes only: no array is made, and random keys need not be given.

        **Returns:**

        What it returns, with `ShapeDtypeStruct`s for arrays.

        **Raises:**

        `UsageError` where it raises, with the line that did; where it takes arguments that nobody gave.
        """
        bound, keys = self._bound()

        def call(key: Any) -> Any:
            if bound is None:
                return self.value(*(self.args or ()), **self.named)
            bound.arguments.update(dict.fromkeys(keys, key))
            return self.value(*bound.args, **bound.kwargs)

        try:
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what the command says
                return eqx.filter_eval_shape(call, jax.eval_shape(lambda: jax.random.key(0)))
        except (Exception, SystemExit) as error:  # it is the user's own code, which may do anything
            raise UsageError(f"{self.text} raised {raised(error)}") from error

    def called(self) -> Any:
        """Calls it, if it is there to be called.

        **Returns:**

        What it returns; the object itself, where it is none to call.

        **Raises:**

        `UsageError` where it raises, with the line that did.
        """
        if not self.is_function:
            return self.value
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return self.value(*(self.args or ()), **self.named)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self.text} raised {raised(error)}") from error

    def _bound(self) -> tuple[inspect.BoundArguments | None, list[str]]:
        """The arguments that were given, and the names of those that are to be random keys."""
        try:
            signature = inspect.signature(self.value)
            bound = signature.bind_partial(*(self.args or ()), **self.named)
        except ValueError:  # Python knows no signature of some functions that are not written in Python
            return None, []
        except TypeError as error:
            raise UsageError(f"{self.text} cannot be called so: {one_line(error)}") from error
        once = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        open_ = [
            one for one in signature.parameters.values() if one.name not in bound.arguments and one.kind not in once
        ]
        keys = [one.name for one in open_ if one.name in _KEYS and one.default in (inspect.Parameter.empty, None)]
        missing = [one.name for one in open_ if one.default is inspect.Parameter.empty and one.name not in keys]
        if missing:
            many = ", ".join(f"{name}=..." for name in missing)
            raise UsageError(
                f"{self.text} takes arguments that nobody gave: write {self.text.partition('(')[0]}({many}), with "
                "numbers or texts, or name a function that takes none"
            )
        return bound, keys


def has_arrays(tree: Any) -> bool:
    """Returns whether there is an array in a tree.

    **Arguments:**

    - `tree`: anything.

    **Returns:**

    Whether any of its leaves is an array.
    """
    return any(array_kind(leaf) is not None for leaf in jtu.tree_leaves(tree))


def looks_named(text: str) -> bool:
    """Returns whether a text has the form of an object's name.

    **Arguments:**

    - `text`: what was written.

    **Returns:**

    Whether it is `where:name`, or that with arguments.

    ```python
    assert looks_named("model.py:make(depth=2)") and not looks_named("shard_dim('model', -1)")
    ```
    """
    found = _FORM.fullmatch(text)
    return found is not None and not any(char in found["where"] for char in "'\"|")


def load_named(text: str) -> Named:
    """Imports what a text names.

    **Arguments:**

    - `text`: `package.module:name` or `folder/file.py:name`, with literal arguments in parentheses if it takes any.

    **Returns:**

    The object, not called yet.

    **Raises:**

    `UsageError` where there is no such file, module or name, or where importing it raises.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} names no Python object: write module:name, or file.py:name")
    module = _module(found["where"], text)
    value: Any = module
    for part in found["name"].split("."):
        if not hasattr(value, part):
            near = suggest(part, [name for name in dir(value) if not name.startswith("_")])
            raise UsageError(f"{found['where']} has no {found['name']!r}{near}")
        value = getattr(value, part)
    if found["call"] is None:
        return Named(text, value)
    try:
        _, args, named = parse_op(f"_{found['call']}")
    except ConfigError as error:
        raise UsageError(f"{text}: the arguments cannot be read, they are to be numbers, texts, tuples ...") from error
    return Named(text, value, tuple(args), named)


def _module(where: str, text: str) -> ModuleType:
    if where.endswith(".py") or "/" in where:
        file = Path(where).expanduser()
        if file.is_dir():
            raise UsageError(
                f"{where} is a folder: name a file in it, {where.rstrip('/')}/model.py:{text.split(':')[-1]}"
            )
        if not file.is_file():
            raise UsageError(f"there is no file {where}{_near(file)}")
        return _imported(lambda: _from_file(file), where)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        known = importlib.util.find_spec(where) is not None
    except (ImportError, ValueError):
        known = False
    except Exception as error:  # a package above it that raises when it is imported
        raise UsageError(f"importing {where} raised {raised(error)}") from error
    if not known:
        raise UsageError(
            f"there is no module {where!r}: it is neither installed nor in this folder; a file is named file.py:name"
        )
    return _imported(lambda: importlib.import_module(where), where)


def _near(file: Path) -> str:
    folder = file.parent
    return suggest(file.name, [one.name for one in folder.iterdir()]) if folder.is_dir() else ""


def _from_file(file: Path) -> ModuleType:
    """The module of a file, which may import what lies beside it."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name if known is None else f"_shardrules_{name}", file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickles, and annotations that are texts, look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _imported(load: Callable[[], ModuleType], where: str) -> ModuleType:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return load()
    except (Exception, SystemExit) as error:  # the user's code may do anything, end the process among it
        raise UsageError(f"importing {where} raised {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Says what the user's own code raised, and on which of its lines.

    **Arguments:**

    - `error`: what it raised.

    **Returns:**

    One line.
    """
    at = ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" (at {Path(error.filename).name}:{error.lineno})"
    else:
        ours = ("shardrules", "jax", "equinox", "importlib", "jaxtyping")
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith("<") and not any(f"/{name}/" in frame.filename for name in ours)
        ]
        at = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    kind = "" if isinstance(error, ShardRulesError) else f"{type(error).__name__}: "
    message = error.msg if isinstance(error, SyntaxError) else one_line(error)
    return f"{kind}{message}{at}"
