"""``benchmarks paper``: Spec-Bench's questions, answered by every method in turns, and a report."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import chains, machine, output, questions, record, timing
from benchmarks.engines import OpenVino, llama_cpp
from benchmarks.measuring import (
    Answer,
    Request,
    Step,
    device_clock,
    first_difference,
    interleaved,
    spent,
    surprise,
    timed,
)
from benchmarks.methods import (
    EAGLE2,
    EAGLE3,
    ENGINE,
    HYDRA,
    PLANNED,
    PRESETS,
    RESERVED,
    TARGET,
    W4,
    Call,
    Method,
    Models,
    default_keys,
    read_functions,
    read_keys,
    require,
    shipped,
    tree_form,
)
from benchmarks.questions import Conversation, Prompt, Question
from benchmarks.weights import weight_bytes
from polyspec_ext import processor, progress
from polyspec_ext.cli import options
from polyspec_ext.drafters import DynamicTree
from polyspec_ext.planning.planner import plan
from polyspec_ext.tuning import pass_seconds

TURN_BEFORE = "the turn before failed"
_PROMPTS = 12  # questions, two of each task, that windows and overlaps are measured on
_PACKAGED = "polyspec_ext"
_SOME_FAILED = 1  # exit status
_CHAINS = ("chain", "eagle", "adaptive")  # kinds with the planner's windows
_PREDICTED = ("chain", "eagle", PLANNED)
_WIDTHS = (1, 4, 8, 12, 16)  # tokens of the passes that are timed
_TEXTS = 6  # texts of the baseline that overlaps are measured along
_FIRST_TOKENS, _WARM_UP_TOKENS = 8, 16  # of a first call, and of a warm-up at most
_MOST_TURNS = 16  # of a question, so that no two turns have one seed
# Settings of a run that are options.
_SETTINGS = (
    "per_task", "repeats", "batch", "max_new_tokens", "temperature", "seed", "warm_up",
    "preset",
)  # fmt: skip


# ---- options -------------------------------------------------------------------------------------


def add_command(kinds: Any) -> None:
    """Add ``paper`` and ``report`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "paper",
        help="questions, as Spec-Bench's, answered by every method in turns",
        description="Plain decoding, transformers' generation and chains of two to four levels "
        "answer questions, as Spec-Bench's, in turns, each after its own earlier answers. A line "
        "per turn goes to a folder; a run that was killed goes on when it is called again.",
    )
    options.add(sub, "--output", Path, Path("build/paper"), "DIR", "the run's folder")
    _add_questions(sub.add_argument_group("questions"))
    _add_models(sub.add_argument_group("models", "without any: the shipped ones"))
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
        help="plain, plain-captured on CUDA, generate, assisted:NAME, planned, levels below the "
        "target with + between (w4+drafter, prompt-lookup), and these with a policy in front "
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
    options.add(
        group, "--plan-seconds", options.COUNT_OR_NONE, 30, "S",
        "that the planner may measure to find windows; 0: windows as they are shipped",
    )  # fmt: skip
    sub.set_defaults(run=run)
    sub = kinds.add_parser(
        "report",
        help="the papers' tables and figures from saved runs",
        description="Write tables and figures of saved runs of `paper`, beside what the papers "
        "print: Markdown, CSV, JSON and PNG. Several runs are side by side; nothing of one enters "
        "another's numbers. Print the overall table.",
    )
    sub.add_argument("runs", type=options.folder, nargs="+", metavar="RUN", help="folder of a run")
    sub.add_argument(
        "--output", metavar="DIR", help="(default: the folder of the run, where it is one)"
    )
    sub.set_defaults(run=report)


def _questions(text: str) -> Path:
    return machine.GSM8K if text == "gsm8k" else options.file(text)


def _add_questions(group: Any) -> None:
    group.add_argument(
        "--questions",
        type=_questions,
        metavar="FILE",
        help='JSON lines with "turns", "prompt", "question" or "instruction", or gsm8k for that '
        "one's test split where it lies beside the repository (default: Spec-Bench's where it "
        "lies there, else a few that come along)",
    )
    for name, default, what in (
        ("--per-task", 10, "questions of each of the six tasks"),
        ("--repeats", 1, "of every question, the methods in turns"),
        ("--batch", 1, "questions that a call answers, at most"),
        ("--max-new-tokens", 64, "of a turn"),
        ("--warm-up", 1, "times that each method answers the first turn before"),
    ):
        options.add_count(group, name, default, what)
    options.add_temperature(group, 0.0)
    options.add_seed(group)
    group.add_argument(
        "--template",
        metavar="NAME",
        help="auto, chat (the tokenizer's), vicuna, tiny (of the shipped models) or plain "
        "(default: what suits the models)",
    )


def _add_models(group: Any) -> None:
    group.add_argument(
        "--preset", choices=tuple(PRESETS), help="the paper's target and its EAGLE-2 head"
    )
    group.add_argument(
        "--draft",
        metavar="NAME=MODEL",
        action="append",
        default=[],
        help="a draft model, by its name in --methods; may be repeated, the dearest first",
    )
    for name, metavar, what in (
        ("--target", "MODEL", "model directory, id or GGUF file"),
        ("--eagle2", "HEAD", "EAGLE-1 or EAGLE-2 head, directory or id"),
        ("--eagle3", "HEAD", "EAGLE-3 head, directory or id"),
        ("--hydra", "HEAD", "directory with hydra_lm_head.pt"),
    ):
        group.add_argument(name, metavar=metavar, help=what)
    options.add_count(group, "--times", 1, "how much the shipped target is grown")
    group.add_argument(
        "--w4", type=Path, metavar="DIR", help="of the target's 4-bit copy (default: made anew)"
    )
    options.add_device(group)
    group.add_argument(
        "--dtype",
        help="of the models (default: each checkpoint's own, but on the CPU float32 unless it is "
        "bfloat16, packed, and the processor multiplies that; of the shipped ones there float32)",
    )
    options.add_threads(group)


def models_of(args: argparse.Namespace) -> tuple[Models, str]:
    """Return what options name, and the template that suits it.

    Raises:
        ValueError: models that are not on this machine, or options that do not go together.
    """
    dtype = None if args.dtype is None else getattr(torch, args.dtype, args.dtype)
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(f"--dtype: expected a torch dtype such as bfloat16, given {dtype!r}")
    more = {"device": args.device, "dtype": dtype}
    more["functions"] = read_functions(args.method)
    drafts = _drafts(args.draft)
    given = {EAGLE2: args.eagle2, EAGLE3: args.eagle3, HYDRA: args.hydra}
    heads = {name: head for name, head in given.items() if head is not None}
    if args.preset is None and args.target is None:
        if drafts or heads:
            raise ValueError("--draft, --eagle2, --eagle3, --hydra: expected a --target with them")
        if args.openvino or args.gguf:
            raise ValueError("--openvino, --gguf: expected a --target with them")
        return shipped(args.times, args.w4, **more), "tiny"
    if args.times != 1:
        raise ValueError("--times: expected with the shipped models only")
    tree, template, target = DynamicTree(), questions.AUTO, args.target
    if args.preset is not None:
        model, head, template, total_tokens = PRESETS[args.preset]
        tree = DynamicTree(total_tokens=total_tokens)
        target, heads = target or model, {EAGLE2: head, **heads}
    if len(args.openvino) > 2:
        raise ValueError(
            f"--openvino: expected a target and perhaps a draft, given {len(args.openvino)}"
        )
    # Hydra heads have no config.json beside them.
    hub = [name for name in heads if name != HYDRA]
    target, *found = require([target, *drafts.values(), *(heads[name] for name in hub)])
    drafts = dict(zip(drafts, found, strict=False))
    heads |= zip(hub, found[len(drafts) :], strict=True)
    openvino = OpenVino(*map(Path, args.openvino)) if args.openvino else None
    engines = [one for one in (openvino, llama_cpp(args.gguf, args.llama)) if one is not None]
    return Models(target, drafts, heads, tree, w4=args.w4, engines=engines, **more), template


def _drafts(given: Sequence[str]) -> dict[str, str]:
    """``NAME=MODEL``, or a path whose last part is the name."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        name, path = (name, path) if sign else (Path(text).name, text)
        if name in (*RESERVED, *found) or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                "--draft: expected NAME=MODEL with a name of letters and digits that stands for "
                f"nothing else, given {name!r}"
            )
        found[name] = path
    return found


# ---- before the turns ----------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measure, and write the report. Return 1 where a turn failed."""
    _require_pandas()
    models, template = models_of(args)
    chosen = questions.select(questions.read(args.questions), args.per_task)
    if _source(args) == _PACKAGED:
        progress.note(
            f"bench paper: {len(chosen)} questions that come along, too few for an interval that "
            "says much; --questions takes a file"
        )
    keys = args.methods or default_keys(models, args.batch)
    keys = [*keys, *(name for name in models.functions if name not in keys)]
    methods = read_keys(keys, models, args.batch)
    begun = record.read_facts(args.output) if (args.output / record.FACTS).is_file() else None
    if begun is not None:  # with the windows that were planned then
        before = [Method.from_dict(given) for given in begun["methods"]]
        if [method.name for method in before] == [method.name for method in methods]:
            methods = before
    seconds: dict[str, float] = {}
    with spent(seconds, "models"):
        below = {name for method in methods for name in method.levels[1:]}
        used = [name for name in (W4, *models.drafts) if name in below]
        levels = [models.level, *(models.draft(name) for name in used if name != W4)]
        lengths = [level.max_length for level in levels if level.max_length is not None]
        room = min(lengths, default=1 << 30) - args.max_new_tokens
        conversation = Conversation(models.tokenizer, args.template or template, room)
    with spent(seconds, "W4 copy"):
        if W4 in used:
            models.draft(W4)
    prompts = [conversation.prompt(one.turns[:1], []).ids for one in chosen[:_PROMPTS]]
    prediction: dict[str, Any] = {}
    if begun is None and args.plan_seconds > 0:
        with spent(seconds, "plan"):
            methods, prediction = planned(methods, models, prompts, args)
    calls = [Call(method, models) for method in progress.bar(methods, desc="methods", leave=False)]
    facts = _facts(args, models, methods, chosen, conversation)
    if begun is None:
        with spent(seconds, "passes"):
            facts |= {"prediction": prediction, **surroundings(calls, models, used, prompts, args)}
    else:
        other = record.differences(begun, facts)
        if other:
            raise ValueError(
                f"--output: expected the settings of the run that {args.output} has begun, or "
                f"another folder; given others: {'; '.join(other)}"
            )
        again = {"created": facts["created"], "commit": facts["commit"]}
        facts = {**begun, "continued": [*begun.get("continued", []), again]}
    sessions = facts.get("seconds", [])  # of those before this one
    writer = record.TurnWriter(args.output, facts)
    turns = facts["settings"]["turns"] * len(calls) * args.repeats
    processor.note_load()
    with progress.bar(total=turns, unit="turn", smoothing=0.05) as bar:
        runner = Runner(calls, chosen, conversation, args, models.level, writer, bar.update)
        with spent(seconds, "warm-up"):
            runner.warm_up()
        writer.note({"seconds": [*sessions, seconds]})
        with spent(seconds, "turns"):
            runner.run()
        writer.note({"seconds": [*sessions, seconds]})
    report(argparse.Namespace(runs=[args.output], output=None))
    return _SOME_FAILED if any(turn["status"] != record.OK for turn in writer.turns) else 0


def _source(args: argparse.Namespace) -> str:
    path = args.questions or questions.default_path()
    return _PACKAGED if path is None else path.stem


def planned(
    methods: Sequence[Method],
    models: Models,
    prompts: Sequence[list[int]],
    asked: argparse.Namespace,
) -> tuple[list[Method], dict[str, dict[str, Any]]]:
    """Plan once for all levels of the methods.

    Cascades keep their windows; a policy begins with the windows of its chain, and the window of a
    head's trees is their depth.

    Args:
        prompts: such as will be asked.
        asked: ``max_new_tokens``, ``temperature``, ``batch`` and ``plan_seconds``.

    Returns:
        The methods with their windows; and what is predicted, by key: tokens per second of
        decoding, and windows.
    """
    kinds = (*_CHAINS, PLANNED)
    some = {name for method in methods if method.kind in kinds for name in method.levels}
    if not some:
        return list(methods), {}
    found = plan(
        [models.element(name) for name in (TARGET, *models.names) if name in some],
        [list(prompt) for prompt in prompts],
        asked.max_new_tokens,
        asked.temperature,
        batch=asked.batch,
        pack=False,
        seconds=asked.plan_seconds,
    )
    # The planner puts levels in order by their times, which may not be the key's.
    by_levels = {frozenset(one.levels): one for one in found.candidates}
    made, prediction = [], {}
    for method in methods:
        one = by_levels.get(frozenset(method.levels))
        if method.kind == PLANNED:
            one = found.recommended
            label = f"planned: {' <- '.join(one.levels)}"
            method = replace(method, label=label, levels=tuple(one.levels))
        if one is not None and method.kind in kinds:
            tree = models.tree_of(method.levels[-1])
            method = replace(
                method,
                windows=tuple(one.windows),
                rounds=tuple(one.rounds),
                rule=one.rule,
                tail=one.tail,
                tree=None if tree is None else tree_form(tree, one.windows[-1]),
            )
        if one is not None and (method.baseline or method.kind in _PREDICTED):
            prediction[method.name] = {
                "tokens_per_second": one.predicted_decode_tokens_per_second,
                "windows": list(one.windows),
            }
        made.append(method)
    return made, prediction


def surroundings(
    calls: Sequence[Call],
    models: Models,
    used: Sequence[str],
    prompts: Sequence[list[int]],
    asked: argparse.Namespace,
) -> dict[str, Any]:
    """Return seconds of passes, overlap with the target, bytes of weights and copy bandwidth.

    Args:
        used: names of the draft levels of the methods.
        prompts: the overlap is along the baseline's texts after the first of them, temperature 1.
    """
    drafts = {name: models.draft(name) for name in used}
    levels = {TARGET: models.level} | {
        # A level that shares a cache is timed with a cache of its own.
        name: level if level.reads_apart else chains.packed(level.model, name=name)
        for name, level in drafts.items()
    }
    device = "cpu" if models.on_cpu else "cuda"
    # On the CPU the clock is the measurement's choice.
    clock = None if models.on_cpu else device_clock(torch.device(models.device))
    times = pass_seconds(list(levels.values()), _WIDTHS, limit=2.0, clock=clock)
    baseline = next(call for call in calls if call.method.baseline)
    texts = {
        n: baseline.answer(Request([prompt], asked.max_new_tokens, 0.0, [asked.seed])).texts[0]
        for n, prompt in enumerate(prompts[:_TEXTS])
    }
    vocab = models.level.model.config.vocab_size
    others = {name: level.model for name, level in levels.items() if name != TARGET}
    others = {name: other for name, other in others.items() if other.config.vocab_size == vocab}
    copying: timing.Clock = timing.CpuClock() if models.on_cpu else timing.CudaClock()
    return {
        "pass_seconds": {
            name: {str(width): value for width, value in own.items()}
            for name, own in zip(levels, times, strict=True)
        },
        "overlap": chains.overlaps(models.level.model, others, list(prompts[:_TEXTS]), texts),
        "weight_bytes": {name: weight_bytes(level.model) for name, level in levels.items()},
        "copy_bandwidth_bytes_per_second": 1e9 * timing.copy_bandwidth(copying, device),
    }


def _facts(
    args: argparse.Namespace,
    models: Models,
    methods: Sequence[Method],
    chosen: Sequence[Question],
    conversation: Conversation,
) -> dict[str, Any]:
    """``run.json`` before anything is measured."""
    about = machine.describe("cpu" if models.on_cpu else "cuda")
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
            **{name: getattr(args, name) for name in _SETTINGS},
            "template": conversation.template,
            "prompt_limit": conversation.room,
            "longer_prompts": "the middle is left out",
            "threads": torch.get_num_threads(),
            "methods": [method.name for method in methods],
        },
        "models": list(models.facts(methods)),
        "methods": [asdict(method) for method in methods],
    }


# ---- the turns -----------------------------------------------------------------------------------


class Runner:
    """Measure: every method answers every turn, one after another, in an order that rotates.

    Args:
        calls: of the methods, the baseline's among them.
        chosen: questions in order; a call answers ``asked.batch`` at once.
        asked: ``repeats``, ``max_new_tokens``, ``temperature``, ``seed``, ``warm_up``, ``batch``.
        target: level whose model compares texts.
        writer: has the turns that are done, and takes new ones.
        tick: called with the number of turns of each call.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        chosen: Sequence[Question],
        conversation: Conversation,
        asked: argparse.Namespace,
        target: Any,
        writer: record.TurnWriter,
        tick: Callable[[int], object],
    ) -> None:
        self._first = next(call for call in calls if call.method.baseline)
        compared = {self._first.method.name, *(call.method.plain for call in calls)}
        # Methods whose texts others are compared with answer before them, the baseline first.
        self._plain = sorted(
            (call for call in calls if call.method.name in compared),
            key=lambda call: call is not self._first,
        )
        self._calls = [*self._plain, *(call for call in calls if call not in self._plain)]
        self._questions, self._conversation = chosen, conversation
        self._batches = questions.batches(chosen, asked.batch)
        self._asked, self._writer, self._tick = asked, writer, tick
        self._model, self._eos = target.model, frozenset(target.eos_token_ids)
        self._clock = device_clock(target.model.device)
        self._done = {record.key_of(turn): turn for turn in writer.turns}
        # Of the present batch, by method: its answers (None: a turn failed), and prompts and texts
        # of those that others are compared with.
        self._answers: dict[str, list[list[str]] | None] = {}
        self._references: dict[str, list[tuple[list[int], list[int]]]] = {}

    def run(self) -> None:
        """Measure all turns that are not done yet."""
        tasks = [len(self._questions[batch[0]].turns) for batch in self._batches]
        repeats = self._asked.repeats
        for step, call in interleaved(self._calls, tasks, repeats, len(self._plain)):
            rows = len(self._batches[step.task])
            if call is self._first:
                self._references = {}
                if step.turn == 0:
                    names = [one.method.name for one in self._calls]
                    self._answers = {name: [[] for _ in range(rows)] for name in names}
            self._take_turn(step, call)
            self._tick(rows)

    def warm_up(self) -> None:
        """Answer the first batch before anything is timed. What fails here fails again, and is
        recorded, where it counts."""
        asked = self._asked
        first = [self._questions[index].turns[:1] for index in self._batches[0]]
        prompts = [self._conversation.prompt(turns, []).ids for turns in first]
        tokens = min(_WARM_UP_TOKENS, asked.max_new_tokens)
        request = Request(prompts, tokens, asked.temperature, [asked.seed] * len(prompts))
        for call in self._calls:
            with contextlib.suppress(Exception):
                for _ in range(asked.warm_up):
                    call.answer(request)

    def _take_turn(self, step: Step, call: Call) -> None:
        batch = [self._questions[index] for index in self._batches[step.task]]
        name = call.method.name
        answers, prompts = self._answers[name], None
        if answers is not None:
            prompts = [
                self._conversation.prompt(question.turns[: step.turn + 1], own)
                for question, own in zip(batch, answers, strict=True)
            ]
        keys = [(question.question_id, step.turn, name, step.repeat) for question in batch]
        if any(key not in self._done for key in keys):
            # A batch is measured whole; turns on the disk stay as they are.
            for turn in self._measured(call, batch, step, prompts):
                if record.key_of(turn) not in self._done:
                    self._done[record.key_of(turn)] = turn
                    self._writer.add(turn)
        texts = [tokens for key in keys if (tokens := self._done[key]["tokens"]) is not None]
        if answers is None or prompts is None or len(texts) < len(batch):
            self._answers[name] = None
            return
        for own, text in zip(answers, texts, strict=True):
            own.append(self._conversation.answer(text))
        if call in self._plain:
            ids = [prompt.ids for prompt in prompts]
            self._references[name] = list(zip(ids, texts, strict=True))

    def _measured(
        self, call: Call, batch: Sequence[Question], step: Step, prompts: list[Prompt] | None
    ) -> list[record.Turn]:
        """The lines of a call; of one that fails they have the error and no numbers."""
        error = TURN_BEFORE
        numbers: list[dict[str, Any]] = []
        if prompts is not None:
            try:
                numbers = self._numbers(call, step, prompts)
            except Exception as reason:  # a method's error must not end the run
                error = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        nothing = dict.fromkeys(
            ("prompt_tokens", "new_tokens", "seconds", "prefill_seconds", "ended")
        )
        nothing |= {"levels": [], "tokens": None, "lossless": None, "cut": None, "batch": 1}
        return [
            {
                "question_id": question.question_id,
                "category": question.category,
                "task": question.task,
                "turn": step.turn,
                "method": call.method.name,
                "repeat": step.repeat,
                "status": record.OK if numbers else record.FAILED,
                "error": None if numbers else error,
                **(own or nothing),
            }
            for question, own in itertools.zip_longest(batch, numbers)
        ]

    def _numbers(self, call: Call, step: Step, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """The numbers of each row of a call."""
        asked, rows = self._asked, len(prompts)
        # A question's turn has one seed, however many it is answered with.
        indices = (step.repeat * len(self._questions) + at for at in self._batches[step.task])
        seeds = [(asked.seed + index * _MOST_TURNS + step.turn) % 2**64 for index in indices]
        ids = [prompt.ids for prompt in prompts]
        request = Request(ids, asked.max_new_tokens, asked.temperature, seeds)
        answer, seconds = timed(call.answer, request, self._clock)
        if not all(answer.texts):
            raise RuntimeError("expected at least one new token, given none")
        stats = answer.stats
        prefill = answer.prefill_seconds if stats is None else stats.prefill_seconds
        return [
            {
                "prompt_tokens": len(prompt.ids),
                "new_tokens": len(tokens),
                "seconds": seconds / rows,
                "prefill_seconds": None if prefill is None else prefill / rows,
                "ended": "eos" if tokens[-1] in self._eos else "length",
                "levels": _levels(call.method, answer, row),
                "tokens": tokens,
                "lossless": self._lossless(call, row, prompt.ids, tokens),
                "cut": prompt.cut,
                "batch": rows,
            }
            for row, (prompt, tokens) in enumerate(zip(prompts, answer.texts, strict=True))
        ]

    def _lossless(
        self, call: Call, row: int, prompt: list[int], tokens: list[int]
    ) -> dict[str, Any] | None:
        """How a text compares with its reference, or its likelihood with the mean."""
        method, temperature = call.method, self._asked.temperature
        if temperature > 0:
            if method.kind == ENGINE:
                return None  # its form of the target is another model
            total, variance = surprise(self._model, prompt, tokens, temperature)
            return {"surprise": total, "variance": variance}
        reference = tokens
        if call is not self._first and method.plain != method.name:
            rows = self._references.get(method.plain or self._first.method.name)
            if rows is None or rows[row][0] != prompt:
                return None
            reference = rows[row][1]
        if reference == tokens:
            return {"identical": True, "at": None, "gap": None}
        if method.kind == ENGINE:  # whose logits are another model's
            pairs = itertools.zip_longest(reference, tokens)
            at = next(n for n, (theirs, own) in enumerate(pairs) if theirs != own)
            return {"identical": False, "at": at, "gap": None}
        found: Mapping[str, Any] = first_difference(self._model, prompt, reference, tokens) or {}
        return {"identical": False, "at": found["place"], "gap": found["gap"]}


def _levels(method: Method, answer: Answer, row: int) -> list[dict[str, Any]]:
    """What the levels did for a row; nothing of other engines."""
    if answer.stats is None:
        return []
    return [
        {
            "name": name,
            "passes": level.num_forward_passes,
            "seconds": level.seconds / len(answer.rows),
            "accepted": list(level.emitted_per_verification),
        }
        for name, level in zip(method.levels, answer.rows[row].levels, strict=True)
    ]


# ---- the report ----------------------------------------------------------------------------------


def _require_pandas() -> None:
    for package in ("pandas", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"bench paper: expected the package {package}, given an environment without it; "
                "pip install 'polyspec_ext[bench]' brings it"
            )


def report(args: argparse.Namespace) -> int:
    """Write the report of saved runs."""
    _require_pandas()
    from benchmarks import report as tables  # with pandas, which only this needs

    runs = tables.load(args.runs)
    if args.output is None and len(runs) > 1:
        raise ValueError(f"output: expected a folder for {len(runs)} runs, given none")
    folder = args.runs[0] if args.output is None else Path(args.output)
    written = tables.write(runs, folder)
    for one in runs:
        table = tables.overall(one)
        lines = [f"# {one.label}", "", f"### {table.title}", "", table.note, "", *table.lines(), ""]
        output.show("\n".join(lines))
    print(f"{len(written)} files in {folder}: report.md, report.json, CSV, PNG")
    return 0
