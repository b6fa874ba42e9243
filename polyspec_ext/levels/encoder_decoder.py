"""Levels of encoder-decoder models (as T5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import arguments
from .. import kv_cache as caches
from ..kv_cache import CroppedState
from .base import (
    EncodedInput,
    Hidden,
    InputBlock,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    reading,
)
from .models import ModelLevel, is_encoder_decoder
from .probe import Probe, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EncoderDecoderLevel(ModelLevel):
    """A `transformers` encoder-decoder model with a head, for a single text at a time: the models
    compute positions of the decoder's tokens from a single length for all rows, as T5's relative
    positions do. The encoder reads its input once per text, and the cache of the decoder's
    self-attention grows and rolls back.

    The prompt is the beginning of the decoder's text, usually the model's decoder start token; the
    encoder's input is separate (`PromptBatch.encoded`). Every level of a chain has an encoder.

    Args:
        model: in eval mode.
        name: for messages and statistics; None: the model's name or class.

    Raises:
        TypeError: not an encoder-decoder model.
        ValueError: in training mode, weights on the meta device, logits of a type that the
            operators do not read, or logits after a rollback that differ from a single pass over
            the text; names the level.
    """

    reads_apart = True
    supports_batches = False
    capabilities = LevelCapabilities(reads_apart=True, checked=True)
    reads_encoder_input = True
    no_trees = "an encoder-decoder model places tokens by their slot in the cache"

    def __init__(self, model: PreTrainedModel, *, name: str | None = None) -> None:
        arguments.label("name", name)
        name = name or caches.name_of(model)
        if not is_encoder_decoder(model):
            raise TypeError(
                f"{name}: expected an encoder-decoder model of transformers, given "
                f"{type(model).__name__}"
            )
        super().__init__(model, name)
        self.one_at_a_time = f"{type(model).__name__} has one length for all rows"
        self.cache: Any = None  # of the current text
        self._encoded: Any = None
        self._mask: Tensor | None = None
        self._probe()

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        from transformers import DynamicCache, EncoderDecoderCache

        self._unchanged.require()
        tokens, encoded = prompts.tokens, prompts.encoded
        if encoded is None:
            raise ValueError(f"{self.name}: expected encoder_input_ids for its encoder, given None")
        if tokens.shape[0] != 1 or encoded.tokens.shape[0] != 1:
            raise ValueError(
                f"{self.name}: expected one sequence, given a batch of {tokens.shape[0]}: "
                f"{self.one_at_a_time}"
            )
        if prompts.hidden_layers:
            raise ValueError(f"{self.name}: expected no hidden states to be asked for")
        self._encoded, self._mask = self._encode(encoded)
        # Without a configuration all layers keep tokens that leave a window.
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if tokens.shape[1]:
            self._pass(tokens)
        return None

    def _encode(self, encoded: EncodedInput) -> tuple[Any, Tensor]:
        from transformers.modeling_outputs import BaseModelOutput

        tokens = encoded.tokens.to(self.device)
        mask = torch.ones_like(tokens) if encoded.mask is None else encoded.mask.to(self.device)
        if encoded.states is not None:
            return BaseModelOutput(last_hidden_state=encoded.states.to(self.device)), mask
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if known is not None and int(tokens.max()) >= known:
            raise ValueError(
                f"{self.name}: encoder_input_ids: expected ids below {known}, given "
                f"{int(tokens.max())}"
            )
        encoder = self.model.get_encoder()
        return encoder(input_ids=tokens, attention_mask=mask, return_dict=True), mask

    def _pass(self, tokens: Tensor, cache: bool = True) -> Tensor:
        """Return logits ``[1, T, V]`` after each of `tokens`."""
        logits: Tensor = self.model(
            encoder_outputs=self._encoded,
            attention_mask=self._mask,
            decoder_input_ids=tokens,
            use_cache=cache,
            return_dict=True,
            **{self._cache_name: self.cache if cache else None},
        ).logits
        return logits

    @torch.inference_mode()
    def forward(self, block: InputBlock) -> LevelOutput:
        width, keep = block.tokens.shape[1], block.keep
        begin = width - keep if block.first is None else int(block.first[0])
        return LevelOutput(self._pass(block.tokens)[:, begin : begin + keep])

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        self.forward(reading(tokens, counts))

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        return CroppedState(self.cache.self_attention_cache).rollback(lengths)

    def select(self, rows: Sequence[int]) -> None:
        pass  # the only row

    def _probe(self) -> None:
        """Test whether the model continues cached texts correctly (`levels.probe`)."""

        def whole(ids: Tensor) -> Tensor:
            self.prefill(PromptBatch(ids[:, :0], encoded=EncodedInput(ids)))  # an empty cache
            return self._pass(ids, cache=False)

        probe = Probe(self, lambda *_: None, whole, 12)
        steps = [Step((end,), (2,)) for end in (6, 8, 9, 12)]
        try:
            probe.require(probe.failure(lambda: probe.worst((3,), steps)))
        finally:
            self.cache = self._encoded = self._mask = None
