"""What a reply says: calls of tools and delegates, or the agent's answer.

Two formats: lines for small models, and the `<tool_call>` blocks that chat templates with tools of their own teach.
Pure functions of a reply's text, so nothing that a tool returned can be taken for a call. They are strict: a reply is
all calls or one answer, and what is neither is a fault, never a guess. They carry nothing out and know no limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

_ANSWER = "answer:"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines would also split at rare characters inside an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an agent said: (name, argument) calls, or an answer, or a fault: `malformed` or `no_answer`."""

    calls: tuple[tuple[str, str], ...] = ()
    answer: str | None = None
    faults: tuple[str, ...] = ()


_MALFORMED = Reply(faults=("malformed",))


def parse_lines(text: str, names: Collection[str]) -> Reply:
    """Read a reply in lines.

    Calls: every line that is not blank is `name: argument`, with one of the names and an argument that is not blank.
    An answer: the reply begins with `answer:`, and the rest, over as many lines as it takes, is the answer; without
    any text it is the fault `no_answer`, and so is an empty reply. Everything else is `malformed`: other text, an
    unknown name, an answer and a line that begins with a name and a colon in one reply.
    """
    lines = [line.strip() for line in _LINE_END.split(text)]
    lines = [line for line in lines if line]
    if not lines:
        return Reply(faults=("no_answer",))
    pairs = [_pair(line) for line in lines]
    if lines[0].startswith(_ANSWER):
        if any(name in names for name, _ in pairs[1:]):
            return _MALFORMED
        return _answer(text.strip().removeprefix(_ANSWER))
    if all(name in names and argument for name, argument in pairs):
        return Reply(calls=tuple(pairs))
    return _MALFORMED


def parse_native(text: str, names: Collection[str]) -> Reply:
    """Read a reply with blocks `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Any number of blocks are the calls, and the text around them is ignored. A block holds a JSON object of exactly
    these two keys: one of the names, and an object with exactly one value, a string that is not blank. A block that
    is none, or a tag without its partner, is `malformed`. Without any tag the whole text is the answer; empty, it is
    the fault `no_answer`.
    """
    if _OPEN not in text and _CLOSE not in text:
        return _answer(text)
    calls: list[tuple[str, str]] = []
    between, opening, rest = text.partition(_OPEN)
    while opening:
        read = _block(rest.lstrip(), names)
        if read is None or _CLOSE in between:
            return _MALFORMED
        calls.append(read[0])
        between, opening, rest = read[1].partition(_OPEN)
    return _MALFORMED if _CLOSE in between else Reply(calls=tuple(calls))


def describe(name: str, about: str) -> str:
    """One line of the list of what an agent may call: `name: about`."""
    return f"{name}: {' '.join(about.split())}" if about.strip() else name


def _answer(text: str) -> Reply:
    text = text.strip()
    return Reply(answer=text) if text else Reply(faults=("no_answer",))


def _pair(line: str) -> tuple[str, str]:
    name, colon, argument = line.partition(":")
    return (name, argument.strip()) if colon else ("", "")


def _block(text: str, names: Collection[str]) -> tuple[tuple[str, str], str] | None:
    """The call that the text begins with and what follows its closing tag; tags inside of JSON strings are text."""
    try:
        found, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):  # the latter for a thousand opening brackets
        return None
    rest = text[end:].lstrip()
    if not rest.startswith(_CLOSE) or not isinstance(found, dict) or found.keys() != {"name", "arguments"}:
        return None
    name, arguments = found["name"], found["arguments"]
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict) or len(arguments) != 1:
        return None
    (argument,) = arguments.values()
    if not isinstance(argument, str) or not argument.strip() or not _is_text(argument):
        return None
    return (name, argument.strip()), rest.removeprefix(_CLOSE)


def _is_text(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and nobody can write down."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
