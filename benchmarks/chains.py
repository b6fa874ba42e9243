"""``benchmarks chains``: every chain of two to four levels below the shipped target, or below the
same target grown, up to the width and depth of a published model, beside plain decoding of it, in
turns within one run. Windows are the planner's. Chains that lose stay in the table."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import machine, output, questions
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
from benchmarks.shapes import SHAPES, growth_of, require_memory
from polyspec_ext import progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.drafters import DynamicTree, Eagle, PromptLookup
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.planning.planner import Plan, plan
from polyspec_ext.quantization import load_w4, quantize_w4, save_w4
from polyspec_ext.tuning import pass_seconds

SCHEMA = 5  # of the JSON report
TARGET, W4, MIDDLE, DRAFTER, NGRAM = "target", "W4 copy", "middle", "drafter", "n-gram"
EAGLE, TREE = "EAGLE", "EAGLE tree"
# Below the target, the dearest first: a chain is a part of it in that order.
KINDS = (W4, MIDDLE, DRAFTER, NGRAM)
# EAGLE-2's tree has so many tokens that the level above still reads them in nearly the time of one.
SHAPE = DynamicTree(top_k=4, total_tokens=12)
WIDTHS = (1, 4, 8, 12)


def calibration_texts(model: Any) -> list[torch.Tensor]:
    """Return several answers of a model, the shipped target, to each of the built-in questions:
    text of the kind that is decoded, and none of the questions measured, if those are GSM8K's."""
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
    """Return a level with packed weights; as they are on CUDA, and where the processor packs none
    of that type."""
    if model.device.type == "cpu":
        with contextlib.suppress(ValueError):
            return HuggingFaceLevel(model, pack=True, **options)
    return HuggingFaceLevel(model, **options)


def w4_copy(model: Any, folder: Path | None, texts: Callable[[], list[torch.Tensor] | None]) -> Any:
    """Return the 4-bit copy of a model that is kept in `folder`; make and keep it where there is
    none, with the result of `texts` as calibration."""
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
    """Return the target, grown by these arguments of `tiny.grown`, in the data type whose passes of
    one and of several tokens are faster here (on CUDA: bfloat16), and the seconds of every type."""
    on_cpu = torch.device(device).type == "cpu"
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,)
    levels = [
        packed(tiny.grown(dtype=dtype, device=device, **growth), name=TARGET) for dtype in dtypes
    ]
    seconds = _seconds(levels)
    fastest = min(range(len(levels)), key=lambda n: seconds[n][1] + seconds[n][8])
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return levels[fastest], dict(zip(names, seconds, strict=True))


def _seconds(levels: Sequence[HuggingFaceLevel]) -> list[dict[int, float]]:
    clock = None if levels[0].device.type == "cpu" else device_clock(levels[0].device)
    return pass_seconds(levels, WIDTHS, limit=3.0, clock=clock)


