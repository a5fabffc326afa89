"""The code in the documentation runs as it stands."""

import asyncio
import re
from pathlib import Path

from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.engines.scripted import ScriptedEngine
from cotrain.loops import judge, samples_by_model
from cotrain.roster import Roster
from cotrain.sampling import Job
from cotrain.types import Question
from support import CharRenderer, CharTokenizer

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    """The page's code blocks by the file name in their first line."""
    found = re.findall(rf"```{language}\n# (\S+)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def written(folder, page):
    for language in ("python", "toml"):
        for name, text in blocks(page, language).items():
            (folder / name).write_text(text, encoding="utf-8")


def test_the_research_team_is_under_60_lines_and_trains_two_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "research-team.md")
    code = (tmp_path / "my_research.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in code.splitlines()) < 60
    plan = make_plan(load_config("research.toml", ["sampling.group_size=3"]))

    def main(prompt, request):
        rounds = prompt.count("results:")
        branch = request.key[3]
        if branch == "0.2":
            return "I do not know"  # never delegates, and breaks the format
        if rounds == 0:
            return "researcher: birthplace of Ada\nresearcher: river of London"
        return "answer: Thames" if branch == "0.0" else "answer: London"

    def sub(prompt, request):
        if "results:" not in prompt:
            return "look: London" if "river" in prompt else "look: Ada Lovelace"
        return "answer: Thames" if "Thames" in prompt else "answer: London"

    engines = {"main": ScriptedEngine(main, CharTokenizer()), "sub": ScriptedEngine(sub, CharTokenizer())}
    roster = Roster(
        agents=plan.agents,
        engines=engines,
        renderers={"main": CharRenderer(), "sub": CharRenderer()},
        tools=plan.system.tools,
    )
    question = Question(id="q", text="Which river flows through Ada's city?", answers=("Thames",))
    group = asyncio.run(plan.strategy(Job(system=plan.system, roster=roster, question=question, group_size=3)))
    records, _ = asyncio.run(judge(plan, [group]))
    (record,) = records
    credits = {(t.agent, t.rollout_id): record.credits[t.id] for t in record.group.trajectories}
    assert credits == {
        ("main", "0.0"): 1.0,
        ("main", "0.1"): 0.1,
        ("main", "0.2"): 0.0,
        ("researcher", "0.0"): 1.0,
        ("researcher", "0.1"): 0.1,
    }
    samples = samples_by_model(records, list(plan.config.models))
    assert {s.agent for s in samples["main"]} == {"main"}
    assert len(samples["main"]) == 3
    assert [s.agent for s in samples["sub"]] == ["researcher"] * 4
