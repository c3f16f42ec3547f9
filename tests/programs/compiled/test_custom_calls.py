"""What custom calls compute, by the user, by their authors, and by formulas for the kernels that JAX has."""

import json
from typing import Any

import pytest

import shardrules as sr
from shardrules.programs.compiled.custom_calls import kernel_names
from shardrules.programs.compiled.flops import Matmul, find_matmuls, total_flops, uncounted_kernels
from shardrules.programs.compiled.kernel_costs import KernelCall, KernelFacts
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.compiled.text import read_instruction
from shardrules.programs.costs.kernels import flops_part
from shardrules.programs.costs.matmul import matmul_seconds

BATCH, HEADS, LENGTH, SIZE = 2, 4, 2048, 128
MATMUL = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
QUERY = f"bf16[{BATCH},{HEADS},{LENGTH},{SIZE}]"
GROUPED = f"bf16[{BATCH},1,{LENGTH},{SIZE}]"
MASK = "s8[1,4,4]"
SETTINGS = {"block_q": 512, "block_kv": 512, "block_q_dq": 512, "block_kv_dq": 512, "q_layout": 1}


def program(
    name: str, operands: str, result: str, target: str = "tpu_custom_call", config: Any = None, scope: str = ""
) -> CompiledProgram:
    types = operands.split("; ")
    lines = [f"  %p{index} = {text} parameter({index})" for index, text in enumerate(types)]
    names = ", ".join(f"%p{index}" for index in range(len(types)))
    metadata = json.dumps(json.dumps(SETTINGS))
    attributes = (
        f'custom_call_target="{target}", frontend_attributes={{kernel_metadata={{"xprof_metadata":{metadata}}}}}, '
        f'metadata={{op_name="jit(f)/{scope or name}/pallas_call"}}, backend_config={json.dumps(config or {})}'
    )
    lines.append(f"  ROOT %{name}.3 = {result} custom-call({names}), {attributes}")
    return read_program("HloModule m\n\nENTRY %e () -> f32[] {\n" + "\n".join(lines) + "\n}\n")


SPLASH = f"{MASK}; {MASK}; {QUERY}; {QUERY}; {QUERY}; s32[{LENGTH},128]"
GROUPS = f"{MASK}; {MASK}; {QUERY}; {GROUPED}; {GROUPED}; s32[{LENGTH},128]"
SINGLE = f"{MASK}; {MASK}; {QUERY}; bf16[{BATCH},{LENGTH},{SIZE}]; bf16[{BATCH},{LENGTH},{SIZE}]"
SCRATCH = "f32[512,128]"
BLOCK_TOTAL = 16
KERNELS = [  # name, operands, result, matmuls over all scores
    ("splash_mha_fwd_residuals", SPLASH, f"({SCRATCH}, {QUERY})", 2),
    ("splash_mha_fwd_no_residuals", SPLASH, f"({SCRATCH}, {QUERY})", 2),
    ("splash_mha_fwd_segmented_residuals", GROUPS, f"({SCRATCH}, {QUERY})", 2),
    ("splash_mqa_fwd_residuals", SINGLE, f"({SCRATCH}, {QUERY})", 2),
    ("splash_mha_dq_no_residuals", SPLASH, f"({SCRATCH}, {QUERY})", 3),
    ("splash_mha_dkv_no_residuals", SPLASH, f"({SCRATCH}, {SCRATCH}, {QUERY}, {QUERY})", 4),
    ("splash_mha_dkv_no_residuals", SPLASH, f"(bf16[4,{BATCH},{HEADS},{LENGTH},{SIZE}], {QUERY}, {QUERY})", 5),
    ("flash_mha_bwd_dq_block_q_major_128", f"{QUERY}; {QUERY}; {QUERY}", QUERY, 3),
    ("_flash_attention_dkv_kernel", f"{QUERY}; {QUERY}; {QUERY}", f"({QUERY}, {QUERY})", 4),
]


@pytest.mark.parametrize(("name", "operands", "result", "matmuls"), KERNELS)
def test_known_kernels_count_by_formula(name: str, operands: str, result: str, matmuls: int) -> None:
    text = program(name, operands, result)
    (matmul,) = find_matmuls(text)
    assert (matmul.flops, matmul.origin, matmul.dtype) == (matmuls * MATMUL, "formula", "bf16")
    assert len(matmul.products) == matmuls
    assert uncounted_kernels(text) == ()


