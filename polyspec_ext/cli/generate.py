"""``python -m polyspec_ext generate``: continues prompts, one as a stream or several as a batch."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from transformers import AutoTokenizer

from .. import tiny
from ..outputs import Output
from ..stats import Stats
from . import options
from .chain_options import add_chain_options, add_sampling_options, build_chain


def add_command(commands: Any) -> None:
    """Adds ``generate`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "generate",
        help="continue a prompt, or several at once",
        description="Continue prompts with the target's distribution.",
    )
    sub.add_argument(
        "prompt",
        nargs="+",
        type=options.prompt,
        help="text; '-' reads it from stdin. The shipped chain answers it as a question",
    )
    sub.add_argument(
        "--raw", action="store_true", help="do not wrap the prompt into 'Question: ...\\nAnswer:'"
    )
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
    add_chain_options(sub)
    add_sampling_options(sub)
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or one JSON object to
    stdout. Several prompts are one batch, whose texts follow each other."""
    if args.prompt.count("-") > 1:
        raise ValueError("prompt: expected one '-', which is all of stdin, given several")
    chain = build_chain(args)
    shipped = args.target is None
    tokenizer = tiny.tokenizer() if shipped else AutoTokenizer.from_pretrained(args.target)
    asked = [_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    prompts = [tiny.prompt_of(text) for text in asked] if shipped and not args.raw else asked
    ids: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    empty = [number for number, row in enumerate(ids, 1) if not row]
    if empty:
        raise ValueError(f"prompt: expected at least 1 token, given none in prompt {empty[0]}")
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    given: dict[str, list[Any]] = {name: getattr(args, name) for name in names}
    for name, values in given.items():
        if len(values) not in (1, len(ids)):
            raise ValueError(
                f"{name}: expected one value, or as many as prompts ({len(ids)}), given "
                f"{len(values)}"
            )
    request: dict[str, Any] = {
        name: values if len(values) > 1 else values[0] for name, values in given.items()
    }
    if len(ids) > 1:
        out = chain.generate(ids, **request)
        _show_all(args, out, tokenizer, asked, prompts, [len(row) for row in ids])
        return 0
    stream = chain.stream(ids[0], **request)
    tokens: list[int] = []
    shown = ""
    for token in stream:
        tokens.append(token)
        if not args.json:
            # Decoding from the start each time keeps multi-token characters whole: an unfinished
            # one shows as U+FFFD.
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if args.json:
        print(json.dumps(_request(prompts[0], text, tokens, stream.stats), indent=2))
        return 0
    print(text[len(shown) :] if text.startswith(shown) else "")
    print(stream.stats.table() if args.stats else summary(stream.stats), file=sys.stderr)
    return 0


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("prompt: expected UTF-8 text on stdin, given other bytes") from None


def _request(prompt: str, text: str, tokens: list[int], stats: Stats) -> dict[str, Any]:
    return {"prompt": prompt, "text": text, "tokens": tokens, "stats": stats.to_dict()}


def _show_all(
    args: argparse.Namespace,
    out: Output,
    tokenizer: Any,
    asked: list[str],
    prompts: list[str],
    lengths: list[int],
) -> None:
    """The texts of a batch; what was asked tells them apart, as head and tail do with files."""
    requests = []
    for row, prompt, length, stats in zip(
        out.sequences, prompts, lengths, out.requests, strict=True
    ):
        tokens = row[length : length + stats.num_new_tokens].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        requests.append(_request(prompt, text, tokens, stats))
    if args.json:
        print(json.dumps({"requests": requests, "stats": out.stats.to_dict()}, indent=2))
        return
    blocks = [
        f"==> {' '.join(question.split())} <==\n{request['text']}\n"
        for question, request in zip(asked, requests, strict=True)
    ]
    print("\n".join(blocks), end="")
    print(out.stats.table() if args.stats else summary(out.stats), file=sys.stderr)


def summary(stats: Stats) -> str:
    """A few lines for people: speed, and what each level did."""
    lines = [
        f"{stats.num_new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s "
        f"(prefill {stats.prefill_seconds * 1e3:.1f} ms, decoding {stats.decode_seconds * 1e3:.1f} "
        "ms)"
    ]
    for number, level in enumerate(stats.levels, 1):
        line = f"  level {number} {level.name}: {level.num_forward_passes} forward passes, "
        line += f"{level.seconds * 1e3:.1f} ms"
        if level.num_drafts:
            line += (
                f", mean acceptance length {level.mean_acceptance_length:.2f}, "
                f"draft acceptance rate {level.draft_acceptance_rate:.2f}"
            )
        lines.append(line)
    return "\n".join(lines)
