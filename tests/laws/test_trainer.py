"""Laws of the trainer: packs, masters, adapters, the reference and a restart change nothing that they should not."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain.errors import TrainError
from cotrain.losses import mask, truncate
from cotrain.sections import LossConfig, OptimizerConfig
from support_trainer import PROMPT, batch, build, equal, logprobs_of, make, sample, weights_of, with_logprobs

# peft still asks transformers for a property by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

KINDS = ("float32", "bfloat16", "lora")
UNTRAINED = build().network.requires_grad_(False)


def naive_loss(network, reference, samples, loss, temperatures):
    """The objective as it is written down, trajectory by trajectory."""
    total, weight_sum, token_sum = torch.zeros(()), 0.0, 0.0
    for id in dict.fromkeys(s.trajectory_id for s in samples):
        mine = [s for s in samples if s.trajectory_id == id]
        temperature = temperatures.get(mine[0].agent, 1.0)
        new = torch.cat([logprobs_of(network, s, temperature) for s in mine])
        old = torch.tensor([x for s in mine for x, m in zip(s.logprobs, s.mask, strict=True) if m])
        advantage = torch.tensor([x for s in mine for x, m in zip(s.advantages, s.mask, strict=True) if m])
        rho = (new - old).exp() if loss.ratio == "token" else (new - old).mean().exp().expand(len(new))
        term = torch.minimum(rho * advantage, rho.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage)
        if loss.beta:
            with torch.no_grad():
                ref = torch.cat([logprobs_of(reference, s, temperature) for s in mine])
            term = term - loss.beta * ((ref - new).exp() - (ref - new) - 1)
        weight = mine[0].weight
        total = total - weight * (term.mean() if loss.reduction == "trajectory" else term.sum())
        weight_sum, token_sum = weight_sum + weight, token_sum + weight * len(new)
    return total / (weight_sum if loss.reduction == "trajectory" else token_sum)


def gradient_of_update(trainer, samples):
    """(metrics, gradient by name) of an update whose optimiser step is left out."""
    gradient = {}

    def record(lr, tally):
        gradient.update({name: p.grad.clone() for name, p in trainer.model.network.named_parameters()})
        return True

    trainer._step = record
    return trainer.update(samples), gradient


@pytest.mark.parametrize("tokens_per_pack", [1, 20, 1000])
@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(beta=0.0),
        LossConfig(beta=0.3, clip_high=0.4),
        LossConfig(beta=0.1, reduction="token"),
        LossConfig(beta=0.0, ratio="sequence", clip_low=0.5),
    ],
    ids=str,
)
def test_loss_and_gradient_equal_a_loop_over_trajectories_whatever_the_packs(loss, tokens_per_pack):
    temperatures = {"a": 0.7, "b": 1.0}
    trainer = make(loss=loss, tokens_per_pack=tokens_per_pack, temperatures=temperatures)
    trainer.begin_rl()
    reference = deepcopy(trainer.model.network)
    with torch.no_grad():  # move away from the reference, so that the KL term has a gradient
        for parameter in trainer.model.network.parameters():
            parameter.mul_(1.1)
    metrics, gradient = gradient_of_update(trainer, batch())
    network = deepcopy(trainer.model.network)
    expected = naive_loss(network, reference, batch(), loss, temperatures)
    expected.backward()
    assert metrics["model/base/loss"] == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-6, rtol=1e-5)
    assert any(g.abs().max() > 1e-3 for g in gradient.values())


def test_metrics_of_a_first_update():
    trainer = make(loss=LossConfig(beta=0.01), temperatures={"b": 0.5})
    network = deepcopy(trainer.model.network)
    metrics = trainer.update(batch())
    with torch.no_grad():
        new = torch.cat([logprobs_of(network, s, 0.5 if s.agent == "b" else 1.0) for s in batch()])
        gaps = (new - torch.tensor([x for s in batch() for x, m in zip(s.logprobs, s.mask, strict=True) if m])).abs()
        wide = torch.cat(
            [
                (network(torch.tensor([s.token_ids])).logits[0, :-1] / 0.5).log_softmax(-1)[torch.tensor(s.mask[1:])]
                for s in batch()
                if s.agent == "b"
            ]
        )
    assert metrics["model/base/sampler_gap_mean"] == pytest.approx(gaps.mean().item(), rel=1e-5)
    assert metrics["model/base/sampler_gap_max"] == pytest.approx(gaps.max().item(), rel=1e-5)
    assert metrics["agent/b/entropy"] == pytest.approx(-(wide.exp() * wide).sum(-1).mean().item(), rel=1e-5)
    assert metrics["agent/a/kl"] == metrics["agent/b/kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["model/base/tokens_trained"] == 2 * (2 + 4 + 6) + 2
    assert metrics["model/base/tokens_unpacked"] == 6 * 10 + 24 + 13
    # two prompts of 10 of which 8 are shared, the completions without their last tokens, and what the split adds
    assert metrics["model/base/tokens_computed"] == 8 + 2 * 2 + 2 * (1 + 3 + 5) + 3
    assert metrics["model/base/lr"] == 1e-3
    assert (metrics["model/base/version"], metrics["model/base/skipped"]) == (1, 0)
    assert {"agent/a/clip_fraction", "agent/b/clip_fraction", "model/base/grad_norm"} <= metrics.keys()


def test_the_first_step_is_adam_on_the_clipped_gradient():
    # Adam's first step is lr * g / (|g| + eps); with eps far above the clipped g it shows g itself
    optimizer = OptimizerConfig(lr=0.5, eps=10.0, max_grad_norm=0.01)
    trainer = make(loss=LossConfig(beta=0.0), optimizer=optimizer)
    before = weights_of(trainer)
    _, gradient = gradient_of_update(make(loss=LossConfig(beta=0.0)), batch())
    norm = torch.sqrt(sum(g.square().sum() for g in gradient.values()))
    metrics = trainer.update(batch())
    assert metrics["model/base/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, after in weights_of(trainer).items():
        clipped = gradient[name] * 0.01 / norm
        torch.testing.assert_close(before[name] - after, 0.5 * clipped / (clipped.abs() + 10.0), atol=1e-7, rtol=1e-4)


def test_the_step_follows_the_schedule():
    # with equal first steps, the second steps differ by their rates alone: 1e-3, and half of it
    moved = []
    for schedule in ("constant", "linear"):
        trainer = make(optimizer=OptimizerConfig(lr=1e-3, schedule=schedule), total_steps=2)
        trainer.update(batch())
        before = weights_of(trainer)
        trainer.update(batch())
        moved.append({name: after - before[name] for name, after in weights_of(trainer).items()})
    for name in moved[0]:
        torch.testing.assert_close(moved[0][name] / 2, moved[1][name], atol=1e-6, rtol=1e-3)
    assert any(change.abs().max() > 1e-4 for change in moved[0].values())


def test_logits_exist_only_where_tokens_were_sampled_and_a_reference_only_with_a_penalty():
    for beta, calls in ((0.0, 1), (0.1, 2)):
        trainer, rows = make(loss=LossConfig(beta=beta)), []
        trainer.model.network.register_forward_hook(lambda m, i, output, rows=rows: rows.append(output.logits.shape))
        trainer.update(batch())
        # 26 sampled tokens; three first ones share a predecessor in each fork
        distinct = len({s.token_ids[:at] for s in batch() for at in range(len(s.mask)) if s.mask[at]})
        assert distinct < 26 - 3
        assert rows == [(1, distinct, 32)] * calls


def test_old_logprobs_stay_fixed_over_several_passes():
    loss, optimizer = LossConfig(beta=0.1), OptimizerConfig(lr=0.05)
    once, twice = (make(loss=loss, optimizer=optimizer, updates_per_batch=n) for n in (1, 2))
    own = [with_logprobs(s, logprobs_of(UNTRAINED, s)) for s in batch()]
    first, both = once.update(own), twice.update(own)
    assert first["agent/a/clip_fraction"] == 0.0
    assert both["agent/a/clip_fraction"] > 0.0  # the second pass has left the weights that sampled
    assert first["agent/a/kl"] == 0.0 < both["agent/a/kl"]
    assert both["agent/a/entropy"] == first["agent/a/entropy"]
    assert both["model/base/sampler_gap_max"] == first["model/base/sampler_gap_max"] < 1e-5
    assert both["model/base/version"] == 1
    assert not equal(weights_of(once), weights_of(twice))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_model_keeps_its_weights_bit_for_bit(kind):
    trainer = make(kind, trainable=False)
    before = weights_of(trainer)
    assert trainer.update(batch()) == {"model/base/version": 0, "model/base/skipped": 0}
    trainer.warmup(batch(), 1.0)
    assert equal(before, weights_of(trainer))


def test_without_samples_the_weights_stay_and_the_version_and_the_schedule_advance():
    trainer = make(optimizer=OptimizerConfig(lr=1.0, schedule="linear"), total_steps=4)
    before = weights_of(trainer)
    assert trainer.update([])["model/base/version"] == 1
    assert equal(before, weights_of(trainer))
    assert trainer.update([])["model/base/lr"] == 0.75
    assert trainer.version == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        sample("x", PROMPT, (1, 2), -1.0, logprob=-1e4),  # the ratio, hence the loss, is infinite
        sample("x", PROMPT, (1, 2), 1e38, logprob=-1.0),  # the loss is finite, the norm of its gradient is not
    ],
    ids=["loss", "gradient"],
)
def test_an_update_that_is_not_finite_is_skipped_and_counted(kind, bad):
    trainer = make(kind, max_bad_updates=2)
    trainer.update(batch())
    before = weights_of(trainer)
    for version in (2, 3):
        metrics = trainer.update([*batch(), bad])
        assert (metrics["model/base/skipped"], metrics["model/base/version"]) == (1, version)
        assert all(np.isfinite(list(metrics.values())))
    assert equal(before, weights_of(trainer))
    assert trainer.update(batch(1))["model/base/skipped"] == 0  # and it begins to count anew
    for _ in range(2):
        trainer.update([bad])
    with pytest.raises(TrainError, match="3 updates in a row"):
        trainer.update([bad])


def test_a_pass_that_breaks_off_leaves_the_metrics_of_the_whole_ones(monkeypatch):
    trainer = make(updates_per_batch=2, tokens_per_pack=16)
    expected = make(tokens_per_pack=16).update(batch())
    step = trainer._step
    monkeypatch.setattr(trainer, "_step", lambda lr, tally: step(lr, tally) and spoil())

    def spoil():
        trainer.loss = trainer.loss.model_copy(update={"beta": float("inf")})
        return True

    metrics = trainer.update(batch())
    assert metrics["model/base/skipped"] == 1
    assert metrics["agent/b/clip_fraction"] == expected["agent/b/clip_fraction"]
    assert metrics["model/base/loss"] == expected["model/base/loss"]


@pytest.mark.parametrize("field", ["advantages", "logprobs"])
def test_samples_that_are_not_finite_are_refused_before_anything_is_computed(field):
    trainer = make()
    good = batch()[0]
    bad = replace(good, trajectory_id="broken", **{field: (0.0,) * (len(good.mask) - 1) + (float("nan"),)})
    before = weights_of(trainer)
    with pytest.raises(TrainError, match=f"broken.*{field}"):
        trainer.update([good, bad])
    assert trainer.version == 0
    assert equal(before, weights_of(trainer))


def test_samples_of_another_model_are_refused():
    with pytest.raises(TrainError, match="belongs to model other"):
        make().update([replace(batch()[0], model="other")])


def test_warmup_lowers_the_likelihood_loss_and_reads_no_advantage():
    trainer = make(temperatures={"a": 0.1})
    demonstrations = [sample("x", PROMPT, (1, 2), 0.0, logprob=0.0), sample("y", PROMPT, (3,), 0.0, logprob=0.0)]
    with torch.no_grad():
        expected = -sum(logprobs_of(trainer.model.network, s).mean().item() for s in demonstrations) / 2
    metrics = trainer.warmup(demonstrations, 0.01)
    assert metrics["model/base/loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["model/base/lr"] == 0.01
    assert "model/base/sampler_gap_mean" not in metrics
    for _ in range(10):
        metrics = trainer.warmup(demonstrations, 0.01)
    assert metrics["model/base/loss"] < expected / 2
    assert trainer.version == 11


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_weights_at_the_start_of_rl(kind):
    trainer = make(kind, loss=LossConfig(beta=0.5), optimizer=OptimizerConfig(lr=0.01))
    trainer.warmup(batch(1), 0.01)
    trainer.begin_rl()
    start = deepcopy(trainer.model.network)
    assert trainer.update(batch())["agent/a/kl"] == 0.0
    trainer.begin_rl()  # the first call counts
    moved = deepcopy(trainer.model.network)
    mine = [s for s in batch() if s.agent == "a"]
    with torch.no_grad():
        gaps = torch.cat([logprobs_of(start, s) - logprobs_of(moved, s) for s in mine])
    kl = (gaps.exp() - gaps - 1).mean().item()
    assert kl > 1e-4
    assert trainer.update(batch())["agent/a/kl"] == pytest.approx(kl, rel=0.2 if kind == "bfloat16" else 1e-3)
    with pytest.raises(TrainError, match="after the start of RL"):
        trainer.warmup(batch(), 0.01)


def test_without_warmup_the_reference_of_adapters_is_the_model_without_them():
    trainer = make("lora", loss=LossConfig(beta=0.5), optimizer=OptimizerConfig(lr=0.05))
    before = weights_of(trainer)
    trainer.update(batch())
    after = weights_of(trainer)
    assert {name for name in after if not torch.equal(before[name], after[name])} <= {n for n in after if "lora" in n}
    assert not equal(before, after)
    network = deepcopy(trainer.model.network)
    with torch.no_grad():
        new = torch.cat([logprobs_of(network, s) for s in batch()])
        with network.disable_adapter():
            ref = torch.cat([logprobs_of(network, s) for s in batch()])
    kl_N = (ref - new).exp() - (ref - new) - 1
    is_a = torch.tensor([s.agent == "a" for s in batch() for m in s.mask if m])
    assert trainer.update(batch())["agent/a/kl"] == pytest.approx(kl_N[is_a].mean().item(), rel=1e-3)


def test_master_weights_follow_steps_that_bfloat16_cannot():
    optimizer = OptimizerConfig(lr=1e-4)
    with_masters = make("bfloat16", optimizer=optimizer)
    without = make("bfloat16", optimizer=optimizer, master_weights=False)
    start = weights_of(without)
    name = "model.layers.0.mlp.up_proj.weight"
    large = start[name].abs() > 0.0625  # there bfloat16 rounds away what is under 2.4e-4
    for _ in range(20):
        with_masters.update(batch())
        without.update(batch())
    moved = [weights_of(trainer)[name] != start[name] for trainer in (with_masters, without)]
    assert moved[0][large].float().mean() > 0.3
    assert moved[1][large].float().mean() == 0.0


def test_masters_sum_the_gradients_of_packs_in_float32():
    gradients = []
    for tokens_per_pack in (1, 1000):
        trainer = make("bfloat16", tokens_per_pack=tokens_per_pack, loss=LossConfig(beta=0.0))
        trainer._step = lambda lr, tally, t=trainer: (
            gradients.append([m.grad.clone() for m in t._optimizer._stepped]) or True
        )
        trainer.update(batch())
    assert all(g.dtype == torch.float32 for g in gradients[0])
    assert any((g != g.bfloat16().float()).any() for g in gradients[0])  # a sum of seven that bfloat16 cannot hold
    for many, one in zip(*gradients, strict=True):
        torch.testing.assert_close(many, one, atol=0.05 * one.abs().max().item(), rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warm", [0, 1, 2])
def test_after_load_the_next_updates_are_bit_identical(kind, warm, tmp_path):
    """Saved in a warm-up (1), after one (2) and without one (0)."""
    loss = LossConfig(beta=0.1)

    def go(trainer, steps):
        for kind_of_step, seed in steps:
            metrics = trainer.warmup(batch(seed), 0.01) if kind_of_step == "warm" else trainer.update(batch(seed))
        return metrics

    steps = [("warm", i) for i in range(2 * (warm > 0))] + [("rl", 7), ("rl", 8), ("rl", 9)]
    cut = warm if warm < 2 else 3
    unbroken = make(kind, loss=loss, updates_per_batch=2)
    expected = go(unbroken, steps)
    first = make(kind, loss=loss, updates_per_batch=2)
    if cut:
        go(first, steps[:cut])
    first.save(tmp_path / "saved")
    resumed = make(kind, loss=loss, updates_per_batch=2)
    resumed.load(tmp_path / "saved")
    assert resumed.version == cut
    assert equal(weights_of(first), weights_of(resumed))
    assert go(resumed, steps[cut:]) == expected
    assert equal(weights_of(unbroken), weights_of(resumed))


def test_the_reference_is_written_once_and_then_linked(tmp_path):
    trainer = make(loss=LossConfig(beta=0.1))
    trainer.update(batch())
    trainer.save(tmp_path / "1")
    trainer.update(batch())
    trainer.save(tmp_path / "2", previous=tmp_path / "1")
    resumed = make(loss=LossConfig(beta=0.1))
    resumed.load(tmp_path / "2")
    resumed.save(tmp_path / "3", previous=tmp_path / "2")
    files = [tmp_path / name / "reference.safetensors" for name in "123"]
    assert len({path.stat().st_ino for path in files}) == 1
    other = make(model=build(seed=5), loss=LossConfig(beta=0.1))
    other.update(batch())
    other.save(tmp_path / "4", previous=tmp_path / "3")  # another run's reference is not this one's
    assert (tmp_path / "4" / "reference.safetensors").read_bytes() != files[0].read_bytes()


def test_a_save_of_something_else_is_refused(tmp_path):
    trainer = make("lora")
    trainer.update(batch())
    trainer.save(tmp_path)
    with pytest.raises(TrainError, match="do not fit"):
        make("float32").load(tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(TrainError, match="cannot be read"):
        make("lora").load(tmp_path)
    with pytest.raises(TrainError, match="cannot be read"):
        make("lora").load(tmp_path / "nowhere")


def one_token(rho):
    """One sampled token whose recorded log-prob is what it was when it was `rho` times less likely than it is now."""
    with torch.no_grad():
        logits = UNTRAINED(torch.tensor([PROMPT])).logits[0, -1]
    return sample("t", PROMPT, [7], 1.0, logprob=float(torch.log_softmax(logits, -1)[7]) - np.log(rho))


@pytest.mark.parametrize(
    ("rho", "guard", "term"),
    [
        (3.0, None, 1.2),  # clip(3, 0.8, 1.2)
        (3.0, truncate(2.0), 2.0),  # ratio 1 against the weights before the step, advantage times min(3, 2)
        (1.5, truncate(2.0), 1.5),
        (0.25, truncate(2.0), 0.25),
        (3.0, mask(2.0), 0.0),
        (1.5, mask(2.0), 1.5),
        (1.0, truncate(2.0), 1.0),
    ],
)
def test_a_guard_takes_the_ratio_against_the_weights_before_the_step_and_weighs_the_advantage(rho, guard, term):
    metrics = make(loss=LossConfig(beta=0.0), guard=guard).update([one_token(rho)])
    assert metrics["model/base/loss"] == pytest.approx(-term, abs=1e-4)


def test_later_passes_keep_the_weights_of_the_first_as_the_ones_before_the_step():
    loss, samples = LossConfig(beta=0.0), [one_token(3.0)]
    plain, guarded = (make(loss=loss, updates_per_batch=3, guard=g) for g in (None, truncate(2.0)))
    on_policy = [replace(one_token(1.0), advantages=tuple(2.0 * a for a in one_token(1.0).advantages))]
    plain.update(on_policy)  # the same objective: ratio 1 at first, advantage 2
    guarded.update(samples)
    for ours, theirs in zip(guarded.model.network.parameters(), plain.model.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
