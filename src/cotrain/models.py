"""From a model's name to weights in memory, and from there to a folder that others can load.

`resolve` turns a name (a local folder, a packaged or tiny model, a hub name) into a folder; `load_models` reads a run's
models with their tokenizers, adds adapters where they are wanted and marks what is trained; `export_model` writes one
back as plain transformers or peft files. Loading the same configuration twice gives the same weights, adapters
included. Models that leave one base as it is (adapters on it, frozen uses of it) hold its tensors once between them; a
fully trained model has weights of its own.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cotrain.cache import atomic_folder, cache_folder
from cotrain.errors import ModelError
from cotrain.packaged import PACKAGES, fetch, quiet
from cotrain.render import Tokenizer, end_of_turn
from cotrain.sections import LoraConfig, ModelConfig
from cotrain.tiny import TINY, build_tiny

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "LICENSE*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One model, ready to sample from and to train.

    `network` is a transformers causal LM (with adapters: a peft model around one) in evaluation mode; only what is
    trained requires gradients. `context` is the largest number of tokens, prompt and completion together. `end_ids`
    are the tokens that end a completion. The tensors of the base and the tokenizer may be another model's as well:
    nobody may change them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a model's parts are; `saved` describes the adapter in `folder`, `leaves_base`: it can be shared."""

    name: str
    config: ModelConfig
    folder: Path
    base: Path
    device: torch.device
    context: int
    saved: Mapping[str, object] | None
    leaves_base: bool

    @property
    def has_adapter(self) -> bool:
        return self.saved is not None or self.config.lora is not None


def load_model(name: str, config: ModelConfig) -> LoadedModel:
    """Load one model; as `load_models`."""
    return load_models({name: config})[name]


def load_models(configs: Mapping[str, ModelConfig]) -> dict[str, LoadedModel]:
    """Load what each `path` names onto its `device`, in its `dtype`, with adapters where `lora` says so.

    A folder that holds a peft adapter is loaded on top of its base model. Models with the same base, dtype and device
    that leave the base as it is share its tensors. What a configuration can get wrong is found before weights are read.

    Raises:
        ModelError: a model is missing or damaged, or its configuration does not fit it.
    """
    devices = {name: _device(name, config) for name, config in configs.items()}
    sources = [_find(name, config, devices[name]) for name, config in configs.items()]
    sharing: dict[tuple[object, ...], list[_Source]] = {}
    for source in sources:
        own = None if source.leaves_base else source.name
        sharing.setdefault((source.base, source.config.dtype, source.device, own), []).append(source)
    with quiet(), torch.random.fork_rng(devices=[]):
        tokenizers = {source.base: _read_tokenizer(source) for source in sources}
        for source in sources:
            _check_lora(source)
        loaded: dict[str, LoadedModel] = {}
        for users in sharing.values():
            bases = _copies(_read(users[0]), len(users))
            loaded |= {u.name: _finish(u, base, tokenizers[u.base]) for u, base in zip(users, bases, strict=True)}
    return {name: loaded[name] for name in configs}


def _find(name: str, config: ModelConfig, device: torch.device) -> _Source:
    """Resolve a model's name, and compare its configuration with what the folder says of itself."""
    folder = resolve(config.path, config.seed)
    saved = _saved_adapter(name, folder)
    base = folder if saved is None else _base_folder(name, folder, saved, config.seed)
    if saved is not None and config.lora is not None:
        ours, theirs = (config.lora.rank, config.lora.alpha), (saved.get("r"), saved.get("lora_alpha"))
        if ours != theirs:
            found = f"lora has rank {ours[0]}, alpha {ours[1]}; its adapter in {folder} has {theirs[0]}, {theirs[1]}"
            raise ModelError(f"model {name}", found, f"Remove models.{name}.lora, or name the base model")
    return _Source(
        name=name,
        config=config,
        folder=folder,
        base=base.resolve(),
        device=device,
        context=_context(name, base, config),
        saved=saved,
        leaves_base=_leaves_base(folder, config, saved),
    )


