"""Tiny random models of each family, saved as checkpoints, and engines over them."""

import shutil
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from hashlib import sha1
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator as Candidates
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator as Lookup

from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.core.candidates import Noise
from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.parallel import ALONE, ONE_RANK, Groups, TensorParallel
from specdec_cli.core.sampling import round_noise
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.methods.base import Proposer
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.methods.ngram import Ngram
from specdec_cli.models.description import Description, describe
from specdec_cli.models.fused import fuse
from specdec_cli.models.kv_scales import cache_dtype, read_scales
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import stored_parameters

CPU = torch.device("cpu")
VOCAB = 97

# initializer_range 0.2 spreads logits over about +-6, so wrong attention changes tokens.
TINY: dict[str, Any] = {
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

_WINDOW: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# One dense layer, then one with routed experts and a shared expert.
_SHARED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Keys and values of different widths, from one projection.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
} | _WINDOW

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
    "apertus": {"model_type": "apertus"},
    "arcee": {"model_type": "arcee"},
    "cohere": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 1.0},
    "cohere2": {"model_type": "cohere2", "head_dim": 16, "logit_scale": 1.0} | _WINDOW,
    "cwm": {"model_type": "cwm", "head_dim": 16} | _WINDOW,
    "deepseek_v2": {"model_type": "deepseek_v2"}
    | _LATENT
    | _SHARED_EXPERTS
    | {"q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3"} | _LATENT | _SHARED_EXPERTS | {"n_group": 2},
    "dots1": {"model_type": "dots1"} | _WINDOW | _SHARED_EXPERTS,
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    "exaone4": {"model_type": "exaone4", "sliding_window_pattern": 2} | _WINDOW,
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16} | _WINDOW,
    # The upper half of the layers attends to keys and values of the lower half.
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 4,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": _GEMMA4,
    "gemma4-moe": _GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {"model_type": "glm4_moe", "head_dim": 16} | _SHARED_EXPERTS,
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 128,
        "n_positions": 512,
    },
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 16} | _WINDOW | _EXPERTS,
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granitemoe": {"model_type": "granitemoe"} | _EXPERTS,
    "granitemoeshared": {"model_type": "granitemoeshared", "shared_intermediate_size": 64}
    | _EXPERTS,
    "helium": {"model_type": "helium", "head_dim": 16},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "hunyuan_moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": 2,
    },
    "mellum": {
        "model_type": "mellum",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    | _WINDOW,
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "head_dim": 16,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 16} | _EXPERTS,
    "ministral": {"model_type": "ministral", "head_dim": 16} | _WINDOW,
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral"} | _EXPERTS,
    "mixtral-window": {"model_type": "mixtral", "sliding_window": 7} | _EXPERTS,
    "modernbert-decoder": {"model_type": "modernbert-decoder", "pad_token_id": 0} | _WINDOW,
    "nemotron": {"model_type": "nemotron"},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3"} | _WINDOW,
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "model_type": "opt",
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "pad_token_id": 1,
    },
    "phi": {"model_type": "phi"},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phimoe": {"model_type": "phimoe"} | _EXPERTS,
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 7},
    "vaultgemma": {"model_type": "vaultgemma", "head_dim": 16, "query_pre_attn_scalar": 16}
    | _WINDOW,
    "youtu": {"model_type": "youtu"} | _LATENT,
}

LATER_FAMILIES = {"mellum", "mimo_v2_flash"}  # transformers of before 5.23 may lack them
for _name in LATER_FAMILIES - set(CONFIG_MAPPING):
    del FAMILIES[_name]


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model; gpt2 and its relatives have their own names for sizes."""
    values = FAMILIES[family] | changes
    if "n_embd" not in values:
        values = TINY | values
    else:
        shared = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        values = {key: TINY[key] for key in shared} | values
    return AutoConfig.for_model(**values)


# By family, seed and changes: a checkpoint that was written before, and torch's state after it.
_tiny: dict[str, tuple[Path, torch.Tensor]] = {}


def save_tiny(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of `family` to `folder`; a copy of one that is made once."""
    key = repr((family, seed, sorted(changes.items())))
    if key not in _tiny:
        kept = Path(_kept.name, str(len(_tiny)))
        _save_tiny(kept, family, seed, **changes)
        _tiny[key] = kept, torch.get_rng_state()
    kept, state = _tiny[key]
    torch.set_rng_state(state)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder


