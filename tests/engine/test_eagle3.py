"""EAGLE-3 heads over a paged cache against a plain reference: rows, logits and rounds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, LiveRows, Rectangle, Span, padded_batch
from specdec_cli.core.candidates import TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.sampling import to_probs
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.checkpoint import read_weights
from specdec_cli.models.heads.eagle3.config import read_head_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head
from specdec_cli.models.heads.paged import PagedHead
from tests.eagle3 import DIALECTS, Head, Reference, changed, save_head
from tests.fixtures import NEEDS_CUDA
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
    "qwen3-window": {"window": 5, "kind": "qwen3"},
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
    config = changed(read_head_config("head", folder), **changes)
    weights = read_weights(config, folder, dtype, device)
    cache = KVCache(config.cache_layers(), 80, BLOCK, dtype, device)
    for tensor in cache.pools:
        tensor.fill_(POISON)
    head = PagedHead(Eagle3Head(config, weights, MAX_LEN), cache)
    head.carry.fill_(POISON)
    return head


class Rounds:
    """Rounds of some sequences by hand: the proposer is real, target and decisions are scripted."""

    def __init__(self, head: Head, paged: PagedHead, lengths: list[int]) -> None:
        self.head, self.paged, self.target = head, paged, FakeTarget(head)
        self.proposer = StepHead(paged, (1, 2, 3), MAX_LEN)
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
        self.state = BatchState(len(lengths) + 1, 40, paged.device)

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
        """The proposals of each round, and the expected ones."""
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
    return padded_batch(what, state, BLOCK, self.head.config.vocab_size), None


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


@pytest.mark.each_value
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


@pytest.mark.each_value
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_head_proposes_alike_in_every_dialect(kind: str, dialect: str, tmp_path: Path) -> None:
    head = Head(kind=kind, base=5e5, outputs=(0, 1, 2, 3, 4), attention_bias=True)
    paged = paged_head(save_head(tmp_path, head, dialect))
    assert agreement(Rounds(head, paged, LENGTHS), Reference(head)) == 1.0


def test_lengths_that_differ_and_idle_slots(how: str, tmp_path: Path) -> None:
    """A sequence proposes as many tokens as it may, and a round may propose nothing."""
    head = Head(draft_vocab=40)
    rounds = Rounds(head, paged_head(save_head(tmp_path, head, "safeailab")), LENGTHS)
    reference = Reference(head)
    rounds.prefill(4)
    rounds.load()
    for caps, accepted in (([4, 0, 2], [1, 0, 2]), ([0, 3, 1], [0, 3, 0]), ([2, 4, 4], [2, 1, 4])):
        wanted = rounds.expected(reference, 4)
        rounds.propose(4, caps)
        assert rounds.lens == [*caps, 0]
        for ours, theirs, cap in zip(rounds.tokens, wanted, caps, strict=True):
            assert ours[:cap] == theirs[:cap]
        rounds.decide(accepted)
    # A round without proposals, as a length policy may choose.
    rounds.tokens = [[] for _ in LENGTHS]
    rounds.decide([0, 0, 0])
    wanted = rounds.expected(reference, 3)
    rounds.propose(3)
    assert rounds.tokens == wanted


def test_a_sequence_of_one_token(how: str, tmp_path: Path) -> None:
    """It has no hidden states yet: its first proposals are the same whatever lay in its block."""
    head = Head()
    rounds = Rounds(head, paged_head(save_head(tmp_path, head, "safeailab")), [1, 7])
    rounds.prefill(3)
    rounds.load()
    found = []
    for _ in range(2):
        rounds.propose(2)
        found.append(rounds.tokens[0])
        rounds.paged.carry[rounds.seqs[0].block_table[0]] = 3.0
    assert found[0] == found[1]
    rounds.decide([1, 0])
    wanted = rounds.expected(Reference(head), 3)
    rounds.propose(3)
    assert rounds.tokens == wanted


def test_proposals_are_drawn_from_the_heads_own_distribution(how: str, tmp_path: Path) -> None:
    """Its distribution is over the target's ids, those that it cannot propose have probability 0,
    and it is the reference's."""
    head = Head(draft_vocab=30)
    rounds = Rounds(head, paged_head(save_head(tmp_path, head, "safeailab")), LENGTHS)
    reference, params = Reference(head), SamplingParams(temperature=0.8)
    rounds.prefill(6)
    rounds.load()
    noise = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    drafting = Drafting(3, params, torch.tensor([3, 3, 3, 0]), head.vocab, noise)
    found = rounds.proposer.propose(rounds.state, drafting)
    assert found.q is not None and found.q.logits.shape == (4, 3, head.vocab)
    probs = to_probs(found.q.logits, params)
    foreign = sorted(set(range(head.vocab)) - set(head.ids.tolist()))
    for row, seq in enumerate(rounds.seqs):
        assert float(probs[row][:, foreign].abs().max()) == 0.0
        given = reference.fuse(rounds.target.features(seq.tokens[:-1]))
        following = torch.tensor(seq.tokens[1:])
        for step in range(3):
            out = reference.rows(given, following)[-1:]
            want = (reference.logits(out)[0] / 0.8).softmax(0)
            torch.testing.assert_close(probs[row, step][head.ids], want, rtol=1e-3, atol=1e-5)
            given = torch.cat((given, out))
            following = torch.cat((following, found.token_ids[row, step : step + 1]))


