"""Levels: the models of a chain, with a common contract."""

from __future__ import annotations

from ..files import is_gguf as is_gguf
from ..tensors import RowCounts as RowCounts
from .base import Admitting as Admitting
from .base import BatchedLevel as BatchedLevel
from .base import EncodedInput as EncodedInput
from .base import Hidden as Hidden
from .base import IdMap as IdMap
from .base import InputBlock as InputBlock
from .base import LevelCapabilities as LevelCapabilities
from .base import LevelOutput as LevelOutput
from .base import PromptBatch as PromptBatch
from .base import batched as batched
from .elements import ELEMENTS as ELEMENTS
from .elements import Kind as Kind
from .elements import Level as Level
from .elements import Loader as Loader
from .elements import ModelSource as ModelSource
from .elements import Options as Options
from .elements import Registry as Registry
from .elements import load as load
from .hugging_face import HuggingFaceLevel as HuggingFaceLevel
from .sources import load_model as load_model
from .sources import tokenizer_at as tokenizer_at
