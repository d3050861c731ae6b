"""Chi-square tests of a sampler's output, and samplers with planted faults.

Rounds use the project's noise, draws and distributions; only the acceptance rule is replaced.
Shared by tests and `scripts/proofs/sampling.py`; knows no limits of significance.
Legend: N rounds, K proposals, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from specdec_kernels.sampling.reference import (
    rejection_sample_reference,
    sample_categorical_reference,
)
from torch import Tensor
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.sampling import to_probs
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.loop import Engine
from specdec_cli.models.gate import batched_experts
from tests.support import noise_of, reference, save_tiny

VOCAB = 32
MIN_EXPECTED = 5.0
GRAIN = 8
FILTERS = [(0, 1.0), (10, 1.0), (0, 0.9), (12, 0.95), (20, 0.7)]  # top_k, top_p
TEMPERATURES = [0.5, 0.8, 1.0, 1.5]


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of `counts` [R, V] when row r is a multinomial draw from `probs[r]`.

    Bins that expect fewer than 5 are merged within their row. If the merged bin still expects
    fewer, it joins the row's smallest other bin. A count at probability zero gives 0.
    """
    counts, probs = counts.double(), probs.double()
    if bool(((counts > 0) & (probs == 0)).any()):
        return 0.0
    expected = counts.sum(1, keepdim=True) * probs / probs.sum(1, keepdim=True)
    small = expected < MIN_EXPECTED
    pool = (expected * small).sum(1, keepdim=True)
    pool_count = (counts * small).sum(1, keepdim=True)
    home = expected.masked_fill(small, float("inf")).argmin(1, keepdim=True)
    own_bin = (pool >= MIN_EXPECTED) | small.all(1, keepdim=True)
    expected = expected.masked_fill(small, 0.0).scatter_add(1, home, pool.masked_fill(own_bin, 0))
    counts = counts.masked_fill(small, 0.0).scatter_add(1, home, pool_count.masked_fill(own_bin, 0))
    expected = torch.cat((expected, pool.masked_fill(~own_bin, 0)), 1)
    counts = torch.cat((counts, pool_count.masked_fill(~own_bin, 0)), 1)
    used = expected > 0
    freedom = int((used.sum(1) - 1).clamp(min=0).sum())
    if freedom == 0:
        return 1.0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


@dataclass(frozen=True)
class Round:
    """Everything that a rule may read; shapes as in `rejection_sample_reference`."""

    drafts: Tensor
    lens: Tensor
    q: Tensor
    p: Tensor
    noise: Noise


@dataclass(frozen=True)
class Pair:
    """Target and draft as tables [V, V]: row x is the distribution after token x.

    grain: accept noise is rounded down to multiples of 1 / grain; 0 leaves it.
    """

    p: Tensor
    q: Tensor
    q_logits: Tensor
    params: SamplingParams
    grain: int = 0


