"""Layers of the llama and qwen3 kind in a head: their settings, their tensors, their fused form.

Names of tensors are those of transformers. Legend: H width of the residual stream, D features of an
attention head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.models.attention import Call
from specdec_cli.models.fused_layer import FusedLayer
from specdec_cli.models.heads.base import HEAD
from specdec_cli.models.refusals import Indivisible
from specdec_cli.models.rotary_tables import table_of
from specdec_cli.models.weights import Part

# The parts of each product of a layer, in the order in which they are merged.
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)
# Of products that ranks add up: only the first rank's pass adds them.
SUMMED_BIAS = re.compile(r"[.](o_proj|down_proj)[.]bias$")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """The settings that all layers of a head share.

    hidden_size: H. head_dim: D. activation: as `ops.norm_gate_up` names it. rope: transformers'
    `rope_parameters`; the head's own, never the target's. windows: sliding window of each layer, 0
    for none. has_head_norms: whether queries and keys are normed, as in qwen3.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int, ...]
    attention_bias: bool
    mlp_bias: bool
    has_head_norms: bool

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def cache_layers(self, parallel: TensorParallel) -> list[LayerShape]:
        """This rank's part of each layer's entry in a cache."""
        heads = max(1, self.num_kv_heads // parallel.size)
        return [LayerShape(heads, self.head_dim, self.head_dim)] * self.count

    def shapes(self, index: int, reads: int) -> dict[str, tuple[int, ...]]:
        """The tensors of layer `index`, whose q, k and v read so many numbers."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        found: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (queries, reads),
            "self_attn.k_proj.weight": (keys, reads),
            "self_attn.v_proj.weight": (keys, reads),
            "self_attn.o_proj.weight": (width, queries),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
        }
        if self.has_head_norms:
            found |= {f"self_attn.{side}_norm.weight": (self.head_dim,) for side in "qk"}
        for part, has_bias in (("attn", self.attention_bias), ("mlp", self.mlp_bias)):
            if has_bias:
                products = [n for n in found if n.endswith("proj.weight") and part in n]
                found |= {f"{n.removesuffix('weight')}bias": found[n][:1] for n in products}
        return {f"layers.{index}.{name}": shape for name, shape in found.items()}

    def products(self) -> list[list[str]]:
        """The names of the matrices that each of the layers' products is made of."""
        return [
            [f"layers.{index}.{part}.weight" for part in parts]
            for index in range(self.count)
            for parts in (_QKV, _OUTPUT, _GATE_UP, _DOWN)
        ]

    def parts(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], parallel: TensorParallel
    ) -> dict[str, Part]:
        """See `HeadConfig.parts`. name: of the checkpoint. shapes: of all of the head's tensors.

        Attention is split by heads, the MLP by its inner width, and the matrix of logits by ids.
        Ranks that outnumber the key and value heads hold the same ones.
        """
        if (size := parallel.size) == 1:
            return {}
        if self.num_heads % size:
            raise Indivisible(name, f"{self.num_heads} attention heads", size)
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise Indivisible(name, f"{self.num_kv_heads} key and value heads", size)
        if self.intermediate_size % size:
            raise Indivisible(name, f"MLP of width {self.intermediate_size}", size)
        queries = parallel.share(self.num_heads * self.head_dim)
        first = parallel.rank * self.num_kv_heads // size * self.head_dim
        keys = first, first + max(1, self.num_kv_heads // size) * self.head_dim
        inner = parallel.share(self.intermediate_size)
        columns = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        columns |= {"gate_proj": inner, "up_proj": inner}
        rows = {"o_proj": queries, "down_proj": inner}
        found = {}
        for tensor, shape in shapes.items():
            product = tensor.rpartition(".")[0].rpartition(".")[2]
            if product in columns:
                found[tensor] = Part(0, *columns[product], shape)
            elif product in rows and tensor.endswith("weight"):
                found[tensor] = Part(1, *rows[product], shape)
            elif tensor == HEAD:
                found[tensor] = Part(0, *parallel.share(shape[0]), shape)
        return found

    def row_numbers(self, parallel: TensorParallel, *, gathers: bool, fusing: int = 0) -> int:
        """See `HeadConfig.row_numbers`. fusing: numbers that the features of a row take."""
        width, size = self.hidden_size, parallel.size
        mixed = self.num_heads // size * self.head_dim
        qkv = mixed + 2 * max(1, self.num_kv_heads // size) * self.head_dim
        common = 2 * self.head_dim + 3 * width  # the embedding, it normed, the hidden state
        attention = 3 * width + (2 * qkv + 5 * mixed if gathers else qkv + 2 * mixed)
        mlp = 2 * width + 3 * (self.intermediate_size // size)
        layer = attention + mlp if gathers else max(attention, mlp)
        return common + max(layer, fusing)

    def rotary_table(
        self, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max_len, D] of the head's own rotary embedding."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        settings = LlamaConfig(
            hidden_size=self.num_heads * self.head_dim,
            num_attention_heads=self.num_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope),
        )
        rotary = LlamaRotaryEmbedding(settings).to(device)
        return table_of(rotary, (), dtype, device, max_len)

    def fused(self, tensors: Mapping[str, Tensor]) -> list[FusedLayer]:
        """The layers with their products merged; the tensor `norm.weight` follows the last."""
        names = [f"layers.{index}.input_layernorm.weight" for index in range(1, self.count)]
        following = [tensors[name] for name in (*names, "norm.weight")]
        return [self._fused(tensors, index, norm) for index, norm in enumerate(following)]

    def _fused(
        self, tensors: Mapping[str, Tensor], index: int, following_norm: Tensor
    ) -> FusedLayer:
        prefix = f"layers.{index}."

        def joined(kind: str, names: tuple[str, ...]) -> Tensor | None:
            found = [tensors[n] for name in names if (n := f"{prefix}{name}.{kind}") in tensors]
            return torch.cat(found) if found else None

        def product(names: tuple[str, ...]) -> ops.Weight:
            weight = joined("weight", names)
            assert weight is not None
            return ops.pack_weight(weight)

        return FusedLayer(
            index=index,
            call=Call(
                scale=self.head_dim**-0.5,
                sliding_window=self.windows[index],
                softcap=0.0,
                sinks=None,
            ),
            turn=0,
            activation=self.activation,
            eps=self.eps,
            attention_norm=tensors[f"{prefix}input_layernorm.weight"],
            post_attention_norm=None,
            mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
            post_mlp_norm=None,
            following_norm=following_norm,
            query_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
            key_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
            qkv=product(_QKV),
            qkv_bias=joined("bias", _QKV),
            output=product(_OUTPUT),
            output_bias=joined("bias", _OUTPUT),
            gate_up=product(_GATE_UP),
            down=product(_DOWN),
            gate_up_bias=joined("bias", _GATE_UP),
            down_bias=joined("bias", _DOWN),
        )
