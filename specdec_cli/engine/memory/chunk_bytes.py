"""Estimates the memory of the temporary copies of keys and values that attention makes for long
prompt chunks."""

from typing import NamedTuple

from specdec_kernels.attention.chunks import BOUNDS, HEAD_DIMS, LONGEST
from specdec_kernels.gpu import CAPABILITY

from specdec_cli.engine.memory.budget import CacheNeed
from specdec_cli.engine.plan import Plan
from specdec_cli.models.draft import Draft


class ChunkBytes(NamedTuple):
    """The bytes that copies of keys and values take on a GPU.

    first: the bytes during a prompt's first chunk.
    later: the additional bytes during later chunks, which also attend to earlier tokens.
    """

    first: int = 0
    later: int = 0


def prefill_tokens(plan: Plan, need: CacheNeed) -> int:
    """Return the number of tokens in the largest prefill pass."""
    return min(plan.recipe.run.prefill_chunk, need.batch_size * max(1, need.longest - 1))


def chunk_bytes(plan: Plan, need: CacheNeed) -> ChunkBytes:
    """Return the bytes of the copies that all models on this rank make together. Only models with
    fused layers make copies."""
    tokens = min(prefill_tokens(plan, need), need.longest - 1)
    found = [
        _bytes_of(model, tokens, need.longest - 1)
        for model in plan.held
        if model.spec.role not in plan.compiled and model.captured_width
    ]
    return ChunkBytes(*map(sum, zip(*found, strict=True))) if found else ChunkBytes()


def _bytes_of(model: Draft, tokens: int, context: int) -> ChunkBytes:
    shape, itemsize = model.layers[0], model.dtype.itemsize
    fits = itemsize == 2 and shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS
    if not fits or tokens < BOUNDS[CAPABILITY].queries:
        return ChunkBytes()
    each = 2 * shape.num_kv_heads * shape.key_dim * itemsize
    return ChunkBytes(tokens * each, max(0, min(context, LONGEST) - tokens) * each)
