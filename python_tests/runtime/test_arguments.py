"""Arguments are checked where they are passed, by name; every documented container will do."""

import collections
import copy
import dataclasses
import fractions
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import toy
import toy_rows
import transformers as hf
from small_models import V, make

import polyspec_ext as ps
from polyspec_ext import _C
from polyspec_ext.levels import load
from polyspec_ext.levels.encoder_decoder import EncoderDecoderLevel
from polyspec_ext.policies import RoundReport
from polyspec_ext.runtime.graphs import Graphs
from polyspec_ext.runtime.plan import Operators

VOCAB = toy_rows.VOCAB


def plain() -> ps.Chain:
    """Return a chain that takes batches, without a drafter."""
    return ps.Chain(toy_rows.make(1))


class Windows:
    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def next(self, report: RoundReport) -> Any:
        return self.windows


def nothing() -> Any:
    yield 1


NAN, INF, HUGE = float("nan"), float("inf"), 10**400
# Neither a number nor a container, or not to be read here.
NO_VALUE: list[Any] = [
    "1", b"1", {}, {1}, 1j, object(), len, int, iter([1]), torch.zeros(1, device="meta"),
    torch.zeros(2, 2), torch.float32, np.array(["1"]), torch.nn.Linear(2, 2),
]  # fmt: skip
# No number, and no container of numbers.
NO_VALUES: list[Any] = [
    *(one for one in NO_VALUE if not isinstance(one, set)), [None], ["1"], [True], {0: 1}, {"1"},
    nothing(), memoryview(b"1"), np.array(True), np.array([None]), torch.tensor(True),
    torch.tensor([True]), torch.zeros(1).to_sparse(), torch.zeros(1, 1, 1),
    torch.nested.nested_tensor([torch.zeros(1)]),
]  # fmt: skip
FRACTIONS: list[Any] = [
    0.5, [0.5], (1.0,), np.array([1.0]), np.float32(1), torch.tensor(1.0),
    torch.tensor([1.0]), fractions.Fraction(1), float("nan"), float("inf"),
]  # fmt: skip
# Two values for one prompt, and none.
COUNTS: list[Any] = [[1, 1], (1, 1), np.ones(2, int), torch.ones(2, dtype=torch.int64), []]
BOOLS: list[Any] = [True, False, np.True_]
BELOW: list[Any] = [-1, [-1], np.int8(-1), torch.tensor(-1), torch.tensor([-1])]
INTEGER = [None, *NO_VALUES, *FRACTIONS, *COUNTS, *BOOLS, *BELOW, 2**64, [2**64], 10**400]
ABOVE_ONE: list[Any] = [1.5, 2, np.float64(1.1), torch.tensor([1.1]), float("nan"), 10**400]
PROBABILITY = [None, *NO_VALUES, *COUNTS, *BOOLS, *BELOW, *ABOVE_ONE]
IDS: list[Any] = [
    *NO_VALUES, *FRACTIONS, *BOOLS, *BELOW, VOCAB, [0, VOCAB], np.array([VOCAB]), [[0], 1],
    [0, [1]], [[[0]]], [[0], VOCAB], np.zeros((1, 1, 1), int), torch.tensor([VOCAB]),
]  # fmt: skip

BAD: dict[str, list[Any]] = {
    "input_ids": [None, *IDS, 1, np.int64(1), torch.tensor(1), [], (), [[]], [[0], []], {1},
                  np.zeros(0, int), np.zeros((0, 2), int), np.zeros((2, 0), int),
                  torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64),
                  hf.BatchEncoding({"ids": [1]}), {"input_ids": None}, {"input_ids": "x"}, ["a"],
                  hf.BatchEncoding({"input_ids": [[1], [VOCAB]]})],
    "max_new_tokens": INTEGER,
    "temperature": [None, *NO_VALUES, *COUNTS, *BOOLS, *BELOW, "1", float("nan"), float("inf"),
                    1e39, 10**400, [float("nan")], torch.tensor([float("inf")])],
    "top_k": [2.9, *INTEGER],
    "top_p": PROBABILITY,
    "min_p": PROBABILITY,
    "seed": [1.5, *(one for one in INTEGER if one is not None), [None]],
    "eos_token_id": [*IDS, [[1], [2]], [[1], 2], [{1}, 2], np.zeros((2, 2), int), [[VOCAB]]],
    "attention_mask": ["1", b"1", 1, {}, object(), nothing(), [], [1, 1], [[1, 1]], [[1], [1]], [2],
                       [0.5], ["1"], [None], [[[1]]], np.ones((2, 1)), torch.ones(1, 2),
                       [0], torch.zeros(1, device="meta"), torch.tensor([2]), True],
    "pad_token_id": [*NO_VALUES, *FRACTIONS, *BOOLS, [1], (1,), 2**63, -(2**63) - 1, {1}],
}  # fmt: skip


FLAGS: list[Any] = [1, 0, "yes", "False", np.True_, [True], torch.tensor(True), object()]
SIZES: list[Any] = [1, 4, np.int64(4), torch.tensor(4), *NO_VALUES, *FRACTIONS, *BOOLS, *COUNTS[:4],
                    [True], [2.5], [-1], [None], [[2]], [2**31], [2**64], {2}]  # fmt: skip
