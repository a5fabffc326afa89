"""How often who answered was shown the gold answer: python recipes/hotpotqa/gold_seen.py RUN

For each step: the share of rollouts whose last output's passages hold a gold answer (normalised tokens), the mean F1 of
these and of the others, and of how many questions the rollouts had different F1s: only these teach by content.
"""

import sys
from pathlib import Path
from statistics import fmean

from cotrain.config import load_config
from cotrain.rewards import accuracy
from cotrain.runs import read_groups
from cotrain.show import decoders_of

run = Path(sys.argv[1])
models = load_config(run / "config.toml").models
for path in sorted((run / "groups").glob("step-*.jsonl")):
    records = read_groups(run, int(path.stem.split("-")[1]))
    decoders = decoders_of(models, records[0].group)
    if not decoders:
        sys.exit("the model's tokenizer is not on this machine: cotrain models fetch smollm2-135m-instruct")
    seen: list[float] = []
    elsewhere: list[float] = []
    num_different = 0
    for record in records:
        golds, f1s = record.group.question.answers, set()
        read = {id for t in record.group.trajectories for id in t.reads}
        for t in record.group.trajectories:
            if t.id not in read and t.turns:
                passages = decoders[t.model](t.turns[0].prompt_ids).split("Question:")[0]
                (seen if accuracy(passages, golds) else elsewhere).append(t.rewards["shared"])
                f1s.add(t.rewards["shared"])
        num_different += len(f1s) > 1
    share = len(seen) / (len(seen) + len(elsewhere))
    print(
        f"{path.stem}: gold shown in {share:.2f} of the rollouts, F1 there {fmean(seen or [0]):.3f}, "
        f"elsewhere {fmean(elsewhere or [0]):.3f}; different F1s in {num_different} of {len(records)} questions"
    )
