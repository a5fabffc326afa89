"""The generated world: a seeded graph of invented people, places, works and organisations, as pages and questions.

Equal settings give equal worlds in every process. Each page is a short passage; each fact that a question walks over
is stated on its subject's page and has one value, so every question has one answer, found by following its
`supporting_titles` in order. The answer stands on the last of these pages and on none before it. No chain of facts is
asked for twice, so none is in both `train` and `dev`. Needs no data and no network.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cotrain.data import world_text as words
from cotrain.data.world_text import RELATIONS, Relation
from cotrain.errors import ConfigError
from cotrain.sections import WorldConfig
from cotrain.types import Passage, Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`value` is what `relation` says of `subject`: another page's title, or a plain value such as a year."""

    subject: str
    relation: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Questions, the passages that answer them, and the facts that both were made from (those on the pages)."""

    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class _Page:
    name: str
    kind: str
    pronouns: tuple[str, str]
    noun: str = ""
    """What the thing is, for organisations and works."""


_Facts = dict[str, dict[str, str]]
"""Subject -> relation -> value."""


def generate(config: WorldConfig) -> World:
    """The world of a configuration: `config.entities` pages and `config.questions` questions.

    The numbers of hops in `config.hops` take turns. Of each, three questions in twenty are `dev`, the others `train`.
    Question `meta`: `type` ("2hop"), `supporting_titles` (in the order of the hops), `relations`, `split`. An id is
    made from the question and its answer, so it means the same in every world where it occurs. Asking for more
    questions only extends the list.

    Raises:
        ConfigError: no number of hops, or too few chains of some length for that many questions.
    """
    if not config.hops:
        raise ConfigError("world.hops", "no number of hops", "Give at least one, such as [1, 2]")
    pages = _pages(config)
    facts = _facts(config, pages)
    passages = _passages(config, pages, facts)
    return World(
        questions=tuple(_questions(config, facts, passages)),
        passages=passages,
        facts=tuple(
            Fact(subject=subject, relation=relation, value=value)
            for subject, stated in facts.items()
            for relation, value in stated.items()
        ),
    )


def training_text(config: WorldConfig) -> Iterator[str]:
    """Every passage ("title. text") and every train question with its answer: text to fit a tokenizer on."""
    world = generate(config)
    for passage in world.passages:
        yield f"{passage.title}. {passage.text}"
    for question in world.questions:
        if question.meta["split"] == "train":
            yield f"{question.text} {question.answers[0]}"


def _rng(config: WorldConfig, purpose: str) -> random.Random:
    """One stream per purpose, so that settings which concern one leave the others alone."""
    return random.Random(f"cotrain world {config.seed} {purpose}")


class _Words:
    """Draws invented words that are all different."""

    def __init__(self, rng: random.Random, used: Iterable[str] = ()) -> None:
        self._rng, self._used = rng, set(used)

    def draw(self, kind: str) -> str:
        stem = self._syllable()
        while True:
            ending = self._rng.choice(words.ENDINGS[kind])
            joint = self._rng.choice(words.CODAS) if ending[0] in "aeiou" else ""
            word = (stem + joint + ending).capitalize()
            if len(word) > 4 and word not in self._used:
                self._used.add(word)
                return word
            stem += self._syllable()  # longer until it is new, so this ends for a world of any size

    def _syllable(self) -> str:
        return self._rng.choice(words.ONSETS) + self._rng.choice(words.VOWELS)


def _pages(config: WorldConfig) -> dict[str, list[_Page]]:
    """Kind -> its pages. There are at least two countries, and at least as many people as works or organisations."""
    rng = _rng(config, "names")
    draw = _Words(rng).draw
    counts = {kind: max(2, round(share * config.entities)) for kind, share in words.SHARES.items()}
    counts["person"] = config.entities - sum(counts.values())
    pages: dict[str, list[_Page]] = {kind: [] for kind in counts}
    for kind, count in counts.items():
        for _ in range(count):
            name, pronoun, noun = draw(kind), kind, ""
            if kind == "person":
                pronoun = rng.choice(("she", "he"))
                name = f"{rng.choice(words.FIRST_NAMES[pronoun])} {name}"
            elif kind == "organisation":
                second, noun = rng.choice(list(words.COMPANIES.items()))
                name = f"{name} {second}"
            elif kind == "work":
                name, noun = f"{rng.choice(words.ADJECTIVES)} {name}", rng.choice(words.WORKS)
            pages[kind].append(_Page(name, kind, words.PRONOUNS[pronoun], noun))
    return pages


def _facts(config: WorldConfig, pages: Mapping[str, list[_Page]]) -> _Facts:
    """What the pages state: the opening fact of each, and two or three more of those that are true of it."""
    rng = _rng(config, "facts")
    names = {kind: [page.name for page in members] for kind, members in pages.items()}
    used = {word for members in names.values() for name in members for word in name.split()}
    true = _truth(rng, names, _Words(rng, used).draw)
    stated: _Facts = {}
    for kind, members in pages.items():
        for page in members:
            opening = words.OPENINGS[kind]
            others = [relation for relation in true[page.name] if relation != opening]
            chosen = rng.sample(others, rng.choice((2, 3)) if kind == "person" else 2)
            stated[page.name] = {relation: true[page.name][relation] for relation in (opening, *chosen)}
    return stated


def _truth(rng: random.Random, names: Mapping[str, list[str]], draw: Callable[[str], str]) -> _Facts:
    """Everything that holds. Both ways of a fact agree: nobody has two spouses, works or organisations."""
    people, cities, firms = names["person"], names["city"], names["organisation"]
    true: _Facts = {}
    for person in people:
        true[person] = {"profession": rng.choice(words.PROFESSIONS), "birthplace": rng.choice(cities)}
        true[person] |= {"employer": rng.choice(firms), "birth year": str(rng.randint(1870, 1899))}
    couples = rng.sample(people, len(people) * 4 // 5 // 2 * 2)
    for one, other in zip(couples[::2], couples[1::2], strict=True):
        true[one]["spouse"], true[other]["spouse"] = other, one
    for work, author in zip(names["work"], rng.sample(people, len(names["work"])), strict=True):
        true[work] = {"author": author, "setting": rng.choice(cities), "year": str(rng.randint(1920, 1949))}
        true[author]["wrote"] = work
    for firm, founder in zip(firms, rng.sample(people, len(firms)), strict=True):
        true[firm] = {"base": rng.choice(cities), "founder": founder, "leader": rng.choice(people)}
        true[firm]["founding year"] = str(rng.randint(1920, 1949))
        true[founder]["founded"] = firm
    for city, mayor in zip(cities, rng.sample(people, len(cities)), strict=True):
        true[city] = {"country": rng.choice(names["country"]), "mayor": mayor}
        true[city] |= {"product": rng.choice(words.PRODUCTS), "river": draw("river")}
    for country, capital in zip(names["country"], rng.sample(cities, len(names["country"])), strict=True):
        true[country] = {"capital": capital, "ruler": rng.choice(people)}
        true[country] |= {"currency": draw("currency").lower(), "language": draw("language")}
        true[capital]["country"] = country
    return true


def _passages(config: WorldConfig, pages: Mapping[str, list[_Page]], facts: _Facts) -> tuple[Passage, ...]:
    names = {kind: [page.name for page in pages[kind]] for kind in ("person", "city")}
    return tuple(
        Passage(
            title=page.name,
            text=_prose(_rng(config, f"page {page.name}"), page, facts[page.name], names, config),
        )
        for members in pages.values()
        for page in members
    )


def _prose(
    rng: random.Random,
    page: _Page,
    stated: Mapping[str, str],
    names: Mapping[str, list[str]],
    config: WorldConfig,
) -> str:
    """The opening fact, then the other facts and the filler in any order."""
    it, its = page.pronouns
    opening, *rest = (
        rng.choice(_BY_NAME[relation].sentences).format(s=page.name, o=value, it=it, its=its, kind=page.noun)
        for relation, value in stated.items()
    )
    filler = words.FILLER[page.kind]
    order = rng.sample(filler, len(filler))
    for i in range(config.distractors):
        others = {kind: _other(rng, names[kind], page.name) for kind in names}
        thing = rng.choice(words.THINGS)
        rest.append(order[i % len(order)].format(it=it, its=its, thing=thing, **others))
    rng.shuffle(rest)
    return " ".join([opening, *rest])


def _other(rng: random.Random, names: list[str], name: str) -> str:
    """One of `names` that is not `name`."""
    while (other := rng.choice(names)) == name:
        pass
    return other


@dataclass(frozen=True, slots=True)
class _Walk:
    titles: tuple[str, ...]
    """The pages walked over, one per hop."""
    relations: tuple[str, ...]
    answer: str


def _questions(config: WorldConfig, facts: _Facts, passages: tuple[Passage, ...]) -> Iterator[Question]:
    rng = _rng(config, "questions")
    starts = list(facts)
    texts = {passage.title: passage.text for passage in passages}
    asked: dict[int, set[tuple[str, ...]]] = {hops: set() for hops in config.hops}
    for i in range(config.questions):
        hops = config.hops[i % len(config.hops)]
        for _ in range(_MAX_TRIES):
            walk = _walk(rng, facts, rng.choice(starts), hops)
            if walk and (walk.titles[0], *walk.relations) not in asked[hops] and not _has_shortcut(walk, texts):
                break
        else:
            found = f"{config.entities} pages gave only {len(asked[hops])} questions of {hops} hops"
            raise ConfigError("world", found, "Ask for fewer questions or hops, or set more entities")
        # Spread evenly, three in twenty: nobody gets a small set without a held-out question.
        split = "dev" if (3 * len(asked[hops]) + 13) % 20 < 3 else "train"
        asked[hops].add((walk.titles[0], *walk.relations))
        yield _question(rng, walk, split)


def _walk(rng: random.Random, facts: _Facts, start: str, hops: int) -> _Walk | None:
    """A random walk that meets no page twice, or None where it finds no way on."""
    titles, relations = [start], list[str]()
    for hop in range(1, hops + 1):
        onward = [
            (relation, value)
            for relation, value in facts[titles[-1]].items()
            if value not in titles and (hop == hops or value in facts)
        ]
        if not onward:
            return None
        relation, value = rng.choice(onward)
        relations.append(relation)
        titles.append(value)
    return _Walk(tuple(titles[:-1]), tuple(relations), titles[-1])


def _has_shortcut(walk: _Walk, texts: Mapping[str, str]) -> bool:
    """True when the answer stands on a page before the last, so that fewer hops would do."""
    return any(walk.answer in texts[title] for title in walk.titles[:-1])


def _question(rng: random.Random, walk: _Walk, split: str) -> Question:
    phrase = walk.titles[0]
    for relation in walk.relations[:-1]:
        phrase = rng.choice(_BY_NAME[relation].phrases).format(n=phrase)
    text = rng.choice(_BY_NAME[walk.relations[-1]].questions).format(n=phrase)
    kind = f"{len(walk.relations)}hop"
    return Question(
        id=f"{kind}-{hashlib.sha256(f'{text} {walk.answer}'.encode()).hexdigest()[:12]}",
        text=text,
        answers=(walk.answer,),
        meta={
            "type": kind,
            "supporting_titles": list(walk.titles),
            "relations": list(walk.relations),
            "split": split,
        },
    )


_BY_NAME: dict[str, Relation] = {relation.name: relation for relation in RELATIONS}

_MAX_TRIES = 20_000
"""Walks drawn for one question before the graph counts as exhausted."""
