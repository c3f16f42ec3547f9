"""`ReplicateShardingRule`: whole on every device, explicitly."""

from typing import final

import attrs

from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule


@final
@attrs.frozen
class ReplicateShardingRule(LeafShardingRule):
    """Keeps every array whole on every device, as an explicit decision.

    A leaf that an earlier rule of a chain has split is an error.

    ```python
    assert sr.ReplicateShardingRule().plan({"w": np.ones(8)}).decision("w").spec == P()
    ```
    """

    reads_index = "no"
    parts = ()

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision `P()` for `leaf`."""
        return leaf.replicate()
