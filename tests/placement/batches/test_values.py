"""The leaves of a batch as data loaders hand them out: tensors, lists of rows, and what is not an array."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import PlanError, TreeError
from shardrules.core.finding import Finding
from shardrules.placement.batches.values import as_array, has_equal_parts, is_rows

ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


class Tensor:
    """A tensor of another library, read as numpy reads it; its dtype is the library's own."""

    shape, dtype = (8, 2), "library.float32"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(ROWS, dtype)


class Capsule:
    """A tensor that is read through DLPack alone."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


class Both(Capsule):
    """A tensor whose dtype numpy lacks, as torch's bfloat16."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("unsupported scalar type")


class Nameless:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


class Broken:
    """A tensor that gives no values."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize("value", [Tensor(), Capsule(ROWS), Capsule(jnp.asarray(ROWS)), Both(ROWS), ROWS.tolist()])
def test_tensors_and_lists_of_rows_are_placed(value: Any) -> None:
    mesh = sr.create_mesh("data:4,model:2")
    placed = sr.place_batch({"x": value, "y": ROWS}, P("data"), mesh)
    assert placed["x"].sharding == placed["y"].sharding
    np.testing.assert_array_equal(placed["x"], ROWS)


def test_dtypes_that_numpy_lacks_come_through_dlpack() -> None:
    assert as_array(Both(jnp.ones(8, jnp.bfloat16))).dtype == ml_dtypes.bfloat16


def test_tensors_are_copied_before_their_owner_fills_them_again() -> None:
    values = ROWS.copy()
    placed = sr.place_batch(Capsule(values), P("data"), sr.create_mesh("data:8"))
    values[:] = -1
    np.testing.assert_array_equal(placed, ROWS)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ([1, 2], True),
        ([True, np.float32(2)], True),
        ([(1, 2), [3, 4]], True),
        ([[1], None], True),
        ([], False),
        ([[]], False),
        ([None], False),
        ((1, 2), False),
        ([ROWS, ROWS], False),
        ([1, ROWS], False),
        ([1, "a"], False),
        ([{"x": 1}], False),
    ],
)
def test_lists_of_numbers_are_rows(node: Any, expected: bool) -> None:
    assert is_rows(node) is expected


@pytest.mark.parametrize("value", [1, 0.5, True, 1j, np.float32(2), len, jax.nn.relu, np.float32])
def test_numbers_and_functions_stay(value: Any) -> None:
    assert as_array(value) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("train", "got 'train'; it has neither __array__ nor __dlpack__"),
        (b"ab", "got b'ab'; it has neither"),
        (object(), "got <object object at .*; it has neither"),
        (np.array(["a"]), "<U1 is not a dtype of JAX"),
        (np.array([1, None]), "object is not a dtype of JAX"),
        (np.zeros(1, "M8[D]"), r"datetime64\[D\] is not a dtype of JAX"),
        (Broken(), "it cannot be read: RuntimeError: call detach"),
        ([[1, 2], [3]], "it cannot be read: ValueError: .*inhomogeneous shape"),
        ([[1, 2], [3, None]], "its rows hold None, or integers beyond 64 bits"),
        ([1, 2**70], "its rows hold None, or integers beyond 64 bits"),
        (np.ones(8, np.longdouble), "is not a dtype of JAX"),
        (Nameless(), "got a value of type Nameless; it has neither"),
    ],
)
def test_anything_else_is_an_error_with_its_path(value: Any, message: str) -> None:
    finding = as_array(value)
    assert isinstance(finding, Finding)
    mesh = sr.create_mesh("data:4,model:2")
    with pytest.raises(PlanError, match=rf"not-array: rest/0: expected an array, .*{message}"):
        sr.place_batch({"x": ROWS, "rest": (value,)}, P("data"), mesh)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2**40], r"error out-of-range: x \(2,\): it has numbers beyond those of int32, from 1 to 1099511627776"),
        (np.full(8, 2**40 + 5), "beyond those of int32, from 1099511627781 to"),
        (np.full(8, 2**63, ">u8"), "beyond those of uint32"),
        ([1e39, np.inf], "beyond those of float32"),
        (np.full(8, 1e39j), "beyond those of complex64"),
        (np.int64(2**40), "beyond those of int32"),
        (np.float64(1e300), "beyond those of float32"),
        (np.ma.masked_array(np.ones(8), [True] * 8), "error masked: x: arrays of JAX have no mask"),
    ],
)
def test_what_devices_would_not_keep_is_refused(value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sr.place_batch({"x": value}, P(), sr.create_mesh("data:8"))


@pytest.mark.parametrize(
    "value", [ROWS.astype(">f4"), ROWS.astype(np.int64), ROWS.astype(np.float64), [-np.inf, np.nan], np.ma.array(ROWS)]
)
def test_what_devices_keep_is_placed(value: Any) -> None:
    np.testing.assert_array_equal(sr.place_batch(value, P(), sr.create_mesh("data:8")), np.asarray(value))


def test_lists_that_nest_too_deeply_are_an_error() -> None:
    rows: list[Any] = [1.0]
    for _ in range(1200):
        rows = [rows]
    in_itself: list[Any] = [1.0]
    in_itself.append(in_itself)
    for value in (rows, in_itself):
        with pytest.raises(TreeError, match="nests too deeply, or a list holds itself"):
            sr.place_batch({"x": value}, P(), sr.create_mesh("data:8"))


def test_all_leaves_that_are_not_arrays_are_listed() -> None:
    with pytest.raises(PlanError, match="3 arrays cannot be placed") as raised:
        sr.place_batch({"a": "x", "b": [[1], [2, 3]], "c": object()}, P(), sr.create_mesh("data:8"))
    assert [finding.path for finding in raised.value.findings if isinstance(finding, Finding)] == ["a", "b", "c"]


@pytest.mark.parametrize("rows", [[np.ones(2)] * 8, [np.array(1.0)] * 8, [{"x": np.ones(2), "y": np.ones(3)}] * 8])
def test_rows_that_are_not_stacked_are_explained(rows: Any) -> None:
    assert has_equal_parts({"batch": rows})
    with pytest.raises(PlanError, match=r"indivisible|rank-overflow") as raised:
        sr.place_batch(rows, P("data"), sr.create_mesh("data:4,model:2"))
    assert "np.stack" in raised.value.__notes__[0]
    assert not has_equal_parts({"batch": [np.ones(2), np.ones(3)]})