BAD_CHAINS: dict[str, list[Any]] = {
    "levels": [None, "some/model", Path("model"), 3.0, 1, {}, {"a": 1}, {1}, nothing(), object(),
               toy.ToyLevel(VOCAB, 1), ps.PromptLookup(), toy.ToyLevel, [], (), [None, None],
               [1, 0], [3.0, 1], [ps.PromptLookup(), toy.ToyLevel(VOCAB, 1)], ["prompt-lookup"] * 2,
               [toy.ToyLevel(VOCAB, 1), ps.PromptLookup], [toy.ToyLevel, toy.ToyLevel(VOCAB, 1)],
               [torch.nn.Linear(2, 2)] * 2, [[], []], [True, False], ["", ""], torch.ones(2),
               ["a b", "c"], ["/not/there"] * 2, [Path("not-there")] * 2, ["./x"] * 2, ["~/x"] * 2,
               [toy.ToyLevel(VOCAB, 1)] * 2],
    "window": SIZES,
    "rounds": SIZES,
    "rule": [None, 0, "both", "Token", b"token", ["token"], np.array(["token", "block"]), {}],
    "dtype": ["float99", "int8", "Tensor", "", "AUTO", torch.float64, torch.int8,
              torch.float8_e4m3fn, float, np.float32, 1, True, [torch.float32]],
    "device": ["cuda:99", "gpu", "", "cpu:x", "meta", "mps", torch.device("meta"), 0, True, 1.0,
               ["cpu"], torch.device("cuda:99"), torch.float32],
    "check_vocabulary": [None, *FLAGS],
    "graphs": FLAGS,
    "sync_each_step": [*FLAGS, Graphs.__new__(Graphs)],
    "policy": [0, True, "offline", [3], {}, Windows, ps.Chain],
    "operators": [0, True, "token", [ps.sample, ps.verify], ps.verify, Operators],
    "pack": [*FLAGS, "Auto", np.array("auto")],
}  # fmt: skip


def request(method: str, prompt: str, **options: Any) -> Any:
    return getattr(plain(), method)(**{prompt: [1], "max_new_tokens": 2, **options})


def toys(count: int, **options: Any) -> ps.Chain:
    return ps.Chain(**{"levels": toy.make_levels(count, VOCAB), **options})


LISTS: list[Any] = [[], [1], [[1]], (1,), np.array([1]), torch.tensor([1])]
NO_INTEGER: list[Any] = [*NO_VALUE, *LISTS, True, 2.5, NAN, INF, 1e300, torch.tensor(0.5)]
NO_NUMBER: list[Any] = [None, *NO_VALUE, *LISTS, True, NAN, INF]
OF_OPENAI = [*NO_NUMBER, -2.5, 2.5]
FROM_0: list[Any] = [None, *NO_INTEGER, -1, np.int64(-1), torch.tensor(-1), 2**64, HUGE]
FROM_1: list[Any] = [*FROM_0, 0, False]
FLAG: list[Any] = [None, *NO_VALUE, *LISTS, 0, 1, "yes", np.True_, torch.tensor(True)]
UNIT: list[Any] = [None, *NO_VALUE, *LISTS, True, -0.5, 1.5, NAN, INF, -INF, HUGE]
POSITIVE: list[Any] = [None, *NO_VALUE, *LISTS, True, -1, NAN, INF, -INF, HUGE]
NO_OBJECT: list[Any] = [*NO_VALUE, *LISTS, 1, 2.5, True]
FUNCTION: list[Any] = [None, *(one for one in NO_OBJECT if not callable(one))]
MODEL: list[Any] = [None, *NO_OBJECT, "some/model", Path("model"), torch.nn.Linear]
NAME: list[Any] = [*(one for one in NO_OBJECT if not isinstance(one, str)), "", Path("x")]
PATH: list[Any] = [None, *(one for one in NO_OBJECT if not isinstance(one, str)), "", "a\0b"]
INTEGERS: list[Any] = [
    None, *NO_VALUE, 1, True, 2.5, [None], ["1"], [True], [2.5], [-1], [[1]], [2**64], [NAN],
    np.zeros((1, 1), int), torch.tensor([0.5]), torch.tensor([-1]),
]  # fmt: skip
DTYPE: list[Any] = [*(x for x in NO_OBJECT if x is not torch.float32), "int8", torch.float64]
DEVICE: list[Any] = ["", "gpu", "cpu:x", "meta", torch.device("meta"), 0, None, *LISTS, b"cpu", len]


@functools.cache
def model() -> Any:
    return make("llama", 1, vocab=VOCAB)


@functools.cache
def deep() -> Any:
    return make("llama", 2, vocab=VOCAB)


def level(**options: Any) -> Any:
    return ps.HuggingFaceLevel(model(), **options)


def streaming(**options: Any) -> Any:
    return level(streaming={"window": 8, **options})


