"""A chain inside `model.generate`: ``model.generate(..., custom_generate=custom_generate,
chain=chain)``, or attached to the model, so that every call of its `generate` runs the chain.

`generate` prepares configuration, processors, stopping criteria and padded prompts as usual, then
calls this module instead of its loop. Options that a chain cannot honour are refused by name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from .. import arguments
from .. import inputs as requests
from ..chain import Chain
from ..kv_cache import name_of
from ..levels.base import EncodedInput
from ..levels.products import without_wrapper
from ..stats import Stats
from .processors import Parts, TransformersProcessors, shown_scores, take_apart

if TYPE_CHECKING:
    from ..runtime.batch import Batch


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Output of `generate` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[B, N]`` int64: prompts, new tokens, padding.
        scores, logits: with ``output_scores`` and ``output_logits``, per new token ``[B, V]``
            float32; after the end of a row the padding id has probability 1.
        logprobs: ``[B, new]`` float32, log-probability of each new token under the target's
            distribution; NaN after the end of a row, and at temperature 0, where it is one-hot.
        stats: statistics of the batch.
        requests: statistics of each row.
        seeds: seed of each row, as in `Output`.
    """

    logprobs: torch.Tensor | None = None
    stats: Stats | None = None
    requests: list[Stats] | None = None
    seeds: list[int] | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: Any = None,
    *,
    chain: Chain | None = None,
    token_streamer: Any = None,
    seed: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    encoder_input_ids: requests.Tokenized | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateOutput:
    """Generate with `chain`, which has `model` as its target: the text of `model` alone with
    greedy decoding (up to ties), its distribution with sampling (but for ties at the edge of
    top-p: `take_apart`).

    `generate` calls it with the positional arguments of its decoding loop and, as
    ``model_kwargs``, those of the model's forward pass. Other arguments pass through `generate`.

    Args:
        model ... generation_config: as in `generate`'s decoding loop; `input_ids` are ``[B, P]``,
            padded on the left.
        chain: its target must be `model` itself.
        token_streamer: receives the same as the `streamer` of `generate`: the prompts ``[B, P]``,
            then ``[B]`` tokens per step, then the end. `streamer` itself works as well.
        seed: key of the draws, an integer s for ``ps.row_seeds(s, B)`` or a sequence with a seed
            per returned row, as in `Chain.generate`. None: a new seed for each call.
        stop_strings, tokenizer: as in `generate`, which does not pass them to a custom loop.
            Default tokenizer: the files beside the target's weights.
        encoder_input_ids: for encoder-decoder models, the encoder's input again: ids ``[1, S]``,
            or a mapping with input_ids. `generate` passes on only the output of the target's
            encoder, and every other level encodes the ids itself.

    Every level applies the processors (`TransformersProcessors`). Stopping criteria are checked
    row by row after every token, and rows end independently. The levels have separate caches, so
    `use_cache` and `cache_implementation` have no effect.

    Returns:
        Sequences ``[B, N]``, or a `GenerateOutput`.

    Raises:
        TypeError, ValueError: an option that a chain cannot honour; the message names it.
        RequestError: a row of logits has no distribution.
    """
    dropped = _dropped(inspect.currentframe())
    streamers = [s for s in (dropped.get("streamer"), token_streamer) if s is not None]
    for out in streamers:
        if not all(callable(getattr(out, name, None)) for name in ("put", "end")):
            raise TypeError(
                f"token_streamer: expected an object with put and end, given {arguments.shown(out)}"
            )
    try:
        for name in ("assistant_model", "synced_gpus"):
            if dropped.get(name):
                raise ValueError(
                    f"{name}: expected none beside a chain, whose own levels draft, given "
                    f"{arguments.shown(dropped[name])}"
                )
        target = require_chain(chain, model)
        assert chain is not None
        encoded = None
        if model.config.is_encoder_decoder:
            encoded = take_encoded(encoder_input_ids, model_kwargs)
        elif encoder_input_ids is not None:
            raise ValueError("encoder_input_ids: expected None with a decoder-only model")
        for name in _CACHES:
            if (dropped.get("kwargs") or {}).get(name) is not None:
                raise ValueError(
                    f"{name}: expected none with a chain, whose levels have caches of their own "
                    "and would leave it empty, given one; remove it"
                )
        require_supported(generation_config, model_kwargs)
        criteria = list(stopping_criteria or ())
        stops = arguments.strings("stop_strings", stop_strings)
        if stops:
            tokenizer = tokenizer if tokenizer is not None else target.tokenizer()
            if tokenizer is None:
                raise ValueError(
                    "stop_strings: expected a tokenizer beside the target's weights, given none; "
                    "pass stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]"
                )
            criteria.append(StopStringCriteria(tokenizer, stops))
        parts = take_apart(logits_processor or (), bool(generation_config.do_sample))
        padding, config = padding_of(input_ids, model_kwargs), generation_config
        run = _Run(chain, input_ids, padding, parts, criteria, config, seed, streamers, encoded)
        if token_streamer is not None:  # `generate` has put the prompts in its streamer
            token_streamer.put(input_ids.cpu())
        return run()
    finally:
        # Also after an error: a thread that reads from the streamer waits for the end.
        for out in streamers:
            out.end()


