"""What a report adds up, where specs are not sound."""

import numpy as np
from jax.sharding import PartitionSpec as P

import shardrules as sr


def test_a_duplicate_axis_keeps_one_copy() -> None:
    # 64 elements over 16 parts of 4 bytes each, on 4 devices: at least each part is stored once.
    mesh = sr.mesh_shape("data:4")
    report = sr.ShardingAnalyzer(mesh).analyze({"w": np.ones((16, 16), np.float32)}, {"w": P("data", "data")})
    assert report.stored_bytes == 1024
