"""Seeds: of a batch's rows, out of one, of chains that draft, and fresh ones."""

from __future__ import annotations

import torch

from . import _C, arguments
from .validate import SEED_MAX


def row_seeds(seed: int, count: int) -> list[int]:
    """Derive the seeds of `count` prompts from one: row 0 has `seed` itself, row b the 64 bits of
    Philox4x32-10 keyed by (seed, position b, level 0, round 0, purpose 0).

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
    return [_C.row_seed(seed, row) if row else seed for row in rows]


def draft_seed(seed: int) -> int:
    """Derive the seed of a chain that drafts for a target with this seed, whose draws have the same
    positions and levels: the seed of a row that no batch has."""
    return _C.row_seed(seed, 1 << 62)


def fresh_seed() -> int:
    """Draw a seed from torch's generator of the CPU, which ``torch.manual_seed`` fixes."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
