"""The methods of a run: what the words of ``--methods`` stand for, and the calls that decode.

All but transformers' own are chains of the same engine; a key is the names of the levels below the
target with + between, the dearest first, and what chooses their windows in front of a colon:
``w4+drafter``, ``joint:middle+drafter``, ``cascade:middle+drafter``.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.generation_calls import Answer, Decode, Request, chain_call, generate_call
from polyspec_ext import tiny
from polyspec_ext.chain import Chain
from polyspec_ext.drafters.proposals import cut_at_eos
from polyspec_ext.policies import POLICIES
from polyspec_ext.runtime.plan import default_rounds

from .parts import AS_CHAIN, HEADS, TARGET, W4, WORDS, Parts, Places

PLAIN, COMPILED = "plain", "plain-compiled"
GENERATE, STATIC, ASSISTED = "generate", "generate-static", "assisted"
PLANNED, CASCADE = "planned", "cascade"
ENGINE, USER = "engine", "user"  # the kinds of another engine's methods, and of the user's
_ONE_AT_A_TIME = (ENGINE, ASSISTED)  # kinds that answer one prompt in a call
CASCADE_ROUNDS = 2  # of each level but the lowest, before the level above verifies
_LOOKUP_WINDOW = 8
# Names that a draft model cannot have.
RESERVED = (
    PLAIN, COMPILED, GENERATE, STATIC, ASSISTED, PLANNED, CASCADE, TARGET, W4, *WORDS,
    *HEADS, *(head + AS_CHAIN for head in HEADS),
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """One way to decode, as ``run.json`` has it.

    Attributes:
        name: its key.
        label: for tables.
        kind: "plain", "generate", "assisted", "chain" (of levels and drafters without hidden
            states), "eagle" (a head alone below the target), "adaptive", "planned", "cascade",
            "engine" (another engine's) or "user" (the user's).
        levels: names, target first; for "assisted" the target and its assistant.
        windows, rounds, rule, tail: of the chain (`Chain`); None where it has none.
        tree: of a head that drafts trees.
        policy: that chooses the windows.
        baseline: whether speedups are over it.
        plain: key of the method whose greedy texts are compared with these; None: the baseline.
    """

    name: str
    label: str
    kind: str
    levels: tuple[str, ...]
    windows: tuple[int, ...] | None = None
    rounds: tuple[int, ...] | None = None
    rule: str = "token"
    tail: int = 0
    tree: dict[str, int] | None = None
    policy: str | None = None
    baseline: bool = False
    plain: str | None = None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Method:
        """From ``run.json``."""
        lists = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        return cls(**{**given, **lists})


def default_keys(places: Places, compile: bool, on_cpu: bool, batch: int = 1) -> list[str]:
    """A set of methods worth comparing with these models, which can answer so many prompts."""
    models, heads = list(places.models), list(places.heads)
    keys = [PLAIN, *([COMPILED] if compile else []), GENERATE, *([] if on_cpu else [STATIC])]
    if models and batch == 1:
        keys.append(ASSISTED)
    keys += [*models, *heads, "prompt-lookup", "suffix", W4]
    last = models[-1] if models else "prompt-lookup"
    keys.append(f"{W4}+{last}")
    keys += [f"{W4}+{head}" for head in heads[:1]]
    if len(models) > 1:
        keys += ["+".join(models), "+".join((W4, *models))]
    three = "+".join(models) if len(models) > 1 else f"{W4}+{last}"
    own = [f"online:{last}", f"joint:{three}", f"{CASCADE}:{three}", PLANNED]
    return [*keys, *own, *places.functions, *(places.variants if batch == 1 else ())]


def read_keys(
    keys: Sequence[str],
    places: Places,
    *,
    on_cpu: bool = True,
    compile: bool = False,
    batch: int = 1,
) -> list[Method]:
    """The methods that keys stand for, with windows that suit most; the baseline is plain decoding,
    compiled where that is among them.

    Raises:
        ValueError: a key is none, stands there twice, or none of them decodes plainly; or a method
            cannot answer `batch` prompts in a call.
    """
    made = [_method(key, places, on_cpu) for key in keys]
    names = [method.name for method in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--methods: expected each method once, given {twice} again")
    found = [name for name in (COMPILED, PLAIN) if name in names]
    if not found:
        raise ValueError(f"--methods: expected {PLAIN} or {COMPILED} among them, given neither")
    if COMPILED in names and not compile:
        raise ValueError(f"--methods: expected {COMPILED} without --no-compile, given both")
    alone = next((m for m in made if m.plain not in (None, *names)), None)
    if alone is not None:
        raise ValueError(
            f"--methods: {alone.name}: expected {alone.plain} as well, whose texts its own are "
            "compared with, given it alone"
        )
    single = [method.name for method in made if method.kind in _ONE_AT_A_TIME]
    if batch > 1 and single:
        raise ValueError(
            f"--batch: expected 1 with {', '.join(single)}, which answers one prompt at a time, "
            f"given {batch}"
        )
    return [replace(method, baseline=method.name == found[0]) for method in made]


def _method(key: str, places: Places, on_cpu: bool) -> Method:
    alone = {
        PLAIN: ("plain decoding, eager", "plain"),
        COMPILED: (f"plain decoding, {'compiled' if on_cpu else 'captured'}", "plain"),
        GENERATE: ("transformers generate", "generate"),
        **({} if on_cpu else {STATIC: ("transformers generate, static cache", "generate")}),
    }
    if key in alone:
        return Method(key, *alone[key], (TARGET,))
    if key in places.functions:
        return Method(key, key, USER, (TARGET,))
    if key == PLANNED:
        return Method(key, "planned", PLANNED, (TARGET,), ())
    if key in places.variants:
        _, own = places.variants[key]
        below = ["draft"] if own.drafts else []
        return Method(key, own.label, ENGINE, (TARGET, *below), plain=own.plain)
    word, colon, rest = key.partition(":")
    if word == ASSISTED:
        name = rest or next(reversed(list(places.models)), "")
        if name not in places.models:
            raise _unknown(key, places)
        return Method(key, f"transformers assisted: {name}", ASSISTED, (TARGET, name))
    if colon and word not in POLICIES and word != CASCADE:
        raise _unknown(key, places)
    levels = (TARGET, *(rest if colon else key).split("+"))
    names, drafters = levels[1:], places.drafters
    if any(name not in places.names for name in names) or len({*names}) < len(names):
        raise _unknown(key, places)
    if any(name in drafters for name in names[:-1]):
        raise ValueError(f"--methods: {key}: expected {', '.join(drafters)} last of the levels")
    made = _chain(key, levels, places)
    if not colon:
        return made
    if word == CASCADE:
        if len(levels) < 3:
            raise ValueError(f"--methods: {key}: expected at least three levels, given two")
        return _cascade(made)
    return replace(made, label=f"{word}: {made.label}", kind="adaptive", policy=word)


def _unknown(key: str, places: Places) -> ValueError:
    return ValueError(
        f"--methods: expected {PLAIN}, {COMPILED}, {GENERATE}, {STATIC} (CUDA), {ASSISTED}:NAME, "
        f"{PLANNED}, {', '.join(places.variants) or 'an engine that is given'}, or names of "
        f"{', '.join(places.names)} with + between and perhaps a policy ({', '.join(POLICIES)} or "
        f"{CASCADE}) and a colon in front, given {key!r}"
    )


def _chain(key: str, levels: tuple[str, ...], places: Places) -> Method:
    label = " <- ".join(levels)
    head = levels[-1] in places.drafters and levels[-1] not in WORDS
    kind = "eagle" if len(levels) == 2 and head else "chain"
    tree = places.tree_of(levels[-1])
    shipped = places.target is None and places.times == 1
    windows = tiny.WINDOWS.get(levels) if shipped else None
    if windows is None:
        last = 4 if tree is None else tree.depth
        if levels[-1] in WORDS and len(levels) == 2:
            last = _LOOKUP_WINDOW
        windows = tuple(last + 4 * above for above in reversed(range(len(levels) - 1)))
    rounds = tuple(default_rounds(windows))
    if shipped:
        rounds = tiny.ROUNDS.get(levels, rounds)
    form = None if tree is None else tree._asdict()
    return Method(key, label, kind, levels, windows, rounds, tree=form)


def _cascade(made: Method) -> Method:
    """Cascade speculative drafting's vertical cascade (Chen et al. 2023): a level verifies so many
    blocks of the level below, however many of their tokens stand, before the level above does."""
    assert made.windows is not None
    windows = made.windows[-1:]
    for _ in made.windows[1:]:
        windows = (CASCADE_ROUNDS * (windows[0] + 1), *windows)
    label = f"cascade of {CASCADE_ROUNDS} rounds: {made.label}"
    rounds = (CASCADE_ROUNDS,) * (len(windows) - 1)
    return replace(made, label=label, kind=CASCADE, windows=windows, rounds=rounds)


def read_functions(given: Sequence[str]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the functions that ``--method NAME=FILE.py:FUNCTION`` names, by name.

    Raises:
        ValueError: another form, or a file without that function.
    """
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for text in given:
        name, _, where = text.partition("=")
        place, _, function = where.rpartition(":")
        wrong = f"--method: expected NAME=FILE.py:FUNCTION, given {text!r}"
        if name in (*RESERVED, *found) or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{wrong}, whose name is another's or not of letters and digits")
        if not Path(place).is_file():
            raise ValueError(f"{wrong}, with no such file")
        try:
            make = runpy.run_path(place, run_name=Path(place).stem).get(function)
        except Exception as error:
            raise ValueError(f"{wrong}, a file that fails: {error!r}") from error
        if not callable(make):
            raise ValueError(f"{wrong}, with no such function in the file")
        found[name] = make
    return found


