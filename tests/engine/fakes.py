"""Fake models that check the content of their caches, and a driver that checks each step of a run.

The fakes store token ids in place of keys and values, in the same slots. Reading them back through
the block table gives the tokens that a real model would attend to, so a stale, foreign or missing
token fails at once.
"""

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Values
from typing import Any, cast

import torch

from specdec_cli.core.batch import Rectangle, Span
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.kv_cache import TRASH_BLOCK, BlockAllocator
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.loop import Engine, Run
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.models.paged import PassOutput
from specdec_cli.models.prompt_passes import Results
from tests.support import CPU, VOCAB

Rule = Callable[[list[int]], int]  # the token that follows a prefix
BLOCK = 4


def target_rule(prefix: list[int]) -> int:
    """A next token that depends on every token before it."""
    return 3 + zlib.crc32(bytes(prefix)) % (VOCAB - 3)


def wrong(prefix: list[int]) -> int:
    """A token that is never the target's."""
    return 3 + (target_rule(prefix) - 3 + 1) % (VOCAB - 3)


def sometimes(prefix: list[int]) -> int:
    """A token that is the target's about two times in three."""
    return (wrong if zlib.crc32(bytes([7, *prefix])) % 3 == 0 else target_rule)(prefix)


def first(j: int, start: int, k: int) -> Rule:
    """A rule that is right for the first j proposals of each round of k, if every round accepts j.

    start: length of the prompt; rounds begin at start, start + j + 1, ...
    """

    def rule(prefix: list[int]) -> int:
        place = (len(prefix) - start) % (j + 1)
        return target_rule(prefix) if j == k or place < j else wrong(prefix)

    return rule