def _dropped(frame: types.FrameType | None) -> dict[str, Any]:
    caller = None if frame is None else frame.f_back
    if caller is None or caller.f_code.co_name != "generate":
        return {}
    theirs = str(caller.f_globals.get("__name__")).startswith("transformers.")
    return dict(caller.f_locals) if theirs else {}


class _Run:
    """A call of `custom_generate`: rows, new tokens and stopping criteria."""

    def __init__(
        self,
        chain: Chain,
        input_ids: torch.Tensor,
        padding: list[int],
        parts: Parts,
        criteria: list[Any],
        config: Any,
        seed: int | Sequence[int] | None,
        streamers: list[Any],
        encoded: EncodedInput | None,
    ) -> None:
        self.chain, self.parts, self.streamers = chain, parts, streamers
        self.as_dict = bool(config.return_dict_in_generate)
        self.with_scores = self.as_dict and bool(config.output_scores)
        self.with_logits = self.as_dict and bool(config.output_logits)
        count, self.width = input_ids.shape
        rows = [row[n:] for row, n in zip(input_ids.tolist(), padding, strict=True)]
        prompts = requests.prompts("input_ids", rows, chain.vocab_sizes[0])
        eos, limits = set[int](), list[int]()  # a caller's limit replaces the configuration's
        self.criteria: list[Any] = []  # which read single rows
        self.others: list[Any] = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                eos.update(criterion.eos_token_id.reshape(-1).tolist())
            elif type(criterion) is MaxLengthCriteria:
                limits.append(criterion.max_length)
            elif type(criterion) in (StopStringCriteria, MaxTimeCriteria):
                self.criteria.append(criterion)
            else:
                self.others.append(criterion)
        ids = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        self.pad = ids if ids is None or isinstance(ids, int) else ids[0]
        if self.pad is None and count > 1 and (eos or self.criteria or self.others):
            raise ValueError("pad_token_id: expected an id, as rows may end apart, given None")
        new = max(min(limits, default=config.max_length) - self.width, 1)
        self.ids = input_ids.new_full((count, self.width + new), self.pad or 0)
        self.ids[:, : self.width] = input_ids
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.scores: list[list[torch.Tensor]] = [[] for _ in prompts]  # per token [V]
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.streamed = self.asked = 0
        self.steps: list[torch.Tensor] = []  # scores [B, V] of the checked steps
        self.committed = [len(prompt) for prompt in prompts]
        self.processors = None
        if parts.processors:
            self.processors = TransformersProcessors(
                parts.processors,
                vocab_size=chain.vocab_sizes[0],
                padding=[row[:n] for row, n in zip(input_ids, padding, strict=True)],
                committed=self.committed,
                eos=frozenset(eos),
                keep=self.with_logits,
            )
        watched = self.with_scores or self.with_logits
        self.batch: Batch = chain.batch(
            prompts,
            new,
            **asdict(parts.sampling),
            seed=seed,
            # Configurations may name ids outside the vocabulary, or -1 for no id.
            eos_token_id=sorted(token for token in eos if 0 <= token < chain.vocab_sizes[0]),
            encoder_input_ids=encoded,
            processors=self.processors,
            observe=self._observe if watched else None,
        )

    def __call__(self) -> torch.Tensor | GenerateOutput:
        batch = self.batch
        try:
            while committed := batch.advance():
                for row, tokens in committed:
                    self._take(row, tokens)
                longest = max(map(len, self.texts))
                rows = zip(batch.rows, self.texts, strict=True)
                ready = min(longest if row.ended else len(text) for row, text in rows)
                if self.others:
                    self._ask(ready)
                    ready = self.asked
                for step in range(self.streamed, ready):
                    shown = [
                        text[step] if step < len(text) else self.pad or 0 for text in self.texts
                    ]
                    for streamer in self.streamers:
                        streamer.put(torch.tensor(shown))
                self.streamed = max(self.streamed, ready)
        finally:
            self.chain.owner.end(batch)
            if self.processors is not None:
                self.processors.given.clear()
        longest = max(map(len, self.texts))
        sequences = self.ids[:, : self.width + longest]
        if not self.as_dict:
            return sequences
        logprobs = torch.full((len(self.texts), longest), float("nan"), dtype=torch.float32)
        for number, text in enumerate(self.texts):
            if not batch.rows[number].request.sampling.greedy:
                found = batch.rows[number].logprobs[: len(text)]
                logprobs[number, : len(text)] = logprobs.new_tensor(found)

        scores, logits = (
            tuple(self._step(rows, step) for step in range(longest)) if shown else None
            for rows, shown in ((self.scores, self.with_scores), (self.logits, self.with_logits))
        )
        return GenerateOutput(
            sequences=sequences,
            scores=scores,
            logits=logits,
            logprobs=logprobs.to(sequences.device),
            stats=batch.stats,
            requests=[row.stats for row in batch.rows],
            seeds=batch.seeds,
        )

    def _take(self, row: int, tokens: list[int]) -> None:
        """Append committed tokens to a row, up to the first that meets one of `criteria`."""
        text, begin = self.texts[row], self.width + len(self.texts[row])
        self.ids[row, begin : begin + len(tokens)] = torch.tensor(tokens)
        text += tokens
        self.committed[row] += len(tokens)
        if self.criteria:
            for end in range(begin + 1, begin + len(tokens) + 1):
                ids = self.ids[row : row + 1, :end]
                if any(_met(criterion(ids, None), 1)[0] for criterion in self.criteria):
                    return self._cut(row, end - self.width)

    def _cut(self, row: int, length: int) -> None:
        over = len(self.texts[row]) - length
        del self.texts[row][length:]
        self.ids[row, self.width + length :] = self.pad or 0
        self.batch.end(self.batch.rows[row], over)

    def _ask(self, ready: int) -> None:
        """Check `others`, once per step with the whole batch as `generate` does, because they may
        read all rows or count their calls."""
        while self.asked < min(ready, max(map(len, self.texts))):
            step = self.asked
            if self.with_scores:
                self.steps.append(self._step(self.scores, step))
            ids = self.ids[:, : self.width + step + 1]
            scores = tuple(self.steps) or None
            met = [_met(criterion(ids, scores), len(self.texts)) for criterion in self.others]
            for row, text in enumerate(self.texts):
                if len(text) > step and any(row_met[row] for row_met in met):
                    self._cut(row, step + 1)
            self.asked += 1

    def _observe(self, row: int, logits: torch.Tensor) -> None:
        if self.with_scores:
            self.scores[row] += shown_scores(logits, self.parts).clone().unbind()
        if self.with_logits:
            raw = logits if self.processors is None else self.processors.given[row]
            self.logits[row] += raw[: len(logits)].float().clone().unbind()

    def _step(self, rows: list[list[torch.Tensor]], step: int) -> torch.Tensor:
        end = rows[0][0].new_full((self.chain.vocab_sizes[0],), -float("inf"))
        if self.pad is not None and 0 <= self.pad < len(end):
            end[self.pad] = 0
        pairs = zip(rows, self.texts, strict=True)
        shown = [row[step] if step < len(text) else end for row, text in pairs]
        return torch.stack(shown).to(self.ids.device)


