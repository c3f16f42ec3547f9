"""`ReplicateShardingRule`: whole on every device, on purpose."""

from typing import final

import attrs

from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule


@final
@attrs.frozen
class ReplicateShardingRule(LeafShardingRule):
    """Holds every array whole on every device, and says that this is on purpose.

    A leaf that an earlier rule of a chain has split is an error.

    ```python
    assert sr.ReplicateShardingRule().plan({"w": np.ones(8)}).decision("w").spec == P()
    ```
    """

    reads_index = "no"

    def decide(self, leaf: Leaf) -> Decision:
        """Returns `P()`.

        **Arguments:**

        - `leaf`: the array.

        **Returns:**

        A `Decision`.
        """
        return leaf.replicate()
