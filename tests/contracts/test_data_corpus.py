"""Retrieval: hits and their order, the fan-out over queries, the index on disk, and recall on real data."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.data import corpus as corpus_module
from cotrain.data.corpus import Corpus, fan_out, shares
from cotrain.data.questions import load_passages, load_questions, unsupported, write_passages
from cotrain.data.world import generate
from cotrain.errors import DataError
from cotrain.sections import CorpusConfig, WorldConfig
from cotrain.types import Passage

DATA = Path(os.environ.get("COTRAIN_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}; set COTRAIN_DATA")


def page(name: str, text: str = "") -> Passage:
    return Passage(title=name, text=text or f"text of {name}")


def titles(passages: list[Passage]) -> list[str]:
    return [passage.title for passage in passages]


def fake(hits: dict[str, str]) -> Callable[[str, int], list[Passage]]:
    """A search whose hits are given, one letter a passage."""
    return lambda query, count: [page(letter) for letter in hits[query][:count]]


SMALL = [
    page("Ostel", "A town on the river Vair."),
    page("Vair", "A river that is long and cold."),
    page("Brimal", "A bank. The bank is a bank near the river."),
    page("Tolven", "A painter who painted paintings."),
]


def test_scores_are_those_of_bm25() -> None:
    """Lucene's BM25 by hand: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), tf / (tf + k1 (1 - b + b length / mean))."""
    corpus = Corpus.open(SMALL, CorpusConfig(k1=1.2, b=0.5))
    lengths = [
        len(["ostel", "town", "river", "vair"]),
        len(["vair", "river", "long", "cold"]),
        len(["brimal", "bank", "bank", "bank", "near", "river"]),
        len(["tolven", "painter", "who", "painted", "paintings"]),
    ]
    mean = sum(lengths) / 4
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))  # "vair" is on two pages
    frequencies = [1, 1, 0, 0]
    expected = [
        idf * tf / (tf + 1.2 * (1 - 0.5 + 0.5 * length / mean)) for tf, length in zip(frequencies, lengths, strict=True)
    ]
    scores = corpus.index.get_scores(["vair"])
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_search_stems_drops_stop_words_and_sorts() -> None:
    corpus = Corpus.open(SMALL)
    assert titles(corpus.search("banks", 3)) == ["Brimal"]
    assert titles(corpus.search("Who paints?", 3)) == ["Tolven"]
    assert titles(corpus.search("the river Vair", 3)) == ["Ostel", "Vair", "Brimal"]
    assert titles(corpus.search("the river Vair", 1)) == ["Ostel"]
    assert len(corpus) == 4


@pytest.mark.parametrize("query", ["", "zzz qqq", "the of and", "?!", "\ud800"])
def test_a_query_without_a_known_word_finds_nothing(query: str) -> None:
    assert Corpus.open(SMALL).search(query, 3) == []


def test_ties_keep_the_order_of_the_corpus() -> None:
    passages = [page(f"P{i}", f"common word{i:03d}") for i in range(50)]
    corpus = Corpus.open(passages)
    for count in (1, 7, 50, 80):
        assert corpus.search("common", count) == passages[:count]
    assert corpus.search("word049 common", 3) == [passages[49], *passages[:2]]


def test_equal_passages_are_kept_once() -> None:
    corpus = Corpus.open([SMALL[0], SMALL[1], SMALL[0], page("Ostel", "Another page of that name.")])
    assert titles(list(corpus.passages)) == ["Ostel", "Vair", "Ostel"]
    assert len(corpus.search("Ostel", 9)) == 2


def test_counts_below_one_and_empty_corpora_are_refused() -> None:
    with pytest.raises(DataError, match="corpus: no passages in it"):
        Corpus.open([])
    with pytest.raises(DataError, match="search 'x': count is 0"):
        Corpus.open(SMALL).search("x", 0)
    with pytest.raises(DataError, match="fan_out: total is 0"):
        fan_out(fake({}), [], total=0)


def test_a_corpus_of_nothing_but_stop_words_is_refused() -> None:
    with pytest.raises(DataError, match="corpus: no passage has a word to index"):
        Corpus.open([page("The", "of the")])
    assert titles(Corpus.open([page("The", "of the"), page("Vair")]).search("vair the", 2)) == ["Vair"]


def test_nothing_is_printed_and_nothing_logged(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        corpus = Corpus.open([*SMALL, page("Unique", "to this test")])
        corpus.search("river", 2)
        corpus.search("", 2)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_searching_from_threads_gives_what_searching_alone_gives() -> None:
    world = generate(WorldConfig(questions=200))
    corpus = Corpus.open(world.passages)
    queries = [question.text for question in world.questions]
    alone = [corpus.search(query, 5) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: corpus.search(query, 5), queries)) == alone


