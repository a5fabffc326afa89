"""Ctrl-C as a request: a run ends after the step in progress, with a checkpoint; a second one interrupts at once.

A request to terminate (SIGTERM, as a cluster's scheduler sends it) counts as Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Whether the user asked the run to end."""

    asked: bool = False


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request; the second one interrupts at once."""
    stop = Stop()

    def on_signal(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        text = "\nstopping after this step; press Ctrl-C again to stop at once"
        print(text, file=sys.stderr, flush=True)

    try:
        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs us there handles signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
