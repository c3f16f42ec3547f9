"""`ShardingAnalyzer`: what is wrong with specs, and what they add up to."""

from collections.abc import Iterator
from typing import Any, final

import attrs

from shardrules.checks.placed import as_spec, mesh_for, pair_leaves, place_leaves
from shardrules.checks.report import ShardingReport, sharding_report
from shardrules.core.axes import AnyMesh, mesh_key, mesh_repr, mesh_sizes
from shardrules.core.check import check_spec
from shardrules.core.errors import ConfigTypeError, SpecError, TreeError, printable
from shardrules.core.leaf import Leaf


@final
@attrs.frozen
class ShardingAnalyzer:
    """Analyzes a tree and its specs from shapes alone.

    **Arguments:**

    - `mesh`: the mesh; by default the mesh of the arrays, else the mesh in force when a method is called.

    ```python
    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
    tree = {"a": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    assert analyzer.validate_partition_specs(tree, {"a": P("dp", "tp")}) == []
    ```
    """

    mesh: AnyMesh | None = attrs.field(default=None, repr=mesh_repr, eq=mesh_key)

    def _mesh_for(self, tree: Any) -> AnyMesh:
        return mesh_for(self.mesh, lambda: tree, "the analysis needs a mesh: pass ShardingAnalyzer(mesh)")

    def validate_partition_specs(self, pytree: Any, partition_specs: Any) -> list[str]:
        """Returns a message for each problem, with path, shape and numbers; none when the specs are sound.

        Unsound specs are reported, never raised; so is a tree of specs with a different structure.

        **Arguments:**

        - `pytree`: any pytree of arrays or shapes.
        - `partition_specs`: a tree of the same structure with a PartitionSpec for each array.

        **Returns:**

        A list of strings, in the order of the tree.

        **Raises:**

        `NoMeshError` where there is no mesh to validate for.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
        issues = analyzer.validate_partition_specs({"a": np.ones((8, 15))}, {"a": P("dp", "tp")})
        assert issues[0].startswith("a: Array shape (8, 15) not divisible by mesh axis tp size 4")
        ```
        """
        mesh = self._mesh_for(pytree)
        try:
            pairs = pair_leaves(pytree, partition_specs, mesh)
        except TreeError as error:
            return [str(error)]
        return [
            printable(f"{leaf.path or 'the tree'}: {issue}") for leaf, spec in pairs for issue in _issues(leaf, spec)
        ]

    def estimate_memory_usage(self, pytree: Any, partition_specs: Any) -> dict[str, int]:
        """Returns how many bytes the arrays take, in total and on one device.

        These are the bytes that arrays take on the devices of the mesh. Elements of fewer than 8 bits are packed,
        except on a mesh of CPUs before JAX 0.12, where they take a byte each. The largest shard counts where shards
        are uneven, and PRNG keys have the size of their words.

        **Arguments:**

        - `pytree`: any pytree of arrays or shapes.
        - `partition_specs`: a tree of the same structure with a PartitionSpec for each array.

        **Returns:**

        `total_size` (each array once), `size_per_device`, `sharded_size` and `replicated_size` (the parts of
        `size_per_device` that are split and that are not), and `device_count`.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
        usage = analyzer.estimate_memory_usage({"a": np.ones((8, 16), np.float32)}, {"a": P("dp", "tp")})
        assert (usage["total_size"], usage["size_per_device"]) == (512, 64)
        ```
        """
        # Replicated arrays are whole on every device, so that all the rest of a device is shards.
        report = self.analyze(pytree, partition_specs)
        replicated_bytes = report.total_bytes - report.sharded_bytes
        return {
            "total_size": report.total_bytes,
            "size_per_device": report.device_bytes,
            "sharded_size": report.device_bytes - replicated_bytes,
            "replicated_size": replicated_bytes,
            "device_count": report.device_count,
        }

    def analyze(self, tree: Any, specs: Any, *, largest: int = 10) -> ShardingReport:
        """Returns what the specs add up to.

        **Arguments:**

        - `tree`: any pytree of arrays or shapes.
        - `specs`: a tree of the same structure with a PartitionSpec for each array.
        - `largest`: how many of the replicated arrays to list.

        **Returns:**

        A `shardrules.reports.ShardingReport`.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:4"))
        print(analyzer.analyze({"w": np.ones((8, 4))}, {"w": P("data")}))
        ```
        """
        mesh = self._mesh_for(tree)
        return sharding_report(place_leaves(tree, specs, mesh), mesh, largest)


def _issues(leaf: Leaf, spec: object) -> Iterator[str]:
    try:
        for finding in check_spec(leaf.path, leaf.shape, as_spec(spec), mesh_sizes(leaf.mesh)):
            if finding.severity == "error":
                yield finding.message
    except (SpecError, ConfigTypeError) as error:
        yield str(error)


def analyze_sharding_strategy(pytree: Any, partition_specs: Any, mesh: AnyMesh | None = None) -> dict[str, Any]:
    """Returns the figures of `ShardingAnalyzer.analyze` as a dictionary with eformer's keys.

    `balance_score` is 1 where devices are filled evenly, `partition_stats` has for each mesh axis its size and the
    arrays and bytes split over it, and `communication_cost` is what a device receives when every split array is
    gathered once.

    ```python
    from shardrules.presets import eformer

    tree = {"a": np.ones((8, 16), np.float32), "s": np.ones(3, np.float32)}
    figures = eformer.analyze_sharding_strategy(tree, {"a": P("dp", "tp"), "s": P()}, sr.mesh_shape("dp:2,tp:4"))
    assert (figures["total_parameters"], figures["sharded_parameters"], figures["memory_per_device"]) == (131, 128, 76)
    ```
    """
    report = ShardingAnalyzer(mesh).analyze(pytree, partition_specs)
    return {
        "total_parameters": report.element_count,
        "sharded_parameters": report.sharded_element_count,
        "memory_per_device": report.device_bytes,
        "balance_score": report.balance,
        "partition_stats": {
            use.axis: {"size": use.size, "arrays": use.array_count, "bytes": use.split_bytes} for use in report.axes
        },
        "communication_cost": report.total_bytes - report.device_bytes,
    }
