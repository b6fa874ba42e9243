"""The drop-in (`custom_generate=ps.custom_generate`) against `model.generate` itself."""

import copy
from typing import Any

import pytest
import small_models
import torch
from calls import function_of_prefix
from transformers import (
    LlamaForCausalLM,
    MaxLengthCriteria,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.generation import logits_process as lp
from transformers.generation.streamers import BaseStreamer

import polyspec_ext as ps
from polyspec_ext.integrations import transformers as generation
from polyspec_ext.integrations.transformers import require_supported

V, EOS, PAD = 24, 1, 0


def llama(seed: int, vocab: int = V, scale: float = 0.6) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": scale}
    ends = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
    return small_models.llama(seed, 2, vocab, **sizes, **heads, **ends)


def near(model: LlamaForCausalLM, seed: int, vocab: int = V, noise: float = 0.1) -> Any:
    """A draft for `model`: its weights with noise, of a vocabulary as small as wanted."""
    width = model.get_output_embeddings().out_features
    draft = llama(seed, width)
    with torch.no_grad():
        for own, theirs in zip(draft.parameters(), model.parameters(), strict=True):
            own.copy_(theirs + noise * theirs.std() * torch.randn(theirs.shape))
    draft.resize_token_embeddings(vocab, mean_resizing=False)
    return draft.eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(1)


@pytest.fixture(scope="module")
def chain(target: LlamaForCausalLM) -> ps.Chain:
    return ps.Chain([target, near(target, 2), near(target, 3, V - 4, 0.2)], [3, 2])


PROMPTS = torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11], [0, 0, 12, 13, 14]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
RAGGED: dict[str, Any] = {"input_ids": PROMPTS, "attention_mask": MASK, "pad_token_id": PAD}
ONE: dict[str, Any] = {"input_ids": PROMPTS[1:2], "pad_token_id": PAD}


