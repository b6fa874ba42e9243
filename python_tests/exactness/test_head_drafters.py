"""Drafters that read hidden states, in chains of toy levels: the text keeps the target's
distribution by either executor, by enumeration of every draw, and a mistake shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash_heads
import last_state_heads
import mtp_heads
import pytest
import toy
from device_rounds import counted
from eagle_heads import Variant, save, weights_of
from toy_trees import StayingTrees, TreeEnumerator
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.drafters.dflash import load_dflash
from polyspec_ext.drafters.eagle import load_head
from polyspec_ext.drafters.mtp import load_mtp

PROMPT = [0, 1]
SIZE = 8
SIZES: dict[str, Any] = {"hidden": SIZE, "inner": 12, "heads": 2, "kv_heads": 2, "own_head": True}
HEADS = ["eagle", "eagle 3", "eagle tree", "medusa", "hydra", "mtp", "dflash", "dspark"]


def drafter_of(kind: str, vocab: int, place: Path, chance: TreeEnumerator) -> Any:
    """A head with random weights for a target whose embeddings it reads."""
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=SIZE,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    tree = ps.DynamicTree(2, 4)
    if kind == "medusa":
        heads = last_state_heads.medusa(2, hidden=SIZE, vocab=vocab)
        place = last_state_heads.save_medusa(heads, place)
        return ps.Medusa.from_pretrained(place, target, tree=tree)
    if kind == "hydra":
        heads = last_state_heads.hydra(2, hidden=SIZE, vocab=vocab)
        place = last_state_heads.save_hydra(heads, place)
        return ps.Hydra.from_pretrained(place, target, tree=ps.StaticTree([[0], [1], [0, 0]]))
    if kind.startswith("mtp"):
        sizes = {"vocab_size": vocab, "hidden_size": SIZE, "num_attention_heads": 2}
        model = mtp_heads.target_of("mimo", **sizes)
        tensors = mtp_heads.Reference("mimo", model, int(kind[3:] or 1), **sizes).tensors()
        return ps.MTP(load_mtp(mtp_heads.save(model, tensors, place), model), draw=chance.draw)
    if kind in ("dflash", "dspark"):
        blocks = dflash_heads.Variant(
            kind, f"speculators {kind}", hidden=SIZE, vocab=vocab, mask=1, block=3, own=True,
            target_layers=(0, 1), rank=2 * (kind == "dspark"),
        )  # fmt: skip
        place = dflash_heads.save(blocks, dflash_heads.weights_of(blocks), place)
        return ps.DFlash(load_dflash(place, target), draw=chance.draw)
    variant = Variant("first", vocab=vocab, **SIZES)
    if kind == "eagle 3":
        variant = Variant("third", version=3, vocab=vocab, aux=(0, 1), **SIZES)
    head = load_head(save(variant, weights_of(variant, 2), place), target)
    return ps.Eagle(head, tree if kind == "eagle tree" else None, draw=chance.draw)


def distance(
    drafter: Any,
    chance: TreeEnumerator,
    vocab: int,
    window: Sequence[int],
    length: int,
    sync: bool | None,
    **options: Any,
) -> float:
    """Total variation of a chain's text to the target's."""
    levels = [StayingTrees(vocab, 11 + i, size=SIZE) for i in range(len(window))]
    chain = ps.Chain(
        [*levels, drafter], window, operators=chance.operators, sync_each_step=sync, **options
    )

    def text() -> list[int]:
        out = chain.generate(PROMPT, length, temperature=1.0, eos_token_id=[])
        own: list[int] = out.sequences[0, len(PROMPT) :].tolist()
        return own

    # The first text finds no cache allocated, and its logits are rounded otherwise.
    chance.only(-1)
    text()
    chance.only(None)
    with counted() as rounds:
        found = toy.chain_distribution(chance, text)
    assert bool(rounds) == (sync is False)
    assert abs(sum(found.values()) - 1) < 1e-9
    return toy.total_variation(found, toy.text_distribution(levels[0].table, PROMPT, length))


# Vocabulary, windows, new tokens.
SHAPES = [(2, [2], 3), (2, [2, 1], 3)]


@pytest.mark.parametrize("sync", [None, False], ids=["step by step", "at once"])
@pytest.mark.parametrize(("vocab", "window", "length"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_the_distribution_is_the_targets(
    kind: str, vocab: int, window: list[int], length: int, sync: bool | None, tmp_path: Path
) -> None:
    chance = TreeEnumerator()
    drafter = drafter_of(kind, vocab, tmp_path, chance)
    assert distance(drafter, chance, vocab, window, length, sync) < 1e-12


@pytest.mark.parametrize("kind", ["mtp2", "mtp3"])
@pytest.mark.parametrize(("vocab", "window", "length"), [*SHAPES, (2, [3], 4)], ids=str)
def test_several_heads_of_a_token_each(
    kind: str, vocab: int, window: list[int], length: int, tmp_path: Path
) -> None:
    """Step by step alone: the host knows what each head has read."""
    chance = TreeEnumerator()
    drafter = drafter_of(kind, vocab, tmp_path, chance)
    assert distance(drafter, chance, vocab, window, length, None) < 1e-12


@pytest.mark.parametrize("sync", [None, False], ids=["step by step", "at once"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_tail(rule: str, sync: bool | None, tmp_path: Path) -> None:
    chance = TreeEnumerator()
    drafter = drafter_of("eagle", 2, tmp_path, chance)
    assert distance(drafter, chance, 2, [1, 1], 3, sync, rule=rule, tail=1) < 1e-12


@pytest.mark.parametrize("sync", [None, False], ids=["step by step", "at once"])
@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_rows_of_other_tokens_are_seen(
    kind: str, sync: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a head hands up is not what it drew from."""
    head = ps.Eagle if kind == "eagle" else ps.DFlash
    draft = head.draft

    def wrong(self: Any, inputs: Any) -> Any:
        block = draft(self, inputs)
        assert block.rows is not None
        block.rows = block.rows._replace(logits=block.rows.logits.roll(1, 2), statistics=None)
        return block

    monkeypatch.setattr(head, "draft", wrong)
    chance = TreeEnumerator()
    drafter = drafter_of(kind, 2, tmp_path, chance)
    assert distance(drafter, chance, 2, [2], 3, sync) > 1e-3
