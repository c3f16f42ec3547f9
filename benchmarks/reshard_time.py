"""How much time and memory does it take to move arrays to another mesh, compared with JAX's own ways and a floor?

**Method.** float32 arrays on 8 virtual CPU devices, split by rows over all of them, move to another mesh where they are
split by columns: one array of 1 GiB to 8 devices, to 4 with two copies, and to the first 4 of the 8; and 1,000 arrays
of 256 KiB to 8. Every contestant has its own processes. The first call is measured, in a process that has a backend but
has not moved anything: its seconds, to the end of the move, and its memory, the peak of the process over its size just
before, when freed memory has been returned to the system. (A virtual machine is made to have that memory first: getting
it from its host takes longer than the moves, and differs between calls by a factor of twenty.) In every round each
contestant has one process, in rotating order; its seconds are divided by the others' in the same round, its memory
by the bytes of the arrays, and medians over the rounds are shown. After the timing, every bit that arrived is compared
with what was sent.

- `floor`: NumPy writes each byte of the destination once, in one thread, from views of the old shards. Copies on a
    second device are written only once;
- `device_put`: one `jax.device_put(tree, shardings)`;
- `jit`: one `jax.jit(identity, out_shardings=...)` of the whole tree, which cannot move to fewer devices. For two
    copies and for 1,000 arrays it is slow, so it has a single process;
- `jit, in hundreds`: the same for a tenth of the arrays at a time, each awaited;
- `reshard`: `sr.reshard(tree, shardings)`;
- `reshard, by pieces`: the same as on devices with separate memories, such as GPUs and TPUs: arrays are sliced on
    devices, sent and joined. CPU devices do not need that;
- `intermediate`: `pathways.reshard_with_intermediate_sharding`, where `pathways.find_intermediate_sharding` finds one.

With `--donate` the 1,000 arrays, and 62 of 4 MiB, move once more and are deleted on the way, with 64 MiB in flight
(`max_bytes_in_flight`): the peak should be about that much, however many arrays there are. There malloc
(`MALLOC_MMAP_THRESHOLD_`) gets each shard from the system and returns it: by default glibc keeps memory that a thread
frees for that thread, so a process may keep nearly all memory of arrays that are deleted in small parts. The memory
that remains at the end is shown, too: most of it is JAX's and Python's data about each shard, and an array has eight.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, one round, other work on the machine:
read the seconds as ratios. All targets met.

| time over `device_put`, memory over the arrays | to 8 | to 4, twice | to 4 of 8 | 1,000 to 8 |
|---|---|---|---|---|
| `device_put` | 1.00, 2.00x | 1.00, 3.00x | 1.00, 2.00x | 1.00, 2.18x |
| `jit` | 1.90, 2.67x | 8.67, 9.76x | | 19.1, 2.68x |
| `reshard` | 0.12, 1.00x | 0.10, 1.00x | 0.41, 1.00x | 0.58, 1.13x |
| `reshard, by pieces` | 0.43, 1.09x | 0.98, 2.19x | 6.21, 1.17x | 4.04, 1.34x |
| `intermediate` | | 0.42, 2.00x | 20.5, 2.00x | |

Donated with 64 MiB in flight, 1,000 arrays of 256 KiB add 60 MB at the peak, and 62 of 4 MiB 69 MB or less; by
pieces 54 and 17 MB. The targets are 74 and 78 MB.

Run it as `python benchmarks/reshard_time.py` (about ten minutes, and 13 GB of memory); see `--help` for less.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, final
from unittest import mock

import attrs

DEVICES = 8
TIME_LIMIT, MEMORY_LIMIT, PIECES_LIMIT, MANY_LIMIT, DONATED_LIMIT = 0.5, 1.1, 1.4, 1.05, 1.1
HUNDREDS, OURS, PIECES = "jit, in hundreds", "reshard", "reshard, by pieces"
CONTESTANTS = ("floor", "device_put", "jit", HUNDREDS, OURS, PIECES, "intermediate")
DONATING = (OURS, PIECES)
PRIMES = 2_654_435_761, 2_246_822_519


@final
@attrs.frozen
class Case:
    """A move of `leaves` float32 matrices of `rows` by `columns`, from rows on all devices to columns on `target`.

    The target mesh has `devices` devices, and `copies` of each part.
    """

    name: str
    leaves: int
    rows: int
    columns: int
    target: str
    devices: int = DEVICES
    copies: int = 1

    @property
    def leaf_bytes(self) -> int:
        """The size of one matrix."""
        return self.rows * self.columns * 4

    @property
    def total_bytes(self) -> int:
        """The size of all matrices, with copies counted once."""
        return self.leaves * self.leaf_bytes

    def suits(self, contestant: str) -> bool:
        """Whether a contestant can make this move, and is not the same as another one."""
        match contestant:
            case "jit":
                return self.devices == DEVICES
            case "jit, in hundreds":
                return self.leaves > 1
        return True

    def is_slow(self, contestant: str) -> bool:
        """Whether one process serves all rounds."""
        return contestant == "jit" and (self.leaves > 1 or self.copies > 1)


def cases(side: int, leaves: int, small: int) -> tuple[Case, ...]:
    """The four moves: three of one array of `side` by `side`, one of `leaves` arrays of `small` by `small`."""
    return (
        Case("one array to 8", 1, side, side, "x:1,y:8"),
        Case("one array to 4, twice", 1, side, side, "x:2,y:4", copies=2),
        Case("one array to 4 of 8", 1, side, side, "x:1,y:4", devices=4),
        Case("many arrays to 8", leaves, small, small, "x:1,y:8"),
    )


FULL, TOY = cases(16384, 1000, 256), cases(512, 20, 256)
LARGER = Case("larger arrays to 8", 62, 1024, 1024, "x:1,y:8")
IN_FLIGHT_BYTES = 64 * 2**20
MMAP_THRESHOLD_BYTES = 16 * 2**10  # half a shard of the smallest array


@final
@attrs.frozen
class Block:
    """A part of the leaf with index `leaf`, which begins at `row` and `column`."""

    leaf: int
    row: int
    column: int
    values: Any


# One contestant in one process.


def work(case: Case, contestant: str, in_flight_bytes: int | None) -> dict[str, Any] | None:
    """Moves in this process; returns seconds and bytes, or `None` without an intermediate sharding."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardrules as sr

    source = NamedSharding(sr.create_mesh(f"x:{DEVICES},y:1"), P("x", None))
    mesh = sr.create_mesh(case.target, devices=jax.devices()[: case.devices])
    target = NamedSharding(mesh, P(None, "y"))
    if contestant == "intermediate":
        try:
            sr.presets.pathways.find_intermediate_sharding(source, target)
        except sr.errors.NoIntermediateShardingError:
            return None
    if contestant == PIECES:
        move_as_between_accelerators()
    rows, columns = terms(case, 0), terms(case, 1)
    # jit creates each shard on its device, and leaves nothing else behind. NumPy arrays that are placed and freed would
    # leave memory to the process, which the move could use without adding any.
    make = jax.jit(lambda row, column: row[:, None] + column[None, :], out_shardings=source)
    tree = jax.block_until_ready([make(row, columns) for row in rows])
    shardings = [target] * case.leaves
    run = move_function(contestant, source, target, in_flight_bytes)

    gc.collect()
    # Getting fresh memory from the host of a virtual machine takes longer than the moves: touch enough of it first.
    np.ones(3 * case.total_bytes, np.uint8)
    before = reset_peak()
    start = time.perf_counter()
    moved = run(tree, shardings)
    if contestant != "floor":
        jax.block_until_ready(moved)
    seconds = time.perf_counter() - start
    added = None if before is None else memory()["VmHWM"] - before
    gc.collect()
    after = reset_peak()
    remaining = None if before is None or after is None else after - before
    if in_flight_bytes is not None and not all(array.is_deleted() for array in tree):
        raise SystemExit(f"{contestant} on {case.name} did not delete all of the donated arrays")

    arrived = moved if contestant == "floor" else blocks(moved, target)
    verify(arrived, rows, columns, case.total_bytes * (1 if contestant == "floor" else case.copies))
    return {"seconds": seconds, "added_bytes": added, "left_bytes": remaining}


