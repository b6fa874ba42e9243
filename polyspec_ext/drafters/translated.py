"""A model with another tokenizer than the target's, as a level of a chain.

The level draws and verifies ids with equal text in both vocabularies (token-level intersection:
Timor et al. 2025, arXiv 2502.05202), with the distribution renormalised over them. Its input text
is encoded anew if a token has no equal id.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import arguments
from ..levels.base import InputBlock, Level, LevelCapabilities, LevelOutput, PromptBatch, batched
from ..tensors import IdMap, RowCounts, common_prefix, padded

SPECIAL = b"\xff"  # first byte of special tokens; invalid in UTF-8 text
_WORD = "\u2581"  # a space in SentencePiece
_UNFINISHED = "\ufffd"  # decoded from an incomplete character
_LONGEST = 4  # maximum bytes of a character, and so tokens of an incomplete character


@dataclass(slots=True)
class Text:
    """A row's text in both vocabularies.

    Attributes:
        tokens: ids of the target.
        ids: the model's ids of the first `known` tokens; invalid if `known` is 0.
        cached: ids in the model's cache.
    """

    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    known: int = 0
    cached: list[int] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        if length < self.known:
            self.known = 0


class Vocabulary:
    """The bytes of each id below `size` of a tokenizer.

    Attributes:
        bytes_of: bytes by id; for special tokens `SPECIAL` and their word.
        ids: id by bytes.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = {
            token: text for token, text in sorted(_texts(tokenizer).items()) if token < size
        }
        self.ids = {text: token for token, text in self.bytes_of.items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class TranslatedLevel:
    """A level below a target that reads and draws the target's ids by another tokenizer's model.

    Its distribution after a text is the model's, restricted to the common ids. Other draft tokens
    have probability 0.

    Args:
        level: the model, with a tokenizer. Windows above it are at most a quarter of its longest
            context.
        target: a level with the chain's tokenizer.

    Attributes:
        id_map: the target's ids that the level draws: tokens with equal text in both vocabularies,
            and the end of a text.
        common: the model's id by the target's id.
        vocabulary, model_vocabulary: the target's and the model's.
        texts: texts of the current rows.

    Raises:
        TypeError: an argument is no level.
        ValueError: a level has no tokenizer, or no token is common; names the level.
    """

    max_length = None
    no_trees = "its text is of another vocabulary"

    def __init__(self, level: Any, target: Any) -> None:
        for name, value in (("level", level), ("target", target)):
            if isinstance(value, type) or not hasattr(value, "vocab_size"):
                raise TypeError(f"{name}: expected a level, given {arguments.shown(value)}")
        if not isinstance(level, Level):
            raise TypeError(f"level: expected a level, given {arguments.shown(level)}")
        self.level, self._level = level, batched(level)
        self.name, self.device = self._level.name, self._level.device
        self.one_at_a_time = getattr(self._level, "one_at_a_time", None)
        self.vocab_size = int(target.vocab_size)
        self.vocabulary = Vocabulary(_tokenizer(target), self.vocab_size)
        self.model_vocabulary = Vocabulary(_tokenizer(level), self._level.vocab_size)
        self.common = _common(self.vocabulary, self.model_vocabulary)
        if not self.common:
            raise ValueError(f"{self.name}: expected tokens that the target has too, given none")
        self._pieces = {token: [below] for token, below in self.common.items()}
        self.id_map = IdMap(self.vocab_size, torch.tensor(list(self.common)).to(self.device))
        self._entries = torch.tensor(list(self.common.values())).to(self.device)
        self._begin = _begin(self.model_vocabulary.tokenizer)
        can = self._level.capabilities
        self.capabilities = LevelCapabilities(
            batches=can.batches, reads_apart=can.reads_apart, checked=True, id_map=self.id_map
        )
        self.texts: list[Text] = []

    @property
    def model(self) -> Any:
        """The wrapped level's model, for statistics."""
        return getattr(self.level, "model", None)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the level's ids, the target's."""
        return self.vocabulary.tokenizer

    def prefill(self, prompts: PromptBatch) -> None:
        rows: list[list[int]] = prompts.tokens.tolist()
        counts = prompts.counts or map(len, rows)
        self.texts = [Text(row[:count]) for row, count in zip(rows, counts, strict=True)]
        nothing = prompts.tokens.new_zeros(len(rows), 0)
        self._level.prefill(PromptBatch(nothing, capacity=prompts.capacity))

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        for text, row, count in zip(self.texts, tokens.tolist(), counts, strict=True):
            text.tokens += row[:count]

    def forward(self, block: InputBlock) -> LevelOutput:
        if block.parents is not None:
            raise ValueError(f"{self.name}: expected a chain of tokens: {self.no_trees}")
        tokens, (batch, width), keep = block.tokens, block.tokens.shape, block.keep
        counts = [width] * batch if block.counts is None else list(block.counts)
        first = [width - keep] * batch if block.first is None else list(block.first)
        contexts: list[list[int] | None] = []
        pieces = []
        # The first row of logits is after the context, encoded independently of draft tokens:
        # the distribution of a draft token may not depend on its value.
        for text, row, count, begin in zip(self.texts, tokens.tolist(), counts, first, strict=True):
            text.tokens += row[: min(begin + 1, count)]
            contexts.append(self.translate(text) if count else None)
            text.tokens += row[begin + 1 : count]
            pieces.append([self._piece(token) for token in row[begin + 1 : count]])
        logits = self.logits_behind(contexts, pieces, keep)
        return LevelOutput(logits.index_select(2, self._entries))

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for text, length in zip(self.texts, lengths, strict=True):
            text.cut(length)
        return lengths

    def keep_path(self, begin: RowCounts, path: Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self._level.select(rows)

    # ---- in the model's ids ----------------------------------------------------------------------

    def logits_behind(
        self,
        contexts: Sequence[list[int] | None],
        pieces: Sequence[Sequence[Sequence[int]]],
        keep: int,
    ) -> Tensor:
        """Read texts in the model's ids, and return logits.

        Args:
            contexts: by row, ids as `translate` returns them; None: an inactive row.
            pieces: by row, the ids of each token after the context.

        Returns:
            ``[B, keep, Vd]``: logits j of a row are after its context and j pieces. The logits
            after the last piece repeat if a row has fewer.
        """
        new_texts, cached, offsets = [], [], []
        for text, context, added in zip(self.texts, contexts, pieces, strict=True):
            ends = list(itertools.accumulate(map(len, added), initial=0))
            ids = text.cached if context is None else self._shortened(context)
            new_texts.append([*ids, *itertools.chain.from_iterable(added)])
            most = len(ids) - (context is not None)
            cached.append(min(common_prefix(text.cached, new_texts[-1]), most))
            offsets.append([*ends, *[ends[-1]] * keep][:keep])
        cached = list(self._level.rollback(RowCounts(cached)))
        rest = [
            [] if context is None else ids[length:]
            for context, ids, length in zip(contexts, new_texts, cached, strict=True)
        ]
        for text, ids, length in zip(self.texts, new_texts, cached, strict=True):
            text.cached = ids[:length]
        input_ids, lengths = padded(rest, self.device)
        rows = 1 + max(map(max, offsets))
        first = [
            max(len(ids) - 1 - sum(map(len, added)), 0)
            for ids, added in zip(rest, pieces, strict=True)
        ]
        even = set(lengths) == {input_ids.shape[1]} and set(first) == {lengths[0] - rows}
        by_row = () if even else (RowCounts(lengths), RowCounts(first))
        logits = self._level.forward(InputBlock(input_ids, rows, *by_row)).logits
        for text, more_ids in zip(self.texts, rest, strict=True):
            text.cached += more_ids
        if all(row == list(range(rows)) for row in offsets):
            return logits
        index = torch.tensor(offsets, device=logits.device)[:, :, None]
        return logits.gather(1, index.expand(-1, -1, logits.shape[2]))

    def translate(self, text: Text) -> list[int]:
        """Return the model's ids of a text, at least 1: known ids, then by token equal ids; if a
        token has no equal id, the whole text is encoded."""
        mapped = [self.common.get(token) for token in text.tokens[text.known :]]
        if not text.known or None in mapped:
            self._encode(text)
            return list(text.ids)
        return [*text.ids, *(token for token in mapped if token is not None)]

    def _encode(self, text: Text) -> None:
        words = self.vocabulary.tokenizer.decode(text.tokens, skip_special_tokens=False)
        bytes_of = self.vocabulary.bytes_of
        rest = unfinished(bytes_of.get(token, b"") for token in text.tokens[-_LONGEST:])
        begun = [self.model_vocabulary.ids.get(bytes([byte])) for byte in rest]
        ids = self.model_vocabulary.encode(words.rstrip(_UNFINISHED) if rest else words)
        if ids[: len(self._begin)] != self._begin:
            ids = [*self._begin, *ids]
        text.known = 0
        if None not in begun:
            ids += [token for token in begun if token is not None]
            text.known = len(text.tokens)
        text.ids = ids or [0]

    def _piece(self, token: int) -> list[int]:
        if token not in self._pieces:  # an id that the level does not draw
            word = self.vocabulary.bytes_of.get(token, b"").removeprefix(SPECIAL)
            ids = self.model_vocabulary.encode(word.decode(errors="ignore"))
            self._pieces[token] = ids or [0]
        return self._pieces[token]

    def _shortened(self, ids: list[int]) -> list[int]:
        # Cut at multiples of a quarter of the context, so that the cache stays valid for a while.
        # A quarter is left for draft tokens: the cut may not depend on them.
        longest = self._level.max_length
        if longest is None or len(ids) <= longest - longest // 4:
            return ids
        step = max(longest // 4, 1)
        return ids[-(-(len(ids) - longest + step) // step) * step :]


def unfinished(pieces: Iterable[bytes]) -> bytes:
    """Return the bytes of an incomplete character at the end of a text."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(b"".join(pieces))
    return bytes(decoder.getstate()[0])


def _tokenizer(level: Any) -> Any:
    find = getattr(level, "tokenizer", None)
    tokenizer = find() if callable(find) else None
    if tokenizer is None:
        name = getattr(level, "name", type(level).__name__)
        raise ValueError(f"{name}: expected a level with a tokenizer, given one without")
    return tokenizer


def _begin(tokenizer: Any) -> list[int]:
    first = list(tokenizer.encode("", add_special_tokens=True))[:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def _common(target: Vocabulary, model: Vocabulary) -> dict[int, int]:
    # In increasing order. The end tokens are common even if their words differ.
    pairs = {token: model.ids[text] for token, text in target.bytes_of.items() if text in model.ids}
    ends = target.tokenizer.eos_token_id, model.tokenizer.eos_token_id
    known = ends[0] in target.bytes_of and ends[1] in model.bytes_of
    if known and ends[0] not in pairs and ends[1] not in pairs.values():
        pairs[ends[0]] = ends[1]
    return dict(sorted(pairs.items()))


def _texts(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of each id of a tokenizer; for special tokens `SPECIAL` and their word, so
    that they equal only special tokens. The words of added tokens are plain text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token in added if added[token].special)}
    vocabulary = tokenizer.get_vocab()
    of_bytes = _byte_alphabet()
    whole = "".join(itertools.islice(vocabulary, 4096))
    by_bytes = _WORD not in whole and "\u0120" in whole  # byte-level BPE writes a space so
    texts = {}
    for word, token in vocabulary.items():
        if token in special:
            texts[token] = SPECIAL + word.encode()
        elif token in added:
            texts[token] = word.encode()
        elif by_bytes and all(letter in of_bytes for letter in word):
            texts[token] = bytes(of_bytes[letter] for letter in word)
        elif len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            texts[token] = bytes([int(word[3:5], 16)])
        else:
            texts[token] = word.replace(_WORD, " ").encode()
    return texts


def _byte_alphabet() -> dict[str, int]:
    # Byte-level BPE: printable bytes map to their characters, others to characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(unprintable)}
