"""Estimates the memory of passes from the shapes of their tensors. See docs/memory.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.state import slot_counts
from specdec_cli.engine.memory.budget import (
    CacheNeed,
    Overhead,
    RankMemory,
    available_memory,
    gpu_budget,
    host_budget,
    total_memory,
)
from specdec_cli.engine.memory.chunk_bytes import chunk_bytes, prefill_tokens
from specdec_cli.engine.memory.measured import cache_rounding, memory_of
from specdec_cli.engine.plan import Plan, draft_at
from specdec_cli.methods.base import MethodBytes, RoundSize
from specdec_cli.methods.registry import method_of
from specdec_cli.models.draft import Draft
from specdec_cli.models.prompt_passes import WIDTHS, width_of

# cuBLAS's workspace per stream on Hopper, plus unused space in torch's segments for small tensors.
_PER_STREAM = 32 * 2**20 + 22 * 2**20
# Memory that a captured round takes in addition to the tensors in its pool.
_PER_GRAPH = 16 * 2**20
_PER_PROMPT_GRAPH = 4 * 2**20
# The CUDA context and kernels; with several ranks, also the buffers of NCCL and symmetric memory.
CONTEXT_BYTES = 768 * 2**20
COMMUNICATION_BYTES = 832 * 2**20


class PassBytes(NamedTuple):
    """The bytes of activations and of CUDA graphs, defined as `activation_bytes` and `graph_bytes`
    in `engine.memory.budget.RankMemory`."""

    activation: int
    graphs: int


def estimate_passes(plan: Plan, need: CacheNeed) -> PassBytes:
    """Estimate this rank's memory during the largest passes that `need` allows."""
    chunk = prefill_tokens(plan, need)
    is_cuda = plan.device.type == "cuda"
    method = _method_bytes(plan, need)
    each = [_pass_bytes(plan, m, chunk, _drawn(m, need), gathers=is_cuda) for m in plan.held]
    if is_cuda:
        of_chunks = chunk_bytes(plan, need)
        each.append(of_chunks.first + of_chunks.later)
    if plan.captures_prompts:
        each.append(_prompt_graphs_bytes(plan, need))
    # On CUDA, one model's pass can seldom reuse memory that another model's pass has freed, because
    # the freed blocks have other sizes. So the sizes add up.
    prefill = sum(each) if is_cuda else max(each)
    if plan.no_cuda_graphs is not None:
        prefill = max(prefill, _eager_bytes(plan, need))
    if not is_cuda:
        return PassBytes(prefill, 0)
    prefill += _PER_STREAM + cache_rounding(plan)
    if plan.no_cuda_graphs is not None:
        return PassBytes(prefill, 0)
    # The factor 2 is for two memory pools: captured rounds share one, and the warm-up rounds that
    # run before the capture leave as much memory reserved in another.
    in_round = _passes_bytes(plan, need.batch_size) + method.in_round
    graphs = 2 * (in_round + _PER_STREAM) + len(slot_counts(need.batch_size)) * _PER_GRAPH
    return PassBytes(prefill, graphs + method.held)


def _drawn(model: Draft, need: CacheNeed) -> int:
    """Return the maximum number of rows of logits in a prefill pass of `model`. In plain decoding,
    the target's pass computes one row per sequence to decide its first token. A draft's prefill
    pass computes no logits."""
    return need.batch_size if model.spec.role == "target" else 0


