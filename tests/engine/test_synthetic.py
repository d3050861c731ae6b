"""Synthetic acceptance reproduces the rates it is given, on a real engine, at any temperature."""

from pathlib import Path

import pytest
import torch

from specdec_cli.engine.loop import Request
from specdec_cli.engine.synthetic import SyntheticAcceptance
from specdec_cli.engine.types import SamplingParams
from tests.support import make_engine, save_tiny

RATES = (0.8, 0.64, 0.4, 0.1)


def test_a_mean_length_becomes_one_rate() -> None:
    """At k = 5, 0.8 a place is (1 - 0.8^6) / (1 - 0.8) = 3.68928 tokens a round."""
    found = SyntheticAcceptance.from_length(3.68928, 5).conditional
    assert found[0] == pytest.approx(0.8, abs=1e-6)
    assert len(set(found)) == 1
    assert SyntheticAcceptance.from_length(6.0, 5).conditional[0] == pytest.approx(1.0)
    assert SyntheticAcceptance.from_length(1.0, 5).conditional[0] == pytest.approx(0.0, abs=1e-9)


def test_marginal_rates_become_conditional_ones() -> None:
    found = SyntheticAcceptance.from_rates((0.8, 0.4, 0.0, 0.0)).conditional
    assert found == pytest.approx((0.8, 0.5, 0.0, 0.0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_measured_rates_are_the_given_ones(temperature: float, tmp_path: Path) -> None:
    """An unrelated draft, which rejection sampling would accept next to nothing of."""
    engine = make_engine(
        save_tiny(tmp_path / "target", "llama"),
        save_tiny(tmp_path / "draft", "llama", seed=1),
        batch_size=16,
        num_blocks=2000,
    )
    engine.synthetic = SyntheticAcceptance.from_rates(RATES)
    prompts = torch.randint(3, 90, (64, 9), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=temperature, max_new_tokens=60)
    result = engine.run([Request(i, tuple(p)) for i, p in enumerate(prompts)], 4, params)
    full = [
        a
        for s in result.seqs
        for k, a in zip(s.proposed_per_round, s.accepted_per_round, strict=True)
        if k == 4
    ]
    assert len(full) > 800
    for place, rate in enumerate(RATES):
        measured = sum(a > place for a in full) / len(full)
        deviation = (rate * (1 - rate) / len(full)) ** 0.5
        # Rounds cut short by the last token leave fewer long ones: allow 4 deviations.
        assert abs(measured - rate) < 4 * deviation, f"place {place + 1}"
    assert all(s.num_new_tokens == 60 for s in result.seqs)
