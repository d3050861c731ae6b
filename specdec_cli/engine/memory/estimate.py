"""Memory that passes will take on a device, estimated from shapes alone.

Weights and cache blocks follow exactly from the configs; the rest is estimated here. The largest
tensors that are alive at once in a pass are known for fused layers. For transformers' own layers a
pass on the meta device finds them. The constants are round figures; docs/memory.md compares
estimates with measurements.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from specdec_kernels.experts.plan import are_few
from specdec_kernels.experts.tiles import PARTIAL_SUMS, choose_group_tiles

from specdec_cli.core.live_bytes import LiveBytes
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.state import slot_counts
from specdec_cli.engine.memory.budget import (
    CacheNeed,
    Overhead,
    RankMemory,
    available_memory,
    total_memory,
)
from specdec_cli.engine.memory.chunk_bytes import chunk_bytes, prefill_tokens
from specdec_cli.engine.memory.measured import cache_rounding
from specdec_cli.engine.plan import Plan, allowance_of, block_bytes_of, draft_at
from specdec_cli.engine.sharing import check_shared
from specdec_cli.methods.base import Draft, MethodBytes, RoundSize
from specdec_cli.methods.registry import method_of
from specdec_cli.models.attention import attach
from specdec_cli.models.fused import busy_width, bytes_held_twice, is_fusable
from specdec_cli.models.fused_layer import ExpertSizes, Family, dense_mlp, family_of, has_experts
from specdec_cli.models.loader import Description
from specdec_cli.models.prompt_passes import WIDTHS, width_of
from specdec_cli.models.rotary_tables import num_turns

# cuBLAS' workspace for each stream on Hopper, and half-empty segments of small allocations.
_PER_STREAM = 32 * 2**20 + 22 * 2**20
# Memory of a captured round beside the tensors of its pool.
_PER_GRAPH = 16 * 2**20
_PER_PROMPT_GRAPH = 4 * 2**20
# The CUDA context and kernels; with several ranks, NCCL's and symmetric buffers too.
CONTEXT_BYTES = 768 * 2**20
COMMUNICATION_BYTES = 832 * 2**20


class PassBytes(NamedTuple):
    """Bytes of activations and of graphs, as in `engine.memory.budget.RankMemory`."""

    activation: int
    graphs: int


def estimate_passes(plan: Plan, need: CacheNeed) -> PassBytes:
    """Memory that the largest passes that `need` allows will take on this rank."""
    chunk = prefill_tokens(plan, need)
    is_cuda = plan.device.type == "cuda"
    modules, method = [m for m in plan.modules if m in plan.held], _method_bytes(plan, need)
    each = [
        _prefill_bytes(m, m.spec.role in plan.compiled, chunk, _drawn(m, need), is_cuda)
        for m in modules
    ]
    each.append(method.in_prefill)
    if is_cuda:
        of_chunks = chunk_bytes(plan, need)
        each.append(of_chunks.first + of_chunks.later)
    if plan.captures_prompts:
        each.append(_prompt_graphs_bytes(plan, need, modules, method))
    # On CUDA one model's freed blocks are seldom of a size that the other can use.
    prefill = sum(each) if is_cuda else max(each)
    if plan.no_cuda_graphs is not None:
        prefill = max(prefill, _eager_bytes(plan, need))
    if not is_cuda:
        return PassBytes(prefill, 0)
    prefill += _PER_STREAM + cache_rounding(plan)
    if plan.no_cuda_graphs is not None:
        return PassBytes(prefill, 0)
    # Captured rounds share a pool; warm-up rounds leave as much again in their stream's.
    in_round = _passes_bytes(plan, need.batch_size) + method.in_round
    graphs = 2 * (in_round + _PER_STREAM) + len(slot_counts(need.batch_size)) * _PER_GRAPH
    return PassBytes(prefill, graphs + method.held)


def _drawn(model: Description, need: CacheNeed) -> int:
    """Rows of logits of a prefill pass, which decides first tokens in plain decoding."""
    return need.batch_size if model.spec.role == "target" else 0


def _prompt_graphs_bytes(
    plan: Plan, need: CacheNeed, modules: list[Description], method: MethodBytes
) -> int:
    """Memory of captured prefill passes: their pool, inputs and results at fixed addresses, and the
    graphs. They are measured with the passes."""
    chunk = prefill_tokens(plan, need)
    largest = width_of(chunk) or WIDTHS[-1]
    fused = [m for m in modules if m.spec.role not in plan.compiled and is_fusable(m.module)]
    found = method.in_prefill * largest // chunk
    # Those of a width differ in their rows of logits; few widths need them all.
    count = WIDTHS.index(largest) + 1 + len(slot_counts(need.batch_size))
    for model in fused:
        width = min(largest, busy_width(model.module))
        rows = _drawn(model, need)
        kept = 2 * _hidden_bytes(model, width) + rows * model.vocab_size * model.dtype.itemsize
        found += _prefill_bytes(model, False, width, rows, is_cuda=True) + kept
    return found + _PER_STREAM + count * len(plan.held) * _PER_PROMPT_GRAPH


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the memory that each rank of a run is assumed to have.

    total_bytes: the GPU's memory, or a CPU rank's share of the host's. other_bytes: memory in use
    before anything is loaded. available_bytes: a CPU rank's share of available host memory.
    is_limit: whether weights, passes and caches of a CPU have to fit into total_bytes.
    """

    name: str
    total_bytes: int
    other_bytes: int
    available_bytes: int = 0
    is_limit: bool = False


