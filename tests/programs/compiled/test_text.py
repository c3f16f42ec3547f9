"""Types, instructions and attributes, in every form that XLA prints."""

import pytest

from shardrules.core.errors import ProgramTextError
from shardrules.programs.compiled.text import (
    ArrayType,
    Computation,
    Instruction,
    read_attributes,
    read_instruction,
    read_types,
)


def read(line: str) -> Instruction:
    return read_instruction(line, {})[0]


@pytest.mark.parametrize(
    ("text", "types", "nbytes"),
    [
        ("f32[]", (ArrayType("f32", (), 32),), 4),
        ("bf16[16,512]{1,0:T(8,128)(2,1)S(1)}", (ArrayType("bf16", (16, 512), 16),), 16384),
        ("pred[3]{0}", (ArrayType("pred", (3,), 8),), 3),
        ("c64[2]{0}", (ArrayType("c64", (2,), 64),), 16),
        ("f8e4m3fn[5]{0}", (ArrayType("f8e4m3fn", (5,), 8),), 5),
        ("s4[5,3]{1,0:T(8,128)(8,1)E(4)}", (ArrayType("s4", (5, 3), 4),), 8),
        ("s4[5,3]{1,0}", (ArrayType("s4", (5, 3), 8),), 15),
        ("s2[5,3]{1,0:E(2)}", (ArrayType("s2", (5, 3), 2),), 4),
        ("f4e2m1fn[7]{0:E(4)}", (ArrayType("f4e2m1fn", (7,), 4),), 4),
        ("token[]", (ArrayType("token", (), 0),), 0),
        ("f32[<=10,4]{1,0}", (ArrayType("f32", (10, 4), 32),), 160),
        ("f32[0,4]{1,0}", (ArrayType("f32", (0, 4), 32),), 0),
        ("()", (), 0),
        (
            "((f32[2]{0}, s32[]), /*index=1*/(pred[], u32[]{:S(2)}))",
            (ArrayType("f32", (2,), 32), ArrayType("s32", (), 32), ArrayType("pred", (), 8), ArrayType("u32", (), 32)),
            17,
        ),
    ],
)
def test_types_are_read_with_their_bytes(text: str, types: tuple[ArrayType, ...], nbytes: int) -> None:
    assert read_types(text) == types
    assert sum(array.nbytes for array in types) == nbytes


@pytest.mark.parametrize(
    ("text", "tile", "stored"),
    [
        ("bf16[30,200]{1,0:T(8,128)(2,1)}", ((1, 128), (0, 8)), 32 * 256 * 2),
        ("f32[30,200]{0,1:T(8,128)S(1)}", ((0, 128), (1, 8)), 128 * 200 * 4),
        ("f32[3,2,6,128]{3,1,2,0:T(8,128)}", ((3, 128), (1, 8)), 3 * 8 * 6 * 128 * 4),
        ("s32[1000]{0:T(1024)}", ((0, 1024),), 4096),
        # A tile of more dims than the array has is that of another shape.
        ("f32[]{:T(128)}", (), 4),
        ("f32[30]{0:T(8,128)}", (), 120),
        ("f32[30,200]{1,0}", (), 24_000),
    ],
)
def test_tiles_are_read_from_layouts(text: str, tile: tuple[tuple[int, int], ...], stored: int) -> None:
    (array,) = read_types(text)
    assert (array.tile, array.stored_bytes) == (tile, stored)


def test_types_print_as_xla_writes_them() -> None:
    assert str(ArrayType("f32", (2, 3), 32)) == "f32[2,3]"


