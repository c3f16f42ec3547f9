"""Where the process begins: the one place that knows that the command line needs an extra."""

import importlib.util
import sys


def start() -> int:
    """Runs the command line, or says what it lacks.

    **Returns:**

    The exit code.
    """
    if importlib.util.find_spec("rich") is None:
        print('shardrules: error: the command line needs rich: pip install "shardrules[cli]"', file=sys.stderr)
        return 2
    from shardrules.cli.main import main

    return main()
