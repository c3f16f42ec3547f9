"""`ShardingAnalyzer`: what is wrong with specs, what they cost and add up to, and what compilers make of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs

from shardrules.analysis.placed import as_spec, mesh_for, pair, place
from shardrules.analysis.report import ShardingReport, report
from shardrules.core.axes import AnyMesh, mesh_key, mesh_repr, mesh_sizes
from shardrules.core.check import check_spec
from shardrules.core.errors import SpecError, TreeError
from shardrules.core.leaf import Leaf
from shardrules.mesh.creation import AxisTypes

if TYPE_CHECKING:  # what asks compilers is a third of the package: it is loaded when somebody asks
    from shardrules.analysis.audits.report import AuditReport
    from shardrules.analysis.machine.hardware import Hardware
    from shardrules.analysis.machine.targets import Target


@final
@attrs.frozen
class ShardingAnalyzer:
    """Analyses a tree and the specs it is to have from shapes alone, and audits functions on the real compilers.

    **Arguments:**

    - `mesh`: the mesh; by default the one that the arrays are on, else the one in force when a method is called.

    ```python
    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
    tree = {"a": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    assert analyzer.validate_partition_specs(tree, {"a": P("dp", "tp")}) == []
    ```
    """

    mesh: AnyMesh | None = attrs.field(default=None, repr=mesh_repr, eq=mesh_key)

    def _mesh(self, tree: Any) -> AnyMesh:
        return mesh_for(self.mesh, lambda: tree, "the analysis needs a mesh: ShardingAnalyzer(mesh)")

    def validate_partition_specs(self, tree: Any, specs: Any) -> list[str]:
        """Returns one text for each thing that is wrong, with path, shape and numbers; none when the specs are sound.

        Unsound specs are reported and never raised; so is a tree of specs that has another structure.

        **Arguments:**

        - `tree`: any pytree of arrays or shapes.
        - `specs`: a tree of the same structure with a PartitionSpec at every array.

        **Returns:**

        A list of texts, in the order of the tree.

        **Raises:**

        `NoMeshError` where there is no mesh to validate for.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
        issues = analyzer.validate_partition_specs({"a": np.ones((8, 15))}, {"a": P("dp", "tp")})
        assert issues[0].startswith("a: Array shape (8, 15) not divisible by mesh axis tp size 4")
        ```
        """
        mesh = self._mesh(tree)
        try:
            pairs = pair(tree, specs, mesh)
        except TreeError as error:
            return [str(error)]
        return [f"{leaf.path or 'the tree'}: {text}" for leaf, spec in pairs for text in _issues(leaf, spec)]

    def estimate_memory_usage(self, tree: Any, specs: Any) -> dict[str, int]:
        """Returns how many bytes the arrays take, in all and on one device.

        It is what XLA allocates for arguments: sub-byte types are packed, the largest shard counts where shards are
        uneven, PRNG keys have the size of their words.

        **Arguments:**

        - `tree`: any pytree of arrays or shapes.
        - `specs`: a tree of the same structure with a PartitionSpec at every array.

        **Returns:**

        `total_size` (each array once), `size_per_device`, `sharded_size` and `replicated_size` (the parts of
        `size_per_device` that are split and that are not), and `device_count`.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
        usage = analyzer.estimate_memory_usage({"a": np.ones((8, 16), np.float32)}, {"a": P("dp", "tp")})
        assert (usage["total_size"], usage["size_per_device"]) == (512, 64)
        ```
        """
        found = self.analyze(tree, specs)
        whole = found.total_bytes - found.sharded_bytes
        return {
            "total_size": found.total_bytes,
            "size_per_device": found.device_bytes,
            "sharded_size": found.device_bytes - whole,
            "replicated_size": whole,
            "device_count": found.device_count,
        }

    def analyze(self, tree: Any, specs: Any, *, largest: int = 10) -> ShardingReport:
        """Returns what the specs add up to.

        **Arguments:**

        - `tree`: any pytree of arrays or shapes.
        - `specs`: a tree of the same structure with a PartitionSpec at every array.
        - `largest`: how many of the replicated arrays to list.

        **Returns:**

        A `ShardingReport`.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:4"))
        print(analyzer.analyze({"w": np.ones((8, 4))}, {"w": P("data")}))
        ```
        """
        mesh = self._mesh(tree)
        return report(place(tree, specs, mesh), mesh, largest)

    def audit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        plan: Any = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] = (),
        target: "Target | str" = "cpu",
        roles: Any = None,
        hardware: "Hardware | None" = None,
        axis_types: AxisTypes = "auto",
    ) -> "AuditReport":
        """Compiles a function for a target, and reports what the compiled program will really do. Nothing is run.

        **Arguments:**

        - `fn`: the function, a whole train step for instance. One that is jitted already keeps what it says itself. If
            it names a mesh of its own with the same axes, the target's takes its place.
        - `args`: its arguments; `jax.ShapeDtypeStruct`s stand for arrays. What is no array is static.
        - `plan`: a plan or a rule for the tuple of all arguments, or for the only one. Or a plan of the first
            argument; then the others take what mirrors it, as an optimizer's state does.
        - `in_shardings`: a tuple with one item for each argument, or one item that is for each of them: a rule, a plan,
            a PartitionSpec, or a tree or prefix of specs and shardings. `None`: as the plan says, else as the argument
            lies, else as the compiler likes.
        - `out_shardings`: the same for the result; a tuple stands for the items of a tuple.
        - `donate_argnums`: the arguments whose memory results may take.
        - `target`: what to compile for: a `Target`, or `"cpu"`, `"tpu:v5e:4x4"`, `"cuda:h100:8"`.
        - `roles`: what the arguments are for, a tree or prefix of `"parameters"`, `"optimizer state"` and `"batch"`. By
            default that is found: what is copied with equal paths and shapes is a parameter, the copies are state.
        - `hardware`: the sheet of the device; by default that of the target.
        - `axis_types`: the types that the axes have while `fn` is traced; `None`: those of the mesh.

        **Returns:**

        An `AuditReport`.

        **Raises:**

        `PlanError`, which lists every array that cannot be where it is asked to be, or names the line of the function
        that speaks of an unknown axis; `MissingCompilerError` with the command that installs it; `TargetError` for a
        mesh of another size than the target; `DoesNotFitError` where a compiler refuses what takes too much memory;
        `NoMeshError`.

        ```python
        def step(params, batch):
            return jax.grad(lambda w: jnp.tanh(batch @ w).sum())(params)

        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:8"))
        weights, batch = jnp.ones((16, 16)), jax.ShapeDtypeStruct((64, 16), jnp.float32)
        report = analyzer.audit(step, weights, batch, in_shardings=(P(), P("data")))
        assert [one.kind for one in report.collectives] == ["all-reduce"] and not report.problems
        ```
        """
        from shardrules.analysis.audits.audit import audit
        from shardrules.analysis.compiling.question import Question

        found = self.mesh if self.mesh is not None else getattr(plan, "mesh", None)
        question = Question(fn, plan, in_shardings, out_shardings, donate_argnums, roles, axis_types)
        return audit(question, args, self._mesh(args) if found is None else found, target, hardware)


def _issues(leaf: Leaf, spec: object) -> Iterator[str]:
    try:
        for finding in check_spec(leaf.path, leaf.shape, as_spec(spec), mesh_sizes(leaf.mesh)):
            if finding.severity == "error":
                yield finding.message
    except (SpecError, TreeError) as error:
        yield str(error)


def analyze_sharding_strategy(tree: Any, specs: Any, mesh: AnyMesh | None = None) -> dict[str, Any]:
    """Returns the figures of a sharding strategy as a dictionary. `ShardingAnalyzer.analyze` says more.

    **Arguments:**

    - `tree`: any pytree of arrays or shapes.
    - `specs`: a tree of the same structure with a PartitionSpec at every array.
    - `mesh`: the mesh; by default the one that the arrays are on, else the one in force.

    **Returns:**

    `total_parameters` and `sharded_parameters` (elements), `memory_per_device` (bytes), `balance_score` (1 is even),
    `partition_stats` (for each mesh axis its size, the arrays and the bytes split over it), and `communication_cost`
    (the bytes that a device receives when every split array is gathered once).

    ```python
    from shardrules.presets import eformer

    tree = {"a": np.ones((8, 16), np.float32), "s": np.ones(3, np.float32)}
    found = eformer.analyze_sharding_strategy(tree, {"a": P("dp", "tp"), "s": P()}, sr.mesh_shape("dp:2,tp:4"))
    assert (found["total_parameters"], found["sharded_parameters"], found["memory_per_device"]) == (131, 128, 76)
    ```
    """
    found = ShardingAnalyzer(mesh).analyze(tree, specs)
    return {
        "total_parameters": found.element_count,
        "sharded_parameters": found.sharded_element_count,
        "memory_per_device": found.device_bytes,
        "balance_score": found.balance,
        "partition_stats": {
            use.axis: {"size": use.size, "arrays": use.array_count, "bytes": use.split_bytes} for use in found.axes
        },
        "communication_cost": found.total_bytes - found.device_bytes,
    }
