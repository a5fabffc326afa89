"""Chat messages to token ids: the only code that tokenises.

A `Renderer` belongs to one model. What an engine samples is never tokenised again: in an episode the next prompt is
the last one, the sampled ids and what the template writes up to the next reply. Only that, prompts and demonstrations
pass through here. Guarantees: control tokens come from the chat template alone, so nothing that a passage, a tool or
another agent writes can open a role or end a turn; where contents hold no control token, the ids equal those of the
template's output tokenised as one string, but for what `templates.py` says of trimmed new lines.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cotrain.errors import ModelError
from cotrain.templates import (
    FALLBACK_TEMPLATE,
    Backend,
    Piece,
    Shape,
    Slot,
    Tokenizer,
    any_of,
    control_tokens,
    end_of_turn,
    fast,
    fill,
    has_native_tools,
    skeleton,
    unusable,
)
from cotrain.types import Completion

__all__ = ["FALLBACK_TEMPLATE", "Renderer", "Tokenizer", "end_of_turn"]

_THOUGHT = ("<think>", "</think>")
_TAGS = frozenset((*_THOUGHT, "<tool_call>", "</tool_call>"))  # parts of a reply, even where they are special tokens


@dataclass(frozen=True, slots=True)
class _Controls:
    """A tokenizer's control tokens by name: their ids, and their aliases (see `_aliased`), which `pattern` finds.

    `silent` are the special ones: those that end or frame messages and have no place in a text.
    """

    ids: Mapping[str, int]
    aliases: Mapping[str, str]
    pattern: re.Pattern[str]
    silent: frozenset[int]

    def swap(self, text: str) -> str:
        """The text with the aliases of the control tokens that it names."""
        return any_of(self.ids).sub(lambda m: self.aliases[m.group()], text) if self.ids else text

    def found(self, text: str) -> list[int]:
        """The ids of the control tokens in a text with aliases."""
        return [int(id) for id in self.pattern.findall(text)]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Turns messages into prompt ids for one tokenizer.

    `end_id` is the token that ends an assistant's message in the chat template (`<|im_end|>`, `<|eot_id|>`, ...), or
    the tokenizer's eos. `native_tools`: the template lists tools and teaches calls as JSON in `<tool_call>` tags.
    `opens_thought`: it begins a reply inside `<think>`. Making a renderer costs about a second for a vocabulary of
    150,000; keep it.

    Raises:
        ModelError: the tokenizer has no fast backend, no end token, or a template that cannot be used.
    """

    tokenizer: Tokenizer
    end_id: int = field(init=False)
    native_tools: bool = field(init=False)
    opens_thought: bool = field(init=False)
    _backend: Backend = field(init=False, repr=False, compare=False)
    _controls: _Controls = field(init=False, repr=False, compare=False)
    _skeletons: dict[tuple[Shape, tuple[str | None, ...]], tuple[Piece, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        backend, controls = _aliased(fast(self.tokenizer))
        for name, value in (("_backend", backend), ("_controls", controls), ("_skeletons", {})):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "end_id", end_of_turn(self.tokenizer))
        object.__setattr__(self, "native_tools", has_native_tools(self.tokenizer))
        object.__setattr__(self, "opens_thought", self._opens_thought())

    def render(self, messages: Sequence[tuple[str, str]], tools: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """The ids of a prompt: (role, content) messages, then the opening of the assistant's reply.

        `tools` are (name, what it does) pairs for the template to list; without `native_tools` they are left out.

        Raises:
            ModelError: the chat template refuses these roles, or drops or alters a content.
        """
        listed = tools if self.native_tools else ()
        contents = [content for _, content in messages] + [text for tool in listed for text in tool]
        return self.encode(fill(self._pieces(messages, listed), contents))

    def extend(self, prompt_ids: tuple[int, ...], completion: Completion, results: Sequence[str]) -> tuple[int, ...]:
        """The next prompt of an episode: all ids so far as they are, the results, and the opening of the next reply.

        The ids in between are those that the template writes from the end of the assistant's content on. Its end
        token is among them unless the completion ended with it, or with another token that ends a reply. The results,
        at least one, are a `tool` message each with `native_tools`, else one user message, joined by new lines.

        Raises:
            ModelError: the chat template has no such messages, or drops or alters a content.
        """
        contents = list(results) if self.native_tools else ["\n".join(results)]
        role = "tool" if self.native_tools else "user"
        messages = [("user", "x"), ("assistant", "x"), *((role, content) for content in contents)]
        pieces = self._pieces(messages)
        said = max(i for i, piece in enumerate(pieces) if isinstance(piece, Slot) and piece.index == 1)
        rest = pieces[said + 1 :]
        if {p.index for p in rest if isinstance(p, Slot)} != {i for i, c in enumerate(contents, 2) if c.strip()}:
            shape = tuple((role, None) for role, _ in messages)
            raise unusable(self.tokenizer, shape, "does not write them in their order")
        ids = self.encode(fill(rest, [content for _, content in messages]))
        head = rest[0]  # what follows the reply at once: only there does an end token end the reply
        end = self._controls.found(head)[:1] if isinstance(head, str) else []
        if end and end[0] in (self.end_id, self.tokenizer.eos_token_id) and self._is_ended(completion):
            ids = ids[ids.index(end[0]) + 1 :]
        return (*prompt_ids, *completion.token_ids, *ids)

    def reply(self, completion: Completion) -> str:
        """The text of a completion without its thoughts, stripped: all up to the last `</think>` token is thought.

        Thought that is still open at the end leaves "". Stop strings are left out, as in the completion's own text.
        """
        ids = list(completion.token_ids)
        opening, closing = map(self._controls.ids.get, _THOUGHT)
        if closing in ids:
            ids = ids[len(ids) - ids[::-1].index(closing) :]
        elif self.opens_thought:
            return ""
        if opening in ids:
            return ""
        shown = [id for id in ids if id not in self._controls.silent]  # `decode` may leave out the tags of calls
        text, whole = self.tokenizer.decode(shown, skip_special_tokens=False), self.decode(completion.token_ids)
        if completion.stop == "stop" and not self._is_ended(completion) and whole.startswith(completion.text):
            text = text.removesuffix(whole[len(completion.text) :])
        return text.strip()

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of plain text: never a control token, whatever the text says."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def demonstration(self, text: str) -> tuple[int, ...]:
        """The ids of a reply as the model should sample it after `render`: the text, then the end token.

        Where the template opens a thought, the reply closes it first, empty.
        """
        closing = f"{self._controls.aliases['</think>']}\n\n" if self.opens_thought else ""
        return (*self.encode(closing + text), self.end_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, without control tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _pieces(self, messages: Sequence[tuple[str, str]], tools: Sequence[tuple[str, str]] = ()) -> tuple[Piece, ...]:
        """The template's skeleton for these messages, with aliases for its control tokens."""
        # A blank content goes through the template as it is: it is harmless, and templates may leave out empty ones.
        shape = tuple((role, None if content.strip() else content) for role, content in messages)
        abouts = tuple(None if about.strip() else about for _, about in tools)
        pieces = self._skeletons.get((shape, abouts))
        if pieces is None:
            plain = skeleton(self.tokenizer, shape, abouts)
            pieces = tuple(self._controls.swap(p) if isinstance(p, str) else p for p in plain)
            self._skeletons[shape, abouts] = pieces
        return pieces

    def _opens_thought(self) -> bool:
        """Whether the template leaves a `<think>` open where the reply begins."""
        try:
            opening = self._pieces([("user", "x")])[-1]
        except ModelError:
            return False  # `render` will say so of the roles that are really used
        opens, closes = map(self._controls.ids.get, _THOUGHT)
        if opens is None or closes is None or not isinstance(opening, str):
            return False
        return [id for id in self._controls.found(opening) if id in (opens, closes)][-1:] == [opens]

    def _is_ended(self, completion: Completion) -> bool:
        """Whether an end token was sampled last, be it the template's, eos or another that the engine stopped at."""
        last = completion.token_ids[-1:]
        if not last:
            return False
        stopped = completion.stop == "stop" and last[0] in self._controls.silent
        return stopped or last[0] in (self.end_id, self.tokenizer.eos_token_id)


def _aliased(backend: Backend) -> tuple[Backend, _Controls]:
    """A copy of a tokenizer whose control tokens have unguessable names, and the name of each.

    Only the names differ, so encoding a template's output with the names swapped in gives the very ids of the
    original, while a content that spells a control token out is nothing but text.
    """
    from tokenizers import Tokenizer as FastTokenizer

    state = json.loads(backend.to_str())
    nonce = secrets.token_hex(8)
    tokens = control_tokens(state)
    aliases = {token["content"]: f"<|{nonce}:{token['id']}|>" for token in tokens}
    ids = {token["content"]: int(token["id"]) for token in tokens}
    silent = frozenset(int(token["id"]) for token in tokens if token["special"] and token["content"] not in _TAGS)
    for token in tokens:
        token["content"] = aliases[token["content"]]
    _rename(state["model"], aliases)
    # Left behind by earlier calls, these would cut or pad prompts; a post-processor would add tokens of its own.
    state.update(truncation=None, padding=None, post_processor=None)
    copy: Backend = FastTokenizer.from_str(json.dumps(state))
    for name, alias in aliases.items():
        if copy.token_to_id(alias) != backend.token_to_id(name):
            raise ModelError(
                f"tokenizer token {name}", "its id cannot be kept apart from text", "Use another tokenizer"
            )
    return copy, _Controls(ids, aliases, re.compile(rf"<\|{nonce}:(\d+)\|>"), silent)


def _rename(model: dict[str, object], aliases: Mapping[str, str]) -> None:
    """Rename control tokens in a tokenizer's vocabulary, and drop the merges that would build one from text."""
    vocab, merges, unknown = model.get("vocab"), model.get("merges"), model.get("unk_token")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(token, token): id for token, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[aliases.get(token, token), score] for token, score in vocab]
    if isinstance(merges, list):
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
        model["merges"] = [list(p) for p in pairs if not {*p, "".join(p)} & aliases.keys()]
    if isinstance(unknown, str):
        model["unk_token"] = aliases.get(unknown, unknown)
