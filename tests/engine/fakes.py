"""Fake models that know exactly what should be in each cache, and a checked way to drive a run.

They keep token ids where a model keeps keys and values, at the same slots. Reading them back
through the block table shows what a real model would have attended to: a stale, foreign or
missing token fails at once.
"""

import zlib
from collections.abc import Callable
from types import SimpleNamespace

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import TRASH_BLOCK, BlockAllocator
from specdec_cli.core.types import Proposal, RoundNoise, SamplingParams, Scores, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.run import Run
from specdec_cli.engine.target import TargetScorer
from tests.support import CPU, VOCAB

Rule = Callable[[list[int]], int]  # the token that follows a prefix
BLOCK = 4


def target_rule(prefix: list[int]) -> int:
    """A next token that depends on every token before it."""
    return 3 + zlib.crc32(bytes(prefix)) % (VOCAB - 3)


def wrong(prefix: list[int]) -> int:
    """Never the target's token."""
    return 3 + (target_rule(prefix) - 3 + 1) % (VOCAB - 3)


def sometimes(prefix: list[int]) -> int:
    """The target's token about two times in three."""
    return (wrong if zlib.crc32(bytes([7, *prefix])) % 3 == 0 else target_rule)(prefix)


def first(j: int, start: int, k: int) -> Rule:
    """Right for the first j proposals of each round of k, when every round accepts j.

    start: length of the prompt; rounds then begin at start, start + j + 1, ...
    """

    def rule(prefix: list[int]) -> int:
        place = (len(prefix) - start) % (j + 1)
        return target_rule(prefix) if j == k or place < j else wrong(prefix)

    return rule


def continuation(rule: Rule, prompt: list[int], count: int) -> list[int]:
    """What plain greedy decoding writes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(rule(tokens))
    return tokens[len(prompt) :]


class Cells:
    """A paged cache that holds token ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cells: dict[tuple[int, int], int] = {}

    def place(self, seq: Sequence, position: int) -> tuple[int, int]:
        block = seq.block_table[position // self.block_size]
        assert block != TRASH_BLOCK
        return block, position % self.block_size

    def write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start=start):
            self.cells[self.place(seq, position)] = token

    def read(self, seq: Sequence, stop: int) -> list[int]:
        return [self.cells[self.place(seq, position)] for position in range(stop)]

    def feed(self, span: Span, extra: list[int]) -> None:
        """Write a span; what lies before it must be the sequence's own tokens."""
        assert self.read(span.seq, span.start) == span.seq.tokens[: span.start]
        self.write(span.seq, span.start, span.seq.tokens[span.start : span.stop] + extra)


class FakeTarget(TargetScorer):
    """Greedy target whose next token is `rule` of what its cache holds."""

    def __init__(self, rule: Rule = target_rule, block_size: int = BLOCK) -> None:
        self.model = SimpleNamespace(device=CPU, vocab_size=VOCAB)  # type: ignore[assignment]
        self.rule = rule
        self.cache = Cells(block_size)
        self.batch_sizes: list[int] = []
        self.prefill_sizes: list[int] = []

    def prefill(self, spans: list[Span]) -> None:
        self.prefill_sizes.append(sum(s.length for s in spans))
        for span in spans:
            self.cache.feed(span, [])

    def score(self, seqs: list[Sequence], proposal: Proposal, params: SamplingParams) -> Scores:
        self.batch_sizes.append(len(seqs))
        width = proposal.token_ids.shape[1] + 1
        best = torch.zeros(len(seqs), width, dtype=torch.int64)
        for b, (seq, k) in enumerate(zip(seqs, proposal.lens, strict=True)):
            n = len(seq.tokens)
            assert seq.target_kv == n - 1
            row = proposal.token_ids[b, :k].tolist()
            self.cache.feed(Span(seq, n - 1, n, k), row)
            for i in range(k + 1):
                best[b, i] = self.rule(self.cache.read(seq, n + i))
        return Scores(best=best)


