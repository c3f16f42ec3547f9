"""What of a traced function is the same work again: the parts of a model's initialiser that differ in seeds alone.

A model of twelve equal layers draws each kind of weight twelve times, and compiled as one program all of that is
compiled twelve times over. Here it is taken apart, so that it is compiled once and called twelve times. The cut goes
where little crosses it: random keys and small integers, the *seeds*, come first, and each output follows from those by
a *piece* of its own. Pieces that are equal but for their seeds are one program.

Floats are never cut, nor are constants. XLA computes with what it knows while it compiles, and rewrites arithmetic on
it (a division becomes a product), so what came in from outside could change the last bit of what is drawn.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

SEED_SIZE = 4096
"""The most elements that a seed has."""

_CONST_BYTES = 16 * 2**20
"""The largest constant that is part of a program, as it is for `jax.jit`. What is larger would be compiled for long."""

_TRUSTED = ("builtins", "jax", "jaxlib", "numpy", "ml_dtypes")
"""Whose values are equal only when they are the same. A user's class may say so of values that are not."""

_Run: TypeAlias = Callable[..., list[Any]]


@final
@attrs.frozen(eq=False)
class InitCall:
    """One call of a program.

    **Arguments:**

    - `inputs`: what it takes, as variables of the traced function.
    - `outputs`: the positions of what it gives among the outputs of the traced function.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]


@final
@attrs.frozen(eq=False)
class InitProgram:
    """Work that is compiled once.

    **Arguments:**

    - `run`: the work.
    - `calls`: each time it is done. All give outputs of the same shapes and marks.
    """

    run: _Run
    calls: tuple[InitCall, ...]


@final
@attrs.frozen(eq=False)
class Outline:
    """A traced function taken apart.

    **Arguments:**

    - `seed_inputs`, `seed_run`, `seeds`: variables, the function from the ones to the others, and what it gives.
    - `passed`: inputs that are outputs as they are, each with its positions there.
    - `programs`: the rest; those that give most come first.
    """

    seed_inputs: tuple[Any, ...]
    seed_run: _Run
    seeds: tuple[Any, ...]
    passed: tuple[tuple[Any, int], ...]
    programs: tuple[InitProgram, ...]


@final
@attrs.define(eq=False)
class _Piece:
    """How some outputs come about: the equations, what they take, and where the outputs stand."""

    outputs: list[int]
    eqns: set[int] = attrs.field(factory=set)


_Kind: TypeAlias = list[tuple[_Piece, tuple[Any, ...]]]
"""Pieces that are equal but for what they take, each with that."""


def outline(closed: ClosedJaxpr, marks: Sequence[Hashable], places: Sequence[Hashable], program_bytes: int) -> Outline:
    """Takes a traced function apart into seeds and programs.

    **Arguments:**

    - `closed`: the traced function. One with effects (prints, callbacks) stays in one piece.
    - `marks`: one for each output. Work is the same only where the marks of what it gives are.
    - `places`: one for each output. What one program gives has one place.
    - `program_bytes`: as much as one call of a program may give, unless a single piece gives more.

    **Returns:**

    An `Outline` whose programs, all called, give every output once.
    """
    jaxpr = closed.jaxpr
    fixed = {var: value for var, value in zip(jaxpr.constvars, closed.consts, strict=True) if _is_fixed(var, value)}
    tops = (*jaxpr.constvars, *jaxpr.invars)
    if closed.effects:
        whole = InitCall(tuple(var for var in tops if var not in fixed), tuple(range(len(jaxpr.outvars))))
        run = _function(jaxpr, range(len(jaxpr.eqns)), whole.inputs, jaxpr.outvars, fixed)
        return Outline((), list, (), (), (InitProgram(run, (whole,)),))
    producers = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    seeds = _seeds(jaxpr)
    passed = tuple(
        (var, number)
        for number, var in enumerate(jaxpr.outvars)
        if not isinstance(var, Literal) and var not in producers
    )
    pieces = _pieces(jaxpr, [number for _, number in passed], producers, seeds)
    alike: dict[Hashable, _Kind] = {}
    for piece in pieces:
        key, inputs = _canonical(jaxpr, piece, marks, fixed)
        alike.setdefault(key, []).append((piece, inputs))
    programs = tuple(_programs(jaxpr, list(alike.values()), places, program_bytes, fixed))
    wanted = dict.fromkeys(
        var for program in programs for call in program.calls for var in call.inputs if var in producers
    )
    eqns = _behind(jaxpr, producers, wanted)
    taken = {var: None for number in eqns for var in jaxpr.eqns[number].invars if not isinstance(var, Literal)}
    seed_inputs = tuple(var for var in tops if var in taken)
    seed_run = _function(jaxpr, eqns, seed_inputs, list(wanted), {})
    return Outline(seed_inputs, seed_run, tuple(wanted), passed, programs)


def _is_fixed(var: Any, value: Any) -> bool:
    """Whether a constant is part of a program. One that only several processes have together cannot be."""
    reachable = not isinstance(value, jax.Array) or value.is_fully_addressable
    return reachable and not _is_key(var) and _nbytes(var) <= _CONST_BYTES


def _seeds(jaxpr: Jaxpr) -> dict[Any, None]:
    """The keys, and the small integers that come from keys and inputs."""
    found: dict[Any, None] = dict.fromkeys(var for var in jaxpr.invars if _is_small(var))
    found.update(dict.fromkeys(var for var in jaxpr.constvars if _is_small(var) and _is_key(var)))
    constant = dict.fromkeys(var for var in jaxpr.constvars if _is_small(var) and not _is_key(var))
    for eqn in jaxpr.eqns:
        taken = [var for var in eqn.invars if not isinstance(var, Literal)]
        if not all(var in found or var in constant for var in taken):
            continue
        varies = any(var in found for var in taken)
        for var in filter(_is_small, eqn.outvars):
            (found if varies or _is_key(var) else constant)[var] = None
    return found


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


def _is_small(var: Any) -> bool:
    return (_is_key(var) or bool(jnp.issubdtype(var.aval.dtype, jnp.integer))) and _size(var) <= SEED_SIZE


def _pieces(jaxpr: Jaxpr, passed: Sequence[int], producers: dict[Any, int], seeds: dict[Any, None]) -> list[_Piece]:
    """One piece for each output that is made; outputs that share large work share one, so that it is done once."""
    owners: dict[int, int] = {}
    leaders = list(range(len(jaxpr.outvars)))

    def leader(number: int) -> int:
        while leaders[number] != number:
            leaders[number] = number = leaders[leaders[number]]
        return number

    found = [_Piece([number]) for number in leaders]
    for number, output in enumerate(jaxpr.outvars):
        waiting = [output]
        while waiting:
            var = waiting.pop()
            if isinstance(var, Literal) or var not in producers or (var in seeds and var is not output):
                continue
            source = producers[var]
            if source in found[number].eqns:
                continue
            large = any(_size(one) > SEED_SIZE for one in jaxpr.eqns[source].outvars)
            if large and source in owners:
                first, second = sorted((leader(owners[source]), leader(number)))
                leaders[second] = first
                continue
            if large:
                owners[source] = number
            found[number].eqns.add(source)
            waiting += jaxpr.eqns[source].invars
    joined: dict[int, _Piece] = {}
    for number, piece in enumerate(found):
        if number in passed:
            continue
        whole = joined.setdefault(leader(number), _Piece([]))
        whole.outputs += piece.outputs
        whole.eqns |= piece.eqns
    return list(joined.values())


def _canonical(
    jaxpr: Jaxpr, piece: _Piece, marks: Sequence[Hashable], fixed: dict[Any, Any]
) -> tuple[Hashable, tuple[Any, ...]]:
    """What a piece does, whatever its variables are called; and the variables that it takes."""
    eqns = [jaxpr.eqns[number] for number in sorted(piece.eqns)]
    outputs = [jaxpr.outvars[number] for number in piece.outputs]
    names: dict[Any, int] = {}
    done = _eqns_key(eqns, names)
    given = tuple(_name(var, names) for var in outputs)
    made = {var: None for eqn in eqns for var in eqn.outvars}
    inputs = tuple(var for var in names if var not in made and var not in fixed)
    types = tuple(str(var.aval) for var in inputs)
    consts = tuple((name, id(fixed[var])) for var, name in names.items() if var in fixed)
    return (done, given, types, consts, tuple(marks[number] for number in piece.outputs)), inputs


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
    """Equal only for what is equal for certain: what has no plain equality is equal to itself alone."""
    match param:
        case ClosedJaxpr():
            return _jaxpr_key(param.jaxpr), tuple(map(id, param.consts))
        case Jaxpr():
            return _jaxpr_key(param)
        case tuple() | list():
            return tuple(map(_param_key, param))
    if isinstance(param, float | complex):
        return type(param), repr(param)  # which tells 0.0 from -0.0
    if callable(param) or type(param).__module__.partition(".")[0] not in _TRUSTED:
        return id(param)  # JAX compares the callbacks that it wraps by what they say of themselves
    try:
        hash(param)
    except TypeError:
        return id(param)
    return type(param), param


def _jaxpr_key(jaxpr: Jaxpr) -> Hashable:
    names: dict[Any, int] = {}
    taken = tuple((_name(var, names), str(var.aval)) for var in (*jaxpr.constvars, *jaxpr.invars))
    return taken, _eqns_key(jaxpr.eqns, names), tuple(_name(var, names) for var in jaxpr.outvars)


def _programs(
    jaxpr: Jaxpr, alike: list[_Kind], places: Sequence[Hashable], program_bytes: int, fixed: dict[Any, Any]
) -> Iterable[InitProgram]:
    """Kinds of pieces that there are equally many of are compiled together: each call makes one layer, so to say."""

    def given_bytes(kind: _Kind) -> int:
        return sum(_nbytes(jaxpr.outvars[number]) for number in kind[0][0].outputs)

    batches: list[tuple[Hashable, int, list[_Kind]]] = []
    for kind in sorted(alike, key=given_bytes, reverse=True):
        size = given_bytes(kind)
        sort = (len(kind), places[kind[0][0].outputs[0]])
        room = [n for n, (other, held, _) in enumerate(batches) if other == sort and held + size <= program_bytes]
        if room:
            _, held, kinds = batches[room[0]]
            batches[room[0]] = (sort, held + size, [*kinds, kind])
        else:
            batches.append((sort, size, [kind]))
    for _, _, kinds in batches:
        runs: list[tuple[_Run, int]] = []
        for kind in kinds:
            piece, inputs = kind[0]
            outputs = [jaxpr.outvars[number] for number in piece.outputs]
            runs.append((_function(jaxpr, sorted(piece.eqns), inputs, outputs, fixed), len(inputs)))
        calls = [
            InitCall(
                tuple(var for kind in kinds for var in kind[turn][1]),
                tuple(number for kind in kinds for number in kind[turn][0].outputs),
            )
            for turn in range(len(kinds[0]))
        ]
        yield InitProgram(_together(runs), tuple(calls))


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)


def _nbytes(var: Any) -> int:
    return _size(var) * var.aval.dtype.itemsize


def _together(runs: list[tuple[_Run, int]]) -> _Run:
    def run(*values: Any) -> list[Any]:
        result: list[Any] = []
        start = 0
        for one, count in runs:
            result += one(*values[start : start + count])
            start += count
        return result

    return run


def _behind(jaxpr: Jaxpr, producers: dict[Any, int], wanted: Iterable[Any]) -> list[int]:
    """The equations behind some variables, in order."""
    found: dict[int, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if isinstance(var, Literal) or var not in producers or producers[var] in found:
            continue
        found[producers[var]] = None
        waiting += jaxpr.eqns[producers[var]].invars
    return sorted(found)


def _function(
    jaxpr: Jaxpr, eqns: Iterable[int], inputs: Iterable[Any], outputs: Iterable[Any], fixed: dict[Any, Any]
) -> _Run:
    chosen = [jaxpr.eqns[number] for number in eqns]
    taken = {var: None for eqn in chosen for var in eqn.invars if not isinstance(var, Literal)}
    taken.update(dict.fromkeys(var for var in outputs if not isinstance(var, Literal)))
    consts = [var for var in fixed if var in taken]
    part = jaxpr.replace(constvars=consts, invars=list(inputs), outvars=list(outputs), eqns=chosen)
    return jaxpr_as_fun(ClosedJaxpr(part, [fixed[var] for var in consts]))
