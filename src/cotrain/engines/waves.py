"""Where requests of a cohort wait until the cohort is ready, and how much a request may sample.

Guarantees: a wave is all that one cohort's coroutines wait for at one engine, in the order of the request keys, so
neither timing nor arrival order shapes it. Coroutines of a wave that runs count as live and not as waiting: a cohort
whose members use several engines is ready again only when the waves of all of them have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cotrain.engines.base import Cohort, Request
from cotrain.errors import InfrastructureError


class Waiting(Protocol):
    """What waits: anything that carries its request."""

    @property
    def request(self) -> Request:
        """The request that waits."""
        ...


Item = TypeVar("Item", bound=Waiting)


class WaitingRoom(Generic[Item]):
    """Collects the requests of cohorts and passes each complete wave to `start`, sorted by key, from the event loop."""

    def __init__(self, start: Callable[[list[Item]], None]) -> None:
        self._start = start
        self._waiting: dict[Cohort, list[Item]] = {}

    def enter(self, cohort: Cohort, item: Item) -> None:
        """Let one live coroutine of the cohort wait with its request."""
        self._waiting.setdefault(cohort, []).append(item)
        cohort.listen(self._check)
        cohort.wait()

    def withdraw(self, cohort: Cohort, item: Item) -> None:
        """Take back a request whose coroutine was cancelled; nothing happens if its wave has started."""
        items = self._waiting.get(cohort, [])
        if any(item is other for other in items):
            self._waiting[cohort] = [other for other in items if other is not item]
            cohort.resume(1)

    def _check(self) -> None:
        for cohort in self._waiting:
            if cohort.ready:
                # Not at once: every engine that the cohort waits for must see that it is ready.
                asyncio.get_running_loop().call_soon(self._launch, cohort)

    def _launch(self, cohort: Cohort) -> None:
        items = self._waiting.pop(cohort, [])
        if items:
            cohort.resume(len(items))
            self._start(sorted(items, key=_order))


def _order(item: Waiting) -> tuple[object, ...]:
    parts = tuple((isinstance(part, str), part) for part in item.request.key)  # numbers and strings do not compare
    return (parts, item.request.prompt_ids)


def room_for(request: Request, context: int) -> int:
    """Most tokens that a request may sample: its own limit or what its prompt leaves of the context.

    Raises:
        InfrastructureError: the prompt is empty, or nothing may be sampled.
    """
    room = min(request.params.max_tokens, context - len(request.prompt_ids))
    if not request.prompt_ids:
        raise InfrastructureError(f"request {request.key}", "the prompt is empty", "Render a prompt first")
    if room < 1:
        found = f"{len(request.prompt_ids)} prompt tokens and max_tokens = {request.params.max_tokens}"
        fix = f"Leave room for a completion in the context of {context} tokens"
        raise InfrastructureError(f"request {request.key}", found, fix)
    return room


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """The text before the first stop string and the text through it, or None where no stop string occurs."""
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return None
    at, stop = min(found)
    return text[:at], text[: at + len(stop)]
