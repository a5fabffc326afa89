"""MAPPO's critic: values before every sampled token, and the advantages and returns that come of them.

A trajectory's credit arrives on its last sampled token; every token costs beta times its log-ratio to the reference;
GAE makes advantages of these rewards and the values. The critic reads the policy's backbone, or a copy of it, through
a linear head that begins at 0. PPO of a single agent is the same. Source: MAPPO (arXiv 2103.01955), for LLMs the
baseline of MHGPO (arXiv 2506.02718). It steps nothing by itself: `Trainer` does.

Shapes: T sampled tokens of a trajectory, N sampled tokens of a pack.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cotrain.advantages import gae
from cotrain.batch import Floats, Pack
from cotrain.forward import tensor_of, values
from cotrain.losses import clipped_value
from cotrain.optimizer import Optimizer
from cotrain.sections import CriticConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """What a pack's sampled tokens are worth by the critic before the update: `returns_N` = GAE + `values_N`.

    `advantages_N` are GAE's, whitened over the batch where the configuration says so.
    """

    values_N: Floats
    returns_N: Floats
    advantages_N: Floats


class Critic:
    """A value model for one policy.

    Args:
        network: the policy's; its trained parameters are marked.
        config: the critic's settings.
        master_weights: as the policy's.
    """

    def __init__(self, network: torch.nn.Module, config: CriticConfig, *, master_weights: bool) -> None:
        self.config = config
        own = backbone_of(network)
        self.backbone = copy.deepcopy(own) if config.backbone == "own" else own
        hidden_size = int(own.config.hidden_size)  # type: ignore[union-attr, arg-type]
        device = next(own.parameters()).device
        self.head = torch.nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        trained = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if config.backbone == "own":
            named = self.backbone.named_parameters()
            trained |= {f"backbone.{name}": parameter for name, parameter in named if parameter.requires_grad}
        self.optimizer = Optimizer(trained, config.optimizer, master_weights=master_weights)

    def begin(self, network: torch.nn.Module) -> None:
        """Start RL: a backbone of its own takes up the policy's weights as they are now, after any warm-up."""
        if self.config.backbone == "own":
            self.backbone.load_state_dict(backbone_of(network).state_dict())
            self.optimizer.follow()
        self.optimizer.reset()

    def estimate(self, packs: Sequence[Pack], references: Sequence[Tensor | None], beta: float) -> list[Estimates]:
        """Values, returns and advantages of a batch under the weights as they are; `references`: logprobs_N by pack."""
        plain = [self._estimate(part, ref_N, beta) for part, ref_N in zip(packs, references, strict=True)]
        if not self.config.whiten:
            return plain
        whole_N = np.concatenate([found.advantages_N for found in plain])
        center, spread = whole_N.mean(), whole_N.std() + 1e-8
        return [replace(found, advantages_N=(found.advantages_N - center) / spread) for found in plain]

    def loss(self, part: Pack, estimate: Estimates, *, policy_stands: bool) -> Tensor:
        """The pack's share of coefficient * the clipped value loss. A policy that stands gets no gradient of it."""
        head_only = policy_stands and self.config.backbone == "shared"
        values_N = values(self.backbone, self.head, part, head_only=head_only)
        device = values_N.device
        old_N, returns_N = tensor_of(estimate.values_N, device), tensor_of(estimate.returns_N, device)
        coefficients_N = tensor_of(part.coefficients_N, device)
        share = clipped_value(values_N, old_N, returns_N, coefficients_N, clip=self.config.clip)
        return self.config.coefficient * share

    @torch.no_grad()
    def _estimate(self, part: Pack, reference_N: Tensor | None, beta: float) -> Estimates:
        values_N = values(self.backbone, self.head, part).double().cpu().numpy()
        rewards_N = token_rewards(part, None if reference_N is None else reference_N.double().cpu().numpy(), beta)
        advantages_N = np.empty_like(values_N)
        for place in range(len(part.trajectories)):
            own = part.trajectory_N == place
            advantages_N[own] = gae(
                rewards_N[own].tolist(), values_N[own].tolist(), gamma=self.config.gamma, lam=self.config.lam
            )
        return Estimates(values_N=values_N, returns_N=advantages_N + values_N, advantages_N=advantages_N)


def token_rewards(part: Pack, reference_N: Floats | None, beta: float) -> Floats:
    """r_t = -beta * (log pi_old - log pi_ref), and besides the trajectory's credit on its last sampled token."""
    rewards_N = np.zeros_like(part.old_logprobs_N)
    if reference_N is not None:
        rewards_N -= beta * (part.old_logprobs_N - reference_N)
    last_K = np.flatnonzero(np.diff(part.trajectory_N, append=-1))  # a trajectory's tokens are neighbours, in order
    rewards_N[last_K] += part.advantages_N[last_K]
    return rewards_N


def metrics_of(estimates: Sequence[Estimates]) -> dict[str, float]:
    """Means of values and returns, and the share of the returns' variance that the values explain."""
    values_N, returns_N = (
        np.concatenate([getattr(found, name) for found in estimates]) for name in ("values_N", "returns_N")
    )
    variance = returns_N.var()
    explained = 1.0 - (returns_N - values_N).var() / variance if variance > 0 else float("nan")
    return {
        "value_mean": float(values_N.mean()),
        "return_mean": float(returns_N.mean()),
        "explained_variance": float(explained),
    }


def backbone_of(network: torch.nn.Module) -> torch.nn.Module:
    """The network without its language head, adapters included."""
    whole = network.get_base_model() if hasattr(network, "peft_config") else network  # type: ignore[operator]
    found: torch.nn.Module = whole.base_model  # type: ignore[assignment]
    return found
