"""The deep-research team of M-GRPO: a main agent plans, delegates subtasks to researchers, and answers.

Each researcher has an episode of its own in a small offline web (search, visit) and reports a finding. Main and
researcher are played by different models, `main` and `sub`, unless the configuration says otherwise. Copy this file to
write a team of your own. Source of the team and of its credits: M-GRPO (arXiv 2511.13288).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cotrain.endpoints import Endpoint
from cotrain.episode import Tool
from cotrain.errors import ConfigError
from cotrain.rewards import accuracy
from cotrain.roster import System
from cotrain.team import Team
from cotrain.tools import calculator, search, visit
from cotrain.tools import reason as ask_endpoint
from cotrain.types import Agent, CreditRule, Question, SamplingParams, ToolCall, Trajectory, Turn

if TYPE_CHECKING:
    from cotrain.data.corpus import Corpus

MAIN_SYSTEM = "You answer questions. You know nothing yourself: you ask a researcher for one fact at a time."
MAIN = """\
Question: {question}

Reply with one or more lines like these, or with the answer:
{tools}
answer: <the answer in a few words>"""

RESEARCHER_SYSTEM = "You find one fact in a small web."
RESEARCHER = """\
Task: {task}

Reply with a line like one of these, or with the answer:
{tools}
answer: <the fact in a few words>"""

REASON = "{task}\nThink, then answer in a few words."


def deep_research(
    *,
    max_delegations: int = 6,
    main_turns: int = 6,
    researcher_turns: int = 4,
    num_hits: int = 3,
    snippet_words: int = 12,
    page_words: int = 80,
    answer_words: int = 12,
    reason: str = "",
    reason_model: str = "",
) -> System:
    """The system.

    Args:
        max_delegations: most calls of the main agent in an episode.
        main_turns: most turns of the main agent.
        researcher_turns: most turns of a researcher.
        num_hits: pages that a search lists.
        snippet_words: words of each listed page.
        page_words: words of a visited page.
        answer_words: an answer or finding of more words than this is a fault.
        reason: what answers a sub-question that needs no search: `calculator` (exact arithmetic), `model` (an agent
            `reason`, played by the run's model of that name), or the address of an OpenAI-compatible endpoint.
        reason_model: the endpoint's name of its model.
    """
    thinkers, thinking = reasoning(reason, reason_model)

    async def run(team: Team, question: Question) -> Trajectory:
        return await team.ask("main", question=question.text, check=lambda output: answer_faults(output, answer_words))

    return System(
        run=run,
        agents=(
            Agent(
                name="main",
                model="main",
                system=MAIN_SYSTEM,
                prompt=MAIN,
                sampling=SamplingParams(max_tokens=64),
                tools=tuple(thinking),
                delegates=("researcher", *(agent.name for agent in thinkers)),
                max_turns=main_turns,
                max_calls=max_delegations,
            ),
            Agent(
                name="researcher",
                model="sub",
                about="<one fact to find>",
                system=RESEARCHER_SYSTEM,
                prompt=RESEARCHER,
                sampling=SamplingParams(max_tokens=48),
                tools=("search", "visit"),
                max_turns=researcher_turns,
            ),
            *thinkers,
        ),
        rules={
            "main": CreditRule(weights={"format": 0.1, "shared": 0.9}, gate=True),
            "researcher": CreditRule(weights={"format": 0.1, "shared": 0.4, "expert": 0.5}, gate=True),
        },
        tools=thinking,
        corpus_tools=web(num_hits, snippet_words, page_words),
        demonstrate=demonstrate,
    )


def web(num_hits: int, snippet_words: int, page_words: int) -> dict[str, Callable[[Corpus], Tool]]:
    """`search` and `visit` over the pages of a corpus."""
    return {
        "search": lambda corpus: search(corpus, num_hits, snippet_words),
        "visit": lambda corpus: visit(corpus, page_words),
    }


def reasoning(reason: str, model: str) -> tuple[tuple[Agent, ...], dict[str, Tool]]:
    """The agents and the tools, by name, that answer what an agent asks `reason`.

    Raises:
        ConfigError: `reason` names nothing, or an endpoint without a model.
    """
    if reason == "model":
        return (Agent(name="reason", model="reason", about="<a sub-question that needs no search>", prompt=REASON),), {}
    if not reason or reason == "calculator":
        return (), {"reason": calculator} if reason else {}
    if "://" not in reason or not model:
        found = f"reason = {reason!r} with reason_model = {model!r}"
        raise ConfigError("system.settings", found, "Set calculator, model, or an endpoint's address and its model")
    return (), {"reason": ask_endpoint(Endpoint(base_url=reason, model=model))}


def answer_faults(output: str, most_words: int) -> list[str]:
    """`long_answer`: more than `most_words` words (an empty one is no answer, which the episode sees)."""
    return ["long_answer"] if len(output.split()) > most_words else []


def demonstrate(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What a rule would say, where a question names its pages in the order of its hops (the generated world does).

    The main agent asks for one hop after the other by page and relation, and answers with the last finding. A
    researcher searches for the page, visits it, and reports the fact of that hop.
    """
    relations, titles = question.meta.get("relations"), question.supporting_titles
    if not isinstance(relations, Sequence) or len(relations) != len(titles):
        return None
    turns = fields["turns"]
    assert isinstance(turns, tuple)
    facts = [*titles[1:], question.answers[0]]
    if agent == "main":
        hop = len(turns)
        if hop < len(titles):
            return f"researcher: {titles[hop]}, {relations[hop]}"
        finding = turns[-1].calls[-1]
        return "answer: unknown" if finding.is_error else f"answer: {finding.result}"
    if agent == "researcher":
        task = str(fields["task"])
        hops = [i for i, title in enumerate(titles) if task == f"{title}, {relations[i]}"]
        return look_up(titles[hops[0]], facts[hops[0]], turns) if hops else None
    return None


def look_up(title: str, fact: str, turns: tuple[Turn, ...]) -> str:
    """Search for a page, visit it, report the fact; without it, what the pages do not say is not claimed."""
    calls: list[ToolCall] = [call for turn in turns for call in turn.calls]
    if not calls:
        return f"search: {title}"
    if calls[-1].tool == "search":
        return f"visit: {title}"
    return f"answer: {fact}" if accuracy(calls[-1].result, (fact,)) else "answer: unknown"