def _prompt_graphs_bytes(plan: Plan, need: CacheNeed) -> int:
    """Estimate the bytes of captured prefill passes: their memory pool, the buffers for inputs and
    results, and the graphs themselves. Estimates count them as activations because measurements
    do."""
    largest = width_of(prefill_tokens(plan, need)) or WIDTHS[-1]
    # There is one graph for each width and number of logit rows that occur together. Few widths
    # occur with every number of rows, so estimate the number of graphs as the number of widths plus
    # the number of row counts, not as their product.
    count = WIDTHS.index(largest) + 1 + len(slot_counts(need.batch_size))
    found = _PER_STREAM + count * len(plan.held) * _PER_PROMPT_GRAPH
    for model in plan.held:
        if model.spec.role not in plan.compiled and (widest := model.captured_width):
            width, rows = min(largest, widest), _drawn(model, need)
            found += _pass_bytes(plan, model, width, rows, gathers=True)
            found += rows * model.vocab_size * model.dtype.itemsize
            found += 2 * plan.target.hidden_bytes(width) if model is plan.target else 0
    return found


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and memory that an estimate assumes for each rank of a run.

    name: the kind of device, `cuda` or `cpu`.
    total_bytes: the memory of a GPU, or a CPU rank's share of its host's memory.
    other_bytes: the memory that is in use before anything is loaded.
    available_bytes: a CPU rank's share of the host's available memory; unused for a GPU.
    is_limit: True if, on a CPU, weights, activations and caches together must fit into total_bytes.
    """

    name: str
    total_bytes: int
    other_bytes: int
    available_bytes: int = 0
    is_limit: bool = False


def this_machine(device: torch.device, num_ranks: int) -> Machine:
    """Describe this host's GPU or CPU with the memory that is in use now. All `num_ranks` ranks are
    assumed to run on this host."""
    if device.type != "cuda":
        whole, free = total_memory(), available_memory()
        return Machine("cpu", whole // num_ranks, (whole - free) // num_ranks, free // num_ranks)
    free, total = torch.cuda.mem_get_info(device)
    return Machine("cuda", total, max(CONTEXT_BYTES, total - free) + _talk(num_ranks))


def empty_gpu(total_bytes: int, num_ranks: int) -> Machine:
    """Describe a GPU with `total_bytes` of memory that no other process uses."""
    return Machine("cuda", total_bytes, CONTEXT_BYTES + _talk(num_ranks))


def host_of(total_bytes: int, num_ranks: int) -> Machine:
    """Describe a host with `total_bytes` of memory that runs all ranks on its CPU."""
    share = total_bytes // num_ranks
    return Machine("cpu", share, 0, share, is_limit=True)


def _talk(num_ranks: int) -> int:
    return COMMUNICATION_BYTES if num_ranks > 1 else 0


def estimate_ranks(plans: Sequence[Plan], need: CacheNeed, machine: Machine) -> list[RankMemory]:
    """Estimate the results of `engine.memory.measured.measure_rank` on all ranks without loading
    anything."""
    weights = [[_loaded_bytes(plan, model) for model in plan.held] for plan in plans]
    on_host = sum(map(sum, weights))
    return [
        _estimate_rank(plan, own, on_host, need, machine)
        for plan, own in zip(plans, weights, strict=True)
    ]


def _estimate_rank(
    plan: Plan, weights: Sequence[int], on_host: int, need: CacheNeed, machine: Machine
) -> RankMemory:
    """Estimate the memory of one rank.

    weights: the bytes of its target's weights, and of its draft's weights if it holds any.
    on_host: the bytes of the weights of all ranks, which share the host if they run on its CPU.
    """
    passes = estimate_passes(plan, need)
    overhead = Overhead(machine.total_bytes, passes.activation, passes.graphs, machine.other_bytes)
    cache, num_ranks = plan.recipe.cache, plan.parallel.size
    if plan.device.type == "cuda":
        budget = gpu_budget(cache, overhead, sum(weights))
    elif machine.is_limit:
        left = max(0, machine.total_bytes - sum(weights) - passes.activation)
        asked = cache.cpu_bytes
        budget = left if asked is None else min(left, asked // num_ranks)
    else:
        available = machine.available_bytes * num_ranks - on_host
        budget = host_budget(cache, max(0, available), num_ranks)
    of_models = weights[0], sum(weights[1:])
    return memory_of(plan, machine.name, overhead, of_models, budget)


def draft_shares(plan: Plan, degree: int) -> list[tuple[int, int]]:
    """Return, for each rank, the bytes of the draft's weights and of one block of the draft's cache
    if the draft is split over the first `degree` ranks. Both are zero on other ranks. Raises
    `SetupError` if the draft cannot be split over so many ranks."""
    assert plan.draft is not None
    found = [(0, 0)] * plan.parallel.size
    for rank in range(degree):
        part = draft_at(plan, TensorParallel(rank, degree, None, plan.device))
        block = part.block_bytes(plan.recipe.cache.block_size)
        found[rank] = _loaded_bytes(plan, part), block
    return found


def _loaded_bytes(plan: Plan, model: Draft) -> int:
    return model.loaded_bytes(is_compiled=model.spec.role in plan.compiled)


def _eager_bytes(plan: Plan, need: CacheNeed) -> int:
    """Estimate the peak bytes of tensors during a round that is not captured."""
    batch = need.batch_size
    rows = batch * (plan.k + 1)
    found = _passes_bytes(plan, batch) + _method_bytes(plan, need).in_round
    if plan.device.type == "cuda" or plan.params.is_greedy:
        return found
    # Sampling on a CPU takes fp32 tensors: the draft's and the target's distributions, and
    # intermediate results.
    return found + 4 * plan.target.vocab_size * (batch * plan.k + 4 * rows)


def _method_bytes(plan: Plan, need: CacheNeed) -> MethodBytes:
    """Estimate the bytes of the method's own buffers and of the buffers for logits processing."""
    changed = _changes_bytes(plan, need)
    if not plan.k:
        return changed
    size = RoundSize(
        batch_size=need.batch_size,
        k=plan.k,
        longest=min(plan.max_model_len, need.num_blocks * need.block_size),
        vocab_size=plan.target.vocab_size,
        is_greedy=plan.params.is_greedy,
        is_first=plan.parallel.is_first,
        is_cuda=plan.device.type == "cuda",
        draft=plan.draft if plan.draft in plan.held else None,
    )
    found = method_of(plan.recipe.speculation).estimate_bytes(size)
    return MethodBytes(found.held + changed.held, found.in_round + changed.in_round)


def _changes_bytes(plan: Plan, need: CacheNeed) -> MethodBytes:
    """Estimate the bytes that logits processing takes: zero if nothing is processed.

    A repetition penalty needs the sequences' tokens and a mask of the ids in each. A round needs
    fp32 logits with three intermediate results and two masks for each of its rows, and also keeps
    the draft's fp32 logits.
    """
    if not plan.params.changes_logits:
        return MethodBytes()
    batch, vocab = need.batch_size, plan.target.vocab_size
    longest = min(plan.max_model_len, need.num_blocks * need.block_size)
    held = batch * (4 * longest + vocab) if plan.params.repetition_penalty != 1.0 else 0
    return MethodBytes(held, batch * vocab * (18 * (plan.k + 1) + 4 * plan.k))


def _passes_bytes(plan: Plan, batch: int) -> int:
    """Estimate the peak bytes of tensors in a round's passes: the target's and the draft's."""
    rows = batch * (plan.k + 1)
    found = _pass_bytes(plan, plan.target, rows, rows, gathers=False)
    for draft in plan.held[1:]:
        # The first pass of a round also feeds a token that the draft's cache lacks.
        rows = batch * (draft.passes(plan.k).rows + 1)
        found = max(found, _pass_bytes(plan, draft, rows, batch, gathers=False))
    return found


def _pass_bytes(plan: Plan, model: Draft, tokens: int, logit_rows: int, *, gathers: bool) -> int:
    is_compiled = model.spec.role in plan.compiled
    return model.pass_bytes(tokens, logit_rows, gathers=gathers, is_compiled=is_compiled)
