"""Proposing tokens with a draft model.

A proposer needs `prefill`, `propose` and `max_len`; it never changes a sequence. Split over ranks,
each of the draft's draws the same tokens, since their logits are the same and so are the random
numbers; rank 0's are the ones that count.
"""

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Span
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.core.sampling import to_probs
from specdec_cli.core.types import Proposal, RoundNoise, SamplingParams, Sequence
from specdec_cli.models.paged import PagedModel


class DraftWorker:
    """Draws k tokens a sequence from the draft model.

    target_vocab: width of the target's logits. A draft whose vocabulary is padded to another size
    is sliced or padded with probability zero, so p and q speak of the same ids.
    max_len: the draft's own context length, past which it proposes nothing. parallel: the ranks
    that the draft is split over.
    """

    def __init__(
        self,
        model: PagedModel,
        target_vocab: int,
        max_len: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        self.model = model
        self.target_vocab = target_vocab
        self.max_len = max_len
        self.parallel = parallel

    def prefill(self, spans: list[Span]) -> None:
        """Fill the draft's cache with prompt tokens."""
        self.model.forward(spans, [0] * len(spans))

    def propose(
        self, seqs: list[Sequence], lens: list[int], noise: RoundNoise, params: SamplingParams
    ) -> Proposal:
        """Propose lens[b] tokens for sequence b; K is the longest of them.

        The first pass feeds `tokens[draft_kv:]`: one token, two after a bonus token, any number
        after rounds without proposals. Each further pass feeds the token just drawn. Only rank 0
        keeps the distributions, since only it verifies, and greedy decoding has none.
        """
        k = max(lens)
        device = self.model.device
        token_ids = torch.zeros(len(seqs), k, dtype=torch.int64, device=device)
        kept = k if self.parallel.is_first and not params.is_greedy else 0
        probs = torch.zeros(len(seqs), kept, self.target_vocab, device=device)
        for step in range(k):
            active = [b for b, n in enumerate(lens) if n > step]
            rows: slice | torch.Tensor = slice(None)
            if len(active) < len(seqs):
                rows = torch.tensor(active).to(device, non_blocking=True)
            if step == 0:
                spans = [Span(seqs[b], seqs[b].draft_kv, len(seqs[b].tokens)) for b in active]
                logits = self.model.forward(spans, [1] * len(active)).logits
            else:
                ends = [len(seqs[b].tokens) + step - 1 for b in active]
                spans = [Span(seqs[b], end, end, 1) for b, end in zip(active, ends, strict=True)]
                # A -1, from logits that are not finite, is reported by verification.
                last = token_ids[rows, step - 1 : step].clamp(min=0)
                logits = self.model.forward(spans, [1] * len(active), last).logits
            logits = self.fit(logits)
            if params.is_greedy:
                token_ids[rows, step] = ops.greedy_argmax(logits)
                continue
            q = to_probs(logits, params)
            token_ids[rows, step] = ops.sample_categorical(q, noise.draft[rows, step])
            if kept:
                probs[rows, step] = q
        return Proposal(token_ids, lens, probs)

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] over the target's vocabulary."""
        own = logits.shape[-1]
        if own > self.target_vocab:
            return logits[:, : self.target_vocab]
        if own < self.target_vocab:
            return torch.nn.functional.pad(
                logits, (0, self.target_vocab - own), value=float("-inf")
            )
        return logits


class AbsentDraft:
    """The draft model as a rank knows it that holds no part of it.

    The proposals come from rank 0; until they do, they are zeros. max_len: the draft's own context
    length.
    """

    def __init__(self, vocab_size: int, max_len: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.device = device

    def prefill(self, spans: list[Span]) -> None:
        """There is no cache to fill."""

    def propose(
        self, seqs: list[Sequence], lens: list[int], noise: RoundNoise, params: SamplingParams
    ) -> Proposal:
        """Room for the proposals that are being made elsewhere."""
        token_ids = torch.zeros(len(seqs), max(lens), dtype=torch.int64, device=self.device)
        return Proposal(
            token_ids, lens, torch.zeros(len(seqs), 0, self.vocab_size, device=self.device)
        )


def no_proposal(batch: int, vocab: int, device: torch.device) -> Proposal:
    """The proposal of a round that is plain decoding."""
    return Proposal(
        torch.zeros(batch, 0, dtype=torch.int64, device=device),
        [0] * batch,
        torch.zeros(batch, 0, vocab, device=device),
    )
