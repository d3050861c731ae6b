"""Rounds as CUDA graphs: the same tokens as rounds run in other ways, and no waits of the host."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_kernels.attention import chunks, decode_triton

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import plan
from specdec_cli.recipe import load_recipe
from tests.engine.test_pipeline import engines, told
from tests.fixtures import NEEDS_CUDA
from tests.support import VOCAB, paged_model, reference, save_noised, save_tiny

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
CUDA = torch.device("cuda")
MANY_EXPERTS = {"num_experts": 40, "num_experts_per_tok": 5, "moe_intermediate_size": 72}
PROMPTS = [[random.Random(i).randrange(3, 4000) for _ in range(7 + 5 * i)] for i in range(5)]


def demo_engine(k: int, **keys: Any) -> tuple[Engine, SamplingParams]:
    """The demo pair in fp32."""
    overrides = {
        "target.dtype": "float32",
        "draft.dtype": "float32",
        "run.batch_size": 2,
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": 48,
        "sampling.ignore_eos": True,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    planned = plan(load_recipe("demo", overrides))
    return build(planned, max(map(len, PROMPTS))), planned.params


def requests() -> list[Request]:
    return [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_compiled_and_eager_passes_write_the_same(temperature: float, method: str) -> None:
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "graphs": {},
        "compiled": {"run__compile": "on"},
        "eager": {"run__cuda_graphs": "off"},
    }
    for name, keys in ways.items():
        keys |= {"sampling__temperature": temperature, "speculation__method": method}
        # A draw of seed 0 is within 3e-8 of the border between two tokens: rounding decides.
        engine, params = demo_engine(4, run__seed=1, **keys)
        assert engine.is_captured == (name != "eager")
        assert (engine.target.compiled is not None) == (name == "compiled")
        found[name] = told(engine.run(requests(), 4, params))
    assert found["graphs"] == found["eager"] == found["compiled"]


HEADS = ("eagle3", "mtp", "peagle", "dflash", "dspark")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_and_eager_passes_of_heads_write_the_same(temperature: float, head: str) -> None:
    """Their rounds are the same too, since a head's proposals never change the text."""
    method = "mtp_module" if head == "mtp" else head
    keys: dict[str, Any] = {"draft__model": f"demo:{head}", "speculation__method": method}
    found = {}
    for graphs in ("on", "off"):
        keys |= {"run__cuda_graphs": graphs, "run__seed": 1}
        engine, params = demo_engine(4, sampling__temperature=temperature, **keys)
        assert engine.is_captured == (graphs == "on")
        found[graphs] = told(engine.run(requests(), 4, params))
    assert found["on"] == found["off"]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_the_host_waits_for_the_previous_round_only(method: str) -> None:
    """torch's own check does not see waits for events; the profiler does."""
    rounds = 12
    engine, params = demo_engine(3, sampling__max_new_tokens=200, speculation__method=method)
    run = engine.start(requests()[:2], 3, params)
    while not run.rounds.in_flight:
        engine.step(run)
    with waiting_is_an_error():
        for _ in range(rounds):
            assert engine.step(run)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(rounds):
            assert engine.step(run)
    calls = Counter(event.name for event in profile.events())
    assert calls["cudaGraphLaunch"] == calls["cudaEventSynchronize"] == rounds
    assert calls["cudaStreamSynchronize"] == 0
    assert calls["cudaDeviceSynchronize"] <= 1  # the profiler's own, as it ends
    run.rounds.discard()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_long_mixed_batch(pair: tuple[Path, Path], temperature: float) -> None:
    """Compares with eager rounds: prompts of 1 to 60 tokens, refills, preemption, early ends."""
    source = random.Random(1)
    prompts = [
        [source.randrange(3, VOCAB) for _ in range(source.choice((1, 2, 9, 31, 60)))]
        for _ in range(64)
    ]
    asked = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=120, temperature=temperature, top_p=0.95, seed=11)
    settings: dict[str, Any] = {"batch_size": 8, "num_blocks": 150, "eos_ids": frozenset({7})}
    results = [engine.run(asked, 5, params) for engine in engines(pair, CUDA, **settings)]
    assert told(results[0]) == told(results[1])
    assert {s.finish_reason for s in results[1].seqs} == {"eos", "length"}
    assert results[1].metrics.num_preemptions > 0
    assert results[1].metrics.num_rounds > 200


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
def test_captured_rounds_of_experts(family: str, tmp_path: Path) -> None:
    """In bf16, in which rounds of experts are captured. One slot, since sums differ between passes
    of different shapes, and rounds that are read at once leave fewer slots a round earlier."""
    target = save_tiny(tmp_path / "target", family)
    both = target, save_noised(tmp_path / "draft", target)
    _, captured, eager = engines(both, CUDA, dtype="bfloat16")
    assert captured.is_captured and captured.target.fused is not None
    source = random.Random(2)
    prompts = [[source.randrange(3, VOCAB) for _ in range(n)] for n in (5, 1, 40, 17)]
    asked = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=30)
    found = [told(engine.run(asked, 4, params)) for engine in (captured, eager)]
    assert found[0] == found[1]


