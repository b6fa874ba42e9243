"""A user's drafter: one method, at the end of a chain of three levels."""

from __future__ import annotations

import polyspec_ext as ps
from polyspec_ext import tiny


class Echo:
    """Proposes the token that followed the last token at its earlier occurrence."""

    name = "echo"

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        *before, last = list(context.tokens)
        places = [n for n, token in enumerate(before) if token == last]
        begin = places[-1] + 1 if places else len(before)
        return ps.Proposal(before[begin : begin + k])  # at most k; none is fine

    def fork(self) -> Echo:
        """One per prompt of a batch; without it a chain takes one prompt at a time."""
        return Echo()


def main() -> None:
    (prompt,) = tiny.prompt_ids(["How many legs have 2 cows?"])
    chain = ps.Chain([tiny.path("target"), tiny.path("middle"), Echo()], window=[6, 3])
    out = chain.generate(prompt, max_new_tokens=48)
    for level in out.stats.levels[:-1]:
        print(f"{level.name}: {level.draft_acceptance_rate:.0%} of its draft tokens stand")
    plain = ps.Chain([tiny.path("target")]).generate(prompt, max_new_tokens=48)
    print("as plain decoding:", out.sequences.equal(plain.sequences))


if __name__ == "__main__":
    main()
