"""The programs that are timed to learn what a device reaches.

An operation is repeated in one compiled program: every round reads something that the round before wrote, so that no
compiler drops it. What a call and an empty round take is measured once, and subtracted. Programs are compiled, and have
run once, before they are timed. Of several runs the fastest counts: whatever else a machine does makes runs slower, and
nothing makes them faster.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardrules.programs.machine.measured import ROW_BYTES

Step: TypeAlias = Callable[..., Any]
"""A round: takes what the round before returned, and constants; returns the same types."""

_REPEATS = 5
"""The times that each program is timed, chosen by hand."""

_EMPTY_ROUNDS = (16, 144)
"""The empty rounds of the two programs whose times tell a call and a round apart. Chosen by hand."""

_UNROLLED = 8
"""The matmuls in the body of a loop, chosen by hand. GPUs start the next kernels while one runs, so that a round of a
loop takes no time beside a long kernel, but more than a short one: a single matmul of 1,024 cubed is lost in that."""

_LAUNCHES = (32, 160)
"""The lengths of the two chains of tiny kernels whose difference is the time of a launch. Chosen by hand: longer
ones take longer to compile."""

_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f32_highest": jnp.float32,
    "f8": jnp.float8_e4m3fn,
    "s8": jnp.int8,
}
"""The dtypes of the kinds of multiplication in a sheet of hardware."""

_RESULTS: dict[str, Any] = {"f8": jnp.bfloat16, "s8": jnp.int32}
"""The dtypes of their results, where they differ."""


@final
@attrs.frozen
class Overhead:
    """The time of a program that repeats nothing: a call, and each of its rounds."""

    call_seconds: float
    round_seconds: float


def device_overhead(device: Any, end: float) -> Overhead:
    """Measures calls and empty rounds on one device. `end` is when to stop repeating, as below."""
    x = jax.device_put(np.ones(8, np.float32), SingleDeviceSharding(device))
    return _overhead(lambda carry: (_touched(carry, 1.0), carry[1]), (x, x + 0), (), end)


def matmul_seconds(
    kind: str, dims: tuple[int, int, int], device: Any, rounds: int, overhead: Overhead, end: float
) -> float:
    """Returns what a matmul of (m, k) by (k, n), given as (m, n, k), takes on a device."""
    m, n, k = dims
    dtype = _DTYPES[kind]
    sharding = SingleDeviceSharding(device)
    a, b = (jax.device_put(_noise(shape, dtype), sharding) for shape in ((m, k), (k, n)))
    y = jax.device_put(np.zeros((m, n), _RESULTS.get(kind, dtype)), sharding)

    def multiply(carry: Any, b: Any) -> Any:
        a, y = carry
        a = a.at[0, 0].set(y[0, 0].astype(a.dtype))
        precision = lax.Precision.HIGHEST if kind == "f32_highest" else None
        return a, jnp.dot(a, b, precision=precision, preferred_element_type=y.dtype)

    return _round_seconds(multiply, (a, y), (b,), rounds, overhead, end, unroll=_UNROLLED)


def memory_seconds(access: str, nbytes: int, device: Any, rounds: int, overhead: Overhead, end: float) -> float:
    """Returns what a pass over arrays takes that reads and writes `nbytes` together.

    `"copy"` writes as much as it reads, `"read"` only reads, and `"gather"` copies rows from any positions.
    """
    sharding = SingleDeviceSharding(device)
    size = max(2, nbytes // 4)
    if access == "gather":
        rows = max(2, nbytes // 2 // ROW_BYTES)
        order = np.random.default_rng(0).permutation(rows).astype(np.int32)
        table, indices = (
            jax.device_put(array, sharding) for array in (np.zeros((rows, ROW_BYTES // 4), np.float32), order)
        )

        def gather(carry: Any, table: Any) -> Any:
            indices, y = carry
            indices = indices.at[0].set(y[0, 0].astype(indices.dtype))
            return indices, jnp.take(table, indices, axis=0, mode="clip")

        return _round_seconds(gather, (indices, table + 0), (table,), rounds, overhead, end)
    factor = jax.device_put(np.ones((), np.float32), sharding)
    array = jax.device_put(np.ones(size if access == "read" else size // 2, np.float32), sharding)
    if access == "read":
        return _round_seconds(lambda c, x: jnp.sum(x * c) / size, factor, (array,), rounds, overhead, end)
    return _round_seconds(lambda x, c: x * c, array, (factor,), rounds, overhead, end)


def launch_seconds(device: Any, end: float) -> float:
    """Returns what the smallest kernel takes that waits for another one."""
    sharding = SingleDeviceSharding(device)
    w = jax.device_put(_noise((16, 16), jnp.float32), sharding)

    def chain(length: int) -> Step:
        def multiply(x: Any, w: Any) -> Any:
            for _ in range(length):
                x = x @ w  # no compiler fuses matmuls with each other
            return x

        return multiply

    short, long = (_fastest(_compiled(chain(length), (w, w)), (w, w), end) for length in _LAUNCHES)
    return max(0.0, long - short) / (_LAUNCHES[1] - _LAUNCHES[0]) or long / _LAUNCHES[1]


def group_overhead(devices: Sequence[Any], end: float) -> Overhead:
    """Measures calls and empty rounds on several devices at once."""
    mesh = _line(devices)
    x, y, scale = (_on_all(np.full(8, value, np.float32), mesh) for value in (1, 1, 0.5))
    return _overhead(lambda carry, scale: (_touched(carry, scale[0]), carry[1]), (x, y), (scale,), end, mesh)


def collective_seconds(
    kind: str, payload_bytes: int, devices: Sequence[Any], rounds: int, overhead: Overhead, end: float
) -> float:
    """Returns what a collective over all of these devices takes. The bytes are those of `Collective.payload_bytes`."""
    count, mesh = len(devices), _line(devices)
    # In rows, as large arrays are: the compiler for TPUs scatters them, and not the elements of a vector.
    columns = ROW_BYTES // 4 if payload_bytes >= count * ROW_BYTES else 1
    rows = max(1, payload_bytes // 4 // columns // count) * count
    operand, result = {"all-gather": (rows // count, rows), "reduce-scatter": (rows, rows // count)}.get(
        kind, (rows, rows)
    )
    pairs = [(index, (index + 1) % count) for index in range(count)]
    collectives: dict[str, Step] = {
        "all-gather": lambda x: lax.all_gather(x, "d", tiled=True),
        "all-reduce": lambda x: lax.psum(x, "d"),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "d", tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, "d", pairs),
    }

    def send(carry: Any, scale: Any) -> Any:
        # A row differs from device to device: what is equal on all of them need not be sent.
        x = _touched(carry, scale[0])
        return x, collectives[kind](x)

    x, y = (_on_all(np.ones((local, columns), np.float32), mesh) for local in (operand, result))
    scale = _on_all(np.full(1, 0.5, np.float32), mesh)
    return _round_seconds(send, (x, y), (scale,), rounds, overhead, end, mesh)


def host_link_seconds(direction: str, nbytes: int, device: Any, end: float) -> float:
    """Returns what a copy `"to device"` or `"to host"` takes, from memory of the host that copies are fastest from."""
    on_device = SingleDeviceSharding(device)
    array = np.ones(max(1, nbytes // 4), np.float32)
    if "pinned_host" in {memory.kind for memory in device.addressable_memories()}:
        on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
        source, goal = (on_host, on_device) if direction == "to device" else (on_device, on_host)
        start = jax.block_until_ready(jax.device_put(array, source))
        return _fastest(lambda x: jax.device_put(x, goal, may_alias=False), (start,), end)
    if direction == "to device":
        return _fastest(lambda x: jax.device_put(x, on_device, may_alias=False), (array,), end)
    # An array keeps what it has copied to the host: copy a new one each time.
    arrays = iter(jax.block_until_ready([jax.device_put(array, on_device) for _ in range(_REPEATS + 1)]))
    return _fastest(lambda: np.array(next(arrays)), (), end)


def _noise(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Values below 1: a device may be faster with zeros, and results must not overflow from round to round."""
    values = np.random.default_rng(0).uniform(-0.9, 0.9, 2**16)
    return np.resize((values * 100 if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype), shape)


