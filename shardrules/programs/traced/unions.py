"""Things that go together, by pairs."""

from typing import Any, Generic, TypeVar, final

import attrs

_Key = TypeVar("_Key", bound=Any)


@final
@attrs.define(eq=False)
class Unions(Generic[_Key]):
    """A union-find. The least of the keys that go together represents them, whatever the order of joins."""

    parents: dict[_Key, _Key] = attrs.field(factory=dict)

    def root(self, key: _Key) -> _Key:
        descendants: list[_Key] = []
        while self.parents.get(key, key) != key:
            descendants.append(key)
            key = self.parents[key]
        # Path compression keeps later look-ups short.
        self.parents.update(dict.fromkeys(descendants, key))
        return key

    def join(self, first: _Key, second: _Key) -> None:
        low, high = sorted((self.root(first), self.root(second)))
        self.parents[low], self.parents[high] = low, low
