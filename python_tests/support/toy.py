"""Toy levels with tabulated distributions, their exact distributions, and the exact distribution of
a chain's output.

A toy level computes its logits from the tokens in its "cache", so a wrong cut shows in the output.
Everything here is double precision Python, independent of the code under test.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.runtime.plan import Operators

DEAD = -1  # ends a text that no token may follow


class ToyLevel:
    """A level with next-token logits that are a table over the last two tokens.

    Args:
        vocab_size: V.
        seed: of the table, ``[V + 1, V + 1, V]`` (index V stands for "before the text").
        scale: spread of the logits; larger is sharper.
    """

    def __init__(self, vocab_size, seed, scale=1.0, name=None) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Multiples of 1/8, so that the row is the same in every precision.
        shape = (vocab_size + 1, vocab_size + 1, vocab_size)
        self.table = (torch.randn(shape, generator=generator) * scale * 8).round() / 8
        self.vocab_size = vocab_size
        self.name = name or f"toy {seed}"
        self.cache: list[int] = []

    def row(self, prefix: Sequence[int]) -> torch.Tensor:
        v = self.vocab_size
        before = [v, v, *(min(token, v) for token in prefix)]
        return self.table[before[-2], before[-1]]

    def prefill(self, tokens: torch.Tensor) -> None:
        self.cache = tokens[0].tolist()

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        assert tokens.dim() == 2
        assert tokens.shape[0] == 1
        assert 1 <= keep <= tokens.shape[1]
        self.cache += tokens[0].tolist()
        ends = range(len(self.cache) - keep + 1, len(self.cache) + 1)
        return torch.stack([self.row(self.cache[:end]) for end in ends])[None]

    def rollback(self, lengths: Sequence[int]) -> None:
        assert 0 <= lengths[0] <= len(self.cache)
        del self.cache[lengths[0] :]


class FixedDrafter:
    """A deterministic drafter: a function of the context alone."""

    name = "fixed drafter"

    def __init__(self, propose: Callable[[list[int], int], list[int]]) -> None:
        self._propose = propose

    def propose(self, context: Context, k: int) -> Proposal:
        return Proposal(self._propose(context.tokens, k))


def of_row(value: Any, b: int) -> Any:
    """Row b's value of an operator's argument."""
    return value[b].item() if isinstance(value, torch.Tensor) else value


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The processed distribution of a row; temperature 0 is one-hot at the lowest argmax."""
    z = [float(x) for x in logits]
    top = max(z)
    if top == -math.inf:  # a dead end
        return [0.0] * len(z)
    if temperature == 0:
        return [1.0 if i == z.index(top) else 0.0 for i in range(len(z))]
    weights = [math.exp((x - top) / temperature) for x in z]
    if 0 < top_k < len(weights):
        edge = sorted(weights, reverse=True)[top_k - 1]
        weights = [w if w >= edge else 0.0 for w in weights]
    if top_p < 1:
        total, below, edge = sum(weights), 0.0, 1.0
        for w in sorted(weights, reverse=True):
            if w == 0 or below >= top_p * total > 0:
                break
            below, edge = below + w, w
        weights = [w if w >= edge else 0.0 for w in weights]
    if min_p > 0:
        weights = [w if w >= min_p else 0.0 for w in weights]  # the largest weight is 1
    total = sum(weights)
    return [w / total for w in weights]


def masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return rows of logits with -inf at the ids that an allow-mask forbids."""
    if allowed is None:
        return logits
    ids = torch.arange(logits.shape[-1])
    return logits.masked_fill((allowed[..., ids // 32] >> ids % 32) & 1 == 0, -math.inf)


def drawing(sample: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return `ops.verification.draw` with `sample` instead of `ps.sample`."""

    def draw(
        logits: torch.Tensor,
        parameters: Iterable[torch.Tensor],
        positions: torch.Tensor,
        rounds: torch.Tensor,
        level: int,
        column: int,
        tokens: torch.Tensor,
        status: torch.Tensor,
        rows: torch.Tensor | None,
        statistics: torch.Tensor | None,
        nodes: torch.Tensor | None = None,
        readable: bool = False,
    ) -> torch.Tensor:
        behind, node = logits[:, 0], {} if nodes is None else {"node": nodes}
        s = sample(behind, *parameters, positions + column, level, rounds, **node)
        tokens[:, column], status[:, column] = s.tokens, s.status
        if rows is not None:
            rows[:, column] = behind
        if statistics is not None:
            statistics[:, column] = s.statistics
        return tokens[:, column : column + 1].clone()

    return draw


