"""One MHGPO step of the search pipeline against plain transformers, as ratios in one run.

The same prompts and completions on both sides, SmolLM2-135M with all weights trained, the quickstart's team on the
generated world, fork on first, 4 questions, G = 8. Plain means: `generate` on all prompts of an agent at once, padded,
and an update in padded micro-batches of 8 with logits on the completions alone.

    python benchmarks/pipeline_step.py --dtype bfloat16 --repeats 2 --out benchmarks/results/pipeline_step-bfloat16.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from cotrain.assemble import load_cast, make_plan
from cotrain.config import load_config
from cotrain.curriculum import questions_of_step
from cotrain.data.questions import load_set
from cotrain.loops import judge, rollouts, samples_by_model
from cotrain.trainer import Trainer
from cotrain.types import Sample, Trajectory

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "run.toml"


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as one rectangle, and the mask of what is not padding."""
    longest = max(map(len, rows))
    empty = [[0] * (longest - len(row)) for row in rows]
    ids = [e + r if left else r + e for r, e in zip(rows, empty, strict=True)]
    mask = [
        [0] * len(e) + [1] * len(r) if left else [1] * len(r) + [0] * len(e) for r, e in zip(rows, empty, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def plain_sampling(network: Any, trajectories: Sequence[Trajectory]) -> float:
    """Seconds of `generate` for the same prompts, an agent at a time, as many new tokens as the longest had."""
    start = time.perf_counter()
    for agent in dict.fromkeys(t.agent for t in trajectories):
        turns = [t.turns[0] for t in trajectories if t.agent == agent]
        ids, mask = padded([list(turn.prompt_ids) for turn in turns], left=True)
        longest = max(len(turn.completion.token_ids) for turn in turns)
        with torch.inference_mode():
            network.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest, pad_token_id=0
            )
    return time.perf_counter() - start


def plain_update(network: Any, samples: Sequence[Sample]) -> float:
    """Seconds of a padded policy-gradient update on the same samples."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)
    start = time.perf_counter()
    for first in range(0, len(samples), 8):
        part = samples[first : first + 8]
        ids, mask = padded([list(s.token_ids) for s in part], left=True)
        lengths = [sum(s.mask) for s in part]
        keep = max(lengths) + 1
        logits = (
            network(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits[:, :-1].float()
        )
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1 - keep :, None])[..., 0]
        loss = logits.new_zeros(())
        for row, sample, length in zip(logprobs, part, lengths, strict=True):
            loss = loss - (row[-length:] * sample.advantages[-1]).mean() / len(samples)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return time.perf_counter() - start


def one_run(dtype: str, step: int) -> dict[str, float]:
    sampling = 'sampling={strategy = "fork_on_first", group_size = 8, questions_per_step = 4}'
    config = load_config(RECIPE, [sampling, f"models.base.dtype={dtype}", "models.base.master_weights=false"])
    plan = make_plan(config)
    questions, corpus = load_set(config.data.train, config.corpus)
    cast = load_cast(plan)
    network = cast.models["base"].network
    trainer = Trainer(cast.models["base"], config.models["base"], config.loss, total_steps=1)
    trainer.begin_rl()
    chosen = questions_of_step(questions, step, 4, 0)
    start = time.perf_counter()
    groups = asyncio.run(rollouts(plan, cast.roster(corpus), chosen, step))
    ours_sample = time.perf_counter() - start
    records, _ = asyncio.run(judge(plan, groups))
    # Every trajectory is trained, so that the work does not depend on luck.
    everything = [type(r)(group=r.group, advantages={t.id: 1.0 for t in r.group.trajectories}) for r in records]
    samples = samples_by_model(everything, ["base"])["base"]
    start = time.perf_counter()
    metrics = trainer.update(samples)
    ours_update = time.perf_counter() - start
    trajectories = [t for g in groups for t in g.trajectories]
    theirs_sample = plain_sampling(network, trajectories)
    theirs_update = plain_update(network, samples)
    return {
        "ours_sample_s": ours_sample,
        "ours_update_s": ours_update,
        "plain_sample_s": theirs_sample,
        "plain_update_s": theirs_update,
        "trajectories": len(trajectories),
        "tokens_computed": metrics["model/base/tokens_computed"],
        "tokens_unpacked": metrics["model/base/tokens_unpacked"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    runs = [one_run(chosen.dtype, step + 1) for step in range(chosen.repeats)]
    ratios = {
        "sampling: plain / cotrain": [r["plain_sample_s"] / r["ours_sample_s"] for r in runs],
        "update: plain / cotrain": [r["plain_update_s"] / r["ours_update_s"] for r in runs],
        "step: plain / cotrain": [
            (r["plain_sample_s"] + r["plain_update_s"]) / (r["ours_sample_s"] + r["ours_update_s"]) for r in runs
        ],
    }
    for name, values in ratios.items():
        print(f"{name:28s} median {statistics.median(values):5.2f}   all {[round(v, 2) for v in values]}")
    if chosen.out:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps({"versions": versions, "ratios": ratios, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
