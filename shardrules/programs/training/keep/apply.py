"""Writing what the backward pass keeps into a traced function: checkpointed parts with named arrays in them.

Nothing is traced again, so that what equations say about the user's code stays true.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from shardrules.core.errors import ConfigError
from shardrules.programs.jaxprs.bodies import scan_of, with_bodies
from shardrules.programs.jaxprs.calls import is_scan
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.rewrite import Writer, fresh
from shardrules.programs.jaxprs.segments import segment_program, segment_results, struct
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.training.keep.keep import Keep, KeptUnit, Position
from shardrules.programs.training.keep.rules import has_rule, with_named_rule


def with_kept(program: ClosedJaxpr, keep: Keep) -> ClosedJaxpr:
    """Returns a program that computes the same, and whose gradient keeps what `keep` says.

    ```python
    from shardrules.programs.training.keep.apply import with_kept
    from shardrules.programs.training.keep.choices import keep_choices

    def layers(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    program = jax.make_jaxpr(layers)(jnp.ones((6, 64, 64)), jnp.ones((8, 64)))
    least = keep_choices(program, sr.Hardware.named("cuda:h100"))[-1]
    assert "remat" in str(with_kept(program, least)) or "checkpoint" in str(with_kept(program, least))
    ```
    """
    if not keep.units and not keep.replaces_checkpoints:
        return program
    flat = flattened(program, keep.replaces_checkpoints)
    entries = [(each.unit.path, index, each) for index, each in enumerate(keep.units)]
    return ClosedJaxpr(_rewritten(flat.jaxpr, entries), flat.consts)


_PREFIX = "kept."
"""The beginning of the names of kept arrays."""


def is_kept_name(equation: Any) -> bool:
    return equation is not None and str(equation.params.get("name", "")).startswith(_PREFIX)


_Entry = tuple[tuple[int, ...], int, KeptUnit]
"""The rest of the path to a unit, its index and what is kept of it."""


def _rewritten(body: Jaxpr, entries: Sequence[_Entry]) -> Jaxpr:
    """A body with its units, or those inside it, checkpointed."""
    runs = {kept.unit.start: (index, kept) for path, index, kept in entries if not path}
    scans: dict[int, list[_Entry]] = {}
    for path, index, kept in entries:
        if path:
            scans.setdefault(path[0], []).append((path[1:], index, kept))
    # The choices may be for another program: positions are all that is known of it.
    for index in scans:
        if index >= len(body.eqns) or not is_scan(body.eqns[index]):
            raise _other_program(f"equation {index} is no scan")
    equations: list[Any] = []
    index = 0
    while index < len(body.eqns):
        equation = body.eqns[index]
        if index in runs:
            unit_index, kept = runs[index]
            position = kept.unit
            for start in range(index, index + position.length * position.repeats, position.length):
                stop = start + position.length
                if stop > len(body.eqns):
                    raise _other_program(f"it has {len(body.eqns)} equations, and {stop} are needed")
                segment = segment_program(body.eqns[start:stop], segment_results(body, start, stop))
                equations += _checkpointed(segment, unit_index, kept, prevent_cse=True)
            index += position.length * position.repeats
            continue
        equations.append(_scan_with(equation, scans[index]) if index in scans else equation)
        index += 1
    return body.replace(eqns=equations)


def _scan_with(equation: Any, entries: Sequence[_Entry]) -> Any:
    """A scan whose body is checkpointed, or has units that are."""
    loop = scan_of(equation)
    inner = open_jaxpr(loop.body)
    _, index, kept = entries[0]
    if entries[0][0]:
        body = _rewritten(inner, entries)
    else:
        if kept.unit.length != len(inner.eqns):
            raise _other_program(f"a layer has {len(inner.eqns)} equations instead of {kept.unit.length}")
        # The rounds of a loop run at another time than those of its gradient: compilers cannot share what both compute.
        is_loop = loop.length is not None and 1 == loop.unroll < loop.length
        program = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
        outputs = [Var(var.aval) for var in inner.outvars]
        *namings, checkpointed = _checkpointed(program, index, kept, prevent_cse=not is_loop)
        body = inner.replace(eqns=[*namings, checkpointed.replace(outvars=outputs)], outvars=outputs)
    return with_bodies(equation, [body])


def _other_program(why: str) -> ConfigError:
    return ConfigError(f"what is kept was chosen for another function: {why}. Call keep_choices for this one")


def _checkpointed(program: Jaxpr, unit_index: int, kept: KeptUnit, prevent_cse: bool) -> list[Any]:
    """The equation that computes a program, and whose gradient keeps only the values in `kept`.

    Before it come names for inputs. Those on the device would be kept without: these names are for readers of the
    program.
    """
    named = _Named(unit_index, kept)
    inner, inputs = named.program(program), list(program.invars)
    namings: list[Any] = []
    for index, result in kept.kept:
        if index < 0:
            namings.append(named.naming(inputs[result], (index, result), program.eqns[0]))
            (inputs[result],) = namings[-1].outvars
    names = tuple(named.name(position) for position in kept.kept if position[0] >= 0)
    policy = _policy(names, tuple(map(named.name, kept.offloaded)))
    template = _checkpoint_equation(policy, prevent_cse)
    source = program.eqns[0].source_info.replace(name_stack=template.source_info.name_stack)
    checkpointed = template.replace(
        invars=inputs,
        outvars=program.outvars,
        params={**template.params, "jaxpr": inner},
        effects=inner.effects,
        source_info=source,
    )
    return [*namings, checkpointed]


@final
@attrs.frozen
class _Named:
    """Copies a program, with names for what is kept."""

    unit_index: int
    kept: KeptUnit

    def name(self, position: Position) -> str:
        index, result = position
        return f"{_PREFIX}{self.unit_index}.{index if index >= 0 else 'input'}.{result}"

    def program(self, program: Jaxpr) -> Jaxpr:
        inputs = [Var(var.aval) for var in program.invars]
        writer = Writer(dict(zip(program.invars, inputs, strict=True)))
        current = writer.current
        positions = dict.fromkeys((*(each for each in self.kept.kept if each[0] >= 0), *self.kept.offloaded))

        def add_name(var: Any, position: Position, like: Any) -> None:
            if position in positions:
                (current[var],) = writer.add(self.naming(current[var], position, like))

        # A name is an equation: what follows has to read its result, or the checkpoint would not keep it.
        for index, var in enumerate(program.invars):
            add_name(var, (-1, index), program.eqns[0])
        for index, equation in enumerate(program.eqns):
            changed = equation.replace(invars=writer.read(equation.invars), outvars=fresh(equation.outvars))
            results = writer.add(self.with_rule(changed, index, positions) if has_rule(equation) else changed)
            current.update(zip(equation.outvars, results, strict=True))
            for position, var in enumerate(equation.outvars):
                add_name(var, (index, position), equation)
        return writer.program(program, invars=inputs)

    def naming(self, var: Any, position: Position, like: Any) -> Any:
        """The equation that gives an array its name, with the source line of the equation `like`."""
        template = _name_equation(struct(var), self.name(position))
        return template.replace(invars=[var], outvars=[Var(var.aval)], source_info=like.source_info)

    def with_rule(self, equation: Any, index: int, positions: Mapping[Position, None]) -> Any:
        """A function with a backward rule of its own, with names for what is kept inside of its forward rule."""
        count = len(equation.outvars)

        def name(var: Any, rule_index: int) -> Any | None:
            position = index, count + rule_index
            return self.naming(var, position, equation) if position in positions else None

        return with_named_rule(equation, name)


@functools.cache
def _policy(kept: tuple[str, ...], offloaded: tuple[str, ...]) -> Any:
    """The policy that keeps names. The same for the same names, so that programs with it are compared as equal."""
    policies = jax.checkpoint_policies
    if offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(kept),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*kept) if kept else None


@functools.cache
def _checkpoint_equation(policy: Any, prevent_cse: bool) -> Any:
    """The equation of a checkpointed function, as this version of JAX writes it."""
    return jax.make_jaxpr(jax.checkpoint(lambda x: -x, policy=policy, prevent_cse=prevent_cse))(0.0).eqns[0]


@functools.lru_cache(maxsize=1024)
def _name_equation(shape: jax.ShapeDtypeStruct, name: str) -> Any:
    return jax.make_jaxpr(lambda x: checkpoint_name(x, name))(shape).eqns[0]
