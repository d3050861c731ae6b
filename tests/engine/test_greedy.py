"""fp32 greedy output equals transformers' greedy `generate`, token for token."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec_cli.engine.loop import Engine
from tests.support import (
    FAMILIES,
    VOCAB,
    decode,
    greedy_reference,
    make_engine,
    reference,
    save_tiny,
)

# Families that run at every k and batch size. The others differ only in the computation of a pass,
# which test_families.py and test_fused.py compare, not in the engine's use of passes.
THOROUGH = ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]
OTHERS = [family for family in FAMILIES if family not in THOROUGH]
# CI runs a family for each way to use the cache; `pytest tests` runs all. Of one sequence at a time
# it runs fused layers without a window.
THOROUGH_IN_CI = {(1, "llama"), (4, "llama"), (4, "gemma2"), (4, "gpt2")}
OTHERS_IN_CI = {
    *(
        "qwen2-window",
        "mixtral-window",
        "gemma3",
    ),  # windows of some layers, of all, in fused layers
    *("gemma3n", "gemma4", "gemma4-moe"),  # layers that share keys, heads of two sizes
    *("deepseek_v3", "gpt_oss", "opt"),  # latent keys, sinks, learned positions
}


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


SETTINGS = [
    pytest.param(f, b, id=f"b{b}-{f}", marks=[pytest.mark.slow] * ((b, f) not in THOROUGH_IN_CI))
    for b in (1, 4)
    for f in THOROUGH
]


Known = Callable[..., tuple[Path, Path, list[list[int]]]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Two checkpoints of a family, and transformers' texts of the first, made once."""

    @cache
    def of(
        family: str, count: int, new_tokens: int, device: torch.device
    ) -> tuple[Path, Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(family)
        target = save_tiny(folder / "target", family, seed=0)
        unrelated = save_tiny(folder / "draft", family, seed=1)
        oracle = reference(target, device=device)
        want = [greedy_reference(oracle, p, new_tokens) for p in prompts(count)]
        return target, unrelated, want

    return of


@pytest.mark.parametrize(("family", "batch_size"), SETTINGS)
def test_family(family: str, batch_size: int, device: torch.device, known: Known) -> None:
    target, unrelated, want = known(family, 6, 16, device)
    engine = make_engine(target, unrelated, batch_size=batch_size, device=device)
    compare(engine, (0, 1, 3, 6), want)
    # The same model as draft accepts everything, which catches cache bugs cheaply.
    engine = make_engine(target, target, batch_size=batch_size, device=device)
    compare(engine, (1, 6), want, accepts_all=True)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f not in OTHERS_IN_CI)) for f in OTHERS],
)
def test_other_families(family: str, device: torch.device, known: Known) -> None:
    target, unrelated, want = known(family, 3, 10, device)
    compare(make_engine(target, unrelated, batch_size=2, device=device), (3,), want)
    engine = make_engine(target, target, batch_size=2, device=device)
    compare(engine, (3,), want, accepts_all=True)


def compare(
    engine: Engine, ks: tuple[int, ...], want: list[list[int]], accepts_all: bool = False
) -> None:
    for k in ks:
        seqs = decode(engine, prompts(len(want)), k, max_new_tokens=len(want[0]))
        assert [s.output_ids for s in seqs] == want, f"k={k}"
        if accepts_all:
            assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)
