"""Text in pieces is the text of the whole, for every kind of tokenizer, at a linear cost."""

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polyspec_ext.chat import StopStrings, TextDecoder, texts_after

TEXTS = [
    "It 's fine . We can n't go on , can we ? They 've come !",
    "the ' quoted ' word and I 'm sure you 're not un believ able .",
    "naïve café 東京は大きい 😀😀 ok �� x",
]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = ("byte-level", "unigram", "fallback", "wordpiece", "suffix", "words")


def trained(kind: str) -> Tokenizer:
    options: dict[str, Any] = {"show_progress": False, "special_tokens": ["<unk>", "<s>"]}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **options)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **options)
    elif kind == "fallback":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)])
        options["special_tokens"] += BYTES
        trainer = trainers.BpeTrainer(vocab_size=330, limit_alphabet=30, **options)
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, **options)
    elif kind == "suffix":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.BPEDecoder()
        trainer = trainers.BpeTrainer(vocab_size=150, end_of_word_suffix="</w>", **options)
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=150, **options)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if kind == "fallback":  # bytes are ordinary tokens, of which a trainer knows nothing
        told = json.loads(tokenizer.to_str())
        told["added_tokens"] = [one for one in told["added_tokens"] if one["content"] not in BYTES]
        tokenizer = Tokenizer.from_str(json.dumps(told))
    return tokenizer


class Counting(PreTrainedTokenizerFast):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        self.decoded += len(token_ids)
        return super().decode(token_ids, *args, **options)


def tokenizer_of(kind: str, tidies: bool) -> Counting:
    tokenizer = trained(kind)
    tokenizer.add_special_tokens([AddedToken("<reserved>", special=True)])
    return Counting(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        clean_up_tokenization_spaces=tidies,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=tidies,
    )


def streamed(tokenizer: Any, tokens: list[int]) -> str:
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.add(token) for token in tokens]
    return "".join([*pieces, decoder.rest()])


@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text_of_the_whole(kind: str, tidies: bool) -> None:
    tokenizer = tokenizer_of(kind, tidies)
    drawn = random.Random(0)
    texts = [list(tokenizer(text * 5).input_ids) for text in TEXTS]
    words = [token for text in texts for token in text]
    for turn in range(300):
        # Of texts, of anything, and runs of one token.
        pool = (words, range(len(tokenizer)), [drawn.randrange(len(tokenizer))])[turn % 3]
        texts.append([drawn.choice(pool) for _ in range(drawn.randrange(1, 120))])
    for tokens in texts:
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert streamed(tokenizer, tokens) == whole, tokens