def text_distribution(level, prompt, length, eos=(), **sampling) -> dict[tuple[int, ...], float]:
    """Exact distribution of the next `length` tokens, texts ending at the first EOS, or with `DEAD`
    where no token may follow."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            if text and text[-1] in (*eos, DEAD):
                longer[text] = probability
                continue
            row = distribution(level.row([*prompt, *text]), **sampling)
            if not any(row):
                longer[(*text, DEAD)] = probability
            for token, p in enumerate(row):
                if p > 0:
                    longer[(*text, token)] = probability * p
        texts = longer
    return texts


def total_variation(p: dict[tuple[int, ...], float], q: dict[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(p.get(key, 0.0) - q.get(key, 0.0)) for key in p.keys() | q.keys())


class Enumerator:
    """Replaces chance: walks through every outcome of every draw, with its exact probability.

    A chain takes its `operators`. Each call works out the possible outcomes and their probabilities
    from the logits the chain hands over, picks the next one not tried yet, and lets the production
    operator produce it by handing it draws that lie just inside that outcome. A row of NaN logits
    has no part in a call.

    Attributes:
        weight: probability of the outcomes of this run so far.
        paths: runs so far.
    """

    def __init__(self) -> None:
        self._path: list[list[int]] = []  # [choice, number of choices] per draw
        self._at = 0
        self._seed: int | None = None
        self._others = 0
        self._fixed = False
        self.weight = 1.0
        self.paths = 0

    @property
    def operators(self) -> Operators:
        """For ``ps.Chain(..., operators=)``."""
        return Operators(self.draw, self.verify)

    def only(self, seed: int | None, others: int = 0) -> None:
        """Enumerate the draws of the row of a batch with this seed from now on; None: of all rows.
        The others' draws all have the outcome that `others` picks from the possible outcomes."""
        self._seed, self._others = seed, others

    def runs(self) -> Iterator[None]:
        """One iteration per outcome of the whole experiment."""
        while True:
            self._at, self.weight = 0, 1.0
            yield
            self.paths += 1
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            self._path[-1][0] += 1

    def choose(self, probabilities: Sequence[float]) -> int:
        """Index of an outcome of positive probability."""
        possible = [i for i, p in enumerate(probabilities) if p > 1e-14]
        if self._fixed:
            return possible[self._others]
        if self._at == len(self._path):
            self._path.append([0, len(possible)])
        choice = possible[self._path[self._at][0]]
        self._at += 1
        self.weight *= probabilities[choice]
        return choice

    @staticmethod
    def _bits(u: float) -> int:
        bits = min(int(u * 2.0**64), 2**64 - 1)
        return bits - 2**64 if bits >= 2**63 else bits

    def _token(self, weights: Sequence[float]) -> tuple[int, int]:
        """Return a token of the distribution proportional to `weights`, and its bits."""
        total = sum(weights)
        token = self.choose([w / total for w in weights])
        return token, self._bits((sum(weights[:token]) + weights[token] / 2) / total)

    def _row(self, seed: Any, b: int) -> None:
        """Begin the draws of row b."""
        self._fixed = self._seed is not None and of_row(seed, b) != self._seed

    def sample(self, logits, temperature, top_k, top_p, min_p, seed=0, *key, **node) -> Any:
        wanted, draws = [], []
        for b, row in enumerate(logits):
            token, bits = -1, 0
            if not row.isnan().any():
                self._row(seed, b)
                sampling = [of_row(value, b) for value in (temperature, top_k, top_p, min_p)]
                token, bits = self._token(distribution(row, *sampling))
            wanted.append(token)
            draws.append([bits])
        made = torch.tensor(draws, dtype=torch.int64)
        s = ps.sample(logits, temperature, top_k, top_p, min_p, seed, *key, draws=made, **node)
        assert s.tokens.tolist() == wanted
        return s

    @property
    def draw(self) -> Callable[..., torch.Tensor]:
        """For drafters: `sample`, as `drawing` makes it."""
        return drawing(self.sample)

    def verify(self, target, tokens, draft=None, **options) -> Any:
        lengths, offsets = options.get("draft_lengths"), options.get("offsets")
        width = tokens.shape[1] if offsets is None else options["draft_len"]
        rows = masked(target, options.get("allowed"))
        wanted, draws = [], []
        for b in range(len(tokens) if offsets is None else len(offsets) - 1):
            mine = b if offsets is None else slice(*offsets[b : b + 2].tolist())
            count = width if lengths is None else int(lengths[b])
            bits, outcome = [0] * (width + 1), None
            if not target[mine][: count + 1].isnan().any():
                self._row(options["seed"], b)
                names = ("temperature", "top_k", "top_p", "min_p")
                sampling = {name: of_row(options[name], b) for name in names}
                drafted = None if draft is None else draft[b, :count]
                *outcome, bits[:count], bits[width] = self._verified(
                    rows[mine][: count + 1],
                    tokens[mine][:count].tolist(),
                    drafted,
                    options["rule"],
                    sampling,
                    options.get("target_to_draft"),
                )
            wanted.append(outcome)
            draws.append(bits)
        made = torch.tensor(draws, dtype=torch.int64)
        r = ps.verify(target, tokens, draft, **options, draws=made)
        for b, outcome in enumerate(wanted):
            if outcome is not None:
                accepted, emitted = outcome
                dead = emitted[-1] == DEAD
                assert r.status[b] == (ps.Status.EMPTY_ROW if dead else 0)
                assert r.num_accepted[b] == accepted
                if dead and options["rule"] == "block":
                    emitted = [DEAD]
                assert r.tokens[b].tolist() == emitted + [-1] * (width + 1 - len(emitted))
        return r

    def _verified(self, target, drafted, draft, rule, sampling, target_to_draft):
        """Return the accepted draft tokens of one row, the emitted tokens, and the bits. Without a
        row of the target after the draft tokens there is no bonus."""
        size, count = target.shape[1], len(drafted)
        p = [distribution(row, **sampling) for row in target]
        q = [[float(x == y) for x in range(size)] for y in drafted]
        if draft is not None and sampling["temperature"] > 0:
            q = [[*distribution(row, **sampling), *[0.0] * size] for row in draft]
            entries = range(size) if target_to_draft is None else target_to_draft.tolist()
            # (Entry -1 is the last, which nothing is drawn from.)
            q = [[row[entry] for entry in entries] for row in q]
        if rule == "block":  # a dead end ends the block
            count = next((i for i in range(1, count) if not any(p[i])), count)
            drafted = drafted[:count]
        verified = self._token_rule if rule == "token" else self._block_rule
        accepted, scale, bits = verified(p, q, drafted)
        bits += [0] * (len(q) - count)
        if accepted == len(p):
            return accepted, drafted, bits, 0
        if not any(p[accepted]):
            return accepted, [*drafted[:accepted], DEAD], bits, 0
        if accepted == count:
            weights = p[count]
        else:
            weights = [
                max(scale * a - b, 0.0) for a, b in zip(p[accepted], q[accepted], strict=True)
            ]
            weights = [w if w > 1e-13 else 0.0 for w in weights]
        last, last_bits = self._token(weights)
        return accepted, [*drafted[:accepted], last], bits, last_bits

    def _accept(self, probability: float) -> tuple[bool, int]:
        """Whether a test of this probability passes, and bits a hair inside that outcome."""
        passed = self.choose([probability, 1 - probability]) == 0
        hair = 1e-5  # the operators' exponentials are of single precision
        return passed, self._bits(
            probability - hair * probability if passed else probability + hair * (1 - probability)
        )

    def _token_rule(self, p, q, drafted) -> tuple[int, float, list[int]]:
        bits = [0] * len(drafted)
        for i, y in enumerate(drafted):
            if not any(p[i]):
                return i, 1.0, bits
            passed, bits[i] = self._accept(min(1.0, p[i][y] / q[i][y]))
            if not passed:
                return i, 1.0, bits
        return len(drafted), 1.0, bits

    def _block_rule(self, p, q, drafted) -> tuple[int, float, list[int]]:
        count = len(drafted)
        reach = [1.0]
        for i, y in enumerate(drafted):
            reach.append(min(1.0, reach[i] * p[i][y] / q[i][y]))
        bits = [0] * count
        for i in range(count, 0, -1):
            pass_probability = reach[i]
            if i < count:
                rest = sum(max(reach[i] * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True))
                below = rest + 1 - reach[i]
                pass_probability = rest / below if below > 1e-13 else 1.0
            passed, bits[i - 1] = self._accept(min(1.0, pass_probability))
            if passed:
                return i, reach[i], bits
        return 0, 1.0, bits


