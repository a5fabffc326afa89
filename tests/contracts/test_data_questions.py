"""Files of questions and passages: what is read, what is refused and how the refusal reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.config import load_config
from cotrain.curriculum import read_sets
from cotrain.data.questions import (
    load_ids,
    load_passages,
    load_questions,
    load_set,
    select,
    unsupported,
    write_passages,
    write_questions,
)
from cotrain.data.world import generate
from cotrain.errors import DataError
from cotrain.sections import CorpusConfig, QuestionSet, WorldConfig
from cotrain.types import Passage, Question

LINE = '{"id": "a", "question": "Who?", "answers": ["Mira", "M."], "type": "bridge", "supporting_titles": ["P"]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ask(id: str, **meta: object) -> Question:
    return Question(id=id, text=f"{id}?", answers=("x",), meta=meta)


def test_a_line_becomes_a_question(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", LINE, "", '{"id": "b", "question": "Où\u2028?", "answers": ["Zürich"]}')
    first, second = load_questions(path)
    assert first == Question(
        id="a", text="Who?", answers=("Mira", "M."), meta={"type": "bridge", "supporting_titles": ["P"]}
    )
    assert first.supporting_titles == ("P",)
    assert (second.text, second.answers, second.meta) == ("Où\u2028?", ("Zürich",), {})


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE.encode() + b"\r\n")
    assert [question.id for question in load_questions(path)] == ["a"]


def test_questions_survive_a_file(tmp_path: Path) -> None:
    questions = [ask("a", split="dev", level=None, supporting_titles=["Ä", "B"], n=3), ask("b")]
    write_questions(tmp_path / "deep" / "q.jsonl", questions)
    assert load_questions(tmp_path / "deep" / "q.jsonl") == questions
    assert json.loads((tmp_path / "deep" / "q.jsonl").read_text(encoding="utf-8").split("\n")[1]) == {
        "id": "b",
        "question": "b?",
        "answers": ["x"],
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"q\.jsonl line 2: not JSON: .* at column \d: '\{'"),
        ("[1]", r"q\.jsonl line 2: \[1\] is not a JSON object"),
        ('{"id": "b", "answers": ["x"]}', r"q\.jsonl line 2: no field 'question' \(fields: id, answers\)"),
        ('{"question": "Who?", "answers": ["x"]}', r"line 2: no field 'id'"),
        ('{"id": 7, "question": "Who?", "answers": ["x"]}', r"line 2: 'id' is 7"),
        ('{"id": "b", "question": " ", "answers": ["x"]}', r"line 2: 'question' is ' '"),
        ('{"id": "b", "question": "Who?"}', r"line 2, question b: no gold answer \('answers' is None\)"),
        (
            '{"id": "b", "question": "Who?", "answers": []}',
            r"line 2, question b: no gold answer \('answers' is \[\]\)",
        ),
        ('{"id": "b", "question": "Who?", "answers": ["x", ""]}', r"line 2: 'answers\[1\]' is ''"),
        ('{"id": "b", "question": "Who?", "answers": "x"}', r"line 2: 'answers' is 'x', not a list"),
        (
            '{"id": "b", "question": "\\ud800", "answers": ["x"]}',
            r"line 2: 'question' holds half of a surrogate",
        ),
        (LINE, r"q\.jsonl, question a: its id comes twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "q.jsonl", LINE, line)
    with pytest.raises(DataError, match=message):
        load_questions(path)


def test_files_that_are_no_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_questions(tmp_path)
    with pytest.raises(DataError, match="no questions in it"):
        load_questions(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="no passages in it"):
        load_passages(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"title": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl: not UTF-8"):
        load_passages(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match=r"latin\.jsonl: not UTF-8"):
        load_ids(tmp_path / "latin.jsonl")


def test_passages_survive_a_file(tmp_path: Path) -> None:
    passages = [Passage(title="A", text="One."), Passage(title="A", text="Zwei. Größe")]
    write_passages(tmp_path / "c.jsonl", passages)
    assert load_passages(tmp_path / "c.jsonl") == passages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"title": "A"}', r"c\.jsonl line 1: no field 'text' \(fields: title\)"),
        ('{"title": "", "text": "x"}', r"c\.jsonl line 1: 'title' is ''"),
        ('{"title": "A", "text": ["x"]}', r"c\.jsonl line 1: 'text' is \['x'\]"),
    ],
)
def test_a_bad_passage_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_passages(write(tmp_path / "c.jsonl", line))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    write_questions(path, [ask("a")])
    with pytest.raises(DataError, match=r"question b: meta holds the schema's own field 'answers'"):
        write_questions(path, [ask("a"), ask("b", answers=[])])
    with pytest.raises(DataError, match=r"q\.jsonl line 1: JSON cannot hold"):
        write_questions(path, [ask("b", x={1})])
    assert [question.id for question in load_questions(path)] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_select_takes_split_then_ids_then_limit() -> None:
    questions = [ask("a", split="dev"), ask("b", split="train"), ask("c", split="dev"), ask("d", split="dev")]
    assert [q.id for q in select(questions)] == ["a", "b", "c", "d"]
    assert [q.id for q in select(questions, split="dev")] == ["a", "c", "d"]
    assert [q.id for q in select(questions, ids=["d", "b"])] == ["d", "b"]
    assert [q.id for q in select(questions, split="dev", ids=["d", "c", "a"], limit=2)] == ["d", "c"]


def test_select_refuses_what_is_not_there() -> None:
    questions = [ask("a", split="dev"), ask("b", split="train")]
    with pytest.raises(DataError, match="question z: asked for, but not in the questions"):
        select(questions, ids=["a", "z"])
    with pytest.raises(DataError, match="question b: asked for, but not in split 'dev'"):
        select(questions, split="dev", ids=["b"])
    with pytest.raises(DataError, match="question a: asked for 2 times"):
        select(questions, ids=["a", "a"])
    with pytest.raises(DataError, match=r"split 'test': no question left \(splits there: 'dev': 1, 'train': 1\)"):
        select(questions, split="test")


def test_load_set_takes_the_world_by_default() -> None:
    config = QuestionSet(split="dev", limit=5, world=WorldConfig(questions=100, seed=3))
    questions, corpus = load_set(config, CorpusConfig())
    world = generate(config.world)
    assert questions == [q for q in world.questions if q.meta["split"] == "dev"][:5]
    assert corpus.passages == world.passages
    assert unsupported(questions, corpus.passages) == []


def test_load_set_takes_files(tmp_path: Path) -> None:
    write_questions(tmp_path / "q.jsonl", [ask("a", split="dev"), ask("b", split="dev"), ask("c", split="train")])
    write_passages(tmp_path / "c.jsonl", [Passage(title="A", text="One two three.")])
    write(tmp_path / "ids.txt", "b", "", " a ")
    config = QuestionSet(
        source=str(tmp_path / "q.jsonl"),
        corpus=str(tmp_path / "c.jsonl"),
        split="dev",
        ids=str(tmp_path / "ids.txt"),
    )
    questions, corpus = load_set(config, CorpusConfig())
    assert [q.id for q in questions] == ["b", "a"]
    assert corpus.search("two", 3) == [Passage(title="A", text="One two three.")]
    for change in ({"source": "gone.jsonl"}, {"corpus": "gone.jsonl"}, {"ids": "gone.jsonl"}):
        with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
            load_set(config.model_copy(update=change), CorpusConfig())


def test_load_set_refuses_a_corpus_that_has_nothing_to_do_with_the_questions(tmp_path: Path) -> None:
    write_questions(tmp_path / "q.jsonl", [ask("a", supporting_titles=["Paris"]), ask("b")])
    with pytest.raises(DataError, match="corpus 'world': not one page that the questions of source"):
        load_set(QuestionSet(source=str(tmp_path / "q.jsonl")), CorpusConfig())
    world = generate(WorldConfig())
    write_questions(tmp_path / "w.jsonl", world.questions[:3])
    questions, _ = load_set(QuestionSet(source=str(tmp_path / "w.jsonl")), CorpusConfig())
    assert tuple(questions) == world.questions[:3]


def test_unsupported_names_questions_without_all_their_pages() -> None:
    passages = [Passage(title="A", text="x"), Passage(title="B", text="x")]
    questions = [ask("a", supporting_titles=["A", "B"]), ask("b", supporting_titles=["A", "C"]), ask("c")]
    assert [q.id for q in unsupported(questions, passages)] == ["b"]


def test_reading_questions_loads_no_search_library() -> None:
    code = "import sys, cotrain.data.importers, cotrain.data.world; print({'bm25s', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_question_that_is_trained_on_cannot_be_held_out(tmp_path):
    questions = [Question(id=f"q{i}", text=f"Who led {i}?", answers=("Ann",)) for i in range(6)]
    write_questions(tmp_path / "questions.jsonl", questions)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Ginon", "text": "It was led by Ann."}) + "\n")
    (tmp_path / "dev.txt").write_text("q4\nq5\n")
    files = [f"{place}.{kind}={tmp_path}/{name}.jsonl"
             for place in ("data.train", "data.eval.dev")
             for kind, name in (("source", "questions"), ("corpus", "corpus"))]  # fmt: skip
    dev = f"data.eval.dev.ids={tmp_path}/dev.txt"
    settings = [*files, dev, "sampling.questions_per_step=2"]
    with pytest.raises(DataError) as error:
        read_sets(load_config(None, settings))
    assert "data.eval.dev" in str(error.value)
    assert "2 of its 2 questions are trained on too, such as q4" in str(error.value)
    later = [f"data.stages=[{{source='{tmp_path}/questions.jsonl', corpus='{tmp_path}/corpus.jsonl', after_step=1}}]"]
    with pytest.raises(DataError, match="2 of its 2 questions"):
        read_sets(load_config(None, [*settings, "data.train.limit=4", *later]))
    stages, held_out = read_sets(load_config(None, [*settings, "data.train.limit=4"]))
    assert [question.id for question in stages[0][0]] == ["q0", "q1", "q2", "q3"]
    assert [question.id for question in held_out["dev"][0]] == ["q4", "q5"]
