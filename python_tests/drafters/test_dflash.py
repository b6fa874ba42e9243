"""Drafters of blocks in every published format, against a plain forward pass, and in chains."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_heads import Reference, Variant, config_of, save, target_of, variants, weights_of
from small_models import plain_greedy, rough
from told import draft_input, drawn_from, prompts, rounds_of, told
from transformers import cache_utils

import polyspec_ext as ps

PLAIN = variants()[0]
SPARK = next(v for v in variants() if v.name == "dspark")
PROMPTS = [[3, 9, 27, 17], [5, 6, 8], [11]]


def compared(head: Any, reference: Reference, block: Any, b: int, text: Any, states: Any) -> float:
    """Return the largest difference of a draft's logits, relative to the largest of them."""
    count = head.config.num_drafts if block.counts is None else int(block.counts[b])
    tokens = block.tokens[b, :count].tolist()
    rows = reference.draft(text, states, tokens)
    found = drawn_from(head, block, b)[: len(tokens)]
    assert found.isneginf().equal(rows.isneginf())
    finite = ~rows.isneginf()
    assert tokens == rows.argmax(-1).tolist()
    return float((found - rows)[finite].abs().max() / rows[finite].abs().max())


@pytest.mark.parametrize(
    ("v", "pack"),
    [*((v, False) for v in variants()), (PLAIN, True), (SPARK, True)],
    ids=lambda x: getattr(x, "name", x and "packed"),
)
def test_drafts_are_those_of_the_plain_forward_pass(v: Variant, pack: bool, tmp_path: Path) -> None:
    """After a prompt, and with tokens accepted, rejected or read anew; two rows."""
    target, weights = target_of(v), weights_of(v)
    reference = Reference(v, weights, target)
    owner = ps.Level(target, pack=True) if pack else target
    head = ps.DFlash.from_pretrained(save(v, weights, tmp_path), owner)
    assert head.capabilities.hidden_layers == tuple(number + 1 for number in v.target_layers)
    for texts, states, hidden in rounds_of(head, v.vocab, v.hidden):
        passes = head.num_forward_passes
        block = head.draft(draft_input(texts, [v.drafts + 2, v.drafts + 2], hidden))
        assert head.num_forward_passes == passes + 1
        assert block.counts.tolist() == [v.drafts] * 2
        for b in range(2):
            assert compared(head, reference, block, b, texts[b], states[b]) < 1e-4
    # A part of a block has the logits of the whole block.
    block = head.draft(draft_input(texts, [2, 1], hidden))
    assert block.counts is None
    rows = reference.draft(texts[0], states[0], block.tokens[0].tolist())
    found = drawn_from(head, block, 0)
    assert (found - rows)[~rows.isneginf()].abs().max() < 1e-4 * rows.max()


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Compare with transformers' class of the assistant, from 5.24 on, over one block."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    v = next(v for v in variants() if v.kind == "assistant")
    target, weights = target_of(v), weights_of(v)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window", "block_size",
            "mask_token_id", "target_layer_ids", "layer_types")  # fmt: skip
    given = {key: config_of(v)[key] for key in keys}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = assistant.MuseGlimmerAssistantConfig(**given, rope_parameters=rope)
    config._attn_implementation = "eager"
    theirs = assistant.MuseGlimmerAssistantModel(config).eval()
    theirs.load_state_dict(weights)
    head = ps.DFlash.from_pretrained(save(v, weights, tmp_path), target)
    head.prefill(prompts(1))
    text, layers = [3, 9, 27, 17, 11, 25, 31, 8], (2, 4)
    states = torch.randn(7, 2 * v.hidden, generator=torch.Generator().manual_seed(1))
    block = head.draft(draft_input([text], [v.drafts], told(layers, [states], [0])))
    with torch.no_grad():
        noise = target.get_input_embeddings()(torch.tensor([[text[-1], *[v.mask] * (v.block - 1)]]))
        cache = cache_utils.DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(states))
        out = theirs(noise, states[None], cache=cache).last_hidden_state
        wanted = target.lm_head(out[0, 1:]).double()
    found = drawn_from(head, block, 0)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("v", [PLAIN, SPARK], ids=lambda v: v.name)
