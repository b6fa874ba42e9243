"""``python -m polyspec_ext generate``: continue a prompt as a stream, or several as a batch.

For all commands: chain and request from options, prompts from the user's texts, and text from
tokens as they are generated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from .. import columns, progress, rooms, tiny
from ..chain import Chain
from ..chat import ChatPrompt, StopStrings, ends_of_turn, has_template, prompt_of_text
from ..drafters.words import original
from ..inputs import Parameters
from ..levels import tokenizer_at
from ..levels.sources import model_source
from ..outputs import Output, Stream
from ..runtime.batch import Batch
from .options import SWITCHES, add_chain_options

SHIPPED = (
    "The shipped target has 7 million parameters: expect wrong sums. The text is exactly the "
    "target's own."
)

_PLANNED = 32  # minimum new tokens of a plan: fewer do not show every step


# ---- chains --------------------------------------------------------------------------------------


def sampling_of(args: argparse.Namespace, count: int, n: int = 1) -> dict[str, Any]:
    """Return the sampling options for `n` texts of each of `count` prompts as keyword arguments of
    `Chain.generate`, but for n."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    params: dict[str, list[Any]] = {name: getattr(args, name) for name in (*names, *penalties)}
    for name, values in params.items():
        things, number = ("texts", count * n) if name == "seed" and n > 1 else ("prompts", count)
        if len(values) not in (1, number):
            raise ValueError(
                f"{name}: expected one value, or as many as {things} ({number}), given "
                f"{len(values)}"
            )
    of_rules = [(params.pop(name) * count)[:count] for name in penalties]
    rules = list(zip(*of_rules, strict=True))
    if set(rules) != {(None, 0.0, 0.0)}:  # else all are off
        from ..rules import LogitsRules

        params["rules"] = [LogitsRules(*values) for values in rules]
    request = {name: values if len(values) > 1 else values[0] for name, values in params.items()}
    return {**request, "stop": args.stop}


