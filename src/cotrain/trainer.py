"""One model's training: forward over packs, loss, gradient, AdamW, save and load.

`Trainer.update` is one step of RL on a batch of samples and `Trainer.warmup` one supervised step; each advances
`version`. It changes the weights of the very network it was given, which an in-process engine may be sampling from.
Guarantees: packs do not change the loss; a step whose loss or gradient is not finite leaves the weights as they were;
after `load` the next update is bit-identical to the unbroken run's (CPU). It knows no groups, rewards or estimators.

With a critic (`critic.py`) advantages are made here, from the credits that the samples carry.

Shapes: T tokens of a pack's tree, N sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cotrain import checkpoints
from cotrain.batch import Pack, means_by_agent, pack
from cotrain.critic import Critic, Estimates, metrics_of
from cotrain.errors import TrainError
from cotrain.forward import sampled_logprobs, tensor_of
from cotrain.losses import Guard, Terms, cispo, clipped_surrogate, k3, negative_log_likelihood
from cotrain.optimizer import Optimizer
from cotrain.sections import LossConfig, ModelConfig, OptimizerConfig
from cotrain.types import Sample

if TYPE_CHECKING:
    from cotrain.models import LoadedModel

PackLoss = Callable[[int, Pack, Tensor], tuple[Tensor, Terms | None]]
"""(number of the pack, pack, logprobs_N) -> the pack's share of the loss, and its terms where it has any."""


