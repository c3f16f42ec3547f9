"""`python -m shardrules`, the same as the `shardrules` command."""

import sys

from shardrules.cli.start import start

if __name__ == "__main__":
    sys.exit(start())
