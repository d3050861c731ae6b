"""Logits processors: a repetition penalty, suppressed ids, and a minimum text length. They give the
same results as the corresponding logits processors of transformers.

In a round, each row of logits follows its own text: the sequence and the proposals before the row's
position. Draft logits are processed in the same way. Everything is a tensor operation, so CUDA
graphs can capture it. Legend: B sequences, N rows of logits per sequence, V vocabulary of the
target, V' of the draft, at most V.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from specdec_cli.core.candidates import Verdict
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class LogitsProcessors:
    """The logits processors of a run, on one device.

    penalty: the repetition penalty, for ids that the text already contains. It divides positive
    logits and multiplies others (Keskar et al., "CTRL", arXiv 1909.05858); 1 changes nothing.
    suppressed: bool [V], ids that are never drawn. ends: bool [V], ids that are not drawn before
    min_new_tokens output tokens.
    """

    penalty: float
    suppressed: Tensor
    ends: Tensor
    min_new_tokens: int

    @classmethod
    def of(
        cls, params: SamplingParams, eos_ids: Iterable[int], vocab_size: int, device: torch.device
    ) -> Self | None:
        """Make the processors of a run. Returns None if its parameters ask for none. Raises
        `UsageError` for suppressed ids that the vocabulary does not have."""
        if not params.changes_logits:
            return None
        if outside := [i for i in params.suppress_tokens if not 0 <= i < vocab_size]:
            raise UsageError(
                f"suppress_tokens: {outside[0]} is not a token id of the target, whose vocabulary "
                f"has {vocab_size} ids"
            )
        suppressed, ends = torch.zeros(2, vocab_size, dtype=torch.bool)
        suppressed[list(params.suppress_tokens)] = True
        ends[[i for i in eos_ids if i < vocab_size]] = True
        where = suppressed.to(device), ends.to(device)
        return cls(params.repetition_penalty, *where, params.min_new_tokens)

    @property
    def reads_text(self) -> bool:
        return self.penalty != 1.0

    def at(self, state: BatchState) -> "TextsBefore":
        """Return the text of each slot in `state`, to process the logits of the round that begins
        now."""
        seen = None
        if self.reads_text:
            assert state.texts is not None and state.texts.seen is not None
            seen = state.texts.seen[state.row]
        return TextsBefore(self, seen, state.length - state.prompt)

    def of_text(self, tokens: Values[int], num_prompt: int) -> "TextsBefore":
        """Return `tokens` as the text so far of a batch of one sequence. num_prompt: the number of
        prompt tokens, with which `tokens` begins."""
        device = self.suppressed.device
        seen = torch.zeros(1, len(self.suppressed) + 1, dtype=torch.bool, device=device)
        seen[:, torch.tensor(tokens, dtype=torch.int64, device=device)] = True
        return TextsBefore(self, seen, torch.tensor([len(tokens) - num_prompt], device=device))

    def take_in(self, state: BatchState, verdict: Verdict) -> None:
        """Mark the tokens that a round decided as seen. Call it before `state` advances."""
        if not self.reads_text:
            return
        assert state.texts is not None and state.texts.seen is not None
        seen, tokens = state.texts.seen, verdict.token_ids
        none = seen.shape[1] - 1
        place = torch.arange(tokens.shape[1], device=tokens.device)
        counts = (place <= verdict.num_accepted[:, None]) & state.active[:, None]
        marked = torch.where(counts, tokens.clamp(0, none), none)
        at = state.row[:, None] * seen.shape[1] + marked
        seen.view(-1).index_fill_(0, at.view(-1), True)


@dataclass(frozen=True, slots=True, eq=False)
class TextsBefore:
    """The text of each of B sequences up to the logits that are to be processed.

    seen: bool [B, V + 1], True for ids that the text contains; the last column is not used. It may
    be None without a repetition penalty, because only the penalty reads it.
    num_new: int64 [B], the number of output tokens in each text.
    """

    processors: LogitsProcessors
    seen: Tensor | None
    num_new: Tensor

    def after_each(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Process logits [B, N, V'], where row i follows the text and `tokens[:, :i]`. Returns
        fp32. tokens: int64 [B, N - 1 or more]."""
        rows = range(logits.shape[1])
        seen = None
        if self.processors.reads_text:
            seen = torch.stack([self._seen_with(tokens[:, :i]) for i in rows], dim=1)
        return self._changed(logits, seen, 0)

    def after_all(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Process logits [B, N, V'] for the N positions after the text and `tokens`, int64 [B, S].
        Returns fp32.

        The tokens of all N positions are drawn at once. So the penalty counts the text and `tokens`
        in every row, but none of the N tokens.
        """
        seen = self._seen_with(tokens)[:, None] if self.processors.reads_text else None
        return self._changed(logits, seen, tokens.shape[1])

    def _seen_with(self, tokens: Tensor) -> Tensor:
        assert self.seen is not None
        return self.seen.scatter(1, tokens.clamp(0, self.seen.shape[1] - 1), True)

    def _changed(self, logits: Tensor, seen: Tensor | None, first: int) -> Tensor:
        """Apply all processors to logits [B, N, V']. Returns fp32.

        seen: bool [B, N or 1, V + 1], True for the ids that occur before the row; None if there is
        no penalty.
        first: the number of tokens between the end of each text and the first row.
        """
        how, (_, rows, width) = self.processors, logits.shape
        found, never = logits.float(), how.suppressed[:width]
        if seen is not None:
            penalised = torch.where(found < 0, found * how.penalty, found / how.penalty)
            found = torch.where(seen[..., :width], penalised, found)
        if how.min_new_tokens:
            place = torch.arange(first, first + rows, device=logits.device)
            is_early = self.num_new[:, None] + place < how.min_new_tokens
            never = never | (how.ends[:width] & is_early[..., None])
        return found.masked_fill(never, float("-inf"))