def user_call(
    name: str, make: Callable[[Any, Any], Any], parts: Parts, eos: frozenset[int]
) -> Decode:
    """Return the call of a user's method.

    Args:
        make: of the target's model and its tokenizer; returns a function of a `Request` that
            returns the new tokens of each prompt. What follows an EOS or `max_new_tokens` is cut.
    """
    generate = make(parts.eager.model, parts.tokenizer)

    def call(request: Request) -> Answer:
        rows = [list(map(int, row)) for row in generate(request)]
        if len(rows) != len(request.prompts):
            raise ValueError(
                f"--method {name}: expected new tokens of {len(request.prompts)} prompts, given "
                f"{len(rows)} rows"
            )
        return Answer([cut_at_eos(row[: request.max_new_tokens], eos) for row in rows])

    return call


class Call:
    """A method ready to decode."""

    def __init__(self, method: Method, parts: Parts) -> None:
        self.method = method
        self._decode = _decode(method, parts)

    def answer(self, request: Request) -> Answer:
        """What is timed."""
        return self._decode(request)


def _decode(method: Method, parts: Parts) -> Decode:
    eos = frozenset(parts.eager.eos_token_ids)
    if method.kind == ENGINE:
        engine, _ = parts.places.variants[method.name]
        return engine.decoder(method.name, eos)
    if method.kind == USER:
        return user_call(method.name, parts.places.functions[method.name], parts, eos)
    if method.kind == "generate":
        return generate_call(parts.eager.model, eos, static=method.name == STATIC)
    if method.kind == ASSISTED:
        return generate_call(parts.eager.model, eos, parts.assistant(method.levels[1]))
    if method.name == PLAIN:
        return chain_call(Chain([parts.eager], graphs=None if parts.on_cpu else False))
    # (The compiled target is a chain of one level: where chains' steps are captured, its are too.)
    chain = Chain(
        [parts.thing(name) for name in method.levels],
        method.windows,
        rounds=method.rounds,
        rule=method.rule,
        tail=method.tail,
        policy=method.policy,
    )
    return chain_call(chain)
