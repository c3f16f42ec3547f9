"""Primes and divisors of numbers of devices."""

import math

import pytest

from shardrules.mesh.divisors import divisors, prime_factors


@pytest.mark.parametrize("count", range(1, 100))
def test_primes_and_divisors_are_as_by_trying(count: int) -> None:
    assert divisors(count) == tuple(size for size in range(1, count + 1) if count % size == 0)
    assert math.prod(prime_factors(count)) == count
    assert all(divisors(prime) == (1, prime) for prime in prime_factors(count))


def test_a_billion_devices_take_no_time() -> None:
    assert len(divisors(10**9)) == 100
    assert prime_factors(999_999_937) == (999_999_937,)
