"""What does it cost to move arrays from one mesh to another, in time and in memory, against JAX's own ways and a floor?

**Method.** float32 arrays on 8 virtual CPU devices, split by rows over all of them, go to another mesh where they are
split by columns: one of 1 GiB to 8 devices, to 4 of which there are two each, and to the first 4 of the 8; and 1,000 of
256 KiB to 8. Every contestant has processes of its own. The first call there is what is measured, in a process that has
a backend but has not moved anything yet: its seconds, to the end of the move, and the memory that the process takes
more at its highest than just before, with all that was freed given back to the system first. (A virtual machine has
been made to have that memory at hand: getting it from its host takes longer than the moves, and differs from call to
call by a factor of twenty.) In every round each contestant has one process, in an order that turns; its seconds are
divided by those of others in the same round, its memory by the bytes of the arrays, and shown are the medians over the
rounds. What arrived is compared with what was sent, all of it and bit by bit, after the clock has stopped.

- `floor`: numpy writes each byte of the destination once, in one thread, from views of the old shards. Parts that two
    devices are to hold it writes once, too;
- `device_put`: one `jax.device_put(tree, shardings)`;
- `jit`: one `jax.jit(identity, out_shardings=...)` of the whole tree. To fewer devices there is none. To 4 of which
    there are two each, and of 1,000 arrays, it has a single process in all, being slow;
- `jit, in hundreds`: the same for a tenth of the arrays at a time, each waited for;
- `reshard`: `sr.reshard(tree, shardings)`;
- `reshard, by pieces`: the same as it is where devices have memory of their own, as GPUs and TPUs do: arrays are cut
    on devices, sent and joined. On CPU devices it does not have to;
- `intermediate`: `pathways.reshard_with_intermediate_sharding`, where `pathways.find_intermediate_sharding` finds one.

With `--donate` the 1,000 arrays, and 62 of 4 MiB, are moved once more and given up as they go, with 64 MiB under way at
once (`max_bytes_in_flight`): what that adds at its highest is to be about that much, however many there are. malloc is
told there (`MALLOC_MMAP_THRESHOLD_`) to take each shard from the system and give it back: by itself, glibc keeps what
one thread has freed for that thread, and of arrays that are given up in small parts the process may keep nearly all.
It shows what stays in the end, too: most of it is what JAX and Python know about each shard, and an array has eight.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, one round, other work on the machine:
read the seconds as ratios. All targets met.

| time over `device_put`, memory over the arrays | to 8 | to 4, twice | to 4 of 8 | 1,000 to 8 |
|---|---|---|---|---|
| `device_put` | 1.00, 2.00x | 1.00, 3.00x | 1.00, 2.00x | 1.00, 2.18x |
| `jit` | 1.90, 2.67x | 8.67, 9.76x | | 19.1, 2.68x |
| `reshard` | 0.12, 1.00x | 0.10, 1.00x | 0.41, 1.00x | 0.58, 1.13x |
| `reshard, by pieces` | 0.43, 1.09x | 0.98, 2.19x | 6.21, 1.17x | 4.04, 1.34x |
| `intermediate` | | 0.42, 2.00x | 20.5, 2.00x | |

Donated with 64 MiB under way, 1,000 arrays of 256 KiB add 60 MB at their highest, and 62 of 4 MiB 69 MB or less; by
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
    """So many float32 matrices of `rows` by `columns`, from rows on all devices to columns on the mesh `target`.

    `devices` says on how many of them that mesh is, and `copies` how many will hold each part.
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
        """The size of all: what the destination holds, with copies counted once."""
        return self.leaves * self.leaf_bytes

    def takes(self, contestant: str) -> bool:
        """Whether a contestant can do it, and it says something new."""
        match contestant:
            case "jit":
                return self.devices == DEVICES
            case "jit, in hundreds":
                return self.leaves > 1
        return True

    def is_slow(self, contestant: str) -> bool:
        """Whether one process has to do for all rounds."""
        return contestant == "jit" and (self.leaves > 1 or self.copies > 1)


