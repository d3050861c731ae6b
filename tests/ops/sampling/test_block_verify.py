"""Block verification: the exact law on tiny vocabularies, and the kernel against the definition."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ops_helpers import needs_cuda
from specdec_kernels import ops
from specdec_kernels.sampling import logit_rows_triton as rows_of_logits
from specdec_kernels.sampling.reference import sample_categorical_reference
from test_logits import (
    CASES,
    MASKED,
    PLAIN,
    Settings,
    check_cdf,
    exact_probs,
    judge,
    make_round,
    rule_of,
    torch_blocks,
    triton_blocks,
)
from torch import Tensor

from specdec_cli.acceptance.block import Block, block_chances, block_verify_reference

INF = float("inf")
both = pytest.mark.parametrize("verify", [torch_blocks, triton_blocks], ids=["torch", "triton"])
# A rule decides rounds of one proposal or more.
DRAFTED = [case for case in CASES if case[1] > 0]


@dataclass(frozen=True)
class Pair:
    """p and q after every prefix of tokens: fp64 [V^m, V] for each length m, prefixes in base V."""

    target: list[Tensor]
    draft: list[Tensor]

    @property
    def size(self) -> int:
        return self.target[0].shape[1]

    @property
    def k(self) -> int:
        return len(self.draft)

    def drafts(self) -> Tensor:
        """All V^k drafts, in the order of their numbers: [V^k, k]."""
        return torch.tensor(list(itertools.product(range(self.size), repeat=self.k)))

    def along(self, tables: list[Tensor]) -> Tensor:
        """The rows of `tables` along each draft: [V^k, len(tables), V]."""
        number = torch.arange(self.size**self.k)
        rows = [table[number // self.size ** (self.k - m)] for m, table in enumerate(tables)]
        return torch.stack(rows, 1)

    def chance_of_drafts(self) -> Tensor:
        q = self.along(self.draft)
        return q.gather(2, self.drafts()[..., None]).squeeze(2).prod(1)


def make_pair(size: int, k: int, seed: int, likeness: float = 0.5) -> Pair:
    """A random pair with impossible tokens on both sides, and prefixes after which p = q."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target, draft = [], []
    for m in range(k + 1):
        x, y = 1.5 * normal(size**m, size), 1.5 * normal(size**m, size)
        y = likeness * x + (1 - likeness) * y
        x[:, 0][normal(size**m) > 1] = -INF
        y[:, -1][normal(size**m) > 1] = -INF
        same = normal(size**m) > 1.2
        target.append(x.softmax(1))
        draft.append(torch.where(same[:, None], x, y).softmax(1))
    return Pair(target, draft[:k])


PAIRS = [
    make_pair(size, k, seed, likeness)
    for size, k in [(2, 1), (4, 1), (2, 3), (3, 2), (3, 3), (4, 3)]
    for seed in range(4)
    for likeness in (0.0, 0.7)
]

Decision = tuple[Tensor, Tensor]  # chances [N, k + 1] and weights of the next token [N, k + 1, V]
Counts = Callable[[Tensor, Tensor], Tensor]


def decide(pair: Pair, lens: Tensor) -> Decision:
    return block_chances(pair.drafts(), lens, pair.along(pair.draft), pair.along(pair.target))


def usable(chances: Tensor, lens: Tensor) -> Tensor:
    """Chances clamped to [0, 1]: 1 for accepting nothing, 0 past a draft's length."""
    place = torch.arange(chances.shape[1])
    chances = chances.masked_fill(place > lens[:, None], 0.0).clamp(0, 1)
    return chances.masked_fill(place == 0, 1.0)


def last_that_passes(chances: Tensor, lens: Tensor) -> Tensor:
    """Probability [N, k + 1] of each accepted length, with the noise integrated exactly."""
    chances = usable(chances, lens)
    fails = torch.cat((1 - chances[:, 1:], torch.ones(len(chances), 1)), 1)
    return chances * fails.flip(1).cumprod(1).flip(1)


