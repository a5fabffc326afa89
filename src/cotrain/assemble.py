"""From a configuration to the parts of a run: the system and its agents, models, engines, rules.

Everything that can be wrong with a configuration is found here, the cheap things first: nothing heavy is loaded before
the names fit together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain import advantages, align, shapley
from cotrain.advantages import Estimator
from cotrain.align import Align
from cotrain.branching import counterfactual, tree
from cotrain.config import RunConfig
from cotrain.data.corpus import Corpus, fan_out
from cotrain.endpoints import Endpoint
from cotrain.errors import ConfigError
from cotrain.judges import CORRECTNESS, EXPERT, Judge, coverage, llm_judge
from cotrain.named import function_named, refuse_unknown
from cotrain.render import Renderer
from cotrain.rewards import METRICS, at_least
from cotrain.roster import Roster, System
from cotrain.sampling import Strategy, fork_on_first, independent, round_robin
from cotrain.sections import AgentConfig
from cotrain.sections_credit import CreditConfig, JudgeConfig
from cotrain.shapley import with_shapley
from cotrain.types import Agent, CreditRule, Metric, Overlong, Passage

if TYPE_CHECKING:
    from cotrain.engines.local import LocalEngine
    from cotrain.models import LoadedModel
    from cotrain.trainer import Trainer

SYSTEMS = {
    "search_pipeline": "cotrain.systems.search_pipeline:search_pipeline",
    "deep_research": "cotrain.systems.deep_research:deep_research",
    "single_agent": "cotrain.systems.single_agent:single_agent",
}

RULES: Mapping[str, Judge] = {"coverage": coverage}
"""The judges that a configuration may name as a rule."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration means, before any model is loaded.

    `agents` are the system's with the overrides applied. `averages`, the one part that moves, is what `role_baseline`
    keeps of each agent's credits; checkpoints hold it.
    """

    config: RunConfig
    system: System
    agents: Mapping[str, Agent]
    rules: Mapping[str, CreditRule]
    metric: Metric
    strategy: Strategy
    judges: Mapping[str, Mapping[str, Judge]]
    align: Align
    estimators: Mapping[str, Estimator]
    averages: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A plan with its models loaded; each engine samples from the weights that a trainer may update."""

    plan: Plan
    models: Mapping[str, LoadedModel]
    engines: Mapping[str, LocalEngine]

    def roster(self, corpus: Corpus) -> Roster:
        """Who plays, with searches that go to this corpus."""

        def search(queries: tuple[str, ...], count: int) -> tuple[Passage, ...]:
            return tuple(fan_out(corpus.search, queries, total=count))

        system, limits = self.plan.system, self.plan.config.tools
        of_corpus = {name: make(corpus) for name, make in system.corpus_tools.items()}
        return Roster(
            agents=self.plan.agents,
            engines=self.engines,
            renderers={name: Renderer(model.tokenizer) for name, model in self.models.items()},
            tools={"search": search, **of_corpus, **system.tools},
            tool_timeout_s=limits.timeout_s,
            tool_retries=limits.retries,
        )


