"""Hugging Face models as levels: they roll back exactly, or are refused; the data type."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_families import model_of
from small_models import PROMPT, make, plain_greedy, rough
from tokenizers import Tokenizer, models, pre_tokenizers

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import HuggingFaceLevel, sources


def test_eos_of_the_generation_configuration() -> None:
    model = make("llama")
    text = plain_greedy(model, PROMPT, 12)
    eos = text[len(PROMPT) + 4]
    model.generation_config.eos_token_id = [eos, 95]
    out = ps.Chain([model, make("llama", 1)], [3]).generate(PROMPT, 12)
    first = text.index(eos, len(PROMPT))
    assert out.sequences.tolist() == [text[: first + 1]]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mamba", "a recurrent state"), ("qwen3_next", "a hybrid of attention and recurrent layers")],
)
def test_states_that_cannot_be_cut_are_refused_by_name(family: str, kind: str) -> None:
    wanted = rf"ForCausalLM keeps {kind}.*cannot be cut.*or a StatefulLevel"
    with pytest.raises(ValueError, match=wanted):
        ps.HuggingFaceLevel(model_of(family))


def test_caches_that_cannot_roll_back_are_refused_by_name() -> None:
    sliding = make("mistral, sliding window")
    for cache, kind in (
        (
            lambda: hf.StaticCache(config=sliding.config, max_cache_len=32),
            "StaticSlidingWindowLayer",
        ),
        (lambda: hf.StaticCache(config=make("llama").config, max_cache_len=32), "StaticLayer"),
        (lambda: hf.DynamicCache(config=sliding.config), "DynamicSlidingWindowLayer"),
    ):
        with pytest.raises(ValueError, match=f"my level: .*{kind}.*cannot be rolled back exactly"):
            HuggingFaceLevel(sliding, name="my level", new_cache=cache)


def test_models_that_are_no_level() -> None:
    with pytest.raises(TypeError, match="language-model head, given LlamaModel"):
        ps.Chain([make("llama").model], [])
    with pytest.raises(ValueError, match="eval mode, given one in training mode"):
        ps.Chain([make("llama").train()], [])
    with pytest.raises(TypeError, match="given Linear"):
        ps.Chain([torch.nn.Linear(2, 2)])


class OwnInputs(hf.LlamaForCausalLM):
    """Calls itself within `generate` with twice the position."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **options: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **options)
        positions = torch.arange(input_ids.shape[1])[None]
        return {**inputs, "position_ids": positions * self.config.step}


@pytest.mark.parametrize("step", [1, 2])
def test_inputs_that_generate_adds(step: int) -> None:
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.5, step=step,
    )  # fmt: skip
    model = OwnInputs(config).eval()
    if step == 1:
        assert ps.HuggingFaceLevel(model).supports_batches
    else:
        with pytest.raises(ValueError, match=r"OwnInputs\.prepare_inputs_for_generation adds what"):
            ps.HuggingFaceLevel(model)


def test_context_too_long() -> None:
    chain = ps.Chain([make("gpt2"), make("gpt2", 1)], [2])
    with pytest.raises(
        ValueError,
        match=(
            "expected at most 128 tokens in its context, given a prompt of 6 and max_new_tokens=123"
        ),
    ):
        chain.generate(PROMPT, 123)
    assert chain.generate(PROMPT, 122, eos_token_id=[]).sequences.shape == (1, 128)


def save_with_tokenizer(place, words, vocab, seed, layers=1) -> Path:
    make("llama", layers, seed, vocab).save_pretrained(place)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(
        place
    )
    return place


WORDS = [f"w{i}" for i in range(60)]


def test_other_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "target", WORDS, 64, 0)
    other = save_with_tokenizer(tmp_path / "other", [*WORDS[:10], *reversed(WORDS[10:])], 64, 1)
    text = (
        r"tokenizer of other: expected that of the target target, given one that differs in 50 of "
        r"64 ids \(first: id 10 is 'w59' and not 'w10'\)"
    )
    with pytest.raises(ValueError, match=text):
        ps.Chain([target, other], [4])
    ps.Chain([target, other], [2], check_vocabulary=False)


@pytest.mark.parametrize(
    "sizes", [(64, 60), (64, 72), (60, 64), (64, 72, 60), (72, 64, 96)], ids=str
)
def test_padded_vocabularies(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    places = [
        save_with_tokenizer(tmp_path / str(i), WORDS, size, i) for i, size in enumerate(sizes)
    ]
    chain = ps.Chain(places, [3, 2][-(len(sizes) - 1) :])
    target = make("llama", 1, 0, sizes[0])
    prompt = [5, 17, sizes[0] - 1]
    assert chain.generate(prompt, 16, eos_token_id=[]).sequences.tolist() == [
        plain_greedy(target, prompt, 16)
    ]
    for seed in range(8):
        out = chain.generate(prompt, 16, temperature=1.5, seed=seed, eos_token_id=[])
        assert int(out.sequences.max()) < sizes[0]


def test_wider_draft_of_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"expected at most the 96 ids of the target .*given 128, and no tokenizers",
    ):
        ps.Chain([make("llama"), make("llama", 1, vocab=128)], [2])


