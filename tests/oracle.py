"""The round, written a second time: ragged passes over sequences, with everything on the host.

It shares the models' passes over spans, the random numbers and `to_probs` with the product. Its
proposing, scoring and verification are separate, and work on probabilities. `with_oracle` makes an
engine with these rounds. Legend: B sequences, K longest proposal of a round, V vocabulary.
"""

import time
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from specdec_kernels.sampling.reference import (
    rejection_sample_reference,
    sample_categorical_reference,
)

from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.batch import Span
from specdec_cli.core.candidates import Noise
from specdec_cli.core.figures import STAGES
from specdec_cli.core.sampling import greedy_pick, round_noise, to_probs
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.engine.graphs import Outcome
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.round import RoundParts
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.methods.ngram import Ngram
from specdec_cli.models.paged import PagedModel


@dataclass(frozen=True)
class Proposal:
    """token_ids: int64 [B, K]. lens: k_i. probs: fp32 [B, K, V], rows past k_i are zero."""

    token_ids: torch.Tensor
    lens: list[int]
    probs: torch.Tensor


@dataclass(frozen=True)
class Decision:
    """The input of a rule; tests may plant a rule of their own, see `RaggedRounds.decide`."""

    proposal: Proposal
    target_probs: torch.Tensor  # fp32 [B, K + 1, V]
    noise: Noise


def extended(seq: Sequence, more: list[int]) -> Sequence:
    """A stand-in for `seq` with more tokens, over the same blocks."""
    return Sequence(seq.index, seq.tokens + more, 0, 0, seq.block_table)


def fit(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    more = vocab - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, more), value=float("-inf"))


class NgramIndex:
    """Index of a growing list of tokens: the first place of each n-gram with a token after it."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._first: dict[tuple[int, ...], int] = {}  # n-gram: position of the token after it
        self._entered = 0  # tokens seen so far

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest suffix of `tokens` that occurred before.

        The first of several occurrences counts. tokens: those of the previous call and more.
        """
        for follower in range(max(1, self._entered), len(tokens)):
            for n in self._sizes:
                if n <= follower:
                    self._first.setdefault(tuple(tokens[follower - n : follower]), follower)
        self._entered = len(tokens)
        for n in self._sizes:
            start = self._first.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + count]
        return []


def draft_tokens(
    model: PagedModel, seqs: list[Sequence], lens: list[int], noise: Noise, parts: RoundParts
) -> Proposal:
    """Draw proposals. The first pass feeds `tokens[draft_kv:]`, each further one the last draw."""
    k, vocab, params = max(lens), parts.target.vocab_size, parts.params
    token_ids = torch.zeros(len(seqs), k, dtype=torch.int64, device=model.device)
    probs = torch.zeros(len(seqs), k, vocab, device=model.device)
    for step in range(k):
        active = [b for b, n in enumerate(lens) if n > step]
        spans = []
        for b in active:
            drawn = token_ids[b, :step].clamp(min=0).tolist()
            start = seqs[b].draft_kv if step == 0 else len(seqs[b].tokens) + step - 1
            longer = extended(seqs[b], drawn)
            spans.append(Span(longer, start, len(longer.tokens)))
        logits = fit(model.forward(spans, [1] * len(active)).logits, vocab)
        if params.is_greedy:
            token_ids[active, step] = greedy_pick(logits)
            continue
        probs[active, step] = q = to_probs(logits, params)
        token_ids[active, step] = sample_categorical_reference(q, noise.draft[active, step])
    return Proposal(token_ids, lens, probs)


def look_up(
    indices: dict[Sequence, NgramIndex], seqs: list[Sequence], lens: list[int], parts: RoundParts
) -> Proposal:
    found = [indices[s].continuation(s.tokens, n) for s, n in zip(seqs, lens, strict=True)]
    k, device = max(map(len, found)), parts.target.device
    padded = [tokens + [0] * (k - len(tokens)) for tokens in found]
    token_ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(seqs), k)
    probs = torch.zeros(len(seqs), k, parts.target.vocab_size, device=device)
    for b, tokens in enumerate(found):
        for i, token in enumerate(tokens):
            probs[b, i, token] = 1.0
    return Proposal(token_ids, list(map(len, found)), probs)


def score(seqs: list[Sequence], proposal: Proposal, parts: RoundParts) -> list[torch.Tensor]:
    """Logits [k_i + 1, V] for each sequence."""
    spans = []
    for b, seq in enumerate(seqs):
        proposed = proposal.token_ids[b, : proposal.lens[b]].clamp(min=0).tolist()
        longer = extended(seq, proposed)
        spans.append(Span(longer, seq.target_kv, len(longer.tokens)))
    counts = [n + 1 for n in proposal.lens]
    return list(parts.target.forward(spans, counts).logits.split(counts))


def by_sequence(rows: list[torch.Tensor], k: int) -> torch.Tensor:
    """Stack rows to [B, K + 1, ...], with zeros past each sequence's rows."""
    whole = rows[0].new_zeros(len(rows), k + 1, *rows[0].shape[1:])
    for b, row in enumerate(rows):
        whole[b, : len(row)] = row
    return whole


