"""vLLM as a server of `python -m benchmarks serving`, in a process of this interpreter."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import vllm_engines as engines

from benchmarks import serving
from benchmarks.serving import Ask, Load
from benchmarks.vllm_engine import VllmEngine


@pytest.mark.slow
def test_clients_of_an_engine(models: Path, law: engines.Law) -> None:
    options = {
        "model": str(models / "target"),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "speculative_config": {
            "method": "custom_class",
            "model": engines.CHAIN,
            "num_speculative_tokens": 3,
        },
        "additional_config": {"polyspec": {"levels": [str(models / "target")], "window": [2]}},
    }
    engine = VllmEngine(Path(sys.executable), options)
    try:
        assert str(models) not in engine.command
        assert engine.version

        asks = [Ask(number, [3, 1, 4 + number // 2]) for number in range(4)]
        traces = serving.served(partial(serving.by_vllm, engine), asks, Load(2, 0.0, 6))
    finally:
        engine.close()
    assert sorted(trace.ask.number for trace in traces) == [0, 1, 2, 3]
    texts = {trace.ask.number: trace.tokens for trace in traces}
    assert {len(text) for text in texts.values()} == {6}
    assert texts[0] == texts[1]
    assert min(len(trace.arrivals) for trace in traces) < 6  # several tokens arrive at once
