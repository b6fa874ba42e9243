"""Requests that join a batch and leave it have the texts that a chain gives them alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import captured_chains
import pytest
import torch
import toy_rows
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_chains import Row, rows, run, shapes
from recorder import Recorder
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.runtime.graphs import Graphs
from polyspec_ext.serving.server import Event

VOCAB = 7
Admitting = toy_rows.Admitting


def serve(server, requests, joins=()) -> list[list[Event]]:
    """Return the events of each request; request i is added before step ``joins[i]``."""
    events: dict[int, list[Event]] = {}
    ids: list[int] = []
    pending = list(zip([*joins, *[0] * (len(requests) - len(joins))], requests, strict=True))
    step = 0
    while pending or server.running or server.waiting:
        for at, request in list(pending):
            if at <= step:
                pending.remove((at, request))
                ids.append(server.add(**request))
                events[ids[-1]] = []
        for one in server.step():
            events[one.request].append(one)
        step += 1
        assert server.running <= server.slots
        assert step < 10_000
    assert all(len([e for e in own if e.finish_reason]) == 1 for own in events.values())
    return [events[one] for one in ids]


def sound(events: Sequence[Event]) -> Sequence[Event]:
    """Raise the error of a request that has failed."""
    for one in events:
        if one.error is not None:
            raise one.error
    return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for one in events for token in one.tokens]


def logprobs_of(events: Sequence[Event]) -> list[float]:
    return [value for one in events for value in one.logprobs]


def request_of(row: Row) -> dict[str, Any]:
    request = {"prompt": row.prompt, "max_new_tokens": row.max_new_tokens}
    return {**request, "eos_token_id": row.eos, **row.sampling}


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    shapes(),
    rows(PROMPTS, 30),
    st.lists(st.integers(0, 8), min_size=5, max_size=5),
    st.integers(1, 3),
    st.sampled_from([0, 16, 64]),
    st.sampled_from(["join", "anew", "mixed", "lookup"]),
)
def test_texts_do_not_depend_on_who_shares_the_steps(
    shape, batch, joins, slots, cached, kind
) -> None:
    count = len(shape.window) + 1
    anew = toy_rows.Staying  # reads all texts anew when a row joins
    kinds: dict[str, list[Any]] = {"anew": [anew], "mixed": [Admitting, anew]}
    chosen = kinds.get(kind, [Admitting])
    levels: list[Any] = [chosen[i % len(chosen)](VOCAB, 11 + i, 1.2) for i in range(count)]
    if kind == "lookup" and count > 1:
        levels[-1] = ps.PromptLookup(2, 1)
        shape = shape._replace(sync_each_step=None)
    options = shape.options()
    chain = ps.Chain(levels, **options, check_vocabulary=False)
    alone = [run(chain, [row])[0] for row in batch]
    server = ps.Server(chain, slots, cache_tokens=cached)
    joins = sorted(joins[: len(batch)])
    event(f"{kind}, {count} levels")
    for row, wanted, events in zip(
        batch, alone, serve(server, [request_of(r) for r in batch], joins), strict=True
    ):
        assert tokens_of(sound(events)) == wanted.tokens[len(row.prompt) :]
        assert logprobs_of(events) == ([] if wanted.request.sampling.greedy else wanted.logprobs)
        ended = bool(tokens_of(events)) and tokens_of(events)[-1] in row.eos
        assert events[-1].finish_reason == ("stop" if ended else "length")
        stats = events[-1].stats
        assert stats.num_new_tokens == len(wanted.logprobs)
        assert [x.num_accepted_tokens for x in stats.levels] == [
            x.num_accepted_tokens for x in wanted.stats.levels
        ]
        proposed = [level for one in events for level in one.levels]
        assert len(proposed) == len(wanted.logprobs)
        accepted = wanted.stats.levels[0].num_accepted_tokens
        assert sum(level > 1 for level in proposed) == accepted


def test_rules_and_alternatives_are_those_of_the_request() -> None:
    def chain() -> ps.Chain:
        return ps.Chain([Admitting(VOCAB, 11 + i, 1.2) for i in range(3)], [4, 2])

    rules = [
        ps.LogitsRules(presence_penalty=1.5, frequency_penalty=0.3),
        None,
        ps.LogitsRules(logit_bias={3: 5.0}, bad_words=[[1, 3]]),
        ps.LogitsRules(repetition_penalty=1.4),
    ]
    sampling: dict[str, Any] = {"temperature": 0.9, "top_k": 5, "eos_token_id": []}
    wanted, requests = [], []
    for number, own in enumerate(rules):
        request = {"max_new_tokens": 20, "rules": own, "seed": number, "logprobs": 3, **sampling}
        wanted.append(chain().generate([[number, 2]], **request))
        requests.append({"prompt": [number, 2], **request})
    for out, events in zip(
        wanted, serve(ps.Server(chain(), 2), requests, [0, 0, 1, 4]), strict=True
    ):
        assert tokens_of(sound(events)) == out.new_tokens[0]
        assert logprobs_of(events) == out.logprobs[0]
        assert [one for event in events for one in event.alternatives] == out.alternatives[0]


def alone(chain: ps.Chain, request: dict[str, Any]) -> ps.Output:
    options = {name: request.get(name) for name in ("max_new_tokens", "temperature", "seed")}
    return chain.generate([request["prompt"]], **options, eos_token_id=[])


# ---- requests that fail --------------------------------------------------------------------------


class Broken(Admitting):
    """A level that fails after a token, has no distribution there, or has no memory for a
    text of seven tokens."""

    def __init__(self, *given: Any, how: str) -> None:
        super().__init__(*given)
        self.how = how

    def row(self, text: Sequence[int]) -> torch.Tensor:
        logits = super().row(text)
        if text[-1] == 6 and self.how == "raises":
            raise ArithmeticError("behind token 6")
        lost = text[-1] == 6 and self.how == "nan"
        return torch.full_like(logits, float("nan")) if lost else logits

    def open(self, length: int) -> Any:
        if length == 7 and self.how == "no memory":
            raise RuntimeError("out of memory")
        return super().open(length)


class Unwilling:
    def fork(self) -> Any:
        return Unwilling()

    def propose(self, context: Context, k: int) -> Proposal:
        if context.tokens[0] == 6:
            raise LookupError("no")
        return Proposal([1] * k)


@pytest.mark.parametrize("how", ["raises", "nan", "no memory", "drafter", "draft level"])
def test_a_request_that_fails_ends_alone(how: str) -> None:
    def chain(broken: bool) -> ps.Chain:
        levels: list[Any] = [Admitting(VOCAB, 11, 1.2), Admitting(VOCAB, 12, 1.2)]
        if how == "drafter":
            levels[1] = Unwilling()
        elif broken:
            place = how == "draft level"
            kind = "nan" if place else how
            levels[place] = Broken(VOCAB, 11 + place, 1.2, how=kind)
        return ps.Chain(levels, [3], check_vocabulary=False)

    sampled = {"temperature": 1.0, "eos_token_id": [], "max_new_tokens": 20}
    prompts = [[0, 1], [1, 1], [6] * (7 if how == "no memory" else 2), [3, 1], [4, 1]]
    requests = [{"prompt": p, "seed": i, **sampled} for i, p in enumerate(prompts)]
    sound = chain(False)
    wanted = [
        [] if how == "drafter" and i == 2 else alone(sound, one).new_tokens[0]
        for i, one in enumerate(requests)
    ]
    served = serve(ps.Server(chain(True), 3), requests, [0, 0, 1, 1, 2])
    failed = [number for number, events in enumerate(served) if events[-1].error is not None]
    for number, events in enumerate(served):
        tokens = tokens_of(events)
        assert (events[-1].finish_reason == "error") == (number in failed)
        assert tokens == wanted[number][: len(tokens) if number in failed else None]
    assert 2 in failed
    assert how not in ("drafter", "no memory") or failed == [2]


@pytest.mark.parametrize("kind", ["models", "eagle"])
def test_short_prompts_are_read_together_beside_others(kind: str) -> None:
    """In one padded pass of each level, with the bits of reading each alone."""
    levels: list[Any] = [
        ps.Level(AutoModelForCausalLM.from_pretrained(tiny.path("target")), pack=True)
    ]
    if kind == "eagle":
        levels.append(ps.Eagle.from_pretrained(tiny.path("eagle3"), levels[0]))
    else:
        levels.append(tiny.path("drafter"))
    chain = ps.Chain(levels, [4])
    lengths = [3, 12, 15, 1, 11, 400]
    sampled = {"temperature": 0.9, "max_new_tokens": 20, "eos_token_id": []}
    requests: list[dict[str, Any]] = [
        {"prompt": [(7 * i + j) % 90 + 5 for j in range(n)], "seed": i, **sampled}
        for i, n in enumerate(lengths)
    ]
    wanted = [alone(chain, one) for one in requests]
    passes: list[tuple[int, int]] = []
    append = HuggingFaceLevel.append

    def noted(level: HuggingFaceLevel, tokens: torch.Tensor, *given: Any) -> Any:
        passes.append((tokens.shape[0], tokens.numel()))
        return append(level, tokens, *given)

    server = ps.Server(chain, 6)
    ids = [server.add(**requests[0])]
    events = {ids[0]: server.step()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceLevel, "append", noted)
        ids += [server.add(**one) for one in requests[1:]]
        events.update({one: [] for one in ids[1:]})
        for event in server.step():
            events[event.request].append(event)
    assert len(events[ids[0]]) == 2  # its next tokens came with the step
    assert max(rows for rows, _ in passes) > 1
    assert len(passes) < (len(lengths) - 1) * (1 if kind == "eagle" else 2)
    assert max(tokens for _, tokens in passes) <= 512
    while server.running or server.waiting:
        for event in server.step():
            events[event.request].append(event)
    for request, out in zip(ids, wanted, strict=True):
        assert tokens_of(sound(events[request])) == out.new_tokens[0]
        assert logprobs_of(events[request]) == out.logprobs[0]


class Refusing(Admitting):
    """Has no room for a text that begins with token 6. A list notes rows that are read together.

    Args:
        admits: such a text is read, and has no room in the batch.
    """

    def __init__(self, seed: int, admits: bool) -> None:
        super().__init__(VOCAB, seed, 1.2)
        self.admits, self.together = admits, list[int]()

    def require(self, begins: Sequence[int]) -> None:
        if 6 in begins and not self.admits:
            raise MemoryError("no room")

    def extend(self, sequence: list[int], tokens: torch.Tensor, layers: Any) -> None:
        self.require([int(tokens[0, 0])])
        super().extend(sequence, tokens, layers)

    def extend_together(self, sequences: Any, tokens: torch.Tensor, *more: Any) -> None:
        self.together.append(len(sequences))
        self.require(tokens[:, 0].tolist())
        super().extend_together(sequences, tokens, *more)

    def prefill(self, prompts: Any) -> None:
        self.require([row[0] for row in prompts.tokens.tolist() if row])
        super().prefill(prompts)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self.require([row[0] for row, n in zip(tokens.tolist(), counts, strict=True) if n])
        super().read(tokens, counts)

    def admit(self, *given: Any) -> None:
        if any(6 in sequence[:1] for sequence in given[0]):
            raise MemoryError("no room")
        super().admit(*given)


LATER = [0, 1, 2, 3]


@pytest.mark.parametrize(("joins", "admits"), [([0] * 4, False), (LATER, False), (LATER, True)])
def test_a_request_whose_prompt_has_no_room_ends_alone(joins: list[int], admits: bool) -> None:
    """Read together with others, and while a batch runs, where the level above has its row."""
    sampled = {"temperature": 1.0, "eos_token_id": [], "max_new_tokens": 9}
    requests = [{"prompt": [i, 1], "seed": i, **sampled} for i in (1, 6, 2, 3)]
    levels = [Admitting(VOCAB, 11, 1.2), Admitting(VOCAB, 12, 1.2)]
    wanted = [alone(ps.Chain(levels, [3]), one).new_tokens[0] for one in requests]
    level = Refusing(11 + admits, admits)
    levels[admits] = level
    served = serve(ps.Server(ps.Chain(levels, [3]), 3), requests, joins)
    assert isinstance(served.pop(1)[-1].error, MemoryError)
    assert [tokens_of(sound(one)) for one in served] == [wanted[0], *wanted[2:]]
    assert admits or level.together == ([] if joins[1] else [3])


# ---- the queue -----------------------------------------------------------------------------------


def server_of(slots: int = 2, **options: Any) -> ps.Server:
    return ps.Server(
        ps.Chain([Admitting(VOCAB, 11, 1.2), Admitting(VOCAB, 12, 1.2)], [3]), slots, **options
    )


def test_a_request_that_is_aborted() -> None:
    server = server_of(1)
    running, waiting, last = (server.add([i], max_new_tokens=30, eos_token_id=[]) for i in range(3))
    before = tokens_of(server.step())
    assert before
    server.abort(running)
    server.abort(waiting)
    server.abort(99)
    events = server.step()
    reasons = {one.request: one.finish_reason for one in events if one.request != last}
    assert reasons == {running: "abort", waiting: "abort"}
    assert tokens_of([one for one in events if one.request == last])
    server.abort(last)
    assert [one.finish_reason for one in server.step()] == ["abort"]
    server.abort(last)
    assert server.step() == []
    assert server.running == server.waiting == 0


def test_an_interrupted_server_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when a request has left the queue and joined nothing."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    server = server_of(2)
    server.add([1], max_new_tokens=30, eos_token_id=[])
    server.step()
    server.add([2])
    with monkeypatch.context() as patch:
        patch.setattr(server.prefixes, "find", interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.step()
    with pytest.raises(RuntimeError, match="this stream has ended"):
        server.step()


def test_the_queue_is_bounded_and_goes_by_priority() -> None:
    server = server_of(1, max_waiting=2)
    ids = [server.add([1], max_new_tokens=2, priority=n) for n in (0, 0, 5)]
    with pytest.raises(ps.ServerFull, match="expected at most 2 waiting requests"):
        server.add([1])
    order = []
    while server.running or server.waiting:
        order += [one.request for one in server.step() if one.finish_reason]
    assert order == [ids[2], ids[0], ids[1]]


def test_tokens_are_bounded() -> None:
    server = server_of(4, max_tokens=20)
    with pytest.raises(ValueError, match=r"max_new_tokens: expected .* at most 20 tokens"):
        server.add([1, 2], max_new_tokens=19)
    for _ in range(3):
        server.add([1, 2], max_new_tokens=8, eos_token_id=[])
    seen = []
    while server.running or server.waiting:
        server.step()
        seen.append(server.running)
    assert max(seen) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("speculation", 1.5), ("priority", "high"), ("seed", -1)],
)
def test_bad_parameters(name: str, value: Any) -> None:
    server = server_of()
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        server.add([1], **{name: value})
    assert server.step() == []


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_windows_are_bounded_by_request(bound: int) -> None:
    levels: list[Any] = [Admitting(VOCAB, 11 + i, 1.2) for i in range(3)]
    chain = ps.Chain(levels, [5, 3], check_vocabulary=False)
    narrow = ps.Chain(
        [Admitting(VOCAB, 11 + i, 1.2) for i in range(3)],
        [min(5, bound), min(3, bound)],
        check_vocabulary=False,
    )
    request = {"max_new_tokens": 25, "temperature": 1.0, "seed": 1, "eos_token_id": []}
    wanted = alone(narrow, {"prompt": [1, 2], **request}).new_tokens[0]
    free = alone(chain, {"prompt": [3], **request}).new_tokens[0]
    both = [
        {"prompt": [1, 2], "speculation": bound or False, **request},
        {"prompt": [3], **request},
    ]
    served = serve(ps.Server(chain, 2), both)
    assert [tokens_of(own) for own in served] == [wanted, free]


def test_a_prompt_is_read_by_the_levels_that_draft() -> None:
    """Levels below the target read nothing while all decode plainly, then all at once."""

    class Counting(Admitting):
        begun = late = 0

        def extend(self, sequence: list[int], tokens: torch.Tensor, layers: Any) -> None:
            self.begun += tokens.shape[1]
            super().extend(sequence, tokens, layers)

        def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
            self.late += sum(counts)
            super().read(tokens, counts)

    class Late:
        """Decodes plainly for 40 tokens of each text."""

        def next(self, report: Any) -> list[int]:
            return [3 if len(report.text) > 52 else 0]

    levels = [Admitting(VOCAB, 11, 1.2), Counting(VOCAB, 12, 1.2)]
    chain = ps.Chain(levels, [3], policy=Late())
    sampled = {"temperature": 1.0, "eos_token_id": []}
    requests: list[dict[str, Any]] = [
        {"prompt": [i] * 12, "max_new_tokens": 30 + 20 * i, "seed": i, **sampled} for i in range(3)
    ]
    wanted = [alone(chain, one).new_tokens[0] for one in requests]
    levels[1].begun = levels[1].late = 0
    served = serve(ps.Server(chain, 3), requests, [0, 1, 2])
    assert [tokens_of(sound(own)) for own in served] == wanted
    assert levels[1].begun == 0
    assert 2 * 51 <= levels[1].late <= 2 * 54


def test_slots_that_a_level_cannot_serve_are_refused() -> None:
    class Single(toy_rows.Rows):
        supports_batches = False

    chain = ps.Chain([Single(VOCAB, 11, 1.2), Single(VOCAB, 12, 1.2)], [3])
    with pytest.raises(ValueError, match="expected one prompt, given 2"):
        ps.Server(chain, 2)


# ---- captured rounds -----------------------------------------------------------------------------


def with_lookup(captured: bool) -> tuple[ps.Chain, Graphs | None]:
    """Return a chain with steps that the host follows."""
    graphs = Graphs(Recorder()) if captured else None
    levels = [captured_chains.level(i, 2, f"level {i}", captured) for i in range(2)]
    return ps.Chain([*levels, ps.PromptLookup()], [4, 2], graphs=graphs), graphs


@pytest.mark.parametrize("made", [partial(captured_chains.make, [4, 2]), with_lookup])
def test_captured_rounds_serve_on_while_rows_join_and_leave(made: Any) -> None:
    """Replace CUDA by a recorder: graphs replay operators on the memory of their capture."""
    sampled = {"max_new_tokens": 12, "temperature": 1.0, "eos_token_id": []}
    requests = [{"prompt": [1 + i, 2, 3], "seed": i, **sampled} for i in range(14)]
    plain, _ = made(False)
    wanted = [alone(plain, one).new_tokens[0] for one in requests]
    chain, graphs = made(True)
    server = ps.Server(chain, 3)
    first = serve(server, requests[:7], [0, 0, 0, 1, 2, 3, 4])
    captures = graphs.num_captures
    assert captures > 0
    second = serve(server, requests[7:], [0, 0, 1, 1, 2, 3, 4])
    assert [tokens_of(sound(own)) for own in (*first, *second)] == wanted
    assert graphs.num_captures == captures
    assert graphs.num_replays > 4 * captures
