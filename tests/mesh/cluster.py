"""Real processes on this machine, connected by `jax.distributed` over loopback, each with its own CPU devices."""

import os
import socket
import textwrap
from pathlib import Path

from tests.forks import Ended, run_forks
from tests.house.source import REPOSITORY
from tests.quick import QUICK_FLAGS

PRELUDE = """
import faulthandler, jax, os, sys, time
faulthandler.dump_traceback_later(100, file=os.fdopen(os.dup(2), "w"))  # a process that hangs says where
sys.stdout, _ = os.fdopen(os.dup(1), "w", buffering=1, closefd=False), os.dup2(2, 1)  # what XLA prints goes elsewhere
process, processes, port = map(int, sys.argv[1:4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=30)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import shardrules as sr
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(code: str, *, processes: int, devices: int, timeout: float = 120) -> list[Ended]:
    """Runs `code` in several processes at once, with `process` and `processes` defined and JAX initialised.

    Warnings are errors. A process that does not end in time is killed, and its exit code is negative. The first line of
    `code` is line 2 of "<string>".
    """
    removed = ("XLA_FLAGS", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_FLAGS}",
        "PYTHONPATH": str(REPOSITORY),
    }
    text = f"exec({PRELUDE!r})\n" + textwrap.dedent(code).lstrip("\n")
    port = str(free_port())
    arguments = [(str(process), str(processes), port) for process in range(processes)]
    return run_forks(text, arguments, timeout=timeout, env=environment, cwd=Path(__file__).parent, strict=True)
