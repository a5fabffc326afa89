"""The run folder: what a run writes down, and how it is read back.

Groups, metrics and predictions are JSON lines, one object a line, readable without cotrain. A line is written whole; a
last line cut short by a crash is ignored on reading and removed on resuming (`rewind`). Layout: docs/architecture.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from cotrain.checkpoints import flush_one
from cotrain.errors import DataError, TrainError
from cotrain.evaluate import Prediction
from cotrain.types import Completion, Group, Question, ToolCall, Trajectory, Turn

Metrics = Mapping[str, float | int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group as it was trained on: with the credit, advantage and weight of each trajectory that has one."""

    group: Group
    credits: Mapping[str, float] = field(default_factory=dict)
    advantages: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


def groups_path(folder: Path, step: int) -> Path:
    """Where the groups of a step lie."""
    return folder / "groups" / f"step-{step:06d}.jsonl"


def stored_steps(folder: Path) -> list[int]:
    """The steps whose groups are stored, in order.

    Raises:
        DataError: there are none.
    """
    steps = sorted(int(path.stem.split("-")[1]) for path in (folder / "groups").glob("step-*.jsonl"))
    if not steps:
        raise DataError(f"run {folder}", "it has no groups yet", "Let it finish a step, or check the path")
    return steps


def predictions_path(folder: Path, step: int, name: str) -> Path:
    """Where the predictions of an evaluation lie."""
    return folder / "eval" / f"step-{step:06d}-{name}.jsonl"


def write_groups(folder: Path, step: int, records: Sequence[GroupRecord]) -> None:
    """Write all groups of a step, replacing what was there."""
    _write_lines(groups_path(folder, step), map(_plain, records))


def read_groups(folder: Path, step: int) -> list[GroupRecord]:
    """The groups of a step.

    Raises:
        DataError: the step has none, or a line is not a group.
    """
    path = groups_path(folder, step)
    records = []
    for number, line in _read_lines(path):
        try:
            records.append(GroupRecord(**{**line, "group": _group(line["group"])}))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, line {number}", f"not a group: {error!r}", "Run the step again, or remove the file"
            ) from None
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeGroup:
    """A group as a worker puts it: what judging dropped by reason, the seconds that it took, and who made it."""

    record: GroupRecord
    dropped: Mapping[str, int]
    time_s: float
    worker: str


def dump_record(made: MadeGroup) -> bytes:
    """A group as compressed JSON, for the shared store."""
    return zlib.compress(json.dumps(_plain(made), ensure_ascii=False).encode())


def load_record(data: bytes) -> MadeGroup:
    """What `dump_record` wrote.

    Raises:
        DataError: it is something else.
    """
    try:
        made = json.loads(zlib.decompress(data))
        line = made["record"]
        return MadeGroup(**{**made, "record": GroupRecord(**{**line, "group": _group(line["group"])})})
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise DataError("a record in the store", f"not a group: {error!r}", "Do not use this store") from None


def write_predictions(folder: Path, step: int, name: str, predictions: Sequence[Prediction]) -> None:
    """Write the predictions of one evaluation, replacing what was there."""
    _write_lines(predictions_path(folder, step, name), map(_plain, predictions))


def read_predictions(folder: Path, step: int, name: str) -> list[Prediction]:
    """The predictions of one evaluation.

    Raises:
        DataError: there is none, or a line is not a prediction.
    """
    path = predictions_path(folder, step, name)
    predictions = []
    for number, line in _read_lines(path):
        try:
            predictions.append(Prediction(**{**line, "golds": tuple(line["golds"])}))
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}", f"not a prediction: {error!r}", "Evaluate again") from None
    return predictions


def append_metrics(folder: Path, metrics: Metrics) -> None:
    """Add one line to `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")
        _to_disk(file)


def read_metrics(folder: Path) -> list[Metrics]:
    """All lines of `metrics.jsonl`, or [] where there is none yet."""
    path = folder / "metrics.jsonl"
    return [line for _, line in _read_lines(path)] if path.exists() else []


def last_train_row(folder: Path, most_bytes: int = 1 << 16) -> Metrics:
    """The newest step's metrics, read from the end of the file; empty where there is none yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        lines = file.read().decode("utf-8", errors="replace").split("\n")[:-1]
    for line in reversed(lines):
        if line.startswith('{"kind": "train"'):
            row: Metrics = json.loads(line)
            return row
    return {}


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system lets it go when the process ends, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(
                f"run folder {folder}", "another process is training in it", "Wait for it to end, or stop it"
            ) from None
        yield


def rewind(folder: Path, step: int, num_metrics: int) -> None:
    """Remove what the run wrote after the end of `step` and its first `num_metrics` metrics, so that it is done again.

    Step -1 and no metrics remove everything that was written.
    """
    _write_lines(folder / "metrics.jsonl", read_metrics(folder)[:num_metrics])
    for path in [*folder.glob("groups/step-*.jsonl"), *folder.glob("eval/step-*.jsonl")]:
        if int(path.name.split("-")[1].split(".")[0]) > step:
            path.unlink()


def _plain(value: object) -> Any:
    """A value as JSON can hold it. `dataclasses.asdict` would count the pairs of a `Counter`, not copy them."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        _to_disk(file)
    os.replace(partial, path)
    flush_one(path.parent)


def _to_disk(file: TextIO) -> None:
    """What a checkpoint or the shared store says was written must survive a loss of power as they do."""
    file.flush()
    os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[tuple[int, dict]]:  # type: ignore[type-arg]
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError:
        raise DataError(str(path), "no such file", "Name a step that the run has reached") from None
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return  # cut short while it was written
            raise DataError(f"{path}, line {number}", f"not JSON: {error}", "Mend or remove the line") from None
        yield number, value


def _group(value: dict) -> Group:  # type: ignore[type-arg]
    return Group(
        question=Question(**{**value["question"], "answers": tuple(value["question"]["answers"])}),
        step=value["step"],
        strategy=value["strategy"],
        trajectories=tuple(_trajectory(t) for t in value["trajectories"]),
        dropped=value["dropped"],
        unused=value.get("unused", 0),
    )


def _trajectory(value: dict) -> Trajectory:  # type: ignore[type-arg]
    tuples = {"reads": tuple(value["reads"]), "faults": tuple(value["faults"])}
    return Trajectory(**{**value, **tuples, "turns": tuple(_turn(turn) for turn in value["turns"])})


def _turn(value: dict) -> Turn:  # type: ignore[type-arg]
    completion = value["completion"]
    ids, logprobs = tuple(completion["token_ids"]), tuple(completion["logprobs"])
    return Turn(
        prompt_ids=tuple(value["prompt_ids"]),
        completion=Completion(**{**completion, "token_ids": ids, "logprobs": logprobs}),
        calls=tuple(ToolCall(**call) for call in value.get("calls", ())),
    )
