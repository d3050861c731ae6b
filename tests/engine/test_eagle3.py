"""EAGLE-3 heads over a paged cache against a plain reference: rows, logits and rounds."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, LiveRows, Rectangle, Span
from specdec_cli.core.candidates import TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.eagle3 import Eagle3
from specdec_cli.models.eagle3.config import read_head_config
from specdec_cli.models.eagle3.head import Eagle3Head
from specdec_cli.models.eagle3.paged import PagedHead
from specdec_cli.models.eagle3.weights import read_weights
from specdec_cli.models.padded import PaddedBatches
from tests.eagle3 import Head, Reference, save_head
from tests.support import CPU

BLOCK = 4
TOLERANCE = 5e-5
MAX_LEN = 200
# Finite, since padding reads what lies in the cache, and 0 * NaN is NaN.
POISON = 50.0

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab": 31},
    "one-kv-head": {"heads": 5, "kv_heads": 1, "head_dim": 12, "hidden": 40, "target_hidden": 40},
    "all-kv-heads": {"kv_heads": 6},
    "qwen3": {"kind": "qwen3", "base": 1e6},
    "qwen3-reduced": {"kind": "qwen3", "draft_vocab": 50, "outputs": (0, 1, 2, 3, 4)},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "three-layers": {"layers": 3},
    "three-wide-layers": {"layers": 3, "is_wide": True, "kind": "qwen3"},
    "normed-residual": {"norm_before_residual": True, "draft_vocab": 40},
    "norm-before-fc": {"norm_before_fc": True},
    "fc-norm": {"fc_norm": True, "feeds_norm": True},
    "feeds-norm": {"feeds_norm": True, "layers": 2},
    "narrower": {"hidden": 40, "target_hidden": 56, "heads": 4, "inner": 33},
    "one-feature": {"outputs": (1,)},
    "window": {"window": 5},
    "gelu": {"act": "gelu_pytorch_tanh"},
    # Wide enough for every form that a weight has on a CPU.
    "wide": {
        "hidden": 320,
        "target_hidden": 320,
        "inner": 700,
        "heads": 5,
        "head_dim": 64,
        "kv_heads": 1,
    },
}


class FakeTarget:
    """Features of tokens, a function of all tokens up to each: what a target gives."""

    def __init__(self, head: Head) -> None:
        made = torch.Generator().manual_seed(11)
        self.embedding = torch.randn(head.vocab, 24, generator=made)
        self.out = torch.randn(24, head.num_features, generator=made) / 3

    def features(self, tokens: list[int]) -> torch.Tensor:
        """[T, F]."""
        state, rows = torch.zeros(24), []
        for token in tokens:
            state = 0.8 * state + self.embedding[token]
            rows.append(state)
        return torch.stack(rows).tanh() @ self.out if rows else torch.zeros(0, self.out.shape[1])


def paged_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **changes: Any
) -> PagedHead:
    """A saved head over a poisoned cache; changes: to its settings as they were read."""
    config = replace(read_head_config("head", folder), **changes)
    weights = read_weights(config, folder, dtype, device)
    cache = KVCache(config.cache_layers, 80, BLOCK, dtype, device)
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(POISON)
    head = PagedHead(Eagle3Head(config, weights, MAX_LEN), cache)
    head.carry.fill_(POISON)
    return head


class Rounds:
    """Rounds of some sequences by hand: the proposer is real, target and decisions are scripted."""

    def __init__(self, head: Head, paged: PagedHead, lengths: list[int]) -> None:
        self.head, self.paged, self.target = head, paged, FakeTarget(head)
        self.proposer = Eagle3(paged, (1, 2, 3), MAX_LEN)
        self.allocator = BlockAllocator(paged.cache.num_blocks, BLOCK)
        made = torch.Generator().manual_seed(3)
        self.seqs = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(0, head.vocab, (length,), generator=made).tolist()
            self.seqs.append(Sequence(index, tokens, length, 150))
        # Interleaved growth shuffles the block tables.
        for size in range(1, 70, 3):
            for seq in self.seqs:
                self.allocator.extend(seq.block_table, size)
        self.state = BatchState.empty(len(lengths) + 1, 40, paged.device)

    def prefill(self, chunk: int) -> None:
        """All tokens but the last, in chunks of different sizes."""
        starts = [0] * len(self.seqs)
        while any(s < len(q.tokens) - 1 for s, q in zip(starts, self.seqs, strict=True)):
            spans = []
            for i, seq in enumerate(self.seqs):
                stop = min(starts[i] + chunk + i, len(seq.tokens) - 1)
                if stop > starts[i]:
                    spans.append(Span(seq, starts[i], stop))
                starts[i] = stop
            features = [self.target.features(s.seq.tokens)[s.start : s.stop] for s in spans]
            self.proposer.prefill(spans, torch.cat(features).to(self.paged.device))

    def load(self) -> None:
        self.state.load(self.seqs, 0)

    def propose(self, k: int, caps: list[int] | None = None) -> Drafting:
        caps = [*(caps or [k] * len(self.seqs)), 0]
        drafting = Drafting(
            k, SamplingParams(), torch.tensor(caps).to(self.paged.device), self.head.vocab
        )
        found = self.proposer.propose(self.state, drafting)
        self.tokens = found.token_ids[:-1].tolist()
        self.lens = found.lens.tolist()
        return drafting

    def expected(self, reference: Reference, k: int) -> list[list[int]]:
        found = []
        for seq in self.seqs:
            features = self.target.features(seq.tokens[:-1])
            found.append(reference.chain(features, seq.tokens, k)[0])
        return found

    def decide(self, accepted: list[int]) -> None:
        """Accept so many proposals of each sequence, and add a token of the target's own."""
        k = len(self.tokens[0])
        features, decided = [], []
        for seq, row, count in zip(self.seqs, self.tokens, accepted, strict=True):
            scored = self.target.features([*seq.tokens, *row])[len(seq.tokens) - 1 :]
            features.append(scored)
            own = (7 * len(seq.tokens) + count) % self.head.vocab
            decided.append([*row[:count], own, *[5] * (k - count)])
        features.append(torch.full_like(features[0], POISON))
        decided.append([0] * (k + 1))
        device = self.paged.device
        counts = torch.tensor([*accepted, 0]).to(device)
        verdict = Verdict(torch.tensor(decided).to(device), counts)
        target = TargetOutput(torch.empty(0), torch.stack(features).to(device))
        self.proposer.commit(self.state, verdict, target)
        record = torch.zeros(len(decided), k + 3, dtype=torch.int64, device=device)
        state = self.state
        ops.advance(
            *(verdict.token_ids, counts, counts, state.tail, state.length, state.limit),
            *(state.active, torch.zeros(0, dtype=torch.int64, device=device), record),
        )
        for seq, row, count in zip(self.seqs, decided[:-1], accepted, strict=True):
            seq.tokens += row[: count + 1]

    def play(self, reference: Reference, shuffles: bool = False) -> Iterator[tuple[Any, Any]]:
        """What was proposed and what should have been, round by round."""
        self.prefill(5)
        self.load()
        script = [(4, [2, 0, 4]), (3, [0, 3, 1]), (1, [1, 0, 1]), (5, [5, 2, 0]), (2, [0, 0, 0])]
        for k, accepted in [*script, *script[:3]]:
            if shuffles:
                self.seqs = [*self.seqs[1:], self.seqs[0]]
                self.load()
            wanted = self.expected(reference, k)
            self.propose(k)
            yield self.tokens, wanted
            self.decide(accepted)


