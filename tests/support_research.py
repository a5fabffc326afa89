"""A small deep-research run on scripted engines: who says what in which rollout, and what comes of it.

Four rollouts of one question. Main delegates once and answers, right in rollouts 0.0 and 0.1 and wrong in 0.2 and 0.3;
the researcher visits the one page that the question needs and reports the fact.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from cotrain.assemble import Plan, make_plan
from cotrain.config import load_config
from cotrain.engines.base import Request
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import ToolError
from cotrain.loops import judge, rollouts, samples_by_model
from cotrain.roster import Roster
from cotrain.types import Group, Question
from support import CharRenderer, CharTokenizer

QUESTION = Question(id="q1", text="Who led Ginon?", answers=("Ann Bee",), meta={"supporting_titles": ["Ginon"]})
COVERAGE = ("judges.expert.rule=coverage", "judges.expert.agents=['researcher']")
SETTINGS = (
    "system.name=deep_research",
    "models.main.path=tiny-llama",
    "models.sub.path=tiny-llama",
    "rewards.metric=exact_match",
    "sampling.questions_per_step=1",
)

Says = Callable[[int, int, str], str]
"""(branch, number of the turn, text of the prompt) -> what an agent says."""


def main_says(branch: int, turn: int, prompt: str) -> str:
    if turn == 0:
        return "researcher: leader of Ginon"
    return "answer: Ann Bee" if branch < 2 else "answer: nobody"


def researcher_says(branch: int, turn: int, prompt: str) -> str:
    return "visit: Ginon" if turn == 0 else "answer: Ann Bee"


def visit(title: str) -> str:
    """Read a page."""
    if title != "Ginon":
        raise ToolError("visit", f"no page has the title {title!r}", "Take another")
    return "Ginon was led by Ann Bee."


def only(branch: int, says: Says, otherwise: Says) -> Says:
    """`says` in one rollout, `otherwise` in the others."""
    return lambda b, turn, prompt: (says if b == branch else otherwise)(b, turn, prompt)


def lines(*said: str) -> Says:
    """The same in every rollout: one line per turn."""
    return lambda branch, turn, prompt: said[turn]


def plan_of(*settings: str, judges: tuple[str, ...] = COVERAGE) -> Plan:
    return make_plan(load_config(None, [*SETTINGS, *judges, *settings]))


def engine_of(says: Says, context: int = 4096) -> ScriptedEngine:
    def script(prompt: str, request: Request) -> str:
        rollout, turn = str(request.key[3]), request.key[5]
        branch = int(rollout.split(".")[1])
        return says(branch, int(turn), prompt)

    return ScriptedEngine(script, CharTokenizer(), context=context)


def roster_of(
    plan: Plan,
    *,
    main: Says = main_says,
    researcher: Says = researcher_says,
    tools: Mapping[str, Callable[[str], object]] | None = None,
    contexts: Mapping[str, int] | None = None,
) -> Roster:
    """Who plays: characters are tokens, so an agent may say as many as a line has."""
    room = {"main": 4096, "sub": 4096, **(contexts or {})}
    says = {"main": main, "sub": researcher}
    limits = plan.config.tools
    return Roster(
        agents={n: replace(a, sampling=replace(a.sampling, max_tokens=400)) for n, a in plan.agents.items()},
        engines={name: engine_of(says[name], room[name]) for name in says},
        renderers=dict.fromkeys(says, CharRenderer()),
        tools={"search": lambda query: "Ginon: was led...", "visit": visit, **(tools or {})},
        tool_timeout_s=limits.timeout_s,
        tool_retries=limits.retries,
    )


class Result:
    """What a step made of one question: the group as it was judged, credits, advantages, drops, samples."""

    def __init__(self, plan: Plan, roster: Roster, question: Question = QUESTION) -> None:
        async def step() -> tuple[list[Group], object]:
            groups = await rollouts(plan, roster, [question], 1)
            return groups, await judge(plan, groups)

        (raw,), (records, dropped) = asyncio.run(asyncio.wait_for(step(), 60))  # only a hang takes so long
        (record,) = records
        self.group, self.dropped = record.group, dict(dropped)
        self.dropped_rollouts = dict(raw.dropped)
        self.samples = samples_by_model(records, list(plan.config.models))
        self.record = record

    def of(self, agent: str, branch: int):
        """An agent's only trajectory in a rollout."""
        (found,) = [t for t in self.group.trajectories if t.agent == agent and t.rollout_id == f"0.{branch}"]
        return found

    def credits(self, agent: str) -> dict[int, float]:
        """Branch -> credit of an agent's trajectories there."""
        known = self.record.credits
        return {
            int(str(t.rollout_id).split(".")[1]): known[t.id]
            for t in self.group.trajectories
            if t.agent == agent and t.id in known
        }

    def trained(self, agent: str) -> list[int]:
        """The branches of which an agent's trajectories gave a sample, in order."""
        model = {"main": "main", "researcher": "sub"}[agent]
        ids = {s.trajectory_id for s in self.samples[model]}
        return [int(str(t.rollout_id).split(".")[1]) for t in self.group.trajectories if t.id in ids]
