"""Runs with several models: what is frozen stays as it is, each trained model learns from its own agents alone, and a
run with full, adapted and frozen weights resumes and exports like any other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cotrain import Agent, Question, SamplingParams, System, Team, Trajectory, runs
from cotrain import train as training
from cotrain.assemble import load_cast, make_plan
from cotrain.batch import make_samples
from cotrain.checkpoints import latest
from cotrain.config import load_config
from cotrain.models import export_model, load_model
from cotrain.render import Renderer
from cotrain.rewards import METRICS
from cotrain.tiny import END_OF_TEXT, TURN_END, TURN_START, TinySpec, build_tiny, random_network, train_tokenizer
from cotrain.tiny import tokenizer_texts as texts
from cotrain.trained import use_checkpoint
from cotrain.trainer import Trainer
from toy import vowels

TOY = Path(__file__).parents[1] / "toy.py"
SETTINGS = [
    f"rewards.metric={TOY}:vowels",
    "data.eval.dev.limit=2",
    "sampling.questions_per_step=2",
    "loop.checkpoint_every=1",
    "eval.every=0",
    "eval.bootstrap=100",
]


def trio() -> System:
    """Three agents in a row; the middle one reads the first, the last one the middle one."""

    async def run(team: Team, question: Question) -> Trajectory:
        first = await team.ask("first", question=question.text)
        middle = await team.ask("middle", question=question.text, said=first.output, reads=[first])
        return await team.ask("last", question=question.text, said=middle.output, reads=[middle])

    few = SamplingParams(max_tokens=6)
    prompts = {"first": "{question}", "middle": "{said} {question}", "last": "{question} {said}"}
    return System(
        run=run,
        agents=tuple(Agent(name=name, model="base", prompt=text, sampling=few) for name, text in prompts.items()),
    )


def two_models(*settings, scout="tiny-qwen3"):
    """The toy: its scout is played by one model, its speaker by one of another architecture."""
    return load_config(
        None,
        [
            *SETTINGS,
            f"system.name={TOY}:toy",
            f"models.small.path={scout}",
            "models.small.optimizer.lr=3e-3",
            "models.large.path=tiny-llama",
            "models.large.optimizer.lr=3e-3",
            "agents.scout.model=small",
            "agents.speaker.model=large",
            "loop.steps=2",
            *settings,
        ],
    )


def three_models(*settings):
    """Full, adapted and frozen weights, all of them begun from one folder."""
    folder = build_tiny("tiny-llama", 0)
    paths = [f"models.{name}.path={folder}" for name in ("whole", "adapted", "frozen")]
    return load_config(
        None,
        [
            *SETTINGS,
            f"system.name={__file__}:trio",
            *paths,
            "models.whole.optimizer.lr=3e-3",
            "models.adapted.lora.rank=4",
            "models.adapted.optimizer.lr=1e-2",
            "models.frozen.trainable=false",
            "agents.first.model=adapted",
            "agents.middle.model=frozen",
            "agents.last.model=whole",
            "loop.steps=4",
            *settings,
        ],
    )


@pytest.fixture
def casts(monkeypatch):
    """The models of the runs that a test starts, in order."""
    kept = []

    def keep(plan):
        kept.append(load_cast(plan))
        return kept[-1]

    monkeypatch.setattr(training, "load_cast", keep)
    return kept


@pytest.fixture
def updates(monkeypatch):
    """(model, samples) of the updates that a test's runs make."""
    made, update = [], Trainer.update

    def record(self, samples):
        made.append((self.model.name, list(samples)))
        return update(self, samples)

    monkeypatch.setattr(Trainer, "update", record)
    return made


def weights(model):
    return model.network.state_dict()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def train_rows(folder):
    rows = [row for row in runs.read_metrics(folder) if row["kind"] == "train"]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


@pytest.mark.parametrize("frozen", ["small", "large"])
def test_a_frozen_model_takes_part_and_keeps_its_weights_bit_for_bit(tmp_path, casts, updates, frozen):
    config, trained = two_models(f"models.{frozen}.trainable=false"), {"small": "large", "large": "small"}[frozen]
    training.train(config, tmp_path / "run")
    (cast,) = casts
    untrained = {name: load_model(name, config.models[name]) for name in config.models}
    assert same(weights(cast.models[frozen]), weights(untrained[frozen]))
    assert not same(weights(cast.models[trained]), weights(untrained[trained]))
    assert {name for name, _ in updates} == {trained}
    assert cast.engines[frozen].version == 0
    kinds = {name: cast.models[name].network.config.model_type for name in cast.models}
    assert kinds == {"small": "qwen3", "large": "llama"}
    agents = {"small": "scout", "large": "speaker"}
    for step in (1, 2):
        for record in runs.read_groups(tmp_path / "run", step):
            of_frozen = [t for t in record.group.trajectories if t.agent == agents[frozen]]
            assert of_frozen
            assert {t.model for t in of_frozen} == {frozen}
            assert not any(t.trainable for t in of_frozen)
            assert {turn.completion.version for t in of_frozen for turn in t.turns} == {0}
    assert [p.name for p in latest(tmp_path / "run" / "checkpoints").iterdir() if p.is_dir()] == [trained]


