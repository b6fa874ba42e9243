"""Drafters: what stands at the lower end of a chain and proposes tokens."""

from .base import Context, Drafter, Proposal
from .model import DraftModel
from .prompt_lookup import PromptLookup

__all__ = ["Context", "DraftModel", "Drafter", "PromptLookup", "Proposal"]
