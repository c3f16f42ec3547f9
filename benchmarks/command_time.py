"""How long does the command line take, from the shell's prompt to the table?

**Method.** Each command is a process of its own, started `--rounds` times, all of them in turn; medians are shown. The
floor, measured in the same turns, is a process that only imports JAX, as everything with a PartitionSpec must.
`plan` of an index reads the headers of 163 files with 45,066 tensors in them.

**Last answer.** 2026-11-22, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, five rounds.

| | seconds | over import jax |
|---|---|---|
| import jax | 0.76 | 1.00x |
| plan Llama 3 405B | 1.20 | 1.59x |
| --help | 1.10 | 1.44x |
| plan the example GPT | 1.25 | 1.64x |
| plan an index of 45,066 tensors | 2.19 | 2.89x |
| report on that index | 4.47 | 5.89x |

Run it as `python benchmarks/command_time.py`; `--check` fails where Llama 3 405B takes more than 3 s, or the index 5 s.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headers import MIXTURE_RULES, experts, write_headers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
LIMITS = {"plan Llama 3 405B": 3.0, "plan an index of 45,066 tensors": 5.0}
"""Seconds: more than twice the last answer, for slower machines."""


def commands(folder: Path, smoke: bool) -> dict[str, list[str]]:
    """The commands to measure: names, and the words of each process."""
    shardrules = [sys.executable, "-m", "shardrules"]
    gpt = [f"{EXAMPLES}/train_gpt.py:GPT", "--rules", f"{EXAMPLES}/train_gpt.py:RULES", "--mesh", "data:4,model:2"]
    llama = [f"{EXAMPLES}/llama_405b.py:shapes", "--rules", f"{EXAMPLES}/llama_405b.toml"]
    quick = {"import jax": [sys.executable, "-c", "import jax"], "plan Llama 3 405B": [*shardrules, "plan", *llama]}
    if smoke:
        return quick
    index = write_headers(
        folder, {name: tensor for layer in range(58) for name, tensor in experts(layer, 259).items()}, 163
    )
    (folder / "rules.toml").write_text(MIXTURE_RULES)
    mixture = [str(index), "--rules", str(folder / "rules.toml"), "--mesh", "data:32,model:16"]
    return {
        **quick,
        "--help": [*shardrules, "--help"],
        "plan the example GPT": [*shardrules, "plan", *gpt],
        "plan an index of 45,066 tensors": [*shardrules, "plan", *mixture],
        "report on that index": [*shardrules, "report", *mixture, "-o", str(folder / "report.html")],
    }


def measure(commands: dict[str, list[str]], rounds: int) -> list[dict[str, Any]]:
    """Runs all commands in turn, and returns their medians, in seconds and over the floor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, words in commands.items():
            start = time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, env=environment)
            times[name].append(time.perf_counter() - start)
    floor = statistics.median(times["import jax"])
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [{"name": name, "seconds": median, "over_floor": median / floor} for name, median in medians.items()]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="How long the command line takes.")
    parser.add_argument("--smoke", action="store_true", help="one round, without the large index")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=5, help="how many times to run each command")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    if options.check and options.smoke:
        parser.error("toy sizes have no limits: use --check without --smoke")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(commands(Path(folder), options.smoke), 1 if options.smoke else options.rounds)
    missed = [row["name"] for row in rows if row["seconds"] > LIMITS.get(row["name"], float("inf"))]
    if options.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows, "missed": missed}, indent=1))
    else:
        print("| | seconds | over import jax |\n|---|---|---|")
        for row in rows:
            print(f"| {row['name']} | {row['seconds']:.2f} | {row['over_floor']:.2f}x |")
    if options.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
