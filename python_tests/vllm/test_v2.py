"""vLLM's Model Runner V2: the arrangement against plain calls and exact laws, and an engine under
Triton's interpreter, which needs vLLM but no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evidence import chi_square, law_of_texts
from foreign import signature, sources

import polyspec_ext as ps
from polyspec_ext.integrations.vllm import PROPOSER, v2

V, K, LENGTH = 3, 2, 3


@pytest.fixture(scope="session")
def _registered() -> None:
    """Run this module without vLLM, but for the tests that say so."""


def texts(
    case: str, rule: str, temperature: float, count: int, table: torch.Tensor, drafter: torch.Tensor
) -> torch.Tensor:
    """Generate `count` texts [count, LENGTH] as V2 does, all in a batch; slots are reversed."""
    generator = torch.Generator().manual_seed(3)
    slots = torch.arange(count).flip(0)
    seeds = torch.arange(count) * 77 + 5
    scale = torch.full((count,), temperature)
    text = torch.zeros(count, LENGTH + K + 2, dtype=torch.int64)  # begins with token 0
    known = torch.ones(count, dtype=torch.int64)
    each = torch.arange(count)
    while bool((known <= LENGTH).any()):
        last = text[each, known - 1]
        cache = torch.full((count, K, V), 9.0)
        inputs = [last]
        for step in range(K):
            logits = drafter[inputs[-1]]
            cache[slots, step] = logits
            seed = seeds.flip(0)[slots]
            drawn = ps.sample(
                logits, temperature, seed=seed, position=known + step, level=2, round=known
            )
            inputs.append(drawn.tokens)
        sampled = torch.stack(inputs, 1)
        logits = table[sampled] / temperature  # [count, K+1, V], processed
        usable = torch.ones(count, K + 1, dtype=torch.bool)
        lengths = torch.full((count,), K)
        cut = torch.randint(0, K + 1, (count, 1), generator=generator)
        behind = torch.arange(K + 1) > cut
        if case == "ragged":
            lengths = cut[:, 0]
        elif case == "absent":  # never drawn: the next rows are of other inputs
            sampled = sampled.masked_fill(behind, -1)
            usable = ~behind
            logits = logits.masked_fill(behind[:, :, None], 0.0)
        elif case == "cut":  # drawn, but later rows lack the grammar's mask
            usable = ~behind
            logits = logits.masked_fill(behind[:, :, None], 0.0)
        elif case == "grammar":  # the target forbids id 2, but in rows after an unusable token
            usable = ~((sampled == 2).cumsum(1) > 0) | (torch.arange(K + 1) == 0)
            logits[:, :, 2] = torch.where(usable, -torch.inf, 0.0)
        keep = torch.arange(K + 1) <= lengths[:, None]
        local = torch.arange(K + 1).expand(count, -1)[keep]
        first = torch.cat([torch.zeros(1, dtype=torch.int32), (lengths + 1).cumsum(0).int()])
        tokens, emitted = v2.decide(
            logits[keep],
            None if case == "one-hot" else cache,
            sampled[keep].int(),
            usable[keep],
            (known[:, None] - 1 + torch.arange(K + 1))[keep],
            first,
            slots[:, None].expand(-1, K + 1)[keep],
            local,
            scale,
            seeds.flip(0),
            K,
            rule,
        )
        assert emitted.dtype == torch.int32
        assert torch.equal((tokens >= 0).sum(1), emitted.long())
        for j in range(K + 1):
            to = (known + j).clamp(max=text.shape[1] - 1)
            more = (j < emitted) & (known <= LENGTH)
            text[each[more], to[more]] = tokens[more, j]
        known = torch.where(known <= LENGTH, known + emitted, known)
    return text[:, 1 : LENGTH + 1]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("case", ["full", "ragged", "absent", "cut", "grammar", "one-hot"])
def test_texts_have_the_targets_law(case: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(V, V, generator=generator) * 1.5
    drafter = torch.randn(V, V, generator=generator) * 1.5
    temperature = 0.7
    drawn = texts(case, rule, temperature, 40_000, table, drafter)
    if case == "grammar":
        table[:, 2] = -torch.inf
    code = (drawn * V ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=V**LENGTH)
    assert chi_square(counts.numpy(), law_of_texts(table / temperature, LENGTH).numpy()) > 1e-3


def batch(lengths: list[int], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return random arguments of `decide`, of requests with so many draft tokens and some slots."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = sum(lengths) + len(lengths)
    slots = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
    counts = torch.tensor(lengths) + 1
    local = torch.cat([torch.arange(count) for count in counts.tolist()])
    begin = torch.randint(0, 50, (len(lengths),), generator=generator)
    temperature = torch.tensor([0.0, 1.0, 0.6]).repeat(len(lengths) + 3)[: len(lengths) + 3]
    return {
        "logits": torch.randn(rows, 40, generator=generator).to(dtype),
        "draft_logits": torch.randn(len(lengths) + 3, 4, 37, generator=generator).to(dtype),
        "sampled": torch.randint(0, 37, (rows,), generator=generator, dtype=torch.int32),
        "usable": torch.ones(rows, dtype=torch.bool),
        "pos": begin.repeat_interleave(counts) + local,
        "first": torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        "slots": slots.repeat_interleave(counts),
        "local": local,
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (len(lengths) + 3,), generator=generator),
        "draft_len": 4,
        "rule": "block",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_decides_as_each_request_alone(dtype: torch.dtype) -> None:
    lengths = [4, 0, 2, 3, 1, 4, 0]
    given = batch(lengths, dtype)
    tokens, emitted = v2.decide(**given)
    for i, n in enumerate(lengths):
        rows = slice(int(given["first"][i]), int(given["first"][i + 1]))
        slot = int(given["slots"][rows][0])
        temperature = float(given["temperature"][slot])
        drafts = given["draft_logits"][slot, :n].float() / (temperature or 1.0)
        position = int(given["pos"][rows][0]) + 1
        alone = ps.verify(
            given["logits"][None, rows],
            given["sampled"][None, rows][:, 1:].long(),
            drafts[None],
            temperature=float(temperature > 0),
            seed=given["seeds"][slot : slot + 1],
            position=position,
            round=position,
            rule="block",
        )
        assert int(emitted[i]) == int(alone.num_accepted[0]) + 1
        assert tokens[i, : n + 1].tolist() == alone.tokens[0].tolist()
        assert bool((tokens[i, n + 1 :] == -1).all())


def test_a_step_without_drafts_draws_as_requests_without_drafts_in_a_batch() -> None:
    given = batch([0, 2, 0, 0, 4])
    tokens, _ = v2.decide(**given)
    for i in (0, 2, 3):
        row = slice(int(given["first"][i]), int(given["first"][i + 1]))
        alone, _ = v2.decide(
            given["logits"][row],
            None,
            given["sampled"][row],
            given["usable"][row],
            given["pos"][row],
            torch.tensor([0, 1]),
            given["slots"][row],
            given["local"][row],
            given["temperature"],
            given["seeds"],
            0,
            "token",
        )
        assert alone.tolist() == tokens[i : i + 1, :1].tolist()


def test_a_row_without_a_distribution_ends_no_engine() -> None:
    given = batch([2, 1, 3])
    expected, _ = v2.decide(**given)
    given["logits"][3] = torch.nan  # the second request's first row
    tokens, emitted = v2.decide(**given)
    assert emitted[1] == 1
    assert tokens[1].tolist() == [0, -1, -1, -1, -1]
    assert torch.equal(tokens[[0, 2]], expected[[0, 2]])


# Names that `v2` reads or replaces: module of vllm/v1/worker/gpu, name, parameters ("": any).
NAMES = [
    ("model_runner.py", "GPUModelRunner.load_model", ""),
    ("sample/sampler.py", "Sampler.sample", v2.SAMPLE),
    ("sample/gumbel.py", "gumbel_sample", ""),
    ("sample/states.py", "SamplingStates.__init__", "self max_num_reqs vocab_size"),
    ("spec_decode/rejection_sampler.py", "RejectionSampler._verify", v2.VERIFY),
    ("spec_decode/speculator.py", "gumbel_sample", ""),
    ("spec_decode/dspark/speculator.py", "gumbel_sample", ""),
]


@pytest.mark.skipif(sources("vllm") is None, reason="vLLM's sources are not here")
@pytest.mark.parametrize(("module", "name", "parameters"), NAMES)
def test_vllm_has_these_names(module: str, name: str, parameters: str) -> None:
    folder = sources("vllm")
    assert folder is not None
    assert parameters in ("", signature(folder / "v1/worker/gpu", module, name))


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
PROMPTS = ["2 + 2 =", "Tom has 3 bags of 8 apples. How many", "A baker makes 12", "1, 2, 3, 1, 2,"]
TEXTS, TOKENS, TOP_K = 120, 3, 2


def interpreted() -> None:
    """Have Triton interpret kernels on the CPU: its `cpu` backend is planted, and masks, which its
    interpreter expects as booleans, are cast."""
    import triton.backends
    from triton.runtime import interpreter

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(interpreter.InterpreterBuilder, name)

        def cast(self: Any, *args: Any, original: Any = original, at: int = at) -> Any:
            mask = interpreter.TensorHandle(args[at].data.astype(bool), interpreter.tl.int1)
            return original(self, *args[:at], mask, *args[at + 1 :])

        setattr(interpreter.InterpreterBuilder, name, cast)


def run_engine(settings: dict[str, Any], speculative: dict[str, Any]) -> None:
    """Print the answers of an engine with V2, as JSON in the last line."""
    interpreted()
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode import speculator

    from polyspec_ext import tiny
    from polyspec_ext.integrations.vllm import register

    topk_topp_sampler.HAS_TRITON = False  # its filters are not for the interpreter
    register()
    engine = LLM(
        str(tiny.path("target")),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=64,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        speculative_config=speculative,
        additional_config={"polyspec": settings},
    )
    greedy = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    seeded = [
        SamplingParams(temperature=1.3, top_k=TOP_K, max_tokens=TOKENS, seed=seed)
        for seed in range(TEXTS)
    ]
    drawn = engine.generate([PROMPTS[0]] * TEXTS, seeded)
    alone = engine.generate(PROMPTS[0], seeded[7])
    accepted = [
        metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    ]
    ids = [[list(answer.outputs[0].token_ids) for answer in run] for run in (greedy, drawn, alone)]
    mended = speculator.gumbel_sample is not gumbel.gumbel_sample
    fresh = mended or hasattr(gumbel, "spec_step_seed")
    print(json.dumps({"ids": ids, "accepted": accepted, "fresh": fresh}))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["of vLLM", "of a chain"])
def test_an_engine_answers_as_the_target(drafts: str) -> None:
    """A drafter draws: greedy texts, the law of sampled texts, a seed alone and in a batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from polyspec_ext import tiny

    settings: dict[str, Any] = {"rule": "block"}
    speculative = {
        "method": "draft_model",
        "model": str(tiny.path("drafter")),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    if drafts == "of a chain":
        settings["levels"] = [str(tiny.path(name)) for name in ("middle", "drafter")]
        settings["window"] = [2, 2]
        speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 4}
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), json.dumps(settings), json.dumps(speculative)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    greedy, drawn, alone = answers["ids"]
    assert answers["accepted"][0] > 0
    assert answers["fresh"] or drafts == "of a chain"
    assert alone == [drawn[7]]

    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    target = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32")
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        text = target.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert ids == text[0, inputs["input_ids"].shape[1] :].tolist()

    prompt = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    law = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, chance in law.items():
            with torch.no_grad():
                logits = target(torch.cat([prompt, torch.tensor([text], dtype=torch.int64)], 1))
            values, ids = (logits.logits[0, -1].double() / 1.3).topk(TOP_K)
            for value, token in zip(values.softmax(0).tolist(), ids.tolist(), strict=True):
                longer[(*text, token)] = chance * value
        law = longer
    seen = [tuple(ids) for ids in drawn]
    assert set(seen) <= set(law)
    assert chi_square([seen.count(cell) for cell in law], list(law.values())) > 1e-3


if __name__ == "__main__":
    run_engine(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