def test_a_smaller_draft_never_reads_ids_that_it_does_not_know() -> None:
    for sync in (True, False):
        target, middle, drafter = (
            HuggingFaceLevel(make("llama", layers, seed, vocab))
            for layers, seed, vocab in ((2, 0, 128), (1, 1, 112), (1, 2, 96))
        )
        read: dict[int, list[torch.Tensor]] = {112: [], 96: []}
        for level in (middle, drafter):
            level.model.get_input_embeddings().register_forward_pre_hook(
                lambda _, given, own=read[level.vocab_size]: own.append(given[0].detach().clone())
            )
        chain = ps.Chain(
            [target, middle, drafter], [4, 2], check_vocabulary=False, sync_each_step=sync
        )
        out = chain.generate([5, 127, 100], 24, temperature=3.0, seed=1, eos_token_id=[])
        assert int(out.sequences[0, 3:].max()) >= 112
        for vocab, own in read.items():
            assert own
            assert max(int(ids.max()) for ids in own) < vocab


CHECKPOINT, DRAFT = str(tiny.path("target")), str(tiny.path("drafter"))  # in bfloat16


def dtype_of(place: str, **options: object) -> torch.dtype:
    dtype: torch.dtype = ps.Chain([place], **options).levels[0].model.dtype
    return dtype


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_target_is_bfloat16_where_it_is_packed_and_the_processor_multiplies_it(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "multiplies_bfloat16", lambda: multiplies)
    wanted = torch.bfloat16 if multiplies else torch.float32
    assert dtype_of(CHECKPOINT) == wanted
    assert dtype_of(CHECKPOINT, pack=True) == wanted
    assert str(wanted).removeprefix("torch.") in repr(ps.Chain([CHECKPOINT]))
    # Other weights round bfloat16 by the number of tokens in a pass.
    assert dtype_of(CHECKPOINT, pack=False) == torch.float32
    # A named dtype is kept.
    assert dtype_of(CHECKPOINT, dtype="float32") == torch.float32
    assert dtype_of(CHECKPOINT, dtype="auto", pack=False) == torch.bfloat16


def test_its_text_is_that_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "multiplies_bfloat16", lambda: True)
    plain, chain = (ps.Chain([CHECKPOINT, *below]) for below in ((), (DRAFT,)))
    prompts = [[5, 6, 7], [8, 9]]
    texts = [one.generate(prompts, max_new_tokens=60).sequences for one in (plain, chain)]
    assert torch.equal(*texts)


def test_a_model_whose_bits_depend_on_the_width_of_a_pass_is_float32(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "multiplies_bfloat16", lambda: True)
    make("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert dtype_of(str(tmp_path)) == torch.float32


def device_map(model: Any, offloaded: set[str]) -> dict[str, str]:
    """A device map of every block by name; the CPU, or the disk."""
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)]
    return {name: "disk" if name in offloaded else "cpu" for name in names}


@pytest.mark.parametrize(
    "offloaded",
    [set(), {"model.layers.1"}, {"model.embed_tokens", "model.layers.0", "lm_head"}],
    ids=["all on one device", "a layer on disk", "embeddings and head on disk"],
)
def test_a_spread_target(offloaded: set[str], tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    target, draft = make("llama"), rough(make("llama"))
    expected = {length: plain_greedy(target, PROMPT[:length], 16) for length in (6, 2)}
    spread = accelerate.dispatch_model(
        target,
        device_map(target, offloaded),
        main_device="cpu",
        offload_dir=str(tmp_path),
        force_hooks=True,
    )
    if "model.embed_tokens" in offloaded:
        assert spread.device.type == "meta"  # where its first weights are, between passes
    level = HuggingFaceLevel(spread)
    assert level.device == torch.device("cpu")
    assert level.supports_batches
    chain = ps.Chain([level, draft], [3])
    assert chain.generate(PROMPT, 16, eos_token_id=[]).sequences.tolist() == [expected[6]]
    both = chain.generate([PROMPT, PROMPT[:2]], 16, eos_token_id=[], pad_token_id=0).sequences
    assert both.tolist() == [expected[6], expected[2] + [0] * 4]
    assert level.cache.layers[0].keys.device == level.cache.lengths.device
