"""What JAX knows of this process and keeps to itself: the one module that may read `jax._src`, and why.

- The mesh of a legacy `with mesh:`, which code in the wild still uses, has no public reader.
- The client of `jax.distributed`, whose barriers take a timeout and whose store holds texts, has no public name.
- Whether a backend is up cannot be asked without starting one.
- Whether code is being traced shows in its arguments only, and a function may have none.
- What traces depend on beside their arguments, settings and contexts, is a key that `jax.jit` keeps for itself.
- The context of an operation in a traced program, with the mesh that was in force, can be had but not made.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax._src import config, core, distributed, mesh, xla_bridge


def legacy_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh of a `with mesh:` that is open in this thread, or `None`."""
    found = mesh.thread_resources.env.physical_mesh
    return None if found.empty else found


def coordination_client() -> Any:
    """Returns the client of `jax.distributed`, or `None` where it was not initialised."""
    return distributed.global_state.client


def process_id() -> int:
    """Returns the number of this process; 0 where `jax.distributed` was not initialised."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns how many processes take part, without starting a backend."""
    if distributed.global_state.client is not None:
        return distributed.global_state.num_processes or 1
    return jax.process_count() if xla_bridge.backends_are_initialized() else 1


def under_trace() -> bool:
    """Returns whether this code is being traced, by `jax.jit` say, so that what it does to arrays is only recorded."""
    return not core.trace_ctx.is_top_level()


def trace_key() -> Hashable:
    """Returns what a trace depends on beside its arguments: the settings and contexts that `jax.jit` heeds."""
    return config.trace_context(), config.default_prng_impl.value  # which is in the key of jit alone


def context_on(context: Any, mesh: jax.sharding.AbstractMesh) -> Any:
    """Returns `context`, that of an equation (`eqn.ctx`), with another `mesh` in force."""
    made = object.__new__(type(context))
    for name in type(context).__slots__:
        if name not in ("configs", "__weakref__"):  # it works the former out itself
            object.__setattr__(made, name, mesh if name == "cur_abstract_mesh" else getattr(context, name))
    return made