def cases(side: int, leaves: int, small: int) -> tuple[Case, ...]:
    """The four moves: of one array of `side` by `side`, and of `leaves` of `small` by `small`."""
    return (
        Case("one array to 8", 1, side, side, "x:1,y:8"),
        Case("one array to 4, twice", 1, side, side, "x:2,y:4", copies=2),
        Case("one array to 4 of 8", 1, side, side, "x:1,y:4", devices=4),
        Case("many arrays to 8", leaves, small, small, "x:1,y:8"),
    )


FULL, TOY = cases(16384, 1000, 256), cases(512, 20, 256)
LARGER = Case("larger arrays to 8", 62, 1024, 1024, "x:1,y:8")
IN_FLIGHT_BYTES = 64 * 2**20
GIVEN_BACK_BYTES = 16 * 2**10  # half a shard of the smallest array


@final
@attrs.frozen
class Block:
    """A part of leaf number `leaf`, which begins at `row` and `column`."""

    leaf: int
    row: int
    column: int
    values: Any


# ---- one process ----


def work(case: Case, contestant: str, in_flight_bytes: int | None) -> dict[str, Any] | None:
    """Moves in this process; returns seconds and bytes, or nothing where there is no intermediate sharding."""
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
    rows, columns = numbers(case, 0), numbers(case, 1)
    # A jit makes each shard where it lies, so nothing is left of it but the shards: numpy arrays placed by hand would
    # leave memory behind, which the move could take without any being seen to be added.
    make = jax.jit(lambda row, column: row[:, None] + column[None, :], out_shardings=source)
    tree = jax.block_until_ready([make(row, columns) for row in rows])
    shardings = [target] * case.leaves
    run = way(contestant, source, target, in_flight_bytes)

    gc.collect()
    # A virtual machine has to ask its host for memory that nobody used of late, and that takes longer than the moves:
    # now it has enough.
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
    left = None if before is None or after is None else after - before
    if in_flight_bytes is not None and not all(array.is_deleted() for array in tree):
        raise SystemExit(f"{contestant} on {case.name} did not give up what it was to give up")

    found = moved if contestant == "floor" else blocks(moved, target)
    verify(found, rows, columns, case.total_bytes * (1 if contestant == "floor" else case.copies))
    return {"seconds": seconds, "added_bytes": added, "left_bytes": left}


def numbers(case: Case, dim: int) -> Any:
    """What the matrices are made of. An element is a number of its row and one of its column: both below 2**23, so that
    their sum is exact, whoever adds them. Of rows, each leaf has its own."""
    import numpy as np

    count = (case.leaves, case.rows) if dim == 0 else (case.columns,)
    whole = (np.arange(np.prod(count), dtype=np.uint32) + 1) * np.uint32(PRIMES[dim])
    return (whole >> 9).astype(np.float32).reshape(count)


def way(
    contestant: str, source: Any, target: Any, in_flight_bytes: int | None
) -> Callable[[list[Any], list[Any]], Any]:
    """Returns the function that is measured."""
    import jax

    import shardrules as sr

    def jit(tree: list[Any], shardings: list[Any]) -> list[Any]:
        return jax.jit(lambda tree: tree, out_shardings=shardings)(tree)

    def in_hundreds(tree: list[Any], shardings: list[Any]) -> list[Any]:
        result: list[Any] = []
        step = len(tree) // 10
        for first in range(0, len(tree), step):
            some = slice(first, first + step)
            # One that is not waited for would run beside the next, and collectives could starve each other of threads.
            result += jax.block_until_ready(jit(tree[some], shardings[some]))
        return result

    match contestant:
        case "floor":
            return lambda tree, shardings: written_once(tree, target)
        case "device_put":
            return jax.device_put
        case "jit":
            return jit
        case "jit, in hundreds":
            return in_hundreds
        case "intermediate":
            by_way_of = sr.presets.pathways.reshard_with_intermediate_sharding
            return lambda tree, shardings: by_way_of(tree, source, shardings)
    if in_flight_bytes is None:
        return sr.reshard
    return lambda tree, shardings: sr.reshard(tree, shardings, donate=True, max_bytes_in_flight=in_flight_bytes)


