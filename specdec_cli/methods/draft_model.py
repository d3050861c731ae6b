"""Proposing tokens with a draft model (Leviathan et al., arXiv 2211.17192)."""

import torch

from specdec_cli.core.batch import Rectangle, Span
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.base import Method, MethodBytes, MethodParts, Proposer, RoundSize
from specdec_cli.methods.teacher import Teacher, compare
from specdec_cli.models.paged import PagedModel


class DraftModel(Proposer):
    """Draws k tokens per sequence from the draft model, whose context length is `max_len`. model:
    None on ranks that hold no part of it."""

    is_paged = True

    def __init__(self, model: PagedModel | None, max_len: int) -> None:
        self.model = model
        self.max_len = max_len
        self.max_lag = self.tail

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Fill the draft's cache with prompt tokens."""
        if self.model is not None:
            self.model.prefill(spans)

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose tokens. The first pass feeds the last two tokens, because the cache lacks one or
        both of them. Each further pass feeds the token that was drawn last."""
        if self.model is None:
            return draft.nothing()
        fed, offset = state.tail, -self.tail
        while not draft.is_over:
            what = Rectangle(fed, draft.lens, offset, 2, self.max_len, True, state.draft_kv)
            token = draft.draw(self.model.forward_slots(what, state).logits[:, 0])
            fed, offset = token[:, None], 0 if offset < 0 else offset + 1
        return draft.candidates()

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        """Return how many tokens the cache holds. The k-th proposal is never in it, because it is
        drawn but not fed. Keys of rejected proposals do not count, because later tokens overwrite
        them."""
        return n + min(accepted, k - 1)

    def forecast(self, teacher: Teacher, text: Sequence, params: SamplingParams) -> Forecast | None:
        return compare(teacher, self.model, self.max_len, text, params)

    def clear(self) -> None:
        if self.model is not None:
            self.model.cache.clear()


def _make(parts: MethodParts) -> DraftModel:
    assert parts.draft is None or isinstance(parts.draft, PagedModel)
    return DraftModel(parts.draft, parts.draft_max_len)


def _estimate_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the bytes of the draft's logits. When tokens are sampled, the rank that verifies
    keeps the logits of every step and then stacks them, which makes a second copy. Otherwise no
    logits are kept."""
    if size.is_greedy or size.draft is None or not size.is_first:
        return MethodBytes()
    vocab = min(size.draft.vocab_size, size.vocab_size)
    return MethodBytes(in_round=2 * size.batch_size * size.k * vocab * size.draft.dtype.itemsize)


METHOD = Method(_make, _estimate_bytes)
