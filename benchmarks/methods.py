"""The models of a run, and the methods of the keys of ``--methods``.

A key has the names of the levels below the target joined by +, the dearest first, after a policy
for their windows and a colon, if any: ``w4+drafter``, ``joint:middle+drafter``.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import Engine, Variant
from benchmarks.measuring import Answer, Decode, Request, chain_call, generate_call
from polyspec_ext import DynamicTree, Eagle, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.drafters import resolve
from polyspec_ext.drafters.proposals import cut_at_eos
from polyspec_ext.drafters.words import copy_prefix, original
from polyspec_ext.levels import HuggingFaceLevel, Options, load_model, tokenizer_at
from polyspec_ext.levels.models import num_parameters
from polyspec_ext.policies import POLICIES
from polyspec_ext.runtime.plan import default_rounds

TARGET, W4 = "target", "w4"
HEADS = EAGLE2, EAGLE3 = "eagle2", "eagle3"
AS_CHAIN = "-chain"  # suffix of an EAGLE head's name: drafts chains, not trees
WORDS = ("prompt-lookup", "suffix", "ngram")
PLAIN, CAPTURED = "plain", "plain-captured"
GENERATE, ASSISTED, PLANNED = "generate", "assisted", "planned"
ENGINE, USER = "engine", "user"  # kinds of another engine's methods, and of the user's
_LOOKUP_WINDOW = 8
# A pass of many tokens is dear on a CPU: a small tree.
_SHIPPED_TREE = DynamicTree(top_k=4, total_tokens=12)
_RESERVED = (
    PLAIN, CAPTURED, GENERATE, ASSISTED, PLANNED, TARGET, W4, *WORDS,
    *HEADS, *(head + AS_CHAIN for head in HEADS),
)  # fmt: skip
Make = Callable[[Any, Any], Callable[[Request], Any]]

_HUB = "meta-llama/"
# The papers' targets: model, EAGLE-2 head, template, tokens of the head's trees (SafeAILab's
# settings: fewer the dearer the target's passes are).
PRESETS = {
    "vicuna-7b": ("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", "vicuna", 60),
    "vicuna-13b": ("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE-Vicuna-13B-v1.3", "vicuna", 50),
    "llama2-7b": (f"{_HUB}Llama-2-7b-chat-hf", "yuhuili/EAGLE-llama2-chat-7B", "chat", 60),
    "llama2-70b": (f"{_HUB}Llama-2-70b-chat-hf", "yuhuili/EAGLE-llama2-chat-70B", "chat", 48),
    "llama3-8b": (
        f"{_HUB}Meta-Llama-3-8B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-8B", "chat", 60,
    ),
    "qwen2-7b": ("Qwen/Qwen2-7B-Instruct", "yuhuili/EAGLE-Qwen2-7B-Instruct", "chat", 60),
}  # fmt: skip


def require(names: Sequence[str]) -> list[str]:
    """Return the paths of models, or of the snapshots of model ids; keep the prefix ``w4:`` of a
    name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    paths, missing = [], dict[str, None]()
    for name in names:
        path = str(original(name))
        try:
            if not Path(path).exists():
                path = snapshot_download(path, local_files_only=True)
            paths.append(f"{copy_prefix(name)}{path}")
        except (LocalEntryNotFoundError, ValueError):  # (ValueError: not an id.)
            missing[path] = None
    if missing:
        raise ValueError(
            f"expected models on this machine, given none for {', '.join(missing)}; fetch them: "
            + " && ".join(f"hf download {name}" for name in missing)
        )
    return paths


