"""What matmuls take: by tables, by tiles and peaks, and what has to hold for all of them."""

import attrs
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardrules as sr
from shardrules.programs.costs.matmul import flops_seconds, matmul_seconds
from shardrules.programs.machine.hardware import RATES, Hardware, sheets

ROUND = Hardware("round", {"bf16": 1e12, "f32": 5e11, "f32_highest": 1e11}, 10**9, 1e9, 1e9, 1e-6, 1e8, 1e-5)
TABLE = {
    "kind": "bf16",
    "m": (256, 512),
    "n": (256, 512),
    "k": (256, 512),
    "flops_per_second": (1e11, 1.5e11, 1.5e11, 2e11, 1.5e11, 2e11, 2e11, 3e11),
    "peak": 1e12,
}
MEASURED = attrs.evolve(ROUND, matmul_rates=[TABLE])
SIZES = st.integers(1, 2**15)


def seconds(*sizes: int, hardware: Hardware = MEASURED, dtype: str = "bf16", precision: str = "default") -> float:
    batch, m, n, k = sizes
    return matmul_seconds(batch, m, n, k, dtype, precision, hardware)


def test_without_figures_matmuls_run_at_the_peak() -> None:
    assert seconds(3, 10, 20, 30, hardware=ROUND) == pytest.approx(2 * 3 * 10 * 20 * 30 / 1e12)
    assert seconds(3, 0, 20, 30, hardware=ROUND) == 0


def test_tables_hold_at_their_sizes() -> None:
    assert seconds(1, 256, 256, 256) == pytest.approx(2 * 256**3 / 1e11)
    assert seconds(1, 512, 512, 512) == pytest.approx(2 * 512**3 / 3e11)


def test_between_sizes_time_is_between() -> None:
    low, high = seconds(1, 512, 512, 256), seconds(1, 512, 512, 512)
    assert low < seconds(1, 512, 512, 300) < seconds(1, 512, 512, 400) < high
    # Halfway between the logarithms of the sizes, the logarithm of the time is halfway too.
    assert seconds(1, 512, 512, 362) == pytest.approx((low * high) ** 0.5, rel=1e-3)


def test_rows_beyond_the_table_run_at_the_rate_of_large_matmuls() -> None:
    assert seconds(1, 512, 1024, 512) == pytest.approx(seconds(1, 512, 512, 512) + 2 * 512**3 / 3e11)
    reached = attrs.evolve(MEASURED, matmul_fractions=0.9)
    assert seconds(1, 512, 1024, 512, hardware=reached) == pytest.approx(seconds(1, 512, 512, 512) + 2 * 512**3 / 9e11)


def test_longer_sums_do_not_fill_the_chip() -> None:
    assert seconds(1, 256, 256, 2048) == pytest.approx(4 * seconds(1, 256, 256, 512))


def test_tiny_matmuls_take_the_least_time() -> None:
    assert seconds(1, 1, 1, 1) == pytest.approx(seconds(1, 256, 256, 256))
    assert seconds(1, 8, 512, 512) < seconds(1, 256, 512, 512)


def test_a_batch_is_as_many_rows() -> None:
    assert seconds(4, 128, 512, 512) == seconds(1, 512, 512, 512)
    assert seconds(512, 1, 512, 512) > seconds(1, 512, 512, 512), "rows of different matrices share no tile"


def test_a_larger_matmul_bounds_a_smaller_one() -> None:
    slow_start = attrs.evolve(
        ROUND, matmul_rates=[{**TABLE, "flops_per_second": (1e9, *TABLE["flops_per_second"][1:])}]
    )
    assert seconds(1, 256, 256, 256, hardware=slow_start) <= seconds(1, 512, 256, 256, hardware=slow_start)


def test_no_rate_exceeds_what_is_reached() -> None:
    capped = attrs.evolve(MEASURED, matmul_fractions={"bf16": 0.2})
    assert seconds(1, 512, 512, 512, hardware=capped) == pytest.approx(2 * 512**3 / 2e11)
    f8 = sr.Hardware.named("cuda:h100")
    rate = 2 * 4096**3 / matmul_seconds(1, 4096, 4096, 4096, "f8e4m3fn", "default", f8)
    assert rate <= f8.flops_per_second("f8e4m3fn")


def test_tables_scale_with_the_peak() -> None:
    faster = attrs.evolve(MEASURED, peak_flops={"bf16": 2e12, "f32": 1e12})
    assert seconds(1, 512, 512, 512, hardware=faster) == pytest.approx(seconds(1, 512, 512, 512) / 2)


def test_kernels_without_their_launch() -> None:
    launched = attrs.evolve(MEASURED, launch_seconds=1e-5)
    assert seconds(1, 512, 512, 512, hardware=launched) == pytest.approx(seconds(1, 512, 512, 512) - 1e-5)


