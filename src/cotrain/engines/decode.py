"""The rows that are being sampled together, and the step that gives each of them one more token.

Guarantees: prompts that are admitted together go through the network as prefix trees, so what they share is computed
once; rows that end make room at once; between steps the network is as it was found, training mode included.
Does not wait, order or schedule: who is admitted when is the engine's business.

Legend: B rows, V vocabulary, T tokens of a tree, N layers, H heads, P tokens of a prompt, D head size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from cotrain.engines.base import Request
from cotrain.engines.draw import draw
from cotrain.engines.kv import KVSlots
from cotrain.engines.waves import cut_at_stop
from cotrain.errors import InfrastructureError
from cotrain.packing import packs, prefix_tree, tree_mask
from cotrain.render import Tokenizer
from cotrain.types import Completion, Stop

TOKENS_PER_PREFILL = 512
"""Prompt tokens that go through the network at once: enough to keep it busy; attention costs the square of it."""


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way: how much it may sample, what it has sampled, what came of it and who waits for it."""

    request: Request
    future: asyncio.Future[Completion]
    room: int
    noise_N: NDArray[np.float64]
    version: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outcome: Completion | InfrastructureError | None = None

    @property
    def is_over(self) -> bool:
        """True when nothing is left to do: it has an outcome, or its caller was cancelled."""
        return self.outcome is not None or self.future.done()

    def deliver(self) -> None:
        """Hand the outcome to the caller, if it still waits."""
        if self.future.done():
            return
        if isinstance(self.outcome, Completion):
            self.future.set_result(self.outcome)
        elif self.outcome is not None:
            self.future.set_exception(self.outcome)


class Batch:
    """Rows in slots 0..B-1, stepped together.

    Args:
        network: a transformers causal language model, or one wrapped by peft.
        tokenizer: decodes what was sampled.
        end_ids: ids that end a completion.
        most_rows, most_tokens: bounds of the batch and of one row.

    Attributes:
        tokens_computed: tokens that went through the network.
    """

    def __init__(
        self, network: nn.Module, tokenizer: Tokenizer, end_ids: frozenset[int], most_rows: int, most_tokens: int
    ) -> None:
        self.network, self.tokenizer, self.end_ids = network, tokenizer, end_ids
        self.device = next(network.parameters()).device
        self.rows: list[Row] = []
        self.tokens_computed = 0
        self._slots = KVSlots(most_rows, most_tokens)

    def step(self, fresh: Sequence[Row]) -> list[Row]:
        """Admit rows, sample one token for every row, and take out the rows that are over.

        Returns:
            The rows that are over, in no meaningful order. If the step raises, all rows are still in `rows`.
        """
        num_old = len(self.rows)
        self.rows += fresh
        with sampling_mode(self.network):
            logits = [self._decode(num_old)] if num_old else []
            if fresh:
                logits.append(self._prefill(num_old))
            self._sample(torch.cat(logits))
        return self._take_out()

    def _decode(self, num_rows: int) -> Tensor:
        """Logits after the last sampled token of the first rows, [B, V]."""
        rows = self.rows[:num_rows]
        lengths = [len(row.request.prompt_ids) + len(row.token_ids) - 1 for row in rows]
        self._slots.fit(num_rows, max(lengths) + 1)
        positions_B1, mask_B11L = self._slots.begin(lengths, self.device)
        ids_B1 = torch.tensor([[row.token_ids[-1]] for row in rows], device=self.device)
        return self._forward(ids_B1, positions_B1, mask_B11L, self._slots, keep=1)[:, 0]

    def _prefill(self, first: int) -> Tensor:
        """Logits after the prompts of all rows from `first` on, [B, V]; leaves their keys and values in the slots."""
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, row in enumerate(self.rows[first:], start=first):
            slots.setdefault(row.request.prompt_ids, []).append(slot)
        self._slots.fit(len(self.rows), max(_first_capacity(row) for row in self.rows[first:]))
        prompts = list(slots)
        logits_BV: list[Tensor] = [torch.empty(0)] * (len(self.rows) - first)
        for pack in packs(prompts, TOKENS_PER_PREFILL):
            tree = prefix_tree([prompts[index] for index in pack])
            mask_TT = None if tree.is_chain else torch.from_numpy(tree_mask(tree)).to(self.device)[None, None]
            ids_1T, positions_1T = (self._tensor(a)[None] for a in (tree.token_ids_T, tree.positions_T))
            ends = self._tensor(np.array([path[-1] for path in tree.paths]))
            cache = DynamicCache()
            logits = self._forward(ids_1T, positions_1T, mask_TT, cache, keep=ends)[0]
            for index, path, logits_V in zip(pack, map(self._tensor, tree.paths), logits, strict=True):
                keys_NHPD = torch.stack([layer.keys[0].index_select(1, path) for layer in cache.layers])
                values_NHPD = torch.stack([layer.values[0].index_select(1, path) for layer in cache.layers])
                self._slots.put(keys_NHPD, values_NHPD, slots[prompts[index]])
                for slot in slots[prompts[index]]:
                    logits_BV[slot - first] = logits_V
        return torch.stack(logits_BV)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVSlots | DynamicCache, keep: int | Tensor
    ) -> Tensor:
        self.tokens_computed += ids.numel()
        output = self.network(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits

    def _sample(self, logits_BV: Tensor) -> None:
        params = [row.request.params for row in self.rows]
        ids_B, logprobs_B = draw(
            logits_BV,
            torch.tensor([p.temperature for p in params], device=self.device),
            torch.tensor([p.top_p for p in params], device=self.device),
            self._tensor(np.array([row.noise_N[len(row.token_ids)] for row in self.rows])),
        )
        for row, id, logprob in zip(self.rows, ids_B.tolist(), logprobs_B.tolist(), strict=True):
            row.token_ids.append(id)
            row.logprobs.append(logprob)
            row.outcome = self._outcome(row)

    def _outcome(self, row: Row) -> Completion | InfrastructureError | None:
        """What came of a row with its newest token, or None if it goes on."""
        if np.isnan(row.logprobs[-1]):
            found = f"the logits of its token {len(row.token_ids) - 1} are not finite"
            return InfrastructureError(f"request {row.request.key}", found, "Look for weights that are not finite")
        ended = row.token_ids[-1] in self.end_ids
        stops = row.request.params.stop
        if not ended and not stops and len(row.token_ids) < row.room:
            return None
        text = self.tokenizer.decode(row.token_ids[: -1 if ended else None], skip_special_tokens=True)
        cut = None if ended else cut_at_stop(text, stops)
        if not ended and cut is None and len(row.token_ids) < row.room:
            return None
        stop: Stop = "stop" if ended or cut else "length"
        return Completion(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            version=row.version,
            stop=stop,
            text=cut[0] if cut else text,
        )

    def _take_out(self) -> list[Row]:
        over: list[Row] = []
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].is_over:
                over.append(self.rows[slot])
                # The last row fills the gap: one slot is copied, however large the batch.
                last = self.rows.pop()
                if slot < len(self.rows):
                    self._slots.move(len(self.rows), slot)
                    self.rows[slot] = last
        return over

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _first_capacity(row: Row) -> int:
    """Slot length for a new row: all it may sample, unless that is much more than it is likely to."""
    length = len(row.request.prompt_ids)
    return length + min(row.room, length + 64)


@contextmanager
def sampling_mode(network: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode; afterwards as before."""
    training = [module for module in network.modules() if module.training]
    if training:
        network.eval()
    try:
        # Not inference_mode: a network that caches a tensor during its forward could not be trained afterwards.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
