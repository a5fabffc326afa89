"""What the terminal view of a group must contain, and that text written by models cannot act on the terminal."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from cotrain.sections import ModelConfig
from cotrain.show import decoders_of, render_group, shorten, visible
from cotrain.types import Completion, Group, Question, ToolCall, Trajectory, Turn


def turn(prompt=(1, 2, 3), tokens=2, version=4, text="out", calls=()):
    completion = Completion(token_ids=(7,) * tokens, logprobs=(-0.5,) * tokens, version=version, stop="stop", text=text)
    return Turn(prompt_ids=prompt, completion=completion, calls=calls)


def trajectory(id, agent, rollout, *, output="an output", turns=None, **more):
    return Trajectory(
        id=id,
        question_id="q1",
        rollout_id=rollout,
        pass_id=more.pop("pass_id", 0),
        call=0,
        agent=agent,
        model="base",
        output=output,
        turns=(turn(),) if turns is None else turns,
        **more,
    )


@pytest.fixture
def group():
    """One pass forked at call 1: a trunk that two rollouts read."""
    return Group(
        question=Question(id="q1", text="Who built it?", answers=("Ann Bee", "A. Bee")),
        step=3,
        strategy="round_robin",
        trajectories=(
            trajectory("t.r1.b", "answerer", "0.1", output="Ann Bee", reads=("t.r0",), rewards={"shared": 1.0}),
            trajectory("t.r0", "rewriter", None, output="builder query", trainable=False),
            trajectory(
                "t.r2.b",
                "answerer",
                "0.2",
                output="nobody",
                reads=("t.r0",),
                status="truncated",
                faults=("too_long",),
                rewards={"shared": 0.0},
            ),
        ),
        dropped={"infrastructure": 2},
    )


CREDITS = {"t.r1.b": 1.0, "t.r2.b": -1.0}
ADVANTAGES = {"t.r1.b": 1.25, "t.r2.b": -0.75}


def text_of(renderable, width=200):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def block(text, id):
    """The lines of one trajectory: from its title to the next title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.rstrip().endswith(id) and " on base" in line)
    rest = next((i for i in range(start + 1, len(lines)) if " on base" in lines[i]), len(lines))
    return "\n".join(lines[start:rest])


def test_headline_names_question_gold_and_drops(group):
    text = text_of(render_group(group, CREDITS, ADVANTAGES))
    assert "question q1  step 3, round_robin" in text
    assert "Who built it?" in text
    assert "gold: Ann Bee | A. Bee" in text
    assert "dropped: 2 infrastructure" in text


def test_trunk_comes_before_its_rollouts(group):
    text = text_of(render_group(group, CREDITS, ADVANTAGES))
    order = [
        text.index(part) for part in ("pass 0", "trunk", "t.r0\n", "rollout 0.1", "t.r1.b", "rollout 0.2", "t.r2.b")
    ]
    assert order == sorted(order)


def test_each_trajectory_shows_its_own_numbers(group):
    text = text_of(render_group(group, CREDITS, ADVANTAGES))
    good, bad, trunk = block(text, "t.r1.b"), block(text, "t.r2.b"), block(text, "t.r0")
    assert "shared 1.000  credit 1.000  advantage +1.250  2 tokens sampled at version 4" in good
    assert "reads: t.r0" in good
    assert "output: Ann Bee" in good
    assert "faults" not in good
    assert "truncated" in bad
    assert "shared 0.000  credit -1.000  advantage -0.750" in bad
    assert "faults: too_long" in bad
    assert "reward unknown  credit unknown  no advantage" in trunk
    assert "not trained on" in trunk


def test_every_pass_is_shown(group):
    second = trajectory("t.p1", "reranker", "1.0", pass_id=1)
    text = text_of(render_group(replace(group, trajectories=(*group.trajectories, second)), {}, {}))
    assert text.index("pass 0") < text.index("t.r2.b") < text.index("pass 1") < text.index("t.p1")