def followed(chain: Chain, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request; its missing options are of the target's generation_config.json
    (`Chain.text_options`)."""
    given = {name: value for name, value in request.items() if name in Parameters.__annotations__}
    return {**request, **chain.text_options(**given)}


def samples(request: dict[str, Any]) -> bool:
    """Return whether the texts of a request of `followed` are drawn."""
    temperature = request["temperature"]
    return any(temperature) if isinstance(temperature, list) else bool(temperature)


def _with_lookup(
    args: argparse.Namespace, target: str | Path, options: dict[str, Any]
) -> Chain | None:
    """Return the chain of a target alone with prompt lookup and a policy; None: the options choose
    windows, or nothing can draft for this target."""
    if args.window is not None or args.rounds is not None or args.tail:
        return None
    try:
        chain = Chain([target, "prompt-lookup"], **{**options, "policy": args.policy or "joint"})
    except (TypeError, ValueError):
        return None
    progress.phase(
        "no --draft: prompt lookup drafts, and rests where it does not pay; a smaller model of the "
        "same vocabulary may gain more"
    )
    return chain


def build_chain(args: argparse.Namespace, looks_up: bool = False) -> Chain:
    """Build the chain of the options; `looks_up`: a target alone with prompt lookup."""
    if args.chain is not None:
        return _saved_chain(args)
    names = ("rule", "dtype", "device", "rounds", "tail", "policy")
    chosen: dict[str, Any] = {name: getattr(args, name) for name in names}
    chosen["pack"] = SWITCHES[args.pack]
    if args.target is None and not args.middle and not args.draft:
        return tiny.chain(window=args.window, **chosen)
    target = tiny.path("target") if args.target is None else args.target
    if looks_up and not args.middle and not args.draft:
        chain = _with_lookup(args, target, chosen)
        if chain is not None:
            return chain
    levels = [("--target", target), *(("--middle", path) for path in args.middle)]
    if args.draft:
        levels.append(("--draft", args.draft))
    try:
        return Chain([path for _, path in levels], args.window, **chosen)
    except (TypeError, ValueError) as error:
        # Name the level as on the command line.
        text = re.sub(r"^levels\[(\d+)\]", lambda match: levels[int(match[1])][0], str(error))
        raise ValueError(text) from error


def _saved_chain(args: argparse.Namespace) -> Chain:
    """Load the chain of ``--chain``, and set the target of the options to its target.

    Raises:
        ValueError: the file has no chain, or an option is set that the file decides.
    """
    parser = argparse.ArgumentParser()
    add_chain_options(parser)
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("chain", "threads"):
            raise ValueError(f"{name}: expected none beside --chain, given {value}")
    try:
        chain = Chain.from_plan(args.chain)
    except ValueError as error:
        raise ValueError(re.sub("^path:", "chain:", str(error))) from error
    args.target = rooms.store.ChainFile.read("chain", Path(args.chain)).elements[0].source
    return chain


def planned_chain(args: argparse.Namespace, prompts: list[list[int]]) -> Chain:
    """Plan a chain of the options' models for `prompts` (``--auto``).

    Raises:
        ValueError: no target, or an option is set that the plan chooses.
    """
    for name in ("chain", "window", "rounds", "policy", "dtype"):
        if getattr(args, name) is not None:
            raise ValueError(f"auto: expected no --{name} beside it, given {getattr(args, name)}")
    if args.target is None:
        raise ValueError("auto: expected a --target beside it, given none")
    if args.measure_again:
        from ..planning.store import default_store

        default_store().clear()
    sources = [args.target, *args.middle, *([args.draft] if args.draft else [])]
    return Chain.planned(
        sources,
        prompts,
        max(_PLANNED, *args.max_new_tokens),
        temperature=args.temperature[0] or 0.0,
        pack=SWITCHES[args.pack],
        consider=True,
        batch=len(prompts),
    )


# ---- texts ---------------------------------------------------------------------------------------


def tokenizer_of(args: argparse.Namespace) -> Any:
    """Load the target's tokenizer. ValueError: no model, or no tokenizer beside it."""
    if args.target is None:
        return tiny.tokenizer()
    path = original(args.target)
    source = model_source("target", path)
    try:
        return tokenizer_at(source.location)
    except ValueError as error:
        raise ValueError(f"target: {error}") from error


def require_text(asked: Sequence[str]) -> None:
    """Refuse prompts without text (ValueError)."""
    for number, text in enumerate(asked, 1):
        if not text.strip():
            which = f" as prompt {number} of {len(asked)}" if len(asked) > 1 else ""
            raise ValueError(f"prompt: expected text, given {text[:20]!r}{which}")


def show_prompt(prompt: ChatPrompt) -> None:
    print(f"prompt of {len(prompt.input_ids)} tokens:\n{prompt.text}", file=sys.stderr)


def print_text(
    tokens: Iterable[int],
    tokenizer: Any,
    stops: Sequence[str] = (),
    colours: Callable[[str, int], str] | None = None,
) -> str:
    """Print a text up to a stop string while its tokens are generated, and return it; `colours`:
    of a piece of text with the number of its last token."""
    reader = StopStrings(tokenizer, stops)
    for number, token in enumerate(tokens):
        piece = reader.add(token)
        print(piece if colours is None else colours(piece, number), end="", flush=True)
    print(reader.rest(), flush=True)
    return reader.text


class Colours:
    """Show pieces of the text of a batch of one row in the colour of the level that proposed them
    (``--show-levels``). The engine of `chain` traces from now on."""

    # For the drafter and the levels above it; the target's tokens have no colour.
    _CODES = (("green", "32"), ("cyan", "36"), ("yellow", "33"), ("magenta", "35"))

    def __init__(self, chain: Chain, batch: Batch) -> None:
        chain.engine.traces = True
        self._row, self._count = batch.rows[0], len(chain.names)
        below = enumerate(chain.names[1:], 2)
        names = [chain.names[0], *(f"{name} ({self._code(n)[0]})" for n, name in below)]
        self.legend = f"{', '.join(names)}; underlined: in place of a rejected token"

    def _code(self, level: int) -> tuple[str, str]:
        return self._CODES[(self._count - level) % len(self._CODES)]

    def __call__(self, piece: str, number: int) -> str:
        """Return `piece` with the colour of token `number`."""
        origin = self._row.origins[number]
        codes = [] if origin.level == 1 else [self._code(origin.level)[1]]
        codes += ["4"] if origin.corrected else []
        return f"\x1b[{';'.join(codes)}m{piece}\x1b[0m" if codes and piece else piece


# ---- the command ---------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to stdout, a summary to stderr; or print a JSON object to
    stdout. Several prompts are a batch, and their texts are printed in order."""
    if args.prompt.count("-") > 1:
        raise ValueError("prompt: expected one '-', which is all of stdin, given several")
    if args.raw and args.system is not None:
        raise ValueError("system: expected no --raw beside it, which leaves out the chat template")
    if args.show_levels and (args.json or args.n > 1 or len(args.prompt) > 1):
        raise ValueError("show-levels: expected one text on the terminal, given several or --json")
    request = sampling_of(args, len(args.prompt), args.n)
    texts = [_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    require_text(texts)
    chain = None if args.auto else build_chain(args)
    tokenizer = tokenizer_of(args)
    prompts = [prompt_of_text(tokenizer, text, args.system, args.raw) for text in texts]
    if chain is None:
        chain = planned_chain(args, [prompt.input_ids for prompt in prompts])
    if not args.raw and has_template(tokenizer):
        request["eos_token_id"] = ends_of_turn(tokenizer, chain.levels[0])
    request = followed(chain, request)
    if args.verbose:
        print(chain, file=sys.stderr)
        for prompt in prompts:
            show_prompt(prompt)
    stop, limits = request.pop("stop"), request.pop("max_new_tokens")
    rows = [prompt.input_ids for prompt in prompts]
    requests = chain.requests(chain.generate, rows, limits, cast(Parameters, request), n=args.n)
    if len(requests) == 1 and not args.json:
        reader = StopStrings(tokenizer, stop) if stop else None
        stream = Stream(chain.begin(requests), reader)
        colours = Colours(chain, stream.batch) if args.show_levels else None
        print_text(progress.after_prompts(stream), tokenizer, stop or (), colours)
        if colours is not None:
            print(columns.wrapped(colours.legend), file=sys.stderr)
        seeds, stats = stream.seeds, stream.stats
    else:
        with progress.prompts():
            out = chain.complete(requests, [request.tokens for request in requests], stop=stop)
        seeds, stats = out.seeds, out.stats
        answers = _answers(out, [prompt for prompt in prompts for _ in range(args.n)], tokenizer)
        if args.json:
            # (A single request has the statistics of the call.)
            report = {"requests": answers} if len(answers) > 1 else answers[0]
            print(json.dumps({**report, "stats": stats.to_dict()}, indent=2))
            return 0
        # Titles are the prompts, in the format of head and tail for several files.
        titles = [f"==> {' '.join(text.split())} <==" for text in texts for _ in range(args.n)]
        blocks = (f"{title}\n{row['text']}\n" for title, row in zip(titles, answers, strict=True))
        print("\n".join(blocks), end="")
    if args.target is None:
        print(columns.wrapped(SHIPPED), file=sys.stderr)
    print(columns.of_stats(stats) if args.stats else stats, file=sys.stderr)
    if args.seed == [None] and samples(request):  # to sample the same text again
        print(f"--seed {','.join(map(str, seeds))}", file=sys.stderr)
    return 0


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("prompt: expected UTF-8 text on stdin, given other bytes") from None


def _answers(out: Output, prompts: list[ChatPrompt], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the answers as JSON objects, in the order of the prompts."""
    texts = out.stopped_text or [
        tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out.new_tokens
    ]
    names = ("prompt", "text", "tokens", "finish_reason", "seed", "stats")
    fronts, stats = [p.text for p in prompts], [s.to_dict() for s in out.requests]
    columns_ = (fronts, texts, out.new_tokens, out.finish_reasons, out.seeds, stats)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns_, strict=True)]
