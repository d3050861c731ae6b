"""Draws the proposals of one round from a draft's logits, one token or one block at a time.

Legend: B sequences, K proposal length, V' vocabulary of the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec_cli.core.candidates import Candidates, TokenDist
from specdec_cli.core.logits_processors import TextsBefore
from specdec_cli.core.sampling import by_target_ids, draw, softmax_stats
from specdec_cli.core.types import SamplingParams

# Arguments: the columns of R drawn tokens in the logits, int64 [R], and these logits, [R, V'].
# Result: bool [R], True to end drafting after the token. Each value depends only on its own row.
Stop = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Argument: the draft's confidence in each sequence's next token, which is not drawn yet, fp32 [B].
# Result: bool [B], True to end drafting before that token.
Doubt = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class Drafting:
    """One round's drafting: its limits, and the tokens drawn so far.

    k: K, the largest number of tokens that any sequence may propose; fixed for a CUDA graph.
    caps: int64 [B], the largest number of tokens that each sequence may propose, 0..K.
    vocab_size: the size of the target's vocabulary; the draft's logits past it are dropped.
    noise: fp32 [B, K], the random numbers for the draws; None if decoding is greedy.
    keeps_dist: whether to keep the distributions that tokens are drawn from. Only a rank that
        verifies needs them.
    stop: decides after which token a sequence's drafting ends early; None if it never does.
    doubt: decides before which token a sequence's drafting ends early; None if it never does.
    texts: processes the logits before tokens are drawn from them; None to leave them unchanged.
    """

    k: int
    params: SamplingParams
    caps: torch.Tensor
    vocab_size: int
    noise: torch.Tensor | None = None
    keeps_dist: bool = True
    stop: Stop | None = None
    doubt: Doubt | None = None
    texts: TextsBefore | None = None
    # int64 [B], how many tokens each sequence proposes: `caps`, or less if drafting ended early.
    lens: torch.Tensor = field(init=False)
    # One tensor for each group of N positions that were drawn at once, [B, N, ...].
    _tokens: list[torch.Tensor] = field(default_factory=list, init=False)
    _logits: list[torch.Tensor] = field(default_factory=list, init=False)
    _stats: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lens = self.caps

    @property
    def num_drawn(self) -> int:
        """The number of positions for which tokens were drawn so far."""
        return sum(tokens.shape[1] for tokens in self._tokens)

    @property
    def is_over(self) -> bool:
        """True when no sequence takes another token. On CUDA, this is True only after K tokens: the
        host does not read the lengths, because it would have to wait for the device."""
        step = self.num_drawn
        return step >= self.k or (not self.lens.is_cuda and not bool((self.lens > step).any()))

    def draw(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Draw the next token of each sequence, int64 [B], from `logits` [B, V']; see
        `draw_all`."""
        return self.draw_all(logits[:, None], ids)[:, 0]

    def draw_all(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Draw the tokens of the next N positions, each from its own row of `logits`. Returns their
        ids in the target's vocabulary, int64 [B, N]. An id is -1 if its logits are not finite;
        verification reports this.

        logits: [B, N, V' or more]. Columns past the target's vocabulary are dropped. N is K if a
            whole block of proposals is drawn at once.
        ids: int64 [V'], the target's id of each column, all different; None if the columns are
            already the target's ids.

        Raises `ValueError` for logits of another number of sequences, or of more positions than are
        left.
        """
        step, shape = self.num_drawn, logits.shape[:2]
        if logits.dim() != 3 or len(logits) != len(self.caps) or shape[1] > self.k - step:
            told = f"for {len(self.caps)} sequences and at most {self.k - step} more positions"
            raise ValueError(f"logits to draw from should be {told}, but are {list(logits.shape)}")
        if ids is not None and not (self.params.is_greedy and self.texts is None):
            # Verification and logits processors index logits by the target's ids.
            logits, ids = by_target_ids(logits, ids, self.vocab_size), None
        logits = self.changed(logits[..., : self.vocab_size])
        rows = logits.flatten(0, 1)
        stats = None if self.params.is_greedy else softmax_stats(rows, self.params)
        noise = None if self.noise is None else self.noise[:, step : step + shape[1]].flatten()
        tokens = columns = draw(rows, stats, self.params, noise)
        if ids is not None:
            tokens = torch.where(columns < 0, columns, ids[columns.clamp(min=0)])
        self._tokens.append(tokens.view(shape))
        if self.keeps_dist and not self.params.is_greedy:
            self._logits.append(logits)
            if stats is not None:
                self._stats.append(stats.rows.unflatten(0, shape))
        if self.stop is not None:
            self.end_before(self.stop(columns, rows).view(shape), step + 1)
        return self._tokens[-1]

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the logits processors, if any, to the logits of the next N positions, [B, N, V'].
        Columns are the target's ids."""
        if self.texts is None:
            return logits
        drawn = _joined(self._tokens) if self._tokens else self.caps.new_zeros(len(logits), 0)
        return self.texts.after_all(logits, drawn)

    def end_before(self, stops: torch.Tensor, first: int = 0) -> None:
        """End each sequence's proposals before the first position marked in `stops`, bool [B, N].

        first: the position of the first column of `stops`. A mark may depend only on facts known
        before the token at its position is drawn. Dropping a token because of its drawn value would
        change the distribution of the output.
        """
        left = torch.arange(first, first + stops.shape[1], device=stops.device)
        self.lens = torch.minimum(self.lens, torch.where(stops, left, self.k).amin(dim=1))

    def end_after(self, stops: torch.Tensor) -> None:
        """End proposals after the first position marked in `stops`, bool [B, K]. A mark must not
        depend on later tokens."""
        self.end_before(stops, 1)

    def candidates(self) -> Candidates:
        """Return the proposals drawn so far, padded to K positions."""
        rest = self.k - self.num_drawn  # 0 for built-in methods on CUDA, which draw K tokens
        # Padding is no proposal: it was not drawn from the distribution in its row of `q`.
        lens = self.lens.clamp(max=self.num_drawn) if rest else self.lens
        if not self._tokens:
            return Candidates(self.nothing().token_ids, lens)
        token_ids = torch.nn.functional.pad(_joined(self._tokens), (0, rest))
        q = None
        if self._logits:
            stats = _joined(self._stats) if self._stats else None
            logits = _joined(self._logits)
            if rest:
                logits = torch.nn.functional.pad(logits, (0, 0, 0, rest))
            q = TokenDist(logits, stats)
        return Candidates(token_ids, lens, q)

    def nothing(self) -> Candidates:
        """Return placeholder ids for K positions, with `caps` as lengths. Ranks that take no part
        in drafting use them."""
        return Candidates(self.caps.new_zeros(len(self.caps), self.k), self.caps)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Join tensors of consecutive positions into one tensor of all positions, [B, N, ...]."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