@dataclass
class Models:
    """The models of a run, each loaded when it is first used."""

    target: str | Path | None = None  # directory or id; None: the shipped target
    drafts: Mapping[str, str | Path] = field(default_factory=dict)  # by name, the dearest first
    heads: Mapping[str, str | Path] = field(default_factory=dict)  # of `HEADS`, by name
    tree: DynamicTree | None = None  # of the heads; None: they draft chains
    depth: int = 6  # lowest window of a head with trees
    engines: Sequence[Engine] = ()
    functions: Mapping[str, Make] = field(default_factory=dict)  # the user's methods by name
    device: str = "cpu"
    dtype: torch.dtype | None = None  # None: each checkpoint's, or the fastest
    levels: dict[str, HuggingFaceLevel] = field(default_factory=dict, init=False)

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def drafters(self) -> list[str]:
        """Names of levels that can only be last: heads (with trees or as chains) and `WORDS`."""
        return [*self.heads, *(f"{name}{AS_CHAIN}" for name in self.heads), *WORDS]

    @property
    def names(self) -> list[str]:
        """Names of all levels that can be below the target."""
        return [W4, *self.drafts, *self.drafters]

    @property
    def variants(self) -> dict[str, tuple[Engine, Variant]]:
        """Engine and variant of the methods of other engines, by key."""
        return {v.key: (engine, v) for engine in self.engines for v in engine.variants}

    def tree_of(self, name: str) -> DynamicTree | None:
        """Return the tree of a head; None: the level drafts no trees."""
        return self.tree if name in self.heads else None

    @property
    def level(self) -> HuggingFaceLevel:
        """The target's level."""
        return self.draft(TARGET)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        try:
            return tokenizer_at(original(self.target or tiny.path(TARGET)))
        except ValueError as error:
            raise ValueError(f"--target: {error}") from error

    def draft(self, name: str) -> HuggingFaceLevel:
        """Return a level, or the 4-bit copy, as users have them."""
        if name not in self.levels:
            thing, dtype, above = self.drafts.get(name, name), self.dtype, list[Any]()
            if name == TARGET:
                thing = self.target or tiny.path(TARGET)
                if self.target is None and dtype is None and self.on_cpu:
                    dtype = torch.float32
            elif name == W4:
                above = [self.level]
            option = "--target" if name == TARGET else f"--draft {name}"
            self.levels[name] = load_level(thing, dtype, self.device, name=option, above=above)
            self.levels[name].name = name
        return self.levels[name]

    def element(self, name: str) -> Any:
        """Return an element of a chain; drafters are created anew, since they keep state."""
        if name not in self.drafters:
            return self.draft(name)
        if name in WORDS:
            drafter = load_level(name, name=name)
        else:
            path, tree = self.heads[name.removesuffix(AS_CHAIN)], self.tree_of(name)
            drafter = Eagle.from_pretrained(path, self.level, tree=tree, dtype=self._head_dtype)
        drafter.name = name
        return drafter

    @property
    def _head_dtype(self) -> torch.dtype:
        names = list(self.drafts)
        level = self.draft(names[-1]) if names and self.on_cpu else self.level
        dtype: torch.dtype = level.model.dtype
        return dtype

    def facts(self, methods: Sequence[Method]) -> Iterator[dict[str, Any]]:
        """Yield the models of methods for ``run.json``, without paths."""

        def shown(path: str | Path | None, name: str) -> str:
            if path is None or Path(path).parent == tiny.root():
                return f"shipped {TARGET if name == W4 else name}"
            folder = Path(original(path))
            return f"{copy_prefix(path)}{folder.name}" if folder.exists() else str(path)

        used = {method.levels[-1].removesuffix(AS_CHAIN) for method in methods}
        heads = dict.fromkeys(sorted(used & set(self.heads)), self.level)  # of the target's form
        for name, level in (self.levels | heads).items():
            model = self.level.model if name == W4 else level.model
            path = self.heads.get(name) or self.drafts.get(name) or self.target
            yield {
                "name": name,
                "place": shown(path, name),
                "parameters": None if name in heads else num_parameters(level),
                "dtype": str(self._head_dtype if name in heads else model.dtype)[6:],
            }


def load_level(
    thing: Any, dtype: Any = None, device: Any = None, *, name: str, above: Sequence[Any] = ()
) -> Any:
    """Load a model or drafter in its fastest form here; `name`: option in errors."""
    with progress.loading():
        return resolve(thing, Options(name, above, dtype, device, "auto"))


def shipped(**more: Any) -> Models:
    """Return the shipped models; missing heads are left out."""
    drafts = {name: tiny.path(name) for name in tiny.LEVELS[1:]}
    heads = {name: tiny.root() / name for name in tiny.HEADS if (tiny.root() / name).is_dir()}
    return Models(None, drafts, heads, _SHIPPED_TREE, 5, **more)


