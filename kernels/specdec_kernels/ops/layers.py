"""A decoder layer: norms, products, rotary embedding with attention, sums over ranks."""

from torch import Tensor

from specdec_kernels.embed import embed_reference
from specdec_kernels.linear import Normed, gate_reference
from specdec_kernels.linear_cpu import (
    PackedWeight,
    Weight,
    add_norm_cpu,
    linear_add_norm_cpu,
    linear_cpu,
    norm_gate_up_cpu,
    norm_linear_cpu,
    pack_weight_cpu,
    rms_norm_cpu,
)
from specdec_kernels.peers import Peers
from specdec_kernels.rope_attention import rope_attention_reference


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
    """What a pass begins with.

    Args:
        token_ids, positions: [T] int64, less than V and L; not checked on CUDA.
        embedding: [V, K].
        cos_table, sin_table: [L, D].
        norm_weight: [K], and `eps`: of the first layer's norm.
        scale: What embeddings are multiplied by, as Gemma's are; of their dtype's values.

    Returns:
        The embeddings and their norm, [T, K], and the tables' rows, [T, D] each.
    """
    args = (token_ids, positions, embedding, cos_table, sin_table, norm_weight, eps, scale)
    if embedding.is_cuda:
        from specdec_kernels.embed_triton import embed_triton

        return embed_triton(*args)
    return embed_reference(*args)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of every row times `weight`.

    Args:
        x: [..., K], rows contiguous.
        weight: [K], as in every norm here of x's dtype or, as Gemma's 1 + g, in fp32.
        eps: Added to the mean of squares.

    Returns:
        As x, contiguous.
    """
    if x.is_cuda:
        from specdec_kernels.norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_cpu(x, weight, eps)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of merged [T, 2F], gate first: [T, F]; "silu" or "gelu_tanh"."""
    if gate_up.is_cuda:
        from specdec_kernels.norm_triton import gate_triton

        return gate_triton(gate_up, activation)
    return gate_reference(gate_up, activation)


def pack_weight(weight: Tensor) -> Weight:
    """The form in which products take a weight [N, K], made once at load.

    On CUDA that is the contiguous tensor; a CPU has orders of its own, see `PackedWeight`.
    """
    return weight.contiguous() if weight.is_cuda else pack_weight_cpu(weight)