def test_tiles_are_filled() -> None:
    tiled = attrs.evolve(ROUND, matmul_tile=128, memory_bytes_per_second=1e30)
    assert seconds(1, 128, 128, 64, hardware=tiled) == pytest.approx(seconds(1, 128, 128, 128, hardware=tiled))
    # A unit fills once, however many tiles there are.
    fill = 1.3e-6
    assert seconds(1, 129, 128, 128, hardware=tiled) - fill == pytest.approx(
        2 * (seconds(1, 128, 128, 128, hardware=tiled) - fill)
    )


@pytest.mark.parametrize(
    ("sizes", "cycles"),
    [
        ((65_536, 2_816, 1, 8), 7_210_076),
        ((65_536, 1, 8, 2_816), 4_181_965),
        ((16_384, 1_024, 1, 64), 2_231_093),
        ((16_384, 1, 64, 1_024), 1_972_191),
        ((8_192, 512, 1, 8), 195_525),
        ((8_192, 1, 8, 512), 131_263),
    ],
)
def test_products_with_vectors_take_what_their_compiler_expects(sizes: tuple[int, ...], cycles: int) -> None:
    """Cycles that libtpu 0.0.42.1 prints for a v7x, within a factor of two."""
    v7x = sr.Hardware.named("tpu:v7x")
    expected = cycles / 2.2e9
    assert expected / 2 < seconds(*sizes, hardware=v7x) < 2 * expected


def test_a_block_is_loaded_first() -> None:
    tiled, far = attrs.evolve(ROUND, matmul_tile=128), attrs.evolve(ROUND, memory_bytes_per_second=1e30)
    fill = 1.3e-6
    assert seconds(1, 128, 128, 128, hardware=tiled) == pytest.approx(
        fill + 3 * 2 * 128**2 / 1e9 + seconds(1, 128, 128, 128, hardware=far)
    )
    large = fill + 4 * 2**20 / 1e9 + seconds(1, 4096, 4096, 4096, hardware=far)
    assert seconds(1, 4096, 4096, 4096, hardware=tiled) == pytest.approx(large)


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [
        ("f32", "default", 5e11),
        ("f32", "highest", 1e11),
        ("bf16", "highest", 1e12),
        ("f32", "dot_f32_f32_f32", 1e11),
        ("tf32", "dot_tf32_tf32_f32", 5e11),
        ("bf16", "dot_bf16_bf16_f32_x3", 1e12 / 3),
        (jnp.bfloat16, "default", 1e12),
    ],
)
def test_precisions(dtype: str, precision: str, rate: float) -> None:
    expected = 2 * 64**3 / rate
    assert seconds(1, 64, 64, 64, hardware=ROUND, dtype=dtype, precision=precision) == pytest.approx(expected)
    assert flops_seconds(2 * 64**3, dtype, precision, ROUND) == pytest.approx(expected)


@pytest.mark.parametrize("name", sheets())
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64", "f8e5m2", "s8", "s32", "c64", "pred"])
def test_every_dtype_has_an_answer_on_every_sheet(name: str, dtype: str) -> None:
    assert len(RATES) == 7
    sheet = sheets()[name]
    for precision in ("default", "highest"):
        whole = matmul_seconds(1, 2048, 2048, 2048, dtype, precision, sheet)
        assert 0 < matmul_seconds(1, 1, 1, 1, dtype, precision, sheet) < whole
        assert whole >= 2 * 2048**3 / max(rate for _, rate in sheet.peak_flops)


@given(
    batch=st.integers(1, 64), m=SIZES, n=SIZES, k=SIZES, hardware=st.sampled_from([ROUND, MEASURED, *sheets().values()])
)
def test_more_work_never_takes_less_time(batch: int, m: int, n: int, k: int, hardware: Hardware) -> None:
    base = seconds(batch, m, n, k, hardware=hardware) * (1 - 1e-9)
    assert base > 0
    for more in ((batch + 1, m, n, k), (batch, m + 1, n, k), (batch, m, n + 1, k), (batch, m, n, k + 1)):
        assert seconds(*more, hardware=hardware) >= base
    assert seconds(batch, m, n, k, hardware=hardware, precision="dot_bf16_bf16_f32_x3") >= base


@pytest.mark.parametrize("hardware", [ROUND, MEASURED, sr.Hardware.named("cuda:h100")], ids=lambda each: each.name)
def test_complex_products_are_four_real_ones(hardware: Hardware) -> None:
    for dtype in ("c64", jnp.complex64, jnp.dtype("complex64")):
        real = flops_seconds(1e12, "f32", "highest", hardware)
        assert flops_seconds(1e12, dtype, "default", hardware) == pytest.approx(4 * real)
        time = matmul_seconds(1, 4096, 4096, 4096, dtype, "default", hardware)
        assert time > 3.9 * matmul_seconds(1, 4096, 4096, 4096, "f32", "highest", hardware)
