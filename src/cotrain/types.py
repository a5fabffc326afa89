"""The nouns of cotrain: what a question, a team's work on it, and a training sample are.

Frozen, keyword-only dataclasses with no torch and no behaviour beyond views. Data walks down this file:
a `Question` is asked of `Agent`s, each model call is a `Turn`, an agent's turns are a `Trajectory`, all trajectories
of one question in one step are a `Group`, and what the loss sees of a trajectory is one or more `Sample`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Stop = Literal["stop", "length", "abort"]
"""Why sampling ended: an end token or stop string, the token limit, or an abort from outside."""

Status = Literal["ok", "truncated", "failed"]
"""ok: ended by itself; truncated: cut by a limit; failed: it has no usable output."""

Ending = Literal["answer", "malformed", "turns", "calls", "tokens", "context"]
"""Why a trajectory ended: it answered, broke the format, or ran out of turns, tool calls, tokens or context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One root input with its gold answers.

    `meta` carries what the data set knows besides: `type`, `level`, `supporting_titles`, `split`.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    meta: Mapping[str, object] = field(default_factory=dict)

    @property
    def supporting_titles(self) -> tuple[str, ...]:
        """Titles of the pages the answer needs, or () where the data set does not say."""
        titles = self.meta.get("supporting_titles", ())
        return tuple(str(title) for title in titles) if isinstance(titles, (list, tuple)) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One retrievable piece of text."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one model call samples.

    `temperature` 0 is greedy. `top_p` cuts what may be drawn; recorded log-probs are always those before the cut.
    `stop` strings end the completion and stay in its token ids, but not in its text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A role: its prompt, its sampling settings and the name of the model that plays it.

    `prompt` is a template; `Team.ask(agent, name=value)` fills its `{name}` fields, and `{tools}` becomes the list of
    what the agent may call. `system` is an optional system message. An agent that is not `trainable` takes part in
    every rollout and gives no sample.

    With `tools` (names of the system's) or `delegates` (names of agents) an ask is an episode of several turns, and
    the limits hold for it: turns, tool calls, sampled tokens, seconds. `about` is what a caller is told of this agent.
    """

    name: str
    model: str
    prompt: str
    system: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    trainable: bool = True
    about: str = ""
    tools: tuple[str, ...] = ()
    delegates: tuple[str, ...] = ()
    max_turns: int = 1
    max_calls: int | None = None
    max_sampled: int | None = None
    max_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled: C token ids and the log-prob of each, before any top-p cut, at `version`.

    `token_ids` includes the end token when it was sampled; `text` is decoded without it and without a stop string.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    stop: Stop
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that a turn made: the tool or delegate, its argument, and the result that the next prompt shows.

    `is_error`: the tool refused the argument. `trajectory_id`: the delegate's, where one did the work.
    """

    tool: str
    argument: str
    result: str
    is_error: bool = False
    trajectory_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: the prompt's ids, what was sampled, and the calls that it made."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's turns on one job, with its lineage and its rewards.

    `rollout_id` is None on the trunk (recorded before a fork, shared by all branches). `call` is the number of the
    top-level ask, in the order of issue, that it answers or works for. `caller` is the id of the trajectory that
    delegated `task` to it. `reads` are the ids of the trajectories whose output shaped a prompt of this one. `faults`
    names the format rules that the output broke. A reward that is absent is unknown; it is never 0.
    """

    id: str
    question_id: str
    rollout_id: str | None
    pass_id: int
    call: int
    agent: str
    model: str
    caller: str | None = None
    task: str = ""
    reads: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    output: str = ""
    status: Status = "ok"
    stop: Ending = "answer"
    trainable: bool = True
    faults: tuple[str, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that were sampled over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All trajectories of one question in one step.

    `dropped` counts, by reason, the rollouts that infrastructure failures removed and the prompts that did not fit.
    `unused` counts sampled tokens that are in none of the trajectories (attempts that were repeated, masked rollouts);
    it is negative where trajectories were taken over from another pass, whose tokens would count twice.
    """

    question: Question
    step: int
    strategy: str
    trajectories: tuple[Trajectory, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    unused: int = 0

    @property
    def num_sampled(self) -> int:
        """Number of tokens that were sampled for this group, unused ones included."""
        return self.unused + sum(t.num_sampled for t in self.trajectories)

    def readers(self, trajectory: Trajectory) -> tuple[Trajectory, ...]:
        """The trajectories that read this one, over all rollouts."""
        return tuple(t for t in self.trajectories if trajectory.id in t.reads)

    def sinks(self) -> tuple[Trajectory, ...]:
        """The answers of the rollouts: what nobody reads and nobody delegated (a finding may stay unread)."""
        read = {id for t in self.trajectories for id in t.reads}
        return tuple(t for t in self.trajectories if t.id not in read and t.caller is None)

    def by_rollout(self) -> dict[str, tuple[Trajectory, ...]]:
        """Rollout id -> its trajectories in the order of its calls, the trunk of its pass included."""
        rollouts: dict[str, tuple[Trajectory, ...]] = {}
        for t in self.trajectories:
            if t.rollout_id is not None:
                rollouts[t.rollout_id] = (*rollouts.get(t.rollout_id, self._trunk(t.pass_id)), t)
        return rollouts

    def _trunk(self, pass_id: int) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.rollout_id is None and t.pass_id == pass_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """What length costs: 0 up to `limit - buffer` sampled tokens, then linear to `penalty` at `limit` and beyond."""

    limit: int
    buffer: int
    penalty: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How one agent's credit is made from its rewards: `gate * sum of weights * rewards + penalty`.

    `weights` are by reward name: `shared`, `format` (1 without faults, else 0) and whatever a judge gives. With `gate`
    a faulty output gets no reward at all (and a faulty answer passes on a shared reward of 0). The penalty counts once
    if any fault was found; `overlong` adds one for length. A reward that is unknown drops the trajectory, or the
    weights of the known ones are scaled up (`renormalise`); an unknown `shared` always drops it. `aggregate` joins the
    shared rewards of several readers; `propagate` says what a reader passes back: its `shared` reward alone, or its
    `full` credit.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"shared": 1.0})
    gate: bool = False
    missing: Literal["drop", "renormalise"] = "drop"
    penalty: float = 0.0
    overlong: Overlong | None = None
    aggregate: Literal["mean", "max", "min"] = "mean"
    propagate: Literal["shared", "full"] = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the loss sees of a trajectory: T tokens, of which the masked ones were sampled.

    `mask`, `logprobs`, `versions` and `advantages` have one entry per token; outside the mask the last three are 0.
    `weight` is the trajectory's weight in the objective. Where a critic makes the advantages, `advantages` hold the
    trajectory's credit, the return of each of its tokens. A trajectory whose turns do not extend each other is split
    into several samples with the same `trajectory_id`; it still counts once.
    """

    trajectory_id: str
    agent: str
    model: str
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    weight: float = 1.0


Metric = Callable[[str, tuple[str, ...]], float]
"""(answer, gold answers) -> a score, such as token F1."""
