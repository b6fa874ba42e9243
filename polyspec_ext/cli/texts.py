"""Text on its way in and out: the user's words as prompts, and tokens as text while they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .. import tiny
from ..chat import ChatPrompt, StopStrings, prompt_of_text
from ..levels import tokenizer_at
from ..levels.sources import model_source, original
from ..stats import Stats

SHIPPED = (
    "The shipped target has 7 million parameters: expect wrong sums. The text is exactly the "
    "target's own."
)


def tokenizer_of(args: argparse.Namespace) -> Any:
    """Load the tokenizer of the target. ValueError: no model, or no tokenizer beside it."""
    if args.target is None:
        return tiny.tokenizer()
    place = original(args.target)
    source = model_source("target", place)
    try:
        return tokenizer_at(source.place)
    except ValueError as error:
        raise ValueError(f"target: {error}") from error


def require_text(asked: Sequence[str]) -> None:
    """Refuse prompts without text (ValueError)."""
    for number, text in enumerate(asked, 1):
        if not text.strip():
            which = f" as prompt {number} of {len(asked)}" if len(asked) > 1 else ""
            raise ValueError(f"prompt: expected text, given {text[:20]!r}{which}")


def text_prompt(args: argparse.Namespace, tokenizer: Any, text: str) -> ChatPrompt:
    """Return what is read for a text of the user's, as the options say (`prompt_of_text`)."""
    return prompt_of_text(tokenizer, text, args.system, args.raw)


def show_prompt(prompt: ChatPrompt) -> None:
    """Print a prompt as the target reads it, for ``--verbose``."""
    print(f"prompt of {len(prompt.input_ids)} tokens:\n{prompt.text}", file=sys.stderr)


def print_text(tokens: Iterable[int], tokenizer: Any, stops: Sequence[str] = ()) -> str:
    """Print a text up to a stop string while its tokens come; return it."""
    reader = StopStrings(tokenizer, stops)
    for token in tokens:
        print(reader.add(token), end="", flush=True)
    print(reader.rest(), flush=True)
    return reader.text


def drawn_seeds(args: argparse.Namespace, seeds: Sequence[int]) -> str:
    """Return the ``--seed`` option that samples the same text again; empty for a greedy text or a
    chosen seed."""
    if args.seed != [None] or not any(args.temperature):
        return ""
    return f"--seed {','.join(map(str, seeds))}"


def speed(stats: Stats) -> str:
    """Format tokens and seconds in a line."""
    return (
        f"{stats.num_new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s "
        f"(prefill {stats.prefill_seconds * 1e3:.1f} ms, decoding {stats.decode_seconds * 1e3:.1f} "
        "ms)"
    )


def summary(stats: Stats) -> str:
    """Format speed and the work of each level in a few lines."""
    lines = [speed(stats)]
    for number, level in enumerate(stats.levels, 1):
        line = f"  level {number} {level.name}: {level.num_forward_passes} passes, "
        line += f"{level.seconds * 1e3:.1f} ms"
        if level.num_drafts:
            line += (
                f", mean acceptance length {level.mean_acceptance_length:.2f}, "
                f"rate {level.draft_acceptance_rate:.2f}"
            )
        lines.append(line)
    return "\n".join(lines)
