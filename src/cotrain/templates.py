"""What a chat template writes around contents, and what cotrain asks of a tokenizer.

A `skeleton` is a template's output with slots in place of the contents: the template sees placeholders, so it cannot
branch on what a content says, and its own text is known apart from everybody else's. Everything that differs between
models' formats is read off skeletons; nothing here is written for one model. One that alters contents other than by
trimming white space at their ends, or drops one, is refused; where it trims new lines alone, contents keep them.
Nothing here tokenises (`render.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cotrain.errors import ModelError

FALLBACK_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For base models, which bring no chat template: `User: ...`, a blank line, `Assistant:`; an answer ends with eos."""

_PROBE = "\u2003"  # a space that templates do not write: what is left of it tells whether a content's ends are trimmed
_SAMPLE = " Two\nlines, \"quoted\" & <b>Bold</b> 'x' "
_SLOT = re.compile(f"({_PROBE}?)\ue000(\\d+)\ue001({_PROBE}?)")
_NATIVE = re.compile(r"<tool_call>\s*\{\s*[\"']")  # JSON inside: other templates put formats of their own there


class Encoding(Protocol):
    """What a fast tokenizer returns."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        ...


class Backend(Protocol):
    """The part of a `tokenizers.Tokenizer` that cotrain uses."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding:
        """Text to ids."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a token."""
        ...

    def to_str(self) -> str:
        """The whole tokenizer as JSON."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that cotrain uses."""

    eos_token_id: int | None
    chat_template: str | None

    @property
    def backend_tokenizer(self) -> Backend:
        """The fast tokenizer inside."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        tools: Sequence[dict[str, object]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str:
        """Messages to the text of a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one content in a template's output: a message's, or a tool's name or description."""

    index: int
    trim_left: bool
    trim_right: bool
    escape: bool = False

    def fill(self, content: str) -> str:
        """The content as the template would write it here."""
        content = content.lstrip() if self.trim_left else content
        content = content.rstrip() if self.trim_right else content
        return json.dumps(content, ensure_ascii=False)[1:-1] if self.escape else content


Piece = str | Slot
Shape = tuple[tuple[str, str | None], ...]
"""The role of each message, and its content if that is blank: templates may leave out empty ones."""


def skeleton(
    tokenizer: Tokenizer, shape: Shape, abouts: Sequence[str | None] = (), *, reply: bool = True
) -> tuple[Piece, ...]:
    """A template's output for messages of this shape: its own text, and slots; it begins and ends with text.

    Message i has the slot i; behind the messages come the slots of each tool's name and description. `abouts` has an
    entry per tool: the description if it is blank. `reply`: with the opening of the assistant's next message.

    Raises:
        ModelError: the template refuses these roles or tools, or drops or alters a content.
    """
    blanks = [blank for _, blank in shape] + [blank for about in abouts for blank in (None, about)]
    marks = [f"{_PROBE}\ue000{i}\ue001{_PROBE}" if blank is None else blank for i, blank in enumerate(blanks)]
    samples = [_SAMPLE if blank is None else blank for blank in blanks]
    samples[len(shape) :: 2] = ["name"] * len(abouts)
    text = _apply(tokenizer, shape, marks, reply)
    pieces: list[Piece] = []
    start = 0
    for match in _SLOT.finditer(text):
        slot = Slot(int(match[2]), trim_left=not match[1], trim_right=not match[3], escape=int(match[2]) >= len(shape))
        pieces += [text[start : match.start()], slot]
        start = match.end()
    pieces.append(text[start:])
    expected = _apply(tokenizer, shape, samples, reply)
    if fill(pieces, samples) != expected:
        # Most templates write tools as JSON, some as plain text.
        pieces = [p if isinstance(p, str) else replace(p, escape=False) for p in pieces]
        if fill(pieces, samples) != expected:
            raise unusable(tokenizer, shape, "alters the content of a message")
    kept = {piece.index for piece in pieces if isinstance(piece, Slot)}
    for i, blank in enumerate(blanks):
        if blank is None and i not in kept:
            what = f"message {i} (role '{shape[i][0]}')" if i < len(shape) else "a tool"
            raise unusable(tokenizer, shape, f"drops {what}")
    return tuple(pieces)


