"""Will it fit, and how large may the batch be? Asked of the compiler of the target, for any function.

No formula knows what a compiler keeps in memory: it fuses, reorders and recomputes, and does other things once memory
is short. So every size that is answered for has been compiled. Formulas only choose which one to compile next.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax.tree_util as jtu

from shardrules.analysis.audits.evidence import Evidence, MemoryUse
from shardrules.analysis.audits.surprises import SMALLER
from shardrules.analysis.compiling.arguments import read_arguments
from shardrules.analysis.compiling.compile import name_of
from shardrules.analysis.compiling.question import Question
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.placed import mesh_for
from shardrules.analysis.program.program import read_program
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.errors import DoesNotFitError, HardwareError, SpecError, TreeError
from shardrules.core.fields import integer, read_bytes
from shardrules.core.spec import UNCONSTRAINED, entries
from shardrules.core.tree import array_kind
from shardrules.core.views.table import aligned
from shardrules.mesh.creation import AxisTypes

_GROWTH = 16
"""How many times what fits the next size may be: memory of small batches says little of that of large ones."""

_MOST = 2**40
"""A batch that nobody has: where it fits, memory does not depend on the batch."""


@final
@attrs.frozen
class Fit:
    """Whether a function fits a device, and by how much. It is true where it does.

    **Arguments:**

    - `name`: the function's.
    - `target`, `mesh`: what it was compiled for.
    - `budget_bytes`: what a device may use.
    - `peak_bytes`: what one needs. Where the compiler refuses, what that says, which it rounds; `None` where it says
        nothing.
    - `memory`: the same, by what it is for; `None` where the compiler refuses.
    - `refusal`: what the compiler says where it refuses. That of TPUs does so for more memory than the device has.

    ```python
    found = sr.fits(lambda x: x + 1, np.ones((64, 16), np.float32), budget="1 KiB", mesh=sr.mesh_shape("data:8"))
    assert not found and (found.peak_bytes, found.headroom_bytes) == (8192, -7168)
    ```
    """

    name: str
    target: Target
    mesh: str
    budget_bytes: int
    peak_bytes: int | None
    memory: MemoryUse | None = None
    refusal: str = ""

    def __bool__(self) -> bool:
        return self.memory is not None and self.memory.peak_bytes <= self.budget_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What is to spare; below 0, what is missing. `None` where the compiler refuses: no budget helps there."""
        return None if self.memory is None else self.budget_bytes - self.memory.peak_bytes

    def __str__(self) -> str:
        where = f"{self.name} on {self.target}, mesh {self.mesh},"
        if self.memory is None or self.headroom_bytes is None:
            return f"{where} does not fit: {self.refusal}"
        room = f"a device needs {bytes_text(self.memory.peak_bytes)} of {bytes_text(self.budget_bytes)}"
        if self:
            return f"{where} fits: {room}, {bytes_text(self.headroom_bytes)} to spare\n  {_shares(self.memory)}"
        return (
            f"{where} does not fit: {room}, {bytes_text(-self.headroom_bytes)} too much\n"
            f"  {_shares(self.memory)}\n  -> {SMALLER[_largest(self.memory)]}"
        )


def _shares(memory: MemoryUse) -> str:
    order = sorted(memory.shares().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)} ({size / memory.peak_bytes:.0%})" for name, size in order if size)


def _largest(memory: MemoryUse) -> str:
    return max(memory.shares().items(), key=lambda item: item[1])[0]


@final
@attrs.frozen
class BatchSearch:
    """The largest batch that fits, and how it was found. It prints as a table.

    **Arguments:**

    - `batch`: the largest batch that fits.
    - `multiple_of`: what the batches that were tried are multiples of.
    - `tried`: each batch that was tried, with its `Fit`, in the order of the search.

    ```python
    def arguments(batch):
        return (jax.ShapeDtypeStruct((batch, 256), jnp.float32),)

    mesh = sr.mesh_shape("data:8")
    found = sr.largest_batch(lambda x: x + 1, arguments, budget="1 MiB", mesh=mesh, in_shardings=P("data"))
    assert found.batch == 4096 and found.fit.headroom_bytes == 0
    assert [batch for batch, fit in found.tried if not fit] == [4104]
    ```
    """

    batch: int
    multiple_of: int
    tried: tuple[tuple[int, Fit], ...]

    @property
    def fit(self) -> Fit:
        """That of the largest batch."""
        return dict(self.tried)[self.batch]

    def __str__(self) -> str:
        beyond = any(batch > self.batch for batch, _ in self.tried)
        ended = "" if beyond else ", nothing larger"
        return "\n".join(
            [
                f"largest batch {self.batch:,}, of multiples of {self.multiple_of:,}; {len(self.tried)} tried{ended}",
                "",
                *_table(self.tried),
                "",
                str(self.fit),
            ]
        )


