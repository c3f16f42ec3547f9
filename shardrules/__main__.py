"""`python -m shardrules`, the same as the `shardrules` command."""

from shardrules.cli.start import start

if __name__ == "__main__":
    start()