def lr_at(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of update number `step` (from 0) of `total_steps`.

    It rises linearly over the first `warmup_steps` updates, the last of which already has the full rate. Of the
    `total_steps - warmup_steps` that remain, x is the share done before this one: constant lr, linear lr * (1 - x),
    cosine lr * (1 + cos(pi x)) / 2. So 0 is reached when the run is over, and no update is made with a rate of 0.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    done = min(1.0, (step - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps))
    if optimizer.schedule == "linear":
        return optimizer.lr * (1.0 - done)
    if optimizer.schedule == "cosine":
        return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr


class _Tally:
    """What a batch leaves behind for the metrics: `series` of arrays over N, and one loss and norm per pass."""

    def __init__(self) -> None:
        self.series: dict[str, list[np.ndarray]] = {}
        self.loss: list[float] = []
        self.grad_norm: list[float] = []
        self.value_loss: list[float] = []
        self.estimates: Sequence[Estimates] = ()

    def add(self, name: str, values_N: Tensor) -> None:
        """Append one pack's values to a series."""
        self.series.setdefault(name, []).append(values_N.detach().cpu().numpy())


class Trainer:
    """Trains one model; `version` counts the updates its weights have had, `model` is what it was given.

    Trainable are all weights, or the adapters of a model that has them; of a model whose configuration says
    `trainable = false` nothing is, and update and warm-up leave it and its version alone. bfloat16 parameters get
    float32 master copies (`master_weights`): gradients are summed there over packs, and the optimiser steps there.
    `temperatures`: agent name -> sampling temperature (default 1). With a `guard` the clipped ratio is the one against
    the weights before the step, and what the sampling weights were corrects the advantages (decoupled PPO,
    arXiv 2110.00641).
    """

    def __init__(
        self,
        model: LoadedModel,
        config: ModelConfig,
        loss: LossConfig,
        *,
        total_steps: int,
        tokens_per_pack: int = 1024,
        updates_per_batch: int = 1,
        max_bad_updates: int = 3,
        temperatures: Mapping[str, float] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.model, self.config, self.loss = model, config, loss
        self.total_steps, self.tokens_per_pack = total_steps, tokens_per_pack
        self.updates_per_batch, self.max_bad_updates = updates_per_batch, max_bad_updates
        self.temperatures, self.guard = dict(temperatures or {}), guard
        self.version = 0
        self._rl_step = 0  # batches since the start of RL: the place in the learning-rate schedule
        self._bad_updates = 0
        self._phase = "new"  # then "warmup", then "rl"
        self._reference: dict[str, Tensor] = {}
        self._reference_digest: str | None = None
        # Without dropout, as the sampler runs; the loader has marked what is trained.
        named = model.network.eval().named_parameters() if config.trainable else ()
        trained = {name: p for name, p in named if p.requires_grad}
        self.critic: Critic | None = None
        if config.critic is not None and config.trainable:  # before the parameters have hooks, which a copy would share
            self.critic = Critic(model.network, config.critic, master_weights=config.master_weights)
        self._optimizer = Optimizer(trained, config.optimizer, master_weights=config.master_weights)

    def begin_rl(self) -> None:
        """End the warm-up: remember the weights as the KL reference (if beta > 0), start a fresh optimiser.

        The first call counts, later ones change nothing; `update` makes it if nobody did. The reference is a copy of
        what is trained, so for adapters it is small, and before any warm-up it is the model without them.
        """
        if self._phase == "rl" or not self.config.trainable:
            return
        self._phase = "rl"
        self._optimizer.reset()
        if self.critic is not None:
            self.critic.begin(self.model.network)
        if self.loss.beta > 0.0:
            self._reference = {name: p.detach().clone() for name, p in self._optimizer.parameters.items()}

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step of RL: `updates_per_batch` passes over the batch. Returns metrics by name.

        Without samples the weights stay and the version advances, so that nobody waits for this model. So it does when
        the loss or the gradient is not finite (metric `skipped`). Metrics are means over the passes, except
        entropy and sampler gap, which belong to the weights before the first one; a value that is not finite, or not
        known, is absent. Token counts are those of one pass.

        Raises:
            TrainError: a sample of another model or with a value that is not finite (nothing was computed then); more
                than `max_bad_updates` skipped updates in a row.
        """
        self._check(samples)
        if not self.config.trainable:
            return self._named({"version": self.version, "skipped": 0})
        self.begin_rl()
        lr = lr_at(self._rl_step, self.config.optimizer, self.total_steps)
        packs = pack(samples, tokens_per_pack=self.tokens_per_pack, reduction=self.loss.reduction)
        references = [self._reference_logprobs(part) for part in packs]  # they do not move: once for all passes
        estimates = self.critic.estimate(packs, references, self.loss.beta) if self.critic and packs else []
        before: dict[int, Tensor] = {}  # log-probs of each pack under the weights before the step: the first pass's

        def surrogate(index: int, part: Pack, logprobs_N: Tensor) -> tuple[Tensor, Terms]:
            device = logprobs_N.device
            advantages_N = tensor_of(estimates[index].advantages_N if estimates else part.advantages_N, device)
            old_N = tensor_of(part.old_logprobs_N, device)
            if self.guard is not None:
                now_N = before.setdefault(index, logprobs_N.detach())
                advantages_N, old_N = advantages_N * self.guard(now_N - old_N), now_N
            loss, terms = {"clipped": clipped_surrogate, "cispo": cispo}[self.loss.objective](
                logprobs_N,
                old_N,
                advantages_N,
                tensor_of(part.coefficients_N, device),
                clip_low=self.loss.clip_low,
                clip_high=self.loss.clip_high,
                beta=0.0 if estimates else self.loss.beta,  # a critic's rewards hold the KL term
                ref_logprobs_N=references[index],
                ratio=self.loss.ratio,
                trajectory_N=tensor_of(part.trajectory_N, device),
            )
            reference_N = references[index]
            if estimates and reference_N is not None:
                terms = replace(terms, kl_N=k3(logprobs_N, reference_N).detach())
            return loss, terms

        is_held = self.critic is not None and self._rl_step < self.critic.config.warmup_steps
        self._rl_step += 1
        loss = None if is_held else surrogate
        return self._fit(packs, loss, lr, self.updates_per_batch, self.temperatures, estimates)

    def warmup(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        """One supervised step on demonstrations, at temperature 1: their advantages and log-probs are not read.

        Raises:
            TrainError: RL has begun; otherwise as `update`.
        """
        self._check(samples)
        if not self.config.trainable:
            return self._named({"version": self.version, "skipped": 0})
        if self._phase == "rl":
            raise TrainError(f"model {self.model.name}", "a warm-up step after the start of RL", "Warm up first")
        if self._phase == "new":
            self._phase = "warmup"
            self._optimizer.reset()

        def likelihood(_: int, part: Pack, logprobs_N: Tensor) -> tuple[Tensor, None]:
            return negative_log_likelihood(logprobs_N, tensor_of(part.coefficients_N, logprobs_N.device)), None

        reduction = self.loss.reduction if isinstance(self.loss.reduction, str) else "trajectory"
        packs = pack(samples, tokens_per_pack=self.tokens_per_pack, reduction=reduction)
        return self._fit(packs, likelihood, lr, passes=1, temperatures={})

    def _fit(
        self,
        packs: Sequence[Pack],
        loss: PackLoss | None,
        lr: float,
        passes: int,
        temperatures: Mapping[str, float],
        estimates: Sequence[Estimates] = (),
    ) -> dict[str, float]:
        """Passes over the packs, each ending in a step, until one is not finite. Without a loss the policy stands."""
        tally, is_finite = _Tally(), True
        for number in range(passes if packs else 0):
            is_finite = loss is None or self._backward(packs, loss, temperatures, tally, first=number == 0)
            is_finite = is_finite and self._regress(packs, estimates, tally, policy_stands=loss is None)
            is_finite = is_finite and self._step(lr, tally)
            if not is_finite:
                break
        self._clear_gradients()
        self.version += 1
        if packs:
            self._bad_updates = 0 if is_finite else self._bad_updates + 1
        if self._bad_updates > self.max_bad_updates:
            found = f"{self._bad_updates} updates in a row without a finite loss and gradient"
            raise TrainError(f"model {self.model.name}", found, "Export a checkpoint and train it with a lower rate")
        state = {"lr": lr, "version": self.version, "skipped": int(not is_finite)}
        return self._summary(packs, tally) | self._named(state)

    def _backward(
        self,
        packs: Sequence[Pack],
        loss: PackLoss,
        temperatures: Mapping[str, float],
        tally: _Tally,
        *,
        first: bool,
    ) -> bool:
        """Sum the gradient over all packs; False as soon as a loss is not finite."""
        total = 0.0
        for index, part in enumerate(packs):
            logprobs_N, entropy_N = sampled_logprobs(self.model.network, part, temperatures)
            share, terms = loss(index, part, logprobs_N)
            if not math.isfinite(share.item()):
                return False
            share.backward()  # type: ignore[no-untyped-call]
            total += share.item()
            if first:
                old_logprobs_N = tensor_of(part.old_logprobs_N, logprobs_N.device)
                tally.add("entropy", entropy_N)
                tally.add("sampler_gap", (logprobs_N - old_logprobs_N).abs())
            if terms is not None:
                tally.add("clip_fraction", terms.clipped_N)
            if terms is not None and self._reference:
                tally.add("kl", terms.kl_N)
        tally.loss.append(total)
        return True

    def _regress(
        self, packs: Sequence[Pack], estimates: Sequence[Estimates], tally: _Tally, *, policy_stands: bool
    ) -> bool:
        """Sum the critic's gradient over all packs; False as soon as its loss is not finite."""
        total = 0.0
        for part, estimate in zip(packs, estimates, strict=False):  # none without a critic
            assert self.critic is not None
            share = self.critic.loss(part, estimate, policy_stands=policy_stands)
            if not math.isfinite(share.item()):
                return False
            share.backward()  # type: ignore[no-untyped-call]
            total += share.item()
        if estimates:
            tally.value_loss.append(total)
            tally.estimates = estimates
        return True

    def _step(self, lr: float, tally: _Tally) -> bool:
        """Clip and step; False, with all weights untouched, when a gradient is not finite."""
        critic = self.critic if tally.estimates else None
        norms = [self._optimizer.clip(), *([critic.optimizer.clip()] if critic else [])]
        if not all(map(math.isfinite, norms)):
            return False
        tally.grad_norm.append(norms[0])
        self._optimizer.step(lr)
        if critic is not None:
            critic.optimizer.step(lr_at(self._rl_step - 1, critic.config.optimizer, self.total_steps))
        self._clear_gradients()
        return True

    @torch.no_grad()
    def _reference_logprobs(self, part: Pack) -> Tensor | None:
        if not self._reference:
            return None
        return sampled_logprobs(self.model.network, part, self.temperatures, self._reference)[0]

    def save(self, folder: Path, previous: Path | None = None) -> None:
        """Write what `load` needs into a folder: trained weights, masters, optimiser, critic, reference, counters.

        The reference never changes: when `previous`, an earlier save, holds the same one, its file is linked instead
        of written again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._reference and self._reference_digest is None:
            self._reference_digest = checkpoints.digest(self._reference)
        self._optimizer.save(folder, checkpoints.POLICY)
        if self.critic is not None:
            self.critic.optimizer.save(folder, checkpoints.CRITIC)
        known = self._reference_digest
        if not (previous and known and checkpoints.link_reference(previous, folder, known)):
            checkpoints.write_tensors(folder / checkpoints.REFERENCE, self._reference)
        counters = {"version": self.version, "rl_step": self._rl_step, "bad_updates": self._bad_updates}
        checkpoints.write_json(folder / "trainer.json", {**counters, "phase": self._phase, "reference": known})

    def load(self, folder: Path) -> None:
        """Take up a saved state in place: weights, masters, optimiser, reference, version.

        Raises:
            TrainError: the folder is not a save of a trainer with this model and configuration.
        """
        state = checkpoints.read_json(folder / "trainer.json")
        self._phase, self.version = str(state["phase"]), int(str(state["version"]))
        self._rl_step, self._bad_updates = int(str(state["rl_step"])), int(str(state["bad_updates"]))
        self._optimizer.load(folder, checkpoints.POLICY, has_moments=self._phase != "new")
        if self.critic is not None:
            self.critic.optimizer.load(folder, checkpoints.CRITIC, has_moments=self._phase == "rl")
        self._reference, self._reference_digest = {}, None
        if self._phase == "rl" and self.loss.beta > 0.0:
            trained = self._optimizer.parameters
            self._reference = {name: torch.empty_like(p).detach() for name, p in trained.items()}
            checkpoints.read_tensors(folder / checkpoints.REFERENCE, self._reference)
            self._reference_digest = str(state["reference"])

    def _summary(self, packs: Sequence[Pack], tally: _Tally) -> dict[str, float]:
        """Metrics of a batch by name; what is not finite, or was not reached, is left out."""
        values = {
            "tokens_trained": sum(len(part.targets_N) for part in packs),
            "tokens_computed": sum(len(part.token_ids_T) for part in packs),
            "tokens_unpacked": sum(part.num_unpacked for part in packs),
            "loss": float(np.mean(tally.loss)) if tally.loss else math.nan,
            "grad_norm": float(np.mean(tally.grad_norm)) if tally.grad_norm else math.nan,
        }
        if tally.estimates:
            values |= {"value_loss": float(np.mean(tally.value_loss)), **metrics_of(tally.estimates)}
        agents: dict[str, float] = {}
        if tally.loss:
            series = {name: np.concatenate(parts) for name, parts in tally.series.items()}
            gap_N = series.pop("sampler_gap")
            if "clip_fraction" in series:  # demonstrations were not sampled, so a warm-up has no gap
                values |= {"sampler_gap_mean": float(gap_N.mean()), "sampler_gap_max": float(gap_N.max())}
            agents = means_by_agent(packs, series)
        return {name: value for name, value in (self._named(values) | agents).items() if math.isfinite(value)}

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {f"model/{self.model.name}/{what}": value for what, value in values.items()}

    def _check(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            where = f"sample of trajectory {sample.trajectory_id}"
            if sample.model != self.model.name:
                raise TrainError(
                    where,
                    f"it belongs to model {sample.model}",
                    f"Give it to that trainer, not {self.model.name}'s",
                )
            for what in ("logprobs", "advantages"):
                if not np.isfinite(getattr(sample, what)).all():
                    raise TrainError(
                        where, f"{what} that are not finite", "Drop the trajectory and find out who made them"
                    )

    def _clear_gradients(self) -> None:
        self._optimizer.clear()
        if self.critic is not None:
            self.critic.optimizer.clear()