def generate(chain: ps.Chain, **arguments: Any) -> Any:
    model = chain.levels[0].model
    return model.generate(custom_generate=ps.custom_generate, chain=chain, **arguments)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare outputs with scores: the same tokens up to a tie, and close scores."""
    width = theirs.sequences.shape[1] - len(theirs.scores)
    assert ours.sequences.dtype == theirs.sequences.dtype
    exact = torch.equal(ours.sequences, theirs.sequences)
    tie = False
    for row, (own, plain) in enumerate(zip(ours.sequences, theirs.sequences, strict=True)):
        for step in range(len(theirs.scores)):
            at = width + step
            if at >= len(own) or own[at] != plain[at]:
                best = theirs.scores[step][row].topk(2).values
                assert best[0] - best[1] < 1e-4, f"row {row}, token {step}: no tie"
                tie = True
                break
            if step >= ours.requests[row].num_new_tokens:
                continue
            for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
                assert torch.allclose(mine[step][row], other[step][row], atol=1e-3)
    assert exact or tie


DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@function_of_prefix
def allowed(row: int, sent: torch.Tensor) -> list[int]:
    """Depends on the row and, for its parity, on the text."""
    return [t for t in range(2, V) if (t + row + len(sent)) % 3]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.8},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[8], [4, 1], [16, 9]]},
    "bias": {"sequence_bias": {(3,): 4.0, (22,): 2.0, (5, 6): -9.0}},
    "several eos": {"eos_token_id": [9, 14, 15]},
    "min new": {"eos_token_id": [9, 14, 15], "min_new_tokens": 6},
    "min length": {"eos_token_id": [9, 14, 15], "min_length": 9},
    "forced eos": {"eos_token_id": EOS, "forced_eos_token_id": EOS},
    "forced eos that no draft has": {"eos_token_id": V - 1, "forced_eos_token_id": V - 1},
    "suppress": {"suppress_tokens": [3, 7, 9], "begin_suppress_tokens": [11, 12]},
    "allowed": {"prefix_allowed_tokens_fn": allowed},
    "decay": {"eos_token_id": EOS, "exponential_decay_length_penalty": (3, 1.4)},
    "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "max length": {"max_new_tokens": None, "max_length": 12},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_is_generate_itself(name: str, chain: ps.Chain, target: LlamaForCausalLM) -> None:
    options = {**RAGGED, **DETAILS, "do_sample": False, "max_new_tokens": 14, **OPTIONS[name]}
    theirs = target.generate(**options)
    ours = generate(chain, **options)
    assert_same(ours, theirs)
    assert isinstance(ours, generation.GenerateOutput)
    assert ours.stats.levels[0].num_accepted_tokens > 3
    if name not in ("plain", "normalised"):
        rest = {key: value for key, value in options.items() if key not in OPTIONS[name]}
        without = target.generate(**{"max_new_tokens": 14, **rest})
        assert not torch.equal(without.sequences, theirs.sequences), "the option does nothing here"


# ---- sampling ------------------------------------------------------------------------------------


def test_scores_are_those_of_the_distribution(chain: ps.Chain, target: LlamaForCausalLM) -> None:
    options = {
        **{**RAGGED, **DETAILS, "do_sample": True, "max_new_tokens": 9},
        **{"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
    }
    theirs, ours = target.generate(**options), generate(chain, **options)
    assert torch.equal(torch.isneginf(ours.scores[0]), torch.isneginf(theirs.scores[0]))
    assert torch.allclose(ours.scores[0].exp(), theirs.scores[0].exp(), rtol=1e-3)
    assert torch.allclose(ours.logits[0], theirs.logits[0], atol=1e-4)
    new = ours.sequences[:, PROMPTS.shape[1] :]
    assert len(ours.scores) == len(ours.logits) == new.shape[1] == 9
    distribution = torch.stack(ours.scores, 1).log_softmax(-1).gather(2, new[..., None])[..., 0]
    assert torch.allclose(distribution, ours.logprobs, atol=1e-4)
    transition = target.compute_transition_scores(
        ours.sequences, ours.scores, normalize_logits=True
    )
    assert torch.allclose(transition, ours.logprobs, atol=1e-4)
    assert not ours.scores[0].is_inference()


def test_half_precision(target: LlamaForCausalLM) -> None:
    """Processors work in float32 on every level, as in `generate`; nothing is rounded back."""
    half = [copy.deepcopy(m).bfloat16() for m in (target, near(target, 2), near(target, 3))]
    processor = lp.RepetitionPenaltyLogitsProcessor(1.37)
    out = generate(
        ps.Chain(half, [3, 2]),
        **{**ONE, **DETAILS, "do_sample": True, "temperature": 0.7, "max_new_tokens": 12},
        logits_processor=[processor],
    )
    for i, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        assert torch.equal(logits, logits.bfloat16().float())
        assert torch.equal(scores, processor(out.sequences[:, : 5 + i], logits) / 0.7)


def test_seeds(chain: ps.Chain) -> None:
    options = {**ONE, "do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}

    def sampled(seed: Any = None, **more: Any) -> torch.Tensor:
        given = {} if seed is None else {"seed": seed}
        out: torch.Tensor = generate(chain, **{**options, **more}, **given)
        return out

    torch.manual_seed(5)
    first, second = sampled(), sampled()
    torch.manual_seed(5)
    assert torch.equal(sampled(), first)
    assert not torch.equal(first, second)
    assert len(set(map(tuple, first.tolist()))) == 3
    assert torch.equal(sampled(7), sampled(ps.row_seeds(7, 3)))
    out: Any = sampled(return_dict_in_generate=True)
    assert torch.equal(sampled(out.seeds), out.sequences)
    state = torch.random.get_rng_state()
    single = chain.generate(PROMPTS[1], 12, temperature=1.0, seed=7)
    assert torch.equal(sampled(7)[:1], single.sequences)
    sampled(do_sample=False, num_return_sequences=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ValueError, match="seed"):
        sampled([1, 2])


# ---- the end of a text ---------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        assert not self.ends
        self.put_.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_streamer(inputs: dict[str, Any], chain: ps.Chain, target: LlamaForCausalLM) -> None:
    options = {**inputs, "do_sample": False, "max_new_tokens": 14, "eos_token_id": [9, 14, 15]}
    theirs, ours = Recorder(), Recorder()
    sequences = target.generate(**options, streamer=theirs)
    assert torch.equal(generate(chain, **options, token_streamer=ours), sequences)
    assert ours.put_ == theirs.put_
    assert ours.ends == theirs.ends == 1


class After:
    """Ends row b after ``counts[b]`` new tokens, and counts its calls."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.calls = counts, 0

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        assert len(ids) == len(self.counts)
        assert scores is None or scores[-1].shape == (len(ids), V)
        self.calls += 1
        return ids.shape[1] - 5 >= torch.tensor(self.counts)


