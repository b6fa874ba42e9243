"""The training loop of the shipped models: AdamW over packed documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from .. import progress
from . import corpus

LENGTH = 320  # tokens per training row; a GSM8K problem with its solution has about 200
BATCH = 16


def batches(
    documents: list[torch.Tensor], generator: torch.Generator, batch: int
) -> Iterator[torch.Tensor]:
    """Endless ``[batch, LENGTH]`` batches, repacked in a new order every epoch."""
    while True:
        rows = corpus.pack(documents, LENGTH, generator)
        yield from rows[: rows.shape[0] // batch * batch].split(batch)


def fit(
    model: torch.nn.Module,
    documents: list[torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: int,
    rate: float | Sequence[float],
    name: str,
    batch: int = BATCH,
) -> None:
    """AdamW with warm-up and cosine decay over `tokens` training tokens, forward passes in bf16.

    Args:
        rate: learning rate, or one for each of the modules that `model` is a list of.
    """
    data = batches(documents, torch.Generator().manual_seed(torch.initial_seed()), batch)
    steps = max(1, tokens // (batch * LENGTH))
    modules = [model] if isinstance(rate, float) else list(model.children())
    rates = [rate] if isinstance(rate, float) else rate
    groups = []
    for module, own in zip(modules, rates, strict=True):
        for matrices, decay in ((True, 0.1), (False, 0.0)):
            some = [p for p in module.parameters() if (p.dim() > 1) == matrices]
            groups.append({"params": some, "weight_decay": decay, "lr": own})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    warm = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warm, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / steps))),
    )
    model.train()
    smooth = None
    for _ in (bar := progress.bar(range(steps), desc=name, mininterval=5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
    model.eval()
