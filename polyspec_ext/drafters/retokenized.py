"""A draft model with another tokenizer, whose text is tokenised by the target's (string-level
drafts: Timor et al. 2025, arXiv 2502.05202)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..levels import ELEMENTS, Options
from ..levels.base import PromptBatch
from ..tensors import RowCounts, on_device
from .base import DraftBlock, DrafterCapabilities, DraftInput
from .proposals import cut_at_eos
from .translated import SPECIAL, Text, TranslatedLevel, unfinished

_WINDOW = 16  # tokens of the context that are tokenised with a draft, for its first ones


class RetokenizedDrafter:
    """Writes the likeliest text of a model, token by token, and proposes the target's tokens of
    that text. A proposal is deterministic, at every temperature. It may have tokens that the model
    cannot draw as one (`TranslatedLevel`), and is as long as the model's draft at most.

    Args:
        level: the model, with a tokenizer.
        target: a level with the chain's tokenizer.

    Raises:
        TypeError, ValueError: as of `TranslatedLevel`.
    """

    max_length = None

    def __init__(self, level: Any, target: Any) -> None:
        self._reader = TranslatedLevel(level, target)
        self.level, self.device = level, self._reader.device
        self.name = f"{self._reader.name}, retokenized"
        self.vocab_size = self._reader.vocab_size
        self.num_forward_passes = 0
        self._above = {below: token for token, below in self._reader.common.items()}

    @property
    def capabilities(self) -> DrafterCapabilities:
        can = self._reader.capabilities
        return DrafterCapabilities(can.batches, reads_apart=can.reads_apart)

    @property
    def one_at_a_time(self) -> Any:
        """Why the model takes no batches, or None."""
        return self._reader.one_at_a_time

    def prefill(self, prompts: PromptBatch) -> None:
        self._reader.prefill(prompts)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self._reader.read(tokens, counts)

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        return self._reader.rollback(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self._reader.select(rows)

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft as `BatchedDrafter.draft`."""
        assert inputs.eos is not None
        self.read(inputs.tokens, list(inputs.counts))
        lengths, texts = list(inputs.lengths), self._reader.texts
        written = self._write(lengths)
        size = min(self.vocab_size, inputs.vocab_size)
        proposals = []
        for text, ids, length, eos in zip(texts, written, lengths, inputs.eos, strict=True):
            tokens = self._tokens(text, ids)[:length] if length else []
            most = next((n for n, token in enumerate(tokens) if token >= size), length)
            tokens = cut_at_eos(tokens[:most], eos)
            if length:
                # The last token of a text comes again with the next draft.
                text.tokens += tokens
                text.cut(len(text.tokens) - 1)
            proposals.append(tokens)
        counts = [len(tokens) for tokens in proposals]
        width = max(1, *counts)
        rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in proposals]
        return DraftBlock(
            on_device(rows, torch.int64, self.device), on_device(counts, torch.int64, self.device)
        )

    def _write(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the ids of the model that it writes behind each text: so many, or up to a special
        token."""
        reader = self._reader
        contexts = [
            reader.translate(text) if length else None
            for text, length in zip(reader.texts, lengths, strict=True)
        ]
        written: list[list[int]] = [[] for _ in lengths]
        while any(context is not None for context in contexts):
            logits = reader.logits_behind(contexts, [[] for _ in lengths], 1)
            self.num_forward_passes += 1
            for b, token in enumerate(logits[:, 0].argmax(1).tolist()):
                context = contexts[b]
                if context is None:
                    continue
                written[b].append(token)
                context.append(token)
                if len(written[b]) == lengths[b] or not reader.model_vocabulary.is_text(token):
                    contexts[b] = None
        return written

    def _tokens(self, text: Text, ids: Sequence[int]) -> list[int]:
        """Return the target's tokens of what the model has written behind a text: those that
        continue its bytes exactly."""
        model, target = self._reader.model_vocabulary, self._reader.vocabulary
        new = b"".join(model.bytes_of[token] for token in ids if model.is_text(token))
        if not new.startswith(text.lacks):
            return []
        before = self._window(text)
        whole = before + new[len(text.lacks) :]
        end = len(whole) - len(unfinished([whole]))
        try:
            words = whole[:end].decode()
        except UnicodeDecodeError as error:
            words, end = whole[: error.start].decode(), error.start
        tokens = target.encode(words)
        pieces = [target.bytes_of.get(token, SPECIAL) for token in tokens]
        if not b"".join(pieces).endswith(whole[:end]):  # it writes the text in another way
            return []
        continued: list[int] = []
        # SentencePiece begins with a space that is none of the text.
        left = len(before) + sum(map(len, pieces)) - end
        for token, piece in zip(tokens, pieces, strict=True):
            if left <= 0:
                continued.append(token)
            elif left < len(piece):  # the context ends within this token
                continued = self._spelled(piece[left:])
                if not continued:
                    return []
            left -= len(piece)
        if end == len(whole) and not model.is_text(ids[-1]) and ids[-1] in self._above:
            continued.append(self._above[ids[-1]])
        return continued

    def _window(self, text: Text) -> bytes:
        # Bytes behind the last special token, from the beginning of a character on.
        target = self._reader.vocabulary
        last = itertools.takewhile(target.is_text, reversed(text.tokens[-_WINDOW:]))
        window = b"".join(target.bytes_of[token] for token in reversed(list(last)))
        return window.lstrip(bytes(range(0x80, 0xC0)))

    def _spelled(self, rest: bytes) -> list[int]:
        """Return tokens of these bytes, the longest first; none where some byte is no token."""
        ids, tokens = self._reader.vocabulary.ids, []
        while rest:
            end = next((n for n in range(len(rest), 0, -1) if rest[:n] in ids), 0)
            if not end:
                return []
            tokens.append(ids[rest[:end]])
            rest = rest[end:]
        return tokens


def load(thing: str, options: Options) -> TranslatedLevel | RetokenizedDrafter:
    """Return what "translated:MODEL" or "retokenized:MODEL" stands for.

    Raises:
        TypeError, ValueError: as of `TranslatedLevel`; no target above it.
    """
    if not options.above:
        raise ValueError(f"{options.name}: expected {thing!r} below a target, given none above it")
    word, _, source = thing.partition(":")
    level, target = ELEMENTS.resolve(source, options), options.above[0]
    try:
        if word == "translated":
            return TranslatedLevel(level, target)
        return RetokenizedDrafter(level, target)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.name}: {error}") from error
