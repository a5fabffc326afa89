"""Credits and advantages of a step by the configuration's keys, on numbers worked out by hand."""

import asyncio
import math

import pytest

from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.loops import judge, samples_by_model
from cotrain.types import Completion, Group, Question, Trajectory, Turn

TURN = Turn(
    prompt_ids=(1, 2), completion=Completion(token_ids=(3,), logprobs=(-0.5,), version=0, stop="stop", text="x")
)


def said(branch, call, agent, output, reads=(), faults=(), trunk=False):
    rollout = None if trunk else f"0.{branch}"
    return Trajectory(
        id=f"{branch}{agent}", question_id="q", rollout_id=rollout, pass_id=0, call=call, agent=agent, model="base",
        reads=reads, turns=(TURN,), output=output, trainable=not trunk, faults=faults,
    )  # fmt: skip


def judged(*settings):
    """Round robin, forked at the reranker: F1 of the answers 1 and 0; the first answer is faulty, so is the query."""
    group = Group(
        question=Question(id="q", text="?", answers=("red",)),
        step=1,
        strategy="round_robin",
        trajectories=(
            said(0, 0, "rewriter", "", faults=("no_query",), trunk=True),
            said(0, 1, "reranker", "[1]", ("0rewriter",)),
            said(1, 1, "reranker", "[2]", ("0rewriter",)),
            said(0, 2, "answerer", "red", ("0reranker",), faults=("long_answer",)),
            said(1, 2, "answerer", "blue", ("1reranker",)),
        ),
        dropped={"infrastructure": 1},
    )
    records, dropped = asyncio.run(judge(make_plan(load_config(None, settings)), [group]))
    return records[0], dropped


@pytest.mark.parametrize(
    ("settings", "credits"),
    [
        ((), {"0rewriter": 0.5 - 0.5, "0reranker": 1, "1reranker": 0, "0answerer": 1 - 1, "1answerer": 0}),
        (
            ("rewards.propagate=full",),
            # The answerer's penalty flows back, through the reranker too.
            {"0rewriter": 0 - 0.5, "0reranker": 1 - 1, "1reranker": 0, "0answerer": 0, "1answerer": 0},
        ),
        (
            ("rewards.aggregate=max", "rewards.penalties={rewriter=-0.25, answerer=-0.5}"),
            {"0rewriter": 1 - 0.25, "0reranker": 1, "1reranker": 0, "0answerer": 0.5, "1answerer": 0},
        ),
        (
            ("rewards.aggregate=min", "rewards.metric=accuracy"),
            {"0rewriter": 0 - 0.5, "0reranker": 1, "1reranker": 0, "0answerer": 0, "1answerer": 0},
        ),
    ],
    ids=["default", "full", "max", "min"],
)
def test_credits(settings, credits):
    assert judged(*settings)[0].credits == pytest.approx(credits)


def test_advantages_drops_and_samples():
    record, dropped = judged()
    assert record.advantages == pytest.approx({"0reranker": 0.5 / 0.500001, "1reranker": -0.5 / 0.500001})
    assert dropped == {"infrastructure": 1, "zero_variance": 2}  # the answerers: 1 - 1 and 0
    samples = samples_by_model([record], ["base", "other"])
    assert [s.trajectory_id for s in samples["base"]] == ["0reranker", "1reranker"]
    assert samples["other"] == []


def test_the_standard_deviation_and_its_eps_are_the_configured_ones():
    record, _ = judged("advantage.std=sample", "advantage.eps=0.25")
    assert record.advantages["0reranker"] == pytest.approx(0.5 / (math.sqrt(0.5) + 0.25))
