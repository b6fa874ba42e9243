"""What only the values of a call's tensors can tell: mistakes that cost a user the distribution and
that no shape or dtype shows. Asked for with ``validate=True``, since reading values waits for the
device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Parameter = float | torch.Tensor
Statistics = Callable[[torch.Tensor, Sequence[Parameter]], tuple[torch.Tensor, torch.Tensor]]


def check_logits(name: str, rows: torch.Tensor | None) -> None:
    """Refuse `rows` [.., V] that are probabilities: each row in [0, 1] with a sum of 1.

    Rows of zeros or with values that are not finite, which padding may be, say nothing. Nor does a
    vocabulary of one token.

    Raises:
        ValueError: they are.
    """
    if rows is None or rows.shape[-1] < 2 or rows.numel() == 0:
        return
    values = rows.detach().float()
    low, high = values.aminmax(dim=-1)
    tolerance = 1e-3 if rows.dtype == torch.float32 else 2e-2  # each rounded to 8 bits or more
    adds_up = (values.sum(-1) - 1).abs() <= tolerance
    probabilities = (low >= 0) & (high <= 1 + tolerance) & adds_up
    padding = ~low.isfinite() | ~high.isfinite() | ((low == 0) & (high == 0))
    if bool(probabilities.any()) and bool((probabilities | padding).all()):
        raise ValueError(
            f"{name}: expected logits, given probabilities (each row is in [0, 1] and adds up to "
            "1): pass their logarithms, or what they are the softmax of"
        )


def rows_of_draft_tokens(
    batch: int,
    draft_len: int,
    draft_rows: torch.Tensor | None,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
    entries: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request of each draft token of blocks, and its draft row among all of them, -1: a
    deterministic proposal. Arguments as `verify` takes them; `entries` is the
    number of draft tokens' entries."""
    request, entry, index = _entries(batch, draft_len, lengths, offsets, entries, device)
    if draft_rows is None:
        return request, request * draft_len + index
    return request, draft_rows.reshape(-1)[entry]


def rows_of_nodes(
    batch: int,
    nodes: int,
    draft_rows: torch.Tensor,
    parents: torch.Tensor,
    counts: torch.Tensor | None,
    offsets: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return request and draft row of each node of trees. Arguments as `verify_tree` takes them."""
    request, entry, index = _entries(batch, nodes, counts, offsets, parents.numel(), device)
    parent = parents.reshape(-1)[entry]
    # Without offsets a request has a draft row more than it has nodes.
    first = entry - index if offsets is not None else request * (nodes + 1)
    sound = (parent >= -1) & (parent < index)
    row = draft_rows.reshape(-1)[(first + parent + 1).where(sound, first)]
    return request, row.where(sound, -1)


def _entries(
    batch: int,
    most: int,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
    entries: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the request of each draft token, its entry in the tables, and its index in the
    request. (Impossible lengths are errors of the status.)"""
    if offsets is not None:
        first, rows = offsets[:-1], offsets.diff()
        count = rows - 1 if lengths is None else lengths.where(lengths <= rows, 0)
        count = count.where((offsets[:-1] >= 0) & (offsets[1:] <= entries), 0)
    else:
        first = torch.arange(batch, device=device) * most
        count = torch.full_like(first, most) if lengths is None else lengths
    index = torch.arange(most, device=device).expand(batch, most)
    live = (index < count[:, None]) & (count <= most)[:, None]
    request, index = live.nonzero(as_tuple=True)
    return request, first[request] + index, index


def check_draft_statistics(
    draft_logits: torch.Tensor,
    draft_statistics: torch.Tensor,
    request: torch.Tensor,
    row: torch.Tensor,
    slots: torch.Tensor | None,
    parameters: Sequence[Parameter],
    statistics_of: Statistics,
) -> None:
    """Compute the statistics of the draft tokens' rows again, and refuse others, bit for bit.

    Args:
        draft_logits: [.., Vd]; draft_statistics: [.., 2] of the same rows.
        request, row: of each draft token, see `rows_of_draft_tokens`.
        slots: [B], as `verify` takes them.
        parameters: temperature, top_k, top_p, min_p, each a number or a value per request or slot.
        statistics_of: of rows and their parameters, statistics [N, 2] and status [N].

    Raises:
        ValueError: they are those of another temperature, filter or row.
    """
    logits, given = draft_logits.flatten(0, -2), draft_statistics.reshape(-1, 2)
    holder = request if slots is None else slots[request]
    known = (row >= 0) & (row < logits.shape[0]) & (holder >= 0)
    for value in parameters:
        if isinstance(value, torch.Tensor):
            known &= holder < value.shape[0]
    request, row, holder = request[known], row[known], holder[known]
    if row.numel() == 0:
        return
    own = [value[holder] if isinstance(value, torch.Tensor) else value for value in parameters]
    expected, status = statistics_of(logits[row], own)
    wrong = ((expected != given[row]).any(-1) & (status == 0)).nonzero()
    if wrong.numel() > 0:
        first = int(wrong[0, 0])
        raise ValueError(
            "draft_statistics: expected those of draft_logits under the call's temperature, top_k, "
            f"top_p and min_p, given others for draft row {int(row[first])} (request "
            f"{int(request[first])}): draw drafts with the parameters that they are verified with"
        )