def parts_of(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the levels and drafters of the chains by name, and the milliseconds of their passes.

    Raises:
        ValueError: the shipped target cannot become as large, or there is no room for it.
    """
    sizes = {"times": args.times}
    if args.shape is not None:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(tiny.path(TARGET))
            shipped = AutoModelForCausalLM.from_config(config)
        shape = SHAPES[args.shape]
        require_memory(shape, torch.bfloat16, torch.device(args.device).type)
        sizes = growth_of(shape, shipped)
    target, seconds = faster_target(args.device, **sizes)

    def texts() -> list[torch.Tensor] | None:
        if args.shape is not None:  # of which a calibration takes longer than all else
            return None
        # The target as it is shipped says the same, and sooner.
        return calibration_texts(tiny.levels([TARGET], pack=False)[TARGET].model)

    shown = {f"{TARGET}, {name}": times for name, times in seconds.items()}
    # The chains take turns with the same levels.
    parts: dict[str, Any] = {TARGET: target}
    copy = w4_copy(target.model, args.w4, texts)
    parts[W4] = packed(copy, name=W4, shares_cache_with=target)
    on_cpu = target.device.type == "cpu"
    small = tiny.levels(**({} if on_cpu else {"dtype": target.model.dtype, "device": args.device}))
    parts |= {MIDDLE: small["middle"], DRAFTER: small["drafter"], NGRAM: PromptLookup()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            head = tiny.grown_head(args.head, sizes["times"], folder)
        except FileNotFoundError as error:  # models that somebody trained without a head
            progress.note(f"{args.head}: left out: {error}")
        else:
            dtype = small["drafter"].model.dtype
            for name, tree in ((EAGLE, None), (TREE, SHAPE)):
                parts[name] = Eagle.from_pretrained(head, target, tree=tree, dtype=dtype, name=name)
    others = (W4, MIDDLE, DRAFTER)
    shown |= zip(others, _seconds([parts[name] for name in others]), strict=True)
    return parts, {name: [1e3 * times[w] for w in WIDTHS] for name, times in shown.items()}


def combinations() -> list[tuple[str, ...]]:
    """Return every chain. An EAGLE head drafts below the levels whose states it reads."""
    counts = range(1, len(KINDS))
    below = [some for count in counts for some in itertools.combinations(KINDS, count)]
    heads = [(*above, head) for above in ((), (W4,)) for head in (EAGLE, TREE)]
    return [(TARGET, *some) for some in (*below, *heads)]


def contenders(
    chains: Sequence[tuple[str, ...]],
    parts: dict[str, Any],
    prompts: list[list[int]],
    args: argparse.Namespace,
    temperature: float,
) -> list[Contender]:
    """Return plain decoding, transformers, and each chain with the windows, rounds and tail that
    the planner finds for it, and its prediction; with the chain's default windows where it finds
    none, or has no time to."""
    used = [name for name in parts if name == TARGET or any(name in one for one in chains)]
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
    for names in [(TARGET,), *chains]:
        things = [parts[name] for name in names]
        candidate = None
        if found is not None:
            wanted = {n for n, p in enumerate(found.parts) if any(p.thing is x for x in things)}
            same = (one for one in found.candidates if set(one.parts) == wanted)
            candidate = next(same, None)
        chain = Chain(things) if found is None or candidate is None else found.chain(candidate)
        label = " <- ".join(names) if len(names) > 1 else "plain decoding"
        made.append(Contender.of_chain(label, chain, candidate))
    target, eos = parts[TARGET].model, frozenset(parts[TARGET].eos_token_ids)
    drafter = generate_call(target, eos, parts[DRAFTER].model)
    made[1:1] = [
        Contender("transformers generate", generate_call(target, eos)),
        Contender(f"transformers assisted: {DRAFTER}", drafter),
    ]
    return made


@torch.inference_mode()
def overlaps(
    model: Any, others: Mapping[str, Any], prompts: list[list[int]], texts: dict[int, list[int]]
) -> dict[str, float]:
    """Return E[1 - TV] of each model's distributions and the target's, over the tokens of plain
    decoding's texts, at temperature 1: the share of its drafts that the target accepts."""

    def probabilities(model: Any, ids: torch.Tensor, last: int) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[0, -last:].float().softmax(-1)

    totals, count = dict.fromkeys(others, 0.0), 0
    for n, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *texts[n]]], device=model.device)
        kept = len(texts[n]) + 1
        p = probabilities(model, ids, kept)
        for name, other in others.items():
            q = p if other is model else probabilities(other, ids, kept)
            totals[name] += float(torch.minimum(p, q).sum())
        count += kept
    return {name: total / count for name, total in totals.items()}


def rows_of(
    made: list[Contender], prompts: list[list[int]], model: Any, temperature: float
) -> list[dict[str, Any]]:
    """Return the report's row of every contender, plain decoding first."""
    rows = []
    for one in made:
        found = verdict(model, prompts, made[0].texts, one.texts, temperature)
        stats = one.stats
        predicted = None if one.candidate is None else one.candidate.predicted_tokens_per_second
        levels = [] if stats is None else stats.levels
        rows.append(
            {
                "label": one.label,
                "window": one.window,
                "tail": 0 if one.chain is None else one.chain.tail,
                "tokens_per_second": one.rate(),
                "decoding_tokens_per_second": None if stats is None else stats.tokens_per_second,
                "x_plain": ratios(one, made[0]),
                "predicted_tokens_per_second": predicted,
                "predicted_over_measured": None if predicted is None else predicted / one.rate(),
                "lossless": found.lossless,
                "verdict": str(found),
                "acceptance_lengths": [
                    level.mean_acceptance_length for level in levels if level.num_drafts
                ],
                "passes": [level.num_forward_passes for level in levels],
            }
        )
    return rows


