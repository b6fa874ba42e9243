"""The GPU against the CPU through torch: equal in every bit, in a graph and on two streams."""

import itertools
from typing import Any

import pytest
import torch
from calls import blocks, equal

import polyspec_ext as ps

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 50, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.02, "top_p": 0.95},
)


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in options.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 10, 128256), (5, 3, 50257), (20, 2, 32000), (80, 2, 9001)])
def test_verify(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    options = blocks(*shape, dtype=dtype)
    for rule, filters in itertools.product(("token", "block"), FILTERS):
        call = {**options, **filters, "rule": rule, "draft_statistics": None}
        assert equal(ps.verify(**call), ps.verify(**on_gpu(call))), (rule, filters)
        call |= {"eos": torch.arange(50), "room": torch.arange(shape[0]) % 4}
        assert equal(ps.verify(**call), ps.verify(**on_gpu(call))), (rule, filters, "cut")
    call = {**options, "rule": "token"}  # the distributions handed over belong to no filters
    assert equal(ps.verify(**call), ps.verify(**on_gpu(call)))
    proposal = {**options, "draft_logits": None, "draft_statistics": None}
    assert equal(ps.verify(**proposal), ps.verify(**on_gpu(proposal)))


def test_replay_with_other_seeds_lengths_and_ends() -> None:
    options = on_gpu(blocks(4, 3, 40000, dtype=torch.bfloat16))
    options |= {"room": torch.full((4,), 9).cuda(), "eos": torch.zeros(4, 2).long().cuda()}
    ps.verify(**options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ps.verify(**options)
        drawn = ps.sample(options["target_logits"][:, 0], seed=options["seed"])
    for step in range(6):
        options["seed"].fill_(step)
        options["draft_lengths"].fill_(step % 4)
        options["room"].fill_(5 - step)
        options["eos"].fill_(step)
        graph.replay()
        torch.cuda.synchronize()
        cpu = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        assert equal(ps.verify(**cpu), captured)
        assert equal(ps.sample(cpu["target_logits"][:, 0], seed=cpu["seed"]), drawn)


def test_two_streams_at_once() -> None:
    options = on_gpu(blocks(3, 4, 40000, dtype=torch.float16))
    alone = [ps.verify(**{**options, "seed": seed}) for seed in range(16)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    together = []
    for seed in range(16):
        with torch.cuda.stream(streams[seed % 2]):
            together.append(ps.verify(**{**options, "seed": seed}))
    torch.cuda.synchronize()
    for a, b in zip(alone, together, strict=True):
        assert equal(a, b)
