"""`check_region`: a region on shards beside the same function on whole arrays."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.program import read_program
from shardrules.core.errors import ConfigError, ConfigTypeError, ExpectationError, MeshError
from shardrules.core.tree import array_kind
from shardrules.regions.declaration import Declaration, ShardAxes
from shardrules.regions.region import RegionFunction

_TOLERANCES = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""How far shards may be off, over the largest element: sums are added up in another order. A declaration that is wrong
is off by as much as the elements themselves."""


def check_region(
    function: Any, *operands: Any, gradients: bool = True, tolerance: float | None = None, **options: Any
) -> None:
    """Compares a region on shards with the same function on whole arrays, on CPU devices.

    Each letter that may be split is split by itself, and then every two of those that hold, and all of them, as far as
    devices reach. Results and gradients have to be equal to rounding, and the compiled program must send no more than
    the sums that the declaration implies.

    **Arguments:**

    - `function`: what `shardrules.region` returns.
    - `operands`: its operands, small. A `jax.ShapeDtypeStruct` is filled with normally distributed elements; operands
        of whole numbers, such as indices, have to be arrays.
    - `gradients`: whether to compare gradients, too; `False` for kernels without a derivative.
    - `tolerance`: how much elements may differ, over the largest of the array; by default what sums in another order
        differ by in this dtype.
    - `options`: the keyword arguments of the function.

    **Raises:**

    `ExpectationError`, which is an `AssertionError`, with every split whose results, gradients or bytes differ;
    `MeshError` where there are too few CPU devices.

    ```python
    @sr.region("rows dim -> rows dim", split="rows")
    def softmax(x):
        return jax.nn.softmax(x, axis=-1)

    sr.check_region(softmax, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    ```
    """
    if not isinstance(function, RegionFunction):
        raise ConfigTypeError(f"check_region checks what shardrules.region returns, got {function!r:.60}")
    arrays = _arrays(operands)
    devices = jax.devices("cpu")
    if len(devices) < 2:
        raise MeshError(
            "check_region needs at least 2 CPU devices, got 1: start with "
            'jax.config.update("jax_num_cpu_devices", 8), or XLA_FLAGS=--xla_force_host_platform_device_count=8'
        )
    check = _Check(function, options, arrays, gradients, tolerance, devices)
    problems = check.problems()
    if problems:
        name = function.on_shards(options).name
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ExpectationError(f"region {name} ({function.declaration}) is not what it declares:{lines}")


def _arrays(operands: Sequence[Any]) -> list[Any]:
    """The operands, with arrays for shapes."""
    generator = np.random.default_rng(0)
    arrays, problems = [], []
    for index, operand in enumerate(operands):
        kind = array_kind(operand)
        if not isinstance(operand, jax.ShapeDtypeStruct):
            arrays.append(jnp.asarray(operand))
        elif kind is not None and jnp.issubdtype(operand.dtype, jnp.floating):
            arrays.append(jnp.asarray(generator.normal(size=operand.shape), operand.dtype))
        else:
            problems.append(f"operand {index} is {operand.dtype}{list(operand.shape)}")
    if problems:
        raise ConfigTypeError(f"check_region fills shapes of floats only; pass arrays: {', '.join(problems)}")
    return arrays


