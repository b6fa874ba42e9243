"""Where a 4-bit copy, a head and a small model agree with the level above along its greedy texts,
recorded from chains of two levels: the acceptances of ``shapes --acceptance NAME``.

``python -m benchmarks.traces NAME --target MODEL --draft MODEL`` records one again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polyspec_ext as ps
from benchmarks import questions
from benchmarks.methods import load_level
from polyspec_ext import progress, tiny
from polyspec_ext.chat import prompt_of_text
from polyspec_ext.quantization import stored_w4

FILE = Path(__file__).with_suffix(".json")
# Levels of a trace: the 4-bit copy below the target, and each drafter below both.
COPY, HEAD, DRAFT, BELOW = "W4 copy", "EAGLE head", "draft", " below the W4 copy"
_WINDOW, _TOKENS = 16, 96  # longest run that is seen, and tokens of a text
Bits = str  # of "1", accepted, and "0", by position of a text


def agreement(upper: Any, lower: Any, prompts: Sequence[Sequence[int]]) -> Bits:
    """Return whether `lower` agrees with the greedy texts of `upper`, by position. A token after a
    whole accepted window counts as accepted; the last token of a text is left out, since the text
    may end before a rejection."""
    chain, bits = ps.Chain([upper, lower], [_WINDOW]), ""
    for prompt in progress.bar(prompts, desc=" <- ".join(chain.names), leave=False):
        batch = chain.batch([prompt], _TOKENS, temperature=0.0)
        while committed := batch.advance():
            ((_, tokens),) = committed
            bits += "1" * (len(tokens) - 1) + ("1" if len(tokens) > _WINDOW else "0")
        bits = bits[:-1]
    return bits


def record(target: Any, draft: Any, head: Any, texts: Sequence[str]) -> dict[str, Bits]:
    """Return the trace of a target's 4-bit copy, of a small model, and perhaps of an EAGLE head."""
    level, small = (load_level(path, name="--target, --draft") for path in (target, draft))
    copy = ps.HuggingFaceLevel(stored_w4(level.model), name=COPY)
    prompts = [prompt_of_text(level.tokenizer(), text).input_ids for text in texts]
    trace = {COPY: agreement(level, copy, prompts)}
    for above, suffix in ((level, ""), (copy, BELOW)):
        trace[DRAFT + suffix] = agreement(above, small, prompts)
        if head is not None:
            trace[HEAD + suffix] = agreement(above, head, prompts)
    return trace


def recorded() -> dict[str, dict[str, Bits]]:
    """Return the recorded traces by name."""
    traces: dict[str, dict[str, Bits]] = json.loads(FILE.read_text(encoding="utf-8"))
    return traces


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    for name in ("target", "draft", "head"):
        parser.add_argument(f"--{name}", help="default: the shipped one")
    args = parser.parse_args()
    asked: Sequence[str] = [question.turns[0] for question in questions.read(questions.PACKAGED)]
    if args.target is None:
        asked, args.head = tiny.QUESTIONS, str(tiny.path("eagle2"))
        args.target, args.draft = str(tiny.path("target")), str(tiny.path("drafter"))
    known = {**recorded(), args.name: record(args.target, args.draft, args.head, asked)}
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
