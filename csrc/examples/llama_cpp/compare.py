#!/usr/bin/env python3
"""Plain decoding, llama.cpp's own speculation and chains of ours side by side, in one run.

    python3 compare.py --program build/polyspec_llama            # Qwen2.5-Coder 1.5B and 0.5B
    python3 compare.py --program ... --models DIR                # your GGUF files, by size

Contenders take turns: a round runs each of them once over all prompts, so that a change in the
machine's load meets them all. Every run loads its models anew, which is not timed.
`llama.cpp's rule` is that of llama-speculative-simple in our program: the draft's likeliest token
stands if the target's sample equals it. Where --peer names that program it takes turns as well,
with weights that may be repacked; it names neither the ids of its texts nor the prompt's time.

Tokens per second are medians over the rounds, of all prompts together: with the prompt, which
drafts read as well, and of the decoding alone. Chains with a policy read the prompt with a draft
only when they ask it, which counts as decoding: what compares contenders is the time with the
prompt. `agrees` counts the greedy texts that are those of plain decoding, id by id.

The JSON is written after every text: of a run that was interrupted it has what was measured, the
prompts of a contender that were not reached left out of its row and of its comparison with plain
decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass
class Contender:
    name: str
    arguments: list[str]
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)


def contenders(models: list[Path], window: int) -> list[Contender]:
    names = [str(model) for model in models]
    found = [
        Contender("plain", names[:1]),
        Contender("plain, fast settings", [*names[:1], "--fast"]),
        Contender("target <- lookup", [names[0], "prompt-lookup", "--windows", str(window)]),
    ]
    if len(models) == 1:
        return found
    two = [*names[:2], "--windows", str(window)]
    three = [*names[:2], "prompt-lookup", "--windows", f"{2 * window},{window}"]
    found += [
        Contender("two levels, llama.cpp's rule", [*two, "--rule", "llama.cpp"]),
        Contender("two levels, token rule", [*two, "--rule", "token"]),
        Contender("two levels, block rule", [*two, "--rule", "block"]),
        Contender("two levels, block rule, fast settings", [*two, "--rule", "block", "--fast"]),
        Contender("two levels, block rule, joint policy", [*two, "--rule", "block", *JOINT]),
        Contender("three levels, block rule", [*three, "--rule", "block"]),
        Contender("three levels, joint policy", [*three, "--rule", "block", *JOINT]),
    ]
    if len(models) > 2:
        windows = ",".join(str(n * window) for n in range(len(models) - 1, 0, -1))
        found.append(Contender(f"{len(models)} models", [*names, "--windows", windows]))
        below = f"{len(models) * window},{windows}"
        deepest = [*names, "prompt-lookup", "--windows", below, *JOINT]
        found.append(Contender(f"{len(models)} models and lookup, joint policy", deepest))
        four = [
            *names,
            names[1],
            "prompt-lookup",
            "--windows",
            f"{3 * window},{2 * window},{window}",
        ]
        found.append(Contender("four levels, joint policy", [*four, *JOINT]))
    return found


JOINT = ["--policy", "joint"]


def run(program: Path, contender: Contender, options: list[str]) -> Iterator[None]:
    """Runs it over all prompts, and comes back after each of its texts."""
    command = [str(program), *contender.arguments, *options, "--json"]
    texts: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            if not texts:
                contender.rounds.append(texts)
            texts.append(json.loads(line))
            yield
        if process.wait() != 0:
            said.seek(0)
            sys.exit(f"{' '.join(command)}\n{said.read()}")


def speed(texts: list[dict[str, Any]], decoding: bool) -> float:
    tokens = sum(len(text["ids"]) for text in texts)
    seconds = sum(text["seconds"] - decoding * text["prompt_seconds"] for text in texts)
    return tokens / seconds


def over(contender: Contender, plain: Contender, decoding: bool) -> tuple[float, list[float]]:
    """Speed over plain decoding's, of the same prompts in the same round: median and range."""
    ratios = [
        speed(own, decoding) / speed(other[: len(own)], decoding)
        for own, other in zip(contender.rounds, plain.rounds, strict=False)
    ]
    return statistics.median(ratios), [min(ratios), max(ratios)]


def summary(contender: Contender, plain: Contender) -> dict[str, Any]:
    texts = contender.rounds[0]
    levels = [text["levels"] for text in texts]
    total = {
        key: [sum(text[i][key] for text in levels) for i in range(len(levels[0]))]
        for key in ("passes", "verifications", "emitted", "accepted", "proposed")
    }
    median, whole_range = over(contender, plain, False)
    return {
        "name": contender.name,
        "tokens_per_second": statistics.median(speed(t, False) for t in contender.rounds),
        "decoding_tokens_per_second": statistics.median(speed(t, True) for t in contender.rounds),
        "over_plain": median,
        "over_plain_range": whole_range,
        "decoding_over_plain": over(contender, plain, True)[0],
        "tokens_per_verification": total["emitted"][0] / total["verifications"][0],
        "accepted_per_verification": total["accepted"][0] / total["verifications"][0],
        "passes": total["passes"],
        "agrees": sum(a["ids"] == b["ids"] for a, b in zip(texts, plain.rounds[0], strict=False)),
        "texts": len(texts),
    }


def row(found: dict[str, Any], greedy: bool) -> str:
    agrees = f"{found['agrees']} of {found['texts']}" if greedy else "-"
    low, high = found["over_plain_range"]
    return (
        f"| {found['name']} | {found['tokens_per_second']:.1f} "
        f"| {found['over_plain']:.2f} ({low:.2f}-{high:.2f}) "
        f"| {found['decoding_tokens_per_second']:.1f} | {found['decoding_over_plain']:.2f} "
        f"| {found['tokens_per_verification']:.2f} | {found['accepted_per_verification']:.2f} "
        f"| {' / '.join(map(str, found['passes']))} | {agrees} |"
    )


