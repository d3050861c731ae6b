"""EAGLE-3 heads for tests: random ones, written in each dialect, and a plain reference.

The reference is dense and keeps no cache: each step computes every row again, from the paper
(arXiv 2503.01840) and the formats alone. It shares nothing with the product.
"""

import json
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

DIALECTS = ("safeailab", "model-optimizer", "speculators", "deepspec")


@dataclass(frozen=True)
class Head:
    """A head's settings, and its random weights under the names of speculators.

    outputs: the layers of the target whose outputs it reads.
    """

    kind: str = "llama"
    hidden: int = 48
    target_hidden: int = 48
    vocab: int = 97
    draft_vocab: int = 97
    layers: int = 1
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 56
    act: str = "silu"
    eps: float = 1e-5
    base: float = 10000.0
    outputs: tuple[int, ...] = (0, 2, 3)
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    feeds_norm: bool = False
    window: int = 0
    is_wide: bool = False
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tensors:
            self.tensors.update(random_tensors(self))

    @property
    def num_features(self) -> int:
        return len(self.outputs) * self.target_hidden

    @property
    def ids(self) -> Tensor:
        """The target's id of each of the head's."""
        return torch.arange(self.draft_vocab) + self.tensors.get("d2t", torch.tensor(0))


def random_tensors(head: Head) -> dict[str, Tensor]:
    """Weights that spread logits, so that a wrong wiring changes tokens."""
    made = torch.Generator().manual_seed(head.seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=made) * 1.5 / columns**0.5

    def vector(size: int, middle: float) -> Tensor:
        return middle + 0.3 * torch.randn(size, generator=made)

    width, queries, keys = head.hidden, head.heads * head.head_dim, head.kv_heads * head.head_dim
    found = {
        "fc.weight": matrix(width, head.num_features),
        "norm.weight": vector(width, 1.0),
        "embed_tokens.weight": matrix(head.vocab, width) * 7,
        "lm_head.weight": matrix(head.draft_vocab, width) * 4,
    }
    if head.norm_before_fc:
        found["input_norm.weight"] = vector(head.num_features, 1.0)
    if head.fc_norm:
        for i in range(len(head.outputs)):
            found[f"fc_norm.{i}.weight"] = vector(head.target_hidden, 1.0)
    for i in range(head.layers):
        is_first = i == 0 or head.is_wide
        reads = 2 * width if is_first else width
        own = {
            "input_layernorm.weight": vector(width, 1.0),
            "post_attention_layernorm.weight": vector(width, 1.0),
            "self_attn.q_proj.weight": matrix(queries, reads) * 2,
            "self_attn.k_proj.weight": matrix(keys, reads) * 2,
            "self_attn.v_proj.weight": matrix(keys, reads),
            "self_attn.o_proj.weight": matrix(width, queries) * 2,
            "mlp.gate_proj.weight": matrix(head.inner, width),
            "mlp.up_proj.weight": matrix(head.inner, width),
            "mlp.down_proj.weight": matrix(width, head.inner) * 2,
        }
        if is_first:
            own["hidden_norm.weight"] = vector(width, 1.0)
        if head.kind == "qwen3":
            own["self_attn.q_norm.weight"] = vector(head.head_dim, 1.0)
            own["self_attn.k_norm.weight"] = vector(head.head_dim, 1.0)
        for part, has_bias in (("self_attn", head.attention_bias), ("mlp", head.mlp_bias)):
            for name in [n for n in own if has_bias and n.startswith(part) and "proj" in n]:
                own[name.replace("weight", "bias")] = vector(len(own[name]), 0.0)
        found |= {f"layers.{i}.{name}": tensor for name, tensor in own.items()}
    if head.draft_vocab < head.vocab:
        chosen = torch.randperm(head.vocab, generator=made)[: head.draft_vocab].sort()[0]
        found["d2t"] = chosen - torch.arange(head.draft_vocab)
    return found


def changed(config: Any, **changes: Any) -> Any:
    """A config of the product with other settings; rope: of its layers."""
    if "rope" in changes:
        changes["body"] = copy(config.body)
        changes["body"].rope_parameters = changes.pop("rope")
    return replace(config, **changes)


