"""A main agent with two kinds of helpers: their judges, groups made by hand, and what M-GRPO says of any such group.

What somebody said tells the judges what to give: the main agent says right, wrong or unjudged, a helper says the
expert's score, or failed. `reference` writes every copy of a trajectory out, so it knows no weights.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from statistics import fmean, pstdev, stdev

from cotrain.assemble import Plan, make_plan
from cotrain.config import load_config
from cotrain.roster import System
from cotrain.team import Team
from cotrain.types import Agent, Completion, CreditRule, Group, Question, SamplingParams, Trajectory, Turn

VERDICTS = {"right": 1.0, "wrong": 0.0}
HELPERS = ("scout", "coder")


def team() -> System:
    async def run(team: Team, question: Question) -> Trajectory:
        return await team.ask("main", question=question.text)

    many = SamplingParams(max_tokens=400)
    sub = CreditRule(weights={"format": 0.1, "shared": 0.4, "expert": 0.5}, gate=True)
    return System(
        run=run,
        agents=(
            Agent(name="main", model="main", prompt="{question}", sampling=many, delegates=HELPERS, max_turns=3),
            Agent(name="scout", model="sub", prompt="{task}", sampling=many),
            Agent(name="coder", model="sub", prompt="{task}", sampling=many),
        ),
        rules={"main": CreditRule(weights={"format": 0.1, "shared": 0.9}, gate=True), "scout": sub, "coder": sub},
    )


async def verdict(group: Group, trajectory: Trajectory) -> float | None:
    """Correctness of an answer. A helper's finding is none, and full marks for it must reach nobody."""
    return VERDICTS.get(trajectory.output) if trajectory.agent == "main" else 1.0


async def expert(group: Group, trajectory: Trajectory) -> float | None:
    return None if trajectory.output == "failed" else float(trajectory.output)


@cache
def plan_of(*settings: str) -> Plan:
    """The team's plan; with the model `one`, everybody is played by it."""
    models = ["main", "sub"] if "models.one.path=tiny-llama" not in settings else []
    base = [
        "system.name=support_mgrpo:team",
        "judges.shared.rule=support_mgrpo:verdict",
        "judges.expert.rule=support_mgrpo:expert",
        "judges.expert.agents=['scout', 'coder']",
        *(f"models.{name}.path=tiny-llama" for name in models),
    ]
    return make_plan(load_config(None, [*base, *settings]))


@dataclass(frozen=True)
class Helper:
    said: str = "0.5"
    agent: str = "scout"
    faulty: bool = False
    read: bool = True


@dataclass(frozen=True)
class Rollout:
    said: str = "right"
    helpers: tuple[Helper, ...] = ()
    faulty: bool = False


def group_of(rollouts, id="q", step=1, model=None) -> Group:
    """Trajectory ids are `<question>/<rollout>` and `<question>/<rollout>/<helper>`."""
    made = []
    for k, rollout in enumerate(rollouts):
        main = f"{id}/{k}"
        ids = [f"{main}/{i}" for i in range(len(rollout.helpers))]
        for i, helper in zip(ids, rollout.helpers, strict=True):
            made.append(_trajectory(i, id, k, helper.agent, model or "sub", helper, caller=main, trainable=helper.read))
        read = tuple(i for i, helper in zip(ids, rollout.helpers, strict=True) if helper.read)
        made.append(_trajectory(main, id, k, "main", model or "main", rollout, reads=read))
    return Group(
        question=Question(id=id, text="?", answers=("right",)), step=step, strategy="test", trajectories=tuple(made)
    )


def _trajectory(id, question_id, k, agent, model, work, **lineage):
    number = sum(map(ord, id))
    sampled = tuple(range(number, number + 1 + number % 5))  # 1 to 5 tokens
    said = Completion(token_ids=sampled, logprobs=(-1.0,) * len(sampled), version=3, stop="stop", text=work.said)
    return Trajectory(
        id=id, question_id=question_id, rollout_id=f"0.{k}", pass_id=0, call=0, agent=agent, model=model,
        turns=(Turn(prompt_ids=(1, *map(ord, id)), completion=said),), output=work.said,
        faults=("malformed",) if work.faulty else (), **lineage,
    )  # fmt: skip


def reference_credits(group: Group, missing: str = "drop") -> dict[str, float]:
    """Credits by the formulas of M-GRPO; who is not in it has none."""
    by_id = {t.id: t for t in group.trajectories}
    read = {id for t in group.trajectories for id in t.reads}
    credits = {}
    for t in group.trajectories:
        main = t if t.caller is None else by_id[t.caller]
        correct = 0.0 if main.faults else VERDICTS.get(main.output)
        if correct is None or (t.caller is not None and t.id not in read):
            continue
        if t.caller is None:
            value = 0.1 + 0.9 * correct
        elif t.output != "failed":
            value = 0.1 + 0.4 * correct + 0.5 * float(t.output)
        elif missing == "renormalise":
            value = (0.1 + 0.4 * correct) / 0.5
        else:
            continue
        credits[t.id] = 0.0 if t.faults else value
    return credits


def siblings(group: Group, credits) -> dict[tuple[str, str], list[str]]:
    """(agent, rollout) -> the ids that have a credit and may be trained."""
    places = defaultdict(list)
    for t in group.trajectories:
        if t.trainable and t.id in credits:
            places[t.agent, t.rollout_id].append(t.id)
    return dict(places)


def copies(group: Group, credits, method: str) -> Counter[str]:
    """How often `weight` and `none` count each trajectory, in whole numbers."""
    places = siblings(group, credits)
    common = math.lcm(*(len(ids) for ids in places.values())) if places and method == "weight" else 1
    return Counter({i: common // len(ids) if method == "weight" else 1 for ids in places.values() for i in ids})


def reference_advantages(group: Group, credits, counts, spread=pstdev) -> dict[str, float]:
    """Mean and std over the written-out copies of each agent's trajectories of this question, over all rollouts."""
    pools = defaultdict(list)
    for t in group.trajectories:
        pools[t.agent] += [t.id] * int(counts.get(t.id, 0))
    values = {}
    for pool in pools.values():
        credit = [credits[i] for i in pool]
        if len(set(pool)) > 1 and max(credit) - min(credit) > 1e-8:
            center, std = fmean(credit), spread(credit)
            values |= {i: (credits[i] - center) / (std + 1e-6) for i in pool}
    return values


SPREADS = {"population": pstdev, "sample": stdev}
