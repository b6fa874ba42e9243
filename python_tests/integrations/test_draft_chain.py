"""Drafts for a target in another engine: its law, and texts that do not depend on their company."""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import toy
import toy_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.runtime.plan import Operators

PROMPT = [0, 1]
FILTERED = {"temperature": 0.75, "top_k": 0, "top_p": 0.75, "min_p": 0.0}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def drafting(levels: Sequence[Any], window: Sequence[int] | None = None, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("vocab_size", "windows") if name in options}
    chain = ps.Chain(levels, window, check_vocabulary=False, **options)
    return ps.DraftChain(chain, policy=own.get("windows"), vocab_size=own.get("vocab_size"))


def outside(drafts, target, length, steps, sampling, seed=0, rule="token", verify=ps.verify):
    """Return a text of a target outside.

    Args:
        steps: repeated: how many drafts are wanted, and how many pending drafts the target verifies
            at most.
    """
    drafts.add("text", PROMPT, seed=seed, **sampling)
    text = list(PROMPT)
    for wanted, most in itertools.cycle(steps):
        drafts.propose({"text": wanted})
        tokens, logits, count = drafts.pending("text")
        assert len(tokens) >= wanted or drafts.policy is not None
        tokens = tokens[:most]
        p = [target.row([*text, *tokens[:i]]) for i in range(len(tokens) + 1)]
        q = None if logits is None or not tokens else logits[None, : len(tokens)]
        key = {"seed": seed, "position": len(text), "level": 1, "round": count}
        r = verify(
            torch.stack(p)[None], torch.tensor([tokens]).long(), q, rule=rule, **sampling, **key
        )
        new = r.tokens[0, : int(r.num_accepted) + 1].tolist()
        drafts.observe({"text": (len(tokens), int(r.num_accepted))}, 0.01)
        drafts.commit("text", new)
        text += new
        if len(text) >= len(PROMPT) + length:
            break
    drafts.remove("text")
    return tuple(text[len(PROMPT) : len(PROMPT) + length])


# ---- law -----------------------------------------------------------------------------------------


class ByText:
    """Windows of 0 to 2 that follow from the text alone. Reports are kept."""

    def __init__(self) -> None:
        self.reports: list[ps.RoundReport] = []
        self.chosen: set[tuple[int, ...]] = set()

    def next(self, report: Any) -> list[int]:
        self.reports.append(report._replace(text=list(report.text)))
        count = sum(report.text) + 2 * len(report.text)
        windows = [(count + level) % 3 for level in range(len(report.windows))]
        self.chosen.add(tuple(windows))
        return windows


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize(
    ("window", "steps", "rule"),
    [
        ([], [(2, 9)], "token"),
        ([], [(2, 1)], "token"),  # the rest is verified with the next step, if it is left
        ([], [(2, 9), (0, 9)], "block"),
        ([1], [(1, 9)], "token"),
        ([1], [(2, 1), (1, 9)], "token"),
        ([1], [(2, 9)], "block"),
        ([1, 1], [(1, 9)], "token"),
        # None: a policy chooses the windows.
        ([], None, "token"),
        ([1], None, "token"),
        ([1, 1], None, "token"),
    ],
    ids=str,
)
def test_the_target_keeps_its_law(window, steps, rule, sampling) -> None:
    length, policy = 3 if len(window) < 2 else 2, None if steps else ByText()
    target, *levels = toy.make_levels(len(window) + 2, vocab=2)
    enumerator = toy.Enumerator()
    drafts = drafting(levels, window, operators=enumerator.operators, windows=policy)

    def generate() -> tuple[int, ...]:
        calls, verify = steps or [(2, 9)], enumerator.verify
        return outside(drafts, target, length, calls, sampling, rule=rule, verify=verify)

    got = toy.chain_distribution(enumerator, generate)
    wanted = toy.text_distribution(target, PROMPT, length, **sampling)
    assert toy.total_variation(got, wanted) < 1e-12
    assert enumerator.paths > len(wanted) or policy
    assert policy is None or len(policy.chosen) >= length - 1


