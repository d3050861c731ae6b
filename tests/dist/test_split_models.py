"""Models split over ranks, in one world of 4: the parts, the logits, and what is refused."""

from pathlib import Path

import pytest
import torch

from specdec_cli.engine.parallel import ALONE, TensorParallel, make_groups
from specdec_cli.errors import SetupError
from specdec_cli.models.loader import load
from specdec_cli.models.weights import open_checkpoint
from tests.dist import cases
from tests.dist.world import World
from tests.engine.test_families import TOLERANCE
from tests.support import CPU, description, save_tiny

pytestmark = pytest.mark.dist

# Key and value heads fewer than 4 ranks, and as many; names of families are those of FAMILIES.
SPLIT = {
    "llama": {},
    "llama-tied": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"num_key_value_heads": 4},
    "gemma2": {},
    "gemma3": {"num_key_value_heads": 4},
    "phi3": {},
    "olmo2": {},
}
FUSED = {"llama": {}, "llama-tied": {}, "qwen2": {"num_key_value_heads": 1}, "qwen3": {}}
FUSED_BIASES = {"llama": {"attention_bias": True}}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_collectives(world: World, tp: int) -> None:
    found = [x for x in world.run(cases.collectives, tp) if x is not None]
    assert [x["rank"] for x in found] == list(range(tp))
    for x in found:
        assert x["sum"] == [sum(range(1, tp + 1))]
        assert x["gathered"] == torch.arange(30.0).view(3, 10).tolist()
        assert x["nothing"] == (0, 10)
        assert x["sent"] == [[0, 7]] and x["object"] == "from 0"
        assert x["objects"] == [2 * r for r in range(tp)]


def check_logits(world: World, folder: Path, tp: int, fused: bool) -> None:
    errors = [e for e in world.run(cases.logit_errors, folder, tp, fused) if e is not None]
    assert len(errors) == tp
    assert max(max(e.values()) for e in errors) < TOLERANCE, errors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", SPLIT)
def test_logits_match_transformers(world: World, family: str, tp: int, tmp_path: Path) -> None:
    """97 tokens divide by neither: the head's parts are padded."""
    check_logits(world, save_tiny(tmp_path, family, **SPLIT[family]), tp, False)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FUSED)
def test_logits_of_fused_layers(world: World, family: str, tp: int, tmp_path: Path) -> None:
    check_logits(world, save_tiny(tmp_path, family, **FUSED[family]), tp, True)


def test_biases_are_added_once(world: World, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True, num_attention_heads=8)
    check_logits(world, folder, 4, False)
    folder = save_tiny(tmp_path / "fused", "llama", attention_bias=True)
    check_logits(world, folder, 4, True)
