"""Draft levels with a streaming cache: their cost stays, and the target's text too."""

from typing import Any

import pytest
import torch
from small_models import PROMPT, V, make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.kv_cache.rollback import RollbackCache

STREAMS: list[Any] = [8, {"window": 6, "sinks": 2, "slack": 5}, {"window": 8, "slack": 12}]


@pytest.mark.parametrize("streaming", STREAMS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "pythia"])
def test_greedy_text_is_the_targets(family: str, streaming: Any) -> None:
    target = make(family, seed=5 if family == "qwen3" else 0)
    draft = ps.Level(rough(target), streaming=streaming)
    prompt = [*PROMPT, *range(10, 30)]  # longer than the window, and than one pass
    text = plain_greedy(target, prompt, 40)
    assert len(set(text[len(prompt) :])) > 1
    for chain in (
        ps.Chain([target, draft], [3]),
        ps.Chain([target, ps.Level(rough(target, seed=2), streaming=streaming), draft], [3, 1]),
    ):
        out = chain.generate(prompt, 40, eos_token_id=[])
        assert out.sequences.tolist() == [text]
        assert out.stats.levels[0].num_accepted_tokens > 0


@torch.inference_mode()
def test_passes_longer_than_the_slack_go_in_pieces() -> None:
    model = make("llama")
    options: Any = {"window": 6, "sinks": 2, "slack": 3}
    level, one = (ps.Level(model, streaming=options) for _ in range(2))
    text = torch.randint(3, V, (1, 40), generator=torch.Generator().manual_seed(1))
    for each in (level, one):
        each.prefill(text[:, :10])
    rows = level.forward(text[:, 10:30], 9)
    single = [one.forward(text[:, i : i + 1], 1) for i in range(10, 30)]
    assert rows.shape == (1, 9, V)
    # Distances to the sinks are the distances of a pass's first query, so rows agree about, not
    # exactly.
    near = (rows - torch.cat(single[-9:], 1)).abs().max()
    far = (rows - torch.cat(single[:9], 1)).abs().max()
    assert near < far / 2
    assert level.cache.layers[0].keys.shape[2] == 6 + 2 + 3
    level.forward(text[:, 30:], 1)
    assert level.cache.layers[0].keys.shape[2] == 6 + 2 + 3


@torch.inference_mode()
def test_ragged_pieces() -> None:
    model = make("llama")
    level = ps.Level(model, prefill_chunk=4)
    text = torch.randint(3, V, (3, 11), generator=torch.Generator().manual_seed(1))
    level.prefill(text[:, :2])
    rows = level.forward(text[:, 2:], 3, [9, 5, 0], [4, 2, 0])
    for b, start in ((0, 6), (1, 4)):
        whole = model(text[b : b + 1], use_cache=False).logits[0]
        torch.testing.assert_close(rows[b], whole[start : start + 3], rtol=1e-4, atol=1e-4)
    assert level.cache.lengths.tolist() == [11, 7, 2]


def test_a_cache_of_ones_own_for_batches() -> None:
    target = make("llama")
    draft = ps.Level(
        rough(target),
        new_cache=lambda rows: RollbackCache.streaming(target, rows, window=9, slack=6),
    )
    assert draft.supports_batches
    out = ps.Chain([target, draft], [3]).generate([PROMPT, [7]], 20, eos_token_id=[])
    assert out.sequences.tolist()[0] == plain_greedy(target, PROMPT, 20)


def test_a_target_sees_its_whole_text() -> None:
    """With a window a target would have another distribution in blocks than alone."""
    target = make("llama")
    with pytest.raises(ValueError, match=r"levels\[0\]: .*a streaming cache"):
        ps.Chain([ps.Level(target, streaming=16), rough(target)], [4])
    alone = ps.Chain([ps.Level(target, streaming=16)]).generate(PROMPT, 4, eos_token_id=[])
    assert alone.sequences.shape == (1, len(PROMPT) + 4)
