"""A tool that puts a sub-question to another model, which thinks alone and sees nothing else of the episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cotrain.endpoints import Endpoint, chat, open_client
from cotrain.errors import InfrastructureError, ToolError


def reason(endpoint: Endpoint, *, max_characters: int = 2000) -> Callable[[str], Awaitable[str]]:
    """The tool: the sub-question goes to `endpoint` as it is, and the text that it answers comes back.

    White space around the text is removed; of a longer one the first `max_characters` are kept.

    Raises (when called):
        ToolError: the sub-question is blank.
        InfrastructureError: the endpoint gave no answer, or a blank one.
    """

    async def reason(question: str) -> str:
        """Think about a question that needs no search."""
        if not question.strip():
            raise ToolError("reason", "the question is empty", "Give a question")
        async with open_client() as client:
            text = (await chat(endpoint, [("user", question)], client=client)).strip()
        if not text:
            fix = "Allow more tokens, or take another model"
            raise InfrastructureError(str(endpoint), "it answered with a blank text", fix, reason="endpoint")
        return text[:max_characters].rstrip()

    return reason
