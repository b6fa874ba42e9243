"""RollbackCache against each row run alone with DynamicCache, before and after rollbacks."""

import pytest
import torch
from rollback_driver import CONFIGS, VOCAB, WINDOWED, Driver, build, run_ragged
from transformers import LlamaConfig

from polyspec_ext.kv_cache.rollback import RollbackCache
from polyspec_ext.ops import decoder as cache_ops


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_equal_each_row_alone(name: str, attention: str) -> None:
    model = build(CONFIGS[name], attention)
    cache = RollbackCache.for_model(model, 3, capacity=4, step=3)
    run_ragged(Driver(model, cache))
    assert cache.layers[0].keys.shape[2] == 24  # 9 after the prompts: it has grown with data in it


@torch.no_grad()
@pytest.mark.parametrize("bucket", [16, 64])
def test_buckets_read_more_slots_and_change_nothing(bucket: int) -> None:
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 3, capacity=64, bucket=bucket)
    run_ragged(Driver(model, cache))
    assert cache.rows.span % bucket == 0


@torch.no_grad()
@pytest.mark.parametrize("bucket", [1, 64])
def test_first_tokens_of_any_number_need_no_mask(bucket: int) -> None:
    """Where a row takes all of them, and no row sees less than all before it."""
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 2, capacity=128, bucket=bucket)
    for tokens, counts in (
        (1, None),
        (5, None),
        (64, None),
        (70, None),
        (40, [40, 7]),
        (9, [0, 9]),
    ):
        cache.reset()
        given = cache.inputs(tokens, counts)
        assert given["attention_mask"] is None
        assert given["position_ids"].tolist() == [list(range(tokens))]
        assert cache.rows.span == tokens
    assert cache.inputs(3)["attention_mask"] is not None  # after others
    assert cache.rows.span % bucket == 0
    cache.reset()
    assert cache.inputs(9, [4, 8])["attention_mask"] is not None
    sliding = RollbackCache(WINDOWED["mistral"], 1, bucket=bucket)
    window = WINDOWED["mistral"].sliding_window
    assert sliding.inputs(window)["attention_mask"] is None
    sliding.reset()
    assert sliding.inputs(window + 1)["attention_mask"] is not None


@pytest.mark.parametrize(("bucket", "capacities"), [(1, [256, 512, 768]), (512, [256, 512, 1024])])
def test_a_cache_that_attention_reads_in_spans_doubles(bucket: int, capacities: list[int]) -> None:
    """Keys that move have all graphs captured anew; on the CPU they cost their copy alone."""
    cache = RollbackCache(CONFIGS["llama"], 1, capacity=256, step=256, bucket=bucket)
    found = []
    for _ in range(6):
        cache.prepare(100)
        found.append(cache.rows.capacity)
    assert sorted(set(found)) == capacities


@torch.no_grad()
def test_rollback_moves_no_bytes_and_growth_keeps_them() -> None:
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 2, capacity=16, step=16)
    driver = Driver(model, cache)
    driver.forward([7, 5])
    before = [
        (layer.keys.data_ptr(), layer.keys.clone(), layer.values.clone()) for layer in cache.layers
    ]
    driver.rollback([2, 5])
    for layer, (pointer, keys, values) in zip(cache.layers, before, strict=True):
        assert layer.keys.data_ptr() == pointer
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    driver.forward([14, 3])
    assert cache.layers[0].keys.data_ptr() == before[0][0]  # 2 + 14 and 5 + 3 fit
    driver.forward([9, 9])
    assert cache.layers[0].keys.shape[2] == 32


