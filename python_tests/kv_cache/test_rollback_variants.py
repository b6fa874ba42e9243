"""RollbackCache's sliding windows, and sinks with a window."""

import pytest
import torch
from rollback_driver import CONFIGS, VOCAB, WINDOWED, Driver, build
from transformers.cache_utils import Cache, CacheLayerMixin

from polyspec_ext.kv_cache.layers import query_positions
from polyspec_ext.kv_cache.rollback import RollbackCache
from polyspec_ext.kv_cache.streaming import turn


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows(name: str) -> None:
    attention = "eager" if name == "gemma2" else "sdpa"  # Gemma 2 caps its scores
    model = build(WINDOWED[name], attention)
    cache = RollbackCache.for_model(model, 3, capacity=4, step=8)
    driver = Driver(model, cache)
    driver.forward([9, 4, 6])
    for _ in range(3):
        driver.forward([4, 4, 4])
        driver.rollback([len(t) - n for t, n in zip(driver.alone.tokens, [3, 0, 4], strict=True)])
        driver.forward([1, 3, 2], tokens=5)
        driver.rollback(
            [len(t) - n for t, n in zip(driver.alone.tokens, [1, 3, 0], strict=True)], tensor=True
        )
    driver.forward([8, 8, 2])
    driver.forward([12, 20, 3])  # longer than the window
    driver.forward([1, 1, 1])


def test_padding_repeats_a_position_that_there_is() -> None:
    places = query_positions(torch.tensor([0, 0, 5]), torch.tensor([0, 2, 1]), 3)
    assert places.tolist() == [[0, 0, 0], [0, 1, 1], [5, 5, 5]]


class NaiveStreaming(CacheLayerMixin):
    """StreamingLLM as its paper says: keys get their positions within the cache, anew each step."""

    def __init__(self, frequencies: torch.Tensor, window: int, sinks: int) -> None:
        super().__init__()
        self.frequencies, self.window, self.sinks = frequencies, window, sinks
        self.raw: list[torch.Tensor] = []
        self.old: list[torch.Tensor] = []

    def lazy_initialization(self, key_states, value_states) -> None: ...

    def position(self) -> int:
        return min(len(self.raw), self.sinks + self.window - 1)

    def update(self, key_states, value_states, *args, **kwargs):
        at = self.position()
        if at < len(self.raw):
            del self.raw[self.sinks], self.old[self.sinks]
        self.raw.append(turn(key_states, torch.tensor([-at]), self.frequencies))
        self.old.append(value_states)
        keys = [turn(k, torch.tensor([i]), self.frequencies) for i, k in enumerate(self.raw)]
        return torch.cat(keys, 2), torch.cat(self.old, 2)

    def get_seq_length(self) -> int:
        return self.position()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.position() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.5


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "pythia"])
def test_streaming_equals_positions_within_the_cache(name: str) -> None:
    model = build(CONFIGS[name])
    window, sinks, steps = 6, 3, 25
    frequencies = model.base_model.rotary_emb.inv_freq
    ids = torch.randint(3, VOCAB, (2, steps), generator=torch.Generator().manual_seed(5))
    expected = torch.empty(2, steps, VOCAB)
    for row in range(2):
        naive = Cache(layers=[NaiveStreaming(frequencies, window, sinks) for _ in range(3)])
        for step in range(steps):
            at = torch.tensor([[naive.layers[0].position()]])
            out = model(ids[row : row + 1, step : step + 1], past_key_values=naive, position_ids=at)
            expected[row, step] = out.logits[0, 0]
    cache = RollbackCache.streaming(model, 2, window=window, sinks=sinks, slack=5)
    pass_on = {"rtol": 0, "atol": 1e-4}

    def feed(rows: list[int], wrong: bool = False) -> torch.Tensor:
        """One token per row, the next of each; a wrong one where it is to be rolled back."""
        chosen = ids[torch.arange(2), torch.tensor(rows)][:, None]
        chosen = torch.full_like(chosen, 9) if wrong else chosen
        return model(chosen, past_key_values=cache, **cache.inputs(1)).logits[:, 0]

    lead = 2  # row 1 starts later, so that rows differ in length
    for step in range(lead):
        padded = torch.stack([ids[0, step], ids[1, 0]])[:, None]
        model(padded, past_key_values=cache, **cache.inputs(1, [1, 0]))
    for step in range(steps - lead):
        at = [step + lead, step]
        logits = feed(at)
        for row in range(2):
            torch.testing.assert_close(logits[row], expected[row, at[row]], **pass_on)
        for _ in range(step % 6):  # drafts that are rejected: up to `slack` of them
            feed(at, wrong=True)
        cache.rollback([n + 1 for n in at])
    assert all(layer.keys.shape[2] == sinks + window + 5 for layer in cache.layers)
    assert not cache.status.any()


def test_streaming_refuses_what_it_cannot_move() -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*rotary.*gpt2"):
        RollbackCache.streaming(build(CONFIGS["gpt2"]), 1, window=4)
    cache = RollbackCache.streaming(build(CONFIGS["llama"]), 1, window=4, slack=3)
    cache.inputs(4)
    with pytest.raises(ValueError, match="at most 4"):
        cache.inputs(5)
