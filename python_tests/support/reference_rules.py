"""``sample``, ``verify`` and ``verify_tree`` once more in plain Python and numpy: recomputes any
token, bit for bit.

It is written from the C++ headers (`types.hpp`, `sample.hpp`, `verify.hpp`, `verify_tree.hpp`,
`philox.hpp`), which describe the rules in words, and calls neither torch nor the compiled
module; a copy of this file works alone. It is slow, knows one request at a time and expects
rows that have a distribution (a finite maximum, no NaN) and draft tokens that the draft can
propose. EOS and length cuts (`CutParams`) only shorten the result.

A row of logits is a float32 array ``[V]`` (bfloat16 and float16 widen without rounding)::

    p = [distribution(row, temperature=0.8, top_p=0.9) for row in target_logits]
    q = [distribution(row, temperature=0.8, top_p=0.9) for row in draft_logits]
    tokens, logprobs = verify(p, draft_tokens, q, philox_draws(seed, position, level, round))
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

SAMPLE, ACCEPT, EMIT, TRY = 0, 1, 2, 3  # purposes of a draw
TRIES = 8  # to draw a correction by rejection
EXP2 = (0.00015353362, 0.0013398874, 0.009618437, 0.055503324, 0.24022648, 0.6931472, 1.0)

Array = np.ndarray[Any, Any]
# (tokens after `position`, purpose, node = 0) -> 64 bits; None for `TRY`: no try follows
Draw = Callable[..., int | None]


class Distribution(NamedTuple):
    """Integer `masses` [V] of a row with sum `mass`, and the values of `RowStatistics`.
    `temperature` is the applied one; 0: one-hot at the argmax."""

    logits: Array
    masses: Array
    mass: int
    max: float
    threshold: float
    temperature: float

    def logprob(self, token: int) -> float:
        if self.temperature == 0:
            return 0.0
        scaled = (float(self.logits[token]) - self.max) / self.temperature
        return float(np.float32(scaled - log(self.mass / unit_of(len(self.masses)))))


def unit_of(vocab: int) -> float:
    """2^S: the mass of the largest logit."""
    return 2.0 ** (62 - (vocab - 1).bit_length())


def distribution(
    logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Distribution:
    row = np.asarray(logits, np.float32)
    z = row + np.float32(0)  # -0 becomes +0
    largest, vocab, unit = z.max(), len(z), unit_of(len(logits))
    hot, p, low = (float(np.float32(value)) for value in (temperature, top_p, min_p))
    if hot == 0:
        masses = (np.arange(vocab) == z.argmax()).astype(np.uint64)
        return Distribution(row, masses, 1, float(largest), float(largest), 0.0)
    hot = max(hot, 2.0**-126)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exponents = (z - largest) * np.float32(1.4426950408889634 / hot)
    masses = (exp2(exponents).astype(np.float64) * unit).astype(np.uint64)
    threshold = -np.inf
    order = np.argsort(-z, kind="stable")
    if 0 < top_k < vocab:
        threshold = z[order[top_k - 1]]
    if p < 1:
        above = np.cumsum(np.where(z >= threshold, masses, np.uint64(0))[order], dtype=np.uint64)
        total = int(above[-1])
        need = min(max(int(np.ceil(p * float(total))), 1), total)
        threshold = z[order[np.searchsorted(above, np.uint64(need))]]
    if low > 0:
        with np.errstate(over="ignore"):
            threshold = max(threshold, np.float32(float(largest) + hot * log(low)))
    masses = np.where(z >= threshold, masses, np.uint64(0))
    return Distribution(row, masses, int(masses.sum()), float(largest), float(threshold), hot)


def exp2(x: Array) -> Array:
    """2^x in float32, x <= 0."""
    x = np.where(x > -100, x, np.float32(-100))
    whole = np.rint(x)  # ties to even
    power = np.full_like(x, EXP2[0])
    for coefficient in EXP2[1:]:
        power = fma(power, x - whole, np.float32(coefficient))
    return np.ldexp(power, whole.astype(np.int32))


def fma(a: Array, b: Array, c: np.float32) -> Array:
    """float32(a * b + c), rounded once: the float64 sum is rounded to odd, then to float32."""
    product = a.astype(np.float64) * b  # exact
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def log(value: float) -> float:
    """Natural logarithm in float64, the same bits on every machine."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    (m,) = struct.unpack("<d", struct.pack("<q", bits & 0xFFFFFFFFFFFFF | 0x3FF0000000000000))
    exponent = (bits >> 52) - 1023
    if m > 1.4142135623730951:
        m, exponent = m * 0.5, exponent + 1
    s, total = (m - 1) / (m + 1), 0.0
    for k in range(21, 0, -2):
        total = total * (s * s) + 1 / k
    return float(2 * s * total + exponent * 0.6931471805599453)