@pytest.mark.parametrize("window", [[], [2], [2, 1]], ids=str)
def test_reports_to_a_policy(window: list[int]) -> None:
    target, *levels = toy.make_levels(len(window) + 2)
    policy = ByText()
    outside(drafting(levels, window, windows=policy), target, 40, [(2, 9)], PLAIN)
    first, *later = policy.reports
    assert (first.committed, list(first.text)) == (0, PROMPT)
    for before, report in zip(policy.reports, later, strict=False):
        assert list(report.text[: len(before.text)]) == list(before.text)
        assert len(report.text) == len(before.text) + report.committed
        chosen = [(sum(before.text) + 2 * len(before.text) + i) % 3 for i in range(9)]
        assert list(report.windows) == chosen[: len(window) + 1]
        *below, top = report.steps
        assert (top.level, top.batch, top.seconds) == (1, 1, 0.01)
        assert top.accepted + 1 == report.committed
        assert top.tokens >= report.windows[0]
        assert {step.level for step in below} <= set(range(2, len(window) + 3))
        assert bool(below) == (report.windows[0] > 0)
        if not window and below:
            assert below == [below[0]._replace(level=2, tokens=top.tokens, width=top.tokens)]


def test_texts_of_one_pass_are_reported_together() -> None:
    policy = ByText()
    drafts = drafting([toy_rows.Admitting(VOCAB, 11)], windows=policy)
    for key in ("a", "b"):
        drafts.add(key, [1, 2])
    drafts.propose({"a": 4, "b": 4})
    drafts.propose({"a": 4, "b": 4})  # windows are chosen once a round
    assert [(report.request, report.batch) for report in policy.reports] == [(0, 2), (1, 2)]
    drafts.observe({"a": (1, 0), "b": (1, 1)}, 0.5)
    drafts.commit("a", [0])
    drafts.commit("b", [*drafts.pending("b").tokens, 0])
    drafts.remove("a")
    drafts.propose({"b": 4})
    step = policy.reports[-1].steps[-1]
    assert step == (1, 1, 1, 1, 2, 0.5, True)
    drafts.add("c", [1])
    drafts.propose({"c": 4})
    assert policy.reports[-1].request == 0  # a number that is free again


@pytest.mark.parametrize(("seconds", "drafts_pay"), [(1e-7, False), (10.0, True)])
@pytest.mark.parametrize("policy", ["joint", "online", "fixed"])
def test_policies_weigh_the_pass_of_the_target(policy, seconds, drafts_pay) -> None:
    guarded = ps.policies.POLICIES[policy](guard=True)
    drafts = drafting([toy_rows.Admitting(VOCAB, 11)], windows=guarded)
    drafts.add("text", [1, 2])
    counts = []
    for _ in range(60):
        drafts.propose({"text": 4})
        tokens = drafts.pending("text").tokens
        counts.append(len(tokens))
        drafts.observe({"text": (len(tokens), len(tokens))}, seconds)
        drafts.commit("text", [*tokens, 0])
    assert (sum(counts[30:]) > 60) == drafts_pay


def test_a_policy_of_the_chain_is_refused_beside_that_of_the_drafts() -> None:
    chain = ps.Chain(toy.make_levels(2), [2], check_vocabulary=False, policy="fixed")
    with pytest.raises(ValueError, match="policy: expected none of the chain's"):
        ps.DraftChain(chain, policy="fixed")
    with pytest.raises(ValueError, match="policy: expected one of"):
        ps.DraftChain(chain, policy="fast")
    drafts = ps.DraftChain(chain)
    drafts.add("text", [0])
    for verified, error in (({"text": (1, 2)}, ValueError), ({"other": (0, 0)}, KeyError)):
        with pytest.raises(error):
            drafts.observe(verified)


