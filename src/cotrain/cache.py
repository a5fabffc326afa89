"""Where cotrain keeps what it builds, and how a folder appears there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder(chosen: str | None = None) -> Path:
    """The folder `chosen` by a configuration, else $COTRAIN_CACHE, else ~/.cache/cotrain."""
    return Path(chosen or os.environ.get("COTRAIN_CACHE") or "~/.cache/cotrain").expanduser()


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` when the block ends without an error; processes may race.

    If another process made `target` in the meantime, theirs is kept.

    Raises:
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
        folder = Path(parent) / target.name  # inside, so that its permissions are the usual ones
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)  # also takes the place of an empty folder
        except OSError:
            if not target.is_dir():
                raise
