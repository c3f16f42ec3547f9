"""The kernels that docs/examples declares: nothing is gathered in front of them, on any target."""

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.errors import SplitError
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from tests.programs.examples import mesh_on

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
GPUS, TPUS = "cuda:h100:8", "tpu:v5e:4x4"
MESHES = {GPUS: "data:4,model:2", TPUS: "data:8,model:2"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@final
@attrs.frozen
class Kernel:
    """A declared kernel with operands that it takes on a target, and how these are split on an Explicit mesh."""

    script: str
    function: str
    target: str
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    trained: tuple[int, ...]
    calls: int
    """The kernels of a forward and a backward pass."""
    labels: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def structs(self, mesh: Mesh | None = None) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                shape,
                jnp.int32 if index == self.labels else jnp.bfloat16,
                sharding=None if mesh is None else NamedSharding(mesh, spec),
            )
            for index, (shape, spec) in enumerate(zip(self.shapes, self.specs, strict=True))
        ]

    def gradients(self) -> Callable[..., Any]:
        function = functools.partial(getattr(example(self.script), self.function), **dict(self.options))
        return jax.grad(lambda *operands: (function(*operands).astype(jnp.float32) ** 2).sum(), argnums=self.trained)


HEADS_FIRST, SEQUENCE_FIRST = (16, 4, 512, 128), (16, 512, 4, 128)
MATRICES, ROWS = ((2048, 1024), (1024, 512)), ((4096, 256), (32768, 256), (4096,))
SPLIT_HEADS, SPLIT_MATRICES, SPLIT_ROWS = P("data", "model"), (P("data", "model"), P("model")), (P("data"), P("model"))

KERNELS = [
    Kernel("declared_attention", "splash_attention", TPUS, (HEADS_FIRST,) * 3, (SPLIT_HEADS,) * 3, (0, 1, 2), 3),
    Kernel(
        "declared_attention",
        "triton_attention",
        GPUS,
        (SEQUENCE_FIRST,) * 3,
        (P("data", None, "model"),) * 3,
        (0, 1, 2),
        3,
    ),
    *(
        Kernel(
            "declared_matmul",
            "sharded_matmul",
            target,
            MATRICES,
            SPLIT_MATRICES,
            (0, 1),
            3,
            options=(("target", "gpu" if target == GPUS else "tpu"),),
        )
        for target in MESHES
    ),
    *(
        Kernel("declared_cross_entropy", "cross_entropy", target, ROWS, (*SPLIT_ROWS, P("data")), (0, 1), 0, labels=2)
        for target in MESHES
    ),
]
IDS = [f"{kernel.function}-{kernel.target.partition(':')[0]}" for kernel in KERNELS]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_plans_gather_nothing_for_a_kernel(kernel: Kernel) -> None:
    mesh, step = mesh_on(kernel.target, MESHES[kernel.target]), kernel.gradients()
    plan = sr.autoplan(step, *kernel.structs(), mesh=mesh)
    report = sr.audit(plan.jit(step), *kernel.structs(), mesh=mesh, target=kernel.target)
    assert not any(finding.code == "gathered-for-kernel" for finding in report.findings)
    assert (report.hlo_text or "").count("custom-call(") >= kernel.calls
    payloads = [collective.payload_bytes for collective in report.collectives]
    if kernel.script == "declared_attention":
        assert payloads == []
    else:  # gradients are sums, and nothing larger than that of the weight is sent
        assert 0 < max(payloads, default=1) <= 2 * math.prod(kernel.shapes[1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_explicit_meshes_gather_nothing_for_a_kernel(kernel: Kernel) -> None:
    devices = mesh_on(kernel.target, MESHES[kernel.target])
    mesh = Mesh(devices.devices, devices.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        text = jax.jit(kernel.gradients()).lower(*kernel.structs(mesh)).compile().as_text() or ""
    kinds = {collective.kind for collective in find_collectives(read_program(text), mesh)}
    assert kinds == (set() if kernel.script == "declared_attention" else {"all-reduce"})
    assert text.count("custom-call(") >= kernel.calls


@pytest.mark.slow
def test_a_cross_entropy_over_a_split_vocabulary_is_whole() -> None:
    module = example("declared_cross_entropy")
    shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((64, 4), jnp.float32)
    labels = jnp.arange(8) * 8 % 61
    sr.check_region(module.cross_entropy, *shapes, labels, block=16)
    hidden, words = (jax.random.normal(jax.random.key(0), shape.shape) for shape in shapes)
    expected = module.plain_cross_entropy(hidden, words, labels)
    assert jnp.allclose(module.cross_entropy(hidden, words, labels, block=16), expected, atol=1e-4)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 128, 128), (128, 192, 128), (128, 128, 1)])
def test_matmuls_refuse_shards_that_blocks_do_not_fill(rows: int, inner: int, columns: int) -> None:
    multiply = functools.partial(example("declared_matmul").sharded_matmul, target="cpu")
    with pytest.raises(SplitError, match="must be multiples of 128"):
        jax.eval_shape(
            multiply, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, inner), (inner, columns)))
        )
