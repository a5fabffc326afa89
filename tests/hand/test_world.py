"""The generated world: a solver that knows only the templates must read every answer off the pages."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys

import pytest

from cotrain.data.questions import load_questions, write_questions
from cotrain.data.world import World, generate, training_text
from cotrain.data.world_read import facts, wanted
from cotrain.data.world_text import ADJECTIVES, COMPANIES, FILLER, FIRST_NAMES, PROFESSIONS, RELATIONS, THINGS
from cotrain.errors import ConfigError
from cotrain.sections import WorldConfig

WORLDS = [
    WorldConfig(hops=(1, 2, 3, 4)),
    WorldConfig(seed=7, entities=20, hops=(1, 2, 3), questions=60, distractors=0),
    WorldConfig(seed=3, entities=1500, hops=(2,), questions=300, distractors=9),
]


@pytest.fixture(scope="module", params=WORLDS, ids=["default", "small", "large"])
def world(request: pytest.FixtureRequest) -> World:
    return generate(request.param)


def pattern(template: str) -> re.Pattern[str]:
    """A template as a regular expression; its fields become groups."""
    fields = {
        "s": "(?P<s>.+)",
        "o": "(?P<o>.+)",
        "n": "(?P<n>.+)",
        "it": "(?:She|He|It)",
        "its": "(?:Her|His|Its)",
    }
    fields |= {"kind": "[a-z ]+", "city": ".+", "person": ".+", "thing": "[a-z]+"}
    parts = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(fields[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)))


STATEMENTS = [(r.name, pattern(s)) for r in RELATIONS for s in r.sentences]
QUESTIONS = [(r, pattern(q)) for r in RELATIONS for q in r.questions]
PHRASES = [(r, pattern(p)) for r in RELATIONS for p in r.phrases]
NOISE = [pattern(s) for sentences in FILLER.values() for s in sentences]


def read_pages(world: World) -> dict[str, dict[str, set[str]]]:
    """Title -> relation -> the values that its page states, under every reading of every sentence."""
    pages: dict[str, dict[str, set[str]]] = {}
    names = {fact.value for fact in world.facts}
    for passage in world.passages:
        stated = pages.setdefault(passage.title, {})
        for sentence in re.findall(r"[^.]+\.", passage.text):
            readings = [(name, p.fullmatch(sentence.strip())) for name, p in STATEMENTS]
            found = [
                (name, m["o"]) for name, m in readings if m and m.groupdict().get("s", passage.title) == passage.title
            ]
            found = [(name, value) for name, value in found if value in names]
            assert found or any(p.fullmatch(sentence.strip()) for p in NOISE), sentence
            for name, value in found:
                stated.setdefault(name, set()).add(value)
    return pages


def answers(text: str, patterns: list, pages: dict[str, dict[str, set[str]]]) -> set[str]:
    """Every answer that some parse of a question or phrase leads to."""
    results: set[str] = set()
    for relation, p in patterns:
        if match := p.fullmatch(text):
            inner = match["n"]
            subjects = {inner} if inner in pages else answers(inner, PHRASES, pages)
            results |= {value for s in subjects if s in pages for value in pages[s].get(relation.name, set())}
    return results


def test_pages_state_the_facts_and_nothing_that_reads_like_another(world: World) -> None:
    pages = read_pages(world)
    facts: dict[str, dict[str, set[str]]] = {}
    for fact in world.facts:
        facts.setdefault(fact.subject, {})[fact.relation] = {fact.value}
    assert pages == facts
    kinds = {relation.name: relation.subject for relation in RELATIONS}
    for title, stated in pages.items():
        assert len({kinds[name] for name in stated}) == 1, title
        assert 3 <= len(stated) <= 4, title


def test_the_solver_reads_every_answer_and_no_other(world: World) -> None:
    pages = read_pages(world)
    for question in world.questions:
        assert answers(question.text, QUESTIONS, pages) == set(question.answers), question.text


def test_following_the_supporting_titles_leads_to_the_answer(world: World) -> None:
    text = {passage.title: passage.text for passage in world.passages}
    for question in world.questions:
        titles = question.supporting_titles
        hops = int(str(question.meta["type"]).removesuffix("hop"))
        assert len(titles) == len(set(titles)) == hops
        assert titles[0] in question.text
        (answer,) = question.answers
        for here, there in zip(titles, [*titles[1:], answer], strict=True):
            assert re.search(rf"\b{re.escape(there)}\b", text[here]), question
        assert answer not in question.text
        assert all(answer not in text[title] for title in titles[:-1])
        assert all(title not in question.text for title in titles[1:])
        assert 1 <= len(answer.split()) <= 3


def test_hops_and_splits_are_even() -> None:
    world = generate(WorldConfig(hops=(1, 2, 4), questions=120))
    for hops in (1, 2, 4):
        splits = [q.meta["split"] for q in world.questions if q.meta["type"] == f"{hops}hop"]
        assert (splits.count("train"), splits.count("dev")) == (34, 6)
    tiny = generate(WorldConfig(hops=(2,), questions=4))
    assert [q.meta["split"] for q in tiny.questions] == ["train", "train", "train", "dev"]


def test_questions_differ_and_none_is_in_both_splits(world: World) -> None:
    assert len({q.text for q in world.questions}) == len({q.id for q in world.questions}) == len(world.questions)
    chains = [(q.supporting_titles[0], *q.meta["relations"]) for q in world.questions]
    assert len(set(chains)) == len(chains)


def test_names_are_distinct_and_none_hides_in_another(world: World) -> None:
    titles = [passage.title for passage in world.passages]
    assert len(set(titles)) == len(titles)
    for title in titles:
        assert 1 <= len(title.split()) <= 2
    plain = {*ADJECTIVES, *COMPANIES, *FIRST_NAMES["she"], *FIRST_NAMES["he"]}
    invented = [word for title in titles for word in title.split() if word not in plain]
    assert len(set(invented)) == len(invented) == len(titles)


def test_passages_are_short() -> None:
    lengths = [len(passage.text.split()) for passage in generate(WorldConfig()).passages]
    assert min(lengths) >= 20
    assert max(lengths) <= 42
    assert 28 <= sum(lengths) / len(lengths) <= 35


def test_distractors_add_that_many_sentences() -> None:
    plain, full = generate(WorldConfig(distractors=0)), generate(WorldConfig(distractors=3))
    assert [p.title for p in plain.passages] == [p.title for p in full.passages]
    for without, with_filler in zip(plain.passages, full.passages, strict=True):
        assert with_filler.text.count(".") == without.text.count(".") + 3


def test_a_world_depends_on_its_settings_alone() -> None:
    """Equal in processes with other hash seeds; the digest and the id pin the world across releases."""
    code = (
        "from cotrain.data.world import generate; from cotrain.sections import WorldConfig; import hashlib;"
        "w = generate(WorldConfig(hops=(1, 2, 3)));"
        "print(hashlib.sha256(repr((w.passages, w.questions)).encode()).hexdigest())"
    )
    here = generate(WorldConfig(hops=(1, 2, 3)))
    expected = hashlib.sha256(repr((here.passages, here.questions)).encode()).hexdigest()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected
    assert generate(WorldConfig(seed=1)).passages != generate(WorldConfig(seed=0)).passages


def test_a_question_keeps_its_id() -> None:
    first = generate(WorldConfig()).questions[0]
    assert first.text == "What is Truburg known for?"
    assert first.answers == ("lace",)
    assert first.id == "1hop-" + hashlib.sha256(b"What is Truburg known for? lace").hexdigest()[:12]
    assert first.id == "1hop-72aac0c32298"


def test_more_questions_extend_the_list() -> None:
    some, more = generate(WorldConfig(questions=30)), generate(WorldConfig(questions=200))
    assert more.questions[:30] == some.questions
    assert more.passages == some.passages


@pytest.mark.parametrize("hops", [(1,), (2,), (3,), (4,), (4, 1)])
def test_the_smallest_world_has_questions_of_every_length(hops: tuple[int, ...]) -> None:
    world = generate(WorldConfig(entities=20, hops=hops, questions=10))
    assert len(world.passages) == 20
    assert [q.meta["type"] for q in world.questions] == [f"{hops[i % len(hops)]}hop" for i in range(10)]


def test_too_many_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"20 pages gave only \d+ questions of 1 hops") as caught:
        generate(WorldConfig(entities=20, hops=(1,), questions=500))
    assert int(re.search(r"only (\d+)", str(caught.value))[1]) == len(
        generate(WorldConfig(entities=20, hops=(1,), questions=1)).facts
    )


def test_no_hops_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"world\.hops"):
        generate(WorldConfig(hops=()))


def test_values_stay_apart_from_filler() -> None:
    assert not set(THINGS) & set(PROFESSIONS)
    assert not any(word in sentence.split() for word in PROFESSIONS for f in FILLER.values() for sentence in f)
    assert all(profession[0] not in "aeiou" for profession in PROFESSIONS)


def test_training_text_has_every_passage_and_the_train_questions() -> None:
    config = WorldConfig(questions=40)
    world, lines = generate(config), list(training_text(config))
    assert lines[0] == f"{world.passages[0].title}. {world.passages[0].text}"
    assert len(lines) == 400 + 34
    assert lines[400] == "What is Truburg known for? lace"
    dev = [q.text for q in world.questions if q.meta["split"] == "dev"]
    assert not any(text in line for text in dev for line in lines)


def test_questions_survive_a_file(world: World, tmp_path) -> None:
    write_questions(tmp_path / "q.jsonl", world.questions)
    assert tuple(load_questions(tmp_path / "q.jsonl")) == world.questions


def test_pages_read_back_state_what_the_world_does(world: World):
    stated: dict[str, dict[str, str]] = {}
    for fact in world.facts:
        stated.setdefault(fact.subject, {})[fact.relation] = fact.value
    assert {passage.title: dict(facts(passage.text)) for passage in world.passages} == stated


def test_what_is_wanted_comes_first_and_another_fact_of_such_a_page_second(world: World):
    kinds = {relation.name: relation.subject for relation in RELATIONS}
    for question in world.questions:
        asked, other = wanted(question)
        assert asked == question.meta["relations"][0]
        assert asked != other
        assert kinds[asked] == kinds[other]
