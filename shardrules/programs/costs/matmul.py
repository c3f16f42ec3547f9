"""The time of a matmul: from a sheet's table of measured ones if it has one, otherwise from the unit's tile and its
peak.

Between the sizes of a table, time is interpolated where both are logarithms. A matmul that is part of a larger one
never takes longer than it, whatever the table says: the library could have run the larger one.
"""

import functools
import math
import re
from bisect import bisect_right
from typing import Any, TypeAlias

import numpy as np

from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.machine.hardware import Hardware, fraction, multiplied_as
from shardrules.programs.machine.measured import MatmulRates

_PASSES = re.compile(r"_x(\d+)$")
"""The number of matmuls in a smaller dtype that an algorithm adds up: 3 in `dot_bf16_bf16_f32_x3`."""

_COMPLEX = re.compile(r"c(omplex)?\d")
"""The names of complex dtypes, XLA's and NumPy's."""

_DTYPES = {"tf32": "f32", "any": "f8"}
"""Dtypes that only the names of algorithms have, as `dot_any_f8_any_f8_f32`, and what hardware sheets call them."""

_SIBLINGS = {"f16": "bf16", "bf16": "f16", "s8": "f8", "f8": "s8"}
"""Kinds that the same units multiply at the same rate, so that the table of one serves the other."""

_VECTOR_PRODUCTS = 300
"""The products that a TPU adds up in a cycle where one side of each matmul is a vector, which leaves its units for
matrices nearly empty: libtpu 0.0.42.1 expects 172 to 545 on a v7x and 302 on a v5p for 8,192 to 65,536 vectors, each
with 8 or 64 rows of 512 to 2,816 numbers."""

_BYTES = {"f64": 8, "f32": 4, "f32_highest": 4, "f8": 1, "s8": 1}
"""The bytes of an element of each kind of multiplication, other than 2."""

_Grid: TypeAlias = list[list[list[float]]]


@functools.lru_cache(maxsize=2**16)
def matmul_seconds(batch: int, m: int, n: int, k: int, dtype: Any, precision: str, hardware: Hardware) -> float:
    """The time of `batch` matmuls of (m, k) by (k, n) as one kernel, without its launch.

    `dtype` is the operands', and `precision` one of JAX's, or the name of an algorithm. Measured rates include reading
    the operands and writing the result; without a table that is for `traffic_seconds`.
    """
    if min(batch, m, n, k) < 1:
        return 0.0
    kind, passes = multiplication(dtype, precision, hardware)
    peak, table = dict(hardware.peak_flops)[kind], _table(hardware, kind)
    if table is None:
        seconds = _start_seconds(batch * (m * k + k * n + m * n) * _BYTES.get(kind, 2), hardware)
        padded = [padded_size(size, hardware.matmul_tile) for size in (m, n, k)]
        units = flops_seconds(2 * batch * math.prod(padded), dtype, precision, hardware)
        if hardware.clock_hertz and min(m, n) == 1:
            units = min(units, batch * m * n * k / _VECTOR_PRODUCTS / hardware.clock_hertz)
        seconds += units
    else:
        # The tiles of all results of a batch run side by side, as in one matmul with as many rows.
        # A kernel of a GPU multiplies at least 64 rows and columns at once.
        rows, columns = (m, n) if batch == 1 else (batch * max(m, 64), max(n, 64))
        inside = min(rows, table.m[-1]), min(columns, table.n[-1])
        seconds = _interpolated(table, (*inside, k * passes)) * table.peak / peak
        # Rows and columns beyond the table fill the chip: they run at the rate of large matmuls.
        beyond = 2 * (rows * columns - math.prod(inside)) * k
        if hardware.matmul_fractions:
            seconds += flops_seconds(beyond, dtype, precision, hardware)
        else:
            seconds += beyond * passes / (max(table.flops_per_second) * peak / table.peak)
    # Tables hold whole kernels. Some of their rates exceed what real numbers reach, which take more power than zeros.
    return max(
        seconds - (hardware.launch_seconds if hardware.matmul_rates else 0.0),
        flops_seconds(2 * batch * m * n * k, dtype, precision, hardware),
    )