def random_pair(number: int) -> Pair:
    """Pair `number` of a fixed endless list: every temperature with every filter, and drafts that
    are between half like the target and nearly equal to it."""
    generator = torch.Generator().manual_seed(1000 + number)
    top_k, top_p = FILTERS[number % 5]
    params = SamplingParams(
        temperature=TEMPERATURES[number // 5 % 4], top_k=top_k, top_p=top_p, seed=number
    )
    likeness = (0.5, 0.7, 0.8, 0.9)[number % 4]
    p_logits = torch.randn(VOCAB, VOCAB, generator=generator)
    own = torch.randn(VOCAB, VOCAB, generator=generator)
    q_logits = likeness * p_logits + (1 - likeness**2) ** 0.5 * own
    return Pair(to_probs(p_logits, params), to_probs(q_logits, params), q_logits, params)


def tied_pair(number: int) -> Pair:
    """A pair whose ratios p / q are multiples of the accept noise's grain, so that ties occur.

    `u * q < p` is then still exact, and `<=` accepts one case in eight too many.
    """
    generator = torch.Generator().manual_seed(2000 + number)
    weights = torch.ones(GRAIN, GRAIN)
    balls = torch.multinomial(weights, GRAIN * GRAIN, replacement=True, generator=generator)
    p = torch.stack([row.bincount(minlength=GRAIN) for row in balls]) / GRAIN**2
    q = torch.full((GRAIN, GRAIN), 1 / GRAIN)
    return Pair(p, q, q.log(), SamplingParams(temperature=1.0, seed=number), GRAIN)


def lookup_pair(number: int) -> Pair:
    """A pair whose draft is certain of one token in each row, like prompt lookup. The token is the
    target's likeliest in half of the rows, and drawn from its distribution in the others."""
    pair = random_pair(number)
    generator = torch.Generator().manual_seed(3000 + number)
    drawn = torch.multinomial(pair.p, 1, generator=generator).squeeze(1)
    likely = torch.rand(VOCAB, generator=generator) < 0.5
    q = F.one_hot(torch.where(likely, pair.p.argmax(1), drawn), VOCAB).float()
    return replace(pair, q=q, q_logits=q.log())


def taken(probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each proposed token: [N, K]."""
    return probs[:, : tokens.shape[1]].gather(2, tokens[..., None]).squeeze(2)


class Rule:
    """Rejection sampling step by step; each fault changes one step."""

    def drawn(self, pair: Pair) -> Tensor:
        """The table that drafts are drawn from."""
        return pair.q

    def claimed(self, pair: Pair) -> Tensor:
        """The table that the acceptance test uses as q."""
        return pair.q

    def later_noise(self, noise: Noise, k: int) -> Noise:
        """Noise [N, K] of the second round, which begins one position later."""
        return Noise(noise.draft[:, 1:], noise.accept[:, 1:], noise.sample[:, 1:])

    def accept(self, r: Round) -> Tensor:
        return r.noise.accept * taken(r.q, r.drafts) < taken(r.p, r.drafts)

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).clamp(min=0)

    def bonus(self, r: Round) -> Tensor:
        return r.p[torch.arange(len(r.lens)), r.lens]

    def sample_noise(self, r: Round) -> Tensor:
        return r.noise.sample

    def draw(self, weights: Tensor, noise: Tensor) -> Tensor:
        return sample_categorical_reference(weights, noise)

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        """Tokens [N, K + 1], padded with -1, and the numbers of accepted drafts [N]."""
        width = r.drafts.shape[1]
        row, place = torch.arange(len(r.lens)), torch.arange(width + 1)
        weights, accepted = self.bonus(r), torch.zeros_like(r.lens)
        if width > 0:
            accept = self.accept(r) & (place[:width] < r.lens[:, None])
            accepted = accept.long().cumprod(1).sum(1)
            p = r.p[row, accepted]
            residual = self.residual(p, r.q[row, accepted.clamp(max=width - 1)])
            after_rejection = torch.where(residual.sum(1, keepdim=True) > 0, residual, p)
            weights = torch.where((accepted < r.lens)[:, None], after_rejection, weights)
        last = self.draw(weights, self.sample_noise(r)[row, accepted])
        tokens = F.pad(r.drafts, (0, 1)).masked_fill(place >= accepted[:, None], -1)
        tokens[row, accepted] = last
        return tokens, accepted


class Project(Rule):
    """none: the project's own function"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        tokens, accepted = rejection_sample_reference(
            r.drafts, r.lens.int(), r.q, r.p, r.noise.accept, r.noise.sample
        )
        return tokens, accepted.long()


class ResampleFromTarget(Rule):
    """resample from p instead of the residual"""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class SquareRootRatio(Rule):
    """square root of the accept ratio"""

    def accept(self, r: Round) -> Tensor:
        return r.noise.accept * taken(r.q, r.drafts).sqrt() < taken(r.p, r.drafts).sqrt()


class DraftTemperature(Rule):
    """draft temperature 0.9 left out of q"""

    def drawn(self, pair: Pair) -> Tensor:
        params = replace(pair.params, temperature=0.9 * pair.params.temperature)
        return to_probs(pair.q_logits, params)


class AcceptAll(Rule):
    """every draft accepted (transformers #28508)"""

    def accept(self, r: Round) -> Tensor:
        return torch.ones_like(r.drafts, dtype=torch.bool)


class FirstUnverified(Rule):
    """first draft token unverified (lattice #243)"""

    def accept(self, r: Round) -> Tensor:
        accept = super().accept(r)
        accept[:, 0] = True
        return accept


class NoiseIgnored(Rule):
    """accepted iff p >= q, whatever the noise"""

    def accept(self, r: Round) -> Tensor:
        return taken(r.p, r.drafts) >= taken(r.q, r.drafts)


class AcceptTies(Rule):
    """u * q <= p in place of <"""

    def accept(self, r: Round) -> Tensor:
        return r.noise.accept * taken(r.q, r.drafts) <= taken(r.p, r.drafts)


class AcceptNoiseReused(Rule):
    """accept noise reused as sample noise"""

    def sample_noise(self, r: Round) -> Tensor:
        return torch.cat((r.noise.accept, r.noise.sample[:, -1:]), 1)


class DraftNoiseAsAccept(Rule):
    """draft noise reused as accept noise"""

    def accept(self, r: Round) -> Tensor:
        return r.noise.draft * taken(r.q, r.drafts) < taken(r.p, r.drafts)


class DraftNoiseAsSample(Rule):
    """draft noise reused as sample noise"""

    def sample_noise(self, r: Round) -> Tensor:
        return torch.cat((r.noise.draft, r.noise.sample[:, -1:]), 1)


class NoiseNotAdvanced(Rule):
    """next round repeats this round's noise"""

    def later_noise(self, noise: Noise, k: int) -> Noise:
        return Noise(noise.draft[:, :k], noise.accept[:, :k], noise.sample[:, : k + 1])


class AbsoluteResidual(Rule):
    """residual |p - q|, not clamped"""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).abs()


