"""State of JAX without a public reader: the only module that may read `jax._src`, and why.

- `legacy_mesh`: a `with mesh:`, which code in the wild still uses, has no public reader.
- `coordination_client`: the client of `jax.distributed` stores text, and its barriers take a timeout. It has no name.
- `process_count`: no public function says whether a backend runs without starting it.
- `under_trace`: whether code is being traced shows only in its arguments, and a function may have none.
- `trace_key`: the settings and contexts on which a trace depends beside its arguments are a key inside `jax.jit`.
- `lines_of`, `lines_of_caller`: the lines behind an equation, or a call, can be read, but not passed on to others.
- `context_on`: the context of an equation, with the mesh that was in force, can be read but not made.
- `require_devices`: a primitive that lowers to `custom_partitioning` has to be listed among those that need devices.
- `decoded_spec`: `custom_partitioning` decodes what a partitioner says about an array, but not where it cannot.
- `device_put`, `jit`, `reshard`, `with_sharding_constraint`, `shard_map`: a program may put our functions into the
  place of JAX's own, whose public names then lead back to ours.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import config, core, dispatch, distributed, sharding_impls, source_info_util, xla_bridge
from jax._src import mesh as mesh_state
from jax._src.api import device_put as device_put
from jax._src.api import jit as jit
from jax._src.pjit import reshard as reshard
from jax._src.pjit import with_sharding_constraint as with_sharding_constraint
from jax._src.shard_map import shard_map as shard_map


def legacy_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh of a `with mesh:` that is open in this thread, or `None`."""
    legacy = mesh_state.thread_resources.env.physical_mesh
    return None if legacy.empty else legacy


def coordination_client() -> Any:
    """Returns the client of `jax.distributed`, or `None` where it was not initialised."""
    return distributed.global_state.client


def process_id() -> int:
    """Returns the index of this process; 0 where `jax.distributed` was not initialised."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns how many processes take part, without starting a backend: TPUs know it without `jax.distributed`."""
    if distributed.global_state.client is not None:
        return distributed.global_state.num_processes or 1
    return jax.process_count() if xla_bridge.backends_are_initialized() else 1


def under_trace() -> bool:
    """Returns whether this code is being traced, by `jax.jit` say: arrays have no values then."""
    return not core.trace_ctx.is_top_level()


def trace_key() -> Hashable:
    """Returns the settings and contexts on which a trace depends beside its arguments, as in the key of `jax.jit`."""
    # The PRNG implementation is part of the key of jit, but not of the trace context.
    return config.trace_context(), config.default_prng_impl.value


def context_on(context: Any, mesh: jax.sharding.AbstractMesh) -> Any:
    """Returns the context of an equation (`eqn.ctx`) with another `mesh` in force."""
    copy = object.__new__(type(context))
    for name in type(context).__slots__:
        if name not in ("configs", "__weakref__"):  # `configs` is computed from the others
            object.__setattr__(copy, name, mesh if name == "cur_abstract_mesh" else getattr(context, name))
    return copy


def lines_of(equation: Any) -> AbstractContextManager[Any]:
    """Returns a context in which new equations come from the same lines of code as this one."""
    return source_info_util.user_context(equation.source_info.traceback)


def lines_of_caller() -> AbstractContextManager[Any]:
    """Returns a context in which new equations come from the lines of code that are being traced now."""
    return source_info_util.user_context(source_info_util.current().traceback)


def require_devices(primitive: Any) -> None:
    """Makes JAX lower programs with a primitive for the devices that will run them."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def decoded_spec(sharding: Any, mesh: Any) -> jax.sharding.PartitionSpec | None:
    """Returns the spec of what a partitioner says of an array, or `None` where it splits that over part of an axis."""
    try:
        # A partitioner's sharding has its own number of dims: 0 is not read.
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)
    except ValueError:  # a dim in fewer pieces than its axis has devices
        return None
    return spec
