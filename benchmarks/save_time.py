"""How long does saving take, and how much memory does the host need for it?

**Question.** A train state is saved from 8 devices. How does `save_safetensors` compare with `safetensors.save_file`
and `np.savez`, which write arrays that are on the host, and with orbax; and how much does the host hold meanwhile?

**Method.** Each contestant runs in a process of its own, in rotated order, `--rounds` times. The tree has 50 float32
matrices, sharded over both axes of `data:4,model:2`. The floor writes one of these matrices as many times to one file
with plain calls, and syncs it: in the same process, before and after the contestant. Our savers sync their files; after
the others, which do not, the benchmark syncs theirs. The memory is how much the peak of the process grew meanwhile.
Disks vary by more than what is measured: `TMPDIR=/dev/shm` leaves them out.

**Last answer.** 2026-11-22, 2 cores of an AMD EPYC that other work kept busy, Python 3.11.7, JAX 0.10.2, 3 rounds in
`/dev/shm`, 419 MB.

| | time, over the floor | memory, of the tree |
|---|---|---|
| `save_safetensors` | 1.36 | 0 % |
| `save_equinox` | 1.31 | 0 % |
| `save_orbax` | 2.36 | 72 % |
| `safetensors.save_file` | 5.15 | 98 % |
| `np.savez` | 6.40 | 100 % |

Run it as `python benchmarks/save_time.py`; `--smoke` for toy sizes, `--check` to fail above the limits.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 8
LIMIT = 1.5
"""The largest ratio of `save_safetensors` to the floor: it writes as much, in larger pieces and more files."""

MEMORY_LIMIT = 0.25
"""The largest share of the tree that the host may hold besides: a few tensors of the benchmark's fifty."""

CONTESTANTS = ("save_safetensors", "save_equinox", "save_orbax", "safetensors.save_file", "np.savez")
CHECKED = ("save_safetensors", "save_equinox")


def floor(block: Any, leaves: int, folder: Path) -> float:
    """Writes `leaves` times the same array with plain calls; returns seconds."""
    start = time.perf_counter()
    with (folder / "floor").open("wb", buffering=0) as file:
        for _ in range(leaves):
            file.write(block.data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "floor").unlink()
    return seconds


def work(contestant: str, leaves: int, rows: int, columns: int, folder: Path) -> dict[str, float]:
    """Runs one contestant in this process; returns seconds, and by how many bytes the peak of its memory grew."""
    import jax
    import numpy as np
    import safetensors.numpy
    from jax.sharding import PartitionSpec as P

    import shardrules as sr

    mesh = sr.create_mesh("data:4,model:2")
    block = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    tree = {f"layer{index}": sr.filter_shard(block + index, P("model", "data"), mesh) for index in range(leaves)}
    jax.block_until_ready(tree)
    getattr(sr, contestant if contestant.startswith("save_") else "save_safetensors")(
        folder / "warm", {"w": np.ones(3)}
    )
    floor(block, leaves, folder)
    before = floor(block, leaves, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if contestant == "safetensors.save_file":
        safetensors.numpy.save_file({name: np.asarray(array) for name, array in tree.items()}, folder / "saved")
    elif contestant == "np.savez":
        np.savez(folder / "saved.npz", *map(np.asarray, tree.values()))
    else:
        getattr(sr, contestant)(folder / "saved", tree)
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    after = floor(block, leaves, folder)
    total = leaves * block.nbytes
    return {"seconds": seconds, "floor": (before + after) / 2, "memory": grown / total, "mb": total / 10**6}


def in_process(contestant: str, size: tuple[int, int, int]) -> dict[str, float]:
    """Runs one contestant in its own process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, __file__, "--worker", json.dumps([contestant, *size, str(folder)])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    finally:
        shutil.rmtree(folder)
    if done.returncode:
        raise SystemExit(f"{contestant} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(size: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """One row for each contestant."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds):
        for name in CONTESTANTS[turn % len(CONTESTANTS) :] + CONTESTANTS[: turn % len(CONTESTANTS)]:
            runs[name].append(in_process(name, size))
    rows: list[dict[str, Any]] = []
    for name, results in runs.items():
        ratio = statistics.median(run["seconds"] / run["floor"] for run in results)
        memory = statistics.median(run["memory"] for run in results)
        met = ratio <= LIMIT and memory <= MEMORY_LIMIT if name in CHECKED else None
        seconds = statistics.median(run["seconds"] for run in results)
        rows.append(
            {"name": name, "mb": results[0]["mb"], "seconds": seconds, "ratio": ratio, "memory": memory, "met": met}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [f"{rows[0]['mb']:.0f} MB", f"{'':24}{'ms':>8}{'to floor':>10}{'memory':>10}"]
    lines += [f"{row['name']:24}{1e3 * row['seconds']:8.0f}{row['ratio']:9.2f}x{row['memory']:9.0%}" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="processes per contestant")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, one round")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="fail where our savers exceed their limits")
    options = parser.parse_args()
    if options.worker:
        contestant, leaves, rows, columns, folder = json.loads(options.worker)
        print(json.dumps(work(contestant, leaves, rows, columns, Path(folder))))
        return
    if options.smoke and options.check:
        parser.error("toy sizes have no limits: use --check without --smoke")
    rows = measure((5, 64, 32), 1) if options.smoke else measure((50, 2048, 1024), options.rounds)
    missed = [row["name"] for row in rows if row["met"] is False]
    if options.smoke:
        rows = [{**row, "met": None} for row in rows]
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if options.json:
        print(json.dumps({"date": time.strftime("%Y-%m-%d"), **machine, "rows": rows, "missed": missed}, indent=1))
    else:
        print(table(rows))
    if options.check and missed:
        sys.exit(f"over the limits: {', '.join(missed)}")


if __name__ == "__main__":
    main()
