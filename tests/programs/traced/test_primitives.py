"""The table of primitives: complete, true, and the one in the documentation."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, primitives

import shardrules as sr
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.traced.primitives import ONLY_IN, PrimitiveEntry, primitive_table
from shardrules.programs.traced.program import read_jaxpr
from tests.house.source import REPOSITORY
from tests.programs.autoplan.library import CALLS, NOT_CALLED, Call, public_functions

PAGE = REPOSITORY / "docs" / "primitives.md"
MARK = "<!-- table -->\n"


def public_primitives() -> list[str]:
    named = {**vars(lax), **vars(lax.linalg), **vars(primitives)}
    return [value.name for name, value in named.items() if name.endswith("_p") and isinstance(value, Primitive)]


def entries() -> dict[str, PrimitiveEntry]:
    return {name: entry for entry in primitive_table() for name in entry.names}


def test_no_public_primitive_of_jax_is_missing() -> None:
    assert sorted(dict.fromkeys(public_primitives()).keys() - entries().keys()) == []


def test_a_primitive_is_in_one_row_that_says_how_it_is_planned() -> None:
    names = [name for entry in primitive_table() for name in entry.names]
    assert sorted(names) == sorted(dict.fromkeys(names))
    assert [entry.names for entry in primitive_table() if not entry.text.endswith(".")] == []


def test_primitives_of_some_versions_only_are_named() -> None:
    is_new = jax.__version_info__ >= (0, 12)
    assert sorted(dict.fromkeys(ONLY_IN.values())) == ["from JAX 0.12", "until JAX 0.11"]
    for name, versions in ONLY_IN.items():
        assert name in entries()
        assert (name in public_primitives()) == (is_new == versions.startswith("from")), name


def written_table() -> str:
    """The table as markdown."""
    lines = ["| primitives | planned | how |", "|---|---|---|"]
    for entry in primitive_table():
        names = [f"`{name}`" + (f" ({ONLY_IN[name]})" if name in ONLY_IN else "") for name in entry.names]
        lines.append(f"| {', '.join(names)} | {entry.handling} | {entry.text} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table() -> None:
    """`SHARDRULES_UPDATE=1` writes it there."""
    text, _, table = PAGE.read_text().partition(MARK)
    if os.environ.get("SHARDRULES_UPDATE"):
        PAGE.write_text(f"{text}{MARK}{written_table()}")
    else:
        assert table == written_table()


# What the functions of JAX trace to.


def traced(call: Call) -> ClosedJaxpr:
    """A call on a mesh, which adds operations of its own."""
    return read_call(call.fn, call.args, sr.mesh_shape("data:4,model:2"), "fn").jaxpr


def unknown(program: ClosedJaxpr) -> list[str]:
    return sorted({operation.name for operation in read_jaxpr(program).operations if operation.lacks_rule})


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_jax_trace_to_known_primitives(name: str) -> None:
    assert unknown(traced(CALLS[name])) == []


def gradient(call: Call) -> Call:
    def total(*args: Any) -> Any:
        leaves = [leaf for leaf in jax.tree.leaves(call.fn(*args)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.abs(leaf)) for leaf in leaves)

    floats = tuple(index for index, arg in enumerate(call.args) if jnp.issubdtype(arg.dtype, jnp.floating))
    return Call(jax.grad(total, floats), call.args)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.has_gradient])
def test_gradients_trace_to_known_primitives(name: str) -> None:
    assert unknown(traced(gradient(CALLS[name]))) == []


def test_every_public_function_is_called() -> None:
    assert sorted(name for name in public_functions() if name not in CALLS and name not in NOT_CALLED) == []
