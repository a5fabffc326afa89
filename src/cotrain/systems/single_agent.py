"""One agent with all the tools: the single-agent baseline of the deep-research team (GRPO on one trajectory)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotrain.roster import System
from cotrain.systems.deep_research import answer_faults, reasoning, web
from cotrain.team import Team
from cotrain.types import Agent, CreditRule, Question, SamplingParams, Trajectory

SYSTEM = "You answer questions by looking things up in a small web."
PROMPT = """\
Question: {question}

Reply with a line like one of these, or with the answer:
{tools}
answer: <the answer in a few words>"""


def single_agent(
    *,
    max_turns: int = 12,
    num_hits: int = 3,
    snippet_words: int = 12,
    page_words: int = 80,
    answer_words: int = 12,
    reason: str = "",
    reason_model: str = "",
) -> System:
    """The system.

    Args:
        max_turns: most turns of an episode.
        num_hits: pages that a search lists.
        snippet_words: words of each listed page.
        page_words: words of a visited page.
        answer_words: an answer of more words than this is a fault.
        reason: as in `deep_research`.
        reason_model: likewise.
    """
    thinkers, thinking = reasoning(reason, reason_model)

    async def run(team: Team, question: Question) -> Trajectory:
        return await team.ask(
            "solver", question=question.text, check=lambda output: answer_faults(output, answer_words)
        )

    return System(
        run=run,
        agents=(
            Agent(
                name="solver",
                model="main",
                system=SYSTEM,
                prompt=PROMPT,
                sampling=SamplingParams(max_tokens=48),
                tools=("search", "visit", *thinking),
                delegates=tuple(agent.name for agent in thinkers),
                max_turns=max_turns,
            ),
            *thinkers,
        ),
        rules={"solver": CreditRule(weights={"format": 0.1, "shared": 0.9}, gate=True)},
        tools=thinking,
        corpus_tools=web(num_hits, snippet_words, page_words),
        demonstrate=demonstrate,
    )


def demonstrate(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What a rule would say, where a question names its pages in the order of its hops: search and visit each."""
    relations, titles = question.meta.get("relations"), question.supporting_titles
    if not isinstance(relations, Sequence) or len(relations) != len(titles):
        return None
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    hop, is_visit = divmod(len(turns), 2)
    if hop == len(titles):
        return f"answer: {question.answers[0]}"
    return f"visit: {titles[hop]}" if is_visit else f"search: {titles[hop]}"
