"""What a run of the two-model toy by several processes is compared with: the same run, unbroken or in one process."""

import json
from pathlib import Path

from safetensors.numpy import load_file

MODELS = ("first", "second")


def differences(folder: Path, other: Path) -> list[str]:
    """Where a run folder is not that of the unbroken run: metrics but for times, groups, predictions, weights."""
    found = [] if history(folder) == history(other) else ["metrics.jsonl: other metrics than those of the unbroken run"]
    for kind in ("groups", "eval"):
        ours, theirs = ({path.name: path.read_bytes() for path in (f / kind).glob("*")} for f in (folder, other))
        names = sorted({*ours, *theirs})
        found += [f"{kind}/{name}: not as in the unbroken run" for name in names if ours.get(name) != theirs.get(name)]
    last = max((other / "checkpoints").glob("step-*"))
    for model in MODELS:
        name = last.relative_to(other) / model / "weights.safetensors"
        if not (folder / name).exists():
            found.append(f"{name}: missing")
            continue
        ours, theirs = load_file(folder / name), load_file(other / name)
        if ours.keys() != theirs.keys() or any(ours[key].tobytes() != theirs[key].tobytes() for key in ours):
            found.append(f"{name}: other weights than those of the unbroken run")
    return found


def history(folder: Path) -> list[dict[str, object]]:
    """Metrics of RL and of evaluations, but for times and what only several processes have."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    own = ("lag_max", "samples", "stale")
    extra = ("time/", *(f"model/{model}/{what}" for model in MODELS for what in own))
    return [
        {key: value for key, value in row.items() if not key.startswith(extra)}
        for row in rows
        if row["kind"] != "warmup"
    ]