def terms(case: Case, dim: int) -> Any:
    """The terms of the matrices: an element is the sum of a term of its row and one of its column.

    Both are below 2**23, so that their sum is exact, however it is computed. Each leaf has its own terms for rows.
    """
    import numpy as np

    count = (case.leaves, case.rows) if dim == 0 else (case.columns,)
    mixed = (np.arange(np.prod(count), dtype=np.uint32) + 1) * np.uint32(PRIMES[dim])
    return (mixed >> 9).astype(np.float32).reshape(count)


def move_function(
    contestant: str, source: Any, target: Any, in_flight_bytes: int | None
) -> Callable[[list[Any], list[Any]], Any]:
    """The function to measure."""
    import jax

    import shardrules as sr

    def jit(tree: list[Any], shardings: list[Any]) -> list[Any]:
        return jax.jit(lambda tree: tree, out_shardings=shardings)(tree)

    def in_hundreds(tree: list[Any], shardings: list[Any]) -> list[Any]:
        result: list[Any] = []
        step = len(tree) // 10
        for first in range(0, len(tree), step):
            part = slice(first, first + step)
            # Without waiting, the next would run at the same time, and their collectives could starve of threads.
            result += jax.block_until_ready(jit(tree[part], shardings[part]))
        return result

    match contestant:
        case "floor":
            return lambda tree, shardings: write_once(tree, target)
        case "device_put":
            return jax.device_put
        case "jit":
            return jit
        case "jit, in hundreds":
            return in_hundreds
        case "intermediate":
            reshard_twice = sr.presets.pathways.reshard_with_intermediate_sharding
            return lambda tree, shardings: reshard_twice(tree, source, shardings)
    if in_flight_bytes is None:
        return sr.reshard
    return lambda tree, shardings: sr.reshard(tree, shardings, donate=True, max_bytes_in_flight=in_flight_bytes)


