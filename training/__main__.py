"""``python -m training eagle3|mtp|dflash``: train a drafter that reads a target's states."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from polyspec_ext import progress
from polyspec_ext.cli import help_of, options, run_command
from polyspec_ext.cli.generate import tokenizer_of
from polyspec_ext.levels import HuggingFaceLevel, load
from polyspec_ext.levels.stateful import StatefulLevel

from .heads import Settings
from .session import HeadTraining
from .texts import documents_of, read_texts, split

_TOKENS = 1_000_000
_KINDS = {  # kind: name, and publisher of its file format
    "eagle3": ("an EAGLE-3 head", "SafeAILab publishes heads"),
    "mtp": ("a multi-token prediction head", "models with such heads name its tensors"),
    "dflash": ("a DFlash or DSpark drafter", "speculators publishes drafters"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = options.Parser(prog="python -m training", description="Train a drafter for a target.")
    parser.set_defaults(run=help_of(parser))
    kinds = parser.add_subparsers(metavar="KIND")
    for kind, (about, form) in _KINDS.items():
        sub = kinds.add_parser(
            kind,
            help=f"{about}, from texts or from the target's own answers",
            description=f"Train {about} for a causal language model on the CPU. The output "
            f"directory holds it as {form}, so that a chain loads it, and its folder "
            "'training' what a resumed run needs.",
        )
        _add_options(sub, kind)
        sub.set_defaults(run=train, kind=kind)
    return parser


def _add_options(sub: argparse.ArgumentParser, kind: str) -> None:
    sub.add_argument(
        "--target", metavar="MODEL", required=True, help="model directory, id or GGUF file"
    )
    sub.add_argument("--output", type=Path, metavar="DIR", required=True, help="of the head")
    data, run, shape, learning = map(sub.add_argument_group, ("texts", "run", "head", "learning"))
    files: dict[str, Any] = {"type": Path, "metavar": "FILE", "nargs": "+", "default": []}
    text = 'JSON lines (.jsonl) with "question" and "answer", with "messages" or with "text", or '
    text += "plain text; a question without an answer is answered by the target first"
    data.add_argument("--texts", help=text, **files)
    options.add_count(data, "--max-new-tokens", 256, "of an answer of the target's")
    options.add(data, "--temperature", options.number(0), 0.8, "T", "of the target's answers")
    text = f"end after the target has read so many (default: {_TOKENS:,}, without --minutes)"
    options.add_count(run, "--tokens", None, text)
    options.add(run, "--minutes", options.number(0), None, "M", "end after so many, in all runs")
    options.add_flag(run, "--resume", "go on with the run that --output holds")
    options.share(run, "--threads")
    if kind != "mtp":
        options.add_count(shape, "--draft-vocab", 8192, "most frequent ids, which the head knows")
        options.add_count(shape, "--inner", None, "width of the MLP (default: the target's)")
    if kind == "dflash":
        options.add_count(shape, "--block-size", 8, "tokens of a block")
        options.add_count(shape, "--layers", 2, "of the drafter")
        text = "inner width of a DSpark's Markov head (default: none, a DFlash)"
        options.add_count(shape, "--markov-rank", None, text)
    else:
        options.add_count(shape, "--steps", 3, "of a draft, that are learnt")
    options.add_count(learning, "--epochs", 3, "how often a row is learnt from")
    options.add_count(learning, "--length", 320, "tokens of a row")
    options.add_count(learning, "--batch", 2, "rows of a step")
    options.add_count(learning, "--block", 16, "rows that the target reads at a time")
    rate = 5e-4 if kind == "mtp" else 1e-3  # lower, to preserve a head's trained initial weights
    options.add(learning, "--rate", options.number(0), rate, "R", "highest learning rate")
    text = "of the first weights, the answers and the order of texts"
    options.add(learning, "--seed", options.SEED, 0, "S", text)


def train(args: argparse.Namespace) -> int:
    """Train a head and print its report."""
    if not args.texts:
        raise ValueError("texts: expected files of texts or prompts, given none")
    texts = read_texts(args.texts)
    level = load(args.target, "auto", blocks=False, name="target")
    if not isinstance(level, HuggingFaceLevel | StatefulLevel):
        raise ValueError(
            f"target: expected a causal language model, given {type(level.model).__name__}"
        )
    model = level.model.requires_grad_(False)
    request = {key: getattr(args, key) for key in ("max_new_tokens", "temperature", "seed")}
    answers = args.output / "training" / "answers.jsonl"
    documents = documents_of(texts, tokenizer_of(args), model, answers, **request)
    learnt, held_out = split(documents, args.length)
    names = {field.name for field in fields(Settings)}
    chosen = {key: x for key, x in vars(args).items() if key in names and x is not None}
    if args.kind == "mtp":
        chosen["version"] = 0
    else:
        chosen["draft_vocab"] = min(args.draft_vocab, level.vocab_size)
    settings = Settings(**chosen)
    training = HeadTraining(model, learnt, held_out, args.output, settings, resume=args.resume)
    tokens = args.tokens if args.tokens or args.minutes else _TOKENS
    training.run(tokens, args.minutes)
    progress.note("measuring acceptance on the texts that were held out")
    print(json.dumps(training.report(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
