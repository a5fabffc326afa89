"""What a probe measures, by hand and on scripted teams, and that what it keeps can be trained on."""

import json
import logging
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from cotrain import Agent, Question, System, Team, Trajectory, align
from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.data.questions import load_questions, load_set, write_questions
from cotrain.errors import ConfigError, DataError, InfrastructureError, TrainError
from cotrain.probe import (
    RATE,
    Probe,
    check_wish,
    delegations,
    distribution,
    draw,
    dropped_line,
    in_band,
    load_rated,
    probe,
    rated,
    sample,
    success_rate,
    work_tables,
    write_band,
)
from cotrain.runs import GroupRecord
from cotrain.sections import CorpusConfig, QuestionSet
from cotrain.train import train
from cotrain.types import Completion, Group, Turn
from support import cast, run

TOY = Path(__file__).parents[1] / "toy.py"


def said(id, rollout, agent="main", *, shared=None, caller=None, reads=(), turns=1):
    completion = Completion(token_ids=(1,) * 3, logprobs=(-0.5,) * 3, version=0, stop="stop", text="x")
    return Trajectory(
        id=id, question_id="q", rollout_id=f"0.{rollout}", pass_id=0, call=0, agent=agent, model="base", caller=caller,
        reads=reads, turns=(Turn(prompt_ids=(1,), completion=completion),) * turns,
        rewards={} if shared is None else {"shared": shared},
    )  # fmt: skip


def record(*trajectories, id="q"):
    question = Question(id=id, text=f"{id}?", answers=("x",), meta={"split": "train"})
    return GroupRecord(group=Group(question=question, step=0, strategy="s", trajectories=trajectories))


def asked(**rates):
    """Rated questions by id."""
    return [Question(id=id, text=f"{id}?", answers=("x",), meta={RATE: rate}) for id, rate in rates.items()]


def test_a_success_rate_is_the_mean_over_the_answers_that_could_be_judged():
    group = record(said("a", 0, shared=1.0), said("b", 1, shared=0.5), said("c", 2, shared=0.0), said("d", 3)).group
    assert success_rate(group) == 0.5  # (1 + 0.5 + 0) / 3: an unknown answer is not a wrong one
    assert success_rate(record(said("d", 3)).group) is None
    assert success_rate(record().group) is None
    # A finding is no answer, whatever reward was carried to it, and whether it was read or not.
    read = said("f", 0, "sub", shared=1.0, caller="a")
    unread = said("g", 0, "sub", shared=1.0, caller="a")
    assert success_rate(record(read, unread, said("a", 0, shared=0.25, reads=("f",))).group) == 0.25


def test_rated_questions_carry_their_rate_and_the_rest_of_what_was_known():
    (known, unknown) = rated([record(said("a", 0, shared=0.75), id="q1"), record(said("b", 0), id="q2")])
    assert (known.id, known.answers, dict(known.meta)) == ("q1", ("x",), {"split": "train", RATE: 0.75})
    assert unknown.meta[RATE] is None


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0, 1, ["b", "c"]),
        (0.25, 1, ["c"]),  # both bounds are excluded
        (0, 0.5, ["b"]),
        (-1, 0.5, ["a", "b"]),  # a bound below 0 takes the zeros in
        (0.25, 2, ["c", "d"]),
        (0.5, 0.75, []),
    ],
)
def test_a_band_lies_strictly_between_its_bounds(low, high, kept):
    assert [q.id for q in in_band(asked(a=0.0, b=0.25, c=0.5, d=1.0, e=None), low, high)] == kept


def test_the_distribution_counts_every_question_once():
    questions = asked(a=0.0, b=0.0, c=0.1, d=0.25, e=0.5, f=0.74, g=0.99, h=1.0)
    expected = {"0": 2, "0 to 0.25": 1, "0.25 to 0.5": 1, "0.5 to 0.75": 2, "0.75 to 1": 1, "1": 1}
    assert distribution(questions) == expected
    more = distribution([*questions, *asked(i=None, j=-0.5, k=1.5)])
    assert more == {**expected, "unknown": 1, "below 0 or above 1": 2}


