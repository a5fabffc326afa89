"""How a run is doing, for the eye: one table of its models, one line where there is no terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from cotrain.runs import Metrics
from cotrain.store.base import Status, Store


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the store said at a time; `metrics` are those of each model's newest step."""

    time_s: float
    status: Status
    metrics: dict[str, Metrics]


def look(store: Store, time_s: float) -> Look:
    """Look at the store now."""
    status = store.status()
    return Look(
        time_s=time_s,
        status=status,
        metrics={name: store.metrics(name, head) or {} for name, head in status.heads.items() if head > 0},
    )


def status_table(first: Look, last: Look) -> Table:
    """One row per model, and the groups and tokens in the caption. `first` is when the watching began."""
    table = Table("model", "step", "lag", "waiting", "groups/s", "busy", "too old", caption=_caption(first, last))
    for name, head in last.status.heads.items():
        metrics = last.metrics.get(name, {})
        table.add_row(
            name,
            f"{max(head, 0)} of {last.status.last_step}",
            _number(metrics.get(f"model/{name}/lag_max")),
            str(last.status.backlog.get(name, 0)),
            f"{_rate(first, last, name):.2f}",
            _busy(metrics),
            _number(metrics.get(f"model/{name}/stale")),
        )
    return table


def status_line(first: Look, last: Look) -> str:
    """The same in one line."""
    models = ", ".join(f"{name} {max(head, 0)}/{last.status.last_step}" for name, head in last.status.heads.items())
    return f"steps: {models}; {_caption(first, last)}"


def _caption(first: Look, last: Look) -> str:
    waiting = ", ".join(f"{name} {count}" for name, count in last.status.backlog.items())
    return f"{last.status.leased} groups being made, waiting for {waiting}; {last.status.sampled} tokens sampled"


def _rate(first: Look, last: Look, model: str) -> float:
    seconds = last.time_s - first.time_s
    return (last.status.heads[model] - first.status.heads[model]) / seconds if seconds > 0 else 0.0


def _busy(metrics: Metrics) -> str:
    update, wait = metrics.get("time/update_s"), metrics.get("time/wait_s")
    if not isinstance(update, float) or not isinstance(wait, float) or update + wait <= 0:
        return ""
    return f"{update / (update + wait):.0%}"


def _number(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