def test_criteria_row_by_row(chain: ps.Chain, target: LlamaForCausalLM) -> None:
    options = {**RAGGED, "do_sample": False, "max_new_tokens": 14, "eos_token_id": V + 5}
    criterion = After(3, 8, 5)
    wanted = target.generate(**options, stopping_criteria=[After(3, 8, 5)])
    assert generate(chain, **options, stopping_criteria=[criterion]).equal(wanted)
    assert criterion.calls == 8


def test_criteria_with_state_and_of_all_rows(target: LlamaForCausalLM, chain: ps.Chain) -> None:
    class Patience:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.seen.append((ids.tolist(), len(scores)))
            ended = (ids == 9).any(1)
            return ended | torch.tensor(len(self.seen) >= 8)

    options = {**RAGGED, **DETAILS, "do_sample": False, "max_new_tokens": 14, "eos_token_id": 14}
    theirs, ours = Patience(), Patience()
    wanted = target.generate(**options, stopping_criteria=[theirs])
    streamer = Recorder()
    out = generate(chain, **options, stopping_criteria=[ours], token_streamer=streamer)
    assert_same(out, wanted)
    assert torch.equal(out.sequences, wanted.sequences)
    assert out.sequences.shape[1] == 5 + 8
    lengths = [one.num_new_tokens for one in out.requests]
    assert len(set(lengths)) > 1
    assert out.stats.num_new_tokens == sum(lengths)
    assert out.logprobs.isnan().all()  # greedy: every distribution is one-hot
    assert len(out.scores) == len(out.logits) == 8
    assert out.scores[7][lengths.index(min(lengths))].softmax(-1)[PAD] == 1
    assert ours.seen == theirs.seen
    assert torch.tensor(streamer.put_[1:]).t().equal(out.sequences[:, 5:])


def test_other_criteria(chain: ps.Chain, target: LlamaForCausalLM) -> None:
    options = {**ONE, "do_sample": False, "max_new_tokens": 14}
    criterion = After(4)
    theirs = target.generate(**options, stopping_criteria=[After(4)])
    assert torch.equal(generate(chain, **options, stopping_criteria=[criterion]), theirs)
    assert criterion.calls == 4
    assert generate(chain, **options, max_time=0.0).shape == (1, 6)
    assert generate(chain, **options, max_time=1e6).shape == (1, 19)
    shorter = [MaxLengthCriteria(8)]
    assert torch.equal(
        generate(chain, **options, stopping_criteria=shorter),
        target.generate(**options, stopping_criteria=shorter),
    )
    assert generate(chain, **options, stopping_criteria=[lambda ids, scores: True]).shape == (1, 6)


def test_no_padding_id(chain: ps.Chain) -> None:
    """Needed only where rows may end apart."""
    inputs = {"input_ids": PROMPTS, "attention_mask": MASK, "do_sample": False}
    assert generate(chain, **inputs, max_new_tokens=4).shape == (3, 9)
    with pytest.raises(ValueError, match="pad_token_id: expected an id"):
        generate(chain, **inputs, max_new_tokens=4, stopping_criteria=[After(3, 8, 5)])
    # Without one, the first EOS id fills, as in `generate`.
    options = {**inputs, "max_new_tokens": 14, "eos_token_id": [9, 14, 15]}
    model = chain.levels[0].model
    assert torch.equal(generate(chain, **options), model.generate(**options))