def switching(**options: Any) -> ps.SwitchingDrafter:
    members = [ps.PromptLookup(), ps.SuffixMatch()]
    return ps.SwitchingDrafter(**{"members": members, "vocab_size": VOCAB, **options})


def batch(**options: Any) -> Any:
    return plain().batch([[1]], 2, **options)


def choice(**options: Any) -> Any:
    return ps.policies.DrafterChoice(**{"drafter": switching(), **options})


def head(kind: Any, **options: Any) -> Any:
    return kind.from_pretrained(**{"location": "/not/there", "target": model(), **options})


def rows_of_two(name: str, **options: Any) -> Any:
    made = ps.RollbackCache.for_model(model(), 2)
    return getattr(made, name)(**options)


def policy_options(kind: type[ps.policies.Adaptive]) -> dict[str, list[Any]]:
    bad: dict[type, list[Any]] = {bool: FLAG, int: [*FROM_0, -1], float: [*POSITIVE, -0.5]}
    found = {}
    for field in dataclasses.fields(kind):
        if field.name != "max_windows":
            found[field.name] = bad[type(field.default)]
    return {**found, "max_windows": [*INTEGERS[1:], [], [0], [2000]]}


def without_none(values: Sequence[Any]) -> list[Any]:
    return [one for one in values if one is not None]


ROWS: list[Any] = [[1], [1, 1, 1], torch.zeros(2, 1, dtype=torch.int64), torch.tensor(1),
                   torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta"),
                   *(one for one in INTEGERS if one is not None)]  # fmt: skip
TREE = [*NO_OBJECT, ps.DynamicTree, [[0]]]

