"""How far do the logits of a target drift with an 8-bit cache of keys and values?

    python examples/int8_cache.py Qwen/Qwen2.5-Coder-0.5B-Instruct --text book.txt --tokens 4096

A text is read twice in pieces, with the cache as the model computes it and in 8 bits. Printed are
the bytes of a token, the Kullback-Leibler divergence of the next token's distribution, and how
often the most likely token is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyspec_ext import tiny
from polyspec_ext.kv_cache import RollbackCache


@torch.inference_mode()
def log_probabilities(
    model: Any, ids: torch.Tensor, piece: int, cache: RollbackCache
) -> Iterator[torch.Tensor]:
    for tokens in ids.split(piece):
        given = cache.inputs(len(tokens))
        logits = model(tokens[None], past_key_values=cache, use_cache=True, **given).logits[0]
        yield logits.float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default=str(tiny.path("target")))
    parser.add_argument("--text", type=Path, help="default: a few questions")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--piece", type=int, default=64, help="tokens of a pass")
    args = parser.parse_args()

    text = " ".join(tiny.QUESTIONS) if args.text is None else args.text.read_text()
    ids = AutoTokenizer.from_pretrained(args.target)(text, return_tensors="pt").input_ids[0]
    ids = ids[: args.tokens]
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="bfloat16").eval()
    caches = [RollbackCache.for_model(model, 1, kv_bits=bits) for bits in (None, 8)]
    both = [log_probabilities(model, ids, args.piece, cache) for cache in caches]
    divergence, same = [], []
    for exact, rounded in zip(*both, strict=True):
        divergence.append((exact.exp() * (exact - rounded)).sum(-1))
        same.append(exact.argmax(-1) == rounded.argmax(-1))
    for bits, cache in zip(("bfloat16", "8 bits"), caches, strict=True):
        states = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        size = sum(x.shape[1] * x.shape[3] * x.element_size() for x in states)
        print(f"{bits}: {size} bytes a token")
    drift, agree = torch.cat(divergence), torch.cat(same).float()
    print(f"{len(ids)} tokens: divergence {drift.mean():.2g} nats, at most {drift.max():.2g}; ")
    print(f"the most likely token is the same for {agree.mean():.2%}")


if __name__ == "__main__":
    main()
