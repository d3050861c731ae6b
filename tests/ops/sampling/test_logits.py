"""Sampling and rejection over logits, against their definitions in fp64."""

from collections.abc import Callable

import pytest
import torch
from ops_helpers import needs_cuda
from specdec_kernels import ops
from specdec_kernels.sampling import logit_rows_triton as rows_of_logits
from specdec_kernels.sampling.logit_rows_triton import logit_rows_triton
from specdec_kernels.sampling.logits_triton import sample_logits_triton
from specdec_kernels.sampling.reference import LogitRows, to_probs
from specdec_kernels.sampling.verify_triton import reject_logits_triton, verify_block_triton
from torch import Tensor

from specdec_cli.acceptance.block import verify_block
from tests.lossless import chi_square

INF, NAN = float("inf"), float("nan")
ALMOST_ONE = 1 - 2**-24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Settings = tuple[float, int, float]  # temperature, top_k, top_p
Rule = Callable[..., tuple[Tensor, Tensor]]
SETTINGS: list[Settings] = [
    (0.8, 0, 1.0),
    (1.0, 1, 1.0),
    (1.3, 50, 1.0),
    (0.7, 0, 0.9),
    (1.0, 0, 1e-6),
    (1.1, 20, 0.8),
    (1.0, 10**6, 0.999),
]