def norm_linear(
    x: Normed, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """rms_norm(x) @ weight^T (+ bias): a layer's merged q, k and v, or the logits.

    Args:
        x: Of [T, K], as `embed`, `add_norm` or `linear_add_norm` returned it, all rows.
        weight: [N, K] of `pack_weight`.
        bias: [N].
        into: [T, N], contiguous, where to write it; CUDA only.

    Returns:
        [T, N] of x's dtype, contiguous.
    """
    if isinstance(weight, PackedWeight) or not weight.is_cuda:
        assert into is None
        return norm_linear_cpu(x, weight, bias)
    from specdec_kernels.linear_triton import norm_linear_triton

    return norm_linear_triton(x, weight, bias, into)


def norm_gate_up(x: Normed, weight: Weight, activation: str = "silu") -> Tensor:
    """activation(n @ gate^T) * (n @ up^T) with n = rms_norm(x): the first half of a gated MLP.

    Args:
        x: Of [T, K], as `embed`, `add_norm` or `linear_add_norm` returned it, all rows.
        weight: [2F, K] of `pack_weight`, the gate's rows first.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, F], contiguous.
    """
    if isinstance(weight, PackedWeight) or not weight.is_cuda:
        return norm_gate_up_cpu(x, weight, activation)
    from specdec_kernels.linear_triton import norm_gate_up_triton

    return norm_gate_up_triton(x, weight, activation)


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """x @ weight^T (+ bias): one rank's part of an output or down projection.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K] of `pack_weight`.
        bias: [N].
        into: [T, N], contiguous, where to write it; CUDA only.

    Returns:
        [T, N], contiguous.
    """
    if isinstance(weight, PackedWeight) or not weight.is_cuda:
        assert into is None
        return linear_cpu(x, weight, bias)
    from specdec_kernels.linear_triton import linear_triton

    return linear_triton(x, weight, bias, into)


def linear_add_norm(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """residual + x @ weight^T (+ bias), made ready for the norm that follows: a layer's output and
    down projections.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K] of `pack_weight`.
        residual: [T, N], rows contiguous.
        bias: [N].
        norm_weight: [N], of the next norm: the MLP's, the next layer's, or the last one.
        eps: Of that norm.

    Returns:
        The new residual stream, in `hidden`, and what the next product reads.
    """
    if isinstance(weight, PackedWeight) or not weight.is_cuda:
        return linear_add_norm_cpu(x, weight, residual, norm_weight, eps, bias)
    from specdec_kernels.linear_triton import linear_add_norm_triton

    return linear_add_norm_triton(x, weight, residual, norm_weight, eps, bias)


def add_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    post_norm: Tensor | None = None,
) -> Normed:
    """residual + x, made ready for the norm that follows: of a whole projection.

    Where the ranks' parts of it have been added up, or where it has a norm of its own.

    Args:
        x, residual: [T, N], rows contiguous.
        norm_weight: [N].
        eps: Of both norms.
        post_norm: [N], of a norm of x before it is added, as Gemma 2 and 3 have.
    """
    if x.is_cuda:
        from specdec_kernels.norm_triton import add_norm_triton

        return add_norm_triton(x, residual, norm_weight, eps, post_norm)
    return add_norm_cpu(x, residual, norm_weight, eps, post_norm)


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """`add_norm` of the sum of all ranks' parts, which they have written to their own memory.

    CUDA only, at most 256 rows. Every rank of the group calls it, and with place 0 and 1 in turn.

    Args:
        peers: The group's memory; `peers.take(place, T, N)` is where this rank's part is.
        place: 0 or 1.
        residual: [T, N], rows contiguous, the same on all ranks.
        norm_weight: [N].
    """
    from specdec_kernels.reduce_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def reduce_parts(peers: Peers, place: int, num_rows: int) -> Tensor:
    """The sum [T, N] of all ranks' parts alone; otherwise as `reduce_add_norm`."""
    from specdec_kernels.reduce_triton import reduce_parts_triton

    return reduce_parts_triton(peers, place, num_rows)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """What all ranks have written to `peers.take(0, num_rows, N)`, side by side: [T, size * N].

    CUDA only. Every rank of the group calls it, and has to take part in `reduce_add_norm` or
    another meeting of the group before it writes there again.
    """
    from specdec_kernels.gather_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)


def rope_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotary embedding, storing the new keys and values, and `paged_attention` of one layer.

    The new tokens' keys and values are taken from `qkv`, those before them from the cache. On CUDA
    block tables, lengths, slots, cos and sin must be older than the kernel that writes `qkv`: they
    and the old cache are read while that one still runs.

    Args:
        qkv: [T, (H + 2 Hkv) D], rows contiguous: query, key and value heads of every token.
        cos, sin: [T, D], in the layout of transformers' Llama.
        key_cache, value_cache: [NB, BS, Hkv, D], written at `slots`.
        slots: [T] int64. Those of a sequence's queries are its last positions', or in block 0 (the
            trash block), whose contents are then not defined. Of more queries than the context has
            tokens the first ones are padding.
        block_tables, query_start, context_lens, scale, max_query_len, sliding_window, softcap,
            sinks: As in `paged_attention`; tokens at or past `query_start[B]` give zeros. The scale
            is positive.
        query_norm, key_norm: [D], weights of per-head RMS norms before the rotation.
        eps: Of these norms.

    Returns:
        [T, H * D], contiguous.
    """
    tensors = (qkv, cos, sin, key_cache, value_cache, slots, block_tables, query_start)
    options = (sliding_window, softcap, sinks, query_norm, key_norm, eps)
    if qkv.is_cuda:
        from specdec_kernels.rope_attention_triton import rope_attention_triton

        return rope_attention_triton(*tensors, context_lens, scale, max_query_len, *options)
    return rope_attention_reference(*tensors, context_lens, scale, *options)