@pytest.mark.parametrize("width", [1, 7, 30, 90])
@pytest.mark.parametrize(
    "family, changes",
    [
        *(("qwen3_moe", MANY_EXPERTS), ("mixtral", {}), ("gpt_oss", {})),
        ("glm4_moe", {"n_routed_experts": 24, "n_group": 4, "topk_group": 2}),
    ],
)
def test_experts_err_in_bf16_as_transformers_does(
    family: str, changes: dict[str, Any], width: int, tmp_path: Path
) -> None:
    """A row's error in logits against fp32 arithmetic on the same weights. Of rows the better ones
    count, because in others rounding chooses another expert. width: tokens a pass."""
    folder = save_tiny(tmp_path, family, hidden_size=256, initializer_range=0.08, **changes)
    model = paged_model(folder, 40, 16, CUDA, dtype="bfloat16", fused=True)
    theirs = reference(folder, torch.bfloat16, CUDA)
    exact = reference(folder, torch.bfloat16, CUDA).float()
    tokens = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    seq = Sequence(0, tokens, len(tokens), 400)
    BlockAllocator(40, 16).extend(seq.block_table, len(tokens))
    found = []
    for start in range(0, len(tokens), width):
        span = Span(seq, start, min(start + width, len(tokens)))
        found.append(model.forward([span], [span.length])[0])
    ids = torch.tensor([tokens], device=CUDA)
    with torch.inference_mode():
        want, other = (m(ids).logits[0].float() for m in (exact, theirs))
    ours, own = ((x.float() - want).norm(dim=1).quantile(0.25) for x in (torch.cat(found), other))
    assert ours <= 1.5 * own, (ours, own)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_chunks_err_in_bf16_as_other_passes_do(
    head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's error in logits against fp32 arithmetic on the same weights, of a long text between
    two short ones."""
    sizes = {"head_dim": head_dim, "hidden_size": 256, "max_position_embeddings": 4096}
    folder = save_tiny(tmp_path, "llama", initializer_range=0.08, **sizes)
    exact = reference(folder, torch.bfloat16, CUDA).float()
    model = paged_model(folder, 220, 16, CUDA, dtype="bfloat16", fused=True)
    allocator, source = BlockAllocator(220, 16), random.Random(4)
    texts = [[source.randrange(3, VOCAB) for _ in range(n)] for n in (30, 3000, 40)]
    seqs = [Sequence(i, text, len(text), 4000) for i, text in enumerate(texts)]
    for seq in seqs:
        allocator.extend(seq.block_table, len(seq.tokens))
    with torch.inference_mode():
        want = [exact(torch.tensor([text], device=CUDA)).logits[0].float() for text in texts]
    passes = [[(1, 0, 1300)], [(0, 0, 30), (1, 1300, 3000), (2, 0, 40)]]
    errors, calls = [], list[int]()
    attend = decode_triton.attend_chunks

    def counted(*arguments: Any) -> torch.Tensor:
        calls[-1] += 1
        return attend(*arguments)

    monkeypatch.setattr(decode_triton, "attend_chunks", counted)
    for bounds in ({torch.cuda.get_device_capability(): chunks.Bound(1024, 0)}, {}):
        monkeypatch.setattr(chunks, "BOUNDS", bounds)
        calls.append(0)
        found = []
        for parts in passes:
            spans = [Span(seqs[b], start, stop) for b, start, stop in parts]
            logits = model.forward(spans, [span.length for span in spans])[0].float()
            rows = torch.cat([want[b][start:stop] for b, start, stop in parts])
            found.append((logits - rows).norm(dim=1) / rows.norm(dim=1))
        errors.append(torch.cat(found))
    # Tiles of as many keys can give both ways the same bits.
    assert calls == [len(passes) * len(model.cache.layers), 0]
    assert errors[0].mean() <= 1.1 * errors[1].mean() and errors[0].max() <= 2 * errors[1].max()
