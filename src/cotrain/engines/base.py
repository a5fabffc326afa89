"""The seam between a team and what samples for it: token ids in, sampled ids with log-probs out.

`Engine` is the protocol that every sampler meets; `tests/contracts` holds the suite that each one must pass.
`Cohort` lets a deterministic engine know when a batch is complete. Nothing here knows torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from cotrain.types import Completion, SamplingParams

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call, ready for an engine.

    `key` names the call: (run seed, step, question id, rollout id, call, turn). Equal keys draw equal noise, whatever
    else is in the batch.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: tuple[str | int, ...]


class Cohort:
    """Counts the coroutines of a batch of work, so that an engine can wait until all of them wait for it.

    A deterministic engine starts a batch only when nobody in the cohort can add to it (`ready`). So the work itself
    fixes the composition of every batch, and timing does not. Whoever starts n coroutines calls `enter(n)` before the
    first of them runs; each calls `leave()` at its end. `gather` does both for children of a member.
    """

    def __init__(self) -> None:
        self.live = 0
        self.waiting = 0
        self._listeners: list[Callable[[], None]] = []

    def enter(self, count: int = 1) -> None:
        """Add `count` live coroutines."""
        self.live += count

    def leave(self) -> None:
        """Note that one live coroutine has ended."""
        self.live -= 1
        self._notify()

    def wait(self) -> None:
        """Note that one live coroutine now waits for an engine (called by engines)."""
        self.waiting += 1
        self._notify()

    def resume(self, count: int) -> None:
        """Note that the requests of `count` waiting coroutines have been taken up (called by engines)."""
        self.waiting -= count

    @property
    def ready(self) -> bool:
        """True when every live coroutine waits for an engine."""
        return self.waiting > 0 and self.waiting == self.live

    def listen(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever the cohort becomes ready (once per distinct callback)."""
        if callback not in self._listeners:
            self._listeners.append(callback)

    def _notify(self) -> None:
        if self.ready:
            for callback in list(self._listeners):
                callback()

    async def gather(self, coroutines: Sequence[Coroutine[object, object, Result]]) -> list[Result]:
        """Run the children of one live member concurrently; the member lends its place and takes it back at the end.

        All children run to their end; then the first error, if any, is raised.
        """
        if not coroutines:
            return []
        self.enter(len(coroutines) - 1)
        remaining = len(coroutines)

        def ended(_: asyncio.Future[Result]) -> None:  # also of one that is cancelled before its first step
            nonlocal remaining
            remaining -= 1
            if remaining:  # the last one to end hands its place back to the caller
                self.leave()

        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        for task in tasks:
            task.add_done_callback(ended)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]


@runtime_checkable
class Engine(Protocol):
    """What samples from a model."""

    @property
    def version(self) -> int:
        """How many updates the weights have had."""
        ...

    @property
    def context(self) -> int:
        """The largest number of tokens, prompt and completion together."""
        ...

    async def generate(self, request: Request, cohort: Cohort | None = None) -> Completion:
        """Sample one completion; with a cohort, in a batch whose composition the cohort fixes.

        Raises:
            InfrastructureError: the engine failed; the policy is not to blame.
        """
        ...
