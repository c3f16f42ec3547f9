"""Files that are modules of packages."""

import itertools
from pathlib import Path

import pytest

from shardrules.cli.errors import UsageError
from shardrules.cli.objects import load_object

_names = itertools.count()
MAKE = "{imports}\ndef make():\n    return WIDTH\n"


def package(folder: Path, *parts: str, has_init: bool = True) -> Path:
    """A folder with a name of its own, since Python imports each name once, and `layers.py` at its top."""
    root = folder / f"tinylm{next(_names)}"
    inner = root.joinpath(*parts)
    inner.mkdir(parents=True)
    (root / "layers.py").write_text("WIDTH = 8\n")
    for part in [root, *(root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))] if has_init else []:
        (part / "__init__.py").touch()
    return inner


@pytest.mark.parametrize("has_init", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_relative_imports_work(depth: int, has_init: bool, tmp_path: Path) -> None:
    inner = package(tmp_path, *["models", "large"][:depth], has_init=has_init)
    (inner / "model.py").write_text(MAKE.format(imports=f"from {'.' * (depth + 1)}layers import WIDTH"))
    assert load_object(f"{inner}/model.py:make").call() == 8


def test_modules_of_a_package_are_imported_once(tmp_path: Path) -> None:
    root = package(tmp_path)
    (root / "model.py").write_text(MAKE.format(imports=f"from {root.name}.layers import WIDTH\nclass Model: pass"))
    (root / "rules.py").write_text("from .model import Model\n")
    assert load_object(f"{root}/model.py:Model").value is load_object(f"{root}/rules.py:Model").value


def test_files_in_packages_may_import_siblings_by_name(tmp_path: Path) -> None:
    root = package(tmp_path)
    sibling = f"sibling{next(_names)}"
    (root / f"{sibling}.py").write_text("WIDTH = 9\n")
    (root / "model.py").write_text(MAKE.format(imports=f"from {sibling} import WIDTH"))
    assert load_object(f"{root}/model.py:make").call() == 9


def test_the_init_of_a_package_can_be_named(tmp_path: Path) -> None:
    root = package(tmp_path)
    (root / "__init__.py").write_text(MAKE.format(imports="from .layers import WIDTH"))
    assert load_object(f"{root}/__init__.py:make").call() == 8


def test_two_packages_of_one_name_are_an_error(tmp_path: Path) -> None:
    for name in ("first", "second"):
        root = tmp_path / name / "twins"
        root.mkdir(parents=True)
        (root / "__init__.py").touch()
        (root / "model.py").write_text("def make():\n    return 1\n")
    load_object(f"{tmp_path}/first/twins/model.py:make")
    with pytest.raises(UsageError, match=r"second/twins/model\.py is twins\.model .* imported first: rename"):
        load_object(f"{tmp_path}/second/twins/model.py:make")


def test_imports_above_the_root_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"from {'.' * 40}layers import WIDTH\n")
    with pytest.raises(UsageError, match=r"importing .*model\.py raised ImportError: "):
        load_object(f"{tmp_path}/model.py:make")


def test_functions_without_a_signature_are_called() -> None:
    assert load_object("builtins:max(1, 2)").shapes() == 2
    with pytest.raises(UsageError, match=r"builtins:max raised TypeError: max expected at least 1 argument"):
        load_object("builtins:max").shapes()
