"""From a model's name to weights in memory, and from there to a folder that others can load.

`resolve` turns a name (a local folder, a packaged or tiny model, a hub name) into a folder; `load_model` reads it with
its tokenizer, adds adapters where they are wanted and marks what is trained; `export_model` writes it back as plain
transformers or peft files. Loading the same configuration twice gives the same weights, adapters included.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cotrain.cache import atomic_folder, cache_folder
from cotrain.config import LoraConfig, ModelConfig
from cotrain.errors import ModelError
from cotrain.packaged import PACKAGES, fetch, quiet
from cotrain.render import Tokenizer, end_of_turn
from cotrain.tiny import TINY, build_tiny

ADAPTER_FILE = "adapter_config.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "LICENSE*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One model, ready to sample from and to train.

    `network` is a transformers causal LM (with adapters: a peft model around one) in evaluation mode; only what is
    trained requires gradients. `context` is the largest number of tokens, prompt and completion together. `end_ids`
    are the tokens that end a completion.
    """

    name: str
    config: ModelConfig
    folder: Path
    network: torch.nn.Module
    tokenizer: Tokenizer
    context: int
    end_ids: frozenset[int]
    has_adapter: bool


class ModelEntry(NamedTuple):
    """A model that `resolve` knows by name: where it is or comes from, and its state."""

    name: str
    where: str
    state: str


