"""Toy levels with tokenizers of letters, and levels translated between them."""

from typing import Any

import toy
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyspec_ext.drafters.translated import TranslatedLevel

ABC = ["a", "b", "c"]
# The one has c and d; the other joins a and b wherever the text is encoded anew.
ADBC = ["d", "c", "b", "a"]
BAZ = ["b", "a", "ab", "z"]


def tokenizer_of(words, byte_level=True, *merges, **special) -> Any:
    """Return a tokenizer with ``words[i]`` as id i."""
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


class Lettered(toy.ToyLevel):
    """A toy level with a tokenizer with ``words[i]`` as id i."""

    def __init__(self, words: list[str], seed: int, *merges: tuple[str, str]) -> None:
        super().__init__(len(words), seed)
        self._tokenizer = tokenizer_of(words, True, *merges)

    def tokenizer(self) -> Any:
        return self._tokenizer


def lettered(words: list[str], seed: int = 2) -> TranslatedLevel:
    """Return a level of `words` below a target of `ABC`."""
    merges = [("a", "b")] if "ab" in words else []
    return TranslatedLevel(Lettered(words, seed, *merges), Lettered(ABC, 1))
