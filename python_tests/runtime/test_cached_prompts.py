"""Kept prompts (`cache_prompt`) are not read again, and change no bit of the output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_head import head_for
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import llama
from transformers import DynamicCache

import polyspec_ext as ps
from polyspec_ext import columns
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, LevelOutput

V = 97
TEXT = [5, 17, 80, 3, 3, 41, 60]
TURNS = 3
invariant = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="packed levels multiply with oneDNN here",
)


class Counting(HuggingFaceLevel):
    """Counts the tokens that its passes read of prompts, and fails in one pass of all levels."""

    num_read = 0
    error: BaseException = ArithmeticError("as planned")
    left = 0  # passes up to the one that fails

    def run(self, block: InputBlock) -> LevelOutput:
        Counting.left -= 1
        out = super().run(block)
        if Counting.left == 0:
            raise Counting.error
        return out

    def append(self, tokens: torch.Tensor, *given: Any) -> Any:
        self.num_read += tokens.numel()
        return super().append(tokens, *given)


def model(layers: int, seed: int = 0) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": False}
    more = {"eos_token_id": None, "initializer_range": 0.12}
    return llama(seed, layers, V, **sizes, **more).bfloat16()


def packed(layers: int, seed: int = 0, **options: Any) -> Counting:
    return Counting(model(layers, seed), pack=True, **options)


def copies(_: Path) -> list[Any]:
    """In the target's cache, with another copy that drafts in the same cache."""
    target = packed(3)
    copy = ps.quantize_w4(target.model, 32, head=True)
    return [target, Counting(copy, shares_cache_with=target), "early-exit:1"]


def with_head(kind: str, place: Path, *between: Any) -> list[Any]:
    """Below a middle level with states for the head too."""
    target = packed(3)
    head = head_for(target, kind, place, inner=64, head_dim=32, own_head=True)
    return [target, *between, head]


KINDS: dict[str, Callable[[Path], list[Any]]] = {
    "plain": lambda _: [packed(3)],
    "two": lambda _: [packed(3), packed(1)],
    "three": lambda _: [packed(3), packed(2), packed(1)],
    "copies": copies,
    "eagle": lambda place: with_head("eagle", place, packed(2)),
    "trees": lambda place: with_head("medusa", place),
    "words": lambda _: [packed(3), "ngram"],
    # In caches that take one sequence.
    "single": lambda _: [packed(layers, new_cache=DynamicCache) for layers in (3, 1)],
    "streaming": lambda _: [packed(3), Counting(model(1), streaming=8)],
}


def conversation(levels: list[Any], temperature: float, cache: bool) -> list[Any]:
    """Hold three turns; the second goes on after a part of the first answer."""
    chain, Counting.left = ps.Chain(levels), 0
    for level in levels:
        if isinstance(level, Counting):
            level.num_read = 0
    text, found = list(TEXT), []
    for turn in range(TURNS):
        stream = chain.stream(
            text, 18, temperature=temperature, seed=turn, eos_token_id=[], cache_prompt=cache
        )
        new = list(stream)
        found.append((new, stream.batch.rows[0].logprobs, stream.stats))
        text += [*new[: -3 if turn == 0 else None], 7, 8 + turn, 9, 60]
    return found


@invariant
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_what_it_is_when_all_is_read(kind, temperature, tmp_path) -> None:
    levels = KINDS[kind](tmp_path)
    wanted = conversation(levels, temperature, cache=False)
    alone = [level.num_read for level in levels if isinstance(level, Counting)]
    levels = KINDS[kind](tmp_path)  # an n-gram table remembers the texts
    found = conversation(levels, temperature, cache=True)
    counting = [level for level in levels if isinstance(level, Counting)]
    for (tokens, logprobs, stats), (own, own_logprobs, before) in zip(found, wanted, strict=True):
        assert tokens == own
        assert logprobs == own_logprobs
        assert [level.num_draft_tokens for level in stats.levels] == [
            level.num_draft_tokens for level in before.levels
        ]
    cached = [stats.num_cached_tokens for _, _, stats in found]
    prompts = [stats.num_prompt_tokens for _, _, stats in found]
    # All but new tokens, and tokens that the last round left unread.
    assert cached[0] == 0
    assert all(n - have < 12 for n, have in zip(prompts[1:], cached[1:], strict=True))
    if kind != "copies":  # copies read in the target's cache
        assert counting[0].num_read == sum(prompts) - sum(cached) - TURNS
    assert counting[0].num_read < 0.4 * alone[0]
    if kind == "streaming":
        assert counting[1].num_read == alone[1]
    elif len(counting) > 1:
        assert counting[1].num_read <= 0.4 * alone[1]


