"""Groups are read back from the run folder as they were written, whatever they hold."""

import json
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotrain.runs import GroupRecord, MadeGroup, dump_record, load_record, read_groups, write_groups
from cotrain.types import Completion, Group, Question, ToolCall, Trajectory, Turn

TEXTS = st.text(max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(
    ToolCall,
    tool=TEXTS, argument=TEXTS, result=TEXTS, is_error=st.booleans(), trajectory_id=st.none() | TEXTS,
)  # fmt: skip
TOKENS = st.lists(st.tuples(st.integers(0, 2**31), NUMBERS), max_size=3)
TURNS = st.builds(
    lambda prompt, tokens, calls, text, stop: Turn(
        prompt_ids=tuple(prompt),
        completion=Completion(
            token_ids=tuple(i for i, _ in tokens), logprobs=tuple(p for _, p in tokens), version=2, stop=stop, text=text
        ),
        calls=tuple(calls),
    ),
    st.lists(st.integers(0, 2**31), max_size=3), TOKENS, st.lists(CALLS, max_size=2), TEXTS,
    st.sampled_from(["stop", "length"]),
)  # fmt: skip
IDS = st.lists(TEXTS, max_size=2).map(tuple)
TRAJECTORIES = st.builds(
    Trajectory,
    id=TEXTS, question_id=TEXTS, rollout_id=st.none() | TEXTS, pass_id=st.integers(0, 3), call=st.integers(0, 9),
    agent=TEXTS, model=TEXTS, caller=st.none() | TEXTS, task=TEXTS, reads=IDS,
    turns=st.lists(TURNS, max_size=2).map(tuple), output=TEXTS, status=st.sampled_from(["ok", "truncated"]),
    stop=st.sampled_from(["answer", "malformed", "turns", "calls", "tokens", "context"]), trainable=st.booleans(),
    faults=IDS, rewards=st.dictionaries(TEXTS, NUMBERS, max_size=2),
)  # fmt: skip
BY_ID = st.dictionaries(TEXTS, NUMBERS, max_size=3)
META = st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2) | TEXTS | st.integers() | st.none(), max_size=2)
RECORDS = st.builds(
    GroupRecord,
    group=st.builds(
        Group,
        question=st.builds(Question, id=TEXTS, text=TEXTS, answers=IDS, meta=META),
        step=st.integers(0, 9),
        strategy=TEXTS,
        trajectories=st.lists(TRAJECTORIES, max_size=3).map(tuple),
        dropped=st.dictionaries(TEXTS, st.integers(0, 9), max_size=2),
    ),
    credits=BY_ID, advantages=BY_ID, weights=BY_ID,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RECORDS, max_size=3))
def test_groups_are_read_back_as_they_were_written(tmp_path, records):
    write_groups(tmp_path, 4, records)
    assert read_groups(tmp_path, 4) == records


def test_groups_that_an_earlier_version_wrote_are_read(tmp_path):
    turn = {"prompt_ids": [1], "completion": {"token_ids": [2], "logprobs": [-0.5], "version": 0, "stop": "stop",
                                              "text": "x"}, "observation": None}  # fmt: skip
    trajectory = {"id": "t", "question_id": "q", "rollout_id": "0.0", "pass_id": 0, "call": 0, "agent": "a",
                  "model": "base", "caller": None, "reads": [], "turns": [turn], "output": "x", "status": "ok",
                  "trainable": True, "faults": [], "rewards": {"shared": 1.0}}  # fmt: skip
    group = {"question": {"id": "q", "text": "?", "answers": ["x"], "meta": {}}, "step": 1, "strategy": "s",
             "trajectories": [trajectory], "dropped": {}}  # fmt: skip
    path = tmp_path / "groups" / "step-000001.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"group": group, "credits": {"t": 1.0}, "advantages": {}}) + "\n")
    (record,) = read_groups(tmp_path, 1)
    (read,) = record.group.trajectories
    assert (read.stop, read.task, read.turns[0].calls) == ("answer", "", ())
    assert (read.rewards, record.weights) == ({"shared": 1.0}, {})


def test_a_record_in_the_store_keeps_what_was_dropped_however_it_was_counted():
    group = Group(
        question=Question(id="q", text="?", answers=("a",)), step=1, strategy="test", trajectories=(),
        dropped=Counter(context_full=1), unused=7,
    )  # fmt: skip
    made = MadeGroup(
        record=GroupRecord(group=group),
        dropped=Counter({"zero_variance": 4, "context_full": 1}),
        time_s=0.5,
        worker="w",
    )
    assert load_record(dump_record(made)) == made
