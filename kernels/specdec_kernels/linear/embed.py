"""The start of a pass: rows of the embedding and of the rotary tables."""

import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.cpu import normed
from specdec_kernels.linear.reference import Normed


@kernel("specdec_kernels.linear.embed_triton:embed_triton")
def embed(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: float = 1.0,
) -> tuple[Normed, Tensor, Tensor]:
    """Look up embeddings, their first norm, and the rotary tables' rows.

    Args:
        token_ids, positions: [T] int64, less than V and L; not checked on CUDA.
        embedding: [V, K].
        cos_table, sin_table: [L, D].
        norm_weight: [K], and `eps`: of the first layer's norm.
        scale: Factor on the embeddings, as Gemma has; a value of their dtype.

    Returns:
        The embeddings and their norm, [T, K], and the tables' rows, [T, D] each.
    """
    hidden = F.embedding(token_ids, embedding)
    if scale != 1.0:
        hidden = hidden * scale
    cos, sin = (table.index_select(0, positions) for table in (cos_table, sin_table))
    return normed(hidden, norm_weight, eps), cos, sin
