"""Laws of models that share a base: it is in memory once, and what one of them learns reaches none of the others."""

import asyncio

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from cotrain.engines.base import Request
from cotrain.engines.local import LocalEngine
from cotrain.models import load_models
from cotrain.sections import LoraConfig, LossConfig, ModelConfig, OptimizerConfig
from cotrain.tiny import build_tiny
from cotrain.trainer import Trainer
from cotrain.types import Sample, SamplingParams

IDS_BT = torch.tensor([[1, 70, 300, 500, 2], [3, 1, 4, 1, 5]])
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def config(rank=None, dtype="float32", lr=1e-2, **settings):
    lora = None if rank is None else LoraConfig(rank=rank)
    path = str(build_tiny("tiny-llama", 0))  # a seed is then the adapter's alone
    optimizer = OptimizerConfig(lr=lr)
    return ModelConfig(path=path, device="cpu", dtype=dtype, lora=lora, optimizer=optimizer, **settings)


def tensors(network):
    return [*network.parameters(), *network.buffers()]


def bytes_of(*networks):
    """Bytes of the distinct blocks of memory that the networks' tensors lie in."""
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for n in networks for t in tensors(n)}
    return sum(blocks.values())


def lora_size(network, rank):
    """Parameters of adapters on all linear modules but the output layer: rank * (inputs + outputs) each."""
    inner = [m for name, m in network.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]
    return rank * sum(m.in_features + m.out_features for m in inner)


def size(network):
    return sum(p.numel() for p in network.parameters())


def weights(network):
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@torch.no_grad()
def logits(network):
    return network(input_ids=IDS_BT).logits


def perturb(model, seed):
    """Adapters start as zero: give the trained weights values of their own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.network.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=generator).to(p.dtype)


def samples(name, seed, count=6):
    draw, made = np.random.default_rng(seed), []
    for number in range(count):
        prompt, sampled = draw.integers(3, 2048, 8), draw.integers(3, 2048, draw.integers(2, 9))
        mask = (False,) * len(prompt) + (True,) * len(sampled)
        advantage = (-1) ** number * draw.uniform(0.5, 1.5)
        made.append(
            Sample(
                trajectory_id=f"{name}.{number}",
                agent=f"{name}'s",
                model=name,
                token_ids=(*map(int, prompt), *map(int, sampled)),
                mask=mask,
                logprobs=tuple(-7.5 * m for m in mask),
                versions=(0,) * len(mask),
                advantages=tuple(advantage * m for m in mask),
            )
        )
    return made


def trainer(model):
    return Trainer(model, model.config, LossConfig(beta=0.01), total_steps=10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_cost_their_own_size_alone(dtype):
    rank, names = 4, ("a", "b", "c")
    alone = load_models({"base": config(dtype=dtype, trainable=False)})["base"].network
    models = load_models(
        {"base": config(dtype=dtype, trainable=False)} | {n: config(rank, dtype, seed=i) for i, n in enumerate(names)}
    )
    base = bytes_of(alone)
    assert base >= size(alone) * alone.dtype.itemsize
    all_bytes = bytes_of(*(m.network for m in models.values()))
    added = (all_bytes - base) / len(names)
    assert added == lora_size(alone, rank) * alone.dtype.itemsize
    assert added < 0.05 * base  # 3.7 %
    # the sum is not small because something is missing: each of them is whole
    assert all(bytes_of(models[n].network) == base + added for n in names)
    before = bytes_of(*(m.network for m in models.values()))
    for name in names:
        trainer(models[name]).update(samples(name, 0))
    assert bytes_of(*(m.network for m in models.values())) == before


def test_the_share_of_adapters_in_a_model_of_135_million_weights():
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(SMOLLM2_135M)
    assert size(network) == 134_515_008
    share = {rank: lora_size(network, rank) / size(network) for rank in (4, 16)}
    assert share[16] == pytest.approx(0.0363, abs=1e-4)  # the default rank, as loaded
    # While it trains in float32 an adapter also has a gradient, two moments and a KL reference of its size.
    assert 5 * share[4] == pytest.approx(0.0454, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_adapter_learns_reaches_no_other_model(dtype):
    models = load_models(
        {
            "frozen": config(dtype=dtype, trainable=False),
            "a": config(4, dtype, seed=1),
            "full": config(dtype=dtype),
            "b": config(2, dtype, seed=2),
        }
    )
    perturb(models["a"], 1)
    perturb(models["b"], 2)
    trainers = {name: trainer(models[name]) for name in ("a", "b", "full")}
    engines = {
        name: LocalEngine(m.network, m.tokenizer, end_ids=m.end_ids, context=m.context) for name, m in models.items()
    }

    def state():
        drawn = asyncio.run(sampled())
        return {name: (weights(m.network), logits(m.network), drawn[name]) for name, m in models.items()}

    async def sampled():
        """Completions of every model, sampled at once: the engines take steps in turn."""
        few = SamplingParams(max_tokens=8)
        asked = [(name, Request(prompt_ids=(1, 70, 300), params=few, key=(0, i))) for i in range(3) for name in models]
        completions = await asyncio.gather(*(engines[name].generate(request) for name, request in asked))
        drawn = {name: [] for name in models}
        for (name, _), completion in zip(asked, completions, strict=True):
            drawn[name].append((completion.token_ids, completion.logprobs))
        return drawn

    before = state()
    assert len({str(before[name][2]) for name in models}) == 3  # full and frozen are equal still, the others are not
    for number, name in enumerate(("a", "b", "full", "a", "full", "b")):
        metrics = trainers[name].update(samples(name, number))
        assert metrics[f"model/{name}/grad_norm"] > 0
        after = state()
        for other in models:
            is_same = same(before[other][0], after[other][0])
            assert is_same == (other != name), f"update of {name}: {other}"
            assert torch.equal(before[other][1], after[other][1]) == (other != name)
            assert (before[other][2] == after[other][2]) == (other != name)
        before = after


def test_gradients_stay_with_the_model_whose_loss_they_are_of():
    models = load_models(
        {"a": config(4), "b": config(4), "frozen": config(trainable=False), "still": config(2, trainable=False)}
    )
    networks = {name: m.network for name, m in models.items()}
    perturb(models["a"], 1)
    networks["a"](input_ids=IDS_BT).logits.float().square().mean().backward()
    graded = {
        (name, key) for name, network in networks.items() for key, p in network.named_parameters() if p.grad is not None
    }
    assert graded == {("a", key) for key, p in networks["a"].named_parameters() if "lora_" in key}
    # Even a loss over all weights of one model marks and grades none of the others'.
    networks["frozen"].requires_grad_(True)
    assert all("lora_" in key for key, p in networks["b"].named_parameters() if p.requires_grad)
    assert not any(p.requires_grad for p in networks["still"].parameters())
    networks["frozen"](input_ids=IDS_BT).logits.square().mean().backward()
    assert all(p.grad is None for name in ("b", "still") for p in networks[name].parameters())


def test_models_on_a_shared_base_compute_what_each_computes_alone():
    configs = {"a": config(4, seed=1), "b": config(2, seed=2), "frozen": config(trainable=False)}
    together = load_models(configs)
    for name, settings in configs.items():
        alone = load_models({name: settings})[name]
        assert same(weights(together[name].network), weights(alone.network))
        if settings.trainable:
            results = [trainer(m).update(samples(name, 3)) for m in (together[name], alone)]
            assert results[0] == results[1]
            assert same(weights(together[name].network), weights(alone.network))
        assert torch.equal(logits(together[name].network), logits(alone.network))
