"""Texts of vLLM with the plug-in have exactly the target's law, with every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_engines as engines

NUMBER = 600
# Temperature, top-k, top-p and min-p of requests in a batch.
PARAMETERS = (
    (0.8, 0, 1.0, 0.0),
    (1.5, 6, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.2, 0, 1.0, 0.1),
    (1.0, 8, 0.9, 0.05),
)


def probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Process logits [n, V] as vLLM does: temperature, min-p, top-k, top-p."""
    p = torch.softmax(logits / temperature, -1)
    p = torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[:, -1:], p, 0)
    p = p / p.sum(-1, keepdim=True)
    ordered, order = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    p = torch.zeros_like(p).scatter(-1, order, torch.where(before < top_p, ordered, 0))
    return p / p.sum(-1, keepdim=True)


def mixed(engine: Any, number: int) -> tuple[list[list[list[int]]], int]:
    """Return texts for each of `PARAMETERS`, in one batch, and the number of accepted drafts."""
    import vllm

    given = [
        vllm.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_tokens=engines.LENGTH,
            detokenize=False,
        )
        for temperature, top_k, top_p, min_p in PARAMETERS
    ]
    texts = engines.texts(engine, [engines.PROMPT] * (number * len(given)), given * number)
    accepted = engines.counters(engine).get("vllm:spec_decode_num_accepted_tokens", 0)
    return [texts[i :: len(given)] for i in range(len(given))], accepted


@pytest.mark.parametrize(
    ("speculation", "rule"),
    [
        *((name, "token") for name in engines.SPECULATION),
        ("drafts", "block"),
        ("two levels", "block"),
        ("three levels", "block"),
    ],
)
def test_mixed_parameters_have_their_laws(
    models: Path, law: engines.Law, speculation: str, rule: str
) -> None:
    texts, accepted = engines.run(
        mixed, NUMBER, **engines.configuration(models, speculation, rule=rule)
    )
    for row, drawn in zip(PARAMETERS, texts, strict=True):
        wanted = law.of(lambda rows, row=row: probabilities(rows, *row))
        assert engines.g_test(wanted, drawn) > 1e-6, row
    assert (accepted > 0) == (speculation != "none")
