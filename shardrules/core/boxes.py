"""Boxes that libraries put around arrays: those of flax linen, the variables of nnx, and the named arrays of haliax.

All carry names for the dimensions of the array, and none is a step of the path to it. A box is a leaf of the tree, as
flax has it. Variables and named arrays are containers, so that specs and shardings come in them. Nothing here imports
flax or haliax: a process that has not imported flax has no tree of it, and named arrays are known by their fields.

Objects of nnx are references. A variable may be in a tree twice, and a call may write to those of its arguments; JAX's
flattened trees know nothing of either, so it is kept beside them.
"""

import collections
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, final

import attrs
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.errors import TreeError, shortened
from shardrules.core.leaf import LogicalName

_registry = jtu.default_registry

_NAMES = ("out_sharding", "sharding_names", "sharding")
"""The names of the metadata that names dimensions, those of newer versions of flax first."""


def box_type() -> type | None:
    """Returns the base class of flax's boxes; `None` if this process has not imported them, so that no tree has one."""
    meta = sys.modules.get("flax.core.meta")
    return None if meta is None else meta.AxisMetadata


def unboxed(leaf: Any, box: type) -> tuple[Any, tuple[LogicalName, ...] | None]:
    """Returns what is in a box, and the names that it has; any other leaf as it is."""
    names: tuple[LogicalName, ...] | None = None
    while isinstance(leaf, box):
        box_names = getattr(leaf, "names", None)  # boxes of other libraries may have no names
        if box_names is not None:
            names = _as_names(box_names)
        # not unbox(): where a mesh is in force, that places the array
        leaf = _registry.flatten_one_level(leaf)[0][0]
    return leaf, names


def variable_types() -> tuple[type, ...]:
    """Returns the classes of nnx whose instances are containers of one array; none where nnx is not imported."""
    return _types("flax.nnx.variablelib", ("Variable", "VariableState"))


def parameter_type() -> tuple[type, ...]:
    """Returns the class of nnx whose variables are parameters; none where nnx is not imported."""
    return _types("flax.nnx.variablelib", ("Param",))


def is_variable(node: Any) -> bool:
    """Returns whether a node of a tree is a variable of nnx."""
    # By type: isinstance asks the metaclass of flax, which takes variables of other kinds for one.
    return issubclass(type(node), variable_types())


@functools.lru_cache(1024)
def _has_array_and_axes(cls: type) -> bool:
    return getattr(cls, "__dataclass_fields__", {}).keys() == {"array", "axes"}


def is_named_array(node: Any) -> bool:
    """Returns whether a node is a dataclass of an array and its named axes, as a `haliax.NamedArray` is."""
    if not _has_array_and_axes(type(node)) or not isinstance(node.axes, tuple):
        return False
    level = _registry.flatten_one_level(node)  # the axes are static: the array is the only child
    return bool(
        level and len(level[0]) == 1 and all(isinstance(getattr(axis, "name", None), str) for axis in node.axes)
    )


def _of_types(types: tuple[type, ...]) -> Callable[[Any], bool]:
    """Returns a function that says whether a node is of these types. A tree has many nodes of few types."""
    by_type: dict[type, bool] = {}

    def test(node: Any) -> bool:
        cls = type(node)
        if cls not in by_type:
            by_type[cls] = issubclass(cls, types)
        return by_type[cls]

    return test


def opaque_types() -> tuple[type, ...]:
    """Returns the classes of nnx whose instances hold arrays that JAX sees only where the class is a pytree.

    Modules of flax before 0.11 are none, nor are classes with `pytree=False` and variables with `hijax=True`.
    """
    if "flax.nnx" not in sys.modules:  # every plan and every call of a compiled function asks
        return ()
    return (
        *_types("flax.nnx.variablelib", ("Variable", "HijaxVariable")),
        *_types("flax.nnx.object", ("Object",)),
        *_types("flax.nnx.pytreelib", ("Pytree",)),
    )


def _types(module_name: str, names: tuple[str, ...]) -> tuple[type, ...]:
    module = sys.modules.get(module_name)
    if module is None:
        return ()
    classes = [getattr(module, name, None) for name in names]  # each version of flax has some of them
    return tuple([cls for cls in dict.fromkeys(classes) if isinstance(cls, type)])