class ResidualNotNormalised(Rule):
    """residual not renormalised"""

    def draw(self, weights: Tensor, noise: Tensor) -> Tensor:
        running = weights.cumsum(1)
        index = torch.searchsorted(running, noise[:, None], right=True).squeeze(1)
        return index.clamp(max=weights.shape[1] - 1)


class BonusFromDraft(Rule):
    """bonus drawn from q"""

    def bonus(self, r: Round) -> Tensor:
        last = (r.lens - 1).clamp(min=0)
        row = torch.arange(len(last))
        q = r.q if r.q.shape[1] else r.p
        return torch.where((r.lens > 0)[:, None], q[row, last], r.p[row, r.lens])


class BonusFromWrongRow(Rule):
    """bonus drawn from p at k - 1"""

    def bonus(self, r: Round) -> Tensor:
        return r.p[torch.arange(len(r.lens)), (r.lens - 1).clamp(min=0)]


class MaskOnTargetOnly(Rule):
    """q claimed without the top-k and top-p masks"""

    def claimed(self, pair: Pair) -> Tensor:
        return to_probs(pair.q_logits, replace(pair.params, top_k=0, top_p=1.0))


class StaleDraftRow(Rule):
    """q of the position before"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        return super().__call__(replace(r, q=torch.cat((r.q[:, :1], r.q[:, :-1]), 1)))


class DropLastAccepted(Rule):
    """accepted one too few: the last one dropped"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        tokens, accepted = super().__call__(r)
        row, fewer = torch.arange(len(accepted)), (accepted - 1).clamp(min=0)
        last = tokens[row, accepted]
        tokens[row, accepted] = -1
        tokens[row, fewer] = last
        return tokens, fewer


class TargetAsDraft(Rule):
    """q taken for the target's p"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        return super().__call__(replace(r, q=r.p[:, : r.q.shape[1]]))


class FlatDraft(Rule):
    """q flat in place of one-hot"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        return super().__call__(replace(r, q=torch.full_like(r.q, 1 / r.q.shape[2])))


class HalfSureDraft(Rule):
    """q of a half at the proposed token"""

    def __call__(self, r: Round) -> tuple[Tensor, Tensor]:
        return super().__call__(replace(r, q=r.q / 2))


CORRECT = Project()
FAULTS: list[Rule] = [
    ResampleFromTarget(),
    SquareRootRatio(),
    DraftTemperature(),
    AcceptAll(),
    FirstUnverified(),
    NoiseIgnored(),
    AcceptNoiseReused(),
    DraftNoiseAsAccept(),
    DraftNoiseAsSample(),
    NoiseNotAdvanced(),
    AbsoluteResidual(),
    ResidualNotNormalised(),
    BonusFromDraft(),
    BonusFromWrongRow(),
    MaskOnTargetOnly(),
    StaleDraftRow(),
    DropLastAccepted(),
]

