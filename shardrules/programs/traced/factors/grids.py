"""The loops of Pallas kernels, read off their grids: how the blocks of arrays go together is in the index maps.

A dim of the grid is a loop that may be split where every result has a block of its own for each of its positions, where
operands have one block for each, or one for several, or do not depend on it, and where the kernel neither asks for its
position nor hands anything on to the next. Devices then run the kernel on a smaller grid, over the blocks that they
have.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

from shardrules.programs.jaxprs.walk import equations, open_jaxpr, programs_in
from shardrules.programs.traced.factors.loops import Loops, OpSignature, whole
from shardrules.programs.traced.factors.retraced import is_from, retraced_loops, retraced_params


@final
@attrs.frozen
class _Block:
    """The dim of an array that a dim of the grid goes along, and how many of its positions have the same block."""

    dim: int
    positions: int


def grid_loops(op: OpSignature) -> Loops | None:
    """Dims of the grid may be split where each position reads and writes blocks of its own, and the kernel does not ask
    for its position. Others are whole."""
    retraced = retraced_loops(op)
    if retraced is not None:
        return retraced
    mapping = op.params["grid_mapping"]
    first = len(op.operands) - mapping.num_inputs
    names: list[list[Hashable]] = [list(whole(shape)) for shape in (*op.operands[first:], *op.results)]
    sizes: dict[Hashable, int] = {}
    for axis, length in enumerate(mapping.grid):
        blocks = _blocks(op, axis) if isinstance(length, int) and length > 1 else None
        if blocks is None or _asks_for_position(op.params, axis) or _hands_on(op.params, axis, blocks):
            continue
        used = [(index, block.dim) for index, block in enumerate(blocks) if block is not None]
        # What no operand has, no piece of an operand tells.
        is_of_results = all(index >= mapping.num_inputs for index, _ in used)
        if is_of_results or any(names[index][dim] is not None for index, dim in used):
            continue
        sizes[axis] = math.gcd(length, *(length // block.positions for block in blocks if block is not None))
        for index, dim in used:
            names[index][dim] = axis
    operands = [*(whole(shape) for shape in op.operands[:first]), *names[: mapping.num_inputs]]
    return Loops(operands, names[mapping.num_inputs :], sizes=sizes, is_local=True) if sizes else None


def params_of_pieces(op: OpSignature, loops: Loops, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    if retraced_loops(op) is not None:
        retraced = retraced_params(op, shapes)
        assert retraced is not None, "pieces are such that JAX makes their kernel"
        return retraced
    params = op.params
    mapping, first = params["grid_mapping"], len(shapes) - params["grid_mapping"].num_inputs
    pieces: dict[Hashable, int] = {}
    for names, before, after in zip(loops.operands, op.operands, shapes, strict=True):
        pieces |= {
            name: size // piece for name, size, piece in zip(names, before, after, strict=True) if name is not None
        }

    def smaller(aval: Any, names: Sequence[Hashable]) -> Any:
        shape = (size // pieces.get(name, 1) for name, size in zip(names, aval.shape, strict=True))
        return aval.update(shape=tuple(shape))

    every = [*loops.operands[first:], *loops.results]
    grid = tuple(
        length // pieces.get(axis, 1) if isinstance(length, int) else length for axis, length in enumerate(mapping.grid)
    )
    blocks = tuple(
        block.replace(array_aval=smaller(block.array_aval, names))
        for block, names in zip(mapping.block_mappings, every, strict=True)
    )
    estimate, count = params["cost_estimate"], math.prod(pieces.values())
    return {
        **params,
        "grid_mapping": mapping.replace(grid=grid, block_mappings=blocks),
        "out_avals": tuple(
            smaller(aval, names) for aval, names in zip(params["out_avals"], loops.results, strict=True)
        ),
        "cost_estimate": estimate and _share(estimate, count),
    }


def _share(estimate: Any, count: int) -> Any:
    """The estimate for one of `count` pieces, from the estimate for the whole."""
    amounts = {name: value // count for name, value in vars(estimate).items() if isinstance(value, int)}
    return type(estimate)(**{**vars(estimate), **amounts})


def _blocks(op: OpSignature, axis: int) -> list[_Block | None] | None:
    """For each array how its blocks go along a dim of the grid, `None` where they do not; `None` in all where a block
    depends on it in another way, or a result has no block of its own for each position."""
    mapping = op.params["grid_mapping"]
    blocks: list[_Block | None] = []
    for index, block_mapping in enumerate(mapping.block_mappings):
        is_result = index >= mapping.num_inputs
        dependent = _dependent_dims(block_mapping.index_map_jaxpr, axis)
        if not dependent:
            # What nothing reads may be written by all: kernels of JAX 0.10 have their scratch there.
            if is_result and not op.unused[index - mapping.num_inputs]:
                return None
            blocks.append(None)
            continue
        ((dim, positions), *others) = dependent.items()
        size = _block_size(block_mapping.block_shape[dim])
        length = block_mapping.array_aval.shape[dim]
        if others or not size or not positions or (is_result and positions > 1):
            return None
        if length % size or mapping.grid[axis] % positions or length * positions != size * mapping.grid[axis]:
            return None
        blocks.append(_Block(dim, positions))
    # What is written over an operand has its shape.
    for operand, result in dict(op.params.get("input_output_aliases", ())).items():
        if blocks[operand - mapping.num_index_operands] != blocks[mapping.num_inputs + result]:
            return None
    return blocks


def _block_size(block_dim: Any) -> int | None:
    """The elements of a block along a dim; `None` where blocks are no pieces, side by side."""
    if block_dim is None or isinstance(block_dim, int):
        return 1 if block_dim is None else block_dim
    name = type(block_dim).__name__
    return 1 if name in ("Squeezed", "Mapped") else block_dim.block_size if name == "Blocked" else None


def _dependent_dims(index_map: Any, axis: int) -> dict[int, int | None]:
    """For each dim whose block depends on a dim of the grid, how many positions have the same block; `None` where that
    is not all that it depends on."""
    jaxpr = getattr(index_map, "jaxpr", index_map)
    position = jaxpr.invars[axis]
    positions: dict[Any, int | None] = {position: 1}
    for equation in jaxpr.eqns:
        tainted = [var for var in equation.invars if _is_in(var, positions)]
        if tainted:
            positions.update((var, _divided(equation, position)) for var in equation.outvars)
    return {dim: positions[var] for dim, var in enumerate(jaxpr.outvars) if _is_in(var, positions)}


def _is_in(var: Any, variables: dict[Any, int | None]) -> bool:
    return not hasattr(var, "val") and var in variables


def _divided(equation: Any, position: Any) -> int | None:
    """The divisor by which an equation divides a position; `None` if it does anything else."""
    if not _is_division(equation) or equation.invars[0] is not position:
        return None
    divisor = getattr(equation.invars[1], "val", None)
    return None if divisor is None else int(divisor)


def _is_division(equation: Any) -> bool:
    """An equation is `//`, or `jax.lax.div`, which is the same for positions. A call is known by its program: its name
    may belong to another function."""
    if equation.primitive.name == "div":
        return True
    if equation.params.get("name") != "floor_divide" or len(equation.invars) != 2:
        return False
    structs = (jax.ShapeDtypeStruct((), var.aval.dtype, weak_type=var.aval.weak_type) for var in equation.invars)
    (call,) = jax.make_jaxpr(jnp.floor_divide)(*structs).eqns
    return str(call.params["jaxpr"]) == str(equation.params["jaxpr"])


def _asks_for_position(params: Mapping[str, Any], axis: int) -> bool:
    """A kernel uses its position along a dim of the grid, or the number of positions.

    Dims that `jax.vmap` added are not its own, and not counted.
    """
    mapping = params["grid_mapping"]
    if axis in mapping.vmapped_dims:
        return False
    # Of dims with names, collectives and `axis_index` may ask, too.
    return mapping.grid_names is not None or any(
        equation.primitive.name in ("program_id", "num_programs")
        and equation.params["axis"] % _own_count(mapping) == _own_axis(mapping, axis)
        for equation in _used_equations(params["jaxpr"])
    )


def _own_axis(mapping: Any, axis: int) -> int:
    """The index of a dim of the grid among those that the kernel was written for."""
    return axis - sum(other < axis for other in mapping.vmapped_dims)


def _own_count(mapping: Any) -> int:
    return len(mapping.grid) - len(mapping.vmapped_dims)


_STATES = ("prng_seed", "prng_random_bits")
"""Primitives of kernels with a state of their own, which the next position finds as the one before leaves it."""


def _hands_on(params: Mapping[str, Any], axis: int, blocks: Sequence[_Block | None]) -> bool:
    """A position may find a value that the one before it along a dim of the grid has left: in scratch, in a result that
    nothing reads, or in an operand that is written. Nothing is in dims that are declared parallel, or by `jax.vmap`."""
    mapping = params["grid_mapping"]
    if axis in mapping.vmapped_dims:
        return False
    semantics = _semantics(params)
    if len(semantics) == _own_count(mapping) and "parallel" in semantics[_own_axis(mapping, axis)]:
        return False
    kernel = open_jaxpr(params["jaxpr"])
    operands = kernel.invars[: mapping.num_index_operands + mapping.num_inputs]
    # Effects name a variable, or the index of one.
    written = [getattr(effect, "input", None) for effect in kernel.effects if type(effect).__name__ != "ReadEffect"]
    return (
        any(each in operands or each in range(len(operands)) for each in written)
        or any(equation.primitive.name in _STATES for equation in equations(kernel))
        or (
            not is_from(params, *_STARTING_ANEW)
            and (bool(mapping.scratch_avals) or None in blocks[mapping.num_inputs :])
        )
    )


_STARTING_ANEW = ("tpu/splash_attention/splash_attention_kernel.py", "tpu/megablox/gmm.py")
"""Modules of JAX whose kernels start anew with their scratch wherever they write other blocks, by what they ask of
their position: read in the sources of JAX 0.10 and 0.12. They declare few dims parallel."""


def _semantics(params: Mapping[str, Any]) -> list[str]:
    options = params["compiler_params"]
    every = options.values() if isinstance(options, Mapping) else [options]
    declared = [semantics for each in every if (semantics := getattr(each, "dimension_semantics", None)) is not None]
    return [str(getattr(each, "value", each)).lower() for each in declared[0]] if len(declared) == 1 else []


def _used_equations(program: Any) -> Iterator[Any]:
    jaxpr = getattr(program, "jaxpr", program)
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    for equation in jaxpr.eqns:
        if equation.effects or any(id(var) in used for var in equation.outvars):
            yield equation
            for inner in programs_in(equation):
                yield from _used_equations(inner)
