"""Levels: the models of a chain, behind one contract."""

from __future__ import annotations

from ..tensors import RowCounts
from .adapter import CheckedLevel, LevelAdapter, batched
from .base import (
    Admitting,
    BatchedLevel,
    EncodedInput,
    Hidden,
    InputBlock,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    device_of,
)
from .encoder_decoder import EncoderDecoderLevel
from .hugging_face import HuggingFaceLevel
from .id_map import IdMap
from .loader import Level, load, load_model
from .registry import ELEMENTS, Loader, ModelSource, Options, Registry
from .sources import is_gguf, tokenizer_at

__all__ = [
    "ELEMENTS",
    "Admitting",
    "BatchedLevel",
    "CheckedLevel",
    "EncodedInput",
    "EncoderDecoderLevel",
    "Hidden",
    "HuggingFaceLevel",
    "IdMap",
    "InputBlock",
    "Level",
    "LevelAdapter",
    "LevelCapabilities",
    "LevelOutput",
    "Loader",
    "ModelSource",
    "Options",
    "PromptBatch",
    "Registry",
    "RowCounts",
    "batched",
    "device_of",
    "is_gguf",
    "load",
    "load_model",
    "tokenizer_at",
]
