"""Texts under a grammar have the law of the target's masked logits, by enumeration."""

import json
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import proposal_kinds
import pytest
import torch
import toy
import toy_rows
import toy_trees

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters import DraftModel
from polyspec_ext.sampling import RequestProcessors

pytest.importorskip("llguidance")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

A, B, EOS = 0, 1, 2
PROMPT = [1, 1]  # the grammar does not speak of it
LANGUAGE = ("ab", "ba", "aab", "bba", "abab", "bb")
PATTERN = "|".join(LANGUAGE)


def letters(names: str = "ab") -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, then EOS."""
    vocab = {name: token for token, name in enumerate([*names, "<e>"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


GRAMMAR = ps.Grammar.regex(PATTERN, letters())


class Masked(toy.ToyLevel):
    """The law that texts must have: a level's logits, masked by the list of all texts."""

    def __init__(self, level: toy.ToyLevel, prompt: Sequence[int]) -> None:
        super().__init__(level.vocab_size, 0)
        self.table, self.begin = level.table, len(prompt)

    def row(self, prefix: Sequence[int]) -> torch.Tensor:
        row = super().row(prefix).clone()
        text = "".join("ab"[token] for token in prefix[self.begin :])
        for token, letter in enumerate("ab"):
            if not any(one.startswith(text + letter) for one in LANGUAGE):
                row[token] = -torch.inf
        if text not in LANGUAGE:
            row[EOS] = -torch.inf
        return row


RULES = ps.LogitsRules(grammar=GRAMMAR)


def gap(levels, window, length=4, chance=None, **options) -> float:
    """Total variation between a chain's texts and the target's masked distribution."""
    chance = chance or toy.Enumerator()
    chain = ps.Chain(levels, window, operators=chance.operators, **options)
    target = levels[0] if isinstance(levels[0], toy.ToyLevel) else levels[0].table
    return toy.chain_gap(chance, chain, Masked(target, PROMPT), PROMPT, length, [EOS], RULES)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("window", [[1], [3], [2, 1], [2, 2]], ids=str)
def test_the_law_is_the_masked_targets(window: list[int], rule: str) -> None:
    assert gap(toy.make_levels(len(window) + 1), window, rule=rule) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_law_with_drafts_as_they_were_drawn(count: int, rule: str) -> None:
    chance = toy.Enumerator()
    for kind in (proposal_kinds.SAMPLED, proposal_kinds.FIXED):
        drafter = proposal_kinds.Various(lambda *_, kind=kind: kind, 3, chance.sample)
        levels = [*toy.make_levels(count), drafter]
        assert gap(levels, [2] * count, 3, chance, rule=rule) < 1e-12


def test_the_law_where_the_drafter_has_no_allowed_id() -> None:
    levels = [toy.ToyLevel(3, 1), toy.ToyLevel(3, 2), toy.ToyLevel(1, 3)]
    assert gap(levels, [2, 1]) < 1e-12
    assert gap(levels[::2], [2]) < 1e-12
    assert gap([levels[0], toy.ToyLevel(1, 4), levels[2]], [2, 1]) < 1e-12  # nor the middle


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("drawn", [False, True])
def test_the_law_with_trees(count: int, drawn: bool) -> None:
    chance = toy_trees.TreeEnumerator()
    levels = [toy_trees.TreeLevel(3, 11 + i) for i in range(count)]
    sample = chance.sample if drawn else None
    drafter = toy_trees.TreeDrafter(toy.ToyLevel(3, 31), [2] if drawn else [2, 2], sample)
    window = [1 if drawn else 2] * count
    assert gap([*levels, drafter], window, 2 if drawn else 4, chance) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_requests_with_and_without_a_grammar_side_by_side(rule: str) -> None:
    chance = toy.Enumerator()
    levels = [toy_rows.Rows(3, 11 + i) for i in range(3)]
    chain = ps.Chain(levels, [2, 1], rule=rule, operators=chance.operators)
    prompts = [PROMPT, PROMPT, [0]]
    grammars = [GRAMMAR, None, GRAMMAR]

    rules = [g and ps.LogitsRules(grammar=g) for g in grammars]

    def text(number: int) -> list[int]:
        batch = chain.batch(
            prompts, 3, temperature=1.0, seed=[0, 1, 2], eos_token_id=[EOS], rules=rules
        )
        batch.complete()
        return batch.rows[number].tokens[len(prompts[number]) :]

    for number, prompt in enumerate(prompts):
        chance.only(number)
        found = toy.chain_distribution(chance, partial(text, number))
        level = Masked(levels[0], prompt) if grammars[number] else levels[0]
        law = toy.text_distribution(level, prompt, 3, eos=[EOS])
        assert toy.total_variation(found, law) < 1e-12


