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

NEW_TOKENS = 24


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 4], ids=["b1", "b4"])
def test_family(family: str, batch_size: int, device: torch.device, tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", family, seed=0)
    unrelated = save_tiny(tmp_path / "draft", family, seed=1)
    oracle = reference(target, device=device)
    asked = prompts(6)
    want = [greedy_reference(oracle, p, NEW_TOKENS) for p in asked]
    for draft in (unrelated, target):
        engine = make_engine(target, draft, batch_size=batch_size, device=device)
        for k in (0, 1, 3, 6):
            seqs = decode(engine, asked, k, max_new_tokens=NEW_TOKENS)
            assert [s.output_ids for s in seqs] == want, f"k={k}"
            if draft is target and k:
                # The same model accepts everything: a cheap way to catch cache bugs.
                assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)
