"""The deep-research team and its single-agent baseline, with demonstrations that are well-formed but careless.

Half of the time the main agent asks for another fact than the one in question, and half of the time a researcher
reports the title of a page that it did not read. Otherwise both do their work: main asks for the right fact, alone or
with another one, and a researcher visits the page and reports what it was asked for. So a warm-up on them teaches how
to work, and to do it half of the time; that it pays is left to reinforcement learning. Made for questions of the
generated world with one hop.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cotrain import Question, System, Turn
from cotrain.data.world_read import facts, wanted
from cotrain.systems.deep_research import deep_research
from cotrain.systems.single_agent import single_agent


def team(**settings: Any) -> System:
    """Main and researcher."""
    return replace(deep_research(**settings), demonstrate=of_team)


def alone(**settings: Any) -> System:
    """One agent with all tools."""
    return replace(single_agent(**settings), demonstrate=of_one)


CARELESS = 0.5
"""How often a demonstration is careless."""


def of_team(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What either agent says; drawn anew in each step of the warm-up."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    draw = random.Random(f"{fields['step']} {question.id} {agent} {fields.get('task')} {len(turns)}")
    if agent == "researcher":
        title, _, relation = str(fields["task"]).rpartition(", ")
        return looked_up(title, relation, turns, draw)
    if turns:
        return f"answer: {turns[-1].calls[0].result}"
    right, other = wanted(question)
    asked = [other] if draw.random() < CARELESS else [right, other][: draw.choice((1, 1, 2))]
    return "\n".join(f"researcher: {question.supporting_titles[0]}, {relation}" for relation in asked)


def of_one(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What the single agent says: it looks a fact up, the right one or another, or does not read the page."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    draw = random.Random(f"{fields['step']} {question.id} {len(turns)}")
    right, other = wanted(question)
    relation = other if draw.random() < CARELESS else right
    return looked_up(question.supporting_titles[0], relation, turns, draw)


def looked_up(title: str, relation: str, turns: tuple[Turn, ...], draw: random.Random) -> str:
    """Search for a page, visit it (or not), and report the fact that is wanted."""
    if not turns:
        return f"search: {title}"
    if len(turns) == 1:
        return f"answer: {title}" if draw.random() < CARELESS else f"visit: {title}"
    found = [value for name, value in facts(turns[-1].calls[0].result) if name == relation]
    return f"answer: {found[0] if found else 'unknown'}"
