"""The facts of each array of a loss: its examples, and its needs of the batch.

The forms of an array:

- `shared`: it is the same for all parts of the batch. Either no example reaches it, or only through arrays that are
  not trained, so that it can be computed for the whole batch before.
- `examples`: along one dim each example has its own piece, in order. The array of a part is a slice of the whole.
- `sum`: a sum over the examples. The sum over the batch is the sum of its parts' sums.
- `result`: computed from such sums, once for the batch.
- `refused`: computed from several examples at once in another way.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
from jax.extend.core import Literal as Constant

from shardrules.core.source import equation_line, short_line
from shardrules.programs.training.examples.pairs import Counts

Form: TypeAlias = Literal["shared", "examples", "sum", "result", "refused"]

EACH_ROUND = None
"""The dim of examples inside a loop over them: what a round has belongs to its example."""


@final
@attrs.frozen
class Fact:
    """The facts of an array."""

    form: Form
    dim: int | None = EACH_ROUND
    """Of the examples."""
    is_trained: bool = False
    """It depends on trainable arrays."""
    from_batch: bool = False
    """An example reaches it."""
    is_whole: bool = False
    """The program of the whole batch can compute it: for shared arrays, and for some that have examples."""
    is_own: bool = False
    """The equation of the part computes the part's array; else it is a slice of the whole."""
    is_misfit: bool = False
    """It depends on the number of examples in several dims, so that no slice of it belongs to a part."""
    is_zero: bool = False
    is_false: bool = False
    index_columns: tuple[int, ...] = ()
    """The columns of the last dim in which each example has its own position in the batch; (-1,) for all."""
    index_size: int = 0
    """The number of these positions: one for each example, or for each piece of all examples one after another."""
    reason: str = ""
    """The reason why it is refused."""
    pieces: int = 0
    """The pieces of several examples that a batch has, if it is refused or misfits because runs tear them apart."""

    @property
    def is_part_only(self) -> bool:
        """Only a part of the batch can compute it."""
        return self.form == "examples" and not self.is_whole

    @property
    def index(self) -> bool:
        """All of it is the position of the example in the batch."""
        return self.index_columns == (-1,)


def refused(reason: str, equation: Any = None, pieces: int = 0) -> Fact:
    """The fact of an array that is computed from several examples at once."""
    line = "" if equation is None else short_line(equation_line(equation))
    reason = f"{reason} ({line})" if line else reason
    return Fact("refused", is_trained=True, from_batch=True, reason=reason, pieces=pieces)


@final
class RefusalError(Exception):
    """All results of an equation are refused, for a reason and with `pieces` as in `Fact`."""

    def __init__(self, reason: str, pieces: int = 0) -> None:
        super().__init__(reason, pieces)
        self.reason, self.pieces = reason, pieces


def refuse_misfits(equation: Any, facts: Sequence[Fact], counts: Counts) -> None:
    """Raises `RefusalError` for an equation that uses a misfit."""
    pieces = [fact.pieces for fact in facts if fact.is_misfit]
    # If all misfits are so many pieces, longer runs of examples may divide them.
    if pieces and all(pieces):
        count = math.gcd(*pieces)
        raise RefusalError(f"{count} pieces of {name_of_step(equation)} do not divide into {counts.runs} parts", count)
    if pieces:
        raise RefusalError(
            f"{name_of_step(equation)} uses an array that depends on the number of examples in several dims"
        )


def name_of_step(equation: Any) -> str:
    name = equation.params.get("name")
    if equation.primitive.name == "region":
        name = equation.params["function"].name
    return f"{equation.primitive.name} {name!r}" if isinstance(name, str) and name else equation.primitive.name


def literal_fact(var: Constant) -> Fact:
    value = np.asarray(var.val)
    return Fact("shared", is_whole=True, is_zero=not value.any(), is_false=value.dtype == bool and not value.any())


def shared_fact(
    shape: Sequence[int], trace_shape: Sequence[int], counts: Counts, is_trained: bool, from_batch: bool
) -> Fact:
    """The fact of an array that the program of the whole batch computes, by its shapes in the whole and the trace."""
    common: dict[str, Any] = {"is_trained": is_trained, "from_batch": from_batch, "is_whole": True}
    if len(shape) != len(trace_shape):
        return Fact("shared", is_misfit=True, **common)
    # A size that differs between the two traces depends on the number of examples.
    dims = [dim for dim, (size, other) in enumerate(zip(shape, trace_shape, strict=True)) if size != other]
    if not dims:
        return Fact("shared", **common)
    size = shape[dims[0]]
    if len(dims) > 1 or not counts.is_scaled(size, trace_shape[dims[0]]):
        return Fact("shared", is_misfit=True, **common)
    if size % counts.runs:
        return Fact("shared", is_misfit=True, pieces=size, **common)
    return Fact("examples", dims[0], **common)


def inside(fact: Fact) -> Fact:
    """The fact of an array in a loop or a checkpoint that it enters: what has examples enters part by part."""
    if fact.form == "shared":
        return attrs.evolve(fact, is_whole=True)
    return attrs.evolve(fact, is_whole=False, is_own=True)


def joined(first: Fact, second: Fact, what: str, equation: Any) -> Fact:
    """The facts of an array that is either of two: a value that goes round a loop, or the result of a branch."""
    for fact in (first, second):
        if fact.form == "refused":
            return fact
    common: dict[str, Any] = {
        "is_trained": first.is_trained or second.is_trained,
        "from_batch": first.from_batch or second.from_batch,
        "is_zero": first.is_zero and second.is_zero,
    }
    # Sums start from zeros, which are shared; a mixture of any other forms has no common one.
    forms = {first.form, second.form}
    if forms == {"shared"} and not (first.is_misfit or second.is_misfit):
        return Fact("shared", is_whole=True, **common)
    if forms == {"examples"} and first.dim == second.dim:
        return Fact("examples", first.dim, is_own=True, **common)
    if forms == {"sum"}:
        return Fact("sum", **common)
    others = [fact for fact in (first, second) if fact.form != "sum"]
    if "sum" in forms and others[0].form == "shared" and others[0].is_zero:
        return Fact("sum", **common)
    if "sum" in forms and others[0].form == "shared":
        return refused(
            f"{what} of {equation.primitive.name} adds a sum over the examples to what is not zero", equation
        )
    if "examples" in forms:
        return refused(f"{what} of {equation.primitive.name} carries values from example to example", equation)
    return refused(f"{what} of {equation.primitive.name} is computed from a sum over the examples", equation)
