"""Python objects and shapes named on the command line: `package.module:name`, `folder/file.py:name`, `int32[8,16]`."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import missing_file, named_path
from shardrules.core.errors import ConfigError, ShardRulesError, suggest
from shardrules.core.fields import whole_number
from shardrules.core.tree import array_kind
from shardrules.rules.text import OBJECT_NAME, parse_op

_SHAPE = re.compile(r"\s*(?P<dtype>[a-z]\w*)\[(?P<dims>[0-9,\s]*)\]\s*")

_KEY_PARAMETERS = ("key", "rng", "prng_key", "rng_key")
"""Names of parameters that take random keys. They need not be written, since only shapes are computed."""


@final
@attrs.frozen
class NamedObject:
    """An object named on the command line, not called yet."""

    text: str
    """Its name as it was written, with the arguments."""
    value: Any
    args: tuple[Any, ...] | None = None
    """The arguments in parentheses; `None` without parentheses."""
    kwargs: Mapping[str, Any] = attrs.Factory(dict)

    @property
    def is_function(self) -> bool:
        """It is to be called. Many models are callable, but an object that has arrays is a model already."""
        return self.args is not None or (callable(self.value) and not has_arrays(self.value))

    def shapes(self) -> Any:
        """Calls it for shapes, without making arrays. Random keys that were not written are filled in."""
        bound, key_names = self._bind()

        def call(key: Any) -> Any:
            bound.arguments.update(dict.fromkeys(key_names, key))
            return self.value(*bound.args, **bound.kwargs)

        with user_code(self.text):
            # An abstract key: no random number is ever drawn.
            return eqx.filter_eval_shape(call, jax.eval_shape(lambda: jax.random.key(0)))

    def call(self) -> Any:
        """Returns the result of calling it, or the object itself if it is not a function."""
        if not self.is_function:
            return self.value
        with user_code(self.text):
            return self.value(*(self.args or ()), **self.kwargs)

    def _bind(self) -> tuple[inspect.BoundArguments, list[str]]:
        """The arguments that were written, and the names of the parameters to fill with random keys."""
        try:
            signature = inspect.signature(self.value)
            bound = signature.bind_partial(*(self.args or ()), **self.kwargs)
        except ValueError:  # some functions of C have no signature: they are called with what was written
            return inspect.signature(lambda *args, **kwargs: None).bind(*(self.args or ()), **self.kwargs), []
        except TypeError as error:
            raise UsageError(f"cannot call {self.text}: {one_line(error)}") from error
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        unbound = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.name not in bound.arguments and parameter.kind not in variadic
        ]
        required = [parameter.name for parameter in unbound if parameter.default is inspect.Parameter.empty]
        key_names = [
            parameter.name
            for parameter in unbound
            if parameter.name in _KEY_PARAMETERS and parameter.default in (inspect.Parameter.empty, None)
        ]
        missing = [name for name in required if name not in key_names]
        if missing:
            assignments = ", ".join(f"{name}=..." for name in missing)
            raise UsageError(
                f"{self.text} has required arguments: write {self.text.partition('(')[0]}({assignments}), with numbers "
                "or strings, or name a function that has none"
            )
        return bound, key_names


def has_arrays(tree: Any) -> bool:
    """Returns whether any leaf of a tree is an array."""
    return any(array_kind(leaf) is not None for leaf in jtu.tree_leaves(tree))


def load_object(text: str) -> NamedObject:
    """Imports the object that a string names, and reads its arguments. A `UsageError` says what is wrong."""
    match = OBJECT_NAME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} does not name a Python object: write module:name, or file.py:name")
    value: Any = _load_module(match["module"], text)
    for part in match["name"].split("."):
        if not hasattr(value, part):
            near = suggest(part, [name for name in dir(value) if not name.startswith("_")])
            raise UsageError(f"{match['module']} has no {match['name']!r}{near}")
        value = getattr(value, part)
    if match["call"] is None:
        return NamedObject(text, value)
    try:
        # An op is a name with literal arguments, too: `_` replaces the name.
        _, args, kwargs = parse_op(f"_{match['call']}")
    except ConfigError as error:
        raise UsageError(f"{text}: the arguments must be literals (strings, numbers, tuples ...)") from error
    return NamedObject(text, value, tuple(args), kwargs)


def _load_module(name: str, text: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        file = named_path(name)
        if file.is_dir():
            example = f"{name.rstrip('/')}/model.py:{text.split(':')[-1]}"
            raise UsageError(f"{name} is a folder: name a file in it, {example}")
        if not file.is_file():
            raise missing_file(file)
        with user_code(f"importing {name}"):
            return _module_from_file(file)
    # Modules in the current folder can be named, as with `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    with user_code(f"importing {name}"):
        try:
            exists = importlib.util.find_spec(name) is not None  # it imports the parent package
        except (ImportError, ValueError):
            exists = False
        if not exists:
            raise UsageError(f"module {name!r} is neither installed nor in this folder; for a file, write file.py:name")
        return importlib.import_module(name)


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    package = _package_of(file)
    if package:
        return _module_in_package(file, package)
    folder = str(file.parent)
    # The file may import its siblings.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    namesake = sys.modules.get(file.stem)
    if namesake is not None and getattr(namesake, "__file__", None) == str(file):
        return namesake
    # Another module of this name must stay importable under it.
    name = file.stem if namesake is None else f"_shardrules_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where pickles and string annotations look for it.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _package_of(file: Path) -> tuple[str, ...]:
    """The folders that make up the package of a file, outermost first; nothing for a file that stands alone."""
    folders = [folder for folder in file.parents if folder.name]
    count = next((count for count, folder in enumerate(folders) if not (folder / "__init__.py").is_file()), 0)
    # A package need not have an __init__.py, and then only the imports of the file show that it is in one.
    count = max(count, _import_level(file))
    return tuple(folder.name for folder in reversed(folders[:count]))


def _import_level(file: Path) -> int:
    """The number of folders that the relative imports of a file go up, `from . import` being 1."""
    try:
        nodes = ast.walk(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):
        # Importing it says so.
        return 0
    return max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)


def _module_in_package(file: Path, package: tuple[str, ...]) -> ModuleType:
    """Imports a file by its dotted name, so that its relative imports work."""
    root = file.parents[len(package)]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # Scripts inside of packages may import their siblings by name: after all else, which these must not hide.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = ".".join(package if file.stem == "__init__" else (*package, file.stem))
    module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != file:
        raise UsageError(
            f"{file} is {name} of the package {package[0]}, but {name} is {module.__file__} here, which was imported "
            "first: rename one of the packages"
        )
    return module


def import_extra(name: str, user: str, extra: str) -> ModuleType:
    """Imports a library that an extra installs; a `UsageError` says that `user` needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f'{user} needs {name}: pip install "shardrules[{extra}]"') from error


