"""The local engine: what goes through the network, admission, failures, and that the network stays as it was."""

from __future__ import annotations

import asyncio
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.engines.base import Cohort, Request
from cotrain.engines.local import LocalEngine
from cotrain.errors import InfrastructureError
from cotrain.types import SamplingParams
from support import CharTokenizer


def tiny(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


def engine_on(network, **settings):
    return LocalEngine(network, CharTokenizer(), **{"end_ids": frozenset(), "context": 256, **settings})


def ask(prompt_ids, *key, max_tokens=4, **params):
    return Request(prompt_ids=tuple(prompt_ids), params=SamplingParams(max_tokens=max_tokens, **params), key=key)


async def wave(engine, requests):
    cohort = Cohort()
    cohort.enter(len(requests))

    async def member(request):
        try:
            return await engine.generate(request, cohort)
        finally:
            cohort.leave()

    results = await asyncio.gather(*map(member, requests), return_exceptions=True)
    assert (cohort.live, cohort.waiting) == (0, 0)
    return results


async def sampled(engine, num_tokens):
    while engine.tokens_sampled < num_tokens:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def test_a_prompt_that_a_fork_shares_is_computed_once():
    engine = engine_on(tiny())
    prompt = range(1, 41)
    run(wave(engine, [ask(prompt, i) for i in range(8)]))
    assert engine.tokens_sampled == 8 * 4
    assert engine.tokens_computed == 40 + 8 * 3  # the last sampled token is not computed
    assert engine.time_s > 0


def test_prompts_share_their_common_prefix_too():
    engine = engine_on(tiny())
    stem = tuple(range(1, 31))
    run(wave(engine, [ask((*stem, 50 + i), i, max_tokens=1) for i in range(5)]))
    assert engine.tokens_computed == 30 + 5


def test_long_prompts_go_through_in_parts():
    engine = engine_on(tiny())
    prompts = [[i, *range(20, 119), *range(20, 120)] for i in range(5)]  # nothing is shared; two fit into one forward
    sizes = []
    engine.network.register_forward_hook(
        lambda module, args, kwargs, output: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run(wave(engine, [ask(prompt, i, max_tokens=1) for i, prompt in enumerate(prompts)]))
    assert sizes == [400, 400, 200]


def batch_sizes(engine):
    sizes = []
    engine.network.register_forward_hook(
        lambda module, args, kwargs, output: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return sizes


def test_finished_rows_cost_nothing_and_others_take_their_place_in_order():
    engine = engine_on(tiny(), max_batch=2)
    sizes = batch_sizes(engine)
    lengths = [1, 4, 2, 3]
    results = run(wave(engine, [ask([i + 1] * (i + 1), i, max_tokens=n) for i, n in enumerate(lengths)]))
    assert [len(completion.token_ids) for completion in results] == lengths
    # step 1: prompts 0 and 1; 0 is over. step 2: 1 goes on, 2 comes (3 tokens). step 3: 1 and 2 go on, 2 is over.
    # step 4: 1 goes on and is over, 3 comes (4 tokens). steps 5, 6: 3 goes on alone.
    assert sizes == [(1, 3), (1, 1), (1, 3), (2, 1), (1, 1), (1, 4), (1, 1), (1, 1)]


def test_without_a_cohort_requests_join_at_the_next_step():
    engine = engine_on(tiny())
    sizes = batch_sizes(engine)

    async def scene():
        first = asyncio.create_task(engine.generate(ask([1, 2, 3], 0, max_tokens=6)))
        await sampled(engine, 2)
        second = await engine.generate(ask([4, 5], 1, max_tokens=2))
        assert not first.done()
        return second, await first

    second, first = run(scene())
    assert (len(first.token_ids), len(second.token_ids)) == (6, 2)
    assert (1, 2) in sizes  # the second prompt came alone
    assert (2, 1) in sizes  # and was decoded beside the first


def test_a_wave_is_not_mixed_with_other_requests():
    engine = engine_on(tiny())
    requests = [ask([1, 2, i], i, max_tokens=5) for i in range(4)]
    alone = run(wave(engine, requests))

    async def scene():
        others = [asyncio.create_task(engine.generate(ask([9, i], "other", i, max_tokens=9))) for i in range(3)]
        await asyncio.sleep(0)
        beside = await wave(engine, requests)
        await asyncio.gather(*others)
        return beside

    assert run(scene()) == alone


def test_the_training_mode_and_the_gradients_are_as_before():
    network = tiny()
    network.train()
    network.model.layers[0].eval()
    before = [module.training for module in network.modules()]
    modes = []
    network.register_forward_hook(lambda module, args, output: modes.append((module.training, torch.is_grad_enabled())))
    run(engine_on(network).generate(ask([1, 2, 3], 0)))
    assert [module.training for module in network.modules()] == before
    assert set(modes) == {(False, False)}
    assert torch.is_grad_enabled()
    network(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()  # nothing of sampling stands in the way
    assert network.lm_head.weight.grad is not None


def test_the_version_is_that_of_the_admission():
    engine = engine_on(tiny())
    engine.version = 5

    async def scene():
        task = asyncio.create_task(engine.generate(ask([1, 2], 0, max_tokens=8)))
        await sampled(engine, 2)
        engine.version = 6
        return await task, await engine.generate(ask([1, 2], 1))

    early, late = run(scene())
    assert (early.version, late.version) == (5, 6)


def test_new_weights_are_used_at_once():
    network = tiny()
    engine = engine_on(network)
    request = ask(range(1, 9), 0, max_tokens=8, temperature=0.0)
    before = run(engine.generate(request))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = run(engine.generate(request))
    fresh = run(engine_on(network).generate(request))
    assert after == fresh
    assert after.logprobs != before.logprobs


def test_a_network_that_fails_fails_every_request_of_the_wave_and_no_later_one():
    network = tiny()
    engine = engine_on(network, max_batch=2)
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of order")

    handle = network.register_forward_pre_hook(fail)
    results = run(wave(engine, [ask([1, i], "row", i) for i in range(3)]))
    handle.remove()
    assert [type(result) for result in results] == [InfrastructureError] * 3
    for i, error in enumerate(results):
        assert f"('row', {i})" in error.where
        assert "RuntimeError: out of order" in error.found
        assert isinstance(error.__cause__, RuntimeError)
    again = run(wave(engine, [ask([1, i], "row", i) for i in range(3)]))
    assert again == run(wave(engine_on(network, max_batch=2), [ask([1, i], "row", i) for i in range(3)]))


def test_logits_that_are_not_finite_fail_their_request_by_name_and_spare_the_others():
    network = tiny()
    with torch.no_grad():
        network.model.embed_tokens.weight[77] = math.nan
    engine = engine_on(network, max_batch=2, context=600)
    # the bad prompt fills a forward of its own: what shares one with it would fail too
    requests = [ask([1] * 9, 0), ask([77] * 511, 1), *(ask([i] * (7 - i), i) for i in range(2, 5))]
    results = run(wave(engine, requests))
    error = results.pop(1)
    assert isinstance(error, InfrastructureError)
    assert "request (1,)" in error.where
    # a shorter row that follows in the slot of the failed one must not inherit its NaN
    for request, completion in zip([requests[0], *requests[2:]], results, strict=True):
        assert completion.token_ids == run(engine_on(tiny()).generate(request)).token_ids
        assert math.isfinite(sum(completion.logprobs))


def test_it_serves_one_event_loop_after_another():
    engine = engine_on(tiny())

    async def abandoned():
        task = asyncio.create_task(engine.generate(ask([1, 2], 0, max_tokens=200)))
        await sampled(engine, 1)
        return task  # the loop ends with the task still running

    run(abandoned())
    assert run(engine.generate(ask([1, 2], 1))) == run(engine_on(tiny()).generate(ask([1, 2], 1)))


def test_slots_grow_with_long_completions():
    network = tiny()
    engine = engine_on(network)
    request = ask([1, 2, 3], 0, max_tokens=200)  # more than the slot holds at first
    completion = run(engine.generate(request))
    assert len(completion.token_ids) == 200
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
