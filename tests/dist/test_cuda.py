"""Rounds over NCCL, eager and as CUDA graphs, compared with rounds of one GPU."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dist import cases
from tests.dist.test_split_rounds import GREEDY, PROMPTS, ROUNDS, SAMPLED, Pair, agreed
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


# Six families with fused layers (gemma2 has norms before sums, three have experts, and one of them
# shared ones), and one with transformers' own.
FAMILIES = ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss", "glm4_moe", "olmo2"]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, tuple[int, int]]]:
    """Two degrees, and a world of the target's degree like in a run. If the draft has fewer ranks,
    only the first engine's target shares memory: see `core.peers`."""
    world = World(request.param[0], tmp_path_factory.mktemp("world"), "nccl")
    yield world, request.param
    world.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Pairs whose vocabulary divides evenly over ranks, so shared memory carries logits too."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for family in FAMILIES:
        target = save_tiny(folder / family, family, vocab_size=104)
        found[family] = (target, save_noised(folder / f"{family}-draft", target))
    return found


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_does_not_depend_on_degrees(
    ranks: tuple[World, tuple[int, int]], pairs: dict[str, Pair], family: str, rounds: str
) -> None:
    world, tps = ranks
    pair = pairs[family]
    settings: dict[str, Any] = {"batch_size": 3, "runs_ahead": ROUNDS[rounds]}
    one = make_engine(*pair, device=torch.device("cuda", 0), batch_size=3)
    want = cases.told(one, PROMPTS, RUNS)
    first = agreed(world.run(cases.decode, pair, tps, PROMPTS, RUNS, **settings), tps[0])
    assert first["seqs"] == want["seqs"]
    assert all(m.broadcast_ms > 0 for m in first["metrics"])


# Rows, features inside a rank's MLP, and features of the residual stream: sums of one row and of
# several, of the kernel for one row, and of too many rows to be sent.
SIZES = [
    (1, 512, 4096),
    (6, 1792, 8192),
    (8, 96, 8192),
    (1, 1024, 2048),
    (20, 64, 600),
    (48, 64, 4096),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_of_parts_that_matmuls_send(
    ranks: tuple[World, tuple[int, int]], size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    world, (target, draft) = ranks
    if target != draft:
        pytest.skip("a world of this size has run it")
    answers = world.run(cases.sums_of_sent_parts, size, dtype)
    assert all(are_equal for are_equal, _ in answers)
    norms = answers[0][1]
    assert len(set(norms)) == len(norms), "each run has a result of its own"


def test_a_run_ends_whose_graphs_hold_sums_of_nccl() -> None:
    """64 x 5 rows are too many for shared memory, so graphs hold NCCL's sums. NCCL ends only after
    the graphs are given up; runs once waited forever."""
    options = "--device cuda --target-tp 2 --draft-tp 1 -k 4 --batch-size 64 --max-new-tokens 8"
    program = [sys.executable, "-m", "specdec_cli", "generate", "demo", *options.split(), "--json"]
    done = subprocess.run(
        [*program, "--prompt", "def add(a, b):", "--set", "run.timeout_s=60"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
