"""Distinct experts that rounds read, against the routers of transformers' model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.peers import random_gpt_oss
from specdec_cli.core.types import Request, SamplingParams, Sequence
from tests.support import make_engine, reference, save_tiny

PROMPTS = [[5, 17, 31, 60, 8], [9, 44, 3]]
NEW = 16  # whole rounds of 4, so that no row of a captured round is padding


def choices(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """The experts [T, C] of each token in each layer that has experts."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, args, out: found.append(out[2]))
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


def rounds_of(seq: Sequence, k: int) -> list[slice]:
    """The tokens that each round scored, when all proposals stood. At k = 0 prefill decided the
    first one."""
    assert seq.accepted_per_round == seq.proposed_per_round
    assert seq.num_tokens_from_prefill == (k == 0)
    lengths = seq.proposed_per_round + [0] * (seq.rounds_without_proposal - (k == 0))
    spans, n = [], seq.num_prompt_tokens + (k == 0)
    for proposed in lengths:
        spans.append(slice(n - 1, n + proposed))
        n += proposed + 1
    assert n == len(seq.tokens)
    return spans


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("qwen3_moe", {"num_experts": 17}, 2),
        ("qwen3_moe", {"num_experts": 17, "mlp_only_layers": [0]}, 1),
        ("gpt_oss", {"num_local_experts": 17}, 2),
    ],
)
def test_experts_of_rounds(
    family: str,
    changes: dict[str, Any],
    layers: int,
    k: int,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """A model that is its own draft, so that every token scored is in the text."""
    folder = save_tiny(tmp_path, family, **changes)
    engine = make_engine(folder, folder, batch_size=2, device=device, runs_ahead=True)
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    found = engine.run(requests, k, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    model = reference(folder)
    chosen = [choices(model, seq.tokens) for seq in found.seqs]
    assert {len(by_layer) for by_layer in chosen} == {layers}
    counts = []
    for spans in zip(*(rounds_of(seq, k) for seq in found.seqs), strict=True):
        for layer in range(layers):
            both = [own[layer][span] for own, span in zip(chosen, spans, strict=True)]
            counts.append(len(torch.cat(both).unique()))
    want = sum(counts) / len(counts)
    assert found.metrics.distinct_experts == pytest.approx(want)
    assert [seq.distinct_experts for seq in found.seqs] == pytest.approx([want] * 2)
    assert len(set(counts)) > 1 and want < 17


def test_dense_models_count_none(tmp_path: Path) -> None:
    engine = make_engine(save_tiny(tmp_path, "llama"), None)
    found = engine.run([Request(0, (5, 6))], 0, SamplingParams(max_new_tokens=3))
    assert "distinct_experts" not in found.metrics.as_dict()
    assert found.seqs[0].distinct_experts is None


def test_tokens_of_random_gpt_oss_choose_evenly(device: torch.device, tmp_path: Path) -> None:
    """Weights that all engines read as a checkpoint's. A batch reads far more experts than one
    token does."""
    shapes = Path(random_gpt_oss.__file__).parents[2] / "recipes" / "shapes" / "gpt-oss-20b"
    config = json.loads((shapes / "config.json").read_text())
    sizes = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    config |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config |= {"layer_types": config["layer_types"][:2], "eos_token_id": 1, "pad_token_id": 0}
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "config.json").write_text(json.dumps(config | {"bos_token_id": 2}))
    folder = tmp_path / "weights"
    random_gpt_oss.write(tmp_path / "shapes", folder)
    stored = make_engine(folder, None, batch_size=16, device=device, weights="stored")
    requests = [Request(i, (3 + 7 * i, 5 + i)) for i in range(16)]
    found = stored.run(requests, 0, SamplingParams(max_new_tokens=4, ignore_eos=True))
    read = found.metrics.distinct_experts
    assert read is not None and read > 20, "of 28 on average if tokens choose evenly"
