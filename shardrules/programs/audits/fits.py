"""Will it fit, and how large may the batch be? Answered by the compiler of the target, for any function.

No formula knows what a compiler keeps in memory: it fuses, reorders and recomputes, and does so differently once memory
is short. So every size in an answer has been compiled. Formulas only choose which size to compile next.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, final

import attrs
import jax.tree_util as jtu

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigError, ConfigTypeError, DoesNotFitError, HardwareError, printable, suggest
from shardrules.core.fields import integer, read_bytes
from shardrules.core.spec import UNCONSTRAINED, entries
from shardrules.core.text import bytes_text
from shardrules.core.tree import array_kind
from shardrules.core.views.table import aligned
from shardrules.mesh.axis_types import AxisTypes
from shardrules.programs.audits.arguments import AuditedArguments
from shardrules.programs.audits.memory import MemoryUse, usable_bytes
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiling.arguments import read_arguments
from shardrules.programs.compiling.request import CompileOptions, CompileRequest
from shardrules.programs.machine.targets import Target

_MAX_GROWTH = 16
"""The next size is at most so many times the largest that fits. Chosen by hand: the memory of small batches is mostly
weights, and says little about large ones, for which a compiler may take minutes."""

_MAX_BATCH = 2**40
"""No batch is this large: if it fits, memory does not depend on the batch, and the search would never end."""


@final
@attrs.frozen
class Fit:
    """The memory of a function beside that of a device. It is true if the function fits.

    ```python
    fit = sr.fits(lambda x: x + 1, np.ones((64, 16), np.float32), budget="1 KiB", mesh=sr.mesh_shape("data:8"))
    assert not fit and (fit.peak_bytes, fit.headroom_bytes) == (8192, -7168)
    ```
    """

    name: str
    target: Target
    mesh: str
    budget_bytes: int
    peak_bytes: int | None
    """The memory that a device needs. If the compiler refuses, its rounded figure, or `None`."""
    memory: MemoryUse | None = None
    """The same by category; `None` if the compiler refuses."""
    refusal: str = ""
    """The compiler's error if it refuses the program, as the TPU compiler does beyond the memory of the device."""

    def __bool__(self) -> bool:
        return self.memory is not None and self.memory.peak_bytes <= self.budget_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """The memory to spare, or missing if negative. `None` if the compiler refuses: no budget helps there."""
        return None if self.memory is None else self.budget_bytes - self.memory.peak_bytes

    def __str__(self) -> str:
        where = printable(f"{self.name} on {self.target}, mesh {self.mesh},")
        if self.memory is None or self.headroom_bytes is None:
            return f"{where} does not fit: {self.refusal}"
        need = f"a device needs {bytes_text(self.memory.peak_bytes)} of {bytes_text(self.budget_bytes)}"
        if self:
            return f"{where} fits: {need}, {bytes_text(self.headroom_bytes)} to spare\n  {self.memory.shares_text()}"
        return (
            f"{where} does not fit: {need}, {bytes_text(-self.headroom_bytes)} too much\n"
            f"  {self.memory.shares_text()}\n  -> {self.memory.remedy}"
        )


@final
@attrs.frozen
class BatchSearch:
    """The largest batch that fits, and every batch that was tried, in order. It prints as a table.

    ```python
    def arguments(batch):
        return (jax.ShapeDtypeStruct((batch, 256), jnp.float32),)

    mesh = sr.mesh_shape("data:8")
    search = sr.largest_batch(lambda x: x + 1, arguments, budget="1 MiB", mesh=mesh, in_shardings=P("data"))
    assert search.batch == 4096 and search.fit.headroom_bytes == 0
    assert [batch for batch, fit in search.trials if not fit] == [4104]
    ```
    """

    batch: int
    multiple_of: int
    """Every batch that was tried is a multiple of this."""
    trials: tuple[tuple[int, Fit], ...]

    @property
    def fit(self) -> Fit:
        """The `Fit` of the largest batch."""
        return dict(self.trials)[self.batch]

    def __str__(self) -> str:
        is_end = not any(batch > self.batch for batch, _ in self.trials)
        return "\n".join(
            [
                f"largest batch {self.batch:,}, in multiples of {self.multiple_of:,}; {len(self.trials)} tried"
                + ", nothing larger" * is_end,
                "",
                *_trials_table(self.trials),
                "",
                str(self.fit),
            ]
        )


