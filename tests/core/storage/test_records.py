"""Values from JSON: what is right is read, and what is not says where it stands."""

from typing import Any, Literal

import attrs
import pytest

from shardrules.core.storage.records import record


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


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "c"}, r"it\.kind is 'c' where 'a' or 'b' is wanted"),
        ({"rate": "2"}, r"it\.rate is '2' where float is wanted"),
        ({"rate": True}, r"it\.rate is True where float is wanted"),
        ({"flag": 1}, r"it\.flag is 1 where bool is wanted"),
        ({"pair": ["x"]}, r"it\.pair is \['x'\] where a list of 2 is wanted"),
        ({"pair": ["x", 1.5]}, r"it\.pair\[1\] is 1\.5 where int is wanted"),
        ({"pair": ["x", False]}, r"it\.pair\[1\] is False where int is wanted"),
        ({"inner": []}, r"it\.inner is \[\] where an object is wanted"),
        ({"inner": {"name": "n"}}, r"it\.inner has fields name where name, sizes are wanted"),
        ({"inner": {"name": "n", "sizes": [], "more": 1}}, r"it\.inner has fields name, sizes, more where"),
        ({"many": {"name": "m"}}, r"it\.many is .* where a list is wanted"),
        ({"many": [{"name": "m", "sizes": [None]}]}, r"it\.many\[0\]\.sizes\[0\] is None where int is wanted"),
        ({"perhaps": "3"}, r"it\.perhaps is '3' where int is wanted"),
    ],
)
def test_what_is_wrong_says_where(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises((TypeError, LookupError), match=complaint):
        record(Outer, RIGHT | change, "it")
