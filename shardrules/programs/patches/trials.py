"""Programs with some of the annotations, compiled; and which annotations a program needs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import totals
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiling.kernel_calls import find_kernel_calls
from shardrules.programs.compiling.request import CompileRequest
from shardrules.programs.jaxprs.bodies import bodies_of, with_bodies
from shardrules.programs.jaxprs.rewrite import Writer
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.targets import Target
from shardrules.programs.patches.marks import mark_of
from shardrules.programs.patches.needs import batch_dims

EQUAL = 1.002
"""The ratio up to which times and bytes count as equal: chosen by hand. Plans are told apart by as much."""

_EQUAL_PEAK = 1.02
"""The same for peaks of memory, which depend on the order of operations: chosen by hand."""


@final
@attrs.frozen
class CompiledFigures:
    """A compiled program, as far as a patch is judged by it. Figures are for one device and one call."""

    seconds: float
    """The modelled time."""
    wire_bytes: int
    peak_bytes: int
    collectives: Mapping[tuple[str, ...], tuple[int, int]]
    """The runs and the bytes on the wire of the collectives of each kind over the same axes."""

    def is_as_good_as(self, other: "CompiledFigures", *, exact: bool) -> bool:
        """Returns whether a program takes no longer, sends no more and needs no more; `exact`: by equal collectives."""
        return (
            self.seconds <= EQUAL * other.seconds
            and self.wire_bytes <= EQUAL * other.wire_bytes
            and self.peak_bytes <= _EQUAL_PEAK * other.peak_bytes
            and (not exact or self.collectives == other.collectives)
        )


@final
@attrs.frozen(eq=False)
class PatchTarget:
    """The devices that a patch is compiled for, and where arguments and results are."""

    mesh: AnyMesh
    target: Target
    hardware: Hardware
    structs: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    result_specs: tuple[PartitionSpec, ...]

    def outcome(self, program: ClosedJaxpr) -> CompiledFigures:
        """Compiles a program on flat arrays."""
        run = jaxpr_as_fun(program)
        request = CompileRequest(
            lambda *arrays: tuple(run(*arrays)), None, self.specs, self.result_specs, (), None, "auto"
        )
        return self.outcome_of(request, self.structs)

    def outcome_of(self, request: CompileRequest, args: tuple[Any, ...]) -> CompiledFigures:
        result = request.compile(args, self.mesh, self.target, tolerant=True)
        facts = KernelFacts((), find_kernel_calls(result.compiled.jaxpr))
        timing = Timing.of(result, self.target, self.hardware, facts)
        groups = totals(timing.collectives, lambda collective: (collective.kind, collective.axes_text))
        return CompiledFigures(
            timing.schedule.time.seconds,
            sum(total.wire_bytes for total in groups.values()),
            result.compiled.memory.peak_bytes,
            {key: (total.run_count, total.wire_bytes) for key, total in groups.items() if total.wire_bytes},
        )


def constrained(program: ClosedJaxpr, specs: Mapping[int, PartitionSpec]) -> ClosedJaxpr:
    """Returns a marked program with constraints in the place of the marks of some places, and without the others."""
    return ClosedJaxpr(_constrained(program.jaxpr, specs), program.consts)


def _constrained(program: Jaxpr, specs: Mapping[int, PartitionSpec]) -> Jaxpr:
    writer = Writer()
    for equation in program.eqns:
        mark, inputs = mark_of(equation), writer.read(equation.invars)
        if mark is None:
            bodies = [_constrained(open_jaxpr(body.program), specs) for body in bodies_of(equation)]
            changed = with_bodies(equation, bodies) if bodies else equation
            writer.add(changed.replace(invars=inputs))
        elif mark.place in specs:
            sharding = equation.params["sharding"]
            spec = _batched(specs[mark.place], sharding.spec, batch_dims(equation, mark))
            params = {**equation.params, "sharding": NamedSharding(sharding.mesh, spec)}
            writer.add(equation.replace(invars=inputs, params=params))
        else:
            writer.current[equation.outvars[0]] = inputs[0]
    return writer.program(program)


def _batched(spec: PartitionSpec, marked: PartitionSpec, hidden: frozenset[int]) -> PartitionSpec:
    """The spec of an array that has dims of `vmap`, too, which stay as the mark has them."""
    entries = iter((*spec, *[None] * len(marked)))
    return PartitionSpec(*(entry if dim in hidden else next(entries) for dim, entry in enumerate(marked)))


def needed(items: Sequence[int], suffices: Callable[[frozenset[int]], bool]) -> list[int]:
    """Returns items that suffice together, of which none can be taken out. The first are kept rather than the last.

    All together suffice. Halves are tried first: QuickXplain, by U. Junker (2004).
    """

    def missing(background: frozenset[int], is_new: bool, rest: Sequence[int]) -> list[int]:
        if is_new and suffices(background):
            return []
        if len(rest) <= 1:
            return list(rest)
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_second = missing(background | {*first}, True, second)
        of_first = missing(background | {*of_second}, bool(of_second), first)
        return of_first + of_second

    kept = missing(frozenset(), True, items)
    # Compilers are not monotone: what was needed once may not be any more.
    while True:
        spare = next((item for item in reversed(kept) if suffices(frozenset(kept) - {item})), None)
        if spare is None:
            return sorted(kept, key=list(items).index)
        kept.remove(spare)