class FakeDraft:
    """Proposes `rule` of what its own cache holds; `lens_seen` are the k_i it was asked for."""

    def __init__(
        self, rule: Rule = sometimes, max_len: int = 10_000, block_size: int = BLOCK
    ) -> None:
        self.rule = rule
        self.max_len = max_len
        self.cache = Cells(block_size)
        self.lens_seen: list[list[int]] = []
        self.caught_up: list[int] = []  # tokens fed in the first pass of each sequence-round

    def prefill(self, spans: list[Span]) -> None:
        for span in spans:
            self.cache.feed(span, [])

    def propose(
        self, seqs: list[Sequence], lens: list[int], noise: RoundNoise, params: SamplingParams
    ) -> Proposal:
        self.lens_seen.append(lens)
        token_ids = torch.zeros(len(seqs), max(lens), dtype=torch.int64)
        for b, (seq, k) in enumerate(zip(seqs, lens, strict=True)):
            if k == 0:
                continue
            n = len(seq.tokens)
            self.caught_up.append(n - seq.draft_kv)
            self.cache.feed(Span(seq, seq.draft_kv, n), [])
            for i in range(k):
                token = self.rule(self.cache.read(seq, n + i))
                token_ids[b, i] = token
                if i < k - 1:
                    self.cache.write(seq, n + i, [token])
        return Proposal(token_ids, lens, torch.zeros(len(seqs), 0, VOCAB))


def looping(prefix: list[int]) -> int:
    """A next token that repeats itself, with a surprise now and then."""
    surprise = zlib.crc32(bytes(prefix)) % 7 == 0
    return 3 + (5 * prefix[-1] + surprise * len(prefix)) % 11


def fake_engine(
    draft: Rule | None = sometimes,
    target: Rule = target_rule,
    *,
    num_blocks: int = 400,
    batch_size: int = 1,
    max_model_len: int = 300,
    prefill_chunk: int = 2048,
    draft_max_len: int = 10_000,
    eos_ids: frozenset[int] = frozenset(),
) -> Engine:
    return Engine(
        FakeTarget(target),
        None if draft is None else FakeDraft(draft, draft_max_len),
        BlockAllocator(num_blocks, BLOCK),
        batch_size=batch_size,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        eos_ids=eos_ids,
    )


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return ids


def run_checked(
    engine: Engine, run: Run, found: Callable[[list[int], int], int] = lambda tokens, asked: asked
) -> None:
    """Drive a run by hand; after each step, every number that follows for a round.

    found: of the tokens asked for, how many the proposer should have found.
    """
    while not run.scheduler.is_done:
        before = {s.index: (len(s.tokens), s.draft_kv, s.num_preemptions) for s in run.seqs}
        silent = {s.index: s.rounds_without_proposal for s in run.seqs}
        emissions = engine.step(run)
        for emission in emissions:
            seq = emission.seq
            n, draft_kv, preemptions = before[seq.index]
            if preemptions != seq.num_preemptions:
                draft_kv = 0
            limit = min(seq.num_prompt_tokens + run.params.max_new_tokens, engine.max_model_len)
            draft_limit = engine.draft.max_len if engine.draft is not None else 0
            k = found(seq.tokens[:n], max(0, min(run.scheduler.k, limit - n - 1, draft_limit - n)))
            accepted = emission.num_accepted
            assert seq.tokens[n:] == emission.token_ids
            assert 0 <= accepted <= k
            if seq.finish_reason != "eos":
                assert len(seq.tokens) == n + accepted + 1
                assert seq.target_kv == n + accepted
                assert seq.draft_kv == (n + min(accepted, k - 1) if k else draft_kv)
            if k:
                assert seq.proposed_per_round[-1] == k
                assert seq.accepted_per_round[-1] == accepted
            assert seq.rounds_without_proposal - silent[seq.index] == (k == 0)
            if seq.finish_reason is not None:
                assert not seq.block_table
            else:
                least, most = map(engine.allocator.blocks_for, (seq.target_kv, len(seq.tokens)))
                assert least <= len(seq.block_table) <= most, "rejected tokens keep no blocks"


def rounds_of(seq: Sequence) -> list[tuple[int, int]]:
    """Proposed and accepted of each round that proposed."""
    return list(zip(seq.proposed_per_round, seq.accepted_per_round, strict=True))
