"""From a group's trajectories to what one forward pass of the trainer sees.

`make_samples` turns turns into `Sample`s; `pack` joins the samples of a model's whole batch into prefix trees of
bounded size. Each sampled token carries a coefficient that already contains the normalisation over the whole batch, so
that loss = -sum_N coefficients_N * terms_N, whatever the packs. No torch, no loss, no tokenising.

Shapes: T tokens of a tree, N sampled tokens of a pack, K trajectories of a pack.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cotrain.errors import TrainError
from cotrain.packing import prefix_tree, tree_mask
from cotrain.types import Group, Sample, Trajectory, Turn

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Reduction = Literal["trajectory", "token"] | int
"""What every trajectory or token counts alike; a number: what the sum over a trajectory's tokens is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """One tree of T tokens that goes through the model at once, and the N tokens in it that were sampled.

    `predict_N` is where in the tree the logits of each sampled token are found: its predecessor's node.
    `trajectory_N` counts the pack's own trajectories, named by `trajectories` and `agents`; `sample_N` its samples.
    `mask_TT` (True: row attends to column) is None where the tree is one chain. `num_unpacked` is the number of
    tokens that its samples hold when nothing is shared.
    """

    token_ids_T: Ints
    positions_T: Ints
    mask_TT: NDArray[np.bool_] | None
    predict_N: Ints
    targets_N: Ints
    old_logprobs_N: Floats
    advantages_N: Floats
    coefficients_N: Floats
    sample_N: Ints
    trajectory_N: Ints
    trajectories: tuple[str, ...]
    agents: tuple[str, ...]
    num_unpacked: int


def make_samples(
    group: Group, advantages: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> list[Sample]:
    """The samples of a group's trainable trajectories that have an advantage, in the group's order.

    Turns whose prompt extends the previous prompt and completion share one sample; another prompt starts a new one
    with the same trajectory id. The mask is true on sampled tokens only. `advantages` and `weights` are by trajectory
    id; a trajectory without a weight has 1. Turns in which nothing was sampled give nothing.
    """
    samples: list[Sample] = []
    for trajectory in group.trajectories:
        if trajectory.trainable and trajectory.id in advantages:
            weight = 1.0 if weights is None else weights.get(trajectory.id, 1.0)
            for turns in _extending_runs([t for t in trajectory.turns if t.completion.token_ids]):
                samples.append(_sample(trajectory, turns, advantages[trajectory.id], weight))
    return samples


def means_by_agent(packs: Sequence[Pack], series: Mapping[str, Floats]) -> dict[str, float]:
    """Per-token series as `agent/<name>/<series>` means over that agent's sampled tokens.

    A series has the packs' tokens one pack after another, once, or several times over for several passes; a
    last pass that was broken off is left out.
    """
    agent_N = np.concatenate([np.array(part.agents)[part.trajectory_N] for part in packs])
    means: dict[str, float] = {}
    for name, values_N in series.items():
        num_passes = len(values_N) // len(agent_N)
        values_PN = values_N[: num_passes * len(agent_N)].reshape(num_passes, -1)
        for agent in np.unique(agent_N):
            means[f"agent/{agent}/{name}"] = float(values_PN[:, agent_N == agent].mean())
    return means


def _extending_runs(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns in runs: inside a run every prompt begins with all tokens of the turn before."""
    runs: list[list[Turn]] = []
    tokens: tuple[int, ...] = ()
    for turn in turns:
        if runs and turn.prompt_ids[: len(tokens)] == tokens:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        tokens = turn.prompt_ids + turn.completion.token_ids
    return runs


def _sample(trajectory: Trajectory, turns: Sequence[Turn], advantage: float, weight: float) -> Sample:
    last = turns[-1]
    token_ids = last.prompt_ids + last.completion.token_ids
    mask = [False] * len(token_ids)
    logprobs, advantages = [0.0] * len(token_ids), [0.0] * len(token_ids)
    versions = [0] * len(token_ids)
    for turn in turns:
        start, length = len(turn.prompt_ids), len(turn.completion.token_ids)
        span = slice(start, start + length)
        mask[span] = [True] * length
        logprobs[span] = turn.completion.logprobs
        versions[span] = [turn.completion.version] * length
        advantages[span] = [advantage] * length
    return Sample(
        trajectory_id=trajectory.id,
        agent=trajectory.agent,
        model=trajectory.model,
        token_ids=token_ids,
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantages=tuple(advantages),
        weight=weight,
    )


def pack(samples: Sequence[Sample], *, tokens_per_pack: int, reduction: Reduction = "trajectory") -> list[Pack]:
    """All samples of one model's batch as packs whose trees hold at most `tokens_per_pack` tokens where possible.

    The unit is a trajectory: all its samples share a pack, one that is larger than the limit has a pack to itself.
    Units are sorted by their tokens, so that shared prefixes are neighbours, and cut where the whole costs least. A
    sample's last token is predicted but never an input, so it takes no place in the tree.

    Coefficients (sums over the whole batch; len: sampled tokens of a trajectory over all its samples):
        reduction "trajectory": w_i / (len_i * sum_j w_j)      "token": w_i / sum_j (w_j * len_j)
        reduction c, a number: w_i / (c * sum_j w_j), as in Dr. GRPO, arXiv 2503.20783

    Raises:
        TrainError: a sample without sampled tokens or whose first token was sampled, ragged fields, weights that are
            negative, not finite, zero in all or unequal within a trajectory.
    """
    units: dict[str, list[Sample]] = {}
    for sample in samples:
        _check(sample)
        units.setdefault(sample.trajectory_id, []).append(sample)
    if not units:
        return []
    coefficients = _coefficients(units, reduction)
    order = sorted(units, key=lambda id: units[id][0].token_ids)
    inputs = [[sample.token_ids[: _last_sampled(sample)] for sample in units[id]] for id in order]
    packs, start = [], 0
    for end in _cuts(inputs, tokens_per_pack):
        packs.append(_pack([units[id] for id in order[start:end]], coefficients))
        start = end
    return packs