# The fan-out


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [
        (10, 1, [10]),
        (10, 2, [5, 5]),
        (10, 3, [4, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (7, 3, [3, 2, 2]),
        (2, 3, [1, 1, 0]),
        (5, 0, []),
    ],
)
def test_shares(total: int, count: int, expected: list[int]) -> None:
    assert shares(total, count) == expected


def test_each_query_gets_its_share() -> None:
    hits = {"1": "abcdefghijkl", "2": "mnopqrst", "3": "uvwxyz", "4": "ABCDEF"}
    for queries, expected in [
        ("1", "abcdefghij"),
        ("12", "abcdemnopq"),
        ("123", "abcdmnouvw"),
        ("1234", "abcmnouvAB"),
        ("43", "ABCDEuvwxy"),
    ]:
        assert "".join(titles(fan_out(fake(hits), list(queries)))) == expected


def test_duplicates_are_refilled_from_the_same_query() -> None:
    hits = {"1": "abcdefgh", "2": "abcdefgh", "3": "axbycz"}
    assert "".join(titles(fan_out(fake(hits), ["1", "2"], total=6))) == "abcdef"
    assert "".join(titles(fan_out(fake(hits), ["1", "3"], total=6))) == "abcxyz"
    assert "".join(titles(fan_out(fake(hits), ["3", "1"], total=6))) == "axbcde"
    assert "".join(titles(fan_out(fake(hits), ["1", "1"], total=6))) == "abcdef"


def test_what_a_query_cannot_fill_goes_to_the_others_in_their_order() -> None:
    hits = {"1": "ab", "2": "", "3": "cdefghij", "4": "klmno"}
    assert "".join(titles(fan_out(fake(hits), ["1", "2", "3", "4"]))) == "abcdkl" + "efgh"
    assert "".join(titles(fan_out(fake(hits), ["2", "4", "3"], total=9))) == "klmcde" + "nof"
    assert "".join(titles(fan_out(fake(hits), ["2", "1"]))) == "ab"
    assert fan_out(fake(hits), ["2"]) == []
    assert fan_out(fake(hits), []) == []


def test_a_search_that_repeats_itself_is_asked_for_more() -> None:
    asked: list[int] = []

    def search(query: str, count: int) -> list[Passage]:
        asked.append(count)
        return [page(letter) for letter in "aaaabbbbcccc"[:count]]

    assert titles(fan_out(search, ["q"], total=3)) == ["a", "b", "c"]
    assert asked == [3, 6, 12]


def test_title_and_text_together_make_a_duplicate() -> None:
    same_title = [page("A", "one"), page("A", "two"), page("A", "one")]
    assert fan_out(lambda query, count: same_title[:count], ["q"], total=3) == same_title[:2]


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), max_size=5),
    st.integers(min_value=1, max_value=12),
)
def test_fan_out_holds_its_promises(hits: list[list[str]], total: int) -> None:
    search = fake({str(i): "".join(found) for i, found in enumerate(hits)})
    found = titles(fan_out(search, [str(i) for i in range(len(hits))], total))
    everything = {letter for letters in hits for letter in letters}
    assert len(found) == len(set(found)) == min(total, len(everything))
    for i, share in enumerate(shares(total, len(hits))):  # nobody's own share goes short for another's sake
        brought = len(set(found) & set(hits[i]))
        assert brought >= min(share, len(set(hits[i])))


# The index on disk


def test_an_index_is_built_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CorpusConfig(cache=str(tmp_path / "cache"))
    first = Corpus.open(SMALL, config)
    assert first.folder.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "_build", lambda *_: pytest.fail("the index was built again"))
    second = Corpus.open(SMALL, config)
    assert second.folder == first.folder
    assert isinstance(second.index.scores["data"], np.memmap)
    assert second.search("river", 3) == first.search("river", 3)
    write_passages(tmp_path / "c.jsonl", SMALL)
    assert Corpus.open(tmp_path / "c.jsonl", config).folder == first.folder
    assert Corpus.open(str(tmp_path / "c.jsonl"), config).passages == tuple(SMALL)


