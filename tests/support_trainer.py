"""A tiny model without a tokenizer, its trainer, and a batch with every odd thing in it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.sections import LoraConfig, LossConfig, ModelConfig, OptimizerConfig
from cotrain.trainer import Trainer
from cotrain.types import Sample

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def build(kind="float32", seed=1):
    """A tiny model; equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config)
    if kind == "bfloat16":
        network = network.to(torch.bfloat16)
    if kind == "lora":
        network = get_peft_model(network, PeftConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    return SimpleNamespace(name="base", network=network.eval(), has_adapter=kind == "lora")


UNTRAINED = build().network.requires_grad_(False)


def make(kind="float32", model=None, loss=None, optimizer=None, trainable=True, master_weights=True, **settings):
    config = ModelConfig(
        dtype="bfloat16" if kind == "bfloat16" else "float32",
        lora=LoraConfig(rank=2) if kind == "lora" else None,
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        trainable=trainable,
        master_weights=master_weights,
    )
    settings = {"total_steps": 10, "tokens_per_pack": 64} | settings
    return Trainer(model or build(kind), config, loss or LossConfig(), **settings)


def sample(id, prompt, sampled, advantage, *, logprob=-2.0, agent="a", weight=1.0):
    ids = tuple(prompt) + tuple(sampled)
    mask = (False,) * len(prompt) + (True,) * len(sampled)
    return Sample(
        trajectory_id=id,
        agent=agent,
        model="base",
        token_ids=ids,
        mask=mask,
        logprobs=tuple(logprob * m for m in mask),
        versions=(0,) * len(ids),
        advantages=tuple(advantage * m for m in mask),
        weight=weight,
    )


def batch(seed=0):
    """Two forks of three, one trajectory in two samples, unequal weights, two agents, both signs of the advantage.

    The recorded log-probs are the untrained model's, off by up to half a nat, so that some tokens are clipped.
    """
    draw = np.random.default_rng(seed)
    made = []
    for fork in range(2):
        for branch in range(3):
            sampled = draw.integers(0, 32, 2 + 2 * branch).tolist()
            agent, weight = ("a", "b")[fork], 1.0 + branch / 2
            advantage = (-1) ** branch * draw.uniform(0.5, 1.5)
            made.append(sample(f"{fork}.{branch}", (*PROMPT, fork, 7), sampled, advantage, agent=agent, weight=weight))
    made.append(sample("0.1", (*PROMPT, 0, 8, 8), (5, 6), made[1].advantages[-1], weight=1.5))
    return [with_logprobs(s, logprobs_of(UNTRAINED, s).numpy() + draw.uniform(-0.5, 0.5, sum(s.mask))) for s in made]


def with_logprobs(sample, logprobs_N):
    return replace(sample, logprobs=(0.0,) * (len(sample.mask) - sum(sample.mask)) + tuple(map(float, logprobs_N)))


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.network.named_parameters()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def logprobs_of(network, sample, temperature=1.0):
    """Log-probs of a sample's sampled tokens from one plain forward over it alone."""
    ids = torch.tensor([sample.token_ids])
    logprobs = (network(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0][torch.tensor(sample.mask[1:])]
