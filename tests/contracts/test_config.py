import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.config import RunConfig, dump_config, load_config, parse_config
from cotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loop.stepz=3", "unknown key 'loop.stepz'. Did you mean 'steps'"),
        ("modles.base.path='x'", "unknown key 'modles'. Did you mean 'models'"),
        ("models.base.lora.rang=4", "unknown key 'models.base.lora.rang'. Did you mean 'rank'"),
        ("data.eval.dev.sorce='x'", "unknown key 'data.eval.dev.sorce'. Did you mean 'source'"),
        ("data.train.world.zzz=1", "Known keys here: seed, entities, hops"),
        ("loss.beta=-1", "loss.beta = -1"),
        ("sampling.group_size=1", "sampling.group_size = 1"),
        ("models.base.dtype='float16'", "models.base.dtype = 'float16'"),
        ("sampling.fork_probabilities=[0.5, 0.5]", "fork_probabilities belong to strategy 'round_robin'"),
        ("rewards.penalties.rewriter=0.5", "rewards.penalties.rewriter = 0.5"),
        ("rewards.penalties.rewriter=-inf", "rewards.penalties.rewriter = -inf"),
        ("models.base.optimizer.lr=inf", "should be a finite number"),
        ("models.'a/b'.path=x", "the name \"'a/b'\" cannot be a file's"),
        ("data.eval.a/b.limit=1", "the name 'a/b' cannot be a file's"),
        ("data.eval.dev@untrained.limit=1", "the name 'dev@untrained' cannot be a file's"),
        ("loop", "no key=value pair"),
        ("loop.steps.x=1", "loop.steps"),
    ],
)
def test_what_is_wrong_is_named_with_its_key_and_a_way_out(override, message):
    with pytest.raises(ConfigError, match=r".") as caught:
        load_config(None, ["loop.steps=5", override])
    assert message in str(caught.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[loop\nsteps = 3")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_config(tmp_path)


def test_the_world_s_questions_are_never_trained_on_and_held_out_at_once():
    config = load_config(None, ["data.train.limit=5", "data.eval.dev.limit=3", "data.eval.far.world.hops=[3]"])
    assert config.data.train.split == "train"
    assert {name: chosen.split for name, chosen in config.data.eval.items()} == {"dev": "dev", "far": "dev"}
    files = load_config(None, ["data.train.source=q.jsonl", "data.eval.dev.source=q.jsonl"])
    assert (files.data.train.split, files.data.eval["dev"].split) == (None, None)
    assert parse_config(tomllib.loads(dump_config(files))) == files


def test_overrides_keep_types_and_take_bare_words(tmp_path):
    (tmp_path / "run.toml").write_text('[loop]\nsteps = 3\n[models.base]\npath = "a"\n')
    config = load_config(tmp_path / "run.toml", ["models.base.path=some/folder", "loop.steps=7", "data.train.limit=5"])
    assert (config.models["base"].path, config.loop.steps, config.data.train.limit) == ("some/folder", 7, 5)


@given(st.text(), st.floats(0, 10), st.lists(st.text(), max_size=3))
def test_a_dumped_configuration_reads_back_equal(text, beta, stop):
    config = parse_config(
        {
            "system": {"settings": {"a b": text, "n": 3, "yes": True}},
            "loss": {"beta": beta},
            "agents": {"odd.name": {"prompt": text, "stop": stop}},
            "models": {"base": {"lora": {"rank": 4}}, "other": {}},
        }
    )
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_defaults_are_a_valid_run():
    assert RunConfig() == load_config(None)


def test_importing_the_package_and_its_configuration_loads_no_torch():
    code = "import sys, cotrain, cotrain.config, cotrain.sampling, cotrain.cli; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
