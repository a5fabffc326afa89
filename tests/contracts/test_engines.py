"""What every engine must do: one suite over a scripted one and a local one that speaks a script token by token."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from cotrain.engines import Cohort, Engine, Request, ScriptedEngine
from cotrain.engines.local import LocalEngine
from cotrain.errors import CotrainError, InfrastructureError
from cotrain.types import SamplingParams
from support import CharTokenizer

CONTEXT = 40


class Spelling(torch.nn.Module):
    """A network that spells what `script` says to the prompt; its keys are the token ids, so it reads the cache."""

    def __init__(self, script):
        super().__init__()
        self.script = script
        self.anchor = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, position_ids, attention_mask, cache, use_cache, logits_to_keep):
        new = input_ids[:, None, :, None].float()
        seen = cache.update(new, new, 0)[0][:, 0, :, 0].long()
        size = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(size, size).tril().bool()[None, None]
        kept = [size - 1] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = torch.full((len(input_ids), len(kept), 256), -50.0)
        for b in range(len(input_ids)):
            for k, t in enumerate(kept):
                mask = attention_mask[min(b, len(attention_mask) - 1), 0, min(t, attention_mask.shape[2] - 1)]
                logits[b, k, self._next(seen[b][mask].tolist())] = 50.0
        return SimpleNamespace(logits=logits)

    def _next(self, ids):
        text = "".join(map(chr, ids))
        prompt, _, said = text.partition("?")
        answer = self.script(prompt + "?", None) + "\0"
        assert answer.startswith(said), f"the cache holds {text!r}"
        return ord(answer[len(said)])


def scripted(script):
    return ScriptedEngine(script, CharTokenizer(), context=CONTEXT)


def local(script):
    return LocalEngine(Spelling(script), CharTokenizer(), end_ids=frozenset({0}), context=CONTEXT, max_batch=3)


@pytest.fixture(params=[scripted, local])
def make(request):
    return request.param


def answer(prompt, request):
    return f"I heard {prompt}".rstrip("?")


def ask(prompt="hello?", key=(0, 0, "q", "r", 0, 0), **params):
    return Request(prompt_ids=tuple(map(ord, prompt)), params=SamplingParams(**params), key=key)


def ids_of(text):
    return tuple(map(ord, text))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))  # a forgotten cohort must fail and not hang


def test_it_is_an_engine(make):
    engine = make(answer)
    assert isinstance(engine, Engine)
    assert engine.context == CONTEXT
    assert engine.version == 0


def test_a_completion_holds_what_was_sampled_with_its_end_token(make):
    engine = make(answer)
    engine.version = 3
    completion = run(engine.generate(ask()))
    assert completion.text == "I heard hello"
    assert completion.token_ids == (*ids_of("I heard hello"), 0)
    assert completion.stop == "stop"
    assert completion.version == 3
    assert completion.logprobs == (0.0,) * 14


@pytest.mark.parametrize(("max_tokens", "stop"), [(1, "length"), (13, "length"), (14, "stop")])
def test_the_token_limit_counts_the_end_token(make, max_tokens, stop):
    completion = run(make(answer).generate(ask(max_tokens=max_tokens)))
    assert completion.stop == stop
    assert completion.text == "I heard hello"[:max_tokens]
    assert len(completion.token_ids) == len(completion.logprobs) == max_tokens


def test_a_stop_string_stays_in_the_ids_and_not_in_the_text(make):
    completion = run(make(answer).generate(ask(stop=("absent", "rd", "ello"))))
    assert completion.text == "I hea"
    assert completion.token_ids == ids_of("I heard")
    assert completion.stop == "stop"


def test_a_stop_string_may_come_with_the_last_token(make):
    completion = run(make(answer).generate(ask(stop=("rd",), max_tokens=7)))
    assert (completion.text, completion.stop) == ("I hea", "stop")
    completion = run(make(answer).generate(ask(stop=("rd",), max_tokens=6)))
    assert (completion.text, completion.stop) == ("I hear", "length")


@pytest.mark.parametrize(("length", "room"), [(30, 10), (39, 1)])
def test_the_context_limits_what_is_sampled(make, length, room):
    completion = run(make(answer).generate(ask("x" * (length - 1) + "?", max_tokens=50)))
    assert completion.text == ("I heard " + "x" * 40)[:room]
    assert completion.stop == "length"


@pytest.mark.parametrize(("prompt", "max_tokens"), [("x" * 40, 5), ("x" * 41, 5), ("", 5), ("hello?", 0)])
def test_a_request_without_room_is_refused_by_name(make, prompt, max_tokens):
    engine = make(answer)
    cohort = Cohort()
    with pytest.raises(InfrastructureError, match="request \\(0, 0, 'q', 'r', 0, 0\\)"):
        run(engine.generate(ask(prompt, max_tokens=max_tokens), cohort))
    assert cohort.waiting == 0
    assert run(engine.generate(ask())).text == "I heard hello"


def test_many_at_once_each_get_their_own(make):
    engine = make(answer)

    async def all_of_them():
        return await asyncio.gather(*(engine.generate(ask(f"{i}" * (1 + i % 4) + "?", key=(i,))) for i in range(10)))

    texts = [completion.text for completion in run(all_of_them())]
    assert texts == ["I heard " + f"{i}" * (1 + i % 4) for i in range(10)]


async def members(engine, cohort, num, calls, log=None):
    """`num` members of a cohort; member i makes calls(i) calls one after another."""

    async def member(i):
        try:
            said = []
            for call in range(calls(i)):
                completion = await engine.generate(ask(f"{i}{call}?", key=(i, call)), cohort)
                said.append(completion.text)
                if log is not None:
                    log.append((i, call))
            return said
        finally:
            cohort.leave()

    cohort.enter(num)
    return await asyncio.gather(*(member(i) for i in range(num)))


def test_a_cohort_goes_in_waves_and_its_books_balance(make):
    cohort, log = Cohort(), []
    said = run(members(make(answer), cohort, 5, lambda i: i, log))
    assert said == [[f"I heard {i}{call}" for call in range(i)] for i in range(5)]
    assert (cohort.live, cohort.waiting) == (0, 0)
    # wave by wave, and within a wave by key: member i is in the first i waves
    assert log == [(i, call) for call in range(4) for i in range(call + 1, 5)]


def test_members_may_have_children(make):
    engine, cohort = make(answer), Cohort()

    async def member(i):
        try:
            children = [engine.generate(ask(f"{i}{j}?", key=(i, j)), cohort) for j in range(3)]
            first = await cohort.gather(children)
            last = await engine.generate(ask(f"{i}?", key=(i, 9)), cohort)
            return [completion.text for completion in [*first, last]]
        finally:
            cohort.leave()

    async def both():
        cohort.enter(2)
        return await asyncio.gather(member(0), member(1))

    assert run(both()) == [[f"I heard {i}{j}" for j in (0, 1, 2, "")] for i in range(2)]
    assert (cohort.live, cohort.waiting) == (0, 0)


def test_a_cohort_may_use_two_engines(make):
    """A member that is quick with one engine must not start a wave while others still run on the other engine."""
    cohort, log = Cohort(), []
    quick, slow = make(lambda prompt, request: "quick"), make(lambda prompt, request: "a slow answer")

    async def member(i):
        try:
            for call in range(3):
                engine = quick if i == 0 else slow
                await engine.generate(ask(key=(i, call)), cohort)
                log.append((call, i))
        finally:
            cohort.leave()

    async def all_members():
        cohort.enter(3)
        await asyncio.gather(*map(member, range(3)))

    run(all_members())
    assert [call for call, _ in log] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (cohort.live, cohort.waiting) == (0, 0)


def test_cancelling_a_waiting_member_frees_the_others(make):
    engine, cohort = make(answer), Cohort()

    async def member(i):
        try:
            return await engine.generate(ask(f"{i}?", key=(i,)), cohort)
        finally:
            cohort.leave()

    async def scene():
        cohort.enter(3)  # the third never comes
        tasks = [asyncio.create_task(member(i)) for i in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (cohort.live, cohort.waiting) == (3, 2)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert (cohort.live, cohort.waiting) == (2, 1)
        cohort.leave()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return await tasks[1]

    assert run(scene()).text == "I heard 1"
    assert (cohort.live, cohort.waiting) == (0, 0)
    assert run(engine.generate(ask())).text == "I heard hello"


def test_cancelling_a_running_request_leaves_the_engine_usable(make):
    engine = make(answer)

    async def scene():
        task = asyncio.create_task(engine.generate(ask("gone?", key=(1,))))
        stays = asyncio.create_task(engine.generate(ask("here?", key=(2,))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        return await stays

    assert run(scene()).text == "I heard here"
    assert run(engine.generate(ask())).text == "I heard hello"


def test_an_error_reaches_the_caller_and_the_books_still_balance(make):
    def fails(prompt, request):
        if "bad" in prompt:
            raise InfrastructureError("script", "it broke", "Mend it")
        return "fine"

    engine, cohort = make(fails), Cohort()

    async def member(prompt):
        try:
            return await engine.generate(ask(prompt), cohort)
        finally:
            cohort.leave()

    async def scene():
        cohort.enter(1)
        with pytest.raises(CotrainError, match="it broke"):
            await member("bad?")
        assert (cohort.live, cohort.waiting) == (0, 0)
        cohort.enter(2)
        return await asyncio.gather(member("good?"), member("better?"))

    assert [completion.text for completion in run(scene())] == ["fine", "fine"]
    assert (cohort.live, cohort.waiting) == (0, 0)


def test_it_lets_other_coroutines_run(make):
    engine, ticks = make(answer), []

    async def clock():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def scene():
        task = asyncio.create_task(clock())
        await engine.generate(ask())
        task.cancel()

    run(scene())
    assert ticks