def move_as_between_accelerators() -> None:
    """Where devices are memory of this process, `reshard` puts shards together itself. Told that they are not, it moves
    as it does between GPUs or TPUs. The library has no such setting, since only a benchmark needs it."""

    def moves_in_memory(schedule: Any) -> bool:
        return False

    for name in ("move", "plan"):
        module = importlib.import_module(f"shardrules.reshard.{name}")
        mock.patch.object(module, "moves_in_memory", moves_in_memory).start()


def verify(found: Iterable[Block], rows: Any, columns: Any, wanted_bytes: int) -> None:
    """Compares every bit with what it is to be."""
    import numpy as np

    found_bytes = 0
    for block in found:
        height, width = block.values.shape
        row, column = rows[block.leaf][block.row :][:height], columns[block.column :][:width]
        for first in range(0, height, 64):  # small enough for the processor's cache
            part = slice(first, first + 64)
            expected = row[part, None] + column[None, :]
            if not np.array_equal(block.values[part].view(np.uint32), expected.view(np.uint32)):
                raise SystemExit(f"other values in leaf {block.leaf} at {block.row + first}, {block.column}")
        found_bytes += block.values.nbytes
    if found_bytes != wanted_bytes:
        raise SystemExit(f"{found_bytes} bytes arrived, not {wanted_bytes}")


def written_once(tree: list[Any], target: Any) -> list[Block]:
    """Columns put together from rows: `numpy.empty`, and one copy into it of each old shard."""
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
    """What the devices hold, copies too, if they hold it as they should."""
    import numpy as np

    for leaf, array in enumerate(tree):
        if not array.sharding.is_equivalent_to(target, array.ndim):
            raise SystemExit(f"leaf {leaf} lies by {array.sharding}")
        for shard in array.addressable_shards:
            row, column = (one.start or 0 for one in shard.index)
            yield Block(leaf, row, column, np.asarray(shard.data))


def memory() -> dict[str, int]:
    """Bytes of this process: what it has (`VmRSS`) and what it has had at most (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def reset_peak() -> int | None:
    """Gives freed memory back, and begins to watch for the peak anew. Returns what is left, or nothing where the system
    cannot do this."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists() or platform.libc_ver()[0] != "glibc":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    try:
        reset.write_text("5")
    except OSError:
        return None
    return memory()["VmRSS"]


# ---- all of them ----


def in_process(case: Case, contestant: str, in_flight_bytes: int | None = None) -> dict[str, Any] | None:
    """Runs one contestant in a process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if in_flight_bytes is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(GIVEN_BACK_BYTES)
    given = json.dumps([attrs.asdict(case), contestant, in_flight_bytes])
    command = [sys.executable, __file__, "--worker", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{contestant} on {case.name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(cases: tuple[Case, ...], rounds: int) -> list[dict[str, Any]]:
    """Returns one row for each case and contestant."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        names = [name for name in CONTESTANTS if case.takes(name)]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        refused: list[str] = []
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name in refused or (case.is_slow(name) and found[name]):
                    continue
                run = in_process(case, name)
                if run is None:
                    refused.append(name)
                else:
                    found[name] += [run] * (rounds if case.is_slow(name) else 1)
        peers = ("device_put", "jit") if case.leaves > 1 else ("device_put",)
        for name in (name for name in names if name not in refused):
            mine = found[name]
            times = {
                "floor_ratio": [
                    run["seconds"] / floor["seconds"] for run, floor in zip(mine, found["floor"], strict=True)
                ],
                "peer_ratio": [
                    run["seconds"] / min(peer["seconds"] for peer in others)
                    for run, *others in zip(mine, *(found[peer] for peer in peers), strict=True)
                ],
            }
            row = described(case, name, mine)
            row |= {kind: statistics.median(ratios) for kind, ratios in times.items()}
            rows.append({**row, "peers": " or ".join(peers), "missed": missed(case, row)})
    return rows


