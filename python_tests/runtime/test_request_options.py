"""Options of a request: rules that change logits, stop strings, several answers, alternatives."""

import json
import math
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
import toy_rows
import toy_trees
from hypothesis import given
from hypothesis import strategies as st
from small_models import llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
)
from transformers.generation import logits_process as lp

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.rules import LogitsRules

V = 11
EOS = [1, 4]


def processed(rules, prompt, text, row, eos) -> torch.Tensor:
    """Return logits ``[1, V]`` after a text as transformers changes them for `rules`."""
    found = LogitsProcessorList()
    if bias := rules.get("logit_bias"):
        found.append(lp.SequenceBiasLogitsProcessor({(token,): b for token, b in bias.items()}))
    if penalty := rules.get("repetition_penalty"):
        found.append(lp.RepetitionPenaltyLogitsProcessor(penalty))
    found.append(penalised(text[prompt:], rules))
    if words := rules.get("bad_words"):
        found.append(lp.NoBadWordsLogitsProcessor(words, eos))
    if least := rules.get("min_new_tokens"):
        found.append(lp.MinNewTokensLengthLogitsProcessor(prompt, least, eos))
    return found(torch.tensor([text]), row.clone())


def penalised(text: Sequence[int], rules: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Return the penalties of OpenAI's interface for the tokens of `text`."""
    often, once = (rules.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence"))

    def changed(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in set(text):
            scores[:, token] -= often * text.count(token) + once
        return scores

    return changed


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
def test_rules_are_what_each_position_asks_for(rules, penalties, prompt, text, width, seed) -> None:
    prefix = prompt + text
    logits = torch.randn(len(text) + 1, V, generator=torch.Generator().manual_seed(seed)) * 4
    ours = LogitsRules(**rules, **penalties).for_request(len(prompt), frozenset(EOS), V)
    whole = []
    for i in range(len(text) + 1):
        seen, row = prefix[: len(prompt) + i], logits[i : i + 1]
        whole.append(processed(rules | penalties, len(prompt), seen, row, EOS))
    before = logits.clone()
    got = ours.apply(logits, torch.tensor(prefix))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.cat(whole), rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)
    for count in range(1, len(text) + 2):  # for any number of rows
        assert torch.equal(ours.apply(logits[-count:], torch.tensor(prefix)), got[-count:])
    narrow = logits[:, :width]
    assert torch.equal(ours.apply(narrow, torch.tensor(prefix)), got[:, :width])


@pytest.mark.parametrize("rules", [{"logit_bias": {V: 1}}, {"bad_words": [[1], [2, V]]}])
def test_ids_of_rules_are_the_targets(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(rules))}: .*\[0, {V}\), given {V}"):
        LogitsRules(**rules).for_request(1, EOS, V)


# ---- generation_config.json ----------------------------------------------------------------------


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., str]:
    def saved(**values: Any) -> str:
        shutil.copytree(tiny.path("drafter"), tmp_path / "model", dirs_exist_ok=True)
        file = tmp_path / "model" / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        return str(tmp_path / "model")

    return saved


def test_texts_and_chats_follow_the_models_own_file(configured: Callable[..., str]) -> None:
    """And `generate` of ids does not, and says so once."""
    path = configured(repetition_penalty=1.3)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    chain = ps.Chain([path, "prompt-lookup"], dtype="float32")
    ids = torch.tensor([tokenizer("2 + 2 =").input_ids])
    mask = torch.ones_like(ids)
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    own = wanted[0, ids.shape[1] :].tolist()
    plain = ps.LogitsRules(repetition_penalty=1.0)
    assert chain.generate_text("2 + 2 =", 12, raw=True).new_tokens == [own]
    other = chain.generate_text("2 + 2 =", 12, raw=True, rules=plain).new_tokens
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.3, which generate_text .* follow"):
        assert chain.generate(ids, 12).new_tokens == other != [own]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chain.generate(ids, 12).new_tokens == other
        assert chain.generate_text("2 + 2 =", 12, raw=True).new_tokens == [own]
        message = [{"role": "user", "content": "2 + 2 ="}]
        answer = chain.chat(message, 12)
        list(answer)
        assert answer.tokens == chain.generate_text("2 + 2 =", 12).new_tokens[0]
        both = [ps.LogitsRules(presence_penalty=1.0), plain]
        texts = chain.generate_text(["2 + 2 ="] * 2, 12, raw=True, rules=both).new_tokens
        assert texts[1] == other[0] != texts[0]


