"""Floors of the benchmarks: the bytes that passes read, at rates that the run measures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specdec_kernels.linear.stored import Storage
from transformers import AutoModelForCausalLM

from scripts.bench.floors import (
    Rates,
    bytes_read,
    chosen_of,
    distinct_experts,
    has_experts,
    prefill_ms,
    products,
    round_ms,
)
from scripts.bench.rates import product_rate, read_rate
from specdec_cli.engine.plan import plan
from specdec_cli.models.held import StoredParameter
from specdec_cli.recipe import load_recipe
from tests.support import tiny_config


def test_distinct_experts_are_those_of_random_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 5, 40):
        noise = torch.rand(2000, tokens, 32, generator=generator)
        chosen = torch.zeros(2000, 32).scatter_(1, noise.topk(4).indices.flatten(1), 1.0)
        expected = float(chosen.sum(1).mean())
        assert distinct_experts(32, 4, tokens) == pytest.approx(expected, rel=0.01)
    assert distinct_experts(128, 8, 8) == pytest.approx(51.6, abs=0.1)
    assert distinct_experts(128, 8, 32) == pytest.approx(111.8, abs=0.1)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama"])
def test_bytes_that_are_read(family: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config(family))
    sizes = {name: p.numel() * 4 for name, p in module.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
    assert has_experts(module) == (experts > 0) == (family != "llama")
    assert bytes_read(module, 1) == pytest.approx(rest + experts / 2)  # 2 of 4 are chosen
    assert bytes_read(module, 10_000, read=3.0) == pytest.approx(rest + experts * 3 / 4)
    assert bytes_read(module, 10_000) == pytest.approx(rest + experts)
    matrices = sum(
        p.numel()
        for name, p in module.named_parameters()
        if name.endswith("proj.weight") or name.endswith("gate.weight")
    )
    if family in ("llama", "qwen3_moe"):
        assert products(module) == pytest.approx(matrices + experts / 4 / 2)
    assert chosen_of(module) == (0 if family == "llama" else 2)


def test_stored_weights_are_read_as_stored() -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config("gpt_oss"))
    plain, layer = bytes_read(module, 1), module.model.layers[0]
    storage = Storage("mxfp4", (1, 32), scales=torch.uint8)
    saved = 0.0
    for owner, name, share in (
        (layer.mlp.experts, "gate_up_proj", 1 / 2),  # 2 of 4 are chosen
        (layer.self_attn.q_proj, "weight", 1.0),
    ):
        parameter = getattr(owner, name)
        held = StoredParameter.like(parameter, storage, is_transposed=parameter.dim() == 3)
        setattr(owner, name, held)
        saved += share * (parameter.numel() * 4 - storage.num_bytes(held.shape_written))
    assert bytes_read(module, 1) == pytest.approx(plain - saved)


class Clock:
    """Stands in for `graph_times`: every step ran, and takes the next of some medians."""

    def __init__(self, *microseconds: float) -> None:
        self.microseconds = list(microseconds)
        self.calls: list[tuple[int, int]] = []

    def __call__(self, step: Callable[[int], object], launches: int, replays: int) -> list[float]:
        step(0)
        self.calls.append((launches, replays))
        usual = self.microseconds[len(self.calls) - 1]
        return [0.1 * usual, *[usual] * (replays - 2), 50 * usual]


def test_the_bandwidth_is_that_of_the_fastest_matrix_vector_read() -> None:
    clock = Clock(4.0, 2.0, 3.0)
    assert read_rate(clock, "cpu", (96, 64)) == pytest.approx(96 * 64 * 2 / 2.0e-6 / 1e12)
    assert len(clock.calls) == 3 and all(n > 1 and replays > 4 for n, replays in clock.calls)


def test_the_rate_of_products_counts_both_operations() -> None:
    clock = Clock(5.0)
    assert product_rate(clock, "cpu", 32) == pytest.approx(2 * 32**3 / 5.0e-6 / 1e12)
    assert clock.calls == [(1, 9)], "products in a row make a GPU slower"


def test_rates_are_told() -> None:
    told = "a matrix-vector read at 4.32 TB/s, products at 790 TFLOP/s"
    assert str(Rates(4.321, 790.2)) == f"measured in this run: {told}"


def test_floors_are_bytes_and_products_at_the_measured_rates() -> None:
    """The demo pair: k passes of the draft and one of the target; a head fuses states once."""
    planned = plan(load_recipe("demo", {"run.device": "cpu"}))
    draft = planned.draft
    target_bytes = bytes_read(planned.target.module, 1)
    draft_bytes = bytes_read(draft.module, 1)
    rates = Rates(tb_per_s=2.0, tflop_per_s=100.0)
    assert rates.read_ms(4e9) == pytest.approx(2.0)
    assert rates.product_ms(5e10) == pytest.approx(1.0)
    assert round_ms(planned, 0, 1, rates) == pytest.approx(target_bytes / 2e9)
    three = (target_bytes + 3 * draft_bytes) / 2e9
    assert round_ms(planned, 3, 1, rates) == pytest.approx(three)
    assert round_ms(planned, 3, 1, Rates(4.0, 1.0)) == pytest.approx(three / 2)
    # Few tokens are bound by reading weights, many by products.
    assert prefill_ms(planned, 1, 0, rates) == pytest.approx(target_bytes / 2e9)
    assert prefill_ms(planned, 1, 3, rates) == pytest.approx((target_bytes + draft_bytes) / 2e9)
    many = 10**6
    bound = 2 * products(planned.target.module) * many / 100e9
    assert prefill_ms(planned, many, 0, rates) == pytest.approx(bound)


def test_a_draft_of_one_pass_is_read_once() -> None:
    """A PARD draft reads its masks with the text."""
    planned = plan(load_recipe("demo", {"run.device": "cpu"}))
    rates, draft = Rates(2.0, 100.0), planned.draft
    floors = [round_ms(planned, 3, 1, rates)]
    planned = replace(planned, draft=replace(draft, drafts_at_once=True))
    floors.append(round_ms(planned, 3, 1, rates))
    assert floors[0] - floors[1] == pytest.approx(2 * bytes_read(draft.module, 1) / 2e9)


def test_a_head_fuses_hidden_states_once_a_round() -> None:
    planned = plan(
        load_recipe(
            "demo",
            {
                "run.device": "cpu",
                "draft.model": "demo:eagle3",
                "speculation.method": "eagle3",
            },
        )
    )
    rates, head = Rates(1.0, 1.0), planned.draft
    one, three = (round_ms(planned, k, 1, rates) for k in (1, 3))
    assert one == pytest.approx((bytes_read(planned.target.module, 2) + head.weight_bytes) / 1e9)
    fused = 3 * head.config.hidden_size * head.config.target_hidden_size * 4
    assert three - one == pytest.approx(2 * (head.weight_bytes - fused) / 1e9)
    logits = head.config.draft_vocab_size * head.config.hidden_size * 4
    of_head = prefill_ms(planned, 1, 3, rates) - prefill_ms(planned, 1, 0, rates)
    assert of_head == pytest.approx((head.weight_bytes - logits) / 1e9)


@pytest.mark.parametrize(
    ("target", "draft", "k", "floor"),
    [
        ("llama-8b", "llama-1b", 5, 3.49 + 5 * 0.575),
        ("gemma-2-9b", "gemma-2-2b", 3, 10.87 / 1.37),
        ("gemma-3-1b", "gemma-3-270m", 3, 2.65 / 3.16),
    ],
)
def test_shapes_have_the_floors_of_the_page(target: str, draft: str, k: int, floor: float) -> None:
    """docs/performance.md gives them at 4.3 TB/s."""
    shapes = Path(__file__).parents[2] / "recipes" / "shapes"
    models = {"target.model": str(shapes / target), "draft.model": str(shapes / draft)}
    planned = plan(load_recipe("bench-8b-1b-dummy", models | {"run.device": "cpu"}))
    assert round_ms(planned, k, 1, Rates(4.3, 790.0)) == pytest.approx(floor, rel=0.005)
