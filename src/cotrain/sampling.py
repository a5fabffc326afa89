"""Sampling strategies, all made of one primitive: `fork(at=k, size=G)`.

A fork runs the first k top-level asks of a system once, records them (tool results too), and then runs G branches that
replay the record and sample from call k on. The three strategies of MHGPO (arXiv 2506.02718) say where to fork. Draws
are seeded per (run seed, step, question id).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cotrain.engines.base import Cohort
from cotrain.errors import ConfigError, InfrastructureError, WorkflowError
from cotrain.record import Record
from cotrain.roster import Roster, Script, System
from cotrain.team import Team
from cotrain.types import Group, Question, Trajectory

log = logging.getLogger(__name__)


Value = Callable[[Group], Awaitable[Mapping[str, float]]]
"""The shared reward of each rollout's answer, by rollout id; one that could not be judged is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One question to be worked on by a team in one step, as a live member of `cohort` (if there is one).

    `attempt` counts how often the group was begun again: it draws other tokens. `value` scores rollouts, for those
    strategies that need to know on the way.
    """

    system: System
    roster: Roster
    question: Question
    step: int = 0
    seed: int = 0
    group_size: int = 4
    cohort: Cohort | None = None
    script: Script | None = None
    attempt: int = 0
    value: Value | None = None

    @property
    def noise(self) -> int:
        """The seed of every token; of repeated attempts far away from the seeds that users choose."""
        return self.seed + self.attempt * 1_000_000_007

    async def worth(self, group: Group) -> Mapping[str, float]:
        """What `value` says of a group's rollouts.

        Raises:
            WorkflowError: the job has none.
        """
        if self.value is None:
            raise WorkflowError(f"question {self.question.id}", "nobody scores its rollouts", "Give the job a value")
        return await self.value(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One whole rollout that a fork can begin from: its record and its trajectories, the trunk's included."""

    record: Record
    trajectories: tuple[Trajectory, ...]

    @property
    def num_asks(self) -> int:
        """Number of top-level asks."""
        return 1 + max(t.call for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """What a fork gave: the trunk's trajectories and every branch's, and how many rollouts were dropped, by reason.

    `rollouts`, by id, are what further forks can begin from. `num_adopted` counts the sampled tokens of the trunk that
    were taken over: they were sampled in another pass.
    """

    trajectories: tuple[Trajectory, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    num_adopted: int = 0


Strategy = Callable[[Job], Coroutine[object, object, Group]]


async def fork(job: Job, *, at: int, size: int, pass_id: int = 0, base: Rollout | None = None) -> Branches:
    """Run the first `at` top-level asks once, or take them over from `base`, then `size` branches that share them.

    What is taken over becomes the trunk of this pass, under names of its own. Rollouts that meet an
    `InfrastructureError` are removed, counted and logged; on the trunk it removes them all.

    Raises:
        WorkflowError: the system makes no ask number `at`, or a rollout leaves an output that nobody reads or scores.
        ReplayError: a branch makes other calls than the trunk did.
    """
    team_of = partial(
        Team,
        job.roster,
        job.question,
        seed=job.noise,
        step=job.step,
        pass_id=pass_id,
        cohort=job.cohort,
        script=job.script,
    )
    trunk = team_of(branch=None, pause_at=at, past=base.record.until(at) if base else None)
    try:
        await _run_trunk(job, trunk, at)
        if base is not None:
            trunk.adopt(base.trajectories)
    except Exception as error:
        return Branches(trajectories=(), dropped={_reason_if_infrastructure(error, job): size})
    teams = [team_of(branch=b, past=trunk.record) for b in range(size)]
    cohort = job.cohort or Cohort()
    finished = await cohort.gather([_run_branch(job, team, trunk) for team in teams])
    dropped = Counter(trunk.dropped)
    for team, failure in zip(teams, finished, strict=True):
        dropped.update(team.dropped)
        dropped[failure or ""] += failure is not None
    whole = [team for team, failure in zip(teams, finished, strict=True) if failure is None]
    kept = [t for team in whole for t in _by_call(team)]
    # A trunk without a surviving branch would hold outputs that nobody reads.
    shared = _by_call(trunk) if kept else []
    rollouts = {
        str(team.rollout_id): Rollout(record=team.record, trajectories=(*shared, *_by_call(team))) for team in whole
    }
    num_adopted = sum(t.num_sampled for t in shared) if base else 0
    return Branches(trajectories=(*shared, *kept), dropped=+dropped, rollouts=rollouts, num_adopted=num_adopted)


async def masked_rollout(job: Job, rollout_id: str, masked: Collection[str]) -> Branches:
    """A whole rollout in which some agents say nothing, with the noise of rollout `rollout_id`."""
    pass_id, branch = map(int, rollout_id.split("."))
    team_of = partial(
        Team, job.roster, job.question, seed=job.noise, step=job.step, pass_id=pass_id, cohort=job.cohort, masked=masked
    )
    team = team_of(branch=branch)
    failure = await _run_branch(job, team, team_of(branch=None))
    dropped = team.dropped + Counter([failure] if failure else [])
    return Branches(trajectories=() if failure else tuple(_by_call(team)), dropped=dropped)


def _by_call(team: Team) -> list[Trajectory]:
    """A team's trajectories in the order of the asks; calls that ran at once came back in any order."""
    return sorted(team.trajectories, key=lambda t: t.call)


def _reason_if_infrastructure(error: Exception, job: Job) -> str:
    """Log an `InfrastructureError` (or a task group's, of nothing else), and name it; raise any other error again."""
    if isinstance(error, ExceptionGroup):
        _, others = error.split(InfrastructureError)
        if others is not None:
            raise error
    elif not isinstance(error, InfrastructureError):
        raise error
    first: BaseException = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    log.warning("question %s, step %d: removed by a failure: %s", job.question.id, job.step, first)
    assert isinstance(first, InfrastructureError)
    return first.reason


async def _run_trunk(job: Job, trunk: Team, at: int) -> None:
    """Run the system until it is about to make ask number `at`."""
    task = asyncio.ensure_future(job.system.run(trunk, job.question))
    pause = asyncio.ensure_future(trunk.paused.wait())
    try:
        await asyncio.wait({task, pause}, return_when=asyncio.FIRST_COMPLETED)
        if not trunk.paused.is_set():
            await task  # raises what the system raised
            raise WorkflowError(
                f"question {job.question.id}",
                f"a fork at ask {at} was due, but the system made only {trunk.record.num_asks} asks",
                "Fork earlier, or give this call no probability",
            )
    finally:
        for unfinished in (task, pause):
            unfinished.cancel()
        await asyncio.gather(task, pause, return_exceptions=True)
        await trunk.close()


async def _run_branch(job: Job, team: Team, trunk: Team) -> str | None:
    """Run one branch to its end; where infrastructure failed, what it is counted as."""
    where = f"question {job.question.id}, rollout {team.rollout_id}"
    try:
        answer = await job.system.run(team, job.question)
        if team.num_under_way:
            found = f"the system returned while {team.num_under_way} of its calls were still under way"
            raise WorkflowError(where, found, "Await every call before returning")
    except Exception as error:
        return _reason_if_infrastructure(error, job)
    finally:
        await team.close()
    num_made, num_recorded = len(team.record.calls), trunk.record.num_returned
    if num_made < num_recorded:
        raise WorkflowError(
            where,
            f"on replay the system made {num_made} calls, where it had made {num_recorded}",
            "Make the workflow depend on nothing but the question and the results of its calls",
        )
    rollout = (*trunk.trajectories, *team.trajectories)
    read = {id for t in rollout for id in t.reads}
    for t in rollout:
        if t.id not in read and t is not answer and t.caller is None:
            raise WorkflowError(
                f"trajectory {t.id} of agent {t.agent}",
                "nobody reads its output and it is not the answer, so no reward can reach it",
                "Name it in reads=[...] of the ask that it shaped, or return it from the system",
            )
    if answer.id in read:
        raise WorkflowError(
            f"trajectory {answer.id} of agent {answer.agent}",
            "the system returns it as the answer, but another agent reads it",
            "Return the trajectory that nobody reads",
        )
    return None


async def fork_on_first(job: Job) -> Group:
    """FoF: fork at the first call; G whole rollouts, every agent's outputs are peers of each other."""
    return group_of(job, "fork_on_first", [await fork(job, at=0, size=job.group_size)])


def round_robin(probabilities: Sequence[float] | None = None) -> Strategy:
    """RR: draw the fork agent k from `probabilities` (one per agent, default uniform) and fork at call k.

    An agent that others delegate to is no fork agent: its probability is 0, and it takes part in its caller's call.

    Raises (when a job runs):
        ConfigError: not one probability per agent, or one above 0 for an agent that others delegate to.
    """

    async def strategy(job: Job) -> Group:
        asked = _asked(job.system)
        weights = list(probabilities) if probabilities is not None else [float(is_asked) for is_asked in asked]
        if len(weights) != len(job.system.agents):
            raise ConfigError(
                "sampling.fork_probabilities",
                f"{len(weights)} values for {len(job.system.agents)} agents",
                "Give one probability per agent, in the system's order",
            )
        for agent, weight, is_asked in zip(job.system.agents, weights, asked, strict=True):
            if weight and not is_asked:
                found = f"{weight} for {agent.name}, which works for its caller and has no call of its own to fork at"
                raise ConfigError("sampling.fork_probabilities", found, "Give it 0")
        draw = random.Random(f"{job.seed}:{job.step}:{job.question.id}:round_robin")
        (at,) = draw.choices(range(sum(asked)), [w for w, is_asked in zip(weights, asked, strict=True) if is_asked])
        return group_of(job, "round_robin", [await fork(job, at=at, size=job.group_size)])

    return strategy


async def independent(job: Job) -> Group:
    """IS: one pass per agent k, forked at call k, in which only that call's G outputs are trained.

    Those that a call delegates to belong to it: they have no pass of their own, and are trained in their caller's.
    """
    cohort = job.cohort or Cohort()
    passes = range(sum(_asked(job.system)))
    forks = await cohort.gather([fork(job, at=k, size=job.group_size, pass_id=k) for k in passes])
    return group_of(job, "independent", [only_call(branches, k) for k, branches in enumerate(forks)])


def _asked(system: System) -> list[bool]:
    """For each agent whether the system asks it itself: False for one that others delegate to."""
    delegates = {name for agent in system.agents for name in agent.delegates}
    return [agent.name not in delegates for agent in system.agents]


def only_call(branches: Branches, number: int) -> Branches:
    """The branches, of which only what belongs to top-level call `number` is trained."""
    targeted = (replace(t, trainable=t.trainable and t.call == number) for t in branches.trajectories)
    return replace(branches, trajectories=tuple(targeted))


def group_of(job: Job, strategy: str, forks: Sequence[Branches]) -> Group:
    """All passes of a question as its group."""
    dropped: Counter[str] = Counter()
    for branches in forks:
        dropped.update(branches.dropped)
    return Group(
        question=job.question,
        step=job.step,
        strategy=strategy,
        trajectories=tuple(t for branches in forks for t in branches.trajectories),
        dropped=dict(dropped),
        unused=-sum(branches.num_adopted for branches in forks),
    )
