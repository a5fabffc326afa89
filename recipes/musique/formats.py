"""The deep-research team with demonstrations made by rules for real questions, whose hops nobody has written down.

The main agent hands the whole question to one researcher, or also a name that stands in it to a second one, and answers
with the first finding that is one. A researcher searches for its task, visits a page of the list (one that the question
needs, where it is listed), and reports the answer where the page holds it, else a name or number that the page has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cotrain import Question, System, Turn
from cotrain.rewards import accuracy
from cotrain.systems.deep_research import deep_research

NAME = re.compile(r"(?<!^)\b[A-Z][\w.'-]*(?: (?:of |the |de )?[A-Z][\w.'-]*)*")
"""Words with capitals that do not begin the text."""

NUMBER = re.compile(r"\b\d[\d,.]*\b")
"""Numbers and years."""


def team(**settings: Any) -> System:
    """Main and researcher."""
    return replace(deep_research(**settings), demonstrate=demonstrate)


def demonstrate(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What either agent says; drawn anew in each step of the warm-up."""
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    draw = random.Random(f"{fields['step']} {question.id} {fields.get('task')}")
    if agent == "researcher":
        return looked_up(str(fields["task"]), question, turns, draw)
    if turns:
        found = [call.result for call in turns[-1].calls if not call.is_error]
        return f"answer: {found[0]}" if found else "answer: unknown"
    names = NAME.findall(question.text)
    asked = [question.text, draw.choice(names)] if names and draw.random() < 0.5 else [question.text]
    return "\n".join(f"researcher: {task}" for task in asked)


def looked_up(task: str, question: Question, turns: tuple[Turn, ...], draw: random.Random) -> str:
    """Search, visit a page of the list, report."""
    if not turns:
        return f"search: {task}"
    result = turns[-1].calls[0].result
    if len(turns) == 1:
        listed = [line.partition(": ")[0] for line in result.splitlines() if ": " in line]
        if not listed:
            return "answer: unknown"
        return "visit: " + next((title for title in listed if title in question.supporting_titles), listed[0])
    held = [gold for gold in question.answers if accuracy(result, (gold,))]
    return f"answer: {held[0] if held else guess(question.text, result, draw)}"


def guess(question: str, page: str, draw: random.Random) -> str:
    """A number where the question asks for one, else a name that the question does not hold."""
    asks_number = re.match(r"(When|How (many|much|long|old)|In (what|which) year)\b", question)
    found = NUMBER.findall(page) if asks_number else [name for name in NAME.findall(page) if name not in question]
    return draw.choice(found) if found else "unknown"
