"""The deep-research team with demonstrations made by rules for real questions, whose hops nobody has written down.

The main agent hands the whole question to one researcher, or also a name that stands in it to a second one, and answers
with the first finding that is one. A researcher searches for its task, visits a page of the list (one that the question
needs, where it is listed), and reports the answer where the page holds it, else "unknown".
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from cotrain import Question, System, Turn
from cotrain.rewards import accuracy
from cotrain.systems.deep_research import deep_research

NAME = re.compile(r"(?<!^)\b[A-Z][\w.'-]*(?: (?:of |the |de )?[A-Z][\w.'-]*)*")
"""Words with capitals that do not begin the question."""


def team(**settings: int) -> System:
    """Main and researcher."""
    return replace(deep_research(**settings), demonstrate=demonstrate)


def demonstrate(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What either agent says."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    if agent == "researcher":
        return looked_up(str(fields["task"]), question, turns)
    if turns:
        found = [call.result for call in turns[-1].calls if not call.is_error]
        return "answer: " + next((finding for finding in found if finding != "unknown"), "unknown")
    draw = random.Random(question.id)
    names = NAME.findall(question.text)
    asked = [question.text, draw.choice(names)] if names and draw.random() < 0.5 else [question.text]
    return "\n".join(f"researcher: {task}" for task in asked)


def looked_up(task: str, question: Question, turns: tuple[Turn, ...]) -> str:
    """Search, visit a page of the list, report."""
    if not turns:
        return f"search: {task}"
    result = turns[-1].calls[0].result
    if len(turns) == 1:
        listed = [line.partition(": ")[0] for line in result.splitlines() if ": " in line]
        if not listed:
            return "answer: unknown"
        return "visit: " + next((title for title in listed if title in question.supporting_titles), listed[0])
    return "answer: " + next((gold for gold in question.answers if accuracy(result, (gold,))), "unknown")
