"""``benchmarks paper``: from its options to a run in its folder."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.measuring import Spent
from polyspec_ext import processor, progress
from polyspec_ext.cli import options

from . import prepare, presets, questions, record, report
from .conversation import AUTO, Conversation
from .engines import OpenVino, llama_cpp
from .methods import RESERVED, Call, Method, default_keys, read_functions, read_keys
from .parts import EAGLE2, EAGLE3, HYDRA, TARGET, W4, Parts, Places, Tree, shipped
from .questions import Question
from .runner import Runner

_LOOKED_AT = 12  # questions, two of each task, that windows and overlaps are found out on
_PACKAGED = "polyspec_ext"
BAD_INPUT, SOME_FAILED = 2, 1
# Settings of a run that are options.
_AS_GIVEN = (
    "per_task", "repeats", "batch", "max_new_tokens", "temperature", "seed", "warm_up", "compile",
    "preset",
)  # fmt: skip


def add_command(kinds: Any) -> None:
    """Adds ``paper`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "paper",
        help="questions, as Spec-Bench's, answered by every method in turns",
        description="Has plain decoding, transformers' own generation and chains of two to four "
        "levels answer questions, as Spec-Bench's, in turns, each with its own answers before, and "
        "writes a line per turn to a folder. A run that was killed goes on where it stopped when "
        "it is called again.",
    )
    sub.add_argument(
        "--output",
        type=Path,
        default=Path("build/paper"),
        metavar="DIR",
        help="the run's folder (default: %(default)s)",
    )
    _add_questions(sub)
    _add_models(sub)
    group = sub.add_argument_group(
        "other engines", "with their own forms of the target and of one draft, in turns with ours"
    )
    group.add_argument(
        "--openvino",
        type=options.words,
        default=[],
        metavar="DIR[,DIR]",
        help="models as OpenVINO has them (methods openvino, openvino-assisted)",
    )
    options.add_llama(group)
    group = sub.add_argument_group("methods")
    group.add_argument(
        "--methods",
        type=options.words,
        metavar="KEY,...",
        help="plain, plain-compiled, generate, assisted:NAME, planned, levels below the target "
        "with + between (w4+drafter, w4+eagle2, prompt-lookup), and these with a policy in front "
        "(online:drafter, joint:w4+drafter, cascade:w4+drafter) (default: some of each)",
    )
    group.add_argument(
        "--method",
        metavar="NAME=FILE.py:FUNCTION",
        action="append",
        default=[],
        help="a method of yours: its function takes the target's model and tokenizer, and gives a "
        "function of a request (prompts, max_new_tokens, temperature, seeds) that returns the new "
        "tokens of each prompt; may be repeated",
    )
    group.add_argument(
        "--plan-seconds",
        type=options.COUNT_OR_NONE,
        default=30,
        metavar="S",
        help="that the planner may measure to find windows; 0: windows as they are shipped "
        "(default: %(default)s)",
    )
    sub.set_defaults(run=run)


def _questions(text: str) -> Path:
    return machine.GSM8K if text == "gsm8k" else options.file(text)


def _add_questions(sub: Any) -> None:
    group = sub.add_argument_group("questions")
    group.add_argument(
        "--questions",
        type=_questions,
        metavar="FILE",
        help='JSON lines with "turns", "prompt", "question" or "instruction", as Spec-Bench\'s '
        "question.jsonl and GSM8K's, or gsm8k for that one's test split where it lies beside the "
        "repository (default: Spec-Bench's where it lies there, else a few that come along)",
    )
    options.add_count(group, "--per-task", 10, "questions of each of the six tasks")
    options.add_count(group, "--repeats", 1, "of every question, the methods in turns")
    options.add_count(group, "--batch", 1, "questions that a call answers, at most")
    options.add_count(group, "--max-new-tokens", 64, "of a turn")
    options.add_count(group, "--warm-up", 1, "times that each method answers the first turn before")
    options.add_temperature(group, 0.0)
    options.add_seed(group)
    group.add_argument(
        "--template",
        metavar="NAME",
        help="auto, chat (the tokenizer's), vicuna, tiny (of the shipped models) or plain "
        "(default: what suits the models)",
    )


def _add_models(sub: Any) -> None:
    group = sub.add_argument_group("models", "without any: the shipped ones")
    group.add_argument(
        "--preset", choices=tuple(presets.PRESETS), help="the paper's target and its EAGLE-2 head"
    )
    group.add_argument("--target", metavar="MODEL", help="model directory, id or GGUF file")
    group.add_argument(
        "--draft",
        metavar="NAME=MODEL",
        action="append",
        default=[],
        help="a draft model, by the name that it has in --methods; may be repeated, the dearest "
        "first",
    )
    group.add_argument("--eagle2", metavar="HEAD", help="EAGLE-1 or EAGLE-2 head, directory or id")
    group.add_argument("--eagle3", metavar="HEAD", help="EAGLE-3 head, directory or id")
    group.add_argument("--hydra", metavar="HEAD", help="directory with hydra_lm_head.pt")
    options.add_count(group, "--times", 1, "how much the shipped target is grown")
    group.add_argument(
        "--w4",
        type=Path,
        metavar="DIR",
        help="where the target's 4-bit copy is kept (default: made anew)",
    )
    options.add_device(group)
    group.add_argument(
        "--dtype",
        help="of the models (default: each checkpoint's own, but on the CPU float32 unless it is "
        "bfloat16, packed, and the processor multiplies that; of the shipped ones there float32)",
    )
    options.add_threads(group)
    group.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="leave torch.compile out, which takes a minute and makes the fairer baseline",
    )


def run(args: argparse.Namespace) -> int:
    """The subcommand. Returns 1 where a turn failed, 2 where models are missing."""
    try:
        places, template = places_of(args)
    except presets.MissingModelsError as error:
        print(f"error: {error}; fetch them with", file=sys.stderr)
        for command in error.commands:
            print(f"  {command}", file=sys.stderr)
        return BAD_INPUT
    places = replace(places, functions=read_functions(args.method))
    chosen = questions.select(questions.read(args.questions), args.per_task)
    if _source(args) == _PACKAGED:
        progress.note(
            f"bench paper: {len(chosen)} questions that come along, too few for an interval that "
            "says much; --questions takes a file"
        )
    on_cpu = torch.device(args.device).type == "cpu"
    keys = args.methods or default_keys(places, args.compile, on_cpu, args.batch)
    keys = [*keys, *(name for name in places.functions if name not in keys)]
    methods = read_keys(keys, places, on_cpu=on_cpu, compile=args.compile, batch=args.batch)
    parts = Parts(places, args.device, _dtype(args.dtype), args.compile)
    return _measure(args, parts, methods, chosen, args.template or template)


def _source(args: argparse.Namespace) -> str:
    place = args.questions or questions.default_place()
    return _PACKAGED if place is None else place.stem


def places_of(args: argparse.Namespace) -> tuple[Places, str]:
    """What to load, and the template that suits it.

    Raises:
        MissingModelsError: not all of it is on this machine.
        ValueError: options that do not go together.
    """
    drafts = _drafts(args.draft)
    given = {EAGLE2: args.eagle2, EAGLE3: args.eagle3, HYDRA: args.hydra}
    heads = {name: place for name, place in given.items() if place is not None}
    preset = None if args.preset is None else presets.PRESETS[args.preset]
    if preset is None and args.target is None:
        if drafts or heads:
            raise ValueError("--draft, --eagle2, --eagle3, --hydra: expected a --target with them")
        if args.openvino or args.gguf:
            raise ValueError("--openvino, --gguf: expected a --target with them")
        return shipped(args.times, args.w4), "tiny"
    if args.times != 1:
        raise ValueError("--times: expected with the shipped models only")
    tree, template, target = Tree(), AUTO, args.target
    if preset is not None:
        target = target or preset.target
        heads = {EAGLE2: preset.eagle2, **heads}
        tree = Tree(total_tokens=preset.total_tokens)
        template = preset.template
    if len(args.openvino) > 2:
        raise ValueError(
            f"--openvino: expected a target and perhaps a draft, given {len(args.openvino)}"
        )
    # Hydra heads have no config.json of their own beside them.
    wanted = {name: place for name, place in heads.items() if name != HYDRA}
    folder, *found = presets.require([target, *drafts.values(), *wanted.values()])
    models = dict(zip(drafts, found, strict=False))
    heads |= zip(wanted, found[len(drafts) :], strict=True)
    openvino = OpenVino(*map(Path, args.openvino)) if args.openvino else None
    llama = llama_cpp(args.gguf, args.llama)
    engines = [one for one in (openvino, llama) if one is not None]
    return Places(folder, models, heads, tree, 1, args.w4, engines), template


def _drafts(given: Sequence[str]) -> dict[str, str]:
    """``NAME=PLACE``, or a place whose last part is its name."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, place = text.partition("=")
        name, place = (name, place) if sign else (Path(text).name, text)
        if name in (*RESERVED, *found) or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                "--draft: expected NAME=MODEL with a name of letters and digits that stands for "
                f"nothing else, given {name!r}"
            )
        found[name] = place
    return found


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, name)
    if not isinstance(found, torch.dtype | None):
        raise ValueError(f"--dtype: expected a torch dtype such as bfloat16, given {name!r}")
    return found


def _measure(
    args: argparse.Namespace,
    parts: Parts,
    methods: list[Method],
    chosen: Sequence[Question],
    template: str,
) -> int:
    begun = record.read_facts(args.output) if (args.output / record.FACTS).is_file() else None
    if begun is not None:  # with the windows that were found then
        before = [Method.from_dict(given) for given in begun["methods"]]
        if [method.name for method in before] == [method.name for method in methods]:
            methods = before
    spent = Spent()
    with spent.on("models"):
        names = prepare.models(methods, parts)
        levels = [parts.eager, *(parts.model(name) for name in names if name != W4)]
        lengths = [level.max_length for level in levels if level.max_length is not None]
        room = min(lengths, default=1 << 30) - args.max_new_tokens
        conversation = Conversation(parts.tokenizer, template, room)
        parts.thing(TARGET)  # which may be a compiled one
    with spent.on("W4 copy"):
        if W4 in names:
            parts.model(W4)
    looked_at = [conversation.prompt(one.turns[:1], []).ids for one in chosen[:_LOOKED_AT]]
    with spent.on("compilation"):
        first = list(itertools.islice(itertools.cycle(looked_at), args.batch))
        prepare.compiled(methods, parts, first, args.temperature)
    prediction: dict[str, Any] = {}
    if begun is None and args.plan_seconds > 0:
        with spent.on("plan"):
            methods, prediction = prepare.planned(methods, parts, looked_at, args)
    calls = [Call(method, parts) for method in progress.bar(methods, desc="methods", leave=False)]
    facts = _facts(args, parts, methods, chosen, conversation)
    if begun is None:
        with spent.on("passes"):
            about = prepare.surroundings(calls, parts, looked_at, args)
        facts |= {"prediction": prediction, **about}
    else:
        other = record.differences(begun, facts)
        if other:
            raise ValueError(
                f"--output: expected the settings of the run that {args.output} has begun, or "
                f"another folder; given others: {'; '.join(other)}"
            )
        again = {"created": facts["created"], "commit": facts["commit"]}
        facts = {**begun, "continued": [*begun.get("continued", []), again]}
    sessions = facts.get("seconds", [])  # which this one goes on from
    writer = record.TurnWriter(args.output, facts)
    turns = facts["settings"]["turns"] * len(calls) * args.repeats
    processor.note_load()
    with progress.bar(total=turns, unit="turn", smoothing=0.05) as bar:
        runner = Runner(calls, chosen, conversation, args, parts.eager, writer, bar.update)
        with spent.on("warm-up"):
            runner.warm_up()
        writer.note({"seconds": [*sessions, spent.seconds]})
        with spent.on("turns"):
            runner.run()
        writer.note({"seconds": [*sessions, spent.seconds]})
    report.run(argparse.Namespace(runs=[args.output], output=None))
    return SOME_FAILED if any(not turn.ok for turn in writer.turns) else 0


def _facts(
    args: argparse.Namespace,
    parts: Parts,
    methods: Sequence[Method],
    chosen: Sequence[Question],
    conversation: Conversation,
) -> dict[str, Any]:
    """What ``run.json`` says before anything is measured."""
    about = machine.describe("cpu" if parts.on_cpu else "cuda")
    commit = about.pop("commit")
    versions = {name: about.pop(name) for name in ("torch", "transformers", "python")}
    versions["polyspec_ext"] = importlib.metadata.version("polyspec_ext")
    return {
        "schema": record.SCHEMA,
        "command": "bench paper",
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {**about, "system": platform.system(), "device": args.device},
        "load": machine.load_average(),
        "commit": None if commit is None else commit.removesuffix("+"),
        "dirty": None if commit is None else commit.endswith("+"),
        "versions": versions,
        "settings": {
            "questions": _source(args),
            "digest": questions.digest(chosen),
            "count": len(chosen),
            "turns": sum(len(one.turns) for one in chosen),
            **{name: getattr(args, name) for name in _AS_GIVEN},
            "template": conversation.template,
            "prompt_limit": conversation.room,
            "longer_prompts": "the middle is left out",
            "threads": torch.get_num_threads(),
            "methods": [method.name for method in methods],
        },
        "models": list(parts.facts()),
        "methods": [asdict(method) for method in methods],
    }
