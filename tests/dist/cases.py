"""Functions that run on the ranks of the world. All ranks call each of them, in the same order."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specdec_kernels import ops

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core import peers
from specdec_cli.core.parallel import make_groups
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.memory.measured import Models, weight_bytes
from specdec_cli.engine.plan import plan
from specdec_cli.errors import RunError, SpecdecError
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.methods.mtp import ChainedModules
from specdec_cli.methods.step_head import HeadProposer
from specdec_cli.recipe import load_recipe
from tests.engine.test_families import BLOCK, STATES, Driver, drive, plain_reference
from tests.inside import register
from tests.support import CPU, make_engine, ngram_engine, paged_model

# Neither the first ranks nor neighbours: a rank's place in a group differs from that in the world.
MEMBERS = {1: [2], 2: [1, 3], 4: [0, 1, 2, 3]}
POISON = 1e4  # finite, because padding reads unwritten memory with weight zero


def device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else CPU


def collectives(rank: int, tp: int) -> dict[str, Any] | None:
    """The results of each collective on a rank of a group."""
    own = make_groups(tp, 1, CPU, MEMBERS[tp]).target
    if own is None:
        return None
    start, stop = own.share(10)
    mine = torch.arange(30.0).view(3, 10)[:, start:stop]
    return {
        "rank": own.rank,
        "sums": [
            own.all_reduce(torch.full((2, n), 1.0 + own.rank)).unique().tolist()
            for n in (1, 1 << 16)
        ],
        "gathered": own.all_gather(mine, 10).tolist(),
        "nothing": own.all_gather(mine[:0], 10).shape,
        "sent": own.broadcast(torch.tensor([[own.rank, 7]])).tolist(),
        "objects": own.gather_objects(own.rank * 2),
    }


def refusal_to_meet(rank: int, meetings: list[int]) -> str | None:
    """The error of ranks with these counts of rendezvous before another one, or None."""
    own = make_groups(4, 1, CPU, MEMBERS[4]).target
    assert own is not None
    before = list(peers._meetings)
    peers._meetings[:] = ["0"] * meetings[rank]
    try:
        peers.compare_meetings(own)
    except RuntimeError as problem:
        return str(problem)
    finally:
        peers._meetings[:] = before
    return None


def sums_of_sent_parts(
    rank: int, size: tuple[int, int, int], dtype: torch.dtype, runs: int = 30
) -> tuple[bool, list[float]]:
    """Run MLPs whose down projections are split, as CUDA graphs. Their parts are sent to all ranks
    by the matmuls, or stored and sent by the sums.

    size: rows, features inside a rank's MLP, and features of the residual stream. Returns whether
    both ways gave the same on all ranks, and the norm of each run's result.
    """
    own = make_groups(dist.get_world_size(), 1, device(rank)).target
    assert own is not None
    rows, inside, width = size
    kind: dict[str, Any] = {"dtype": dtype, "device": own.device}
    shared = peers.shared_memory(own, width, 8 * own.size, dtype)
    assert shared is not None, "these GPUs cannot read each other"
    sums, norm = shared.sums, torch.ones(width, **kind)
    layers = [
        [torch.randn(n, k, **kind) / k**0.5 for n, k in ((inside, width), (width, inside))]
        for _ in range(6)
    ]
    stream = torch.zeros(rows, width, **kind)

    def run(sends: bool) -> torch.Tensor:
        x = ops.Normed(stream, ops.rms_norm(stream, norm, 1e-5), None, 1e-5)
        for number, (up, down) in enumerate(layers):
            inner, place, end = ops.norm_linear(x, up), number % 2, (x.hidden, norm, 1e-5)
            if sends:
                x = ops.linear_reduce_add_norm(sums, place, inner, down, None, *end)
            else:
                ops.linear(inner, down, into=sums.take(place, rows, width))
                x = ops.reduce_add_norm(sums, place, *end)
        return x.hidden

    graphs = {}
    for sends in (False, True):
        run(sends)
        graphs[sends] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[sends]):
            out = run(sends)
        graphs[sends].out = out  # type: ignore[attr-defined]
    are_equal, norms = True, []
    for _ in range(runs):
        stream.copy_(own.broadcast(torch.randn(rows, width, **kind)))
        found = []
        for sends in (False, True, True):
            graphs[sends].replay()
            found.append(graphs[sends].out.clone())  # type: ignore[attr-defined]
        theirs = own.broadcast(found[0].clone())
        are_equal &= all(torch.equal(theirs, one) for one in found)
        norms.append(float(theirs.float().norm()))
    return are_equal, norms


def pass_errors(
    rank: int, folder: Path, tp: int, fused: bool, plain: Path | None = None
) -> dict[str, float] | None:
    """Errors of logits and hidden states against transformers' ordinary forward, which rank 0 runs
    for all. fused: test the fused layers, not the family's own. plain: has the numbers of a model
    that stays stored."""
    own = make_groups(tp, 1, CPU, MEMBERS[tp]).target
    if own is None:
        return None
    how = {"weights": "auto" if plain is None else "stored"}
    model = paged_model(folder, 120, BLOCK, parallel=own, fused=fused, hidden_layers=STATES, **how)
    assert (model.fused is not None) == fused
    oracle = plain_reference(plain or folder) if own.is_first else None

    def told_oracle(ids: torch.Tensor, output_hidden_states: bool) -> Any:
        width = model.module.config.hidden_size
        logits = torch.empty(1, ids.shape[1], model.vocab_size)
        states = torch.empty(max(STATES) + 1, 1, ids.shape[1], width)
        if oracle is not None:
            out = oracle(ids, output_hidden_states=output_hidden_states)
            logits.copy_(out.logits)
            states.copy_(torch.stack(out.hidden_states))
        return SimpleNamespace(logits=own.broadcast(logits), hidden_states=own.broadcast(states))

    return drive(Driver(model, told_oracle, [19, 6, 33]))


def decode(
    rank: int,
    pair: tuple[Path, Path | None],
    tps: tuple[int, int],
    prompts: list[list[int]],
    runs: list[tuple[int, dict[str, Any]]],
    rates: tuple[float, ...] | None = None,
    **settings: Any,
) -> dict[str, Any] | None:
    """Run prompts through an engine whose models are split over ranks, once for each (k, params) of
    `runs`."""
    members = MEMBERS[tps[0]] if dist.get_world_size() == 4 else None
    groups = make_groups(*tps, device(rank), members)
    if groups.target is None:
        return None
    settings["device"] = device(rank)
    if rates is not None:
        settings["rule"] = SyntheticAcceptance.from_rates(rates)
    if pair[1] is None:
        engine = ngram_engine(pair[0], groups=groups, **settings)
    else:
        engine = make_engine(pair[0], pair[1], groups=groups, **settings)
    return told(engine, prompts, runs)


def arriving(
    rank: int,
    pair: tuple[Path, Path],
    tps: tuple[int, int],
    prompts: list[list[int]],
    due: list[float],
    **settings: Any,
) -> dict[str, Any] | None:
    """Run prompts that are due later, k = 3, where all ranks but the first have wrong clocks.

    Also returns the running sequences of each step, and the numbers that rank 0 sent.
    """
    members = MEMBERS[tps[0]] if dist.get_world_size() == 4 else None
    groups = make_groups(*tps, device(rank), members)
    if groups.target is None:
        return None
    engine = make_engine(*pair, groups=groups, device=device(rank), **settings)
    sent: list[int] = []
    told = engine._arrivals.told
    engine._arrivals.told = lambda number: sent.append(told(number)) or sent[-1]  # type: ignore
    clock, wrong = time.perf_counter, 1e4 * groups.target.rank
    time.perf_counter = lambda: clock() + wrong * (clock() % 2 - 1)  # type: ignore[assignment]
    try:
        params = SamplingParams(max_new_tokens=9)
        requests = [
            Request(i, tuple(p), None, at)
            for i, (p, at) in enumerate(zip(prompts, due, strict=True))
        ]
        run, steps = engine.start(requests, 3, params), []
        while not run.scheduler.is_done:
            engine.step(run)
            if not steps or steps[-1] != [s.index for s in run.scheduler.running]:
                steps.append([s.index for s in run.scheduler.running])
    finally:
        time.perf_counter = clock
    return {"seqs": [seq_told(s) for s in run.seqs], "steps": steps, "sent": sent}


def told(
    engine: Engine, prompts: list[list[int]], runs: list[tuple[int, dict[str, Any]]]
) -> dict[str, Any]:
    """The sequences and metrics of each run, and the bytes of the caches."""
    models = [engine.target]
    if isinstance(engine.proposer, DraftModel) and engine.proposer.model is not None:
        models.append(engine.proposer.model)
    for model in models:
        for tensor in model.cache.pools:
            tensor.fill_(POISON)
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    results = [engine.run(requests, k, SamplingParams(**params)) for k, params in runs]
    assert engine.allocator.num_used == 0
    engine.forget_rounds()  # NCCL would not end before its graphs
    return {
        "seqs": [[seq_told(s) for s in result.seqs] for result in results],
        "metrics": [result.metrics for result in results],
        "kv_bytes": [model.cache.num_bytes for model in models],
    }


def seq_told(seq: Sequence) -> tuple[Any, ...]:
    return (
        seq.output_ids,
        seq.proposed_per_round,
        seq.accepted_per_round,
        seq.finish_reason,
        seq.num_preemptions,
    )


def built(rank: int, sets: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Plan, build and run a recipe, as a command does; returns outputs and this rank's holdings."""
    found = plan(load_recipe(None, sets))
    engine = build(found, max(map(len, prompts)))
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    result = engine.run(requests, found.k, found.params)
    assert found.draft is not None
    return {
        "outputs": [s.output_ids for s in result.seqs],
        "accepted": [sum(s.accepted_per_round) for s in result.seqs],
        "rounds": [(s.proposed_per_round, s.accepted_per_round) for s in result.seqs],
        "forecasts": [
            engine.forecast(request, s.output_ids, found.k, found.params)
            for request, s in zip(requests, result.seqs, strict=True)
        ],
        "execution": found.execution,
        "num_blocks": engine.allocator.num_usable + 1,
        "held": [m.spec.role for m in found.held],
        "draft_bytes": draft_bytes(engine),
        "draft_planned": found.draft.weight_bytes,
        "kv_heads": found.target.layers[0].num_kv_heads,
    }


