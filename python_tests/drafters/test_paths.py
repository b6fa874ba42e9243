"""Several paths of a draft model: exact by enumeration on both executors; mistakes show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy
from captured_chains import level
from recorder import WatchedGraphs
from toy_trees import TreeLevel

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters import DraftModel
from polyspec_ext.runtime.plan import Operators

PROMPT = [0, 1]


@pytest.mark.parametrize("beam", [0.0, 2.0])
@pytest.mark.parametrize("window", [[3], [2, 2]], ids=str)
def test_the_accepted_path_stays_in_the_cache(monkeypatch, window, beam) -> None:
    """Also of levels above, which read no repeated nodes; and a draft reads few tokens again."""
    levels = [TreeLevel(6, 11 + i) for i in range(len(window) + 1)]
    drafter = DraftModel(levels[-1], paths=3, beam=beam)
    draft, seen = DraftModel.draft, []

    def watched_draft(self: DraftModel, inputs: Any) -> Any:
        for b, count in enumerate(inputs.counts):
            if count:
                text = [*levels[-1].caches[b], *inputs.tokens[b, :count].tolist()]
                assert text == inputs.text(b).tolist()
                for above in levels[:-1]:
                    assert text[: len(above.caches[b])] == above.caches[b]
                seen.append(count)
        return draft(self, inputs)

    monkeypatch.setattr(DraftModel, "draft", watched_draft)
    chain = ps.Chain([*levels[:-1], drafter], window)
    chain.generate([PROMPT, [2], [5, 3, 1]], [9, 30, 20], temperature=1.0, seed=3)
    assert max(seen) <= len(window) + 1
    assert len(seen) > 15


def test_paths_with_equal_last_tokens_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, depths = DraftModel.draft, []

    def watched(self: DraftModel, inputs: Any) -> Any:
        block = draft(self, inputs)
        tokens, parents = block.tokens[0].tolist(), block.parents[0].tolist()
        for node in range(len(tokens)):
            text, at = [], node
            while at >= 0:
                text.append(tokens[at])
                at = parents[at]
            assert text == tokens[node % 3 : node + 1 : 3][::-1]
            depths.append(len(text))
        return block

    monkeypatch.setattr(DraftModel, "draft", watched)
    chain = ps.Chain([TreeLevel(3, 11), DraftModel(TreeLevel(3, 12), paths=3)], [4])
    chain.generate(PROMPT, 30, temperature=1.0, seed=1, eos_token_id=[])
    assert max(depths) == 4


def test_paths_end_at_a_depth() -> None:
    chain = ps.Chain([TreeLevel(6, 11), DraftModel(TreeLevel(6, 12), paths=2)], [40])
    out = chain.generate(PROMPT, 60, temperature=1.0, seed=1, eos_token_id=[])
    assert len(out.new_tokens[0]) == 60
    assert (
        max(n for n, count in enumerate(out.stats.levels[0].draft_length_histogram) if count) == 32
    )


def test_draws_are_keyed_by_path() -> None:
    """Path k of a row draws as `ps.sample` does with node k, from the path's first row."""
    draft, chance = TreeLevel(5, 12), []

    def draw(logits: torch.Tensor, parameters: Any, positions: Any, rounds: Any, of: int, at: int,
             tokens: torch.Tensor, *others: Any, nodes: torch.Tensor) -> torch.Tensor:  # fmt: skip
        made = ps.sample(logits[:, 0], *parameters, positions + at, of, rounds, node=nodes)
        chance.append((nodes.tolist(), made.tokens))
        tokens[:, at] = made.tokens
        others[0][:, at], others[2][:, at] = made.status, made.statistics
        return made.tokens[:, None]

    def text(operators: Any) -> list[int]:
        chain = ps.Chain([TreeLevel(5, 11), DraftModel(draft, paths=3)], [3], operators=operators)
        out: list[int] = chain.generate(PROMPT, 20, temperature=1.0, seed=5).new_tokens[0]
        return out

    plain = Operators()
    assert text(plain) == text(replace(plain, draw=draw))
    assert {tuple(nodes) for nodes, _ in chance} == {(0, 1, 2)}
    assert any(len(set(tokens.tolist())) == 3 for _, tokens in chance)


OPTIONS: dict[str, Any] = {"temperature": [1.0, 0.3, 0.0], "seed": 7, "eos_token_id": []}


def models(paths: int, count: int = 2, sync: bool | None = None, **options: Any) -> ps.Chain:
    """Small random models, the last of them with several paths."""
    sharp = {"initializer_range": 0.2}
    levels = [level(i, 3 - min(i, 2), f"level {i}", **sharp) for i in range(count)]
    drafter = DraftModel(levels.pop(), paths=paths)
    window = [4, 3][2 - len(levels) :]
    return ps.Chain([*levels, drafter], window, sync_each_step=sync, **options)


TEXTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@pytest.mark.parametrize("count", [2, 3])
def test_rows_do_not_depend_on_their_neighbours(count: int) -> None:
    chain = models(3, count)
    whole = chain.generate(TEXTS, [30, 12, 25], **OPTIONS)
    for b, text in enumerate(TEXTS):
        own = {**OPTIONS, "temperature": OPTIONS["temperature"][b], "seed": whole.seeds[b]}
        assert chain.generate(text, [30, 12, 25][b], **own).new_tokens[0] == whole.new_tokens[b]


def test_its_steps_are_captured() -> None:
    sharp = {"initializer_range": 0.2}
    target, draft = (level(i, 3 - i, f"level {i}", True, **sharp) for i in range(2))
    graphs = WatchedGraphs()
    alone = ps.Chain([target, DraftModel(draft, paths=3)], [3], graphs=graphs, sync_each_step=False)
    for seed in range(2):
        options = {**OPTIONS, "seed": seed}
        wanted = models(3, 2).generate(TEXTS, 30, **options)
        assert alone.generate(TEXTS, 30, **options).new_tokens == wanted.new_tokens
    assert graphs.num_replays > 4 * graphs.num_captures > 0
    graphs.require_named(floats=True)  # weights, keys and logits


def test_rules_and_ends_of_a_text() -> None:
    """With penalties greedy paths give the text that one path gives, and end where it does."""
    options: dict[str, Any] = {"rules": ps.LogitsRules(repetition_penalty=1.5, bad_words=[[7]])}
    wanted = models(1).generate(TEXTS, 30, **options, eos_token_id=[11, 12])
    got = models(3).generate(TEXTS, 30, **options, eos_token_id=[11, 12])
    assert got.new_tokens == wanted.new_tokens
    assert min(map(len, got.new_tokens)) < 30
    drawn = models(3).generate(TEXTS, 30, temperature=1.0, seed=1, **options, eos_token_id=[])
    assert all(7 not in text for text in drawn.new_tokens)


@pytest.mark.parametrize("sync", [None, False])
@pytest.mark.parametrize("middle", [False, True])
def test_a_copy_in_the_target_s_cache(middle: bool, sync: bool | None) -> None:
    """The copy's paths follow the last token that the target has read, and go as the target reads
    on."""
    target = ps.Level(tiny.path("target"))
    prompts = tiny.prompt_ids(list(tiny.QUESTIONS[:2]))
    plain = ps.Chain([target]).generate(prompts, 24, eos_token_id=[])
    between = [tiny.path("middle")] if middle else []
    levels = [target, *between, "paths:3:early-exit:3"]
    chain = ps.Chain(levels, [4, 3][1 - middle :], sync_each_step=sync)
    got = chain.generate(prompts, 24, eos_token_id=[])
    assert got.new_tokens == plain.new_tokens
    own = ps.HuggingFaceLevel(chain.drafter.level.model)
    apart = ps.Chain([*levels[:-1], DraftModel(own, paths=3)], [4, 3][1 - middle :])
    out = apart.generate(prompts, 24, eos_token_id=[])
    counts = [o.stats.levels[-2].num_accepted_tokens for o in (got, out)]
    assert abs(counts[0] - counts[1]) <= 2  # its first layers have the target's keys either way


def test_more_is_accepted_from_more_paths() -> None:
    prompts = tiny.prompt_ids(list(tiny.QUESTIONS[:4]))
    lengths: dict[float, list[float]] = {0.8: [], 0.0: []}
    for word in ("{}", "paths:3:{}"):
        drafter = word.format(tiny.path("drafter"))
        chain = ps.Chain([tiny.path("target"), drafter], [6], pack=False)
        for temperature, found in lengths.items():
            out = chain.generate(prompts, 24, temperature=temperature, seed=1, n=2)
            found.append(out.stats.levels[0].mean_acceptance_length)
    assert lengths[0.8][1] > 1.1 * lengths[0.8][0]
    assert lengths[0.0][1] > 1.2 * lengths[0.0][0]


def test_what_cannot_have_paths_is_named() -> None:
    with pytest.raises(ValueError, match=r"^plain: expected a level that reads trees for paths=2"):
        DraftModel(toy.ToyLevel(3, 1, name="plain"), paths=2)
    with pytest.raises(ValueError, match=r"^paths: expected at most the 3 ids drawn, given 4"):
        DraftModel(TreeLevel(3, 1), paths=4)
    drafter = DraftModel(TreeLevel(3, 1), paths=2)
    assert drafter.capabilities.trees
    with pytest.raises(TypeError, match=r"^levels\[0\] of 2: expected a model, given the drafter"):
        ps.Chain([drafter, TreeLevel(3, 2)])
    with pytest.raises(ValueError, match=r"^levels\[1\]: expected a model to draft 2 paths"):
        ps.Chain([TreeLevel(3, 2), "paths:2:suffix"])
