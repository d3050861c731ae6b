"""Every family: our loader, gate and paged attention against transformers' ordinary forward.

Logits and hidden states are compared, not tokens: the argmax alone would miss a wrong window or
softcap.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.types import Sequence
from specdec_cli.models.attention import PagedAttention
from specdec_cli.models.paged import PagedModel
from tests.oracle import extended
from tests.support import CPU, FAMILIES, VOCAB, paged_model, reference, save_tiny

TOLERANCE = 2e-5
# On an H200 transformers' logits differ by 3e-5 between passes of different widths over the same
# tokens (nemotron), and by 4e-5 from its logits on a CPU (granitemoe).
CUDA_TOLERANCE = 5e-5
BLOCK = 4
# All hidden states of two layers, out of order and one of them twice.
STATES = (2, 0, 1, 2)


class Driver:
    """Feeds sequences to a paged model by hand and checks every row of logits and hidden states."""

    def __init__(self, model: PagedModel, oracle: object, lengths: list[int]) -> None:
        self.model, self.oracle = model, oracle
        self.expected_layers = model.hidden_layers
        generator = torch.Generator().manual_seed(5)
        self.allocator = BlockAllocator(model.cache.num_blocks, BLOCK)
        self.seqs = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            self.seqs.append(Sequence(index, tokens, length, 400))
        # Interleaved growth shuffles the block tables.
        for size in range(1, 120, 5):
            for seq in self.seqs:
                self.allocator.extend(seq.block_table, size)

    def expected(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """transformers' logits [T, V] and hidden states [T, L * H]."""
        layers = self.expected_layers
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.model.device)
            out = self.oracle(ids, output_hidden_states=bool(layers))  # type: ignore[operator]
        states = torch.cat([out.hidden_states[n][0] for n in layers], dim=1) if layers else None
        return out.logits[0], states

    def feed(self, chunks: list[tuple[int, int]], extra: list[list[int]] | None = None) -> float:
        """Run one ragged pass over tokens[start:stop] (+ extra); returns its largest error."""
        extra = extra or [[] for _ in chunks]
        spans = [
            Span(extended(seq, row), start, stop + len(row))
            for seq, (start, stop), row in zip(self.seqs, chunks, extra, strict=True)
        ]
        logits, states = self.model.forward(spans, [s.length for s in spans])
        assert torch.isfinite(logits).all(), "a slot that was never written has been read"
        worst, at = 0.0, 0
        for span in spans:
            want, want_states = self.expected(span.seq.tokens[: span.stop])
            rows = slice(at, at + span.length)
            worst = max(worst, float((want[span.start :] - logits[rows]).abs().max()))
            assert (states is None) == (want_states is None)
            if states is not None and want_states is not None:
                num_states = len(self.expected_layers)
                worst = max(worst, state_error(states[rows], want_states[span.start :], num_states))
            at += span.length
        assert len(logits) == at and (states is None or len(states) == at)
        return worst


def state_error(got: torch.Tensor, want: torch.Tensor, num_states: int) -> float:
    """The largest error in hidden states [T, L * H]. It is relative to the largest number of each
    state if that is more than 1, because residual streams grow to 125."""
    assert got.shape == want.shape
    size, error = (x.unflatten(1, (num_states, -1)).abs().amax((0, 2)) for x in (want, got - want))
    return float((error / size.clamp(min=1)).max())


