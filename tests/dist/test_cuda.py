"""Rounds over NCCL, ragged and as CUDA graphs, against those of one GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import cases
from tests.dist.test_rounds import GREEDY, PROMPTS, ROUNDS, SAMPLED, Pair, agreed
from tests.dist.world import World
from tests.support import make_engine, save_noised, save_tiny

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
]

PAIRS = [(2, 1), (2, 2)] + ([(4, 1), (4, 2), (4, 4)] if GPUS >= 4 else [])
RUNS = [(3, GREEDY), (4, SAMPLED), (0, GREEDY), (3, GREEDY)]


@pytest.fixture(scope="module")
def cuda_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(4 if GPUS >= 4 else 2, tmp_path_factory.mktemp("world"), "nccl")
    yield world
    world.close()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two families with fused layers, and one that runs as transformers' module."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", request.param)
    return target, save_noised(folder / "draft", target)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("tps", PAIRS, ids=str)
def test_output_does_not_depend_on_degrees(
    cuda_world: World, pair: Pair, tps: tuple[int, int], rounds: str
) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "pipelined": ROUNDS[rounds]}
    one = make_engine(*pair, device=torch.device("cuda", 0), batch_size=3)
    want = cases.told(one, PROMPTS, RUNS)
    first = agreed(cuda_world.run(cases.decode, pair, tps, PROMPTS, RUNS, **settings), tps[0])
    assert first["seqs"] == want["seqs"]
    assert all(m.broadcast_ms > 0 for m in first["metrics"])
