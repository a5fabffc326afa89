"""The sections of a run's configuration that say what an answer is worth, and to whom: rewards, credit, advantages.

Declarations only, as in `sections.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cotrain.sections import NonNegative, Positive, Section


class OverlongConfig(Section):
    """A penalty that grows with an output's length over its last tokens before a limit (DAPO)."""

    limit: Positive
    """Sampled tokens from which on the whole penalty counts."""
    buffer: Positive
    """It begins so many tokens before, and grows linearly."""
    penalty: Annotated[float, Field(lt=0)] = -1.0
    """The whole penalty."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.limit:
            raise ValueError(f"buffer {self.buffer} exceeds limit {self.limit}; make it shorter")
        return self


class CreditConfig(Section):
    """Overrides of how one agent's credit is made; what is left out keeps the system's own value."""

    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weight of each reward: `shared`, `format` (1 without faults, else 0), and the names of judges."""
    gate: bool | None = None
    """True: a faulty output gets no reward at all, and a faulty answer counts as wrong."""
    missing: Literal["drop", "renormalise"] | None = None
    """When a judge failed: drop the trajectory, or scale up the other weights. An unknown `shared` always drops it."""
    overlong: OverlongConfig | None = None
    """Penalty for long outputs; none by default."""

    @field_validator("weights")
    @classmethod
    def _some(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not sum(value.values()) > 0:
            raise ValueError("the weights sum to 0; give at least one reward a weight")
        return value


class JudgeConfig(Section):
    """What gives a reward by judging: a rule, or a model behind an OpenAI-compatible endpoint.

    The section's name is the reward's. A judge named `shared` judges the final answers in place of `rewards.metric`.
    """

    agents: tuple[str, ...] = ()
    """Whose trajectories it judges; none are needed for `shared`."""
    rule: str | None = None
    """`coverage` (how far a finding covers the evidence), or `module:function`."""
    url: str | None = None
    """Base of the endpoint, such as http://localhost:8000/v1."""
    model: str = ""
    """Name of the endpoint's model."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty where none is needed."""
    instructions: str | None = None
    """What the model is told to judge, in place of the built-in text."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds an answer may take."""
    retries: NonNegative = 2
    """Attempts after a failed or unreadable one."""
    concurrency: Positive = 8
    """Most requests at once."""
    budget: Positive = 100_000
    """Most requests in the whole process; what is beyond has no reward."""
    cache: str | None = None
    """File that keeps judgements from run to run."""

    @model_validator(mode="after")
    def _one_kind(self) -> JudgeConfig:
        if (self.rule is None) == (self.url is None):
            raise ValueError("set exactly one of rule and url")
        unset = JudgeConfig.model_construct(rule=self.rule, agents=self.agents)
        idle = [name for name, value in self if value != getattr(unset, name)]
        if self.rule is not None and idle:
            raise ValueError(f"{', '.join(idle)}: a rule asks no endpoint; leave it out, or set url in place of rule")
        return self


class RewardConfig(Section):
    """From answers to credits."""

    metric: str = "f1"
    """Score of the final answer: `f1`, `exact_match`, `accuracy`, or `module:function`."""
    threshold: Annotated[float, Field(gt=0)] | None = None
    """The answer is correct (1) where the metric reaches this, else wrong (0); by default the metric itself counts."""
    credit: dict[str, CreditConfig] = Field(default_factory=dict)
    """How an agent's credit is made of its rewards, by agent."""
    penalties: dict[str, Annotated[float, Field(le=0)]] = Field(default_factory=dict)
    """Penalty per agent for a faulty output, in place of the system's own."""
    aggregate: Literal["mean", "max", "min"] = "mean"
    """How the rewards of several readers are joined."""
    propagate: Literal["shared", "full"] = "shared"
    """What flows back: the shared reward, or the reader's whole credit."""


DIVIDING = ("group_relative", "agent_wise", "agent_turn")
"""The estimators that divide by a standard deviation."""


class AdvantageConfig(Section):
    """From credits to advantages."""

    estimator: str = "group_relative"
    """`group_relative`, `agent_wise`, `agent_turn`, `leave_one_out`, `no_std`, `role_baseline`, `gae` (needs the critic
    of the agent's model), or `module:function` (see docs/methods.md)."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Another estimator for an agent, by agent."""
    std: Literal["population", "sample"] = "population"
    """Which standard deviation divides, in the estimators that divide by one."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """role_baseline: how much of an agent's average stays after each of its credits."""

    @model_validator(mode="after")
    def _used(self) -> AdvantageConfig:
        chosen = {self.estimator, *self.agents.values()}
        if (self.std, self.eps) != ("population", 1e-6) and not chosen & set(DIVIDING):
            raise ValueError(f"std and eps belong to {', '.join(DIVIDING)}; leave them out")
        if self.decay != 0.95 and "role_baseline" not in chosen:
            raise ValueError("decay belongs to estimator 'role_baseline'; leave it out")
        return self


class AlignConfig(Section):
    """How often sub-agents' trajectories count when rollouts delegate unequally often (see docs/methods.md)."""

    method: Literal["weight", "duplicate", "none"] = "weight"
    """`weight`: 1 / d_k each; `duplicate`: exactly `size` per rollout, by copies and cuts; `none`: 1 each."""
    size: Positive | None = None
    """d of `duplicate`; `cotrain probe` suggests one."""
    factors: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Factor on an agent's weights in the loss, by agent; 1 by default."""

    @model_validator(mode="after")
    def _size(self) -> AlignConfig:
        if (self.method == "duplicate") != (self.size is not None):
            raise ValueError("size belongs to method 'duplicate', which needs one; `cotrain probe` suggests one")
        return self
