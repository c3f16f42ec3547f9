"""By behaviour: over real processes each reads and places only its own shards, and all get the whole back."""

import pytest

from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import SHAPES, printed_lines


@pytest.mark.sample(1)
@SHAPES
def test_each_process_places_its_shards_and_gathers_the_whole(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            mesh = sr.create_mesh("data:4,model:2")
            whole = np.arange(64, dtype=np.float32).reshape(8, 8)
            asked = []

            def read(index):
                asked.append(index)
                return whole[index]

            tree = {
                "numpy": whole,
                "local": jnp.asarray(whole),
                "key": jax.random.key(3),
                "small": np.int32(7),
                "source": sr.ArraySource((8, 8), np.float32, read),
                "static": "x",
            }
            rule = sr.RegexShardingRule([("key|small", P()), (".*", P("data", "model"))])
            placed = sr.filter_shard(tree, rule, mesh)
            for name in ("numpy", "local", "source"):
                assert placed[name].sharding == NamedSharding(mesh, P("data", "model")), name
                for shard in placed[name].addressable_shards:
                    np.testing.assert_array_equal(shard.data, whole[shard.index])
            print(len(asked), sum((i[0].stop - i[0].start) * (i[1].stop - i[1].start) for i in asked))
            again = sr.filter_shard(placed, rule, mesh)
            assert all(again[name] is placed[name] for name in ("numpy", "local", "source", "small"))
            back = sr.filter_gather(placed)
            for name in ("numpy", "local", "source"):
                assert isinstance(back[name], np.ndarray)
                np.testing.assert_array_equal(back[name], whole)
            assert int(back["small"]) == 7 and back["static"] == "x"
            assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
            moved = sr.filter_shard(placed, sr.RegexShardingRule([("key|small", P()), (".*", P("model"))]), mesh)
            np.testing.assert_array_equal(sr.filter_gather(moved)["numpy"], whole)
            assert moved["local"].sharding.spec == P("model")
            constrained = jax.jit(lambda x: sr.filter_shard(2 * x, P("model", "data"), mesh))(placed["numpy"])
            np.testing.assert_array_equal(sr.filter_gather(constrained), 2 * whole)
            """,
            processes=processes,
            devices=devices,
        )
    )
    # 64 elements in 8 parts: each process asks for its own, once each.
    assert lines == [[f"{devices} {64 // processes}"]] * processes


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_process_that_holds_no_part_gathers_the_whole(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            bits = np.array([0x80000000, 0x7FC12345, 0xFF812345, 1, 0, 0x3F800000, 0x7F800000, 0x80000001], np.uint32)
            values = {
                "floats": bits.view(np.float32),
                "rows": np.arange(32, dtype=np.int8).reshape(8, 4),
                "half": jnp.arange(8, dtype=jnp.bfloat16),
                "flags": np.arange(8) % 3 == 0,
                "empty": np.zeros((8, 0), np.float32),
            }
            used = jax.devices()[: len(jax.devices()) // 2]
            part = jax.sharding.Mesh(np.array(used), ("data",))
            own = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
            last = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("data",))
            tree = {
                "split": sr.filter_shard(values, P("data"), part),
                "copies": sr.filter_shard(values, P(), part),
                "last": sr.filter_shard(values, P(), last),
                "key": sr.filter_shard(jax.random.key(7), P(), part),
                "everywhere": sr.filter_shard(values, P("data"), sr.create_mesh(f"data:{len(jax.devices())}")),
                "own": sr.filter_shard(np.full(8, process), P("data"), own),
                "static": "x",
            }
            back = sr.filter_gather(tree)
            for name in ("split", "copies", "last", "everywhere"):
                for leaf, value in values.items():
                    assert isinstance(back[name][leaf], np.ndarray), (name, leaf)
                    assert back[name][leaf].dtype == value.dtype, (name, leaf)
                    assert back[name][leaf].tobytes() == np.asarray(value).tobytes(), (name, leaf)
            assert back["own"].tolist() == [process] * 8 and back["static"] == "x"
            assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
            print(len(tree["split"]["rows"].addressable_shards))
            """,
            processes=processes,
            devices=devices,
        )
    )
    # The first half of the processes holds all parts, the others none.
    assert lines == [[str(devices)]] * (processes // 2) + [["0"]] * (processes // 2)


@pytest.mark.slow
@SHAPES
def test_models_and_states_are_made_over_processes(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            import functools
            import equinox as eqx, optax
            mesh = sr.create_mesh("data:4,model:2")
            rule = sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0)
            make = functools.partial(eqx.nn.MLP, 8, 8, 64, 2)
            model = sr.filter_init(make, rule, mesh)(key=jax.random.key(0))
            params = eqx.filter(model, eqx.is_array)
            expected = eqx.filter(make(key=jax.random.key(0)), eqx.is_array)
            jax.tree.map(np.testing.assert_array_equal, sr.filter_gather(params), expected)
            plan = sr.check_same_plan(rule.plan(params, mesh), timeout=60)
            optim = optax.adam(1e-3)
            state = sr.filter_init(optim.init, plan.mirror, mesh)(params)
            assert state[0].mu.layers[0].weight.sharding.spec == P("model", "data")

            places = rule, plan.mirror
            @sr.filter_jit(mesh=mesh, in_shardings=(*places, P("data")), out_shardings=(*places, P()), donate=(0, 1))
            def step(model, state, x):
                loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
                updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
                return eqx.apply_updates(model, updates), state, loss

            losses = []
            for _ in range(3):
                model, state, loss = step(model, state, sr.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh))
                losses.append(round(float(loss), 6))
            assert losses[0] > losses[1] > losses[2]
            print(losses)
            """,
            processes=processes,
            devices=devices,
        )
    )
    assert lines == [lines[0]] * processes


@pytest.mark.slow
def test_host_batches_and_meshes_without_a_process() -> None:
    lines = printed_lines(
        run_processes(
            """
            mesh = sr.create_mesh("data:4,model:2")
            run = sr.filter_jit(lambda x: x.sum(), mesh=mesh, in_shardings=P("data"), out_shardings=P())
            print(float(run(np.ones((8, 2), np.float32))))
            first = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
            source = sr.ArraySource((8,), np.float32, lambda index: np.ones(8, np.float32)[index])
            placed = sr.filter_shard({"w": np.ones(8, np.float32), "s": source}, P("data"), first)
            print([len(array.addressable_shards) for array in placed.values()])
            across = sr.filter_shard(np.ones(8, np.float32), P("data"), mesh)
            try:
                sr.filter_shard(across, P("data"), first)
            except sr.errors.MeshError as error:
                print("Gather it first" in str(error))
            """,
            processes=2,
            devices=4,
        )
    )
    assert lines == [["16.0", "[4, 4]", "True"], ["16.0", "[0, 0]", "True"]]
