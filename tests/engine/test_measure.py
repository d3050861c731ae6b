"""Memory of ranks: blocks against hand-computed bytes, estimates against measurements."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec_cli.core.live_bytes import LiveBytes
from specdec_cli.core.types import Permissions, Request, SamplingParams, Sequence
from specdec_cli.engine.build import build, load_models, measured, wire
from specdec_cli.engine.loop import Engine, RunResult
from specdec_cli.engine.memory.budget import CacheNeed, RankMemory, Split
from specdec_cli.engine.memory.chunk_bytes import chunk_bytes
from specdec_cli.engine.memory.estimate import (
    Machine,
    empty_gpu,
    estimate_passes,
    estimate_ranks,
    this_machine,
)
from specdec_cli.engine.memory.measured import (
    Models,
    measure_rank,
    rehearsal,
    release,
    weight_bytes,
)
from specdec_cli.engine.plan import block_bytes_of, plan, plan_all_ranks
from specdec_cli.errors import SetupError
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.models.fused import bytes_held_twice
from specdec_cli.recipe import Recipe, load_recipe
from tests.fixtures import NEEDS_CUDA
from tests.support import CPU, tiny_config

CUDA = torch.device("cuda")
GIB = 2**30


def pair(
    folder: Path, target: str, draft: str | None, ranks: tuple[int, int] = (1, 1), **changes: int
) -> Recipe:
    """Two configs without weights, bfloat16, blocks of 8 tokens."""
    keys: dict[str, object] = {"cache.block_size": 8, "run.device": "cpu"}
    for role, family, size in (("target", target, ranks[0]), ("draft", draft, ranks[1])):
        if family is not None:
            own = changes if role == "target" else {}
            tiny_config(family, **own).save_pretrained(folder / role)
            keys |= {
                f"{role}.model": str(folder / role),
                f"{role}.dtype": "bfloat16",
                f"{role}.load_format": "dummy",
                f"{role}.tensor_parallel_size": size,
            }
    file = folder / "recipe.yaml"
    file.write_text("target: {model: x}\n")
    return load_recipe(str(file), keys)


# (target, draft, (target TP, draft TP), changes) and bytes of one block on each rank, by hand:
# layers x local KV heads x (K + V width) x 8 tokens x 2 bytes.
CASES = {
    "gqa": (("llama", "llama", (1, 1)), {}, [(2 * 2 * 32 * 16, 2 * 2 * 32 * 16)]),
    "split heads": (("llama", "llama", (2, 2)), {}, [(2 * 1 * 32 * 16, 2 * 1 * 32 * 16)] * 2),
    "replicated heads": (("llama", None, (4, 1)), {}, [(2 * 1 * 32 * 16, 0)] * 4),
    "smaller draft": (
        ("llama", "llama", (4, 2)),
        {"num_key_value_heads": 4},
        [(2 * 1 * 32 * 16, 2 * 1 * 32 * 16)] * 2 + [(2 * 1 * 32 * 16, 0)] * 2,
    ),
    "draft on one rank": (
        ("llama", "qwen3", (2, 1)),
        {},
        [(2 * 1 * 32 * 16, 2 * 2 * 64 * 16), (2 * 1 * 32 * 16, 0)],  # qwen3 has heads 32 wide
    ),
    # Latent attention: keys of 16 + 8, values of 12, four heads.
    "unequal widths": (
        ("deepseek_v3", "llama", (1, 1)),
        {},
        [(2 * 4 * (24 + 12) * 16, 2 * 2 * 32 * 16)],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_block_bytes_of_every_rank(
    case: tuple[tuple[str, str | None, tuple[int, int]], dict[str, int], list[tuple[int, int]]],
    tmp_path: Path,
) -> None:
    (target, draft, ranks), changes, by_hand = case
    plans = plan_all_ranks(pair(tmp_path, target, draft, ranks, **changes), Permissions(), CPU)
    found = [block_bytes_of(p) for p in plans]
    shown = [layer.key_dim for layer in plans[0].target.layers]
    assert found == by_hand, f"K widths {shown}"


def test_the_split_of_a_pair_by_hand(tmp_path: Path) -> None:
    """Draft TP 1 below target TP 2 on two GPUs of 1 GiB: rank 0 has less room for larger blocks."""
    recipe = pair(tmp_path, "llama", "llama", (2, 1))
    plans = plan_all_ranks(recipe, Permissions(), CUDA)
    need = CacheNeed(1, 64, plans[0].k, 8)
    split = Split(tuple(estimate_ranks(plans, need, empty_gpu(4 * GIB, 2))))
    first, idle = split.ranks
    assert idle.draft_weight_bytes == 0 < first.draft_weight_bytes
    for rank in split.ranks:
        budget = int(0.9 * 4 * GIB) - rank.held_bytes
        assert rank.kv_budget_bytes == budget
    assert (split.limiting, split.num_blocks) == (first, first.kv_budget_bytes // (1024 + 2048))
    stranded = idle.kv_budget_bytes - 1024 * split.num_blocks
    assert split.stranded_bytes(idle) == stranded > GIB


def test_copies_of_a_long_prompt_s_keys_by_hand(tmp_path: Path) -> None:
    """4 heads of 64 and 2 of keys, in bf16; passes have 2048 tokens."""
    recipe = pair(tmp_path, "llama", None, head_dim=64)
    (planned,) = plan_all_ranks(recipe, Permissions(), CUDA)
    each = 2 * 2 * 2 * 64
    assert chunk_bytes(planned, CacheNeed(4, 448, 0, 8)) == (0, 0)
    assert chunk_bytes(planned, CacheNeed(4, 2001, 0, 8)) == (2000 * each, 0)
    assert chunk_bytes(planned, CacheNeed(1, 5001, 0, 8)) == (2048 * each, 2952 * each)
    assert chunk_bytes(planned, CacheNeed(1, 10**5, 0, 8)) == (2048 * each, 30720 * each)
    tiny = pair(tmp_path, "llama", None)  # whose heads are 16 wide
    (planned,) = plan_all_ranks(tiny, Permissions(), CUDA)
    assert chunk_bytes(planned, CacheNeed(1, 5001, 0, 8)) == (0, 0)


# Numbers that each rank holds of a model with 2 layers, 64 wide, by hand. The embedding is whole,
# and the last rank has fewest of the head's 97 rows. There are 4 heads 16 wide, and 2 of keys.
EMBEDDING, NORMS = 97 * 64, (2 * 2 + 1) * 64


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_every_rank_by_hand(family: str, size: int, tmp_path: Path) -> None:
    """4 experts of 32 or 128 features, each rank with an equal part of all of them."""
    inner = 32 if family == "qwen3_moe" else 128
    attention = 64 * (4 * 16 * 2 // size + 2 * 16 * max(1, 2 // size))
    layer = attention + 4 * 64 + 4 * 3 * 64 * inner // size
    layer += 2 * 16 if family == "qwen3_moe" else 0  # norms of heads
    if family == "gpt_oss":
        queries, keys = 64 // size, 16 * max(1, 2 // size)
        # Biases of attention, of the router, of gate and up and of down; and sinks.
        layer += queries + 2 * keys + 4 + 4 * 2 * inner // size + 4 * 64 + 4 // size
    plans = plan_all_ranks(pair(tmp_path, family, None, (size, 1)), Permissions(), CPU)
    guesses = estimate_ranks(plans, CacheNeed(1, 64, 0, 8), this_machine(CPU, size))
    tables = 2 * plans[0].max_model_len * 16
    for rank, planned in enumerate(plans):
        head = 64 * len(range(97)[rank * -(-97 // size) :][: -(-97 // size)])
        # The bias of an output projection is the first rank's.
        once = 2 * 64 if family == "gpt_oss" and rank == 0 else 0
        found = guesses[rank].target_weight_bytes
        assert found == 2 * (EMBEDDING + NORMS + 2 * layer + head + once + tables), rank
        held, _ = weight_bytes(load_models(planned))
        assert held == pytest.approx(found, abs=512), "inverse frequencies are not counted"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_are_those_alive_at_once(device: str) -> None:
    weight = torch.empty(100, 100, device=device)  # made before, so not counted
    with torch.inference_mode(), LiveBytes() as live:
        x = torch.empty(10, 100, device=device)
        y = torch.nn.functional.linear(x, weight.t())  # a view, so not counted either
        view = y.view(-1)
        del x, y
        z = view + 1
        del view
        for _ in range(5):
            z = torch.relu(z)
    assert live.peak == 2 * 10 * 100 * 4


def demo(**keys: object) -> Recipe:
    return load_recipe(
        "demo", {"run.device": "cpu", **{k.replace("__", "."): v for k, v in keys.items()}}
    )


def estimates(recipe: Recipe, need: CacheNeed) -> list[RankMemory]:
    device = plan(recipe).device
    machine = this_machine(device, 1)
    return estimate_ranks(plan_all_ranks(recipe, Permissions(), device), need, machine)


def test_ranks_of_a_host_share_what_the_weights_of_all_leave(tmp_path: Path) -> None:
    """Only rank 0 holds the draft, and its weights take from the caches of both ranks."""
    plans = plan_all_ranks(pair(tmp_path, "llama", "llama", (2, 1)), Permissions(), CPU)
    machine = Machine("cpu", 2 * GIB, 0, available_bytes=GIB)
    first, idle = estimate_ranks(plans, CacheNeed(1, 64, plans[0].k, 8), machine)
    assert idle.draft_weight_bytes == 0 < first.draft_weight_bytes
    loaded = sum(r.target_weight_bytes + r.draft_weight_bytes for r in (first, idle))
    assert first.kv_budget_bytes == idle.kv_budget_bytes == (2 * GIB - loaded) // 2 // 2


def test_weights_are_counted_as_they_lie_in_memory() -> None:
    (guess,) = estimates(demo(), CacheNeed(1, 64, 4, 16))
    held = weight_bytes(load_models(plan(demo())))
    guessed = (guess.target_weight_bytes, guess.draft_weight_bytes)
    assert held == pytest.approx(guessed, abs=256), "inverse frequencies are all that is missing"
    described = plan(demo()).models
    own = [m.weight_bytes + bytes_held_twice(m.module) for m in described]
    tables = [2 * 2048 * m.layers[0].key_dim * 4 for m in described]
    assert list(guessed) == [sum(parts) for parts in zip(own, tables, strict=True)]


def test_a_rehearsal_fills_a_chunk_with_a_full_batch() -> None:
    requests, blocks = rehearsal(CacheNeed(batch_size=3, longest=50, k=4, block_size=16), 100)
    lengths = [len(r.token_ids) for r in requests]
    assert lengths == [44, 44, 15]  # 43 + 43 + 14 tokens are fed before the last ones
    assert blocks >= 1 + sum(-(-(n + 4) // 16) for n in lengths)


def test_estimates_are_within_5_percent_on_a_cpu() -> None:
    planned = plan(demo(run__batch_size=2))
    need = CacheNeed(2, 300, planned.k, 16)
    (guess,) = estimates(demo(run__batch_size=2), need)
    found = measured(planned, load_models(planned), need)
    assert found.fits == pytest.approx(guess.fits, rel=0.05)
    assert found.target_weight_bytes == pytest.approx(guess.target_weight_bytes, rel=0.001)
    assert found.draft_weight_bytes == pytest.approx(guess.draft_weight_bytes, rel=0.001)
    # A CPU gathers keys and values for attention, which the estimate leaves out: 1.80 times.
    assert 1.6 * guess.activation_bytes < found.activation_bytes < 2 * guess.activation_bytes


def test_the_engine_allocates_what_is_announced_and_uses_it_to_the_last_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {
        "cache__cpu_bytes": 5_000_000,
        "cache__max_model_len": 400,
        "run__batch_size": 8,
        "sampling__ignore_eos": True,
        "sampling__max_new_tokens": 100,
    }
    planned = plan(demo(**keys))
    need = CacheNeed(8, planned.max_model_len, planned.k, 16)
    announced = measured(planned, load_models(planned), need).fits
    engine = build(plan(demo(**keys)), 60)
    assert engine.allocator.num_usable + 1 == announced < need.num_blocks
    least: list[int] = []
    extend = engine.allocator.extend

    def watched(table: list[int], num_tokens: int) -> None:
        extend(table, num_tokens)
        least.append(engine.allocator.num_free)

    monkeypatch.setattr(engine.allocator, "extend", watched)
    result = engine.run(
        [Request(i, (5,) * 60) for i in range(8)],
        planned.k,
        planned.params,
    )
    assert {s.finish_reason for s in result.seqs} == {"length"}
    assert min(least) == 0 and any(s.num_preemptions for s in result.seqs)


def test_rotary_tables_do_not_grow_with_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold what the run needs, and at least so many positions that longer texts can follow."""
    monkeypatch.setattr("specdec_cli.engine.build._FEWEST_POSITIONS", 64)
    recipe = pair(tmp_path, "llama", "llama", max_position_embeddings=1 << 40)
    engine = build(plan(recipe), 300)
    fused = engine.target.fused
    assert fused is not None and engine.proposer is not None
    assert len(fused.cos) == engine.max_model_len == 300 + recipe.sampling.max_new_tokens
    assert len(build(plan(recipe.model_copy(update={"draft": None})), 1).target.fused.cos) == 257