def fill(pieces: Sequence[Piece], contents: Sequence[str]) -> str:
    """A template's output with these contents in its slots."""
    return "".join(p if isinstance(p, str) else p.fill(contents[p.index]) for p in pieces)


def has_native_tools(tokenizer: Tokenizer) -> bool:
    """Whether the template lists tools, asks for calls as JSON in `<tool_call>` tags, and takes `tool` messages."""
    shape: Shape = (("user", None), ("assistant", None), ("tool", None))
    try:
        pieces = skeleton(tokenizer, shape, (None,))
    except ModelError:
        return False
    return bool(_NATIVE.search("".join(p for p in pieces if isinstance(p, str))))


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The id of the token that the chat template writes after an assistant's content; else eos.

    Raises:
        ModelError: the template writes none and the tokenizer has no eos token.
    """
    tokens = {token["content"]: token["id"] for token in control_tokens(json.loads(fast(tokenizer).to_str()))}
    try:
        pieces = skeleton(tokenizer, (("user", None), ("assistant", None)), reply=False)
    except ModelError:
        pieces = ()  # a template without assistant messages still has a generation prompt
    tail = pieces[-1] if pieces else ""
    found = any_of(tokens).search(tail) if isinstance(tail, str) and tokens else None
    end_id = tokens[found.group()] if found else tokenizer.eos_token_id
    if end_id is None:
        raise ModelError(
            tokenizer_name(tokenizer), "no token ends a turn", "Set eos_token in its tokenizer_config.json"
        )
    return int(end_id)


def control_tokens(state: Mapping[str, list[dict[str, object]]]) -> list[dict[str, str]]:
    """The added tokens that steer a model: special ones, and those with punctuation, such as `<think>`.

    Other added tokens are words or runs of spaces, which contents may well hold.
    """
    return [
        token  # type: ignore[misc]
        for token in state["added_tokens"]
        if token["special"] or not all(c.isalnum() or c.isspace() for c in str(token["content"]))
    ]


def any_of(names: Mapping[str, object]) -> re.Pattern[str]:
    """Matches the leftmost, longest of the names, as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _apply(tokenizer: Tokenizer, shape: Shape, contents: Sequence[str], reply: bool) -> str:
    from jinja2 import TemplateError

    messages = [{"role": role, "content": content} for (role, _), content in zip(shape, contents, strict=False)]
    named = contents[len(shape) :]
    tools = [_schema(name, about) for name, about in zip(named[::2], named[1::2], strict=True)]
    template = None if tokenizer.chat_template else FALLBACK_TEMPLATE
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, chat_template=template, tokenize=False, add_generation_prompt=reply
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # jinja passes these through
        raise unusable(tokenizer, shape, f"refuses them: {error}") from None


def _schema(name: str, about: str) -> dict[str, object]:
    """A tool of one string argument, as chat templates want it."""
    argument = {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": argument}}


def fast(tokenizer: Tokenizer) -> Backend:
    """The fast tokenizer inside, which everything here needs."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise ModelError(tokenizer_name(tokenizer), "no fast tokenizer inside", "Save the model with a tokenizer.json")
    return backend  # type: ignore[no-any-return]


def unusable(tokenizer: Tokenizer, shape: Shape, found: str) -> ModelError:
    """The error of a template that cannot be used for messages of this shape."""
    roles = ", ".join(role for role, _ in shape)
    fix = "Use other roles (a system prompt can go into the user message), or give the model another chat template"
    return ModelError(tokenizer_name(tokenizer), f"its chat template, given messages of roles [{roles}], {found}", fix)


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """What errors call a tokenizer."""
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