@torch.no_grad()
@pytest.mark.parametrize("change", ["growth", "select", "leave", "reset"])
def test_paths_move_where_keys_lie_now(change: str) -> None:
    """Where layers lie is asked once, and again where that has changed."""
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 2, capacity=16, step=16)
    driver = Driver(model, cache)
    driver.forward([4, 3])
    for turn in range(2):
        held, rows = cache.lengths.tolist(), range(cache.batch_size)
        ids = torch.randint(3, VOCAB, (len(rows), 3), generator=driver.random)
        parents = torch.tensor([-1, -1, 1])
        model(ids, past_key_values=cache, **cache.inputs(3, parents=parents))
        paths = torch.tensor([[1, 2]] * len(rows))
        cache.keep_path(held, paths, [n + 2 for n in held])
        for row in rows:
            driver.alone.tokens[row] += ids[row, [1, 2]].tolist()
        driver.forward([1] * len(rows))
        if turn == 0 and change == "growth":
            driver.forward([20, 19])
        elif turn == 0 and change in ("select", "leave"):
            kept = [1, 0] if change == "select" else [1]
            cache.batch_select_indices(torch.tensor(kept))
            driver.alone.tokens = [driver.alone.tokens[row] for row in kept]
        elif turn == 0:
            assert cache.refit(1)
            driver.alone.tokens = [[]]
            driver.forward([5])


@torch.no_grad()
def test_keys_of_any_stride_are_appended_to_rows_of_any_length() -> None:
    cache = RollbackCache(CONFIGS["llama"], 2, capacity=16)
    keys = torch.randn(2, 2, 8, 3).transpose(2, 3)  # [B, H, T, D]
    cache.prepare(3)
    cache.update(keys, keys, 0)
    cache.rollback([3, 1])
    more = torch.randn(2, 2, 8, 3).transpose(2, 3)
    cache.inputs(3, [2, 3])
    held, _ = cache.update(more, -more, 0)
    torch.testing.assert_close(held[0, :, :5], torch.cat([keys[0], more[0, :, :2]], 1))
    torch.testing.assert_close(held[1, :, :4], torch.cat([keys[1, :, :1], more[1]], 1))


@torch.no_grad()
def test_without_inputs_while_rows_are_equally_long() -> None:
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 2, capacity=4, step=4)
    ids = torch.randint(3, VOCAB, (2, 12))
    expected = model(ids).logits
    first = model(ids[:, :7], past_key_values=cache).logits
    second = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=0, atol=2e-5)
    cache.crop(-4)
    assert cache.get_seq_length() == 8
    again = model(ids[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(again, expected[:, 8:], rtol=0, atol=2e-5)
    cache.rollback([5, 8])
    with pytest.raises(ValueError, match=r"different lengths.*cache\.inputs"):
        model(ids[:, 8:], past_key_values=cache)


def test_bad_counts_set_a_status_and_keep_the_row() -> None:
    cache = RollbackCache(CONFIGS["llama"], 2, capacity=8)
    cache.inputs(2, torch.tensor([1, 3]))
    states = torch.randn(2, 2, 2, 8)
    cache.update(states, states, 0)
    assert cache.status.tolist() == [0, int(cache_ops.CacheStatus.BAD_LENGTH)]
    assert not cache.layers[0].keys[1].any()
    cache.select([1, 0])
    assert cache.status.tolist() == [int(cache_ops.CacheStatus.BAD_LENGTH), 0]


def test_a_new_batch_begins_with_zeros() -> None:
    """A NaN in a hidden slot would spread, after a rollback too."""
    cache = RollbackCache(CONFIGS["llama"], 2, capacity=8)
    cache.inputs(4)
    states = torch.full((2, 2, 4, 8), torch.nan)
    cache.update(states, states, 0)
    cache.rollback([1, 1])
    cache.reset()
    assert not cache.layers[0].keys.any()
    assert not cache.layers[0].values.any()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="linear_attention"):
        RollbackCache(LlamaConfig(num_hidden_layers=1, layer_types=["linear_attention"]), 1)
    cache = RollbackCache(CONFIGS["llama"], 2)
    with pytest.raises(ValueError, match="expected"):
        cache.crop(1)
    cache.inputs(2)
    with pytest.raises(ValueError, match="as prepared"):
        cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)


@torch.no_grad()
def test_padding_is_not_written_though_rows_are_in_step() -> None:
    model = build(CONFIGS["llama"])
    cache = RollbackCache.for_model(model, 2, capacity=16)
    driver = Driver(model, cache)
    driver.forward([4, 4])
    driver.forward([1, 3])
    assert not any(layer.keys[0, :, 5:].any() for layer in cache.layers)
    assert cache.layers[0].keys[1, :, 6].any()
