"""Options of a request: rules that change logits, stop strings, several answers, alternatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from polyspec_ext.rules import LogitsRules
from polyspec_ext.sampling import RequestProcessors

V = 11
EOS = [1, 4]


def processors_of(rules: dict[str, Any], prompt: int) -> LogitsProcessorList:
    """Return what transformers has for `rules`, in our order."""
    found = LogitsProcessorList()
    if bias := rules.get("logit_bias"):
        found.append(lp.SequenceBiasLogitsProcessor({(token,): b for token, b in bias.items()}))
    if penalty := rules.get("repetition_penalty"):
        found.append(lp.RepetitionPenaltyLogitsProcessor(penalty))
    if words := rules.get("bad_words"):
        found.append(lp.NoBadWordsLogitsProcessor(words, EOS))
    if least := rules.get("min_new_tokens"):
        found.append(lp.MinNewTokensLengthLogitsProcessor(prompt, least, EOS))
    return found


def penalised(scores: list[float], text: list[int], rules: dict[str, Any]) -> list[float]:
    """Return logits behind the penalties of OpenAI's interface for the tokens of `text`."""
    often, once = (rules.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence"))
    return [
        score - often * text.count(token) - once * (token in text)
        for token, score in enumerate(scores)
    ]


ids = st.integers(0, V - 1)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 4.0]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -2.5, 0.5, 100.0]), min_size=1),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=5),
        "min_new_tokens": st.integers(1, 6),
    },
)


@given(
    RULES,
    st.fixed_dictionaries({"presence_penalty": st.just(0.75), "frequency_penalty": st.just(-0.5)})
    | st.just({}),
    st.lists(ids, min_size=1, max_size=6),
    st.lists(st.integers(0, 4), max_size=8),
    st.integers(1, V),
    st.integers(0, 2**20),
)
def test_rules_are_what_each_position_asks_for(
    rules: dict[str, Any],
    penalties: dict[str, Any],
    prompt: list[int],
    text: list[int],
    width: int,
    seed: int,
) -> None:
    """Several rows at once against transformers' processors, position by position, also of a level
    with fewer ids."""
    prefix = prompt + text
    logits = torch.randn(len(text) + 1, V, generator=torch.Generator().manual_seed(seed)) * 4
    ours = LogitsRules(**rules, **penalties).for_request(len(prompt), frozenset(EOS), V)
    whole = []
    for i in range(len(text) + 1):
        seen = torch.tensor([prefix[: len(prompt) + i]])
        bias = {name: rules[name] for name in ("logit_bias", "repetition_penalty") if name in rules}
        scores = processors_of(bias, 0)(seen, logits[i : i + 1].clone())
        scores = torch.tensor([penalised(scores[0].tolist(), text[:i], penalties)])
        rest = {name: rule for name, rule in rules.items() if name not in bias}
        whole.append(processors_of(rest, len(prompt))(seen, scores))
    before = logits.clone()
    got = ours.apply(logits, torch.tensor(prefix))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.cat(whole), rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)
    for count in range(1, len(text) + 2):  # whatever the number of rows
        assert torch.equal(ours.apply(logits[-count:], torch.tensor(prefix)), got[-count:])
    narrow = logits[:, :width]
    kept = torch.where(got[:, :width].isneginf().all(-1, keepdim=True), narrow, got[:, :width])
    assert torch.equal(ours.apply(narrow, torch.tensor(prefix)), kept if width < V else got)


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ({"repetition_penalty": 0}, ValueError, r"number in \[0.01, 100\], given 0"),
        ({"repetition_penalty": "2"}, TypeError, "expected a number, given '2'"),
        ({"presence_penalty": 2.5}, ValueError, r"number in \[-2, 2\], given 2.5"),
        ({"frequency_penalty": True}, TypeError, "expected a number, given True"),
        ({"frequency_penalty": float("nan")}, ValueError, "given nan"),
        ({"logit_bias": [(1, 2)]}, TypeError, "mapping from ids .* given list"),
        ({"logit_bias": {"1": 2}}, TypeError, "expected an integer, given '1'"),
        ({"logit_bias": {1: 101}}, ValueError, r"number in \[-100, 100\], given 101"),
        ({"bad_words": 3}, TypeError, "sequences of token ids, given 3"),
        ({"bad_words": [3]}, TypeError, "sequences of token ids, given 3 among them"),
        ({"bad_words": [[]]}, ValueError, "at least 1 in each, given an empty"),
        ({"bad_words": [["a"]]}, TypeError, "expected an integer, given 'a'"),
        ({"min_new_tokens": -1}, ValueError, r"in \[0, .*\], given -1"),
    ],
)
def test_rules_are_checked(rules: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{next(iter(rules))}: .*{message}"):
        LogitsRules(**rules)


@pytest.mark.parametrize("rules", [{"logit_bias": {V: 1}}, {"bad_words": [[1], [2, V]]}])
def test_ids_of_rules_are_the_targets(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(rules))}: .*\[0, {V}\), given {V}"):
        LogitsRules(**rules).for_request(1, EOS, V)


def test_rules_say_whether_they_change_anything() -> None:
    assert not LogitsRules().changes
    assert LogitsRules(bad_words=[[1]]).changes
    assert len({LogitsRules(logit_bias={1: 2}), LogitsRules(logit_bias={1: 2.0})}) == 1


def test_processors_of_requests_come_and_go() -> None:
    processors, logits, prefix = RequestProcessors(), torch.zeros(1, V), torch.tensor([3])
    twice = LogitsRules(logit_bias={2: 1.0}).for_request(1, (), V)
    penalty = LogitsRules(logit_bias={2: 1.0}, repetition_penalty=2.0).for_request(0, (), V)
    processors.add(7, [twice, penalty])
    assert processors.applies(7)
    assert not processors.applies(8)
    assert processors.apply(logits, prefix, 8) is logits
    assert processors.apply(logits, prefix, 7)[0, 2] == 2.0
    processors.remove(7)
    processors.remove(7)
    assert not processors.applies(7)
    assert processors.apply(logits, prefix, 7) is logits
