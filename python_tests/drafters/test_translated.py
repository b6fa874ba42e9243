"""Models of another vocabulary: the target's text and law."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers as hf
from lettered import tokenizer_of
from small_models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import polyspec_ext as ps
from polyspec_ext.drafters.translated import SPECIAL, TranslatedLevel, Vocabulary
from polyspec_ext.levels import InputBlock, PromptBatch, RowCounts

LETTERS = "abcdefghijklmnop"


def model_of(size: int, seed: int = 0) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    return llama(seed, 2, size, **sizes, **heads, tie_word_embeddings=False)


def level_of(model: Any, words: list[str], **special: Any) -> ps.HuggingFaceLevel:
    level = ps.HuggingFaceLevel(model)
    found = tokenizer_of(words, **special)
    level.tokenizer = lambda: found
    return level


def permuted(model: Any, order: list[int]) -> Any:
    """Return the same model with id i for ``order[i]`` of the other."""
    made = model_of(len(order))
    made.load_state_dict(model.state_dict())
    with torch.no_grad():
        for module in (made.get_input_embeddings(), made.get_output_embeddings()):
            module.weight.copy_(module.weight[order].clone())
    return made


def same_in_another_order(target: ps.HuggingFaceLevel) -> ps.HuggingFaceLevel:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    return level_of(permuted(target.model, order), [LETTERS[i] for i in order])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("below", [[], ["suffix"]], ids=["lowest", "middle"])
def test_the_same_model_in_another_order_is_accepted(temperature: float, below: list[str]) -> None:
    target = level_of(model_of(16), list(LETTERS))
    level = TranslatedLevel(same_in_another_order(target), target)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
    options: dict[str, Any] = {"seed": 4, "eos_token_id": [], "pad_token_id": 0}
    chain = ps.Chain([target, level, *below], [3, 2][: 1 + len(below)])
    out = chain.generate(prompts, [20, 9, 14], temperature, **options)
    stats = out.stats.levels[0]
    # Rounding differs with the order, so that a draw near an edge may too.
    assert stats.num_accepted_tokens >= stats.num_draft_tokens - 1 > 15
    if temperature == 0:
        alone = ps.Chain([target]).generate(prompts, [20, 9, 14], temperature, **options)
        assert out.sequences.equal(alone.sequences)


@pytest.mark.parametrize("kinds", ["token", "token lookup"])
def test_rows_do_not_depend_on_each_other_nor_on_the_context(kinds: str) -> None:
    target = level_of(model_of(16), list(LETTERS))
    model = model_of(12, 1)
    model.config.max_position_embeddings = 24  # texts outgrow it
    levels = [
        TranslatedLevel(level_of(model, list("lkjihgfedcba")), target)
        if kind == "token"
        else "suffix"
        for kind in kinds.split()
    ]
    chain = ps.Chain([target, *levels], [4, 2][: len(levels)])
    prompts = [[3, 15, 4, 1], [14], [2, 6, 5] * 5]
    options: dict[str, Any] = {"eos_token_id": [], "pad_token_id": 0}
    together = chain.generate(prompts, [30, 8, 20], 0.8, seed=[1, 2, 3], **options)
    for row, (prompt, more, seed) in enumerate(zip(prompts, [30, 8, 20], [1, 2, 3], strict=True)):
        alone = chain.generate(prompt, more, 0.8, seed=seed, **options).sequences[0]
        assert together.sequences[row, : len(alone)].equal(alone)


def test_rows_of_one_pass_are_those_of_many() -> None:
    target = level_of(model_of(4), ["a", "b", "c", "ab"])
    made = [TranslatedLevel(level_of(model_of(3, 1), ["c", "b", "a"]), target) for _ in range(2)]
    texts = torch.tensor([[0, 3, 1, 3, 2, 3], [1, 2, 0, 0, 0, 0]])
    counts = [6, 3]
    for level in made:
        level.prefill(PromptBatch(texts[:, :1], None, 8))
    at_once = made[0].forward(
        InputBlock(texts[:, 1:], 4, RowCounts([n - 1 for n in counts]), RowCounts([1, 0]))
    )
    for row, begin in enumerate([1, 0]):
        for n in range(counts[row] - 1):
            alone = [int(row == 0), int(row == 1)]
            block = InputBlock(texts[:, n + 1 : n + 2], 1, RowCounts(alone), RowCounts([0, 0]))
            logits = made[1].forward(block).logits[row, 0]
            if n >= begin:
                torch.testing.assert_close(at_once.logits[row, n - begin], logits)
    # Rolled back text is forgotten, also where it was encoded anew.
    for level in made:
        level.rollback(RowCounts([2, 1]))
    made[1].prefill(PromptBatch(texts[:, :2], [2, 1], 8))
    found = [level.forward(InputBlock(texts[:, 2:3], 1)).logits for level in made]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("end", ["<eos>", "</s>"])
def test_words_are_compared_by_their_bytes(end: str) -> None:
    """Ends of a text are one token, and an added word is text as it is."""
    target = level_of(
        model_of(8), ["\u0120the", "the", "\u010a", "\u00c3\u00a9", "<eos>", "x", "\u0120"],
        eos_token="<eos>",
    )  # fmt: skip
    assert target.tokenizer().add_tokens(["\u00e9"]) == 1
    words = ["<0x0A>", "\u2581the", "\u00e9", end, "\u2581", "the"]
    draft = level_of(model_of(6), words, byte_level=False, eos_token=end)
    level = TranslatedLevel(draft, target)
    assert level.id_map.drawn.tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_a_folder_by_its_word(tmp_path: Path) -> None:
    for name, size, words in (("target", 16, LETTERS), ("draft", 12, "lkjihgfedcba")):
        model_of(size).save_pretrained(tmp_path / name)
        tokenizer_of(list(words)).save_pretrained(tmp_path / name)
    places = [str(tmp_path / "target"), f"translated:{tmp_path / 'draft'}"]
    options: dict[str, Any] = {"eos_token_id": []}
    out = ps.Chain(places, [3]).generate([3, 1], 12, **options)
    assert out.sequences.equal(ps.Chain(places[:1]).generate([3, 1], 12, **options).sequences)
    assert out.stats.levels[0].num_draft_tokens > 0
    with pytest.raises(ValueError, match="below a target, given none"):
        ps.Chain([places[1]])


def test_refusals() -> None:
    target = level_of(model_of(16), list(LETTERS))
    with pytest.raises(ValueError, match="expected a level with a tokenizer"):
        TranslatedLevel(ps.HuggingFaceLevel(model_of(4)), target)
    with pytest.raises(ValueError, match="expected tokens that the target has too"):
        TranslatedLevel(level_of(model_of(2), ["y", "z"]), target)
    with pytest.raises(TypeError, match="target: expected a level"):
        TranslatedLevel(target, "target")
    level = TranslatedLevel(level_of(model_of(3), ["a", "b", "z"]), target)
    with pytest.raises(ValueError, match="expected a chain of tokens"):
        level.forward(InputBlock(torch.tensor([[1, 2]]), 2, parents=torch.tensor([[-1, -1]])))
    with pytest.raises(ValueError, match="expected a target that draws all"):
        ps.Chain([level, target], [2], check_vocabulary=False)


WRITTEN = "the cat and the hat were naïve; 日本語 \U0001f642\U0001f643 the caterpillar then sang"
LEARNT = [WRITTEN, "the then them there", "cat caterpillar hat and were sang", "日本語 naïve"]


def trained(kind: str, size: int) -> Any:
    if kind == "characters":
        found = tokenizer_of(sorted({*"".join(LEARNT)}), False, eos_token="</s>")
        return with_added(found)
    by_bytes = kind == "bytes"
    made = Tokenizer(models.BPE())
    if by_bytes:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet = []
    made.train_from_iterator(
        LEARNT, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learnt = json.loads(made.to_str())["model"]
    if by_bytes:
        made.decoder = decoders.ByteLevel()
    else:
        # SentencePiece's: characters that are no piece are bytes.
        pieces = [word for word in learnt["vocab"] if word.isascii() or "\u2581" in word]
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        merges = [tuple(pair) for pair in learnt["merges"] if "".join(pair) in pieces]
        merges = [pair for pair in merges if set(pair) <= set(pieces)]
        vocabulary = {word: i for i, word in enumerate(words)}
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )  # fmt: skip
    end = "<end>" if by_bytes else "</s>"
    return with_added(hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end))


def with_added(tokenizer: Any) -> Any:
    tokenizer.add_tokens(["sang"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return tokenizer


class Writer(toy.ToyLevel):
    """A level that writes one text by the longest words; a target, by its tokenizer's."""

    def __init__(self, tokenizer: Any, text: str, target: bool = False) -> None:
        super().__init__(1, 0)
        self._tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self.words = Vocabulary(tokenizer, self.vocab_size)
        self.script = self.words.encode(text) if target else None
        pieces = text.split("<turn>")
        self.text = (SPECIAL + b"<turn>").join(piece.encode() for piece in pieces)

    def tokenizer(self) -> Any:
        return self._tokenizer

    def row(self, prefix: Any) -> torch.Tensor:
        logits, ends = torch.zeros(self.vocab_size), self._tokenizer.eos_token_id
        said = b"".join(self.words.bytes_of[token] for token in prefix)
        rest = self.text[len(said.removeprefix(b" ")) :]
        if self.script is not None:
            best = [*self.script, ends][min(len(prefix), len(self.script))]
        else:
            fits = [word for word in self.words.ids if word and rest.startswith(word)]
            best = self.words.ids[max(fits, key=len)] if fits else ends
        logits[best] = 9.0
        return logits


@pytest.mark.parametrize("target", [("bytes", 330), ("pieces", 120)], ids=str)
@pytest.mark.parametrize("draft", [("bytes", 300), ("bytes", 360), ("pieces", 90)], ids=str)
def test_a_text_in_another_tokenizers_words(target: Any, draft: Any) -> None:
    text = WRITTEN + "<turn>" + WRITTEN
    above = Writer(trained(*target), text, target=True)
    below = TranslatedLevel(Writer(trained(*draft), text), above)
    prompt = above.words.encode(text)[:3]
    options: dict[str, Any] = {"eos_token_id": above.tokenizer().eos_token_id}
    alone = ps.Chain([above]).generate(prompt, 200, **options)
    out = ps.Chain([above, below], [4]).generate(prompt, 200, **options)
    assert out.sequences.equal(alone.sequences)
    stats = out.stats.levels[0]
    assert stats.num_accepted_tokens >= stats.num_draft_tokens / 4 > 5  # the common tokens