def this_machine(device: torch.device, num_ranks: int) -> Machine:
    """A device of this host, in its present state; all ranks are on this host."""
    if device.type != "cuda":
        return Machine(
            "cpu",
            total_memory() // num_ranks,
            (total_memory() - available_memory()) // num_ranks,
            available_memory() // num_ranks,
        )
    free, total = torch.cuda.mem_get_info(device)
    return Machine("cuda", total, max(CONTEXT_BYTES, total - free) + _talk(num_ranks))


def empty_gpu(total_bytes: int, num_ranks: int) -> Machine:
    """A GPU that no other process uses."""
    return Machine("cuda", total_bytes, CONTEXT_BYTES + _talk(num_ranks))


def host_of(total_bytes: int, num_ranks: int) -> Machine:
    """A CPU's host that may hold so many bytes; all ranks are on it."""
    share = total_bytes // num_ranks
    return Machine("cpu", share, 0, share, is_limit=True)


def _talk(num_ranks: int) -> int:
    return COMMUNICATION_BYTES if num_ranks > 1 else 0


def estimate_rank(plan: Plan, need: CacheNeed, machine: Machine) -> RankMemory:
    """Estimate of the result of `engine.memory.measured.measure_rank`, from configs alone."""
    weights = [_weight_bytes(model, plan) for model in plan.held]
    if weights[1:]:
        weights[1] -= plan.shared_bytes
    passes = estimate_passes(plan, need)
    overhead = Overhead(machine.total_bytes, passes.activation, passes.graphs, machine.other_bytes)
    allowance, num_ranks = allowance_of(plan), plan.parallel.size
    if plan.device.type == "cuda":
        budget = allowance.gpu_budget(overhead, sum(weights))
    elif machine.is_limit:
        left = max(0, machine.total_bytes - sum(weights) - passes.activation)
        asked = allowance.cpu_bytes
        budget = left if asked is None else min(left, asked // num_ranks)
    else:
        available = (machine.available_bytes - sum(weights)) * num_ranks
        budget = allowance.host_budget(max(0, available), num_ranks)
    target_block, draft_block = block_bytes_of(plan)
    return RankMemory(
        rank=plan.parallel.rank,
        device=machine.name,
        total_bytes=machine.total_bytes,
        target_weight_bytes=weights[0],
        draft_weight_bytes=sum(weights[1:]),
        activation_bytes=passes.activation,
        graph_bytes=passes.graphs,
        other_bytes=machine.other_bytes,
        kv_budget_bytes=budget,
        target_block_bytes=target_block,
        draft_block_bytes=draft_block,
    )


class DraftShare(NamedTuple):
    """A draft's memory on one rank: bytes of its weights, and of one block of its cache."""

    weight_bytes: int
    block_bytes: int


def draft_shares(plan: Plan, degree: int) -> list[DraftShare]:
    """Memory that the planned draft would take on each rank if `degree` ranks shared it.

    Raises `SetupError` when the draft cannot be split like that.
    """
    assert plan.draft is not None
    found = [DraftShare(0, 0)] * plan.parallel.size
    for rank in range(degree):
        part = draft_at(plan, TensorParallel(rank, degree, None, plan.device))
        weights = _weight_bytes(part, plan)
        if isinstance(part, Description):
            weights -= check_shared(plan.target, part, plan.shared)
        found[rank] = DraftShare(weights, part.block_bytes(plan.recipe.cache.block_size))
    return found


def _weight_bytes(model: Draft, plan: Plan) -> int:
    """Bytes of parameters. For fused layers also those of the rotary tables and of the weights that
    a CPU keeps in two forms."""
    found = model.weight_bytes
    if not isinstance(model, Description):
        return found
    if is_fusable(model.module) and model.spec.role not in plan.compiled:
        turns = num_turns(model.module) * model.layers[0].key_dim
        found += 2 * plan.max_model_len * turns * model.dtype.itemsize
        if plan.device.type == "cpu":
            found += bytes_held_twice(model.module)
    return found


def _eager_bytes(plan: Plan, need: CacheNeed) -> int:
    """Bytes of the largest tensors of a round without graphs, in passes and sampling."""
    batch = need.batch_size
    rows = batch * (plan.k + 1)
    found = _passes_bytes(plan, batch) + _method_bytes(plan, need).in_round
    if plan.device.type == "cuda" or _is_greedy(plan):
        return found
    # A CPU samples from fp32 distributions: the draft's, the target's, and tensors made on the way.
    return found + 4 * plan.target.vocab_size * (batch * plan.k + 4 * rows)


def _method_bytes(plan: Plan, need: CacheNeed) -> MethodBytes:
    if not plan.k:
        return MethodBytes()
    size = RoundSize(
        batch_size=need.batch_size,
        k=plan.k,
        longest=min(plan.max_model_len, need.num_blocks * need.block_size),
        chunk=prefill_tokens(plan, need),
        vocab_size=plan.target.vocab_size,
        is_greedy=_is_greedy(plan),
        is_first=plan.parallel.is_first,
        is_cuda=plan.device.type == "cuda",
        draft=plan.draft if plan.draft in plan.held else None,
    )
    return method_of(plan.recipe.speculation).forecast_bytes(size)


def _is_greedy(plan: Plan) -> bool:
    return plan.recipe.sampling.temperature == 0.0


def _passes_bytes(plan: Plan, batch: int) -> int:
    """Bytes of the largest tensors of a round's scoring pass and draft passes."""
    rows = batch * (plan.k + 1)
    found = _pass_bytes(plan.target, "target" in plan.compiled, rows, rows)
    if plan.k and isinstance(plan.draft, Description) and plan.draft in plan.held:
        found = max(found, _pass_bytes(plan.draft, "draft" in plan.compiled, 2 * batch, batch))
    return found


def _pass_bytes(model: Description, is_compiled: bool, tokens: int, logit_rows: int) -> int:
    """Bytes of the tensors that are alive at once at a pass's peak."""
    itemsize = model.dtype.itemsize
    ranks = model.parallel.size
    # With several ranks the head's parts are gathered, and then joined.
    logits = logit_rows * model.vocab_size * itemsize * (1 if ranks == 1 else 3)
    if is_fusable(model.module) and not is_compiled:
        layer = _fused_layer(model, tokens)
        numbers = tokens * (layer.common + max(layer.attention, layer.mlp))
        return _hidden_bytes(model, tokens) + max(numbers * itemsize, logits)
    return _hidden_bytes(model, tokens) + max(_live_bytes(model, tokens), logits)


def _hidden_bytes(model: Description, tokens: int) -> int:
    """Bytes of the hidden states [T, L * H] that a pass returns, which it keeps while it runs."""
    numbers = tokens * len(model.hidden_layers) * int(model.module.config.hidden_size)
    return numbers * model.dtype.itemsize


class _LayerNumbers(NamedTuple):
    """Numbers per token that a fused layer holds at once; see `models.fused`.

    common: throughout. attention: in attention while decoding. gathered: in attention in prefill.
    """

    common: int
    attention: int
    gathered: int
    mlp: int


def _fused_layer(model: Description, tokens: int) -> _LayerNumbers:
    family = family_of(model.module)
    assert family is not None
    layer = model.module.model.layers[0]
    hidden = int(model.module.config.hidden_size)
    mixed = int(layer.self_attn.q_proj.out_features)
    shape = model.layers[0]
    qkv = mixed + shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    # Norms over all heads leave query and key beside their joined form.
    normed = 2 * qkv if family.norms_all_heads else 0
    # A post-norm's output is alive beside the sum that it is added to.
    streams = hidden * (4 if family.has_post_norms else 3)
    return _LayerNumbers(
        common=2 * num_turns(model.module) * shape.key_dim + hidden,
        attention=max(hidden + qkv + max(2 * mixed, normed), mixed + streams),
        # Rotated qkv; then queries, keys, values and result at the width of all query heads, twice.
        gathered=hidden + 2 * qkv + max(5 * mixed, normed),
        mlp=_mlp_numbers(model, tokens, streams, family),
    )


def _mlp_numbers(model: Description, tokens: int, streams: int, family: Family) -> int:
    """Numbers per token that the MLP or the experts of a fused layer hold at once."""
    config, layers = model.module.config, model.module.model.layers
    hidden = int(config.hidden_size)
    found = 0
    for mlp in [mlp for mlp in map(dense_mlp, layers) if mlp is not None]:
        inner = int(mlp.gate_proj.out_features)
        found = max(found, hidden + 3 * inner, inner + streams)
    if model.parallel.size > 1:
        streams += 2 * hidden  # a rank's own part of the experts' sum comes with a norm
    for layer in filter(has_experts, layers):
        count, chosen, inner = ExpertSizes.of(layer, config, family)
        # Rows of every choice: as they come, gated and not, and results; fp32 is two numbers. The
        # clamped activation runs in torch, whose steps each have a result.
        steps = 10 if family.clamps_experts else 3
        sorted_rows = chosen * (hidden + steps * inner + hidden) + 4 * count
        few_rows = min(count, chosen * tokens) * inner + 2 * PARTIAL_SUMS * hidden
        grouped_rows = chosen * (inner + hidden) + 4 * count
        if are_few(tokens, chosen, count):
            rows = few_rows
        elif choose_group_tiles(tokens, chosen, count, 2) is not None:
            rows = grouped_rows
        else:
            rows = sorted_rows
        # The sum of the stream and what shared experts give is alive beside the stream.
        with_shared = 0 if dense_mlp(layer) is None else hidden
        found = max(found, streams + with_shared + rows)
    return found


def _prefill_bytes(
    model: Description, is_compiled: bool, tokens: int, logit_rows: int, is_cuda: bool
) -> int:
    """Bytes that the largest prefill pass takes."""
    if not is_cuda or is_compiled or not is_fusable(model.module):
        return _pass_bytes(model, is_compiled, tokens, logit_rows)
    layer = _fused_layer(model, tokens)
    # The allocator does not reuse attention's blocks for the MLP, so both count, as logits do.
    numbers = tokens * (layer.common + layer.gathered + layer.mlp)
    numbers += logit_rows * model.vocab_size * (1 if model.parallel.size == 1 else 3)
    return _hidden_bytes(model, tokens) + numbers * model.dtype.itemsize


class _Stub:
    """Stand-in for attention: returns a tensor of its output's shape."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: object,
    ) -> torch.Tensor:
        heads, tokens, _width = query.shape
        return query.new_empty(tokens, heads, value.shape[-1])


@torch.inference_mode()
def _live_bytes(model: Description, tokens: int) -> int:
    """Bytes at the peak of a pass through transformers' own layers, run on the meta device."""
    module: Any = model.module
    attach(module, _Stub())
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    none = torch.zeros(0, dtype=torch.int64, device="meta")
    try:
        with LiveBytes() as live:
            module(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=none)
    except (RuntimeError, TypeError):  # an operator that the meta device lacks
        widest = max(int(weight.shape[-2]) for weight in module.parameters() if weight.dim() >= 2)
        narrow = min(widest, 16 * int(module.config.hidden_size))  # not the vocabulary
        return int(tokens * 8 * narrow * model.dtype.itemsize)
    return int(live.peak)
