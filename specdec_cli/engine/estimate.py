"""What passes will take of a GPU's memory, from shapes alone.

Weights and cache blocks follow exactly from the configs; here is what does not. The largest tensors
of a pass that are alive at once are known for fused layers, and found by a pass on the meta device
for transformers' own. The constants are measured: docs/memory.md says where.
"""

from typing import Any, NamedTuple

import torch

from specdec_cli.engine.live_bytes import LiveBytes
from specdec_cli.engine.loop import slot_counts
from specdec_cli.engine.measure import cache_rounding
from specdec_cli.engine.plan import Plan
from specdec_cli.engine.profile import CacheNeed
from specdec_cli.models.attention import attach
from specdec_cli.models.fused import is_fusable
from specdec_cli.models.loader import Description

# What cuBLAS keeps for each stream on Hopper, and half-empty segments of small allocations.
_PER_STREAM = 32 * 2**20 + 22 * 2**20
# The CUDA context and kernels; with several ranks, NCCL's and symmetric buffers too.
CONTEXT_BYTES = 640 * 2**20
COMMUNICATION_BYTES = 1024 * 2**20


class PassBytes(NamedTuple):
    """As in `engine.profile.RankMemory`."""

    activation: int
    graphs: int


def estimate_passes(plan: Plan, need: CacheNeed) -> PassBytes:
    """What the largest passes that `need` allows will take on this rank."""
    chunk = min(plan.recipe.run.prefill_chunk, need.batch_size * max(1, need.longest - 1))
    prefill = max(_pass_bytes(m, m.spec.role in plan.compiled, chunk, 0) for m in plan.held)
    if plan.device.type != "cuda":
        return PassBytes(max(prefill, _round_bytes(plan, need.batch_size)), 0)
    overhead = _PER_STREAM + cache_rounding(plan)
    if plan.no_cuda_graphs is not None:
        return PassBytes(max(prefill, _round_bytes(plan, need.batch_size)) + overhead, 0)
    # A graph has a pool of its own, and the rounds that warm it up leave theirs to their stream.
    counts = slot_counts(need.batch_size)
    graphs = sum(2 * (_round_bytes(plan, slots) + _PER_STREAM) for slots in counts)
    return PassBytes(prefill + overhead, graphs)


def _round_bytes(plan: Plan, batch: int) -> int:
    """The largest tensors of a round: of the scoring pass, and what sampling keeps."""
    k, target = plan.k, plan.target
    rows = batch * (k + 1)
    found = _pass_bytes(target, "target" in plan.compiled, rows, rows)
    if plan.draft is not None and plan.draft in plan.held:
        drafting = _pass_bytes(plan.draft, "draft" in plan.compiled, 2 * batch, batch)
        found = max(found, drafting)
    is_greedy, vocab = plan.recipe.sampling.temperature == 0.0, target.vocab_size
    if plan.no_cuda_graphs is not None:
        # Ragged rounds hold distributions in fp32: those of proposals, and the target's with what
        # they are made from.
        return found + 4 * vocab * (batch * k + (2 if is_greedy else 4) * rows)
    if not is_greedy and plan.draft is not None:
        found += (
            2 * batch * k * vocab * target.dtype.itemsize
        )  # each step's logits, and all stacked
    return found


def _pass_bytes(model: Description, is_compiled: bool, tokens: int, logit_rows: int) -> int:
    """Bytes of the tensors that are alive at once at a pass's peak."""
    itemsize = model.dtype.itemsize
    ranks = model.parallel.size
    # Split over ranks the head's shares are gathered, and put side by side.
    logits = logit_rows * model.vocab_size * itemsize * (1 if ranks == 1 else 3)
    if is_fusable(model.module) and not is_compiled:
        return max(_fused_layer(model, tokens) * itemsize, logits)
    return max(_live_bytes(model, tokens), logits)


def _fused_layer(model: Description, tokens: int) -> int:
    """Numbers alive at once in a fused layer; see `models.fused`."""
    layer = model.module.model.layers[0]
    hidden = int(model.module.config.hidden_size)
    inner = int(layer.mlp.gate_proj.out_features)
    mixed = int(layer.self_attn.q_proj.out_features)
    shape = model.layers[0]
    qkv = mixed + shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    rotary = 2 * shape.key_dim
    attention = 2 * hidden + qkv + 2 * mixed
    output = mixed + 4 * hidden
    gate = 2 * hidden + 3 * inner
    return tokens * (rotary + max(attention, output, gate))


class _Stub:
    """Attention that returns what has its output's shape."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        heads, tokens, _width = query.shape
        return query.new_empty(tokens, heads, value.shape[-1])


@torch.inference_mode()
def _live_bytes(model: Description, tokens: int) -> int:
    """The peak of a pass through transformers' own layers, run on meta with stand-in weights."""
    module: Any = model.module
    attach(module, _Stub())
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    none = torch.zeros(0, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        module(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=none)
    return int(live.peak)
