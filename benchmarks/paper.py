"""Questions, as Spec-Bench's, answered by every method in turns, and a report.

Plain decoding, transformers' generation and chains of two to four levels answer questions, each
after its earlier answers. A line per turn goes to a folder; a run that was killed goes on when
it is called again. Other engines have their forms of the target and of one draft.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring, methods, output, questions, record
from benchmarks.engines import LLAMA_OPTIONS, engines_of
from benchmarks.measuring import Decode, Request
from benchmarks.methods import HEADS, TARGET, W4, Method, Models
from benchmarks.output import REPEATED
from benchmarks.questions import Conversation, Question
from benchmarks.record import Turn, TurnWriter
from benchmarks.shapes import weight_bytes
from polyspec_ext import processor, progress
from polyspec_ext.cli import options
from polyspec_ext.drafters.trees import DynamicTree
from polyspec_ext.planning.planner import plan

Call = tuple[Method, Decode]
Ids = list[int]
_PROMPTS = 12  # questions for windows, two of each task
_CHAINS = ("chain", "eagle", "adaptive")  # kinds of methods with the planner's windows
_WARM_UP_TOKENS = 16  # at most, on the CPU
_MOST_TURNS = 16  # of a question, so that every turn has a different seed
# Keys of a turn's line; a failed turn has none.
_NUMBERS = "prompt_tokens", "new_tokens", "seconds", "prefill_seconds", "tokens", "lossless"
# Options among the settings of a run.
_SETTINGS = (
    "per_task", "max_new_tokens", "temperature", "seed", "warm_up", "preset",
)  # fmt: skip


# ---- options -------------------------------------------------------------------------------------


def _questions(text: str) -> Path:
    return questions.GSM8K if text == "gsm8k" else options.file(text)


OPTIONS: tuple[Any, ...] = (
    ("--output", Path, Path("build/paper"), "DIR", "the run's folder"),
    ("--questions", _questions, None, "FILE", "JSON lines with \"turns\", \"prompt\", \"question\" "
     "or \"instruction\", or gsm8k for its test split where that lies beside the repository "
     "(default: Spec-Bench's where it lies there, else a few that come along)"),
    ("--preset", tuple(methods.PRESETS), None, None, "the paper's target and its EAGLE-2 head"),
    ("--target", None, None, "MODEL", "directory, id or GGUF file (default: the shipped models)"),
    ("--draft", REPEATED, [], "NAME=MODEL", "a draft model, by its name in --methods; may be "
     "repeated, the dearest first"),
    ("--eagle2", None, None, "HEAD", "EAGLE-1 or EAGLE-2 head, directory or id"),
    ("--eagle3", None, None, "HEAD", "EAGLE-3 head, directory or id"),
    ("--openvino", options.words, [], "DIR[,DIR]", "models as OpenVINO has them (methods openvino, "
     "openvino-assisted)"),
    *LLAMA_OPTIONS,
    ("--methods", options.words, [], "KEY,...", "plain, plain-captured, generate, assisted:NAME, "
     "planned, levels below the target with + between (w4+drafter, w4+eagle2, prompt-lookup), and "
     "these with a policy in front (online:drafter, joint:w4+drafter) (default: some of each)"),
    ("--method", REPEATED, [], "NAME=FILE.py:FUNCTION", "a method of yours: its function takes the "
     "target's model and tokenizer, and gives a function of a request (prompts, max_new_tokens, "
     "temperature, seeds) that returns the new tokens of each prompt; may be repeated"),
    ("--per-task", options.COUNT, 10, "N", "questions of each of the six tasks"),
    ("--max-new-tokens", options.COUNT, 64, "N", "of a turn"),
    ("--warm-up", options.COUNT, 1, "N", "times that each method answers the first turn before"),
    ("--no-report", "without tables, which `report DIR` makes later"),
    ("--plan-seconds", options.COUNT_OR_NONE, 30, "S", "that the planner may measure to find "
     "windows; 0: windows as they are shipped"),
    "--temperature", "--seed", "--device", "--threads",
)  # fmt: skip


def models_of(args: argparse.Namespace) -> tuple[Models, str]:
    """Return the models of the options, and their template."""
    functions = methods.read_functions(args.method)
    options: dict[str, Any] = {"device": args.device, "functions": functions}
    drafts: dict[str, str] = {}
    for text in args.draft:
        name, sign, path = text.partition("=")
        name, path = (name, path) if sign else (Path(text).name, text)
        drafts[methods.new_name(name, drafts, "--draft: expected NAME=MODEL")] = path
    heads = {name: getattr(args, name) for name in HEADS if getattr(args, name) is not None}
    if args.preset is None and args.target is None:
        if drafts or heads or args.openvino or args.gguf:
            names = "--draft, --eagle2, --eagle3, --openvino, --gguf"
            raise ValueError(f"{names}: expected a --target with them")
        if args.device != "cpu":
            options["dtype"] = torch.bfloat16
        return methods.shipped(**options), "tiny"
    tree, template, target = DynamicTree(), questions.AUTO, args.target
    if args.preset is not None:
        model, head, template, total_tokens = methods.PRESETS[args.preset]
        tree = DynamicTree(total_tokens=total_tokens)
        target, heads = target or model, {methods.EAGLE2: head, **heads}
    target, *sources = methods.require([target, *drafts.values(), *heads.values()])
    drafts = dict(zip(drafts, sources, strict=False))
    heads = dict(zip(heads, sources[len(drafts) :], strict=True))
    engines = engines_of(args.gguf, args.llama, args.openvino)
    return Models(target, drafts, heads, tree, engines=engines, **options), template


# ---- before the turns ----------------------------------------------------------------------------


@dataclass
class Session:
    """Options, models, methods, questions and the form of their prompts."""

    args: argparse.Namespace
    models: Models
    made: list[Method]
    chosen: list[Question]
    conversation: Conversation

    def first_prompts(self, questions: Sequence[Question]) -> list[Ids]:
        """Return the prompts of the questions' first turns."""
        return [self.conversation.prompt(question.turns[:1], []) for question in questions]