def other_folder(folder):
    """A Qwen3 with another tokenizer: fewer tokens, and the special ones in another order."""
    tokenizer = train_tokenizer(texts(), 700, special=(TURN_END, END_OF_TEXT, TURN_START))
    network = random_network(TinySpec(architecture="qwen3", vocab=700, hidden=64, layers=2), tokenizer, 0)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_each_model_learns_from_its_own_agents_in_its_own_tokens(tmp_path, casts, updates):
    training.train(two_models(scout=other_folder(tmp_path / "other")), tmp_path / "run")
    (cast,) = casts
    vocab = {name: model.network.config.vocab_size for name, model in cast.models.items()}
    assert vocab == {"small": 700, "large": 2048}
    assert {name: model.end_ids for name, model in cast.models.items()} == {"small": {0}, "large": {2}}
    renderers = {name: Renderer(model.tokenizer) for name, model in cast.models.items()}
    agents, highest = {"small": "scout", "large": "speaker"}, dict.fromkeys(vocab, 0)
    written = {}  # trajectory id -> trajectory, and the question it is about
    for step in (1, 2):
        for record in runs.read_groups(tmp_path / "run", step):
            written |= {(step, t.id): (t, record) for t in record.group.trajectories}
    seen = set()
    for number, (name, samples) in enumerate(updates):
        assert {s.agent for s in samples} == {agents[name]}
        for sample in samples:
            assert sample.model == name
            assert len(sample.token_ids) == len(sample.mask)
            assert all(0 <= id < vocab[name] for id in sample.token_ids)
            highest[name] = max(highest[name], *sample.token_ids)
            step = number // 2 + 1
            trajectory, record = written[(step, sample.trajectory_id)]
            assert (trajectory.agent, trajectory.model) == (agents[name], name)
            # Read by its own tokenizer a sample is the chat that the agent was in, token by token.
            text = renderers[name].decode(sample.token_ids[: sample.mask.index(True)])
            assert record.group.question.text in text
            (turn,) = trajectory.turns
            assert sample.token_ids == turn.prompt_ids + turn.completion.token_ids
            seen.add((step, sample.trajectory_id))
    assert [name for name, _ in updates] == ["small", "large"] * 2
    assert highest["large"] >= 700  # ids that the other model does not have
    # What was left out has no advantage; nothing was given to the wrong model.
    records = {(step, id(r)): r for (step, _), (_, r) in written.items()}
    expected = {
        (step, s.trajectory_id) for (step, _), r in records.items() for s in make_samples(r.group, r.advantages)
    }
    assert seen == expected != set()


def test_full_adapted_and_frozen_weights_resume_as_an_unbroken_run(tmp_path, casts, monkeypatch):
    config, unbroken, broken = three_models(), tmp_path / "unbroken", tmp_path / "broken"
    training.train(config, unbroken)

    def breaks_at_step_3(answer, golds):
        if (broken / "groups" / "step-000002.jsonl").exists():
            raise ZeroDivisionError
        return vowels(answer, golds)

    monkeypatch.setitem(METRICS, f"{TOY}:vowels", breaks_at_step_3)
    with pytest.raises(ZeroDivisionError):
        training.train(config, broken)
    monkeypatch.delitem(METRICS, f"{TOY}:vowels")
    assert latest(broken / "checkpoints").name == "step-000002"
    training.train(config, broken, resume=True)

    first, _, resumed = casts
    assert train_rows(broken) == train_rows(unbroken)
    assert [row["step"] for row in train_rows(broken)] == [1, 2, 3, 4]
    for name, model in resumed.models.items():
        assert same(weights(model), weights(first.models[name]))
        is_untrained = same(weights(model), weights(load_model(name, config.models[name])))
        assert is_untrained == (name == "frozen")
    for name in ("whole", "adapted"):
        ours, theirs = (
            load_file(f / "checkpoints/step-000004" / name / "weights.safetensors") for f in (broken, unbroken)
        )
        assert same(ours, theirs)
        assert all("lora_" in key for key in ours) == (name == "adapted")
    for step in range(1, 5):
        file = f"groups/step-{step:06d}.jsonl"
        assert (broken / file).read_bytes() == (unbroken / file).read_bytes()
    base = [t.data_ptr() for t in resumed.models["frozen"].network.parameters()]
    assert set(base) <= {t.data_ptr() for t in resumed.models["adapted"].network.parameters()}
    assert not set(base) & {t.data_ptr() for t in resumed.models["whole"].network.parameters()}


@torch.no_grad()
def logits(model):
    return model.network(input_ids=torch.tensor([[1, 70, 300, 500, 2]])).logits


def test_each_model_of_a_finished_run_can_be_exported(tmp_path, casts):
    config, folder = three_models("loop.steps=2"), tmp_path / "run"
    training.train(config, folder)
    cast = load_cast(make_plan(config))
    assert use_checkpoint(cast, folder, "latest") == 2
    assert {name: engine.version for name, engine in cast.engines.items()} == {"whole": 2, "adapted": 2, "frozen": 0}
    for name, model in cast.models.items():
        assert same(weights(model), weights(casts[0].models[name]))
        export_model(model, tmp_path / name)
        settings = config.models[name].model_copy(update={"path": str(tmp_path / name)})
        assert torch.equal(logits(load_model(name, settings)), logits(model))
    assert [(tmp_path / name / "model.safetensors").exists() for name in cast.models] == [True, False, True]
    saved = json.loads((tmp_path / "adapted" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == config.models["frozen"].path
