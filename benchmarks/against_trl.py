"""The sampler, the update and peak memory against TRL's GRPOTrainer and plain transformers, as ratios in one run.

The work: 4 prompts of 300 tokens, 8 completions of 32 tokens each, one update, SmolLM2-135M with all weights trained.
Each side runs in a process of its own, A B A B, so that a machine whose speed drifts drifts for both. Both sides train
on the very completions that TRL sampled. Needs `pip install -e . trl datasets accelerate`.

    python benchmarks/against_trl.py --dtype float32 --repeats 2 --out benchmarks/results/against_trl-float32.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from cotrain.models import LoadedModel
    from cotrain.sections import ModelConfig

T = TypeVar("T")

PROMPTS, COMPLETIONS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 300, 32


def prompts(tokenizer: Any) -> list[list[int]]:
    """Prompts of 300 tokens from the generated world's pages."""
    from cotrain.data.world import generate
    from cotrain.sections import WorldConfig

    text = " ".join(p.text for p in generate(WorldConfig()).passages)
    ids = tokenizer.encode(text[:20_000], add_special_tokens=False)
    return [ids[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS] for i in range(PROMPTS)]


def model(dtype: Literal["float32", "bfloat16"]) -> tuple[LoadedModel, ModelConfig]:
    from cotrain.models import load_model
    from cotrain.sections import ModelConfig, OptimizerConfig

    # bfloat16 weights on both sides: TRL keeps no float32 masters.
    settings = ModelConfig(dtype=dtype, master_weights=False, optimizer=OptimizerConfig(lr=1e-6))
    return load_model("base", settings), settings


