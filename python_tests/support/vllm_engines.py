"""vLLM engines in separate processes, forked from this one, and the laws of tiny targets."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import sharp
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.law import LENGTH, PROMPT, VOCAB, p_value
from polyspec_ext.integrations.vllm import Options

# vLLM starts an interpreter to inspect a kind of model; the cache is in vLLM's environment.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "cache"))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # log-probabilities compile for half a minute
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # vLLM's n-grams, which compile for a minute

V = VOCAB  # LENGTH: tokens of a text with an enumerated law
CHAIN = "polyspec_ext.integrations.vllm.chain.ChainProposer"

_CHAIN = {"method": "custom_class", "model": CHAIN, "num_speculative_tokens": 3}
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
    "greedy drafts": {"method": "draft_model", "num_speculative_tokens": 2},
    "drafts": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
    "two levels": _CHAIN,
    "three levels": _CHAIN,
    "prompt lookup": _CHAIN,
    "policy": _CHAIN,
}
LEVELS: dict[str, dict[str, Any]] = {
    "two levels": {"levels": ["drafter"], "window": [2]},
    "three levels": {"levels": ["middle", "drafter"], "window": [2, 1]},
    "prompt lookup": {"levels": ["drafter", "prompt-lookup"], "window": [2, 2]},
    "policy": {"levels": ["middle", "drafter"], "window": [2, 1], "policy": "cached-fsm"},
}


def sizes(layers: int) -> dict[str, Any]:
    """Return the common settings of configurations of tiny models."""
    return {
        "vocab_size": V,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def save_llama(folder: Path, seed: int, layers: int) -> Path:
    """Save a random Llama, sharp enough that its laws are far from even."""
    torch.manual_seed(seed)
    sharp(LlamaForCausalLM(LlamaConfig(**sizes(layers))), 0.15).save_pretrained(folder)
    return folder


class Law:
    """Return the law of the first tokens after a prompt, by enumeration."""

    def __init__(
        self, folder: Path, prompt: Sequence[int] = PROMPT, ids: Sequence[int] = range(V)
    ) -> None:
        """Enumerate texts of these ids alone."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.logits: list[torch.Tensor] = []
        with torch.no_grad():
            for length in range(LENGTH):
                texts = itertools.product(ids, repeat=length)
                rows = torch.tensor([[*prompt, *text] for text in texts])
                logits = model(input_ids=rows).logits[:, -1, list(ids)]
                self.logits.append(logits.double())

    def of(self, process: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        """Return each text's probability, where `process` maps logits to probabilities."""
        law = torch.ones(1, dtype=torch.float64)
        for logits in self.logits:
            law = (law[:, None] * process(logits)).flatten()
        return law.numpy()


def g_test(law: np.ndarray, texts: list[list[int]], vocab: int = V) -> float:
    """Return the p-value of texts under a law; cells that expect fewer than 5 are a cell."""
    return p_value(torch.from_numpy(law), texts, vocab)


def run(job: Callable[..., Any], *args: Any, **config: Any) -> Any:
    """Return `job(engine, *args)` from a forked process with an engine of this configuration."""
    pytest.importorskip("vllm", reason="vllm is not installed here")
    import vllm

    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)

    def work() -> None:
        try:
            given = {
                "dtype": "float32",
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "kv_cache_memory_bytes": 16 << 20,
                "max_num_seqs": 64,
                "disable_log_stats": False,
                "max_model_len": 64,
                **config,
            }
            answer.send((job(vllm.LLM(**given), *args), None))
        except BaseException as error:
            answer.send((None, "".join(traceback.format_exception(error))))
        finally:
            os._exit(0)

    process = context.Process(target=work)
    process.start()
    answer.close()
    try:
        result, failure = answers.recv()
    except EOFError:
        raise RuntimeError("the engine's process died") from None
    finally:
        process.join()
    if failure is not None:
        raise RuntimeError(failure)
    return result


def texts(engine: Any, prompts: Sequence[Sequence[int]], parameters: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = engine.generate(given, parameters, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def counters(engine: Any) -> dict[str, int]:
    return {one.name: int(one.value) for one in engine.get_metrics() if hasattr(one, "value")}


def configuration(models: Path, speculation: str, **settings: Any) -> dict[str, Any]:
    if speculation in LEVELS:
        levels = LEVELS[speculation]["levels"]
        names = [str(models / name) if (models / name).exists() else name for name in levels]
        settings = {**LEVELS[speculation], "levels": names, **settings}
    config = {"model": str(models / "target"), "additional_config": {"polyspec": settings}}
    if SPECULATION[speculation]:
        config["speculative_config"] = dict(SPECULATION[speculation])
        if SPECULATION[speculation]["method"] == "draft_model":
            config["speculative_config"]["model"] = str(models / "drafter")
    return config


def options(settings: Any, speculation: dict[str, Any] | None = None, ranks: int = 1) -> Options:
    config = SimpleNamespace(
        additional_config={"polyspec": settings},
        speculative_config=None if speculation is None else SimpleNamespace(**speculation),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    made = Options.of(config)
    assert made is not None
    return made
