"""The slowest of several devices, for which all others wait: GPUs of one kind multiply at different rates, since each
has the clock that its power allows."""

import functools
from statistics import NormalDist

import attrs

from shardrules.programs.machine.hardware import Hardware, fraction

_OUTLIER = 2.7
"""The standard deviations beyond which a device is an outlier, which people take out of service: the ends of the
whiskers of the studies that the spread is from."""


@functools.lru_cache(maxsize=256)
def slowest_of(hardware: Hardware, count: int) -> Hardware:
    """Returns the sheet of the one of `count` devices whose large matmuls are the slowest.

    ```python
    from shardrules.programs.costs.slowest import slowest_of

    h100, v5e = sr.Hardware.named("cuda:h100"), sr.Hardware.named("tpu:v5e")
    fractions = [dict(slowest_of(h100, count).matmul_fractions)["bf16"] for count in (1, 8, 512)]
    assert fractions == sorted(fractions, reverse=True) and slowest_of(v5e, 512) == v5e
    ```
    """
    if not hardware.rate_spread or count < 2:
        return hardware
    # Blom's estimate of the largest of so many normal values.
    deviations = min(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), _OUTLIER)
    slower = 1 + hardware.rate_spread * deviations
    fractions = {kind: fraction(hardware.matmul_fractions, kind) / slower for kind, _ in hardware.peak_flops}
    return attrs.evolve(hardware, matmul_fractions=fractions, rate_spread=0.0)
