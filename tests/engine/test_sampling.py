"""Logits to probabilities against transformers' processors, and the random numbers."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy import stats
from specdec_kernels.sampling.reference import philox, uniform_reference

from specdec_cli.core.sampling import Purpose, round_noise, to_probs
from specdec_cli.core.types import SamplingParams
from tests.lossless import warped
from tests.support import noise_of

ROWS, VOCAB = 64, 50
INF, NAN = float("inf"), float("nan")


def random_logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(ROWS, VOCAB, generator=generator)


def assert_same(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Check that probabilities equal transformers' in fp64 within 1e-6; returns the distribution.

    In fp32 transformers' own rounding exceeds that at temperature 0.05, as it does not shift first.
    """
    probs, want = to_probs(logits, params), warped(logits.double(), params)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.double(), want, atol=1e-6, rtol=0)
    assert ((want > 0) | (probs == 0)).all()
    assert ((probs > 0) | (want < 1e-37)).all()  # fp32 ends there
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(logits)), atol=1e-5, rtol=0)
    return probs


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 1.7, 50.0])
def test_follows_transformers(temperature: float) -> None:
    logits = random_logits(0)
    for top_k, top_p in itertools.product(
        (0, 1, 2, 10, VOCAB - 1, VOCAB, 500), (1e-6, 0.1, 0.5, 0.95, 0.999, 1.0)
    ):
        probs = assert_same(logits, SamplingParams(temperature, top_k, top_p))
        if 0 < top_k < VOCAB:
            assert int((probs > 0).sum(1).max()) <= top_k
        if top_p == 1e-6:
            assert (probs.max(1).values == 1).all()


@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.6, 1.0])
def test_ties(top_k: int, top_p: float) -> None:
    """Several tokens have each value, also at the border of top-k."""
    rows = torch.tensor([[2.0, 1, 2, 0, 1, 2, 0, 1], [1.0] * 8, [0, 3, 0, 3, 0, 0, 0, 0]])
    probs = assert_same(rows, SamplingParams(0.7, top_k, top_p))
    if top_p == 1.0 and top_k:
        # Ties with the k-th value are kept.
        assert (probs > 0).sum(1).tolist() == [3 if top_k <= 3 else 6, 8, 2 if top_k <= 2 else 8]


def test_equal_tokens_reach_top_p_exactly() -> None:
    """With four tokens of 1/4, half of the mass is two tokens, without a third."""
    probs = assert_same(torch.zeros(1, 4), SamplingParams(1.0, 0, 0.5))
    assert int((probs > 0).sum()) == 2


def test_filters_apply_in_order() -> None:
    """Top-p sees the renormalised tokens that top-k left: 0.4 / 0.7 of the mass reaches 0.55."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (to_probs(logits, SamplingParams(1.0, 2, 0.55)) > 0).tolist() == [[1, 0, 0, 0]]
    assert (to_probs(logits, SamplingParams(1.0, 0, 0.55)) > 0).tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_widened_first(dtype: torch.dtype) -> None:
    logits, params = random_logits(1).to(dtype), SamplingParams(0.8, 20, 0.9)
    assert torch.equal(to_probs(logits, params), to_probs(logits.float(), params))


def test_leading_axes_are_rows() -> None:
    logits, params = random_logits(2), SamplingParams(0.8, 20, 0.9)
    folded = to_probs(logits.view(4, 16, VOCAB), params)
    assert torch.equal(folded.view(ROWS, VOCAB), to_probs(logits, params))


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38])
def test_tiny_temperature_is_the_maximum(temperature: float) -> None:
    logits = random_logits(3, scale=100.0)
    greedy = to_probs(logits, SamplingParams(0.0))
    for filters in ((0, 1.0), (5, 0.9)):
        torch.testing.assert_close(to_probs(logits, SamplingParams(temperature, *filters)), greedy)


def test_huge_temperature_is_uniform_and_huge_logits_are_finite() -> None:
    flat = to_probs(random_logits(4), SamplingParams(1e8))
    torch.testing.assert_close(flat, torch.full((ROWS, VOCAB), 1 / VOCAB), atol=1e-6, rtol=0)
    far = torch.tensor([[3e38, -3e38, 3e38]])
    assert to_probs(far, SamplingParams(0.5)).tolist() == [[0.5, 0.0, 0.5]]


def test_greedy_is_the_first_maximum() -> None:
    rows = torch.tensor([[0.0, 2, 1, 2], [5, 5, 5, 5], [-INF, -3, -INF, -3]])
    # The filters have no effect at temperature 0.
    for params in (SamplingParams(), SamplingParams(0.0, 1, 0.1)):
        assert to_probs(rows, params).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


def test_minus_infinity_is_a_token_that_cannot_be() -> None:
    """The padding of a draft with a smaller vocabulary has such logits."""
    logits = random_logits(5)
    logits[:, 40:] = -INF
    for params in (SamplingParams(0.9), SamplingParams(0.9, 45, 0.999), SamplingParams(0.9, 3)):
        probs = assert_same(logits, params)
        assert (probs[:, 40:] == 0).all()


@pytest.mark.parametrize("params", [SamplingParams(t, *f) for t in (0.0, 0.8) for f in [(0, 1.0)]])
@pytest.mark.parametrize(
    "row", [[1.0, NAN, 2.0], [NAN] * 3, [1.0, INF, 2.0], [INF, INF, 0.0], [-INF] * 3], ids=str
)
def test_rows_that_are_not_finite_are_marked(row: list[float], params: SamplingParams) -> None:
    """No other row is marked; verification looks at the row's sum."""
    for filters in (params, replace(params, top_k=2), replace(params, top_p=0.9)):
        probs = to_probs(torch.tensor([row, [0.0, 1.0, 2.0]]), filters)
        assert probs[0].sum().isnan()
        if params.temperature:
            assert probs[0].isnan().all()
        assert probs[1].isfinite().all()