def make_plan(config: RunConfig) -> Plan:
    """Resolve the names in a configuration.

    Raises:
        ConfigError: a system, setting, agent, model or metric that does not exist, or does not fit.
    """
    system = load_system(config)
    agents = {agent.name: _override(agent, config.agents.get(agent.name)) for agent in system.agents}
    refuse_unknown("agents", config.agents, agents, "the system's agents")
    refuse_unknown("rewards.penalties", config.rewards.penalties, agents, "the system's agents")
    for agent in agents.values():
        refuse_unknown(f"agents.{agent.name}.model", [agent.model], config.models, "the configured models")
    # An agent learns if both it and its model do; who does not is marked in every record.
    agents = {n: replace(a, trainable=a.trainable and config.models[a.model].trainable) for n, a in agents.items()}
    for model in config.models:
        if model not in {agent.model for agent in agents.values()}:
            raise ConfigError(f"models.{model}", "no agent is played by it", "Remove it, or name it in an agent")
    _check_calls(system, agents)
    if config.warmup.steps and not system.demonstrate:
        raise ConfigError("warmup.steps", "the system demonstrates nothing", "Set it to 0, or give it `demonstrate`")
    metric = METRICS.get(config.rewards.metric) or function_named(config.rewards.metric, "rewards.metric", METRICS)
    if config.rewards.threshold is not None:
        metric = at_least(metric, config.rewards.threshold)
    judges = _judges(config, agents)  # before the rules, whose weights name them
    averages: dict[str, float] = {}
    return Plan(
        config=config,
        system=system,
        agents=agents,
        rules=_rules(config, system, agents),
        metric=metric,
        strategy=_strategy(config, len(agents)),
        judges=judges,
        align=_align(config, agents),
        estimators=_estimators(config, agents, averages),
        averages=averages,
    )


def _rules(config: RunConfig, system: System, agents: Mapping[str, Agent]) -> dict[str, CreditRule]:
    """Each agent's credit: the system's rule, with the configured values in place of its own."""
    refuse_unknown("rewards.credit", config.rewards.credit, agents, "the system's agents")
    refuse_unknown("the system's rules", system.rules, agents, "its agents")
    rules = {}
    for name in agents:
        own = system.rules.get(name, CreditRule())
        given = {k: v for k, v in config.rewards.credit.get(name, CreditConfig()) if v is not None}
        if "overlong" in given:
            given["overlong"] = Overlong(**given["overlong"].model_dump())
        penalty = {**system.penalties, **config.rewards.penalties}.get(name, own.penalty)
        flow = {"aggregate": config.rewards.aggregate, "propagate": config.rewards.propagate}
        rule = rules[name] = replace(own, **{"penalty": penalty, **flow, **given})
        known = ["shared", "format", *(judge for judge, chosen in config.judges.items() if name in chosen.agents)]
        known += [shapley.REWARD] if config.sampling.shapley else []
        refuse_unknown(f"rewards.credit.{name}.weights", rule.weights, known, "shared, format and its judges")
    if config.sampling.shapley and not any(shapley.REWARD in rule.weights for rule in rules.values()):
        mend = f"Give it a weight in rewards.credit.<agent>.weights, or leave sampling.{shapley.REWARD} out"
        raise ConfigError("sampling.shapley", "no agent's credit weighs that reward", mend)
    return rules


def _judges(config: RunConfig, agents: Mapping[str, Agent]) -> dict[str, dict[str, Judge]]:
    """Reward name -> agent -> what judges its trajectories."""
    made: dict[str, dict[str, Judge]] = {}
    for name, chosen in config.judges.items():
        where = f"judges.{name}"
        if name == "format":
            raise ConfigError(where, "the format reward is made from faults", "Name the judge otherwise")
        if name == shapley.REWARD:
            raise ConfigError(where, "that reward is made by masking agents out", "Name the judge otherwise")
        if name != "shared" and not chosen.agents:
            raise ConfigError(where, "it judges nobody", f"Set {where}.agents")
        if name == "shared" and chosen.agents:
            raise ConfigError(f"{where}.agents", "it judges the final answers, whoever gives them", "Leave it out")
        refuse_unknown(f"{where}.agents", chosen.agents, agents, "the system's agents")
        judge = _model_judge(chosen, is_verdict=name == "shared") if chosen.rule is None else _rule(chosen.rule, where)
        made[name] = dict.fromkeys(agents if name == "shared" else chosen.agents, judge)
    return made


def _model_judge(chosen: JudgeConfig, is_verdict: bool) -> Judge:
    assert chosen.url is not None
    endpoint = Endpoint(
        base_url=chosen.url,
        model=chosen.model,
        api_key_env=chosen.api_key_env,
        timeout_s=chosen.timeout_s,
        retries=chosen.retries,
    )
    return llm_judge(
        endpoint,
        instructions=chosen.instructions or (CORRECTNESS if is_verdict else EXPERT),
        budget=chosen.budget,
        concurrency=chosen.concurrency,
        cache=Path(chosen.cache) if chosen.cache else None,
        kind="verdict" if is_verdict else "score",
    )