def joint_law(pair: Pair, lens: Tensor, decision: Decision, counts: Counts) -> Tensor:
    """Law of the next k + 1 tokens [V^(k+1)]; the target writes the tokens after the round's."""
    chances, follow = decision
    size, k = pair.size, pair.k
    weight = pair.chance_of_drafts()[:, None] * counts(chances, lens)
    number = torch.arange(size**k)
    law = torch.ones(1, dtype=torch.float64) * 0
    for m in range(k + 1):
        ends = weight[:, m, None] * follow[:, m] / follow[:, m].sum(1, keepdim=True)
        here = torch.zeros(size**m, size, dtype=torch.float64)
        here.index_add_(0, number // size ** (k - m), torch.where(weight[:, m, None] > 0, ends, 0))
        law = (law[:, None] * pair.target[m] + here).flatten()
    return law


def target_law(pair: Pair) -> Tensor:
    law = torch.ones(1, dtype=torch.float64)
    for table in pair.target:
        law = (law[:, None] * table).flatten()
    return law


def distance(pair: Pair, lens: Tensor, decision: Decision, counts: Counts) -> float:
    """Total variation between a round's law and the target's law."""
    return float((joint_law(pair, lens, decision, counts) - target_law(pair)).abs().sum() / 2)


def all_of(length: int) -> Callable[[Pair], Tensor]:
    return lambda pair: torch.full((pair.size**pair.k,), min(length, pair.k))


def after_a_zero(pair: Pair) -> Tensor:
    """Lengths that stop after the first token 0, which stays proposed."""
    found = (pair.drafts() == 0).int()
    first = torch.where(found.any(1), found.argmax(1) + 1, pair.k)
    return first


def where_unsure(pair: Pair) -> Tensor:
    """Lengths that stop before a place where no token is likely, which is known before the draw."""
    unsure = (pair.along(pair.draft).amax(2) < 0.6).int()
    return torch.where(unsure.any(1), unsure.argmax(1), pair.k)


def before_a_zero(pair: Pair) -> Tensor:
    """Lengths that drop the first token 0 and all after it, and so depend on a dropped token."""
    found = (pair.drafts() == 0).int()
    return torch.where(found.any(1), found.argmax(1), pair.k)


LENGTHS = [*(all_of(length) for length in range(4)), after_a_zero, where_unsure]
NAMES = ["0", "1", "2", "3", "after-a-zero", "where-unsure"]


@pytest.mark.parametrize("lengths", LENGTHS, ids=NAMES)
def test_the_output_has_exactly_the_targets_law(lengths):
    for pair in PAIRS:
        lens = lengths(pair)
        assert distance(pair, lens, decide(pair, lens), last_that_passes) < 1e-12


def test_chances_add_up_to_the_running_weights():
    """Given the first i drafts, at least i are accepted with probability w_i, the proof's core."""
    for pair in PAIRS:
        lens = all_of(pair.k)(pair)
        counts = last_that_passes(decide(pair, lens)[0], lens)
        q = pair.along(pair.draft).gather(2, pair.drafts()[..., None]).squeeze(2)
        p = pair.along(pair.target)[:, : pair.k].gather(2, pair.drafts()[..., None]).squeeze(2)
        weight = torch.ones(len(lens), dtype=torch.float64)
        for i in range(pair.k):
            weight = torch.where(q[:, i] > 0, (weight * p[:, i] / q[:, i]).clamp(max=1), 0)
            # Given the first i + 1 drafts, average over the later ones.
            reach = pair.chance_of_drafts() * counts[:, i + 1 :].sum(1)
            number = torch.arange(len(lens)) // pair.size ** (pair.k - i - 1)
            groups = pair.size ** (i + 1)
            got, want = (
                torch.zeros(groups, dtype=torch.float64).index_add(0, number, x)
                for x in (reach, pair.chance_of_drafts() * weight)
            )
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def planted(fault: str, pair: Pair, lens: Tensor) -> Decision:
    """Algorithm 2 row by row, with a planted fault; "" for none."""
    drafts, q, p = pair.drafts(), pair.along(pair.draft), pair.along(pair.target)
    chances, follow = torch.ones(p.shape[:2], dtype=torch.float64), p.clone()
    for n, length in enumerate(lens.tolist()):
        weight = 1.0
        for i in range(length + 1):
            if i:
                d = drafts[n, i - 1]
                ratio = float(p[n, i - 1, d] / q[n, i - 1, d]) if q[n, i - 1, d] > 0 else 1.0
                weight = ratio if fault == "weight of one place" else weight * ratio
                weight = weight if fault == "no clamp" else min(weight, 1.0)
            chances[n, i] = weight
            if i == length and (fault != "inner at the end" or length == pair.k):
                continue
            residual = (weight * p[n, i] - q[n, i]).clamp(min=0)
            own = (p[n, i] - q[n, i]).clamp(min=0)
            mass = float(own.sum() if fault == "chance from p - q" else residual.sum())
            rest = mass + (0.0 if fault == "no 1 - w" else 1 - weight)
            chances[n, i] = mass / rest if rest else 1.0
            drawn_from = own if fault == "token from p - q" else residual
            if drawn_from.sum() > 0 and fault != "token from p":
                follow[n, i] = drawn_from
    return chances, follow


def first_that_passes(chances: Tensor, lens: Tensor) -> Tensor:
    chances = usable(chances, lens)
    first = chances[:, 1:] * torch.cat(
        (torch.ones(len(chances), 1), (1 - chances[:, 1:]).cumprod(1)[:, :-1]), 1
    )
    return torch.cat((1 - first.sum(1, keepdim=True), first), 1)


def run_from_the_left(chances: Tensor, lens: Tensor) -> Tensor:
    reach = usable(chances, lens).cumprod(1)
    return reach - torch.cat((reach[:, 1:], torch.zeros(len(reach), 1)), 1)


def one_number_for_all(chances: Tensor, lens: Tensor) -> Tensor:
    later = usable(chances, lens).flip(1).cummax(1).values.flip(1)
    return later - torch.cat((later[:, 1:], torch.zeros(len(later), 1)), 1)


def always_to_the_end(chances: Tensor, lens: Tensor) -> Tensor:
    """A fault: the place after a draft's last is tested too, as if lens were one too long."""
    return last_that_passes(chances, (lens + 1).clamp(max=chances.shape[1] - 1))


def drawn_with_the_accept_noise(pair: Pair, lens: Tensor) -> Decision:
    """A fault: the token after i drafts is drawn with the number that failed test i + 1."""
    chances, follow = decide(pair, lens)
    running = (follow / follow.sum(2, keepdim=True)).cumsum(2)
    low = torch.nn.functional.pad(chances[:, 1:], (0, 1)).clamp(0, 1)
    low = low.masked_fill(torch.arange(pair.k + 1) >= lens[:, None], 0.0)[..., None]
    left = torch.nn.functional.pad(running[..., :-1], (1, 0))
    cells = (running - torch.maximum(left, low)).clamp(min=0)
    return chances, torch.where(low < 1, cells, follow)


DECISIONS = [
    *("no clamp", "no 1 - w", "weight of one place", "inner at the end"),
    *("chance from p - q", "token from p - q", "token from p"),
]
COUNTS = [first_that_passes, run_from_the_left, one_number_for_all, always_to_the_end]


def test_the_definition_written_again_is_the_same():
    for pair in PAIRS:
        lens, possible = after_a_zero(pair), pair.chance_of_drafts() > 0
        want, got = (
            last_that_passes(decision[0], lens)[possible]
            for decision in (planted("", pair, lens), decide(pair, lens))
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fault", [*DECISIONS, *COUNTS, drawn_with_the_accept_noise, before_a_zero])
def test_planted_faults_are_noticed(fault):
    worst = 0.0
    for pair in PAIRS:
        lens = before_a_zero(pair) if fault is before_a_zero else after_a_zero(pair)
        decision, counts = decide(pair, lens), last_that_passes
        if fault in DECISIONS:
            decision = planted(fault, pair, lens)
        elif fault in COUNTS:
            counts = fault
        elif fault is drawn_with_the_accept_noise:
            decision = drawn_with_the_accept_noise(pair, lens)
        worst = max(worst, distance(pair, lens, decision, counts))
    assert worst > 1e-3


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "reused"])
def test_the_next_round_needs_numbers_of_its_own(is_fresh):
    """If a position keeps its accept noise in every round, the second token has a wrong law.

    A round of two drafts accepts none; then a round of one draft begins at the second position.
    """
    pair = make_pair(3, 2, 1)
    lens = all_of(2)(pair)
    chances, follow = decide(pair, lens)
    counts, chance = last_that_passes(chances, lens), pair.chance_of_drafts()
    law = torch.zeros(3, 3, dtype=torch.float64)
    want = torch.zeros(3, 3, dtype=torch.float64)
    for n, y in itertools.product(range(9), range(3)):
        mass = chance[n] * counts[n, 0] * follow[n, 0, y] / follow[n, 0].sum()
        if not mass > 0:
            continue
        p, q = pair.target[1][y], pair.draft[1][y]
        failed = 0.0 if is_fresh else float(chances[n, 2])  # the number is at least this
        for z in range(3):
            if not q[z] > 0:
                continue
            passes = max(min(1.0, float(p[z] / q[z])) - failed, 0.0) / (1 - failed)
            residual = (p - q).clamp(min=0)
            law[y, z] += mass * q[z] * passes
            if residual.sum() > 0:
                law[y] += mass * q[z] * (1 - passes) * residual / residual.sum()
        want[y] += mass * p
    error = float((law - want).abs().sum() / 2)
    assert error < 1e-12 if is_fresh else error > 1e-3


