"""What compiled kernels take: the compiler's cycles, shapes, traffic and the user's costs, in this order of belief."""

import re

import attrs
import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.compiled.flops import Matmul, find_matmuls
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.kernels import Kernel, find_kernels
from shardrules.programs.compiled.products import Product
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.kernels import flops_part, kernel_seconds
from shardrules.programs.costs.matmul import matmul_seconds
from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.machine.hardware import sheets
from tests.programs.examples import compiled, mesh_on

V5E, V5P, V6E, H100 = (sr.Hardware.named(name) for name in ("tpu:v5e", "tpu:v5p", "tpu:v6e", "cuda:h100"))
SQUARE = Product(1, 4096, 4096, 4096)


def kernel(nbytes: int = 0, product: Product | None = None, cycles: int = 0, **more: object) -> Kernel:
    matmul = None
    if product is not None:
        matmul = Matmul("dot", product.flops, "bf16", "default", Times(1), "c", "k", products=(product,))
        matmul = attrs.evolve(matmul, **more)
    flops = () if matmul is None else ((("bf16", "default"), matmul.flops),)
    matmuls = () if matmul is None else (matmul,)
    return Kernel("k", "main", "fusion", "", (), nbytes, 0, flops, Times(3), matmuls, cycles)


def test_cycles_are_believed_for_matmuls() -> None:
    assert kernel_seconds(kernel(10**6, SQUARE, 1_503_000), V5E) == pytest.approx(1e-3)


def test_cycles_of_other_kernels_only_shorten_them() -> None:
    traffic = V5E.launch_seconds + traffic_seconds(10**9, V5E)
    assert kernel_seconds(kernel(10**9, cycles=10**9), V5E) == pytest.approx(traffic)
    assert kernel_seconds(kernel(10**9, cycles=1503), V5E) == pytest.approx(1e-6)


def test_cycles_without_a_clock_are_left_out() -> None:
    blind = attrs.evolve(V5E, clock_hertz=0)
    assert kernel_seconds(kernel(0, SQUARE, 7), blind) == kernel_seconds(kernel(0, SQUARE), blind)


def test_scalars_are_not_launched_on_tpus() -> None:
    counter = attrs.evolve(kernel(12), is_scalar=True)
    assert kernel_seconds(counter, V5E) < 1e-9 < V5E.launch_seconds < kernel_seconds(kernel(12), V5E)
    assert kernel_seconds(counter, H100) == kernel_seconds(kernel(12), H100) > H100.launch_seconds
    # A sum of a large array is not free, with an estimate or without.
    assert kernel_seconds(attrs.evolve(kernel(10**9), is_scalar=True), V5E) == pytest.approx(
        traffic_seconds(10**9, V5E)
    )
    assert kernel_seconds(attrs.evolve(counter, estimated_cycles=1503), V5E) == pytest.approx(1e-6)


