"""Calculate the peak memory of a pass through a transformers model, from shapes alone. For fused
layers, formulas give the peak. Other layers run on the meta device, where the peak is measured."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from specdec_kernels.experts.plan import FEW_TOKENS, are_few
from specdec_kernels.experts.tiles import PARTIAL_SUMS, choose_group_tiles, way_of
from specdec_kernels.linear.tile_tables import STORED_ROWS
from specdec_kernels.linear.tiles import can_be_tiled

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.live_bytes import LiveBytes
from specdec_cli.models.attention import Recorder, attach
from specdec_cli.models.fused_layer import (
    Family,
    dense_mlp,
    expert_sizes,
    family_of,
    has_experts,
    matrices,
)
from specdec_cli.models.held import StoredParameter, lendable, weight_of
from specdec_cli.models.rotary_tables import num_turns


class PassShapes(NamedTuple):
    """A module on meta that contains only one rank's part of the weights, with the sizes that
    determine the memory of its passes.

    shape: the cache shape of a layer.
    ranks: the number of ranks that share the model.
    device: where passes run.
    """

    module: Any
    shape: LayerShape
    dtype: torch.dtype
    ranks: int
    device: torch.device


def peak_bytes(
    model: PassShapes, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool
) -> int:
    """Return the peak memory of a pass, in bytes. The arguments after `model` are as for
    `models.draft.Draft.pass_bytes`."""
    itemsize = model.dtype.itemsize
    # With several ranks, this rank's part of the logits, the gathered parts of all ranks and the
    # joined logits are in memory at the same time, so allow three times the size of the logits.
    logits = logit_rows * int(model.module.config.vocab_size) * (1 if model.ranks == 1 else 3)
    family = family_of(model.module)
    if is_compiled or family is None:
        return max(_live_bytes(model, tokens), logits * itemsize)
    plain, shape = _plain_numbers(model, tokens, family), model.shape
    hidden = int(model.module.config.hidden_size)
    # The number of values per token that a fused layer keeps in memory: during the whole layer
    # (`common`), during attention, and during the MLP.
    mixed = int(model.module.model.layers[0].self_attn.q_proj.out_features)
    qkv = mixed + shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    # With norms over all heads, query and key exist both as separate tensors and joined.
    normed = 2 * qkv if family.norms_all_heads else 0
    # A post-norm's output takes memory beside the sum to which it is added.
    streams = hidden * (4 if family.has_post_norms else 3)
    common = 2 * num_turns(model.module) * shape.key_dim + hidden
    mlp = _mlp_numbers(model, tokens, streams, family)
    if gathers:
        # qkv and its rotated copy; then queries, keys, values and two copies of the result, counted
        # as if keys and values had as many heads as queries.
        attention = hidden + 2 * qkv + max(5 * mixed, normed)
        # In prefill on CUDA, the allocator does not reuse the memory of attention for the MLP or
        # the logits, so add up all three.
        return (tokens * (common + attention + mlp) + plain + logits) * itemsize
    attention = max(hidden + qkv + max(2 * mixed, normed), mixed + streams)
    return max(tokens * (common + max(attention, mlp)) + plain, logits) * itemsize


def _plain_numbers(model: PassShapes, tokens: int, family: Family) -> int:
    """Return the most quantised values that one matmul, or one layer's experts, dequantises."""
    config, found = model.module.config, 0
    for layer in model.module.model.layers:
        if tokens > STORED_ROWS:
            found = max(found, *map(_stored_numbers, matrices(layer)))
        if has_experts(layer) and tokens > FEW_TOKENS:
            count, chosen, _ = expert_sizes(layer, config, family)
            if choose_group_tiles(tokens, chosen, count, 2, way=_way_of(layer, model)) is None:
                found = max(found, _stored_numbers(layer.mlp.experts.parameters()))
    return found


def _way_of(layer: Any, model: PassShapes) -> str:
    """Return the way in which kernels read the experts of a layer, a result of `way_of`."""
    experts = layer.mlp.experts
    gate_up, down = weight_of(experts.gate_up_proj), weight_of(experts.down_proj)
    # A process that has not used the GPU yet may fork, which it must not do afterwards.
    device = model.device if torch.cuda.is_initialized() else torch.device("meta")
    if can_be_tiled(model.dtype, device, gate_up, down):
        return "tiled"
    return way_of(gate_up, down)


def _stored_numbers(parameters: Iterable[Any]) -> int:
    return sum(p.numel() for p in parameters if isinstance(p, StoredParameter))


def _mlp_numbers(model: PassShapes, tokens: int, streams: int, family: Family) -> int:
    """Return the number of values per token that the MLP or the experts of a fused layer hold at
    once."""
    config, layers = model.module.config, model.module.model.layers
    hidden = int(config.hidden_size)
    found = 0
    for mlp in [mlp for mlp in map(dense_mlp, layers) if mlp is not None]:
        inner = int(mlp.gate_proj.out_features)
        found = max(found, hidden + 3 * inner, inner + streams)
    if model.ranks > 1:
        # A rank also keeps its partial sum over the experts, and the norm of that sum.
        streams += 2 * hidden
    for layer in filter(has_experts, layers):
        count, chosen, inner = expert_sizes(layer, config, family)
        # For each expert that a token chooses, memory holds the input, the gate and up projections,
        # the gated product, and the result. The clamped activation runs as several torch
        # operators, and each allocates its result. An fp32 value counts as two 16-bit values.
        steps = 10 if family.clamps_experts else 3
        sorted_rows = chosen * (hidden + steps * inner + hidden) + 4 * count
        # For quantised experts the gated product may be kept a second time, as fp8 terms.
        is_stored = any(isinstance(p, StoredParameter) for p in layer.mlp.experts.parameters())
        gated = 2 * inner if is_stored else inner
        few_rows = min(count, chosen * tokens) * gated + 2 * PARTIAL_SUMS * hidden
        grouped_rows = chosen * (gated + hidden) + 4 * count
        ways = "plain", _way_of(layer, model)  # dequantised weights are plain
        if are_few(tokens, chosen, count):
            rows = few_rows
        elif any(choose_group_tiles(tokens, chosen, count, 2, way=way) for way in ways):
            rows = grouped_rows
        else:
            rows = sorted_rows
        # The output of shared experts is added to the residual stream. The sum is a new tensor, and
        # the stream itself is kept, too.
        with_shared = 0 if dense_mlp(layer) is None else hidden
        found = max(found, streams + with_shared + rows)
    return found


@torch.inference_mode()
def _live_bytes(model: PassShapes, tokens: int) -> int:
    """Measure the peak memory of a pass through transformers' own layers, in bytes, by running it
    on the meta device. If an operator does not run there, return an estimate from the widest
    weight of the layers."""
    module: Any = model.module
    attach(module, Recorder())
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    none = torch.zeros(0, dtype=torch.int64, device="meta")
    try:
        with LiveBytes() as live:
            module(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=none)
    except (RuntimeError, TypeError):  # an operator that the meta device lacks
        # The pass multiplies by neither the embedding nor the output matrix, which are the widest.
        outer = {id(part.weight) for part in lendable(module).values() if part is not None}
        inner = (weight for weight in module.parameters() if id(weight) not in outer)
        widest = max(int(weight.shape[-2]) for weight in inner if weight.dim() >= 2)
        return int(tokens * 8 * widest * model.dtype.itemsize)
    return int(live.peak)
