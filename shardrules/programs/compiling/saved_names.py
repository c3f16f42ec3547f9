"""Policies of `jax.checkpoint` that save arrays by name, and the names that a function has.

`save_only_these_names("attention")` keeps nothing at all where nothing is called "attention": everything is computed
again, without a word. A policy is a function that says for an operation whether its result is saved. Its names are the
strings that it refers to for which it says something else than for a name that nobody uses.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, final

import attrs
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.core.source import equation_line
from shardrules.programs.jaxprs.calls import is_checkpoint
from shardrules.programs.jaxprs.walk import equations

_NO_NAME = "a name that no function has"


@final
@attrs.frozen
class SavingPolicy:
    """A policy that saves arrays by name: its names, those that the function has, and a line that it is used on."""

    names: tuple[str, ...]
    matching: tuple[str, ...]
    source: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The names that nothing has."""
        return tuple(name for name in self.names if name not in self.matching)


def existing_names(program: ClosedJaxpr | Jaxpr) -> tuple[str, ...]:
    """Returns the names that `checkpoint_name` gives to arrays of a traced function, in the order of the function."""
    named = (equation.params["name"] for equation in equations(program) if equation.primitive.name == "name")
    return tuple(dict.fromkeys(map(str, named)))


def saving_policies(program: ClosedJaxpr | Jaxpr) -> tuple[SavingPolicy, ...]:
    """Returns the policies of a traced function that save by name."""
    named = [
        (str(each.params["name"]), _function(each)) for each in equations(program) if each.primitive.name == "name"
    ]
    policies: dict[tuple[str, ...], SavingPolicy] = {}
    for equation in equations(program):
        if is_checkpoint(equation) and callable(equation.params.get("policy")):
            names = policy_names(equation.params["policy"])
            if not names:
                continue
            # Of what the backward pass computes, names that are saved are left out: they are where the same functions
            # run in the forward pass.
            functions = {_function(each) for each in equations(equation.params["jaxpr"])}
            existing = {name for name, function in named if function is None or function in functions}
            earlier = policies.get(names, SavingPolicy(names, (), _line_inside(equation)))
            matching = tuple(name for name in names if name in existing or name in earlier.matching)
            policies[names] = attrs.evolve(earlier, matching=matching)
    return tuple(policies.values())


def _function(equation: Any) -> tuple[str, str] | None:
    """File and name of the function that was traced when an operation was: the body of a loop, or what is checkpointed.

    JAX starts the traceback of an operation there.
    """
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else ()
    return (frames[-1].file_name, frames[-1].function_name) if frames else None


def _line_inside(equation: Any) -> str:
    """The first line of a checkpointed function. The line of the equation itself may be the call of `grad`."""
    inner = equation.params["jaxpr"]
    lines = (equation_line(each) for each in equations(inner))
    return next(filter(None, lines), "") or equation_line(equation)


def policy_names(policy: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arrays that a policy saves, sorted; none for a policy that does not save by name."""
    unnamed = _verdict(policy, _NO_NAME)
    # A policy of policies of policies has its names three deep. The number of strings is chosen by hand: a policy may
    # refer to a whole configuration, and names come early.
    candidates = dict.fromkeys(itertools.islice(_strings(policy, depth=4), 10_000))
    return tuple(sorted(name for name in candidates if _verdict(policy, name) != unnamed)) if not unnamed[0] else ()


def _verdict(policy: Callable[..., Any], name: str) -> tuple[bool, str]:
    """The policy's verdict on an array of a name: whether it is saved in any way, and the verdict as text."""
    equation = _named_equation()
    try:
        verdict = policy(equation.primitive, *(operand.aval for operand in equation.invars), **_renamed(equation, name))
    except Exception as error:  # noqa: BLE001 - a policy of a user may refuse what it was not written for
        return False, type(error).__name__
    # JAX says no by False, or by a value of a class of its own.
    return verdict is True or "Save" in type(verdict).__name__ or "Offload" in type(verdict).__name__, repr(verdict)


def _renamed(equation: Any, name: str) -> dict[str, Any]:
    return {**equation.params, "name": name}


@functools.cache
def _named_equation() -> Any:
    return jax.make_jaxpr(lambda x: checkpoint_name(x, _NO_NAME))(0.0).eqns[0]


def _strings(value: Any, depth: int) -> Iterator[str]:
    """Yields the strings that a value refers to: in collections, closures, fields and constants of code."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings((*value, *value.values()), depth)
    elif isinstance(value, list | tuple | set | frozenset):
        # Sets have no order: names are sorted in the end.
        for item in value:
            yield from _strings(item, depth)
    elif depth and not isinstance(value, type) and not inspect.ismodule(value):
        for part in _parts(value):
            yield from _strings(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    """The functions and values that a policy is built from."""
    if isinstance(value, functools.partial):
        yield (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        yield (value.__func__, value.__self__)
    elif inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        yield (*variables.nonlocals.values(), *variables.globals.values(), value.__defaults__, value.__kwdefaults__)
        yield value.__code__
    elif isinstance(value, CodeType):
        yield value.co_consts
    else:
        fields = getattr(value, "__slots__", ())
        yield getattr(value, "__dict__", {})
        # A class may write its only slot as a string.
        yield [getattr(value, name, None) for name in ((fields,) if isinstance(fields, str) else fields)]
        yield type(value).__dict__.get("__call__")


def saved_name_findings(program: ClosedJaxpr | Jaxpr) -> Iterator[Finding]:
    """Yields a finding for each policy that saves a name which no array of its function has.

    A list of names that many models share may have some for other models: then it is a note, but for misspelt names.
    """
    existing = existing_names(program)
    for policy in saving_policies(program):
        if not policy.missing:
            continue
        misspelt = [
            name for name in policy.missing if suggest(name, [each for each in existing if each not in policy.names])
        ]
        missing = ", ".join(f"{name!r}{suggest(name, existing)}" for name in policy.missing)
        consequence = "" if policy.matching else ": nothing is saved by name"
        yield Finding(
            "note" if policy.matching and not misspelt else "warning",
            "unmatched-names",
            f"a policy of jax.checkpoint saves arrays by name, and no array of the checkpointed function is called "
            f"{missing}{consequence}. The function has {', '.join(map(repr, existing)) or 'no names'}",
            remedy="Name the array, jax.ad_checkpoint.checkpoint_name(x, name), or correct the name in the policy",
            source=policy.source,
        )
