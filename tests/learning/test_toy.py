"""A tiny random model must get better at a two-agent toy, under each strategy, in a fixed number of updates."""

import asyncio
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.advantages import group_relative, leave_one_out, returns
from cotrain.branching import counterfactual, tree
from cotrain.curriculum import questions_of_step
from cotrain.engines.local import LocalEngine
from cotrain.loops import samples_by_model, together
from cotrain.models import LoadedModel
from cotrain.rewards import credits, propagate, score
from cotrain.roster import Roster
from cotrain.runs import GroupRecord
from cotrain.sampling import Job, fork_on_first, independent, round_robin
from cotrain.sections import CriticConfig, CriticOptimizerConfig, LossConfig, ModelConfig, OptimizerConfig
from cotrain.trainer import Trainer
from cotrain.types import Question
from support import CharRenderer, CharTokenizer
from toy import toy

UPDATES, QUESTIONS, GROUP = 25, 4, 6


def letters(answer, golds):
    """The share of the answer's six places that hold an 'a' or a 'b': 2/128 for a random model."""
    return sum(c in "ab" for c in answer) / 6


async def letters_of(group):
    return {t.rollout_id: letters(t.output, ()) for t in group.sinks()}


LEAVE_ONE_OUT = partial(group_relative, baseline=leave_one_out, scale=None)
CRITIC = CriticConfig(optimizer=CriticOptimizerConfig(lr=1e-2), clip=1.0)


@pytest.mark.parametrize(
    ("strategy", "estimator", "critic"),
    [
        (fork_on_first, group_relative, None),
        (round_robin(), group_relative, None),
        (independent, group_relative, None),
        (counterfactual, LEAVE_ONE_OUT, None),
        (tree(), group_relative, None),
        (fork_on_first, lambda t, c: returns(t, c, dict.fromkeys(c, 1.0)), CRITIC),
    ],
    ids=["first", "robin", "independent", "counterfactual", "tree", "mappo"],
)
def test_the_team_improves(strategy, estimator, critic, tmp_path):
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    network = LlamaForCausalLM(shape).eval()
    config = ModelConfig(optimizer=OptimizerConfig(lr=1e-2), critic=critic)
    model = LoadedModel(
        name="base", config=config, folder=tmp_path, network=network, tokenizer=CharTokenizer(), context=256,
        end_ids=frozenset({0}), has_adapter=False,
    )  # fmt: skip
    engine = LocalEngine(network, CharTokenizer(), end_ids=model.end_ids, context=256)
    trainer = Trainer(model, config, LossConfig(beta=0.0), total_steps=UPDATES)
    trainer.begin_rl()
    system = toy()
    roster = Roster(
        agents={a.name: a for a in system.agents}, engines={"base": engine}, renderers={"base": CharRenderer()}
    )
    questions = [Question(id=f"q{i}", text=f"say {i}", answers=("",)) for i in range(QUESTIONS)]

    async def step(number):
        def job(question, cohort):
            work = Job(system=system, roster=roster, question=question, step=number, group_size=GROUP, cohort=cohort)
            return strategy(replace(work, value=letters_of))

        groups = await together(job, questions_of_step(questions, number, QUESTIONS, 0), "step")
        records = []
        for group in groups:
            scored = propagate(score(group, letters), {})
            credit = credits(scored, {})
            advantages = estimator(scored.trajectories, credit).values
            records.append(GroupRecord(group=scored, credits=credit, advantages=advantages))
        trainer.update(samples_by_model(records, ["base"])["base"])
        return fmean(r.credits[t.id] for r in records for t in r.group.sinks())

    async def learn():
        return [await step(number) for number in range(1, UPDATES + 1)]

    rewards = asyncio.run(learn())
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    assert first < 0.15
    assert last > first + 0.2, rewards