def _check(sample: Sample) -> None:
    where = f"sample of trajectory {sample.trajectory_id}"
    lengths = {len(x) for x in (sample.token_ids, sample.mask, sample.logprobs, sample.versions, sample.advantages)}
    if len(lengths) > 1:
        raise TrainError(where, f"fields of lengths {sorted(lengths)}", "Give one entry per token")
    if not any(sample.mask):
        raise TrainError(where, "no sampled token", "Leave it out of the batch")
    if sample.mask[0]:
        raise TrainError(
            where, "its first token is sampled, so nothing predicts it", "Give a prompt of at least one token"
        )


def _coefficients(units: Mapping[str, Sequence[Sample]], reduction: Reduction) -> dict[str, float]:
    """Trajectory id -> the coefficient of each of its sampled tokens (methods, objective)."""
    weights = {id: samples[0].weight for id, samples in units.items()}
    for id, samples in units.items():
        if any(s.weight != weights[id] for s in samples) or not 0.0 <= weights[id] < math.inf:
            found = f"weights {[s.weight for s in samples]}"
            raise TrainError(f"trajectory {id}", found, "Give all its samples one finite weight >= 0")
    lengths = {id: sum(sum(s.mask) for s in samples) for id, samples in units.items()}
    if not any(weights.values()):
        raise TrainError("batch", f"all {len(units)} trajectories have weight 0", "Leave the batch out")
    return coefficients(weights, lengths, reduction)


def coefficients(weights: Mapping[str, float], lengths: Mapping[str, int], reduction: Reduction) -> dict[str, float]:
    """Trajectory id -> the coefficient of each of its sampled tokens, as in `pack`. Some weight must be above 0."""
    per_token = reduction == "token"
    total = math.fsum(weights[id] * (lengths[id] if per_token else 1) for id in weights)
    divisors = {id: 1 if per_token else reduction if isinstance(reduction, int) else lengths[id] for id in weights}
    return {id: weights[id] / (total * divisors[id]) for id in weights}


def _last_sampled(sample: Sample) -> int:
    return len(sample.mask) - 1 - sample.mask[::-1].index(True)


def _cuts(units: Sequence[Sequence[tuple[int, ...]]], limit: int) -> list[int]:
    """Ends of the consecutive runs of units that together cost least.

    Filling greedily would often tear a fork apart and compute its prompt twice.
    """
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * len(units)  # cost up to here, start of the last run
    for start in range(len(units)):
        tree: list[tuple[int, ...]] = []
        size = 0
        for end in range(start + 1, len(units) + 1):
            size += sum(_insert(tree, sequence) for sequence in units[end - 1])
            if size > limit and end > start + 1:
                break
            best[end] = min(best[end], (best[start][0] + _cost(size), start))
    cuts, end = [], len(units)
    while end:
        cuts.append(end)
        end = best[end][1]
    return cuts[::-1]


def _cost(size: int) -> float:
    """Cost of a tree, in tokens of work that does not depend on its size.

    The mask is dense, so unrelated sequences pay for each other's attention: at 3,000 tokens it doubles the cost
    (measured on a CPU, 135 million weights). Every tree costs a pass over the gradients besides.
    """
    return 64 + size + size * size / 3000


def _insert(tree: list[tuple[int, ...]], sequence: tuple[int, ...]) -> int:
    """Add a sequence to a sorted list; the number of nodes that the list's prefix tree gains."""
    place = bisect.bisect_left(tree, sequence)
    neighbours = tree[max(place - 1, 0) : place + 1]  # in sorted order the longest common prefix is a neighbour's
    tree.insert(place, sequence)
    return len(sequence) - max((_common_prefix(sequence, other) for other in neighbours), default=0)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices runs in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _pack(units: Sequence[Sequence[Sample]], coefficients: Mapping[str, float]) -> Pack:
    samples = [sample for unit in units for sample in unit]
    tree = prefix_tree([sample.token_ids[: _last_sampled(sample)] for sample in samples])
    sampled = [np.flatnonzero(sample.mask) for sample in samples]
    counts = [len(places) for places in sampled]
    unit_of_sample = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    per_unit = np.array([coefficients[unit[0].trajectory_id] for unit in units])
    trajectory_N = np.repeat(unit_of_sample, counts)
    return Pack(
        token_ids_T=tree.token_ids_T,
        positions_T=tree.positions_T,
        mask_TT=None if tree.is_chain else tree_mask(tree),
        predict_N=np.concatenate([path[places - 1] for path, places in zip(tree.paths, sampled, strict=True)]),
        targets_N=_masked([sample.token_ids for sample in samples], sampled).astype(np.int64),
        old_logprobs_N=_masked([sample.logprobs for sample in samples], sampled),
        advantages_N=_masked([sample.advantages for sample in samples], sampled),
        coefficients_N=per_unit[trajectory_N],
        sample_N=np.repeat(np.arange(len(samples)), counts),
        trajectory_N=trajectory_N,
        trajectories=tuple(unit[0].trajectory_id for unit in units),
        agents=tuple(unit[0].agent for unit in units),
        num_unpacked=sum(len(sample.token_ids) for sample in samples),
    )


def _masked(values: Sequence[Sequence[float]], places: Sequence[Ints]) -> Floats:
    """Each sequence's values at its places, one after another (float64 holds every token id exactly)."""
    return np.concatenate([np.asarray(v, dtype=np.float64)[p] for v, p in zip(values, places, strict=True)])