# ---- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A decoding method, in the format of ``run.json``.

    Its kind is "plain", "generate", "assisted", "chain" (of levels and drafters without hidden
    states), "eagle" (a head alone below the target), "adaptive", "planned", "engine" (another
    engine's) or "user" (the user's).
    """

    name: str  # its key
    label: str  # for tables
    kind: str
    levels: tuple[str, ...]  # target first; for "assisted" the target and its assistant
    windows: tuple[int, ...] | None = None  # with the next three, of the chain
    rounds: tuple[int, ...] | None = None
    rule: str = "token"
    tail: int = 0
    tree: dict[str, int] | None = None  # of a head that drafts trees
    policy: str | None = None
    baseline: bool = False  # speedups are relative to it
    plain: str | None = None  # key of the method with its reference texts; None: the baseline

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Method:
        """Return a method of ``run.json``."""
        lists = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        return cls(**{**given, **lists})


def default_keys(models: Models) -> list[str]:
    """Return keys of methods worth comparing with `models`."""
    drafts, heads = list(models.drafts), list(models.heads)
    last = drafts[-1] if drafts else "prompt-lookup"
    three = "+".join(drafts) if len(drafts) > 1 else f"{W4}+{last}"
    keys = [PLAIN, *[CAPTURED] * (not models.on_cpu), GENERATE, *drafts, *heads]
    keys += ["prompt-lookup", "suffix", W4, f"{W4}+{last}", *(f"{W4}+{x}" for x in heads[:1])]
    keys += ["+".join(drafts), "+".join((W4, *drafts))] if len(drafts) > 1 else []
    keys += [f"online:{last}", f"joint:{three}", PLANNED]
    return [*keys, *[ASSISTED] * bool(drafts), *models.variants]


def read_keys(keys: Sequence[str], models: Models) -> list[Method]:
    """Return the methods of keys, with generally suitable windows. The baseline is plain decoding,
    captured if among the keys."""
    methods = [_method(key, models) for key in keys]
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--methods: expected each method once, given {twice} again")
    baseline = next((name for name in (CAPTURED, PLAIN) if name in names), None)
    if baseline is None:
        raise ValueError(f"--methods: expected {PLAIN} or {CAPTURED} among them, given neither")
    alone = next((m for m in methods if m.plain not in (None, *names)), None)
    if alone is not None:
        expected = f"expected {alone.plain} as well, whose texts its own are compared with"
        raise ValueError(f"--methods: {alone.name}: {expected}, given it alone")
    return [replace(method, baseline=method.name == baseline) for method in methods]


def _method(key: str, models: Models) -> Method:
    simple = {
        PLAIN: ("plain decoding, eager", "plain"),
        GENERATE: ("transformers generate", "generate"),
        PLANNED: ("planned", PLANNED),
        **({} if models.on_cpu else {CAPTURED: ("plain decoding, captured", "plain")}),
        **{name: (name, USER) for name in models.functions},
    }
    if key in simple:
        return Method(key, *simple[key], (TARGET,))
    if key in models.variants:
        _, variant = models.variants[key]
        below = ["draft"] if variant.drafts else []
        return Method(key, variant.label, ENGINE, (TARGET, *below), plain=variant.plain)
    word, colon, rest = key.partition(":")
    if word == ASSISTED:
        name = rest or next(reversed(list(models.drafts)), "")
        if name in models.drafts:
            return Method(key, f"transformers assisted: {name}", ASSISTED, (TARGET, name))
    names = (rest if colon else key).split("+")
    known = (not colon or word in POLICIES) and set(names) <= set(models.names)
    if not known or len({*names}) < len(names):
        raise ValueError(
            f"--methods: expected {PLAIN}, {CAPTURED} (CUDA), {GENERATE}, "
            f"{ASSISTED}:NAME, {PLANNED}, {', '.join(models.variants) or 'an engine that is given'}"
            f", or names of {', '.join(models.names)} with + between and perhaps a policy "
            f"({', '.join(POLICIES)}) and a colon in front, given {key!r}"
        )
    if set(names[:-1]) & set(models.drafters):
        last = ", ".join(models.drafters)
        raise ValueError(f"--methods: {key}: expected {last} last of the levels")
    method = _chain(key, (TARGET, *names), models)
    if not colon:
        return method
    return replace(method, label=f"{word}: {method.label}", kind="adaptive", policy=word)


def _chain(key: str, levels: tuple[str, ...], models: Models) -> Method:
    last, tree = levels[-1], models.tree_of(levels[-1])
    windows = tiny.WINDOWS.get(levels) if models.target is None else None
    if windows is None:
        lowest = 4 if tree is None else models.depth
        if last in WORDS and len(levels) == 2:
            lowest = _LOOKUP_WINDOW
        windows = tuple(lowest + 4 * above for above in reversed(range(len(levels) - 1)))
    rounds = tuple(default_rounds(windows))
    if models.target is None:
        rounds = tiny.ROUNDS.get(levels, rounds)
    is_head = last in models.drafters and last not in WORDS
    kind = "eagle" if len(levels) == 2 and is_head else "chain"
    form = None if tree is None else tree_form(tree, windows[-1])
    return Method(key, " <- ".join(levels), kind, levels, windows, rounds, tree=form)


def tree_form(tree: DynamicTree, depth: int) -> dict[str, int]:
    """Return a tree in the format of ``run.json``."""
    return {"top_k": tree.top_k, "total_tokens": tree.total_tokens, "depth": depth}


def new_name(name: str, others: Collection[str], wrong: str) -> str:
    """Return a name of the user's for a draft or a method; `wrong` begins the error of a name of
    other characters, or of one in use."""
    if name in (*_RESERVED, *others) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{wrong}: {name!r} is another's name, or not of letters and digits")
    return name


def read_functions(given: Sequence[str]) -> dict[str, Make]:
    """Return the functions of ``--method NAME=FILE.py:FUNCTION`` by name."""
    functions: dict[str, Make] = {}
    for text in given:
        name, _, where = text.partition("=")
        path, _, function = where.rpartition(":")
        wrong = f"--method: expected NAME=FILE.py:FUNCTION, given {text!r}"
        new_name(name, functions, wrong)
        try:
            make = runpy.run_path(path, run_name=Path(path).stem).get(function)
        except Exception as error:
            raise ValueError(f"{wrong}, a file that fails: {error!r}") from error
        if not callable(make):
            raise ValueError(f"{wrong}, with no such function in the file")
        functions[name] = make
    return functions


def decoder(method: Method, models: Models) -> Decode:
    """Return the call of a method, which is timed."""
    level = models.level
    eos = frozenset(level.eos_token_ids)
    if method.kind == ENGINE:
        return models.variants[method.name][0].decoder(method.name, eos)
    if method.kind == USER:
        generate = models.functions[method.name](level.model, models.tokenizer)

        def answer(request: Request) -> Answer:
            rows, count = [list(map(int, row)) for row in generate(request)], len(request.prompts)
            if len(rows) != count:
                expected = f"expected new tokens of {count} prompts, given {len(rows)} rows"
                raise ValueError(f"--method {method.name}: {expected}")
            return Answer([cut_at_eos(row[: request.max_new_tokens], eos) for row in rows])

        return answer
    if method.kind == "generate":
        return partial(generate_call, level.model, eos)
    if method.kind == ASSISTED:
        name, dtype = method.levels[1], level.model.dtype
        assistant = models.draft(name).model
        if assistant.dtype != dtype:  # transformers computes with both in one
            with progress.loading():
                assistant = load_model(models.drafts[name], dtype, models.device)
        return partial(generate_call, level.model, eos, assistant=assistant)
    if method.name == PLAIN:
        return partial(chain_call, Chain([level], graphs=None if models.on_cpu else False))
    # (The captured target is a chain with a single level.)
    elements = [models.element(name) for name in method.levels]
    options: dict[str, Any] = {n: getattr(method, n) for n in ("rounds", "rule", "tail", "policy")}
    return partial(chain_call, Chain(elements, method.windows, **options))
