"""Official files of public data sets: small ones in the same form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotrain.data.importers import (
    import_2wikimultihopqa,
    import_dataset,
    import_hotpotqa,
    import_musique,
    import_plain,
)
from cotrain.data.questions import load_passages, load_questions, unsupported
from cotrain.errors import DataError
from cotrain.types import Passage, Question

HOTPOT = {
    "_id": "5a8b",
    "question": "In which town was the author of Q&A Lane born?",
    "answer": "Ostel",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Q&amp;A Lane", 0], ["Mira Tolven", 0], ["Mira Tolven", 1]],
    "context": [
        ["Mira Tolven", ["Mira Tolven is a painter.", " She was born in  Ostel.", " "]],
        ["Q&amp;A Lane", ["Q&A Lane is a novel by Mira Tolven."]],
        ["Blank", [" "]],
    ],
}
HOTPOT_PASSAGES = [
    Passage(title="Mira Tolven", text="Mira Tolven is a painter. She was born in Ostel."),
    Passage(title="Q&A Lane", text="Q&A Lane is a novel by Mira Tolven."),
]
TWO_WIKI = {
    "_id": "0db8",
    "type": "compositional",
    "question": "Who is the mother of the director of Blue Rain?",
    "answer": "Ana Rusk",
    "context": [["Blue Rain", ["A film by Jo Rusk.", "It is long."]], ["Jo Rusk", ["Son of Ana Rusk."]]],
    "supporting_facts": [["Blue Rain", 0], ["Jo Rusk", 0]],
    "evidences": [["Blue Rain", "director", "Jo Rusk"], ["Jo Rusk", "mother", "Ana Rusk"]],
}
MUSIQUE = {
    "id": "2hop__482_73",
    "question": "Who leads the firm that made the Vark?",
    "answer": "Tom Ek",
    "answer_aliases": ["T. Ek", "Tom Ek"],
    "answerable": True,
    "paragraphs": [
        {
            "idx": 0,
            "title": "Ek Motors",
            "paragraph_text": "Ek Motors is led\nby Tom Ek.",
            "is_supporting": True,
        },
        {"idx": 1, "title": "Rope", "paragraph_text": "Rope is long.", "is_supporting": False},
        {
            "idx": 2,
            "title": "Vark",
            "paragraph_text": "The Vark is a car by Ek Motors.",
            "is_supporting": True,
        },
        {"idx": 3, "title": "Rope", "paragraph_text": "Rope is strong.", "is_supporting": False},
    ],
    "question_decomposition": [
        {"id": 482, "question": "Vark >> maker", "answer": "Ek Motors", "paragraph_support_idx": 2},
        {"id": 73, "question": "#1 >> leader", "answer": "Tom Ek", "paragraph_support_idx": 0},
    ],
}


def save(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def save_lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_hotpotqa(tmp_path: Path) -> None:
    second = {**HOTPOT, "_id": "77", "type": "comparison"}
    questions, passages = import_hotpotqa(save(tmp_path / "hotpot.json", [HOTPOT, second]))
    assert questions[0] == Question(
        id="5a8b",
        text="In which town was the author of Q&A Lane born?",
        answers=("Ostel",),
        meta={"type": "bridge", "level": "hard", "supporting_titles": ["Q&A Lane", "Mira Tolven"]},
    )
    assert (questions[1].id, questions[1].meta["type"]) == ("77", "comparison")
    assert passages == HOTPOT_PASSAGES
    assert import_hotpotqa(save_lines(tmp_path / "hotpot.jsonl", HOTPOT, second)) == (questions, passages)


def test_2wikimultihopqa_as_list_as_lines_and_with_strings_of_json(tmp_path: Path) -> None:
    questions, passages = import_2wikimultihopqa(save(tmp_path / "dev.json", [TWO_WIKI]))
    assert questions == [
        Question(
            id="0db8",
            text="Who is the mother of the director of Blue Rain?",
            answers=("Ana Rusk",),
            meta={
                "type": "compositional",
                "level": None,
                "supporting_titles": ["Blue Rain", "Jo Rusk"],
                "evidences": [["Blue Rain", "director", "Jo Rusk"], ["Jo Rusk", "mother", "Ana Rusk"]],
            },
        )
    ]
    assert passages == [
        Passage(title="Blue Rain", text="A film by Jo Rusk. It is long."),
        Passage(title="Jo Rusk", text="Son of Ana Rusk."),
    ]
    assert import_2wikimultihopqa(save_lines(tmp_path / "dev.jsonl", TWO_WIKI)) == (questions, passages)
    packed = {key: json.dumps(TWO_WIKI[key]) for key in ("context", "supporting_facts", "evidences")}
    assert import_2wikimultihopqa(save_lines(tmp_path / "hub.jsonl", {**TWO_WIKI, **packed})) == (
        questions,
        passages,
    )
    broken = save_lines(tmp_path / "broken.jsonl", {**TWO_WIKI, "context": "[["})
    with pytest.raises(DataError, match=r"broken\.jsonl line 1: 'context' is a string, but not of JSON"):
        import_2wikimultihopqa(broken)


def test_musique(tmp_path: Path) -> None:
    twin = {**MUSIQUE, "answerable": False}
    other = {**MUSIQUE, "id": "3hop1__1_2_3", "answer_aliases": []}
    questions, passages = import_musique(save_lines(tmp_path / "musique.jsonl", MUSIQUE, twin, other))
    assert questions[0] == Question(
        id="2hop__482_73",
        text="Who leads the firm that made the Vark?",
        answers=("Tom Ek", "T. Ek"),
        meta={"type": "2hop", "level": None, "supporting_titles": ["Vark", "Ek Motors"]},
    )
    assert [(q.id, q.answers, q.meta["type"]) for q in questions[1:]] == [("3hop1__1_2_3", ("Tom Ek",), "3hop1")]
    assert [(p.title, p.text) for p in passages] == [
        ("Ek Motors", "Ek Motors is led by Tom Ek."),
        ("Rope", "Rope is long."),
        ("Vark", "The Vark is a car by Ek Motors."),
        ("Rope", "Rope is strong."),
    ]


def test_plain(tmp_path: Path) -> None:
    path = save_lines(
        tmp_path / "mine.jsonl",
        {"question": "Who?", "answer": "Mira", "split": "dev", "passages": [{"title": "A", "text": "a  b"}]},
        {"id": "x", "question": "Where?", "answers": ["Ostel", "O."]},
    )
    questions, passages = import_plain(path)
    assert questions == [
        Question(id="mine-1", text="Who?", answers=("Mira",), meta={"split": "dev"}),
        Question(id="x", text="Where?", answers=("Ostel", "O.")),
    ]
    assert passages == [Passage(title="A", text="a b")]


@pytest.mark.parametrize("format", ["hotpotqa", "2wikimultihopqa", "musique", "plain"])
def test_an_import_is_what_the_folder_then_holds(format: str, tmp_path: Path) -> None:
    plain = {"id": "p", "question": "Who?", "answer": "Mira", "passages": [{"title": "A", "text": "b"}]}
    record = {"hotpotqa": HOTPOT, "2wikimultihopqa": TWO_WIKI, "musique": MUSIQUE, "plain": plain}[format]
    source = save_lines(tmp_path / "source.jsonl", record)
    questions, passages = import_dataset(format, source, tmp_path / "out", split="dev")
    assert len(questions) == 1
    assert questions[0].meta["split"] == "dev"
    assert load_questions(tmp_path / "out" / "questions.jsonl") == questions
    assert load_passages(tmp_path / "out" / "corpus.jsonl") == passages
    assert unsupported(questions, passages) == []


def test_splits_meet_in_one_folder_and_a_second_import_changes_nothing(tmp_path: Path) -> None:
    train = save(tmp_path / "train.json", [HOTPOT])
    dev = save(tmp_path / "dev.json", [{**HOTPOT, "_id": "d", "context": [HOTPOT["context"][0], ["New", ["Page."]]]}])
    import_dataset("hotpotqa", train, tmp_path / "out", split="train")
    first = import_dataset("hotpotqa", dev, tmp_path / "out", split="dev")
    assert [(q.id, q.meta["split"]) for q in first[0]] == [("5a8b", "train"), ("d", "dev")]
    assert first[1] == [*HOTPOT_PASSAGES, Passage(title="New", text="Page.")]
    assert import_dataset("hotpotqa", dev, tmp_path / "out", split="dev") == first
    with pytest.raises(DataError, match="question 5a8b: its id comes twice"):
        import_dataset("hotpotqa", train, tmp_path / "out", split="dev")
    assert load_questions(tmp_path / "out" / "questions.jsonl") == first[0]


def test_plain_files_keep_their_own_splits(tmp_path: Path) -> None:
    rows = [{"id": s, "question": "Who?", "answer": "x", "split": s} for s in ("train", "dev")]
    questions, passages = import_dataset("plain", save_lines(tmp_path / "q.jsonl", *rows), tmp_path / "out")
    assert [q.meta["split"] for q in questions] == ["train", "dev"]
    assert passages == []
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_id": None}, "record 1: '_id' is None"),
        ({"answer": None}, r"record 1, question 5a8b: no gold answer \('answer' is None\).*not a test file"),
        ({"question": ""}, "record 1: 'question' is ''"),
        ({"supporting_facts": {}}, r"record 1: 'supporting_facts' is \{\}, not a list"),
        ({"supporting_facts": [["A"]]}, r"record 1: an entry of 'supporting_facts' is \['A'\]"),
        ({"context": [["A", "text"]]}, r"record 1: the page 'A' of 'context' has the sentences 'text'"),
        ({"context": [["", []]]}, r"record 1: an entry of 'context' is \['', \[\]\]"),
        ({"type": 3}, "record 1: 'type' is 3"),
    ],
)
def test_a_bad_hotpotqa_record_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        import_hotpotqa(save(tmp_path / "hotpot.json", [{**HOTPOT, **change}]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paragraphs": [7]}, r"line 1, paragraphs\[0\]: 7 is not a JSON object"),
        ({"paragraphs": [{"title": "A"}]}, r"line 1, paragraphs\[0\]: no field 'paragraph_text'"),
        ({"answer": ""}, "question 2hop__482_73: no gold answer"),
        ({"answer_aliases": "T"}, "line 1: 'answer_aliases' is 'T', not a list"),
        ({"question_decomposition": None}, "line 1: 'question_decomposition' is None, not a list"),
    ],
)
def test_a_bad_musique_record_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        import_musique(save_lines(tmp_path / "musique.jsonl", {**MUSIQUE, **change}))


def test_files_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"unknown format 'squad'.*hotpotqa, 2wikimultihopqa, musique, plain"):
        import_dataset("squad", tmp_path / "x", tmp_path)
    with pytest.raises(DataError, match=r"x\.json: no such file"):
        import_dataset("hotpotqa", tmp_path / "x.json", tmp_path)
    with pytest.raises(DataError, match="no questions in it"):
        import_dataset("hotpotqa", save(tmp_path / "empty.json", []), tmp_path)
    (tmp_path / "cut.json").write_text('[\n{"_id": "a",', encoding="utf-8")
    with pytest.raises(DataError, match=r"cut\.json line 2: not JSON"):
        import_hotpotqa(tmp_path / "cut.json")
    with pytest.raises(DataError, match=r"list\.json record 2: 3 is not a JSON object"):
        import_hotpotqa(save(tmp_path / "list.json", [HOTPOT, 3]))
    with pytest.raises(DataError, match=r"twice\.json, question 5a8b: its id comes twice"):
        import_hotpotqa(save(tmp_path / "twice.json", [HOTPOT, HOTPOT]))
    (tmp_path / "latin.json").write_bytes(b'[{"_id": "\xe9"}]')
    with pytest.raises(DataError, match=r"latin\.json: not UTF-8"):
        import_hotpotqa(tmp_path / "latin.json")


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([HOTPOT]).encode())
    assert import_hotpotqa(tmp_path / "marked.json")[1] == HOTPOT_PASSAGES


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = save(tmp_path / "hotpot.json", [HOTPOT])
    with pytest.raises(DataError, match=r"questions\.jsonl: cannot be (read|written): Not a directory"):
        import_dataset("hotpotqa", source, source / "out")