# Random123's known-answer vectors for philox4x32-10.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter: str, key: str, want: str, device: torch.device) -> None:
    found = philox(
        torch.tensor(words(counter), device=device), torch.tensor(words(key), device=device)
    )
    assert found.tolist() == words(want)


def test_philox_works_on_rows() -> None:
    counters = torch.tensor([words(c) for c, _, _ in KNOWN])
    keys = torch.tensor([words(k) for _, k, _ in KNOWN])
    assert philox(counters, keys).tolist() == [words(w) for _, _, w in KNOWN]


def numbers(seed: int, indices: int, positions: int) -> torch.Tensor:
    """Uniform numbers [purpose, index, position]."""
    return uniform_reference(
        torch.tensor(seed),
        torch.arange(indices)[:, None],
        torch.arange(positions),
        torch.tensor(list(Purpose))[:, None, None],
    )


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 1, 2**63 - 1])
def test_uniform_numbers_are_uniform(seed: int) -> None:
    found = numbers(seed, 128, 128)
    assert found.dtype == torch.float32
    assert 0 <= found.min() and found.max() < 1
    assert torch.equal(found * 2**24, (found * 2**24).round())
    slices = {
        "all": found.flatten(),
        **{f"purpose {p}": found[p].flatten() for p in Purpose},
        **{f"index {i}": found[:, i].flatten() for i in (0, 1, 127)},
        **{f"position {i}": found[..., i].flatten() for i in (0, 1, 127)},
    }
    for name, values in slices.items():
        assert stats.kstest(values.double().numpy(), "uniform").pvalue > 1e-4, name


@pytest.mark.parametrize("seed", [0, 7])
def test_uniform_numbers_are_independent(seed: int) -> None:
    """There is no correlation between neighbours in any coordinate, nor between seeds."""
    found, other = numbers(seed, 128, 128).double(), numbers(seed + 1, 128, 128).double()
    far = numbers(seed + 2**32, 128, 128).double()
    pairs = {
        "purposes": (found[:-1], found[1:]),
        "purposes 0, 2": (found[0], found[2]),
        "indices": (found[:, :-1], found[:, 1:]),
        "positions": (found[..., :-1], found[..., 1:]),
        "index and position": (found[0], found[0].T),
        "seeds": (found, other),
        "high words of seeds": (found, far),
        "seed and index": (found[:, 1:], other[:, :-1]),
    }
    for name, (a, b) in pairs.items():
        if name == "index and position":
            off = ~torch.eye(128, dtype=torch.bool).triu()
            a, b = a[off], b[off]
        r = float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])
        assert abs(r) < 4.5 / a.numel() ** 0.5, name
    assert len(torch.cat((found, other, far)).unique()) > 0.98 * 3 * found.numel()


def test_number_depends_only_on_its_own_key() -> None:
    """The rest of the batch, its order and the number of draws do not matter."""
    indices, lengths = [4, 0, 90, 7], [3, 17, 3, 200]
    whole = noise_of(indices, lengths, 4, 5)
    for name in ("draft", "accept", "sample"):
        rows = getattr(whole, name)
        assert rows.shape == (4, 5 if name == "sample" else 4)
        backwards = getattr(noise_of(indices[::-1], lengths[::-1], 4, 5), name)
        assert torch.equal(backwards.flip(0), rows)
        for b in range(4):
            for k in (1, 4, 6):
                alone = getattr(noise_of([indices[b]], [lengths[b]], k, 5), name)
                width = min(alone.shape[1], rows.shape[1])
                assert torch.equal(alone[0, :width], rows[b, :width])
    reseeded = noise_of(indices, lengths, 4, 6)
    assert not (reseeded.sample == whole.sample).any()


def test_number_belongs_to_the_position_it_decides() -> None:
    """A round that begins one token later has the same numbers, shifted by one place."""
    now, later = (noise_of([9], [n], 4, 5) for n in (10, 11))
    assert torch.equal(now.draft[:, 1:], later.draft[:, :-1])
    assert torch.equal(now.accept[:, 1:], later.accept[:, :-1])
    assert torch.equal(now.sample[:, 1:], later.sample[:, :-1])


def test_numbers_of_a_round_serve_in_no_other() -> None:
    """This is for rules that read the numbers of positions which later rounds decide."""
    index, seed = torch.tensor([9]), torch.tensor(5)
    rounds = [round_noise(seed, index, torch.tensor([n]), 4, by_round=True) for n in (10, 11)]
    rounds.append(round_noise(seed, index, torch.tensor([10]), 4))
    found = torch.cat([torch.cat((n.draft, n.accept, n.sample), 1).flatten() for n in rounds])
    assert len(found.unique()) == len(found)


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 1e-300])
def test_a_temperature_below_any_fp32_number_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert to_probs(logits, SamplingParams(temperature)).tolist() == [[0.0, 1.0, 0.0]]
