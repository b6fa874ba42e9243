"""`Request`: a prompt with its parameters, checked once, where a caller passes them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from . import arguments, rooms
from .drafters.base import BatchedDrafter
from .levels.base import BatchedLevel, EncodedInput
from .sampling import RowProcessor, Sampling, fresh_seed, row_seeds

if TYPE_CHECKING:
    Rules = rooms.rules.LogitsRules | Sequence[rooms.rules.LogitsRules | None] | None

# Arguments of transformers' `generate` outside its configuration.
_OF_GENERATE = ("assistant_model", "generation_config", "logits_processor", "negative_prompt_ids",
                "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "synced_gpus",
                "token_streamer", "tokenizer")  # fmt: skip

# Parameters of transformers and their names here, beside the fields of `LogitsRules`.
_HERE = {
    "stop_strings": "stop=...",
    "num_return_sequences": "n=...",
    "bad_words_ids": "rules=ps.LogitsRules(bad_words=...)",
    "sequence_bias": "rules=ps.LogitsRules(logit_bias=...)",
}

# A value for all rows, or a value per row.
Ints = int | Sequence[int] | torch.Tensor
Floats = float | Sequence[float] | torch.Tensor
Prompt = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
Tokenized = Prompt | Mapping[str, Any]  # also the output of a tokenizer
Ends = int | Sequence[int] | Sequence[Sequence[int]]


class Parameters(TypedDict, total=False):
    """Parameters of requests, with the names, defaults and meanings of `Chain.generate`. Each is a
    value for all rows, or a value per row."""

    temperature: Floats | None
    top_k: Ints | None
    top_p: Floats | None
    min_p: Floats | None
    seed: Ints | None
    eos_token_id: Ends | None
    rules: Rules


@dataclass(frozen=True, slots=True)
class Request:
    """A request, checked: its prompt and parameters.

    Attributes:
        tokens: prompt, at least 1 id.
        max_new_tokens: maximum number of new tokens.
        sampling: temperature and filters.
        seed: in [0, 2**64).
        eos: ids that end the text.
        processors: logits processors of its rules, in the order of application.
        encoded: input of the encoder in a chain of encoder-decoder models.
        window_bound: maximum window; None: no bound.
    """

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    processors: Sequence[RowProcessor] = ()
    encoded: EncodedInput | None = None
    window_bound: int | None = None


def requests(
    prompts: Sequence[list[int]],
    max_new_tokens: Ints,
    options: Parameters,
    vocab_size: int,
    ends: Collection[int] = (),
    *,
    n: int = 1,
    encoded: EncodedInput | None = None,
) -> list[Request]:
    """Check the parameters of `prompts`, and return `n` requests for each of them.

    Args:
        prompts: of `prompts`.
        options: seeds have a value per request, others per prompt.
        vocab_size: exclusive upper bound of the ids.
        ends: ids that end a text without an `eos_token_id`.
        encoded: of every request.
    """
    count = len(prompts)
    limits = [
        arguments.integer("max_new_tokens", limit)
        for limit in arguments.per_row("max_new_tokens", max_new_tokens, count)
    ]
    values = cast("dict[str, Any]", options)
    by_row = {n: arguments.per_row(n, values[n], count) for n in Sampling.__slots__ if n in values}
    sampling = [Sampling(**{n: own[row] for n, own in by_row.items()}) for row in range(count)]
    eos_token_id = options.get("eos_token_id")
    eos = eos_sets(ends if eos_token_id is None else eos_token_id, count, vocab_size)
    rules = arguments.per_row("rules", options.get("rules"), count)
    rows = [row for row in range(count) for _ in range(n)]
    seeds = _seeds(options.get("seed"), [sampling[row] for row in rows])
    made = []
    for row, seed in zip(rows, seeds, strict=True):
        processors = _processors(rules[row], len(prompts[row]), eos[row], vocab_size)
        request = prompts[row], limits[row], sampling[row], seed, eos[row], processors, encoded
        made.append(Request(*request))
    return made


def _processors(
    rules: Any, num_prompt_tokens: int, eos: frozenset[int], vocab_size: int
) -> list[RowProcessor]:
    if rules is None:
        return []

    arguments.instance("rules", rules, rooms.rules.LogitsRules)
    return [rules.for_request(num_prompt_tokens, eos, vocab_size)] if rules.changes else []


def read(name: str, value: Any, mask: Any = None) -> tuple[list[list[int]], Any]:
    """Return the rows of a prompt or several (`rows_of`), or of a tokenizer's mapping, and the mask
    of their padding; the caller's `mask` takes precedence."""
    ids, mask = unwrapped(name, value, mask)
    return rows_of(name, ids), mask


