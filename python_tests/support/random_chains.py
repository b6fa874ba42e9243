"""Random chains and batches, for comparing every row of `Chain` with an independent loop."""

import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from device_rounds import same_counts
from hypothesis import strategies as st

import polyspec_ext as ps

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_screen.py"
generate = runpy.run_path(str(EXAMPLE))["generate"]

sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 0, 4]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "seed": st.sampled_from([0, 1, 7, 2**63, 2**64 - 1]),
    }
)


class Row(NamedTuple):
    prompt: list[int]
    max_new_tokens: int
    eos: list[int]
    sampling: dict[str, Any]


def rows(prompts: st.SearchStrategy[list[int]], most: int) -> st.SearchStrategy[list[Row]]:
    eos = st.sets(st.integers(0, 5), max_size=1).map(list)
    row = st.builds(Row, prompts, st.integers(0, most), eos, sampling)
    return st.lists(row, min_size=1, max_size=5)


class Shape(NamedTuple):
    """A chain but for its levels."""

    window: list[int]
    rounds: list[int]
    tail: int
    rule: str
    sync_each_step: bool | None

    def options(self) -> dict[str, Any]:
        return self._asdict()


@st.composite
def shapes(draw: st.DrawFn, least: int = 1, most: int = 4) -> Shape:
    levels = draw(st.integers(least, most))
    window = draw(
        st.lists(st.sampled_from([1, 2, 3, 5, 8, 0]), min_size=levels - 1, max_size=levels - 1)
    )
    rounds = draw(
        st.lists(
            st.sampled_from([1, 2, 3, 0]), min_size=max(0, levels - 2), max_size=max(0, levels - 2)
        )
    )
    tail = draw(st.integers(0, 3)) if levels > 2 else 0
    # Without the host's reading a round must be bounded.
    sync = draw(st.sampled_from([False, None])) if all(rounds) else None
    return Shape(window, rounds, tail, draw(st.sampled_from(["token", "token", "block"])), sync)


def run(chain: ps.Chain, batch: list[Row], cache_prompt: bool = False) -> list[Any]:
    """Return the rows of one call: their tokens, log-probabilities and statistics."""
    names = list(batch[0].sampling)
    running = chain.batch(
        [row.prompt for row in batch],
        [row.max_new_tokens for row in batch],
        eos_token_id=[row.eos for row in batch],
        cache_prompt=cache_prompt,
        **{name: [row.sampling[name] for row in batch] for name in names},
    )
    running.complete()
    return running.rows


def new_tokens(row: Any, request: Row) -> list[int]:
    tokens: list[int] = row.tokens[len(request.prompt) :]
    return tokens


def require_same_alone(levels: list[Any], shape: Shape, batch: list[Row], rows: list[Any]) -> None:
    """Compare rows of `run` with the rows of a chain one by one, with the host in each step."""
    options = shape._replace(sync_each_step=None).options()
    chain = ps.Chain(levels, **options, check_vocabulary=False)
    for request, row in zip(batch, rows, strict=True):
        [alone] = run(chain, [request])
        assert row.tokens == alone.tokens
        assert row.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        same_counts(row.stats, alone.stats)


def screen(levels: list[Any], shape: Shape, row: Row) -> list[int]:
    """Return the tokens of the loop on one screen."""
    window, rounds, tail, rule, _ = shape
    options = {"rounds": rounds, "tail": tail, "rule": rule, "eos": row.eos, **row.sampling}
    tokens: list[int] = generate(levels, window, row.prompt, row.max_new_tokens, **options)
    return tokens
