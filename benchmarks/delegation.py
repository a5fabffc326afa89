"""Four delegations in one reply against the same four in four replies, as a ratio of wall time in one run.

One rollout. The main agent's replies come from a script; each of its researchers samples the same fixed number of
tokens from the in-process engine (no end token ends it), so that the work on both sides is equal.

    python benchmarks/delegation.py --model tiny-llama --repeats 5
    python benchmarks/delegation.py --model smollm2-135m-instruct --dtype bfloat16 --tokens 32 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from cotrain.config import load_config
from cotrain.engines.base import Cohort
from cotrain.engines.local import LocalEngine
from cotrain.models import load_model
from cotrain.render import Renderer
from cotrain.roster import Roster, System
from cotrain.sampling import Job, fork_on_first
from cotrain.team import Team
from cotrain.types import Agent, Group, Question, SamplingParams, Trajectory

TASKS = ["the founder of the press", "the year of the bridge", "the author of the play", "the capital of the land"]
ABOUT = "Find one fact in a small web, and say it in a few words. What you cannot find you do not claim. "


def team(num_tokens: int) -> System:
    async def run(team: Team, question: Question) -> Trajectory:
        return await team.ask("main", question=question.text)

    main = Agent(
        name="main",
        model="model",
        prompt="{question}\n{tools}",
        delegates=("researcher",),
        max_turns=len(TASKS) + 1,
        sampling=SamplingParams(max_tokens=200),
    )
    researcher = Agent(
        name="researcher",
        model="model",
        prompt=ABOUT * 3 + "Task: {task}",
        sampling=SamplingParams(max_tokens=num_tokens),
    )
    return System(run=run, agents=(main, researcher))


def script(at_once: bool) -> Callable[[str, Question, Mapping[str, object]], str | None]:
    """What main says: all tasks in one reply, or one a reply; then an answer."""
    lines = [f"researcher: {task}" for task in TASKS]
    replies = ["\n".join(lines)] if at_once else lines

    def says(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
        turns = fields["turns"]
        assert isinstance(turns, tuple)
        return None if agent != "main" else [*replies, "answer: done"][len(turns)]

    return says


def seconds(roster: Roster, system: System, at_once: bool, step: int) -> float:
    """Wall time of the rollout; both ways delegate four times and sample equally many tokens."""
    question = Question(id="q", text="What is to be found?", answers=("done",))

    async def rollout() -> Group:
        cohort = Cohort()
        cohort.enter()
        job = Job(system=system, roster=roster, question=question, step=step, group_size=1, cohort=cohort)
        return await fork_on_first(replace(job, script=script(at_once)))

    start = time.perf_counter()
    group = asyncio.run(rollout())
    taken = time.perf_counter() - start
    sampled = [t.num_sampled for t in group.trajectories if t.agent == "researcher"]
    assert sampled == [system.agents[1].sampling.max_tokens] * len(TASKS), sampled
    assert group.trajectories[-1].output == "done"
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that each researcher samples")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    config = load_config(None, [f"models.model.path={chosen.model}", f"models.model.dtype={chosen.dtype}"])
    model = load_model("model", config.models["model"])
    engine = LocalEngine(model.network, model.tokenizer, end_ids=frozenset(), context=model.context)
    system = team(chosen.tokens)
    roster = Roster(
        agents={agent.name: agent for agent in system.agents},
        engines={"model": engine},
        renderers={"model": Renderer(model.tokenizer)},
    )
    for at_once in (True, False):
        seconds(roster, system, at_once, step=0)  # what is made once is made now
    pairs = [[seconds(roster, system, at_once, step) for at_once in (False, True)] for step in range(chosen.repeats)]
    ratios = [serial / parallel for serial, parallel in pairs]
    print(f"{chosen.model}, {chosen.dtype}, {len(TASKS)} delegations of {chosen.tokens} tokens")
    print(f"one a turn: {[round(s, 2) for s, _ in pairs]} s; at once: {[round(p, 2) for _, p in pairs]} s")
    print(f"one a turn / at once: median {statistics.median(ratios):.2f}   all {[round(r, 2) for r in ratios]}")


if __name__ == "__main__":
    main()
