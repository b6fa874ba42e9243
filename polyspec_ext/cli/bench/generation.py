"""``python -m polyspec_ext bench generate``."""

from __future__ import annotations

from typing import Any

from ...bench import generation
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``generate`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "generate",
        help="tokens per second beside plain and assisted generation",
        description="Tokens per second of the shipped chains beside plain decoding and "
        "transformers' assisted generation with the same models, in turns within one run. Prints "
        "Markdown, or JSON.",
    )
    options.add_json(sub)
    options.add_count(sub, "--prompts", 8, "questions")
    options.add_questions(sub)
    options.add_count(sub, "--repeats", 5)
    options.add_count(sub, "--batch", 8, "of the batched runs", metavar="B")
    options.add_count(sub, "--max-new-tokens", 128)
    sub.add_argument(
        "--compile",
        choices=("none", "all"),
        default="all",
        help="the chains and plain decoding through torch.compile as well, or nothing (needs a C++ "
        "compiler; default: %(default)s)",
    )
    sub.add_argument(
        "--ignore-eos",
        action="store_true",
        help="every text goes on to --max-new-tokens, so that no row of a batch ends early",
    )
    options.add_temperatures(sub)
    options.add_seed(sub)
    options.add_processor_time(sub)
    options.add_threads(sub)
    sub.set_defaults(run=generation.run)