def _met(answer: Any, rows: int) -> list[bool]:
    met = answer.reshape(-1).tolist() if isinstance(answer, torch.Tensor) else [answer]
    return [bool(flag) for flag in (met * rows if len(met) == 1 else met)]


# ---- options that a chain can honour -------------------------------------------------------------


def _model_inside(model: Any) -> Any:
    return without_wrapper(getattr(model, "_orig_mod", model))


def require_chain(chain: Any, model: PreTrainedModel) -> Any:
    """Return the target's level; it must run `model`."""
    if not isinstance(chain, Chain):
        raise TypeError(
            f"chain: expected a polyspec_ext.Chain whose target is {name_of(model)}, given "
            f"{type(chain).__name__}"
        )
    target: Any = chain.levels[0]
    target_model = getattr(target, "model", None)
    if getattr(target_model, "_orig_mod", target_model) is not _model_inside(model):
        raise ValueError(
            f"chain: expected {name_of(model)}, the very model that generate was called on, as its "
            f"target, given {'another ' if chain.names[0] == name_of(model) else ''}"
            f"{chain.names[0]}; build it as Chain([model, ...])"
        )
    return target


# Generation options that a chain cannot honour, and the test of their values.
REFUSED_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value > 1,
    "num_beam_groups": lambda value: value > 1,
    "penalty_alpha": lambda value: value > 0,
    "dola_layers": bool,
    "constraints": bool,
    "force_words_ids": bool,
    "prompt_lookup_num_tokens": bool,
    "assistant_early_exit": bool,
    "use_mtp": bool,
    "speculation_type": bool,
    "is_assistant": bool,
    "output_attentions": bool,
    "output_hidden_states": bool,
    "cache_implementation": lambda value: value == "quantized",
}
_CACHES = ("cache", "past_key_values")  # names in transformers 5.24 and before
# Arguments of the model's forward pass that `generate` prepares and a chain needs or may ignore.
_KNOWN = {
    "attention_mask", "position_ids", *_CACHES, "cache_position", "use_cache", "logits_to_keep",
}  # fmt: skip


