"""Reading the generated world back: which facts a page states, and which other fact a question might have asked for.

For rules that play an agent's part: demonstrations, and measurements of where a team's work gets lost.
"""

from __future__ import annotations

import re

from cotrain.data.world_text import FILLER, RELATIONS
from cotrain.types import Question


def _pattern(template: str) -> re.Pattern[str]:
    """What a sentence of this template looks like; its group is the value, if it states one."""
    parts = (re.escape(part) for part in re.split(r"\{(?:s|it|its|kind|city|person|thing)\}", template))
    return re.compile(".+?".join(parts).replace(re.escape("{o}"), "(.+?)") + "$")


_SENTENCES = sorted(
    ((r.name, s, _pattern(s)) for r in RELATIONS for s in r.sentences),
    key=lambda entry: (entry[0] == "profession", -len(entry[1])),
)
"""(relation, template, pattern) of all sentences that state a fact; `X is a Y.`, which many fit, comes last."""
_FILLER = [_pattern(sentence) for sentences in FILLER.values() for sentence in sentences]


def facts(page: str) -> list[tuple[str, str]]:
    """(relation, value) of each sentence of a page's text that states a fact, in their order."""
    found = []
    for sentence in re.split(r"(?<=\.) ", page):
        if any(pattern.match(sentence) for pattern in _FILLER):
            continue
        for relation, _, pattern in _SENTENCES:
            if match := pattern.match(sentence):
                found.append((relation, match[1]))
                break
    return found


def wanted(question: Question) -> tuple[str, str]:
    """The relation that a question asks for first, and the one after it among those of its kind of page."""
    relations = question.meta["relations"]
    assert isinstance(relations, list | tuple)
    kinds = {relation.name: relation.subject for relation in RELATIONS}
    same = [relation.name for relation in RELATIONS if relation.subject == kinds[relations[0]]]
    return relations[0], same[(same.index(relations[0]) + 1) % len(same)]