_kept = TemporaryDirectory(prefix="tiny-")


def _save_tiny(folder: Path, family: str, seed: int, **changes: Any) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    # Norms of one, biases of zero and stored buffers (such as routers') would hide a loader that
    # forgets them.
    stored = model.state_dict()
    buffers = [tensor for name, tensor in model.named_buffers() if name in stored]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            if tensor.is_floating_point() and (tensor.dim() == 1 or tensor.eq(tensor.max()).all()):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)


def save_noised(folder: Path, original: Path) -> Path:
    """Write a draft for `original`: a checkpoint that agrees with it about half of the time."""
    shutil.copytree(original, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    generator = torch.Generator().manual_seed(3)
    noised = {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(noised, file, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it is now, equal to copies of it: names of its files, and their content.

    Of a large file the place, size and time of change stand for its content.
    """

    files: tuple[tuple[str, Any], ...]
    folder: Path = field(compare=False)


def saved(folder: Path) -> Saved:
    """A key for what is computed from a checkpoint once."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]  # a GGUF file
    return Saved(tuple((path.name, _content(path)) for path in paths), folder)


def _content(path: Path) -> Any:
    at = path.stat()
    if at.st_size > 4 * 2**20 or not path.is_file():
        return path, at.st_size, at.st_mtime_ns
    return sha1(path.read_bytes()).digest()


def reference(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Any:
    """The oracle: transformers' model with its plain attention, a copy of one that is read once."""
    return deepcopy(_reference(saved(folder), dtype)).to(device)


@lru_cache(24)
def _reference(checkpoint: Saved, dtype: torch.dtype) -> Any:
    how: dict[str, Any] = {"attn_implementation": "eager", "dtype": dtype}
    with torch.inference_mode(False):  # some copies are trained
        return AutoModelForCausalLM.from_pretrained(checkpoint.folder, **how).eval()


def greedy_text(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """The text of transformers' greedy `generate` with a saved model, made once; EOS is ignored."""
    return list(_greedy_text(saved(folder), tuple(prompt), new_tokens))


@cache
def _greedy_text(checkpoint: Saved, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy_reference(_reference(checkpoint, torch.float32), list(prompt), new_tokens)


def description(
    folder: Path,
    device: torch.device = CPU,
    dtype: str = "auto",
    parallel: TensorParallel = ALONE,
    load_format: str = "auto",
    weights: str = "auto",
    cache: str = "auto",
) -> Description:
    """A saved model before its weights are read; a copy of what is described once."""
    spec = ModelSpec("target", str(folder), None, dtype, load_format)
    spec = replace(spec, weights=weights, cache=cache)
    if parallel.size == 1:
        found = _description(folder, saved(folder), spec, device)
        if not stored_parameters(found.module):  # a copy would lose how they are stored
            return deepcopy(found)
    return describe(spec, device, parallel)


@lru_cache(16)
def _description(
    folder: Path, checkpoint: Saved, spec: ModelSpec, device: torch.device
) -> Description:
    return describe(spec, device)


def paged_model(
    folder: Path,
    num_blocks: int,
    block_size: int,
    device: torch.device = CPU,
    dtype: str = "auto",
    foreign_ids: bool = False,
    fused: bool = False,
    parallel: TensorParallel = ALONE,
    hidden_layers: tuple[int, ...] = (),
    **spec: str,
) -> PagedModel:
    """The checkpoint in our loader, over a cache poisoned with NaN.

    fused: use fused layers, as a built engine does, if the family has them. hidden_layers: layers
    whose hidden states passes return too. spec: of `ModelSpec`.
    """
    found = description(folder, device, dtype, parallel, **spec)
    kind, where = cache_dtype(found.spec, found.dtype), (found.layers, parallel, device)
    scales = read_scales(found.spec, found.place, found.module.config, *where)
    cache = KVCache(found.layers, num_blocks, block_size, kind, device, scales)
    for tensor in cache.pools:
        tensor.fill_(float("nan"))
    module = load(found, device)
    form = fuse(module, found.max_len, parallel) if fused else None
    return PagedModel(module, cache, foreign_ids, form, hidden_layers)


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
    runs_ahead: bool = False,
    fused: bool = True,
    groups: Groups = ONE_RANK,
    rule: AcceptanceRule | None = None,
    policy: LengthPolicy | None = None,
    ngram: tuple[int, int] | None = None,
    **spec: str,
) -> Engine:
    """An engine over two saved checkpoints.

    ngram: use one checkpoint and look up suffixes of these lengths, longest and shortest.
    runs_ahead: rounds are one ahead of the host, and captured on CUDA.
    """
    parallel = groups.target or ALONE
    target_model = paged_model(
        *(target, num_blocks, block_size, device, dtype),
        **{"fused": fused, "parallel": parallel, **spec},
    )
    worker: Proposer | None = None
    if ngram is not None:
        worker = Ngram(*ngram)
    if draft is not None and groups.draft is None:
        worker = DraftModel(None, draft_max_len)
    elif draft is not None and groups.draft is not None:
        draft_model = paged_model(
            *(draft, num_blocks, block_size, device, dtype),
            **{"fused": fused, "parallel": groups.draft, **spec},
        )
        draft_model.foreign_ids = draft_model.vocab_size < target_model.vocab_size
        worker = DraftModel(draft_model, draft_max_len)
    return Engine(
        target=target_model,
        proposer=worker,
        allocator=BlockAllocator(num_blocks, block_size),
        batch_size=batch_size,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        eos_ids=eos_ids,
        rule=rule or Rejection(),
        policy=policy or FixedLength(),
        is_captured=runs_ahead and device.type == "cuda",
        runs_ahead=runs_ahead,
        parallel=parallel,
    )


def ngram_engine(target: Path, longest: int = 3, shortest: int = 1, **options: Any) -> Engine:
    """An engine with n-gram lookup; options as for `make_engine`."""
    return make_engine(target, None, ngram=(longest, shortest), **options)


def noise_of(indices: list[int], lengths: list[int], k: int, seed: int) -> Noise:
    """The engine's noise for a round of these prompts, at these numbers of tokens."""
    index, length = torch.tensor(indices), torch.tensor(lengths)
    return round_noise(torch.tensor(seed), index, length, k)


def decode(engine: Engine, prompts: list[list[int]], k: int, **params: Any) -> list[Sequence]:
    """Run prompts through an engine and check that every block was freed."""
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    result = engine.run(requests, k, SamplingParams(**params))
    assert engine.allocator.num_used == 0
    return result.seqs


def greedy_reference(
    model: Any,
    prompt: list[int],
    new_tokens: int,
    eos_token_id: int | None = None,
    **more: Any,
) -> list[int]:
    """transformers' greedy `generate`; EOS ends a text only if it is given. more: its settings."""
    return _generate(model, prompt, new_tokens, eos_token_id=eos_token_id, **more)


def assisted_rounds(
    target: Any, assistant: Any, prompt: list[int], k: int, new_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """transformers' assisted generation at fixed k, EOS ignored.

    Returns the new tokens, and (proposed, accepted) of each round that proposed.
    """
    # Only the assistant's settings fix the number of candidates.
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


def lookup_rounds(
    target: Any, prompt: list[int], k: int, longest: int, new_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """transformers' prompt lookup with n-grams of up to `longest` tokens, EOS ignored.

    Returns the new tokens, and (proposed, accepted) of each round that proposed. Transformers also
    proposes past the last new token and cuts the accepted tokens; such proposals do not count.
    """
    proposed: list[int] = []
    accepted: list[int] = []
    get = Lookup.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        candidates, logits = get(self, input_ids, *rest, **more)
        room = len(prompt) + new_tokens - input_ids.shape[1] - 1
        proposed.append(min(candidates.shape[1] - input_ids.shape[1], room))
        return candidates, logits

    def update_strategy(self: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        accepted.append(min(int(num_matches), proposed[-1]))

    with (
        patch.object(Lookup, "get_candidates", get_candidates),
        patch.object(Lookup, "update_candidate_strategy", update_strategy),
    ):
        tokens = _generate(
            target,
            prompt,
            new_tokens,
            eos_token_id=None,
            prompt_lookup_num_tokens=k,
            max_matching_ngram_size=longest,
        )
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
