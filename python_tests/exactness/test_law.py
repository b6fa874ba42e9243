"""The output of a chain has the target's distribution: every draw of chains with every feature is
enumerated, in rounds that the host follows and in rounds without the host.

Levels are tables; scheduler, drafters and operators are the production ones. The faults of
`mutations/faults.py` show that the tests find mistakes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import any_head
import pytest
import torch
import toy
import toy_rows
from device_rounds import counted
from lettered import ABC, ADBC, BAZ, Lettered, lettered
from proposal_kinds import FIXED, SAMPLED, Kind, Various, distance, text_distributions
from small_models import llama
from toy_policies import POLICIES, Clock, Listed, Random, Turns
from toy_trees import StayingTrees, TreeDrafter, TreeEnumerator

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.levels import IdMap, LevelOutput

Make = Callable[[TreeEnumerator, Path], list[Any]]
PROMPT = [0, 1]


@dataclass(frozen=True)
class Feature:
    """A chain with a feature.

    Attributes:
        make: returns the levels and the drafter; draws are the enumerator's.
        window, length: of the chain, and number of new tokens.
        more: further arguments of `Chain`; a policy as a function of the levels.
        sampling: arguments of `generate`.
        rules, executors: "h" runs with the host, "q" queued.
        most: of the total variation to the target's distribution.
    """

    make: Make
    window: list[int]
    length: int
    more: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    rules: Sequence[str] = ("token",)
    executors: str = "h"
    most: float = 1e-12


BOTH = ("token", "block")
BLOCK = ("block",)
Part = IdMap(4, torch.tensor([0, 1, 3]))


def levels(count: int, vocab: int) -> Make:
    return lambda chance, place: [StayingTrees(vocab, 11 + i) for i in range(count)]


def plain(make: Callable[[], list[Any]]) -> Make:
    """Levels with the four methods of `ps.Level`."""
    return lambda chance, place: make()


def sizes(*vocabs: int) -> Make:
    return plain(lambda: [toy.ToyLevel(vocab, 1 + i) for i, vocab in enumerate(vocabs)])


# ---- drafters ------------------------------------------------------------------------------------

TREES = {"dynamic": ps.DynamicTree(2, 4), "static": ps.StaticTree([[0], [1], [0, 0]])}


def head(kind: str, count: int) -> Make:
    def make(chance: TreeEnumerator, place: Path) -> list[Any]:
        drafter = any_head.head_of(kind, 2, place, TREES, draw=chance.draw)
        return [*(StayingTrees(2, 11 + i, size=any_head.SIZE) for i in range(count)), drafter]

    return make


def paths(count: int, vocab: int, number: int, beam: float = 0.5) -> Make:
    def make(chance: TreeEnumerator, place: Path) -> list[Any]:
        *above, last = levels(count, vocab)(chance, place)
        return [*above, DraftModel(last, paths=number, beam=beam)]

    return make


def tree(count: int, vocab: int, widths: list[int], drawn: bool = False) -> Make:
    def make(chance: TreeEnumerator, place: Path) -> list[Any]:
        sample = chance.sample if drawn else None
        drafter = TreeDrafter(toy.ToyLevel(vocab, 31), widths, sample)
        return [*levels(count, vocab)(chance, place), drafter]

    return make


class PartLevel(StayingTrees):
    """A level that draws some of its ids."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, id_map=Part)

    def forward(self, block: Any) -> LevelOutput:
        out = super().forward(block)
        return out._replace(logits=out.logits[..., Part.drawn])


def part(at: int, count: int) -> Make:
    def make(chance: TreeEnumerator, place: Path) -> list[Any]:
        return [(PartLevel if i == at else StayingTrees)(4, 1 + i) for i in range(count)]

    return make


def switching(*members: Callable[[TreeEnumerator], Any], vocab: int = 2) -> Make:
    def make(chance: TreeEnumerator, place: Path) -> list[Any]:
        drafter = ps.SwitchingDrafter([member(chance) for member in members])
        return [StayingTrees(vocab, 11), drafter]

    return make


def model_of(level: Any) -> Callable[[TreeEnumerator], DraftModel]:
    return lambda chance: DraftModel(level, draw=chance.draw)


def trimmed(chance: TreeEnumerator, place: Path) -> list[Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None}
    few = {"hidden_size": 8, "intermediate_size": 12, "bos_token_id": None}
    copy = ps.trim(llama(3, 1, 3, **few, **heads), [[0, 2, 2]], 2)
    return [toy.ToyLevel(3, 1), ps.HuggingFaceLevel(copy)]


