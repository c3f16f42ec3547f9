"""Doors for users of other libraries, one module or folder per library."""

from shardrules.presets import big_vision, eformer, haliax, huggingface, levanter, maxtext, pathways

__all__ = ["big_vision", "eformer", "haliax", "huggingface", "levanter", "maxtext", "pathways"]
