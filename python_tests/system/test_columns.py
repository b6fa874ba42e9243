"""Tables and Markdown in so many columns: no line is longer, and no cell is lost."""

import random

import pytest

from polyspec_ext import columns


def random_table(draw: random.Random) -> tuple[list[str], list[tuple[str, list[str]]]]:
    count = draw.randint(1, 12)

    def words(most: int) -> str:
        return " ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(1, most)))

    heads = [f"h{n}" for n in range(count)]
    rows = [
        (f"{words(12)} r{row}", [f"{row}.{n}.{'0' * draw.randint(0, 12)}" for n in range(count)])
        for row in range(draw.randint(1, 5))
    ]
    return heads, rows


@pytest.mark.parametrize("seed", range(40))
def test_no_line_is_too_long_and_no_cell_is_lost(seed: int) -> None:
    heads, rows = random_table(random.Random(seed))
    text = columns.table("corner", heads, rows)
    markdown = "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in [["corner", *heads], ["---"] * (len(heads) + 1)]
        + [[name, *cells] for name, cells in rows]
    )
    for drawn in (text, columns.fitted(f"# Title\n\n{'word ' * 40}\n\n{markdown}\n")):
        assert max(map(len, drawn.splitlines())) <= columns.WIDTH
        assert "---" not in drawn
        found = drawn.split()
        for cell in [*heads, *(cell for _, cells in rows for cell in cells)]:
            assert found.count(cell) == 1
        for name, _ in rows:
            assert set(name.split()) <= set(found)


def test_a_narrow_table_has_a_line_a_row() -> None:
    rows = [("first", ["1", "a"]), ("second one", ["20", "bb"])]
    text = columns.table("", ["n", "letters"], rows)
    assert text.splitlines() == [
        "             n  letters", "first        1        a", "second one  20       bb",
    ]  # fmt: skip
