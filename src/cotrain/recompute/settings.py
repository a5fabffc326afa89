"""Which settings a run's stored groups can be scored again under, and why the others are refused.

A group keeps its rollouts, its judges' rewards and its faults: whatever is computed from these can be computed again,
by the run's own functions. What shaped the rollouts, or acts after the advantages, cannot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cotrain.assemble import Plan, make_plan
from cotrain.config import RunConfig, load_config
from cotrain.errors import ConfigError
from cotrain.sections import CriticConfig
from cotrain.shapley import REWARD

CAN_BE_SET = "rewards, advantage, align, loss.reduction and agents.<name>.trainable"
_AFTER = ("loss", "loop", "store", "eval")


def make_plans(folder: Path, settings: Sequence[str]) -> tuple[Plan, Plan]:
    """The plans of a run as it was, and under `KEY=VALUE` settings on top of its own configuration.

    Raises:
        ConfigError: a key that cannot be computed again, or a configuration that does not fit together.
    """
    for setting in settings:
        check_key(setting)
    before, chosen = make_plan(load_config(folder / "config.toml")), load_config(folder / "config.toml", settings)
    after = make_plan(_with_critics(chosen, before))
    _check_trainable(before, after)
    _check_shared(before, after)
    return before, after


def check_key(setting: str) -> None:
    """Refuse a `KEY=VALUE` whose key cannot be computed again. A key that no configuration has is left to its reader.

    Raises:
        ConfigError: with the reason, and the keys that can be set.
    """
    path = [part.strip() for part in setting.partition("=")[0].split(".")]
    section = path[0]
    is_free = section in ("rewards", "advantage", "align") or path == ["loss", "reduction"]
    if is_free or (section == "agents" and len(path) == 3 and path[2] == "trainable"):
        return
    if section not in RunConfig.model_fields:
        return
    if section == "judges":
        found = "a judge cannot be asked again, its stored rewards are all there is"
        fix = "Change what its rewards count (rewards.credit.<agent>.weights), or train a new run"
    elif section in _AFTER and path != ["loop", "seed"]:
        found = f"{'.'.join(path)} acts after the advantages, and nothing is trained or evaluated again"
        fix = f"Set {CAN_BE_SET}, or train a new run"
    else:
        found = f"{'.'.join(path)} shapes the rollouts, and none is made again"
        fix = f"Set {CAN_BE_SET}, or train a new run"
    raise ConfigError(f"--set {setting}", found, fix)


def check_steps(before: Plan, after: Plan, steps: Sequence[int]) -> None:
    """Refuse steps that do not suffice for averages which start at 0 before step 1.

    Raises:
        ConfigError: an agent has `role_baseline`, and the steps are not 1, 2, ... without a gap.
    """
    if list(steps) == list(range(1, len(steps) + 1)):
        return
    for plan, whose in ((before, "the run's"), (after, "the new")):
        for name in plan.agents:
            if estimator_of(plan, name) == "role_baseline":
                raise ConfigError(
                    f"--steps {spans(steps)}",
                    f"role_baseline ({whose} estimator of {name}) averages over all credits since step 1",
                    "Choose steps from 1 on without a gap, such as --steps 1-20",
                )


def estimator_of(plan: Plan, agent: str) -> str:
    """The name of an agent's estimator."""
    chosen = plan.config.advantage
    return chosen.agents.get(agent, chosen.estimator)


def counts_shapley(plan: Plan) -> bool:
    """Whether any credit depends on what masked rollouts were worth."""
    return any(rule.weights.get(REWARD) for rule in plan.rules.values())


def has_critic(plan: Plan, agent: str) -> bool:
    """Whether the agent's advantages are made in the trainer, from a critic's values: none are stored."""
    return estimator_of(plan, agent) == "gae"


def parse_steps(text: str, stored: Sequence[int]) -> list[int]:
    """The steps that `1-20`, `1,5,9` or a mixture names, in rising order; all that are stored for an empty text.

    Raises:
        ConfigError: it names none, or one without groups.
    """
    if not text:
        return list(stored)
    steps: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"--steps {text}", f"{part.strip()!r} names no steps", "Write it like 1-20 or 1,5,9")
        missing = [first] if first < stored[0] else [last] if last > stored[-1] else []
        missing = missing or sorted(set(range(first, last + 1)) - set(stored))
        if missing:
            found = f"the run has no groups of step {missing[0]}"
            raise ConfigError(f"--steps {text}", found, f"It has those of steps {spans(stored)}")
        steps |= set(range(first, last + 1))
    return sorted(steps)


def spans(steps: Sequence[int]) -> str:
    """Rising steps in short: `1-5, 8`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _with_critics(config: RunConfig, before: Plan) -> RunConfig:
    """The configuration with a critic where `gae` wants one, and nowhere else: the credits do not depend on it."""
    chosen, models = config.advantage, dict(config.models)
    for name, model in models.items():
        wanted = {chosen.agents.get(a.name, chosen.estimator) for a in before.agents.values() if a.model == name}
        critic = (model.critic or CriticConfig()) if "gae" in wanted else None
        models[name] = model.model_copy(update={"critic": critic})
    return config.model_copy(update={"models": models})


def _check_trainable(before: Plan, after: Plan) -> None:
    """An agent may be taken out of training; what else kept a trajectory out is not stored, so none comes back."""
    for name, agent in after.agents.items():
        if agent.trainable and not before.agents[name].trainable:
            found = "its trajectories were not trained on, and which of them could have been is not stored"
            raise ConfigError(f"agents.{name}.trainable", found, "Leave it false, or train a new run")


def _check_shared(before: Plan, after: Plan) -> None:
    """Where a judge or masked rollouts scored the answers, the metric does not decide alone."""
    old, new = before.config.rewards, after.config.rewards
    if (old.metric, old.threshold) == (new.metric, new.threshold):
        return
    where = f"rewards.{'metric' if old.metric != new.metric else 'threshold'}"
    if "shared" in before.judges:
        found = "the judge named shared scores the answers, no metric does"
        raise ConfigError(where, found, "Leave it out, or train a new run without judges.shared")
    if counts_shapley(after):
        found = "the stored reward shapley was made with the old one, of masked rollouts that are not stored"
        raise ConfigError(where, found, "Give shapley the weight 0, or train a new run")
