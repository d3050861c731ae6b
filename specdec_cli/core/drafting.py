"""Drawing the proposals of one round, token by token, from the logits of any proposer's model.

Legend: B sequences, K proposal length, V' vocabulary of the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec_cli.core.candidates import Candidates, TokenDist
from specdec_cli.core.sampling import by_target_ids, draw, softmax_stats
from specdec_cli.core.types import SamplingParams

# Arguments: columns of drawn tokens, int64 [B], and the logits that they were drawn from, [B, V'].
# Result: bool [B], True for a sequence whose drafting stops after its token.
Stop = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class Drafting:
    """One round's drafting: its limits, and the tokens drawn so far.

    k: K, the most tokens of any sequence; the same in every round of a graph. caps: int64 [B], the
    most tokens of each sequence, 0..K. vocab_size: the target's; draft ids past it are cut off.
    noise: fp32 [B, K], None if decoding is greedy. keeps_dist: keep the distributions that tokens
    were drawn from, for a rank that verifies. stop: ends a sequence's drafting after a token, which
    stays proposed. Dropping a token because of its own draw would change the text.
    """

    k: int
    params: SamplingParams
    caps: torch.Tensor
    vocab_size: int
    noise: torch.Tensor | None = None
    keeps_dist: bool = True
    stop: Stop | None = None
    lens: torch.Tensor = field(init=False)  # int64 [B], so far: caps, or fewer after a stop
    _tokens: list[torch.Tensor] = field(default_factory=list, init=False)
    _logits: list[torch.Tensor] = field(default_factory=list, init=False)
    _stats: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lens = self.caps

    @property
    def is_over(self) -> bool:
        """True when no sequence takes another token.

        On CUDA drafting always draws K tokens: a graph needs that, and the host does not wait.
        """
        step = len(self._tokens)
        return step >= self.k or (not self.lens.is_cuda and not bool((self.lens > step).any()))

    def draw(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """The next token of each sequence, int64 [B], drawn from `logits` [B, V' or more].

        ids: int64 [V'], the target's id of each column, all different; None if columns are ids. A
        row that is not finite gives -1, which verification reports.
        """
        step = len(self._tokens)
        if ids is not None and not self.params.is_greedy:
            # Verification reads what tokens were drawn from by the target's ids.
            logits, ids = by_target_ids(logits, ids, self.vocab_size), None
        logits = logits[:, : self.vocab_size]
        stats = None if self.params.is_greedy else softmax_stats(logits, self.params)
        noise = None if self.noise is None else self.noise[:, step]
        token = column = draw(logits, stats, self.params, noise)
        if ids is not None:
            token = torch.where(column < 0, column, ids[column.clamp(min=0)])
        self._tokens.append(token)
        if self.keeps_dist and not self.params.is_greedy:
            self._logits.append(logits)
            if stats is not None:
                self._stats.append(stats.rows)
        if self.stop is not None:
            stops = self.stop(column, logits) & (self.lens > step + 1)
            self.lens = torch.where(stops, step + 1, self.lens)
        return token

    def candidates(self) -> Candidates:
        """The proposals drawn so far, padded to K places."""
        if not self._tokens:
            return self.nothing()
        rest = self.k - len(self._tokens)  # 0 on CUDA
        token_ids = torch.nn.functional.pad(torch.stack(self._tokens, dim=1), (0, rest))
        q = None
        if self._logits:
            stats = torch.stack(self._stats, dim=1) if self._stats else None
            logits = torch.stack(self._logits, dim=1)
            q = TokenDist(torch.nn.functional.pad(logits, (0, 0, 0, rest)), stats)
        return Candidates(token_ids, self.lens, q)

    def nothing(self) -> Candidates:
        """Empty proposals of K places, for a rank that takes no part in drafting."""
        return Candidates(self.caps.new_zeros(len(self.caps), self.k), self.caps)
