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
import functools
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.cli.entry import run_command
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.tiny import HEADS, path

from . import corpus
from .corpus import LENGTH
from .heads import Settings
from .session import HeadTraining, Steps
from .texts import Document, Stream

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
    options.add(parser, "--seed", options.SEED, 0, "S")
    about = "multiplies every stage's token count; 0.001 for a trial"
    options.add(parser, "--scale", options.number(0), 1.0, "X", about)
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
