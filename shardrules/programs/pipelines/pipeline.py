"""`pipeline`: layers in stages over a mesh axis, and microbatches that go from stage to stage."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.programs.pipelines.arguments import PipelineCall, Settings
from shardrules.programs.pipelines.schedule import ScheduleName, schedule_problems


def pipeline(
    layer: Callable[[Any, Any], Any],
    *,
    axis: str,
    microbatches: int,
    schedule: ScheduleName = "gpipe",
    chunks: int = 1,
    cut: Sequence[int] | None = None,
    batch: Axis | None = None,
    first: Callable[[Any, Any], Any] | None = None,
    last: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function that runs layers in stages: each device along a mesh axis has some of the layers.

    The batch goes through the stages in microbatches, so that stages compute at the same time. Without a mesh, or with
    an axis of one device, the function computes the same without stages. Inside a stage, arrays may be split over
    other axes of the mesh, as the compiler splits any function. It works under `jax.jit`, `jax.grad` and `jax.vmap`,
    not in forward mode. What a layer keeps for its backward pass is up to the layer: `jax.checkpoint` keeps its input
    only.

    **Arguments:**

    - `layer`: a function `layer(params, x) -> x` of the parameters of a layer. It may close over arrays, but not over
        those that a gradient is taken of.
    - `axis`: the mesh axis of the stages.
    - `microbatches`: how many parts a batch is split into. Microbatch `i` has every so many examples, from `i` on.
    - `schedule`: `"gpipe"` computes all microbatches forward, then all backward; `"1f1b"` computes each backward as
        soon as it can be, and keeps less. Without `last` it computes the forward pass again in the backward pass.
        `shardrules.reports.PipelineSchedule` says how long stages wait and what they keep.
    - `chunks`: how many groups of layers that do not follow each other a stage has: stages wait less, and send more.
    - `cut`: how many layers each stage has, in order, and with chunks each chunk of all stages in the order in which
        microbatches meet them; by default as many each, or one more in the first ones.
    - `batch`: the mesh axes that the batch is split over. Parameters are then gathered over them once in each call, and
        gradients summed once, instead of for each microbatch.
    - `first`: a function `first(params, x)` that makes the input of the first layer, on the first stage: an embedding.
    - `last`: a function `last(params, y, targets)` that makes the loss of a microbatch from the output of the last
        layer, on the last stage. The loss of the batch is the mean of those.

    **Returns:**

    A function `pipelined(layers, x, targets=None, *, first=None, last=None)`. `layers` are the parameters of
    all layers, stacked along the first dim as `filter_vmap` stacks them, or a list or tuple of layers that are equal.
    The leaves of `x` and `targets` have the examples first; typed keys, such as a key for each example, may be among
    them. `first` and `last` are the parameters of these functions. It returns the loss, or without `last` the output of
    the last layer.

    **Raises:**

    `ConfigError`, which lists everything that is wrong; also where a gradient is taken of an array that a function
    closes over, and where a function raises for want of targets, of parameters or of equal layers.

    ```python
    def layer(params, x):
        return x + jnp.tanh(x @ params)

    params, x = 0.1 * jnp.ones((8, 16, 16)), jnp.ones((32, 16))
    pipelined = sr.pipeline(layer, axis="stage", microbatches=8)
    with jax.set_mesh(sr.create_mesh("stage:4,data:2")):
        out = jax.jit(pipelined)(params, x)
    assert jnp.allclose(out, pipelined(params, x), atol=1e-5)  # without a mesh: layer by layer
    ```
    """
    functions = {"layer": layer, "first": first, "last": last}
    wrong = [name for name, function in functions.items() if not callable(function) and (function or name == "layer")]
    if wrong:
        raise ConfigTypeError(f"pipeline: {', '.join(wrong)} must be functions")
    if not isinstance(axis, str):
        raise ConfigTypeError(f"pipeline: axis must be the name of a mesh axis, got {axis!r:.60}")
    # The mesh has the number of stages, and is known at the call: 2 stands for any.
    problems = schedule_problems(schedule, 2, microbatches, chunks)
    names = () if batch is None else axis_tuple(as_axis(batch))
    if axis in names or len(dict.fromkeys(names)) < len(names):
        problems.append(f"axis {axis!r} and batch {batch!r} must be different mesh axes")
    if cut is not None and not (isinstance(cut, Sequence) and all(isinstance(n, int) and n >= 0 for n in cut)):
        problems.append(f"cut must be numbers of layers, got {cut!r:.60}")
    if problems:
        raise ConfigError(f"pipeline: {'; '.join(problems)}")
    counts = None if cut is None else tuple(cut)
    settings = Settings(layer, axis, microbatches, schedule, chunks, counts, names, first, last)
    return functools.partial(_run, settings)


def _run(settings: Settings, layers: Any, x: Any, targets: Any = None, *, first: Any = None, last: Any = None) -> Any:
    call = PipelineCall(settings, layers, x, targets, first, last)
    call.check()
    return call.run()
