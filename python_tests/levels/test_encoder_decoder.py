"""Cascades of encoder-decoder models: text and law of the target, and `model.generate`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import polyspec_ext as ps
from polyspec_ext.levels import EncodedInput, InputBlock, PromptBatch
from polyspec_ext.levels.encoder_decoder import EncoderDecoderLevel

V = 24
SOURCE = [3, 9, 14, 5, 20, 7, 1]
START = [0]


def t5(width: int, layers: int, seed: int, vocab: int = V) -> Any:
    """A random T5, gated as FLAN-T5 is."""
    torch.manual_seed(seed)
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": layers, "num_heads": 4}
    more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "dropout_rate": 0.0}
    config = hf.T5Config(vocab_size=vocab, decoder_start_token_id=0, **sizes, **more)
    model = hf.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                # Positions differ, so that texts do not end in one token for ever.
                p.normal_(0, 6.0 if "relative" in name else 0.6)
        model.shared.weight.normal_(0, 0.3)
    return model


def cascade() -> list[Any]:
    """Return three sizes; the smaller are cuts of the largest, as near as trained models."""
    xxl = t5(32, 3, 1)
    models = [xxl]
    for seed, layers in ((1, 3), (2, 2)):
        model = copy.deepcopy(xxl)
        model.decoder.block = model.decoder.block[:layers]
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn(p.shape, generator=random)
        models.append(model)
    models[2].config.num_decoder_layers = 2
    return models


@torch.inference_mode()
def plain(model: Any, text: list[int], source: list[int] = SOURCE) -> torch.Tensor:
    ids, decoder = torch.tensor([source]), torch.tensor([text])
    out = model(input_ids=ids, decoder_input_ids=decoder, use_cache=False)
    return out.logits[0, -1]


def greedy(model: Any, count: int, source: list[int] = SOURCE) -> list[int]:
    text = list(START)
    for _ in range(count):
        text.append(int(plain(model, text, source).argmax()))
    return text


@pytest.mark.parametrize("window", [[], [3], [4, 2], [5, 0]], ids=str)
def test_greedy_text_is_the_targets(window: list[int]) -> None:
    models = cascade()[: len(window) + 1]
    chain = ps.Chain(models, window)
    assert all(isinstance(level, EncoderDecoderLevel) for level in chain.levels)
    for source in (SOURCE, SOURCE[::-1][:4], SOURCE):
        text = greedy(models[0], 24, source)
        out = chain.generate([START], 24, eos_token_id=[], encoder_input_ids=source)
        assert out.sequences.tolist() == [text]
        assert len(set(text)) > 2
    if window:
        stats = out.stats.levels[0]
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_what_a_tokenizer_gives_is_encoded_without_its_padding(kind: Any) -> None:
    models = cascade()[:2]
    chain = ps.Chain(models, [3])
    wanted = greedy(models[0], 8)
    bits = [0, *[1] * len(SOURCE), 0]
    for given in (
        {"input_ids": kind(SOURCE)},
        hf.BatchEncoding({"input_ids": kind([SOURCE])}),
        hf.BatchEncoding({"input_ids": kind([[5, *SOURCE, 0]]), "attention_mask": kind([bits])}),
    ):
        options: dict[str, Any] = {"eos_token_id": [], "encoder_input_ids": given}
        assert chain.generate([START], 8, **options).sequences.tolist() == [wanted]
        batch = chain.batch([START], 8, **options)
        batch.complete()
        assert batch.rows[0].tokens == wanted


def test_generate_gives_the_same_text() -> None:
    models = cascade()
    chain = ps.Chain(models, [4, 2])
    source = torch.tensor([SOURCE])
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    wanted = models[0].generate(source, **options)
    encoders: list[int] = []
    for i, model in enumerate(models):
        model.get_encoder().register_forward_pre_hook(lambda *_, i=i: encoders.append(i))
    got = models[0].generate(
        source, custom_generate=ps.custom_generate, chain=chain, encoder_input_ids=source, **options
    )
    assert sorted(encoders) == [0, 1, 2]  # the target's states are taken as they are
    assert got.tolist() == wanted.tolist() == [greedy(models[0], 20)]
    for given in (hf.BatchEncoding({"input_ids": source}), [SOURCE], SOURCE):
        own: dict[str, Any] = {"chain": chain, "encoder_input_ids": given, **options}
        again = models[0].generate(source, custom_generate=ps.custom_generate, **own)
        assert again.tolist() == got.tolist()
    with pytest.raises(
        ValueError, match=r"encoder_input_ids: expected the ids .* \[1, 7\], .*None"
    ):
        models[0].generate(source, custom_generate=ps.custom_generate, chain=chain, **options)


def test_a_masked_source() -> None:
    models = cascade()[:2]
    chain = ps.Chain(models, [3])
    source = torch.tensor([[*SOURCE, 0, 0]])
    mask = torch.tensor([[1] * len(SOURCE) + [0, 0]])
    own = {"custom_generate": ps.custom_generate, "chain": chain, "encoder_input_ids": source}
    options = {"attention_mask": mask, "max_new_tokens": 16, "eos_token_id": None}
    got = models[0].generate(source, **options, **own)
    assert got.tolist() == [greedy(models[0], 16)]


def test_rollback_at_the_level() -> None:
    model = cascade()[0]
    level = ps.Level(model, name="xxl")
    assert not level.capabilities.batches
    assert not level.capabilities.trees
    encoded = EncodedInput(torch.tensor([SOURCE]))
    text = [0, 4, 8, 15, 16, 23]
    level.prefill(PromptBatch(torch.tensor([text[:3]]), encoded=encoded))
    level.read(torch.tensor([[9, 9, 9]]), [3])
    level.rollback([2])
    rows = level.forward(InputBlock(torch.tensor([text[2:]]), 2)).logits[0]
    for row, n in zip(rows, (5, 6), strict=True):
        torch.testing.assert_close(row, plain(model, text[:n]), rtol=1e-4, atol=1e-4)
    again = copy.deepcopy(level)
    assert again.name == "xxl"
    assert again.cache is None


def test_a_directory(tmp_path: Path) -> None:
    models = cascade()[:2]
    for name, model in zip(("large", "small"), models, strict=True):
        model.save_pretrained(tmp_path / name)
    chain = ps.Chain([tmp_path / "large", tmp_path / "small"], [3])
    out = chain.generate([START], 12, eos_token_id=[], encoder_input_ids=SOURCE)
    assert out.sequences.tolist() == [greedy(models[0], 12)]


def test_refusals() -> None:
    models = cascade()
    chain = ps.Chain(models[:2], [2])
    for given, error, message in (
        (None, ValueError, "expected what its encoder reads"),
        ([[1], [2]], ValueError, "expected one text, given 2"),
        ([V], ValueError, f"expected ids below {V}, given {V}"),
        ("text", TypeError, "expected"),
        ({"ids": SOURCE}, TypeError, "expected"),
        ({"input_ids": "text"}, TypeError, "expected"),
        ({"input_ids": [SOURCE, SOURCE]}, ValueError, "expected"),
        ({"input_ids": SOURCE, "attention_mask": [0] * 7}, ValueError, "expected"),
        ([], ValueError, "expected"),
    ):
        with pytest.raises(error, match=f"encoder_input_ids: {message}"):
            chain.generate([START], 4, encoder_input_ids=given)
    with pytest.raises(
        ValueError, match=r"expected one prompt, given 2; .*one length for all rows"
    ):
        chain.generate([START, START], 4, encoder_input_ids=SOURCE)
    config = hf.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2)
    alone = hf.GPT2LMHeadModel(config).eval()
    with pytest.raises(ValueError, match=r"encoder_input_ids: expected None with .*decoder-only"):
        ps.Chain([alone]).generate([START], 4, encoder_input_ids=SOURCE)
    with pytest.raises(TypeError, match="expected an encoder-decoder model of transformers"):
        EncoderDecoderLevel(alone)
    with pytest.raises(ValueError, match="eval mode"):
        ps.Level(cascade()[0].train())

    class Deaf(hf.T5ForConditionalGeneration):
        """Forgets its cache."""

        def forward(self, past_key_values: Any = None, **options: Any) -> Any:
            return super().forward(**options)

    deaf = Deaf(models[0].config).eval()
    deaf.load_state_dict(models[0].state_dict())
    with pytest.raises(
        (TypeError, ValueError), match=r"one pass over the whole text|expected an enc"
    ):
        EncoderDecoderLevel(deaf)