def test_nothing_is_measured_for_a_cache_of_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("specdec_cli.engine.build.measured", fail)
    monkeypatch.setattr("specdec_cli.engine.build.rank_memory", fail)
    engine = build(plan(demo(cache__num_blocks=40)), 10)
    assert engine.allocator.num_usable == 39


def test_a_cache_is_no_larger_than_the_run_can_use() -> None:
    """Otherwise one short text would take half of the host's memory from other processes."""
    keys = {"run__batch_size": 3, "sampling__max_new_tokens": 50, "cache__cpu_bytes": 2**30}
    planned = plan(demo(**keys))
    need = CacheNeed(3, 10 + 50, planned.k, 16)
    assert build(planned, 10).allocator.num_usable + 1 == need.num_blocks


def test_every_rank_of_a_host_needs_room_for_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(demo(cache__num_blocks=40))
    free = 40 * sum(block_bytes_of(planned))
    monkeypatch.setattr("specdec_cli.engine.build.available_memory", lambda: free)
    assert build(planned, 10).allocator.num_usable == 39
    monkeypatch.setattr("specdec_cli.engine.build.local_world_size", lambda: 2)
    with pytest.raises(SetupError, match="out of memory: 40 blocks of the caches take"):
        build(planned, 10)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "mixtral", "deepseek_v3"])
