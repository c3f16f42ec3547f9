"""Hugging Face checkpoints: rules for their parameters, and the names that files have for them."""

from shardrules.presets.huggingface.names import tensor_names
from shardrules.presets.huggingface.roles import ROLES, Role
from shardrules.presets.huggingface.rule import HuggingFaceShardingRule
from shardrules.presets.huggingface.sync import sync_names

__all__ = ["ROLES", "HuggingFaceShardingRule", "Role", "sync_names", "tensor_names"]
