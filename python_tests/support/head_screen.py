"""The n-level rule for drafters of trees, and those that read hidden states, without caches.

Every pass over the public operators reads the whole text anew, and a drafter that remembers nothing
gets the state of every token: an oracle of all that a chain keeps between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

import polyspec_ext as ps


class Draft(NamedTuple):
    """Draft tokens, with the parents of a tree and the logits that they were drawn from."""

    tokens: list[int]
    parents: list[int] | None = None
    logits: torch.Tensor | None = None  # [N, V], of a tree [N + 1, V]; None: deterministic


# From a text to the logits after each token, [N, V], and its hidden states, [N, H].
Level = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
# From a text, the hidden states of all tokens but the last, the tokens or levels of a tree that are
# wanted, and the drafting rounds so far.
Drafter = Callable[[list[int], torch.Tensor, int, int], Draft]


def generate(
    levels: Sequence[Level],
    drafter: Drafter,
    windows: Sequence[int],
    prompt: Sequence[int],
    max_new_tokens: int,
    rounds: Sequence[int],
    tail: int = 0,
    eos: Collection[int] = (),
    **sampling: Any,
) -> list[int]:
    """Continue `prompt` with the distribution of levels[0]; see examples/one_screen.py."""
    text, last, steps = list(prompt), len(levels) - 1, [0] * (len(levels) + 1)
    cached = [len(text) - 1] * len(levels)
    source = [0] * (len(text) - 1)  # the level whose state of each token the drafter reads

    def draft(k: int) -> Draft:
        states = [levels[i](text)[1] for i in range(len(levels))]
        read = [states[source[at]][at] for at in range(len(text) - 1)]
        block = drafter(text, torch.stack(read) if read else states[0][:0], k, steps[-1])
        steps[-1] += 1
        if block.parents is None:
            count = next((i for i, t in enumerate(block.tokens, 1) if t in eos), len(block.tokens))
            logits = None if block.logits is None else block.logits[:count]
            block = Draft(block.tokens[:count], None, logits)
            text.extend(block.tokens)
        return block

    def emit(i: int, room: int) -> list[torch.Tensor]:
        begin, want, block = len(text), min(windows[i], room - 1), Draft([])
        q: list[torch.Tensor] | None = []  # None: the draft tokens are deterministic
        if i == last and want > 0:
            block = draft(want)
            q = None if block.logits is None else list(block.logits)
        for _ in range(rounds[i] or want if i < last else 0):
            if len(q) < want and not set(text[begin:]) & set(eos):
                q += emit(i + 1, room - 1 - len(q))
        if i == 0 and last > 0 and q and not set(text[begin:]) & set(eos):
            more = min(tail, windows[last], room - 1 - len(q))
            drawn = draft(more).logits if more > 0 else None
            q += [] if drawn is None else list(drawn)
        key: dict[str, Any] = {"position": begin, "level": i + 1, "round": steps[i], "eos": eos}
        if block.parents:
            parents = [[], *([] for _ in block.tokens)]
            for node, parent in enumerate(block.parents):
                parents[node + 1] = [*parents[parent + 1], block.tokens[node]]
            p = torch.stack([levels[i](text + path)[0][-1] for path in parents])
            pool = None if q is None else torch.stack(q)
            rows = None if q is None else torch.arange(len(q))[None]
            nodes = (torch.tensor([own]) for own in (block.tokens, block.parents))
            r: Any = ps.verify_tree(p[None], *nodes, pool, draft_rows=rows, **key, **sampling)
            p = p[r.rows[0, : int(r.num_emitted)]]
        else:
            p = levels[i](text)[0][begin - 1 :]
            tokens = torch.tensor([text[begin:]], dtype=torch.int64)
            r = ps.verify(p[None], tokens, torch.stack(q)[None] if q else None, **key, **sampling)
        kept, steps[i] = int(r.cache_lengths), steps[i] + 1
        text[begin:] = r.tokens[0, : int(r.num_emitted)].tolist()
        # The latest pass tells its states, but for tokens that the target has read.
        told = range(cached[i] if i == 0 else max(cached[0], cached[i]), kept)
        source[kept:] = [i] * (kept - len(source))
        source[told.start : told.stop] = [i] * len(told)
        cached[i] = kept
        cached[:] = [min(length, kept) for length in cached]
        return list(p[: int(r.num_emitted)])

    while (left := len(prompt) + max_new_tokens - len(text)) > 0 and not (
        set(text[len(prompt) :]) & set(eos)
    ):
        emit(0, left)
    return text[len(prompt) :]
