"""Drawing tokens from logits, with noise that belongs to the request and not to the batch.

Guarantees: equal keys draw equal noise, whatever runs beside them; recorded log-probs are those of the whole
distribution at the sampling temperature, before any top-p cut.
Does not decide when a completion ends.

Legend: B rows, V vocabulary, K blocks of S tokens, N tokens of one request.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


def noise(key: tuple[str | int, ...], count: int) -> NDArray[np.float64]:
    """One uniform number in [0, 1) for each of a request's `count` tokens, [N].

    They come from Philox, a counter-based generator, keyed by a hash of `key`; fewer are the first of more.
    """
    name = repr([part if isinstance(part, str) else int(part) for part in key])
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def draw(logits_BV: Tensor, temperatures_B: Tensor, top_p_B: Tensor, noise_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row by inverting the distribution function at the row's noise.

    Args:
        logits_BV: what the network says, any float type.
        temperatures_B: float32; 0 takes the likeliest token, and its log-prob is then recorded at temperature 1.
        top_p_B: float32 in (0, 1]; below 1 only the likeliest tokens that reach this mass may be drawn (at least one).
        noise_B: float64 in [0, 1).

    Returns:
        ids_B (int64) and logprobs_B (float32): log_softmax(logits / temperature) at the drawn ids. A row whose logits
        contain NaN or +inf has the log-prob NaN and no meaningful id.
    """
    greedy_B = temperatures_B == 0
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperatures_B.masked_fill(greedy_B, 1.0)[:, None], dim=-1)
    probs_BV = logprobs_BV.exp()
    cut_B = (top_p_B < 1) & ~greedy_B
    if bool(cut_B.any()):
        probs_BV[cut_B] = _nucleus(probs_BV[cut_B], top_p_B[cut_B])
    ids_B = _invert(probs_BV, noise_B)
    if bool(greedy_B.any()):
        ids_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), ids_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


def _nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Probabilities with everything outside the likeliest `top_p` set to 0."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1, dtype=torch.float64) - sorted_BV
    dropped_BV = before_BV >= top_p_B[:, None].double()
    dropped_BV[:, 0] = False
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV.masked_fill(dropped_BV, 0.0))


def _invert(weights_BV: Tensor, noise_B: Tensor) -> Tensor:
    """The first index per row at which the sum of weights exceeds noise times their total, summed in float64.

    In two levels, blocks of the vocabulary and then tokens of one block: a float64 sum over all of it takes longer.
    """
    num_rows, size = len(weights_BV), 256
    blocks_BKS = functional.pad(weights_BV, (0, -weights_BV.shape[1] % size)).view(num_rows, -1, size)
    sums_BK = blocks_BKS.sum(dim=-1, dtype=torch.float64)
    block_B, rest_B = _locate(sums_BK, noise_B * sums_BK.sum(dim=-1))
    token_B, _ = _locate(blocks_BKS[torch.arange(num_rows, device=block_B.device), block_B].double(), rest_B)
    return (block_B * size + token_B).clamp(max=weights_BV.shape[1] - 1)  # NaN would lead into the padding


def _locate(weights_BK: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which the running sum exceeds the target, and what the sum before it leaves of the target."""
    sums_BK = weights_BK.cumsum(dim=-1)
    # Rounding must not lift a target onto the total, where no weight would be left to take it.
    targets_B = torch.minimum(targets_B, torch.nextafter(sums_BK[:, -1], torch.zeros_like(targets_B)))
    index_B1 = torch.searchsorted(sums_BK, targets_B[:, None], right=True).clamp(max=sums_BK.shape[1] - 1)
    before_B1 = sums_BK.gather(1, index_B1) - weights_BK.gather(1, index_B1)
    return index_B1[:, 0], (targets_B - before_B1[:, 0]).clamp(min=0)