@contextlib.contextmanager
def user_code(name: str, passed: type[Exception] = UsageError) -> Iterator[None]:
    """Turns whatever code of the user's raises, apart from `passed` errors, into a `UsageError` of one line."""
    try:
        # Stdout may be JSON: what user code prints must not mix in.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name} raised {_described(error)}") from error


def _described(error: BaseException) -> str:
    """Returns one line with the class, the message and the user's line of an error that user code raised."""
    if isinstance(error, SyntaxError) and error.filename:
        location = f" (at {Path(error.filename).name}:{error.lineno})"
    else:
        libraries = ("shardrules", "jax", "equinox", "importlib", "jaxtyping", "optax")
        # The innermost frame outside of libraries is the line that the user can fix.
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith("<") and not any(f"/{name}/" in frame.filename for name in libraries)
        ]
        location = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    # Our own messages are written to stand alone.
    class_name = "" if isinstance(error, ShardRulesError) else f"{type(error).__name__}: "
    message = error.msg if isinstance(error, SyntaxError) else one_line(error)
    return f"{class_name}{message}{location}"


def load_shapes(text: str) -> Any:
    """Returns the tree that `module:function` returns, as shapes, or the arrays in `"int32[8,16], float32[8]"`."""
    if "[" in text and ":" not in text:
        return _read_shapes(text)
    if OBJECT_NAME.fullmatch(text) is None:
        raise UsageError(
            f"{text!r} has no arrays: write module:name, file.py:name, or a dtype and shape, int32[512,4097]"
        )
    named = load_object(text)
    tree = named.shapes() if named.is_function else named.value
    if not has_arrays(tree):
        raise UsageError(f"{text} has no array in it")
    return tree


def _read_shapes(text: str) -> Any:
    shapes: list[jax.ShapeDtypeStruct] = []
    # Commas between brackets separate sizes, the others arrays.
    for part in re.split(r",(?![^\[]*\])", text):
        match = _SHAPE.fullmatch(part)
        try:
            dtype = None if match is None else jnp.dtype(match["dtype"])
        except TypeError:
            dtype = None
        sizes = [whole_number(size.strip()) for size in match["dims"].split(",") if size.strip()] if match else [None]
        if dtype is None or None in sizes:
            raise UsageError(f"{part.strip()!r} is not an array's dtype and shape, as int32[512,4097] is")
        shapes.append(jax.ShapeDtypeStruct(tuple(sizes), dtype))
    return shapes[0] if len(shapes) == 1 else tuple(shapes)
