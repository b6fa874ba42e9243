"""Encoder-decoder models (T5 and its kin) as levels: the encoder reads its input once per text, and
the decoder's self-attention is what grows and rolls back.

One text at a time, since such models place the decoder's tokens by one length for all rows, as T5's
relative positions do.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kv_cache import factory as caches
from . import checkpoint
from .base import EncodedInput, Hidden, PromptBatch
from .probe import relative_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Difference of logits behind a cache from those of one pass, relative to their spread (`probe`).
_TOLERANCE, _TOLERANCE_HALF = 0.02, 0.1


def is_encoder_decoder(model: Any) -> bool:
    """Whether it is a `transformers` model with an encoder that reads tokens for its decoder."""
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not getattr(config, "is_encoder_decoder", False):
        return False
    parameters = inspect.signature(model.forward).parameters
    return {"input_ids", "decoder_input_ids", "encoder_outputs"} <= set(parameters)


class EncoderDecoderLevel:
    """A `transformers` encoder-decoder model with a head, one text at a time.

    Its prompt is what the decoder begins with, usually the model's decoder start token; what the
    encoder reads comes beside it (`PromptBatch.encoded`). Every level of a chain encodes it with
    its own encoder.

    Args:
        model: in eval mode.
        name: for messages and statistics; the model's own name or class otherwise.

    Raises:
        TypeError: no such model.
        ValueError: in training mode, weights on the meta device, logits of a type that the
            operators do not read, or its logits behind a cache that was rolled back are not those
            of one pass over the text; names the level.
    """

    supports_batches = False
    reads_apart = True
    reads_encoder_input = True
    no_trees = "an encoder-decoder model places tokens by their slot in the cache"
    max_length: int | None = None

    def __init__(self, model: PreTrainedModel, *, name: str | None = None) -> None:
        self.model, self.name = model, name or caches.name_of(model)
        if not is_encoder_decoder(model):
            raise TypeError(
                f"{self.name}: expected an encoder-decoder model of transformers, given "
                f"{type(model).__name__}"
            )
        checkpoint.require_eval(model, self.name)
        self.device = caches.device_of(model)
        checkpoint.require_logits(model, self.device, self.name)
        head = model.get_output_embeddings()
        self._vocab_size = int(getattr(head, "out_features", None) or model.config.vocab_size)
        longest = getattr(model.config, "max_position_embeddings", None)
        self.max_length = longest if longest is not None and longest > 0 else None
        self.one_at_a_time = f"{type(model).__name__} has one length for all rows"
        self._cache: Any = None
        self._encoded: Any = None
        self._mask: torch.Tensor | None = None
        self._probe()

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: made anew over a copy of its model."""
        return _made, (type(self), self.model, self.name)

    def __repr__(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"EncoderDecoderLevel({self.name}: {type(self.model).__name__} {dtype})"

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def cache(self) -> Any:
        """The cache of the text in progress."""
        return self._cache

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation configuration."""
        return checkpoint.eos_token_ids(self.model)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that lies beside the model's weights, or None."""
        return checkpoint.tokenizer(self.model)

    def prefill(self, tokens: torch.Tensor) -> None:
        """Refused: the encoder's input is missing (`prefill_batch`)."""
        self.prefill_batch(PromptBatch(tokens))

    @torch.inference_mode()
    def prefill_batch(self, prompts: PromptBatch) -> Hidden | None:
        """See `BatchedLevel.prefill`.

        Raises:
            ValueError: several rows, hidden states, or nothing for the encoder or more than it
                knows; names the level.
        """
        from transformers import DynamicCache, EncoderDecoderCache

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
        # Without a configuration no layer forgets what leaves a window.
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if tokens.shape[1]:
            self._pass(tokens)
        return None

    def _encode(self, encoded: EncodedInput) -> tuple[Any, torch.Tensor]:
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

    def _pass(self, tokens: torch.Tensor, cache: bool = True) -> torch.Tensor:
        """Logits ``[1, T, V]`` behind each of `tokens`."""
        logits: torch.Tensor = self.model(
            encoder_outputs=self._encoded,
            attention_mask=self._mask,
            decoder_input_ids=tokens,
            past_key_values=self._cache if cache else None,
            use_cache=cache,
            return_dict=True,
        ).logits
        return logits

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append `tokens`, ``[1, T]``, and return the logits behind the last `keep` of them,
        ``[1, keep, vocab_size]``."""
        return self._pass(tokens)[:, -keep:]

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[0]`` tokens of the decoder's text."""
        decoder = self._cache.self_attention_cache
        excess = decoder.get_seq_length() - lengths[0]
        if excess > 0:
            decoder.crop(-excess)  # a negative count removes that many

    def select(self, rows: Sequence[int]) -> None:
        """Nothing moves: there is one row."""

    @torch.inference_mode()
    def _probe(self) -> None:
        """See `levels.probe`: a text in passes that are rolled back, and in one pass."""
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", self.vocab_size)
        known = min(known, self.vocab_size)
        text = torch.arange(1, 13)[None] * 7919 % known
        wrong = (text + 1) % known
        try:
            self.prefill_batch(PromptBatch(text[:, :3].to(self.device), encoded=EncodedInput(text)))
            given = []
            for begin, end in ((3, 6), (6, 8), (8, 9), (9, 12)):
                fed = torch.cat([text[:, begin:end], wrong[:, end : end + 2]], 1)
                given.append(self.forward(fed.to(self.device), fed.shape[1])[0, : end - begin])
                self.rollback([end])
            whole = self._pass(text.to(self.device), cache=False)[0]
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever a model may raise
            found = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        else:
            worst = max(map(relative_difference, torch.cat(given), whole[3:]))
            half = whole.dtype != torch.float32
            if worst <= (_TOLERANCE_HALF if half else _TOLERANCE):
                return
            found = f"a relative difference of {worst:.2g}"
        finally:
            self._cache = self._encoded = self._mask = None
        raise ValueError(
            f"{self.name}: expected passes behind a cache that was rolled back to give the logits "
            f"of one pass over the whole text; {type(self.model).__name__} "
            f"({self.model.config.model_type}) does not: {found}"
        )


def _made(kind: type[EncoderDecoderLevel], model: Any, name: str) -> EncoderDecoderLevel:
    """A level that was copied or pickled."""
    return kind(model, name=name)
