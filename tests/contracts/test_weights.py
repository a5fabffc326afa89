"""Weights from a trainer to an engine: whole, checked, taken up between completions; samples that are too old."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.engines.base import Request
from cotrain.engines.local import LocalEngine
from cotrain.errors import TrainError
from cotrain.processes.learner import fresh
from cotrain.store.base import Part
from cotrain.types import Sample, SamplingParams
from cotrain.weights import Follower, prune_weights, read_weights, sweep, write_weights
from support import CharTokenizer


def tiny(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def trainer(network, version):
    """What `write_weights` asks of a trainer."""
    return SimpleNamespace(model=SimpleNamespace(name="base", network=network), version=version)


def values(network):
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def equal(network, other):
    ours, theirs = values(network), values(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    source, target = tiny(1), tiny(2)
    weights = write_weights(tmp_path, trainer(source, 7), 3, is_known=False)
    assert (weights.step, weights.version, weights.folder) == (3, 7, "weights/base/step-000003")
    assert not equal(source, target)
    read_weights(tmp_path, weights, target)
    assert equal(source, target)


def test_a_changed_file_and_a_folder_outside_of_the_run_are_refused(tmp_path):
    run, target = tmp_path / "run", tiny(2)
    before = values(target)
    weights = write_weights(run, trainer(tiny(1), 7), 3, is_known=False)
    file = run / weights.folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(TrainError, match=f"their hash is .*, but {weights.digest[:12]} was published"):
        read_weights(run, weights, target)
    outside = write_weights(tmp_path / "other", trainer(tiny(1), 7), 3, is_known=False)
    with pytest.raises(TrainError, match="they lie outside of the run"):
        read_weights(run, replace(outside, folder="../other/weights/base/step-000003"), target)
    assert all(torch.equal(before[name], value) for name, value in values(target).items())


def test_published_weights_stay_and_the_remains_of_a_dead_writer_go(tmp_path):
    first = write_weights(tmp_path, trainer(tiny(1), 7), 3, is_known=False)
    again = write_weights(tmp_path, trainer(tiny(2), 7), 3, is_known=True)
    assert again.digest != first.digest  # what was made the second time is said, and the published file stays
    read_weights(tmp_path, first, tiny(3))
    over = write_weights(tmp_path, trainer(tiny(2), 7), 3, is_known=False)
    read_weights(tmp_path, over, tiny(3))
    (tmp_path / "weights/base/.step-000004-x/step-000004").mkdir(parents=True)
    sweep(tmp_path, "base")
    assert [path.name for path in (tmp_path / "weights/base").iterdir()] == ["step-000003"]
    write_weights(tmp_path, trainer(tiny(2), 8), 4, is_known=False)
    assert prune_weights(tmp_path, "base", lambda step: step >= 4) == [3]
    assert [path.name for path in (tmp_path / "weights/base").iterdir()] == ["step-000004"]


def request(number, max_tokens=6):
    return Request(prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=max_tokens), key=(number,))


def test_an_engine_takes_newer_weights_between_completions_and_not_within_one(tmp_path):
    old, new = tiny(1), tiny(2)
    published = [
        write_weights(tmp_path, trainer(network, step), step, is_known=False) for step, network in ((0, old), (1, new))
    ]
    engine = LocalEngine(tiny(3), CharTokenizer(), end_ids=frozenset(), context=64)
    newest = published[:1]
    follower = Follower(tmp_path, "base", engine, lambda model: newest[-1])
    follower.look()

    async def work():
        first = asyncio.create_task(engine.generate(request(1)))
        while engine.tokens_sampled < 3:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        newest.append(published[1])
        follower.look()
        second = asyncio.create_task(engine.generate(request(2)))  # would join the batch at once, but for the weights
        return await first, await second

    first, second = asyncio.run(work())
    assert (first.version, second.version) == (0, 1)
    alone = [LocalEngine(deepcopy(n), CharTokenizer(), end_ids=frozenset(), context=64) for n in (old, new)]
    expected = [asyncio.run(e.generate(request(i + 1))) for i, e in enumerate(alone)]
    assert [first.token_ids, second.token_ids] == [e.token_ids for e in expected]
    torch.testing.assert_close(torch.tensor(second.logprobs), torch.tensor(expected[1].logprobs))


def test_weights_that_were_pruned_meanwhile_give_way_to_the_newest(tmp_path):
    published = [write_weights(tmp_path, trainer(tiny(step), step), step, is_known=False) for step in (1, 2)]
    engine = LocalEngine(tiny(3), CharTokenizer(), end_ids=frozenset(), context=64)
    newest = published[:1]
    follower = Follower(tmp_path, "base", engine, lambda model: newest[-1])
    follower.look()
    prune_weights(tmp_path, "base", lambda step: step > 1)
    newest.append(published[1])
    follower.take_up()
    assert engine.version == 2
    assert equal(engine.network, tiny(2))
    prune_weights(tmp_path, "base", lambda step: False)
    follower.loaded = None
    with pytest.raises(TrainError, match="cannot be read"):
        follower.take_up()


def part(place, *versions):
    """A part with one sample: a prompt token, then one sampled token per version."""
    count = 1 + len(versions)
    sample = Sample(
        trajectory_id=str(place),
        agent="a",
        model="base",
        token_ids=(5,) * count,
        mask=(False,) + (True,) * len(versions),
        logprobs=(0.0,) * count,
        versions=(0, *versions),
        advantages=(0.0,) * count,
    )
    return Part(step=1, place=place, model="base", samples=(sample,) if versions else ())


def test_a_group_with_a_token_from_before_the_bound_is_left_out_whole_and_counted():
    parts = [part(0, 4, 5), part(1, 3, 5), part(2), part(3, 4, 4)]
    samples, dropped = fresh(parts, 4)
    assert [sample.trajectory_id for sample in samples] == ["0", "3"]
    assert dropped == [1]
    assert fresh(parts, 3)[1] == []
    assert fresh(parts, 5)[1] == [0, 1, 3]
