"""How a run is doing, for the eye: one table of its models, one line where there is no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from cotrain.runs import Metrics, last_train_row
from cotrain.store.base import Status, Store


@dataclass(frozen=True, kw_only=True)
class Look:
    """How things are: `metrics` are those of each model's newest step, `dropped` the last written step's, by reason."""

    status: Status
    metrics: dict[str, Metrics]
    dropped: dict[str, int]


def look(store: Store, folder: Path) -> Look:
    """Look at the store, and at the last step that the evaluator wrote."""
    status = store.status()
    row = last_train_row(folder)
    return Look(
        status=status,
        metrics={name: store.metrics(name, head) or {} for name, head in status.heads.items() if head > 0},
        dropped={key[8:]: int(str(value)) for key, value in row.items() if key.startswith("dropped/")},
    )


def status_table(now: Look) -> Table:
    """One row per model: its last step's lag, samples per second, share of time busy; groups and tokens below."""
    columns = ("model", "step", "lag", "groups waiting", "samples/s", "busy", "groups too old")
    table = Table(*columns, caption=_caption(now))
    for name, head in now.status.heads.items():
        metrics = now.metrics.get(name, {})
        update_s, wait_s = (float(str(metrics.get(f"time/{phase}_s", 0.0))) for phase in ("update", "wait"))
        samples, seconds = float(str(metrics.get(f"model/{name}/samples", 0))), update_s + wait_s
        table.add_row(
            name,
            f"{max(head, 0)} of {now.status.last_step}",
            str(metrics.get(f"model/{name}/lag_max", "")),
            str(now.status.backlog.get(name, 0)),
            f"{samples / seconds:.1f}" if seconds else "",
            f"{update_s / seconds:.0%}" if seconds else "",
            str(metrics.get(f"model/{name}/stale", "")),
        )
    return table


def status_line(now: Look) -> str:
    """The same in one line."""
    models = ", ".join(f"{name} {max(head, 0)}/{now.status.last_step}" for name, head in now.status.heads.items())
    return f"steps: {models}; {_caption(now)}"


def _caption(now: Look) -> str:
    dropped = ", ".join(f"{reason} {count}" for reason, count in now.dropped.items()) or "nothing"
    made = f"{now.status.leased} groups being made; {now.status.sampled} tokens sampled"
    return f"{made}; dropped in the last step written: {dropped}"
