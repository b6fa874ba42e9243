"""Gathering hidden states in front of a head."""

from __future__ import annotations

import threading

import pytest
import torch

from polyspec_ext.levels.models import gather, gathering


def test_logits_of_some_tokens() -> None:
    torch.manual_seed(0)
    head, states = torch.nn.Linear(6, 9), torch.randn(2, 5, 6)
    rows = torch.tensor([[0, 3], [4, 4]])
    with gathering(head, rows):
        some = head(states)
    assert some.equal(head(gather(states, rows)))
    assert head(states).shape == (2, 5, 9)
    assert not head._forward_pre_hooks


def test_what_an_interrupt_leaves_behind_changes_no_later_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it strikes: between the hook's registration and its removal."""
    head, states = torch.nn.Linear(6, 9), torch.randn(2, 5, 6)
    wanted, rows = head(states), torch.zeros(2, 1, dtype=torch.int64)
    register = head.register_forward_pre_hook

    def interrupted(*arguments: object, **options: object) -> None:
        register(*arguments, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(head, "register_forward_pre_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), gathering(head, rows):
        pass
    monkeypatch.undo()
    assert head._forward_pre_hooks  # it is still there
    assert head(states).equal(wanted)
    with pytest.raises(KeyboardInterrupt), gathering(head, rows):
        raise KeyboardInterrupt
    assert head(states).equal(wanted)
    # A head that is called twice in one pass was meant once.
    with gathering(head, rows):
        head(states)
        assert head(states).equal(wanted)


def test_another_thread_may_run_the_same_model() -> None:
    """Two chains over one model, each in its thread: what one gathers is not the other's."""
    torch.manual_seed(0)
    head, states, others = torch.nn.Linear(6, 9), torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    rows, found = torch.tensor([[0, 3], [4, 4]]), []
    with gathering(head, rows):
        thread = threading.Thread(target=lambda: found.append(head(others)))
        thread.start()
        thread.join(60)
        some = head(states)
    assert found[0].equal(head(others))
    assert some.equal(head(gather(states, rows)))
