"""What a configuration names: functions of Python modules and files, and names that must be among the known ones."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cotrain.errors import ConfigError


def function_named(name: str, where: str, known: Iterable[str]) -> Callable[..., Any]:
    """The callable that `module:function` or `path/file.py:function` names."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f"Did you mean '{close[0]}'? " if close else ""
        raise ConfigError(
            where, f"unknown name '{name}'", f"{hint}Built in: {', '.join(known)}; your own: module:function"
        )
    try:
        module = _module(module_name)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(where, f"cannot import '{module_name}': {error}", "Check the path or install it") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(where, f"'{module_name}' has no function '{attribute}'", "Check the name")
    return function


def _module(name: str) -> object:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).expanduser().resolve()
    known = str(path)  # under its whole path, so that it hides no module and a system and a metric share one
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no such file: {name}")
    module = sys.modules[known] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


def refuse_unknown(where: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise a ConfigError for the first of the names that is not among the known ones."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = f"Did you mean '{close[0]}'? " if close else ""
            raise ConfigError(where, f"unknown name '{name}'", f"{hint}Known ({what}): {', '.join(known)}")
