"""What a system did, call by call, and how it is done again: the record behind every fork.

A `Record` holds a rollout's calls in the order of issue, and in which order they were issued and came back. One that is
made with a `past` replays it: a call that the past holds comes back with the past's result, and not before all that
had happened by then has happened again, so parts of a system that run at once meet in the same order. A call that
the past does not hold is a `ReplayError` until the past is used up; from then on calls are new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from cotrain.errors import ReplayError
from cotrain.types import Trajectory

PATIENCE_S = 30
"""How long a replayed call waits for what comes before it: replay costs no time, so only a changed system waits."""

PATIENCE_TURNS = 100
"""How many turns of the event loop a call that the past does not hold leaves to calls that it holds."""

Kind = Literal["ask", "use"]


@dataclass(slots=True, eq=False)
class Call:
    """One entry of a record: an ask or a use, with all that it was given, and what came of it.

    `number` counts the asks in the order of issue, from 0; a repeated ask keeps its number. A use has none (-1).
    """

    kind: Kind
    name: str
    given: tuple[object, ...]
    result: asyncio.Future[object]
    number: int = -1

    def describe(self) -> str:
        """The call in a few words, for errors."""
        given = repr(self.given)
        return f"{self.kind} {self.name!r} with {given if len(given) <= 120 else given[:117] + '...'}"


class Record:
    """The calls of one rollout.

    Args:
        where: whose record it is, for errors.
        past: the record to replay first.

    Attributes:
        calls: in the order of issue.
    """

    def __init__(self, where: str, past: Record | None = None) -> None:
        self.where = where
        self.calls: list[Call] = []
        self._past = past
        self._order: list[tuple[Literal["issued", "returned"], Call]] = []
        self._again: dict[Call, Call] = {}  # a call of the past -> the one that repeats it
        self._num_seen = 0  # how much of the past's order has happened again
        self._num_asks: int = past._num_asks if past else 0

    async def issue(self, kind: Kind, name: str, given: tuple[object, ...]) -> Call:
        """Write a call down; where the past holds its result, the call has it when this returns.

        Raises:
            ReplayError: the past holds other calls at this place, or what it holds before does not happen.
        """
        call = Call(kind, name, given, asyncio.get_running_loop().create_future())
        recorded = self._recorded(call)
        if recorded is not None:
            self._again[recorded] = call
            call.number = recorded.number
        else:
            await self._use_up_past(call)
            if kind == "ask":
                call.number = self._num_asks
                self._num_asks += 1
        self.calls.append(call)
        self._order.append(("issued", call))
        if recorded is not None:
            await self._replay(call, recorded)
        return call

    @property
    def num_asks(self) -> int:
        """Number of top-level asks that were issued."""
        return sum(call.kind == "ask" for call in self.calls)

    @property
    def num_returned(self) -> int:
        """Number of calls that have come back."""
        return sum(call.result.done() for call in self.calls)

    def until(self, number: int) -> Record:
        """What was issued before ask `number`, with its results: a past that ends there."""
        asks = [place for place, call in enumerate(self.calls) if call.kind == "ask" and call.number >= number]
        past = Record(self.where)
        past.calls = self.calls[: min(asks, default=len(self.calls))]
        past._order = [(event, call) for event, call in self._order if call in past.calls]
        past._num_asks = sum(call.kind == "ask" for call in past.calls)
        return past

    def rename(self, trajectories: Mapping[str, Trajectory], names: Mapping[str, str]) -> None:
        """Have the asks that came back hold these trajectories, by new id, in place of the old; `names`: old -> new."""
        for call in self.calls:
            if call.kind == "ask":
                prompt_ids, reads = call.given
                assert isinstance(reads, tuple)
                call.given = (prompt_ids, tuple(names.get(id, id) for id in reads))
            if call.kind == "ask" and call.result.done() and call.result.exception() is None:
                before = call.result.result()
                assert isinstance(before, Trajectory)
                call.result = asyncio.get_running_loop().create_future()
                call.result.set_result(trajectories[names[before.id]])

    @contextmanager
    def result_of(self, call: Call) -> Iterator[None]:
        """Around what a new call does: note when it came back, and let whoever waits for it know if it failed."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                call.result.set_exception(error)
                call.result.exception()  # it is raised here; asyncio need not report it a second time
            else:
                call.result.cancel()
            raise
        finally:
            self._order.append(("returned", call))

    def _recorded(self, call: Call) -> Call | None:
        """The call of the past that this one repeats, or None."""
        for other in self._left():
            if (other.kind, other.name, other.given) == (call.kind, call.name, call.given):
                return other
        return None

    async def _use_up_past(self, call: Call) -> None:
        """Before a call that the past does not hold: wait until nothing that the past has a result for is left."""
        for _ in range(PATIENCE_TURNS):  # other parts of the system may be just about to make it
            if not any(other.result.done() for other in self._left()):
                return
            await asyncio.sleep(0)
        for missing in self._left():
            if missing.result.done():
                raise self._differs(missing, f"makes {call.describe()}, where it had made")

    def _left(self) -> list[Call]:
        """The calls of the past that have not been made again."""
        return [call for call in self._past.calls if call not in self._again] if self._past else []

    async def _replay(self, call: Call, recorded: Call) -> None:
        assert self._past is not None
        order = self._past._order
        if order[self._num_seen : self._num_seen + 2] == [("issued", recorded), ("returned", recorded)]:
            self._advance()  # nothing had happened between the two: nobody else may have a turn now
            return
        # Later, when this call is being waited for, so that calls which come back together do so in the past's order.
        asyncio.get_running_loop().call_soon(self._advance)
        if not recorded.result.done():
            return
        for _ in range(PATIENCE_S):  # in short waits, because a long step of an engine may use up a whole one
            await asyncio.wait([call.result], timeout=1)
            if call.result.done():
                return
        raise self._differs(order[self._num_seen][1], f"waits for {call.describe()} and does not make, as it had done,")

    def _advance(self) -> None:
        """Let calls come back as far as everything before that has happened again."""
        assert self._past is not None
        for event, recorded in self._past._order[self._num_seen :]:
            call = self._again.get(recorded)
            if call is None:
                return
            if event == "returned" and not call.result.done():
                _copy(recorded.result, call.result)
                self._order.append(("returned", call))
            self._num_seen += 1

    def _differs(self, missing: Call, found: str) -> ReplayError:
        assert self._past is not None
        return ReplayError(
            f"{self.where}, call {self._past.calls.index(missing)}",
            f"on replay the system {found} {missing.describe()}",
            "Make the workflow depend on nothing but the question and the results of its calls",
        )


def _copy(source: asyncio.Future[object], target: asyncio.Future[object]) -> None:
    """Settle a future as another one was."""
    if source.cancelled():
        target.cancel()
    elif (error := source.exception()) is not None:
        target.set_exception(error)
        target.exception()  # raised where the call is made; asyncio need not report it a second time
    else:
        target.set_result(source.result())
