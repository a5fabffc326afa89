"""An engine that answers from a script: for tests, demonstrations and dry runs. No model, no torch.

Guarantees: it meets the contract of every engine (limits, stop strings, cohorts, versions), keeps the requests it got,
and gives every token the log-prob 0.0, as if the script were the only thing it could say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotrain.engines.base import Cohort, Request
from cotrain.engines.waves import WaitingRoom, cut_at_stop, room_for
from cotrain.types import Completion, Stop

Script = Callable[[str, Request], str]
"""(text of the prompt, request) -> the text to answer; what it raises, the caller of `generate` gets."""


class TextTokenizer(Protocol):
    """The part of a tokenizer that a script needs: any transformers tokenizer, or a toy."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends an answer, if there is one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    request: Request
    called: asyncio.Future[None]


class ScriptedEngine:
    """Answers every request with `script(text of the prompt, request)`.

    Args:
        script: what to answer; the prompt's text still has its control tokens.
        tokenizer: turns answers into ids, control tokens in them included; its end token closes each one that fits.
        context: most tokens of a prompt and its completion together.
        version: the version that completions carry; plain attribute.
        record: keep the requests, in the order of the calls, in `requests`.
    """

    def __init__(
        self, script: Script, tokenizer: TextTokenizer, *, context: int = 4096, version: int = 0, record: bool = True
    ) -> None:
        self.script, self.tokenizer, self.record = script, tokenizer, record
        self.context, self.version = context, version
        self.requests: list[Request] = []
        self._room: WaitingRoom[_Ticket] = WaitingRoom(_call)

    async def generate(self, request: Request, cohort: Cohort | None = None) -> Completion:
        """Answer one request; with a cohort, when all of the cohort waits.

        Raises:
            InfrastructureError: the prompt is empty or leaves no room in the context.
        """
        room = room_for(request, self.context)
        if self.record:
            self.requests.append(request)
        if cohort is None:
            await asyncio.sleep(0)
        else:
            ticket = _Ticket(request, asyncio.get_running_loop().create_future())
            self._room.enter(cohort, ticket)
            try:
                await ticket.called
            finally:
                self._room.withdraw(cohort, ticket)
        return self._answer(request, room)

    def _answer(self, request: Request, room: int) -> Completion:
        said = self.script(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False), request)
        cut = cut_at_stop(said, request.params.stop)
        text, through = cut or (said, said)
        ids = list(self.tokenizer.encode(through, add_special_tokens=False))
        if cut is None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        stop: Stop = "stop"
        if len(ids) > room:
            ids, stop = ids[:room], "length"
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), version=self.version, stop=stop, text=text)


def _call(tickets: list[_Ticket]) -> None:
    for ticket in tickets:
        if not ticket.called.done():
            ticket.called.set_result(None)
