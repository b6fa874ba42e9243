"""The operator of the engine alone, `draw`, and its errors."""

from typing import Any

import pytest
import torch
from calls import equal

import polyspec_ext as ps
from polyspec_ext.errors import ERROR_BITS
from polyspec_ext.ops import verification
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowParameters

BATCH, WIDTH, ROOM, VOCAB = 3, 2, 4, 70
MIXED = [Sampling(0.7, 20, 0.9, 0.01), Sampling(0.0), Sampling(1.3, 0, 0.95)]
GREEDY = [Sampling(0.0), Sampling(0.0, 9), Sampling(0.0, 0, 0.5, 0.1)]
UNFILTERED = [Sampling(0.7), Sampling(0.0, 9, 0.5, 0.1), Sampling(1.3)]
ONE_FILTER = [Sampling(0.7), Sampling(1.3, min_p=0.1), Sampling(1.3)]
SEEDS = [5, 2**64 - 1, 77]


def drawing(device, dtype=torch.float32, sampling=MIXED) -> dict[str, Any]:
    made = RowParameters(BATCH, device).write(sampling, SEEDS)
    return {
        "logits": torch.randn(BATCH, 1, VOCAB, device=device).to(dtype),
        "parameters": tuple(made.on(device).values()),
        "positions": torch.arange(BATCH, device=device) * 9,
        "rounds": torch.tensor([1, 0, 6], device=device),
        "level": 3,
        "column": 1,
        "tokens": torch.full((BATCH, WIDTH), -7, device=device),
        "status": torch.full((BATCH, WIDTH), -7, dtype=torch.int32, device=device),
        "rows": torch.full((BATCH, ROOM, VOCAB), -7.0, dtype=dtype, device=device),
        "statistics": torch.full((BATCH, ROOM, 2), -7, device=device),
    }


@pytest.mark.parametrize(
    ("sampling", "dtype", "column", "strided"),
    [(MIXED, torch.float32, 0, True), (MIXED, torch.float16, 1, False),
     (GREEDY, torch.bfloat16, 1, True), (UNFILTERED, torch.float32, 1, False),
     (ONE_FILTER, torch.bfloat16, 0, False), (ONE_FILTER, torch.float16, 0, True)],
)  # fmt: skip
def test_draw_is_sample(dtype, column, strided, sampling, device) -> None:
    own = {**drawing(device, dtype, sampling), "column": column}
    if strided:  # as where ids are cut off
        whole = torch.randn(BATCH, 1, VOCAB + 9, device=device).to(dtype)
        own["logits"] = whole[..., :VOCAB]
    seed = own["parameters"][-1]
    heat, k, p, least = (
        torch.tensor([getattr(one, name) for one in sampling], device=device)
        for name in ("temperature", "top_k", "top_p", "min_p")
    )
    wanted = ps.sample(
        own["logits"][:, 0], heat, k, p, least, seed=seed,
        position=own["positions"] + column, level=3, round=own["rounds"],
    )  # fmt: skip
    assert not (wanted.status & ERROR_BITS).any()
    before = {name: own[name].clone() for name in ("tokens", "status", "rows", "statistics")}
    before["tokens"][:, column] = wanted.tokens
    before["status"][:, column] = wanted.status
    before["rows"][:, column] = own["logits"][:, 0]
    before["statistics"][:, column] = wanted.statistics
    drawn = verification.draw(**own)
    assert drawn.shape == (BATCH, 1)
    assert torch.equal(drawn[:, 0], wanted.tokens)
    for name, table in before.items():
        assert equal(own[name], table), name
    # The next pass reads the drawn tokens, and may change the tensor.
    drawn.zero_()
    assert torch.equal(own["tokens"], before["tokens"])


def test_draw_without_rows(device: torch.device) -> None:
    own = drawing(device)
    same = {**own, "tokens": own["tokens"].clone(), "rows": None, "statistics": None}
    assert torch.equal(verification.draw(**own), verification.draw(**same))
    assert torch.equal(own["tokens"], same["tokens"])


def test_draw_of_a_row_without_a_distribution(device: torch.device) -> None:
    own = drawing(device)
    own["logits"][1] = float("nan")
    assert [token < 0 for (token,) in verification.draw(**own).tolist()] == [False, True, False]
    assert [bool(bits & ERROR_BITS) for bits in own["status"][:, 1].tolist()] == [
        False, True, False,
    ]  # fmt: skip
    assert own["tokens"][1, 1] == -1
    read = verification.draw(**own, readable=True)  # by a pass that the host does not wait for
    assert read.equal(own["tokens"][:, 1:2].clamp_min(0))


DRAWS: list[tuple[str, Any, str]] = [
    ("logits", lambda x: x[:, 0], r"\[B, 1, V\] with 1 <= V < 2\*\*31, given \[3, 70\]"),
    ("logits", lambda x: x.expand(3, 2, 70), r"\[B, 1, V\] = \[3, 1, 70\], given \[3, 2, 70\]"),
    ("logits", lambda x: x.double(), "float32, bfloat16 or float16 .* torch.float64"),
    ("column", lambda _: WIDTH, r"in \[0, 1\], given 2"),
    ("column", lambda _: -1, r"in \[0, 1\], given -1"),
    ("tokens", lambda x: x[0], r"\[B, W\], given \[2\]"),
    ("tokens", lambda x: x[:2], r"\[3, 2\], given \[2, 2\]"),
    ("tokens", lambda x: x.int(), "torch.int64, given .*torch.int32"),
    ("tokens", lambda x: x.t().contiguous().t(), "contiguous"),
    ("status", lambda x: x[:, :1], r"\[3, 2\], given \[3, 1\]"),
    ("status", lambda x: x.long(), "torch.int32, given .*torch.int64"),
    ("positions", lambda x: x[:1], r"\[3\], given \[1\]"),
    ("rounds", lambda x: x[:2], r"\[3\], given \[2\]"),
    ("statistics", lambda _: None, "both or none"),
    ("rows", lambda x: x[:, :1], r"\[B, at least 2, V\], given \[3, 1, 70\]"),
    ("rows", lambda x: x[..., 1:], r"\[3, 4, 70\], given \[3, 4, 69\]"),
    ("rows", lambda x: x.bfloat16(), "torch.float32, given .*torch.bfloat16"),
    ("statistics", lambda x: x[:, :2], r"\[3, 4, 2\], given \[3, 2, 2\]"),
    ("statistics", lambda x: x.int(), "torch.int64, given .*torch.int32"),
]


def test_draws_that_are_refused(device: torch.device) -> None:
    for name, change, error in DRAWS:
        own = drawing(device)
        argument = name.removesuffix("s") if name in ("positions", "rounds") else name
        kind = TypeError if "torch" in error else ValueError
        with pytest.raises(kind, match=rf"^{argument}: expected .*{error}"):
            verification.draw(**{**own, name: change(own[name])})
        assert (own["tokens"] == -7).all(), name


def test_opcheck(device: torch.device) -> None:
    own = drawing(device)
    named = (*own.pop("parameters"),)
    logits, *rest = own.values()
    torch.library.opcheck(torch.ops.polyspec.draw.default, (logits, *named, *rest))


def test_tensors_elsewhere_are_refused() -> None:
    own = drawing(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^rounds: expected the logits' device cpu, given meta"):
        verification.draw(**{**own, "rounds": own["rounds"].to("meta")})
