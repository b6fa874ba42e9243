"""Arguments of what chains are made of, and of what stands beside them: a wrong kind, number or
length is a TypeError or ValueError that begins with the argument's name, and nothing else comes of
it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from small_models import make

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels.encoder_decoder import EncoderDecoderLevel

VOCAB = 24

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
# Neither a number nor a container, or not to be read here.
NO_VALUE: list[Any] = [
    "1", b"1", {}, {1}, 1j, object(), len, int, iter([1]), torch.zeros(1, device="meta"),
    torch.zeros(2, 2), torch.float32, np.array(["1"]), torch.nn.Linear(2, 2),
]  # fmt: skip
LISTS: list[Any] = [[], [1], [[1]], (1,), np.array([1]), torch.tensor([1])]
NO_INTEGER: list[Any] = [*NO_VALUE, *LISTS, True, 2.5, NAN, INF, 1e300, torch.tensor(0.5)]
FROM_0: list[Any] = [None, *NO_INTEGER, -1, np.int64(-1), torch.tensor(-1), 2**64, HUGE]
FROM_1: list[Any] = [*FROM_0, 0, False]
OR_NONE = {id(FROM_0): FROM_0[1:], id(FROM_1): FROM_1[1:]}  # without None
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


def cache(**options: Any) -> ps.RollbackCache:
    return ps.RollbackCache(**{"config": model().config, "batch_size": 1, **options})


def pair() -> list[ps.Drafter]:
    return [ps.PromptLookup(), ps.SuffixMatch()]


def switching(**options: Any) -> ps.SwitchingDrafter:
    return ps.SwitchingDrafter(**{"members": pair(), "vocab_size": VOCAB, **options})


def scheduler() -> ps.Scheduler:
    made = ps.Scheduler([4, 2], [2, 0])
    made.start(9)
    return made


def batch(**options: Any) -> Any:
    return chain().batch([[1]], 2, **options)


@functools.cache
def chain() -> ps.Chain:
    return ps.Chain(toy.make_levels(2, VOCAB))


def choice(**options: Any) -> Any:
    return ps.policies.DrafterChoice(**{"drafter": switching(), **options})


def plan(**options: Any) -> Any:
    """Stops at what is wrong: nothing here is measured."""
    return ps.plan(**{"levels": [], "prompts": [[1]], **options})


def head(kind: Any, **options: Any) -> Any:
    return kind.from_pretrained(**{"place": "/not/there", "target": model(), **options})


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

# What is called, and bad values of each of its arguments.
CALLS: list[tuple[str, Callable[..., Any], dict[str, list[Any]]]] = [
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
    ("NGramTable.save", lambda place: ps.NGramTable().save(place), {"place": PATH}),
    ("NGramTable.load", ps.NGramTable.load, {"place": [*PATH, "/not/there", "/"]}),
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
     {"place": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE, "name": NAME}),
    ("Eagle, head", lambda head: ps.Eagle(head), {"head": [None, *NO_OBJECT, model()]}),
    ("Medusa", functools.partial(head, ps.Medusa),
     {"place": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE}),
    ("Hydra", functools.partial(head, ps.Hydra),
     {"place": PATH, "target": MODEL, "tree": TREE, "dtype": DTYPE}),
    ("DraftModel", lambda **own: ps.DraftModel(**{"level": toy.ToyLevel(VOCAB, 1), **own}),
     {"level": [None, *NO_OBJECT, toy.ToyLevel, ps.PromptLookup()], "draw": FUNCTION,
      "vocab_size": without_none(FROM_1)}),
    *((kind.__name__, kind, policy_options(kind)) for kind in ps.policies.POLICIES.values()),
    ("DrafterChoice", choice,
     {"drafter": [None, *NO_OBJECT, ps.PromptLookup()], "policy": [*FUNCTION, int, object],
      "stay": FROM_1, "forgetting": [*UNIT, 0], "confidence": POSITIVE}),
    ("policies.named", lambda policy: ps.policies.named(policy), {"policy": [None, *NO_OBJECT]}),
    ("Scheduler", lambda **own: ps.Scheduler(**{"windows": [4, 2], "rounds": [2, 0], **own}),
     {"windows": [*INTEGERS, [], [0] * 2**16], "rounds": [*INTEGERS, [1]]}),
    ("Scheduler.start", lambda **own: scheduler().start(**own), {"max_new_tokens": FROM_0}),
    ("Scheduler.report",
     lambda **own: scheduler().report(**{"level": 3, "emitted": 2, **own}),
     {"level": [*FROM_1, 4], "emitted": FROM_0, "eos": FLAG}),
    ("Scheduler.set_windows", lambda **own: scheduler().set_windows(**own),
     {"windows": [*INTEGERS, [], [1], [1, 2, 3]]}),
    ("Scheduler.set_tail", lambda **own: scheduler().set_tail(**own), {"tail": FROM_0}),
    ("Scheduler.set_tail, two levels", lambda tail: ps.Scheduler([4]).set_tail(tail),
     {"tail": [1]}),
    ("Scheduler.pending", lambda **own: scheduler().pending(**own), {"level": [*FROM_1, 3]}),
    ("RollbackCache", cache,
     {"config": [None, *NO_OBJECT], "batch_size": FROM_1, "dtype": [None, *DTYPE],
      "device": DEVICE, "capacity": FROM_1, "step": FROM_1, "bucket": FROM_1,
      "slack": without_none(FROM_0)}),
    ("RollbackCache.for_model", lambda model: ps.RollbackCache.for_model(model, 1),
     {"model": MODEL}),
    ("RollbackCache.streaming",
     lambda **own: ps.RollbackCache.streaming(
         **{"model": model(), "batch_size": 1, "window": 4, **own}),
     {"model": MODEL, "batch_size": FROM_1, "window": FROM_1, "sinks": FROM_0, "slack": FROM_0}),
    ("RollbackCache.inputs", lambda **own: rows_of_two("inputs", **{"tokens": 3, **own}),
     {"tokens": FROM_1, "counts": [*ROWS, [4, 0]], "depth": without_none(FROM_1),
      "parents": [*NO_OBJECT, [0], torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64)]}),
    ("RollbackCache.prepare", lambda **own: rows_of_two("prepare", **{"tokens": 3, **own}),
     {"tokens": FROM_1, "counts": ROWS}),
    ("RollbackCache.rollback", lambda **own: rows_of_two("rollback", **{"lengths": [0, 0], **own}),
     {"lengths": [None, *ROWS], "bound": without_none(FROM_0)}),
    ("quantize_w4", lambda **own: ps.quantize_w4(**{"model": model(), "group_size": 32, **own}),
     {"model": MODEL, "group_size": [*FROM_1, 31], "head": without_none(FLAG),
      "calibration": [*NO_VALUE, 1, [], [[]], [None], [1], [[VOCAB]], [[-1]], [[2.5]], [[1], "a"],
                      ["a"]]}),
    ("save_w4", lambda **own: ps.save_w4(**{"copy": model(), "folder": "/not/there", **own}),
     {"copy": [*MODEL, model()], "folder": PATH}),
    ("load_w4", lambda **own: ps.load_w4(**{"model": model(), "folder": "/not/there", **own}),
     {"model": MODEL, "folder": PATH}),
    ("row_seeds", lambda **own: ps.row_seeds(**{"seed": 1, "count": 2, **own}),
     {"seed": FROM_0, "count": FROM_0}),
    ("raise_for_status", lambda status: ps.raise_for_status(status, level=1, position=0),
     {"status": [None, *NO_OBJECT]}),
    ("Chain.batch", batch, {"processors": [*FUNCTION[1:]], "observe": FUNCTION[1:]}),
    ("plan", plan,
     {"max_new_tokens": [*FROM_1, 1], "temperature": POSITIVE, "top_k": FROM_0, "top_p": UNIT,
      "min_p": UNIT, "seed": without_none(FROM_0), "batch": FROM_1, "pack": [*FLAG, "Auto"],
      "seconds": POSITIVE, "verify": FLAG, "theorem": FLAG, "repeats": FROM_1,
      "trials": without_none(FROM_0), "levels": [None, [], 1, "model"]}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "bad"), [case[1:] for case in CALLS], ids=[c[0] for c in CALLS])
def test_bad_values(call: Callable[..., Any], bad: dict[str, list[Any]]) -> None:
    wrong = []
    for name, values in bad.items():
        for value in values:
            try:
                call(**{name: value})
            except (TypeError, ValueError) as error:
                text = str(error)
                good = re.match(rf"{name}(\[\d+\])?: expected", text) and "given" in text
                found = None if good else text
            except Exception as error:
                found = repr(error)
            else:
                found = "taken"
            if found is not None:
                wrong.append(f"{name}={str(value)[:30]!r}: {found[:120]}")
    assert not wrong, "\n".join(wrong)


def test_good_values() -> None:
    """So that no call of the table fails whatever it is given."""
    one, two = torch.tensor(1), np.int64(2)
    assert level(prefill_chunk=two, capacity=one, streaming=None, name="x").prefill_chunk == 2
    assert streaming(sinks=0, slack=two).max_length is not None
    assert ps.NGramTable(two, one, two).name == "n-gram table"
    assert ps.DynamicTree(two, two).top_k == 2
    assert ps.StaticTree(np.array([[0], [1]])).parents == [-1, -1]
    assert switching(level=two).name == "prompt lookup | suffix match"
    assert choice(stay=two, forgetting=one).stay == 2
    made = scheduler()
    made.report(3, two)
    made.set_windows(torch.tensor([3, 3]))
    assert (made.windows, made.pending(two), ps.Scheduler([1]).rounds) == ([3, 3], 2, [0])
    assert ps.policies.Joint(max_windows=(two, 4), forgetting=one).max_windows == [2, 4]
    cached = ps.RollbackCache.for_model(model(), 2, slack=None)
    parents = torch.tensor([-1, 0, 0])
    assert cached.inputs(3, (3, two), parents=parents, depth=2)["position_ids"].shape == (2, 3)
    cached.rollback(torch.tensor([1, 2]), bound=two)
    assert cached.lengths.tolist() == [1, 2]
    ps.raise_for_status(torch.zeros(2, dtype=torch.int32), level=1, position=0)


def test_a_plan_without_a_seed_has_one_of_torchs_generator() -> None:
    def seed_of(seed: int | None, call: int) -> Any:
        plan = ps.plan([tiny.path("drafter")], [[1, 7]], 4, seed=seed, pack=False, seconds=0.1)
        return plan.request.options(call)["seed"]

    seeds = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        seeds.append(seed_of(None, 3))
    assert seeds[0] == seeds[1] != seeds[2]
    assert seed_of(2**64 - 1, 1) == 0
