"""From answers to credits: metrics, backward propagation along reads edges, penalties.

Pure functions over groups. A reward that is absent is unknown: it is never replaced by 0, what depends on it alone
stays unknown, and a trajectory without credit is dropped and counted (`advantages.py`). Source: MHGPO
(arXiv 2506.02718); the metrics are those of SQuAD and HotpotQA.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from statistics import fmean

from cotrain.errors import RewardError, WorkflowError
from cotrain.types import CreditRule, Group, Metric, Overlong, Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_AGGREGATES: Mapping[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max, "min": min}


def normalize(answer: str) -> list[str]:
    """SQuAD normalisation: lower case, no punctuation, no articles, split at white space."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, golds: tuple[str, ...]) -> float:
    """1 if the normalised answer equals a normalised gold answer, else 0."""
    return float(any(normalize(answer) == normalize(gold) for gold in golds))


def f1(answer: str, golds: tuple[str, ...]) -> float:
    """Token F1 against the best gold answer: 2PR / (P + R) over the bags of normalised tokens."""
    return max((_f1(normalize(answer), normalize(gold)) for gold in golds), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold))


def accuracy(answer: str, golds: tuple[str, ...]) -> float:
    """1 if a gold answer's normalised tokens are a contiguous run in the answer's, else 0."""
    tokens = normalize(answer)
    return float(any(_contains(tokens, normalize(gold)) for gold in golds))


def _contains(tokens: list[str], run: list[str]) -> bool:
    return bool(run) and any(tokens[i : i + len(run)] == run for i in range(len(tokens) - len(run) + 1))


METRICS: Mapping[str, Metric] = {"f1": f1, "exact_match": exact_match, "accuracy": accuracy}


def at_least(metric: Metric, threshold: float) -> Metric:
    """1 where the metric reaches the threshold, else 0: correctness from a graded metric."""
    return lambda answer, golds: float(metric(answer, golds) >= threshold)


def score(group: Group, metric: Metric | None = f1, rules: Mapping[str, CreditRule] | None = None) -> Group:
    """Write `shared` = metric(answer, gold answers) on the sinks, or 0 where a gated agent's answer is faulty.

    Without a metric the sinks keep what a judge gave them, under the same gate.

    Raises:
        RewardError: the metric's value is not a finite number.
    """
    rules = rules or {}

    def scored(t: Trajectory) -> Trajectory:
        if rules.get(t.agent, CreditRule()).gate and t.faults:
            return replace(t, rewards={**t.rewards, "shared": 0.0})
        if metric is None:
            return t
        value = metric(t.output, group.question.answers)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(
                f"trajectory {t.id}",
                f"the metric gave {value} for the answer {t.output!r}",
                "Mend the metric",
            )
        return replace(t, rewards={**t.rewards, "shared": float(value)})

    sinks = {t.id for t in group.sinks()}
    return replace(group, trajectories=tuple(scored(t) if t.id in sinks else t for t in group.trajectories))


def penalty(trajectory: Trajectory, rule: CreditRule) -> float:
    """The rule's penalty if the output broke any format rule (once, however many it broke), and what length costs."""
    return (rule.penalty if trajectory.faults else 0.0) + overlong(trajectory.num_sampled, rule.overlong)


def overlong(length: int, rule: Overlong | None) -> float:
    """penalty * clip((length - (limit - buffer)) / buffer, 0, 1): DAPO's soft overlong punishment, arXiv 2503.14476.

    `length`: sampled tokens of all turns.
    """
    if rule is None:
        return 0.0
    return rule.penalty * min(1.0, max(0.0, (length - (rule.limit - rule.buffer)) / rule.buffer))


def propagate(group: Group, rules: Mapping[str, CreditRule]) -> Group:
    """Carry rewards backward: shared(o) = aggregate over the readers r of o of shared(r), or of credit(r).

    `aggregate` and `propagate` are those of the rule of o's agent. Readers without a known reward are left out; with
    none known, o has no `shared`. Whoever is no sink has it from its readers alone, whatever a judge gave it itself.

    Raises:
        WorkflowError: the reads edges form a cycle, or lead out of the group.
    """
    readers: dict[str, list[Trajectory]] = {t.id: [] for t in group.trajectories}
    for t in group.trajectories:
        for id in dict.fromkeys(t.reads):
            if id not in readers:
                found = f"it reads {id}, which is not in its group"
                raise WorkflowError(f"trajectory {t.id}", found, "Read outputs of the same question and step")
            readers[id].append(t)
    shared: dict[str, float | None] = {}
    open_ids: set[str] = set()
    sinks = {t.id for t in group.sinks()}

    def of(t: Trajectory) -> float | None:
        if t.id in shared:
            return shared[t.id]
        if t.id in open_ids:
            raise WorkflowError(f"trajectory {t.id}", "it reads itself in a circle", "Mend the reads= of the system")
        open_ids.add(t.id)
        rule = rules.get(t.agent, CreditRule())
        known = []
        for r in readers[t.id]:
            if (value := of(r)) is not None:
                full = penalty(r, rules.get(r.agent, CreditRule())) if rule.propagate == "full" else 0.0
                known.append(value + full)
        own = t.rewards.get("shared") if t.id in sinks else None
        shared[t.id] = _AGGREGATES[rule.aggregate](known) if known else own
        return shared[t.id]

    def carried(t: Trajectory) -> Trajectory:
        value = of(t)
        others = {name: reward for name, reward in t.rewards.items() if name != "shared"}
        return replace(t, rewards=others if value is None else {**others, "shared": value})

    return replace(group, trajectories=tuple(carried(t) for t in group.trajectories))


def credits(group: Group, rules: Mapping[str, CreditRule]) -> dict[str, float]:
    """Trajectory id -> R(o) = gate(o) * sum over its rule's weights of w * reward(o) + penalty(o), where it is known.

    `gate(o)` is 0 for a faulty output of a gated agent, else 1; `format` is 1 without faults, else 0. Source: MHGPO
    2.2 (weights {shared: 1}); M-GRPO, arXiv 2511.13288, (weights {format: 0.1, shared: 0.9} of the main agent,
    {format: 0.1, shared: 0.4, expert: 0.5} of a sub-agent, gated).

    A trajectory whose `shared` is unknown has no credit: without it, format alone would be paid. Any other unknown
    reward takes the credit too, or under `missing = "renormalise"` its weight is spread over the known ones, unless
    format alone is left.
    """
    known = {t.id: _credit(t, rules.get(t.agent, CreditRule())) for t in group.trajectories}
    return {id: value for id, value in known.items() if value is not None}


def _credit(t: Trajectory, rule: CreditRule) -> float | None:
    rewards = {**t.rewards, "format": float(not t.faults)}
    known = {name: weight for name, weight in rule.weights.items() if name in rewards}
    if "shared" not in t.rewards:
        return None
    scale = 1.0
    if len(known) < len(rule.weights):
        if rule.missing == "drop" or not any(weight for name, weight in known.items() if name != "format"):
            return None
        scale = math.fsum(rule.weights.values()) / math.fsum(known.values())
    gate = 0.0 if rule.gate and t.faults else 1.0
    return gate * scale * math.fsum(weight * rewards[name] for name, weight in known.items()) + penalty(t, rule)