def measure_donated(cases: tuple[Case, ...], rounds: int, in_flight_bytes: int) -> list[dict[str, Any]]:
    """Returns one row for each case and contestant that moves arrays while they are given up."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        found: dict[str, list[Any]] = {name: [] for name in DONATING}
        for turn in range(rounds):
            for name in DONATING if turn % 2 == 0 else DONATING[::-1]:
                found[name].append(in_process(case, name, in_flight_bytes))
        allowed_mb = (in_flight_bytes + case.leaf_bytes) * DONATED_LIMIT / 1e6
        for name, runs in found.items():
            row = {**described(case, name, runs), "in_flight_mb": in_flight_bytes / 1e6}
            over = row["added_mb"] is not None and row["added_mb"] > allowed_mb
            why = f"{case.name}, donated: {name} adds {row['added_mb'] or 0:.0f} MB, the target is {allowed_mb:.0f}"
            rows.append({**row, "missed": [why] * over})
    return rows


def described(case: Case, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all rows say."""
    known = all(run["added_bytes"] is not None for run in runs)
    added, left = (
        statistics.median(run[f"{kind}_bytes"] for run in runs) if known else None for kind in ("added", "left")
    )
    return {
        "case": case.name,
        "mb": case.total_bytes / 1e6,
        "name": name,
        "rounds": len(runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "added_mb": None if added is None else added / 1e6,
        "left_mb": None if left is None else left / 1e6,
        "memory_ratio": None if added is None else added / case.total_bytes,
    }


def missed(case: Case, row: dict[str, Any]) -> list[str]:
    """Which targets a contestant missed."""
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
    """Returns the rows as a person reads them."""
    lines: list[str] = []

    def memory_cells(row: dict[str, Any]) -> str:
        if row["added_mb"] is None:
            return f"{'?':>10}{'?':>9}"
        return f"{row['added_mb']:>10.0f}{row['memory_ratio']:>8.2f}x"

    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        lines.append(f"\n{case}, {mine[0]['mb']:.0f} MB; peer: {mine[0]['peers']}")
        lines.append(f"{'':20}{'seconds':>9}{'/floor':>9}{'/peer':>9}{'added MB':>10}{'/arrays':>9}")
        for row in mine:
            ratios = f"{row['floor_ratio']:>8.2f}x{row['peer_ratio']:>8.2f}x"
            lines.append(f"{row['name']:20}{row['seconds']:>9.2f}{ratios}{memory_cells(row)}")
    for case in dict.fromkeys(row["case"] for row in donated):
        mine = [row for row in donated if row["case"] == case]
        under_way = f"{mine[0]['in_flight_mb']:.0f} MB under way at once"
        lines.append(f"\n{case}, {mine[0]['mb']:.0f} MB, donated, {under_way}")
        lines.append(f"{'':20}{'seconds':>9}{'added MB':>10}{'/arrays':>9}{'left MB':>9}")
        for row in mine:
            left = "?" if row["left_mb"] is None else f"{row['left_mb']:.0f}"
            lines.append(f"{row['name']:20}{row['seconds']:>9.2f}{memory_cells(row)}{left:>9}")
    if any(row["added_mb"] is None for row in (*rows, *donated)):
        lines.append("\nThis system does not tell the peak of a process's memory anew: that takes Linux with glibc.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="processes per contestant")
    parser.add_argument("--donate", action="store_true", help="move many arrays once more, giving them up")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, one round: does it run?")
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
        parser.error("there is nothing to see in less than one round")
    cases = TOY if options.smoke else FULL
    donating = TOY[-1:] if options.smoke else (*FULL[-1:], LARGER)
    in_flight_bytes = 2**20 if options.smoke else IN_FLIGHT_BYTES
    rounds = 1 if options.smoke else options.rounds
    rows = measure(cases, rounds)
    donated = measure_donated(donating, rounds, in_flight_bytes) if options.donate else []
    if options.smoke:
        rows, donated = ([{**row, "missed": []} for row in some] for some in (rows, donated))
    over = [line for row in (*rows, *donated) for line in row["missed"]]
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if options.json:
        found = {"date": time.strftime("%Y-%m-%d"), **machine, "rows": rows, "donated": donated, "missed": over}
        print(json.dumps(found, indent=1))
    else:
        print(table(rows, donated))
        for line in over:
            print(f"over the limit: {line}")
    if options.check and over:
        sys.exit(1)


if __name__ == "__main__":
    main()
