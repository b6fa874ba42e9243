"""Levels: the models of a chain, with a common contract."""

from __future__ import annotations

from ..tensors import IdMap as IdMap
from ..tensors import RowCounts as RowCounts
from .base import Admitting as Admitting
from .base import BatchedLevel as BatchedLevel
from .base import EncodedInput as EncodedInput
from .base import Hidden as Hidden
from .base import InputBlock as InputBlock
from .base import LevelCapabilities as LevelCapabilities
from .base import LevelOutput as LevelOutput
from .base import PromptBatch as PromptBatch
from .base import batched as batched
from .hugging_face import HuggingFaceLevel as HuggingFaceLevel
from .models import is_gguf as is_gguf
from .models import tokenizer_at as tokenizer_at
from .sources import Level as Level
from .sources import Options as Options
from .sources import load as load
from .sources import load_model as load_model
