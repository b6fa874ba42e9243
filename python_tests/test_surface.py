"""The public surface: what ``help`` shows, and what the package exports."""

from __future__ import annotations

import pydoc
import re

import polyspec_ext as ps


def documented(thing: type) -> set[str]:
    """Names that ``help(thing)`` lists as the class's own methods and attributes."""
    text = pydoc.plain(pydoc.render_doc(thing))
    names = set(re.findall(r"^ \|  (\w+)(?:\(| = |$)", text, re.MULTILINE))
    return {name for name in names if not name.startswith("_")} - {thing.__name__}


def test_help_of_chain_shows_what_a_user_calls() -> None:
    assert documented(ps.Chain) == {"batch", "generate", "stream"}
