"""Rules that change logits by the text: penalties, biases, bad words, a least length, grammars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import arguments

if TYPE_CHECKING:
    from .grammar import Grammar, GrammarMatcher

_NEGATIVE = -float("inf")
_ANY = -1  # padding before a bad word: matches every token
_NONE = -2  # padding before a text: matches no token of a bad word


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """Rules for the logits of a request before temperature and filters, on every level, in this
    order: bias, repetition, frequency and presence, bad words, least length, grammar. Speculation
    keeps the resulting distribution.

    Args:
        repetition_penalty: in [0.01, 100]; 1 is off. Positive logits of the tokens of prompt and
            text are divided by it, negative logits multiplied (as in transformers). None: off, and
            in texts and chats the penalty of the model's file (`Chain.text_options`).
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens of the text, without
            the prompt (as in OpenAI's interface, like `frequency_penalty`).
        frequency_penalty: in [-2, 2]; subtracted once for each occurrence in the text.
        logit_bias: id -> number in [-100, 100], added to the logit of the id.
        bad_words: sequences of ids that must not occur, each as a whole, also across the end of
            the prompt. An end-of-text id alone is no bad word (as in transformers).
        min_new_tokens: minimum number of tokens before an end-of-text id. Stop strings end a text
            at any length.
        grammar: grammar of the text without the prompt.

    Raises:
        TypeError, ValueError: begins with the parameter's name.
    """

    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if value is not None or name != "repetition_penalty":
                object.__setattr__(self, name, arguments.between(name, value, low, high))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        least = arguments.integer("min_new_tokens", self.min_new_tokens)
        object.__setattr__(self, "min_new_tokens", least)
        if self.grammar is not None:
            from .grammar import Grammar

            arguments.instance("grammar", self.grammar, Grammar)

    @property
    def changes(self) -> bool:
        """Whether any rule is set."""
        off = None if self.repetition_penalty == 1 else self.repetition_penalty
        return replace(self, repetition_penalty=off) != LogitsRules()

    def for_request(
        self, prompt_length: int, eos: Collection[int], vocab_size: int
    ) -> RowRules | GrammarMatcher:
        """Return the rules as a processor of a request's logits; of a grammar alone, its matcher
        with allow-masks.

        Args:
            prompt_length: tokens of its prompt.
            eos: ids that end its text.
            vocab_size: vocabulary size of the target.

        Raises:
            ValueError: a bias or a bad word has an id outside the target's vocabulary.
        """
        if self.grammar is not None and not replace(self, grammar=None).changes:
            return self.grammar.for_request(prompt_length, eos)
        return RowRules(self, prompt_length, eos, vocab_size)


class RowRules:
    """`LogitsRules` of a request, as `LogitsRules.for_request` makes them."""

    def __init__(
        self, rules: LogitsRules, prompt_length: int, eos: Collection[int], vocab_size: int
    ) -> None:
        arguments.require_ids("logit_bias", list(rules.logit_bias), vocab_size)
        for word in rules.bad_words:
            arguments.require_ids("bad_words", word, vocab_size)
        self._rules, self._prompt_length, self._vocab_size = rules, prompt_length, vocab_size
        self._repeats = 1.0 if rules.repetition_penalty is None else rules.repetition_penalty
        self._matcher = None
        if rules.grammar is not None:
            self._matcher = rules.grammar.for_request(prompt_length, eos)
        self._eos = torch.tensor(sorted(eos), dtype=torch.int64)
        self._biased = torch.tensor(list(rules.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(rules.logit_bias.values()), dtype=torch.float32)
        words = [word for word in rules.bad_words if len(word) > 1 or word[0] not in eos]
        width = max(map(len, words), default=1) - 1
        fronts = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
        self._fronts = torch.tensor(fronts, dtype=torch.int64).view(len(words), width)
        self._lasts = torch.tensor([word[-1] for word in words], dtype=torch.int64)

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Apply the rules as `RowProcessor.apply`; float32. Logits may have fewer ids than the
        target's."""
        count, width = logits.shape
        scores = logits.to(torch.float32, copy=True)
        first = len(prefix) - count + 1  # tokens before the first row's token
        if len(self._biased):
            known = self._biased < width
            scores[:, self._biased[known].to(scores.device)] += self._bias[known].to(scores.device)
        self._penalise(scores, prefix, first)
        self._forbid_words(scores, prefix, first)
        early = self._prompt_length + self._rules.min_new_tokens - first
        if early > 0:
            scores[:early, self._eos[self._eos < width].to(scores.device)] = _NEGATIVE
        if self._matcher is not None:
            scores = self._matcher.apply(scores, prefix)
        return scores

    def forbidding(self, prefix: Sequence[int]) -> dict[str, str]:
        """Return the rules that forbid a token, as `RequestProcessors.forbidding`."""
        rules = {}
        scores = torch.zeros(1, self._vocab_size)
        self._forbid_words(scores, torch.tensor(prefix, dtype=torch.int64), len(prefix))
        if scores.isneginf().any():
            rules["bad_words"] = ""
        if len(prefix) < self._prompt_length + self._rules.min_new_tokens:
            rules["min_new_tokens"] = ""
        return rules | ({} if self._matcher is None else self._matcher.forbidding(prefix))

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """Return the tokens that the grammar forces, as `RequestProcessors.forced`."""
        return [] if self._matcher is None else self._matcher.forced(prefix, most)

    def _penalise(self, scores: torch.Tensor, prefix: torch.Tensor, first: int) -> None:
        """Penalise tokens of the text before each row, `first` tokens for the first row. Only the
        logits of the text's tokens are read and written."""
        rules, count, repeats = self._rules, len(scores), self._repeats
        counts = rules.frequency_penalty != 0 or rules.presence_penalty != 0
        begin = 0 if repeats != 1 else self._prompt_length
        if (repeats == 1 and not counts) or begin >= len(prefix):
            return
        at = begin + (prefix[begin:] < scores.shape[1]).nonzero()[:, 0]
        ids = prefix[at].expand(count, -1)
        seen = at < first + torch.arange(count, device=at.device)[:, None]

        def often(tokens: torch.Tensor) -> torch.Tensor:  # [k, n], before row k
            sums = torch.zeros_like(scores).scatter_add_(1, ids, tokens.to(torch.float32))
            return sums.gather(1, ids)

        values = scores.gather(1, ids)
        if repeats != 1:
            penalised = torch.where(values < 0, values * repeats, values / repeats)
            values = torch.where(often(seen) > 0, penalised, values)
        if counts:
            new = often(seen & (at >= self._prompt_length))
            values -= rules.frequency_penalty * new + rules.presence_penalty * (new > 0)
        scores.scatter_(1, ids, values)  # positions of the same token have the same value

    def _forbid_words(self, scores: torch.Tensor, prefix: torch.Tensor, first: int) -> None:
        if not len(self._lasts):
            return
        device, (count, size) = scores.device, scores.shape
        width = self._fronts.shape[1]
        # The last tokens before each row, [k, 1, width].
        missing = max(width - first, 0)
        text = torch.nn.functional.pad(prefix[max(first - width, 0) :], (missing, 0), value=_NONE)
        behind = text.unfold(0, width, 1)[:count, None] if width else text.new_empty(count, 1, 0)
        fronts, lasts = self._fronts.to(device), self._lasts.to(device)
        meets = ((behind == fronts) | (fronts == _ANY)).all(-1) & (lasts < size)
        rows, words = meets.nonzero(as_tuple=True)
        scores[rows, lasts[words]] = _NEGATIVE


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        expected = "logit_bias: expected a mapping from ids to numbers in [-100, 100]"
        raise TypeError(f"{expected}, given {arguments.shown(value)}")
    ids = arguments.integers("logit_bias", list(value))
    biases = [arguments.between("logit_bias", bias, -100.0, 100.0) for bias in value.values()]
    return dict(zip(ids, biases, strict=True))


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    expected = "bad_words: expected sequences of token ids"
    words = arguments.entries("bad_words", value)
    if words is None:
        raise TypeError(f"{expected}, given {arguments.shown(value)}")
    checked = []
    for word in words:
        ids = arguments.entries("bad_words", word)
        if ids is None:
            raise TypeError(f"{expected}, given {arguments.shown(word)} among them")
        if not ids:
            raise ValueError(f"{expected}, at least 1 in each, given an empty sequence")
        checked.append(tuple(arguments.integers("bad_words", ids)))
    return tuple(checked)


def with_penalty(rules: Any, penalty: float) -> Any:
    """Return rules, of all rows or of each row, with `penalty` where they have no
    repetition_penalty."""
    rows = None if rules is None else arguments.entries("rules", rules)
    if rows is not None:
        return [with_penalty(row, penalty) for row in rows]
    rules = LogitsRules() if rules is None else rules
    known = not isinstance(rules, LogitsRules) or rules.repetition_penalty is not None
    return rules if known else replace(rules, repetition_penalty=penalty)
