"""One round as tensor operations alone: propose, score, decide, advance, with nothing for the host
to read or choose, so that it can be captured as a CUDA graph.

The shapes are fixed: every slot feeds two tokens, then k - 1 single ones to the draft, and k + 1
to the target. What a sequence does not use is padding: its keys and values go to the trash block,
and its logits are not looked at. Computes what `Engine.step` computes with ragged passes.
Legend: B slots, K proposal length, V vocabulary of the target, n tokens of a sequence.
"""

from dataclasses import dataclass

import torch
from specdec_kernels import ops

from specdec_cli.acceptance.rejection import decision
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.sampling import Purpose
from specdec_cli.core.state import Slots
from specdec_cli.core.types import RoundNoise, SamplingParams
from specdec_cli.engine.target import TargetScorer
from specdec_cli.methods.draft_model import DraftWorker

# What ends at each stamp after the first. With one rank nothing is sent, and the stamps that would
# tell are left out.
STAMPED = ("draft", "broadcast", "verify", "sample", "broadcast", "sample")
NUM_STAMPS = len(STAMPED) + 1


@dataclass(frozen=True, slots=True)
class RoundRule:
    """What is the same in every round of a run.

    draft_max_len: the draft's context length. max_model_len: the target's. eos_ids: int64 [E],
    the ids that end a sequence; empty where they are ignored.
    rates: fp32 [K], for each place the chance of acceptance after those before it, or None for
    rejection sampling. ngram: the longest and the shortest suffix to look up, where proposals are
    n-grams.
    """

    k: int
    params: SamplingParams
    draft_max_len: int
    max_model_len: int
    eos_ids: torch.Tensor
    rates: torch.Tensor | None
    ngram: tuple[int, int] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    @property
    def filters(self) -> tuple[float, int, float]:
        """Temperature, top-k and top-p."""
        return self.params.temperature, self.params.top_k, self.params.top_p


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """What proposals were drawn from; probabilities are never stored.

    logits: [B, K, V'], V' at most V. rows: fp32 [B, K, 4], see `ops.logit_rows`.
    """

    logits: torch.Tensor
    rows: torch.Tensor


@dataclass(slots=True, eq=False)
class Record:
    """What a round leaves for the host, in one tensor so that one copy brings it.

    flat: int64 [B * (K + 3) + NUM_STAMPS].
    """

    flat: torch.Tensor
    batch_size: int
    k: int

    @classmethod
    def empty(cls, batch_size: int, k: int, device: torch.device) -> "Record":
        count = batch_size * (k + 3) + NUM_STAMPS
        return cls(torch.zeros(count, dtype=torch.int64, device=device), batch_size, k)

    @property
    def rows(self) -> torch.Tensor:
        """[B, K + 3]: the K + 1 tokens, how many proposals were accepted, how many there were."""
        return self.flat[:-NUM_STAMPS].view(self.batch_size, self.k + 3)

    @property
    def stamps(self) -> torch.Tensor:
        """[NUM_STAMPS] nanoseconds on the device's clock; 0 where none was taken."""
        return self.flat[-NUM_STAMPS:]

    def stage_ms(self) -> dict[str, float]:
        """How long each stage took; read on the host."""
        times: list[int] = self.stamps.tolist()
        spent = dict.fromkeys(STAMPED, 0.0)
        last = times[0]
        for stage, time in zip(STAMPED, times[1:], strict=True):
            if time:
                spent[stage] += (time - last) / 1e6
                last = time
        return spent


def padded_round(
    slots: Slots,
    draft: DraftWorker | None,
    target: TargetScorer,
    rule: RoundRule,
    record: Record,
    parallel: TensorParallel,
) -> None:
    """Run one round of every slot, moving `slots` on and filling `record`.

    parallel: the target's ranks, each of which runs this. What is proposed and what is decided is
    rank 0's. draft: None where this rank holds no part of it.
    """
    ops.stamp(record.stamps, 0)
    noise = _noise(slots, rule)
    proposed, lens, drawn_from = _propose(slots, draft, proposal_lens(slots, rule), rule, noise)
    ops.stamp(record.stamps, 1)
    if parallel.size > 1:
        parallel.broadcast(proposed)
        ops.stamp(record.stamps, 2)
    logits = _score(slots, target, proposed, lens, rule)
    ops.stamp(record.stamps, 3)
    if parallel.is_first:
        decided = _decide(proposed, drawn_from, logits, lens, rule, noise)
    else:
        decided = (lens.new_zeros(len(lens), rule.k + 1), lens)
    tokens, accepted = decided if parallel.size == 1 else _agreed(*decided, record, parallel)
    ops.advance(
        tokens,
        accepted,
        lens,
        slots.tail,
        slots.length,
        slots.limit,
        slots.active,
        rule.eos_ids,
        record.rows,
        *((slots.history.tokens, slots.row) if slots.history is not None else ()),
    )
    ops.stamp(record.stamps, 6)


