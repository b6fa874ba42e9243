"""Refuse a second call of a chain at work; the first is unharmed."""

import threading
from typing import Any

import pytest
import torch
import toy
import toy_rows
from gates import OPTIONS, PROMPTS, Waiting, generate, setting

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

BUSY = "this chain is at work in another thread"


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize(("method", "at"), [("prefill", 1), ("forward", 1), ("forward", 4)])
def test_a_second_call_is_refused(faulty: int, method: str, at: int) -> None:
    chain, gate = setting(faulty, method)
    wanted = generate(chain)
    with Waiting(gate, at, lambda: generate(chain)) as first:
        for call in (
            lambda: generate(chain),
            lambda: chain.stream([1], 5),
            lambda: chain.batch(PROMPTS, 5, **OPTIONS),
        ):
            with pytest.raises(RuntimeError, match=rf"{BUSY} \(the first\)"):
                call()
    assert isinstance(first.result, torch.Tensor), first.result
    assert first.result.equal(wanted)
    assert generate(chain).equal(wanted)


def test_what_is_suspended_or_abandoned_holds_nothing() -> None:
    chain, _ = setting(0, "forward")
    wanted = generate(chain)
    stream = chain.stream([1], 30, temperature=1.0)
    next(stream)  # and drop the rest

    def texts() -> Any:
        yield from chain.stream([2], 30, temperature=1.0)

    suspended = texts()
    next(suspended)
    chain.batch(PROMPTS, 12, **OPTIONS)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(generate(chain)))
    thread.start()
    thread.join(60)
    assert found[0].equal(wanted)
    with pytest.raises(RuntimeError, match="this stream has ended"):
        list(suspended)
    with pytest.raises(RuntimeError, match="this stream has ended"):
        list(stream)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_stream_ends_where_another_chain_takes_one_of_its_levels(shared: int) -> None:
    levels, others = toy.make_levels(3), toy.make_levels(3)
    others[shared] = levels[shared]
    one, other = ps.Chain(levels, [2, 2]), ps.Chain(others, [2, 2])
    stream = one.stream([1], 30, temperature=1.0, seed=1)
    next(stream)
    wanted = other.generate([2], 12, 1.0, seed=2).sequences
    with pytest.raises(RuntimeError, match=f"was given its level {one.names[shared]} has begun"):
        list(stream)
    # One after another they may share it.
    one.generate([1], 12, 1.0, seed=1)
    assert other.generate([2], 12, 1.0, seed=2).sequences.equal(wanted)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_chains_that_share_a_level_do_not_work_at_once(shared: int) -> None:
    """The second would otherwise read and write the cache in the middle of the first one's pass."""
    chain, gate = setting(shared, "forward")
    levels = toy_rows.make(3)
    levels[shared] = [*chain.levels, chain.drafter.level][shared]
    other = ps.Chain(levels, [3, 2])
    wanted = generate(chain)
    with Waiting(gate, 4, lambda: generate(chain)) as first:
        busy = rf"level {other.names[shared]} is at work for another chain in another thread"
        for call in (lambda: generate(other), lambda: other.stream([1], 5)):
            with pytest.raises(RuntimeError, match=rf"{busy} \(the first\)"):
                call()
    assert first.result.equal(wanted)
    assert generate(other).equal(wanted)


def test_a_chain_that_calls_another_with_its_level() -> None:
    class Calls(ps.PromptLookup):
        def propose(self, context: Context, k: int) -> Proposal:
            other.generate([1], 3)
            return super().propose(context, k)

    (level,) = toy_rows.make(1)
    chain, other = ps.Chain([level, Calls()], [3]), ps.Chain([level])
    with pytest.raises(RuntimeError, match="for another chain in this thread already"):
        chain.generate([1, 2, 1], 12)
    assert other.generate([1], 3).sequences.shape == (1, 4)


def test_a_stream_ends_where_another_chain_takes_a_level_of_its_switching_drafter() -> None:
    target, drafts, elsewhere = toy_rows.make(3)
    switching = ps.SwitchingDrafter([ps.DraftModel(drafts), ps.PromptLookup()])
    one, other = ps.Chain([target, switching], [3]), ps.Chain([elsewhere, drafts], [3])
    stream = one.stream([1], 30)
    next(stream)
    other.generate([2], 12)
    with pytest.raises(RuntimeError, match="this stream has ended: another chain"):
        list(stream)


def test_a_call_from_inside_is_refused() -> None:
    chain, _ = setting(0, "prefill")
    wanted = generate(chain)
    errors: list[str] = []

    def observe(number: int, logits: torch.Tensor) -> None:
        for call in (lambda: generate(chain), lambda: chain.stream([1], 5), batch.advance):
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

    batch = chain.batch(PROMPTS, 12, **OPTIONS, observe=observe)
    while batch.advance():
        pass
    assert errors
    assert all("at work in this thread already" in error for error in errors)
    assert batch.rows[0].tokens == wanted[0, : 3 + 12].tolist()
