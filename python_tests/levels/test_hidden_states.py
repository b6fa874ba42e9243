"""Hidden states of a level's passes are the model's; so are the states gathered before a head."""

import copy
import threading
from typing import Any

import pytest
import torch
from small_models import FAMILIES, V, make, rough
from toy_trees import TreeLevel

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, PromptBatch, batched
from polyspec_ext.levels.fused import packed
from polyspec_ext.levels.models import gathering
from polyspec_ext.tensors import RowCounts

LAYERS = (0, 1, -1)
LENGTHS = [100, 3, 5]  # far enough apart to be read in two groups


@torch.inference_mode()
def own_states(model: Any, text: list[int]) -> dict[int, torch.Tensor]:
    """Return the model's states, ``[T, H]`` by layer."""
    ids = torch.tensor([text])
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return {layer: states[layer][0] for layer in range(-1, len(states) - 1)}


def texts(seed: int = 1) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n + 12,), generator=random).tolist() for n in LENGTHS]


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def require_states(level: HuggingFaceLevel, model: Any, layers: tuple[int, ...] = LAYERS) -> None:
    """Check states of ragged prompts, of passes with rows out of step, and of later reads."""
    whole = texts()
    expected = [own_states(model, text) for text in whole]
    read = list(LENGTHS)

    def compare(hidden: Any, begin: list[int], counts: list[int]) -> None:
        assert set(hidden) == set(layers)
        for layer in layers:
            for b, (at, n) in enumerate(zip(begin, counts, strict=True)):
                given, wanted = hidden[layer][b, :n], expected[b][layer][at : at + n]
                torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)

    prompts = padded([text[:n] for text, n in zip(whole, LENGTHS, strict=True)])
    compare(level.prefill(PromptBatch(prompts, LENGTHS, 128, layers)), [0] * 3, LENGTHS)
    for counts, first in (([4, 1, 2], [2, 0, 0]), ([2, 2, 2], None), ([0, 6, 1], [0, 4, 0])):
        rows = [text[at : at + n] for text, at, n in zip(whole, read, counts, strict=True)]
        ragged = None if len(set(counts)) == 1 else RowCounts(counts)
        begin = None if first is None else RowCounts(first)
        out = level.forward(InputBlock(padded(rows), 2, ragged, begin, hidden_layers=layers))
        compare(out.hidden, read, counts)
        read = [at + n for at, n in zip(read, counts, strict=True)]
    read = [at - 1 for at in read]
    level.rollback(read)
    rows = [text[at : at + n] for text, at, n in zip(whole, read, [3, 1, 2], strict=True)]
    level.read(padded(rows), [3, 1, 2])
    read = [at + n for at, n in zip(read, [3, 1, 2], strict=True)]
    rows = [text[at : at + 1] for text, at in zip(whole, read, strict=True)]
    compare(level.forward(InputBlock(padded(rows), 1, hidden_layers=layers)).hidden, read, [1] * 3)


MORE: list[dict[str, Any]] = [{"prefill_chunk": 4}, {"pack": True}]


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), *(("llama", x) for x in MORE)]
)
def test_states_are_the_models(family: str, options: Any) -> None:
    model = make(family, 2 + bool(options))
    level = HuggingFaceLevel(model, **options)
    assert level.capabilities.hidden_states
    require_states(level, model, (2, -1) if options else LAYERS)
    assert level.forward(InputBlock(torch.tensor([[3]] * 3), 1)).hidden is None


def test_the_state_behind_the_last_layer_is_in_front_of_the_norm() -> None:
    model = make("llama")
    level = HuggingFaceLevel(model)
    level.prefill(torch.tensor([[5]]))
    hidden = level.forward(InputBlock(torch.tensor([[6, 7]]), 1, hidden_layers=(2, -1))).hidden
    with torch.inference_mode():
        torch.testing.assert_close(model.model.norm(hidden[2]), hidden[-1])


