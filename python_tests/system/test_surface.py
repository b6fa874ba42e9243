"""The public surface: what ``help`` shows, and what the package exports."""

from __future__ import annotations

import pydoc
import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext import drafters


def documented(thing: type) -> set[str]:
    """Names that ``help(thing)`` lists as the class's own methods and attributes."""
    text = pydoc.plain(pydoc.render_doc(thing))
    names = set(re.findall(r"^ \|  (\w+)(?:\(| = |$)", text, re.MULTILINE))
    return {name for name in names if not name.startswith("_")} - {thing.__name__}


def test_help_of_chain_shows_what_a_user_calls() -> None:
    assert documented(ps.Chain) == {"batch", "generate", "planned", "stream"}


def test_every_shipped_drafter_is_public() -> None:
    """And so is what one of a user's own is written with. The contract of a drafter of batches, and
    the adapter to it, are in `polyspec_ext.drafters` alone."""
    kinds = {name: getattr(drafters, name) for name in drafters.__all__}
    shipped = {name for name, kind in kinds.items() if is_drafter(kind)} - {"ProposalDrafter"}
    assert {"DraftModel", "PromptLookup"} <= shipped
    for name in shipped | {"Drafter", "Context", "Proposal"}:
        assert name in ps.__all__
        assert getattr(ps, name) is kinds[name]


def is_drafter(kind: type) -> bool:
    """Whether it is a drafter that can be made, and no contract."""
    drafts = hasattr(kind, "propose") or hasattr(kind, "draft")
    return drafts and not getattr(kind, "_is_protocol", False)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in ps.__all__:
        assert getattr(ps, name).__doc__, name


def llama(layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape).to(dtype).eval()


def test_repr_of_a_chain_names_models_windows_rounds_and_rule() -> None:
    large, small = llama(2, torch.float32), llama(1, torch.bfloat16)
    chain = ps.Chain(
        [ps.Level(large, name="large"), ps.Level(small, name="small"), ps.PromptLookup()],
        [6, 3],
        rule="block",
    )
    # By hand: the embedding, tied to the head, 64 x 16, and the last norm; then per layer four
    # projections of 16 x 16, three of the MLP's, and two norms.
    sizes = [64 * 16 + 16 + n * (7 * 256 + 32) for n in (2, 1)]
    assert repr(chain).splitlines() == [
        "Chain(",
        f"  large: {sizes[0] / 1000:.1f}K parameters, float32, cpu",
        f"  small: {sizes[1] / 1000:.1f}K parameters, bfloat16, cpu",
        "  prompt lookup: PromptLookup, no model",
        "  window=[6, 3], rounds=[2], rule='block'",
        ")",
    ]
    lines = repr(ps.Chain([large, small])).splitlines()
    assert [line.split(",")[0].split(": ")[1] for line in lines[1:3]] == [
        f"{size / 1000:.1f}K parameters" for size in sizes
    ]
    assert lines[3] == "  window=[4], rounds=[], rule='token'"


class Alone:
    """A level of one's own, without a model of torch's."""

    vocab_size = 8

    def prefill(self, tokens: torch.Tensor) -> None: ...

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return torch.zeros(1, keep, self.vocab_size)

    def rollback(self, lengths: list[int]) -> None: ...


def test_repr_of_a_chain_of_ones_own_levels() -> None:
    assert repr(ps.Chain([Alone()])).splitlines() == [
        "Chain(",
        "  Alone: Alone, vocabulary of 8, cpu",
        "  window=[], rounds=[], rule='token'",
        ")",
    ]