def choice_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare the chain that the planner would choose with the fastest of those that it knows."""
    known = [row for row in rows if row["predicted_tokens_per_second"] is not None]
    if not known:
        return None
    chosen = max(known, key=lambda row: row["predicted_tokens_per_second"])
    fastest = max(known, key=lambda row: row["x_plain"]["median"])
    of_fastest = chosen["x_plain"]["median"] / fastest["x_plain"]["median"]
    return {"chosen": chosen["label"], "fastest": fastest["label"], "of_fastest": of_fastest}


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report, which is in ``--json-file`` after every repeat."""
    asked, source = questions.texts(args.prompts, args.questions)
    prompts = tiny.prompt_ids(asked)
    before = machine.load_average()
    parts, times = parts_of(args)
    model = parts[TARGET].model
    chains = [(TARGET, *below) for below in args.chains or ()] or combinations()
    chains = [names for names in chains if set(names) <= set(parts)]
    names = ("repeats", "max_new_tokens", "shape", "seed", "plan_seconds")
    report: dict[str, Any] = {
        **machine.header("chains", SCHEMA, args.device),
        "settings": {
            **{name: getattr(args, name) for name in names},
            "prompts": len(prompts),
            "source": source,
            "times": args.times if args.shape is None else None,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "overlap": {},
        "pass_ms": {"tokens": list(WIDTHS), **times},
        "load": {"before": before},
        "results": [],
    }
    for temperature in args.temperature:
        made = contenders(chains, parts, prompts, args, temperature)

        def save(made: Sequence[Contender] = made, temperature: float = temperature) -> None:
            """Keep the rates so far in the file, for a run that is cut short."""
            rows = [{"label": c.label, "tokens_per_second": c.rate()} for c in made if c.calls]
            partial = {"temperature": temperature, "rows": rows}
            output.save(args, {**report, "results": [*report["results"], partial]})

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
        if not report["overlap"]:
            models = {n: p.model for n, p in parts.items() if isinstance(p, HuggingFaceLevel)}
            report["overlap"] = overlaps(model, models, prompts, made[0].texts)
        rows = rows_of(made, prompts, model, temperature)
        result = {"temperature": temperature, "rows": rows, "choice": choice_of(rows)}
        report["results"].append(result)
        output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    settings = report["settings"]
    target = f"the shipped one grown {settings['times']} times"
    if settings["shape"] is not None:
        target = (
            f"a trained small model at the cost of {settings['shape']}: the shipped one, grown to "
            "its width and depth, with the same distribution"
        )
    lines = [
        f"# Chains below a target of {settings['parameters'] / 1e6:.0f} million parameters, "
        f"{report['machine']['device_name']}",
        "",
        f"{machine.conditions(report)}. The target is {target}, in {settings['dtype']}; "
        f"{settings['prompts']} questions ({settings['source']}), up to "
        f"{settings['max_new_tokens']} new tokens, median of {settings['repeats']} repeats in "
        "turns, prefill included; decoding: without it. Windows and tails (+): the planner's, "
        f"from at most {settings['plan_seconds']} seconds; 0: the chain's default.",
        "",
    ]
    passes = {name: times for name, times in report["pass_ms"].items() if name != "tokens"}
    shared = report["overlap"]
    heads = ["ms of a pass", *map(output.token_count, report["pass_ms"]["tokens"]), "E[1 - TV]"]
    table = (
        [name, *(f"{ms:.2f}" for ms in times), output.number(shared.get(name.split(",")[0]), ".3f")]
        for name, times in passes.items()
    )
    lines += output.table(heads, table)
    heads = ["chain", "window", "tokens/s", "x plain", "decoding", "predicted/measured"]
    heads += ["acceptance lengths", "passes", "lossless"]
    for result in report["results"]:
        lines += ["", f"## Temperature {result['temperature']:g}", ""]
        lines += output.table(heads, map(_cells, result["rows"]))
        choice = result["choice"]
        if choice is not None:
            lines += [
                "",
                f"By prediction: {choice['chosen']}; the fastest: {choice['fastest']}; "
                f"{choice['of_fastest']:.3f} of it.",
            ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    window = ",".join(map(str, row["window"])) or "-"
    return [
        row["label"],
        f"{window} + {row['tail']}" if row["tail"] else window,
        f"{row['tokens_per_second']:.1f}",
        f"{row['x_plain']['median']:.2f}",
        output.number(row["decoding_tokens_per_second"], ".1f"),
        output.number(row["predicted_over_measured"], ".2f"),
        ", ".join(f"{length:.2f}" for length in row["acceptance_lengths"]) or "-",
        ", ".join(map(str, row["passes"])) or "-",
        row["verdict"],
    ]


def _chains(text: str) -> list[tuple[str, ...]]:
    known = [one[1:] for one in combinations()]
    asked = [tuple(name.strip() for name in one.split(",")) for one in text.split(";")]
    for one in asked:
        if one not in known:
            raise argparse.ArgumentTypeError(
                f"expected chains among {'; '.join(','.join(each) for each in known)}, given "
                f"{','.join(one)}"
            )
    return asked


def _status(report: dict[str, Any]) -> int:
    return int(not all(row["lossless"] for one in report["results"] for row in one["rows"]))


def add_command(kinds: Any) -> None:
    """Add ``chains`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "chains",
        help="every chain of two to four levels beside plain decoding",
        description="Every chain below the shipped target, or below the same target grown, of its "
        "4-bit copy, the middle, the drafter, prompt lookup and an EAGLE head: tokens per second "
        "beside plain decoding and transformers, in turns. Prints Markdown, or JSON.",
    )
    output.add_report(sub, report_of, markdown, _status)
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
        help="grow the target to the width and depth of this published model instead",
    )
    options.add_device(sub)
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
    seconds = "that the planner may measure at each temperature; 0: the chain's default windows"
    options.add(sub, "--plan-seconds", options.COUNT_OR_NONE, 60, "S", seconds)
    sub.add_argument(
        "--w4",
        type=Path,
        metavar="DIR",
        help="where the 4-bit copy is kept, so that it is calibrated once (default: made anew)",
    )
    options.add(sub, "--temperature", options.TEMPERATURES, [0.0, 1.0], "T,...")
    options.add_seed(sub)
