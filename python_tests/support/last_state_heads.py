"""Medusa's and Hydra's heads with random weights in their published formats."""

import json
from pathlib import Path
from typing import Any

import torch

import polyspec_ext as ps

Weights = dict[str, torch.Tensor]


def medusa(count: int = 3, blocks: int = 1, hidden: int = 32, vocab: int = 64) -> Weights:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for i in range(count):
        own = torch.randn(hidden, hidden, generator=generator) / 6
        bias = torch.randn(hidden, generator=generator)
        for j in range(blocks):  # the same block, under the keys of each
            found[f"{i}.{j}.linear.weight"], found[f"{i}.{j}.linear.bias"] = own, bias
        found[f"{i}.{blocks}.weight"] = torch.randn(vocab, hidden, generator=generator)
    return found


def hydra(count=3, blocks=1, bias=True, hidden=32, vocab=64) -> Weights:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found = {}
    for i in range(count):
        for key in ("linear", "res_connection"):
            found[f"hydra_mlp.{i}.0.{key}.weight"] = normal(hidden, (i + 2) * hidden) / 6
            found[f"hydra_mlp.{i}.0.{key}.bias"] = normal(hidden)
        for j in range(1, blocks):
            found[f"hydra_mlp.{i}.{j}.linear.weight"] = normal(hidden, hidden) / 6
            found[f"hydra_mlp.{i}.{j}.linear.bias"] = normal(hidden)
        found[f"hydra_lm_head.{i}.weight"] = normal(vocab, hidden)
        if bias:
            found[f"hydra_lm_head.{i}.bias"] = normal(vocab)
    return found


KINDS: dict[str, Any] = {"medusa": (ps.Medusa, medusa), "hydra": (ps.Hydra, hydra)}


def save(kind: str, found: dict[str, Any], place: Path, form: str = "mlp") -> Path:
    """`form`: of Hydra's heads."""
    place.mkdir(exist_ok=True)
    torch.save(found, place / f"{kind}_lm_head.pt")
    config = {"medusa_num_heads": 5} if kind == "medusa" else {"hydra_head_arch": form}
    (place / "config.json").write_text(json.dumps(config))
    return place


def drafter(kind, target, place, count=3, tree=None, **more) -> Any:
    """Return a drafter of so many heads. `more`: of `medusa` and `hydra`."""
    drafts, make = KINDS[kind]
    return drafts.from_pretrained(save(kind, make(count, **more), place), target, tree=tree)