def test_prompt_is_decoded_shortened_and_whole_on_request(group):
    def decode(ids):
        return f"head {ids[0]} " + "x" * 1000 + " tail"

    long = trajectory("t.long", "reader", "0.3", output="y" * 500)
    group = replace(group, trajectories=(long,))
    short = text_of(render_group(group, {}, {}, decoders={"base": decode}), width=2000)
    assert "prompt: head 1 xxx" in short
    assert "tail (3 tokens)" in short
    assert "…772 characters…" in short  # "head 1 " + 1000 + " tail" = 1012 characters, of which 240 are shown
    assert "x" * 200 not in short
    assert "y" * 241 not in short
    whole = text_of(render_group(group, {}, {}, True, decoders={"base": decode}), width=2000)
    assert "x" * 1000 + " tail (3 tokens)" in whole
    assert "y" * 500 in whole


def test_without_a_tokenizer_the_prompt_is_its_length(group):
    assert "prompt: (3 tokens)" in text_of(render_group(group, {}, {}))


def test_turns_of_an_episode_are_numbered_with_their_calls(group):
    calls = (
        ToolCall(tool="search", argument="x", result="found y"),
        ToolCall(tool="visit", argument="z", result="error: no page", is_error=True),
    )
    turns = (turn(text="search: x\nvisit: z", calls=calls, version=1), turn((1, 2, 3, 4), version=2, text="done"))
    text = text_of(render_group(replace(group, trajectories=(trajectory("t", "main", "0.0", turns=turns),)), {}, {}))
    shown = [
        "turn 1 prompt: (3 tokens)",
        "turn 1 sampled: search: x visit: z",
        "turn 1 search(x): found y",
        "turn 1 visit(z): error: no page",
        "turn 2 prompt: (4 tokens)",
        "turn 2 sampled: done",
    ]
    assert [text.count(line) for line in shown] == [1] * 6
    assert sorted(map(text.index, shown)) == list(map(text.index, shown))
    assert "4 tokens sampled at version 1, 2" in text
    assert "task:" not in text
    assert "ended by" not in text


def delegated(id, caller, task, **more):
    return trajectory(id, "researcher", "0.0", caller=caller, task=task, **more)


def depth(text, id):
    """How far the title of a trajectory is indented."""
    (line,) = [line for line in text.splitlines() if line.rstrip().endswith(f"  {id}") and " on base" in line]
    return len(line) - len(line.lstrip(" │├└─"))


def test_what_was_delegated_hangs_below_who_delegated_it(group):
    """In a group callers come after those they called; in the tree a caller is the parent."""
    main_calls = (
        ToolCall(tool="lead", argument="find a", result="a1", trajectory_id="m.lead0"),
        ToolCall(tool="lead", argument="find b", result="no finding", is_error=True, trajectory_id="m.lead1"),
    )
    trajectories = (
        delegated("m.lead0.hand", "m.lead0", "look at a", output="a0", rewards={"shared": 1.0}),
        delegated("m.lead0", "m", "find a", output="a1", reads=("m.lead0.hand",)),
        delegated("m.lead1", "m", "find b", output="hm", stop="malformed", status="failed", faults=("malformed",)),
        trajectory("m", "main", "0.0", turns=(turn(calls=main_calls), turn()), reads=("m.lead0", "m.lead1")),
        trajectory("n", "main", "0.1"),
    )
    text = text_of(render_group(replace(group, trajectories=trajectories), {"m.lead0.hand": 1.0}, {}))
    order = ["m", "m.lead0", "m.lead0.hand", "m.lead1", "n"]
    places = [text.index(f"  {id}\n") if f"  {id}\n" in text else text.index(f"  {id} ") for id in order]
    assert places == sorted(places)
    depths = [depth(text, id) for id in order]
    assert depths[0] == depths[4]
    assert depths[0] < depths[1] == depths[3] < depths[2]
    lead, hand, failed = block(text, "m.lead0"), block(text, "m.lead0.hand"), block(text, "m.lead1")
    assert "task: find a" in lead
    assert "reads: m.lead0.hand" in lead
    assert "ended by" not in lead
    assert "task: look at a" in hand
    assert "credit 1.000" in hand
    assert "failed" in failed.splitlines()[0]
    assert "task: find b" in failed
    assert "ended by: malformed" in failed
    assert "faults: malformed" in failed
    main = block(text, "  m")
    assert "turn 1 lead(find a): a1" in main
    assert "turn 1 lead(find b): no finding" in main
    assert "reads: m.lead0, m.lead1" in main


