"""A few small calls of every operator, for compute-sanitizer (.ci/gpu); `cpu` tries this file.

sanitized.py [cuda|cpu [tiny]]    tiny: one verification and nothing else
"""

import sys

import torch

import polyspec_ext as ps
from polyspec_ext._C import RoundShape
from polyspec_ext.ops import decoder as cache_ops
from polyspec_ext.ops import trees, verification
from polyspec_ext.runtime.graphs import next_step, report
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowParameters

# Batches and vocabularies. On a device with clusters 33001 tokens are spread over one; three
# requests have their rows read at once, twelve are too many for that and a separate cluster walks
# each.
SHAPES = [(3, 1), (3, 33), (3, 4097), (3, 33001), (12, 33001)]


def main(device: str = "cuda", extent: str = "all") -> None:
    assert device == "cpu" or ps.has_cuda(), "needs a CUDA device and a build with kernels"
    torch.manual_seed(0)
    if extent == "tiny":
        sample_and_verify(*SHAPES[1], torch.float32, device)
    else:
        every_operator(device)
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


def every_operator(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for batch, vocab in SHAPES:
            sample_and_verify(batch, vocab, dtype, device)
            draw(batch, vocab, dtype, device)
        large_tree(dtype, device)
        cache(dtype, device)
    schedule(device)


def sample_and_verify(batch: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    k, draft_vocab = 2, max(1, vocab - 1)
    draft = torch.randn(batch, k, draft_vocab).to(device, dtype)
    target = torch.randn(batch, k + 1, vocab).to(device, dtype)
    ends_at = torch.tensor([0, -1], device=device)
    room = torch.arange(batch, device=device)
    for options in ({}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}):
        drawn = [ps.sample(draft[:, i], position=i, level=2, **options) for i in range(k)]
        tokens = torch.stack([d.tokens for d in drawn], 1)
        statistics = torch.stack([d.statistics for d in drawn], 1)
        for rule in ("token", "block"):
            r = ps.verify(target, tokens, draft, rule=rule, draft_statistics=statistics, **options)
            ps.raise_for_status(r.status, level=1, position=0)
            r = ps.verify(target, tokens, rule=rule, **options)
            ps.raise_for_status(r.status, level=1, position=0)
            ends = ps.verify(target, tokens, rule=rule, eos=ends_at, room=room, **options)
            ps.raise_for_status(ends.status, level=1, position=0)
            pool, rows = draft.flatten(0, 1), torch.arange(batch * k, device=device).view(batch, k)
            r = ps.verify(target, tokens, pool, rule=rule, draft_rows=rows, **options)
            ps.raise_for_status(r.status, level=1, position=0)
        if vocab > 1:
            tree(target, draft[:, 0], options)


def draw(batch: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Draw two tokens in turn, with rows for the level above."""
    tokens = torch.zeros(batch, 2, dtype=torch.int64, device=device)
    status = torch.zeros(batch, 2, dtype=torch.int32, device=device)
    rows = torch.zeros(batch, 2, vocab, dtype=dtype, device=device)
    statistics = torch.zeros(batch, 2, 2, dtype=torch.int64, device=device)
    parameters = RowParameters(batch, torch.device(device))
    parameters.write([Sampling(1.0, 9, 0.9)] * batch, range(batch))
    own = parameters.on(rows.device).values()
    positions = torch.arange(batch, device=device)
    rounds = torch.arange(batch, device=device)
    random = torch.Generator().manual_seed(vocab)  # the others' numbers stay as they are
    for column in range(2):
        logits = torch.randn(batch, 1, vocab, generator=random).to(device, dtype)
        verification.draw(
            logits, own, positions, rounds, 2, column, tokens, status, rows, statistics
        )  # fmt: skip
    assert not status.any()


def tree(target: torch.Tensor, draft: torch.Tensor, options: dict[str, float]) -> None:
    """Draw two children of the root: the likeliest tokens, and drawn tokens."""
    batch, device = target.shape[0], target.device
    parents = torch.full((batch, 2), -1, device=device)
    drawn = [ps.sample(draft, position=0, level=2, node=i, **options).tokens for i in range(2)]
    rows = torch.arange(batch, device=device)[:, None].repeat(1, 3)
    likeliest = target[:, 0].topk(2).indices
    for nodes, own in (
        (likeliest, {}),
        (torch.stack(drawn, 1), {"draft_logits": draft.contiguous(), "draft_rows": rows}),
    ):
        r = ps.verify_tree(target, nodes, parents, **own, **options)
        ps.raise_for_status(r.status, level=1, position=0)


def large_tree(dtype: torch.dtype, device: str) -> None:
    """Trees of 60 nodes: one path, and one of many forks. First children are the likeliest."""
    batch, nodes, vocab = 2, 60, 4097
    target = torch.randn(batch, nodes + 1, vocab).to(device, dtype)
    forks = [max(i - 1 - i % 7, -1) for i in range(nodes)]
    siblings = [0 if forks.index(parent) == i else i for i, parent in enumerate(forks)]
    parents = torch.tensor([list(range(-1, nodes - 1)), forks], device=device)
    others = torch.tensor([[0] * nodes, siblings], device=device)
    tokens = (target.argmax(-1).gather(1, parents + 1) + others) % vocab
    draft = torch.randn(3, vocab).to(device, dtype)
    rows = torch.arange(nodes + 1, device=device).repeat(batch, 1) % 4 - 1
    for options in ({}, {"top_k": 9, "top_p": 0.9}, {"temperature": 0.0}):
        for own in ({}, {"draft_logits": draft, "draft_rows": rows}):
            r = ps.verify_tree(target, tokens, parents, **own, **options)
            ps.raise_for_status(r.status, level=1, position=0)


def cache(dtype: torch.dtype, device: str) -> None:
    """Append to a contiguous cache, a ring and pages, and compact a tree, at memory's edge."""
    layers, b, h, t, c, dk, dv = 2, 12, 3, 5, 16, 40, 24
    keys = [torch.zeros(b, h, c, dk, device=device, dtype=dtype) for _ in range(layers)]
    values = [torch.zeros(b, h, c, dv, device=device, dtype=dtype) for _ in range(layers)]
    new_keys = torch.randn(b, t, h, dk).to(device, dtype).transpose(1, 2)
    new_values = torch.randn(b, t, h, dv).to(device, dtype).transpose(1, 2)
    lengths = torch.arange(b, device=device)  # the last row becomes full
    ends, before = lengths.clone(), torch.empty_like(lengths)
    cache_ops.update_lengths(ends, before, lengths, None, t)
    assert torch.equal(ends - before, torch.full_like(ends, t))
    rest = torch.empty(3, b, dtype=torch.int64, device=device)
    cache_ops.update_lengths(before, ends, None, None, t, lengths + 2, lengths % t, rest)
    flat = new_keys[:, 0].contiguous()
    ring = torch.zeros(b, c, dk, device=device, dtype=dtype)
    cache_ops.put_rows(ring, flat, lengths, None, 0, None, None, None, ends, before, lengths)
    assert cache_ops.take_rows(ring, lengths, None, 0, t, True).equal(flat)
    assert cache_ops.take_rows(flat, None, lengths, t, 1, False).shape == (b, 1, dk)
    for ring, sinks in ((False, 0), (True, 2)):
        for layer_keys, layer_values in zip(keys, values, strict=True):
            _, status = cache_ops.append(
                layer_keys, layer_values, new_keys, new_values, lengths, ring=ring, sinks=sinks
            )
            assert not status.any()
    path = torch.tensor([[1, 3, 4, -1, -1]], device=device).repeat(b, 1)
    moved = trees.compact_tree(keys, values, trees.pointers(keys, values), lengths, path)
    assert not moved[1].any()
    assert torch.equal(moved[0], lengths + 3)

    page_size, pages = 4, 5 * b
    page_keys = torch.zeros(pages, h, page_size, dk, device=device, dtype=dtype)
    page_values = torch.zeros(pages, h, page_size, dv, device=device, dtype=dtype)
    table = torch.full((b, 5), -1, dtype=torch.int32, device=device)
    held = torch.zeros(b, dtype=torch.int64, device=device)
    free = torch.arange(pages, dtype=torch.int32, device=device)
    count = torch.tensor([pages], device=device)
    assert not torch.ops.polyspec.reserve_pages(
        table, held, free, count, lengths + t, page_size
    ).any()
    _, status = torch.ops.polyspec.append_paged(
        page_keys, page_values, table, new_keys, new_values, lengths, None
    )
    assert not status.any()
    assert not torch.ops.polyspec.truncate_pages(table, held, free, count, lengths, page_size).any()


def schedule(device: str) -> None:
    """A draft and its verification, in state rows that a chain keeps on the device."""
    shape, form = RoundShape(3, 2, 64), (3, 2)
    words = torch.zeros(33, shape.words, dtype=torch.int64)
    words[:, shape.TOTAL], words[:, shape.ROOM] = 1, torch.arange(33)
    for level, window, bound in ((1, 4, 2), (2, 2, 0)):
        at = shape.level_at(level)
        words[:, at + shape.WINDOW], words[:, at + shape.BOUND] = window, bound
    state = words.to(device)
    eos = torch.full((33, 1), 5, device=device)
    _, plan, _ = next_step(state, *form, 3, 3, 0)
    tokens = torch.arange(66, device=device).view(33, 2)
    none = torch.zeros_like(tokens, dtype=torch.int32)
    report(state, *form, 3, plan, tokens, None, none, eos)
    _, plan, _ = next_step(state, *form, 2, 4, 2)
    status = torch.zeros(33, dtype=torch.int32, device=device)
    tokens = torch.arange(99, device=device).view(33, 3)
    report(state, *form, 2, plan, tokens, torch.zeros_like(plan[0]), status, eos)


if __name__ == "__main__":
    main(*sys.argv[1:])