def run(args: argparse.Namespace) -> int:
    """Measure, and write the report. Return 1 if a turn failed."""
    output.require_device(args.device)
    if not args.no_report:
        _require_pandas()
    models, template = models_of(args)
    args.questions = args.questions or questions.default_path()
    chosen = questions.select(questions.read(args.questions), args.per_task)
    if args.questions == questions.PACKAGED:
        progress.note(
            f"bench paper: {len(chosen)} questions that come along, too few for an interval that "
            "says much; --questions takes a file"
        )
    keys = args.methods or methods.default_keys(models)
    keys = [*keys, *(name for name in models.functions if name not in keys)]
    listed = methods.read_keys(keys, models)
    begun = record.read_facts(args.output) if (args.output / record.FACTS).is_file() else None
    if begun is not None:  # with the windows planned before
        before = [Method.from_dict(fields) for fields in begun["methods"]]
        listed = before if [m.name for m in before] == [m.name for m in listed] else listed
    used = {TARGET, *(name for method in listed for name in method.levels)}
    levels = {name: models.draft(name) for name in (TARGET, W4, *models.drafts) if name in used}
    lengths = [level.max_length for level in levels.values() if level.max_length is not None]
    room = min(lengths, default=1 << 30) - args.max_new_tokens
    conversation = Conversation(models.tokenizer, template, room)
    session, prediction = Session(args, models, listed, chosen, conversation), dict[str, Any]()
    if begun is None and args.plan_seconds > 0:
        prediction = plan_windows(session)
    ready = progress.bar(session.made, desc="methods", leave=False)
    calls = [(method, methods.decoder(method, models)) for method in ready]
    facts = {**_facts(session), "prediction": prediction}
    if begun is None:
        facts["weight_bytes"] = {name: weight_bytes(x.model) for name, x in levels.items()}
        bandwidth = measuring.copy_bandwidth("cpu" if models.on_cpu else "cuda")
        facts["copy_bandwidth_bytes_per_second"] = 1e9 * bandwidth
    else:
        other = record.differences(begun, facts)
        if other:
            raise ValueError(
                f"--output: expected the settings of the run that {args.output} has begun, or "
                f"another folder; given others: {'; '.join(other)}"
            )
        again = {"created": facts["created"], "commit": facts["commit"]}
        facts = {**begun, "continued": [*begun.get("continued", []), again]}
    writer = TurnWriter(args.output, facts)
    processor.note_load()
    turns = facts["settings"]["turns"] * len(calls)
    with progress.bar(total=turns, unit="turn", smoothing=0.05) as bar:
        runner = Runner(session, calls, writer, bar.update)
        runner.warm_up()
        runner.run()
    if not args.no_report:
        report(argparse.Namespace(runs=[args.output], output=None))
    return int(any(turn["status"] != record.OK for turn in writer.turns))


