"""Official files of public data sets, and plain JSONL, turned into `questions.jsonl` and `corpus.jsonl`.

Each `import_<format>` reads one file and returns (questions, passages): passages without repeats, in the order met,
white space collapsed. `import_dataset` does that and writes a folder; calling it once per official split fills one
folder. Nothing is downloaded, nothing is rewritten, and a question without a gold answer (an official test file) is
refused. Questions whose pages are not among the passages are kept: see `questions.unsupported`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args

from cotrain.data.questions import (
    load_passages,
    load_questions,
    require_unique,
    write_passages,
    write_questions,
)
from cotrain.data.records import Record, items, read_lines, read_records, records, shorten, text, texts
from cotrain.errors import DataError
from cotrain.types import Passage, Question

Format = Literal["hotpotqa", "2wikimultihopqa", "musique", "plain"]
"""What `import_dataset` reads."""

Imported = tuple[list[Question], list[Passage]]
"""Questions and the passages that came with them."""


def import_dataset(format: Format, source: Path | str, target: Path | str, *, split: str | None = None) -> Imported:
    """Read an official file and write `questions.jsonl` and `corpus.jsonl` into the folder `target`.

    `split` becomes every question's `split`; None leaves what the file says (only plain files say it). A folder that
    is there already is added to: questions of the splits that the file brings are replaced, those of other splits
    stay, and the passages are united. So importing a file twice changes nothing.

    Returns:
        All questions and passages that are now in the folder.

    Raises:
        DataError: an unknown format, a record that does not fit it (named by file and line or position), an id that
            is in two splits, or a folder that cannot be written.
    """
    if format not in _IMPORTERS:
        known = ", ".join(get_args(Format))
        raise DataError(f"import of {source}", f"unknown format '{format}'", f"Choose one of: {known}")
    questions, passages = _IMPORTERS[format](source)
    if not questions:
        raise DataError(str(source), "no questions in it", f"Check that it is a {format} file")
    if split is not None:
        questions = [_with_split(question, split) for question in questions]
    questions_path, corpus_path = Path(target) / "questions.jsonl", Path(target) / "corpus.jsonl"
    if questions_path.exists():
        incoming = {question.meta.get("split") for question in questions}
        kept = [q for q in load_questions(questions_path) if q.meta.get("split") not in incoming]
        questions = [*kept, *questions]
    if corpus_path.exists():
        passages = _distinct([*load_passages(corpus_path), *passages])
    require_unique(questions, str(target))
    write_questions(questions_path, questions)
    if passages:
        write_passages(corpus_path, passages)
    return questions, passages


def import_hotpotqa(path: Path | str) -> Imported:
    """HotpotQA (`hotpot_train_v1.1.json`, `hotpot_dev_distractor_v1.json`, `hotpot_dev_fullwiki_v1.json`).

    A JSON list (or JSON lines) of objects with `_id`, `question`, `answer`, `type` (bridge, comparison), `level`
    (easy, medium, hard), `supporting_facts` [[title, sentence number], ...] and `context` [[title, [sentence, ...]],
    ...]. Titles carry HTML entities, which are undone. The contexts of the full-wiki file may lack a supporting page.

    Raises:
        DataError: a record that is not like that.
    """
    return _collect(path, read_records(path), _hotpotqa)


def import_2wikimultihopqa(path: Path | str) -> Imported:
    """2WikiMultiHopQA (`train.json`, `dev.json`).

    As HotpotQA (`level` is absent), with `evidences` [[subject, relation, object], ...], which go to `meta`. In the
    JSON-lines variant `context`, `supporting_facts` and `evidences` may be strings that hold that as JSON.

    Raises:
        DataError: a record that is not like that.
    """
    return _collect(path, read_records(path), _2wikimultihopqa)


def import_musique(path: Path | str) -> Imported:
    """MuSiQue (`musique_ans_v1.0_train.jsonl`, `musique_full_v1.0_dev.jsonl`, ...).

    JSON lines with `id` (2hop__..., 3hop1__...: its first part is the type), `question`, `answer`, `answer_aliases`,
    `answerable`, `paragraphs` [{idx, title, paragraph_text, is_supporting}, ...] and `question_decomposition`
    [{..., paragraph_support_idx}, ...], which gives the supporting titles their order. Unanswerable questions are
    left out; their paragraphs stay in the corpus. A title may have several paragraphs.

    Raises:
        DataError: a record that is not like that.
    """
    return _collect(path, read_lines(path), _musique)


def import_plain(path: Path | str) -> Imported:
    """JSON lines of one's own: `question`, and `answers` (a list) or `answer` (a string).

    `id` is optional (else <file name>-<number>, from 1); so is `passages` [{title, text}, ...]. All other fields go to
    `meta`: name them `split`, `type`, `level`, `supporting_titles` where that is what they are.

    Raises:
        DataError: a record that is not like that.
    """
    return _collect(path, read_lines(path), _plain)


def _collect(
    path: Path | str,
    source: Iterable[Record],
    convert: Callable[[Record, str], tuple[Question | None, list[Passage]]],
) -> Imported:
    questions: list[Question] = []
    passages: dict[Passage, None] = {}
    for number, record in enumerate(source, start=1):
        question, found = convert(record, f"{Path(path).stem}-{number}")
        if question is not None:
            questions.append(question)
        passages.update(dict.fromkeys(found))
    require_unique(questions, str(path))
    return questions, list(passages)


def _hotpotqa(record: Record, _: str) -> tuple[Question, list[Passage]]:
    id = text(record, "_id")
    titles = [_title(record, "supporting_facts", fact) for fact in items(record, "supporting_facts")]
    meta: dict[str, object] = {"type": text(record, "type"), "level": record.values.get("level")}
    meta["supporting_titles"] = list(dict.fromkeys(titles))
    question = Question(id=id, text=text(record, "question"), answers=_answers(record, id), meta=meta)
    return question, [passage for page in items(record, "context") for passage in _page(record, page)]


def _2wikimultihopqa(record: Record, number: str) -> tuple[Question, list[Passage]]:
    decoded = {key: _decoded(record, key) for key in ("context", "supporting_facts", "evidences")}
    record = Record(where=record.where, values={**record.values, **decoded})
    question, passages = _hotpotqa(record, number)
    meta = {**question.meta, "evidences": list(items(record, "evidences"))}
    return _with_meta(question, meta), passages


def _musique(record: Record, _: str) -> tuple[Question | None, list[Passage]]:
    id = text(record, "id")
    paragraphs = records(record, "paragraphs")
    passages = [Passage(title=text(p, "title"), text=_collapse(text(p, "paragraph_text"))) for p in paragraphs]
    if not record.values.get("answerable", True):
        return None, passages
    supports = {
        p.values.get("idx"): passage.title
        for p, passage in zip(paragraphs, passages, strict=True)
        if p.values.get("is_supporting")
    }
    hops = [step.values.get("paragraph_support_idx") for step in records(record, "question_decomposition")]
    titles = [*(supports[hop] for hop in hops if hop in supports), *supports.values()]
    meta = {"type": id.split("__")[0], "level": None, "supporting_titles": list(dict.fromkeys(titles))}
    answers = _answers(record, id)
    if record.values.get("answer_aliases"):
        answers = tuple(dict.fromkeys([*answers, *texts(record, "answer_aliases")]))
    return Question(id=id, text=text(record, "question"), answers=answers, meta=meta), passages


def _plain(record: Record, number: str) -> tuple[Question, list[Passage]]:
    id = text(record, "id") if "id" in record.values else number
    answers = texts(record, "answers") if record.values.get("answers") else _answers(record, id)
    own = {"id", "question", "answer", "answers", "passages"}
    meta = {key: value for key, value in record.values.items() if key not in own}
    found = records(record, "passages") if "passages" in record.values else ()
    passages = [Passage(title=_collapse(text(p, "title")), text=_collapse(text(p, "text"))) for p in found]
    return Question(id=id, text=text(record, "question"), answers=answers, meta=meta), passages


def _answers(record: Record, id: str) -> tuple[str, ...]:
    if not record.values.get("answer"):
        found = f"no gold answer ('answer' is {record.values.get('answer')!r})"
        raise DataError(f"{record.where}, question {id}", found, "Import a file with answers, not a test file")
    return (text(record, "answer"),)


def _title(record: Record, key: str, entry: object) -> str:
    """The title of an entry [title, ...] of the list `key`."""
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0].strip():
        found = f"an entry of '{key}' is {shorten(entry)}"
        raise DataError(record.where, found, f"Make each entry of '{key}' a pair that begins with a title")
    return html.unescape(entry[0])


def _page(record: Record, entry: object) -> list[Passage]:
    """An entry [title, [sentence, ...]] of a context as a passage; none for a page without text."""
    title = _title(record, "context", entry)
    sentences = entry[1] if isinstance(entry, list) else None
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        found = f"the page '{title}' of 'context' has the sentences {shorten(sentences)}"
        raise DataError(record.where, found, "Make them a list of strings")
    joined = _collapse(" ".join(sentences))
    return [Passage(title=title, text=joined)] if joined else []


def _decoded(record: Record, key: str) -> object:
    value = record.values.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        found = f"'{key}' is a string, but not of JSON: {error.msg}"
        raise DataError(record.where, found, f"Make '{key}' a list") from None


def _collapse(value: str) -> str:
    return " ".join(value.split())


def _distinct(passages: Iterable[Passage]) -> list[Passage]:
    return list(dict.fromkeys(passages))


def _with_split(question: Question, split: str) -> Question:
    return _with_meta(question, {**question.meta, "split": split})


def _with_meta(question: Question, meta: dict[str, object]) -> Question:
    return Question(id=question.id, text=question.text, answers=question.answers, meta=meta)


_IMPORTERS: dict[Format, Callable[[Path | str], Imported]] = {
    "hotpotqa": import_hotpotqa,
    "2wikimultihopqa": import_2wikimultihopqa,
    "musique": import_musique,
    "plain": import_plain,
}
