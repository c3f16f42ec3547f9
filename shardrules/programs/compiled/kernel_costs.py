"""Facts that the user and JAX know about kernels and that the text of a compiled program does not say."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp

from shardrules.core.errors import ConfigTypeError
from shardrules.programs.compiled.text import ArrayType

Amount: TypeAlias = float | Callable[..., int]
"""FLOPs or bytes of a kernel: a whole number, or a function of its operands' shapes."""

_DTYPES = {"bf16": "bfloat16", "pred": "bool", "c64": "complex64", "c128": "complex128"}
"""XLA's names of dtypes that differ from NumPy's in more than the kind."""

_KINDS = {"f": "float", "s": "int", "u": "uint"}


def _as_amount(value: Any) -> Any:
    """Converts a float that is a whole number: `1e12`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_amount(instance: Any, attribute: Any, value: Any) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_count and not callable(value) and not (value is None and attribute.name == "bytes"):
        raise ConfigTypeError(
            f"kernel_cost: {attribute.name} must be a whole number of at least 0, or a function of the operands' "
            f"shapes; got {value!r:.60}"
        )


def _is_name(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigTypeError(f"kernel_cost: name must be the name of a kernel or a glob, got {value!r:.60}")


@final
@attrs.frozen
class KernelCost:
    """The cost of one run of a kernel on a device, from `shardrules.kernel_cost`.

    ```python
    cost = sr.kernel_cost("scan_*", flops=2 * 8 * 16, bytes=lambda x, w: 2 * x.size + 2 * w.size)
    assert isinstance(cost, sr.reports.KernelCost) and cost.name == "scan_*"
    ```
    """

    name: str = attrs.field(validator=_is_name)
    flops: Amount = attrs.field(converter=_as_amount, validator=_is_amount)
    bytes: Amount | None = attrs.field(default=None, converter=_as_amount, validator=_is_amount)

    def matches(self, names: Iterable[str]) -> bool:
        """Returns whether it is for a kernel of any of these names."""
        return any(fnmatch.fnmatchcase(name, self.name) for name in names)

    def amounts(self, operands: Iterable[ArrayType]) -> tuple[int, int | None]:
        """The FLOPs and the bytes of a kernel with these operands; `None` for the bytes of its arrays."""
        # Operands without bits are tokens, which the author of a kernel does not see.
        shapes = [jax.ShapeDtypeStruct(operand.shape, _dtype(operand.dtype)) for operand in operands if operand.bits]
        problems: list[str] = []
        flops = _evaluate(self.flops, "flops", shapes, problems)
        size = None if self.bytes is None else _evaluate(self.bytes, "bytes", shapes, problems)
        if problems:
            listing = ", ".join(f"{shape.dtype}{list(shape.shape)}" for shape in shapes)
            raise ConfigTypeError(
                f"kernel_cost {self.name!r}: {'; '.join(problems)}. Its functions take a jax.ShapeDtypeStruct for each "
                f"operand of the kernel, here {len(shapes)}: {listing or 'none'}"
            )
        return flops, size


def _evaluate(amount: Amount, name: str, shapes: Sequence[jax.ShapeDtypeStruct], problems: list[str]) -> int:
    """The amount for operands of these shapes; what is wrong with a function is added to `problems`."""
    if not callable(amount):
        return int(amount)
    try:
        value: Any = amount(*shapes)
    except Exception as error:  # noqa: BLE001  raised by `amounts`, which lists both functions
        problems.append(f"{name} raised {type(error).__name__}: {error}")
        return 0
    try:
        if not value < 0:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass  # not a number, or not a finite one
    problems.append(f"{name} must return a number of at least 0, got {value!r:.60}")
    return 0


def read_kernel_costs(costs: Iterable[KernelCost]) -> tuple[KernelCost, ...]:
    """Returns what the argument `kernel_costs` lists; anything else raises."""
    if not isinstance(costs, Iterable):
        raise ConfigTypeError(f"kernel_costs must be a list of what kernel_cost returns, got {costs!r:.60}")
    costs = tuple(costs)
    for cost in costs:
        if not isinstance(cost, KernelCost):
            raise ConfigTypeError(f"kernel_costs must be a list of what kernel_cost returns, got {cost!r:.60} in it")
    return costs


def kernel_cost(name: str, flops: Amount, bytes: Amount | None = None) -> KernelCost:  # noqa: A002  what it is
    """Gives the cost of a kernel that has none in a compiled program: a Pallas kernel without `cost_estimate`.

    It is a value, for the argument `kernel_costs` of `audit`. A kernel's own `cost_estimate` and
    everything else that is known of it gives way to it.

    **Arguments:**

    - `name`: the name of a Pallas kernel, which is the `name` of `pallas_call` or of the kernel's function, or the
        target of a custom call, such as the name in `jax.ffi.ffi_call`. It may be a glob: `"my_*"`.
    - `flops`: how many FLOPs one device runs each time it runs the kernel: a number, or a function. The function gets a
        `jax.ShapeDtypeStruct` for each operand of the kernel, as one device has them.
    - `bytes`: the same for the bytes that it reads and writes; by default all of its operands and results, once.

    **Returns:**

    A `shardrules.reports.KernelCost`.

    **Raises:**

    `ConfigTypeError` for anything but numbers and functions; the audit raises it for a function that does not take the
    operands of the kernel or does not return a number of at least 0.

    ```python
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    cost = sr.kernel_cost("double", flops=lambda x: x.size, bytes=lambda x: 2 * x.size * x.dtype.itemsize)
    assert cost.name == "double"
    ```
    """
    return KernelCost(name, flops, bytes)


def _dtype(name: str) -> Any:
    """The dtype that XLA calls so."""
    kind = name[0]
    if name in _DTYPES:
        return jnp.dtype(_DTYPES[name])
    if name.startswith(("f8", "f4")):
        return jnp.dtype(f"float{name[1:2]}_{name[2:]}")
    return jnp.dtype(f"{_KINDS[kind]}{name[1:]}")


@final
@attrs.frozen
class KernelCall:
    """A Pallas kernel as a function calls it: what JAX knows of it before any compiler has seen it."""

    name: str
    operands: tuple[tuple[int, ...], ...]
    """The shapes of its operands."""
    results: tuple[tuple[int, ...], ...]
    flops: int | None = None
    """Its author's estimate, which compilers for GPUs do not see."""
    nbytes: int | None = None
    block_count: int | None = None
    """The blocks of a mask that it visits, if the mask is a constant: a causal kernel skips about half of them."""
    block_shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the blocks in which it reads its last operands and writes its results."""


@final
@attrs.frozen
class KernelFacts:
    """Known facts about a program's kernels that are not in its text."""

    costs: tuple[KernelCost, ...] = attrs.field(default=(), converter=tuple)
    """The user's, the first that matches wins."""
    calls: tuple[KernelCall, ...] = attrs.field(default=(), converter=tuple)

    def cost(self, names: Iterable[str]) -> KernelCost | None:
        """The user's cost of a kernel of these names."""
        names = tuple(names)
        return next((cost for cost in self.costs if cost.matches(names)), None)

    def unused(self, kernels: Iterable[Iterable[str]]) -> tuple[KernelCost, ...]:
        """The user's costs that no kernel of these names has."""
        used = [self.cost(names) for names in kernels]
        return tuple(cost for cost in self.costs if cost not in used)
