"""Run a pass through a stack of fused layers, which belongs to the target or to a draft head.

A layer takes five kernels: norm and q, k, v; rotary embedding, KV write and attention; output
projection and residual; norm and gated MLP; down projection and residual. Post-norms take two more
kernels, and experts take three instead of the MLP's two. With several ranks, the ranks' partial
sums are all-reduced and then added to the residual stream once. Legend: T packed tokens, D features
of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from specdec_kernels import ops
from specdec_kernels.attention.reference import Rotation, split_heads_reference
from specdec_kernels.linear.reference import Normed
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.models.fused_layer import FusedLayer
from specdec_cli.models.split_products import SplitProducts

# Maps a layer's index and the previous layer's output to the layer's input.
Enter = Callable[[int, Normed], Normed]


@dataclass(frozen=True, slots=True)
class FusedStack:
    """A stack of fused layers. num_turns: the number of rotary embeddings that lie side by side in
    the rotary tables."""

    layers: list[FusedLayer]
    split: SplitProducts
    num_turns: int = 1

    def run(
        self,
        start: tuple[Normed, Tensor, Tensor],
        batch: ForwardBatch,
        cache: KVCache,
        enter: Enter = lambda _, x: x,
    ) -> Normed:
        """Return the residual stream after the last layer, ready for the norm and projection that
        follow.

        start: the result of `ops.embed`: the stream before the first layer, normed for that layer,
        and the rows of the rotary tables. enter: called before each layer, to replace or record the
        layer's input; see `Enter`.
        """
        x, cos, sin = start
        del start  # this reference would keep the first layer's input alive
        attend = _attention_of(batch, cos, sin, self.num_turns)
        for place, layer in enumerate(self.layers):
            x = enter(place, x)
            qkv = layer.normed(ops.norm_linear(x, layer.qkv, layer.qkv_bias))
            mixed = attend(layer, qkv, cache, batch)
            x = self.split.add_norm(
                *(0, mixed, layer.output, layer.output_bias, layer.post_attention_norm),
                *(x.hidden, layer.mlp_norm, layer.eps),
            )
            x = self._second_half(x, layer)
        return x

    def _second_half(self, x: Normed, layer: FusedLayer) -> Normed:
        """Run a layer's MLP. If the layer has experts, run these instead, together with its shared
        MLP if there is one."""
        mlp = None
        if layer.gate_up is not None and layer.down is not None:
            if layer.gate_up_bias is None:
                inner = ops.norm_gate_up(x, layer.gate_up, layer.activation)
            else:
                gate_up = ops.norm_linear(x, layer.gate_up, layer.gate_up_bias)
                inner = ops.gate(gate_up, layer.activation)
            mlp = inner, layer.down
        norm = layer.following_norm, layer.eps
        if layer.experts is not None:
            return self.split.mixture_add_norm(x, layer.experts, mlp, *norm)
        assert mlp is not None
        return self.split.add_norm(1, *mlp, layer.down_bias, layer.post_mlp_norm, x.hidden, *norm)

    def only(self, indices: Sequence[int]) -> "FusedStack":
        """Return a stack of some of the layers, in this order. They share their weights and their
        places in the cache with this stack. Raises `IndexError` for a layer that does not exist."""
        layers = [self.layers[index] for index in indices]
        norms = [*(layer.attention_norm for layer in layers[1:]), self.layers[-1].following_norm]
        pairs = zip(layers, norms, strict=True)
        return replace(self, layers=[replace(one, following_norm=norm) for one, norm in pairs])

    @property
    def held(self) -> list[Any]:
        """All tensors of the layers, for `storages_of`."""
        layers, names = self.layers, [field.name for field in dataclass_fields(FusedLayer)]
        mixtures = [layer.experts for layer in layers if layer.experts is not None]
        stacked = [weight for one in mixtures for weight in (one.gate_up, one.down)]
        return stacked + [getattr(layer, name) for layer in layers for name in names]


def storages_of(held: list[Any]) -> dict[int, int]:
    """Return the size in bytes of each memory block that `held` uses. Keys are addresses, or ids of
    Python objects for packed weights."""
    packed = [weight for weight in held if isinstance(weight, ops.PackedWeight)]
    plain = [*held, *(weight.plain for weight in packed)]
    plain += [t for weight in held if isinstance(weight, ops.Stored) for t in weight.tensors]
    pieces = [tensor.untyped_storage() for tensor in plain if isinstance(tensor, Tensor)]
    found = {piece.data_ptr(): piece.nbytes() for piece in pieces}
    return found | {id(weight): weight.num_bytes for weight in packed}


# Takes qkv [T, (H + 2 Hkv) * D], applies rotary embeddings, writes keys and values to the cache,
# and attends. Returns [T, H * D].
Attend = Callable[[FusedLayer, Tensor, KVCache, ForwardBatch], Tensor]


def _attention_of(batch: ForwardBatch, cos: Tensor, sin: Tensor, num_turns: int) -> Attend:
    """Return the attention function for the fused layers of one pass. On a CPU the rotations and
    the plan for gathering keys and values are computed once and used by all layers.

    cos, sin: [T, R * D], the rows of the rotary tables, with R = num_turns embeddings side by side.
    """
    turns = list(zip(cos.chunk(num_turns, 1), sin.chunk(num_turns, 1), strict=True))

    def attend(layer: FusedLayer, qkv: Tensor, cache: KVCache, batch: ForwardBatch) -> Tensor:
        lengths = batch.block_tables, batch.query_start, batch.context_lens, batch.max_query_len
        return ops.rope_attention(
            *(qkv, *turns[layer.turn], cache.layers[layer.index], batch.slots, *lengths),
            *(layer.call, layer.query_norm, layer.key_norm, layer.eps, batch.chunks),
        )

    if (plan := batch.plan) is None:
        return attend
    rotations = [Rotation.of(*turn) for turn in turns]

    def attend_by_plan(
        layer: FusedLayer, qkv: Tensor, cache: KVCache, batch: ForwardBatch
    ) -> Tensor:
        own = cache.layers[layer.index]
        _, _, kv_heads, head_dim = own.keys.shape
        norms = layer.query_norm, layer.key_norm, layer.eps
        query, key, value = split_heads_reference(
            qkv, rotations[layer.turn], kv_heads, head_dim, *norms
        )
        ops.write_kv(key, value, own, batch.slots)
        return ops.gather_attention(query, own, plan, layer.call).view(qkv.shape[0], -1)

    return attend_by_plan