def plan_windows(session: Session) -> dict[str, dict[str, Any]]:
    """Plan once for all levels of the methods, give the methods planned windows, and return
    predictions by key. A policy starts with the windows of its chain, and the window of a head with
    trees is their depth."""
    models, args, kinds = session.models, session.args, (*_CHAINS, methods.PLANNED)
    names = {name for method in session.made if method.kind in kinds for name in method.levels}
    if not names:
        return {}
    levels = [models.element(name) for name in (TARGET, *models.names) if name in names]
    limits: Any = {"seconds": args.plan_seconds, "temperature": args.temperature}
    prompts = session.first_prompts(session.chosen[:_PROMPTS])
    planned = plan(levels, prompts, args.max_new_tokens, pack=False, **limits)
    # The planner orders levels by their times, the key may not.
    by_levels = {frozenset(c.levels): c for c in planned.candidates}
    after, prediction = [], {}
    for method in session.made:
        chain = by_levels.get(frozenset(method.levels))
        if method.kind == methods.PLANNED:
            chain = planned.recommended
            label = f"planned: {' <- '.join(chain.levels)}"
            method = replace(method, label=label, levels=chain.levels)
        if chain is not None and method.kind in kinds:
            tree = models.tree_of(method.levels[-1])
            form = None if tree is None else methods.tree_form(tree, chain.windows[-1])
            settings = {key: getattr(chain, key) for key in ("windows", "rounds", "rule", "tail")}
            method = replace(method, **settings, tree=form)
        if chain is not None and (method.baseline or (method.kind in kinds and not method.policy)):
            rate = chain.predicted_decode_tokens_per_second
            prediction[method.name] = {"tokens_per_second": rate, "windows": list(chain.windows)}
        after.append(method)
    session.made = after
    return prediction


def _facts(session: Session) -> dict[str, Any]:
    """Return ``run.json`` as before the measurement."""
    args, models, listed, chosen = session.args, session.models, session.made, session.chosen
    about = output.describe("cpu" if models.on_cpu else "cuda")
    commit = about.pop("commit")
    versions = {name: about.pop(name) for name in ("torch", "transformers", "python")}
    versions["polyspec_ext"] = importlib.metadata.version("polyspec_ext")
    return {
        "schema": record.SCHEMA,
        "command": "bench paper",
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {**about, "device": args.device},
        "load": processor.load_average(),
        "commit": commit and commit.removesuffix("+"),
        "dirty": commit and commit.endswith("+"),
        "versions": versions,
        "settings": {
            "questions": (
                "polyspec_ext" if args.questions == questions.PACKAGED else args.questions.stem
            ),
            "digest": questions.digest(chosen),
            "count": len(chosen),
            "turns": sum(len(question.turns) for question in chosen),
            **{name: getattr(args, name) for name in _SETTINGS},
            "template": session.conversation.template,
            "prompt_limit": session.conversation.room,
            "threads": torch.get_num_threads(),
            "methods": [method.name for method in listed],
        },
        "models": list(models.facts(listed)),
        "methods": [asdict(method) for method in listed],
    }


# ---- the turns -----------------------------------------------------------------------------------


