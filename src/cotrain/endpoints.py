"""Chat with a model behind an OpenAI-compatible HTTP endpoint: a judge, or a tool that answers.

A request is bounded in time, and repeated a bounded number of times where another try can help: no connection, no
answer in time, too many requests (429), a fault of the server (5xx). Anything else fails at once. What fails is an
`InfrastructureError`: the world failed, not the policy. The key is read from the environment when it is needed; it is
in no configuration, log or error message. Does not stream, and does not sample for training.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx2

from cotrain.errors import ConfigError, InfrastructureError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
_JITTER = random.SystemRandom()  # apart from the generators that a run's numbers come from


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model answers, and how it is asked.

    Args:
        base_url: up to the version, such as "http://localhost:8000/v1"; without a user, password or query.
        model: its name there.
        api_key_env: the environment variable that holds the key; "" where none is needed.
        timeout_s: for one try, from the connection to the last byte.
        retries: further tries after the first.
        max_tokens: most tokens of an answer.
        temperature: 0 is greedy.

    Raises:
        ConfigError: a value that cannot be used.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 60.0
    retries: int = 2
    max_tokens: int = 256
    temperature: float = 0.0

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.base_url)
            usable = url.scheme in ("http", "https") and url.host and not (url.userinfo or url.query or url.fragment)
        except httpx2.InvalidURL:
            usable = False
        if not usable:  # not shown: it may hold a password
            found = "not an http(s) address, or one with a user, a query or a fragment"
            raise ConfigError("endpoint base_url", found, 'Write it like "http://localhost:8000/v1"')
        bounds = {
            "timeout_s": self.timeout_s > 0,
            "retries": self.retries >= 0,
            "max_tokens": self.max_tokens >= 1,
            "temperature": self.temperature >= 0,
        }
        for name, is_good in bounds.items():
            if not is_good:
                raise ConfigError(f"endpoint {name}", f"it is {getattr(self, name)}", "Set a larger value")

    def __str__(self) -> str:
        return f"endpoint {self.base_url} ({self.model})"


Message = tuple[str, str]
"""(role, content)."""


def open_client(before: Callable[[httpx2.Request], Awaitable[None]] | None = None) -> httpx2.AsyncClient:
    """A client to use in one event loop, as `async with`; `before` is awaited ahead of every request, retries too."""
    return httpx2.AsyncClient(verify=_trust(), event_hooks={"request": [before]} if before else None)


async def chat(endpoint: Endpoint, messages: Sequence[Message], *, client: httpx2.AsyncClient) -> str:
    """The text that the model answers to `messages`, exactly as it came.

    Raises:
        ConfigError: the key's environment variable is not set, or holds what no header can.
        InfrastructureError: no usable answer (reason "endpoint").
    """
    url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
    content, headers = json.dumps(body(endpoint, messages)).encode(), _headers(endpoint)
    failure = ""
    for attempt in range(endpoint.retries + 1):
        if attempt:
            await asyncio.sleep(wait_s(attempt, _JITTER.random()))
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                response = await client.post(url, content=content, headers=headers, timeout=None)
        except TimeoutError:
            failure = f"no answer within {endpoint.timeout_s} s"
            continue
        except httpx2.RequestError as error:  # by its type alone: the message may quote a header
            failure = f"no answer: {type(error).__name__}"
            if isinstance(error, httpx2.TransportError):
                continue
            break
        if response.is_success:
            return _text(endpoint, response)
        failure = _refusal(endpoint, response)
        if response.status_code != 429 and response.status_code < 500:
            break
    fix = "See that the service runs and its address, model and key are right; work that needed it is left out"
    raise InfrastructureError(str(endpoint), failure, fix, reason="endpoint")


def body(endpoint: Endpoint, messages: Sequence[Message]) -> dict[str, object]:
    """What is sent: with the address, all that the answer depends on."""
    return {
        "model": endpoint.model,
        "messages": [{"role": role, "content": content} for role, content in messages],
        "max_tokens": endpoint.max_tokens,
        "temperature": endpoint.temperature,
    }


def wait_s(attempt: int, draw: float) -> float:
    """Seconds before retry `attempt` (from 1): min(longest, first * 2^(attempt - 1)) * (1 + draw) / 2, draw in [0, 1).

    Those whom one outage hit do not come back all at once.
    """
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt - 1, 30))
    return longest * (1 + draw) / 2


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key_env:
        headers["Authorization"] = f"Bearer {_key(endpoint)}"
    return headers


def _key(endpoint: Endpoint) -> str:
    key = os.environ.get(endpoint.api_key_env, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        found = f"the environment variable {endpoint.api_key_env} holds no usable key"
        raise ConfigError(str(endpoint), found, "Set it, or api_key_env to '' if no key is needed")
    return key


def _refusal(endpoint: Endpoint, response: httpx2.Response) -> str:
    """The status and what the server said, but nothing from it that may quote the key."""
    found = f"it answered {response.status_code} {response.reason_phrase}".rstrip()
    if response.status_code in (401, 403):
        return found
    said = " ".join(response.text.split())
    if endpoint.api_key_env:
        said = said.replace(_key(endpoint), "***")
    return f"{found}: {said[:200]}" if said else found


def _text(endpoint: Endpoint, response: httpx2.Response) -> str:
    try:
        text = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        fix = "See that it speaks the OpenAI chat protocol"
        raise InfrastructureError(str(endpoint), "its answer holds no text", fix, reason="endpoint") from None
    return text


@functools.cache
def _trust() -> ssl.SSLContext:
    """Built once: it reads every certificate of the system."""
    return httpx2.create_ssl_context()