def test_below_a_model_of_another_width(v: Variant, tmp_path: Path) -> None:
    """Requests that join and leave, and a prefix that was read before."""
    target = target_of(v)
    head = ps.DFlash.from_pretrained(save(v, weights_of(v), tmp_path), target)
    narrow = target_of(dataclasses.replace(v, hidden=8))
    server = ps.Server(ps.Chain([target, narrow, head], [4, 3]), 2)
    texts = {server.add(p, 10 + b, eos_token_id=[]): list(p) for b, p in enumerate(PROMPTS)}
    while server.running or server.waiting:
        for event in server.step():
            texts[event.request] += event.tokens
    for b, (prompt, text) in enumerate(zip(PROMPTS, texts.values(), strict=True)):
        assert text == plain_greedy(target, prompt, 10 + b)
    chain = ps.Chain([target, rough(target), head], [6, 2])
    text = list(PROMPTS[0])
    for _ in range(3):  # each goes on with the text of the one before
        wanted = plain_greedy(target, text, 8)
        text += chain.stream(text, 8, eos_token_id=[], cache_prompt=True)
        assert text == wanted
        text.append(5)


CHANGES: list[tuple[Variant, dict[str, Any], str]] = [
    (PLAIN, {"speculators_model_type": "dflash2"}, "model_type: expected 'dflash' or 'dspark'"),
    (PLAIN, {"dflash_config": {"mask_token_id": 3}}, r"target_layer_ids: expected some layers in"),
    (PLAIN, {"conv_kernel_size": 2}, "conv_kernel_size: expected no such key, which is not"),
    (PLAIN, {"num_target_layers": 36}, "num_target_layers: expected the target's 6, given 36"),
    (PLAIN, {"block_size": 1}, "block_size: expected at least 2 tokens"),
    (PLAIN, {"model_type": "gemma4_text"}, "model_type: expected one of qwen3, llama, muse"),
    (PLAIN, {"layer_types": ["mamba"] * 2}, "layer_types: expected 'full_attention' or"),
    (PLAIN, {"use_sliding_window": True}, "layer_types: expected the kind of each of 2 layers"),
    (PLAIN, {"hidden_size": None}, "hidden_size: expected a number >= 1, given None"),
    (PLAIN, {"vocab_size": 41}, "vocab_size: expected the target's, 40, given 41"),
    (SPARK, {"mask_token_id": 40}, "mask_token_id: expected an id below 40, given 40"),
    (SPARK, {"markov_head_type": "gated"}, "markov_head_type: expected vanilla, given 'gated'"),
    (SPARK, {"projector_type": "domino"}, "projector_type: expected dflash, given 'domino'"),
    (SPARK, {"markov_rank": 5}, r"markov_w1\.weight: expected shape \[40, 5\], given \[40, 4\]"),
    (SPARK, {"markov_rank": 0}, "markov_head.*: expected no tensor of this name"),
    (SPARK, {"aux_hidden_state_layer_ids": [7]}, r"some layers in \[0, 6\] of the target"),
    (SPARK, {"target_hidden_size": 20}, "hidden states of 20 numbers, given one with 16"),
    (SPARK, {"draft_vocab_size": 40}, r"lm_head\.weight: expected shape \[40, 16\]"),
]


@pytest.mark.parametrize(("v", "changes", "words"), CHANGES, ids=lambda x: str(x)[:40])
def test_what_does_not_fit_is_named(v, changes, words, tmp_path) -> None:
    place = save(v, weights_of(v), tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        ps.DFlash.from_pretrained(place, target_of(v))


def test_words(tmp_path: Path) -> None:
    for v in (PLAIN, SPARK):
        target = target_of(v)
        place = save(v, weights_of(v), tmp_path / v.kind)
        for word in (place, f"dflash:{place}"):
            chain = ps.Chain([target, word], [3])
            assert isinstance(chain.engine.parts[-1], ps.DFlash)
            out = chain.generate(PROMPTS[0], 6, eos_token_id=[])
            assert out.sequences[0].tolist() == plain_greedy(target, PROMPTS[0], 6)
    with pytest.raises(ValueError, match=r"the DFlash head '.*' below a Hugging Face model"):
        ps.Chain([place])