# Calls, and bad values of each of their arguments.
CALLS: list[tuple[str, Callable[..., Any], dict[str, list[Any]]]] = [
    *((f"Chain.generate, {name}", functools.partial(request, "generate", "input_ids"), {name: bad})
      for name, bad in BAD.items()),
    ("Chain.stream", functools.partial(request, "stream", "input_ids"),
     {name: bad for name, bad in BAD.items() if name not in ("attention_mask", "pad_token_id")}),
    ("Chain.batch, a request", functools.partial(request, "batch", "prompts"),
     {{"input_ids": "prompts"}.get(name, name): bad for name, bad in BAD.items()
      if name not in ("attention_mask", "pad_token_id")}),
    *((f"Chain, {name}", functools.partial(toys, 3 if name == "rounds" else 2), {name: bad})
      for name, bad in BAD_CHAINS.items()),
    ("HuggingFaceLevel", level,
     {"name": NAME, "prefill_chunk": FROM_1, "pack": FLAG, "capacity": FROM_1,
      "step": FROM_1, "bucket": FROM_1, "shares_cache_with": without_none(MODEL),
      "new_cache": without_none(FUNCTION), "slack": [3], "whatever": [1, None],
      "streaming": [*without_none(FROM_1), {"sinks": 2}, {"window": 4, "size": 1}]}),
    ("HuggingFaceLevel, model", lambda model: ps.HuggingFaceLevel(model), {"model": MODEL}),
    ("HuggingFaceLevel, streaming", streaming,
     {"window": FROM_1, "sinks": FROM_0, "slack": FROM_0}),
    ("EncoderDecoderLevel", lambda name: EncoderDecoderLevel(model(), name=name), {"name": NAME}),
    ("PromptLookup", ps.PromptLookup,
     {"max_ngram": [*FROM_1, 2000], "min_ngram": [*FROM_1, 4]}),
    ("SuffixMatch", ps.SuffixMatch, {"min_length": FROM_1}),
    ("NGramTable", ps.NGramTable,
     {"max_ngram": [*FROM_1, 2000], "min_ngram": [*FROM_1, 5], "max_entries": FROM_1,
      "learning": FLAG}),
    ("NGramTable.learn", lambda tokens: ps.NGramTable().learn(tokens),
     {"tokens": [None, *NO_VALUE, 1, [None], ["1"], [2.5], [True]]}),
    ("NGramTable.save", lambda path: ps.NGramTable().save(path), {"path": PATH}),
    ("NGramTable.load", ps.NGramTable.load, {"path": [*PATH, "/not/there", "/"]}),
    ("early_exit", lambda **own: ps.early_exit(**{"target": deep(), "layers": 1, **own}),
     {"target": MODEL, "layers": [*FROM_1, 2]}),
    ("SwitchingDrafter", switching,
     {"members": [None, *NO_VALUE, 1, [], [ps.PromptLookup()], [ps.PromptLookup(), 1],
                  [ps.PromptLookup, ps.SuffixMatch()]],
      "level": [*FROM_1, 2**16], "vocab_size": without_none(FROM_1)}),
    ("DynamicTree", ps.DynamicTree,
     {"top_k": [*FROM_1, 2**14], "total_tokens": [*FROM_1, 1, 2**14 + 1]}),
    ("StaticTree", ps.StaticTree,
     {"paths": [None, *NO_VALUE, 1, [], [1], [[]], [[-1]], [[0], [1, 0]], [[2.5]], [[True]],
                [[2**31]], ["1"], [[i] for i in range(2**14)]]}),
    ("Eagle", functools.partial(head, ps.Eagle),
     {"location": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE, "name": NAME}),
    ("Eagle, head", lambda head: ps.Eagle(head), {"head": [None, *NO_OBJECT, model()]}),
    ("Medusa", functools.partial(head, ps.Medusa),
     {"location": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE}),
    ("Hydra", functools.partial(head, ps.Hydra),
     {"location": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE}),
    ("DraftModel", lambda **own: ps.DraftModel(**{"level": toy.ToyLevel(VOCAB, 1), **own}),
     {"level": [None, *NO_OBJECT, toy.ToyLevel, ps.PromptLookup()], "draw": FUNCTION,
      "vocab_size": without_none(FROM_1)}),
    *((kind.__name__, kind, policy_options(kind)) for kind in ps.policies.POLICIES.values()),
    ("DrafterChoice", choice,
     {"drafter": [None, *NO_OBJECT, ps.PromptLookup()], "policy": [*FUNCTION, int, object],
      "stay": FROM_1}),
    ("policies.named", lambda policy: ps.policies.named(policy), {"policy": [None, *NO_OBJECT]}),
    ("RollbackCache",
     lambda **own: ps.RollbackCache(**{"config": model().config, "batch_size": 1, **own}),
     {"config": [None, *NO_OBJECT], "batch_size": FROM_1, "dtype": [None, *DTYPE],
      "device": DEVICE, "capacity": FROM_1, "step": FROM_1, "bucket": FROM_1}),
    ("RollbackCache.for_model", lambda model: ps.RollbackCache.for_model(model, 1),
     {"model": MODEL}),
    ("RollbackCache.streaming",
     lambda **own: ps.RollbackCache.streaming(
         **{"model": model(), "batch_size": 1, "window": 4, **own}),
     {"model": MODEL, "batch_size": FROM_1, "window": FROM_1, "sinks": FROM_0, "slack": FROM_0}),
    ("RollbackCache.inputs", lambda **own: rows_of_two("inputs", **{"tokens": 3, **own}),
     {"tokens": FROM_1, "counts": [*ROWS, [4, 0]], "depth": without_none(FROM_1),
      "parents": [*NO_OBJECT, [0], torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64)]}),
    ("RollbackCache.rollback", lambda **own: rows_of_two("rollback", **{"lengths": [0, 0], **own}),
     {"lengths": [None, *ROWS]}),
    ("quantize_w4", lambda **own: ps.quantize_w4(**{"model": model(), "group_size": 32, **own}),
     {"model": MODEL, "group_size": [*FROM_1, 31], "head": without_none(FLAG),
      "calibration": [*NO_VALUE, 1, [], [[]], [None], [1], [[VOCAB]], [[-1]], [[2.5]], [[1], "a"],
                      ["a"]]}),
    ("save_w4", lambda **own: ps.save_w4(**{"copy": model(), "folder": "/not/there", **own}),
     {"copy": [*MODEL, model()], "folder": PATH}),
    ("load_w4", lambda **own: ps.load_w4(**{"model": model(), "folder": "/not/there", **own}),
     {"model": MODEL, "folder": PATH}),
    ("LogitsRules", ps.LogitsRules,
     {"repetition_penalty": without_none([*NO_NUMBER, 0, 0.009, 100.5, 10**400]),
      "presence_penalty": OF_OPENAI,
      "frequency_penalty": OF_OPENAI, "min_new_tokens": FROM_0,
      "logit_bias": [1, 2.5, True, "1", [(1, 2)], {"1": 2}, {1: 101}, {1: -101}, {1: "2"}],
      "bad_words": [1, 2.5, True, len, [3], [[]], [["a"]], [[2.5]], [[True]]]}),
    ("row_seeds", lambda **own: ps.row_seeds(**{"seed": 1, "count": 2, **own}),
     {"seed": FROM_0, "count": FROM_0}),
    ("raise_for_status", lambda status: ps.raise_for_status(status, level=1, position=0),
     {"status": [None, *NO_OBJECT]}),
    ("Chain.batch", batch, {"processors": [*FUNCTION[1:]], "observe": FUNCTION[1:]}),
    # (Stops at the first error: nothing here is measured.)
    ("plan", functools.partial(ps.plan, levels=[], prompts=[[1]]),
     {"max_new_tokens": [*FROM_1, 1], "temperature": POSITIVE, "top_k": FROM_0, "top_p": UNIT,
      "min_p": UNIT, "seed": without_none(FROM_0), "batch": FROM_1, "pack": [*FLAG, "Auto"],
      "seconds": POSITIVE, "verify": FLAG, "repeats": FROM_1,
      "trials": without_none(FROM_0), "levels": [None, [], 1, "model"]}),
]  # fmt: skip


def problem(name: str, call: Callable[[], Any]) -> str | None:
    """Return None if `call` raises an error that names the argument."""
    try:
        call()
    except (TypeError, ValueError) as error:
        text = str(error)
        good = re.match(rf"{re.escape(name)}(: expected|\[)", text) and "given" in text
        # A mask that hides the whole prompt is an empty prompt.
        empty = name == "attention_mask" and text == "input_ids: expected at least 1 token, given 0"
        return None if good or empty else text
    except Exception as error:
        return repr(error)
    return "taken"


