"""Measures what a rank's memory is used for, by running the largest passes with small caches."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch

from specdec_cli.core.live_bytes import LiveBytes
from specdec_cli.core.types import Emission, Request, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.memory.budget import CacheNeed, Overhead, RankMemory, kv_budget, on_host
from specdec_cli.engine.memory.chunk_bytes import chunk_bytes
from specdec_cli.engine.plan import Plan, block_bytes_of
from specdec_cli.models.draft import Loaded
from specdec_cli.models.held import return_unused
from specdec_cli.models.paged import PagedModel

SEGMENT = 2 * 2**20  # torch rounds a large allocation on CUDA up to a multiple of this


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a rank has loaded. draft: None if the rank holds no part of a draft."""

    target: PagedModel
    draft: Loaded | None = None

    @property
    def held(self) -> list[Loaded]:
        return [model for model in (self.target, self.draft) if model is not None]


def measure_rank(
    plan: Plan, models: Models, need: CacheNeed, wire: Callable[[int], Engine]
) -> RankMemory:
    """Run the largest passes that `need` allows, and return this rank's memory use, broken down by
    purpose. All ranks must call this. Afterwards the models have no caches.

    wire: builds an engine from `models` with a given number of blocks.
    """
    requests, num_blocks = rehearsal(need, plan.recipe.run.prefill_chunk)
    params = replace(plan.params, max_new_tokens=2 * (plan.k + 1), stop=())
    weights = sum(weight_bytes(models))
    is_cuda = plan.device.type == "cuda"
    release(plan.device)
    engine = wire(num_blocks)

    def capture() -> None:
        engine.start(requests, plan.k, params)

    # Also run prompts that fill the largest captured prefill passes. The full batch may use none of
    # these graphs, because its chunk may be too long to be captured.
    most = max(len(request.token_ids) for request in requests)
    widths = [] if engine.prompts is None else engine.prompts.largest
    left = _left_to_a_round(plan.k)
    captured = sorted({min(width, most - left) for width in widths})

    def run() -> None:
        ends = TwoRounds(len(requests)) if engine.policy.is_fixed else None
        note = None if ends is None else ends.note
        engine.run(requests, plan.k, params, on_emit=note, arrivals=ends)
        for length in captured:
            engine.run([Request(0, (0,) * (length + left))], plan.k, params)

    if is_cuda:
        overhead = _on_gpu(plan, capture, run)
        # The measured run feeds only the first chunk of each prompt, so add an estimate of what
        # later chunks take in addition.
        activation = overhead.activation_bytes + chunk_bytes(plan, need).later
        overhead = replace(overhead, activation_bytes=activation)
    else:
        capture()
        with LiveBytes() as live:
            run()
        overhead = on_host(live.peak, weights)
    engine.forget_rounds()
    for model in models.held:
        model.cache.layers.clear()
    return rank_memory(plan, models, overhead)


@dataclass(slots=True)
class TwoRounds:
    """Arrivals that add no requests, but end the run once each of its `count` sequences has ended
    or taken part in two rounds.

    If the proposal length is fixed, later rounds take no more memory than the second one, and
    running all of them could take minutes on a CPU.
    """

    count: int
    _seqs: set[Sequence] = field(default_factory=set)

    def __iter__(self) -> Iterator[Request]:
        return iter(())

    def note(self, emissions: list[Emission]) -> None:
        self._seqs.update(emission.seq for emission in emissions)

    @property
    def is_over(self) -> bool:
        return len(self._seqs) == self.count and all(map(_has_two_rounds, self._seqs))

    def answered(self, index: int, *, has_failed: bool = False) -> None: ...


def _has_two_rounds(seq: Sequence) -> bool:
    rounds = len(seq.proposed_per_round) + seq.rounds_without_proposal
    return rounds >= 2 or seq.finish_reason is not None


def rehearsal(need: CacheNeed, prefill_chunk: int) -> tuple[list[Request], int]:
    """Return a full batch of requests, and the number of blocks that it needs. The prompts fill one
    prefill chunk together, unless that would make one of them longer than `need` allows."""
    longest_prompt = max(1, need.longest - need.k - 2)  # leaves space for a round with K = k
    left, unfed = prefill_chunk, _left_to_a_round(need.k)
    lengths = []
    for _ in range(need.batch_size):
        fed = min(left, longest_prompt - unfed)
        left -= fed
        lengths.append(max(1, fed + unfed))
    ahead = 4 * (need.k + 1)
    blocks = sum(-(-(length + ahead) // need.block_size) + 1 for length in lengths)
    return [Request(i, (0,) * length) for i, length in enumerate(lengths)], blocks + 1


def _left_to_a_round(k: int) -> int:
    """Return the number of prompt tokens that prefill leaves to the first round."""
    return 1 if k else 0


def weight_bytes(models: Models) -> tuple[int, int]:
    """Return the bytes of the target's weights and of the draft's weights. Weights that the draft
    borrows from the target count only for the target."""
    target = models.target.storages
    draft = {} if models.draft is None else models.draft.storages
    own = draft.keys() - target.keys()
    return sum(target.values()), sum(draft[piece] for piece in own)


def rank_memory(plan: Plan, models: Models, overhead: Overhead) -> RankMemory:
    """Combine a rank's measured overhead with the sizes of its weights and caches."""
    weights = weight_bytes(models)
    budget = kv_budget(plan.recipe.cache, plan.device, overhead, sum(weights))
    return memory_of(plan, str(plan.device), overhead, weights, budget)


def memory_of(
    plan: Plan, device: str, overhead: Overhead, weights: tuple[int, int], kv_budget: int
) -> RankMemory:
    """Combine sizes into a `RankMemory`. weights: the bytes of the target's and of the draft's
    weights. kv_budget: the bytes that are left for both caches."""
    target_block, draft_block = block_bytes_of(plan)
    return RankMemory(
        rank=plan.parallel.rank,
        device=device,
        target_weight_bytes=weights[0],
        draft_weight_bytes=weights[1],
        **asdict(overhead),
        kv_budget_bytes=kv_budget,
        target_block_bytes=target_block,
        draft_block_bytes=draft_block,
    )


def _on_gpu(plan: Plan, capture: Callable[[], None], run: Callable[[], None]) -> Overhead:
    """Call `capture` and `run`, and measure how much memory torch reserves during each. Memory that
    is in use but not reserved by torch becomes `other_bytes`."""
    device = plan.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(device)
    loose = before - torch.cuda.memory_allocated(device)
    capture()
    torch.cuda.synchronize(device)
    captured = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return Overhead(
        total_bytes=total,
        activation_bytes=torch.cuda.max_memory_reserved(device)
        - captured
        + loose
        + cache_rounding(plan),
        graph_bytes=captured - before,
        other_bytes=max(0, total - free - torch.cuda.memory_reserved(device)),
    )


def cache_rounding(plan: Plan) -> int:
    """Return how many bytes the caches may take beyond the sizes of their tensors. Each layer's
    keys are one allocation and its values another, and torch rounds up the size of each."""
    return 2 * sum(len(held.layers) for held in plan.held) * SEGMENT


def release(device: torch.device) -> None:
    """Free unreferenced objects, and return unused memory to the device."""
    gc.collect()
    return_unused(device)
