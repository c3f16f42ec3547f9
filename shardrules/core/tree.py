"""From a pytree to its leaves, in one walk that looks at each distinct subtree once.

A model repeats itself: 126 equal layers, or 256 equal experts in each of 58 layers. Where rules promise not to read
the index of a layer, one look is enough for equal siblings. So the walk goes down the tree beside its treedef, and
before it enters the child of a list it checks whether it has walked a sibling of equal structure, shapes and dtypes
already. The result is a `Survey`: the *kinds* of leaves (one for each distinct path template, shape and dtype), the
kind of each leaf, and a small graph from which every path can be spelled out later.
"""

import array
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import (
    box_type,
    is_named_array,
    is_variable,
    opaque_types,
    refuse_cycles,
    refuse_opaque,
    unboxed,
    variable_axes,
    variable_types,
)
from shardrules.core.errors import ConfigError, PlanError, TreeError
from shardrules.core.finding import common_path, mark_indices
from shardrules.core.leaf import Leaf
from shardrules.core.spec import device_dtype

ReadsIndex: TypeAlias = Literal["no", "width", "value"]
"""The part of a list index in a path that a rule reads: nothing, how many digits it has, or the index itself."""

PathStyle: TypeAlias = Literal["attr", "index"]
"""The form of fields of named tuples in paths: by name (`0/mu/w`) or by position (`0/1/w`)."""

_READS: tuple[ReadsIndex, ...] = ("no", "width", "value")
_STYLES: tuple[PathStyle, ...] = get_args(PathStyle)
_registry = jtu.default_registry
_get_sharding = operator.attrgetter("sharding")
_NOT_NUMBERS = (np.void, np.object_, np.character, np.datetime64, np.timedelta64, str)
"""The types of arrays that JAX cannot hold. `float0`, the type of gradients of integers, is a `np.void`."""

_NOT_ARRAY = 0
"""The code of leaves that are not arrays; the others are indices of `(shape, dtype, axes)`."""

_STATIC = -1
"""The kind of leaves that are not arrays: an index that no kind has."""


@final
class _BoxFoundError(Exception):
    """The tree has a flax box: it must be flattened again with boxes as leaves."""


_Node: TypeAlias = tuple[Sequence[str], Sequence[Any]]
"""A container: the text of each key, and below it another node, the index of a kind, or `_STATIC`."""