def test_other_content_and_other_settings_have_other_indices(tmp_path: Path) -> None:
    cache = str(tmp_path)
    folders = {
        Corpus.open(SMALL, CorpusConfig(cache=cache)).folder,
        Corpus.open(SMALL[::-1], CorpusConfig(cache=cache)).folder,
        Corpus.open(SMALL, CorpusConfig(cache=cache, k1=1.2)).folder,
        Corpus.open(SMALL, CorpusConfig(cache=cache, b=0.4)).folder,
        Corpus.open([*SMALL[:3], page("Tolven", "A painter who painted")], CorpusConfig(cache=cache)).folder,
    }
    assert len(folders) == 5
    assert {path.name for path in (tmp_path / "bm25").iterdir()} == {folder.name for folder in folders}


def test_the_cache_folder_is_the_configured_one_or_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "environment"))
    assert Corpus.open(SMALL).folder.parent == tmp_path / "environment" / "bm25"
    config = CorpusConfig(cache=str(tmp_path / "config"))
    assert Corpus.open(SMALL, config).folder.parent == tmp_path / "config" / "bm25"
    monkeypatch.delenv("COTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Corpus.open(SMALL).folder.parent == tmp_path / "home" / ".cache" / "cotrain" / "bm25"


def test_two_that_build_at_once_end_with_one_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CorpusConfig(cache=str(tmp_path))
    build = corpus_module._build

    def both(*arguments: object) -> None:
        build(*arguments)  # the other process, faster
        build(*arguments)

    monkeypatch.setattr(corpus_module, "_build", both)
    corpus = Corpus.open(SMALL, config)
    assert titles(corpus.search("bank", 1)) == ["Brimal"]
    assert list((tmp_path / "bm25").iterdir()) == [corpus.folder]


def test_a_build_that_dies_leaves_nothing_that_looks_like_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    config = CorpusConfig(cache=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("bm25s.BM25.save", save)
        with pytest.raises(DataError, match=r"cannot be written: No space left on device.*COTRAIN_CACHE"):
            Corpus.open(SMALL, config)
    assert titles(Corpus.open(SMALL, config).search("bank", 1)) == ["Brimal"]


@pytest.mark.parametrize("name", ["params.index.json", "vocab.index.json", "data.csc.index.npy"])
@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_a_damaged_index_says_what_to_delete(tmp_path: Path, name: str, damage: str) -> None:
    config = CorpusConfig(cache=str(tmp_path))
    folder = Corpus.open(SMALL, config).folder
    (folder / name).unlink()
    if damage == "empty":
        (folder / name).touch()
    with pytest.raises(DataError, match=rf"index {folder}: damaged: .*Delete that folder"):
        Corpus.open(SMALL, config)


# The world and the real data sets


def test_the_first_page_of_a_world_question_is_found() -> None:
    world = generate(WorldConfig(hops=(1, 2, 3, 4)))
    corpus = Corpus.open(world.passages)
    by_question = [q.supporting_titles[0] in titles(corpus.search(q.text, 10)) for q in world.questions]
    by_name = [p.title == corpus.search(p.title, 1)[0].title for p in world.passages]
    assert sum(by_question) / len(by_question) >= 0.97
    assert sum(by_name) / len(by_name) >= 0.99


@needs_data
@pytest.mark.parametrize(
    ("name", "num_questions", "num_train", "num_passages"),
    [("hotpotqa", 1942, 1651, 17173), ("2wikimultihopqa", 1702, 1447, 12003), ("musique", 1103, 930, 7721)],
)
def test_the_real_sets_load(name: str, num_questions: int, num_train: int, num_passages: int) -> None:
    questions = load_questions(DATA / name / "questions.jsonl")
    passages = load_passages(DATA / name / "corpus.jsonl")
    assert (len(questions), len(passages), len(set(passages))) == (num_questions, num_passages, num_passages)
    assert sum(question.meta["split"] == "train" for question in questions) == num_train
    assert unsupported(questions, passages) == []


@needs_data
@pytest.mark.parametrize(
    ("name", "num_dev", "at_5", "at_10"),
    [("hotpotqa", 291, 80.6, 89.5), ("2wikimultihopqa", 255, 65.7, 70.0), ("musique", 173, 54.3, 63.0)],
)
def test_recall_of_supporting_titles(name: str, num_dev: int, at_5: float, at_10: float) -> None:
    """Per cent, mean over the dev questions; the numbers were measured by other code with the same settings."""
    corpus = Corpus.open(DATA / name / "corpus.jsonl")
    questions = [q for q in load_questions(DATA / name / "questions.jsonl") if q.meta["split"] == "dev"]
    assert len(questions) == num_dev
    for count, expected in ((5, at_5), (10, at_10)):
        recalls = []
        for question in questions:
            found = {*titles(corpus.search(question.text, count))}
            recalls.append(np.mean([title in found for title in question.supporting_titles]))
        assert 100 * np.mean(recalls) == pytest.approx(expected, abs=1.5)
