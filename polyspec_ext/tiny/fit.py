"""The training loop of the shipped models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import progress
from ..training.rows import Document, Stream
from ..training.steps import Steps

LENGTH = 320  # tokens per training row; a GSM8K problem with its solution has about 200
BATCH = 16


def fit(
    model: torch.nn.Module,
    documents: Sequence[Document],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: int,
    rate: float,
    name: str,
) -> None:
    """AdamW with warm-up and cosine decay over `tokens` training tokens, forward passes in bf16."""
    data = Stream(documents, LENGTH, torch.initial_seed())
    count = max(1, tokens // (BATCH * LENGTH))
    steps = Steps(model.parameters(), rate, warm=max(1, min(100, count // 10)), stay=0.0)
    model.train()
    smooth = None
    for i in (bar := progress.bar(range(count), desc=name, mininterval=5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(data.rows(i * BATCH, BATCH).tokens)
        steps.step(loss, i / count)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
    model.eval()
