"""Proposing tokens with a head that needs one pass per token, such as EAGLE-3.

Row t reads the target's hidden state of token t and embeds token t + 1. After a round, `commit`
overwrites guessed rows with those of true hidden states. It keeps the output of the last row, which
gives the next round's first proposal. Each further proposal takes a pass over one row.
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
    """A base for proposers with a head, which writes the rows of true tokens in `prefill` and
    `commit`. Some ranks have no head."""

    # `commit` writes the rows of every round, even of one without proposals: no `max_lag`.
    is_paged = True

    def __init__(
        self, head: PagedHead | None, feature_layers: tuple[int, ...], max_len: int
    ) -> None:
        self.head = head
        self.feature_layers = feature_layers
        self.max_len = max_len

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Write the rows of prompt tokens, whose following tokens are also in the prompt."""
        if self.head is not None:
            assert features is not None, "the target must return hidden states"
            self.head.prefill(spans, features)

    def written(
        self, state: BatchState, verdict: Verdict, target: TargetOutput
    ) -> ops.Normed | None:
        """Write the rows of the scoring pass's hidden states, starting at the last token before the
        round. Returns all B * (K + 1) rows; None without a head."""
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
    """Draws k tokens per sequence from the head, one in each step."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose tokens. The first proposal needs no pass. A sequence of one token has no row, so
        it gets no proposals."""
        if self.head is None:
            return draft.nothing()
        head = self.head.head
        x, step = self.head.carried(state), 0
        while not draft.is_over:
            token = draft.draw(head.logits(x), head.ids)
            step += 1
            if not draft.is_over:
                # The row length - 2 + step; sequences that take more than `step` proposals need it.
                place = Rectangle(token[:, None], draft.lens, step - 2, 3, self.max_len, True)
                fed = head.fed_back(x)[:, None]
                x = self.head.forward_slots(place, state, fed, fused=True)
        return draft.candidates()

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Write the rows that decided tokens complete, and keep the last one's output."""
        x = self.written(state, verdict, target)
        if self.head is not None and x is not None:
            hidden = x.hidden.view(*verdict.token_ids.shape, -1)
            self.head.carry_on(state, hidden, verdict.num_accepted)


def make(parts: MethodParts) -> StepHead:
    """The proposer of a method whose draft is a head."""
    assert parts.draft is None or isinstance(parts.draft, PagedHead)
    return StepHead(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


def estimate_bytes(size: RoundSize) -> MethodBytes:
    """The bytes of the pass in `commit` and of logits. Greedy decoding holds logits of one step
    over the head's own ids. Sampling also holds, twice, those of all steps over the target's
    ids."""
    if size.draft is None:
        return MethodBytes()
    batch_size = size.batch_size
    logits = 2 * batch_size * size.draft.vocab_size
    if not size.is_greedy:
        logits = 2 * size.k * batch_size * size.vocab_size
    return _pass_and_logits(size, size.draft, batch_size * (size.k + 1), logits)


def estimate_at_once(size: RoundSize, rows: int) -> MethodBytes:
    """The bytes of a pass over `rows` rows and of the logits of all proposals: over the head's own
    ids, and, for sampling, also over the target's."""
    if size.draft is None:
        return MethodBytes()
    width = size.draft.vocab_size + (0 if size.is_greedy else 2 * size.vocab_size)
    return _pass_and_logits(size, size.draft, rows, size.batch_size * size.k * width)


def _pass_and_logits(size: RoundSize, draft: Draft, rows: int, logits: int) -> MethodBytes:
    """The bytes of a pass and of logits. A captured round holds both at once; otherwise only the
    larger counts. logits: the number of logits."""
    drawing = logits * draft.dtype.itemsize
    passing = draft.pass_bytes(rows, 0, gathers=False)
    return MethodBytes(in_round=drawing + passing if size.is_cuda else max(drawing, passing))