@pytest.mark.parametrize(
    ("file", "given", "wanted"),
    [
        ({}, {}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0.7, "top_k": 20}, {}, (0.0, 20, 1.0, 0.0)),  # no do_sample
        ({"do_sample": True}, {}, (1.0, 0, 1.0, 0.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
            {},
            (0.7, 20, 0.8, 0.1),
        ),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
            {"temperature": 0.0, "top_p": 1.0, "top_k": [1, 2]},
            (0.0, [1, 2], 1.0, 0.0),
        ),
    ],
)
def test_what_is_given_goes_before_the_file(configured, file, given, wanted) -> None:
    chain = ps.Chain([configured(**file)])
    options = chain.text_options(**given)
    assert tuple(options[name] for name in ("temperature", "top_k", "top_p", "min_p")) == wanted
    assert options.get("rules") is None
    usual = chain.text_options(default_temperature=1.0)["temperature"]
    assert usual == (file["temperature"] if "do_sample" in file and len(file) > 1 else 1.0)


@pytest.mark.parametrize("pad", [0, 2, None])
def test_padding_without_a_mask_is_what_generate_takes_for_it(pad: int | None) -> None:
    """The padding id at the ends of rows, unless it also ends texts."""
    model = llama(0, 2, 96, eos_token_id=2, pad_token_id=pad, initializer_range=0.3)
    filled = 0 if pad is None else pad
    ids = torch.tensor([[filled, filled, 5, 6, 7], [5, 6, filled, 8, 9]])
    mask = (ids != filled).long() if pad == 0 else torch.ones_like(ids)
    mask[1] = 1
    chain = ps.Chain([model])
    wanted = chain.generate(ids, 6, attention_mask=mask)
    got = chain.generate(ids, 6)
    assert got.sequences.equal(wanted.sequences)
    [row] = model.generate(ids[:1], max_new_tokens=6, do_sample=False)[:, 5:]
    assert got.new_tokens[0] == row.tolist()[: len(got.new_tokens[0])]
    assert list(chain.stream(ids[0], 6)) == got.new_tokens[0]
    assert chain.generate([[filled] * 3 + [5], [5]], 1).sequences.shape == (2, 5)
    shown = [chain.generate(rows, 4).new_tokens for rows in ([[filled] * 3], [[filled] * 3, [5]])]
    assert shown[0][0] == shown[1][0]  # nothing but that id is no padding


