"""What a long command shows while it works: bars with the time that remains, or plain lines where there is no terminal.

A `Display` is fed by its `update(label, done, total)`, one bar or series of lines per label, and by `say`, whose lines
stay. It writes to standard error, so that what a command prints can be piped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class Display:
    """Shows progress; make one with `display`."""

    def __init__(self, console: Console, bars: Progress | None) -> None:
        self._console, self._bars = console, bars
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}
        self._tenths: dict[str, int] = {}

    def update(self, label: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done; a lower `done` than before starts the label's count again."""
        if self._bars is None:
            self._line(label, done, total)
        else:
            self._bar(self._bars, label, done, total)

    def say(self, line: str) -> None:
        """Print a line that stays, above the bars."""
        self._console.print(Text(line), soft_wrap=True)

    def _bar(self, bars: Progress, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            for task in bars.tasks:  # what cannot be counted, such as loading, ends when the next thing begins
                if task.total is not None and task.total <= 1:
                    bars.update(task.id, visible=False)
            self._tasks[label] = bars.add_task(escape(label), total=total, completed=done)
            self._done[label] = done
            return
        if done < self._done[label]:
            bars.reset(self._tasks[label])
        self._done[label] = done
        bars.update(self._tasks[label], completed=done, total=total)

    def _line(self, label: str, done: int, total: int) -> None:
        """At most eleven lines per count: when it begins, and at each tenth."""
        tenth = 10 * done // total if total else 10
        if self._tenths.get(label) != tenth:
            self._tenths[label] = tenth
            self.say(f"{label}: {done} of {total}" if total > 1 else label)


@contextmanager
def display() -> Iterator[Display]:
    """A display on standard error for as long as the context lasts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Display(console, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        yield Display(console, bars)


def metrics_line(row: Mapping[str, float | int | str | None]) -> str:
    """What a line of `metrics.jsonl` says, in short."""

    def number(key: str, digits: int = 3) -> str:
        value = row.get(key)
        return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "unknown"

    def total(prefix: str) -> float:
        return sum(v for key, v in row.items() if key.startswith(prefix) and isinstance(v, (int, float)))

    if row.get("kind") == "eval":
        interval = f"{number('f1')} ({number('f1_low')} … {number('f1_high')})"
        scores = f"F1 {interval}, exact match {number('em')}, reward {number('reward')}"
        return f"step {row.get('step')}, {row.get('set')}: {scores}"
    if row.get("kind") == "warmup":
        losses = [f"{key.split('/')[1]} {number(key)}" for key in row if key.endswith("/loss")]
        return f"warm-up step {row.get('warmup_step')}: loss {', '.join(losses) or 'unknown'}"
    dropped, seconds = total("dropped/"), total("time/")
    return f"step {row.get('step')}: reward {number('team/reward')}, dropped {dropped:.0f}, {seconds:.1f} s"