# Faults for proposals that are not drawn, for which q is one-hot.
LOOKUP_FAULTS: list[Rule] = [
    TargetAsDraft(),
    FlatDraft(),
    HalfSureDraft(),
    ResampleFromTarget(),
    SquareRootRatio(),
    AcceptAll(),
    FirstUnverified(),
    NoiseIgnored(),
    AcceptNoiseReused(),
    NoiseNotAdvanced(),
    ResidualNotNormalised(),
    BonusFromDraft(),
    BonusFromWrongRow(),
    StaleDraftRow(),
    DropLastAccepted(),
]


def label(rule: Rule) -> str:
    return str(type(rule).__doc__)


def play(pair: Pair, rule: Rule, before: Tensor, lens: Tensor, noise: Noise) -> Round:
    """Draw the drafts of N rounds, each after the token `before` [N], of `lens` [N] tokens."""
    drawn, claimed = rule.drawn(pair), rule.claimed(pair)
    states = [before]
    for step in range(noise.draft.shape[1]):
        states.append(sample_categorical_reference(drawn[states[-1]], noise.draft[:, step]))
    state = torch.stack(states, 1)
    drafts, q, p = state[:, 1:], claimed[state[:, :-1]], pair.p[state]
    place = torch.arange(state.shape[1])
    # Rows past a sequence's length are zero, as in the engine.
    q = q.masked_fill_((place[:-1] >= lens[:, None])[..., None], 0.0)
    p = p.masked_fill_((place > lens[:, None])[..., None], 0.0)
    return Round(drafts, lens, q, p, noise)


def pair_noise(pair: Pair, k: int, count: int) -> Noise:
    """The engine's noise of prompts 0..count, wide enough for a second round of k."""
    params = replace(pair.params, seed=10 * pair.params.seed + k)
    noise = noise_of(list(range(count)), [3] * count, k + 1, params.seed)
    if pair.grain:
        return replace(noise, accept=(noise.accept * pair.grain).floor() / pair.grain)
    return noise


def trial(pair: Pair, rule: Rule, k: int, noise: Noise) -> dict[str, float]:
    """p-values of the tokens that `rule` emits in rounds of k.

    "token i": the i-th emitted token, given the previous one, over rounds that accepted all tokens
    up to there; token k is the bonus token. "joint": the first two tokens; if a round emits only
    one, the next round follows, with proposals of mixed lengths 0..k.
    """
    count, vocab = len(noise.draft), len(pair.p)
    before = torch.zeros(count, dtype=torch.int64)
    lens = torch.full((count,), k)
    first = Noise(noise.draft[:, :k], noise.accept[:, :k], noise.sample[:, : k + 1])
    tokens, accepted = rule(play(pair, rule, before, lens, first))

    found = {}
    previous = before
    for i in range(k + 1):
        there = accepted >= i
        cell = previous[there] * vocab + tokens[there, i]
        counts = cell.bincount(minlength=vocab * vocab).view(vocab, vocab)
        found[f"token {i}"] = chi_square(counts, pair.p)
        previous = tokens[:, i].clamp(min=0)

    one = (accepted == 0).nonzero().squeeze(1)
    later = rule.later_noise(noise, k)
    rest = Noise(later.draft[one], later.accept[one], later.sample[one])
    again, _ = rule(play(pair, rule, tokens[one, 0], one % (k + 1), rest))
    second = tokens[:, 1].clone()
    second[one] = again[:, 0]
    counts = (tokens[:, 0] * vocab + second).bincount(minlength=vocab * vocab)
    joint = pair.p[0][:, None].double() * pair.p.double()
    found["joint"] = chi_square(counts[None], joint.view(1, -1))
    return found


def acceptance(pair: Pair, k: int, noise: Noise) -> float:
    """p-value of the rate at which first drafts are accepted, against the sum of min(p, q)."""
    before = torch.zeros(len(noise.draft), dtype=torch.int64)
    first = Noise(noise.draft[:, :k], noise.accept[:, :k], noise.sample[:, : k + 1])
    _, accepted = CORRECT(play(pair, CORRECT, before, torch.full_like(before, k), first))
    rate = torch.minimum(pair.p[0].double(), pair.q[0].double()).sum()
    counts = torch.stack(((accepted > 0).sum(), (accepted == 0).sum()))
    return chi_square(counts[None], torch.stack((rate, 1 - rate))[None])


