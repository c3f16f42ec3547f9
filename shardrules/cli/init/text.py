"""A file of rules as text, from guesses."""

from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from shardrules.cli.init.guess import Guess, Guesser
from shardrules.cli.init.patterns import Pattern, patterns
from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import printable
from shardrules.core.leaf import Leaf
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import make_spec
from shardrules.core.storage.records import toml_string
from shardrules.core.text import bytes_text
from shardrules.rules.files.writer import spec_text

READING = (
    "# A path is searched for the pattern, and the first that matches decides. A spec has an axis for each\n"
    '# dimension: "-" leaves one whole, a list puts several axes on one, and [] puts the array on every device.'
)
"""The lines of a comment that say how to read rules."""


def guess_rules(
    name: str, plan: ShardingPlan, golden: str, optimizer: str | None = None
) -> tuple[str, tuple[PartitionSpec, ...]]:
    """Returns a file of guessed rules for the arrays of a plan, and the spec of each path.

    The plan's decisions are not read. `name` is what the command calls the model, `golden` the file of the golden plan.
    """
    sizes = mesh_sizes(plan.mesh)
    guesser = Guesser.of(plan.kinds, plan.counts, sizes)
    kind_guesses = [guesser.guess(leaf) for leaf in plan.kinds]
    guesses = [kind_guesses[kind] for kind in plan.kind_indices]
    title = (
        f"# Rules for {printable(name)} on {mesh_text(plan.mesh)}: a first guess by `shardrules init`, yours to edit."
    )
    head = rules_head(title, mesh_text(plan.mesh), golden, optimizer)
    leaves = [plan.kinds[kind] for kind in plan.kind_indices]
    tables = ["\n".join(_tables(guess, group, leaves, sizes)) for guess, group in patterns(plan.paths, guesses)]
    return "\n".join([head, *tables]), tuple(make_spec(guess.entries) for guess in guesses)


def rules_head(title: str, mesh: str, golden: str, optimizer: str | None) -> str:
    """Returns all before the first rule of a file."""
    return (
        f"{title}\n{READING}\n"
        "# `shardrules plan` shows what the rules do, and `shardrules check` what is wrong.\n\n"
        f"mesh = {toml_string(mesh)}\n"
        + (
            f"optimizer = {toml_string(optimizer)}\n"
            if optimizer
            else '# optimizer = "adamw"  # counts its state, too\n'
        )
        + "\n# What `shardrules check` holds the plan against.\n"
        f"[limits]\ngolden = {toml_string(golden)}\n"
        '# budget = "16GiB"  # of one device\n'
    )


def _tables(guess: Guess, group: Sequence[Pattern], leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> Iterator[str]:
    """The lines of the rules of one guess."""
    dims = ", ".join(f"dim {dim} over {' and '.join(axes)}" for dim, axes in enumerate(guess.entries) if axes)
    yield f"# {guess.label}: {dims}." if dims else f"# {guess.label}."
    for pattern in group:
        pattern_leaves = [leaves[path_index] for path_index in pattern.indices]
        whole = sum(leaf.nbytes for leaf in pattern_leaves)
        each = sum(leaf.shard_bytes(make_spec(guess.entries), sizes) for leaf in pattern_leaves)
        count = f"{len(pattern_leaves):,} array{'s' * (len(pattern_leaves) != 1)}"
        yield f"# {count}, {bytes_text(whole)} in all, {bytes_text(each)} per device."
        yield "[[rules]]"
        yield f"path = {toml_string(pattern.text)}"
        yield f"spec = {spec_text(guess.entries)}"
        yield ""
