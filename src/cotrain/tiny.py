"""Tiny random models, built on the spot: the whole library runs on them in seconds, with no download.

Two architectures (Llama, Qwen3) of about a million weights, each with its own byte-level BPE tokenizer trained on the
generated world's pages and the agents' prompts, and a ChatML template. Equal arguments give equal weights. They know
nothing until they are trained: use them for tests and for learning on the generated world.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cotrain.cache import atomic_folder, cache_folder
from cotrain.packaged import quiet

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FORMAT = 1  # part of the cache key: raise it when the same spec is to build something else


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """Size of a tiny model. `hidden` is the width, `intermediate` that inside an MLP; embeddings are tied."""

    architecture: Literal["llama", "qwen3"] = "llama"
    vocab: int = 2048
    hidden: int = 128
    intermediate: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 1024


TINY = {"tiny-llama": TinySpec(), "tiny-qwen3": TinySpec(architecture="qwen3", vocab=1536)}


def build_tiny(name: str, seed: int = 0) -> Path:
    """The transformers folder of a tiny model with random weights, from the cache or built now (seconds).

    `name` is a key of `TINY`. The cache knows it by its spec, its seed and the text of its tokenizer.
    """
    spec, texts = TINY[name], list(tokenizer_texts())
    key = hashlib.sha256(json.dumps([_FORMAT, asdict(spec), texts]).encode()).hexdigest()[:12]
    target = cache_folder() / "models" / f"{name}-{key}-seed{seed}"
    if not (target / "config.json").is_file():
        with quiet(), atomic_folder(target) as folder:
            tokenizer = train_tokenizer(texts, spec.vocab, context=spec.context)
            random_network(spec, tokenizer, seed).save_pretrained(folder)  # type: ignore[operator]
            tokenizer.save_pretrained(folder)
    return target


def tokenizer_texts() -> Iterable[str]:
    """What the tiny tokenizers are trained on: the generated world and the search team's prompts and formats."""
    from cotrain.data.world import training_text
    from cotrain.sections import WorldConfig
    from cotrain.systems import search_pipeline

    yield from training_text(WorldConfig())
    for prompt in (search_pipeline.REWRITER, search_pipeline.RERANKER, search_pipeline.ANSWERER):
        yield from [prompt] * 50  # often enough for their words to become tokens
    yield from ["system\n", "user\n", "assistant\n"] * 50
    yield from [" ".join(f"[{i}]" for i in range(1, 11))] * 50


def train_tokenizer(
    texts: Iterable[str],
    vocab: int,
    *,
    special: Sequence[str] = (END_OF_TEXT, TURN_START, TURN_END),
    end: str = TURN_END,
    template: str = CHATML,
    context: int = 1024,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens: any text goes in and comes out whole; digits stand alone.

    `special` tokens take the first ids; `end`, one of them, is eos; the first one pads. Deterministic.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token=special[0],
        additional_special_tokens=[token for token in special[1:] if token != end],
        chat_template=template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def random_network(spec: TinySpec, tokenizer: PreTrainedTokenizerFast, seed: int) -> torch.nn.Module:
    """A float32 causal LM with random weights for this tokenizer; the global random state stays as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    make_config, make_network = kinds[spec.architecture]
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=spec.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: torch.nn.Module = make_network(config)
    return network.float().eval()
