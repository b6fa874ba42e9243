"""What is measured: cases, and the grids they are taken from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
# The acceptance rule of each operator that verifies. "bare": without the drafts' distributions.
RULES = {"verify-token": "token", "verify-token-bare": "token", "verify-block": "block"}
OPERATORS = ("sample", *RULES)


@dataclass(frozen=True)
class Filters:
    """Sampling filters; the defaults are off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Filters:
        """``"none"`` or ``"top_k=50+top_p=.9"``."""
        if text == "none":
            return cls()
        values: dict[str, Any] = {}
        for part in text.split("+"):
            name, _, value = part.partition("=")
            try:
                values[name] = int(value) if name == "top_k" else float(value)
            except ValueError:
                raise ValueError(f"--filters: expected a number in {part!r}") from None
        if not values.keys() <= {"top_k", "top_p", "min_p"}:
            raise ValueError(f"--filters: expected top_k, top_p, min_p or none, given {text!r}")
        filters = cls(**values)
        if filters.top_k < 0 or not 0 <= filters.top_p <= 1 or not 0 <= filters.min_p <= 1:
            raise ValueError(f"--filters: out of range: {text!r}")
        return filters

    @property
    def off(self) -> bool:
        return self == Filters()

    def __str__(self) -> str:
        on = [f"{name}={value:g}" for name, value in self.given().items()]
        return "+".join(on) or "none"

    def given(self) -> dict[str, Any]:
        """The filters that are on, as keyword arguments of ``ps.sample`` and ``ps.verify``."""
        off = asdict(Filters())
        return {name: value for name, value in asdict(self).items() if value != off[name]}


@dataclass(frozen=True)
class Case:
    """One point of the grid. ``draft_len`` and ``acceptance`` are 0 where nothing is verified."""

    operator: str
    batch: int
    draft_len: int
    vocab: int
    dtype: str
    acceptance: float
    filters: Filters

    def __post_init__(self) -> None:
        if self.batch < 1 or self.draft_len < 0 or self.vocab < 2:
            raise ValueError(
                "expected --batch >= 1, --draft-len >= 0 and --vocab >= 2, given "
                f"{self.batch}, {self.draft_len} and {self.vocab}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, given {self.dtype!r}")

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def __str__(self) -> str:
        verified = f" K={self.draft_len} a={self.acceptance:g}" if self.draft_len else ""
        return (
            f"{self.operator} B={self.batch}{verified} V={self.vocab} {self.dtype} {self.filters}"
        )


CUT = Filters(top_k=50, top_p=0.9)


def base(operator: str, device: str) -> Case:
    """The case that the targets are about."""
    verifies = operator in RULES
    dtype = "float32" if device == "cpu" else "bfloat16"
    return Case(operator, 1, 10 * verifies, 128256, dtype, 0.7 * verifies, Filters())


def star(center: Case, device: str) -> list[Case]:
    """The base case and its neighbours: one axis varied at a time, batch also with filters on."""
    batches = (1, 8) if device == "cpu" else (1, 8, 64, 256)
    cases = [replace(center, batch=b, filters=f) for f in (Filters(), CUT) for b in batches]
    cases += [replace(center, filters=f) for f in (Filters(top_p=0.9), Filters(min_p=0.05))]
    cases += [replace(center, vocab=v) for v in (32000, 50257)]
    cases += [replace(center, dtype=d) for d in DTYPES]
    if center.draft_len:
        cases += [replace(center, draft_len=k) for k in (1, 5)]
        cases += [replace(center, acceptance=a) for a in (0.5, 0.9)]
    return list(dict.fromkeys(cases))


def quick(center: Case) -> list[Case]:
    """The cases of the targets: the base case without and with filters."""
    return [center, replace(center, filters=CUT)]


def product(center: Case, axes: dict[str, Sequence[Any] | None]) -> list[Case]:
    """All combinations of the given axes; an axis that is None keeps the base case's value.

    Axes that the operator does not have (``draft_len`` and ``acceptance`` of sample) fall out.
    """
    absent = () if center.draft_len else ("draft_len", "acceptance")
    given = {name: values for name, values in axes.items() if values and name not in absent}
    return list(
        dict.fromkeys(
            replace(center, **dict(zip(given, values, strict=True)))
            for values in itertools.product(*given.values())
        )
    )
