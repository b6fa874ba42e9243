"""The command line: ``python -m polyspec_ext generate|demo|bench ...``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def windows(text: str) -> list[int]:
    """``"8,4"`` -> ``[8, 4]``."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"expected numbers >= 0 with commas between, as in 8,4, given {text!r}"
        )
    return numbers


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
        "--window", type=windows, metavar="MU,K", help="tokens each level but the last waits for"
    )
    group.add_argument(
        "--rounds",
        type=windows,
        metavar="R",
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
    group.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    group.add_argument(
        "--pack",
        action="store_true",
        help="pack the weights for the CPU's matrix kernels, which takes their memory again; the "
        "shipped chain's always are",
    )
    group.add_argument(
        "--compile", action="store_true", help="decode through torch.compile, which takes a minute"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of a request."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="0 is off (default: %(default)s)"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="1 is off (default: %(default)s)"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="0 is off (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def build_chain(args: argparse.Namespace) -> Any:
    """The chain that the options describe."""
    import torch

    from . import tiny
    from .chain import Chain
    from .drafters import PromptLookup

    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = None if args.dtype is None else getattr(torch, args.dtype, args.dtype)
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(
            f"--dtype: expected a torch dtype such as float32 or bfloat16, given {args.dtype!r}"
        )
    options: dict[str, Any] = {"rule": args.rule, "dtype": dtype, "device": args.device}
    options.update(compile=args.compile, rounds=args.rounds)
    if args.target is None:
        if args.middle or args.drafter:
            raise ValueError("--middle and --drafter: expected a --target with them, given none")
        return tiny.chain(window=args.window, **options)
    levels: list[Any] = [args.target, *args.middle]
    if args.drafter == "prompt-lookup":
        levels.append(PromptLookup())
    elif args.drafter:
        levels.append(args.drafter)
    return Chain(levels, args.window, pack=args.pack, **options)


def generate(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or one JSON object to
    stdout."""
    from transformers import AutoTokenizer

    from . import tiny

    chain = build_chain(args)
    shipped = args.target is None
    tokenizer = AutoTokenizer.from_pretrained(str(tiny.path("target")) if shipped else args.target)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if shipped and not args.raw:
        prompt = tiny.prompt_of(prompt)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    stream = chain.stream(
        ids, args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.min_p, args.seed
    )
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
        report = {"prompt": prompt, "text": text, "tokens": tokens, "stats": stream.stats.to_dict()}
        print(json.dumps(report, indent=2))
        return 0
    print(text[len(shown) :] if text.startswith(shown) else "")
    print(stream.stats.table() if args.stats else summary(stream.stats), file=sys.stderr)
    return 0


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
    parser = argparse.ArgumentParser(
        prog="python -m polyspec_ext", description="Lossless polybasic speculative decoding."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sub = commands.add_parser(
        "generate", help="continue a prompt", description="Continue a prompt with the target's law."
    )
    sub.add_argument(
        "prompt", help="text; '-' reads it from stdin. The shipped chain answers it as a question"
    )
    sub.add_argument(
        "--raw", action="store_true", help="do not wrap the prompt into 'Question: ...\\nAnswer:'"
    )
    sub.add_argument("--json", action="store_true", help="one JSON object instead of streamed text")
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
        "--prompts", type=int, default=6, metavar="N", help="questions (default: %(default)s)"
    )
    sub.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="runs per question (default: %(default)s)",
    )
    sub.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)"
    )
    sub.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)"
    )
    sub.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    sub.add_argument("--window", type=windows, metavar="MU,K", help="of the three-level chain")
    sub.add_argument(
        "--two-level-window", type=windows, metavar="K", help="of the two-level chains"
    )
    sub.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    sub.add_argument(
        "--compile",
        choices=("none", "drafts", "all"),
        default="drafts",
        help="what goes through torch.compile, beside the same without: nothing, the draft levels, "
        "or also the target (needs a C++ compiler; default: %(default)s)",
    )
    sub.set_defaults(run=_demo)

    from . import bench

    bench.add_commands(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from . import demo

    return demo.run(args)


def _quiet() -> None:
    """No progress bar of transformers' own: shipped models load in a blink, and the text is the
    output."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; bad input is one line on stderr and status 2."""
    args = make_parser().parse_args(arguments)
    _quiet()
    try:
        status: int = args.run(args)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
