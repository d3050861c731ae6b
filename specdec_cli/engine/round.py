"""One round on the state of a batch: propose, score, decide, commit.

During a round, the host neither reads results nor decides anything, so a round can be captured as
one CUDA graph. On a CPU it runs eagerly. This module works with any proposer, acceptance rule and
length policy.

If a sequence had n tokens before a round that accepts a proposals, it has n + a + 1 tokens after
it, of which n + a are in the target's cache. Legend: B slots, K proposal length.
"""

from dataclasses import dataclass, replace

import torch
from specdec_kernels import ops

from specdec_cli.acceptance.base import AcceptanceRule, draw_next
from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.figures import STAGES
from specdec_cli.core.logits_processors import LogitsProcessors, TextsBefore
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.sampling import round_noise
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.methods.base import Proposer
from specdec_cli.models.paged import PagedModel

# The stage that ends at each time stamp after the first. Some stamps are not taken: those after
# broadcasts if there is one rank, and the one after `commit` if the proposer has no `commit`. The
# last stamp is taken after the state has been updated.
STAMPED = ("draft", "broadcast", "verify", "sample", "broadcast", "commit", "sample")
NUM_STAMPS = len(STAMPED) + 1


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The models and settings that all rounds of a run use on this rank.

    proposer: proposes tokens; None if the run proposes nothing.
    max_model_len: the maximum number of tokens of a sequence.
    eos_ids: int64 [E], the token ids that end a sequence.
    parallel: the ranks of the target. Rank 0 proposes and decides.
    processors: the target's logits processors; None if logits are not processed.
    """

    target: PagedModel
    proposer: Proposer | None
    rule: AcceptanceRule
    policy: LengthPolicy
    params: SamplingParams
    max_model_len: int
    eos_ids: torch.Tensor
    parallel: TensorParallel
    processors: LogitsProcessors | None = None


@dataclass(slots=True, eq=False)
class RoundRecord:
    """The results of a round that the host reads. They are in one tensor, so that a single copy
    to the host is enough.

    flat: int64 [B * (K + 3) + NUM_STAMPS + 1]. The properties below are views of its parts.
    """

    flat: torch.Tensor
    batch_size: int
    k: int

    @classmethod
    def empty(cls, batch_size: int, k: int, device: torch.device) -> "RoundRecord":
        count = batch_size * (k + 3) + NUM_STAMPS + 1
        return cls(torch.zeros(count, dtype=torch.int64, device=device), batch_size, k)

    @property
    def rows(self) -> torch.Tensor:
        """[B, K + 3]. The row of a slot has K + 1 tokens, the number of accepted proposals, and the
        number of proposals."""
        return self.flat[: -NUM_STAMPS - 1].view(self.batch_size, self.k + 3)

    @property
    def stamps(self) -> torch.Tensor:
        """[NUM_STAMPS], times in nanoseconds on the device's clock; 0 if a stamp was not taken."""
        return self.flat[-NUM_STAMPS - 1 : -1]

    @property
    def experts_read(self) -> torch.Tensor:
        """[1], the number of distinct experts whose weights the target's pass read, summed over
        layers; 0 if experts are not counted."""
        return self.flat[-1:]

    def stage_ms(self) -> dict[str, float]:
        """Return the milliseconds that each stage took. Call this on the host's copy."""
        times: list[int] = self.stamps.tolist()
        spent = dict.fromkeys(STAGES, 0.0)
        last = times[0]
        for stage, time in zip(STAMPED, times[1:], strict=True):
            if time:
                spent[stage] += (time - last) / 1e6
                last = time
        return spent


