"""``chains``: every chain of two to four levels below the shipped target, or below the same
target grown, up to the width and depth of a published model, beside plain decoding of it, in turns
within one run.

A level stands below those that cost more. What stands in the table: how often each level was asked
(N passes), how much of its drafts it took (L), what share of the time (T), how fast the whole was
and how fast the planner, which chose the windows, had said; chains that lose stay in. Where the
machine has become faster or slower since the planner measured, what it would have said at the speed
of the run stands beside that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import chains_table, machine, output, questions
from benchmarks.measuring import (
    Contender,
    Request,
    chain_call,
    device_clock,
    generate_call,
    measure,
    ratios,
    verdict,
)
from benchmarks.memory import require_memory
from benchmarks.published_shapes import SHAPES, growth_of
from polyspec_ext import progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.drafters import DynamicTree, Eagle, PromptLookup
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.planning.planner import Plan, plan
from polyspec_ext.planning.search import Candidate
from polyspec_ext.quantization import load_w4, quantize_w4, save_w4
from polyspec_ext.tuning import pass_seconds

SCHEMA = 4  # of the JSON report
TARGET, W4, MIDDLE, DRAFTER, NGRAM = "target", "W4 copy", "middle", "drafter", "n-gram"
EAGLE, TREE = "EAGLE", "EAGLE tree"
# Below the target, the dearest first: a chain is a part of it in that order.
KINDS = (W4, MIDDLE, DRAFTER, NGRAM)
# Below these an EAGLE head drafts: they have the states that it reads.
READ = ((TARGET,), (TARGET, W4))
# EAGLE-2's tree has so many tokens that the level above still reads them in nearly the time of one.
SHAPE = DynamicTree(top_k=4, total_tokens=12)
WIDTHS = (1, 4, 8, 12)


def growth(args: argparse.Namespace) -> dict[str, int]:
    """Arguments of `tiny.grown`.

    Raises:
        ValueError: the shipped target cannot become as large, or there is no room for it.
    """
    if args.shape is None:
        return {"times": args.times}
    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny.path(TARGET)))
    shape = SHAPES[args.shape]
    require_memory(shape, torch.bfloat16, torch.device(args.device).type)
    return growth_of(shape, own)


def calibration_texts(model: Any) -> list[torch.Tensor]:
    """What a model, the shipped target, answers to the built-in questions, several times each: text
    of the kind that is decoded, and none of the questions measured (where those are GSM8K's)."""
    prompts = tiny.prompt_ids(tiny.QUESTIONS) * 6
    call = chain_call(Chain([HuggingFaceLevel(model, pack=True)]))
    found = []
    for begin in range(0, len(prompts), 16):
        some = prompts[begin : begin + 16]
        seeds = list(range(begin, begin + len(some)))
        texts = call(Request(some, 96, 1.0, seeds)).texts
        found += [torch.tensor(prompt + text) for prompt, text in zip(some, texts, strict=True)]
    return found


def packed(model: Any, **options: Any) -> HuggingFaceLevel:
    """A level with packed weights, or without where the processor packs none of that type, and on
    CUDA."""
    if model.device.type == "cpu":
        with contextlib.suppress(ValueError):
            return HuggingFaceLevel(model, pack=True, **options)
    return HuggingFaceLevel(model, **options)


def w4_copy(model: Any, folder: Path | None, texts: Callable[[], list[torch.Tensor] | None]) -> Any:
    """The 4-bit copy of a model that is kept in `folder`; where there is none it is made, with what
    `texts` gives as calibration, and kept."""
    if folder is not None:
        with contextlib.suppress(FileNotFoundError):
            return load_w4(model, folder)
    copy = quantize_w4(model, 128, texts())
    if folder is not None:
        save_w4(copy, folder)
    return copy


def faster_target(
    device: str = "cpu", **growth: int
) -> tuple[HuggingFaceLevel, dict[str, dict[int, float]]]:
    """The target, grown by these arguments of `tiny.grown`, in the data type whose passes of one
    and of several tokens are faster here (on CUDA: in bfloat16), and the seconds of all that were
    tried."""
    on_cpu = torch.device(device).type == "cpu"
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,)
    candidates = [
        packed(tiny.grown(dtype=dtype, device=device, **growth), name=TARGET) for dtype in dtypes
    ]
    target, seconds = fastest(candidates)
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return target, dict(zip(names, seconds, strict=True))


