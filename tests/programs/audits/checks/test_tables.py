"""Tables of a compiled program that are the same, from hand-made text."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.audits.checks.tables import check_tables
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiling.roles import PARAMETERS

GRID = """
  %rows = f32[64,64] iota(), iota_dimension=0
  %columns = f32[64,64] iota(), iota_dimension={0}
  %first = f32[64,64] sine(%rows)
  %second = f32[64,64] sine(%columns)
"""

AXIAL = """
  %angles = f32[64,8] iota(), iota_dimension=0
  %rows = f32[64,64,8] broadcast(%angles), dimensions={{0,2}}
  %columns = f32[64,64,8] broadcast(%angles), dimensions={{{0},2}}
  %first = f32[64,64,8] cosine(%rows)
  %second = f32[64,64,8] cosine(%columns)
"""

TURNED = """
  %rows = f32[64,64] iota(), iota_dimension=0
  %columns = f32[64,64] transpose(%rows), dimensions={{{0}}}
  %first = f32[64,64] sine(%rows)
  %again = f32[64,64] transpose(%rows), dimensions={{1,0}}
  %second = f32[64,64] sine(%columns)
  %third = f32[64,64] cosine(%again)
"""

COMPLEX = """
  %angle = f32[64] iota(), iota_dimension=0
  %zero = f32[] constant(0)
  %sums = f32[64] reduce-window(%angle, %zero), window={{size=64 pad=63_0}}, to_apply=%plus
  %wave = c64[64] complex(%zero, %sums)
  %first = c64[64] exponential(%wave)
  %second = c64[64] exponential(%wave)
"""

LEARNED = """
  %first = f32[64,64] exponential(%w)
  %second = f32[64,64] exponential(%w)
"""


def findings(body: str, *, has_gradients: bool = True) -> list[sr.Finding]:
    program = read_program(
        "HloModule m\n\n%plus (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %add = f32[] add(%a, %b)\n}\n\nENTRY %e (w: f32[64,64]) -> f32[64,64] {\n"
        f'  %w = f32[64,64] parameter(0), metadata={{op_name="w"}}{body}  ROOT %end = f32[64,64] copy(%w)\n}}\n'
    )
    arguments: Any = SimpleNamespace(
        program=program,
        arrays=(SimpleNamespace(path="w/pos", dtype=jnp.dtype("float32")),),
        roles=(PARAMETERS,),
        is_on_cpu=False,
        index_of=lambda value: 0 if value.instruction == "w" else None,
    )
    function: Any = SimpleNamespace(has_gradients=has_gradients)
    return list(check_tables(arguments, function, Timing(program, (), (), sr.Hardware.named("cuda:h100"))))


@pytest.mark.parametrize(("body", "same", "other"), [(GRID, 0, 1), (AXIAL, 0, 1)])
def test_tables_along_other_dimensions_differ(body: str, same: int, other: int) -> None:
    assert len(findings(body.format(same))) == 1
    assert findings(body.format(other)) == []


def test_a_transposed_square_table_is_another() -> None:
    assert findings(TURNED.format("1,0")) == []


def test_complex_exponentials_of_sums_are_tables() -> None:
    (finding,) = findings(COMPLEX.format())
    assert finding.code == "recomputed-table"
    assert "c64[64] of positions and constants, 512 B, is computed 2 times" in finding.message


def test_learned_arrays_that_remat_computes_again_are_no_tables() -> None:
    assert findings(LEARNED) == []
    (finding,) = findings(LEARNED, has_gradients=False)
    assert "of positions and constants and w/pos" in finding.message


def test_tables_of_learned_arrays_in_every_layer_are_tables() -> None:
    layers = [f"  %layer{index} = f32[64,64] exponential(%w)\n" for index in range(5)]
    assert findings("\n" + "".join(layers[:4])) == []
    (finding,) = findings("\n" + "".join(layers))
    assert "and w/pos, 16.0 KiB, is computed 5 times in a step" in finding.message