def test_estimates_need_no_weights(family: str, tmp_path: Path) -> None:
    """This includes experts and layers without a fused form."""
    (planned,) = plan_all_ranks(pair(tmp_path, family, None), Permissions(), CUDA)
    small, large = (
        estimate_passes(planned, CacheNeed(1, 8 * scale, 0, 8)).activation for scale in (1, 32)
    )
    hidden = 64 * 2
    assert large - small >= 31 * 8 * 3 * hidden


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_hidden_states_are_counted(family: str, tmp_path: Path) -> None:
    """They count in a prefill chunk and in a captured round with its warm-up; for fused layers also
    in a captured prefill pass, as its results, and as a head's input."""
    recipe = pair(tmp_path, family, "llama")
    (planned,) = plan_all_ranks(recipe, Permissions(), CUDA)
    asking = replace(planned.target, hidden_layers=(0, 2, 2))
    asked = replace(planned, target=asking)
    need = CacheNeed(2, 100, planned.k, 8)
    without, found = estimate_passes(planned, need), estimate_passes(asked, need)
    captured = 3 * 256 if family == "llama" else 0  # 198 tokens are padded to 256
    assert found.activation - without.activation == (2 * 99 + captured) * 3 * 64 * 2
    assert found.graphs - without.graphs == 2 * 2 * (planned.k + 1) * 3 * 64 * 2


