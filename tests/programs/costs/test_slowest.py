"""The slowest of several devices."""

from statistics import NormalDist

import attrs
import numpy as np
import pytest

import shardrules as sr
from shardrules.programs.costs.slowest import slowest_of

H100 = sr.Hardware.named("cuda:h100")


def _slower(count: int) -> float:
    """How many times as long as on any device a large matmul takes on the slowest of so many."""
    return dict(H100.matmul_fractions)["bf16"] / dict(slowest_of(H100, count).matmul_fractions)["bf16"]


@pytest.mark.parametrize("count", [4, 8, 64])
def test_the_slowest_is_what_drawing_devices_shows(count: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, count)).max(1).mean()
    assert _slower(count) - 1 == pytest.approx(H100.rate_spread * drawn, rel=0.03)


def test_outliers_are_left_aside() -> None:
    assert _slower(1) == 1.0
    assert _slower(512) == _slower(10**9) == pytest.approx(1 + 2.7 * H100.rate_spread)
    # The whiskers that the spread is from: a quartile and one and a half times what is between the quartiles.
    quartile = NormalDist().inv_cdf(0.75)
    assert 4 * quartile == pytest.approx(2.7, rel=0.01)


def test_devices_of_one_clock_are_alike_and_nothing_is_counted_twice() -> None:
    v5e, peaks = sr.Hardware.named("tpu:v5e"), attrs.evolve(H100, rate_spread=0.0)
    assert slowest_of(v5e, 256) is v5e
    assert slowest_of(peaks, 256) is peaks
    slow = slowest_of(H100, 8)
    assert slowest_of(slow, 8) is slow
    changed = [name for name in _fields(H100) if getattr(slow, name) != getattr(H100, name)]
    assert changed == ["matmul_fractions", "rate_spread"]


def _fields(hardware: sr.Hardware) -> list[str]:
    """The names of the fields of a sheet."""
    return [field.name for field in attrs.fields(type(hardware))]


def test_kinds_without_a_fraction_of_their_own_are_slower_too() -> None:
    sheet = attrs.evolve(H100, matmul_fractions=0.5)
    assert set(dict(slowest_of(sheet, 8).matmul_fractions)) == set(dict(H100.peak_flops))
    assert len({value for _, value in slowest_of(sheet, 8).matmul_fractions}) == 1
