"""`load_rules`: rules, mesh, optimizer and limits from the file that CI gates."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, RulesFileError

TEXT = """\
mesh = "data:4,model:2"
optimizer = "adamw(mu_dtype='bfloat16')"

[limits]
budget = "1.5GiB"
golden = "golden/plan.json"
level = "error"

[[rules]]
path = "norm"
spec = []

[[rules]]
rule = "shard_dim('model', 0) | fsdp('data', min_size_mb=0)"
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return file


def test_a_file_gives_rules_mesh_optimizer_and_limits(tmp_path: Path) -> None:
    file = sr.load_rules(str(write(tmp_path, TEXT)))
    assert file.rules == sr.CompositeShardingRule(
        sr.RegexShardingRule([("norm", P())]), sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", 0)
    )
    assert file.mesh == sr.mesh_shape("data:4,model:2")
    assert file.optimizer == "adamw(mu_dtype='bfloat16')"
    assert file.limits == sr.reports.Limits(3 * 2**29, tmp_path / "golden/plan.json", "error")


def test_rules_and_mesh_place_a_model(tmp_path: Path) -> None:
    file = sr.load_rules(write(tmp_path, TEXT))
    assert file.mesh is not None
    mesh = sr.create_mesh(file.mesh)
    assert mesh is sr.create_mesh("data:4,model:2")
    placed = sr.filter_shard({"up": np.ones((8, 8)), "norm": np.ones(8)}, file.rules, mesh)
    assert placed["up"].sharding.spec == P("model", "data")
    assert placed["norm"].sharding.spec == P()


def test_what_a_file_lacks_is_none(tmp_path: Path) -> None:
    file = sr.load_rules(write(tmp_path, 'rule = "auto"'))
    assert (file.mesh, file.optimizer, file.limits) == (None, None, sr.reports.Limits())


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    text = TEXT.replace('path = "norm"', 'paht = "norm"').replace("level", "levle").replace("fsdp(", "fdsp(")
    with pytest.raises(RulesFileError, match="has 5 problems") as raised:
        sr.load_rules(write(tmp_path, f'{text}[[rules]]\npath = "(a"\nspec = []\n[[rules]]\npath = "b)"\nspec = []\n'))
    first, *lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert first == "rules.toml has 5 problems:"
    starts = ["rules.toml: limits.levle: ", "rules.toml: rules[0].paht: ", "rules.toml: rules[1].rule: "]
    starts += ["rules.toml: rules[2].path: ", "rules.toml: rules[3].path: "]
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"  {start}"), line


def test_axes_that_the_mesh_of_the_file_lacks_are_located(tmp_path: Path) -> None:
    text = TEXT.replace("'model'", "'modle'") + '[[rules]]\npath = "x"\nspec = ["expert"]\n'
    with pytest.raises(RulesFileError, match="has unknown axes") as raised:
        sr.load_rules(write(tmp_path, text))
    first, *lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert first == "rules.toml has unknown axes:"
    assert lines[0] == "  rules.toml: rules[1].rule: unknown axis 'modle' (did you mean 'model'?)"
    assert lines[1].startswith("  rules.toml: rules[2].spec[0]: unknown axis 'expert'; the mesh is data:4,model:2.")


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    with pytest.raises(RulesFileError, match=r"rule.toml does not exist \(did you mean 'rules.toml'\?\)"):
        sr.load_rules(tmp_path / "rule.toml")


def test_thousands_of_rules_are_read_in_order(tmp_path: Path) -> None:
    count = 2000
    text = "".join(f'[[rules]]\npath = "layers/{index}/up$"\nspec = ["data"]\n' for index in range(count))
    rules = sr.load_rules(write(tmp_path, text)).rules
    assert isinstance(rules, sr.RegexShardingRule)
    assert [pattern for pattern, _ in rules.rules] == [f"layers/{index}/up$" for index in range(count)]


@pytest.mark.parametrize("path", [None, 3, b"rules.toml", ["rules.toml"]])
def test_what_is_not_a_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigTypeError, match="load_rules: expected the path of a file, got"):
        sr.load_rules(path)


def test_rules_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As of `<(generate)` in a shell."""
    pipe = tmp_path / "rules.toml"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_text, '[[rules]]\npath = "up"\nspec = ["model"]\n')
        rules = sr.load_rules(pipe).rules
        written.result()
    assert isinstance(rules, sr.RegexShardingRule)