def _rule(name: str, where: str) -> Judge:
    return RULES.get(name) or function_named(name, f"{where}.rule", RULES)


def _align(config: RunConfig, agents: Mapping[str, Agent]) -> Align:
    refuse_unknown("align.factors", config.align.factors, agents, "the system's agents")
    if config.align.size is not None:
        return align.duplicate(config.align.size, config.loop.seed)
    return {"weight": align.weight, "none": align.none}[config.align.method]


def _estimators(config: RunConfig, agents: Mapping[str, Agent], averages: dict[str, float]) -> dict[str, Estimator]:
    """Each agent's estimator."""
    chosen = config.advantage
    refuse_unknown("advantage.agents", chosen.agents, agents, "the system's agents")
    scale = {"population": advantages.population_std, "sample": advantages.sample_std}[chosen.std]
    known = advantages.named_estimators(scale=scale, eps=chosen.eps, averages=averages, decay=chosen.decay)
    found = {}
    for name in agents:
        estimator = chosen.agents.get(name, chosen.estimator)
        where = f"advantage.agents.{name}" if name in chosen.agents else "advantage.estimator"
        found[name] = known.get(estimator) or function_named(estimator, where, known)
        critic = config.models[agents[name].model].critic
        if agents[name].trainable and (estimator == "gae") != (critic is not None):
            model = agents[name].model
            what = f"{estimator!r} for {name}, whose model {model} has {'no' if critic is None else 'a'} critic"
            mend = "Choose 'gae', or remove the critic" if critic else f"Add [models.{model}.critic]"
            raise ConfigError(where, what, mend)
        if agents[name].trainable and config.sampling.resample and estimator in ("gae", "role_baseline"):
            what = f"{estimator!r} gives {name} an advantage in every group, so none would be sampled again"
            raise ConfigError("sampling.resample", what, "Leave it out, or choose an estimator that compares peers")
    return found


def _check_calls(system: System, agents: Mapping[str, Agent]) -> None:
    """Tools and delegates exist, their names do not clash, and nobody delegates to itself, directly or not."""
    tools = [*system.tools, *system.corpus_tools, "search"]
    for agent in agents.values():
        refuse_unknown(f"agent {agent.name}'s tools", agent.tools, tools, "the system's tools")
        refuse_unknown(f"agent {agent.name}'s delegates", agent.delegates, agents, "the system's agents")
        names = [*agent.tools, *agent.delegates]
        if len(set(names)) < len(names) or "answer" in names:
            found = f"may call {', '.join(names)}"
            raise ConfigError(f"agent {agent.name}", found, "Give each its own name, none of them 'answer'")
        if names and agent.max_turns < 2:
            found = f"may call {', '.join(names)} in max_turns = {agent.max_turns}"
            raise ConfigError(f"agent {agent.name}", found, "Allow a turn for the call and one for the answer")
    callers = TopologicalSorter({agent.name: agent.delegates for agent in agents.values()})
    try:
        callers.prepare()
    except CycleError as error:
        found = f"delegation goes in a circle: {' -> '.join(error.args[1])}"
        raise ConfigError("the system's agents", found, "Take one of the delegates away") from None


def load_cast(plan: Plan) -> Cast:
    """Load the plan's models and put an engine on each.

    Raises:
        ModelError: a model cannot be found or loaded.
    """
    from cotrain.engines.local import LocalEngine
    from cotrain.models import load_models

    models = load_models(plan.config.models)
    engines = {
        name: LocalEngine(
            model.network,
            model.tokenizer,
            end_ids=model.end_ids,
            context=model.context,
            max_batch=plan.config.engine.max_batch,
        )
        for name, model in models.items()
    }
    return Cast(plan=plan, models=models, engines=engines)


