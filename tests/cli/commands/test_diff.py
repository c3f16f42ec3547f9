"""`shardrules diff` of plans with unsound specs, as `plan -o` writes them."""

from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.main import main


@pytest.mark.parametrize("mesh", ["data:4", "data:2"])
@pytest.mark.parametrize("spec", [P("data"), P("nowhere"), P(None, None, "data")])
def test_unsound_plans_can_be_compared(
    spec: P, mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {name: jax.ShapeDtypeStruct((size, 8), "float32") for name, size in (("odd", 7), ("even", 8))}
    for name, first, other, axes in (("old", P(), P("data"), "data:4"), ("new", spec, P(), mesh)):
        plan = sr.RegexShardingRule([("odd", first), ("even", other)]).plan(tree, sr.mesh_shape(axes))
        (tmp_path / f"{name}.json").write_text(plan.to_json())
    for words in (["old.json", "new.json"], ["new.json", "old.json"]):
        assert main(["diff", *words, "--html", "page.HTML"]) == 0
        out, err = capsys.readouterr()
        assert "; 1 array is left out, without one shape and a sound spec in both plans" in out
        assert err == ""
        assert "It cannot be split this way." in (tmp_path / "page.HTML").read_text()
