"""Lexical retrieval (BM25) over a fixed set of passages, with its index kept on disk.

Same passages, settings and query: same result in the same order, in every process. The index is built once per
content and settings, appears in the cache folder whole or not at all, and is memory-mapped when opened, so processes
share it; the passages themselves are held in memory. Searching blocks and is safe from several threads.
A passage is a hit only if it shares a token with the query; a query of unknown tokens or stop words finds nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import bm25s
import numpy as np
import Stemmer

from cotrain.cache import atomic_folder, cache_folder
from cotrain.data.questions import load_passages
from cotrain.errors import DataError
from cotrain.sections import CorpusConfig
from cotrain.types import Passage

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, which any handler of the user's would print

Search = Callable[[str, int], list[Passage]]
"""(query, count) -> at most `count` passages, best first."""

_INDEX_FORMAT = "1: title. text, lower case, words of two letters, english stop words, snowball english, lucene"


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Passages that can be searched. Make one with `Corpus.open`.

    Args:
        passages: distinct passages, in the order given.
        folder: where the index lies.
        index: a loaded bm25s.BM25 over `passages`.
    """

    passages: tuple[Passage, ...]
    folder: Path
    index: bm25s.BM25

    @classmethod
    def open(cls, source: Sequence[Passage] | Path | str, config: CorpusConfig | None = None) -> Corpus:
        """Index passages, or those of a JSONL file, or take the index from the cache.

        The cache folder is `config.cache`, else $COTRAIN_CACHE, else ~/.cache/cotrain. Passages with equal title and
        text are kept once.

        Raises:
            DataError: no passages or no word in them, a file that cannot be read, or a cache folder that cannot be
                written or is damaged.
        """
        config = config or CorpusConfig()
        found = load_passages(source) if isinstance(source, Path | str) else source
        passages = tuple(dict.fromkeys(found))
        if not passages:
            raise DataError("corpus", "no passages in it", "Give at least one passage")
        folder = cache_folder(config.cache) / "bm25" / _key(passages, config)
        if not folder.exists():
            _build(folder, passages, config)
        try:
            index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise DataError(f"index {folder}", f"damaged: {error}", "Delete that folder; it is built anew") from None
        return cls(passages, folder, index)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, count: int) -> list[Passage]:
        """At most `count` passages that share a token with the query, best first; equal scores in corpus order.

        Raises:
            DataError: count below 1.
        """
        if count < 1:
            raise DataError(f"search {query!r}", f"count is {count}", "Ask for at least one passage")
        token_ids = self.index.get_tokens_ids(_tokens([query])[0])
        if not token_ids:
            return []
        scores = self.index.get_scores_from_ids(token_ids)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > count:  # keeps all that tie with the last place, so that the cut is made in corpus order
            hits = hits[scores[hits] >= np.partition(scores[hits], -count)[-count]]
        best = hits[np.argsort(-scores[hits], kind="stable")][:count]
        return [self.passages[i] for i in best]


def fan_out(search: Search, queries: Sequence[str], total: int = 10) -> list[Passage]:
    """At most `total` distinct passages, shared out over the queries (methods.md 2.5).

    Each query gets its share, earlier queries the larger ones: 10 | 5, 5 | 4, 3, 3 | 3, 3, 2, 2. A passage that an
    earlier query already brought (equal title and text) does not count; the query's further hits fill its share.
    What queries cannot fill goes to the others' further hits, in query order, after all shares. The result is in that
    order: shares by query, then the refills. Fewer than `total` come back only when all hits of all queries are in.

    Raises:
        DataError: total below 1.
    """
    if total < 1:
        raise DataError("fan_out", f"total is {total}", "Ask for at least one passage")
    hits = [_all_hits(search, query, total) for query in queries]
    taken: dict[Passage, None] = {}  # an ordered set
    for query_hits, share in zip(hits, shares(total, len(queries)), strict=True):
        _take(query_hits, taken, len(taken) + share)
    _take(chain.from_iterable(hits), taken, total)
    return list(taken)


def shares(total: int, count: int) -> list[int]:
    """`total` split over `count` queries as evenly as can be, the larger shares first: shares(10, 3) = [4, 3, 3]."""
    return [total // count + (i < total % count) for i in range(count)]


def _take(hits: Iterator[Passage], taken: dict[Passage, None], size: int) -> None:
    """Move hits into `taken` until it has `size` passages or the hits are at their end."""
    while len(taken) < size and (passage := next(hits, None)) is not None:
        taken.setdefault(passage)


def _all_hits(search: Search, query: str, count: int) -> Iterator[Passage]:
    """A query's hits, best first; the first `count` cost one search, and each doubling beyond them another."""
    seen = 0
    while len(found := search(query, count)) > seen:
        yield from found[seen:]
        if len(found) < count:
            return
        seen, count = count, 2 * count


def _tokens(texts: Sequence[str]) -> list[list[str]]:
    # A stemmer is not safe to share between threads, and cheap to make.
    stemmer = Stemmer.Stemmer("english")
    tokens: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="english", stemmer=stemmer, return_ids=False, show_progress=False
    )
    return tokens


def _key(passages: Sequence[Passage], config: CorpusConfig) -> str:
    digest = hashlib.sha256()
    versions = [_INDEX_FORMAT, bm25s.__version__, Stemmer.version()]
    digest.update(json.dumps([*versions, config.k1, config.b]).encode())
    for passage in passages:
        digest.update(json.dumps([passage.title, passage.text]).encode())
    return digest.hexdigest()[:24]


def _build(folder: Path, passages: Sequence[Passage], config: CorpusConfig) -> None:
    index = bm25s.BM25(k1=config.k1, b=config.b, method="lucene", backend="numpy")
    tokens = _tokens([f"{passage.title}. {passage.text}" for passage in passages])
    if not any(tokens):
        raise DataError("corpus", "no passage has a word to index", "Give passages with other than stop words")
    index.index(tokens, create_empty_token=False, show_progress=False)
    try:
        with atomic_folder(folder) as part:
            index.save(part, show_progress=False)
    except OSError as error:
        found = f"cannot be written: {error.strerror or error}"
        raise DataError(f"index {folder}", found, "Set corpus.cache or COTRAIN_CACHE to another folder") from None
