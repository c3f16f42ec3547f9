"""`plan_sync`: from the arrays of a trainer to those of a sampler."""

from typing import Any

import numpy as np

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.core.fields import byte_count
from shardrules.core.finding import Finding, plan_error
from shardrules.moves.schedule import networks
from shardrules.moves.sync.arrays import Arrays, Devices, read_arrays
from shardrules.moves.sync.flows import choose_routes, flows_covered, itemsize, make_flows
from shardrules.moves.sync.match import match_arrays
from shardrules.moves.sync.plan import Links, SyncPlan
from shardrules.moves.sync.rounds import order_deliveries
from shardrules.moves.sync.schedule import SyncSchedule
from shardrules.moves.sync.table import NameTable

_IN_FLIGHT_BYTES = 256 * 2**20
"""The default of `max_bytes_in_flight` on each device: little beside a shard of a model, and enough to keep links busy.
Chosen by hand."""


def plan_sync(
    source: Any,
    target: Any,
    *,
    names: Any = None,
    max_bytes_in_flight: int | None = None,
    hardware: Any = None,
) -> SyncPlan:
    """Plans the way of arrays from one tree and mesh to another tree and mesh: from a trainer to a sampler.

    Only shapes are read, and nothing moves. The plan is the same on every host. It is proved: each element of the
    target is written once, from where the table says, and nothing of the source is left without being named.

    **Arguments:**

    - `source`, `target`: for each side a `ShardingPlan` with its mesh, or a tree of arrays, of `ShapeDtypeStruct`s with
        shardings, or of any objects with a `shape`, a `dtype` and a `sharding`. Meshes may have other axes, sizes and
        devices, and share some. A mesh without devices has made-up ones, eight on each host, which the other side
        does not share.
    - `names`: which arrays correspond: a `NameTable`, its lines, or a TOML file with them; by default those of equal
        paths.
    - `max_bytes_in_flight`: the most that is on its way on each device at any moment; by default 256 MiB.
    - `hardware`: a `Hardware` for the modelled seconds, or a pair of them for the source and the target.

    **Returns:**

    A `SyncPlan`. Print it; `plan.run(tree)` moves.

    **Raises:**

    `PlanError`, listing all that is wrong: paths without a line, lines without arrays, operations that do not fit,
    shapes and dtypes that differ. `ConfigError` for a table or a limit that cannot be read.

    ```python
    trainer, sampler = sr.mesh_shape("fsdp:4,tp:2"), sr.mesh_shape("tp:4")
    shapes = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    source = sr.FSDPShardingRule("fsdp", min_size_mb=0).plan(shapes, trainer)
    target = sr.DimShardingRule("tp", 0).plan({"up_proj": jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)}, sampler)
    plan = sr.plan_sync(source, target, names=[("up", "up_proj", "transpose(1, 0) | cast('bfloat16')")])
    assert plan.moved_bytes == plan.lower_bound_bytes == 64 * 256 * 2
    ```
    """
    table = NameTable.of(names)
    limit_bytes = (
        _IN_FLIGHT_BYTES if max_bytes_in_flight is None else byte_count("max_bytes_in_flight")(max_bytes_in_flight)
    )
    links = _links(hardware)
    devices = Devices()
    old, new = read_arrays(source, 0, devices), read_arrays(target, 1, devices)
    if devices.are_mixed:  # again, with those that exist first: made-up ones get ids behind theirs
        devices = devices.existing()
        old, new = read_arrays(source, 0, devices), read_arrays(target, 1, devices)
    matches = match_arrays(old, new, table)
    if matches.findings:
        raise plan_error("plan_sync", matches.findings)
    _check_limit(limit_bytes, new)
    flows = make_flows(matches.parts, old, new, limit_bytes)
    missed = np.flatnonzero(~flows_covered(flows, new)).tolist()
    if missed:
        why = "its elements are not written once each by the devices"
        faults = [Finding("error", "proof", why, new.paths[index], "Report it") for index in missed]
        raise plan_error("plan_sync", faults)
    near = networks(devices.devices)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(near.values()))}
    network_of = np.array([numbers[near[device]] for device in devices.devices], np.int64)
    routes = choose_routes(flows, network_of, len(devices.devices))
    deliveries = order_deliveries(flows, routes, limit_bytes, len(devices.devices))
    schedule = SyncSchedule(old, new, tuple(devices.devices), network_of, tuple(flows), tuple(routes), deliveries)
    return SyncPlan(table, schedule, matches, limit_bytes, links)


def _links(hardware: Any) -> tuple[Links, Links] | None:
    if hardware is None:
        return None
    pair = tuple(hardware) if isinstance(hardware, list | tuple) else (hardware, hardware)
    # Hardware is known above the rooms of trees: here only its figures are.
    figures = ("link_bytes_per_second", "link_latency_seconds", "network_bytes_per_second", "network_latency_seconds")
    if len(pair) != 2 or not all(
        isinstance(getattr(each, name, None), int | float) for each in pair for name in figures
    ):
        raise ConfigTypeError(f"plan_sync: hardware must be a Hardware, or a pair of them; got {hardware!r:.80}")
    return pair[0], pair[1]


def _check_limit(limit_bytes: int, target: Arrays) -> None:
    copies = max((layout.owners.shape[1] for layout in target.layouts), default=1)
    widest = max(map(itemsize, dict.fromkeys(target.dtypes)), default=1)
    if limit_bytes < (1 + copies) * widest:
        raise ConfigError(
            f"max_bytes_in_flight must be {(1 + copies) * widest} or more, an element for each of {copies} devices "
            f"with a part of the target and one to send; got {limit_bytes}"
        )