def require_supported(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse options that a chain cannot honour (ValueError)."""
    for name, is_set in REFUSED_OPTIONS.items():
        value = getattr(config, name, None)
        if value is not None and is_set(value):
            raise ValueError(
                f"{name}: expected its default with a chain, which cannot honour it, given {value}"
            )
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name}: expected none with a chain, whose levels have caches of their own, "
                f"given a {type(cache).__name__}"
            )
    for name, value in model_kwargs.items():
        # Models of images and text receive an empty dict without an image.
        absent = value is None or value is False or (isinstance(value, Mapping) and not value)
        if name not in _KNOWN and not absent:
            raise ValueError(
                f"{name}: expected token ids and their attention_mask only, which is what every "
                f"level of a chain reads, given a {type(value).__name__}"
            )


def take_encoded(encoder_input_ids: Any, model_kwargs: dict[str, Any]) -> EncodedInput:
    """Remove the encoder's outputs from `model_kwargs`, and return them with the ids, which must
    have their shape (TypeError, ValueError)."""
    name = "encoder_input_ids"
    states = model_kwargs.pop("encoder_outputs")[0]
    mask = model_kwargs.pop("attention_mask", None)
    shape = list(states.shape[:2])
    ids, _ = requests.unwrapped(name, encoder_input_ids)
    rows = [] if ids is None else requests.rows_of(name, ids)
    widths = [len(row) for row in rows]
    if widths != [shape[1]] * shape[0]:
        described = f"rows of {widths}" if rows else "None"
        raise ValueError(
            f"{name}: expected the ids that generate was given to encode, of shape {shape}, for "
            f"the other levels' encoders, given {described}"
        )
    return EncodedInput(torch.tensor(rows), mask, states)


def padding_of(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return the number of padding ids on the left of each row. ValueError: padding elsewhere, or
    positions that do not follow from the padding."""
    batch, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    column = torch.arange(width, device=input_ids.device)
    if mask is None:
        sizes = torch.zeros(batch, 1, dtype=torch.int64, device=input_ids.device)
    else:
        seen = mask.to(input_ids.device) != 0
        sizes = width - seen.sum(1, keepdim=True)
        wrong = (seen != (column >= sizes)).any(1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                "attention_mask: expected padding on the left of a prompt only, given "
                f"{mask[row].tolist()} in row {row}"
            )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (column - sizes).clamp_min(0)
        numbers = positions.to(input_ids.device)
        # Models of images and text have several planes, equal for plain text.
        if numbers.shape[-1] != width or ((numbers != expected) & (column >= sizes)).any():
            raise ValueError(
                "position_ids: expected 0, 1, 2, ... from the first token of each prompt, which "
                f"is what a chain's levels use, given {positions.tolist()}"
            )
    return [int(size) for size in sizes[:, 0].tolist()]


# ---- chains attached to models -------------------------------------------------------------------


class Attachment:
    """A chain attached to a model; as a context manager, until the end of the block."""

    def __init__(self, model: PreTrainedModel, chain: Chain) -> None:
        require_chain(chain, model)
        self.model: Any = _model_inside(model)
        self.chain = chain
        attached = _attached(self.model)
        if not attached:
            self.model.generate = _generate_with(attached, self.model)
        attached.append(self)

    def detach(self) -> None:
        """Detach the chain: restore `generate`, or run the chain that was attached before."""
        attached = _attached(self.model)
        if self in attached:
            attached.remove(self)
            if not attached:
                before = self.model.generate.before
                del self.model.generate
                if before is not None:
                    self.model.generate = before

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: PreTrainedModel, chain: Chain) -> Attachment:
    """Make `model.generate` run `chain`, for pipelines and other callers too:
    ``generate(..., custom_generate=custom_generate, chain=chain)`` without a change of the call.
    `streamer`, `tokenizer` and `stop_strings` work as usual. Copies of the model are not attached.

    Args:
        model: the target of `chain`. The chain attached last runs.

    Returns:
        The attachment. Its `detach`, its end as a context manager, and `detach` undo it.

    Raises:
        TypeError, ValueError: `chain` is not a chain, or its target is another model.
    """
    return Attachment(model, chain)


