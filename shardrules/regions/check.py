"""`check_region`: a region on shards beside the same function on whole arrays."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardrules.analysis.analyzer import ShardingAnalyzer
from shardrules.core.errors import ConfigTypeError, ExpectationError, MeshError
from shardrules.core.tree import array_kind
from shardrules.regions.declaration import Axes
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
        name = getattr(function.fn, "__name__", "region")
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
@attrs.frozen(eq=False)
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
        declaration = self.function.declaration
        self.function.on_shards(dict(self.options)).trace(self.operands)
        sizes = declaration.sizes([operand.shape for operand in self.operands])
        problems: list[str] = []
        pieces: dict[str, int] = {}  # of letters that hold by themselves
        for letter in declaration.split:
            count = _pieces(sizes.get(letter, 1), len(self.devices))
            if count > 1:
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
            axis_types=(AxisType.Explicit,) * len(pieces),
        )
        split = ", ".join(f"{letter} in {count}" for letter, count in pieces.items())
        axes: dict[str, Axes] = {letter: (letter,) for letter in pieces}
        specs, _ = self.function.declaration.specs(axes)
        placed = [
            jax.device_put(operand, NamedSharding(mesh, spec))
            for operand, spec in zip(self.operands, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            results = jax.jit(self._run)(*placed)
        whole = jax.jit(self._run)(*self.operands)
        yield from self._differences(f"{split}: result", results, whole)
        yield from self._sent(split, pieces, placed, mesh)
        if self.gradients:
            with jax.set_mesh(mesh):
                gradients = jax.jit(self._gradients)(*placed)
            whole = jax.jit(self._gradients)(*self.operands)
            yield from self._differences(f"{split}: gradient of operand", gradients, whole)

    def _run(self, *operands: Any) -> dict[int, Any]:
        results = self.function(*operands, **self.options)
        return dict(enumerate([results] if len(self.function.declaration.results) == 1 else results))

    def _gradients(self, *operands: Any) -> dict[int, Any]:
        """The gradients of a sum of the results with weights that all differ."""
        trained = [index for index, operand in enumerate(operands) if jnp.issubdtype(operand.dtype, jnp.inexact)]

        def loss(*changed: Any) -> Any:
            arrays = [*operands]
            for index, array in zip(trained, changed, strict=True):
                arrays[index] = array
            results = self._run(*arrays).values()
            return sum(
                jnp.sum(jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape) * jnp.real(result))
                for result in results
                if jnp.issubdtype(result.dtype, jnp.inexact)
            )

        gradients = jax.grad(loss, argnums=tuple(range(len(trained))))(*(operands[index] for index in trained))
        return dict(zip(trained, gradients, strict=True))

    def _differences(self, name: str, actual: Mapping[int, Any], expected: Mapping[int, Any]) -> Iterator[str]:
        for index, array in expected.items():
            here, whole = (np.asarray(each) for each in (actual[index], array))
            wide = np.result_type(whole.dtype, np.float32) if whole.dtype.kind not in "fciub" else whole.dtype
            here, whole = here.astype(wide), whole.astype(wide)
            largest = float(np.abs(whole).max(initial=0.0))
            tolerance = _TOLERANCES.get(str(array.dtype), 0.0) if self.tolerance is None else self.tolerance
            difference = float(np.abs(here - whole).max(initial=0.0))
            if not difference <= tolerance * largest:
                yield f"{name} {index} differs by up to {difference:.3g}, where the largest element is {largest:.3g}"

    def _sent(self, split: str, pieces: Mapping[str, int], placed: Sequence[Any], mesh: Mesh) -> Iterator[str]:
        """Yields how many bytes devices send beyond the sums that the declaration implies."""
        declaration = self.function.declaration
        report = ShardingAnalyzer(mesh).audit(self._run, *placed, target="cpu", axis_types="explicit")
        actual = sum(collective.wire_bytes * collective.times.count for collective in report.collectives)
        expected = 0.0
        for index, struct in jax.eval_shape(self._run, *self.operands).items():
            devices = math.prod(pieces.get(letter, 1) for letter in declaration.summed(index))
            shards = math.prod(pieces.get(letter, 1) for letter in declaration.results[index])
            expected += 2 * (devices - 1) / devices * struct.size * struct.dtype.itemsize / shards
        if actual > expected + 1:
            yield f"{split}: devices send {actual:,.0f} bytes, and the declaration's sums are {expected:,.0f}"


def _pieces(size: int, device_count: int) -> int:
    return next((count for count in range(2, min(size, device_count) + 1) if size % count == 0), 1)
