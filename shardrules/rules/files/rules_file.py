"""`RulesFile`: the content of a file of rules, for programs and for the checks that guard them."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import attrs
from jax.sharding import AbstractMesh

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import RulesFileError, shortened, suggest
from shardrules.core.finding import Severity
from shardrules.core.rule import ShardingRule


@final
@attrs.frozen
class Limits:
    """The limits that `shardrules check` holds a plan against: the table `[limits]` of a file of rules.

    `budget` is the bytes that a device may use, `golden` the file of the expected plan, and `level` the severity from
    which findings fail; `None` where the file has none.
    """

    budget: int | None = None
    golden: Path | None = None
    level: Severity | None = None


@final
@attrs.frozen
class RulesFile:
    """The content of a file of rules, as `load_rules` returns it.

    `rules` is one rule for the whole model. `mesh` has axes and sizes but no devices: `create_mesh(mesh)` gives it
    some. `optimizer` is the optimizer as text, `"adamw(mu_dtype='bfloat16')"`. `mesh` and `optimizer` are `None` where
    the file has none.
    """

    rules: ShardingRule
    mesh: AbstractMesh | None = None
    optimizer: str | None = None
    limits: Limits = Limits()
    file: Path = Path()
    axes: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)
    """The axes in the rules, each with its file and key path."""

    def check_axes(self, mesh: AnyMesh) -> None:
        """Raises an error with the key path of each axis in the rules that a mesh lacks."""
        self.check_axis_names(mesh.axis_names, f"the mesh is {mesh_text(mesh)}")

    def check_axis_names(self, names: Sequence[str], reason: str) -> None:
        """Raises the error of `check_axes` for axes that are not among `names`, for a `reason`."""
        problems = [
            f"{location}: unknown axis {name!r}{suggest(name, names)}"
            for name, location in self.axes
            if name not in names
        ]
        if problems:
            listing, it = problems[0], "it"
            if len(problems) > 1:
                listing, it = "\n  ".join([f"{self.file} has unknown axes:", *shortened(problems)]), "them"
            raise RulesFileError(f'{listing}; {reason}. Correct {it}, or drop {it} with a rule of type "fitted"')
