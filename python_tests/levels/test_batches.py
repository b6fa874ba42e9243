"""Batches of a Hugging Face level (texts of random batches: exactness/test_model_screen.py)."""

from typing import Any

import pytest
import torch
import transformers as hf
from small_models import make, plain_greedy

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel

PROMPTS = [[5, 17, 80, 3, 3, 41], [9], [], [30, 31, 32, 33]]
IDS = torch.arange(3, 19).view(4, 4)


def begun(model: Any, level: HuggingFaceLevel | None = None) -> HuggingFaceLevel:
    level = level or HuggingFaceLevel(model)
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in PROMPTS])
    level.prefill(padded, [len(p) for p in PROMPTS])
    return level


@torch.inference_mode()
def test_what_a_model_does_to_its_logits_still_happens() -> None:
    """Gemma 2 caps its scores and its logits. Only the head's hidden states are gathered."""
    model = make("gemma2, sliding window")
    model.set_attn_implementation("eager")
    model.config.final_logit_softcapping = 0.5
    level = begun(model)
    capped = level.forward(IDS, 2, [3, 4, 1, 2], [1, 2, 0, 0])
    assert 0.3 < capped.abs().max() <= 0.5
    for row, prompt in enumerate(PROMPTS):
        text = torch.tensor([prompt + IDS[row].tolist()])
        start = len(prompt) + [1, 2, 0, 0][row]
        wanted = model(input_ids=text, use_cache=False).logits[0, start]
        torch.testing.assert_close(capped[row, 0], wanted, rtol=1e-4, atol=1e-4)


class Headless(torch.nn.Module):
    """A head that counts the hidden states that it reads."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head, self.seen = head, [0]
        self.out_features = head.out_features

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.seen.append(states.shape[0] * states.shape[1])
        return self.head(states)


@torch.inference_mode()
def test_the_head_sees_no_more_than_is_kept() -> None:
    model = make("llama")
    model.set_output_embeddings(Headless(model.get_output_embeddings()))
    level = begun(model)
    seen = model.get_output_embeddings().seen
    for counts, keep, first in (([3, 4, 1, 2], 2, [1, 2, 0, 0]), (None, 3, None)):
        seen.clear()
        level.forward(IDS, keep, counts, first)
        assert seen == [4 * keep]


@torch.inference_mode()
def test_rows_at_the_end_of_learned_positions_can_wait() -> None:
    model = make("gpt2")  # 128 positions
    level = HuggingFaceLevel(model)
    level.prefill(torch.full((2, 128), 7), [128, 3])
    logits = level.forward(torch.tensor([[1, 2], [3, 4]]), 1, [0, 2], [0, 1])
    whole = model(torch.tensor([[7, 7, 7, 3, 4]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[1, 0], whole, rtol=1e-4, atol=1e-4)


def test_one_sequence_in_a_cache_of_ones_own() -> None:
    model = make("llama")
    level = HuggingFaceLevel(model, new_cache=hf.DynamicCache)
    assert not level.supports_batches
    with pytest.raises(ValueError, match="expected one sequence, given a batch of 2"):
        level.prefill(torch.tensor([[1, 2], [3, 4]]))
    out = ps.Chain([level, make("llama", 1)], [3]).generate([5, 6, 7], 12, eos_token_id=[])
    assert out.sequences.tolist() == [plain_greedy(model, [5, 6, 7], 12)]


def test_bad_arguments() -> None:
    model = make("llama")
    for options, text in (({"new_cache": hf.DynamicCache, "streaming": 8}, "given both"),):
        with pytest.raises(ValueError, match=text):
            ps.Level(model, **options)
    with pytest.raises(ValueError, match="rotary positions of a known layout"):
        ps.Level(make("gpt2"), streaming=8)


def test_level_is_a_protocol_and_makes_levels() -> None:
    assert isinstance(ps.Level(make("llama")), ps.Level)

    class Mine(ps.Level):
        vocab_size = 3

        def __init__(self, name: str) -> None:
            self.name = name

    assert Mine("mine").name == "mine"
    assert not isinstance(object(), ps.Level)
