"""The library agrees with the one-file references of recipes/reference on random groups: advantages, losses, gradients.

The references were written from docs/methods.md alone, so a difference shows a fault in one of the two. The groups
hold what a run may meet: trunks and passes, outputs that several or none read, unequal delegation, faults, unknown
rewards, peers alone or alike, silence, turns whose prompts extend each other or not.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from cotrain import advantages as library_advantages
from cotrain import align, losses, rewards
from cotrain.batch import make_samples, pack
from cotrain.critic import Critic
from cotrain.sections import CriticConfig
from cotrain.types import Completion, CreditRule, Group, Question, Trajectory, Turn

SEEDS = pytest.mark.parametrize("seed", range(200))
ALL_IN_ONE = 10**6
SUB = CreditRule(weights={"format": 0.1, "shared": 0.4, "expert": 0.5}, gate=True)
VERTICAL = {"main": CreditRule(weights={"format": 0.1, "shared": 0.9}, gate=True), "scout": SUB, "coder": SUB}


def load(name):
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "recipes" / "reference" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


grpo, mhgpo, m_grpo, mappo = map(load, ("grpo", "mhgpo", "m_grpo", "mappo"))


# Random groups


def ids(draw, low, high):
    return tuple(draw.randrange(1, 5) for _ in range(draw.randint(low, high)))


def turns(draw, stem):
    """Up to three turns; some say nothing, and a prompt may go on from the turn before or start anew."""
    made, prompt = [], stem + ids(draw, 0, 3)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        sampled = ids(draw, *draw.choice(((0, 0), (1, 5), (1, 5), (1, 9))))
        logprobs = tuple(draw.uniform(-3.0, 0.0) for _ in sampled)
        said = Completion(token_ids=sampled, logprobs=logprobs, version=0, stop="stop", text="")
        made.append(Turn(prompt_ids=prompt, completion=said))
        prompt = prompt + sampled + ids(draw, 0, 2) if draw.random() < 0.6 else stem + ids(draw, 1, 3)
    return tuple(made)


def trajectory(draw, question, place, agent, **lineage):
    return Trajectory(
        id=f"{question}/{place}",
        question_id=question,
        agent=agent,
        turns=turns(draw, tuple(map(ord, question))),
        faults=draw.choice(((), (), (), ("malformed",), ("empty", "empty"))),
        **lineage,
    )


def group_of(draw, question, trajectories):
    """A group in any order. Sinks have a reward, mostly; what others bring themselves is a decoy and must not count."""
    palette = draw.choice(
        ([0.3], [0, 1], [0, 1], [0.5, 0.5 + 5e-9], [0.5, 0.5 + 1e-5], [draw.random() for _ in "12345"])
    )
    read = {id for t in trajectories for id in t.reads}

    def rewarded(t):
        known = {"expert": draw.choice((0.0, 0.5, 1.0, draw.random()))} if draw.random() < 0.85 else {}
        is_sink = t.id not in read and t.caller is None
        if draw.random() < (0.88 if is_sink else 0.2):
            known["shared"] = float(draw.choice(palette)) if is_sink else 9.0
        return replace(t, rewards=known)

    trajectories = [rewarded(t) for t in trajectories]
    draw.shuffle(trajectories)
    asked = Question(id=question, text="?", answers=("yes",))
    return Group(question=asked, step=3, strategy="test", trajectories=tuple(trajectories))


def alone(draw, question):
    """One agent answers G times."""
    places = [{"rollout_id": f"0.{g}", "pass_id": 0, "call": 0, "model": "base"} for g in range(draw.randint(1, 6))]
    return group_of(draw, question, [trajectory(draw, question, p["rollout_id"], "solver", **p) for p in places])


def pipeline(draw, question):
    """Passes that fork somewhere in a row of agents; mostly each reads the one before, and any may read others too."""
    order = [f"a{i}" for i in range(draw.randint(1, 4))]
    order += order[:1] if draw.random() < 0.2 else []
    made = []
    for pass_id in range(draw.choice((1, 1, 2))):
        fork, trains_fork_alone = draw.randrange(len(order)), draw.random() < 0.3

        def ask(call, rollout, before, pass_id=pass_id, fork=fork, alone=trains_fork_alone):
            reads = [t.id for t in before[:-1] if draw.random() < 0.3]
            reads += [t.id for t in before[-1:] if draw.random() < 0.9]
            is_trained = rollout is not None and (call == fork or not alone)
            place = f"{pass_id}.{rollout}.{call}"
            lineage = {"rollout_id": rollout, "pass_id": pass_id, "call": call, "model": "base", "reads": tuple(reads)}
            made.append(trajectory(draw, question, place, order[call], trainable=is_trained, **lineage))
            return [*before, made[-1]]

        trunk = []
        for call in range(fork):
            trunk = ask(call, None, trunk)
        for branch in range(draw.randint(1, 5)):
            row = trunk
            for call in range(fork, len(order)):
                row = ask(call, f"{pass_id}.{branch}", row)
    return group_of(draw, question, made)


def vertical(draw, question, main_model="main"):
    """K rollouts of a main agent that delegates 0 to 4 times to each of two kinds; a finding may stay unread."""
    made = []
    for k in range(draw.randint(1, 5)):
        common = {"rollout_id": f"0.{k}", "pass_id": 0, "call": 0}
        main, read, earlier = f"{question}/{k}", [], []
        for kind in ("scout", "coder"):
            for i in range(draw.randint(0, 4)):
                is_read = draw.random() < 0.85
                lineage = {"model": "sub", "caller": main, "trainable": is_read or draw.random() < 0.5, **common}
                others = tuple(id for id in earlier if draw.random() < 0.1)
                made.append(trajectory(draw, question, f"{k}/{kind}{i}", kind, reads=others, **lineage))
                earlier.append(made[-1].id)
                read += [made[-1].id] if is_read else []
        made.append(trajectory(draw, question, k, "main", model=main_model, reads=tuple(read), **common))
    return group_of(draw, question, made)


def batch_of(draw, make, **settings):
    return [make(draw, f"q{i}", **settings) for i in range(draw.randint(1, 3))]


def recorded(groups):
    """Trajectory id -> the log-probs of its sampled tokens, as its turns hold them."""
    everyone = [t for group in groups for t in group.trajectories]
    said = {t.id: [logprob for turn in t.turns for logprob in turn.completion.logprobs] for t in everyone}
    return {id: torch.tensor(logprobs, dtype=torch.float64) for id, logprobs in said.items()}


def near(draw, tokens, spread=0.3, learns=False):
    noise = torch.Generator().manual_seed(draw.randrange(2**31))
    moved = {id: x + spread * torch.randn(len(x), generator=noise, dtype=x.dtype) for id, x in tokens.items()}
    return {id: x.requires_grad_(learns) for id, x in moved.items()}


# What the library makes of them


def judged(group, rules, aligned=align.weight):
    """Credits, weights and advantages of a group whose sinks have their raw reward."""
    scored = rewards.propagate(rewards.score(group, None, rules), rules)
    credit = rewards.credits(scored, rules)
    weights = aligned(scored, credit)
    return credit, weights, library_advantages.group_relative(scored.trajectories, credit, weights=weights)


def library_samples(groups, rules, aligned=align.weight, model="base"):
    samples = []
    for group in groups:
        _, weights, result = judged(group, rules, aligned)
        samples += [s for s in make_samples(group, result.values, weights) if s.model == model]
    return samples


def library_loss(groups, samples, new, reference, *, tokens_per_pack, token_mean, beta, clip_low=0.2, clip_high=0.2):
    said = {t.id: [id for turn in t.turns for id in turn.completion.token_ids] for g in groups for t in g.trajectories}
    total = torch.zeros(())
    for part in pack(samples, tokens_per_pack=tokens_per_pack, reduction="token" if token_mean else "trajectory"):
        assert part.targets_N.tolist() == [token for id in part.trajectories for token in said[id]]
        loss, _ = losses.clipped_surrogate(
            joined(new, part),
            torch.from_numpy(part.old_logprobs_N),
            torch.from_numpy(part.advantages_N),
            torch.from_numpy(part.coefficients_N),
            clip_low=clip_low,
            clip_high=clip_high,
            beta=beta,
            ref_logprobs_N=joined(reference, part),
        )
        total = total + loss
    return total


def joined(tokens, part):
    return torch.cat([tokens[id] for id in part.trajectories])


def assert_same(ours, reference, leaves):
    """The same value and the same gradient for every token of every trajectory."""
    assert ours.requires_grad == reference.requires_grad
    assert ours.item() == pytest.approx(reference.item(), rel=1e-8, abs=1e-10)
    if ours.requires_grad:
        how = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        both = [torch.autograd.grad(loss, list(leaves.values()), **how) for loss in (ours, reference)]
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def same(ours, reference):
    return ours == pytest.approx(reference, rel=1e-8, abs=1e-10)


# Agreement


@SEEDS
def test_grpo(seed):
    draw = random.Random(f"grpo {seed}")
    groups = batch_of(draw, alone)
    penalty, gate, format_weight = draw.choice((0.0, -0.5)), draw.random() < 0.5, draw.choice((0.0, 0.1))
    weights = {"shared": 1.0 - format_weight} | ({"format": format_weight} if format_weight else {})
    rules = {"solver": CreditRule(weights=weights, gate=gate, penalty=penalty)}
    of_reward = {"penalty": penalty, "gate": gate, "format_weight": format_weight}
    for group in groups:
        credit, _, result = judged(group, rules)
        assert same(credit, grpo.credits(group, **of_reward))
        assert same(result.values, grpo.advantages(grpo.credits(group, **of_reward)))
    old = recorded(groups)
    new, reference = near(draw, old, learns=True), near(draw, old)
    how = {"beta": draw.choice((0.0, 0.001, 0.3)), "token_mean": draw.random() < 0.5}
    ours = library_loss(groups, library_samples(groups, rules), new, reference, tokens_per_pack=20, **how)
    assert_same(ours, grpo.loss(groups, new, old, reference, **of_reward, **how), new)


@SEEDS
def test_mhgpo(seed):
    draw = random.Random(f"mhgpo {seed}")
    groups = batch_of(draw, pipeline)
    penalties = {f"a{i}": draw.choice((0.0, -0.5, -1.0)) for i in range(4)}
    flow = {"aggregate": draw.choice(("mean", "max", "min")), "propagate": draw.choice(("shared", "full"))}
    rules = {agent: CreditRule(penalty=penalty, **flow) for agent, penalty in penalties.items()}
    for group in groups:
        credit, _, result = judged(group, rules)
        expected = mhgpo.credits(group, penalties, **flow)
        assert same({t.id: credit[t.id] for t in group.trajectories if t.trainable and t.id in credit}, expected)
        assert same(result.values, mhgpo.advantages(group, expected))
    old = recorded(groups)
    new, reference = near(draw, old, learns=True), near(draw, old)
    how = {"beta": draw.choice((0.0, 0.001, 0.3)), "token_mean": draw.random() < 0.5}
    ours = library_loss(groups, library_samples(groups, rules), new, reference, tokens_per_pack=20, **how)
    assert_same(ours, mhgpo.loss(groups, new, old, reference, penalties=penalties, **flow, **how), new)


@SEEDS
def test_m_grpo(seed):
    draw = random.Random(f"m_grpo {seed}")
    main_model = draw.choice(("main", "sub"))  # of one's own, or the sub-agents'
    groups = batch_of(draw, vertical, main_model=main_model)
    missing = draw.choice(("drop", "renormalise"))
    rules = {agent: replace(rule, missing=missing) for agent, rule in VERTICAL.items()}
    name, d = draw.choice(("weight", "duplicate", "none")), draw.randint(1, 5)
    aligned = {"weight": align.weight, "duplicate": align.duplicate(d, seed), "none": align.none}[name]
    copies = {}
    for group in groups:
        credit, weights, result = judged(group, rules, aligned)
        expected = m_grpo.credits(group, renormalise=missing == "renormalise")
        assert same({t.id: credit[t.id] for t in group.trajectories if t.trainable and t.id in credit}, expected)
        if name == "duplicate":  # the draw is the library's; that it draws d of each kind per rollout is checked here
            copies |= weights
            assert set(copies_per_kind(group, weights).values()) <= {d}
        count = m_grpo.counts(group, expected, name, copies)
        assert same(weights, count)
        assert same(result.values, m_grpo.advantages(group, expected, count))
    old = recorded(groups)
    new, reference = near(draw, old, learns=True), near(draw, old)
    how = {"beta": draw.choice((0.0, 0.0, 0.3)), "token_mean": draw.random() < 0.5, "clip_low": 0.2, "clip_high": 0.28}
    of_credit = {"align": name, "copies": copies, "renormalise": missing == "renormalise"}
    for model in {"sub", main_model}:
        samples = library_samples(groups, rules, aligned, model)
        ours = library_loss(groups, samples, new, reference, tokens_per_pack=20, **how)
        assert_same(ours, m_grpo.loss(groups, model, new, old, reference, **of_credit, **how), new)


def copies_per_kind(group, weights):
    per_kind = Counter()
    for t in group.trajectories:
        if t.caller is not None and t.id in weights:
            per_kind[t.rollout_id, t.agent] += weights[t.id]
    return per_kind


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_a_batchs_loss_does_not_depend_on_its_packs(seed, token_mean):
    draw = random.Random(f"packs {seed}")
    pipelines, verticals = [pipeline(draw, f"q{i}") for i in range(3)], [vertical(draw, f"q{i}") for i in range(3)]
    penalties = {"a0": -0.5, "a1": -1.0}
    pipeline_rules = {agent: CreditRule(penalty=penalty) for agent, penalty in penalties.items()}
    how = {"beta": 0.1, "token_mean": token_mean}
    for groups, rules, model in ((pipelines, pipeline_rules, "base"), (verticals, VERTICAL, "sub")):
        old = recorded(groups)
        new, reference = near(draw, old, learns=True), near(draw, old)
        if model == "base":
            expected = mhgpo.loss(groups, new, old, reference, penalties=penalties, **how)
        else:
            expected = m_grpo.loss(groups, model, new, old, reference, clip_high=0.2, **how)
        samples = library_samples(groups, rules, model=model)
        for size in (1, 15, 40, ALL_IN_ONE):
            ours = library_loss(groups, samples, new, reference, tokens_per_pack=size, **how)
            assert_same(ours, expected, new)
        num_trajectories = len({s.trajectory_id for s in samples})
        assert len(pack(samples, tokens_per_pack=1)) == num_trajectories
        assert len(pack(samples, tokens_per_pack=ALL_IN_ONE)) <= 1 + num_trajectories // 2


class GivenValues(Critic):
    """A critic whose values of the sampled tokens are given, by trajectory id."""

    def __init__(self, config):
        self.config, self.backbone, self.head = config, None, None


@SEEDS
def test_mappo(seed, monkeypatch):
    draw = random.Random(f"mappo {seed}")
    groups = batch_of(draw, pipeline)
    penalties = {f"a{i}": draw.choice((0.0, -0.5, -1.0)) for i in range(4)}
    rules = {agent: CreditRule(penalty=penalty) for agent, penalty in penalties.items()}
    beta, gamma, lam = draw.choice((0.0, 0.1)), draw.choice((1.0, 0.9)), draw.choice((1.0, 0.95, 0.0))
    whitened, token_mean = draw.random() < 0.5, draw.random() < 0.5
    old = recorded(groups)
    reference, old_values = near(draw, old), near(draw, old, spread=1.0)
    new, new_values = near(draw, old, learns=True), near(draw, old_values, learns=True)

    given = {"penalties": penalties, "beta": beta, "gamma": gamma, "lam": lam, "whitened": whitened}
    advantages, returns = mappo.advantages_and_returns(groups, old, reference, old_values, **given)
    expected = mappo.losses(advantages, returns, new, old, new_values, old_values, token_mean=token_mean)

    samples = []
    for group in groups:
        credit, weights, _ = judged(group, rules)
        result = library_advantages.returns(group.trajectories, credit, weights)
        samples += make_samples(group, result.values, weights)
    packs = pack(samples, tokens_per_pack=20, reduction="token" if token_mean else "trajectory")
    critic = GivenValues(CriticConfig(gamma=gamma, lam=lam, whiten=whitened))
    monkeypatch.setattr("cotrain.critic.values", lambda backbone, head, part: joined(old_values, part))
    estimates = critic.estimate(packs, [joined(reference, part) for part in packs], beta) if packs else []
    assert {id for part in packs for id in part.trajectories} == advantages.keys()

    policy, value = torch.zeros(()), torch.zeros(())
    for part, found in zip(packs, estimates, strict=True):
        for ours, theirs in ((found.advantages_N, advantages), (found.returns_N, returns)):
            assert same(ours.tolist(), [x for id in part.trajectories for x in theirs[id]])
        old_N, advantages_N, values_N, returns_N, coefficients_N = map(
            torch.from_numpy,
            (part.old_logprobs_N, found.advantages_N, found.values_N, found.returns_N, part.coefficients_N),
        )
        loss, _ = losses.clipped_surrogate(
            joined(new, part), old_N, advantages_N, coefficients_N, clip_low=0.2, clip_high=0.2
        )
        policy = policy + loss
        new_values_N = joined(new_values, part)
        share = losses.clipped_value(new_values_N, values_N, returns_N, coefficients_N, clip=critic.config.clip)
        value = value + critic.config.coefficient * share
    assert_same(policy, expected[0], new)
    assert_same(value, expected[1], new_values)


def test_without_a_critic_and_kl_every_token_of_mappo_gets_the_credit():
    zeros = torch.zeros(4, dtype=torch.float64)
    rewards_T = mappo.token_rewards(0.75, zeros - 1.0, zeros - 3.0, 0.0)
    assert mappo.gae(rewards_T, zeros.tolist(), 1.0, 1.0) == [0.75] * 4


def test_mappo_by_hand():
    """Two tokens; the first is 2 nats likelier than under the reference, the second as likely."""
    old, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -2.0])
    rewards_T = mappo.token_rewards(1.0, old, reference, 0.25)
    assert rewards_T == [-0.5, 1.0]
    # delta = (-0.5 + 0.5 * 0.25 - 0.5, 1 - 0.25) = (-0.875, 0.75), and 0.5 * 0.5 * 0.75 = 0.1875
    assert mappo.gae(rewards_T, [0.5, 0.25], 0.5, 0.5) == [-0.6875, 0.75]
    assert mappo.whiten({"a": [1.0], "b": [3.0, 5.0]}) == {
        "a": [pytest.approx(-(1.5**0.5))], "b": pytest.approx([0.0, 1.5**0.5])
    }  # fmt: skip


def test_the_random_groups_hold_every_case():
    """Agreement on groups in which nothing happens would say little."""
    seen = Counter()
    for seed in range(200):
        draw = random.Random(seed)
        for group, rules in ((pipeline(draw, "q"), {}), (vertical(draw, "q"), VERTICAL)):
            _, _, result = judged(group, rules, align.duplicate(2, seed))
            seen.update(result.dropped)
            seen["advantage"] += len(result.values)
            per_trajectory = Counter(s.trajectory_id for s in make_samples(group, result.values))
            seen["split"] += sum(n > 1 for n in per_trajectory.values())
            seen["silent"] += sum(id not in per_trajectory for id in result.values)
            readers = [len(group.readers(t)) for t in group.trajectories if t.trainable]
            seen["read by many"] += sum(n > 1 for n in readers)
    cases = (
        "advantage",
        "missing_reward",
        "aligned_away",
        "singleton",
        "zero_variance",
        "split",
        "silent",
        "read by many",
    )
    assert all(seen[case] >= 50 for case in cases), seen
