"""Takes a model's initialiser apart into work that repeats, so that equal layers are compiled once.

A model of twelve equal layers draws each kind of weight twelve times, and compiled as one program all of that is
compiled twelve times over. Here the traced function is cut where little crosses: random keys and small integers, the
*seeds*, come first, and each output follows from seeds by a *piece* of its own. Pieces that are equal but for their
seeds become one program, which is called once for each of them.

Floats are never cut, nor are constants. XLA computes with what it knows while it compiles, and rewrites arithmetic on
it (a division becomes a product), so an input in place of a constant could change the last bit of what is drawn.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from shardrules.core.keys import is_key

SEED_SIZE = 4096
"""The most elements that a seed has. Keys of a stack of layers have a few hundred, and larger work takes longer op
by op than compiled. Chosen by hand."""

_CONST_BYTES = 16 * 2**20
"""The largest constant that is part of a program: larger ones take long to compile. Chosen by hand."""

_TRUSTED = ("builtins", "jax", "jaxlib", "numpy", "ml_dtypes")
"""The modules whose values are equal only when they are the same. A user's class may define `==` otherwise."""

_Run: TypeAlias = Callable[..., list[Any]]


@final
@attrs.frozen(eq=False)
class InitCall:
    """One call of a program."""

    inputs: tuple[Any, ...]
    """Its operands, as variables of the traced function."""
    outputs: tuple[int, ...]
    """The positions of its results among the outputs of the traced function."""


@final
@attrs.frozen(eq=False)
class InitProgram:
    """Work that is compiled once; the results of all its calls have the same shapes and marks."""

    run: _Run
    calls: tuple[InitCall, ...]


@final
@attrs.frozen(eq=False)
class Outline:
    """A traced function taken apart: `seed_run` computes `seeds` from `seed_inputs`, and the programs the rest."""

    seed_inputs: tuple[Any, ...]
    seed_run: _Run
    seeds: tuple[Any, ...]
    passed: tuple[tuple[Any, int], ...]
    """Inputs that are outputs as they are, each with its position there."""
    programs: tuple[InitProgram, ...]
    """Those with the largest results come first."""


@final
@attrs.define(eq=False)
class _Piece:
    """The equations that some outputs follow from."""

    outputs: list[int]
    eqns: set[int] = attrs.field(factory=set)


_PieceGroup: TypeAlias = list[tuple[_Piece, tuple[Any, ...]]]
"""Pieces that are equal but for their inputs, each with its inputs."""


