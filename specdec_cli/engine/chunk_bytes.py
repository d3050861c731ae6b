"""Memory of attention over long chunks of prompts, which `attention.chunks` cuts into parts."""

from typing import NamedTuple

from specdec_kernels.attention.chunks import (
    AFTER,
    BEFORE,
    BOUNDS,
    HEAD_DIMS,
    PIECE,
    WHOLE,
    rounded,
)
from specdec_kernels.gpu import CAPABILITY

from specdec_cli.engine.plan import Plan
from specdec_cli.engine.profile import CacheNeed
from specdec_cli.models.fused import is_fusable
from specdec_cli.models.loader import Description


class ChunkBytes(NamedTuple):
    """Bytes on a GPU beside the queries and results of a prefill pass.

    first: with a prompt's first chunk. later: copies of older keys and values, with later chunks.
    parts: results over the square and over pieces of older keys, likewise.
    """

    first: int = 0
    later: int = 0
    parts: int = 0


def prefill_tokens(plan: Plan, need: CacheNeed) -> int:
    """Tokens of the largest prefill pass."""
    return min(plan.recipe.run.prefill_chunk, need.batch_size * max(1, need.longest - 1))


def chunk_bytes(plan: Plan, need: CacheNeed) -> ChunkBytes:
    """The sums over this rank's models with fused layers."""
    found = [
        _bytes_of(model, prefill_tokens(plan, need), need.longest)
        for model in plan.modules
        if model in plan.held and model.spec.role not in plan.compiled and is_fusable(model.module)
    ]
    return ChunkBytes(*map(sum, zip(*found, strict=True))) if found else ChunkBytes()


def _bytes_of(model: Description, tokens: int, longest: int) -> ChunkBytes:
    shape, itemsize = model.layers[0], model.dtype.itemsize
    fits = itemsize == 2 and shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS
    if not fits or min(tokens, longest) < BOUNDS[CAPABILITY].queries:
        return ChunkBytes()
    mixed = int(model.module.model.layers[0].self_attn.q_proj.out_features)
    kv = 2 * shape.num_kv_heads * shape.key_dim
    first = (BEFORE + AFTER) * mixed + rounded(tokens) * kv
    if longest - 1 <= tokens:
        return ChunkBytes(first * itemsize)
    later = (WHOLE + min(PIECE, longest)) * kv + WHOLE * mixed
    return ChunkBytes(first * itemsize, later * itemsize, 2 * rounded(tokens) * mixed * itemsize)