def test_an_instruction_with_every_part() -> None:
    line = (
        "  ROOT %gte.1 = (s32[]{:T(128)}, bf16[16,512]{1,0:T(8,128)(2,1)S(1)}) some-new-op(%a.1, %b, /*index=2*/%c-2), "
        "kind=kCustom, calls=%fused, replica_groups=[4,2]<=[2,4]T(1,0), slice={[0:4], [0:1]}, "
        'frontend_attributes={n="1"}, '
        'metadata={op_name="jit(f)/p[\\\'k\\\']/{a, b}" source_file="/a b/c.py" source_line=7 stack_frame_id=3}, '
        'backend_config={"debug":"\\n{(, \\"x\\"","known_trip_count":{"n":"12"}}'
    )
    instruction, is_root = read_instruction(line, {})
    assert is_root
    assert (instruction.name, instruction.op, instruction.operands) == ("gte.1", "some-new-op", ("a.1", "b", "c-2"))
    assert instruction.types == (ArrayType("s32", (), 32), ArrayType("bf16", (16, 512), 16))
    assert instruction.nbytes == 4 + 16384
    assert instruction.attributes["replica_groups"] == "[4,2]<=[2,4]T(1,0)"
    assert instruction.attributes["slice"] == "{[0:4], [0:1]}"
    assert instruction.references("calls") == ("fused",)
    assert instruction.op_name == "jit(f)/p['k']/{a, b}"
    assert (instruction.metadata["source_file"], instruction.metadata["source_line"]) == ("/a b/c.py", "7")
    assert instruction.backend_config == {"debug": '\n{(, "x"', "known_trip_count": {"n": "12"}}


def test_an_instruction_without_percent_signs() -> None:
    instruction = read("dot.1 = f32[4]{0} dot(f32[4,8]{1,0} a, f32[8]{0} b), lhs_contracting_dims={1}")
    assert (instruction.operands, instruction.dims("lhs_contracting_dims")) == (("a", "b"), (1,))


def test_operands_printed_with_their_types() -> None:
    instruction = read("%d = f32[4]{0} add(f32[4]{0:T(128)} %a, (f32[4]{0}, s32[]) %b)")
    assert instruction.operands == ("a", "b")


@pytest.mark.parametrize(
    ("line", "literal"),
    [
        ("%c = s32[] constant(-3), metadata={}", "-3"),
        ("%c = u32[8]{0} constant({0, 1, 2})", "{0, 1, 2}"),
        ("%c = c64[2]{0} constant({(1, 2), (3, 4)}), sharding={replicated}", "{(1, 2), (3, 4)}"),
        ("%p = f32[] parameter(0), sharding={devices=[4,1]<=[8] last_tile_dim_replicate}", "0"),
    ],
)
def test_constants_and_parameters_have_literals(line: str, literal: str) -> None:
    assert (read(line).literal, read(line).operands) == (literal, ())


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (r"p[\'v\']", "p['v']"),
        (r"a\"b\\c", 'a"b\\c'),
        (r"caf\303\251", "café"),
        ("café", "café"),
        (r"one\ntwo\tthree", "one\ntwo\tthree"),
    ],
)
def test_escapes_are_undone(printed: str, expected: str) -> None:
    assert read(f'%a = f32[] add(%b, %c), metadata={{op_name="{printed}"}}').op_name == expected


@pytest.mark.parametrize(
    "config", ["", ", backend_config=none", ', backend_config="{\\"n\\":1"', ", backend_config=[1]"]
)
def test_other_backend_configs_are_empty(config: str) -> None:
    assert read(f"%a = f32[] add(%b, %c){config}").backend_config == {}


def test_a_quoted_backend_config_is_read() -> None:
    assert read('%a = f32[] add(%b, %c), backend_config="{\\"n\\":1}"').backend_config == {"n": 1}


def test_header_attributes_are_read() -> None:
    text = "is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, layout={(f32[2]{0})->f32[2]{0}}"
    assert read_attributes(text) == {
        "is_scheduled": "true",
        "input_output_alias": "{ {0}: (0, {}, may-alias) }",
        "layout": "{(f32[2]{0})->f32[2]{0}}",
    }


@pytest.mark.parametrize("line", ["", "what is this", "%a = f32[4]", "%a f32[4] add(%b)"])
def test_other_lines_raise(line: str) -> None:
    with pytest.raises(ProgramTextError, match="not an instruction as XLA prints them"):
        read(line)


def test_a_computation_links_its_instructions() -> None:
    lines = ["  %a = f32[2]{0} parameter(0)", "  %b = f32[2]{0} add(%a, %a)", "  ROOT %c = f32[2]{0} negate(%b)"]
    computation = Computation.read("f", lines, {})
    assert computation.root == "c"
    assert [instruction.name for instruction in computation.users["a"]] == ["b"]
    assert "c" not in computation.users
    assert computation.operand_types(computation.by_name["b"]) == (ArrayType("f32", (2,), 32),) * 2
    assert computation.parameters == (computation.by_name["a"],)
    with pytest.raises(ProgramTextError, match="computation 'g' is empty"):
        Computation.read("g", [], {})
