"""The target's side of a round: prefill and scoring."""

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Span
from specdec_cli.core.sampling import to_probs
from specdec_cli.core.types import Proposal, SamplingParams, Scores, Sequence
from specdec_cli.models.paged import PagedModel


class TargetScorer:
    """Scores proposals with the target in one ragged pass."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def prefill(self, spans: list[Span]) -> None:
        """Fill the target's cache with prompt tokens; no logits are computed."""
        self.model.forward(spans, [0] * len(spans))

    def score(self, seqs: list[Sequence], proposal: Proposal, params: SamplingParams) -> Scores:
        """What the target says after each sequence's last token and after each of its proposals.

        All ranks compute them: while rank 0 does, the others have nothing else to do.
        """
        k = proposal.token_ids.shape[1]
        spans = [
            Span(s, s.target_kv, len(s.tokens), n) for s, n in zip(seqs, proposal.lens, strict=True)
        ]
        # A -1, from a draft whose logits are not finite, is reported by verification.
        proposed = proposal.token_ids.clamp(min=0) if k else None
        logits = self.model.forward(spans, [n + 1 for n in proposal.lens], proposed).logits
        if params.is_greedy:
            return Scores(best=_by_sequence(ops.greedy_argmax(logits), proposal.lens, k))
        return Scores(_by_sequence(to_probs(logits, params), proposal.lens, k))


def _by_sequence(rows: torch.Tensor, lens: list[int], k: int) -> torch.Tensor:
    """Rows [sum of lens + 1, ...] as [B, K + 1, ...], zero past each sequence's own."""
    if any(n < k for n in lens):
        places = [b * (k + 1) + i for b, n in enumerate(lens) for i in range(n + 1)]
        padded = rows.new_zeros(len(lens) * (k + 1), *rows.shape[1:])
        padded[torch.tensor(places).to(rows.device, non_blocking=True)] = rows
        rows = padded
    return rows.view(len(lens), k + 1, *rows.shape[1:])