def translated(kinds: str) -> Make:
    made: dict[str, Callable[[], Any]] = {
        "middle": lambda: lettered(BAZ),
        "draft": lambda: lettered(ADBC, 3),
        "plain": lambda: Lettered(ABC, 4),
        "lookup": lambda: toy.FixedDrafter(lambda tokens, k: [(tokens[-1] + 1) % 3, 0][:k]),
    }
    return plain(lambda: [Lettered(ABC, 1), *(made[kind]() for kind in kinds.split())])


# ---- the table -----------------------------------------------------------------------------------


def policy(make: Callable[[], Any]) -> dict[str, Any]:
    return {"policy": lambda levels: make()}


def clock(name: str, count: int) -> Callable[[], Any]:
    more: dict[str, Any] = {"ngram": 1} if name == "cached-fsm" else {}
    options = {"max_windows": [3] * (count - 1), "guard_loss": 0.5, "guard_hold": 1, **more}
    return lambda: Clock(POLICIES[name](guard_share=50.0, **options))


TURNS = {"policy": lambda levels: Turns(levels[-1])}
FILTERS = [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.4},
           {"temperature": 0.5, "top_k": 2, "top_p": 0.9}]  # fmt: skip
FEATURES: dict[str, Feature] = {
    # Levels, vocabulary, windows.
    "2, 3, [1]": Feature(levels(2, 3), [1], 4, executors="hq"),
    "2, 2, [3]": Feature(levels(2, 2), [3], 4, rules=BOTH, executors="hq"),
    "3, 3, [2, 1]": Feature(levels(3, 3), [2, 1], 3),
    "3, 2, [1, 2]": Feature(levels(3, 2), [1, 2], 4, rules=BLOCK),
    "3, 2, [3, 2]": Feature(levels(3, 2), [3, 2], 4, rules=BOTH, executors="hq"),
    "4, 2, [2, 1, 1]": Feature(levels(4, 2), [2, 1, 1], 4, rules=BOTH),
    "four methods": Feature(plain(lambda: toy.make_levels(3, 2)), [2, 2], 4, rules=BOTH),
    "plain decoding": Feature(levels(3, 3), [0, 2], 3),
    "a middle that decodes plainly": Feature(levels(3, 3), [2, 0], 3, rules=BLOCK),
    **{
        f"{own}": Feature(levels(3, 3), [2, 1], 3, sampling=own, rules=[BOTH[i % 2]])
        for i, own in enumerate(FILTERS)
    },
    "EOS": Feature(levels(3, 2), [2, 2], 4, sampling={"eos": [1]}, rules=BOTH),
    "fewer ids last": Feature(sizes(3, 3, 2), [2, 1], 3, rules=BOTH),
    # Ids past the target's are cut off before the draft is drawn, anywhere in the chain.
    "padded ids": Feature(sizes(2, 3, 4), [2, 1], 3, {"check_vocabulary": False}),
    "deterministic": Feature(plain(toy.with_lookup), [2, 2], 4, rules=BOTH),
    # Tails: tokens of the drafter after the tokens that the level below the target has verified.
    "tail, [1, 1]": Feature(levels(3, 3), [1, 1], 3, {"tail": 1}, rules=BOTH),
    "tail, [1, 2]": Feature(levels(3, 2), [1, 2], 4, {"tail": 2}, rules=BOTH),
    "tail, [2, 1]": Feature(levels(3, 2), [2, 1], 4, {"tail": 1}, rules=BOTH, executors="hq"),
    "tail of any length": Feature(levels(3, 2), [1, 2], 3, {"tail": 9}, executors="q"),
    "tail, [1, 1, 1]": Feature(
        levels(4, 2), [1, 1, 1], 3, {"tail": 1}, rules=BLOCK, executors="hq"
    ),
    "tail, [2, 1, 1]": Feature(levels(4, 2), [2, 1, 1], 4, {"tail": 1}),
    # The level below the target decodes alone, so only tails are drafted.
    "tail, [2, 0, 1]": Feature(levels(4, 2), [2, 0, 1], 4, {"tail": 1}, executors="hq"),
    "tail, unbounded rounds": Feature(
        levels(3, 3), [1, 1], 4, {"tail": 1, "rounds": [0]}, {"temperature": 1.5, "top_k": 2}
    ),
    "tail, EOS": Feature(levels(3, 3), [1, 1], 3, {"tail": 1}, {"eos": [1]}),
    "tail, fewer ids last": Feature(sizes(3, 3, 2), [1, 1], 3, {"tail": 1}),
    "tail, fewer ids below": Feature(sizes(3, 2, 2), [1, 1], 3, {"tail": 1}),
    "tail, deterministic": Feature(plain(toy.with_lookup), [1, 2], 4, {"tail": 2}, rules=BOTH),
    # Levels and drafters that draw some ids.
    "some ids last": Feature(part(1, 2), [2], 3, rules=BOTH, executors="hq"),
    "some ids last, top-p": Feature(part(1, 2), [2], 3, sampling={"top_p": 0.7}, rules=BLOCK),
    "some ids last, tail": Feature(part(2, 3), [1, 1], 3, {"tail": 1}),
    "some ids between": Feature(part(1, 3), [2, 1], 3, rules=BLOCK, executors="hq"),
    "some ids between, tail": Feature(
        part(1, 3), [2, 1], 3, {"tail": 1}, {"top_p": 0.7}, executors="h"
    ),
    "trimmed": Feature(trimmed, [2], 3, {"check_vocabulary": False}, rules=BOTH, most=1e-6),
    **{
        f"translated {kinds}": Feature(
            translated(kinds), [2, 1][: len(kinds.split())], 3, rules=[BOTH[i % 2]], most=1e-6
        )
        for i, kinds in enumerate(
            ("middle", "draft", "middle lookup", "middle plain", "middle draft", "plain draft")
        )
    },
    "translated, tail": Feature(
        translated("middle draft"), [2, 1], 3, {"tail": 1}, {"temperature": 0.7, "top_p": 0.8},
        most=1e-6,
    ),
    # Heads, which read hidden states.
    **{
        f"{kind} {window}": Feature(head(kind, len(window)), window, 3, executors=executors)
        for kind in any_head.KINDS
        for window, executors in (([2], "q"), ([2, 1], "h"))
    },
    "eagle, tail": Feature(head("eagle", 2), [1, 1], 3, {"tail": 1}, rules=BOTH, executors="hq"),
    # Trees, of likeliest or of drawn children.
    "tree [2, 2]": Feature(tree(1, 3, [2, 2]), [2], 3),
    "tree [2, 1, 1]": Feature(tree(1, 3, [2, 1, 1]), [3], 4),
    "tree below two": Feature(tree(2, 3, [2, 1]), [2, 2], 3, rules=BOTH),
    "tree below three": Feature(tree(3, 3, [2]), [2, 1, 1], 3),
    "drawn tree": Feature(tree(1, 2, [2, 1], True), [2], 3),
    "drawn tree below two": Feature(tree(2, 2, [2], True), [1, 1], 2, rules=BOTH),
    "paths [1]": Feature(paths(2, 3, 3), [1], 2, executors="hq"),
    "paths [2]": Feature(paths(2, 2, 2), [2], 3, executors="hq"),
    "paths [1, 2]": Feature(paths(3, 2, 2), [1, 2], 3, rules=BOTH, executors="hq"),
    "paths, beam": Feature(paths(2, 3, 2, 1.0), [3], 4),
    "paths, beam below two": Feature(paths(3, 3, 3, 1.0), [2, 1], 3, rules=BOTH),
    "paths, top-k": Feature(paths(2, 3, 2), [2], 2, sampling={"top_k": 2}),
    "paths, top-p": Feature(
        paths(2, 3, 2), [2], 2, sampling={"temperature": 0.75, "top_p": 0.7}
    ),
    # Windows and drafters that change between rounds.
    "switching": Feature(
        switching(
            model_of(toy_rows.Rows(2, 12)), model_of(toy_rows.Rows(2, 13)),
            lambda chance: toy.FixedDrafter(lambda tokens, k: [1] * k),
        ),
        [2], 4, TURNS, rules=BOTH,
    ),
    "switching, some ids": Feature(
        switching(model_of(PartLevel(4, 3)), model_of(toy.ToyLevel(4, 2)), vocab=4), [2], 3, TURNS,
        rules=BLOCK,
    ),
    **{
        f"random windows below {count - 1}": Feature(
            levels(count, 2), [2] * (count - 1), length, policy(lambda: Random(1)),
            rules=BOTH, executors="hq",
        )
        for count, length in ((2, 5), (3, 4))
    },
    **{
        f"windows {own}": Feature(
            levels(len(own[0]) + 1, 2), own[0], length, policy(lambda own=own: Listed(own)),
            rules=[BOTH[i % 2]], executors="hq",
        )
        for i, (own, length) in enumerate((
            ([[1], [0], [2]], 5), ([[0], [0], [3]], 5), ([[1, 1], [0, 2], [1, 1]], 4),
            ([[1, 1], [2, 0], [1, 2]], 4), ([[0, 0], [1, 0], [0, 3], [2, 1]], 5),
        ))
    },
    "windows, unbounded rounds": Feature(
        levels(3, 2), [2, 1], 4,
        {**policy(lambda: Listed([[2, 1], [0, 0], [1, 1]])), "rounds": [0]}, rules=BOTH,
    ),
    **{
        f"{name} below {count - 1}": Feature(
            levels(count, 2), [2] * (count - 1), length, policy(clock(name, count)),
            rules=[BOTH[i % 2]], executors="hq"[count - 2],
        )
        for i, name in enumerate(name for name in POLICIES if name != "fixed")
        for count, length in ((2, 4), (3, 3))
    },
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, bool | None]]:
    for name, feature in FEATURES.items():
        for rule in feature.rules:
            for executor in feature.executors:
                yield name, rule, None if executor == "h" else False