def test_two_bos_tokens_are_said_once() -> None:
    chain = ps.Chain([llama(0, 1, 96, bos_token_id=1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.generate([[1, 5, 1, 1]], 1)
    with pytest.warns(UserWarning, match=r"begins with two BOS tokens .bos_token_id=1.*add_spec"):
        chain.generate([[5], [1, 1, 5]], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.Server(chain, 1).add([1, 1, 5], 1)


def test_what_of_the_file_is_not_followed_is_said(configured: Callable[..., str]) -> None:
    chain = ps.Chain([configured(no_repeat_ngram_size=2, num_beams=1)])
    with pytest.warns(UserWarning, match="not follow no_repeat_ngram_size=2 of its generation_co"):
        chain.generate_text("2 + 2 =", 2)


def test_rules_say_whether_they_change_anything() -> None:
    assert not LogitsRules().changes
    assert not LogitsRules(repetition_penalty=1.0).changes
    assert LogitsRules(bad_words=[[1]]).changes
    assert len({LogitsRules(logit_bias={1: 2}), LogitsRules(logit_bias={1: 2.0})}) == 1


# ---- through chains ------------------------------------------------------------------------------


def ruled(level: Any, rules: dict[str, Any], prompt: int, eos: list[int]) -> Any:
    """Return a replacement of a toy level with rows changed by rules, one by one."""
    return SimpleNamespace(
        row=lambda text: processed(rules, prompt, list(text), level.row(text)[None], eos)[0]
    )


LAWS: list[dict[str, Any]] = [
    {"repetition_penalty": 2.0},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {0: -1.0, 2: 1.5}},
    {"bad_words": [[1, 2], [0, 1, 1], [0, 0]]},
    {"bad_words": [[1, 2]], "min_new_tokens": 2},
    {
        "repetition_penalty": 0.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {1: 0.5},
        "bad_words": [[0, 0]],
        "min_new_tokens": 1,
    },
    {"bad_words": [[0, 0], [0, 1], [0, 2]]},  # a dead end after 0
    {"bad_words": [[1, 0], [1, 1]], "min_new_tokens": 2},  # after 1, unless the text may end
]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("rules", LAWS, ids=str)
@pytest.mark.parametrize(
    ("shape", "window", "length"),
    [((3, 3), [2], 3), ((3, 3, 3), [2, 1], 3), ((3, 2), [2], 3), ("tree", [2], 3)],
    ids=str,
)
def test_the_law_is_the_targets_under_its_rules(shape, window, length, rules, rule) -> None:
    levels: list[Any]
    if shape == "tree":
        enumerator: toy.Enumerator = toy_trees.TreeEnumerator()
        levels = [toy_trees.TreeLevel(3, 11), toy_trees.TreeDrafter(toy.ToyLevel(3, 31), [2, 1])]
        target = levels[0].table
    else:
        enumerator = toy.Enumerator()
        levels = [toy.ToyLevel(vocab, 11 + i) for i, vocab in enumerate(shape)]
        target = levels[0]
    chain = ps.Chain(levels, window, operators=enumerator.operators, rule=rule)
    options = {"temperature": 0.75, "top_k": 2} if len(rules) == 2 else {"temperature": 1.0}

    errors: list[tuple[int, set[str]]] = []

    def generate() -> list[int]:
        given = ps.LogitsRules(**rules)
        try:
            out = chain.generate([0, 1], length, eos_token_id=[2], rules=given, **options)
        except ps.RequestError as error:
            errors.append((error.level, set(error.rules)))
            return [toy.DEAD] * (error.position - 2)
        return out.new_tokens[0]

    got = toy.chain_distribution(enumerator, generate)
    exact = toy.text_distribution(ruled(target, rules, 2, [2]), [0, 1], length, [2], **options)
    plain = toy.text_distribution(target, [0, 1], length, [2], **options)
    assert toy.total_variation(exact, plain) > 0.01
    assert all(error == (1, set(rules)) for error in errors)  # of the target alone
    for text in [text for text in exact if text[-1] == toy.DEAD]:
        dead = (toy.DEAD,) * (len(text) - 1)  # by length: the error has no text
        exact[dead] = exact.get(dead, 0.0) + exact.pop(text)
    assert toy.total_variation(got, exact) < 1e-7


def test_rules_go_before_the_processors_of_a_batch() -> None:
    class Twice:
        def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
            return logits * 2 + row

    seen: list[torch.Tensor] = []
    level = toy_rows.Rows(5, 1)
    rules = [ps.LogitsRules(), ps.LogitsRules(logit_bias={3: 4.0})]
    batch = ps.Chain([level]).batch(
        [[1], [1]],
        1,
        rules=rules,
        processors=Twice(),
        observe=lambda row, logits: seen.append(logits[0].clone()),
    )
    batch.complete()
    wanted = level.row([1]) * 2
    assert torch.equal(seen[0], wanted)
    wanted[3] += 8
    assert torch.equal(seen[1], wanted + 1)


# ---- stop strings --------------------------------------------------------------------------------

SMILE = "\U0001f600"
PIECES = [b"a", b"b", b"ab", b"ba ", "é".encode(), b"\xc3", b"\xa9", b" ", SMILE.encode()[:2],
          SMILE.encode()[2:], b"c", b"bc", b"ca", b"\n", b"abc", b"cab", b"x", b"ax", b"b x",
          b"c\xc3"]  # fmt: skip


class Spelling:
    """A tokenizer with bytes as tokens.

    Args:
        runs: whether tokens of a single byte are byte tokens; the next token settles their text.
    """

    clean_up_tokenization_spaces = False

    def __init__(self, runs: bool = False) -> None:
        self._runs = runs

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return b"".join(PIECES[token] for token in tokens).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        piece = PIECES[token]
        return f"<0x{piece[0]:02X}>" if self._runs and len(piece) == 1 else str(piece)

    def get_vocab(self) -> dict[str, int]:
        return {str(piece): token for token, piece in enumerate(PIECES)}


def spelled(count: int, runs: bool = False) -> list[Any]:
    levels: list[Any] = [toy_rows.Rows(len(PIECES), 21 + i, scale=1.5) for i in range(count)]
    for level in levels:
        level.tokenizer = lambda: Spelling(runs)
    return levels


def stopped(tokens: list[int], stops: list[str]) -> tuple[int, str, bool]:
    """Return the tokens up to the end of the first stop string, and the text before it."""
    for count in range(1, len(tokens) + 1):
        text = Spelling().decode(tokens[:count])
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if ends:
            return count, text[: min(ends)[1]], True
    return len(tokens), Spelling().decode(tokens), False


STOPS = ["ab", "é", "bc", "a b", "abca", " x", SMILE, "xa", "ba c", "c\n"]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("levels", "runs"), [(1, False), (1, True), (2, False), (3, True)])
def test_stop_strings_cut_the_text_that_would_be(levels, runs, temperature, rule) -> None:
    """Rows of a batch end before their stop strings, independently of other rows; streams too."""
    chain = ps.Chain(spelled(levels, runs), [5, 2][: levels - 1], rule=rule)
    prompts = [[1], [4, 2, 7], [8, 9], [0, 1, 2]]
    options: dict[str, Any] = {"temperature": temperature, "eos_token_id": [13]}
    counted = Counter[str]()
    for seed in range(12):
        stops = [*STOPS[seed % 5 :: 5], "never"]
        plain = chain.generate(prompts, [30, 30, 9, 30], **options, seed=seed)
        out = chain.generate(prompts, [30, 30, 9, 30], **options, seed=seed, stop=stops)
        assert out.seeds == plain.seeds
        for row, tokens in enumerate(plain.new_tokens):
            count, text, met = stopped(tokens, stops)
            assert out.new_tokens[row] == tokens[:count]
            assert out.text[row] == text
            assert out.logprobs[row] == plain.logprobs[row][:count]
            assert out.requests[row].num_new_tokens == count
            reason = "stop" if met or 13 in tokens else "length"
            assert out.finish_reasons[row] == reason
            counted[reason] += 1
            begin = len(prompts[row])
            assert out.sequences[row, begin : begin + count].tolist() == tokens[:count]
        assert out.stats.num_new_tokens == sum(map(len, out.new_tokens))
        stream = chain.stream(prompts[0], 30, **options, seed=seed, stop=stops)
        tokens = list(stream)
        assert tokens[: len(out.new_tokens[0])] == out.new_tokens[0]
        assert runs or tokens == out.new_tokens[0]
        assert stream.finish_reason == out.finish_reasons[0]
        assert stream.stats.num_new_tokens == len(out.new_tokens[0])
    assert counted["stop"] > 10 or not temperature


def test_stop_strings_need_a_tokenizer_and_text() -> None:
    with pytest.raises(ValueError, match=r"^stop: expected a target with a tokenizer"):
        ps.Chain(toy.make_levels(1)).generate([0], stop="x")
    for wrong, kind in (("", ValueError), (3, TypeError), ([3], TypeError)):
        with pytest.raises(kind, match=r"^stop: expected .*"):
            ps.Chain(spelled(1)).generate([0], stop=wrong)


def test_texts_and_answers_of_a_real_tokenizer_stop() -> None:
    chain = ps.Chain([tiny.path("target"), "prompt-lookup"])
    question = "How many legs have 2 cows?"
    [whole] = chain.generate_text(question, 24).text
    stop = whole[7:12]
    front = whole[: whole.index(stop)]
    out = chain.generate_text(question, 24, stop=[stop, "never"])
    assert out.text == [front]
    assert out.finish_reasons == ["stop"]
    answer = chain.chat([{"role": "user", "content": question}], 24, stop=stop)
    assert "".join(answer) == answer.text == answer.message["content"] == front
    assert answer.stopped == stop
    assert answer.tokens == out.new_tokens[0]


# ---- several texts, and alternatives -------------------------------------------------------------


def test_n_texts_of_each_prompt_are_rows_with_their_seeds() -> None:
    chain = ps.Chain(toy_rows.make(3), [3, 2])
    prompts, n = [[1], [4, 2, 7]], 3
    options: dict[str, Any] = {
        "max_new_tokens": [5, 8],
        "temperature": [1.0, 1.4],
        "eos_token_id": [[2], [3, 4]],
        "rules": [ps.LogitsRules(), ps.LogitsRules(repetition_penalty=2.0)],
    }
    out = chain.generate(prompts, seed=5, n=n, **options)
    assert out.seeds == ps.row_seeds(5, 2 * n)
    assert chain.generate(prompts, seed=out.seeds, n=n, **options).new_tokens == out.new_tokens
    assert len({tuple(text) for text in out.new_tokens}) == 2 * n
    for row, text in enumerate(out.new_tokens):
        alone = {name: values[row // n] for name, values in options.items()}
        assert list(chain.stream(prompts[row // n], seed=out.seeds[row], **alone)) == text
    assert chain.generate(prompts, seed=5, **options).seeds == ps.row_seeds(5, 2)
    with pytest.raises(ValueError, match=r"^n: expected an integer in \[1, .*given 0"):
        chain.generate(prompts, n=0)
    with pytest.raises(ValueError, match=r"^seed: .* each of 6 prompts, given 2"):
        chain.generate(prompts, n=n, seed=[1, 2])


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6, "min_p": 0.1},
    ],
    ids=str,
)
def test_alternatives_are_the_likeliest_ids(sampling: dict[str, float], levels: int) -> None:
    made = toy_rows.make(levels)
    chain = ps.Chain(made, [3, 2][: levels - 1])
    prompts = [[1, 2], [3]]
    rules = {"repetition_penalty": 1.5, "presence_penalty": 0.5}
    out = chain.generate(prompts, 9, seed=3, logprobs=4, rules=ps.LogitsRules(**rules), **sampling)
    shown = {**sampling, "temperature": sampling["temperature"] or 1.0}
    for prompt, tokens, logprobs, alternatives in zip(
        prompts, out.new_tokens, out.logprobs, out.alternatives, strict=True
    ):
        level = ruled(made[0], rules, len(prompt), [])
        assert len(tokens) == len(alternatives) == len(logprobs) == 9
        for i, (token, best) in enumerate(zip(tokens, alternatives, strict=True)):
            p = toy.distribution(level.row(prompt + tokens[:i]), **shown)
            wanted = sorted((-math.log(q), id) for id, q in enumerate(p) if q > 0)[:4]
            assert [id for id, _ in best] == [id for _, id in wanted]
            assert [-value for _, value in best] == pytest.approx(
                [value for value, _ in wanted], abs=1e-5
            )
            assert dict(best).get(token, logprobs[i]) == pytest.approx(logprobs[i], abs=1e-5)
            if not sampling["temperature"]:
                assert (token, logprobs[i]) == best[0]
    out = chain.generate(prompts, 2, [0, 1], seed=3)
    assert out.alternatives == []
    assert list(map(len, out.logprobs)) == [0, 2]


def test_alternatives_end_with_the_text() -> None:
    chain = ps.Chain(spelled(2), [4])
    out = chain.generate([[1], [4]], 30, 1.0, seed=1, stop=["b", "c"], logprobs=2)
    assert [len(row) for row in out.alternatives] == [len(row) for row in out.new_tokens]
    assert max(map(len, out.new_tokens)) < 30


def test_other_things_than_rules_are_refused() -> None:
    chain = ps.Chain(toy_rows.make(1))
    with pytest.raises(TypeError, match=r"^rules: expected a LogitsRules or None, given dict"):
        chain.generate([[0], [1]], 1, rules={"min_new_tokens": 1})
    with pytest.raises(ValueError, match=r"^rules: expected one value or one for each of 2"):
        chain.generate([[0], [1]], 1, rules=[ps.LogitsRules()])
