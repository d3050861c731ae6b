"""Forward passes of llama-like decoders in few, large kernels.

A model's meaning stays transformers': only classes whose code is known to compute what is computed
here have a fused form, and it is tested against the original. A layer is five kernels: norm and
merged q, k, v; rotary embedding, KV write and attention; output projection and residual; norm and
gated MLP; down projection and residual. On CUDA the module itself stays whole: its weights become
views of the merged ones. On a CPU large ones are packed, and the module's own given up. Split over
ranks, the two projections that end in the residual stream are plain products, whose sum over ranks
is added to it once. Legend: T packed tokens, D features of a head.
"""

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any, Self

import torch
from specdec_kernels import ops
from specdec_kernels.linear import Normed
from specdec_kernels.rope_attention import Rotation, split_heads_reference
from torch import Tensor

from specdec_cli.engine.batch import ForwardBatch
from specdec_cli.engine.kv_cache import KVCache
from specdec_cli.engine.parallel import ALONE, TensorParallel
from specdec_cli.engine.peers import shared_memory
from specdec_cli.models.attention import attach

# Their layers differ in biases, per-head norms and windows alone.
_FUSABLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_ROTARY_CHUNK = 1 << 16  # positions


def is_fusable(module: Any) -> bool:
    """Whether `FusedForward` computes what `module` does; needs no weights."""
    layers = getattr(getattr(module, "model", None), "layers", None)
    return layers is not None and all(_is_fusable(layer, module.config) for layer in layers)