HEAD = (
    "| | tokens/s with the prompt | x plain (range) | tokens/s behind it | x plain "
    "| tokens per verification | accepted | passes by level | agrees |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Peer:
    """Collect the figures that llama-speculative-simple prints, by round."""

    program: Path
    models: list[Path]
    tokens_per_second: list[float] = field(default_factory=list)
    accepted: int = 0
    tokens: int = 0
    verifications: int = 0

    def run(self, prompts: list[str], temperature: float, args: argparse.Namespace) -> None:
        tokens = seconds = 0.0
        for prompt in prompts:
            chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            command = [self.program, "-m", self.models[0], "-md", self.models[1], "-p", chat]
            command += [
                "-n",
                args.tokens,
                "--temp",
                temperature,
                "-t",
                args.threads or os.cpu_count(),
            ]
            command += ["--top-k", 0, "--top-p", 1, "--min-p", 0, *DRAFTS.split(), args.window]
            words = [str(word) for word in command]
            done = subprocess.run(words, capture_output=True, text=True, errors="replace")
            said = done.stdout + done.stderr
            decoded = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", said)
            accepted = re.search(r"n_accept += +(\d+)", said)
            if decoded is None or accepted is None:
                sys.exit(
                    f"{' '.join(words)}: no figures, exit status {done.returncode}\n{said[-2000:]}"
                )
            tokens, seconds = tokens + int(decoded[1]), seconds + float(decoded[2])
            self.accepted += int(accepted[1])
            self.tokens += int(decoded[1])
            # Each verification emits one token more than it accepts.
            self.verifications += int(decoded[1]) - int(accepted[1])
        self.tokens_per_second.append(tokens / seconds)

    def summary(self) -> dict[str, Any]:
        return {
            "name": "llama-speculative-simple",
            "decoding_tokens_per_second": statistics.median(self.tokens_per_second),
            "tokens_per_verification": self.tokens / self.verifications,
            "accepted_per_verification": self.accepted / self.verifications,
        }


def peer_row(own: dict[str, Any]) -> str:
    return (
        f"| {own['name']} | - | - | {own['decoding_tokens_per_second']:.1f} | - "
        f"| {own['tokens_per_verification']:.2f} | {own['accepted_per_verification']:.2f} | - | - |"
    )


DRAFTS = "--spec-type draft-simple --spec-draft-p-min 0 --spec-draft-n-max"


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*: (.*)", text)
    return found[1] if found else platform.processor()


def models_of(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.gguf"), key=lambda path: -path.stat().st_size)
    if not found:
        sys.exit(f"--models: expected a folder with GGUF files, given {folder}")
    return found


def chosen(every: list[Contender], names: list[str] | None) -> list[Contender]:
    """Return plain decoding and the contenders with one of `names` as their name or part of it."""
    if names is None:
        return every
    whole = {contender.name for contender in every}
    found = every[:1]
    for name in names:
        of_it = [c for c in every if c.name == name or (name not in whole and name in c.name)]
        if not of_it:
            sys.exit(f"--contenders: expected of {', '.join(c.name for c in every)}, given {name}")
        found += of_it
    return [contender for contender in every if contender in found]


def save(report: dict[str, Any], path: Path | None) -> None:
    """Replace the file in one step: an interruption leaves the old file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="polyspec_llama")
    parser.add_argument("--models", type=Path, help="a folder; the largest file is the target")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt", help="one a line")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=4, help="of the drafter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME",
        help="beside plain decoding: a name, or a part of names, as 'joint'",
    )
    parser.add_argument("--peer", type=Path, help="llama-speculative-simple")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()

    if args.models is None:
        get = [sys.executable, str(HERE / "get.py"), "qwen1.5b", "qwen0.5b"]
        done = subprocess.run(get, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(done.returncode)
        models = [Path(line) for line in done.stdout.splitlines()]
    else:
        models = models_of(args.models)
    options = ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    if args.threads:
        options += ["--threads", str(args.threads)]
    report: dict[str, Any] = {
        "models": [model.name for model in models],
        "processor": processor(),
        "threads": args.threads or os.cpu_count(),
        "prompts": args.prompts.read_text().split("\n")[:-1],
        "tokens": args.tokens,
        "window": args.window,
        "rounds": args.rounds,
        "contenders": args.contenders,
        "temperatures": {},
    }
    print(f"{' <- '.join(report['models'])}; {report['processor']}, {report['threads']} threads")
    for temperature in args.temperatures:
        every = chosen(contenders(models, args.window), args.contenders)
        peer = Peer(args.peer, models) if args.peer is not None and len(models) > 1 else None
        for _ in range(args.rounds):
            for contender in every:
                turn = [*options, "--temperature", str(temperature)]
                for _ in run(args.program, contender, turn):
                    found = [summary(one, every[0]) for one in every if one.rounds]
                    report["temperatures"][str(temperature)] = found
                    save(report, args.json)
            if peer is not None:
                peer.run(report["prompts"], temperature, args)
        print(f"\ntemperature {temperature:g}\n\n{HEAD}")
        for one in found:
            print(row(one, temperature == 0), flush=True)
        if peer is not None:
            own = peer.summary()
            report.setdefault("peer", {})[str(temperature)] = own
            print(peer_row(own), flush=True)
    save(report, args.json)


if __name__ == "__main__":
    main()
