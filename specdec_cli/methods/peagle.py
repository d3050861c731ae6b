"""Proposing tokens with a P-EAGLE head: an EAGLE-3 head that runs one pass with masks instead of
one pass per proposal.

The input of the causal pass is one row for each token that the last round decided, with the
target's hidden state, followed by K - 1 mask rows. The rows of decided tokens are stored after a
round and wait for the next round's pass, so they are called waiting rows. The pass is causal, so a
smaller K does not change the first proposals. The masks' keys and values in the cache are later
overwritten by those of decided tokens. Legend: B slots, K proposal length, W maximum number of
waiting rows, H hidden size of the head.
"""

from dataclasses import replace
from pathlib import Path

import torch

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods import eagle3
from specdec_cli.methods.base import Method, MethodBytes, MethodParts, RoundSize
from specdec_cli.methods.step_head import HeadProposer, estimate_at_once
from specdec_cli.models.description import DraftPlace
from specdec_cli.models.heads.description import HeadDescription
from specdec_cli.models.heads.eagle3.config import PEagleConfig, read_peagle_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head, WaitingHead


class PEagle(HeadProposer):
    """Draws K tokens per sequence from one pass over rows of decided tokens and of masks."""

    head: WaitingHead | None

    def tail_for(self, k: int) -> int:
        """Return k + 1: after a round that accepts all k proposals, k + 1 rows are waiting."""
        return k + 1

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose all tokens from the outputs of the last decided token's row and of K - 1
        masks."""
        if self.head is None:
            return draft.nothing()
        rows = self._passed(self.head, state, draft.lens, draft.k - 1)
        if not draft.is_over:
            head = self.head.head
            logits = head.logits(head.normed(rows.flatten(0, 1)))
            draft.draw_all(logits.unflatten(0, (-1, draft.k)), head.ids)
        return draft.candidates()

    def _passed(
        self, paged: WaitingHead, state: BatchState, lens: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Run a pass over the waiting rows, followed by `count` masks. Return the hidden states of
        the last waiting row and of the masks, [B, count + 1, H]. lens: int64 [B], the number of
        proposals for each sequence."""
        head, most = paged.head, state.tail.shape[1]
        assert isinstance(head, Eagle3Head) and head.mask_hidden is not None
        assert isinstance(head.config, PEagleConfig)
        waiting, counts = paged.waiting(state, most)
        # The position of each row relative to the last waiting row, whose place is 0.
        place = torch.arange(1, most + count + 1, device=state.device) - counts[:, None]
        is_true = place < 1
        tokens = state.tail.gather(1, (place + most - 1).clamp(max=most - 1))
        tokens = tokens.masked_fill(~is_true, head.config.mask_id)
        given = torch.nn.functional.pad(waiting, (0, 0, 0, count))
        given = torch.where(is_true[..., None], given, head.mask_hidden)
        # A sequence with j + 1 proposals needs j masks. The waiting rows are always needed.
        live = counts + lens.clamp(min=1) - 1
        what = Rectangle(tokens, live, -1, 2, self.max_len, False, before=counts)
        x = paged.forward_slots(what, state, given, fused=True)
        read = torch.arange(count + 1, device=state.device) + counts[:, None] - 1
        rows = x.hidden.view(-1, most + count, given.shape[2])
        rows = rows.gather(1, read.clamp(min=0)[..., None].expand(-1, -1, rows.shape[2]))
        return rows.masked_fill((read < 0)[..., None], 0.0)

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Store the rows of the decided tokens for the next pass. A round without proposals has not
        run a pass over the rows that were waiting, so run it here; otherwise they would
        accumulate."""
        if self.head is None:
            return
        assert target.features is not None, "the target must return hidden states"
        if verdict.token_ids.shape[1] == 1:
            self._passed(self.head, state, verdict.num_accepted, 0)
        self.head.keep(state, target.features, verdict.num_accepted)


def _make(parts: MethodParts) -> PEagle:
    assert parts.draft is None or isinstance(parts.draft, WaitingHead)
    return PEagle(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


def _describe(place: DraftPlace) -> HeadDescription:
    most = place.speculation.num_speculative_tokens

    def read(name: str, folder: Path) -> PEagleConfig:
        return replace(read_peagle_config(name, folder), most_drafted=most)

    return eagle3.describe(place, read, WaitingHead)


def _estimate_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the bytes of the pass, with its inputs, and of the logits."""
    return estimate_at_once(size, 2 * size.batch_size * size.k)


METHOD = Method(_make, _estimate_bytes, _describe, can_share=("embeddings",))
