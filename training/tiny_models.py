"""Train the shipped chain: ``python -m training.tiny_models --data DIR --output DIR``.

The text has two public sources: GSM8K's training split (MIT) and Tiny Shakespeare (public domain).

Four stages, each resumable (a finished stage's directory is kept and skipped on the next run):

1. *seed*: a model of the middle's shape, trained on the text.
2. *target*: the seed with identity layers inserted, trained further. Starting from the seed saves
   most of the early training.
3. *middle*: starts as the target without the inserted layers, which keeps much of its distribution,
   and is taught the target's distribution in four rounds; the learning rate rises and decays in
   each.
4. *drafter*: starts as the middle's first layer, and is taught the distribution of the middle,
   which verifies it and costs a quarter of the target.

The report (`report.json`) has the held-out loss of each model and its overlap with the target,
E[1 - TV] at temperature 1 over GSM8K's test split: the acceptance of speculative sampling.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from polyspec_ext import progress
from polyspec_ext.cli import options, run_command
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.tiny import CHAT_TEMPLATE, HEADS, path, prompt_of

from .heads import Settings
from .session import HeadTraining, Steps
from .texts import Document, Stream

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 2048
LENGTH = 320  # tokens per training row; a GSM8K problem with its solution has about 200
_CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations; without them a solution is prose

TOKENS = 1_600_000  # training tokens of a head
EPOCHS = 2
DRAFT_VOCAB = 1536  # ids of the EAGLE-3 head: 98.5 % of GSM8K's tokens
_BLOCKS = Settings(
    draft_vocab=DRAFT_VOCAB, block_size=8, layers=2, epochs=4, length=LENGTH, batch=2, rate=1.5e-3
)
# Heads with trained initial weights have low learning rates, to preserve them.
SETTINGS = {
    "eagle2": Settings(version=1, steps=2, epochs=EPOCHS, length=LENGTH, batch=4, rate=2e-4),
    "eagle3": Settings(draft_vocab=DRAFT_VOCAB, epochs=EPOCHS, length=LENGTH, batch=4, rate=1e-3),
    "mtp": Settings(version=0, epochs=4, length=LENGTH, batch=2, rate=5e-4),
    "dflash": _BLOCKS,
    "dspark": replace(_BLOCKS, markov_rank=64),
}


def learnt_texts(folder: Path) -> list[str]:
    return gsm8k(folder / "gsm8k_train.jsonl") + shakespeare(folder / "tinyshakespeare.txt")


def gsm8k(path: Path) -> list[str]:
    """Return documents ``Question: ...\\nAnswer: ...\\n#### n`` of a GSM8K ``.jsonl`` file."""
    documents = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = _CALCULATOR.sub("", row["answer"]).strip()
        documents.append(f"{prompt_of(row['question'])} {answer}")
    return documents


