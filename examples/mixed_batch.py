"""Generate a batch of prompts of different lengths, each row with separate parameters.

A row's text depends on the row's prompt, parameters and seed alone: the second one is drawn again
by itself, and is the same.
"""

from __future__ import annotations

import polyspec_ext as ps
from polyspec_ext import tiny


def main() -> None:
    chain = ps.Chain([tiny.path("target"), tiny.path("drafter")], window=[5])
    prompts = tiny.prompt_ids(["How many legs have 2 cows?", "What are 3 plus 4?", "Why?"])
    out = chain.generate(
        prompts,
        max_new_tokens=[16, 24, 8],
        temperature=[0.0, 0.8, 1.0],
        top_p=[1.0, 0.9, 0.95],
        seed=[1, 2, 3],
    )
    for row, stats in enumerate(out.requests):
        print(f"row {row}: {stats.num_new_tokens} tokens, seed {out.seeds[row]}")
    end = len(prompts[1]) + out.requests[1].num_new_tokens
    alone = chain.generate(prompts[1], 24, temperature=0.8, top_p=0.9, seed=2).sequences
    print("row 1 alone has the same tokens:", alone[0].equal(out.sequences[1, :end]))


if __name__ == "__main__":
    main()