@pytest.mark.each_value
@pytest.mark.parametrize("case", ["plain", "qwen3-reduced", "feeds-norm", "wide"])
def test_half_precision_is_close(case: str, how: str, tmp_path: Path) -> None:
    """bf16 rounds, so the logits of the first proposal are compared with the reference's in fp32,
    against the error that the reference itself makes in bf16."""
    head = Head(**HEADS[case])
    paged = paged_head(save_head(tmp_path, head, "safeailab"), torch.bfloat16)
    rounds = Rounds(head, paged, LENGTHS)
    rounds.prefill(5)
    rounds.load()
    logits = paged.head.logits(paged.carried(rounds.state)).float()
    errors = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for row, seq in zip(logits, rounds.seqs, strict=False):
        features = rounds.target.features(seq.tokens[:-1])
        exact, rounded = (Reference(head, t).chain(features, seq.tokens, 1)[1] for t in errors)
        errors[torch.float32] = max(errors[torch.float32], float((row - exact[0]).abs().max()))
        own = float((rounded[0].float() - exact[0]).abs().max())
        errors[torch.bfloat16] = max(errors[torch.bfloat16], own)
    assert errors[torch.float32] < 2 * errors[torch.bfloat16] < 6.0


class Shifted(FakeTarget):
    """Features of the token before, as a head that is fed without the shift sees them."""

    def features(self, tokens: list[int]) -> torch.Tensor:
        found = super().features(tokens)
        return torch.cat((found[:1], found[:-1]))


class OtherLayer(FakeTarget):
    """Features of which the middle layer's are those of its neighbour."""

    def features(self, tokens: list[int]) -> torch.Tensor:
        low, middle, high = super().features(tokens).chunk(3, dim=1)
        return torch.cat((low, 0.5 * middle + 0.5 * high, high), dim=1)


def stale(self: PagedHead, *args: Any, **more: Any) -> None:
    """A replacement of `carry_on` that keeps nothing from a scoring pass."""


