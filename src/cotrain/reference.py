"""The reference of all configuration keys as Markdown, made from `config.py` itself.

`cotrain config > docs/configuration.md` writes the page; a test keeps the two equal. What a key means is its attribute
docstring, so there is one place to change.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cotrain.config import RunConfig

_INTRO = """# Configuration

A run is described by one TOML file. Every key is optional, an unknown key is an error, and any key can be set on the
command line: `cotrain train run.toml --out runs/a --set loop.steps=50 --set models.base.optimizer.lr=1e-5`.

This page is written by `cotrain config > docs/configuration.md`.
"""

_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "text"}
_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def configuration_reference() -> str:
    """All sections of a run's configuration: for each key its type, default and meaning, as Markdown."""
    return "\n".join([_INTRO, *_section(RunConfig, RunConfig(), "", {})])


def _section(
    section: type[BaseModel], defaults: BaseModel, path: str, told: dict[type[BaseModel], str], note: str = ""
) -> Iterator[str]:
    """A section's heading and table, then its sub-sections; one that was told already is only referred to."""
    if path:
        yield f"## `{path}`\n\n{inspect.cleandoc(section.__doc__ or '')}{note}\n"
        if section in told:
            yield f"The same keys as in `{told[section]}`.\n"
            return
        told[section] = path
    nested = {name: inner for name, field in section.model_fields.items() if (inner := _inner(field.annotation))}
    plain = [name for name in section.model_fields if name not in nested]
    if plain:
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        values = defaults.model_dump(mode="json")
        yield from (_row(name, section.model_fields[name], values.get(name)) for name in plain)
        yield ""
    for name, inner in nested.items():
        value = getattr(defaults, name)
        usual = inner.model_construct()  # a section may have keys that must be given
        own = value if isinstance(value, BaseModel) else usual
        place, note = f"{path.strip('[]')}.{name}".strip("."), ""
        if isinstance(value, dict):
            place, note = f"[{place}.<name>]", _names(value, usual)
        elif isinstance(value, tuple):
            place, note = f"[[{place}]]", " One for each; by default there is none."
        else:
            place, note = f"[{place}]", " Left out by default." if value is None else ""
        yield from _section(inner, own, place, told, note)


def _row(name: str, field: FieldInfo, value: object) -> str:
    default = "required" if field.is_required() else _default(value)
    cells = (f"`{name}`", _bounded(_type(field.annotation), field.metadata), default, field.description or "")
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _names(sections: Mapping[str, BaseModel], usual: BaseModel) -> str:
    """What a table of sections holds by default."""
    parts = [f"`{name}`" + _differing(section, usual) for name, section in sections.items()]
    return f" By default there is {' and '.join(parts) or 'none'}."


def _inner(annotation: object) -> type[BaseModel] | None:
    """The section that a key holds, alone, in a table by name, or optionally."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for part in typing.get_args(annotation) if (inner := _inner(part))), None)


def _differing(here: BaseModel, usual: BaseModel) -> str:
    ours, theirs = here.model_dump(mode="json"), usual.model_dump(mode="json")
    parts = [f"`{name} = {json.dumps(value)}`" for name, value in ours.items() if value != theirs[name]]
    return f" with {', '.join(parts)}" if parts else ""


def _default(value: object) -> str:
    return "unset" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(annotation: object) -> str:
    """A type in words; None says nothing, because every key may be left out."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        metadata = [m for extra in arguments[1:] for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _bounded(_type(arguments[0]), metadata)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return "list of " + " and ".join(_type(part) for part in arguments if part is not Ellipsis)
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    return _PLAIN.get(annotation, str(annotation)) if isinstance(annotation, type) else str(annotation)


def _bounded(words: str, metadata: Sequence[object]) -> str:
    bounds = [
        f"{sign} {bound:g}"
        for name, sign in _SIGNS
        for limit in metadata
        if (bound := getattr(limit, name, None)) is not None
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words
