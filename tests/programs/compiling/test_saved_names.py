"""The names that a policy of `jax.checkpoint` saves, however it is written, and those that a function has."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardrules.programs.compiling.saved_names import (
    existing_names,
    policy_names,
    saved_name_findings,
    saving_policies,
)

POLICIES = jax.checkpoint_policies
NAMES = ("up", "down")


@attrs.frozen
class Saver:
    names: tuple[str, ...]

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        return prim.name == "name" and params["name"] in self.names


def saves(names: Any, prim: Any, *_: Any, **params: Any) -> bool:
    return prim.name == "name" and params["name"] in names


offloading = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["up"],
    names_which_can_be_offloaded=["down"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (POLICIES.save_only_these_names("up", "down"), ("down", "up")),
        (offloading, ("down", "up")),
        (POLICIES.save_from_both_policies(POLICIES.save_only_these_names("up"), POLICIES.dots_saveable), ("up",)),
        (lambda prim, *_, **params: prim.name == "name" and params["name"] in NAMES, ("down", "up")),
        (lambda prim, *_, **params: prim.name == "name" and params["name"] == "only", ("only",)),
        (functools.partial(saves, {"up"}), ("up",)),
        (Saver(("up",)), ("up",)),
        (POLICIES.save_only_these_names(), ()),
        (POLICIES.save_any_names_but_these("up"), ()),
        (POLICIES.everything_saveable, ()),
        (POLICIES.nothing_saveable, ()),
        (POLICIES.dots_with_no_batch_dims_saveable, ()),
    ],
)
def test_names_of_policies_are_read(policy: Callable[..., Any], names: tuple[str, ...]) -> None:
    assert policy_names(policy) == names


def test_a_policy_that_raises_saves_no_name() -> None:
    def strict(prim: Any, *_: Any, **params: Any) -> bool:
        raise NotImplementedError(f"{prim} with name 'up'")

    assert policy_names(strict) == ()


def program(*names: str, scanned: bool = False) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(x * w), "hidden")), None

    kept = jax.checkpoint(layer, policy=POLICIES.save_only_these_names(*names))

    def loss(w: Any) -> Any:
        return jnp.sum(jax.lax.scan(kept, w[0], w)[0] if scanned else kept(w[0], w[1])[0])

    return jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 4)))


@pytest.mark.parametrize("scanned", [False, True])
def test_unmatched_names_are_warnings(scanned: bool) -> None:
    (finding,) = saved_name_findings(program("attention", scanned=scanned))
    assert (finding.severity, finding.code) == ("warning", "unmatched-names")
    assert "'attention': nothing is saved by name" in finding.message
    assert "The function has 'hidden'" in finding.message
    assert finding.source.startswith(__file__)


@pytest.mark.parametrize(("names", "severity"), [(("hidden", "attention"), "note"), (("hidden", "hidde"), "note")])
def test_names_that_some_models_lack_are_notes(names: tuple[str, ...], severity: str) -> None:
    (finding,) = saved_name_findings(program(*names))
    assert finding.severity == severity


def test_matching_names_are_no_finding() -> None:
    assert existing_names(program("hidden")) == ("hidden",)
    assert [policy.missing for policy in saving_policies(program("hidden"))] == [()]
    assert list(saved_name_findings(program("hidden"))) == []


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(("kept_name", "count"), [("embedded", 1), ("logits", 1), ("hidden", 0)])
def test_names_outside_of_the_checkpointed_function_save_nothing(kept_name: str, count: int, scanned: bool) -> None:
    def inner(x: Any) -> Any:
        return checkpoint_name(jnp.sin(x), "hidden")

    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(inner(x * w)), None

    kept = jax.checkpoint(layer, policy=POLICIES.save_only_these_names(kept_name))

    def loss(w: Any) -> Any:
        x = checkpoint_name(jnp.cos(w[0]), "embedded")
        y = jax.lax.scan(kept, x, w)[0] if scanned else kept(x, w[1])[0]
        return jnp.sum(checkpoint_name(jnp.sin(y), "logits"))

    findings = list(saved_name_findings(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 4)))))
    assert len(findings) == count
