"""``python -m polyspec_ext generate``: continue a prompt as a stream, or several as a batch."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import columns
from ..chat import ChatPrompt, ends_of_turn, has_template
from ..outputs import Output
from .texts import (
    SHIPPED,
    Colours,
    build_chain,
    drawn_seeds,
    planned_chain,
    print_text,
    require_text,
    sampling_of,
    show_prompt,
    summary,
    text_prompt,
    tokenizer_of,
)


def run(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or print a JSON object to
    stdout. Several prompts are a batch, and their texts are printed in order."""
    if args.prompt.count("-") > 1:
        raise ValueError("prompt: expected one '-', which is all of stdin, given several")
    if args.raw and args.system is not None:
        raise ValueError("system: expected no --raw beside it, which leaves out the chat template")
    if args.show_levels and (args.json or args.n > 1 or len(args.prompt) > 1):
        raise ValueError("show-levels: expected one text on the terminal, given several or --json")
    request = sampling_of(args, len(args.prompt), args.n)
    texts = [_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    require_text(texts)
    chain = None if args.auto else build_chain(args)
    tokenizer = tokenizer_of(args)
    prompts = [text_prompt(args, tokenizer, text) for text in texts]
    if chain is None:
        chain = planned_chain(args, [prompt.input_ids for prompt in prompts])
    if not args.raw and has_template(tokenizer):
        request["eos_token_id"] = ends_of_turn(tokenizer, chain.levels[0])
    if args.verbose:
        print(chain, file=sys.stderr)
        for prompt in prompts:
            show_prompt(prompt)
    ids = [prompt.input_ids for prompt in prompts]
    if len(ids) == args.n == 1 and not args.json:
        stream = chain.stream(ids[0], **request)
        if args.show_levels:
            colours = Colours(chain, stream.batch)
            print_text(stream, tokenizer, args.stop or (), colours)
            print(columns.wrapped(colours.legend), file=sys.stderr)
        else:
            print_text(stream, tokenizer, args.stop or ())
        seeds, stats = stream.seeds, stream.stats
    else:
        out = chain.generate(ids, **request, n=args.n)
        seeds, stats = out.seeds, out.stats
        answers = _answers(out, [prompt for prompt in prompts for _ in range(args.n)], tokenizer)
        if args.json:
            # (A single request has the statistics of the call.)
            report = {"requests": answers} if len(answers) > 1 else answers[0]
            print(json.dumps({**report, "stats": stats.to_dict()}, indent=2))
            return 0
        # Titles are the prompts, in the format of head and tail for several files.
        titles = [f"==> {' '.join(text.split())} <==" for text in texts for _ in range(args.n)]
        blocks = (f"{title}\n{row['text']}\n" for title, row in zip(titles, answers, strict=True))
        print("\n".join(blocks), end="")
    if args.target is None:
        print(columns.wrapped(SHIPPED), file=sys.stderr)
    print(stats.table() if args.stats else summary(stats), file=sys.stderr)
    if drawn := drawn_seeds(args, seeds):
        print(drawn, file=sys.stderr)
    return 0


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("prompt: expected UTF-8 text on stdin, given other bytes") from None


def _answers(out: Output, prompts: list[ChatPrompt], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the answers as JSON objects, in the order of the prompts."""
    answers = []
    texts = out.stopped_text or [
        tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out.new_tokens
    ]
    rows = zip(prompts, texts, out.new_tokens, out.finish_reasons, out.seeds, strict=True)
    names = ("prompt", "text", "tokens", "finish_reason", "seed")
    for (prompt, *values), stats in zip(rows, out.requests, strict=True):
        answer = dict(zip(names, [prompt.text, *values], strict=True))
        answers.append({**answer, "stats": stats.to_dict()})
    return answers