def padded_size(size: int, tile: int) -> int:
    """The next multiple of a unit's tile."""
    return math.ceil(size / tile) * tile


def flops_seconds(flops: float, dtype: Any, precision: str, hardware: Hardware) -> float:
    """The time of the FLOPs of matmuls of unknown sizes: as in a large one."""
    kind, passes = multiplication(dtype, precision, hardware)
    reached = fraction(hardware.matmul_fractions, kind, _SIBLINGS.get(kind, kind))
    return flops * passes / (dict(hardware.peak_flops)[kind] * reached)


def multiplication(dtype: Any, precision: str, hardware: Hardware) -> tuple[str, int]:
    """The hardware's kind of multiplication that a matmul runs as, and the number of times that it runs.

    `precision` is one of JAX's, or the name of an algorithm. `dot_f32_f32_f32` is the same as "highest": full f32, not
    the TF32 or bf16 that a matmul of f32 may run in.
    """
    highest = precision == "highest" or precision.startswith("dot_f32")
    passes = _PASSES.search(precision)
    kind = multiplied_as(hardware, _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype, highest=highest)
    # A product of complex numbers is four of real ones.
    products = 4 if _COMPLEX.match(dtype if isinstance(dtype, str) else np.dtype(dtype).name) else 1
    return kind, products * (int(passes[1]) if passes else 1)


def _start_seconds(moved_bytes: int, hardware: Hardware) -> float:
    """The time besides multiplying, without a table: filling a unit with a block, or another table's least time."""
    if hardware.matmul_tile > 1:
        # Filling and emptying the unit takes 1.3 microseconds. Of the operands and the result 4 MiB are not hidden by
        # multiplying. With both, cubes of 256 to 4096 are within 20 % of libtpu's estimates for a v5e, v5p and v6e.
        return 1.3e-6 + traffic_seconds(min(moved_bytes, 4 * 2**20), hardware)
    return min((math.exp(_logs(measured)[0][0][0]) for measured in hardware.matmul_rates), default=0.0)


def _table(hardware: Hardware, kind: str) -> MatmulRates | None:
    tables = {table.kind: table for table in hardware.matmul_rates}
    return tables.get(kind, tables.get(_SIBLINGS.get(kind, "")))


@functools.lru_cache(maxsize=64)
def _logs(table: MatmulRates) -> _Grid:
    """The logarithms of the seconds of a table, for each m, n and k."""
    sizes = [np.array(dims, float) for dims in (table.m, table.n, table.k)]
    flops = 2.0 * sizes[0][:, None, None] * sizes[1][:, None] * sizes[2]
    seconds = flops / np.array(table.flops_per_second).reshape(flops.shape)
    for dim in range(3):  # no longer than any larger one
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, dim), dim), dim)
    return np.log(seconds).tolist()


def _interpolated(table: MatmulRates, dims: tuple[int, int, int]) -> float:
    """The seconds of a matmul by the table, on the chip that was measured."""
    logs, outside = _logs(table), 1.0
    corners: list[tuple[int, float]] = []
    for size, sizes in zip(dims, (table.m, table.n, table.k), strict=True):
        # More to sum up takes as much longer; below the smallest size time falls more slowly than the work, with the
        # power by which it falls between the first two sizes of the tables for H100 and B200.
        inside = min(max(size, sizes[0]), sizes[-1])
        outside *= size / inside if size > inside else (size / inside) ** (1 / 3)
        low = max(0, min(bisect_right(sizes, inside), len(sizes) - 1) - 1)
        width = math.log(sizes[low + 1] / sizes[low]) if len(sizes) > 1 else 1.0
        corners.append((low, math.log(inside / sizes[low]) / width))
    total = 0.0
    for corner in range(8):
        weight, index = 1.0, []
        for dim, (low, part) in enumerate(corners):
            upper = corner >> dim & 1
            weight *= part if upper else 1 - part
            index.append(low + upper)
        if weight:  # the upper corner of a size on the edge may be outside
            total += weight * logs[index[0]][index[1]][index[2]]
    return max(math.exp(total) * outside, math.exp(logs[0][0][0]))
