"""Compiler flags as people write them, and the sets that recipes publish."""

import tomllib
from typing import Any

import pytest

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, TargetError
from shardrules.programs.machine.flags import flag_sets, flags_text, read_flags
from tests.house.source import REPOSITORY

SPELLINGS: list[Any] = [
    "--xla_a=1 --xla_b=true",
    "xla_a=1 xla_b=true",
    "  --xla_a=1\n--xla_b ",
    "--xla_b=false --xla_a=1 --xla_b=true",
    {"xla_a": 1, "xla_b": True},
    {"--xla_a": "1", "xla_b": "true"},
    [("xla_a", 1), ("xla_b", True)],
]


@pytest.mark.parametrize("flags", SPELLINGS)
def test_spellings_of_flags_are_equal(flags: Any) -> None:
    assert read_flags(flags) == (("xla_a", "1"), ("xla_b", "true"))


def test_no_flags_are_an_empty_tuple() -> None:
    assert sr.Target("cpu", flags=None) == sr.Target("cpu", flags="") == sr.Target("cpu")


def test_values_may_be_empty_or_quoted() -> None:
    flags = read_flags("--xla_gpu_enable_command_buffer='' --xla_disable_hlo_passes='a,b c'")
    assert flags == (("xla_gpu_enable_command_buffer", ""), ("xla_disable_hlo_passes", "a,b c"))
    assert read_flags(flags_text(flags)) == flags


@pytest.mark.parametrize("name", flag_sets())
def test_published_sets_are_written_by_their_names(name: str) -> None:
    flags = flag_sets()[name]
    assert flags == read_flags(name)
    assert flags_text(flags) == name
    assert read_flags(f"{name} --xla_more=1") == (*flags, ("xla_more", "1"))


def test_sets_of_every_recipe_have_a_source() -> None:
    tables = tomllib.loads((REPOSITORY / "shardrules/programs/machine/flags.toml").read_text())
    assert {"maxtext:v5e", "maxtext:v5p", "maxtext:v6e", "maxtext:gpu"} <= {*tables}
    assert all(table["source"].startswith("https://") for table in tables.values())


def test_a_later_flag_changes_a_set() -> None:
    flags = dict(read_flags("maxtext:v5e --xla_enable_async_all_gather=false"))
    assert flags["xla_enable_async_all_gather"] == "false"
    assert len(flags) == len(read_flags("maxtext:v5e"))


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (
            "maxtext:v5f",
            TargetError,
            r"unknown set of flags 'maxtext:v5f' \(did you mean 'maxtext:v5[ep]'\?\); the sets",
        ),
        ("--xla_a='1", TargetError, "No closing quotation"),
        ("--", TargetError, "expected a flag such as"),
        (7, ConfigTypeError, "flags must be a string or a mapping, got 7"),
        ({"xla_a": [1]}, ConfigTypeError, r"plain values, got 'xla_a': \[1\]"),
        ([1, 2], ConfigTypeError, "flags must be a string or a mapping"),
    ],
)
def test_what_is_not_flags_is_refused(flags: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sr.Target("cpu", flags=flags)


@pytest.mark.parametrize(
    "text",
    ["tpu:v5p:4x4x4 maxtext:v5p", "cuda:h100:8 --xla_a=1 --xla_b=", "cpu --xla_a=1", "tpu:v5e:4x4:2 maxtext:v5e"],
)
def test_targets_are_written_with_their_flags(text: str) -> None:
    target = sr.Target.parse(text)
    assert str(target) == text
    assert sr.Target.parse(str(target)) == target
    assert target.machine == text.split()[0]
    assert target.flags
    assert sr.Target.parse(target.machine).hardware == target.hardware
    assert repr(target.flags) in repr(target)


def test_flags_keep_their_capitals() -> None:
    target = sr.Target.parse("CPU --xla_dump_to=/tmp/Dump")
    assert target == sr.Target("cpu", flags={"xla_dump_to": "/tmp/Dump"})


def test_targets_with_other_flags_have_the_same_devices() -> None:
    plain, tuned = sr.Target("cpu"), sr.Target("cpu", flags="--xla_cpu_enable_fast_math=true")
    assert plain != tuned
    assert plain.devices() == tuned.devices()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tpu:v5p:2x2x2 maxtext:v5q", "unknown set of flags 'maxtext:v5q'"),
        ("tpu:v5p:2x2x2 --xla_a=1 maxtext:v5q", "unknown set of flags 'maxtext:v5q'"),
        ("cpu:8 -- --xla_a", "expected a flag such as"),
    ],
)
def test_wrong_flags_of_a_target_are_named(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        sr.Target.parse(target)


def test_flags_of_a_target_may_have_one_dash() -> None:
    assert sr.Target.parse("cpu:8 -xla_foo=1") == sr.Target.parse("cpu:8 --xla_foo=1")
    assert sr.Target.parse("tpu: v5p: 2x2x2").flags == ()
