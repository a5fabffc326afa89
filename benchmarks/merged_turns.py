"""Updates on episodes whose turns are merged into one sample each, against the same turns as separate samples.

Both batches hold the same sampled tokens and have the same loss (reduction "token"). What differs is the arithmetic:

- merged: one sample an episode, as `make_samples` gives it, because every prompt extends the turn before;
- apart: one sample a turn (each turn as an episode of its own), and each sample has a forward of its own, which is
  what a trainer does that knows neither merged turns nor prefix trees;
- apart, in trees: one sample a turn, but packed as cotrain packs, where samples share the prefixes that they have in
  common. The trees find the same saving again, so this is no slower than merging by more than the bookkeeping.

To measure what merging itself brings, "merged" is timed with a forward an episode as well as packed.

    python benchmarks/merged_turns.py --model tiny-llama --repeats 5
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from cotrain.batch import make_samples
from cotrain.config import load_config
from cotrain.models import load_model
from cotrain.trainer import Trainer
from cotrain.types import Completion, Group, Question, Sample, Trajectory, Turn

ALONE = 1
"""Tokens per pack that leave every trajectory with a pack, hence a forward, of its own."""


def episode(number: int, vocab: int, prompt: int, result: int, sampled: int, turns: int) -> Trajectory:
    """A trajectory of random ids: a first prompt, and between two turns a result of so many tokens."""
    draw = random.Random(number)
    ids = tuple(draw.randrange(3, vocab) for _ in range(prompt))
    made = []
    for _ in range(turns):
        said = tuple(draw.randrange(3, vocab) for _ in range(sampled))
        logprobs = (-math.log(vocab),) * sampled
        completion = Completion(token_ids=said, logprobs=logprobs, version=0, stop="length", text="")
        made.append(Turn(prompt_ids=ids, completion=completion))
        ids = (*ids, *said, *(draw.randrange(3, vocab) for _ in range(result)))
    return Trajectory(
        id=str(number), question_id="q", rollout_id=f"0.{number}", pass_id=0, call=0, agent="main", model="model",
        turns=tuple(made),
    )  # fmt: skip


def samples_of(trajectories: Sequence[Trajectory]) -> list[Sample]:
    question = Question(id="q", text="?", answers=("x",))
    group = Group(question=question, step=1, strategy="fork_on_first", trajectories=tuple(trajectories))
    advantages = {t.id: 1.0 if int(t.id.split(".")[0]) % 2 else -1.0 for t in trajectories}
    return make_samples(group, advantages)


def apart(trajectory: Trajectory) -> list[Trajectory]:
    """Each turn as a trajectory of its own."""
    return [replace(trajectory, id=f"{trajectory.id}.{i}", turns=(turn,)) for i, turn in enumerate(trajectory.turns)]


def update(trainer: Trainer, samples: Sequence[Sample], tokens_per_pack: int) -> tuple[float, dict[str, float]]:
    """Seconds of an update, and its metrics."""
    trainer.tokens_per_pack = tokens_per_pack
    start = time.perf_counter()
    metrics = trainer.update(samples)
    return time.perf_counter() - start, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=120, help="tokens of the first prompt")
    parser.add_argument("--result", type=int, default=40, help="tokens between two turns")
    parser.add_argument("--sampled", type=int, default=24, help="tokens that a turn samples")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    # The learning rate is next to nothing, so that every update is of the same weights.
    settings = ["models.model.optimizer.lr=1e-12", "loss.beta=0.0", "loss.reduction=token"]
    model_settings = [f"models.model.path={chosen.model}", f"models.model.dtype={chosen.dtype}"]
    config = load_config(None, [*settings, *model_settings])
    model = load_model("model", config.models["model"])
    trainer = Trainer(model, config.models["model"], config.loss, total_steps=1000)
    vocab = len(model.tokenizer)  # type: ignore[arg-type]  # a transformers tokenizer has a length
    shape = {"prompt": chosen.prompt, "result": chosen.result, "sampled": chosen.sampled, "turns": chosen.turns}
    episodes = [episode(i, vocab, **shape) for i in range(chosen.episodes)]
    merged, separate = samples_of(episodes), samples_of([turn for t in episodes for turn in apart(t)])
    ways = {
        "merged": (merged, config.loop.tokens_per_pack),
        "merged, a forward an episode": (merged, ALONE),
        "apart, in trees": (separate, config.loop.tokens_per_pack),
        "apart, a forward a turn": (separate, ALONE),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(chosen.repeats + 1):
        losses = []
        for name, (samples, tokens_per_pack) in ways.items():
            taken, metrics = update(trainer, samples, tokens_per_pack)
            losses.append(metrics["model/model/loss"])
            if repeat:  # the first one makes what is made once
                times[name].append(taken)
            else:
                tokens = int(metrics["model/model/tokens_computed"])
                print(f"{name:30s} {len(samples):3d} samples, {tokens:6d} tokens computed, loss {losses[-1]:+.6f}")
        assert max(losses) - min(losses) < 1e-3 * max(1.0, abs(losses[0])), losses
    for top, bottom in (
        ("apart, a forward a turn", "merged, a forward an episode"),
        ("apart, a forward a turn", "merged"),
        ("apart, in trees", "merged"),
    ):
        ratios = [a / b for a, b in zip(times[top], times[bottom], strict=True)]
        print(f"{top} / {bottom}: median {statistics.median(ratios):.2f}   all {[round(r, 2) for r in ratios]}")


if __name__ == "__main__":
    main()
