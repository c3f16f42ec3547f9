"""FLOPs beside closed forms, brute force, and XLA's own count where that is right."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from shardrules.programs.compiled.flops import Matmul, find_matmuls, flops_by_dtype, total_flops, uncounted_kernels
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.products import Product
from shardrules.programs.compiled.program import read_program
from tests.programs.examples import CLOSED_FORMS, CPU, CUDA, TARGETS, TPU, ClosedForm, array, compiled, mesh_on, text_of


def flops_of(text: str) -> int:
    return total_flops(find_matmuls(read_program(text)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)
def test_closed_forms(case: ClosedForm, target: str) -> None:
    matmuls = find_matmuls(read_program(text_of(case.name, target)))
    assert total_flops(matmuls) == case.flops
    assert flops_by_dtype(matmuls)["f32"] > 0
    assert all(matmul.op_name and matmul.stack for matmul in matmuls)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": "SAME"},
    "strides": {"window_strides": (2, 3), "padding": [(1, 2), (0, 3)]},
    "dilated kernel": {"rhs_dilation": (2, 1), "padding": "SAME"},
    "dilated image": {"lhs_dilation": (2, 3), "padding": [(2, 1), (1, 2)]},
    "both": {"lhs_dilation": (2, 2), "rhs_dilation": (2, 3), "window_strides": (3, 2), "padding": [(4, 4), (3, 5)]},
    "negative padding": {"padding": [(-1, 0), (0, -2)]},
    "groups": {"feature_group_count": 4, "padding": "SAME"},
    "batch groups": {"batch_group_count": 4, "padding": "SAME"},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolutions_agree_with_xla(options: dict[str, Any]) -> None:
    channels = 16 // options.get("feature_group_count", 1)
    image, kernel = jnp.ones((8, 10, 12, 16)), jnp.ones((3, 3, channels, 32))
    options = {"window_strides": (1, 1), "padding": "VALID", **options}
    program = compiled(
        lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options),
        image,
        kernel,
    )
    assert flops_of(program.as_text()) == program.cost_analysis()["flops"]


def gradients_of_a_convolution(target: str) -> Any:
    mesh = mesh_on(target, "data:8")

    def loss(x: Any, w: Any) -> Any:
        same = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.tanh(same))

    args = array(mesh, (64, 32, 32, 16), "data"), array(mesh, (3, 3, 16, 32))
    return compiled(jax.grad(loss, (0, 1)), *args)


@pytest.mark.parametrize(("target", "along"), [(CPU, 16 * 3 - 1), (CUDA, 16 * 3)])
def test_a_convolution_and_its_gradients(target: str, along: int) -> None:
    """All three have the same products. A window reaches past the edge, where GPUs store zeros, which count."""
    matmuls = find_matmuls(read_program(gradients_of_a_convolution(target).as_text()))
    assert [matmul.flops for matmul in matmuls] == [2 * 8 * along * along * 16 * 32] * 3


def convolution(image: int, kernel: int, stride: int, hole: int, gap: int, low: int, high: int) -> tuple[str, int]:
    """A one-dimensional convolution as XLA writes it, and its products, counted one by one."""
    wide, broad = (image - 1) * hole + 1, (kernel - 1) * gap + 1
    result = max(0, (wide + low + high - broad) // stride + 1)
    text = f"""HloModule m

