"""A chain of three models: an answer as it comes, and each level's part."""

from __future__ import annotations

import polyspec_ext as ps
from polyspec_ext import tiny


def main() -> None:
    models = [tiny.path(name) for name in ("target", "middle", "drafter")]
    chain = ps.Chain(models, window=[5, 3])
    print(chain)
    question = {"role": "user", "content": "Tom has 3 bags of 8 apples. How many in all?"}
    answer = chain.chat([question], max_new_tokens=48, temperature=0.7, top_p=0.9, seed=0)
    for piece in answer:
        print(piece, end="", flush=True)
    print()
    for level in answer.stats.levels:
        print(f"{level.name}: {level.num_forward_passes} passes, {level.seconds:.2f} s", end="")
        if level.num_drafts:
            print(f", {level.mean_acceptance_length:.2f} tokens per verification", end="")
        print()


if __name__ == "__main__":
    main()