def _line(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.asarray(devices), ("d",))


def _on_all(local: np.ndarray, mesh: Mesh) -> Any:
    """An array of which each device of the mesh has these values."""
    shape = (local.shape[0] * mesh.size, *local.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P("d")), lambda _: local)


def _touched(carry: Any, scale: Any) -> Any:
    """The first of two arrays, with an element or a row that depends on the second."""
    x, y = carry
    return x.at[0].set(y[0] * scale)


def _overhead(step: Step, carry: Any, constants: tuple[Any, ...], end: float, mesh: Mesh | None = None) -> Overhead:
    few, many = (_program_seconds(step, carry, constants, rounds, end, mesh) for rounds in _EMPTY_ROUNDS)
    each = max(0.0, many - few) / (_EMPTY_ROUNDS[1] - _EMPTY_ROUNDS[0])
    return Overhead(max(0.0, few - each * _EMPTY_ROUNDS[0]), each)


def _round_seconds(
    step: Step,
    carry: Any,
    constants: tuple[Any, ...],
    rounds: int,
    overhead: Overhead,
    end: float,
    mesh: Mesh | None = None,
    unroll: int = 1,
) -> float:
    """The time of a round beyond an empty one, and half of it at least.

    Where most of a round is what an empty one takes, the difference is noise, and too small on devices that start
    kernels ahead. With `unroll`, the small kernel that makes each round depend on the last is not subtracted.
    """
    seconds = _program_seconds(step, carry, constants, rounds, end, mesh, unroll) / rounds
    more = seconds - overhead.call_seconds / rounds - overhead.round_seconds / unroll
    return max(more, seconds / 2)


def _program_seconds(
    step: Step,
    carry: Any,
    constants: tuple[Any, ...],
    rounds: int,
    end: float,
    mesh: Mesh | None,
    unroll: int = 1,
) -> float:
    def run(carry: Any, *constants: Any) -> Any:
        return lax.fori_loop(0, rounds, lambda _, carry: step(carry, *constants), carry, unroll=unroll)

    if mesh is not None:
        run = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    # Each run goes on with what the last one returned, in the same memory: nothing is copied.
    compiled = _compiled(run, (carry, *constants), donated=(0,))
    state = jax.tree.map(lambda array: array + 0, carry)

    def again() -> Any:
        nonlocal state
        state = compiled(state, *constants)
        return state

    return _fastest(again, (), end)


def _compiled(fn: Step, args: tuple[Any, ...], donated: tuple[int, ...] = ()) -> Step:
    return jax.jit(fn, donate_argnums=donated).lower(*args).compile()


def _fastest(run: Step, args: tuple[Any, ...], end: float) -> float:
    """The least time of several runs, after one that warms up. Past `end` a single one counts."""
    jax.block_until_ready(run(*args))
    fastest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        fastest = min(fastest, time.perf_counter() - start)
        if time.monotonic() >= end:
            break
    return fastest