def refuse_opaque(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises where a leaf is an object of nnx, whose arrays would be skipped; `leaves` are paths and values."""
    types = opaque_types()
    opaque = [(path, type(leaf).__name__) for path, leaf in leaves if issubclass(type(leaf), types)]
    if opaque:
        names = ", ".join(shortened([f"{path or 'the tree'} ({name})" for path, name in opaque]))
        raise TreeError(
            f"JAX sees no arrays in these objects of flax nnx: {names}. They are not pytrees in this version of flax, "
            "or were made with pytree=False or hijax=True. Pass their state: graph, state = nnx.split(model)"
        )


def _holds_no_nodes() -> Callable[[Any], bool]:
    """Returns a function that says whether a value is a leaf or a variable."""
    variables = variable_types()
    by_type: dict[type, bool] = {type(None): True}

    def test(value: Any) -> bool:
        cls = type(value)
        if cls not in by_type:
            by_type[cls] = issubclass(cls, variables) or _registry.flatten_one_level(value) is None
        return by_type[cls]

    return test


def refuse_cycles(tree: Any) -> None:
    """Raises where an object of nnx holds itself: flattening it breaks the stack for good, so it cannot be caught."""
    object_types = opaque_types()
    if not object_types:
        return
    is_object, is_leaf = _of_types(object_types), _holds_no_nodes()
    ended: set[int] = set()  # objects of which all parts were seen
    around: dict[int, Any] = {}  # the objects that hold the current one
    nodes: list[Any] = [node for node in jtu.tree_leaves(tree, is_leaf=is_object) if is_object(node)]
    while nodes:
        node = nodes[-1]
        if id(node) in ended or id(node) in around:
            nodes.pop()
            around.pop(id(node), None)
            ended.add(id(node))
            continue
        around[id(node)] = node
        for part in _parts(node, is_object, is_leaf):
            if id(part) in around:
                raise TreeError(
                    f"an object of flax nnx ({type(part).__name__}) holds itself, through "
                    f"{type(node).__name__}, and JAX has no trees with cycles. Pass its state: "
                    "graph, state = nnx.split(model)"
                )
            if id(part) not in ended:
                nodes.append(part)


def _parts(node: Any, is_object: Callable[[Any], bool], is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The objects of nnx right inside of one; variables hold none."""
    # most layers hold variables and options alone, and to flatten all of them takes as long as the rest of a call
    if is_leaf(node) or all(is_leaf(value) for name, value in vars(node).items() if not name.startswith("_pytree__")):
        return []
    level = _registry.flatten_one_level(node)
    return [] if level is None else [part for part in jtu.tree_leaves(level[0], is_leaf=is_object) if is_object(part)]


def variable_axes(variable: Any, ndim: int) -> tuple[LogicalName, ...] | None:
    """Returns the names that a variable or a named array has for its dimensions, `None` if it has none."""
    if is_named_array(variable):
        return tuple([axis.name for axis in variable.axes])
    metadata = variable.get_metadata()
    names = next((metadata[key] for key in _NAMES if metadata.get(key)), None)
    if isinstance(names, NamedSharding):
        names = names.spec
    if isinstance(names, PartitionSpec):  # it may be shorter than the array has dimensions
        names = (*names.partitions, *(None,) * (ndim - len(names.partitions)))
    # Layouts of arrays on devices name none.
    return _as_names(names) if isinstance(names, tuple | list) else None


def _as_names(names: Any) -> tuple[LogicalName, ...]:
    return tuple([tuple(name) if isinstance(name, list) else name for name in names])


def shared_leaves(tree: Any) -> dict[int, int]:
    """Returns the index of each leaf whose variable occurred before, with the index where it did so first."""
    types = variable_types()
    if not types:
        return {}
    shared: dict[int, int] = {}
    first_starts: dict[int, int] = {}
    start, is_variable = 0, _of_types(types)
    for node in jtu.tree_leaves(tree, is_leaf=is_variable):
        if not is_variable(node):
            start += 1
            continue
        # A variable may hold several leaves, or none: each is tied to the leaf at the same offset of the first
        # occurrence.
        count = len(jtu.tree_leaves(node))
        first_start = first_starts.setdefault(id(node), start)
        if first_start != start:
            shared.update((start + offset, first_start + offset) for offset in range(count))
        start += count
    return shared


def share_variables(tree: Any, shared: Mapping[int, int]) -> Any:
    """Returns `tree` with the variables of `shared`, the result of `shared_leaves`, where they occurred before."""
    if not shared:
        return tree
    nodes, treedef = jtu.tree_flatten(tree, is_leaf=_of_types(variable_types()))
    by_start: dict[int, Any] = {}
    start = 0
    for index, node in enumerate(nodes):
        count = len(jtu.tree_leaves(node))
        if count:
            nodes[index] = by_start.setdefault(shared.get(start, start), node)
        start += count
    return treedef.unflatten(nodes)


def plain_trees(tree: Any) -> Any:
    """Returns `tree` with nested dictionaries in place of what nnx has, as `nnx.to_pure_dict` makes them of states."""
    types = (*opaque_types(), *variable_types(), *_types("flax.nnx.statelib", ("State",)))
    is_of_nnx = _of_types(types)

    def plain(node: Any) -> Any:
        if is_variable(node):
            return plain_trees(_Value(node).get())
        if not is_of_nnx(node):
            return node
        pairs = _registry.flatten_one_level_with_keys(node)[0]
        return {jtu.keystr((key,), simple=True): plain_trees(child) for key, child in pairs}

    return jax.tree.map(plain, tree, is_leaf=is_of_nnx) if types else tree


def objects_in(arguments: Any) -> list[Any]:
    """Returns the objects of nnx in the arguments of a call, which it may write to; not objects inside of others."""
    types = opaque_types()
    if not types:
        return []
    is_object = _of_types(types)
    nodes = jtu.tree_leaves(arguments, is_leaf=_of_types((*types, *_types("flax.nnx.statelib", ("State",)))))
    return [node for node in nodes if is_object(node)]


def _variable_nodes(objects: Sequence[Any]) -> tuple[list[Any], bool]:
    """The variables of some objects, twice where they are there twice, and whether the objects hold more than them."""
    is_variable = _of_types(variable_types())
    nodes = jtu.tree_leaves(objects, is_leaf=is_variable)
    variables = [node for node in nodes if is_variable(node)]
    return variables, len(variables) < len(nodes)


def _of_nnx() -> Callable[[Any], bool]:
    return _of_types((*opaque_types(), *variable_types()))


@final
@attrs.frozen(eq=False)
class _Attribute:
    """An attribute of an object of nnx that holds leaves outside of variables and of other objects."""

    owner: Any
    name: str

    def get(self) -> list[Any]:
        is_other = _of_nnx()
        nodes = jtu.tree_leaves(vars(self.owner)[self.name], is_leaf=is_other)
        return [node for node in nodes if not is_other(node)]

    def set(self, leaves: list[Any]) -> None:
        is_other = _of_nnx()
        nodes, treedef = jtu.tree_flatten(vars(self.owner)[self.name], is_leaf=is_other)
        rest = iter(leaves)
        # as set_raw_value of variables: flax allows neither outside of the trace that made the object
        vars(self.owner)[self.name] = treedef.unflatten([node if is_other(node) else next(rest) for node in nodes])


@final
@attrs.frozen(eq=False)
class _Value:
    """The value of a variable of nnx."""

    owner: Any

    def get(self) -> Any:
        return _registry.flatten_one_level(self.owner)[0][0]

    def set(self, value: Any) -> None:
        self.owner.set_raw_value(value)


def _attributes(tree: Any) -> Iterator[_Attribute]:
    """Yields the attributes of objects that hold leaves, in the order of the tree: copies of it have the same order."""
    is_of_nnx = _of_nnx()
    for node in jtu.tree_leaves(tree, is_leaf=is_of_nnx):
        if not is_of_nnx(node) or is_variable(node):
            continue
        pairs = (_registry.flatten_one_level_with_keys(node) or ((),))[0]
        for key, child in pairs:
            attribute = _Attribute(node, jtu.keystr((key,), simple=True))
            if attribute.get():
                yield attribute
            # An object inside another one owns its attributes itself: `get` above leaves its leaves out.
            yield from _attributes(child)


def _slots(objects: Sequence[Any]) -> list[_Value | _Attribute]:
    """The parts that a call may write to: variables, each once, and attributes with arrays of their own."""
    variables, has_more = _variable_nodes(objects)
    values = [_Value(variable) for variable in {id(variable): variable for variable in variables}.values()]
    return [*values, *(_attributes(objects) if has_more else ())]


def _ties(objects: Sequence[Any]) -> list[int]:
    """For each variable in the objects, the index where it is first."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(id(variable), index) for index, variable in enumerate(_variable_nodes(objects)[0])]


def write_variables(
    arguments: Any, writes: Mapping[int, Any], place: Callable[[Any, Any], Any] = lambda old, new: new
) -> None:
    """Writes what `ArgumentVariables.writes` returned for a traced call to the arguments of the call itself.

    `place` returns a new array where it belongs, from the old one and the new one.
    """
    slots = _slots(objects_in(arguments)) if writes else []
    _refuse_twice(slots, writes)
    for index, value in writes.items():
        slots[index].set(jax.tree.map(place, slots[index].get(), value))


def _refuse_twice(slots: Sequence[_Value | _Attribute], writes: Iterable[int]) -> None:
    """Raises where a write is to an attribute of an object that is in the arguments twice: the trace has two of it."""
    attributes = [(id(slot.owner), slot.name) for slot in slots if isinstance(slot, _Attribute)]
    counts = collections.Counter(attributes)
    for index in writes:
        slot = slots[index]
        if isinstance(slot, _Attribute) and counts[id(slot.owner), slot.name] > 1:
            raise TreeError(
                f"the function writes to the array {slot.name!r} of an object of flax nnx "
                f"({type(slot.owner).__name__}) that is in its arguments twice. Make the array an nnx.Variable, "
                "or use nnx.jit"
            )


@final
@attrs.frozen(eq=False)
class ArgumentVariables:
    """The variables and arrays of the objects of nnx in the arguments of a call, as they are before it.

    A bare `nnx.State` is a value rather than an object: what a call writes to its variables is lost on purpose.
    """

    objects: Sequence[Any]
    structure: Any
    ties: Sequence[int]
    values: Sequence[list[Any]]

    @classmethod
    def of(cls, arguments: Any) -> Self:
        """Returns what is in `arguments` now."""
        objects = objects_in(arguments)
        values = [jtu.tree_leaves(slot.get()) for slot in _slots(objects)]
        return cls(objects, jtu.tree_structure(objects), _ties(objects), values)

    def writes(self, caller: str, gone: Sequence[Any] = ()) -> dict[int, Any]:
        """Returns the value of every variable or attribute that was written to since, by its index among all of them.

        Those with an array that will be `gone` count as written to. An object that got or lost variables, ties between
        them, or other attributes raises a `TreeError`.
        """
        if not self.objects:
            return {}
        if jtu.tree_structure(self.objects) != self.structure or _ties(self.objects) != self.ties:
            raise TreeError(
                f"{caller}: the function adds, removes or replaces attributes of the flax nnx objects in its "
                "arguments, or ties between their variables, and not only values. Such a change would be lost: return "
                "the object, or use nnx.jit"
            )
        gone_ids = set(map(id, gone))
        written: dict[int, Any] = {}
        # Arrays are immutable, so a write leaves another object in the slot: identity shows it without waiting for
        # values.
        for index, (slot, before) in enumerate(zip(_slots(self.objects), self.values, strict=True)):
            value = slot.get()
            pairs = zip(jtu.tree_leaves(value), before, strict=True)
            if any(new is not old or id(old) in gone_ids for new, old in pairs):
                written[index] = value
        return written

    def pairs(self, writes: Mapping[int, Any]) -> list[tuple[Any, Any]]:
        """Returns the leaves before and after `writes`, which this returned, in the order in which JAX flattens it."""
        return [
            pair
            for index in sorted(writes)
            for pair in zip(self.values[index], jtu.tree_leaves(writes[index]), strict=True)
        ]