def make_trainer(plan: Plan, model: LoadedModel) -> Trainer:
    """The trainer of one of a plan's models."""
    from cotrain import losses
    from cotrain.trainer import Trainer

    guards = {"truncate": losses.truncate, "mask": losses.mask}
    config, guard = plan.config, plan.config.loss.guard
    if guard == "auto":
        guard = "truncate" if max_lag(config, model.name) else "none"
    return Trainer(
        model,
        config.models[model.name],
        config.loss,
        total_steps=config.loop.steps,
        tokens_per_pack=config.loop.tokens_per_pack,
        updates_per_batch=config.loop.updates_per_batch,
        max_bad_updates=config.loop.max_bad_updates,
        temperatures={name: agent.sampling.temperature for name, agent in plan.agents.items()},
        guard=guards[guard](config.loss.guard_cap) if guard in guards else None,
    )


def trained_models(config: RunConfig) -> list[str]:
    """The models that have a trainer."""
    return [name for name, model in config.models.items() if model.trainable]


def max_lag(config: RunConfig, model: str) -> int:
    """How many versions behind the samples of a model may be."""
    own = config.models[model].max_lag
    return config.store.max_lag if own is None else own


def load_system(config: RunConfig) -> System:
    """Call the configured function with its settings.

    Raises:
        ConfigError: there is no such function, a setting is not one of its arguments, or it returns no `System`.
    """
    name = config.system.name
    build = function_named(SYSTEMS.get(name, name), "system.name", SYSTEMS)
    signature = inspect.signature(build)
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        refuse_unknown("system.settings", config.system.settings, signature.parameters, f"the arguments of {name}")
    try:
        signature.bind(**config.system.settings)
    except TypeError as error:
        raise ConfigError("system.settings", f"{name} cannot be called: {error}", "Set what it needs") from None
    system = build(**config.system.settings)
    if not isinstance(system, System):
        raise ConfigError("system.name", f"{name} returned a {type(system).__name__}", "Have it return a System")
    if not system.agents:
        raise ConfigError("system.name", f"{name} has no agents", "Give its System at least one Agent")
    names = [agent.name for agent in system.agents]
    if len(set(names)) < len(names):
        raise ConfigError("system.name", f"{name} has two agents of one name ({', '.join(names)})", "Rename one")
    refuse_unknown("the system's penalties", system.penalties, names, "its agents")
    for agent, value in system.penalties.items():
        if not -math.inf < value <= 0:
            raise ConfigError(
                "the system's penalties", f"{agent} has {value}", "Give a finite number that is at most 0"
            )
    return system


def _strategy(config: RunConfig, num_agents: int) -> Strategy:
    if config.sampling.strategy == "round_robin":
        probabilities = config.sampling.fork_probabilities
        if probabilities is not None and len(probabilities) != num_agents:
            raise ConfigError(
                "sampling.fork_probabilities",
                f"{len(probabilities)} values for {num_agents} agents",
                "Give one probability per agent, in the system's order",
            )
        return round_robin(probabilities)
    named: dict[str, Strategy] = {
        "fork_on_first": fork_on_first,
        "independent": independent,
        "counterfactual": counterfactual,
        "tree": tree(picks_best=config.sampling.continue_from == "best"),
    }
    strategy, shares = named[config.sampling.strategy], config.sampling.shapley
    return strategy if shares is None else with_shapley(strategy, None if shares == "exact" else shares)


def _override(agent: Agent, override: AgentConfig | None) -> Agent:
    """The agent with the configured values in place of its own."""
    given = {key: value for key, value in (override or AgentConfig()) if value is not None}
    of_sampling = {key: given.pop(key) for key in ("temperature", "top_p", "max_tokens", "stop") if key in given}
    return replace(agent, **given, sampling=replace(agent.sampling, **of_sampling))
