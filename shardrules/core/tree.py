"""From a pytree to its leaves, in one walk that looks at each distinct subtree once.

A model repeats itself: 126 equal layers, 256 equal experts in each of 58 of them. Where rules promise not to read the
index of a layer, equal siblings need one look together. So the walk goes down the tree beside its treedef, and before
it enters the child of a list it asks whether a sibling of equal structure, shapes and dtypes has been walked already.
What comes out is a `Survey`: the *kinds* of leaves (one for each distinct path template, shape and dtype), which kind
each leaf is of, and a small graph from which every path can be spelled out later.
"""

import array
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigError, PlanError, TreeError
from shardrules.core.finding import common_path
from shardrules.core.leaf import Leaf, LogicalName
from shardrules.core.spec import device_dtype

ReadsIndex: TypeAlias = Literal["no", "width", "value"]
"""What a rule reads of a list index in a path: nothing, how many digits it has, or the index itself."""

PathStyle: TypeAlias = Literal["attr", "index"]
"""How fields of named tuples appear in paths: by name (`0/mu/w`) or by position (`0/1/w`)."""

_READS: tuple[ReadsIndex, ...] = ("no", "width", "value")
_STYLES: tuple[PathStyle, ...] = get_args(PathStyle)
_registry = jtu.default_registry
_NOT_NUMBERS = (np.void, np.object_, np.character, np.datetime64, np.timedelta64, str)  # what JAX cannot hold
_sharding = operator.attrgetter("sharding")
_NOT_ARRAY = 0  # kind codes: 0 for what is carried through, others for (shape, dtype, axes)
_STATIC = -1


@final
class _BoxFoundError(Exception):
    """A flax box stands in the tree: it must be flattened again with boxes as leaves."""


_Node: TypeAlias = tuple[Sequence[str], Sequence[Any]]
"""A container: the text of each key, and below it another node, the number of a kind, or `_STATIC`."""


@final
@attrs.frozen(eq=False)
class Survey:
    """A tree taken apart.

    ```python
    found = survey({"layers": [{"w": jnp.ones((8, 4))} for _ in range(3)]}, None, reads_index="no")
    assert [leaf.path for leaf in found.kinds] == ["layers/0/w"]
    assert found.paths() == ("layers/0/w", "layers/1/w", "layers/2/w")
    ```
    """

    kinds: tuple[Leaf, ...]
    kind_of: Sequence[int]
    treedef: Any
    carried: tuple[tuple[int, Any], ...]
    numbers: tuple[tuple[int, Any], ...]
    root: Any
    mesh: AnyMesh | None = None
    slashed: bool = False
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
        for kind, path in zip(
            (kind for kind in self.kind_of if kind != _STATIC), self.in_attr_style().paths(), strict=True
        ):
            first.setdefault(kind, path)
        return tuple([first[kind] for kind in range(len(self.kinds))])

    def patterns(self) -> tuple[str, ...]:
        """Returns the path of each kind, with `*` for every index in which its leaves differ."""
        found = _patterns(self.root, {})
        return tuple("/".join(found[kind]) for kind in range(len(self.kinds)))

    def unflatten(self, values: Sequence[Any], number: Any) -> Any:
        """Returns a tree of this structure, with one of `values` for each array by kind, and `number` for numbers.

        Callables and the like stay what they were. A plan from JSON without its tree raises a `PlanError`.
        """
        if self.treedef is None:
            raise PlanError(
                "this plan was read from JSON without its tree: read it with ShardingPlan.from_json(text, tree), or "
                "use plan.as_rule().plan(tree, mesh)"
            )
        table = [*values, number]  # index -1 is what is no array
        result = list(map(table.__getitem__, self.kind_of))
        for position, value in self.carried:
            result[position] = value
        return jtu.tree_unflatten(self.treedef, result)

    def structs(self, leaves: Sequence[Leaf], mesh: AnyMesh | None) -> Any:
        """Returns a tree of this structure with a `ShapeDtypeStruct` for each array; the rest is as it was."""
        on = NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh | AbstractMesh) else None
        shapes = [jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype), sharding=on) for leaf in leaves]
        result: list[Any] = [None if kind == _STATIC else shapes[kind] for kind in self.kind_of]
        for position, value in (*self.carried, *self.numbers):
            result[position] = value
        return jtu.tree_unflatten(self.treedef, result)


