"""The byte model: what an operator must at least read and write, and hence its useful bandwidth.

Every row that the rule needs counts once, whole, whatever the number of passes an implementation
makes over it: filters, maximum and sum can all be had from one read. Rows that the rule does not
need count nothing. Beside rows: the draft token, its distribution (16 bytes) and its logit per
token verified, and the outputs (token 8, log-probability 4, distribution 16 bytes each; count 8,
status 4 per request).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.grid import Case

TOKEN, LOGPROB, STATISTICS, COUNT, STATUS = 8, 4, 16, 8, 4


def bytes_of(case: Case, accepted: Sequence[int]) -> int:
    """Bytes that a call must move.

    Args:
        accepted: draft tokens accepted, one per request; empty where nothing is verified.
    """
    if case.operator == "sample":
        return sample_bytes(case)
    rule = block_rule_bytes if case.operator == "verify-block" else token_rule_bytes
    return rule(case, accepted, statistics=case.operator != "verify-token-bare")


def sample_bytes(case: Case) -> int:
    """One row read per request, one token written."""
    row = case.vocab * case.element_size
    return case.batch * (row + TOKEN + LOGPROB + STATISTICS + STATUS)


def _verify_bytes(case: Case, target_rows: int, draft_rows: int, verified: int) -> int:
    rows = (target_rows + draft_rows) * case.vocab * case.element_size
    read = verified * (TOKEN + STATISTICS + case.element_size)
    written = case.batch * ((case.draft_len + 1) * (TOKEN + LOGPROB + STATISTICS) + COUNT + STATUS)
    return rows + read + written


def token_rule_bytes(case: Case, accepted: Sequence[int], *, statistics: bool = True) -> int:
    """Token rule: target rows up to the first rejection, and one draft row for the residual.

    Args:
        accepted: draft tokens accepted, one per request.
        statistics: whether the draft rows' distributions were handed over; if not, every verified
            one is read.
    """
    k = case.draft_len
    verified = [min(n + 1, k) for n in accepted]
    target_rows = sum(n + 1 for n in accepted)
    draft_rows = sum(n < k for n in accepted) if statistics else sum(verified)
    return _verify_bytes(case, target_rows, draft_rows, sum(verified))


def block_rule_bytes(case: Case, accepted: Sequence[int], *, statistics: bool = True) -> int:
    """Block rule: all K rows of both sides, since S_i sums max(p_i p - q, 0); target row K only for
    the bonus, draft row 0 only for its residual (S_0 is not used) or for a distribution not handed
    over.

    A block whose p_i becomes 0 may end earlier; that is not counted, so with filters this is an
    upper bound.
    """
    k = case.draft_len
    target_rows = sum(k + (n == k) for n in accepted)
    draft_rows = sum(max(k - 1, 0) + (n == 0 and k > 0) if statistics else k for n in accepted)
    return _verify_bytes(case, target_rows, draft_rows, k * len(accepted))


def logsumexp_bytes(case: Case) -> int:
    """All K+1 target rows read once, a float written for each."""
    rows = case.batch * (case.draft_len + 1)
    return rows * (case.vocab + 1) * case.element_size