@pytest.mark.parametrize(("name", "rule", "sync"), [*cases()])
def test_the_law_is_the_targets(name: str, rule: str, sync: bool | None, tmp_path: Path) -> None:
    feature, chance = FEATURES[name], TreeEnumerator()
    made, more = feature.make(chance, tmp_path), dict(feature.more)
    if "policy" in more:
        more["policy"] = more["policy"](made)
    options = {"operators": chance.operators, "rule": rule, "sync_each_step": sync, **more}
    chain = ps.Chain(made, feature.window, **options)
    target, prompt = getattr(made[0], "table", made[0]), PROMPT
    if isinstance(target, torch.Tensor):  # a level with four methods
        target = made[0]
    # The first text finds no cache allocated, and its logits are rounded otherwise.
    chance.only(-1)
    chain.generate(prompt, feature.length, temperature=1.0, eos_token_id=[])
    chance.only(None)
    with counted() as rounds:
        gap = toy.chain_gap(chance, chain, target, prompt, feature.length, **feature.sampling)
    assert gap < feature.most
    assert bool(rounds) == (sync is False)


# ---- rows of a batch -----------------------------------------------------------------------------


class Half(toy_rows.Rows):
    """Logits in bfloat16, which holds none of the drafter's in float32."""

    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args).to(torch.bfloat16)