def test_no_shorter_than_rejection_sampling_in_expectation():
    gains = []
    for seed in range(200):
        pair = make_pair(3, 1 + seed % 3, seed, likeness=(seed % 4) / 4)
        lens = all_of(3)(pair)
        place = torch.arange(pair.k + 1).double()
        chance = pair.chance_of_drafts()
        block = (last_that_passes(decide(pair, lens)[0], lens) @ place * chance).sum()
        drafts, p = pair.drafts()[..., None], pair.along(pair.target)[:, : pair.k]
        q = pair.along(pair.draft).gather(2, drafts).squeeze(2)
        ratio = (p.gather(2, drafts).squeeze(2) / q.clamp(min=1e-300)).clamp(max=1)
        gains.append(float(block - (ratio.cumprod(1).sum(1) * chance).sum()))
    assert min(gains) > -1e-12
    assert sum(gain > 0.01 for gain in gains) > 50


def test_the_reference_accepts_by_these_chances():
    """Covers every pattern of passed and failed tests, and every possible next token."""
    pair = make_pair(3, 2, 5)
    lens = after_a_zero(pair)
    chances, follow = decide(pair, lens)
    for pattern in itertools.product((False, True), repeat=2):
        passes = torch.tensor(pattern)
        noise = torch.where(passes, chances[:, 1:] / 2, (1 + chances[:, 1:]) / 2)
        possible = ~passes | (chances[:, 1:] > 0)
        tested = torch.arange(1, 3) <= lens[:, None]
        want = ((tested & passes & (noise < 1)) * torch.arange(1, 3)).amax(1)
        for u in (0.0, 0.3, 0.6, 0.99):
            draw = torch.full((len(lens), 3), u, dtype=torch.float64)
            args = (pair.drafts(), lens, pair.along(pair.draft), pair.along(pair.target))
            tokens, accepted = block_verify_reference(*args, noise, draw)
            rows = ((~tested | (possible & (passes | (noise < 1)))).all(1)).nonzero().squeeze(1)
            assert len(rows) and accepted[rows].tolist() == want[rows].tolist()
            last = sample_categorical_reference(follow[rows, want[rows]], draw[rows, 0])
            assert torch.equal(tokens[rows, want[rows]], last)