def fastest(
    levels: Sequence[HuggingFaceLevel],
) -> tuple[HuggingFaceLevel, list[dict[int, float]]]:
    """The level whose passes of one and of several tokens are fastest, and the seconds of all."""
    seconds = _seconds(levels)
    pairs = zip(levels, seconds, strict=True)
    return min(pairs, key=lambda pair: pair[1][1] + pair[1][8])[0], seconds


def _seconds(levels: Sequence[HuggingFaceLevel]) -> list[dict[int, float]]:
    clock = None if levels[0].device.type == "cpu" else device_clock(levels[0].device)
    return pass_seconds(levels, WIDTHS, limit=3.0, clock=clock)


def parts_of(
    args: argparse.Namespace, small: Mapping[str, HuggingFaceLevel] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stands in the chains, by kind, and the milliseconds of their passes; `small`: see
    `report_of`."""
    sizes = growth(args)
    target, seconds = faster_target(args.device, **sizes)

    def texts() -> list[torch.Tensor] | None:
        if args.shape is not None:  # of which a calibration takes longer than all else
            return None
        # The target as it is shipped says the same, and sooner.
        return calibration_texts(tiny.levels([TARGET], pack=False)[TARGET].model)

    copy = w4_copy(target.model, args.w4, texts)
    shown = {f"{TARGET}, {name}": times for name, times in seconds.items()}
    # One level each for all chains: they take turns.
    parts: dict[str, Any] = {TARGET: target}
    parts[W4] = packed(copy, name=W4, shares_cache_with=target)
    if small is None and target.device.type == "cpu":
        small = tiny.levels()
    elif small is None:
        small = tiny.levels(dtype=target.model.dtype, device=args.device)
    parts[MIDDLE], parts[DRAFTER] = small["middle"], small["drafter"]
    parts[NGRAM] = PromptLookup()
    dtype = small[DRAFTER].model.dtype
    with tempfile.TemporaryDirectory() as folder:
        try:
            place = tiny.grown_head(args.head, sizes["times"], folder)
        except FileNotFoundError as error:  # models that somebody trained without a head
            progress.note(f"{args.head}: left out: {error}")
        else:
            for name, tree in ((EAGLE, None), (TREE, SHAPE)):
                parts[name] = Eagle.from_pretrained(
                    place, target, tree=tree, dtype=dtype, name=name
                )
    others = (W4, MIDDLE, DRAFTER)
    for name, times in zip(others, _seconds([parts[name] for name in others]), strict=True):
        shown[name] = times
    return parts, {name: [1e3 * times[w] for w in WIDTHS] for name, times in shown.items()}


def combinations(most: int) -> list[tuple[str, ...]]:
    """Every chain of two to `most` levels."""
    return [
        (TARGET, *below)
        for count in range(1, min(most, len(KINDS) + 1))
        for below in itertools.combinations(KINDS, count)
    ] + [(*above, head) for above in READ if len(above) < most for head in (EAGLE, TREE)]


def contenders(
    asked_for: Sequence[tuple[str, ...]],
    parts: dict[str, Any],
    prompts: list[list[int]],
    args: argparse.Namespace,
    temperature: float,
) -> tuple[list[Contender], Plan | None]:
    """Plain decoding, and each chain with the windows, rounds and tail that the planner found for
    it, and what it predicts; with those that `Chain` takes by itself where it plans none so long,
    or has no time to."""
    used = [TARGET, *(n for n in parts if n != TARGET and any(n in one for one in asked_for))]
    found: Plan | None = None
    if args.plan_seconds:
        found = plan(
            [parts[name] for name in used],
            prompts,
            args.max_new_tokens,
            temperature,
            seed=args.seed,
            pack=False,
            seconds=args.plan_seconds,
            trials=None,
        )
    made = []
    for names in [(TARGET,), *asked_for]:
        things = [parts[name] for name in names]
        candidate = None if found is None else _planned(found, things)
        if found is None or candidate is None:
            chain = Chain(things)
        else:
            chain = found.chain(candidate)
            things = [found.parts[number].thing for number in candidate.parts]
            names = tuple(next(n for n in names if parts[n] is thing) for thing in things)
        label = " <- ".join(names) if len(names) > 1 else "plain decoding"
        made.append(Contender.of_chain(label, chain, candidate))
    return made, found


def _planned(found: Plan, things: Sequence[Any]) -> Candidate | None:
    wanted = {n for n, part in enumerate(found.parts) if any(part.thing is one for one in things)}
    return next((one for one in found.candidates if set(one.parts) == wanted), None)


@torch.inference_mode()
def overlaps(
    model: Any, others: Mapping[str, Any], prompts: list[list[int]], texts: dict[int, list[int]]
) -> dict[str, float]:
    """E[1 - TV] of each of the models' distributions with the target's, over the tokens of plain
    decoding's texts, at temperature 1: the share of its drafts that the target takes."""
    totals, count = dict.fromkeys(others, 0.0), 0
    for n, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *texts[n]]], device=model.device)
        kept = len(texts[n]) + 1
        p = _probabilities(model, ids, kept)
        for name, other in others.items():
            q = p if other is model else _probabilities(other, ids, kept)
            totals[name] += float(torch.minimum(p, q).sum())
        count += kept
    return {name: total / count for name, total in totals.items()}