@pytest.mark.parametrize("names", [["target", "drafter"], ["target", "middle", "drafter"]])
@pytest.mark.parametrize("observed", [False, True])
def test_masks_are_changed_logits(names: list[str], observed: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    chain = ps.Chain([tiny.path(name) for name in names], [3, 2][: len(names) - 1])
    grammar = ps.Grammar.json_object(tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in ("2 + 2 =", "The sum of", "a")]
    found: list[list[Any]] = []
    for words in ([], [[0, 0, 0, 0]]):  # a word that no text has
        rules = ps.LogitsRules(grammar=grammar, bad_words=words)
        seen: list[Any] = []

        def observe(row: int, logits: torch.Tensor, seen: list[Any] = seen) -> None:
            seen.append((row, logits.float()))

        options: dict[str, Any] = {"observe": observe} if observed else {}
        batch = chain.batch(
            prompts, 40, temperature=[0.0, 1.0, 1.3], seed=5, rules=[rules, rules, None], **options
        )
        batch.complete()
        passes = [
            (level.num_forward_passes, level.num_accepted_tokens) for level in batch.stats.levels
        ]
        found.append([(row.tokens, row.logprobs, passes) for row in batch.rows])
        assert bool(seen) == observed
        found[-1] += [(row, logits.tolist()) for row, logits in seen]
    assert found[0] == found[1]


def eagle(tree: ps.DynamicTree | None) -> list[Any]:
    # In float32 no two tokens tie, as they do in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32")
    target = ps.Level(model)
    return [target, ps.Eagle.from_pretrained(tiny.path("eagle3"), target, tree=tree)]


def paths() -> list[Any]:
    level = ps.Level(AutoModelForCausalLM.from_pretrained(tiny.path("drafter")))
    return [tiny.path("target"), DraftModel(level, paths=3, beam=0.0)]


# With the windows, and whether other rules change logits too.
FORCED: dict[str, tuple[Callable[[], list[Any]], list[int], bool]] = {
    "lookup": (lambda: [tiny.path("target"), ps.PromptLookup()], [6], False),
    "lookup, rules": (lambda: [tiny.path("target"), ps.PromptLookup()], [6], True),
    "model": (lambda: [tiny.path("target"), tiny.path("drafter")], [6], False),
    "three": (lambda: [tiny.path(x) for x in ("target", "middle", "drafter")], [6, 3], False),
    "paths": (paths, [4], False),
    "eagle": (lambda: eagle(None), [5], False),
    "eagle, tree": (lambda: eagle(ps.DynamicTree()), [5], True),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", FORCED)
def test_forced_tokens_are_free_drafts(kind, temperature, monkeypatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "is_member": {"type": "boolean"}},
        "required": ["number", "is_member"],
        "additionalProperties": False,
    }
    made, window, more = FORCED[kind]
    grammar = ps.Grammar.json_schema(schema, tokenizer, whitespace=False)
    rules = ps.LogitsRules(grammar=grammar, bad_words=[[0, 0, 0, 0]] if more else [])
    runs: list[tuple[list[int], list[int]]] = []
    forced = RequestProcessors.forced

    def noted(self: RequestProcessors, prefix: Sequence[int], most: int, row: int) -> list[int]:
        runs.append((list(prefix), forced(self, prefix, most, row)))
        return runs[-1][1]

    monkeypatch.setattr(RequestProcessors, "forced", noted)
    prompts = [tokenizer(text)["input_ids"] for text in ("2 + 2 =", "a")]
    server = ps.Server(ps.Chain(made(), window), 2)
    options: dict[str, Any] = {"max_new_tokens": 64, "temperature": temperature, "rules": rules}
    ids = [server.add(prompt, seed=1, **options) for prompt in prompts]
    texts: dict[int, list[int]] = {request: [] for request in ids}
    levels: dict[int, list[int]] = {request: [] for request in ids}
    while server.running or server.waiting:
        for event in server.step():
            assert event.error is None
            texts[event.request] += event.tokens
            levels[event.request] += event.levels
    count = 0
    for request, prompt in zip(ids, prompts, strict=True):
        whole, proposed = [*prompt, *texts[request]], [1] * len(prompt) + levels[request]
        for prefix, run in runs:
            if prefix == whole[: len(prefix)] and run:
                assert whole[len(prefix) :][: len(run)] == run
                assert min(proposed[len(prefix) :][: len(run)]) > 1
                count += len(run)
    assert count > 2 * len(prompts)
    plain = ps.Chain(made()[:1])
    if temperature == 0:
        for request, prompt in zip(ids, prompts, strict=True):
            assert plain.generate(prompt, **options).new_tokens[0] == texts[request]
    passes = server.stats.levels[0].num_verifications
    assert passes < sum(map(len, texts.values())) / 2


def test_forced_tokens_follow_the_text() -> None:
    grammar = ps.Grammar.regex("a(bab|aaa)b", letters())
    matcher = grammar.for_request(1)
    for text, tokens in [
        ([], [A]),
        ([A], []),
        ([A, B], [A, B, B]),
        ([A, A], [A, A, B]),
        ([A, B, A, B, B], []),
        ([B], []),
        ([A, B, A, B, B, EOS], []),
    ]:
        assert matcher.forced([B, *text], 9) == tokens
        assert matcher.forced([B, *text], 2) == tokens[:2]


# ---- JSON ----------------------------------------------------------------------------------------


TERM = {"type": "integer", "minimum": -9, "maximum": 999}
SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["a", "b c", 1, -2, None, True, "\u00e9"]},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": TERM, "maxItems": 2}]},
    {"type": "object", "properties": {"a": TERM, "b": {"type": "boolean"}, "c": {"enum": [1]}},
     "required": ["b"], "additionalProperties": False},
]  # fmt: skip