@final
@attrs.frozen(eq=False)
class Survey:
    """The kinds of leaves in a tree, and what it takes to build it again.

    ```python
    from shardrules.core.tree import survey

    layers = survey({"layers": [{"w": jnp.ones((8, 4))} for _ in range(3)]}, None, reads_index="no")
    assert [leaf.path for leaf in layers.kinds] == ["layers/0/w"]
    assert layers.paths() == ("layers/0/w", "layers/1/w", "layers/2/w")
    ```
    """

    kinds: tuple[Leaf, ...]
    """One leaf for each kind, with the path of the first leaf of the kind."""
    kind_of: Sequence[int]
    """For each leaf of the tree, in order, the index of its kind, or -1 for what is not an array."""
    treedef: Any
    """The structure of the tree, with boxes as leaves; `None` for a plan from JSON without its tree."""
    carried: tuple[tuple[int, Any], ...]
    """Position and value of every leaf that is neither array nor number."""
    numbers: tuple[tuple[int, Any], ...]
    """Position and value of every Python number."""
    root: Any
    """The graph that spells out paths."""
    mesh: AnyMesh | None = None
    reads_index: ReadsIndex = "value"
    has_slashes: bool = False
    """A key has a slash or is empty, so that two leaves may have the same path."""
    path_style: PathStyle = "attr"

    def paths(self) -> tuple[str, ...]:
        """Returns the path of every array of the tree, in order."""
        return tuple(path for path, kind in _spell(self.root, "") if kind != _STATIC)

    def in_attr_style(self) -> "Survey":
        """Returns the survey whose paths name the fields of named tuples; a `TreeError` if that needs a tree."""
        if self.path_style == "attr":
            return self
        if self.treedef is None:
            raise TreeError(
                "these paths have the fields of named tuples by position, and their names need the tree: read the plan "
                "with ShardingPlan.from_json(text, tree)"
            )
        return survey(self.structs(self.kinds, None), None)

    def kind_attr_paths(self) -> tuple[str, ...]:
        """Returns the path of the first leaf of each kind, the fields of named tuples by name."""
        if self.path_style == "attr":
            return tuple([leaf.path for leaf in self.kinds])
        first: dict[int, str] = {}
        # Paths are those of arrays alone, in the order of the tree, so the first of a kind is the path of its first
        # leaf.
        arrays = (kind for kind in self.kind_of if kind != _STATIC)
        for kind, path in zip(arrays, self.in_attr_style().paths(), strict=True):
            first.setdefault(kind, path)
        return tuple([first[kind] for kind in range(len(self.kinds))])

    def templates(self) -> tuple[str, ...]:
        """Returns the path of each kind, with `*` for every index in which its leaves differ."""
        segments = _template_segments(self.root, {})
        return tuple("/".join(segments[kind]) for kind in range(len(self.kinds)))

    def unflatten(self, values: Sequence[Any], number: Any) -> Any:
        """Returns a tree of this structure, with one of `values` for each array by kind, and `number` for numbers.

        Callables and the like stay what they were. A plan from JSON without its tree raises a `PlanError`.
        """
        if self.treedef is None:
            raise PlanError(
                "this plan was read from JSON without its tree: read it with ShardingPlan.from_json(text, tree), or "
                "use plan.as_rule().plan(tree, mesh)"
            )
        table = [*values, number]  # index -1 is for leaves that are not arrays
        result = list(map(table.__getitem__, self.kind_of))
        for position, value in self.carried:
            result[position] = value
        return jtu.tree_unflatten(self.treedef, result)

    def structs(self, leaves: Sequence[Leaf], mesh: AnyMesh | None) -> Any:
        """Returns a tree of this structure, with a `ShapeDtypeStruct` on `mesh` for each array; `leaves` are kinds."""
        sharding = NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh | AbstractMesh) else None
        shapes = [jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype), sharding=sharding) for leaf in leaves]
        result: list[Any] = [None if kind == _STATIC else shapes[kind] for kind in self.kind_of]
        # Rules of users may expect numbers and callables where the tree has them.
        for position, value in (*self.carried, *self.numbers):
            result[position] = value
        return jtu.tree_unflatten(self.treedef, result)