def _probabilities(model: Any, ids: torch.Tensor, last: int) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, -last:].float().softmax(-1)


def rows_of(
    made: list[Contender],
    prompts: list[list[int]],
    model: Any,
    temperature: float,
    at_run_speed: Mapping[str, float],
) -> list[dict[str, Any]]:
    """What the report has of every contender, plain decoding first.

    Args:
        at_run_speed: predictions by label, for the speed that the machine had in these runs.
    """
    plain, rows = made[0], []
    for one in made:
        found = verdict(model, prompts, plain.texts, one.texts, temperature)
        gain, rate = ratios(one, plain), one.rate()
        adjusted = at_run_speed.get(one.label)
        predicted = uncertainty = over_measured = gain_over_measured = None
        if one.candidate is not None:
            predicted = one.candidate.predicted_tokens_per_second
            uncertainty, over_measured = one.candidate.uncertainty, predicted / rate
            if plain.candidate is not None:
                # Of the chain and of plain decoding in one run, whatever the processor did before.
                of_plain = plain.candidate.predicted_tokens_per_second
                gain_over_measured = predicted / of_plain / gain["median"]
        rows.append(
            {
                "label": one.label,
                "window": one.window,
                "rounds": [] if one.chain is None else list(one.chain.rounds),
                "tail": 0 if one.chain is None else one.chain.tail,
                "rule": "token" if one.chain is None else one.chain.rule,
                "predicted_tokens_per_second": predicted,
                "uncertainty": uncertainty,
                "tokens_per_second": rate,
                "predicted_over_measured": over_measured,
                "predicted_at_the_runs_speed": adjusted,
                "predicted_at_the_runs_speed_over_measured": (
                    None if adjusted is None else adjusted / rate
                ),
                "x_plain": gain,
                "predicted_over_measured_x_plain": gain_over_measured,
                "decoding_tokens_per_second": one.stats and one.stats.tokens_per_second,
                "lossless": found.lossless,
                "verdict": str(found),
                **_work_of(one),
            }
        )
    return rows


