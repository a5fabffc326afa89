"""The sections of a run's configuration: every key typed, documented, and checked on its own.

Declarations only: what spans sections is checked where a run is put together (`assemble.py`); files are read and
written by `config.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Set = TypeVar("Set", bound="QuestionSet")
Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about keys, documented field by field."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights (peft)."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names to adapt."""


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate. 1e-6 suits full training of large models, 1e-5 to 1e-4 LoRA; small models take more."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The whole gradient is scaled down to this norm when it is longer."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after its warm-up; linear and cosine end at 0 at the run's last step."""
    warmup_steps: NonNegative = 0
    """Updates over which the learning rate rises linearly from 0."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule, for a critic."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of the critic."""


class CriticConfig(Section):
    """A value model (MAPPO): what the estimator `gae` needs."""

    backbone: Literal["own", "shared"] = "own"
    """`own`: a copy of the policy's weights, trained apart; `shared`: a head on the policy itself, whose value loss
    trains the policy's weights too."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The critic's own; with a shared backbone only the head's."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of GAE."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """A value counts at most so far from what it was before the update."""
    coefficient: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the value loss."""
    warmup_steps: NonNegative = 0
    """First updates of RL in which the critic learns (of a shared backbone the head alone) and the policy stands."""
    whiten: bool = True
    """Bring a batch's advantages to mean 0 and standard deviation 1."""


class ModelConfig(Section):
    """One set of weights."""

    path: str = "smollm2-135m-instruct"
    """A local folder, a hub name, a packaged model (`smollm2-135m-instruct`) or `tiny-llama` / `tiny-qwen3`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that compute, for the sampler and the trainer alike."""
    master_weights: bool = True
    """Keep float32 copies of bfloat16 weights in the optimiser. Without them small steps are rounded away."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes CUDA where there is one."""
    trainable: bool = True
    """False: the model takes part and keeps its weights bit for bit."""
    lora: LoraConfig | None = None
    """Adapters to train; without this section all weights are trained."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser settings."""
    critic: CriticConfig | None = None
    """A value model beside it, for agents whose estimator is `gae`."""
    context: Positive | None = None
    """Largest number of tokens of prompt and completion; the model's own limit by default."""
    max_lag: NonNegative | None = None
    """How many versions behind its samples may be, in a run of several processes; `store.max_lag` by default."""
    seed: NonNegative = 0
    """Seed of random weights (tiny models, adapters)."""


class SystemConfig(Section):
    """The team's workflow."""

    name: str = "search_pipeline"
    """A built-in system, or `module:function` / `path/file.py:function` of a function that returns a `System`."""
    settings: dict[str, int | float | str | bool] = {}
    """Keyword arguments of that function."""


class AgentConfig(Section):
    """Overrides of one of the system's agents; what is left out keeps the system's own value."""

    model: str | None = None
    """Name of the model that plays the agent."""
    prompt: str | None = None
    """Template of the user message."""
    system: str | None = None
    """System message."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature while training; evaluation is greedy."""
    top_p: Probability | None = None
    """Nucleus cut while training."""
    max_tokens: Positive | None = None
    """Longest completion."""
    stop: tuple[str, ...] | None = None
    """Strings that end a completion."""
    trainable: bool | None = None
    """False: the agent gives no samples."""
    max_turns: Positive | None = None
    """Most turns of an episode."""
    max_calls: Positive | None = None
    """Most calls of tools and delegates in an episode."""
    max_sampled: Positive | None = None
    """Most tokens that are sampled in an episode."""
    max_time_s: Annotated[float, Field(gt=0)] | None = None
    """Longest an episode may take, delegates and waits for its batch included; then the rollout is removed and counted
    (time_limit). A safety net: with `engine.batching` step or group it also waits for other rollouts."""


class WorldConfig(Section):
    """The generated world: a seeded graph of invented people, places, works and organisations."""

    seed: NonNegative = 0
    """Seed of the graph; questions and passages follow from it."""
    entities: Annotated[int, Field(ge=20)] = 400
    """Number of entities, hence of pages."""
    hops: tuple[Positive, ...] = (1, 2)
    """Numbers of hops that questions are drawn from."""
    distractors: NonNegative = 2
    """Extra facts on each page that no question needs."""
    questions: Positive = 1000
    """Number of questions generated, train and dev together."""


