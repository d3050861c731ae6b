"""Proposing tokens with a head that needs one pass per token, such as EAGLE-3.

The head's row t takes the target's hidden state of token t and the embedding of token t + 1. While
proposing, the head uses its own outputs in place of hidden states that the target has not computed
yet. After the round, `commit` computes these rows again from the target's hidden states. It keeps
the output of the last row, which gives the next round's first proposal. Each further proposal takes
a pass over one row.
"""

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Rectangle, Span
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods.base import MethodBytes, MethodParts, Proposer, RoundSize
from specdec_cli.models.draft import Draft
from specdec_cli.models.heads.paged import PagedHead


class HeadProposer(Proposer):
    """A base class for proposers with a head. `prefill` and `commit` run the head over the text's
    tokens, to fill its cache. head: None on ranks that do not hold it."""

    # `commit` runs even after rounds without proposals, so the head's cache never lacks tokens, and
    # `max_lag` keeps its default.
    is_paged = True

    def __init__(
        self, head: PagedHead | None, feature_layers: tuple[int, ...], max_len: int
    ) -> None:
        self.head = head
        self.feature_layers = feature_layers
        self.max_len = max_len

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Run the head over prompt tokens whose next token is also in the prompt."""
        if self.head is not None:
            assert features is not None, "the target must return hidden states"
            self.head.prefill(spans, features)

    def written(
        self, state: BatchState, verdict: Verdict, target: TargetOutput
    ) -> ops.Normed | None:
        """Run the head over all B * (K + 1) rows of the target's scoring pass, with the target's
        hidden states. A slot's first row belongs to the last token before the round. Return the
        head's output for these rows, or None without a head."""
        if self.head is None:
            return None
        assert target.features is not None, "the target must return hidden states"
        rows = Rectangle(verdict.token_ids, verdict.num_accepted, -1, 1, self.max_len, False)
        return self.head.forward_slots(rows, state, target.features, fused=False)

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        self.written(state, verdict, target)

    def clear(self) -> None:
        if self.head is not None:
            self.head.clear()


class StepHead(HeadProposer):
    """Draws k tokens per sequence from the head, one per pass."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose tokens. The first proposal needs no pass. A sequence with a single token has no
        row yet, and its first draft follows from a hidden state of zeros."""
        if self.head is None:
            return draft.nothing()
        head = self.head.head
        x, step = self.head.carried(state), 0
        while not draft.is_over:
            token = draft.draw(head.logits(x), head.ids)
            step += 1
            if not draft.is_over:
                # Run the row at position length - 2 + step, for each sequence that gets more than
                # `step` proposals.
                place = Rectangle(token[:, None], draft.lens, step - 2, 3, self.max_len, True)
                fed = head.fed_back(x)[:, None]
                x = self.head.forward_slots(place, state, fed, fused=True)
        return draft.candidates()

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Run the head over the rows of the decided tokens, and keep the output of the last of
        these rows for the next round."""
        x = self.written(state, verdict, target)
        if self.head is not None and x is not None:
            hidden = x.hidden.view(*verdict.token_ids.shape, -1)
            self.head.carry_on(state, hidden, verdict.num_accepted)


def make(parts: MethodParts) -> StepHead:
    """Make the proposer for a head that needs one pass per token."""
    assert parts.draft is None or isinstance(parts.draft, PagedHead)
    return StepHead(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


def estimate_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the bytes of the pass in `commit` and of the logits.

    Greedy decoding needs two copies of the logits of one step, over the head's own ids. Sampling
    needs two copies of the logits of all steps, over the target's ids.
    """
    if size.draft is None:
        return MethodBytes()
    batch_size = size.batch_size
    logits = 2 * batch_size * size.draft.vocab_size
    if not size.is_greedy:
        logits = 2 * size.k * batch_size * size.vocab_size
    return _pass_and_logits(size, size.draft, batch_size * (size.k + 1), logits)


def estimate_at_once(size: RoundSize, rows: int) -> MethodBytes:
    """Estimate the bytes of a pass over `rows` rows and of the logits of all proposals, which are
    computed together. There is one copy of the logits over the head's own ids. If tokens are
    sampled, there are also two copies over the target's ids."""
    if size.draft is None:
        return MethodBytes()
    width = size.draft.vocab_size + (0 if size.is_greedy else 2 * size.vocab_size)
    return _pass_and_logits(size, size.draft, rows, size.batch_size * size.k * width)


def _pass_and_logits(size: RoundSize, draft: Draft, rows: int, logits: int) -> MethodBytes:
    """Estimate the bytes of a pass that computes no logits, and of the logits computed outside it.

    On CUDA the two sizes add up, because the allocator seldom reuses the pass's memory for the
    logits. On a CPU only the larger counts. logits: the number of logit values.
    """
    drawing = logits * draft.dtype.itemsize
    passing = draft.pass_bytes(rows, 0, gathers=False)
    return MethodBytes(in_round=drawing + passing if size.is_cuda else max(drawing, passing))