def philox_draws(seed: int, position: int, level: int = 1, round: int = 0) -> Draw:
    """The 64 bits of each draw: Philox4x32-10 on (position, round, level, node, purpose) under the
    seed. Node 0, or a tree's, or of `TRY` 2 j for the token of try j and 2 j + 1 for its test."""

    def draw(offset: int, purpose: int, node: int = 0) -> int:
        at, low = position + offset, 0xFFFFFFFF
        x = (at & low, at >> 32, round, level << 16 | node << 2 | purpose)
        key0, key1 = seed & low, seed >> 32
        for _ in range(10):
            a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            x = (b >> 32 ^ x[1] ^ key0, b & low, a >> 32 ^ x[3] ^ key1, a & low)
            key0, key1 = key0 + 0x9E3779B9 & low, key1 + 0xBB67AE85 & low
        return x[1] << 32 | x[0]

    return draw


def pick(masses: Array, bits: int) -> int:
    """The first token at which the running sum exceeds floor(bits * total / 2^64)."""
    sums = np.cumsum(masses, dtype=np.uint64)
    return int(np.searchsorted(sums, np.uint64(bits * int(sums[-1]) >> 64), side="right"))


def sample(row: Distribution, draw: Draw) -> int:
    return pick(row.masses, drawn(draw(0, SAMPLE)))


def drawn(bits: int | None) -> int:
    assert bits is not None, "only tries may have no draws"
    return bits


def uniform(bits: int) -> float:
    """In (0, 1)."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def proposed(q: Distribution, ids: Array) -> Array:
    """q's masses over the target's ids, in float64."""
    masses = q.masses.astype(np.float64)
    known = (ids >= 0) & (ids < len(masses))
    return np.where(known, masses[np.where(known, ids, 0)], 0.0)


def ratio(p: Distribution, q: Distribution, token: int, ids: Array) -> float:
    """p(token) / q(token)."""
    own = float(p.masses[token]) * float(q.mass)
    return own / (float(proposed(q, ids)[token]) * float(p.mass))


class Residual(NamedTuple):
    """max(a p - b q, 0): `whole` is a p [V] and `share` b q [V] over the target's ids, float64."""

    p: Distribution
    whole: Array
    share: Array

    @property
    def masses(self) -> Array:
        """In units of 2^-S."""
        left: Array = np.maximum(self.whole - self.share, 0.0) * unit_of(len(self.whole))
        return left.astype(np.uint64)

    def pick(self, draw: Draw, offset: int) -> int:
        """By rejection from p; if no try succeeds, from the masses, or from p if all are 0."""
        for j in range(TRIES):
            token_bits, test_bits = draw(offset, TRY, 2 * j), draw(offset, TRY, 2 * j + 1)
            if token_bits is None or test_bits is None:
                break
            token = pick(self.p.masses, token_bits)
            if uniform(test_bits) * self.whole[token] < self.whole[token] - self.share[token]:
                return token
        masses = self.masses
        return pick(masses if masses.any() else self.p.masses, drawn(draw(offset, EMIT)))


def residual(p: Distribution, q: Distribution, ids: Array, a: float, b: float) -> Residual:
    """max(a p - b q, 0)."""
    whole = p.masses.astype(np.float64) * (a / float(p.mass))
    return Residual(p, whole, proposed(q, ids) * (b / float(q.mass)))