def shakespeare(path: Path) -> list[str]:
    """Return passages of six consecutive speeches, split at the blank lines between speakers."""
    parts = path.read_text(encoding="utf-8").split("\n\n")
    return ["\n\n".join(parts[i : i + 6]).strip() for i in range(0, len(parts), 6)]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCAB_SIZE` ids; digits stay apart so that arithmetic is
    learnable."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[Document]:
    rows = tokenizer(documents)["input_ids"]
    return [Document(torch.tensor([*row, tokenizer.eos_token_id])) for row in rows]


@torch.no_grad()
def begin_with(head: EagleNetwork, drafter: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    """Initialise an EAGLE-2 head with the weights of the shipped drafter, a one-layer model of the
    same shape, and zero weight for the target's states, so that most is learnt at the start.

    The head's layer lacks the input norm and the final norm, so both are folded into its products,
    by the mean size of their inputs over the text `tokens` ``[B, T]``."""
    (source,), final = drafter.model.layers, drafter.model.norm.weight
    layer: Any = head.layers[0]
    width, attention = head.config.hidden_size, source.self_attn
    states = drafter(input_ids=tokens, output_hidden_states=True).hidden_states[0]
    before = source.input_layernorm.weight
    layer.mlp.load_state_dict(source.mlp.state_dict())
    layer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
    layer.self_attn.o_proj.load_state_dict(attention.o_proj.state_dict())

    def size(x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean(-1).sqrt().mean()

    out: list[torch.Tensor] = []
    handle = drafter.model.norm.register_forward_pre_hook(lambda _, args: out.append(args[0]))
    drafter(input_ids=tokens)
    handle.remove()
    head.fc.weight.zero_()
    # Scale the residual stream like the final norm.
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
    """Train heads for the target in the output folder, else for the shipped target, and print
    their report."""

    def place_of(name: str) -> Path:
        folder: Path = args.output / name
        return folder if folder.exists() else path(name)

    def load(name: str) -> LlamaForCausalLM:
        with progress.loading():
            model = AutoModelForCausalLM.from_pretrained(place_of(name), dtype=torch.float32)
        return model.eval().requires_grad_(False)

    target, drafter = load("target"), load("drafter")
    tokenizer = AutoTokenizer.from_pretrained(place_of("target"))
    documents = encode(tokenizer, learnt_texts(args.data))
    held_out = encode(tokenizer, gsm8k(args.data / "gsm8k_test.jsonl")[:300])
    sample = Stream(documents, LENGTH, args.seed).rows(0, 8).tokens
    begin = functools.partial(begin_with, drafter=drafter, tokens=sample)
    report_file = args.output / "report.json"
    report = json.loads(report_file.read_text()) if report_file.exists() else {}
    for name in args.heads:
        folder = args.output / name
        settings = replace(SETTINGS[name], seed=args.seed)
        extra: dict[str, Any] = {"begin": begin} if name == "eagle2" else {}
        extra["resume"] = (folder / "training" / "run.pt").exists()
        training = HeadTraining(target, documents, held_out, folder, settings, **extra)
        training.run(int(TOKENS * args.scale / settings.epochs))
        report[name] = training.report()
        shutil.rmtree(folder / "training")
        (folder / "report.json").unlink()
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in args.heads}, indent=2))
    return 0


BATCH = 16
# By stage: the stage that initialises and teaches it; the layers to copy from it (None: an inserted
# identity layer); and rounds of learning: rate, weight of forward KL (None: from text), and tokens.
STAGES: dict[str, tuple[str | None, tuple[int | None, ...], tuple[Any, ...]]] = {
    "seed": (None, (), ((3e-3, None, 5e6),)),
    "target": (
        "seed",
        (0, None, None, None, 1, None, None, None, None, 2),
        ((1.5e-3, None, 11e6),),
    ),
    # Total variation is the loss of acceptance, but teaches little while the distributions are far
    # apart, so forward KL has more weight at first.
    "middle": (
        "target",
        (0, 4, 9),
        ((1.5e-3, 1.0, 4.5e6), (1e-3, 0.1, 4.5e6), (1.2e-3, 0.1, 8e6), (8e-4, 0.1, 4e6)),
    ),
    "drafter": ("middle", (0,), ((3e-3, 0.3, 8e6),)),
}


def with_layers(model: LlamaForCausalLM, places: Sequence[int | None]) -> LlamaForCausalLM:
    """Return a model with the layers of `model` at `places`. None: a new layer that starts as an
    identity: with both output projections zero a pre-norm layer adds nothing to the residual
    stream.

    So the target starts with its seed's distribution. Its other layers still work without the new
    layers, and its student starts from them.
    """
    shape = LlamaConfig.from_dict(
        {**model.config.to_dict(), "num_hidden_layers": len(places), "layer_types": None}
    )
    result = LlamaForCausalLM(shape)
    result.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    result.model.norm.load_state_dict(model.model.norm.state_dict())
    for layer, number in zip(result.model.layers, places, strict=True):
        if number is None:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        else:
            layer.load_state_dict(model.model.layers[number].state_dict())
    return result


def fit(
    model: torch.nn.Module,
    documents: Sequence[Document],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: int,
    rate: float,
    name: str,
) -> None:
    """Train with AdamW, warm-up and cosine decay over `tokens` training tokens, in bf16."""
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


def loss_of(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, kl_weight: float | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the loss function of a row. Without `kl_weight`: mean cross-entropy of the next token
    in nats. With it: total variation from the teacher's distribution, the loss of acceptance per
    token, and forward KL, which has a gradient where total variation has none."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        if teacher is None or kl_weight is None:
            of_text: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return of_text
        with torch.no_grad():
            log_p = teacher(input_ids=ids).logits.float().log_softmax(-1)
        log_q = model(input_ids=ids).logits.float().log_softmax(-1)
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()
        variation = 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1).mean()
        total: torch.Tensor = kl_weight * kl + variation
        return total

    return loss


@torch.no_grad()
def measure(
    model: LlamaForCausalLM, target: LlamaForCausalLM, documents: list[Document]
) -> dict[str, float]:
    """Measure held-out loss (nats per token) and overlap with the target, E[1 - TV], at temperature
    1."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        ids = document.ids[None]
        p = target(input_ids=ids).logits[0, :-1].float().softmax(-1)
        logq = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        sums[0] -= logq.gather(1, ids[0, 1:, None]).sum()
        sums[1] += torch.minimum(p, logq.exp()).sum()
        sums[2] += (p.argmax(-1) == logq.argmax(-1)).sum()
        count += len(p)
    names = ("held_out_loss", "overlap", "greedy_agreement")
    means = (round(x / count, 4) for x in sums.tolist())
    return {**dict(zip(names, means, strict=True)), "tokens": count}


def make_parser() -> argparse.ArgumentParser:
    name, raw = "python -m training.tiny_models", argparse.RawDescriptionHelpFormatter
    parser = options.Parser(prog=name, description=__doc__, formatter_class=raw)
    needed: dict[str, Any] = {"required": True, "metavar": "DIR"}
    text = "folder with gsm8k_train.jsonl, gsm8k_test.jsonl, tinyshakespeare.txt"
    parser.add_argument("--data", type=options.folder, help=text, **needed)
    text = "one model directory per level is written here"
    parser.add_argument("--output", type=Path, help=text, **needed)
    options.add(parser, "--seed", options.SEED, 0, "S")
    text = "multiplies every stage's token count; 0.001 for a trial"
    options.add(parser, "--scale", options.number(0), 1.0, "X", text)
    text = "train EAGLE heads for the target that lies in the output folder, and nothing else"
    eagle: dict[str, Any] = {"action": "store_const", "const": HEADS, "dest": "heads"}
    parser.add_argument("--eagle", help=text, **eagle)
    text = "train these heads alone, for that target or the shipped one"
    parser.add_argument("--heads", nargs="+", choices=list(SETTINGS), help=text)
    parser.add_argument("--keep-seed", action="store_true", help="keep the seed stage's directory")
    parser.set_defaults(run=train)
    return parser


def train(args: argparse.Namespace) -> int:
    """Run all four stages, and write the report; or train the EAGLE heads."""
    if args.heads:
        return train_heads(args)
    args.output.mkdir(parents=True, exist_ok=True)

    texts = learnt_texts(args.data)
    if not (args.output / "tokenizer").exists():
        train_tokenizer(texts).save_pretrained(args.output / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(args.output / "tokenizer")
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    # Multiples of 128 in-features allow quantisation in groups of 128.
    shape = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in names},
    )
    documents = encode(tokenizer, texts)
    held_out = encode(tokenizer, gsm8k(args.data / "gsm8k_test.jsonl")[:300])
    count = sum(len(document.ids) for document in documents)
    print(f"{count:,} training tokens in {len(documents):,} documents")

    @functools.cache
    def stage(name: str) -> LlamaForCausalLM:
        folder = args.output / name
        if not (folder / "config.json").exists():
            begin, layers, rounds = STAGES[name]
            teacher, model = begin and stage(begin), None
            for number, (rate, kl_weight, tokens) in enumerate(rounds, 1):
                label = name if len(rounds) == 1 else f"{name} {number}"
                # Per round, so that a resumed run equals an uninterrupted run.
                torch.manual_seed(args.seed + zlib.crc32(label.encode()))
                if model is None:
                    model = with_layers(teacher, layers) if teacher else LlamaForCausalLM(shape)
                loss = loss_of(model, teacher, kl_weight)
                fit(model, documents, loss, int(tokens * args.scale), rate, label)
            assert model is not None
            model.to(torch.bfloat16).save_pretrained(folder)
            shutil.copytree(args.output / "tokenizer", folder, dirs_exist_ok=True)
        with progress.loading():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    levels = {name: stage(name) for name in ("target", "middle", "drafter")}
    target = levels["target"]
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