class QuestionSet(Section):
    """Questions and the corpus that their searches go to."""

    source: str = "world"
    """`world`, or a JSONL file of questions."""
    corpus: str = "world"
    """`world`, or a JSONL file of passages."""
    split: str | None = None
    """Keep only questions of this split. If unset: of a file all questions, of the world `train` to train on and `dev`
    to hold out. A question that is both trained on and held out is refused."""
    ids: str | None = None
    """A file with one question id per line: keep these, in this order."""
    limit: Positive | None = None
    """Keep at most this many."""
    world: WorldConfig = WorldConfig()
    """Settings of the generated world."""


class Stage(QuestionSet):
    """Questions of a later part of the run."""

    after_step: Positive
    """The stage begins with the step after this one."""


class DataConfig(Section):
    """What to train on and what to hold out."""

    train: QuestionSet = QuestionSet(split="train")
    """Questions to train on, drawn in a seeded order, each at most once per epoch."""
    stages: tuple[Stage, ...] = ()
    """Curriculum: what takes the place of `train` later in the run, in rising order of `after_step`."""
    eval: dict[str, QuestionSet] = {"dev": QuestionSet(split="dev", limit=64)}
    """Held-out sets by name; the first one chooses the best checkpoint."""

    @field_validator("train")
    @classmethod
    def _train_split(cls, value: QuestionSet) -> QuestionSet:
        return _with_split(value, "train")

    @field_validator("stages")
    @classmethod
    def _stage_splits(cls, value: tuple[Stage, ...]) -> tuple[Stage, ...]:
        starts = [stage.after_step for stage in value]
        if starts != sorted(set(starts)):
            raise ValueError(f"after_step goes {starts}; give each stage a later one than the stage before")
        return tuple(_with_split(stage, "train") for stage in value)

    @field_validator("eval")
    @classmethod
    def _eval_splits(cls, value: dict[str, QuestionSet]) -> dict[str, QuestionSet]:
        return {file_name(name): _with_split(chosen, "dev") for name, chosen in value.items()}


def _with_split(chosen: Set, split: str) -> Set:
    """Questions of the generated world are never trained on and held out at once, whatever else a section sets."""
    is_open = chosen.source == "world" and chosen.split is None
    return chosen.model_copy(update={"split": split}) if is_open else chosen


def file_name(name: str) -> str:
    """The name, if it can be a file's; else a ValueError."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"the name {name!r} cannot be a file's; use letters, digits, '_', '-' and '.'")
    return name


class CorpusConfig(Section):
    """Lexical retrieval (BM25)."""

    k1: Annotated[float, Field(gt=0)] = 1.5
    """BM25 term saturation."""
    b: Annotated[float, Field(ge=0, le=1)] = 0.75
    """BM25 length normalisation."""
    cache: str | None = None
    """Folder for indices; by default cotrain's cache folder."""


class SamplingConfig(Section):
    """How many rollouts, and where they fork."""

    strategy: Literal["fork_on_first", "round_robin", "independent", "counterfactual", "tree"] = "fork_on_first"
    """Where the branches of a group part (see docs/methods.md)."""
    group_size: Annotated[int, Field(ge=2)] = 4
    """Branches per fork, G."""
    questions_per_step: Positive = 8
    """Questions whose groups make one batch."""
    fork_probabilities: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """round_robin only: probability of forking at each agent's call; uniform by default."""
    continue_from: Literal["best", "random"] = "best"
    """tree only: the branch from which the next call's branches go on."""
    resample: NonNegative = 0
    """How often a group without any advantage is sampled again, to other tokens (dynamic sampling)."""
    shapley: Literal["exact"] | Positive | None = None
    """Give every agent the reward `shapley`: its share of the answer's reward, by masking agents out, over all
    coalitions or over so many drawn orders. With fork_on_first only; it costs that many more rollouts."""

    @model_validator(mode="after")
    def _probabilities(self) -> SamplingConfig:
        if self.fork_probabilities is not None:
            if self.strategy != "round_robin":
                raise ValueError("fork_probabilities belong to strategy 'round_robin'; leave them out")
            if abs(sum(self.fork_probabilities) - 1.0) > 1e-6:
                raise ValueError(f"fork_probabilities sum to {sum(self.fork_probabilities)}; make them sum to 1")
        if self.continue_from != "best" and self.strategy != "tree":
            raise ValueError("continue_from belongs to strategy 'tree'; leave it out")
        if self.shapley is not None and self.strategy != "fork_on_first":
            raise ValueError("shapley needs strategy 'fork_on_first', whose rollouts share no call")
        return self