@pytest.mark.parametrize("vocab", [97, 4096])
def test_an_operator_that_meta_lacks_stops_nothing(
    vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = pair(tmp_path, "olmo2", None, vocab_size=vocab)
    (planned,) = plan_all_ranks(recipe, Permissions(), CUDA)
    followed = planned.target.pass_bytes(256, 1, gathers=False)

    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(planned.target.module, "forward", fail)
    assert followed <= planned.target.pass_bytes(256, 1, gathers=False) < 2 * followed


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_a_gpu_rows_add_up_and_the_estimate_is_near() -> None:
    recipe = demo(run__device="cuda", run__batch_size=8)
    planned = plan(recipe)
    need = CacheNeed(8, planned.max_model_len, planned.k, 16)
    (before,) = estimates(recipe, need)
    found = measured(planned, load_models(planned), need)
    release(CUDA)
    (after,) = estimates(recipe, need)
    assert found.held_bytes + found.kv_budget_bytes + found.free_bytes == found.total_bytes
    assert found.kv_budget_bytes == int(0.9 * found.total_bytes) - found.held_bytes
    assert found.graph_bytes > 0 and found.activation_bytes > 0
    # Other processes on this GPU may change its free memory; alone on it, both estimates agree.
    low, high = sorted((before.fits, after.fits))
    assert 0.95 * low <= found.fits <= 1.05 * high


def test_weights_that_are_borrowed_are_counted_once() -> None:
    target, draft = (SimpleNamespace(storages=held) for held in ({1: 10, 2: 20}, {2: 20, 3: 5}))
    assert weight_bytes(Models(cast(Any, target), cast(Any, draft))) == (30, 5)


def test_a_rehearsal_runs_two_whole_rounds() -> None:
    """The last round of a text proposes less than the largest ones."""
    planned, asked = plan(demo()), list[SamplingParams]()
    model: Any = SimpleNamespace(storages={}, cache=SimpleNamespace(layers=[]))
    engine: Any = SimpleNamespace(
        start=lambda *_: None,
        run=lambda _, k, params, **_ends: asked.append(params),
        policy=FixedLength(),
        forget_rounds=list,
        prompts=None,
    )
    measure_rank(planned, Models(model), CacheNeed(1, 64, planned.k, 16), lambda _: engine)
    assert [params.max_new_tokens >= 2 * (planned.k + 1) for params in asked] == [True]


@pytest.mark.parametrize(("policy", "rounds"), [("fixed", {2}), ("adaptive", set(range(6, 20)))])
def test_a_rehearsal_ends_after_the_largest_rounds(
    policy: str, rounds: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little acceptance, more rounds of 300 proposals would take minutes. A policy that
    varies lengths may have its largest rounds later."""
    keys = {
        "speculation__num_speculative_tokens": 8,
        "speculation__acceptance": "synthetic",
        "speculation__synthetic_acceptance_length": 1.2,
        "speculation__length__policy": policy,
        "run__batch_size": 3,
    }
    planned, ended, run = plan(demo(**keys)), list[Sequence](), Engine.run

    def spied(*args: Any, **more: Any) -> RunResult:
        result = run(*args, **more)
        ended.extend(result.seqs)
        return result

    monkeypatch.setattr(Engine, "run", spied)
    models = load_models(planned)
    found = measure_rank(planned, models, CacheNeed(3, 64, 8, 16), partial(wire, planned, models))
    assert len(ended) == 3 and found.activation_bytes > 0
    assert {len(seq.proposed_per_round) + seq.rounds_without_proposal for seq in ended} <= rounds


def test_what_captured_rounds_hold_on_a_gpu(tmp_path: Path) -> None:
    """cuBLAS takes 32 MiB for each of two streams; n-grams are looked up in texts of int32."""
    recipe = pair(tmp_path, "llama", None)
    lookup = recipe.speculation.model_copy(update={"method": "ngram"})
    recipe = recipe.model_copy(update={"speculation": lookup})
    (planned,) = plan_all_ranks(recipe, Permissions(), CUDA)
    few, many = (
        estimate_passes(planned, CacheNeed(3, longest, planned.k, 16)).graphs
        for longest in (64, 128)
    )
    assert planned.k > 0 and few > 2 * 32 * 2**20
    # Three more times 4 blocks of 16 for each of three texts.
    assert many - few == 4 * 3 * (3 * 64)


def test_ranks_of_gpus_have_buffers_to_talk() -> None:
    alone, beside = (empty_gpu(GIB, count).other_bytes for count in (1, 2))
    assert alone < GIB < beside


def test_sampling_takes_more_than_greedy_decoding_on_a_cpu() -> None:
    """The distributions of the draft's and the target's rows, in fp32."""
    need = CacheNeed(32, 2, 4, 16)  # rounds are larger than prefill
    greedy, sampled = (
        plan(demo(sampling__temperature=heat, run__batch_size=32)) for heat in (0.0, 0.8)
    )
    more = estimate_passes(sampled, need).activation - estimate_passes(greedy, need).activation
    assert more >= 4 * greedy.target.vocab_size * 32 * (greedy.k + greedy.k + 1)


def test_logits_are_held_three_times_where_ranks_gather_them(tmp_path: Path) -> None:
    """Each rank's part, all parts, and all side by side."""
    alone, split = (
        plan_all_ranks(pair(tmp_path, "llama", None, (size, 1)), Permissions(), CPU)[0]
        for size in (1, 2)
    )
    one, both = (p.target.pass_bytes(1, 4096, gathers=False) for p in (alone, split))
    assert both > 2.9 * one
