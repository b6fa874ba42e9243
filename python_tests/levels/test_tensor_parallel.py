"""A target sharded over two processes: ranks agree on tokens, since draws are keyed (C3)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make, rough
from tensor_parallel_worker import PROMPTS, RUNS, texts

import polyspec_ext as ps

distributed = pytest.importorskip("transformers.distributed")
WORKER = Path(__file__).parents[1] / "support" / "tensor_parallel_worker.py"


def torchrun(place: Path, processes: int) -> list[dict[str, Any]]:
    """Run the worker on `processes` gloo ranks, with the package imported here."""
    places = [str(Path(ps.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(WORKER),
            str(place),
        ],
        check=True,
        timeout=300,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        },
    )
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(processes)]


def near_ties(model: Any, text: list[int], other: list[int], start: int) -> bool:
    """The first token in which two greedy texts differ was a tie but for rounding."""
    at = next(i for i in range(start, len(text)) if text[i] != other[i])
    with torch.no_grad():
        top = model(torch.tensor([text[:at]]), use_cache=False).logits[0, -1].topk(2).values
    return float(top[0] - top[1]) < 1e-4


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_two_ranks_agree_and_say_what_one_process_says(tmp_path: Path) -> None:
    target = make("llama")
    drafts = rough(target, 0.05), make("llama", 1, seed=2)
    for model, name in zip((target, *drafts), ("target", "middle", "drafter"), strict=True):
        model.save_pretrained(tmp_path / name)
    ranks = torchrun(tmp_path, 2)
    first, second = ranks
    assert first["package"] == second["package"] == ps.__file__
    assert first["world"] == 2
    assert first["rows"] * 2 == target.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert first["texts"] == second["texts"]
    assert first["passes"] == second["passes"] > 0
    # Drafts as they are below a sharded target: packed.
    alone = texts(target, *(ps.HuggingFaceLevel(draft, pack=True) for draft in drafts))
    for number, (run, got) in enumerate(zip(RUNS * 2, first["texts"], strict=True)):
        greedy = run.get("temperature", 0) == 0
        if number >= len(RUNS) and not greedy:
            continue  # the policy's windows follow times here
        for prompt, text, other in zip(PROMPTS, got, alone[number], strict=False):
            if text != other:  # sums over ranks round differently
                assert greedy
                assert near_ties(target, text, other, len(prompt))