class LossConfig(Section):
    """The clipped surrogate."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    beta: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term against the weights at the start of RL; 0 loads no reference."""
    ratio: Literal["token", "sequence"] = "token"
    """One ratio per token, or the geometric mean over a trajectory's tokens."""
    objective: Literal["clipped", "cispo"] = "clipped"
    """`clipped`: no gradient where the ratio leaves its bounds; `cispo`: the clipped ratio is a weight, and every token
    keeps its gradient."""
    reduction: Literal["trajectory", "token"] | Positive = "trajectory"
    """Every trajectory counts alike, or every token; a number: a trajectory's tokens are summed and divided by it."""
    guard: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weight of samples from older weights, rho = pi_now / pi_sampled per token: `truncate` multiplies by
    min(rho, guard_cap), `mask` leaves out tokens with rho outside 1 / guard_cap .. guard_cap; `auto`: `truncate` where
    samples may lag behind, else none. The ratio that is clipped is then the one against the weights before the step."""
    guard_cap: Annotated[float, Field(gt=1)] = 2.0
    """Bound of the guard."""

    @model_validator(mode="after")
    def _used(self) -> LossConfig:
        if self.guard == "none" and self.guard_cap != 2.0:
            raise ValueError("guard_cap bounds a guard, and there is none; leave it out")
        return self


class EngineConfig(Section):
    """The in-process sampler."""

    max_batch: Positive = 64
    """Most completions that are sampled at once."""
    batching: Literal["auto", "step", "group", "continuous"] = "auto"
    """What fixes a batch's composition: the step or the group (both bit-reproducible), or arrival (for slow tools).
    `auto`: the step in a run of one process, the group in one of several, where a step is spread over workers."""


class StoreConfig(Section):
    """What the processes of a run share; a run in one process has none."""

    url: str | None = None
    """Where the store is: `env:NAME` or `file:PATH`, which hold a PostgreSQL address; by default a file of the run."""
    run: str | None = None
    """The run's name in a store of several runs; by default the name that its folder has in the beginning."""
    max_lag: NonNegative = 0
    """How many versions behind a sample may be; 0: the same losses as in one process."""
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after which the work of a process that died is given to another one."""
    max_waiting_bytes: Positive = 2_000_000_000
    """Workers wait while more than this waits for trainers."""
    groups_per_worker: Positive = 1
    """Groups that a worker makes at once; more keep an engine busy while tools are waited for."""
    keep_groups: bool = True
    """False: groups leave the store once they are trained on, saved and written to the run folder."""


class ToolConfig(Section):
    """Limits of the tools that agents call in episodes."""

    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one attempt of an asynchronous tool may take."""
    retries: NonNegative = 2
    """Attempts after a failed one; then the rollout is removed and counted (tool_timeout, tool_failed)."""


class WarmupConfig(Section):
    """Supervised warm-up on rule-made demonstrations of the formats, before RL."""

    steps: NonNegative = 0
    """Updates; 0 for none."""
    questions_per_step: Positive = 8
    """Training questions demonstrated per update."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of the warm-up."""
    checkpoint_every: Positive = 50
    """Warm-up steps between checkpoints."""


class LoopConfig(Section):
    """The run itself."""

    steps: NonNegative = 20
    """RL updates."""
    max_sampled: Positive | None = None
    """End before that, after the step in which all agents together have sampled this many tokens."""
    seed: NonNegative = 0
    """Seed of everything that is drawn."""
    updates_per_batch: Positive = 1
    """Passes over each batch; the ratio is 1 in the first."""
    tokens_per_pack: Annotated[int, Field(ge=64)] = 1024
    """Tokens that go through the model at once while training; bounds the memory."""
    max_bad_updates: Positive = 3
    """Updates in a row that may be skipped for a gradient that is not finite."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints."""
    keep_last: Positive = 2
    """Checkpoints to keep, besides the best."""


class EvalConfig(Section):
    """Held-out evaluation: greedy decoding, one rollout a question."""

    every: NonNegative = 10
    """Steps between evaluations; 0 for none but the first and last."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind each confidence interval."""