Kinds = Callable[[int, int], Kind]
KINDS: dict[str, Kinds] = {
    "dtypes": lambda request, round: (Kind(torch.bfloat16), SAMPLED)[(request + round) % 2],
    "widths": lambda request, round: (Kind(width=2), SAMPLED)[(request + round) % 2],
    "lengths": lambda request, round: (Kind(most=1), FIXED)[(request + round) % 2],
    "row statistics": lambda request, round: (SAMPLED, Kind(statistics=False))[
        (request + round) % 2
    ],
}


def various(kinds: Kinds, middle: Any = toy_rows.Rows) -> Make:
    return lambda chance, place: [
        toy_rows.Rows(3, 11), middle(3, 12), Various(kinds, sample=chance.sample)
    ]  # fmt: skip


ROWS: dict[str, tuple[Feature, list[float]]] = {
    # A row's tail with other rows' drafts, tails of other kinds, and rows without one.
    **{
        name: (Feature(various(kinds), [1, 1], 3, {"tail": 1}, rules=[BOTH[i % 2]]), [1.0, 1.0])
        for i, (name, kinds) in enumerate(KINDS.items())
    },
    "narrow logits": (Feature(various(KINDS["lengths"], Half), [1, 1], 3, {"tail": 1}), [1, 1]),
    "paths and a beam": (Feature(paths(2, 2, 2, 0.6), [2], 3), [1.0, 0.5]),
    "windows by row": (
        Feature(levels(3, 2), [1, 1], 3, policy(lambda: Random(5, largest=2)), executors="hq"),
        [1.0, 1.0],
    ),
}


@pytest.mark.parametrize(
    ("name", "sync"),
    [(name, x != "q" and None) for name, (feature, _) in ROWS.items() for x in feature.executors],
)
def test_the_law_of_every_row(name: str, sync: bool | None, tmp_path: Path) -> None:
    (feature, temperatures), chance = ROWS[name], TreeEnumerator()
    made, more = feature.make(chance, tmp_path), dict(feature.more)
    if "policy" in more:
        more["policy"] = more["policy"](made)
    options = {"operators": chance.operators, "rule": feature.rules[0], **more}
    chain = ps.Chain(made, feature.window, sync_each_step=sync, **options)
    prompts, target = [PROMPT, [1, 0]], made[0]
    others = -1 if feature.rules[0] == "token" else 0
    found = text_distributions(
        chance, chain, prompts, feature.length, others, temperature=temperatures
    )
    table = target if isinstance(target, toy.ToyLevel) else target.table
    assert distance(found, table, prompts, feature.length, temperatures) < 1e-9
