"""What users of other libraries come from, one module per library."""

from shardrules.presets import big_vision, eformer, huggingface, pathways

__all__ = ["big_vision", "eformer", "huggingface", "pathways"]
