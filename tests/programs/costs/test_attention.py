"""What attention kernels take: below the rate of a matmul, and closer to it the longer the sequence."""

import attrs
import pytest

import shardrules as sr
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.products import Product
from shardrules.programs.costs.attention import attention_seconds, is_attention
from shardrules.programs.costs.matmul import matmul_seconds
from shardrules.programs.machine.hardware import sheets

H100 = sr.Hardware.named("cuda:h100")
SHORT = attrs.evolve(H100, matmul_fractions=794 / 989.4)  # as fast as in runs that are over before power limits them


def attention(
    length: int,
    columns: int | None = None,
    size: int = 128,
    matmuls: int = 2,
    batch: int = 64,
    op: str = "__cudnn$fmha",
    *,
    is_masked: bool = False,
) -> Matmul:
    product = Product(batch, length, columns or length, size)
    flops = matmuls * product.flops
    matmul = Matmul(op, flops, "bf16", "default", Times(1), "c", "k", products=(product,) * matmuls, origin="formula")
    return attrs.evolve(matmul, is_masked=is_masked)


@pytest.mark.parametrize(
    ("matmul", "measured"),  # arXiv 2407.08608, figures 5 and 6, cuDNN: in TFLOP/s, FLOPs of masked scores left out
    [
        *[(attention(length), rate) for length, rate in ((512, 497), (1024, 574), (2048, 617), (8192, 600))],
        *[(attention(length, size=64), rate) for length, rate in ((512, 335), (2048, 395), (16384, 413))],
        *[(attention(length, size=256), rate) for length, rate in ((512, 470), (2048, 580), (16384, 581))],
        *[(attention(length, matmuls=5), rate) for length, rate in ((512, 305), (1024, 408), (4096, 499))],
        *[(attention(length, size=64, matmuls=5), rate) for length, rate in ((512, 266), (2048, 395), (16384, 433))],
        # A causal kernel computes whole blocks along the diagonal: (n + 1) / n of the FLOPs that the figure counts.
        *[
            (attention(length, length // 2 + 64, is_masked=True), rate * (1 + 128 / length))
            for length, rate in ((1024, 410), (4096, 518), (16384, 539))
        ],
        (attention(16384, op="__gpu$xla.gpu.triton"), 395),
    ],
)
def test_gpus_reach_what_was_measured_in_short_runs(matmul: Matmul, measured: float) -> None:
    assert matmul.flops / attention_seconds(matmul, SHORT) / 1e12 == pytest.approx(measured, rel=0.1)


def test_load_slows_attention_down_as_much_as_large_matmuls() -> None:
    dims = (1, 16384, 16384, 16384, "bf16", "default")
    of_matmuls = matmul_seconds(*dims, H100) / matmul_seconds(*dims, SHORT)
    assert attention_seconds(attention(8192), H100) / attention_seconds(attention(8192), SHORT) == pytest.approx(
        of_matmuls, rel=0.02
    )
    # A matmul that is faster than in short runs says nothing of attention.
    fast = attrs.evolve(H100, matmul_fractions=0.95)
    assert attention_seconds(attention(8192), fast) == attention_seconds(attention(8192), SHORT)


@pytest.mark.parametrize("name", sheets())
@pytest.mark.parametrize("matmuls", [2, 3, 4, 5])
def test_attention_is_slower_than_its_matmuls(name: str, matmuls: int) -> None:
    hardware = sr.Hardware.named(name)
    small, large = (attention(length, matmuls=matmuls, op="tpu_custom_call") for length in (512, 4096))
    peak = dict(hardware.peak_flops)["bf16"]
    for each in (small, large):
        assert attention_seconds(each, hardware) >= each.flops / peak
    assert attention_seconds(large, hardware) >= 63 * attention_seconds(small, hardware)


def test_large_blocks_cost_their_cycles_once() -> None:
    v6e = sr.Hardware.named("tpu:v6e")
    large, small = (
        attention(size, batch=count, op="tpu_custom_call", is_masked=True) for size, count in ((2048, 16), (512, 256))
    )
    unknown = attrs.evolve(large, is_masked=False)  # it may work on blocks of any size
    assert large.flops == small.flops
    assert attention_seconds(large, v6e) < 0.95 * attention_seconds(small, v6e)
    assert attention_seconds(unknown, v6e) == attention_seconds(small, v6e)


def test_blocks_cost_cycles_of_their_own_on_tpus() -> None:
    v5e = sr.Hardware.named("tpu:v5e")
    large = attention(512, batch=16, op="tpu_custom_call")
    small = attention(128, batch=16 * 16, op="tpu_custom_call")
    assert small.flops == large.flops
    assert attention_seconds(small, v5e) > 2 * attention_seconds(large, v5e)


def test_small_heads_fill_half_of_a_large_unit() -> None:
    """Heads of 128 leave half of a unit of 256 x 256 idle."""
    v6e = sr.Hardware.named("tpu:v6e")
    heads = [attention(512, size=size, matmuls=5, op="tpu_custom_call") for size in (128, 256)]
    assert attention_seconds(heads[0], v6e) == pytest.approx(attention_seconds(heads[1], v6e))


def test_fewer_keys_than_queries_are_no_mask() -> None:
    cross, masked = (attention(4096, 1024, is_masked=is_masked) for is_masked in (False, True))
    assert attention_seconds(cross, H100) == pytest.approx(attention_seconds(attention(4096), H100) / 4)
    assert attention_seconds(masked, H100) > 1.1 * attention_seconds(cross, H100)


def test_sheets_without_a_rate_for_bf16_serve() -> None:
    peaks = {"f32": 49e12}
    old = attrs.evolve(sr.Hardware.named("tpu:v5e"), peak_flops=peaks, matmul_fractions=(), matmul_rates=())
    assert attention_seconds(attention(512), old) >= attention(512).flops / 49e12


def test_a_single_query_is_no_case_for_it() -> None:
    assert is_attention(attention(512))
    assert not is_attention(attention(1, 4096))
    assert not is_attention(attention(512, matmuls=1))
