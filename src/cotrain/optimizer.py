"""What steps a set of weights: AdamW, float32 masters of bfloat16 weights, gradient clipping, save and load.

The trainer has one for its model, and one for its critic. Guarantee: after `load` the next step is bit-identical to the
unbroken run's (CPU). It knows no loss and no schedule, and judges no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cotrain import checkpoints
from cotrain.sections import OptimizerConfig


class Optimizer:
    """Trained parameters by name, and what steps them.

    Args:
        parameters: what is trained, by name; their gradients are cleared.
        settings: AdamW's; the learning rate is given with each step.
        master_weights: parameters that are not float32 get float32 copies: gradients are summed there over packs, and
            the steps are made there, because steps in bfloat16 round small updates away.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: OptimizerConfig, *, master_weights: bool) -> None:
        self.parameters, self.settings = dict(parameters), settings
        self._masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if master_weights and parameter.dtype != torch.float32:
                self._masters[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(_add_to(self._masters[name]))  # type: ignore[no-untyped-call]
        self._stepped = [self._masters.get(name, p) for name, p in self.parameters.items()]
        self._adam: torch.optim.Optimizer | None = None

    def reset(self) -> None:
        """Forget the moments."""
        self._adam = torch.optim.AdamW(
            self._stepped,
            lr=self.settings.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=True,  # three to six times as fast as the others, on the CPU too
        )

    def follow(self) -> None:
        """Take up parameters that were changed from outside."""
        for name, master in self._masters.items():
            master.copy_(self.parameters[name].detach())

    def clip(self) -> float:
        """Scale the whole gradient down to `max_grad_norm` where it is longer; its norm before."""
        return torch.nn.utils.clip_grad_norm_(self._stepped, self.settings.max_grad_norm).item()

    def step(self, lr: float) -> None:
        """Step by the gradient that is there, and drop it."""
        assert self._adam is not None
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self.parameters[name].copy_(master)
        self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        for tensor in (*self.parameters.values(), *self._masters.values()):
            tensor.grad = None

    def save(self, folder: Path, names: checkpoints.Files) -> None:
        """Write weights, masters and moments into a folder."""
        checkpoints.write_tensors(folder / names.weights, self.parameters)
        checkpoints.write_tensors(folder / names.masters, self._masters)
        if self._adam is not None:
            torch.save(self._adam.state_dict(), folder / names.optimizer)

    def load(self, folder: Path, names: checkpoints.Files, *, has_moments: bool) -> None:
        """Take up what `save` wrote, in place.

        Raises:
            TrainError: a file is missing, or is of other weights.
        """
        checkpoints.read_tensors(folder / names.weights, self.parameters)
        checkpoints.read_tensors(folder / names.masters, self._masters)
        self._adam = None
        if has_moments:
            self.reset()
            assert self._adam is not None
            self._adam.load_state_dict(checkpoints.read_optimizer(folder / names.optimizer))


def _add_to(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient of one pack to its float32 master: sums in bfloat16 lose small packs."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