def told(name: str, call: Callable[[], Any]) -> None:
    assert problem(name, call) is None


@pytest.mark.parametrize(("call", "bad"), [case[1:] for case in CALLS], ids=[c[0] for c in CALLS])
def test_bad_values(call, bad, monkeypatch) -> None:
    def asked(*args: Any, **options: Any) -> Any:
        pytest.fail(f"asked transformers for {args}")

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", asked)
    wrong = []
    for name, values in bad.items():
        for value in values:
            found = problem(name, lambda name=name, value=value: call(**{name: value}))
            if found is not None:
                wrong.append(f"{name}={str(value)[:30]!r}: {found[:120]}")
    assert not wrong, "\n".join(wrong)


def test_good_values() -> None:
    """Else a call of the table could fail for any value."""
    one, two = torch.tensor(1), np.int64(2)
    assert level(prefill_chunk=two, capacity=one, streaming=None, name="x").prefill_chunk == 2
    assert streaming(sinks=0, slack=two).max_length is not None
    assert ps.NGramTable(two, one, two).name == "n-gram table"
    assert ps.DynamicTree(two, two).top_k == 2
    assert ps.StaticTree(np.array([[0], [1]])).parents == [-1, -1]
    assert switching(level=two).name == "prompt lookup | suffix match"
    assert choice(stay=two).stay == 2
    assert ps.policies.Joint(max_windows=(two, 4), forgetting=one).max_windows == [2, 4]
    cached = ps.RollbackCache.for_model(model(), 2)
    parents = torch.tensor([-1, 0, 0])
    assert cached.inputs(3, (3, two), parents=parents, depth=2)["position_ids"].shape == (2, 3)
    cached.rollback(torch.tensor([1, 2]))
    assert cached.lengths.tolist() == [1, 2]
    ps.raise_for_status(torch.zeros(2, dtype=torch.int32), level=1, position=0)


# ---- other errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_bad_windows_of_a_policy(sync: bool) -> None:
    policy = Windows([3])
    levels = [ps.HuggingFaceLevel(make("llama", 1, seed, VOCAB)) for seed in (0, 1)]
    chain = ps.Chain(levels, [2], policy=policy, sync_each_step=sync)
    wanted = chain.generate([1, 2], 9).sequences.tolist()
    for wrong in [*BAD_CHAINS["window"], [3, 1], [], [None], None]:
        policy.windows = wrong
        told("policy (Windows)", lambda: chain.generate([1, 2], 9))
        policy.windows = (np.int64(1),)
        assert chain.generate([1, 2], 9).sequences.tolist() == wanted


def test_a_target_alone_has_no_windows_to_choose() -> None:
    made = toy.make_levels(1, VOCAB)
    wanted = ps.Chain(made).generate([1, 2], 9).sequences.tolist()
    for windows in ([5], [], None):
        chain = ps.Chain(made, policy=Windows(windows))
        assert chain.generate([1, 2], 9).sequences.tolist() == wanted


@pytest.mark.parametrize("sync", [True, False])
def test_the_largest_window_takes_no_more_than_the_text_is_long(sync: bool) -> None:
    largest = 2**31 - 1
    levels = [ps.HuggingFaceLevel(make("llama", 1, seed, VOCAB)) for seed in (0, 1, 2)]
    wanted = ps.Chain(levels[:1]).generate([1, 2], 9).sequences.tolist()
    for window in ([largest, 2], [3, largest], [largest, largest]):
        chain = ps.Chain(levels, window, rounds=[1], sync_each_step=sync)
        assert chain.generate([1, 2], 9).sequences.tolist() == wanted
        for level in levels:
            assert level.cache.layers[0].keys.shape[2] < 1000


