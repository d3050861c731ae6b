"""Proposing a block of tokens in one pass with a DFlash drafter (z-lab, arXiv 2602.06036).

The drafter keeps keys and values of true tokens alone, which follow from the target's hidden
states: `commit` writes those that a round's scoring pass gave. A block is the last token and masks,
k + 1 rows that see the context and each other. Their keys go to the places of tokens to come, where
the next rows are written over them. Legend: B slots, K proposal length, H width of the drafter.
"""

import torch

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods.base import (
    DraftPlace,
    Method,
    MethodBytes,
    MethodParts,
    RoundSize,
)
from specdec_cli.methods.step_head import HeadProposer
from specdec_cli.models.heads.description import HeadDescription, describe_head
from specdec_cli.models.heads.dflash.config import read_dflash_config
from specdec_cli.models.heads.dflash.head import DFlashHead
from specdec_cli.models.heads.paged import PagedHead


class DFlash(HeadProposer):
    """Draws K tokens a sequence from one pass."""

    depends_on_k = True  # K sets the number of rows, which see each other
    fills_block = True

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """All K tokens, from the rows that decide one."""
        if self.head is None or draft.is_over:
            return draft.nothing()
        head = self.head.head
        assert isinstance(head, DFlashHead)
        rows = head.config.rows_for(draft.k)
        masks = state.tail.new_full((state.num_slots, rows - 1), head.config.mask_id)
        block = torch.cat((state.tail[:, -1:], masks), dim=1)
        # Caps of a sequence cut its proposals, never the block.
        lens = (draft.caps > 0) * draft.k
        what = Rectangle(block, lens, -1, 1, self.max_len, False)
        nothing = head.norm.new_empty(*block.shape, 0)
        x = self.head.forward_slots(what, state, nothing, fused=True)
        decided = x.hidden.unflatten(0, (-1, rows))[:, rows - draft.k :]
        x = head.normed(decided.flatten(0, 1))
        logits = head.logits(x).unflatten(0, (-1, draft.k))
        if head.markov is None:
            draft.draw_all(logits, head.ids)
        else:
            self._draw_in_turn(head, x.scaled.unflatten(0, (-1, draft.k)), logits, state, draft)
        return draft.candidates()

    @staticmethod
    def _draw_in_turn(
        head: DFlashHead,
        rows: torch.Tensor,
        logits: torch.Tensor,
        state: BatchState,
        draft: Drafting,
    ) -> None:
        """Draw from the sums of logits [B, K, Vd] and what the Markov head adds to each, given the
        token before. rows: [B, K, H], normed."""
        assert head.markov is not None
        before, memory = state.tail[:, -1], None
        for place in range(draft.k):
            if draft.is_over:
                return
            added, confidence, memory = head.markov(rows[:, place], before, memory)
            if draft.doubt is not None:
                assert confidence is not None, "the policy asks a drafter that has confidences"
                draft.end_before(draft.doubt(confidence)[:, None], place)
            drawn = logits[:, place] if added is None else logits[:, place] + added
            before = draft.draw(drawn, head.ids).clamp(min=0)


def _make(parts: MethodParts) -> DFlash:
    assert parts.draft is None or isinstance(parts.draft, PagedHead)
    return DFlash(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


def estimate_bytes(size: RoundSize) -> MethodBytes:
    """The context of `commit`, and logits of all rows: over its own ids, or, if tokens are drawn,
    over the target's too."""
    if size.draft is None:
        return MethodBytes()
    rows = size.batch_size * size.k
    width = size.draft.vocab_size + (0 if size.is_greedy else 2 * size.vocab_size)
    drafting = rows * width * size.draft.dtype.itemsize
    committing = size.draft.pass_bytes(rows + size.batch_size, 0, gathers=False)
    both = drafting + committing if size.is_cuda else max(drafting, committing)
    return MethodBytes(in_round=both)


def describe(place: DraftPlace) -> HeadDescription:
    """The drafter, whichever config its folder has."""
    where = place.spec, place.device, place.parallel, place.target, place.max_model_len
    return describe_head(
        *where, lambda name, folder, _: read_dflash_config(name, folder), DFlashHead
    )


METHOD = Method(_make, estimate_bytes, describe)
