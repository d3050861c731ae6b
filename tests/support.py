"""Tiny random models of each family, saved as checkpoints, and engines over them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator as Candidates

from specdec_cli.engine.draft import DraftWorker
from specdec_cli.engine.kv_cache import BlockAllocator, KVCache
from specdec_cli.engine.loop import Engine, Request
from specdec_cli.engine.target import TargetScorer
from specdec_cli.engine.types import SamplingParams, Sequence
from specdec_cli.models.loader import Description, ModelSpec, describe, load
from specdec_cli.models.paged import PagedModel

CPU = torch.device("cpu")
VOCAB = 97

# initializer_range 0.2 spreads logits over about +-6, so that wrong attention changes tokens.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "pad_token_id": 0,
    },
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model; gpt2 takes its own names for sizes."""
    values = FAMILIES[family] | changes
    if values["model_type"] != "gpt2":
        values = _COMMON | values
    else:
        shared = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        values = {key: _COMMON[key] for key in shared} | values
    return AutoConfig.for_model(**values)


def save_tiny(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of `family` to `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    # Norms at one and biases at zero would hide a loader that forgets them.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Any:
    """transformers' own model with its plain attention: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    return model.to(device).eval()


def description(folder: Path, device: torch.device = CPU, dtype: str = "auto") -> Description:
    return describe(ModelSpec("target", str(folder), None, dtype, "auto"), device)


def paged_model(
    folder: Path,
    num_blocks: int,
    block_size: int,
    device: torch.device = CPU,
    dtype: str = "auto",
    foreign_ids: bool = False,
) -> PagedModel:
    """The checkpoint in our loader, over a cache poisoned with NaN."""
    found = description(folder, device, dtype)
    cache = KVCache(found.layers, num_blocks, block_size, found.dtype, device)
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(float("nan"))
    return PagedModel(load(found, device), cache, foreign_ids)


def make_engine(
    target: Path,
    draft: Path | None,
    *,
    batch_size: int = 1,
    num_blocks: int = 200,
    block_size: int = 4,
    max_model_len: int = 256,
    prefill_chunk: int = 2048,
    eos_ids: frozenset[int] = frozenset(),
    device: torch.device = CPU,
    dtype: str = "auto",
    draft_max_len: int = 512,
) -> Engine:
    """An engine over two saved checkpoints."""
    target_model = paged_model(target, num_blocks, block_size, device, dtype)
    worker = None
    if draft is not None:
        draft_model = paged_model(draft, num_blocks, block_size, device, dtype)
        draft_model.foreign_ids = draft_model.vocab_size < target_model.vocab_size
        worker = DraftWorker(draft_model, target_model.vocab_size, draft_max_len)
    return Engine(
        TargetScorer(target_model),
        worker,
        BlockAllocator(num_blocks, block_size),
        batch_size=batch_size,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        eos_ids=eos_ids,
    )


def decode(engine: Engine, prompts: list[list[int]], k: int, **params: Any) -> list[Sequence]:
    """Run prompts through an engine; checks that every block came back."""
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    result = engine.run(requests, k, SamplingParams(**params))
    assert engine.allocator.num_used == 0
    return result.seqs


def greedy_reference(
    model: Any, prompt: list[int], new_tokens: int, eos_token_id: int | None = None
) -> list[int]:
    """transformers' own greedy `generate`; EOS counts only where it is given."""
    return _generate(model, prompt, new_tokens, eos_token_id=eos_token_id)


def assisted_rounds(
    target: Any, assistant: Any, prompt: list[int], k: int, new_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """transformers' assisted generation at fixed k, EOS ignored.

    Returns the new tokens, and (proposed, accepted) of each round that proposed.
    """
    # Only the assistant's own settings fix the number of candidates.
    settings = assistant.generation_config
    settings.num_assistant_tokens = k
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    settings.eos_token_id = None
    proposed: list[int] = []
    accepted: list[int] = []
    get, update = Candidates.get_candidates, Candidates.update_candidate_strategy

    def get_candidates(self: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        candidates, logits = get(self, input_ids, *rest, **more)
        proposed.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    def update_strategy(self: Any, input_ids: Any, scores: Any, num_matches: int) -> Any:
        accepted.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    with (
        patch.object(Candidates, "get_candidates", get_candidates),
        patch.object(Candidates, "update_candidate_strategy", update_strategy),
    ):
        tokens = _generate(target, prompt, new_tokens, eos_token_id=None, assistant_model=assistant)
    return tokens, [(p, a) for p, a in zip(proposed, accepted, strict=True) if p]


def _generate(model: Any, prompt: list[int], new_tokens: int, **more: Any) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **more,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
