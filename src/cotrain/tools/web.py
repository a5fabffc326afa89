"""A small web over a corpus: `search` shows titles with the first words of their pages, `visit` shows one page.

Both are pure: equal corpus and argument, equal text, in every process. A page is all passages of one title, told apart
without regard to case and white space. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from cotrain.errors import ToolError

if TYPE_CHECKING:
    from cotrain.data.corpus import Corpus

NOTHING_FOUND = "nothing found"
_MOST_CANDIDATES = 300  # titles compared letter by letter for one wrong title: some milliseconds


def search(corpus: Corpus, count: int = 3, snippet_words: int = 12) -> Callable[[str], str]:
    """The tool: at most `count` lines `title: first words...`, best first, or "nothing found".

    A passage gives one line, with at most `snippet_words` words; "..." stands where words are missing.
    """

    def search(query: str) -> str:
        """Find pages by key words."""
        lines = [f"{_cut(p.title)}: {_cut(p.text, snippet_words)}" for p in corpus.search(query, count)]
        return "\n".join(lines) or NOTHING_FOUND

    return search


def visit(corpus: Corpus, words: int = 80) -> Callable[[str], str]:
    """The tool: the text of the page with a title, its passages joined in the corpus's order, cut to `words` words.

    Raises (when called):
        ToolError: there is no such page; it tells the closest titles.
    """
    pages: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    for passage in corpus.passages:
        key = title_key(passage.title)
        pages.setdefault(key, []).append(passage.text)
        titles.setdefault(key, passage.title)
    keys = sorted(titles)

    def visit(title: str) -> str:
        """Read the page with exactly this title."""
        key = title_key(title)
        if key not in pages:
            closest = " or ".join(_closest(key, corpus, keys, titles)) or "none"
            fix = "Take a title as the search shows it"
            raise ToolError("visit", f"no page has the title {_cut(title, 12)!r} (closest: {closest})", fix)
        return _cut(" ".join(pages[key]), words)

    return visit


def title_key(title: str) -> str:
    """What titles are compared by: case and white space make no difference."""
    return " ".join(title.casefold().split())


def _closest(key: str, corpus: Corpus, keys: Sequence[str], titles: Mapping[str, str]) -> list[str]:
    """At most two titles with the most letters in common, of those found or begun alike; else the best one found."""
    found = [title_key(p.title) for p in corpus.search(key, 10)]
    alike = islice(keys, bisect_left(keys, key[:2]), bisect_left(keys, key[:2] + chr(0x10FFFF)))
    candidates = list(dict.fromkeys([*found, *islice(alike, _MOST_CANDIDATES)]))
    return [titles[k] for k in difflib.get_close_matches(key[:200], candidates, n=2) or found[:1]]


def _cut(text: str, words: int | None = None) -> str:
    """One line of at most that many words, with "..." where some are missing."""
    found = text.split()
    return " ".join(found[:words]) + ("..." if words is not None and len(found) > words else "")
