"""The shape of a mesh, without devices: what planning needs, from a line of text."""

from jax.sharding import AbstractMesh

from shardrules.core.errors import SpecError


def mesh_shape(text: str) -> AbstractMesh:
    """Returns the mesh with these axes and no devices, for planning on a machine that has none.

    **Arguments:**

    - `text`: `name:size` pairs joined by commas, the most major axis first. Blanks are ignored.

    **Returns:**

    An `AbstractMesh`. JAX's backend is not initialised.

    **Raises:**

    `SpecError` when the text has another form, a size is not a positive integer, or a name comes twice.

    ```python
    assert sr.mesh_shape("data:64, model:16").shape["model"] == 16
    ```
    """
    pairs = [pair.strip().rpartition(":") for pair in text.split(",")] if text.strip() else []
    problems = [
        f"{':'.join(part for part in (name, size) if part)!r} is not name:size with a size of 1 or more"
        for name, colon, size in pairs
        if not (colon and name.strip() and size.strip().isdecimal() and int(size) > 0)
    ]
    names = [name.strip() for name, _, _ in pairs]
    problems += [f"axis {name!r} comes twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise SpecError(f"mesh shape {text!r}: {'; '.join(problems)}. Write it as 'data:64,model:16'.")
    return AbstractMesh(tuple(int(size) for _, _, size in pairs), tuple(names))
