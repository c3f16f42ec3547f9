"""The proof of a patch: the patched text, compiled and run, beside the plan and the function without the patch."""

from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from shardrules.core.axes import mesh_sizes
from shardrules.core.keys import is_key
from shardrules.core.text import bytes_text
from shardrules.core.tree import array_kind
from shardrules.programs.compiling.retarget import retarget
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.patches.planned import PlannedProgram
from shardrules.programs.patches.source import SourceFile
from shardrules.programs.patches.swap import code_changes, compiled, live_functions, swapped
from shardrules.programs.patches.text import AnnotatedFile
from shardrules.programs.patches.trials import CompiledFigures

_MOST_TIME = 1.03
"""The part of the plan's modelled time that a patch may take: chosen by hand."""

_MOST_ERROR = 1e-6
"""The part of the norm of an array by which it may differ. Coarser types get a few of their steps."""

_MOST_BYTES = 1 << 31
"""The most bytes of arguments with which a function is run to compare numbers: chosen by hand."""


@final
@attrs.frozen
class Verification:
    """A patched function beside its plan. It is true if it takes as long as the plan, and computes the same."""

    planned: CompiledFigures
    patched: CompiledFigures
    error: float | None
    """The largest difference of an array that is returned, as a part of its norm; `None` if nothing was run."""
    tolerance: float
    reason: str = ""
    """Why nothing was run."""

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs, and by how much."""
        lines: list[str] = []
        for key in sorted({*self.planned.collectives, *self.patched.collectives}):
            (old_runs, old), (new_runs, new) = (
                each.collectives.get(key, (0, 0)) for each in (self.planned, self.patched)
            )
            if (old_runs, old) != (new_runs, new):
                kind, axes = key
                lines.append(
                    f"{kind} over {axes}: {old_runs} runs, {bytes_text(old)} -> {new_runs} runs, {bytes_text(new)}"
                )
        old, new = self.planned.seconds, self.patched.seconds
        if abs(new - old) > 1e-3 * old:
            lines.append(f"time: {seconds_text(old)} -> {seconds_text(new)} ({new / old - 1:+.1%})")
        if self.error is not None and self.error > self.tolerance:
            lines.append(f"numbers: differ by {self.error:.1e} of the norm of their array")
        return tuple(lines)

    def __bool__(self) -> bool:
        is_fast = self.patched.seconds <= _MOST_TIME * self.planned.seconds
        return is_fast and (self.error is None or self.error <= self.tolerance)

    def __str__(self) -> str:
        time = f"{seconds_text(self.patched.seconds)}, planned {seconds_text(self.planned.seconds)}"
        is_same = self.error is not None and self.error <= self.tolerance
        numbers = "the same numbers" if is_same else self.reason or "other numbers"
        head = f"{'as planned' if self else 'not as planned'}: {time}; {numbers}"
        same = [] if self.differences else ["the same collectives"]
        return "\n  ".join([head, *same, *self.differences])


def patched_functions(changes: Sequence[AnnotatedFile], roots: Sequence[Any]) -> Any:
    """Returns a context in which functions run patched text, without that their files change."""
    code: dict[CodeType, CodeType] = {}
    names: dict[str, Mapping[str, Any]] = {}
    for change in changes:
        new = compiled(SourceFile.parse(change.file.path, change.new))
        code |= code_changes(compiled(change.file), new, change.file)
        space: dict[str, Any] = {}
        exec(change.header, space)
        space.pop("__builtins__")
        names[str(change.file.path)] = space
    return swapped(code, names, live_functions(roots, frozenset(names)))


def compare_numbers(plan: PlannedProgram, patched: ClosedJaxpr) -> tuple[float | None, float, str]:
    """Runs a patched program and the function on CPU devices. Returns the difference, the tolerance, and why
    nothing was run."""
    if any(not isinstance(struct, jax.ShapeDtypeStruct) for struct in plan.structs):
        return None, 0.0, "numbers not compared"
    if sum(struct.size * struct.dtype.itemsize for struct in plan.structs) > _MOST_BYTES:
        return None, 0.0, "numbers not compared: the arguments are too large to run here"
    devices, sizes = jax.devices("cpu"), mesh_sizes(plan.mesh)
    if len(devices) < plan.mesh.size:
        return None, 0.0, f"numbers not compared: {plan.mesh.size} CPU devices are needed, and there are {len(devices)}"
    grid = np.array(devices[: plan.mesh.size]).reshape(tuple(sizes.values()))
    mesh = Mesh(grid, tuple(sizes), axis_types=plan.mesh.axis_types)
    auto = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    arrays = _arrays(plan)
    with jax.default_matmul_precision("highest"):
        before, after = _run(plan.program, plan, auto, arrays), _run(patched, plan, mesh, arrays)
    pairs = [
        (np.asarray(old), np.asarray(new)) for old, new in zip(before, after, strict=True) if not is_key(old.dtype)
    ]
    return max((_error(*pair) for pair in pairs), default=0.0), _tolerance(plan), ""


def _run(program: ClosedJaxpr, plan: PlannedProgram, mesh: Mesh, arrays: Sequence[Any]) -> list[Any]:
    """Runs a program with its arguments as planned."""
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in plan.specs]
        return jax.jit(jaxpr_as_fun(retarget(program, mesh)))(*jax.device_put(list(arrays), places))


def _tolerance(plan: PlannedProgram) -> float:
    types = [
        var.aval.dtype for equation in plan.program.jaxpr.eqns for var in equation.outvars if hasattr(var.aval, "dtype")
    ]
    steps = [float(jnp.finfo(dtype).eps) for dtype in types if jnp.issubdtype(dtype, jnp.inexact)]
    # Sums in another order round differently: sixteen steps, chosen by hand.
    return max(_MOST_ERROR, 16 * max(steps, default=0.0))


def _arrays(plan: PlannedProgram) -> list[Any]:
    """The arguments, with random numbers in the place of shapes."""
    leaves = [leaf for leaf in jtu.tree_leaves(plan.args) if array_kind(leaf) is not None]
    random = np.random.default_rng(0)
    arrays: list[Any] = []
    for leaf, struct in zip(leaves, plan.structs, strict=True):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            arrays.append(leaf)
        elif is_key(struct.dtype):
            arrays.append(jax.random.split(jax.random.key(0), struct.shape))
        elif jnp.issubdtype(struct.dtype, jnp.inexact):
            scale = struct.shape[-2] ** -0.5 if len(struct.shape) > 1 else 1.0
            arrays.append(jnp.asarray(scale * random.normal(size=struct.shape), struct.dtype))
        else:  # indices are in range for any table of two rows
            arrays.append(jnp.asarray(random.integers(0, 2, struct.shape), struct.dtype))
    return arrays


def _error(old: np.ndarray, new: np.ndarray) -> float:
    old, new = old.astype(np.float64), new.astype(np.float64)
    if not old.size:
        return 0.0
    if not np.array_equal(np.isnan(old), np.isnan(new)):
        return float("inf")
    size = float(np.linalg.norm(np.nan_to_num(old)))
    difference = float(np.linalg.norm(np.nan_to_num(old - new)))
    return difference / size if size else difference
