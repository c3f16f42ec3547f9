"""The tensor that each leaf takes, and the findings when none fits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.leaves import RequestedLeaf, refuse, requested_leaves
from shardrules.checkpoints.names import Contents, StoredArray, flat_names, match, name_function, requested_names
from shardrules.placement.destination import resolve_destination

F32 = np.dtype(np.float32)


def requested(like: Any) -> list[RequestedLeaf]:
    return requested_leaves(like, resolve_destination(like, P(), sr.create_mesh("data:8")), "load")


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def stored_f32(**tensors: Any) -> dict[str, StoredArray]:
    return {name.replace("_", "."): StoredArray(tuple(shape), F32, "F32") for name, shape in tensors.items()}


def matched(
    like: Any, tensors: dict[str, StoredArray], names: Any = None, surplus: str = "error", cast: bool = False
) -> Any:
    name_of = name_function(names, lambda path: path.replace("/", "."), "load")
    leaves = requested(like)
    tensor_names = requested_names(leaves, tensors, name_of)
    return match(
        leaves, Contents(tensors, tensor_names, lambda *_: [], has_stacks=True), names, surplus=surplus, cast=cast
    )


def test_each_leaf_takes_the_tensor_of_its_name() -> None:
    like = {"a": {"w": array(4)}, "b": array(2), "act": jax.nn.relu}
    assert matched(like, stored_f32(a_w=[4], b=[2])) == (["a.w", "b"], [])


@pytest.mark.parametrize("names", [{"b": "a.w"}, lambda path: "a.w"])
def test_two_leaves_may_take_one_tensor(names: Any) -> None:
    assert matched({"a": {"w": array(4)}, "b": array(4)}, stored_f32(a_w=[4]), names) == (["a.w", "a.w"], [])


def test_leaves_that_are_not_stored_keep_their_values() -> None:
    like = {"a": array(4), "b": np.ones(3, np.float32)}
    assert matched(like, stored_f32(a=[4]), {"b": None}) == (["a", None], [])
    _takes, wrong = matched(like, stored_f32(a=[4]), {"a": None}, surplus="skip")
    assert [(finding.code, finding.path) for finding in wrong] == [("no-values", "a"), ("missing", "b")]


def test_python_numbers_take_stored_numbers() -> None:
    like = {"a": array(4), "rate": 0.1, "step": 3}
    tensors = {**stored_f32(a=[4]), "step": StoredArray((), np.dtype(np.int64), "I64")}
    assert matched(like, tensors) == (["a", None, "step"], [])
    assert matched(like, tensors, lambda path: None if path == "step" else path, "skip") == (["a", None, None], [])


@pytest.mark.parametrize(
    ("stored", "fits"),
    [
        (StoredArray((), np.dtype(np.int64), "I64"), 3),
        (StoredArray((), np.dtype(np.uint8), "U8"), 3),
        (StoredArray((), np.dtype(jnp.bfloat16), "BF16"), 3.0),
        (StoredArray((), np.dtype(np.complex64), "C64"), 1j),
        (StoredArray((), np.dtype(np.bool_), "BOOL"), True),
        (StoredArray((), None, "string"), "text"),
    ],
)
def test_a_python_value_takes_its_own_kind_only(stored: StoredArray, fits: Any) -> None:
    for value in (True, 3, 3.0, 1j, "text"):
        _, wrong = matched({"x": value}, {"x": stored})
        assert [finding.code for finding in wrong] == ([] if type(value) is type(fits) else ["value"])


def test_numbers_do_not_take_arrays() -> None:
    _, wrong = matched({"x": 3.0}, stored_f32(x=[1]))
    assert str(wrong[0]) == (
        "error value: x: 'x' is F32[1], and `like` has a Python float\n    -> put what was saved into `like`"
    )


def test_all_mismatches_are_listed_and_equal_layers_merged() -> None:
    like = {
        "layers": [{"up": array(4, 2), "down": array(2, 4), "norm": array(4, dtype=jnp.bfloat16)} for _ in range(3)],
        "key": array(2, dtype=np.int32),
    }
    tensors = {
        **{f"layers.{i}.up": StoredArray((2, 4), F32, "F32") for i in range(3)},
        **{f"layers.{i}.down_": StoredArray((2, 4), F32, "F32") for i in range(3)},
        **{f"layers.{i}.norm": StoredArray((4,), F32, "F32") for i in range(3)},
        "key": StoredArray((2,), None, "F4"),
    }
    names = {"layer/0/up": "x", "layers/0/norm": 3}
    _, wrong = matched(like, tensors, names)
    with pytest.raises(
        sr.errors.CheckpointError, match=r"^load: model\.safetensors cannot be loaded, and nothing was:"
    ) as caught:
        refuse("load: model.safetensors", wrong)
    lines = str(caught.value).splitlines()[1:]
    assert [line for line in lines if "->" not in line] == [
        "  error no-leaf: layer/0/up: `names` has this path, and `like` has no such leaf (did you mean 'layers/0/up'?)",
        "  error unreadable: key (2,): 'key' is F4[2], a dtype without JAX arrays",
        (
            "  error missing: layers/*/down (2, 4) x3: the checkpoint has no 'layers.0.down' "
            "(did you mean 'layers.0.down_'?)"
        ),
        "  error no-name: layers/0/norm (4,): `names` gives 3 for it, which is not the name of a tensor",
        "  error shape: layers/*/up (4, 2) x3: 'layers.0.up' has shape (2, 4)",
        "  error dtype: layers/*/norm (4,) x2: 'layers.1.norm' is F32[4], expected bfloat16",
        "  error surplus: layers.*.down_ x3: no leaf of `like` takes it, F32[2, 4]",
        "  error surplus: layers.0.norm: no leaf of `like` takes it, F32[4]",
    ]
    assert all(" -> " in line for line in lines[1::2])


@pytest.mark.parametrize(
    ("stored", "wants", "code"),
    [
        (np.float32, jnp.bfloat16, None),
        (np.float32, np.float64, None),
        (np.int64, np.float32, None),
        (np.int64, np.int8, None),
        (np.bool_, np.int32, None),
        (np.float32, np.complex64, None),
        (jnp.float8_e4m3fn, np.float32, None),
        (np.float32, np.int32, "lossy"),
        (np.int32, np.bool_, "lossy"),
        (np.complex64, np.float32, "lossy"),
        (jnp.bfloat16, np.int32, "lossy"),
    ],
)
def test_a_cast_may_gain_a_kind_and_not_lose_one(stored: Any, wants: Any, code: str | None) -> None:
    tensors = {"x": StoredArray((4,), np.dtype(stored), "stored")}
    _, wrong = matched({"x": array(4, dtype=wants)}, tensors, cast=True)
    assert [finding.code for finding in wrong] == ([] if code is None else [code])
    _, wrong = matched({"x": array(4, dtype=wants)}, tensors)
    assert [(finding.code, finding.remedy) for finding in wrong] == [("dtype", "cast=True converts it")]


def test_the_other_byte_order_is_the_same_dtype() -> None:
    assert matched({"x": array(4)}, {"x": StoredArray((4,), np.dtype(">f4"), ">f4")}) == (["x"], [])


def test_surplus_is_refused_unless_it_is_skipped() -> None:
    tensors = stored_f32(a=[4], b=[2])
    assert [finding.code for finding in matched({"a": array(4)}, tensors)[1]] == ["surplus"]
    assert matched({"a": array(4)}, tensors, surplus="skip") == (["a"], [])


def test_tensors_of_a_stack_are_not_surplus_where_one_does_not_fit() -> None:
    _, wrong = matched({"a": array(2, 4)}, stored_f32(x0=[4], x1=[3]), {"a": ["x0", "x1"]})
    assert [finding.code for finding in wrong] == ["shape"]


def test_lists_of_names_may_be_of_any_class() -> None:
    class Layers(list[str]):
        pass

    assert list(flat_names([Layers(["a", "b"]), ("c",)])) == ["a", "b", "c"]


def test_many_missing_tensors_are_listed_quickly() -> None:
    like = {f"name{chr(97 + i % 26)}{chr(97 + i // 26)}": array(4) for i in range(300)}
    _, wrong = matched(like, {f"other{i}": StoredArray((1,), F32, "F32") for i in range(3000)}, surplus="skip")
    assert len(wrong) == 300  # looking for a near name for each would take a minute
