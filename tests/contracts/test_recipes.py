"""What the recipes' own rules do: the careless demonstrations, and the arms of the recorded studies."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from cotrain import Question, System
from cotrain.data.corpus import Corpus
from cotrain.data.world import generate
from cotrain.engines.base import Request
from cotrain.named import function_named
from cotrain.rewards import f1, propagate, score
from cotrain.sampling import Job, fork_on_first
from cotrain.sections import WorldConfig
from cotrain.study.pages import as_json
from cotrain.study.plan import jobs_of, load_study
from cotrain.study.table import finished, tables_of
from cotrain.systems.search_pipeline import Passages, pick_faults, query_faults
from cotrain.types import Completion, Passage, ToolCall, Turn
from support import cast, run

ROOT = Path(__file__).parents[2]
WORLD = generate(WorldConfig(entities=200, hops=(1,), distractors=0, questions=600))
STUDIES = ["search/screen", "search/confirm", "search/estimators", "hotpotqa/study"]
SETTINGS = {"num_passages": 3, "passage_words": 36, "answer_words": 4}


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> System:
    monkeypatch.chdir(ROOT)
    made: System = function_named(f"recipes/search/formats.py:{request.param}", "system.name", ())(**SETTINGS)
    return made


def says(system: System, agent: str, question: Question, **fields: object) -> str:
    assert system.demonstrate is not None
    said = system.demonstrate(agent, question, fields)
    assert said is not None
    return said


def shares(kinds: list[str]) -> dict[str, float]:
    return {kind: count / len(kinds) for kind, count in Counter(kinds).items()}


@pytest.mark.parametrize("system", ["team"], indirect=True)
def test_half_of_what_the_search_team_demonstrates_is_right_and_a_tenth_breaks_the_format(system: System):
    corpus = Corpus.open(WORLD.passages)
    kinds: dict[str, list[str]] = {"rewriter": [], "reranker": [], "answerer": []}
    for question in WORLD.questions[:200]:
        title = question.supporting_titles[0]
        pages = Passages(corpus.search(title, 3), 36)
        position = [page.title for page in pages].index(title) + 1
        for step in range(10):
            query = says(system, "rewriter", question, step=step)
            kinds["rewriter"].append("faulty" if query_faults(query) else "right" if query == title else "careless")
            pick = says(system, "reranker", question, step=step, passages=pages)
            right = pick == f"[{position}]"
            kinds["reranker"].append("faulty" if pick_faults(pick, 3) else "right" if right else "careless")
            answer = says(system, "answerer", question, step=step, passages=pages)
            right = answer == question.answers[0]
            kinds["answerer"].append("faulty" if len(answer.split()) > 4 else "right" if right else "careless")
    for agent in ("rewriter", "answerer"):
        assert shares(kinds[agent]) == pytest.approx({"right": 0.5, "careless": 0.4, "faulty": 0.1}, abs=0.03)
    # A page alone in what was found is picked by the careless too.
    assert shares(kinds["reranker"])["faulty"] == pytest.approx(0.1, abs=0.03)
    assert 0.5 <= shares(kinds["reranker"])["right"] < 0.75


@pytest.mark.parametrize("system", ["alone"], indirect=True)
def test_the_single_agent_has_the_same_search_and_reads_what_it_lists(system: System):
    (solver,) = system.agents
    assert (solver.tools, solver.max_turns, dict(system.rules)) == (("search",), 2, {})
    question = WORLD.questions[0]
    title, page = next((p.title, p.text) for p in WORLD.passages if p.title == question.supporting_titles[0])
    queries = [says(system, "solver", question, step=step, turns=()) for step in range(200)]
    assert shares([query == f"search: {title}" for query in queries])[True] == pytest.approx(0.6, abs=0.1)
    asked = Completion(token_ids=(), logprobs=(), version=0, stop="stop", text=f"search: {title}")
    listed = ToolCall(tool="search", argument=title, result=f"Elsewhere: nothing\n{title}: {page}")
    turn = Turn(prompt_ids=(), completion=asked, calls=(listed,))
    answers = [says(system, "solver", question, step=step, turns=(turn,)) for step in range(200)]
    assert shares([a == f"answer: {question.answers[0]}" for a in answers])[True] == pytest.approx(0.5, abs=0.1)
    assert all(a.removeprefix("answer: ").rstrip(".") in page for a in answers)


def test_one_agent_on_real_questions_asks_reads_and_answers_and_its_query_earns_what_the_answer_does(monkeypatch):
    monkeypatch.chdir(ROOT)
    system: System = function_named("recipes/hotpotqa/alone.py:alone", "system.name", ())()
    question = Question(id="q", text="Who led Ginon?", answers=("Ann Bee",))
    prompts: list[str] = []

    def say(prompt: str, request: Request) -> str:
        prompts.append(prompt)
        return "Ann Bee" if "Read this." in prompt else "leader of Ginon"

    def search(queries: tuple[str, ...], count: int) -> list[Passage]:
        assert (queries, count) == (("leader of Ginon",), 6)
        return [Passage(title="Ginon", text="It was led by Ann Bee.")] * 6

    roster, _ = cast(system, say, {"search": search})
    group = run(fork_on_first(Job(system=system, roster=roster, question=question, group_size=2)))
    assert [prompt.count("It was led by Ann Bee.") for prompt in prompts] == [0, 0, 3, 3]
    rewarded = propagate(score(group, f1), {})
    assert [t.rewards["shared"] for t in rewarded.trajectories] == [1.0] * 4


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_gives_every_arm_the_same_questions_and_tokens(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(ROOT)
    jobs = jobs_of(load_study(Path(f"recipes/{name}.toml")))
    assert len({job.config.data.model_dump_json() for job in jobs}) == 1
    assert len({job.config.loop.max_sampled for job in jobs if job.config.loop.steps}) == 1
    rollouts = {job.config.sampling.group_size * job.config.sampling.questions_per_step for job in jobs}
    assert rollouts == {32}


@pytest.mark.parametrize("name", STUDIES)
def test_a_recorded_table_is_what_its_runs_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str):
    toml = ROOT / "recipes" / f"{name}.toml"
    kept, study = toml.parent / "results" / toml.stem, load_study(toml)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes", ignore=shutil.ignore_patterns("results", "__pycache__"))
    study.folder.parent.mkdir(parents=True)
    with tarfile.open(kept / "runs.tar.xz") as archive:
        archive.extractall(study.folder.parent, filter="data")
    jobs = jobs_of(study)
    found = json.loads(
        as_json(tables_of(study, jobs, finished(jobs))), parse_float=lambda number: round(float(number), 6)
    )
    recorded = json.loads((kept / "table.json").read_text(), parse_float=lambda number: round(float(number), 6))
    assert found == recorded