def _leaves_base(folder: Path, config: ModelConfig, saved: Mapping[str, object] | None) -> bool:
    """Whether the base's weights stay as they are; of an adapter from elsewhere only if that is certain."""
    from safetensors import SafetensorError, safe_open

    if saved is None:
        return config.lora is not None or not config.trainable
    # Some bring biases or embeddings for the base, and some take a part out of its weights.
    kind, bias, init = (saved.get(key) for key in ("peft_type", "bias", "init_lora_weights"))
    is_plain = kind == "LORA" and bias in (None, "none") and (init is None or isinstance(init, bool))
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
            return is_plain and all(".lora_" in key for key in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _finish(source: _Source, base: torch.nn.Module, tokenizer: Tokenizer) -> LoadedModel:
    """The model made of a base that is its own, or a copy that shares tensors."""
    network, config = base, source.config
    base.requires_grad_(config.trainable and not source.has_adapter)
    if source.saved is not None:
        network = _read_adapter(source, base)
    elif config.lora is not None:
        network = _add_adapter(source.name, base, config.lora, config.seed, config.trainable)
    return LoadedModel(
        name=source.name,
        config=config,
        folder=source.folder,
        network=network.to(source.device).eval(),
        tokenizer=tokenizer,
        context=source.context,
        end_ids=_end_ids(network, tokenizer),
        has_adapter=source.has_adapter,
    )


def _copies(network: torch.nn.Module, count: int) -> Sequence[torch.nn.Module]:
    """`count` networks with one set of tensors between them.

    Modules and parameters are each network's own, so that adapters, gradients and marks of what is trained belong to
    one; what the parameters and buffers hold exists once. Weights that are tied stay tied.
    """
    if count == 1:
        return [network]
    copies = []
    for _ in range(count):
        shared: dict[int, object] = {id(b): b for b in network.buffers()}
        shared |= {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in network.parameters()}
        copies.append(copy.deepcopy(network, shared))
    return copies


def _check_lora(source: _Source) -> None:
    """Refuse adapters that do not fit, on a network without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    lora = source.config.lora
    if lora is not None and source.saved is None:
        settings = AutoConfig.from_pretrained(source.base, local_files_only=True)
        with torch.device("meta"):
            _add_adapter(source.name, AutoModelForCausalLM.from_config(settings), lora, 0, trainable=False)


def _read_tokenizer(source: _Source) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source.base, local_files_only=True)
    except Exception as error:  # transformers raises whatever its readers raise
        raise _damaged(source.name, source.base, error) from error
    return tokenizer


def _read(source: _Source) -> torch.nn.Module:
    """The network in the base's folder, on its device; refuses weights that would silently be left random."""
    from transformers import AutoModelForCausalLM

    name, folder = source.name, source.base
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_DTYPES[source.config.dtype],
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its readers raise
        raise _damaged(name, folder, error) from error
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        found = f"{folder} has no usable weights for {len(missing)} tensors ({missing[0]}, ...)"
        raise ModelError(f"model {name}", found, "Save or fetch it again")
    loaded: torch.nn.Module = network.to(source.device)  # before it is shared: a later move would part the copies
    return loaded


def _damaged(name: str, folder: Path, error: Exception) -> ModelError:
    return ModelError(f"model {name}", f"{folder} cannot be loaded: {error}", "Save or fetch it again")


def _context(name: str, folder: Path, config: ModelConfig) -> int:
    from transformers import AutoConfig

    try:
        with quiet():
            settings = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except Exception as error:  # transformers raises whatever its readers raise
        raise _damaged(name, folder, error) from error
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


def _saved_adapter(name: str, folder: Path) -> Mapping[str, object] | None:
    """What peft wrote about the adapter in a folder; None where there is none."""
    file = folder / ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name}", f"{file} cannot be read: {error}", "Save it again") from error
    if not isinstance(saved, dict):
        raise ModelError(f"model {name}", f"{file} holds no object", "Save it again")
    return saved


def _base_folder(name: str, folder: Path, saved: Mapping[str, object], seed: int) -> Path:
    """The folder of the weights that the adapter in `folder` was trained on."""
    base = str(saved.get("base_model_name_or_path"))
    # An adapter remembers a folder of the machine that wrote it; a packaged model is known by the folder's name.
    portable = Path(base).name
    try:
        return resolve(portable if portable in PACKAGES and not Path(base).is_dir() else base, seed)
    except ModelError as error:
        fix = f"Set base_model_name_or_path in {folder / ADAPTER_FILE} to the base model"
        raise ModelError(f"model {name}", f"the base of its adapter is missing ({error.found})", fix) from error


def _read_adapter(source: _Source, network: torch.nn.Module) -> torch.nn.Module:
    """The network with the adapter in the source's folder on it."""
    from peft import PeftModel

    try:
        adapted: torch.nn.Module = PeftModel.from_pretrained(
            network, source.folder, is_trainable=source.config.trainable, autocast_adapter_dtype=False
        )
    except Exception as error:  # peft raises whatever its readers raise
        found = f"adapter {source.folder} cannot be loaded: {error}"
        raise ModelError(f"model {source.name}", found, "Save it again") from error
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
