"""The layouts that a plan has for values at places of the source.

The marked program is the planned one with marks in it. Both are walked side by side: what an equation is in the plan,
its twin is in the marked program. Derivatives of marked loops may keep an array twice, so that twins are matched by
their kind, shapes and lines, in order, and need not be at the same index.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from shardrules.core.source import equation_stack
from shardrules.core.spec import spec_key
from shardrules.programs.jaxprs.bodies import Loop, bodies_of
from shardrules.programs.jaxprs.calls import InlinedCall, is_cond
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.patches.marks import Mark, is_backward, mark_of


class LayoutsAt(Protocol):
    """The specs that arrays go through at one operation: the last one counts."""

    @property
    def operands(self) -> Sequence[Sequence[PartitionSpec]]: ...

    @property
    def results(self) -> Sequence[Sequence[PartitionSpec]]: ...


Layouts: TypeAlias = Mapping[tuple[int, str, int], LayoutsAt]
"""The layouts at each operation, by the index of its equation, its role and its slot."""


@final
@attrs.frozen
class Need:
    """A spec that the plan has for the value of a place."""

    place: int
    spec: PartitionSpec
    ndim: int
    elements: int
    """The number of elements of the value, in all of its runs."""
    has_matmul: bool
    """The value is computed by a matmul or a convolution."""
    moves: bool
    """The value is not in that layout before."""
    batch: Any = None
    """The axes that split the dim which `vmap` hides from the place."""


@final
@attrs.frozen
class PlaceConflict:
    """A place whose runs have several specs or ranks in the plan, so that no one annotation fits."""

    place: int
    specs: tuple[PartitionSpec, ...]


@final
@attrs.define(eq=False)
class _Node:
    """An equation, each time that it runs; and its index in the plan."""

    equation: Any
    bodies: list[tuple[Jaxpr, list["_Node"]]]
    index: int = -1


@final
@attrs.frozen(eq=False)
class _Value:
    """An array: its spec in the plan, if it has one there, and the marks that it has gone through."""

    spec: PartitionSpec | None = None
    marks: tuple[int, ...] = ()
    has_matmul: bool = False
    enters: bool = False
    """The value comes into a loop, which may be in another layout than before."""


@final
@attrs.define(eq=False)
class _Instance:
    """One run of a mark."""

    mark: Mark
    equation: Any
    value: _Value
    backward: bool
    """The mark is where derivatives are computed, or what they need again."""
    uses: list[tuple[PartitionSpec, bool]] = attrs.field(factory=list)
    """The specs in which operations take the value, and whether these compute derivatives."""

    @property
    def spec(self) -> PartitionSpec | None:
        """The spec that all take it in, and else that in which it is."""
        forward = [spec for spec, backward in self.uses if not backward]
        specs = {spec_key(spec): spec for spec in forward or [spec for spec, _ in self.uses]}
        return next(iter(specs.values())) if len(specs) == 1 else self.value.spec


def find_needs(
    marked: ClosedJaxpr,
    planned: ClosedJaxpr,
    layouts: Layouts,
    specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec],
) -> tuple[list[Need], list[PlaceConflict]]:
    """Returns what a plan says of the places of a marked program, and where it says several things at once."""
    nodes = _nodes(marked.jaxpr)
    _align(nodes, _numbered(_nodes(planned.jaxpr)))
    walk = _Walk(layouts)
    walk.run(marked.jaxpr, nodes, specs, result_specs)
    needs: list[Need] = []
    conflicts: list[PlaceConflict] = []
    for place, instances in _by_place(walk.instances).items():
        first = [each for each in instances if not each.backward] or instances
        pairs = [(_spec_at(each, each.spec), each) for each in first if each.spec is not None]
        if not pairs:
            continue
        # A spec without its last dims, which are whole, is good for arrays of several ranks.
        kinds = {spec_key(spec): spec for spec, _ in pairs}
        if len(kinds) > 1:
            conflicts.append(PlaceConflict(place, tuple(kinds.values())))
            continue
        spec, instance = pairs[0]
        elements = sum(math.prod(each.equation.outvars[0].aval.shape) for each in first)
        needs.append(
            Need(
                place,
                spec,
                instance.mark.ndim,
                elements,
                instance.value.has_matmul,
                any(map(walk.moves, first)),
                _batch(instance),
            )
        )
    return needs, conflicts


def _by_place(instances: Iterable[_Instance]) -> dict[int, list[_Instance]]:
    groups: dict[int, list[_Instance]] = {}
    for instance in instances:
        groups.setdefault(instance.mark.place, []).append(instance)
    return dict(sorted(groups.items()))


def batch_dims(equation: Any, mark: Mark) -> frozenset[int]:
    """Returns the dims of a marked array that the place does not see: those of `vmap`."""
    free = equation.params["unconstrained_dims"]
    if equation.outvars[0].aval.ndim - len(free) == mark.ndim:
        return free
    # With `spmd_axis_name`, these are split by its axes.
    return frozenset(dim for dim, entry in enumerate(equation.params["sharding"].spec) if entry is not None)


def _spec_at(instance: _Instance, spec: PartitionSpec | None) -> PartitionSpec:
    """The spec with the rank that the value has at the place."""
    ndim = instance.equation.outvars[0].aval.ndim
    hidden = batch_dims(instance.equation, instance.mark)
    entries = tuple(() if spec is None else spec) + (None,) * ndim
    kept = [entries[dim] for dim in range(ndim) if dim not in hidden]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def _batch(instance: _Instance) -> Any:
    hidden = sorted(batch_dims(instance.equation, instance.mark))
    spec = tuple(instance.spec or ())
    return spec[hidden[0]] if hidden and hidden[0] < len(spec) else None


def _nodes(program: Jaxpr) -> list[_Node]:
    nodes: list[_Node] = []
    for equation in program.eqns:
        bodies = [(open_jaxpr(body.program), _nodes(open_jaxpr(body.program))) for body in bodies_of(equation)]
        nodes.append(_Node(equation, bodies))
    return nodes


def _numbered(nodes: list[_Node]) -> list[_Node]:
    """Counts equations as the plan counts them: each before those of the programs in it."""
    for index, node in enumerate(_in_order(nodes)):
        node.index = index
    return nodes


def _in_order(nodes: Iterable[_Node]) -> Iterator[_Node]:
    for node in nodes:
        yield node
        for _, inner in node.bodies:
            yield from _in_order(inner)


def _align(nodes: Sequence[_Node], planned: Sequence[_Node]) -> None:
    """Gives the equations of a marked program the indices of their twins in the plan."""
    nodes = [node for node in nodes if mark_of(node.equation) is None]
    keys, others = ([_key(node.equation) for node in each] for each in (nodes, planned))
    pairs = zip(nodes, planned, strict=False)
    if keys != others:
        blocks = difflib.SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
        pairs = ((nodes[a + i], planned[b + i]) for a, b, size in blocks for i in range(size))
    for node, twin in pairs:
        node.index = twin.index
        for (_, inner), (_, twin_inner) in zip(node.bodies, twin.bodies, strict=False):
            _align(inner, twin_inner)


def _key(equation: Any) -> Any:
    shapes = [] if bodies_of(equation) else [str(var.aval) for var in equation.outvars]
    return equation.primitive.name, tuple(shapes), tuple(map(str, equation_stack(equation)[:8]))


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@final
class _Walk:
    """A walk through the marked program."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.instances: list[_Instance] = []
        self.backward = False

    def run(
        self, program: Jaxpr, nodes: list[_Node], specs: Sequence[PartitionSpec], results: Sequence[PartitionSpec]
    ) -> None:
        returned = self.body(program, nodes, [_Value(spec) for spec in specs])
        for value, spec in zip(returned, results, strict=True):
            self.use(value, spec)

    def moves(self, instance: _Instance) -> bool:
        """Returns whether the value has another spec than before the mark, or comes into a loop."""
        if instance.value.enters and not instance.value.marks:
            return True
        before = self.instances[instance.value.marks[-1]].spec if instance.value.marks else instance.value.spec
        return instance.spec is not None and (before is None or spec_key(before) != spec_key(instance.spec))

    def use(self, value: _Value, spec: PartitionSpec | None) -> None:
        if spec is not None:
            for mark in value.marks:
                self.instances[mark].uses.append((spec, self.backward))

    def results(self, index: int, role: str, slot: int, position: int = 0) -> PartitionSpec | None:
        layouts = self.layouts.get((index, role, slot))
        specs = () if layouts is None else layouts.results[position]
        return specs[-1] if specs else None

    def body(self, program: Jaxpr, nodes: list[_Node], operands: Sequence[_Value]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(program.invars, operands, strict=True))

        def value_of(var: Any) -> _Value:
            return _Value() if isinstance(var, Literal) else values.get(var, _Value())

        for node in nodes:
            inputs = [value_of(var) for var in node.equation.invars]
            values.update(zip(node.equation.outvars, self.equation(node, inputs), strict=True))
        return [value_of(var) for var in program.outvars]

    def equation(self, node: _Node, inputs: list[_Value]) -> list[_Value]:
        # Names of what computes derivatives stand at the outermost equation only.
        around, self.backward = self.backward, self.backward or is_backward(node.equation)
        results = self.results_of(node, inputs)
        self.backward = around
        return results

    def results_of(self, node: _Node, inputs: list[_Value]) -> list[_Value]:
        equation, index = node.equation, node.index
        mark = mark_of(equation)
        if mark is not None:
            (value,) = inputs
            self.instances.append(_Instance(mark, equation, value, self.backward))
            return [attrs.evolve(value, marks=(*value.marks, len(self.instances) - 1))]
        call, loop = InlinedCall.of(equation), Loop.of(equation)
        if call is not None:
            return self.body(*node.bodies[0], [inputs[position] for position in call.operands])
        if loop is not None:
            return self.loop(loop, node, inputs)
        if is_cond(equation):
            return self.cond(node, inputs)
        layouts = self.layouts.get((index, "compute", 0))
        for position, value in enumerate(inputs):
            moves = () if layouts is None else layouts.operands[position]
            self.use(value, moves[-1] if moves else value.spec)
        has_matmul = equation.primitive.name in _PRODUCTS
        count = len(equation.outvars)
        return [_Value(self.results(index, "compute", 0, each), (), has_matmul) for each in range(count)]

    def enter(self, index: int, role: str, inputs: Sequence[_Value], first_slot: int) -> list[_Value]:
        specs = [self.results(index, role, slot) for slot in range(first_slot, first_slot + len(inputs))]
        for value, spec in zip(inputs, specs, strict=True):
            self.use(value, spec)
        return [_Value(spec) for spec in specs]

    def loop(self, loop: Loop, node: _Node, inputs: list[_Value]) -> list[_Value]:
        index, count = node.index, len(node.equation.outvars)
        tested = self.enter(index, "enter", inputs[loop.test_consts], 0)
        consts = self.enter(index, "enter", inputs[loop.consts], len(tested))
        carry = self.enter(index, "join", inputs[loop.carry], 0)
        pieces = self.enter(index, "enter", inputs[loop.pieces], len(consts))
        entering = [attrs.evolve(value, enters=True) for value in (*consts, *pieces)]
        returned = self.body(*node.bodies[0], [*entering[: len(consts)], *carry, *entering[len(consts) :]])
        for slot, value in enumerate(returned[: len(carry)]):
            self.use(value, self.results(index, "join", slot))
        stacked = [self.results(index, "leave", slot) for slot in range(count - len(carry))]
        for value, spec in zip(returned[len(carry) :], stacked, strict=True):
            self.use(value, None if spec is None else PartitionSpec(*tuple(spec)[1:]))
        if loop.test is not None:
            self.body(*node.bodies[1], [*tested, *carry])
        return [_Value(self.results(index, "exit", slot)) for slot in range(len(carry))] + [*map(_Value, stacked)]

    def cond(self, node: _Node, inputs: list[_Value]) -> list[_Value]:
        index, count = node.index, len(inputs) - 1
        specs = [self.results(index, "join", slot) for slot in range(len(node.equation.outvars))]
        for branch, (program, inner) in enumerate(node.bodies):
            for value, spec in zip(
                self.body(program, inner, self.enter(index, "enter", inputs[1:], branch * count)), specs, strict=True
            ):
                self.use(value, spec)
        return [*map(_Value, specs)]