def test_text_of_a_model_that_sees_images() -> None:
    """`generate` passes three planes of positions; positions moved by an image are refused."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2}
    text |= {"rope_parameters": rope, "initializer_range": 0.3, "max_position_embeddings": 64}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 14}
    ids = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, vision_end_token_id=92, **ids)
    model = Qwen2VLForConditionalGeneration(config).eval()
    one = ps.Chain([model, llama(2, 96)], [3])
    inputs = {"input_ids": PROMPTS, "attention_mask": MASK, "pad_token_id": PAD}
    for batch in (inputs, {"input_ids": PROMPTS[1:2]}):
        options = {**batch, "do_sample": False, "max_new_tokens": 9}
        assert torch.equal(generate(one, **options), model.generate(**options))
    moved = torch.arange(5).expand(3, 1, 5) + torch.arange(3)[:, None, None]
    with pytest.raises(ValueError, match="position_ids: expected 0, 1, 2"):
        generate(one, input_ids=PROMPTS[1:2], position_ids=moved, max_new_tokens=2)
    with pytest.raises(ValueError, match="pixel_values: expected token ids"):
        require_supported(model.generation_config, {"pixel_values": torch.zeros(1)})


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_beams": 3}, "num_beams: expected its default with a chain.*given 3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: .*given 0.6"),
        ({"dola_layers": "low"}, "dola_layers: .*given low"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: .*given 3"),
        ({"output_attentions": True}, "output_attentions: expected its default"),
        ({"output_hidden_states": True}, "output_hidden_states: expected its default"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor: "),
        ({"stop_strings": ["a"]}, "stop_strings: expected a tokenizer"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4, 5]])}, "position_ids: expected 0, 1, 2"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, "attention_mask: .*row 0"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "attention_mask: .*row 0"),
        ({"labels": torch.tensor([[1]])}, "labels: expected token ids and their attention_mask"),
        ({"past_key_values": 2}, "(cache|past_key_values): expected none with a chain"),
        ({"past_key_values": 0}, "(cache|past_key_values): .* would leave it empty"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_by_name(options, text, chain, target) -> None:
    from transformers import DynamicCache

    if "past_key_values" in options:
        cache = DynamicCache(config=target.config)
        if options["past_key_values"]:
            target(PROMPTS[1:2, : options["past_key_values"]], past_key_values=cache)
        options = {"past_key_values": cache}
    with pytest.raises((ValueError, TypeError), match=text):
        generate(chain, **{**ONE, "max_new_tokens": 4, **options})


def test_the_chain_must_be_of_this_model(chain: ps.Chain, target: LlamaForCausalLM) -> None:
    other = llama(1)  # equal weights, another object
    with pytest.raises(ValueError, match=r"chain: .* given (another )?LlamaForCausalLM"):
        other.generate(**ONE, max_new_tokens=9, custom_generate=ps.custom_generate, chain=chain)
    with pytest.raises(TypeError, match=r"chain: expected a polyspec_ext.Chain.*NoneType"):
        target.generate(**ONE, max_new_tokens=9, custom_generate=ps.custom_generate)
    with pytest.raises(TypeError, match="given list"):
        target.generate(**ONE, max_new_tokens=9, custom_generate=ps.custom_generate, chain=[target])


# ---- as `generate` is used -----------------------------------------------------------------------


def test_one_token_and_a_chain_of_one(target: LlamaForCausalLM, chain: ps.Chain) -> None:
    for one in (ps.Chain([target]), chain):
        for count in (1, 2, 7):
            options = {**RAGGED, "max_new_tokens": count, "repetition_penalty": 1.4}
            assert torch.equal(generate(one, **options), target.generate(**options))
