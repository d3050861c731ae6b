"""Passes whose rows see each other, against transformers' forward with a mask written by hand."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Span, make_batch
from specdec_cli.core.kv_cache import BlockAllocator, KVCache, LayerShape
from specdec_cli.core.types import Sequence
from specdec_cli.models.attention import PagedAttention, attend_by_handle
from tests.support import CPU, VOCAB, paged_model, reference, save_tiny

BLOCK = 4
CUTS = [0, 9, 14, 15, 22]  # where passes over the text below begin and end
TEXT = torch.randint(3, VOCAB, (CUTS[-1],), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_pass_sees_itself_and_what_is_cached(
    fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    monkeypatch.setattr(ops, "AttentionCall", partial(ops.AttentionCall, causal=False))
    model = paged_model(folder, 40, BLOCK, fused=fused)
    allocator = BlockAllocator(40, BLOCK)
    texts = [Sequence(0, TEXT, len(TEXT), 99), Sequence(1, TEXT[::-1], len(TEXT), 99)]
    for size in range(1, len(TEXT) + 1, 3):
        for seq in texts:
            allocator.extend(seq.block_table, size)
    found: list[list[torch.Tensor]] = [[], []]
    with torch.inference_mode():
        for start, stop in pairwise(CUTS):
            spans = [Span(seq, start, stop) for seq in texts]
            logits, _ = model.forward(spans, [stop - start] * 2)
            for rows, part in zip(found, logits.chunk(2), strict=True):
                rows.append(part)
        ends = [next(cut for cut in CUTS if cut > row) for row in range(len(TEXT))]
        seen = torch.tensor([[column < end for column in range(len(TEXT))] for end in ends])
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        for seq, parts in zip(texts, found, strict=True):
            oracle = reference(folder)
            want = oracle(torch.tensor([seq.tokens]), attention_mask=mask[None, None]).logits[0]
            torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=2e-5)
            causal = oracle(torch.tensor([seq.tokens])).logits[0]
            assert (want - causal).abs().max() > 1e-2, "the mask changes nothing"


def test_a_compiled_graph_s_operator_hands_on_every_argument() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache([LayerShape(2, 8, 8)], 9, BLOCK, torch.float32, CPU)
    attention = PagedAttention(cache)
    allocator = BlockAllocator(9, BLOCK)
    seq = Sequence(0, TEXT, len(TEXT), 99)
    allocator.extend(seq.block_table, len(TEXT))
    attention.batch = make_batch([Span(seq, 0, 12)], [12], BLOCK, CPU)
    query, key, value = (torch.randn(h, 12, 8, generator=generator) for h in (4, 2, 2))
    call = ops.AttentionCall(0.3, 5, 2.0, torch.randn(4, generator=generator), causal=False)
    want = attention.attend(0, query, key, value, call)
    assert torch.equal(attend_by_handle(attention.handle, 0, query, key, value, *call), want)
    for other in (
        *(call._replace(scale=0.4), call._replace(sliding_window=4), call._replace(softcap=3.0)),
        *(call._replace(sinks=None), call._replace(causal=True)),
    ):
        out = attend_by_handle(attention.handle, 0, query, key, value, *other)
        assert not torch.allclose(out, want, atol=1e-3)
