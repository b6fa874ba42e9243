"""Run a rank of `test_tensor_parallel`: a chain with a target sharded over all ranks.

Run by torchrun with the folder of the models; every rank writes the tokens it saw there.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps

PROMPTS = [[5, 17, 80, 3, 3, 41], [9], [30, 31, 32, 33]]
LENGTHS = [24, 9, 17]
# Greedy and sampled, one prompt and a ragged batch.
RUNS: list[dict[str, Any]] = [
    {"input_ids": PROMPTS[0], "max_new_tokens": 32},
    {"input_ids": PROMPTS[0], "max_new_tokens": 32, "temperature": 1.0, "seed": 3},
    {"input_ids": PROMPTS, "max_new_tokens": LENGTHS},
    {
        "input_ids": PROMPTS,
        "max_new_tokens": LENGTHS,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": [7, 2**63, 1],
    },
]


def texts(*levels: Any) -> list[list[list[int]]]:
    """Return the texts of the chain of `levels`, run by run, without a policy and then with one."""
    made = []
    for policy in (None, ps.policies.Joint()):
        chain = ps.Chain(list(levels), [3, 2], policy=policy)
        for run in RUNS:
            done = chain.generate(**run, eos_token_id=[], pad_token_id=0)
            made.append(done.sequences.tolist())
    return made


def keep_own_time(place: Path, rank: int) -> None:
    """Has this process measure other times than every other one, and remember none of theirs."""
    os.environ["XDG_CACHE_HOME"] = str(place / f"cache{rank}")
    draws, now = random.Random(rank), [0.0]

    def clock() -> float:
        now[0] += draws.random()
        return now[0]

    time.perf_counter = time.thread_time = clock


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    place = Path(sys.argv[1])
    target = AutoModelForCausalLM.from_pretrained(
        place / "target", dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
    rank = torch.distributed.get_rank()
    keep_own_time(place, rank)
    calls = {"passes": 0}

    def count(*_: Any) -> None:
        calls["passes"] += 1

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks must not tell each other tokens")

    for name in ("broadcast", "broadcast_object_list", "all_gather_object", "scatter", "send"):
        setattr(torch.distributed, name, refuse)
    target.model.layers[0].mlp.down_proj.register_forward_hook(count)
    generated = texts(target, place / "middle", place / "drafter")
    with pytest.raises(ValueError, match="sharded"):
        ps.plan([target, place / "drafter"], PROMPTS)
    found = {
        "package": ps.__file__,
        "texts": generated,
        "passes": calls["passes"],
        "world": torch.distributed.get_world_size(),
        "rows": target.model.layers[0].self_attn.q_proj.weight.to_local().shape[0],
    }
    (place / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
