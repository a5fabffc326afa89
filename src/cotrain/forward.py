"""A pack's way through a network: log-probs of what was sampled, and values before it.

One forward pass per pack, whose tree shares every prefix. Positions and the attention mask are the tree's, so each
sample sees what it would see alone. No loss, no state.

Shapes: T tokens of a pack's tree, N sampled tokens, U distinct rows of logits of a pack, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cotrain.batch import Pack


def sampled_logprobs(
    network: torch.nn.Module,
    part: Pack,
    temperatures: Mapping[str, float],
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) of a pack's sampled tokens, float32: log_softmax(logits / T) at the agent's temperature.

    An agent without an entry, or with 0 (greedy), has T = 1. Logits exist only where a token was sampled, and once for
    siblings that share a predecessor. `parameters`, by name, take the place of the network's own for this call.
    Entropy carries no gradient.
    """
    inputs, device = _inputs(network, part), next(network.parameters()).device
    scale = [temperatures.get(agent, 1.0) or 1.0 for agent in part.agents]
    distinct = sorted(set(scale))
    kind_N = np.array([distinct.index(t) for t in scale])[part.trajectory_N]
    rows_U, row_N = np.unique(part.predict_N * len(distinct) + kind_N, return_inverse=True)
    inputs["logits_to_keep"] = tensor_of(rows_U // len(distinct), device)
    output = torch.func.functional_call(network, dict(parameters or {}), (), inputs)
    logits_UV = output.logits[0].float()
    if distinct != [1.0]:
        logits_UV = logits_UV / tensor_of(np.array(distinct)[rows_U % len(distinct)], device)[:, None]
    logprobs_UV = torch.log_softmax(logits_UV, dim=-1)
    rows = tensor_of(row_N, device)
    return logprobs_UV[rows, tensor_of(part.targets_N, device)], _entropy(logprobs_UV.detach())[rows]


def values(backbone: torch.nn.Module, head: torch.nn.Linear, part: Pack, *, head_only: bool = False) -> Tensor:
    """values_N, float32: the head's reading of the hidden state from which each sampled token was predicted.

    `head_only`: no gradient reaches the backbone.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not head_only):
        hidden_TH = backbone(**_inputs(backbone, part)).last_hidden_state[0]
    rows_U, row_N = np.unique(part.predict_N, return_inverse=True)
    values_U = head(hidden_TH[tensor_of(rows_U, hidden_TH.device)].float())[:, 0]
    found: Tensor = values_U[tensor_of(row_N, hidden_TH.device)]
    return found


def _inputs(network: torch.nn.Module, part: Pack) -> dict[str, object]:
    """What any network of transformers is called with."""
    like = next(network.parameters())
    device, mask = like.device, None
    if part.mask_TT is not None:  # additive, because only some attention kernels understand a boolean one
        blocked_TT = tensor_of(~part.mask_TT, device)
        mask = torch.zeros_like(blocked_TT, dtype=like.dtype).masked_fill_(blocked_TT, torch.finfo(like.dtype).min)
    return {
        "input_ids": tensor_of(part.token_ids_T, device)[None],
        "position_ids": tensor_of(part.positions_T, device)[None],
        "attention_mask": None if mask is None else mask[None, None],
        "use_cache": False,
    }


def _entropy(logprobs_UV: Tensor) -> Tensor:
    # In slices, because a whole temporary the size of the logits would set the peak of the memory.
    return -torch.cat([(part.exp() * part).sum(-1) for part in torch.split(logprobs_UV, 64)])


def tensor_of(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on a device; floats as float32."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    return tensor.float() if tensor.is_floating_point() else tensor
