"""Structured output keeps the target's law, masked, with drafts that were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import vllm_engines as engines
from transformers import PreTrainedTokenizerFast

NUMBER = 1500
ALLOWED = 8  # ids from 0 on: about half of the drafted tokens


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models with the characters 0 ... 9, a ... e, and an end as ids."""
    root = tmp_path_factory.mktemp("lettered")
    vocabulary = {word: i for i, word in enumerate([*"0123456789abcde", "<end>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])),
        eos_token="<end>",
    )
    for name, layers in (("target", 2), ("middle", 1), ("drafter", 1)):
        engines.save_llama(root / name, seed=len(name), layers=layers)
        tokenizer.save_pretrained(root / name)
    return root


def letters(engine: Any) -> list[list[int]]:
    """Return texts of allowed ids."""
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    parameters = vllm.SamplingParams(
        max_tokens=engines.LENGTH,
        structured_outputs=StructuredOutputsParams(regex=f"[0-{ALLOWED - 1}]{{{engines.LENGTH}}}"),
    )
    return engines.texts(engine, [engines.PROMPT] * NUMBER, parameters)


@pytest.mark.parametrize("speculation", ["ngram", "drafts", "two levels", "three levels"])
def test_a_grammar_keeps_its_law(lettered: Path, speculation: str) -> None:
    config = engines.configuration(lettered, speculation)
    texts = engines.run(letters, skip_tokenizer_init=False, **config)
    assert {len(text) for text in texts} == {engines.LENGTH}
    law = engines.Law(lettered / "target", ids=range(ALLOWED))
    found = engines.g_test(law.of(lambda rows: torch.softmax(rows, -1)), texts, ALLOWED)
    assert found > 1e-4
