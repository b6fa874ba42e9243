"""Heads of every kind with random weights, for toy levels with hidden states of `SIZE` numbers."""

from pathlib import Path
from typing import Any

import dflash_heads
import last_state_heads
import mtp_heads
from eagle_heads import Variant, save, weights_of
from small_models import llama

import polyspec_ext as ps
from polyspec_ext.drafters.dflash import load_dflash
from polyspec_ext.drafters.eagle import load_head
from polyspec_ext.drafters.mtp import load_mtp

SIZE = 8
SIZES: dict[str, Any] = {"hidden": SIZE, "inner": 12, "heads": 2, "kv_heads": 2, "own_head": True}
KINDS = ["eagle", "eagle 3", "eagle dynamic", "medusa", "hydra", "mtp", "dflash", "dspark"]


def head_for(target: Any, kind: str, place: Path, tree: Any = None, **sizes: Any) -> Any:
    """Return a head ("eagle", "eagle 3", "medusa", "hydra") of a model with three layers."""
    config = getattr(target, "model", target).config
    hidden, vocab = config.hidden_size, config.vocab_size
    if kind in last_state_heads.KINDS:
        return last_state_heads.drafter(kind, target, place, tree=tree, hidden=hidden, vocab=vocab)
    variant = Variant("first", hidden=hidden, vocab=vocab, **sizes)
    if kind == "eagle 3":
        variant = Variant(
            "third", version=3, hidden=hidden, vocab=vocab, draft_vocab=vocab - 10, own_head=True,
            aux=(0, 1, 2),
        )  # fmt: skip
    save(variant, weights_of(variant, 3), place)
    return ps.Eagle.from_pretrained(place, target, tree=tree)


def head_of(kind, vocab, place, trees, drawn=None, **draw) -> Any:
    """Return a head that reads the target's embeddings.

    Args:
        trees: of "eagle dynamic" and "eagle static", Medusa and Hydra.
        drawn: ids that "eagle 3" and heads of blocks draw; None: all.
        draw: replaces the operator.
    """
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    target = llama(0, 2, vocab, hidden_size=SIZE, intermediate_size=12, **heads)
    if kind in last_state_heads.KINDS:
        tree = trees["dynamic" if kind == "medusa" else "static"]
        return last_state_heads.drafter(kind, target, place, 2, tree, hidden=SIZE, vocab=vocab)
    if kind == "mtp":
        few = {"vocab_size": vocab, "hidden_size": SIZE, "num_attention_heads": 2}
        model = mtp_heads.target_of("mimo", **few)
        tensors = mtp_heads.Reference("mimo", model, **few).tensors()
        return ps.MTP(load_mtp(mtp_heads.save(model, tensors, place), model), **draw)
    if kind in ("dflash", "dspark"):
        spark = kind == "dspark"
        blocks = dflash_heads.Variant(
            kind, f"speculators {kind}", hidden=SIZE, vocab=vocab, mask=1, own=True,
            block=5 - spark if drawn else 3, target_layers=(0, 1), rank=2 * spark,
            draft_vocab=drawn and drawn + spark,
        )  # fmt: skip
        place = dflash_heads.save(blocks, dflash_heads.weights_of(blocks), place)
        return ps.DFlash(load_dflash(place, target), **draw)
    variant = Variant("first", vocab=vocab, **SIZES)
    if kind == "eagle 3":
        variant = Variant("third", version=3, vocab=vocab, draft_vocab=drawn, aux=(0, 1), **SIZES)
    head = load_head(save(variant, weights_of(variant, 2), place), target)
    return ps.Eagle(head, trees.get(kind.removeprefix("eagle ")), **draw)