def test_planted_faults_change_the_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong wiring never changes the text, so it has to show here."""
    head = Head(draft_vocab=60, base=20.0)
    folder = save_head(tmp_path, head, "speculators")
    plain = Reference(head)
    assert agreement(Rounds(head, paged_head(folder), LENGTHS), plain) == 1.0
    shares = {
        "post-norm fed back": _share(head, paged_head(folder, feeds_norm=True)),
        "rope base": _share(head, paged_head(folder, rope=_DEFAULT_ROPE)),
        "normed residual": _share(head, paged_head(folder, norm_before_residual=True)),
        "shift": _share(head, paged_head(folder), target=Shifted),
        "layer": _share(head, paged_head(folder), target=OtherLayer),
    }
    forgetful = paged_head(folder)
    forgetful.head.ids = None
    forgetful.head.spread = lambda x: torch.nn.functional.pad(x, (0, 37), value=-9e9)  # type: ignore[method-assign]
    shares["d2t"] = _share(head, forgetful)
    with monkeypatch.context() as planted:
        # Rows of proposals stay as guessed, but for the last one, which is carried.
        planted.setattr(StepHead, "commit", commit_last_row_alone)
        shares["stale rows"] = _share(head, paged_head(folder))
    with monkeypatch.context() as planted:
        planted.setattr(PagedHead, "carry_on", stale)
        shares["stale carry"] = _share(head, paged_head(folder))
    assert max(shares.values()) < 0.9, shares


_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _share(head: Head, paged: PagedHead, target: type[FakeTarget] = FakeTarget) -> float:
    rounds, reference = Rounds(head, paged, LENGTHS), Reference(head)
    rounds.target = target(head)
    honest = FakeTarget(head)

    def expected(reference: Reference, k: int) -> list[list[int]]:
        return [
            reference.chain(honest.features(s.tokens[:-1]), s.tokens, k)[0] for s in rounds.seqs
        ]

    rounds.expected = expected  # type: ignore[method-assign]
    return agreement(rounds, reference)


def commit_last_row_alone(
    self: StepHead, state: BatchState, verdict: Verdict, target: TargetOutput
) -> None:
    """A commit that does not write over the rows of accepted guesses."""
    assert self.head is not None and target.features is not None
    accepted, count = verdict.num_accepted, len(verdict.token_ids)
    hidden = torch.zeros(*verdict.token_ids.shape, self.head.head.config.hidden_size)
    for place in range(verdict.token_ids.shape[1]):
        # Only slots whose last row this is are live.
        lens = torch.where(accepted == place, place, -1)
        row = Rectangle(verdict.token_ids[:, place, None], lens, place - 1, 1, self.max_len, False)
        given = target.features[:, place, None]
        x = self.head.forward_slots(row, state, given, fused=False)
        hidden[:, place] = x.hidden.view(count, -1)
    self.head.carry_on(state, hidden, accepted)


def test_weights_are_counted_once(tmp_path: Path) -> None:
    head = Head(hidden=320, target_hidden=320, inner=700, heads=5, head_dim=64, kv_heads=1)
    paged = paged_head(save_head(tmp_path, head, "safeailab"))
    tables = 2 * MAX_LEN * head.head_dim
    numbers = sum(t.numel() for t in head.tensors.values()) + tables
    held = sum(paged.storages.values())
    assert 4 * numbers <= held < 4 * 2 * numbers  # a CPU may keep a weight in two forms


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("case", ["plain", "reduced", "qwen3-reduced", "three-layers", "biases"])
def test_a_device_proposes_alike_eagerly_and_captured(case: str, tmp_path: Path) -> None:
    """Both passes of a round can be captured: nothing in them waits for the host."""
    head = Head(**HEADS[case])
    folder, device = save_head(tmp_path, head, "safeailab"), torch.device("cuda", 0)
    assert agreement(Rounds(head, paged_head(folder, device=device), LENGTHS), Reference(head)) == 1
    rounds = Rounds(head, paged_head(folder, device=device), LENGTHS)
    rounds.prefill(5)
    rounds.load()
    rounds.propose(4)
    eager = rounds.tokens
    caps = torch.tensor([4, 4, 4, 0], device=device)
    features = torch.randn(4, 5, head.num_features, device=device)
    decided = torch.randint(0, head.vocab, (4, 5), device=device)
    verdict = Verdict(decided, torch.tensor([4, 0, 2, 0], device=device))
    target = TargetOutput(torch.empty(0), features)

    def both() -> Any:
        found = rounds.proposer.propose(
            rounds.state, Drafting(4, SamplingParams(), caps, head.vocab)
        )
        before = rounds.paged.carry.clone()
        rounds.proposer.commit(rounds.state, verdict, target)
        after = rounds.paged.carry.clone()
        rounds.paged.carry.copy_(before)
        return found.token_ids, after

    tokens, carried = both()
    assert tokens[:-1].tolist() == eager
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = both()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(static[0][:-1], tokens[:-1])
    torch.testing.assert_close(static[1][1:], carried[1:])