@pytest.mark.parametrize("hardware", [V5E, H100], ids=["v5e", "h100"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_estimate_counts_in_time_as_in_flops(hardware: sr.Hardware, count: int) -> None:
    formula = kernel(0, SQUARE, products=(SQUARE,) * count, flops=count * SQUARE.flops, origin="formula")
    (matmul,) = formula.matmuls
    half = attrs.evolve(formula, matmuls=(attrs.evolve(matmul, flops=matmul.flops // 2, origin="estimate"),))
    assert flops_part(half, hardware) == pytest.approx(flops_part(formula, hardware) / 2)


@pytest.mark.parametrize("name", [name for name in sheets() if name != "cpu"])
def test_shapes_give_the_time_of_a_matmul(name: str) -> None:
    hardware = sr.Hardware.named(name)
    expected = hardware.launch_seconds + matmul_seconds(1, 4096, 4096, 4096, "bf16", "default", hardware)
    assert kernel_seconds(kernel(0, SQUARE), hardware) == pytest.approx(expected)
    # A product of a vector reads a matrix for each of its rows, and takes as long as that.
    thin = kernel(2 * 4096**2, Product(1, 1, 4096, 4096))
    assert kernel_seconds(thin, hardware) >= hardware.launch_seconds + traffic_seconds(2 * 4096**2, hardware, "read")


def test_the_users_cost_comes_first() -> None:
    users = kernel(10**6, SQUARE, 1_503_000, origin="user", products=())
    assert kernel_seconds(users, V5E) != pytest.approx(1e-3)
    twice = attrs.evolve(users, matmuls=tuple(attrs.evolve(each, flops=2 * each.flops) for each in users.matmuls))
    assert kernel_seconds(twice, H100) > 1.9 * kernel_seconds(users, H100)


def run_alone(lines: str, hardware: sr.Hardware) -> tuple[Kernel, float]:
    """The kernel at the end of a program, and what it takes without its launch."""
    program = read_program(f"HloModule m\n\nENTRY %e () -> f32[] {{\n{lines}\n}}\n")
    kernel = find_kernels(program, find_matmuls(program))[-1]
    return kernel, kernel_seconds(kernel, hardware) - hardware.launch_seconds


ROWS = "  %t = f32[100000,{width}] parameter(0)\n  %i = s32[4096,1] parameter(1)\n"


@pytest.mark.parametrize(("width", "access"), [(16, "gather"), (128, "gather"), (4096, "copy")])
def test_short_rows_at_any_positions_take_longer(width: int, access: str) -> None:
    lines, size = ROWS.format(width=width), 4096 * width * 4
    gather = f"  ROOT %g = f32[4096,{width}] gather(%t, %i), offset_dims={{1}}, slice_sizes={{1,{width}}}"
    kernel, seconds = run_alone(lines + gather, H100)
    in_order = kernel.device_bytes - kernel.gathered_bytes
    assert in_order == (4096 * 4 if access == "gather" else 2 * size + 4096 * 4)
    expected = traffic_seconds(kernel.gathered_bytes, H100, "gather") + traffic_seconds(in_order, H100)
    assert seconds == pytest.approx(expected)
    update = f"  %u = f32[4096,{width}] parameter(2)\n  ROOT %g = f32[100000,{width}] scatter(%t, %i, %u), "
    scatter, _ = run_alone(lines + update + "update_window_dims={1}, inserted_window_dims={0}, to_apply=%add", H100)
    assert scatter.gathered_bytes == (2 * size if access == "gather" else 0)


@pytest.mark.parametrize(
    ("table", "layout", "sizes", "is_short"),
    [
        # A row has a piece in each of its tiles, as long as it may be.
        ("bf16[100000,4096]", "{1,0:T(8,128)(2,1)}", "{1,4096}", True),
        ("f32[100000,4096]", "{1,0:T(8,128)}", "{1,4096}", True),
        ("f32[4096,100000]", "{0,1:T(8,128)}", "{4096,1}", True),
        # Several rows that are whole tiles, and rows of arrays without tiles.
        ("f32[100000,8,4096]", "{2,1,0:T(8,128)}", "{1,8,4096}", False),
        ("f32[100000,4,4096]", "{2,1,0:T(8,128)}", "{1,4,4096}", False),
        ("f32[100000,4096]", "{1,0}", "{1,4096}", False),
    ],
)
def test_rows_of_tiles_are_gathered_in_pieces(table: str, layout: str, sizes: str, is_short: bool) -> None:
    lines = f"  %t = {table}{layout} parameter(0)\n  %i = s32[512,1] parameter(1)\n"
    width = table[table.index("[") + 1 : -1].replace("100000,", "").replace(",100000", "")
    result = f"{table.partition('[')[0]}[512,{width}]"
    kernel, _ = run_alone(f"{lines}  ROOT %g = {result} gather(%t, %i), slice_sizes={sizes}", V5E)
    assert kernel.gathered_bytes == (2 * kernel.written_bytes if is_short else 0)


def test_what_only_reads_is_faster_than_a_copy() -> None:
    expected = H100.launch_seconds + traffic_seconds(10**9, H100, "read")
    assert kernel_seconds(kernel(10**9), H100) == pytest.approx(expected)
    assert kernel_seconds(attrs.evolve(kernel(10**9), written_bytes=10**9), H100) == pytest.approx(
        H100.launch_seconds + traffic_seconds(2 * 10**9, H100)
    )


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("sort(%x), dimensions={1}, to_apply=%less", 1),
        ("sort(%x), dimensions={0}, to_apply=%less", 1 + (2 + 3 + 4 + 5 + 6)),
        ('custom-call(%x), custom_call_target="__cub$DeviceRadixSort"', 4),
        ("negate(%x)", 1),
    ],
)
def test_sorting_takes_several_passes(line: str, passes: int) -> None:
    kernel, seconds = run_alone(f"  %x = f32[65536,8] parameter(0)\n  ROOT %s = f32[65536,8] {line}", H100)
    assert (kernel.read_bytes, kernel.written_bytes) == (65536 * 32, 65536 * 32)
    assert seconds == pytest.approx(passes * traffic_seconds(2 * 65536 * 32, H100))


def test_every_tpu_has_the_clock_of_its_peak() -> None:
    for name, hardware in sheets().items():
        cycles = dict(hardware.peak_flops)["bf16"] / hardware.clock_hertz if hardware.clock_hertz else 0
        units = cycles / (2 * hardware.matmul_tile**2)
        assert (cycles > 0) == name.startswith("tpu")
        assert abs(units - round(units)) < 0.01


# As libtpu 0.0.42 prints 8192x8192x8192 for a v6e with xla_tpu_scoped_vmem_limit_kib=98304, which takes half a minute.
LARGE_MATMUL = """HloModule m

%fused (a: bf16[8192,8192], b: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192]{1,0} parameter(0)
  %b = bf16[8192,8192]{1,0} parameter(1)
  ROOT %c = bf16[8192,8192]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %e (a: bf16[8192,8192], b: bf16[8192,8192]) -> bf16[8192,8192] {
  %a.1 = bf16[8192,8192]{1,0} parameter(0)
  %b.1 = bf16[8192,8192]{1,0} parameter(1)
  ROOT %f = bf16[8192,8192]{1,0} fusion(%a.1, %b.1), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"2337656","iteration_bounds":["8","10","1"]}}
}
"""


def test_cycles_of_a_large_matmul_match_the_one_that_was_measured() -> None:
    """827 TFLOP/s on a v6e, with the memory beside the cores that the benchmark asks for."""
    program = read_program(LARGE_MATMUL)
    (matmul,) = find_kernels(program, find_matmuls(program))
    assert [each.products for each in matmul.matmuls] == [(Product(1, 8192, 8192, 8192),)]
    assert 2 * 8192**3 / kernel_seconds(matmul, V6E) == pytest.approx(827e12, rel=0.01)


@pytest.mark.parametrize("cycles", ["9223372036854775807", "0", "-1"])
def test_estimates_that_say_nothing_are_none(cycles: str) -> None:
    program = read_program(LARGE_MATMUL.replace("2337656", cycles))
    (matmul,) = find_kernels(program, find_matmuls(program))
    assert matmul.estimated_cycles == 0
    assert kernel_seconds(matmul, V6E) == pytest.approx(2 * 8192**3 / 827e12, rel=0.02)


@pytest.mark.slow
def test_copies_reach_what_was_measured() -> None:
    """1,360 GB/s on a v6e and 2.29 to 2.38 TB/s on a v5p, read and written; libtpu's cycles are twice as many."""
    for target, hardware, rate in (("tpu:v6e:1x1", V6E, 1360e9), ("tpu:v5p:1x1x1", V5P, 2335e9)):
        mesh = mesh_on(target, "data:1")
        x = jax.ShapeDtypeStruct((2**15, 2**10), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))
        program = read_program(compiled(lambda x: x * 2, x).as_text())
        (copy,) = find_kernels(program, ())
        assert re.search("estimated_cycles", program.entry_computation.by_name[copy.name].text)
        assert 2 * 2**26 / kernel_seconds(copy, hardware) == pytest.approx(rate, rel=0.05)
