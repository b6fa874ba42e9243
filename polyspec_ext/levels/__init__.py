"""Levels: the models of a chain, behind one contract."""

from __future__ import annotations

from .base import (
    BatchedLevel,
    EncodedInput,
    Hidden,
    InputBlock,
    LevelAdapter,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    device_of,
)
from .encoder_decoder import EncoderDecoderLevel
from .hugging_face import HuggingFaceLevel
from .loader import Level, as_level, load
from .sources import found, tokenizer_at

__all__ = [
    "BatchedLevel",
    "EncodedInput",
    "EncoderDecoderLevel",
    "Hidden",
    "HuggingFaceLevel",
    "InputBlock",
    "Level",
    "LevelAdapter",
    "LevelCapabilities",
    "LevelOutput",
    "PromptBatch",
    "as_level",
    "device_of",
    "found",
    "load",
    "tokenizer_at",
]