@final
@attrs.frozen(eq=False, slots=False)
class _Check:
    """A region and the operands that it is checked with."""

    function: RegionFunction
    options: Mapping[str, Any]
    operands: Sequence[Any]
    gradients: bool
    tolerance: float | None
    devices: Sequence[Any]

    def problems(self) -> list[str]:
        """What differs, for each way to split letters."""
        declaration = self._declaration
        sizes = declaration.sizes([operand.shape for operand in self.operands])
        counts = {letter: _pieces(sizes[letter], len(self.devices)) for letter in declaration.split}
        uneven = [f"{letter!r} of {sizes[letter]}" for letter, count in counts.items() if count == 1]
        if uneven:
            raise ConfigError(
                f"check_region cannot split {', '.join(uneven)} over {len(self.devices)} devices: pass operands whose "
                "dims can be"
            )
        problems: list[str] = []
        pieces: dict[str, int] = {}  # of letters that hold by themselves
        for letter, count in counts.items():
            differences = list(self._differences_of({letter: count}))
            problems += differences
            if not differences:
                pieces[letter] = count
        for count in dict.fromkeys((2, len(pieces))):
            for letters in itertools.combinations(pieces, count) if count > 1 else ():
                if math.prod(pieces[letter] for letter in letters) <= len(self.devices):
                    problems += self._differences_of({letter: pieces[letter] for letter in letters})
        return problems

    def _differences_of(self, pieces: Mapping[str, int]) -> Iterator[str]:
        """Yields what differs where letters are split into as many `pieces`."""
        mesh = Mesh(
            np.array(self.devices[: math.prod(pieces.values())]).reshape(*pieces.values()),
            tuple(pieces),
            axis_types=(AxisType.Auto,) * len(pieces),
        )
        split = ", ".join(f"{letter} in {count}" for letter, count in pieces.items())
        axes = ShardAxes({letter: (letter,) for letter in pieces})
        specs, _ = self.function.declaration.specs(axes)
        placed = [
            jax.device_put(operand, NamedSharding(mesh, spec))
            for operand, spec in zip(self.operands, specs, strict=True)
        ]
        compiled = jax.jit(self._run).lower(*placed).compile()
        values = compiled(*placed)
        for name, expected in sorted(self._whole_values.items(), key=lambda item: item[0].startswith("gradient")):
            difference = self._difference(values[name], expected)
            if difference:
                yield f"{split}: {name} differs by up to {difference}"
            if values[name].dtype != expected.dtype:
                yield f"{split}: {name} is {values[name].dtype} instead of {expected.dtype}"
        collectives = find_collectives(read_program(compiled.as_text() or ""), mesh)
        actual, expected = sum(collective.total_wire_bytes for collective in collectives), self._sum_bytes(pieces)
        if actual > expected + 1:  # rounded
            yield f"{split}: devices send {actual:,.0f} bytes, and sums that the declaration implies {expected:,.0f}"

    @functools.cached_property
    def _declaration(self) -> Declaration:
        return self.function.on_shards(dict(self.options)).traced(self.operands)[0].declaration

    @functools.cached_property
    def _whole_values(self) -> dict[str, Any]:
        return jax.jit(self._run)(*jax.device_put(self.operands, self.devices[0]))

    @property
    def _trained(self) -> list[int]:
        """The operands that have gradients."""
        is_inexact = [jnp.issubdtype(operand.dtype, jnp.inexact) for operand in self.operands]
        return [index for index, flag in enumerate(is_inexact) if flag and self.gradients]

    def _run(self, *operands: Any) -> dict[str, Any]:
        """Results, and gradients of a sum of them with weights that all differ."""

        def results_of(*trained: Any) -> list[Any]:
            arrays = [*operands]
            for index, array in zip(self._trained, trained, strict=True):
                arrays[index] = array
            results = self.function(*arrays, **self.options)
            return [results] if len(self.function.declaration.results) == 1 else list(results)

        results, gradients_of = jax.vjp(results_of, *(operands[index] for index in self._trained))
        values = {f"result {index}": result for index, result in enumerate(results)}
        if self._trained:
            gradients = gradients_of([_weights(result) for result in results])
            values |= {
                f"gradient of operand {index}": gradient
                for index, gradient in zip(self._trained, gradients, strict=True)
            }
        return values

    def _difference(self, actual: Any, expected: Any) -> str:
        """By how much an array differs; empty where it is by rounding."""
        tolerance = _TOLERANCES.get(str(expected.dtype), 0.0) if self.tolerance is None else self.tolerance
        here, whole = (np.asarray(array) for array in (actual, expected))
        if whole.dtype.kind not in "fciub":  # bfloat16 and smaller
            here, whole = here.astype(np.float32), whole.astype(np.float32)
        largest = float(np.abs(whole, where=np.isfinite(whole), out=np.zeros(whole.shape)).max(initial=0))
        is_same = (here == whole) | (np.isnan(here) & np.isnan(whole))  # infinities have no difference
        difference = float(np.abs(np.where(is_same, 0.0, here) - np.where(is_same, 0.0, whole)).max(initial=0))
        return (
            "" if difference <= tolerance * largest else f"{difference:.3g}, where the largest element is {largest:.3g}"
        )

    def _sum_bytes(self, pieces: Mapping[str, int]) -> float:
        """The bytes that a device sends for the sums of results, and of gradients."""
        declaration = self._declaration
        letters = {letter for term in (*declaration.operands, *declaration.results) for letter in term}
        terms = [
            (declaration.results[index], self._whole_values[f"result {index}"], declaration.summed(index))
            for index in range(len(declaration.results))
        ]
        for index in self._trained:
            term = declaration.operands[index]
            terms.append((term, self.operands[index], tuple(letter for letter in letters if letter not in term)))
        sent = 0.0
        for term, array, summed in terms:
            devices = math.prod(pieces.get(letter, 1) for letter in summed)
            shards = math.prod(pieces.get(letter, 1) for letter in term)
            itemsize = max(4, array.dtype.itemsize)  # compilers for CPUs add small floats up in float32
            sent += 2 * (devices - 1) / devices * array.size * itemsize / shards
        return sent


def _weights(result: Any) -> Any:
    """Cotangents that differ from element to element."""
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)
    return jnp.asarray(np.cos(np.arange(result.size)).reshape(result.shape), result.dtype)


def _pieces(size: int, device_count: int) -> int:
    return next((count for count in range(2, min(size, device_count) + 1) if size % count == 0), 1)