def detach(model: PreTrainedModel) -> None:
    """Detach the chain that was attached last. ValueError: no chain is attached to `model`."""
    attached = _attached(_model_inside(model))
    if not attached:
        raise ValueError("model: expected one with an attached chain, given one without")
    attached[-1].detach()


class _NoStopStrings(GenerationConfig):  # type: ignore[misc]
    """A configuration without stop strings: for them `generate` requires a tokenizer, which it
    does not pass to a custom loop."""

    stop_strings = property(lambda _: None, lambda *_: None)


def _stop_strings_of(model: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the stop strings configured for a call, and the arguments of `generate` without
    them."""
    config = options.get("generation_config")
    stops = getattr(config, "stop_strings", None) or model.generation_config.stop_strings
    if stops:
        options = dict(options)
        if config is None:  # `generate` warns of a configuration beside arguments
            config = GenerationConfig()
            options = config.update(**options)
        config = copy.deepcopy(config)
        vars(config).pop("stop_strings", None)
        config.__class__ = _NoStopStrings
        options["generation_config"] = config
    return stops, options


def _attached(model: Any) -> list[Attachment]:
    attached: list[Attachment] = getattr(vars(model).get("generate"), "attached", [])
    return attached


def _generate_with(attached: list[Attachment], owner: Any) -> types.MethodType:
    """Return a method `generate` of `owner` that runs the last attached chain."""
    plain = owner.generate
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if self is not owner:  # a copy of the model, which has copied its attributes
            return type(self).generate(self, *args, **options)
        if not attached or options.get("custom_generate") is not None:
            return plain(*args, **options)
        # transformers does not pass its streamer and tokenizer to a custom loop.
        extra: dict[str, Any] = {"chain": attached[-1].chain, "tokenizer": options.get("tokenizer")}
        options = {**signature.bind_partial(*args).arguments, **options}
        if "stop_strings" not in options:
            extra["stop_strings"], options = _stop_strings_of(self, options)
        if self.config.is_encoder_decoder:
            ids = options.get("input_ids", options.get("inputs"))
            options = {"encoder_input_ids": ids, **options}
        return plain(**{**options, "custom_generate": functools.partial(custom_generate, **extra)})

    generate.attached, generate.before = attached, vars(owner).get("generate")  # type: ignore[attr-defined]
    return types.MethodType(generate, owner)