def _spell(node: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, int):
        yield path, node
        return
    for key, child in zip(*node, strict=True):
        yield from _spell(child, f"{path}/{key}" if path else key)


def _patterns(node: Any, known: dict[int, dict[int, tuple[str, ...]]]) -> dict[int, tuple[str, ...]]:
    """The segments of the path of each kind below a node. Each node of the graph is looked at once."""
    if isinstance(node, int):
        return {node: ()}
    if id(node) in known:
        return known[id(node)]
    result: dict[int, tuple[str, ...]] = {}
    shared: dict[int, tuple[str, Any]] = {}
    for key, child in zip(*node, strict=True):
        mark = child if isinstance(child, int) else id(child)
        shared[mark] = (common_path(shared[mark][0], key) if mark in shared else key, child)
    for key, child in shared.values():
        for kind, tail in _patterns(child, known).items():
            path, other = (*key.split("/"), *tail), result.get(kind)
            result[kind] = (
                path if other is None else tuple(a if a == b else "*" for a, b in zip(path, other, strict=False))
            )
    known[id(node)] = result
    return result


def widest(reads: Iterable[ReadsIndex]) -> ReadsIndex:
    """Returns what several rules or patterns together read of list indices: as much as the one that reads most."""
    return _READS[max(map(_READS.index, reads), default=0)]


def box_type() -> type | None:
    """Returns the base class of flax's boxes, if this process has imported them; else no tree can hold one."""
    meta = sys.modules.get("flax.core.meta")
    return None if meta is None else meta.AxisMetadata


def _unboxed(leaf: Any, box: type) -> tuple[Any, tuple[LogicalName, ...] | None]:
    names: tuple[LogicalName, ...] | None = None
    while isinstance(leaf, box):
        own = getattr(leaf, "names", None)  # boxes of other kinds than flax's own may carry no names
        if own is not None:
            names = tuple([tuple(name) if isinstance(name, list) else name for name in own])
        leaf = _registry.flatten_one_level(leaf)[0][0]  # not unbox(): where a mesh is in force, that places the array
    return leaf, names


def _key_text(key: Any) -> str:
    if isinstance(key, jtu.DictKey | jtu.FlattenedIndexKey):
        return str(key.key)
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    return key.name if isinstance(key, jtu.GetAttrKey) else str(key)


