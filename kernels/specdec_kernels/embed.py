"""How a pass begins: rows of the embedding and of the rotary tables: torch reference."""

import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.linear import Normed
from specdec_kernels.linear_cpu import norm_cpu


def embed_reference(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: float = 1.0,
) -> tuple[Normed, Tensor, Tensor]:
    """See `ops.embed`."""
    hidden = F.embedding(token_ids, embedding)
    if scale != 1.0:
        hidden = hidden * scale
    cos, sin = (table.index_select(0, positions) for table in (cos_table, sin_table))
    return norm_cpu(hidden, norm_weight, eps), cos, sin
