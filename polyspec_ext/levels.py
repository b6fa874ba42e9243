"""Levels: the models of a chain, behind four names, and Hugging Face causal models as levels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from . import cache as caches

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


@runtime_checkable
class Level(Protocol):
    """One model of a chain and its cache.

    A level holds the keys and values of one batch of sequences (so far one sequence, B = 1).
    `prefill` starts a batch, `forward` appends to it, `rollback` cuts it. Optional attributes:
    `name` (for messages), `device` (of tokens and logits; default the CPU), `max_length` (longest
    context, None: no limit), `eos_token_ids`, `tokenizer()`.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids the level reads are below it."""
        ...

    def prefill(self, tokens: torch.Tensor) -> None:
        """Forget everything and read `tokens`, ``[B, T]`` int64, T >= 0. No logits are wanted."""
        ...

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append `tokens`, ``[B, T]`` int64, T >= 1, and return the next-token logits behind the
        last `keep` <= T of them: ``[B, keep, vocab_size]``, float32, bfloat16 or float16, unit
        stride along the vocabulary."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence b; never more than were appended."""
        ...


def feed(tokens: list[int], level: Level) -> torch.Tensor:
    """`tokens` as the level reads them: ``[1, T]`` int64 on its device.

    Ids that a smaller vocabulary does not have become 0. That costs a draft level some accuracy
    and no exactness: the law it hands up is still the one it samples from.
    """
    known = level.vocab_size
    if tokens and max(tokens) >= known:
        tokens = [token if token < known else 0 for token in tokens]
    return torch.tensor([tokens], dtype=torch.int64, device=getattr(level, "device", None))


class HuggingFaceLevel:
    """A `transformers` causal language model with a cache that rolls back.

    Args:
        model: in eval mode.
        name: for messages and statistics; the model's own name or class otherwise.
        new_cache: makes the empty cache of a request. The default keeps every key and value, also
            of models with sliding-window attention (their mask hides what is out of the window),
            so that any rollback is exact.

    Raises:
        TypeError: not a causal language model.
        ValueError: in training mode, or the cache cannot roll back (contract C7); the message
        names the level.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        new_cache: Callable[[], Cache] | None = None,
    ) -> None:
        self.model = model
        self.name = name or caches.name_of(model)
        caches.require_rollback(model, self.name)
        if model.training:
            raise ValueError(
                f"{self.name}: expected a model in eval mode, given one in training mode; call "
                "model.eval()"
            )
        self.device = model.device
        text_config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        out_features = getattr(head, "out_features", None)
        self._vocab_size = int(out_features or text_config.vocab_size)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self._new_cache = new_cache or caches.full_cache
        caches.require_croppable(self._new_cache(), self.name)
        self._cache: Any = None
        # Positions and causality follow from the cache, so the only arguments a forward pass needs
        # are these.
        self._arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._slices = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation configuration."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.model.config, "eos_token_id", None)
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that lies beside the model's weights, or None. Never asks the network."""
        place = getattr(self.model, "name_or_path", "")
        if not place:
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(place, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError):
            return None

    def prefill(self, tokens: torch.Tensor) -> None:
        self._cache = self._new_cache()
        if tokens.shape[1]:
            self.forward(tokens, 1)

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        if self._slices:
            self._arguments["logits_to_keep"] = keep
        out = self.model(input_ids=tokens, past_key_values=self._cache, **self._arguments)
        logits: torch.Tensor = out.logits
        return logits if logits.shape[1] == keep else logits[:, -keep:]

    def rollback(self, lengths: Sequence[int]) -> None:
        # A negative count removes that many; every 5.x release of transformers understands it so.
        excess = self._cache.get_seq_length() - lengths[0]
        if excess > 0:
            self._cache.crop(-excess)


def load(
    place: str | Path, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> HuggingFaceLevel:
    """A level from a model id or directory. `dtype` defaults to float32 on the CPU, where half
    precision is slow, and to the checkpoint's own elsewhere."""
    from transformers import AutoModelForCausalLM

    where = torch.device(device or "cpu")
    wanted = dtype or (torch.float32 if where.type == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(str(place), dtype=wanted)
    return HuggingFaceLevel(model.to(where).eval())


def as_level(
    thing: Any, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> Level:
    """A chain's element as a level: a Level as it is, a model wrapped, an id or path loaded.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(thing, str | Path):
        return load(thing, dtype, device)
    if isinstance(thing, Level):
        return thing
    if isinstance(thing, torch.nn.Module) and hasattr(thing, "config"):
        return HuggingFaceLevel(thing)
    raise TypeError(
        "expected a Hugging Face causal model, a model id or path, or an object with vocab_size, "
        "prefill, forward and "
        f"rollback, given {type(thing).__name__}"
    )
