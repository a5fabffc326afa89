"""Laws of batches: what becomes a sample, and that neither packs nor their order can change an objective."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.batch import Pack, make_samples, means_by_agent, pack
from cotrain.errors import TrainError
from cotrain.types import Completion, Group, Question, Sample, Trajectory, Turn


def turn(prompt: Sequence[int], sampled: Sequence[int], version: int = 0) -> Turn:
    logprobs = tuple(-0.1 * id for id in sampled)
    done = Completion(token_ids=tuple(sampled), logprobs=logprobs, version=version, stop="stop", text="")
    return Turn(prompt_ids=tuple(prompt), completion=done)


def trajectory(id: str, *turns: Turn, trainable: bool = True, agent: str = "a") -> Trajectory:
    return Trajectory(
        id=id,
        question_id="q",
        rollout_id="r",
        pass_id=0,
        call=0,
        agent=agent,
        model="base",
        turns=turns,
        trainable=trainable,
    )


def group(*trajectories: Trajectory) -> Group:
    question = Question(id="q", text="?", answers=("!",))
    return Group(question=question, step=0, strategy="fork_on_first", trajectories=trajectories)


def sample(id: str, prompt: Sequence[int], sampled: Sequence[int], weight: float = 1.0, agent: str = "a") -> Sample:
    of = group(trajectory(id, turn(prompt, sampled), agent=agent))
    return make_samples(of, {id: 0.5 * len(sampled)}, {id: weight})[0]


def test_a_turn_becomes_a_sample_whose_mask_is_true_on_what_was_sampled() -> None:
    (made,) = make_samples(group(trajectory("t", turn([7, 8], [1, 2, 3], version=4))), {"t": -1.5}, {"t": 0.25})
    assert made == Sample(
        trajectory_id="t",
        agent="a",
        model="base",
        token_ids=(7, 8, 1, 2, 3),
        mask=(False, False, True, True, True),
        logprobs=(0.0, 0.0, -0.1, -0.2, pytest.approx(-0.3)),
        versions=(0, 0, 4, 4, 4),
        advantages=(0.0, 0.0, -1.5, -1.5, -1.5),
        weight=0.25,
    )


def test_turns_that_extend_each_other_share_a_sample_and_others_do_not() -> None:
    first, second = turn([7], [1, 2]), turn([7, 1, 2, 9, 9], [3], version=1)
    other = turn([7, 1, 5], [4])
    merged, split = make_samples(group(trajectory("t", first, second, other)), {"t": 2.0})
    assert merged.token_ids == (7, 1, 2, 9, 9, 3)
    assert merged.mask == (False, True, True, False, False, True)
    assert merged.logprobs == (0.0, -0.1, -0.2, 0.0, 0.0, pytest.approx(-0.3))
    assert merged.versions == (0, 0, 0, 0, 0, 1)
    assert merged.advantages == (0.0, 2.0, 2.0, 0.0, 0.0, 2.0)
    assert (split.token_ids, split.mask) == ((7, 1, 5, 4), (False, False, False, True))
    assert merged.trajectory_id == split.trajectory_id == "t"
    assert merged.weight == split.weight == 1.0


def test_no_sample_without_an_advantage_without_training_or_without_a_sampled_token() -> None:
    of = group(
        trajectory("trunk", turn([7], [1]), trainable=False),
        trajectory("singleton", turn([7], [1])),
        trajectory("aborted", turn([7], [])),
        trajectory("used", turn([7], []), turn([7, 8], [1])),
    )
    made = make_samples(of, {"trunk": 1.0, "aborted": 1.0, "used": 1.0})
    assert [(s.trajectory_id, s.token_ids) for s in made] == [("used", (7, 8, 1))]


def test_coefficients_by_hand() -> None:
    batch = [sample("x", [7], [1, 2], weight=1.0), sample("y", [7], [3], weight=3.0)]
    batch.append(sample("x", [8], [1, 2], weight=1.0))  # x was split: 4 tokens, counted once
    for part in pack(batch, tokens_per_pack=64):
        expected = {"x": 1 / (4 * 4), "y": 3 / (1 * 4)}
        names = [part.trajectories[k] for k in part.trajectory_N]
        assert part.coefficients_N.tolist() == pytest.approx([expected[name] for name in names])
    for part in pack(batch, tokens_per_pack=64, reduction="token"):
        expected = {"x": 1 / (4 * 1 + 1 * 3), "y": 3 / (4 * 1 + 1 * 3)}
        names = [part.trajectories[k] for k in part.trajectory_N]
        assert part.coefficients_N.tolist() == pytest.approx([expected[name] for name in names])


def test_a_pack_points_at_the_predecessor_of_every_sampled_token() -> None:
    # the tree of 7 8 1 and 7 8 3 4 without last tokens that are only predicted: 7 8 1(x) -> 7, 8, 3
    (part,) = pack([sample("x", [7, 8], [1]), sample("y", [7, 8], [3, 4])], tokens_per_pack=64)
    assert part.token_ids_T.tolist() == [7, 8, 3]
    assert part.positions_T.tolist() == [0, 1, 2]
    assert part.mask_TT is None
    assert part.predict_N.tolist() == [1, 1, 2]
    assert part.targets_N.tolist() == [1, 3, 4]
    assert part.old_logprobs_N.tolist() == pytest.approx([-0.1, -0.3, -0.4])
    assert part.advantages_N.tolist() == [0.5, 1.0, 1.0]
    assert part.trajectory_N.tolist() == part.sample_N.tolist() == [0, 1, 1]
    assert (part.trajectories, part.agents, part.num_unpacked) == (("x", "y"), ("a", "a"), 7)


def test_a_fork_is_not_torn_apart_where_two_packs_hold_two_forks_whole() -> None:
    forks = [sample(f"{p}{c}", [p] * 30, [c, c, c, c]) for p in (1, 2) for c in (3, 4, 5)]
    # each fork is a tree of 30 + 3 * 3 = 39; a greedy fill of 75 would take 5 of the 6 first
    assert [sorted(part.trajectories) for part in pack(forks[::-1], tokens_per_pack=75)] == [
        ["13", "14", "15"],
        ["23", "24", "25"],
    ]
    assert len(pack(forks, tokens_per_pack=78)) == 1


def test_a_trajectory_is_never_split_over_packs() -> None:
    far_apart = [sample("x", [1] * 40, [3]), sample("x", [9] * 40, [3]), sample("y", [5] * 40, [3])]
    parts = pack(far_apart, tokens_per_pack=64)
    assert sorted(part.trajectories for part in parts) == [("x",), ("y",)]
    assert {part.trajectories: len(part.token_ids_T) for part in parts} == {("x",): 80, ("y",): 40}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
units = st.lists(
    st.tuples(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3), st.floats(0.1, 4.0)), min_size=1, max_size=8
)


def batch_of(drawn: Sequence[tuple[Sequence[tuple[list[int], list[int]]], float]]) -> list[Sample]:
    return [
        sample(f"t{i}", prompt, sampled, weight, agent=f"agent{i % 2}")
        for i, (parts, weight) in enumerate(drawn)
        for prompt, sampled in parts
    ]


def history(part: Pack, n: int) -> tuple[int, ...]:
    """The tokens that the logits of sampled token n are computed from, read off the mask alone."""
    at = part.predict_N[n]
    seen = np.flatnonzero(part.mask_TT[at]) if part.mask_TT is not None else np.arange(at + 1)
    assert part.positions_T[seen].tolist() == list(range(len(seen)))
    return tuple(part.token_ids_T[seen].tolist())


@given(units, st.integers(1, 40))
def test_packs_hold_every_sampled_token_once_with_its_own_history(drawn: list, limit: int) -> None:
    batch = batch_of(drawn)
    packs = pack(batch, tokens_per_pack=limit)
    found = sorted(
        (part.trajectories[part.trajectory_N[n]], history(part, n), int(part.targets_N[n]), part.coefficients_N[n])
        for part in packs
        for n in range(len(part.targets_N))
    )
    total = sum(weight for _, weight in drawn)
    lengths = {f"t{i}": sum(len(sampled) for _, sampled in parts) for i, (parts, _) in enumerate(drawn)}
    expected = sorted(
        (s.trajectory_id, s.token_ids[:at], s.token_ids[at], s.weight / total / lengths[s.trajectory_id])
        for s in batch
        for at in range(len(s.mask))
        if s.mask[at]
    )
    assert [entry[:3] for entry in found] == [entry[:3] for entry in expected]
    assert [entry[3] for entry in found] == pytest.approx([entry[3] for entry in expected])
    assert sum(part.coefficients_N.sum() for part in packs) == pytest.approx(1.0)
    for part in packs:
        assert len(part.trajectories) == 1 or len(part.token_ids_T) <= limit


@given(units, st.integers(1, 40))
def test_the_order_of_a_batch_does_not_change_its_packs(drawn: list, limit: int) -> None:
    batch = batch_of([(parts[:1], weight) for parts, weight in drawn])
    trees = [sorted(part.token_ids_T.tolist() for part in pack(b, tokens_per_pack=limit)) for b in (batch, batch[::-1])]
    assert sum(map(len, trees[0])) == sum(map(len, trees[1]))


def test_means_by_agent() -> None:
    parts = pack([sample("x", [7], [1, 2], agent="p"), sample("y", [7], [3], agent="q")], tokens_per_pack=64)
    two_passes_and_a_rest = np.array([1.0, 2.0, 9.0, 3.0, 4.0, 11.0, 99.0])
    means = means_by_agent(parts, {"entropy": two_passes_and_a_rest[:3], "kl": two_passes_and_a_rest})
    assert means == {"agent/p/entropy": 1.5, "agent/q/entropy": 9.0, "agent/p/kl": 2.5, "agent/q/kl": 10.0}


def test_an_empty_batch_has_no_packs() -> None:
    assert pack([], tokens_per_pack=64) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mask": (True, True, True)}, "first token is sampled"),
        ({"mask": (False, False, False)}, "no sampled token"),
        ({"logprobs": (0.0,)}, r"lengths \[1, 3\]"),
        ({"weight": -1.0}, "weights"),
        ({"weight": float("nan")}, "weights"),
        ({"weight": 0.0}, "weight 0"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused(change: dict, found: str) -> None:
    with pytest.raises(TrainError, match=found):
        pack([replace(sample("x", [7], [1, 2]), **change)], tokens_per_pack=64)


def test_samples_of_one_trajectory_must_agree_on_its_weight() -> None:
    with pytest.raises(TrainError, match="trajectory x"):
        pack([sample("x", [7], [1], weight=1.0), sample("x", [8], [1], weight=2.0)], tokens_per_pack=64)
