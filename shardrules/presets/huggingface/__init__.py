"""Hugging Face checkpoints: rules for their parameters, and the names that files have for them."""

from shardrules.rules.huggingface.roles import ROLES, Role
from shardrules.rules.huggingface.rule import HuggingFaceShardingRule

__all__ = ["ROLES", "HuggingFaceShardingRule", "Role"]