def save_head(
    folder: Path, head: Head, dialect: str, without: tuple[str, ...] = (), **changes: Any
) -> Path:
    """Write `head` as `dialect` does; changes: to the config. without: tensors to leave out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.clone() for n, t in head.tensors.items() if n not in without}
    if head.draft_vocab < head.vocab:
        tensors["t2d"] = torch.zeros(head.vocab, dtype=torch.bool)
        tensors["t2d"][head.ids] = True
    if dialect == "safeailab":
        names = {n: n.replace("layers.0.", "midlayer.") for n in tensors}
        tensors = {names[n]: t for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = head_config(head, dialect) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def head_config(head: Head, dialect: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model_type": head.kind,
        "hidden_size": head.hidden,
        "intermediate_size": head.inner,
        "num_hidden_layers": head.layers,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "hidden_act": head.act,
        "rms_norm_eps": head.eps,
        "vocab_size": head.vocab,
        "max_position_embeddings": 64,
        "attention_bias": head.attention_bias,
        "mlp_bias": head.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if head.window:
        body |= {"sliding_window": head.window, "layer_types": ["sliding_attention"] * head.layers}
        body |= {"use_sliding_window": True}
    flags = {
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.feeds_norm,
    }
    own = {} if head.target_hidden == head.hidden else {"target_hidden_size": head.target_hidden}
    reduced = {"draft_vocab_size": head.draft_vocab}
    inputs = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in head.outputs]}
    # A base of 10000 is what a config without rope_theta means.
    has_base = head.base != 10000.0
    if dialect == "safeailab":
        base = {"rope_theta": head.base} if has_base else {}
        return (
            {"architectures": ["LlamaForCausalLM"]} | body | flags | own | reduced | inputs | base
        )
    if dialect == "model-optimizer":
        rope = {"rope_scaling": {"rope_type": "default", "rope_theta": head.base}}
        nested = {"eagle_aux_hidden_state_layer_ids": list(head.outputs)}
        nested |= {"use_aux_hidden_state": True, "parallel_draft_step": 1}
        kind = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
        return kind | body | flags | own | reduced | rope
    if dialect == "speculators":
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": head.base}}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "t"}},
            "transformer_layer_config": body | rope,
            **(flags | own | reduced | inputs),
        }
    assert dialect == "deepspec" and head.draft_vocab == head.vocab, "DeepSpec keeps all ids"
    kind = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(head.outputs)}
    return kind | body | flags | own | {"rope_theta": head.base}


@dataclass
class Reference:
    """Rows of `head`, computed from the first on; fields may be changed to plant a fault."""

    head: Head
    dtype: torch.dtype = torch.float32
    base: float | None = None
    ids: Tensor | None = None
    feeds_norm: bool | None = None

    def weight(self, name: str) -> Tensor:
        return self.head.tensors[name].to(self.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.head.eps).rsqrt()
        return wide.to(x.dtype) * self.weight(f"{name}.weight")

    def project(self, x: Tensor, name: str) -> Tensor:
        bias = self.head.tensors.get(f"{name}.bias")
        return F.linear(
            x, self.weight(f"{name}.weight"), None if bias is None else bias.to(x.dtype)
        )

    def fuse(self, features: Tensor) -> Tensor:
        if self.head.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.head.fc_norm:
            parts = features.chunk(len(self.head.outputs), -1)
            features = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return self.project(features, "fc")

    def turned(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim] at positions 0..T-1."""
        half = x.shape[2] // 2
        base = self.head.base if self.base is None else self.base
        angle = torch.arange(len(x))[:, None] * base ** -(torch.arange(half) / half)
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def attention(self, x: Tensor, layer: str) -> Tensor:
        head, size = self.head, len(x)
        q, k, v = (
            self.project(x, f"{layer}.self_attn.{n}_proj").view(size, -1, head.head_dim)
            for n in "qkv"
        )
        if head.kind == "qwen3":
            q = self.norm(q, f"{layer}.self_attn.q_norm")
            k = self.norm(k, f"{layer}.self_attn.k_norm")
        q, k = self.turned(q), self.turned(k)
        k, v = (t.repeat_interleave(head.heads // head.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head.head_dim**-0.5
        ago = torch.arange(size)[:, None] - torch.arange(size)
        seen = (ago >= 0) & (ago < (head.window or size))
        weights = scores.float().masked_fill(~seen, float("-inf")).softmax(-1).to(x.dtype)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)
        return self.project(mixed, f"{layer}.self_attn.o_proj")

    def rows(self, given: Tensor, following: Tensor) -> Tensor:
        """The outputs [T, H] of rows that read `given` [T, H] and tokens `following` [T]."""
        act = F.silu if self.head.act == "silu" else lambda x: F.gelu(x, approximate="tanh")
        embeds = self.weight("embed_tokens.weight")[following]
        hidden = given
        for i in range(self.head.layers):
            layer, residual = f"layers.{i}", hidden
            if i == 0 or self.head.is_wide:
                hidden = self.norm(hidden, f"{layer}.hidden_norm")
                if i == 0 and self.head.norm_before_residual:
                    residual = hidden
                x = torch.cat((self.norm(embeds, f"{layer}.input_layernorm"), hidden), -1)
            else:
                x = self.norm(hidden, f"{layer}.input_layernorm")
            hidden = residual + self.attention(x, layer)
            x = self.norm(hidden, f"{layer}.post_attention_layernorm")
            gated = act(self.project(x, f"{layer}.mlp.gate_proj"))
            inner = gated * self.project(x, f"{layer}.mlp.up_proj")
            hidden = hidden + self.project(inner, f"{layer}.mlp.down_proj")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(self.norm(hidden, "norm"), "lm_head")

    def chain(self, features: Tensor, tokens: list[int], k: int) -> tuple[list[int], Tensor]:
        """k greedy proposals after `tokens`, and the logits [k, Vd] that they are drawn from.

        features: [n - 1, F], of all tokens but the last.
        """
        given, following = self.fuse(features.to(self.dtype)), torch.tensor(tokens[1:])
        ids = self.head.ids if self.ids is None else self.ids
        feeds_norm = self.head.feeds_norm if self.feeds_norm is None else self.feeds_norm
        proposed: list[int] = []
        rows = []
        for _ in range(k):
            out = self.rows(given, following)[-1:]
            rows.append(self.logits(out))
            proposed.append(int(ids[rows[-1].argmax()]))
            given = torch.cat((given, self.norm(out, "norm") if feeds_norm else out))
            following = torch.cat((following, torch.tensor(proposed[-1:])))
        return proposed, torch.cat(rows)
