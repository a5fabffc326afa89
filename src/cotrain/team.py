"""A multi-agent system is a plain coroutine: `async def run(team, question)` that awaits `team.ask` and `team.use`.

`Team` is what such a coroutine works with during one rollout. It renders prompts, calls engines and tools, writes down
every call, and can replay a record: the first calls return what was recorded, then sampling begins. That is all a fork
needs (`sampling.py`). Calls that run at once are fine, on replay too; a call that differs there is a `ReplayError`.
An agent with tools or delegates works in an episode (`episode.py`); a delegated episode travels with its caller's ask.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cotrain.calls import describe
from cotrain.engines.base import Cohort, Request
from cotrain.episode import Episode, Tool, play, run_tool
from cotrain.errors import InfrastructureError, WorkflowError
from cotrain.record import Call, Record
from cotrain.roster import Roster, Script
from cotrain.types import Agent, Completion, Question, ToolCall, Trajectory, Turn

Check = Callable[[str], Sequence[str]]
"""An agent's output -> the names of the format rules it broke."""


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
        masked: agents who say nothing; what the system does then is its default for them.
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
        masked: Collection[str] = (),
    ) -> None:
        self.roster, self.question = roster, question
        self.record = Record(f"question {question.id}", past)
        self.trajectories: list[Trajectory] = []  # sampled here; replayed ones belong to the trunk
        self.dropped: Counter[str] = Counter()
        self.paused = asyncio.Event()
        self._seed, self._step, self._pass, self._branch = seed, step, pass_id, branch
        self._pause_at, self._cohort, self._script, self._masked = pause_at, cohort, script, masked
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
        """Have an agent answer a prompt, in an episode if it may call tools or delegates; its trajectory.

        Args:
            agent: the agent's name.
            reads: the trajectories whose output shaped this prompt, directly or through a tool.
            check: names the format rules that an answer breaks; they become the trajectory's `faults`.
            fields: values for the `{name}` fields of the agent's prompt.

        Raises:
            WorkflowError: there is no such agent, or its prompt has a field that was not given.
            ReplayError: the record holds another call at this place.
            InfrastructureError: the engine failed.
        """
        role = self._role(agent)
        prompt_ids = self._prompt(role, fields)
        read = tuple(dict.fromkeys(t.id for t in reads))
        with self._call_under_way():
            call = await self.record.issue("ask", agent, (prompt_ids, read))
            if self._pause_at is not None and call.number >= self._pause_at:
                await self._pause(call)
            if not call.result.done():
                with self.record.result_of(call):
                    work = _Work(
                        role=role,
                        prompt_ids=prompt_ids,
                        fields=fields,
                        call=call.number,
                        place=str(call.number),
                        reads=read,
                    )
                    with self._occupied():
                        trajectories = await self._work(work, check)
                    self.trajectories += trajectories
                    call.result.set_result(trajectories[-1])
        result = call.result.result()
        assert isinstance(result, Trajectory)
        return result

    async def use(self, tool: str, /, *args: object) -> object:
        """Run a tool and return its result; on replay, return what was recorded.

        Raises:
            WorkflowError: there is no such tool.
            ReplayError: the record holds another call at this place.
        """
        function = self._tool(tool)
        with self._call_under_way():
            call = await self.record.issue("use", tool, args)
            if self._held:
                await self._pause(call)
            if not call.result.done():
                with self.record.result_of(call):
                    result = function(*args)
                    if inspect.isawaitable(result):
                        with self._occupied():
                            result = await result
                    call.result.set_result(result)
        return call.result.result()

    @property
    def num_under_way(self) -> int:
        """Number of calls that have not come back yet."""
        return len(self._under_way)

    def adopt(self, trajectories: Sequence[Trajectory]) -> None:
        """Make what was replayed so far this trunk's own: the trajectories behind it, under ids of this pass.

        `trajectories` are those of the rollout that the past belongs to.
        """
        num_asks = sum(call.kind == "ask" and call.result.done() for call in self.record.calls)
        names = {t.id: self._id(t.id.rsplit(":", 1)[1]) for t in trajectories if t.call < num_asks}
        self.trajectories = [
            replace(
                t,
                id=names[t.id],
                rollout_id=None,
                pass_id=self._pass,
                caller=names.get(t.caller or ""),
                reads=tuple(names[id] for id in t.reads),
                turns=tuple(_renamed(turn, names) for turn in t.turns),
                trainable=False,
                rewards={},
            )
            for t in trajectories
            if t.id in names
        ]
        self.record.rename({t.id: t for t in self.trajectories}, names)

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

    def _tool(self, name: str) -> Tool:
        if name not in self.roster.tools:
            raise WorkflowError(
                f"question {self.question.id}",
                f"the system uses the tool {name!r}, which it does not have",
                f"Known tools: {', '.join(self.roster.tools) or 'none'}",
            )
        return self.roster.tools[name]

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

    def _prompt(self, role: Agent, fields: Mapping[str, object]) -> tuple[int, ...]:
        """The ids of an agent's first prompt."""
        menu = [(name, inspect.getdoc(self._tool(name)) or "") for name in role.tools]
        menu += [(name, self._role(name).about) for name in role.delegates]
        menu = [(name, about.split("\n")[0].rstrip(".")) for name, about in menu]
        renderer = self.roster.renderers[role.model]
        listed = {} if renderer.native_tools else {"tools": "\n".join(describe(*entry) for entry in menu)}
        messages = _messages(role, {"tools": "", **listed, **fields} if menu else fields)
        return renderer.render(messages, menu) if menu and renderer.native_tools else renderer.render(messages)

    async def _work(self, work: _Work, check: Check | None = None) -> list[Trajectory]:
        """An agent's episode: the trajectories of those it delegated to, in the order of the calls, then its own."""
        role, id = work.role, self._id(work.place)
        if role.name in self._masked:
            return [self._trajectory(work, Episode(turns=(), output="", stop="answer"), None, is_lesson=False)]
        theirs: list[Trajectory] = []
        was_said: list[bool] = []

        async def say(prompt_ids: tuple[int, ...], turns: Sequence[Turn], most: int) -> Completion | None:
            said = self._said(work, turns)
            was_said.append(said is not None)
            return await self._complete(work, prompt_ids, len(turns), most, said)

        async def act(calls: Sequence[tuple[str, str]], turn: int) -> list[ToolCall]:
            jobs = [self._call(role, name, text, f"{work.place}.{turn}.{i}") for i, (name, text) in enumerate(calls)]
            done = await (self._cohort or Cohort()).gather(jobs)  # each has a place in the batch until it ends
            theirs.extend(t for _, trajectories in done for t in trajectories)
            return [call for call, _ in done]

        limit = asyncio.timeout(role.max_time_s)
        try:
            async with limit:
                renderer = self.roster.renderers[role.model]
                episode = await play(role, work.prompt_ids, renderer=renderer, say=say, act=act)
        except TimeoutError:
            if not limit.expired():
                raise  # somebody else's
            found = f"the episode took longer than max_time_s = {role.max_time_s}"
            raise InfrastructureError(f"trajectory {id}", found, "Raise the limit", "time_limit") from None
        unread = {t.id for t in theirs if t.caller == id and t.id not in episode.read()}
        self.dropped["unread_finding"] += len(unread)
        theirs = [replace(t, trainable=False) if t.id in unread else t for t in theirs]
        is_lesson = self._script is None or all(was_said)
        return [*theirs, self._trajectory(work, episode, check, is_lesson)]

    async def _call(self, role: Agent, name: str, argument: str, place: str) -> tuple[ToolCall, list[Trajectory]]:
        """Carry out one call of an episode: a tool's, or another agent's whole episode."""
        if name in role.tools:
            timeout_s, retries = self.roster.tool_timeout_s, self.roster.tool_retries
            return await run_tool(name, self._tool(name), argument, timeout_s=timeout_s, retries=retries), []
        delegate, fields = self._role(name), {"task": argument, "question": self.question.text}
        trajectories = await self._work(
            _Work(
                role=delegate,
                prompt_ids=self._prompt(delegate, fields),
                fields=fields,
                call=int(place.split(".")[0]),
                place=place,
                caller=self._id(place.rsplit(".", 2)[0]),
                task=argument,
            )
        )
        finding = trajectories[-1]
        result, failed = (finding.output, False) if finding.stop == "answer" else ("no finding", True)
        call = ToolCall(tool=name, argument=argument, result=result, is_error=failed, trajectory_id=finding.id)
        return call, trajectories

    def _trajectory(self, work: _Work, episode: Episode, check: Check | None, is_lesson: bool) -> Trajectory:
        gave_answer = episode.stop not in ("malformed", "turns", "calls")
        checked = check(episode.output) if check and gave_answer else ()
        return Trajectory(
            id=self._id(work.place),
            question_id=self.question.id,
            rollout_id=self.rollout_id,
            pass_id=self._pass,
            call=work.call,
            agent=work.role.name,
            model=work.role.model,
            caller=work.caller,
            task=work.task,
            reads=tuple(dict.fromkeys((*work.reads, *episode.read()))),
            turns=episode.turns,
            output=episode.output,
            status="ok" if episode.stop == "answer" else "failed" if episode.stop == "malformed" else "truncated",
            stop=episode.stop,
            trainable=work.role.trainable and self._branch is not None and bool(episode.turns) and is_lesson,
            faults=tuple(dict.fromkeys((*episode.faults, *checked))),
        )

    def _said(self, work: _Work, turns: Sequence[Turn]) -> str | None:
        """What the script says in the agent's place, if there is one."""
        if self._script is None:
            return None
        so_far = {"turns": tuple(turns), "step": self._step}
        return self._script(work.role.name, self.question, {**work.fields, **so_far})

    async def _complete(
        self, work: _Work, prompt_ids: tuple[int, ...], turn: int, most: int, said: str | None
    ) -> Completion | None:
        """Sample, or take the script's word; None where the context has no room for it (counted)."""
        engine, renderer = self.roster.engines[work.role.model], self.roster.renderers[work.role.model]
        spoken = renderer.demonstration(said) if said is not None else ()
        if len(prompt_ids) + max(1, len(spoken)) > engine.context:
            self.dropped["context_full"] += 1
            return None
        if said is not None:
            return Completion(token_ids=spoken, logprobs=(0.0,) * len(spoken), version=0, stop="stop", text=said)
        place = work.call if work.caller is None else work.place
        key = (self._seed, self._step, self.question.id, self._branch_name, place, turn)
        request = Request(prompt_ids=prompt_ids, params=replace(work.role.sampling, max_tokens=most), key=key)
        completion = await engine.generate(request, self._cohort)
        if completion.stop == "abort":
            raise InfrastructureError(f"request {key}", "the engine aborted it", "The rollout is removed and counted")
        return completion

    def _id(self, place: str) -> str:
        return f"{self._step}:{self.question.id}:{self._branch_name}:{place}"

    @property
    def _branch_name(self) -> str:
        return self.rollout_id or f"{self._pass}.trunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One agent's job. `place` tells it from all others of the rollout: the ask, then turn and call of the caller."""

    role: Agent
    prompt_ids: tuple[int, ...]
    fields: Mapping[str, object]
    call: int
    place: str
    reads: tuple[str, ...] = ()
    caller: str | None = None
    task: str = ""


def _renamed(turn: Turn, names: Mapping[str, str]) -> Turn:
    """The turn with the delegates' trajectories under their new ids."""
    calls = (replace(c, trajectory_id=names[c.trajectory_id]) if c.trajectory_id else c for c in turn.calls)
    return replace(turn, calls=tuple(calls))


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
