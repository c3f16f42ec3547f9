"""The published steps: model, machine, layout and seconds, read from TOML.

A row is a table `[[rows]]`:

- `name`: unique, as `"17"`.
- `target`: as `"tpu:v5e:16x16:2"`, two slices of 256 chips.
- `model`: the name of a table `[models.NAME]` with the dimensions of a decoder (`Dims`); where its layers are of
    experts it has a table `[models.NAME.experts]` (`ExpertDims`).
- `mesh`: the sizes of `data`, `fsdp`, `context` and `tensor`; the others are 1. Batches are split over `data` and
    `fsdp`, sequences over `context`.
- `batch`, `length`: sequences for each device, and tokens of each. The devices that share a sequence (`context`,
    `tensor`) take as many as they are times `batch`; with `batch_per = "data rank"` they take `batch` together.
- `remat`: what the backward pass keeps, by MaxText's names (`policy_of`).
- `seconds`: what one step took. A row without is a prediction. One with it says how that is known: `source` and its
    `commit`, at which the configuration was read; `tokens` of a step, as the source has them; and `known`, which is
    "printed", or "derived" with `formula`: what seconds follow from, and the commit at which that was in force. In an
    `order`, which says nothing of seconds, the batch may be "guessed".
- `first`: what was predicted before `seconds` were in the file. It stays when the model changes.
- `gigabytes`: the peak that the source prints, in 10^9 bytes.
- `recipe`: the name of a table `[recipes.NAME]` (`Recipe`); by default that of the target's chip or platform. A recipe
    that is `like` another says only what differs.
- `layers_compiled`: two numbers of layers that are compiled instead of all; each other layer takes as much time. For
    models whose layers are written out and take minutes. Their peak stays unknown.
- `order`: the set of rows whose order is tested. Their seconds count only among each other.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs
import jax

from published.attention import RATES, TpuKernel
from published.decoder import Dims, weight_shapes
from published.experts import ExpertDims
from published.recipe import STRATEGIES, Recipe, policy_of

if TYPE_CHECKING:
    import shardrules as sr

FILE = Path(__file__).with_name("rows.toml")
AXES = ("data", "fsdp", "context", "tensor")
BATCHES = ("device", "data rank")
EVIDENCE = ("printed", "derived", "guessed")


class RowError(ValueError):
    """A row that cannot be rebuilt."""


@final
@attrs.frozen
class Row:
    """One published step."""

    name: str
    target: str
    model: str
    dims: Dims
    mesh: Mapping[str, int]
    batch: float
    length: int
    remat: str
    recipe: Recipe
    batch_per: str = "device"
    seconds: float | None = None
    source: str = ""
    commit: str = ""
    tokens: int | None = None
    known: str = ""
    formula: str = ""
    first: float | None = None
    gigabytes: float | None = None
    layers_compiled: tuple[int, ...] = ()
    order: str = ""

    @property
    def device_count(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    @property
    def sequences(self) -> int:
        """The sequences of one batch, over all devices."""
        shared = self.mesh["context"] * self.mesh["tensor"]
        ranks = self.device_count // (shared if self.batch_per == "data rank" else 1)
        return round(self.batch * ranks)

    @property
    def chip(self) -> str:
        """The platform and chip of the target."""
        return ":".join(self.target.split(":")[:2])

    @property
    def compiled_for(self) -> str:
        """The target with its flags."""
        return f"{self.target} {' '.join(self.recipe.flags.split())}".strip()

    @property
    def hardware(self) -> "sr.Hardware":
        """The sheet of the chip, with the network that the recipe says."""
        import shardrules as sr

        sheet, network = sr.Target.parse(self.target).hardware, self.recipe.network_bytes_per_second
        return attrs.evolve(sheet, network_bytes_per_second=network) if network else sheet

    @property
    def layout(self) -> str:
        """The axes that split anything."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"

    @property
    def problems(self) -> list[str]:
        """Why the row cannot be rebuilt."""
        import shardrules as sr

        problems, count = [], None
        try:
            count = sr.Target.parse(self.compiled_for).count
        except sr.errors.TargetError as error:
            problems.append(str(error))
        if count not in (None, self.device_count):
            problems.append(f"mesh {dict(self.mesh)} has {self.device_count} devices, target {self.target} {count}")
        try:
            policy_of(self.remat)
        except ValueError as error:
            problems.append(str(error))
        names = ("batch", "length", *(name for name in ("seconds", "first") if getattr(self, name) is not None))
        problems += [
            f"{name} must be positive, got {getattr(self, name)}" for name in names if not getattr(self, name) > 0
        ]
        problems += [*self._evidence_problems, *self.recipe.problems]
        depths = self.layers_compiled
        if depths and not (len(depths) == 2 and 0 < depths[0] < depths[1] < self.dims.layers):
            problems.append(f"layers_compiled must be two growing numbers below {self.dims.layers}, got {list(depths)}")
        if self.recipe.attention and self.recipe.attention not in RATES:
            problems.append(f"unknown attention {self.recipe.attention!r}; known are {', '.join(RATES)}")
        problems += [*self._fsdp_problems, *self._expert_problems]
        dims, tensor, fsdp = self.dims, self.mesh["tensor"], self.mesh["fsdp"]
        width = fsdp * self.mesh["context"]
        splits = {
            "heads": tensor,
            "kv_heads": tensor,
            "mlp": fsdp * tensor if self.recipe.hidden_split else tensor,
            "vocab": fsdp * tensor if self.recipe.split_vocab else tensor,
            "embed": width * tensor if self.recipe.transposed else math.lcm(width, tensor),
            "layers": dims.period,
        }
        problems += [
            f"{name} {getattr(dims, name)} is not divisible by {size}, the devices that split it"
            for name, size in splits.items()
            if getattr(dims, name) % size
        ]
        if self.length % (2 * self.mesh["context"]):
            problems.append(f"length {self.length} is not divisible by two parts for each device of context")
        if dims.heads % dims.kv_heads:
            problems.append(f"heads {dims.heads} are not a multiple of kv_heads {dims.kv_heads}")
        return problems

    @property
    def _evidence_problems(self) -> list[str]:
        if self.batch_per not in BATCHES:
            return [f"batch_per must be {' or '.join(map(repr, BATCHES))}, got {self.batch_per!r}"]
        problems, accumulations = list[str](), self.recipe.accumulations
        tokens = self.sequences * self.length * accumulations
        if self.tokens not in (None, tokens):
            problems.append(
                f"tokens are {self.tokens:,}, but {self.sequences} sequences of {self.length:,} and "
                f"{accumulations} accumulations make {tokens:,}"
            )
        if self.seconds is None:
            return problems
        missing = [name for name in ("source", "commit", "tokens", "known") if not getattr(self, name)]
        if missing:
            problems.append(f"seconds need {', '.join(missing)}: a rate is no step without its configuration")
        if self.known and self.known not in EVIDENCE:
            problems.append(f"known must be {' or '.join(map(repr, EVIDENCE))}, got {self.known!r}")
        if self.known == "guessed" and not self.order:
            problems.append("a batch that is guessed is for rows of an order alone")
        if (self.known == "derived") != bool(self.formula):
            problems.append("seconds that are derived have a formula with its commit, and no others have one")
        return problems

    @property
    def _expert_problems(self) -> list[str]:
        recipe, problems = self.recipe, list[str]()
        if self.dims.family == "gpt" and recipe.split_vocab:
            problems.append("the head of a GPT is its embedding, which split_vocab does not split")
        if self.dims.experts is None:
            return [*problems, *(["transposed is for layers of experts"] if recipe.transposed else [])]
        if not self.dims.is_latent:
            return problems
        # Layers of experts name nothing but their input, and read none of these.
        if self.remat not in ("none", "full", "minimal"):
            problems.append(f"remat of layers of experts must be none, full or minimal, got {self.remat!r}")
        names = ("eager", "fsdp", "attention", "fused_qkv", "fused_mlp", "gather_once")
        unread = [name for name in names if getattr(recipe, name)]
        return [*problems, *(f"layers of experts have no {name}" for name in unread)]

    @property
    def _fsdp_problems(self) -> list[str]:
        recipe, size = self.recipe, self.mesh["fsdp"] * self.mesh["tensor"]
        if recipe.sequence_parallel and recipe.fsdp != "fully_shard":
            return ["sequence_parallel is for fully_shard"]
        if not recipe.fsdp:
            return []
        if recipe.fsdp not in STRATEGIES:
            return [f"unknown strategy {recipe.fsdp!r} of FSDP; known are {', '.join(STRATEGIES)}"]
        if self.mesh["tensor"] > 1 and not recipe.sequence_parallel:
            return [f"PyTorch's FSDP splits nothing over tensor without sequence_parallel, got mesh {dict(self.mesh)}"]
        if recipe.sequence_parallel and self.length % self.mesh["tensor"]:
            return [f"length {self.length} is not divisible by tensor {self.mesh['tensor']}"]
        if recipe.gather_once:
            return ["PyTorch's FSDP gathers no activations: gather_once says nothing"]
        if recipe.fsdp == "fully_shard" and recipe.scan:
            return ["fully_shard gathers layers one by one: scan must be false"]
        weights = jax.tree.leaves(weight_shapes(self.dims, recipe, self.length))
        uneven = sorted({weight.shape[-1] for weight in weights if weight.shape[-1] % size})
        return [f"weights of {', '.join(map(str, uneven))} elements do not split over {size} devices"] if uneven else []


