"""Chat messages to token ids: the only code that tokenises.

A `Renderer` belongs to one model. What an engine samples is never tokenised again; only prompts and the demonstrations
of a warm-up pass through here. Guarantees: control tokens come from the chat template alone, so nothing that a passage
or another agent writes can open a role or end a turn; where contents hold no control token, the ids equal those of the
template's output tokenised as one string. A template sees a placeholder in place of every content, so it cannot branch
on what a content says; one that alters contents other than by trimming their ends is refused.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str:
        """Messages to the text of a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of one message's content in a template's output."""

    index: int
    trim_left: bool
    trim_right: bool

    def fill(self, content: str) -> str:
        content = content.lstrip() if self.trim_left else content
        return content.rstrip() if self.trim_right else content


_Piece = str | _Slot
_Shape = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Turns messages into prompt ids for one tokenizer.

    `end_id` is the token that ends an assistant's message in the chat template (`<|im_end|>`, `<|eot_id|>`, ...), or
    the tokenizer's eos. Making a renderer costs about a second for a vocabulary of 150,000; keep it.

    Raises:
        ModelError: the tokenizer has no fast backend, no end token, or a template that cannot be used.
    """

    tokenizer: Tokenizer
    end_id: int = field(init=False)
    _backend: Backend = field(init=False, repr=False, compare=False)
    _aliases: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _skeletons: dict[_Shape, tuple[_Piece, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        backend, aliases = _aliased(_fast(self.tokenizer))
        for name, value in (("_backend", backend), ("_aliases", aliases), ("_skeletons", {})):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "end_id", end_of_turn(self.tokenizer))

    def render(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The ids of a prompt: (role, content) messages, then the opening of the assistant's reply.

        Raises:
            ModelError: the chat template refuses these roles, or drops or alters a content.
        """
        # A blank content goes through the template as it is: it is harmless, and templates may leave out empty ones.
        shape = tuple((role, None if content.strip() else content) for role, content in messages)
        pieces = self._skeletons.get(shape)
        if pieces is None:
            pieces = self._skeletons[shape] = _aliased_pieces(_skeleton(self.tokenizer, shape), self._aliases)
        text = "".join(p if isinstance(p, str) else p.fill(messages[p.index][1]) for p in pieces)
        return self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of plain text: never a control token, whatever the text says."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def demonstration(self, text: str) -> tuple[int, ...]:
        """The ids of a reply as the model should sample it after `render`: the text, then the end token."""
        return (*self.encode(text), self.end_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, without control tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The id of the token that the chat template writes after an assistant's content; else eos.

    Raises:
        ModelError: the template writes none and the tokenizer has no eos token.
    """
    tokens = {token["content"]: token["id"] for token in _control_tokens(json.loads(_fast(tokenizer).to_str()))}
    try:
        pieces = _skeleton(tokenizer, (("user", None), ("assistant", None)), reply=False)
    except ModelError:
        pieces = ()  # a template without assistant messages still has a generation prompt
    tail = pieces[-1] if pieces else ""
    found = _any_of(tokens).search(tail) if isinstance(tail, str) and tokens else None
    end_id = tokens[found.group()] if found else tokenizer.eos_token_id
    if end_id is None:
        raise ModelError(_name(tokenizer), "no token ends a turn", "Set eos_token in its tokenizer_config.json")
    return int(end_id)


def _skeleton(tokenizer: Tokenizer, shape: _Shape, reply: bool = True) -> tuple[_Piece, ...]:
    """The template's output for messages of this shape, as its own text and the slots of the contents."""
    marks = [f"{_PROBE}\ue000{i}\ue001{_PROBE}" if blank is None else blank for i, (_, blank) in enumerate(shape)]
    text = _apply_template(tokenizer, shape, marks, reply)
    pieces: list[_Piece] = []
    start = 0
    for match in _SLOT.finditer(text):
        slot = _Slot(int(match[2]), trim_left=not match[1], trim_right=not match[3])
        pieces += [text[start : match.start()], slot]
        start = match.end()
    pieces.append(text[start:])
    contents = [_SAMPLE if blank is None else blank for _, blank in shape]
    expected = _apply_template(tokenizer, shape, contents, reply)
    if "".join(p if isinstance(p, str) else p.fill(contents[p.index]) for p in pieces) != expected:
        raise _unusable(tokenizer, shape, "alters the content of a message")
    kept = {piece.index for piece in pieces if isinstance(piece, _Slot)}
    for i, (role, blank) in enumerate(shape):
        if blank is None and i not in kept:
            raise _unusable(tokenizer, shape, f"drops message {i} (role '{role}')")
    return tuple(pieces)


def _apply_template(tokenizer: Tokenizer, shape: _Shape, contents: Sequence[str], reply: bool) -> str:
    from jinja2 import TemplateError

    messages = [{"role": role, "content": content} for (role, _), content in zip(shape, contents, strict=True)]
    template = None if tokenizer.chat_template else FALLBACK_TEMPLATE
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=reply
        )
    except TemplateError as error:
        raise _unusable(tokenizer, shape, f"refuses them: {error}") from None


def _aliased(backend: Backend) -> tuple[Backend, dict[str, str]]:
    """A copy of a tokenizer whose control tokens have unguessable names, and the name of each.

    Only the names differ, so encoding a template's output with the names swapped in gives the very ids of the
    original, while a content that spells a control token out is nothing but text.
    """
    from tokenizers import Tokenizer as FastTokenizer

    state = json.loads(backend.to_str())
    nonce = secrets.token_hex(8)
    tokens = _control_tokens(state)
    aliases = {token["content"]: f"<|{nonce}:{token['id']}|>" for token in tokens}
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
    return copy, aliases


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


def _control_tokens(state: Mapping[str, list[dict[str, object]]]) -> list[dict[str, str]]:
    """The added tokens that steer a model: special ones, and those with punctuation, such as `<think>`.

    Other added tokens are words or runs of spaces, which contents may well hold.
    """
    return [
        token  # type: ignore[misc]
        for token in state["added_tokens"]
        if token["special"] or not all(c.isalnum() or c.isspace() for c in str(token["content"]))
    ]


def _aliased_pieces(pieces: tuple[_Piece, ...], aliases: Mapping[str, str]) -> tuple[_Piece, ...]:
    if not aliases:
        return pieces
    names = _any_of(aliases)
    return tuple(names.sub(lambda m: aliases[m.group()], p) if isinstance(p, str) else p for p in pieces)


def _any_of(names: Mapping[str, object]) -> re.Pattern[str]:
    """Matches the leftmost, longest of the names, as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _fast(tokenizer: Tokenizer) -> Backend:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise ModelError(_name(tokenizer), "no fast tokenizer inside", "Save the model with a tokenizer.json")
    return backend  # type: ignore[no-any-return]


def _unusable(tokenizer: Tokenizer, shape: _Shape, found: str) -> ModelError:
    roles = ", ".join(role for role, _ in shape)
    fix = "Use other roles (a system prompt can go into the user message), or give the model another chat template"
    return ModelError(_name(tokenizer), f"its chat template, given messages of roles [{roles}], {found}", fix)


def _name(tokenizer: Tokenizer) -> str:
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