def verify(
    target: Sequence[Distribution],
    block: Sequence[int],
    draft: Sequence[Distribution] | None,
    draw: Draw,
    rule: str = "token",
    target_to_draft: Sequence[int] | None = None,
) -> tuple[list[int], list[float]]:
    """Return the tokens emitted for a block of m draft tokens, and the log-probabilities.

    target: m + 1 rows (fewer where the token rule rejects before). draft: m rows, or None for a
    deterministic proposal. target_to_draft: [V] draft ids, -1 for none.
    """
    m, every = len(block), np.arange(len(target[0].masses))
    ids = every if target_to_draft is None else np.asarray(target_to_draft)
    if draft is None:  # q is one-hot, over the target's ids
        draft, ids = [distribution(every == y, temperature=0) for y in block], every

    def above(i: int) -> float:  # p(y) / q(y)
        return ratio(target[i], draft[i], block[i], ids)

    def stands(i: int, probability: float) -> bool:
        return uniform(drawn(draw(i, ACCEPT))) < probability

    kept, left = 0, None  # left: the last token's weights; None: row `kept`
    if target[0].temperature == 0:
        while kept < m and block[kept] == target[kept].masses.argmax():
            kept += 1
    elif rule == "token":
        while kept < m and stands(kept, above(kept)):
            kept += 1
        left = residual(target[kept], draft[kept], ids, 1.0, 1.0) if kept < m else None
    else:
        scale = 1.0  # p_i
        for i in range(m):
            rest = residual(target[i], draft[i], ids, scale, 1.0)
            total = float(int(rest.masses.sum())) / unit_of(len(rest.whole))
            if i == 0 or (total > 0 and stands(i - 1, total / (total + (1.0 - scale)))):
                kept, left = i, rest
            scale = min(scale * above(i), 1.0)
            if scale == 0:
                break
        if m == 0 or (scale > 0 and stands(m - 1, scale)):
            kept, left = m, None
    last = left.pick(draw, kept) if left else pick(target[kept].masses, drawn(draw(kept, EMIT)))
    tokens = [*block[:kept], last]
    return tokens, [row.logprob(token) for row, token in zip(target, tokens, strict=False)]


def buckets(p: Distribution, q: Array) -> Array:
    """The power of two of p/q by token, 8 added, in [0, 16). `q`: masses over the target's ids."""
    below = q * float(p.mass)
    quotient = p.masses.astype(np.float64) * float(q.sum()) / np.where(below > 0, below, 1.0)
    exponent = np.where(quotient > 0, np.frexp(quotient)[1] - 1, -8)
    return np.clip(exponent, -8, 7) + 8


def laws(held: Sequence[int], total: float, top: int, count: int) -> list[float]:
    """By bucket, the factor that turns q into the distribution of the first in the highest bucket
    of `count` children that are below `top`. `held`: the masses of q by bucket, `total` their
    sum."""
    below, lower, values = float(sum(held[:top])), 0, [0.0] * len(held)
    for bucket in range(top):
        lo, hi = float(lower) / below, float(lower + held[bucket]) / below
        result, power = 0.0, 1.0
        for _ in range(count):
            result, power = result * lo + power, power * hi
        values[bucket] = result * (total / below)
        lower += held[bucket]
    return values


