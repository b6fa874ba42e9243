"""The operators of the engine alone, `draw` and `put_rows`, and their errors."""

from __future__ import annotations

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


def drawing(
    device: torch.device, dtype: torch.dtype = torch.float32, sampling: list[Sampling] = MIXED
) -> dict[str, Any]:
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


def placing(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return arguments of `put_rows`; slot 3 has no row."""
    return {
        "table": torch.randn(BATCH, ROOM, VOCAB, device=device).to(dtype),
        "statistics": torch.randint(99, (BATCH, ROOM, 2), device=device),
        "rows": torch.randn(BATCH, WIDTH, VOCAB, device=device).to(dtype),
        "rows_statistics": torch.randint(99, (BATCH, WIDTH, 2), device=device),
        "slots": torch.tensor([[0, 2], [3, 1], [3, 3]], device=device),
        "padding": 3,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("known", [True, False])
def test_put_rows(dtype: torch.dtype, known: bool, device: torch.device) -> None:
    own = placing(device, dtype)
    if not known:
        own |= {"statistics": None, "rows_statistics": None}
    wanted = {name: None if own[name] is None else own[name].clone() for name in NAMES}
    for b, slots in enumerate(own["slots"].tolist()):
        for w, slot in enumerate(slots):
            if slot != own["padding"]:
                wanted["table"][b, slot] = own["rows"][b, w]
                if known:
                    wanted["statistics"][b, slot] = own["rows_statistics"][b, w]
    verification.put_rows(**own)
    for name, table in wanted.items():  # without unread tables
        assert table is None or equal(own[name][:, :3], table[:, :3]), name


def test_put_rows_of_a_large_vocabulary() -> None:
    """By several threads, and in a table with gaps between rows."""
    vocab, width = 150_000, 5
    whole = torch.zeros(2, 6, vocab + 3)
    table, rows = whole[..., :vocab], torch.randn(2, width, vocab)
    slots = torch.tensor([[4, 0, 5, 2, 1], [5, 5, 3, 5, 0]])
    verification.put_rows(table, None, rows, None, slots, 5)
    wanted = torch.zeros_like(whole)
    for b in range(2):
        for w in range(width):
            if slots[b, w] != 5:
                wanted[b, slots[b, w], :vocab] = rows[b, w]
    assert torch.equal(whole, wanted)


NAMES = ("table", "statistics")
PLACES: list[tuple[str, Any, str]] = [
    ("table", lambda x: x[0], r"table: expected shape \[B, N, V\], got \[4, 70\]"),
    ("table", lambda x: x.double(), "table: expected float32, bfloat16 or float16, got float64"),
    ("rows", lambda x: x[:2], "rows: "),
    ("rows", lambda x: x[..., 1:], "rows: "),
    ("rows", lambda x: x.half(), "rows: expected float32, got float16"),
    ("statistics", lambda _: None, "statistics: expected both or none, got one"),
    ("statistics", lambda x: x[:, :2], "statistics: "),
    ("rows_statistics", lambda x: x.int(), "rows_statistics: expected int64, got int32"),
    ("rows_statistics", lambda x: x[:, :1], "rows_statistics: "),
    ("slots", lambda x: x[0], r"slots: expected shape \[B, W\], got \[2\]"),
    ("slots", lambda x: x.int(), "slots: expected int64, got int32"),
    ("slots", lambda x: x + 2, "slots: expected 0 to 3, got 4"),
    ("slots", lambda x: x - 4, "slots: expected 0 to 3, got -4"),
]


def test_rows_that_are_refused() -> None:
    """On the CPU; elsewhere torch's operators check."""
    own = placing(torch.device("cpu"))
    before = own["table"].clone()
    for name, change, error in PLACES:
        with pytest.raises(RuntimeError, match=error):
            verification.put_rows(**{**own, name: change(own[name])})
        assert torch.equal(own["table"], before), name


def test_opcheck(device: torch.device) -> None:
    own = drawing(device)
    named = (*own.pop("parameters"),)
    logits, *rest = own.values()
    torch.library.opcheck(torch.ops.polyspec.draw.default, (logits, *named, *rest))
    place = tuple(placing(torch.device("cpu")).values())
    torch.library.opcheck(torch.ops.polyspec.put_rows.default, place)


def test_tensors_elsewhere_are_refused() -> None:
    own, place = drawing(torch.device("cpu")), placing(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^rounds: expected the logits' device cpu, given meta"):
        verification.draw(**{**own, "rounds": own["rounds"].to("meta")})
    with pytest.raises(ValueError, match=r"^slots: expected the logits' device cpu, given meta"):
        verification.put_rows(**{**place, "slots": place["slots"].to("meta")})
