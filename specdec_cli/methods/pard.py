"""Proposing tokens with a PARD draft (An et al., arXiv 2504.18583), a model trained to predict
tokens at the positions of mask tokens.

One causal pass gives all proposals. It feeds the tokens that are missing from the cache, and then
K - 1 mask tokens. The pass is causal, so a smaller K does not change the first proposals. The
masks' keys and values in the cache are later overwritten by those of decided tokens.
"""

from dataclasses import replace

import torch

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.errors import SetupError
from specdec_cli.methods.base import Method, MethodBytes, MethodParts, Proposer, RoundSize
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.models.description import Description
from specdec_cli.models.paged import PagedModel
from specdec_cli.text import shown

_KEY = "pard_token"


class Pard(DraftModel):
    """Draws K tokens per sequence from one pass of the draft. k: the maximum K of any round."""

    def __init__(self, model: PagedModel | None, max_len: int, k: int) -> None:
        super().__init__(model, max_len)
        # After a round that accepts all k proposals, the cache lacks k + 1 tokens.
        self.tail = self.max_lag = k + 1
        self.mask_id = 0 if model is None else int(getattr(model.module.config, _KEY))

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose all tokens from the outputs at the last token and at the masks. The pass may feed
        some tokens that are already in the cache; this writes the same keys and values again."""
        if self.model is None or draft.is_over:
            return draft.nothing()
        masks = state.tail.new_full((state.num_slots, draft.k - 1), self.mask_id)
        fed = torch.cat((state.tail, masks), dim=1)
        # Mask j predicts proposal j + 1. Only sequences with more than j + 1 proposals need it.
        where = -self.tail, 2, self.max_len, False, state.draft_kv, self.tail - 1
        what = Rectangle(fed, draft.lens, *where)
        draft.draw_all(self.model.forward_slots(what, state).logits)
        return draft.candidates()

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        """Return n, the number of tokens in the cache. Accepted tokens are not in it: their
        positions hold the keys and values of masks."""
        return n

    forecast = Proposer.forecast  # `DraftModel`'s would feed the text without masks


def _make(parts: MethodParts) -> Pard:
    assert parts.draft is None or isinstance(parts.draft, PagedModel)
    return Pard(parts.draft, parts.draft_max_len, parts.speculation.num_speculative_tokens)


def _estimate_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the bytes of the pass, and of the logits from which tokens are drawn."""
    if size.draft is None:
        return MethodBytes()
    rows = size.k * size.batch_size
    passing = size.draft.pass_bytes(2 * rows, rows, gathers=False)
    drawn = 0 if size.is_greedy else 2 * rows * size.draft.vocab_size * size.draft.dtype.itemsize
    return MethodBytes(in_round=passing + drawn)


def _check(draft: Description) -> Description:
    """Mark the draft as one that proposes all tokens in one pass. Raises `SetupError` if its config
    has no valid mask token."""
    token = getattr(draft.module.config, _KEY, None)
    if type(token) is not int or not 0 <= token < draft.vocab_size:
        raise SetupError(
            f"config.json of the PARD draft {draft.spec.name}: {_KEY} is {shown(token)}: it must "
            f"be a token id below {draft.vocab_size}"
        )
    return replace(draft, drafts_at_once=True)


METHOD = Method(_make, _estimate_bytes, check=_check)
