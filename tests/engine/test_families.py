"""Every family: our loader, gate and paged attention against transformers' ordinary forward.

Logits are compared, not tokens: the argmax alone would miss a wrong window or softcap.
"""

from pathlib import Path

import pytest
import torch

from specdec_cli.engine.batch import Span
from specdec_cli.engine.kv_cache import BlockAllocator
from specdec_cli.engine.types import Sequence
from specdec_cli.models.paged import PagedModel
from tests.support import FAMILIES, VOCAB, paged_model, reference, save_tiny

TOLERANCE = 2e-5
BLOCK = 4


class Driver:
    """Feeds sequences to a paged model by hand and checks every logit row."""

    def __init__(self, model: PagedModel, oracle: object, lengths: list[int]) -> None:
        self.model, self.oracle = model, oracle
        generator = torch.Generator().manual_seed(5)
        self.allocator = BlockAllocator(model.cache.num_blocks, BLOCK)
        self.seqs = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            self.seqs.append(Sequence(index, tokens, length, 400))
        # Interleaved growth shuffles the block tables.
        for size in range(1, 120, 5):
            for seq in self.seqs:
                self.allocator.extend(seq.block_table, size)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.model.device)
            logits: torch.Tensor = self.oracle(ids).logits[0]  # type: ignore[operator]
        return logits

    def feed(self, chunks: list[tuple[int, int]], extra: list[list[int]] | None = None) -> float:
        """One ragged pass over tokens[start:stop] (+ extra); the largest logit error in it."""
        extra = extra or [[] for _ in chunks]
        width = max(map(len, extra))
        given = torch.tensor([row + [0] * (width - len(row)) for row in extra])
        given = given.to(self.model.device)
        spans = [
            Span(seq, start, stop, len(row))
            for seq, (start, stop), row in zip(self.seqs, chunks, extra, strict=True)
        ]
        logits = self.model.forward(spans, [s.length for s in spans], given if width else None)
        assert torch.isfinite(logits).all(), "a slot that was never written has been read"
        worst, at = 0.0, 0
        for span, row in zip(spans, extra, strict=True):
            tokens = span.seq.tokens[: span.stop] + row
            want = self.expected(tokens)[span.start :]
            got = logits[at : at + span.length]
            worst = max(worst, float((want - got).abs().max()))
            at += span.length
        return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, device: torch.device, tmp_path: Path) -> None:
    """Prefill, chunked prefill beside decode, decode, ragged scoring, rollback."""
    folder = save_tiny(tmp_path, family)
    model = paged_model(folder, 120, BLOCK, device)
    driver = Driver(model, reference(folder, device=device), [19, 6, 33])
    lengths = [len(s.tokens) for s in driver.seqs]
    # Prefill, the last of the three in two chunks.
    assert driver.feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE
    # The second chunk beside single-token decode.
    assert driver.feed([(18, 19), (5, 6), (20, 33)]) < TOLERANCE
    # Scoring with ragged proposals.
    proposals = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    assert driver.feed([(n - 1, n) for n in lengths], proposals) < TOLERANCE
    # Reject all but 2, 0 and 4 of them: rollback is only a smaller start.
    for seq, row, kept in zip(driver.seqs, proposals, (2, 0, 4), strict=True):
        seq.tokens += [*row[:kept], 50 + kept]
    after = [len(s.tokens) for s in driver.seqs]
    assert driver.feed([(n - 1, n) for n in after], [[20, 21], [], [22]]) < TOLERANCE
    # A two-token catch-up, as after a bonus token.
    for seq in driver.seqs:
        seq.tokens += [30, 31]
    assert driver.feed([(len(s.tokens) - 3, len(s.tokens)) for s in driver.seqs]) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_loader_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    """Parameters and buffers, bit for bit."""
    folder = save_tiny(tmp_path, family)
    ours = paged_model(folder, 2, BLOCK).module
    theirs = reference(folder)
    pairs = {
        **{n: (p, dict(theirs.named_parameters())[n]) for n, p in ours.named_parameters()},
        **{n: (b, dict(theirs.named_buffers())[n]) for n, b in ours.named_buffers()},
    }
    assert pairs.keys() == {*dict(theirs.named_parameters()), *dict(theirs.named_buffers())}
    for name, (mine, other) in pairs.items():
        assert torch.equal(mine, other), name