def _agreed(
    tokens: torch.Tensor, accepted: torch.Tensor, record: Record, parallel: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 0's decision: tokens [B, K + 1] and accepted [B], int64."""
    ops.stamp(record.stamps, 4)
    decided = parallel.broadcast(decision(tokens, accepted))
    ops.stamp(record.stamps, 5)
    return decided[:, :-1].contiguous(), decided[:, -1].contiguous()


def proposal_lens(slots: Slots, rule: RoundRule) -> torch.Tensor:
    """The most that each slot may propose, int64 [B]; see `Sequence.room`."""
    room = (slots.limit - 1).clamp(max=rule.draft_max_len) - slots.length
    return room.clamp(0, rule.k) * slots.active


def _noise(slots: Slots, rule: RoundRule) -> RoundNoise | None:
    """The round's uniform numbers; None when nothing is drawn."""
    if rule.is_greedy and rule.rates is None:
        return None
    noise = ops.uniform_rows(slots.seed, slots.index, slots.length, len(Purpose), rule.k + 1)
    return RoundNoise(
        draft=noise[Purpose.DRAFT, :, : rule.k],
        accept=noise[Purpose.ACCEPT, :, : rule.k],
        sample=noise[Purpose.SAMPLE],
    )


def _propose(
    slots: Slots,
    draft: DraftWorker | None,
    lens: torch.Tensor,
    rule: RoundRule,
    noise: RoundNoise | None,
) -> tuple[torch.Tensor, torch.Tensor, DraftLogits | None]:
    """K tokens a slot, int64 [B, K] (-1 where logits are not finite), k_i of each, int64 [B], and
    what they were drawn from: nothing where decoding is greedy, or they were looked up.

    lens: as many as there may be; a draft model proposes all of them.

    The first pass feeds the last two tokens: the draft's cache lacks one of them, or both after a
    round whose proposals were all accepted. To write a key again changes nothing.
    """
    if rule.ngram is not None and slots.history is not None:
        texts = (slots.history.tokens, slots.row, slots.length)
        return *ops.ngram_lookup(*texts, lens, *rule.ngram, rule.k), None
    if rule.k == 0 or draft is None:
        return slots.tail.new_zeros(len(slots.tail), rule.k), lens, None
    tokens: list[torch.Tensor] = []
    drawn_from: list[torch.Tensor] = []
    stats: list[torch.Tensor] = []
    for step in range(rule.k):
        logits = draft.model.forward_padded(
            slots.tail if step == 0 else tokens[-1][:, None],
            slots,
            lens,
            offset=step - 1 if step else -2,
            margin=2,
            max_len=rule.draft_max_len,
            last_only=True,
        ).logits[:, 0, : draft.target_vocab]
        if rule.is_greedy:
            tokens.append(greedy_pick(logits))
        else:
            assert noise is not None
            rows = ops.logit_rows(logits, *rule.filters)
            tokens.append(ops.sample_logits(logits, rows, *rule.filters, noise.draft[:, step]))
            if draft.parallel.is_first:  # only rank 0 verifies
                drawn_from.append(logits)
                stats.append(rows.rows)
    proposed = torch.stack(tokens, dim=1)
    if not drawn_from:
        return proposed, lens, None
    return proposed, lens, DraftLogits(torch.stack(drawn_from, dim=1), torch.stack(stats, dim=1))


def _score(
    slots: Slots,
    target: TargetScorer,
    proposed: torch.Tensor,
    lens: torch.Tensor,
    rule: RoundRule,
) -> torch.Tensor:
    """The target's logits after the last token and after each proposal, [B, K + 1, V]."""
    return target.model.forward_padded(
        torch.cat((slots.tail[:, 1:], proposed), dim=1),
        slots,
        lens,
        offset=-1,
        margin=1,
        max_len=rule.max_model_len,
        last_only=False,
    ).logits


def _decide(
    proposed: torch.Tensor,
    draft: DraftLogits | None,
    logits: torch.Tensor,
    lens: torch.Tensor,
    rule: RoundRule,
    noise: RoundNoise | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, K + 1] that the round decided and how many proposals [B] were accepted, int64.

    What lies past the accepted proposals and one more token has no meaning. accepted is -1 where
    the target's logits are not finite, -2 where the draft's are not.
    """
    if rule.is_greedy:
        best = greedy_pick(logits)
        accept_noise = None if noise is None else noise.accept
        return ops.accept(proposed, best, lens, accept_noise, rule.rates)
    assert noise is not None
    flat = logits.flatten(0, 1)
    rows = ops.logit_rows(flat, *rule.filters)
    if rule.rates is not None:
        best = ops.sample_logits(flat, rows, *rule.filters, noise.sample.flatten())
        return ops.accept(proposed, best.view(logits.shape[:2]), lens, noise.accept, rule.rates)
    if rule.k == 0:
        tokens = ops.sample_logits(flat, rows, *rule.filters, noise.sample[:, 0])
        return tokens[:, None], tokens.clamp(max=0)
    return ops.reject_logits(
        proposed,
        lens,
        draft.logits if draft is not None else None,  # looked up, not drawn
        draft.rows if draft is not None else None,
        logits,
        rows,
        *rule.filters,
        noise.accept,
        noise.sample,
    )


def greedy_pick(logits: torch.Tensor) -> torch.Tensor:
    """`ops.greedy_argmax` of each row of `logits` [..., V]: int64 [...]."""
    return ops.greedy_argmax(logits.flatten(0, -2)).view(logits.shape[:-1])