def read_rows(paths: Iterable[Path] = ()) -> tuple[Row, ...]:
    """Reads the rows of files: all published ones, or those in `paths`, which may use the same models and recipes.

    A row that cannot be rebuilt raises `RowError`, which lists everything that is wrong with any of them.
    """
    published = tomllib.loads(FILE.read_text("utf-8"))
    files = [tomllib.loads(path.read_text("utf-8")) for path in paths]
    tables = {
        kind: {
            **published.get(kind, {}),
            **{name: table for file in files for name, table in file.get(kind, {}).items()},
        }
        for kind in ("models", "recipes")
    }
    entries = [entry for file in files or [published] for entry in file.get("rows", ())]
    rows, problems = [], []
    for index, entry in enumerate(entries):
        name = entry.get("name", f"row {index}")
        try:
            row = _row(entry, tables["models"], tables["recipes"])
        except (RowError, TypeError) as error:
            problems.append(f"{name}: {error}")
            continue
        rows.append(row)
        problems += [f"{name}: {problem}" for problem in row.problems]
    names = [row.name for row in rows]
    problems += [
        f"{name}: two rows have this name" for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if problems:
        raise RowError("\n".join(problems))
    return tuple(rows)


def _row(entry: dict[str, Any], models: Mapping[str, Any], recipes: Mapping[str, Any]) -> Row:
    entry = dict(entry)
    unknown = sorted(set(entry) - {field.name for field in attrs.fields(Row)})
    if unknown:
        raise RowError(f"unknown {', '.join(unknown)}")
    model = entry.get("model")
    if model not in models:
        raise RowError(f"unknown model {model!r}; known are {', '.join(models)}")
    mesh = dict.fromkeys(AXES, 1)
    for part in entry.get("mesh", "").split(","):
        axis, _, size = part.strip().partition(":")
        if axis not in mesh or not size.isdigit():
            raise RowError(
                f"mesh {entry.get('mesh')!r} has {part!r}, which is not the size of one of {', '.join(AXES)}"
            )
        mesh[axis] = int(size)
    target = str(entry.get("target", ""))
    # The most specific recipe: the row's own, the chip's, the platform's.
    names = [entry.pop("recipe")] if "recipe" in entry else [":".join(target.split(":")[:2]), target.split(":")[0]]
    name = next((name for name in names if name in recipes), None)
    if name is None:
        raise RowError(f"no recipe {' or '.join(map(repr, names))}; known are {', '.join(recipes)}")
    fields: dict[str, Any] = dict(_merged(recipes, name))
    if "tpu_kernel" in fields:
        fields["tpu_kernel"] = TpuKernel(**fields["tpu_kernel"])
    dims = dict(models[str(model)])
    if "experts" in dims:
        dims["experts"] = ExpertDims(**dims["experts"])
    entry["layers_compiled"] = tuple(entry.get("layers_compiled", ()))
    return Row(**{**entry, "dims": Dims(**dims), "mesh": mesh, "recipe": Recipe(**fields)})


def _merged(recipes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A recipe with all that it has from the one that it is like."""
    fields = dict(recipes[name])
    like = fields.pop("like", None)
    if like is None:
        return fields
    if like not in recipes:
        raise RowError(f"recipe {name!r} is like {like!r}; known are {', '.join(recipes)}")
    return _merged(recipes, like) | fields
