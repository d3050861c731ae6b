"""Padded passes over prompts, the code that CUDA captures, against passes without padding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specdec_kernels import ops
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.packed import PackedInputs, Tokens
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.models import prompt_passes
from specdec_cli.models.prompt_passes import (
    WIDTHS,
    PromptGraphs,
    Results,
    width_busy_with,
    width_of,
)
from tests.eagle3 import Head, save_head
from tests.engine.test_eagle3 import FakeTarget, paged_head
from tests.engine.test_families import BLOCK, STATES, TOLERANCE
from tests.engine.test_fused import FUSED
from tests.support import CPU, VOCAB, make_engine, paged_model, save_tiny

# Norms of heads; windows and a softcap; sinks; experts; shared experts.
CASES = ("llama", "qwen3", "gemma3-capped", "gpt_oss", "qwen3_moe", "glm4_moe")
# Prompts of several lengths; then chunks with a cached prefix beside a new prompt, out of order.
PASSES = (
    [(0, 0, 18), (1, 0, 5), (2, 0, 20)],
    [(2, 20, 33), (3, 0, 1), (0, 18, 19)],
    [(3, 1, 17)],
)


def sequences() -> list[Sequence]:
    generator = torch.Generator().manual_seed(5)
    allocator = BlockAllocator(60, BLOCK)
    found = [
        Sequence(i, torch.randint(3, VOCAB, (n,), generator=generator).tolist(), n, 99)
        for i, n in enumerate((20, 7, 40, 18))
    ]
    for size in range(1, 41, 5):  # interleaved growth shuffles the block tables
        for seq in found:
            allocator.extend(seq.block_table, min(size, len(seq.tokens)))
    return found


def spans(seqs: list[Sequence], chunks: list[tuple[int, int, int]]) -> list[Span]:
    return [Span(seqs[i], start, stop) for i, start, stop in chunks]


def graphs(device: torch.device = CPU) -> PromptGraphs:
    """Passes over up to 64 tokens of 5 sequences; on a CPU they are not captured."""
    return PromptGraphs(60, 5, 12, device, is_captured=device.type == "cuda")


def assert_same_caches(got: KVCache, want: KVCache) -> None:
    """Check all blocks but the first. Slots that were never written hold NaN in both."""
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(
                mine[1:], other[1:], atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True
            )


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, device: torch.device, tmp_path: Path) -> None:
    family, changes = FUSED[case]
    folder = save_tiny(tmp_path, family, **changes)
    plain, padded = (
        paged_model(folder, 60, BLOCK, device, fused=True, hidden_layers=STATES) for _ in range(2)
    )
    # Padding is written to the trash block, and must not read what is there.
    padded.capture_prompts(graphs(device))
    assert padded._prompts is not None
    inputs, seqs = padded._prompts.inputs, sequences()
    for _ in range(3 if device.type == "cuda" else 1):  # as they are, then replayed
        for chunks in PASSES:
            fed = spans(seqs, chunks)
            want = plain.forward(fed, [1] * len(fed))
            got = padded.prefill(fed, with_hidden=True, num_logits=len(fed))
            assert want.hidden is not None and got.hidden is not None and got.logits is not None
            assert inputs.query_start[len(fed)] == len(want.hidden), "the pass was not padded"
            scale = want.hidden.abs().max().clamp(min=1.0)
            torch.testing.assert_close(
                got.hidden / scale, want.hidden / scale, atol=TOLERANCE, rtol=0
            )
            torch.testing.assert_close(got.logits, want.logits, atol=TOLERANCE, rtol=TOLERANCE)
            assert_same_caches(padded.cache, plain.cache)


@pytest.mark.parametrize("settings", [{}, {"norm_before_fc": True, "layers": 2, "window": 5}])
def test_rows_of_a_head(settings: dict[str, int], device: torch.device, tmp_path: Path) -> None:
    head = Head(**settings)  # type: ignore[arg-type]
    save_head(tmp_path, head, "speculators")
    plain, padded = (paged_head(tmp_path, device=device) for _ in range(2))
    padded.capture_prompts(graphs(device))
    target, seqs = FakeTarget(head), sequences()
    for _ in range(3 if device.type == "cuda" else 1):
        for chunks in PASSES:
            fed = spans(seqs, chunks)
            parts = [target.features(s.seq.tokens[: s.stop])[s.start :] for s in fed]
            features = torch.cat(parts).to(device)
            plain.prefill(fed, features)
            padded.prefill(fed, features)
            assert_same_caches(padded.cache, plain.cache)
            torch.testing.assert_close(padded.carry[1:], plain.carry[1:], atol=1e-5, rtol=1e-5)


def test_widths() -> None:
    assert [width_of(n) for n in (1, 16, 17, 129, 2048)] == [16, 16, 32, 256, 2048]
    assert width_of(2049) is None
    # An 8B's layer, one of a 1B's, one of a 70B's, and a tiny one.
    assert [width_busy_with(n) for n in (218e6, 61e6, 856e6, 4e4)] == [1024, 2048, 256, 2048]
    assert all(width % 16 == 0 for width in WIDTHS), "kernels are compiled again for others"
    passes = graphs().of(lambda *_: Results(), 4)
    one = Span(sequences()[0], 0, 1)
    assert passes.fits([one] * 5) and not passes.fits([one] * 6)


@pytest.mark.parametrize(("k", "num_sequences"), [(3, 3), (3, 2), (0, 3)])
def test_engines_write_the_same(
    k: int, num_sequences: int, device: torch.device, tmp_path: Path
) -> None:
    """Prompts in chunks, which join while others decode; passes over more sequences than there is
    room for are left as they are. In plain decoding they decide first tokens."""
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "qwen3", seed=1)
    prompts = [seq.tokens for seq in sequences()] * 2
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=9, temperature=0.8, seed=4)
    found = []
    for is_padded in (False, True):
        is_cuda = device.type == "cuda"
        engine = make_engine(
            *(target, draft), batch_size=3, prefill_chunk=24, device=device, runs_ahead=is_cuda
        )
        if is_padded:
            made = PromptGraphs(24, num_sequences, 64, device, is_cuda)
            engine.target.capture_prompts(made)
            engine.proposer.model.capture_prompts(made)  # type: ignore[union-attr]
        result = engine.run(requests, k, params)
        assert (result.metrics.num_tokens_from_prefill > 0) == (k == 0)
        if is_padded:
            assert engine.target._prompts.inputs.positions.any(), "no pass was padded"
        found.append([(s.tokens, s.accepted_per_round) for s in result.seqs])
    assert found[0] == found[1]


class Replays(PromptGraphs):
    """Stands for captures on a CPU: a replay runs what was captured. counted: operations besides,
    that is, those that the host queues for a pass."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, CPU)
        self.counted: list[str] = []
        self.num_replays = 0

    def capture(self, run: Callable[[], object]) -> Any:
        def replay() -> None:
            self.num_replays += 1
            with _disable_current_modes(), torch.inference_mode():
                run()

        return SimpleNamespace(replay=replay, reset=lambda: None)

    def count(self) -> TorchDispatchMode:
        graphs = self

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                graphs.counted.append(str(func))
                return func(*args, **(kwargs or {}))

        return Counting()


