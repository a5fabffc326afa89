"""What a report must hold at every stage of a run, and that no text in it can act on the reader's browser."""

import json
import re
from html.parser import HTMLParser

import pytest

from cotrain.charts import MAX_POINTS, Series, binned, line_chart
from cotrain.config import RunConfig, dump_config
from cotrain.curves import sections
from cotrain.errors import DataError
from cotrain.evaluate import Prediction, eval_row
from cotrain.report import write_report
from cotrain.runs import GroupRecord, append_metrics, write_groups, write_predictions
from cotrain.types import Group, Question, Trajectory

VOID = {"meta", "path", "use", "rect", "br", "line"}


class Page(HTMLParser):
    """The text, tags and ids of a page; fails on tags that do not nest."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def predictions(f1, ids="abcdef", type=""):
    return [
        Prediction(question_id=id, answer="a", golds=("g",), em=0.0, f1=f1, accuracy=0.0, reward=f1, type=type)
        for id in ids
    ]


def trajectory(id, agent, output, **more):
    return Trajectory(
        id=id, question_id="q", rollout_id="0.0", pass_id=0, call=0, agent=agent, model="base", output=output, **more
    )


def record(step, output="Ann Bee", agent="answerer", question="Who built it?"):
    group = Group(
        question=Question(id="q", text=question, answers=("gold!",)),
        step=step,
        strategy="fork_on_first",
        trajectories=(trajectory("t", agent, output, rewards={"shared": 0.5}, faults=("too_long",)),),
        dropped={"infrastructure": 1},
    )
    return GroupRecord(group=group, credits={"t": -0.5}, advantages={"t": 1.25})


def train_row(step, **more):
    return {
        "kind": "train",
        "step": step,
        "team/reward": 0.1 * step,
        "agent/answerer/credit": 0.2 * step,
        "agent/answerer/fault_rate": 0.5,
        "model/base/loss": -0.01,
        "model/base/lr": 1e-6,
        "model/base/version": step,
        "time/rollout_s": 3.0,
        "time/update_s": 1.0,
        **more,
    }


def write_run(folder, steps=3):
    """A finished run: a warm-up, three evaluations of one set, `steps` steps."""
    (folder / "config.toml").write_text(dump_config(RunConfig()))
    for step, name, f1 in ((0, "dev@untrained", 0.125), (0, "dev", 0.25), (steps, "dev", 0.75)):
        found = predictions(f1, type="bridge") + predictions(f1, ids="x", type="yes/no")
        write_predictions(folder, step, name, found)
        append_metrics(folder, eval_row(step, name, found, 100) | {"time/eval_s": 2.0})
        if name.endswith("untrained"):
            for number in (1, 2):
                append_metrics(
                    folder, {"kind": "warmup", "step": 0, "warmup_step": number, "model/base/loss": 3.0 / number}
                )
    for step in range(1, steps + 1):
        append_metrics(folder, train_row(step, **({"dropped/equal_credits": 4} if step == 2 else {})))
        write_groups(folder, step, [record(step)])


def page_of(folder):
    html = write_report(folder).read_text(encoding="utf-8")
    return Page(html), html


def test_a_finished_run_shows_everything(tmp_path):
    write_run(tmp_path)
    page, _ = page_of(tmp_path)
    for heading in ("Before and after", "Held-out scores", "Team", "Agents", "Models", "Warm-up", "Dropped", "Time"):
        assert heading in page.text
    assert "Step 3 of 20 · system search_pipeline" in page.text
    # F1 of every question rose from 0.25 to 0.75, from 0.125 before the warm-up.
    assert "step 0 against step 3, 7 questions" in page.text
    assert "F1 0.250 0.750 +0.500 +0.500 … +0.500 yes" in page.text
    assert "untrained against step 0, 7 questions" in page.text
    assert "F1 0.125 0.250 +0.125 +0.125 … +0.125 yes" in page.text
    assert "F1, bridge (6) 0.250 0.750" in page.text
    assert "Exact match 0.000 0.000 +0.000 +0.000 … +0.000 no" in page.text
    assert "rollout 9 s 50%" in page.text  # of 3 rollouts of 3 s, 3 updates of 1 s and 3 evaluations of 2 s
    assert "equal_credits 4 100%" in page.text
    assert "Step 1: Who built it?" in page.text
    assert "shared 0.500 · credit -0.500 · advantage +1.250 · 0 tokens · faults: too_long" in page.text
    assert 'system = "search' not in page.text
    assert 'name = "search_pipeline"' in page.text


def test_before_the_first_line_it_says_so(tmp_path):
    page, _ = page_of(tmp_path)
    assert "There is no data yet" in page.text
    assert "svg" not in page.tags


def test_with_one_evaluation_nothing_is_compared(tmp_path):
    append_metrics(tmp_path, eval_row(0, "dev", predictions(0.5), 100))
    page, _ = page_of(tmp_path)
    assert "dev · step 0; no later evaluation yet" in page.text
    assert "There is no data yet" not in page.text
    assert "table" not in page.tags


def test_missing_predictions_and_groups_are_said_to_be_missing(tmp_path):
    write_run(tmp_path)
    (tmp_path / "eval" / "step-000000-dev.jsonl").unlink()
    (tmp_path / "groups" / "step-000001.jsonl").unlink()
    page, _ = page_of(tmp_path)
    assert "step 0 against step 3: cannot be compared." in page.text
    assert "untrained against step 0: cannot be compared." in page.text
    assert re.search(r"Step 1: \S*step-000001.jsonl: no such file", page.text)
    assert "Step 3: Who built it?" in page.text


def test_nothing_is_requested_from_outside_and_no_id_occurs_twice(tmp_path):
    write_run(tmp_path)
    page, html = page_of(tmp_path)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
    assert set(re.findall(r"https?://[^\s\"'<]*", html)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }  # names of XML name spaces, which no browser fetches
    assert "default-src 'none'" in html
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    used = set(re.findall(r"url\(#([^)]*)\)", html)) | {v[1:] for n, v in page.attributes if n == "xlink:href"}
    assert used <= set(ids)


def test_all_text_is_escaped(tmp_path):
    evil = "</style><script>alert(1)</script><img src=x onerror=alert(1)> & \x1b[2J {{ 7 * 7 }} $x^2$"
    (tmp_path / "config.toml").write_text(f"# {evil!r}\n", encoding="utf-8")
    for step in (0, 1):
        found = predictions(0.5, type=evil) + predictions(0.5, ids="x", type="other")
        write_predictions(tmp_path, step, "dev", found)
        append_metrics(tmp_path, eval_row(step, "dev", predictions(0.5), 100))
    append_metrics(tmp_path, eval_row(1, evil, predictions(0.5), 100))
    keys = (f"agent/{evil.replace('/', '')}/credit", f"agent/a/{evil}", f"model/{evil}/loss", f"dropped/{evil}")
    append_metrics(tmp_path, {"kind": "train", "step": 1, **dict.fromkeys(keys, 1.0), f"time/{evil}_s": 1.0})
    write_groups(tmp_path, 1, [record(1, output=evil, agent=evil, question=evil)])
    page, html = page_of(tmp_path)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "\x1b" not in html
    assert page.text.count("alert(1)") > 10
    assert "F1, </style><script>alert(1)" in page.text
    assert "{{ 7 * 7 }}" in page.text


def test_lines_written_twice_by_a_resumed_run_count_once(tmp_path):
    for row in (train_row(1), train_row(2), train_row(2, **{"time/rollout_s": 7.0}), {"kind": "train", "step": 3}):
        append_metrics(tmp_path, row)
    page, _ = page_of(tmp_path)
    assert "rollout 10 s 83%" in page.text  # 3 + 7 of 3 + 7 + 1 + 1
    assert "Step 3" in page.text


def test_a_metrics_line_cut_short_is_no_obstacle(tmp_path):
    append_metrics(tmp_path, train_row(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_row(2))[:40])
    page, _ = page_of(tmp_path)
    assert "Step 1" in page.text


def test_it_is_replaced_whole(tmp_path):
    first = write_report(tmp_path)
    assert first == tmp_path / "report.html"
    append_metrics(tmp_path, train_row(1))
    write_report(tmp_path)
    assert "There is no data yet" not in first.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]


def test_no_folder_is_a_three_part_error(tmp_path):
    with pytest.raises(DataError) as error:
        write_report(tmp_path / "nowhere")
    assert (error.value.found, error.value.fix) == ("no such folder", "Name the folder of a run")


def by_title(rows):
    charts = [chart for section in sections(rows, [], []) for chart in section.charts]
    return {chart.title: {entry["name"]: entry["last"] for entry in chart.legend} for chart in charts}


def test_known_metrics_get_titles_unknown_ones_their_names_and_lines_their_owners():
    rows = [
        {
            "kind": "train",
            "step": 1,
            "agent/a/credit": 0.5,
            "agent/b/credit": -0.0,
            "agent/b/mood": 3,
            "agent/b/fault/bad_id": 0.125,
            "model/m/tokens_trained": 10,
            "model/m/tokens_computed": 30_000,
            "model/m/version": 1,
            "agent/a/kl": None,
        }
    ]
    assert by_title(rows) == {
        "Credit": {"a": "0.5", "b": "0"},
        "Faults by rule": {"b: bad_id": "0.125"},
        "mood": {"b": "3"},
        "Tokens": {"m: trained": "10", "m: computed": "30,000"},
    }


def test_absent_counts_are_0_and_absent_measurements_unknown():
    first = {"kind": "train", "step": 1, "dropped/x": 4, "agent/a/entropy": 2.0}
    first |= {"agent/a/fault_rate": 0.5, "agent/a/fault/y": 0.5}
    then = {"kind": "train", "step": 2, "agent/a/fault_rate": 0.0}
    charts = by_title([first, then])
    assert charts["Dropped per step"] == {"x": "0"}
    assert charts["Faults by rule"] == {"a: y": "0"}
    assert charts["Entropy"] == {"a": "2"}
    assert by_title([first, {"kind": "train", "step": 2}])["Faults by rule"] == {"a: y": "0.5"}


def test_long_series_are_averaged_in_bins():
    n = MAX_POINTS * 2 + 1  # so three points a bin, and a last bin of what is left
    short = binned(
        Series(name="s", steps=tuple(map(float, range(n))), values=(3.0, float("nan"), 9.0, *[1.0] * (n - 3)))
    )
    assert len(short.steps) == -(-n // 3) <= MAX_POINTS
    assert short.steps[:2] == (1.0, 4.0)
    assert short.values[:2] == (6.0, 1.0)  # the mean of 3 and 9: what is not finite is left out
    assert short.low == ()


def test_a_chart_draws_its_points_where_they_belong():
    svg = line_chart([Series(name="s", steps=(0.0, 1.0, 2.0), values=(0.0, 1.0, 0.5))], 1)
    marks = [tuple(map(float, m)) for m in re.findall(r'<use xlink:href="#[^"]*" x="([\d.]+)" y="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.01)
    assert y0 > y2 > y1  # y grows downward
    assert (y0 - y2) == pytest.approx(y2 - y1, abs=0.01)


def test_the_band_of_an_interval_reaches_its_bounds():
    line = Series(name="s", steps=(0.0, 1.0), values=(0.5, 0.5), low=(0.0, 0.25), high=(1.0, 0.75))
    svg = line_chart([line], 1)
    band = re.search(r'<path id="[^"]*" d="([^"]*)"', svg)
    heights = [float(pair.split()[-1]) for pair in re.findall(r"[ML] ([-\d. ]+)", band.group(1))]
    mark = [
        float(y) for y in re.findall(r'<use [^>]*x="[\d.]+" y="([\d.]+)" style="fill: var\(--series-0\); stroke', svg)
    ]
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg).group(1))
    middle = mark[0] - height  # bands are drawn from the lower edge
    assert max(heights) - middle == pytest.approx(middle - min(heights), abs=0.01)
    assert max(heights) > middle > min(heights)


def test_equal_data_give_equal_charts():
    line = Series(name="s", steps=(0.0, 1.0), values=(0.5, 0.25))
    assert line_chart([line], 1) == line_chart([line], 1)
