"""The costs of each module of a model: FLOPs and bytes on the wire, by the scopes that JAX names operations with.

Flax, the layers of Equinox and `jax.named_scope` put names into the path of an operation. Where these say little, the
function around the line of code is used.
"""

import re
from collections.abc import Iterable, Sequence
from typing import final

import attrs

from shardrules.core.source import Source, user_frames
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flops import Matmul

_TRANSFORMATION = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint|custom_jvp|custom_vjp)\((.*)\)$")
"""A part of a path around which JAX wrote the transformation that made it: `transpose(jvp(Model))`."""

_PLUMBING = re.compile(
    r"(?:jit|pjit|shmap|shard_map|scan|cond|branch)\b.*|while|body|closed_call|core_call|checkpoint|remat\d*"
    r"|rematted_computation|custom_[jv]{2}p_call|branch_\d+_fun|"
)
"""Parts of a path that JAX adds for control flow and calls."""


@final
@attrs.frozen
class ModuleCost:
    """The costs of a module on one device in one call: FLOPs of matmuls, wire bytes and runs of collectives.

    `path` is the scopes around it, `"Model/MLP/Linear"`, or the name of a function.
    """

    path: str
    flops: int
    wire_bytes: int
    run_count: int


def module_path(op_name: str, stack: Sequence[Source]) -> str:
    """Returns the module of an operation: the scopes in its path, without what JAX added.

    With one scope at most, which is a layer of a library, the innermost user function comes before it.
    """
    scopes = []
    for part in _split_path(op_name)[:-1]:
        while match := _TRANSFORMATION.match(part):
            part = match[1]
        # "bd,dh->bh" is the name that einsum gives to its operations.
        scopes += [scope for scope in _split_path(part) if not _PLUMBING.fullmatch(scope) and "->" not in scope]
    if len(scopes) > 1:
        return "/".join(scopes)
    # A single scope is a layer of a library, like `eqx.nn.Linear`: many modules have one, and the function tells them
    # apart.
    functions = [frame.function.rpartition("<locals>.")[2] for frame in user_frames(stack)]
    # Lambdas, comprehensions and modules have names in angle brackets.
    named = [name.removesuffix(".__call__") for name in functions if name and not name.startswith("<")]
    return "/".join([*named[:1], *scopes]) or "(unknown)"


def _split_path(path: str) -> list[str]:
    """The parts between the slashes of a path; slashes inside brackets do not split."""
    parts, depth = [""], 0
    for char in path:
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def module_costs(collectives: Iterable[Collective], matmuls: Iterable[Matmul]) -> tuple[ModuleCost, ...]:
    """Adds up what each module costs, in the order of first appearance."""
    costs: dict[str, ModuleCost] = {}
    for path, flops, wire_bytes, runs in (
        *((module_path(matmul.op_name, matmul.stack), matmul.total_flops, 0, 0) for matmul in matmuls),
        *(
            (module_path(collective.op_name, collective.stack), 0, collective.total_wire_bytes, collective.times.count)
            for collective in collectives
        ),
    ):
        old = costs.get(path, ModuleCost(path, 0, 0, 0))
        costs[path] = ModuleCost(path, old.flops + flops, old.wire_bytes + wire_bytes, old.run_count + runs)
    return tuple(costs.values())
