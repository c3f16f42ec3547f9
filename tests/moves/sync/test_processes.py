"""Syncs over real processes: each knows the values, and checks every shard of its own."""

import pytest

from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import printed_lines

CODE = """
    from jax.sharding import Mesh
    devices = jax.devices()
    half = len(devices) // 2

    def placed(values, sharding):
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], dtype=values.dtype)

    layers = {f"layers/{i}/{x}": np.arange(32 * 8, dtype=np.float32).reshape(32, 8) * (i + 1) + ord(x) for i in range(2)
              for x in "qk"}
    tree = {**layers, "head": np.arange(40, dtype=np.float32).reshape(10, 4), "scale": np.float32(3)[None]}
    names = [
        (["layers/{i}/q", "layers/{i}/k"], "qk", "concat(0) | transpose(1, 0) | stack('i') | cast('bfloat16')"),
        ("head", "head", "pad(0, 0, 2, 7) | cast('float32')"),
        ("scale", "scale", "reshape()"),
    ]
    qk = np.stack([np.concatenate([layers[f"layers/{i}/{x}"] for x in "qk"]).T for i in range(2)])
    expected = {"qk": qk.astype(jnp.bfloat16), "head": np.pad(tree["head"], [(0, 2), (0, 0)], constant_values=7),
                "scale": np.float32(3)}
    specs = {"qk": P(None, None, "tp"), "head": P("dp"), "scale": P()}
    meshes = {
        "apart": (Mesh(np.array(devices[:half]).reshape(-1, 2), ("fsdp", "tp")),
                  Mesh(np.array(devices[half:]).reshape(2, -1), ("dp", "tp"))),
        "crossing": (Mesh(np.array(devices[::2]).reshape(-1, 2), ("fsdp", "tp")),
                     Mesh(np.array(devices[::-1]).reshape(2, -1), ("dp", "tp"))),
    }
    for name, (old, new) in meshes.items():
        spec = lambda values: P("tp", "fsdp") if values.ndim == 2 and len(values) == 32 else P()
        source = {path: placed(values, NamedSharding(old, spec(values))) for path, values in tree.items()}
        target = {path: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(new, specs[path]))
                  for path, values in expected.items()}
        plan = sr.plan_sync(source, target, names=names, max_bytes_in_flight=256)
        result = plan.run(source, check="sums")
        result = plan.run(source, into=result, donate=True)
        assert all(array.is_deleted() for path, array in source.items())
        for path, values in expected.items():
            assert result[path].sharding == target[path].sharding
            for shard in result[path].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
        print(name, plan.fingerprint, plan.moved_bytes == plan.lower_bound_bytes, plan.round_count > 3)
        flight = plan.deliveries.in_flight.max()
        assert flight <= 256, flight
"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_values_and_plans_are_the_same_on_all_processes(processes: int, devices: int) -> None:
    lines = printed_lines(run_processes(CODE, processes=processes, devices=devices))
    assert [line.split()[0] for line in lines[0]] == ["apart", "crossing"]
    assert lines == [lines[0]] * processes
    assert all(line.endswith("True True") for line in lines[0])


@pytest.mark.slow
def test_processes_with_different_plans_refuse() -> None:
    lines = printed_lines(
        run_processes(
            """
            mesh = sr.create_mesh("a:4")
            source = {"x": jax.make_array_from_callback((8,), NamedSharding(mesh, P("a")),
                                                        lambda index: np.arange(8.0, dtype=np.float32)[index])}
            target = {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))}
            names = [("x", "x"), ("x", "x", "scale(2.0)")][process : process + 1]
            try:
                sr.plan_sync(source, target, names=names).run(source)
            except sr.errors.DisagreementError as error:
                print("2 different plans" in str(error), source["x"].is_deleted())
            """,
            processes=2,
            devices=2,
        )
    )
    assert lines == [["True False"]] * 2
