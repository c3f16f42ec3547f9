"""Groups of devices in every form that XLA prints, and the mesh axes that they form."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.core.errors import ProgramTextError
from shardrules.programs.compiled.replica_groups import Groups, Span, groups_of, read_groups, span
from shardrules.programs.compiled.text import read_instruction

EVERY_OTHER = ((0, 2, 4, 6), (1, 3, 5, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", EVERY_OTHER),
        ("{{0}, {1}}", ((0,), (1,))),
        ("{{0,1,2},{3}}", ((0, 1, 2), (3,))),
        ("{}", (tuple(range(8)),)),
        ("{{}}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[2,4]<=[4,2]T(1,0)", EVERY_OTHER),
        ("[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("mesh['data'=4,'model'=2] {'data'}", EVERY_OTHER),
        ("mesh['data'=4,'model'=2] {'model'}", PAIRS),
        ("mesh['data'=4,'model'=2] {'data','model'}", (tuple(range(8)),)),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", EVERY_OTHER),
        ("mesh['a'=4,'b'=1,'c'=2] {'b'}", tuple((device,) for device in range(8))),
        ("mesh['a'=8] {}", tuple((device,) for device in range(8))),
        ("mesh[a=4,b=2] {b}", PAIRS),
        # Factors of an axis: the second of 2 x 4, the first of 2 x 4, the middle one of 2 x 2 x 2.
        ("mesh['data'=8] {'data':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['data'=8] {'data':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['data'=8] {'data':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=4,'model'=2] {'data':(2)2,'model'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['data'=8] {'data':(1)2,'data':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # Devices numbered in another order.
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
    ],
)
def test_every_form_is_read(text: str, groups: Groups) -> None:
    assert read_groups(text, 8) == groups


@pytest.mark.parametrize("text", ["{data}", "[a]", "mesh[]", "all"])
def test_other_texts_raise(text: str) -> None:
    with pytest.raises(ProgramTextError, match="not replica groups as XLA prints them"):
        read_groups(text, 8)


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(sizes, st.data())
def test_axes_are_recovered_from_every_form(shape: list[int], data: st.DataObject) -> None:
    """The groups along any axes of any mesh span these axes, except for axes of size 1."""
    names = [f"axis_{dim}" for dim in range(len(shape))]
    mesh = dict(zip(names, shape, strict=True))
    chosen = [dim for dim in range(len(shape)) if data.draw(st.booleans())]
    others = [dim for dim in range(len(shape)) if dim not in chosen]
    count = int(np.prod(shape))
    group = int(np.prod([shape[dim] for dim in chosen]))
    order = [*others, *chosen]
    listed = np.arange(count).reshape(shape).transpose(order).reshape(-1, group)

    along = ",".join(repr(names[dim]) for dim in chosen)
    forms = [
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in listed.tolist()) + "}",
        f"[{count // group},{group}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})",
        f"mesh[{','.join(f'{name!r}={size}' for name, size in mesh.items())}] {{{along}}}",
    ]
    expected = tuple(names[dim] for dim in chosen if shape[dim] > 1)
    for text in forms:
        groups = read_groups(text, count)
        assert sorted(map(sorted, groups)) == sorted(listed.tolist())
        assert span(groups, mesh) == Span(expected, expected)


@pytest.mark.parametrize(
    ("groups", "sizes", "expected"),
    [
        (EVERY_OTHER, {"data": 4, "model": 2}, Span(("data",), ("data",))),
        (PAIRS, {"data": 4, "model": 2}, Span(("model",), ("model",))),
        (((0, 1), (2, 3)), {"data": 4}, Span(None, ("data",))),
        (((0, 1, 2, 3), (4, 5, 6, 7)), {"data": 4, "model": 2}, Span(None, ("data", "model"))),
        (((0, 3), (1, 2)), {"data": 2, "model": 2}, Span(None, ("data", "model"))),
        (((0, 1, 2), (3,)), {"data": 4}, Span(None, ("data",))),
        (((0, 1),), {"data": 2, "model": 2}, Span(None, ("model",))),
        (((0,), (1,)), {"data": 2}, Span((), ())),
        (PAIRS, {}, Span(None, ())),
    ],
)
def test_spans_of_groups(groups: Groups, sizes: dict[str, int], expected: Span) -> None:
    assert span(groups, sizes) == expected


def devices(attributes: str, op: str = "all-reduce", count: int = 8) -> Groups:
    return groups_of(read_instruction(f"%a = f32[] {op}(%b), {attributes}", {})[0], count)


def test_ids_are_devices_or_the_only_replica() -> None:
    all_devices = (tuple(range(8)),)
    assert devices("channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true") == ((0, 1), (2, 3))
    assert devices("channel_id=1, replica_groups={}, use_global_device_ids=true") == all_devices
    assert devices("channel_id=1, replica_groups={{0}}") == all_devices
    assert devices("replica_groups={{0}}") == tuple((device,) for device in range(8))
    assert devices("replica_groups={{0,1},{2,3}}") == ((0, 1), (2, 3))
    assert devices("channel_id=1, replica_groups={{0},{1}}", "all-to-all-start", 2) == ((0,), (1,))


def test_permutes_have_pairs() -> None:
    ring = tuple(itertools.pairwise([0, 2, 4, 6]))
    assert devices("channel_id=1, source_target_pairs={{0,2},{2,4},{4,6}}", "collective-permute") == ring
    assert devices("channel_id=1, source_target_pairs={}", "collective-permute") == ()


def test_device_ids_follow_a_comma() -> None:
    text = "channel_id=1, replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}, use_global_device_ids=true"
    assert devices(text, count=4) == ((0, 1), (2, 3))