@pytest.mark.parametrize("window", [[], [2], [3, 1]], ids=str)
def test_no_draw_comes_twice(window: list[int]) -> None:
    keys: list[tuple[int, ...]] = []
    known = Operators()

    def draw(*args: Any) -> Any:
        _, _, positions, rounds, level, column, *_ = args
        keys.append((level, int(positions) + column, int(rounds)))
        return known.draw(*args)

    def verify(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        begin, level, count = int(options["position"]), options["level"], int(options["round"])
        end = begin + int(options["draft_lengths"]) + 1
        keys.extend((level, position, count) for position in range(begin, end))
        return known.verify(logits, *args, **options)

    levels = toy.make_levels(len(window) + 1)
    drafts = drafting(levels, window, operators=Operators(draw, verify))
    drafts.add("text", PROMPT)
    for token in [0, 1, 2, 2, 1, 0, 2]:
        drafts.propose({"text": 4})
        drafts.commit("text", [token])
    assert len(keys) > 20
    assert len(set(keys)) == len(keys)


# ---- texts ---------------------------------------------------------------------------------------

VOCAB = 5


class Alone:
    """The same calls for each text in a separate chain, which reads all of it anew."""

    def __init__(self, make: Callable[[], ps.DraftChain]) -> None:
        self._make = make
        self._chains: dict[str, ps.DraftChain] = {}
        self.vocab_size = VOCAB

    def add(self, key: str, *args: Any, **options: Any) -> None:
        self._chains[key] = self._make()
        self._chains[key].add(key, *args, **options)

    def propose(self, wanted: dict[str, int]) -> None:
        for key, count in wanted.items():
            chain = self._chains[key]
            chain.add("other", [0])  # texts that join have all be read again
            chain.propose({"other": 1})
            chain.remove("other")
            chain.propose({key: count})

    def pending(self, key: str) -> Any:
        return self._chains[key].pending(key)

    def commit(self, key: str, tokens: list[int]) -> None:
        if tokens:
            self._chains[key].commit(key, tokens)

    def remove(self, key: str) -> None:
        del self._chains[key]


class Anew(toy_rows.Rows):
    """A toy level that reads all texts anew when a row joins, and returns one buffer again."""

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        logits = super().forward(*args, **options)
        self.output = getattr(self, "output", toy_rows.Output())
        return self.output.view(logits)


KINDS: dict[str, Any] = {"anew": Anew, "beside": toy_rows.Admitting}


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Return calls for texts that come and go."""
    calls: list[tuple[Any, ...]] = []
    keys: list[str] = []
    for number in range(draw(st.integers(3, 25))):
        kind = draw(st.sampled_from(["add", "propose", "propose", "commit", "commit", "remove"]))
        if kind == "add" or not keys:
            keys.append(f"text {number}")
            prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
            temperature = draw(st.sampled_from([0.0, 0.7, 1.0]))
            eos = draw(st.sampled_from([[], [0]]))
            calls.append(("add", keys[-1], prompt, temperature, number, eos))
        elif kind == "propose":
            chosen = draw(st.lists(st.sampled_from(keys), unique=True, min_size=1))
            calls.append(("propose", {key: draw(st.integers(0, 5)) for key in chosen}))
        elif kind == "commit":
            key = draw(st.sampled_from(keys))
            more = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
            calls.append(("commit", key, draw(st.integers(0, 4)), more, draw(st.booleans())))
        else:
            calls.append(("remove", keys.pop(draw(st.integers(0, len(keys) - 1)))))
    return calls


@settings(max_examples=60)
@given(
    sessions(), st.sampled_from([[], [2], [3, 1], [3, 0]]), st.sampled_from(["anew", "beside"]),
    st.booleans(), st.sampled_from([None, "fixed"]),
)  # fmt: skip
def test_drafts_do_not_depend_on_company_or_cuts(calls, window, kind, lookup, policy) -> None:
    def make(kind: str) -> ps.DraftChain:
        levels: list[Any] = [KINDS[kind](VOCAB, 11 + i, 1.5) for i in range(len(window) + 1)]
        if lookup and window:
            levels[-1] = ps.PromptLookup(2, 1)
        return drafting(levels, window, policy=policy)

    drafts, alone = make(kind), Alone(lambda: make("anew"))
    top = toy.ToyLevel(VOCAB, 11, 1.5)
    texts: dict[str, list[int]] = {}
    rounds: dict[str, int] = {}
    stops: dict[str, list[int]] = {}
    for call, *rest in calls:
        if call == "add":
            key, prompt, temperature, seed, eos = rest
            texts[key], rounds[key], stops[key] = list(prompt), 0, eos
            for one in (drafts, alone):
                one.add(key, prompt, temperature=temperature, seed=seed, eos_token_id=eos)
        elif call == "propose":
            before = {key: drafts.pending(key).tokens for key in rest[0]}
            for one in (drafts, alone):
                one.propose(rest[0])
            for key, count in rest[0].items():
                tokens, ended = drafts.pending(key).tokens, set(stops[key])
                enough = len(before[key]) >= count or ended.intersection(before[key])
                assert tokens == before[key] or not enough
                assert len(tokens) >= count or ended.intersection(tokens)
        elif call == "commit":
            key, used, more, apart = rest
            before = drafts.pending(key).tokens
            tokens = [*before[:used], *more]
            alone.commit(key, tokens)
            for piece in [tokens[:1], tokens[1:]] if apart else [tokens]:
                drafts.commit(key, piece)
            texts[key] += tokens
            kept = len(tokens) < len(before) and tokens == before[: len(tokens)]
            rounds[key] += bool(before) and not kept
        else:
            for one in (drafts, alone):
                one.remove(rest[0])
            del texts[rest[0]]
        for key, text in texts.items():
            got, wanted = drafts.pending(key), alone.pending(key)
            assert got.tokens == wanted.tokens
            assert got.round == wanted.round == rounds[key]
            assert (got.logits is None) == (not got.tokens)
            if got.logits is not None:
                ends = range(len(got.tokens))
                table = torch.stack([top.row([*text, *got.tokens[:n]]) for n in ends])
                assert torch.equal(got.logits, table)


def test_an_interrupt_at_any_line_leaves_no_draft_of_another_text() -> None:
    top, names = toy.ToyLevel(VOCAB, 11, 1.5), ("commit", "_rewind", "rewind", "cut", "propose")

    def require_drafts_of(drafts: ps.DraftChain, texts: list[list[int]]) -> None:
        tokens, logits, _ = drafts.pending("text")
        tables = [
            [top.row([*text, *tokens[:n]]) for n in range(len(tokens))] for text in texts if tokens
        ]
        if logits is not None:
            assert any(torch.equal(logits, torch.stack(table)) for table in tables)

    for line in itertools.count(1):
        drafts = drafting([toy_rows.Admitting(VOCAB, 11 + i, 1.5) for i in range(2)], [3])
        text = [3, 1]
        drafts.add("text", text, seed=5)
        drafts.propose({"text": 4})
        first = drafts.pending("text").tokens[0]
        new = [first, (drafts.pending("text").tokens[1] + 1) % VOCAB]
        left = [line]

        def trace(frame: Any, event: str, _: object, left: list[int] = left) -> Any:
            if frame.f_code.co_name not in names or "polyspec_ext" not in frame.f_code.co_filename:
                return None if event == "call" else trace
            left[0] -= event == "line"
            if event == "line" and left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            drafts.commit("text", new)
            drafts.propose({"text": 4})
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        texts = [text, [*text, *new]]
        require_drafts_of(drafts, texts)
        try:
            drafts.propose({"text": 4})
        except RuntimeError:  # the interrupt has ended the batch
            continue
        assert len(drafts.pending("text").tokens) >= 4
        require_drafts_of(drafts, texts)
        if left[0] > 0:
            assert line > 40
            return


@pytest.mark.parametrize("kind", ["anew", "beside"])
@pytest.mark.parametrize("at", ["first", "second"])
def test_a_text_that_fails_leaves_the_others_alone(kind: str, at: str) -> None:
    def make() -> ps.DraftChain:
        levels: list[Any] = [KINDS[kind](VOCAB, 11 + i, 1.5) for i in range(2)]
        table = levels[0 if at == "first" else 1]
        whole = table.row

        def row(prefix: Sequence[int]) -> torch.Tensor:
            bad = prefix[0] == 4 and len(prefix) > 4
            return whole(prefix) * torch.nan if bad else whole(prefix)

        table.row = row
        return drafting(levels, [2])

    drafts, alone = make(), make()
    for one in (drafts, alone):
        one.add("sound", [1, 2], seed=1)
        one.add("idle", [2, 2], seed=2)
        one.propose({"sound": 2, "idle": 3})
    drafts.add("failing", [4, 0], seed=3)
    for wanted in (2, 12):
        drafts.propose({"failing": wanted, "sound": wanted})
        alone.propose({"sound": wanted})
    error = drafts.error("failing")
    assert isinstance(error, ps.RequestError)
    assert drafts.pending("failing")[:2] == ([], None)
    for key in ("sound", "idle"):
        assert drafts.error(key) is None
        assert drafts.pending(key).tokens == alone.pending(key).tokens
    drafts.commit("failing", [1])
    drafts.propose({"failing": 2, "idle": 9})
    alone.propose({"idle": 9})
    assert drafts.pending("failing").tokens == []
    assert drafts.pending("idle").tokens == alone.pending("idle").tokens
    drafts.remove("failing")
    with pytest.raises(KeyError, match="failing"):
        drafts.error("failing")


def test_a_text_that_cannot_be_read_fails_alone() -> None:
    class Unreadable(toy_rows.Admitting):
        def extend(self, sequence: list[int], tokens: torch.Tensor, layers: Any) -> None:
            if tokens[0, 0] == 4:
                raise MemoryError("no room")
            super().extend(sequence, tokens, layers)

    drafts = drafting([Unreadable(VOCAB, 11)])
    drafts.add("failing", [4, 4])
    drafts.add("sound", [1, 2])
    drafts.propose({"failing": 1, "sound": 1})
    assert isinstance(drafts.error("failing"), MemoryError)
    assert len(drafts.pending("sound").tokens) == 1


def test_drafts_go_on_and_end_where_there_is_no_room() -> None:
    levels: list[Any] = [toy_rows.Admitting(VOCAB, 11 + i) for i in range(2)]
    chain = ps.Chain(levels, [3], check_vocabulary=False)
    drafts = ps.DraftChain(chain, max_tokens=1100)
    drafts.add("text", [0])
    length = 1
    while length < 1000:  # all that is drafted is emitted, so that no cache is ever cut
        drafts.propose({"text": 7})
        tokens = drafts.pending("text").tokens
        assert len(tokens) >= 7
        drafts.commit("text", tokens)
        length += len(tokens)
    drafts.propose({"text": 200})
    assert length + len(drafts.pending("text").tokens) == 1100
    drafts.commit("text", [0] * 200)
    drafts.propose({"text": 1})
    assert drafts.pending("text").tokens == []
    drafts.add("long", [0] * 1100)
    drafts.propose({"long": 1})
    assert drafts.pending("long").tokens == []


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("size", [VOCAB - 2, VOCAB + 2])
def test_vocabularies_of_different_sizes(size: int) -> None:
    levels: list[Any] = [toy_rows.Rows(VOCAB, 11 + i) for i in range(2)]
    levels[0].tokenizer = Tokenizer
    chain = ps.Chain(levels, [2], check_vocabulary=False)
    drafts = ps.DraftChain(chain, vocab_size=size, tokenizer=Tokenizer())
    drafts.add("text", [1, size - 1])
    text = [1, size - 1]
    for _ in range(20):
        drafts.propose({"text": 3})
        tokens, logits, _ = drafts.pending("text")
        assert max(tokens) < min(size, VOCAB)
        known = [token if token < VOCAB else 0 for token in text]
        ends = range(len(tokens))
        table = torch.stack([levels[0].row([*known, *tokens[:n]]) for n in ends])
        assert torch.equal(logits, table[:, :size])
        text += [tokens[0], size - 1]
        drafts.commit("text", [tokens[0], size - 1])


# ---- models --------------------------------------------------------------------------------------


def test_models_of_transformers() -> None:
    prompt, length = [5, 17, 80, 3, 3, 41], 24
    target = ps.Chain([tiny.path("target")], pack=True)
    wanted = list(target.stream(prompt, length, eos_token_id=[]))
    levels, parts = [tiny.path("middle"), tiny.path("drafter")], ["text", "beside"]
    drafts = drafting(levels, [3], pack=True)
    text = list(prompt)
    drafts.add("text", prompt, temperature=0.0)
    drafts.add("beside", [7, 8], seed=1)
    accepted = 0
    while len(text) < len(prompt) + length:
        drafts.propose(dict.fromkeys(parts, 4))
        tokens = drafts.pending("text").tokens
        right = wanted[len(text) - len(prompt) :]
        pairs = zip(tokens, right, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        accepted += same
        drafts.commit("text", right[: same + 1])
        drafts.commit("beside", [9])
        text += right[: same + 1]
    assert accepted > 0


# ---- errors --------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    one = toy.ToyLevel(VOCAB, 11)
    chain = ps.Chain([one], check_vocabulary=False)
    with pytest.raises(TypeError, match="chain: expected"):
        ps.DraftChain([one])
    with pytest.raises(ValueError, match="vocabulary of toy 11: expected at most the 4 ids"):
        ps.DraftChain(chain, vocab_size=4)
    heads = ps.Chain([tiny.path("target"), tiny.path("eagle3")], [2], pack=False)
    with pytest.raises(ValueError, match="expected a drafter that reads tokens alone"):
        ps.DraftChain(heads)
    drafts = ps.DraftChain(chain)
    drafts.add("text", [0])
    for key, error, call in [
        ("key: expected", KeyError, lambda: drafts.propose({"other": 1})),
        ("key: expected one without", ValueError, lambda: drafts.add("text", [0])),
        ("expected one prompt, given 2", ValueError, lambda: drafts.add("second", [0])),
        ("wanted: expected", ValueError, lambda: drafts.propose({"text": -1})),
        (
            f"tokens: expected token ids in .0, {VOCAB}",
            ValueError,
            lambda: drafts.commit("text", [VOCAB]),
        ),
        ("tokens: expected", TypeError, lambda: drafts.commit("text", 3)),
    ]:
        with pytest.raises(error, match=key):
            call()
    drafts.remove("text")
    with pytest.raises(ValueError, match="tokens: expected at least 1"):
        drafts.add("text", [])
    drafts.add("text", [0])
    chain.generate([0], 1)
    with pytest.raises(RuntimeError, match="begun another request"):
        drafts.propose({"text": 1})


def test_drafts_do_not_repeat_the_draws_of_a_target_with_their_seed() -> None:
    """Else a target equal to the first level would accept all of the chain's draws."""
    levels = toy.make_levels(1, 64)
    drafts = drafting(levels)
    drafts.add("text", PROMPT, seed=5)
    drafts.propose({"text": 12})
    alone = ps.Chain(levels).generate(PROMPT, 12, 1.0, seed=5, eos_token_id=[])
    assert drafts.pending("text").tokens[:12] != alone.new_tokens[0]
