"""A draft model of another vocabulary: it draws common tokens, maps them, and the chain keeps the
target's text and law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from evidence import ALPHA, chi_square
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import polyspec_ext as ps
from polyspec_ext.drafters.translated import TranslatedLevel
from polyspec_ext.levels import InputBlock

LETTERS = "abcdefghijklmnop"


def tokenizer_of(words: list[str], byte_level: bool = True, **special: Any) -> Any:
    """A tokenizer whose id i is ``words[i]``, without merges."""
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def model_of(size: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    return hf.LlamaForCausalLM(config).eval()


def level_of(model: Any, words: list[str], **special: Any) -> ps.HuggingFaceLevel:
    level = ps.HuggingFaceLevel(model)
    found = tokenizer_of(words, **special)
    level.tokenizer = lambda: found  # type: ignore[method-assign]
    return level


def permuted(model: Any, order: list[int]) -> Any:
    """The same model, whose id i is ``order[i]`` of the other."""
    made = model_of(len(order))
    made.load_state_dict(model.state_dict())
    with torch.no_grad():
        for module in (made.get_input_embeddings(), made.get_output_embeddings()):
            module.weight.copy_(module.weight[order].clone())
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_in_another_order_is_accepted(temperature: float) -> None:
    target = level_of(model_of(16), list(LETTERS))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    draft = level_of(permuted(target.model, order), [LETTERS[i] for i in order])
    level = TranslatedLevel(draft, target)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
    options: dict[str, Any] = {"seed": 4, "eos_token_id": [], "pad_token_id": 0}
    out = ps.Chain([target, level], [3]).generate(prompts, [20, 9, 14], temperature, **options)
    stats = out.stats.levels[0]
    # Rounding differs with the order, so that a draw near an edge may too.
    assert stats.num_accepted_tokens >= stats.num_draft_tokens - 1 > 20
    if temperature == 0:
        alone = ps.Chain([target]).generate(prompts, [20, 9, 14], temperature, **options)
        assert out.sequences.equal(alone.sequences)


@torch.inference_mode()
def test_the_law_with_vocabularies_that_overlap_in_part() -> None:
    target = level_of(model_of(16), list(LETTERS))
    words = list("zgfexdcbay")  # ten, of which eight are the target's
    level = TranslatedLevel(level_of(model_of(10, 1), words), target)
    assert level.id_map.drawn is not None
    assert level.id_map.drawn.tolist() == [LETTERS.index(x) for x in sorted(set(words) - {*"zxy"})]
    prompt, count, rows = [3, 15, 4], 3, 100  # with letters that the draft does not have
    chain = ps.Chain([target, level], [3])
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, mass in expected.items():
            ids = torch.tensor([[*prompt, *text]])
            row = target.model(ids).logits[0, -1]
            values, tokens = row.topk(3)
            for p, token in zip((values / 1.5).softmax(0).tolist(), tokens.tolist(), strict=True):
                longer[(*text, token)] = mass * p
        expected = longer
    found = dict.fromkeys(expected, 0)
    accepted = 0
    for begin in range(0, 6 * rows, rows):
        seeds = list(range(begin, begin + rows))
        options: dict[str, Any] = {"top_k": 3, "eos_token_id": [], "seed": seeds}
        out = chain.generate([prompt] * rows, count, 1.5, **options)
        accepted += out.stats.levels[0].num_accepted_tokens
        for text in out.sequences.tolist():
            found[tuple(text[3:])] += 1
    assert accepted > 100
    assert chi_square(list(found.values()), list(expected.values())) > ALPHA


def test_rows_do_not_depend_on_each_other_nor_on_the_context() -> None:
    target = level_of(model_of(16), list(LETTERS))
    model = model_of(12, 1)
    model.config.max_position_embeddings = 24  # texts outgrow it
    level = TranslatedLevel(level_of(model, list("lkjihgfedcba")), target)
    chain = ps.Chain([target, level], [4])
    prompts = [[3, 15, 4, 1], [14], [2, 6, 5] * 5]
    options: dict[str, Any] = {"eos_token_id": [], "pad_token_id": 0}
    together = chain.generate(prompts, [30, 8, 20], 0.8, seed=[1, 2, 3], **options)
    for row, (prompt, more, seed) in enumerate(zip(prompts, [30, 8, 20], [1, 2, 3], strict=True)):
        alone = chain.generate(prompt, more, 0.8, seed=seed, **options).sequences[0]
        assert together.sequences[row, : len(alone)].equal(alone)


def test_words_are_compared_by_their_bytes() -> None:
    target = level_of(
        model_of(7), ["\u0120the", "the", "\u010a", "\u00c3\u00a9", "<eos>", "x", "\u0120"],
        eos_token="<eos>",
    )  # fmt: skip
    words = ["<0x0A>", "\u2581the", "\u00e9", "<eos>", "\u2581", "the"]
    draft = level_of(model_of(6), words, byte_level=False, eos_token="<eos>")
    level = TranslatedLevel(draft, target)
    assert level.id_map.drawn is not None
    assert level.id_map.drawn.tolist() == [0, 1, 2, 3, 4, 6]


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
    with pytest.raises(ValueError, match="it can only draft"):
        level.forward(InputBlock(torch.tensor([[1, 2]]), 2))
