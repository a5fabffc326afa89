"""Samples in this process, from the very network that the trainer updates: no copy, no weight transfer.

Guarantees: the noise of a completion belongs to its request's key; with cohorts, equal work gives bit-identical
completions on the CPU. Recorded log-probs are those of the whole distribution at the sampling temperature (at 1 where
it is greedy), before any top-p cut. A failure reaches every request it concerns and leaves the engine usable.
Does not tokenise prompts, apply templates or change weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from torch import nn

from cotrain.engines.base import Cohort, Request
from cotrain.engines.decode import Batch, Row
from cotrain.engines.draw import noise
from cotrain.engines.waves import WaitingRoom, room_for
from cotrain.errors import InfrastructureError
from cotrain.render import Tokenizer
from cotrain.types import Completion


class LocalEngine:
    """Samples from a network in this process.

    With a cohort, a request joins the wave of all that the cohort's coroutines wait for; waves run one after another,
    each to its end, and what exceeds `max_batch` is admitted in the order of the keys as rows end. Without a cohort,
    a request is admitted at the next step (continuous batching); these give way to waves.

    Args:
        network: a transformers causal language model, or one wrapped by peft; shared with the trainer.
        tokenizer: decodes what was sampled.
        end_ids: ids that end a completion; they stay in its `token_ids`.
        context: most tokens of a prompt and its completion together.
        max_batch: most completions that are sampled at once.

    Attributes:
        version: how many updates the weights have had; whoever changes them sets it. A completion carries the version
            at which it was admitted.
        reload: takes up newer weights where there are some; called where no completion is under way.
            With `peek`, which only says whether there are some, continuous batching makes room for it.
        tokens_sampled, tokens_computed, time_s: tokens drawn, tokens that went through the network, time spent in
            steps; all since the engine was made.
    """

    def __init__(
        self, network: nn.Module, tokenizer: Tokenizer, *, end_ids: frozenset[int], context: int, max_batch: int = 64
    ) -> None:
        self.network, self.tokenizer, self.end_ids = network, tokenizer, end_ids
        self.context, self.max_batch = context, max_batch
        self.version = 0
        self.reload: Callable[[], object] = _nothing_newer
        self.peek: Callable[[], bool] = _nothing_newer
        self.tokens_sampled, self.tokens_computed, self.time_s = 0, 0, 0.0
        self._room: WaitingRoom[Row] = WaitingRoom(self._start)
        self._waves: deque[list[Row]] = deque()
        self._open: deque[Row] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def generate(self, request: Request, cohort: Cohort | None = None) -> Completion:
        """Sample one completion.

        Raises:
            InfrastructureError: the prompt is empty or leaves no room in the context, the network failed, or its
                logits are not finite.
        """
        room = room_for(request, self.context)
        row = Row(request, asyncio.get_running_loop().create_future(), room, noise(request.key, room))
        if cohort is None:
            self._open.append(row)
            self._wake()
            return await row.future
        self._room.enter(cohort, row)
        try:
            return await row.future
        finally:
            self._room.withdraw(cohort, row)

    def _start(self, wave: list[Row]) -> None:
        self._waves.append(wave)
        self._wake()

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        if self._runner is None or self._runner.done() or self._runner.get_loop() is not loop:
            self._runner = loop.create_task(self._run())

    async def _run(self) -> None:
        while self._waves or self._open:
            if self._waves:
                wave = self._waves.popleft()
                await self._drain(deque(wave))
                for row in wave:  # together and in order, so that what their callers do next has one order too
                    row.deliver()
            else:
                await self._drain(self._open)

    async def _drain(self, queue: deque[Row]) -> None:
        """Sample until the queue and the batch are empty; the open queue gives way to waves and to newer weights."""
        batch = Batch(self.network, self.tokenizer, self.end_ids, self.max_batch, self.context)
        is_open = queue is self._open
        while True:
            gives_way = is_open and (bool(self._waves) or (bool(batch.rows) and self.peek()))
            fresh = [] if gives_way else _take(queue, self.max_batch - len(batch.rows))
            if not fresh and not batch.rows:
                return
            try:
                over = self._step(batch, fresh)
            except Exception as error:  # whatever it is, nobody may be left waiting
                over = [*batch.rows, *_take(queue, len(queue))]
                _fail(over, error)
                batch = Batch(self.network, self.tokenizer, self.end_ids, self.max_batch, self.context)
            if is_open:
                for row in over:
                    row.deliver()
            await asyncio.sleep(0)

    def _step(self, batch: Batch, fresh: list[Row]) -> list[Row]:
        if not batch.rows:
            self.reload()
        started, computed = time.perf_counter(), batch.tokens_computed
        for row in fresh:
            row.version = self.version
        num_rows = len(batch.rows) + len(fresh)
        over = batch.step(fresh)
        self.tokens_sampled += num_rows
        self.tokens_computed += batch.tokens_computed - computed
        self.time_s += time.perf_counter() - started
        return over


def _nothing_newer() -> bool:
    return False


def _take(queue: deque[Row], count: int) -> list[Row]:
    """The next rows of a queue whose callers still wait."""
    rows: list[Row] = []
    while queue and len(rows) < count:
        row = queue.popleft()
        if not row.is_over:
            rows.append(row)
    return rows


def _fail(rows: Iterable[Row], error: Exception) -> None:
    for row in rows:
        if row.outcome is None:
            row.outcome = InfrastructureError(
                f"request {row.request.key}",
                f"the network failed: {type(error).__name__}: {error}",
                "See the error above",
            )
            row.outcome.__cause__ = error
