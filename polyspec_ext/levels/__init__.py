"""Levels: the models of a chain, behind one contract."""

from __future__ import annotations

from ..tensors import RowCounts
from .adapter import batched
from .base import (
    Admitting,
    BatchedLevel,
    EncodedInput,
    Hidden,
    InputBlock,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
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
    "EncodedInput",
    "EncoderDecoderLevel",
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