def replaying_engine(tmp_path: Path, **settings: Any) -> tuple[Engine, Replays]:
    engine = make_engine(save_tiny(tmp_path, "llama"), None, batch_size=5, **settings)
    graphs = Replays(64, 5, 64)
    engine.target.capture_prompts(graphs)
    return engine, graphs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [1, 4])
def test_the_host_queues_few_operations(count: int, temperature: float, tmp_path: Path) -> None:
    """It queues the graph, which fetches its inputs and sends the tokens back, and a view of them
    if a pass has more rows than prompts."""
    engine, graphs = replaying_engine(tmp_path)
    requests = [Request(i, tuple(range(3, 12 + i))) for i in range(count)]
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    engine.run(requests, 0, params)
    assert graphs.num_replays == 0
    run = engine.start(requests, 0, params)
    with graphs.count():
        emissions = engine.step(run)
    assert [len(emission.token_ids) for emission in emissions] == [1] * count
    assert graphs.num_replays == 1
    assert len(graphs.counted) <= (count > 1), graphs.counted


def test_a_pass_is_written_while_the_one_before_waits() -> None:
    inputs, seqs = PackedInputs(16, 2, 12, BLOCK, CPU), sequences()

    def fill(place: int) -> None:
        inputs.fill([Span(seqs[place], 0, 3)], 16)

    def end(place: int) -> None:
        inputs.fetch()
        assert inputs.token_ids[:3].tolist() == seqs[place].tokens[:3]
        inputs.tell(torch.tensor([7 + place]))

    def launch() -> Tokens:
        told = inputs.told
        inputs.passed()
        return told

    fill(0)
    first = launch()
    fill(1)  # while the first has not begun
    second = launch()
    end(0)
    assert first[0] == 7
    fill(2)
    third = launch()
    end(1)
    assert [first[0], second[0]] == [7, 8]
    end(2)
    assert third[0] == 9 and third is first


def test_passes_that_only_compile_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not launched then, so that the device counts no pass either."""
    engine, graphs = replaying_engine(tmp_path)
    requests = [Request(i, tuple(range(3, 12 + i))) for i in range(3)]
    params = SamplingParams(max_new_tokens=4)
    want = [seq.tokens for seq in engine.run(requests, 0, params).seqs]
    with monkeypatch.context() as ahead:
        ahead.setattr(prompt_passes, "is_ahead", lambda: True)
        ahead.setattr(graphs, "capture", lambda run: None)
        ahead.setattr(ops, "tell_tokens", lambda *_: None)
        engine.run([Request(9, (5, 6, 7))], 0, replace(params, temperature=0.5))
    assert [seq.tokens for seq in engine.run(requests, 0, params).seqs] == want


def test_graphs_draw_as_the_run_does(tmp_path: Path) -> None:
    """Filters of logits are part of a graph; the seed and the prompts' indices are its inputs."""
    engine, graphs = replaying_engine(tmp_path / "replayed", prefill_chunk=24)
    plain = make_engine(save_tiny(tmp_path / "plain", "llama"), None, batch_size=5)
    requests = [Request(2**33 + i, tuple(seq.tokens)) for i, seq in enumerate(sequences())]
    first = SamplingParams(max_new_tokens=3, temperature=0.9, top_k=40)
    for params in (
        *(first, replace(first, seed=2**35 + 1), replace(first, seed=7, max_new_tokens=2)),
        *(replace(first, top_k=2), replace(first, temperature=0.0), first),
    ):
        found, want = (e.run(requests, 0, params) for e in (engine, plain))
        assert [seq.tokens for seq in found.seqs] == [seq.tokens for seq in want.seqs]
        assert found.metrics.num_tokens_from_prefill == len(requests)
    assert graphs.num_replays >= 6