def timed(function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def side_trl(dtype: Literal["float32", "bfloat16"], shared: Path) -> dict[str, float]:
    """One GRPOTrainer step; its completions go to `shared` for the other side."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    loaded, _ = model(dtype)
    tokenizer = loaded.tokenizer
    spent: dict[str, float] = {}

    class Timed(GRPOTrainer):  # type: ignore[misc]  # Any where trl is not installed
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            result, spent["sample_s"] = timed(lambda: super(Timed, self)._generate_and_score_completions(inputs))
            rows = [
                [p[m.bool()].tolist(), c.tolist()]
                for p, m, c in zip(result["prompt_ids"], result["prompt_mask"], result["completion_ids"], strict=True)
            ]
            shared.write_text(json.dumps(rows))
            return result

    texts = [tokenizer.decode(ids) for ids in prompts(tokenizer)]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, per_device_train_batch_size=8,
        gradient_accumulation_steps=4, num_generations=COMPLETIONS, max_completion_length=NEW_TOKENS, beta=0.0,
        max_steps=1, learning_rate=1e-6, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        gradient_checkpointing=False, generation_kwargs={"min_new_tokens": NEW_TOKENS}, dataloader_pin_memory=False,
    )  # fmt: skip
    for parameter in loaded.network.parameters():
        parameter.requires_grad_(True)
    trainer = Timed(
        model=loaded.network,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )
    _, whole = timed(trainer.train)
    return {"sample_s": spent["sample_s"], "update_s": whole - spent["sample_s"], "threads": torch.get_num_threads()}


def side_cotrain(dtype: Literal["float32", "bfloat16"], shared: Path) -> dict[str, float]:
    """The same prompts sampled, the same completions trained on."""
    from cotrain.engines.base import Request
    from cotrain.engines.local import LocalEngine
    from cotrain.sections import LossConfig
    from cotrain.trainer import Trainer
    from cotrain.types import Sample, SamplingParams

    loaded, settings = model(dtype)
    trainer = Trainer(loaded, settings, LossConfig(beta=0.0), total_steps=1)
    engine = LocalEngine(loaded.network, loaded.tokenizer, end_ids=frozenset(), context=loaded.context)
    _, sample_s = timed(lambda: asyncio.run(sample(engine, Request, SamplingParams, prompts(loaded.tokenizer))))
    rows = json.loads(shared.read_text())
    samples = [
        Sample(
            trajectory_id=str(i), agent="a", model="base", token_ids=(*prompt, *completion),
            mask=(*[False] * len(prompt), *[True] * len(completion)),
            logprobs=(*[0.0] * len(prompt), *[-2.0] * len(completion)),
            versions=(0,) * (len(prompt) + len(completion)),
            advantages=(*[0.0] * len(prompt), *[float(i % 2 * 2 - 1)] * len(completion)),
        )
        for i, (prompt, completion) in enumerate(rows)
    ]  # fmt: skip
    trainer.begin_rl()
    metrics, update_s = timed(lambda: trainer.update(samples))
    return {
        "sample_s": sample_s,
        "update_s": update_s,
        "tokens_computed": metrics["model/base/tokens_computed"],
        "tokens_unpacked": metrics["model/base/tokens_unpacked"],
    }


def side_generate(dtype: Literal["float32", "bfloat16"], shared: Path) -> dict[str, float]:
    """Plain transformers: the sampler alone."""
    import torch

    loaded, _ = model(dtype)
    ids = torch.tensor([p for p in prompts(loaded.tokenizer) for _ in range(COMPLETIONS)])
    ends = {"pad_token_id": 0, "eos_token_id": None}

    network: Any = loaded.network

    def run() -> Any:
        with torch.inference_mode():
            return network.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, **ends,
            )  # fmt: skip

    out, seconds = timed(run)
    assert out.shape == (PROMPTS * COMPLETIONS, PROMPT_TOKENS + NEW_TOKENS)
    return {"sample_s": seconds}


async def sample(engine: Any, request: Any, params: Any, ids_of_prompts: Sequence[Sequence[int]]) -> None:
    few = params(max_tokens=NEW_TOKENS)
    calls = [
        engine.generate(request(prompt_ids=tuple(ids), params=few, key=(i, j)))
        for i, ids in enumerate(ids_of_prompts)
        for j in range(COMPLETIONS)
    ]
    results = await asyncio.gather(*calls)
    assert all(len(r.token_ids) == NEW_TOKENS for r in results)


SIDES = {"trl": side_trl, "cotrain": side_cotrain, "generate": side_generate}


def child(side: str, dtype: Literal["float32", "bfloat16"], shared: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--dtype", dtype, "--shared", str(shared)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=list(SIDES))
    parser.add_argument("--shared", type=Path)
    chosen = parser.parse_args()
    if chosen.side:
        figures = SIDES[chosen.side](chosen.dtype, chosen.shared)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({**figures, "peak_gib": peak}))
        return
    shared = Path(tempfile.mkdtemp()) / "completions.json"
    runs = []
    for _ in range(chosen.repeats):
        runs.append({side: child(side, chosen.dtype, shared) for side in ("trl", "generate", "cotrain")})
        print(json.dumps(runs[-1]), flush=True)
    ratios = {
        "update: TRL / cotrain": [r["trl"]["update_s"] / r["cotrain"]["update_s"] for r in runs],
        "sampler: generate / cotrain": [r["generate"]["sample_s"] / r["cotrain"]["sample_s"] for r in runs],
        "whole step: TRL / cotrain": [
            (r["trl"]["sample_s"] + r["trl"]["update_s"]) / (r["cotrain"]["sample_s"] + r["cotrain"]["update_s"])
            for r in runs
        ],
        "peak memory: TRL / cotrain": [r["trl"]["peak_gib"] / r["cotrain"]["peak_gib"] for r in runs],
    }
    for name, values in ratios.items():
        print(f"{name:30s} median {statistics.median(values):5.2f}   all {[round(v, 2) for v in values]}")
    if chosen.out:
        import torch
        import transformers
        import trl

        versions = {m.__name__: m.__version__ for m in (torch, transformers, trl)} | {
            "python": platform.python_version()
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(
            json.dumps({"dtype": chosen.dtype, "versions": versions, "ratios": ratios, "runs": runs}, indent=1)
        )


if __name__ == "__main__":
    main()