@pytest.mark.parametrize(
    "between",
    ["a level by hand", "another chain", "a failure", "an interrupt", "more rows", "another text"],
)
def test_copies_stay_whatever_is_done_with_the_levels(between: str, monkeypatch: Any) -> None:
    Counting.left = 0
    target, draft = Counting(model(3)), Counting(model(1))
    chain = ps.Chain([target, draft])
    first = list(chain.stream(TEXT, 9, eos_token_id=[], cache_prompt=True))
    text = [*TEXT, *first, 5, 6]
    wanted = list(ps.Chain([Counting(model(3))]).stream(text, 9, eos_token_id=[]))
    if between == "a level by hand":  # as many tokens as before, but others
        held = int(target.cache.lengths[0])
        target.rollback([2])
        target.forward(torch.full((1, held - 2), 11), 1)
    elif between == "another chain":
        ps.Chain([draft]).generate([1, 2, 3], 4, eos_token_id=[])
    elif between in ("a failure", "an interrupt"):
        stream = chain.stream([*TEXT, 5], 9, eos_token_id=[], cache_prompt=True)
        next(stream)
        kind = KeyboardInterrupt if between == "an interrupt" else ArithmeticError
        monkeypatch.setattr(Counting, "error", kind("as planned"))
        Counting.left = 1
        with pytest.raises(kind):
            list(stream)
    elif between == "more rows":
        chain.generate([TEXT, TEXT], 4, eos_token_id=[])
    else:
        list(chain.stream([*TEXT[:4], 1, 1, 1, 1], 4, eos_token_id=[], cache_prompt=True))
    stream = chain.stream(text, 9, eos_token_id=[], cache_prompt=True)
    assert list(stream) == wanted
    assert stream.stats.num_cached_tokens == len(text) - 3


def test_a_stream_that_was_left_can_be_gone_on_with() -> None:
    """As after a client has read enough of an answer."""
    chain = ps.Chain([HuggingFaceLevel(model(3)), HuggingFaceLevel(model(1))])
    stream = chain.stream(TEXT, 30, eos_token_id=[])
    some = [next(stream) for _ in range(7)]
    text = [*TEXT, *some, 4]
    wanted = list(ps.Chain(chain.levels).stream(text, 9, eos_token_id=[]))
    stream = chain.stream(TEXT, 30, eos_token_id=[], cache_prompt=True)
    assert [next(stream) for _ in range(7)] == some
    following = chain.stream(text, 9, eos_token_id=[], cache_prompt=True)
    with pytest.raises(RuntimeError, match="this stream has ended"):
        list(stream)
    assert list(following) == wanted
    assert len(TEXT) + 7 - 5 <= following.stats.num_cached_tokens < len(text)


def test_nothing_is_kept_unasked_for() -> None:
    chain = ps.Chain([HuggingFaceLevel(model(1))])
    for cache, held in ((False, 0), (True, 0), (False, 0), (True, len(TEXT) - 1)):
        stream = chain.stream(TEXT, 4, eos_token_id=[], cache_prompt=cache)
        list(stream)
        assert stream.stats.num_cached_tokens == held
        told = f"{len(TEXT)} prompt tokens{f' ({held} in the caches)' if held else ''}, 4 new"
        assert columns.of_stats(stream.stats).startswith(told)
    for wrong in (1, "yes", None):
        with pytest.raises(TypeError, match="cache_prompt: expected True or False"):
            chain.stream(TEXT, 4, cache_prompt=wrong)


# Begins of the prompts of a server's requests, and their questions.
BEGINS = [TEXT * 4, TEXT * 3 + [1, 2, 9], [9, 8, 7], TEXT + [5] * 30]
ASKED: list[dict[str, Any]] = [
    {"max_new_tokens": most, "temperature": temperature, "seed": seed, "eos_token_id": []}
    for most, temperature, seed in ((12, 0.0, 1), (18, 1.0, 2), (1, 1.0, 3), (9, 0.7, 4))
]
REQUEST = st.tuples(st.sampled_from(BEGINS), st.sampled_from([2, 14, 25]), st.sampled_from(ASKED))


SERVED: dict[str, Callable[[Path], list[Any]]] = {
    **{kind: KINDS[kind] for kind in ("three", "streaming", "trees")},
    # The model below has a separate cache.
    "shared": lambda place: [*copies(place)[:2], packed(1)],
    "lookup": lambda place: [*copies(place)[:2], ps.PromptLookup(2, 1)],
    "eagle": lambda place: with_head("eagle", place),
}


@invariant
@pytest.mark.parametrize("kind", SERVED)
def test_requests_that_come_and_go_have_their_texts(kind: str, tmp_path: Path) -> None:
    Counting.left = 0
    chain = ps.Chain(SERVED[kind](tmp_path))
    known: dict[str, ps.Output] = {}

    @settings(max_examples=8)
    @given(
        st.lists(st.tuples(st.integers(0, 8), REQUEST), min_size=2, max_size=6),
        st.integers(1, 3),
        st.sampled_from([0, 40, 4096]),
        st.one_of(st.just(0), st.integers(1, 40)),
    )
    def check(requests: list[Any], slots: int, cache_tokens: int, fails: int) -> None:
        Counting.left = 0
        for _, one in requests:
            if str(one) not in known:
                known[str(one)] = chain.generate([one[0][: one[1]]], **one[2])
        server, step = ps.Server(chain, slots, cache_tokens=cache_tokens), 0
        events: dict[int, list[Any]] = {}
        wanted, Counting.left = {}, fails
        while len(events) < len(requests) or server.running or server.waiting:
            for begin, length, options in [one for at, one in requests if at == step]:
                number = server.add(begin[:length], **options)
                wanted[number] = known[str((begin, length, options))]
                events[number] = []
            for event in server.step():
                events[event.request].append(event)
            step += 1
            assert step < 500
        for number, own in events.items():
            tokens = [token for event in own for token in event.tokens]
            if own[-1].error is not None:
                assert fails
                assert tokens == wanted[number].new_tokens[0][: len(tokens)]
                continue
            assert tokens == wanted[number].new_tokens[0]
            if wanted[number].logprobs:
                assert [x for event in own for x in event.logprobs] == wanted[number].logprobs[0]

    check()