def _work_of(one: Contender) -> dict[str, Any]:
    """Return what the engine counted: of each level L_i, its mean acceptance length, F_i, its
    passes per token, and T_i, milliseconds of a pass; and the engine's share of the time, which is
    no level's. transformers tells nothing."""
    if one.stats is None:
        return {"levels": [], "engine_share": None}
    stats, tokens = one.stats, max(1, sum(call.tokens for call in one.calls))
    levels = []
    for level in stats.levels:
        passes = level.num_forward_passes
        levels.append(
            {
                "name": level.name,
                "acceptance_length": level.mean_acceptance_length if level.num_drafts else None,
                "passes_per_token": passes / tokens,
                "ms": 1e3 * level.seconds / passes if passes else None,  # a drafter without a model
            }
        )
    share = 1 - sum(level.seconds for level in stats.levels) / stats.decode_seconds
    return {"levels": levels, "engine_share": share}


def choice_of(made: Sequence[Contender], predicted: Mapping[str, float]) -> dict[str, Any] | None:
    """Which of those that the planner knows it would choose, which was the fastest, and the rate of
    the first over that of the second, in the same run.

    Args:
        predicted: tokens per second by label, of those that it knows.
    """
    known = [one for one in made if one.label in predicted]
    if not known:
        return None
    chosen = max(known, key=lambda one: predicted[one.label])
    fastest = max(known, key=lambda one: ratios(one, made[0])["median"])
    of_fastest = ratios(chosen, fastest)["median"]
    return {"chosen": chosen.label, "fastest": fastest.label, "of_fastest": of_fastest}