def move_as_between_accelerators() -> None:
    """Makes `reshard` move as between GPUs or TPUs, although CPU devices share the memory of this process.

    The library has no such setting, because only a benchmark needs it.
    """

    def moves_in_memory(schedule: Any) -> bool:
        return False

    for name in ("move", "plan"):
        module = importlib.import_module(f"shardrules.moves.{name}")
        mock.patch.object(module, "moves_in_memory", moves_in_memory).start()


def verify(arrived: Iterable[Block], rows: Any, columns: Any, expected_bytes: int) -> None:
    """Compares every bit that arrived with what was sent."""
    import numpy as np

    arrived_bytes = 0
    for block in arrived:
        height, width = block.values.shape
        row, column = rows[block.leaf][block.row :][:height], columns[block.column :][:width]
        for first in range(0, height, 64):  # small enough for the cache of the processor
            part = slice(first, first + 64)
            expected = row[part, None] + column[None, :]
            if not np.array_equal(block.values[part].view(np.uint32), expected.view(np.uint32)):
                raise SystemExit(f"other values in leaf {block.leaf} at {block.row + first}, {block.column}")
        arrived_bytes += block.values.nbytes
    if arrived_bytes != expected_bytes:
        raise SystemExit(f"{arrived_bytes} bytes arrived, not {expected_bytes}")


def write_once(tree: list[Any], target: Any) -> list[Block]:
    """Assembles columns from rows: `numpy.empty`, and one copy of each old shard into it."""
    import numpy as np

    result: list[Block] = []
    for leaf, array in enumerate(tree):
        old = [(shard.index[0], np.asarray(shard.data)) for shard in array.addressable_shards]
        height, width = target.shard_shape(array.shape)
        for first in range(0, array.shape[1], width):
            new = np.empty((height, width), array.dtype)
            for rows, shard in old:
                new[rows] = shard[:, first : first + width]
            result.append(Block(leaf, 0, first, new))
    return result


def blocks(tree: list[Any], target: Any) -> Iterator[Block]:
    """The shards on all devices, copies too; exits if they have another sharding."""
    import numpy as np

    for leaf, array in enumerate(tree):
        if not array.sharding.is_equivalent_to(target, array.ndim):
            raise SystemExit(f"leaf {leaf} has sharding {array.sharding}")
        for shard in array.addressable_shards:
            row, column = (part.start or 0 for part in shard.index)
            yield Block(leaf, row, column, np.asarray(shard.data))