def _table(tried: Sequence[tuple[int, Fit]]) -> list[str]:
    rows = [("batch", "per device", "to spare", "fits", "most of it")]
    for batch, fit in sorted(tried, key=lambda item: item[0]):
        peak, spare, most = "" if fit.peak_bytes is None else bytes_text(fit.peak_bytes), "", "the compiler refuses"
        if fit.memory is not None and fit.headroom_bytes is not None:
            spare = bytes_text(fit.headroom_bytes)
            most = f"{_largest(fit.memory)} {max(fit.memory.shares().values()) / max(fit.memory.peak_bytes, 1):.0%}"
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
    """Compiles a function for a target, and says whether a device has the memory for it. Nothing is run.

    **Arguments:**

    - `fn`, `args`: the function and its arguments; shapes will do. As in `ShardingAnalyzer.audit`.
    - `budget`: what a device may use: bytes, or a text such as `"80GB"` or `"40 GiB"`. `None`: what the sheet of the
        target's hardware says it has. That of the CPU is no real machine's, so there it has to be named.
    - `mesh`: the axes to compile for; by default those of the plan or of the arrays, else those of the mesh in force.
    - `target`: what to compile for: a `Target`, or `"cpu"`, `"tpu:v5e:4x4"`, `"cuda:h100:8"`.
    - `reserve`: how much of the budget to keep free, for what else is on the device; as `budget`.
    - `plan`, `in_shardings`, `out_shardings`, `donate_argnums`, `roles`, `axis_types`: as in `ShardingAnalyzer.audit`.

    **Returns:**

    A `Fit`, which is true if the function fits. A program that the compiler itself refuses does not, whatever the
    budget.

    **Raises:**

    `HardwareError` for CPUs without a budget; `SpecError` for what is no number of bytes; else as
    `ShardingAnalyzer.audit`.

    ```python
    weights, batch = jnp.ones((256, 256)), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    mesh = sr.mesh_shape("data:8")
    found = sr.fits(jnp.dot, batch, weights, budget="1 MiB", mesh=mesh, in_shardings=(P("data"), P()))
    assert found and found.memory.batch_bytes + found.memory.parameters_bytes == (8 * 256 + 256 * 256) * 4
    ```
    """
    there = Target.parse(target)
    room = _budget(there, budget, reserve)
    question = Question(fn, plan, in_shardings, out_shardings, donate_argnums, roles, axis_types)
    return _fit(question, args, _mesh(mesh, plan, lambda: args), there, room)


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
    plan: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    roles: Any = None,
    axis_types: AxisTypes = "auto",
) -> BatchSearch:
    """Finds the largest batch with which a function fits a device, by compiling it for the target. Nothing is run.

    What is found has been compiled, and so has the next multiple, which does not fit, unless `at_most` ends the search.
    Memory is nearly a line in the batch, and that is used to guess: most searches take 4 to 10 compiles. It need not be
    one, nor even grow with every step: then it takes more.

    The batch is whatever `make_args` takes it for. The length of a sequence will do, or the number of layers.

    **Arguments:**

    - `fn`: the function, as in `ShardingAnalyzer.audit`.
    - `make_args`: makes the tuple of its arguments for a batch of some size, of `jax.ShapeDtypeStruct`s for instance.
        It is called once for every size that is tried.
    - `budget`, `mesh`, `target`, `reserve`: as in `fits`.
    - `multiple_of`: the batches to try are multiples of it. By default all batches that can be split as asked:
        `make_args` is called for two batches, to see which dimensions grow, and what splits these is found in the
        shardings of the arguments. Where nobody says how one that grows is split, it is the size of the mesh.
    - `at_least`: the smallest batch that is worth having, with which the search starts.
    - `at_most`: the largest one.
    - `plan`, `in_shardings`, `out_shardings`, `donate_argnums`, `roles`, `axis_types`: as in `ShardingAnalyzer.audit`.
        A rule or a spec suits every batch; a plan only those arguments that stay as they are.

    **Returns:**

    A `BatchSearch`.

    **Raises:**

    `DoesNotFitError` if not even the smallest batch fits: it says by how much, and what to do. `TreeError` if
    `make_args` returns no tuple, or the same shapes whatever the batch. `SpecError` for bounds with no batch between
    them. Else as `fits`; what `make_args` raises, or `fn` for its arguments, has a note with the batch.

    ```python
    def loss(weights, batch):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    def arguments(batch):
        return jax.ShapeDtypeStruct((128, 512), jnp.float32), jax.ShapeDtypeStruct((batch, 128), jnp.float32)

    found = sr.largest_batch(
        jax.grad(loss), arguments, budget="4 MiB", mesh=sr.mesh_shape("data:8"), in_shardings=(P(), P("data"))
    )
    assert found.batch % 8 == 0 and found.fit and not dict(found.tried)[found.batch + 8]
    print(found)
    ```
    """
    there = Target.parse(target)
    room = _budget(there, budget, reserve)
    unit = None if multiple_of is None else integer("multiple_of", 1)(multiple_of)
    least = integer("at_least", 1)(at_least)
    most = _MOST if at_most is None else integer("at_most", 1)(at_most)
    make = functools.cache(functools.partial(_made, make_args))
    where = _mesh(mesh, plan, lambda: make(_up(least, unit or 1)))
    if unit is None:
        unit = _unit(fn, make, where, plan, in_shardings)
    first = _up(least, unit)
    if first > most:
        raise SpecError(
            f"there is no multiple of {unit} from at_least={least} to at_most={most}: name another multiple_of, or let "
            "at_most be larger"
        )
    question = Question(fn, plan, in_shardings, out_shardings, donate_argnums, roles, axis_types)
    tried: dict[int, Fit] = {}

    def fit_of(units: int) -> Fit:
        batch = units * unit
        args = make(batch)
        # Where make_args rounds batches up, several are one program.
        like = next((fit for other, fit in tried.items() if _alike(args, make(other))), None)
        with _naming(batch):
            tried[batch] = _fit(question, args, where, there, room) if like is None else like
        return tried[batch]

    _search(fit_of, first // unit, most // unit)
    found, last = max((batch for batch, fit in tried.items() if fit), default=0), max(tried)
    if not found:
        raise DoesNotFitError(f"not even a batch of {first:,} fits. {tried[first]}", tried[first].peak_bytes or 0)
    if last > first and _alike(make(first), make(last)):
        raise TreeError(
            f"make_args gives the same shapes for batch {first:,} and for batch {last:,}: it has to use its argument. "
            "If it rounds batches up, give multiple_of the number that it rounds to"
        )
    if found > _MOST - unit and at_most is None:
        raise TreeError(f"even a batch of {found:,} fits: name at_most, or have make_args use its argument")
    return BatchSearch(found, unit, tuple(tried.items()))


def _budget(target: Target, budget: float | str | None, reserve: float | str) -> int:
    kept = read_bytes("reserve", reserve)
    if budget is None and target.platform == "cpu":
        raise HardwareError(
            f"{target} has no memory of its own: the sheet of the CPU is no real machine's. Name a budget, such as "
            "budget='40 GiB', or a target with a chip, such as 'cuda:h100:8'"
        )
    most = target.hardware.memory_bytes if budget is None else read_bytes("budget", budget)
    if kept > most:
        raise SpecError(f"reserve is {bytes_text(kept)}, more than the {bytes_text(most)} that there are")
    return most - kept


def _mesh(mesh: AnyMesh | None, plan: Any, args: Callable[[], tuple[Any, ...]]) -> AnyMesh:
    named = mesh if mesh is not None else getattr(plan, "mesh", None)  # specs and most rules have none
    return mesh_for(named, args, "there is no mesh to compile for: pass mesh=sr.mesh_shape('data:8')")


def _fit(question: Question, args: tuple[Any, ...], mesh: AnyMesh, target: Target, room: int) -> Fit:
    told = functools.partial(Fit, name_of(question.fn), target, mesh_text(mesh), room)
    try:
        answer = question.ask(args, mesh, target)
    except DoesNotFitError as error:
        return told(error.needed_bytes or None, refusal=str(error))
    compiled, program = answer.compiled, read_program(answer.compiled.text)
    arrays, sizes = answer.arguments.arrays, mesh_sizes(answer.mesh)
    memory = Evidence(compiled, program, arrays, answer.roles, (), (), sizes, target.hardware).memory
    return told(memory.peak_bytes, memory)


def _made(make_args: Callable[[int], tuple[Any, ...]], batch: int) -> tuple[Any, ...]:
    with _naming(batch):
        args = make_args(batch)
        if not isinstance(args, tuple):
            raise TreeError(f"make_args returns the tuple of arguments, got {type(args).__name__}: {args!r:.60}")
        return args


@contextlib.contextmanager
def _naming(batch: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while trying a batch of {batch}: multiple_of, at_least and at_most say which are tried")
        raise


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return [_kind(leaf) for leaf in jtu.tree_leaves(one)] == [_kind(leaf) for leaf in jtu.tree_leaves(other)]


def _kind(leaf: Any) -> Any:
    return array_kind(leaf) or leaf


def _unit(
    fn: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], mesh: AnyMesh, plan: Any, in_shardings: Any
) -> int:
    """The smallest number of which every multiple can be split as asked, as far as the arguments tell."""
    sizes = mesh_sizes(mesh)
    whole = math.prod(sizes.values())
    two = []
    for batch in (whole, 2 * whole):
        args = make(batch)
        with _naming(batch):
            two.append(read_arguments(fn, args, mesh, plan, in_shardings).arrays)
    unit = 1
    if len(two[0]) != len(two[1]):
        return whole
    for small, large in zip(*two, strict=True):
        if small.shape == large.shape:
            continue
        if small.spec is None or len(small.shape) != len(large.shape):
            return whole
        for old, new, entry in zip(small.shape, large.shape, entries(small.spec, len(small.shape)), strict=True):
            if old == new:
                continue
            if entry is UNCONSTRAINED:
                return whole
            ways = math.prod(sizes[name] for name in entry)
            growth, rest = divmod(old, whole)  # a flat dimension of tokens grows by more than one for one more sequence
            unit = math.lcm(unit, whole if rest or new != 2 * old else ways // math.gcd(ways, growth))
    return unit


def _search(fit_of: Callable[[int], Fit], least: int, most: int) -> None:
    """Tries sizes until one fits and the next does not, or there is no next."""
    tried = {least: fit_of(least)}
    width, slow = math.inf, 0
    while tried[least]:
        low = max(size for size, fit in tried.items() if fit)
        high = min((size for size in tried if size > low), default=None)
        if low == most or high == low + 1:
            return
        if high is None:
            before = max((size for size in tried if size < low), default=low)
            far = _GROWTH * low
            guess = 2 * low if before == low else _met(tried, before, low, _met(tried, least, low, far))
            size = min(max(guess, low + 1), far, most)
        else:
            # Where memory is no line, the line through both ends may creep: halve then.
            slow = slow + 1 if 2 * (high - low) > width else 0
            middle = (low + high) // 2
            guess = middle if slow == 2 else _met(tried, low, high, middle)
            slow, width = slow % 2, high - low
            size = min(max(guess, low + 1), high - 1)
        tried[size] = fit_of(size)


def _met(tried: Mapping[int, Fit], one: int, other: int, otherwise: int) -> int:
    """The size at which the line through two sizes meets the budget."""
    fit, peak, next_peak = tried[one], tried[one].peak_bytes, tried[other].peak_bytes
    if peak is None or next_peak is None or next_peak <= peak:
        return otherwise
    return one + (fit.budget_bytes - peak) * (other - one) // (next_peak - peak)
