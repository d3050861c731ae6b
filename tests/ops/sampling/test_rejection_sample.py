import itertools

import pytest
import torch
from specdec_kernels.sampling.reference import (
    rejection_sample_reference,
    sample_categorical_reference,
)
from torch import Tensor

both = pytest.mark.parametrize("sample", [rejection_sample_reference])
both_categorical = pytest.mark.parametrize("categorical", [sample_categorical_reference])
ALMOST_ONE = 1 - 2**-24


def make_inputs(
    lens: list[int], width: int, vocabulary: int, device: torch.device
) -> dict[str, Tensor]:
    """Random rows, drafts drawn from q; entries past a row's length are NaN or invalid tokens."""
    generator = torch.Generator().manual_seed(len(lens) * 1000 + width * 100 + vocabulary)
    rows = len(lens)
    q = torch.softmax(2 * torch.randn(rows, width, vocabulary, generator=generator), 2)
    p = torch.softmax(2 * torch.randn(rows, width + 1, vocabulary, generator=generator), 2)
    p[:, :width] = (p[:, :width] + 2 * q) / 3
    tokens = torch.multinomial(q.view(-1, vocabulary), 1, generator=generator) if width else q
    tokens = tokens.view(rows, width).long()
    accept_noise = torch.rand(rows, width, generator=generator)
    for b, length in enumerate(lens):
        tokens[b, length:] = -(10**12)
        q[b, length:] = float("nan")
        p[b, length + 1 :] = float("nan")
        accept_noise[b, length:] = float("nan")
    inputs = {
        "draft_tokens": tokens,
        "lens": torch.tensor(lens, dtype=torch.int32),
        "draft_probs": q,
        "target_probs": p,
        "accept_noise": accept_noise,
        "sample_noise": torch.rand(rows, width + 1, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def check_by_definition(inputs: dict[str, Tensor], tokens: Tensor, accepted: Tensor) -> None:
    """Check the definition row by row in fp64; rounding may only move a draw at a CDF step."""
    host = {name: tensor.cpu() for name, tensor in inputs.items()}
    for b, length in enumerate(host["lens"].tolist()):
        count = 0
        while count < length:
            draft = host["draft_tokens"][b, count]
            ratio_test = host["accept_noise"][b, count] * host["draft_probs"][b, count, draft]
            if not ratio_test < host["target_probs"][b, count, draft]:
                break
            count += 1
        assert int(accepted[b]) == count, f"row {b}: accepted"
        row = tokens[b].tolist()
        assert row[:count] == host["draft_tokens"][b, :count].tolist(), f"row {b}: drafts"
        assert row[count + 1 :] == [-1] * (len(row) - count - 1), f"row {b}: padding"
        weights = host["target_probs"][b, count].double()
        if count < length:
            weights = (weights - host["draft_probs"][b, count].double()).clamp_min(0)
        running = torch.cumsum(weights / weights.sum(), 0)
        noise, drawn = float(host["sample_noise"][b, count]), row[count]
        assert weights[drawn] > 0, f"row {b}: drawn token has no weight"
        assert running[drawn] - weights[drawn] / weights.sum() <= noise + 2e-6, f"row {b}: too far"
        assert running[drawn] >= noise - 2e-6, f"row {b}: too early"


CASES = [
    ([3, 3], 3, 11),
    ([0, 1, 2, 4], 4, 61),
    ([5, 0, 5, 2, 1], 6, 257),
    ([1], 1, 2),
    ([1, 1], 1, 1),
    ([0, 0], 0, 33),
    ([8, 3], 8, 1999),
]


@both
@pytest.mark.parametrize(
    ("lens", "width", "vocabulary"),
    CASES,
    ids=[f"lens{lens}-K{width}-V{vocabulary}" for lens, width, vocabulary in CASES],
)
def test_follows_the_definition(lens, width, vocabulary, sample, device):
    inputs = make_inputs(lens, width, vocabulary, device)
    if vocabulary == 1:
        inputs["draft_probs"].fill_(1)
        inputs["target_probs"].fill_(1)
    tokens, accepted = sample(**inputs)
    assert tokens.dtype == torch.int64 and accepted.dtype == torch.int32
    check_by_definition(inputs, tokens, accepted)


def test_probabilities_may_be_slices_of_a_padded_vocabulary(device):
    inputs = make_inputs([2, 1], 2, 50, device)
    expected = rejection_sample_reference(**inputs)
    for name in ("draft_probs", "target_probs"):
        wide = torch.cat([inputs[name], torch.full_like(inputs[name], float("nan"))], dim=2)
        inputs[name] = wide[..., :50]
    tokens, accepted = rejection_sample_reference(**inputs)
    assert tokens.tolist() == expected[0].tolist()
    assert accepted.tolist() == expected[1].tolist()


def test_one_draft_leaves_the_target_distribution_unchanged():
    """Over a fine grid of both noises, each draft weighted by q, the output has distribution p."""
    p = torch.tensor([0.5, 0.1, 0.0, 0.4])
    q = torch.tensor([0.2, 0.3, 0.45, 0.05])
    steps = 120
    grid = (torch.arange(steps) + 0.5) / steps
    noise = torch.cartesian_prod(grid, grid)
    draft = torch.arange(4).repeat_interleave(len(noise))
    u, s = noise.repeat(4, 1).unbind(1)
    rows = len(draft)
    bonus = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tokens, accepted = rejection_sample_reference(
        draft[:, None],
        torch.ones(rows, dtype=torch.int32),
        q.expand(rows, 1, 4),
        torch.stack([p, bonus]).expand(rows, 2, 4),
        u[:, None],
        s[:, None].expand(rows, 2),
    )
    weight = q[draft].double() / steps**2
    first = torch.zeros(4, dtype=torch.float64).index_add(0, tokens[:, 0], weight)
    assert torch.allclose(first, p.double(), atol=2 / steps)
    assert first[2] == 0
    both_drawn = accepted == 1
    second = torch.zeros(4, dtype=torch.float64).index_add(
        0, tokens[both_drawn, 1], weight[both_drawn]
    )
    assert torch.allclose(second / second.sum(), bonus.double(), atol=2 / steps)
    rate = float(weight[both_drawn].sum())
    assert abs(rate - float(torch.minimum(p, q).sum())) < 2 / steps


def test_two_drafts_leave_the_joint_distribution_unchanged():
    """p and q at the second place depend on the first token; the pair still follows p."""
    generator = torch.Generator().manual_seed(5)
    size, steps = 3, 20
    p1, q1 = torch.softmax(torch.randn(2, size, generator=generator), 1)
    p2, q2 = torch.softmax(torch.randn(2, size, size, generator=generator), 2)
    grid = (torch.arange(steps) + 0.5) / steps
    pairs = torch.tensor(list(itertools.product(range(size), range(size))))
    noise = torch.cartesian_prod(grid, grid, grid)
    draft = pairs.repeat_interleave(len(noise), 0)
    u1, u2, s = noise.repeat(len(pairs), 1).unbind(1)
    a = draft[:, 0]
    rows = len(draft)
    tokens, accepted = rejection_sample_reference(
        draft,
        torch.full((rows,), 2, dtype=torch.int32),
        torch.stack([q1.expand(rows, size), q2[a]], 1),
        torch.stack([p1.expand(rows, size), p2[a], p1.expand(rows, size)], 1),
        torch.stack([u1, u2], 1),
        s[:, None].expand(rows, 3),
    )
    weight = (q1[a] * q2[a, draft[:, 1]]).double() / steps**3
    first = torch.zeros(size, dtype=torch.float64).index_add(0, tokens[:, 0], weight)
    assert torch.allclose(first, p1.double(), atol=2 / steps)
    pair = accepted >= 1
    joint = torch.zeros(size * size, dtype=torch.float64).index_add(
        0, tokens[pair, 0] * size + tokens[pair, 1], weight[pair]
    )
    conditional = joint.view(size, size) / joint.view(size, size).sum(1, keepdim=True)
    assert torch.allclose(conditional, p2.double(), atol=2 / steps)


@both
def test_greedy_is_the_one_hot_case(sample, device):
    """Drafts equal to the target's tokens are accepted; the first other one is replaced by it."""
    vocabulary = 7
    draft = torch.tensor([[1, 2, 3], [1, 5, 3], [6, 2, 3]], device=device)
    target = torch.tensor([[1, 2, 3, 4]], device=device).expand(3, 4)
    noise = torch.full((3, 4), ALMOST_ONE, device=device)
    tokens, accepted = sample(
        draft,
        torch.full((3,), 3, dtype=torch.int32, device=device),
        torch.nn.functional.one_hot(draft, vocabulary).float(),
        torch.nn.functional.one_hot(target, vocabulary).float(),
        noise[:, :3],
        noise,
    )
    assert accepted.tolist() == [3, 1, 0]
    assert tokens.tolist() == [[1, 2, 3, 4], [1, 2, -1, -1], [1, -1, -1, -1]]


@both
def test_empty_residual_draws_from_the_target(sample, device):
    """Rounding can make q exceed p everywhere, so that max(p - q, 0) is zero."""
    p = torch.tensor([0.0, 0.25, 0.75], device=device)
    q = torch.tensor([0.0, 0.5, 0.75], device=device)
    noise = torch.tensor([[0.9, 0.0], [0.9, 0.3]], device=device)
    tokens, accepted = sample(
        torch.tensor([[1], [1]], device=device),
        torch.ones(2, dtype=torch.int32, device=device),
        q.expand(2, 1, 3),
        p.expand(2, 2, 3),
        noise[:, :1],
        torch.stack([noise[:, 1], noise[:, 1]], 1),
    )
    assert accepted.tolist() == [0, 0]
    assert tokens.tolist() == [[1, -1], [2, -1]]


@both
def test_zero_draft_row_draws_from_the_target(sample, device):
    """Under a CUDA graph a step past k_i has q = 0, so its residual is p, as for a bonus draw."""
    p = torch.tensor([0.25, 0.25, 0.5], device=device)
    tokens, accepted = sample(
        torch.tensor([[0]], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, 1, 3, device=device),
        p.expand(1, 2, 3),
        torch.zeros(1, 1, device=device),
        torch.full((1, 2), 0.4, device=device),
    )
    assert accepted.tolist() == [0] and tokens.tolist() == [[1, -1]]


@both
@pytest.mark.parametrize("place", [0, 1, 2], ids=lambda place: f"place{place}")
def test_nan_in_the_target_voids_its_row_alone(place, sample, device):
    inputs = make_inputs([2, 2, 1], 2, 40, device)
    expected = rejection_sample_reference(**inputs)
    inputs["target_probs"][1, place, 17] = float("nan")
    tokens, accepted = sample(**inputs)
    assert int(accepted[1]) == -1 and tokens[1].tolist() == [-1, -1, -1]
    for b in (0, 2):
        assert int(accepted[b]) == int(expected[1][b])
        assert tokens[b].tolist() == expected[0][b].tolist()


@both_categorical
def test_categorical_over_a_grid_of_noise(categorical, device):
    p = torch.tensor([0.0, 0.3, 0.0, 0.45, 0.25, 0.0])
    steps = 20
    noise = (torch.arange(steps, device=device) + 0.5) / steps
    drawn = categorical(p.to(device).expand(steps, 6), noise)
    counts = torch.bincount(drawn.cpu(), minlength=6)
    assert counts.tolist() == [0, 6, 0, 9, 5, 0]


@both_categorical
def test_categorical_never_draws_zero_probability(categorical, device):
    probs = torch.zeros(4, 1000, device=device)
    probs[:, 100:900] = torch.rand(800, generator=torch.Generator().manual_seed(0)).to(device)
    noise = torch.tensor([0.0, ALMOST_ONE, 1.0, 0.5], device=device)
    drawn = categorical(probs, noise).tolist()
    assert drawn[0] == 100 and drawn[2] == 899
    assert all(100 <= token < 900 for token in drawn)


@both_categorical
def test_categorical_marks_nan(categorical, device):
    probs = torch.full((2, 5), 0.2, device=device)
    probs[1, 3] = float("nan")
    noise = torch.full((2,), 0.5, device=device)
    assert categorical(probs, noise).tolist() == [2, -1]


@both
def test_nan_in_the_draft_draws_from_the_target(sample, device):
    inputs = make_inputs([1], 1, 30, device)
    inputs["draft_probs"][0, 0, ::2] = float("nan")
    inputs["accept_noise"].fill_(ALMOST_ONE)
    inputs["draft_probs"][0, 0, inputs["draft_tokens"][0, 0]] = float("nan")
    tokens, accepted = sample(**inputs)
    p = inputs["target_probs"][:, 0]
    expected = sample_categorical_reference(p, inputs["sample_noise"][:, 0])
    assert accepted.tolist() == [0] and tokens[:, 0].tolist() == expected.tolist()
