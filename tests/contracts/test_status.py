"""What `cotrain up` shows of a run."""

import io
import json

from rich.console import Console

from cotrain.processes.table import Look, status_line, status_table
from cotrain.runs import last_train_row
from cotrain.store.base import Status

STATUS = Status(
    heads={"main": 4, "sub": -1},
    saved={"main": 4, "sub": -1},
    backlog={"main": 3, "sub": 7},
    complete=4,
    leased=2,
    sampled=1234,
    last_step=9,
    written=3,
)
METRICS = {
    "model/main/samples": 12,
    "time/update_s": 1.0,
    "time/wait_s": 3.0,
    "model/main/lag_max": 2,
    "model/main/stale": 1,
}
NOW = Look(status=STATUS, metrics={"main": METRICS}, dropped={"singleton": 5, "zero_variance": 8})


def shown(value) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(value)
    return console.file.getvalue()


def test_the_table_has_a_row_per_model_and_says_what_was_dropped():
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(status_table(NOW)).splitlines()]
    assert ["main", "4 of 9", "2", "3", "3.0", "25%", "1"] in lines
    assert ["sub", "0 of 9", "", "7", "", "", ""] in lines
    caption = " ".join(shown(status_table(NOW)).split("┘")[1].split())
    assert caption == (
        "2 groups being made; 1234 tokens sampled; dropped in the last step written: singleton 5, zero_variance 8"
    )


def test_without_a_terminal_it_is_one_line():
    line = "steps: main 4/9, sub 0/9; 2 groups being made; 1234 tokens sampled; dropped in the last step written: "
    assert status_line(NOW) == line + "singleton 5, zero_variance 8"


def test_the_newest_step_is_read_from_the_end_of_the_file(tmp_path):
    assert last_train_row(tmp_path) == {}
    rows = [{"kind": "train", "step": step, "dropped/singleton": step} for step in range(1, 200)]
    rows.append({"kind": "eval", "step": 199})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "train", "step": 200, "cut'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_train_row(tmp_path) == {"kind": "train", "step": 199, "dropped/singleton": 199}
    assert last_train_row(tmp_path, most_bytes=300)["step"] == 199
