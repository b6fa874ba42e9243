"""A chain behind `model.generate`: ``model.generate(..., custom_generate=custom_generate,
chain=chain)``.

`generate` prepares what it always prepares (configuration, processors, stopping criteria, padded
inputs) and hands it here instead of to its own loop. What a chain cannot honour is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from .. import arguments
from .. import inputs as requests
from ..levels.base import EncodedInput
from ..stats import Stats
from .processors import Parts, TransformersProcessors, shown_scores, take_apart
from .transformers_checks import padding_of, require_chain, require_supported, take_encoded

if TYPE_CHECKING:
    from ..chain import Chain
    from ..runtime.batch import Batch


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[B, N]`` int64, prompts as given, then new tokens, then padding.
        scores, logits: with ``output_scores`` and ``output_logits``, per new token ``[B, V]``
            float32; behind the end of a row the padding has all probability.
        logprobs: ``[B, new]`` float32, log-probability of each new token under the target's
            distribution; NaN behind the end of a row.
        stats: of the batch.
        requests: statistics of each row.
        seeds: of each row, as of `Output`.
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
    """Generates with `chain`, whose target is `model`, what `model` alone would: the same text
    greedily (up to ties), the same distribution when sampling (but for ties at the edge of top-p:
    `take_apart`).

    Called by `generate`, which gives it the positional arguments of its own loop and, as
    ``model_kwargs``, what it would call the model with. The others are passed through `generate`.

    Args:
        model ... generation_config: those of `generate`'s own loop; `input_ids` are ``[B, P]``,
            padded on the left.
        chain: its target must be `model` itself.
        token_streamer: is given what the `streamer` of `generate` is given: the prompts ``[B, P]``,
            then ``[B]`` tokens a step, then its end.
        seed: keys the draws; one value s for B rows stands for ``ps.row_seeds(s, B)`` as for
            `Chain.generate`, or one per returned row. None: another one each call, as there.
        stop_strings, tokenizer: as of `generate`, which keeps them from a custom loop: without a
            tokenizer, the one beside the target's weights is used.
        encoder_input_ids: of an encoder-decoder model, once more what `generate` was given to
            encode, ``[1, S]``, or a mapping with input_ids: it hands on only what the target's
            encoder made of it, and every other level encodes it with its own.

    Processors are applied on every level (`TransformersProcessors`), stopping criteria asked row by
    row after every token. A row ends where its criterion is met, whatever the others do. The
    chain's levels have caches of their own: `use_cache` and `cache_implementation` are moot.

    `generate` keeps its own `streamer`, `assistant_model` and `synced_gpus` from a custom loop:
    they have no effect, and such a streamer never ends.

    Returns:
        Sequences ``[B, N]``, or a `GenerateOutput`.

    Raises:
        TypeError, ValueError: something that a chain cannot honour; names it.
        RequestError: a row of logits has no distribution.
    """
    if token_streamer is not None and not all(
        callable(getattr(token_streamer, name, None)) for name in ("put", "end")
    ):
        raise TypeError(
            "token_streamer: expected an object with put and end, given "
            f"{arguments.shown(token_streamer)}"
        )
    try:
        target = require_chain(chain, model)
        assert chain is not None
        encoded = None
        if model.config.is_encoder_decoder:
            encoded = take_encoded(encoder_input_ids, model_kwargs)
        elif encoder_input_ids is not None:
            raise ValueError("encoder_input_ids: expected None with a decoder-only model")
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
        run = _Run(
            chain,
            input_ids,
            take_apart(logits_processor or (), bool(generation_config.do_sample)),
            criteria,
            generation_config,
            model_kwargs,
            seed,
            token_streamer,
            encoded,
        )
        return run()
    finally:
        # Also after an error, or who reads from the streamer in another thread waits for ever.
        if token_streamer is not None:
            token_streamer.end()


class _Run:
    """One call: the rows, what was generated for them, and when they stop."""

    def __init__(
        self,
        chain: Chain,
        input_ids: torch.Tensor,
        parts: Parts,
        criteria: list[Any],
        config: Any,
        model_kwargs: dict[str, Any],
        seed: int | Sequence[int] | None,
        streamer: Any,
        encoded: EncodedInput | None,
    ) -> None:
        self.chain, self.parts, self.streamer = chain, parts, streamer
        self.as_dict = bool(config.return_dict_in_generate)
        self.with_scores = self.as_dict and bool(config.output_scores)
        self.with_logits = self.as_dict and bool(config.output_logits)
        count, self.width = input_ids.shape
        padding = padding_of(input_ids, model_kwargs)
        rows = [own[n:] for own, n in zip(input_ids.tolist(), padding, strict=True)]
        prompts = requests.prompts("input_ids", rows, chain.vocab_sizes[0])
        eos, limit = self._sort(criteria, config)
        ids = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        self.pad = ids if ids is None or isinstance(ids, int) else ids[0]
        if self.pad is None and count > 1 and (eos or self.criteria):
            raise ValueError("pad_token_id: expected an id, as rows may end apart, given None")
        new = max(limit - self.width, 1)
        self.ids = input_ids.new_full((count, self.width + new), self.pad or 0)
        self.ids[:, : self.width] = input_ids
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.scores: list[list[torch.Tensor]] = [[] for _ in prompts]  # per token [V]
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.streamed = 0
        if streamer is not None:
            streamer.put(input_ids.cpu())
        self.committed = [len(prompt) for prompt in prompts]
        self.processors = None
        if parts.processors:
            self.processors = TransformersProcessors(
                parts.processors,
                vocab_size=chain.vocab_sizes[0],
                padding=[row[:n] for row, n in zip(input_ids, padding, strict=True)],
                prompts=self.committed,
                eos=[eos] * count,
                keep=self.with_logits,
                committed=self.committed,
            )
        watched = self.with_scores or self.with_logits
        self.batch: Batch = chain.batch(
            prompts,
            new,
            **asdict(parts.sampling),
            seed=seed,
            # Configurations name ids that the vocabulary does not have, or -1 for none.
            eos_token_id=sorted(token for token in eos if 0 <= token < chain.vocab_sizes[0]),
            encoder_input_ids=encoded,
            processors=self.processors,
            observe=self._observe if watched else None,
        )

    def _sort(self, criteria: list[Any], config: Any) -> tuple[frozenset[int], int]:
        """EOS ids and longest length, padding included; what else there is becomes `criteria`."""
        eos: set[int] = set()
        limits: list[int] = []  # a criterion given by hand replaces that of the configuration
        self.criteria: list[Any] = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                eos.update(criterion.eos_token_id.reshape(-1).tolist())
            elif type(criterion) is MaxLengthCriteria:
                limits.append(criterion.max_length)
            else:
                self.criteria.append(criterion)
        return frozenset(eos), min(limits, default=config.max_length)

    def __call__(self) -> torch.Tensor | GenerateOutput:
        batch = self.batch
        try:
            while committed := batch.advance():
                for row, tokens in committed:
                    self._take(row, tokens)
                if self.streamer is not None:
                    self._stream()
        finally:
            self.chain.owner.end(batch)
            if self.processors is not None:
                self.processors.given.clear()
        longest = max(map(len, self.texts))
        sequences = self.ids[:, : self.width + longest]
        if not self.as_dict:
            return sequences
        logprobs = torch.full((len(self.texts), longest), float("nan"), dtype=torch.float32)
        for row, text in enumerate(self.texts):
            logprobs[row, : len(text)] = logprobs.new_tensor(batch.rows[row].logprobs[: len(text)])
        return GenerateOutput(
            sequences=sequences,
            scores=self._by_step(self.scores, longest) if self.with_scores else None,
            logits=self._by_step(self.logits, longest) if self.with_logits else None,
            logprobs=logprobs.to(sequences.device),
            stats=batch.stats,
            requests=[row.stats for row in batch.rows],
            seeds=batch.seeds,
        )

    def _take(self, row: int, tokens: list[int]) -> None:
        """Append what was committed, as far as no criterion is met."""
        text, begin = self.texts[row], self.width + len(self.texts[row])
        new = self.ids[row, begin : begin + len(tokens)]
        new.copy_(torch.tensor(tokens))
        for i, token in enumerate(tokens):
            text.append(token)
            if self.criteria and self._met(row, begin + i + 1):
                over = len(tokens) - i - 1
                new[i + 1 :] = self.pad or 0
                self.batch.stop(row)
                # Tokens that nobody gets are not counted as generated.
                own, whole = self.batch.rows[row].stats, self.batch.stats
                for stats in (own,) if own is whole else (own, whole):
                    stats.num_new_tokens -= over
                break
        self.committed[row] += len(tokens)

    def _met(self, row: int, length: int) -> bool:
        """Whether a criterion ends this row. Criteria that are not known may depend on the row's
        number: they see its text once for every row of the batch."""
        count, done = len(self.texts), False
        ids = self.ids[row : row + 1, :length]
        scores = tuple(one[None] for one in self.scores[row][: length - self.width])
        for criterion in self.criteria:  # all of them, as in `generate`: they may count
            if count == 1 or type(criterion) in (StopStringCriteria, MaxTimeCriteria):
                met, at = criterion(ids, scores or None), 0
            else:
                wide = tuple(one.expand(count, -1) for one in scores)
                met, at = criterion(ids.repeat(count, 1), wide or None), row
            if isinstance(met, torch.Tensor):
                met = met.reshape(-1)[at if met.numel() > 1 else 0]
            done = done or bool(met)
        return done

    def _observe(self, row: int, logits: torch.Tensor) -> None:
        """The target's logits ``[e, V]`` behind e committed tokens."""
        if self.with_scores:
            self.scores[row] += shown_scores(logits, self.parts).clone().unbind()
        if self.with_logits:
            given = logits if self.processors is None else self.processors.given[row]
            self.logits[row] += given[: len(logits)].float().clone().unbind()

    def _by_step(self, rows: list[list[torch.Tensor]], longest: int) -> tuple[torch.Tensor, ...]:
        """One ``[B, V]`` per step, ordinary tensors on the device of the sequences."""
        end = rows[0][0].new_full((self.chain.vocab_sizes[0],), -float("inf"))
        if self.pad is not None and 0 <= self.pad < len(end):
            end[self.pad] = 0
        lengths = [len(text) for text in self.texts]
        return tuple(
            torch.stack(
                [own[i] if i < n else end for own, n in zip(rows, lengths, strict=True)]
            ).to(self.ids.device)
            for i in range(longest)
        )

    def _stream(self) -> None:
        """Hand on the tokens ``[B]`` of each step that every row has reached."""
        texts, longest = self.texts, max(map(len, self.texts))
        ready = min(
            longest if row.ended else len(text)
            for row, text in zip(self.batch.rows, texts, strict=True)
        )
        pad = self.pad or 0
        for at in range(self.streamed, ready):
            step = [text[at] if at < len(text) else pad for text in texts]
            self.streamer.put(torch.tensor(step))
        self.streamed = max(self.streamed, ready)
