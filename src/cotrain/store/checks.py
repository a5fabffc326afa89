"""What the store refuses before it reaches a row, and again when it is read from one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from cotrain.errors import ConfigError, DataError
from cotrain.store.base import Terms, Weights
from cotrain.store.encode import MAX_INT, MAX_NAME


def check_name(what: str, name: object) -> str:
    """The name of a run, a model, an owner or a process.

    Raises:
        DataError: it is no printable text of 1 to 1000 characters.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise DataError(f"{what} {name!r:.100}", "no printable text of 1 to 1000 characters", "Give it another name")
    return name


def check_terms(terms: Terms, run: str) -> None:
    """Refuse terms that no run can have.

    Raises:
        ConfigError: a number is out of range, no model is trained, or the terms are another run's.
    """
    numbers = [terms.steps, terms.places - 1, *terms.max_lag.values(), terms.max_sampled or 0]
    found = None
    if terms.run != run:
        found = f"terms of run {terms.run!r}"
    elif not terms.max_lag:
        found = "no model is trained"
    elif not all(0 <= number <= MAX_INT for number in numbers[:-1]) or numbers[-1] < 0:
        found = f"steps={terms.steps}, places={terms.places}, max_lag={dict(terms.max_lag)}, {terms.max_sampled=}"
    if found:
        raise ConfigError(f"run {run}", found, "Give at least one place and one model, and no number below 0")
    for model in terms.max_lag:
        check_name("model", model)


def differing(terms: Terms, config: str, places: int, models: Mapping[str, int]) -> list[str]:
    """What of a run that was begun these terms would change, but may not."""
    found = [] if terms.config == config else ["configuration"]
    found += [] if terms.places == places else [f"places ({places}, not {terms.places})"]
    found += [] if set(terms.max_lag) == set(models) else [f"models ({sorted(models)}, not {sorted(terms.max_lag)})"]
    return found


def check_weights(weights: Weights, where: str) -> None:
    """Refuse weights that cannot be: above all a folder that is not inside the run folder.

    Raises:
        DataError: the folder is absolute or leads out, the digest is no SHA-256, or a number is out of range.
    """
    if not _is_inside(weights.folder):
        raise DataError(where, f"folder {weights.folder!r:.200}", "Give a path below the run folder, without '..'")
    if not isinstance(weights.digest, str) or not re.fullmatch(r"[0-9a-f]{64}", weights.digest):
        raise DataError(where, f"digest {weights.digest!r:.100}", "Give a SHA-256 as 64 hexadecimal digits")
    if not all(isinstance(n, int) and 0 <= n <= MAX_INT for n in (weights.step, weights.version)):
        raise DataError(where, f"step {weights.step!r}, version {weights.version!r}", "Count both from 0")


def _is_inside(folder: object) -> bool:
    """Whether this is a plain relative path on every operating system; links are for who opens it to refuse."""
    if not isinstance(folder, str) or not 1 <= len(folder) <= MAX_NAME or not folder.isprintable():
        return False
    path = PurePosixPath(folder)
    return not path.is_absolute() and bool(path.parts) and ".." not in path.parts and not set("\\:") & set(folder)