@pytest.mark.parametrize(("name", "operands", "result", "matmuls"), [case for case in KERNELS if "splash" in case[0]])
def test_masked_blocks_do_not_count(name: str, operands: str, result: str, matmuls: int) -> None:
    text = program(name, operands, result)
    (call,) = [each for each in text.entry_computation.instructions if each.op == "custom-call"]
    shapes = tuple(operand.shape for operand in text.entry_computation.operand_types(call))
    mine = KernelCall(name, shapes, tuple(each.shape for each in call.types), block_count=10)
    (matmul,) = find_matmuls(text, KernelFacts((), [mine]))
    assert matmul.flops == matmuls * MATMUL * 10 // BLOCK_TOTAL


def test_attention_on_gpus_by_formula() -> None:
    arrays = "; ".join([f"bf16[{BATCH},{LENGTH},{HEADS},{SIZE}]"] * 3)
    for name, matmuls in (("mha_forward", 2), ("mha_backward", 5), ("mha_preprocess_backward", 0)):
        text = program(name, arrays, "bf16[8]", "__gpu$xla.gpu.triton")
        assert total_flops(find_matmuls(text)) == matmuls * MATMUL
        assert uncounted_kernels(text) == ()


def test_pages_count_as_full() -> None:
    operands = "s32[3,16]; bf16[3,8,128]; bf16[2,64,32,128]; bf16[2,64,32,128]"
    (matmul,) = find_matmuls(program("paged_flash_attention_kernel", operands, "bf16[3,8,128]"))
    assert matmul.flops == 2 * 2 * 3 * 8 * 16 * 32 * 128


def test_ragged_matmuls_count_each_row_once() -> None:
    for operands, result in (
        ("s32[8]; bf16[512,256]; bf16[8,256,128]", "bf16[512,128]"),
        ("s32[8]; bf16[512,256]; bf16[512,128]", "bf16[8,256,128]"),
    ):
        assert total_flops(find_matmuls(program("gmm", operands, result))) == 2 * 512 * 256 * 128


RAGGED = [  # operands, result, blocks of rows, of the other side and of the result, the sizes in whole blocks
    (
        "s32[8]; bf16[512,256]; bf16[8,256,192]",
        "bf16[512,192]",
        ((64, 256), (1, 256, 128), (64, 128)),
        (512 + 7 * 64, 256, 256),
    ),
    (
        "s32[8]; bf16[512,200]; bf16[8,192,200]",
        "bf16[512,192]",
        ((64, 128), (1, 128, 128), (64, 128)),
        (512 + 7 * 64, 256, 256),
    ),
    (
        "s32[8]; bf16[512,256]; bf16[512,192]",
        "bf16[8,256,192]",
        ((64, 256), (64, 128), (1, 256, 128)),
        (256, 256, 512 + 7 * 64),
    ),
]


@pytest.mark.parametrize(("operands", "result", "blocks", "sizes"), RAGGED)
def test_ragged_matmuls_take_as_long_as_whole_blocks(
    operands: str, result: str, blocks: tuple[tuple[int, ...], ...], sizes: tuple[int, int, int]
) -> None:
    text = program("gmm", operands, result)
    (call,) = [each for each in text.entry_computation.instructions if each.op == "custom-call"]
    shapes = tuple(operand.shape for operand in text.entry_computation.operand_types(call))
    mine = KernelCall("kernel", shapes, tuple(each.shape for each in call.types), block_shapes=blocks)
    (matmul,), (bare,) = (find_matmuls(text, KernelFacts((), calls)) for calls in ([mine], []))
    (product,) = matmul.products
    assert product.whole_blocks == sizes
    assert matmul.flops == bare.flops, "what is multiplied besides is no work"
    v5p = sr.Hardware.named("tpu:v5p")
    (kernel,), (whole,) = (find_kernels(text, [each]) for each in (matmul, bare))
    m, n, k = sizes
    assert flops_part(kernel, v5p) == matmul_seconds(1, m, n, k, "bf16", "default", v5p) > flops_part(whole, v5p)


ESTIMATE = {"custom_call_config": {"cost_estimate": {"flops": "123", "bytes_accessed": "4096"}}}


def test_an_authors_estimate_comes_before_a_formula() -> None:
    text = program("splash_mha_fwd_residuals", SPLASH, QUERY, config=ESTIMATE)
    (matmul,) = find_matmuls(text)
    assert (matmul.flops, matmul.nbytes, matmul.origin) == (123, 4096, "estimate")
    (kernel,) = find_kernels(text, [matmul])
    assert kernel.total_bytes == 4096


def test_a_formula_says_which_matmuls_an_estimate_is() -> None:
    operands = f"{QUERY}; {QUERY}; {QUERY}"
    (matmul,) = find_matmuls(program("_flash_attention_kernel", operands, QUERY, config=ESTIMATE))
    assert (matmul.flops, matmul.origin) == (123, "estimate")
    assert sum(product.flops for product in matmul.products) == 2 * MATMUL