def test_delegations_are_counted_per_rollout_and_kind():
    def sub(id, rollout, agent="sub", **known):
        return said(id, rollout, agent, caller=f"m{rollout}", **known)

    found = record(
        sub("a", 0, shared=1.0), sub("b", 0, shared=1.0), sub("c", 0, "other", shared=1.0),
        sub("unread", 0), sub("empty", 0, shared=1.0, turns=0),
        said("m0", 0, shared=1.0, reads=("a", "b", "c", "empty")),
        said("m1", 1, shared=0.0),
        sub("d", 2), said("m2", 2, reads=("d",)),  # its answer could not be judged: the rollout is not trained on
        sub("e", 3, shared=0.0), said("m3", 3, shared=0.0, reads=("e",)),
    )  # fmt: skip
    assert delegations([found], "sub") == [2, 0, 1]
    assert delegations([found], "other") == [1, 0, 0]
    assert delegations([found], "main") == [0, 0, 0]  # nobody delegated to it


def test_the_suggested_size_is_the_99th_percentile():
    records = [
        record(
            *(said(f"{k}{i}", 0, "sub", shared=1.0, caller=f"m{k}") for i in range(count)),
            said(f"m{k}", 0, shared=1.0, reads=tuple(f"{k}{i}" for i in range(count))),
            id=str(k),
        )
        for k, count in enumerate([1] * 98 + [4, 9])
    ]
    _, table = work_tables(Probe(records=records, dropped={}, delegates=("sub",)))
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["sub"], ["100"], ["1.11"], ["1: 98, 4: 1, 9: 1"], ["4"]]


def test_tokens_are_those_that_were_sampled():
    records = [record(said("a", 0, turns=1), said("b", 1, turns=3)), record(said("c", 0, "other", turns=2))]
    found = Probe(records=records, dropped={"zero_variance": 3, "infrastructure": 1}, delegates=())
    (table,) = work_tables(found)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [("main", "2", "12", "6.0", "9"), ("other", "1", "6", "6.0", "6")]
    assert dropped_line(found) == "dropped: infrastructure: 1, zero_variance: 3"


def test_more_questions_draw_the_same_ones_first():
    questions = asked(**{f"q{i}": None for i in range(50)})
    few, many = draw(questions, 8, seed=3), draw(questions, 30, seed=3)
    assert many[:8] == few
    assert len({q.id for q in many}) == 30
    assert draw(questions, 8, seed=4) != few
    assert sorted(q.id for q in draw(questions, 99, seed=3)) == sorted(q.id for q in questions)


def test_an_empty_band_is_refused_with_the_distribution(tmp_path):
    with pytest.raises(DataError) as caught:
        write_band(tmp_path / "hard.jsonl", asked(a=0.0, b=0.0, c=1.0, d=None), 0, 1)
    assert caught.value.where == f"band of {tmp_path / 'hard.jsonl'}"
    assert caught.value.found == "none of 4 success rates lies strictly between 0 and 1 (0: 2, 1: 1, unknown: 1)"
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_refused_before_anything_is_sampled(tmp_path):
    (tmp_path / "old.jsonl").write_text("")
    for low, high in ((0.5, 0.5), (1, 0), (float("nan"), 1)):
        with pytest.raises(ConfigError, match="no number lies between"):
            check_wish(low, high, [])
    with pytest.raises(DataError, match="exists already"):
        check_wish(0, 1, [tmp_path / "new.jsonl", tmp_path / "old.jsonl"])
    with pytest.raises(DataError, match="cannot be written"):
        check_wish(0, 1, [tmp_path / "old.jsonl" / "new.jsonl"])
    check_wish(0, 1, [tmp_path / "folder" / "new.jsonl"])


def test_only_rated_questions_have_a_band(tmp_path):
    path = tmp_path / "q.jsonl"
    write_questions(path, asked(a=0.5, b=None, c=1))
    assert [q.meta[RATE] for q in load_rated(path)] == [0.5, None, 1]
    for value in ("0.5", True):
        write_questions(path, asked(a=value))
        with pytest.raises(DataError, match="question a: its success_rate is"):
            load_rated(path)
    write_questions(path, [Question(id="a", text="?", answers=("x",))])
    with pytest.raises(DataError, match="question a: it has no success_rate"):
        load_rated(path)


