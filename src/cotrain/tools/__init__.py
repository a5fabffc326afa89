"""Tools for agents: functions of one text that give a text.

The first line of a tool's docstring is what an agent is told of it. A wrong argument is a `ToolError`: the agent reads
it and is scored. A service that is down is an `InfrastructureError`: the rollout is removed. `search`, `visit` and
`calculator` are pure and quick; `reason` is awaited; `in_thread` makes an async tool of one that blocks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from cotrain.tools.calculator import calculator
from cotrain.tools.reason import reason
from cotrain.tools.web import search, visit

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

__all__ = ["calculator", "in_thread", "reason", "search", "visit"]


def in_thread(tool: Callable[Arguments, Result]) -> Callable[Arguments, Awaitable[Result]]:
    """The same tool, run in a thread so that it holds nobody up: for one that waits for a disk or a service.

    It must be safe to run several times at once. A time-out stops the waiting for it, not the thread.
    """

    @functools.wraps(tool)
    async def threaded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return await asyncio.to_thread(tool, *args, **kwargs)

    return threaded
