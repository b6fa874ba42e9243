"""Train the shipped chain: ``python -m training.tiny_models --data DIR --output DIR``.

Four stages, each resumable (a finished stage's directory is kept and skipped on the next run):

1. *seed*: a model of the middle's shape, trained on the text.
2. *target*: the seed with identity layers put in between, trained on. Starting from the seed saves
   most of the early training.
3. *middle*: starts as the target without those layers, which keeps much of its distribution, and
   is taught the target's distribution in four rounds, each with a learning rate that rises and
   decays anew.
4. *drafter*: starts as the middle's first layer, and is taught the distribution of the middle,
   which is the level that verifies it and costs a quarter of the target to ask.

The report (`report.json`) holds the held-out loss of each model and its overlap with the target:
E[1 - TV] at temperature 1 over GSM8K's test split, which is the per-token acceptance of speculative
sampling.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.cli.run import run_command
from polyspec_ext.tiny import HEADS

from . import corpus
from .rows import Document, Stream
from .steps import Steps
from .tiny_head import SETTINGS, train_heads

# The seed's layers as they stand in the target; the layers between start as identities.
TARGET_LAYERS = (0, None, None, None, 1, None, None, None, None, 2)
BATCH = 16


def with_layers(model: LlamaForCausalLM, places: Sequence[int | None]) -> LlamaForCausalLM:
    """Return `model` with the layers at `places` of it. None: a new layer that is an identity
    until it has learnt something: with both output projections zero a pre-norm layer adds nothing
    to the residual stream.

    So a target with such layers begins with its seed's distribution; and without them its others
    still work together, which is how its student begins.
    """
    shape = LlamaConfig.from_dict(
        {**model.config.to_dict(), "num_hidden_layers": len(places), "layer_types": None}
    )
    made = LlamaForCausalLM(shape)
    made.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    made.model.norm.load_state_dict(model.model.norm.state_dict())
    for layer, place in zip(made.model.layers, places, strict=True):
        if place is None:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        else:
            layer.load_state_dict(model.model.layers[place].state_dict())
    return made


def fit(
    model: torch.nn.Module,
    documents: Sequence[Document],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: int,
    rate: float,
    name: str,
) -> None:
    """AdamW with warm-up and cosine decay over `tokens` training tokens, forward passes in bf16."""
    data = Stream(documents, corpus.LENGTH, torch.initial_seed())
    count = max(1, tokens // (BATCH * corpus.LENGTH))
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


def text_loss(model: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mean next-token cross-entropy, nats."""
    return lambda ids: model(input_ids=ids, labels=ids).loss


def distillation_loss(
    student: LlamaForCausalLM, teacher: LlamaForCausalLM, kl_weight: float = 1.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Total variation between the two distributions, which is what acceptance loses per token, and
    forward KL, which has a gradient where total variation has none."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits.float().log_softmax(-1)
        given = student(input_ids=ids).logits.float().log_softmax(-1)
        kl = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1).mean()
        variation = 0.5 * (given.exp() - wanted.exp()).abs().sum(-1).mean()
        total: torch.Tensor = kl_weight * kl + variation
        return total

    return loss


@torch.no_grad()
def measure(
    model: LlamaForCausalLM, target: LlamaForCausalLM, documents: list[Document]
) -> dict[str, float]:
    """Measure held-out loss (nats a token) and overlap with the target, E[1 - TV], at temperature
    1."""
    loss = overlap = agree = 0.0
    count = 0
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        ids = document.ids[None]
        p = target(input_ids=ids).logits[0, :-1].float().softmax(-1)
        logq = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        loss -= logq.gather(1, ids[0, 1:, None]).sum().item()
        overlap += torch.minimum(p, logq.exp()).sum().item()
        agree += (p.argmax(-1) == logq.argmax(-1)).sum().item()
        count += document.ids.numel() - 1
    return {
        "held_out_loss": round(loss / count, 4),
        "overlap": round(overlap / count, 4),
        "greedy_agreement": round(agree / count, 4),
        "tokens": count,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="python -m training.tiny_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=options.folder,
        required=True,
        metavar="DIR",
        help="folder with gsm8k_train.jsonl, gsm8k_test.jsonl, tinyshakespeare.txt",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="one model directory per level is written here",
    )
    parser.add_argument(
        "--seed", type=options.SEED, default=0, metavar="S", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=options.number(0),
        metavar="X",
        default=1.0,
        help="multiplies every stage's token count (0.001 for a trial)",
    )
    parser.add_argument(
        "--eagle",
        action="store_const",
        const=HEADS,
        dest="heads",
        help="train EAGLE heads for the target that lies in the output folder, and nothing else",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        choices=list(SETTINGS),
        help="train these heads alone, for that target or the shipped one",
    )
    parser.add_argument("--keep-seed", action="store_true", help="keep the seed stage's directory")
    parser.set_defaults(run=train)
    return parser


