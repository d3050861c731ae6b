"""The public functions: CUDA tensors go to Triton kernels, CPU tensors to torch: the references, or
what `linear_cpu.py` has for the products of a layer.

Triton is imported when a CUDA tensor first arrives, so CPU use needs no Triton. No function reads
device data on the host when its tensors are on CUDA, so all can be captured in a CUDA graph;
`gather_plan` is the exception, and meant for CPU.

Does not know sequences, engines or sampling parameters. Row starts `[B + 1]` are the running sum
of per-row counts, beginning at 0.
"""

from specdec_kernels.attention import GatherPlan, gather_attention, gather_plan
from specdec_kernels.linear import Normed
from specdec_kernels.linear_cpu import PackedWeight, Weight, forms_of
from specdec_kernels.logits import LogitRows
from specdec_kernels.ops.cache import paged_attention, slot_mapping, write_kv
from specdec_kernels.ops.layers import (
    add_norm,
    embed,
    gate,
    gather_columns,
    linear,
    linear_add_norm,
    norm_gate_up,
    norm_linear,
    pack_weight,
    reduce_add_norm,
    reduce_parts,
    rms_norm,
    rope_attention,
)
from specdec_kernels.ops.rounds import (
    accept,
    advance,
    merge_tokens,
    ngram_lookup,
    padded_pass,
    stamp,
)
from specdec_kernels.ops.sampling import (
    block_verify_logits,
    greedy_argmax,
    logit_rows,
    reject_logits,
    rejection_sample,
    sample_categorical,
    sample_logits,
    uniform_rows,
)

__all__ = [
    "GatherPlan",
    "LogitRows",
    "Normed",
    "PackedWeight",
    "Weight",
    "accept",
    "add_norm",
    "advance",
    "block_verify_logits",
    "embed",
    "forms_of",
    "gate",
    "gather_attention",
    "gather_columns",
    "gather_plan",
    "greedy_argmax",
    "linear",
    "linear_add_norm",
    "logit_rows",
    "merge_tokens",
    "ngram_lookup",
    "norm_gate_up",
    "norm_linear",
    "pack_weight",
    "padded_pass",
    "paged_attention",
    "reduce_add_norm",
    "reduce_parts",
    "reject_logits",
    "rejection_sample",
    "rms_norm",
    "rope_attention",
    "sample_categorical",
    "sample_logits",
    "slot_mapping",
    "stamp",
    "uniform_rows",
    "write_kv",
]