def test_the_users_cost_comes_first() -> None:
    cost = sr.kernel_cost("splash_mha_*", flops=lambda *shapes: shapes[2].size, bytes=10)
    text = program("splash_mha_fwd_residuals", SPLASH, QUERY, config=ESTIMATE)
    (matmul,) = find_matmuls(text, KernelFacts([cost]))
    assert (matmul.flops, matmul.nbytes, matmul.origin) == (BATCH * HEADS * LENGTH * SIZE, 10, "user")
    (kernel,) = find_kernels(text, [matmul])
    assert kernel.total_bytes == 10


def test_a_cost_may_name_the_target_of_any_custom_call() -> None:
    text = program("c", "f32[8,8]", "f32[8,8]", "my_ffi_target")
    assert find_matmuls(text) == ()
    (matmul,) = find_matmuls(text, KernelFacts([sr.kernel_cost("my_ffi_*", 5)]))
    assert matmul.flops == 5


def test_jax_knows_estimates_that_the_program_lacks() -> None:
    text = program("pallas_call", "f32[8,8]", "f32[8,8]", "mosaic_gpu_v2", scope="shard_map")
    mine = KernelCall("mine", ((8, 8),), ((8, 8),), 99, 512)
    (matmul,) = find_matmuls(text, KernelFacts((), [mine]))
    assert (matmul.flops, matmul.nbytes) == (99, 512)
    # By its name as the function has it, too.
    (matmul,) = find_matmuls(text, KernelFacts([sr.kernel_cost("mine", 1)], [mine]))
    assert matmul.flops == 1
    # Two kernels of the same shapes cannot be told apart without their names.
    other = KernelCall("other", ((8, 8),), ((8, 8),), 7)
    assert find_matmuls(text, KernelFacts((), [mine, other])) == ()


NAMES = [  # the line of a kernel, its names
    ('%scan.3.clone = f32[8] custom-call(%x), custom_call_target="t"', ("scan", "t")),
    ('%c = f32[8] custom-call(%x), custom_call_target="t", metadata={op_name="pallas_call"}', ("c", "t")),
    (
        '%c = f32[8] custom-call(%x), custom_call_target="t", metadata={op_name="f/mine/pallas_call"}',
        ("c", "mine", "t"),
    ),
    ('%c = f32[8] custom-call(%x), custom_call_target="t", metadata={op_name="jit(f)/pallas_call"}', ("c", "t")),
    ('%c = f32[8] custom-call(%x), custom_call_target="t", backend_config={name = "mha", grid_x = 1}', ("mha", "t")),
]


@pytest.mark.parametrize(("line", "names"), NAMES)
def test_kernels_have_names(line: str, names: tuple[str, ...]) -> None:
    assert kernel_names(read_instruction(line, {})[0]) == names


def cudnn(mask: str, rows: int, columns: int, window: int = 0) -> Matmul:
    scores = {"dimensions": ["1", "2", str(rows), str(columns)]}
    config = {"mask_type": mask, "sliding_window_length": window, "intermediate_tensor_shape": scores}
    text = program(
        "a", f"bf16[1,{rows},2,64]", "(bf16[8], u8[0])", "__cudnn$fmhaSoftmax", {"cudnn_fmha_backend_config": config}
    )
    (matmul,) = find_matmuls(text)
    return matmul


@pytest.mark.parametrize(
    ("mask", "rows", "columns", "window", "scores"),
    [
        ("NO_MASK", 300, 700, 0, 300 * 700),
        ("PADDING", 256, 256, 0, 256 * 256),
        ("CAUSAL", 1024, 1024, 0, 36 * 128**2),
        ("PADDING_CAUSAL", 1024, 1024, 0, 36 * 128**2),
        ("CAUSAL", 64, 64, 0, 64 * 64),
        ("CAUSAL", 512, 256, 0, (1 + 2 + 2 + 2) * 128**2),
        ("CAUSAL", 1024, 1024, 128, 15 * 128**2),
    ],
)
def test_masks_of_cudnn(mask: str, rows: int, columns: int, window: int, scores: int) -> None:
    matmul = cudnn(mask, rows, columns, window)
    assert matmul.flops // (2 * 2 * 2 * 64) == scores
    assert matmul.is_masked == ("CAUSAL" in mask)


@pytest.mark.parametrize("length", [200, 1000, 1500, 4000])
def test_masks_of_cudnn_with_any_length(length: int) -> None:
    causal, full = cudnn("CAUSAL", length, length), cudnn("NO_MASK", length, length)
    assert (causal.is_masked, full.is_masked) == (True, False)
    assert causal.products[0].m == length, "all queries, not those of a block"
    assert full.flops / 2 < causal.flops <= min(1.0, 0.5 + 256 / length) * full.flops