def train(args: argparse.Namespace) -> int:
    """Run all four stages, and write the report; or train the EAGLE heads."""
    if args.heads:
        return train_heads(args)
    args.output.mkdir(parents=True, exist_ok=True)

    texts = corpus.texts(args.data)
    if not (args.output / "tokenizer").exists():
        corpus.train_tokenizer(texts).save_pretrained(args.output / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(args.output / "tokenizer")
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    documents = corpus.encode(tokenizer, texts)
    held_out = corpus.encode(tokenizer, corpus.held_out(args.data))
    print(
        f"{sum(d.ids.numel() for d in documents):,} training tokens in {len(documents):,} documents"
    )

    def stage(name: str, make: Callable[[], LlamaForCausalLM]) -> LlamaForCausalLM:
        place = args.output / name
        if not (place / "config.json").exists():
            model = make()
            model.to(torch.bfloat16).save_pretrained(place)
            shutil.copytree(args.output / "tokenizer", place, dirs_exist_ok=True)
        with progress.loading():
            return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    def amount(tokens: float) -> int:
        return int(tokens * args.scale)

    def reseed(name: str) -> None:
        # Per stage, so that a resumed run does what an uninterrupted one does.
        torch.manual_seed(args.seed + zlib.crc32(name.encode()))

    def make_seed() -> LlamaForCausalLM:
        reseed("seed")
        # Multiples of 128 in-features allow quantisation in groups of 128.
        shape = LlamaConfig(
            vocab_size=corpus.VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            **ids,
        )
        model = LlamaForCausalLM(shape)
        fit(model, documents, text_loss(model), amount(5e6), 3e-3, "seed")
        return model

    def make_target() -> LlamaForCausalLM:
        seed = stage("seed", make_seed)
        reseed("target")
        model = with_layers(seed, TARGET_LAYERS)
        fit(model, documents, text_loss(model), amount(11e6), 1.5e-3, "target")
        return model

    target = stage("target", make_target)

    def make_middle() -> LlamaForCausalLM:
        model = with_layers(target, [n for n, own in enumerate(TARGET_LAYERS) if own is not None])
        # Total variation alone is what acceptance loses, but teaches little while the distributions
        # are far apart; so forward KL leads at first.
        rounds = [(1.5e-3, 1.0, 4.5e6), (1e-3, 0.1, 4.5e6), (1.2e-3, 0.1, 8e6), (8e-4, 0.1, 4e6)]
        for number, (rate, kl_weight, tokens) in enumerate(rounds, 1):
            reseed(f"middle {number}")
            loss = distillation_loss(model, target, kl_weight)
            fit(model, documents, loss, amount(tokens), rate, f"middle, round {number}")
        return model

    def make_drafter() -> LlamaForCausalLM:
        teacher = stage("middle", make_middle)
        reseed("drafter")
        model = with_layers(teacher, (0,))
        loss = distillation_loss(model, teacher, 0.3)
        fit(model, documents, loss, amount(8e6), 3e-3, "drafter")
        return model

    levels = {
        "target": target,
        "middle": stage("middle", make_middle),
        "drafter": stage("drafter", make_drafter),
    }
    report = {name: measure(model, target, held_out) for name, model in levels.items()}
    beside = measure(levels["drafter"], levels["middle"], held_out)
    report["drafter"]["overlap_with_middle"] = beside["overlap"]
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    shutil.rmtree(args.output / "tokenizer")
    if not args.keep_seed:
        shutil.rmtree(args.output / "seed", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
