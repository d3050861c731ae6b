"""The data types of a round on the device.

Legend: B sequences; K proposal length; V size of the target's vocabulary; V' size of the draft's,
at most V; F width of features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.core.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Noise:
    """Uniform random numbers in [0, 1) of one round, fp32.

    draft: [B, K], to draw the proposals.
    accept: [B, K], to decide whether each proposal is accepted.
    sample: [B, K + 1], to draw the token after the accepted proposals. Column i is used if i
        proposals were accepted.
    """

    draft: Tensor
    accept: Tensor
    sample: Tensor


@dataclass(frozen=True, slots=True)
class TokenDist:
    """The distributions that proposals were drawn from, as logits; probabilities are not stored.

    logits: [B, K, V']; ids at or past V' have probability 0. The distributions are those that
        `core.sampling.to_probs` makes of them, after temperature, top-k and top-p.
    stats: fp32 [B, K, 4], see `ops.logit_rows`; None on a CPU, where each operation reads the
        logits again.
    """

    logits: Tensor
    stats: Tensor | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The proposals of one round.

    token_ids: int64 [B, K]; -1 where the draft's logits are not finite. Entries past a sequence's
        proposal length are valid but meaningless ids.
    lens: int64 [B], the proposal length k_i of each sequence, 0..K.
    q: the draft's distributions, from which the proposals were drawn; None if nothing was drawn
        (greedy drafts, lookups), and on ranks other than 0.
    """

    token_ids: Tensor
    lens: Tensor
    q: TokenDist | None = None

    def agreed(self, parallel: TensorParallel) -> "Candidates":
        """Send rank 0's proposals to every rank, and return them."""
        return Candidates(*_of_first(parallel, self.token_ids, self.lens), self.q)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The target's output for one round's proposals.

    logits: [B, K + 1, V]. Row 0 is for the position after the sequence's last token, row i for the
        position after proposal i. Rows past k_i, the sequence's proposal length, are meaningless.
    features: [B, K + 1, F], the hidden states that the proposer asked for; None if it asked for
        none.
    """

    logits: Tensor
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of one round.

    token_ids: int64 [B, K + 1]: the accepted proposals, then one token from the target, then
        meaningless entries.
    num_accepted: int64 [B], the number of accepted proposals of each sequence; -1 if the target's
        logits are not finite, -2 if the draft's logits are not.
    """

    token_ids: Tensor
    num_accepted: Tensor

    def agreed(self, parallel: TensorParallel) -> "Verdict":
        """Send rank 0's decision to every rank, and return it."""
        return Verdict(*_of_first(parallel, self.token_ids, self.num_accepted))


def _of_first(parallel: TensorParallel, rows: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return rank 0's [B, N] and [B], which one broadcast sends to every rank."""
    packed = parallel.broadcast(torch.cat((rows, column[:, None]), dim=1))
    return packed[:, :-1].contiguous(), packed[:, -1].contiguous()
