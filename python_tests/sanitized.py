"""A few small calls of every operator on the GPU, for compute-sanitizer (see .ci/gpu)."""

from __future__ import annotations

import torch

import polyspec_ext as ps
from polyspec_ext.device_scheduler import Schedule


def main() -> None:
    assert ps.has_cuda(), "needs a CUDA device and a build with kernels"
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for vocab in (1, 33, 4097, 33001):  # the last is spread over a cluster
            batch, k, draft_vocab = 3, 2, max(1, vocab - 1)
            draft = torch.randn(batch, k, draft_vocab).to("cuda", dtype)
            target = torch.randn(batch, k + 1, vocab).to("cuda", dtype)
            ends_at = torch.tensor([0, -1], device="cuda")
            room = torch.arange(batch, device="cuda")
            for options in ({}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}):
                drawn = [ps.sample(draft[:, i], position=i, level=2, **options) for i in range(k)]
                tokens = torch.stack([d.tokens for d in drawn], 1)
                laws = torch.stack([d.laws for d in drawn], 1)
                for rule in ("token", "block"):
                    r = ps.verify(target, tokens, draft, rule=rule, draft_laws=laws, **options)
                    ps.raise_for_status(r.status, level=1, position=0)
                    r = ps.verify(target, tokens, rule=rule, **options)
                    ps.raise_for_status(r.status, level=1, position=0)
                    ends = ps.verify(target, tokens, rule=rule, eos=ends_at, room=room, **options)
                    ps.raise_for_status(ends.status, level=1, position=0)
    schedule()
    torch.cuda.synchronize()
    print("done")


def schedule() -> None:
    """A draft and its verification, in the lines that a chain keeps on the device."""
    made = Schedule((4, 2), (2, 0), tail=12, steps=2)
    shape = made.shape
    state = torch.zeros(33, shape.words, dtype=torch.int64)
    state[:, shape.TOTAL], state[:, shape.ROOM] = 1, torch.arange(33)
    state = state.cuda()
    eos = torch.full((33, 1), 5, device="cuda")
    _, plan = made.next(state, 3, 3)
    tokens = torch.arange(66, device="cuda").view(33, 2)
    made.report(state, 3, plan, tokens, None, torch.zeros_like(tokens, dtype=torch.int32), eos, 2)
    _, plan = made.next(state, 2, 4)
    status = torch.zeros(33, dtype=torch.int32, device="cuda")
    tokens = torch.arange(99, device="cuda").view(33, 3)
    made.report(state, 2, plan, tokens, torch.zeros_like(plan[0]), status, eos, 6)


if __name__ == "__main__":
    main()
