"""``python -m polyspec_ext bench paper``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...bench.paper import command
from ...bench.paper.presets import PRESETS
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``paper`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "paper",
        help="Spec-Bench's questions, answered by every method in turns",
        description="Has plain decoding, transformers' own generation and chains of two to four "
        "levels answer Spec-Bench's questions in turns, each with its own answers before, and "
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
    _add_engines(sub)
    _add_methods(sub)
    sub.set_defaults(run=command.run)


def _add_questions(sub: Any) -> None:
    group = sub.add_argument_group("questions")
    group.add_argument(
        "--questions",
        type=options.file,
        metavar="FILE",
        help="Spec-Bench's question.jsonl, or others in its format (default: Spec-Bench's where it "
        "lies beside the repository)",
    )
    options.add_count(group, "--per-task", 10, "questions of each of the six tasks")
    options.add_count(group, "--repeats", 1, "of every question, the methods in turns")
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
        "--preset", choices=tuple(PRESETS), help="the paper's target and its EAGLE-2 head"
    )
    group.add_argument("--target", metavar="MODEL", help="model directory or id")
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
    group.add_argument("--dtype", help="of the models (default: float32 on the CPU)")
    options.add_threads(group)
    group.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="leave torch.compile out, which takes a minute and makes the fairer baseline",
    )


def _add_engines(sub: Any) -> None:
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


def _add_methods(sub: Any) -> None:
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
        "--plan-seconds",
        type=options.COUNT_OR_NONE,
        default=30,
        metavar="S",
        help="that the planner may measure to find windows; 0: windows as they are shipped "
        "(default: %(default)s)",
    )