def test_shared_caches() -> None:
    """Of a prompt a copy computes its states though the level above has read it; of later tokens
    that this level has read they are this level's. Its keys stay as they are."""
    target = make("llama")
    owner = HuggingFaceLevel(target)
    twin = HuggingFaceLevel(copy.deepcopy(target), shares_cache_with=owner)
    other = HuggingFaceLevel(rough(target), shares_cache_with=owner)
    text = texts()[0][:20]
    prompts = PromptBatch(torch.tensor([text[:8]]), hidden_layers=LAYERS)
    expected = own_states(target, text)
    levels = [owner, twin, other]
    for level in levels:
        hidden = level.prefill(prompts)
        for layer in LAYERS if level is not other else ():
            wanted = expected[layer][None, :8]
            torch.testing.assert_close(hidden[layer], wanted, rtol=1e-4, atol=1e-4)
    block = InputBlock(torch.tensor([text[8:12]]), 1, hidden_layers=LAYERS)
    for level in levels:
        out = level.forward(block)
        # (The last one's logits are asked for.)
        skipped = 0 if level is levels[0] else 3
        assert skipped == (0 if out.skipped is None else int(out.skipped))
        for layer in LAYERS if level is not other else ():
            given, wanted = out.hidden[layer][:, skipped:], expected[layer][None, 8 + skipped : 12]
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
    # The next greedy text is the owner's.
    logits = levels[0].forward(InputBlock(torch.tensor([text[12:]]), 1)).logits[0, 0]
    with torch.inference_mode():
        whole = target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_copies_record_states_of_their_own() -> None:
    """transformers hangs hooks on a model the first time that it is asked for all states."""
    model = make("llama", 2)
    copies = [packed(model, "packed")[0], ps.quantize_w4(model, 32)]
    models = [model, *copies, packed(model, "later")[0]]
    for one in [*models, *models]:
        with torch.inference_mode():
            out = one(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
        assert len(out.hidden_states) == 3


def test_nothing_stays_behind() -> None:
    model = make("llama")
    level = HuggingFaceLevel(model)

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks()
    empty = level.prefill(PromptBatch(torch.zeros(1, 0, dtype=torch.int64), None, 0, (1,)))
    assert empty[1].shape == (1, 0, 32)
    level.forward(
        InputBlock(torch.tensor([[6, 7]]), 1, RowCounts([1]), RowCounts([0]), hidden_layers=LAYERS)
    )
    assert hooks() == before


def test_refusals() -> None:
    level = HuggingFaceLevel(make("llama"), name="mine")
    for layers in ((3,), (-2,)):
        with pytest.raises(ValueError, match=r"mine: hidden_layers: expected -1 to 2, given"):
            level.prefill(PromptBatch(torch.tensor([[5]]), hidden_layers=layers))


def test_states_that_nobody_asked_for_are_none() -> None:
    """Then `dict.fromkeys(block.hidden_layers, ...)` is empty."""

    class Empty(TreeLevel):
        def prefill(self, prompts: PromptBatch) -> Any:
            return {}

        def forward(self, block: InputBlock) -> Any:
            return torch.zeros(1, 1, 5), {}

    level = batched(Empty(5, 1, name="empty"))
    tokens = torch.tensor([[1, 2]])
    assert level.prefill(PromptBatch(tokens)) is None
    assert level.forward(InputBlock(tokens, 1)).hidden is None


def test_what_an_interrupt_leaves_behind_changes_no_later_pass(monkeypatch) -> None:
    head, states = torch.nn.Linear(6, 9), torch.randn(2, 5, 6)
    wanted, first = head(states), torch.zeros(2, dtype=torch.int64)
    register = head.register_forward_pre_hook

    def interrupted(*arguments: object, **options: object) -> None:
        register(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(head, "register_forward_pre_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), gathering(head, first, 1):
        pass
    monkeypatch.undo()
    assert head._forward_pre_hooks  # it is still there
    assert head(states).equal(wanted)
    with pytest.raises(KeyboardInterrupt), gathering(head, first, 1):
        raise KeyboardInterrupt
    assert head(states).equal(wanted)
    # A head that is called twice in one pass was meant once.
    with gathering(head, first, 1):
        head(states)
        assert head(states).equal(wanted)


def test_another_thread_may_run_the_same_model() -> None:
    torch.manual_seed(0)
    head, states, others = torch.nn.Linear(6, 9), torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    first, found = torch.tensor([1, 3]), []
    with gathering(head, first, 2):
        thread = threading.Thread(target=lambda: found.append(head(others)))
        thread.start()
        thread.join(60)
        some = head(states)
    assert found[0].equal(head(others))
    assert some.equal(head(torch.stack([states[0, 1:3], states[1, 3:5]])))