def report_of(
    args: argparse.Namespace, small: Mapping[str, HuggingFaceLevel] | None = None
) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds.

    Args:
        args: of ``benchmarks chains``, or of `settings`.
        small: the shipped middle and drafter, where they are at hand as levels. None: made here.
    """
    asked, source = questions.texts(args.prompts, args.questions)
    prompts = tiny.prompt_ids(asked)
    before = machine.load_average()
    parts, times = parts_of(args, small)
    model = parts[TARGET].model
    asked_for = combinations(args.levels)
    if args.chains:
        asked_for = [(TARGET, *below) for below in args.chains]
    asked_for = [names for names in asked_for if set(names) <= set(parts)]
    results: list[dict[str, Any]] = []
    shared: dict[str, float] = {}

    def report(rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
        return {
            **machine.header("chains", SCHEMA, args.device),
            "complete": complete,
            "settings": {
                "prompts": len(prompts),
                "source": source,
                "repeats": args.repeats,
                "max_new_tokens": args.max_new_tokens,
                "times": args.times if args.shape is None else None,
                "shape": args.shape,
                "parameters": sum(p.numel() for p in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "seed": args.seed,
                "plan_seconds": args.plan_seconds,
            },
            "overlap": shared,
            "pass_ms": {"tokens": list(WIDTHS), **times},
            "load": {"before": before, "after": machine.load_average()},
            "results": rows,
        }

    for temperature in args.temperature:
        (alone, *below), found = contenders(asked_for, parts, prompts, args, temperature)
        made = [alone, *_transformers(parts), *below]

        def save(made: Sequence[Contender] = made, temperature: float = temperature) -> None:
            """Keep the rates so far in the file, for a run that is cut short."""
            rows = [
                {"label": one.label, "window": one.window, "tokens_per_second": one.rate()}
                for one in made
                if one.calls
            ]
            output.save(args, report([*results, {"temperature": temperature, "rows": rows}], False))

        for _ in measure(
            made,
            prompts,
            repeats=args.repeats,
            max_new_tokens=args.max_new_tokens,
            temperature=temperature,
            seed=args.seed,
            uncounted=0 if model.device.type == "cpu" else 2,  # no capture is counted
            clock=device_clock(model.device),
            desc=f"temperature {temperature:g}",
        ):
            save()
        if not shared:
            models = {n: p.model for n, p in parts.items() if isinstance(p, HuggingFaceLevel)}
            shared = overlaps(model, models, prompts, made[0].texts)
        predicted = {
            one.label: one.candidate.predicted_tokens_per_second
            for one in made
            if one.candidate is not None
        }
        speeds = {
            one.label: one.rate() / predicted[one.label] for one in made if one.label in predicted
        }
        at_run_speed = {
            label: rate * statistics.fmean(speeds[other] for other in speeds if other != label)
            for label, rate in predicted.items()
            if len(speeds) > 1
        }
        results.append(
            {
                "temperature": temperature,
                "planned_texts": None if found is None else len(found.measured.prompts),
                "rows": rows_of(made, prompts, model, temperature, at_run_speed),
                "choice": choice_of(made, predicted),
                "choice_at_the_runs_speed": choice_of(made, at_run_speed),
            }
        )
        output.save(args, report(results, False))
    return report(results, True)


def _transformers(parts: dict[str, Any]) -> list[Contender]:
    target, drafter = parts[TARGET], parts[DRAFTER].model
    eos = frozenset(target.eos_token_ids)
    return [
        Contender("transformers generate", generate_call(target.model, eos)),
        Contender(f"transformers assisted: {DRAFTER}", generate_call(target.model, eos, drafter)),
    ]


def add_command(kinds: Any) -> None:
    """Adds ``chains`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "chains",
        help="every chain of two to four levels beside plain decoding",
        description="Every chain below the shipped target, or below the same target grown, of its "
        "4-bit copy, the middle, the drafter, prompt lookup and an EAGLE head: acceptance "
        "lengths, passes and tokens per second beside plain decoding and transformers, in turns "
        "within one run. Prints Markdown, or JSON.",
    )
    output.add_report(sub, report_of, chains_table.markdown, _status)
    _add_options(sub)


def settings(**changed: Any) -> argparse.Namespace:
    """What ``benchmarks chains`` has without options, but for `changed`."""
    parser = argparse.ArgumentParser()
    _add_options(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changed})


def _add_options(sub: argparse.ArgumentParser) -> None:
    options.add_count(sub, "--prompts", 4, "questions")
    options.add_count(sub, "--repeats", 3, "")
    options.add_count(sub, "--max-new-tokens", 96, "")
    sub.add_argument(
        "--questions",
        type=options.file,
        metavar="FILE",
        help='JSON lines with "question" (default: GSM8K\'s test split where it lies beside the '
        "repository, else built-in ones)",
    )
    size = sub.add_mutually_exclusive_group()
    options.add_count(size, "--times", 4, "how much the target is grown; 1: as it is shipped")
    size.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        help="grow the target to the width and depth of this published model instead, with the "
        "same distribution: a trained small model at the shape's cost",
    )
    options.add_device(sub)
    options.add_count(sub, "--levels", 4, "most levels of a chain")
    sub.add_argument(
        "--chains",
        type=_chains,
        metavar="CHAIN;...",
        help="only these, each by its levels below the target: 'W4 copy,drafter;EAGLE tree'",
    )
    sub.add_argument(
        "--head",
        choices=tiny.HEADS,
        default=tiny.HEADS[0],
        help="the EAGLE head (default: %(default)s)",
    )
    options.add(
        sub,
        "--plan-seconds",
        options.COUNT_OR_NONE,
        60,
        "S",
        "that the planner may measure, for each temperature, to find windows; 0: windows that "
        "double from level to level",
    )
    sub.add_argument(
        "--w4",
        type=Path,
        metavar="DIR",
        help="where the 4-bit copy is kept, so that it is calibrated once (default: made anew)",
    )
    sub.add_argument(
        "--temperature",
        type=options.TEMPERATURES,
        default=[0.0, 1.0],
        metavar="T,...",
        help="(default: 0,1)",
    )
    options.add_seed(sub)


def _chains(text: str) -> list[tuple[str, ...]]:
    known = [one[1:] for one in combinations(5)]
    asked = [tuple(name.strip() for name in one.split(",")) for one in text.split(";")]
    for one in asked:
        if one not in known:
            raise argparse.ArgumentTypeError(
                f"expected chains among {'; '.join(','.join(each) for each in known)}, given "
                f"{','.join(one)}"
            )
    return asked


def _status(report: dict[str, Any]) -> int:
    return 0 if is_lossless(report) else 1


def is_lossless(report: dict[str, Any]) -> bool:
    """Whether all texts are the target's own, but for ties of rounding."""
    return all(row["lossless"] for result in report["results"] for row in result["rows"])