def _spell(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """The path of every leaf below a node, with its kind."""
    if isinstance(node, int):
        yield path, node
        return
    for key, child in zip(*node, strict=True):
        yield from _spell(child, f"{path}/{key}" if path else key)


def _template_segments(node: Any, cache: dict[int, dict[int, tuple[str, ...]]]) -> dict[int, tuple[str, ...]]:
    """The segments of the path of each kind below a node. Each node of the graph is looked at once."""
    if isinstance(node, int):
        return {node: ()}
    if id(node) in cache:
        return cache[id(node)]
    # Equal siblings share one child: its key is what their keys have in common.
    children: dict[int, tuple[str, Any]] = {}
    for key, child in zip(*node, strict=True):
        child_id = child if isinstance(child, int) else id(child)
        children[child_id] = (common_path(children[child_id][0], key) if child_id in children else key, child)
    segments: dict[int, tuple[str, ...]] = {}
    for key, child in children.values():
        for kind, tail in _template_segments(child, cache).items():
            path, other = (*key.split("/"), *tail), segments.get(kind)
            if other is not None:  # the kind is below another child as well
                path = tuple(a if a == b else "*" for a, b in zip(path, other, strict=False))
            segments[kind] = path
    cache[id(node)] = segments
    return segments


def widest(reads: Iterable[ReadsIndex]) -> ReadsIndex:
    """Returns what several rules or patterns together read of list indices; `"no"` without any."""
    return _READS[max(map(_READS.index, reads), default=0)]


def array_kind(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Returns shape and dtype of what has both and what JAX can hold; `None` for numbers, callables and the rest."""
    if isinstance(leaf, type):  # a scalar type such as np.float32 has both, as descriptors
        return None
    try:
        shape, dtype = leaf.shape, leaf.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = np.dtype(dtype)
            if issubclass(dtype.type, _NOT_NUMBERS):
                return None
        return tuple(map(int, shape)), dtype
    except (AttributeError, TypeError):
        return None


def _classify(leaves: list[Any], box: type | None) -> tuple[list[int], list[Any], list[tuple[int, Any]]]:
    """A code for each leaf, the shape, dtype and axes of each code, and the leaves that are not arrays."""
    codes: dict[Hashable, int] = {}
    code_arrays: list[Any] = [None]
    leaf_codes: list[int] = []
    others: list[tuple[int, Any]] = []
    for position, leaf in enumerate(leaves):
        # The usual case first, and fast: an array whose shape and dtype are known by now.
        try:
            key = (leaf.shape, leaf.dtype)
            code = codes.get(key)
        except (AttributeError, TypeError):
            key = code = None
        if code is None:
            value, axes = (leaf, None) if box is None else unboxed(leaf, box)
            kind = array_kind(value)
            if kind is None:
                others.append((position, leaf))
                code = _NOT_ARRAY
            else:
                # Libraries write one dtype in several ways, so several keys may have the same code.
                array_key = kind if axes is None else (*kind, axes)
                code = codes.setdefault(array_key, len(code_arrays))
                if code == len(code_arrays):
                    code_arrays.append(array_key)
                if key is not None:
                    codes[key] = code
        leaf_codes.append(code)
    return leaf_codes, code_arrays, others


def _mesh_of(leaves: list[Any], box: type | None) -> AnyMesh | None:
    """The mesh that the arrays are on; `None` if they are on none, or on several."""
    values = leaves if box is None else [unboxed(leaf, box)[0] for leaf in leaves]
    # Arrays and shapes all have one, and are asked at the speed of C; many other kinds of leaves have none.
    try:
        shardings = list(map(_get_sharding, values))
    except AttributeError:
        shardings = [getattr(value, "sharding", None) for value in values]
    mesh: AnyMesh | None = None
    for sharding in filter(None, shardings):
        # Nearly all arrays share one mesh object, so identity settles most of them.
        if not isinstance(sharding, NamedSharding) or sharding.mesh is mesh:
            continue
        if mesh is not None and sharding.mesh != mesh:
            return None
        mesh = sharding.mesh
    return mesh


def survey(
    tree: Any,
    mesh: AnyMesh | None,
    *,
    in_force: AnyMesh | None = None,
    reads_index: ReadsIndex = "value",
    path_style: PathStyle = "attr",
) -> Survey:
    """Returns the kinds of leaves in `tree`. Flax boxes count as leaves, with their names as logical axes.

    Every leaf gets `mesh`; without one, the mesh that the arrays are on, or else `in_force`. The less rules read of
    list indices (`reads_index`), the more leaves are of one kind.
    """
    if path_style not in _STYLES:
        raise ConfigError(f"path_style must be one of {', '.join(map(repr, _STYLES))}; got {path_style!r}")
    refuse_cycles(tree)
    try:
        return _survey_leaves(tree, mesh, in_force, reads_index, path_style, None)
    except _BoxFoundError:
        # Boxes are rare, and looking for them makes flattening slow: it happens again only for trees that have some.
        return _survey_leaves(tree, mesh, in_force, reads_index, path_style, box_type())


def _survey_leaves(
    tree: Any,
    mesh: AnyMesh | None,
    in_force: AnyMesh | None,
    reads_index: ReadsIndex,
    path_style: PathStyle,
    box: type | None,
) -> Survey:
    flat, treedef = jtu.tree_flatten(tree, is_leaf=None if box is None else lambda node: isinstance(node, box))
    codes, code_arrays, others = _classify(flat, box)
    if mesh is None:
        leaf_mesh = _mesh_of(flat, box)
        mesh = in_force if leaf_mesh is None else leaf_mesh
    walker = _Walker(codes, code_arrays, mesh, reads_index, path_style, box_type() if box is None else None)
    # A tree that is a single array has no container to walk.
    if treedef.num_nodes > 1:
        root: Any = walker.walk(tree, treedef, 0, "", "")
    else:
        root = walker.kind_at(0, "", "") if flat else ((), ())
    types = opaque_types()
    if types and any(issubclass(cls, types) for cls in set(map(type, flat))):  # spelling out paths is slow
        refuse_opaque(zip([path for path, _ in _spell(root, "")], flat, strict=True))
    numbers = tuple((position, leaf) for position, leaf in others if isinstance(leaf, int | float | complex))
    carried = tuple((position, leaf) for position, leaf in others if not isinstance(leaf, int | float | complex))
    kinds = tuple(walker.kinds)
    return Survey(
        kinds, walker.kind_of, treedef, carried, numbers, root, mesh, reads_index, walker.has_slashes, path_style
    )


@final
@attrs.define(eq=False)
class _Walker:
    """A walk down a tree, and the kinds that it has met so far."""

    codes: list[int]
    code_arrays: list[Any]
    mesh: AnyMesh | None
    reads_index: ReadsIndex
    path_style: PathStyle
    box_type: type | None  # the tree was flattened without looking for boxes, so meeting one is an error
    has_slashes: bool = False
    kinds: list[Leaf] = attrs.field(factory=list)
    kind_indices: dict[tuple[Any, ...], int] = attrs.field(factory=dict)
    kind_of: list[int] = attrs.field(default=attrs.Factory(lambda self: [_STATIC] * len(self.codes), takes_self=True))
    packed_codes: Any = attrs.field(default=attrs.Factory(lambda self: array.array("I", self.codes), takes_self=True))
    variable_types: tuple[type, ...] = attrs.field(factory=variable_types)

    def kind_at(self, position: int, path: str, template: str, variable: Any = None) -> int:
        """Returns the index of the kind of the leaf at `position`, which may be the array of a variable."""
        code = self.codes[position]
        if code == _NOT_ARRAY:
            return _STATIC
        axes = None if variable is None else variable_axes(variable, len(self.code_arrays[code][0]))
        key = (template, code, axes)
        kind_index = self.kind_indices.get(key)
        if kind_index is None:
            self.kind_indices[key] = kind_index = len(self.kinds)
            shape, dtype, *box_axes = self.code_arrays[code]
            self.kinds.append(Leaf(path, shape, dtype, self.mesh, None, box_axes[0] if box_axes else axes))
        self.kind_of[position] = kind_index
        return kind_index

    def walk(self, node: Any, structure: Any, start: int, path: str, template: str) -> _Node | int:
        """Returns the graph below `node`, whose leaves begin at position `start`."""
        if self.box_type is not None and isinstance(node, self.box_type):
            raise _BoxFoundError
        # Most programs have no variables of nnx, and then no container is asked for one.
        of_nnx = self.variable_types and issubclass(type(node), self.variable_types)
        if of_nnx or (is_named_array(node) and structure.num_leaves):
            child, part = _registry.flatten_one_level(node)[0][0], structure.children()[0]
            if part.num_nodes == 1:
                return self.kind_at(start, path, template, node)
            return self.walk(child, part, start, path, template)
        names, children = self.open(node, structure)
        path, template = (f"{path}/", f"{template}/") if path else ("", "")
        keys: list[str] = []
        nodes: list[Any] = []
        walked: dict[Hashable, tuple[int, Any]] = {}
        for name, child, part in zip(names, children, structure.children(), strict=True):
            count = part.num_leaves
            # Subtrees without leaves have no paths, and JAX does not flatten them.
            if not count:
                continue
            if not name or "/" in name:
                self.has_slashes = True
            sibling_key = sibling = None
            if self.reads_index == "value" or not (name.isdecimal() and name.isascii()):
                mark = name.replace("#", "#~") if "#" in name else name  # no name may look like the mark of an index
                if "." in name and "/" not in name and self.reads_index != "value":
                    mark = mark_indices(mark, with_width=self.reads_index == "width")
            else:
                # With the codes of its leaves as bytes, comparing two siblings of a thousand leaves is one comparison.
                mark = "#" if self.reads_index == "no" else "#" * len(name)
                sibling_key = (mark, part, self.packed_codes[start : start + count].tobytes())
                try:
                    sibling = walked.get(sibling_key)
                except (TypeError, ValueError):  # a module's static field without a hash, or with an unusual equality
                    sibling_key = None
            if sibling is not None:
                first, child_node = sibling
                self.kind_of[start : start + count] = self.kind_of[first : first + count]
            else:
                if part.num_nodes == 1:  # no method of its own: in a deep tree every call on the way down counts
                    child_node = self.kind_at(start, path + name, template + mark)
                else:
                    child_node = self.walk(child, part, start, path + name, template + mark)
                if sibling_key is not None:
                    walked[sibling_key] = start, child_node
            keys.append(name)
            nodes.append(child_node)
            start += count
        return keys, nodes

    def open(self, node: Any, structure: Any) -> tuple[Sequence[str], Sequence[Any]]:
        """Returns the text of the keys of a container, and its children, in the order in which JAX flattens them."""
        node_type = type(node)
        # JAX's registry knows lists, tuples and dictionaries as well, but makes a key object for every child.
        if node_type is list or node_type is tuple:
            return list(map(str, range(len(node)))), node
        if node_type is dict:
            keys = structure.node_data()[1]
            return list(map(str, keys)), [node[key] for key in keys]
        if isinstance(node, tuple) and _registry.flatten_one_level(node)[1] is node_type:
            # A named tuple. flatten_one_level_with_keys of jaxlib 0.10.2 gives all its fields the name of the first.
            fields: Sequence[str] = getattr(node_type, "_fields")  # noqa: B009  (JAX calls a tuple with it a named tuple)
            return fields if self.path_style == "attr" else list(map(str, range(len(node)))), node
        # Modules, dataclasses and other registered containers.
        pairs = _registry.flatten_one_level_with_keys(node)[0]
        return [jtu.keystr((key,), simple=True) for key, _ in pairs], [child for _, child in pairs]


def leaf_paths(tree: Any, path_style: PathStyle = "attr") -> tuple[str, ...]:
    """Returns the path of every leaf of `tree`, in the order in which JAX flattens it, numbers and callables included.

    With the `path_style` `"attr"` paths name the fields of named tuples (`0/mu/w`), with `"index"` they count them
    (`0/1/w`).

    ```python
    assert sr.leaf_paths({"a": [1.0, {"b": 2.0}]}) == ("a/0", "a/1/b")
    ```
    """
    return tuple(path for path, _ in _spell(survey(tree, None, path_style=path_style).root, ""))


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Returns path and value of every leaf of `tree`, where `is_leaf` says which nodes are leaves, too."""
    named: list[tuple[tuple[Any, ...], Any]] = []

    def is_wrapper(node: Any) -> bool:
        return is_variable(node) or is_named_array(node)

    ends = is_wrapper if is_leaf is None else lambda node: is_leaf(node) or is_wrapper(node)
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=ends)[0]:
        if is_wrapper(node):  # the first key below it is the library's own, and no part of a path
            inside = jtu.tree_flatten_with_path(node, is_leaf=is_leaf)[0]
            named += [((*path, *keys[1:]), leaf) for keys, leaf in inside]
        else:
            named.append((path, node))
    return [(jtu.keystr(path, simple=True, separator="/"), leaf) for path, leaf in named]


def flatten_specs(specs: Any, treedef: Any, what: str) -> list[Any]:
    """Returns the leaves of a tree of specs that must have the structure `treedef`; messages call it `what`."""
    try:
        return treedef.flatten_up_to(specs)
    except (ValueError, TypeError) as error:
        raise TreeError(
            f"{what} does not have the structure of the tree: {error}. Each leaf of the tree needs one PartitionSpec "
            "(or None, for no opinion)."
        ) from error


def prefix_parts(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], caller: str, what: str = "values"
) -> list[tuple[str, Any, Any]]:
    """Returns the path and the value of each leaf of a prefix of `tree`, with the subtree of `tree` that it covers.

    A `prefix` that does not fit raises a `TreeError`, which names `caller` and calls its leaves `what`.
    """
    named, structure = named_leaves(prefix, is_leaf), jtu.tree_structure(prefix, is_leaf=is_leaf)
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise TreeError(
            f"{caller}: the {what} do not have the structure of the tree, or of a prefix of it: {error}"
        ) from error
    return [(path, value, part) for (path, value), part in zip(named, parts, strict=True)]


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], caller: str, what: str = "values") -> list[Any]:
    """Returns one value for each leaf of `tree`, from a tree of the same structure or a prefix of it.

    `is_leaf` says which nodes of `prefix` are values: specs, say, or `None`. For `caller` and `what` see
    `prefix_parts`.
    """
    values, structure = jtu.tree_flatten(prefix, is_leaf=is_leaf)
    if structure == jtu.tree_structure(tree):  # the usual case, and the only fast one for many leaves
        return values
    parts = prefix_parts(prefix, tree, is_leaf, caller, what)
    return [value for _, value, part in parts for _ in jtu.tree_leaves(part)]