def array_kind(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Returns shape and dtype of anything that has both and that JAX can hold; `None` for numbers, callables and the rest."""
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
    """Returns a code for each leaf, what each code stands for, and the leaves that are no arrays."""
    codes: dict[Hashable, int] = {}
    meanings: list[Any] = [None]
    plain: list[int] = []
    others: list[tuple[int, Any]] = []
    for position, leaf in enumerate(leaves):
        try:
            key = (leaf.shape, leaf.dtype)
            code = codes.get(key)
        except (AttributeError, TypeError):
            key = code = None
        if code is None:
            value, axes = (leaf, None) if box is None else _unboxed(leaf, box)
            kind = array_kind(value)
            if kind is None:
                others.append((position, leaf))
                code = _NOT_ARRAY
            else:
                meaning = kind if axes is None else (*kind, axes)
                code = codes.setdefault(meaning, len(meanings))
                if code == len(meanings):
                    meanings.append(meaning)
                if key is not None:
                    codes[key] = code
        plain.append(code)
    return plain, meanings, others


def _mesh_of(leaves: list[Any], box: type | None) -> AnyMesh | None:
    """Returns the mesh that the arrays are on; `None` where they are on none, or on several."""
    values = leaves if box is None else [_unboxed(leaf, box)[0] for leaf in leaves]
    try:
        shardings = list(map(_sharding, values))
    except AttributeError:  # many kinds of leaves have none
        shardings = [getattr(value, "sharding", None) for value in values]
    found: AnyMesh | None = None
    for sharding in filter(None, shardings):
        if not isinstance(sharding, NamedSharding) or sharding.mesh is found:
            continue
        if found is not None and sharding.mesh != found:
            return None
        found = sharding.mesh
    return found


def survey(
    tree: Any,
    mesh: AnyMesh | None,
    *,
    in_force: AnyMesh | None = None,
    reads_index: ReadsIndex = "value",
    path_style: PathStyle = "attr",
) -> Survey:
    """Takes a tree apart."""
    if path_style not in _STYLES:
        raise ConfigError(f"path_style must be one of {', '.join(map(repr, _STYLES))}; got {path_style!r}")
    try:
        return _survey(tree, mesh, in_force, reads_index, path_style, None)
    except _BoxFoundError:
        return _survey(tree, mesh, in_force, reads_index, path_style, box_type())


def _survey(
    tree: Any,
    mesh: AnyMesh | None,
    in_force: AnyMesh | None,
    reads_index: ReadsIndex,
    path_style: PathStyle,
    box: type | None,
) -> Survey:
    is_box: Callable[[Any], bool] | None = None if box is None else lambda node: isinstance(node, box)
    flat, treedef = jtu.tree_flatten(tree, is_leaf=is_box)
    codes, meanings, others = _classify(flat, box)
    if mesh is None:
        placed = _mesh_of(flat, box)
        mesh = in_force if placed is None else placed
    walker = _Walker(codes, meanings, mesh, reads_index, path_style, box_type() if box is None else None)
    if treedef.num_nodes > 1:
        root: Any = walker.walk(tree, treedef, 0, "", "")
    else:
        root = walker.meet(0, "", "") if flat else ((), ())
    numbers = tuple((position, leaf) for position, leaf in others if isinstance(leaf, int | float | complex))
    carried = tuple((position, leaf) for position, leaf in others if not isinstance(leaf, int | float | complex))
    return Survey(
        tuple(walker.kinds), walker.kind_of, treedef, carried, numbers, root, mesh, walker.slashed, path_style
    )


@final
@attrs.define(eq=False)
class _Walker:
    """One walk down a tree: what it has met so far."""

    codes: list[int]
    meanings: list[Any]
    mesh: AnyMesh | None
    reads_index: ReadsIndex
    path_style: PathStyle
    boxes: type | None  # must not be met: the tree was flattened without asking for them
    slashed: bool = False
    kinds: list[Leaf] = attrs.field(factory=list)
    numbers: dict[tuple[str, int], int] = attrs.field(factory=dict)
    kind_of: list[int] = attrs.field(default=attrs.Factory(lambda self: [_STATIC] * len(self.codes), takes_self=True))
    packed: Any = attrs.field(default=attrs.Factory(lambda self: array.array("I", self.codes), takes_self=True))

    def meet(self, position: int, path: str, pattern: str) -> int:
        """Returns the number of the kind of the leaf at `position`."""
        code = self.codes[position]
        if code == _NOT_ARRAY:
            return _STATIC
        key = (pattern, code)
        number = self.numbers.get(key)
        if number is None:
            self.numbers[key] = number = len(self.kinds)
            shape, dtype, *axes = self.meanings[code]
            self.kinds.append(Leaf(path, shape, dtype, self.mesh, None, axes[0] if axes else None))
        self.kind_of[position] = number
        return number

    def walk(self, node: Any, structure: Any, start: int, path: str, pattern: str) -> _Node:
        """Returns the graph below `node`, whose leaves begin at position `start`."""
        if self.boxes is not None and isinstance(node, self.boxes):
            raise _BoxFoundError
        names, children = self.open(node, structure)
        path, pattern = (f"{path}/", f"{pattern}/") if path else ("", "")
        keys: list[str] = []
        below: list[Any] = []
        seen: dict[Hashable, tuple[int, Any]] = {}
        for text, child, part in zip(names, children, structure.children(), strict=True):
            count = part.num_leaves
            if not count:
                continue
            if not text or "/" in text:
                self.slashed = True
            shared = known = None
            if self.reads_index == "value" or not (text.isdecimal() and text.isascii()):
                mark = text.replace("#", "#~") if "#" in text else text  # no name may look like the mark of an index
            else:
                mark = "#" if self.reads_index == "no" else "#" * len(text)
                shared = (mark, part, self.packed[start : start + count].tobytes())
                known = _known(seen, shared)
            if known is not None:
                first, found = known
                self.kind_of[start : start + count] = self.kind_of[first : first + count]
            else:
                if part.num_nodes == 1:  # no method of its own: in a deep tree every call on the way down counts
                    found = self.meet(start, path + text, pattern + mark)
                else:
                    found = self.walk(child, part, start, path + text, pattern + mark)
                if shared is not None:
                    _remember(seen, shared, (start, found))
            keys.append(text)
            below.append(found)
            start += count
        return keys, below

    def open(self, node: Any, structure: Any) -> tuple[Sequence[str], Sequence[Any]]:
        """Returns the text of the keys of a container, and its children, in the order in which JAX flattens them."""
        kind = type(node)
        if kind is list or kind is tuple:
            return list(map(str, range(len(node)))), node
        if kind is dict:
            own = structure.node_data()[1]
            return list(map(str, own)), [node[key] for key in own]
        if isinstance(node, tuple) and _registry.flatten_one_level(node)[1] is kind:
            # A named tuple. flatten_one_level_with_keys of jaxlib 0.10.2 gives all its fields the name of the first.
            fields: Sequence[str] = getattr(kind, "_fields")  # noqa: B009  (JAX takes tuples with it for named tuples)
            return fields if self.path_style == "attr" else list(map(str, range(len(node)))), node
        pairs = _registry.flatten_one_level_with_keys(node)[0]
        return [_key_text(key) for key, _ in pairs], [child for _, child in pairs]


def _known(seen: dict[Hashable, tuple[int, Any]], key: Hashable) -> tuple[int, Any] | None:
    try:
        return seen.get(key)
    except (TypeError, ValueError):  # a module's static field that has no hash, or no plain equality
        return None


def _remember(seen: dict[Hashable, tuple[int, Any]], key: Hashable, value: tuple[int, Any]) -> None:
    try:
        seen[key] = value
    except (TypeError, ValueError):
        return


def leaf_paths(tree: Any, path_style: PathStyle = "attr") -> tuple[str, ...]:
    """Returns the path of every leaf of `tree`, in the order in which JAX flattens it.

    **Arguments:**

    - `tree`: any pytree.
    - `path_style`: `"attr"` names the fields of named tuples (`0/mu/w`), `"index"` counts them (`0/1/w`).

    **Returns:**

    A tuple of paths, numbers and callables included.

    ```python
    assert sr.leaf_paths({"a": [1.0, {"b": 2.0}]}) == ("a/0", "a/1/b")
    ```
    """
    return tuple(path for path, _ in _spell(survey(tree, None, path_style=path_style).root, ""))


def flatten_specs(specs: Any, treedef: Any, what: str) -> list[Any]:
    """Returns the leaves of a tree of specs, after checking that it has the structure of the tree it is for."""
    try:
        return treedef.flatten_up_to(specs)
    except (ValueError, TypeError) as error:
        raise TreeError(
            f"{what} does not have the structure of the tree: {error}. There must be one PartitionSpec (or None, for "
            "no opinion) for each leaf of the tree."
        ) from error


def prefix_parts(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], caller: str, what: str = "values"
) -> list[tuple[str, Any, Any]]:
    """Returns the path and the value of each leaf of a prefix of `tree`, with the subtree of `tree` that it covers.

    A `prefix` that does not fit raises a `TreeError`, which names `caller` and calls its leaves `what`.
    """
    named, structure = jtu.tree_flatten_with_path(prefix, is_leaf=is_leaf)
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise TreeError(
            f"{caller}: the {what} do not have the structure of the tree, or of a prefix of it: {error}"
        ) from error
    return [
        (jtu.keystr(path, simple=True, separator="/"), value, part)
        for (path, value), part in zip(named, parts, strict=True)
    ]


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], caller: str, what: str = "values") -> list[Any]:
    """Returns one value for each leaf of `tree`, from a tree of the same structure or a prefix of it.

    `is_leaf` says which nodes of `prefix` are values: specs, say, or `None`. For `caller` and `what` see
    `prefix_parts`.

    ```python
    is_spec = lambda node: isinstance(node, P)
    assert spread({"a": P("data"), "b": P()}, {"a": [1, 2], "b": 3}, is_spec, "me") == [P("data"), P("data"), P()]
    ```
    """
    values, structure = jtu.tree_flatten(prefix, is_leaf=is_leaf)
    if structure == jtu.tree_structure(tree):  # the usual case, and the only fast one for many leaves
        return values
    parts = prefix_parts(prefix, tree, is_leaf, caller, what)
    return [value for _, value, part in parts for _ in jtu.tree_leaves(part)]