def check_block(
    made: dict[str, Tensor], settings: Settings, tokens: Tensor, accepted: Tensor
) -> None:
    """Follow Algorithm 2 row by row in fp64; rounding may only move a draw at a CDF step."""
    host = {name: tensor.cpu() for name, tensor in made.items()}
    missing = host["target_logits"].shape[2] - host["draft_logits"].shape[2]
    padded = torch.nn.functional.pad(host["draft_logits"].float(), (0, missing), value=-INF)
    p, q = exact_probs(host["target_logits"], settings), exact_probs(padded, settings)
    for b, length in enumerate(host["lens"].tolist()):
        weight, count, weights = 1.0, 0, p[b, 0]
        for i in range(length + 1):
            if i:
                d = host["draft_tokens"][b, i - 1]
                weight = min(1.0, weight * float(p[b, i - 1, d] / q[b, i - 1, d]))
            residual = (weight * p[b, i] - q[b, i]).clamp(min=0) if i < length else p[b, i]
            mass = float(residual.sum())
            chance = mass / (mass + 1 - weight) if i < length else weight
            if i == 0 or float(host["accept_noise"][b, i - 1]) < chance:
                count, weights = i, residual
        assert int(accepted[b]) == count, f"row {b}: accepted"
        row = tokens[b].tolist()
        assert row[:count] == host["draft_tokens"][b, :count].tolist(), f"row {b}: drafts"
        assert row[count + 1 :] == [-1] * (len(row) - count - 1), f"row {b}: padding"
        check_cdf(weights, float(host["sample_noise"][b, count]), row[count], f"row {b}")


