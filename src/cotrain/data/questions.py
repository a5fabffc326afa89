"""Questions and passages as files: cotrain's JSONL schema, read with care and written back.

`questions.jsonl` has `id`, `question` and `answers` (the official one first); every other field goes to `meta`, where
`split`, `type`, `level` and `supporting_titles` have a meaning. `corpus.jsonl` has `title` and `text`. A file that
breaks the schema is refused with the file and the line; nothing is skipped or mended silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain.data.records import Record, read_lines, text, texts, unreadable, write_lines
from cotrain.errors import DataError
from cotrain.sections import CorpusConfig, QuestionSet
from cotrain.types import Passage, Question

if TYPE_CHECKING:
    from cotrain.data.corpus import Corpus

WORLD = "world"
"""The value of `QuestionSet.source` and `.corpus` that means the generated world."""


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a JSONL file, in its order.

    Raises:
        DataError: a missing file, a malformed line, a question without a gold answer, an id that comes twice, or no
            question at all.
    """
    questions = [_question(record) for record in read_lines(path)]
    require_unique(questions, str(path))
    if not questions:
        raise DataError(str(path), "no questions in it", "Give a file with one question a line")
    return questions


def write_questions(path: Path | str, questions: Iterable[Question]) -> None:
    """Write questions so that `load_questions` reads equal ones back (tuples in `meta` come back as lists).

    Raises:
        DataError: `meta` holds what JSON cannot, or one of the schema's own fields.
    """
    write_lines(path, map(_as_values, questions))


def load_passages(path: Path | str) -> list[Passage]:
    """The passages of a JSONL file, in its order; fields other than `title` and `text` are ignored.

    Raises:
        DataError: a missing file, a malformed line, a passage without title or text, or no passage at all.
    """
    passages = [Passage(title=text(record, "title"), text=text(record, "text")) for record in read_lines(path)]
    if not passages:
        raise DataError(str(path), "no passages in it", "Give a file with one passage a line")
    return passages


def write_passages(path: Path | str, passages: Iterable[Passage]) -> None:
    """Write passages so that `load_passages` reads equal ones back."""
    write_lines(path, ({"title": passage.title, "text": passage.text} for passage in passages))


def load_ids(path: Path | str) -> list[str]:
    """The question ids of a text file with one id a line; blank lines are skipped.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"not UTF-8: {error}", "Save the file as UTF-8") from None
    return [line.strip() for line in lines if line.strip()]


def select(
    questions: Sequence[Question],
    *,
    split: str | None = None,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Question]:
    """Keep the questions of `split`, of these the ones in `ids` (in the order of `ids`), of these the first `limit`.

    Raises:
        DataError: an id that is not there (after the split was taken) or comes twice, or nothing left.
    """
    kept = [question for question in questions if split is None or question.meta.get("split") == split]
    if ids is not None:
        by_id = {question.id: question for question in kept}
        for id, count in Counter(ids).items():
            if id not in by_id:
                within = f"split '{split}'" if split is not None else "the questions"
                raise DataError(f"question {id}", f"asked for, but not in {within}", "Correct the list of ids")
            if count > 1:
                raise DataError(f"question {id}", f"asked for {count} times", "List each id once")
        kept = [by_id[id] for id in ids]
    kept = kept[:limit]
    if not kept:
        splits = Counter(str(question.meta.get("split")) for question in questions)
        found = ", ".join(f"'{name}': {count}" for name, count in sorted(splits.items())) or "none"
        raise DataError(f"split '{split}'", f"no question left (splits there: {found})", "Choose a split that exists")
    return kept


def load_set(config: QuestionSet, corpus: CorpusConfig) -> tuple[list[Question], Corpus]:
    """The selected questions of a set, and the corpus that their searches go to.

    Raises:
        DataError: as `load_questions`, `load_passages` and `select`; or questions from a file together with the
            generated corpus (or the other way round) when the corpus has no page that they name.
    """
    from cotrain.data.corpus import Corpus
    from cotrain.data.world import generate

    world = generate(config.world) if WORLD in (config.source, config.corpus) else None
    questions = list(world.questions) if world and config.source == WORLD else load_questions(config.source)
    passages = list(world.passages) if world and config.corpus == WORLD else load_passages(config.corpus)
    if (config.source == WORLD) != (config.corpus == WORLD):
        _require_related(config, questions, passages)
    ids = load_ids(config.ids) if config.ids is not None else None
    chosen = select(questions, split=config.split, ids=ids, limit=config.limit)
    return chosen, Corpus.open(passages, corpus)


def unsupported(questions: Iterable[Question], passages: Iterable[Passage]) -> list[Question]:
    """The questions that name a supporting title no passage has: retrieval cannot serve them in full."""
    titles = {passage.title for passage in passages}
    return [question for question in questions if not titles.issuperset(question.supporting_titles)]


def require_unique(questions: Iterable[Question], where: str) -> None:
    """Refuse questions that share an id.

    Raises:
        DataError: the first id that comes twice.
    """
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise DataError(f"{where}, question {question.id}", "its id comes twice", "Give each question its own id")
        seen.add(question.id)


def _question(record: Record) -> Question:
    id = text(record, "id")
    if not record.values.get("answers"):
        found = f"no gold answer ('answers' is {record.values.get('answers')!r})"
        raise DataError(f"{record.where}, question {id}", found, "Give 'answers', a list of accepted answers")
    return Question(
        id=id,
        text=text(record, "question"),
        answers=texts(record, "answers"),
        meta={key: value for key, value in record.values.items() if key not in _OWN},
    )


def _as_values(question: Question) -> dict[str, object]:
    taken = _OWN.intersection(question.meta)
    if taken:
        found = f"meta holds the schema's own field '{min(taken)}'"
        raise DataError(f"question {question.id}", found, "Name the field in meta otherwise")
    return {"id": question.id, "question": question.text, "answers": list(question.answers), **question.meta}


def _require_related(config: QuestionSet, questions: Sequence[Question], passages: Sequence[Passage]) -> None:
    named = [question for question in questions if question.supporting_titles]
    if named and len(unsupported(named, passages)) == len(named):
        found = f"not one page that the questions of source '{config.source}' need"
        raise DataError(f"corpus '{config.corpus}'", found, "Set source and corpus to the same data set")


_OWN = frozenset({"id", "question", "answers"})
