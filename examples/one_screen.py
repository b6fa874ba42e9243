"""Speculative decoding with any number of levels: the whole algorithm on one screen.

`generate` uses public operators only. `ps.Chain` emits the same tokens with the same seed, and
serves batches, trees, hidden states and CUDA graphs as well.
"""

from __future__ import annotations

import torch

import polyspec_ext as ps


def generate(
    levels, windows, prompt, max_new_tokens, *, rounds=(), tail=0, eos=(), rule="token", **sampling
):
    """Continue `prompt` with the distribution of levels[0], the target; the last level drafts.

    levels[i] verifies about windows[i] draft tokens at once, or the tokens of rounds[i] blocks of
    levels[i + 1] (0: any number). The target also verifies `tail` tokens of the drafter.
    """
    text, last = list(prompt), len(levels) - 1
    windows, rounds = [*windows, 0], [*(rounds or [0] * (last - 1)), 1, 0]
    cached = [len(text) - 1] * len(levels)  # cached length: tokens that each level has read
    steps = [0] * len(levels)  # with seed, level and position the key of a level's draws
    for level in levels:
        level.prefill(torch.tensor([text[:-1]], dtype=torch.int64))

    def ended(begin):
        return any(token in eos for token in text[begin:])

    def forward(i, keep):  # logits [1, keep, V], each for the token after one of the last `keep`
        logits = levels[i].forward(torch.tensor([text[cached[i] :]]), keep).clone()
        cached[i] = len(text)
        return logits

    def draft(k):  # append at most k draft tokens; return the logits [1, V] of each
        begin, q = len(text), []
        while len(q) < k and not ended(begin):
            q += forward(last, keep=1).unbind(1)
            key = {"position": len(text), "level": last + 1, "round": steps[last]}
            text.append(int(ps.sample(q[-1], **key, **sampling).tokens))
        steps[last] += len(q) > 0
        return q

    def emit(i, room):  # append 1 to `room` tokens of levels[i]; return the logits [1, V] of each
        begin, q = len(text), []
        for _ in range(rounds[i] or windows[i]):  # 1. the level below fills the window
            if len(q) < min(windows[i], room - 1) and not ended(begin):
                left = room - 1 - len(q)
                q += emit(i + 1, left) if i + 1 < last else draft(min(windows[i], left))
        if i == 0 and q and not ended(begin):
            q += draft(min(tail, windows[last - 1], room - 1 - len(q)))
        p = forward(i, keep=len(q) + 1)  # 2. one pass over the k draft tokens: [1, k + 1, V]
        draft_tokens = torch.tensor([text[begin:]], dtype=torch.int64)
        draft_logits = torch.stack(q, 1) if q else None
        key = {"position": begin, "level": i + 1, "round": steps[i]}
        r = ps.verify(p, draft_tokens, draft_logits, eos=eos, rule=rule, **key, **sampling)
        emitted, steps[i] = int(r.num_emitted), steps[i] + 1
        text[begin:] = r.tokens[0, :emitted].tolist()  # 3. accepted, then corrected or bonus token
        for j in range(i, last + 1):  # 4. rejected tokens leave the caches
            cached[j] = min(cached[j], int(r.cache_lengths))
            levels[j].rollback([cached[j]])
        return p[:, :emitted].unbind(1)  # 5. for the level above, p is q

    while (room := len(prompt) + max_new_tokens - len(text)) > 0 and not ended(len(prompt)):
        emit(0, room)
    return text[len(prompt) :]


@torch.inference_mode()
def main() -> None:
    from polyspec_ext import tiny

    chain = ps.Chain([tiny.path(name) for name in ("target", "middle", "drafter")], window=[5, 3])
    levels, tokenizer = [*chain.levels, chain.drafter.level], chain.levels[0].tokenizer()
    [prompt] = tiny.prompt_ids(["How many legs have 2 cows?"])
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    eos = chain.levels[0].eos_token_ids
    tokens = generate(levels, chain.window, prompt, 64, rounds=chain.rounds, eos=eos, **sampling)
    print(tokenizer.decode(tokens))
    out = chain.generate([prompt], 64, **sampling)
    print("as ps.Chain:", out.sequences[0, len(prompt) :].tolist() == tokens)


if __name__ == "__main__":
    main()
