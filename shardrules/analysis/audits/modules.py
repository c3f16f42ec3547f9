"""What each module of a model costs: FLOPs and bytes on the wire, by the scopes that JAX names operations with.

Flax, the layers of Equinox and `jax.named_scope` put names into the path of an operation. Where these say little, the
function that holds the line of code stands for a module.
"""

import re
from collections.abc import Iterable, Sequence
from typing import final

import attrs

from shardrules.analysis.compiling.source import users_own
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import Matmul
from shardrules.analysis.program.program import Source

_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint|custom_jvp|custom_vjp)\((.*)\)$")
_PLUMBING = re.compile(
    r"(?:jit|pjit|shmap|shard_map|scan|cond|branch)\b.*|while|body|closed_call|core_call|checkpoint|remat\d*"
    r"|rematted_computation|custom_[jv]{2}p_call|branch_\d+_fun|"
)


@final
@attrs.frozen
class ModuleCost:
    """What one module costs on one device in one call of the program.

    **Arguments:**

    - `path`: the scopes around it, `"Model/MLP/Linear"`, or the name of a function.
    - `flops`: of its matmuls.
    - `wire_bytes`: what its collectives send.
    - `run_count`: how often these run.
    """

    path: str
    flops: int
    wire_bytes: int
    run_count: int


def module_path(op_name: str, stack: Sequence[Source]) -> str:
    """Returns the module that an operation belongs to.

    **Arguments:**

    - `op_name`: the path of the operation.
    - `stack`: the lines of Python behind it, the innermost first.

    **Returns:**

    The scopes in the path without what JAX put there itself. Where there is one at most, which is a layer of a library,
    the innermost function of the user's own comes before it. `"(unknown)"` where there is neither.

    ```python
    assert module_path("jit(step)/transpose(jvp(Model))/up/dot_general", ()) == "Model/up"
    stack = (Source("model.py", 7, "Block.__call__"),)
    assert module_path("jit(step)/jvp()/dot_general", stack) == "Block"
    assert module_path("jit(step)/jvp(eqx.nn.Linear)/dot_general", stack) == "Block/eqx.nn.Linear"
    ```
    """
    scopes = []
    for part in _parts(op_name)[:-1]:
        while found := _WRAPPED.match(part):
            part = found[1]
        scopes += [scope for scope in _parts(part) if not _PLUMBING.fullmatch(scope) and "->" not in scope]  # einsum
    if len(scopes) > 1:
        return "/".join(scopes)
    own = [one.function.rpartition("<locals>.")[2] for one in users_own(stack)]
    named = [
        name.removesuffix(".__call__") for name in own if name and not name.startswith("<")
    ]  # lambdas and the like
    return "/".join([*named[:1], *scopes]) or "(unknown)"


def _parts(path: str) -> list[str]:
    """The parts between the slashes of a path, but not between those inside of brackets."""
    parts, depth = [""], 0
    for char in path:
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def module_costs(collectives: Iterable[Collective], matmuls: Iterable[Matmul]) -> tuple[ModuleCost, ...]:
    """Adds up what each module costs.

    **Arguments:**

    - `collectives`, `matmuls`: those of a program.

    **Returns:**

    One item for each module, in the order of first appearance.
    """
    costs: dict[str, ModuleCost] = {}
    for path, flops, wire, runs in (
        *((module_path(one.op_name, one.stack), one.total_flops, 0, 0) for one in matmuls),
        *((module_path(one.op_name, one.stack), 0, one.total_wire_bytes, one.times.count) for one in collectives),
    ):
        old = costs.get(path, ModuleCost(path, 0, 0, 0))
        costs[path] = ModuleCost(path, old.flops + flops, old.wire_bytes + wire, old.run_count + runs)
    return tuple(costs.values())
