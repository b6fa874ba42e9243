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


def letters(engine: Any, mistaken: bool) -> list[list[int]]:
    """Return texts of allowed ids; `mistaken` forgets the token at which a grammar cut."""
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    from polyspec_ext.integrations.vllm import sampler

    take = sampler.Sampler.take

    def forget(self: Any, row: int, name: str, count: int) -> Any:
        proposal = take(self, row, name, count)
        if proposal is not None:
            proposal.tokens = proposal.tokens[:count]
        return proposal

    if mistaken:
        sampler.Sampler.take = forget  # type: ignore[method-assign]
    parameters = vllm.SamplingParams(
        max_tokens=engines.LENGTH,
        structured_outputs=StructuredOutputsParams(regex=f"[0-{ALLOWED - 1}]{{{engines.LENGTH}}}"),
    )
    return engines.texts(engine, [engines.PROMPT] * (NUMBER * (1 + 2 * mistaken)), parameters)


def p_value(models: Path, speculation: str, mistaken: bool = False) -> float:
    config = engines.configuration(models, speculation)
    texts = engines.run(letters, mistaken, skip_tokenizer_init=False, **config)
    assert {len(text) for text in texts} == {engines.LENGTH}
    law = engines.Law(models / "target", ids=range(ALLOWED))
    return engines.g_test(law.of(lambda rows: torch.softmax(rows, -1)), texts, ALLOWED)


@pytest.mark.parametrize("speculation", ["ngram", "drafts", "two levels", "three levels"])
def test_a_grammar_keeps_its_law(lettered: Path, speculation: str) -> None:
    assert p_value(lettered, speculation) > 1e-4


def test_a_draft_that_a_grammar_cut_is_not_forgotten(lettered: Path) -> None:
    assert p_value(lettered, "drafts", mistaken=True) < 1e-6