ENTRY %e (x: f32[2,{image},3], w: f32[{kernel},3,5]) -> f32[2,{result},5] {{
  %x = f32[2,{image},3]{{2,1,0}} parameter(0)
  %w = f32[{kernel},3,5]{{2,1,0}} parameter(1)
  ROOT %c = f32[2,{result},5]{{2,1,0}} convolution(%x, %w), window={{size={kernel} stride={stride} pad={low}_{high} \
lhs_dilate={hole} rhs_dilate={gap}}}, dim_labels=b0f_0io->b0f
}}
"""
    products = 0
    for index, element in itertools.product(range(result), range(kernel)):
        position = index * stride + element * gap - low
        products += 0 <= position < wide and position % hole == 0
    return text, 2 * 2 * 3 * 5 * products


small = st.integers(1, 6)


@given(st.integers(1, 12), small, small, small, small, st.integers(-3, 8), st.integers(-3, 8))
@settings(max_examples=300)
def test_windows_agree_with_brute_force(
    image: int, kernel: int, stride: int, hole: int, gap: int, low: int, high: int
) -> None:
    text, flops = convolution(image, kernel, stride, hole, gap, low, high)
    assert flops_of(text) == flops


def test_a_batched_matmul_as_a_dilated_convolution() -> None:
    """TPUs write it so: with dilation each result meets only one matrix."""
    text = """HloModule m

