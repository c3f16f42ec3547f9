"""The entry point: what must happen before slow imports, and before those that need the extra `cli`."""

import importlib.util
import sys
from typing import NoReturn

from shardrules.cli.interrupt import end, end_on_interrupt


def start() -> NoReturn:
    """Runs the command line, and ends the process with its exit code."""
    end_on_interrupt()
    if importlib.util.find_spec("rich") is None:
        print('shardrules: error: the command line needs rich: pip install "shardrules[cli]"', file=sys.stderr)
        sys.exit(2)
    from shardrules.cli.main import main

    end(main())
