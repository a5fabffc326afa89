"""Keys and values of the rows that are being sampled, in slots that are written in place.

Guarantees: nothing is concatenated per step; rows lie in slots 0..B-1, so a finished row costs nothing; what lies
beyond a row's length in its slot is finite. Serves transformers models whose layers all attend to the whole past with
one number of heads and one head size (Llama, Qwen2, Qwen3, SmolLM2).

Legend: N layers, B rows, H heads of keys and values, L tokens, D head size, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVSlots:
    """What a decode step hands to the network as its cache: one slot a row.

    Args:
        most_rows, most_tokens: how far the slots may grow.
    """

    def __init__(self, most_rows: int, most_tokens: int) -> None:
        self._most = (most_rows, most_tokens)
        self._size = (0, 0)
        self._kv: Tensor | None = None  # [N, 2, B, H, L, D]
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows_B = self._lengths_B = torch.empty(0, dtype=torch.int64)
        self._longest = 0

    def fit(self, num_rows: int, num_tokens: int) -> None:
        """Make room; what has to grow at least doubles, so that growing stays rare."""
        wanted = (num_rows, num_tokens)
        grown = [
            now if now >= need else min(max(2 * now, need), most)
            for now, need, most in zip(self._size, wanted, self._most, strict=True)
        ]
        rows, tokens = self._size
        self._size = (grown[0], grown[1])
        if self._kv is not None and self._size != (rows, tokens):
            old = self._kv
            self._allocate(old[:, 0, 0], old.shape[0])
            self._kv[:, :, :rows, :, :tokens] = old
            self._kv[:, :, :rows, :, tokens:] = 0

    def _allocate(self, like_NHPD: Tensor, num_layers: int) -> None:
        _, heads, _, size = like_NHPD.shape
        self._kv = like_NHPD.new_empty((num_layers, 2, self._size[0], heads, self._size[1], size))
        self._layers = [(layer[0], layer[1]) for layer in self._kv]

    def put(self, keys_NHPD: Tensor, values_NHPD: Tensor, rows: Sequence[int]) -> None:
        """Write one prompt's keys and values into the slots of all rows that continue it (`fit` them before)."""
        if self._kv is None:
            self._allocate(keys_NHPD, len(keys_NHPD))
        assert self._kv is not None
        length = keys_NHPD.shape[2]
        for row in rows:
            self._kv[:, 0, row, :, :length] = keys_NHPD
            self._kv[:, 1, row, :, :length] = values_NHPD
            self._kv[:, :, row, :, length:] = 0  # a masked NaN of an earlier row would still spread: 0 * NaN = NaN

    def move(self, source: int, target: int) -> None:
        """Let the row in slot `source` go on in slot `target`, whose row has ended."""
        assert self._kv is not None
        self._kv[:, :, target] = self._kv[:, :, source]

    def begin(self, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Prepare a step that adds one token to each of the first B rows.

        Args:
            lengths: tokens in each row's slot so far.
            device: where the network is.

        Returns:
            positions_B1 of the new tokens, and mask_B11L, True where a row may attend: its own tokens and the new one.
        """
        self._longest = max(lengths) + 1
        self._lengths_B = torch.tensor(lengths, device=device)
        self._rows_B = torch.arange(len(lengths), device=device)
        mask_BL = torch.arange(self._longest, device=device) <= self._lengths_B[:, None]
        return self._lengths_B[:, None], mask_BL[:, None, None]

    def update(
        self, keys_BH1D: Tensor, values_BH1D: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; gives all up to the longest row, [B, H, L, D]. transformers calls this."""
        keys_BHLD, values_BHLD = self._layers[layer_idx]
        keys_BHLD[self._rows_B, :, self._lengths_B] = keys_BH1D[:, :, 0]
        values_BHLD[self._rows_B, :, self._lengths_B] = values_BH1D[:, :, 0]
        num_rows = len(self._rows_B)
        return keys_BHLD[:num_rows, :, : self._longest], values_BHLD[:num_rows, :, : self._longest]
