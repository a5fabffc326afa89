"""Laws of MAPPO's critic: what it makes of credits, whom its loss trains, and that it goes on where it was."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain.advantages import gae
from cotrain.batch import pack
from cotrain.critic import Critic, token_rewards
from cotrain.sections import CriticConfig, CriticOptimizerConfig, LossConfig, ModelConfig, OptimizerConfig
from cotrain.trainer import Trainer
from support_trainer import batch, build, equal, make, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def trainer_of(kind="float32", loss=None, optimizer=None, **critic):
    config = ModelConfig(
        dtype="bfloat16" if kind == "bfloat16" else "float32",
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        critic=CriticConfig(**{"optimizer": CriticOptimizerConfig(lr=1e-2)} | critic),
    )
    return Trainer(build(kind), config, loss or LossConfig(beta=0.0), total_steps=10, tokens_per_pack=64)


def critic_weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.critic.optimizer.parameters.items()}


def test_gae_equals_a_double_loop_on_random_inputs():
    draw = np.random.default_rng(0)
    for _ in range(200):
        length = draw.integers(1, 12)
        rewards, values = draw.normal(size=(2, length))
        gamma, lam = draw.uniform(size=2)
        after = np.append(values[1:], 0.0)
        delta = rewards + gamma * after - values
        expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        assert gae(rewards.tolist(), values.tolist(), gamma=gamma, lam=lam) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_with_gamma_and_lambda_1_a_zero_critic_no_kl_and_no_whitening_the_advantage_is_the_return(seed):
    samples = batch(seed)
    with_critic = trainer_of(gamma=1.0, lam=1.0, whiten=False)
    plain = make(loss=LossConfig(beta=0.0))
    packs = pack(samples, tokens_per_pack=64)
    with_critic.begin_rl()
    for part, found in zip(packs, with_critic.critic.estimate(packs, [None] * len(packs), 0.0), strict=True):
        assert np.array_equal(found.advantages_N, part.advantages_N)
        assert np.array_equal(found.returns_N, part.advantages_N)
        assert not found.values_N.any()
    with_critic.update(samples)
    plain.update(samples)
    assert equal(weights_of(with_critic), weights_of(plain))


def test_whitened_advantages_have_mean_0_and_std_1_over_the_batch():
    packs = pack(batch(), tokens_per_pack=64)
    critic = trainer_of().critic
    advantages = np.concatenate([e.advantages_N for e in critic.estimate(packs, [None] * len(packs), 0.0)])
    assert advantages.mean() == pytest.approx(0.0, abs=1e-9)
    assert advantages.std() == pytest.approx(1.0)


def test_the_credit_arrives_on_the_last_token_and_every_token_pays_its_log_ratio():
    (part,) = pack(batch(), tokens_per_pack=10_000)
    reference = part.old_logprobs_N + np.linspace(-1, 1, len(part.old_logprobs_N))
    rewards = token_rewards(part, reference, beta=0.5)
    for place in range(len(part.trajectories)):
        own = part.trajectory_N == place
        kl = -0.5 * (part.old_logprobs_N - reference)[own]
        assert rewards[own][:-1] == pytest.approx(kl[:-1])
        assert rewards[own][-1] == pytest.approx(kl[-1] + part.advantages_N[own][-1])


def test_packs_do_not_change_what_the_critic_sees_or_learns():
    samples, found = batch(), []
    for limit in (64, 10_000):
        trainer = trainer_of()
        trainer.tokens_per_pack = limit
        trainer.begin_rl()
        torch.nn.init.normal_(trainer.critic.head.weight, generator=torch.Generator().manual_seed(1))
        metrics = trainer.update(samples)
        found.append((metrics["model/base/value_loss"], critic_weights(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, weight in found[0][1].items():
        assert torch.allclose(weight, found[1][1][name], atol=2e-4), name


def test_values_learn_the_return():
    trainer = trainer_of(optimizer=OptimizerConfig(lr=1e-9), clip=10.0)
    losses = [trainer.update(batch())["model/base/value_loss"] for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]  # credits differ after equal prefixes, so not to 0


def test_the_value_loss_of_a_shared_backbone_trains_the_policy_and_that_of_an_own_one_does_not():
    moved = {}
    for backbone in ("own", "shared"):
        weights = []
        for coefficient in (0.1, 10.0):
            trainer = trainer_of(backbone=backbone, coefficient=coefficient)
            trainer.begin_rl()
            torch.nn.init.normal_(trainer.critic.head.weight, generator=torch.Generator().manual_seed(1))
            trainer.update(batch())
            weights.append(weights_of(trainer))
        moved[backbone] = not equal(*weights)
    assert moved == {"own": False, "shared": True}


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_policy_stands_while_the_critic_warms_up(backbone):
    trainer = trainer_of(backbone=backbone, warmup_steps=2)
    start, moved = weights_of(trainer), []
    for _ in range(3):
        before = critic_weights(trainer)
        trainer.update(batch())
        moved.append((not equal(weights_of(trainer), start), not equal(critic_weights(trainer), before)))
    assert moved == [(False, True), (False, True), (True, True)]


def test_the_critics_backbone_begins_as_the_policy_is_after_its_warm_up():
    trainer = trainer_of()
    trainer.warmup([replace(s, logprobs=(0.0,) * len(s.mask)) for s in batch()], lr=1e-2)
    trainer.begin_rl()
    policy = dict(trainer.model.network.base_model.named_parameters())
    for name, weight in trainer.critic.backbone.named_parameters():
        assert torch.equal(weight, policy[name])
        assert weight is not policy[name]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path, kind, backbone):
    unbroken = trainer_of(kind, backbone=backbone)
    for step in range(2):
        unbroken.update(batch(step))
    unbroken.save(tmp_path / "saved")
    resumed = trainer_of(kind, backbone=backbone)
    resumed.load(tmp_path / "saved")
    left, right = (trainer.update(batch(7)) for trainer in (unbroken, resumed))
    assert left == right
    assert equal(weights_of(unbroken), weights_of(resumed))
    assert equal(critic_weights(unbroken), critic_weights(resumed))


def test_adapters_have_a_critic_that_trains_adapters_of_its_own():
    trainer = trainer_of("lora")
    names = [name for name in trainer.critic.optimizer.parameters if not name.startswith("head.")]
    assert names
    assert all("lora_" in name for name in names)


def test_a_loss_that_is_not_finite_changes_neither_policy_nor_critic():
    trainer = trainer_of()
    trainer.begin_rl()
    start, critic = weights_of(trainer), critic_weights(trainer)
    trainer.critic.loss = lambda part, estimate, policy_stands: torch.tensor(float("nan"), requires_grad=True)
    assert trainer.update(batch())["model/base/skipped"] == 1
    assert equal(weights_of(trainer), start)
    assert equal(critic_weights(trainer), critic)


def test_bfloat16_critics_step_their_float32_masters():
    network = build("bfloat16").network
    critic = Critic(network, CriticConfig(), master_weights=True)
    assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    assert critic.head.weight.dtype == torch.float32
    assert len(critic.optimizer._masters) == len(list(critic.backbone.parameters()))
    trainer = trainer_of("bfloat16", optimizer=OptimizerConfig(lr=1e-6))
    trainer.begin_rl()
    before = {name: master.clone() for name, master in trainer.critic.optimizer._masters.items()}
    assert trainer.update(batch())["model/base/skipped"] == 0
    trainer.update(batch())
    assert all(not torch.equal(before[name], m) for name, m in trainer.critic.optimizer._masters.items())


def test_a_critics_rate_is_its_own_default_whatever_else_is_set():
    assert CriticConfig.model_validate({"optimizer": {"max_grad_norm": 0.5}}).optimizer.lr == 1e-5