def run_round(parts: RoundParts, state: BatchState, k: int, record: RoundRecord) -> None:
    """Run one round with K = k for all slots. This advances `state` and fills `record`."""
    stamps, is_alone, proposer = record.stamps, parts.parallel.size == 1, parts.proposer
    commits = proposer is not None and proposer.takes_decisions
    ops.stamp(stamps, 0)
    noise = _noise(parts, state, k)
    texts = None if parts.processors is None else parts.processors.at(state)
    candidates = _propose(parts, state, k, noise, texts)
    ops.stamp(stamps, 1)
    if not is_alone:
        candidates = candidates.agreed(parts.parallel)
        ops.stamp(stamps, 2)
    target = _score(parts, state, candidates)
    ops.stamp(stamps, 3)
    if texts is not None and parts.parallel.is_first:
        target = replace(target, logits=texts.after_each(target.logits, candidates.token_ids))
    verdict = _decide(parts, candidates, target, noise)
    if commits or not is_alone:
        ops.stamp(stamps, 4)
    if not is_alone:
        verdict = verdict.agreed(parts.parallel)
        ops.stamp(stamps, 5)
    if proposer is not None and commits:
        proposer.commit(state, verdict, target)
        ops.stamp(stamps, 6)
    if parts.processors is not None:
        parts.processors.take_in(state, verdict)
    ops.advance(
        verdict.token_ids,
        verdict.num_accepted,
        candidates.lens,
        state.tail,
        state.length,
        state.limit,
        state.active,
        parts.eos_ids,
        record.rows,
        *((state.texts.tokens, state.row) if state.texts is not None else ()),
    )
    if (mixtures := parts.target.mixtures) is not None:
        torch.sum(mixtures.experts_read, 0, True, dtype=torch.int64, out=record.experts_read)
    ops.stamp(stamps, NUM_STAMPS - 1)


def proposal_caps(parts: RoundParts, state: BatchState, k: int) -> torch.Tensor:
    """Return the maximum number of tokens that each slot may propose, int64 [B]. It is at most k,
    at most `Sequence.room`, and 0 for inactive slots. The length policy may lower it further."""
    if k == 0 or parts.proposer is None:
        return torch.zeros_like(state.length)
    room = (state.limit - 1).clamp_(max=min(parts.proposer.max_len, parts.max_model_len))
    return parts.policy.caps(state, room.sub_(state.length).clamp_(0, k).mul_(state.active))


def _noise(parts: RoundParts, state: BatchState, k: int) -> Noise | None:
    """Return the round's uniform random numbers, or None if the round draws nothing."""
    if parts.params.is_greedy and not (k and parts.rule.draws_when_greedy):
        return None
    by_round = k > 0 and parts.rule.looks_ahead
    return round_noise(state.seed, state.index, state.length, k, by_round=by_round)


def _propose(
    parts: RoundParts, state: BatchState, k: int, noise: Noise | None, texts: TextsBefore | None
) -> Candidates:
    drafting = Drafting(
        k=k,
        params=parts.params,
        caps=proposal_caps(parts, state, k),
        vocab_size=parts.target.vocab_size,
        noise=None if noise is None else noise.draft,
        keeps_dist=parts.parallel.is_first,
        stop=parts.policy.stop,
        doubt=parts.policy.doubt,
        texts=texts,
    )
    if k == 0 or parts.proposer is None:
        return drafting.nothing()
    return parts.proposer.propose(state, drafting)


def _score(parts: RoundParts, state: BatchState, candidates: Candidates) -> TargetOutput:
    """Run the target's pass over the last token and the proposals of every slot."""
    fed = torch.cat((state.tail[:, -1:], candidates.token_ids), dim=1)
    what = Rectangle(fed, candidates.lens, -1, 1, parts.max_model_len, last_only=False)
    reads = parts.proposer is not None and bool(parts.proposer.feature_layers)
    return TargetOutput(*parts.target.forward_slots(what, state, with_hidden=reads))


def _decide(
    parts: RoundParts, candidates: Candidates, target: TargetOutput, noise: Noise | None
) -> Verdict:
    """Decide which proposals are accepted, on rank 0. On other ranks return tensors of the same
    shapes, which then receive rank 0's decision."""
    k = candidates.token_ids.shape[1]
    if not parts.parallel.is_first:
        lens = candidates.lens
        return Verdict(lens.new_zeros(len(lens), k + 1), lens)
    if k == 0:
        return draw_next(target, parts.params, noise)
    return parts.rule.decide(candidates, target, parts.params, noise)