def _is_fusable(layer: Any, config: Any) -> bool:
    if type(layer).__name__ not in _FUSABLE or getattr(config, "hidden_act", None) != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    biased = any(p.bias is not None for p in (layer.mlp.gate_proj, layer.mlp.down_proj))
    return not biased and rope.get("partial_rotary_factor", 1.0) == 1.0


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer's weights, merged, and what it asks of attention.

    following_norm: the weight of the norm that the next layer begins with, or of the last one.
    """

    index: int
    scale: float
    sliding_window: int
    eps: float
    attention_norm: Tensor
    mlp_norm: Tensor
    following_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: ops.Weight
    qkv_bias: Tensor | None
    output: ops.Weight
    output_bias: Tensor | None
    gate_up: ops.Weight
    down: ops.Weight

    @classmethod
    def of(
        cls, layer: Any, following_norm: Any, index: int, scale: float, sliding_window: int
    ) -> Self:
        attention = layer.self_attn
        biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        qkv, output, gate_up, down = map(_merged, _matrices(layer))
        return cls(
            index=index,
            scale=scale,
            sliding_window=sliding_window,
            eps=float(layer.input_layernorm.variance_epsilon),
            attention_norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            following_norm=following_norm.weight,
            query_norm=None if norms[0] is None else norms[0].weight,
            key_norm=None if norms[1] is None else norms[1].weight,
            qkv=qkv,
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            output=output,
            output_bias=attention.o_proj.bias,
            gate_up=gate_up,
            down=down,
        )


class FusedForward:
    """A model's forward pass; made by `fuse`.

    max_len: positions that passes will ask for. parallel: the ranks that the module is split over.
    """

    def __init__(self, module: Any, max_len: int, parallel: TensorParallel = ALONE) -> None:
        decoder = module.model
        self.parallel = parallel
        self.vocab_size = int(module.config.vocab_size)
        layers = list(decoder.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), decoder.norm]
        self.cos, self.sin = _rotary_table(decoder.rotary_emb, module.dtype, module.device, max_len)
        self.layers: list[FusedLayer] = []
        calls = _recorded_calls(module)
        for layer, following_norm, call in zip(layers, norms, calls, strict=True):
            self.layers.append(FusedLayer.of(layer, following_norm, len(self.layers), *call))
            if module.device.type == "cuda":
                # As in the loader: pieces of what merging frees would hold the next layer's.
                torch.cuda.empty_cache()
        # The head is looked up as an embedding where it is tied, and lent to drafts.
        self.head = _merged([module.lm_head.weight], keep=True)
        self.head_bias: Tensor | None = module.lm_head.bias
        self.embedding: Tensor = decoder.embed_tokens.weight
        is_tied = module.lm_head.weight is decoder.embed_tokens.weight
        if is_tied and isinstance(self.head, Tensor):
            self.embedding = self.head
        width = self.embedding.shape[1]
        self.shared = shared_memory(parallel, width, self.vocab_size, module.dtype)

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of each piece of memory that is held, by its address or another number."""
        held: list[Any] = [self.cos, self.sin, self.head, self.embedding]
        held += [getattr(layer, f.name) for layer in self.layers for f in dataclass_fields(layer)]
        packed = [weight for weight in held if isinstance(weight, ops.PackedWeight)]
        held += [weight.plain for weight in packed]
        pieces = [tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor)]
        found = {piece.data_ptr(): piece.nbytes() for piece in pieces}
        return found | {id(weight): weight.num_bytes for weight in packed}

    def __call__(self, token_ids: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """token_ids: int64 [T], in place of the batch's own. Logits [M, V] of the wanted rows."""
        first = self.layers[0]
        tables = (self.embedding, self.cos, self.sin)
        x, cos, sin = ops.embed(
            token_ids, batch.positions, *tables, first.attention_norm, first.eps
        )
        if batch.plan is None:
            attend = partial(_attend, cos=cos, sin=sin)
        else:
            attend = partial(_attend_by_plan, rotation=Rotation.of(cos, sin), plan=batch.plan)
        for layer in self.layers:
            qkv = ops.norm_linear(x, layer.qkv, layer.qkv_bias)
            mixed = attend(layer, qkv, cache, batch)
            x = self._add_norm(
                *(0, mixed, layer.output, x.hidden, layer.mlp_norm, layer.eps, layer.output_bias)
            )
            inner = ops.norm_gate_up(x, layer.gate_up)
            x = self._add_norm(1, inner, layer.down, x.hidden, layer.following_norm, layer.eps)
        if batch.logit_rows is not None:
            x = x.take(batch.logit_rows)
        return self._logits(x)

    def _logits(self, x: Normed) -> Tensor:
        """[M, V] on every rank; each computes a share of the vocabulary."""
        peers = None if self.shared is None else self.shared.logits
        num_rows = len(x.hidden)
        if peers is not None and num_rows:
            assert isinstance(self.head, Tensor), "ranks that share memory are on CUDA"
            room = peers.take(0, num_rows, len(self.head))
            if room is not None:
                ops.norm_linear(x, self.head, self.head_bias, into=room)
                return ops.gather_columns(peers, num_rows)
        logits = ops.norm_linear(x, self.head, self.head_bias)
        return self.parallel.all_gather(logits, self.vocab_size)

    def _add_norm(
        self,
        place: int,
        x: Tensor,
        weight: ops.Weight,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
    ) -> Normed:
        """`ops.linear_add_norm` of the whole product, of which each rank holds a part.

        place: 0 for what attention adds, 1 for the MLP.
        """
        if self.parallel.size == 1:
            return ops.linear_add_norm(x, weight, residual, norm_weight, eps, bias)
        if self.shared is not None and len(residual) <= self.shared.sum_rows:
            peers = self.shared.sums
            room = peers.take(place, *residual.shape)
            assert room is not None
            ops.linear(x, weight, bias, into=room)
            return ops.reduce_add_norm(peers, place, residual, norm_weight, eps)
        part = self.parallel.all_reduce(ops.linear(x, weight, bias))
        return ops.add_norm(part, residual, norm_weight, eps)


def fuse(module: Any, max_len: int, parallel: TensorParallel = ALONE) -> FusedForward | None:
    """The fused form of a loaded model, None where it has none.

    Weights are held once. On CUDA `module` keeps working, on views of what is merged here; on a CPU
    large ones are packed, and the module's are NaN from then on but for the embedding and the head.
    """
    return FusedForward(module, max_len, parallel) if is_fusable(module) else None


def _attend(
    layer: FusedLayer,
    qkv: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    *,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate, store keys and values, attend: [T, H * D]. cos, sin: [T, D]."""
    return ops.rope_attention(
        qkv,
        cos,
        sin,
        *cache.layers[layer.index],
        batch.slots,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        layer.scale,
        batch.max_query_len,
        layer.sliding_window,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        eps=layer.eps,
    )


def _attend_by_plan(
    layer: FusedLayer,
    qkv: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    *,
    rotation: Rotation,
    plan: ops.GatherPlan,
) -> Tensor:
    """The same on a CPU, where what all layers share is worth preparing once."""
    key_cache, value_cache = cache.layers[layer.index]
    query, key, value = split_heads_reference(
        qkv,
        rotation,
        key_cache.shape[2],
        key_cache.shape[3],
        layer.query_norm,
        layer.key_norm,
        layer.eps,
    )
    ops.write_kv(key, value, key_cache, value_cache, batch.slots)
    mixed = ops.gather_attention(
        query, key_cache, value_cache, plan, layer.scale, layer.sliding_window
    )
    return mixed.view(qkv.shape[0], -1)


def bytes_held_twice(module: Any) -> int:
    """Bytes of the weights that `fuse` keeps in two forms on a CPU; needs no weights."""
    merged = [sum(p.numel() for p in m) for layer in module.model.layers for m in _matrices(layer)]
    twice = [n for n in merged if all(ops.forms_of(n, module.dtype))]
    head = module.lm_head.weight.numel()
    twice += [head] * ops.forms_of(head, module.dtype).packed
    return sum(twice) * int(module.dtype.itemsize)


def _matrices(layer: Any) -> list[list[torch.nn.Parameter]]:
    """What is merged of a layer: queries, keys and values; output; gate and up; down."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]
    return [[projection.weight for projection in group] for group in groups]


def _merged(parameters: list[torch.nn.Parameter], keep: bool = False) -> ops.Weight:
    """The weights [N_i, K] below each other; the parameters become views of it.

    What is packed has no plain form that they could be views of. They are then given up, of which
    shapes remain, or left as they are with `keep`.
    """
    whole = parameters[0].data
    if len(parameters) > 1:
        whole = torch.cat([parameter.data for parameter in parameters])
    weight = ops.pack_weight(whole)
    plain = weight if isinstance(weight, Tensor) else weight.plain
    if plain is None and not keep:
        plain = whole.new_full((), float("nan")).expand(whole.shape)
    if plain is not None:
        parts = plain.split([len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return weight


def _rotary_table(
    rotary: Any, dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [max_len, D]: looked up instead of computed."""
    like = torch.empty(0, dtype=dtype, device=device)
    with torch.inference_mode():
        parts = [
            rotary(
                like,
                torch.arange(start, min(start + _ROTARY_CHUNK, max_len), device=device)[None],
            )
            for start in range(0, max_len, _ROTARY_CHUNK)
        ]
    return torch.cat([cos[0] for cos, _ in parts]), torch.cat([sin[0] for _, sin in parts])


class _Recorder:
    """Attention that notes the scale and window that each layer passes."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[float, int]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        assert softcap == 0 and sinks is None, "no fusable family has these"
        self.calls[layer] = (scale, sliding_window)
        return query.transpose(0, 1).contiguous()


@torch.inference_mode()
def _recorded_calls(module: Any) -> list[tuple[float, int]]:
    """What the original layers ask of attention: attributes of their modules may be stale."""
    recorder = _Recorder()
    attach(module, recorder)
    token = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    return [recorder.calls[layer] for layer in range(len(recorder.calls))]
