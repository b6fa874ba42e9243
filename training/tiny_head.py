"""Heads for the shipped target: ``python -m training.tiny_models --eagle``, behind the other
stages, or ``--heads``: `training`, in which an EAGLE-2 head has the shipped drafter's weights to
begin with. A run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from polyspec_ext import progress
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.tiny import path

from . import corpus
from .corpus import LENGTH
from .rows import Stream
from .session import HeadTraining, Settings

TOKENS = 1_600_000  # of training
EPOCHS = 2
DRAFT_VOCAB = 1536  # ids that the EAGLE-3 head knows: 98.5 % of GSM8K's tokens
_BLOCKS = Settings(
    draft_vocab=DRAFT_VOCAB, block_size=8, layers=2, epochs=4, length=LENGTH, batch=2, rate=1.5e-3
)
# Learning rates: what begins as a trained model is easily lost.
SETTINGS = {
    "eagle2": Settings(version=1, steps=2, epochs=EPOCHS, length=LENGTH, batch=4, rate=2e-4),
    "eagle3": Settings(draft_vocab=DRAFT_VOCAB, epochs=EPOCHS, length=LENGTH, batch=4, rate=1e-3),
    "mtp": Settings(version=0, epochs=4, length=LENGTH, batch=2, rate=5e-4),
    "dflash": _BLOCKS,
    "dspark": replace(_BLOCKS, markov_rank=64),
}


@torch.no_grad()
def begin_with(head: EagleNetwork, drafter: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    """Begin an EAGLE-2 head as the shipped drafter, a model of one layer of the same shape, and
    without the target's states: most of what it has to learn is known then.

    Its layer has no norm in front and none behind, so both are folded into its products with the
    mean size of what they would norm.

    Args:
        tokens: ``[B, T]``, text.
    """
    (own,), final = drafter.model.layers, drafter.model.norm.weight
    layer: Any = head.layers[0]
    width, attention = head.config.hidden_size, own.self_attn
    states = drafter(input_ids=tokens, output_hidden_states=True).hidden_states[0]
    before = own.input_layernorm.weight
    layer.mlp.load_state_dict(own.mlp.state_dict())
    layer.post_attention_layernorm.load_state_dict(own.post_attention_layernorm.state_dict())
    layer.self_attn.o_proj.load_state_dict(attention.o_proj.state_dict())

    def size(x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean(-1).sqrt().mean()

    out: list[torch.Tensor] = []
    handle = drafter.model.norm.register_forward_pre_hook(lambda _, given: out.append(given[0]))
    drafter(input_ids=tokens)
    handle.remove()
    head.fc.weight.zero_()
    # The residual stream is scaled as the final norm would.
    scale = final / size(out[0])
    for key in ("q_proj", "k_proj", "v_proj"):
        product = getattr(attention, key).weight * (before / size(states) / scale)
        getattr(layer.self_attn, key).weight.copy_(product)
    layer.self_attn.o_proj.weight.mul_(scale[:, None])
    layer.mlp.down_proj.weight.mul_(scale[:, None])
    ratio = size(out[0] * scale) / size(out[0])
    layer.post_attention_layernorm.weight.mul_(ratio / scale)
    head.fc.weight[:, :width] = torch.diag(scale)


def train_heads(args: argparse.Namespace) -> int:
    """Train heads for the target that lies in the output folder, or else for the shipped one, and
    print their report."""

    def place_of(name: str) -> Path:
        place: Path = args.output / name
        return place if place.exists() else path(name)

    def load(name: str) -> LlamaForCausalLM:
        with progress.loading():
            model = AutoModelForCausalLM.from_pretrained(place_of(name), dtype=torch.float32)
        return model.eval().requires_grad_(False)

    target, drafter = load("target"), load("drafter")
    tokenizer = AutoTokenizer.from_pretrained(place_of("target"))
    documents = corpus.encode(tokenizer, corpus.texts(args.data))
    held_out = corpus.encode(tokenizer, corpus.held_out(args.data))
    sample = Stream(documents, LENGTH, args.seed).rows(0, 8).tokens
    begin = functools.partial(begin_with, drafter=drafter, tokens=sample)
    report_file = args.output / "report.json"
    report = json.loads(report_file.read_text()) if report_file.exists() else {}
    for name in args.heads:
        place = args.output / name
        settings = replace(SETTINGS[name], seed=args.seed)
        training = HeadTraining(
            target,
            documents,
            held_out,
            place,
            settings,
            resume=(place / "training" / "run.pt").exists(),
            begin=begin if name == "eagle2" else None,
        )
        training.run(int(TOKENS * args.scale / settings.epochs))
        report[name] = training.report()
        shutil.rmtree(place / "training")
        (place / "report.json").unlink()
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in args.heads}, indent=2))
    return 0
