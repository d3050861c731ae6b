"""Proposing a block of tokens in one pass with a DFlash drafter (z-lab, arXiv 2602.06036).

A block consists of the last token, followed by mask tokens. Its rows attend to the text before the
block and to each other. The drafter's cache keeps only keys and values of decided tokens: after
each round, `commit` computes them from the target's hidden states and overwrites the keys and
values that the block's pass wrote. Legend: B slots, K proposal length, H hidden size.
"""

from dataclasses import replace
from pathlib import Path

import torch

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods.base import Method, MethodBytes, MethodParts, RoundSize
from specdec_cli.methods.step_head import HeadProposer, estimate_at_once
from specdec_cli.models.description import DraftPlace
from specdec_cli.models.heads.description import HeadDescription, describe_head
from specdec_cli.models.heads.dflash.config import DFlashConfig, read_dflash_config
from specdec_cli.models.heads.dflash.head import DFlashHead
from specdec_cli.models.heads.paged import PagedHead


class DFlash(HeadProposer):
    """Draws K tokens per sequence from one pass over a block of `rows(K)` rows.

    depends_on_k: whether `rows(K)` depends on K. If it does, so do the proposals, because the rows
        of a block attend to each other.
    """

    def __init__(
        self,
        head: PagedHead | None,
        feature_layers: tuple[int, ...],
        max_len: int,
        config: DFlashConfig,
    ) -> None:
        super().__init__(head, feature_layers, max_len)
        self.rows, self.depends_on_k = config.rows_for, not config.keeps_width

    def ahead(self, k: int) -> int:
        return self.rows(k) - 1

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose K tokens from one pass over the block.

        The row of the last token predicts a proposal only if `anchor_predicts` is set in the
        drafter's config. If blocks always have the width used in training, the last rows of a block
        may be unused. A sequence whose block would reach past `max_len` gets no proposals.
        """
        if self.head is None:
            return draft.nothing()
        rows = self.rows(draft.k)
        draft.lens = draft.lens * (state.length <= self.max_len + 1 - rows)
        if draft.is_over:
            return draft.candidates()
        head = self.head.head
        assert isinstance(head, DFlashHead)
        masks = state.tail.new_full((state.num_slots, rows - 1), head.config.mask_id)
        block = torch.cat((state.tail[:, -1:], masks), dim=1)
        # A cap shortens a sequence's proposals but never its block: rows attend to each other, so
        # the predictions depend on the number of rows.
        lens = (draft.lens > 0) * rows
        what = Rectangle(block, lens, -1, 1, self.max_len, False)
        nothing = head.norm.new_empty(*block.shape, 0)
        x = self.head.forward_slots(what, state, nothing, fused=True)
        first = 0 if head.config.anchor_predicts else 1
        decided = x.hidden.unflatten(0, (-1, rows))[:, first : first + draft.k]
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
        """Draw tokens one after another from logits [B, K, Vd]. Before each draw, add the Markov
        head's term to the logits; it depends on the previous token. rows: [B, K, H], normed hidden
        states."""
        assert head.markov is not None
        before, memory = state.tail[:, -1], None
        for place in range(draft.k):
            if draft.is_over:
                return
            of_token = rows[:, place], logits[:, place]
            judged = head.markov(
                *of_token, before, memory, needs_confidence=draft.doubt is not None
            )
            if draft.doubt is not None:
                told = judged.confidence
                assert told is not None, "only a drafter with confidences has this policy"
                draft.end_before(draft.doubt(told)[:, None], place)
            before, memory = draft.draw(judged.logits, head.ids), judged.memory


def _make(parts: MethodParts) -> DFlash:
    assert parts.draft is None or isinstance(parts.draft, PagedHead)
    described = parts.described
    assert isinstance(described, HeadDescription) and isinstance(described.config, DFlashConfig)
    layers = parts.target.hidden_layers
    return DFlash(parts.draft, layers, parts.draft_max_len, described.config)


def estimate_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the bytes of the pass in `commit` and of the logits."""
    return estimate_at_once(size, size.batch_size * (size.k + 1))


def describe(place: DraftPlace) -> HeadDescription:
    """Describe the DFlash or DSpark drafter that is stored in the draft's folder."""
    keeps_width = place.speculation.block_width == "trained"

    def read(name: str, folder: Path, _: int) -> DFlashConfig:
        return replace(read_dflash_config(name, folder), keeps_width=keeps_width)

    return describe_head(place, read, DFlashHead)


METHOD = Method(_make, estimate_bytes, describe)
