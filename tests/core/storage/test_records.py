"""Values from JSON: what is right is read, and what is not says where it stands."""

import math
from typing import Any, Literal

import attrs
import pytest

from shardrules.core.storage.records import read_json, read_toml, record


@attrs.frozen
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@attrs.frozen
class Outer:
    kind: Literal["a", "b"]
    rate: float
    flag: bool
    pair: tuple[str, int]
    inner: Inner
    many: tuple[Inner, ...]
    perhaps: int | None = None


RIGHT: dict[str, Any] = {
    "kind": "a",
    "rate": 2,
    "flag": True,
    "pair": ["x", 1],
    "inner": {"name": "n", "sizes": [1, 2]},
    "many": [{"name": "m", "sizes": []}],
    "perhaps": None,
}


def test_a_value_is_read() -> None:
    expected = Outer("a", 2, True, ("x", 1), Inner("n", (1, 2)), (Inner("m"),))
    assert record(Outer, RIGHT, "it") == expected
    assert record(Outer, RIGHT | {"perhaps": 3}, "it") == attrs.evolve(expected, perhaps=3)


def test_fields_with_defaults_may_be_missing() -> None:
    value = {name: item for name, item in RIGHT.items() if name != "perhaps"} | {"inner": {"name": "n"}}
    assert record(Outer, value, "it") == Outer("a", 2, True, ("x", 1), Inner("n"), (Inner("m"),))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "c"}, r"it\.kind must be 'a' or 'b', got 'c'"),
        ({"rate": "2"}, r"it\.rate must be float, got '2'"),
        ({"rate": True}, r"it\.rate must be float, got True"),
        ({"flag": 1}, r"it\.flag must be bool, got 1"),
        ({"pair": ["x"]}, r"it\.pair must be a list of 2, got \['x'\]"),
        ({"pair": ["x", 1.5]}, r"it\.pair\[1\] must be int, got 1\.5"),
        ({"pair": ["x", False]}, r"it\.pair\[1\] must be int, got False"),
        ({"inner": []}, r"it\.inner must be an object, got \[\]"),
        ({"inner": {"sizes": []}}, r"it\.inner has other fields: name missing\. .*save it again with this version"),
        (
            {"inner": {"names": "n", "sizes": [], "more": 1}},
            r"it\.inner has other fields: name missing; names, more unknown\. .*save it again with this version",
        ),
        ({"many": {"name": "m"}}, r"it\.many must be a list, got .*"),
        ({"many": [{"name": "m", "sizes": [None]}]}, r"it\.many\[0\]\.sizes\[0\] must be int, got None"),
        ({"perhaps": "3"}, r"it\.perhaps must be int, got '3'"),
    ],
)
def test_what_is_wrong_says_where(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises((TypeError, LookupError), match=complaint):
        record(Outer, RIGHT | change, "it")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nests too deeply"),
        ("9" * 5000, "9+ does not fit in 64 bits"),
        (str(2**63), "9223372036854775808 does not fit in 64 bits"),
        ("NaN", "NaN is not a number of JSON"),
    ],
)
def test_values_that_json_should_not_have_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_json(text)


def test_integers_of_64_bits_and_infinities_are_read() -> None:
    assert read_json(f"[{2**63 - 1}, {-(2**63) + 1}, -Infinity]") == [2**63 - 1, -(2**63) + 1, -math.inf]


@pytest.mark.parametrize("number", ["9" * 5000, f"0x{'f' * 5000}", str(2**63)])
def test_integers_beyond_64_bits_in_toml_are_refused(number: str) -> None:
    with pytest.raises(ValueError, match=r"integer"):
        read_toml(f"a = [{{b = {number}}}]")
