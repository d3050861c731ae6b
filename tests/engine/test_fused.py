"""Fused decoder layers against transformers' own, and what is left alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.models.fused import FusedHead, FusedLayer, RotaryTable, fuse
from specdec_cli.models.loader import load
from tests.engine.test_families import BLOCK, TOLERANCE, Driver, drive, plain_reference
from tests.support import description, paged_model, save_tiny

FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama-tied", {}),
    "llama3-rope": ("llama3-rope", {}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}


@pytest.mark.parametrize("case", FUSED)
def test_logits_match_transformers(case: str, device: torch.device, tmp_path: Path) -> None:
    family, changes = FUSED[case]
    folder = save_tiny(tmp_path, family, **changes)
    model = paged_model(folder, 120, BLOCK, device, fused=True)
    kinds = {type(m) for m in model.module.modules()}
    assert {FusedLayer, FusedHead, RotaryTable} <= kinds
    errors = drive(Driver(model, plain_reference(folder, device), [19, 6, 33]))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    "family, changes",
    [
        ("gemma2", {}),
        ("gpt2", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_what_would_differ_is_left_alone(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    module = load(description(save_tiny(tmp_path, family, **changes)), torch.device("cpu"))
    before = [type(m) for m in module.modules()]
    assert not fuse(module, 64)
    assert [type(m) for m in module.modules()] == before


def test_fusing_keeps_every_weight_once(tmp_path: Path) -> None:
    """No copy of the merged matrices stays behind, and a tied head stays tied."""
    found = description(save_tiny(tmp_path, "llama-tied"))
    module = load(found, torch.device("cpu"))
    bytes_before = sum(p.numel() for p in module.parameters())
    assert fuse(module, 64)
    assert sum(p.numel() for p in module.parameters()) == bytes_before
    assert module.lm_head.weight is module.model.embed_tokens.weight
