"""The command line: ``python -m polyspec_ext generate|demo|bench ...``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import options
from .run import help_of, run_command

if TYPE_CHECKING:
    from ..outputs import Output


def add_chain_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose the models of a chain."""
    group = parser.add_argument_group("chain", "without --target: the shipped three-level chain")
    group.add_argument("--target", metavar="MODEL", help="model directory or id")
    group.add_argument(
        "--middle",
        metavar="MODEL",
        action="append",
        default=[],
        help="level between target and drafter; may be repeated",
    )
    group.add_argument(
        "--drafter", metavar="MODEL", help="model directory or id, or 'prompt-lookup'"
    )
    group.add_argument(
        "--window",
        type=options.COUNTS_OR_NONE,
        metavar="MU,K",
        help="tokens that each level but the last waits for, target first",
    )
    group.add_argument(
        "--rounds",
        type=options.COUNTS_OR_NONE,
        metavar="R,...",
        help="blocks from below after which a level waits no longer, for each above the lowest "
        "that verifies; 0: no bound (default: as many as fill its window if all is accepted)",
    )
    group.add_argument(
        "--rule",
        choices=("token", "block"),
        default="token",
        help="acceptance rule (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        help="of the models (default: float32 on the CPU, where the shipped draft levels run in "
        "bfloat16 if it multiplies that, and the checkpoint's own elsewhere)",
    )
    group.add_argument("--device", default="cpu", help="of the models (default: %(default)s)")
    options.add_threads(group)
    group.add_argument(
        "--pack",
        choices=("auto", "on", "off"),
        help="pack the weights for the CPU's matrix kernels, which takes their memory again; auto: "
        "where that is faster on this processor, and draft levels in bfloat16 where that is "
        "(default: auto for the shipped chain, else off)",
    )
    add_measure_again(group)
    group.add_argument(
        "--compile", action="store_true", help="decode through torch.compile, which takes a minute"
    )


def add_measure_again(parser: Any) -> None:
    """Option that forgets what was timed on this processor."""
    parser.add_argument(
        "--measure-again",
        action="store_true",
        help="forget what was found to be fastest on this processor, which is kept in "
        "polyspec_ext/levels of the user's cache folder, and time it again",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of a request, each one value or one for every prompt."""
    group = parser.add_argument_group(
        "sampling", "each takes one value, or one for every prompt with commas between"
    )
    for name, kind, default, metavar, meaning in (
        ("--max-new-tokens", options.COUNTS_OR_NONE, 256, "N,...", "never more than that"),
        ("--temperature", options.TEMPERATURES, 0.0, "T,...", "0 is greedy"),
        ("--top-k", options.COUNTS_OR_NONE, 0, "K,...", "0 is off"),
        ("--top-p", options.SHARES, 1.0, "P,...", "1 is off"),
        ("--min-p", options.SHARES, 0.0, "P,...", "0 is off"),
        ("--seed", options.SEEDS, 0, "S,...", "the same seed, the same text"),
    ):
        read: Callable[[str], Any] = kind
        group.add_argument(
            name,
            type=read,
            default=[default],
            metavar=metavar,
            help=f"{meaning} (default: {default:g})",
        )


def build_chain(args: argparse.Namespace) -> Any:
    """The chain that the options describe."""
    from .. import tiny
    from ..chain import Chain
    from ..planning import default_store

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.measure_again:
        default_store().clear()
    dtype = None if args.dtype is None else getattr(torch, args.dtype, args.dtype)
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(
            f"--dtype: expected a torch dtype such as float32 or bfloat16, given {args.dtype!r}"
        )
    chosen: dict[str, Any] = {"rule": args.rule, "dtype": dtype, "device": args.device}
    chosen.update(compile=args.compile, rounds=args.rounds)
    packs: dict[str, Any] = {"auto": "auto", "on": True, "off": False}
    if args.target is None:
        if args.middle or args.drafter:
            raise ValueError("--middle and --drafter: expected a --target with them, given none")
        return tiny.chain(window=args.window, pack=packs[args.pack or "auto"], **chosen)
    levels = [("--target", args.target), *(("--middle", place) for place in args.middle)]
    if args.drafter:
        levels.append(("--drafter", args.drafter))
    chosen["pack"] = packs[args.pack or "off"]
    try:
        return Chain([place for _, place in levels], args.window, **chosen)
    except (TypeError, ValueError) as error:
        # A level is named as the command line has it.
        text = re.sub(r"^levels\[(\d+)\]", lambda found: levels[int(found[1])][0], str(error))
        raise ValueError(text) from error


def generate(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or one JSON object to
    stdout. Several prompts are one batch, whose texts follow each other."""
    from transformers import AutoTokenizer

    from .. import tiny

    if args.prompt.count("-") > 1:
        raise ValueError("prompt: expected one '-', which is all of stdin, given several")
    chain = build_chain(args)
    shipped = args.target is None
    tokenizer = AutoTokenizer.from_pretrained(str(tiny.path("target")) if shipped else args.target)
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
    request = {name: values if len(values) > 1 else values[0] for name, values in given.items()}
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


def _request(prompt: str, text: str, tokens: list[int], stats: Any) -> dict[str, Any]:
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


def summary(stats: Any) -> str:
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


def make_parser() -> argparse.ArgumentParser:
    script = Path(sys.argv[0]).name if sys.argv else ""
    parser = options.Parser(
        prog=script if script == "polyspec" else "python -m polyspec_ext",
        description="Lossless polybasic speculative decoding.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions that matter, and exit"
    )
    parser.set_defaults(run=help_of(parser))
    commands = parser.add_subparsers(metavar="COMMAND")

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
    sub.set_defaults(run=generate)

    sub = commands.add_parser(
        "demo",
        help="plain decoding, two levels and three levels side by side",
        description=(
            "The shipped models: plain decoding, two-level chains and the three-level "
            "chain in one run."
        ),
    )
    sub.add_argument(
        "--prompts",
        type=options.COUNT,
        default=6,
        metavar="N",
        help="questions (default: %(default)s)",
    )
    sub.add_argument(
        "--repeats",
        type=options.COUNT,
        default=3,
        metavar="N",
        help="runs per question (default: %(default)s)",
    )
    sub.add_argument(
        "--max-new-tokens",
        type=options.COUNT,
        default=128,
        metavar="N",
        help="(default: %(default)s)",
    )
    sub.add_argument(
        "--temperature",
        type=options.number(0),
        default=0.0,
        metavar="T",
        help="(default: %(default)s)",
    )
    sub.add_argument(
        "--seed", type=options.SEED, default=0, metavar="S", help="(default: %(default)s)"
    )
    sub.add_argument(
        "--window", type=options.COUNTS_OR_NONE, metavar="MU,K", help="of the three-level chain"
    )
    sub.add_argument(
        "--two-level-window",
        type=lambda text: [options.COUNT_OR_NONE(text)],
        metavar="K",
        help="of the two-level chains",
    )
    options.add_threads(sub)
    sub.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    sub.add_argument(
        "--compile",
        choices=("auto", "none", "all"),
        default="auto",
        help="what goes through torch.compile, beside the same without: the levels that it makes "
        "faster on this processor, none, or all (needs a C++ compiler; default: %(default)s)",
    )
    add_measure_again(sub)
    sub.set_defaults(run=_demo)

    from .. import bench

    bench.add_commands(commands)
    return parser


class _Version(argparse.Action):
    """Looked up when asked for: the rest of the command line does not need it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from .. import __version__, has_cuda

        parts = [f"torch {torch.__version__}", f"transformers {metadata.version('transformers')}"]
        parts.append("CUDA device" if has_cuda() else "CPU only")
        print(f"polyspec_ext {__version__} ({', '.join(parts)})")
        parser.exit()


def _demo(args: argparse.Namespace) -> int:
    from . import demo

    return demo.run(args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; bad input is one line on stderr and status 2."""
    return run_command(make_parser(), arguments)
