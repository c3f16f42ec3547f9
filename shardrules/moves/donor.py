"""The freeing of arrays whose buffers others may share."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, Self, final

import attrs

from shardrules.moves.bits import buffers_of
from shardrules.moves.prepare import is_deleted


def live_buffers(value: Any) -> Iterable[Hashable]:
    """The buffers of an array; none if it is deleted, or no array."""
    return () if is_deleted(value) else buffers_of(value)


@final
@attrs.define(eq=False)
class Donor:
    """Frees arrays once nothing needs their buffers: arrays may share shards with others, and be in a tree twice."""

    uses: Counter[Hashable]
    """The arrays that need each buffer."""
    waiting: list[Any] = attrs.field(factory=list)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Self:
        """Returns a donor for the arrays among some values."""
        return cls(Counter(buffer for value in values for buffer in live_buffers(value)))

    def release(self, array: Any) -> None:
        """Takes an array as one that is not needed any more, and is to be freed."""
        self.uses.subtract(buffers_of(array))
        self.waiting.append(array)

    def free(self) -> None:
        """Deletes the arrays that wait. Those whose buffers others still need wait on."""
        waiting, self.waiting = self.waiting, []
        for array in waiting:
            if array.is_deleted():
                continue
            if any(self.uses[buffer] for buffer in buffers_of(array)):
                self.waiting.append(array)
            else:
                array.delete()
