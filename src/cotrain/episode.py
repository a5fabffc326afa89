"""One agent's episode: replies and calls in turn, until it answers or a limit ends it.

`play` knows neither engines nor tools: `say` samples a reply to a prompt, `act` carries out a reply's calls. Sampled
ids are kept as they are: the next prompt is the last one, what was sampled, and the results.
An agent without tools and delegates has an episode of one turn, whose reply is its answer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotrain.calls import Reply, parse_lines, parse_native
from cotrain.errors import InfrastructureError, ToolError
from cotrain.types import Agent, Completion, Ending, ToolCall, Turn

log = logging.getLogger(__name__)

Say = Callable[[tuple[int, ...], Sequence[Turn], int], Awaitable[Completion | None]]
"""(prompt ids, turns so far, most tokens) -> what was sampled, or None where the context has no room for it."""

Act = Callable[[Sequence[tuple[str, str]], int], Awaitable[Sequence[ToolCall]]]
"""((tool or delegate, argument) pairs, number of the turn) -> these calls, carried out at once, with their results."""

Tool = Callable[..., object]
"""Anything a system may `use`, or an agent may call with one string: plain or async.

A plain function runs inline, so it should be quick. Wrong arguments: `ToolError`. A service that is down:
`InfrastructureError`.
"""


class Extends(Protocol):
    """What an episode needs of a renderer."""

    @property
    def native_tools(self) -> bool:
        """Whether the chat template has a format of its own for tool calls."""
        ...

    def extend(self, prompt_ids: tuple[int, ...], completion: Completion, results: Sequence[str]) -> tuple[int, ...]:
        """The next prompt: all ids so far as they are, the results, and the opening of the next reply."""
        ...

    def reply(self, completion: Completion) -> str:
        """The text of a completion without its thoughts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an agent did: `output` is its answer, or its last words where it gave none (`stop` says why)."""

    turns: tuple[Turn, ...]
    output: str
    stop: Ending
    faults: tuple[str, ...] = ()

    def read(self) -> tuple[str, ...]:
        """Ids of the delegates' trajectories that a prompt showed from which was sampled."""
        return tuple(call.trajectory_id for turn in self.turns[:-1] for call in turn.calls if call.trajectory_id)


async def play(role: Agent, prompt_ids: tuple[int, ...], *, renderer: Extends, say: Say, act: Act) -> Episode:
    """Run an episode from its first prompt.

    Its faults: `malformed` (a reply that is neither calls nor an answer), `truncated` (a reply that the token limit
    cut), `no_answer` (an empty one, or a limit came first). A call that a limit forbids is not carried out.
    """
    names = {*role.tools, *role.delegates}
    turns: list[Turn] = []
    num_calls = 0
    while True:
        left = role.sampling.max_tokens
        if role.max_sampled is not None:
            left = min(left, role.max_sampled - sum(len(turn.completion.token_ids) for turn in turns))
        if left < 1:
            return Episode(turns=tuple(turns), output="", stop="tokens", faults=("no_answer",))
        completion = await say(prompt_ids, turns, left)
        if completion is None:
            return Episode(turns=tuple(turns), output="", stop="context", faults=("no_answer",) if names else ())
        text = renderer.reply(completion)
        reply = _parse(text, names, renderer.native_tools)
        ending = _ending(role, completion, reply, len(turns) + 1, num_calls + len(reply.calls))
        if ending is not None:
            turns.append(Turn(prompt_ids=prompt_ids, completion=completion))
            output = text if reply.answer is None else reply.answer
            return Episode(turns=tuple(turns), output=output, stop=ending[0], faults=ending[1] if names else ())
        num_calls += len(reply.calls)
        calls = await act(reply.calls, len(turns))
        turns.append(Turn(prompt_ids=prompt_ids, completion=completion, calls=tuple(calls)))
        prompt_ids = renderer.extend(prompt_ids, completion, [call.result for call in calls])


def _parse(text: str, names: set[str], native: bool) -> Reply:
    if not names:
        return Reply(answer=text)
    return parse_native(text, names) if native else parse_lines(text, names)


def _ending(
    role: Agent, completion: Completion, reply: Reply, num_turns: int, num_calls: int
) -> tuple[Ending, tuple[str, ...]] | None:
    """How the episode ends with this reply, and its faults; None if the calls are to be carried out."""
    if completion.stop == "length":
        return "tokens", ("truncated",)
    if reply.answer is not None:
        return "answer", reply.faults
    if not reply.calls:
        return "malformed", reply.faults
    if role.max_calls is not None and num_calls > role.max_calls:
        return "calls", ("no_answer",)
    if num_turns >= role.max_turns:
        return "turns", ("no_answer",)
    return None


async def run_tool(name: str, tool: Tool, argument: str, *, timeout_s: float, retries: int) -> ToolCall:
    """Carry out an agent's call of a tool: the result, or what the tool says of a wrong argument.

    Raises:
        InfrastructureError: it took too long ("tool_timeout") or raised ("tool_failed"), and so did every retry.
    """
    for attempt in range(retries + 1):
        try:
            result = tool(argument)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, timeout_s)
            return ToolCall(tool=name, argument=argument, result=str(result))
        except ToolError as error:
            return ToolCall(tool=name, argument=argument, result=f"error: {error.found}", is_error=True)
        except TimeoutError:
            found, reason = f"no result within {timeout_s:g} s", "tool_timeout"
        except Exception as error:  # whatever a tool raises, the policy is not to blame
            found, reason = f"{type(error).__name__}: {error}", "tool_failed"
        log.warning("tool %s, attempt %d of %d: %s", name, attempt + 1, retries + 1, found)
    fix = "Mend the tool or its service, or raise tools.timeout_s and tools.retries"
    raise InfrastructureError(f"tool {name!r}", f"{retries + 1} attempts failed, the last with {found}", fix, reason)
