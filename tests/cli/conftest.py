"""What tests of several commands share."""

from collections.abc import Iterator

import pytest

from tests.cli.command import Forks


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()