def asking() -> System:
    """A main agent that delegates to a helper as often as it likes, and whose tool may fail."""

    def flaky(argument: str) -> str:
        raise InfrastructureError("tool flaky", "it is down", "Wait", "tool_failed")

    async def run(team: Team, question: Question) -> Trajectory:
        return await team.ask("main", question=question.text)

    main = Agent(name="main", model="base", prompt="Q{question}", tools=("flaky",), delegates=("helper",), max_turns=2)
    helper = Agent(name="helper", model="base", prompt="T{task}", max_turns=1)
    return System(run=run, agents=(main, helper), tools={"flaky": flaky})


def play(prompt, request):
    """Main delegates as often as its question's number says (q9: its tool is down), then is right half the time."""
    if "T" in prompt.split("\n")[-2]:
        return "answer: a fact"
    number = int(prompt.split("Qq")[1][0])
    if number == 9:
        return "flaky: x"
    if number and "results:" not in prompt:
        return "\n".join(f"helper: part {i}" for i in range(number))
    lucky = random.Random(repr(request.key)).random() < 0.5
    return "answer: right" if lucky else "answer: wrong"


@pytest.fixture
def team(monkeypatch):
    """A plan and a roster of the scripted team."""
    module = ModuleType("asking_team")
    module.asking = asking
    monkeypatch.setitem(sys.modules, "asking_team", module)

    def make(*settings):
        plan = make_plan(load_config(None, ["system.name=asking_team:asking", "rewards.metric=exact_match", *settings]))
        roster, _ = cast(asking(), play, dict(asking().tools))
        return plan, roster

    return make


def numbered(*ids):
    return [Question(id=id, text=id, answers=("right",)) for id in ids]


def test_a_probe_samples_whole_rollouts_of_each_question_and_judges_them(team):
    plan, roster = team("sampling.group_size=8", "engine.max_batch=16", "sampling.strategy=round_robin")
    told, batches = [], []
    found = run(
        sample(
            plan,
            roster,
            numbered("q0", "q1", "q3"),
            on_batch=lambda records: batches.append([r.group.question.id for r in records]),
            progress=lambda *done: told.append(done),
        )
    )
    assert [len(r.group.by_rollout()) for r in found.records] == [8, 8, 8]
    for one in found.records:
        right = [t.output == "right" for t in one.group.trajectories if t.agent == "main"]
        assert success_rate(one.group) == sum(right) / 8
    rates = [success_rate(r.group) for r in found.records]
    assert any(0 < rate < 1 for rate in rates)  # sampled as in training, not greedily
    assert found.delegates == ("helper",)
    assert delegations(found.records, "helper") == [0] * 8 + [1] * 8 + [3] * 8
    assert batches == [["q0", "q1"], ["q0", "q1", "q3"]]  # 16 completions at once; all records so far each time
    assert told == [("probing", 0, 3), ("probing", 2, 3), ("probing", 3, 3)]


def test_delegations_are_those_that_alignment_counts(team):
    plan, roster = team()
    found = run(sample(plan, roster, numbered("q1", "q2", "q4")))
    for one in found.records:
        weights = align.none(one.group, one.credits)
        aligned = [
            sum(t.id in weights for t in trajectories if t.agent == "helper")
            for trajectories in one.group.by_rollout().values()
        ]
        assert delegations([one], "helper") == aligned
        assert sum(aligned) > 0


def test_rollouts_that_fail_are_counted_and_their_question_is_unknown(team, caplog):
    plan, roster = team()
    with caplog.at_level(logging.ERROR):
        found = run(sample(plan, roster, numbered("q9", "q0")))
    assert [q.meta[RATE] is None for q in rated(found.records)] == [True, False]
    assert found.dropped["tool_failed"] == 4
    kept = []
    with pytest.raises(InfrastructureError) as caught:
        run(sample(plan, roster, numbered("q9"), on_batch=kept.append))
    assert caught.value.found == "not one of 1 questions has an answer that could be judged (dropped: tool_failed: 4)"
    assert kept == []


def toy(*settings):
    return load_config(
        None,
        [
            "models.base.path=tiny-llama",
            f"system.name={TOY}:toy",
            f"rewards.metric={TOY}:vowels",
            "sampling.group_size=2",
            "data.train.world={entities=40, questions=40, seed=2}",
            *settings,
        ],
    )


