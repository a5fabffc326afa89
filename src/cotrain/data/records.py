"""JSON records with their place in a file, so that every complaint can name it.

Reads JSON lines and JSON lists, checks single fields, writes files that are whole or absent. Knows nothing of
questions or passages; `questions` and `importers` build on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotrain.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One JSON object; `where` names its file and its line (or its position in a JSON list), both from 1."""

    where: str
    values: Mapping[str, object]


def read_lines(path: Path | str) -> Iterator[Record]:
    """The objects of a JSON-lines file (UTF-8, one object a line; blank lines are skipped).

    Raises:
        DataError: no such file, not UTF-8, or a line that is not a JSON object, named by its number.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(f"{path} line {number}", line)
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"not UTF-8: {error}", "Save the file as UTF-8") from None


def read_records(path: Path | str) -> Iterator[Record]:
    """The objects of a file that is either one JSON list or JSON lines.

    Raises:
        DataError: as `read_lines`, or a JSON list that is broken or holds something other than objects.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            head = file.read(64).lstrip()
            if not head.startswith("["):
                yield from read_lines(path)
                return
            file.seek(0)
            values = json.load(file)
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"not UTF-8: {error}", "Save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"{path} line {error.lineno}"
        raise DataError(place, f"not JSON: {error.msg} at column {error.colno}", "Mend the file there") from None
    for number, value in enumerate(values, start=1):
        yield _as_record(f"{path} record {number}", value)


def unreadable(path: Path | str, error: OSError) -> DataError:
    """What to raise when the operating system refuses a file."""
    if isinstance(error, FileNotFoundError):
        return DataError(str(path), "no such file", "Check the path; relative ones start at the working directory")
    return DataError(str(path), f"cannot be read: {error.strerror or error}", "Check the path and its permissions")


def text(record: Record, key: str) -> str:
    """The field `key`, which must be a string with something in it.

    Raises:
        DataError: it is missing, not a string, blank, or holds half of a surrogate pair.
    """
    if key not in record.values:
        known = ", ".join(record.values) or "none"
        raise DataError(record.where, f"no field '{key}' (fields: {known})", f"Add '{key}', a string")
    return _checked(record.where, key, record.values[key])


def texts(record: Record, key: str) -> tuple[str, ...]:
    """The field `key`, which must be a list of strings with something in each.

    Raises:
        DataError: it is missing or something else.
    """
    return tuple(_checked(record.where, f"{key}[{i}]", value) for i, value in enumerate(items(record, key)))


def items(record: Record, key: str) -> Sequence[object]:
    """The field `key`, which must be a list.

    Raises:
        DataError: it is missing or something else.
    """
    value = record.values.get(key)
    if not isinstance(value, list):
        found = f"'{key}' is {shorten(value)}" if key in record.values else f"no field '{key}'"
        raise DataError(record.where, f"{found}, not a list", f"Make '{key}' a list")
    return value


def records(record: Record, key: str) -> tuple[Record, ...]:
    """The field `key`, which must be a list of objects.

    Raises:
        DataError: it is missing or something else.
    """
    return tuple(_as_record(f"{record.where}, {key}[{i}]", value) for i, value in enumerate(items(record, key)))


def write_lines(path: Path | str, values: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line; the file appears whole or not at all, its folder is made.

    Raises:
        DataError: an object that JSON cannot hold, or a path that cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            for number, value in enumerate(values, start=1):
                try:
                    file.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
                except (TypeError, ValueError) as error:
                    found = f"JSON cannot hold {shorten(value)}: {error}"
                    raise DataError(f"{path} line {number}", found, "Keep to strings, numbers, lists, maps") from None
        os.replace(part, path)
    except OSError as error:
        found = f"cannot be written: {error.strerror or error}"
        raise DataError(str(path), found, "Check the path, its permissions and the free space") from None
    finally:
        with contextlib.suppress(OSError):  # it must not hide the error that is on its way
            part.unlink()


def shorten(value: object, length: int = 60) -> str:
    """`repr` for an error message: at most `length` characters."""
    shown = repr(value)
    return shown if len(shown) <= length else shown[: length - 3] + "..."


def _parse(where: str, line: str) -> Record:
    try:
        return _as_record(where, json.loads(line))
    except json.JSONDecodeError as error:
        found = f"not JSON: {error.msg} at column {error.colno}: {shorten(line.strip())}"
        raise DataError(where, found, "Write one JSON object a line") from None


def _as_record(where: str, value: object) -> Record:
    if not isinstance(value, dict):
        raise DataError(where, f"{shorten(value)} is not a JSON object", "Write an object in braces there")
    return Record(where=where, values=value)


def _checked(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(where, f"'{key}' is {shorten(value)}", f"Make '{key}' a string with something in it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(where, f"'{key}' holds half of a surrogate pair", "Mend the text's encoding") from None
    return value
