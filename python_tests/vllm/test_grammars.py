"""Structured output keeps the target's law, masked, with drafts that were drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm_engines as engines

from polyspec_ext import tiny

NUMBER = 2000
TEMPERATURE = 1.5
DIGITS = range(17, 27)  # ids of "0" ... "9"
SPECULATION = {
    "drafts": {
        "method": "draft_model",
        "model": str(tiny.path("drafter")),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    },
    "two levels": {"method": "custom_class", "model": engines.CHAIN, "num_speculative_tokens": 3},
}


def digits(engine: Any, mistaken: bool) -> list[list[int]]:
    """Return texts of three digits; `mistaken` forgets the token at which a grammar cut."""
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    from polyspec_ext.integrations.vllm import sampler

    take = sampler.Sampler.take

    def forget(self: Any, row: int, name: str, count: int) -> Any:
        proposal = take(self, row, name, count)
        if proposal is not None and len(proposal.tokens) > count:
            proposal.tokens = proposal.tokens[:count]
        return proposal

    if mistaken:
        sampler.Sampler.take = forget  # type: ignore[method-assign]
    parameters = vllm.SamplingParams(
        temperature=TEMPERATURE,
        max_tokens=engines.LENGTH,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"),
    )
    return engines.texts(engine, [engines.PROMPT] * NUMBER, parameters)


def p_value(speculation: str, mistaken: bool = False) -> float:
    settings = {"levels": [str(tiny.path("drafter"))]} if speculation == "two levels" else {}
    texts = engines.run(
        digits,
        mistaken,
        model=str(tiny.path("target")),
        skip_tokenizer_init=False,
        speculative_config=SPECULATION[speculation],
        additional_config={"polyspec": settings},
    )
    assert {len(text) for text in texts} == {engines.LENGTH}
    law = engines.Law(tiny.path("target"), ids=DIGITS)
    probabilities = law.of(lambda rows: torch.softmax(rows / TEMPERATURE, -1))
    drawn = [[token - DIGITS[0] for token in text] for text in texts]
    return engines.g_test(probabilities, drawn, len(DIGITS))


@pytest.mark.parametrize("speculation", SPECULATION)
def test_a_grammar_keeps_its_law(speculation: str) -> None:
    assert p_value(speculation) > 1e-4


def test_a_draft_that_a_grammar_cut_is_not_forgotten() -> None:
    assert p_value("drafts", mistaken=True) < 1e-6
