"""The seeds of a batch's rows, out of one."""

from __future__ import annotations

from . import arguments
from .validate import SEED_MAX

_LOW = 2**32 - 1


def row_seeds(seed: int, count: int) -> list[int]:
    """What ``seed=seed`` means for each of `count` prompts: row 0 has `seed` itself, row b the 64
    bits of Philox4x32-10 keyed by (seed, position b, level 0, round 0, purpose 0).

    No draw has level 0, so a row's seed is independent of every draw. It does not depend on
    `count`: a batch of one is drawn as with ``ps.sample(..., seed=seed)``, further prompts leave
    the rows before them as they are, and row b alone is
    ``chain.generate(prompts[b], seed=ps.row_seeds(seed, b + 1)[b])``. Batches with different seeds
    have different seeds in every row, but for chance (2**-64 for a pair of rows).

    Args:
        seed: in [0, 2**64).
        count: of rows, >= 0.

    Raises:
        TypeError, ValueError: not such integers.
    """
    seed = arguments.integer("seed", seed, SEED_MAX)
    rows = range(arguments.integer("count", count))
    return [_hashed(seed, row) if row else seed for row in rows]


def _hashed(seed: int, row: int) -> int:
    """`draw_bits` of polyspec/philox.hpp at position `row`, level, round and purpose 0."""
    x0, x1, x2, x3 = row & _LOW, row >> 32, 0, 0
    key0, key1 = seed & _LOW, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ key0, b & _LOW, (a >> 32) ^ x3 ^ key1, a & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return x1 << 32 | x0