def memory() -> dict[str, int]:
    """The bytes of this process: now (`VmRSS`), and at the peak (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def reset_peak() -> int | None:
    """Returns freed memory to the system and resets the peak.

    Returns the bytes that remain, or `None` where the system cannot do this.
    """
    reset = Path("/proc/self/clear_refs")
    if not reset.exists() or platform.libc_ver()[0] != "glibc":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    try:
        reset.write_text("5")
    except OSError:
        return None
    return memory()["VmRSS"]


# All contestants.


def in_process(case: Case, contestant: str, in_flight_bytes: int | None = None) -> dict[str, Any] | None:
    """Runs one contestant in its own process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if in_flight_bytes is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    worker = json.dumps([attrs.asdict(case), contestant, in_flight_bytes])
    command = [sys.executable, __file__, "--worker", worker]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{contestant} on {case.name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(cases: tuple[Case, ...], rounds: int) -> list[dict[str, Any]]:
    """One row for each case and contestant."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        names = [name for name in CONTESTANTS if case.suits(name)]
        runs_by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        refused: list[str] = []
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name in refused or (case.is_slow(name) and runs_by_name[name]):
                    continue
                run = in_process(case, name)
                if run is None:
                    refused.append(name)
                else:
                    runs_by_name[name] += [run] * (rounds if case.is_slow(name) else 1)
        peers = ("device_put", "jit") if case.leaves > 1 else ("device_put",)
        for name in (name for name in names if name not in refused):
            runs = runs_by_name[name]
            times = {
                "floor_ratio": [
                    run["seconds"] / floor["seconds"] for run, floor in zip(runs, runs_by_name["floor"], strict=True)
                ],
                "peer_ratio": [
                    run["seconds"] / min(peer["seconds"] for peer in others)
                    for run, *others in zip(runs, *(runs_by_name[peer] for peer in peers), strict=True)
                ],
            }
            row = described(case, name, runs)
            row |= {kind: statistics.median(ratios) for kind, ratios in times.items()}
            rows.append({**row, "peers": " or ".join(peers), "missed": missed(case, row)})
    return rows


def measure_donated(cases: tuple[Case, ...], rounds: int, in_flight_bytes: int) -> list[dict[str, Any]]:
    """One row for each case and contestant that deletes arrays while they move."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        runs_by_name: dict[str, list[Any]] = {name: [] for name in DONATING}
        for turn in range(rounds):
            for name in DONATING if turn % 2 == 0 else DONATING[::-1]:
                runs_by_name[name].append(in_process(case, name, in_flight_bytes))
        allowed_mb = (in_flight_bytes + case.leaf_bytes) * DONATED_LIMIT / 1e6
        for name, runs in runs_by_name.items():
            row = {**described(case, name, runs), "in_flight_mb": in_flight_bytes / 1e6}
            over = row["added_mb"] is not None and row["added_mb"] > allowed_mb
            why = f"{case.name}, donated: {name} adds {row['added_mb'] or 0:.0f} MB, the target is {allowed_mb:.0f}"
            rows.append({**row, "missed": [why] * over})
    return rows


def described(case: Case, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that all rows have."""
    has_memory = all(run["added_bytes"] is not None for run in runs)
    added, remaining = (
        statistics.median(run[f"{kind}_bytes"] for run in runs) if has_memory else None for kind in ("added", "left")
    )
    return {
        "case": case.name,
        "mb": case.total_bytes / 1e6,
        "name": name,
        "rounds": len(runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "added_mb": None if added is None else added / 1e6,
        "left_mb": None if remaining is None else remaining / 1e6,
        "memory_ratio": None if added is None else added / case.total_bytes,
    }


def missed(case: Case, row: dict[str, Any]) -> list[str]:
    """The targets that a contestant missed."""
    time_limits = {OURS: MANY_LIMIT if case.leaves > 1 else TIME_LIMIT}
    memory_limits = {OURS: MEMORY_LIMIT, PIECES: PIECES_LIMIT * case.copies} if case.leaves == 1 else {}
    time_limit, memory_limit, memory_ratio = (
        time_limits.get(row["name"]),
        memory_limits.get(row["name"]),
        row["memory_ratio"],
    )
    lines: list[str] = []
    if time_limit is not None and row["peer_ratio"] > time_limit:
        lines.append(f"takes {row['peer_ratio']:.2f} times as long as its peer, the target is {time_limit}")
    if memory_limit is not None and memory_ratio is not None and memory_ratio > memory_limit:
        lines.append(f"adds {memory_ratio:.2f} times the array, the target is {memory_limit}")
    return [f"{case.name}: {row['name']} {line}" for line in lines]


def table(rows: list[dict[str, Any]], donated: list[dict[str, Any]]) -> str:
    """The rows as tables."""
    lines: list[str] = []

    def memory_cells(row: dict[str, Any]) -> str:
        if row["added_mb"] is None:
            return f"{'?':>10}{'?':>9}"
        return f"{row['added_mb']:>10.0f}{row['memory_ratio']:>8.2f}x"

    for case in dict.fromkeys(row["case"] for row in rows):
        case_rows = [row for row in rows if row["case"] == case]
        lines.append(f"\n{case}, {case_rows[0]['mb']:.0f} MB; peer: {case_rows[0]['peers']}")
        lines.append(f"{'':20}{'seconds':>9}{'/floor':>9}{'/peer':>9}{'added MB':>10}{'/arrays':>9}")
        for row in case_rows:
            ratios = f"{row['floor_ratio']:>8.2f}x{row['peer_ratio']:>8.2f}x"
            lines.append(f"{row['name']:20}{row['seconds']:>9.2f}{ratios}{memory_cells(row)}")
    for case in dict.fromkeys(row["case"] for row in donated):
        case_rows = [row for row in donated if row["case"] == case]
        under_way = f"{case_rows[0]['in_flight_mb']:.0f} MB in flight"
        lines.append(f"\n{case}, {case_rows[0]['mb']:.0f} MB, donated, {under_way}")
        lines.append(f"{'':20}{'seconds':>9}{'added MB':>10}{'/arrays':>9}{'left MB':>9}")
        for row in case_rows:
            remaining = "?" if row["left_mb"] is None else f"{row['left_mb']:.0f}"
            lines.append(f"{row['name']:20}{row['seconds']:>9.2f}{memory_cells(row)}{remaining:>9}")
    if any(row["added_mb"] is None for row in (*rows, *donated)):
        lines.append("\nThis system cannot reset the peak memory of a process: that takes Linux with glibc.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="processes per contestant")
    parser.add_argument("--donate", action="store_true", help="move many arrays once more, and delete them on the way")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, one round")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="fail where reshard misses its targets")
    options = parser.parse_args()
    if options.worker:
        case, contestant, in_flight_bytes = json.loads(options.worker)
        print(json.dumps(work(Case(**case), contestant, in_flight_bytes)))
        return
    if options.smoke and options.check:
        parser.error("toy sizes have no targets: use --check without --smoke")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    cases = TOY if options.smoke else FULL
    donating = TOY[-1:] if options.smoke else (*FULL[-1:], LARGER)
    in_flight_bytes = 2**20 if options.smoke else IN_FLIGHT_BYTES
    rounds = 1 if options.smoke else options.rounds
    rows = measure(cases, rounds)
    donated = measure_donated(donating, rounds, in_flight_bytes) if options.donate else []
    if options.smoke:
        rows, donated = ([{**row, "missed": []} for row in part] for part in (rows, donated))
    over = [line for row in (*rows, *donated) for line in row["missed"]]
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if options.json:
        figures = {"date": time.strftime("%Y-%m-%d"), **machine, "rows": rows, "donated": donated, "missed": over}
        print(json.dumps(figures, indent=1))
    else:
        print(table(rows, donated))
        for line in over:
            print(f"missed: {line}")
    if options.check and over:
        sys.exit(1)


if __name__ == "__main__":
    main()
