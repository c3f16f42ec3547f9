"""`load_rules`: the rules that a training program shares with the checks of its repository."""

from typing import Any

from shardrules.core.storage.files import as_path
from shardrules.rules.files.reader import read_rules_file
from shardrules.rules.files.rules_file import RulesFile


def load_rules(path: Any) -> RulesFile:
    """Loads rules from a TOML file, the same that `shardrules check` reads.

    [The command line](../how-to/the-command-line.md#write-rules-as-toml) has the format.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A `RulesFile`: its `rules` are a rule like any other. `mesh`, `optimizer` and `limits` (`budget`, `golden`, `level`)
    are there if the file has them.

    **Raises:**

    `RulesFileError`, listing everything that is wrong with the file, each with its key and the most similar word; also
    when a rule uses an axis that the mesh of the file lacks. `ConfigTypeError` when `path` is not a path.

    ```python
    from pathlib import Path

    Path("rules.toml").write_text('''
    mesh = "data:4,model:2"
    optimizer = "adamw"

    [limits]
    budget = "16GiB"

    [[rules]]
    path = "norm|bias"
    spec = []

    [[rules]]
    rule = "shard_dim('model', 0) | fsdp('data', min_size_mb=0)"
    ''')
    file = sr.load_rules("rules.toml")
    mesh = sr.create_mesh(file.mesh)
    model = sr.filter_shard({"w": np.ones((8, 8)), "bias": np.ones(8)}, file.rules, mesh)
    assert model["w"].sharding.spec == P("model", "data")
    assert file.limits.budget == 16 * 2**30
    ```
    """
    rules = read_rules_file(as_path(path, "load_rules"))
    if rules.mesh is not None:
        rules.check_axes(rules.mesh)
    return rules
