"""Decoder layers of the llama kind with their work in few, large kernels.

A model's meaning stays transformers': only layers, the rotary table and the head are replaced, and
only in classes whose code is known to compute what is computed here; every replacement is tested
against the original. A layer is five kernels: norm and merged q, k, v; rotary embedding, KV write
and attention; output projection and residual; norm and gated MLP; down projection and residual.
Legend: T packed tokens, D features of a head.
"""

from typing import Any

import torch
from specdec_kernels import ops
from specdec_kernels.linear import Normed
from specdec_kernels.rope_attention import split_heads_reference

from specdec_cli.models.attention import PagedAttention, attach, attached

# Their layers differ in biases, per-head norms and windows alone.
_FUSABLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_ROTARY_CHUNK = 1 << 16  # positions


def fuse(module: Any, max_len: int) -> bool:
    """Replace the parts of a loaded model that have a fused form; says whether there were any.

    max_len: positions that passes will ask for. Logits stay the same but for rounding.
    """
    if not is_fusable(module):
        return False
    decoder = module.model
    layers = decoder.layers
    for index, (scale, window) in enumerate(_recorded_calls(module)):
        following = layers[index + 1] if index + 1 < len(layers) else None
        layers[index] = FusedLayer(layers[index], following, index, scale, window)
    decoder.rotary_emb = RotaryTable(decoder.rotary_emb, module.dtype, module.device, max_len)
    module.lm_head = FusedHead(decoder.norm, module.lm_head)
    decoder.norm = torch.nn.Identity()
    return True


def is_fusable(module: Any) -> bool:
    """Whether `fuse` would replace anything; needs no weights."""
    layers = getattr(getattr(module, "model", None), "layers", None)
    return layers is not None and all(_is_fusable(layer, module.config) for layer in layers)


class FusedLayer(torch.nn.Module):
    """One decoder layer; called by transformers' model as the layer that it replaces."""

    def __init__(
        self, layer: Any, following: Any | None, index: int, scale: float, sliding_window: int
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        heads = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.index = index
        self.scale = scale
        self.sliding_window = sliding_window
        self.head_dim = int(attention.head_dim)
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.attention_norm = layer.input_layernorm.weight
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.next_norm = None if following is None else following.input_layernorm.weight
        self.query_norm, self.key_norm = (
            norm.weight if norm is not None else None
            for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        )
        self.qkv = _merged([h.weight for h in heads])
        self.qkv_bias = None if heads[0].bias is None else _merged([h.bias for h in heads])
        self.output, self.output_bias = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up = _merged([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down = mlp.down_proj.weight

    def forward(
        self,
        hidden_states: torch.Tensor | Normed,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: Any,
    ) -> torch.Tensor | Normed:
        """hidden_states: [1, T, hidden] into the first layer and out of the last; between layers
        the sum of squares that the next norm needs goes along. position_embeddings: cos and sin,
        each [1, T, D]."""
        x = hidden_states
        if isinstance(x, torch.Tensor):
            x = ops.norm(x[0], self.attention_norm, self.eps)
        qkv = ops.norm_linear(x, self.qkv, self.qkv_bias)
        mixed = self._attend(qkv, position_embeddings[0][0], position_embeddings[1][0])
        x = ops.linear_add_norm(
            mixed, self.output, x.hidden, self.mlp_norm, self.eps, self.output_bias
        )
        inner = ops.norm_gate_up(x, self.gate_up)
        if self.next_norm is None:
            return ops.linear_add(inner, self.down, x.hidden)[None]
        return ops.linear_add_norm(inner, self.down, x.hidden, self.next_norm, self.eps)

    def _attend(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate, store keys and values, attend: [T, H * D]."""
        attention = attached(self)
        assert isinstance(attention, PagedAttention) and attention.batch is not None
        batch = attention.batch
        key_cache, value_cache = attention.cache.layers[self.index]
        if batch.plan is None:
            return ops.rope_attention(
                qkv,
                cos,
                sin,
                key_cache,
                value_cache,
                batch.slots,
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
                self.scale,
                batch.max_query_len,
                self.sliding_window,
                query_norm=self.query_norm,
                key_norm=self.key_norm,
                eps=self.eps,
            )
        query, key, value = split_heads_reference(
            qkv,
            cos,
            sin,
            key_cache.shape[2],
            self.head_dim,
            self.query_norm,
            self.key_norm,
            self.eps,
        )
        ops.write_kv(key, value, key_cache, value_cache, batch.slots)
        mixed = ops.gather_attention(
            query, key_cache, value_cache, batch.plan, self.scale, self.sliding_window
        )
        return mixed.view(qkv.shape[0], -1)


class RotaryTable(torch.nn.Module):
    """Cosines and sines of every position, looked up instead of computed in each pass."""

    def __init__(self, rotary: Any, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        super().__init__()
        like = torch.empty(0, dtype=dtype, device=device)
        with torch.inference_mode():
            parts = [
                rotary(
                    like,
                    torch.arange(start, min(start + _ROTARY_CHUNK, max_len), device=device)[None],
                )
                for start in range(0, max_len, _ROTARY_CHUNK)
            ]
        self.cos = torch.cat([cos[0] for cos, _ in parts])
        self.sin = torch.cat([sin[0] for _, sin in parts])

    def forward(
        self, _: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: int64 [1, T]. Returns cos and sin, each [1, T, D]."""
        positions = position_ids[0]
        return self.cos[positions][None], self.sin[positions][None]


class FusedHead(torch.nn.Module):
    """The last norm and the vocabulary head; the norm is then applied to wanted rows alone."""

    def __init__(self, norm: Any, head: Any) -> None:
        super().__init__()
        self.norm_weight = norm.weight
        self.eps = float(norm.variance_epsilon)
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [1, T, hidden]; returns logits [1, T, vocabulary]."""
        x = ops.norm(hidden_states[0], self.norm_weight, self.eps)
        return ops.norm_linear(x, self.weight, self.bias)[None]


def _is_fusable(layer: Any, config: Any) -> bool:
    if type(layer).__name__ not in _FUSABLE or getattr(config, "hidden_act", None) != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    biased = any(p.bias is not None for p in (layer.mlp.gate_proj, layer.mlp.down_proj))
    return not biased and rope.get("partial_rotary_factor", 1.0) == 1.0


def _merged(parts: list[torch.Tensor]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.cat([p.data for p in parts]), requires_grad=False)


class _Recorder:
    """Attention that notes the scale and window that each layer passes."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[float, int]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
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
