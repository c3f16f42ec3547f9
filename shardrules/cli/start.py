"""The entry point: checks that the extra `cli` is installed before anything imports it."""

import importlib.util
import sys


def start() -> int:
    """Runs the command line and returns the exit code."""
    if importlib.util.find_spec("rich") is None:
        print('shardrules: error: the command line needs rich: pip install "shardrules[cli]"', file=sys.stderr)
        return 2
    from shardrules.cli.main import main

    return main()
