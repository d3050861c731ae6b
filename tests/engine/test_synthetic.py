"""Synthetic acceptance reproduces the given rates, on a real engine, at any temperature."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from specdec_cli.acceptance.registry import for_k
from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.backends.native import for_engine
from specdec_cli.core.figures import summarise
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.errors import UsageError
from specdec_cli.recipe import SpeculationSection, load_recipe
from specdec_cli.terminal.render import summary_table
from tests.cli.generate_helpers import PROMPTS, generate, prompt_options
from tests.drafting import rounds_of
from tests.support import make_engine, ngram_engine, save_tiny

RATES = (0.8, 0.64, 0.4, 0.1)


def test_a_mean_length_becomes_one_rate() -> None:
    """At k = 5 a rate of 0.8 gives (1 - 0.8^6) / (1 - 0.8) = 3.68928 tokens a round."""
    found = SyntheticAcceptance.from_length(3.68928, 5).conditional
    assert found[0] == pytest.approx(0.8, abs=1e-6)
    assert len(set(found)) == 1
    assert SyntheticAcceptance.from_length(6.0, 5).conditional[0] == pytest.approx(1.0)
    assert SyntheticAcceptance.from_length(1.0, 5).conditional[0] == pytest.approx(0.0, abs=1e-9)


def test_marginal_rates_become_conditional_ones() -> None:
    found = SyntheticAcceptance.from_rates((0.8, 0.4, 0.0, 0.0)).conditional
    assert found == pytest.approx((0.8, 0.5, 0.0, 0.0))


@pytest.fixture(scope="module", params=["draft", "ngram"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Engines with an unrelated draft, from which rejection sampling would accept almost nothing,
    and with prompt lookup."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", "llama")
    sizes = {"batch_size": 64, "num_blocks": 2000}
    if request.param == "ngram":
        return ngram_engine(target, **sizes)
    return make_engine(target, save_tiny(folder / "draft", "llama", seed=1), **sizes)


def rounds(engine: Engine, k: int, temperature: float) -> list[tuple[int, int]]:
    """Proposed and accepted tokens of every round of a run over random prompts."""
    prompts = torch.randint(3, 90, (64, 9), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=temperature, max_new_tokens=60)
    result = engine.run([Request(i, tuple(p)) for i, p in enumerate(prompts)], k, params)
    assert all(s.num_new_tokens == 60 for s in result.seqs)
    return [r for s in result.seqs for r in rounds_of(s)]


def check_rates(found: list[tuple[int, int]], conditional: tuple[float, ...]) -> None:
    """Check the rate at every place to 3 sigma, over the rounds that reached it.

    A round reaches a place before that place is drawn, so each draw is a Bernoulli trial.
    """
    for place, rate in enumerate(conditional):
        coins = [a > place for proposed, a in found if proposed > place and a >= place]
        assert len(coins) > 100
        sigma = (rate * (1 - rate) * len(coins)) ** 0.5
        assert abs(sum(coins) - rate * len(coins)) <= 3 * sigma, f"place {place + 1}"


@pytest.mark.parametrize(("k", "temperature"), [(2, 0.0), (4, 0.8)], ids=["shorter", "as long"])
def test_measured_rates_are_the_given_ones(k: int, temperature: float, engine: Engine) -> None:
    """A list of rates longer than k is cut."""
    engine.rule = SyntheticAcceptance.from_rates(RATES)
    found = rounds(engine, k, temperature)
    check_rates(found, (0.8, 0.8, 0.625, 0.25)[:k])
    # Marginal rates, as reported, over the rounds that were not cut short.
    full = [a for proposed, a in found if proposed == k]
    assert len(full) > 500
    for place, rate in enumerate(RATES[:k]):
        sigma = (rate * (1 - rate) / len(full)) ** 0.5
        assert abs(sum(a > place for a in full) / len(full) - rate) < 3 * sigma


@pytest.mark.parametrize(
    ("k", "temperature"),
    [pytest.param(2, 0.8, marks=pytest.mark.slow), (4, 0.0), (7, 0.8)],
    ids=["shorter", "as long", "longer"],
)
def test_measured_length_is_the_given_one(k: int, temperature: float, engine: Engine) -> None:
    """A length of 3.0 tokens at k = 4 determines the rate, which then holds for every k."""
    engine.rule = SyntheticAcceptance.from_length(3.0, 4)
    rate = engine.rule.conditional[0]
    found = rounds(engine, k, temperature)
    check_rates(found, (rate,) * min(k, 4))
    lengths = torch.tensor([1.0 + a for proposed, a in found if proposed == k])
    assert len(lengths) > 400
    want = sum(rate**i for i in range(k + 1))
    if k == 4:
        assert want == pytest.approx(3.0)
    sigma = float(lengths.std()) / len(lengths) ** 0.5
    assert abs(float(lengths.mean()) - want) < 3 * sigma


def test_more_places_than_rates_are_refused(engine: Engine) -> None:
    engine.rule = SyntheticAcceptance.from_rates(RATES[:1])
    with pytest.raises(UsageError, match="there are only 1 synthetic_acceptance_rates"):
        rounds(engine, 3, 0.0)


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.usefixtures("smaller_demo")
def test_the_text_is_labelled(
    method: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The label is on the terminal and in the document, unless nothing is proposed."""
    given = ("--set", "speculation.acceptance=synthetic")
    given += ("--set", "speculation.synthetic_acceptance_length=2.5")
    options = ("demo-sampled", *prompt_options(*PROMPTS[:1]), "--max-new-tokens", "12")
    options += ("--set", f"speculation.method={method}", "-o", tmp_path / "run")
    result = generate(capsys, *options, *given)
    label = "the text is not the target's"
    assert result.code == 0 and label in result.err
    document = json.loads((tmp_path / "run/summary.json").read_text())
    assert label in document["environment"]["acceptance"]
    assert label not in generate(capsys, *options[:-2], *given, "-k", "0").err
    assert label not in generate(capsys, *options[:-2]).err


def test_the_table_is_labelled() -> None:
    seq = Sequence(0, [1, 2, 3], 1, 3, proposed_per_round=[1], accepted_per_round=[1])
    seq.round_share = seq.decode_seconds = 1.0
    metrics = summarise([seq], 1, 1)
    for remarks in ([], ["the text is not the target's", "random weights"]):
        out = Console(file=io.StringIO(), width=100)
        out.print(summary_table(metrics, None, tinted=False, remarks=remarks))
        table = out.file.getvalue()  # type: ignore[attr-defined]
        assert re.findall(r"^note +(.+?) *$", table, re.M) == remarks


def test_a_mean_length_is_that_of_the_recipes_own_k() -> None:
    """1 + a + a^2 = 1.75 gives a = 0.5; shares of four places fall by it."""
    given = SpeculationSection(
        acceptance="synthetic", synthetic_acceptance_length=1.75, num_speculative_tokens=2
    )
    found = for_k(given, 4)
    assert found.synthetic_acceptance_rates == pytest.approx((0.5, 0.25, 0.125, 0.0625))
    assert found.synthetic_acceptance_length is None
    recipe = load_recipe("demo", {"run.device": "cpu"})
    recipe = recipe.model_copy(update={"speculation": given})
    assert for_engine(recipe, 4, 1).speculation == found.model_copy(
        update={"num_speculative_tokens": 4}
    )
    rates = found.model_copy(update={"synthetic_acceptance_rates": (0.5, 0.25)})
    assert for_k(rates, 2).synthetic_acceptance_rates == (0.5, 0.25)
    with pytest.raises(UsageError, match="2 are given, but --k goes up to 3"):
        for_k(rates, 3)
