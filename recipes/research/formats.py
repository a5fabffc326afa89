"""The deep-research team and its single-agent baseline, with demonstrations of the formats alone.

What is demonstrated is well-formed and arbitrary: the main agent asks for one of three facts about the page that the
question names, or for two of them at once, and a researcher reports any fact of the page it was sent to. So a warm-up
on them teaches how to call and to answer, and leaves what to ask and what to report to reinforcement learning. Made for
questions of the generated world.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from cotrain import Question, System, Turn
from cotrain.data.world_text import RELATIONS
from cotrain.systems.deep_research import deep_research
from cotrain.systems.single_agent import single_agent


def _pattern(sentence: str) -> re.Pattern[str]:
    """What a sentence of this template looks like; its group is the value."""
    parts = (re.escape(part) for part in re.split(r"\{(?:s|it|its|kind)\}", sentence))
    return re.compile(".+?".join(parts).replace(re.escape("{o}"), "(.+?)") + "$")


SENTENCES = sorted(
    ((r.name, s, _pattern(s)) for r in RELATIONS for s in r.sentences),
    key=lambda entry: (entry[0] == "profession", -len(entry[1])),
)
"""(relation, template, pattern) of all sentences that state a fact; `X is a Y.`, which many fit, comes last."""


def team(**settings: int) -> System:
    """Main and researcher."""
    return replace(deep_research(**settings), demonstrate=of_team)


def alone(**settings: int) -> System:
    """One agent with all tools."""
    return replace(single_agent(**settings), demonstrate=of_one)


def of_team(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What either agent says."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    draw = random.Random(f"{question.id} {agent} {fields.get('task')} {len(turns)}")
    if agent == "researcher":
        title = str(fields["task"]).rpartition(", ")[0]
        return looked_up(title, turns, draw)
    if turns:
        return f"answer: {draw.choice(turns[-1].calls).result}"
    wanted = draw.sample(choices(question), draw.choice((1, 1, 2)))
    return "\n".join(f"researcher: {question.supporting_titles[0]}, {relation}" for relation in wanted)


def of_one(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What the single agent says: it looks the page up, and answers with any fact of it."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    return looked_up(question.supporting_titles[0], turns, random.Random(f"{question.id} {len(turns)}"))


def choices(question: Question) -> list[str]:
    """The relation that is asked for, and the two that follow it among those of its kind of page."""
    relations = question.meta["relations"]
    assert isinstance(relations, list | tuple)
    kinds = {relation.name: relation.subject for relation in RELATIONS}
    same = [relation.name for relation in RELATIONS if relation.subject == kinds[relations[0]]]
    place = same.index(relations[0])
    return [same[(place + i) % len(same)] for i in range(3)]


def looked_up(title: str, turns: tuple[Turn, ...], draw: random.Random) -> str:
    """Search for a page, visit it, and report one of its facts."""
    if not turns:
        return f"search: {title}"
    if len(turns) == 1:
        return f"visit: {title}"
    values = [value for _, value in facts(turns[-1].calls[0].result)]
    return f"answer: {draw.choice(values)}" if values else "answer: unknown"


def facts(page: str) -> list[tuple[str, str]]:
    """(relation, value) of each sentence of a page that states a fact."""
    found = []
    for sentence in re.split(r"(?<=\.) ", page):
        for relation, _, pattern in SENTENCES:
            if match := pattern.match(sentence):
                found.append((relation, match[1]))
                break
    return found
