"""Suffix matching: what followed the longest suffix of the text that has stood in it before.

A suffix automaton (Blumer et al., 1985) of prompt and output finds that suffix whatever its length,
which hashed n-grams of a few lengths do not, and takes a constant number of dictionary accesses per
token on average. A deterministic proposal, as prompt lookup: nothing is drawn, nothing loaded.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import arguments
from .base import Context, Proposal

_CAP = 32  # suffixes whose latest place is kept up to date with each token, the longest first


class Match(NamedTuple):
    """The longest suffix of the text that occurs earlier as well.

    Attributes:
        length: tokens; 0: there is none.
        end: index behind such an earlier occurrence, that is, of the token that followed it.
    """

    length: int
    end: int


class _Undo(NamedTuple):
    """What the latest token has changed, to be put back."""

    size: int
    last: int
    added: list[int]  # states whose transition for the token is new
    redirected: list[int]  # states whose transition led to `original` before
    original: int
    link: int  # of `original`
    places: list[tuple[int, int]]  # states and their latest ends


class SuffixAutomaton:
    """All substrings of a text that grows and shrinks at its end.

    A state stands for substrings that end at the same places: its transitions by token, the length
    of the longest of them, the state of their longest suffix that ends elsewhere too (`link`), and
    the latest place where they are known to end.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.matches: list[Match] = []  # of every prefix of the text
        self._next: list[dict[int, int]] = [{}]
        self._length, self._link, self._end = [0], [-1], [0]
        self._last = 0
        self._undo: list[_Undo] = []

    def _state(self, moves: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(moves)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def append(self, token: int) -> None:
        """The text grows by one token."""
        size, last = len(self._next), self._last
        added: list[int] = []
        redirected: list[int] = []
        original = link = -1
        place = len(self.tokens) + 1
        new = self._state({}, place, 0, place)
        at = last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            added.append(at)
            at = self._link[at]
        if at >= 0:
            known = self._next[at][token]
            if self._length[known] != self._length[at] + 1:
                # Shorter substrings of the state end here as well: they get one of their own.
                original, link = known, self._link[known]
                known = self._state(
                    dict(self._next[original]), self._length[at] + 1, link, self._end[original]
                )
                while at >= 0 and self._next[at].get(token) == original:
                    self._next[at][token] = known
                    redirected.append(at)
                    at = self._link[at]
                self._link[original] = known
            self._link[new] = known
        suffix = self._link[new]
        self.matches.append(Match(self._length[suffix], self._end[suffix]))
        places: list[tuple[int, int]] = []
        while suffix > 0 and len(places) < _CAP:
            places.append((suffix, self._end[suffix]))
            self._end[suffix] = place
            suffix = self._link[suffix]
        self.tokens.append(token)
        self._last = new
        self._undo.append(_Undo(size, last, added, redirected, original, link, places))

    def pop(self) -> None:
        """The text shrinks by its last token."""
        undo = self._undo.pop()
        token = self.tokens.pop()
        self.matches.pop()
        for state, end in undo.places:
            self._end[state] = end
        for state in undo.added:
            del self._next[state][token]
        for state in undo.redirected:
            self._next[state][token] = undo.original
        if undo.original >= 0:
            self._link[undo.original] = undo.link
        del self._next[undo.size :], self._length[undo.size :]
        del self._link[undo.size :], self._end[undo.size :]
        self._last = undo.last


class SuffixMatch:
    """Proposes what followed the longest suffix of the text when it stood there before, at its
    latest known place; where that runs into the end of the text, its own proposal follows (a text
    that repeats itself goes on so).

    Args:
        min_length: of the suffix, in tokens: nothing is proposed behind a shorter one.

    Raises:
        TypeError, ValueError: min_length < 1.
    """

    def __init__(self, min_length: int = 1) -> None:
        min_length = arguments.integer("min_length", min_length, arguments.SIZE_MAX, 1)
        self.name = "suffix match"
        self.num_forward_passes = 0
        self.min_length = min_length
        self._text = SuffixAutomaton()

    def fork(self) -> SuffixMatch:
        """Another with the same setting and nothing remembered."""
        return SuffixMatch(self.min_length)

    def propose(self, context: Context, k: int) -> Proposal:
        """`k` tokens; none where no suffix of `min_length` tokens has been seen before."""
        tokens, text = context.tokens, self._text
        if context.valid == 0:
            self._text = text = SuffixAutomaton()
        while len(text.tokens) > context.valid:
            text.pop()
        for token in tokens[len(text.tokens) :]:
            text.append(token)
        if not tokens or text.matches[-1].length < self.min_length:
            return Proposal([])
        start = text.matches[-1].end
        period = len(tokens) - start
        return Proposal([tokens[start + i % period] for i in range(k)])