def first_stop(text: str, stops: list[str]) -> tuple[int, int]:
    """Return begin and end of the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return len(text), len(text)


@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_end_in_front_of_a_stop_string(kind: str, tidies: bool) -> None:
    tokenizer = tokenizer_of(kind, tidies)
    drawn = random.Random(1)
    words = [token for text in TEXTS for token in tokenizer(text).input_ids]
    met = 0
    for turn in range(150):
        pool = words if turn % 2 else range(len(tokenizer))
        tokens = [drawn.choice(pool) for _ in range(drawn.randrange(1, 60))]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        stops = []
        for _ in range(drawn.randrange(4)):
            begin = drawn.randrange(len(whole) + 1)
            stop = whole[begin : begin + drawn.randrange(1, 9)] + drawn.choice(["", "", "!", "é"])
            stops += [stop] if stop else []
        reader = StopStrings(tokenizer, stops)
        begin, end = first_stop(whole, stops)
        shown, settled, decoder = "", "", TextDecoder(tokenizer)
        for token in tokens:
            settled += decoder.add(token)
            shown += reader.add(token)
            if reader.stopped is None:  # nothing waits that cannot be a stop string
                assert len(settled) - len(shown) < max(map(len, stops), default=1)
                assert reader.num_tokens == len(decoder.tokens)
        shown += reader.rest() + reader.rest()
        assert shown == reader.text == whole[:begin]
        assert (reader.stopped is None) == (begin == end)
        if reader.stopped is not None:
            met += 1
            assert reader.stopped == whole[begin:end]
            count, through = reader.num_tokens, whole[:end]
            assert reader.tokens == tokens[:count]
            fewer = tokenizer.decode(tokens[: max(count - 1, 0)], skip_special_tokens=True)
            assert tokenizer.decode(tokens[:count], skip_special_tokens=True).startswith(through)
            assert not count or not fewer.startswith(through)
            assert reader.add(tokens[0]) == reader.rest() == ""
    assert met > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_is_a_stop_string(kind: str) -> None:
    """After text that waits: of a stop string, of tidying and of unfinished characters."""
    tokenizer = tokenizer_of(kind, True)
    special = tokenizer.convert_tokens_to_ids("<reserved>")
    words = tokenizer(TEXTS[0] + TEXTS[2]).input_ids
    for count in range(len(words)):
        before = words[:count]
        reader = StopStrings(tokenizer, ["<s>", "no such text", "<reserved>"])
        shown = "".join(map(reader.add, [*before, special, *words]))
        whole = tokenizer.decode(before, skip_special_tokens=True)
        assert shown + reader.rest() == reader.text == whole
        assert (reader.stopped, reader.tokens) == ("<reserved>", [*before, special])
    whole = tokenizer.decode(words, skip_special_tokens=True)
    reader = StopStrings(tokenizer, [whole[-2:], "<reserved>"])
    assert "".join(map(reader.add, [*words, special])) == whole[:-2]
    assert reader.stopped == whole[-2:]
    with pytest.raises(ValueError, match="stop: expected text or a special token alone, given"):
        StopStrings(tokenizer, ["<reserved>\n"])


def test_stop_strings_are_not_empty() -> None:
    with pytest.raises(ValueError, match=r"^stop: expected strings of at least 1 character"):
        StopStrings(None, ["a", ""])


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_costs_so_many_tokens_for_each(kind: str) -> None:
    tokenizer = tokenizer_of(kind, True)
    special = tokenizer.convert_tokens_to_ids("<reserved>")
    text = tokenizer(" ".join(TEXTS[:2])).input_ids * 60
    unfinished = tokenizer("😀").input_ids[:1] * len(text)
    for tokens in (text, [special] * len(text), unfinished):
        tokenizer.decoded = 0
        streamed(tokenizer, tokens)
        assert tokenizer.decoded < 30 * len(tokens)


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "wordpiece"])
def test_text_comes_with_its_tokens(kind: str) -> None:
    """Hold back at most the text that tidying may still change."""
    tokenizer = tokenizer_of(kind, kind != "byte-level")
    decoder, shown = TextDecoder(tokenizer), ""
    for token in tokenizer(TEXTS[0]).input_ids:
        shown += decoder.add(token)
        assert decoder.text.startswith(shown)
        assert len(decoder.text) - len(shown) <= (0 if kind == "byte-level" else 4)


def test_unknown_tidying_loses_nothing() -> None:
    """A user's tokenizer may change text already shown: the text goes on from the common part."""

    class Capitals:
        def convert_ids_to_tokens(self, token: int) -> str:
            return chr(token)

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            text = "".join(map(chr, tokens))
            return text.upper() if text.endswith("!") else text

    assert streamed(Capitals(), [ord(one) for one in "Hey! you"]) == "HeyEY!ey! you"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_their_context_join_to_the_text(kind: str) -> None:
    """Whole characters, with special tokens; alone, some tokens lose a space."""
    tokenizer = tokenizer_of(kind, False)
    drawn = random.Random(2)
    texts = [tokenizer(text).input_ids for text in TEXTS[:2]]
    words = [token for text in texts for token in text]
    words.append(tokenizer.convert_tokens_to_ids("<reserved>"))
    texts += [[drawn.choice(words) for _ in range(30)] for _ in range(40)]
    alone = 0
    for tokens in texts:
        spans = ((tokens[:count], tokens[count]) for count in range(len(tokens)))
        pieces = [texts_after(tokenizer, before, [token, token]) for before, token in spans]
        assert all(piece[0] == piece[1] for piece in pieces)
        whole = tokenizer.decode(tokens)
        assert "".join(piece[0] for piece in pieces) == whole
        alone += "".join(tokenizer.decode([token]) for token in tokens) == whole
    assert (alone == len(texts)) == (kind == "byte-level")
    parts = [*words[:2], *tokenizer("😀😀").input_ids]
    for count in range(2, len(parts)):
        assert all(texts_after(tokenizer, parts[:count], parts[count:]))