@dataclass
class Runner:
    """Measurement: every method answers every turn, one after another, in a rotating order.
    `writer` has the finished turns and records new turns; `tick` is called after each."""

    session: Session
    calls: Sequence[Call]
    writer: TurnWriter
    tick: Callable[[], Any]

    def __post_init__(self) -> None:
        (self._baseline,) = (method.name for method, _ in self.calls if method.baseline)
        names = [self._baseline, *(method.plain for method, _ in self.calls)]
        # Methods with reference texts answer before the others, the baseline first.
        self._first = sum(method.name in names for method, _ in self.calls)
        self.calls = sorted(self.calls, key=lambda call: (*names, call[0].name).index(call[0].name))
        self._model = self.session.models.level.model
        self._done = {record.key_of(turn): turn for turn in self.writer.turns}

    def run(self) -> None:
        """Measure all unfinished turns."""
        for number, question in enumerate(self.session.chosen):
            for turn in range(len(question.turns)):
                rest = measuring.rotated(self.calls[self._first :], number + turn)
                for call in (*self.calls[: self._first], *rest):
                    self._take_turn(call, number, turn)
                    self.tick()

    def warm_up(self) -> None:
        """Answer the first question before the measurement. Errors are ignored: they recur in the
        measurement and are recorded there."""
        args, prompts = self.session.args, self.session.first_prompts(self.session.chosen[:1])
        # On CUDA the warm-up captures the steps.
        most = _WARM_UP_TOKENS if self._model.device.type == "cpu" else args.max_new_tokens
        request = Request(prompts, min(most, args.max_new_tokens), args.temperature, [args.seed])
        for _, decode in self.calls:
            with contextlib.suppress(Exception):
                for _ in range(args.warm_up):
                    decode(request)

    def _take_turn(self, call: Call, number: int, turn: int) -> None:
        """Measure a turn of a question, unless it is on the disk."""
        question, (method, _) = self.session.chosen[number], call
        key = question.question_id, turn, method.name
        if key in self._done:
            return
        row: Turn = dict.fromkeys(_NUMBERS)
        row |= {"status": record.FAILED, "levels": [], "error": "the turn before failed"}
        prompt = self._prompt(question, turn, method.name)
        try:
            if prompt is not None:
                row = self._measured(call, number, turn, prompt)
        except Exception as error:  # a method's error must not end the run
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        about = {"category": question.category, "task": question.task}
        row |= dict(zip(("question_id", "turn", "method"), key, strict=True)) | about
        self._done[key] = row
        self.writer.add(row)

    def _prompt(self, question: Question, turn: int, name: str) -> Ids | None:
        # After the method's answers; None: a turn before failed.
        texts = [self._done[question.question_id, n, name]["tokens"] for n in range(turn)]
        if None in texts:
            return None
        answers = [self.session.conversation.answer(tokens) for tokens in texts]
        return self.session.conversation.prompt(question.turns[: turn + 1], answers)

    def _measured(self, call: Call, number: int, turn: int, prompt: Ids) -> Turn:
        """Return the numbers of a call."""
        (method, decode), args = call, self.session.args
        seed = (args.seed + number * _MOST_TURNS + turn) % 2**64
        request = Request([prompt], args.max_new_tokens, args.temperature, [seed])
        answer, seconds = measuring.timed(decode, request, self._model.device.type)
        (tokens,), stats = answer.texts, answer.stats
        if not tokens:
            raise RuntimeError("expected at least one new token, given none")
        levels = [
            {
                "name": name,
                "passes": level.num_forward_passes,
                "seconds": level.seconds,
                "accepted": list(level.emitted_per_verification or ()),
            }
            for name, level in zip(method.levels, stats.levels if stats else (), strict=False)
        ]
        prefill = answer.prefill_seconds if stats is None else stats.prefill_seconds
        lossless = self._lossless(method, number, prompt, tokens, turn)
        numbers = len(prompt), len(tokens), seconds, prefill, tokens, lossless
        row: Turn = dict(zip(_NUMBERS, numbers, strict=True))
        return row | {"status": record.OK, "error": None, "levels": levels}

    def _lossless(
        self, method: Method, index: int, prompt: Ids, tokens: Ids, turn: int
    ) -> dict[str, Any] | None:
        """Compare a text with its reference, or its likelihood with the mean."""
        # An engine's form of the target is another model.
        model = None if method.kind == methods.ENGINE else self._model
        if (heat := self.session.args.temperature) > 0:
            return None if model is None else measuring.compared(model, prompt, [], tokens, heat)
        name, reference = method.plain or self._baseline, tokens
        if name != method.name:
            question = self.session.chosen[index]
            reference = self._done[question.question_id, turn, name]["tokens"]
            if reference is None or self._prompt(question, turn, name) != prompt:
                return None
        return measuring.compared(model, prompt, reference, tokens)


# ---- the report ----------------------------------------------------------------------------------


def _require_pandas() -> None:
    if importlib.util.find_spec("pandas") is None:
        reason = "expected the package pandas, given an environment without it"
        raise ValueError(f"bench paper: {reason}; pip install 'polyspec_ext[bench]' brings it")


def report(args: argparse.Namespace) -> int:
    """Write the papers' tables from saved runs.

    They are beside the papers' numbers, as Markdown and JSON. Nothing of a run enters another's
    numbers. The overall table is printed.
    """
    _require_pandas()
    from benchmarks import report as tables  # imports pandas, needed here only

    runs = tables.load(args.runs)
    if args.output is None and len(runs) > 1:
        raise ValueError(f"output: expected a folder for {len(runs)} runs, given none")
    folder = args.runs[0] if args.output is None else Path(args.output)
    tables.write(runs, folder)
    for run in runs:
        output.show("\n".join([f"# {run.label}", "", *tables.overall(run).markdown()]))
    print(f"report.md and report.json in {folder}")
    return 0


REPORT_OPTIONS = (
    ("runs", {"type": options.folder, "nargs": "+"}, None, "RUN", "folder of a run"),
    ("--output", None, None, "DIR", "(default: the folder of the run, where it is one)"),
)