ENTRY %e (q: bf16[2,4,128,64], k: f32[2,4,64,128]) -> f32[2,4,128,128] {
  %q = bf16[2,4,128,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %k = f32[2,4,64,128]{3,2,1,0:T(8,128)} parameter(1)
  ROOT %c = f32[2,4,128,128]{3,2,1,0} convolution(%q, %k), window={size=2x4 stride=1x3 lhs_dilate=2x4}, \
dim_labels=01bf_01io->01bf
}
"""
    (matmul,) = find_matmuls(read_program(text))
    product = Product(8, 128, 128, 64)
    assert matmul == Matmul("convolution", product.flops, "f32", "default", Times(1), "e", "c", products=(product,))
    assert product.flops == 2 * 2 * 4 * 128 * 128 * 64


@pytest.mark.parametrize("target", [CUDA, TPU])  # the CPU compiler may widen small dtypes
@pytest.mark.parametrize(
    ("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float32, "f32"), (jnp.float8_e4m3fn, "f8e4m3fn")]
)
def test_flops_by_dtype(dtype: Any, name: str, target: str) -> None:
    mesh = mesh_on(target, "data:8")
    args = array(mesh, (1024, 512), "data", dtype=dtype), array(mesh, (512, 256), dtype=dtype)
    text = compiled(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32), *args).as_text()
    assert flops_by_dtype(find_matmuls(read_program(text))) == {name: 2 * 128 * 512 * 256}


@pytest.mark.parametrize("target", TARGETS)
def test_the_requested_precision_is_kept(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    args = array(mesh, (1024, 512), "data"), array(mesh, (512, 256))
    for precision, expected in (("highest", "highest"), (None, "default")):
        text = compiled(lambda x, w, precision=precision: jnp.dot(x, w, precision=precision), *args).as_text()
        assert [matmul.precision for matmul in find_matmuls(read_program(text))] == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["highest", None])
@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [("ij,jk->ik", (1024, 512), (512, 256)), ("bij,bkj->bik", (16, 256, 512), (16, 128, 512))],
)
def test_cublas_matmuls_count(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], precision: str | None
) -> None:
    mesh = mesh_on(CUDA, "data:8")
    spec = () if len(right) == 2 else ("data",)
    args = array(mesh, left, "data", dtype=jnp.bfloat16), array(mesh, right, *spec, dtype=jnp.bfloat16)
    text = compiled(
        lambda x, w: jax.nn.relu(jnp.einsum(equation, x, w, precision=precision)),
        *args,
        xla_gpu_enable_triton_gemm=False,
    ).as_text()
    (matmul,) = find_matmuls(read_program(text))
    assert matmul.op.startswith("__cublas$")
    assert (matmul.flops, matmul.dtype) == (2 * math.prod(left) * right[-1 if len(right) == 2 else -2] // 8, "bf16")
    assert matmul.precision == (precision or "default")


def custom(target: str, config: str, operands: str, result: str, more: str = "") -> str:
    types = operands.split("; ")
    parameters = "".join(f"  %p{index} = {type_text} parameter({index})\n" for index, type_text in enumerate(types))
    names = ", ".join(f"%p{index}" for index in range(len(types)))
    call = f'custom-call({names}), custom_call_target="{target}"{more}, backend_config={config}'
    return f"HloModule m\n\nENTRY %e () -> f32[] {{\n{parameters}  ROOT %c = {result} {call}\n}}\n"


NUMBERS = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}'
SCORES = '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","6","2048","1024"]}}}'
QKV = "bf16[2,2048,6,128]; bf16[2,1024,6,128]; bf16[2,1024,6,128]"
ATTENTION = 2 * 2 * 6 * 2048 * 1024 * 128
CONV = ", window={size=3x3 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01"
CONVOLVED = 2 * 4 * 16 * 32 * 25 * 25
IMAGE, KERNEL, RESULT = "f32[4,16,9,9]", "f32[32,16,3,3]", "f32[4,32,9,9]"
F8 = "f8e4m3fn[64,8]; f8e4m3fn[64,16]; f32[]"
ESTIMATE = '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"12345"}}}'
TRANSPOSED = '{"onednn_matmul_config":{"transpose_a":true}}'
LIBRARIES = [
    ("__cublas$gemm", NUMBERS, "f32[64,8]; f32[64,16]", "(f32[8,16], s8[1024])", "", 2 * 64 * 8 * 16),
    ("__cublas$lt$matmul$f8", f'{{"gemm_backend_config":{NUMBERS}}}', F8, "bf16[8,16]", "", 2 * 64 * 8 * 16),
    ("__onednn$matmul", "{}", "f32[4,8,64]; f32[4,64,16]", "f32[4,8,16]", "", 2 * 4 * 64 * 8 * 16),
    ("__onednn$matmul", TRANSPOSED, "f32[64,8]; f32[64,16]", "f32[8,16]", "", 2 * 64 * 8 * 16),
    ("__cudnn$fmhaSoftmax", SCORES, QKV, "(bf16[2,6,2048,128], u8[0])", "", 2 * ATTENTION),
    ("__cudnn$fmhaScaleBiasSoftmaxBackward", SCORES, QKV, "(bf16[2,6,2048,128], u8[0])", "", 5 * ATTENTION),
    ("__cudnn$convForward", "{}", f"{IMAGE}; {KERNEL}", f"({RESULT}, u8[0])", CONV, CONVOLVED),
    ("__cudnn$convBackwardInput", "{}", f"{RESULT}; {KERNEL}", f"({IMAGE}, u8[0])", CONV, CONVOLVED),
    ("__cudnn$convBackwardFilter", "{}", f"{IMAGE}; {RESULT}", f"({KERNEL}, u8[0])", CONV, CONVOLVED),
    ("tpu_custom_call", ESTIMATE, "bf16[8,8]", "bf16[8,8]", "", 12345),
]


@pytest.mark.parametrize(("target", "config", "operands", "result", "more", "flops"), LIBRARIES)
def test_library_calls_count(target: str, config: str, operands: str, result: str, more: str, flops: int) -> None:
    program = read_program(custom(target, config, operands, result, more))
    assert total_flops(find_matmuls(program)) == flops
    assert uncounted_kernels(program) == ()


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("tpu_custom_call", '{"custom_call_config":{"body":"x"}}'),
        ("__gpu$xla.gpu.triton", "{}"),
        ("__cudnn$fmhaSoftmax", "{}"),
        ("__cublas$lt$groupedMatmul", "{}"),
        ("mosaic_gpu_v2", "{}"),
        ("cusolver_getrf_ffi", "{}"),
        ("lapack_spotrf_ffi", "{}"),
        ("of_a_library", "{}"),
    ],
)
def test_kernels_without_an_estimate_are_listed(target: str, config: str) -> None:
    program = read_program(custom(target, config, "bf16[8,8]; bf16[8,8]", "bf16[8,8]"))
    assert find_matmuls(program) == ()
    assert [kernel.name for kernel in uncounted_kernels(program)] == ["c"]


@pytest.mark.parametrize(
    ("operand", "result", "dtype"), [(None, "bf16[8,8]", "bf16"), ("token[]", "f16[8]", "f16"), (None, "()", "f32")]
)
def test_kernels_that_only_write_count(operand: str | None, result: str, dtype: str) -> None:
    parameter, name = ("", "") if operand is None else (f"  %p = {operand} parameter(0)\n", "%p")
    config = '{"custom_call_config":{"cost_estimate":{"flops":"7"}}}'
    text = (
        f"HloModule m\n\nENTRY %e () -> f32[] {{\n{parameter}  ROOT %c = {result} custom-call({name}), "
        f'custom_call_target="tpu_custom_call", backend_config={config}\n}}\n'
    )
    (matmul,) = find_matmuls(read_program(text))
    assert (matmul.flops, matmul.dtype) == (7, dtype)


@pytest.mark.parametrize(
    "target", ["AllocateBuffer", "TopK", "__cub$DeviceRadixSort", "cu_threefry2x32_ffi", "xla_ffi_python_gpu_callback"]
)
def test_other_custom_calls_have_no_flops(target: str) -> None:
    program = read_program(custom(target, "{}", "f32[8,8]", "f32[8,8]"))
    assert find_matmuls(program) == ()
    assert uncounted_kernels(program) == ()


@pytest.mark.parametrize(
    ("line", "contracted", "flops"),
    [
        ("f32[512,256] ragged-dot(%a, %b), lhs_ragged_dims={0}", 1, 2 * 512 * 128 * 256),
        ("f32[4,128,256] ragged-dot(%a, %c), lhs_ragged_dims={0}", 0, 2 * 512 * 128 * 256),
        ("f32[128,256] scaled-dot(%a, %c, %a, %c)", 0, 2 * 512 * 128 * 256),
        ("s32[128,128] dot(%i, %i)", 0, 2 * 512 * 128 * 128),
    ],
)
def test_other_kinds_of_dots(line: str, contracted: int, flops: int) -> None:
    text = (
        "HloModule m\n\nENTRY %e () -> f32[] {\n  %a = bf16[512,128] parameter(0)\n"
        "  %b = bf16[4,128,256] parameter(1)\n  %c = bf16[512,256] parameter(2)\n  %i = s8[512,128] parameter(3)\n"
        f"  ROOT %d = {line}, lhs_contracting_dims={{{contracted}}}, rhs_contracting_dims={{{contracted}}}\n}}\n"
    )
    (matmul,) = find_matmuls(read_program(text))
    assert (matmul.flops, matmul.dtype) == (flops, "s8" if "s32" in line else "bf16")


def test_an_algorithm_names_the_dtype() -> None:
    text = (
        "HloModule m\n\nENTRY %e () -> f32[] {\n  %a = f32[8,8] parameter(0)\n"
        "  ROOT %d = f32[8,8] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "algorithm=dot_bf16_bf16_f32_x3\n}\n"
    )
    (matmul,) = find_matmuls(read_program(text))
    assert (matmul.dtype, matmul.precision) == ("bf16", "dot_bf16_bf16_f32_x3")


@pytest.mark.parametrize(("operation", "flops"), [("dot_general", 2 * 8 * 4), ("reduce_sum", 0)])
def test_a_product_with_a_vector_may_be_written_as_a_sum(operation: str, flops: int) -> None:
    text = (
        "HloModule m\n\nENTRY %e () -> f32[] {\n  %w = f32[8,4] parameter(0)\n  %m = f32[8,4] multiply(%w, %w)\n"
        "  %c = f32[8,4] copy(%m)\n  %z = f32[] constant(0)\n"
        f'  ROOT %r = f32[8] reduce(%c, %z), dimensions={{1}}, metadata={{op_name="jit(f)/{operation}"}}\n}}\n'
    )
    assert flops_of(text) == flops
