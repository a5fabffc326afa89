"""A multi-agent system is a plain coroutine: `async def run(team, question)` that awaits `team.ask` and `team.use`.

`Team` is what such a coroutine works with during one rollout. It renders prompts, calls engines and tools, writes down
every call, and can replay a record: the first calls return what was recorded, then sampling begins. That is all a fork
needs (`sampling.py`). Calls that run at once are fine, on replay too; a call that differs there is a `ReplayError`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from cotrain.engines.base import Cohort, Engine, Request
from cotrain.errors import InfrastructureError, WorkflowError
from cotrain.record import Call, Record
from cotrain.types import Agent, Completion, Question, Status, Trajectory, Turn

Script = Callable[[str, Question, Mapping[str, object]], str | None]
"""(agent, question, prompt fields) -> what the agent says, or None to let its engine sample."""

Check = Callable[[str], Sequence[str]]
"""An agent's output -> the names of the format rules it broke."""


Tool = Callable[..., object]
"""Anything a system may `use`: plain or async, over plain values. A service that is down: `InfrastructureError`."""


class Renders(Protocol):
    """Messages and texts to token ids, for one model (`render.Renderer`)."""

    def render(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """(role, content) pairs -> the ids of a prompt."""
        ...

    def demonstration(self, text: str) -> tuple[int, ...]:
        """What a model should have said -> its ids, the end token included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A team's workflow with its agents.

    `run` returns the trajectory that is the rollout's answer. `penalties` are each agent's credit for a faulty output.
    `tools` are the system's own, by name; a configured run adds `search(queries, count)` over its corpus.
    `demonstrate` says what a rule would answer in an agent's place, for a supervised warm-up on the formats.
    """

    run: Callable[[Team, Question], Awaitable[Trajectory]]
    agents: tuple[Agent, ...]
    penalties: Mapping[str, float] = field(default_factory=dict)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    demonstrate: Script | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who plays: agents by name, an engine and a renderer per model, tools by name."""

    agents: Mapping[str, Agent]
    engines: Mapping[str, Engine]
    renderers: Mapping[str, Renders]
    tools: Mapping[str, Tool] = field(default_factory=dict)

    def greedy(self) -> Roster:
        """The same cast, decoding greedily: for evaluation."""
        agents = {
            name: replace(agent, sampling=replace(agent.sampling, temperature=0.0, top_p=1.0))
            for name, agent in self.agents.items()
        }
        return replace(self, agents=agents)


class Team:
    """One rollout's view of a roster: `ask` agents, `use` tools; every call is written down.

    Args:
        roster: who plays.
        question: what is asked.
        seed: the run's seed; part of every request's noise key.
        step: the training step; likewise.
        pass_id: which pass of the group this is.
        branch: number of the branch, or None for a trunk.
        past: the record to replay before sampling begins.
        pause_at: number of the top-level ask before which to stop for good (see `paused`).
        cohort: the batch of work that this rollout belongs to.
        script: answers in place of engines; then what an engine says all the same is not trained on.
    """

    def __init__(
        self,
        roster: Roster,
        question: Question,
        *,
        seed: int = 0,
        step: int = 0,
        pass_id: int = 0,
        branch: int | None = 0,
        past: Record | None = None,
        pause_at: int | None = None,
        cohort: Cohort | None = None,
        script: Script | None = None,
    ) -> None:
        self.roster, self.question = roster, question
        self.record = Record(f"question {question.id}", past)
        self.trajectories: list[Trajectory] = []  # sampled here; replayed ones belong to the trunk
        self.dropped: Counter[str] = Counter()
        self.paused = asyncio.Event()
        self._seed, self._step, self._pass, self._branch = seed, step, pass_id, branch
        self._pause_at, self._cohort, self._script = pause_at, cohort, script
        self._busy = 0
        self._held: list[Call] = []
        self._under_way: set[asyncio.Task[object]] = set()

    @property
    def rollout_id(self) -> str | None:
        """Id of this rollout within its group, or None on a trunk."""
        return None if self._branch is None else f"{self._pass}.{self._branch}"

    async def ask(
        self,
        agent: str,
        /,
        *,
        reads: Sequence[Trajectory] = (),
        check: Check | None = None,
        **fields: object,
    ) -> Trajectory:
        """Have an agent answer a prompt, and return its trajectory.

        Args:
            agent: the agent's name.
            reads: the trajectories whose output shaped this prompt, directly or through a tool.
            check: names the format rules that the output breaks; they become the trajectory's `faults`.
            fields: values for the `{name}` fields of the agent's prompt.

        Raises:
            WorkflowError: there is no such agent, or its prompt has a field that was not given.
            ReplayError: the record holds another call at this place.
            InfrastructureError: the engine failed.
        """
        role = self._role(agent)
        prompt_ids = self.roster.renderers[role.model].render(_messages(role, fields))
        read = tuple(dict.fromkeys(t.id for t in reads))
        with self._call_under_way():
            call = await self.record.issue("ask", agent, (prompt_ids, read))
            if self._pause_at is not None and call.number >= self._pause_at:
                await self._pause(call)
            if not call.result.done():
                with self.record.result_of(call):
                    trajectory = await self._sample(role, prompt_ids, fields, call.number, read, check)
                    self.trajectories.append(trajectory)
                    call.result.set_result(trajectory)
        result = call.result.result()
        assert isinstance(result, Trajectory)
        return result

    async def use(self, tool: str, /, *args: object) -> object:
        """Run a tool and return its result; on replay, return what was recorded.

        Raises:
            WorkflowError: there is no such tool.
            ReplayError: the record holds another call at this place.
        """
        if tool not in self.roster.tools:
            raise WorkflowError(
                f"question {self.question.id}",
                f"the system uses the tool {tool!r}, which it does not have",
                f"Known tools: {', '.join(self.roster.tools) or 'none'}",
            )
        with self._call_under_way():
            call = await self.record.issue("use", tool, args)
            if self._held:
                await self._pause(call)
            if not call.result.done():
                with self.record.result_of(call):
                    result = self.roster.tools[tool](*args)
                    if inspect.isawaitable(result):
                        with self._occupied():
                            result = await result
                    call.result.set_result(result)
        return call.result.result()

    @property
    def num_under_way(self) -> int:
        """Number of calls that have not come back yet."""
        return len(self._under_way)

    async def close(self) -> None:
        """Cancel the calls that are under way although the system has ended; nothing of them stays behind."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _role(self, agent: str) -> Agent:
        if agent not in self.roster.agents:
            raise WorkflowError(
                f"question {self.question.id}",
                f"the system asks {agent!r}, who is not on the roster",
                f"Known agents: {', '.join(self.roster.agents)}",
            )
        return self.roster.agents[agent]

    @contextmanager
    def _call_under_way(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        """While something is awaited: of several at once, each is one more coroutine that the cohort must wait for."""
        if self._cohort and self._busy:
            self._cohort.enter()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            if self._cohort and self._busy:
                self._cohort.leave()

    async def _pause(self, call: Call) -> None:
        """Hold a call back: let those made before finish, say so, and wait to be cancelled; no further call is made."""
        self._held.append(call)
        made = [other.result for other in self.record.calls if other not in self._held]
        await asyncio.gather(*made, return_exceptions=True)
        self.paused.set()
        await asyncio.get_running_loop().create_future()

    async def _sample(
        self,
        role: Agent,
        prompt_ids: tuple[int, ...],
        fields: Mapping[str, object],
        number: int,
        reads: tuple[str, ...],
        check: Check | None,
    ) -> Trajectory:
        rollout = self.rollout_id
        said = self._script(role.name, self.question, fields) if self._script else None
        completion = await self._complete(role, prompt_ids, said, number)
        is_lesson = completion is not None and (self._script is None or said is not None)
        output = completion.text.strip() if completion else ""
        status: Status = "ok" if completion and completion.stop == "stop" else "truncated"
        return Trajectory(
            id=f"{self._step}:{self.question.id}:{rollout or f'{self._pass}.trunk'}:{number}",
            question_id=self.question.id,
            rollout_id=rollout,
            pass_id=self._pass,
            call=number,
            agent=role.name,
            model=role.model,
            reads=reads,
            turns=(Turn(prompt_ids=prompt_ids, completion=completion),) if completion else (),
            output=output,
            status=status,
            trainable=role.trainable and rollout is not None and is_lesson,
            faults=tuple(check(output)) if check else (),
        )

    async def _complete(
        self, role: Agent, prompt_ids: tuple[int, ...], said: str | None, number: int
    ) -> Completion | None:
        """Sample, or take the script's word; None where the context has no room for it (counted)."""
        engine = self.roster.engines[role.model]
        spoken = self.roster.renderers[role.model].demonstration(said) if said is not None else ()
        if len(prompt_ids) + max(1, len(spoken)) > engine.context:
            self.dropped["context_full"] += 1
            return None
        if said is not None:
            return Completion(token_ids=spoken, logprobs=(0.0,) * len(spoken), version=0, stop="stop", text=said)
        key = (self._seed, self._step, self.question.id, self.rollout_id or f"{self._pass}.trunk", number, 0)
        request = Request(prompt_ids=prompt_ids, params=role.sampling, key=key)
        with self._occupied():
            completion = await engine.generate(request, self._cohort)
        if completion.stop == "abort":
            raise InfrastructureError(f"request {key}", "the engine aborted it", "The rollout is removed and counted")
        return completion


def _messages(role: Agent, fields: Mapping[str, object]) -> list[tuple[str, str]]:
    try:
        content = role.prompt.format_map(fields)
    except KeyError as error:
        raise WorkflowError(
            f"agent {role.name}",
            f"its prompt has the field {{{error.args[0]}}}, which the system did not give",
            f"Given fields: {', '.join(fields)}; write literal braces as {{{{ and }}}}",
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise WorkflowError(
            f"agent {role.name}", f"its prompt is no template: {error}", "Write literal braces as {{ and }}"
        ) from None
    return [("system", role.system), ("user", content)] if role.system else [("user", content)]
