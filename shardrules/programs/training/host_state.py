"""The optimizer's state in the memory of the host: its arrays there, and their update in a step.

Between steps they take no memory of devices. A step fetches them for the update and sends them back, a few at a time:
compilers would otherwise fetch all of them at once, and keep all of them until the last is on the host again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from shardrules.core.tree import array_kind
from shardrules.programs.autoplan.run.branches import without_branches
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.segments import segment_program
from shardrules.programs.jaxprs.walk import reads

LEAST_HOST_BYTES = 2**20
"""Smaller arrays of a device are not sent to the host: each takes a copy of its own, both ways. Chosen by hand."""

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def host_state(state: Any, device_count: int, part: float = 1.0, most_bytes: float = math.inf) -> tuple[int, ...]:
    """Returns the arrays of a state, by index, to have on hosts so that devices are rid of a part of its bytes.

    The largest come first, and none that is small once it is split over all devices. Together they have `most_bytes`.
    """
    sizes = array_bytes(state)
    candidates = [index for index, nbytes in enumerate(sizes) if nbytes >= LEAST_HOST_BYTES * device_count]
    # Indices break ties, so that all processes choose the same arrays.
    candidates.sort(key=lambda index: (-sizes[index], index))
    left, chosen = part * sum(sizes[index] for index in candidates), list[int]()
    for index in candidates:
        if left > 0 and sizes[index] <= most_bytes:
            chosen.append(index)
            left, most_bytes = left - sizes[index], most_bytes - sizes[index]
    return tuple(sorted(chosen))


def array_bytes(tree: Any) -> list[int]:
    kinds = filter(None, map(array_kind, jtu.tree_leaves(tree)))
    return [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]


def is_any_on_host(tree: Any) -> bool:
    return any(map(_is_on_host, jtu.tree_leaves(tree)))


def _is_on_host(leaf: Any) -> bool:
    return _is_array(leaf) and jax.typeof(leaf).memory_space == _HOST


def update_by_parts(update: Callable[..., Any], gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Returns what `update(gradients, state, params)` does, for a state of which arrays are on the host.

    What belongs together, as the two moments of a parameter do, is fetched, updated and sent before the next is
    fetched. Parts follow each other as their gradients come. An update of which all depends on all is one part.
    """
    arrays, rest = eqx.partition((gradients, state, params), _is_array)
    returned: list[Any] = []

    def run(arrays: Any) -> Any:
        returned.append(update(*eqx.combine(arrays, rest)))
        return eqx.filter(returned[-1], _is_array)

    traced, results = jax.make_jaxpr(run, return_shape=True)(jtu.tree_map(_on_device_type, arrays))
    # A branch takes and returns all of the state: without them, optimizers that may skip an update have parts.
    program = flattened(ClosedJaxpr(without_branches(traced.jaxpr, has_derivatives=False), traced.consts))
    values = _run_by_parts(program, jtu.tree_leaves(arrays), _results_on_host(returned[-1], state))
    return eqx.combine(jtu.tree_structure(results).unflatten(values), eqx.filter(returned[-1], _is_array, inverse=True))


def _is_array(leaf: Any) -> bool:
    return array_kind(leaf) is not None


def _on_device_type(array: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _results_on_host(returned: tuple[Any, Any], state: Any) -> list[bool]:
    """The arrays of an update that go to the host: those whose places' arrays are there."""
    updates, new_state = returned
    moved = jtu.tree_map(lambda new, old: _is_on_host(old), new_state, state)
    pairs = zip(jtu.tree_leaves(new_state), jtu.tree_leaves(moved), strict=True)
    return [False] * len(array_bytes(updates)) + [flag for leaf, flag in pairs if _is_array(leaf)]


def _parts_of(jaxpr: Jaxpr, is_on_host: Sequence[bool]) -> tuple[Jaxpr, ...]:
    """The part that needs no array from the host, then parts that share no such array."""
    owners = _owners(jaxpr, [var for var, flag in zip(jaxpr.invars, is_on_host, strict=True) if flag])
    groups: dict[Any, list[Any]] = {None: []}
    # The caller reads all results, which belong to no part.
    readers: dict[Any, dict[Any, None]] = {var: {"caller": None} for var in jaxpr.outvars if type(var) is Var}
    for equation in jaxpr.eqns:
        operands = [*reads([equation])]
        group = next((owners[var] for var in operands if var in owners), None)
        groups.setdefault(group, []).append(equation)
        for var in operands:
            readers.setdefault(var, {})[group] = None

    def program_of(group: Any, equations: list[Any]) -> Jaxpr:
        outputs = [var for equation in equations for var in equation.outvars]
        return segment_program(
            equations, [var for var in outputs if any(each != group for each in readers.get(var, ()))]
        )

    common, *parts = (program_of(group, equations) for group, equations in groups.items())
    # Gradients come from the last layer to the first, and parameters are listed from the first to the last.
    return common, *reversed(parts)


def _run_by_parts(program: ClosedJaxpr, arrays: Sequence[Any], results_on_host: Sequence[bool]) -> list[Any]:
    """Returns the results of an update, some of which go to the host."""
    jaxpr = program.jaxpr
    common, *parts = _parts_of(jaxpr, [*map(_is_on_host, arrays)])
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, arrays, strict=True))
    sent = dict.fromkeys(
        var for var, flag in zip(jaxpr.outvars, results_on_host, strict=True) if flag and type(var) is Var
    )
    _run(common, values)
    before: list[Any] = []
    for part in parts:
        fetched = [var for var in part.invars if _is_on_host(values[var])]
        if before:
            # Only what comes from the host waits. Gradients that wait are kept, and nothing is fused with them.
            waiting, _ = jax.lax.optimization_barrier(([values[var] for var in fetched], before))
            values.update(zip(fetched, waiting, strict=True))
        values.update((var, jax.device_put(values[var], _DEVICE)) for var in fetched)
        _run(part, values)
        values.update((var, _moved(values[var], _HOST)) for var in part.outvars if var in sent)
        before = [values[var] for var in part.outvars if var in sent]
    results = [var.val if isinstance(var, Literal) else values[var] for var in jaxpr.outvars]
    return [_moved(result, _HOST if flag else _DEVICE) for result, flag in zip(results, results_on_host, strict=True)]


def _owners(jaxpr: Jaxpr, sources: Sequence[Any]) -> dict[Any, Any]:
    """Returns for all that is computed from some inputs one of these inputs: the same where anything needs both."""
    # Inputs that anything needs together get one root, as the sets of a union-find.
    parents = {var: var for var in sources}

    def root(var: Any) -> Any:
        while parents[var] is not var:
            var = parents[var]
        return var

    owners = dict(parents)
    for equation in jaxpr.eqns:
        operands = [*reads([equation])]
        roots = dict.fromkeys(root(owners[var]) for var in operands if var in owners)
        if roots:
            first = next(iter(roots))
            parents.update(dict.fromkeys(roots, first))
            owners.update(dict.fromkeys(equation.outvars, first))
    return {var: root(owner) for var, owner in owners.items()}


def _run(program: Jaxpr, values: dict[Any, Any]) -> None:
    operands = [values[var] for var in program.invars]
    values.update(zip(program.outvars, jaxpr_as_fun(ClosedJaxpr(program, ()))(*operands), strict=True))


def _moved(value: Any, memory: Any) -> Any:
    return value if jax.typeof(value).memory_space == memory else jax.device_put(value, memory)