@pytest.mark.pairwise
@both
@pytest.mark.parametrize(
    ("lens", "width", "vocabulary", "settings", "lens_dtype"),
    DRAFTED,
    ids=[f"lens{lens}-K{width}-V{size}-{settings}" for lens, width, size, settings, _ in DRAFTED],
)
@pytest.mark.parametrize("like", [1.0, 0.3], ids=["unlike", "like"])
def test_follows_the_definition(
    like, lens, width, vocabulary, settings, lens_dtype, verify, device, monkeypatch
):
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (64, 128) if vocabulary < 1000 else (1024, 4096))
    made = make_round(lens, width, vocabulary, settings, device)
    made["lens"] = made["lens"].to(lens_dtype)
    # The draft's logits move towards the target's, so that long prefixes pass too.
    own = made["target_logits"][:, :width]
    made["draft_logits"] = own + like * (made["draft_logits"] - own)
    tokens, accepted = judge(verify, made, settings)
    assert tokens.dtype == accepted.dtype == torch.int64
    check_block(made, settings, tokens, accepted)


@pytest.mark.each_value
@both
@pytest.mark.parametrize(
    ("settings", "draft_vocabulary"),
    [
        (PLAIN, 130),
        (MASKED, 205),
        pytest.param(PLAIN, 205, marks=pytest.mark.slow),
        pytest.param(MASKED, 130, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_of_another_dtype_or_vocabulary(
    settings, draft_vocabulary, verify, device, monkeypatch
):
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (64, 128))
    made = make_round(
        *([2, 0, 1], 3, 205, settings, device),
        draft_vocabulary=draft_vocabulary,
        dtypes=(torch.float16, torch.bfloat16),
    )
    made["sample_noise"][0] = 0
    made["sample_noise"][2] = 1 - 2**-24
    check_block(made, settings, *judge(verify, made, settings))


def test_proposals_that_were_not_drawn(device):
    """Both rules have the same law in this case, and give the same answer."""
    made = make_round([0, 3, 2, 3], 3, 61, MASKED, device) | {"draft_logits": None}
    mine, theirs = (
        judge(rule_of(test, True), made, MASKED) for test in (Block.test, ops.reject_logits)
    )
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


@both
def test_a_prefix_may_pass_after_one_that_failed(verify, device):
    """A token that is unlikely alone is accepted because of the next; rejection never does that."""
    p = torch.tensor([[[0.4, 0.6], [0.9, 0.1], [0.5, 0.5]]], device=device)
    q = torch.tensor([[[0.8, 0.2], [0.45, 0.55]]], device=device)
    made = {
        "draft_tokens": torch.tensor([[0, 0]], device=device),
        "lens": torch.tensor([2], device=device),
        "draft_logits": q.log(),
        "target_logits": p.log(),
        "accept_noise": torch.tensor([[0.99, 0.98]], device=device),
        "sample_noise": torch.tensor([[0.2, 0.2, 0.7]], device=device),
    }
    tokens, accepted = judge(verify, made, (1.0, 0, 1.0))
    assert accepted.tolist() == [2] and tokens.tolist() == [[0, 0, 1]]


@needs_cuda
@pytest.mark.parametrize("batch", [1, 32], ids=lambda batch: f"B{batch}")
@pytest.mark.parametrize("settings", [(0.9, 0, 1.0), (0.9, 50, 0.95)], ids=str)
def test_full_vocabulary_in_a_graph(settings, batch, device):
    """The graph is captured with zeros and replayed with other inputs: the host reads nothing."""
    lens = [(5 * b + 5) % 6 for b in range(batch)]
    made = make_round(lens, 5, 128256, settings, device, draft_vocabulary=128000)
    empty = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    judge(triton_blocks, empty, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, accepted = judge(triton_blocks, empty, settings)
    for name, tensor in made.items():
        empty[name].copy_(tensor)
    for _ in range(3):
        tokens.fill_(-7)
        accepted.fill_(-7)
        graph.replay()
        check_block(made, settings, tokens, accepted)
