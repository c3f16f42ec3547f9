"""Every class is abstract or final, a method is implemented once, and fields sit in one class."""

import abc
import enum
import importlib
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Generic, NamedTuple, Protocol, final, is_typeddict

import attrs
import pytest

from shardrules.core.errors import NoIntermediateShardingError, ShardRulesError
from tests.house.source import shardrules_source

ERROR_BASES = (ShardRulesError, NoIntermediateShardingError)
"""Concrete errors that may have subclasses, so that one `except` catches them all."""

OPEN_BASES = (object, Generic, Protocol, abc.ABC, enum.Enum, enum.IntEnum, enum.StrEnum)
"""Classes of others that are there to be inherited from. Errors and what has abstract methods may be too."""


def classes_of(names: Iterable[str]) -> tuple[type, ...]:
    """Returns the classes that the modules called `names` define, private ones too.

    A `TypedDict` is the type of a plain dictionary and no class of its own.
    """
    classes = []
    for name in names:
        module = importlib.import_module(name)
        members = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        classes += [cls for cls in members if not is_typeddict(cls)]
    return tuple(dict.fromkeys(classes))


def is_final(cls: type) -> bool:
    return vars(cls).get("__final__", False)


def is_abstract(cls: type) -> bool:
    return not is_final(cls) and (inspect.isabstract(cls) or abc.ABC in cls.__bases__ or Protocol in cls.__bases__)


def is_error(cls: type) -> bool:
    return issubclass(cls, BaseException)


def neither_abstract_nor_final(classes: tuple[type, ...], error_bases: tuple[type, ...]) -> list[str]:
    """Classes that are neither abstract, nor `@final`, nor the base of the errors."""
    return [cls.__name__ for cls in classes if not (is_abstract(cls) or is_final(cls) or cls in error_bases)]


def both_abstract_and_final(classes: tuple[type, ...]) -> list[str]:
    """Final classes with methods that can no longer be implemented."""
    return [cls.__name__ for cls in classes if is_final(cls) and inspect.isabstract(cls)]


def concrete_parents(classes: tuple[type, ...], error_bases: tuple[type, ...]) -> list[str]:
    """Classes that inherit from a concrete class, of their own package or of another."""
    bad = []
    for cls in classes:
        for base in cls.__bases__:
            if base in classes:
                fine = is_abstract(base) or base in error_bases
            else:
                named_tuple = base is tuple and "_fields" in vars(cls)
                fine = base in OPEN_BASES or is_error(base) or inspect.isabstract(base) or named_tuple
            if not fine:
                bad.append(f"{cls.__name__} inherits from {base.__name__}")
    return bad


def overridden_methods(classes: tuple[type, ...]) -> list[str]:
    """Methods and properties that replace an implementation, rather than fill in an abstract one."""
    methods = (FunctionType, property, classmethod, staticmethod)
    return [
        f"{cls.__name__}.{name} overrides {base.__name__}.{name}"
        for cls in classes
        for name, value in vars(cls).items()
        if isinstance(value, methods) and not (name.startswith("__") and name.endswith("__"))
        for base in cls.__mro__[1:]
        if base in classes and isinstance(vars(base).get(name), methods)
        if not getattr(vars(base)[name], "__isabstractmethod__", False)
    ]


def inherited_fields(classes: tuple[type, ...]) -> list[str]:
    """Fields that an attrs class inherits, so that no one place says how the value is built."""
    return [
        f"{cls.__name__} inherits the field {field.name}"
        for cls in classes
        for field in (attrs.fields(cls) if attrs.has(cls) else ())
        if field.inherited
    ]


def faults(classes: tuple[type, ...], error_bases: tuple[type, ...]) -> list[str]:
    """Everything that is wrong with some classes."""
    return [
        *neither_abstract_nor_final(classes, error_bases),
        *both_abstract_and_final(classes),
        *concrete_parents(classes, error_bases),
        *overridden_methods(classes),
        *inherited_fields(classes),
    ]


def test_every_class_is_abstract_or_final() -> None:
    classes = classes_of([module.name for module in shardrules_source()])
    assert ShardRulesError in classes
    assert faults(classes, ERROR_BASES) == []


# Planted violations, among classes that are as they should be.


class _Rule(abc.ABC):
    @abc.abstractmethod
    def apply(self, tree: Any) -> Any: ...

    def plan(self, tree: Any) -> Any:
        return self.apply(tree)


class _LeafRule(_Rule):
    """Abstract although it fills in one method: another is open."""

    @abc.abstractmethod
    def decide(self, leaf: Any) -> Any: ...

    def apply(self, tree: Any) -> Any:
        return self.decide(tree)


@final
@attrs.frozen
class _Good(_LeafRule):
    axis: str

    def decide(self, leaf: Any) -> Any:
        return leaf

    def __str__(self) -> str:
        return self.axis


class _Error(Exception):
    pass


@final
class _GoodError(_Error, ValueError):
    pass


class _Open:
    """Neither."""


@final
class _Child(_Open):
    pass


@final
class _Foreign(dict):
    pass


@final
class _Pair(NamedTuple):
    left: int


_Never = final(type("_Never", (_Rule,), {}))  # written as a class it would not get past pyright


@final
class _Override(_LeafRule):
    def decide(self, leaf: Any) -> Any:
        return leaf

    def plan(self, tree: Any) -> Any:
        return None


@attrs.frozen
class _HasField(abc.ABC):
    size: int


@final
@attrs.frozen
class _TakesField(_HasField):
    pass


GOOD = (_Rule, _LeafRule, _Good, _Error, _GoodError, _Pair)


@pytest.mark.parametrize(
    ("classes", "error_bases", "complaints"),
    [
        (GOOD, (_Error,), []),
        ((*GOOD, _Open), (_Error,), ["_Open"]),
        (GOOD, (), ["_Error", "_GoodError inherits from _Error"]),
        ((*GOOD, _Never), (_Error,), ["_Never"]),
        ((*GOOD, _Open, _Child), (_Error,), ["_Open", "_Child inherits from _Open"]),
        ((*GOOD, _Foreign), (_Error,), ["_Foreign inherits from dict"]),
        ((*GOOD, _Override), (_Error,), ["_Override.plan overrides _Rule.plan"]),
        ((_HasField, _TakesField), (), ["_TakesField inherits the field size"]),
    ],
    ids=["good", "open", "an error", "never", "a child", "foreign", "an override", "a field"],
)
def test_only_violations_are_reported(
    classes: tuple[type, ...], error_bases: tuple[type, ...], complaints: list[str]
) -> None:
    assert faults(classes, error_bases) == complaints
