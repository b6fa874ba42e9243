"""4-bit copies by a word, ``w4`` below a target, ``w4:PLACE`` anywhere: made once, found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.cli.entry import main
from polyspec_ext.levels import load
from polyspec_ext.quantization import stored_w4
from polyspec_ext.quantization.weights import weights_of

PROMPT = [1, 7, 300, 22, 5]
pytestmark = pytest.mark.filterwarnings("ignore:levels.*more parameters")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "polyspec_ext" / "w4"


def text(chain: ps.Chain) -> list[int]:
    found: list[int] = chain.generate(PROMPT, 24, seed=0).sequences[0].tolist()
    return found


def test_a_copy_below_the_target(cache: Path) -> None:
    """It shares the target's cache, and the text is the target's."""
    target = tiny.path("target")
    chain = ps.Chain([target, "w4", tiny.path("drafter")], [6, 3])
    assert chain.names == ["target", "w4", "drafter"]
    assert text(chain) == text(ps.Chain([target]))
    (kept,) = cache.glob("*/int4.safetensors")
    made = kept.stat().st_mtime_ns
    ps.Chain([target, "w4"])
    assert kept.stat().st_mtime_ns == made
    # Of another model it is another copy.
    ps.Chain([tiny.path("middle"), "w4"])
    assert len([*cache.glob("*/int4.safetensors")]) == 2


def test_a_damaged_copy_is_made_again(cache: Path) -> None:
    target = tiny.path("target")
    wanted = text(ps.Chain([f"w4:{target}"]))
    (kept,) = cache.glob("*/int4.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 16]) + whole[-4999:])
    assert text(ps.Chain([f"w4:{target}"])) == wanted
    assert kept.read_bytes() == whole


def test_a_copy_as_the_target(cache: Path) -> None:
    place = tiny.path("target")
    own = ps.quantize_w4(load(place, "auto").model, 128)
    assert text(ps.Chain([f"w4:{place}", f"w4:{tiny.path('middle')}"], [4])) == text(
        ps.Chain([own])
    )


def test_a_model_that_differs_in_one_weight_has_a_copy_of_its_own(cache: Path) -> None:
    """Such as one that was trained further, in the rows of a few tokens."""
    model = load(tiny.path("target"), "auto").model
    first = stored_w4(model)
    layer = model.get_decoder().layers[0].mlp.down_proj
    with torch.no_grad():
        layer.weight[5, 7] *= -3
    again = stored_w4(model)
    assert len([*cache.glob("*/int4.safetensors")]) == 2
    differ = {
        name
        for (name, one), (_, other) in zip(weights_of(first), weights_of(again), strict=True)
        if not one.values.equal(other.values)
    }
    assert {name.rpartition(".")[2] for name in differ} == {"down_proj"}


def test_a_broken_file_is_made_again(cache: Path) -> None:
    target = tiny.path("target")
    before = text(ps.Chain([f"w4:{target}"]))
    (kept,) = cache.glob("*/int4.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    assert text(ps.Chain([f"w4:{target}"])) == before
    assert kept.stat().st_size > 100


def test_where_nothing_can_be_kept(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    assert text(ps.Chain([tiny.path("target"), "w4"])) == text(ps.Chain([tiny.path("target")]))


def test_where_it_cannot_stand(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"levels\[0\]: expected 'w4' below a Hugging Face model"):
        ps.Chain(["w4"])
    with pytest.raises(ValueError, match=r"levels\[0\]: expected .*given '.*nowhere'"):
        ps.Chain([f"w4:{cache}/nowhere"])


def test_on_the_command_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy's tokenizer is its model's."""
    words = ["generate", "Who wrote Hamlet?", "--target", f"w4:{tiny.path('target')}"]
    assert main([*words, "--middle", f"w4:{tiny.path('middle')}", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()
