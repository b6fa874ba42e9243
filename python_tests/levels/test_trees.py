"""Levels that read trees: logits of each node's text, and a cache that keeps the path."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from small_models import FAMILIES, V, keys_of, make, plain_greedy

import polyspec_ext as ps
from polyspec_ext.kv_cache import layers
from polyspec_ext.kv_cache.rollback import RollbackCache
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, PromptBatch, RowCounts
from polyspec_ext.ops import trees

# By row: prompt, unread tokens before the tree, parents of the nodes (-1: the last of the tokens),
# and the accepted path.
ROWS = [
    (11, 2, [-1, -1, 0, 1, 1, 4, 5], [1, 4, 5]),
    (4, 1, [-1, 0, 0, -1], [0, 2]),
    (6, 3, [-1, -1], []),
    (5, 0, [], []),  # has no part
]


@torch.inference_mode()
def plain(model: Any, text: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def require_trees(level, model, rows=ROWS, *, device=False) -> None:
    """Run twice: the second tree follows the path of the first."""
    random = torch.Generator().manual_seed(4)

    def some(count: int) -> list[int]:
        return torch.randint(3, V, (count,), generator=random).tolist()

    prompts = [some(row[0]) for row in rows]
    width = max(map(len, prompts))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in prompts])
    level.prefill(PromptBatch(tokens, [len(text) for text in prompts], 64))
    for _ in range(2):
        width = max(lag + len(parents) for _, lag, parents, _ in rows)
        keep = max(len(parents) for _, _, parents, _ in rows) + 1
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        above = torch.full((len(rows), width), -1)
        counts, first, path = [], [], torch.full((len(rows), 3), -1)
        for b, (_, lag, parents, kept) in enumerate(rows):
            count = lag + len(parents)
            ids[b, :count] = torch.tensor(some(count))
            whole = [*range(-1, lag - 1), *(lag + p if p >= 0 else lag - 1 for p in parents)]
            above[b, :count] = torch.tensor(whole, dtype=torch.int64)
            counts.append(count)
            first.append(max(lag - 1, 0))
            path[b, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
        given = [RowCounts.read(torch.tensor(own), not device) for own in (counts, first)]
        logits = level.forward(InputBlock(ids, keep, *given, parents=above)).logits
        for b, (_, lag, parents, _) in enumerate(rows):
            front = [*prompts[b], *ids[b, :lag].tolist()]
            for node in range(-1 if lag else len(parents), len(parents)):
                steps, at = [], node
                while at >= 0:
                    steps.append(int(ids[b, lag + at]))
                    at = parents[at]
                wanted = plain(model, front + steps[::-1])
                torch.testing.assert_close(logits[b, node + 1], wanted, rtol=1e-4, atol=1e-4)
        begin = [len(text) + lag for text, (_, lag, _, _) in zip(prompts, rows, strict=True)]
        lengths = [n + len(row[3]) for n, row in zip(begin, rows, strict=True)]
        kept_lengths: Any = torch.tensor(lengths) if device else lengths
        level.keep_path(torch.tensor(begin) if device else begin, path, kept_lengths)
        for b, (_, lag, _, kept) in enumerate(rows):
            nodes = [lag + node for node in kept]
            prompts[b] += [*ids[b, :lag].tolist(), *ids[b, nodes].tolist()]
        assert level.cache.lengths.tolist() == lengths or level.reads_apart is False
    for b, text in enumerate(prompts):
        own = RollbackCache.for_model(model, 1, capacity=64)
        with torch.inference_mode():
            model(input_ids=torch.tensor([text]), past_key_values=own)
        given_keys, wanted = (keys_of(c, r, len(text)) for c, r in ((level.cache, b), (own, 0)))
        torch.testing.assert_close(given_keys, wanted, rtol=1e-4, atol=1e-4)
    behind = level.forward(InputBlock(torch.tensor([[7, 9]] * len(rows)), 1)).logits
    for b, text in enumerate(prompts):
        torch.testing.assert_close(behind[b, 0], plain(model, [*text, 7, 9]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_see_their_own_text(family: str, attention: str) -> None:
    model = make(family)
    if not (attention == "sdpa" and family.startswith("gemma2")):  # it caps its scores
        model.set_attn_implementation(attention)
    level = HuggingFaceLevel(model)
    assert level.no_trees is None
    adapter = level
    assert adapter.capabilities.trees
    require_trees(adapter, model)
    require_trees(adapter, model, ROWS[:1])  # a single row, with its tree at the end


@torch.inference_mode()
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_in_several_passes(family: str, device: bool) -> None:
    """As a drafter of several paths reads it; a row may stop early, or have no part."""
    model = make(family)
    level = HuggingFaceLevel(model)
    texts = [[5, 17, 80, 3, 41, 9, 12, 60, 33], [9, 4, 7], [8, 8]]
    parents = [-1, -1, -1, 0, 0, 2, 4, 3, 5]
    nodes = torch.arange(11, 11 + 3 * len(parents)).view(3, -1)
    tokens = torch.tensor([text + [0] * (9 - len(text)) for text in texts])
    level.prefill(PromptBatch(tokens, [len(text) for text in texts], 64))
    for at, counts in ((0, [3, 3, 0]), (3, [3, 3, 0]), (6, [3, 0, 0])):
        above = torch.tensor([parents[: at + 3]] * 3)
        read = RowCounts.read(torch.tensor(counts), not device)
        block = InputBlock(nodes[:, at : at + 3], 3, read, None, above, depth=at // 3 + 1)
        logits = level.forward(block).logits
        for b, text in enumerate(texts):
            for j in range(counts[b]):
                steps, node = [], at + j
                while node >= 0:
                    steps.append(int(nodes[b, node]))
                    node = parents[node]
                wanted = plain(model, text + steps[::-1])
                torch.testing.assert_close(logits[b, j], wanted, rtol=1e-4, atol=1e-4)
    path = torch.tensor([[0, 4, 6], [2, 5, -1], [-1, -1, -1]])
    lengths: Any = torch.tensor([12, 5, 2]) if device else [12, 5, 2]
    begin: Any = torch.tensor([9, 3, 2]) if device else [9, 3, 2]
    level.keep_path(begin, path, lengths)
    behind = level.forward(InputBlock(torch.tensor([[7]] * 3), 1)).logits
    for b, text in enumerate(texts):
        kept = [int(nodes[b, node]) for node in path[b] if node >= 0]
        wanted = plain(model, [*text, *kept, 7])
        torch.testing.assert_close(behind[b, 0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=len)
def test_packed(rows: Any) -> None:
    model = make("llama")
    require_trees(HuggingFaceLevel(model, pack=True), model, rows)


def test_counts_lengths_and_paths_on_the_device() -> None:
    model = make("llama")
    require_trees(HuggingFaceLevel(model), model, device=True)


@torch.inference_mode()
def test_shared_caches() -> None:
    """The tree of a copy, here an exact one, follows the tokens that the owner has read."""
    target = make("llama")
    owner = HuggingFaceLevel(target)
    level = HuggingFaceLevel(copy.deepcopy(target), shares_cache_with=owner)
    text = [5, 17, 80, 3, 41, 9, 12, 60]
    for one in (owner, level):
        one.prefill(torch.tensor([text[:5]]))
    owner.forward(torch.tensor([text[5:]]), 1)  # two of the three that the copy still lacks
    owner.rollback([7])
    nodes = [20, 21, 22, 23]
    block = InputBlock(
        torch.tensor([[*text[5:], *nodes]]), 5, parents=torch.tensor([[-1, 0, 1, 2, 2, 4, 3]])
    )
    logits = level.forward(block).logits[0]
    for row, steps in enumerate(([], [20], [21], [21, 22], [20, 23])):
        wanted = plain(target, text + steps)
        torch.testing.assert_close(logits[row], wanted, rtol=1e-4, atol=1e-4)
    level.keep_path([8], torch.tensor([[1, 2, -1]]), [10])
    rows = level.forward(torch.tensor([[30]]), 1)[0, 0]
    wanted = plain(target, [*text, 21, 22, 30])
    torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)
    rows = owner.forward(torch.tensor([[text[7], 21, 22]]), 1)[0, 0]
    torch.testing.assert_close(rows, plain(target, [*text, 21, 22]), rtol=1e-4, atol=1e-4)
    # The owner reads the copy's tree: its keys of the path stay where they are.
    level.rollback([10])
    block = InputBlock(torch.tensor([[40, 41, 42, 43]]), 4, parents=torch.tensor([[-1, -1, 1, 1]]))
    for one in (level, owner):
        one.forward(block)
    for one in (owner, level):
        one.keep_path([10], torch.tensor([[1, 3]]), [12])
    rows = owner.forward(torch.tensor([[30]]), 1)[0, 0]
    wanted = plain(target, [*text, 21, 22, 41, 43, 30])
    torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)


def bloom() -> Any:
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4)
    return hf.BloomForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("level", "why"),
    [
        (lambda: HuggingFaceLevel(make("llama"), streaming=8, name="it"), "one run of slots"),
        (lambda: HuggingFaceLevel(bloom(), name="it"), "takes no position_ids"),  # alibi
        (
            lambda: HuggingFaceLevel(make("llama"), new_cache=hf.DynamicCache, name="it"),
            "a RollbackCache is needed",
        ),
    ],
    ids=["streaming", "alibi", "another cache"],
)
def test_what_reads_no_trees_says_so(level: Callable[[], HuggingFaceLevel], why: str) -> None:
    made = level()
    assert not made.capabilities.trees
    assert why in made.no_trees
    made.prefill(torch.tensor([[5, 6]]))
    block = InputBlock(torch.tensor([[7, 8]]), 3, parents=torch.tensor([[-1, -1]]))
    with pytest.raises(ValueError, match=f"it: expected a chain of tokens, given a tree: .*{why}"):
        made.forward(block)


def test_a_tree_goes_in_one_pass() -> None:
    level = HuggingFaceLevel(make("llama"), prefill_chunk=3)
    level.prefill(torch.tensor([[5, 6]]))
    block = InputBlock(torch.tensor([[7] * 4]), 1, parents=torch.tensor([[-1] * 4]))
    with pytest.raises(ValueError, match=r"a tree of at most 3 tokens.*given 4"):
        level.forward(block)


def _all_before(parents: torch.Tensor, depth: int | None = None) -> torch.Tensor:
    nodes = parents.shape[1]
    return torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(len(parents), -1, -1)


@pytest.mark.parametrize("mistake", ["siblings are seen", "positions are slots", "path stays"])
def test_a_model_that_reads_trees_wrongly_is_found(mistake, monkeypatch) -> None:
    if mistake == "siblings are seen":
        monkeypatch.setattr(trees, "ancestors", _all_before)
    elif mistake == "positions are slots":
        plain_inputs = RollbackCache.inputs

        def inputs(self: Any, tokens: int, counts: Any = None, **tree: Any) -> Any:
            made = plain_inputs(self, tokens, counts, **tree)
            made["position_ids"] = layers.query_positions(self.rows.base, self.rows.counts, tokens)
            return made

        monkeypatch.setattr(RollbackCache, "inputs", inputs)
    else:
        monkeypatch.setattr(
            RollbackCache, "keep_path", lambda self, begin, path, lengths: self.rollback(lengths)
        )
    level = HuggingFaceLevel(make("llama"))
    assert level.supports_batches
    assert "gives the nodes of a tree other logits" in level.no_trees


class Wide:
    """Proposes a tree of more nodes than its paths are long; after short texts a deep one."""

    name, trees = "wide", True

    def fork(self) -> Any:
        return Wide()

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        deep = [] if len(context.tokens) > 100 else list(range(-1, k - 1))
        parents = [*deep, -1, -1, -1, -1]
        return ps.Proposal(list(range(3, 3 + len(parents))), parents=parents)


def test_trees_up_to_the_end_of_the_context() -> None:
    """Learned positions end there, for the padding of a tree as well."""
    model = make("gpt2")  # of 128 positions
    chain = ps.Chain([HuggingFaceLevel(model), Wide()], [5])
    prompts = [[5, 17, 80] * 41, [9, 4], [7] * 125]
    new = [128 - len(prompt) for prompt in prompts]
    new[1] = 30
    out = chain.generate(prompts, new, eos_token_id=[], pad_token_id=0).sequences.tolist()
    for row, prompt, count in zip(out, prompts, new, strict=True):
        text = plain_greedy(model, prompt, count)
        assert row[: len(text)] == text
