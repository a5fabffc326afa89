"""The scripted engine: what a test author sees of it."""

from __future__ import annotations

import asyncio

import pytest

from cotrain.engines import Cohort, Request, ScriptedEngine
from cotrain.errors import RewardError
from cotrain.types import SamplingParams
from support import CharTokenizer


def ask(prompt, *key, **params):
    return Request(prompt_ids=tuple(map(ord, prompt)), params=SamplingParams(**params), key=key)


def test_the_script_sees_the_prompt_with_its_control_tokens_and_the_request():
    seen = []

    def script(prompt, request):
        seen.append((prompt, request.key))
        return "yes"

    engine = ScriptedEngine(script, CharTokenizer())
    asyncio.run(engine.generate(ask("a\0b", 7, "q")))
    assert seen == [("a\0b", (7, "q"))]


def test_every_log_prob_is_zero():
    completion = asyncio.run(ScriptedEngine(lambda prompt, request: "ab", CharTokenizer()).generate(ask("?")))
    assert completion.token_ids == (ord("a"), ord("b"), 0)
    assert completion.logprobs == (0.0, 0.0, 0.0)


def test_requests_are_kept_in_the_order_of_the_calls_unless_told_otherwise():
    async def three(engine):
        await asyncio.gather(*(engine.generate(ask("?", key)) for key in (3, 1, 2)))
        return [request.key for request in engine.requests]

    assert asyncio.run(three(ScriptedEngine(lambda p, r: "x", CharTokenizer()))) == [(3,), (1,), (2,)]
    assert asyncio.run(three(ScriptedEngine(lambda p, r: "x", CharTokenizer(), record=False))) == []


def test_a_wave_is_answered_in_the_order_of_the_keys():
    answered = []
    engine = ScriptedEngine(lambda p, request: answered.append(request.key) or "x", CharTokenizer())
    keys = [(0, "b", 1), (0, 10, 1), (0, "a", 2), (0, 9, 1), (0, "a", 1)]

    async def wave():
        cohort = Cohort()
        cohort.enter(len(keys))
        await asyncio.gather(*(engine.generate(ask("?", *key), cohort) for key in keys))

    asyncio.run(wave())
    assert answered == [(0, 9, 1), (0, 10, 1), (0, "a", 1), (0, "a", 2), (0, "b", 1)]


def test_what_the_script_raises_reaches_the_caller():
    def script(prompt, request):
        raise RewardError("this", "is wrong", "Mend it")

    with pytest.raises(RewardError, match="is wrong"):
        asyncio.run(ScriptedEngine(script, CharTokenizer()).generate(ask("?")))


def test_an_empty_answer_is_an_end_token():
    completion = asyncio.run(ScriptedEngine(lambda p, r: "", CharTokenizer()).generate(ask("?")))
    assert (completion.token_ids, completion.text, completion.stop) == ((0,), "", "stop")


def test_without_an_end_token_the_answer_ends_by_itself():
    class Endless(CharTokenizer):
        eos_token_id = None

    completion = asyncio.run(ScriptedEngine(lambda p, r: "ab", Endless()).generate(ask("?")))
    assert (completion.token_ids, completion.stop) == ((97, 98), "stop")


def test_the_earliest_stop_string_wins_and_empty_ones_are_ignored():
    engine = ScriptedEngine(lambda p, r: "one two three", CharTokenizer())
    completion = asyncio.run(engine.generate(ask("?", stop=("", "three", "two"))))
    assert completion.text == "one "
    assert completion.token_ids == tuple(map(ord, "one two"))
