"""The search pipeline and its single-agent baseline, with demonstrations that are careless.

About half of the time each agent does its work: the rewriter asks for the page that the question is about, the
reranker picks it, the answerer gives the fact in question. Otherwise it is careless: another page is asked for or
picked, another fact is given. Once in ten it breaks its format in a way that costs little or even helps the answer: no
query at all (the question itself is searched for then), no pick (the first passages are taken), a whole sentence for an
answer. So a warm-up on them teaches how to work, and to do it half of the time; that it pays is left to reinforcement
learning. Made for questions of the generated world with one hop.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cotrain import Question, System, Turn
from cotrain.data.world_read import facts, wanted
from cotrain.systems.search_pipeline import search_pipeline
from cotrain.systems.single_agent import single_agent

CARELESS, FAULTY = 0.4, 0.1
"""How often a demonstration is careless, and how often it breaks the format."""


def team(**settings: int) -> System:
    """Rewriter, reranker and answerer."""
    return replace(search_pipeline(**settings), demonstrate=of_team)


def alone(*, num_passages: int, passage_words: int, answer_words: int) -> System:
    """One agent that writes the query, reads the passages, and answers, with the same search and penalties alone."""
    system = single_agent(max_turns=2, num_hits=num_passages, snippet_words=passage_words, answer_words=answer_words)
    solver = replace(system.agents[0], tools=("search",))
    return replace(system, agents=(solver,), rules={}, penalties={"solver": -1.0}, demonstrate=of_one)


def of_team(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What an agent of the team says; drawn anew in each step of the warm-up."""
    draw = random.Random(f"{fields['step']} {question.id} {agent}")
    if agent == "rewriter":
        return chosen(draw, lambda: query(question, draw), lambda: query(question, draw, right=False), lambda: "")
    pages = fields["passages"]
    assert isinstance(pages, Sequence)
    titles = [page.title for page in pages]
    if agent == "reranker":
        right = [i for i, title in enumerate(titles, start=1) if title in question.supporting_titles] or [1]
        other = [i for i in range(1, len(titles) + 1) if i not in right] or right
        return chosen(draw, lambda: f"[{right[0]}]", lambda: f"[{draw.choice(other)}]", lambda: "none")
    texts = [page.text for page in pages if page.title in question.supporting_titles] or [page.text for page in pages]
    return answer(question, texts[0] if texts else "", draw)


def of_one(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What the single agent says: a search, then an answer from what it lists."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    draw = random.Random(f"{fields['step']} {question.id} {len(turns)}")
    if not turns:
        return f"search: {query(question, draw, right=draw.random() >= CARELESS)}"
    return f"answer: {answer(question, listed(question, turns), draw)}"


def chosen(draw: random.Random, *ways: Callable[[], str]) -> str:
    """One of three ways to work: right, careless, faulty."""
    return draw.choices(ways, [1 - CARELESS - FAULTY, CARELESS, FAULTY])[0]()


def query(question: Question, draw: random.Random, *, right: bool = True) -> str:
    """The page that the question is about, or nothing but the relation that it asks for."""
    return question.supporting_titles[0] if right else wanted(question)[draw.randrange(2)]


def answer(question: Question, page: str, draw: random.Random) -> str:
    """The fact that is asked for, another one of the page, or the sentence that states it; "unknown" of no page."""
    found = facts(page) or [("", "unknown")]
    right = [value for relation, value in found if relation == wanted(question)[0]]
    other = [value for _, value in found if value not in right] or right
    sentences = re.split(r"(?<=\.) ", page)
    return chosen(
        draw,
        lambda: right[0] if right else draw.choice(other),
        lambda: draw.choice(other),
        lambda: next((s for s in sentences if right and right[0] in s), sentences[0]),
    )


def listed(question: Question, turns: Sequence[Turn]) -> str:
    """The text of the question's page in what a search listed, else of the first page in it."""
    pages = [line.partition(": ") for line in turns[-1].calls[0].result.splitlines()]
    return next((text for title, _, text in pages if title == question.supporting_titles[0]), pages[0][2])