def rule_of(function: Rule, reads_rows: bool) -> Rule:
    """A rule as a function of logits and noise; rules that need `logit_rows` get them computed."""

    def decide(
        draft_tokens: Tensor,
        lens: Tensor,
        draft_logits: Tensor | None,
        target_logits: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        accept_noise: Tensor,
        sample_noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        def rows_of(logits: Tensor) -> LogitRows:
            batch, width, _ = logits.shape
            if width == 0:
                return LogitRows(accept_noise.new_empty(0, 4), accept_noise.new_empty(0, 1))
            if logits.stride(0) == 0:  # all rounds share the same rows
                one = logit_rows_triton(logits[0], temperature, top_k, top_p)
                return LogitRows(*(t.repeat(batch, 1) for t in one))
            return logit_rows_triton(logits.flatten(0, 1), temperature, top_k, top_p)

        draft_rows = target = None
        if reads_rows:
            target = rows_of(target_logits)
            if draft_logits is not None:
                draft_rows = rows_of(draft_logits).rows.view(*draft_logits.shape[:2], 4)
        return function(
            ops.Verification(
                *(draft_tokens, lens, draft_logits, draft_rows, target_logits, target),
                *(temperature, top_k, top_p, accept_noise, sample_noise),
            )
        )

    return decide


torch_rejects = rule_of(ops.reject_logits.reference, False)
torch_blocks = rule_of(verify_block.reference, False)
triton_rejects = rule_of(reject_logits_triton, True)
triton_blocks = rule_of(verify_block_triton, True)
both = pytest.mark.parametrize("rows_of", [ops.logit_rows.reference, logit_rows_triton])
both_rejections = pytest.mark.parametrize(
    "reject", [torch_rejects, triton_rejects], ids=["torch", "triton"]
)
every_rule = pytest.mark.parametrize(
    "reject",
    [torch_rejects, triton_rejects, torch_blocks, triton_blocks],
    ids=["reject-torch", "reject-triton", "block-torch", "block-triton"],
)


def kept_by(logits: Tensor, rows: Tensor) -> Tensor:
    """Mask of tokens that a row's threshold and index keep, bool [R, V]; none of probability 0."""
    x, index = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    threshold, first = rows[:, 2:3], rows[:, 3:4]
    return ((x > threshold) | ((x == threshold) & (index >= first))) & (x > -INF)


def exact_weights(logits: Tensor, temperature: float) -> Tensor:
    x = logits.double()
    return ((x - x.amax(1, keepdim=True)) / temperature).exp()


def exact_probs(logits: Tensor, settings: Settings) -> Tensor:
    """`to_probs` of logits [..., V] in fp64, with the fp32 choice of kept tokens."""
    weights = exact_weights(logits.flatten(0, -2), settings[0]).view(logits.shape)
    weights = weights * (to_probs(logits, *settings) > 0)
    return weights / weights.sum(-1, keepdim=True)


def check_rows(logits: Tensor, settings: Settings, found: LogitRows) -> None:
    """Check rows by the definition in fp64. Rounding may move top-p's border in close cases."""
    temperature, top_k, top_p = settings
    vocabulary = logits.shape[1]
    assert torch.equal(found.rows[:, 0], logits.float().amax(1))
    kept, weights = kept_by(logits, found.rows).cpu(), exact_weights(logits, temperature).cpu()
    x = logits.float().cpu()
    for r in range(len(x)):
        order = x[r].argsort(stable=True)
        possible = x[r] > -INF
        if 0 < top_k < vocabulary:
            possible &= x[r] >= x[r].topk(top_k).values[-1]
        if top_p == 1.0:
            assert torch.equal(kept[r], possible), f"row {r}"
        else:
            count = int(kept[r].sum())
            assert 1 <= count and kept[r][order[-count:]].all(), f"row {r}: not the last in order"
            assert not (kept[r] & ~possible).any(), f"row {r}: outside top-k"
            mass = (weights[r] * possible)[order]
            total = mass.sum()
            assert mass[-count:].sum() >= (top_p - 5e-6) * total, f"row {r}: too few"
            assert count == 1 or mass[-count + 1 :].sum() < (top_p + 5e-6) * total, f"row {r}: many"
    total = (weights * kept).sum(1)
    torch.testing.assert_close(found.rows[:, 1].cpu().double(), total, rtol=2e-5, atol=0)
    parts = found.parts.sum(1).cpu().double()
    torch.testing.assert_close(parts, total, rtol=2e-5, atol=0)


def some_logits(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random logits: ties in the second row, impossible tokens in the third, equal values in the
    fourth, only negative ones in the fifth; every second row of a wider tensor of NaN."""
    generator = torch.Generator().manual_seed(vocabulary)
    x = 3 * torch.randn(rows, vocabulary, generator=generator)
    for r in range(rows):
        if r % 5 == 1:
            x[r] = (x[r] * 2).round() / 2
        elif r % 5 == 2:
            x[r, torch.rand(vocabulary, generator=generator) < 0.6] = -INF
            x[r, vocabulary // 2] = 1.0
        elif r % 5 == 3:
            x[r] = 0.25
        elif r % 5 == 4:
            x[r] = -x[r].abs() - 5
    wide = torch.full((2 * rows, vocabulary + 3), NAN)
    wide[::2, :vocabulary] = x
    return wide.to(device, dtype)[::2, :vocabulary]


@pytest.mark.pairwise
@both
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1, torch.float32), (7, torch.bfloat16), *((1000, dtype) for dtype in DTYPES)],
    ids=str,
)
def test_rows_follow_the_definition(vocabulary, dtype, settings, rows_of, device):
    logits = some_logits(5, vocabulary, dtype, device)
    check_rows(logits, settings, rows_of(logits, *settings))


@pytest.mark.each_value
@pytest.mark.parametrize("settings", [(0.9, 0, 1.0), (0.9, 900, 0.9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_several_parts(dtype, settings, device):
    logits = some_logits(3, 5003, dtype, device)
    check_rows(logits, settings, logit_rows_triton(logits, *settings))


@pytest.mark.each_value
@pytest.mark.parametrize("few", [0, 1000], ids=["many", "few"])
@pytest.mark.parametrize("settings", [(0.8, 0, 1.0), (1.3, 50, 1.0), (1.1, 90, 0.8)], ids=str)
def test_cuts_of_the_vocabulary(settings, few, device, monkeypatch):
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (32, 64))
    monkeypatch.setattr(rows_of_logits, "FEW_PROGRAMS", few)
    logits = some_logits(3, 205, torch.bfloat16, device)
    stats = logit_rows_triton(logits, *settings)
    assert stats.parts.shape[1] == (7 if few else 4)
    check_rows(logits, settings, stats)
    for noise in (0.0, 0.3, ALMOST_ONE):
        u = torch.full((3,), noise, device=device)
        check_draws(logits, settings, u, sample_logits_triton(logits, stats, *settings, u))


@pytest.mark.pairwise
@both
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(0, 0.1), (0, 0.49), (0, 0.5), (0, 0.51), (0, 0.9), (1, 0.5), (3, 1.0), (5, 0.9)],
)
def test_ties_at_the_border(top_p, top_k, rows_of, device):
    """The kept tokens are those of `to_probs`: of equal tokens the ones of higher index."""
    rows = [[2.0, 1, 2, 0, 1, 2, 0, 1], [1.0] * 8, [0, 3, 0, 3, 0, 0, 0, 0], [-0.0, 0.0] * 4]
    logits = torch.tensor(rows, dtype=torch.bfloat16, device=device)
    found = rows_of(logits, 0.7, top_k, top_p)
    assert torch.equal(kept_by(logits, found.rows), to_probs(logits, 0.7, top_k, top_p) > 0)


@both
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [*((t, (0, 1.0)) for t in (1e-3, 1e-10, 1e-38, 1e-46, 1e8)), (1e-3, (5, 0.9)), (1e8, (5, 0.9))],
    ids=str,
)
def test_extreme_temperatures(filters, temperature, rows_of, device):
    logits = 100 * torch.randn(3, 60, generator=torch.Generator().manual_seed(1))
    logits[2, ::2] = torch.tensor([3e38, -3e38]).repeat(15)
    logits = logits.to(device)
    found = rows_of(logits, temperature, *filters)
    if temperature < 1:
        assert found.rows[:2, 1].tolist() == [1, 1]
        assert found.rows[2, 1] == (14 if filters == (5, 0.9) else 15)
    else:
        total = to_probs(logits, temperature, *filters).amax(1).reciprocal()
        torch.testing.assert_close(found.rows[:, 1], total)


@both
@pytest.mark.parametrize("filters", [(0, 1.0), (2, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_void_rows(dtype, filters, rows_of, device, monkeypatch):
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (32, 64))
    logits = some_logits(6, 40, dtype, device).clone()
    logits[0, 33] = NAN
    logits[1, 7] = INF
    logits[2] = -INF
    logits[4, 3:7] = -INF
    logits[4, 20] = NAN
    logits[5, :] = NAN
    found = rows_of(logits, 0.8, *filters)
    assert found.rows[:, 1].isnan().tolist() == [True, True, True, False, True, True]
    noise = torch.full((6,), 0.5, device=device)
    if rows_of is logit_rows_triton:
        drawn = sample_logits_triton(logits, found, 0.8, *filters, noise)
    else:
        drawn = ops.sample_logits.reference(logits, None, 0.8, *filters, noise)
    assert (drawn >= 0).tolist() == [False, False, False, True, False, False]


def check_cdf(weights: Tensor, noise: float, drawn: int, name: str) -> None:
    """Check that `drawn` is the inverse CDF of fp64 weights, up to rounding."""
    running = torch.cumsum(weights / weights.sum(), 0)
    assert weights[drawn] > 0, f"{name}: drawn token has no weight"
    assert running[drawn] - weights[drawn] / weights.sum() <= noise + 2e-5, f"{name}: too far"
    assert running[drawn] >= noise - 2e-5, f"{name}: too early"


def check_draws(logits: Tensor, settings: Settings, noise: Tensor, drawn: Tensor) -> None:
    rows = ops.logit_rows.reference(logits.cpu(), *settings).rows
    weights = exact_weights(logits.cpu(), settings[0]) * kept_by(logits.cpu(), rows)
    for r in range(len(weights)):
        check_cdf(weights[r], float(noise[r]), int(drawn[r]), f"row {r}")


FEW_OR_MANY = [pytest.param(7, s, id=f"7-{s}") for s in SETTINGS] + [
    pytest.param(1999, s, id=f"1999-{s}", marks=[pytest.mark.slow] * (s not in SETTINGS[::5]))
    for s in SETTINGS
]


@pytest.mark.parametrize(("vocabulary", "settings"), FEW_OR_MANY)
def test_draws_follow_the_definition(vocabulary, settings, device):
    logits = some_logits(5, vocabulary, torch.bfloat16, device)
    noise = torch.rand(5, 2, generator=torch.Generator().manual_seed(2)).to(device)[:, 0]
    stats = logit_rows_triton(logits, *settings)
    drawn = sample_logits_triton(logits, stats, *settings, noise)
    assert drawn.dtype == torch.int64
    check_draws(logits, settings, noise, drawn)
    assert torch.equal(drawn, ops.sample_logits.reference(logits, None, *settings, noise))


def rounds(device: torch.device) -> int:
    """Number of draws of a chi-square test; the interpreter takes milliseconds for each."""
    return 20_000 if device.type == "cuda" else 400


@pytest.mark.parametrize(
    "settings", [pytest.param((0.7, 0, 1.0), marks=pytest.mark.slow), (1.2, 12, 0.9)], ids=str
)
def test_draws_have_the_distribution(settings, device):
    """The test would also notice another temperature, or a missing filter."""
    count, vocabulary = rounds(device), 24
    generator = torch.Generator().manual_seed(3)
    logits = (1.5 * torch.randn(1, vocabulary, generator=generator)).bfloat16()
    stats = logit_rows_triton(logits.to(device), *settings)
    repeated = LogitRows(*(t.repeat(count, 1) for t in stats))
    noise = torch.rand(count, generator=generator).to(device)
    drawn = sample_logits_triton(logits.to(device).expand(count, -1), repeated, *settings, noise)
    counts = drawn.cpu().bincount(minlength=vocabulary)[None]
    assert chi_square(counts, to_probs(logits, *settings)) > 1e-3
    temperature, top_k, top_p = settings
    assert chi_square(counts, to_probs(logits, 2 * temperature, top_k, top_p)) < 1e-6
    if top_k:
        assert chi_square(counts, to_probs(logits, temperature, 0, 1.0)) < 1e-6


def make_round(
    lens: list[int],
    width: int,
    vocabulary: int,
    settings: Settings,
    device: torch.device,
    *,
    draft_vocabulary: int = 0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
) -> dict[str, Tensor]:
    """Arguments of a rule except the settings, with drafts drawn from q. Entries past a row's
    length are NaN or invalid tokens."""
    generator = torch.Generator().manual_seed(len(lens) * 1000 + width * 100 + vocabulary)
    batch, own = len(lens), draft_vocabulary or vocabulary
    p = 2 * torch.randn(batch, width + 1, vocabulary, generator=generator)
    q = p[:, :width, :own] + torch.randn(batch, width, own, generator=generator)
    p, q = p.to(dtypes[1]), q.to(dtypes[0])
    tokens = torch.zeros(batch, width, dtype=torch.int64)
    if width:
        u = torch.rand(batch * width, generator=generator)
        drawn = ops.sample_logits.reference(q.flatten(0, 1), None, *settings, u)
        tokens = drawn.view(batch, width)
    accept_noise = torch.rand(batch, width, generator=generator)
    for b, length in enumerate(lens):
        tokens[b, length:] = -(10**12)
        q[b, length:] = NAN
        p[b, length + 1 :] = NAN
        accept_noise[b, length:] = NAN
    wide = torch.full((batch, 2 * width + 1, own + 5), NAN, dtype=q.dtype)
    wide[:, :width, :own] = q
    made = {
        "draft_tokens": tokens,
        "lens": torch.tensor(lens),
        "draft_logits": wide.to(device)[:, :width, :own],
        "target_logits": p,
        "accept_noise": accept_noise,
        "sample_noise": torch.rand(batch, width + 1, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def judge(reject, made: dict[str, Tensor], settings: Settings) -> tuple[Tensor, Tensor]:
    names = ("draft_tokens", "lens", "draft_logits", "target_logits")
    return reject(*(made[n] for n in names), *settings, made["accept_noise"], made["sample_noise"])


def check_round(
    made: dict[str, Tensor],
    settings: Settings,
    tokens: Tensor,
    accepted: Tensor,
    one_hot: Tensor | None = None,
) -> None:
    """Check a rule row by row; rounding may only move a draw at a CDF step.

    one_hot: q to use in place of the draft's logits.
    """
    host = {name: tensor.cpu() for name, tensor in made.items()}
    missing = host["target_logits"].shape[2] - host["draft_logits"].shape[2]
    padded = torch.nn.functional.pad(host["draft_logits"].float(), (0, missing), value=-INF)
    p = exact_probs(host["target_logits"], settings)
    q = exact_probs(padded, settings) if one_hot is None else one_hot.cpu()
    for b, length in enumerate(host["lens"].tolist()):
        count = 0
        while count < length:
            draft = host["draft_tokens"][b, count]
            if not host["accept_noise"][b, count] * q[b, count, draft] < p[b, count, draft]:
                break
            count += 1
        assert int(accepted[b]) == count, f"row {b}: accepted"
        row = tokens[b].tolist()
        assert row[:count] == host["draft_tokens"][b, :count].tolist(), f"row {b}: drafts"
        assert row[count + 1 :] == [-1] * (len(row) - count - 1), f"row {b}: padding"
        weights = p[b, count]
        if count < length:
            weights = (weights - q[b, count]).clamp_min(0)
        check_cdf(weights, float(host["sample_noise"][b, count]), row[count], f"row {b}")


PLAIN, MASKED = (0.8, 0, 1.0), (1.1, 20, 0.9)
CASES = [
    ([3, 3], 3, 11, PLAIN, torch.int32),
    ([2, 1], 2, 11, MASKED, torch.int64),
    ([0, 1, 2, 4], 4, 61, PLAIN, torch.int64),
    ([3, 0, 1], 3, 61, MASKED, torch.int32),
    ([5, 0, 5, 2, 1], 6, 257, PLAIN, torch.int64),
    ([1, 1], 1, 2, PLAIN, torch.int64),
    ([0, 0], 0, 33, PLAIN, torch.int64),
    ([0, 0], 0, 33, MASKED, torch.int64),
    ([4, 2], 4, 1999, PLAIN, torch.int64),
]


@both_rejections
@pytest.mark.parametrize(
    ("lens", "width", "vocabulary", "settings", "lens_dtype"),
    CASES,
    ids=[f"lens{lens}-K{width}-V{size}-{settings}" for lens, width, size, settings, _ in CASES],
)
def test_rejection_follows_the_rule(lens, width, vocabulary, settings, lens_dtype, reject, device):
    made = make_round(lens, width, vocabulary, settings, device)
    made["lens"] = made["lens"].to(lens_dtype)
    tokens, accepted = judge(reject, made, settings)
    assert tokens.dtype == accepted.dtype == torch.int64
    check_round(made, settings, tokens, accepted)


@pytest.mark.each_value
@both_rejections
@pytest.mark.parametrize(
    ("lens", "width", "vocabulary", "settings"),
    [
        ([0, 1, 2, 4], 4, 61, PLAIN),
        ([3, 0, 3, 2, 1, 3], 3, 61, MASKED),
        ([5, 0, 2], 6, 257, (1.3, 0, 0.6)),
        ([1, 1], 1, 2, PLAIN),
        ([4, 2], 4, 1999, PLAIN),
    ],
)
@pytest.mark.parametrize("scale", [1, 6], ids=["flat", "peaked"])
def test_proposals_that_were_not_drawn(
    lens, width, vocabulary, settings, scale, reject, device, monkeypatch
):
    """q is one-hot: d is accepted with the target's chance, and never drawn after a rejection."""
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (64, 128))
    made = make_round(lens, width, vocabulary, settings, device)
    made["target_logits"] = made["target_logits"] * scale
    tokens, accepted = judge(reject, made | {"draft_logits": None}, settings)
    places = made["draft_tokens"].clamp(min=0)
    one_hot = torch.nn.functional.one_hot(places, vocabulary).double()
    check_round(made, settings, tokens, accepted, one_hot)
    for b, length in enumerate(lens):
        if accepted[b] < length:
            assert tokens[b, accepted[b]] != made["draft_tokens"][b, accepted[b]]


@pytest.mark.each_value
@pytest.mark.parametrize("draft_vocabulary", [1, 130, 205])
@pytest.mark.parametrize(
    ("dtypes", "settings"),
    [
        ((torch.float16, torch.bfloat16), (0.8, 0, 1.0)),
        ((torch.float32, torch.float32), (0.8, 0, 1.0)),
        ((torch.bfloat16, torch.bfloat16), (0.8, 150, 1.0)),
    ],
    ids=["fp16-bf16", "fp32-fp32", "masked"],
)
def test_drafts_of_another_dtype_or_vocabulary(
    dtypes, settings, draft_vocabulary, device, monkeypatch
):
    monkeypatch.setattr(rows_of_logits, "BLOCKS", (64, 128))
    made = make_round(
        *([1, 0, 1], 1, 205, settings, device),
        draft_vocabulary=draft_vocabulary,
        dtypes=dtypes,
    )
    made["sample_noise"][0] = 0
    made["sample_noise"][2] = ALMOST_ONE
    for reject in (torch_rejects, triton_rejects):
        check_round(made, settings, *judge(reject, made, settings))


@every_rule
@pytest.mark.parametrize("place", [0, 1, 2], ids=lambda place: f"place{place}")
def test_a_void_target_row_voids_its_round_alone(place, reject, device):
    settings = (0.8, 0, 1.0)
    made = make_round([2, 2, 1], 2, 40, settings, device)
    want = judge(reject, made, settings)
    made["target_logits"][1, place, 17] = NAN
    tokens, accepted = judge(reject, made, settings)
    assert int(accepted[1]) == -1 and tokens[1].tolist() == [-1, -1, -1]
    for b in (0, 2):
        assert accepted[b] == want[1][b] and torch.equal(tokens[b], want[0][b])


@every_rule
def test_a_draft_without_a_token_spoils_its_round_alone(reject, device):
    settings = (0.8, 0, 0.9)
    made = make_round([2, 2, 1], 2, 40, settings, device)
    want = judge(reject, made, settings)
    made["draft_logits"][1, 1, 5] = NAN
    made["draft_tokens"][1, 1] = -1
    _, accepted = judge(reject, made, settings)
    assert accepted.tolist() == [int(want[1][0]), -2, int(want[1][2])]
    made["target_logits"][1, 0, 5] = INF  # the draft is reported, because it comes first
    assert judge(reject, made, settings)[1].tolist() == accepted.tolist()


@every_rule
def test_a_draft_equal_to_the_target_is_accepted(reject, device):
    settings = (0.9, 10, 0.9)
    made = make_round([3, 3], 3, 50, settings, device)
    made["draft_logits"] = made["target_logits"][:, :3]
    u = torch.full((6,), 0.4, device=device)
    drawn = ops.sample_logits.reference(made["draft_logits"].flatten(0, 1), None, *settings, u)
    made["draft_tokens"] = drawn.view(2, 3)
    tokens, accepted = judge(reject, made, settings)
    assert accepted.tolist() == [3, 3] and torch.equal(tokens[:, :3], made["draft_tokens"])


# In every row the kernel decides as the rule does, above; a law takes the interpreter seconds.
@pytest.mark.parametrize(
    ("reject", "settings"),
    [
        pytest.param(reject, s, id=f"{name}-{s}", marks=[pytest.mark.slow] * is_slow)
        for name, reject, s, is_slow in (
            ("torch", torch_rejects, (0.8, 0, 1.0), True),
            ("torch", torch_rejects, (1.2, 6, 0.9), False),
            ("triton", triton_rejects, (0.8, 0, 1.0), True),
            ("triton", triton_rejects, (1.2, 6, 0.9), True),
        )
    ],
)
def test_the_emitted_token_has_the_targets_distribution(settings, reject, device):
    """The test would also notice a draft that claims another distribution than its own."""
    generator = torch.Generator().manual_seed(7)
    count = rounds(device) if reject is triton_rejects else 20_000
    vocabulary = 8
    p = 1.5 * torch.randn(1, 1, vocabulary, generator=generator)
    q = 0.7 * p + torch.randn(1, 1, vocabulary, generator=generator)
    target = p.bfloat16().expand(count, 2, vocabulary)
    draft = q.bfloat16().expand(count, 1, vocabulary)
    noise = torch.rand(count, 4, generator=generator)
    drafts = ops.sample_logits.reference(draft[:, 0], None, *settings, noise[:, 0])[:, None]
    common = (drafts, torch.ones(count, dtype=torch.int64))
    want = to_probs(p.bfloat16()[0], *settings)

    def p_value(claimed: Tensor, count: int = count) -> float:
        given = (t[:count].to(device) for t in (*common, claimed, target))
        draws = (noise[:count, 1:2].to(device), noise[:count, 2:].to(device))
        tokens, _ = reject(*given, *settings, *draws)
        return chi_square(tokens[:, 0].cpu().bincount(minlength=vocabulary)[None], want)

    assert p_value(draft) > 1e-3
    assert p_value((-q).bfloat16().expand_as(draft), count // 4) < 1e-6


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 48], ids=lambda rows: f"R{rows}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [*SETTINGS, (2.0, 0, 0.95), (0.8, 50, 0.9)], ids=str)
def test_full_vocabulary(settings, dtype, num_rows, device):
    logits = some_logits(num_rows, 128256, dtype, device)
    stats = logit_rows_triton(logits, *settings)
    for r in range(min(num_rows, 5)):
        one = slice(r, r + 1)
        check_rows(logits[one], settings, LogitRows(stats.rows[one], stats.parts[one]))
    noise = torch.rand(num_rows, generator=torch.Generator().manual_seed(2)).to(device)
    drawn = sample_logits_triton(logits, stats, *settings, noise)
    weights = exact_weights(logits, settings[0]) * kept_by(logits, stats.rows)
    for r in range(num_rows):
        check_cdf(weights[r].cpu(), float(noise[r]), int(drawn[r]), f"row {r}")


@needs_cuda
@pytest.mark.parametrize("settings", [(0.9, 0, 1.0), (0.9, 50, 1.0), (0.9, 0, 0.95)], ids=str)
@pytest.mark.parametrize("batch", [1, 32], ids=lambda batch: f"B{batch}")
def test_rejection_over_the_full_vocabulary_in_a_graph(batch, settings, device):
    """The graph is captured with NaN and replayed with other inputs: the host reads nothing."""
    lens = [(5 * b + 5) % 6 for b in range(batch)]
    made = make_round(lens, 5, 128256, settings, device, draft_vocabulary=128000)
    empty = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    judge(triton_rejects, empty, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, accepted = judge(triton_rejects, empty, settings)
    for name, tensor in made.items():
        empty[name].copy_(tensor)
    for _ in range(3):
        tokens.fill_(-7)
        accepted.fill_(-7)
        graph.replay()
        check_round(made, settings, tokens, accepted)