def plain_reference(folder: Path, device: torch.device = CPU) -> Any:
    """transformers' model with its plain attention and, for experts, its plain loop."""
    model = reference(folder, device=device)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_match_transformers(family: str, device: torch.device, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    states = () if family == "gemma3n" else STATES
    model = paged_model(folder, 120, BLOCK, device, hidden_layers=states)
    errors = drive(Driver(model, plain_reference(folder, device), [19, 6, 33]))
    assert max(errors.values()) < (CUDA_TOLERANCE if device.type == "cuda" else TOLERANCE), errors


WINDOWED: dict[str, dict[str, Any]] = {
    "olmoe": {"sliding_window": 7},  # a stray key that its attention gets, but no mask
    "phimoe": {"sliding_window": 7},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "smollm3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_the_masks(family: str, tmp_path: Path) -> None:
    """These families call attention with another window than that of their masks."""
    folder = save_tiny(tmp_path, family, **WINDOWED[family])
    oracle = plain_reference(folder)
    code = vars(sys.modules[type(oracle).__module__])
    masks = {name: made for name, made in code.items() if name.startswith("create_")}
    assert masks
    model = paged_model(folder, 120, BLOCK, fused=True)
    assert masks.items() <= code.items(), "the trial pass has changed transformers"
    driver = Driver(model, oracle, [19, 6, 33])
    assert driver.feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE
    assert driver.feed([(18, 19), (5, 6), (20, 33)]) < TOLERANCE


def drive(driver: Driver) -> dict[str, float]:
    """Errors of prefill, chunked prefill beside decode, decode, ragged scoring and rollback.
    Contexts are longer than any window."""
    errors = {}
    lengths = [len(s.tokens) for s in driver.seqs]
    errors["prefill, the last of the three in two chunks"] = driver.feed([(0, 18), (0, 5), (0, 20)])
    errors["the second chunk beside single-token decode"] = driver.feed(
        [(18, 19), (5, 6), (20, 33)]
    )
    proposals = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    errors["scoring with ragged proposals"] = driver.feed([(n - 1, n) for n in lengths], proposals)
    # Keep only 2, 0 and 4 of them: rollback is just a smaller start.
    for seq, row, kept in zip(driver.seqs, proposals, (2, 0, 4), strict=True):
        seq.tokens += [*row[:kept], 50 + kept]
    after = [len(s.tokens) for s in driver.seqs]
    errors["rollback"] = driver.feed([(n - 1, n) for n in after], [[20, 21], [], [22]])
    # A two-token catch-up, as after a bonus token.
    for seq in driver.seqs:
        seq.tokens += [30, 31]
    errors["catch-up"] = driver.feed([(len(s.tokens) - 3, len(s.tokens)) for s in driver.seqs])
    return errors


@pytest.mark.parametrize("fused", [False, True])
def test_another_layers_hidden_state_is_noticed(fused: bool, tmp_path: Path) -> None:
    """Otherwise the comparisons of hidden states, here and of fused layers, would prove less."""
    folder = save_tiny(tmp_path, "llama")
    model = paged_model(folder, 120, BLOCK, fused=fused)
    driver = Driver(model, plain_reference(folder), [19, 6])
    for kept, expected in ((0, 1), (1, 2), (1, 0), (2, 1)):
        model.hidden_layers, driver.expected_layers = (kept,), (expected,)
        assert driver.feed([(0, 18), (0, 5)]) > 100 * TOLERANCE


def sees(*keys: str) -> list[str]:
    return [family for family, values in FAMILIES.items() if any(values.get(k) for k in keys)]


PLANTED = {
    "sliding_window": (0, sees("sliding_window")),
    "softcap": (0.0, sees("attn_logit_softcapping")),
    "sinks": (None, ["gpt_oss"]),
}


# CI has every argument, and windows of some layers and of all.
NOTICED_IN_CI = {"mistral", "gemma2", "gemma3n", "gpt_oss", "mixtral-window"}


@pytest.mark.parametrize(
    ("argument", "family"),
    [
        pytest.param(name, f, marks=[pytest.mark.slow] * (f not in NOTICED_IN_CI))
        for name, (_, users) in PLANTED.items()
        for f in users
    ],
)
def test_an_argument_that_is_ignored_is_noticed(
    argument: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the comparison above would prove less than it claims."""
    attend = PagedAttention.attend

    def forgetful(self: PagedAttention, *args: Any) -> torch.Tensor:
        *states, call = args
        return attend(self, *states, call._replace(**{argument: PLANTED[argument][0]}))

    folder = save_tiny(tmp_path, family)
    driver = Driver(paged_model(folder, 120, BLOCK), plain_reference(folder), [19, 6, 33])
    monkeypatch.setattr(PagedAttention, "attend", forgetful)
    assert max(drive(driver).values()) > 100 * TOLERANCE


EXPERTS = [
    family
    for family, values in FAMILIES.items()
    if any("expert" in key and "per_tok" not in key for key in values)
]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_never_looped_over(family: str, tmp_path: Path) -> None:
    """The plain loop reads the chosen experts on the host, for which a GPU would wait.

    The comparison above uses that loop, so it also shows that the two agree.
    """
    module = paged_model(save_tiny(tmp_path, family), 2, BLOCK).module
    assert set(module.get_experts_implementation().values()) == {"grouped_mm"}


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("family", FAMILIES)
def test_loader_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    """Parameters and buffers are equal bit for bit."""
    folder = save_tiny(tmp_path, family)
    assert_same(paged_model(folder, 2, BLOCK).module, reference(folder))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma4", *EXPERTS])
def test_loader_equals_from_pretrained_in_half_precision(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Some families keep the router of experts in float32."""
    folder = save_tiny(tmp_path, family)
    ours = paged_model(folder, 2, BLOCK, dtype=dtype).module
    assert_same(ours, reference(folder, getattr(torch, dtype)))


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, other = tensors_of(ours), tensors_of(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    ("family", "stored", "held"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w1.weight", "mlp.experts.gate_up_proj"),
        ("qwen3_moe", "mlp.experts.3.gate_proj.weight", "mlp.experts.gate_up_proj"),
        ("ernie4_5_moe", "mlp.moe_statics.e_score_correction_bias", None),
    ],
)
def test_files_hold_other_names_than_modules(
    family: str, stored: str, held: str | None, tmp_path: Path
) -> None:
    """Otherwise loading them would not test the merging of experts."""
    folder = save_tiny(tmp_path, family)
    files = load_file(folder / "model.safetensors")
    module = tensors_of(paged_model(folder, 2, BLOCK).module)
    assert f"model.layers.1.{stored}" in files
    if held is not None:
        assert f"model.layers.1.{stored}" not in module and f"model.layers.1.{held}" in module