def _trials_table(trials: Sequence[tuple[int, Fit]]) -> list[str]:
    rows = [("batch", "per device", "to spare", "fits", "most of it")]
    for batch, fit in sorted(trials, key=lambda trial: trial[0]):
        peak, spare, most = "" if fit.peak_bytes is None else bytes_text(fit.peak_bytes), "", "the compiler refuses"
        if fit.memory is not None and fit.headroom_bytes is not None:
            spare = bytes_text(fit.headroom_bytes)
            name, nbytes = fit.memory.largest_share
            most = f"{name} {nbytes / max(fit.memory.peak_bytes, 1):.0%}"
        rows.append((f"{batch:,}", peak, spare, "yes" if fit else "no", most))
    return aligned(rows, (0, 1, 2))


def fits(
    fn: Callable[..., Any],
    *args: Any,
    budget: float | str | None = None,
    mesh: AnyMesh | None = None,
    target: Target | str = "cpu",
    reserve: float | str = 0,
    plan: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    roles: Any = None,
    axis_types: AxisTypes = "auto",
) -> Fit:
    """Compiles a function for a target, and returns whether a device has the memory for it. Nothing runs.

    **Arguments:**

    - `fn`, `args`: the function and its arguments, which may be shapes, as in `audit`.
    - `budget`: what a device may use: bytes, or a string such as `"80GB"` or `"40 GiB"`. `None`: the memory on the
        sheet of the target's hardware. CPUs have no real one, so the budget is required there.
    - `mesh`: the axes to compile for; by default the mesh of the plan or of the arrays, else the mesh in force.
    - `target`: what to compile for: a `Target`, or `"cpu"`, `"tpu:v5e:4x4"`, `"cuda:h100:8"`.
    - `reserve`: how much of the budget to keep free, for what else is on the device; bytes or a string.
    - `plan`, `in_shardings`, `out_shardings`, `donate_argnums`, `roles`, `axis_types`: as in `audit`.

    **Returns:**

    A `shardrules.reports.Fit`, which is true if the function fits. A program that the compiler itself refuses does not
    fit any budget.

    **Raises:**

    `HardwareError` for CPUs without a budget; `ConfigError` for bad numbers of bytes; else as `audit`.

    ```python
    weights, batch = jnp.ones((256, 256)), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    mesh = sr.mesh_shape("data:8")
    fit = sr.fits(jnp.dot, batch, weights, budget="1 MiB", mesh=mesh, in_shardings=(P("data"), P()))
    assert fit and fit.memory.batch_bytes + fit.memory.parameters_bytes == (8 * 256 + 256 * 256) * 4
    ```
    """
    target = Target.parse(target)
    budget_bytes = _budget_bytes(target, budget, reserve)
    request = CompileRequest(fn, plan, in_shardings, out_shardings, donate_argnums, roles, axis_types)
    return _fit(request, args, request.mesh_for(mesh, lambda: args), target, budget_bytes)


