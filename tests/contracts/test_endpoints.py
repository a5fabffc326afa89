"""Chatting with an endpoint: what is sent, what is tried again, how failures end, and that the key stays secret."""

import asyncio
import json
import logging
import pickle
import traceback

import pytest

from cotrain import endpoints
from cotrain.endpoints import Endpoint, chat, open_client, wait_s
from cotrain.errors import ConfigError, CotrainError, InfrastructureError
from support_server import closed_url, replies, serve

KEY = "sk-very-secret-1234"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(endpoint, messages=(("user", "hi"),)):
    async def asked():
        async with open_client() as client:
            return await chat(endpoint, messages, client=client)

    return asyncio.run(asked())


def test_the_request_and_the_answer_are_those_of_the_protocol(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    with serve(" Ünïcode\n") as server:
        endpoint = Endpoint(base_url=server.url + "/", model="m", api_key_env="SOME_KEY", max_tokens=7, temperature=0.5)
        assert ask(endpoint, [("system", "be brief"), ("user", "a\ud800b")]) == " Ünïcode\n"
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["Content-Type"] == "application/json"
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\ud800b"}],
            "max_tokens": 7,
            "temperature": 0.5,
        }
    ]


def test_without_a_key_no_authorization_is_sent():
    with serve("yes") as server:
        assert ask(Endpoint(base_url=server.url, model="m")) == "yes"
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("failure", [(429, "slow down"), (500, ""), (503, "busy"), None])
def test_what_may_pass_is_tried_again(failure):
    with serve(replies(failure, failure, "yes")) as server:
        assert ask(Endpoint(base_url=server.url, model="m", retries=2)) == "yes"
    assert len(server.requests) == 3
    with serve(failure) as server, pytest.raises(InfrastructureError) as caught:
        ask(Endpoint(base_url=server.url, model="m", retries=2))
    assert len(server.requests) == 3
    assert caught.value.reason == "endpoint"
    assert pickle.loads(pickle.dumps(caught.value)).reason == "endpoint"


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ((400, "context  too\nlong"), "400 Bad Request: context too long"),
        ((404, ""), "404 Not Found"),
        ((401, KEY[:6]), "401 Unauthorized"),
        ((302, ""), "302 Found"),
        ((200, "no json"), "holds no text"),
        ((200, "[]"), "holds no text"),
        ((200, '{"choices": []}'), "holds no text"),
        ((200, '{"choices": [{"message": {"content": null}}]}'), "holds no text"),
        ((200, '{"choices": [{"message": {"content": ["a"]}}]}'), "holds no text"),
    ],
)
def test_what_will_not_pass_fails_at_once(reply, found):
    with serve(reply) as server, pytest.raises(InfrastructureError) as caught:
        ask(Endpoint(base_url=server.url, model="m", retries=5))
    assert len(server.requests) == 1
    assert found in str(caught.value)
    assert str(caught.value).startswith(f"endpoint {server.url} (m): ")
    assert "sk-" not in str(caught.value)
    assert caught.value.reason == "endpoint"


def test_nobody_listens():
    with pytest.raises(InfrastructureError, match="no answer: ConnectError"):
        ask(Endpoint(base_url=closed_url(), model="m", retries=1))


def test_an_answer_that_does_not_come_is_given_up():
    with serve("") as server:
        server.reply = server.never
        with pytest.raises(InfrastructureError, match="no answer within 0.05 s"):
            ask(Endpoint(base_url=server.url, model="m", retries=1, timeout_s=0.05))
        assert len(server.requests) <= 2


def test_waits_grow_are_spread_and_bounded(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT_S", 0.5)
    assert [wait_s(attempt, 0.0) for attempt in (1, 2, 3, 5, 6, 10_000)] == [0.25, 0.5, 1.0, 4.0, 4.0, 4.0]
    assert wait_s(1, 0.5) == 0.375
    assert wait_s(6, 0.5) == 6.0


def test_the_key_is_in_no_error_no_log_and_no_repr(monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", KEY)
    shown = []
    with (
        caplog.at_level(logging.DEBUG),
        serve(replies((400, json.dumps({"you sent": KEY})), (401, KEY), None)) as server,
    ):
        endpoint = Endpoint(base_url=server.url, model="m", api_key_env="SOME_KEY", retries=0)
        shown.append(repr(endpoint) + str(endpoint))
        for _ in range(3):
            with pytest.raises(InfrastructureError) as caught:
                ask(endpoint)
            shown.append("".join(traceback.format_exception(caught.value)))
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
    assert len(server.headers) == 3
    assert "***" in shown[1]
    for text in [*shown, caplog.text]:
        assert KEY not in text


@pytest.mark.parametrize("value", [None, "", "  ", "sk-ключ", "sk-a\nb"])
def test_a_key_that_is_not_there_or_cannot_be_sent(monkeypatch, value):
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with serve("yes") as server, pytest.raises(ConfigError, match="variable SOME_KEY holds no usable key") as caught:
        ask(Endpoint(base_url=server.url, model="m", api_key_env="SOME_KEY"))
    assert server.requests == []
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "localhost:8000/v1"},
        {"base_url": "ftp://host/v1"},
        {"base_url": "http://"},
        {"base_url": "https://user:hidden@host/v1"},
        {"base_url": "https://host/v1?key=hidden"},
        {"base_url": "http://host:port:hidden/v1"},
        {"timeout_s": 0},
        {"retries": -1},
        {"max_tokens": 0},
        {"temperature": -0.1},
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings):
    with pytest.raises(CotrainError, match="endpoint " + next(iter(settings))) as caught:
        Endpoint(**{"base_url": "http://localhost/v1", "model": "m", **settings})
    assert isinstance(caught.value, ConfigError)
    assert "hidden" not in str(caught.value)


def test_what_runs_before_a_request_runs_before_each_try_and_may_refuse():
    async def before(request):
        tries.append(request.url.path)
        if len(tries) == 3:
            raise InfrastructureError("budget", "used up", "Raise it", reason="judge_budget")

    async def asked():
        async with open_client(before) as client:
            await chat(Endpoint(base_url=server.url, model="m", retries=9), [("user", "hi")], client=client)

    tries = []
    with serve((500, "")) as server, pytest.raises(InfrastructureError) as caught:
        asyncio.run(asked())
    assert caught.value.reason == "judge_budget"
    assert len(server.requests) == 2