def continuation(rule: Rule, prompt: list[int], count: int) -> list[int]:
    """The output of plain greedy decoding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(rule(tokens))
    return tokens[len(prompt) :]


class Cells:
    """A paged cache that holds token ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cells: dict[tuple[int, int], int] = {}

    def place(self, table: Values[int], position: int) -> tuple[int, int]:
        block = int(table[position // self.block_size])
        assert block != TRASH_BLOCK
        return block, position % self.block_size

    def write(self, table: Values[int], start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start=start):
            self.cells[self.place(table, position)] = token

    def read(self, table: Values[int], stop: int) -> list[int]:
        return [self.cells[self.place(table, position)] for position in range(stop)]

    def clear(self) -> None:
        self.cells.clear()


class FakeModel:
    """Replaces `PagedModel`: its next token is `rule` of the tokens in its cache.

    batch_sizes: active slots of each pass of a round. prefill_sizes: tokens of each other pass.
    fed: tokens of each slot that the latest pass of a round fed.
    """

    device = CPU
    vocab_size = VOCAB
    mixtures = None
    num_passes = 0

    def __init__(self, rule: Rule = target_rule, block_size: int = BLOCK) -> None:
        self.rule = rule
        self.cache = Cells(block_size)
        self.batch_sizes: list[int] = []
        self.prefill_sizes: list[int] = []
        self.fed: list[int] = []

    def prefill(
        self,
        spans: list[Span],
        *,
        with_hidden: bool = False,
        num_logits: int = 0,
        draws: SamplingParams | None = None,
    ) -> Results:
        """Feed spans; the cache must hold the sequence's tokens before each span."""
        self.prefill_sizes.append(sum(s.length for s in spans))
        for span in spans:
            table = span.seq.block_table
            assert self.cache.read(table, span.start) == span.seq.tokens[: span.start]
            self.cache.write(table, span.start, span.seq.tokens[span.start : span.stop])
        logits = torch.zeros(num_logits, VOCAB)
        for row, span in zip(logits, spans, strict=False):
            row[self.rule(self.cache.read(span.seq.block_table, span.stop))] = 1.0
        return Results(logits)

    def forward_slots(
        self, what: Rectangle, state: BatchState, *, with_hidden: bool = False
    ) -> PassOutput:
        batch, width = what.token_ids.shape
        self.batch_sizes.append(int(state.active.sum()))
        self.fed = [0] * batch
        logits = torch.zeros(batch, width, VOCAB)
        for b, tokens in enumerate(what.token_ids.tolist()):
            table = state.block_tables[b].tolist()
            first = int(state.length[b]) + what.offset
            for j, token in enumerate(tokens):
                is_live = int(what.lens[b]) >= what.offset + j + what.margin
                is_live &= not (what.last_only and what.lens[b] == 0)
                if not (state.active[b] and 0 <= first + j < what.max_len and is_live):
                    continue
                if what.cached is not None and first + j < int(what.cached[b]):
                    assert self.cache.cells[self.cache.place(table, first + j)] == token
                    continue
                self.cache.write(table, first + j, [token])
                self.fed[b] += 1
                logits[b, j, self.rule(self.cache.read(table, first + j + 1))] = 1.0
        return PassOutput(logits[:, -1:] if what.last_only else logits, None)


class FakeDraft(DraftModel):
    """Proposes `rule` of the tokens in its cache; `lens_seen` has the k_i that were asked for.

    caught_up: tokens that the first pass of each sequence-round fed.
    """

    def __init__(
        self, rule: Rule = sometimes, max_len: int = 10_000, block_size: int = BLOCK
    ) -> None:
        self.fake = FakeModel(rule, block_size)
        super().__init__(cast(Any, self.fake), max_len)
        self.lens_seen: list[list[int]] = []
        self.caught_up: list[int] = []

    @property
    def cache(self) -> Cells:
        return self.fake.cache

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        self.lens_seen.append(draft.caps[state.active].tolist())
        first: list[list[int]] = []
        forward = self.fake.forward_slots

        def noted(what: Rectangle, state: BatchState) -> PassOutput:
            found = forward(what, state)
            first.append(self.fake.fed)
            return found

        self.fake.forward_slots = noted  # type: ignore[method-assign]
        found = super().propose(state, draft)
        self.fake.forward_slots = forward  # type: ignore[method-assign]
        if first:
            self.caught_up += [n for n, k in zip(first[0], draft.caps.tolist(), strict=True) if k]
        return found


class Scripted(FixedLength):
    """A policy that repeats the given lengths in turn."""

    def __init__(self, *script: int) -> None:
        self.script = script
        self.step = -1

    def lengths(self, k: int) -> tuple[int, ...]:
        return tuple(sorted(set(self.script)))

    def next_k(self, lengths: Any, last: Any, costs: Any, slots: int) -> int:
        self.step += 1
        return self.script[self.step % len(self.script)]


def looping(prefix: list[int]) -> int:
    """A next token that mostly repeats earlier text, with exceptions."""
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
        target=cast(Any, FakeModel(target)),
        proposer=None if draft is None else FakeDraft(draft, draft_max_len),
        allocator=BlockAllocator(num_blocks, BLOCK),
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
    engine: Engine,
    run: Run,
    found: Callable[[list[int], int], int] = lambda tokens, asked: asked,
    is_drafted: bool = True,
) -> None:
    """Drive a run step by step, and check all of a round's numbers after each step.

    found: number of tokens that the proposer should find, of those asked for. is_drafted: whether a
    model proposes, whose cache lacks the last token that it drew.
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
            draft_limit = engine.proposer.max_len if engine.proposer is not None else 0
            k = found(seq.tokens[:n], max(0, min(run.scheduler.k, limit - n - 1, draft_limit - n)))
            accepted = emission.num_accepted
            assert seq.tokens[n:] == emission.token_ids
            assert 0 <= accepted <= k
            if seq.finish_reason != "eos":
                assert len(seq.tokens) == n + accepted + 1
                assert seq.target_kv == n + accepted
                cached = n + (min(accepted, k - 1) if is_drafted else accepted)
                assert seq.draft_kv == (cached if k else draft_kv)
            if k:
                assert seq.proposed_per_round[-1] == k
                assert seq.accepted_per_round[-1] == accepted
            assert seq.rounds_without_proposal - silent[seq.index] == (k == 0)
            if seq.finish_reason is not None:
                assert not seq.block_table
            else:
                least, most = map(engine.allocator.blocks_for, (seq.target_kv, len(seq.tokens)))
                assert least <= len(seq.block_table) <= most, "rejected tokens keep no blocks"
