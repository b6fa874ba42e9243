"""A wrong result of a user's level or drafter is named; a right one is taken in any form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_rows
from toy_trees import TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

V = 5
NAMES = ["the target", "the middle", "the drafter"]


def chain_with(faulty: int, method: str, wrong: Callable[[Any], Any], rows: int = 1) -> ps.Chain:
    """Three levels, of which one returns something else from `method`."""
    kind: Any = toy.ToyLevel if rows == 1 else toy_rows.Rows
    made = [kind(V, 11 + i, name=name) for i, name in enumerate(NAMES)]
    right = getattr(made[faulty], method)
    setattr(made[faulty], method, lambda *args: wrong(right(*args)))
    return ps.Chain(made, [2, 2])


def label(value: object) -> str:
    """Of a case; no address in it, so that several workers collect the same tests."""
    return str(getattr(value, "__name__", value))[:40]


LOGITS: list[tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = [
    (lambda x: None, TypeError, "bfloat16 or float16 logits, given NoneType"),
    (lambda x: x.tolist(), TypeError, "bfloat16 or float16 logits, given list"),
    (lambda x: (x,), TypeError, "bfloat16 or float16 logits, given tuple"),
    (lambda x: x.numpy(), TypeError, "bfloat16 or float16 logits, given ndarray"),
    (lambda x: x.double(), TypeError, r"given a tensor of dtype torch\.float64"),
    (lambda x: x.long(), TypeError, r"given a tensor of dtype torch\.int64"),
    (lambda x: x[0], ValueError, r"\[B, keep, vocab_size\] = \[1, \d, 5\], given \[\d, 5\]"),
    (lambda x: x[:, 1:], ValueError, r"= \[1, (\d), 5\], given \[1, \d, 5\]"),
    (lambda x: torch.cat([x, x], 1), ValueError, r"= \[1, \d, 5\], given \[1, \d, 5\]"),
    (lambda x: x.expand(2, -1, -1), ValueError, r"= \[1, \d, 5\], given \[2, \d, 5\]"),
    (lambda x: x[..., :4], ValueError, r"= \[1, \d, 5\], given \[1, \d, 4\]"),
    (lambda x: torch.cat([x, x], 2), ValueError, r"= \[1, \d, 5\], given \[1, \d, 10\]"),
    (lambda x: x.to("meta"), ValueError, "on the level's device, cpu, given meta"),
    (lambda x: x.to_sparse(), ValueError, r"dense logits, given layout torch\.sparse_coo"),
    (lambda x: x.repeat_interleave(2, 2)[..., ::2], ValueError, "unit stride along the vocabulary"),
]


@pytest.mark.parametrize("faulty", range(3))
@pytest.mark.parametrize(("wrong", "error", "text"), LOGITS, ids=label)
def test_logits(faulty, wrong, error, text) -> None:
    chain = chain_with(faulty, "forward", wrong)
    with pytest.raises(error, match=f"^{NAMES[faulty]}: expected .*{text}") as caught:
        chain.generate([0, 1], 8, 1.0)
    assert type(caught.value) is error


def test_logits_of_fewer_rows_than_the_batch() -> None:
    chain = chain_with(1, "forward", lambda x: x[:1], rows=2)
    with pytest.raises(ValueError, match=r"the middle: .* = \[2, 3, 5\], given \[1, 3, 5\]"):
        chain.generate([[0, 1], [2]], 8, 1.0)


@pytest.mark.parametrize("faulty", range(3))
@pytest.mark.parametrize("method", ["prefill", "select"])
def test_methods_that_should_return_nothing(method: str, faulty: int) -> None:
    """A coroutine without an await, and a False that is not read."""
    chain = chain_with(faulty, method, lambda _: False, rows=4)
    text = f"^{NAMES[faulty]}: expected {method} to return None, given bool"
    with pytest.raises(TypeError, match=text):
        chain.generate([[0, 1], [2], [3], [4]], [30, 3, 3, 3], 1.0, seed=[0, 1, 2, 3])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("faulty", range(3))
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda kept: False, TypeError, "None or the lengths that are left, given bool"),
        (lambda kept: 3, TypeError, "None or the lengths that are left, given int"),
        (lambda kept: "12", TypeError, "None or the lengths that are left, given str"),
        (lambda kept: [1.0 for _ in kept], TypeError, "None or the lengths.*, given list"),
        (lambda kept: [True for _ in kept], TypeError, "None or the lengths.*, given list"),
        (lambda kept: torch.tensor(kept).float(), TypeError, r"a tensor of dtype torch\.float32"),
        (lambda kept: [*kept, 1], ValueError, r"leave at most \[.*\] tokens, given \[.*, 1\]"),
        (lambda kept: [], ValueError, r"leave at most \[.*\] tokens, given \[\]"),
        (lambda kept: [kept], TypeError, "None or the lengths that are left, given list"),
        (lambda kept: [n + 1 for n in kept], ValueError, r"leave at most \[.*\] tokens, given"),
        (lambda kept: [-1 for _ in kept], ValueError, r"leave at most \[.*\] tokens, given \[-1"),
    ],
    ids=label,
)
def test_what_rollback_returns(faulty, wrong, error, text, rows) -> None:
    chain = rolling(faulty, wrong, rows)
    with pytest.raises(error, match=f"^{NAMES[faulty]}: expected rollback to .*{text}") as caught:
        chain.generate(PROMPTS[:rows], 30, 1.0, seed=[0, 1][:rows])
    assert type(caught.value) is error
    assert f"in level {faulty + 1} ({NAMES[faulty]}), request 0" in str(caught.value.__notes__)


PROMPTS = [[0, 1, 2], [2, 3]]


def rolling(faulty: int, result: Callable[[list[int]], Any], rows: int) -> ps.Chain:
    """Return three levels; one rolls back to `result` of the lengths."""
    kind: Any = toy.ToyLevel if rows == 1 else toy_rows.Rows
    made = [kind(V, 11 + i, name=name) for i, name in enumerate(NAMES)]
    right = made[faulty].rollback

    def rollback(lengths: list[int]) -> Any:
        kept = result(lengths)
        sane = isinstance(kept, list) and len(kept) == len(lengths)
        sane = sane and all(
            type(n) is int and 0 <= n <= m for n, m in zip(kept, lengths, strict=True)
        )
        right(kept if sane else lengths)
        return kept

    made[faulty].rollback = rollback
    return ps.Chain(made, [2, 2])


# ---- drafters ------------------------------------------------------------------------------------


class Says:
    name = "the drafter"

    def __init__(self, made: Callable[[int], Any]) -> None:
        self.made = made

    def propose(self, context: Context, k: int) -> Any:
        return self.made(k)


ROWS = torch.zeros(1, 2, V)
STATS = torch.zeros(1, 2, 2, dtype=torch.int64)
PROPOSALS: list[tuple[Any, type[Exception], str]] = [
    ([1, 2], TypeError, "propose to return a Proposal, given list"),
    (None, TypeError, "propose to return a Proposal, given NoneType"),
    (torch.tensor([1]), TypeError, r"a Proposal, given a tensor of dtype torch\.int64"),
    (Proposal([1.0, 2.0]), TypeError, r"token ids: .* integer, given 1\.0"),
    (Proposal([True, False]), TypeError, "token ids: .* integer, given True"),
    (Proposal([[1, 2]]), TypeError, "token ids: .* integer, given list"),
    (Proposal("12"), TypeError, "token ids: .* list, given '12'"),
    (Proposal({1: 2}), TypeError, "token ids: .* list, given dict"),
    (Proposal(1), TypeError, "token ids: .* list, given 1"),
    (Proposal(torch.tensor([1.0])), TypeError, r"token ids: .* integer, given 1\.0"),
    (Proposal(torch.tensor([True])), TypeError, "token ids: .* integer, given True"),
    (Proposal(torch.tensor([[1]])), ValueError, r"ids: expected shape \[n\], given \[1, 1\]"),
    (Proposal(torch.tensor(1)), ValueError, r"ids: expected shape \[n\], given \[\]"),
    (Proposal(torch.ones(1, device="meta").long()), ValueError, r"given \[1\] on meta"),
    (Proposal(np.array([1.5])), TypeError, r"token ids: .* integer, given 1\.5"),
    (Proposal([1, 2, 3]), ValueError, "at most 2 tokens, given 3"),
    (Proposal([1, 5]), ValueError, r"token ids in \[0, 5\), given 5"),
    (Proposal([-1]), ValueError, r"token ids in \[0, 5\), given -1"),
    (Proposal([1, 4], ROWS[..., :4]), ValueError, r"token ids in \[0, 4\), given 4"),
    (Proposal([1, 2], ROWS.tolist()), TypeError, "float16 tensor, given list"),
    (Proposal([1, 2], ROWS.double()), TypeError, r"given a tensor of dtype torch\.float64"),
    (Proposal([1, 2], ROWS[0]), ValueError, r"shape \[1, 2, Vd\], given \[2, 5\]"),
    (Proposal([1], ROWS), ValueError, r"shape \[1, 1, Vd\], given \[1, 2, 5\]"),
    (Proposal([1, 2], torch.zeros(1, 2, 6)), ValueError, r"width Vd in \[1, 5\].*, given 6"),
    (Proposal([], torch.zeros(1, 0, 0)), ValueError, r"width Vd in \[1, 5\].*, given 0"),
    (Proposal([1, 2], ROWS.to("meta")), ValueError, "values in memory, given the meta device"),
    (Proposal([1, 2], ROWS.to_sparse()), ValueError, "in memory, given layout torch.sparse_coo"),
    (
        Proposal([1, 2], ROWS, statistics=[0]),
        TypeError,
        "draft statistics as an int64 tensor.*, given list",
    ),
    (Proposal([1, 2], ROWS, statistics=STATS.int()), TypeError, r"a tensor of dtype torch\.int32"),
    (Proposal([1, 2], ROWS, statistics=STATS[0]), ValueError, r"shape \[1, 2, 2\], given \[2, 2\]"),
    (
        Proposal([1, 2], ROWS, statistics=STATS[:, :1]),
        ValueError,
        r"\[1, 2, 2\], given \[1, 1, 2\]",
    ),
    (
        Proposal([1, 2], statistics=STATS),
        ValueError,
        "no draft statistics without draft logits, given both",
    ),
]


@pytest.mark.parametrize(("made", "error", "text"), PROPOSALS, ids=label)
def test_proposals(made: Any, error: type[Exception], text: str) -> None:
    chain = ps.Chain([toy.ToyLevel(V, 1), Says(lambda k: made)], [2])
    with pytest.raises(error, match=f"^the drafter: .*{text}") as caught:
        chain.generate([0, 1], 8, 1.0)
    assert type(caught.value) is error
    assert "in level 2 (the drafter), request 0 at position 2" in str(caught.value.__notes__)


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, range], ids=label)
def test_tokens_in_any_form(kind: Any) -> None:
    def made(k: int) -> Proposal:
        ids = [1, 2][:k]
        return Proposal(range(1, 1 + len(ids)) if kind is range else kind(ids))

    wanted = ps.Chain([toy.ToyLevel(V, 1), Says(lambda k: Proposal([1, 2][:k]))], [2])
    chain = ps.Chain([toy.ToyLevel(V, 1), Says(made)], [2])
    batch = chain.batch([[0, 1]], 12, temperature=1.0, seed=0)
    batch.complete()
    assert batch.rows[0].tokens == wanted.generate([0, 1], 12, 1.0, seed=0).sequences[0].tolist()
    assert {type(token) for token in batch.rows[0].tokens} == {int}


def test_logits_of_a_proposal_in_any_layout() -> None:
    texts = []
    for turn in (False, True):

        def made(k: int, turn: bool = turn) -> Proposal:
            rows = torch.linspace(-1, 1, k * V).view(1, k, V)
            if turn:
                rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
                assert k == 1 or rows.stride(2) != 1
            return Proposal([1, 3][:k], rows)

        chain = ps.Chain([toy.ToyLevel(V, 1), Says(made)], [2])
        texts.append(chain.generate([0, 1], 12, 1.0, seed=0).sequences)
    assert texts[0].equal(texts[1])


def test_a_context_that_a_drafter_changes() -> None:
    class Writes:
        name = "writes"

        def propose(self, context: Context, k: int) -> Proposal:
            context.tokens.append(1)
            return Proposal([1])

    text = "writes: expected propose to leave context.tokens as they are, 2 ids, given 3"
    with pytest.raises(ValueError, match=text):
        ps.Chain([toy.ToyLevel(V, 1), Writes()], [2]).generate([0, 1], 8, 1.0)


def test_a_fork_that_is_no_drafter() -> None:
    class Forks(Says):
        def fork(self) -> Any:
            return [self]

    chain = ps.Chain([toy_rows.Rows(V, 1), Forks(lambda k: Proposal([1]))], [2])
    with pytest.raises(TypeError, match=r"the drafter: expected fork to return a drafter.* list"):
        chain.generate([[0], [1]], 8, 1.0)


# ---- a level that satisfies `BatchedLevel` itself ------------------------------------------------


def batched_chain(faulty: int, method: str, wrong: Callable[[Any], Any]) -> ps.Chain:
    """Two batched levels and a drafter; one of the levels returns something else."""
    made = [TreeLevel(V, 11 + i, name) for i, name in enumerate(NAMES[:2])]
    right = getattr(made[faulty], method)
    setattr(made[faulty], method, lambda *args: wrong(right(*args)))
    return ps.Chain([*made, toy.ToyLevel(V, 31)], [2, 2])


def with_logits(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda out: out._replace(logits=change(out.logits))


BATCHED: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("forward", lambda out: out.logits, TypeError, "a LevelOutput, given a tensor"),
    ("forward", lambda out: None, TypeError, "a LevelOutput, given NoneType"),
    *(("forward", with_logits(change), error, text) for change, error, text in LOGITS),
    ("rollback", lambda n: [float(x) for x in n], TypeError, "the lengths that are left, given"),
    ("rollback", lambda n: [-1 for _ in n], ValueError, r"leave at most \[\d+\] tokens, given"),
    ("rollback", lambda n: [x + 1 for x in n], ValueError, r"leave at most \[\d+\] tokens, given"),
    ("rollback", lambda n: [*n, 0], ValueError, r"leave at most \[\d+\] tokens, given"),
]


@pytest.mark.parametrize("faulty", range(2))
@pytest.mark.parametrize(("method", "wrong", "error", "text"), BATCHED, ids=label)
def test_what_a_batched_level_returns(faulty, method, wrong, error, text) -> None:
    chain = batched_chain(faulty, method, wrong)
    with pytest.raises(error, match=rf"^{NAMES[faulty]}: expected .*{text}"):
        chain.generate([0, 1], 20, seed=3, temperature=1.0, eos_token_id=[])


def test_a_drafter_that_raises_is_named() -> None:
    class Broken:
        name = "mine"

        def propose(self, context: Context, k: int) -> Proposal:
            raise KeyError("nothing there")

    chain = ps.Chain([toy.ToyLevel(V, 1), Broken()], [2])
    with pytest.raises(KeyError) as found:
        chain.generate([0, 1], 8)
    assert found.value.__notes__[0] == "in propose of the drafter mine (Broken)"