def outline(closed: ClosedJaxpr, marks: Sequence[Hashable], places: Sequence[Hashable], program_bytes: int) -> Outline:
    """Takes a traced function apart into seeds and programs that compute each output once.

    `marks` and `places` have one item per output: pieces are equal only where the marks of their outputs are, and a
    program computes outputs of the same place only. A call computes at most `program_bytes`, unless a single piece is
    larger.
    """
    jaxpr = closed.jaxpr
    fixed = {var: value for var, value in zip(jaxpr.constvars, closed.consts, strict=True) if _is_fixed(var, value)}
    variables = (*jaxpr.constvars, *jaxpr.invars)
    if closed.effects:  # prints and callbacks keep their order only in one piece
        whole = InitCall(tuple(var for var in variables if var not in fixed), tuple(range(len(jaxpr.outvars))))
        run = _as_function(jaxpr, range(len(jaxpr.eqns)), whole.inputs, jaxpr.outvars, fixed)
        return Outline((), list, (), (), (InitProgram(run, (whole,)),))
    producers = {var: eqn_index for eqn_index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    passed = tuple(
        (var, index) for index, var in enumerate(jaxpr.outvars) if not isinstance(var, Literal) and var not in producers
    )
    pieces = _pieces(jaxpr, [index for _, index in passed], producers, _seeds(jaxpr))
    groups: dict[Hashable, _PieceGroup] = {}
    for piece in pieces:
        key, inputs = _canonical(jaxpr, piece, marks, fixed)
        groups.setdefault(key, []).append((piece, inputs))
    programs = tuple(_programs(jaxpr, list(groups.values()), places, program_bytes, fixed))
    # Only the seeds that programs take are computed: other keys and integers belong to the pieces themselves.
    seeds = dict.fromkeys(
        var for program in programs for call in program.calls for var in call.inputs if var in producers
    )
    eqns = _equations_behind(jaxpr, producers, seeds)
    used = {var: None for index in eqns for var in jaxpr.eqns[index].invars if not isinstance(var, Literal)}
    seed_inputs = tuple(var for var in variables if var in used)
    seed_run = _as_function(jaxpr, eqns, seed_inputs, list(seeds), {})
    return Outline(seed_inputs, seed_run, tuple(seeds), passed, programs)


def _is_fixed(var: Any, value: Any) -> bool:
    """Returns whether a constant is part of a program. An array that spans processes cannot be."""
    reachable = not isinstance(value, jax.Array) or value.is_fully_addressable
    return reachable and not _is_key(var) and _nbytes(var) <= _CONST_BYTES


def _seeds(jaxpr: Jaxpr) -> dict[Any, None]:
    """Returns the keys, and the small integers that come from keys and inputs."""
    seeds: dict[Any, None] = dict.fromkeys(var for var in jaxpr.invars if _is_small(var))
    seeds.update(dict.fromkeys(var for var in jaxpr.constvars if _is_small(var) and _is_key(var)))
    constant = dict.fromkeys(var for var in jaxpr.constvars if _is_small(var) and not _is_key(var))
    for eqn in jaxpr.eqns:
        inputs = [var for var in eqn.invars if not isinstance(var, Literal)]
        if not all(var in seeds or var in constant for var in inputs):
            continue
        # Integers that follow from constants alone stay constants, so that XLA can compute with them.
        varies = any(var in seeds for var in inputs)
        for var in filter(_is_small, eqn.outvars):
            (seeds if varies or _is_key(var) else constant)[var] = None
    return seeds


def _is_key(var: Any) -> bool:
    return is_key(var.aval.dtype)


def _is_small(var: Any) -> bool:
    return (_is_key(var) or bool(jnp.issubdtype(var.aval.dtype, jnp.integer))) and _size(var) <= SEED_SIZE


def _pieces(jaxpr: Jaxpr, passed: Sequence[int], producers: dict[Any, int], seeds: dict[Any, None]) -> list[_Piece]:
    """Returns one piece per computed output; outputs that share large work share a piece, so that it is done once."""
    owners: dict[int, int] = {}
    # Union-find over outputs: outputs with the same leader share a piece.
    leaders = list(range(len(jaxpr.outvars)))

    def leader(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = index = leaders[leaders[index]]
        return index

    pieces = [_Piece([index]) for index in leaders]
    for index, output in enumerate(jaxpr.outvars):
        # Walk back from the output, and stop at seeds, which come first, and at inputs.
        waiting = [output]
        while waiting:
            var = waiting.pop()
            if isinstance(var, Literal) or var not in producers or (var in seeds and var is not output):
                continue
            eqn_index = producers[var]
            if eqn_index in pieces[index].eqns:
                continue
            is_large = any(_size(result) > SEED_SIZE for result in jaxpr.eqns[eqn_index].outvars)
            if is_large and eqn_index in owners:
                # Another output computes it already, and all that it follows from: join that piece.
                first, second = sorted((leader(owners[eqn_index]), leader(index)))
                leaders[second] = first
                continue
            if is_large:
                owners[eqn_index] = index
            pieces[index].eqns.add(eqn_index)
            waiting += jaxpr.eqns[eqn_index].invars
    # Small work may be in several pieces: doing it again costs less than one more input.
    joined: dict[int, _Piece] = {}
    for index, piece in enumerate(pieces):
        if index in passed:
            continue
        whole = joined.setdefault(leader(index), _Piece([]))
        whole.outputs += piece.outputs
        whole.eqns |= piece.eqns
    return list(joined.values())


def _canonical(
    jaxpr: Jaxpr, piece: _Piece, marks: Sequence[Hashable], fixed: dict[Any, Any]
) -> tuple[Hashable, tuple[Any, ...]]:
    """Returns a key of what a piece computes, with variables numbered as they occur; and the piece's inputs."""
    eqns = [jaxpr.eqns[index] for index in sorted(piece.eqns)]
    names: dict[Any, int] = {}
    eqns_key = _eqns_key(eqns, names)
    outputs = tuple(_name(jaxpr.outvars[index], names) for index in piece.outputs)
    computed = {var: None for eqn in eqns for var in eqn.outvars}
    inputs = tuple(var for var in names if var not in computed and var not in fixed)
    types = tuple(str(var.aval) for var in inputs)
    # Constants by identity: comparing their values would take longer than compiling twice.
    consts = tuple((name, id(fixed[var])) for var, name in names.items() if var in fixed)
    return (eqns_key, outputs, types, consts, tuple(marks[index] for index in piece.outputs)), inputs


def _eqns_key(eqns: Iterable[JaxprEqn], names: dict[Any, int]) -> Hashable:
    return tuple(
        (
            eqn.primitive,
            tuple((name, _param_key(eqn.params[name])) for name in sorted(eqn.params)),
            tuple(_name(var, names) for var in eqn.invars),
            tuple((_name(var, names), str(var.aval)) for var in eqn.outvars),
        )
        for eqn in eqns
    )


def _name(var: Any, names: dict[Any, int]) -> Hashable:
    if isinstance(var, Literal):
        return np.asarray(var.val).tobytes(), str(var.aval)
    return names.setdefault(var, len(names))


def _param_key(param: Any) -> Hashable:
    """Returns a key that is equal only for what is certainly equal: other values are equal to themselves alone."""
    match param:
        case ClosedJaxpr():
            return _jaxpr_key(param.jaxpr), tuple(map(id, param.consts))
        case Jaxpr():
            return _jaxpr_key(param)
        case tuple() | list():
            return tuple(map(_param_key, param))
    if isinstance(param, float | complex):
        return type(param), repr(param)  # unlike ==, it distinguishes 0.0 from -0.0
    if callable(param) or type(param).__module__.partition(".")[0] not in _TRUSTED:
        return id(param)  # JAX compares wrapped callbacks by their own ==, which a user may have defined
    try:
        hash(param)
    except TypeError:
        return id(param)
    return type(param), param


def _jaxpr_key(jaxpr: Jaxpr) -> Hashable:
    names: dict[Any, int] = {}
    inputs = tuple((_name(var, names), str(var.aval)) for var in (*jaxpr.constvars, *jaxpr.invars))
    return inputs, _eqns_key(jaxpr.eqns, names), tuple(_name(var, names) for var in jaxpr.outvars)


def _programs(
    jaxpr: Jaxpr,
    groups: list[_PieceGroup],
    places: Sequence[Hashable],
    program_bytes: int,
    fixed: dict[Any, Any],
) -> Iterable[InitProgram]:
    """Compiles groups with equally many pieces together: each call then computes one layer, so to say."""

    def result_bytes(group: _PieceGroup) -> int:
        return sum(_nbytes(jaxpr.outvars[index]) for index in group[0][0].outputs)

    # First fit, largest first. A batch: (pieces per group, place), the bytes of a call, the groups.
    batches: list[tuple[Hashable, int, list[_PieceGroup]]] = []
    for group in sorted(groups, key=result_bytes, reverse=True):
        size = result_bytes(group)
        shared = (len(group), places[group[0][0].outputs[0]])
        fitting = [n for n, (other, used, _) in enumerate(batches) if other == shared and used + size <= program_bytes]
        if fitting:
            _, used, members = batches[fitting[0]]
            batches[fitting[0]] = (shared, used + size, [*members, group])
        else:
            batches.append((shared, size, [group]))
    for _, _, members in batches:
        runs: list[tuple[_Run, int]] = []
        for group in members:
            piece, inputs = group[0]
            outputs = [jaxpr.outvars[index] for index in piece.outputs]
            runs.append((_as_function(jaxpr, sorted(piece.eqns), inputs, outputs, fixed), len(inputs)))
        # Call n takes the inputs of the n-th piece of every group, and computes their outputs.
        calls = [
            InitCall(
                tuple(var for group in members for var in group[n][1]),
                tuple(index for group in members for index in group[n][0].outputs),
            )
            for n in range(len(members[0]))
        ]
        yield InitProgram(_joined(runs), tuple(calls))


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)


def _nbytes(var: Any) -> int:
    return _size(var) * var.aval.dtype.itemsize


def _joined(runs: list[tuple[_Run, int]]) -> _Run:
    """Returns a function of the inputs of all `runs`, each with how many it takes, to all their results."""

    def run(*values: Any) -> list[Any]:
        results: list[Any] = []
        start = 0
        for part, count in runs:
            results += part(*values[start : start + count])
            start += count
        return results

    return run


def _equations_behind(jaxpr: Jaxpr, producers: dict[Any, int], variables: Iterable[Any]) -> list[int]:
    """Returns the indices of the equations that some variables follow from, in order."""
    indices: dict[int, None] = {}
    waiting = list(variables)
    while waiting:
        var = waiting.pop()
        if isinstance(var, Literal) or var not in producers or producers[var] in indices:
            continue
        indices[producers[var]] = None
        waiting += jaxpr.eqns[producers[var]].invars
    return sorted(indices)


def _as_function(
    jaxpr: Jaxpr, eqn_indices: Iterable[int], inputs: Iterable[Any], outputs: Iterable[Any], fixed: dict[Any, Any]
) -> _Run:
    """Returns some equations of a traced function as a function; constants in `fixed` are part of it."""
    eqns = [jaxpr.eqns[index] for index in eqn_indices]
    used = {var: None for eqn in eqns for var in eqn.invars if not isinstance(var, Literal)}
    used.update(dict.fromkeys(var for var in outputs if not isinstance(var, Literal)))
    # A constant that is not used would stay in memory as long as the program.
    consts = [var for var in fixed if var in used]
    part = jaxpr.replace(constvars=consts, invars=list(inputs), outvars=list(outputs), eqns=eqns)
    return jaxpr_as_fun(ClosedJaxpr(part, [fixed[var] for var in consts]))