def test_arguments_of_transformers_have_a_hint() -> None:
    chain = plain()
    hints = {
        "do_sample": "custom_generate=ps.custom_generate, chain=chain, do_sample=.*temperature=0",
        "no_repeat_ngram_size": "chain=chain, no_repeat_ngram_size=",
        "repetition_penalty": r"here rules=ps\.LogitsRules\(repetition_penalty=",
        "bad_words_ids": r"here rules=ps\.LogitsRules\(bad_words=",
        "streamer": "chain=chain, token_streamer=",
        "num_beams": "chain=chain, num_beams=",
        "max_new_token": "did you mean max_new_tokens?",
        "top_kk": "did you mean top_k?",
        "whatever": "it takes .*temperature",
    }
    for name, hint in hints.items():
        calls: list[Any] = [chain.generate, chain.stream, chain.batch]
        for call in calls:
            wanted = (
                rf"^{name}: expected no such argument of Chain\.{call.__name__}, given 1; .*{hint}"
            )
            with pytest.raises(TypeError, match=wanted):
                call([1], **{name: 1})
    for name, hint in (("stop_strings", r"stop=\.\.\."), ("num_return_sequences", r"n=\.\.\.")):
        with pytest.raises(TypeError, match=rf"^{name}: expected no such .* 1; here {hint}$"):
            chain.generate([1], **{name: 1})
        with pytest.raises(TypeError, match=rf"^{name}: .*custom_generate.*, {name}="):
            chain.batch([1], **{name: 1})  # no option of it
    for text in ("some text", ["some", "texts"]):
        with pytest.raises(TypeError, match=r"^input_ids: .*; tokenizer\(text\)\.input_ids has"):
            chain.generate(text)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("promptlookup", "prompt-lookup"), ("Prompt_Lookup", "prompt-lookup"), ("sufix", "suffix"),
     ("n-gram", "ngram"), ("ngrams", "ngram"), ("early-exit", "early-exit:K"), ("eagle", "eagle:"),
     ("earlyexit:2", "early-exit:K"), ("early-exit:two", "early-exit:K"), ("eagle:", "eagle:"),
     ("w8", "w4"), ("trim:x:DIR", "trim:N:MODEL"), ("path:3:DIR", "paths:K:MODEL")],
)  # fmt: skip
def test_a_word_near_a_drafters_is_told_before_the_network_is_asked(
    word, meant, monkeypatch
) -> None:
    for loader in (hf.AutoConfig, hf.AutoModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", lambda *a, **o: pytest.fail(str(a)))
    with pytest.raises(ValueError, match=rf"^levels\[1\]: .*given '{word}'; did you mean '{meant}"):
        ps.Chain([toy.ToyLevel(VOCAB, 1), word])


# ---- valid calls ---------------------------------------------------------------------------------


def test_every_container_will_do() -> None:
    chain = plain()
    prompts = [[1, 4, 2], [3, 7]]
    options: dict[str, Any] = {
        "max_new_tokens": [9, 4],
        "temperature": [1.0, 0.5],
        "top_k": [0, 5],
        "top_p": [1.0, 0.5],
        "min_p": [0.0, 0.25],
        "seed": [2**64 - 1, 4],
    }
    ends = [[5, 3], [6, 2]]
    wanted = chain.generate(prompts, **options, eos_token_id=ends)
    containers: list[Any] = [
        tuple, np.array, torch.tensor, collections.UserList,
        lambda values: [np.array(value) for value in values],
        lambda values: [value if value == 2**64 - 1 else torch.tensor(value) for value in values],
    ]  # fmt: skip
    for container in containers:
        given: dict[str, Any] = {}
        for name, values in options.items():
            if name == "seed" and container in (np.array, torch.tensor):
                kind = np.uint64 if container is np.array else torch.uint64
                given[name] = container(values, dtype=kind)
            else:
                given[name] = container(values)
        got = chain.generate(prompts, **given, eos_token_id=container(ends))
        assert got.sequences.equal(wanted.sequences)
        assert got.logprobs == wanted.logprobs
    rows: list[Any] = [
        (tuple(prompts[0]), tuple(prompts[1])),
        [np.array(row) for row in prompts],
        (torch.tensor(prompts[0]), torch.tensor(prompts[1], dtype=torch.int32)),
        [[np.int64(1), torch.tensor(4), 2], prompts[1]],
    ]
    for given_rows in rows:
        got = chain.generate(given_rows, **options, eos_token_id=[{5, 3}, {6, 2}])
        assert got.sequences.equal(wanted.sequences)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    chain = plain()
    wanted = chain.generate([[1], [2]], 9, 0.5, 5, 0.5, 0.25, 3, 4, pad_token_id=-100)
    for kind in (np.array, torch.tensor):
        given: list[Any] = [kind(value) for value in (9, 0.5, 5, 0.5, 0.25, 3, 4)]
        got = chain.generate([[1], [2]], *given, pad_token_id=kind(-100))
        assert got.sequences.equal(wanted.sequences)
    got = chain.generate(
        [[1], [2]], np.int8(9), np.float16(0.5), np.uint8(5), fractions.Fraction(1, 2), 0.25, 3,
        np.int64(4), pad_token_id=-100,
    )  # fmt: skip
    assert got.sequences.equal(wanted.sequences)
    # One prompt may have its parameters in lists as well.
    alone = chain.generate([1], [9], [0.5], [5], [0.5], [0.25], [3], [[4]])
    assert alone.sequences[0].tolist() == wanted.sequences[0, : alone.sequences.shape[1]].tolist()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_what_a_tokenizer_gives(kind: Any) -> None:
    """As `tokenizer(texts, padding=True)` and `apply_chat_template` have it."""
    chain = plain()
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "seed": [3, 4]}
    wanted = chain.generate([[1, 4, 2], [3, 7]], **options)
    ids, mask = kind([[1, 4, 2], [0, 3, 7]]), kind([[1, 1, 1], [0, 1, 1]])
    for given in (
        hf.BatchEncoding({"input_ids": ids, "attention_mask": mask, "token_type_ids": mask}),
        {"input_ids": ids, "attention_mask": mask},
    ):
        got = chain.generate(given, **options)
        assert got.sequences[:, :3].tolist() == [[1, 4, 2], [0, 3, 7]]  # the front stays unchanged
        assert got.logprobs == wanted.logprobs
        batch = chain.batch(given, **options)
        batch.complete()
        assert [row.logprobs for row in batch.rows] == wanted.logprobs
    assert chain.generate({"input_ids": ids}, **options, attention_mask=mask).logprobs == (
        wanted.logprobs
    )
    one = hf.BatchEncoding({"input_ids": kind([[0, 3, 7]]), "attention_mask": kind([[0, 1, 1]])})
    text = list(chain.stream(one, 5, temperature=1.0, seed=4))
    assert text == chain.generate([3, 7], 5, 1.0, seed=4).sequences[0, 2:].tolist()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_windows_and_rounds_in_any_container(kind: Any) -> None:
    chain = ps.Chain(tuple(toy.make_levels(3, VOCAB)), kind([4, 2]), rounds=kind([3]))
    assert (chain.window, chain.rounds) == ([4, 2], [3])
    assert {type(value) for value in chain.window + chain.rounds} == {int}
    assert ps.Chain(toy.make_levels(1, VOCAB), kind([]), rounds=kind([])).window == []


