"""`check_region`: a region on shards beside the same function on whole arrays."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardrules.core.errors import ConfigError, ConfigTypeError, ExpectationError, MeshError
from shardrules.core.spec import shard_shape
from shardrules.core.tree import array_kind
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.regions.declaration import ShardAxes, Term
from shardrules.programs.regions.exchanges import exchanges_of
from shardrules.programs.regions.function import ShardFunction
from shardrules.programs.regions.region import RegionFunction

_TOLERANCES = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""The largest error of shards, over the largest element: sums are added up in another order. A wrong declaration is off
by as much as the elements themselves."""


def check_region(
    function: Any, *operands: Any, gradients: bool = True, tolerance: float | None = None, **options: Any
) -> None:
    """Compares a region on shards with the same function on whole arrays, on CPU devices.

    Each letter that may be split is split by itself, into as few pieces as it can be and into as many as there are
    devices for, and the letters of the exchange together; then every two splits that hold, and all of them, as far as
    devices reach. Results and gradients have to be equal to rounding, and the compiled program must send no more than
    the sums that the declaration implies, and what the function sends by hand. Of alternatives each is checked, and
    compared with the first.

    **Arguments:**

    - `function`: what `shardrules.region` returns.
    - `operands`: its operands, small. A `jax.ShapeDtypeStruct` is filled with normally distributed elements; operands
        of whole numbers, such as indices, have to be arrays.
    - `gradients`: whether to compare gradients, too; `False` for kernels without a derivative.
    - `tolerance`: how much elements may differ, over the largest of the array; by default what sums in another order
        differ by in this dtype.
    - `options`: the keyword arguments of the function.

    **Raises:**

    `ExpectationError`, which is an `AssertionError`, with every split whose results, gradients or bytes differ, and
    with results and gradients that are only NaN; `MeshError` where there are too few CPU devices.

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
    first, *others = (
        _Check(region, options, arrays, gradients, tolerance, devices) for region in function.regions or (function,)
    )
    problems = {first: first.problems()}
    problems |= {check: [*check.problems(), *check.differences_from(first)] for check in others}
    if any(problems.values()):
        raise ExpectationError(
            "\n".join(
                f"region {check.function.name} ({check.function.declaration}) is not what it declares:"
                + "".join(f"\n  {line}" for line in lines)
                for check, lines in problems.items()
                if lines
            )
        )


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


def _elements(array: Any) -> Any:
    """An array as numpy computes with it."""
    elements = np.asarray(array)
    return elements if elements.dtype.kind in "fciub" else elements.astype(np.float32)  # bfloat16 and smaller


@final
@attrs.frozen
class _Group:
    """Letters that are split over the same axes: a single one, or the letters of the exchange."""

    letters: Term
    is_exchange: bool = False

    @property
    def axis(self) -> str:
        """The name of the mesh axis, in ASCII as compilers need it."""
        name = "_".join((*self.letters, "exchange") if self.is_exchange else self.letters)
        return name.encode("ascii", "backslashreplace").decode().replace("\\", "")


def _axes_of(groups: Iterable[_Group]) -> ShardAxes:
    """The axes of groups of letters, with an axis for each group."""
    letters = {group.letters[0]: (group.axis,) for group in groups if not group.is_exchange}
    exchange = tuple(group.axis for group in groups if group.is_exchange)
    return ShardAxes(letters, exchange, tuple(group.axis for group in groups))


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
        """The differences, for each way to split letters."""
        declaration = self._on_shards.traced(self.operands)[0].declaration
        sizes = declaration.sizes([operand.shape for operand in self.operands])
        groups = [_Group((letter,)) for letter in declaration.split]
        groups += [_Group(declaration.exchange, is_exchange=True)] if declaration.exchange else []
        counts = {
            group: self._possible_pieces(group, math.gcd(*(sizes[letter] for letter in group.letters)))
            for group in groups
        }
        uneven = [
            f"{letter!r} of {sizes[letter]}"
            for group, possible in counts.items()
            if not possible
            for letter in group.letters
        ]
        if uneven:
            raise ConfigError(
                f"check_region cannot split {', '.join(uneven)} over {len(self.devices)} devices: pass operands whose "
                "dims can be"
            )
        problems = list(self._incomparable())
        pieces: dict[_Group, int] = {}  # of letters that hold by themselves
        for group, possible in counts.items():
            # Some mistakes show in small shards only, some of an exchange on more than two devices: both neighbours in
            # a ring of two are the same.
            tried = possible[-1:] if group.is_exchange else dict.fromkeys((possible[0], possible[-1]))
            differences = next(filter(None, (list(self._differences_of({group: count})) for count in tried)), [])
            problems += differences
            if not differences:
                pieces[group] = possible[0]
        for count in dict.fromkeys((2, len(pieces))):
            for together in itertools.combinations(pieces, count) if count > 1 else ():
                split = {group: pieces[group] for group in together}
                if math.prod(split.values()) <= len(self.devices) and self._is_even(split, sizes):
                    problems += self._differences_of(split)
        return problems

    def _possible_pieces(self, group: _Group, size: int) -> list[int]:
        """The counts of pieces that letters of this size can be split into."""
        axes = _axes_of([group])

        def is_possible(count: int) -> bool:
            try:
                return bool(self._on_shards.candidates(axes, {group.axis: count}, self.operands))
            except ConfigError:  # which is what differs
                return True

        return [
            count for count in range(2, min(size, len(self.devices)) + 1) if size % count == 0 and is_possible(count)
        ]

    def _is_even(self, pieces: Mapping[_Group, int], sizes: Mapping[str, int]) -> bool:
        """Letters that are split by themselves and in the exchange have enough elements for both."""
        letters = {letter for group in pieces for letter in group.letters}
        counts = {
            letter: math.prod(count for group, count in pieces.items() if letter in group.letters) for letter in letters
        }
        return all(sizes[letter] % count == 0 for letter, count in counts.items())

    def _differences_of(self, pieces: Mapping[_Group, int]) -> Iterator[str]:
        """Yields what differs where letters are split into as many `pieces`: some together, if they are exchanged."""
        axes = _axes_of(pieces)
        mesh = Mesh(
            np.array(self.devices[: math.prod(pieces.values())]).reshape(*pieces.values()),
            axes.order,
            axis_types=(AxisType.Auto,) * len(pieces),
        )
        split = ", ".join(f"{' and '.join(group.letters)} in {count}" for group, count in pieces.items())
        # The split itself is tried first: one that does not hold is a line of the report, and nothing is compiled.
        try:
            self._on_shards.shard_program(axes, dict(mesh.shape), self.operands)
        except ConfigError as error:
            yield f"{split}: {error}"
            return
        specs, _ = self.function.declaration.specs(axes)
        placed = [
            jax.device_put(operand, NamedSharding(mesh, spec))
            for operand, spec in zip(self.operands, specs, strict=True)
        ]
        compiled = jax.jit(self._run).lower(*placed).compile()
        values = compiled(*placed)
        yield from (f"{split}: {line}" for line in self._differences(values, self._whole_values))
        collectives = find_collectives(read_program(compiled.as_text() or ""), mesh)
        actual = sum(collective.total_wire_bytes for collective in collectives)
        sums, by_hand = self._sum_bytes(axes, dict(mesh.shape)), self._exchanged_bytes(axes, dict(mesh.shape))
        if actual > sums + by_hand + 1:  # rounded
            exchanged = f", and its collectives {by_hand:,.0f}" if by_hand else ""
            yield (
                f"{split}: devices send {actual:,.0f} bytes, and sums that the declaration implies {sums:,.0f}"
                f"{exchanged}"
            )

    @functools.cached_property
    def _on_shards(self) -> ShardFunction:
        return self.function.on_shards(self.options)

    @functools.cached_property
    def _whole_values(self) -> dict[str, Any]:
        return jax.jit(self._run)(*jax.device_put(self.operands, self.devices[0]))

    def _incomparable(self) -> Iterator[str]:
        """Yields results and gradients that are only NaN, which say nothing of the shards'."""
        for name, array in self._whole_values.items():
            elements = _elements(array)
            if elements.size and np.isnan(elements).all():
                yield f"whole: {name} is only NaN, so that nothing can be compared; pass operands for which it is not"

    @property
    def _trained(self) -> list[int]:
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

    def differences_from(self, other: "_Check") -> Iterator[str]:
        """Yields what differs from another alternative, on whole arrays."""
        for line in self._differences(self._whole_values, other._whole_values):
            yield f"whole: {line}, from {other.function.name}"

    def _differences(self, values: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
        """Yields which results and gradients differ from others, results first."""
        for name, expected in sorted(others.items(), key=lambda item: item[0].startswith("gradient")):
            difference = self._difference(values[name], expected)
            if difference:
                yield f"{name} differs by up to {difference}"
            if values[name].dtype != expected.dtype:
                yield f"{name} is {values[name].dtype} instead of {expected.dtype}"

    def _difference(self, actual: Any, expected: Any) -> str:
        """The difference between arrays, as text; empty where it is rounding."""
        tolerance = _TOLERANCES.get(str(expected.dtype), 0.0) if self.tolerance is None else self.tolerance
        here, whole = _elements(actual), _elements(expected)
        largest = float(np.abs(whole, where=np.isfinite(whole), out=np.zeros(whole.shape)).max(initial=0))
        is_same = (here == whole) | (np.isnan(here) & np.isnan(whole))  # infinities have no difference
        difference = float(np.abs(np.where(is_same, 0.0, here) - np.where(is_same, 0.0, whole)).max(initial=0))
        return (
            "" if difference <= tolerance * largest else f"{difference:.3g}, where the largest element is {largest:.3g}"
        )

    def _sum_bytes(self, axes: ShardAxes, mesh_sizes: Mapping[str, int]) -> float:
        """The bytes that a device sends for the sums of results, and of gradients."""
        sent = 0.0
        for function, values in self._passes:
            declaration = function.declaration
            specs = declaration.specs(axes)[1]
            for index, array in enumerate(values):
                devices = math.prod(mesh_sizes[name] for name in declaration.sum_axes(index, axes))
                shard = math.prod(shard_shape(array.shape, specs[index], mesh_sizes))
                itemsize = max(4, array.dtype.itemsize)  # compilers for CPUs add small floats up in float32
                sent += 2 * (devices - 1) / devices * shard * itemsize
        return sent

    def _exchanged_bytes(self, axes: ShardAxes, mesh_sizes: Mapping[str, int]) -> float:
        """The bytes that a device sends in the collectives of the function, and of its backward pass."""
        sent = 0.0
        for function, _ in self._passes if axes.exchange else ():
            operands = [*self.operands, *self._cotangents][: len(function.declaration.operands)]
            program = function.shard_program(axes, mesh_sizes, operands)
            for exchange in exchanges_of(program, mesh_sizes):
                sent += 2 * exchange.count * exchange.sent_bytes  # CPUs add small floats up in float32
        return sent

    @functools.cached_property
    def _passes(self) -> list[tuple[ShardFunction, Sequence[Any]]]:
        """The function with its results, and its backward pass with the gradients."""
        results = [value for name, value in self._whole_values.items() if name.startswith("result")]
        function, _ = self._on_shards.traced(self.operands)
        passes: list[tuple[ShardFunction, Sequence[Any]]] = [(function, results)]
        if self._trained:
            backward, _ = function.backward(self.operands).function.traced([*self.operands, *self._cotangents])
            passes.append((backward, [self.operands[index] for index in self._trained]))
        return passes

    @functools.cached_property
    def _cotangents(self) -> list[Any]:
        results = [value for name, value in self._whole_values.items() if name.startswith("result")]
        return [result for result in results if jnp.issubdtype(result.dtype, jnp.inexact)]


def _weights(result: Any) -> Any:
    """Cotangents that differ from element to element."""
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)
    return jnp.asarray(np.cos(np.arange(result.size)).reshape(result.shape), result.dtype)
