"""Proposing tokens with a P-EAGLE head: EAGLE-3's rows, and masks in place of its further steps.

The last true row decides the first proposal, as EAGLE-3's does. A row of masks decides each of the
others: k - 1 rows in one causal pass, so that proposals of a smaller k are the first of a larger
one's. True rows are written over theirs. Legend: B slots, K proposal length, H width of the head.
"""

from functools import partial

import torch

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods import dflash, eagle3
from specdec_cli.methods.base import Method, MethodParts
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.eagle3.config import PEagleConfig, read_peagle_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head
from specdec_cli.models.heads.paged import PagedHead


class PEagle(StepHead):
    """Draws K tokens a sequence from one pass over masks."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """All tokens, from the last true row's output and those of K - 1 rows of masks."""
        if self.head is None or draft.is_over:
            return draft.nothing()
        head = self.head.head
        assert isinstance(head, Eagle3Head) and head.mask_hidden is not None
        assert isinstance(head.config, PEagleConfig)
        hidden = self.head.carried(state).hidden[:, None]
        if (count := draft.k - 1) > 0:
            masks = state.tail.new_full((state.num_slots, count), head.config.mask_id)
            # Row j decides proposal j + 1; sequences that take more than j + 1 need it.
            what = Rectangle(masks, draft.lens, -1, 3, self.max_len, False)
            given = head.mask_hidden.expand(*masks.shape, -1)
            x = self.head.forward_slots(what, state, given, fused=True)
            hidden = torch.cat((hidden, x.hidden.unflatten(0, (-1, count))), dim=1)
        logits = head.logits(head.normed(hidden.flatten(0, 1)))
        draft.draw_all(logits.unflatten(0, (-1, draft.k)), head.ids)
        return draft.candidates()


def _make(parts: MethodParts) -> PEagle:
    assert parts.draft is None or isinstance(parts.draft, PagedHead)
    return PEagle(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


_describe = partial(eagle3.describe, read_config=read_peagle_config)
METHOD = Method(_make, dflash.estimate_bytes, _describe, can_share=("embeddings",))
