"""A kernel for everything before a model's first matmul. Each program looks up the embedding,
cosines and sines of one token, and applies the first norm to the embedding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, dependence
from specdec_kernels.linear.norm_triton import normed_row
from specdec_kernels.linear.reference import Normed


@triton.jit
def embed_kernel(
    tokens_ptr,  # [T] int64, token ids
    positions_ptr,  # [T] int64
    embedding_ptr,  # [V, K]
    cos_table_ptr,  # [L, D]
    sin_table_ptr,  # [L, D]
    norm_ptr,  # [K]
    hidden_ptr,  # [T, K], output
    scaled_ptr,  # [T, K], output
    cos_ptr,  # [T, D], output
    sin_ptr,  # [T, D], output
    eps,
    scale,  # factor for the embeddings; used only with HAS_SCALE
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_D)
    eps = tl.full([], eps, tl.float32)  # torch.compile passes Python floats as fp64
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    after_predecessor(DEPENDENT)
    token = tl.load(tokens_ptr + row)
    position = tl.load(positions_ptr + row)
    hidden = tl.load(embedding_ptr + token * K + k, mask=k < K, other=0.0)
    if HAS_SCALE:
        scale = tl.full([], scale, tl.float32)
        hidden = (hidden.to(tl.float32) * scale).to(hidden.dtype)
    cos = tl.load(cos_table_ptr + position * D + dim, mask=dim < D, other=0.0)
    sin = tl.load(sin_table_ptr + position * D + dim, mask=dim < D, other=0.0)
    tl.store(hidden_ptr + row * K + k, hidden, mask=k < K)
    tl.store(cos_ptr + row * D + dim, cos, mask=dim < D)
    tl.store(sin_ptr + row * D + dim, sin, mask=dim < D)
    tl.store(scaled_ptr + row * K + k, normed_row(hidden, norm, eps, K), mask=k < K)


def embed_triton(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: float = 1.0,
) -> tuple[Normed, Tensor, Tensor]:
    """Compute `ops.embed` in one kernel."""
    num_rows, width, dim = token_ids.shape[0], embedding.shape[1], cos_table.shape[1]
    assert positions.shape == token_ids.shape and norm_weight.shape == (width,)
    assert cos_table.shape == sin_table.shape
    assert all(t.is_contiguous() for t in (token_ids, positions, embedding, cos_table, sin_table))
    hidden, scaled = torch.empty(
        (2, num_rows, width), dtype=embedding.dtype, device=embedding.device
    )
    cos, sin = torch.empty((2, num_rows, dim), dtype=cos_table.dtype, device=cos_table.device)
    block = triton.next_power_of_2(width)
    embed_kernel[(num_rows,)](
        token_ids,
        positions,
        embedding,
        cos_table,
        sin_table,
        norm_weight,
        hidden,
        scaled,
        cos,
        sin,
        float(eps),
        float(scale),
        K=width,
        D=dim,
        BLOCK=block,
        BLOCK_D=triton.next_power_of_2(dim),
        HAS_SCALE=scale != 1.0,
        num_warps=max(1, min(16, block // 512)),
        **dependence(embedding),
    )
    return Normed(hidden, scaled, None, eps), cos, sin
