"""Where a team's work gets lost: python recipes/research/work.py RUN

For the first and the last ten steps of a run: the share of rollouts whose main agent asked for the right fact, and of
the researchers that were asked for it, how many visited the page, and how many of those reported what it says.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from cotrain.runs import read_groups


def shares(run: Path, steps: Iterable[int]) -> tuple[float, float, float]:
    """(asked for the right fact, visited the page, reported it)."""
    rollouts, asking, asked, visited, right = 0, 0, 0, 0, 0
    for step in steps:
        for group in (record.group for record in read_groups(run, step)):
            question = group.question
            relations = question.meta["relations"]
            assert isinstance(relations, list | tuple)
            task = f"{question.supporting_titles[0]}, {relations[0]}"
            for t in group.trajectories:
                if t.agent == "main":
                    rollouts += 1
                    asking += any(call.argument == task for turn in t.turns for call in turn.calls)
                elif t.task == task:
                    calls = [call for turn in t.turns for call in turn.calls]
                    asked += 1
                    if any(c.tool == "visit" and c.argument == question.supporting_titles[0] for c in calls):
                        visited += 1
                        right += t.output == question.answers[0]
    return asking / rollouts, visited / max(1, asked), right / max(1, visited)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    last = max(int(path.stem[5:]) for path in run.glob("groups/step-*.jsonl"))
    for steps in (range(1, 11), range(last - 9, last + 1)):
        asked, visited, right = shares(run, steps)
        print(f"steps {steps[0]}-{steps[-1]}: asked {asked:.2f}, visited {visited:.2f}, reported right {right:.2f}")
