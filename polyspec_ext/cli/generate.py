"""``python -m polyspec_ext generate``: continues prompts, one as a stream or several as a batch."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..chat import ChatPrompt
from ..command import options
from ..outputs import Output
from ..stats import Stats
from .chain_options import (
    add_chain_options,
    add_sampling_options,
    build_chain,
    planned_chain,
    sampling_of,
)
from .texts import (
    TextPrinter,
    add_prompt_options,
    add_raw,
    drawn_seeds,
    require_text,
    show_prompt,
    summary,
    text_prompt,
    tokenizer_of,
)


def add_command(commands: Any) -> None:
    """Adds ``generate`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "generate",
        help="continue a prompt, or several at once",
        description="Answer or continue prompts with the target's distribution. If the target's "
        "tokenizer has a chat template, a prompt is a question and goes through it; else, or with "
        "--raw, it is continued as it is.",
    )
    sub.add_argument("prompt", nargs="+", type=options.prompt, help="text; '-' reads it from stdin")
    add_raw(sub)
    add_prompt_options(sub)
    sub.add_argument(
        "--json",
        action="store_true",
        help="one JSON object instead of streamed text; of several prompts, with their requests",
    )
    sub.add_argument(
        "--stats",
        action="store_true",
        help="a table of every level's work and acceptance at the end",
    )
    sub.add_argument(
        "--auto",
        action="store_true",
        help="the chain of these models, their copies and drafters without a model that `plan` "
        "recommends for the prompts; planned once, and kept",
    )
    add_chain_options(sub)
    add_sampling_options(sub)
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or one JSON object to
    stdout. Several prompts are one batch, whose texts follow each other."""
    if args.prompt.count("-") > 1:
        raise ValueError("prompt: expected one '-', which is all of stdin, given several")
    if args.raw and args.system is not None:
        raise ValueError("system: expected no --raw beside it, which leaves out the chat template")
    request = sampling_of(args, len(args.prompt))
    asked = [_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    require_text(asked)
    chain = None if args.auto else build_chain(args)
    tokenizer = tokenizer_of(args)
    prompts = [text_prompt(args, tokenizer, text) for text in asked]
    if chain is None:
        chain = planned_chain(args, [prompt.input_ids for prompt in prompts])
    if args.verbose:
        print(chain, file=sys.stderr)
        for prompt in prompts:
            show_prompt(prompt)
    ids = [prompt.input_ids for prompt in prompts]
    if len(ids) > 1:
        _show_all(args, chain.generate(ids, **request), tokenizer, asked, prompts)
        return 0
    stream = chain.stream(ids[0], **request)
    printer = TextPrinter(tokenizer, shown=not args.json)
    for token in stream:
        printer.add(token)
    if args.json:
        (seed,) = stream.seeds
        report = _request(prompts[0], printer.text, printer.tokens, seed, stream.stats)
        print(json.dumps(report, indent=2))
        return 0
    printer.end()
    _summarise(args, stream.seeds, stream.stats)
    return 0


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("prompt: expected UTF-8 text on stdin, given other bytes") from None


def _request(
    prompt: ChatPrompt, text: str, tokens: list[int], seed: int, stats: Stats
) -> dict[str, Any]:
    own = {"prompt": prompt.text, "text": text, "tokens": tokens}
    return {**own, "seed": seed, "stats": stats.to_dict()}


def _summarise(args: argparse.Namespace, seeds: list[int], stats: Stats) -> None:
    """On stderr."""
    print(stats.table() if args.stats else summary(stats), file=sys.stderr)
    if drawn := drawn_seeds(args, seeds):
        print(drawn, file=sys.stderr)


def _show_all(
    args: argparse.Namespace,
    out: Output,
    tokenizer: Any,
    asked: list[str],
    prompts: list[ChatPrompt],
) -> None:
    """The texts of a batch; what was asked tells them apart, as head and tail do with files."""
    requests = []
    for row, prompt, seed, stats in zip(
        out.sequences, prompts, out.seeds, out.requests, strict=True
    ):
        length = len(prompt.input_ids)
        tokens = row[length : length + stats.num_new_tokens].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        requests.append(_request(prompt, text, tokens, seed, stats))
    if args.json:
        print(json.dumps({"requests": requests, "stats": out.stats.to_dict()}, indent=2))
        return
    blocks = [
        f"==> {' '.join(question.split())} <==\n{request['text']}\n"
        for question, request in zip(asked, requests, strict=True)
    ]
    print("\n".join(blocks), end="")
    _summarise(args, out.seeds, out.stats)
