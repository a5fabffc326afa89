"""Who plays: a system with its agents and tools, and the engines, renderers and limits that they play with.

A `System` is what a user writes; a `Roster` is a system's cast for one corpus, ready to work. Plain values, shared by
all rollouts; what happens in one rollout is `team.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from cotrain.engines.base import Engine
from cotrain.episode import Extends, Tool
from cotrain.types import Agent, CreditRule, Question, Trajectory

if TYPE_CHECKING:
    from cotrain.data.corpus import Corpus
    from cotrain.team import Team

Script = Callable[[str, Question, Mapping[str, object]], str | None]
"""(agent, question, fields) -> what it says; None: its engine samples. The fields are the prompt's, the episode's
`turns` so far, and the warm-up `step`, by which a demonstration may vary."""


class Renders(Extends, Protocol):
    """Messages and texts to token ids, for one model (`render.Renderer`)."""

    def render(self, messages: Sequence[tuple[str, str]], tools: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """(role, content) pairs and (tool, what it does) pairs -> the ids of a prompt."""
        ...

    def demonstration(self, text: str) -> tuple[int, ...]:
        """What a model should have said -> its ids, the end token included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A team's workflow with its agents.

    `run` returns the trajectory that is the rollout's answer. `penalties` are each agent's credit for a faulty output,
    `rules` the whole of how an agent's credit is made, where it is more than the shared reward and that penalty.
    `tools` are the system's own, by name, `corpus_tools` those made from a set's corpus; a configured run adds
    `search(queries, count)` over its corpus. `demonstrate` says what a rule would answer in an agent's place, for a
    supervised warm-up on the formats.
    """

    run: Callable[[Team, Question], Awaitable[Trajectory]]
    agents: tuple[Agent, ...]
    penalties: Mapping[str, float] = field(default_factory=dict)
    rules: Mapping[str, CreditRule] = field(default_factory=dict)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    corpus_tools: Mapping[str, Callable[[Corpus], Tool]] = field(default_factory=dict)
    demonstrate: Script | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who plays: agents by name, an engine and a renderer per model, tools by name and their limits in episodes."""

    agents: Mapping[str, Agent]
    engines: Mapping[str, Engine]
    renderers: Mapping[str, Renders]
    tools: Mapping[str, Tool] = field(default_factory=dict)
    tool_timeout_s: float = 30.0
    tool_retries: int = 2

    def greedy(self) -> Roster:
        """The same cast, decoding greedily: for evaluation."""
        agents = {
            name: replace(agent, sampling=replace(agent.sampling, temperature=0.0, top_p=1.0))
            for name, agent in self.agents.items()
        }
        return replace(self, agents=agents)