def resolve(path: str, seed: int = 0) -> Path:
    """The local folder of a model.

    `path` is a local folder, a packaged model, a tiny one (random weights drawn with `seed`) or a hub name `org/name`.

    Raises:
        ModelError: nothing is found there; says what was looked for.
    """
    folder = Path(path).expanduser()
    if any((folder / file).is_file() for file in ("config.json", ADAPTER_FILE)):
        return folder.resolve()
    if path in PACKAGES:
        return fetch(path)
    if path in TINY:
        return build_tiny(path, seed)
    known = [*PACKAGES, *TINY]
    if folder.is_dir():
        raise ModelError(f"model {path}", "a folder without config.json", "Name a folder that save_pretrained wrote")
    if path.count("/") == 1 and path[0] not in "./~" and not folder.parent.is_dir():
        return _from_hub(path)
    close = difflib.get_close_matches(path, known, n=1)
    hint = f"Did you mean '{close[0]}'" if close else f"Use a folder, a hub name org/name, or one of {', '.join(known)}"
    raise ModelError(f"model {path}", "no such folder, packaged or tiny model", hint)


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError):
        pass  # not in the hub's cache: ask the hub
    try:
        with quiet():
            return Path(snapshot_download(path, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises errors of its own, of httpx and of the system
        found = f"no such folder, and the hub did not give it ({type(error).__name__}: {str(error).splitlines()[0]})"
        fix = f"Check the name and the connection, or use a local folder or one of {', '.join([*PACKAGES, *TINY])}"
        raise ModelError(f"model {path}", found, fix) from error


def load_model(name: str, config: ModelConfig) -> LoadedModel:
    """Load what `config.path` names onto `config.device`, in `config.dtype`, with adapters if `config.lora` says so.

    A folder that holds a peft adapter is loaded on top of its base model.

    Raises:
        ModelError: the model is missing or damaged, or the configuration does not fit it.
    """
    folder = resolve(config.path, config.seed)
    base = _base_folder(name, folder, config.seed)
    with quiet(), torch.random.fork_rng(devices=[]):
        network, tokenizer = _read(name, base, config)
        context = _context(name, network, config)
        network.requires_grad_(config.trainable and config.lora is None and base == folder)
        if base != folder:
            network = _read_adapter(name, network, folder, config)
        elif config.lora is not None:
            network = _add_adapter(name, network, config.lora, config.seed, config.trainable)
    return LoadedModel(
        name=name,
        config=config,
        folder=folder,
        network=network.to(_device(name, config)).eval(),
        tokenizer=tokenizer,
        context=context,
        end_ids=_end_ids(network, tokenizer),
        has_adapter=base != folder or config.lora is not None,
    )


def _read(name: str, folder: Path, config: ModelConfig) -> tuple[torch.nn.Module, Tokenizer]:
    """The network and tokenizer in a folder; refuses weights that would silently be left random."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_DTYPES[config.dtype],
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its readers raise
        raise ModelError(f"model {name}", f"{folder} cannot be loaded: {error}", "Save or fetch it again") from error
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        found = f"{folder} has no usable weights for {len(missing)} tensors ({missing[0]}, ...)"
        raise ModelError(f"model {name}", found, "Save or fetch it again")
    loaded: torch.nn.Module = network
    return loaded, tokenizer


def _context(name: str, network: torch.nn.Module, config: ModelConfig) -> int:
    settings = network.config.get_text_config()  # type: ignore[operator, union-attr]
    limit: int | None = getattr(settings, "max_position_embeddings", None)
    context = config.context or limit
    if context is None:
        raise ModelError(f"model {name}", "it states no limit of its context", f"Set models.{name}.context")
    if limit is not None and context > limit:
        found = f"context = {context}, but the model was made for {limit} tokens"
        raise ModelError(f"model {name}", found, f"Set models.{name}.context to {limit} or less")
    return context


def _add_adapter(name: str, network: torch.nn.Module, lora: LoraConfig, seed: int, trainable: bool) -> torch.nn.Module:
    """Wrap the network in seeded adapters of its own dtype; they start as the identity."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    peft_config = PeftLoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    try:
        adapted: torch.nn.Module = get_peft_model(network, peft_config, autocast_adapter_dtype=False)
    except ValueError as error:
        fix = f"Set models.{name}.lora.targets to names of its linear modules, or to 'all-linear'"
        raise ModelError(f"model {name}", f"lora.targets = {targets!r} does not fit: {error}", fix) from None
    return adapted if trainable else adapted.requires_grad_(False)


def _base_folder(name: str, folder: Path, seed: int) -> Path:
    """The folder of the weights: `folder` itself, or what the adapter in it was trained on."""
    file = folder / ADAPTER_FILE
    if not file.is_file():
        return folder
    base = str(json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    # An adapter remembers a folder of the machine that wrote it; a packaged model is known by the folder's name.
    portable = Path(base).name
    try:
        return resolve(portable if portable in PACKAGES and not Path(base).is_dir() else base, seed)
    except ModelError as error:
        fix = f"Set base_model_name_or_path in {file} to the base model"
        raise ModelError(f"model {name}", f"the base of its adapter is missing ({error.found})", fix) from error


def _read_adapter(name: str, network: torch.nn.Module, folder: Path, config: ModelConfig) -> torch.nn.Module:
    """The network with the adapter in `folder` on it; a `lora` section, if there is one, must describe that adapter."""
    from peft import PeftModel

    saved = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
    rank, alpha = saved.get("r"), saved.get("lora_alpha")
    if config.lora is not None and (config.lora.rank, config.lora.alpha) != (rank, alpha):
        found = (
            f"lora has rank {config.lora.rank}, alpha {config.lora.alpha}; its adapter in {folder} has {rank}, {alpha}"
        )
        raise ModelError(f"model {name}", found, f"Remove models.{name}.lora, or name the base model")
    try:
        adapted: torch.nn.Module = PeftModel.from_pretrained(
            network, folder, is_trainable=config.trainable, autocast_adapter_dtype=False
        )
    except Exception as error:  # peft raises whatever its readers raise
        raise ModelError(f"model {name}", f"adapter {folder} cannot be loaded: {error}", "Save it again") from error
    return adapted


def _device(name: str, config: ModelConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model {name}", "device = 'cuda', but torch sees no CUDA device", "Set it to 'auto' or 'cpu'")
    cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def _end_ids(network: torch.nn.Module, tokenizer: Tokenizer) -> frozenset[int]:
    """The template's end of turn, the tokenizer's eos, and all that the model's own settings stop at."""
    generation = getattr(network, "generation_config", None)
    stops: int | Iterable[int] | None = getattr(generation, "eos_token_id", None)
    own = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return frozenset((end_of_turn(tokenizer), *eos, *own))


def export_model(loaded: LoadedModel, folder: Path | str) -> None:
    """Write a model as a folder that transformers (with adapters: peft, on the same base) loads to identical logits.

    The folder appears whole or not at all. It must not exist yet, or be empty.

    Raises:
        ModelError: there is something in the folder already, or it cannot be written.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"model {loaded.name}", f"{target} is not empty", "Export to a new folder")
    try:
        with quiet(), atomic_folder(target) as new:
            loaded.network.save_pretrained(new)  # type: ignore[operator]
            loaded.tokenizer.save_pretrained(new)  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        raise ModelError(f"model {loaded.name}", f"{target} cannot be written: {error}", "Export elsewhere") from error


def list_models() -> list[ModelEntry]:
    """Packaged and tiny models, and whatever else lies in the cache (its folder is its path)."""
    cache = cache_folder() / "models"
    folders = sorted(path.parent for path in cache.glob("[!.]*/config.json"))
    entries = []
    for name, package in PACKAGES.items():
        ready = cache / name in folders
        where = str(cache / name) if ready else package.requirement
        entries.append(ModelEntry(name, where, "ready" if ready else "fetched on first use"))
    for name in TINY:
        built = [folder for folder in folders if folder.name.startswith(f"{name}-")]
        entries.append(ModelEntry(name, str(cache), f"{len(built)} built" if built else "built on first use"))
    named = {cache / name for name in PACKAGES}
    others = [f for f in folders if f not in named and not f.name.startswith(tuple(f"{name}-" for name in TINY))]
    return entries + [ModelEntry(str(folder), str(folder), "ready") for folder in others]
