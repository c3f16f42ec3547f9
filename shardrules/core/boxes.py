"""What flax puts around an array: the boxes of linen, and the variables of nnx.

Both carry names for the dimensions of the array, and neither is a step of the path to it. A box is a leaf of the tree,
as flax has it. A variable is a container, so that specs and shardings come in variables, as nnx has them. Nothing here
imports flax: a process that has not done so has no such tree.
"""

import sys
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.leaf import LogicalName

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
        leaf = jtu.default_registry.flatten_one_level(leaf)[0][0]
    return leaf, names


def variable_types() -> tuple[type, ...]:
    """Returns the classes of nnx whose instances are containers of one array; none where nnx is not imported."""
    return _types("flax.nnx.variablelib", ("Variable", "VariableState"))


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is a variable of nnx."""
    # By type: isinstance asks the metaclass of flax, which takes variables of other kinds for one.
    return issubclass(type(node), variable_types())


def opaque_types() -> tuple[type, ...]:
    """Returns the classes of nnx whose instances hold arrays that JAX sees only where the class is a pytree.

    Modules of flax before 0.11 are none, nor are classes with `pytree=False` and variables with `hijax=True`.
    """
    return (
        *_types("flax.nnx.variablelib", ("Variable", "HijaxVariable")),
        *_types("flax.nnx.object", ("Object",)),
        *_types("flax.nnx.pytreelib", ("Pytree",)),
    )


def _types(module_name: str, names: tuple[str, ...]) -> tuple[type, ...]:
    module = sys.modules.get(module_name)
    classes = [getattr(module, name, None) for name in names]  # each version of flax has some of them
    return tuple([cls for cls in dict.fromkeys(classes) if isinstance(cls, type)])


def variable_axes(variable: Any, ndim: int) -> tuple[LogicalName, ...] | None:
    """Returns the names that a variable has for the dimensions of its array, `None` if it has none."""
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