def inside(rank: int, sets: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """`built` with a draft that lies in the target's files."""
    register()
    return built(rank, sets | {"speculation.method": "inside"}, prompts)


def draft_bytes(engine: Engine) -> int:
    """Bytes of the draft's weights on this rank."""
    proposer = engine.proposer
    if isinstance(proposer, ChainedModules):
        return weight_bytes(Models(engine.target, proposer.chain))[1]
    if isinstance(proposer, HeadProposer):
        head = proposer.head
        return 0 if head is None else weight_bytes(Models(engine.target, head))[1]
    assert isinstance(proposer, DraftModel)
    held = [] if proposer.model is None else proposer.model.module.parameters()
    return sum(p.numel() * p.element_size() for p in held)


def refused(rank: int, sets: dict[str, Any]) -> str:
    """The error message of a recipe's plan."""
    with pytest.raises(SpecdecError) as raised:
        plan(load_recipe(None, sets))
    return raised.value.message


def spoilt(
    rank: int, pair: tuple[Path, Path], tps: tuple[int, int], prompts: list[list[int]], **more: Any
) -> str:
    """The error message of a run whose draft produces NaN on rank 0 only."""
    groups = make_groups(*tps, CPU)
    engine = make_engine(*pair, groups=groups, **more)
    if rank == 0:
        assert isinstance(engine.proposer, DraftModel) and engine.proposer.model is not None
        with torch.no_grad():
            engine.proposer.model.module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RunError) as raised:
        told(engine, prompts, [(3, {"max_new_tokens": 10})])
    return raised.value.message
