"""Models over caches in fp8, against transformers with keys and values rounded in its own cache."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.types import Permissions
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.kv_scales import cache_note
from specdec_cli.recipe import Recipe
from tests.engine.fakes import random_prompt
from tests.engine.test_families import BLOCK, Driver, drive
from tests.support import CPU, decode, description, make_engine, paged_model, reference, save_tiny

Scales = dict[tuple[int, str], list[float]]
SCALES: Scales = {
    **{(0, "k"): [0.02, 0.3], (0, "v"): [0.5, 0.001]},
    **{(1, "k"): [0.07], (1, "v"): [0.004, 3.0]},
}


NEW = {"max_new_tokens": 24}
FLIPPED = 5e-4  # of logits, where a number between two codes is rounded to the other one


class Rounded(DynamicCache):
    """transformers' cache, which holds keys and values [1, Hkv, T, D] as fp8 would."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key: Any, value: Any, layer: int, *more: Any, **others: Any) -> Any:
        kept = []
        for side, x in zip("kv", (key, value), strict=True):
            scale = torch.tensor(self.scales.get((layer, side), [1.0]))[:, None, None]
            codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            kept.append(codes.to(x.dtype) * scale)
        return super().update(*kept, layer, *more, **others)


def oracle(folder: Path, scales: Scales) -> Callable[..., Any]:
    model = reference(folder)
    return lambda ids, **more: model(ids, past_key_values=Rounded(scales), use_cache=True, **more)


def with_scales(folder: Path, scales: Scales, name: str = "{side}_scale") -> Path:
    """A checkpoint with scales of its own."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for (layer, side), found in scales.items():
        stored = torch.tensor(found) if len(found) > 1 else torch.tensor(found[0])
        tensors[f"model.layers.{layer}.self_attn.{name.format(side=side)}"] = stored
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "fused"])
@pytest.mark.parametrize(("family", "own"), [("llama", True), ("qwen3", False), ("gemma2", False)])
def test_logits(family: str, own: bool, fused: bool, tmp_path: Path) -> None:
    """Chunks, scoring and rollback see the same rounded keys and values as one pass over all."""
    scales = SCALES if own else {}
    folder = with_scales(save_tiny(tmp_path, family), scales)
    model = paged_model(folder, 120, BLOCK, cache="fp8", fused=fused, hidden_layers=(1,))
    assert all(pool.dtype == torch.float8_e4m3fn for pool in model.cache.pools)
    driver = Driver(model, oracle(folder, scales), [19, 6, 33])
    errors = drive(driver)
    assert max(errors.values()) < FLIPPED, errors
    driver.oracle = reference(folder)
    assert driver.feed([(n - 1, n) for n in map(len, (s.tokens for s in driver.seqs))]) > 5e-3


def test_texts_depend_on_neither_k_nor_preemption(tmp_path: Path) -> None:
    target = with_scales(save_tiny(tmp_path / "target", "llama"), SCALES)
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    prompts = [random_prompt(n) for n in (3, 9, 1, 14)]
    roomy = make_engine(target, draft, cache="fp8")
    want = [s.output_ids for s in decode(roomy, prompts, 0, **NEW)]
    for k in (0, 3):
        small = {"batch_size": 4, "num_blocks": 16, "prefill_chunk": 5}
        seqs = decode(make_engine(target, draft, **small, cache="fp8"), prompts, k, **NEW)
        assert sum(s.num_preemptions for s in seqs) > 0
        assert [s.output_ids for s in seqs] == want


def recipe(target: Path, **cache: Any) -> Recipe:
    found = {"model": str(target), "dtype": "float32"}
    cache = {"dtype": "fp8", "num_blocks": 20, **cache}
    return Recipe.model_validate({"target": found, "cache": cache, "run": {"device": "cpu"}})


def test_an_engine_s_cache(tmp_path: Path) -> None:
    """Its bytes are those of the plan, a quarter of fp32's, and its scales outlive its zeros."""
    from tests.cli.generate_helpers import word_tokenizer

    target = with_scales(save_tiny(tmp_path, "llama"), SCALES)
    word_tokenizer(target, [f"w{i}" for i in range(96)])
    planned = plan(recipe(target), Permissions())
    engine = build(planned, 4)
    cache = engine.target.cache
    size = planned.target.block_bytes(16)
    assert cache.num_bytes == 20 * size
    assert 4 * size == plan(recipe(target, dtype="auto"), Permissions()).target.block_bytes(16)
    assert planned.execution["target_kv_cache"] == "float8_e4m3fn, the checkpoint's scales"
    cache.clear()
    want = torch.tensor([[0.07, 0.07], [0.004, 3.0]])
    for held in (cache, cache.resized(3)):
        assert held.layers[1].scales is not None and torch.equal(held.layers[1].scales, want)


@pytest.mark.parametrize(
    "name", ["{side}_scale", "{side}_proj.{side}_scale", "{side}_proj.output_scale"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hold_the_scales_of_their_heads(name: str, rank: int, tmp_path: Path) -> None:
    folder = with_scales(save_tiny(tmp_path, "llama"), SCALES, name)
    part = TensorParallel(rank, 2, None, CPU)
    layers = paged_model(folder, 2, BLOCK, parallel=part, cache="fp8").cache.layers
    found = [layer.scales.flatten().tolist() for layer in layers if layer.scales is not None]
    want = [[SCALES[at][rank % len(SCALES[at])] for at in ((n, "k"), (n, "v"))] for n in (0, 1)]
    assert torch.equal(torch.tensor(found), torch.tensor(want))


def test_scales_without_a_cache_in_fp8_are_told(tmp_path: Path) -> None:
    both = {(n, "kv"): [0.25] for n in (0, 1)}
    folder = with_scales(save_tiny(tmp_path, "llama"), both)
    found = description(folder)
    assert "are not used" in found.notes["kv_cache"]
    assert paged_model(folder, 2, BLOCK).cache.layers[0].scales is None
    scales = paged_model(folder, 2, BLOCK, cache="fp8").cache.layers[1].scales
    assert scales is not None and (scales == 0.25).all() and scales.shape == (2, 2)
    own = replace(found.spec, cache="fp8")
    assert cache_note(own) == {"kv_cache": "float8_e4m3fn, scales of 1"}


@pytest.mark.parametrize(
    ("scales", "settings", "message"),
    [
        ({(0, "k"): [0.1], (0, "v"): [0.1]}, {}, "has scales for its KV cache, but layer 1 lacks"),
        (SCALES | {(1, "v"): [0.1, -1.0]}, {}, "layers.1.self_attn.v_scale of {} must have"),
        (SCALES | {(1, "v"): [float("nan")]}, {}, "v_scale of {} must have finite values above 0"),
        (SCALES | {(0, "k"): [0.1] * 3}, {}, "k_scale of {} has shape [3], but the model has 2"),
        (SCALES, {"num_bits": 8, "type": "int"}, "quantization_config.kv_cache_scheme is"),
    ],
)
def test_scales_that_do_not_fit(
    scales: Scales, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = with_scales(save_tiny(tmp_path, "llama"), scales)
    if settings:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": settings}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError) as told:
        paged_model(folder, 2, BLOCK, cache="fp8")
    assert message.format(folder) in str(told.value)


def test_a_gpu_without_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr("specdec_cli.engine.plan.resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(UsageError, match=r"cache.dtype: fp8 needs a GPU of .* 8.9, and .* 8.0"):
        plan(recipe(tmp_path), Permissions())
