"""``python -m polyspec_ext plan``: find the chain of models that decodes fastest here."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from typing import Any

from .. import columns, processor, progress, tiny
from ..chat import has_template, prompt_of_text
from ..planning.planner import Plan, plan
from ..planning.store import default_store
from . import options
from .generate import require_text, tokenizer_of


def run(args: argparse.Namespace) -> int:
    """Plan a chain and print the report."""
    if args.save is not None and (args.save.is_dir() or not args.save.absolute().parent.is_dir()):
        raise ValueError(f"save: expected a file in a folder that exists, given {args.save}")
    if args.measure_again:
        default_store().clear()
    if args.target is None and args.draft:
        raise ValueError("draft: expected a --target as well, given none")
    pack, load = options.SWITCHES[args.pack], processor.load_average()
    shipped = args.target is None
    levels: list[Any] = [args.target, *args.draft]
    tokenizer = tokenizer_of(args)
    if shipped:
        with progress.loading(shown=False):
            models = tiny.levels(pack=pack)
        levels = [*models.values(), "prompt-lookup"]
    questions = args.prompt or list(tiny.QUESTIONS[:6])
    require_text(questions)
    if not args.prompt and (args.raw or not has_template(tokenizer)):
        questions = [tiny.prompt_of(q) for q in questions]  # with "Answer:" to complete
    prompts = [prompt_of_text(tokenizer, text, raw=args.raw).input_ids for text in questions]
    progress.phase(f"planning: {args.seconds:g} s of measurements, more with large models")
    planned = plan(
        levels,
        prompts,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        batch=args.batch,
        pack=pack,
        seconds=args.seconds,
        verify=args.verify,
        repeats=args.repeats,
        consider=args.target is not None and not args.only,
    )
    if shipped:
        planned.parts = [
            replace(item, word=item.word or str(tiny.path(item.name))) for item in planned.parts
        ]
    if args.json:
        measured = {"questions": questions, "load": {"before": load}}
        print(json.dumps({**planned.to_dict(), **measured}, indent=1))
    else:
        print(f"{planned.report(args.verbose)}\n\n{columns.wrapped(_measured(args, questions))}")
        print(columns.wrapped(processor.load_line(load)))
        if not args.verbose:
            print("\n--verbose shows the measurements")
    if args.save is not None:  # after the report: a full folder does not lose it
        planned.save(args.save)
    if not args.json:
        print(f"\n{_command(args, planned)}")
    return 0


def _measured(args: argparse.Namespace, questions: list[str]) -> str:
    shown = [f"{' '.join(text.split()):.40}" for text in questions]
    if args.prompt:
        return f"Measured on {len(shown)} prompts: {'; '.join(shown)}"
    return (
        f"Measured on {len(shown)} built-in questions, since no prompt was named: "
        f"{'; '.join(shown)}. Other prompts may need another chain."
    )


def _command(args: argparse.Namespace, planned: Plan) -> str:
    """Return the command to paste: `generate` with the recommended chain."""
    best, sources = planned.recommended, planned.sources()
    if args.save is not None:
        words = [("chain", str(args.save))]
    else:
        names = ["target", *["middle"] * (len(sources) - 2), "draft"]
        words = list(zip(names, sources, strict=False))  # the target alone has no draft
        words += [("window", ",".join(map(str, best.windows)))] if best.windows else []
        words += [("rounds", ",".join(map(str, best.rounds)))] if best.rounds else []
        chosen = {"tail": (best.tail, 0), "rule": (best.rule, "token"), "pack": (args.pack, "auto")}
        words += [(name, str(value)) for name, (value, usual) in chosen.items() if value != usual]
    words.append(("max-new-tokens", str(args.max_new_tokens)))
    for name, off in {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "threads": None,
    }.items():
        value = getattr(args, name)
        words += [(name.replace("_", "-"), f"{value:g}")] if value != off else []
    flags = [f"--{name} {shlex.quote(value)}" for name, value in words]
    lines = ["python -m polyspec_ext generate 'YOUR PROMPT'"]
    for word in flags:
        if len(lines[-1]) + len(word) < columns.WIDTH - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n".join(lines)