def adjusted(values: dict[str, float]) -> float:
    """The joint p-value of several tests, by Bonferroni."""
    return min(1.0, min(values.values()) * len(values))


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of rows [N, V] by transformers' own logits processors."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        logits = TopKLogitsWarper(params.top_k)(ids, logits)
    if params.top_p < 1.0:
        logits = TopPLogitsWarper(params.top_p)(ids, logits)
    return logits.softmax(dim=-1)


def changed(logits: Tensor, texts: Tensor, params: SamplingParams) -> Tensor:
    """Rows [N, V] after `texts` [N, L], by transformers' own logits processors."""
    if params.repetition_penalty != 1.0:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(texts, logits)
    if params.suppress_tokens:
        processor = SuppressTokensLogitsProcessor(params.suppress_tokens, device="cpu")
        logits = processor(texts, logits)
    return logits


def exact_joint(folder: Path, prompt: list[int], params: SamplingParams, depth: int) -> Tensor:
    """Probability of every continuation of `depth` tokens, flat, by transformers alone."""
    model = reference(folder).double()
    prefixes, joint = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(depth):
        # The usual code for experts takes no fp64.
        with torch.inference_mode(), batched_experts(model):
            logits = changed(model(prefixes).logits[:, -1], prefixes, params)
            probs = warped(logits, params)
        vocab = probs.shape[1]
        joint = (joint[:, None] * probs).view(-1)
        after = torch.arange(vocab).repeat(len(prefixes))[:, None]
        prefixes = torch.cat((prefixes.repeat_interleave(vocab, 0), after), 1)
    return joint


def engine_counts(
    engine: Engine, prompt: list[int], k: int, params: SamplingParams, depth: int, count: int
) -> Tensor:
    """Counts of every continuation of `depth` tokens that the running engine writes, flat."""
    vocab = engine.target.vocab_size
    result = engine.run([Request(i, tuple(prompt)) for i in range(count)], k, params)
    assert all(s.finish_reason == "length" for s in result.seqs)
    cells = torch.zeros(count, dtype=torch.int64)
    for place in range(depth):
        cells = cells * vocab + torch.tensor([s.output_ids[place] for s in result.seqs])
    return cells.bincount(minlength=vocab**depth)


class Planted(Rejection):
    """An acceptance rule for the engine that decides like `rule`. lens: of each round so far."""

    def __init__(self, rule: Callable[[Round], tuple[Tensor, Tensor]]) -> None:
        self.rule = rule
        self.lens: list[list[int]] = []

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        assert noise is not None
        c, vocab = candidates, target.logits.shape[-1]
        self.lens.append(c.lens.tolist())
        if c.q is None:
            q = F.one_hot(c.token_ids.clamp(min=0), vocab).float()
        else:
            more = vocab - c.q.logits.shape[-1]
            q = to_probs(F.pad(c.q.logits, (0, more), value=float("-inf")), params)
        p, place = to_probs(target.logits, params), torch.arange(c.token_ids.shape[1] + 1)
        # Rules with planted faults expect rows past a sequence's length to be zero.
        q = q.masked_fill((place[:-1] >= c.lens[:, None])[..., None], 0.0)
        p = p.masked_fill((place > c.lens[:, None])[..., None], 0.0)
        tokens, accepted = self.rule(Round(c.token_ids, c.lens, q, p, noise))
        return Verdict(tokens, accepted)


def save_eight(folder: Path) -> tuple[Path, Path]:
    """A target and a draft with 8 tokens, small enough for many thousand runs."""
    sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1}
    return (
        save_tiny(folder / "target", "llama", seed=0, **sizes),
        save_tiny(folder / "draft", "llama", seed=1, **sizes),
    )


def engine_trial(
    engine: Engine, target: Path, prompt: list[int], k: int, params: SamplingParams, count: int
) -> dict[str, float]:
    """p-values of the joint distribution of the first tokens over `count` runs of one prompt.

    The last new token does not count, because it is never proposed.
    """
    vocab, depth = engine.target.vocab_size, params.max_new_tokens - 1
    counts = engine_counts(engine, prompt, k, params, depth, count)
    joint = exact_joint(target, prompt, params, depth)
    return {
        f"{n} tokens": chi_square(
            counts.view(vocab**n, -1).sum(1)[None], joint.view(vocab**n, -1).sum(1)[None]
        )
        for n in range(1, depth + 1)
    }
