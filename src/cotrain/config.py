"""A run as data: strict TOML, every key typed and documented, unknown keys refused with a suggestion.

`load_config` reads a file, applies `--set a.b=c` overrides and returns a `RunConfig`; `dump_config` writes the resolved
one back. The sections are declared in `sections.py`. Nothing heavy is imported and nothing is opened here but the file.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError, field_validator

from cotrain.errors import ConfigError
from cotrain.sections import (
    AgentConfig,
    CorpusConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    LoopConfig,
    LossConfig,
    ModelConfig,
    SamplingConfig,
    Section,
    StoreConfig,
    SystemConfig,
    ToolConfig,
    WarmupConfig,
    file_name,
)
from cotrain.sections_credit import AdvantageConfig, AlignConfig, JudgeConfig, RewardConfig


class RunConfig(Section):
    """Everything about a run."""

    models: dict[str, ModelConfig] = Field(default={"base": ModelConfig()})
    """Models by name."""
    system: SystemConfig = SystemConfig()
    """The team's workflow."""
    agents: dict[str, AgentConfig] = Field(default={})
    """Overrides of the system's agents."""
    data: DataConfig = DataConfig()
    """Questions."""
    corpus: CorpusConfig = CorpusConfig()
    """Retrieval."""
    sampling: SamplingConfig = SamplingConfig()
    """Rollouts and forks."""
    rewards: RewardConfig = RewardConfig()
    """Rewards and credits."""
    judges: dict[str, JudgeConfig] = Field(default={})
    """Rewards that are judged, by name."""
    align: AlignConfig = AlignConfig()
    """Alignment of delegated trajectories."""
    tools: ToolConfig = ToolConfig()
    """Tools of episodes."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    loss: LossConfig = LossConfig()
    """Loss."""
    engine: EngineConfig = EngineConfig()
    """Sampler."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up."""
    loop: LoopConfig = LoopConfig()
    """Loop and checkpoints."""
    store: StoreConfig = StoreConfig()
    """The store of a run of several processes."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""

    @field_validator("models")
    @classmethod
    def _model_names(cls, value: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        return {file_name(name): model for name, model in value.items()}


def load_config(path: Path | str | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file (None: all defaults), apply `a.b=value` overrides, validate.

    Relative paths inside the file stay relative to the working directory.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown (with a suggestion), a value does not fit.
    """
    values = read_toml(path) if path is not None else {}
    for override in overrides:
        _apply(values, override)
    return parse_config(values, str(path) if path is not None else "config")


def read_toml(path: Path | str, what: str = "config") -> dict[str, object]:
    """The values of a TOML file; `what` it is, for errors.

    Raises:
        ConfigError: the file is missing or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path}", "no such file", "Check the path") from None
    except OSError as error:
        raise ConfigError(f"{what} {path}", f"cannot be read: {error.strerror}", "Name a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path}", f"not valid TOML: {error}", "Mend the file at that place") from None


def parse_config(values: Mapping[str, object], where: str = "config") -> RunConfig:
    """Validate plain values as a `RunConfig`.

    Raises:
        ConfigError: the first thing that is wrong, named by its dotted key.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, where, RunConfig) from None


def _apply(values: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override}", "no key=value pair", "Write it as --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = (part.strip() for part in key.split("."))
    for parent in parents:
        node = values.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}", f"{parent} is the value {node!r}, not a section", "Check the key")
        values = node
    values[last] = value


def explain(error: ValidationError, where: str, root: type[BaseModel]) -> ConfigError:
    """The first thing that is wrong with the values of a `root`, in three parts; an unknown key gets a suggestion."""
    errors = error.errors()
    unknown = [found for found in errors if found["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]  # a key that must be given, misspelt, is both unknown and missing
    key = ".".join(str(part) for part in first["loc"]) or "(top level)"
    if first["type"] == "extra_forbidden":
        known = _keys_at(first["loc"][:-1], root)
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        fix = f"Did you mean '{close[0]}'?" if close else f"Known keys here: {', '.join(known)}"
        return ConfigError(where, f"unknown key '{key}'", fix.rstrip("."))
    if first["type"] == "missing":
        return ConfigError(where, f"{key} is missing", "Give it a value")
    return ConfigError(where, f"{key} = {first.get('input')!r}: {first['msg']}", "Correct the value")


def _keys_at(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Names of the keys that the section at `location` within `root` knows."""
    section = root
    for part in location:
        annotation = section.model_fields[str(part)].annotation if str(part) in section.model_fields else section
        section = next(_sections_in(annotation), section)
    return list(section.model_fields)


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    _dump_section(config.model_dump(mode="json"), "", lines)
    return "\n".join(lines).strip() + "\n"


def lasting(config: RunConfig) -> RunConfig:
    """The configuration with what may change when a run goes on set to fixed values: its length, checkpoints, evals."""
    loop = config.loop.model_copy(update={"steps": 0, "max_sampled": None, "checkpoint_every": 1, "keep_last": 1})
    return config.model_copy(update={"loop": loop, "eval": EvalConfig()})


def by_dotted_key(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as one mapping, `{"loop.steps": 16, ...}`; an empty section leaves no key."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _dump_section(values: Mapping[str, object], prefix: str, lines: list[str]) -> None:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and value is not None}
    if prefix and (plain or not values):
        lines.append(f"\n[{prefix}]")
    lines.extend(f"{_key(key)} = {_toml(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            _dump_section(value, f"{prefix}.{_key(key)}" if prefix else _key(key), lines)


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _toml(key)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's strings are JSON's but for DEL
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):  # a section in a list, such as a stage: an inline table of what is set
        return "{ " + ", ".join(f"{_key(key)} = {_toml(v)}" for key, v in value.items() if v is not None) + " }"
    return repr(value)
