"""Chat messages to token ids: the only code that tokenises.

A `Renderer` belongs to one model. What an engine samples is never tokenised again; only prompts and the demonstrations
of a warm-up pass through here. Control tokens inside values are plain text to the tokenizer, so nothing that a
passage or another agent writes can open a role or end a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cotrain.errors import ModelError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that cotrain uses."""

    eos_token_id: int | None
    all_special_ids: Sequence[int]

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Messages to the text of a prompt."""
        ...