def test_default_ends_outside_the_vocabulary_are_no_error() -> None:
    """Configurations name ids that a smaller vocabulary does not have; no caller passed them."""
    chain = plain()
    wanted = chain.generate([1], 9, eos_token_id=[]).sequences
    chain.levels[0].eos_token_ids = (VOCAB, 50256, -1)
    assert chain.generate([1], 9).sequences.equal(wanted)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_a_model_whose_logits_no_operator_reads(dtype: torch.dtype) -> None:
    model = make("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    with pytest.raises(ValueError, match=rf"^LlamaForCausalLM: .*float32, .*given .*{dtype}"):
        ps.Chain([make("llama"), model])
    with pytest.raises(ValueError, match=r"^mine: "):
        ps.HuggingFaceLevel(model, name="mine")


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(make("llama").config).eval()
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: .*with its weights, given .*meta"):
        ps.Chain([model])
    partly = make("llama")
    partly.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: .*with its weights"):
        ps.Chain([partly])


def test_what_a_level_says_of_itself() -> None:
    for vocab_size in (0, -1, 2.5, "9", None, True, 2**31):
        level = toy.ToyLevel(VOCAB, 1)
        level.vocab_size = vocab_size
        with pytest.raises((TypeError, ValueError), match=r"^levels\[0\], toy 1: .*vocab_size"):
            ps.Chain([level])
    level = toy.ToyLevel(VOCAB, 1)
    for device in ("meta", torch.device("mps"), "nowhere", 1.5):
        level.device = device
        with pytest.raises((TypeError, ValueError), match=r"^levels\[0\], toy 1: .*device"):
            ps.Chain([level])


PLACES = {
    "none": "given '.*', which is not there",
    "./none": "which is not there",
    "a/b/c": "which is not there",
    "m.gguf": "'m.gguf', which is not there",
    "empty": "config.json",
    "file": "which is a file",
    "model.safetensors": "which is a file; the directory is wanted that holds it",
    "wrong.gguf": r"GGUF file .*, given 'wrong.gguf': ",
}


@pytest.mark.parametrize("pack", [False, "auto"])
def test_places_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("file", "model.safetensors", "wrong.gguf"):
        (tmp_path / name).write_text("x")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^levels\[0\]: .*'bare'"):
        ps.Chain(["bare"], pack=pack)

    def offline(*args: Any, **options: Any) -> Any:
        raise OSError("We couldn't connect\nand so on")

    for loader in (hf.AutoConfig, hf.AutoModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", offline)
    monkeypatch.setattr(huggingface_hub, "file_exists", lambda *_: False)
    for place, text in PLACES.items():
        with pytest.raises(ValueError, match=rf"^levels\[0\]: .*{text}"):
            ps.Chain([Path(place) if place == "none" else place], pack=pack)
    with pytest.raises(
        ValueError, match=r"^levels\[0\]: .*given 'some/model': We couldn't connect$"
    ):
        ps.Chain(["some/model"], pack=pack)


def test_without_a_network_an_id_is_cached_or_refused_at_once(tmp_path, monkeypatch) -> None:
    """The hub is asked once, and not by transformers, which tries again and again."""
    asked: list[str] = []

    def unreachable(place: str, file: str) -> bool:
        asked.append(place)
        raise OSError("Name or service not known")

    make("llama", 1).save_pretrained(tmp_path)
    cached = {"some/cached": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "file_exists", unreachable)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda place, file: cached.get(place)
    )
    with pytest.raises(
        ValueError,
        match=r"^levels\[1\]: .*, given 'some/other': no such folder here, no .* be reached$",
    ):
        ps.Chain(["some/cached", "some/other"], dtype="float32", pack=False)
    assert asked == ["some/cached", "some/other"]


def test_load(tmp_path: Path) -> None:
    make("llama", 1).save_pretrained(tmp_path)
    assert load(tmp_path).vocab_size == V
    assert load(tmp_path, torch.bfloat16, "cpu").model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^dtype: "):
        load(tmp_path, torch.float64)
    # By name, and as the checkpoint has it, as in transformers.
    assert load(tmp_path, "bfloat16").model.dtype == torch.bfloat16
    assert ps.Level(tmp_path, dtype="torch.float16", name="half").model.dtype == torch.float16
    make("llama", 1).bfloat16().save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").model.dtype == torch.float32
    assert load(tmp_path / "half", "auto").model.dtype == torch.bfloat16
    for dtype, kinds in (("bfloat16", ["bfloat16"] * 2), ("auto", ["float32", "bfloat16"])):
        chain = ps.Chain([tmp_path, tmp_path / "half"], dtype=dtype)
        assert [line.split(", ")[1] for line in repr(chain).splitlines()[1:3]] == kinds
    with pytest.raises(ValueError, match=r"^device: .*cuda:99"):
        load(tmp_path, device="cuda:99")
    with pytest.raises(ValueError, match=r"^location: "):
        load(tmp_path / "none")


@pytest.mark.builds
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(tmp_path: Path) -> None:
    make("llama", 1).save_pretrained(tmp_path)
    message = r"^device: expected a device .*, given cuda.* 0 CUDA"
    if not _C.build_info()["cuda"]:
        message = r"^device: expected the CPU, given cuda.* built without CUDA kernels; reinstall"
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(ValueError, match=message):
            ps.Chain([tmp_path], device=device)


# ---- custom_generate -----------------------------------------------------------------------------


def test_bad_values_of_custom_generate() -> None:
    model = make("llama", vocab=VOCAB)
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([[1, 2], [3, 4]])
    # (`generate` itself looks at stop strings first.)
    call = functools.partial(
        ps.custom_generate, model, ids, generation_config=model.generation_config
    )
    options: dict[str, Any] = {
        "custom_generate": ps.custom_generate, "chain": ps.Chain([model]), "max_new_tokens": 3,
        "do_sample": True, "eos_token_id": -1,
    }  # fmt: skip
    for seed in [*NO_VALUES, *FRACTIONS, *BOOLS, *BELOW, 2**64, [1], [1, 2, 3]]:
        told("seed", lambda seed=seed: model.generate(ids, **options, seed=seed))
    for other in (None, 1, "chain", [options["chain"]], model, ps.Chain):
        told("chain", lambda other=other: model.generate(ids, **{**options, "chain": other}))
    for stop in (1, [1], ["x", None], b"x", {"a": 1}, np.ones(2), torch.ones(2)):
        told("stop_strings", lambda s=stop: call(chain=options["chain"], stop_strings=s))
    wanted = model.generate(ids, **options, seed=5)
    # Configurations have an end outside the vocabulary, and -1 for none.
    options["eos_token_id"] = [VOCAB, 50256]
    for given in (np.int64(5), torch.tensor(5), ps.row_seeds(5, 2), tuple(ps.row_seeds(5, 2))):
        assert model.generate(ids, **options, seed=given).equal(wanted)


# ---- levels that do not fit each other -----------------------------------------------------------


def test_a_model_twice_is_refused(tmp_path: Path) -> None:
    model = make("llama", vocab=VOCAB)
    model.save_pretrained(tmp_path)
    for thing in (model, tmp_path, str(tmp_path)):
        with pytest.raises(ValueError, match=r"^levels\[1\]: .* than levels\[0\], given .* again"):
            ps.Chain([thing, thing])
    level = ps.Level(model)
    with pytest.raises(ValueError, match=r"^levels\[2\]: .*given levels\[0\] again"):
        ps.Chain([level, make("llama", vocab=VOCAB, seed=1), level])
    ps.Chain([model, ps.Level(model, streaming=16)])  # the same weights, but another level


def test_a_larger_level_below_is_a_warning() -> None:
    small, large = make("llama", layers=1, vocab=VOCAB), make("llama", layers=3, vocab=VOCAB)
    config = copy.deepcopy(large.config)
    config.tie_word_embeddings = True
    tied = hf.AutoModelForCausalLM.from_config(config).eval()
    for above in (small, ps.quantize_w4(small, 32)):
        with pytest.warns(
            UserWarning, match=r"^levels\[1\]: expected no more parameters .*comes first"
        ):
            ps.Chain([above, large])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.Chain([large, small])
        ps.Chain([large, copy.deepcopy(large)])
        ps.Chain([large, small, copy.deepcopy(large)])  # cheaper to run, or a plan's trial
        ps.Chain([tied, ps.quantize_w4(tied, 32)])
        ps.Chain([ps.quantize_w4(large, 32), make("llama", layers=2, vocab=VOCAB)])


def test_vocabularies_without_tokenizers_are_the_same_but_for_padding() -> None:
    target = toy.ToyLevel(3, 1)
    for size, fits in ((32000, False), (126000, True), (128256, True), (128257, False)):
        target.vocab_size, draft = 128256, toy.ToyLevel(3, 2)
        draft.vocab_size = size
        if fits:
            ps.Chain([target, draft])
            continue
        with pytest.raises(ValueError, match=rf"^vocabulary of toy 2: .* 128256 .*, given {size}"):
            ps.Chain([target, draft])
        if size < 128256:
            ps.Chain([target, draft], check_vocabulary=False)