def test_texts_of_schemas_are_valid() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    chain = ps.Chain([tiny.path(name) for name in ("target", "drafter")], [3])
    prompt, schemas, ended = tokenizer("2 + 2 =")["input_ids"], SCHEMAS * 10, 0
    grammars = [ps.Grammar.json_schema(s, tokenizer, whitespace=False) for s in schemas]
    rules = [ps.LogitsRules(grammar=grammar) for grammar in grammars]
    batch = chain.batch(
        [prompt] * 50, 64, temperature=[0.0, 1.5] * 25, seed=list(range(50)), rules=rules
    )
    batch.complete()
    for schema, grammar, row in zip(schemas, grammars, batch.rows, strict=True):
        tokens = row.tokens[len(prompt) :]
        if tokens[-1] == tokenizer.eos_token_id:
            ended += 1
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            jsonschema.validate(json.loads(text), schema)
        else:
            assert grammar.for_request(0).masks(tokens, 1)[0] is not None
    assert ended > 45


# ---- the interface -------------------------------------------------------------------------------


def test_a_discriminator_excludes_the_other_branches() -> None:
    """As in pydantic's unions, in which it has a default and is not required."""
    tokenizer = letters('{}":,kabn1')
    branches = [
        {"properties": {"k": {"const": name}, "n": kind}, "required": ["n"], "type": "object"}
        for name, kind in (("a", {"type": "integer"}), ("b", {"const": "b"}))
    ]
    named = {"oneOf": [{"$ref": "#/$defs/0"}, branches[1]], "$defs": {"0": branches[0]}}
    grammar = ps.Grammar.json_schema(
        {**named, "discriminator": {"propertyName": "k"}}, tokenizer, whitespace=False
    )

    def accepts(text: str) -> bool:
        ids = tokenizer(text).input_ids
        matcher = grammar.for_request(0)
        masks = [matcher.masks(ids[:count], 1)[0] for count in range(len(ids) + 1)]
        wanted = [*ids, tokenizer.eos_token_id]
        return all(
            mask is not None and bool(mask[id // 32] >> id % 32 & 1)
            for mask, id in zip(masks, wanted, strict=True)
        )

    assert accepts('{"k":"a","n":1}')
    assert accepts('{"k":"b","n":"b"}')
    for text in ('{"k":"a","n":"b"}', '{"k":"b","n":1}', '{"n":1}'):
        assert not accepts(text)
    with pytest.raises(ValueError, match=r"branches of oneOf must exclude each other.* use anyOf"):
        ps.Grammar.json_schema(named, tokenizer)


def test_masks_are_of_the_text_behind_the_prompt() -> None:
    """Masks of the same text are computed once, and come back after a rollback."""
    matcher = GRAMMAR.for_request(2)
    both, ended, nothing = [0b011], [0b100], None
    first = matcher.masks([B, B, A, A], 4)
    assert [m if m is None else m.tolist() for m in first] == [None, both, both, [0b010]]
    assert all(a is b for a, b in zip(first, matcher.masks([B, B, A, A], 4), strict=True))
    for text, last in [
        ([A, B], [0b101]),
        ([A, B, EOS], ended),  # nothing but EOS after an EOS, as often as it is asked for
        ([A, B, EOS, EOS], ended),
        ([A, B, EOS, A], nothing),
        ([A, EOS], nothing),
        ([A, A, A, B], nothing),
        ([A, A], [0b010]),
        ([], both),
    ]:
        (mask,) = matcher.masks([B, B, *text], 1)
        assert (mask if mask is None else mask.tolist()) == last


@pytest.mark.parametrize("more", [{}, {"bad_words": [[2, 2]]}], ids=["alone", "rules"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_dead_end_of_the_grammar_is_the_targets_alone(rule: str, more: dict[str, Any]) -> None:
    """No token is a "c", so none may follow "b"."""
    grammar = ps.Grammar.regex("(aa)+b?|a*bc", letters())
    rules = ps.LogitsRules(grammar=grammar, **more)
    matcher = grammar.for_request(0)
    for text, last in [
        ([B], [0]),
        ([A], [0b11]),
        ([A, B], [0]),
        ([A, A, B], [0b100]),
        ([], [0b11]),
    ]:
        assert matcher.masks(text, 1)[0].tolist() == last
        assert not matcher.forced(text, 3)
    levels = toy.make_levels(3, scale=0.25)
    levels[0].table[..., [B, EOS]] = -torch.inf
    for count in (2, 3):
        chain = ps.Chain(levels[:count], [3, 2][: count - 1], rule=rule)
        for seed in range(10):
            out = chain.generate(PROMPT, 6, 1.0, seed=seed, eos_token_id=[EOS], rules=rules)
            assert out.new_tokens[0] == [A] * 6
    levels[0].table[..., B], levels[0].table[..., A] = 9.0, -torch.inf
    with pytest.raises(ps.RequestError, match="llguidance") as caught:
        chain.generate(PROMPT, 6, 1.0, seed=0, eos_token_id=[EOS], rules=rules)
    assert (caught.value.level, caught.value.position) == (1, 3)
    assert set(pickle.loads(pickle.dumps(caught.value)).rules) == {"grammar"}


def test_a_grammar_serves_many_requests_and_other_vocabularies() -> None:
    """Matchers do not share a state; ids that the tokenizer lacks are forbidden."""
    grammar = ps.Grammar.lark('start: "a" "b"+', letters())
    one, other = grammar.for_request(0), grammar.for_request(0)
    assert one.masks([A, B], 1)[0].tolist() == [0b110]
    logits = torch.zeros(1, 40, dtype=torch.bfloat16)
    masked = other.apply(logits, torch.tensor([A]))
    assert masked.dtype == logits.dtype
    assert masked[0].isfinite().nonzero().flatten().tolist() == [B]
    assert not logits.any()
    assert one.masks([A, B], 1)[0].tolist() == [0b110]
    few = torch.zeros(1, 1)  # none of its ids is allowed
    assert other.apply(few, torch.tensor([A])).tolist() == [[-torch.inf]]


def test_an_id_that_ends_the_request_is_allowed_behind_a_complete_text_only() -> None:
    """Whether it is the tokenizer's or another, or an id of the text."""
    grammar = ps.Grammar.regex("ab+", letters())
    for eos, behind in [([EOS], 0b110), ([40], 1 << 40 | 0b10), ([B, 40], 1 << 40 | 0b10)]:
        matcher = grammar.for_request(0, eos)
        masks = [matcher.masks(text, 1)[0] for text in ([], [A], [A, B], [A, eos[-1]])]
        bits = [
            mask if mask is None else int.from_bytes(mask.tobytes(), "little") for mask in masks
        ]
        if B in eos:
            assert bits == [0b1, 0, None, None]
        else:
            assert bits == [0b1, 0b10, behind, None]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda t: ps.Grammar.regex("(", t), ValueError, "pattern: expected a valid grammar"),
        (lambda t: ps.Grammar.regex(3, t), TypeError, "pattern: expected a str, given 3"),
        (lambda t: ps.Grammar.regex("c", t), ValueError, "pattern: expected a grammar with a text"),
        (lambda t: ps.Grammar.lark("start: x", t), ValueError, "grammar: .* unknown name"),
        (lambda t: ps.Grammar.json_schema("{", t), ValueError, "schema: expected JSON"),
        (lambda t: ps.Grammar.json_schema([], t), TypeError, "schema: .* a mapping .* given list"),
        (
            lambda t: ps.Grammar.json_schema({"type": "what"}, t),
            ValueError,
            "schema: .* Invalid type: what",
        ),
        (lambda t: ps.Grammar.regex("a", "gpt2"), TypeError, "tokenizer: .* given 'gpt2'"),
        (lambda t: ps.Grammar.regex("a", t).for_request(-1), ValueError, "prompt_length"),
    ],
)
def test_errors(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(letters())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install polyspec_ext\[grammar\]"):
        ps.Grammar.json_object(letters())
