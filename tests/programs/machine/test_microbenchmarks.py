"""What is timed is in the compiled programs: no compiler has dropped, merged or moved it."""

from typing import Any

import jax
import pytest

from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.machine import microbenchmarks
from shardrules.programs.machine.measure import COLLECTIVE_KINDS, MATMUL_KINDS
from shardrules.programs.machine.microbenchmarks import Overhead

NOTHING = Overhead(0.0, 0.0)
ROUNDS = 5


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[CompiledProgram]:
    """The programs that are timed, in place of timing them."""
    compiled: list[CompiledProgram] = []

    def compile_only(fn: Any, args: Any, donated: Any = ()) -> Any:
        compiled.append(read_program(str(jax.jit(fn, donate_argnums=donated).lower(*args).compile().as_text())))

    monkeypatch.setattr(microbenchmarks, "_compiled", compile_only)
    monkeypatch.setattr(microbenchmarks, "_fastest", lambda *_: 1.0)
    return compiled


@pytest.mark.parametrize("kind", MATMUL_KINDS)
def test_every_round_multiplies(kind: str, programs: list[CompiledProgram]) -> None:
    microbenchmarks.matmul_seconds(kind, (16, 8, 32), jax.devices()[0], ROUNDS, NOTHING, 0.0)
    assert sum(matmul.total_flops for matmul in find_matmuls(programs[0])) == ROUNDS * 2 * 16 * 8 * 32


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_every_round_sends(kind: str, programs: list[CompiledProgram]) -> None:
    microbenchmarks.collective_seconds(kind, 4096, jax.devices(), ROUNDS, NOTHING, 0.0)
    (collective,) = find_collectives(programs[0])
    assert (collective.kind, collective.group_size, collective.times.count) == (kind, 8, ROUNDS)
    assert collective.payload_bytes == 4096


@pytest.mark.parametrize("access", ["copy", "read", "gather"])
def test_every_round_goes_through_memory(access: str, programs: list[CompiledProgram]) -> None:
    microbenchmarks.memory_seconds(access, 2**16, jax.devices()[0], ROUNDS, NOTHING, 0.0)
    (loop,) = [instruction for _, instruction in programs[0].walk() if instruction.op == "while"]
    body = programs[0].find(loop.references("body")[0])
    # An array of the size that counts is used in every round.
    nbytes = 2**16 if access == "read" else 2**15
    used = [array.nbytes for instruction in body.instructions for array in body.operand_types(instruction)]
    assert nbytes in used
    assert programs[0].times(body.name).count == ROUNDS


def test_what_an_empty_round_takes_is_subtracted_from_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(round_seconds: float) -> float:
        monkeypatch.setattr(microbenchmarks, "_program_seconds", lambda *_: 10 * round_seconds)
        return microbenchmarks._round_seconds(lambda carry: carry, (), (), 10, Overhead(0.0, 4e-6), 0.0)

    assert seconds(9e-6) == pytest.approx(5e-6)
    # A device that starts kernels ahead takes no time for empty rounds beside others: the difference is too small.
    assert seconds(4.1e-6) == pytest.approx(2.05e-6)
    assert seconds(8.1e-6) - seconds(7.9e-6) == pytest.approx(0.15e-6)


def test_launches_are_a_chain_of_kernels(programs: list[CompiledProgram]) -> None:
    microbenchmarks.launch_seconds(jax.devices()[0], 0.0)
    assert [len(find_matmuls(program)) for program in programs] == [32, 160]
