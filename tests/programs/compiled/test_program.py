"""Whole programs of every target are read as JAX compiled them."""

import inspect
import re
from typing import Any

import jax
import pytest

from shardrules.core.errors import ProgramTextError
from shardrules.core.source import Source
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import Alias, CompiledProgram, read_program
from shardrules.programs.compiled.text import ArrayType, Instruction
from tests.programs import examples
from tests.programs.examples import CLOSED_FORMS, TARGETS, array, mesh_on, text_of


def find(program: CompiledProgram, pattern: str) -> Instruction:
    """The first instruction with a matching `op_name`."""
    return next(instruction for _, instruction in program.walk() if re.search(pattern, instruction.op_name))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)
def test_arguments_and_results_agree_with_jax(case: examples.ClosedForm, target: str) -> None:
    fn, args, _ = case.build(mesh_on(target, case.axes))
    program = read_program(text_of(case.name, target))
    assert program.partition_count == 8
    assert program.name == f"jit_{fn.__name__}"

    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(args)]
    parameters = program.entry_computation.parameters
    assert [parameter.op_name for parameter in parameters] == argument_names(fn, args)
    assert [parameter.types for parameter in parameters] == [(ArrayType("f32", shape, 32),) for shape in shards]
    assert len(program.outputs) == len(jax.tree.leaves(jax.eval_shape(fn, *args)))


def argument_names(fn: Any, args: tuple[Any, ...]) -> list[str]:
    return [
        name + jax.tree_util.keystr(path)
        for name, arg in zip(inspect.signature(fn).parameters, args, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(arg)
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_donated_arguments_are_aliased(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    state = {"a": array(mesh, (64, 8), "data"), "b": array(mesh, (64, 16), "data")}
    jitted = jax.jit(lambda s, x: (jax.tree.map(lambda w: w + x, s), x.sum()), donate_argnums=0)
    program = read_program(str(jitted.lower(state, array(mesh, ())).compile().as_text()))
    assert [(alias.output, alias.parameter) for alias in program.aliases] == [((0,), 0), ((1,), 1)]


def test_both_kinds_of_aliases_are_read() -> None:
    text = "HloModule m, input_output_alias={ {}: (1, {}, must-alias), {2, 0}: (3, {}, may-alias), {1}: (0, {}) }\n"
    program = read_program(text + "\nENTRY %e (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n")
    assert program.aliases == (Alias((), 1, True), Alias((2, 0), 3, False), Alias((1,), 0, False))


@pytest.mark.parametrize("target", TARGETS)
def test_instructions_have_lines_of_python(target: str) -> None:
    program = read_program(text_of("column then row", target))
    gelu = find(program, "dot_general")
    source, *callers = program.stack(gelu)
    lines, first = examples.column_then_row.__code__.co_filename, examples.column_then_row.__code__.co_firstlineno
    assert source.file == lines
    assert 0 < source.line - first < 4
    assert source.function.endswith("mlp")
    assert str(source) == f"{source.file}:{source.line}"
    assert [source.function for source in callers][:2] == ["compiled", "text_of"]
    assert program.stack(program.entry_computation.parameters[0]) == ()


def test_stack_frames_are_read() -> None:
    text = """HloModule m

FileNames
1 "/a.py"
2 "/b \\"c\\".py"

FunctionNames
1 "main"
2 "inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %e (p: f32[]) -> f32[] {
  %p = f32[] parameter(0), metadata={op_name="p"}
  ROOT %n = f32[] negate(%p), metadata={op_name="neg" stack_frame_id=2}
}
"""
    program = read_program(text)
    stack = program.stack(program.instruction(Value("e", "n")))
    assert [source.line for source in stack] == [20, 10]
    assert stack[1] == Source("/a.py", 10, "main")


def test_a_source_line_in_the_metadata_is_read() -> None:
    text = """HloModule m

ENTRY %e (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  ROOT %n = f32[] negate(%p), metadata={op_name="neg" source_file="/x/y.py" source_line=7}
}
"""
    program = read_program(text)
    assert program.stack(program.instruction(Value("e", "n"))) == (Source("/x/y.py", 7),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a compiled program starts with 'HloModule', this text with ''"),
        ("module @jit_f {}", r"pass what jax.jit\(f\).lower\(...\).compile\(\).as_text\(\) returns"),
        ("HloModule m\n\n%f (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n", "'m' has no ENTRY"),
        ("HloModule m\n\nENTRY %f (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n", "its text is incomplete"),
        ("HloModule m\n\nENTRY %f (p: f32[]) -> f32[] {\n  oh\n}\n", "not an instruction"),
    ],
)
def test_other_texts_raise(text: str, message: str) -> None:
    with pytest.raises(ProgramTextError, match=message):
        read_program(text)


def test_kernels_with_metadata_of_several_lines_are_read() -> None:
    text = """HloModule kernels

ENTRY %main.1 (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  %kernel.1 = f32[8]{0} custom-call(%p.0), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
  , "block": "2"
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={"flag_configs":[]}
  ROOT %copy.1 = f32[8]{0} copy(%kernel.1)
}
"""
    program = read_program(text)
    assert [instruction.name for instruction in program.entry_computation.instructions] == ["p.0", "kernel.1", "copy.1"]
    kernel = program.entry_computation.by_name["kernel.1"]
    assert (kernel.op_name, kernel.backend_config) == ("jit(f)/pallas_call", {"flag_configs": []})


def test_computations_of_other_threads_are_read() -> None:
    text = """HloModule m

%sum (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
}, metadata={op_name="kernel"}
  ROOT %all-reduce = f32[8]{0} all-reduce(%kernel), replica_groups={}
}, execution_thread="sparsecore"

ENTRY %main (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %start = ((f32[8]), f32[8], u32[]) async-start(%q), async_execution_thread="sparsecore", calls=%sum
  ROOT %done = f32[8]{0} async-done(%start)
}
"""
    program = read_program(text)
    names = [[instruction.name for instruction in computation.instructions] for computation in program.computations]
    assert names == [["p", "kernel", "all-reduce"], ["q", "start", "done"]]
