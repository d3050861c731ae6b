"""The package's public functions. They call Triton kernels for CUDA tensors, and torch
implementations for all other tensors.

CUDA graphs can capture all functions except `gather_plan`, which is meant for CPUs and reads its
tensors on the host. `ops.NAME.reference` is the torch implementation of function NAME; it works on
any device. Arguments called row starts, `[B + 1]`, are the cumulative sums of the counts per row,
beginning with 0.
"""

from specdec_kernels.attention.call import FP8, AttentionCall, LayerCache
from specdec_kernels.attention.chunks import ChunkPlan, bound_of, plan_chunks
from specdec_kernels.attention.cpu import GatherPlan, gather_attention, gather_plan
from specdec_kernels.attention.reference import (
    paged_attention,
    rope_attention,
    slot_mapping,
    write_kv,
    write_kv_turned,
)
from specdec_kernels.comm.peers import (
    gather_columns,
    linear_reduce,
    linear_reduce_add_norm,
    mixture_reduce_add_norm,
    reduce_add_norm,
)
from specdec_kernels.comm.reference import fetch_staged, tell_tokens
from specdec_kernels.experts.reference import (
    CLAMPED,
    Experts,
    Routing,
    in_tiles,
    mixture_add_norm,
)
from specdec_kernels.linear.cpu import PackedWeight, Weight, forms_of, pack_weight
from specdec_kernels.linear.reference import (
    Normed,
    add_norm,
    embed,
    gate,
    linear,
    linear_add,
    linear_add_norm,
    norm_gate_up,
    norm_linear,
    rms_norm,
)
from specdec_kernels.linear.stored import Storage, Stored, plain_of
from specdec_kernels.round.reference import accept, advance, ngram_lookup, padded_pass, stamp
from specdec_kernels.sampling.reference import (
    LogitRows,
    Verification,
    greedy_argmax,
    logit_rows,
    reject_logits,
    sample_logits,
    uniform_rows,
)
