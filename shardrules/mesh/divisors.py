"""Primes and divisors of numbers of devices, of up to a billion."""


def prime_factors(count: int) -> tuple[int, ...]:
    """Returns the primes whose product is a number, the smallest first."""
    factors: list[int] = []
    prime = 2
    while prime * prime <= count:
        while count % prime == 0:
            factors.append(prime)
            count //= prime
        prime += 1
    return (*factors, count) if count > 1 else tuple(factors)


def divisors(count: int) -> tuple[int, ...]:
    """Returns the numbers that divide another, from 1 to itself."""
    products = {1: None}
    for prime in prime_factors(count):
        products |= {prime * product: None for product in products}
    return tuple(sorted(products))
