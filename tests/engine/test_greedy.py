"""fp32 greedy output equals transformers' greedy `generate`, token for token."""

from pathlib import Path

import pytest
import torch

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
# which test_families.py compares, not in the engine's use of passes.
THOROUGH = ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]
OTHERS = [family for family in FAMILIES if family not in THOROUGH]


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# CI runs these in batches alone; `pytest tests` runs them one sequence at a time too.
LIKE_LLAMA = ["llama-tied", "llama3-rope", "qwen2", "mistral"]
SETTINGS = [
    pytest.param(f, b, id=f"b{b}-{f}", marks=[pytest.mark.slow] * (b == 1 and f in LIKE_LLAMA))
    for b in (1, 4)
    for f in THOROUGH
]


@pytest.mark.parametrize(("family", "batch_size"), SETTINGS)
def test_family(family: str, batch_size: int, device: torch.device, tmp_path: Path) -> None:
    compare(family, batch_size, (0, 1, 3, 6), prompts(6), 24, device, tmp_path)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, device: torch.device, tmp_path: Path) -> None:
    compare(family, 2, (3,), prompts(3), 10, device, tmp_path)


def compare(
    family: str,
    batch_size: int,
    ks: tuple[int, ...],
    asked: list[list[int]],
    new_tokens: int,
    device: torch.device,
    folder: Path,
) -> None:
    target = save_tiny(folder / "target", family, seed=0)
    unrelated = save_tiny(folder / "draft", family, seed=1)
    oracle = reference(target, device=device)
    want = [greedy_reference(oracle, p, new_tokens) for p in asked]
    for draft in (unrelated, target):
        engine = make_engine(target, draft, batch_size=batch_size, device=device)
        for k in ks:
            seqs = decode(engine, asked, k, max_new_tokens=new_tokens)
            assert [s.output_ids for s in seqs] == want, f"k={k}"
            if draft is target and k:
                # The same model as draft accepts everything, which catches cache bugs cheaply.
                assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)
