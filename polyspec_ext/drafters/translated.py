"""A draft model with another tokenizer than the target's.

It draws among the ids whose text both vocabularies have (token-level intersection: Timor et al.
2025, arXiv 2502.05202), and hands up exactly the distribution that it has drawn from. The text that
it reads is encoded anew where a token has no equal id.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import arguments
from ..levels.base import (
    IdMap,
    InputBlock,
    Level,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    batched,
)
from ..tensors import RowCounts, common_prefix, padded

_WORD = "\u2581"  # stands for a space in SentencePiece
_UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


@dataclass(slots=True)
class _Text:
    """A text in both vocabularies.

    Attributes:
        tokens: ids of the target; translated: those of the draft model for some of the first.
        ends: by number of the target's tokens, how many of `translated` say the same.
        cached: ids in the draft model's cache.
    """

    tokens: list[int] = field(default_factory=list)
    translated: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)


class TranslatedLevel:
    """A level that reads a text in another vocabulary, to draft at the end of a chain.

    Args:
        level: the draft model, with a tokenizer.
        target: a level with the chain's tokenizer.

    Attributes:
        id_map: the ids of the target that it draws: those whose text is a token of both.

    Raises:
        TypeError: no levels.
        ValueError: a level has no tokenizer, or no token is common; names the level.
    """

    max_length = None
    no_trees = "its text is of another vocabulary"

    def __init__(self, level: Any, target: Any) -> None:
        for name, one in (("level", level), ("target", target)):
            if isinstance(one, type) or not hasattr(one, "vocab_size"):
                raise TypeError(f"{name}: expected a level, given {arguments.shown(one)}")
        if not isinstance(level, Level):
            raise TypeError(f"level: expected a level, given {arguments.shown(level)}")
        self.level, self._level = level, batched(level)
        self.name, self.device = self._level.name, self._level.device
        self._tokenizer, self._draft_tokenizer = _tokenizer(target), _tokenizer(level)
        self.vocab_size = int(target.vocab_size)
        drawn, self._entries = _common(
            self._tokenizer, self._draft_tokenizer, self.vocab_size, self._level.vocab_size
        )
        if not drawn:
            raise ValueError(f"{self.name}: expected tokens that the target has too, given none")
        self._translation = dict(zip(drawn, self._entries.tolist(), strict=True))
        self.id_map = IdMap(self.vocab_size, torch.tensor(drawn).to(self.device))
        self._entries = self._entries.to(self.device)
        self._begin = _begin(self._draft_tokenizer)
        can = self._level.capabilities
        self.capabilities = LevelCapabilities(
            batches=can.batches, reads_apart=can.reads_apart, checked=True, id_map=self.id_map
        )
        self._texts: list[_Text] = []

    @property
    def one_at_a_time(self) -> Any:
        """Why the draft model takes no batches, or None."""
        return getattr(self._level, "one_at_a_time", None)

    @property
    def model(self) -> Any:
        """The draft model, for statistics."""
        return getattr(self.level, "model", None)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the ids that it reads, the target's."""
        return self._tokenizer

    def prefill(self, prompts: PromptBatch) -> None:
        rows: list[list[int]] = prompts.tokens.tolist()
        counts = prompts.counts or map(len, rows)
        self._texts = [_Text(row[:count]) for row, count in zip(rows, counts, strict=True)]
        nothing = prompts.tokens.new_zeros(len(rows), 0)
        self._level.prefill(PromptBatch(nothing, capacity=prompts.capacity))

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        for text, row, count in zip(self._texts, tokens.tolist(), counts, strict=True):
            text.tokens += row[:count]

    def forward(self, block: InputBlock) -> LevelOutput:
        tokens, (batch, width) = block.tokens, block.tokens.shape
        if block.keep != 1 or block.parents is not None:
            raise ValueError(f"{self.name}: expected one row of logits, since it can only draft")
        counts = [width] * batch if block.counts is None else list(block.counts)
        self.read(tokens, counts)
        wanted = [
            self._shortened(self._translate(text)) if count else text.cached
            for text, count in zip(self._texts, counts, strict=True)
        ]
        kept = [
            min(common_prefix(text.cached, ids), len(ids) - bool(count))
            for text, ids, count in zip(self._texts, wanted, counts, strict=True)
        ]
        kept = list(self._level.rollback(RowCounts(kept)))
        rest = [
            ids[length:] if count else []
            for ids, length, count in zip(wanted, kept, counts, strict=True)
        ]
        for text, ids, length in zip(self._texts, wanted, kept, strict=True):
            text.cached = ids[:length]
        input_ids, lengths = padded(rest, self.device)
        known = RowCounts(lengths)
        even = known.all(input_ids.shape[1])
        first = None if even else RowCounts([max(length - 1, 0) for length in lengths])
        made = self._level.forward(InputBlock(input_ids, 1, None if even else known, first))
        for text, more in zip(self._texts, rest, strict=True):
            text.cached += more
        return LevelOutput(made.logits.index_select(2, self._entries))

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for text, length in zip(self._texts, lengths, strict=True):
            del text.tokens[length:]
            text.ends = {n: end for n, end in text.ends.items() if n <= length}
        return lengths

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._level.select(rows)

    # ---- translations ----------------------------------------------------------------------------

    def _translate(self, text: _Text) -> list[int]:
        """Bring `translated` to the end of the text: token by token, as far as each has an equal
        id, else by encoding the whole text."""
        known = max(text.ends, default=0)
        more = [self._translation.get(token) for token in text.tokens[known:]]
        if known and None not in more:
            del text.translated[text.ends[known] :]
            for token in more:
                assert token is not None
                text.translated.append(token)
                known += 1
                text.ends[known] = len(text.translated)
        else:
            words = self._tokenizer.decode(text.tokens, skip_special_tokens=False)
            ids = self._draft_tokenizer.encode(words.rstrip(_UNFINISHED), add_special_tokens=False)
            if ids[: len(self._begin)] != self._begin:
                ids = [*self._begin, *ids]
            text.translated = ids or [0]
            text.ends = {len(text.tokens): len(text.translated)}
        return text.translated

    def _shortened(self, ids: list[int]) -> list[int]:
        # From a place that stays for a while, so that the cache does.
        longest = self._level.max_length
        if longest is None or len(ids) <= longest:
            return list(ids)
        step = max(longest // 4, 1)
        return ids[-(-(len(ids) - longest) // step) * step :]


def _tokenizer(level: Any) -> Any:
    find = getattr(level, "tokenizer", None)
    found = find() if callable(find) else None
    if found is None:
        name = getattr(level, "name", type(level).__name__)
        raise ValueError(f"{name}: expected a level with a tokenizer, given one without")
    return found


def _begin(tokenizer: Any) -> list[int]:
    first = list(tokenizer.encode("", add_special_tokens=True))[:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def _common(one: Any, other: Any, size: int, other_size: int) -> tuple[list[int], torch.Tensor]:
    # In increasing order, with the ids of the same bytes there.
    there = {text: token for token, text in _texts(other).items() if token < other_size}
    here = sorted((token, text) for token, text in _texts(one).items() if token < size)
    pairs = [(token, there[text]) for token, text in here if text in there]
    return [token for token, _ in pairs], torch.tensor([token for _, token in pairs])


def _texts(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of each id of a tokenizer; special tokens begin with a byte that no text
    has, so that they equal special tokens alone."""
    special = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab()
    of_bytes = _byte_alphabet()
    whole = "".join(itertools.islice(vocabulary, 4096))
    by_bytes = _WORD not in whole and "\u0120" in whole  # byte-level BPE writes a space so
    texts = {}
    for word, token in vocabulary.items():
        if token in special:
            texts[token] = b"\xff" + word.encode()
        elif by_bytes and all(letter in of_bytes for letter in word):
            texts[token] = bytes(of_bytes[letter] for letter in word)
        elif len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            texts[token] = bytes([int(word[3:5], 16)])
        else:
            texts[token] = word.replace(_WORD, " ").encode()
    return texts


def _byte_alphabet() -> dict[str, int]:
    # Of byte-level BPE: printable bytes are their letters, others the letters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}
