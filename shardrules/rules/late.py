"""`LateRule`: a rule of a room above, by its dotted name.

Texts and files name every rule that comes with shardrules, those of presets too. They stand above this room, which must
not import them: a dotted name is the one way up, and only what uses the rule imports it.
"""

import importlib
import inspect
from typing import Any, final

import attrs

from shardrules.core.rule import ShardingRule


@final
@attrs.frozen
class LateRule:
    """A rule class by its module and name, imported when a rule is made.

    ```python
    from shardrules.rules.late import LateRule

    make = LateRule("shardrules.rules.dim", "DimShardingRule")
    assert make("data", 0) == sr.DimShardingRule("data", 0)
    ```
    """

    module: str
    name: str

    def __call__(self, *args: Any, **named: Any) -> ShardingRule:
        return self._load()(*args, **named)

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments, as `inspect.signature` asks for them."""
        return inspect.signature(self._load())

    def _load(self) -> type[ShardingRule]:
        return getattr(importlib.import_module(self.module), self.name)


HUGGING_FACE = LateRule("shardrules.presets.huggingface.rule", "HuggingFaceShardingRule")
"""The rule that texts and files call `hf`."""