def largest_batch(
    fn: Callable[..., Any],
    make_args: Callable[[int], tuple[Any, ...]],
    *,
    budget: float | str | None = None,
    mesh: AnyMesh | None = None,
    target: Target | str = "cpu",
    reserve: float | str = 0,
    multiple_of: int | None = None,
    at_least: int = 1,
    at_most: int | None = None,
    **options: Unpack[CompileOptions],
) -> BatchSearch:
    """Finds the largest batch with which a function fits a device, by compiling it for the target. Nothing runs.

    The largest batch has been compiled, and so has the next multiple, which does not fit, unless `at_most` ends the
    search. Memory is nearly linear in the batch, and the search uses that: most take 4 to 10 compiles. Where memory is
    not linear, or does not even grow with every step, it takes more.

    The batch is whatever `make_args` makes of it: the length of a sequence, or the number of layers, is also accepted.

    **Arguments:**

    - `fn`: the function, as in `audit`.
    - `make_args`: returns the tuple of its arguments, for instance `jax.ShapeDtypeStruct`s, for a batch size. It is
        called once for every size.
    - `budget`, `mesh`, `target`, `reserve`: as in `fits`.
    - `multiple_of`: only multiples of it are tried. By default, all batches that can be split as requested: `make_args`
        is called for two batches to see which dimensions grow, and the shardings of the arguments say what splits
        these. Where no sharding says how a growing dimension is split, it is the number of devices.
    - `at_least`: the smallest useful batch, with which the search starts.
    - `at_most`: the largest one.
    - `**options`: any of these, as in `fits`: `plan`, a rule or a plan for the arguments (a rule suits every batch, a
        plan only arguments that do not grow); `in_shardings` and `out_shardings`, the shardings of arguments and
        results; `donate_argnums`, the arguments that results may overwrite; `roles`, what each argument is;
        `axis_types`, the types of the mesh axes.

    **Returns:**

    A `shardrules.reports.BatchSearch`.

    **Raises:**

    `DoesNotFitError` if not even the smallest batch fits: it says by how much, and what to do. `ConfigError` if
    `make_args` returns the same shapes for every batch, or if no batch is within the bounds; `ConfigTypeError` if it
    does not return a tuple, or for an unknown option. Else as `fits`. Errors of `make_args`, or of `fn` for its
    arguments, get a note with the batch.

    ```python
    def loss(weights, batch):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    def arguments(batch):
        return jax.ShapeDtypeStruct((128, 512), jnp.float32), jax.ShapeDtypeStruct((batch, 128), jnp.float32)

    search = sr.largest_batch(
        jax.grad(loss), arguments, budget="4 MiB", mesh=sr.mesh_shape("data:8"), in_shardings=(P(), P("data"))
    )
    assert search.batch % 8 == 0 and search.fit and not dict(search.trials)[search.batch + 8]
    print(search)
    ```
    """
    # A TypedDict is checked by type checkers only.
    if unknown := [name for name in options if name not in CompileOptions.__annotations__]:
        near = suggest(unknown[0], [*inspect.getfullargspec(largest_batch).kwonlyargs, *CompileOptions.__annotations__])
        raise ConfigTypeError(f"largest_batch() got an unexpected keyword argument {unknown[0]!r}{near}")
    target = Target.parse(target)
    budget_bytes = _budget_bytes(target, budget, reserve)
    request = CompileRequest(fn, **options)
    least = integer("at_least", 1)(at_least)
    most = _MAX_BATCH if at_most is None else integer("at_most", 1)(at_most)
    make = functools.cache(functools.partial(_make_args, make_args))
    multiple = None if multiple_of is None else integer("multiple_of", 1)(multiple_of)
    mesh = request.mesh_for(mesh, lambda: make(_round_up(least, multiple or 1)))
    unit = _batch_unit(request, make, mesh) if multiple is None else multiple
    first = _round_up(least, unit)
    if first > most:
        raise ConfigError(
            f"no multiple of {unit} is between at_least={least} and at_most={most}: change multiple_of or raise at_most"
        )
    trials = _Trials(request, make, mesh, target, budget_bytes)
    _search(lambda units: trials.fit(units * unit), first // unit, most // unit)
    largest, last = trials.largest, max(trials.fits)
    if not largest:
        fit = trials.fits[first]
        raise DoesNotFitError(f"not even a batch of {first:,} fits. {fit}", fit.peak_bytes or 0)
    # Both sizes of the search were the same program: the answer would be the bound, whatever the budget.
    if last > first and _have_same_shapes(make(first), make(last)):
        raise ConfigError(
            f"make_args returns the same shapes for batch {first:,} and for batch {last:,}: it has to use its "
            "argument. If it rounds batches up, set multiple_of to what it rounds to"
        )
    if largest > _MAX_BATCH - unit and at_most is None:
        raise ConfigError(f"even a batch of {largest:,} fits: set at_most, or have make_args use its argument")
    return BatchSearch(largest, unit, tuple(trials.fits.items()))


@final
@attrs.define(eq=False)
class _Trials:
    request: CompileRequest
    make: Callable[[int], tuple[Any, ...]]
    mesh: AnyMesh
    target: Target
    budget_bytes: int
    fits: dict[int, Fit] = attrs.field(factory=dict)

    def fit(self, batch: int) -> Fit:
        args = self.make(batch)
        # If make_args rounds batches up, several of them are one program, which need not be compiled again.
        fit = next((fit for other, fit in self.fits.items() if _have_same_shapes(args, self.make(other))), None)
        if fit is None:
            with _noting_batch(batch):
                fit = _fit(self.request, args, self.mesh, self.target, self.budget_bytes)
        self.fits[batch] = fit
        return fit

    @property
    def largest(self) -> int:
        return max((batch for batch, fit in self.fits.items() if fit), default=0)


def _budget_bytes(target: Target, budget: float | str | None, reserve: float | str) -> int:
    # The CPU's sheet is for modelled times; its memory is a placeholder.
    if budget is None and target.platform == "cpu":
        raise HardwareError(
            f"{target} has no memory of its own: the sheet of the CPU describes no real machine. Pass a budget, such "
            "as budget='40 GiB', or a target with a chip, such as 'cuda:h100:8'"
        )
    available = target.hardware.memory_bytes if budget is None else read_bytes("budget", budget)
    return usable_bytes(available, read_bytes("reserve", reserve))


def _fit(request: CompileRequest, args: tuple[Any, ...], mesh: AnyMesh, target: Target, budget_bytes: int) -> Fit:
    name, mesh_name = name_of(request.fn), mesh_text(mesh)
    try:
        result = request.compile(args, mesh, target)
    except DoesNotFitError as error:
        return Fit(name, target, mesh_name, budget_bytes, error.needed_bytes or None, refusal=str(error))
    program, sizes = read_program(result.compiled.text), mesh_sizes(result.mesh)
    memory = AuditedArguments(result.compiled, program, result.arguments.arrays, result.roles, sizes).memory
    return Fit(name, target, mesh_name, budget_bytes, memory.peak_bytes, memory)


def _make_args(make_args: Callable[[int], tuple[Any, ...]], batch: int) -> tuple[Any, ...]:
    with _noting_batch(batch):
        args = make_args(batch)
        if not isinstance(args, tuple):
            raise ConfigTypeError(
                f"make_args must return a tuple of arguments, got {type(args).__name__}: {args!r:.60}"
            )
        return args


@contextlib.contextmanager
def _noting_batch(batch: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's functions may raise anything, and all of it is raised again
        error.add_note(
            f"while trying a batch of {batch}; multiple_of, at_least and at_most set which batches are tried"
        )
        raise


def _round_up(batch: int, unit: int) -> int:
    return -(-batch // unit) * unit


def _have_same_shapes(args: tuple[Any, ...], other_args: tuple[Any, ...]) -> bool:
    # Leaves that are not arrays are static and part of the program, so they have to be equal themselves.
    leaves, other_leaves = ([array_kind(leaf) or leaf for leaf in jtu.tree_leaves(tree)] for tree in (args, other_args))
    return leaves == other_leaves


def _batch_unit(request: CompileRequest, make: Callable[[int], tuple[Any, ...]], mesh: AnyMesh) -> int:
    """The smallest number whose multiples can all be split as requested, as far as the arguments tell."""
    sizes = mesh_sizes(mesh)
    device_count = math.prod(sizes.values())
    pair = []
    # Every split divides the number of devices, so that both batches are sound.
    for batch in (device_count, 2 * device_count):
        args = make(batch)
        with _noting_batch(batch):
            pair.append(read_arguments(request.fn, args, mesh, request.plan, request.in_shardings).arrays)
    unit = 1
    if len(pair[0]) != len(pair[1]):
        return device_count
    for small, large in zip(*pair, strict=True):
        if small.shape == large.shape:
            continue
        if small.spec is None or len(small.shape) != len(large.shape):
            return device_count
        for old, new, entry in zip(small.shape, large.shape, entries(small.spec, len(small.shape)), strict=True):
            if old == new:
                continue
            if entry is UNCONSTRAINED:
                return device_count
            ways = math.prod(sizes[name] for name in entry)
            # A flat dimension of tokens grows by the length of a sequence for each example. If that shares factors with
            # the ways of the split, fewer examples are enough.
            growth, rest = divmod(old, device_count)
            unit = math.lcm(unit, device_count if rest or new != 2 * old else ways // math.gcd(ways, growth))
    return unit


def _search(fit_of: Callable[[int], Fit], least: int, most: int) -> None:
    """Tries sizes until one fits and the next does not, or there is no next."""
    fits = {least: fit_of(least)}
    width, slow_rounds = math.inf, 0
    while fits[least]:
        # Whatever fits may be an answer, so the bracket starts at the largest that does, even if a smaller one did not.
        low = max(size for size, fit in fits.items() if fit)
        high = min((size for size in fits if size > low), default=None)
        if low == most or high == low + 1:
            return
        if high is None:
            # Nothing is too large yet. A line through the last two sizes guesses where the budget is met, and a line
            # from the first size if that one falls.
            before = max((size for size in fits if size < low), default=low)
            farthest = _MAX_GROWTH * low
            guess = 2 * low if before == low else _crossing(fits, before, low, _crossing(fits, least, low, farthest))
            size = min(max(guess, low + 1), farthest, most)
        else:
            # If memory is not linear, the line through both ends may creep towards one of them. After two rounds
            # that did not halve the bracket, bisect.
            slow_rounds = slow_rounds + 1 if 2 * (high - low) > width else 0
            middle = (low + high) // 2
            guess = middle if slow_rounds == 2 else _crossing(fits, low, high, middle)
            slow_rounds, width = slow_rounds % 2, high - low
            size = min(max(guess, low + 1), high - 1)
        fits[size] = fit_of(size)


def _crossing(fits: Mapping[int, Fit], size: int, next_size: int, default: int) -> int:
    """The size at which the line through two sizes meets the budget; `default` if it has no slope or no figures."""
    fit, peak, next_peak = fits[size], fits[size].peak_bytes, fits[next_size].peak_bytes
    if peak is None or next_peak is None or next_peak <= peak:
        return default
    return size + (fit.budget_bytes - peak) * (next_size - size) // (next_peak - peak)