def agreement(rounds: Rounds, reference: Reference, shuffles: bool = False) -> float:
    """The share of proposals that are those of the reference."""
    same = [
        a == b
        for found, wanted in rounds.play(reference, shuffles)
        for ours, theirs in zip(found, wanted, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return sum(same) / len(same)


LENGTHS = [9, 2, 14]


@pytest.fixture(params=["live", "padded"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Passes over live rows alone, as a CPU runs them, and over all, as graphs do."""
    if request.param == "padded":
        monkeypatch.setattr(PagedHead, "_batch", padded)
    return str(request.param)


def padded(
    self: PagedHead, what: Rectangle, state: BatchState
) -> tuple[ForwardBatch, LiveRows | None]:
    return PaddedBatches().batch(what, state, BLOCK, self.head.config.vocab_size), None


def dialect_of(head: Head) -> str:
    return "deepspec" if head.is_wide else "safeailab"


@pytest.mark.parametrize("case", HEADS)
def test_rows_match_the_reference(case: str, tmp_path: Path) -> None:
    """Hidden states and logits of prefill in one pass and in chunks, several sequences beside
    each other."""
    head = Head(**HEADS[case])
    paged = paged_head(save_head(tmp_path, head, dialect_of(head)))
    rounds, reference = Rounds(head, paged, [13, 2, 30]), Reference(head)
    for bounds in ([0, 7, 12], [0, 1], [0, 3, 9, 29]), ([0, 12], [0, 1], [0, 29]):
        for first, last in [(0, 1), (1, 2), (2, 3)]:
            spans = [
                Span(seq, stops[first], stops[last])
                for seq, stops in zip(rounds.seqs, bounds, strict=True)
                if last < len(stops)
            ]
            if not spans:
                continue
            features = [rounds.target.features(s.seq.tokens)[s.start : s.stop] for s in spans]
            hidden = paged.forward(spans, torch.cat(features))
            logits = paged.head.logits(paged.head.normed(hidden))
            at = 0
            for span in spans:
                tokens = span.seq.tokens
                given = reference.fuse(rounds.target.features(tokens[: span.stop]))
                want = reference.rows(given, torch.tensor(tokens[1 : span.stop + 1]))[span.start :]
                rows = slice(at, at + span.length)
                scale = float(want.abs().max())
                assert float((hidden[rows] - want).abs().max()) < TOLERANCE * scale
                assert float((logits[rows] - reference.logits(want)).abs().max()) < 4 * TOLERANCE
                at += span.length


@pytest.mark.parametrize("case", HEADS)
def test_rounds_match_the_reference(case: str, how: str, tmp_path: Path) -> None:
    """Greedy chains after prefill, acceptance of none, some and all, and rounds of other k."""
    head = Head(**HEADS[case])
    paged = paged_head(save_head(tmp_path, head, dialect_of(head)))
    assert agreement(Rounds(head, paged, LENGTHS), Reference(head)) == 1.0


def test_sequences_may_change_slots(how: str, tmp_path: Path) -> None:
    head = Head(draft_vocab=40)
    paged = paged_head(save_head(tmp_path, head, "safeailab"))
    assert agreement(Rounds(head, paged, LENGTHS), Reference(head), shuffles=True) == 1.0
