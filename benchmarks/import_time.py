"""How much does `import shardrules` add to importing JAX and Equinox?

**Method.** A process of its own imports JAX and Equinox, and then the names of shardrules that a training program uses:
a mesh, rules, the filters, the analyzer. Each name is imported when it is first used: `import shardrules` alone imports
nothing. `--rounds` times; medians, and the ratio of both together to JAX and Equinox. Bytecode is written by a first
process, as an installer does.

**Last answer.** 2026-11-22, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, five rounds: see the changelog.

Run it as `python benchmarks/import_time.py`; `--check` fails above 60 ms, on a machine that imports JAX in 350 ms.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_MS = 60
"""It is not noticed in a script. Twice as much is seen in every test run and at every prompt."""

JAX_MS = 350
"""What importing JAX and Equinox took where the limit was set: a slower machine is given more time in proportion."""


PROBE = """
import time
begin = time.perf_counter()
import jax, equinox
middle = time.perf_counter()
import shardrules as sr
sr.create_mesh, sr.RegexShardingRule, sr.FSDPShardingRule, sr.CompositeShardingRule
sr.filter_shard, sr.filter_jit, sr.filter_init, sr.ShardingAnalyzer
print(middle - begin, time.perf_counter() - middle)
"""


def import_ms(cache: str) -> tuple[float, float]:
    """Returns the milliseconds of JAX with Equinox, and then of shardrules, in one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROBE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    peers, ours = map(float, run.stdout.split())
    return 1000 * peers, 1000 * ours


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail where the limit is missed")
    options = parser.parse_args(arguments)
    if options.smoke and options.check:
        parser.error("one round decides nothing: use --check without --smoke")
    with tempfile.TemporaryDirectory() as cache:
        import_ms(cache)  # writes the bytecode
        rounds = [import_ms(cache) for _ in range(1 if options.smoke else options.rounds)]
    peers_ms, extra_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = (peers_ms + extra_ms) / peers_ms
    if options.json:
        print(json.dumps({"peers_ms": peers_ms, "shardrules_ms": extra_ms, "ratio": ratio}))
    else:
        print(f"import jax, equinox: {peers_ms:.0f} ms; shardrules adds {extra_ms:.0f} ms ({ratio:.2f}x)")
    return int(options.check and extra_ms > LIMIT_MS * max(peers_ms / JAX_MS, 1))


if __name__ == "__main__":
    sys.exit(main())
