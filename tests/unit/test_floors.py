"""Floors of the benchmark of rounds, which count the experts that are read."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.bench.floors import (
    bytes_read,
    chosen_of,
    distinct_experts,
    has_experts,
    products,
)
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
