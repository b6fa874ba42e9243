"""Levels: the models of a chain, behind one contract."""

from __future__ import annotations

from ..files import is_gguf
from ..tensors import RowCounts
from .base import (
    Admitting,
    BatchedLevel,
    EncodedInput,
    Hidden,
    IdMap,
    InputBlock,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    batched,
)
from .elements import ELEMENTS, Level, Loader, ModelSource, Options, Registry, load
from .hugging_face import HuggingFaceLevel
from .sources import load_model, tokenizer_at

__all__ = [
    "ELEMENTS",
    "Admitting",
    "BatchedLevel",
    "EncodedInput",
    "Hidden",
    "HuggingFaceLevel",
    "IdMap",
    "InputBlock",
    "Level",
    "LevelCapabilities",
    "LevelOutput",
    "Loader",
    "ModelSource",
    "Options",
    "PromptBatch",
    "Registry",
    "RowCounts",
    "batched",
    "is_gguf",
    "load",
    "load_model",
    "tokenizer_at",
]