def unwrapped(name: str, value: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return the ids and the mask of a tokenizer's mapping; the caller's `mask` takes precedence.
    Any other value is returned unchanged, with `mask`."""
    if not isinstance(value, Mapping):
        return value, mask
    if value.get("input_ids") is None:
        raise TypeError(
            f"{name}: expected token ids, or a mapping with input_ids as a tokenizer gives it, "
            f"given a mapping of {', '.join(map(str, value)) or 'nothing'}"
        )
    return value["input_ids"], value.get("attention_mask") if mask is None else mask


def refuse(call: Callable[..., Any], options: Mapping[str, Any], lacks: Sequence[str] = ()) -> None:
    """Refuse arguments that `call` does not have; it has `Parameters`, except for `lacks`. Name the
    first, and the call that takes it or a similar name."""
    known = [*inspect.signature(call).parameters, *Parameters.__annotations__]
    known = [name for name in dict.fromkeys(known) if name not in ("others", "options", *lacks)]
    others = [name for name in options if name not in known]
    if not others:
        return
    from transformers import GenerationConfig

    name = others[0]
    near = difflib.get_close_matches(name, known, 1, 0.8)
    hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(known)}"
    rules = fields(rooms.rules.LogitsRules) if rooms.has("rules") else ()
    here = _HERE | {rule.name: f"rules=ps.LogitsRules({rule.name}=...)" for rule in rules}
    if here.get(name, "").partition("=")[0] in known:
        hint = f"; here {here[name]}"
    elif name in _OF_GENERATE or hasattr(GenerationConfig(), name):
        taken = "token_streamer" if name == "streamer" else name
        hint = (
            f"; model.generate(..., custom_generate=ps.custom_generate, chain=chain, {taken}=...) "
            "takes it"
        )
        if name == "do_sample":
            hint += "; here temperature=0 is greedy, and any other samples"
    raise TypeError(
        f"{name}: expected no such argument of {call.__qualname__}, given "
        f"{arguments.shown(options[name])}{hint}"
    )


_ROWS = "expected token ids of one prompt, or one such row for each of several"


def rows_of(name: str, value: Any) -> list[list[int]]:
    """Return a prompt or several, in a container of `arguments`, as rows of ids with padding."""
    _refuse_others(name, value)
    entries = arguments.entries(name, value)
    if entries is None:
        raise TypeError(f"{name}: {_ROWS}, given {arguments.shown(value)}")
    if not entries and getattr(value, "ndim", 1) == 2:
        raise ValueError(f"{name}: expected at least 1 prompt, given 0")
    rows = [None if type(entry) is int else arguments.entries(name, entry) for entry in entries]
    several = [row for row in rows if row is not None]
    if several and len(several) < len(rows):
        raise TypeError(f"{name}: {_ROWS}, given ids and rows side by side")
    return [arguments.integers(name, row) for row in several or [entries]]


def _refuse_others(name: str, value: Any) -> None:
    """Refuse texts, and arrays of other types or shapes than rows of ids."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        shown = repr(value) if isinstance(value, str) else "texts"
        hint = "tokenizer(text).input_ids has them"
        raise TypeError(f"{name}: {_ROWS}, given {shown:.60}; {hint}")
    if isinstance(value, torch.Tensor) and (
        value.dtype.is_floating_point or value.dtype == torch.bool
    ):
        raise TypeError(f"{name}: expected an integer dtype, given {value.dtype}")
    if hasattr(value, "__array__") and value.ndim not in (1, 2):
        raise ValueError(f"{name}: expected shape [N] or [B, N], given {list(value.shape)}")


def prompts(
    name: str,
    rows: Sequence[list[int]],
    vocab_size: int,
    attention_mask: Any = None,
    padding: int | None = None,
) -> list[list[int]]:
    """Check the ids of `rows_of`, and return them without padding. Without a mask, ids `padding` at
    the ends of rows of equal length are padding, as `generate` of transformers takes them."""
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    elif padding is not None and len(set(map(len, rows))) == 1:
        rows = [_stripped(row, padding) for row in rows]
    for row in rows:
        if not row:
            raise ValueError(f"{name}: expected at least 1 token, given 0")
        arguments.require_ids(name, row, vocab_size)
    return list(rows)


def _stripped(row: list[int], padding: int) -> list[int]:
    text = [i for i, token in enumerate(row) if token != padding]
    return row[text[0] : text[-1] + 1] if text else row


def _unpadded(rows: Sequence[list[int]], mask: Any) -> list[list[int]]:
    name = "attention_mask"
    entries = arguments.entries(name, mask)
    if entries is None:
        raise TypeError(
            f"{name}: expected 0 and 1 in the shape of input_ids, given {arguments.shown(mask)}"
        )
    masks = [row for row in (arguments.entries(name, bits) for bits in entries) if row is not None]
    shape = [len(row) for row in masks or [entries]]
    if len(masks) not in (0, len(entries)) or shape != [len(row) for row in rows]:
        raise ValueError(
            f"{name}: expected the shape of input_ids, rows of {[len(row) for row in rows]} "
            f"tokens, given rows of {shape}"
        )
    texts = []
    for row, bits in zip(rows, masks or [entries], strict=True):
        seen = [i for i, bit in enumerate(bits) if arguments.bit(name, bit)]
        if seen and seen[-1] - seen[0] + 1 != len(seen):
            raise ValueError(f"{name}: expected padding at the ends of a row, given a gap")
        texts.append([row[i] for i in seen])
    return texts


def encoded(given: Any, wanted: bool, name: str) -> EncodedInput | None:
    """Return the encoder's input for target `name`; `wanted`: it is an encoder-decoder model.
    `given` is an `EncodedInput`, a single text in a container of `rows_of`, or a mapping of
    `unwrapped` with a mask of the padding; None for any other target."""
    argument = "encoder_input_ids"
    if given is None and not wanted:
        return None
    if given is None or not wanted:
        kind = "an encoder-decoder model" if wanted else "a decoder-only model"
        raise ValueError(
            f"{argument}: expected {'what its encoder reads' if wanted else 'None'} with {name}, "
            f"{kind}, given {arguments.shown(given)}"
        )
    if isinstance(given, EncodedInput):
        return given
    rows, mask = read(argument, given)
    if len(rows) != 1 or not rows[0]:
        raise ValueError(f"{argument}: expected one text, given {len(rows) if rows[0] else 'none'}")
    return EncodedInput(torch.tensor(prompts(argument, rows, arguments.SIZE_MAX, mask)))


def _seeds(seed: Any, sampling: Sequence[Sampling]) -> list[int]:
    """Return a seed per row in [0, 2**64); from a single seed by `row_seeds`. None: a fresh seed,
    but 0 for a batch of greedy rows: they draw nothing, and torch's generator stays unchanged."""
    count = len(sampling)
    if seed is None:
        seed = 0 if all(row.greedy for row in sampling) else fresh_seed()
    if arguments.entries("seed", seed) is None:
        return row_seeds(seed, count)
    values = arguments.per_row("seed", seed, count)
    return [arguments.integer("seed", value, arguments.SEED_MAX) for value in values]


def eos_sets(ids: Any, count: int, vocab_size: int) -> list[frozenset[int]]:
    """Return the ids that end each row's text, in [0, vocab_size)."""
    name = "eos_token_id"

    def several(value: Any) -> list[Any] | None:
        return list(value) if isinstance(value, Set) else arguments.entries(name, value)

    entries = several(ids)
    if entries is None:
        entries = [ids]
    rows = [several(entry) for entry in entries]
    row_ids = [row for row in rows if row is not None]
    if not row_ids:
        return [frozenset(arguments.token_ids(name, entries, vocab_size))] * count
    if len(row_ids) < len(rows):
        raise TypeError(f"{name}: expected an id, ids, or ids for each prompt, given a mixture")
    row_ids = arguments.per_row(name, row_ids, count)
    return [frozenset(arguments.token_ids(name, row, vocab_size)) for row in row_ids]


def require_batches(
    names: Sequence[str], parts: Sequence[BatchedLevel | BatchedDrafter], count: int
) -> None:
    """Refuse several prompts if a level or the drafter reads a single prompt at a time."""
    for name, member in zip(names, parts, strict=True):
        if count > 1 and not member.capabilities.batches:
            reason = getattr(member, "one_at_a_time", "it serves one at a time")
            raise ValueError(f"{name}: expected one prompt, given {count}; {reason}")


def require_room(
    names: Sequence[str], parts: Sequence[BatchedLevel | BatchedDrafter], request: Request
) -> None:
    """Refuse a prompt and new tokens that exceed the context of a level or the drafter."""
    prompt, new = len(request.tokens), request.max_new_tokens
    for name, member in zip(names, parts, strict=True):
        if member.max_length is not None and prompt + new > member.max_length:
            reason = getattr(getattr(member, "level", member), "why_no_longer", None)
            raise ValueError(
                f"{name}: expected at most {member.max_length} tokens in its context"
                f"{f' ({reason})' if reason else ''}, given a prompt of {prompt} and "
                f"max_new_tokens={new}"
            )
