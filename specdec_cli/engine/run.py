"""Tracks the sequences of a run from arrival to finish. Only this module appends tokens to a
sequence."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from specdec_cli.core.detokenize import StopFinder
from specdec_cli.core.types import Emission, Request, SamplingParams, Sequence
from specdec_cli.engine.graphs import Outcome, Rounds
from specdec_cli.engine.prefill import Prefill
from specdec_cli.engine.scheduler import Scheduler
from specdec_cli.errors import NotFiniteError
from specdec_cli.lengths.base import LastRounds


@dataclass(slots=True)
class Run:
    """The state of one run over a list of prompts. `Engine.step` advances it.

    k: the maximum number of proposals per round.
    vocab_size: the number of the target's token ids.
    eos_ids: the token ids that end a sequence.
    by_slots: one `Rounds` for each available number of slots, in ascending order.
    rounds: the entry of `by_slots` that is in use.
    to_come: requests that have not arrived yet, in order of arrival. They are read one at a time,
        as needed.
    refused: sequences that cannot run, kept until they are reported.
    """

    k: int
    params: SamplingParams
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    scheduler: Scheduler
    prefill: Prefill
    by_slots: tuple[Rounds, ...]
    rounds: Rounds
    started_at: float  # host clock, seconds
    last: LastRounds = field(default_factory=LastRounds)
    seqs: list[Sequence] = field(default_factory=list)
    stop_finders: dict[Sequence, StopFinder] = field(default_factory=dict)
    to_come: Iterator[Request] = field(default_factory=lambda: iter(()))
    refused: list[Sequence] = field(default_factory=list)

    def rounds_for(self, count: int) -> Rounds:
        """Return the rounds with the fewest slots that fit `count` sequences."""
        return next(r for r in self.by_slots if r.num_slots >= count)

    def look_ahead(self, place: int) -> bool:
        """Return whether `pending[place]` exists, that is, whether more than `place` requests have
        yet to arrive. This reads requests from `to_come` into `pending` as needed."""
        pending = self.scheduler.pending
        while len(pending) <= place and (request := next(self.to_come, None)) is not None:
            self.add(request, is_here=False)
        return len(pending) > place

    def add(self, request: Request, *, is_here: bool) -> None:
        """Queue a request, or refuse one that cannot run."""
        length = len(request.token_ids)
        seq = Sequence(
            index=request.index,
            tokens=list(request.token_ids),
            num_prompt_tokens=length,
            max_tokens=min(length + self.params.max_new_tokens, self.max_model_len),
            arrived_at=self.started_at + request.arrives_at,
        )
        self.seqs.append(seq)
        try:
            if length == 0:
                raise ValueError("the prompt has no tokens")
            least, most = min(seq.tokens), max(seq.tokens)
            if least < 0 or most >= self.vocab_size:
                raise ValueError(
                    f"the prompt contains token id {least if least < 0 else most}, but the "
                    f"vocabulary has ids 0 to {self.vocab_size - 1}"
                )
            if length >= self.max_model_len:
                raise ValueError(
                    f"the prompt has {length} tokens; with at least one new token it exceeds "
                    f"the model length of {self.max_model_len}"
                )
            self.scheduler.add(seq, is_here=is_here)
        except ValueError as problem:
            seq.finish_reason, seq.error = "error", str(problem)
            self.refused.append(seq)
            return
        if request.stop_finder is not None:
            self.stop_finders[seq] = request.stop_finder()

    def admit(self, now: float) -> None:
        """Start waiting sequences while there are free slots and blocks."""
        for seq in self.scheduler.admit():
            if seq.admitted_at is None:
                seq.admitted_at, seq.queued_seconds = now, now - seq.arrived_at

    def load(self) -> None:
        """Reserve blocks for the running sequences and assign the sequences to slots. If prefill
        has drawn tokens that the host has not read yet, append those tokens on the device."""
        drawn = self.prefill.drawn
        if drawn is not None:
            self.scheduler.extend_ahead(1)
        seqs = self.scheduler.reserve()
        self.rounds = self.rounds_for(len(seqs))
        self.rounds.load(seqs, self.params.seed)
        if drawn is not None:
            self.rounds.append(drawn.seqs, drawn.on_device)

    def take(self, decided: list[tuple[Sequence, int]]) -> list[Emission]:
        """Append the tokens that prefill passes decided. Each token counts as a round without
        proposals, but the time of the prefill pass is not added to the time spent in rounds."""
        ended_at = self.prefill.ended_at
        self.rounds.begin_after(ended_at)
        check_finite([token for _, token in decided])
        for seq, _ in decided:
            seq.rounds_without_proposal += 1
            seq.num_tokens_from_prefill += 1
        return [self.append(seq, [token], 0, ended_at) for seq, token in decided]

    def apply(self, done: Outcome, live: list[int]) -> list[Emission]:
        """Append a round's tokens to the sequences in the `live` slots, update how many tokens the
        target's and the draft's caches hold, and add the round's time and counts to each sequence's
        totals."""
        self.last.trials.append([(done.lens[b], done.accepted[b]) for b in live])
        emissions, proposer = [], self.prefill.proposer
        for seq, k, accepted, row in (
            (done.seqs[b], done.lens[b], done.accepted[b], done.tokens[b]) for b in live
        ):
            tokens = row[: accepted + 1]
            n = len(seq.tokens)
            seq.target_kv = n + accepted
            if k and proposer is not None:
                seq.draft_kv = proposer.kv_after(n, k, accepted)
            emission = self.append(seq, tokens, accepted, done.read_at)
            emissions.append(emission)
            if k:
                seq.proposed_per_round.append(k)
                seq.accepted_per_round.append(emission.num_accepted)
            else:
                seq.rounds_without_proposal += 1
            seq.decode_seconds += done.seconds / len(live)
            seq.round_share += 1 / len(live)
            for stage, spent in done.stage_ms.items():
                seq.stage_ms[stage] = seq.stage_ms.get(stage, 0.0) + spent / len(live)
            if done.distinct_experts is not None:
                share = done.distinct_experts / len(live)
                seq.experts_share = (seq.experts_share or 0.0) + share
        return emissions

    def append(self, seq: Sequence, tokens: list[int], accepted: int, at: float) -> Emission:
        """Append tokens to a sequence. Then finish the sequence if they end it. Otherwise trim its
        blocks, unless the host launches rounds before it has read the previous ones.

        accepted: how many of the tokens were proposals.
        at: when the host read the tokens, in seconds on the host's clock.
        """
        keep = self._finish_reason(seq, tokens)
        seq.tokens.extend(tokens[:keep])
        seq.first_token_at = seq.first_token_at or at
        if seq.finish_reason is not None:
            seq.finished_at = at
            self.scheduler.finish(seq)
            if seq.finish_reason == "stop" and self.rounds.in_flight:
                # The device does not check stop strings, so it would continue this sequence. Stop
                # its slot on the device, because other sequences may now get its blocks.
                self.rounds.stop(seq)
        elif not self.rounds.runs_ahead:
            self.scheduler.trim(seq)
        return Emission(seq, tokens[:keep], min(accepted, keep))

    def _finish_reason(self, seq: Sequence, tokens: list[int]) -> int:
        """Set the sequence's finish reason if `tokens` end it. Return how many tokens to keep."""
        keep = len(tokens)
        for count, token in enumerate(tokens, start=1):
            if token in self.eos_ids:
                keep, seq.finish_reason = count, "eos"
                break
        finder = self.stop_finders.get(seq)
        if finder is not None and (found := finder.feed(tokens[:keep])) is not None:
            keep, seq.finish_reason = found, "stop"
        if seq.finish_reason is None and len(seq.tokens) + keep >= seq.max_tokens:
            seq.finish_reason = "length"
        return keep


def check_finite(counts: list[int]) -> None:
    """Raise `NotFiniteError` if any value is negative. The device writes a negative value in place
    of a token or a count if the logits are not finite: -1 for the target's logits, -2 for the
    draft's."""
    if (worst := min(counts, default=0)) < 0:
        raise NotFiniteError(
            f"the {'draft' if worst == -2 else 'target'} produced logits that are not finite "
            "(NaN or infinity)",
            "try another dtype (float32 or bfloat16), or check the checkpoint",
        )