def test_the_kept_questions_of_the_world_are_a_training_set_with_the_world_s_pages(tmp_path):
    config, out = toy(), tmp_path / "some.jsonl"
    found = probe(config, count=5, keep=tmp_path / "all.jsonl")
    questions = rated(found.records)
    pool, _ = load_set(config.data.train, config.corpus)
    assert [q.id for q in questions] == [q.id for q in draw(pool, 5, config.loop.seed)]
    assert [(q.id, q.meta[RATE]) for q in load_rated(tmp_path / "all.jsonl")] == [
        (q.id, q.meta[RATE]) for q in questions
    ]
    middle = sorted(q.meta[RATE] for q in questions)[2]
    number = write_band(out, questions, -1, middle + 1e-9)
    assert 3 <= number <= 5
    filtered = toy(f"data.train.source={out}")
    assert (filtered.data.train.corpus, filtered.data.train.split) == ("world", None)
    chosen, corpus = load_set(filtered.data.train, filtered.corpus)
    assert [q.id for q in chosen] == [q.id for q in questions if q.meta[RATE] < middle + 1e-9]
    by_id = {q.id: q for q in pool}
    pages = {passage.title for passage in corpus.passages}
    for q in chosen:
        assert (q.text, q.answers, q.supporting_titles) == (
            by_id[q.id].text,
            by_id[q.id].answers,
            by_id[q.id].supporting_titles,
        )
        assert pages.issuperset(q.supporting_titles)
    again = probe(filtered, count=5)  # a filtered set can be probed in its turn, and gives the same rates
    assert {q.id: q.meta[RATE] for q in rated(again.records)}.items() <= {q.id: q.meta[RATE] for q in questions}.items()


def test_the_kept_questions_of_files_are_a_training_set(tmp_path):
    own = [
        Question(id=f"q{i}", text=f"What is {i}?", answers=("x", "y"), meta={"split": "train", "level": "easy"})
        for i in range(4)
    ]
    write_questions(tmp_path / "questions.jsonl", own)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Apple", "text": "A fruit."}) + "\n")
    files = [f"data.train.source={tmp_path}/questions.jsonl", f"data.train.corpus={tmp_path}/corpus.jsonl"]
    found = probe(toy(*files, "data.train.split=train", "data.train.limit=3"), count=9)
    assert sorted(q.id for q in rated(found.records)) == ["q0", "q1", "q2"]
    write_band(tmp_path / "some.jsonl", rated(found.records), -1, 2)
    chosen = QuestionSet(source=f"{tmp_path}/some.jsonl", corpus=f"{tmp_path}/corpus.jsonl", split="train")
    kept, _ = load_set(chosen, CorpusConfig())
    assert sorted((q.id, q.answers, q.meta["level"]) for q in kept) == [(f"q{i}", ("x", "y"), "easy") for i in range(3)]


def test_a_run_is_probed_with_the_weights_of_its_checkpoint(tmp_path):
    with pytest.raises(TrainError, match="it has no checkpoint yet"):
        probe(toy(), tmp_path, count=2)
    config = toy(
        "loop.steps=1",
        "models.base.optimizer.lr=3e-2",
        "sampling.questions_per_step=2",
        "data.eval.dev.limit=1",
        "eval.bootstrap=100",
    )
    train(config, tmp_path / "run")

    def answers(folder, checkpoint):
        found = probe(config, folder, count=2, checkpoint=checkpoint)
        return [t.output for r in found.records for t in r.group.trajectories]

    untrained = answers(tmp_path / "run", "untrained")
    assert untrained == answers(None, "latest") == answers(tmp_path / "run", "0")
    assert untrained != answers(tmp_path / "run", "latest")


def test_a_probed_question_that_is_probed_again_has_its_new_rate(tmp_path):
    old = replace(record(said("a", 0, shared=1.0)).group.question, meta={RATE: 0.25, "split": "train"})
    (again,) = rated([GroupRecord(group=replace(record(said("a", 0, shared=1.0)).group, question=old))])
    assert again.meta == {RATE: 1.0, "split": "train"}
    write_questions(tmp_path / "q.jsonl", [again])
    assert load_questions(tmp_path / "q.jsonl") == [again]