def verify(d: Decision) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, K + 1] and accepted counts [B], by rejection sampling over probabilities."""
    lens = torch.tensor(d.proposal.lens, dtype=torch.int32, device=d.target_probs.device)
    tokens, accepted = rejection_sample_reference(
        d.proposal.token_ids.clamp(min=0),
        lens,
        d.proposal.probs,
        d.target_probs,
        d.noise.accept,
        d.noise.sample,
    )
    accepted = accepted.long()
    return tokens, accepted.masked_fill((d.proposal.token_ids < 0).any(dim=1), -2)


def verify_greedy(
    proposal: Proposal, best: torch.Tensor, stands: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy rounds. best: int64 [B, K + 1], the target's choices. stands: bool [B, K]."""
    tokens, accepted = [], []
    for b, length in enumerate(proposal.lens):
        drafted, own = proposal.token_ids[b].tolist(), best[b].tolist()
        count = next((i for i in range(length) if not stands[b, i]), length)
        tokens.append([*drafted[:count], own[count], *[0] * (len(own) - count - 1)])
        if min(drafted[:length], default=0) < 0:
            count = -2
        elif min(own[: length + 1]) < 0:
            count = -1
        accepted.append(count)
    return torch.tensor(tokens), torch.tensor(accepted)


@dataclass(eq=False)
class RaggedRounds:
    """Replaces `engine.graphs.Rounds`; a round is finished when `launch` returns."""

    parts: RoundParts
    num_slots: int
    k: int
    decide: Any
    seqs: list[Sequence] = field(default_factory=list)
    outcome: Outcome | None = None
    indices: dict[Sequence, NgramIndex] = field(default_factory=dict)
    runs_ahead = False
    in_flight = 0

    @property
    def ks(self) -> tuple[int, ...]:
        return (self.k,)

    @property
    def last_k(self) -> int:
        return self.k

    def load(self, seqs: list[Sequence], seed: int) -> None:
        self.seqs = list(seqs)
        self.seed = seed

    def begin_after(self, time_s: float) -> None:
        pass  # its times are not looked at

    def launch(self, k: int) -> None:
        parts, seqs, began = self.parts, self.seqs, time.perf_counter()
        proposer, device = parts.proposer, parts.target.device
        lens = [0] * len(seqs)
        if proposer is not None:
            lens = [min(k, s.room(proposer.max_len)) for s in seqs]

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        index = ints([s.index & 0xFFFFFFFF for s in seqs])
        length = ints([len(s.tokens) for s in seqs])
        noise = round_noise(torch.tensor(self.seed, device=device), index, length, k)
        proposal = self._propose(lens, noise)
        k = proposal.token_ids.shape[1]
        noise = Noise(noise.draft[:, :k], noise.accept[:, :k], noise.sample[:, : k + 1])
        logits = score(seqs, proposal, parts)
        tokens, accepted = self._decide(proposal, logits, noise)
        now = time.perf_counter()
        self.outcome = Outcome(
            seqs,
            self.k,
            tokens.tolist(),
            accepted.tolist(),
            proposal.lens,
            dict.fromkeys(STAGES, 0.0),
            now - began,
            now,
        )

    def _propose(self, lens: list[int], noise: Noise) -> Proposal:
        proposer, parts = self.parts.proposer, self.parts
        if max(lens) > 0 and isinstance(proposer, DraftModel):
            assert proposer.model is not None
            return draft_tokens(proposer.model, self.seqs, lens, noise, parts)
        if max(lens) > 0 and isinstance(proposer, Ngram):
            self.indices = {
                s: self.indices.get(s) or NgramIndex(proposer.longest, proposer.shortest)
                for s in self.seqs
            }
            return look_up(self.indices, self.seqs, lens, parts)
        empty = torch.zeros(len(lens), 0, dtype=torch.int64, device=parts.target.device)
        vocab = parts.target.vocab_size
        return Proposal(empty, [0] * len(lens), torch.zeros(len(lens), 0, vocab).to(empty.device))

    def _decide(
        self, proposal: Proposal, logits: list[torch.Tensor], noise: Noise
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rule, params, k = self.parts.rule, self.parts.params, proposal.token_ids.shape[1]
        if isinstance(rule, SyntheticAcceptance) and k:
            rates = torch.tensor(rule.rates(self.k)[:k], device=noise.accept.device)
            best = self._own(logits, params, noise, k)
            return verify_greedy(proposal, best, noise.accept < rates)
        assert isinstance(rule, Rejection | SyntheticAcceptance)
        if params.is_greedy:
            best = self._own(logits, params, noise, k)
            return verify_greedy(proposal, best, proposal.token_ids == best[:, :k])
        probs = by_sequence([to_probs(row, params) for row in logits], k)
        tokens, accepted = self.decide(Decision(proposal, probs, noise))
        return tokens, accepted

    @staticmethod
    def _own(
        logits: list[torch.Tensor], params: SamplingParams, noise: Noise, k: int
    ) -> torch.Tensor:
        """The token that the target draws at every place, int64 [B, K + 1]."""
        if params.is_greedy:
            return by_sequence([greedy_pick(row) for row in logits], k)
        drawn = [
            sample_categorical_reference(to_probs(row, params), noise.sample[b, : len(row)])
            for b, row in enumerate(logits)
        ]
        return by_sequence(drawn, k)

    def collect(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome

    def grow(self, added: object) -> None:
        raise AssertionError("no round is ever in flight")

    def stop(self, seq: Sequence) -> None: ...

    def discard(self) -> None: ...


@dataclass
class OracleCache:
    """Replaces `engine.graphs.RoundCache`."""

    batch_size: int
    decide: Any

    def of(self, parts: RoundParts, k: int) -> tuple[Any, ...]:
        return (RaggedRounds(parts, self.batch_size, k, self.decide),)

    def close(self) -> None: ...


def with_oracle(engine: Engine, decide: Any = verify) -> Engine:
    """The same models and caches with ragged rounds. decide: the rule for sampled rounds."""
    other = copy(engine)
    other._rounds = OracleCache(engine.batch_size, decide)  # type: ignore[assignment]
    return other