@pytest.mark.parametrize("ending", ["turns", "calls", "tokens", "context"])
def test_a_limit_that_ended_an_episode_is_named(group, ending):
    cut = trajectory("t", "main", "0.0", stop=ending, status="truncated", turns=(), output="")
    text = text_of(render_group(replace(group, trajectories=(cut,)), {}, {}))
    assert f"ended by: {ending}" in text
    assert "output: (empty)" in text
    assert "0 tokens sampled" in text


def test_a_trunk_s_delegations_hang_in_the_trunk(group):
    """Nothing is lost either when a caller's own trajectory is missing."""
    trajectories = (
        trajectory("t.sub", "researcher", None, caller="t", task="find", trainable=False),
        trajectory("t", "main", None, reads=("t.sub",), trainable=False),
        trajectory("w", "writer", "0.0", reads=("t",)),
        trajectory("lost", "researcher", "0.0", caller="nobody", task="find"),
    )
    text = text_of(render_group(replace(group, trajectories=trajectories), {}, {}))
    order = [text.index(part) for part in ("trunk", "  t\n", "  t.sub", "rollout 0.0", "  w\n", "  lost")]
    assert order == sorted(order)
    assert depth(text, "t.sub") > depth(text, "t") == depth(text, "w") == depth(text, "lost")


def test_text_of_models_is_never_markup_and_never_drives_the_terminal(group):
    evil = "[bold red]x[/] [/nothing] [link=http://a]y[/link] \x1b[2J\x07\x9b1m \u202e"
    call = ToolCall(tool=evil, argument=evil, result=evil)
    bad = trajectory(
        evil, evil, evil, output=evil, caller="gone", task=evil, reads=(evil,), faults=(evil,), rewards={evil: 1.0},
        turns=(turn(text=evil, calls=(call,)), turn(text=evil)),
    )  # fmt: skip
    question = Question(id=evil, text=evil, answers=(evil,))
    group = replace(group, question=question, trajectories=(bad,), dropped={evil: 1})
    text = text_of(render_group(group, {evil: 1.0}, {}, True, decoders={"base": lambda ids: evil}), width=4000)
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    plain = "[bold red]x[/] [/nothing] [link=http://a]y[/link] \\x1b[2J\\x07\\x9b1m \\u202e"
    assert text.count(plain) == 19


def test_a_group_without_trajectories_says_so(group):
    assert "every rollout was dropped" in text_of(render_group(replace(group, trajectories=()), {}, {}))


def test_visible_keeps_line_feeds_and_letters():
    assert visible("a\nb\tcé漢 \r\x00") == "a\nb\tcé漢 \\r\\x00"


def test_shorten_keeps_both_ends():
    assert shorten("abcdefghij", 4) == "ab […6 characters…] ij"
    assert shorten("abcdefghij", 5) == "abc […5 characters…] ij"
    assert shorten("abcd", 4) == "abcd"


@pytest.fixture
def model_folder(tmp_path):
    """A model's folder as far as a decoder looks at it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (tmp_path / "config.json").write_text("{}")
    Tokenizer(WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_every_model_s_prompts_are_read_by_its_own_tokenizer(group, model_folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text("{}")
    words = json.loads((model_folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {"null": 0, "eins": 1, "zwei": 2}
    words["model"]["unk_token"] = "null"
    (other / "tokenizer.json").write_text(json.dumps(words))
    models = {"base": ModelConfig(path=str(model_folder)), "other": ModelConfig(path=str(other))}
    mixed = replace(group, trajectories=(*group.trajectories, replace(group.trajectories[0], id="x", model="other")))
    found = decoders_of(models, mixed)
    assert {name: decode((2, 0, 1)) for name, decode in found.items()} == {
        "base": "two zero one",
        "other": "zwei null eins",
    }
    assert list(decoders_of(models, group)) == ["base"]


def test_no_decoder_for_models_that_are_gone(group, model_folder):
    models = {"base": ModelConfig(path=str(model_folder)), "other": ModelConfig(path="smollm2-135m-instruct")}
    mixed = replace(group, trajectories=(*group.trajectories, replace(group.trajectories[0], id="x", model="other")))
    # Nothing is fetched: the packaged model is not in the tests' own cache.
    assert list(decoders_of(models, mixed)) == ["base"]
    assert decoders_of({"base": ModelConfig(path="./gone")}, group) == {}
    (model_folder / "tokenizer.json").unlink()
    assert decoders_of({"base": ModelConfig(path=str(model_folder))}, group) == {}
