"""The fingerprints of traced programs: a string for each, and the first equation in which two differ."""

import enum
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.core.source import equation_line, short_line
from shardrules.programs.jaxprs.walk import open_jaxpr, programs_in

_Operands: TypeAlias = list[int | None]
"""For each operand which variable it is; `None` for constants."""


def fingerprint(program: ClosedJaxpr) -> str:
    """Returns a string that is equal, in every process, for programs of the same operations on the same arrays.

    The values of constants are not in it: they change nothing about where arrays go.
    """
    digest = hashlib.sha256()
    for line in _lines(program):
        digest.update(line.text.encode())
    return digest.hexdigest()[:16]


def first_difference(program: ClosedJaxpr, other: ClosedJaxpr, *, with_values: bool = False) -> str:
    """Returns which equation of a program is the first that differs in another, and what is in its place.

    It is empty for programs with the same fingerprint; `with_values`, for those whose constants are the same, too.
    """
    for line, replacement in itertools.zip_longest(_lines(program), _lines(other), fillvalue=_END):
        if line.text != replacement.text:
            return f"{line.shown} is {line.change(replacement)}"
        if with_values and not _are_equal(line.constants, replacement.constants):
            return f"a constant of {line.shown} has another value"
    return ""


@final
@attrs.frozen(eq=False)
class _Line:
    """The part of a fingerprint for one equation, or for a program's results."""

    name: str
    operands: _Operands = attrs.field(factory=list)
    shapes: Sequence[Any] = ()
    params: Sequence[tuple[str, str]] = ()
    equation: Any = None
    constants: Sequence[Any] = ()

    @property
    def text(self) -> str:
        """The same in every process."""
        computed = "" if self.equation is None else f"{self.shapes}{self.params}"
        return f"{self.name}{self.operands}{computed}"

    @property
    def shown(self) -> str:
        """The primitive, its first result, and the user's line."""
        if self.equation is None:
            return self.name.strip()
        results = ", ".join(f" {dtype}[{','.join(map(str, shape))}]" for shape, dtype in self.shapes[:1])
        line = short_line(equation_line(self.equation))
        return f"{self.name}{results}" + (f" ({line})" if line else "")

    def change(self, other: "_Line") -> str:
        """The text of another line in the place of this one."""
        if (self.name, self.shapes) != (other.name, other.shapes):
            return other.shown
        if self.params == other.params:
            return f"{other.shown} of other arrays"
        before, after = dict(self.params), dict(other.params)
        names = [name for name in (before | after) if before.get(name) != after.get(name)]
        return ", ".join(f"{other.shown} with {name}={after.get(name)} instead of {before.get(name)}" for name in names)


_END = _Line("the end")


def _lines(program: ClosedJaxpr | Jaxpr) -> Iterator[_Line]:
    """Yields what each equation is, with the programs inside it, and what the program returns."""
    jaxpr = open_jaxpr(program)
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False))
    # Variables differ in each trace; the order in which they are bound does not.
    indices = {var: index for index, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def names(atoms: Sequence[Any]) -> _Operands:
        return [None if isinstance(atom, Literal) else indices[atom] for atom in atoms]

    def values_of(atoms: Sequence[Any]) -> list[Any]:
        constants = [atom.val if isinstance(atom, Literal) else values.get(atom) for atom in atoms]
        return [value for value in constants if value is not None]

    for equation in jaxpr.eqns:
        shapes = [
            (tuple(var.aval.shape), str(var.aval.dtype))
            for var in equation.outvars
            if isinstance(var.aval, ShapedArray)
        ]
        # Only what prints alike in every process: the repr of a function has an address in it.
        params = sorted((name, repr(value)) for name, value in equation.params.items() if _is_plain(value))
        if hasattr(mapping := equation.params.get("grid_mapping"), "block_mappings"):
            params.append(("grid_mapping", _grid_text(mapping)))
        operands = names(equation.invars)
        yield _Line(equation.primitive.name, operands, shapes, params, equation, values_of(equation.invars))
        for inner in programs_in(equation):
            yield from _lines(inner)
        for var in equation.outvars:
            indices[var] = len(indices)
    yield _Line("return ", names(jaxpr.outvars), constants=values_of(jaxpr.outvars))


def _grid_text(mapping: Any) -> str:
    """The positions of a Pallas kernel, and which block of each array a position has."""
    blocks = [
        (str(block.block_shape), block.array_aval.shape, str(open_jaxpr(block.index_map_jaxpr)))
        for block in mapping.block_mappings
    ]
    return f"{[str(length) for length in mapping.grid]}{blocks}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | enum.Enum)


def _are_equal(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Constants are the same."""
    return len(values) == len(others) and all(map(_is_equal, values, others))


def _is_equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value, other = jax.random.key_data(value), jax.random.key_data(other)
    return np.asarray(value).tobytes() == np.asarray(other).tobytes()