def chain_distribution(enumerator, generate) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of the output of `generate`, with every draw enumerated."""
    texts: dict[tuple[int, ...], float] = {}
    for _ in enumerator.runs():
        text = tuple(generate())
        texts[text] = texts.get(text, 0.0) + enumerator.weight
    return texts


def chain_gap(enumerator, chain, target, prompt, length, eos=(), rules=None, **sampling) -> float:
    """Total variation of a chain's text, every draw enumerated, to the target's."""
    options = {"temperature": 1.0, "eos_token_id": list(eos), "rules": rules, **sampling}

    def text() -> list[int]:
        tokens: list[int] = chain.generate(prompt, length, **options).sequences[0].tolist()
        return tokens[len(prompt) :]

    found = chain_distribution(enumerator, text)
    assert abs(sum(found.values()) - 1) < 1e-9
    return total_variation(found, text_distribution(target, prompt, length, eos, **sampling))


def make_levels(count: int, vocab: int = 3, scale: float = 1.0) -> list[ToyLevel]:
    """`count` levels with different distributions over the same tokens."""
    return [ToyLevel(vocab, seed=11 + i, scale=scale) for i in range(count)]


def with_lookup() -> list[Any]:
    """Return two levels above a drafter that gives fewer tokens than asked for, or none."""
    drafter = FixedDrafter(lambda tokens, k: [(tokens[-1] + 1) % 3, 0][: min(k, tokens[-1])])
    return [*make_levels(2), drafter]
