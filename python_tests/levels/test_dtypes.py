"""The data type of a chain's models that are loaded where none is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import make

import polyspec_ext as ps
from polyspec_ext import processor, tiny

CHECKPOINT, DRAFT = str(tiny.path("target")), str(tiny.path("drafter"))  # in bfloat16


def dtype_of(place: str, **options: object) -> torch.dtype:
    dtype: torch.dtype = ps.Chain([place], **options).levels[0].model.dtype
    return dtype


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_target_is_bfloat16_where_it_is_packed_and_the_processor_multiplies_it(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: multiplies)
    wanted = torch.bfloat16 if multiplies else torch.float32
    assert dtype_of(CHECKPOINT) == wanted
    assert dtype_of(CHECKPOINT, pack=True) == wanted
    assert str(wanted).removeprefix("torch.") in repr(ps.Chain([CHECKPOINT]))
    # Other weights round bfloat16 by the number of tokens in a pass.
    assert dtype_of(CHECKPOINT, pack=False) == torch.float32
    # Named, it is what is named.
    assert dtype_of(CHECKPOINT, dtype="float32") == torch.float32
    assert dtype_of(CHECKPOINT, dtype="auto", pack=False) == torch.bfloat16


def test_its_text_is_that_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    plain, chain = (ps.Chain([CHECKPOINT, *below]) for below in ((), (DRAFT,)))
    prompts = [[5, 6, 7], [8, 9]]
    texts = [one.generate(prompts, max_new_tokens=60).sequences for one in (plain, chain)]
    assert torch.equal(*texts)


def test_a_model_whose_bits_depend_on_the_width_of_a_pass_is_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    make("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert dtype_of(str(tmp_path)) == torch.float32