class Paths(NamedTuple):
    """A tree verified by the block rule; arguments as of `verify_tree`."""

    target: Sequence[Distribution]
    nodes: Sequence[int]
    parents: Sequence[int]
    draft: Sequence[Distribution | None]
    draw: Draw
    ids: Array

    def below(
        self, row: int, depth: int, scale: float, root: bool = False
    ) -> tuple[list[int], Residual | None] | None:
        """Return the accepted nodes after a row and the weights of the next token, None: the last
        node's row; or None, if neither `row` nor any node after it is accepted. `depth`: nodes
        above the row, `scale`: P(one of them is accepted)."""
        p, q = self.target[row], self.draft[row]
        children = [i for i, parent in enumerate(self.parents) if parent == row - 1]

        def stands(probability: float) -> bool:
            bits = self.draw(depth - 1, ACCEPT, row - depth)
            return uniform(drawn(bits)) < probability

        if q is None or not children:
            return ([], None) if stands(scale) else None
        masses, total, unit = proposed(q, self.ids), float(q.mass), unit_of(len(p.masses))
        every = np.zeros(len(masses), np.int64)
        if len(children) > 1:
            every = buckets(p, masses)
        held = [int(masses[every == b].sum()) for b in range(16)]
        own = {child: int(every[self.nodes[child]]) for child in children}
        spent, top, tried, left, rest = np.zeros(16), 16, -1, scale, None
        while True:
            again = [c for c in children if own[c] == top and c > tried]
            lower = [c for c in children if own[c] < top]
            order = again or sorted(lower, key=lambda c: (-own[c], c))
            if tried >= 0:
                whole = p.masses.astype(np.float64) * (scale / float(p.mass))
                rest = Residual(p, whole, masses * (spent / total)[every])
                if order or not root:
                    left = float(int(rest.masses.sum())) / unit
                order = order if left > 0 else []
            if not order:
                h = left / (left + (1.0 - scale)) if left > 0 else 0.0
                return ([], rest) if root or stands(h) else None
            child, d = order[0], 1.0 if tried < 0 else (1.0 - scale) + left
            bucket, y = own[child], self.nodes[child]
            if len(children) == 1:
                law = [1.0] + [0.0] * 15
            elif again:
                law = [total / float(held[b]) if b == bucket else 0.0 for b in range(16)]
            else:
                law = laws(held, total, top, len(lower))
            above = scale * ratio(p, q, y, self.ids) - float(spent[bucket])
            chance = above / (d * law[bucket])
            spent, top, tried = spent + d * np.array(law), bucket, child
            if chance > 0:
                found = self.below(child + 1, depth + 1, min(chance, 1.0))
                if found is not None:
                    return [child, *found[0]], found[1]


def verify_tree(
    target: Sequence[Distribution],
    nodes: Sequence[int],
    parents: Sequence[int],
    draft: Sequence[Distribution | None],
    draw: Draw,
    target_to_draft: Sequence[int] | None = None,
    rule: str = "token",
) -> tuple[list[int], list[float], list[int]]:
    """Return the tokens emitted for a tree of n draft tokens, log-probabilities, and accepted
    nodes.

    target: n + 1 rows, after the root and after each node. draft: n + 1 rows, from which the
    children of each were drawn; None: the children are deterministic.
    """
    every = np.arange(len(target[0].masses))
    ids = every if target_to_draft is None else np.asarray(target_to_draft)
    tokens: list[int] = []
    logprobs: list[float] = []
    path: list[int] = []
    row: int | None = 0
    while row is not None:
        p, q, depth = target[row], draft[row], len(path)
        children = [i for i, parent in enumerate(parents) if parent == row - 1]
        stands, left = None, None  # the accepted child, and the rest of p after the others
        if rule == "block" and q is not None and p.temperature > 0 and children:
            paths = Paths(target, nodes, parents, draft, draw, ids)
            found = paths.below(row, depth, 1.0, root=True)
            for node in found[0]:
                logprobs.append(target[parents[node] + 1].logprob(nodes[node]))
            tokens += [nodes[node] for node in found[0]]
            path += found[0]
            left = found[1]
            row = path[-1] + 1 if path else row
            if left is None:
                continue
            tokens.append(left.pick(draw, len(path)))
            logprobs.append(target[row].logprob(tokens[-1]))
            break
        if q is not None and p.temperature > 0:
            scale, total = 1.0, 0.0
            for sibling, child in enumerate(children):
                y = nodes[child]
                if left is None:
                    chance = ratio(p, q, y, ids)
                else:
                    own = float(left.masses[y]) * float(q.mass)
                    chance = own / (float(proposed(q, ids)[y]) * total)
                if uniform(drawn(draw(depth, ACCEPT, sibling))) < chance:
                    stands = child
                    break
                if sibling > 0:
                    scale += total / unit_of(len(p.masses))
                left = residual(p, q, ids, 1.0, scale)
                total = float(int(left.masses.sum()))
                if total == 0 and child != children[-1]:  # nothing is left but rounding
                    left = None
                    break
        if stands is not None:
            token = nodes[stands]
        elif left is not None:
            token = left.pick(draw, depth)
        else:
            token = pick(p.masses, drawn(draw(depth, EMIT)))
        if q is None or p.temperature == 0:
            stands = next((child for child in children if nodes[child] == token), None)
        tokens.append(token)
        logprobs.append(p.logprob(token))
        path += [] if stands is None else [stands]
        row = None if stands is None else stands + 1
    return tokens, logprobs, path
